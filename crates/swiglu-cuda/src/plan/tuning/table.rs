//! Measured times, found by problem.

use std::collections::HashMap;

use swiglu_core::{DType, Op, Orientation, Problem};

use super::record::Record;
use crate::plan::Steps;

/// What decides the time of a way besides M. The activation, the rounding and biases change its end,
/// which is a small part of it; whether a way may be taken at all is asked for each problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    op: Op,
    dtype: DType,
    tf32: bool,
    orientation: Orientation,
    hidden: usize,
    intermediate: usize,
    quantized: bool,
}

impl Key {
    fn of(problem: &Problem, tf32: bool) -> Self {
        Self {
            op: problem.op,
            // The same kernels at the same rates: what was measured for one stands for the other.
            dtype: if problem.dtype == DType::F16 { DType::Bf16 } else { problem.dtype },
            // Only f32 products are touched by it.
            tf32: tf32 && problem.dtype == DType::F32,
            // A block packs its weights one way, whichever way they were given.
            orientation: match problem.op {
                Op::Mlp => Orientation::OutIn,
                _ => problem.layout.orientation,
            },
            hidden: problem.hidden,
            intermediate: problem.intermediate,
            quantized: problem.quantized.is_some(),
        }
    }
}

/// The ways whose results were right, for one number of tokens.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Tuned {
    /// M.
    pub(crate) m: usize,
    /// With their times in microseconds, the fastest first.
    pub(crate) ways: Vec<(Steps, f64)>,
}

/// The problems of a record.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Table(HashMap<Key, Vec<Tuned>>);

impl Table {
    pub(crate) fn new(record: &Record) -> Self {
        let mut table: HashMap<Key, Vec<Tuned>> = HashMap::new();
        let named = |op| Steps::all(op).map(|steps| (steps.to_string(), steps)).collect();
        let names: [HashMap<String, Steps>; 2] = [Op::GatedLinear, Op::Mlp].map(named);
        for entry in &record.entries {
            let of_op = &names[usize::from(entry.problem.op == Op::Mlp)];
            let way = |name: &str| of_op.get(name).copied();
            let timed =
                entry.trials.iter().filter_map(|t| Some((way(&t.way)?, t.outcome.median_us()?)));
            let mut ways: Vec<(Steps, f64)> = timed.filter(|(_, us)| us.is_finite()).collect();
            // Equal times keep the order of the space: the same record, the same choice.
            ways.sort_by(|a, b| a.1.total_cmp(&b.1));
            if ways.is_empty() {
                continue;
            }
            let tuned = Tuned { m: entry.problem.m, ways };
            let of_key = table.entry(Key::of(&entry.problem, entry.tf32)).or_default();
            // Problems that differ in what the key leaves out: the first one measured counts.
            if of_key.iter().all(|known| known.m != tuned.m) {
                of_key.push(tuned);
            }
        }
        for of_key in table.values_mut() {
            of_key.sort_by_key(|tuned| tuned.m);
        }
        Self(table)
    }

    /// The measurements that stand for a problem: those of the smallest measured M that is not below
    /// its own, as long as that is less than twice as large. So measurements at powers of two
    /// partition all M, and others refine them.
    pub(crate) fn find(&self, problem: &Problem, tf32: bool) -> Option<&Tuned> {
        let of_key = self.0.get(&Key::of(problem, tf32))?;
        let tuned = of_key.get(of_key.partition_point(|tuned| tuned.m < problem.m))?;
        (tuned.m < 2 * problem.m).then_some(tuned)
    }
}
