//! What computes y from h in a feed-forward block that goes step by step.

use swiglu_core::{DType, Problem};

use super::elementwise::Tensor;
use super::obstacle::Obstacle;
use super::ring::Ring;
use super::sm90_register_gemm::{self, Call as RegisterCall};
use super::sm90_skinny_gated_gemm::Next;
use super::sm90_skinny_gemm::{self, Call as SkinnyCall};
use super::tensor_map::LayerMaps;
use super::{NamedVariant, decode_mlp};
use crate::device::cuda::Cuda;
use crate::device::error::Result;
use crate::device::lt::LinearWeights;
use crate::device::stream::Stream;

/// The kernel of the down projection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Down {
    CublasLt,
    /// `sm90_skinny_gemm`, for few tokens.
    Skinny {
        beside: bool,
    },
    /// `sm90_register_gemm`, for very few tokens and weights.
    Registers,
}

/// One product: y = h·W + b.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DownCall<'a> {
    pub(crate) dtype: DType,
    pub(crate) m: usize,
    pub(crate) h: Tensor,
    pub(crate) weights: LinearWeights,
    pub(crate) y: Tensor,
    /// Of h and the weights.
    pub(crate) maps: &'a LayerMaps,
}

impl Down {
    /// What follows a kernel.
    pub(crate) fn of(next: Next) -> Self {
        match next {
            Next::Unknown => Self::CublasLt,
            Next::SkinnyGemm => Self::Skinny { beside: false },
            Next::SkinnyGemmBeside => Self::Skinny { beside: true },
            Next::RegisterGemmBeside => Self::Registers,
        }
    }

    /// How the name of steps goes on behind that of the kernel for h: ` + ` where one follows the other, ` beside ` where
    /// they share SMs, nothing where it is cuBLASLt.
    pub(crate) fn joined(self) -> &'static str {
        match self {
            Self::CublasLt => "",
            Self::Skinny { beside: false } => " + sm90_skinny_gemm",
            Self::Skinny { beside: true } => " beside sm90_skinny_gemm",
            Self::Registers => " beside sm90_register_gemm",
        }
    }

    /// The kernel's name.
    pub(crate) fn kernel(self) -> &'static str {
        match self {
            Self::CublasLt => "cublaslt",
            Self::Skinny { .. } => "sm90_skinny_gemm",
            Self::Registers => "sm90_register_gemm",
        }
    }

    /// Whether a kernel of ours computes the product of a problem, or why not.
    pub(crate) fn check(
        self,
        multiprocessors: usize,
        problem: &Problem,
    ) -> std::result::Result<(), Obstacle> {
        let most = match self {
            Self::CublasLt => return Ok(()),
            Self::Skinny { .. } => sm90_skinny_gemm::MOST_TOKENS,
            Self::Registers => sm90_register_gemm::MOST_TOKENS,
        };
        let given = problem.m;
        if given > most {
            return Err(Obstacle::Decode(decode_mlp::Obstacle::Tokens { given, most }));
        }
        if problem.intermediate == 0 {
            return Err(Obstacle::NothingToMultiply);
        }
        match self {
            Self::Registers => {
                let product = [problem.intermediate, problem.hidden];
                sm90_register_gemm::Tiling::new(product, multiprocessors).map(drop)
            }
            _ => Ok(()),
        }
    }

    /// Tile sizes and the like, by name, of a problem that has been checked.
    pub(crate) fn parameters(self, cuda: &Cuda, problem: &Problem) -> Vec<(&'static str, usize)> {
        let Problem { m, intermediate, hidden, .. } = *problem;
        match self {
            Self::CublasLt => Vec::new(),
            Self::Skinny { beside } => {
                let tiling = sm90_skinny_gemm::tiling(cuda, [m, intermediate, hidden], beside);
                tiling.parameters().to_vec()
            }
            Self::Registers => register_tiling(cuda, [intermediate, hidden])
                .map_or_else(|_| Vec::new(), |tiling| tiling.parameters().to_vec()),
        }
    }

    /// Its ring for a problem, if it has one.
    pub(crate) fn ring(self, cuda: &Cuda, problem: &Problem) -> Option<Ring> {
        let Problem { m, intermediate, hidden, .. } = *problem;
        let Self::Skinny { beside } = self else { return None };
        let tiling = sm90_skinny_gemm::tiling(cuda, [m, intermediate, hidden], beside);
        Some(tiling.ring_for(intermediate))
    }

    /// What [`Self::prepare`] compiles, if anything, on so many SMs.
    pub(crate) fn needed(self, problem: &Problem, multiprocessors: usize) -> Option<NamedVariant> {
        let Problem { m, intermediate, hidden, dtype, .. } = *problem;
        match self {
            Self::CublasLt => None,
            Self::Skinny { beside } => {
                let product = [m, intermediate, hidden];
                let tiling = sm90_skinny_gemm::Tiling::new(product, multiprocessors, beside);
                Some(tiling.named(dtype))
            }
            Self::Registers => {
                let product = [intermediate, hidden];
                let tiling = sm90_register_gemm::Tiling::new(product, multiprocessors);
                tiling.ok().map(|tiling| tiling.named(dtype))
            }
        }
    }

    /// Compiles what launches of ours need.
    pub(crate) fn prepare(self, cuda: &Cuda, problem: &Problem) -> Result<()> {
        let Problem { m, intermediate, hidden, dtype, .. } = *problem;
        match self {
            Self::CublasLt => Ok(()),
            Self::Skinny { beside } => {
                let tiling = sm90_skinny_gemm::tiling(cuda, [m, intermediate, hidden], beside);
                sm90_skinny_gemm::function(cuda, tiling, dtype).map(drop)
            }
            Self::Registers => {
                let tiling = fitting(register_tiling(cuda, [intermediate, hidden]))?;
                sm90_register_gemm::function(cuda, tiling, dtype).map(drop)
            }
        }
    }

    /// Enqueues the product by a kernel of ours; `false` where there is none.
    ///
    /// # Safety
    /// As [`sm90_skinny_gemm::launch`].
    pub(crate) unsafe fn launch(self, stream: &Stream, call: &DownCall<'_>) -> Result<bool> {
        let DownCall { dtype, m, h: x, weights, y, maps } = *call;
        // SAFETY: as the caller says.
        unsafe {
            match self {
                Self::CublasLt => return Ok(false),
                Self::Skinny { beside } => {
                    let call = SkinnyCall { dtype, m, x, weights, y, maps, beside };
                    sm90_skinny_gemm::launch(stream, &call)?;
                }
                Self::Registers => {
                    let product = [weights.in_features, weights.out_features];
                    let tiling = fitting(register_tiling(stream.cuda(), product))?;
                    let call = RegisterCall { dtype, m, x, weights, y };
                    sm90_register_gemm::launch(stream, tiling, &call)?;
                }
            }
        }
        Ok(true)
    }
}

fn register_tiling(
    cuda: &Cuda,
    product: [usize; 2],
) -> std::result::Result<sm90_register_gemm::Tiling, Obstacle> {
    sm90_register_gemm::Tiling::new(product, cuda.facts().sm_count as usize)
}

/// For calls by a way that did not pass its check.
fn fitting<T>(tiling: std::result::Result<T, Obstacle>) -> Result<T> {
    tiling.map_err(|why| crate::device::error::CudaError::Unsupported {
        what: Down::Registers.kernel().into(),
        why: why.to_string(),
    })
}
