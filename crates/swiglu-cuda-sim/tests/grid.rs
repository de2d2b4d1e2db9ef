//! Blocks of a cooperative launch that exchange values: what a correct barrier of the grid gives, and
//! what each of its parts is there for.
// A test may panic.
#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::ffi::{c_int, c_void};

use common::{
    Handle, Sim, call, download, finished, kernel, launch_on, launch_programmatic, own_stream, sim,
    upload,
};

/// Every thread stores a value, all blocks meet, every thread reads that of a thread of the next
/// block. FAULT: 0 none; 1 no barrier of the block before the release; 2 the release comes before
/// the stores; 3 nobody waits.
const EXCHANGE: &str = r#"
struct Exchange { u32* values; u32* word; u32* out; u32 round; };
KERNEL(64, 1, exchange)(KERNEL_PARAMS(Exchange) p) {
  const u32 i = blockIdx.x * 64 + threadIdx.x, count = gridDim.x * 64;
  const u32 add = blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1u;
  const u32 before = ptx::load_relaxed(p.word);
  if (FAULT == 2 && threadIdx.x == 0) ptx::add_release(p.word, add);
  ptx::store_for_grid(p.values + i, p.round * 1000 + i);
  if (FAULT != 1) __syncthreads();
  if (threadIdx.x == 0) {
    if (FAULT != 2) ptx::add_release(p.word, add);
    if (FAULT != 3) ptx::wait_for_turnover(p.word, before);
  }
  __syncthreads();
  p.out[i] = p.values[(i + 64) % count];
}
"#;

#[repr(C)]
struct Exchange {
    values: u64,
    word: u64,
    out: u64,
    round: u32,
}

const BLOCKS: u32 = 4;
const THREADS: usize = 64 * BLOCKS as usize;

fn cooperative(sim: &Sim, function: Handle, params: &Exchange, blocks: u32) -> c_int {
    cooperative_with(sim, function, params, blocks, 0)
}

fn cooperative_with(
    sim: &Sim,
    function: Handle,
    params: &Exchange,
    blocks: u32,
    shared: u32,
) -> c_int {
    let mut pointers = [std::ptr::from_ref(params).cast_mut().cast::<c_void>()];
    let launched = call!(sim.cuda, b"cuLaunchCooperativeKernel"(
        function => Handle, blocks => u32, 1 => u32, 1 => u32, 64 => u32, 1 => u32, 1 => u32,
        shared => u32, own_stream(sim) => Handle, pointers.as_mut_ptr() => *mut *mut c_void));
    finished(sim, launched)
}

/// How many of 50 launches, over the same word and memory, gave every value of their round.
fn right_launches(sim: &Sim, fault: u32) -> usize {
    let function = kernel(sim, EXCHANGE, &[&format!("FAULT={fault}")], "exchange", 0);
    let (values, out) = (upload(sim, &[0u32; THREADS]), upload(sim, &[0u32; THREADS]));
    let word = upload(sim, &[0u32]);
    let right = |round: u32| {
        let params = Exchange { values, word, out, round };
        assert_eq!(cooperative(sim, function, &params, BLOCKS), 0);
        let expected = (0..THREADS).map(|i| round * 1000 + ((i + 64) % THREADS) as u32);
        download::<u32>(sim, out, THREADS).into_iter().eq(expected)
    };
    (1..=50).filter(|&round| right(round)).count()
}

#[test]
fn a_barrier_of_the_grid_is_reusable() {
    let Some(sim) = sim() else { return };
    assert_eq!(right_launches(sim, 0), 50);
}

#[test]
fn each_part_of_the_barrier_is_missed() {
    let Some(sim) = sim() else { return };
    for fault in 1..=3 {
        let right = right_launches(sim, fault);
        // Some schedules happen to run the threads in an order that needs no barrier.
        assert!(right < 40, "fault {fault}: {right} of 50 launches were right by chance");
    }
}

/// A warp stores values and tells another, which meets the other blocks and has the next block's copied.
/// FAULT: 0 none; 1 lanes do not meet before one of them tells; 2 no fence between stores and copies.
const COPY: &str = r#"
struct Exchange { u32* values; u32* word; u32* out; u32 round; };
KERNEL(64, 1, exchange)(KERNEL_PARAMS(Exchange) p) {
  const u32 shared = ptx::shared_address(ptx::dynamic_shared()), lane = threadIdx.x % 32;
  const u32 add = blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1u;
  if (threadIdx.x == 0) {
    ptx::barrier_init(shared, 1);
    ptx::barrier_init(shared + 8, 1);
    ptx::barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    const u32 i = blockIdx.x * 32 + lane;
    ptx::store_for_grid(p.values + i, p.round * 1000 + i);
    if (FAULT != 1) __syncwarp();
    if (lane == 0) ptx::barrier_arrive(shared);
    ptx::barrier_wait(shared + 8, 0);
    p.out[i] = ptx::load_shared(shared + 16 + 4 * lane);
  } else if (lane == 0) {
    ptx::barrier_wait(shared, 0);
    const u32 before = ptx::load_relaxed(p.word);
    ptx::add_release(p.word, add);
    ptx::wait_for_turnover(p.word, before);
    if (FAULT != 2) ptx::fence_async_global();
    ptx::barrier_arrive_expect(shared + 8, 128);
    const u32* from = p.values + (blockIdx.x + 1) % gridDim.x * 32;
    ptx::bulk_load(shared + 16, from, 128, shared + 8);
  }
}
"#;

