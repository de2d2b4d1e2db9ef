//! One call of a layer, a forward pass or a backward pass behind it, with its data and results: over matrices of the host on
//! any device, and over data that is in a CUDA device's memory already.

use anyhow::{Result, bail};
use swiglu::{
    CallOptions, Element, GradientShapes, Gradients, Matrix, MatrixRef, Orientation, Problem,
    SavePolicy, Wanted,
};
use swiglu_cuda::{
    Candidate, Cuda, CudaError, DeviceGradientsMut, DeviceKeptMut, DeviceMatrix, Stream,
};

use crate::layer::{Packed, Params, either, out_features};

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

    pub(crate) fn matrices_mut(&mut self) -> impl Iterator<Item = &mut Matrix<T>> {
        let gradients = self.gradients.iter_mut();
        let gradients = gradients.flat_map(|g| [&mut g.dx, &mut g.gate, &mut g.up, &mut g.down]);
        [&mut self.y].into_iter().chain(gradients.flatten())
    }
}

/// A call's data on a device: what it reads, and where its results go.
pub(crate) struct OnDevice<T> {
    /// x, or gate and up; behind them, of a backward pass, the gradient of the result.
    pub(crate) read: Vec<DeviceMatrix<T>>,
    /// The result, or what a backward pass of an activation gives; of a training step y, then the gradients of x, of the
    /// weights of gate and up (where their rows are output features, in one matrix) and of the down weight.
    pub(crate) written: Vec<DeviceMatrix<T>>,
    training: Option<Training<T>>,
}

/// What a training step has beside the data of a forward pass.
struct Training<T> {
    problem: Problem,
    down_lies: Orientation,
    policy: SavePolicy,
    /// The gate, and behind it the up as one product takes both: that of the policy, or one to compute it again.
    kept: DeviceMatrix<T>,
    biases: Vec<DeviceMatrix<f32>>,
}

