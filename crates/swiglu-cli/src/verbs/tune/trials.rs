//! One problem: every way verified, then those that are right timed in turns.

use std::cell::RefCell;
use std::time::Duration;

use swiglu::cuda::tuning::{Entry, Outcome, Trial};
use swiglu::cuda::{
    Cuda, CudaError, DeviceMatrixMut, DeviceMatrixRef, GatedLinear, Mlp, Stream, Way,
};
use swiglu::{Activation, Device, Element, Matrix, Numerics};

use crate::args::LayerOp;
use crate::gpu::{self, Rotation, Step};
use crate::layer::Params;
use crate::random::{self, SyntheticLayer};
use crate::stats::Summary;
use crate::verify::Check;

const SEED: u64 = 3;
/// A way that took so many times as long as the fastest in a first round is timed no further.
const HOPELESS: f64 = 1.5;
/// Rounds that are taken even if the budget is spent.
const MIN_TURNS: usize = 5;
/// Of the free memory, what copies of the weights may take: a large layer has fewer copies.
const MEMORY_SHARE: usize = 2;

/// What is measured, except the shape.
pub(super) struct Subject<'a> {
    pub(super) device: &'a Device,
    pub(super) cuda: &'a Cuda,
    pub(super) op: LayerOp,
    pub(super) activation: Activation,
    pub(super) numerics: Numerics,
    pub(super) budget: Duration,
}

/// Whether every way that could be tried gave the right result.
pub(super) fn is_sound(entry: &Entry) -> bool {
    let unsound = |t: &Trial| matches!(t.outcome, Outcome::Wrong { .. } | Outcome::Failed { .. });
    !entry.trials.iter().any(unsound)
}

/// A layer of either operation.
enum Layer<T> {
    GatedLinear(Box<GatedLinear<T>>),
    Mlp(Box<Mlp<T>>),
}

impl<T: Element> Layer<T> {
    fn new(cuda: &Cuda, params: &Params<'_, T>) -> Result<Self, CudaError> {
        Ok(match params {
            Params::GatedLinear(params) => {
                Layer::GatedLinear(Box::new(GatedLinear::new(cuda, params)?))
            }
            Params::Mlp(params) => Layer::Mlp(Box::new(Mlp::new(cuda, params)?)),
        })
    }

    fn forward(
        &self,
        stream: &Stream,
        way: &Way,
        x: DeviceMatrixRef<'_, T>,
        out: DeviceMatrixMut<'_, T>,
    ) -> Result<(), CudaError> {
        match self {
            Layer::GatedLinear(layer) => layer.forward_by(stream, way, x, out),
            Layer::Mlp(layer) => layer.forward_by(stream, way, x, out),
        }
    }
}

/// The data of a problem on the device.
struct OnDevice<'a, T> {
    stream: Stream,
    params: Params<'a, T>,
    x: Matrix<T>,
    /// Copies that together exceed the second-level cache.
    layers: Vec<Layer<T>>,
    data: RefCell<Rotation<T>>,
}

