//! Work on several streams: what their order is, and what it is not. Each program is run by many seeds.
// A test may panic.
#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::{Mutex, MutexGuard, PoisonError};

use common::*;

const SEEDS: u64 = 200;
const NOT_READY: c_int = 600;
const ILLEGAL_ADDRESS: c_int = 700;

/// Adds to every element; as many blocks as it takes.
const ADD: &str = "
struct Add { float* to; float value; int n; };
KERNEL(64, 1, add)(KERNEL_PARAMS(Add) p) {
  const int i = blockIdx.x * 64 + threadIdx.x;
  if (i < p.n) p.to[i] = p.to[i] + p.value;
}";

#[repr(C)]
struct Add {
    to: u64,
    value: f32,
    n: i32,
}

/// The simulator while no other test of this program uses it: memory that one has freed is given to the next that asks, so
/// that a use after the free, which a test expects to be reported, would meet another's live allocation.
fn alone() -> Option<(&'static Sim, MutexGuard<'static, ()>)> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    Some((sim()?, turn))
}

/// What a program gives by each of the seeds.
fn by_seeds<T>(sim: &Sim, mut program: impl FnMut() -> T) -> Vec<T> {
    let run = |seed| {
        run_streams(sim, "random", seed);
        program()
    };
    (0..SEEDS).map(run).collect()
}

fn ok(code: c_int) {
    assert_eq!(code, 0);
}

fn event(sim: &Sim) -> Handle {
    const DISABLE_TIMING: u32 = 2;
    let mut event: Handle = null_mut();
    ok(call!(sim.cuda, b"cuEventCreate"(&mut event => *mut Handle, DISABLE_TIMING => u32)));
    event
}
fn record(sim: &Sim, event: Handle, stream: Handle) -> c_int {
    call!(sim.cuda, b"cuEventRecord"(event => Handle, stream => Handle))
}
fn wait(sim: &Sim, stream: Handle, event: Handle) -> c_int {
    call!(sim.cuda, b"cuStreamWaitEvent"(stream => Handle, event => Handle, 0 => u32))
}
/// Lets `later` wait for what is on `earlier` now.
fn order(sim: &Sim, earlier: Handle, later: Handle) {
    let event = event(sim);
    ok(record(sim, event, earlier));
    ok(wait(sim, later, event));
    ok(call!(sim.cuda, b"cuEventDestroy_v2"(event => Handle)));
}
fn synchronize(sim: &Sim, stream: Handle) -> c_int {
    call!(sim.cuda, b"cuStreamSynchronize"(stream => Handle))
}
fn destroy(sim: &Sim, streams: &[Handle]) {
    for &stream in streams {
        ok(call!(sim.cuda, b"cuStreamDestroy_v2"(stream => Handle)));
    }
}
fn allocate(sim: &Sim, stream: Handle, bytes: usize) -> u64 {
    let mut address = 0;
    ok(call!(sim.cuda, b"cuMemAllocAsync"(
        &mut address => *mut u64, bytes => usize, stream => Handle)));
    address
}
fn free(sim: &Sim, stream: Handle, address: u64) {
    ok(call!(sim.cuda, b"cuMemFreeAsync"(address => u64, stream => Handle)));
}
fn fill(sim: &Sim, stream: Handle, address: u64, byte: u8, bytes: usize) -> c_int {
    call!(sim.cuda, b"cuMemsetD8Async"(
        address => u64, byte => u8, bytes => usize, stream => Handle))
}
/// A copy of floats that waits for the stream.
fn read(sim: &Sim, stream: Handle, address: u64, count: usize) -> Result<Vec<f32>, c_int> {
    let mut values = vec![0f32; count];
    let code = call!(sim.cuda, b"cuMemcpyDtoHAsync_v2"(
        values.as_mut_ptr() => *mut f32, address => u64, count * 4 => usize, stream => Handle));
    if code == 0 { Ok(values) } else { Err(code) }
}

const N: usize = 256;
const COUNT: i32 = 256;

fn add(sim: &Sim, stream: Handle, function: Handle, to: u64, value: f32) -> c_int {
    launch_on(sim, stream, function, 4, 64, 0, &Add { to, value, n: COUNT })
}

