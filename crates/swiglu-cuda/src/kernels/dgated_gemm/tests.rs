//! Every kernel on operands whose product is exact in T, so that what is judged is the activation's derivative.

use super::*;
use crate::common;
use crate::device::cuda::Cuda;
use crate::device::memory::DeviceMatrix;
use swiglu_core::{
    Activation, Element, GateUpRef, Matrix, Numerics, Rounding, bf16, bounds, f16, random,
};

/// Columns before and behind those that a matrix has, which nothing may read or write.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Lies {
    before: usize,
    behind: usize,
}

impl Lies {
    const DENSE: Lies = Lies { before: 0, behind: 0 };
}

/// A matrix on the device, between such columns.
struct There<T> {
    all: DeviceMatrix<T>,
    lies: Lies,
    cols: usize,
}

impl<T: Element> There<T> {
    fn new(stream: &Stream, host: &Matrix<T>, lies: Lies) -> Self {
        let (rows, cols) = (host.rows(), host.cols());
        let wide = lies.before + cols + lies.behind;
        let value = |at: usize| match (at % wide).checked_sub(lies.before) {
            Some(column) if column < cols => host[(at / wide, column)],
            _ => T::from_f32(f32::NAN),
        };
        let all = Matrix::from_values((0..rows * wide).map(value), rows, wide).unwrap();
        Self { all: DeviceMatrix::from_host(stream, all.view()).unwrap(), lies, cols }
    }

    /// One that nothing was written to.
    fn poisoned(stream: &Stream, [rows, cols]: [usize; 2], lies: Lies) -> Self {
        let nan = (0..rows * cols).map(|_| T::from_f32(f32::NAN));
        Self::new(stream, &Matrix::from_values(nan, rows, cols).unwrap(), lies)
    }

    fn tensor(&self) -> Tensor {
        let before = (self.lies.before * size_of::<T>()) as u64;
        Tensor::new(self.all.buffer().device_ptr() + before, self.all.cols())
    }

    /// The matrix, once nothing beside it was written.
    fn to_host(&self, what: &str) -> Matrix<T> {
        let all = self.all.to_host().unwrap();
        let within =
            |column: usize| (self.lies.before..self.lies.before + self.cols).contains(&column);
        for row in 0..all.rows() {
            let beside = (0..all.cols()).filter(|&column| !within(column));
            for column in beside {
                assert!(all[(row, column)].to_f32().is_nan(), "{what}: {row}, {column} written");
            }
        }
        let (rows, cols) = (all.rows(), self.cols);
        let values = (0..rows * cols).map(|at| all[(at / cols, self.lies.before + at % cols)]);
        Matrix::from_values(values, rows, cols).unwrap()
    }
}

/// A launch and what is special about it.
#[derive(Debug, Clone, Copy)]
struct Launch {
    kernel: Kernel,
    /// M, H and K.
    shape: [usize; 3],
    orientation: Orientation,
    /// Of dy and Wd, and of the others.
    lies: [Lies; 2],
    /// Whether the gradients take the place of gate and up.
    in_place: bool,
    /// Decides the inputs, the activation, the rounding, and whether h has a place.
    turn: usize,
}

