//! Medians, quartiles, and confidence intervals of ratios.
//!
//! Profiles take turns, and are prepared anew several times in a case: the i-th preparation of one is a
//! neighbour in time of the i-th of another, and whatever the machine did at that moment it did to both.
//! What a preparation decides, where data lie and which pages they got, its turns have in common. So the
//! interval of a ratio draws whole preparations with replacement, the same ones for both sides (a paired
//! bootstrap over the medians of preparations). So few of them understate the spread: the draws are widened
//! by the factor by which the quantile of Student's t exceeds the normal one, and by √(n/(n − 1)) for what a
//! bootstrap of n lacks.
//!
//! Cases are independent of each other, so the interval of their geometric mean follows from theirs, on a
//! logarithmic scale.

use swiglu_core::random::bits;

use crate::record::{Interval, Summary};

const REPLICATES: usize = 1000;
/// The normal distribution's 97.5th percentile.
const NORMAL: f64 = 1.960;
/// More preparations than this in all are not worth their time.
pub(crate) const MOST_PREPARATIONS: usize = 100;

/// The median; none of nothing. Reorders.
pub(crate) fn median(values: &mut [f64]) -> Option<f64> {
    values.sort_unstable_by(f64::total_cmp);
    (!values.is_empty()).then(|| percentile(values, 50.0))
}

/// The `p`-th percentile of sorted values, interpolated.
fn percentile(sorted: &[f64], p: f64) -> f64 {
    let at = p / 100.0 * (sorted.len().saturating_sub(1)) as f64;
    let (low, high) = (at.floor() as usize, at.ceil() as usize);
    let value = |i: usize| sorted.get(i).copied().unwrap_or(f64::NAN);
    value(low) + (value(high) - value(low)) * (at - low as f64)
}

/// Significant digits of times: more than any clock resolves, and short in a file.
pub(crate) const TIME_DIGITS: usize = 6;

/// To so many significant digits.
pub(crate) fn rounded(x: f64, digits: usize) -> f64 {
    format!("{x:.*e}", digits.saturating_sub(1)).parse().unwrap_or(x)
}

impl Summary {
    /// Of samples in microseconds; none of nothing.
    pub fn of(samples: &[f64]) -> Option<Self> {
        let mut sorted = samples.to_vec();
        sorted.sort_unstable_by(f64::total_cmp);
        let at = |p| rounded(percentile(&sorted, p), TIME_DIGITS);
        (!sorted.is_empty()).then(|| Self {
            median: at(50.0),
            q1: at(25.0),
            q3: at(75.0),
            min: at(0.0),
            n: sorted.len(),
        })
    }
}

/// The interval of a ratio of `value`, from the medians of preparations of both sides; none with fewer than
/// two pairs of them.
pub(crate) fn ratio(
    value: f64,
    numerator: &[f64],
    denominator: &[f64],
    seed: u64,
) -> Option<Interval> {
    let logs: Vec<f64> = numerator.iter().zip(denominator).map(|(a, b)| (a / b).ln()).collect();
    let n = logs.len();
    if n < 2 {
        return None;
    }
    let all = logs.iter().sum::<f64>() / n as f64;
    let draw = |r: usize, i: usize| logs[(bits(seed, (r * n + i) as u64) % n as u64) as usize];
    let mut draws: Vec<f64> = (0..REPLICATES)
        .map(|r| (0..n).map(|i| draw(r, i)).sum::<f64>() / n as f64 - all)
        .map(|off| value * (off * stretch(n)).exp())
        .collect();
    draws.sort_unstable_by(f64::total_cmp);
    Some(Interval { value, ci95: [percentile(&draws, 2.5), percentile(&draws, 97.5)] })
}

/// How much wider than the draws of `n` preparations their spread is.
fn stretch(n: usize) -> f64 {
    /// 97.5th percentiles of Student's t, from one degree of freedom on.
    const T: [f64; 14] = [
        12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
        2.145,
    ];
    let t = T.get(n.saturating_sub(2)).copied().unwrap_or(NORMAL);
    t / NORMAL * (n as f64 / (n.saturating_sub(1)).max(1) as f64).sqrt()
}

/// The geometric mean of independent ratios; none of nothing.
pub(crate) fn geometric_mean(ratios: &[Interval]) -> Option<Interval> {
    let n = ratios.len() as f64;
    let mean = ratios.iter().map(|r| r.value.ln()).sum::<f64>() / n;
    let variance = ratios.iter().map(|r| deviation(r).powi(2)).sum::<f64>() / (n * n);
    let reach = NORMAL * variance.sqrt();
    (!ratios.is_empty())
        .then(|| Interval { value: mean.exp(), ci95: [(mean - reach).exp(), (mean + reach).exp()] })
}

