//! `swiglu bench`: speed as a fraction of what this machine can do, every result verified. It is a run of
//! the lab without a definition: the same processes, protocol and oracle.

mod backends;
mod cases;
mod host;
mod report;

use anyhow::bail;
use clap::{ArgAction, Args};
use serde::Serialize;
use serde_json::{Value, json};
use swiglu::{CpuOptions, DType, Device, QuantizedType};
use swiglu_lab::profile::Ceilings;
use swiglu_lab::{Case, CaseOp, DeviceKind, Heat, ProfileDef, Role};

use crate::args::{self, DeviceArgs, MathArgs, extent, one_of};
use crate::ceilings;
use crate::terminal::{Terminal, Verdict};
use crate::verbs::lab::adhoc::{self, AdHocArgs};
use backends::Backend;
use cases::Suite;
use report::Row;

/// What is measured by itself; activation-backward on CUDA devices.
const OPERATIONS: [CaseOp; 5] = [
    CaseOp::Activation,
    CaseOp::ActivationBackward,
    CaseOp::GatedLinear,
    CaseOp::Mlp,
    CaseOp::MlpTrain,
];

#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    /// The operation; without one, a suite of cases
    #[arg(value_parser = one_of(OPERATIONS))]
    op: Option<CaseOp>,
    /// The suite to run where no operation is given
    #[arg(long, value_name = "NAME", default_value = "quick", conflicts_with = "op")]
    suite: Suite,
    // Two names of one list: whoever gives both means one of them, so neither adds to the other.
    /// Tokens, separated by commas [default: 1, of an activation 4096, of mlp-train 1024]
    #[arg(long, visible_alias = "rows", value_name = "M", requires = "op", conflicts_with = "suite",
        action = ArgAction::Set, value_delimiter = ',', value_parser = extent)]
    m: Vec<usize>,
    /// K, input features [default: 896]
    #[arg(long, value_name = "K", requires = "op", conflicts_with = "suite",
        value_parser = extent)]
    hidden: Option<usize>,
    /// H, intermediate features [default: 4864, of an activation 4096]
    #[arg(long, visible_alias = "cols", value_name = "H", requires = "op", conflicts_with = "suite",
        value_parser = extent)]
    intermediate: Option<usize>,
    /// Weights stay in the caches, if they fit
    #[arg(long, requires = "op", conflicts_with_all = ["cold", "suite"])]
    hot: bool,
    /// Weights come from memory: so many in rotation that they exceed the caches [default]
    #[arg(long, requires = "op", conflicts_with = "suite")]
    cold: bool,
    #[arg(long, value_name = "TYPE", requires = "op", conflicts_with = "suite",
        help = args::weights_types())]
    weights_type: Option<QuantizedType>,
    /// Time to measure for, per case
    #[arg(long, value_name = "S", default_value_t = 0.5, value_parser = args::seconds)]
    seconds: f64,
    /// Other libraries beside ours, separated by commas; what is not installed says so
    #[arg(long, visible_alias = "providers", value_name = "NAMES", value_delimiter = ',')]
    backend: Vec<Backend>,
    #[command(flatten)]
    math: MathArgs,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    lab: AdHocArgs,
}

/// Ceilings as they were measured once, beside the cases.
#[derive(Debug, Serialize)]
struct Limits {
    threads: usize,
    #[serde(skip)]
    weights: bool,
    ceilings: Ceilings,
}

pub(crate) fn bench(args: &BenchArgs, terminal: &mut Terminal) -> anyhow::Result<Verdict> {
    args.lab.expect_places(true)?;
    let device = args.device.open()?;
    if args.op.is_none() && args.suite == Suite::Host {
        let Device::Cuda(cuda) = &device else {
            bail!("the host suite measures calls of a CUDA device, given {device}");
        };
        return host::bench(cuda, args.seconds, terminal);
    }
    if let (Some(op), Some(k)) = (args.op.filter(|op| !op.has_weights()), args.hidden) {
        bail!("--hidden {k}: the {op} has no weights and no hidden size; leave it out");
    }
    let cases = args.cases(&device)?;
    let options = args.device.peer_options()?;
    let (mut limits, mut rows) = (Vec::new(), Vec::<Row>::new());
    let beside = |case: &Case| backends::profiles(&args.backend, case);
    let all = |case: &Case| [ways(case, &options, ""), beside(case)].concat();
    args.measure(&cases, &device, all, &mut limits, &mut rows, terminal)?;
    // For the goals also one thread alone.
    let is_goals = args.op.is_none() && args.suite == Suite::Goals;
    if is_goals && args.device.threads.is_none() && device.threads() > 1 {
        let one = CpuOptions::default().with_isa(args.device.isa).with_threads(1);
        let (single, options) =
            (Device::cpu_with(one)?, adhoc::with(options, &json!({ "threads": 1 })));
        let alone = |case: &Case| ways(case, &options, ", 1 thread");
        args.measure(&cases, &single, alone, &mut limits, &mut rows, terminal)?;
    }
    // What of ours was not computed right is a failure; if nothing was computed, it is an error.
    let ours = || rows.iter().filter(|row| row.ours);
    if let (false, Some(why)) = (ours().any(Row::is_ok), ours().find_map(Row::complaint)) {
        bail!(why);
    }
    // A peer that is not there, or lacks the case, is no fault of the comparison; one that broke is.
    let passed = ours().all(Row::is_ok) && !rows.iter().any(Row::is_broken);
    let document = json!({ "results": rows, "ceilings": limits });
    terminal.print(&document, |_, terminal| report::show(&rows, terminal))?;
    Ok(Verdict::from_passed(passed))
}

