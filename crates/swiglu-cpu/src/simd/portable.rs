//! Plain Rust over arrays: no intrinsics, vectorised by the compiler for the build's baseline.

use std::array::from_fn;

use half::{bf16, f16};
use swiglu_core::F32Lanes;
use swiglu_core::gate::GatedMath;

use super::{Fetch, Math, MathKernel, Simd};

const LANES: usize = 8;
type Array = [f32; LANES];
type Words = [u32; LANES];

/// Eight `f32` lanes.
#[derive(Clone, Copy)]
pub(crate) struct F32x8(Array);

/// Whether a multiply-add is one instruction in this build; elsewhere `f32::mul_add` is a library
/// call per lane.
const HAS_FMA: bool = cfg!(any(
    target_arch = "aarch64",
    all(target_arch = "x86_64", target_feature = "fma"),
    all(target_arch = "riscv64", target_feature = "f")
));

/// a·b + c with one rounding, from float64 operations alone, so that it vectorises: the product is
/// exact, the sum is rounded to odd (its last bit keeps whether anything was lost), and 53 bits are
/// enough for the final rounding to be the only one (Boldo and Melquiond, 2008).
///
/// A function of its own, as it is long.
#[inline(never)]
fn fused(a: &Array, b: &Array, c: &Array) -> Array {
    from_fn(|i| {
        let p = f64::from(a[i]) * f64::from(b[i]);
        let c = f64::from(c[i]);
        let s = p + c;
        let back = s - p;
        let lost = (p - (s - back)) + (c - back);
        let toward = if lost > 0.0 { 1i64 } else { 0 } - if lost < 0.0 { 1i64 } else { 0 };
        let step = if s < 0.0 { -toward } else { toward };
        let even = s.to_bits() & 1 == 0;
        let adjusted = s.to_bits().wrapping_add_signed(if even { step } else { 0 });
        f64::from_bits(adjusted) as f32
    })
}

#[inline(always)]
fn map2(a: F32x8, b: F32x8, f: impl Fn(f32, f32) -> f32) -> F32x8 {
    F32x8(from_fn(|i| f(a.0[i], b.0[i])))
}

