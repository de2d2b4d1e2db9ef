//! A few values that were worked out before: a table of fixed size, so that calls allocate nothing.

use std::sync::{Mutex, PoisonError};

/// Up to `N` values by their keys. A new one takes the place of the oldest.
#[derive(Debug)]
pub(crate) struct Remembered<K, V, const N: usize>(Mutex<Table<K, V, N>>);

#[derive(Debug)]
struct Table<K, V, const N: usize> {
    known: [Option<(K, V)>; N],
    next: usize,
}

impl<K: Copy + PartialEq, V: Copy, const N: usize> Remembered<K, V, N> {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(Table { known: [None; N], next: 0 }))
    }

    /// The value of a key: the one that is known, else what `make` returns.
    ///
    /// # Errors
    /// Those of `make`; nothing is remembered then.
    pub(crate) fn get<E>(&self, key: K, make: impl FnOnce() -> Result<V, E>) -> Result<V, E> {
        let mut table = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, value)) = table.known.iter().flatten().find(|(known, _)| *known == key) {
            return Ok(*value);
        }
        let value = make()?;
        let at = table.next;
        table.known[at] = Some((key, value));
        table.next = (at + 1) % N;
        Ok(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_gives_way_and_errors_are_not_kept() {
        let table = Remembered::<u32, u32, 2>::new();
        let get = |key, value: Result<u32, ()>| table.get(key, || value);
        assert_eq!(get(1, Err(())), Err(()));
        assert_eq!([get(1, Ok(10)), get(2, Ok(20))], [Ok(10), Ok(20)]);
        assert_eq!([get(1, Ok(0)), get(2, Err(()))], [Ok(10), Ok(20)]);
        assert_eq!(get(3, Ok(30)), Ok(30));
        assert_eq!([get(2, Ok(0)), get(1, Ok(11))], [Ok(20), Ok(11)]);
    }
}
