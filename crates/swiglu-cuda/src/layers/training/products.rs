//! What a backward pass enqueues: products by cuBLASLt, and the element-wise kernels between them.

use swiglu_core::{Accumulate, DType, Element, Orientation};

use super::gate_up::BlockTensors;
use crate::device::cuda::Cuda;
use crate::device::error::Result;
use crate::device::lt::{By, LinearWeights, Lt, Product};
use crate::device::memory::{DeviceMatrixMut, DeviceMatrixRef};
use crate::device::stream::Stream;
use crate::kernels::elementwise::{self, Extent, GateUp, Stored, Tensor};
use crate::kernels::fill_rows::fill_rows;
use crate::kernels::gate::{Formula, GateCode};
use crate::kernels::sums::scale_rows;
use crate::layers::gradients::{DeviceGradientMut, DeviceGradientsMut, Place};
use crate::layers::layer::Layer;

/// A matrix that is multiplied with, of values of T.
#[derive(Debug, Clone, Copy)]
pub(super) struct Factor {
    pub(super) at: Tensor,
    pub(super) shape: [usize; 2],
}

/// The same weights as a map from its results to its inputs.
pub(super) fn backwards(w: &LinearWeights) -> LinearWeights {
    LinearWeights {
        orientation: match w.orientation {
            Orientation::OutIn => Orientation::InOut,
            Orientation::InOut => Orientation::OutIn,
        },
        in_features: w.out_features,
        out_features: w.in_features,
        bias: None,
        ..*w
    }
}

/// What enqueues the products of a backward pass.
pub(super) struct Multiply<'a> {
    pub(super) cuda: &'a Cuda,
    pub(super) stream: &'a Stream,
    pub(super) lt: &'a Lt,
    pub(super) scratch: u64,
    pub(super) accumulate: Accumulate,
}

/// A backward pass while it is enqueued.
pub(super) struct Run<'a, K, T> {
    pub(super) layer: &'a Layer<K, T>,
    pub(super) by: Multiply<'a>,
}

// SAFETY of all of these: as for `Layer::backward`, whose tensors these are.
impl<K, T: Element> Run<'_, K, T> {
    fn extent(&self, m: usize) -> Extent {
        let problem = &self.layer.problem;
        Extent {
            rows: m,
            cols: problem.intermediate,
            code: GateCode::elementwise(&problem.activation, problem.numerics, T::DTYPE),
            formula: Formula::new(&problem.activation),
        }
    }

    /// Gradients of gate and up from that of h.
    pub(super) unsafe fn through_activation(
        &self,
        m: usize,
        dh: Tensor,
        [gate, up]: [Tensor; 2],
        grads: [Tensor; 2],
    ) -> Result<()> {
        let stored = Stored::Elements;
        let inputs = GateUp { gate, up, group: 0, stored };
        let grads = GateUp { gate: grads[0], up: grads[1], group: 0, stored };
        if m == 0 || self.layer.problem.intermediate == 0 {
            return Ok(());
        }
        // SAFETY: as the caller says.
        unsafe { elementwise::backward(self.by.stream, self.extent(m), dh, inputs, grads) }
    }

    /// Gradients of gate and up from that of y, and h where it has a place, step by step.
    pub(super) unsafe fn through_block(
        &self,
        down: LinearWeights,
        io: BlockTensors,
        dh: Tensor,
    ) -> Result<()> {
        let BlockTensors { m, dy, saved, grads, h, scale } = io;
        if m == 0 || down.in_features == 0 {
            return Ok(());
        }
        let product = Place { at: dh, dtype: T::DTYPE };
        let dy = Factor { at: dy, shape: [m, down.out_features] };
        // SAFETY: as the caller says.
        unsafe {
            self.by.map::<T>(dy, backwards(&down), product, false)?;
            // h first: the gradients may take the place of gate and up.
            if let Some(h) = h {
                let inputs =
                    GateUp { gate: saved[0], up: saved[1], group: 0, stored: Stored::Elements };
                elementwise::forward(self.by.stream, self.extent(m), inputs, h)?;
            }
            if let Some(scale) = scale {
                let shape = [m, down.in_features];
                scale_rows(self.by.stream, T::DTYPE, (dh, h), shape, scale)?;
            }
            self.through_activation(m, dh, saved, grads)
        }
    }
}

