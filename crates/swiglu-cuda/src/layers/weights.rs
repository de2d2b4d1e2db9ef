//! Gate and up weights in device memory, packed once for the fused and the unfused path alike.

use std::ops::Range;
use std::sync::Arc;

use swiglu_core::{
    Activation, DType, Element, GateUpWeights, GatedLinearParams, Half, Matrix, Numerics,
    Orientation,
};

use crate::device::error::Result;
use crate::device::lt::LinearWeights;
use crate::device::memory::{Access, Allocation, DeviceBuffer, DeviceMatrixRef};
use crate::device::stream::Stream;
use crate::kernels::elementwise::Stored;
use crate::kernels::weights::{BIAS_PADDING, Biases, Weights};
use crate::layers::lent::DeviceGatedLinearParams;

/// Bytes that rows and halves start at a multiple of: what TMA and cuBLASLt's fastest
/// kernels need.
pub(super) const ALIGNMENT: usize = 16;

/// `n` rounded up so that so many elements are a multiple of [`ALIGNMENT`] bytes.
pub(super) fn padded<T>(n: usize) -> usize {
    n.next_multiple_of(ALIGNMENT / size_of::<T>())
}

/// Features that are transposed together, so that what is read and what is written stays in cache.
pub(super) fn blocks(n: usize) -> impl Iterator<Item = Range<usize>> {
    const BLOCK: usize = 64;
    (0..n).step_by(BLOCK).map(move |first| first..n.min(first + BLOCK))
}

/// Gate and up weights in device memory: packed by us, or lent by the caller.
///
/// Packed ones are one tensor: `[out, in]` as rows of the gate's features, then the up's; `[in, out]` as rows of
/// gate and up side by side. H is padded with zeros, so that one product with all of it gives both
/// pre-activations for the unfused path, and the fused kernels see two matrices in it.
#[derive(Debug)]
pub(super) struct GateUpBuffer<T> {
    /// What knows the streams that use the weights, as far as it is ours.
    memory: Vec<Arc<Allocation>>,
    /// With biases if these are lent.
    weights: Weights,
    /// Whether gate and up, each padded, are the halves of one matrix.
    is_one: bool,
    is_lent: bool,
    biases: Option<PackedBiases<T>>,
}

/// Gate, up and their biases on the host.
pub(super) struct HostWeights<T> {
    gate: Matrix<T>,
    up: Matrix<T>,
    pub(super) orientation: Orientation,
    biases: [Option<Vec<f32>>; 2],
}

impl<T: Element> HostWeights<T> {
    /// As a layer is made from them.
    pub(super) fn params(
        &self,
        activation: Activation,
        numerics: Numerics,
    ) -> Result<GatedLinearParams<'_, T>> {
        let (gate, up) = (self.gate.view(), self.up.view());
        let weights = GateUpWeights::separate(gate, up, self.orientation)?;
        let mut params = GatedLinearParams::new(weights, activation);
        let [gate_bias, up_bias] = self.biases.each_ref().map(Option::as_deref);
        (params.gate_bias, params.up_bias, params.numerics) = (gate_bias, up_bias, numerics);
        Ok(params)
    }
}

/// A matrix of a layer on the host.
///
/// # Safety
/// Memory of the device that holds it.
pub(super) unsafe fn download<T: Element>(
    stream: &Stream,
    address: u64,
    [rows, cols]: [usize; 2],
    row_stride: usize,
) -> Result<Matrix<T>> {
    let cuda = stream.cuda();
    // SAFETY: as the caller says.
    let view =
        unsafe { DeviceMatrixRef::<T>::from_raw_trusted(cuda, address, rows, cols, row_stride) }?;
    view.to_host(stream)
}

