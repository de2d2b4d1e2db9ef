//! One case on the CPU: every way of computing it, with every number of threads, verified and timed.

use std::time::Duration;

use swiglu::{
    Activation, Arrangement, Device, Element, GateUpRef, GatedActivation, Matrix, MatrixRef,
    Numerics, Path, Problem, with_dtype,
};
use swiglu_core::bounds::Judgement;

use super::cases::{Case, SEED, Subject};
use super::report::{CpuLimits, Limits, Row, Speed};
use super::way::{Call, Way};
use crate::args::{LayerOp, MathArgs};
use crate::ceilings::{self, Bandwidth, Ceilings};
use crate::layer::Packed;
use crate::quantized::SyntheticBlocks;
use crate::random::{self, SyntheticLayer};
use crate::roofline::{Floor, Rates};
use crate::stats::Summary;
use crate::timing::{Heat, Protocol, Variant, interleave};
use crate::verify::Check;

/// Copies of cold data together have at least this many bytes: far more than any cache.
const COLD_BYTES: f64 = 400e6;
/// Multiply-adds the plain loops may take per call, about half a second: they are a yardstick.
const NAIVE_WORK: f64 = 2e8;
/// Multiply-adds that take the plain loops as long as one activation.
const ACTIVATION_WORK: f64 = 10.0;
/// How often a measurement is taken whose bandwidth changed under it.
const ATTEMPTS: usize = 3;

/// A device with its limits as they were at the start.
pub(super) struct Bench<'a> {
    devices: Vec<(&'a Device, Ceilings)>,
    activation: Activation,
    math: &'a MathArgs,
    seconds: f64,
}

impl<'a> Bench<'a> {
    pub(super) fn new(
        devices: &'a [Device],
        activation: Activation,
        math: &'a MathArgs,
        seconds: f64,
    ) -> anyhow::Result<Self> {
        let devices = devices
            .iter()
            .map(|device| Ok((device, ceilings::measure(device)?)))
            .collect::<anyhow::Result<_>>()?;
        Ok(Self { devices, activation, math, seconds })
    }

