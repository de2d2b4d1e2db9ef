//! Buffers a layer reuses from call to call.

use std::sync::{Mutex, PoisonError};

use swiglu_core::Result;

use crate::buffer::Buffer;

/// The buffers of one call. They grow to the largest call seen and are then reused.
#[derive(Debug)]
pub(crate) struct Workspace {
    /// Packed input rows.
    pub(crate) x: Buffer,
    /// h, row by row.
    pub(crate) h: Buffer,
    /// h packed as input rows of the down projection.
    pub(crate) packed_h: Buffer,
    /// Accumulators, a part for each worker.
    pub(crate) sums: Buffer,
    /// Decoded weights, a part for each worker.
    pub(crate) scratch: Buffer,
}

impl Workspace {
    fn new() -> Result<Self> {
        let none = || Buffer::zeroed(0);
        Ok(Self { x: none()?, h: none()?, packed_h: none()?, sums: none()?, scratch: none()? })
    }
}

/// Workspaces not in use. Calls from several threads at once each take their own.
#[derive(Debug, Default)]
pub(crate) struct Workspaces(Mutex<Vec<Workspace>>);

impl Workspaces {
    /// Calls `f` with a workspace and keeps it for the next call.
    pub(crate) fn with<R>(&self, f: impl FnOnce(&mut Workspace) -> Result<R>) -> Result<R> {
        // A workspace holds no invariant a panic could break.
        let lock = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = lock().pop();
        let mut workspace = match kept {
            Some(workspace) => workspace,
            None => Workspace::new()?,
        };
        let result = f(&mut workspace);
        lock().push(workspace);
        result
    }
}