/// Of a ratio's logarithm.
fn deviation(ratio: &Interval) -> f64 {
    let [low, high] = ratio.ci95;
    (high / low).ln() / (2.0 * NORMAL)
}

/// How many preparations more put `limit` outside an interval that has it inside, if the ratio stays what it
/// is; none where [`MOST_PREPARATIONS`] would not.
pub(crate) fn more_preparations(ratio: &Interval, limit: f64, now: usize) -> Option<usize> {
    let distance = (ratio.value / limit).ln().abs();
    let spread = |n: usize| stretch(n) / (n as f64).sqrt();
    let now = now.max(2);
    let reach = |n: usize| NORMAL * deviation(ratio) * spread(n) / spread(now);
    (now + 1..=MOST_PREPARATIONS).find(|&n| reach(n) < distance).map(|n| n - now)
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
    fn summaries_are_what_they_are_called() {
        let s = Summary::of(&[4.0, 1.0, 3.0, 2.0, 5.0]).unwrap();
        assert_eq!((s.min, s.q1, s.median, s.q3, s.n), (1.0, 2.0, 3.0, 4.0, 5));
        assert_eq!(Summary::of(&[4.0, 1.0]).unwrap().median, 2.5);
        assert_eq!(Summary::of(&[]), None);
        assert_eq!([rounded(123.456_789, 6), rounded(1.0 / 3.0, 3)], [123.457, 0.333]);
    }

    #[test]
    fn pairs_cancel_what_both_sides_saw() {
        // The machine slows down by half during the run; the ratio is 2 in every pair.
        let a: Vec<f64> = (0..5).map(|t| 10.0 + 2.0 * f64::from(t)).collect();
        let b: Vec<f64> = a.iter().map(|x| x / 2.0).collect();
        let r = ratio(2.0, &a, &b, 1).unwrap();
        assert!((r.ci95[1] - r.ci95[0]).abs() < 1e-12, "{r:?}");
        let alone = ratio(14.0, &a, &[1.0; 5], 1).unwrap();
        assert!(alone.ci95[1] - alone.ci95[0] > 1.0);
        assert_eq!(ratio(2.0, &a[..1], &b[..1], 1), None);
    }

    /// Log ratios about ln 1.2, `n` preparations that each decide 1 %.
    fn prepared(trial: u64, n: u64) -> Vec<f64> {
        let noise = |i| f64::from(swiglu_core::random::normal(trial, i));
        (0..n).map(|i| 1.2 * (0.01 * noise(i)).exp()).collect()
    }

    #[test]
    fn the_interval_covers_the_truth_about_as_often_as_it_says() {
        for n in [2, 5, 10] {
            let covered = (0..400u64).filter(|&trial| {
                let a = prepared(trial, n);
                let value = a.iter().product::<f64>().powf(1.0 / n as f64);
                let [low, high] = ratio(value, &a, &vec![1.0; a.len()], trial).unwrap().ci95;
                (low..=high).contains(&1.2)
            });
            let covered = covered.count();
            assert!((352..=398).contains(&covered), "{covered} of 400 with {n}");
        }
    }

    #[test]
    fn the_mean_of_many_cases_is_known_better_than_each() {
        let one = Interval { value: 1.1, ci95: [1.0, 1.21] };
        let mean = geometric_mean(&[one; 4]).unwrap();
        assert!((mean.value - 1.1).abs() < 1e-12);
        let width = |i: &Interval| (i.ci95[1] / i.ci95[0]).ln();
        assert!((width(&mean) - width(&one) / 2.0).abs() < 1e-12, "{mean:?}");
        assert_eq!(geometric_mean(&[]), None);
    }

    #[test]
    fn more_preparations_are_as_many_as_it_takes() {
        let unsure = Interval { value: 1.01, ci95: [0.99, 1.03] };
        let more = more_preparations(&unsure, 1.0, 5).unwrap();
        assert!((3..=15).contains(&more), "{more}");
        // The nearer the limit the more; at some point nobody would wait.
        assert!(more_preparations(&unsure, 1.003, 5).unwrap() > more);
        assert_eq!(more_preparations(&unsure, 1.0099, 5), None);
        assert_ne!(seed_of(&["a", "b"]), seed_of(&["b", "a"]));
    }
}
