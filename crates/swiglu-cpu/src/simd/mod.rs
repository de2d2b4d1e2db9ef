//! The vector trait the kernels are written over, and the choice of its implementation.
//!
//! A kernel is a value of a type that implements [`Kernel`]; [`dispatch`] runs it once for the
//! chosen instruction set, inside a function compiled with that set's features. Everything between
//! the two is `#[inline(always)]`, so intrinsics are inlined into code that may use them.

pub(crate) mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod math;
mod portable;

#[cfg(target_arch = "x86_64")]
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use swiglu_core::gate::GatedMath;
use swiglu_core::{DType, Element, F32Lanes};

use self::math::Inlined;
pub(crate) use self::math::{Math, MathKernel, dispatch_math};
use crate::isa::Isa;

/// How far a line is brought.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fetch {
    /// To the first-level cache, for data that is used once: past the other caches, through the second-level
    /// cache, or not at all, whichever is the fastest, see [`learn`].
    Once,
    /// To the second-level cache.
    Second,
}

/// How lines that are used once are asked for.
#[cfg(target_arch = "x86_64")]
mod once {
    /// Past the caches but the first.
    pub(super) const PAST: u8 = 0;
    /// Through the second-level cache.
    pub(super) const THROUGH_SECOND: u8 = 1;
    /// Not at all: the processor sees the stream and fetches ahead by itself.
    pub(super) const UNASKED: u8 = 2;
}

/// One of [`once`].
#[cfg(target_arch = "x86_64")]
static ONCE: AtomicU8 = AtomicU8::new(once::PAST);
/// See [`streams_wait_in_second`].
#[cfg(target_arch = "x86_64")]
static WAIT_IN_SECOND: AtomicBool = AtomicBool::new(false);

/// Learns what the façades ask the processor for.
///
/// On a Zen 5 lines that pass the second-level cache by are the faster way: one thread 49.8 GB/s, unasked 46.7. On a
/// virtual Intel Xeon with AMX weights came at 6 GB/s so and at 30 GB/s through that cache, which fetches ahead by
/// itself: the gated linear layer 896 → 4864 in bf16 with one row took 2.85 and 0.58 ms, one thread, weights in the
/// last-level cache; measured in the same way, the activation of 256 × 4096 in f32 took 0.77 to 1.05 and 0.43 ms.
/// Intel's processors without AMX were not measured and keep the other way.
///
/// On a Zen 4 with AVX-512 nothing is as fast as not to ask. Blocks with one row, in turns with reading as many bytes
/// unasked, two threads, the part of that bandwidth in the median of 30: 8 KiB ahead past the caches 0.88 to 0.96 (f32
/// 4096 × 14336 0.90, bf16 0.88, f32 896 × 4864 0.90, bf16 0.88), through them 0.85 to 0.97, 2 and 4 KiB ahead less,
/// 16 KiB ahead to the second-level cache 0.75 to 0.89, unasked 0.97 to 1.01; one thread 0.81 to 0.92, unasked 0.89 to
/// 0.98. Activations in f32 are 6 to 12 % faster unasked, packed ones and those in bf16 the same. With AVX2 on the same
/// machine no way is faster by more than repeats differ.
pub(crate) fn learn() {
    #[cfg(target_arch = "x86_64")]
    {
        let vendor = cpuid(0, 0);
        let name = [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).concat();
        let zen_5_or_later = family() >= 0x1A;
        let (intel, amd) = (name == *b"GenuineIntel", name == *b"AuthenticAMD");
        // Of AMD's processors before the Zen 5 only the Zen 4 has AVX-512.
        let zen_4 = amd && !zen_5_or_later && std::is_x86_feature_detected!("avx512f");
        let way = match () {
            () if intel && amx::in_hardware() => once::THROUGH_SECOND,
            () if zen_4 => once::UNASKED,
            () => once::PAST,
        };
        ONCE.store(way, Ordering::Relaxed);
        WAIT_IN_SECOND.store(amd && !zen_5_or_later, Ordering::Relaxed);
    }
}

