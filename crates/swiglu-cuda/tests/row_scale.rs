//! Gradients through factors of a block's rows, and those of the factors.

// Helpers of tests may unwrap as tests do.
#![allow(clippy::unwrap_used)]

use crate::common;
use swiglu_core::conformance::{Case, Parameters};
use swiglu_core::{
    Accumulate, DType, Element, GradientsMut, Matrix, Numerics, Op, Path, RowScale, SavePolicy,
    bf16, bounds, f16, random,
};
use swiglu_cuda::{
    Cuda, DeviceBuffer, DeviceGradientsMut, DeviceMatrix, DeviceScratch, GatedLinear, Mlp, Stream,
};

/// A block with biases, what its forward pass kept, and ∂L/∂y.
struct Trained<T> {
    layer: Mlp<T>,
    parameters: Parameters<T>,
    stream: Stream,
    host: [Matrix<T>; 2],
    x: DeviceMatrix<T>,
    dy: DeviceMatrix<T>,
    kept: [DeviceMatrix<T>; 2],
    shape: [usize; 3],
}

/// Gradients of everything, and those of the factors, in memory that held NaN.
#[derive(Debug, Clone, PartialEq)]
struct Found<T> {
    dx: Matrix<T>,
    weights: [Matrix<T>; 3],
    biases: [Vec<f32>; 3],
    of_factors: Vec<f32>,
}

/// Bytes behind scratch memory, which nothing may write.
const GUARD: usize = 4096;

/// Which gradients are wanted beside those of the factors.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Beside {
    All,
    Nothing,
    Down,
}

impl<T: Element> Trained<T> {
    fn new(cuda: &Cuda, shape: [usize; 3], path: Option<Path>, numerics: Numerics) -> Self {
        let [m, k, h] = shape;
        let case = Case { bias: true, numerics, ..Case::new(Op::Mlp, shape, T::DTYPE) };
        let parameters = Parameters::<T>::new(&case).unwrap();
        let layer = match path {
            None => Mlp::new(cuda, &parameters.mlp()),
            Some(path) => Mlp::with_path(cuda, &parameters.mlp(), path),
        };
        let (layer, stream) = (layer.unwrap(), cuda.new_stream().unwrap());
        let host = [1, 2].map(|seed| random::normal_matrix::<T>(seed, m, k, 1.0).unwrap());
        let [x, dy] = host.each_ref().map(|m| DeviceMatrix::from_host(&stream, m.view()).unwrap());
        let new = |cols| DeviceMatrix::<T>::zeros(&stream, m, cols).unwrap();
        let (mut y, mut gate, mut up) = (new(k), new(h), new(h));
        let kept = [gate.view_mut(), up.view_mut()];
        layer.forward_saving(&stream, x.view(), y.view_mut(), kept).unwrap();
        Self { layer, parameters, stream, host, x, dy, kept: [gate, up], shape }
    }

