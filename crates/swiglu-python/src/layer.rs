//! Layers: from a file, packed from arrays, or over weights that stay in a device's memory.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyString;
use swiglu::cuda::{
    BorrowedStream, Cuda, DeviceGatedLinearParams, DeviceMatrixRef, DeviceMlpParams, DeviceScratch,
};
use swiglu::{
    Arrangement, CoreError, DType, Device, Element, GateUpWeights, GatedLinear, GatedLinearParams,
    HostWeights, LoadOptions, Matrix, Mlp, MlpParams, Numerics, Orientation, SavePolicy,
    TensorNames, WeightLayout, f16, with_dtype,
};

use crate::activation::{
    Activation, Alike, Place, arrangement, done, matrix, matrix_mut, numerics,
};
use crate::array::Array;
use crate::device;
use crate::error::Failure;
use crate::tensor::{Rows, Tensor};

/// A gated linear layer or a feed-forward block on a device.
#[pyclass(frozen, module = "swiglu._native")]
pub(crate) struct Layer(Kind, PyOnceLock<Py<PyString>>);

impl From<Kind> for Layer {
    fn from(kind: Kind) -> Self {
        Self(kind, PyOnceLock::new())
    }
}

enum Kind {
    GatedLinear(GatedLinear),
    Mlp(Mlp),
}

macro_rules! either {
    ($layer:expr, $it:ident => $body:expr) => {
        match &$layer.0 {
            Kind::GatedLinear($it) => $body,
            Kind::Mlp($it) => $body,
        }
    };
}

/// Weights of gate, up and down, then their biases, as arrays: a layer without down is a gated linear layer, one without up
/// has both in the first.
#[derive(FromPyObject)]
pub(crate) struct Weights(
    Tensor,
    Option<Tensor>,
    Option<Tensor>,
    Option<Tensor>,
    Option<Tensor>,
    Option<Tensor>,
);

/// Which layer of a file, and how to read it: Python's dictionary with these keys.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Reading {
    layer: usize,
    expert: Option<usize>,
    beside_experts: bool,
    names: HashMap<String, String>,
    orientation: Option<String>,
    arrangement: Option<String>,
    prefix: Option<String>,
    ignore: Vec<String>,
    config: bool,
    rescale: i32,
    plain_fp8: bool,
}

impl Reading {
    fn options(mut self) -> Result<LoadOptions, CoreError> {
        let mut name = |of| self.names.remove(of);
        let mut names = TensorNames::default();
        names.gate = name("gate");
        names.up = name("up");
        names.down = name("down");
        names.gate_up = name("gate_up");
        names.gate_bias = name("gate_bias");
        names.up_bias = name("up_bias");
        names.gate_up_bias = name("gate_up_bias");
        names.down_bias = name("down_bias");
        let mut options = LoadOptions::new(self.layer)
            .with_expert(self.expert)
            .with_names(names)
            .with_orientation(self.orientation.map(|name| name.parse()).transpose()?)
            .with_arrangement(self.arrangement.map(|name| name.parse()).transpose()?)
            .with_rescale(self.rescale);
        options.beside_experts = self.beside_experts;
        options.prefix = self.prefix;
        options.ignore = self.ignore;
        options.no_config = !self.config;
        options.plain_fp8 = self.plain_fp8;
        Ok(options)
    }
}