#[test]
fn a_launch_is_carried_out_when_it_is_waited_for() {
    let Some((sim, _alone)) = alone() else { return };
    let function = kernel(sim, ADD, &[], "add", 0);
    let to = upload(sim, &[0f32; N]);
    run_streams(sim, "late", 0);
    let (first, second) = (stream(sim), stream(sim));
    ok(add(sim, first, function, to, 1.0));
    assert_eq!(read(sim, second, to, N), Ok(vec![0.0; N]));
    assert_eq!(read(sim, first, to, N), Ok(vec![1.0; N]));
    run_streams(sim, "eager", 0);
    ok(add(sim, first, function, to, 1.0));
    assert_eq!(read(sim, second, to, N), Ok(vec![2.0; N]));
}

/// Two streams: one fills a buffer, the other reads it.
#[test]
fn only_events_order_two_streams() {
    let Some((sim, _alone)) = alone() else { return };
    let function = kernel(sim, ADD, &[], "add", 0);
    let to = upload(sim, &[0f32; N]);
    let program = |ordered: bool| {
        let (first, second) = (stream(sim), stream(sim));
        ok(fill(sim, first, to, 0, N * 4));
        ok(add(sim, first, function, to, 1.0));
        if ordered {
            order(sim, first, second);
        }
        let seen = read(sim, second, to, N).unwrap();
        ok(synchronize(sim, first));
        destroy(sim, &[first, second]);
        seen == vec![1.0; N]
    };
    assert!(by_seeds(sim, || program(true)).into_iter().all(|right| right));
    let right = by_seeds(sim, || program(false)).into_iter().filter(|&right| right).count();
    assert!((10..150).contains(&right), "{right} of {SEEDS} right by chance");
}

/// A buffer is freed on its own stream while another still writes to it, and its memory handed out again.
#[test]
fn a_free_in_the_order_of_the_wrong_stream_shows() {
    let Some((sim, _alone)) = alone() else { return };
    let function = kernel(sim, ADD, &[], "add", 0);
    // Whether the freed memory came back, and what the new owner saw.
    let program = |ordered: bool| {
        let (own, other) = (stream(sim), stream(sim));
        let y = allocate(sim, own, N * 4);
        ok(fill(sim, own, y, 0, N * 4));
        order(sim, own, other);
        for _ in 0..3 {
            ok(add(sim, other, function, y, 1.0));
        }
        if ordered {
            order(sim, other, own);
        }
        free(sim, own, y);
        let z = allocate(sim, own, N * 4);
        ok(fill(sim, own, z, 0, N * 4));
        let outcome = [synchronize(sim, own), synchronize(sim, other)];
        let zeros = read(sim, own, z, N).unwrap();
        free(sim, own, z);
        destroy(sim, &[own, other]);
        (y == z, outcome, zeros == vec![0.0; N])
    };
    assert!(by_seeds(sim, || program(true)).iter().all(|r| *r == (true, [0, 0], true)));
    let outcomes = by_seeds(sim, || program(false));
    let wrong = outcomes.iter().filter(|(_, codes, zeros)| *codes == [0, 0] && !zeros).count();
    let faults = outcomes.iter().filter(|(_, codes, _)| codes[1] == ILLEGAL_ADDRESS).count();
    assert!(wrong > 20 && faults > 5, "{wrong} wrong values, {faults} faults");
    assert!(outcomes.iter().all(|(same, codes, _)| *same && codes[0] == 0));
}

#[test]
fn memory_is_used_before_its_allocation_or_after_its_free() {
    let Some((sim, _alone)) = alone() else { return };
    let function = kernel(sim, ADD, &[], "add", 0);
    run_streams(sim, "late", 0);
    let (own, other) = (stream(sim), stream(sim));
    let y = allocate(sim, own, N * 4);
    ok(add(sim, other, function, y, 1.0));
    assert_eq!(synchronize(sim, other), ILLEGAL_ADDRESS);
    // The failure has been reported; the stream goes on.
    ok(synchronize(sim, own));
    ok(add(sim, other, function, y, 1.0));
    ok(synchronize(sim, other));
    // Copies and memsets, too.
    ok(fill(sim, other, y, 0, 4));
    free(sim, own, y);
    ok(synchronize(sim, own));
    assert_eq!(synchronize(sim, other), ILLEGAL_ADDRESS);
    // The free comes before the allocation where nothing orders them.
    let early = allocate(sim, other, N * 4);
    free(sim, own, early);
    assert_eq!(synchronize(sim, own), ILLEGAL_ADDRESS);
    ok(synchronize(sim, other));
    // A call that names freed memory is refused at once.
    assert_eq!(fill(sim, other, y, 0, 4), 1);
    // What waits for a stream that failed fails.
    let y = allocate(sim, own, N * 4);
    ok(add(sim, other, function, y, 1.0));
    free(sim, own, y);
    ok(synchronize(sim, own));
    order(sim, other, own);
    assert_eq!(synchronize(sim, own), ILLEGAL_ADDRESS);
    ok(synchronize(sim, other));
}