    /// The gradients of rows times these factors, 1 where there are none, by scratch memory of the caller's with `spare` bytes
    /// beyond what is asked for.
    fn backward(
        &self,
        dy: &DeviceMatrix<T>,
        factors: Option<&[f32]>,
        beside: Beside,
        spare: Option<isize>,
    ) -> swiglu_cuda::Result<Found<T>> {
        let ([m, k, h], stream) = (self.shape, &self.stream);
        fn poisoned<V: swiglu_cuda::DeviceData>(
            stream: &Stream,
            rows: usize,
            cols: usize,
        ) -> DeviceMatrix<V> {
            let mut to = DeviceMatrix::<V>::new(stream, rows, cols).unwrap();
            to.buffer_mut().poison(0xFF).unwrap();
            to
        }
        let [mut dx, mut gate, mut up, mut down] =
            [[m, k], [h, k], [h, k], [k, h]].map(|[r, c]| poisoned::<T>(stream, r, c));
        let [mut gate_bias, mut up_bias, mut down_bias, mut of_factors] =
            [h, h, k, m].map(|n| poisoned::<f32>(stream, 1, n));
        let factors = factors.map(|factors| {
            let row = Matrix::from_vec(factors.to_vec(), 1, m).unwrap();
            DeviceMatrix::from_host(stream, row.view()).unwrap()
        });
        let mut into = DeviceGradientsMut::default().with_row_scale_grad(of_factors.view_mut());
        into.row_scale = factors.as_ref().map(DeviceMatrix::view);
        if beside != Beside::Nothing {
            into = into.with_down(down.view_mut());
        }
        if beside == Beside::All {
            into = into
                .with_dx(dx.view_mut())
                .with_gate(gate.view_mut())
                .with_up(up.view_mut())
                .with_gate_bias(gate_bias.view_mut())
                .with_up_bias(up_bias.view_mut())
                .with_down_bias(down_bias.view_mut());
        }
        let kept = self.kept.each_ref().map(DeviceMatrix::view);
        let x = self.x.view();
        match spare {
            None => self.layer.backward(stream, x, dy.view(), kept, into, None)?,
            Some(spare) => {
                let bytes = self.layer.backward_bytes(&dy.view(), &kept.into(), &into)?;
                let bytes = bytes.saturating_add_signed(spare);
                let mut buffer = DeviceBuffer::<f32>::new(stream, (bytes + GUARD) / 4)?;
                buffer.poison(0xFF)?;
                // SAFETY: the buffer outlives the call's work, which its copy below waits for.
                let mut scratch =
                    unsafe { DeviceScratch::from_raw(stream.cuda(), buffer.device_ptr(), bytes) }?;
                self.layer.backward(stream, x, dy.view(), kept, into, Some(&mut scratch))?;
                let behind = buffer.to_host()?.split_off(bytes / 4);
                let untouched = |v: &f32| v.to_bits() == u32::MAX;
                assert!(behind.iter().all(untouched), "written behind the scratch memory");
            }
        }
        let vector =
            |m: DeviceMatrix<f32>| Ok::<_, swiglu_cuda::CudaError>(m.to_host()?.into_vec());
        Ok(Found {
            dx: dx.to_host()?,
            weights: [gate.to_host()?, up.to_host()?, down.to_host()?],
            biases: [vector(gate_bias)?, vector(up_bias)?, vector(down_bias)?],
            of_factors: vector(of_factors)?,
        })
    }
}

/// The last ones are of the tile for large K, and without features.
const SHAPES: [[usize; 3]; 6] =
    [[70, 64, 200], [130, 72, 264], [5, 63, 101], [33, 64, 96], [5, 2048, 64], [3, 64, 0]];

/// Factors that round nothing are as good before the down projection as behind it; the gradient of a factor does not depend on
/// it, nor on what else is wanted, and lies within its bounds.
#[test]
fn factors_of_rows_are_those_of_dy() {
    fn check<T: Element>(cuda: &Cuda, shape: [usize; 3], path: Option<Path>, numerics: Numerics) {
        let [m, k, _] = shape;
        let trained = Trained::<T>::new(cuda, shape, path, numerics);
        let what = format!("{shape:?} {path:?} {numerics} {}", T::DTYPE);
        let factors: Vec<f32> = (0..m).map(|row| [1.0, 0.0, -2.0, 0.25][row % 4]).collect();
        let dy = trained.host[1].as_slice().iter().enumerate();
        let scaled_dy = dy.map(|(at, v)| T::from_f32(v.to_f32() * factors[at / k]));
        let scaled_dy = Matrix::from_values(scaled_dy, m, k).unwrap();
        let scaled_dy = DeviceMatrix::from_host(&trained.stream, scaled_dy.view()).unwrap();
        let of = |dy, factors, beside| trained.backward(dy, factors, beside, None).unwrap();
        let found = of(&trained.dy, Some(&factors), Beside::All);
        let as_if = of(&scaled_dy, None, Beside::All);
        assert!(found.dx == as_if.dx, "dx {what}");
        assert!(found.weights == as_if.weights, "weights {what}");
        assert!(found.biases == as_if.biases, "biases {what}");
        for (factors, beside) in [
            (None, Beside::All),
            (Some(factors.as_slice()), Beside::Nothing),
            (Some(&vec![0.3; m]), Beside::Down),
        ] {
            let again = of(&trained.dy, factors, beside);
            assert_eq!(again.of_factors, found.of_factors, "{what} {factors:?} {beside:?}");
        }
        let (x, dy) = (&trained.host[0], trained.host[1].view());
        let given = (dy, RowScale::Rows(&factors));
        let params = trained.parameters.mlp();
        let bounds = bounds::scaled_mlp_backward(x.view(), &params, given, T::DTYPE, 0.0);
        let of_factors = Matrix::from_vec(found.of_factors, 1, m).unwrap();
        let judgement = bounds.unwrap().row_scale.unwrap().judge(of_factors.view()).unwrap();
        assert!(judgement.passed(), "{what}: {judgement:?}");
    }
    let Some(cuda) = common::device() else { return };
    for (i, shape) in SHAPES.into_iter().enumerate() {
        for (j, path) in [None, Some(Path::Unfused)].into_iter().enumerate() {
            let numerics = |dtype| {
                let all: Vec<_> = Numerics::all().filter(|n| !n.batch_invariant).collect();
                match dtype {
                    DType::F32 => Numerics::default_for(dtype),
                    _ => all[(3 * i + j) % all.len()],
                }
            };
            check::<bf16>(&cuda, shape, path, numerics(DType::Bf16));
            check::<f32>(&cuda, shape, path, numerics(DType::F32));
        }
    }
}

