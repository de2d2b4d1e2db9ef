//! `swiglu bench`: speed as a fraction of what this machine can do, every result verified.

mod backends;
mod cases;
mod cuda;
mod host;
mod measure;
mod report;
mod way;

use anyhow::{Context, bail};
use clap::{Args, ValueEnum};
use swiglu::{Activation, DType, Device, Op, QuantizedType};

use crate::Verdict;
use crate::args::{DeviceArgs, MathArgs};
use crate::terminal::Terminal;
use crate::timing::Heat;
use backends::BackendArgs;
use cases::{Case, Suite};
use cuda::CudaBench;
use measure::Bench;
use report::Row;

#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    /// The operation; without one, a suite of cases
    op: Option<BenchOp>,
    /// The suite to run where no operation is given
    #[arg(long, value_name = "NAME", default_value = "quick", conflicts_with = "op")]
    suite: Suite,
    /// Tokens
    #[arg(long, value_name = "M", requires = "op", conflicts_with = "suite",
        value_parser = crate::args::extent, allow_negative_numbers = true)]
    m: Option<usize>,
    /// K, input features [default: 896]
    #[arg(long, value_name = "K", requires = "op", conflicts_with = "suite",
        value_parser = crate::args::extent, allow_negative_numbers = true)]
    hidden: Option<usize>,
    /// H, intermediate features [default: 4864]
    #[arg(long, value_name = "H", requires = "op", conflicts_with = "suite",
        value_parser = crate::args::extent, allow_negative_numbers = true)]
    intermediate: Option<usize>,
    /// Weights stay in the caches, if they fit
    #[arg(long, requires = "op", conflicts_with_all = ["cold", "suite"])]
    hot: bool,
    /// Weights come from memory: so many in rotation that they exceed the caches [default]
    #[arg(long, requires = "op", conflicts_with = "suite")]
    cold: bool,
    /// Random quantised weights of this type: q8_0, q4_0, q4_1, q5_0, q5_1, q4_k, q5_k, q6_k, or on CUDA
    /// i8, f8_e4m3, f8_e4m3_128x128
    #[arg(long, value_name = "TYPE", requires = "op", conflicts_with = "suite")]
    weights_type: Option<QuantizedType>,
    /// Time to measure for, per case
    #[arg(long, value_name = "S", default_value_t = 0.5, value_parser = crate::args::seconds,
        allow_negative_numbers = true)]
    seconds: f64,
    #[command(flatten)]
    math: MathArgs,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    backends: BackendArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum BenchOp {
    /// gate, up → h = act(gate, up)
    Activation,
    /// x → h = act(x·Wg, x·Wu)
    GatedLinear,
    /// x → y = h·Wd
    Mlp,
}

impl BenchArgs {
    fn cases(&self, device: &Device) -> Vec<Case> {
        let mut cases = match (self.op, device) {
            (None, Device::Cuda(_)) => self.suite.cuda_cases(),
            (None, _) => self.suite.cases(),
            (Some(op), device) if self.weights_type.is_some() => {
                vec![self.case(op, self.quantized_dtype(device))]
            }
            (Some(op), _) => DType::ALL.map(|dtype| self.case(op, dtype)).to_vec(),
        };
        if let Some(dtype) = self.math.dtype {
            cases.retain(|c| c.dtype == dtype);
        }
        cases
    }

    /// The element type beside quantised weights, where none is given.
    fn quantized_dtype(&self, device: &Device) -> DType {
        let usual = if matches!(device, Device::Cuda(_)) { DType::Bf16 } else { DType::F32 };
        self.math.dtype.unwrap_or(usual)
    }

    fn case(&self, op: BenchOp, dtype: DType) -> Case {
        let heat = if self.hot { Heat::Hot } else { Heat::Cold };
        let (hidden, intermediate) =
            (self.hidden.unwrap_or(896), self.intermediate.unwrap_or(4864));
        let m = self.m.unwrap_or(1);
        let layer = |op| Case {
            weights: self.weights_type,
            ..Case::layer(op, [m, hidden, intermediate], dtype, heat)
        };
        match op {
            BenchOp::Activation => Case { heat, ..Case::activation(m, intermediate, dtype) },
            BenchOp::GatedLinear => layer(Op::GatedLinear),
            BenchOp::Mlp => layer(Op::Mlp),
        }
    }

    /// Refuses quantised weights where nothing computes with them.
    fn expect_weights(&self, device: &Device) -> anyhow::Result<()> {
        let Some(kind) = self.weights_type else { return Ok(()) };
        let op = match self.op {
            Some(BenchOp::Activation) => bail!(
                "--weights-type {kind}: the activation has no weights; choose gated-linear or mlp"
            ),
            Some(BenchOp::GatedLinear) => Op::GatedLinear,
            Some(BenchOp::Mlp) | None => Op::Mlp,
        };
        device
            .expect_quantized(op, self.quantized_dtype(device), kind)
            .with_context(|| format!("--weights-type {kind}"))?;
        if !self.backends.backend.is_empty() {
            bail!("--weights-type {kind}: peers are compared with it by `swiglu lab run`");
        }
        Ok(())
    }

    /// The number of threads that was asked for; for the goals also one alone.
    fn devices(&self, all: Device) -> anyhow::Result<Vec<Device>> {
        let alone = self.op.is_none()
            && self.suite == Suite::Goals
            && self.device.threads.is_none()
            && all.threads() > 1;
        let mut devices = Vec::new();
        if alone {
            devices.push(self.device.open_with(self.device.isa, Some(1))?);
        }
        devices.push(all);
        Ok(devices)
    }
}

pub(crate) fn bench(args: &BenchArgs, terminal: &mut Terminal) -> anyhow::Result<Verdict> {
    let device = args.device.open()?;
    args.expect_weights(&device)?;
    if !args.backends.backend.is_empty() {
        let device = (&device, args.device.peer_options()?);
        return backends::compare(&args.backends, &args.math, device, terminal);
    }
    if args.op.is_none() && args.suite == Suite::Host {
        let Device::Cuda(cuda) = &device else {
            anyhow::bail!("the host suite measures calls of a CUDA device, given {device}");
        };
        host::bench(cuda, terminal)?;
        return Ok(Verdict::from_passed(true));
    }
    let cases = args.cases(&device);
    let activation = args.math.activation.unwrap_or(Activation::SWIGLU);
    let (rows, limits) = match &device {
        Device::Cuda(cuda) => {
            let bench = CudaBench::new(&device, cuda, activation, &args.math, args.seconds)?;
            (measure_all(terminal, &cases, |case| bench.case(case))?, bench.limits())
        }
        _ => {
            let devices = args.devices(device)?;
            let bench = Bench::new(&devices, activation, &args.math, args.seconds)?;
            (measure_all(terminal, &cases, |case| bench.case(case))?, bench.limits())
        }
    };
    let passed = rows.iter().all(|r| r.passed);
    report::print(terminal, rows, limits)?;
    Ok(Verdict::from_passed(passed))
}

fn measure_all(
    terminal: &Terminal,
    cases: &[Case],
    measure: impl Fn(&Case) -> anyhow::Result<Vec<Row>>,
) -> anyhow::Result<Vec<Row>> {
    let bar = terminal.bar(cases.len() as u64);
    let mut rows = Vec::new();
    for case in cases {
        bar.set_message(format!("{case} {}", case.dtype));
        rows.extend(measure(case)?);
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(rows)
}
