//! `swiglu check`: every kernel of this machine against the float64 oracle.

mod bits;
mod report;

use clap::Args;
use rayon::prelude::*;
use swiglu::{CpuOptions, DType, Device, Isa, Op, Path};
use swiglu_core::conformance::{self, Backend, Case, GradientCase};
use swiglu_cpu::{Cpu, CpuBackend};
use swiglu_cuda::{Cuda, CudaBackend};

use crate::args::DeviceArgs;
use crate::terminal::{Terminal, Verdict};
use report::{Finding, Report, Subject};

#[derive(Debug, Args)]
pub(crate) struct CheckArgs {
    /// Seed of the inputs
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = crate::args::whole)]
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

    /// The cases of results, of gradients, and of the types of quantised weights that a backend computes with.
    fn cases(&self, backend: &impl Backend) -> Vec<Checked> {
        let dtypes = self.dtypes();
        // The suite repeats itself with period six, so that a step of seven meets every kind. That of quantised
        // weights repeats with seven, and gradients with several; there the steps drift through it.
        let quantized = conformance::quantized_suite(backend.quantized_types(), &dtypes);
        let layers = self.some_of(conformance::suite(&dtypes), 7).map(Checked::Result);
        let quantized = self.some_of(quantized, 5).map(Checked::Result);
        let gradients = conformance::gradient_suite(&dtypes);
        let gradients = self.some_of(gradients, 11).map(Checked::Gradients);
        let mut cases: Vec<Checked> = layers.chain(quantized).chain(gradients).collect();
        for case in &mut cases {
            let case = case.layer_mut();
            case.numerics.batch_invariant = self.batch_invariant;
            case.seed = case.seed.wrapping_add(self.seed.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        }
        cases
    }

    fn some_of<C>(&self, cases: Vec<C>, step: usize) -> impl Iterator<Item = C> {
        cases.into_iter().step_by(if self.quick { step } else { 1 })
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

/// One case.
#[derive(Debug, Clone)]
enum Checked {
    Result(Case),
    Gradients(GradientCase),
}

impl Checked {
    fn layer(&self) -> &Case {
        match self {
            Checked::Result(case) => case,
            Checked::Gradients(case) => &case.layer,
        }
    }

    fn layer_mut(&mut self) -> &mut Case {
        match self {
            Checked::Result(case) => case,
            Checked::Gradients(case) => &mut case.layer,
        }
    }

    fn finding(&self, backend: &impl Backend) -> Finding {
        let outcome = match self {
            Checked::Result(case) => conformance::run(backend, case),
            Checked::Gradients(case) => conformance::run_gradients(backend, case),
        };
        outcome.map_or_else(|error| Finding::fault(error.to_string()), |found| Finding::of(&found))
    }

    /// Adds what was found under the name that such cases are counted under.
    fn report(&self, subject: &Subject, finding: Finding, report: &mut Report) {
        let (name, text) = match self {
            Checked::Gradients(case) if case.layer.op == Op::Mlp => {
                ("mlp backward", case.to_string())
            }
            Checked::Gradients(case) => ("gated-linear backward", case.to_string()),
            Checked::Result(case) => match (case.op, case.quantized) {
                (Op::GatedLinear, Some(_)) => ("gated-linear quantised", case.to_string()),
                (Op::Mlp, Some(_)) => ("mlp quantised", case.to_string()),
                (op, _) => (op.name(), case.to_string()),
            },
        };
        report.add(subject, name, self.layer().dtype, || text, finding);
    }
}

/// Checks the kernels of the CPU; the result says on what.
fn check_cpu(
    args: &CheckArgs,
    threads: usize,
    terminal: &Terminal,
    report: &mut Report,
) -> anyhow::Result<String> {
    let (backends, dtypes) = (args.cpu_backends(threads)?, args.dtypes());
    // Every instruction set has the same types.
    let cases = backends.first().map_or(Vec::new(), |backend| args.cases(backend));
    let per_backend = cases.len() + dtypes.len() * bits::CASES;
    let bar = terminal.bar((backends.len() * per_backend) as u64);
    for backend in &backends {
        let kernel = backend.cpu.isa().name().to_owned();
        let subject = Subject { kernel, name: backend.name() };
        bar.set_message(subject.name.clone());
        for case in &cases {
            case.report(&subject, case.finding(backend), report);
            bar.inc(1);
        }
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

/// Checks every way of a CUDA device: what it plans, the unfused path, and each kernel by itself; gradients on those that
/// train. Most of the time goes into compiling their variants and into the reference, so cases are computed on all
/// processors; their order stays.
fn check_cuda(args: &CheckArgs, cuda: &Cuda, terminal: &Terminal, report: &mut Report) -> String {
    let cases = args.cases(&CudaBackend::planned(cuda));
    let backends: Vec<(CudaBackend, Subject)> = CudaBackend::all(cuda)
        .into_iter()
        .map(|backend| {
            let name = backend.name();
            let kernel = name.split_once(' ').map_or(name.as_str(), |(_, way)| way).to_owned();
            (backend, Subject { kernel, name })
        })
        .collect();
    let computes = |backend: &CudaBackend, case: &Checked| {
        let trains = matches!(case, Checked::Result(_)) || backend.trains();
        trains && backend.computes(case.layer())
    };
    let work: Vec<(&CudaBackend, &Subject, &Checked)> = backends
        .iter()
        .flat_map(|(backend, subject)| {
            let computed = cases.iter().filter(|case| computes(backend, case));
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
            let finding = case.finding(*backend);
            bar.inc(1);
            finding
        })
        .collect();
    bar.finish_and_clear();
    for ((_, subject, case), finding) in work.into_iter().zip(findings) {
        case.report(subject, finding, report);
    }
    Device::Cuda(cuda.clone()).to_string()
}
