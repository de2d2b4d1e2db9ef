//! The architectures that kernels are compiled for.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::device::error::{CudaError, Result};

/// An architecture that kernels are compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Arch {
    /// A100, A30. Its code also runs on desktop devices of the same major version.
    #[serde(rename = "sm_80")]
    Sm80,
    /// A10, A40, RTX 30.
    #[serde(rename = "sm_86")]
    Sm86,
    /// Jetson Orin.
    #[serde(rename = "sm_87")]
    Sm87,
    /// L4, L40, RTX 40.
    #[serde(rename = "sm_89")]
    Sm89,
    /// H100, H200, with the features of exactly this architecture (wgmma).
    #[serde(rename = "sm_90a")]
    Sm90a,
    /// B200, with the features of exactly this architecture.
    #[serde(rename = "sm_100a")]
    Sm100a,
    /// B300.
    #[serde(rename = "sm_103a")]
    Sm103a,
    /// Jetson Thor.
    #[serde(rename = "sm_110a")]
    Sm110a,
    /// RTX 50, RTX PRO 6000 Blackwell.
    #[serde(rename = "sm_120a")]
    Sm120a,
    /// DGX Spark.
    #[serde(rename = "sm_121a")]
    Sm121a,
}

impl Arch {
    /// All of them, the oldest first.
    pub const ALL: [Arch; 10] = [
        Arch::Sm80,
        Arch::Sm86,
        Arch::Sm87,
        Arch::Sm89,
        Arch::Sm90a,
        Arch::Sm100a,
        Arch::Sm103a,
        Arch::Sm110a,
        Arch::Sm120a,
        Arch::Sm121a,
    ];

    /// The architecture to compile for on a device of compute capability `major.minor`.
    ///
    /// # Errors
    /// [`CudaError::Unsupported`] where no known architecture's code runs.
    pub fn from_capability(major: u32, minor: u32) -> Result<Self> {
        let exact = Self::ALL.into_iter().find(|arch| arch.capability() == (major, minor));
        match (exact, major) {
            (Some(arch), _) => Ok(arch),
            // Code for 8.0 runs on every later 8.x; the architectures with an `a` promise nothing
            // beyond their own number.
            (None, 8) => Ok(Arch::Sm80),
            (None, _) => Err(CudaError::Unsupported {
                what: format!("a device of compute capability {major}.{minor}"),
                why: format!("kernels exist for {}", Self::choices()),
            }),
        }
    }

    /// Major and minor compute capability.
    pub fn capability(self) -> (u32, u32) {
        match self {
            Arch::Sm80 => (8, 0),
            Arch::Sm86 => (8, 6),
            Arch::Sm87 => (8, 7),
            Arch::Sm89 => (8, 9),
            Arch::Sm90a => (9, 0),
            Arch::Sm100a => (10, 0),
            Arch::Sm103a => (10, 3),
            Arch::Sm110a => (11, 0),
            Arch::Sm120a => (12, 0),
            Arch::Sm121a => (12, 1),
        }
    }

    /// The name that compilers know: `sm_90a`.
    pub fn name(self) -> &'static str {
        match self {
            Arch::Sm80 => "sm_80",
            Arch::Sm86 => "sm_86",
            Arch::Sm87 => "sm_87",
            Arch::Sm89 => "sm_89",
            Arch::Sm90a => "sm_90a",
            Arch::Sm100a => "sm_100a",
            Arch::Sm103a => "sm_103a",
            Arch::Sm110a => "sm_110a",
            Arch::Sm120a => "sm_120a",
            Arch::Sm121a => "sm_121a",
        }
    }

    fn choices() -> String {
        Self::ALL.map(Arch::name).join(", ")
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Arch {
    type Err = swiglu_core::Error;

    /// Accepts the names of [`Arch::name`].
    fn from_str(s: &str) -> std::result::Result<Self, Self::Err> {
        Self::ALL.into_iter().find(|arch| arch.name() == s).ok_or_else(|| {
            swiglu_core::Error::UnknownName {
                what: "architecture",
                given: s.to_owned(),
                choices: Self::choices(),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_get_code_that_they_run() {
        for arch in Arch::ALL {
            let (major, minor) = arch.capability();
            assert_eq!(Arch::from_capability(major, minor), Ok(arch));
            assert_eq!(arch.name().parse(), Ok(arch));
            assert_eq!(serde_json::to_string(&arch).unwrap(), format!("\"{arch}\""));
        }
        assert_eq!(Arch::from_capability(8, 8), Ok(Arch::Sm80));
        for (major, minor) in [(7, 5), (9, 1), (12, 7), (20, 0)] {
            let error = Arch::from_capability(major, minor).unwrap_err();
            assert!(matches!(error, CudaError::Unsupported { .. }), "{error}");
        }
        let error = "sm_75".parse::<Arch>().unwrap_err().to_string();
        assert!(error.contains("sm_75") && error.contains("sm_90a"), "{error}");
    }
}
