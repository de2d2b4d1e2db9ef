//! The kernels of every element type, compiled once, in this crate.
//!
//! Layers are generic over the element type, so what they call directly is compiled again in every
//! crate that names them. The kernels are many and large; this module gives each a function without
//! type parameters and leads the generic callers to it.

use swiglu_core::{DType, Element, bf16, f16};

use crate::columns::ColumnSums;
use crate::differentiated::DifferentiatedRows;
use crate::elementwise::Segments;
use crate::epilogue::{AddedPanel, GatedPanel, PlainPanel};
use crate::gemm::{SideBySide, Sums};
use crate::isa::Isa;
use crate::quant::{DecodedSums, Dots, FusedSums, PackUnits, PairSums};
use crate::rows::PackBlocks;
use crate::simd::{Kernel, MathKernel, dispatch, dispatch_math};

/// `value` as the type it has.
///
/// # Safety
/// A and B are the same type.
unsafe fn same<A, B>(value: A) -> B {
    assert_eq!(size_of::<A>(), size_of::<B>(), "one type under two names");
    let value = std::mem::ManuallyDrop::new(value);
    // SAFETY: the types are the same; the original is not dropped.
    unsafe { std::mem::transmute_copy(&value) }
}

/// # Safety
/// As [`dispatch`].
#[inline(never)]
unsafe fn run<K: Kernel<Output = ()>>(isa: Isa, kernel: K) {
    // SAFETY: the caller's.
    unsafe { dispatch(isa, kernel) }
}

/// # Safety
/// As [`dispatch_math`].
#[inline(never)]
unsafe fn run_math<K: MathKernel>(isa: Isa, kernel: K) {
    // SAFETY: the caller's.
    unsafe { dispatch_math(isa, &kernel) }
}

/// A function from a kernel of any element type to the compiled one, run as `run` says.
macro_rules! compiled {
    ($($(#[$doc:meta])* $run:ident $name:ident($kernel:ident $(<$lifetime:lifetime>)?);)*) => {
        $($(#[$doc])*
        ///
        /// # Safety
        /// As [`dispatch`].
        pub(crate) unsafe fn $name<T: Element>(isa: Isa, kernel: $kernel<$($lifetime,)? T>) {
            fn of_f32(isa: Isa, kernel: $kernel<$($lifetime,)? f32>) {
                // SAFETY: called below only, as the caller promised.
                unsafe { $run(isa, kernel) }
            }
            fn of_f16(isa: Isa, kernel: $kernel<$($lifetime,)? f16>) {
                // SAFETY: as above.
                unsafe { $run(isa, kernel) }
            }
            fn of_bf16(isa: Isa, kernel: $kernel<$($lifetime,)? bf16>) {
                // SAFETY: as above.
                unsafe { $run(isa, kernel) }
            }
            // SAFETY: T is the type its DTYPE names; `Element` is sealed.
            unsafe {
                match T::DTYPE {
                    DType::F16 => of_f16(isa, same(kernel)),
                    DType::Bf16 => of_bf16(isa, same(kernel)),
                    _ => of_f32(isa, same(kernel)),
                }
            }
        })*
    };
}

compiled! {
    /// Sums of a panel.
    run sums(Sums);
    /// Sums of several panels.
    run side_by_side(SideBySide);
    /// Rows packed for the matrix kernel.
    run pack_rows(PackBlocks<'_>);
    /// Rows packed for quantised weights.
    run pack_digits(PackUnits<'_>);
    /// The activation operation.
    run_math activation(Segments<'_>);
    /// The epilogue of a linear map.
    run plain(PlainPanel);
    /// The epilogue of a linear map whose result is added.
    run added(AddedPanel);
    /// The derivative, of rows in memory or behind the product with the down projection.
    run_math differentiated(DifferentiatedRows);
    /// Sums over the rows of a matrix.
    run column_sums(ColumnSums);
}

/// The epilogue of the gated layer.
///
/// # Safety
/// As [`dispatch`]; O is T, or `f32` for T = `f16`.
pub(crate) unsafe fn gated<T: Element, O: Element>(isa: Isa, kernel: GatedPanel<T, O>) {
    fn of_f32(isa: Isa, kernel: GatedPanel<f32, f32>) {
        // SAFETY: called below only, as the caller promised.
        unsafe { run_math(isa, kernel) }
    }
    fn of_f16(isa: Isa, kernel: GatedPanel<f16, f16>) {
        // SAFETY: as above.
        unsafe { run_math(isa, kernel) }
    }
    fn of_f16_in_f32(isa: Isa, kernel: GatedPanel<f16, f32>) {
        // SAFETY: as above.
        unsafe { run_math(isa, kernel) }
    }
    fn of_bf16(isa: Isa, kernel: GatedPanel<bf16, bf16>) {
        // SAFETY: as above.
        unsafe { run_math(isa, kernel) }
    }
    // SAFETY: T and O are the types their DTYPE names; `Element` is sealed.
    unsafe {
        match (T::DTYPE, O::DTYPE) {
            (DType::F32, DType::F32) => of_f32(isa, same(kernel)),
            (DType::F16, DType::F16) => of_f16(isa, same(kernel)),
            (DType::F16, DType::F32) => of_f16_in_f32(isa, same(kernel)),
            (DType::Bf16, DType::Bf16) => of_bf16(isa, same(kernel)),
            (t, o) => unreachable!("no kernel rounds to {t} and stores {o}"),
        }
    }
}

/// Sums of a panel of quantised weights over a few rows.
///
/// # Safety
/// As [`dispatch`].
pub(crate) unsafe fn dots(isa: Isa, kernel: Dots) {
    // SAFETY: the caller's.
    unsafe { kernel.run(isa) }
}

/// Sums of panels of quantised weights over a few rows, in the order of many.
///
/// # Safety
/// As [`dispatch`].
pub(crate) unsafe fn fused_sums(isa: Isa, kernel: FusedSums) {
    // SAFETY: the caller's.
    unsafe { kernel.run(isa) }
}

/// Sums of a panel of quantised weights over many rows of bfloat16.
///
/// # Safety
/// As [`dispatch`].
pub(crate) unsafe fn pair_sums(isa: Isa, kernel: PairSums) {
    // SAFETY: the caller's.
    unsafe { kernel.run(isa) }
}

/// Sums of a panel of quantised weights over many rows.
///
/// # Safety
/// As [`dispatch`].
pub(crate) unsafe fn decoded_sums(isa: Isa, kernel: DecodedSums) {
    // SAFETY: the caller's.
    unsafe { run(isa, kernel) }
}
