//! One way of computing a case, over rotating copies of its data.

use swiglu::{Element, Matrix, MatrixMut, MatrixRef, Numerics};

/// Computes the case into `out`, from one copy of the data.
pub(super) type Call<'a, T> = Box<dyn Fn(MatrixMut<'_, T>) -> anyhow::Result<()> + 'a>;

/// One way of computing a case.
pub(super) struct Way<'a, T> {
    /// `fused`, `unfused` or `naive`.
    pub(super) profile: &'static str,
    /// Where it rounds, which decides how exact it must be.
    pub(super) numerics: Numerics,
    /// One per copy of the data.
    calls: Vec<Call<'a, T>>,
    outs: Vec<Matrix<T>>,
    turn: usize,
}

impl<'a, T: Element> Way<'a, T> {
    /// A way with results of `shape`. Results of every copy are kept apart, so that where inputs
    /// are not in a cache, neither is the output.
    pub(super) fn new(
        profile: &'static str,
        numerics: Numerics,
        shape: [usize; 2],
        calls: Vec<Call<'a, T>>,
    ) -> swiglu_core::Result<Self> {
        let out = || Matrix::zeros(shape[0], shape[1]);
        let outs = calls.iter().map(|_| out()).collect::<swiglu_core::Result<_>>()?;
        Ok(Self { profile, numerics, calls, outs, turn: 0 })
    }

    /// One call, with the next copy.
    pub(super) fn step(&mut self) -> anyhow::Result<()> {
        let at = self.turn % self.calls.len();
        self.turn += 1;
        (self.calls[at])(self.outs[at].view_mut())
    }

    /// One call with every copy: first calls pay for pages and workspaces, with many tokens as much as for the work.
    pub(super) fn warm(&mut self) -> anyhow::Result<()> {
        (0..self.calls.len()).try_for_each(|_| self.step())
    }

    /// The result from the first copy, in memory that held none before.
    pub(super) fn result(&mut self) -> anyhow::Result<MatrixRef<'_, T>> {
        self.outs[0].as_mut_slice().fill(T::from_f32(f32::NAN));
        self.turn = 0;
        self.step()?;
        Ok(self.outs[0].view())
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn every_copy_is_called_before_it_is_timed() {
        let called = [const { Cell::new(0) }; 5];
        let count = |cell| -> Call<'_, f32> {
            let cell: &Cell<i32> = cell;
            Box::new(move |_| {
                cell.set(cell.get() + 1);
                Ok(())
            })
        };
        let calls = called.iter().map(count).collect();
        let mut way = Way::new("fused", Numerics::default(), [1, 1], calls).unwrap();
        way.warm().unwrap();
        assert!(called.iter().all(|cell| cell.get() == 1));
    }
}
