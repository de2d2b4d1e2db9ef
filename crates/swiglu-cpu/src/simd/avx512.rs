//! AVX-512 F, BW, DQ and VL, with and without the dot products of bfloat16 and of bytes.

use std::arch::x86_64::*;

use swiglu_core::F32Lanes;

use super::{Bytes, Fetch, INTEGER_UNIT, Kernel, Simd};

/// Sixteen `f32` lanes.
#[derive(Clone, Copy)]
pub(crate) struct F32x16(__m512);

// SAFETY of every block in this file: values of `F32x16` exist only inside `run` and `run_bf16`,
// which are called only where the features they enable are available; pointers are the callers'.
macro_rules! lanes {
    ($e:expr) => {
        // SAFETY: see above.
        unsafe { $e }
    };
}

impl F32Lanes for F32x16 {
    #[inline(always)]
    fn splat(x: f32) -> Self {
        Self(lanes!(_mm512_set1_ps(x)))
    }
    #[inline(always)]
    fn add(self, b: Self) -> Self {
        Self(lanes!(_mm512_add_ps(self.0, b.0)))
    }
    #[inline(always)]
    fn sub(self, b: Self) -> Self {
        Self(lanes!(_mm512_sub_ps(self.0, b.0)))
    }
    #[inline(always)]
    fn mul(self, b: Self) -> Self {
        Self(lanes!(_mm512_mul_ps(self.0, b.0)))
    }
    #[inline(always)]
    fn div(self, b: Self) -> Self {
        Self(lanes!(_mm512_div_ps(self.0, b.0)))
    }
    #[inline(always)]
    fn mul_add(self, b: Self, c: Self) -> Self {
        Self(lanes!(_mm512_fmadd_ps(self.0, b.0, c.0)))
    }
    #[inline(always)]
    fn neg_mul_add(self, b: Self, c: Self) -> Self {
        Self(lanes!(_mm512_fnmadd_ps(self.0, b.0, c.0)))
    }
    #[inline(always)]
    fn max(self, b: Self) -> Self {
        Self(lanes!(_mm512_max_ps(self.0, b.0)))
    }
    #[inline(always)]
    fn min(self, b: Self) -> Self {
        Self(lanes!(_mm512_min_ps(self.0, b.0)))
    }
    #[inline(always)]
    fn abs(self) -> Self {
        Self(lanes!(_mm512_abs_ps(self.0)))
    }
    #[inline(always)]
    fn neg(self) -> Self {
        Self(lanes!(_mm512_xor_ps(self.0, _mm512_set1_ps(-0.0))))
    }
    #[inline(always)]
    fn select_positive(self, yes: Self, no: Self) -> Self {
        Self(lanes!(_mm512_mask_blend_ps(_mm512_movepi32_mask(bits(self)), yes.0, no.0)))
    }
    #[inline(always)]
    fn scale_by_power_of_two(self, n: Self) -> Self {
        Self(lanes!(_mm512_scalef_ps(self.0, n.0)))
    }
    #[inline(always)]
    fn add_exponent(self, n: Self) -> Self {
        self.scale_by_power_of_two(n)
    }
    #[inline(always)]
    fn round_even(self) -> Self {
        Self(lanes!(_mm512_roundscale_ps::<0>(self.0)))
    }
    #[inline(always)]
    fn round_to_bf16(self) -> Self {
        // Adding half a unit (less one where the kept part is even) rounds to nearest even; the
        // dedicated conversion would flush subnormals.
        lanes!({
            let b = bits(self);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(b), _mm512_set1_epi32(1));
            let up = _mm512_add_epi32(_mm512_add_epi32(b, _mm512_set1_epi32(0x7FFF)), odd);
            // A NaN must not be carried into infinity: keep it, quiet.
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(self.0, self.0);
            let up = _mm512_mask_or_epi32(up, nan, b, _mm512_set1_epi32(0x0040_0000));
            Self(_mm512_castsi512_ps(_mm512_and_si512(
                up,
                _mm512_set1_epi32(0xFFFF_0000_u32.cast_signed()),
            )))
        })
    }
    #[inline(always)]
    fn round_to_f16(self) -> Self {
        lanes!(Self(_mm512_cvtph_ps(_mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0))))
    }
}

