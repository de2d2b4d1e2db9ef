//! From an element type as a value to one as a Rust type.

/// Evaluates an expression with `$T` bound to the Rust type of a [`DType`](crate::DType).
///
/// The expression is a `Result` whose error is made from [`swiglu::Error`](crate::Error), for
/// element types that are known by name but have no Rust type here.
///
/// ```
/// use swiglu::{DType, Element, with_dtype};
///
/// fn largest<T: Element>() -> swiglu::Result<f64> {
///     Ok(T::DTYPE.max_finite())
/// }
/// fn largest_of(dtype: DType) -> swiglu::Result<f64> {
///     with_dtype!(dtype, T => largest::<T>())
/// }
/// assert_eq!(largest_of(DType::F16)?, 65504.0);
/// # Ok::<(), swiglu::Error>(())
/// ```
#[macro_export]
macro_rules! with_dtype {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            $crate::DType::F32 => {
                type $T = f32;
                $body
            }
            $crate::DType::F16 => {
                type $T = $crate::f16;
                $body
            }
            $crate::DType::Bf16 => {
                type $T = $crate::bf16;
                $body
            }
            other => Err($crate::unsupported_dtype(other).into()),
        }
    };
}

/// What [`with_dtype!`] reports.
#[doc(hidden)]
pub fn unsupported_dtype(dtype: crate::DType) -> crate::Error {
    swiglu_core::Error::Unsupported {
        what: format!("element type {dtype}"),
        why: "it has no kernels in this build; choose one of f32, f16, bf16".into(),
    }
    .into()
}
