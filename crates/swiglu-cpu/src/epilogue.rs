//! What happens to the sums of a panel: bias, rounding, activation, and the store.

use swiglu_core::{
    Activation, DType, Element, F32Lanes, MatrixMut, Numerics, Result, Rounding, RowScale,
};

use crate::compiled;
use crate::isa::Isa;
use crate::simd::{Kernel, Math, MathKernel, Simd};

/// What happens to the accumulators of a panel.
pub(crate) trait Epilogue: Copy {
    /// Finishes `rows` rows from row `first` on; `sums` holds `2 · LANES` for each of them.
    ///
    /// # Safety
    /// `isa` is available; `sums` holds the rows; the epilogue's own pointers are valid for them.
    unsafe fn finish(&self, isa: Isa, panel: usize, first: usize, sums: *const f32, rows: usize);
}

/// Where rows of results go.
#[derive(Clone, Copy)]
pub(crate) struct Rows<O> {
    pub(crate) first: *mut O,
    pub(crate) stride: usize,
    /// Columns; a panel past them is cut.
    pub(crate) cols: usize,
}

impl<O: Element> Rows<O> {
    /// Rows from row `r` on; without columns there is no buffer to point into.
    pub(crate) fn from(self, r: usize) -> Self {
        Self { first: self.first.wrapping_add(r * self.stride), ..self }
    }

    /// The matrix of so many rows.
    ///
    /// # Safety
    /// The rows are valid for as long as the matrix is, and nothing else uses them.
    pub(crate) unsafe fn matrix<'a>(self, rows: usize) -> Result<MatrixMut<'a, O>> {
        let values = if rows == 0 { 0 } else { (rows - 1) * self.stride + self.cols };
        let first = if values == 0 { std::ptr::NonNull::dangling().as_ptr() } else { self.first };
        // SAFETY: the caller's.
        let values = unsafe { std::slice::from_raw_parts_mut(first, values) };
        MatrixMut::with_stride(values, rows, self.cols, self.stride)
    }

    /// Rounds and writes one vector of row `r` from column `col`, cut at the last column.
    ///
    /// # Safety
    /// The row is valid.
    #[inline(always)]
    pub(crate) unsafe fn write<S: Simd>(&self, r: usize, col: usize, v: S::V) {
        // SAFETY: as the caller promises; the partial copy stops at the last column.
        unsafe {
            // The panel's second vector may begin behind the last row.
            let p = self.first.wrapping_add(r * self.stride + col);
            if col + S::LANES <= self.cols {
                S::store::<O>(p, v);
            } else if col < self.cols {
                let mut whole = [O::default(); 64];
                S::store::<O>(whole.as_mut_ptr(), v);
                std::ptr::copy_nonoverlapping(whole.as_ptr(), p, self.cols - col);
            }
        }
    }

    /// One vector of row `r` from column `col`, zeros behind the last column.
    ///
    /// # Safety
    /// The row is valid.
    #[inline(always)]
    pub(crate) unsafe fn read<S: Simd>(&self, r: usize, col: usize) -> S::V {
        // SAFETY: as the caller promises; the partial copy stops at the last column.
        unsafe {
            let p = self.first.wrapping_add(r * self.stride + col);
            if col + S::LANES <= self.cols {
                return S::load::<O>(p);
            }
            let mut whole = [O::default(); 64];
            if col < self.cols {
                std::ptr::copy_nonoverlapping(p, whole.as_mut_ptr(), self.cols - col);
            }
            S::load::<O>(whole.as_ptr())
        }
    }
}

/// Where gate and up are kept as values of T, each or not.
#[derive(Clone, Copy)]
pub(crate) struct Kept<T> {
    pub(crate) gate: Option<Rows<T>>,
    pub(crate) up: Option<Rows<T>>,
}

// SAFETY: workers write disjoint columns.
unsafe impl<T> Send for Kept<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Kept<T> {}

