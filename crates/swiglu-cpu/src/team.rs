//! Running the steps of a call on several threads.
//!
//! A call is a short list of steps; each step is a number of independent units that threads claim
//! in shrinking ranges, so that a slow or late thread does not hold the others up. A thread goes on
//! to the next step when every unit of the last one is done. It only ever waits for units another
//! thread is computing at that moment, never for a thread to arrive, so calls from several threads
//! at once cannot block each other even where they share one pool.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use rayon::ThreadPool;

use crate::placement;

/// Most steps one call has.
pub(crate) const MAX_STEPS: usize = 4;

/// Independent units of work; `run` is given a range of them and the number of the worker.
pub(crate) struct Step<'a> {
    pub(crate) units: usize,
    pub(crate) run: &'a (dyn Fn(Range<usize>, usize) + Sync),
}

#[derive(Default)]
struct Progress {
    claimed: AtomicUsize,
    done: AtomicUsize,
}

impl Progress {
    /// A share of what is left, smaller towards the end.
    fn claim(&self, units: usize, workers: usize) -> Option<Range<usize>> {
        let mut start = self.claimed.load(Ordering::Relaxed);
        while start < units {
            let count = if workers == 1 { units } else { (units - start).div_ceil(2 * workers) };
            match self.claimed.compare_exchange_weak(
                start,
                start + count,
                Ordering::Relaxed,
                Ordering::Relaxed,
            ) {
                Ok(_) => return Some(start..start + count),
                Err(now) => start = now,
            }
        }
        None
    }

    fn wait(&self, units: usize) {
        let mut spins = 0u32;
        // Acquire: the units' results are visible once they are counted.
        while self.done.load(Ordering::Acquire) < units {
            spins += 1;
            if spins.is_multiple_of(256) {
                std::thread::yield_now();
            } else {
                std::hint::spin_loop();
            }
        }
    }
}

/// Counts a range as done, also when it ends in a panic: the others must not wait for ever.
struct Counted<'a>(&'a AtomicUsize, usize);

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_add(self.1, Ordering::Release);
    }
}

fn work(steps: &[Step<'_>], progress: &[Progress], workers: usize, worker: usize) {
    for (step, progress) in steps.iter().zip(progress) {
        while let Some(range) = progress.claim(step.units, workers) {
            let _counted = Counted(&progress.done, range.len());
            (step.run)(range, worker);
        }
        progress.wait(step.units);
    }
}

/// Runs `steps` one after the other, each on up to `workers` threads, the caller among them.
pub(crate) fn run(pool: Option<&ThreadPool>, workers: usize, steps: &[Step<'_>]) {
    let progress: [Progress; MAX_STEPS] = Default::default();
    assert!(steps.len() <= MAX_STEPS, "a call has at most {MAX_STEPS} steps");
    let workers = workers.min(steps.iter().map(|s| s.units).max().unwrap_or(0)).max(1);
    match pool {
        Some(pool) if workers > 1 => pool.in_place_scope(|scope| {
            let progress = &progress;
            let caller = placement::current();
            for worker in 1..workers {
                scope.spawn(move |_| {
                    placement::leave(caller);
                    work(steps, progress, workers, worker);
                });
            }
            work(steps, progress, workers, 0);
        }),
        _ => work(steps, &progress, 1, 0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_unit_runs_once_and_steps_follow_each_other() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
        for (pool, workers) in [(None, 1), (Some(&pool), 4), (Some(&pool), 2)] {
            let counts: Vec<AtomicUsize> = (0..97).map(|_| AtomicUsize::new(0)).collect();
            let first = |range: Range<usize>, _: usize| {
                range.for_each(|i| _ = counts[i].fetch_add(1, Ordering::Relaxed));
            };
            let second = |range: Range<usize>, worker: usize| {
                assert!(worker < workers);
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) > 0));
                range.for_each(|i| _ = counts[i].fetch_add(10, Ordering::Relaxed));
            };
            let none = |_: Range<usize>, _: usize| panic!("no units");
            let steps = [
                Step { units: 97, run: &first },
                Step { units: 0, run: &none },
                Step { units: 50, run: &second },
            ];
            run(pool, workers, &steps);
            let expected = (0..97).map(|i| if i < 50 { 11 } else { 1 });
            assert!(counts.iter().map(|c| c.load(Ordering::Relaxed)).eq(expected));
        }
    }

    #[test]
    fn calls_from_many_threads_share_one_pool_without_blocking() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        let total = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        let add = |r: Range<usize>, _: usize| {
                            total.fetch_add(r.len(), Ordering::Relaxed);
                        };
                        let step = || Step { units: 33, run: &add };
                        run(Some(&pool), 2, &[step(), step()]);
                    }
                });
            }
        });
        assert_eq!(total.load(Ordering::Relaxed), 4 * 200 * 66);
    }

    #[test]
    fn a_panic_is_passed_on_and_does_not_hang() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        let fails = |r: Range<usize>, _: usize| assert!(!r.contains(&7), "unit 7");
        let fine = |_: Range<usize>, _: usize| {};
        let steps = [Step { units: 20, run: &fails }, Step { units: 20, run: &fine }];
        let call = std::panic::AssertUnwindSafe(|| run(Some(&pool), 2, &steps));
        assert!(std::panic::catch_unwind(call).is_err());
    }
}
