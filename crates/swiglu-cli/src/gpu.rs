//! Timing on a CUDA device: data that is resident there, by the device's own clock.
//!
//! A call is enqueued without waiting for the one before, as a model does it. So a sample is the mean
//! of a turn of many calls between two events, and variants take turns as on the CPU. What the host
//! spends on a call counts where it spends more than the device; a captured graph has no such part.

use std::time::{Duration, Instant};

use anyhow::bail;
use swiglu::cuda::{Cuda, CudaError, DeviceMatrix, Graph, Stream};
use swiglu::{Element, Matrix, MatrixRef};

use crate::layer::Packed;
use crate::stats::Summary;

/// Long compared with the resolution of events and the start of a turn.
const TURN: Duration = Duration::from_millis(4);
/// More steps than this do not make a turn more exact.
const MAX_STEPS: usize = 1000;
/// More samples than this add nothing to a median.
const MAX_SAMPLES: usize = 2_000;
/// Data in rotation, in units of the second-level cache.
const ROTATION: usize = 4;
/// Copies beyond which tiny data are cold in every cache that matters.
const MAX_COPIES: usize = 512;

/// Work that is enqueued as one, and the number of calls in it.
pub(crate) struct Step<'a> {
    calls: usize,
    enqueue: Box<dyn FnMut() -> anyhow::Result<()> + 'a>,
}

impl<'a> Step<'a> {
    /// One call.
    pub(crate) fn call(enqueue: impl FnMut() -> anyhow::Result<()> + 'a) -> Self {
        Self { calls: 1, enqueue: Box::new(enqueue) }
    }
}

/// How many copies of data with this many bytes exceed the second-level cache by far.
pub(crate) fn copies(cuda: &Cuda, bytes: usize) -> usize {
    (ROTATION * cuda.facts().l2_bytes).div_ceil(bytes.max(1)).clamp(1, MAX_COPIES)
}

/// Times steps on a stream: medians of the time per call.
pub(crate) fn interleave(
    stream: &Stream,
    steps: &mut [Step<'_>],
    budget: Duration,
    min_turns: usize,
) -> anyhow::Result<Vec<Summary>> {
    let mut per_turn = Vec::with_capacity(steps.len());
    for step in steps.iter_mut() {
        // The first one compiles, loads and allocates; the second says how long one takes.
        turn(stream, step, 1)?;
        let one = turn(stream, step, 1)?.max(1e-6);
        per_turn.push((TURN.as_secs_f64() / one).clamp(1.0, MAX_STEPS as f64) as usize);
    }
    let mut samples = vec![Vec::new(); steps.len()];
    let start = Instant::now();
    let mut turns = 0;
    while turns < min_turns || (start.elapsed() < budget && turns < MAX_SAMPLES) {
        for ((step, &count), samples) in steps.iter_mut().zip(&per_turn).zip(&mut samples) {
            let seconds = turn(stream, step, count)?;
            samples.push(seconds * 1e6 / (count * step.calls) as f64);
        }
        turns += 1;
    }
    Ok(samples.iter_mut().map(|s| Summary::of(s)).collect())
}

/// Seconds that `count` steps take. One before them is not timed: it keeps the device busy while the
/// host enqueues the others, and displaces the other variants' data.
fn turn(stream: &Stream, step: &mut Step<'_>, count: usize) -> anyhow::Result<f64> {
    (step.enqueue)()?;
    let start = stream.record()?;
    for _ in 0..count {
        (step.enqueue)()?;
    }
    let end = stream.record()?;
    Ok(f64::from(end.elapsed_ms(&start)?) / 1e3)
}

/// `calls` steps of one call each, as one captured graph.
pub(crate) fn captured<'a>(
    stream: &'a Stream,
    calls: usize,
    mut step: Step<'a>,
) -> anyhow::Result<Step<'a>> {
    // Compiles and allocates what a capture cannot. A whole round, so that the graph begins with the
    // first copy of the data again.
    for _ in 0..calls {
        (step.enqueue)()?;
    }
    stream.synchronize()?;
    let mut outcome = Ok(());
    let graph: Graph = stream.capture(|| {
        // The capture ends in any case; what went wrong in it is told after that.
        outcome = (0..calls).try_for_each(|_| (step.enqueue)());
        Ok(())
    })?;
    outcome?;
    let enqueue = move || {
        // The data and layers behind the nodes live as long as the step that borrows them.
        let _alive = &step;
        // SAFETY: what was captured is alive, and the graph runs in the order of the stream that it
        // was captured on.
        Ok(unsafe { graph.launch(stream) }?)
    };
    Ok(Step { calls, enqueue: Box::new(enqueue) })
}

/// Rotating copies of an input and of the outputs, in device memory.
pub(crate) struct Rotation<T> {
    pub(crate) inputs: Vec<DeviceMatrix<T>>,
    pub(crate) outs: Vec<DeviceMatrix<T>>,
}

impl<T: Element> Rotation<T> {
    pub(crate) fn new(
        stream: &Stream,
        copies: usize,
        x: MatrixRef<'_, T>,
        out_features: usize,
    ) -> anyhow::Result<Self> {
        let input = || DeviceMatrix::from_host(stream, x);
        // A result that is not written shows as NaN.
        let out = || {
            let mut out = DeviceMatrix::new(stream, x.rows(), out_features)?;
            out.buffer_mut().poison(0xFF)?;
            Ok(out)
        };
        Ok(Self {
            inputs: (0..copies).map(|_| input()).collect::<Result<_, _>>()?,
            outs: (0..copies).map(|_| out()).collect::<Result<_, CudaError>>()?,
        })
    }

    /// The result from the first copy, on the host.
    pub(crate) fn first_out(&self) -> anyhow::Result<Matrix<T>> {
        match self.outs.first() {
            Some(out) => Ok(out.to_host()?),
            None => bail!("a rotation has at least one copy"),
        }
    }
}

/// Calls of layers, each with the next copy of weights and data.
pub(crate) fn layer_calls<'a, T: Element>(
    stream: &'a Stream,
    layers: &'a [Packed],
    data: &'a mut Rotation<T>,
) -> Step<'a> {
    let mut turn = 0;
    Step::call(move || {
        let at = turn % data.inputs.len();
        let layer = &layers[turn % layers.len()];
        turn += 1;
        Ok(layer.forward_on(stream, data.inputs[at].view(), data.outs[at].view_mut())?)
    })
}
