//! Working memory of calls. It belongs to the device, whose layers take turns with it.

use std::sync::{Mutex, MutexGuard, PoisonError};

use swiglu_core::Result;

use crate::buffer::Buffer;

/// Memory that no call uses at the moment, the smallest first: as many blocks as were in use at the same time, one of a forward
/// pass, several of a backward pass or of one that packs weights. The smallest that suffices is taken. Where none does, the
/// largest is replaced, so that the small ones stay for small calls.
#[derive(Debug, Default)]
pub(crate) struct Workspaces(Mutex<Vec<Buffer>>);

impl Workspaces {
    /// Memory holds no invariant that a panic could break.
    fn free(&self) -> MutexGuard<'_, Vec<Buffer>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls `f` with at least `bytes` bytes, in which anything may stand: what another layer left.
    pub(crate) fn with<R>(
        &self,
        bytes: usize,
        f: impl FnOnce(&mut [u8]) -> Result<R>,
    ) -> Result<R> {
        let mut block = self.take(bytes)?;
        let result = f(block.as_mut_slice());
        self.give_back(block);
        result
    }

    /// Memory of at least `bytes` bytes, to be given back.
    pub(crate) fn take(&self, bytes: usize) -> Result<Buffer> {
        let found = {
            let mut free = self.free();
            let suffices = free.partition_point(|block| block.bytes() < bytes);
            if suffices < free.len() { Some(free.remove(suffices)) } else { free.pop() }
        };
        match found {
            Some(block) if block.bytes() >= bytes => Ok(block),
            // One that is too small goes before its successor is made.
            too_small => {
                drop(too_small);
                Buffer::zeroed(bytes)
            }
        }
    }

    /// Gives memory back that was taken.
    pub(crate) fn give_back(&self, block: Buffer) {
        let mut free = self.free();
        // Before others of its size: it is the one that is in the caches.
        let at = free.partition_point(|other| other.bytes() < block.bytes());
        free.insert(at, block);
    }

    /// Makes so many blocks of at least `bytes` bytes ready.
    pub(crate) fn reserve(&self, bytes: usize, callers: usize) -> Result<()> {
        let blocks: Vec<Buffer> = (0..callers).map(|_| self.take(bytes)).collect::<Result<_>>()?;
        blocks.into_iter().for_each(|block| self.give_back(block));
        Ok(())
    }

    /// Bytes of the blocks.
    pub(crate) fn bytes(&self) -> usize {
        self.free().iter().map(Buffer::bytes).sum()
    }

    /// Frees the blocks, and returns their bytes.
    pub(crate) fn trim(&self) -> usize {
        // They are freed after the lock.
        let blocks = std::mem::take(&mut *self.free());
        blocks.iter().map(Buffer::bytes).sum()
    }
}

/// For which numbers of tokens a workspace has to suffice.
#[derive(Clone, Copy)]
pub(crate) enum Tokens {
    Exactly(usize),
    UpTo(usize),
}

impl Tokens {
    /// The largest number.
    pub(crate) fn most(self) -> usize {
        let (Tokens::Exactly(m) | Tokens::UpTo(m)) = self;
        m
    }
}

/// The size of a part, with which the next begins at a line of the cache.
const fn part_bytes(bytes: usize) -> usize {
    match bytes.checked_next_multiple_of(64) {
        Some(bytes) => bytes,
        None => usize::MAX,
    }
}

/// Bytes of a workspace with these parts.
pub(crate) fn total<const N: usize>(parts: [usize; N]) -> usize {
    parts.into_iter().map(part_bytes).fold(0, usize::saturating_add)
}

/// Cuts a workspace of at least [`total`] bytes into these parts.
pub(crate) fn cut<const N: usize>(workspace: &mut [u8], parts: [usize; N]) -> [&mut [u8]; N] {
    let mut rest = workspace;
    parts.map(|bytes| {
        let (part, after) = std::mem::take(&mut rest).split_at_mut(part_bytes(bytes));
        rest = after;
        part
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sizes of what is free.
    fn sizes(workspaces: &Workspaces) -> Vec<usize> {
        workspaces.free().iter().map(Buffer::bytes).collect()
    }

    #[test]
    fn there_are_as_many_blocks_as_callers_and_each_takes_the_smallest_that_suffices() {
        let workspaces = Workspaces::default();
        let with = |bytes, inside: &dyn Fn()| {
            let run = |memory: &mut [u8]| {
                assert!(memory.len() >= bytes);
                inside();
                Ok(())
            };
            workspaces.with(bytes, run).unwrap();
        };
        for bytes in [100, 300, 200] {
            with(bytes, &|| assert_eq!(sizes(&workspaces), []));
        }
        assert_eq!(sizes(&workspaces), [300]);
        // A small call beside a large one, then each by itself.
        with(300, &|| with(50, &|| ()));
        assert_eq!(sizes(&workspaces), [50, 300]);
        with(40, &|| assert_eq!(sizes(&workspaces), [300]));
        with(60, &|| assert_eq!(sizes(&workspaces), [50]));
        // Too large for both: the large one is replaced.
        with(400, &|| assert_eq!(sizes(&workspaces), [50]));
        assert_eq!(sizes(&workspaces), [50, 400]);
        workspaces.reserve(200, 2).unwrap();
        assert_eq!(sizes(&workspaces), [200, 400]);
        assert_eq!((workspaces.bytes(), workspaces.trim(), workspaces.bytes()), (600, 600, 0));
    }

    #[test]
    fn parts_are_apart_and_begin_at_lines() {
        let sizes = [1, 0, 64, 65];
        assert_eq!(total(sizes), 64 + 64 + 128);
        assert_eq!(total([usize::MAX / 64 * 64, 64]), usize::MAX);
        let mut memory = Buffer::zeroed(total(sizes)).unwrap();
        for (part, bytes) in cut(memory.as_mut_slice(), sizes).into_iter().zip(sizes) {
            assert!(part.len() >= bytes && part.as_ptr().addr().is_multiple_of(64));
            assert!(part.iter().all(|&b| b == 0));
            part.fill(1);
        }
    }
}
