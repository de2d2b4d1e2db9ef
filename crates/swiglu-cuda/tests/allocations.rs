//! A call allocates nothing: neither here nor on the device, from the second of its size on.

// Helpers of tests may unwrap as tests do.
#![allow(clippy::unwrap_used)]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use swiglu_core::conformance::{Case, Parameters, QuantizedParameters};
use swiglu_core::quant::{BlockType, QuantizedTypes};
use swiglu_core::{Activation, DType, Numerics, Op, Pass, Path, bf16};
use swiglu_cuda::{
    DecodeDesign, DeviceGateUp, DeviceGradientsMut, DeviceKeptMut, DeviceMatrix, Mlp,
};

thread_local! {
    /// Of this thread: the test harness has threads of its own.
    static COUNT: Cell<usize> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: every call is passed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // At the end of a thread its variables are gone.
        let _ = COUNT.try_with(|count| count.set(count.get() + 1));
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

/// Allocations of calls after the first.
fn count(mut call: impl FnMut()) -> usize {
    call();
    let before = COUNT.get();
    (0..10).for_each(|_| call());
    COUNT.get() - before
}

#[test]
fn calls_do_not_allocate() {
    let Some(cuda) = common::device() else { return };
    let stream = cuda.stream();
    let case = |m| Case { bias: true, ..Case::new(Op::Mlp, [m, 72, 88], DType::Bf16) };
    for (m, path) in [(1, None), (30, None), (40, None), (40, Some(Path::Unfused))] {
        let parameters = Parameters::<bf16>::new(&case(m)).unwrap();
        let mlp = match path {
            None => Mlp::new(&cuda, &parameters.mlp()),
            Some(path) => Mlp::with_path(&cuda, &parameters.mlp(), path),
        }
        .unwrap();
        let x = DeviceMatrix::<bf16>::zeros(&stream, m, 72).unwrap();
        let mut y = DeviceMatrix::<bf16>::zeros(&stream, m, 72).unwrap();
        // The device's memory in use is the same before and after.
        mlp.forward(&stream, x.view(), y.view_mut()).unwrap();
        let free = cuda.memory_info().unwrap().0;
        let counted = count(|| mlp.forward(&stream, x.view(), y.view_mut()).unwrap());
        assert_eq!(counted, 0, "m = {m}, {path:?}");
        assert_eq!(cuda.memory_info().unwrap().0, free, "m = {m}, {path:?}");
        // The host's matrices pass through memory that is kept.
        let (on_host, mut back) = (x.to_host().unwrap(), y.to_host().unwrap());
        mlp.forward_host(on_host.view(), back.view_mut()).unwrap();
        let free = cuda.memory_info().unwrap().0;
        let counted = count(|| mlp.forward_host(on_host.view(), back.view_mut()).unwrap());
        assert_eq!(counted, 0, "from and to the host, m = {m}, {path:?}");
        assert_eq!(cuda.memory_info().unwrap().0, free, "from and to the host, m = {m}, {path:?}");
        // Both passes, where gate and up are kept and where the gate alone is.
        let new = |rows, cols| DeviceMatrix::<bf16>::zeros(&stream, rows, cols).unwrap();
        let (mut gate, mut up, mut dx, mut dw) = (new(m, 88), new(m, 88), new(m, 72), new(88, 72));
        for has_up in [true, false] {
            let mut step = || {
                for pass in [Pass::Saving, Pass::Backward] {
                    let kept = match has_up {
                        true => [gate.view_mut(), up.view_mut()].into(),
                        false => DeviceKeptMut::from(gate.view_mut()),
                    };
                    let into =
                        DeviceGradientsMut::default().with_dx(dx.view_mut()).with_up(dw.view_mut());
                    match pass {
                        Pass::Saving => mlp.forward_saving(&stream, x.view(), y.view_mut(), kept),
                        _ => mlp.backward(&stream, x.view(), x.view(), kept, into, None),
                    }
                    .unwrap();
                }
            };
            step();
            let free = cuda.memory_info().unwrap().0;
            assert_eq!(count(step), 0, "training, m = {m}, {path:?}, up is kept: {has_up}");
            assert_eq!(cuda.memory_info().unwrap().0, free, "training, m = {m}, {path:?}");
        }
        if (m, path) == (30, None) {
            let ways = cuda.candidates(&parameters.mlp().problem(m), None);
            let others = ["cublaslt f32 + elementwise", "32xfitted + sm90_skinny_gemm"];
            for way in ways.iter().filter(|w| others.iter().any(|o| w.name.ends_with(o))) {
                let counted = count(|| {
                    mlp.forward_by(&stream, way, x.view(), y.view_mut()).unwrap();
                });
                assert_eq!(counted, 0, "{way}");
            }
        }
    }
    // The decode kernel, and quantised weights in one pass and in two of different sizes.
    let parameters = Parameters::<bf16>::new(&case(3)).unwrap();
    let design = Some(DecodeDesign::OneLaunch);
    let mlp = Mlp::with_design(&cuda, &parameters.mlp(), design).unwrap();
    let x = DeviceMatrix::<bf16>::zeros(&stream, 3, 72).unwrap();
    let mut y = DeviceMatrix::<bf16>::zeros(&stream, 3, 72).unwrap();
    assert_eq!(count(|| mlp.forward(&stream, x.view(), y.view_mut()).unwrap()), 0, "decode");
    for m in [3, 20] {
        let types = QuantizedTypes::of(Op::Mlp, BlockType::Q8_0);
        let case = Case { quantized: Some(types), ..Case::new(Op::Mlp, [m, 64, 96], DType::Bf16) };
        let parameters = QuantizedParameters::new::<bf16>(&case, types).unwrap();
        let mlp = Mlp::<bf16>::from_quantized(&cuda, &parameters.mlp().unwrap()).unwrap();
        let x = DeviceMatrix::<bf16>::zeros(&stream, m, 64).unwrap();
        let mut y = DeviceMatrix::<bf16>::zeros(&stream, m, 64).unwrap();
        let counted = count(|| mlp.forward(&stream, x.view(), y.view_mut()).unwrap());
        assert_eq!(counted, 0, "quantised, m = {m}");
    }
    let x = DeviceMatrix::<bf16>::zeros(&stream, 5, 40).unwrap();
    let mut h = DeviceMatrix::<bf16>::zeros(&stream, 5, 40).unwrap();
    let inputs = DeviceGateUp::separate(x.view(), x.view()).unwrap();
    let numerics = Numerics::default();
    let counted = count(|| {
        cuda.activation(&stream, &Activation::SWIGLU, numerics, inputs, h.view_mut()).unwrap();
    });
    assert_eq!(counted, 0, "activation");
}
