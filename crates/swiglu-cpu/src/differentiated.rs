//! The derivative of the gated activation: behind the sums of dh = dy·Wdᵀ, or over rows of dh in memory.
//!
//! It takes gate and up from memory, as values of T. ∂L/∂gate and ∂L/∂up go elsewhere; in a layer's backward pass they replace
//! gate and up, which nothing reads afterwards but the products that want the gradients. h is computed again beside them, since
//! the gradient of Wd needs it and the exponential is there. Where each row of the result was multiplied with a factor, dh and
//! h are, and the gradient of a row's factor is its sum of h·dh before that.

use std::ops::Range;

use swiglu_core::{Activation, Element, F32Lanes, Numerics, Rounding};

use crate::compiled;
use crate::epilogue::{Epilogue, Factors, Rows};
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
    /// The factors of the rows, where they have some.
    pub(crate) scale: Option<Factors>,
    /// Where the sums of h·dh go: a column for each panel, or one for whole rows.
    pub(crate) dots: Option<Rows<f32>>,
}

impl<T: Element> Differentiated<T> {
    /// Rows from row `r` on.
    pub(crate) fn from(self, r: usize) -> Self {
        let h = self.h.map(|h| h.from(r));
        let into = self.into.map(|rows| rows.from(r));
        let (scale, dots) = (self.scale.map(|s| s.from(r)), self.dots.map(|dots| dots.from(r)));
        Self { gate: self.gate.from(r), up: self.up.from(r), into, h, scale, dots, ..self }
    }

    /// A vector of row `r` from column `col` on; without dh h alone. Returns h·dh, zeros behind the last column.
    ///
    /// # Safety
    /// The rows are valid.
    #[inline(always)]
    unsafe fn vector<S: Simd, M: Math<S>>(
        &self,
        math: M,
        (r, col): (usize, usize),
        dh: Option<S::V>,
    ) -> S::V {
        let mut products = S::V::splat(0.0);
        // SAFETY: the caller's.
        unsafe {
            let factor = self.scale.map(|scale| S::V::splat(scale.of_row(r)));
            let scaled = |v: S::V| factor.map_or(v, |factor| v.mul(factor));
            let (gate, up) = (self.gate.read::<S>(r, col), self.up.read::<S>(r, col));
            if self.h.is_some() || self.dots.is_some() {
                let value = math.gated(gate, up);
                if let Some(h) = self.h {
                    h.write::<S>(r, col, scaled(value));
                }
                if let (Some(dh), Some(_)) = (dh, self.dots) {
                    products = first_lanes::<S>(value.mul(dh), self.gate.cols.saturating_sub(col));
                }
            }
            if let Some(dh) = dh {
                let [dgate, dup] = math.backward(gate, up, scaled(dh));
                self.into[0].write::<S>(r, col, dgate);
                self.into[1].write::<S>(r, col, dup);
            }
        }
        products
    }
}

/// The first lanes of a vector, and zeros.
///
/// # Safety
/// The façade's instructions are available.
#[inline(always)]
unsafe fn first_lanes<S: Simd>(v: S::V, count: usize) -> S::V {
    if count >= S::LANES {
        return v;
    }
    let mut lanes = [0.0f32; 64];
    // SAFETY: as the caller promises; no façade has more lanes.
    unsafe {
        S::store::<f32>(lanes.as_mut_ptr(), v);
        lanes[count..].fill(0.0);
        S::load_f32(lanes.as_ptr())
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
        let panel = cols.start / (2 * S::LANES);
        for r in rows.clone() {
            let mut dot = S::V::splat(0.0);
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
                    dot = dot.add(of.vector::<S, M>(math, (r, col), dh));
                }
            }
            if let Some(dots) = of.dots {
                let mut lanes = [0.0f32; 64];
                // SAFETY: as above; the row has a place for each panel, and no façade has more lanes.
                unsafe {
                    S::store::<f32>(lanes.as_mut_ptr(), dot);
                    *dots.first.add(r * dots.stride + panel) = lanes[..S::LANES].iter().sum();
                }
            }
        }
    }
}
