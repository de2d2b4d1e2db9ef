//! The two operations with weights, as types: what [`Layer`] and [`Weights`](crate::Weights) are
//! made of.

use swiglu_core::{
    Element, GatedLinearParams, GradientShapes, GradientsMut, MatrixMut, MatrixRef, MlpParams, Op,
    Path, Plan, QuantizedGatedLinearParams, QuantizedMlpParams, RowScale, SavePolicy, StridedRef,
};
use swiglu_cpu::CallOptions;

use crate::device::Device;
use crate::error::Result;
use crate::layer::{Common, Kernel, Layer};
use crate::training::{Params, Saved, Trains};
use crate::weights::{HostWeights, QuantizedWeights};
#[cfg(feature = "cuda")]
use {crate::layer::AnyKernel, crate::training::TrainsOn, std::sync::Arc};

/// An operation with weights. Sealed: [`GatedLinearKind`] and [`MlpKind`].
pub trait Kind: sealed::Sealed + Sized + 'static {
    /// The operation.
    const OP: Op;

    /// Packs weights for a device.
    ///
    /// # Errors
    /// If a part of the layer is missing or does not fit.
    fn pack<T: Element>(device: &Device, host: &HostWeights<'_, T>) -> Result<Layer<Self>>;

    /// Packs quantised weights for a device, for inputs and outputs of T.
    ///
    /// # Errors
    /// As [`Self::pack`], and if the device has no kernels for the type of the weights.
    fn pack_quantized<T: Element>(
        device: &Device,
        weights: &QuantizedWeights<'_>,
    ) -> Result<Layer<Self>>;
}

/// x → h = act(x·Wg + bg, x·Wu + bu).
#[derive(Debug, Clone, Copy)]
pub enum GatedLinearKind {}

/// x → y = h·Wd + bd.
#[derive(Debug, Clone, Copy)]
pub enum MlpKind {}

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::GatedLinearKind {}
    impl Sealed for super::MlpKind {}
}

impl Kind for GatedLinearKind {
    const OP: Op = Op::GatedLinear;

    fn pack<T: Element>(device: &Device, host: &HostWeights<'_, T>) -> Result<Layer<Self>> {
        Layer::<Self>::from_params(device, &host.gated_linear()?)
    }

    fn pack_quantized<T: Element>(
        device: &Device,
        weights: &QuantizedWeights<'_>,
    ) -> Result<Layer<Self>> {
        Layer::<Self>::from_quantized::<T>(device, &weights.gated_linear()?)
    }
}

impl Kind for MlpKind {
    const OP: Op = Op::Mlp;

    fn pack<T: Element>(device: &Device, host: &HostWeights<'_, T>) -> Result<Layer<Self>> {
        Layer::<Self>::from_params(device, &host.mlp()?)
    }

    fn pack_quantized<T: Element>(
        device: &Device,
        weights: &QuantizedWeights<'_>,
    ) -> Result<Layer<Self>> {
        Layer::<Self>::from_quantized::<T>(device, &weights.mlp()?)
    }
}

impl Layer<GatedLinearKind> {
    /// Packs weights in memory for a device, which computes each call in the way it expects to be
    /// the fastest.
    ///
    /// The values are taken as they are: NaN and infinities pass into results.
    /// [`MatrixRef::expect_finite`](swiglu_core::MatrixRef::expect_finite) looks for them beforehand. Whether square weights
    /// are `[out, in]` or `[in, out]` nothing can tell: they have the orientation that is said.
    ///
    /// # Errors
    /// [`swiglu_core::Error::Shape`] if a bias does not fit the weights; on a GPU, [`CudaError`](crate::cuda::CudaError)
    /// without memory for the weights or the libraries that compute with them.
    pub fn from_params<T: Element>(
        device: &Device,
        params: &GatedLinearParams<'_, T>,
    ) -> Result<Self> {
        Self::pack_params(device, params, None)
    }