impl<T: Element> Kept<T> {
    pub(crate) const NOTHING: Self = Self { gate: None, up: None };

    pub(crate) fn is_nothing(&self) -> bool {
        self.gate.is_none() && self.up.is_none()
    }

    /// Rows from row `r` on.
    pub(crate) fn from(self, r: usize) -> Self {
        let from = |rows: Option<Rows<T>>| rows.map(|rows| rows.from(r));
        Self { gate: from(self.gate), up: from(self.up) }
    }
}

#[inline(always)]
unsafe fn biased<S: Simd>(sum: S::V, bias: Option<*const f32>, offset: usize) -> S::V {
    match bias {
        // SAFETY: the bias buffer holds `2 · LANES` values per panel.
        Some(b) => unsafe { sum.add(S::load_f32(b.add(offset))) },
        None => sum,
    }
}

/// h = act(gate, up), rounded to T and stored as O; beside it or alone gate and up.
#[derive(Clone, Copy)]
pub(crate) struct Gated<T, O> {
    pub(crate) activation: Activation,
    pub(crate) numerics: Numerics,
    pub(crate) bias: Option<*const f32>,
    pub(crate) out: Option<Rows<O>>,
    pub(crate) kept: Kept<T>,
}

/// A panel for [`Gated`].
pub(crate) struct GatedPanel<T, O> {
    epilogue: Gated<T, O>,
    panel: usize,
    sums: *const f32,
    rows: usize,
}

impl<T: Element, O: Element> MathKernel for GatedPanel<T, O> {
    type Element = T;
    const USES_DOTS: bool = matches!((T::DTYPE, O::DTYPE), (DType::Bf16, _) | (_, DType::Bf16));

    fn activation(&self) -> (Activation, Numerics) {
        (self.epilogue.activation, self.epilogue.numerics)
    }

    #[inline(always)]
    unsafe fn run<S: Simd, M: Math<S>>(&self, math: M) {
        let &GatedPanel { epilogue: e, panel, sums, rows } = self;
        let rounds = e.numerics.rounding != Rounding::Fused;
        for r in 0..rows {
            // SAFETY: `finish`'s caller vouches for the sums and rows.
            unsafe {
                let p = sums.add(r * 2 * S::LANES);
                let offset = panel * 2 * S::LANES;
                let mut gate = biased::<S>(S::load_f32(p), e.bias, offset);
                let mut up = biased::<S>(S::load_f32(p.add(S::LANES)), e.bias, offset + S::LANES);
                if rounds {
                    (gate, up) = (T::round_lanes(gate), T::round_lanes(up));
                }
                let col = panel * S::LANES;
                if let Some(kept) = e.kept.gate {
                    kept.write::<S>(r, col, gate);
                }
                if let Some(kept) = e.kept.up {
                    kept.write::<S>(r, col, up);
                }
                let Some(out) = e.out else { continue };
                let h = math.gated(gate, up);
                // Rounded by the store, unless that is wider.
                let h = if O::DTYPE == T::DTYPE { h } else { T::round_lanes(h) };
                out.write::<S>(r, col, h);
            }
        }
    }
}

impl<T: Element, O: Element> Epilogue for Gated<T, O> {
    unsafe fn finish(&self, isa: Isa, panel: usize, first: usize, sums: *const f32, rows: usize) {
        // SAFETY: the caller's.
        unsafe {
            let out = self.out.map(|out| out.from(first));
            let epilogue = Self { out, kept: self.kept.from(first), ..*self };
            compiled::gated(isa, GatedPanel { epilogue, panel, sums, rows });
        }
    }
}

/// y = sums + bias, rounded to T.
#[derive(Clone, Copy)]
pub(crate) struct Plain<T> {
    pub(crate) bias: Option<*const f32>,
    pub(crate) out: Rows<T>,
}

