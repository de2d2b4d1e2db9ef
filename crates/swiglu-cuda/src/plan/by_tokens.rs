//! What was planned before, by the number of tokens.

use std::sync::OnceLock;

const PAGE: usize = 128;
const PAGES: usize = 256;

/// A value for each number of tokens up to 32767, made when it is first asked for. Looking one up takes no lock, and
/// making one holds none: batches of a server have a few hundred sizes, in any order, on several threads.
pub(crate) struct ByTokens<V>(Box<[OnceLock<Page<V>>; PAGES]>);

type Page<V> = Box<[OnceLock<V>; PAGE]>;

impl<V: Copy> ByTokens<V> {
    pub(crate) fn new() -> Self {
        Self(Box::new([const { OnceLock::new() }; PAGES]))
    }

    /// The value for `m` tokens: the one that is known, else what `make` returns. More tokens than there are places for
    /// take a device so long that making it again does not count.
    ///
    /// # Errors
    /// Those of `make`; nothing is kept then.
    pub(crate) fn get<E>(&self, m: usize, make: impl FnOnce() -> Result<V, E>) -> Result<V, E> {
        let Some(page) = self.0.get(m / PAGE) else { return make() };
        let page = page.get_or_init(|| Box::new([const { OnceLock::new() }; PAGE]));
        let place = &page[m % PAGE];
        if let Some(value) = place.get() {
            return Ok(*value);
        }
        let value = make()?;
        // Another thread may have been faster: both made the same.
        let _ = place.set(value);
        Ok(value)
    }
}

impl<V> std::fmt::Debug for ByTokens<V> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ByTokens").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_made_once_and_errors_are_not_kept() {
        let values = ByTokens::<usize>::new();
        let get = |m, value: Result<usize, ()>| values.get(m, || value);
        for m in [0, 1, PAGE - 1, PAGE, PAGE * PAGES - 1] {
            assert_eq!(get(m, Err(())), Err(()));
            assert_eq!(get(m, Ok(m + 7)), Ok(m + 7));
            assert_eq!(get(m, Err(())), Ok(m + 7));
        }
        assert_eq!(get(PAGE * PAGES, Ok(1)), Ok(1));
        assert_eq!(get(PAGE * PAGES, Err(())), Err(()));
    }
}
