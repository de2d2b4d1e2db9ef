//! `swiglu explain`: how a problem would be computed, and what it costs at least.

use std::io::Write;

use anyhow::{Context, bail};
use clap::{Args, ValueEnum};
use serde::Serialize;
use swiglu::{
    Activation, Arrangement, DType, Device, Element, Explanation, Op, Orientation, Problem,
    QuantizedType, QuantizedTypes, WeightLayout, with_dtype,
};

use crate::Verdict;
use crate::args::{DeviceArgs, LayerOp, MathArgs, WeightArgs};
use crate::ceilings;
use crate::quantized::Blocks;
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
    #[arg(long, value_name = "M", default_value_t = 1, value_parser = crate::args::extent, allow_negative_numbers = true)]
    m: usize,
    /// K, input features
    #[arg(long, value_name = "K", required_unless_present = "weights", conflicts_with = "weights",
        value_parser = crate::args::extent, allow_negative_numbers = true)]
    hidden: Option<usize>,
    /// H, intermediate features
    #[arg(long, value_name = "H", required_unless_present = "weights", conflicts_with = "weights",
        value_parser = crate::args::extent, allow_negative_numbers = true)]
    intermediate: Option<usize>,
    /// Quantised weights of this type, in a shape: q8_0, q4_0, q4_1, q5_0, q5_1, q4_k, q5_k, q6_k, or on
    /// CUDA i8, f8_e4m3, f8_e4m3_128x128
    #[arg(long, value_name = "TYPE", conflicts_with = "weights")]
    weights_type: Option<QuantizedType>,
    /// Decode quantised weights of the file instead of computing with them as they are
    #[arg(long, requires = "weights")]
    decode_weights: bool,
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

impl ExplainedOp {
    /// The same of what has weights.
    fn of_layer(self) -> Option<LayerOp> {
        match self {
            ExplainedOp::Activation => None,
            ExplainedOp::GatedLinear => Some(LayerOp::GatedLinear),
            ExplainedOp::Mlp => Some(LayerOp::Mlp),
        }
    }
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
    let mut decoded_because = None;
    let problem = match args.weights.load()? {
        Some(weights) => {
            let dtype = args.math.dtype.unwrap_or(weights.resolved_dtype());
            let weights = weights.numerics(args.math.numerics(dtype));
            let weights = match args.math.activation {
                Some(activation) => weights.activation(activation),
                None => weights,
            };
            let weights = match args.decode_weights {
                true => weights.decoded(),
                false => weights,
            };
            let weights = weights.dtype(dtype);
            let blocks = match args.op.of_layer() {
                Some(op) => Blocks::of_file(&weights, op, &device)?,
                None => Err(None),
            };
            match blocks {
                Ok(blocks) => with_dtype!(dtype, T => anyhow::Ok(blocks.problem::<T>(args.m)))?,
                Err(why) => {
                    decoded_because = why;
                    with_dtype!(dtype, T => of_file::<T>(args, &weights))?
                }
            }
        }
        None => of_shape(args, &device)?,
    };
    let explanation = device.explain(problem, None);
    let explanation = match decoded_because {
        Some(why) => explanation.with_decoded_weights(&why),
        None => explanation,
    };
    let rates = ceilings::rates(&device, &explanation.problem)?;
    let floor = Floor::of(&explanation.problem, Heat::Cold, rates);
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

fn of_file<T: Element>(
    args: &ExplainArgs,
    weights: &swiglu::MlpWeights,
) -> anyhow::Result<Problem> {
    let host = weights.host::<T>()?;
    Ok(match args.op {
        ExplainedOp::Activation => activation_of(host.gated_linear().problem(args.m)),
        ExplainedOp::GatedLinear => host.gated_linear().problem(args.m),
        ExplainedOp::Mlp => host.mlp()?.problem(args.m),
    })
}

fn of_shape(args: &ExplainArgs, device: &Device) -> anyhow::Result<Problem> {
    let of_a_file = args.decode_weights.then_some("--decode-weights");
    if let Some(option) = of_a_file.or_else(|| args.weights.of_a_file()) {
        bail!(
            "{option} is of a layer in a file: give --weights FILE instead of --hidden and \
             --intermediate, or leave it out"
        );
    }
    let layout = layout_of_shape(args)?;
    let dtype = args.math.dtype.unwrap_or(DType::F32);
    let layer = |op| Problem {
        op,
        m: args.m,
        hidden: args.hidden.unwrap_or_default(),
        intermediate: args.intermediate.unwrap_or_default(),
        dtype,
        activation: args.math.activation.unwrap_or(Activation::SWIGLU),
        numerics: args.math.numerics(dtype),
        layout,
        bias: false,
        quantized: None,
    };
    let problem = match args.op {
        ExplainedOp::Activation => Problem { layout, ..activation_of(layer(Op::Activation)) },
        ExplainedOp::GatedLinear => layer(Op::GatedLinear),
        ExplainedOp::Mlp => layer(Op::Mlp),
    };
    let Some(kind) = args.weights_type else { return Ok(problem) };
    let inputs = match problem.op {
        Op::Activation => bail!("--weights-type {kind}: the activation has no weights"),
        Op::GatedLinear => vec![problem.hidden],
        Op::Mlp => vec![problem.hidden, problem.intermediate],
    };
    device.expect_quantized(problem.op, dtype, kind).with_context(|| given(kind))?;
    if let Some(n) = inputs.iter().find(|n| !n.is_multiple_of(kind.elements())) {
        bail!("--weights-type {kind}: {n} inputs are not whole blocks of {}", kind.elements());
    }
    Ok(Problem { quantized: Some(QuantizedTypes::of(problem.op, kind)), ..problem })
}

/// How gate and up lie, as it was given.
fn layout_of_shape(args: &ExplainArgs) -> anyhow::Result<WeightLayout> {
    let (orientation, arrangement) = (args.weights.orientation, args.weights.arrangement);
    if let (Some(orientation), ExplainedOp::Activation) = (orientation, args.op) {
        bail!("--orientation {orientation}: the activation has no weights; leave it out");
    }
    let default = WeightLayout::HF;
    let layout = WeightLayout {
        orientation: orientation.unwrap_or(default.orientation),
        arrangement: arrangement.unwrap_or(default.arrangement),
    };
    layout.arrangement.validate(args.intermediate.unwrap_or_default())?;
    let interleaved = matches!(layout.arrangement, Arrangement::Interleaved { .. });
    if let Some(kind) =
        args.weights_type.filter(|_| layout.orientation == Orientation::InOut || interleaved)
    {
        bail!(
            "--weights-type {kind} as {layout}: quantised weights run along the inputs, with gate and up \
             each in one piece; expected --orientation out-in, and --arrangement separate, gate-first or up-first"
        );
    }
    Ok(layout)
}

fn given(kind: QuantizedType) -> String {
    format!("--weights-type {kind}")
}

/// The activation of a layer by itself, over separate gate and up.
fn activation_of(layer: Problem) -> Problem {
    Problem { op: Op::Activation, hidden: 0, layout: WeightLayout::HF, bias: false, ..layer }
}
