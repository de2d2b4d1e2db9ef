//! The gated linear layer.

use swiglu_core::{Element, GatedLinearParams, Path};

use super::layer::{Asked, Layer};
use super::lent::DeviceGatedLinearParams;
use super::operands::{Dense, Operands};
use super::weights::GateUpBuffer;
use crate::device::cuda::Cuda;
use crate::device::error::{CudaError, Result};
use crate::kernels::obstacle::Obstacle;
use crate::plan::{Algorithm, Candidate, Planner, expect_candidate};

/// What [`GatedLinear`] is a [`Layer`] of.
#[derive(Debug)]
pub enum GatedLinearKind {}

/// A gated linear layer, x `[M, K]` → h `[M, H]`, over weights in the memory of one [`Cuda`] device.
pub type GatedLinear<T> = Layer<GatedLinearKind, T>;

impl<T: Element> GatedLinear<T> {
    /// Packs the weights.
    ///
    /// # Errors
    /// [`swiglu_core::Error::Shape`] if a bias does not fit the weights; [`CudaError::OutOfMemory`].
    pub fn new(cuda: &Cuda, params: &GatedLinearParams<'_, T>) -> Result<Self> {
        Self::build(cuda, params, Asked::Path(None))
    }

    /// As [`Self::new`], always on one path. The unfused one runs cuBLASLt and the element-wise
    /// kernel; gate and up lie in memory as T between them, so [`swiglu_core::Rounding::Fused`]
    /// becomes [`swiglu_core::Rounding::PreRound`], as [`Self::numerics`] then says, and biases are
    /// rounded to T.
    ///
    /// # Errors
    /// As [`Self::new`]; [`CudaError::LibraryMissing`] for the unfused path without
    /// cuBLASLt.
    pub fn with_path(cuda: &Cuda, params: &GatedLinearParams<'_, T>, path: Path) -> Result<Self> {
        Self::build(cuda, params, Asked::Path(Some(path)))
    }

    /// As [`Self::new`], always by one candidate of [`Cuda::candidates`]: for tests and tuners. One that rounds otherwise
    /// than asked keeps elements between two steps: it is [`Path::Unfused`].
    ///
    /// # Errors
    /// As [`Self::with_path`]; [`CudaError::Unsupported`] where it computes no such layer.
    pub fn with_candidate(
        cuda: &Cuda,
        params: &GatedLinearParams<'_, T>,
        candidate: &Candidate,
    ) -> Result<Self> {
        let algorithm = expect_candidate(cuda, candidate, &params.problem(0))?;
        Self::with_algorithm(cuda, params, algorithm)
    }

    /// The same by an algorithm that computes the problem, or rounds it otherwise.
    pub(crate) fn with_algorithm(
        cuda: &Cuda,
        params: &GatedLinearParams<'_, T>,
        algorithm: Algorithm,
    ) -> Result<Self> {
        let asked = match algorithm.check(Planner::of(cuda), &params.problem(0)) {
            Ok(()) => Asked::Algorithm(algorithm),
            Err(Obstacle::RoundsBetween(_) | Obstacle::RoundsBias(_)) => {
                Asked::Path(Some(Path::Unfused))
            }
            Err(why) => {
                let (what, why) = (algorithm.to_string(), why.to_string());
                return Err(CudaError::Unsupported { what, why });
            }
        };
        Self::build(cuda, params, asked)
    }

    /// A layer over weights that stay where they are: nothing is copied, and what is written to them is seen by the next
    /// call. Which kernels take them depends on how they lie: [`Self::plan`] says what packed ones would go by. The fastest
    /// take rows that begin at multiples of 16 bytes. cuBLASLt adds no biases of 16 bits to sums of f32. What another
    /// layout costs, [`Self::packed`] spares.
    ///
    /// # Errors
    /// [`CudaError::WrongDevice`]; [`CudaError::Unsupported`] for batch-invariant numerics where the kernels for them do not
    /// take the weights as they lie.
    ///
    /// # Safety
    /// Foreign memory stays valid until the layer is dropped and its work is done; that of a [`DeviceMatrix`](crate::DeviceMatrix) is kept.
    /// A call may begin to read weights before the kernel in front of it has ended, if that is one of this crate or lets
    /// a programmatic dependent begin in another way: it does not write the weights, nor, where it is one of a layer with
    /// quantised weights, does the kernel in front of that layer. No other thread enqueues a write to
    /// the weights while a call of the layer, or a launch of its graph, is being enqueued.
    pub unsafe fn from_device(
        cuda: &Cuda,
        params: &DeviceGatedLinearParams<'_, T>,
    ) -> Result<Self> {
        params.expect_device(cuda)?;
        let gate_up = GateUpBuffer::lent(params);
        let problem = params.problem();
        Self::over(cuda, problem, Asked::Path(None), |_| {
            Ok(Operands::Dense(Box::new(Dense::new(gate_up, None))))
        })
    }

    fn build(cuda: &Cuda, params: &GatedLinearParams<'_, T>, asked: Asked) -> Result<Self> {
        params.validate()?;
        Self::over(cuda, params.problem(0), asked, |stream| {
            let orientation = params.weights.layout().orientation;
            let gate_up = GateUpBuffer::new(stream, params, orientation)?;
            Ok(Operands::Dense(Box::new(Dense::new(gate_up, None))))
        })
    }
}
