//! Training over matrices of the host, which are copied to the device and back.

use swiglu_core::{
    Accumulate, Element, GradientMut, GradientShapes, GradientsMut, Matrix, MatrixMut, MatrixRef,
    RowScale, SavePolicy, StridedRef,
};

use super::kept::DeviceKeptMut;
use crate::device::error::{CudaError, Result};
use crate::device::memory::{DeviceData, DeviceMatrix};
use crate::device::stream::Stream;
use crate::layers::gradients::{DeviceGradientMut, DeviceGradientsMut};
use crate::layers::layer::Layer;
use crate::layers::weights::padded;

/// What a forward pass leaves on the device for [`Layer::backward_host`]: x, and gate and up as the policy says.
#[derive(Debug)]
pub struct HostSaved<T> {
    /// The layer that kept it.
    of: u64,
    x: DeviceMatrix<T>,
    kept: Option<Kept<T>>,
}

/// The pre-activations on the device, each padded as weights are, which is how one product takes both.
#[derive(Debug)]
struct Kept<T> {
    matrix: DeviceMatrix<T>,
    /// H.
    intermediate: usize,
    /// Whether up lies beside the gate.
    has_up: bool,
}

impl<T: Element> Kept<T> {
    fn new(stream: &Stream, rows: usize, intermediate: usize, has_up: bool) -> Result<Self> {
        let cols = padded::<T>(intermediate) * if has_up { 2 } else { 1 };
        let matrix = DeviceMatrix::new(stream, rows, cols)?;
        Ok(Self { matrix, intermediate, has_up })
    }

    fn view_mut(&mut self) -> Result<DeviceKeptMut<'_, T>> {
        let h = self.intermediate;
        let (gate, up) = self.matrix.view_mut().split_cols(padded::<T>(h))?;
        let (gate, up) = (gate.cols_range(0..h)?, self.has_up.then(|| up.cols_range(0..h)));
        Ok(DeviceKeptMut { gate, up: up.transpose()? })
    }
}

impl<T: Element> HostSaved<T> {
    /// Tokens.
    pub fn tokens(&self) -> usize {
        self.x.rows()
    }

    /// Bytes of device memory that are kept between the passes, beside x.
    pub fn kept_bytes(&self) -> usize {
        let bytes = |kept: &Kept<T>| kept.matrix.rows() * kept.matrix.cols() * size_of::<T>();
        self.kept.as_ref().map_or(0, bytes)
    }
}

impl<K, T: Element> Layer<K, T> {
    /// [`Self::forward_saving`] for matrices on the host. What the layer's policy does not keep is computed again in the
    /// backward pass.
    ///
    /// # Errors
    /// As [`Self::forward_saving`].
    pub fn forward_saving_host(
        &self,
        x: MatrixRef<'_, T>,
        out: MatrixMut<'_, T>,
    ) -> Result<HostSaved<T>> {
        x.expect_shape("x", [x.rows(), self.hidden()])?;
        out.expect_shape("output", [x.rows(), self.out_features()])?;
        let stream = self.cuda.stream();
        let x = DeviceMatrix::from_host(&stream, x)?;
        let mut y = DeviceMatrix::new(&stream, x.rows(), self.out_features())?;
        let policy = self.policy().unwrap_or_default();
        let kept = match policy {
            SavePolicy::Save | SavePolicy::SaveGate => {
                let mut kept =
                    Kept::new(&stream, x.rows(), self.intermediate(), policy == SavePolicy::Save)?;
                self.forward_saving(&stream, x.view(), y.view_mut(), kept.view_mut()?)?;
                Some(kept)
            }
            _ => {
                self.forward(&stream, x.view(), y.view_mut())?;
                None
            }
        };
        y.view().download(&stream, out)?;
        Ok(HostSaved { of: self.id, x, kept })
    }

    /// The shapes of the layer's gradients.
    ///
    /// # Errors
    /// [`CudaError::Unsupported`] for quantised weights.
    pub fn gradient_shapes(&self) -> Result<GradientShapes> {
        Ok(GradientShapes::new(&self.problem, self.down_lies()?))
    }