/// Freed memory goes to another stream once that stream's work comes after the free, not before.
#[test]
fn memory_goes_to_streams_that_come_after_its_free() {
    let Some((sim, _alone)) = alone() else { return };
    // A size that no test before this one freed.
    let bytes = |i: usize| (1 << 20) + 8192 * i;
    run_streams(sim, "late", 0);
    let (first, second) = (stream(sim), stream(sim));
    let y = allocate(sim, first, bytes(0));
    free(sim, first, y);
    let z = allocate(sim, second, bytes(0));
    assert!(z + bytes(0) as u64 <= y || y + bytes(0) as u64 <= z);
    // By an event.
    order(sim, first, second);
    assert_eq!(allocate(sim, second, bytes(0)), y);
    // Because the free is done.
    order(sim, second, first);
    free(sim, first, y);
    ok(synchronize(sim, first));
    assert_eq!(allocate(sim, second, bytes(0)), y);
    free(sim, second, y);
    order(sim, second, first);
    // The youngest first.
    let (a, b) = (allocate(sim, first, bytes(0)), allocate(sim, first, bytes(0)));
    free(sim, first, b);
    free(sim, first, a);
    assert_eq!(allocate(sim, first, bytes(0)), a);
    assert_eq!(allocate(sim, first, bytes(0)), b);
    // Trimming is allowed; the next allocation may get the same address anew.
    free(sim, first, a);
    ok(synchronize(sim, first));
    let mut pool: Handle = null_mut();
    ok(call!(sim.cuda, b"cuDeviceGetDefaultMemPool"(&mut pool => *mut Handle, 0 => c_int)));
    ok(call!(sim.cuda, b"cuMemPoolTrimTo"(pool => Handle, 0 => usize)));
}

#[test]
fn new_memory_of_a_pool_is_nan() {
    let Some((sim, _alone)) = alone() else { return };
    let own = stream(sim);
    for _ in 0..3 {
        let y = allocate(sim, own, N * 4);
        assert!(read(sim, own, y, N).unwrap().iter().all(|v| v.is_nan()));
        ok(fill(sim, own, y, 0, N * 4));
        free(sim, own, y);
    }
}

/// Blocking streams and the legacy stream wait for each other; non-blocking ones do not.
#[test]
fn the_legacy_stream_orders_blocking_streams() {
    let Some((sim, _alone)) = alone() else { return };
    let function = kernel(sim, ADD, &[], "add", 0);
    let to = upload(sim, &[0f32; N]);
    const LEGACY: Handle = 1 as Handle;
    const PER_THREAD: Handle = 2 as Handle;
    let blocking = || {
        let mut s: Handle = null_mut();
        ok(call!(sim.cuda, b"cuStreamCreate"(&mut s => *mut Handle, 0 => u32)));
        s
    };
    let program = |kind: u32| {
        let first = match kind {
            0 => blocking(),
            1 => stream(sim),
            _ => PER_THREAD,
        };
        ok(fill(sim, first, to, 0, N * 4));
        ok(add(sim, first, function, to, 1.0));
        ok(add(sim, LEGACY, function, to, 1.0));
        ok(add(sim, first, function, to, 1.0));
        let seen = read(sim, first, to, N).unwrap();
        ok(synchronize(sim, null_mut()));
        if kind != 2 {
            destroy(sim, &[first]);
        }
        seen == vec![3.0; N]
    };
    for kind in [0, 2] {
        assert!(by_seeds(sim, || program(kind)).into_iter().all(|right| right));
    }
    let right = by_seeds(sim, || program(1)).into_iter().filter(|&right| right).count();
    assert!((1..190).contains(&right), "{right} of {SEEDS} right by chance");
}

