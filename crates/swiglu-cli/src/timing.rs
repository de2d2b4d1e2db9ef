//! One way to time: variants take turns (A-B-A-B), so that whatever changes on the machine changes for
//! all of them. A turn begins with work that is not timed, which wakes threads, brings data back into
//! the caches where they are hot, and displaces those of the others.

use std::time::{Duration, Instant};

use anyhow::Result;
use serde::Serialize;
use swiglu_cuda::{Cuda, CudaError, Event, Graph, Stream};

/// More samples of one turn than this add nothing to a median.
const MAX_PER_TURN: usize = 64;
/// More samples than this, neither.
const MAX_SAMPLES: usize = 20_000;
/// A turn that is long compared with a switch of variants, short compared with the host's drift.
const TURN_US: u64 = 5_000;

/// What can be timed: one turn of so many microseconds gives microseconds per call.
pub(crate) type Timed<'a> = Box<dyn FnMut(u64) -> Result<Vec<f64>> + 'a>;

/// A turn of calls of this thread, each by the wall clock.
pub(crate) fn wall(mut call: impl FnMut() -> Result<()>, budget_us: u64) -> Result<Vec<f64>> {
    call()?;
    let (mut samples, mut spent) = (Vec::new(), 0.0);
    while samples.is_empty() || (spent < budget_us as f64 && samples.len() < MAX_PER_TURN) {
        let start = Instant::now();
        call()?;
        let us = start.elapsed().as_secs_f64() * 1e6;
        samples.push(us);
        spent += us;
    }
    Ok(samples)
}

/// A timed batch is long compared with the resolution of events and the start of a turn.
const BATCH_US: f64 = 2_000.0;
/// A pass has at least this many calls or takes as long as a batch, so that starting a graph is a small part of each.
const MIN_CALLS: usize = 8;
/// Data in rotation on a device, in units of the second-level cache.
const ROTATION: usize = 4;
/// Copies beyond which tiny data are cold in every cache that matters.
const MAX_COPIES: usize = 512;

/// How many copies of data with this many bytes exceed the second-level cache by far.
pub(crate) fn copies(cuda: &Cuda, bytes: usize) -> usize {
    (ROTATION * cuda.facts().l2_bytes).div_ceil(bytes.max(1)).clamp(1, MAX_COPIES)
}

/// Enqueues a call with copy i of its data.
pub(crate) type Enqueue<'a> = Box<dyn FnMut(&Stream, usize) -> Result<()> + 'a>;

/// Calls on a CUDA device by its own clock: passes over all copies of resident data, several times over
/// where there are few, call by call or as a captured graph. A call is enqueued without waiting for
/// the one before, as a model does it, so what the host spends on a call counts where it is more than
/// what the device does; a graph has no such part.
pub(crate) struct Passes<'a> {
    // Dropped before what its nodes point to, which `enqueue` holds.
    graph: Option<Graph>,
    enqueue: Enqueue<'a>,
    stream: Stream,
    copies: usize,
    calls: usize,
    pass_us: f64,
}

impl<'a> Passes<'a> {
    /// Calls everything once, and captures it for a graph. All that calls use lives as long as `enqueue`.
    pub(crate) fn new(
        stream: Stream,
        copies: usize,
        graph: bool,
        enqueue: Enqueue<'a>,
    ) -> Result<Self> {
        let mut passes = Self { graph: None, enqueue, stream, copies, calls: copies, pass_us: 0.0 };
        // Compiles, loads and allocates what a capture cannot.
        passes.pass()?;
        passes.stream.synchronize()?;
        let once_us = passes.batches(1, 1)?[0] * copies as f64;
        let batch = (BATCH_US / once_us.max(1.0)).ceil() as usize;
        let calls = batch.clamp(1, MIN_CALLS.div_ceil(copies)) * copies;
        passes.calls = calls;
        if graph {
            let Self { enqueue, stream, .. } = &mut passes;
            let every = || (0..calls).try_for_each(|call| enqueue(stream, call % copies));
            passes.graph = Some(stream.capture(every)?);
        }
        passes.pass_us = passes.batches(1, 1)?[0] * calls as f64;
        Ok(passes)
    }

    /// Enqueues every call once, each with the next copy, from the first on.
    pub(crate) fn pass(&mut self) -> Result<()> {
        match &self.graph {
            // SAFETY: the data and layers behind the nodes live in `enqueue`, as the graph does in `self`, and
            // it runs in the order of the stream that it was captured on.
            Some(graph) => Ok(unsafe { graph.launch(&self.stream) }?),
            None => (0..self.calls)
                .try_for_each(|call| (self.enqueue)(&self.stream, call % self.copies)),
        }
    }

