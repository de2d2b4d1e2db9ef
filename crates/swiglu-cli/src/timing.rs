//! One timing protocol: variants take turns (A-B-A-B), so that whatever changes on the machine
//! changes for all of them.

use std::time::{Duration, Instant};

use crate::stats::Summary;

/// Whether a variant finds its data in the caches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Heat {
    /// Each turn begins with a call that is not timed: the other variants' data is displaced.
    Hot,
    /// The variant rotates through copies of its data that together exceed the caches.
    Cold,
}

/// How long to measure.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Protocol {
    pub(crate) heat: Heat,
    /// All variants together.
    pub(crate) budget: Duration,
    /// Turns of each variant that are taken even if the budget is spent.
    pub(crate) min_turns: usize,
}

/// More samples than this add nothing to a median.
const MAX_SAMPLES: usize = 20_000;
/// A turn that is long compared with a switch of variants, short compared with the host's drift.
const TURN: Duration = Duration::from_millis(5);

/// One way of computing something.
pub(crate) type Variant<'a> = dyn FnMut() -> anyhow::Result<()> + 'a;

fn time_once(run: &mut Variant<'_>) -> anyhow::Result<Duration> {
    let start = Instant::now();
    run()?;
    Ok(start.elapsed())
}

/// Times each variant by the protocol.
pub(crate) fn interleave(
    variants: &mut [Box<Variant<'_>>],
    protocol: Protocol,
) -> anyhow::Result<Vec<Summary>> {
    // The first call pays for page faults and for waking threads; the second says how long one
    // takes.
    let mut calls_per_turn = Vec::with_capacity(variants.len());
    for run in variants.iter_mut() {
        run()?;
        let one = time_once(run)?.max(Duration::from_nanos(100));
        let calls = TURN.as_nanos() / one.as_nanos();
        calls_per_turn.push(usize::try_from(calls).unwrap_or(1).clamp(1, 64));
    }
    let mut samples = vec![Vec::new(); variants.len()];
    let start = Instant::now();
    let mut turns = 0;
    while turns < protocol.min_turns
        || (start.elapsed() < protocol.budget && samples.iter().all(|s| s.len() < MAX_SAMPLES))
    {
        for ((run, &calls), samples) in variants.iter_mut().zip(&calls_per_turn).zip(&mut samples) {
            if protocol.heat == Heat::Hot {
                run()?;
            }
            for _ in 0..calls {
                samples.push(time_once(run)?.as_secs_f64() * 1e6);
            }
        }
        turns += 1;
    }
    Ok(samples.iter_mut().map(|s| Summary::of(s)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    #[test]
    fn variants_take_turns_and_untimed_calls_do_not_count() {
        let order = RefCell::new(String::new());
        let slow = |name: char| {
            let order = &order;
            move || {
                order.borrow_mut().push(name);
                std::thread::sleep(Duration::from_millis(6));
                Ok(())
            }
        };
        let mut variants: Vec<Box<Variant<'_>>> = vec![Box::new(slow('a')), Box::new(slow('b'))];
        let protocol = Protocol { heat: Heat::Hot, budget: Duration::ZERO, min_turns: 2 };
        let times = interleave(&mut variants, protocol).unwrap();
        drop(variants);
        // Two warm-up calls each, then per turn one untimed and one timed call.
        assert_eq!(order.into_inner(), "aabbaabbaabb");
        assert!(times.iter().all(|t| t.samples == 2 && t.median > 5e3), "{times:?}");
    }

    #[test]
    fn errors_end_the_measurement() {
        let mut variants: Vec<Box<Variant<'_>>> = vec![Box::new(|| anyhow::bail!("no"))];
        let protocol = Protocol { heat: Heat::Cold, budget: Duration::ZERO, min_turns: 1 };
        assert!(interleave(&mut variants, protocol).is_err());
    }
}
