//! Grids that run beside each other: those of two streams, and a grid with the one behind it that may start
//! early. Each program is run by many seeds.
// A test may panic.
#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;

use common::*;

const SEEDS: u64 = 100;

/// A grid whose blocks meet at a word, as in `grid.rs`; every thread then has the number of a thread of the
/// next block.
const MEET: &str = "
struct Meet { u32* values; u32* word; u32* out; u32 round; };
KERNEL(32, 1, meet)(KERNEL_PARAMS(Meet) p) {
  const u32 i = blockIdx.x * 32 + threadIdx.x, count = gridDim.x * 32;
  const u32 add = blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1u;
  const u32 before = ptx::load_relaxed(p.word);
  ptx::store_for_grid(p.values + i, p.round + i);
  __syncthreads();
  if (threadIdx.x == 0) {
    ptx::add_release(p.word, add);
    ptx::wait_for_turnover(p.word, before);
  }
  __syncthreads();
  p.out[i] = p.values[(i + 32) % count];
}";

#[repr(C)]
struct Meet {
    values: u64,
    word: u64,
    out: u64,
    round: u32,
}

const BLOCKS: u32 = 4;
const THREADS: usize = 32 * BLOCKS as usize;

fn meet(sim: &Sim, stream: Handle, function: Handle, params: &Meet) {
    let mut pointers = [std::ptr::from_ref(params).cast_mut().cast::<c_void>()];
    let code = call!(sim.cuda, b"cuLaunchCooperativeKernel"(
        function => Handle, BLOCKS => u32, 1 => u32, 1 => u32, 32 => u32, 1 => u32, 1 => u32,
        0 => u32, stream => Handle, pointers.as_mut_ptr() => *mut *mut c_void));
    assert_eq!(code, 0);
}

fn synchronize(sim: &Sim, stream: Handle) -> c_int {
    call!(sim.cuda, b"cuStreamSynchronize"(stream => Handle))
}

/// Two grids on two streams: what each gave, or what went wrong.
#[test]
fn grids_of_two_streams_cannot_share_a_barrier() {
    let Some(sim) = sim() else { return };
    const LAUNCH_FAILED: c_int = 719;
    let function = kernel(sim, MEET, &[], "meet", 0);
    let outs = [upload(sim, &[0u32; THREADS]), upload(sim, &[0u32; THREADS])];
    let values = [upload(sim, &[0u32; THREADS]), upload(sim, &[0u32; THREADS])];
    let streams = [stream(sim), stream(sim)];
    // Numbers that no grid before had.
    let rounds = |seed: u64| [1000, 2000].map(|part| part + 10_000 * (seed as u32 + 1));
    // The outcome of each grid.
    let program = &|own_words: bool, seed: u64| {
        let words = upload(sim, &[0u32; 64]);
        for i in 0..2 {
            let word = words + if own_words { 128 * i as u64 } else { 0 };
            let round = rounds(seed)[i];
            let params = Meet { values: values[i], word, out: outs[i], round };
            meet(sim, streams[i], function, &params);
        }
        [0, 1].map(|i| {
            let code = synchronize(sim, streams[i]);
            let expected = (0..THREADS).map(|t| rounds(seed)[i] + ((t + 32) % THREADS) as u32);
            (code, download::<u32>(sim, outs[i], THREADS).into_iter().eq(expected))
        })
    };
    let run = |own_words| {
        (0..SEEDS).map(move |seed| {
            run_streams(sim, "random", seed);
            program(own_words, seed)
        })
    };
    assert!(run(true).all(|outcome| outcome == [(0, true); 2]));
    let outcomes: Vec<_> = run(false).collect();
    let hung = outcomes.iter().flatten().filter(|(code, _)| *code == LAUNCH_FAILED).count();
    let wrong = outcomes.iter().flatten().filter(|(code, right)| *code == 0 && !right).count();
    assert!(hung > 0 && wrong > 0, "{hung} hung, {wrong} wrong");
    // Grids that do not fit on the device together do not meet.
    let full = outcomes.iter().filter(|outcome| **outcome == [(0, true); 2]).count();
    assert!(full > 0, "none ran one after the other");
}

