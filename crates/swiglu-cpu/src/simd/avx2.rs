//! AVX2, FMA and F16C.

use std::arch::x86_64::*;

use swiglu_core::F32Lanes;

use super::{Fetch, Kernel, Simd};

/// Eight `f32` lanes.
#[derive(Clone, Copy)]
pub(crate) struct F32x8(__m256);

// SAFETY of every block in this file: values of `F32x8` exist only inside `run`, which is called
// only where the features it enables are available; pointers are the callers'.
macro_rules! lanes {
    ($e:expr) => {
        // SAFETY: see above.
        unsafe { $e }
    };
}

#[inline(always)]
fn bits(v: F32x8) -> __m256i {
    lanes!(_mm256_castps_si256(v.0))
}

#[inline(always)]
fn from_bits(v: __m256i) -> F32x8 {
    F32x8(lanes!(_mm256_castsi256_ps(v)))
}

/// 2ⁿ for integral lanes in [−126, 127].
#[inline(always)]
fn power_of_two(n: __m256i) -> F32x8 {
    from_bits(lanes!(_mm256_slli_epi32::<23>(_mm256_add_epi32(n, _mm256_set1_epi32(127)))))
}

impl F32Lanes for F32x8 {
    #[inline(always)]
    fn splat(x: f32) -> Self {
        Self(lanes!(_mm256_set1_ps(x)))
    }
    #[inline(always)]
    fn add(self, b: Self) -> Self {
        Self(lanes!(_mm256_add_ps(self.0, b.0)))
    }
    #[inline(always)]
    fn sub(self, b: Self) -> Self {
        Self(lanes!(_mm256_sub_ps(self.0, b.0)))
    }
    #[inline(always)]
    fn mul(self, b: Self) -> Self {
        Self(lanes!(_mm256_mul_ps(self.0, b.0)))
    }
    #[inline(always)]
    fn div(self, b: Self) -> Self {
        Self(lanes!(_mm256_div_ps(self.0, b.0)))
    }
    #[inline(always)]
    fn mul_add(self, b: Self, c: Self) -> Self {
        Self(lanes!(_mm256_fmadd_ps(self.0, b.0, c.0)))
    }
    #[inline(always)]
    fn neg_mul_add(self, b: Self, c: Self) -> Self {
        Self(lanes!(_mm256_fnmadd_ps(self.0, b.0, c.0)))
    }
    #[inline(always)]
    fn max(self, b: Self) -> Self {
        Self(lanes!(_mm256_max_ps(self.0, b.0)))
    }
    #[inline(always)]
    fn min(self, b: Self) -> Self {
        Self(lanes!(_mm256_min_ps(self.0, b.0)))
    }
    #[inline(always)]
    fn abs(self) -> Self {
        Self(lanes!(_mm256_andnot_ps(_mm256_set1_ps(-0.0), self.0)))
    }
    #[inline(always)]
    fn neg(self) -> Self {
        Self(lanes!(_mm256_xor_ps(self.0, _mm256_set1_ps(-0.0))))
    }
    #[inline(always)]
    fn select_positive(self, yes: Self, no: Self) -> Self {
        // The blend looks at the sign bit alone.
        Self(lanes!(_mm256_blendv_ps(yes.0, no.0, self.0)))
    }
    #[inline(always)]
    fn scale_by_power_of_two(self, n: Self) -> Self {
        // Two factors, because 2ⁿ itself may not be a normal number; the first product is exact.
        lanes!({
            let n = _mm256_cvtps_epi32(n.0);
            let half = _mm256_srai_epi32::<1>(n);
            let rest = _mm256_sub_epi32(n, half);
            self.mul(power_of_two(half)).mul(power_of_two(rest))
        })
    }
    #[inline(always)]
    fn add_exponent(self, n: Self) -> Self {
        from_bits(lanes!({
            let n = _mm256_slli_epi32::<23>(_mm256_cvtps_epi32(n.0));
            _mm256_add_epi32(bits(self), n)
        }))
    }
    #[inline(always)]
    fn round_even(self) -> Self {
        Self(lanes!(_mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self.0)))
    }
    #[inline(always)]
    fn round_to_bf16(self) -> Self {
        // As in AVX-512: half a unit up, ties to even, NaN kept and quieted.
        lanes!({
            let b = bits(self);
            let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(b), _mm256_set1_epi32(1));
            let up = _mm256_add_epi32(_mm256_add_epi32(b, _mm256_set1_epi32(0x7FFF)), odd);
            let quiet = _mm256_or_si256(b, _mm256_set1_epi32(0x0040_0000));
            let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(self.0, self.0));
            let up = _mm256_blendv_epi8(up, quiet, nan);
            from_bits(_mm256_and_si256(up, _mm256_set1_epi32(0xFFFF_0000_u32.cast_signed())))
        })
    }
    #[inline(always)]
    fn round_to_f16(self) -> Self {
        lanes!(Self(_mm256_cvtph_ps(_mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0))))
    }
}