#[test]
fn queries_come_to_an_end() {
    let Some((sim, _alone)) = alone() else { return };
    let function = kernel(sim, ADD, &[], "add", 0);
    let to = upload(sim, &[0f32; N]);
    let program = || {
        let (s, done) = (stream(sim), event(sim));
        for _ in 0..4 {
            ok(add(sim, s, function, to, 1.0));
        }
        ok(record(sim, done, s));
        let query = || call!(sim.cuda, b"cuEventQuery"(done => Handle));
        let mut asked = 0;
        while query() == NOT_READY {
            asked += 1;
        }
        ok(query());
        ok(call!(sim.cuda, b"cuStreamQuery"(s => Handle)));
        ok(call!(sim.cuda, b"cuEventDestroy_v2"(done => Handle)));
        destroy(sim, &[s]);
        asked
    };
    let asked = by_seeds(sim, program);
    assert!(asked.iter().any(|&n| n > 0) && asked.contains(&0), "{asked:?}");
    // An event that was never recorded is done.
    ok(call!(sim.cuda, b"cuEventQuery"(event(sim) => Handle)));
}

#[test]
fn pinned_memory_is_used_when_the_copy_is_carried_out() {
    let Some((sim, _alone)) = alone() else { return };
    run_streams(sim, "late", 0);
    let s = stream(sim);
    let to = upload(sim, &[0f32; 2]);
    let mut pinned: *mut f32 = null_mut();
    ok(call!(sim.cuda, b"cuMemHostAlloc"(&mut pinned => *mut *mut f32, 8 => usize, 0 => u32)));
    let mut pageable = [1f32, 1.0];
    // SAFETY: two floats that nothing else uses.
    let set = |value: f32| unsafe { *pinned = value };
    set(1.0);
    let upload_from = |offset: u64, from: *const f32| {
        ok(call!(sim.cuda, b"cuMemcpyHtoDAsync_v2"(
            to + offset => u64, from => *const f32, 4 => usize, s => Handle)));
    };
    upload_from(0, pinned);
    upload_from(4, pageable.as_ptr());
    set(2.0);
    pageable[0] = 2.0;
    assert_eq!(read(sim, s, to, 2), Ok(vec![2.0, 1.0]), "{pageable:?}");
    ok(call!(sim.cuda, b"cuMemFreeHost"(pinned.cast() => *mut c_void)));
}

fn begin(sim: &Sim, stream: Handle, mode: c_int) -> c_int {
    call!(sim.cuda, b"cuStreamBeginCapture_v2"(stream => Handle, mode => c_int))
}
fn end(sim: &Sim, stream: Handle) -> Result<Handle, c_int> {
    let (mut graph, mut executable): (Handle, Handle) = (null_mut(), null_mut());
    let code = call!(sim.cuda, b"cuStreamEndCapture"(stream => Handle, &mut graph => *mut Handle));
    if code != 0 {
        return Err(code);
    }
    ok(call!(sim.cuda, b"cuGraphInstantiateWithFlags"(
        &mut executable => *mut Handle, graph => Handle, 0 => u64)));
    ok(call!(sim.cuda, b"cuGraphDestroy"(graph => Handle)));
    Ok(executable)
}
fn launch_graph(sim: &Sim, graph: Handle, stream: Handle) {
    ok(call!(sim.cuda, b"cuGraphLaunch"(graph => Handle, stream => Handle)));
}

const THREAD_LOCAL: c_int = 1;

/// Two graphs that use one scratch buffer are launched on two streams.
#[test]
fn graphs_on_two_streams_interleave() {
    let Some((sim, _alone)) = alone() else { return };
    let function = kernel(sim, ADD, &[], "add", 0);
    let scratch = upload(sim, &[0f32; N]);
    let results = [upload(sim, &[0f32; N]), upload(sim, &[0f32; N])];
    let origin = stream(sim);
    let graphs = [0, 1].map(|i| {
        ok(begin(sim, origin, THREAD_LOCAL));
        ok(fill(sim, origin, scratch, 0, N * 4));
        for _ in 0..2 + 2 * i {
            ok(add(sim, origin, function, scratch, 1.0));
        }
        ok(call!(sim.cuda, b"cuMemcpyDtoDAsync_v2"(
            results[i] => u64, scratch => u64, N * 4 => usize, origin => Handle)));
        end(sim, origin).unwrap()
    });
    let program = |ordered: bool| {
        let streams = [stream(sim), stream(sim)];
        launch_graph(sim, graphs[0], streams[0]);
        if ordered {
            order(sim, streams[0], streams[1]);
        }
        launch_graph(sim, graphs[1], streams[1]);
        for s in streams {
            ok(synchronize(sim, s));
        }
        let right = [0, 1].map(|i| {
            read(sim, streams[i], results[i], N).unwrap() == vec![2.0 + 2.0 * i as f32; N]
        });
        destroy(sim, &streams);
        right == [true; 2]
    };
    assert!(by_seeds(sim, || program(true)).into_iter().all(|right| right));
    let right = by_seeds(sim, || program(false)).into_iter().filter(|&right| right).count();
    assert!((10..190).contains(&right), "{right} of {SEEDS} right by chance");
    // Launches of one graph wait for each other.
    let same = || {
        let streams = [stream(sim), stream(sim)];
        for s in streams {
            launch_graph(sim, graphs[0], s);
        }
        for s in streams {
            ok(synchronize(sim, s));
        }
        let seen = read(sim, origin, results[0], N).unwrap();
        destroy(sim, &streams);
        seen == vec![2.0; N]
    };
    assert!(by_seeds(sim, same).into_iter().all(|right| right));
}