    /// The limits, by number of threads.
    pub(super) fn limits(&self) -> Vec<Limits> {
        let limits = |&(device, ceilings): &(&Device, Ceilings)| {
            Limits::Cpu(CpuLimits { threads: device.threads(), ceilings })
        };
        self.devices.iter().map(limits).collect()
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
        let shape = [case.m, params.out_features()];
        let problems = [quantized.problem::<T>(case.m), params.problem(case.m)];
        let mut checks = [
            Checks::new(|n| Check::of_blocks(&quantized.with_numerics(n), x.view())),
            Checks::new(|n| Check::of_layer(self.devices[0].0, &params.with_numerics(n), x.view())),
        ];
        let [few, many] = problems.each_ref().map(|problem| copies(case.heat, touched(problem)));
        let mut rows = Vec::new();
        for (device, limits) in &self.devices {
            let as_blocks = (0..few).map(|_| quantized.pack::<T>(device)).collect();
            let as_values = (0..many).map(|_| params.pack(device, Some(Path::Fused))).collect();
            let way =
                |profile, packed: swiglu::Result<Vec<Packed>>| -> anyhow::Result<Way<'_, T>> {
                    let calls = packed?.into_iter().map(|layer| forward(layer, x.view())).collect();
                    Ok(Way::new(profile, numerics, shape, calls)?)
                };
            let mut ways = [way("quantized", as_blocks)?, way("decoded", as_values)?];
            let judgements =
                [judged(&mut checks[0], &mut ways[0])?, judged(&mut checks[1], &mut ways[1])?];
            rows.extend(self.measure(case, problems, (device, limits), judgements, ways)?);
        }
        Ok(rows)
    }

    fn layers<T: Element>(&self, case: &Case, op: LayerOp) -> anyhow::Result<Vec<Row>> {
        let layer = SyntheticLayer::<T>::normal(SEED, op, case.hidden, case.intermediate)?;
        let params = layer.params(self.activation, self.math.numerics(T::DTYPE))?;
        let x: Matrix<T> = random::normal(SEED ^ 0x78, case.m, case.hidden, 1.0)?;
        let problem = params.problem(case.m);
        let shape = [case.m, params.out_features()];
        // The unfused way cannot keep accumulators, so it is held to other bounds than the fused.
        let mut checks =
            Checks::new(|n| Check::of_layer(self.devices[0].0, &params.with_numerics(n), x.view()));
        let copies = copies(case.heat, touched(&problem));
        let mut rows = Vec::new();
        for (device, limits) in &self.devices {
            let way = |profile, path| -> anyhow::Result<Way<'_, T>> {
                let pack = (0..copies).map(|_| params.pack(device, Some(path)));
                let packed = pack.collect::<swiglu::Result<Vec<_>>>()?;
                let numerics = packed[0].plan(case.m).problem.numerics;
                let calls = packed.into_iter().map(|layer| forward(layer, x.view())).collect();
                Ok(Way::new(profile, numerics, shape, calls)?)
            };
            let mut ways = [way("fused", Path::Fused)?, way("unfused", Path::Unfused)?];
            let judgements =
                [judged(&mut checks, &mut ways[0])?, judged(&mut checks, &mut ways[1])?];
            rows.extend(self.measure(case, [problem; 2], (device, limits), judgements, ways)?);
        }
        if problem.flops() / 2.0 <= NAIVE_WORK {
            let call: Call<'_, T> = Box::new(|out| Ok(params.naive(x.view(), out)?));
            let way = Way::new("naive", problem.numerics, shape, vec![call])?;
            rows.push(self.naive(case, problem, &mut checks, way)?);
        }
        Ok(rows)
    }

    fn activations<T: Element>(&self, case: &Case) -> anyhow::Result<Vec<Row>> {
        let numerics = self.math.numerics(T::DTYPE);
        let shape = [case.m, case.intermediate];
        let arrangement = match case.packed {
            true => Arrangement::PackedGateFirst,
            false => Arrangement::Separate,
        };
        let bytes = 3.0 * (T::DTYPE.size() * shape[0]) as f64 * shape[1] as f64;
        let data = (0..copies(case.heat, bytes))
            .map(|_| Activations::<T>::normal(shape, case.packed))
            .collect::<swiglu_core::Result<Vec<_>>>()?;
        let inputs = data[0].inputs()?;
        let act = &self.activation;
        let mut checks = Checks::new(|n| Check::of_activation(act, n, &inputs));
        let mut rows = Vec::new();
        let mut problem = None;
        for (device, limits) in &self.devices {
            let act = GatedActivation::new(device, self.activation).with_numerics(numerics);
            let plan = act.plan(case.m, case.intermediate, T::DTYPE, arrangement);
            let act = &act;
            let calls = data.iter().map(|data| -> Call<'_, T> {
                Box::new(move |out| Ok(act.forward_into(data.inputs()?, out)?))
            });
            let mut ways = [Way::new("fused", numerics, shape, calls.collect())?];
            let judgements = [judged(&mut checks, &mut ways[0])?];
            rows.extend(self.measure(case, [plan.problem], (device, limits), judgements, ways)?);
            problem = Some(plan.problem);
        }
        if let Some(problem) = problem
            && problem.flops() * ACTIVATION_WORK <= NAIVE_WORK
        {
            let call: Call<'_, T> =
                Box::new(|out| Ok(swiglu_cpu::naive::activation(act, numerics, inputs, out)?));
            let way = Way::new("naive", numerics, shape, vec![call])?;
            rows.push(self.naive(case, problem, &mut checks, way)?);
        }
        Ok(rows)
    }

    /// Times the ways on one device, the first of them against the others, each with its problem.
    fn measure<'w, T: Element, const N: usize>(
        &self,
        case: &Case,
        problems: [Problem; N],
        (device, limits): (&Device, &Ceilings),
        judgements: [Judgement; N],
        mut ways: [Way<'w, T>; N],
    ) -> anyhow::Result<Vec<Row>> {
        let (times, state) = match case.heat {
            Heat::Hot => (self.time(Heat::Hot, &mut ways)?, State::steady(limits.bandwidth)),
            Heat::Cold => self.time_in_one_state(device, &mut ways)?,
        };
        let other = times.get(1).map(|t| t.median);
        let ways = ways.iter().zip(&problems).zip(times).zip(judgements).enumerate();
        let rows = ways.map(|(i, (((way, problem), time), j))| {
            let rates = Rates::of_cpu(problem, limits, state.bandwidth);
            let speed = Speed {
                time,
                floor: Some(Floor::of(problem, case.heat, rates)),
                steady: state.steady,
                speedup: other.filter(|_| i == 0).map(|other| other / time.median),
            };
            Row::new(case, problem, way.profile, device.threads(), speed, &j)
        });
        Ok(rows.collect())
    }

    /// Times the ways between two measurements of the bandwidth, again where the host changed it
    /// meanwhile.
    fn time_in_one_state<T: Element>(
        &self,
        device: &Device,
        ways: &mut [Way<'_, T>],
    ) -> anyhow::Result<(Vec<Summary>, State)> {
        let mut attempt = || -> anyhow::Result<(Vec<Summary>, State)> {
            let before = ceilings::bandwidth(device)?;
            let times = self.time(Heat::Cold, ways)?;
            Ok((times, State::between(before, ceilings::bandwidth(device)?)))
        };
        let mut found = attempt()?;
        for _ in 1..ATTEMPTS {
            if found.1.steady {
                break;
            }
            found = attempt()?;
        }
        Ok(found)
    }

    /// The plain loops: one thread, one copy, and no ceiling they could be measured against.
    fn naive<T: Element>(
        &self,
        case: &Case,
        problem: Problem,
        checks: &mut Checks<'_>,
        way: Way<'_, T>,
    ) -> anyhow::Result<Row> {
        let mut way = [way];
        let judgement = checks.of(problem.numerics)?.judge(way[0].result()?)?;
        let time = self.time(Heat::Cold, &mut way)?[0];
        let speed = Speed { time, floor: None, steady: true, speedup: None };
        Ok(Row::new(case, &problem, way[0].profile, 1, speed, &judgement))
    }

    fn time<T: Element>(
        &self,
        heat: Heat,
        ways: &mut [Way<'_, T>],
    ) -> anyhow::Result<Vec<Summary>> {
        for way in ways.iter_mut() {
            way.warm()?;
        }
        let step = |way| -> Box<Variant<'_>> {
            let way: &mut Way<'_, T> = way;
            Box::new(|| way.step())
        };
        let mut variants: Vec<Box<Variant<'_>>> = ways.iter_mut().map(step).collect();
        let budget = Duration::from_secs_f64(self.seconds);
        interleave(&mut variants, Protocol { heat, budget, min_turns: 3 })
    }
}