impl<T: Element> OnDevice<T> {
    /// Copies of what is read, and room for results of these shapes.
    pub(crate) fn new(
        stream: &Stream,
        read: &[MatrixRef<'_, T>],
        written: impl IntoIterator<Item = [usize; 2]>,
    ) -> Result<Self, CudaError> {
        let written = written.into_iter();
        let written = written.map(|[rows, cols]| DeviceMatrix::new(stream, rows, cols));
        let read = read.iter().map(|m| DeviceMatrix::from_host(stream, *m));
        Ok(Self {
            written: written.collect::<Result<_, _>>()?,
            read: read.collect::<Result<_, _>>()?,
            training: None,
        })
    }

    /// The same for a training step, of x and the gradient of the result.
    pub(crate) fn step(
        stream: &Stream,
        problem: &Problem,
        down_lies: Orientation,
        policy: SavePolicy,
        read: &[MatrixRef<'_, T>],
    ) -> Result<Self, CudaError> {
        let (m, k, h) = (read[0].rows(), problem.hidden, problem.intermediate);
        let shapes = GradientShapes::new(problem, down_lies);
        let [rows, cols] = shapes.gate_up;
        let weights = match problem.layout.orientation {
            Orientation::OutIn => vec![[2 * rows, cols]],
            Orientation::InOut => vec![[rows, cols]; 2],
        };
        let results = [[m, out_features(problem)], [m, k]].into_iter().chain(weights);
        let biases = if problem.bias { vec![h, h, k] } else { Vec::new() };
        let bias = |n: usize| DeviceMatrix::new(stream, 1, n);
        let kept = padded::<T>(h) * if policy == SavePolicy::SaveGate { 1 } else { 2 };
        let training = Training {
            problem: problem.with_m(m),
            down_lies,
            policy,
            kept: DeviceMatrix::new(stream, m, kept)?,
            biases: biases.into_iter().map(bias).collect::<Result<_, _>>()?,
        };
        let data = Self::new(stream, read, results.chain(shapes.down))?;
        Ok(Self { training: Some(training), ..data })
    }

    /// Enqueues the pass, or both. What is not kept between them is computed again at the beginning of the second.
    pub(crate) fn enqueue(&mut self, stream: &Stream, layer: &Packed) -> swiglu::Result<()> {
        let Some((y, gradients)) = self.written.split_first_mut() else { return Ok(()) };
        let x = self.read[0].view();
        let (Some(training), [dx, weights @ ..]) = (&mut self.training, gradients) else {
            return either!(layer, layer => layer.forward_on(stream, x, y.view_mut()));
        };
        let Training { problem, policy, kept, biases, .. } = training;
        let into = DeviceGradientsMut::default().with_dx(dx.view_mut());
        let (mut into, down) = match (problem.layout.orientation, weights) {
            (Orientation::InOut, [gate, up, down @ ..]) => {
                (into.with_gate(gate.view_mut()).with_up(up.view_mut()), down)
            }
            (_, [both, down @ ..]) => {
                let rows = both.rows() / 2;
                let (gate, up) = both.view_mut().split_rows(rows)?;
                (into.with_gate(gate).with_up(up), down)
            }
            (_, none) => (into, none),
        };
        if let [gate, up, of_down] = biases.as_mut_slice() {
            into = into.with_gate_bias(gate.view_mut()).with_up_bias(up.view_mut());
            into.down_bias = (!down.is_empty()).then(|| of_down.view_mut());
        }
        if let [down] = down {
            into = into.with_down(down.view_mut());
        }
        let (dy, h) = (self.read[1].view(), problem.intermediate);
        either!(layer, layer => {
            if *policy == SavePolicy::Recompute {
                layer.forward_on(stream, x, y.view_mut())?;
                layer.pre_activations_on(stream, x, pre_activations(kept, h)?, None)?;
            } else {
                layer.forward_saving_on(stream, x, y.view_mut(), pre_activations(kept, h)?, None)?;
            }
            layer.backward_on(stream, x, dy, pre_activations(kept, h)?, into, None)
        })
    }

    /// Fills with NaN where results go, but for gradients of biases.
    pub(crate) fn poison(&mut self) -> Result<(), CudaError> {
        self.written.iter_mut().try_for_each(|m| m.buffer_mut().poison(0xFF))
    }

    /// The results but for gradients of biases, with how each lies.
    pub(crate) fn to_host(
        &self,
        stream: &Stream,
    ) -> Result<Vec<(Matrix<T>, Orientation)>, CudaError> {
        let rows = Orientation::OutIn;
        let (gate_up, down) = match &self.training {
            Some(Training { problem, down_lies, .. }) => (problem.layout.orientation, *down_lies),
            None => (rows, rows),
        };
        let mut views: Vec<_> = self.written.iter().map(DeviceMatrix::view).collect();
        if self.training.is_some() && gate_up == rows {
            let (both, half) = (views[2], views[2].rows() / 2);
            views.splice(2..3, [both.rows_range(0..half)?, both.rows_range(half..2 * half)?]);
        }
        let lie = [rows, rows, gate_up, gate_up, down];
        views.into_iter().zip(lie).map(|(m, lies)| Ok((m.to_host(stream)?, lies))).collect()
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

/// A call of a layer on a CUDA device by one of its candidates.
pub(crate) type ByCandidate<T> =
    Box<dyn Fn(&Stream, &Candidate, &mut OnDevice<T>) -> Result<(), CudaError>>;

/// So many copies of a layer, with weights packed on the device.
pub(crate) fn by_candidate<T: Element>(
    cuda: &Cuda,
    params: &Params<'_, T>,
    count: usize,
) -> Result<Vec<ByCandidate<T>>> {
    macro_rules! by {
        ($layer:expr) => {{
            let layer = $layer;
            Box::new(move |stream: &Stream, by: &Candidate, data: &mut OnDevice<T>| {
                layer.forward_by(stream, by, data.read[0].view(), data.written[0].view_mut())
            })
        }};
    }
    let layer = |_| -> Result<ByCandidate<T>> {
        Ok(match params {
            Params::GatedLinear(params) => by!(swiglu_cuda::GatedLinear::new(cuda, params)?),
            Params::Mlp(params) => by!(swiglu_cuda::Mlp::new(cuda, params)?),
            _ => bail!("quantised weights have one way"),
        })
    };
    (0..count).map(layer).collect()
}
