//! `swiglu bench`: speed as a fraction of what this machine can do, every result verified. It is a run of
//! the lab without a definition: the same processes, protocol and oracle.

mod host;
mod report;

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Result, bail};
use clap::{ArgAction, Args, ValueEnum};
use serde_json::{Value, json};
use swiglu::{CpuOptions, DType, Device, QuantizedType};
use swiglu_lab::profile::Ceilings;
use swiglu_lab::{Case, CaseOp, DeviceKind, Heat, ProfileDef, Role};

use crate::args::{self, DeviceArgs, MathArgs, extent, one_of};
use crate::ceilings;
use crate::terminal::{Terminal, Verdict, say};
use crate::verbs::lab::adhoc::{self, AdHocArgs};
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
    /// Other libraries beside ours, separated by commas; what is not installed says so, and is a failure where all
    /// that are named are not
    #[arg(long, visible_alias = "providers", value_name = "NAMES", value_delimiter = ',')]
    backend: Vec<Backend>,
    #[command(flatten)]
    math: MathArgs,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    lab: AdHocArgs,
}

/// Ceilings as they were measured once, by the threads and whether there are weights.
type Limits = BTreeMap<(usize, bool), Ceilings>;

pub(crate) fn bench(args: &BenchArgs, terminal: &mut Terminal) -> Result<Verdict> {
    args.lab.expect_places(true)?;
    let device = args.device.open()?;
    if args.op.is_none() && args.suite == Suite::Host {
        let Device::Cuda(cuda) = &device else {
            bail!("the host suite measures calls of a CUDA device, given {device}");
        };
        return host::bench(cuda, args.seconds, terminal);
    }
    args.op.map_or(Ok(()), |op| args::expect_no_hidden(op, args.hidden))?;
    let cases = args.cases(&device)?;
    let options = args.device.peer_options()?;
    let mut runs = vec![(device.clone(), options.clone(), "", &args.backend[..])];
    // For the goals also one thread alone.
    let is_goals = args.op.is_none() && args.suite == Suite::Goals;
    if is_goals && args.device.threads.is_none() && device.threads() > 1 {
        let one = CpuOptions::default().with_isa(args.device.isa).with_threads(1);
        let options = adhoc::with(options, &json!({ "threads": 1 }));
        runs.push((Device::cpu_with(one)?, options, ", 1 thread", &[]));
    }
    let quick = ceilings::is_quick(args.seconds);
    let (mut known, mut rows) = (Limits::new(), Vec::<Row>::new());
    for (device, options, suffix, backends) in &runs {
        let all = |case: &Case| [ways(case, options, suffix), profiles(backends, case)].concat();
        // Cases with the same ways are one run: each peer is started once.
        for cases in cases.chunk_by(|a, b| all(a) == all(b)) {
            let experiment = adhoc::experiment(cases.to_vec(), all(&cases[0]));
            let mut record = args.lab.measure(&experiment, args.seconds, terminal)?;
            for case in cases {
                // Each beside what the device can do.
                record.ceilings = Some(limits(&mut known, device, case, quick)?);
                rows.extend(report::rows(&experiment, &record, case));
            }
        }
    }
    // What of ours was not computed right is a failure; if nothing was computed, it is an error.
    let ours = || rows.iter().filter(|row| row.ours);
    if let (false, Some(why)) = (ours().any(Row::is_ok), ours().find_map(Row::complaint)) {
        bail!(why);
    }
    // A peer that is not there, or lacks the case, is no fault of the comparison; one that broke is.
    let passed = ours().all(Row::is_ok) && !rows.iter().any(Row::is_broken);
    let known =
        known.iter().map(|((threads, _), of)| json!({ "threads": threads, "ceilings": of }));
    let document = json!({ "results": rows, "ceilings": known.collect::<Vec<_>>() });
    terminal.print(&document, |_, terminal| report::show(&rows, terminal))?;
    // Who names other libraries asks for a comparison; of all there are, those that are here are enough.
    let theirs = || rows.iter().filter(|row| row.theirs);
    let is_named = !args.backend.is_empty() && !args.backend.contains(&Backend::All);
    if let (true, false, Some(why)) =
        (is_named, theirs().any(Row::is_measured), theirs().find_map(Row::complaint))
    {
        say(format!("nothing of --backend was measured: {why}"));
        return Ok(Verdict::Failed);
    }
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
fn limits(known: &mut Limits, device: &Device, case: &Case, quick: bool) -> Result<Ceilings> {
    let (threads, weights) = (device.threads(), case.op.has_weights());
    let changes = case.device == DeviceKind::Cpu && !weights;
    if changes || !known.contains_key(&(threads, weights)) {
        known.insert((threads, weights), ceilings::of(device, case.op, quick)?);
    }
    Ok(ceilings::with_case(known[&(threads, weights)].clone(), device, case)?)
}

impl BenchArgs {
    fn cases(&self, device: &Device) -> Result<Vec<Case>> {
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

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Backend {
    /// Every one; those that are not installed say so
    All,
    /// PyTorch, as users write it and compiled
    Torch,
    /// Kernels in Triton (CUDA)
    Triton,
    /// Liger's kernel (CUDA)
    Liger,
    /// quack's GEMM (Hopper, Blackwell)
    Quack,
    /// ggml (CPU)
    Ggml,
    /// A copy of the same bytes: a limit
    Copy,
}

/// The profiles of backends for a case; also of those that never run on its device, which say so.
fn profiles(backends: &[Backend], case: &Case) -> Vec<ProfileDef> {
    use Backend::{Copy, Ggml, Liger, Quack, Torch, Triton};
    use Role::{Baseline, Ceiling, Peer};
    let (cpu, weights) = (case.device == DeviceKind::Cpu, case.op.has_weights());
    let (activation, trains) = (case.op == CaseOp::Activation, case.op == CaseOp::MlpTrain);
    let linear = weights && !trains;
    // PyTorch has other ways of quantised weights.
    let quantized = case.weights.is_some();
    let dense = !quantized;
    // Gradients of the activation go where there is memory for them.
    let [eager, compile] = match case.op {
        CaseOp::ActivationBackward => ["eager_into", "compile_into"],
        _ => ["eager", "compile"],
    };
    let all = [
        (Torch, quantized, "torch-decoded", "weight-only", Peer, "decoded"),
        (Torch, quantized, "torch-compile", "weight-only", Peer, "compile"),
        (Torch, dense, "torch-eager", "torch", Baseline, eager),
        (Torch, dense, "torch-compile", "torch", Peer, compile),
        (Torch, dense && activation, "torch-composed", "torch", Peer, "eager_composed"),
        (Torch, dense && activation && cpu, "torch-compile-into", "torch", Peer, "compile_into"),
        (Torch, dense && linear && cpu, "torch-onednn", "torch", Peer, "onednn_postops"),
        (Triton, true, "triton", "triton", Peer, if weights { "dual" } else { "" }),
        (Liger, true, "liger", "liger", Peer, ""),
        (Liger, trains, "liger-packed", "liger", Peer, "packed"),
        (Quack, true, "quack", "quack", Peer, ""),
        (Quack, trains, "quack-recompute", "quack", Peer, "recompute"),
        (Quack, trains, "quack-accumulate", "quack", Peer, "accumulate"),
        (Ggml, true, "ggml", "ggml", Peer, ""),
        (Copy, true, "copy", "copy", Ceiling, ""),
    ];
    let asked = |of| backends.iter().any(|backend| [Backend::All, of].contains(backend));
    let wanted = all.into_iter().filter(|(of, is_there, ..)| *is_there && asked(*of));
    let profile = |(of, _, id, peer, role, way): (_, _, _, _, _, &str)| {
        let options = if way.is_empty() { json!({}) } else { json!({ "way": way }) };
        // Nobody trains by replaying a graph.
        let options = if trains { options } else { adhoc::graph(case, options) };
        let mut profile = adhoc::way(id, peer, role, options);
        if of == Ggml && quantized {
            // As it computes with such weights; it is judged as that.
            profile.options.insert("activations".into(), "q8".into());
        }
        profile
    };
    wanted.map(profile).collect()
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Suite {
    /// One of each kind, in under a minute
    Quick,
    /// Every row of the project's goals; on the CPU with one thread and with all
    Goals,
    /// What the host spends on calls of a CUDA device: the first one, and enqueuing others
    Host,
}

impl Suite {
    /// The cases for a device; none of what the host spends, which is measured otherwise.
    fn cases(self, device: DeviceKind) -> swiglu_lab::Result<Vec<Case>> {
        let quick = include_str!("suites/cuda-quick.toml");
        let suites = match (self, device) {
            (Suite::Quick, DeviceKind::Cpu) => vec![include_str!("suites/cpu-quick.toml")],
            (Suite::Goals, DeviceKind::Cpu) => vec![include_str!("suites/cpu-goals.toml")],
            (Suite::Quick, DeviceKind::Cuda) => vec![quick],
            (Suite::Goals, DeviceKind::Cuda) => vec![quick, include_str!("suites/cuda-goals.toml")],
            (Suite::Host, _) => Vec::new(),
        };
        let read = |suite| Case::read_sweeps(suite, Path::new("a suite of bench"), device);
        let cases: Vec<_> = suites.into_iter().map(read).collect::<Result<_, _>>()?;
        Ok(cases.concat())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cases_of_a_suite_are_read_and_differ() {
        for (suite, device, count) in [
            (Suite::Quick, DeviceKind::Cpu, 12),
            (Suite::Goals, DeviceKind::Cpu, 32),
            (Suite::Quick, DeviceKind::Cuda, 12),
            (Suite::Goals, DeviceKind::Cuda, 41),
        ] {
            let cases = suite.cases(device).unwrap();
            let keys: std::collections::BTreeSet<String> = cases.iter().map(Case::key).collect();
            assert_eq!((keys.len(), cases.len()), (count, count), "{suite:?}");
        }
    }
}