impl<T: Element> Epilogue for Plain<T> {
    unsafe fn finish(&self, isa: Isa, panel: usize, first: usize, sums: *const f32, rows: usize) {
        // SAFETY: the caller's.
        unsafe {
            let epilogue = Self { out: self.out.from(first), ..*self };
            compiled::plain(isa, PlainPanel { epilogue, panel, sums, rows });
        }
    }
}

/// out += factor of the row · (sums + bias), in f32, and rounded to the type of out.
#[derive(Clone, Copy)]
pub(crate) struct Added<O> {
    pub(crate) bias: Option<*const f32>,
    pub(crate) out: Rows<O>,
    pub(crate) scale: Factors,
}

/// The factors of rows from one on.
#[derive(Clone, Copy)]
pub(crate) enum Factors {
    Same(f32),
    Each(*const f32),
}

impl Factors {
    /// Those of all rows; the pointer is as good as the borrow was.
    pub(crate) fn of(scale: RowScale<'_>) -> Self {
        match scale {
            RowScale::Rows(factors) => Factors::Each(factors.as_ptr()),
            one => Factors::Same(one.of_row(0)),
        }
    }

    pub(crate) fn from(self, row: usize) -> Self {
        match self {
            Factors::Same(factor) => Factors::Same(factor),
            Factors::Each(first) => Factors::Each(first.wrapping_add(row)),
        }
    }

    /// # Safety
    /// There is a factor of the row.
    #[inline(always)]
    pub(crate) unsafe fn of_row(self, row: usize) -> f32 {
        match self {
            Factors::Same(factor) => factor,
            // SAFETY: the caller's.
            Factors::Each(first) => unsafe { *first.add(row) },
        }
    }
}

impl<O: Element> Epilogue for Added<O> {
    unsafe fn finish(&self, isa: Isa, panel: usize, first: usize, sums: *const f32, rows: usize) {
        let epilogue = Self { out: self.out.from(first), scale: self.scale.from(first), ..*self };
        // SAFETY: the caller's.
        unsafe { compiled::added(isa, AddedPanel { epilogue, panel, sums, rows }) }
    }
}

/// A panel for [`Added`].
pub(crate) struct AddedPanel<O> {
    epilogue: Added<O>,
    panel: usize,
    sums: *const f32,
    rows: usize,
}

impl<O: Element> Kernel for AddedPanel<O> {
    type Output = ();
    const USES_DOTS: bool = matches!(O::DTYPE, DType::Bf16);

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Added { bias, out, scale } = self.epilogue;
        for r in 0..self.rows {
            for v in 0..2 {
                let offset = (self.panel * 2 + v) * S::LANES;
                // SAFETY: the caller vouches for the sums and rows; columns past the last are not touched.
                unsafe {
                    let sum = S::load_f32(self.sums.add((r * 2 + v) * S::LANES));
                    let y = biased::<S>(sum, bias, offset);
                    let factor = S::V::splat(scale.of_row(r));
                    let before = out.read::<S>(r, offset);
                    out.write::<S>(r, offset, y.mul_add(factor, before));
                }
            }
        }
    }
}

/// A panel for [`Plain`].
pub(crate) struct PlainPanel<T> {
    epilogue: Plain<T>,
    panel: usize,
    sums: *const f32,
    rows: usize,
}

impl<T: Element> Kernel for PlainPanel<T> {
    type Output = ();
    const USES_DOTS: bool = matches!(T::DTYPE, DType::Bf16);

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        for r in 0..self.rows {
            for v in 0..2 {
                let offset = (self.panel * 2 + v) * S::LANES;
                // SAFETY: the caller vouches for the sums and rows.
                unsafe {
                    let sum = S::load_f32(self.sums.add((r * 2 + v) * S::LANES));
                    let y = biased::<S>(sum, self.epilogue.bias, offset);
                    self.epilogue.out.write::<S>(r, offset, y);
                }
            }
        }
    }
}