/// Two kernels of two streams that count up the same words by ordinary loads and stores.
#[test]
fn blocks_of_two_streams_interleave() {
    let Some(sim) = sim() else { return };
    let source = "
struct Count { u32* to; };
KERNEL(32, 1, count)(KERNEL_PARAMS(Count) p) {
  const u32 before = p.to[threadIdx.x];
  __syncthreads();
  p.to[threadIdx.x] = before + 1;
}";
    let function = kernel(sim, source, &[], "count", 0);
    let to = upload(sim, &[0u32; 32]);
    let streams = [stream(sim), stream(sim)];
    let lost = (0..SEEDS).filter(|&seed| {
        run_streams(sim, "random", seed);
        let before = download::<u32>(sim, to, 32);
        for s in streams {
            assert_eq!(launch_on(sim, s, function, 4, 32, 0, &to), 0);
        }
        for s in streams {
            assert_eq!(synchronize(sim, s), 0);
        }
        download::<u32>(sim, to, 32).iter().zip(before).any(|(after, before)| *after != before + 8)
    });
    let lost = lost.count();
    assert!(
        (1..SEEDS as usize / 2).contains(&lost),
        "additions were lost by {lost} of {SEEDS} seeds"
    );
}

/// One grid stores, the next reads what it stored, or writes what it reads, and may start early.
/// STORE: 0 by an ordinary store, 1 by `store_global`, 2 by a tensor store. TRIGGERS, WAITS: whether the first
/// lets the next start before its end, and whether that waits. WRITES: the next one writes what the first reads.
const DEPENDENT: &str = r#"
struct alignas(64) Pass { ptx::TensorMap map; u32* values; u32* out; };
KERNEL(64, 1, first)(KERNEL_PARAMS(Pass) p) {
  const u32 i = blockIdx.x * 64 + threadIdx.x;
  if (TRIGGERS) ptx::grid_dependency_launch();
  __syncwarp();
  if (WRITES) {
    u32 sum = 0;
    for (int j = 0; j < 8; ++j) {
      sum += p.values[i];
      __syncwarp();
    }
    p.out[i] = sum;
  } else if (STORE == 0) {
    p.values[i] = i + 1;
  } else if (STORE == 1) {
    ptx::store_global((ptx::Raw<4>*)p.values + i, ptx::Raw<4>{{i + 1}});
  } else {
    const u32 shared = ptx::shared_address(ptx::dynamic_shared());
    ptx::store_shared(shared + 4 * threadIdx.x, i + 1);
    ptx::fence_async_shared();
    __syncthreads();
    if (threadIdx.x == 0) {
      ptx::tensor_store(&p.map, shared, 0, 2 * blockIdx.x);
      ptx::bulk_commit();
      ptx::bulk_wait_read<0>();
    }
  }
}
KERNEL(64, 1, next)(KERNEL_PARAMS(Pass) p) {
  const u32 i = blockIdx.x * 64 + threadIdx.x;
  if (WAITS) ptx::grid_dependency_wait();
  if (WRITES) {
    p.values[i] = 0;
  } else if (STORE == 0) {
    p.out[i] = p.values[i];
  } else if (STORE == 1) {
    p.out[i] = ptx::load_global((const ptx::Raw<4>*)p.values + i).word[0];
  } else {
    const u32 shared = ptx::shared_address(ptx::dynamic_shared()), barrier = shared + 256;
    if (threadIdx.x == 0) {
      ptx::barrier_init(barrier, 1);
      ptx::barrier_init_fence();
      ptx::barrier_arrive_expect(barrier, 256);
      ptx::tensor_load(shared, &p.map, barrier, 0, 2 * blockIdx.x);
    }
    __syncthreads();
    ptx::barrier_wait(barrier, 0);
    p.out[i] = ptx::load_shared(shared + 4 * threadIdx.x);
  }
}
"#;

#[repr(C, align(64))]
struct Pass {
    map: TensorMap,
    values: u64,
    out: u64,
}

const COUNT: usize = 128;

/// Of the seeds: those that gave an error, and those that gave a wrong value.
fn early(store: u32, triggers: bool, waits: bool, writes: bool) -> Option<[usize; 2]> {
    early_as(store, triggers, waits, writes, false)
}