#[inline(always)]
fn bits(v: F32x16) -> __m512i {
    lanes!(_mm512_castps_si512(v.0))
}

#[inline(always)]
fn upper_halves(v: F32x16) -> __m256i {
    lanes!(_mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(bits(v))))
}

/// Everything but the dot products.
macro_rules! common {
    () => {
        type V = F32x16;
        type I = __m512i;
        const LANES: usize = 16;
        const ROWS: usize = 12;

        #[inline(always)]
        unsafe fn load_f32(p: *const f32) -> F32x16 {
            lanes!(F32x16(_mm512_loadu_ps(p)))
        }
        #[inline(always)]
        unsafe fn store_f32(p: *mut f32, v: F32x16) {
            lanes!(_mm512_storeu_ps(p, v.0))
        }
        #[inline(always)]
        unsafe fn load_bf16(p: *const u16) -> F32x16 {
            lanes!({
                let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
                F32x16(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide)))
            })
        }
        #[inline(always)]
        unsafe fn store_bf16(p: *mut u16, v: F32x16) {
            lanes!(_mm256_storeu_si256(p.cast(), upper_halves(v.round_to_bf16())))
        }
        #[inline(always)]
        unsafe fn load_f16(p: *const u16) -> F32x16 {
            lanes!(F32x16(_mm512_cvtph_ps(_mm256_loadu_si256(p.cast()))))
        }
        #[inline(always)]
        unsafe fn store_f16(p: *mut u16, v: F32x16) {
            lanes!(_mm256_storeu_si256(p.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v.0)))
        }
        #[inline(always)]
        unsafe fn stream_f32(p: *mut f32, v: F32x16) {
            lanes!(_mm512_stream_ps(p, v.0))
        }
        #[inline(always)]
        unsafe fn load_pair_bf16(p: *const u16) -> [F32x16; 2] {
            // Even and odd elements: one operation each, where widening neighbours takes two.
            let (even, odd) = halves(lanes!(F32x16(_mm512_loadu_ps(p.cast()))));
            [even, odd]
        }
        #[inline(always)]
        unsafe fn stream_f16(p: *mut u16, v: F32x16) {
            lanes!(_mm256_stream_si256(p.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v.0)))
        }
        #[inline(always)]
        fn fence() {
            lanes!(_mm_sfence())
        }
        #[inline(always)]
        unsafe fn splat_bits(p: *const u32) -> F32x16 {
            lanes!(F32x16(_mm512_set1_ps(p.cast::<f32>().read_unaligned())))
        }
        #[inline(always)]
        fn accumulate(acc: F32x16, a: F32x16, b: F32x16) -> F32x16 {
            a.mul_add(b, acc)
        }
        #[inline(always)]
        fn prefetch(p: *const u8, fetch: Fetch) {
            lanes!(match fetch {
                Fetch::Once => super::prefetch_once(p),
                Fetch::Second => _mm_prefetch::<_MM_HINT_T1>(p.cast()),
            })
        }
        #[inline(always)]
        fn prefetch_lines(p: *const u8, lines: usize) {
            super::prefetch_lines_once(p, lines);
        }
        #[inline(always)]
        unsafe fn load_words(p: *const u8) -> __m512i {
            lanes!(_mm512_loadu_si512(p.cast()))
        }
        #[inline(always)]
        unsafe fn store_words(p: *mut u8, v: __m512i) {
            lanes!(_mm512_storeu_si512(p.cast(), v))
        }
        #[inline(always)]
        unsafe fn splat_word(p: *const u32) -> __m512i {
            lanes!(_mm512_set1_epi32(p.cast::<i32>().read_unaligned()))
        }
        #[inline(always)]
        fn words(w: u32) -> __m512i {
            lanes!(_mm512_set1_epi32(w.cast_signed()))
        }
        #[inline(always)]
        fn and(a: __m512i, b: __m512i) -> __m512i {
            lanes!(_mm512_and_si512(a, b))
        }
        #[inline(always)]
        fn or(a: __m512i, b: __m512i) -> __m512i {
            lanes!(_mm512_or_si512(a, b))
        }
        #[inline(always)]
        fn xor(a: __m512i, b: __m512i) -> __m512i {
            lanes!(_mm512_xor_si512(a, b))
        }
        #[inline(always)]
        fn shl(a: __m512i, n: u32) -> __m512i {
            lanes!(_mm512_sllv_epi32(a, Self::words(n)))
        }
        #[inline(always)]
        fn shr(a: __m512i, n: u32) -> __m512i {
            lanes!(_mm512_srlv_epi32(a, Self::words(n)))
        }
        #[inline(always)]
        fn sar(a: __m512i, n: u32) -> __m512i {
            lanes!(_mm512_srav_epi32(a, Self::words(n)))
        }
        #[inline(always)]
        fn add_words(a: __m512i, b: __m512i) -> __m512i {
            lanes!(_mm512_add_epi32(a, b))
        }
        #[inline(always)]
        fn words_to_f32(a: __m512i) -> F32x16 {
            lanes!(F32x16(_mm512_cvtepi32_ps(a)))
        }
        #[inline(always)]
        fn f32_to_words(v: F32x16) -> __m512i {
            lanes!(_mm512_cvtps_epi32(v.0))
        }
        #[inline(always)]
        fn look_up(table: &[u8; 16], at: __m512i) -> __m512i {
            lanes!({
                let table = _mm_loadu_si128(table.as_ptr().cast());
                _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), at)
            })
        }
        #[inline(always)]
        fn transpose_bytes(a: __m512i) -> __m512i {
            lanes!({
                let order = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
                _mm512_shuffle_epi8(a, _mm512_broadcast_i32x4(order))
            })
        }
        #[inline(always)]
        fn add_products(acc: __m512i, u: __m512i, s: __m512i) -> __m512i {
            lanes!(_mm512_add_epi16(acc, _mm512_maddubs_epi16(u, s)))
        }
        #[inline(always)]
        fn products(u: __m512i, s: __m512i) -> __m512i {
            lanes!(_mm512_maddubs_epi16(u, s))
        }
        #[inline(always)]
        fn add_halves(acc: __m512i, a: __m512i, b: __m512i) -> __m512i {
            lanes!(_mm512_add_epi32(acc, _mm512_madd_epi16(a, b)))
        }
        #[inline(always)]
        fn bytes_to_halves(u: __m512i) -> [__m512i; 2] {
            lanes!([_mm512_and_si512(u, _mm512_set1_epi16(0xFF)), _mm512_srli_epi16::<8>(u)])
        }
        #[inline(always)]
        fn transpose_halves(a: __m512i) -> __m512i {
            lanes!({
                let order = _mm_setr_epi8(0, 1, 8, 9, 4, 5, 12, 13, 2, 3, 10, 11, 6, 7, 14, 15);
                _mm512_shuffle_epi8(a, _mm512_broadcast_i32x4(order))
            })
        }
    };
}