/// A capture that goes on to a second stream and comes back has branches that run in any order.
#[test]
fn captures_fork_and_join() {
    let Some((sim, _alone)) = alone() else { return };
    let function = kernel(sim, ADD, &[], "add", 0);
    let to = upload(sim, &[0f32; N]);
    let (a, b) = (stream(sim), stream(sim));
    let capture = |zero_first: bool, join: bool| {
        let (fork, back) = (event(sim), event(sim));
        ok(begin(sim, a, THREAD_LOCAL));
        if zero_first {
            ok(fill(sim, a, to, 0, N * 4));
        }
        ok(record(sim, fork, a));
        ok(wait(sim, b, fork));
        ok(add(sim, b, function, to, 1.0));
        if !zero_first {
            ok(fill(sim, a, to, 0, N * 4));
        }
        ok(record(sim, back, b));
        if join {
            ok(wait(sim, a, back));
            ok(add(sim, a, function, to, 1.0));
        }
        end(sim, a)
    };
    const UNJOINED: c_int = 904;
    assert_eq!(capture(true, false), Err(UNJOINED));
    let (right, racy) = (capture(true, true).unwrap(), capture(false, true).unwrap());
    let program = |graph: Handle| {
        ok(fill(sim, a, to, 0, N * 4));
        launch_graph(sim, graph, a);
        read(sim, a, to, N).unwrap()
    };
    assert!(by_seeds(sim, || program(right)).iter().all(|seen| *seen == vec![2.0; N]));
    // The other branch sets to zero before or after the first addition.
    let seen = by_seeds(sim, || program(racy));
    for value in [1.0, 2.0] {
        assert!(seen.iter().any(|s| *s == vec![value; N]), "{value}");
    }
}

#[test]
fn captures_refuse_what_they_cannot_hold() {
    let Some((sim, _alone)) = alone() else { return };
    run_streams(sim, "random", 1);
    let (a, other) = (stream(sim), stream(sim));
    let (outside, inside) = (event(sim), event(sim));
    const INVALIDATED: Result<Handle, c_int> = Err(901);
    const ISOLATION: c_int = 905;
    const CAPTURED_EVENT: c_int = 907;
    const UNSUPPORTED: c_int = 900;
    ok(record(sim, outside, other));
    ok(begin(sim, a, THREAD_LOCAL));
    assert_eq!(wait(sim, a, outside), ISOLATION);
    assert_eq!(end(sim, a), INVALIDATED);

    let refused: [&dyn Fn() -> c_int; 4] = [
        &|| call!(sim.cuda, b"cuEventQuery"(inside => Handle)),
        &|| call!(sim.cuda, b"cuEventSynchronize"(inside => Handle)),
        &|| call!(sim.cuda, b"cuStreamQuery"(a => Handle)),
        &|| synchronize(sim, a),
    ];
    for (i, call) in refused.into_iter().enumerate() {
        ok(begin(sim, a, THREAD_LOCAL));
        ok(record(sim, inside, a));
        assert_eq!(call(), if i < 2 { CAPTURED_EVENT } else { UNSUPPORTED });
        assert_eq!(end(sim, a), INVALIDATED);
    }
    // After the capture the event is of no use until it is recorded again.
    assert_eq!(wait(sim, other, inside), CAPTURED_EVENT);
    ok(record(sim, inside, other));
    ok(wait(sim, a, inside));

    // The legacy stream cannot wait for a blocking stream in capture.
    let mut blocking: Handle = null_mut();
    ok(call!(sim.cuda, b"cuStreamCreate"(&mut blocking => *mut Handle, 0 => u32)));
    ok(begin(sim, blocking, THREAD_LOCAL));
    assert_eq!(record(sim, outside, null_mut()), 906);
    assert_eq!(end(sim, blocking), INVALIDATED);
}