impl Multiply<'_> {
    /// y = x·W, or y += x·W.
    pub(super) unsafe fn map<T: Element>(
        &self,
        x: Factor,
        w: LinearWeights,
        y: Place,
        add: bool,
    ) -> Result<()> {
        let product = Product { accumulate: add, ..Product::default() };
        // SAFETY: as the caller says.
        unsafe { self.product::<T>(x, w, y, [x.shape[0], w.out_features], product) }
    }

    /// The gradients of gate's and up's weights: both at once where factors and results allow it.
    pub(super) unsafe fn weights<T: Element>(
        &self,
        into: &DeviceGradientsMut<'_, T>,
        x: Factor,
        [gate, up]: [Factor; 2],
        lie: Orientation,
    ) -> Result<()> {
        let [m, h] = gate.shape;
        let places =
            [&into.gate, &into.up].map(|place| place.as_ref().map(DeviceGradientMut::place));
        let size = size_of::<T>() as u64;
        if let ([Some(first), Some(second)], Orientation::OutIn) = (places, lie) {
            let rows = h as u64 * first.at.stride.unsigned_abs() * first.dtype.size() as u64;
            let together = !into.apart
                && gate.at.stride == up.at.stride
                && up.at.data == gate.at.data + h as u64 * size
                && (first.dtype, first.at.stride) == (second.dtype, second.at.stride)
                && second.at.data == first.at.data + rows;
            if together && h > 0 {
                let both = Factor { at: gate.at, shape: [m, 2 * h] };
                // SAFETY: as the caller says.
                return unsafe { self.weight::<T>(x, both, lie, first) };
            }
        }
        for (place, grad) in places.into_iter().zip([gate, up]) {
            if let Some(place) = place {
                // SAFETY: as the caller says.
                unsafe { self.weight::<T>(x, grad, lie, place) }?;
            }
        }
        Ok(())
    }

    /// The gradient of weights from the features of `inputs` to those of `grads`.
    pub(super) unsafe fn weight<T: Element>(
        &self,
        inputs: Factor,
        grads: Factor,
        lie: Orientation,
        to: Place,
    ) -> Result<()> {
        let [left, right] = match lie {
            Orientation::OutIn => [grads, inputs],
            Orientation::InOut => [inputs, grads],
        };
        let w = LinearWeights {
            ptr: right.at.data,
            orientation: Orientation::InOut,
            in_features: right.shape[0],
            out_features: right.shape[1],
            row_stride: right.at.stride.unsigned_abs() as usize,
            bias: None,
        };
        let accumulate = self.accumulate == Accumulate::Add;
        let product = Product { transposed: true, accumulate, by: By::Planned };
        // SAFETY: as the caller says.
        unsafe { self.product::<T>(left, w, to, [left.shape[1], right.shape[1]], product) }
    }

    pub(super) unsafe fn product<T: Element>(
        &self,
        x: Factor,
        w: LinearWeights,
        y: Place,
        [rows, cols]: [usize; 2],
        product: Product,
    ) -> Result<()> {
        if rows == 0 || cols == 0 {
            return Ok(());
        }
        // SAFETY: as the caller says.
        unsafe {
            if w.in_features == 0 {
                return match product.accumulate {
                    true => Ok(()),
                    false => fill_rows(self.stream, y.dtype, y.at, [rows, cols], w.bias),
                };
            }
            match y.dtype {
                DType::F32 => self.product_of::<T, f32>(x, w, y.at, [rows, cols], product),
                _ => self.product_of::<T, T>(x, w, y.at, [rows, cols], product),
            }
        }
    }

    unsafe fn product_of<T: Element, Y: Element>(
        &self,
        x: Factor,
        w: LinearWeights,
        y: Tensor,
        [rows, cols]: [usize; 2],
        product: Product,
    ) -> Result<()> {
        let stride = |t: Tensor| t.stride.unsigned_abs() as usize;
        // SAFETY: as the caller says.
        unsafe {
            let [x_rows, x_cols] = x.shape;
            let x = DeviceMatrixRef::<T>::from_raw_trusted(
                self.cuda,
                x.at.data,
                x_rows,
                x_cols,
                stride(x.at),
            )?;
            let y =
                DeviceMatrixMut::<Y>::from_raw_trusted(self.cuda, y.data, rows, cols, stride(y))?;
            self.lt.product(self.stream, x, &w, y, product, self.scratch)
        }
    }
}