/// Whether a stream whose lines take a while to be worked on had better be brought to the second-level cache ahead of
/// its use than to the first-level one.
///
/// A Zen 4, one thread of AVX-512, a block 4096 × 14336 with one row and weights from memory, ms with lines brought to
/// the first-level cache 4 and 12 KiB ahead and to the second-level one 16 KiB ahead: Q4_0 5.2, 5.3, 4.1; Q4_K 5.6, 5.8,
/// 4.0. With AVX2, 12 and 16 KiB: Q4_0 6.2, 4.8; Q8_0 9.0, 6.5. Where next to nothing is done with a line it is the other
/// way round, as if its second way, between the caches, held the first one up: Q8_0 with AVX-512 7.9, 8.0, 9.6, with a
/// second row 7.0. There no asking at all is as good as any (with two threads the second-level cache's way takes 1.00 to
/// 1.13 times as long, everywhere else 0.65 to 0.95). A Zen 5 was at the bandwidth of memory with lines brought to the
/// first-level cache.
pub(crate) fn streams_wait_in_second() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        WAIT_IN_SECOND.load(Ordering::Relaxed)
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        false
    }
}

/// The processor's family, as its maker counts.
#[cfg(target_arch = "x86_64")]
fn family() -> u32 {
    let signature = cpuid(1, 0).eax;
    match signature >> 8 & 0xF {
        15 => 15 + (signature >> 20 & 0xFF),
        family => family,
    }
}

/// What the processor says about itself.
#[cfg(target_arch = "x86_64")]
fn cpuid(leaf: u32, part: u32) -> std::arch::x86_64::CpuidResult {
    #[allow(unused_unsafe, reason = "safe in later versions than the oldest that we support")]
    // SAFETY: every x86-64 processor has the instruction.
    unsafe {
        std::arch::x86_64::__cpuid_count(leaf, part)
    }
}

/// Asks for a line that is used once.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn prefetch_once(p: *const u8) {
    prefetch_lines_once(p, 1);
}

/// Asks for consecutive lines that are used once, with one branch for all of them.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn prefetch_lines_once(p: *const u8, lines: usize) {
    use std::arch::x86_64::{_MM_HINT_NTA, _MM_HINT_T0, _mm_prefetch};
    // SAFETY: every x86-64 processor can prefetch, and from any address.
    unsafe {
        match ONCE.load(Ordering::Relaxed) {
            once::PAST => {
                for line in 0..lines {
                    _mm_prefetch::<_MM_HINT_NTA>(p.wrapping_add(64 * line).cast());
                }
            }
            once::THROUGH_SECOND => {
                for line in 0..lines {
                    _mm_prefetch::<_MM_HINT_T0>(p.wrapping_add(64 * line).cast());
                }
            }
            _ => {}
        }
    }
}

/// Unsigned integers in bytes that stand for signed ones.
pub(crate) trait Bytes {
    /// Bits of the largest.
    const BITS: u32;
    /// What is subtracted.
    const OFFSET: u32;
}

/// What an integer counts as in [`Simd::bytes_to_bf16`].
pub(crate) const INTEGER_UNIT: f32 = 1.0 / 8192.0;