    /// One turn: microseconds per call of each batch.
    pub(crate) fn turn(&mut self, budget_us: u64) -> Result<Vec<f64>> {
        let passes = (BATCH_US / self.pass_us.max(1.0)).round().max(1.0);
        let batch_us = (passes * self.pass_us).max(1.0);
        let batches = (budget_us as f64 / batch_us).clamp(1.0, MAX_PER_TURN as f64);
        self.batches(batches as usize, passes as usize)
    }

    pub(crate) fn timed(mut self) -> Timed<'a> {
        Box::new(move |budget_us| self.turn(budget_us))
    }

    /// Microseconds per call of each batch. One pass before them is not timed: it keeps the device
    /// busy while the host enqueues the others.
    fn batches(&mut self, batches: usize, passes: usize) -> Result<Vec<f64>> {
        self.pass()?;
        let mut events = vec![self.stream.record()?];
        for _ in 0..batches {
            for _ in 0..passes {
                self.pass()?;
            }
            events.push(self.stream.record()?);
        }
        let calls = (passes * self.calls) as f64;
        let per_call = |pair: &[Event]| -> Result<f64, CudaError> {
            Ok(f64::from(pair[1].elapsed_ms(&pair[0])?) * 1e3 / calls)
        };
        Ok(events.windows(2).map(per_call).collect::<Result<_, _>>()?)
    }
}

/// What a set of times says, in microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Summary {
    pub(crate) median: f64,
    pub(crate) p10: f64,
    pub(crate) p90: f64,
    pub(crate) samples: usize,
}

impl Summary {
    /// By nearest rank: the smallest sample that so many percent do not exceed. Without any, all are 0.
    pub(crate) fn of(mut samples: Vec<f64>) -> Self {
        samples.sort_unstable_by(f64::total_cmp);
        let rank = |percent: usize| (samples.len() * percent).div_ceil(100).max(1);
        let of = |percent| samples.get(rank(percent) - 1).copied().unwrap_or(0.0);
        Self { median: of(50), p10: of(10), p90: of(90), samples: samples.len() }
    }

    /// `amount` per second, in units of 10⁹.
    pub(crate) fn giga_per_second(&self, amount: f64) -> f64 {
        if self.median > 0.0 { amount / (self.median * 1e3) } else { 0.0 }
    }
}

/// Times variants in turns for as long as `budget`, and for `min_turns` even if that is spent.
pub(crate) fn interleave(
    variants: &mut [impl FnMut(u64) -> Result<Vec<f64>>],
    budget: Duration,
    min_turns: usize,
) -> Result<Vec<Summary>> {
    // First turns pay for page faults, clocks and waking threads.
    for variant in variants.iter_mut() {
        variant(1)?;
    }
    let mut samples = vec![Vec::new(); variants.len()];
    let (start, mut turns) = (Instant::now(), 0);
    while turns < min_turns
        || (start.elapsed() < budget && samples.iter().all(|s| s.len() < MAX_SAMPLES))
    {
        for (variant, samples) in variants.iter_mut().zip(&mut samples) {
            samples.extend(variant(TURN_US)?);
        }
        turns += 1;
    }
    Ok(samples.into_iter().map(Summary::of).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    #[test]
    fn variants_take_turns_and_untimed_calls_do_not_count() {
        let order = RefCell::new(String::new());
        let slow = |name: char| {
            let order = &order;
            let call = move || {
                order.borrow_mut().push(name);
                std::thread::sleep(Duration::from_millis(6));
                Ok(())
            };
            move |budget_us| wall(call, budget_us)
        };
        let times = interleave(&mut [slow('a'), slow('b')], Duration::ZERO, 2).unwrap();
        // A turn that does not count, then two that do; each begins with a call that is not timed.
        assert_eq!(order.borrow().as_str(), "aabbaabbaabb");
        assert!(times.iter().all(|t| t.samples == 2 && t.median > 5e3), "{times:?}");
        let broken = |budget_us| wall(|| anyhow::bail!("no"), budget_us);
        assert!(interleave(&mut [broken], Duration::ZERO, 1).is_err());
    }

    #[test]
    fn percentiles_are_samples_by_nearest_rank() {
        let s = Summary::of((1..=10).rev().map(f64::from).collect());
        assert_eq!((s.p10, s.median, s.p90, s.samples), (1.0, 5.0, 9.0, 10));
        assert_eq!(s.giga_per_second(10_000.0), 2.0);
        let none = Summary::of(Vec::new());
        assert_eq!((none.median, none.giga_per_second(1.0)), (0.0, 0.0));
    }
}
