//! Blocks of a cluster: their barrier, and stores to each other.
mod common;

use std::ffi::{c_int, c_uint, c_void};
use std::ptr::null_mut;

use common::*;

#[repr(C)]
struct Out {
    to: u64,
}

/// CUlaunchAttribute with the dimensions of a cluster.
#[repr(C)]
struct Attribute {
    id: c_uint,
    padding: u32,
    cluster: [c_uint; 3],
    rest: [u32; 13],
}

/// CUlaunchConfig.
#[repr(C)]
struct Config {
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared_bytes: c_uint,
    stream: Handle,
    attributes: *mut Attribute,
    count: c_uint,
}

/// Launches one cluster of `blocks`, of 32 threads each.
fn launch_cluster<P>(sim: &Sim, function: Handle, blocks: u32, params: &P) -> c_int {
    let mut attribute = Attribute { id: 4, padding: 0, cluster: [blocks, 1, 1], rest: [0; 13] };
    let config = Config {
        grid: [blocks, 1, 1],
        block: [32, 1, 1],
        shared_bytes: 1024,
        stream: own_stream(sim),
        attributes: &raw mut attribute,
        count: 1,
    };
    let mut pointers = [std::ptr::from_ref(params).cast_mut().cast::<c_void>()];
    let launched = call!(sim.cuda, b"cuLaunchKernelEx"(
        &raw const config => *const Config, function => Handle,
        pointers.as_mut_ptr() => *mut *mut c_void, null_mut() => *mut *mut c_void));
    finished(sim, launched)
}

/// Every block has the number of the one before it, by st.async.
const NEIGHBOURS: &str = "
struct P { int* to; };
KERNEL(32, 1, neighbours)(KERNEL_PARAMS(P) p) {
  u8* shared = ptx::dynamic_shared();
  const u32 at = ptx::shared_address(shared), barrier = at + 256;
  if (threadIdx.x == 0) {
    ptx::barrier_init(barrier, 1);
    ptx::barrier_init_fence();
    ptx::barrier_arrive_expect(barrier, 8 * 32);
  }
  ptx::cluster_barrier();
  const u32 next = (ptx::cluster_rank() + 1) % gridDim.x;
  const ptx::Raw<8> mine = {{100 * blockIdx.x + threadIdx.x, threadIdx.x}};
  ptx::store_shared_cluster(ptx::cluster_address(at + 8 * threadIdx.x, next), mine,
                            ptx::cluster_address(barrier, next));
  if (WAIT) ptx::barrier_wait(barrier, 0);
  p.to[blockIdx.x * 32 + threadIdx.x] = ((const int*)shared)[2 * threadIdx.x];
  ptx::cluster_barrier();
}";

#[test]
fn stores_to_another_block_come_when_its_barrier_says_so() {
    let Some(sim) = sim() else { return };
    let want: Vec<i32> = (0..4).flat_map(|b| (0..32).map(move |t| (b + 3) % 4 * 100 + t)).collect();
    let run = |wait| {
        let neighbours = kernel(sim, NEIGHBOURS, &[wait], "neighbours", 1024);
        let once = |_| {
            let to = upload(sim, &[0i32; 128]);
            let code = launch_cluster(sim, neighbours, 4, &Out { to });
            (code, download::<i32>(sim, to, 128))
        };
        (0..8).map(once).collect::<Vec<_>>()
    };
    assert!(run("WAIT=1").iter().all(|r| *r == (0, want.clone())));
    assert!(run("WAIT=0").iter().all(|r| *r != (0, want.clone())));
}

fn runs(body: &str) -> Option<c_int> {
    let sim = sim()?;
    let source = format!(
        "struct P {{ int* to; }};\nKERNEL(32, 1, some)(KERNEL_PARAMS(P) p) {{\n{body}\n\
         p.to[threadIdx.x] = 1;\n}}"
    );
    let some = kernel(sim, &source, &[], "some", 1024);
    let to = upload(sim, &[0i32; 32]);
    Some(launch_cluster(sim, some, 2, &Out { to }))
}

#[test]
fn arriving_and_waiting_take_turns() {
    let Some(code) = runs("ptx::cluster_arrive();\nptx::cluster_wait();") else { return };
    assert_eq!(code, 0);
    for body in [
        "ptx::cluster_wait();",
        "ptx::cluster_arrive();\nptx::cluster_arrive();",
        "ptx::cluster_barrier();\nptx::cluster_wait();",
    ] {
        assert_eq!(runs(body), Some(719), "{body}");
    }
}

/// A thread that has arrived and ended is not one of those that are waited for, nor one of those that came.
#[test]
fn who_has_ended_does_not_count() {
    let Some(sim) = sim() else { return };
    let source = "
struct P { int* to; };
KERNEL(32, 1, half)(KERNEL_PARAMS(P) p) {
  int* shared = (int*)ptx::dynamic_shared();
  if (threadIdx.x >= 16) {
    ptx::cluster_arrive();
    return;
  }
  shared[threadIdx.x] = threadIdx.x;
  ptx::cluster_barrier();
  p.to[blockIdx.x * 16 + threadIdx.x] = shared[15 - threadIdx.x];
}";
    let half = kernel(sim, source, &[], "half", 1024);
    let want: Vec<i32> = (0..32).map(|i| 15 - i % 16).collect();
    for _ in 0..8 {
        let to = upload(sim, &[0i32; 32]);
        assert_eq!(launch_cluster(sim, half, 2, &Out { to }), 0);
        assert_eq!(download::<i32>(sim, to, 32), want);
    }
}
