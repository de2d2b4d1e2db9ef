use swiglu_core::{MatrixRef, bf16, f16, random};

use super::key::alignment;
use super::*;
use crate::CudaOptions;
use crate::common;
use crate::device::jit::cache::CacheOptions;
use crate::device::memory::{DeviceBuffer, DeviceMatrix};

/// A linear map whose matrices begin `offset` elements into their memory and have `pad` elements
/// between their rows.
#[derive(Debug, Clone, Copy)]
struct Case {
    m: usize,
    k: usize,
    n: usize,
    orientation: Orientation,
    bias: bool,
    offset: usize,
    pad: usize,
    product: Product,
}

/// Host values of a matrix with rows `stride` apart, as T.
fn values<T: Element>(seed: u64, rows: usize, stride: usize) -> Vec<T> {
    (0..rows * stride).map(|i| T::from_f32(random::normal(seed, i as u64))).collect()
}

/// Computes the case on the device; the error of each element as a fraction of its bound, where a
/// factor is rounded by `roundoff` at most. What lies between rows must stay as it was.
fn worst<T: Element, Y: Element>(cuda: &Cuda, lt: &Lt, case: Case, roundoff: f64) -> f64 {
    let Case { m, k, n, orientation, bias, offset, pad, product } = case;
    let stream = cuda.stream();
    let [w_rows, w_cols] = if orientation == Orientation::OutIn { [n, k] } else { [k, n] };
    let [x_rows, x_cols] = if product.transposed { [k, m] } else { [m, k] };
    let (x_stride, w_stride, y_stride) = (x_cols + pad, w_cols + pad, n + pad);
    let shifted = |values: &[T]| {
        let memory = [vec![T::default(); offset], values.to_vec()].concat();
        DeviceBuffer::from_host(&stream, &memory).unwrap()
    };
    let x = values::<T>(1, x_rows, x_stride);
    let w = values::<T>(2, w_rows, w_stride);
    let b = values::<Y>(3, 1, n);
    let (device_x, device_w) = (shifted(&x), shifted(&w));
    let device_b = DeviceBuffer::from_host(&stream, &b).unwrap();
    let mut device_y = DeviceBuffer::<Y>::new(&stream, offset + m * y_stride).unwrap();
    device_y.poison(if product.accumulate { 0x3C } else { 0xFF }).unwrap();
    let untouched = device_y.to_host().unwrap();
    let [shift, y_shift] = [size_of::<T>(), size_of::<Y>()].map(|size| (offset * size) as u64);
    let weights = LinearWeights {
        ptr: device_w.device_ptr() + shift,
        orientation,
        in_features: k,
        out_features: n,
        row_stride: w_stride,
        bias: bias.then(|| device_b.device_ptr()),
    };
    let bytes = Lt::scratch_bytes(cuda.arch());
    let launched = cuda.with_workspace(&stream, None, bytes, |work| {
        let scratch = work.ptr;
        // SAFETY: the addresses were allocated above and outlive the synchronous copy below.
        unsafe {
            let (x, y) = (device_x.device_ptr() + shift, device_y.device_ptr() + y_shift);
            let x = DeviceMatrixRef::from_raw(cuda, x, x_rows, x_cols, x_stride)?;
            let y = DeviceMatrixMut::from_raw(cuda, y, m, n, y_stride)?;
            lt.product::<T, Y>(&stream, x, &weights, y, product, scratch)
        }
    });
    launched.unwrap();
    let y = device_y.to_host().unwrap();
    let mut worst = 0.0f64;
    for (i, (&value, &before)) in y.iter().zip(&untouched).enumerate() {
        let at = i.checked_sub(offset).map(|i| (i / y_stride, i % y_stride));
        let Some((row, column)) = at.filter(|&(_, column)| column < n) else {
            let same = value == before || before.to_f64().is_nan() && value.to_f64().is_nan();
            assert!(same, "{case:?}: element {i} is not part of the result");
            continue;
        };
        let term = |l: usize| {
            let w = match orientation {
                Orientation::OutIn => w[column * w_stride + l],
                Orientation::InOut => w[l * w_stride + column],
            };
            let x = if product.transposed { x[l * x_stride + row] } else { x[row * x_stride + l] };
            x.to_f64() * w.to_f64()
        };
        let (mut exact, mut magnitude) =
            (0..k).map(term).fold((0.0, 0.0), |(s, a), t| (s + t, a + t.abs()));
        let product_alone = exact.abs();
        if bias {
            (exact, magnitude) = (exact + b[column].to_f64(), magnitude + b[column].to_f64().abs());
        }
        // What is added to y may be rounded to its type first, also before the bias is added (seen on an H200 with one row of
        // 16 bits, and on an H100 with a bias).
        let mut added = 0.0f64;
        if product.accumulate {
            let before = before.to_f64();
            added = exact.abs() + if bias { product_alone } else { 0.0 };
            (exact, magnitude) = (exact + before, magnitude + before.abs());
        }
        let unit = 2.0f64.powi(-24);
        let sum = ((k + 2) as f64 * unit + roundoff * (2.0 + roundoff)) * magnitude;
        let rounding = Y::DTYPE.unit_roundoff() * (added + exact.abs() + sum);
        worst = worst.max((value.to_f64() - exact).abs() / (sum + rounding));
    }
    worst
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let shapes = [[1, 64, 32], [3, 7, 5], [16, 40, 24], [33, 1, 17], [5, 96, 1], [70, 100, 65]];
    for (i, [m, k, n]) in shapes.into_iter().enumerate() {
        for orientation in Orientation::ALL {
            for (offset, pad) in [(0, 0), (1, 3), (8, 8)] {
                let bias = i % 2 == 0;
                for transposed in [false, true] {
                    for accumulate in [false, true] {
                        let product = Product { transposed, accumulate, by: By::Planned };
                        cases.push(Case { m, k, n, orientation, bias, offset, pad, product });
                    }
                }
            }
        }
    }
    cases
}