/// Refuses weights that are not finite once they are rounded to the layer's element type.
fn expect_finite<T: Element>(weights: &HostWeights<'_, T>, block: bool) -> swiglu::Result<()> {
    let rounded = |error| match error {
        CoreError::NonFinite { what, row, col, value } => {
            CoreError::NonFinite { what: format!("{what} as {}", T::DTYPE), row, col, value }
        }
        error => error,
    };
    let gated = match block {
        true => {
            let params = weights.mlp()?;
            params.down.expect_finite("down weight").map_err(rounded)?;
            params.gated
        }
        false => weights.gated_linear()?,
    };
    Ok(gated.weights.expect_finite().map_err(rounded)?)
}

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

    /// Copies arrays into a layer of the host, in the form its kernels read. Weights are `[out, in]`.
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
        let device = device::named("cpu")?;
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
    fn hidden(&self) -> usize {
        either!(self, layer => layer.hidden())
    }

    #[getter]
    fn intermediate(&self) -> usize {
        either!(self, layer => layer.intermediate())
    }

    #[getter]
    fn out_features(&self) -> usize {
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

    fn workspace_bytes(&self, tokens: usize) -> usize {
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
                let made = with_dtype!(dtype, T => Array::zeros::<T>(shape.clone()))?;
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

    /// Bytes of scratch memory of `forward_saving_on`, or, where nothing is kept, of `forward_on` and `pre_activations_on`.
    fn training_bytes(&self, tokens: usize, keeps: bool) -> Result<usize, Failure> {
        let dtype = either!(self, layer => layer.dtype());
        let policy = if keeps { SavePolicy::Save } else { SavePolicy::Recompute };
        Ok(
            with_dtype!(dtype, T => either!(self, layer => layer.training_bytes::<T>(tokens, policy)))?,
        )
    }

    /// Bytes of scratch memory of `backward_gate_up_on`, for dense tensors.
    fn backward_bytes(&self, tokens: usize) -> Result<usize, Failure> {
        let dtype = either!(self, layer => layer.dtype());
        Ok(with_dtype!(dtype, T => either!(self, layer => layer.backward_bytes::<T>(tokens)))?)
    }

    /// As `forward_on`, and writes gate and up, which `backward_gate_up_on` takes.
    fn forward_saving_on(
        &self,
        place: Place,
        x: Tensor,
        out: Tensor,
        gate: Tensor,
        up: Tensor,
        scratch: (u64, usize),
    ) -> Result<(), Failure> {
        let dtype = either!(self, layer => layer.dtype());
        with_dtype!(dtype, T => self.save::<T>(place, [&x, &out, &gate, &up], scratch))
    }

    /// Gate and up of `forward_saving_on`, to the same bits.
    fn pre_activations_on(
        &self,
        place: Place,
        x: Tensor,
        gate: Tensor,
        up: Tensor,
        scratch: (u64, usize),
    ) -> Result<(), Failure> {
        let dtype = either!(self, layer => layer.dtype());
        with_dtype!(dtype, T => self.keep::<T>(place, [&x, &gate, &up], scratch))
    }

    /// The gradients of gate and up, and h, from that of a block's result.
    #[expect(clippy::too_many_arguments, reason = "Python's")]
    fn backward_gate_up_on(
        &self,
        place: Place,
        grad: Tensor,
        gate: Tensor,
        up: Tensor,
        gate_grad: Tensor,
        up_grad: Tensor,
        h: Tensor,
        scratch: (u64, usize),
    ) -> Result<(), Failure> {
        let dtype = either!(self, layer => layer.dtype());
        let tensors = [&grad, &gate, &up, &gate_grad, &up_grad, &h];
        with_dtype!(dtype, T => self.differentiate::<T>(place, tensors, scratch))
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

impl Layer {
    fn compute<T: Element>(&self, x: &Tensor, out: &Tensor) -> swiglu::Result<()> {
        // SAFETY: the caller of the Python function keeps the arrays as they are until it returns.
        unsafe {
            let rows = x.rows::<T>("x")?;
            out.fill::<T>(
                "out",
                &[x],
                |out| either!(self, layer => layer.forward_into(rows.view(), out)),
            )
        }
    }

    fn enqueue<T: Element>(
        &self,
        (ordinal, raw): Place,
        x: &Tensor,
        out: &Tensor,
        (scratch, bytes): (u64, usize),
    ) -> Result<(), Failure> {
        let cuda = device::cuda(ordinal)?;
        // SAFETY: the stream's handle is what its library says.
        let stream = unsafe { cuda.borrow_stream(raw) }?;
        self.enqueue_on::<T>(&stream, x, out, (scratch, bytes))
    }

    fn save<T: Element>(
        &self,
        (ordinal, raw): Place,
        [x, out, gate, up]: [&Tensor; 4],
        (scratch, bytes): (u64, usize),
    ) -> Result<(), Failure> {
        let cuda = device::cuda(ordinal)?;
        // SAFETY: as in `enqueue` and `enqueue_on`.
        unsafe {
            let stream = cuda.borrow_stream(raw)?;
            let _captured = stream.without_loading()?;
            let x = matrix::<T>(&cuda, "x", x)?;
            let out = matrix_mut::<T>(&cuda, "out", out)?;
            let kept = [matrix_mut::<T>(&cuda, "gate", gate)?, matrix_mut::<T>(&cuda, "up", up)?];
            let mut scratch = scratch_of(&cuda, (scratch, bytes))?;
            let scratch = scratch.as_mut();
            either!(self, layer => layer.forward_saving_on::<T>(&stream, x, out, kept, scratch))?;
        }
        Ok(())
    }

    fn keep<T: Element>(
        &self,
        (ordinal, raw): Place,
        [x, gate, up]: [&Tensor; 3],
        (scratch, bytes): (u64, usize),
    ) -> Result<(), Failure> {
        let cuda = device::cuda(ordinal)?;
        // SAFETY: as in `enqueue` and `enqueue_on`.
        unsafe {
            let stream = cuda.borrow_stream(raw)?;
            let _captured = stream.without_loading()?;
            let x = matrix::<T>(&cuda, "x", x)?;
            let kept = [matrix_mut::<T>(&cuda, "gate", gate)?, matrix_mut::<T>(&cuda, "up", up)?];
            let mut scratch = scratch_of(&cuda, (scratch, bytes))?;
            let scratch = scratch.as_mut();
            either!(self, layer => layer.pre_activations_on::<T>(&stream, x, kept, scratch))?;
        }
        Ok(())
    }

    fn differentiate<T: Element>(
        &self,
        (ordinal, raw): Place,
        [grad, gate, up, gate_grad, up_grad, h]: [&Tensor; 6],
        (scratch, bytes): (u64, usize),
    ) -> Result<(), Failure> {
        let cuda = device::cuda(ordinal)?;
        // SAFETY: as in `enqueue` and `enqueue_on`.
        unsafe {
            let stream = cuda.borrow_stream(raw)?;
            let _captured = stream.without_loading()?;
            let grad = matrix::<T>(&cuda, "grad", grad)?;
            let kept = [matrix::<T>(&cuda, "gate", gate)?, matrix::<T>(&cuda, "up", up)?];
            let grads = [
                matrix_mut::<T>(&cuda, "gate_grad", gate_grad)?,
                matrix_mut::<T>(&cuda, "up_grad", up_grad)?,
            ];
            let h = matrix_mut::<T>(&cuda, "h", h)?;
            let mut scratch = scratch_of(&cuda, (scratch, bytes))?;
            let scratch = scratch.as_mut();
            either!(self, layer => {
                layer.backward_gate_up_on::<T>(&stream, grad, kept, grads, h, scratch)
            })?;
        }
        Ok(())
    }

    fn enqueue_on<T: Element>(
        &self,
        stream: &BorrowedStream,
        x: &Tensor,
        out: &Tensor,
        (scratch, bytes): (u64, usize),
    ) -> Result<(), Failure> {
        let cuda = stream.cuda();
        let _captured = stream.without_loading()?;
        // SAFETY: the tensors' addresses, extents and device are what their library says, which orders work on the
        // stream and keeps memory that it uses; the scratch memory is nobody else's until that work is done.
        unsafe {
            let x = matrix::<T>(cuda, "x", x)?;
            let out = matrix_mut::<T>(cuda, "out", out)?;
            if bytes == 0 {
                either!(self, layer => layer.forward_on::<T>(stream, x, out))?;
            } else {
                let mut scratch = DeviceScratch::from_raw(cuda, scratch, bytes)?;
                either!(self, layer => layer.forward_with::<T>(stream, x, out, &mut scratch))?;
            }
        }
        Ok(())
    }
}

/// Scratch memory of the caller; without any it is the stream's.
///
/// # Safety
/// As [`DeviceScratch::from_raw`].
unsafe fn scratch_of<'a>(
    cuda: &Cuda,
    (scratch, bytes): (u64, usize),
) -> Result<Option<DeviceScratch<'a>>, Failure> {
    // SAFETY: the caller's.
    let lent = || unsafe { DeviceScratch::from_raw(cuda, scratch, bytes) };
    Ok((bytes > 0).then(lent).transpose()?)
}

/// What a layer over lent weights is: one with the same is the same layer.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Lent {
    ordinal: usize,
    dtype: DType,
    numerics: Option<String>,
    /// Address, rows and columns of each, and elements between rows.
    weights: [Option<[usize; 4]>; 6],
}

