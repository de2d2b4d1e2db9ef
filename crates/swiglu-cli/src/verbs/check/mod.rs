//! `swiglu check`: every kernel of this machine against the float64 oracle.

mod bits;

use anyhow::Result;
use clap::Args;
use rayon::prelude::*;
use serde::Serialize;
use swiglu::{CpuOptions, DType, Device, Isa, Op, Path};
use swiglu_core::conformance::{self, Backend, Case, GradientCase, Outcome};
use swiglu_cpu::{Cpu, CpuBackend};
use swiglu_cuda::{Cuda, CudaBackend};

use crate::args::{self, DeviceArgs};
use crate::table::{self, Table};
use crate::terminal::{Terminal, Verdict};
use bits::Bits;

#[derive(Debug, Args)]
pub(crate) struct CheckArgs {
    /// Seed of the inputs
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = args::whole(0..=u64::MAX))]
    seed: u64,
    /// One case in seven, of those with quantised weights one in five
    #[arg(long)]
    quick: bool,
    /// Only this element type: f32, f16 or bf16
    #[arg(long, value_name = "TYPE")]
    dtype: Option<DType>,
    /// Only kernels with NAME in theirs, as the table has them: planned, unfused, decode, avx2
    #[arg(long, value_name = "NAME")]
    kernel: Option<String>,
    /// With products summed in one order for every number of tokens, as of run --batch-invariant. CPU only
    #[arg(long)]
    batch_invariant: bool,
    #[command(flatten)]
    device: DeviceArgs,
}

impl CheckArgs {
    fn takes(&self, kernel: &str) -> bool {
        self.kernel.as_deref().is_none_or(|name| kernel.contains(name))
    }

    fn dtypes(&self) -> Vec<DType> {
        self.dtype.map_or(DType::ALL.to_vec(), |dtype| vec![dtype])
    }

    /// The cases of results, of gradients, and of the types of quantised weights that a backend computes with.
    fn cases(&self, backend: &impl Backend) -> Vec<Checked> {
        let dtypes = self.dtypes();
        // The suite repeats itself with period six, so that a step of seven meets every kind. That of quantised
        // weights repeats with seven, and gradients with several; there the steps drift through it.
        let quantized = conformance::quantized_suite(backend.quantized_types(), &dtypes);
        let layers = self.some_of(conformance::suite(&dtypes), 7, |case| case);
        let layers = layers.chain(self.some_of(quantized, 5, |case| case));
        let gradients = conformance::gradient_suite(&dtypes);
        let gradients = self.some_of(gradients, 11, |case| &mut case.layer);
        layers.map(Checked::Result).chain(gradients.map(Checked::Gradients)).collect()
    }

    /// Those of a quick check or all, as they were asked for.
    fn some_of<C>(
        &self,
        cases: Vec<C>,
        step: usize,
        layer: impl Fn(&mut C) -> &mut Case,
    ) -> impl Iterator<Item = C> {
        cases.into_iter().step_by(if self.quick { step } else { 1 }).map(move |mut case| {
            let of = layer(&mut case);
            of.numerics.batch_invariant = self.batch_invariant;
            of.seed = of.seed.wrapping_add(self.seed.wrapping_mul(0x9E37_79B9_7F4A_7C15));
            case
        })
    }
}

pub(crate) fn check(args: &CheckArgs, terminal: &mut Terminal) -> Result<Verdict> {
    let device = args.device.open()?;
    let mut report = Report::default();
    let mut on = Vec::new();
    if let Device::Cuda(cuda) = &device {
        report.cuda(args, cuda, terminal);
        on.push(device.to_string());
    }
    // Unless a device was named, every kernel of this machine is checked.
    let cpu = match &device {
        Device::Cpu(cpu) => Some(cpu.threads()),
        _ if args.device.is_best() => Some(Device::cpu()?.threads()),
        _ => None,
    };
    if let Some(threads) = cpu {
        on.push(report.cpu(args, threads, terminal)?);
    }
    if let (0, Some(name)) = (report.cases, &args.kernel) {
        report.kernels.dedup();
        let all = report.kernels.join(", ");
        anyhow::bail!("no case for kernels with `{name}` in their name; there are: {all}");
    }
    terminal.print(&report, |report, terminal| report.show(&on.join(" and "), terminal))?;
    Ok(Verdict::from_passed(report.failed == 0))
}