/// A bias of values of T on the host, unless its address is 0.
pub(super) fn host_bias<T: Element>(
    stream: &Stream,
    address: u64,
    len: usize,
) -> Result<Option<Vec<f32>>> {
    if address == 0 {
        return Ok(None);
    }
    // SAFETY: of a layer that lives meanwhile.
    let bias = unsafe { download::<T>(stream, address, [1, len], len) }?;
    Ok(Some(bias.as_slice().iter().map(|b| b.to_f32()).collect()))
}

/// How the unfused path multiplies with gate and up.
pub(super) enum Products {
    /// At once, to the padded features of both.
    Both(LinearWeights),
    Each([LinearWeights; 2]),
}

#[derive(Debug)]
struct PackedBiases<T> {
    /// Gate, then up, each with [`BIAS_PADDING`] zeros behind it or more.
    exact: DeviceBuffer<f32>,
    /// As values of T for cuBLASLt, which adds them so to elements; padded like the features.
    rounded: DeviceBuffer<T>,
    /// The same in f32, which it adds to sums, where T is not that already.
    beside_sums: Option<DeviceBuffer<f32>>,
}

impl<T: Element> GateUpBuffer<T> {
    /// In `orientation`, whichever way the given weights lie.
    pub(super) fn new(
        stream: &Stream,
        params: &GatedLinearParams<'_, T>,
        orientation: Orientation,
    ) -> Result<Self> {
        let w = &params.weights;
        let (hidden, intermediate) = (w.hidden(), w.intermediate());
        let given = w.layout().orientation;
        let half = padded::<T>(intermediate);
        let [rows, cols] = orientation.shape(2 * half, hidden);
        let row_stride = padded::<T>(cols);
        let mut packed = Matrix::<T>::zeros(rows, row_stride)?.into_vec();
        for (which, first) in [(Half::Gate, 0), (Half::Up, half)] {
            if (given, orientation) == (Orientation::OutIn, Orientation::OutIn) {
                for h in 0..intermediate {
                    let (tensor, feature) = w.locate(which, h);
                    let at = (first + h) * row_stride;
                    packed[at..at + hidden].copy_from_slice(tensor.row(feature));
                }
                continue;
            }
            for ks in blocks(hidden) {
                for h in 0..intermediate {
                    let (tensor, feature) = w.locate(which, h);
                    for k in ks.clone() {
                        let [from_row, from_col] = given.shape(feature, k);
                        let [row, col] = orientation.shape(first + h, k);
                        packed[row * row_stride + col] = tensor.row(from_row)[from_col];
                    }
                }
            }
        }
        let allocation = Allocation::new(stream.cuda().memory(), stream.raw_stream());
        let values = DeviceBuffer::together(&allocation, stream, &packed)?;
        let biases = match (params.gate_bias, params.up_bias) {
            (None, None) => None,
            given => {
                Some(PackedBiases::new(&allocation, stream, given.into(), intermediate, half)?)
            }
        };
        let step = match orientation {
            Orientation::OutIn => half * row_stride,
            Orientation::InOut => half,
        };
        let gate = values.device_ptr();
        let up = gate + (step * size_of::<T>()) as u64;
        let weights =
            Weights { gate, up, row_stride, orientation, hidden, intermediate, biases: None };
        // The allocation has the values, whoever holds it.
        Ok(Self { memory: vec![allocation], weights, is_one: true, is_lent: false, biases })
    }

    /// Weights that stay where they are.
    pub(super) fn lent(params: &DeviceGatedLinearParams<'_, T>) -> Self {
        let (gate, up, orientation) = (params.gate, params.up, params.orientation);
        let [intermediate, hidden] = orientation.shape(gate.rows(), gate.cols());
        // One matrix has one stride, which a single row does not need.
        let row_stride = if gate.rows() > 1 { gate.row_stride() } else { gate.cols() };
        let step = match orientation {
            Orientation::OutIn => intermediate * row_stride,
            Orientation::InOut => intermediate,
        };
        let (gate, up) = (gate.device_ptr(), up.device_ptr());
        let follows = gate.checked_add((step * size_of::<T>()) as u64) == Some(up);
        let address = |b: &Option<DeviceMatrixRef<'_, T>>| b.map_or(0, |b| b.device_ptr());
        let biases = match params.biases.each_ref().map(address) {
            [0, 0] => None,
            at => Some(Biases::Elements(at)),
        };
        Self {
            memory: params.memory(),
            weights: Weights { gate, up, row_stride, orientation, hidden, intermediate, biases },
            is_one: follows && padded::<T>(intermediate) == intermediate && biases.is_none(),
            is_lent: true,
            biases: None,
        }
    }

