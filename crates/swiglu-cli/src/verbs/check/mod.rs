//! `swiglu check`: every kernel of this machine against the float64 oracle.

mod bits;
mod report;

use clap::Args;
use indicatif::ProgressBar;
use rayon::prelude::*;
use swiglu::{CpuOptions, DType, Device, Isa, Op, Path};
use swiglu_core::conformance::{self, Backend, Case, GradientCase, Outcome};
use swiglu_cpu::{Cpu, CpuBackend};
use swiglu_cuda::{Cuda, CudaBackend};

use crate::args::DeviceArgs;
use crate::terminal::{Terminal, Verdict};
use report::{Finding, Report, Subject};

#[derive(Debug, Args)]
pub(crate) struct CheckArgs {
    /// Seed of the inputs
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = crate::args::whole,
        allow_negative_numbers = true)]
    seed: u64,
    /// One case in seven, of those with quantised weights one in five
    #[arg(long)]
    quick: bool,
    /// Only this element type: f32, f16 or bf16
    #[arg(long, value_name = "TYPE")]
    dtype: Option<DType>,
    /// With products summed in one order for every number of tokens, as of run --batch-invariant. CPU only
    #[arg(long)]
    batch_invariant: bool,
    #[command(flatten)]
    device: DeviceArgs,
}

impl CheckArgs {
    fn dtypes(&self) -> Vec<DType> {
        self.dtype.map_or(DType::ALL.to_vec(), |dtype| vec![dtype])
    }

    fn cases(&self) -> Vec<Case> {
        self.some_of(conformance::suite(&self.dtypes()))
    }

    /// The cases of backward passes.
    fn gradient_cases(&self) -> Vec<GradientCase> {
        // A step that shares no factor with the periods of the suite.
        let step = if self.quick { 11 } else { 1 };
        let cases = conformance::gradient_suite(&self.dtypes()).into_iter().step_by(step);
        cases
            .map(|mut case| {
                case.layer.numerics.batch_invariant = self.batch_invariant;
                let shift = self.seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
                case.layer.seed = case.layer.seed.wrapping_add(shift);
                case
            })
            .collect()
    }

    /// The cases of the types of quantised weights that a backend computes with.
    fn quantized_cases(&self, backend: &impl Backend) -> Vec<Case> {
        self.some_of(conformance::quantized_suite(backend.quantized_types(), &self.dtypes()))
    }