    /// As [`Self::from_params`], by a chosen path: [`Path::Unfused`] is the yardstick that passes
    /// gate and up through memory as values of T: [`Rounding::Fused`](swiglu_core::Rounding::Fused) becomes
    /// [`Rounding::PreRound`](swiglu_core::Rounding::PreRound).
    ///
    /// # Errors
    /// As [`Self::from_params`].
    pub fn with_path<T: Element>(
        device: &Device,
        params: &GatedLinearParams<'_, T>,
        path: Path,
    ) -> Result<Self> {
        Self::pack_params(device, params, Some(path))
    }

    /// Packs quantised weights in memory for a device, which computes with them as they are, for inputs
    /// and outputs of T.
    ///
    /// # Errors
    /// As [`Self::from_params`]; [`swiglu_core::Error::Unsupported`] if the device has no kernels for
    /// the type of the weights: then decode them ([`QuantizedRef::to_matrix`](crate::QuantizedRef)).
    pub fn from_quantized<T: Element>(
        device: &Device,
        params: &QuantizedGatedLinearParams<'_>,
    ) -> Result<Self> {
        match device {
            Device::Cpu(cpu) => {
                let kernel = swiglu_cpu::GatedLinear::<T>::quantized(cpu, params)?;
                Self::new(device, Some(Path::Fused), kernel)
            }
            #[cfg(feature = "cuda")]
            Device::Cuda(_) => {
                let what = format!("{} with {} weights", Op::GatedLinear, params.gate.kind());
                let why = "a CUDA device has kernels for them in whole feed-forward blocks";
                Err(swiglu_core::Error::Unsupported { what, why: why.into() }.into())
            }
        }
    }

    /// A layer over weights in device memory that stay where they are: nothing is copied, and what is written to them is
    /// seen by the next call. Rows that begin at multiples of 16 bytes are taken by the fastest kernels.
    ///
    /// # Errors
    /// As [`Self::from_params`]; [`CudaError`](crate::cuda::CudaError) for memory of another device.
    ///
    /// # Safety
    /// Foreign memory stays valid until the layer is dropped and its work is done; that of a
    /// [`DeviceMatrix`](crate::cuda::DeviceMatrix) is kept. The kernel in front of a call on its stream does not write the
    /// weights if it is one of this crate's, or lets a programmatic dependent begin in another way, nor, where it is one of a
    /// layer with quantised weights, does the kernel in front of that layer; and no other thread enqueues a write to them while a call, or a launch of its graph, is being enqueued.
    #[cfg(feature = "cuda")]
    pub unsafe fn from_device<T: Element>(
        cuda: &crate::cuda::Cuda,
        params: &crate::cuda::DeviceGatedLinearParams<'_, T>,
    ) -> Result<Self> {
        // SAFETY: as the caller says.
        let kernel = unsafe { swiglu_cuda::GatedLinear::from_device(cuda, params) }?;
        Self::new(&Device::Cuda(cuda.clone()), None, kernel)
    }

    fn pack_params<T: Element>(
        device: &Device,
        params: &GatedLinearParams<'_, T>,
        path: Option<Path>,
    ) -> Result<Self> {
        match device {
            Device::Cpu(cpu) => {
                let path = path.unwrap_or(Path::Fused);
                let kernel = swiglu_cpu::GatedLinear::with_path(cpu, params, path)?;
                Self::new(device, Some(path), kernel)
            }
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => {
                let kernel = match path {
                    None => swiglu_cuda::GatedLinear::new(cuda, params)?,
                    Some(path) => swiglu_cuda::GatedLinear::with_path(cuda, params, path)?,
                };
                Self::new(device, path, kernel)
            }
        }
    }
}

impl Layer<MlpKind> {
    /// Packs weights in memory for a device, which computes each call in the way it expects to be
    /// the fastest.
    ///
    /// The values are taken as they are: NaN and infinities pass into results.
    /// [`MatrixRef::expect_finite`](swiglu_core::MatrixRef::expect_finite) looks for them beforehand. Whether square weights
    /// are `[out, in]` or `[in, out]` nothing can tell: they have the orientation that is said.
    ///
    /// # Errors
    /// [`swiglu_core::Error::Shape`] if the shapes disagree; on a GPU, [`CudaError`](crate::cuda::CudaError)
    /// without memory for the weights or the libraries that compute with them.
    pub fn from_params<T: Element>(device: &Device, params: &MlpParams<'_, T>) -> Result<Self> {
        Self::pack_params(device, params, None)
    }