    pub(super) fn is_lent(&self) -> bool {
        self.is_lent
    }

    /// Bytes that are copied of a row at once: what every row begins at a multiple of, at most 16.
    pub(super) fn copy_bytes(&self) -> usize {
        let w = &self.weights;
        let stride = (w.row_stride * size_of::<T>()) as u64;
        1 << (ALIGNMENT as u64 | w.gate | w.up | stride).trailing_zeros()
    }

    /// Whether lent rows begin, and end, at multiples of 16 bytes, as kernels for few tokens read them.
    pub(super) fn is_whole(&self) -> bool {
        let w = &self.weights;
        let cols = w.orientation.shape(w.intermediate, w.hidden)[1];
        let bytes = [w.gate, w.up]
            .into_iter()
            .chain([w.row_stride, cols].map(|n| (n * size_of::<T>()) as u64));
        w.orientation == Orientation::OutIn
            && bytes.into_iter().all(|n| n.is_multiple_of(ALIGNMENT as u64))
    }

    /// What [`Self::new`] was given, or might have been.
    pub(super) fn to_host(&self, stream: &Stream) -> Result<HostWeights<T>> {
        self.admit(stream)?;
        let Weights { gate, up, row_stride, orientation, hidden, intermediate, .. } = self.weights;
        let shape = orientation.shape(intermediate, hidden);
        // SAFETY: the weights live as long as `self`, and so do the biases.
        let matrix = |at| unsafe { download::<T>(stream, at, shape, row_stride) };
        let biases = match self.fused().biases {
            None => [None, None],
            Some(Biases::Floats([gate, up])) => {
                // SAFETY: as above.
                let floats =
                    |at| unsafe { download::<f32>(stream, at, [1, intermediate], intermediate) };
                [Some(floats(gate)?.into_vec()), Some(floats(up)?.into_vec())]
            }
            Some(Biases::Elements(lent)) => {
                let [gate, up] = lent.map(|at| host_bias::<T>(stream, at, intermediate));
                [gate?, up?]
            }
        };
        Ok(HostWeights { gate: matrix(gate)?, up: matrix(up)?, orientation, biases })
    }

    /// Lets work enqueued on `stream` next read the weights, behind what other streams write to them.
    pub(super) fn admit(&self, stream: &Stream) -> Result<()> {
        let raw = stream.raw_stream();
        self.memory.iter().try_for_each(|memory| memory.order(raw, Access::Read))
    }

    /// What packed weights, and others that are used with them, are allocated in.
    pub(super) fn allocation(&self) -> &Arc<Allocation> {
        &self.memory[0]
    }

    /// Adds memory that is used with the weights.
    pub(super) fn add_memory(&mut self, memory: Option<&Arc<Allocation>>) {
        let known = |memory: &&Arc<Allocation>| self.memory.iter().any(|m| Arc::ptr_eq(m, memory));
        let new = memory.filter(|memory| !known(memory)).cloned();
        self.memory.extend(new);
    }

    /// Bytes of all that is packed with the weights; none of lent ones.
    pub(super) fn bytes(&self) -> usize {
        if self.is_lent { 0 } else { self.allocation().bytes() }
    }

    fn half(&self) -> usize {
        padded::<T>(self.weights.intermediate)
    }

