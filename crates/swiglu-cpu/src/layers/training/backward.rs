//! The backward pass, whoever has the weights.

use std::ops::Range;

use swiglu_core::{
    Element, GradientsMut, MatrixMut, MatrixRef, Orientation, Path, Problem, Result, RowScale,
};

use super::super::gated::{matrix_bytes, matrix_in};
use super::super::linear::Linear;
use super::super::pass::linear_map;
use super::factor::Factor;
use super::saved::halves;
use super::{wants_dh, wants_inner};
use crate::columns::sum_columns;
use crate::compiled;
use crate::cpu::Cpu;
use crate::differentiated::{Dh, Differentiated, DifferentiatedRows, WORK};
use crate::epilogue::{Factors, Rows};
use crate::order::Order;
use crate::panels::SendPtr;
use crate::team::Step;
use crate::workspace::{Tokens, cut, total};

/// A backward pass of a layer: its problem, and the weights that gradients go through.
pub(super) struct Backward<'a, T> {
    /// With the limits of the call.
    pub(super) cpu: &'a Cpu,
    pub(super) problem: Problem,
    pub(super) path: Path,
    /// From ∂L/∂gate and ∂L/∂up, 2H inputs, to ∂L/∂x: there where that is wanted.
    pub(super) dx: Option<&'a Linear<T>>,
    pub(super) down: Option<Down<'a, T>>,
}

/// What a block has beside.
pub(super) struct Down<'a, T> {
    /// From ∂L/∂y to ∂L/∂h: there where anything behind it is wanted.
    pub(super) dh: Option<&'a Linear<T>>,
    /// Its bias, K values.
    pub(super) bias: Option<&'a [f32]>,
    pub(super) orientation: Orientation,
}

impl<T: Element> Down<'_, T> {
    /// Sums of h·dh for each row: of each panel of the epilogue, or one.
    fn dots(&self, path: Path) -> usize {
        match (path, self.dh) {
            (Path::Fused, Some(dh)) => dh.weights().panels(),
            _ => 1,
        }
    }
}

