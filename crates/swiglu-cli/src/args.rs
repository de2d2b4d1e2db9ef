//! Options that several verbs share.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::str::FromStr;

use anyhow::{Context, Result, bail};
use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use serde_json::{Value, json};
use swiglu::{
    Activation, CoreError, CpuOptions, DType, Device, ExpMode, Isa, MlpWeights, Numerics,
    QuantizedType, Rounding,
};
use swiglu_core::ACTIVATION_NAMES;
use swiglu_cuda::CudaOptions;
use swiglu_cuda::tuning::TuningOptions;
use swiglu_lab::{Case, CaseOp, DeviceKind, MAX_EXTENT};

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Device")]
pub(crate) struct DeviceArgs {
    /// Where to run: best, cpu, cuda or cuda:N; best is the first CUDA device, else the CPU
    #[arg(long, value_name = "NAME", default_value = "best", value_parser = device_name)]
    device: DeviceName,
    /// CPU: force an instruction set: portable, avx2, avx512, avx512-bf16 or amx-bf16
    #[arg(long, value_name = "NAME")]
    pub(crate) isa: Option<Isa>,
    /// CPU: threads that take part in one call [default: one per processor]
    #[arg(long, value_name = "N", value_parser = whole(0..=usize::MAX))]
    pub(crate) threads: Option<usize>,
    /// CUDA: let f32 products round their inputs to TF32, 11 significant bits
    #[arg(long)]
    tf32: bool,
}

impl DeviceArgs {
    pub(crate) fn open(&self) -> Result<Device> {
        self.open_with_tuning(&TuningOptions::default())
    }

    /// What was measured of a CUDA device is read there, and rates of it are kept there.
    pub(crate) fn open_with_tuning(&self, tuning: &TuningOptions) -> Result<Device> {
        let Self { isa, threads, .. } = *self;
        let of_the_cpu = isa.is_some() || threads.is_some();
        let cuda = |device| {
            let options = CudaOptions::new(device).with_tf32(self.tf32);
            Device::cuda_with(&options.with_tuning(tuning.clone()))
        };
        let device = match self.device {
            DeviceName::Cuda(_) if of_the_cpu => {
                bail!("--isa and --threads are of the CPU: leave them out, or give --device cpu")
            }
            DeviceName::Cuda(device) => cuda(device)?,
            DeviceName::Best if !of_the_cpu => match Device::best()? {
                Device::Cuda(best) if self.tf32 || *tuning != TuningOptions::default() => {
                    cuda(best.ordinal())?
                }
                device => device,
            },
            DeviceName::Best | DeviceName::Cpu => {
                Device::cpu_with(CpuOptions::default().with_isa(isa).with_threads(threads))?
            }
        };
        if self.tf32 && !matches!(device, Device::Cuda(_)) {
            bail!("--tf32 is of CUDA devices, and this would run on {device}: leave it out");
        }
        Ok(device)
    }

    /// Whether the choice of the device was left to the program.
    pub(crate) fn is_best(&self) -> bool {
        self.device == DeviceName::Best
    }