#[test]
fn products_are_right_for_every_orientation_stride_and_alignment() {
    let Some(cuda) = common::device() else { return };
    let lt = Lt::new(&cuda, &[]).unwrap();
    for case in cases() {
        let worst = [
            worst::<f32, f32>(&cuda, &lt, case, 0.0),
            worst::<f16, f16>(&cuda, &lt, case, 0.0),
            worst::<bf16, bf16>(&cuda, &lt, case, 0.0),
            worst::<f16, f32>(&cuda, &lt, case, 0.0),
            worst::<bf16, f32>(&cuda, &lt, case, 0.0),
        ];
        assert!(worst.iter().all(|&w| w <= 1.0), "{case:?}: {worst:?} of the bound");
    }
}

#[test]
fn tf32_is_used_where_it_was_asked_for() {
    let Some(dir) = common::libraries() else { return };
    let cache = CacheOptions { dir: Some(dir.to_owned()), ..CacheOptions::default() };
    let options = CudaOptions { tf32: true, cache, ..CudaOptions::default() };
    let cuda = Cuda::with_options(&options).unwrap();
    let lt = Lt::new(&cuda, &[]).unwrap();
    let orientation = Orientation::OutIn;
    let case = Case {
        m: 32,
        k: 64,
        n: 64,
        orientation,
        bias: false,
        offset: 0,
        pad: 0,
        product: Product::default(),
    };
    let worst = worst::<f32, f32>(&cuda, &lt, case, 2.0f64.powi(-10));
    // More than f32 would be off by, at most what tf32 may.
    assert!(worst <= 1.0 && worst > 0.01, "{worst}");
}

#[test]
fn a_problem_is_prepared_once_whatever_its_layer() {
    let Some(cuda) = common::device() else { return };
    let lt = Lt::new(&cuda, &[]).unwrap();
    let orientation = Orientation::InOut;
    let case = Case {
        m: 4,
        k: 8,
        n: 16,
        orientation,
        bias: true,
        offset: 0,
        pad: 0,
        product: Product::default(),
    };
    for _ in 0..3 {
        // Other memory each time, of the same alignment.
        assert!(worst::<f16, f16>(&cuda, &lt, case, 0.0) <= 1.0);
    }
    assert_eq!(lt.prepared.read().unwrap().len(), 1);
    worst::<f16, f16>(&cuda, &lt, Case { pad: 1, ..case }, 0.0);
    assert_eq!(lt.prepared.read().unwrap().len(), 2);
    // Of the same inputs with sums in f32.
    worst::<f16, f32>(&cuda, &lt, case, 0.0);
    assert_eq!(lt.prepared.read().unwrap().len(), 3);
}

