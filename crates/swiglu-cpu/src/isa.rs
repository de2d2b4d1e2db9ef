//! Which instruction set the kernels use: detected once, or forced.

use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;

use serde::{Deserialize, Serialize};
use swiglu_core::{Error, Result};

/// An instruction-set façade over the kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Isa {
    /// Plain Rust over arrays, vectorised by the compiler for the build's baseline.
    Portable,
    /// AVX2, FMA and F16C: 8 lanes, 16 registers.
    Avx2,
    /// AVX-512 F, BW, DQ and VL: 16 lanes, 32 registers.
    Avx512,
    /// As `Avx512`, with the dot products of AVX-512-BF16 and, for quantised weights, AVX-512-VNNI,
    /// which every processor with the former has.
    Avx512Bf16,
    /// As `Avx512Bf16`, with the tiles of AMX for many rows of bfloat16.
    AmxBf16,
}

impl Isa {
    /// Every façade, the plainest first.
    pub const ALL: [Isa; 5] =
        [Isa::Portable, Isa::Avx2, Isa::Avx512, Isa::Avx512Bf16, Isa::AmxBf16];

    /// `portable`, `avx2`, `avx512`, `avx512-bf16` or `amx-bf16`.
    pub const fn name(self) -> &'static str {
        match self {
            Isa::Portable => "portable",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Avx512Bf16 => "avx512-bf16",
            Isa::AmxBf16 => "amx-bf16",
        }
    }

    /// Whether this processor and operating system can run it, and the library was compiled with it: `SWIGLU_CPU_NATIVE` may
    /// have left it away.
    ///
    /// For [`Isa::AmxBf16`] this has an effect: on a processor with AMX, Linux is asked once to let this
    /// process use tiles, by `arch_prctl`. It refuses if a thread has an alternate signal stack that is too
    /// small for a signal frame with them, 8 KiB more than without, and the façade is then not available in
    /// this process. Once it has agreed, `sigaltstack` refuses stacks that are too small. A process that
    /// installs such stacks gives them the size that `getauxval(AT_MINSIGSTKSZ)` asks for, or more.
    pub fn is_available(self) -> bool {
        match self {
            Isa::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => cfg!(avx2) && has_avx2(),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => {
                cfg!(avx512)
                    && has_avx2()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 => {
                cfg!(avx512_bf16)
                    && Isa::Avx512.is_available()
                    && is_x86_feature_detected!("avx512bf16")
                    && is_x86_feature_detected!("avx512vnni")
            }
            #[cfg(target_arch = "x86_64")]
            Isa::AmxBf16 => Isa::Avx512Bf16.is_available() && crate::simd::amx::is_available(),
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Avx2 | Isa::Avx512 | Isa::Avx512Bf16 | Isa::AmxBf16 => false,
        }
    }

    /// The façades this machine can run, the plainest first. Asks for tiles as [`Isa::is_available`] does.
    pub fn available() -> impl Iterator<Item = Isa> {
        Isa::ALL.into_iter().filter(|isa| isa.is_available())
    }

    /// The widest available façade; detected once per process. Asks for tiles as [`Isa::is_available`]
    /// does.
    pub fn detect() -> Isa {
        static DETECTED: OnceLock<Isa> = OnceLock::new();
        *DETECTED.get_or_init(|| Isa::available().last().unwrap_or(Isa::Portable))
    }
}

#[cfg(target_arch = "x86_64")]
fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c")
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Isa {
    type Err = Error;
    fn from_str(s: &str) -> Result<Self> {
        Isa::ALL.into_iter().find(|isa| isa.name() == s).ok_or_else(|| Error::UnknownName {
            what: "instruction set",
            given: s.to_owned(),
            choices: Isa::ALL.map(Isa::name).join(", "),
        })
    }
}
