//! `swiglu tune`: the rates of a CUDA device and every way of computing a layer there, measured, for plans to follow. Of each
//! problem every way is verified, then those that are right are timed in turns.

mod gemms;

use std::cell::RefCell;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Result, bail};
use clap::Args;
use indicatif::ProgressBar;
use serde_json::json;
use swiglu::{CoreError, DType, Device, Element, Matrix, Numerics, with_dtype};
use swiglu_cuda::tuning::{Entry, NotKept, Outcome, Refusal, Trial, TuningOptions};
use swiglu_cuda::{Candidate, Cuda, CudaError, Stream, Target, Ways};
use swiglu_lab::{Case, CaseOp, DeviceKind};

use crate::args::{DeviceArgs, MathArgs, extents, layer_op, out_of_range};
use crate::inputs::{self, Derived};
use crate::layer::Params;
use crate::step::{ByCandidate, OnDevice, by_candidate};
use crate::table::{self, Table};
use crate::terminal::{Terminal, Verdict, shown, stop_on_signals};
use crate::timing::{self, Enqueue, Passes, Summary, Timed, interleave};
use crate::verbs::info::probed;
use crate::verbs::kernels::compile;
use crate::verbs::kernels::layers::{MODELS, sizes};
use crate::verify::Check;

const SEED: u64 = 3;
/// A way that took so many times as long as the fastest in a first round is timed no further.
const HOPELESS: f64 = 1.5;
/// Rounds that are taken even if the budget is spent.
const MIN_TURNS: usize = 5;
/// Of the free memory, what copies of the weights may take: a large layer has fewer copies.
const MEMORY_SHARE: usize = 2;

#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("shapes").required(true).multiple(true))]
pub(crate) struct TuneArgs {
    /// The operation [default: gated-linear; of a model both, each with the numbers of tokens that it is planned by]
    #[arg(long, value_name = "NAME", value_parser = layer_op())]
    op: Option<CaseOp>,
    /// The layers of a model, with 1 to 2048 tokens: a safetensors or GGUF file, an index, a directory with a model in it, or
    /// one of qwen2.5-0.5b, llama-3.2-1b, llama-3-8b, qwen2.5-32b, llama-3-70b; may be repeated
    #[arg(long = "for", value_name = "MODEL", group = "shapes")]
    of: Vec<String>,
    /// Tokens, input features and intermediate features, in bf16 unless --dtype says otherwise; may be given several times.
    /// Between two numbers of tokens that are measured, the cost model follows both
    #[arg(long, value_name = "M,K,H", group = "shapes", value_parser = shape)]
    shape: Vec<[usize; 3]>,
    /// The feed-forward sizes of common models, with 1 to 16384 tokens
    #[arg(long, group = "shapes")]
    models: bool,
    /// Of training steps what cuBLASLt proposes for the products behind the fused kernels, in place of the ways of a forward
    /// pass; a model with 2048, 4096, 8192 and 16384 tokens
    #[arg(long, conflicts_with_all = ["op", "models", "numerics", "exp", "batch_invariant", "activation"])]
    training: bool,
    /// Time to measure for, per shape; of training steps per product. What is measured later takes the place of what was before
    #[arg(long, value_name = "S", default_value_t = 1.0, value_parser = crate::args::seconds)]
    seconds: f64,
    /// Where measurements are kept [default: SWIGLU_TUNING_DIR, else swiglu/tuning in the user's
    /// data directory]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    #[command(flatten)]
    math: MathArgs,
    #[command(flatten)]
    device: DeviceArgs,
}

fn shape(s: &str) -> Result<[usize; 3], CoreError> {
    let expected = "three numbers: tokens, input and intermediate features";
    extents(s)?.try_into().map_err(|_| out_of_range("shape", s, expected))
}