    /// As [`Self::from_params`], by a chosen path: [`Path::Unfused`] is the yardstick that passes
    /// gate and up through memory as values of T: [`Rounding::Fused`](swiglu_core::Rounding::Fused) becomes
    /// [`Rounding::PreRound`](swiglu_core::Rounding::PreRound).
    ///
    /// # Errors
    /// As [`Self::from_params`].
    pub fn with_path<T: Element>(
        device: &Device,
        params: &MlpParams<'_, T>,
        path: Path,
    ) -> Result<Self> {
        Self::pack_params(device, params, Some(path))
    }

    /// Packs quantised weights in memory for a device, which computes with them as they are, for inputs
    /// and outputs of T. On a CUDA device, the types of [`Device::expect_quantized`] with f16 or bf16, for
    /// decoding: more than 16 tokens are computed 16 at a time, each time from all weights.
    ///
    /// # Errors
    /// As [`Self::from_params`]; [`swiglu_core::Error::Unsupported`] if the device has no kernels for
    /// the type of the weights: then decode them ([`QuantizedRef::to_matrix`](crate::QuantizedRef)).
    pub fn from_quantized<T: Element>(
        device: &Device,
        params: &QuantizedMlpParams<'_>,
    ) -> Result<Self> {
        match device {
            Device::Cpu(cpu) => {
                let kernel = swiglu_cpu::Mlp::<T>::quantized(cpu, params)?;
                Self::new(device, Some(Path::Fused), kernel)
            }
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => {
                use swiglu_cuda::CudaError;
                match swiglu_cuda::Mlp::<T>::from_quantized(cuda, params) {
                    Ok(kernel) => Self::new(device, Some(Path::Fused), kernel),
                    // As every backend says it.
                    Err(CudaError::Unsupported { what, why }) => {
                        Err(swiglu_core::Error::Unsupported { what, why }.into())
                    }
                    Err(error) => Err(error.into()),
                }
            }
        }
    }

    /// A layer over weights in device memory that stay where they are: nothing is copied, and what is written to them is
    /// seen by the next call. Rows that begin at multiples of 16 bytes are taken by the fastest kernels.
    ///
    /// # Errors
    /// As [`Self::from_params`]; [`CudaError`](crate::cuda::CudaError) for memory of another device.
    ///
    /// # Safety
    /// Foreign memory stays valid until the layer is dropped and its work is done; that of a
    /// [`DeviceMatrix`](crate::cuda::DeviceMatrix) is kept. The kernel in front of a call on its stream does not write the
    /// weights if it is one of this crate's, or lets a programmatic dependent begin in another way, nor, where it is one of a
    /// layer with quantised weights, does the kernel in front of that layer; and no other thread enqueues a write to them while a call, or a launch of its graph, is being enqueued.
    #[cfg(feature = "cuda")]
    pub unsafe fn from_device<T: Element>(
        cuda: &crate::cuda::Cuda,
        params: &crate::cuda::DeviceMlpParams<'_, T>,
    ) -> Result<Self> {
        // SAFETY: as the caller says.
        let kernel = unsafe { swiglu_cuda::Mlp::from_device(cuda, params) }?;
        Self::new(&Device::Cuda(cuda.clone()), None, kernel)
    }