/// An instruction set: a vector of `f32` and the memory operations around it.
///
/// # Safety
/// Methods may be called only inside [`dispatch`] for an instruction set that is available; types
/// and methods never leave this crate. Pointers must be valid for the lanes they name; no alignment
/// is assumed unless stated.
pub(crate) trait Simd: Copy + 'static {
    /// The vector.
    type V: F32Lanes;
    /// A vector of the same size as `LANES` words of 32 bits, each four bytes, the lowest first.
    type I: Copy;
    /// Lanes of a vector.
    const LANES: usize;
    /// Rows of the largest register tile: `2 · ROWS` accumulators, two weights and one broadcast
    /// stay in registers.
    const ROWS: usize;
    /// Rows of the largest register tile of pairs of bfloat16: where a pair is not multiplied by one instruction, its halves
    /// take registers too.
    const PAIR_ROWS: usize = Self::ROWS;
    /// Rows that share one decoding of quantised weights: each takes six accumulators.
    const DOT_ROWS: usize;
    /// Whether loops over quantised weights are written out; where the compiler makes vectors of
    /// lanes itself that takes it minutes.
    const WRITTEN_OUT: bool = true;
    /// Whether [`Simd::dot`] is several instructions, so that products of small integers are rather
    /// summed in 16 bits first.
    const SHORT_SUMS: bool = true;
    /// Whether [`Simd::accumulate_pairs`] is one instruction.
    const PAIR_DOTS: bool = false;

    /// Runs `kernel` with mathematics that become a part of it.
    ///
    /// # Safety
    /// As [`MathKernel::run`].
    #[inline(always)]
    unsafe fn run_math<K: MathKernel, M: GatedMath>(kernel: &K, math: M) {
        // SAFETY: the caller's.
        unsafe { kernel.run::<Self, Inlined<M>>(Inlined(math)) }
    }

    /// Loads `LANES` values.
    unsafe fn load_f32(p: *const f32) -> Self::V;
    /// Stores `LANES` values.
    unsafe fn store_f32(p: *mut f32, v: Self::V);
    /// Loads and widens `LANES` bfloat16 values.
    unsafe fn load_bf16(p: *const u16) -> Self::V;
    /// Rounds and stores `LANES` values as bfloat16.
    unsafe fn store_bf16(p: *mut u16, v: Self::V);
    /// Loads and widens `LANES` binary16 values.
    unsafe fn load_f16(p: *const u16) -> Self::V;
    /// Rounds and stores `LANES` values as binary16.
    unsafe fn store_f16(p: *mut u16, v: Self::V);
    /// Loads and widens `2 · LANES` bfloat16 values, in the order [`Simd::store_pair_bf16`] undoes.
    #[inline(always)]
    unsafe fn load_pair_bf16(p: *const u16) -> [Self::V; 2] {
        // SAFETY: the caller's pointer is valid for 2 · LANES values.
        unsafe { [Self::load_bf16(p), Self::load_bf16(p.add(Self::LANES))] }
    }
    /// Rounds and stores `2 · LANES` values as bfloat16, from the order of
    /// [`Simd::load_pair_bf16`]; with STREAM as the stores below.
    unsafe fn store_pair_bf16<const STREAM: bool>(p: *mut u16, v: [Self::V; 2]);
    /// As the stores above but past the caches; `p` is aligned to the bytes written.
    unsafe fn stream_f32(p: *mut f32, v: Self::V);
    /// See [`Simd::stream_f32`].
    unsafe fn stream_f16(p: *mut u16, v: Self::V);
    /// Orders streamed stores before later ones.
    fn fence();
    /// The 32 bits at `p` in every lane.
    unsafe fn splat_bits(p: *const u32) -> Self::V;
    /// `acc + a · b`, fused where the hardware has it.
    fn accumulate(acc: Self::V, a: Self::V, b: Self::V) -> Self::V;
    /// `acc + a₀·b₀ + a₁·b₁`, lanes of `a` and `b` holding two bfloat16 values each.
    fn accumulate_pairs(acc: Self::V, a: Self::V, b: Self::V) -> Self::V;
    /// Asks for the cache line at `p`, which may be any address.
    fn prefetch(p: *const u8, fetch: Fetch);
    /// [`Simd::prefetch`] of consecutive lines that are used once. Where the way of such lines is learnt, it is a
    /// branch, which divides the code around it: the compiler moves loads before it and stores what registers do not
    /// hold.
    #[inline(always)]
    fn prefetch_lines(p: *const u8, lines: usize) {
        for line in 0..lines {
            Self::prefetch(p.wrapping_add(64 * line), Fetch::Once);
        }
    }

    /// Loads `LANES` words.
    unsafe fn load_words(p: *const u8) -> Self::I;
    /// Stores `LANES` words.
    unsafe fn store_words(p: *mut u8, v: Self::I);
    /// The word at `p` in every lane.
    unsafe fn splat_word(p: *const u32) -> Self::I;
    /// Every word set to `w`.
    fn words(w: u32) -> Self::I;
    /// Bits set in both.
    fn and(a: Self::I, b: Self::I) -> Self::I;
    /// Bits set in either.
    fn or(a: Self::I, b: Self::I) -> Self::I;
    /// Bits set in one of the two.
    fn xor(a: Self::I, b: Self::I) -> Self::I;
    /// Words shifted left by `n` < 32.
    fn shl(a: Self::I, n: u32) -> Self::I;
    /// Words shifted right by `n` < 32, zeros from the left.
    fn shr(a: Self::I, n: u32) -> Self::I;
    /// Words shifted right by `n` < 32, copies of the sign from the left.
    fn sar(a: Self::I, n: u32) -> Self::I;
    /// Sums of words, wrapping.
    fn add_words(a: Self::I, b: Self::I) -> Self::I;
    /// Signed words as `f32`, rounded to nearest even.
    fn words_to_f32(a: Self::I) -> Self::V;
    /// The nearest signed words, ties to even; lanes are below 2³¹ in magnitude.
    fn f32_to_words(v: Self::V) -> Self::I;
    /// What the table has for each byte; all are below 16.
    fn look_up(table: &[u8; 16], at: Self::I) -> Self::I;
    /// Bytes of groups of four words transposed: byte p of word f goes to byte f of word p.
    fn transpose_bytes(a: Self::I) -> Self::I;
    /// `acc + Σ u·s` of the four bytes of each word, those of `u` unsigned, those of `s` signed. With
    /// SMALL the bytes of `u` are below 128.
    fn dot<const SMALL: bool>(acc: Self::I, u: Self::I, s: Self::I) -> Self::I;
    /// In each half of every word `acc + u·s` of its two bytes, those of `u` unsigned, those of `s` signed;
    /// no sum leaves 16 bits.
    fn add_products(acc: Self::I, u: Self::I, s: Self::I) -> Self::I;
    /// [`Simd::add_products`] to nothing.
    fn products(u: Self::I, s: Self::I) -> Self::I;
    /// `acc + a·b` of the two halves of each word, as signed integers.
    fn add_halves(acc: Self::I, a: Self::I, b: Self::I) -> Self::I;
    /// Bytes 0 and 2 of every word, then bytes 1 and 3, as unsigned halves of a word.
    fn bytes_to_halves(u: Self::I) -> [Self::I; 2];
    /// Groups of four words rearranged: the lower halves of words 0 and 2, of 1 and 3, then the upper
    /// halves of 0 and 2, of 1 and 3.
    fn transpose_halves(a: Self::I) -> Self::I;
    /// Bytes 0 and 2 of every word, then bytes 1 and 3, as pairs of bfloat16: (byte − OFFSET) times
    /// [`INTEGER_UNIT`], which is exact.
    #[inline(always)]
    fn bytes_to_bf16<U: Bytes>(u: Self::I) -> [Self::I; 2] {
        let byte = |i: u32| {
            let integer = Self::words_to_f32(Self::and(Self::shr(u, 8 * i), Self::words(0xFF)));
            let value = integer.sub(F32Lanes::splat(U::OFFSET as f32));
            let mut bits = [0.0f32; 64];
            // SAFETY: there is room for a vector.
            unsafe {
                Self::store_f32(bits.as_mut_ptr(), value.mul(F32Lanes::splat(INTEGER_UNIT)));
                Self::load_words(bits.as_ptr().cast())
            }
        };
        let pair = |i| Self::or(Self::shr(byte(i), 16), byte(i + 2));
        [pair(0), pair(1)]
    }

    /// Loads and widens `LANES` elements.
    ///
    /// # Safety
    /// As for the trait.
    #[inline(always)]
    unsafe fn load<T: Element>(p: *const T) -> Self::V {
        // SAFETY: the caller's `p` is valid for LANES elements of T, whose representation is that
        // of the type it is cast to.
        unsafe {
            match T::DTYPE {
                DType::F16 => Self::load_f16(p.cast()),
                DType::Bf16 => Self::load_bf16(p.cast()),
                _ => Self::load_f32(p.cast()),
            }
        }
    }

    /// Loads and widens `2 · LANES` elements, in an order that [`Simd::store_pair`] undoes.
    ///
    /// # Safety
    /// As for the trait.
    #[inline(always)]
    unsafe fn load_pair<T: Element>(p: *const T) -> [Self::V; 2] {
        // SAFETY: as in `load`.
        unsafe {
            match T::DTYPE {
                DType::Bf16 => Self::load_pair_bf16(p.cast()),
                _ => [Self::load(p), Self::load(p.add(Self::LANES))],
            }
        }
    }

    /// Rounds and stores `LANES` values as T.
    ///
    /// # Safety
    /// As for the trait.
    #[inline(always)]
    unsafe fn store<T: Element>(p: *mut T, v: Self::V) {
        // SAFETY: as in `load`.
        unsafe {
            match T::DTYPE {
                DType::F16 => Self::store_f16(p.cast(), v),
                DType::Bf16 => Self::store_bf16(p.cast(), v),
                _ => Self::store_f32(p.cast(), v),
            }
        }
    }

    /// Rounds and stores `2 · LANES` values as T from the order of [`Simd::load_pair`]; with STREAM
    /// past the caches.
    ///
    /// # Safety
    /// As for the trait; with STREAM `p` is aligned to the bytes written.
    #[inline(always)]
    unsafe fn store_pair<T: Element, const STREAM: bool>(p: *mut T, v: [Self::V; 2]) {
        // SAFETY: as in `load`.
        unsafe {
            match (T::DTYPE, STREAM) {
                (DType::Bf16, _) => Self::store_pair_bf16::<STREAM>(p.cast(), v),
                (DType::F16, true) => {
                    Self::stream_f16(p.cast(), v[0]);
                    Self::stream_f16(p.cast::<u16>().add(Self::LANES), v[1]);
                }
                (_, true) => {
                    Self::stream_f32(p.cast(), v[0]);
                    Self::stream_f32(p.cast::<f32>().add(Self::LANES), v[1]);
                }
                (_, false) => {
                    Self::store(p, v[0]);
                    Self::store(p.add(Self::LANES), v[1]);
                }
            }
        }
    }
}