/// Powers of two: the cost model, corrected by both, knows what lies between.
const TOKENS: [usize; 15] = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384];
/// Of a whole block, which up to so many tokens has kernels of its own, and of the maps to h, by which blocks of more
/// tokens are planned: more numbers where rows of tiles begin.
const OF_BLOCK: [usize; 5] = [1, 2, 4, 8, 16];
const OF_H: [usize; 14] = [1, 16, 64, 128, 144, 192, 256, 288, 320, 384, 448, 512, 1024, 2048];
/// Of training steps, whose micro-batches are of whole powers of two.
const TRAINED: [usize; 4] = [2048, 4096, 8192, 16384];

impl TuneArgs {
    /// By weights: what is measured of the same ones stands together.
    fn cases(&self, dtype: DType) -> Result<Vec<Case>> {
        let case = |op, shape| self.math.case(Case::new(DeviceKind::Cuda, op, shape, dtype));
        let op = match self.training {
            true => CaseOp::Mlp,
            false => self.op.unwrap_or(CaseOp::GatedLinear),
        };
        let mut cases: Vec<Case> = self.shape.iter().map(|shape| case(op, *shape)).collect();
        if self.models {
            let all = MODELS.into_iter().flat_map(|(_, [k, h])| TOKENS.map(|m| [m, k, h]));
            cases.extend(all.map(|shape| case(op, shape)));
        }
        for model in &self.of {
            for [k, h] in sizes(model)? {
                let counts = match self.training {
                    true => vec![(CaseOp::Mlp, &TRAINED[..])],
                    false => vec![(CaseOp::Mlp, &OF_BLOCK[..]), (CaseOp::GatedLinear, &OF_H[..])],
                };
                let asked =
                    counts.into_iter().filter(|(op, _)| self.op.is_none_or(|asked| asked == *op));
                for (op, counts) in asked {
                    cases.extend(counts.iter().map(|&m| case(op, [m, k, h])));
                }
            }
        }
        Ok(cases)
    }
}

pub(crate) fn tune(args: &TuneArgs, terminal: &mut Terminal) -> Result<Verdict> {
    let options = TuningOptions { dir: args.out.clone(), disabled: false };
    let device = args.device.open_with_tuning(&options)?;
    let Device::Cuda(cuda) = &device else {
        bail!("there is nothing to tune on {device}: its kernels follow from the instruction set");
    };
    let dtype = args.math.dtype.unwrap_or(DType::Bf16);
    let cases = args.cases(dtype)?;
    let stop = Arc::new(AtomicBool::new(false));
    stop_on_signals(&stop, "what is being compiled or measured, which is kept")?;
    if args.training {
        let problems: Vec<_> = cases.iter().filter_map(Case::problem).collect();
        let budget = Duration::from_secs_f64(args.seconds);
        return gemms::tune(cuda, &problems, budget, &options, &stop, terminal);
    }
    let mut kept = Kept::new(|entries| cuda.keep_tuning(&options, entries))?;
    // What will be tried, on all processors: one variant after the other would take most of the time.
    let target = Target::new(cuda.arch(), Some(cuda.facts().sm_count));
    let problems = cases.iter().filter_map(Case::problem);
    let tried = problems.flat_map(|p| target.kernels(&p, Some(&[p.m]), Ways::Every));
    compile(cuda.arch(), tried, &stop, terminal)?;
    // What is expected of shapes that nobody measures follows from rates of this very card.
    let mut said = Vec::new();
    let probes = !cuda.calibration().is_measured() && !stop.load(Ordering::Relaxed);
    let probe = probes.then(|| probed(cuda, &mut said));
    let bar = terminal.bar(cases.len() as u64);
    let budget = Duration::from_secs_f64(args.seconds);
    let subject = Subject { device: &device, cuda, budget, bar: &bar, stop: &stop };
    with_dtype!(dtype, T => subject.measure_all::<T>(&cases, |entry| kept.add(entry)))?;
    bar.finish_and_clear();
    let Kept { entries, replaced, path, .. } = kept;
    let record = shown(path);
    let document = json!({
        "device": device.to_string(), "probe": probe, "record": record, "replaced": replaced,
        "entries": entries,
    });
    terminal.print(&document, |_, terminal| {
        said.iter().try_for_each(|line| writeln!(terminal, "{line}"))?;
        entries.iter().try_for_each(|entry| show(entry, terminal))?;
        if let Some(replaced) = &replaced {
            writeln!(terminal, "the record that was there is replaced: {replaced}")?;
        }
        writeln!(terminal, "{}kept in {record}", of_asked(entries.len(), cases.len()))
    })?;
    let outcomes = entries.iter().flat_map(|entry| &entry.trials).map(|trial| &trial.outcome);
    Ok(verdict(entries.len() == cases.len(), outcomes))
}

