//! Options that several verbs share.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, bail};
use clap::{Args, ValueEnum};
use serde_json::Value;
use swiglu::{
    Activation, Arrangement, CoreError, CpuOptions, DType, Device, ExpMode, Isa, LoadOptions,
    MlpWeights, Numerics, Op, Orientation, QuantizedType, Rounding, TensorNames,
};
use swiglu_cuda::CudaOptions;
use swiglu_lab::{Case, CaseOp, DeviceKind, MAX_EXTENT};

/// Which device, and how much of it.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Device")]
pub(crate) struct DeviceArgs {
    /// Where to run: best, cpu, cuda or cuda:N; best is the first CUDA device, else the CPU
    #[arg(long, value_name = "NAME", default_value = "best")]
    device: DeviceName,
    /// CPU: force an instruction set: portable, avx2, avx512, avx512-bf16 or amx-bf16
    #[arg(long, value_name = "NAME")]
    pub(crate) isa: Option<Isa>,
    /// CPU: threads that take part in one call [default: one per processor]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) threads: Option<usize>,
    /// CUDA: let f32 products round their inputs to TF32, 11 significant bits
    #[arg(long)]
    tf32: bool,
}

impl DeviceArgs {
    pub(crate) fn open(&self) -> anyhow::Result<Device> {
        let Self { isa, threads, .. } = *self;
        let of_the_cpu = isa.is_some() || threads.is_some();
        let device = match self.device {
            DeviceName::Cuda(_) if of_the_cpu => {
                bail!("--isa and --threads are of the CPU: leave them out, or give --device cpu")
            }
            DeviceName::Cuda(device) => Device::cuda_with(&self.cuda_options(device))?,
            DeviceName::Best if !of_the_cpu => match Device::best()? {
                Device::Cuda(cuda) if self.tf32 => {
                    Device::cuda_with(&self.cuda_options(cuda.ordinal()))?
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
    pub(crate) fn peer_options(&self) -> anyhow::Result<Value> {
        if let DeviceName::Cuda(device @ 1..) = self.device {
            bail!(
                "peers use the first CUDA device, given cuda:{device}: choose the device with \
                 CUDA_VISIBLE_DEVICES={device} and --device cuda"
            );
        }
        let options: [(_, Option<Value>); 3] = [
            ("isa", self.isa.map(|isa| isa.to_string().into())),
            ("threads", self.threads.map(Value::from)),
            ("tf32", self.tf32.then_some(true.into())),
        ];
        Ok(options.into_iter().filter_map(|(name, value)| Some((name, value?))).collect())
    }

    fn cuda_options(&self, device: usize) -> CudaOptions {
        CudaOptions::new(device).with_tf32(self.tf32)
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum DeviceName {
    Best,
    Cpu,
    Cuda(usize),
}

impl FromStr for DeviceName {
    type Err = CoreError;

    fn from_str(s: &str) -> Result<Self, CoreError> {
        let unknown = || CoreError::UnknownName {
            what: "device",
            given: s.to_owned(),
            choices: "best, cpu, cuda, cuda:N".into(),
        };
        match s {
            "best" => Ok(DeviceName::Best),
            "cpu" => Ok(DeviceName::Cpu),
            "cuda" => Ok(DeviceName::Cuda(0)),
            _ => match s.strip_prefix("cuda:").map(str::parse) {
                Some(Ok(ordinal)) => Ok(DeviceName::Cuda(ordinal)),
                _ => Err(unknown()),
            },
        }
    }
}

/// What is computed, beside shapes and weights.
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
    /// are summed in one order for every number. CPU only
    #[arg(long)]
    pub(crate) batch_invariant: bool,
    /// The activation: swiglu, swiglu(beta=B), glu, reglu, reglu2, geglu, geglu-tanh,
    /// bilinear, clamped-swiglu(alpha=A,offset=O,limit=L) [default: that of the model, else swiglu]
    #[arg(long, value_name = "NAME")]
    pub(crate) activation: Option<Activation>,
}

impl MathArgs {
    /// The layer of a file as it was asked for, in an element type.
    pub(crate) fn layer(&self, weights: MlpWeights, dtype: DType) -> MlpWeights {
        self.activated(weights).numerics(self.numerics(dtype)).dtype(dtype)
    }

    /// The layer of a file with the activation that was asked for, else its own.
    pub(crate) fn activated(&self, weights: MlpWeights) -> MlpWeights {
        match self.activation {
            Some(activation) => weights.activation(activation),
            None => weights,
        }
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

    /// Refuses numerics in which the device does not compute the operation.
    pub(crate) fn expect_computed(&self, device: &Device, op: Op) -> anyhow::Result<()> {
        expect_invariant(device, op, self.batch_invariant)
    }
}

/// A layer in a file.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Weights")]
pub(crate) struct WeightArgs {
    /// A safetensors file, its index, a GGUF file, or a directory with a model in it
    #[arg(long, value_name = "FILE")]
    pub(crate) weights: Option<PathBuf>,
    /// The layer's number [default: 0]
    #[arg(long, value_name = "N", requires = "weights", value_parser = count,
        allow_negative_numbers = true)]
    layer: Option<usize>,
    /// The expert, where the layer has several
    #[arg(long, value_name = "E", requires = "weights", allow_negative_numbers = true)]
    expert: Option<usize>,
    /// Which dimension of the weights is the row: out-in or in-out
    #[arg(long, value_name = "NAME", requires = "weights")]
    pub(crate) orientation: Option<Orientation>,
    /// How gate and up share a tensor: separate, gate-first, up-first or interleaved-G
    #[arg(long, value_name = "NAME", requires = "weights")]
    pub(crate) arrangement: Option<Arrangement>,
    /// The block beside the layer's experts: the shared one, or a dense one
    #[arg(long, requires = "weights", conflicts_with = "expert")]
    beside_experts: bool,
    /// What tensor names start with before the layer, where several parts of a model have it
    #[arg(long, value_name = "TEXT", requires = "weights")]
    prefix: Option<String>,
    /// A key of the configuration or a tensor of the block to compute without; may be repeated
    #[arg(long, value_name = "NAME", requires = "weights")]
    ignore: Vec<String>,
    /// Compute h smaller by so many powers of two, which the down weights undo: half precision may hold it
    #[arg(long, value_name = "N", requires = "weights", allow_negative_numbers = true)]
    rescale: Option<i32>,
    /// Do without the config.json beside the weights
    #[arg(long, requires = "weights")]
    no_config: bool,
    /// Weights of 8 bits (F8_E4M3, F8_E5M2) without scales are a plain cast: take the codes' values
    #[arg(long, requires = "weights")]
    plain_fp8: bool,
    #[command(flatten)]
    names: NameArgs,
}

/// Tensor names, for files that follow no known convention.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Tensor names, for files that follow no known convention")]
struct NameArgs {
    /// The gate weight
    #[arg(long, value_name = "TENSOR", requires = "weights")]
    gate_name: Option<String>,
    /// The up weight
    #[arg(long, value_name = "TENSOR", requires = "weights")]
    up_name: Option<String>,
    /// Gate and up weights in one tensor
    #[arg(long, value_name = "TENSOR", requires = "weights")]
    gate_up_name: Option<String>,
    /// The down weight
    #[arg(long, value_name = "TENSOR", requires = "weights")]
    down_name: Option<String>,
    /// The gate's bias
    #[arg(long, value_name = "TENSOR", requires = "weights")]
    gate_bias_name: Option<String>,
    /// The up projection's bias
    #[arg(long, value_name = "TENSOR", requires = "weights")]
    up_bias_name: Option<String>,
    /// Both biases in one tensor
    #[arg(long, value_name = "TENSOR", requires = "weights")]
    gate_up_bias_name: Option<String>,
    /// The down projection's bias
    #[arg(long, value_name = "TENSOR", requires = "weights")]
    down_bias_name: Option<String>,
}

impl WeightArgs {
    /// The layer in the file, if one was named.
    pub(crate) fn load(&self) -> swiglu::Result<Option<MlpWeights>> {
        self.weights.as_deref().map(|path| self.load_from(path)).transpose()
    }

    /// An option that was given and means nothing without a file. Where the file conflicts with what
    /// was given instead of it, `requires` above is not heeded.
    pub(crate) fn of_a_file(&self) -> Option<&'static str> {
        let n = &self.names;
        let given = [
            ("--layer", self.layer.is_some()),
            ("--expert", self.expert.is_some()),
            ("--beside-experts", self.beside_experts),
            ("--prefix", self.prefix.is_some()),
            ("--ignore", !self.ignore.is_empty()),
            ("--no-config", self.no_config),
            ("--rescale", self.rescale.is_some()),
            ("--plain-fp8", self.plain_fp8),
            ("--gate-name", n.gate_name.is_some()),
            ("--up-name", n.up_name.is_some()),
            ("--gate-up-name", n.gate_up_name.is_some()),
            ("--down-name", n.down_name.is_some()),
            ("--gate-bias-name", n.gate_bias_name.is_some()),
            ("--up-bias-name", n.up_bias_name.is_some()),
            ("--gate-up-bias-name", n.gate_up_bias_name.is_some()),
            ("--down-bias-name", n.down_bias_name.is_some()),
        ];
        given.into_iter().find_map(|(option, given)| given.then_some(option))
    }

    fn load_from(&self, path: &Path) -> swiglu::Result<MlpWeights> {
        let n = self.names.clone();
        let mut names = TensorNames::default();
        names.gate = n.gate_name;
        names.up = n.up_name;
        names.down = n.down_name;
        names.gate_up = n.gate_up_name;
        names.gate_bias = n.gate_bias_name;
        names.up_bias = n.up_bias_name;
        names.gate_up_bias = n.gate_up_bias_name;
        names.down_bias = n.down_bias_name;
        let mut options = LoadOptions::new(self.layer.unwrap_or(0))
            .with_expert(self.expert)
            .with_names(names)
            .with_orientation(self.orientation)
            .with_arrangement(self.arrangement)
            .with_rescale(self.rescale.unwrap_or(0));
        options.beside_experts = self.beside_experts;
        options.prefix.clone_from(&self.prefix);
        options.ignore.clone_from(&self.ignore);
        options.no_config = self.no_config;
        options.plain_fp8 = self.plain_fp8;
        swiglu::Mlp::load_with(path, &options)
    }
}

/// An operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Operation {
    /// gate, up → h = act(gate, up)
    Activation,
    /// x → h = act(x·Wg + bg, x·Wu + bu)
    GatedLinear,
    /// x → y = h·Wd + bd
    Mlp,
    /// x, ∂L/∂y → y and the gradients of x and the weights
    MlpTrain,
}

impl Operation {
    /// The same of what has weights.
    pub(crate) fn of_layer(self) -> Option<LayerOp> {
        match self {
            Operation::Activation => None,
            Operation::GatedLinear => Some(LayerOp::GatedLinear),
            Operation::Mlp | Operation::MlpTrain => Some(LayerOp::Mlp),
        }
    }
}

impl From<Operation> for CaseOp {
    fn from(op: Operation) -> Self {
        match op {
            Operation::Activation => CaseOp::Activation,
            Operation::GatedLinear => CaseOp::GatedLinear,
            Operation::Mlp => CaseOp::Mlp,
            Operation::MlpTrain => CaseOp::MlpTrain,
        }
    }
}

/// An operation with weights, where no other will do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum LayerOp {
    /// x → h = act(x·Wg + bg, x·Wu + bu)
    GatedLinear,
    /// x → y = h·Wd + bd
    Mlp,
}

impl From<LayerOp> for Op {
    fn from(op: LayerOp) -> Self {
        match op {
            LayerOp::GatedLinear => Op::GatedLinear,
            LayerOp::Mlp => Op::Mlp,
        }
    }
}

impl From<LayerOp> for CaseOp {
    fn from(op: LayerOp) -> Self {
        match op {
            LayerOp::GatedLinear => CaseOp::GatedLinear,
            LayerOp::Mlp => CaseOp::Mlp,
        }
    }
}

/// What the lab calls a device.
pub(crate) fn kind(device: &Device) -> DeviceKind {
    match device {
        Device::Cuda(_) => DeviceKind::Cuda,
        _ => DeviceKind::Cpu,
    }
}

/// Refuses `--weights-type` for a case that nothing on the device computes with such weights.
pub(crate) fn expect_quantized(
    device: &Device,
    case: &Case,
    kind: QuantizedType,
) -> anyhow::Result<()> {
    let (op, inputs) = match case.op {
        CaseOp::GatedLinear => (Op::GatedLinear, vec![case.hidden]),
        CaseOp::Mlp => (Op::Mlp, vec![case.hidden, case.intermediate]),
        CaseOp::MlpTrain => bail!(
            "--weights-type {kind}: quantised weights have no gradients; choose gated-linear or mlp, or leave it out"
        ),
        op => bail!(
            "--weights-type {kind}: the {op} has no weights; choose gated-linear or mlp, or leave it out"
        ),
    };
    device
        .expect_quantized(op, case.dtype, kind)
        .with_context(|| format!("--weights-type {kind}"))?;
    if let Some(n) = inputs.iter().find(|n| !n.is_multiple_of(kind.elements())) {
        let whole = kind.elements();
        bail!("--weights-type {kind}: {n} inputs are not whole {kind} blocks of {whole}");
    }
    Ok(())
}

/// Refuses a file to write that cannot be written, before any work is done for it; writing it refuses one
/// that appears meanwhile.
pub(crate) fn expect_free(
    option: &str,
    path: &Path,
    suffix: &str,
    force: bool,
) -> anyhow::Result<()> {
    let shown = path.display();
    if path.is_dir() {
        bail!("{option} {shown}: it is a directory; give a name in it that ends in .{suffix}");
    }
    if path.extension().is_none_or(|extension| extension != suffix) {
        bail!(
            "{option} {shown}: it is written as {suffix}; expected a name that ends in .{suffix}"
        );
    }
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty() && !dir.is_dir());
    if let Some(dir) = dir {
        bail!("{option} {shown}: no such directory: {}", dir.display());
    }
    if path.exists() && !force {
        bail!("{shown}: exists already; remove it or give --force");
    }
    Ok(())
}

