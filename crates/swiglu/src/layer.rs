//! A layer whose weights are packed for a device.

use std::any::Any;
use std::fmt::Debug;
use std::marker::PhantomData;
use std::path::Path as FilePath;
use std::sync::Arc;

use crate::unsupported_dtype;
use swiglu_core::{
    Activation, DType, Element, Error as CoreError, Matrix, MatrixMut, MatrixRef, Numerics, Op,
    Path, Plan, Problem, RowScale, bf16, f16,
};
use swiglu_cpu::CallOptions;
use swiglu_formats::{Bytes, LoadOptions};

#[cfg(feature = "cuda")]
use crate::cuda;
use crate::device::Device;
use crate::error::Result;
use crate::explain::Explanation;
use crate::kind::Kind;
#[cfg(feature = "cuda")]
use crate::training::TrainsOn;
use crate::training::{Params, Trains};
use crate::weights::Weights;

/// What a backend provides, whatever the element type.
pub(crate) trait Common: Debug + Send + Sync {
    fn plan(&self, m: usize) -> Plan;
    fn weight_bytes(&self) -> usize;
    fn workspace_bytes(&self, m: usize) -> usize;
    fn reserve(&self, m: usize, callers: usize) -> Result<()>;
    /// The same over a copy of lent weights; nothing where it has its own.
    #[cfg(feature = "cuda")]
    fn packed_on(&self, _stream: &cuda::Stream) -> Result<Option<AnyKernel>> {
        Err(not_on_cuda())
    }
    #[cfg(feature = "cuda")]
    fn reserve_on(&self, _stream: &cuda::Stream, _m: usize) -> Result<()> {
        Err(not_on_cuda())
    }
}

/// What a backend provides for one element type.
pub(crate) trait Kernel<T>: Common {
    fn forward(
        &self,
        x: MatrixRef<'_, T>,
        out: MatrixMut<'_, T>,
        options: &CallOptions,
    ) -> Result<()>;
    fn forward_add(
        &self,
        _x: MatrixRef<'_, T>,
        _scale: RowScale<'_>,
        _out: MatrixMut<'_, f32>,
        _options: &CallOptions,
    ) -> Result<()> {
        Err(CoreError::Unsupported {
            what: "adding a result to another matrix on this device".into(),
            why:
                "its kernels write results; compute into a matrix (forward_into) and add that, or \
                  pack the layer for the CPU"
                    .into(),
        }
        .into())
    }
    /// The training of layers, where the backend has it.
    fn training(&self) -> Option<&dyn Trains<T>> {
        None
    }
    /// Other values of the weights; nothing where this is no layer that was made for training.
    fn update(&mut self, _params: Params<'_, '_, T>) -> Option<Result<()>> {
        None
    }
    /// The training of layers over matrices in the device's memory, where the backend has it.
    #[cfg(feature = "cuda")]
    fn training_on(&self) -> Option<&dyn TrainsOn<T>> {
        None
    }
    #[cfg(feature = "cuda")]
    fn forward_on(
        &self,
        _stream: &cuda::Stream,
        _x: cuda::DeviceMatrixRef<'_, T>,
        _out: cuda::DeviceMatrixMut<'_, T>,
        _scratch: Option<&mut cuda::DeviceScratch<'_>>,
    ) -> Result<()> {
        Err(not_on_cuda())
    }
    #[cfg(feature = "cuda")]
    fn capture_on(
        &self,
        _stream: &cuda::Stream,
        _x: cuda::DeviceMatrix<T>,
        _out: cuda::DeviceMatrix<T>,
    ) -> Result<cuda::CapturedCall<T>> {
        Err(not_on_cuda())
    }
}

#[cfg(feature = "cuda")]
pub(crate) fn not_on_cuda() -> crate::Error {
    CoreError::Unsupported {
        what: "a CUDA stream for a layer on the CPU".into(),
        why: "its weights are in the host's memory; pack it for a CUDA device".into(),
    }
    .into()
}

/// A kernel whose element type is only known at run time.
#[derive(Debug, Clone)]
pub(crate) enum AnyKernel {
    F32(Arc<dyn Kernel<f32>>),
    F16(Arc<dyn Kernel<f16>>),
    Bf16(Arc<dyn Kernel<bf16>>),
}

impl AnyKernel {
    pub(crate) fn new<T: Element>(kernel: Arc<dyn Kernel<T>>) -> Option<Self> {
        let kernel: &dyn Any = &kernel;
        let f32 = || kernel.downcast_ref().cloned().map(Self::F32);
        let f16 = || kernel.downcast_ref().cloned().map(Self::F16);
        let bf16 = || kernel.downcast_ref().cloned().map(Self::Bf16);
        f32().or_else(f16).or_else(bf16)
    }

