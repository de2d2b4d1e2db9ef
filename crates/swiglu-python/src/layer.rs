//! Layers: from a file, packed from arrays, or over weights that stay in a device's memory.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyString;
use swiglu::{CoreError, DType, GatedLinear, Mlp, f16, with_dtype};

use crate::activation::{Activation, arrangement, numerics};
use crate::array::Array;
use crate::device;
use crate::elementwise::Place;
use crate::error::Failure;
use crate::reading::{Reading, expect_finite};
use crate::tensor::Tensor;
use crate::weights::Weights;

/// A gated linear layer or a feed-forward block on a device.
#[pyclass(frozen, module = "swiglu._native")]
pub(crate) struct Layer(pub(crate) Kind, PyOnceLock<Py<PyString>>);

impl From<Kind> for Layer {
    fn from(kind: Kind) -> Self {
        Self(kind, PyOnceLock::new())
    }
}

pub(crate) enum Kind {
    GatedLinear(GatedLinear),
    Mlp(Mlp),
}

/// An expression of a layer, whichever it is.
macro_rules! either {
    ($layer:expr, $it:ident => $body:expr) => {
        match &$layer.0 {
            $crate::layer::Kind::GatedLinear($it) => $body,
            $crate::layer::Kind::Mlp($it) => $body,
        }
    };
}
pub(crate) use either;

#[pymethods]
impl Layer {
    /// A layer of a safetensors or GGUF file, or of a directory with a model in it.
    #[staticmethod]
    #[pyo3(signature = (path, reading, *, kind="mlp", device="best", dtype=None, activation=None, numerics=None, decoded=false, allow_non_finite=false))]
    #[expect(clippy::too_many_arguments, reason = "Python's")]
    fn load(
        py: Python<'_>,
        path: std::path::PathBuf,
        reading: Reading,
        kind: &str,
        device: &str,
        dtype: Option<&str>,
        activation: Option<Activation>,
        numerics: Option<&str>,
        decoded: bool,
        allow_non_finite: bool,
    ) -> Result<Self, Failure> {
        let options = reading.options()?;
        let dtype: Option<DType> = dtype.map(str::parse).transpose()?;
        let numerics = self::numerics(numerics)?;
        py.detach(|| {
            let device = device::named(device)?;
            macro_rules! load {
                ($kind:ident, $expect_finite:ident) => {{
                    let mut weights = $kind::load_with(&path, &options)?;
                    if !allow_non_finite {
                        weights.stored().$expect_finite().map_err(swiglu::Error::from)?;
                    }
                    if let Some(dtype) = dtype {
                        weights = weights.dtype(dtype);
                    }
                    if let Some(activation) = activation {
                        weights = weights.activation(activation.0);
                    }
                    if let Some(numerics) = numerics {
                        weights = weights.numerics(numerics);
                    }
                    if decoded {
                        weights = weights.decoded();
                    }
                    // A number of another type may be none of a half's.
                    let rounded = weights.resolved_dtype() == DType::F16
                        && weights.stored().stored_dtype().dtype() != Some(DType::F16)
                        && weights.quantized_on(&device).is_err();
                    if rounded && !allow_non_finite {
                        expect_finite(&weights.host::<f16>()?, kind == "mlp")?;
                    }
                    Ok(Kind::$kind(weights.to(&device)?).into())
                }};
            }
            match kind {
                "mlp" => load!(Mlp, expect_finite),
                "gated_linear" => load!(GatedLinear, expect_finite_gated),
                _ => Err(CoreError::UnknownName {
                    what: "kind of layer",
                    given: kind.to_owned(),
                    choices: "mlp, gated_linear".into(),
                }
                .into()),
            }
        })
    }

    /// Copies tensors of PyTorch's into a layer of the host, in the form its kernels read. Weights are `[out, in]`.
    #[staticmethod]
    #[pyo3(signature = (weights, activation, numerics=None, arrangement=None))]
    fn pack(
        py: Python<'_>,
        weights: Weights,
        activation: Activation,
        numerics: Option<&str>,
        arrangement: Option<&str>,
    ) -> Result<Self, Failure> {
        let (numerics, how) = (self::numerics(numerics)?, self::arrangement(arrangement)?);
        let device = device::cpu_of_pytorch()?;
        let dtype = weights.0.dtype;
        let kind = py.detach(
            || with_dtype!(dtype, T => weights.pack::<T>(&device, activation, numerics, how)),
        )?;
        Ok(kind.into())
    }

