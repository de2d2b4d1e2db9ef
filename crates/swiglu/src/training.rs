//! Training: a forward pass that keeps what the backward pass needs, and the gradients.
//!
//! What a backend provides for it is [`Trains`], for matrices of the host, and [`TrainsOn`], for a device's; a layer without is
//! refused in [`refused`], and nowhere else.

#[cfg(feature = "cuda")]
use swiglu_core::Orientation;
use swiglu_core::{
    Element, Error as CoreError, GatedLinearParams, GradientShapes, Gradients, GradientsMut,
    Matrix, MatrixMut, MatrixRef, MlpParams, Path, Problem, SavePolicy, StridedRef, Wanted,
};
use swiglu_cpu::CallOptions;

#[cfg(feature = "cuda")]
use crate::cuda;
use crate::device::Device;
use crate::error::Result;
use crate::kind::{GatedLinearKind, Kind, MlpKind};
use crate::layer::Layer;

/// What a backend provides to train layers of one element type.
pub(crate) trait Trains<T> {
    fn policy(&self) -> Result<SavePolicy>;
    /// Refuses parameters of which more than the values differ from the layer's.
    fn expect_update(&self, params: Params<'_, '_, T>) -> Result<()>;
    fn shapes(&self) -> Result<GradientShapes>;
    fn forward_train<'x>(
        &self,
        x: MatrixRef<'x, T>,
        out: MatrixMut<'_, T>,
        options: &CallOptions,
    ) -> Result<Saved<'x, T>>;
    fn backward_into(
        &self,
        saved: Saved<'_, T>,
        dy: StridedRef<'_, T>,
        into: GradientsMut<'_, T>,
        options: &CallOptions,
    ) -> Result<()>;
}