fn judge<T: Element>(cuda: &Cuda, launch: Launch) {
    let Launch { kernel, shape: [m, h, k], orientation, lies, in_place, turn } = launch;
    let stream = cuda.stream();
    let family = Activation::family();
    let act = family[turn % family.len()];
    let rounding = [Rounding::Fused, Rounding::PreRound, Rounding::Eager][turn % 3];
    let numerics = Numerics::default_for(T::DTYPE).with_rounding(rounding);
    let small = |seed: u64, rows: usize, cols: usize| {
        let value = |at| (random::normal(seed + turn as u64, at) * 0.9).round();
        let values = (0..(rows * cols) as u64).map(|at| T::from_f32(value(at)));
        Matrix::from_values(values, rows, cols).unwrap()
    };
    let dy = small(1, m, k);
    let [rows, cols] = orientation.shape(k, h);
    let down = small(2, rows, cols);
    let down_at = |from: usize, to: usize| match orientation {
        Orientation::OutIn => down[(to, from)],
        Orientation::InOut => down[(from, to)],
    };
    let dh = (0..m * h).map(|at| {
        let terms = (0..k).map(|to| dy[(at / h, to)].to_f32() * down_at(at % h, to).to_f32());
        let sum = terms.sum::<f32>();
        assert_eq!(T::from_f32(sum).to_f32(), sum, "not exact in T");
        T::from_f32(sum)
    });
    let dh = Matrix::from_values(dh, m, h).unwrap();
    let [gate, up] =
        [3, 4].map(|seed| random::normal_matrix::<T>(seed + turn as u64, m, h, 2.0).unwrap());
    let (dy_there, down_there) =
        (There::new(&stream, &dy, lies[0]), There::new(&stream, &down, lies[0]));
    let inputs = [&gate, &up].map(|host| There::new(&stream, host, lies[1]));
    let elsewhere = [(); 2].map(|()| There::<T>::poisoned(&stream, [m, h], lies[1]));
    let h_there = There::<T>::poisoned(&stream, [m, h], lies[1]);
    let grads = if in_place { &inputs } else { &elsewhere };
    let wants_h = turn % 3 != 1;
    // Factors that round nothing, subnormal values of f16 neither, in half of the launches.
    let factors: Vec<f32> = (0..m).map(|row| [1.0, -2.0, 2.0, 4.0][row % 4]).collect();
    let scaled = turn % 2 == 1;
    let parts = h.div_ceil(kernel.columns_of_dots());
    let vector = |values: Vec<f32>| {
        let matrix = Matrix::from_vec(values, 1, parts.max(1) * m).unwrap();
        DeviceMatrix::from_host(&stream, matrix.view()).unwrap()
    };
    let factors_there = vector((0..parts * m).map(|at| factors[at % m]).collect());
    let dots_there = vector(vec![f32::NAN; parts * m]);
    let scale = scaled.then(|| RowFactors {
        factors: if turn % 3 == 0 { 0 } else { factors_there.buffer().device_ptr() },
        dots: if turn % 5 == 0 { 0 } else { dots_there.buffer().device_ptr() },
    });
    let factor_of = |row: usize| match scale {
        Some(RowFactors { factors: 1.., .. }) => factors[row],
        _ => 1.0,
    };
    let maps = LayerMaps::new();
    let call = Call {
        code: GateCode::new(&act, numerics, T::DTYPE),
        formula: Formula::new(&act),
        m,
        out_grad: dy_there.tensor(),
        down: LinearWeights {
            ptr: down_there.tensor().data,
            orientation,
            in_features: h,
            out_features: k,
            row_stride: down_there.all.cols(),
            bias: None,
        },
        inputs: inputs.each_ref().map(There::tensor),
        grads: grads.each_ref().map(There::tensor),
        h: wants_h.then(|| h_there.tensor()),
        scale,
        maps: &maps,
    };
    let what = format!("{launch:?} of {} {act} {numerics}", T::DTYPE);
    kernel.check_call(&call).unwrap();
    // SAFETY: matrices of this device that outlive the copies below; the gradients lie as gate and up do, or elsewhere.
    unsafe { kernel.launch(&stream, &call) }.unwrap();
    let read = GateUpRef::separate(gate.view(), up.view()).unwrap();
    let by_factor = |matrix: &Matrix<T>, inverse: bool| {
        let values = matrix.as_slice().iter().enumerate().map(|(at, v)| {
            let factor = factor_of(at / h);
            T::from_f32(v.to_f32() * if inverse { 1.0 / factor } else { factor })
        });
        Matrix::from_values(values, m, h).unwrap()
    };
    let scaled_dh = by_factor(&dh, false);
    let gradients = bounds::activation_backward(&act, numerics, &read, scaled_dh.view()).unwrap();
    let value = bounds::activation(&act, numerics, &read).unwrap();
    judge_dots(&dots_there, scale, [&value.value, &value.bound], &dh, parts, &what);
    let [gate_grad, up_grad, h_left] =
        [&grads[0], &grads[1], &h_there].map(|matrix| matrix.to_host(&what));
    let mut written = vec![("gate", gate_grad, &gradients[0]), ("up", up_grad, &gradients[1])];
    if wants_h {
        written.push(("h", by_factor(&h_left, true), &value));
    } else {
        assert!(h_left.as_slice().iter().all(|v| v.to_f32().is_nan()), "{what} wrote h");
    }
    for (name, got, expected) in written {
        let judgement = expected.judge(got.view()).unwrap();
        assert!(judgement.passed(), "{name} of {what}: {judgement:?}");
    }
    if !in_place {
        for (read, host) in inputs.iter().zip([&gate, &up]) {
            assert!(read.to_host(&what) == *host, "{what} wrote what it reads");
        }
    }
}