    /// A layer over weights in a CUDA device's memory, which stay there. Weights are `[out, in]`, packed ones gate first.
    ///
    /// The memory must be what it is said to be whenever the layer is called.
    #[staticmethod]
    #[pyo3(signature = (ordinal, weights, activation, numerics=None))]
    fn borrow(
        ordinal: usize,
        weights: Weights,
        activation: Activation,
        numerics: Option<&str>,
    ) -> Result<Self, Failure> {
        let numerics = self::numerics(numerics)?;
        let dtype = weights.0.dtype;
        let kind = with_dtype!(dtype, T => weights.borrow::<T>(ordinal, activation, numerics));
        kind.map(Self::from)
    }

    #[getter]
    fn kind(&self) -> &'static str {
        match self.0 {
            Kind::GatedLinear(_) => "gated_linear",
            Kind::Mlp(_) => "mlp",
        }
    }

    #[getter]
    pub(crate) fn hidden(&self) -> usize {
        either!(self, layer => layer.hidden())
    }

    #[getter]
    fn intermediate(&self) -> usize {
        either!(self, layer => layer.intermediate())
    }

    #[getter]
    pub(crate) fn out_features(&self) -> usize {
        either!(self, layer => layer.out_features())
    }

    #[getter]
    fn dtype(&self) -> &'static str {
        either!(self, layer => layer.dtype().name())
    }

    #[getter]
    fn activation(&self) -> Activation {
        Activation(either!(self, layer => layer.activation()))
    }

    #[getter]
    fn numerics(&self) -> String {
        either!(self, layer => layer.numerics().to_string())
    }

    #[getter]
    fn device(&self) -> String {
        either!(self, layer => layer.device().to_string())
    }

    /// The device's name, `cpu` or `cuda:N`: one string for all calls.
    #[getter]
    fn place(&self, py: Python<'_>) -> Py<PyString> {
        let name = self.1.get_or_init(py, || {
            let text = self.device();
            PyString::new(py, text.split(' ').next().unwrap_or_default()).unbind()
        });
        name.clone_ref(py)
    }

    #[getter]
    fn weight_bytes(&self) -> usize {
        either!(self, layer => layer.weight_bytes())
    }

    pub(crate) fn workspace_bytes(&self, tokens: usize) -> usize {
        either!(self, layer => layer.workspace_bytes(tokens))
    }

    /// How so many tokens will be computed.
    fn plan(&self, tokens: usize) -> String {
        either!(self, layer => layer.plan(tokens).to_string())
    }

    /// The plan with what it was chosen from, as text and as JSON.
    fn explain(&self, tokens: usize) -> Result<(String, String), Failure> {
        let explanation = either!(self, layer => layer.explain(tokens));
        Ok((explanation.to_string(), json(&explanation)?))
    }

    /// The result for x `[..., K]` in the host's memory: in `out`, or in a new array.
    #[pyo3(signature = (x, out=None))]
    fn forward(
        &self,
        py: Python<'_>,
        x: Tensor,
        out: Option<Tensor>,
    ) -> Result<Option<Array>, Failure> {
        let mut shape = x.shape.clone();
        let (hidden, features) = (self.hidden(), self.out_features());
        match shape.last_mut() {
            Some(last) if *last == hidden => *last = features,
            _ => {
                let (expected, given) = (format!("[..., {hidden}]"), x.shape_text());
                return Err(CoreError::Shape { what: "x".into(), expected, given }.into());
            }
        }
        let dtype = either!(self, layer => layer.dtype());
        let (made, out) = match out {
            Some(out) => (None, out),
            None => {
                let made = with_dtype!(dtype, T => Array::zeros::<T>(shape.to_vec()))?;
                let out = made.tensor();
                (Some(made), out)
            }
        };
        if out.shape != shape {
            let (expected, given) = (format!("{shape:?}"), out.shape_text());
            return Err(CoreError::Shape { what: "out".into(), expected, given }.into());
        }
        py.detach(|| with_dtype!(dtype, T => self.compute::<T>(&x, &out)))?;
        Ok(made)
    }

    /// Enqueues the layer on a stream, for arrays in the device's memory and with scratch memory of the caller.
    fn forward_on(
        &self,
        place: Place,
        x: Tensor,
        out: Tensor,
        scratch: (u64, usize),
    ) -> Result<(), Failure> {
        let dtype = either!(self, layer => layer.dtype());
        with_dtype!(dtype, T => self.enqueue::<T>(place, &x, &out, scratch))
    }

    fn __repr__(&self) -> String {
        format!(
            "swiglu.Layer({}, {} -> {} -> {}, {}, {}, {})",
            self.kind(),
            self.hidden(),
            self.intermediate(),
            self.out_features(),
            self.dtype(),
            self.activation().0,
            self.device()
        )
    }
}

pub(crate) fn json(value: &impl serde::Serialize) -> Result<String, Failure> {
    serde_json::to_string(value)
        .map_err(|error| pyo3::exceptions::PyRuntimeError::new_err(error.to_string()).into())
}
