//! A forward and a backward pass as one call: over matrices of the host on any device, and over data that is in a
//! CUDA device's memory already.

use swiglu::{
    CallOptions, Element, GradientShapes, Gradients, Matrix, MatrixRef, Orientation, Problem,
    SavePolicy, Wanted,
};
use swiglu_cuda::{CudaError, DeviceGradientsMut, DeviceKeptMut, DeviceMatrix, Stream};

use crate::layer::{Packed, either, out_features};

/// The result of a layer, and the gradients where it trains.
pub(crate) struct Step<T> {
    pub(crate) y: Matrix<T>,
    pub(crate) gradients: Option<Gradients<T>>,
    /// How gate's and up's weights lie, and down's.
    lie: [Orientation; 2],
}

impl<T: Element> Step<T> {
    /// Room for those of a problem whose down weight lies so.
    pub(crate) fn new(problem: &Problem, down: Orientation) -> swiglu_core::Result<Self> {
        let shapes = GradientShapes::new(problem, down);
        let gradients = Gradients::zeros(problem.m, &shapes, Wanted::ALL, problem.bias)?;
        let y = Matrix::zeros(problem.m, out_features(problem))?;
        Ok(Self { y, gradients: Some(gradients), lie: [problem.layout.orientation, down] })
    }

    /// Room for a result alone.
    pub(crate) fn forward(rows: usize, cols: usize) -> swiglu_core::Result<Self> {
        Ok(Self { y: Matrix::zeros(rows, cols)?, gradients: None, lie: [Orientation::OutIn; 2] })
    }

    /// Computes what there is room for, of the gradient of the result; the bytes that were kept between the passes.
    pub(crate) fn run(
        &mut self,
        layer: &Packed,
        x: MatrixRef<'_, T>,
        out_grad: MatrixRef<'_, T>,
    ) -> swiglu::Result<usize> {
        let Self { y, gradients, .. } = self;
        let Some(gradients) = gradients else {
            return layer.forward_into(x, y.view_mut()).map(|()| 0);
        };
        either!(layer, layer => {
            let saved = layer.forward_train_into(x, y)?;
            let kept = saved.kept_bytes();
            layer.backward_into(saved, out_grad, gradients.as_mut(), &CallOptions::default())?;
            Ok(kept)
        })
    }

    /// y and the gradients of x and of the weights, with how each lies.
    pub(crate) fn matrices(&self) -> impl Iterator<Item = (&Matrix<T>, Orientation)> {
        let ([gate_up, down], rows) = (self.lie, Orientation::OutIn);
        let gradients = self.gradients.iter().flat_map(move |g| {
            [(&g.dx, rows), (&g.gate, gate_up), (&g.up, gate_up), (&g.down, down)]
        });
        let gradients = gradients.filter_map(|(m, lie)| Some((m.as_ref()?, lie)));
        [(&self.y, rows)].into_iter().chain(gradients)
    }

    /// All of its matrices.
    pub(crate) fn matrices_mut(&mut self) -> impl Iterator<Item = &mut Matrix<T>> {
        let gradients = self.gradients.iter_mut();
        let gradients = gradients.flat_map(|g| [&mut g.dx, &mut g.gate, &mut g.up, &mut g.down]);
        [&mut self.y].into_iter().chain(gradients.flatten())
    }
}

/// A layer's data on a device: what both passes read, and where all of it goes.
pub(crate) struct StepOnDevice<T> {
    problem: Problem,
    /// How the down weight lies.
    down_lies: Orientation,
    policy: SavePolicy,
    x: DeviceMatrix<T>,
    out_grad: DeviceMatrix<T>,
    y: DeviceMatrix<T>,
    /// The gate, and behind it the up as one product takes both: that of the policy, or one to compute it again.
    kept: DeviceMatrix<T>,
    dx: DeviceMatrix<T>,
    /// Of the gate's weight and of the up's: where their rows are output features, in one matrix.
    weights: Vec<DeviceMatrix<T>>,
    down: Option<DeviceMatrix<T>>,
    /// Of gate, up and down.
    biases: Vec<DeviceMatrix<f32>>,
}

