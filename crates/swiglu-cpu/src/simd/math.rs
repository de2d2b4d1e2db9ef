//! Kernels with the mathematics of an activation in them.

use swiglu_core::gate::{GatedMath, WithGatedMath};
use swiglu_core::{Activation, DType, Element, Numerics};

use super::{Kernel, Simd, dispatch};
use crate::isa::Isa;

/// Code written over [`Simd`] and the mathematics of an activation.
pub(crate) trait MathKernel {
    /// What results are rounded to.
    type Element: Element;
    /// As [`Kernel::USES_DOTS`].
    const USES_DOTS: bool = matches!(Self::Element::DTYPE, DType::Bf16);
    /// The activation, and how it is computed.
    fn activation(&self) -> (Activation, Numerics);
    /// Runs. Implementations are `#[inline(always)]`.
    ///
    /// # Safety
    /// As [`Kernel::run`].
    unsafe fn run<S: Simd, M: Math<S>>(&self, math: M);
}

/// The mathematics of an activation over vectors of S, before results are rounded to the element type.
pub(crate) trait Math<S: Simd>: Copy {
    /// h of gate and up.
    fn gated(self, gate: S::V, up: S::V) -> S::V;
    /// ∂L/∂gate and ∂L/∂up from ∂L/∂h.
    fn backward(self, gate: S::V, up: S::V, dh: S::V) -> [S::V; 2];
}

/// A part of each kernel that it is in.
#[derive(Clone, Copy)]
pub(super) struct Inlined<M>(pub(super) M);

impl<S: Simd, M: GatedMath> Math<S> for Inlined<M> {
    #[inline(always)]
    fn gated(self, gate: S::V, up: S::V) -> S::V {
        self.0.apply(gate, up)
    }
    #[inline(always)]
    fn backward(self, gate: S::V, up: S::V, dh: S::V) -> [S::V; 2] {
        self.0.backward(gate, up, dh)
    }
}

/// Runs `kernel` as [`dispatch`] does, with the mathematics of its activation. Each kernel and mathematics is a function
/// of its own: the compiler's time grows faster than the length of one that has them all.
///
/// # Safety
/// As [`dispatch`].
pub(crate) unsafe fn dispatch_math<K: MathKernel>(isa: Isa, kernel: &K) {
    struct Chosen<'a, K>(Isa, &'a K);

    impl<K: MathKernel> WithGatedMath for Chosen<'_, K> {
        type Output = ();
        #[inline(always)]
        fn run<M: GatedMath>(self, math: M) {
            // SAFETY: that of `dispatch_math`.
            unsafe { dispatch(self.0, OfMath(self.1, math)) }
        }
    }

    struct OfMath<'a, K, M>(&'a K, M);

    impl<K: MathKernel, M: GatedMath> Kernel for OfMath<'_, K, M> {
        type Output = ();
        const USES_DOTS: bool = K::USES_DOTS;
        #[inline(always)]
        unsafe fn run<S: Simd>(self) {
            // SAFETY: the caller's.
            unsafe { S::run_math(self.0, self.1) }
        }
    }

    let (activation, numerics) = kernel.activation();
    activation.with_math::<K::Element, _>(numerics, Chosen(isa, kernel));
}