/// What a CUDA layer provides to be trained over matrices in the device's memory.
#[cfg(feature = "cuda")]
pub(crate) trait TrainsOn<T> {
    fn training_bytes(&self, m: usize, policy: SavePolicy) -> usize;
    fn backward_gate_up_bytes(&self, m: usize) -> usize;
    fn backward_bytes(
        &self,
        dy: &cuda::DeviceMatrixRef<'_, T>,
        kept: &cuda::DeviceKept<'_, T>,
        into: &cuda::DeviceGradientsMut<'_, T>,
    ) -> Result<usize>;
    fn forward_saving(
        &self,
        stream: &cuda::Stream,
        x: cuda::DeviceMatrixRef<'_, T>,
        out: cuda::DeviceMatrixMut<'_, T>,
        kept: cuda::DeviceKeptMut<'_, T>,
        scratch: Option<&mut cuda::DeviceScratch<'_>>,
    ) -> Result<()>;
    fn pre_activations(
        &self,
        stream: &cuda::Stream,
        x: cuda::DeviceMatrixRef<'_, T>,
        kept: cuda::DeviceKeptMut<'_, T>,
        scratch: Option<&mut cuda::DeviceScratch<'_>>,
    ) -> Result<()>;
    fn backward_gate_up(
        &self,
        stream: &cuda::Stream,
        dy: cuda::DeviceMatrixRef<'_, T>,
        kept: [cuda::DeviceMatrixRef<'_, T>; 2],
        grads: [cuda::DeviceMatrixMut<'_, T>; 2],
        h: Option<cuda::DeviceMatrixMut<'_, T>>,
        scratch: Option<&mut cuda::DeviceScratch<'_>>,
    ) -> Result<()>;
    fn backward(
        &self,
        stream: &cuda::Stream,
        x: cuda::DeviceMatrixRef<'_, T>,
        dy: cuda::DeviceMatrixRef<'_, T>,
        kept: cuda::DeviceKept<'_, T>,
        into: cuda::DeviceGradientsMut<'_, T>,
        scratch: Option<&mut cuda::DeviceScratch<'_>>,
    ) -> Result<()>;
}

#[cfg(feature = "cuda")]
impl<K, T: Element> TrainsOn<T> for swiglu_cuda::Layer<K, T> {
    fn training_bytes(&self, m: usize, policy: SavePolicy) -> usize {
        self.training_bytes(m, policy)
    }
    fn backward_gate_up_bytes(&self, m: usize) -> usize {
        self.backward_gate_up_bytes(m)
    }
    fn backward_bytes(
        &self,
        dy: &cuda::DeviceMatrixRef<'_, T>,
        kept: &cuda::DeviceKept<'_, T>,
        into: &cuda::DeviceGradientsMut<'_, T>,
    ) -> Result<usize> {
        Ok(self.backward_bytes(dy, kept, into)?)
    }
    fn forward_saving(
        &self,
        stream: &cuda::Stream,
        x: cuda::DeviceMatrixRef<'_, T>,
        out: cuda::DeviceMatrixMut<'_, T>,
        kept: cuda::DeviceKeptMut<'_, T>,
        scratch: Option<&mut cuda::DeviceScratch<'_>>,
    ) -> Result<()> {
        Ok(match scratch {
            Some(scratch) => self.forward_saving_with(stream, x, out, kept, scratch),
            None => self.forward_saving(stream, x, out, kept),
        }?)
    }
    fn pre_activations(
        &self,
        stream: &cuda::Stream,
        x: cuda::DeviceMatrixRef<'_, T>,
        kept: cuda::DeviceKeptMut<'_, T>,
        scratch: Option<&mut cuda::DeviceScratch<'_>>,
    ) -> Result<()> {
        Ok(self.pre_activations(stream, x, kept, scratch)?)
    }
    fn backward_gate_up(
        &self,
        stream: &cuda::Stream,
        dy: cuda::DeviceMatrixRef<'_, T>,
        kept: [cuda::DeviceMatrixRef<'_, T>; 2],
        grads: [cuda::DeviceMatrixMut<'_, T>; 2],
        h: Option<cuda::DeviceMatrixMut<'_, T>>,
        scratch: Option<&mut cuda::DeviceScratch<'_>>,
    ) -> Result<()> {
        Ok(self.backward_gate_up(stream, dy, kept, grads, h, scratch)?)
    }
    fn backward(
        &self,
        stream: &cuda::Stream,
        x: cuda::DeviceMatrixRef<'_, T>,
        dy: cuda::DeviceMatrixRef<'_, T>,
        kept: cuda::DeviceKept<'_, T>,
        into: cuda::DeviceGradientsMut<'_, T>,
        scratch: Option<&mut cuda::DeviceScratch<'_>>,
    ) -> Result<()> {
        Ok(self.backward(stream, x, dy, kept, into, scratch)?)
    }
}

/// The parameters of either kind of layer.
#[derive(Clone, Copy)]
pub(crate) enum Params<'p, 'a, T> {
    GatedLinear(&'p GatedLinearParams<'a, T>),
    Mlp(&'p MlpParams<'a, T>),
}

impl<T: Element> Params<'_, '_, T> {
    pub(crate) fn problem(&self) -> Problem {
        match self {
            Self::GatedLinear(params) => params.problem(0),
            Self::Mlp(params) => params.problem(0),
        }
    }

    /// That of gate and up where there is no down projection.
    #[cfg(feature = "cuda")]
    pub(crate) fn down_orientation(&self) -> Orientation {
        match self {
            Self::GatedLinear(params) => params.weights.layout().orientation,
            Self::Mlp(params) => params.down_orientation,
        }
    }
}

/// Why a layer does not train.
pub(crate) fn refused(op: impl std::fmt::Display, device: &str) -> CoreError {
    CoreError::Unsupported {
        what: format!("training of this {op} on {device}"),
        why: "it was made for forward passes; make it by for_training".into(),
    }
}

/// What a forward pass leaves for the backward pass that takes it: x, borrowed or copied, and of gate and up what the
/// layer's [`SavePolicy`] says.
#[derive(Debug)]
pub struct Saved<'x, T>(On<'x, T>);

#[derive(Debug)]
enum On<'x, T> {
    Cpu(swiglu_cpu::Saved<'x, T>),
    #[cfg(feature = "cuda")]
    Cuda(swiglu_cuda::HostSaved<T>),
}

impl<'x, T: Element> Saved<'x, T> {
    pub(crate) fn on_cpu(saved: swiglu_cpu::Saved<'x, T>) -> Self {
        Self(On::Cpu(saved))
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn on_cuda(saved: swiglu_cuda::HostSaved<T>) -> Self {
        Self(On::Cuda(saved))
    }

    pub(crate) fn of_cpu(self) -> Result<swiglu_cpu::Saved<'x, T>> {
        match self.0 {
            On::Cpu(saved) => Ok(saved),
            #[cfg(feature = "cuda")]
            On::Cuda(_) => Err(of_another_device("a CUDA device", "the CPU").into()),
        }
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn of_cuda(self) -> Result<swiglu_cuda::HostSaved<T>> {
        match self.0 {
            On::Cuda(saved) => Ok(saved),
            On::Cpu(_) => Err(of_another_device("the CPU", "a CUDA device").into()),
        }
    }

    /// Tokens.
    pub fn tokens(&self) -> usize {
        match &self.0 {
            On::Cpu(saved) => saved.tokens(),
            #[cfg(feature = "cuda")]
            On::Cuda(saved) => saved.tokens(),
        }
    }

    /// Bytes that are kept between the passes, beside x.
    pub fn kept_bytes(&self) -> usize {
        match &self.0 {
            On::Cpu(saved) => saved.kept_bytes(),
            #[cfg(feature = "cuda")]
            On::Cuda(saved) => saved.kept_bytes(),
        }
    }

    /// The same with a copy of x, which may then change or go. On a CUDA device it is one already.
    ///
    /// # Errors
    /// [`CoreError::OutOfMemory`] if there is no memory for it.
    pub fn into_owned(self) -> Result<Saved<'static, T>> {
        Ok(Saved(match self.0 {
            On::Cpu(saved) => On::Cpu(saved.into_owned()?),
            #[cfg(feature = "cuda")]
            On::Cuda(saved) => On::Cuda(saved),
        }))
    }
}

#[cfg(feature = "cuda")]
fn of_another_device(from: &str, on: &str) -> CoreError {
    CoreError::Unsupported {
        what: format!("what a forward pass on {from} kept, in a backward pass on {on}"),
        why: "both passes are of one layer".into(),
    }
}

impl<K: Kind> Layer<K> {
    fn trains<T: Element>(&self, what: &str) -> Result<&dyn Trains<T>> {
        let kernel = self.typed::<T>(what)?;
        kernel.training().ok_or_else(|| refused(K::OP, self.device().name()).into())
    }

    /// What the layer keeps of gate and up between the passes; an error for one that was not made for training.
    ///
    /// # Errors
    /// [`CoreError::Unsupported`]; [`CoreError::DType`] if `T` is not [`Self::dtype`].
    pub fn save_policy<T: Element>(&self) -> Result<SavePolicy> {
        self.trains::<T>("T")?.policy()
    }

    /// The result for x `[M, K]`, and what [`Self::backward`] needs. On the CPU it has the bits of [`Self::forward`]; on a CUDA
    /// device, which may go another way where gate and up are kept, it is within the same bounds. x is borrowed until then;
    /// [`Saved::into_owned`] copies it.
    ///
    /// # Errors
    /// As [`Self::forward`]; [`CoreError::Unsupported`] for a layer that was not made by `for_training`.
    pub fn forward_train<'x, T: Element>(
        &self,
        x: impl Into<MatrixRef<'x, T>>,
    ) -> Result<(Matrix<T>, Saved<'x, T>)> {
        let x = x.into();
        x.expect_shape("x", [x.rows(), self.hidden()])?;
        let mut out = Matrix::zeros(x.rows(), self.out_features())?;
        let saved = self.forward_train_into(x, &mut out)?;
        Ok((out, saved))
    }

    /// Writes the result of [`Self::forward_train`] into `out`.
    ///
    /// # Errors
    /// As [`Self::forward_train`] and [`Self::forward_into`].
    pub fn forward_train_into<'x, 'out, T: Element>(
        &self,
        x: impl Into<MatrixRef<'x, T>>,
        out: impl Into<MatrixMut<'out, T>>,
    ) -> Result<Saved<'x, T>> {
        self.trains::<T>("x")?.forward_train(x.into(), out.into(), &CallOptions::default())
    }

    /// The gradients that are wanted, in matrices of their own, from that of the result, `[M, out_features]`, which may lie
    /// in any strides. Those of weights have the orientation of the layer's weights.
    ///
    /// # Errors
    /// As [`Self::backward_into`].
    pub fn backward<'d, T: Element>(
        &self,
        saved: Saved<'_, T>,
        dy: impl Into<StridedRef<'d, T>>,
        wanted: Wanted,
    ) -> Result<Gradients<T>> {
        let trains = self.trains::<T>("dy")?;
        let (m, bias) = (saved.tokens(), self.problem.bias);
        let mut gradients = Gradients::zeros(m, &trains.shapes()?, wanted, bias)?;
        trains.backward_into(saved, dy.into(), gradients.as_mut(), &CallOptions::default())?;
        Ok(gradients)
    }