impl<T: Element> StepOnDevice<T> {
    /// Of x and the gradient of the result.
    pub(crate) fn new(
        stream: &Stream,
        problem: &Problem,
        down_lies: Orientation,
        policy: SavePolicy,
        [x, out_grad]: [MatrixRef<'_, T>; 2],
    ) -> Result<Self, CudaError> {
        let [m, k, h] = [x.rows(), problem.hidden, problem.intermediate];
        let shapes = GradientShapes::new(problem, down_lies);
        let new = |[rows, cols]: [usize; 2]| DeviceMatrix::new(stream, rows, cols);
        let [rows, cols] = shapes.gate_up;
        let weights = match problem.layout.orientation {
            Orientation::OutIn => vec![new([2 * rows, cols])?],
            Orientation::InOut => vec![new([rows, cols])?, new([rows, cols])?],
        };
        let biases = if problem.bias { vec![h, h, k] } else { Vec::new() };
        let bias = |n: usize| DeviceMatrix::new(stream, 1, n);
        let kept = padded::<T>(h) * if policy == SavePolicy::SaveGate { 1 } else { 2 };
        Ok(Self {
            problem: problem.with_m(m),
            down_lies,
            policy,
            x: DeviceMatrix::from_host(stream, x)?,
            out_grad: DeviceMatrix::from_host(stream, out_grad)?,
            y: new([m, out_features(problem)])?,
            kept: new([m, kept])?,
            dx: new([m, k])?,
            weights,
            down: shapes.down.map(new).transpose()?,
            biases: biases.into_iter().map(bias).collect::<Result<_, _>>()?,
        })
    }

    /// Enqueues both passes. What is not kept between them is computed again at the beginning of the second.
    pub(crate) fn enqueue(&mut self, stream: &Stream, layer: &Packed) -> swiglu::Result<()> {
        let h = self.problem.intermediate;
        let (x, y, kept) = (self.x.view(), &mut self.y, &mut self.kept);
        let mut into = DeviceGradientsMut::default().with_dx(self.dx.view_mut());
        into = match self.weights.as_mut_slice() {
            [gate, up] => into.with_gate(gate.view_mut()).with_up(up.view_mut()),
            both => {
                let rows = both[0].rows() / 2;
                let (gate, up) = both[0].view_mut().split_rows(rows)?;
                into.with_gate(gate).with_up(up)
            }
        };
        if let [gate, up, down] = self.biases.as_mut_slice() {
            into = into.with_gate_bias(gate.view_mut()).with_up_bias(up.view_mut());
            into.down_bias = self.down.is_some().then(|| down.view_mut());
        }
        if let Some(down) = &mut self.down {
            into = into.with_down(down.view_mut());
        }
        let dy = self.out_grad.view();
        either!(layer, layer => {
            if self.policy == SavePolicy::Recompute {
                layer.forward_on(stream, x, y.view_mut())?;
                layer.pre_activations_on(stream, x, pre_activations(kept, h)?, None)?;
            } else {
                layer.forward_saving_on(stream, x, y.view_mut(), pre_activations(kept, h)?, None)?;
            }
            layer.backward_on(stream, x, dy, pre_activations(kept, h)?, into)
        })
    }

    /// Fills with NaN where results go.
    pub(crate) fn poison(&mut self) -> Result<(), CudaError> {
        let results = [&mut self.y, &mut self.dx].into_iter().chain(&mut self.weights);
        results.chain(&mut self.down).try_for_each(|m| m.buffer_mut().poison(0xFF))
    }

    /// The results but for gradients of biases, with how each lies.
    pub(crate) fn to_host(
        &self,
        stream: &Stream,
    ) -> Result<Vec<(Matrix<T>, Orientation)>, CudaError> {
        let weights: Vec<_> = match self.weights.as_slice() {
            [both] => {
                let (both, rows) = (both.view(), both.rows() / 2);
                vec![both.rows_range(0..rows)?, both.rows_range(rows..2 * rows)?]
            }
            apart => apart.iter().map(DeviceMatrix::view).collect(),
        };
        let lies = self.problem.layout.orientation;
        let rows = [self.y.view(), self.dx.view()].map(|m| (m, Orientation::OutIn));
        let down = self.down.iter().map(|m| (m.view(), self.down_lies));
        let all = rows.into_iter().chain(weights.into_iter().map(|m| (m, lies))).chain(down);
        all.map(|(m, lies)| Ok((m.to_host(stream)?, lies))).collect()
    }
}

/// Gate and up in the matrix that has both, or the gate in one that has no more.
fn pre_activations<T: Element>(
    kept: &mut DeviceMatrix<T>,
    intermediate: usize,
) -> Result<DeviceKeptMut<'_, T>, CudaError> {
    let has_up = kept.cols() > padded::<T>(intermediate);
    let (gate, up) = kept.view_mut().split_cols(padded::<T>(intermediate))?;
    let gate = gate.cols_range(0..intermediate)?;
    Ok(match has_up {
        true => [gate, up.cols_range(0..intermediate)?].into(),
        false => gate.into(),
    })
}

/// Columns of a matrix whose rows are whole 16 bytes.
fn padded<T>(columns: usize) -> usize {
    columns.next_multiple_of(16 / size_of::<T>())
}