/// With random factors in half precision: the same bits on every launch, in memory that held anything.
#[test]
fn gradients_of_factors_are_the_same_bits_on_every_launch() {
    let Some(cuda) = common::device() else { return };
    let shape = [130, 64, 200];
    for path in [None, Some(Path::Unfused)] {
        let trained = Trained::<f16>::new(&cuda, shape, path, Numerics::default_for(DType::F16));
        let factors: Vec<f32> = (0..130).map(|row| random::normal(7, row)).collect();
        let of = || trained.backward(&trained.dy, Some(&factors), Beside::All, Some(0)).unwrap();
        let first = of();
        assert!(first.of_factors.iter().all(|v| v.is_finite()));
        for launch in 0..if common::has_gpu() { 1000 } else { 3 } {
            assert!(of() == first, "launch {launch} differs, {path:?}");
        }
    }
}

/// Scratch memory of as many bytes as are asked for is enough, and of fewer is refused.
#[test]
fn scratch_memory_for_factors_is_what_was_said() {
    let Some(cuda) = common::device() else { return };
    for path in [None, Some(Path::Unfused)] {
        let numerics = Numerics::default_for(DType::Bf16);
        let trained = Trained::<bf16>::new(&cuda, [40, 64, 136], path, numerics);
        for beside in [Beside::All, Beside::Nothing, Beside::Down] {
            let of = |spare| trained.backward(&trained.dy, Some(&[0.5; 40]), beside, spare);
            let plain = of(None).unwrap();
            let exact = of(Some(0)).unwrap();
            assert_eq!(exact.of_factors, plain.of_factors, "{path:?} {beside:?}");
            // What has no place stays as it was: NaN, which equals nothing.
            assert!(beside != Beside::All || exact == plain, "{path:?}");
            let error = of(Some(-4)).unwrap_err().to_string();
            assert!(error.contains("backward_bytes"), "{path:?} {beside:?}: {error}");
        }
    }
}

/// Sums of micro-batches in f32 are those of all, with the factors of each.
#[test]
fn factors_of_micro_batches_add_up() {
    fn check<T: Element>(cuda: &Cuda) {
        let (m, k, h) = (48, 64, 96);
        let trained = Trained::<T>::new(cuda, [m, k, h], None, Numerics::default_for(T::DTYPE));
        let factors: Vec<f32> = (0..m as u64).map(|row| random::normal(9, row)).collect();
        let stream = &trained.stream;
        let row = Matrix::from_vec(factors, 1, m).unwrap();
        let factors = DeviceMatrix::from_host(stream, row.view()).unwrap();
        let mut sums =
            [[h, k], [k, h]].map(|[r, c]| DeviceMatrix::<f32>::zeros(stream, r, c).unwrap());
        let mut bias = DeviceMatrix::<f32>::zeros(stream, 1, k).unwrap();
        for rows in [0..16, 16..m] {
            let part = |m: &DeviceMatrix<T>| {
                let host = m.to_host().unwrap();
                let host = host.view().rows_range(rows.clone()).unwrap();
                DeviceMatrix::from_host(stream, host).unwrap()
            };
            let [x, dy, gate, up] =
                [&trained.x, &trained.dy, &trained.kept[0], &trained.kept[1]].map(part);
            // A part of the vector, wherever it begins.
            let factors = factors.view().cols_range(rows.clone()).unwrap();
            let [gate_sum, down_sum] = &mut sums;
            let into = DeviceGradientsMut::default()
                .with_gate_f32(gate_sum.view_mut())
                .with_down_f32(down_sum.view_mut())
                .with_down_bias(bias.view_mut())
                .with_row_scale(factors)
                .with_accumulate(Accumulate::Add);
            let kept = [gate.view(), up.view()];
            trained.layer.backward(stream, x.view(), dy.view(), kept, into, None).unwrap();
        }
        let given = (trained.host[1].view(), RowScale::Rows(row.as_slice()));
        let params = trained.parameters.mlp();
        let x = trained.host[0].view();
        let expected = bounds::scaled_mlp_backward(x, &params, given, DType::F32, 0.0).unwrap();
        for (name, sum, reference) in [
            ("gate", &sums[0], &expected.gate),
            ("down", &sums[1], expected.down.as_ref().unwrap()),
            ("down bias", &bias, expected.down_bias.as_ref().unwrap()),
        ] {
            let judgement = reference.judge(sum.to_host().unwrap().view()).unwrap();
            assert!(judgement.passed(), "{name} in {}: {judgement:?}", T::DTYPE);
        }
    }
    let Some(cuda) = common::device() else { return };
    check::<f32>(&cuda);
    check::<bf16>(&cuda);
}

