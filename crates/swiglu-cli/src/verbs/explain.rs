//! `swiglu explain`: how a problem would be computed, and what it costs at least.

use std::io::Write;

use clap::{Args, ValueEnum};
use serde::Serialize;
use swiglu::{
    Activation, Arrangement, Device, Element, Explanation, GatedActivation, Path, with_dtype,
};

use crate::Verdict;
use crate::args::{DeviceArgs, LayerOp, MathArgs, WeightArgs};
use crate::ceilings;
use crate::layer::Params;
use crate::random::SyntheticLayer;
use crate::roofline::Floor;
use crate::table;
use crate::terminal::Terminal;
use crate::timing::Heat;

#[derive(Debug, Args)]
pub(crate) struct ExplainArgs {
    /// The operation
    #[arg(long, value_name = "NAME", default_value = "mlp")]
    op: ExplainedOp,
    /// Tokens
    #[arg(long, value_name = "M", default_value_t = 1)]
    m: usize,
    /// K, input features
    #[arg(long, value_name = "K", required_unless_present = "weights", conflicts_with = "weights")]
    hidden: Option<usize>,
    /// H, intermediate features
    #[arg(long, value_name = "H", required_unless_present = "weights", conflicts_with = "weights")]
    intermediate: Option<usize>,
    #[command(flatten)]
    weights: WeightArgs,
    #[command(flatten)]
    math: MathArgs,
    #[command(flatten)]
    device: DeviceArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum ExplainedOp {
    /// gate, up → h = act(gate, up)
    Activation,
    /// x → h = act(x·Wg + bg, x·Wu + bu)
    GatedLinear,
    /// x → y = h·Wd + bd
    Mlp,
}

/// An explanation, and the floor under its time by what this machine can do now.
#[derive(Serialize)]
struct Document {
    #[serde(flatten)]
    explanation: Explanation,
    floor: Floor,
}

pub(crate) fn explain(args: &ExplainArgs, terminal: &mut Terminal) -> anyhow::Result<Verdict> {
    let device = args.device.open()?;
    let explanation = match args.weights.load()? {
        Some(weights) => {
            let dtype = args.math.dtype.unwrap_or(weights.resolved_dtype());
            let weights = weights.numerics(args.math.numerics(dtype));
            let weights = match args.math.activation {
                Some(activation) => weights.activation(activation),
                None => weights,
            };
            with_dtype!(dtype, T => of_file::<T>(args, &device, &weights))?
        }
        None => {
            let dtype = args.math.dtype.unwrap_or(swiglu::DType::F32);
            with_dtype!(dtype, T => of_shape::<T>(args, &device))?
        }
    };
    let limits = ceilings::measure(&device)?;
    let floor = Floor::of(&explanation.problem, Heat::Cold, &limits, limits.bandwidth);
    if terminal.json() {
        terminal.print_json(&Document { explanation, floor })?;
    } else {
        writeln!(terminal, "{explanation}")?;
        let (time, bound) = (table::time(floor.us), floor.bound.name());
        writeln!(
            terminal,
            "floor       {time} on this machine, bound by {bound}, nothing in cache"
        )?;
    }
    Ok(Verdict::Passed)
}

fn of_params<T: Element>(
    params: &Params<'_, T>,
    device: &Device,
    m: usize,
) -> anyhow::Result<Explanation> {
    Ok(params.pack(device, Path::Fused)?.explain(m))
}

fn of_file<T: Element>(
    args: &ExplainArgs,
    device: &Device,
    weights: &swiglu::MlpWeights,
) -> anyhow::Result<Explanation> {
    let host = weights.host::<T>()?;
    match args.op {
        ExplainedOp::Activation => {
            let intermediate = weights.stored().intermediate();
            of_activation::<T>(args, device, intermediate, weights.resolved_activation()?)
        }
        ExplainedOp::GatedLinear => {
            of_params(&Params::GatedLinear(host.gated_linear()), device, args.m)
        }
        ExplainedOp::Mlp => of_params(&Params::Mlp(host.mlp()?), device, args.m),
    }
}

fn of_shape<T: Element>(args: &ExplainArgs, device: &Device) -> anyhow::Result<Explanation> {
    let (hidden, intermediate) =
        (args.hidden.unwrap_or_default(), args.intermediate.unwrap_or_default());
    let activation = args.math.activation.unwrap_or(Activation::SWIGLU);
    let op = match args.op {
        ExplainedOp::Activation => {
            return of_activation::<T>(args, device, intermediate, activation);
        }
        ExplainedOp::GatedLinear => LayerOp::GatedLinear,
        ExplainedOp::Mlp => LayerOp::Mlp,
    };
    let layer = SyntheticLayer::<T>::zeros(op, hidden, intermediate)?;
    of_params(&layer.params(activation, args.math.numerics(T::DTYPE))?, device, args.m)
}

fn of_activation<T: Element>(
    args: &ExplainArgs,
    device: &Device,
    intermediate: usize,
    activation: Activation,
) -> anyhow::Result<Explanation> {
    let act = GatedActivation::new(device, activation).with_numerics(args.math.numerics(T::DTYPE));
    Ok(act.explain(args.m, intermediate, T::DTYPE, Arrangement::Separate)?)
}
