//! Memory that several streams use: whatever is dropped, captured or read when, safe code gets what it asked for. One file,
//! because its tests share a layer and its streams.

// A generic helper is not seen as a test.
#![allow(clippy::unwrap_used)]

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::common::{self, device, has_gpu};
use swiglu_core::{
    Activation, DType, Element, GateUpWeights, GatedLinearParams, Matrix, MatrixRef, MlpParams,
    Numerics, Op, Orientation, Problem, random,
};
use swiglu_cuda::{
    Cuda, CudaError, DeviceBuffer, DeviceGateUp, DeviceMatrix, DeviceMatrixMut, DeviceMatrixRef,
    DeviceScratch, GatedLinear, Mlp, Stream, release_unused,
};

/// Rows that keep a GPU busy for a while.
fn rows(gpu: usize) -> usize {
    if has_gpu() { gpu } else { 8 }
}

fn rounds() -> u64 {
    if has_gpu() { 20 } else { 4 }
}

const K: usize = 64;
const H: usize = 96;

fn layer<T: Element>(cuda: &Cuda, seed: u64) -> GatedLinear<T> {
    let [gate, up] = [seed, seed + 1].map(|s| random::normal_matrix::<T>(s, H, K, 0.1).unwrap());
    let weights = GateUpWeights::separate(gate.view(), up.view(), Orientation::OutIn).unwrap();
    GatedLinear::new(cuda, &GatedLinearParams::new(weights, Activation::SWIGLU)).unwrap()
}

fn mlp<T: Element>(cuda: &Cuda, seed: u64) -> Mlp<T> {
    let [gate, up] = [seed, seed + 1].map(|s| random::normal_matrix::<T>(s, H, K, 0.1).unwrap());
    let down = random::normal_matrix::<T>(seed + 2, K, H, 0.1).unwrap();
    let weights = GateUpWeights::separate(gate.view(), up.view(), Orientation::OutIn).unwrap();
    let gated = GatedLinearParams::new(weights, Activation::SWIGLU);
    let params = MlpParams::new(gated, down.view(), Orientation::OutIn);
    Mlp::new(cuda, &params).unwrap()
}

fn input<T: Element>(m: usize) -> Matrix<T> {
    random::normal_matrix(7, m, K, 1.0).unwrap()
}

fn same<T: Element>(given: MatrixRef<'_, T>, expected: MatrixRef<'_, T>, what: &str) {
    assert_eq!(given.as_slice(), expected.as_slice(), "{what}");
}

#[test]
fn memory_dropped_while_another_stream_writes_it_is_not_given_away() {
    let Some(cuda) = device() else { return };
    let (ours, theirs) = (cuda.new_stream().unwrap(), cuda.new_stream().unwrap());
    let (m, layer) = (rows(1 << 20), layer::<f32>(&cuda, 1));
    let x = DeviceMatrix::<f32>::zeros(&ours, m, K).unwrap();
    for round in 0..rounds() {
        let mut out = DeviceMatrix::<f32>::new(&ours, m, H).unwrap();
        for _ in 0..4 {
            layer.forward(&theirs, x.view(), out.view_mut()).unwrap();
        }
        drop(out);
        let mut fresh = DeviceMatrix::<f32>::new(&ours, m, H).unwrap();
        fresh.buffer_mut().poison(1).unwrap();
        theirs.synchronize().unwrap();
        let fresh = fresh.to_host().unwrap();
        let ones = f32::from_bits(0x0101_0101);
        let written = fresh.as_slice().iter().filter(|v| **v != ones).count();
        assert_eq!(written, 0, "round {round}: of {} values", m * H);
    }
}

