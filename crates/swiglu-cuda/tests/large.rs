//! Extents at which offsets in 32 bits end: each kernel computes them right, or is refused with the reason.

// A generic helper is not seen as a test.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

mod common;

use std::collections::BTreeSet;

use common::{device, has_gpu};
use half::bf16;
use swiglu_core::{Activation, Element, Matrix, Orientation};
use swiglu_cuda::{
    Cuda, CudaError, DeviceGatedLinearParams, DeviceMatrix, DeviceMatrixMut, GatedLinear, Stream,
};
use swiglu_testing::not_run;

fn put<T: Element>(stream: &Stream, matrix: &mut DeviceMatrix<T>, at: [usize; 2], value: f32) {
    let value = Matrix::from_vec(vec![T::from_f32(value)], 1, 1).unwrap();
    let cell = matrix.view_mut().rows_range(at[0]..at[0] + 1).unwrap();
    let mut cell: DeviceMatrixMut<'_, T> = cell.cols_range(at[1]..at[1] + 1).unwrap();
    cell.upload(stream, value.view()).unwrap();
}

/// One token of `k` features to `h`, all zeros but for the first and last of each: h of the first and last feature is
/// the same wherever an offset is right. How many ways computed it.
fn computed<T: Element>(cuda: &Cuda, [k, h]: [usize; 2], orientation: Orientation) -> usize {
    let stream = cuda.stream();
    let [rows, cols] = orientation.shape(h, k);
    let zeros = |rows, cols| DeviceMatrix::<T>::zeros(&stream, rows, cols).unwrap();
    let (mut x, mut gate, mut up) = (zeros(1, k), zeros(rows, cols), zeros(rows, cols));
    for (i, value) in [(0, 1.0), (k - 1, 2.0)] {
        put(&stream, &mut x, [0, i], value);
        for feature in [0, h - 1] {
            let at = orientation.shape(feature, i);
            put(&stream, &mut gate, at, 0.5 + value);
            put(&stream, &mut up, at, 3.0 - value);
        }
    }
    // gate 1·1.5 + 2·2.5, up 1·2 + 2·1.
    let expected = 6.5 * 4.0;
    let params = DeviceGatedLinearParams::separate(
        gate.view(),
        up.view(),
        orientation,
        Activation::BILINEAR,
    )
    .unwrap();
    // SAFETY: the layer keeps the matrices' memory, and nothing writes it.
    let layer = unsafe { GatedLinear::from_device(cuda, &params) }.unwrap();
    let mut out = zeros(1, h);
    let mut computed = 0;
    let plan = layer.plan(1);
    let ways = cuda.candidates(&plan.problem, None);
    // One tile of each kernel: they count alike, and a row of 2^30 is one tile's work.
    let kernel = |name: &str| name.split_once(' ').map_or(name, |(kernel, _)| kernel).to_owned();
    let mut kernels = BTreeSet::new();
    // One block adds up all of k there, for longer than a test may take.
    let long = |name: &str| name.contains("simt") && k > 1 << 20;
    let ways = ways.iter().filter(|way| {
        way.numerics.is_some() && !long(&way.name) && kernels.insert(kernel(&way.name))
    });
    let calls = ways.map(Some).chain([None]);
    for way in calls {
        out.buffer_mut().poison(0xFF).unwrap();
        let name = way.map_or_else(|| format!("planned {}", plan.kernel), |way| way.to_string());
        let what = format!("{name}: {} {k} {h} {orientation}", T::DTYPE);
        println!("{what}");
        let (x, to) = (x.view(), out.view_mut());
        let called = match way {
            Some(way) => layer.forward_by(&stream, way, x, to),
            None => layer.forward(&stream, x, to),
        };
        match called {
            Ok(()) => {}
            Err(CudaError::Unsupported { why, .. }) if way.is_some() => {
                assert!(!why.is_empty(), "{what}");
                continue;
            }
            Err(error) => panic!("{what}: {error}"),
        }
        for feature in [0, h / 2, h - 1] {
            let cell = out.view().cols_range(feature..feature + 1).unwrap();
            let there = cell.to_host(&stream).unwrap_or_else(|error| panic!("{what}: {error}"));
            let value = there.as_slice()[0].to_f32();
            let expected = if [0, h - 1].contains(&feature) { expected } else { 0.0 };
            assert_eq!(value, expected, "{what}: feature {feature}");
        }
        computed += usize::from(way.is_some());
    }
    computed
}

#[test]
fn rows_of_two_to_the_thirty_are_computed_or_refused() {
    let Some(cuda) = device() else { return };
    if !has_gpu() {
        return not_run("a simulator of rows of gigabytes");
    }
    let needed = 40 << 30;
    let room = DeviceMatrix::<bf16>::new(&cuda.stream(), 1, needed / 2);
    if room.map(drop).is_err() {
        return not_run(format_args!("{} GiB of device memory", needed >> 30));
    }
    let large = 1 << 30;
    for orientation in Orientation::ALL {
        let ways = [
            computed::<bf16>(&cuda, [large, 2], orientation),
            computed::<bf16>(&cuda, [large + 8, 2], orientation),
            computed::<bf16>(&cuda, [8, large], orientation),
            computed::<f32>(&cuda, [large / 2, 2], orientation),
            computed::<f32>(&cuda, [8, large / 2], orientation),
            // Within what every kernel counts.
            computed::<bf16>(&cuda, [large / 2, 2], orientation),
        ];
        println!("{orientation}: ways that computed them: {ways:?}");
        assert!(ways.iter().all(|&ways| ways > 0), "{ways:?}");
    }
}
