//! Medians and percentiles of samples.

use serde::Serialize;

/// What a set of times says, in microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Summary {
    pub(crate) median: f64,
    pub(crate) p10: f64,
    pub(crate) p90: f64,
    pub(crate) samples: usize,
}

impl Summary {
    /// Sorts the samples. Without any, all times are 0.
    pub(crate) fn of(samples: &mut [f64]) -> Self {
        samples.sort_unstable_by(f64::total_cmp);
        Self {
            median: percentile(samples, 50),
            p10: percentile(samples, 10),
            p90: percentile(samples, 90),
            samples: samples.len(),
        }
    }

    /// `amount` per second, in units of 10⁹.
    pub(crate) fn giga_per_second(&self, amount: f64) -> f64 {
        if self.median > 0.0 { amount / (self.median * 1e3) } else { 0.0 }
    }
}

/// Nearest rank: the smallest sample that at least `p` percent do not exceed.
fn percentile(sorted: &[f64], p: usize) -> f64 {
    let rank = (sorted.len() * p).div_ceil(100).max(1);
    sorted.get(rank - 1).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_samples_by_nearest_rank() {
        let mut samples: Vec<f64> = (1..=10).rev().map(f64::from).collect();
        let s = Summary::of(&mut samples);
        assert_eq!((s.p10, s.median, s.p90, s.samples), (1.0, 5.0, 9.0, 10));
        let s = Summary::of(&mut [3.0]);
        assert_eq!((s.p10, s.median, s.p90), (3.0, 3.0, 3.0));
        assert_eq!(Summary::of(&mut []).median, 0.0);
    }

    #[test]
    fn rates_use_the_median() {
        let s = Summary::of(&mut [2.0]);
        assert_eq!(s.giga_per_second(4000.0), 2.0);
        assert_eq!(Summary::of(&mut []).giga_per_second(1.0), 0.0);
    }
}