/// What a run that was ended says before where its measurements are kept.
fn of_asked(measured: usize, asked: usize) -> String {
    match measured == asked {
        true => String::new(),
        false => format!("stopped with {measured} of {asked} measured, "),
    }
}

/// Whether every way that could be tried gave the right result, and nothing is left to measure.
fn verdict<'a>(finished: bool, mut outcomes: impl Iterator<Item = &'a Outcome>) -> Verdict {
    let unsound = |o: &Outcome| matches!(o, Outcome::Wrong { .. } | Outcome::Failed { .. });
    match (outcomes.any(unsound), finished) {
        (true, _) => Verdict::Failed,
        (false, true) => Verdict::Passed,
        (false, false) => Verdict::Unfinished,
    }
}

/// What was measured so far. All of it is kept with each entry: a run that is ended has lost nothing, nor has one whose record
/// another program took away meanwhile.
struct Kept<E, K> {
    keep: K,
    entries: Vec<E>,
    /// Why a record that was there is replaced.
    replaced: Option<String>,
    path: PathBuf,
}

impl<E: Clone, K> Kept<E, K>
where
    K: Fn(Vec<E>) -> Result<(PathBuf, Option<Refusal>), NotKept>,
{
    /// Nothing is measured that cannot be kept.
    fn new(keep: K) -> Result<Self, NotKept> {
        let (path, _) = keep(Vec::new())?;
        Ok(Self { keep, entries: Vec::new(), replaced: None, path })
    }

    fn add(&mut self, entry: E) -> Result<(), NotKept> {
        self.entries.push(entry);
        let (_, refusal) = (self.keep)(self.entries.clone())?;
        self.replaced = refusal.map(|refusal| refusal.to_string()).or(self.replaced.take());
        Ok(())
    }
}

fn show(entry: &Entry, terminal: &mut Terminal) -> Result<()> {
    writeln!(terminal, "{}", entry.problem)?;
    let measured = |t: &&Trial| matches!(t.outcome, Outcome::Measured { .. });
    let medians = entry.trials.iter().filter(measured).filter_map(|t| t.outcome.median_us());
    let best = medians.fold(f64::INFINITY, f64::min);
    let time = |us: Option<f64>| us.map(table::time).unwrap_or_default();
    let ratio = |us: f64| format!("{:.2}", us / best);
    Table::of(&entry.trials)
        .text("way", |t| &t.way)
        .number("expected", |t| time(t.predicted_us))
        .number("measured", |t| time(t.outcome.median_us()))
        .number("p10", |t| time(spread(t).map(|[p10, _]| p10)))
        .number("p90", |t| time(spread(t).map(|[_, p90]| p90)))
        .number("of best", |t| t.outcome.median_us().map(ratio).unwrap_or_default())
        .text("remark", |t| remark(t, best))
        .print(terminal)?;
    writeln!(terminal)
}

fn spread(trial: &Trial) -> Option<[f64; 2]> {
    match trial.outcome {
        Outcome::Measured { p10_us, p90_us, .. } => Some([p10_us, p90_us]),
        Outcome::Compared { p10_p90_us, .. } => p10_p90_us,
        _ => None,
    }
}

