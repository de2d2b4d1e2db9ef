//! The feed-forward block: the gated linear layer, then the down projection by cuBLASLt.

use std::sync::Arc;

use swiglu_core::{
    Element, GatedLinearParams, MatrixMut, MatrixRef, MlpParams, Numerics, Path, Plan, Problem,
};

use super::gated::{GatedLinear, workspace_part};
use super::plan::{Choice, Way};
use super::weights::{DownBuffer, padded};
use crate::activation::tensor;
use crate::context::Cuda;
use crate::error::Result;
use crate::kernels::elementwise::Tensor;
use crate::kernels::fill_rows::fill_rows;
use crate::lt::Lt;
use crate::memory::{DeviceMatrix, DeviceMatrixMut, DeviceMatrixRef};
use crate::stream::Stream;

/// A feed-forward block, x `[M, K]` → y `[M, K]`, whose weights are packed for one [`Cuda`] device.
#[derive(Debug)]
pub struct Mlp<T> {
    gated: GatedLinear<T>,
    down: DownBuffer<T>,
    lt: Arc<Lt>,
    problem: Problem,
}

impl<T: Element> Mlp<T> {
    /// Packs the weights; see [`GatedLinear::new`].
    ///
    /// # Errors
    /// [`swiglu_core::Error::Shape`] if the shapes disagree; [`crate::CudaError::OutOfMemory`];
    /// [`crate::CudaError::LibraryMissing`] without cuBLASLt, which computes the down projection.
    pub fn new(cuda: &Cuda, params: &MlpParams<'_, T>) -> Result<Self> {
        Self::build(cuda, params, |gated| GatedLinear::new(cuda, gated))
    }

    /// As [`Self::new`], with the gated linear layer always on one path.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn with_path(cuda: &Cuda, params: &MlpParams<'_, T>, path: Path) -> Result<Self> {
        Self::build(cuda, params, |gated| GatedLinear::with_path(cuda, gated, path))
    }

    fn build(
        cuda: &Cuda,
        params: &MlpParams<'_, T>,
        gated: impl FnOnce(&GatedLinearParams<'_, T>) -> Result<GatedLinear<T>>,
    ) -> Result<Self> {
        params.validate()?;
        let lt = cuda.lt()?;
        let gated = gated(&params.gated)?;
        let (weight, bias) = (params.down, params.down_bias);
        let down = DownBuffer::new(&cuda.stream(), weight, params.down_orientation, bias)?;
        let problem = Problem { numerics: gated.numerics(), ..params.problem(0) };
        Ok(Self { gated, down, lt, problem })
    }

    /// The gated linear layer.
    pub fn gated(&self) -> &GatedLinear<T> {
        &self.gated
    }
    /// The device.
    pub fn cuda(&self) -> &Cuda {
        self.gated.cuda()
    }
    /// The numerics mode. The down projection's bias is added as a value of T.
    pub fn numerics(&self) -> Numerics {
        self.problem.numerics
    }

    /// How `m` tokens will be computed.
    pub fn plan(&self, m: usize) -> Plan {
        self.cuda().plan(Problem { m, ..self.problem }, self.gated.path())
    }

    /// Elements from row to row of h in the workspace.
    fn h_stride(&self) -> usize {
        padded::<T>(self.problem.intermediate)
    }

    fn h_bytes(&self, m: usize) -> usize {
        workspace_part(m * self.h_stride() * size_of::<T>())
    }

    fn workspace_bytes(&self, m: usize, choice: Choice) -> usize {
        // Gate, up and the down projection use what lies behind h one after the other.
        let scratch = Lt::scratch_bytes(self.cuda().arch());
        self.h_bytes(m) + self.gated.workspace_bytes(m, choice).max(scratch)
    }

    /// As [`GatedLinear::reserve`].
    ///
    /// # Errors
    /// As [`Self::forward`].
    pub fn reserve(&self, stream: &Stream, m: usize) -> Result<()> {
        let choice = self.gated.choose(m);
        self.gated.prepare(choice)?;
        self.cuda().reserve_workspace(stream, self.workspace_bytes(m, choice))
    }

    /// Enqueues y = act(x·Wg + bg, x·Wu + bu)·Wd + bd on `stream`.
    ///
    /// # Errors
    /// As [`GatedLinear::forward`].
    pub fn forward(
        &self,
        stream: &Stream,
        x: DeviceMatrixRef<'_, T>,
        out: DeviceMatrixMut<'_, T>,
    ) -> Result<()> {
        let choice = self.gated.choose(x.rows());
        self.forward_as(stream, choice, x, out)
    }

    /// As [`Self::forward`], with the gated linear layer by one way: for tuners.
    ///
    /// # Errors
    /// As [`GatedLinear::forward_by`].
    pub fn forward_by(
        &self,
        stream: &Stream,
        way: &Way,
        x: DeviceMatrixRef<'_, T>,
        out: DeviceMatrixMut<'_, T>,
    ) -> Result<()> {
        self.gated.expect_way(way, x.rows())?;
        self.forward_as(stream, way.choice, x, out)
    }

    fn forward_as(
        &self,
        stream: &Stream,
        choice: Choice,
        x: DeviceMatrixRef<'_, T>,
        out: DeviceMatrixMut<'_, T>,
    ) -> Result<()> {
        let (m, k, h) = (x.rows(), self.problem.hidden, self.problem.intermediate);
        self.gated.expect_call(stream, &x, &out, k)?;
        if m == 0 || k == 0 {
            return Ok(());
        }
        let down = self.down.linear();
        if h == 0 {
            let out = tensor(&out.as_ref());
            // SAFETY: `out` spans memory of this device and is borrowed mutably; the bias lives as
            // long as `self`.
            return unsafe { fill_rows(stream, T::DTYPE, out, [m, k], down.bias) };
        }
        let bytes = self.workspace_bytes(m, choice);
        self.cuda().with_workspace(stream, bytes, |workspace| {
            let scratch = workspace + self.h_bytes(m) as u64;
            let hidden = Tensor::new(workspace, self.h_stride());
            // SAFETY: the workspace has room for h and for what the steps use behind it; the
            // stream orders them.
            unsafe {
                self.gated.enqueue(stream, choice, x, hidden, scratch)?;
                let rows = DeviceMatrixMut::trusted(self.cuda(), workspace, m, self.h_stride());
                let h = rows.as_ref().cols_range(0..h)?;
                self.lt.launch(stream, h, &down, out, scratch)
            }
        })
    }

    /// [`Self::forward`] for matrices on the host, which are copied to the device and back.
    ///
    /// # Errors
    /// As [`Self::forward`].
    pub fn forward_host(&self, x: MatrixRef<'_, T>, out: MatrixMut<'_, T>) -> Result<()> {
        x.expect_shape("x", [x.rows(), self.problem.hidden])?;
        out.expect_shape("output", [x.rows(), self.problem.hidden])?;
        let stream = self.cuda().stream();
        let x = DeviceMatrix::from_host(&stream, x)?;
        let mut y = DeviceMatrix::new(&stream, x.rows(), self.problem.hidden)?;
        self.forward(&stream, x.view(), y.view_mut())?;
        y.view().download(&stream, out)
    }
}