enum Checked {
    Result(Case),
    Gradients(GradientCase),
    Bits(Bits),
}

impl Checked {
    fn finding(&self, backend: &impl Backend) -> Finding {
        let without_size = |fault| Finding { fault, ..Finding::default() };
        let outcome = match self {
            Checked::Result(case) => conformance::run(backend, case),
            Checked::Gradients(case) => conformance::run_gradients(backend, case),
            Checked::Bits(bits) => return without_size(bits.fault(backend)),
        };
        match outcome {
            Ok(Outcome { judgement: j, fault }) => {
                let overflow = || j.overflow.map_or(String::new(), |o| format!("; {o}"));
                let outside = || swiglu_lab::complaint(&j, &[]) + &overflow();
                let fault = fault.or_else(|| (!j.passed()).then(outside));
                Finding { worst_element: j.worst_ratio, error: j.relative_frobenius, fault }
            }
            Err(error) => without_size(Some(error.to_string())),
        }
    }

    /// The name it is counted under, its element type, and it in words.
    fn named(&self) -> (&'static str, DType, String) {
        match self {
            Checked::Bits(bits) => (bits::NAME, bits.dtype, bits.to_string()),
            Checked::Gradients(case) => {
                let is_block = case.layer.op == Op::Mlp;
                let name = if is_block { "mlp backward" } else { "gated-linear backward" };
                (name, case.layer.dtype, case.to_string())
            }
            Checked::Result(case) => {
                let name = match (case.op, case.quantized) {
                    (Op::GatedLinear, Some(_)) => "gated-linear quantised",
                    (Op::Mlp, Some(_)) => "mlp quantised",
                    (op, _) => op.name(),
                };
                (name, case.dtype, case.to_string())
            }
        }
    }
}

#[derive(Default)]
struct Finding {
    worst_element: f64,
    error: f64,
    fault: Option<String>,
}

/// All cases of one kernel, operation and element type, over its numbers of threads or tiles.
#[derive(Debug, Default, Serialize)]
struct Row {
    kernel: String,
    op: &'static str,
    dtype: String,
    cases: usize,
    failed: usize,
    /// The largest |error| of an element ÷ its bound; above 1 it is wrong.
    worst_element: f64,
    worst_relative_error: f64,
}

#[derive(Debug, Clone, Serialize)]
struct Failure {
    backend: String,
    case: String,
    what: String,
}

#[derive(Debug, Default, Serialize)]
struct Report {
    passed: usize,
    failed: usize,
    cases: usize,
    rows: Vec<Row>,
    failures: Vec<Failure>,
    /// Of everything here, also what was not checked.
    #[serde(skip)]
    kernels: Vec<String>,
}

/// More failures than this are counted, not listed.
const LISTED: usize = 20;

impl Report {
    /// Checks the kernels of the CPU, of every instruction set or the one asked for; the result says on what.
    fn cpu(&mut self, args: &CheckArgs, threads: usize, terminal: &Terminal) -> Result<String> {
        let isas = args.device.isa.map_or_else(|| Isa::available().collect(), |isa| vec![isa]);
        let mut counts = vec![1, threads];
        counts.dedup();
        let mut backends = Vec::new();
        for (isa, &threads) in isas.iter().flat_map(|isa| counts.iter().map(move |n| (*isa, n))) {
            let cpu = Cpu::new(&CpuOptions::default().with_isa(isa).with_threads(threads))?;
            backends.push(CpuBackend { cpu, path: Path::Fused });
        }
        // Every instruction set has the same types.
        let mut cases = backends.first().map_or(Vec::new(), |backend| args.cases(backend));
        cases.extend(Bits::all(&args.dtypes(), args.seed).into_iter().map(Checked::Bits));
        // `avx2 fused, 2 threads`.
        let kernel = |name: &str| name.split(' ').next().unwrap_or(name).to_owned();
        self.judge(args, &backends, &cases, kernel, |_, _| true, false, terminal);
        let counts: Vec<String> = counts.iter().map(usize::to_string).collect();
        Ok(format!("threads {}", counts.join(" and ")))
    }