#[test]
fn a_copy_to_the_host_waits_for_the_stream_that_wrote() {
    let Some(cuda) = device() else { return };
    let (ours, theirs) = (cuda.new_stream().unwrap(), cuda.new_stream().unwrap());
    let (m, layer) = (rows(1 << 20), layer::<f32>(&cuda, 3));
    let ones = Matrix::from_vec(vec![1.0f32; m * K], m, K).unwrap();
    let x = DeviceMatrix::from_host(&ours, ones.view()).unwrap();
    for round in 0..rounds() {
        let mut out = DeviceMatrix::<f32>::zeros(&ours, m, H).unwrap();
        for _ in 0..4 {
            layer.forward(&theirs, x.view(), out.view_mut()).unwrap();
        }
        let out = out.to_host().unwrap();
        assert!(out.as_slice().iter().all(|v| *v != 0.0), "round {round}");
    }
}

#[test]
fn an_input_that_is_overwritten_or_dropped_was_read_before() {
    let Some(cuda) = device() else { return };
    let (ours, theirs) = (cuda.new_stream().unwrap(), cuda.new_stream().unwrap());
    let (m, layer) = (rows(1 << 18), layer::<f32>(&cuda, 5));
    let tokens = random::normal_matrix::<f32>(1, m, K, 1.0).unwrap();
    let mut x = DeviceMatrix::from_host(&ours, tokens.view()).unwrap();
    let mut expected = DeviceMatrix::<f32>::new(&ours, m, H).unwrap();
    layer.forward(&ours, x.view(), expected.view_mut()).unwrap();
    let expected = expected.to_host().unwrap();
    for round in 0..rounds() {
        let mut outputs: Vec<_> =
            (0..4).map(|_| DeviceMatrix::<f32>::new(&theirs, m, H).unwrap()).collect();
        for out in &mut outputs {
            layer.forward(&theirs, x.view(), out.view_mut()).unwrap();
        }
        if round % 2 == 0 {
            x.buffer_mut().poison(0xFF).unwrap();
            x.view_mut().upload(&ours, tokens.view()).unwrap();
        } else {
            drop(x);
            let mut fresh = DeviceBuffer::<f32>::new(&ours, m * K).unwrap();
            fresh.poison(0xFF).unwrap();
            x = DeviceMatrix::from_host(&ours, tokens.view()).unwrap();
        }
        for out in outputs {
            same(out.to_host().unwrap().view(), expected.view(), &format!("round {round}"));
        }
    }
}

#[test]
fn a_layer_dropped_while_it_runs_ends_its_work() {
    let Some(cuda) = device() else { return };
    let stream = cuda.new_stream().unwrap();
    let m = rows(1 << 16);
    let x = DeviceMatrix::from_host(&stream, input::<f32>(m).view()).unwrap();
    let mut expected = None;
    for round in 0..rounds() {
        let mlp = mlp::<f32>(&cuda, 11);
        let mut out = DeviceMatrix::<f32>::zeros(&stream, m, K).unwrap();
        for _ in 0..4 {
            mlp.forward(&stream, x.view(), out.view_mut()).unwrap();
        }
        drop(mlp);
        // The weights' memory, where it was given back too early.
        let poisoned: Vec<_> = [2 * H * K, K * H, H * K]
            .map(|n| {
                let mut buffer = DeviceBuffer::<f32>::new(&cuda.stream(), n).unwrap();
                buffer.poison(0xFF).unwrap();
                buffer
            })
            .into();
        let out = out.to_host().unwrap();
        drop(poisoned);
        let expected = expected.get_or_insert_with(|| out.clone());
        same(out.view(), expected.view(), &format!("round {round}"));
        assert!(out.as_slice().iter().all(|v| v.is_finite()));
    }
}

