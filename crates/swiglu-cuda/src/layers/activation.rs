//! The activation operation on a device: gate and up are given, there are no weights.

use swiglu_core::{
    Activation, Arrangement, Element, Error, GateUpMut, GateUpRef, Half, MatrixMut, MatrixRef,
    Numerics,
};

use super::host::through_device;
use crate::device::cuda::Cuda;
use crate::device::error::{CudaError, Result};
use crate::device::memory::{DeviceData, DeviceMatrix, DeviceMatrixMut, DeviceMatrixRef};
use crate::device::stream::Stream;
use crate::kernels::elementwise::{self, Extent, GateUp, Stored, Tensor};
use crate::kernels::gate::{Formula, GateCode, expect_gate};

/// Gate and up `[M, H]` in device memory, to be read.
#[derive(Debug, Clone, Copy)]
pub struct DeviceGateUp<'a, T> {
    tensors: [DeviceMatrixRef<'a, T>; 2],
    layout: Layout,
}

/// Gate and up, or their gradients, in device memory, to be written.
#[derive(Debug)]
pub struct DeviceGateUpMut<'a, T> {
    tensors: (DeviceMatrixMut<'a, T>, Option<DeviceMatrixMut<'a, T>>),
    layout: Layout,
}

/// An arrangement that fits its tensors.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Layout {
    arrangement: Arrangement,
    rows: usize,
    intermediate: usize,
}

impl Layout {
    fn packed(arrangement: Arrangement, [rows, cols]: [usize; 2]) -> Result<Self> {
        let shape = |expected: &str| Error::Shape {
            what: format!("packed gate and up ({arrangement})"),
            expected: expected.into(),
            given: format!("[{rows}, {cols}]"),
        };
        if !arrangement.is_packed() {
            return Err(shape("two tensors, gate and up").into());
        }
        if !cols.is_multiple_of(2) {
            return Err(shape("an even number of columns").into());
        }
        arrangement.validate(cols / 2)?;
        Ok(Self { arrangement, rows, intermediate: cols / 2 })
    }

    fn separate([rows, intermediate]: [usize; 2]) -> Self {
        Self { arrangement: Arrangement::Separate, rows, intermediate }
    }

    /// What the kernels take, from the tensors that hold gate and up.
    fn gate_up<T>(&self, [first, second]: [Tensor; 2]) -> GateUp {
        let at = |half| {
            let (tensor, column) = self.arrangement.locate(half, 0, self.intermediate);
            let base = [first, second][tensor];
            Tensor { data: base.data + (column * size_of::<T>()) as u64, ..base }
        };
        let group = match self.arrangement {
            // One group is two halves.
            Arrangement::Interleaved { group } if group < self.intermediate => group,
            _ => 0,
        };
        let stored = Stored::Elements;
        // Empty tensors have no column 0.
        if self.intermediate == 0 {
            return GateUp { gate: first, up: second, group: 0, stored };
        }
        GateUp { gate: at(Half::Gate), up: at(Half::Up), group, stored }
    }
}

pub(crate) fn tensor<T: DeviceData>(matrix: &DeviceMatrixRef<'_, T>) -> Tensor {
    Tensor::new(matrix.device_ptr(), matrix.row_stride())
}

impl<'a, T: DeviceData> DeviceGateUp<'a, T> {
    /// Two `[M, H]` matrices.
    ///
    /// # Errors
    /// [`Error::Shape`] if the shapes differ.
    pub fn separate(gate: DeviceMatrixRef<'a, T>, up: DeviceMatrixRef<'a, T>) -> Result<Self> {
        up.expect_shape("up", gate.shape())?;
        Ok(Self { tensors: [gate, up], layout: Layout::separate(gate.shape()) })
    }

    /// One `[M, 2H]` matrix.
    ///
    /// # Errors
    /// [`Error::Shape`] for an odd number of columns or [`Arrangement::Separate`];
    /// [`Error::OutOfRange`] if an interleaving group does not divide H.
    pub fn packed(matrix: DeviceMatrixRef<'a, T>, arrangement: Arrangement) -> Result<Self> {
        let layout = Layout::packed(arrangement, matrix.shape())?;
        Ok(Self { tensors: [matrix, matrix], layout })
    }

