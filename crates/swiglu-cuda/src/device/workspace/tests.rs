//! What keeps scratch memory of one call from another.

use super::*;
use crate::common::{device, open};

/// The workspace's address and size.
fn now(stream: &Stream) -> (u64, usize) {
    let scratch = stream.inner().scratch();
    scratch.as_ref().map_or((0, 0), |scratch| (scratch.ptr, scratch.bytes))
}

#[test]
fn it_grows_and_is_reused() {
    // A device of its own: scratch memory that no stream has is for whoever asks first.
    let Some(cuda) = open(0) else { return };
    let cuda = cuda.unwrap();
    let stream = cuda.new_stream().unwrap();
    assert_eq!(cuda.with_workspace(&stream, None, 0, |work| Ok(work.ptr)).unwrap(), 0);
    let first = cuda.with_workspace(&stream, None, 100, |work| Ok(work.ptr)).unwrap();
    assert!(first != 0 && first.is_multiple_of(256));
    assert_eq!(cuda.with_workspace(&stream, None, 50_000, |work| Ok(work.ptr)).unwrap(), first);
    cuda.reserve_workspace(&stream, 1 << 20).unwrap();
    let (grown, bytes) = now(&stream);
    assert!(bytes >= 1 << 20);
    assert_eq!(cuda.with_workspace(&stream, None, 1 << 20, |work| Ok(work.ptr)).unwrap(), grown);
    let other = cuda.new_stream().unwrap();
    assert_ne!(cuda.with_workspace(&other, None, 100, |work| Ok(work.ptr)).unwrap(), grown);
    // SAFETY: the legacy default stream is always valid.
    let borrowed = unsafe { cuda.borrow_stream(0) }.unwrap();
    let kept = cuda.with_workspace(&borrowed, None, 100, |work| Ok(work.ptr)).unwrap();
    drop(borrowed);
    // SAFETY: as above; 1 is another name for it.
    let again = unsafe { cuda.borrow_stream(1) }.unwrap();
    assert_eq!(cuda.with_workspace(&again, None, 100, |work| Ok(work.ptr)).unwrap(), kept);
}

#[test]
fn a_graph_has_scratch_memory_of_its_own() {
    let Some(cuda) = device() else { return };
    let stream = cuda.new_stream().unwrap();
    let own = cuda.with_workspace(&stream, None, 1 << 16, |work| Ok(work.ptr)).unwrap();
    let captured = std::cell::Cell::new([0; 2]);
    let graph = stream.capture(|| {
        let small = cuda.with_workspace(&stream, None, 1 << 16, |work| Ok(work.ptr))?;
        let large = cuda.with_workspace(&stream, None, 1 << 22, |work| Ok(work.ptr))?;
        assert_eq!(cuda.with_workspace(&stream, None, 1 << 16, |work| Ok(work.ptr))?, large);
        captured.set([small, large]);
        Ok::<(), CudaError>(())
    });
    let graph = graph.unwrap();
    assert_eq!(cuda.with_workspace(&stream, None, 1 << 16, |work| Ok(work.ptr)).unwrap(), own);
    // The addresses still belong to this device: nobody else can get them.
    for ptr in captured.get() {
        assert_ne!(ptr, own);
        // SAFETY: only asked for, never used.
        unsafe { crate::DeviceMatrixRef::<f32>::from_raw(&cuda, ptr, 1, 1, 1) }.unwrap();
    }
    // SAFETY: nothing but the workspace is used.
    unsafe { graph.launch(&stream) }.unwrap();
    stream.synchronize().unwrap();
}

#[test]
fn calls_on_one_stream_do_not_interleave() {
    let Some(cuda) = device() else { return };
    let stream = cuda.new_stream().unwrap();
    let inside = std::sync::atomic::AtomicBool::new(false);
    let call = || {
        for _ in 0..200 {
            let exclusive = |_| {
                use std::sync::atomic::Ordering::SeqCst;
                assert!(!inside.swap(true, SeqCst));
                std::thread::yield_now();
                inside.store(false, SeqCst);
                Ok(())
            };
            cuda.with_workspace(&stream, None, 64, exclusive).unwrap();
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(call);
        }
    });
}