/// Without the dot products.
#[derive(Clone, Copy)]
pub(crate) struct Avx512;

impl Simd for Avx512 {
    common!();
    const DOT_ROWS: usize = 1;

    #[inline(always)]
    unsafe fn store_pair_bf16<const STREAM: bool>(p: *mut u16, v: [F32x16; 2]) {
        lanes!(if STREAM {
            _mm512_stream_si512(p.cast(), join_bf16(v))
        } else {
            _mm512_storeu_si512(p.cast(), join_bf16(v))
        })
    }

    #[inline(always)]
    fn accumulate_pairs(acc: F32x16, a: F32x16, b: F32x16) -> F32x16 {
        let (a0, a1) = halves(a);
        let (b0, b1) = halves(b);
        a1.mul_add(b1, a0.mul_add(b0, acc))
    }

    #[inline(always)]
    fn dot<const SMALL: bool>(acc: __m512i, u: __m512i, s: __m512i) -> __m512i {
        lanes!(if SMALL {
            // Sums of two products stay within 16 bits.
            let pairs = _mm512_maddubs_epi16(u, s);
            _mm512_add_epi32(acc, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))
        } else {
            let even = _mm512_madd_epi16(
                _mm512_and_si512(u, _mm512_set1_epi16(0xFF)),
                _mm512_srai_epi16::<8>(_mm512_slli_epi16::<8>(s)),
            );
            let odd = _mm512_madd_epi16(_mm512_srli_epi16::<8>(u), _mm512_srai_epi16::<8>(s));
            _mm512_add_epi32(acc, _mm512_add_epi32(even, odd))
        })
    }
}

