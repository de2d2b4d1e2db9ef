//! Buffers and matrices: copies with strides, what is refused, and foreign memory.

// A generic helper is not seen as a test.
#![allow(clippy::unwrap_used)]

mod common;

use common::device;
use half::{bf16, f16};
use swiglu_core::{Element, Error, Matrix, MatrixMut, MatrixRef};
use swiglu_cuda::{Cuda, CudaError, DeviceBuffer, DeviceMatrix, DeviceMatrixMut, DeviceMatrixRef};

fn values<T: Element>(n: usize) -> Vec<T> {
    (0..n).map(|i| T::from_f32(i as f32)).collect()
}

fn round_trip<T: Element>(cuda: &Cuda) {
    let stream = cuda.stream();
    for len in [0, 1, 7, 1000] {
        let data = values::<T>(len);
        let mut buffer = DeviceBuffer::from_host(&stream, &data).unwrap();
        assert_eq!((buffer.len(), buffer.is_empty()), (len, len == 0));
        assert_eq!(buffer.to_host().unwrap(), data);
        buffer.poison(0).unwrap();
        assert!(buffer.to_host().unwrap().iter().all(|v| v.to_f32() == 0.0));
        buffer.poison(0xFF).unwrap();
        assert!(buffer.to_host().unwrap().iter().all(|v| v.to_f32().is_nan()));
    }
}

#[test]
fn buffers_keep_what_was_written() {
    let Some(cuda) = device() else { return };
    round_trip::<f32>(&cuda);
    round_trip::<f16>(&cuda);
    round_trip::<bf16>(&cuda);
    let options = common::options().unwrap().with_plain_allocations(true);
    round_trip::<f32>(&Cuda::with_options(&options).unwrap());
}

#[test]
fn matrices_are_copied_with_any_strides_and_gaps_stay() {
    let Some(cuda) = device() else { return };
    let stream = cuda.new_stream().unwrap();
    let (rows, cols) = (5, 6);
    // Host stride, device stride. A source may repeat or overlap its rows.
    for (host, dev) in [(6, 6), (9, 6), (6, 11), (8, 10), (4, 7), (0, 6), (1, 9)] {
        let data = values::<f32>(4 * host + cols);
        let source = MatrixRef::with_stride(&data, rows, cols, host).unwrap();
        let mut buffer = DeviceBuffer::<f32>::zeros(&stream, 4 * dev + cols).unwrap();
        buffer.poison(0xFF).unwrap();
        let mut target = DeviceMatrixMut::with_stride(&mut buffer, rows, cols, dev).unwrap();
        target.upload(&stream, source).unwrap();
        let there = target.as_ref().to_host(&stream).unwrap();
        for r in 0..rows {
            assert_eq!(there.view().row(r), source.row(r), "strides {host} {dev}");
        }
        let raw = buffer.to_host().unwrap();
        let in_gap = |i: &usize| i % dev >= cols;
        assert!((0..raw.len()).filter(in_gap).all(|i| raw[i].is_nan()), "strides {host} {dev}");

        let mut back = vec![-1.0f32; 4 * 10 + cols];
        let view = DeviceMatrixRef::with_stride(&buffer, rows, cols, dev).unwrap();
        view.download(&stream, MatrixMut::with_stride(&mut back, rows, cols, 10).unwrap()).unwrap();
        for (i, &value) in back.iter().enumerate() {
            let expected = if i % 10 < cols { source.row(i / 10)[i % 10] } else { -1.0 };
            assert_eq!(value, expected, "strides {host} {dev}");
        }
    }
}

#[test]
fn empty_matrices_are_matrices() {
    let Some(cuda) = device() else { return };
    let stream = cuda.stream();
    for (rows, cols) in [(0, 0), (0, 7), (7, 0)] {
        let empty = Matrix::<f32>::zeros(rows, cols).unwrap();
        let there = DeviceMatrix::from_host(&stream, empty.view()).unwrap();
        assert_eq!((there.shape(), there.to_host().unwrap()), ([rows, cols], empty));
        assert!(there.view().byte_range().is_empty());
    }
}

#[test]
fn parts_of_a_matrix_are_views() {
    let Some(cuda) = device() else { return };
    let stream = cuda.stream();
    let whole = Matrix::from_vec(values::<f16>(40), 5, 8).unwrap();
    let there = DeviceMatrix::from_host(&stream, whole.view()).unwrap();
    let part = there.view().rows_range(1..4).unwrap().cols_range(2..7).unwrap();
    assert_eq!((part.shape(), part.row_stride()), ([3, 5], 8));
    assert_eq!(part.device_ptr(), there.view().device_ptr() + 2 * (8 + 2));
    let back = part.to_host(&stream).unwrap();
    for r in 0..3 {
        assert_eq!(back.view().row(r), &whole.view().row(r + 1)[2..7]);
    }
    let out = there.view().rows_range(4..6).unwrap_err();
    assert!(matches!(out, CudaError::Core(Error::OutOfRange { .. })), "{out}");
    assert!(there.view().cols_range(9..9).is_err());
    assert_eq!(there.view().rows_range(5..5).unwrap().shape(), [0, 8]);
}