/// The simulated library proposes larger tiles first, then short ones alone, in clusters of two the third.
#[test]
fn gradients_of_weights_of_few_tokens_take_short_tiles_where_they_are_proposed() {
    let Some(cuda) = common::device() else { return };
    if common::has_gpu() || cuda.arch() != Arch::Sm90a {
        return swiglu_testing::not_run("what a device's own cuBLASLt proposes is not known");
    }
    let lt = Lt::new(&cuda, &[]).unwrap();
    let transposed = Product { transposed: true, ..Product::default() };
    let key = |[m, k, n]: [usize; 3], dtype, product| {
        let strides = [m, n, n];
        let (transpose, alignments) = (Transpose::No, [256; 4]);
        let out = dtype;
        Key { m, n, k, dtype, out, strides, transpose, product, bias: false, alignments }
    };
    let takes_short = |shape, dtype, product| {
        let key = key(shape, dtype, product);
        lt.api.has_short_tiles(&lt.prepare(&key).unwrap().algorithm)
    };
    let bf16 = DType::Bf16;
    assert!(takes_short([1024, 1024, 2048], bf16, transposed));
    assert!(takes_short([2048, 1, 1024], DType::F16, Product { accumulate: true, ..transposed }));
    for (shape, dtype, product) in [
        ([1024, 1032, 2048], bf16, transposed),
        ([896, 1024, 2048], bf16, transposed),
        ([2048, 1024, 896], bf16, transposed),
        ([2048, 1024, 2048], DType::F32, transposed),
    ] {
        assert!(!takes_short(shape, dtype, product), "{shape:?} of {dtype}");
    }
    // So they do where the one that was measured is not among the proposals, and where that is the first they do not.
    let key = key([1024, 512, 2048], bf16, transposed);
    let gemm = key.gemm().unwrap();
    let first = lt.api.identify(&lt.proposals(&key, &lt.describe(&key).unwrap()).unwrap()[0]);
    let first = first.unwrap();
    let (major, minor, _) = cublaslt_version().unwrap();
    for (by, is_short) in [(GemmAlgorithm { tile: u32::MAX, ..first }, true), (first, false)] {
        let measured =
            Measured::new((major, minor), [(gemm, (by, if is_short { 0.9 } else { 1.0 }))]);
        let lt = Lt::new(&cuda, &[Arc::new(measured)]).unwrap();
        let taken = lt.prepare(&key).unwrap().algorithm;
        assert_eq!(lt.api.has_short_tiles(&taken), is_short);
    }
}

/// Of what the library proposes, that which was measured to be the fastest is taken, where this version was measured.
#[test]
fn the_proposal_that_was_measured_to_be_the_fastest_is_taken() {
    let Some(cuda) = common::device() else { return };
    let stream = cuda.stream();
    let (m, k, n) = (64, 128, 96);
    let gemm = |m| Gemm {
        m,
        k,
        n,
        transposed: false,
        weights: Orientation::OutIn,
        accumulate: false,
        dtype: DType::Bf16,
        out: DType::Bf16,
    };
    let (major, minor, _) = cublaslt_version().unwrap();
    let x = DeviceMatrix::<bf16>::new(&stream, m, k).unwrap();
    let w = DeviceMatrix::<bf16>::new(&stream, n, k).unwrap();
    let mut y = DeviceMatrix::<bf16>::new(&stream, m, n).unwrap();
    let weights = LinearWeights {
        ptr: w.buffer().device_ptr(),
        orientation: Orientation::OutIn,
        in_features: k,
        out_features: n,
        row_stride: k,
        bias: None,
    };
    let mut taken = |measured: Option<Measured>, product| {
        let measured: Vec<_> = measured.into_iter().map(Arc::new).collect();
        let lt = Lt::new(&cuda, &measured).unwrap();
        let key = Key::of(&x.view(), &weights, &y.view_mut(), product);
        lt.api.identify(&lt.prepare(&key)?.algorithm).ok_or(CudaError::NoDevice)
    };
    let plain = Product::default();
    let proposals: Vec<_> =
        (0..).map_while(|i| taken(None, Product { by: By::Proposal(i), ..plain }).ok()).collect();
    let (first, last) = (proposals[0], *proposals.last().unwrap());
    assert_eq!(taken(None, plain), Ok(first));
    let of = |version, at: &[(usize, GemmAlgorithm)]| {
        Some(Measured::new(version, at.iter().map(|(m, by)| (gemm(*m), (*by, 0.9)))))
    };
    let here = (major, minor);
    assert_eq!(taken(of(here, &[(m, last)]), plain), Ok(last));
    // Between two numbers of tokens that agree, and only there.
    assert_eq!(taken(of(here, &[(m + 16, last), (m - 16, last)]), plain), Ok(last));
    assert_eq!(taken(of(here, &[(m + 16, last)]), plain), Ok(first));
    assert_eq!(taken(of((major, minor + 1), &[(m, last)]), plain), Ok(first));
    let unheard_of = GemmAlgorithm { tile: u32::MAX, ..last };
    assert_eq!(taken(of(here, &[(m, unheard_of)]), plain), Ok(first));
    let refused = taken(None, Product { by: By::Proposal(200), ..plain }).unwrap_err();
    assert!(refused.to_string().contains("number 200 was asked for"), "{refused}");
}