impl F32Lanes for F32x8 {
    #[inline(always)]
    fn splat(x: f32) -> Self {
        Self([x; LANES])
    }
    #[inline(always)]
    fn add(self, b: Self) -> Self {
        map2(self, b, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, b: Self) -> Self {
        map2(self, b, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, b: Self) -> Self {
        map2(self, b, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, b: Self) -> Self {
        map2(self, b, |a, b| a / b)
    }
    #[inline(always)]
    fn mul_add(self, b: Self, c: Self) -> Self {
        if HAS_FMA {
            Self(from_fn(|i| self.0[i].mul_add(b.0[i], c.0[i])))
        } else {
            Self(fused(&self.0, &b.0, &c.0))
        }
    }
    #[inline(always)]
    fn neg_mul_add(self, b: Self, c: Self) -> Self {
        self.neg().mul_add(b, c)
    }
    #[inline(always)]
    fn max(self, b: Self) -> Self {
        map2(self, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn min(self, b: Self) -> Self {
        map2(self, b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn abs(self) -> Self {
        Self(self.0.map(f32::abs))
    }
    #[inline(always)]
    fn neg(self) -> Self {
        Self(self.0.map(|x| -x))
    }
    #[inline(always)]
    fn select_positive(self, yes: Self, no: Self) -> Self {
        Self(from_fn(|i| if self.0[i].is_sign_positive() { yes.0[i] } else { no.0[i] }))
    }
    #[inline(always)]
    fn scale_by_power_of_two(self, n: Self) -> Self {
        map2(self, n, f32::scale_by_power_of_two)
    }
    #[inline(always)]
    fn add_exponent(self, n: Self) -> Self {
        map2(self, n, f32::add_exponent)
    }
    // Functions of their own, as `fused`: mathematics that round each step have many.
    #[inline(never)]
    fn round_to_bf16(self) -> Self {
        Self(self.0.map(F32Lanes::round_to_bf16))
    }
    #[inline(never)]
    fn round_to_f16(self) -> Self {
        Self(self.0.map(F32Lanes::round_to_f16))
    }
}

#[inline(always)]
fn halves(v: F32x8) -> (F32x8, F32x8) {
    let lower = v.0.map(|x| f32::from_bits(x.to_bits() << 16));
    let upper = v.0.map(|x| f32::from_bits(x.to_bits() & 0xFFFF_0000));
    (F32x8(lower), F32x8(upper))
}

/// The lower and the upper half, as signed integers.
#[inline(always)]
fn halves_of(w: u32) -> [i16; 2] {
    [w as u16, (w >> 16) as u16].map(u16::cast_signed)
}

#[inline(always)]
fn join_halves(h: [i16; 2]) -> u32 {
    let [lower, upper] = h.map(|h| u32::from(h.cast_unsigned()));
    lower | upper << 16
}

/// The mathematics of an activation, called vector by vector.
trait Called {
    fn gated(&self, gate: F32x8, up: F32x8) -> F32x8;
    fn backward(&self, gate: F32x8, up: F32x8, dh: F32x8) -> [F32x8; 2];
}

impl<M: GatedMath> Called for M {
    fn gated(&self, gate: F32x8, up: F32x8) -> F32x8 {
        self.apply(gate, up)
    }
    fn backward(&self, gate: F32x8, up: F32x8, dh: F32x8) -> [F32x8; 2] {
        GatedMath::backward(*self, gate, up, dh)
    }
}

impl Math<Portable> for &dyn Called {
    #[inline(always)]
    fn gated(self, gate: F32x8, up: F32x8) -> F32x8 {
        Called::gated(self, gate, up)
    }
    #[inline(always)]
    fn backward(self, gate: F32x8, up: F32x8, dh: F32x8) -> [F32x8; 2] {
        Called::backward(self, gate, up, dh)
    }
}

/// One function, which would otherwise be a part of each place that knows its mathematics.
///
/// # Safety
/// As [`MathKernel::run`].
#[inline(never)]
unsafe fn run_called<K: MathKernel>(kernel: &K, math: &dyn Called) {
    // SAFETY: the caller's.
    unsafe { kernel.run::<Portable, &dyn Called>(math) }
}

/// Plain Rust.
#[derive(Clone, Copy)]
pub(crate) struct Portable;

// SAFETY of every block below: the callers' pointers are valid for LANES elements.
macro_rules! lanes {
    ($e:expr) => {
        // SAFETY: see above.
        unsafe { $e }
    };
}

impl Simd for Portable {
    type V = F32x8;
    type I = Words;
    const LANES: usize = LANES;
    const ROWS: usize = 4;
    const DOT_ROWS: usize = 1;
    const WRITTEN_OUT: bool = false;

    // Here mathematics are long: they are called, so that one kernel has them all.
    unsafe fn run_math<K: MathKernel, M: GatedMath>(kernel: &K, math: M) {
        // SAFETY: the caller's.
        unsafe { run_called(kernel, &math) }
    }

    #[inline(always)]
    unsafe fn load_f32(p: *const f32) -> F32x8 {
        F32x8(lanes!(p.cast::<Array>().read_unaligned()))
    }
    #[inline(always)]
    unsafe fn store_f32(p: *mut f32, v: F32x8) {
        lanes!(p.cast::<Array>().write_unaligned(v.0))
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> F32x8 {
        let raw = lanes!(p.cast::<[u16; LANES]>().read_unaligned());
        F32x8(raw.map(|b| f32::from_bits(u32::from(b) << 16)))
    }
    #[inline(always)]
    unsafe fn store_bf16(p: *mut u16, v: F32x8) {
        let raw = v.0.map(|x| bf16::from_f32(x).to_bits());
        lanes!(p.cast::<[u16; LANES]>().write_unaligned(raw))
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> F32x8 {
        let raw = lanes!(p.cast::<[u16; LANES]>().read_unaligned());
        F32x8(raw.map(|b| f16::from_bits(b).to_f32()))
    }
    #[inline(always)]
    unsafe fn store_f16(p: *mut u16, v: F32x8) {
        let raw = v.0.map(|x| f16::from_f32(x).to_bits());
        lanes!(p.cast::<[u16; LANES]>().write_unaligned(raw))
    }
    #[inline(always)]
    unsafe fn stream_f32(p: *mut f32, v: F32x8) {
        lanes!(Self::store_f32(p, v))
    }
    #[inline(always)]
    unsafe fn store_pair_bf16<const STREAM: bool>(p: *mut u16, [first, second]: [F32x8; 2]) {
        lanes!({
            Self::store_bf16(p, first);
            Self::store_bf16(p.add(LANES), second);
        })
    }
    #[inline(always)]
    unsafe fn stream_f16(p: *mut u16, v: F32x8) {
        lanes!(Self::store_f16(p, v))
    }
    #[inline(always)]
    fn fence() {}
    #[inline(always)]
    unsafe fn splat_bits(p: *const u32) -> F32x8 {
        F32x8([f32::from_bits(lanes!(p.read_unaligned())); LANES])
    }
    #[inline(always)]
    fn accumulate(acc: F32x8, a: F32x8, b: F32x8) -> F32x8 {
        if HAS_FMA { a.mul_add(b, acc) } else { acc.add(a.mul(b)) }
    }
    #[inline(always)]
    fn accumulate_pairs(acc: F32x8, a: F32x8, b: F32x8) -> F32x8 {
        let (a0, a1) = halves(a);
        let (b0, b1) = halves(b);
        Self::accumulate(Self::accumulate(acc, a0, b0), a1, b1)
    }
    #[inline(always)]
    fn prefetch(_: *const u8, _: Fetch) {}
    #[inline(always)]
    unsafe fn load_words(p: *const u8) -> Words {
        lanes!(p.cast::<Words>().read_unaligned()).map(u32::from_le)
    }
    #[inline(always)]
    unsafe fn store_words(p: *mut u8, v: Words) {
        lanes!(p.cast::<Words>().write_unaligned(v.map(u32::to_le)))
    }
    #[inline(always)]
    unsafe fn splat_word(p: *const u32) -> Words {
        [lanes!(u32::from_le(p.read_unaligned())); LANES]
    }
    #[inline(always)]
    fn words(w: u32) -> Words {
        [w; LANES]
    }
    #[inline(always)]
    fn and(a: Words, b: Words) -> Words {
        from_fn(|i| a[i] & b[i])
    }
    #[inline(always)]
    fn or(a: Words, b: Words) -> Words {
        from_fn(|i| a[i] | b[i])
    }
    #[inline(always)]
    fn xor(a: Words, b: Words) -> Words {
        from_fn(|i| a[i] ^ b[i])
    }
    #[inline(always)]
    fn shl(a: Words, n: u32) -> Words {
        a.map(|w| w << n)
    }
    #[inline(always)]
    fn shr(a: Words, n: u32) -> Words {
        a.map(|w| w >> n)
    }
    #[inline(always)]
    fn sar(a: Words, n: u32) -> Words {
        a.map(|w| (w.cast_signed() >> n).cast_unsigned())
    }
    #[inline(always)]
    fn add_words(a: Words, b: Words) -> Words {
        from_fn(|i| a[i].wrapping_add(b[i]))
    }
    #[inline(always)]
    fn words_to_f32(a: Words) -> F32x8 {
        F32x8(a.map(|w| w.cast_signed() as f32))
    }
    #[inline(always)]
    fn f32_to_words(v: F32x8) -> Words {
        v.0.map(|x| (x.round_ties_even() as i32).cast_unsigned())
    }
    #[inline(always)]
    fn look_up(table: &[u8; 16], at: Words) -> Words {
        let value = |w: u32, n: u32| u32::from(table[(w >> n & 15) as usize]) << n;
        from_fn(|i| [0, 8, 16, 24].iter().fold(0, |word, &n| word | value(at[i], n)))
    }
    #[inline(always)]
    fn transpose_bytes(a: Words) -> Words {
        let byte = |w: u32, p: usize| w >> (8 * p) & 0xFF;
        from_fn(|i| {
            let group = &a[i / 4 * 4..][..4];
            (0..4).fold(0, |word, f| word | byte(group[f], i % 4) << (8 * f))
        })
    }
    #[inline(always)]
    fn transpose_halves(a: Words) -> Words {
        from_fn(|i| {
            let (first, shift) = (i / 4 * 4 + i % 2, i % 4 / 2 * 16);
            a[first] >> shift & 0xFFFF | a[first + 2] >> shift << 16
        })
    }
    #[inline(always)]
    fn add_products(acc: Words, u: Words, s: Words) -> Words {
        let half = |i: usize, h: usize| {
            let [u, s] = [u[i], s[i]].map(u32::to_le_bytes);
            let product = |b: usize| i16::from(u[b]) * i16::from(s[b].cast_signed());
            halves_of(acc[i])[h] + product(2 * h) + product(2 * h + 1)
        };
        from_fn(|i| join_halves([half(i, 0), half(i, 1)]))
    }
    #[inline(always)]
    fn products(u: Words, s: Words) -> Words {
        Self::add_products([0; LANES], u, s)
    }
    #[inline(always)]
    fn add_halves(acc: Words, a: Words, b: Words) -> Words {
        from_fn(|i| {
            let ([a0, a1], [b0, b1]) =
                (halves_of(a[i]).map(i32::from), halves_of(b[i]).map(i32::from));
            acc[i].wrapping_add((a0 * b0).wrapping_add(a1 * b1).cast_unsigned())
        })
    }
    #[inline(always)]
    fn bytes_to_halves(u: Words) -> [Words; 2] {
        [0, 8].map(|n| u.map(|w| w >> n & 0x00FF_00FF))
    }
    #[inline(always)]
    fn dot<const SMALL: bool>(acc: Words, u: Words, s: Words) -> Words {
        let product = |u: u32, s: u32, n: u32| {
            let signed = (s << (24 - n)).cast_signed() >> 24;
            ((u >> n & 0xFF).cast_signed() * signed).cast_unsigned()
        };
        from_fn(|i| {
            [0, 8, 16, 24].iter().fold(acc[i], |a, &n| a.wrapping_add(product(u[i], s[i], n)))
        })
    }
}
