//! The linear maps of libcublasLt.
mod common;

use std::ffi::{c_int, c_void};
use std::ptr::{null, null_mut};

use common::*;
use half::f16;

type Handle = *mut c_void;

fn layout(sim: &Sim, dtype: c_int, rows: u64, columns: u64, leading: i64) -> Handle {
    let mut layout: Handle = null_mut();
    assert_eq!(
        call!(sim.lt, b"cublasLtMatrixLayoutCreate"(
        &mut layout => *mut Handle, dtype => c_int, rows => u64, columns => u64, leading => i64)),
        0
    );
    layout
}

/// Row-major y [m, n] = x [m, k] · w [n, k] (transposed) or w [k, n], plus a bias, the way row-major
/// callers ask for it: as column-major y' [n, m]. Types are those of x and w, and of y and the bias.
fn linear(
    [dtype, out]: [c_int; 2],
    x: u64,
    w: u64,
    bias: u64,
    transposed: bool,
    y: u64,
    (m, n, k): (u64, u64, u64),
) {
    let Some(sim) = sim() else { return };
    let (mut handle, mut operation, mut preference): (Handle, Handle, Handle) =
        (null_mut(), null_mut(), null_mut());
    assert_eq!(call!(sim.lt, b"cublasLtCreate"(&mut handle => *mut Handle)), 0);
    assert_eq!(
        call!(sim.lt, b"cublasLtMatmulDescCreate"(
        &mut operation => *mut Handle, 68 => c_int, 0 => c_int)),
        0
    );
    let set = |attribute: c_int, value: *const c_void, bytes: usize| {
        assert_eq!(
            call!(sim.lt, b"cublasLtMatmulDescSetAttribute"(
            operation => Handle, attribute => c_int, value => *const c_void, bytes => usize)),
            0
        );
    };
    let transpose = c_int::from(transposed);
    set(3, (&raw const transpose).cast(), 4);
    set(7, (&raw const EPILOGUE_BIAS).cast(), 4);
    set(8, (&raw const bias).cast(), 8);
    let a = if transposed {
        layout(sim, dtype, k, n, k.cast_signed())
    } else {
        layout(sim, dtype, n, k, n.cast_signed())
    };
    let (b, d) =
        (layout(sim, dtype, k, m, k.cast_signed()), layout(sim, out, n, m, n.cast_signed()));
    assert_eq!(call!(sim.lt, b"cublasLtMatmulPreferenceCreate"(&mut preference => *mut Handle)), 0);
    let (mut choice, mut count) = ([0u64; 12], 0);
    assert_eq!(
        call!(sim.lt, b"cublasLtMatmulAlgoGetHeuristic"(
        handle => Handle, operation => Handle, a => Handle, b => Handle, d => Handle, d => Handle,
        preference => Handle, 1 => c_int, choice.as_mut_ptr() => *mut u64, &mut count => *mut c_int)),
        0
    );
    assert_eq!(count, 1);
    let (one, zero) = (1f32, 0f32);
    assert_eq!(
        call!(sim.lt, b"cublasLtMatmul"(
        handle => Handle, operation => Handle, &one => *const f32, w => u64, a => Handle, x => u64,
        b => Handle, &zero => *const f32, y => u64, d => Handle, y => u64, d => Handle,
        choice.as_ptr() => *const u64, null::<c_void>() => *const c_void, 0 => usize,
        null_mut() => Handle)),
        0
    );
}
static EPILOGUE_BIAS: c_int = 4;

#[test]
fn linear_maps_with_bias() {
    let Some(sim) = sim() else { return };
    let (m, n, k) = (5, 7, 9);
    let (x, w, bias) = (numbers(m * k, 1), numbers(n * k, 2), numbers(n, 3));
    for transposed in [true, false] {
        let at = |l: usize, j: usize| if transposed { w[j * k + l] } else { w[l * n + j] };
        let mut want = product(m, n, k, |i, l| x[i * k + l], at);
        want.iter_mut().enumerate().for_each(|(e, y)| *y += bias[e % n]);
        let sizes = (m as u64, n as u64, k as u64);

        let y = upload(sim, &vec![0f32; m * n]);
        let [px, pw, pb] = [&x, &w, &bias].map(|v| upload(sim, v));
        linear([0, 0], px, pw, pb, transposed, y, sizes);
        assert_eq!(download::<f32>(sim, y, m * n), want);

        let half =
            |v: &[f32]| -> Vec<u16> { v.iter().map(|&x| f16::from_f32(x).to_bits()).collect() };
        let y = upload(sim, &vec![0u16; m * n]);
        let [px, pw, pb] = [&x, &w, &bias].map(|v| upload(sim, &half(v)));
        linear([2, 2], px, pw, pb, transposed, y, sizes);
        assert_eq!(download::<u16>(sim, y, m * n), half(&want));

        let y = upload(sim, &vec![0f32; m * n]);
        linear([2, 0], px, pw, upload(sim, &bias), transposed, y, sizes);
        assert_eq!(download::<f32>(sim, y, m * n), want);
    }
}