#[test]
fn graphs_own_what_they_use_and_run_on_any_stream() {
    let Some(cuda) = device() else { return };
    let streams: Vec<Stream> = (0..3).map(|_| cuda.new_stream().unwrap()).collect();
    for m in [1, 3, 40] {
        let tokens: Vec<_> =
            (0..2).map(|s| random::normal_matrix::<f32>(s, m, K, 1.0).unwrap()).collect();
        let layer = mlp::<f32>(&cuda, 20);
        let expected: Vec<_> = tokens
            .iter()
            .map(|x| {
                let x = DeviceMatrix::from_host(&streams[0], x.view()).unwrap();
                let mut out = DeviceMatrix::<f32>::new(&streams[0], m, K).unwrap();
                layer.forward(&streams[0], x.view(), out.view_mut()).unwrap();
                out.to_host().unwrap()
            })
            .collect();
        // Two graphs of one layer, captured on a stream that never ran it.
        let capture = |_| {
            let x = DeviceMatrix::<f32>::zeros(&streams[0], m, K).unwrap();
            let out = DeviceMatrix::<f32>::zeros(&streams[1], m, K).unwrap();
            layer.capture(&streams[1], x, out).unwrap()
        };
        let mut graphs: Vec<_> = (0..2).map(capture).collect();
        drop(layer);
        for round in 0..8 {
            for (i, graph) in graphs.iter_mut().enumerate() {
                let (there, here) = (&streams[(round + i) % 3], &streams[round % 3]);
                graph.x_mut().upload(here, tokens[i].view()).unwrap();
                for _ in 0..3 {
                    graph.launch(there).unwrap();
                }
            }
            for (graph, expected) in graphs.iter().zip(&expected) {
                let out = graph.out().to_host().unwrap();
                same(out.view(), expected.view(), &format!("{m} tokens, round {round}"));
            }
        }
    }
}

#[test]
fn a_borrow_ends_with_its_guard() {
    let Some(cuda) = device() else { return };
    let owner = cuda.new_stream().unwrap();
    // SAFETY: the owner outlives every guard.
    let borrow = || unsafe { cuda.borrow_stream(owner.raw()) }.unwrap();
    let (first, second) = (borrow(), borrow());
    let clone = Stream::clone(&first);
    let mut buffer = DeviceBuffer::<f32>::zeros(&clone, 1000).unwrap();
    drop(first);
    buffer.poison(1).unwrap();
    drop(second);
    let refused = |error: CudaError| {
        let text = error.to_string();
        assert!(matches!(error, CudaError::Unsupported { .. }), "{text}");
        assert!(text.contains("borrow it again"), "{text}");
    };
    refused(clone.synchronize().unwrap_err());
    refused(clone.record().map(drop).unwrap_err());
    refused(buffer.poison(0).unwrap_err());
    refused(DeviceBuffer::<f32>::new(&clone, 1).map(drop).unwrap_err());
    // Memory of that stream is used, and freed, behind what the stream did.
    let matrix = swiglu_cuda::DeviceMatrixRef::new(&buffer, 10, 100).unwrap();
    let bytes = matrix.to_host(&cuda.stream()).unwrap();
    assert!(bytes.as_slice().iter().all(|v| *v == f32::from_bits(0x0101_0101)));
    drop(buffer);
    let again = borrow();
    again.synchronize().unwrap();
    clone.synchronize().unwrap();
}

#[test]
fn the_default_stream_of_a_thread_is_that_threads() {
    let Some(cuda) = device() else { return };
    // SAFETY: the default stream of this thread is valid while it lives.
    let mine = unsafe { cuda.borrow_stream(2) }.unwrap();
    let matrix = DeviceMatrix::from_host(&mine, input::<f32>(3).view()).unwrap();
    let layer = layer::<f32>(&cuda, 30);
    let mut out = DeviceMatrix::<f32>::new(&mine, 3, H).unwrap();
    layer.forward(&mine, matrix.view(), out.view_mut()).unwrap();
    let expected = out.to_host().unwrap();
    let (clone, cuda) = (Stream::clone(&mine), &cuda);
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            let error = clone.synchronize().unwrap_err();
            assert!(error.to_string().contains("another thread"), "{error}");
            // SAFETY: as above, for the thread that runs this.
            let own = unsafe { cuda.borrow_stream(2) }.unwrap();
            let x = DeviceMatrix::from_host(&own, input::<f32>(3).view()).unwrap();
            let mut out = DeviceMatrix::<f32>::new(&own, 3, H).unwrap();
            layer.forward(&own, x.view(), out.view_mut()).unwrap();
            out.to_host().unwrap()
        });
        same(other.join().unwrap().view(), expected.view(), "another thread");
    });
}