/// Over matrices of the host as over those of the device, and with one factor as with as many equal ones.
#[test]
fn factors_on_the_host_are_copied() {
    let Some(cuda) = common::device() else { return };
    let numerics = Numerics::default_for(DType::Bf16);
    for (m, k, h) in [(20, 64, 96), (0, 64, 96)] {
        let trained = Trained::<bf16>::new(&cuda, [m, k, h], None, numerics);
        let params = trained.parameters.mlp();
        let layer = Mlp::new(&cuda, &params).unwrap().for_training(SavePolicy::Save).unwrap();
        let factors = vec![-0.75; m];
        let of = |scale: RowScale<'_>| {
            let mut y = Matrix::zeros(m, k).unwrap();
            let saved = layer.forward_saving_host(trained.host[0].view(), y.view_mut()).unwrap();
            let mut dx = Matrix::<bf16>::zeros(m, k).unwrap();
            let mut down_bias = vec![f32::NAN; k];
            let mut of_factors = vec![f32::NAN; m];
            let into = GradientsMut::default()
                .with_dx(&mut dx)
                .with_down_bias(&mut down_bias)
                .with_row_scale(scale)
                .with_row_scale_grad(&mut of_factors);
            layer.backward_host(saved, (&trained.host[1]).into(), into).unwrap();
            (dx, down_bias, of_factors)
        };
        let rows = of(RowScale::Rows(&factors));
        assert!(rows == of(RowScale::Factor(-0.75)));
        let there = trained.backward(&trained.dy, Some(&factors), Beside::All, None).unwrap();
        assert_eq!((rows.0, rows.2), (there.dx, there.of_factors));
        assert_eq!(rows.1, there.biases[2]);
    }
}

#[test]
fn factors_that_fit_nothing_are_refused_by_name() {
    let Some(cuda) = common::device() else { return };
    let numerics = Numerics::default_for(DType::Bf16);
    let trained = Trained::<bf16>::new(&cuda, [5, 64, 96], None, numerics);
    let stream = &trained.stream;
    let four = DeviceMatrix::<f32>::zeros(stream, 1, 4).unwrap();
    let mut to = DeviceMatrix::<f32>::zeros(stream, 1, 4).unwrap();
    let kept = || trained.kept.each_ref().map(DeviceMatrix::view);
    let refused = |into| {
        let (x, dy) = (trained.x.view(), trained.dy.view());
        trained.layer.backward(stream, x, dy, kept(), into, None).unwrap_err().to_string()
    };
    let error = refused(DeviceGradientsMut::default().with_row_scale(four.view()));
    assert!(error.contains("row scale: expected [1, 5], given [1, 4]"), "{error}");
    let error = refused(DeviceGradientsMut::default().with_row_scale_grad(to.view_mut()));
    assert!(error.contains("d_row_scale: expected [1, 5], given [1, 4]"), "{error}");
    let gated = GatedLinear::new(&cuda, &trained.parameters.gated()).unwrap();
    let into = DeviceGradientsMut::default().with_row_scale(four.view());
    let (x, dh) = (trained.x.view(), trained.kept[0].view());
    let error = gated.backward(stream, x, dh, kept(), into, None).unwrap_err().to_string();
    assert!(error.contains("a row scale in the backward pass of a gated linear layer"), "{error}");
}