    /// [`Self::backward`] for matrices on the host; ∂L/∂y may lie in any strides.
    ///
    /// # Errors
    /// As [`Self::backward`]; [`CudaError::Unsupported`] for what another layer kept.
    pub fn backward_host(
        &self,
        saved: HostSaved<T>,
        dy: StridedRef<'_, T>,
        mut into: GradientsMut<'_, T>,
    ) -> Result<()> {
        let HostSaved { of, x, kept } = saved;
        if of != self.id {
            return Err(CudaError::Unsupported {
                what: "a backward pass with what another layer kept".into(),
                why: "the layer that ran forward runs backward, with the weights that it had; an update makes it another".into(),
            });
        }
        let (m, stream) = (x.rows(), self.cuda.stream());
        into.validate(m, &self.gradient_shapes()?)?;
        let rows = dy.to_rows()?;
        let rows = rows.view()?;
        rows.expect_shape("gradient of the output", [m, self.out_features()])?;
        // Rows that do not overlap.
        let dense = (0..m).flat_map(|row| rows.row(row).iter().copied());
        let dense = Matrix::from_values(dense, m, rows.cols())?;
        let dy = DeviceMatrix::from_host(&stream, dense.view())?;
        let mut kept = match kept {
            Some(kept) => kept,
            None => {
                let mut kept = Kept::new(&stream, m, self.intermediate(), true)?;
                self.pre_activations(&stream, x.view(), kept.view_mut()?, None)?;
                kept
            }
        };
        let add = into.accumulate == Accumulate::Add;
        let matrix = |to: MatrixRef<'_, T>, add| place(&stream, to, add);
        let mut dx = into.dx.as_ref().map(|to| matrix(to.as_ref(), false)).transpose()?;
        let weight = |to: &Option<GradientMut<'_, T>>| {
            to.as_ref().map(|to| Weight::new(&stream, to, add)).transpose()
        };
        let mut weights = [weight(&into.gate)?, weight(&into.up)?, weight(&into.down)?];
        let bias = |to: &Option<&mut [f32]>| {
            let to = to.as_ref().map(|to| MatrixRef::new(to, 1, to.len())).transpose()?;
            to.map(|to| place(&stream, to, add)).transpose()
        };
        let mut biases = [bias(&into.gate_bias)?, bias(&into.up_bias)?, bias(&into.down_bias)?];
        let factors = match into.row_scale {
            RowScale::None => None,
            scale => {
                let factors = Matrix::from_values((0..m).map(|row| scale.of_row(row)), 1, m)?;
                Some(DeviceMatrix::from_host(&stream, factors.view())?)
            }
        };
        let of_factors = into.row_scale_grad.is_some().then(|| DeviceMatrix::new(&stream, 1, m));
        let mut of_factors = of_factors.transpose()?;
        {
            let [gate, up, down] = weights.each_mut().map(|w| w.as_mut().map(Weight::place));
            let [gate_bias, up_bias, down_bias] =
                biases.each_mut().map(|b| b.as_mut().map(DeviceMatrix::view_mut));
            let there = DeviceGradientsMut {
                dx: dx.as_mut().map(DeviceMatrix::view_mut),
                gate,
                up,
                down,
                gate_bias,
                up_bias,
                down_bias,
                row_scale: factors.as_ref().map(DeviceMatrix::view),
                row_scale_grad: of_factors.as_mut().map(DeviceMatrix::view_mut),
                ..DeviceGradientsMut::default().with_accumulate(into.accumulate)
            };
            self.backward(&stream, x.view(), dy.view(), kept.view_mut()?, there, None)?;
        }
        if let (Some(from), Some(to)) = (dx, &mut into.dx) {
            from.view().download(&stream, to.reborrow())?;
        }
        let places = [&mut into.gate, &mut into.up, &mut into.down];
        for (from, to) in weights.iter().zip(places) {
            if let (Some(from), Some(to)) = (from, to) {
                from.download(&stream, to)?;
            }
        }
        let places =
            [&mut into.gate_bias, &mut into.up_bias, &mut into.down_bias, &mut into.row_scale_grad];
        let biases = biases.iter().chain([&of_factors]);
        for (from, to) in biases.zip(places) {
            if let (Some(from), Some(to)) = (from, to) {
                let cols = to.len();
                from.view().download(&stream, MatrixMut::new(to, 1, cols)?)?;
            }
        }
        Ok(())
    }
}

/// Room on the device for a gradient, with what it is added to.
fn place<V: DeviceData>(
    stream: &Stream,
    host: MatrixRef<'_, V>,
    add: bool,
) -> Result<DeviceMatrix<V>> {
    match add {
        true => DeviceMatrix::from_host(stream, host),
        false => DeviceMatrix::new(stream, host.rows(), host.cols()),
    }
}

/// The gradient of a weight on the device.
enum Weight<T> {
    Element(DeviceMatrix<T>),
    F32(DeviceMatrix<f32>),
}

impl<T: Element> Weight<T> {
    fn new(stream: &Stream, host: &GradientMut<'_, T>, add: bool) -> Result<Self> {
        match host {
            GradientMut::Element(host) => place(stream, host.as_ref(), add).map(Self::Element),
            GradientMut::F32(host) => place(stream, host.as_ref(), add).map(Self::F32),
            other => Err(unknown(other)),
        }
    }

    fn place(&mut self) -> DeviceGradientMut<'_, T> {
        match self {
            Self::Element(m) => DeviceGradientMut::Element(m.view_mut()),
            Self::F32(m) => DeviceGradientMut::F32(m.view_mut()),
        }
    }

    fn download(&self, stream: &Stream, host: &mut GradientMut<'_, T>) -> Result<()> {
        match (self, host) {
            (Self::Element(from), GradientMut::Element(to)) => {
                from.view().download(stream, to.reborrow())
            }
            (Self::F32(from), GradientMut::F32(to)) => from.view().download(stream, to.reborrow()),
            (_, other) => Err(unknown(other)),
        }
    }
}

fn unknown<T: Element>(place: &GradientMut<'_, T>) -> CudaError {
    CudaError::Unsupported { what: format!("{place:?}"), why: "no such place is known".into() }
}
