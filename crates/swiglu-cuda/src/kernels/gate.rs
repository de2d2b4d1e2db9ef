//! The activation and its numerics as `device/lib/gate.cuh` takes them.

use swiglu_core::{Activation, DType, ExpMode, GateFn, Numerics, Rounding};

use crate::device::error::{CudaError, Result};
use crate::device::jit::{Define, define};

/// β, the limits and the offset: values of a launch.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Formula {
    beta: f32,
    gate_limit: f32,
    value_limit: f32,
    up_limit: f32,
    offset: f32,
}

impl Formula {
    pub(crate) fn new(act: &Activation) -> Self {
        let beta = match act.gate() {
            GateFn::Silu { beta } => beta,
            _ => 1.0,
        };
        Self {
            beta,
            gate_limit: act.gate_limit(),
            value_limit: act.value_limit(),
            up_limit: act.limit().unwrap_or(f32::INFINITY),
            offset: act.up_offset(),
        }
    }
}

/// The number of an element type in `element.cuh`, if it has one.
fn element(dtype: DType) -> Option<u8> {
    Some(match dtype {
        DType::F32 => 0,
        DType::F16 => 1,
        DType::Bf16 => 2,
        _ => return None,
    })
}

/// The number of a gate's function in `gate.cuh`, if it has one.
fn gate(function: GateFn) -> Option<u8> {
    Some(match function {
        GateFn::Silu { beta: 1.0 } => 0,
        GateFn::Silu { .. } => 1,
        GateFn::Sigmoid => 2,
        GateFn::Relu => 3,
        GateFn::GeluErf => 4,
        GateFn::GeluTanh => 5,
        GateFn::Identity => 6,
        GateFn::Relu2 => 7,
        _ => return None,
    })
}

/// Refuses what kernels have no code for: asked before a layer is made, or a call without one.
pub(crate) fn expect_gate(act: &Activation, dtype: DType) -> Result<()> {
    let why = match (gate(act.gate()), element(dtype)) {
        (Some(_), Some(_)) => return Ok(()),
        (None, _) => "the CUDA kernels do not know this function; compute it on the CPU",
        (_, None) => "the CUDA kernels compute f32, f16 and bf16; convert it to one of them",
    };
    let what = format!("{act} of {dtype}");
    Err(CudaError::Unsupported { what, why: why.into() })
}

/// The option that `element.cuh` reads, of a type that [`expect_gate`] has seen.
pub(crate) fn element_define(dtype: DType) -> Define {
    define("ELEMENT", element(dtype).unwrap_or(u8::MAX))
}

/// What a kernel is compiled for: the same code serves every β, every limit and offset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct GateCode {
    dtype: DType,
    gate: u8,
    fast: bool,
    rounding: u8,
    clamp: bool,
}

impl GateCode {
    /// The code of an activation in a numerics mode; modes that cannot differ share it.
    pub(crate) fn new(act: &Activation, numerics: Numerics, dtype: DType) -> Self {
        // One that has none does not compile.
        let gate = gate(act.gate()).unwrap_or(u8::MAX);
        let transcendental = !matches!(act.gate(), GateFn::Relu | GateFn::Relu2 | GateFn::Identity);
        let rounding = match numerics.rounding {
            Rounding::Fused => 0,
            // Results of f32 are f32 already.
            Rounding::PreRound => u8::from(dtype != DType::F32),
            Rounding::Eager => 2,
        };
        Self {
            dtype,
            gate,
            fast: transcendental && numerics.exp == ExpMode::Fast,
            rounding,
            clamp: act.limit().is_some() || act.up_offset() != 0.0,
        }
    }

    /// The code of the activation operation, whose inputs are values of T already.
    pub(crate) fn elementwise(act: &Activation, numerics: Numerics, dtype: DType) -> Self {
        let code = Self::new(act, numerics, dtype);
        Self { rounding: if code.rounding == 1 { 0 } else { code.rounding }, ..code }
    }