#[test]
fn parts_that_two_threads_write_at_once_are_both_waited_for() {
    let Some(cuda) = device() else { return };
    let (m, layer) = (rows(1 << 14), layer::<f32>(&cuda, 60));
    let streams: Vec<Stream> = (0..3).map(|_| cuda.new_stream().unwrap()).collect();
    let x = DeviceMatrix::from_host(&streams[2], input::<f32>(m).view()).unwrap();
    let mut out = DeviceMatrix::<f32>::new(&streams[2], 2 * m, H).unwrap();
    layer.forward(&streams[2], x.view(), out.view_mut().rows_range(0..m).unwrap()).unwrap();
    let expected = out.to_host().unwrap().as_slice()[..m * H].to_vec();
    for round in 0..5 * rounds() {
        out.buffer_mut().poison(0xFF).unwrap();
        let (top, bottom) = out.view_mut().split_rows(m).unwrap();
        let (begin, layer, x) = (Barrier::new(2), &layer, x.view());
        std::thread::scope(|scope| {
            for (part, stream) in [top, bottom].into_iter().zip(&streams) {
                let begin = &begin;
                scope.spawn(move || {
                    begin.wait();
                    layer.forward(stream, x, part).unwrap();
                });
            }
        });
        let both = out.to_host().unwrap();
        for part in both.as_slice().chunks_exact(m * H) {
            assert!(part == expected, "round {round}");
        }
    }
}

#[test]
fn a_graph_goes_into_no_graph_of_another_handle() {
    let Some(cuda) = device() else { return };
    let others = Cuda::with_options(&common::options().unwrap()).unwrap();
    let (ours, theirs) = (cuda.new_stream().unwrap(), others.new_stream().unwrap());
    let mut result = DeviceBuffer::<f32>::zeros(&ours, 8).unwrap();
    let graph = ours.capture(|| result.poison(1)).unwrap();
    // SAFETY: the graph keeps what it writes.
    let launched = theirs.capture(|| unsafe { graph.launch(&theirs) }).unwrap_err();
    assert!(matches!(launched, CudaError::Capture { .. }), "{launched}");
    // SAFETY: as above.
    unsafe { graph.launch(&theirs) }.unwrap();
    theirs.synchronize().unwrap();
    assert!(result.to_host().unwrap().iter().all(|v| *v == f32::from_bits(0x0101_0101)));
}

#[test]
fn a_capture_of_other_code_survives_what_is_dropped_meanwhile() {
    let Some(cuda) = device() else { return };
    // Another handle of the device, whose captures this one does not know.
    let others = Cuda::with_options(&common::options().unwrap()).unwrap();
    let stream = others.new_stream().unwrap();
    let mut result = DeviceBuffer::<f32>::zeros(&stream, 100).unwrap();
    // SAFETY: `stream` outlives the guard.
    let borrowed = unsafe { cuda.borrow_stream(stream.raw()) }.unwrap();
    let layer = layer::<f32>(&cuda, 40);
    let x = DeviceMatrix::from_host(&borrowed, input::<f32>(5).view()).unwrap();
    let mut out = DeviceMatrix::<f32>::new(&borrowed, 5, H).unwrap();
    layer.forward(&borrowed, x.view(), out.view_mut()).unwrap();
    layer.reserve(&borrowed, 5).unwrap();
    let elsewhere = cuda.new_stream().unwrap();
    let (mut kept, mut moved) = (Some((x, out)), Some(layer));
    let graph = stream.capture(|| {
        // Everything that this code may do while other code captures, on its stream and beside it.
        drop(kept.take());
        let mut buffer = DeviceBuffer::<f32>::new(&elsewhere, 64)?;
        buffer.poison(1)?;
        drop(buffer);
        drop(moved.take());
        let whole = Cuda::with_options(&common::options().unwrap())?;
        drop(whole.new_stream()?);
        drop(whole);
        result.poison(1)
    });
    let graph = graph.unwrap();
    drop(borrowed);
    // SAFETY: the graph keeps what it writes.
    unsafe { graph.launch(&stream) }.unwrap();
    assert!(result.to_host().unwrap().iter().all(|v| *v == f32::from_bits(0x0101_0101)));
    cuda.trim();
    release_unused();
    elsewhere.synchronize().unwrap();
}

