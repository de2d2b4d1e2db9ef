//! One problem: every way verified, then those that are right timed in turns.

use std::cell::RefCell;
use std::time::Duration;

use indicatif::ProgressBar;
use swiglu::{Device, Element, Matrix, Numerics};
use swiglu_cuda::tuning::{Entry, Outcome, Trial, TuningOptions};
use swiglu_cuda::{Candidate, Cuda, CudaError, DeviceMatrix, Stream};
use swiglu_lab::Case;

use crate::inputs::{self, Dense};
use crate::layer::{ByCandidate, Params, by_candidate};
use crate::timing::{self, Enqueue, Passes, Summary, Timed, interleave};
use crate::verify::Check;

const SEED: u64 = 3;
/// A way that took so many times as long as the fastest in a first round is timed no further.
const HOPELESS: f64 = 1.5;
/// Rounds that are taken even if the budget is spent.
const MIN_TURNS: usize = 5;
/// Of the free memory, what copies of the weights may take: a large layer has fewer copies.
const MEMORY_SHARE: usize = 2;

/// What is measured on.
pub(super) struct Subject<'a> {
    pub(super) device: &'a Device,
    pub(super) cuda: &'a Cuda,
    pub(super) budget: Duration,
    /// Where measurements are kept.
    pub(super) options: &'a TuningOptions,
    pub(super) bar: &'a ProgressBar,
}

/// Whether every way that could be tried gave the right result.
pub(super) fn is_sound(entry: &Entry) -> bool {
    let unsound = |t: &Trial| matches!(t.outcome, Outcome::Wrong { .. } | Outcome::Failed { .. });
    !entry.trials.iter().any(unsound)
}

/// The data of a problem on the device.
struct OnDevice<'a, T> {
    stream: Stream,
    params: Params<'a, T>,
    x: Matrix<T>,
    /// Copies that together exceed the second-level cache.
    layers: Vec<ByCandidate<T>>,
    inputs: Vec<DeviceMatrix<T>>,
    outs: RefCell<Vec<DeviceMatrix<T>>>,
}

impl<T: Element> OnDevice<'_, T> {
    /// One call with copy i of the data.
    fn call(&self, way: &Candidate, at: usize) -> Result<(), CudaError> {
        let (x, mut outs) = (self.inputs[at].view(), self.outs.borrow_mut());
        self.layers[at](&self.stream, way, x, outs[at].view_mut())
    }

    /// The result of a call, in memory that held NaN.
    fn result(&self, way: &Candidate) -> Result<Matrix<T>, CudaError> {
        self.outs.borrow_mut()[0].buffer_mut().poison(0xFF)?;
        self.call(way, 0)?;
        self.outs.borrow()[0].to_host()
    }
}

impl Subject<'_> {
    /// Measures one case after the other, and keeps what came of each: a run that is ended has lost nothing.
    pub(super) fn measure_all<T: Element>(&self, cases: &[Case]) -> anyhow::Result<Vec<Entry>> {
        let mut entries = Vec::new();
        // Large weights take longer to make than to multiply.
        let same = |a: &Case, b: &Case| {
            (a.op, a.hidden, a.intermediate) == (b.op, b.hidden, b.intermediate)
        };
        for cases in cases.chunk_by(same) {
            let weights = Dense::<T>::derive(&cases[0], SEED)?;
            for case in cases {
                self.bar.set_message(case.key());
                let entry = self.measure(&weights, case)?;
                self.cuda.keep_tuning(self.options, vec![entry.clone()])?;
                entries.push(entry);
                self.bar.inc(1);
            }
        }
        Ok(entries)
    }

    fn measure<T: Element>(&self, weights: &Dense<T>, case: &Case) -> anyhow::Result<Entry> {
        let params = weights.params();
        let (problem, x) = (params.problem(case.m), inputs::x(case, SEED)?);
        let stream = self.cuda.stream();
        let bytes = problem.compulsory_bytes() as usize;
        let (free, _) = self.cuda.memory_info()?;
        let room = (free / MEMORY_SHARE / bytes.max(1)).max(1);
        let copies = 0..timing::copies(self.cuda, bytes).min(room);
        let layers = copies.clone().map(|_| by_candidate(self.cuda, &params));
        let layers = layers.collect::<anyhow::Result<Vec<_>>>()?;
        let input = |_| DeviceMatrix::from_host(&stream, x.view());
        let inputs = copies.clone().map(input).collect::<Result<_, _>>()?;
        let out = |_| DeviceMatrix::new(&stream, case.m, params.out_features());
        let outs = RefCell::new(copies.map(out).collect::<Result<_, _>>()?);
        let data = OnDevice { stream, params, x, layers, inputs, outs };
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
        data: &OnDevice<'_, T>,
        checks: &mut Vec<(Numerics, Check)>,
    ) -> anyhow::Result<Option<Outcome>> {
        let Some(numerics) = way.numerics else {
            let reason = way.refusal.clone().unwrap_or_default();
            return Ok(Some(Outcome::Refused { reason }));
        };
        let result = match data.result(way) {
            Ok(result) => result,
            // A candidate does not take every x, for example rows that TMA does not address.
            Err(CudaError::Unsupported { why, .. }) => {
                return Ok(Some(Outcome::Refused { reason: why }));
            }
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

    /// Times the ways of which nothing is to be said yet: in a first round all, then those that may be the
    /// fastest, in turns.
    fn time<T: Element>(
        &self,
        ways: &[Candidate],
        data: &OnDevice<'_, T>,
        outcomes: &mut [Option<Outcome>],
    ) -> anyhow::Result<()> {
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
        let mut turns = |timed: &mut [(usize, Timed<'_>)], budget, min_turns| {
            let mut all: Vec<_> = timed.iter_mut().map(|(_, timed)| timed).collect();
            let times = interleave(&mut all, budget, min_turns)?;
            for ((i, _), time) in timed.iter().zip(&times) {
                outcomes[*i] = Some(outcome(&ways[*i], *time));
            }
            anyhow::Ok(times)
        };
        let first = turns(&mut timed, Duration::ZERO, 1)?;
        let best = first.iter().map(|t| t.median).fold(f64::INFINITY, f64::min);
        let mut hopeful = first.iter().map(|t| t.median <= HOPELESS * best);
        timed.retain(|_| hopeful.next().unwrap_or(false));
        turns(&mut timed, self.budget, MIN_TURNS).map(drop)
    }
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