/// The bandwidth around a measurement.
#[derive(Debug, Clone, Copy)]
struct State {
    /// The better of before and after: what the work could have had.
    bandwidth: Bandwidth,
    /// Whether both were about the same.
    steady: bool,
}

impl State {
    fn steady(bandwidth: Bandwidth) -> Self {
        Self { bandwidth, steady: true }
    }

    fn between(before: Bandwidth, after: Bandwidth) -> Self {
        let same = |a: f64, b: f64| a.min(b) > 0.85 * a.max(b);
        let steady = same(before.read, after.read) && same(before.triad_nt, after.triad_nt);
        Self { bandwidth: before.best(after), steady }
    }
}

/// Whether a way computes what it should.
fn judged<T: Element>(checks: &mut Checks<'_>, way: &mut Way<'_, T>) -> anyhow::Result<Judgement> {
    Ok(checks.of(way.numerics)?.judge(way.result()?)?)
}

fn copies(heat: Heat, bytes: f64) -> usize {
    match heat {
        Heat::Hot => 1,
        // Tiny problems are in a cache whatever is done; a thousand copies are enough of them.
        Heat::Cold => (COLD_BYTES / bytes.max(1.0)).ceil().clamp(1.0, 1000.0) as usize,
    }
}

/// Bytes that a call of a layer touches: each copy has a workspace and results of its own. With many tokens the weights are
/// the smaller part.
fn touched(problem: &Problem) -> f64 {
    let between = 2 * problem.m * problem.intermediate * problem.dtype.size();
    problem.compulsory_bytes() + between as f64
}

fn forward<'a, T: Element>(layer: Packed, x: MatrixRef<'a, T>) -> Call<'a, T> {
    Box::new(move |out| Ok(layer.forward_into(x, out)?))
}

type MakeCheck<'a> = Box<dyn Fn(Numerics) -> swiglu_core::Result<Check> + 'a>;

/// The checks of one problem, made when a numerics mode is first met.
pub(super) struct Checks<'a> {
    make: MakeCheck<'a>,
    made: Vec<(Numerics, Check)>,
}

impl<'a> Checks<'a> {
    pub(super) fn new(make: impl Fn(Numerics) -> swiglu_core::Result<Check> + 'a) -> Self {
        Self { make: Box::new(make), made: Vec::new() }
    }

    pub(super) fn of(&mut self, numerics: Numerics) -> swiglu_core::Result<&Check> {
        let at = match self.made.iter().position(|(n, _)| *n == numerics) {
            Some(at) => at,
            None => {
                self.made.push((numerics, (self.make)(numerics)?));
                self.made.len() - 1
            }
        };
        Ok(&self.made[at].1)
    }
}

/// Gate and up, in two tensors or one.
pub(super) struct Activations<T>(pub(super) Matrix<T>, pub(super) Option<Matrix<T>>);

impl<T: Element> Activations<T> {
    pub(super) fn normal([m, h]: [usize; 2], packed: bool) -> swiglu_core::Result<Self> {
        match packed {
            true => Ok(Self(random::normal(SEED, m, 2 * h, 2.0)?, None)),
            false => Ok(Self(
                random::normal(SEED, m, h, 2.0)?,
                Some(random::normal(SEED ^ 0x75, m, h, 2.0)?),
            )),
        }
    }

    pub(super) fn inputs(&self) -> swiglu_core::Result<GateUpRef<'_, T>> {
        match &self.1 {
            None => GateUpRef::packed(self.0.view(), Arrangement::PackedGateFirst),
            Some(up) => GateUpRef::separate(self.0.view(), up.view()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_of_the_host_is_noticed() {
        let at = |read| Bandwidth { read, copy_nt: 1.0, triad_nt: 1.0 };
        assert!(State::between(at(95.0), at(99.0)).steady);
        let flipped = State::between(at(57.0), at(95.0));
        assert!(!flipped.steady && flipped.bandwidth.read == 95.0);
    }

    #[test]
    fn cold_copies_exceed_the_caches_and_hot_data_has_one() {
        assert_eq!(copies(Heat::Cold, 35e6), 12);
        assert_eq!(copies(Heat::Cold, 1e9), 1);
        assert_eq!(copies(Heat::Cold, 0.0), 1000);
        assert_eq!(copies(Heat::Hot, 35e6), 1);
    }
}
