//! The loop over output features of a linear map, by all processors where it takes long.

use std::ops::Range;
use std::panic::resume_unwind;
use std::thread;

/// Multiplications that take some milliseconds: fewer are not worth threads.
const WORTH: usize = 1 << 22;
/// What filling in a weight takes, in multiplications.
const FILL: usize = 8;

/// `column(state, o, values)` works out output feature `o` of all M rows; `put(i, o, value)` is given each of the values, in
/// no order that could be relied on. There are K multiplications behind a value.
pub(crate) fn by_feature<S, V: Copy + Default + Send>(
    [m, k, features]: [usize; 3],
    state: impl Fn() -> S + Sync,
    column: impl Fn(&mut S, usize, &mut [V]) + Sync,
    mut put: impl FnMut(usize, usize, V),
) {
    if m == 0 {
        return;
    }
    let part = |features: Range<usize>| {
        let mut values = vec![V::default(); m * features.len()];
        let mut state = state();
        for (o, values) in features.zip(values.chunks_exact_mut(m)) {
            column(&mut state, o, values);
        }
        values
    };
    let work = k.saturating_mul(features).saturating_mul(m + FILL);
    let worth = (work / WORTH).max(1);
    let threads =
        thread::available_parallelism().map_or(1, |processors| worth.min(processors.get()));
    in_parts(features, threads, &part, &mut |first, values: Vec<V>| {
        for (o, values) in (first..).zip(values.chunks_exact(m)) {
            values.iter().enumerate().for_each(|(i, value)| put(i, o, *value));
        }
    });
}

/// The values of a range of features.
type Part<'a, V> = dyn Fn(Range<usize>) -> Vec<V> + Sync + 'a;

/// Works `part` out for ranges of features, one a thread, and gives each with its first feature to `put`. Threads are compiled once
/// for a type of value, not for each linear map there is.
fn in_parts<V: Send>(
    features: usize,
    threads: usize,
    part: &Part<'_, V>,
    put: &mut dyn FnMut(usize, Vec<V>),
) {
    if threads == 1 {
        return put(0, part(0..features));
    }
    let each = features.div_ceil(threads).max(1);
    thread::scope(|scope| {
        let start = |first: usize| {
            let range = first..(first + each).min(features);
            let work = {
                let range = range.clone();
                move || part(range)
            };
            // Where no thread is to be had, this one does it.
            (first, thread::Builder::new().spawn_scoped(scope, work).map_err(|_| part(range)))
        };
        let parts: Vec<_> = (0..features).step_by(each).map(start).collect();
        for (first, values) in parts {
            let values =
                values.map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)));
            put(first, values.unwrap_or_else(|values| values));
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_arrives_once_however_many_threads_there_are() {
        for [m, k, features] in [[0, 8, 3], [3, 8, 0], [3, 8, 5], [2, 1 << 20, 7], [1, WORTH, 37]] {
            let mut seen = vec![0; m * features];
            by_feature(
                [m, k, features],
                || 0,
                |calls, o, values: &mut [usize]| {
                    *calls += 1;
                    assert!(*calls <= features);
                    values.iter_mut().enumerate().for_each(|(i, v)| *v = 1000 * i + o);
                },
                |i, o, value| {
                    assert_eq!(value, 1000 * i + o);
                    seen[i * features + o] += 1;
                },
            );
            assert!(seen.iter().all(|n| *n == 1), "{m} {k} {features}");
        }
    }

    #[test]
    #[should_panic(expected = "feature 5")]
    fn a_panic_is_passed_on() {
        let column = |(): &mut (), o: usize, _: &mut [u8]| assert!(o != 5, "feature {o}");
        by_feature([1, WORTH, 9], || (), column, |_, _, _| ());
    }
}
