//! Medians, spreads, and confidence intervals of ratios.
//!
//! Profiles take turns, so turn t of one is a neighbour in time of turn t of another, and whatever
//! the machine did at that moment it did to both. The interval of a ratio keeps these pairs: it
//! draws turns with replacement, the same ones for both sides, pools the samples of the drawn turns
//! and takes the ratio of their medians (a paired block bootstrap; samples of one turn are not
//! independent of each other, turns nearly are). The interval is from the 2.5th to the 97.5th
//! percentile of [`REPLICATES`] draws.

use swiglu_core::random::bits;

use crate::record::{Interval, ResultEntry, Summary};

/// Draws of a bootstrap.
pub const REPLICATES: usize = 1000;
/// Fewer turns than this say nothing about their spread.
pub const MIN_TURNS: usize = 4;

/// The median; none of nothing. Reorders.
pub(crate) fn median(values: &mut [f64]) -> Option<f64> {
    let n = values.len();
    if n == 0 {
        return None;
    }
    let (below, middle, _) = values.select_nth_unstable_by(n / 2, f64::total_cmp);
    let middle = *middle;
    if n % 2 == 1 {
        return Some(middle);
    }
    below.iter().copied().max_by(f64::total_cmp).map(|lower| (lower + middle) / 2.0)
}

/// The `p`-th percentile of sorted values, interpolated.
fn percentile(sorted: &[f64], p: f64) -> f64 {
    let at = p / 100.0 * (sorted.len().saturating_sub(1)) as f64;
    let (low, high) = (at.floor() as usize, at.ceil() as usize);
    let value = |i: usize| sorted.get(i).copied().unwrap_or(f64::NAN);
    value(low) + (value(high) - value(low)) * (at - low as f64)
}

impl Summary {
    /// Of samples in microseconds; none of nothing.
    pub fn of(samples: &[f64]) -> Option<Self> {
        let mut sorted = samples.to_vec();
        sorted.sort_unstable_by(f64::total_cmp);
        let median = median(&mut sorted.clone())?;
        let mut deviations: Vec<f64> = sorted.iter().map(|x| (x - median).abs()).collect();
        Some(Self {
            median,
            p10: percentile(&sorted, 10.0),
            p90: percentile(&sorted, 90.0),
            mad: self::median(&mut deviations)?,
            n: sorted.len(),
        })
    }
}

/// Samples grouped by turn.
#[derive(Debug, Clone, PartialEq)]
pub struct Turns<'a>(Vec<&'a [f64]>);

impl<'a> Turns<'a> {
    /// The turns of a result; none if its lengths do not fit its samples.
    pub fn of(entry: &'a ResultEntry) -> Option<Self> {
        Self::new(&entry.samples_us, &entry.turn_lengths)
    }

    /// `samples` cut into `lengths`.
    pub fn new(samples: &'a [f64], lengths: &[usize]) -> Option<Self> {
        let mut rest = samples;
        let mut turns = Vec::with_capacity(lengths.len());
        for &length in lengths {
            let (turn, after) = rest.split_at_checked(length)?;
            turns.push(turn);
            rest = after;
        }
        (rest.is_empty() && turns.iter().all(|t| !t.is_empty())).then_some(Self(turns))
    }

    fn pooled_median(&self, drawn: impl Iterator<Item = usize>, pool: &mut Vec<f64>) -> f64 {
        pool.clear();
        drawn.for_each(|t| pool.extend_from_slice(self.0[t]));
        median(pool).unwrap_or(f64::NAN)
    }
}

/// A ratio with the draws that its interval comes from.
#[derive(Debug, Clone, PartialEq)]
pub struct Ratio {
    /// The ratio and its interval.
    pub interval: Interval,
    /// One ratio per draw, in order.
    pub replicates: Vec<f64>,
}

/// median(`numerator`) ÷ median(`denominator`); none with fewer than [`MIN_TURNS`] common turns.
pub fn ratio(numerator: &Turns<'_>, denominator: &Turns<'_>, seed: u64) -> Option<Ratio> {
    let n = numerator.0.len().min(denominator.0.len());
    if n < MIN_TURNS {
        return None;
    }
    let mut pool = Vec::new();
    let mut of = |drawn: &[usize]| {
        let numerator = numerator.pooled_median(drawn.iter().copied(), &mut pool);
        numerator / denominator.pooled_median(drawn.iter().copied(), &mut pool)
    };
    let all: Vec<usize> = (0..n).collect();
    let value = of(&all);
    let draw = |r: usize| (0..n).map(move |i| (bits(seed, (r * n + i) as u64) % n as u64) as usize);
    let replicates: Vec<f64> =
        (0..REPLICATES).map(|r| of(&draw(r).collect::<Vec<usize>>())).collect();
    Some(Ratio { interval: interval(value, &replicates), replicates })
}

