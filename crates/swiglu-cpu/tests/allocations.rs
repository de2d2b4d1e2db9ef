//! A call allocates nothing: its buffers are the layer's, from the first call on.

// Helpers of tests may unwrap as tests do.
#![allow(clippy::unwrap_used)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use swiglu_core::conformance::{Case, Parameters, QuantizedParameters, row_steps};
use swiglu_core::{
    Activation, BlockType, DType, GateUpRef, Matrix, Numerics, Op, Path, QuantizedTypes, RowParams,
    random,
};
use swiglu_cpu::{Cpu, CpuOptions, Mlp};

static COUNT: AtomicUsize = AtomicUsize::new(0);
static BYTES: AtomicUsize = AtomicUsize::new(0);

struct Counting;

// SAFETY: every call is passed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.fetch_add(1, Ordering::Relaxed);
        BYTES.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, p: *mut u8, layout: Layout) {
        // SAFETY: the caller's.
        unsafe { System.dealloc(p, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Allocations and bytes of `calls` calls after the first: the lesser of two counts, since the harness's own thread may
/// still be starting this test.
fn count(calls: usize, mut call: impl FnMut()) -> (usize, usize) {
    call();
    let mut once = || {
        let before = (COUNT.load(Ordering::Relaxed), BYTES.load(Ordering::Relaxed));
        (0..calls).for_each(|_| call());
        (COUNT.load(Ordering::Relaxed) - before.0, BYTES.load(Ordering::Relaxed) - before.1)
    };
    once().min(once())
}

/// One test, so that nothing else allocates beside it.
#[test]
fn calls_do_not_allocate() {
    const CALLS: usize = 64;
    let case = |m| Case { bias: true, ..Case::new(Op::Mlp, [m, 256, 700], DType::F32) };
    for threads in [1, 2] {
        let cpu = Cpu::new(&CpuOptions::default().with_threads(threads)).unwrap();
        for (m, path) in [(1, Path::Fused), (20, Path::Fused), (20, Path::Unfused)] {
            let parameters = Parameters::<f32>::new(&case(m)).unwrap();
            let mlp = Mlp::with_path(&cpu, &parameters.mlp(), path).unwrap();
            let x = random::normal_matrix::<f32>(1, m, 256, 1.0).unwrap();
            let mut y = Matrix::zeros(m, 256).unwrap();
            let (count, bytes) = count(CALLS, || mlp.forward(x.view(), y.view_mut()).unwrap());
            // With several threads the pool itself keeps a job of some dozen bytes per helper and
            // operation; nothing grows with the problem.
            let operations = if path == Path::Fused { 1 } else { 4 };
            let allowed = (threads - 1) * operations * CALLS;
            assert!(count <= allowed + allowed / 16, "{threads} threads, m = {m}: {count}");
            assert!(bytes <= 256 * allowed, "{threads} threads, m = {m}: {bytes} bytes");
        }
        for steps in row_steps().unwrap() {
            let parameters = Parameters::<f32>::new(&case(20)).unwrap();
            let params = parameters.mlp().with_rows(RowParams::new(steps));
            let mlp = Mlp::new(&cpu, &params).unwrap();
            let x = random::normal_matrix::<f32>(1, 20, 256, 1.0).unwrap();
            let mut y = Matrix::zeros(20, 256).unwrap();
            let (count, _) = count(CALLS, || mlp.forward(x.view(), y.view_mut()).unwrap());
            let allowed = (threads - 1) * 6 * CALLS;
            assert!(count <= allowed + allowed / 16, "{threads} threads, {steps}: {count}");
        }
        for m in [1, 3, 20] {
            let types = QuantizedTypes::new(BlockType::Q4_K, Some(BlockType::Q8_0));
            let case = Case { quantized: Some(types), intermediate: 704, ..case(m) };
            let parameters = QuantizedParameters::new::<f32>(&case, types).unwrap();
            let mlp = Mlp::<f32>::quantized(&cpu, &parameters.mlp().unwrap()).unwrap();
            let x = random::normal_matrix::<f32>(1, m, 256, 1.0).unwrap();
            let mut y = Matrix::zeros(m, 256).unwrap();
            let (count, bytes) = count(CALLS, || mlp.forward(x.view(), y.view_mut()).unwrap());
            let allowed = (threads - 1) * CALLS;
            assert!(count <= allowed + allowed / 16, "{threads} threads, m = {m}: {count}");
            assert!(bytes <= 256 * allowed, "{threads} threads, m = {m}: {bytes} bytes");
        }
        let x = random::normal_matrix::<f32>(1, 64, 512, 1.0).unwrap();
        let mut h = Matrix::zeros(64, 512).unwrap();
        let (count, _) = count(CALLS, || {
            let inputs = GateUpRef::separate(x.view(), x.view()).unwrap();
            let numerics = Numerics::default();
            cpu.activation(&Activation::SWIGLU, numerics, inputs, h.view_mut()).unwrap();
        });
        assert!(count <= (threads - 1) * CALLS, "{threads} threads: {count}");
    }
}
