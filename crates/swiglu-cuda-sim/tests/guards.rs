//! Writes outside of allocations. What surrounds one is looked at whenever a kernel of the process has ended: in a program of
//! its own, so that no other test's kernel is told instead.
mod common;

use std::ffi::c_int;

use common::*;

#[test]
fn writes_outside_an_allocation_are_reported() {
    let Some(sim) = sim() else { return };
    let source = "struct P { float* to; int at; };
        KERNEL(32, 1, poke)(KERNEL_PARAMS(P) p) { if (threadIdx.x == 5) p.to[p.at] = 1.0f; }";
    #[repr(C)]
    struct P {
        to: u64,
        at: i32,
    }
    const ILLEGAL_ADDRESS: c_int = 700;
    let poke = kernel(sim, source, &[], "poke", 0);
    let mut to = 0u64;
    assert_eq!(call!(sim.cuda, b"cuMemAlloc_v2"(&mut to => *mut u64, 400 => usize)), 0);
    assert_eq!(launch(sim, poke, 1, 32, 0, &P { to, at: 99 }), 0);
    // Far outside: as it happens. Just outside: when the launch ends.
    assert_eq!(launch(sim, poke, 1, 32, 0, &P { to, at: 1 << 30 }), ILLEGAL_ADDRESS);
    assert_eq!(launch(sim, poke, 1, 32, 0, &P { to, at: 100 }), ILLEGAL_ADDRESS);
    assert_eq!(call!(sim.cuda, b"cuMemFree_v2"(to => u64)), ILLEGAL_ADDRESS);
}