fn remark(trial: &Trial, best: f64) -> String {
    match &trial.outcome {
        Outcome::Measured { median_us, .. } if *median_us == best => "fastest".into(),
        Outcome::Measured { .. } => String::new(),
        Outcome::Compared { reason, .. } => format!("no choice: {reason}"),
        Outcome::Refused { reason } => reason.clone(),
        Outcome::Wrong { reason } => format!("WRONG: {reason}"),
        Outcome::Failed { reason } => format!("FAILED: {reason}"),
    }
}

struct Subject<'a> {
    device: &'a Device,
    cuda: &'a Cuda,
    budget: Duration,
    bar: &'a ProgressBar,
    stop: &'a AtomicBool,
}

struct Copies<'a, T> {
    stream: Stream,
    params: Params<'a, T>,
    x: Matrix<T>,
    /// Copies that together exceed the second-level cache.
    layers: Vec<ByCandidate<T>>,
    copies: RefCell<Vec<OnDevice<T>>>,
}

impl<T: Element> Copies<'_, T> {
    /// One call with copy i of the data.
    fn call(&self, way: &Candidate, at: usize) -> Result<(), CudaError> {
        self.layers[at](&self.stream, way, &mut self.copies.borrow_mut()[at])
    }

    /// The result of a call, in memory that held NaN.
    fn result(&self, way: &Candidate) -> Result<Matrix<T>, CudaError> {
        self.copies.borrow_mut()[0].poison()?;
        self.call(way, 0)?;
        self.copies.borrow()[0].written[0].to_host()
    }
}