#[test]
fn a_call_with_memory_that_is_lent_leaves_the_streams_own_as_it_is() {
    let Some(cuda) = device() else { return };
    let others = Cuda::with_options(&common::options().unwrap()).unwrap();
    let captured = others.new_stream().unwrap();
    // SAFETY: `captured` outlives the guard.
    let stream = unsafe { cuda.borrow_stream(captured.raw()) }.unwrap();
    let (m, block) = (40, mlp::<f32>(&cuda, 70));
    let x = DeviceMatrix::from_host(&stream, input::<f32>(m).view()).unwrap();
    let mut out = DeviceMatrix::<f32>::zeros(&stream, m, K).unwrap();
    let bytes = block.workspace_bytes(m);
    assert!(bytes > 0);
    let mut buffer = DeviceBuffer::<f32>::new(&stream, bytes.div_ceil(4)).unwrap();
    block.reserve(&stream, m).unwrap();
    stream.synchronize().unwrap();
    let [x, to] = [x.view().device_ptr(), out.view_mut().device_ptr()];
    for round in 0..3 {
        // SAFETY: the matrices outlive the graph, which is not launched.
        let call = |lent: Option<&mut DeviceScratch<'_>>| unsafe {
            let x = DeviceMatrixRef::<f32>::from_raw_trusted(&cuda, x, m, K, K)?;
            let out = DeviceMatrixMut::<f32>::from_raw_trusted(&cuda, to, m, K, K)?;
            match lent {
                Some(lent) => block.forward_with(&stream, x, out, lent),
                None => block.forward(&stream, x, out),
            }
        };
        captured.capture(|| call(None)).unwrap_or_else(|e| panic!("round {round}: {e}"));
        call(Some(&mut DeviceScratch::new(&mut buffer))).unwrap();
        stream.synchronize().unwrap();
    }
}

#[test]
fn a_graph_of_other_code_runs_on_a_third_stream_in_scratch_memory_that_was_lent() {
    let Some(cuda) = device() else { return };
    let others = Cuda::with_options(&common::options().unwrap()).unwrap();
    let (warm, captured) = (cuda.new_stream().unwrap(), others.new_stream().unwrap());
    let thirds: Vec<Stream> = (0..2).map(|_| others.new_stream().unwrap()).collect();
    for m in [1, 3, 40] {
        let block = mlp::<f32>(&cuda, 50);
        let x = DeviceMatrix::from_host(&warm, input::<f32>(m).view()).unwrap();
        let mut outputs: Vec<_> =
            (0..2).map(|_| DeviceMatrix::<f32>::zeros(&warm, m, K).unwrap()).collect();
        let bytes = block.workspace_bytes(m);
        let mut buffers: Vec<_> =
            (0..2).map(|_| DeviceBuffer::<f32>::new(&warm, bytes.div_ceil(4)).unwrap()).collect();
        block.forward(&warm, x.view(), outputs[0].view_mut()).unwrap();
        let expected = outputs[0].to_host().unwrap();
        outputs[0].buffer_mut().poison(0xFF).unwrap();
        warm.synchronize().unwrap();
        // As PyTorch does it: pointers on a stream that is captured, of which we are not told, and that never ran the layer.
        let graphs: Vec<_> = outputs
            .iter_mut()
            .zip(&mut buffers)
            .map(|(out, buffer)| {
                let graph = captured.capture(|| {
                    let (ptr, bytes) = (buffer.device_ptr(), 4 * buffer.len());
                    // SAFETY: stream, matrices and scratch memory outlive the graphs.
                    unsafe {
                        let stream = cuda.borrow_stream(captured.raw())?;
                        let mut lent = DeviceScratch::from_raw(&cuda, ptr, bytes)?;
                        let from = x.view().device_ptr();
                        let x = DeviceMatrixRef::<f32>::from_raw_trusted(&cuda, from, m, K, K)?;
                        let to = out.view().device_ptr();
                        let out = DeviceMatrixMut::<f32>::from_raw_trusted(&cuda, to, m, K, K)?;
                        block.forward_with(&stream, x, out, &mut lent)
                    }
                });
                graph.unwrap()
            })
            .collect();
        for round in 0..8 {
            for (graph, stream) in graphs.iter().zip(&thirds) {
                // SAFETY: as above; each graph has scratch memory and a stream to itself.
                unsafe { graph.launch(stream) }.unwrap();
            }
            for (out, stream) in outputs.iter_mut().zip(&thirds) {
                stream.synchronize().unwrap();
                same(
                    out.to_host().unwrap().view(),
                    expected.view(),
                    &format!("{m}, round {round}"),
                );
                out.buffer_mut().poison(0xFF).unwrap();
                warm.synchronize().unwrap();
            }
        }
        let mut small = DeviceBuffer::<f32>::new(&warm, 1).unwrap();
        let mut lent = DeviceScratch::new(&mut small);
        let out = outputs[0].view_mut();
        let error = block.forward_with(&warm, x.view(), out, &mut lent).unwrap_err();
        assert!(error.to_string().contains("at least"), "{error}");
    }
}

