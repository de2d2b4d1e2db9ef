//! Every façade's vector operations against the scalar definitions, bit for bit.

use swiglu_core::{F32Lanes, bf16, f16, random};

use super::*;

/// Ordinary values, every kind of special one, and random bit patterns.
fn values() -> Vec<f32> {
    let mut v: Vec<f32> = vec![
        0.0,
        -0.0,
        1.0,
        -1.0,
        f32::NAN,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::MIN_POSITIVE,
        f32::from_bits(1),
        -f32::from_bits(0x7F_FFFF),
        f32::MAX,
        65504.0,
        65519.9,
        65520.0,
        1.0 + f32::EPSILON,
        3.389_531_4e38,
        6.0e-8,
        2.98e-8,
        -88.9,
        88.9,
    ];
    v.extend((0..4096).map(|i| f32::from_bits(random::bits(3, i) as u32)));
    v.extend((0..4096).map(|i| random::normal(4, i) * 8.0));
    v
}

struct Agree;

fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
}

impl Agree {
    /// Compares `vector` lane by lane with `scalar` over triples of values.
    #[inline(always)]
    unsafe fn check<S: Simd>(
        name: &str,
        vector: impl Fn(S::V, S::V, S::V) -> S::V,
        scalar: impl Fn(f32, f32, f32) -> f32,
    ) {
        let v = values();
        let n = v.len() - S::LANES;
        for i in 0..n {
            let (j, k) = ((i * 7 + 3) % n, (i * 13 + 5) % n);
            let mut out = [0.0f32; 64];
            // SAFETY: every window is inside `v`.
            unsafe {
                let at = |i: usize| S::load_f32(v.as_ptr().add(i));
                S::store_f32(out.as_mut_ptr(), vector(at(i), at(j), at(k)));
            }
            for lane in 0..S::LANES {
                let (a, b, c) = (v[i + lane], v[j + lane], v[k + lane]);
                let want = scalar(a, b, c);
                assert!(
                    same(out[lane], want),
                    "{name}({a:e}, {b:e}, {c:e}) = {:e} not {want:e}",
                    out[lane]
                );
            }
        }
    }
}

impl Kernel for Agree {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        macro_rules! operation {
            ($name:literal, |$a:ident, $b:ident, $c:ident| $e:expr) => {
                // SAFETY: inside `dispatch`.
                unsafe {
                    Self::check::<S>(
                        $name,
                        |$a, $b, $c| {
                            let _ = ($b, $c);
                            $e
                        },
                        |$a, $b, $c| {
                            let _ = ($b, $c);
                            $e
                        },
                    )
                }
            };
        }
        operation!("add", |a, b, c| F32Lanes::add(a, b));
        operation!("sub", |a, b, c| F32Lanes::sub(a, b));
        operation!("mul", |a, b, c| F32Lanes::mul(a, b));
        operation!("div", |a, b, c| F32Lanes::div(a, b));
        operation!("mul_add", |a, b, c| F32Lanes::mul_add(a, b, c));
        operation!("neg_mul_add", |a, b, c| F32Lanes::neg_mul_add(a, b, c));
        operation!("max", |a, b, c| F32Lanes::max(a, b));
        operation!("min", |a, b, c| F32Lanes::min(a, b));
        operation!("abs", |a, b, c| F32Lanes::abs(a));
        operation!("neg", |a, b, c| F32Lanes::neg(a));
        operation!("select_positive", |a, b, c| F32Lanes::select_positive(a, b, c));
        operation!("round_to_bf16", |a, b, c| F32Lanes::round_to_bf16(a));
        operation!("round_to_f16", |a, b, c| F32Lanes::round_to_f16(a));
        // SAFETY: inside `dispatch`.
        unsafe {
            Self::check::<S>(
                "round_even",
                |a, _, _| small(a).round_even().add(F32Lanes::splat(0.0)),
                |a, _, _| small(a).round_even().add(F32Lanes::splat(0.0)),
            );
        }
        // Within the domain: a significand in [0.5, 2) and an integral exponent.
        for n in -160..=160 {
            let n = n as f32;
            // SAFETY: inside `dispatch`.
            unsafe {
                Self::check::<S>(
                    "scale_by_power_of_two",
                    |a, _, _| significand(a).scale_by_power_of_two(F32Lanes::splat(n)),
                    |a, _, _| significand(a).scale_by_power_of_two(n),
                );
                if (-126.0..128.0).contains(&n) {
                    Self::check::<S>(
                        "add_exponent",
                        |a, _, _| significand(number(a)).add_exponent(F32Lanes::splat(n)),
                        |a, _, _| significand(number(a)).add_exponent(n),
                    );
                }
            }
        }
    }
}