    /// What a process is told that computes on this device in our place.
    pub(crate) fn peer_options(&self) -> Result<Value> {
        if let DeviceName::Cuda(device @ 1..) = self.device {
            bail!(
                "peers use the first CUDA device, given cuda:{device}: choose the device with \
                 CUDA_VISIBLE_DEVICES={device} and --device cuda"
            );
        }
        let mut options = json!({ "isa": self.isa, "threads": self.threads, "tf32": self.tf32 });
        let given = |value: &Value| !value.is_null() && *value != false;
        options.as_object_mut().into_iter().for_each(|all| all.retain(|_, value| given(value)));
        Ok(options)
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum DeviceName {
    Best,
    Cpu,
    Cuda(usize),
}

fn device_name(s: &str) -> Result<DeviceName, CoreError> {
    let named = match s {
        "best" => Some(DeviceName::Best),
        "cpu" => Some(DeviceName::Cpu),
        "cuda" => Some(DeviceName::Cuda(0)),
        _ => s.strip_prefix("cuda:").and_then(|n| n.parse().ok()).map(DeviceName::Cuda),
    };
    let choices = "best, cpu, cuda, cuda:N".into();
    named.ok_or_else(|| CoreError::UnknownName { what: "device", given: s.into(), choices })
}

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Arithmetic")]
pub(crate) struct MathArgs {
    /// Element type: f32, f16 or bf16
    #[arg(long, value_name = "TYPE")]
    pub(crate) dtype: Option<DType>,
    /// Where values are rounded: fused, pre_round or eager
    #[arg(long, value_name = "MODE")]
    numerics: Option<Rounding>,
    /// How the exponential is evaluated: precise or fast [default: fast for f16 and bf16, unless
    /// rounding is eager]
    #[arg(long, value_name = "MODE")]
    exp: Option<ExpMode>,
    /// A token's result has the same bits whatever tokens are computed with it, and however many: products
    /// are summed in one order for every number. On a CUDA device quantised weights are then decoded
    #[arg(long)]
    pub(crate) batch_invariant: bool,
    #[arg(long, value_name = "NAME", help = activations())]
    pub(crate) activation: Option<Activation>,
}

pub(crate) fn activations() -> String {
    format!("The activation: {ACTIVATION_NAMES} [default: that of the model, else swiglu]")
}

/// The help of `--weights-type`: what devices compute with.
pub(crate) fn weights_types() -> String {
    let [cpu, cuda] =
        [swiglu_cpu::quantized_types(), swiglu_cuda::quantized_types()].map(|types| {
            let names: Vec<_> = types.iter().map(|kind| kind.name().to_lowercase()).collect();
            names.join(", ")
        });
    format!("Random quantised weights of this type: on the CPU {cpu}, on CUDA devices {cuda}")
}

impl MathArgs {
    /// The layer of a file as it was asked for, in an element type.
    pub(crate) fn layer(&self, mut weights: MlpWeights, dtype: DType) -> MlpWeights {
        if let Some(activation) = self.activation {
            weights = weights.activation(activation);
        }
        weights.numerics(self.numerics(dtype)).dtype(dtype)
    }

    /// A case as it was asked for.
    pub(crate) fn case(&self, case: Case) -> Case {
        let activation = self.activation.unwrap_or(Activation::SWIGLU);
        Case { activation, numerics: self.numerics(case.dtype), ..case }
    }

    /// The numerics for an element type. `eager` reproduces another program's results, so there
    /// the exponential is that program's unless asked for otherwise.
    fn numerics(&self, dtype: DType) -> Numerics {
        let default = Numerics::default_for(dtype);
        let rounding = self.numerics.unwrap_or(default.rounding);
        let exp = match rounding {
            Rounding::Eager => ExpMode::Precise,
            Rounding::Fused | Rounding::PreRound => default.exp,
        };
        let numerics = Numerics::precise(rounding).with_exp(self.exp.unwrap_or(exp));
        if self.batch_invariant { numerics.with_batch_invariance() } else { numerics }
    }
}

/// Reads one of these operations.
pub(crate) fn one_of<const N: usize>(
    ops: [CaseOp; N],
) -> impl TypedValueParser<Value = CaseOp> + use<N> {
    let named = move |name: String| ops.into_iter().find(|op| op.name() == name);
    // Whoever has passed the first is among them.
    PossibleValuesParser::new(ops.map(CaseOp::name))
        .try_map(move |name| named(name).ok_or("no operation of this name"))
}

/// Reads an operation with weights, where no other will do.
pub(crate) fn layer_op() -> impl TypedValueParser<Value = CaseOp> {
    one_of([CaseOp::GatedLinear, CaseOp::Mlp])
}

/// What the lab calls a device.
pub(crate) fn kind(device: &Device) -> DeviceKind {
    match device {
        Device::Cuda(_) => DeviceKind::Cuda,
        _ => DeviceKind::Cpu,
    }
}

/// Refuses `--weights-type` for a case that nothing on the device computes with such weights.
pub(crate) fn expect_quantized(device: &Device, case: &Case, kind: QuantizedType) -> Result<()> {
    if let Some(why) = case.refusal_of(kind) {
        bail!("--weights-type {kind}: {why}; choose what has such weights, or leave it out");
    }
    let Some(op) = case.op.op() else { return Ok(()) };
    let option = || format!("--weights-type {kind}");
    device.expect_quantized(op, case.dtype, kind).with_context(option)
}

pub(crate) fn expect_no_hidden(op: CaseOp, hidden: Option<usize>) -> Result<()> {
    match hidden.filter(|_| !op.has_weights()) {
        Some(k) => bail!("--hidden {k}: the {op} has no weights and no hidden size; leave it out"),
        None => Ok(()),
    }
}

/// A number of rows or columns of a problem that is made up.
pub(crate) fn extent(s: &str) -> Result<usize, CoreError> {
    within(s, &(1..=MAX_EXTENT), "whole number")
}

/// Several of them, separated by commas.
pub(crate) fn extents(s: &str) -> Result<Vec<usize>, CoreError> {
    s.split(',').map(extent).collect()
}

pub(crate) fn seconds(s: &str) -> Result<f64, CoreError> {
    within(s, &(0.0..=3600.0), "number")
}

pub(crate) fn fraction(s: &str) -> Result<f64, CoreError> {
    within(s, &(0.0..=0.99), "number")
}

/// Reads a whole number of these.
pub(crate) fn whole<N: FromStr + PartialOrd + Display + Clone + Send + Sync + 'static>(
    range: RangeInclusive<N>,
) -> impl Fn(&str) -> Result<N, CoreError> + Clone + Send + Sync {
    move |s| within(s, &range, "whole number")
}

/// Every number of an option is read here.
fn within<N: FromStr + PartialOrd + Display>(
    s: &str,
    range: &RangeInclusive<N>,
    kind: &str,
) -> Result<N, CoreError> {
    let number = s.parse().ok().filter(|number| range.contains(number));
    let expected = || format!("a {kind} from {} to {}", range.start(), range.end());
    number.ok_or_else(|| out_of_range("number", s, &expected()))
}

/// That a text is no number, or not these numbers.
pub(crate) fn out_of_range(what: &'static str, given: &str, expected: &str) -> CoreError {
    CoreError::OutOfRange { what, given: given.into(), expected: expected.into() }
}