    /// M.
    pub fn rows(&self) -> usize {
        self.layout.rows
    }
    /// H.
    pub fn intermediate(&self) -> usize {
        self.layout.intermediate
    }
}

impl<'a, T: DeviceData> DeviceGateUpMut<'a, T> {
    /// As [`DeviceGateUp::separate`].
    ///
    /// # Errors
    /// [`Error::Shape`] if the shapes differ.
    pub fn separate(gate: DeviceMatrixMut<'a, T>, up: DeviceMatrixMut<'a, T>) -> Result<Self> {
        up.expect_shape("up", gate.shape())?;
        let layout = Layout::separate(gate.shape());
        Ok(Self { tensors: (gate, Some(up)), layout })
    }

    /// As [`DeviceGateUp::packed`].
    ///
    /// # Errors
    /// As [`DeviceGateUp::packed`].
    pub fn packed(matrix: DeviceMatrixMut<'a, T>, arrangement: Arrangement) -> Result<Self> {
        let layout = Layout::packed(arrangement, matrix.shape())?;
        Ok(Self { tensors: (matrix, None), layout })
    }

    fn views(&self) -> [DeviceMatrixRef<'_, T>; 2] {
        let first = self.tensors.0.as_ref();
        [first, self.tensors.1.as_ref().map_or(first, DeviceMatrixMut::as_ref)]
    }
}

fn extent<T: Element>(act: &Activation, numerics: Numerics, layout: &Layout) -> Extent {
    Extent {
        rows: layout.rows,
        cols: layout.intermediate,
        code: GateCode::elementwise(act, numerics, T::DTYPE),
        formula: Formula::new(act),
    }
}

impl Cuda {
    /// Enqueues h = act(gate, up): each value is read once and h written once.
    ///
    /// # Errors
    /// [`Error::Shape`] if `out` is not `[M, H]`; [`CudaError::WrongDevice`]; what compiling the
    /// kernel on first use, or the driver, reports.
    pub fn activation<T: Element>(
        &self,
        stream: &Stream,
        act: &Activation,
        numerics: Numerics,
        inputs: DeviceGateUp<'_, T>,
        out: DeviceMatrixMut<'_, T>,
    ) -> Result<()> {
        self.expect_stream(stream)?;
        expect_gate(act, T::DTYPE)?;
        let layout = inputs.layout;
        let shape = [layout.rows, layout.intermediate];
        out.expect_shape("output", shape)?;
        inputs.tensors.iter().try_for_each(|t| t.admit("gate and up", t.shape(), stream))?;
        out.admit("output", shape, stream)?;
        let gate_up = layout.gate_up::<T>(inputs.tensors.map(|t| tensor(&t)));
        // SAFETY: the views span memory of this device; `out` is borrowed mutably, so it overlaps
        // nothing, and its rows were checked when it was made.
        unsafe {
            let extent = extent::<T>(act, numerics, &layout);
            elementwise::forward(stream, extent, gate_up, tensor(&out.as_ref()))
        }
    }