/// Code written over [`Simd`].
pub(crate) trait Kernel {
    /// What it returns.
    type Output;
    /// Whether it has use for bfloat16 conversions or dot products of pairs and bytes; without, one
    /// compilation serves the façades with and without them.
    const USES_DOTS: bool = true;
    /// Runs. Implementations are `#[inline(always)]`.
    ///
    /// # Safety
    /// Called by [`dispatch`] only; the pointers the kernel holds must be valid.
    unsafe fn run<S: Simd>(self) -> Self::Output;
}

/// A property of the chosen instruction set.
macro_rules! constant {
    ($(#[$doc:meta])* $name:ident, $constant:ident: $type:ty) => {
        $(#[$doc])*
        pub(crate) fn $name(isa: Isa) -> $type {
            match isa {
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => avx2::Avx2::$constant,
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 => avx512::Avx512::$constant,
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512Bf16 | Isa::AmxBf16 => avx512::Avx512Bf16::$constant,
                _ => portable::Portable::$constant,
            }
        }
    };
}
constant! {
    /// Lanes of a vector.
    lanes, LANES: usize
}
constant! {
    /// Rows of the largest register tile.
    tile_rows, ROWS: usize
}
constant! {
    /// Rows of the largest register tile of pairs of bfloat16.
    pair_rows, PAIR_ROWS: usize
}

constant! {
    /// Rows that share one decoding of quantised weights.
    dot_rows, DOT_ROWS: usize
}
constant! {
    /// Whether loops over quantised weights are written out.
    written_out, WRITTEN_OUT: bool
}
constant! {
    /// Whether products of small integers are summed in 16 bits.
    short_sums, SHORT_SUMS: bool
}
constant! {
    /// Whether dot products of bfloat16 pairs are one instruction.
    pair_dots, PAIR_DOTS: bool
}

/// Runs `kernel` with the instruction set `isa`.
///
/// # Safety
/// `isa` is available on this machine, and whatever the kernel requires holds.
pub(crate) unsafe fn dispatch<K: Kernel>(isa: Isa, kernel: K) -> K::Output {
    // SAFETY: the caller vouches for the instruction set and the kernel.
    unsafe {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 if cfg!(avx2) => avx2::run(kernel),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 | Isa::AmxBf16 if cfg!(avx512_bf16) && K::USES_DOTS => {
                avx512::run_bf16(kernel)
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Avx512Bf16 | Isa::AmxBf16 if cfg!(avx512) => avx512::run(kernel),
            _ => kernel.run::<portable::Portable>(),
        }
    }
}

#[cfg(test)]
mod tests;
