//! One case on a CUDA device: every way of computing it, call by call and as a captured graph, on
//! resident data.

use std::time::Duration;

use swiglu::{
    Activation, Arrangement, Device, Element, GatedActivation, Matrix, MatrixRef, Numerics, Path,
    Problem, with_dtype,
};
use swiglu_cuda::ceilings::{self, Ceilings};
use swiglu_cuda::{Cuda, DeviceGateUp, DeviceMatrix, Stream};

use super::cases::{Case, SEED, Subject};
use super::measure::{Activations, Checks};
use super::report::{CudaLimits, Limits, Row, Speed};
use crate::args::{LayerOp, MathArgs};
use crate::gpu::{self, Rotation, Step};
use crate::layer::Packed;
use crate::quantized::SyntheticBlocks;
use crate::random::{self, SyntheticLayer};
use crate::roofline::{Floor, Rates};
use crate::stats::Summary;
use crate::timing::Heat;
use crate::verify::Check;

/// A device with its limits.
pub(super) struct CudaBench<'a> {
    device: &'a Device,
    cuda: &'a Cuda,
    stream: Stream,
    limits: Ceilings,
    activation: Activation,
    math: &'a MathArgs,
    budget: Duration,
}

/// A way of computing a case, with the data it rotates through.
struct Way<T> {
    /// Call by call, and as a graph.
    profiles: [&'static str; 2],
    numerics: Numerics,
    /// One per copy of the weights; none for the activation.
    layers: Vec<Packed>,
    /// Call by call, and as a graph.
    data: [Rotation<T>; 2],
}

impl<'a> CudaBench<'a> {
    pub(super) fn new(
        device: &'a Device,
        cuda: &'a Cuda,
        activation: Activation,
        math: &'a MathArgs,
        seconds: f64,
    ) -> anyhow::Result<Self> {
        let (limits, budget) = (ceilings::measure(cuda)?, Duration::from_secs_f64(seconds));
        Ok(Self { device, cuda, stream: cuda.stream(), limits, activation, math, budget })
    }

    pub(super) fn limits(&self) -> Vec<Limits> {
        vec![Limits::Cuda(CudaLimits { device: self.device.to_string(), ceilings: self.limits })]
    }

    pub(super) fn case(&self, case: &Case) -> anyhow::Result<Vec<Row>> {
        let subject = case.subject()?;
        with_dtype!(case.dtype, T => match &subject {
            Subject::Activation => self.activations::<T>(case),
            Subject::Layer(op) => self.layers::<T>(case, *op),
            Subject::Blocks(blocks) => self.blocks::<T>(case, blocks),
        })
    }

    /// Quantised weights as they are, and decoded to T.
    fn blocks<T: Element>(
        &self,
        case: &Case,
        blocks: &SyntheticBlocks,
    ) -> anyhow::Result<Vec<Row>> {
        let numerics = self.math.numerics(T::DTYPE);
        let decoded = blocks.decode::<T>()?;
        let quantized = blocks.params(self.activation, numerics, None);
        let params = decoded.params(self.activation, numerics)?;
        let x: Matrix<T> = random::normal(SEED ^ 0x78, case.m, case.hidden, 1.0)?;
        let problems = [quantized.problem::<T>(case.m), params.problem(case.m)];
        let [few, many] = problems.map(|p| self.copies(case.heat, p.compulsory_bytes()));
        let way = |profiles, layers: Vec<Packed>| -> anyhow::Result<Way<T>> {
            let copies = layers.len();
            let numerics = layers[0].plan(case.m).problem.numerics;
            let rotation = || Rotation::new(&self.stream, copies, x.view(), params.out_features());
            Ok(Way { profiles, numerics, layers, data: [rotation()?, rotation()?] })
        };
        let as_blocks = (0..few).map(|_| quantized.pack::<T>(self.device));
        let as_values = (0..many).map(|_| params.pack(self.device, None));
        let mut ways = [
            way(["quantized", "quantized, graph"], as_blocks.collect::<swiglu::Result<_>>()?)?,
            way(["decoded", "decoded, graph"], as_values.collect::<swiglu::Result<_>>()?)?,
        ];
        let times = self.time_ways(&mut ways)?;
        let mut checks = [
            Checks::new(|n| Check::of_blocks(&quantized.with_numerics(n), x.view())),
            Checks::new(|n| Check::of_layer(self.device, &params.with_numerics(n), x.view())),
        ];
        let [blocks, values] = &mut checks;
        let mut rows = self.rows(case, problems[0], blocks, &ways[..1], &times)?;
        rows.extend(self.rows(case, problems[1], values, &ways[1..], &times[2..])?);
        Ok(rows)
    }

    /// Call by call and as a graph, in turns.
    fn time_ways<T: Element>(&self, ways: &mut [Way<T>]) -> anyhow::Result<Vec<Summary>> {
        let mut steps = Vec::new();
        for way in ways {
            let [single, graph] = &mut way.data;
            let copies = way.layers.len();
            steps.push(gpu::layer_calls(&self.stream, &way.layers, single));
            let calls = gpu::layer_calls(&self.stream, &way.layers, graph);
            steps.push(gpu::captured(&self.stream, copies, calls)?);
        }
        self.time(steps)
    }

    fn copies(&self, heat: Heat, bytes: f64) -> usize {
        match heat {
            Heat::Hot => 1,
            Heat::Cold => gpu::copies(self.cuda, bytes as usize),
        }
    }