/// By their activations.
type Layers = Vec<(swiglu::Activation, Arc<Layer>)>;

static LENT: Mutex<Option<HashMap<Lent, Layers>>> = Mutex::new(None);

/// Layers that are remembered.
const MOST_LENT: usize = 4096;

/// Scratch memory that a stream keeps for calls, which has room for cuBLASLt's 32 MiB; more is asked of PyTorch for each.
const OWN_SCRATCH: usize = 48 << 20;

/// A layer over weights where they lie, for tensors as kernels take them, on the stream that is current. `False` where
/// anything speaks against it, and nothing was done.
#[pyfunction]
pub(crate) fn cuda_layer_at_once(
    act: &Bound<'_, Activation>,
    numerics: Option<&str>,
    x: &Bound<'_, PyAny>,
    weights: [Option<Bound<'_, PyAny>>; 6],
    out: &Bound<'_, PyAny>,
) -> Result<bool, Failure> {
    let Some(tensors) = Alike::of(x, weights.iter().flatten(), out) else { return Ok(false) };
    let Some(stream) = tensors.current_stream() else { return Ok(false) };
    let Alike { mut inputs, out, .. } = tensors;
    let x = inputs.remove(0);
    let mut tensors = inputs.into_iter();
    let mut there = weights.iter().map(|given| given.as_ref().and_then(|_| tensors.next()));
    let mut next = || there.next().flatten();
    let Some(gate) = next() else { return Ok(false) };
    let weights = Weights(gate, next(), next(), next(), next(), next());
    let Some(layer) = lent(&stream, act.get(), numerics, &weights)? else { return Ok(false) };
    let (hidden, features) = (layer.hidden(), layer.out_features());
    let fits = x.shape.split_last().zip(out.shape.split_last()).is_some_and(
        |((&inside, rows), (&outside, out_rows))| {
            (inside, outside, rows) == (hidden, features, out_rows)
        },
    );
    let tokens = x.shape.iter().product::<usize>() / hidden.max(1);
    let scratch = layer.workspace_bytes(tokens);
    // Scratch memory of a graph is PyTorch's: it knows how long the graph lives.
    if !fits || scratch > OWN_SCRATCH || scratch > 0 && stream.is_capturing()? {
        return Ok(false);
    }
    done(with_dtype!(x.dtype, T => layer.enqueue_on::<T>(&stream, &x, &out, (0, 0))))
}

/// The layer of these weights: made where it is new, and none where kernels do not take them.
fn lent(
    stream: &BorrowedStream,
    activation: &Activation,
    numerics: Option<&str>,
    weights: &Weights,
) -> Result<Option<Arc<Layer>>, Failure> {
    let Weights(gate, up, down, gate_bias, up_bias, down_bias) = weights;
    let others = [up, down, gate_bias, up_bias, down_bias].map(Option::as_ref);
    let place = |t: &Tensor| {
        let [rows, cols, stride] = t.strided("weight")?;
        Ok::<_, CoreError>([t.address, rows, cols, stride])
    };
    let mut places = [Some(place(gate)?), None, None, None, None, None];
    for (known, t) in places[1..].iter_mut().zip(others) {
        *known = t.map(place).transpose()?;
    }
    let (ordinal, dtype) = (stream.cuda().ordinal(), gate.dtype);
    let key = Lent { ordinal, dtype, numerics: numerics.map(str::to_owned), weights: places };
    let mut known = LENT.lock().unwrap_or_else(PoisonError::into_inner);
    let known = known.get_or_insert_default();
    let same = |layers: &Layers| {
        let found = layers.iter().find(|(of, _)| *of == activation.0);
        found.map(|(_, layer)| layer.clone())
    };
    if let Some(layer) = known.get(&key).and_then(same) {
        return Ok(Some(layer));
    }
    let numerics = self::numerics(numerics)?;
    let Ok(kind) = with_dtype!(dtype, T => weights.borrow::<T>(ordinal, *activation, numerics))
    else {
        return Ok(None);
    };
    if known.len() >= MOST_LENT {
        known.clear();
    }
    let layer = Arc::new(Layer::from(kind));
    known.entry(key).or_default().push((activation.0, layer.clone()));
    Ok(Some(layer))
}

/// Forgets the layers of the parent in a forked child.
pub(crate) fn forget_lent() {
    std::mem::forget(LENT.lock().unwrap_or_else(PoisonError::into_inner).take());
}

impl Weights {
    fn pack<T: Element>(
        &self,
        device: &Device,
        activation: Activation,
        numerics: Option<Numerics>,
        how: Arrangement,
    ) -> swiglu::Result<Kind> {
        let Self(w_gate, w_up, w_down, b_gate, b_up, b_down) = self;
        // SAFETY: the caller of the Python function keeps the arrays as they are until it returns.
        let gate = unsafe { w_gate.rows::<T>("w_gate")? };
        let up = rows::<T>(w_up, "w_up")?;
        let weights = match &up {
            Some(up) => GateUpWeights::separate(gate.view(), up.view(), Orientation::OutIn)?,
            None => GateUpWeights::packed(
                gate.view(),
                WeightLayout { orientation: Orientation::OutIn, arrangement: how },
            )?,
        };
        let (gate_bias, up_bias) = (bias::<T>(b_gate, "b_gate")?, bias::<T>(b_up, "b_up")?);
        let mut params = GatedLinearParams::new(weights, activation.0)
            .with_gate_bias(gate_bias.as_ref().map(|b| b.as_slice()))
            .with_up_bias(up_bias.as_ref().map(|b| b.as_slice()));
        if let Some(numerics) = numerics {
            params = params.with_numerics(numerics);
        }
        let Some(down) = rows::<T>(w_down, "w_down")? else {
            return Ok(Kind::GatedLinear(GatedLinear::from_params(device, &params)?));
        };
        let down_bias = bias::<T>(b_down, "b_down")?;
        let params = MlpParams::new(params, down.view(), Orientation::OutIn)
            .with_down_bias(down_bias.as_ref().map(|b| b.as_slice()));
        Ok(Kind::Mlp(Mlp::from_params(device, &params)?))
    }

    fn borrow<T: Element>(
        &self,
        ordinal: usize,
        activation: Activation,
        numerics: Option<Numerics>,
    ) -> Result<Kind, Failure> {
        let Self(w_gate, w_up, w_down, b_gate, b_up, b_down) = self;
        let cuda = device::cuda(ordinal)?;
        let (out_in, act) = (Orientation::OutIn, activation.0);
        // SAFETY: the addresses are of this device's memory, whose values a layer reads in calls alone: the caller of
        // each call says that they are still what they were said to be. No kernel of this crate writes weights.
        unsafe {
            let gate = matrix::<T>(&cuda, "w_gate", w_gate)?;
            let mut params = match w_up {
                Some(up) => {
                    let up = matrix::<T>(&cuda, "w_up", up)?;
                    DeviceGatedLinearParams::separate(gate, up, out_in, act)?
                }
                None => DeviceGatedLinearParams::packed(gate, out_in, act)?,
            };
            if let Some(numerics) = numerics {
                params = params.numerics(numerics);
            }
            let there = |bias, what| bias_there::<T>(&cuda, bias, what);
            let params = params.biases(there(b_gate, "b_gate")?, there(b_up, "b_up")?)?;
            let Some(down) = w_down else {
                return Ok(Kind::GatedLinear(GatedLinear::from_device(&cuda, &params)?));
            };
            let down = matrix::<T>(&cuda, "w_down", down)?;
            let mut params = DeviceMlpParams::new(params, down, out_in)?;
            if let Some(bias) = there(b_down, "b_down")? {
                params = params.down_bias(bias)?;
            }
            Ok(Kind::Mlp(Mlp::from_device(&cuda, &params)?))
        }
    }
}

fn rows<'a, T: Element>(
    tensor: &'a Option<Tensor>,
    what: &str,
) -> swiglu::Result<Option<Rows<'a, T>>> {
    // SAFETY: the caller of the Python function keeps the arrays as they are until it returns.
    Ok(tensor.as_ref().map(|tensor| unsafe { tensor.rows::<T>(what) }).transpose()?)
}

/// The values of a bias in f32, as layers of the host take it.
fn bias<T: Element>(tensor: &Option<Tensor>, what: &str) -> swiglu::Result<Option<Matrix<f32>>> {
    let bias = rows::<T>(tensor, what)?;
    Ok(bias.map(|bias| bias.view().to_dtype::<f32>()).transpose()?)
}

/// # Safety
/// As [`matrix`].
unsafe fn bias_there<'a, T: Element>(
    cuda: &Cuda,
    bias: &'a Option<Tensor>,
    what: &str,
) -> Result<Option<DeviceMatrixRef<'a, T>>, Failure> {
    // SAFETY: the caller's.
    bias.as_ref().map(|bias| unsafe { matrix::<T>(cuda, what, bias) }).transpose()
}

pub(crate) fn json(value: &impl serde::Serialize) -> Result<String, Failure> {
    serde_json::to_string(value)
        .map_err(|error| pyo3::exceptions::PyRuntimeError::new_err(error.to_string()).into())
}