#[test]
fn an_empty_upload_settles_nothing() {
    let Some(cuda) = device() else { return };
    let (ours, theirs) = (cuda.new_stream().unwrap(), cuda.new_stream().unwrap());
    let (m, layer) = (rows(1 << 18), layer::<f32>(&cuda, 60));
    let ones = Matrix::from_vec(vec![1.0f32; m * K], m, K).unwrap();
    let x = DeviceMatrix::from_host(&ours, ones.view()).unwrap();
    let empty = Matrix::<f32>::zeros(0, H).unwrap();
    for round in 0..rounds() {
        let mut out = DeviceMatrix::<f32>::zeros(&ours, m, H).unwrap();
        for _ in 0..4 {
            layer.forward(&theirs, x.view(), out.view_mut()).unwrap();
        }
        let mut none = out.view_mut().rows_range(0..0).unwrap();
        none.upload(&theirs, empty.view()).unwrap();
        let out = out.to_host().unwrap();
        assert!(out.as_slice().iter().all(|v| *v != 0.0), "round {round}");
    }
}

#[test]
fn a_guard_dropped_in_a_capture_ends_the_borrow() {
    let Some(cuda) = device() else { return };
    let owner = cuda.new_stream().unwrap();
    // SAFETY: the owner outlives the guard.
    let guard = unsafe { cuda.borrow_stream(owner.raw()) }.unwrap();
    let clone = Stream::clone(&guard);
    let mut guard = Some(guard);
    clone
        .capture(|| {
            drop(guard.take());
            Ok::<(), CudaError>(())
        })
        .unwrap();
    let error = clone.synchronize().unwrap_err();
    assert!(error.to_string().contains("borrow it again"), "{error}");
}

/// What another thread enqueues on a stream that is captured would become part of the graph, and not be done.
#[test]
fn a_call_of_another_thread_in_a_capture_is_refused() {
    let Some(cuda) = device() else { return };
    let (layer, x, stream) = (layer::<f32>(&cuda, 1), input::<f32>(3), cuda.new_stream().unwrap());
    let x = DeviceMatrix::from_host(&stream, x.view()).unwrap();
    let mut out = DeviceMatrix::new(&stream, 3, H).unwrap();
    layer.reserve(&stream, 3).unwrap();
    let other = cuda.new_stream().unwrap();
    let graph = stream.capture(|| {
        let call = |on: &Stream| {
            let mut out = DeviceMatrix::new(&other, 3, H)?;
            layer.forward(on, x.view(), out.view_mut())
        };
        std::thread::scope(|scope| {
            let refused = scope.spawn(|| call(&stream)).join().unwrap().unwrap_err();
            assert!(matches!(refused, CudaError::Capture { .. }), "{refused}");
            assert!(refused.to_string().contains("another thread"), "{refused}");
            // On another stream it is as always.
            scope.spawn(|| call(&other)).join().unwrap().unwrap();
        });
        layer.forward(&stream, x.view(), out.view_mut())
    });
    // SAFETY: what the graph uses lives until its work is done.
    unsafe { graph.unwrap().launch(&stream) }.unwrap();
    let mut expected = DeviceMatrix::new(&stream, 3, H).unwrap();
    layer.forward(&stream, x.view(), expected.view_mut()).unwrap();
    same(
        out.to_host().unwrap().view(),
        expected.to_host().unwrap().view(),
        "the capturing thread's call",
    );
}