impl<T: Element> Backward<'_, T> {
    /// The gradients of a block from dy and from gate and up, whose own gradients are written to `grads`, rows of 2H, which
    /// may lie where gate and up do.
    pub(super) fn block(
        &self,
        (x, dy): (MatrixRef<'_, T>, MatrixRef<'_, T>),
        gate_up: [Rows<T>; 2],
        mut grads: MatrixMut<'_, T>,
        into: &mut GradientsMut<'_, T>,
    ) -> Result<()> {
        let (cpu, m, features) = (self.cpu, x.rows(), self.problem.intermediate);
        let h_bytes = into.down.as_ref().map_or(0, |_| matrix_bytes::<T>(m, features));
        let scales = into.row_scale_grad.is_some();
        let dots = self.down.as_ref().filter(|_| scales).map_or(0, |down| down.dots(self.path));
        let dots_bytes = matrix_bytes::<f32>(m, dots);
        cpu.workspaces().with(total([h_bytes, dots_bytes]), |memory| {
            let [h, dots_in] = cut(memory, [h_bytes, dots_bytes]);
            let first = h.as_mut_ptr().cast::<T>();
            let h = into.down.as_ref().map(|_| Rows { first, stride: features, cols: features });
            let to = halves(grads.as_mut_slice().as_mut_ptr(), features);
            let mut dots_in = matrix_in::<f32>(dots_in, m, dots)?;
            let first = dots_in.as_mut_slice().as_mut_ptr();
            let of = Differentiated {
                h,
                scale: (into.row_scale != RowScale::None).then(|| Factors::of(into.row_scale)),
                dots: scales.then_some(Rows { first, stride: dots, cols: dots }),
                ..self.differentiated(gate_up, to)
            };
            match (wants_dh(into), &self.down) {
                (true, Some(Down { dh: Some(dh), .. })) => self.through_down(dh, dy, of)?,
                _ => self.differentiate(of, m, None),
            }
            if let Some(place) = &mut into.row_scale_grad {
                self.of_factors(dots_in.as_ref(), dy, place);
            }
            if let (Some(place), Some(h), Some(down)) = (&mut into.down, h, &self.down) {
                // SAFETY: the part holds m rows, written just now, and nothing else uses them.
                let h = unsafe { h.matrix(m)? };
                let (left, right) = match down.orientation {
                    Orientation::OutIn => (dy, h.as_ref()),
                    Orientation::InOut => (h.as_ref(), dy),
                };
                Factor::pack(cpu, right)?.times(left, place, into.accumulate)?;
            }
            match wants_inner(into) {
                true => self.inner(x, grads.as_ref(), into),
                false => Ok(()),
            }
        })
    }

    pub(super) fn differentiated(
        &self,
        [gate, up]: [Rows<T>; 2],
        into: [Rows<T>; 2],
    ) -> Differentiated<T> {
        let (activation, numerics) = (self.problem.activation, self.problem.numerics);
        let (h, scale, dots) = (None, None, None);
        Differentiated { activation, numerics, gate, up, into, h, scale, dots }
    }

    /// The gradient of each row's factor: its sums of h·dh, in order, and what goes through the bias.
    fn of_factors(&self, dots: MatrixRef<'_, f32>, dy: MatrixRef<'_, T>, out: &mut [f32]) {
        let bias = self.down.as_ref().and_then(|down| down.bias);
        let (m, out) = (dy.rows(), SendPtr(out.as_mut_ptr()));
        let run = |rows: Range<usize>, _: usize| {
            for row in rows {
                let products = bias.into_iter().flatten().zip(dy.row(row));
                let through_bias: f32 = products.map(|(b, dy)| b * dy.to_f32()).sum();
                let sum: f32 = dots.row(row).iter().sum();
                // SAFETY: each row has a place, and is one worker's.
                unsafe { *out.get().add(row) = sum + through_bias };
            }
        };
        let read = dots.cols() + bias.map_or(0, <[f32]>::len);
        self.cpu.run_work((2.0 * (m * read) as f64, 0.0), &[Step { units: m, run: &run }]);
    }

    /// dh = dy·Wdᵀ and the derivative behind it: in its epilogue, or on the unfused path over dh in memory.
    fn through_down(
        &self,
        dh: &Linear<T>,
        dy: MatrixRef<'_, T>,
        of: Differentiated<T>,
    ) -> Result<()> {
        let (cpu, m, h) = (self.cpu, dy.rows(), self.problem.intermediate);
        let bytes = dh.workspace_bytes(cpu, Tokens::Exactly(m));
        if self.path == Path::Fused {
            let order: Order = self.problem.numerics.into();
            let task = Task { of, dh: Dh::None };
            return cpu.workspaces().with(bytes, |work| {
                let ordered = (dh.weights(), order);
                linear_map(cpu, ordered, work, dy.into(), |row| task.get().of.from(row));
                Ok(())
            });
        }
        let dh_bytes = matrix_bytes::<T>(m, h);
        cpu.workspaces().with(total([dh_bytes, bytes]), |memory| {
            let [values, work] = cut(memory, [dh_bytes, bytes]);
            let mut values = matrix_in(values, m, h)?;
            dh.forward(cpu, work, dy, values.reborrow());
            self.differentiate(of, m, Some(values.as_ref()));
            Ok(())
        })
    }

    /// The derivative over rows in memory; without dh h alone.
    pub(super) fn differentiate(
        &self,
        of: Differentiated<T>,
        m: usize,
        dh: Option<MatrixRef<'_, T>>,
    ) {
        let cpu = self.cpu;
        let dh = dh.map_or(Dh::None, |dh| {
            let first = dh.as_slice().as_ptr().cast_mut();
            Dh::Rows(Rows { first, stride: dh.row_stride(), cols: dh.cols() })
        });
        let task = Task { of, dh };
        let run = |rows: Range<usize>, _: usize| {
            let Task { of, dh } = task.get();
            let kernel = DifferentiatedRows { of, dh, rows, cols: 0..of.gate.cols };
            // SAFETY: the instruction set was checked when the device was made; each row is one worker's.
            unsafe { compiled::differentiated(cpu.isa(), kernel) }
        };
        let work = WORK * m as f64 * self.problem.intermediate as f64;
        cpu.run_work((work, 0.0), &[Step { units: m, run: &run }]);
    }

    /// The gradients of the gated layer's own, from those of gate and up in rows of 2H.
    pub(super) fn inner(
        &self,
        x: MatrixRef<'_, T>,
        dgate_up: MatrixRef<'_, T>,
        into: &mut GradientsMut<'_, T>,
    ) -> Result<()> {
        let (cpu, h) = (self.cpu, self.problem.intermediate);
        if let (Some(dx), Some(dx_of)) = (&mut into.dx, self.dx) {
            let bytes = dx_of.workspace_bytes(cpu, Tokens::Exactly(x.rows()));
            cpu.workspaces().with(bytes, |work| {
                dx_of.forward(cpu, work, dgate_up, dx.reborrow());
                Ok(())
            })?;
        }
        let (dgate, dup) = (dgate_up.cols_range(0..h)?, dgate_up.cols_range(h..2 * h)?);
        let accumulate = into.accumulate;
        if let Some(bias) = &mut into.gate_bias {
            sum_columns(cpu, (dgate, RowScale::None), bias, accumulate);
        }
        if let Some(bias) = &mut into.up_bias {
            sum_columns(cpu, (dup, RowScale::None), bias, accumulate);
        }
        let places = [(dgate, &mut into.gate), (dup, &mut into.up)];
        let mut wanted = places.into_iter().filter_map(|(d, place)| Some((d, place.as_mut()?)));
        match self.problem.layout.orientation {
            Orientation::OutIn => {
                let Some(first) = wanted.next() else { return Ok(()) };
                let x = Factor::pack(cpu, x)?;
                std::iter::once(first)
                    .chain(wanted)
                    .try_for_each(|(d, place)| x.times(d, place, accumulate))
            }
            Orientation::InOut => {
                wanted.try_for_each(|(d, place)| Factor::pack(cpu, d)?.times(x, place, accumulate))
            }
        }
    }
}

/// What a step over rows is told, for all workers.
struct Task<T> {
    of: Differentiated<T>,
    dh: Dh<T>,
}
// SAFETY: workers have disjoint rows.
unsafe impl<T> Sync for Task<T> {}
impl<T: Element> Task<T> {
    fn get(&self) -> Task<T> {
        Task { of: self.of, dh: self.dh }
    }
}