    fn layers<T: Element>(&self, case: &Case, op: LayerOp) -> anyhow::Result<Vec<Row>> {
        let layer = SyntheticLayer::<T>::normal(SEED, op, case.hidden, case.intermediate)?;
        let params = layer.params(self.activation, self.math.numerics(T::DTYPE))?;
        let x: Matrix<T> = random::normal(SEED ^ 0x78, case.m, case.hidden, 1.0)?;
        let problem = params.problem(case.m);
        let copies = self.copies(case.heat, problem.compulsory_bytes());
        let mut checks =
            Checks::new(|n| Check::of_layer(self.device, &params.with_numerics(n), x.view()));
        let way = |profiles, path| -> anyhow::Result<Way<T>> {
            let pack = (0..copies).map(|_| params.pack(self.device, path));
            let layers = pack.collect::<swiglu::Result<Vec<_>>>()?;
            let numerics = layers[0].plan(case.m).problem.numerics;
            let rotation = || Rotation::new(&self.stream, copies, x.view(), params.out_features());
            Ok(Way { profiles, numerics, layers, data: [rotation()?, rotation()?] })
        };
        let mut ways = [
            way(["planned", "planned, graph"], None)?,
            way(["unfused", "unfused, graph"], Some(Path::Unfused))?,
        ];
        let times = self.time_ways(&mut ways)?;
        self.rows(case, problem, &mut checks, &ways, &times)
    }

    fn activations<T: Element>(&self, case: &Case) -> anyhow::Result<Vec<Row>> {
        let numerics = self.math.numerics(T::DTYPE);
        let arrangement = match case.packed {
            true => Arrangement::PackedGateFirst,
            false => Arrangement::Separate,
        };
        let act = GatedActivation::new(self.device, self.activation).with_numerics(numerics);
        let plan = act.plan(case.m, case.intermediate, T::DTYPE, arrangement);
        let host = Activations::<T>::normal([case.m, case.intermediate], case.packed)?;
        let inputs = host.inputs()?;
        let mut checks = Checks::new(|n| Check::of_activation(&self.activation, n, &inputs));
        let copies = self.copies(case.heat, plan.problem.compulsory_bytes());
        let rotation =
            |of: MatrixRef<'_, T>| Rotation::new(&self.stream, copies, of, case.intermediate);
        let data = || rotation(host.0.view());
        let mut ways = [Way {
            profiles: ["fused", "fused, graph"],
            numerics,
            layers: Vec::new(),
            data: [data()?, data()?],
        }];
        // Where gate and up are two tensors, the second one rotates too.
        let upload = |up: &Matrix<T>| {
            (0..copies).map(|_| DeviceMatrix::from_host(&self.stream, up.view())).collect()
        };
        let ups: Option<Vec<_>> = host.1.as_ref().map(upload).transpose()?;
        let mut steps = Vec::new();
        for (i, data) in ways[0].data.iter_mut().enumerate() {
            let calls = self.activation_calls(numerics, arrangement, ups.as_deref(), data);
            let graph = i == 1;
            steps.push(match graph {
                false => calls,
                true => gpu::captured(&self.stream, copies, calls)?,
            });
        }
        let times = self.time(steps)?;
        self.rows(case, plan.problem, &mut checks, &ways, &times)
    }

    fn activation_calls<'p, T: Element>(
        &'p self,
        numerics: Numerics,
        arrangement: Arrangement,
        ups: Option<&'p [DeviceMatrix<T>]>,
        data: &'p mut Rotation<T>,
    ) -> Step<'p> {
        let mut turn = 0;
        Step::call(move || {
            let at = turn % data.inputs.len();
            turn += 1;
            let first = data.inputs[at].view();
            let inputs = match ups {
                Some(ups) => DeviceGateUp::separate(first, ups[at].view())?,
                None => DeviceGateUp::packed(first, arrangement)?,
            };
            let (act, out) = (&self.activation, data.outs[at].view_mut());
            Ok(self.cuda.activation(&self.stream, act, numerics, inputs, out)?)
        })
    }

    fn time(&self, mut steps: Vec<Step<'_>>) -> anyhow::Result<Vec<Summary>> {
        gpu::interleave(&self.stream, &mut steps, self.budget, 3)
    }

    /// Judges what the timed calls have left behind, and states their times.
    fn rows<T: Element>(
        &self,
        case: &Case,
        problem: Problem,
        checks: &mut Checks<'_>,
        ways: &[Way<T>],
        times: &[Summary],
    ) -> anyhow::Result<Vec<Row>> {
        let floor = Floor::of(&problem, case.heat, Rates::of_cuda(&problem, &self.limits));
        let mut rows = Vec::new();
        for (w, way) in ways.iter().enumerate() {
            let kinds = way.profiles.into_iter().zip(&way.data).enumerate();
            for (kind, (profile, data)) in kinds {
                let time = times[2 * w + kind];
                let unfused = times.get(2 + kind).filter(|_| w == 0);
                let judgement = checks.of(way.numerics)?.judge(data.first_out()?.view())?;
                let speed = Speed {
                    time,
                    floor: Some(floor),
                    steady: true,
                    speedup: unfused.map(|u| u.median / time.median),
                };
                rows.push(Row::new(case, &problem, profile, 1, speed, &judgement));
            }
        }
        Ok(rows)
    }
}