    /// Enqueues (∂L/∂gate, ∂L/∂up) from ∂L/∂h. In [`swiglu_core::Rounding::Eager`] it rounds where
    /// PyTorch's autograd of the composed operations does, else once.
    ///
    /// # Errors
    /// As [`Cuda::activation`]; [`Error::Shape`] if `grads` is arranged otherwise than `inputs`.
    pub fn activation_backward<T: Element>(
        &self,
        stream: &Stream,
        act: &Activation,
        numerics: Numerics,
        out_grad: DeviceMatrixRef<'_, T>,
        inputs: DeviceGateUp<'_, T>,
        grads: DeviceGateUpMut<'_, T>,
    ) -> Result<()> {
        self.expect_stream(stream)?;
        expect_gate(act, T::DTYPE)?;
        let layout = inputs.layout;
        if grads.layout != layout {
            let show = |l: Layout| format!("[{}, {}] {}", l.rows, l.intermediate, l.arrangement);
            return Err(CudaError::Core(Error::Shape {
                what: "gradients of gate and up".into(),
                expected: show(layout),
                given: show(grads.layout),
            }));
        }
        out_grad.admit("gradient of the output", [layout.rows, layout.intermediate], stream)?;
        inputs.tensors.iter().try_for_each(|t| t.admit("gate and up", t.shape(), stream))?;
        let (first, second) = &grads.tensors;
        for tensor in [Some(first), second.as_ref()].into_iter().flatten() {
            tensor.admit("gradients", tensor.shape(), stream)?;
        }
        let views = grads.views();
        let gate_up = layout.gate_up::<T>(inputs.tensors.map(|t| tensor(&t)));
        let grad_tensors = layout.gate_up::<T>(views.map(|t| tensor(&t)));
        // SAFETY: as in `activation`; the gradients are borrowed mutably.
        unsafe {
            let extent = extent::<T>(act, numerics, &layout);
            elementwise::backward(stream, extent, tensor(&out_grad), gate_up, grad_tensors)
        }
    }

    /// h = act(gate, up) for matrices on the host: copied to the device and back.
    ///
    /// # Errors
    /// As [`Cuda::activation`]; [`CudaError::OutOfMemory`].
    pub fn activation_host<T: Element>(
        &self,
        act: &Activation,
        numerics: Numerics,
        inputs: GateUpRef<'_, T>,
        out: MatrixMut<'_, T>,
    ) -> Result<()> {
        out.expect_shape("output", [inputs.rows(), inputs.intermediate()])?;
        let arrangement = inputs.arrangement();
        let [first, second] = inputs.tensors();
        let second = (!arrangement.is_packed()).then_some(second);
        through_device(self, (first, second), out, |stream, first, second, h| {
            let inputs = match second {
                Some(second) => DeviceGateUp::separate(first, second)?,
                None => DeviceGateUp::packed(first, arrangement)?,
            };
            self.activation(stream, act, numerics, inputs, h)
        })
    }

    /// (∂L/∂gate, ∂L/∂up) for matrices on the host: copied to the device and back.
    ///
    /// # Errors
    /// As [`Cuda::activation_backward`]; [`CudaError::OutOfMemory`].
    pub fn activation_backward_host<T: Element>(
        &self,
        act: &Activation,
        numerics: Numerics,
        out_grad: MatrixRef<'_, T>,
        inputs: GateUpRef<'_, T>,
        mut grads: GateUpMut<'_, T>,
    ) -> Result<()> {
        let stream = self.stream();
        let upload = |m| DeviceMatrix::from_host(&stream, m);
        let room = |[rows, cols]: [usize; 2]| DeviceMatrix::<T>::new(&stream, rows, cols);
        let (from, to) = (inputs.arrangement(), grads.arrangement());
        let [first, second] = inputs.tensors();
        let (dh, first) = (upload(out_grad)?, upload(first)?);
        let second = (!from.is_packed()).then(|| upload(second)).transpose()?;
        let on_device = match &second {
            Some(second) => DeviceGateUp::separate(first.view(), second.view())?,
            None => DeviceGateUp::packed(first.view(), from)?,
        };
        let (first_grad, second_grad) = grads.tensors_mut();
        let mut first = room(first_grad.shape())?;
        let mut second = second_grad.as_ref().map(|m| room(m.shape())).transpose()?;
        let into = match &mut second {
            Some(second) => DeviceGateUpMut::separate(first.view_mut(), second.view_mut())?,
            None => DeviceGateUpMut::packed(first.view_mut(), to)?,
        };
        self.activation_backward(&stream, act, numerics, dh.view(), on_device, into)?;
        first.view().download(&stream, first_grad)?;
        match second.zip(second_grad) {
            Some((second, place)) => second.view().download(&stream, place),
            None => Ok(()),
        }
    }
}