/// A median with its interval, of one result alone.
pub fn median_interval(turns: &Turns<'_>, seed: u64) -> Option<Interval> {
    const ONE: [f64; 1] = [1.0];
    let ones = Turns(vec![&ONE; turns.0.len()]);
    ratio(turns, &ones, seed).map(|r| r.interval)
}

/// An estimate with the percentile interval of its draws.
pub fn interval(value: f64, replicates: &[f64]) -> Interval {
    let mut sorted = replicates.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    Interval { value, ci95: [percentile(&sorted, 2.5), percentile(&sorted, 97.5)] }
}

/// A seed that is a property of the data's names, so that a verdict is the same every time.
pub(crate) fn seed_of(parts: &[&str]) -> u64 {
    parts.iter().fold(0, |seed, part| {
        part.bytes().fold(bits(seed, 1), |seed, byte| bits(seed, byte.into()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_percentiles() {
        let s = Summary::of(&[4.0, 1.0, 3.0, 2.0]).unwrap();
        assert_eq!((s.median, s.n, s.mad), (2.5, 4, 1.0));
        let s = Summary::of(&[5.0, 1.0, 3.0, 2.0, 4.0]).unwrap();
        assert_eq!((s.median, s.p10, s.p90), (3.0, 1.4, 4.6));
        assert_eq!(Summary::of(&[]), None);
    }

    #[test]
    fn pairs_cancel_what_both_sides_saw() {
        // The machine slows down by half during the run; the ratio is 2 in every pair.
        let a: Vec<f64> = (0..20).map(|t| 10.0 + 0.5 * f64::from(t)).collect();
        let b: Vec<f64> = a.iter().map(|x| x / 2.0).collect();
        let lengths = [1; 20];
        let turns = |v| Turns::new(v, &lengths).unwrap();
        let r = ratio(&turns(&a), &turns(&b), 1).unwrap();
        assert!((r.interval.value - 2.0).abs() < 1e-12);
        assert!((r.interval.ci95[1] - r.interval.ci95[0]).abs() < 1e-12, "{:?}", r.interval);
        assert_eq!(r.replicates.len(), REPLICATES);
        let alone = median_interval(&turns(&a), 1).unwrap();
        assert!(alone.ci95[1] - alone.ci95[0] > 1.0);
    }

    #[test]
    fn the_interval_covers_the_truth_about_as_often_as_it_says() {
        // Independent noise of 5 % on both sides, true ratio 1.2, 15 turns of 8 samples.
        let covered = (0..200u64)
            .filter(|&trial| {
                let side = |tag: u64, scale: f64| -> Vec<f64> {
                    let noise = |i| f64::from(swiglu_core::random::normal(trial * 2 + tag, i));
                    (0..120).map(|i| scale * (1.0 + 0.05 * noise(i))).collect()
                };
                let (a, b) = (side(0, 1.2), side(1, 1.0));
                let lengths = [8; 15];
                let [a, b] = [&a, &b].map(|v| Turns::new(v, &lengths).unwrap());
                let [lo, hi] = ratio(&a, &b, trial).unwrap().interval.ci95;
                (lo..=hi).contains(&1.2)
            })
            .count();
        assert!((176..=200).contains(&covered), "{covered} of 200");
    }

    #[test]
    fn too_few_turns_and_broken_lengths_give_nothing() {
        let v = [1.0, 2.0, 3.0];
        let t = Turns::new(&v, &[1, 1, 1]).unwrap();
        assert_eq!(ratio(&t, &t, 0), None);
        assert_eq!(Turns::new(&v, &[2]), None);
        assert_eq!(Turns::new(&v, &[2, 2]), None);
        assert_eq!(Turns::new(&v, &[3, 0]), None);
        assert_ne!(seed_of(&["a", "b"]), seed_of(&["b", "a"]));
    }
}
