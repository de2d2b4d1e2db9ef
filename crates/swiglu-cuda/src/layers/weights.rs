//! Gate and up weights in device memory, packed once for the fused and the unfused path alike.

use swiglu_core::{Element, GatedLinearParams, Half, MatrixRef, Orientation};

use crate::error::Result;
use crate::kernels::gated_gemm::{BIAS_PADDING, Weights};
use crate::lt::LinearWeights;
use crate::memory::DeviceBuffer;
use crate::stream::Stream;

/// Bytes that rows and halves start at a multiple of: what the copy engine and cuBLASLt's fastest
/// kernels need.
const ALIGNMENT: usize = 16;

/// `n` rounded up so that so many elements are a multiple of [`ALIGNMENT`] bytes.
pub(super) fn padded<T>(n: usize) -> usize {
    n.next_multiple_of(ALIGNMENT / size_of::<T>())
}

/// One tensor: `[out, in]` as rows of the gate's features, then the up's; `[in, out]` as rows of
/// gate and up side by side. H is padded with zeros, so that one product with all of it gives both
/// pre-activations for the unfused path, and the fused kernels see two matrices in it.
#[derive(Debug)]
pub(super) struct GateUpBuffer<T> {
    values: DeviceBuffer<T>,
    orientation: Orientation,
    hidden: usize,
    intermediate: usize,
    row_stride: usize,
    biases: Option<Biases<T>>,
}

#[derive(Debug)]
struct Biases<T> {
    /// Gate, then up, each padded to [`BIAS_PADDING`].
    exact: DeviceBuffer<f32>,
    /// As values of T for cuBLASLt, which adds them so; padded like the features.
    rounded: DeviceBuffer<T>,
}

impl<T: Element> GateUpBuffer<T> {
    pub(super) fn new(stream: &Stream, params: &GatedLinearParams<'_, T>) -> Result<Self> {
        let w = &params.weights;
        let (hidden, intermediate) = (w.hidden(), w.intermediate());
        let orientation = w.layout().orientation;
        let half = padded::<T>(intermediate);
        let [rows, cols] = orientation.shape(2 * half, hidden);
        let row_stride = padded::<T>(cols);
        let mut packed = vec![T::from_f32(0.0); rows * row_stride];
        for (which, first) in [(Half::Gate, 0), (Half::Up, half)] {
            for h in 0..intermediate {
                let (tensor, feature) = w.locate(which, h);
                let to = first + h;
                match orientation {
                    Orientation::OutIn => {
                        let at = to * row_stride;
                        packed[at..at + hidden].copy_from_slice(tensor.row(feature));
                    }
                    Orientation::InOut => {
                        for k in 0..hidden {
                            packed[k * row_stride + to] = tensor.row(k)[feature];
                        }
                    }
                }
            }
        }
        let values = DeviceBuffer::from_host(stream, &packed)?;
        let biases = match (params.gate_bias, params.up_bias) {
            (None, None) => None,
            given => Some(Biases::new(stream, given.into(), intermediate, half)?),
        };
        Ok(Self { values, orientation, hidden, intermediate, row_stride, biases })
    }

    fn half(&self) -> usize {
        padded::<T>(self.intermediate)
    }

    /// As the fused kernels take them.
    pub(super) fn fused(&self) -> Weights {
        let gate = self.values.device_ptr();
        let step = match self.orientation {
            Orientation::OutIn => self.half() * self.row_stride,
            Orientation::InOut => self.half(),
        };
        let biases = self.biases.as_ref().map(|b| {
            let gate = b.exact.device_ptr();
            [gate, gate + (b.exact.len() / 2 * size_of::<f32>()) as u64]
        });
        Weights {
            gate,
            up: gate + (step * size_of::<T>()) as u64,
            row_stride: self.row_stride,
            orientation: self.orientation,
            hidden: self.hidden,
            intermediate: self.intermediate,
            biases,
        }
    }

    /// As one linear map to the padded gate and up features.
    pub(super) fn linear(&self) -> LinearWeights {
        LinearWeights {
            ptr: self.values.device_ptr(),
            orientation: self.orientation,
            in_features: self.hidden,
            out_features: 2 * self.half(),
            row_stride: self.row_stride,
            bias: self.biases.as_ref().map(|b| b.rounded.device_ptr()),
        }
    }
}

impl<T: Element> Biases<T> {
    fn new(
        stream: &Stream,
        given: [Option<&[f32]>; 2],
        intermediate: usize,
        half: usize,
    ) -> Result<Self> {
        let padding = intermediate.next_multiple_of(BIAS_PADDING);
        let mut exact = vec![0.0; 2 * padding];
        let mut rounded = vec![T::from_f32(0.0); 2 * half];
        for (i, bias) in given.into_iter().enumerate() {
            let bias = bias.unwrap_or_default();
            exact[i * padding..][..bias.len()].copy_from_slice(bias);
            for (to, &b) in rounded[i * half..].iter_mut().zip(bias) {
                *to = T::from_f32(b);
            }
        }
        Ok(Self {
            exact: DeviceBuffer::from_host(stream, &exact)?,
            rounded: DeviceBuffer::from_host(stream, &rounded)?,
        })
    }
}

/// The down projection.
#[derive(Debug)]
pub(super) struct DownBuffer<T> {
    values: DeviceBuffer<T>,
    bias: Option<DeviceBuffer<T>>,
    orientation: Orientation,
    in_features: usize,
    out_features: usize,
    row_stride: usize,
}

impl<T: Element> DownBuffer<T> {
    pub(super) fn new(
        stream: &Stream,
        weight: MatrixRef<'_, T>,
        orientation: Orientation,
        bias: Option<&[f32]>,
    ) -> Result<Self> {
        let row_stride = padded::<T>(weight.cols());
        let mut packed = vec![T::from_f32(0.0); weight.rows() * row_stride];
        for (i, row) in packed.chunks_exact_mut(row_stride.max(1)).enumerate() {
            row[..weight.cols()].copy_from_slice(weight.row(i));
        }
        let [out_features, in_features] = orientation.shape(weight.rows(), weight.cols());
        let rounded = |b: &[f32]| b.iter().map(|&b| T::from_f32(b)).collect::<Vec<T>>();
        Ok(Self {
            values: DeviceBuffer::from_host(stream, &packed)?,
            bias: bias.map(|b| DeviceBuffer::from_host(stream, &rounded(b))).transpose()?,
            orientation,
            in_features,
            out_features,
            row_stride,
        })
    }

    pub(super) fn linear(&self) -> LinearWeights {
        LinearWeights {
            ptr: self.values.device_ptr(),
            orientation: self.orientation,
            in_features: self.in_features,
            out_features: self.out_features,
            row_stride: self.row_stride,
            bias: self.bias.as_ref().map(DeviceBuffer::device_ptr),
        }
    }
}