/// Rounds even and odd elements to bfloat16 and joins them.
#[inline(always)]
fn join_bf16([even, odd]: [F32x16; 2]) -> __m512i {
    lanes!({
        let lower = _mm512_srli_epi32::<16>(bits(even.round_to_bf16()));
        _mm512_or_si512(lower, bits(odd.round_to_bf16()))
    })
}

/// As [`join_bf16`] with the dedicated conversion, which flushes subnormals: it is used where there
/// are none.
#[inline(always)]
fn join_normal_bf16(v: [F32x16; 2]) -> __m512i {
    const SUBNORMAL: i32 = 0x20;
    lanes!({
        let [even, odd] = v;
        let subnormal = _mm512_fpclass_ps_mask::<SUBNORMAL>(even.0)
            | _mm512_fpclass_ps_mask::<SUBNORMAL>(odd.0);
        if subnormal != 0 {
            return join_bf16(v);
        }
        // Evens in the lower half, odds in the upper; the permutation interleaves them.
        let joined: __m512i = std::mem::transmute(_mm512_cvtne2ps_pbh(odd.0, even.0));
        let order = _mm512_set_epi16(
            31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20,
            4, 19, 3, 18, 2, 17, 1, 16, 0,
        );
        _mm512_permutexvar_epi16(order, joined)
    })
}

/// The lower and the upper bfloat16 of every lane, widened.
#[inline(always)]
fn halves(v: F32x16) -> (F32x16, F32x16) {
    lanes!({
        let lower = _mm512_slli_epi32::<16>(bits(v));
        let mask = _mm512_set1_epi32(0xFFFF_0000_u32.cast_signed());
        let upper = _mm512_and_si512(bits(v), mask);
        (F32x16(_mm512_castsi512_ps(lower)), F32x16(_mm512_castsi512_ps(upper)))
    })
}

/// The bfloat16 of integers from −`offset` on, in units of [`INTEGER_UNIT`].
const fn bf16_integers(offset: u32) -> [u16; 64] {
    let mut table = [0; 64];
    let mut i = 0;
    while i < table.len() {
        table[i] = (((i as f32 - offset as f32) * INTEGER_UNIT).to_bits() >> 16) as u16;
        i += 1;
    }
    table
}