    fn some_of(&self, cases: Vec<Case>) -> Vec<Case> {
        // The suite repeats itself with period six, so that a step of seven meets every kind. That of
        // quantised weights repeats with seven; there the steps drift through it.
        let step = match (self.quick, cases.first().is_some_and(|c| c.quantized.is_some())) {
            (false, _) => 1,
            (true, false) => 7,
            (true, true) => 5,
        };
        let mut cases: Vec<Case> = cases.into_iter().step_by(step).collect();
        for case in &mut cases {
            case.numerics.batch_invariant = self.batch_invariant;
            case.seed = case.seed.wrapping_add(self.seed.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        }
        cases
    }

    /// Every available instruction set, or the one asked for, with one thread and with several.
    fn cpu_backends(&self, threads: usize) -> anyhow::Result<Vec<CpuBackend>> {
        let isas = self.device.isa.map_or_else(|| Isa::available().collect(), |isa| vec![isa]);
        let mut counts = vec![1, threads];
        counts.dedup();
        let mut backends = Vec::new();
        for isa in isas {
            for &threads in &counts {
                let options = CpuOptions::default().with_isa(isa).with_threads(threads);
                let cpu = Cpu::new(&options)?;
                backends.push(CpuBackend { cpu, path: Path::Fused });
            }
        }
        Ok(backends)
    }
}

pub(crate) fn check(args: &CheckArgs, terminal: &mut Terminal) -> anyhow::Result<Verdict> {
    let device = args.device.open()?;
    let mut report = Report::default();
    let mut on = Vec::new();
    if let Device::Cuda(cuda) = &device {
        on.push(check_cuda(args, cuda, terminal, &mut report));
    }
    // Unless a device was named, every kernel of this machine is checked.
    let cpu = match &device {
        Device::Cpu(cpu) => Some(cpu.threads()),
        _ if args.device.is_best() => Some(Device::cpu()?.threads()),
        _ => None,
    };
    if let Some(threads) = cpu {
        on.push(check_cpu(args, threads, terminal, &mut report)?);
    }
    terminal.print(&report, |report, terminal| report.show(&on.join(" and "), terminal))?;
    Ok(Verdict::from_passed(report.passed()))
}

/// Checks the kernels of the CPU; the result says on what.
fn check_cpu(
    args: &CheckArgs,
    threads: usize,
    terminal: &Terminal,
    report: &mut Report,
) -> anyhow::Result<String> {
    let (backends, mut cases, dtypes) = (args.cpu_backends(threads)?, args.cases(), args.dtypes());
    // Every instruction set has the same types.
    cases.extend(backends.first().map_or(Vec::new(), |backend| args.quantized_cases(backend)));
    let gradients = args.gradient_cases();
    let per_backend = cases.len() + gradients.len() + dtypes.len() * bits::CASES;
    let bar = terminal.bar((backends.len() * per_backend) as u64);
    for backend in &backends {
        let kernel = backend.cpu.isa().name().to_owned();
        let subject = Subject { kernel, name: backend.name() };
        check_backend(backend, &subject, &cases, report, &bar);
        check_gradients(backend, &subject, &gradients, report, &bar);
        for &dtype in &dtypes {
            bits::check(backend, &subject, dtype, args.seed, report)?;
            bar.inc(bits::CASES as u64);
        }
    }
    bar.finish_and_clear();
    let mut threads: Vec<usize> = backends.iter().map(|b| b.cpu.threads()).collect();
    threads.sort_unstable();
    threads.dedup();
    let threads: Vec<String> = threads.iter().map(usize::to_string).collect();
    Ok(format!("threads {}", threads.join(" and ")))
}

/// Checks every way of a CUDA device: what it plans, the unfused path, and each kernel by itself. Most of the time goes
/// into compiling their variants and into the reference, so cases are computed on all processors; their order stays.
fn check_cuda(args: &CheckArgs, cuda: &Cuda, terminal: &Terminal, report: &mut Report) -> String {
    let mut cases = args.cases();
    cases.extend(args.quantized_cases(&CudaBackend::planned(cuda)));
    let backends: Vec<(CudaBackend, Subject)> = CudaBackend::all(cuda)
        .into_iter()
        .map(|backend| {
            let name = backend.name();
            let kernel = name.split_once(' ').map_or(name.as_str(), |(_, way)| way).to_owned();
            (backend, Subject { kernel, name })
        })
        .collect();
    let work: Vec<(&CudaBackend, &Subject, &Case)> = backends
        .iter()
        .flat_map(|(backend, subject)| {
            let computed = cases.iter().filter(|case| backend.computes(case));
            computed.map(move |case| (backend, subject, case))
        })
        .collect();
    let bar = terminal.bar(work.len() as u64);
    let findings: Vec<Finding> = work
        .par_iter()
        // Neighbours share variants, so threads begin far apart; what one has left at the end any other takes.
        .with_max_len(1)
        .map(|(backend, subject, case)| {
            bar.set_message(subject.name.clone());
            let finding = finding(*backend, case);
            bar.inc(1);
            finding
        })
        .collect();
    bar.finish_and_clear();
    for ((_, subject, case), finding) in work.into_iter().zip(findings) {
        report.add(subject, name_of(case), case.dtype, || case.to_string(), finding);
    }
    Device::Cuda(cuda.clone()).to_string()
}

fn check_backend(
    backend: &impl Backend,
    subject: &Subject,
    cases: &[Case],
    report: &mut Report,
    bar: &ProgressBar,
) {
    bar.set_message(subject.name.clone());
    for case in cases {
        let finding = finding(backend, case);
        report.add(subject, name_of(case), case.dtype, || case.to_string(), finding);
        bar.inc(1);
    }
}

fn check_gradients(
    backend: &impl Backend,
    subject: &Subject,
    cases: &[GradientCase],
    report: &mut Report,
    bar: &ProgressBar,
) {
    for case in cases {
        let finding = found(conformance::run_gradients(backend, case));
        let name = if case.layer.op == Op::Mlp { "mlp backward" } else { "gated-linear backward" };
        report.add(subject, name, case.layer.dtype, || case.to_string(), finding);
        bar.inc(1);
    }
}

fn finding(backend: &impl Backend, case: &Case) -> Finding {
    found(conformance::run(backend, case))
}

fn found(outcome: swiglu_core::Result<Outcome>) -> Finding {
    match outcome {
        Ok(outcome) => Finding::of(&outcome),
        Err(error) => Finding::fault(error.to_string()),
    }
}

/// What a case is counted under.
fn name_of(case: &Case) -> &'static str {
    match (case.op, case.quantized) {
        (Op::GatedLinear, Some(_)) => "gated-linear quantised",
        (Op::Mlp, Some(_)) => "mlp quantised",
        (op, _) => op.name(),
    }
}