/// What a thread may call while it captures, by its own mode.
#[test]
fn a_relaxed_thread_may_allocate_during_its_capture() {
    let Some((sim, _alone)) = alone() else { return };
    let (a, other) = (stream(sim), stream(sim));
    let function = kernel(sim, ADD, &[], "add", 0);
    let to = upload(sim, &[0f32; N]);
    let allocate_plain = || {
        let mut address = 0u64;
        let code = call!(sim.cuda, b"cuMemAlloc_v2"(&mut address => *mut u64, N * 4 => usize));
        (code, address)
    };
    let exchange = |mut mode: u32| {
        ok(call!(sim.cuda, b"cuThreadExchangeStreamCaptureMode"(&mut mode => *mut u32)));
        mode
    };
    ok(begin(sim, a, THREAD_LOCAL));
    assert_eq!(allocate_plain().0, 900);
    assert_eq!(end(sim, a), Err(901));

    ok(begin(sim, a, THREAD_LOCAL));
    ok(add(sim, a, function, to, 1.0));
    assert_eq!(exchange(2), 0);
    let (code, address) = allocate_plain();
    ok(code);
    ok(call!(sim.cuda, b"cuMemFree_v2"(address => u64)));
    let y = allocate(sim, other, N * 4);
    ok(fill(sim, other, y, 0, N * 4));
    ok(synchronize(sim, other));
    assert_eq!(exchange(0), 2);
    ok(add(sim, a, function, y, 1.0));
    let graph = end(sim, a).unwrap();
    launch_graph(sim, graph, a);
    assert_eq!(read(sim, a, y, N), Ok(vec![1.0; N]));
    assert_eq!(read(sim, a, to, N), Ok(vec![1.0; N]));
    let (mut status, mut id) = (7, 7u64);
    ok(call!(sim.cuda, b"cuStreamGetCaptureInfo_v2"(
        a => Handle, &mut status => *mut c_int, &mut id => *mut u64, null_mut() => *mut Handle,
        null_mut() => *mut c_void, null_mut() => *mut usize)));
    assert_eq!((status, id), (0, 0));
    let mut ids = [0u64; 2];
    for (id, s) in ids.iter_mut().zip([a, other]) {
        ok(call!(sim.cuda, b"cuStreamGetId"(s => Handle, id => *mut u64)));
    }
    assert_ne!(ids[0], ids[1]);
}

/// A stream that is destroyed, and memory that is freed without an order, while work waits.
#[test]
fn what_waits_is_still_done() {
    let Some((sim, _alone)) = alone() else { return };
    let function = kernel(sim, ADD, &[], "add", 0);
    let to = upload(sim, &[0f32; N]);
    for mode in ["late", "random"] {
        run_streams(sim, mode, 3);
        let s = stream(sim);
        ok(fill(sim, s, to, 0, N * 4));
        ok(add(sim, s, function, to, 1.0));
        let done = event(sim);
        ok(record(sim, done, s));
        destroy(sim, &[s]);
        ok(call!(sim.cuda, b"cuEventSynchronize"(done => Handle)));
        assert_eq!(download::<f32>(sim, to, N), vec![1.0; N]);
    }
    // Plain memory is freed when its users are done.
    run_streams(sim, "late", 4);
    let (plain, s) = (upload(sim, &[0f32; N]), stream(sim));
    ok(add(sim, s, function, plain, 1.0));
    ok(call!(sim.cuda, b"cuMemFree_v2"(plain => u64)));
    ok(synchronize(sim, s));
    // That of a pool at once.
    let pooled = allocate(sim, s, N * 4);
    ok(synchronize(sim, s));
    ok(add(sim, s, function, pooled, 1.0));
    ok(call!(sim.cuda, b"cuMemFree_v2"(pooled => u64)));
    assert_eq!(synchronize(sim, s), ILLEGAL_ADDRESS);
}