#[test]
fn stores_reach_the_tma_of_other_blocks() {
    let Some(sim) = sim() else { return };
    const LAUNCH_FAILED: c_int = 719;
    const COPIED: usize = 32 * BLOCKS as usize;
    for fault in 0..=2 {
        let function = kernel(sim, COPY, &[&format!("FAULT={fault}")], "exchange", 144);
        let (values, out) = (upload(sim, &[0u32; COPIED]), upload(sim, &[0u32; COPIED]));
        let word = upload(sim, &[0u32]);
        let mut right = 0;
        for round in 1..=50 {
            let params = Exchange { values, word, out, round };
            let code = cooperative_with(sim, function, &params, BLOCKS, 144);
            assert_eq!(code, if fault == 2 { LAUNCH_FAILED } else { 0 }, "fault {fault}");
            if fault == 2 {
                break;
            }
            let expected = (0..COPIED).map(|i| round * 1000 + ((i + 32) % COPIED) as u32);
            right += usize::from(download::<u32>(sim, out, COPIED).into_iter().eq(expected));
        }
        assert!([right == 50, right < 40, right == 0][fault], "fault {fault}: {right} of 50");
    }
}

#[test]
fn more_blocks_than_run_at_once_are_refused() {
    let Some(sim) = sim() else { return };
    let function = kernel(sim, EXCHANGE, &["FAULT=0"], "exchange", 0);
    let params = Exchange { values: 0, word: 0, out: 0, round: 0 };
    const TOO_LARGE: c_int = 720;
    assert_eq!(cooperative(sim, function, &params, 1 << 20), TOO_LARGE);
}

/// A grid that may start early reads what the one before stored, or, WORD, what it counted. WAITS: whether it
/// waits for it.
const DEPENDENT: &str = r#"
struct Pass { Raw* values; Raw* out; };
KERNEL(32, 1, store)(KERNEL_PARAMS(Pass) p) {
  if (!WORD) {
    ptx::store_for_grid((u32*)p.values + threadIdx.x, threadIdx.x);
  } else {
    for (u32 i = 0; i < threadIdx.x; ++i) ptx::add_release((u32*)p.values + threadIdx.x, 1);
  }
}
KERNEL(32, 1, load)(KERNEL_PARAMS(Pass) p) {
  if (WAITS) ptx::grid_dependency_wait();
  if (WORD) {
    ((u32*)p.out)[threadIdx.x] = ptx::load_relaxed((const u32*)p.values + threadIdx.x);
  } else if (threadIdx.x < 8) {
    p.out[threadIdx.x] = ptx::load_global(p.values + threadIdx.x);
  }
}
"#;

#[test]
fn a_dependent_grid_waits_before_it_reads() {
    let Some(sim) = sim() else { return };
    const LAUNCH_FAILED: c_int = 719;
    let source = DEPENDENT.replace("Raw*", "ptx::Raw<16>*");
    let starts = [(1, 1, 0), (0, 0, 0), (0, 1, LAUNCH_FAILED)];
    for (word, (waits, early, expected)) in [0, 1].into_iter().flat_map(|w| starts.map(|s| (w, s)))
    {
        let defines = [format!("WORD={word}"), format!("WAITS={waits}")];
        let defines = defines.each_ref().map(String::as_str);
        let [store, load] = ["store", "load"].map(|name| kernel(sim, &source, &defines, name, 0));
        let params = [upload(sim, &[0u32; 32]), upload(sim, &[0u32; 32])];
        assert_eq!(launch_on(sim, own_stream(sim), store, 1, 32, 0, &params), 0);
        let launch = if early == 1 { launch_programmatic } else { launch_on };
        let code = launch(sim, own_stream(sim), load, 1, 32, 0, &params);
        assert_eq!(
            finished(sim, code),
            expected,
            "word {word}, waits {waits}, may start early {early}"
        );
        let copied = download::<u32>(sim, params[1], 32).into_iter().eq(0..32);
        assert_eq!(copied, expected == 0);
    }
}