/// Each row's sums of h·dh, of which the parts are of so many columns, within what h may be off by and what sums are.
fn judge_dots<T: Element>(
    found: &DeviceMatrix<f32>,
    scale: Option<RowFactors>,
    [h, bound]: [&Matrix<f64>; 2],
    dh: &Matrix<T>,
    parts: usize,
    what: &str,
) {
    let found = found.to_host().unwrap();
    if scale.is_none_or(|scale| scale.dots == 0) {
        assert!(found.as_slice().iter().all(|v| v.is_nan()), "{what} wrote sums");
        return;
    }
    let (m, features) = (dh.rows(), dh.cols());
    for row in 0..m {
        let sum: f64 = (0..parts).map(|part| f64::from(found[(0, part * m + row)])).sum();
        let terms = || (0..features).map(|j| (dh[(row, j)].to_f64(), h[(row, j)], bound[(row, j)]));
        let exact: f64 = terms().map(|(dh, h, _)| dh * h).sum();
        let size = |(dh, h, off): (f64, f64, f64)| {
            dh.abs() * (off + (h.abs() + off) * features as f64 * f64::from(f32::EPSILON))
        };
        let most: f64 = terms().map(size).sum();
        assert!((sum - exact).abs() <= most, "{what}: row {row}: {sum}, {exact} within {most}");
    }
}

/// Every tile, cut, layout and mode of Hopper's, on a device of few SMs, where tiles are many.
#[test]
fn every_tile_of_hopper_differentiates() {
    let Some(cuda) = common::device() else { return };
    let shapes = [[1, 8, 64], [64, 64, 200], [129, 456, 128], [257, 1000, 72], [300, 192, 320]];
    for (i, shape) in shapes.into_iter().enumerate() {
        for (j, config) in sm90_dgated_gemm::Config::ALL.into_iter().enumerate() {
            let kernel = Kernel::Sm90(config);
            if kernel.check(cuda.arch(), DType::Bf16, 1, false).is_err() {
                return swiglu_testing::not_run("a device without wgmma");
            }
            for (n, orientation) in Orientation::ALL.into_iter().enumerate() {
                let lies = [Lies::DENSE; 2];
                // With factors of rows and without.
                for turn in [0, 1].map(|k| 5 * i + 3 * j + n + 7 * k) {
                    let in_place = true;
                    let launch = Launch { kernel, shape, orientation, lies, in_place, turn };
                    judge::<bf16>(&cuda, launch);
                }
            }
        }
    }
}

/// Every portable tile, two of them and one row and column more, over a ring that goes round, in both orientations and every
/// element type, with rows that begin and end anywhere; and fewer rows and columns than an access.
#[test]
fn every_portable_tile_differentiates() {
    let Some(cuda) = common::device() else { return };
    let lies = [
        Lies::DENSE,
        Lies { before: 0, behind: 3 },
        Lies { before: 4, behind: 7 },
        Lies { before: 1, behind: 0 },
    ];
    for (i, config) in mma_gemm::Config::ALL.into_iter().enumerate() {
        let [rows, columns] = config.wide_tile();
        for (j, dtype) in [DType::Bf16, DType::F16, DType::F32].into_iter().enumerate() {
            // Stages, and one and a part.
            let k = (config.stages() + 1) * config.step(dtype) + config.step(dtype) / 4 * 3;
            let shapes = [
                [2 * rows + 1, 2 * columns + 1, k + 8],
                [rows, columns, k + 1],
                [rows + 7, 3 * columns - 4, 64],
                [3, 5, 7],
            ];
            for (n, shape) in shapes.into_iter().enumerate() {
                // Of each tile the first in one type, of the other types another.
                let of_simulator = if j == i % 3 { 0 } else { 1 + (i + j) % 3 };
                if common::partly() && n != of_simulator {
                    continue;
                }
                let turn = 5 * i + 7 * j + n;
                let orientation = Orientation::ALL[(i + j + n) % 2];
                let lies = [lies[(turn + i) % 4], lies[(turn / 2 + j) % 4]];
                let (kernel, in_place) = (Kernel::Mma(config), (i + n).is_multiple_of(2));
                let launch = Launch { kernel, shape, orientation, lies, in_place, turn };
                match dtype {
                    DType::Bf16 => judge::<bf16>(&cuda, launch),
                    DType::F16 => judge::<f16>(&cuda, launch),
                    _ => judge::<f32>(&cuda, launch),
                }
            }
        }
    }
}
