//! The derivative of the gated activation: behind the sums of dh = dy·Wdᵀ, or over rows of dh in memory.
//!
//! It takes gate and up from memory, as values of T. ∂L/∂gate and ∂L/∂up go elsewhere; in a layer's backward pass they replace
//! gate and up, which nothing reads afterwards but the products that want the gradients. h is computed again beside them, since
//! the gradient of Wd needs it and the exponential is there.

use std::ops::Range;

use swiglu_core::{Activation, Element, Numerics, Rounding};

use crate::compiled;
use crate::epilogue::{Epilogue, Rows};
use crate::isa::Isa;
use crate::simd::{self, Math, MathKernel, Simd};

/// Operations for an element, about.
pub(crate) const WORK: f64 = 40.0;

/// ∂L/∂gate and ∂L/∂up from gate and up, and h, where it is wanted.
#[derive(Clone, Copy)]
pub(crate) struct Differentiated<T> {
    pub(crate) activation: Activation,
    pub(crate) numerics: Numerics,
    pub(crate) gate: Rows<T>,
    pub(crate) up: Rows<T>,
    /// Where the gradients go: to gate and up, or apart from them.
    pub(crate) into: [Rows<T>; 2],
    pub(crate) h: Option<Rows<T>>,
}

impl<T: Element> Differentiated<T> {
    /// Rows from row `r` on.
    pub(crate) fn from(self, r: usize) -> Self {
        let h = self.h.map(|h| h.from(r));
        let into = self.into.map(|rows| rows.from(r));
        Self { gate: self.gate.from(r), up: self.up.from(r), into, h, ..self }
    }

    /// A vector of row `r` from column `col` on; without dh h alone.
    ///
    /// # Safety
    /// The rows are valid.
    #[inline(always)]
    unsafe fn vector<S: Simd, M: Math<S>>(
        &self,
        math: M,
        (r, col): (usize, usize),
        dh: Option<S::V>,
    ) {
        // SAFETY: the caller's.
        unsafe {
            let (gate, up) = (self.gate.read::<S>(r, col), self.up.read::<S>(r, col));
            if let Some(h) = self.h {
                h.write::<S>(r, col, math.gated(gate, up));
            }
            if let Some(dh) = dh {
                let [dgate, dup] = math.backward(gate, up, dh);
                self.into[0].write::<S>(r, col, dgate);
                self.into[1].write::<S>(r, col, dup);
            }
        }
    }
}

impl<T: Element> Epilogue for Differentiated<T> {
    unsafe fn finish(&self, isa: Isa, panel: usize, first: usize, sums: *const f32, rows: usize) {
        let width = 2 * simd::lanes(isa);
        let cols = panel * width..(panel + 1) * width;
        let kernel =
            DifferentiatedRows { of: self.from(first), dh: Dh::Sums(sums), rows: 0..rows, cols };
        // SAFETY: the caller's.
        unsafe { compiled::differentiated(isa, kernel) }
    }
}

/// Where ∂L/∂h comes from.
#[derive(Clone, Copy)]
pub(crate) enum Dh<T> {
    /// Nowhere: h alone is wanted.
    None,
    /// From memory, read only.
    Rows(Rows<T>),
    /// The sums of a panel, two vectors for each row.
    Sums(*const f32),
}

/// Rows of gate and up, whole or a panel of them.
pub(crate) struct DifferentiatedRows<T> {
    pub(crate) of: Differentiated<T>,
    pub(crate) dh: Dh<T>,
    pub(crate) rows: Range<usize>,
    /// A whole number of vectors, or up to the last column.
    pub(crate) cols: Range<usize>,
}

impl<T: Element> MathKernel for DifferentiatedRows<T> {
    type Element = T;

    fn activation(&self) -> (Activation, Numerics) {
        (self.of.activation, self.of.numerics)
    }

    #[inline(always)]
    unsafe fn run<S: Simd, M: Math<S>>(&self, math: M) {
        let &DifferentiatedRows { of, dh, ref rows, ref cols } = self;
        let rounds = of.numerics.rounding != Rounding::Fused;
        for r in rows.clone() {
            for col in cols.clone().step_by(S::LANES) {
                // SAFETY: whoever runs the kernel vouches for the rows and the sums.
                unsafe {
                    let dh = match dh {
                        Dh::None => None,
                        Dh::Rows(dh) => Some(dh.read::<S>(r, col)),
                        Dh::Sums(sums) => {
                            let sum = S::load_f32(sums.add(r * 2 * S::LANES + col - cols.start));
                            Some(if rounds { T::round_lanes(sum) } else { sum })
                        }
                    };
                    of.vector::<S, M>(math, (r, col), dh);
                }
            }
        }
    }
}