    fn common(&self) -> &dyn Common {
        match self {
            Self::F32(kernel) => &**kernel,
            Self::F16(kernel) => &**kernel,
            Self::Bf16(kernel) => &**kernel,
        }
    }

    /// The kernel, where nothing else has it.
    pub(crate) fn unique<T: Element>(&mut self) -> Option<&mut (dyn Kernel<T> + 'static)> {
        let kernel: &mut dyn Any = match self {
            Self::F32(kernel) => kernel,
            Self::F16(kernel) => kernel,
            Self::Bf16(kernel) => kernel,
        };
        kernel.downcast_mut::<Arc<dyn Kernel<T>>>().and_then(Arc::get_mut)
    }

    fn typed<T: Element>(&self) -> Option<&dyn Kernel<T>> {
        let kernel: &dyn Any = match self {
            Self::F32(kernel) => kernel,
            Self::F16(kernel) => kernel,
            Self::Bf16(kernel) => kernel,
        };
        kernel.downcast_ref::<Arc<dyn Kernel<T>>>().map(|kernel| &**kernel)
    }
}

/// A layer packed for a [`Device`], of an element type chosen at run time: use it as
/// [`GatedLinear`](crate::GatedLinear) or [`Mlp`](crate::Mlp).
///
/// It can be shared between threads; calls from several threads at once are sound and share the
/// device's threads. Clones are the same layer.
#[derive(Debug)]
pub struct Layer<K> {
    device: Device,
    pub(crate) problem: Problem,
    /// The path that was asked for.
    pub(crate) path: Option<Path>,
    pub(crate) kernel: AnyKernel,
    /// Why quantised weights were decoded, where they were.
    decoded: Option<crate::Error>,
    kind: PhantomData<fn() -> K>,
}

// Of every kind: what a derive makes is only of kinds that are cloned.
impl<K> Clone for Layer<K> {
    fn clone(&self) -> Self {
        Self {
            device: self.device.clone(),
            problem: self.problem,
            path: self.path,
            kernel: self.kernel.clone(),
            decoded: self.decoded.clone(),
            kind: PhantomData,
        }
    }
}

impl<K: Kind> Layer<K> {
    /// Opens layer `layer` of a safetensors or GGUF file, or of a directory with a model in it.
    /// Nothing is decoded before [`Weights::to`].
    ///
    /// # Errors
    /// [`FormatError`](crate::FormatError).
    pub fn load(path: impl AsRef<FilePath>, layer: usize) -> Result<Weights<K>> {
        Self::load_with(path, &LoadOptions::new(layer))
    }

    /// As [`Self::load`], for experts, explicit tensor names and ambiguous layouts.
    ///
    /// # Errors
    /// [`FormatError`](crate::FormatError).
    pub fn load_with(path: impl AsRef<FilePath>, options: &LoadOptions) -> Result<Weights<K>> {
        Ok(Weights::new(swiglu_formats::load_layer(path.as_ref(), options)?))
    }

    /// As [`Self::load_with`], from a file that is already in memory.
    ///
    /// # Errors
    /// [`FormatError`](crate::FormatError).
    pub fn load_from_bytes(bytes: impl Into<Bytes>, options: &LoadOptions) -> Result<Weights<K>> {
        Ok(Weights::new(swiglu_formats::load_layer_from_bytes(bytes, options)?))
    }

    pub(crate) fn new<T: Element>(
        device: &Device,
        path: Option<Path>,
        kernel: impl Kernel<T> + 'static,
    ) -> Result<Self> {
        let problem = kernel.plan(0).problem;
        let kernel = AnyKernel::new::<T>(Arc::new(kernel));
        Ok(Self {
            device: device.clone(),
            problem,
            path,
            kernel: kernel.ok_or_else(|| unsupported_dtype(T::DTYPE))?,
            decoded: None,
            kind: PhantomData,
        })
    }

    /// Notes why quantised weights were decoded.
    pub(crate) fn because_decoded(self, why: crate::Error) -> Self {
        Self { decoded: Some(why), ..self }
    }

