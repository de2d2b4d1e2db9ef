//! A call allocates nothing: its buffers are the layer's, from the first call on. What the system refuses is an error.

// Helpers of tests may unwrap as tests do.
#![allow(clippy::unwrap_used)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use swiglu_core::conformance::{Case, Parameters, QuantizedParameters, row_steps};
use swiglu_core::{
    Activation, BlockType, DType, Error, GateUpRef, Matrix, Numerics, Op, Path, QuantizedTypes,
    RowParams, SavePolicy, Wanted, random,
};
use swiglu_cpu::{CallOptions, Cpu, CpuOptions, GatedLinear, Mlp};

static COUNT: AtomicUsize = AtomicUsize::new(0);
static BYTES: AtomicUsize = AtomicUsize::new(0);
/// Whether buffers are refused, which alone are aligned to a cache line.
static REFUSE: AtomicBool = AtomicBool::new(false);

struct Counting;

// SAFETY: every call is passed on to the system's allocator, or refused.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.fetch_add(1, Ordering::Relaxed);
        BYTES.fetch_add(layout.size(), Ordering::Relaxed);
        if REFUSE.load(Ordering::Relaxed) && layout.align() == 64 {
            return std::ptr::null_mut();
        }
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
fn calls_do_not_allocate_and_what_is_refused_is_an_error() {
    calls_do_not_allocate();
    layers_whose_update_was_refused_compute_nothing();
}

fn layers_whose_update_was_refused_compute_nothing() {
    let case = |op| Case { bias: true, ..Case::new(op, [2, 8, 16], DType::F32) };
    let cpu = Cpu::new(&CpuOptions::default()).unwrap();
    let x = Matrix::<f32>::zeros(2, 8).unwrap();
    let (mut y, mut h) = (Matrix::zeros(2, 8).unwrap(), Matrix::zeros(2, 16).unwrap());
    let without_memory = |update: &mut dyn FnMut() -> swiglu_core::Result<()>| {
        REFUSE.store(true, Ordering::Relaxed);
        let refused = update();
        REFUSE.store(false, Ordering::Relaxed);
        assert!(matches!(refused, Err(Error::OutOfMemory { .. })), "{refused:?}");
    };
    let expect = |refused: swiglu_core::Result<()>| {
        let error = refused.unwrap_err().to_string();
        assert!(error.contains("make another layer"), "{error}");
    };
    let options = CallOptions::default();
    for path in [Path::Fused, Path::Unfused] {
        let of_mlp = Parameters::<f32>::new(&case(Op::Mlp)).unwrap();
        let params = of_mlp.mlp();
        let mut mlp = Mlp::for_training_with_path(&cpu, &params, SavePolicy::Save, path).unwrap();
        let saved = mlp.forward_train(x.view(), y.view_mut(), &options).unwrap();
        without_memory(&mut || mlp.update(&params));
        expect(mlp.forward(x.view(), y.view_mut()));
        expect(mlp.forward_train(x.view(), y.view_mut(), &options).map(drop));
        expect(mlp.backward(saved, y.view(), Wanted::ALL).map(drop));
        expect(mlp.update(&params));
        let of_gated = Parameters::<f32>::new(&case(Op::GatedLinear)).unwrap();
        let params = of_gated.gated();
        let mut gated =
            GatedLinear::for_training_with_path(&cpu, &params, SavePolicy::Save, path).unwrap();
        let saved = gated.forward_train(x.view(), h.view_mut(), &options).unwrap();
        without_memory(&mut || gated.update(&params));
        expect(gated.forward(x.view(), h.view_mut()));
        expect(gated.forward_train(x.view(), h.view_mut(), &options).map(drop));
        expect(gated.backward(saved, h.view(), Wanted::ALL).map(drop));
        expect(gated.update(&params));
    }
}

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