#[inline(always)]
fn upper_halves(v: F32x8) -> __m128i {
    lanes!({
        let upper = _mm256_srli_epi32::<16>(bits(v));
        _mm_packus_epi32(_mm256_castsi256_si128(upper), _mm256_extracti128_si256::<1>(upper))
    })
}

/// The lower and the upper bfloat16 of every lane, widened.
#[inline(always)]
fn halves(v: F32x8) -> (F32x8, F32x8) {
    lanes!({
        let lower = _mm256_slli_epi32::<16>(bits(v));
        let mask = _mm256_set1_epi32(0xFFFF_0000_u32.cast_signed());
        (from_bits(lower), from_bits(_mm256_and_si256(bits(v), mask)))
    })
}

/// AVX2, FMA and F16C.
#[derive(Clone, Copy)]
pub(crate) struct Avx2;

impl Simd for Avx2 {
    type V = F32x8;
    type I = __m256i;
    const LANES: usize = 8;
    const ROWS: usize = 6;
    // Eight sums, the halves of two weights and of x, and a mask.
    const PAIR_ROWS: usize = 4;
    const DOT_ROWS: usize = 2;

    #[inline(always)]
    unsafe fn load_f32(p: *const f32) -> F32x8 {
        lanes!(F32x8(_mm256_loadu_ps(p)))
    }
    #[inline(always)]
    unsafe fn store_f32(p: *mut f32, v: F32x8) {
        lanes!(_mm256_storeu_ps(p, v.0))
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> F32x8 {
        lanes!({
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
            from_bits(_mm256_slli_epi32::<16>(wide))
        })
    }
    #[inline(always)]
    unsafe fn store_bf16(p: *mut u16, v: F32x8) {
        lanes!(_mm_storeu_si128(p.cast(), upper_halves(v.round_to_bf16())))
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> F32x8 {
        lanes!(F32x8(_mm256_cvtph_ps(_mm_loadu_si128(p.cast()))))
    }
    #[inline(always)]
    unsafe fn store_f16(p: *mut u16, v: F32x8) {
        lanes!(_mm_storeu_si128(p.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v.0)))
    }
    #[inline(always)]
    unsafe fn stream_f32(p: *mut f32, v: F32x8) {
        lanes!(_mm256_stream_ps(p, v.0))
    }
    #[inline(always)]
    unsafe fn load_pair_bf16(p: *const u16) -> [F32x8; 2] {
        // Even and odd elements: one operation each, where widening neighbours takes two.
        let (even, odd) = halves(lanes!(F32x8(_mm256_loadu_ps(p.cast()))));
        [even, odd]
    }
    #[inline(always)]
    unsafe fn store_pair_bf16<const STREAM: bool>(p: *mut u16, [even, odd]: [F32x8; 2]) {
        lanes!({
            let lower = _mm256_srli_epi32::<16>(bits(even.round_to_bf16()));
            let joined = _mm256_or_si256(lower, bits(odd.round_to_bf16()));
            if STREAM {
                _mm256_stream_si256(p.cast(), joined)
            } else {
                _mm256_storeu_si256(p.cast(), joined)
            }
        })
    }
    #[inline(always)]
    unsafe fn stream_f16(p: *mut u16, v: F32x8) {
        lanes!(_mm_stream_si128(p.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v.0)))
    }
    #[inline(always)]
    fn fence() {
        lanes!(_mm_sfence())
    }
    #[inline(always)]
    unsafe fn splat_bits(p: *const u32) -> F32x8 {
        lanes!(F32x8(_mm256_set1_ps(p.cast::<f32>().read_unaligned())))
    }
    #[inline(always)]
    fn accumulate(acc: F32x8, a: F32x8, b: F32x8) -> F32x8 {
        a.mul_add(b, acc)
    }
    #[inline(always)]
    fn accumulate_pairs(acc: F32x8, a: F32x8, b: F32x8) -> F32x8 {
        let (a0, a1) = halves(a);
        let (b0, b1) = halves(b);
        a1.mul_add(b1, a0.mul_add(b0, acc))
    }
    #[inline(always)]
    fn prefetch(p: *const u8, fetch: Fetch) {
        lanes!(match fetch {
            // Past the other caches: where `super::learn` finds the other way better there is AVX-512.
            Fetch::Once => _mm_prefetch::<_MM_HINT_NTA>(p.cast()),
            Fetch::Second => _mm_prefetch::<_MM_HINT_T1>(p.cast()),
        })
    }
    #[inline(always)]
    unsafe fn load_words(p: *const u8) -> __m256i {
        lanes!(_mm256_loadu_si256(p.cast()))
    }
    #[inline(always)]
    unsafe fn store_words(p: *mut u8, v: __m256i) {
        lanes!(_mm256_storeu_si256(p.cast(), v))
    }
    #[inline(always)]
    unsafe fn splat_word(p: *const u32) -> __m256i {
        lanes!(_mm256_set1_epi32(p.cast::<i32>().read_unaligned()))
    }
    #[inline(always)]
    fn words(w: u32) -> __m256i {
        lanes!(_mm256_set1_epi32(w.cast_signed()))
    }
    #[inline(always)]
    fn and(a: __m256i, b: __m256i) -> __m256i {
        lanes!(_mm256_and_si256(a, b))
    }
    #[inline(always)]
    fn or(a: __m256i, b: __m256i) -> __m256i {
        lanes!(_mm256_or_si256(a, b))
    }
    #[inline(always)]
    fn xor(a: __m256i, b: __m256i) -> __m256i {
        lanes!(_mm256_xor_si256(a, b))
    }
    #[inline(always)]
    fn shl(a: __m256i, n: u32) -> __m256i {
        lanes!(_mm256_sllv_epi32(a, Self::words(n)))
    }
    #[inline(always)]
    fn shr(a: __m256i, n: u32) -> __m256i {
        lanes!(_mm256_srlv_epi32(a, Self::words(n)))
    }
    #[inline(always)]
    fn sar(a: __m256i, n: u32) -> __m256i {
        lanes!(_mm256_srav_epi32(a, Self::words(n)))
    }
    #[inline(always)]
    fn add_words(a: __m256i, b: __m256i) -> __m256i {
        lanes!(_mm256_add_epi32(a, b))
    }
    #[inline(always)]
    fn words_to_f32(a: __m256i) -> F32x8 {
        lanes!(F32x8(_mm256_cvtepi32_ps(a)))
    }
    #[inline(always)]
    fn f32_to_words(v: F32x8) -> __m256i {
        lanes!(_mm256_cvtps_epi32(v.0))
    }
    #[inline(always)]
    fn look_up(table: &[u8; 16], at: __m256i) -> __m256i {
        lanes!({
            let table = _mm_loadu_si128(table.as_ptr().cast());
            _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), at)
        })
    }
    #[inline(always)]
    fn transpose_bytes(a: __m256i) -> __m256i {
        lanes!({
            let order = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
            _mm256_shuffle_epi8(a, _mm256_broadcastsi128_si256(order))
        })
    }
    #[inline(always)]
    fn add_products(acc: __m256i, u: __m256i, s: __m256i) -> __m256i {
        lanes!(add_shorts(acc, _mm256_maddubs_epi16(u, s)))
    }
    #[inline(always)]
    fn products(u: __m256i, s: __m256i) -> __m256i {
        lanes!(_mm256_maddubs_epi16(u, s))
    }
    #[inline(always)]
    fn add_halves(acc: __m256i, a: __m256i, b: __m256i) -> __m256i {
        lanes!(_mm256_add_epi32(acc, _mm256_madd_epi16(a, b)))
    }
    #[inline(always)]
    fn bytes_to_halves(u: __m256i) -> [__m256i; 2] {
        lanes!([_mm256_and_si256(u, _mm256_set1_epi16(0xFF)), _mm256_srli_epi16::<8>(u)])
    }
    #[inline(always)]
    fn transpose_halves(a: __m256i) -> __m256i {
        lanes!({
            let order = _mm_setr_epi8(0, 1, 8, 9, 4, 5, 12, 13, 2, 3, 10, 11, 6, 7, 14, 15);
            _mm256_shuffle_epi8(a, _mm256_broadcastsi128_si256(order))
        })
    }
    #[inline(always)]
    fn dot<const SMALL: bool>(acc: __m256i, u: __m256i, s: __m256i) -> __m256i {
        lanes!(if SMALL {
            // Sums of two products stay within 16 bits.
            let pairs = _mm256_maddubs_epi16(u, s);
            _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
        } else {
            let even = _mm256_madd_epi16(
                _mm256_and_si256(u, _mm256_set1_epi16(0xFF)),
                _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(s)),
            );
            let odd = _mm256_madd_epi16(_mm256_srli_epi16::<8>(u), _mm256_srai_epi16::<8>(s));
            _mm256_add_epi32(acc, _mm256_add_epi32(even, odd))
        })
    }
}

/// Sums of 16 bits, as an instruction that the compiler does not look into: it rearranges chains of additions into
/// trees whose parts do not fit the registers. On a Zen 3 quantised weights took 1.03 times as long so with one token,
/// with four 1.1 to 1.2 times in Q4_K.
#[inline]
#[target_feature(enable = "avx2")]
fn add_shorts(a: __m256i, b: __m256i) -> __m256i {
    let sum;
    // SAFETY: reads and writes registers only.
    unsafe {
        std::arch::asm!(
            "vpaddw {sum}, {a}, {b}",
            sum = lateout(ymm_reg) sum,
            a = in(ymm_reg) a,
            b = in(ymm_reg) b,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sum
}

/// # Safety
/// The named features are available; see [`Kernel::run`].
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn run<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: the caller's.
    unsafe { kernel.run::<Avx2>() }
}