    /// The device the weights are packed for.
    pub fn device(&self) -> &Device {
        &self.device
    }
    /// The element type of inputs and outputs.
    pub fn dtype(&self) -> DType {
        self.problem.dtype
    }
    /// K, the number of input features.
    pub fn hidden(&self) -> usize {
        self.problem.hidden
    }
    /// H, the number of intermediate features.
    pub fn intermediate(&self) -> usize {
        self.problem.intermediate
    }
    /// The activation.
    pub fn activation(&self) -> Activation {
        self.problem.activation
    }
    /// Where values are rounded.
    pub fn numerics(&self) -> Numerics {
        self.problem.numerics
    }
    /// Columns of the output: H for a gated linear layer, K for a feed-forward block.
    pub fn out_features(&self) -> usize {
        if K::OP == Op::Mlp { self.hidden() } else { self.intermediate() }
    }

    /// How `m` tokens will be computed. `problem.quantized` names the types of weights that are computed
    /// with as they are; where quantised weights were decoded, the reason says why.
    pub fn plan(&self, m: usize) -> Plan {
        let mut plan = self.kernel.common().plan(m);
        if let Some(why) = &self.decoded {
            let and = if plan.reason.is_empty() { "" } else { "; " };
            plan.reason += &format!("{and}weights decoded to {}: {why}", self.dtype());
        }
        plan
    }

    /// The plan for `m` tokens, what it was chosen from, and what the problem costs at least.
    pub fn explain(&self, m: usize) -> Explanation {
        let explanation = Explanation::new(&self.device, self.kernel.common().plan(m), self.path);
        match &self.decoded {
            Some(why) => explanation.with_decoded_weights(why),
            None => explanation,
        }
    }

    /// This layer over weights of its own: where they are lent, as by `from_device`, they are copied and packed once, through
    /// the host, behind what `stream` has been given to do, and no longer seen when they change. Lent weights cost nothing
    /// where they lie as packed ones do; other
    /// layouts may take longer ([what each costs](https://github.com/swiglu/swiglu/blob/main/docs/lent-weights.md)).
    ///
    /// # Errors
    /// As packing weights; [`swiglu_core::Error::Unsupported`] for a layer of another device than CUDA's.
    #[cfg(feature = "cuda")]
    pub fn packed_on(&self, stream: &cuda::Stream) -> Result<Self> {
        Ok(match self.kernel.common().packed_on(stream)? {
            Some(kernel) => Self { kernel, ..self.clone() },
            None => self.clone(),
        })
    }

    /// Bytes of the packed weights and biases, in the device's memory.
    pub fn weight_bytes(&self) -> usize {
        self.kernel.common().weight_bytes()
    }

    /// Bytes of working memory that a call takes. A CPU's layers share the memory of their device, and this is for up to
    /// `m` tokens; on a CUDA device it belongs to the stream, and this is for `m`.
    pub fn workspace_bytes(&self, m: usize) -> usize {
        self.kernel.common().workspace_bytes(m)
    }

    /// Makes ready what so many calls at the same time take: none of them then allocates memory to work in. On a CPU
    /// these are calls of up to `m` tokens of any layer that takes no more than this one. On a CUDA device they are calls of
    /// `m` tokens on its default stream, where they take turns, so that their number does not matter; see
    /// [`Self::reserve_on`] for others.
    ///
    /// Without it, calls make what they lack and leave it to later ones; on a CPU until [`Device::trim`].
    ///
    /// # Errors
    /// [`swiglu_core::Error::OutOfMemory`] if the system refuses it; [`CudaError`](crate::cuda::CudaError) if a CUDA device does, or
    /// if a kernel cannot be compiled.
    pub fn reserve(&self, m: usize, callers: usize) -> Result<()> {
        self.kernel.common().reserve(m, callers)
    }

    /// The kernel, where `what` has its element type.
    pub(crate) fn typed<T: Element>(&self, what: &str) -> Result<&dyn Kernel<T>> {
        self.kernel.typed().ok_or_else(|| {
            let (expected, given) = (self.dtype(), T::DTYPE);
            CoreError::DType { what: what.into(), expected, given }.into()
        })
    }