    /// Adds y, each row with its factor, to what `out` `[M, K]` holds, in f32: a residual, or an expert's share of its
    /// tokens. y is not rounded to T on the way, and a factor costs no rounding of its own.
    ///
    /// ```
    /// use swiglu::{Device, Matrix, Mlp, RowScale};
    ///
    /// let mlp = Mlp::load(swiglu_fixtures::STORIES15M_FILE, 0)?.to(&Device::cpu()?)?;
    /// let x = Matrix::from_vec(vec![0.5f32; 2 * 288], 2, 288)?;
    /// let mut sum = x.try_clone()?;
    /// mlp.forward_add_into(&x, RowScale::Rows(&[1.0, 0.25]), &mut sum)?; // sum = x + scale ⊙ y
    /// let y = mlp.forward(&x)?;
    /// assert_eq!(sum[(1, 0)], y[(1, 0)].mul_add(0.25, x[(1, 0)]));
    /// # Ok::<(), swiglu::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Self::forward_into`]; [`swiglu_core::Error::Shape`] for another number of factors than rows;
    /// [`swiglu_core::Error::Unsupported`] on a CUDA device, whose kernels write y.
    pub fn forward_add_into<'x, 'out, T: Element>(
        &self,
        x: impl Into<MatrixRef<'x, T>>,
        scale: RowScale<'_>,
        out: impl Into<MatrixMut<'out, f32>>,
    ) -> Result<()> {
        self.typed::<T>("x")?.forward_add(x.into(), scale, out.into(), &CallOptions::default())
    }

    fn pack_params<T: Element>(
        device: &Device,
        params: &MlpParams<'_, T>,
        path: Option<Path>,
    ) -> Result<Self> {
        match device {
            Device::Cpu(cpu) => {
                let path = path.unwrap_or(Path::Fused);
                let kernel = swiglu_cpu::Mlp::with_path(cpu, params, path)?;
                Self::new(device, Some(path), kernel)
            }
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => {
                let kernel = match path {
                    None => swiglu_cuda::Mlp::new(cuda, params)?,
                    Some(path) => swiglu_cuda::Mlp::with_path(cuda, params, path)?,
                };
                Self::new(device, path, kernel)
            }
        }
    }
}

macro_rules! cpu_kernel {
    ($($Layer:ident { $($more:item)* }),*) => {
        $(impl<T: Element> Common for swiglu_cpu::$Layer<T> {
            fn plan(&self, m: usize) -> Plan {
                self.plan(m)
            }
            fn weight_bytes(&self) -> usize {
                self.weight_bytes()
            }
            fn workspace_bytes(&self, m: usize) -> usize {
                self.workspace_bytes(m)
            }
            fn reserve(&self, m: usize, callers: usize) -> Result<()> {
                Ok(self.reserve(m, callers)?)
            }
        }
        impl<T: Element> Kernel<T> for swiglu_cpu::$Layer<T> {
            fn forward(
                &self,
                x: MatrixRef<'_, T>,
                out: MatrixMut<'_, T>,
                options: &CallOptions,
            ) -> Result<()> {
                Ok(self.forward_opts(x, out, options)?)
            }
            fn training(&self) -> Option<&dyn Trains<T>> {
                Some(self)
            }
            fn update(&mut self, params: Params<'_, '_, T>) -> Option<Result<()>> {
                match params {
                    Params::$Layer(params) => Some(self.update(params).map_err(Into::into)),
                    _ => None,
                }
            }
            $($more)*
        }
        impl<T: Element> Trains<T> for swiglu_cpu::$Layer<T> {
            fn policy(&self) -> Result<SavePolicy> {
                Ok(self.policy()?)
            }
            fn expect_update(&self, params: Params<'_, '_, T>) -> Result<()> {
                match params {
                    Params::$Layer(params) => Ok(self.expect_update(params)?),
                    other => Ok(self.plan(0).problem.expect_update(&other.problem())?),
                }
            }
            fn shapes(&self) -> Result<GradientShapes> {
                Ok(self.gradient_shapes()?)
            }
            fn forward_train<'x>(
                &self,
                x: MatrixRef<'x, T>,
                out: MatrixMut<'_, T>,
                options: &CallOptions,
            ) -> Result<Saved<'x, T>> {
                Ok(Saved::on_cpu(self.forward_train(x, out, options)?))
            }
            fn backward_into(
                &self,
                saved: Saved<'_, T>,
                dy: StridedRef<'_, T>,
                into: GradientsMut<'_, T>,
                options: &CallOptions,
            ) -> Result<()> {
                Ok(self.backward_into(saved.of_cpu()?, dy, into, options)?)
            }
        })*
    };
}
cpu_kernel!(GatedLinear {}, Mlp {
    fn forward_add(
        &self,
        x: MatrixRef<'_, T>,
        scale: RowScale<'_>,
        out: MatrixMut<'_, f32>,
        options: &CallOptions,
    ) -> Result<()> {
        Ok(self.forward_add(x, scale, out, options)?)
    }
});

