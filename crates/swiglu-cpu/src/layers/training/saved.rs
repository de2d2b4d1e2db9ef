//! What is kept between a forward and a backward pass.

use swiglu_core::{Element, Error, Matrix, MatrixRef, Problem, Result, SavePolicy};

use crate::buffer::Buffer;
use crate::cpu::Cpu;
use crate::epilogue::{Kept, Rows};

/// What a forward pass leaves for the backward pass that takes it: x, borrowed or copied, and gate and up as the layer's
/// [`SavePolicy`] says. Its memory is the device's, and goes back there.
#[derive(Debug)]
pub struct Saved<'x, T> {
    x: Input<'x, T>,
    kept: Block,
    pub(super) policy: SavePolicy,
    /// [`Training::of`](super::Training) of the layer.
    of: u64,
    problem: Problem,
}

#[derive(Debug)]
enum Input<'x, T> {
    Borrowed(MatrixRef<'x, T>),
    Owned(Matrix<T>),
}

impl<T: Copy + Default> Input<'_, T> {
    fn view(&self) -> MatrixRef<'_, T> {
        match self {
            Input::Borrowed(x) => *x,
            Input::Owned(x) => x.view(),
        }
    }
}

/// Memory that goes back to the device.
#[derive(Debug)]
struct Block {
    cpu: Cpu,
    memory: Buffer,
}

impl Drop for Block {
    fn drop(&mut self) {
        let memory = std::mem::replace(&mut self.memory, Buffer::empty());
        if memory.bytes() > 0 {
            self.cpu.kept().give_back(memory);
        }
    }
}

impl<'x, T: Element> Saved<'x, T> {
    pub(super) fn new(
        cpu: &Cpu,
        problem: Problem,
        (policy, of): (SavePolicy, u64),
        x: MatrixRef<'x, T>,
    ) -> Result<Self> {
        let bytes = policy.kept_bytes(x.rows(), problem.intermediate, T::DTYPE);
        let memory = if bytes > 0 { cpu.kept().take(bytes)? } else { Buffer::empty() };
        let kept = Block { cpu: cpu.clone(), memory };
        let problem = problem.with_m(x.rows());
        Ok(Self { x: Input::Borrowed(x), kept, policy, of, problem })
    }

    /// What is kept of gate and up, as rows of the memory.
    pub(super) fn rows(&mut self) -> Kept<T> {
        let memory = self.kept.memory.as_mut_ptr().cast::<T>();
        match self.policy {
            SavePolicy::Save => {
                let [gate, up] = halves(memory, self.problem.intermediate);
                Kept { gate: Some(gate), up: Some(up) }
            }
            SavePolicy::SaveGate => {
                let cols = self.problem.intermediate;
                Kept { gate: Some(Rows { first: memory, stride: cols, cols }), up: None }
            }
            _ => Kept::NOTHING,
        }
    }

    pub(super) fn x(&self) -> MatrixRef<'_, T> {
        self.x.view()
    }

    /// x, and the memory of what is kept.
    pub(super) fn parts(&mut self) -> (MatrixRef<'_, T>, &mut [u8]) {
        (self.x.view(), self.kept.memory.as_mut_slice())
    }

    /// Tokens.
    pub fn tokens(&self) -> usize {
        self.problem.m
    }

    /// Bytes that are kept between the passes, beside x.
    pub fn kept_bytes(&self) -> usize {
        self.policy.kept_bytes(self.problem.m, self.problem.intermediate, T::DTYPE)
    }

    /// The same with a copy of x, which may then change.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if there is no memory for it.
    pub fn into_owned(self) -> Result<Saved<'static, T>> {
        let x = match self.x {
            Input::Borrowed(x) => x.to_dtype()?,
            Input::Owned(x) => x,
        };
        let (kept, policy, of, problem) = (self.kept, self.policy, self.of, self.problem);
        Ok(Saved { x: Input::Owned(x), kept, policy, of, problem })
    }
}

impl<T: Element> Saved<'_, T> {
    /// Refuses what another layer kept, or the same one before its weights changed. `of`: [`Training::of`](super::Training).
    pub(super) fn expect_of(&self, of: u64) -> Result<()> {
        match self.of == of {
            true => Ok(()),
            false => Err(Error::Unsupported {
                what: "a backward pass with what another layer kept".into(),
                why: "the layer that ran forward runs backward, with the weights that it had; an update makes it another".into(),
            }),
        }
    }
}

/// Gate and up in rows of 2H values.
pub(super) fn halves<T>(first: *mut T, intermediate: usize) -> [Rows<T>; 2] {
    [0, intermediate].map(|offset| Rows {
        first: first.wrapping_add(offset),
        stride: 2 * intermediate,
        cols: intermediate,
    })
}