    /// Checks every way of a CUDA device: what it plans, the unfused path, and each kernel by itself; gradients on those that
    /// train. Most of the time goes into compiling their variants and into the reference, so cases are computed on all
    /// processors.
    fn cuda(&mut self, args: &CheckArgs, cuda: &Cuda, terminal: &Terminal) {
        let cases = args.cases(&CudaBackend::planned(cuda));
        // What stands behind the device.
        let kernel = |name: &str| name.split_once(' ').map_or(name, |(_, way)| way).to_owned();
        let computes = |backend: &CudaBackend, case: &Checked| match case {
            Checked::Result(case) => backend.computes(case),
            Checked::Gradients(case) => backend.trains() && backend.computes(&case.layer),
            // A GPU has instructions of its own for exponential and division.
            Checked::Bits(_) => false,
        };
        self.judge(args, &CudaBackend::all(cuda), &cases, kernel, computes, true, terminal);
    }

    /// Adds what is found of the cases that each backend computes, one after the other or all at once; their order stays.
    /// `kernel` says which part of a backend's name is that of its kernel, by which it is asked for and shown.
    fn judge<B: Backend + Sync>(
        &mut self,
        args: &CheckArgs,
        backends: &[B],
        cases: &[Checked],
        kernel: impl Fn(&str) -> String,
        computes: impl Fn(&B, &Checked) -> bool,
        at_once: bool,
        terminal: &Terminal,
    ) {
        self.kernels.extend(backends.iter().map(|backend| kernel(&backend.name())));
        let taken = backends.iter().filter(|backend| args.takes(&kernel(&backend.name())));
        let pairs = taken.flat_map(|backend| cases.iter().map(move |case| (backend, case)));
        let work: Vec<_> = pairs.filter(|(backend, case)| computes(backend, case)).collect();
        let bar = terminal.bar(work.len() as u64);
        let finding = |(backend, case): &(&B, &Checked)| {
            bar.set_message(backend.name());
            let finding = case.finding(*backend);
            bar.inc(1);
            finding
        };
        let findings: Vec<Finding> = match at_once {
            false => work.iter().map(finding).collect(),
            // Neighbours share variants, so threads begin far apart; what one has left at the end any other takes.
            true => work.par_iter().with_max_len(1).map(finding).collect(),
        };
        bar.finish_and_clear();
        for ((backend, case), finding) in work.into_iter().zip(findings) {
            self.add(kernel(&backend.name()), backend.name(), case.named(), finding);
        }
    }

    fn add(
        &mut self,
        kernel: String,
        backend: String,
        (op, dtype, case): (&'static str, DType, String),
        finding: Finding,
    ) {
        self.cases += 1;
        let of = |r: &Row| r.kernel == kernel && r.op == op && r.dtype == dtype.name();
        let at = self.rows.iter().position(of).unwrap_or_else(|| {
            let dtype = dtype.to_string();
            self.rows.push(Row { kernel, op, dtype, ..Row::default() });
            self.rows.len() - 1
        });
        let row = &mut self.rows[at];
        row.cases += 1;
        // Overflow that the bounds admit has no size; `max` leaves NaN out.
        row.worst_element = row.worst_element.max(finding.worst_element);
        let error = if finding.error.is_finite() { finding.error } else { 0.0 };
        row.worst_relative_error = row.worst_relative_error.max(error);
        let Some(what) = finding.fault else { return self.passed += 1 };
        row.failed += 1;
        self.failed += 1;
        if self.failures.len() < LISTED {
            self.failures.push(Failure { backend, case, what });
        }
    }

    fn show(&self, on: &str, terminal: &mut Terminal) -> Result<()> {
        Table::of(&self.rows)
            .text("kernel", |r| &r.kernel)
            .text("op", |r| r.op)
            .text("dtype", |r| &r.dtype)
            .number("cases", |r| r.cases)
            .number("failed", |r| r.failed)
            .number("worst element", |r| format!("{:.2}", r.worst_element))
            .number("worst error", |r| table::error(r.worst_relative_error))
            .text("", |r| table::verdict(r.failed == 0))
            .print(terminal)?;
        for f in &self.failures {
            writeln!(terminal, "\nFAILED {} on {}:\n       {}", f.case, f.backend, f.what)?;
        }
        let unlisted = self.failed - self.failures.len();
        if unlisted > 0 {
            writeln!(terminal, "\nand {unlisted} more")?;
        }
        let Self { passed, cases, .. } = self;
        let said = "elements as a fraction of their bound";
        writeln!(terminal, "\n{passed} of {cases} cases passed, {on}; {said}")
    }
}