/// A value in [1, 2) made from any bits; NaN stays NaN.
#[inline(always)]
fn significand<V: F32Lanes>(v: V) -> V {
    V::splat(1.999_999_9).min(V::splat(1.0).max(v.abs()))
}

/// The value, 1 for NaN.
#[inline(always)]
fn number<V: F32Lanes>(v: V) -> V {
    v.abs().max(V::splat(1.0))
}

/// A value of at most 2²¹; NaN stays NaN.
#[inline(always)]
fn small<V: F32Lanes>(v: V) -> V {
    V::splat(2_097_152.0).min(V::splat(-2_097_152.0).max(v))
}

#[test]
fn vector_operations_have_the_scalar_bits() {
    for isa in Isa::available() {
        // SAFETY: the façade is available.
        unsafe { dispatch(isa, Agree) };
    }
}

/// Storing and loading the 16-bit types, all bit patterns.
struct Conversions;
impl Kernel for Conversions {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let all: Vec<u16> = (0..=u16::MAX).chain(0..64).collect();
        for i in 0..=usize::from(u16::MAX) {
            let (mut wide, mut back) = ([[0.0f32; 64]; 2], [[0u16; 64]; 2]);
            // SAFETY: 64 more values follow the last pattern.
            unsafe {
                let p = all.as_ptr().add(i);
                let (h, b) = (S::load::<f16>(p.cast()), S::load::<bf16>(p.cast()));
                S::store_f32(wide[0].as_mut_ptr(), h);
                S::store_f32(wide[1].as_mut_ptr(), b);
                S::store::<f16>(back[0].as_mut_ptr().cast(), h);
                S::store::<bf16>(back[1].as_mut_ptr().cast(), b);
            }
            let bits = all[i];
            assert!(same(wide[0][0], f16::from_bits(bits).to_f32()), "f16 {bits:#x}");
            assert!(same(wide[1][0], bf16::from_bits(bits).to_f32()), "bf16 {bits:#x}");
            for lane in 0..S::LANES {
                let bits = all[i + lane];
                assert!(f16::from_bits(bits).is_nan() || back[0][lane] == bits, "f16 {bits:#x}");
                assert!(bf16::from_bits(bits).is_nan() || back[1][lane] == bits, "bf16 {bits:#x}");
            }
        }
    }
}

#[test]
fn sixteen_bit_types_survive_every_pattern() {
    for isa in Isa::available() {
        // SAFETY: the façade is available.
        unsafe { dispatch(isa, Conversions) };
    }
}

/// A vector of words, by its lanes.
struct Words;

impl Words {
    /// Compares `vector` with `scalar` on windows of random words; `scalar` sees whole vectors.
    #[inline(always)]
    unsafe fn check<S: Simd>(
        name: &str,
        vector: impl Fn(S::I, S::I, S::I) -> S::I,
        scalar: impl Fn(&[u32], &[u32], &[u32], usize) -> u32,
    ) {
        const N: usize = 4096;
        let special = [0, 1, u32::MAX, 0x8000_0000, 0x7FFF_FFFF, 0x8080_8080, 0x7F7F_7F7F, 0xFF];
        let words: Vec<u32> = (0..N + 64)
            .map(|i| special.get(i % 11).copied().unwrap_or(random::bits(5, i as u64) as u32))
            .collect();
        for i in 0..N {
            let (j, k) = ((i * 7 + 3) % N, (i * 13 + 5) % N);
            let mut out = [0u32; 64];
            // SAFETY: every window is inside `words`.
            unsafe {
                let at = |i: usize| S::load_words(words.as_ptr().add(i).cast());
                S::store_words(out.as_mut_ptr().cast(), vector(at(i), at(j), at(k)));
            }
            let (a, b, c) = (&words[i..], &words[j..], &words[k..]);
            for (lane, got) in out[..S::LANES].iter().enumerate() {
                let want = scalar(a, b, c, lane);
                assert_eq!(*got, want, "{name}, lane {lane} of {i}, {j}, {k}");
            }
        }
    }
}

