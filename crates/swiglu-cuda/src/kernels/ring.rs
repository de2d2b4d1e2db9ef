//! Rings of stages in shared memory, as tests see them.

/// A ring as a launch uses it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ring {
    pub(crate) stages: usize,
    /// Stages that a block, or a warp that has the ring to itself, fills one after the other.
    pub(crate) filled: usize,
}

impl Ring {
    /// Whether stages are filled again, so that what waits for an empty one has waited, in either phase of its barrier.
    pub(crate) fn goes_round(self) -> bool {
        self.filled >= self.stages + 2
    }
}
