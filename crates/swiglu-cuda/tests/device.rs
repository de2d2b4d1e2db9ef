//! Devices, streams, events and graphs.

use crate::common::device;
use swiglu_cuda::{Cuda, CudaError, DeviceBuffer};

#[test]
fn a_device_says_what_it_is() {
    let Some(cuda) = device() else { return };
    let facts = cuda.facts();
    assert_eq!((facts.ordinal, cuda.ordinal()), (0, 0));
    assert!(!facts.name.is_empty() && facts.sm_count > 0 && facts.memory_bytes > 0, "{facts:?}");
    assert!(facts.shared_bytes_optin >= 48 << 10 && facts.l2_bytes > 0, "{facts:?}");
    assert!(facts.driver_version.0 >= 12, "{facts:?}");
    assert_eq!(cuda.arch().capability(), facts.compute_capability);
    let json = serde_json::to_string(facts).unwrap();
    assert_eq!(&serde_json::from_str::<swiglu_cuda::DeviceFacts>(&json).unwrap(), facts);
    let (free, total) = cuda.memory_info().unwrap();
    assert!(free <= total && total <= facts.memory_bytes, "{free} {total} {facts:?}");
}

#[test]
fn a_device_that_is_not_there_is_refused_with_the_count() {
    if device().is_none() {
        return;
    }
    let count = Cuda::device_count().unwrap();
    assert!(count >= 1);
    let error = Cuda::new(count).unwrap_err();
    assert_eq!(error, CudaError::DeviceIndex { given: count, count });
    assert_eq!(
        Cuda::new(usize::MAX).unwrap_err(),
        CudaError::DeviceIndex { given: usize::MAX, count }
    );
}

#[test]
fn streams_are_made_once_and_borrowed_ones_are_recognised() {
    let Some(cuda) = device() else { return };
    assert_eq!(cuda.stream().raw(), cuda.clone().stream().raw());
    let (a, b) = (cuda.new_stream().unwrap(), cuda.new_stream().unwrap());
    assert_ne!(a.raw(), b.raw());
    assert_ne!(a.raw(), cuda.stream().raw());
    // SAFETY: `a` outlives every use, and nothing is enqueued after it is gone.
    let borrowed = unsafe { cuda.borrow_stream(a.raw()) }.unwrap();
    assert_eq!(borrowed.raw(), a.raw());
    borrowed.synchronize().unwrap();
    // SAFETY: 0 is always valid.
    let legacy = unsafe { cuda.borrow_stream(0) }.unwrap();
    assert_eq!(legacy.raw(), 0);
    let buffer = DeviceBuffer::from_host(&legacy, &[1.0f32, 2.0]).unwrap();
    assert_eq!(buffer.to_host().unwrap(), [1.0, 2.0]);
}

#[test]
fn streams_work_from_other_threads_and_wait_for_each_other() {
    let Some(cuda) = device() else { return };
    let stream = cuda.new_stream().unwrap();
    let mut buffer = DeviceBuffer::<f32>::zeros(&stream, 1000).unwrap();
    let event = std::thread::spawn({
        let stream = stream.clone();
        move || stream.record().unwrap()
    })
    .join()
    .unwrap();
    let other = cuda.new_stream().unwrap();
    other.wait(&event).unwrap();
    buffer.poison(0xFF).unwrap();
    let last = stream.record().unwrap();
    last.synchronize().unwrap();
    assert!(last.elapsed_ms(&event).unwrap() >= 0.0);
    assert!(buffer.to_host().unwrap().iter().all(|v| v.is_nan()));
}

#[test]
fn a_graph_does_what_was_captured_each_time_it_is_launched() {
    let Some(cuda) = device() else { return };
    let stream = cuda.new_stream().unwrap();
    let mut buffer = DeviceBuffer::<f32>::zeros(&stream, 100).unwrap();
    let graph = stream.capture(|| buffer.poison(0xFF)).unwrap();
    assert!(!stream.is_capturing().unwrap());
    assert_eq!(buffer.to_host().unwrap(), [0.0; 100], "capturing must not execute");
    for _ in 0..2 {
        buffer.poison(0).unwrap();
        // SAFETY: the buffer is alive and nothing else runs.
        unsafe { graph.launch(&stream) }.unwrap();
        assert!(buffer.to_host().unwrap().iter().all(|v| v.is_nan()));
    }
    // On another stream, in order by an event.
    buffer.poison(0).unwrap();
    let other = cuda.new_stream().unwrap();
    other.wait(&stream.record().unwrap()).unwrap();
    // SAFETY: as above.
    unsafe { graph.launch(&other) }.unwrap();
    stream.wait(&other.record().unwrap()).unwrap();
    assert!(buffer.to_host().unwrap().iter().all(|v| v.is_nan()));
}

#[test]
fn what_cannot_be_captured_is_refused_by_name() {
    let Some(cuda) = device() else { return };
    let stream = cuda.new_stream().unwrap();
    let buffer = DeviceBuffer::<f32>::zeros(&stream, 8).unwrap();
    let refused = |error: CudaError, part: &str| {
        let text = error.to_string();
        assert!(matches!(error, CudaError::Capture { .. }) && text.contains(part), "{text}");
    };
    refused(stream.capture(|| stream.synchronize()).unwrap_err(), "waiting");
    refused(stream.capture(|| buffer.to_host().map(drop)).unwrap_err(), "copying");
    let allocate = || DeviceBuffer::<f32>::new(&stream, 8).map(drop);
    refused(stream.capture(allocate).unwrap_err(), "allocating 32 bytes");
    let nothing = || Ok::<(), CudaError>(());
    let nested = || stream.capture(nothing).map(drop);
    refused(stream.capture(nested).unwrap_err(), "second capture");
    // SAFETY: 0 is always valid.
    let legacy = unsafe { cuda.borrow_stream(0) }.unwrap();
    refused(legacy.capture(nothing).unwrap_err(), "legacy");
    // Each refusal has left the stream usable.
    stream.synchronize().unwrap();
    assert_eq!(buffer.to_host().unwrap(), [0.0; 8]);
}

#[test]
fn a_panic_ends_the_capture() {
    let Some(cuda) = device() else { return };
    let stream = cuda.new_stream().unwrap();
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let _ = stream.capture(|| -> Result<(), CudaError> { panic!("in the middle of it") });
    }));
    assert!(caught.is_err());
    assert!(!stream.is_capturing().unwrap());
    stream.synchronize().unwrap();
}

#[test]
fn buffers_dropped_in_a_capture_stay_for_the_graph() {
    let Some(cuda) = device() else { return };
    let stream = cuda.new_stream().unwrap();
    let mut buffer = Some(DeviceBuffer::<f32>::zeros(&stream, 64).unwrap());
    let graph = stream
        .capture(|| {
            let mut buffer = buffer.take().expect("captured once");
            buffer.poison(1)
        })
        .unwrap();
    // SAFETY: the graph keeps a buffer that was dropped in its capture.
    unsafe { graph.launch(&stream) }.unwrap();
    stream.synchronize().unwrap();
}