    /// As the fused kernels take them.
    pub(super) fn fused(&self) -> Weights {
        let packed = self.biases.as_ref().map(|b| {
            let gate = b.exact.device_ptr();
            Biases::Floats([gate, gate + (b.exact.len() / 2 * size_of::<f32>()) as u64])
        });
        Weights { biases: packed.or(self.weights.biases), ..self.weights }
    }

    /// As the unfused path multiplies with them, with the bias for what is stored of the products.
    pub(super) fn products(&self, stored: Stored) -> Products {
        let both = self.linear(stored);
        if self.is_one { Products::Both(both) } else { Products::Each(self.halves()) }
    }

    /// Whether there are biases that sums begin at otherwise than elements do.
    pub(super) fn has_biases_of_sums(&self) -> bool {
        self.biases.as_ref().is_some_and(|biases| biases.beside_sums.is_some())
    }

    /// As the linear map to the up's features alone, with the bias for what is stored of it.
    pub(super) fn up(&self, stored: Stored) -> LinearWeights {
        let [_, up] = self.halves();
        let beside_sums = self.biases.as_ref().and_then(|biases| biases.beside_sums.as_ref());
        match (stored, beside_sums) {
            (Stored::Sums, Some(both)) => {
                let bias = both.device_ptr() + (self.half() * size_of::<f32>()) as u64;
                LinearWeights { bias: Some(bias), ..up }
            }
            _ => up,
        }
    }

    /// As one linear map to the padded gate and up features.
    fn linear(&self, stored: Stored) -> LinearWeights {
        let address = |b: &PackedBiases<T>| match (stored, &b.beside_sums) {
            (Stored::Sums, Some(bias)) => bias.device_ptr(),
            _ => b.rounded.device_ptr(),
        };
        let Weights { gate, orientation, hidden, row_stride, .. } = self.weights;
        LinearWeights {
            ptr: gate,
            orientation,
            in_features: hidden,
            out_features: 2 * self.half(),
            row_stride,
            bias: self.biases.as_ref().map(address),
        }
    }

    /// As two linear maps, to the gate's and to the up's features, with results of T.
    pub(super) fn halves(&self) -> [LinearWeights; 2] {
        let (both, Weights { up, intermediate, biases, .. }) =
            (self.linear(Stored::Elements), self.weights);
        let [gate_bias, up_bias] = match biases {
            Some(Biases::Elements(lent)) => lent.map(|at| (at != 0).then_some(at)),
            _ => {
                let half = (self.half() * size_of::<T>()) as u64;
                [both.bias, both.bias.map(|bias| bias + half)]
            }
        };
        let gate = LinearWeights { out_features: intermediate, bias: gate_bias, ..both };
        [gate, LinearWeights { ptr: up, bias: up_bias, ..gate }]
    }
}

impl<T: Element> PackedBiases<T> {
    fn new(
        allocation: &Arc<Allocation>,
        stream: &Stream,
        given: [Option<&[f32]>; 2],
        intermediate: usize,
        half: usize,
    ) -> Result<Self> {
        let padding = (intermediate + BIAS_PADDING).next_multiple_of(BIAS_PADDING);
        let mut exact = vec![0.0; 2 * padding];
        let mut both = vec![0.0; 2 * half];
        for (i, bias) in given.into_iter().enumerate() {
            let bias = bias.unwrap_or_default();
            exact[i * padding..][..bias.len()].copy_from_slice(bias);
            both[i * half..][..bias.len()].copy_from_slice(bias);
        }
        let rounded: Vec<T> = both.iter().map(|&b| T::from_f32(b)).collect();
        let wide =
            (T::DTYPE != DType::F32).then(|| DeviceBuffer::together(allocation, stream, &both));
        Ok(Self {
            exact: DeviceBuffer::together(allocation, stream, &exact)?,
            rounded: DeviceBuffer::together(allocation, stream, &rounded)?,
            beside_sums: wide.transpose()?,
        })
    }
}