#[test]
fn shapes_and_strides_are_refused_as_on_the_host() {
    let Some(cuda) = device() else { return };
    let stream = cuda.stream();
    let mut buffer = DeviceBuffer::<f32>::zeros(&stream, 20).unwrap();
    let core = |error: CudaError| match error {
        CudaError::Core(e) => e,
        other => panic!("{other}"),
    };
    let error = core(DeviceMatrixRef::new(&buffer, 4, 6).unwrap_err());
    assert!(matches!(error, Error::Shape { .. }), "{error}");
    let error = core(DeviceMatrixRef::with_stride(&buffer, 4, 6, 5).unwrap_err());
    assert!(matches!(error, Error::BufferTooShort { needed: 21, given: 20, .. }), "{error}");
    let error = core(DeviceMatrixRef::with_stride(&buffer, 3, 2, usize::MAX / 2).unwrap_err());
    assert!(matches!(error, Error::TooLarge { .. }), "{error}");
    let error = core(DeviceMatrixMut::with_stride(&mut buffer, 3, 6, 5).unwrap_err());
    assert!(matches!(error, Error::OverlappingRows { .. }), "{error}");
    assert!(DeviceMatrixRef::with_stride(&buffer, 3, 6, 5).is_ok());
    let error = core(DeviceMatrix::<f32>::new(&stream, 1 << 40, 1 << 40).unwrap_err());
    assert!(matches!(error, Error::TooLarge { .. }), "{error}");
    let error = core(DeviceMatrix::<f32>::new(&stream, 1 << 31, 1 << 31).unwrap_err());
    assert!(matches!(error, Error::TooLarge { .. }), "{error}");
    let error = core(buffer.upload(&[0.0; 19]).unwrap_err());
    assert!(matches!(error, Error::Shape { .. }), "{error}");
    let small = Matrix::<f32>::zeros(2, 2).unwrap();
    let mut there = DeviceMatrix::<f32>::zeros(&stream, 2, 3).unwrap();
    let error = core(there.view_mut().upload(&stream, small.view()).unwrap_err());
    assert!(matches!(error, Error::Shape { .. }), "{error}");
}

#[test]
fn foreign_memory_is_checked() {
    let Some(cuda) = device() else { return };
    let stream = cuda.stream();
    let buffer = DeviceBuffer::from_host(&stream, &values::<f32>(64)).unwrap();
    let raw = |ptr, rows, cols, stride| {
        // SAFETY: only addresses that are refused, or that the buffer keeps alive, are used.
        unsafe { DeviceMatrixRef::<f32>::from_raw(&cuda, ptr, rows, cols, stride) }
    };
    let view = raw(buffer.device_ptr() + 4, 3, 5, 16).unwrap();
    assert_eq!(view.to_host(&stream).unwrap().view().row(2), &values::<f32>(64)[33..38]);
    assert_eq!(raw(0, 0, 5, 5).unwrap().shape(), [0, 5]);

    let on_host = [0.0f32; 64];
    let error = raw(on_host.as_ptr() as u64, 1, 4, 4).unwrap_err();
    let CudaError::WrongDevice { expected, .. } = &error else { panic!("{error}") };
    assert_eq!(expected, "device 0");
    let error = raw(0, 1, 4, 4).unwrap_err();
    assert!(matches!(error, CudaError::WrongDevice { .. }), "{error}");
    let error = raw(buffer.device_ptr() + 2, 1, 4, 4).unwrap_err();
    assert!(matches!(error, CudaError::Misaligned { required: 4, .. }), "{error}");
    let error = raw(buffer.device_ptr(), 1 << 24, 1 << 10, 1 << 10).unwrap_err();
    let CudaError::OutsideAllocation { needed, available, .. } = &error else { panic!("{error}") };
    assert!(*needed == 1 << 36 && *available >= 256, "{error}");
    let error = raw(u64::MAX - 3, 4, 4, 4).unwrap_err();
    assert!(matches!(error, CudaError::OutsideAllocation { .. }), "{error}");
    // SAFETY: refused before anything is written.
    let rows = unsafe { DeviceMatrixMut::<f32>::from_raw(&cuda, buffer.device_ptr(), 4, 8, 4) };
    assert!(matches!(rows, Err(CudaError::Core(Error::OverlappingRows { .. }))), "{rows:?}");
}