#[cfg(feature = "cuda")]
impl<K: 'static, T: Element> Common for swiglu_cuda::Layer<K, T> {
    fn plan(&self, m: usize) -> Plan {
        self.plan(m)
    }
    fn weight_bytes(&self) -> usize {
        self.weight_bytes()
    }
    fn workspace_bytes(&self, m: usize) -> usize {
        self.workspace_bytes(m)
    }
    fn reserve(&self, m: usize, _: usize) -> Result<()> {
        Ok(self.reserve(&self.cuda().stream(), m)?)
    }
    fn packed_on(&self, stream: &swiglu_cuda::Stream) -> Result<Option<AnyKernel>> {
        // What is packed already has bytes of its own.
        if self.weight_bytes() > 0 {
            return Ok(None);
        }
        Ok(AnyKernel::new::<T>(Arc::new(self.packed(stream)?)))
    }
    fn reserve_on(&self, stream: &swiglu_cuda::Stream, m: usize) -> Result<()> {
        Ok(self.reserve(stream, m)?)
    }
}
#[cfg(feature = "cuda")]
impl<K: 'static, T: Element> Kernel<T> for swiglu_cuda::Layer<K, T> {
    fn training(&self) -> Option<&dyn Trains<T>> {
        self.policy().map(|_| self as &dyn Trains<T>)
    }
    fn training_on(&self) -> Option<&dyn TrainsOn<T>> {
        Some(self)
    }
    fn forward(
        &self,
        x: MatrixRef<'_, T>,
        out: MatrixMut<'_, T>,
        options: &CallOptions,
    ) -> Result<()> {
        // The caller is the one thread of the host: every limit is kept.
        options.validate()?;
        Ok(self.forward_host(x, out)?)
    }
    fn forward_on(
        &self,
        stream: &swiglu_cuda::Stream,
        x: swiglu_cuda::DeviceMatrixRef<'_, T>,
        out: swiglu_cuda::DeviceMatrixMut<'_, T>,
        scratch: Option<&mut swiglu_cuda::DeviceScratch<'_>>,
    ) -> Result<()> {
        match scratch {
            None => self.forward(stream, x, out)?,
            Some(scratch) => self.forward_with(stream, x, out, scratch)?,
        }
        Ok(())
    }
    fn capture_on(
        &self,
        stream: &swiglu_cuda::Stream,
        x: swiglu_cuda::DeviceMatrix<T>,
        out: swiglu_cuda::DeviceMatrix<T>,
    ) -> Result<swiglu_cuda::CapturedCall<T>> {
        Ok(self.capture(stream, x, out)?)
    }
}

#[cfg(feature = "cuda")]
impl<K: 'static, T: Element> Trains<T> for swiglu_cuda::Layer<K, T> {
    fn policy(&self) -> Result<SavePolicy> {
        let unsaid = || crate::training::refused("layer", "a CUDA device");
        Ok(self.policy().ok_or_else(unsaid)?)
    }
    fn expect_update(&self, params: Params<'_, '_, T>) -> Result<()> {
        Ok(self.expect_update(&params.problem(), params.down_orientation())?)
    }
    fn shapes(&self) -> Result<GradientShapes> {
        Ok(self.gradient_shapes()?)
    }
    fn forward_train<'x>(
        &self,
        x: MatrixRef<'x, T>,
        out: MatrixMut<'_, T>,
        options: &CallOptions,
    ) -> Result<Saved<'x, T>> {
        options.validate()?;
        Ok(Saved::on_cuda(self.forward_saving_host(x, out)?))
    }
    fn backward_into(
        &self,
        saved: Saved<'_, T>,
        dy: StridedRef<'_, T>,
        into: GradientsMut<'_, T>,
        options: &CallOptions,
    ) -> Result<()> {
        options.validate()?;
        Ok(self.backward_host(saved.of_cuda()?, dy, into)?)
    }
}
