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
    pub(crate) fn get(&self, m: usize, make: impl FnOnce() -> V) -> V {
        let Some(page) = self.0.get(m / PAGE) else { return make() };
        let page = page.get_or_init(|| Box::new([const { OnceLock::new() }; PAGE]));
        let place = &page[m % PAGE];
        place.get().copied().unwrap_or_else(|| {
            let value = make();
            // Another thread may have been faster: both made the same.
            let _ = place.set(value);
            value
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_made_once() {
        let values = ByTokens::<usize>::new();
        for m in [0, 1, PAGE - 1, PAGE, PAGE * PAGES - 1] {
            assert_eq!([7, 8].map(|value| values.get(m, || m + value)), [m + 7; 2]);
        }
        assert_eq!([1, 2].map(|value| values.get(PAGE * PAGES, || value)), [1, 2]);
    }
}