/// A call may be between its check and the driver when another thread's capture begins.
#[test]
fn captures_begin_between_the_calls_of_other_threads() {
    let Some(cuda) = device() else { return };
    let (stream, rounds) = (cuda.new_stream().unwrap(), if has_gpu() { 2000 } else { 300 });
    let ones = vec![1.0f32; 64];
    let mut theirs = DeviceBuffer::from_host(&stream, &ones).unwrap();
    let mut ours = DeviceBuffer::<f32>::new(&stream, 64).unwrap();
    let (done, taken) = (AtomicBool::new(false), AtomicUsize::new(0));
    let (mut graphs, mut captured) = (Vec::new(), Ok(()));
    std::thread::scope(|scope| {
        let eager = scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                for outcome in [theirs.poison(0xFF), theirs.upload(&ones)] {
                    match outcome {
                        Ok(()) => {
                            taken.fetch_add(1, Ordering::Relaxed);
                        }
                        Err(refused) => {
                            assert!(matches!(refused, CudaError::Capture { .. }), "{refused}");
                        }
                    }
                }
            }
        });
        // Until both have met often enough.
        while graphs.len() < rounds || taken.load(Ordering::Relaxed) < rounds / 4 {
            let byte = graphs.len() as u8;
            captured = stream.capture(|| ours.poison(byte)).map(|graph| graphs.push(graph));
            graphs.truncate(4 * rounds);
            std::thread::yield_now();
            if captured.is_err() || eager.is_finished() {
                break;
            }
        }
        done.store(true, Ordering::Relaxed);
        eager.join().unwrap();
        captured.unwrap();
    });
    theirs.upload(&ones).unwrap();
    for (byte, graph) in graphs.iter().enumerate() {
        // SAFETY: the graph uses `ours` alone, which lives.
        unsafe { graph.launch(&stream) }.unwrap();
        let expected = u32::from_ne_bytes([byte as u8; 4]);
        assert!(ours.to_host().unwrap().iter().all(|v| v.to_bits() == expected), "{byte}");
    }
    assert_eq!(theirs.to_host().unwrap(), ones, "a graph has another thread's work");
}

/// A tuner that asked for one kernel is not given another's time.
#[test]
fn a_candidate_that_does_not_take_the_rows_of_x_is_refused() {
    let Some(cuda) = device() else { return };
    let stream = cuda.stream();
    let layer = layer::<half::bf16>(&cuda, 1);
    let x = DeviceBuffer::from_host(&stream, &[half::bf16::ONE; 3 * (K + 1)]).unwrap();
    let x = DeviceMatrixRef::with_stride(&x, 3, K, K + 1).unwrap();
    let mut out = DeviceMatrix::new(&stream, 3, H).unwrap();
    let problem = Problem::new(Op::GatedLinear, 3, K, H, DType::Bf16, Activation::SWIGLU);
    let problem = problem.with_numerics(Numerics::default_for(DType::Bf16));
    let candidates = cuda.candidates(&problem, None);
    let computes = candidates.iter().filter(|c| c.refusal.is_none());
    let (mut taken, mut refused) = (0, 0);
    for candidate in computes {
        match layer.forward_by(&stream, candidate, x, out.view_mut()) {
            Ok(()) => taken += 1,
            Err(CudaError::Unsupported { what, why }) => {
                assert!(what == candidate.name && why.contains("TMA"), "{what}: {why}");
                refused += 1;
            }
            Err(error) => panic!("{candidate}: {error}"),
        }
    }
    assert!(taken > 0, "{candidates:?}");
    if cuda.arch() == swiglu_cuda::Arch::Sm90a {
        assert!(refused > 0, "{candidates:?}");
    }
}