/// Refuses `--batch-invariant`, if it is given, for an operation that the device does not compute so.
pub(crate) fn expect_invariant(device: &Device, op: Op, given: bool) -> anyhow::Result<()> {
    let mut numerics = Numerics::default();
    numerics.batch_invariant = given;
    device.expect_numerics(op, numerics).context("--batch-invariant (--device cpu has it)")
}

/// A number of rows or columns of a problem that is made up.
pub(crate) fn extent(s: &str) -> Result<usize, CoreError> {
    within("size", s, 1..=MAX_EXTENT, "whole number")
}

/// A number of anything: a seed, a place in a list.
pub(crate) fn whole(s: &str) -> Result<u64, CoreError> {
    within("number", s, 0..=u64::MAX, "whole number")
}

/// A number of things in memory.
pub(crate) fn count(s: &str) -> Result<usize, CoreError> {
    within("number", s, 0..=usize::MAX, "whole number")
}

/// A time to measure for.
pub(crate) fn seconds(s: &str) -> Result<f64, CoreError> {
    within("seconds", s, 0.0..=3600.0, "number")
}

fn within<N: FromStr + PartialOrd + Display>(
    what: &'static str,
    s: &str,
    range: RangeInclusive<N>,
    kind: &str,
) -> Result<N, CoreError> {
    let number = s.parse().ok().filter(|number| range.contains(number));
    number.ok_or_else(|| CoreError::OutOfRange {
        what,
        given: s.to_owned(),
        expected: format!("a {kind} from {} to {}", range.start(), range.end()),
    })
}
