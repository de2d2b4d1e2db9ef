//! `swiglu check`: every kernel of this machine against the float64 oracle.

mod bits;
mod report;

use clap::Args;
use indicatif::ProgressBar;
use swiglu::{CpuOptions, DType, Isa, Path};
use swiglu_core::conformance::{self, Backend, Case};
use swiglu_cpu::{Cpu, CpuBackend};

use crate::Verdict;
use crate::args::DeviceArgs;
use crate::terminal::Terminal;
use report::{Finding, Report};

#[derive(Debug, Args)]
pub(crate) struct CheckArgs {
    /// Seed of the inputs
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// One case in seven
    #[arg(long)]
    quick: bool,
    /// Only this element type: f32, f16 or bf16
    #[arg(long, value_name = "TYPE")]
    dtype: Option<DType>,
    #[command(flatten)]
    device: DeviceArgs,
}

impl CheckArgs {
    fn dtypes(&self) -> Vec<DType> {
        self.dtype.map_or(DType::ALL.to_vec(), |dtype| vec![dtype])
    }

    fn cases(&self) -> Vec<Case> {
        // The suite repeats itself with period six, so that a step of seven meets every kind.
        let step = if self.quick { 7 } else { 1 };
        let mut cases: Vec<Case> =
            conformance::suite(&self.dtypes()).into_iter().step_by(step).collect();
        for case in &mut cases {
            case.seed = case.seed.wrapping_add(self.seed.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        }
        cases
    }

    /// Every available instruction set, or the one asked for, with one thread and with several.
    fn backends(&self) -> anyhow::Result<Vec<CpuBackend>> {
        let threads = self.device.open()?.threads();
        let isas = self.device.isa.map_or_else(|| Isa::available().collect(), |isa| vec![isa]);
        let mut counts = vec![1, threads];
        counts.dedup();
        let mut backends = Vec::new();
        for isa in isas {
            for &threads in &counts {
                let options = CpuOptions { isa: Some(isa), threads: Some(threads) };
                let cpu = Cpu::new(&options)?;
                backends.push(CpuBackend { cpu, path: Path::Fused });
            }
        }
        Ok(backends)
    }
}

pub(crate) fn check(args: &CheckArgs, terminal: &mut Terminal) -> anyhow::Result<Verdict> {
    let (backends, cases, dtypes) = (args.backends()?, args.cases(), args.dtypes());
    let per_backend = cases.len() + dtypes.len() * bits::CASES;
    let bar = terminal.bar((backends.len() * per_backend) as u64);
    let mut report = Report::default();
    for backend in &backends {
        bar.set_message(backend.name());
        check_backend(backend, &cases, &mut report, &bar);
        for &dtype in &dtypes {
            bits::check(backend, dtype, args.seed, &mut report)?;
            bar.inc(bits::CASES as u64);
        }
    }
    bar.finish_and_clear();
    report.print(terminal, &backends)?;
    Ok(Verdict::from_passed(report.passed()))
}

fn check_backend(backend: &CpuBackend, cases: &[Case], report: &mut Report, bar: &ProgressBar) {
    for case in cases {
        let finding = match conformance::run(backend, case) {
            Ok(outcome) => Finding::of(&outcome),
            Err(error) => Finding::fault(error.to_string()),
        };
        report.add(backend, case.op.name(), case.dtype, || case.to_string(), finding);
        bar.inc(1);
    }
}
