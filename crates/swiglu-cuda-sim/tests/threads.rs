//! Threads of a block: barriers, shuffles, deadlocks, races.
mod common;

use common::*;

#[repr(C)]
struct Out {
    to: u64,
}

#[test]
fn a_sum_over_a_block() {
    let Some(sim) = sim() else { return };
    let source = "
struct P { float* to; };
KERNEL(256, 1, sum)(KERNEL_PARAMS(P) p) {
  float* partial = (float*)ptx::dynamic_shared();
  float x = threadIdx.x;
  for (int i = 16; i > 0; i /= 2) x += __shfl_xor_sync(0xffffffffu, x, i);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = x;
  __syncthreads();
  if (threadIdx.x < 8) {
    float y = partial[threadIdx.x];
    for (int i = 4; i > 0; i /= 2) y += __shfl_down_sync(0xff, y, i, 8);
    if (threadIdx.x == 0) p.to[blockIdx.x] = y;
  }
}";
    let sum = kernel(sim, source, &[], "sum", 32);
    let to = upload(sim, &[0f32; 3]);
    assert_eq!(launch(sim, sum, 3, 256, 32, &Out { to }), 0);
    assert_eq!(download::<f32>(sim, to, 3), [32640.0; 3]);
}

const NEIGHBOUR: &str = "
struct P { int* to; };
KERNEL(64, 1, neighbour)(KERNEL_PARAMS(P) p) {
  int* shared = (int*)ptx::dynamic_shared();
  shared[threadIdx.x] = threadIdx.x;
  if (SYNC) __syncthreads();
  p.to[threadIdx.x] = shared[(threadIdx.x + 1) % 64];
}";

fn neighbours(sync: &str) -> Option<Vec<Vec<i32>>> {
    let sim = sim()?;
    let neighbour = kernel(sim, NEIGHBOUR, &[sync], "neighbour", 256);
    let run = |_| {
        let to = upload(sim, &[0i32; 64]);
        assert_eq!(launch(sim, neighbour, 1, 64, 256, &Out { to }), 0);
        download(sim, to, 64)
    };
    Some((0..8).map(run).collect())
}

#[test]
fn a_missing_barrier_shows() {
    let want: Vec<i32> = (0..64).map(|i| (i + 1) % 64).collect();
    let Some(right) = neighbours("SYNC=1") else { return };
    assert!(right.iter().all(|r| *r == want));
    let Some(wrong) = neighbours("SYNC=0") else { return };
    assert!(wrong.iter().all(|r| *r != want));
}

#[test]
fn a_deadlock_is_an_error() {
    let Some(sim) = sim() else { return };
    let source = "
struct P { int* to; };
KERNEL(64, 1, stuck)(KERNEL_PARAMS(P) p) {
  const u32 barrier = ptx::shared_address(ptx::dynamic_shared());
  if (threadIdx.x == 0) ptx::barrier_init(barrier, 2);
  __syncthreads();
  if (threadIdx.x == 0) ptx::barrier_arrive(barrier);
  ptx::barrier_wait(barrier, 0);
  p.to[threadIdx.x] = 1;
}";
    let stuck = kernel(sim, source, &[], "stuck", 64);
    assert_eq!(launch(sim, stuck, 1, 64, 64, &Out { to: upload(sim, &[0i32; 64]) }), 719);
}

#[test]
fn lanes_at_different_operations_are_an_error() {
    let Some(sim) = sim() else { return };
    let source = "
struct P { int* to; };
KERNEL(32, 1, torn)(KERNEL_PARAMS(P) p) {
  if (threadIdx.x < 16) {
    p.to[threadIdx.x] = __shfl_sync(0xffffffffu, 1, 0);
  } else {
    p.to[threadIdx.x] = __ballot_sync(0xffffffffu, 1);
  }
}";
    let torn = kernel(sim, source, &[], "torn", 0);
    assert_eq!(launch(sim, torn, 1, 32, 0, &Out { to: upload(sim, &[0i32; 32]) }), 719);
}

#[test]
fn shared_memory_is_checked_and_poisoned() {
    let Some(sim) = sim() else { return };
    let source = "
struct P { u32* to; };
KERNEL(32, 1, peek)(KERNEL_PARAMS(P) p) {
  p.to[threadIdx.x] = ptx::load_shared(ptx::shared_address(ptx::dynamic_shared()) + AT);
}";
    let to = upload(sim, &[0u32; 32]);
    let peek = kernel(sim, source, &["AT=124"], "peek", 128);
    assert_eq!(launch(sim, peek, 1, 32, 128, &Out { to }), 0);
    assert_eq!(download::<u32>(sim, to, 32), [u32::MAX; 32]);
    for outside in ["AT=128", "AT=2"] {
        let peek = kernel(sim, source, &[outside], "peek", 128);
        assert_eq!(launch(sim, peek, 1, 32, 128, &Out { to }), 719);
    }
}

#[test]
fn an_infinite_recursion_ends_the_launch_only() {
    let Some(sim) = sim() else { return };
    let source = "
struct P { int* to; };
__noinline__ int deep(volatile int* p, int n) { volatile int a[64]; a[n % 64] = *p; return deep(p, n + a[n % 64] + 1) + a[1]; }
KERNEL(32, 1, sink)(KERNEL_PARAMS(P) p) { p.to[0] = deep(p.to, 0); }";
    let sink = kernel(sim, source, &[], "sink", 0);
    assert_eq!(launch(sim, sink, 1, 32, 0, &Out { to: upload(sim, &[0i32; 32]) }), 700);
}
