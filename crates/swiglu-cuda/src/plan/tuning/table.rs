//! Measured times beside what the cost model expects of them, found by problem.
//!
//! A time that was measured is kept as a share of the model's estimate for the machine it was measured on. For a
//! problem between measured ones, and on another machine, the estimate times that share is nearer than either alone:
//! the model knows waves of tiles and bandwidths, the share what the model leaves out.

use std::collections::HashMap;

use swiglu_core::{DType, Op, Orientation, Problem, QuantizedTypes};

use super::record::Record;
use crate::kernels::decode_mlp::MOST_TOKENS;
use crate::kernels::weights::weights_lie;
use crate::plan::machine::Model;
use crate::plan::{Algorithm, cost};

/// What decides the time of an algorithm besides M, K and H. The activation, the rounding and biases change their end,
/// which is a small part of it; whether it may be taken at all is asked for each problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Kind {
    op: Op,
    dtype: DType,
    tf32: bool,
    orientation: Orientation,
    quantized: Option<QuantizedTypes>,
}

impl Kind {
    fn of(problem: &Problem, tf32: bool) -> Self {
        Self {
            op: problem.op,
            // The same kernels at the same rates: what was measured for one stands for the other.
            dtype: if problem.dtype == DType::F16 { DType::Bf16 } else { problem.dtype },
            // Only f32 products are touched by it.
            tf32: tf32 && problem.dtype == DType::F32,
            orientation: weights_lie(problem),
            quantized: problem.quantized,
        }
    }
}

/// The algorithms whose results were right, for one number of tokens.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Tuned {
    /// M.
    pub(crate) m: usize,
    /// The fastest first.
    pub(crate) times: Vec<Time>,
}

/// What an algorithm took.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Time {
    pub(crate) algorithm: Algorithm,
    pub(crate) us: f64,
    /// Of the model's estimate for the machine it was measured on.
    share: f64,
}

impl Tuned {
    pub(crate) fn time(&self, algorithm: Algorithm) -> Option<&Time> {
        self.times.iter().find(|time| time.algorithm == algorithm)
    }
}

/// All that was measured of one K and H, by M.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Shape {
    /// K and H.
    pub(crate) size: [usize; 2],
    counts: Vec<Tuned>,
}

/// How far apart, as the logarithms of K and H together, shapes may be that stand for each other.
const FARTHEST: f64 = 2.0;
/// Numbers of tokens that are further apart than this do not frame one between them.
const WIDEST: usize = 16;
/// Weight of the estimate without the model's steps: that with the least loss over the shipped records, each problem of
/// them left out in turn (docs/kernels/cost-model.md).
const SMOOTH: f64 = 0.15;
/// Logarithms of times that are as good as the same.
const SAME: f64 = 0.05;
/// Weight of the model of the machine that was measured on, beside that of this one: of an H100 by the record of an H200 and
/// the other way round, choices cost 0.4 % more than the fastest on average with it, 0.8 with the other model alone.
const THERE: f64 = 0.5;
/// From so many tokens on arithmetic is the limit, and more of them change nothing but the time.
const MANY: usize = 2048;

/// What was measured beside a problem.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Near<'a> {
    pub(crate) shape: &'a Shape,
    /// The nearest number of tokens; where two frame the problem's, the one below.
    at: &'a Tuned,
    /// The one above, and how much of the way to it lies behind the problem.
    above: Option<(&'a Tuned, f64)>,
    /// From the problem's K and H: 0 where they were measured.
    distance: f64,
    /// Of the machine they were measured on.
    there: &'a Model,
    /// Whether it is of the algorithms for h of a block, which goes on with cuBLASLt.
    of_h: bool,
}

impl<'a> Near<'a> {
    /// What was measured of this very problem.
    pub(crate) fn exact(&self, problem: &Problem) -> Option<&'a Tuned> {
        let here = self.above.is_none() && self.distance == 0.0 && self.at.m == problem.m;
        (here && !self.of_h).then_some(self.at)
    }

    /// The numbers of tokens.
    pub(crate) fn tokens(&self) -> impl Iterator<Item = usize> {
        std::iter::once(self.at.m).chain(self.above.map(|(above, _)| above.m))
    }

    /// How much it says: the less the better. Of the same K and H, then between two numbers of tokens or at one, then of one
    /// that is not far; else of the nearest K and H, in tenths of a logarithm; of those the nearest numbers of tokens.
    pub(crate) fn rank(&self, problem: &Problem) -> (bool, bool, u32, usize) {
        let beside = self.above.is_none() && self.at.m != problem.m && problem.m < MANY;
        let apart = (self.distance * 10.0) as u32;
        let farthest = self.tokens().map(|m| m.abs_diff(problem.m)).max().unwrap_or(0);
        (self.distance > 0.0, beside, apart, farthest)
    }

    /// The same for the block behind h.
    pub(crate) fn of_h(self) -> Self {
        Self { of_h: true, ..self }
    }

    /// Seconds that an algorithm is expected to take, where it was measured. Between two numbers of tokens it is the mean of
    /// two estimates, of which one has all of the model's steps between tiles and waves, and the other none. Where the model
    /// has a step, the share is that of the side of it which the problem is on.
    pub(crate) fn seconds(
        &self,
        algorithm: Algorithm,
        problem: &Problem,
        model: &Model,
    ) -> Option<f64> {
        if self.of_h {
            let of_h = problem.with_op(Op::GatedLinear);
            let to_h = Self { of_h: false, ..*self }.seconds(algorithm.to_h()?, &of_h, model)?;
            return Some(to_h + cost::down(problem, model));
        }
        let other = self.there != model;
        let expected = |problem: &Problem| {
            let here = algorithm.seconds(model, problem).ln();
            let there = if other { algorithm.seconds(self.there, problem).ln() } else { here };
            here * (1.0 - THERE) + there * THERE
        };
        let here = expected(problem);
        let of = |tuned: &Tuned| {
            Some((tuned.time(algorithm)?.share.ln(), expected(&problem.with_m(tuned.m))))
        };
        let mean = |a: f64, b: f64, part: f64| a + (b - a) * part;
        let (share, there) = of(self.at)?;
        let (share, smooth) = match self.above {
            None => (share, share + there),
            Some((above, by_tokens)) => {
                let ((fewer, from), (more, to)) = ((share, there), of(above)?);
                let by_model = ((here - from) / (to - from)).clamp(0.0, 1.0);
                let part = if (to - from).abs() < SAME { by_tokens } else { by_model };
                (mean(fewer, more, part), mean(fewer + from, more + to, by_tokens))
            }
        };
        Some(mean(share + here, smooth, SMOOTH).exp())
    }
}