struct Integer<const BITS: u32, const OFFSET: u32>;

impl<const BITS: u32, const OFFSET: u32> Bytes for Integer<BITS, OFFSET> {
    const BITS: u32 = BITS;
    const OFFSET: u32 = OFFSET;
}

impl Words {
    /// Operations on halves of words. Sums of 16 bits are given what they hold.
    #[inline(always)]
    unsafe fn halves<S: Simd>() {
        let small = |w: u32| w & 0x3F3F_3F3F;
        let products = |acc: [i64; 2], u: u32, s: u32| {
            let (u, s) = (small(u).to_le_bytes(), s.to_le_bytes());
            let product = |b: usize| i64::from(u[b]) * i64::from(s[b].cast_signed());
            word_of([0, 1].map(|h| acc[h] + product(2 * h) + product(2 * h + 1)))
        };
        let with_small = |u| S::and(u, S::words(small(u32::MAX)));
        // SAFETY: the caller's.
        unsafe {
            Self::check::<S>(
                "products",
                |_, b, c| S::products(with_small(b), c),
                |_, b, c, i| products([0; 2], b[i], c[i]),
            );
            // Of two times 63 · 128 a sum may be 16128 away from its beginning.
            let begin = |w: u32| w & 0x3FFF_3FFF;
            Self::check::<S>(
                "add_products",
                |a, b, c| S::add_products(S::and(a, S::words(begin(u32::MAX))), with_small(b), c),
                |a, b, c, i| products(halves_of(begin(a[i])), b[i], c[i]),
            );
            Self::check::<S>("add_halves", S::add_halves, |a, b, c, i| {
                let (b, c) = (halves_of(b[i]), halves_of(c[i]));
                (i64::from(a[i]) + b[0] * c[0] + b[1] * c[1]) as u32
            });
            for (half, n) in [(0, 0), (1, 8)] {
                Self::check::<S>(
                    "bytes_to_halves",
                    |a, _, _| S::bytes_to_halves(a)[half],
                    |a, _, _, i| a[i] >> n & 0x00FF_00FF,
                );
            }
            Self::check::<S>(
                "transpose_halves",
                |a, _, _| S::transpose_halves(a),
                |a, _, _, i| {
                    let group = &a[i / 4 * 4..][..4];
                    let half = |w: u32| w >> (i % 4 / 2 * 16) & 0xFFFF;
                    half(group[i % 2]) | half(group[i % 2 + 2]) << 16
                },
            );
        }
    }

    /// All bytes of so many bits, in every place.
    #[inline(always)]
    unsafe fn bytes_as_bf16<S: Simd, U: Bytes>() {
        let bytes = 0xFF >> (8 - U::BITS);
        for odd in [false, true] {
            // SAFETY: the caller's.
            unsafe {
                Self::check::<S>(
                    "bytes_to_bf16",
                    |a, _, _| {
                        let words = S::and(a, S::words(u32::from_ne_bytes([bytes; 4])));
                        let [first, second] = S::bytes_to_bf16::<U>(words);
                        if odd { second } else { first }
                    },
                    |a, _, _, i| {
                        let integers = a[i].to_le_bytes().map(|b| {
                            let integer = f32::from(b & bytes) - U::OFFSET as f32;
                            u32::from(bf16::from_f32(integer * INTEGER_UNIT).to_bits())
                        });
                        let at = usize::from(odd);
                        integers[at] | integers[at + 2] << 16
                    },
                );
            }
        }
    }
}

/// The two halves of a word.
fn halves_of(w: u32) -> [i64; 2] {
    [w as u16, (w >> 16) as u16].map(|h| h.cast_signed().into())
}

/// Two sums of 16 bits as a word.
fn word_of(halves: [i64; 2]) -> u32 {
    let [lower, upper] = halves.map(|h| u32::from(i16::try_from(h).unwrap().cast_unsigned()));
    lower | upper << 16
}

fn dot_of_bytes(acc: u32, u: u32, s: u32) -> u32 {
    let bytes = u.to_le_bytes().into_iter().zip(s.to_le_bytes());
    bytes.fold(acc, |sum, (u, s)| {
        sum.wrapping_add((i32::from(u) * i32::from(s.cast_signed())).cast_unsigned())
    })
}

