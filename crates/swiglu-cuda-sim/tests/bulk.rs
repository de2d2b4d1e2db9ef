//! Bulk copies of bytes by TMA: what they bring, and what is refused.
// A test may panic.
#![allow(clippy::unwrap_used)]

mod common;

use common::*;

/// A ring of two stages of `bytes`, copied through by one warp. FAULT: 0 none; 1 nobody waits for the
/// copies; 2 the producer does not wait for the readers; 3 the block may end before its last copy.
const RING: &str = "
struct P { const u8* from; u8* to; u32 bytes, steps, at; u64 policy; };
KERNEL(64, 1, ring)(KERNEL_PARAMS(P) p) {
  const u32 base = ptx::shared_address(ptx::dynamic_shared()), data = base + 64;
  if (threadIdx.x == 0) {
    for (u32 s = 0; s < 2; ++s) {
      ptx::barrier_init(base + 16 * s, 1);
      ptx::barrier_init(base + 16 * s + 8, 1);
    }
    ptx::barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x == 32) {
    const u64 policy = p.policy != 0 ? p.policy : ptx::policy_evict_first();
    for (u32 i = 0; i < p.steps; ++i) {
      const u32 s = i % 2, full = base + 16 * s;
      if (FAULT != 2) ptx::barrier_wait(full + 8, i / 2 % 2 ^ 1);
      ptx::barrier_arrive_expect(full, p.bytes);
      ptx::bulk_load(data + s * 256 + p.at, p.from + i * p.bytes, p.bytes, full, policy);
    }
  }
  if (threadIdx.x >= 32) return;
  for (u32 i = 0; i < p.steps - (FAULT == 3 ? 1 : 0); ++i) {
    const u32 s = i % 2, full = base + 16 * s;
    if (FAULT != 1) ptx::barrier_wait(full, i / 2 % 2);
    const u32 words = p.bytes / 4;
    for (u32 w = threadIdx.x; w < words; w += 32) {
      ((u32*)p.to)[i * words + w] = ptx::load_shared(data + s * 256 + w * 4);
    }
    __syncwarp();
    if (threadIdx.x == 0) ptx::barrier_arrive(full + 8);
  }
}";

#[repr(C)]
struct P {
    from: u64,
    to: u64,
    bytes: u32,
    steps: u32,
    at: u32,
    policy: u64,
}

const STEPS: usize = 7;
const LAUNCH_FAILED: i32 = 719;

fn run(sim: &Sim, fault: u32, bytes: usize, change: impl Fn(&mut P)) -> (i32, bool) {
    let ring = kernel(sim, RING, &[&format!("FAULT={fault}")], "ring", 576);
    let given: Vec<u32> =
        (0..(STEPS * bytes / 4) as u32).map(|i| i.wrapping_mul(2_654_435_761)).collect();
    let (from, to) = (upload(sim, &given), upload(sim, &vec![0u32; given.len()]));
    let mut params = P { from, to, bytes: bytes as u32, steps: STEPS as u32, at: 0, policy: 0 };
    change(&mut params);
    let code = launch(sim, ring, 1, 64, 576, &params);
    (code, download::<u32>(sim, to, given.len()) == given)
}

#[test]
fn bytes_arrive() {
    let Some(sim) = sim() else { return };
    for bytes in [16, 48, 256] {
        for _ in 0..5 {
            assert_eq!(run(sim, 0, bytes, |_| ()), (0, true), "{bytes} bytes");
        }
    }
}

#[test]
fn each_wait_is_missed() {
    let Some(sim) = sim() else { return };
    for fault in 1..=2 {
        let right = (0..20).filter(|_| run(sim, fault, 256, |_| ()) == (0, true)).count();
        assert!(right < 15, "fault {fault}: {right} of 20 launches were right by chance");
    }
}

/// A ring of STAGES that two warps read in turn, each every other copy.
const TWO_READERS: &str = "
struct P { const u32* from; u32* to; u32 steps; };
KERNEL(96, 1, two_readers)(KERNEL_PARAMS(P) p) {
  const u32 base = ptx::shared_address(ptx::dynamic_shared()), data = base + 256, warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    for (u32 s = 0; s < STAGES; ++s) {
      ptx::barrier_init(base + 16 * s, 1);
      ptx::barrier_init(base + 16 * s + 8, 1);
    }
    ptx::barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x % 32 != 0) return;
  const u64 policy = ptx::policy_evict_first();
  for (u32 i = warp == 2 ? 0 : warp; i < p.steps; i += warp == 2 ? 1 : 2) {
    const u32 s = i % STAGES, full = base + 16 * s, parity = i / STAGES % 2;
    if (warp == 2) {
      ptx::barrier_wait(full + 8, parity ^ 1);
      ptx::barrier_arrive_expect(full, 16);
      ptx::bulk_load(data + s * 16, p.from + 4 * i, 16, full, policy);
    } else {
      ptx::barrier_wait(full, parity);
      p.to[i] = ptx::load_shared(data + s * 16);
      ptx::barrier_arrive(full + 8);
    }
  }
}";

#[repr(C)]
struct TwoReaders {
    from: u64,
    to: u64,
    steps: u32,
}

/// A barrier tells odd rounds from even ones only. With three stages a warp waits for a round of a stage whose last
/// round the other warp has read: it takes an older one for it where the copy of that lags behind.
#[test]
fn rounds_of_a_ring_are_mistaken_where_copies_lag_behind() {
    let Some(sim) = sim() else { return };
    let right = |stages: u32| {
        let readers = kernel(sim, TWO_READERS, &[&format!("STAGES={stages}")], "two_readers", 320);
        let given: Vec<u32> = (0..48).map(|i| i / 4 + i % 4 * 1000).collect();
        let (from, to) = (upload(sim, &given), upload(sim, &[0u32; 12]));
        let params = TwoReaders { from, to, steps: 12 };
        launch(sim, readers, 1, 96, 320, &params) == 0
            && download::<u32>(sim, to, 12) == (0..12).collect::<Vec<_>>()
    };
    assert!((0..40).all(|_| right(2) && right(4)));
    assert!(!(0..40).all(|_| right(3)));
}

/// A copy that lands after its block has ended would write into the next block's shared memory.
#[test]
fn blocks_outlive_their_copies() {
    let Some(sim) = sim() else { return };
    assert!((0..300).any(|_| run(sim, 3, 256, |_| ()).0 == LAUNCH_FAILED));
}

#[test]
fn what_the_engine_cannot_address_is_refused() {
    let Some(sim) = sim() else { return };
    let code = |bytes, change: &dyn Fn(&mut P)| run(sim, 0, bytes, change).0;
    // A number of bytes, an address in memory and one in shared memory that are no multiples of 16.
    assert_eq!(code(64, &|p| p.bytes = 56), LAUNCH_FAILED);
    assert_eq!(code(64, &|p| p.bytes = 0), LAUNCH_FAILED);
    assert_eq!(code(64, &|p| p.from += 8), LAUNCH_FAILED);
    assert_eq!(code(64, &|p| p.at = 8), LAUNCH_FAILED);
    // Behind the end of the allocation, and of shared memory.
    assert_eq!(code(64, &|p| p.from += 16), LAUNCH_FAILED);
    assert_eq!(code(256, &|p| p.at = 16), LAUNCH_FAILED);
    // What createpolicy did not make.
    assert_eq!(code(64, &|p| p.policy = 1), LAUNCH_FAILED);
}