impl Shape {
    fn distance(&self, problem: &Problem) -> f64 {
        let apart = |a: usize, b: usize| (a.max(1) as f64 / b.max(1) as f64).ln().abs();
        let [hidden, intermediate] = self.size;
        apart(hidden, problem.hidden) + apart(intermediate, problem.intermediate)
    }

    fn near<'a>(&'a self, problem: &Problem, there: &'a Model) -> Option<Near<'a>> {
        let (m, distance) = (problem.m, self.distance(problem));
        let next = self.counts.partition_point(|tuned| tuned.m < m);
        let above = self.counts.get(next);
        let below = next.checked_sub(1).and_then(|at| self.counts.get(at));
        let alone = |tuned| Some((tuned, None));
        let at = match (below, above) {
            (_, Some(above)) if above.m == m => alone(above),
            // Of so few tokens other kernels compute a block than of more.
            (Some(below), Some(above))
                if problem.op == Op::Mlp && m <= MOST_TOKENS && above.m > MOST_TOKENS =>
            {
                (m <= 2 * below.m).then_some((below, None))
            }
            (Some(below), Some(above)) if above.m <= WIDEST * below.m => {
                let apart = |m: usize| (m as f64 / below.m as f64).ln();
                Some((below, Some((above, apart(m) / apart(above.m)))))
            }
            (_, Some(above)) if above.m <= 2 * m => alone(above),
            (Some(below), _) if m <= 2 * below.m || below.m >= MANY => alone(below),
            _ => None,
        };
        at.map(|(at, above)| Near { shape: self, at, above, distance, there, of_h: false })
    }
}

/// The problems of a record.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Table {
    shapes: HashMap<Kind, Vec<Shape>>,
    /// Of the machine they were measured on.
    model: Model,
}

impl Table {
    /// `model` is of the machine that the record was measured on.
    pub(crate) fn new(record: &Record, model: &Model) -> Self {
        let mut table: HashMap<Kind, Vec<Shape>> = HashMap::new();
        let named =
            |op| Algorithm::all(op).map(|algorithm| (algorithm.to_string(), algorithm)).collect();
        let names: [HashMap<String, Algorithm>; 2] = [Op::GatedLinear, Op::Mlp].map(named);
        for entry in &record.entries {
            let problem = &entry.problem;
            let of_op = &names[usize::from(problem.op == Op::Mlp)];
            let model = Model { tf32: entry.tf32, ..*model };
            let times = entry.trials.iter().filter_map(|trial| {
                let (algorithm, us) = (*of_op.get(&trial.way)?, trial.outcome.median_us()?);
                let share = us * 1e-6 / algorithm.seconds(&model, problem);
                (share.is_finite() && share > 0.0).then_some(Time { algorithm, us, share })
            });
            let mut times: Vec<Time> = times.collect();
            // Equal times keep the order of the space: the same record, the same choice.
            times.sort_by(|a, b| a.us.total_cmp(&b.us));
            if times.is_empty() {
                continue;
            }
            let shapes = table.entry(Kind::of(problem, entry.tf32)).or_default();
            let size = [problem.hidden, problem.intermediate];
            let at = shapes.iter().position(|shape| shape.size == size).unwrap_or_else(|| {
                shapes.push(Shape { size, counts: Vec::new() });
                shapes.len() - 1
            });
            let counts = &mut shapes[at].counts;
            // Problems that differ in what the kind leaves out: the first one measured counts.
            if let Err(place) = counts.binary_search_by_key(&problem.m, |tuned| tuned.m) {
                counts.insert(place, Tuned { m: problem.m, times });
            }
        }
        Self { shapes: table, model: *model }
    }

    /// What was measured nearest to a problem. It allocates nothing.
    pub(crate) fn near(&self, problem: &Problem, tf32: bool) -> Option<Near<'_>> {
        let shapes = self.shapes.get(&Kind::of(problem, tf32))?;
        let near = shapes.iter().filter_map(|shape| shape.near(problem, &self.model));
        let near = near.filter(|near| near.distance <= FARTHEST);
        near.min_by(|a, b| a.distance.total_cmp(&b.distance))
    }
}