#[test]
fn a_stream_is_not_marked_in_a_capture() {
    let Some(cuda) = device() else { return };
    let stream = cuda.new_stream().unwrap();
    let error = stream.capture(|| stream.record().map(drop)).unwrap_err();
    assert!(matches!(error, CudaError::Capture { .. }), "{error}");
    stream.synchronize().unwrap();
}

/// A generator of choices.
struct Choices(u64);

impl Choices {
    fn of(&mut self, n: usize) -> usize {
        self.0 += 1;
        (random::bits(self.0 >> 32, self.0) % n as u64) as usize
    }
}

/// Matrices of ±1, whose products are exact, and what they must hold.
struct Slot {
    device: DeviceMatrix<f32>,
    host: Vec<f32>,
}

/// Random work on random streams: products of matrices, copies, drops and new streams.
fn disorder(cuda: &Cuda, seed: u64, steps: usize) {
    let (rows, cols) = (rows(1 << 14), 32);
    let mut choices = Choices(seed << 32);
    let mut streams: Vec<Stream> = (0..3).map(|_| cuda.new_stream().unwrap()).collect();
    let mut slots: Vec<Option<Slot>> = (0..6).map(|_| None).collect();
    let signs = |seed: u64| -> Vec<f32> {
        let sign = |i| if random::bits(seed, i) & 1 == 0 { 1.0 } else { -1.0 };
        (0..(rows * cols) as u64).map(sign).collect()
    };
    for step in 0..steps {
        let stream = streams[choices.of(3)].clone();
        let at = choices.of(6);
        let check = |slot: &Slot| {
            let there = slot.device.view().to_host(&stream).unwrap();
            assert!(there.as_slice() == slot.host, "seed {seed}, step {step}");
        };
        match choices.of(12) {
            0 => streams[choices.of(3)] = cuda.new_stream().unwrap(),
            1 => slots[at] = None,
            2 | 3 => {
                let host = signs(seed << 20 | step as u64);
                let view = MatrixRef::new(&host, rows, cols).unwrap();
                match &mut slots[at] {
                    Some(slot) => {
                        slot.device.view_mut().upload(&stream, view).unwrap();
                        slot.host = host;
                    }
                    none => {
                        let device = DeviceMatrix::from_host(&stream, view).unwrap();
                        *none = Some(Slot { device, host });
                    }
                }
            }
            4 => slots[at].iter().for_each(check),
            _ => {
                let (a, b) = (choices.of(6), choices.of(6));
                if a == at || b == at {
                    continue;
                }
                let taken = slots[at].take();
                if let (Some(a), Some(b)) = (&slots[a], &slots[b]) {
                    let home = &streams[choices.of(3)];
                    let fresh = || DeviceMatrix::<f32>::new(home, rows, cols).unwrap();
                    let mut device = taken.map_or_else(fresh, |slot| slot.device);
                    let inputs = DeviceGateUp::separate(a.device.view(), b.device.view()).unwrap();
                    let numerics = Numerics::default_for(DType::F32);
                    let out = device.view_mut();
                    cuda.activation(&stream, &Activation::BILINEAR, numerics, inputs, out).unwrap();
                    let host = a.host.iter().zip(&b.host).map(|(a, b)| a * b).collect();
                    slots[at] = Some(Slot { device, host });
                }
            }
        }
    }
    for slot in slots.into_iter().flatten() {
        assert!(slot.device.to_host().unwrap().as_slice() == slot.host, "seed {seed}, at the end");
    }
}

#[test]
fn work_in_disorder_gives_what_its_order_in_the_program_says() {
    let Some(cuda) = device() else { return };
    let (seeds, steps) = if has_gpu() { (20, 400) } else { (6, 120) };
    for seed in 0..seeds {
        disorder(&cuda, seed, steps);
    }
    // Threads share the device, its memory and its pool of scratch memory.
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let cuda = &cuda;
            scope.spawn(move || disorder(cuda, 100 + thread, steps));
        }
    });
}
