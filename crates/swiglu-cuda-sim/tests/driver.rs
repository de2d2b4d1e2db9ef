//! The driver and the compiler: images, launches, memory, streams, graphs.
mod common;

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;

use common::*;

const ADD: &str = "
struct AddParams { const float* a; const float* b; float* sum; int n; };
KERNEL(128, 1, add)(KERNEL_PARAMS(AddParams) p) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < p.n) p.sum[i] = __fadd_rn(p.a[i], p.b[i]);
}";

#[repr(C)]
struct AddParams {
    a: u64,
    b: u64,
    sum: u64,
    n: i32,
}

type Handle = *mut c_void;

#[test]
fn adds_vectors() {
    let Some(sim) = sim() else { return };
    let (a, b) = (numbers(1000, 1), numbers(1000, 2));
    let add = kernel(sim, ADD, &[], "add", 0);
    let sum = upload(sim, &[0f32; 1000]);
    let params = AddParams { a: upload(sim, &a), b: upload(sim, &b), sum, n: 1000 };
    assert_eq!(launch(sim, add, 8, 128, 0, &params), 0);
    let want: Vec<_> = a.iter().zip(&b).map(|(a, b)| a + b).collect();
    assert_eq!(download::<f32>(sim, sum, 1000), want);
}

#[test]
fn refuses_what_a_driver_refuses() {
    let Some(sim) = sim() else { return };
    let add = kernel(sim, ADD, &[], "add", 1024);
    let params = AddParams { a: 0, b: 0, sum: 0, n: 0 };
    const INVALID_VALUE: c_int = 1;
    assert_eq!(launch(sim, add, 1, 128, 1024, &params), 0);
    // More shared memory than was opted in to, more threads than the launch bounds, no blocks.
    assert_eq!(launch(sim, add, 1, 128, 1025, &params), INVALID_VALUE);
    assert_eq!(launch(sim, add, 1, 256, 0, &params), INVALID_VALUE);
    assert_eq!(launch(sim, add, 0, 128, 0, &params), INVALID_VALUE);
    // A copy past the end of an allocation.
    let buffer = upload(sim, &[0u8; 100]);
    let mut host = [0u8; 101];
    assert_eq!(
        call!(sim.cuda, b"cuMemcpyDtoH_v2"(
        host.as_mut_ptr() => *mut u8, buffer => u64, 101 => usize)),
        INVALID_VALUE
    );
    // Another architecture; a damaged image.
    let mut module: Handle = null_mut();
    let other = compile(sim, ADD, "sm_80", &[]).unwrap();
    assert_eq!(
        call!(sim.cuda, b"cuModuleLoadData"(
        &mut module => *mut Handle, other.as_ptr() => *const u8)),
        209
    );
    let mut damaged = compile(sim, ADD, "sm_90a", &[]).unwrap();
    let middle = damaged.len() / 2;
    damaged[middle] ^= 1;
    assert_eq!(
        call!(sim.cuda, b"cuModuleLoadData"(
        &mut module => *mut Handle, damaged.as_ptr() => *const u8)),
        200
    );
}

#[test]
fn compiler_errors_have_a_log() {
    let Some(sim) = sim() else { return };
    let log = compile(sim, "this is not device code", "sm_90a", &[]).unwrap_err();
    assert!(log.starts_with("6:") && log.contains("error"), "{log}");
    let log = compile(sim, ADD, "sm_33", &[]).unwrap_err();
    assert!(log.starts_with("5:") && log.contains("sm_33"), "{log}");
    // What sm_80 lacks does not compile for it.
    let wait =
        "struct P { int x; }; KERNEL(32, 1, f)(KERNEL_PARAMS(P) p) { ptx::barrier_wait(0, 0); }";
    assert!(compile(sim, wait, "sm_80", &[]).unwrap_err().contains("barrier_wait"));
}

#[test]
fn captured_work_runs_when_the_graph_is_launched() {
    let Some(sim) = sim() else { return };
    let add = kernel(sim, ADD, &[], "add", 0);
    let (a, sum) = (upload(sim, &[1f32; 64]), upload(sim, &[0f32; 64]));
    let stream = stream(sim);
    let params = AddParams { a, b: sum, sum, n: 64 };
    assert_eq!(call!(sim.cuda, b"cuStreamBeginCapture_v2"(stream => Handle, 1 => c_int)), 0);
    assert_eq!(launch_on(sim, stream, add, 1, 128, 0, &params), 0);
    assert_eq!(launch_on(sim, stream, add, 1, 128, 0, &params), 0);
    let (mut graph, mut executable): (Handle, Handle) = (null_mut(), null_mut());
    assert_eq!(
        call!(sim.cuda, b"cuStreamEndCapture"(stream => Handle, &mut graph => *mut Handle)),
        0
    );
    assert_eq!(download::<f32>(sim, sum, 64), vec![0.0; 64]);
    assert_eq!(
        call!(sim.cuda, b"cuGraphInstantiateWithFlags"(
        &mut executable => *mut Handle, graph => Handle, 0 => u64)),
        0
    );
    for _ in 0..3 {
        assert_eq!(call!(sim.cuda, b"cuGraphLaunch"(executable => Handle, stream => Handle)), 0);
    }
    assert_eq!(call!(sim.cuda, b"cuStreamSynchronize"(stream => Handle)), 0);
    assert_eq!(download::<f32>(sim, sum, 64), vec![6.0; 64]);

    // A call that waits is refused and spoils the capture.
    assert_eq!(call!(sim.cuda, b"cuStreamBeginCapture_v2"(stream => Handle, 1 => c_int)), 0);
    assert_eq!(call!(sim.cuda, b"cuStreamSynchronize"(stream => Handle)), 900);
    assert_eq!(launch_on(sim, stream, add, 1, 128, 0, &params), 901);
    assert_eq!(
        call!(sim.cuda, b"cuStreamEndCapture"(stream => Handle, &mut graph => *mut Handle)),
        901
    );
}
