//! Gated activations by name, and how a call computes one.

use std::hash::{DefaultHasher, Hash, Hasher};

use pyo3::prelude::*;
use swiglu::{Arrangement, CoreError, GateFn, Numerics};

use crate::error::Failure;

/// A gated activation, from its name: `swiglu`, `geglu-tanh`, `clamped-swiglu(alpha=A,offset=O,limit=L)` …
#[pyclass(frozen, eq, from_py_object, module = "swiglu._native")]
#[derive(Clone, Copy, PartialEq)]
pub(crate) struct Activation(pub(crate) swiglu::Activation);

#[pymethods]
impl Activation {
    #[new]
    fn new(name: &Bound<'_, PyAny>) -> Result<Self, Failure> {
        Ok(Self(name.str()?.to_cow()?.parse()?))
    }

    /// What a copy, and a pickled one, is made from.
    fn __getnewargs__(&self) -> (String,) {
        (self.0.to_string(),)
    }

    fn __hash__(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.0.to_string().hash(&mut hasher);
        hasher.finish()
    }

    /// The function of the gate.
    #[getter]
    fn gate(&self) -> &'static str {
        match self.0.gate() {
            GateFn::Silu { .. } => "silu",
            GateFn::Sigmoid => "sigmoid",
            GateFn::Relu => "relu",
            GateFn::Relu2 => "relu2",
            GateFn::GeluErf => "gelu",
            GateFn::GeluTanh => "gelu_tanh",
            GateFn::Identity => "identity",
            _ => "unknown",
        }
    }

    /// β of x · σ(βx); 1 for other functions.
    #[getter]
    fn beta(&self) -> f32 {
        match self.0.gate() {
            GateFn::Silu { beta } => beta,
            _ => 1.0,
        }
    }

    #[getter]
    fn limit(&self) -> Option<f32> {
        self.0.limit()
    }

    /// Whether the limit is of the function's value.
    #[getter]
    fn limit_behind(&self) -> bool {
        self.0.value_limit().is_finite()
    }

    #[getter]
    fn up_offset(&self) -> f32 {
        self.0.up_offset()
    }

    fn __str__(&self) -> String {
        self.0.to_string()
    }

    fn __repr__(&self) -> String {
        format!("swiglu.Activation({:?})", self.0.to_string())
    }
}

/// The numerics of a name; those of the element type where there is none.
pub(crate) fn numerics(name: Option<&str>) -> Result<Option<Numerics>, CoreError> {
    name.map(str::parse).transpose()
}

/// Refuses a name of no numerics.
#[pyfunction]
pub(crate) fn expect_numerics(name: &str) -> Result<(), Failure> {
    numerics(Some(name))?;
    Ok(())
}

pub(crate) fn arrangement(name: Option<&str>) -> Result<Arrangement, CoreError> {
    name.map_or(Ok(Arrangement::Separate), str::parse)
}

/// How a call computes an activation.
#[derive(Clone, Copy)]
pub(crate) struct How {
    pub(crate) act: swiglu::Activation,
    /// Those of the element type where there are none.
    pub(crate) numerics: Option<Numerics>,
    pub(crate) arrangement: Arrangement,
}

impl How {
    pub(crate) fn named(
        act: &Activation,
        numerics: Option<&str>,
        arrangement: Option<&str>,
    ) -> Result<Self, CoreError> {
        let (numerics, arrangement) = (self::numerics(numerics)?, self::arrangement(arrangement)?);
        Ok(Self { act: act.0, numerics, arrangement })
    }
}