#[test]
fn what_cannot_be_multiplied_is_refused() {
    let Some(cuda) = common::device() else { return };
    let (lt, stream) = (Lt::new(&cuda, &[]).unwrap(), cuda.stream());
    let refused = |x: [usize; 3], features: [usize; 2], y: [usize; 2]| {
        let data = vec![0.0f32; 64];
        let x_memory = DeviceBuffer::from_host(&stream, &data).unwrap();
        let mut y = DeviceMatrix::<f32>::new(&stream, y[0], y[1]).unwrap();
        let weights = LinearWeights {
            ptr: x_memory.device_ptr(),
            orientation: Orientation::OutIn,
            in_features: features[0],
            out_features: features[1],
            row_stride: features[0],
            bias: None,
        };
        let x = DeviceMatrixRef::with_stride(&x_memory, x[0], x[1], x[2]).unwrap();
        cuda.with_workspace(&stream, None, Lt::scratch_bytes(cuda.arch()), |work| {
            let scratch = work.ptr;
            // SAFETY: every product that is tried has at most 64 elements of x and of W.
            unsafe { lt.product(&stream, x, &weights, y.view_mut(), Product::default(), scratch) }
        })
    };
    assert!(matches!(refused([2, 4, 4], [5, 3], [2, 3]), Err(CudaError::Core(_))));
    assert!(matches!(refused([2, 4, 4], [4, 3], [3, 3]), Err(CudaError::Core(_))));
    let overlapping = refused([2, 4, 1], [4, 3], [2, 3]).unwrap_err().to_string();
    assert!(overlapping.contains("overlap"), "{overlapping}");
    assert!(matches!(refused([2, 0, 0], [0, 3], [2, 3]), Err(CudaError::Unsupported { .. })));
    // Nothing to do is no error, and a single row has no stride.
    assert_eq!(refused([0, 4, 4], [4, 3], [0, 3]), Ok(()));
    assert_eq!(refused([2, 4, 4], [4, 0], [2, 0]), Ok(()));
    assert_eq!(refused([1, 4, 1], [4, 3], [1, 3]), Ok(()));
}

#[test]
fn addresses_say_their_alignment() {
    assert_eq!([256, 512, 16, 6, 1, 0x7f00_0010].map(alignment), [256, 256, 16, 2, 1, 16]);
}

#[test]
fn the_library_says_its_version() {
    if common::libraries().is_none() {
        return;
    }
    assert!(cublaslt_version().unwrap().0 >= 12);
}

/// Uploads through the same views that callers use.
#[test]
fn matrices_of_callers_multiply() {
    let Some(cuda) = common::device() else { return };
    let (lt, stream) = (cuda.lt().unwrap(), cuda.stream());
    let x = MatrixRef::new(&[1.0f32, 2.0, 3.0, 4.0], 2, 2).unwrap();
    let x = DeviceMatrix::from_host(&stream, x).unwrap();
    let w = DeviceBuffer::from_host(&stream, &[1.0f32, 0.0, 10.0, 1.0]).unwrap();
    let mut y = DeviceMatrix::<f32>::new(&stream, 2, 2).unwrap();
    let mut multiply = |orientation| {
        let weights = LinearWeights {
            ptr: w.device_ptr(),
            orientation,
            in_features: 2,
            out_features: 2,
            row_stride: 2,
            bias: None,
        };
        let bytes = Lt::scratch_bytes(cuda.arch());
        let launched = cuda.with_workspace(&stream, None, bytes, |work| {
            let scratch = work.ptr;
            // SAFETY: `w` has four elements and outlives the copy below.
            unsafe {
                lt.product(&stream, x.view(), &weights, y.view_mut(), Product::default(), scratch)
            }
        });
        launched.unwrap();
        y.to_host().unwrap().as_slice().to_vec()
    };
    assert_eq!(multiply(Orientation::OutIn), [1.0, 12.0, 3.0, 34.0]);
    assert_eq!(multiply(Orientation::InOut), [21.0, 2.0, 43.0, 4.0]);
}