impl Subject<'_> {
    /// Measures one case after the other until it is to stop, and keeps what came of each.
    fn measure_all<T: Element>(
        &self,
        cases: &[Case],
        mut keep: impl FnMut(Entry) -> Result<(), NotKept>,
    ) -> Result<()> {
        // Large weights take longer to make than to multiply.
        let same = |a: &Case, b: &Case| {
            (a.op, a.hidden, a.intermediate) == (b.op, b.hidden, b.intermediate)
        };
        for cases in cases.chunk_by(same) {
            if self.stop.load(Ordering::Relaxed) {
                break;
            }
            let weights = Derived::<T>::derive(&cases[0], SEED, true)?;
            for case in cases {
                if self.stop.load(Ordering::Relaxed) {
                    break;
                }
                self.bar.set_message(case.key());
                keep(self.measure(&weights, case)?)?;
                self.bar.inc(1);
            }
        }
        Ok(())
    }

    fn measure<T: Element>(&self, weights: &Derived<T>, case: &Case) -> Result<Entry> {
        let params = weights.params();
        let (problem, x) = (params.problem(case.m), inputs::x::<T>(case, SEED)?);
        let stream = self.cuda.stream();
        let bytes = problem.compulsory_bytes() as usize;
        let (free, _) = self.cuda.memory_info()?;
        let room = (free / MEMORY_SHARE / bytes.max(1)).max(1);
        let count = timing::copies(self.cuda, bytes).min(room);
        let layers = by_candidate(self.cuda, &params, count)?;
        let copy = |_| OnDevice::new(&stream, &[x.view()], [case.output_shape()]);
        let copies = RefCell::new((0..count).map(copy).collect::<Result<_, _>>()?);
        let data = Copies { stream, params, x, layers, copies };
        let ways = self.cuda.candidates(&problem, None);
        let mut checks = Vec::new();
        let mut outcomes = Vec::with_capacity(ways.len());
        for way in &ways {
            outcomes.push(self.verify(way, &data, &mut checks)?);
        }
        self.time(&ways, &data, &mut outcomes)?;
        let trial = |(way, outcome): (Candidate, Option<Outcome>)| {
            let (predicted_us, way) = (way.predicted_us, way.name);
            // Every way was refused, was wrong, failed, or was timed.
            outcome.map(|outcome| Trial { way, predicted_us, outcome })
        };
        let trials = ways.into_iter().zip(outcomes).filter_map(trial).collect();
        Ok(Entry::new(problem, self.cuda.tf32(), trials))
    }

    /// What is to be said of a way that is not timed.
    fn verify<T: Element>(
        &self,
        way: &Candidate,
        data: &Copies<'_, T>,
        checks: &mut Vec<(Numerics, Check)>,
    ) -> Result<Option<Outcome>> {
        let refused = |reason| Ok(Some(Outcome::Refused { reason }));
        let Some(numerics) = way.numerics else {
            return refused(way.refusal.clone().unwrap_or_default());
        };
        let result = match data.result(way) {
            Ok(result) => result,
            // A candidate does not take every x, for example rows that TMA does not address.
            Err(CudaError::Unsupported { why, .. }) => return refused(why),
            Err(error) => return Ok(Some(Outcome::Failed { reason: error.to_string() })),
        };
        let known = checks.iter().position(|(of, _)| *of == numerics);
        if known.is_none() {
            let params = data.params.with_numerics(numerics);
            checks.push((numerics, Check::of(self.device, &params, data.x.view())?));
        }
        let judgement = checks[known.unwrap_or(checks.len() - 1)].1.judge(result.view())?;
        let wrong = || Outcome::Wrong { reason: format!("{judgement:?}") };
        Ok((!judgement.passed()).then(wrong))
    }

    /// Times the ways of which nothing is said yet: in a first round all, then what may be the fastest.
    fn time<T: Element>(
        &self,
        ways: &[Candidate],
        data: &Copies<'_, T>,
        outcomes: &mut [Option<Outcome>],
    ) -> Result<()> {
        let mut timed = Vec::new();
        for (i, way) in ways.iter().enumerate() {
            if outcomes[i].is_some() {
                continue;
            }
            let enqueue: Enqueue<'_> = Box::new(move |_, at| Ok(data.call(way, at)?));
            // A graph: what the host spends on a call is the same for all, and not what is asked.
            match Passes::new(data.stream.clone(), data.layers.len(), true, enqueue) {
                Ok(passes) => timed.push((i, passes.timed())),
                Err(error) => outcomes[i] = Some(Outcome::Failed { reason: format!("{error:#}") }),
            }
        }
        in_rounds(timed, self.budget, |i, time| outcomes[i] = Some(outcome(&ways[i], time)))
    }
}

/// Times ways by their numbers: in a first round all, then what may be the fastest. The last of each is what counts.
fn in_rounds(
    mut timed: Vec<(usize, Timed<'_>)>,
    budget: Duration,
    mut took: impl FnMut(usize, Summary),
) -> Result<()> {
    let mut turns = |timed: &mut [(usize, Timed<'_>)], budget, min_turns| {
        let mut all: Vec<_> = timed.iter_mut().map(|(_, timed)| timed).collect();
        let times = interleave(&mut all, budget, min_turns)?;
        timed.iter().zip(&times).for_each(|((i, _), time)| took(*i, *time));
        anyhow::Ok(times)
    };
    let first = turns(&mut timed, Duration::ZERO, 1)?;
    let best = first.iter().map(|t| t.median).fold(f64::INFINITY, f64::min);
    let mut hopeful = first.iter().map(|t| t.median <= HOPELESS * best);
    timed.retain(|_| hopeful.next().unwrap_or(false));
    turns(&mut timed, budget, MIN_TURNS).map(drop)
}

fn outcome(way: &Candidate, time: Summary) -> Outcome {
    let Summary { median: median_us, p10: p10_us, p90: p90_us, samples } = time;
    match &way.refusal {
        None => Outcome::Measured { median_us, p10_us, p90_us, samples },
        Some(reason) => {
            let p10_p90_us = Some([p10_us, p90_us]);
            Outcome::Compared { median_us, p10_p90_us, reason: reason.clone() }
        }
    }
}
