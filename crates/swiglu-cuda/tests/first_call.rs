//! What first calls compile: what they launch, and for another shape of the same kernel nothing.

// A generic helper is not seen as a test.
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Barrier;

use half::bf16;
use swiglu_core::conformance::{Case, Parameters};
use swiglu_core::{DType, Element, Matrix, Op, random};
use swiglu_cuda::jit::cache::CacheOptions;
use swiglu_cuda::{Cuda, GatedLinear, Mlp};

/// A device with a cache of its own, and kernels whose tiles are not fitted to a layer.
fn device(cache: &Path) -> Option<Cuda> {
    let cache = CacheOptions { dir: Some(cache.to_owned()), ..CacheOptions::default() };
    let options = common::options()?.with_cache(cache).with_portable_kernels(true);
    Some(Cuda::with_options(&options).unwrap())
}

fn compiled(cache: &Path) -> usize {
    let entries = std::fs::read_dir(cache).into_iter().flatten().map(|entry| entry.unwrap().path());
    entries.filter(|path| path.extension().is_some_and(|e| e == "cubin")).count()
}

/// Calls a new layer once; how it was planned.
fn call<T: Element>(cuda: &Cuda, op: Op, shape: [usize; 3]) -> String {
    let [m, k, h] = shape;
    let parameters = Parameters::<T>::new(&Case::new(op, shape, T::DTYPE)).unwrap();
    let x = random::normal_matrix::<T>(1, m, k, 1.0).unwrap();
    let columns = if op == Op::Mlp { k } else { h };
    let mut out = Matrix::<T>::zeros(m, columns).unwrap();
    let plan = match op {
        Op::Mlp => {
            let layer = Mlp::new(cuda, &parameters.mlp()).unwrap();
            layer.forward_host(x.view(), out.view_mut()).unwrap();
            layer.plan(m)
        }
        _ => {
            let layer = GatedLinear::new(cuda, &parameters.gated()).unwrap();
            layer.forward_host(x.view(), out.view_mut()).unwrap();
            layer.plan(m)
        }
    };
    format!("{} {:?}", plan.kernel, plan.parameters)
}

#[test]
fn a_first_call_compiles_what_it_launches_and_another_shape_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let Some(cuda) = device(dir.path()) else { return };
    let mut known = BTreeSet::new();
    for (op, dtype, shapes) in [
        (Op::GatedLinear, DType::Bf16, [[40, 72, 88], [37, 144, 96]]),
        (Op::GatedLinear, DType::F32, [[40, 72, 88], [129, 20, 24]]),
        // A block's kernel for h is that of the gated linear layer, behind which cuBLASLt has its own.
        (Op::Mlp, DType::Bf16, [[40, 72, 88], [37, 144, 96]]),
        (Op::Mlp, DType::F32, [[2, 24, 16], [2, 40, 24]]),
    ] {
        let by = match dtype {
            DType::F32 => call::<f32>,
            _ => call::<bf16>,
        };
        let first = by(&cuda, op, shapes[0]);
        let used = cuda.take_used_kernels();
        known.extend(used.keys().cloned());
        // On the simulator one kernel of ours; a device may plan two.
        let most = if common::has_gpu() { 2 } else { 1 };
        assert!(used.len() <= most, "{op} {dtype}: {first}: {used:?}");
        assert_eq!(compiled(dir.path()), known.len(), "{op} {dtype}: {first}: {known:?}");
        let second = by(&cuda, op, shapes[1]);
        if second != first && common::has_gpu() {
            continue;
        }
        assert_eq!(second, first, "{op} {dtype}");
        assert_eq!(cuda.take_used_kernels(), used, "{op} {dtype}");
        assert_eq!(compiled(dir.path()), known.len(), "{op} {dtype}");
    }
}

#[test]
fn threads_with_one_layer_each_compile_its_kernel_once() {
    let dir = tempfile::tempdir().unwrap();
    let Some(cuda) = device(dir.path()) else { return };
    let start = Barrier::new(4);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                start.wait();
                call::<bf16>(&cuda, Op::GatedLinear, [40, 72, 88])
            });
        }
    });
    assert_eq!((compiled(dir.path()), cuda.take_used_kernels().len()), (1, 1));
}
