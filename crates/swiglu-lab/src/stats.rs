//! Medians, spreads, and confidence intervals of ratios.
//!
//! Profiles take turns, so turn t of one is a neighbour in time of turn t of another, and whatever
//! the machine did at that moment it did to both. The interval of a ratio keeps these pairs: it
//! draws turns with replacement, the same ones for both sides, pools the samples of the drawn turns
//! and takes the ratio of their medians (a paired block bootstrap; samples of one turn are not
//! independent of each other, turns nearly are). The interval is from the 2.5th to the 97.5th
//! percentile of [`REPLICATES`] draws.
//!
//! Where a profile was prepared several times, turns of one preparation have in common what was
//! decided then: where the data lie, which pages they got. Then whole preparations are drawn, again
//! the same ones for both sides, so that the interval has the spread between preparations in it. So
//! few of them understate it: the draws are spread by the factor by which the quantile of Student's t
//! exceeds the normal one, and by √(n/(n − 1)) for what a bootstrap of n lacks.

use std::ops::Range;

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

/// Samples grouped by turn, turns by preparation.
#[derive(Debug, Clone, PartialEq)]
pub struct Turns<'a> {
    turns: Vec<&'a [f64]>,
    /// Turns of each preparation.
    preparations: Vec<Range<usize>>,
}

impl<'a> Turns<'a> {
    /// The turns of a result; none if its lengths do not fit its samples.
    pub fn of(entry: &'a ResultEntry) -> Option<Self> {
        let turns = Self::new(&entry.samples_us, &entry.turn_lengths)?;
        match entry.preparation_turns.is_empty() {
            true => Some(turns),
            false => turns.prepared(&entry.preparation_turns),
        }
    }

    /// The same turns, so many of each preparation; none if these are not all turns.
    pub fn prepared(self, lengths: &[usize]) -> Option<Self> {
        let mut preparations = Vec::with_capacity(lengths.len());
        let mut first = 0usize;
        for &length in lengths {
            let end = first.checked_add(length)?;
            preparations.push(first..end);
            first = end;
        }
        let whole = first == self.turns.len() && preparations.iter().all(|p| !p.is_empty());
        whole.then_some(Self { preparations, ..self })
    }

    /// `samples` cut into `lengths`, all of one preparation.
    pub fn new(samples: &'a [f64], lengths: &[usize]) -> Option<Self> {
        let mut rest = samples;
        let mut turns = Vec::with_capacity(lengths.len());
        for &length in lengths {
            let (turn, after) = rest.split_at_checked(length)?;
            turns.push(turn);
            rest = after;
        }
        let whole = rest.is_empty() && turns.iter().all(|t| !t.is_empty());
        let preparations = std::iter::once(0..turns.len()).collect();
        whole.then_some(Self { turns, preparations })
    }

    fn pooled_median(&self, drawn: impl Iterator<Item = usize>, pool: &mut Vec<f64>) -> f64 {
        pool.clear();
        drawn.for_each(|t| pool.extend_from_slice(self.turns[t]));
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
    let n = numerator.turns.len().min(denominator.turns.len());
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
    // Pairs exist only between sides that were prepared alike.
    let alike = numerator.preparations == denominator.preparations;
    let whole = || std::iter::once(0..n).collect();
    let preparations = if alike { numerator.preparations.clone() } else { whole() };
    let stretch = stretch(preparations.len());
    let replicates = draws(seed, &preparations)
        .map(|drawn| value * (of(&drawn) / value).powf(stretch))
        .collect::<Vec<f64>>();
    Some(Ratio { interval: interval(value, &replicates), replicates })
}

/// How much wider than the draws of `n` preparations their spread is; draws of turns are as they are.
fn stretch(n: usize) -> f64 {
    /// 97.5th percentiles of Student's t, from one degree of freedom on, and the normal one.
    const T: [f64; 14] = [
        12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
        2.145,
    ];
    const NORMAL: f64 = 1.960;
    match n {
        0 | 1 => 1.0,
        n => {
            let t = T.get(n - 2).copied().unwrap_or(NORMAL);
            t / NORMAL * (n as f64 / (n - 1) as f64).sqrt()
        }
    }
}

/// Which turns are drawn, [`REPLICATES`] times: whole preparations, or turns where there is one.
fn draws(seed: u64, preparations: &[Range<usize>]) -> impl Iterator<Item = Vec<usize>> {
    let draw =
        move |r: usize, i: usize, n: usize| (bits(seed, (r * n + i) as u64) % n as u64) as usize;
    (0..REPLICATES).map(move |r| match preparations {
        [turns] => {
            turns.clone().map(|i| turns.start + draw(r, i - turns.start, turns.len())).collect()
        }
        _ => {
            let n = preparations.len();
            (0..n).flat_map(|i| preparations[draw(r, i, n)].clone()).collect()
        }
    })
}

/// A median with its interval, of one result alone.
pub fn median_interval(turns: &Turns<'_>, seed: u64) -> Option<Interval> {
    const ONE: [f64; 1] = [1.0];
    let preparations = turns.preparations.clone();
    let ones = Turns { turns: vec![&ONE; turns.turns.len()], preparations };
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

    /// Two equal profiles, 5 preparations of 3 turns of 8 samples: 2 % of noise in each sample, and 1 %
    /// that a preparation decides.
    fn equal(trial: u64) -> [Vec<f64>; 2] {
        [0, 1].map(|side| {
            let noise = |stream: u64, i| {
                f64::from(swiglu_core::random::normal(trial * 4 + side * 2 + stream, i))
            };
            (0..120).map(|i| 1.0 + 0.02 * noise(0, i) + 0.01 * noise(1, i / 24)).collect()
        })
    }

    #[test]
    fn the_interval_has_the_spread_between_preparations_in_it() {
        let trials = 200u64;
        let covered = |preparations: &[usize]| {
            let covers = |trial: &u64| {
                let [a, b] = equal(*trial);
                let [a, b] = [&a, &b].map(|v| {
                    Turns::new(v, &[8; 15]).and_then(|t| t.prepared(preparations)).unwrap()
                });
                let [low, high] = ratio(&a, &b, *trial).unwrap().interval.ci95;
                (low..=high).contains(&1.0)
            };
            (0..trials).filter(covers).count()
        };
        // Taken for one preparation, the same turns say nothing of that spread.
        let (several, one) = (covered(&[3; 5]), covered(&[15]));
        assert!((180..=200).contains(&several), "{several} of {trials}");
        assert!(one < 170, "{one} of {trials}");
    }

    #[test]
    fn preparations_of_other_numbers_of_turns_are_not_paired() {
        let v = [1.0, 2.0, 3.0, 4.0];
        let turns = || Turns::new(&v, &[1; 4]).unwrap();
        let halves = turns().prepared(&[2, 2]).unwrap();
        assert_eq!(ratio(&halves, &turns(), 1), ratio(&turns(), &turns(), 1));
        assert_ne!(ratio(&halves, &halves, 1), None);
        for broken in [&[2, 1][..], &[4, 0], &[3, 2], &[usize::MAX, 5]] {
            assert_eq!(turns().prepared(broken), None, "{broken:?}");
        }
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