    /// Writes the gradients that have a place, or adds them to what is there, within the limits of one call; of a block also
    /// through factors of its rows ([`GradientsMut::row_scale`]), and those of the factors.
    ///
    /// # Errors
    /// [`CoreError::Shape`] if a shape disagrees; [`CoreError::DType`] if `T` is not [`Self::dtype`];
    /// [`CoreError::Unsupported`] for a layer that was not made by `for_training`, what another one kept, or a row scale without
    /// a down projection.
    pub fn backward_into<'d, T: Element>(
        &self,
        saved: Saved<'_, T>,
        dy: impl Into<StridedRef<'d, T>>,
        into: GradientsMut<'_, T>,
        options: &CallOptions,
    ) -> Result<()> {
        self.trains::<T>("dy")?.backward_into(saved, dy.into(), into, options)
    }

    #[cfg(feature = "cuda")]
    fn trains_on<T: Element>(&self, what: &str) -> Result<&dyn TrainsOn<T>> {
        let kernel = self.typed::<T>(what)?;
        kernel.training_on().ok_or_else(crate::layer::not_on_cuda)
    }

    /// Bytes of scratch memory that [`Self::forward_saving_on`] uses for `m` tokens where it keeps what the policy says; with
    /// [`SavePolicy::Recompute`], which keeps nothing, those of [`Self::forward_with`] and [`Self::pre_activations_on`].
    ///
    /// # Errors
    /// [`CoreError::DType`] if `T` is not [`Self::dtype`]; [`CoreError::Unsupported`] on the CPU.
    #[cfg(feature = "cuda")]
    pub fn training_bytes<T: Element>(&self, m: usize, policy: SavePolicy) -> Result<usize> {
        Ok(self.trains_on::<T>("T")?.training_bytes(m, policy))
    }

    /// Bytes of scratch memory that [`Self::backward_gate_up_on`] uses for `m` tokens in dense matrices that begin at
    /// multiples of 16 bytes; none where one kernel computes all of it.
    ///
    /// # Errors
    /// As [`Self::training_bytes`].
    #[cfg(feature = "cuda")]
    pub fn backward_gate_up_bytes<T: Element>(&self, m: usize) -> Result<usize> {
        Ok(self.trains_on::<T>("T")?.backward_gate_up_bytes(m))
    }

    /// Bytes of scratch memory that [`Self::backward_on`] uses for these matrices, 32 MiB of cuBLASLt's on Hopper among them.
    ///
    /// # Errors
    /// As [`Self::training_bytes`]; [`CudaError::Unsupported`](cuda::CudaError::Unsupported) for quantised weights.
    #[cfg(feature = "cuda")]
    pub fn backward_bytes<T: Element>(
        &self,
        dy: &cuda::DeviceMatrixRef<'_, T>,
        kept: &cuda::DeviceKept<'_, T>,
        into: &cuda::DeviceGradientsMut<'_, T>,
    ) -> Result<usize> {
        self.trains_on::<T>("dy")?.backward_bytes(dy, kept, into)
    }

    /// Enqueues the layer on a stream and writes gate and up, each `[M, H]`, or the gate alone, beside the result: what
    /// [`Self::backward_on`] takes. Every layer with dense weights on a CUDA device can, lent ones too. `scratch`: the
    /// caller's, of [`Self::training_bytes`], in place of the stream's.
    ///
    /// # Errors
    /// As [`Self::forward_on`]; [`CudaError::Unsupported`](cuda::CudaError::Unsupported) for quantised weights;
    /// [`CoreError::OutOfRange`] for too little scratch memory.
    #[cfg(feature = "cuda")]
    pub fn forward_saving_on<'k, T: Element>(
        &self,
        stream: &cuda::Stream,
        x: cuda::DeviceMatrixRef<'_, T>,
        out: cuda::DeviceMatrixMut<'_, T>,
        kept: impl Into<cuda::DeviceKeptMut<'k, T>>,
        scratch: Option<&mut cuda::DeviceScratch<'_>>,
    ) -> Result<()> {
        self.trains_on::<T>("x")?.forward_saving(stream, x, out, kept.into(), scratch)
    }

    /// Enqueues gate and up of [`Self::forward_saving_on`] alone, to the same bits: what a backward pass begins with where
    /// nothing was kept. `scratch`: the caller's, of [`Self::training_bytes`] with [`SavePolicy::Recompute`], in place of the
    /// stream's.
    ///
    /// # Errors
    /// As [`Self::forward_saving_on`].
    #[cfg(feature = "cuda")]
    pub fn pre_activations_on<'k, T: Element>(
        &self,
        stream: &cuda::Stream,
        x: cuda::DeviceMatrixRef<'_, T>,
        kept: impl Into<cuda::DeviceKeptMut<'k, T>>,
        scratch: Option<&mut cuda::DeviceScratch<'_>>,
    ) -> Result<()> {
        self.trains_on::<T>("x")?.pre_activations(stream, x, kept.into(), scratch)
    }

    /// Enqueues the gradients that `into` has places for, from that of the result. Gate and up that may be written hold
    /// afterwards their gradients or anything else. An up that was not kept is computed again. Weights must not have changed
    /// since the forward pass. `scratch`: the caller's, of [`Self::backward_bytes`], in place of the stream's.
    ///
    /// # Errors
    /// [`CoreError::Shape`], [`CoreError::DType`]; [`CoreError::Unsupported`] on the CPU;
    /// [`CudaError::Unsupported`](cuda::CudaError::Unsupported) for quantised weights and for rows of `dy`, or of `x`, that overlap;
    /// [`CoreError::OutOfRange`] for too little scratch memory.
    #[cfg(feature = "cuda")]
    pub fn backward_on<'k, T: Element>(
        &self,
        stream: &cuda::Stream,
        x: cuda::DeviceMatrixRef<'_, T>,
        dy: cuda::DeviceMatrixRef<'_, T>,
        kept: impl Into<cuda::DeviceKept<'k, T>>,
        into: cuda::DeviceGradientsMut<'_, T>,
        scratch: Option<&mut cuda::DeviceScratch<'_>>,
    ) -> Result<()> {
        self.trains_on::<T>("dy")?.backward(stream, x, dy, kept.into(), into, scratch)
    }

    /// Enqueues the first half of a block's backward pass, for a caller that computes the products with the gradients of gate
    /// and up itself: these gradients, and h once more where it has a place, which the gradient of the down weight
    /// needs.
    ///
    /// # Errors
    /// As [`Self::backward_on`]; [`CudaError::Unsupported`](cuda::CudaError::Unsupported) for a gated linear layer;
    /// [`CoreError::OutOfRange`] for too little scratch memory.
    #[cfg(feature = "cuda")]
    pub fn backward_gate_up_on<T: Element>(
        &self,
        stream: &cuda::Stream,
        dy: cuda::DeviceMatrixRef<'_, T>,
        kept: [cuda::DeviceMatrixRef<'_, T>; 2],
        grads: [cuda::DeviceMatrixMut<'_, T>; 2],
        h: Option<cuda::DeviceMatrixMut<'_, T>>,
        scratch: Option<&mut cuda::DeviceScratch<'_>>,
    ) -> Result<()> {
        self.trains_on::<T>("dy")?.backward_gate_up(stream, dy, kept, grads, h, scratch)
    }

    /// Packs other values of the weights in the memory of those before; where a clone still has these, in other memory.
    fn updated<T: Element>(
        &mut self,
        params: Params<'_, '_, T>,
        anew: impl FnOnce(&Device, SavePolicy) -> Result<Self>,
    ) -> Result<()> {
        let trains = self.trains::<T>("the weights")?;
        trains.expect_update(params)?;
        let policy = trains.policy()?;
        let updated = self.kernel.unique::<T>().and_then(|kernel| kernel.update(params));
        match updated {
            Some(updated) => updated,
            None => {
                *self = anew(self.device(), policy)?;
                Ok(())
            }
        }
    }
}

impl Layer<GatedLinearKind> {
    /// Packs weights in memory for forward and backward passes on a device. On a CPU the layer has a copy for each direction,
    /// 4·K·H values in all; [`Self::update`] packs them again after they changed, which costs as many copies, where a step
    /// with M tokens multiplies 6·M·K·H times. A CUDA device has one copy; over weights that are there already,
    /// [`Self::forward_saving_on`] and [`Self::backward_on`] need none.
    ///
    /// # Errors
    /// As [`Self::from_params`].
    pub fn for_training<T: Element>(
        device: &Device,
        params: &GatedLinearParams<'_, T>,
        policy: SavePolicy,
    ) -> Result<Self> {
        Self::trained(device, params, policy, None)
    }

    /// As [`Self::for_training`], by a chosen path: [`Path::Unfused`] is the yardstick that passes gate and up, and their
    /// gradients, through memory between plain products.
    ///
    /// # Errors
    /// As [`Self::for_training`].
    pub fn for_training_with_path<T: Element>(
        device: &Device,
        params: &GatedLinearParams<'_, T>,
        policy: SavePolicy,
        path: Path,
    ) -> Result<Self> {
        Self::trained(device, params, policy, Some(path))
    }

    fn trained<T: Element>(
        device: &Device,
        params: &GatedLinearParams<'_, T>,
        policy: SavePolicy,
        path: Option<Path>,
    ) -> Result<Self> {
        match device {
            Device::Cpu(cpu) => {
                let path = path.unwrap_or(Path::Fused);
                let layer =
                    swiglu_cpu::GatedLinear::for_training_with_path(cpu, params, policy, path)?;
                Layer::new(device, Some(path), layer)
            }
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => {
                let layer = match path {
                    None => swiglu_cuda::GatedLinear::new(cuda, params)?,
                    Some(path) => swiglu_cuda::GatedLinear::with_path(cuda, params, path)?,
                };
                Layer::new(device, path, layer.for_training(policy)?)
            }
        }
    }

    /// Packs other values of the weights and biases, of the same shapes and layout. Clones keep those before.
    ///
    /// # Errors
    /// [`CoreError::Unsupported`] for a layer of another problem, or one that was not made by [`Self::for_training`].
    pub fn update<T: Element>(&mut self, params: &GatedLinearParams<'_, T>) -> Result<()> {
        let path = self.path;
        let anew = |device: &Device, policy| Self::trained(device, params, policy, path);
        self.updated(Params::GatedLinear(params), anew)
    }
}

impl Layer<MlpKind> {
    /// Packs weights in memory for forward and backward passes on a device. On a CPU the layer has a copy for each direction,
    /// 6·K·H values in all; [`Self::update`] packs them again after they changed, which costs as many copies, where a step
    /// with M tokens multiplies 9·M·K·H times. A CUDA device has one copy; over weights that are there already,
    /// [`Self::forward_saving_on`] and [`Self::backward_on`] need none.
    ///
    /// # Errors
    /// As [`Self::from_params`]; [`CoreError::Unsupported`] for a block with row steps.
    pub fn for_training<T: Element>(
        device: &Device,
        params: &MlpParams<'_, T>,
        policy: SavePolicy,
    ) -> Result<Self> {
        Self::trained(device, params, policy, None)
    }

    /// As [`Self::for_training`], by a chosen path: [`Path::Unfused`] is the yardstick that passes gate and up, and their
    /// gradients, through memory between plain products.
    ///
    /// # Errors
    /// As [`Self::for_training`].
    pub fn for_training_with_path<T: Element>(
        device: &Device,
        params: &MlpParams<'_, T>,
        policy: SavePolicy,
        path: Path,
    ) -> Result<Self> {
        Self::trained(device, params, policy, Some(path))
    }

    fn trained<T: Element>(
        device: &Device,
        params: &MlpParams<'_, T>,
        policy: SavePolicy,
        path: Option<Path>,
    ) -> Result<Self> {
        match device {
            Device::Cpu(cpu) => {
                let path = path.unwrap_or(Path::Fused);
                let layer = swiglu_cpu::Mlp::for_training_with_path(cpu, params, policy, path)?;
                Layer::new(device, Some(path), layer)
            }
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => {
                let layer = match path {
                    None => swiglu_cuda::Mlp::new(cuda, params)?,
                    Some(path) => swiglu_cuda::Mlp::with_path(cuda, params, path)?,
                };
                Layer::new(device, path, layer.for_training(policy)?)
            }
        }
    }

    /// Packs other values of the weights and biases, of the same shapes and layout. Clones keep those before.
    ///
    /// # Errors
    /// As [`Layer::<GatedLinearKind>::update`].
    pub fn update<T: Element>(&mut self, params: &MlpParams<'_, T>) -> Result<()> {
        let path = self.path;
        let anew = |device: &Device, policy| Self::trained(device, params, policy, path);
        self.updated(Params::Mlp(params), anew)
    }
}