/// [`Simd::bytes_to_bf16`] of integers too many for a table: as the low byte of a number whose last
/// bit is the unit they are that many units above it.
#[inline(always)]
fn large_bytes_to_bf16<U: Bytes>(u: __m512i) -> [__m512i; 2] {
    /// Byte 0 of every word, bytes 0 and 1 of every word.
    const LOWEST: __mmask64 = 0x1111_1111_1111_1111;
    const LOWER: __mmask64 = 0x3333_3333_3333_3333;
    const BASE: f32 = INTEGER_UNIT * (1u32 << 23) as f32;
    // Macros, because a closure of a closure is not inlined.
    macro_rules! value {
        ($i:literal) => {{
            let base = _mm512_castps_si512(_mm512_set1_ps(BASE));
            let above = _mm512_castsi512_ps(_mm512_mask_shuffle_epi8(base, LOWEST, u, at($i)));
            let zero = _mm512_set1_ps(BASE + U::OFFSET as f32 * INTEGER_UNIT);
            _mm512_castps_si512(_mm512_sub_ps(above, zero))
        }};
    }
    macro_rules! pair {
        ($lower:literal, $upper:literal) => {
            _mm512_mask_shuffle_epi8(value!($upper), LOWER, value!($lower), at(0x0302))
        };
    }
    lanes!([pair!(0, 2), pair!(1, 3)])
}

/// In the lower two bytes of each word the number of its first in a group of four words, plus those of `i`.
#[inline(always)]
fn at(i: i32) -> __m512i {
    lanes!({
        let first = _mm512_broadcast_i32x4(_mm_setr_epi32(0, 0x0404, 0x0808, 0x0C0C));
        _mm512_add_epi32(first, _mm512_set1_epi32(i))
    })
}

/// With the dot products of bfloat16 pairs and of bytes.
#[derive(Clone, Copy)]
pub(crate) struct Avx512Bf16;

impl Simd for Avx512Bf16 {
    common!();
    const DOT_ROWS: usize = 4;
    const SHORT_SUMS: bool = false;
    const PAIR_DOTS: bool = true;

    #[inline(always)]
    unsafe fn store_pair_bf16<const STREAM: bool>(p: *mut u16, v: [F32x16; 2]) {
        lanes!(if STREAM {
            _mm512_stream_si512(p.cast(), join_normal_bf16(v))
        } else {
            _mm512_storeu_si512(p.cast(), join_normal_bf16(v))
        })
    }

    #[inline(always)]
    fn accumulate_pairs(acc: F32x16, a: F32x16, b: F32x16) -> F32x16 {
        // SAFETY: `__m512bh` is 512 bits without invalid values.
        let pairs = |v: F32x16| -> __m512bh { unsafe { std::mem::transmute(v.0) } };
        lanes!(F32x16(_mm512_dpbf16_ps(acc.0, pairs(a), pairs(b))))
    }

    #[inline(always)]
    fn dot<const SMALL: bool>(acc: __m512i, u: __m512i, s: __m512i) -> __m512i {
        lanes!(_mm512_dpbusd_epi32(acc, u, s))
    }

    #[inline(always)]
    fn bytes_to_bf16<U: Bytes>(u: __m512i) -> [__m512i; 2] {
        if U::BITS > 6 {
            return large_bytes_to_bf16::<U>(u);
        }
        // Indices are the lowest bits of 16: bytes 0 and 2, and after the shift 1 and 3.
        lanes!({
            let table = &const { bf16_integers(U::OFFSET) };
            let first = _mm512_loadu_si512(table.as_ptr().cast());
            let odd = _mm512_srli_epi32::<8>(u);
            if U::BITS == 6 {
                let second = _mm512_loadu_si512(table.as_ptr().add(32).cast());
                [
                    _mm512_permutex2var_epi16(first, u, second),
                    _mm512_permutex2var_epi16(first, odd, second),
                ]
            } else {
                [_mm512_permutexvar_epi16(u, first), _mm512_permutexvar_epi16(odd, first)]
            }
        })
    }
}

/// # Safety
/// The named features are available; see [`Kernel::run`].
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) unsafe fn run<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: the caller's.
    unsafe { kernel.run::<Avx512>() }
}

/// # Safety
/// The named features are available; see [`Kernel::run`].
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni")]
pub(super) unsafe fn run_bf16<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: the caller's.
    unsafe { kernel.run::<Avx512Bf16>() }
}
