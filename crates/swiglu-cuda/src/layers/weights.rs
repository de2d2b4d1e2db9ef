//! Gate and up weights in device memory, packed once for the fused and the unfused path alike.

use std::ops::Range;

use swiglu_core::{DType, Element, GatedLinearParams, Half, MatrixRef, Orientation};

use crate::device::error::Result;
use crate::device::lt::LinearWeights;
use crate::device::memory::DeviceBuffer;
use crate::device::stream::Stream;
use crate::kernels::elementwise::Stored;
use crate::kernels::gated_gemm::{BIAS_PADDING, Weights};

/// Bytes that rows and halves start at a multiple of: what the copy engine and cuBLASLt's fastest
/// kernels need.
const ALIGNMENT: usize = 16;

/// `n` rounded up so that so many elements are a multiple of [`ALIGNMENT`] bytes.
pub(super) fn padded<T>(n: usize) -> usize {
    n.next_multiple_of(ALIGNMENT / size_of::<T>())
}

/// Features that are transposed together, so that what is read and what is written stays in cache.
fn blocks(n: usize) -> impl Iterator<Item = Range<usize>> {
    const BLOCK: usize = 64;
    (0..n).step_by(BLOCK).map(move |first| first..n.min(first + BLOCK))
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
        let mut packed = vec![T::from_f32(0.0); rows * row_stride];
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
        let values = DeviceBuffer::from_host(stream, &packed)?;
        let biases = match (params.gate_bias, params.up_bias) {
            (None, None) => None,
            given => Some(Biases::new(stream, given.into(), intermediate, half)?),
        };
        Ok(Self { values, orientation, hidden, intermediate, row_stride, biases })
    }

    /// Bytes of the weights and biases.
    pub(super) fn bytes(&self) -> usize {
        let biases = self.biases.as_ref().map_or(0, |b| {
            let beside_sums = b.beside_sums.as_ref().map_or(0, DeviceBuffer::bytes);
            b.exact.bytes() + b.rounded.bytes() + beside_sums
        });
        self.values.bytes() + biases
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

    /// As one linear map to the padded gate and up features, with the bias for what is stored of them.
    pub(super) fn linear(&self, stored: Stored) -> LinearWeights {
        let address = |b: &Biases<T>| match (stored, &b.beside_sums) {
            (Stored::Sums, Some(bias)) => bias.device_ptr(),
            _ => b.rounded.device_ptr(),
        };
        LinearWeights {
            ptr: self.values.device_ptr(),
            orientation: self.orientation,
            in_features: self.hidden,
            out_features: 2 * self.half(),
            row_stride: self.row_stride,
            bias: self.biases.as_ref().map(address),
        }
    }

    /// As two linear maps, to the gate's and to the up's features, with results of T.
    pub(super) fn halves(&self) -> [LinearWeights; 2] {
        let (both, fused) = (self.linear(Stored::Elements), self.fused());
        let up_bias = |bias: u64| bias + (self.half() * size_of::<T>()) as u64;
        let gate = LinearWeights { out_features: self.intermediate, ..both };
        [gate, LinearWeights { ptr: fused.up, bias: both.bias.map(up_bias), ..gate }]
    }
}

impl<T: Element> Biases<T> {
    fn new(
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
        let wide = (T::DTYPE != DType::F32).then(|| DeviceBuffer::from_host(stream, &both));
        Ok(Self {
            exact: DeviceBuffer::from_host(stream, &exact)?,
            rounded: DeviceBuffer::from_host(stream, &rounded)?,
            beside_sums: wide.transpose()?,
        })
    }
}

/// The down projection, always `[out, in]`: what the decode kernel streams serves cuBLASLt as well,
/// and so one copy is enough.
#[derive(Debug)]
pub(super) struct DownBuffer<T> {
    values: DeviceBuffer<T>,
    bias: Option<DeviceBuffer<T>>,
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
        // The same exchange of rows and columns, or none, leads back.
        let [out_features, in_features] = orientation.shape(weight.rows(), weight.cols());
        let row_stride = padded::<T>(in_features);
        let mut packed = vec![T::from_f32(0.0); out_features * row_stride];
        match orientation {
            Orientation::OutIn => {
                for (i, row) in packed.chunks_exact_mut(row_stride.max(1)).enumerate() {
                    row[..in_features].copy_from_slice(weight.row(i));
                }
            }
            Orientation::InOut => {
                for inputs in blocks(in_features) {
                    for out in 0..out_features {
                        for i in inputs.clone() {
                            packed[out * row_stride + i] = weight.row(i)[out];
                        }
                    }
                }
            }
        }
        let rounded = |b: &[f32]| b.iter().map(|&b| T::from_f32(b)).collect::<Vec<T>>();
        Ok(Self {
            values: DeviceBuffer::from_host(stream, &packed)?,
            bias: bias.map(|b| DeviceBuffer::from_host(stream, &rounded(b))).transpose()?,
            in_features,
            out_features,
            row_stride,
        })
    }

    /// Bytes of the weights and the bias.
    pub(super) fn bytes(&self) -> usize {
        self.values.bytes() + self.bias.as_ref().map_or(0, DeviceBuffer::bytes)
    }

    pub(super) fn linear(&self) -> LinearWeights {
        LinearWeights {
            ptr: self.values.device_ptr(),
            orientation: Orientation::OutIn,
            in_features: self.in_features,
            out_features: self.out_features,
            row_stride: self.row_stride,
            bias: self.bias.as_ref().map(DeviceBuffer::device_ptr),
        }
    }
}
