//! `forward_into` keeps its workspace: bytes are counted for the whole process, so in a test of its
//! own.

// A helper of a test is a test: it ends by panicking.
#![allow(clippy::unwrap_used)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use swiglu::{CpuOptions, Device, GatedLinear, Layer, Matrix, Mlp, with_dtype};
use swiglu_fixtures::STORIES15M_FILE as STORIES;

struct Counting;

static ALLOCATED: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every request is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATED.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promises are those of `System`.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Bytes that five calls allocate.
fn allocated<K: swiglu::kind::Kind, T: swiglu::Element>(layer: &Layer<K>) -> usize {
    let x = Matrix::<T>::zeros(40, layer.hidden()).unwrap();
    let mut out = Matrix::<T>::zeros(40, layer.out_features()).unwrap();
    // The first call makes the workspace that later calls of this size use again.
    layer.forward_into(&x, &mut out).unwrap();
    let before = ALLOCATED.load(Ordering::Relaxed);
    for _ in 0..5 {
        layer.forward_into(&x, &mut out).unwrap();
    }
    ALLOCATED.load(Ordering::Relaxed) - before
}

/// Bytes that the first call allocates.
fn allocated_first<T: swiglu::Element>(layer: &Mlp, m: usize) -> usize {
    let x = Matrix::<T>::zeros(m, layer.hidden()).unwrap();
    let mut out = Matrix::<T>::zeros(m, layer.out_features()).unwrap();
    let before = ALLOCATED.load(Ordering::Relaxed);
    layer.forward_into(&x, &mut out).unwrap();
    ALLOCATED.load(Ordering::Relaxed) - before
}

/// Bytes that a call beyond the first allocates for its result, and those that the result has.
fn allocated_for_result<T: swiglu::Element>(layer: &Mlp) -> [usize; 2] {
    let x = Matrix::<T>::zeros(40, layer.hidden()).unwrap();
    let y = layer.forward(&x).unwrap();
    let before = ALLOCATED.load(Ordering::Relaxed);
    assert_eq!(layer.forward(&x).unwrap().as_slice(), y.as_slice());
    [ALLOCATED.load(Ordering::Relaxed) - before, size_of_val(y.as_slice())]
}

#[test]
fn forward_into_keeps_its_workspace() {
    // A pool of threads notes each job it hands out, in blocks of a queue that it makes as it needs them: the more the
    // later its threads come; the result alone is 46 kB.
    for (threads, limit) in [(1, 0), (2, 16384)] {
        let options = CpuOptions::default().with_threads(threads);
        let device = Device::cpu_with(options).unwrap();
        for dtype in swiglu::DType::ALL {
            let mlp = Mlp::load(STORIES, 0).unwrap().dtype(dtype).to(&device).unwrap();
            let gated = GatedLinear::load(STORIES, 0).unwrap().dtype(dtype).to(&device).unwrap();
            let bytes: swiglu::Result<_> =
                with_dtype!(dtype, T => Ok([allocated::<_, T>(&mlp), allocated::<_, T>(&gated)]));
            let bytes = bytes.unwrap();
            assert!(bytes.iter().all(|&b| b <= limit), "{dtype}, {threads} threads: {bytes:?}");
            let result: swiglu::Result<_> =
                with_dtype!(dtype, T => Ok(allocated_for_result::<T>(&mlp)));
            let [bytes, result] = result.unwrap();
            assert!(
                (result..=result + limit).contains(&bytes),
                "{dtype}, {threads} threads: {bytes}"
            );
            // What was made ready beforehand suffices, also for fewer tokens.
            device.trim();
            mlp.reserve(40, 1).unwrap();
            for m in [40, 1, 7] {
                let bytes: swiglu::Result<_> =
                    with_dtype!(dtype, T => Ok(allocated_first::<T>(&mlp, m)));
                assert!(bytes.unwrap() <= limit, "{dtype}, {threads} threads: {m} tokens");
            }
        }
    }
}