    /// The element type.
    pub(crate) fn dtype(self) -> DType {
        self.dtype
    }

    /// Whether gate and up are rounded to T before the activation.
    pub(crate) fn rounds_between(self) -> bool {
        self.rounding > 0
    }

    /// Whether a derivative takes few registers: that of no precise exponential, and not the exact GELU's where it rounds
    /// between its steps.
    pub(crate) fn is_short(self) -> bool {
        let is = |function| gate(function) == Some(self.gate);
        let exact = [GateFn::Relu, GateFn::Relu2, GateFn::Identity].into_iter().any(is);
        (self.fast || exact) && !(is(GateFn::GeluErf) && self.rounding == 2)
    }

    /// The options that `element.cuh` and `gate.cuh` read.
    pub(crate) fn defines(self) -> [Define; 5] {
        [
            element_define(self.dtype),
            define("GATE", self.gate),
            define("FAST_EXP", self.fast),
            define("ROUNDING", self.rounding),
            define("CLAMP", self.clamp),
        ]
    }

    /// Every code of an element type, each once.
    pub(crate) fn all(dtype: DType) -> Vec<GateCode> {
        let mut codes = Vec::new();
        for act in Activation::family() {
            for numerics in Numerics::all() {
                for clamp in [false, true] {
                    let code = Self { clamp, ..Self::new(&act, numerics, dtype) };
                    if !codes.contains(&code) {
                        codes.push(code);
                    }
                }
            }
        }
        codes
    }

    /// `bf16 silu fused+fast`.
    pub(crate) fn name(self) -> String {
        const GATES: [&str; 8] =
            ["silu", "silu-beta", "sigmoid", "relu", "gelu", "gelu-tanh", "identity", "relu2"];
        const ROUNDINGS: [&str; 3] = ["fused", "pre_round", "eager"];
        format!(
            "{} {} {}+{}{}",
            self.dtype,
            GATES.get(usize::from(self.gate)).unwrap_or(&"unknown"),
            ROUNDINGS[usize::from(self.rounding)],
            if self.fast { "fast" } else { "precise" },
            if self.clamp { " clamped" } else { "" }
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_as_few_as_can_be() {
        // 5 transcendental gates in 2 exp modes and 3 others; 3 roundings; clamped or not.
        assert_eq!(GateCode::all(DType::Bf16).len(), 13 * 3 * 2);
        assert_eq!(GateCode::all(DType::F32).len(), 13 * 2 * 2);
    }

    #[test]
    fn every_function_has_a_number_of_its_own_and_what_has_none_is_refused() {
        let mut numbers: Vec<_> =
            Activation::family().into_iter().map(|act| gate(act.gate())).collect();
        assert!(numbers.iter().all(Option::is_some), "{numbers:?}");
        numbers.sort();
        numbers.dedup();
        // SiLU has two: one knows that β is 1.
        assert_eq!(numbers, (0..8).map(Some).collect::<Vec<_>>());
        let names: Vec<_> = GateCode::all(DType::Bf16).into_iter().map(GateCode::name).collect();
        assert!(names.iter().all(|name| !name.contains("unknown")), "{names:?}");
        for dtype in DType::ALL {
            assert!(expect_gate(&Activation::SWIGLU, dtype).is_ok());
        }
    }

    #[test]
    fn modes_that_cannot_differ_share_their_code() {
        let code = |act, n: &str| GateCode::elementwise(&act, n.parse().unwrap(), DType::F16);
        assert_eq!(code(Activation::SWIGLU, "fused"), code(Activation::SWIGLU, "pre_round"));
        assert_ne!(code(Activation::SWIGLU, "fused"), code(Activation::SWIGLU, "eager"));
        assert_eq!(code(Activation::REGLU, "fused+fast"), code(Activation::REGLU, "fused"));
        assert_eq!(code(Activation::REGLU2, "fused+fast"), code(Activation::REGLU2, "fused"));
        assert_ne!(code(Activation::REGLU2, "fused"), code(Activation::REGLU2, "eager"));
    }
}