    /// The result for x `[M, K]` in a new matrix.
    ///
    /// # Errors
    /// [`swiglu_core::Error::DType`] if `T` is not [`Self::dtype`];
    /// [`swiglu_core::Error::Shape`] if x does not have K columns.
    pub fn forward<'x, T: Element>(&self, x: impl Into<MatrixRef<'x, T>>) -> Result<Matrix<T>> {
        let (kernel, x) = (self.typed::<T>("x")?, x.into());
        x.expect_shape("x", [x.rows(), self.hidden()])?;
        let mut out = Matrix::zeros(x.rows(), self.out_features())?;
        kernel.forward(x, out.view_mut(), &CallOptions::default())?;
        Ok(out)
    }

    /// Writes the result for x `[M, K]` into `out`. The working memory of an earlier call of this size is
    /// used again: with one thread nothing is allocated, with several a few bytes per thread, in
    /// which the pool notes its jobs.
    ///
    /// # Errors
    /// As [`Self::forward`], and [`swiglu_core::Error::Shape`] if `out` has another shape than
    /// `[M, out_features]`.
    pub fn forward_into<'x, 'out, T: Element>(
        &self,
        x: impl Into<MatrixRef<'x, T>>,
        out: impl Into<MatrixMut<'out, T>>,
    ) -> Result<()> {
        self.forward_opts(x, out, &CallOptions::default())
    }

    /// Writes the result as [`Self::forward_into`], within the limits of one call. A limit of threads is one of the
    /// host's: on a CUDA device the caller is the only one of them, so that every limit is kept.
    ///
    /// ```
    /// use swiglu::{CallOptions, Device, Matrix, Mlp};
    ///
    /// # let file = swiglu_fixtures::STORIES15M_FILE;
    /// # let mlp = Mlp::load(file, 0)?.to(&Device::cpu()?)?;
    /// let x = Matrix::<f32>::zeros(1, mlp.hidden())?;
    /// let mut y = Matrix::<f32>::zeros(1, mlp.hidden())?;
    /// // This caller alone: its time does not depend on whether the device's threads are free.
    /// mlp.forward_opts(&x, &mut y, &CallOptions::default().with_max_threads(1))?;
    /// # Ok::<(), swiglu::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Self::forward_into`], and [`swiglu_core::Error::OutOfRange`] for no threads.
    pub fn forward_opts<'x, 'out, T: Element>(
        &self,
        x: impl Into<MatrixRef<'x, T>>,
        out: impl Into<MatrixMut<'out, T>>,
        options: &CallOptions,
    ) -> Result<()> {
        self.typed::<T>("x")?.forward(x.into(), out.into(), options)
    }

    /// Enqueues the layer on a CUDA stream, for x and `out` in the device's memory: returns before
    /// the work is done, and allocates nothing once the stream's workspace has the size for it.
    ///
    /// # Errors
    /// As [`Self::forward_into`]; [`swiglu_core::Error::Unsupported`] for a layer on the CPU;
    /// [`CudaError`](crate::cuda::CudaError) for a stream or memory of another device, or if a kernel cannot be
    /// compiled or launched.
    #[cfg(feature = "cuda")]
    pub fn forward_on<T: Element>(
        &self,
        stream: &cuda::Stream,
        x: cuda::DeviceMatrixRef<'_, T>,
        out: cuda::DeviceMatrixMut<'_, T>,
    ) -> Result<()> {
        self.typed::<T>("x")?.forward_on(stream, x, out, None)
    }

    /// As [`Self::forward_on`], in scratch memory of the caller, of at least [`Self::workspace_bytes`]: warmed up on one
    /// stream, the same call can be captured by other code on another, and its graph launched on a third.
    ///
    /// # Errors
    /// As [`Self::forward_on`]; [`swiglu_core::Error::OutOfRange`] for too little scratch memory.
    #[cfg(feature = "cuda")]
    pub fn forward_with<T: Element>(
        &self,
        stream: &cuda::Stream,
        x: cuda::DeviceMatrixRef<'_, T>,
        out: cuda::DeviceMatrixMut<'_, T>,
        scratch: &mut cuda::DeviceScratch<'_>,
    ) -> Result<()> {
        self.typed::<T>("x")?.forward_on(stream, x, out, Some(scratch))
    }

    /// Captures a call with `x` on `stream` as a graph that owns both matrices and keeps the weights: it can be launched on
    /// every stream, also after this layer was dropped. Several layers in one graph: [`cuda::Stream::capture`].
    ///
    /// # Errors
    /// As [`Self::forward_on`]; [`cuda::CudaError::Capture`].
    #[cfg(feature = "cuda")]
    pub fn capture_on<T: Element>(
        &self,
        stream: &cuda::Stream,
        x: cuda::DeviceMatrix<T>,
        out: cuda::DeviceMatrix<T>,
    ) -> Result<cuda::CapturedCall<T>> {
        self.typed::<T>("x")?.capture_on(stream, x, out)
    }

    /// Compiles what calls with `m` tokens need and gives the stream's workspace the size for
    /// them: after it, [`Self::forward_on`] can be captured into a graph.
    ///
    /// # Errors
    /// As [`Self::forward_on`].
    #[cfg(feature = "cuda")]
    pub fn reserve_on(&self, stream: &cuda::Stream, m: usize) -> Result<()> {
        self.kernel.common().reserve_on(stream, m)
    }
}