/// The same, or with both grids captured in a graph.
fn early_as(
    store: u32,
    triggers: bool,
    waits: bool,
    writes: bool,
    captured: bool,
) -> Option<[usize; 2]> {
    let sim = sim()?;
    let [triggers, waits, writes] = [triggers, waits, writes].map(u32::from);
    let defines = [
        format!("STORE={store}"),
        format!("TRIGGERS={triggers}"),
        format!("WAITS={waits}"),
        format!("WRITES={writes}"),
    ];
    let defines = defines.each_ref().map(String::as_str);
    let [first, next] = ["first", "next"].map(|name| kernel(sim, DEPENDENT, &defines, name, 512));
    let (values, out) = (upload(sim, &[0u32; COUNT]), upload(sim, &[0u32; COUNT]));
    // Rows of 64 elements of 16 bits: two rows are the 256 bytes of a block.
    let params = Pass { map: tensor_map(sim, values, 4, 64, 2, 64, 0), values, out };
    let s = stream(sim);
    let launch_both = || {
        assert_eq!(launch_on(sim, s, first, 2, 64, 512, &params), 0);
        assert_eq!(launch_programmatic(sim, s, next, 2, 64, 512, &params), 0);
    };
    let graph = captured.then(|| {
        let (mut graph, mut executable): (Handle, Handle) = (null_mut(), null_mut());
        assert_eq!(call!(sim.cuda, b"cuStreamBeginCapture_v2"(s => Handle, 1 => c_int)), 0);
        launch_both();
        let ended = call!(sim.cuda, b"cuStreamEndCapture"(s => Handle, &mut graph => *mut Handle));
        let made = call!(sim.cuda, b"cuGraphInstantiateWithFlags"(
            &mut executable => *mut Handle, graph => Handle, 0 => u64));
        assert_eq!((ended, made), (0, 0));
        executable
    });
    let run = |seed| {
        run_streams(sim, "random", seed);
        let start = if writes == 1 { 0x01 } else { 0 };
        for (to, byte) in [(values, start), (out, 0)] {
            assert_eq!(
                call!(sim.cuda, b"cuMemsetD8Async"(
                to => u64, byte => u8, 4 * COUNT => usize, s => Handle)),
                0
            );
        }
        match graph {
            None => launch_both(),
            Some(graph) => {
                assert_eq!(call!(sim.cuda, b"cuGraphLaunch"(graph => Handle, s => Handle)), 0);
            }
        }
        let code = synchronize(sim, s);
        let right = |i: usize| if writes == 1 { 8 * 0x0101_0101 } else { i as u32 + 1 };
        (code, download::<u32>(sim, out, COUNT).into_iter().eq((0..COUNT).map(right)))
    };
    let outcomes: Vec<_> = (0..SEEDS).map(run).collect();
    let failed = outcomes.iter().filter(|(code, _)| *code != 0).count();
    let wrong = outcomes.iter().filter(|(code, right)| *code == 0 && !right).count();
    Some([failed, wrong])
}

#[test]
fn a_grid_that_starts_early_waits_for_what_it_reads() {
    for store in 0..3 {
        for triggers in [false, true] {
            let Some(outcome) = early(store, triggers, true, false) else { return };
            assert_eq!(outcome, [0, 0], "store {store}, triggers {triggers}");
        }
    }
    // Ordinary accesses show as wrong values, where the grids overlap; others are seen in any case.
    let Some([failed, wrong]) = early(0, true, false, false) else { return };
    assert!(failed == 0 && wrong > 5, "{failed} failed, {wrong} wrong");
    for store in [1, 2] {
        for triggers in [false, true] {
            let Some([failed, wrong]) = early(store, triggers, false, false) else { return };
            let enough = if triggers { failed + wrong > 50 } else { failed == SEEDS as usize };
            assert!(enough, "store {store}, triggers {triggers}: {failed} failed, {wrong} wrong");
        }
    }
}

#[test]
fn grids_of_a_graph_start_early_too() {
    let Some(right) = early_as(0, true, true, false, true) else { return };
    assert_eq!(right, [0, 0]);
    let Some([_, wrong]) = early_as(0, true, false, false, true) else { return };
    assert!(wrong > 5, "{wrong} wrong");
}

#[test]
fn a_grid_that_starts_early_waits_before_it_writes() {
    let Some(right) = early(0, true, true, true) else { return };
    assert_eq!(right, [0, 0]);
    let Some([_, wrong]) = early(0, true, false, true) else { return };
    assert!(wrong > 5, "{wrong} wrong");
    // It starts when the first has ended, unless that has let it start.
    let Some(late) = early(0, false, false, true) else { return };
    assert_eq!(late, [0, 0]);
}