impl Subject<'_> {
    /// Measures one shape after the other and passes on what came of each.
    pub(super) fn measure_all<T: Element>(
        &self,
        shapes: &[[usize; 3]],
        mut before: impl FnMut([usize; 3]),
        mut after: impl FnMut(Entry) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        // Large weights take longer to make than to multiply.
        let mut made: Option<([usize; 2], SyntheticLayer<T>)> = None;
        for &[m, k, h] in shapes {
            before([m, k, h]);
            let layer = match made.take() {
                Some((extents, layer)) if extents == [k, h] => layer,
                _ => SyntheticLayer::normal(SEED, self.op, k, h)?,
            };
            after(self.measure(&layer, [m, k])?)?;
            made = Some(([k, h], layer));
        }
        Ok(())
    }

    fn measure<T: Element>(
        &self,
        layer: &SyntheticLayer<T>,
        [m, k]: [usize; 2],
    ) -> anyhow::Result<Entry> {
        let params = layer.params(self.activation, self.numerics)?;
        let problem = params.problem(m);
        let x: Matrix<T> = random::normal(SEED ^ 0x78, m, k, 1.0)?;
        let stream = self.cuda.stream();
        let bytes = problem.compulsory_bytes() as usize;
        let (free, _) = self.cuda.memory_info()?;
        let room = (free / MEMORY_SHARE / bytes.max(1)).max(1);
        let copies = gpu::copies(self.cuda, bytes).min(room);
        let layers = (0..copies).map(|_| Layer::new(self.cuda, &params));
        let layers = layers.collect::<Result<Vec<_>, _>>()?;
        let data = RefCell::new(Rotation::new(&stream, copies, x.view(), params.out_features())?);
        let data = OnDevice { stream, params, x, layers, data };
        let ways = self.cuda.ways(&problem);
        let mut checks = Vec::new();
        let mut outcomes = Vec::with_capacity(ways.len());
        for way in &ways {
            outcomes.push(self.verify(way, &data, &mut checks)?);
        }
        self.time(&ways, &data, &mut outcomes)?;
        let trial = |(way, outcome): (Way, Option<Outcome>)| {
            let (predicted_us, way) = (way.predicted_us, way.to_string());
            // Every way was refused, was wrong, failed, or was timed.
            outcome.map(|outcome| Trial { way, predicted_us, outcome })
        };
        let trials = ways.into_iter().zip(outcomes).filter_map(trial).collect();
        Ok(Entry::new(problem, self.cuda.tf32(), trials))
    }

    /// What is to be said of a way that is not timed.
    fn verify<T: Element>(
        &self,
        way: &Way,
        data: &OnDevice<'_, T>,
        checks: &mut Vec<(Numerics, Check)>,
    ) -> anyhow::Result<Option<Outcome>> {
        let Some(numerics) = way.numerics else {
            let reason = way.refusal.clone().unwrap_or_default();
            return Ok(Some(Outcome::Refused { reason }));
        };
        let result = (|| {
            let mut rotation = data.data.borrow_mut();
            let Rotation { inputs, outs } = &mut *rotation;
            outs[0].buffer_mut().poison(0xFF)?;
            data.layers[0].forward(&data.stream, way, inputs[0].view(), outs[0].view_mut())?;
            outs[0].to_host()
        })();
        let result: Matrix<T> = match result {
            Ok(result) => result,
            Err(error) => return Ok(Some(Outcome::Failed { reason: error.to_string() })),
        };
        let known = checks.iter().position(|(of, _)| *of == numerics);
        let at = match known {
            Some(at) => at,
            None => {
                let params = data.params.with_numerics(numerics);
                checks.push((numerics, Check::of_layer(self.device, &params, data.x.view())?));
                checks.len() - 1
            }
        };
        let judgement = checks[at].1.judge(result.view())?;
        let reason = || format!("{judgement:?}");
        Ok((!judgement.passed()).then(|| Outcome::Wrong { reason: reason() }))
    }

    /// Times the ways of which nothing is to be said yet: in a first round all, then those that may be the
    /// fastest, in turns.
    fn time<T: Element>(
        &self,
        ways: &[Way],
        data: &OnDevice<'_, T>,
        outcomes: &mut [Option<Outcome>],
    ) -> anyhow::Result<()> {
        let mut timed = Vec::new();
        let mut steps = Vec::new();
        for (i, way) in ways.iter().enumerate() {
            if outcomes[i].is_some() {
                continue;
            }
            let mut turn = 0;
            let call = Step::call(move || {
                let at = turn % data.layers.len();
                turn += 1;
                let mut rotation = data.data.borrow_mut();
                let Rotation { inputs, outs } = &mut *rotation;
                let (x, out) = (inputs[at].view(), outs[at].view_mut());
                Ok(data.layers[at].forward(&data.stream, way, x, out)?)
            });
            // A graph: what the host spends on a call is the same for all, and not what is asked.
            match gpu::captured(&data.stream, data.layers.len(), call) {
                Ok(step) => {
                    timed.push(i);
                    steps.push(step);
                }
                Err(error) => {
                    let reason = format!("{error:#}");
                    outcomes[i] = Some(Outcome::Failed { reason });
                }
            }
        }
        let mut times = gpu::interleave(&data.stream, &mut steps, Duration::ZERO, 1)?;
        let best = times.iter().map(|t| t.median).fold(f64::INFINITY, f64::min);
        let hopeful: Vec<bool> = times.iter().map(|t| t.median <= HOPELESS * best).collect();
        let mut finalists: Vec<Step<'_>> = Vec::new();
        for (step, hopeful) in steps.into_iter().zip(&hopeful) {
            if *hopeful {
                finalists.push(step);
            }
        }
        let last = gpu::interleave(&data.stream, &mut finalists, self.budget, MIN_TURNS)?;
        let places = times.iter_mut().zip(&hopeful).filter(|(_, hopeful)| **hopeful);
        places.zip(last).for_each(|((time, _), last)| *time = last);
        for (i, time) in timed.into_iter().zip(times) {
            outcomes[i] = Some(outcome(&ways[i], time));
        }
        Ok(())
    }
}

fn outcome(way: &Way, time: Summary) -> Outcome {
    let Summary { median: median_us, p10: p10_us, p90: p90_us, samples } = time;
    match &way.refusal {
        None => Outcome::Measured { median_us, p10_us, p90_us, samples },
        Some(reason) => {
            let p10_p90_us = Some([p10_us, p90_us]);
            Outcome::Compared { median_us, p10_p90_us, reason: reason.clone() }
        }
    }
}