/// Our ways of a case: on a device call by call and as a graph; and reading alone, as the limit.
fn ways(case: &Case, options: &Value, suffix: &str) -> Vec<ProfileDef> {
    let mut ways = adhoc::own_ways(case, options);
    if case.device == DeviceKind::Cuda {
        let graphs = adhoc::own_ways(case, &adhoc::graph(case, options.clone()));
        let graph = |way: ProfileDef| ProfileDef { id: format!("{}, graph", way.id), ..way };
        // Graphs come first: the first baseline is the one that ratios are of.
        ways = graphs.into_iter().map(graph).chain(ways).collect();
    } else if case.op.has_weights() && case.heat == Heat::Cold {
        let asks = adhoc::with(json!({ "asks": true }), options);
        ways.push(adhoc::way("read", "read", Role::Ceiling, asks));
    }
    ways.into_iter().map(|way| ProfileDef { id: way.id + suffix, ..way }).collect()
}

/// The ceilings of a case. Those that no case decides are measured once, but for the bandwidth of an
/// activation on the CPU, beside which nothing reads in turns: a shared host changes it within seconds.
fn limits_of(
    known: &mut Vec<Limits>,
    device: &Device,
    case: &Case,
    seconds: f64,
) -> anyhow::Result<Ceilings> {
    let (threads, weights) = (device.threads(), case.op.has_weights());
    let changes = case.device == DeviceKind::Cpu && !weights;
    let same = |l: &&Limits| l.threads == threads && l.weights == weights;
    let ceilings = match known.iter().find(same).filter(|_| !changes) {
        Some(limits) => limits.ceilings.clone(),
        None => {
            let ceilings = ceilings::of(device, case.op, ceilings::is_quick(seconds))?;
            known.retain(|l| !same(&l));
            known.push(Limits { threads, weights, ceilings: ceilings.clone() });
            ceilings
        }
    };
    Ok(ceilings::with_case(ceilings, device, case)?)
}

impl BenchArgs {
    /// Measures cases on a device by their ways, each beside what the device can do.
    fn measure(
        &self,
        cases: &[Case],
        device: &Device,
        profiles: impl Fn(&Case) -> Vec<ProfileDef>,
        limits: &mut Vec<Limits>,
        rows: &mut Vec<Row>,
        terminal: &Terminal,
    ) -> anyhow::Result<()> {
        // Cases with the same ways are one run: each peer is started once.
        for cases in cases.chunk_by(|a, b| profiles(a) == profiles(b)) {
            let experiment = adhoc::experiment(cases.to_vec(), profiles(&cases[0]));
            let mut record = self.lab.measure(&experiment, self.seconds, terminal)?;
            for case in cases {
                record.ceilings = Some(limits_of(limits, device, case, self.seconds)?);
                rows.extend(report::rows(&experiment, &record, case));
            }
        }
        Ok(())
    }

    fn cases(&self, device: &Device) -> anyhow::Result<Vec<Case>> {
        let mut cases = match self.op {
            None => self.suite.cases(args::kind(device))?,
            Some(op) => self.cases_of(op, device),
        };
        if let Some(dtype) = self.math.dtype {
            cases.retain(|case| case.dtype == dtype);
        }
        for case in &mut cases {
            *case = self.math.case(case.clone());
            if let Some(kind) = self.weights_type {
                args::expect_quantized(device, case, kind)?;
            }
        }
        Ok(cases)
    }

    /// The cases that were asked for, in every element type.
    fn cases_of(&self, op: CaseOp, device: &Device) -> Vec<Case> {
        let kind = args::kind(device);
        let (usual, columns) = match op {
            CaseOp::MlpTrain => (1024, 4864),
            op if op.has_weights() => (1, 4864),
            _ => (4096, 4096),
        };
        let usual_dtype = if kind == DeviceKind::Cuda { DType::Bf16 } else { DType::F32 };
        let dtypes = match self.weights_type {
            None => DType::ALL.to_vec(),
            Some(_) => vec![self.math.dtype.unwrap_or(usual_dtype)],
        };
        let intermediate = self.intermediate.unwrap_or(columns);
        let hidden = self.hidden.unwrap_or(896);
        let m = if self.m.is_empty() { vec![usual] } else { self.m.clone() };
        let case = |m, dtype| Case {
            weights: self.weights_type,
            heat: if self.hot { Heat::Hot } else { Heat::Cold },
            ..Case::new(kind, op, [m, hidden, intermediate], dtype)
        };
        m.into_iter().flat_map(|m| dtypes.iter().map(move |&dtype| case(m, dtype))).collect()
    }
}
