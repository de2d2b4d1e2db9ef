//! The gradients of gate and up from that of h, by the kernel that differentiates them in training.

use std::ops::Range;

use swiglu_core::{
    Activation, Arrangement, Element, Error, GateUpMut, GateUpRef, Half, MatrixRef, Numerics,
    Result,
};

use super::{SEGMENT, TILE, in_groups};
use crate::compiled;
use crate::cpu::Cpu;
use crate::differentiated::{Dh, Differentiated, DifferentiatedRows, WORK};
use crate::epilogue::Rows;
use crate::team::Step;

/// Gate and up as the kernel takes them: rows of each, from their first elements on.
#[derive(Clone, Copy)]
struct Halves<T> {
    gate: Rows<T>,
    up: Rows<T>,
}

impl<T: Element> Halves<T> {
    /// Of the tensors of an arrangement, each its first element and stride.
    fn of(arrangement: Arrangement, tensors: [(*mut T, usize); 2], intermediate: usize) -> Self {
        let half = |half| {
            let (tensor, column) = arrangement.locate(half, 0, intermediate);
            let (first, stride) = tensors[tensor];
            Rows { first: first.wrapping_add(column), stride, cols: intermediate }
        };
        Self { gate: half(Half::Gate), up: half(Half::Up) }
    }

    /// As one row, where that is how they lie.
    fn joined(self, m: usize) -> Self {
        let joined = |rows: Rows<T>| Rows { cols: m * rows.cols, ..rows };
        Self { gate: joined(self.gate), up: joined(self.up) }
    }

    fn is_dense(&self) -> bool {
        [self.gate, self.up].iter().all(|rows| rows.stride == rows.cols)
    }
}

/// What all workers are told.
#[derive(Clone, Copy)]
struct Task<T> {
    activation: Activation,
    numerics: Numerics,
    dh: Rows<T>,
    given: Halves<T>,
    into: Halves<T>,
    /// Elements of a group, where gate and up change places within rows.
    group: Option<usize>,
}

// SAFETY: workers read shared inputs and write disjoint parts of rows.
unsafe impl<T> Sync for Task<T> {}

impl<T: Element> Task<T> {
    fn rows(&self, dh: Rows<T>, given: [Rows<T>; 2], into: [Rows<T>; 2]) -> DifferentiatedRows<T> {
        let Self { activation, numerics, .. } = *self;
        let [gate, up] = given;
        let (h, scale, dots) = (None, None, None);
        let of = Differentiated { activation, numerics, gate, up, into, h, scale, dots };
        DifferentiatedRows { of, dh: Dh::Rows(dh), rows: 0..1, cols: 0..dh.cols }
    }

    /// Columns of a row.
    ///
    /// # Safety
    /// They lie inside the operands, nothing else uses what is written, and the instruction set is there.
    unsafe fn run(&self, cpu: &Cpu, row: usize, cols: Range<usize>) {
        let Self { dh, given, into, group, .. } = *self;
        let dh = dh.from(row);
        let whole = |halves: Halves<T>| [halves.gate.from(row), halves.up.from(row)];
        let (given_rows, into_rows) = (whole(given), whole(into));
        let Some(group) = group else {
            let kernel = DifferentiatedRows { cols, ..self.rows(dh, given_rows, into_rows) };
            // SAFETY: the caller's.
            return unsafe { compiled::differentiated(cpu.isa(), kernel) };
        };
        // Groups are separated, and what comes of them put together again, in the first-level cache.
        let mut tile = [[T::default(); TILE]; 2];
        for start in cols.clone().step_by(TILE) {
            let count = TILE.min(cols.end - start);
            for (half, rows) in tile.iter_mut().zip(given_rows) {
                for (i, value) in half[..count].iter_mut().enumerate() {
                    // SAFETY: the caller's: the column is one of the row's.
                    *value = unsafe { *rows.first.add(in_groups(start + i, group)) };
                }
            }
            let separated = tile.each_mut().map(|half| Rows {
                first: half.as_mut_ptr(),
                stride: TILE,
                cols: count,
            });
            let dh = Rows { first: dh.first.wrapping_add(start), stride: dh.stride, cols: count };
            // SAFETY: the tile has the columns, and so has dh.
            unsafe { compiled::differentiated(cpu.isa(), self.rows(dh, separated, separated)) };
            for (half, rows) in tile.iter().zip(into_rows) {
                for (i, value) in half[..count].iter().enumerate() {
                    // SAFETY: as above, and nobody else writes it.
                    unsafe { *rows.first.add(in_groups(start + i, group)) = *value };
                }
            }
        }
    }
}

impl Cpu {
    /// (∂L/∂gate, ∂L/∂up) from ∂L/∂h `[M, H]`: the factors in `f32`, each gradient rounded once.
    ///
    /// # Errors
    /// [`Error::Shape`] if ∂L/∂h is not `[M, H]`, or `grads` has another shape or arrangement than `inputs`.
    pub fn activation_backward<T: Element>(
        &self,
        act: &Activation,
        numerics: Numerics,
        out_grad: MatrixRef<'_, T>,
        inputs: GateUpRef<'_, T>,
        mut grads: GateUpMut<'_, T>,
    ) -> Result<()> {
        let (m, h, arrangement) = (inputs.rows(), inputs.intermediate(), inputs.arrangement());
        out_grad.expect_shape("gradient of the output", [m, h])?;
        let (expected, given) =
            ((m, h, arrangement), (grads.rows(), grads.intermediate(), grads.arrangement()));
        if expected != given {
            let show = |(m, h, arrangement)| format!("[{m}, {h}] {arrangement}");
            return Err(Error::Shape {
                what: "gradients of gate and up".into(),
                expected: show(expected),
                given: show(given),
            });
        }
        if m == 0 || h == 0 {
            return Ok(());
        }
        let read = |m: &MatrixRef<'_, T>| (m.as_slice().as_ptr().cast_mut(), m.row_stride());
        let given = Halves::of(arrangement, inputs.tensors().each_ref().map(read), h);
        let (mut first, second) = grads.tensors_mut();
        let written = (first.as_mut_slice().as_mut_ptr(), first.row_stride());
        let second = second.map_or(written, |mut second| {
            (second.as_mut_slice().as_mut_ptr(), second.row_stride())
        });
        let into = Halves::of(arrangement, [written, second], h);
        let (first, stride) = read(&out_grad);
        let dh = Rows { first, stride, cols: h };
        let group = match arrangement {
            Arrangement::Interleaved { group } if group < h => Some(group),
            _ => None,
        };
        let mut task = Task { activation: *act, numerics, dh, given, into, group };
        let mut rows = m;
        if given.is_dense() && into.is_dense() && stride == h {
            // Dense rows are one long row: no tails but the last.
            rows = 1;
            task.dh.cols = m * h;
            (task.given, task.into) = (given.joined(m), into.joined(m));
        }
        let cols = task.dh.cols;
        let segments = cols.div_ceil(SEGMENT);
        let task = &task;
        let run = |units: Range<usize>, _: usize| {
            for unit in units {
                let (row, start) = (unit / segments, unit % segments * SEGMENT);
                // SAFETY: the instruction set was checked when the device was made; segments are inside every
                // operand and disjoint parts of what is written.
                unsafe { task.run(self, row, start..cols.min(start + SEGMENT)) };
            }
        };
        let elements = m as f64 * h as f64;
        let work = (WORK * elements, 5.0 * elements * size_of::<T>() as f64);
        self.run_work(work, &[Step { units: rows * segments, run: &run }]);
        Ok(())
    }
}