impl Kernel for Words {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: inside `dispatch`; pointers are to whole vectors.
        unsafe {
            Self::check::<S>("and", |a, b, _| S::and(a, b), |a, b, _, i| a[i] & b[i]);
            Self::check::<S>("or", |a, b, _| S::or(a, b), |a, b, _, i| a[i] | b[i]);
            Self::check::<S>("xor", |a, b, _| S::xor(a, b), |a, b, _, i| a[i] ^ b[i]);
            Self::check::<S>(
                "add_words",
                |a, b, _| S::add_words(a, b),
                |a, b, _, i| a[i].wrapping_add(b[i]),
            );
            for n in 0..32 {
                Self::check::<S>("shl", |a, _, _| S::shl(a, n), |a, _, _, i| a[i] << n);
                Self::check::<S>("shr", |a, _, _| S::shr(a, n), |a, _, _, i| a[i] >> n);
                Self::check::<S>(
                    "sar",
                    |a, _, _| S::sar(a, n),
                    |a, _, _, i| (a[i].cast_signed() >> n).cast_unsigned(),
                );
            }
            Self::check::<S>(
                "dot",
                |a, b, c| S::dot::<false>(a, b, c),
                |a, b, c, i| dot_of_bytes(a[i], b[i], c[i]),
            );
            let small = |w: u32| w & 0x7F7F_7F7F;
            Self::check::<S>(
                "dot of small bytes",
                |a, b, c| S::dot::<true>(a, S::and(b, S::words(small(u32::MAX))), c),
                |a, b, c, i| dot_of_bytes(a[i], small(b[i]), c[i]),
            );
            let table: [u8; 16] = std::array::from_fn(|i| (i * 37 + 200) as u8);
            let nibbles = 0x0F0F_0F0F;
            Self::check::<S>(
                "look_up",
                |a, _, _| S::look_up(&table, S::and(a, S::words(nibbles))),
                |a, _, _, i| {
                    let codes = (a[i] & nibbles).to_le_bytes();
                    u32::from_le_bytes(codes.map(|code| table[usize::from(code)]))
                },
            );
            Self::check::<S>(
                "transpose_bytes",
                |a, _, _| S::transpose_bytes(a),
                |a, _, _, i| {
                    let group = &a[i / 4 * 4..][..4];
                    u32::from_le_bytes([0, 1, 2, 3].map(|f: usize| group[f].to_le_bytes()[i % 4]))
                },
            );
            Self::halves::<S>();
            Self::bytes_as_bf16::<S, Integer<3, 4>>();
            Self::bytes_as_bf16::<S, Integer<4, 8>>();
            Self::bytes_as_bf16::<S, Integer<5, 16>>();
            Self::bytes_as_bf16::<S, Integer<6, 32>>();
            Self::bytes_as_bf16::<S, Integer<8, 128>>();
            // To f32, rounded, and the nearest word of what fits.
            Self::check::<S>(
                "words_to_f32",
                |a, _, _| {
                    let mut out = [0.0f32; 64];
                    S::store_f32(out.as_mut_ptr(), S::words_to_f32(a));
                    S::load_words(out.as_ptr().cast())
                },
                |a, _, _, i| (a[i].cast_signed() as f32).to_bits(),
            );
            Self::check::<S>(
                "f32_to_words",
                |a, _, _| {
                    let v = S::words_to_f32(S::sar(a, 1)).mul(F32Lanes::splat(1.0 / 1024.0));
                    S::f32_to_words(v)
                },
                |a, _, _, i| {
                    let v = (a[i].cast_signed() >> 1) as f32 / 1024.0;
                    (v.round_ties_even() as i32).cast_unsigned()
                },
            );
            let word = 0x89AB_CDEFu32;
            let splat = |_, _, _| S::splat_word(&word.to_le());
            Self::check::<S>("splat_word", splat, |_, _, _, _| word);
            Self::check::<S>("words", |_, _, _| S::words(word), |_, _, _, _| word);
        }
    }
}

#[test]
fn operations_on_words_have_the_defined_bits() {
    for isa in Isa::available() {
        // SAFETY: the façade is available.
        unsafe { dispatch(isa, Words) };
    }
}
