//! Fused SwiGLU and every other gated linear unit: load a model's feed-forward layer, pack it
//! once for a device, run it.
//!
//! x `[M, K]` is the input, h = act(x·Wg + bg, x·Wu + bu) the gated linear layer ([`GatedLinear`],
//! K → H) and y = h·Wd + bd the feed-forward block ([`Mlp`], K → H → K). [`GatedActivation`] is
//! the activation alone. The activations are one family, [`Activation`]; where values are rounded
//! is a choice, [`Numerics`], that means the same bits on every backend.
//!
//! # A layer from a file
//!
//! ```
//! use swiglu::{Device, Matrix, Mlp};
//!
//! let file = swiglu_fixtures::STORIES15M_FILE;
//! let mlp = Mlp::load(file, 0)?.to(&Device::best()?)?;
//! assert_eq!((mlp.hidden(), mlp.intermediate()), (288, 768));
//!
//! let x = Matrix::from_vec(vec![0.5f32; 2 * 288], 2, 288)?;
//! let y = mlp.forward(&x)?;
//! assert_eq!(y.shape(), [2, 288]);
//! # Ok::<(), swiglu::Error>(())
//! ```
//!
//! The element type is that of the file, the activation that of its model; both can be chosen:
//!
//! ```
//! # use swiglu::{Device, GatedLinear};
//! use swiglu::{Activation, DType, Numerics, Rounding};
//!
//! # let file = swiglu_fixtures::STORIES15M_FILE;
//! let layer = GatedLinear::load(file, 0)?
//!     .dtype(DType::Bf16)
//!     .activation(Activation::GEGLU_TANH)
//!     .numerics(Numerics::precise(Rounding::Eager)) // PyTorch's order of roundings
//!     .to(&Device::cpu()?)?;
//! println!("{}", layer.explain(1));
//! # Ok::<(), swiglu::Error>(())
//! ```
//!
//! # Batch invariance
//!
//! With [`Numerics::with_batch_invariance`] a token's result has the same bits however many tokens a call has
//! and wherever in it the token stands: products are summed in one order for every number. On a CUDA device quantised
//! weights are then decoded, and an x whose rows lie otherwise (an odd stride) may be summed otherwise. Without it only the
//! number of tokens decides the order: threads and the values of other tokens never do.
//!
//! # Quantised weights
//!
//! The blocks of a GGUF file, and weights of 8 bits with scales beside them of a safetensors file, are
//! computed with as they are where the device has kernels for their type, so that a call reads about as
//! many bytes as the file has. The CPU has them for Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K to Q6_K, IQ4_NL,
//! IQ4_XS and MXFP4; a CUDA device for Q8_0, Q4_0, I8 and F8_E4M3 in an [`Mlp`] of f16 or bf16, for a
//! few tokens at a time ([`Device::expect_quantized`]). Others are decoded when the layer is packed, as
//! [`Weights::decoded`] asks for, and [`Layer::explain`] says which and why. Weights in memory are
//! quantised by [`BlockType::quantize`]:
//!
//! ```
//! use swiglu::{
//!     Activation, BlockType, DType, Device, GatedLinear, Matrix, QuantizedGatedLinearParams,
//! };
//!
//! let weights = Matrix::from_vec(vec![0.25f32; 8 * 64], 8, 64)?; // 64 features in, 8 out
//! let q = BlockType::Q8_0.quantize(weights.view())?;
//! let params =
//!     QuantizedGatedLinearParams::new(q.view(), q.view(), Activation::BILINEAR, DType::F32);
//! let layer = GatedLinear::from_quantized::<f32>(&Device::cpu()?, &params)?;
//! let h = layer.forward(&Matrix::from_vec(vec![1.0f32; 64], 1, 64)?)?;
//! assert!((h.as_slice()[0] - 256.0).abs() < 0.5);
//! assert_eq!(layer.plan(1).problem.weight_bytes(), 2.0 * 8.0 * 2.0 * 34.0);
//! # Ok::<(), swiglu::Error>(())
//! ```
//!
//! # A layer from memory
//!
//! Inputs are borrowed views with a row stride; outputs and workspaces can be used again, so that
//! a call has nothing to allocate:
//!
//! ```
//! use swiglu::{
//!     Activation, Device, GateUpWeights, GatedLinear, GatedLinearParams, Matrix, MatrixRef,
//!     Orientation,
//! };
//!
//! // Two features in, three out; one row per output feature, as `torch.nn.Linear` has it.
//! let gate = [1.0f32, 0.0, 0.0, 1.0, 1.0, 1.0];
//! let up = [2.0f32, 0.0, 0.0, 2.0, 1.0, -1.0];
//! let weights = GateUpWeights::separate(
//!     MatrixRef::new(&gate, 3, 2)?,
//!     MatrixRef::new(&up, 3, 2)?,
//!     Orientation::OutIn,
//! )?;
//! let params = GatedLinearParams::new(weights, Activation::BILINEAR);
//! let layer = GatedLinear::from_params(&Device::cpu()?, &params)?;
//!
//! // Two rows that are three elements apart.
//! let x = [1.0f32, 2.0, f32::NAN, 3.0, 4.0];
//! let x = MatrixRef::with_stride(&x, 2, 2, 3)?;
//! let mut h = Matrix::<f32>::zeros(2, 3)?;
//! layer.forward_into(x, &mut h)?;
//! assert_eq!(h.as_slice(), [2.0, 8.0, -3.0, 18.0, 32.0, -7.0]);
//! # Ok::<(), swiglu::Error>(())
//! ```
//!
//! A layer knows its element type at run time; another one is refused, not converted:
//!
//! ```
//! # use swiglu::{Device, Mlp};
//! use swiglu::{Matrix, bf16};
//!
//! # let file = swiglu_fixtures::STORIES15M_FILE;
//! # let mlp = Mlp::load(file, 0)?.to(&Device::cpu()?)?;
//! let error = mlp.forward(&Matrix::<bf16>::zeros(1, 288)?).unwrap_err();
//! assert!(error.to_string().contains("bf16"));
//! # Ok::<(), swiglu::Error>(())
//! ```
//!
//! # Training
//!
//! A layer made by `for_training` also has gradients, on the CPU. The forward pass keeps what its [`SavePolicy`] says and
//! borrows x; the backward pass takes it, with the gradient of the result in any strides. What is not [`Wanted`] costs nothing;
//! [`Layer::backward_into`] stores gradients in the caller's memory or adds them to what is there, in the element type or in
//! f32. The layer packs copies of the weights: `update` packs changed ones, which takes the time of copying them. A training
//! loop: `examples/train.rs`.
//!
//! ```
//! use swiglu::{
//!     Activation, Device, GateUpWeights, GatedLinear, GatedLinearParams, Matrix, Orientation,
//!     SavePolicy, Wanted,
//! };
//!
//! let (gate, up) = (Matrix::from_vec(vec![3.0f32], 1, 1)?, Matrix::from_vec(vec![5.0f32], 1, 1)?);
//! let weights = GateUpWeights::separate(gate.view(), up.view(), Orientation::OutIn)?;
//! let params = GatedLinearParams::new(weights, Activation::BILINEAR); // h = 3x · 5x
//! let layer = GatedLinear::for_training(&Device::cpu()?, &params, SavePolicy::Save)?;
//!
//! let x = Matrix::from_vec(vec![2.0f32], 1, 1)?;
//! let (h, saved) = layer.forward_train(&x)?;
//! let dh = Matrix::from_vec(vec![1.0f32], 1, 1)?;
//! let gradients = layer.backward(saved, &dh, Wanted::ALL)?;
//! assert_eq!((h[(0, 0)], gradients.dx.map(|dx| dx[(0, 0)])), (60.0, Some(60.0))); // 15x², 30x
//! assert_eq!(gradients.gate.map(|dw| dw[(0, 0)]), Some(20.0)); // x · 5x
//! # Ok::<(), swiglu::Error>(())
//! ```
//!
//! # Threads and working memory
//!
//! On a CPU the threads of the device help the calling thread where the work is worth it. A call never waits for threads that
//! are busy with another call, so a few tokens are computed beside a long prompt in about the time that their caller takes
//! alone. [`CpuOptions::with_pool`] takes helpers from a pool of the program, which devices can share and whose own jobs may
//! call layers; [`CpuOptions::with_fork_join`] computes on the threads of another runtime, such as OpenMP's in a program that also
//! calls libraries which use them, and a call waits for all of these. [`Layer::forward_opts`] limits the threads of one call. None of it changes a bit of a result.
//!
//! The layers of a device share its working memory: a block for each of the calls that there are at the same time, kept for
//! later ones until [`Device::trim`]. [`Layer::workspace_bytes`] says how large a block is and [`Layer::reserve`] makes
//! blocks beforehand.
//!
//! # In a dev build
//!
//! Which optimisation a dependency is compiled with is for the program's workspace to say, and in a dev build it is none: the
//! CPU kernels then take about a hundred times as long, and the notes of [`Layer::explain`] say so. In the `Cargo.toml` of the
//! workspace:
//!
//! ```toml
//! [profile.dev.package.swiglu-cpu]
//! opt-level = 3
//! codegen-units = 1
//! debug-assertions = false
//! overflow-checks = false
//! [profile.dev.package.swiglu-core]
//! opt-level = 3
//! [profile.dev.package.half]
//! opt-level = 3
//! ```
//!
//! # On a GPU
//!
//! [`Device::best`] is the first CUDA device, where there is one. Host matrices are copied there and
//! back by every call; a program that keeps its data on the device enqueues with
//! [`Layer::forward_on`] instead:
//!
//! ```no_run
//! use swiglu::cuda::{Cuda, DeviceMatrix};
//! use swiglu::{Device, Matrix, Mlp};
//!
//! let cuda = Cuda::new(0)?;
//! let mlp = Mlp::load("model.safetensors", 0)?.to(&Device::Cuda(cuda.clone()))?;
//! let stream = cuda.stream();
//! let x = DeviceMatrix::from_host(&stream, Matrix::<f32>::zeros(16, mlp.hidden())?.view())?;
//! let mut y = DeviceMatrix::<f32>::new(&stream, 16, mlp.hidden())?;
//! mlp.forward_on(&stream, x.view(), y.view_mut())?; // returns before the work is done
//! println!("{:?}", y.to_host()?.view().row(0));
//! # Ok::<(), swiglu::Error>(())
//! ```
//!
//! # Features
//!
//! `cuda` (default): the CUDA backend. It builds everywhere; what it needs is looked for when a
//! device is opened. `ndarray`: conversions from its views, in the module of that name.

mod activation;
mod device;
mod dispatch;
mod error;
mod explain;
pub mod kind;
mod layer;
mod model;
#[cfg(feature = "ndarray")]
pub mod ndarray;
mod training;
mod weights;

pub use activation::GatedActivation;
pub use device::Device;
#[doc(hidden)]
pub use dispatch::unsupported_dtype;
#[doc(hidden)]
pub use error::in_words_of;
pub use error::{Error, ErrorKind, Result};
pub use explain::{Candidate, Explanation, Keeping};
pub use layer::Layer;
pub use model::Model;
pub use training::Saved;
pub use weights::{HostWeights, QuantizedWeights, Weights};

/// The 16-bit types of matrices, [`struct@bf16`] and [`struct@f16`], are those of this crate.
pub use half;
/// The pools that [`CpuOptions::with_pool`] takes helpers from are those of this crate.
pub use rayon;
pub use swiglu_core::{
    ACTIVATION_NAMES, Accumulate, Activation, Arrangement, BlockType, DType, Element,
    Error as CoreError, ExpMode, GateFn, GateUpMut, GateUpRef, GateUpWeights, GatedLinearParams,
    GradientMut, GradientShapes, Gradients, GradientsMut, Half, Matrix, MatrixMut, MatrixRef,
    MlpParams, Norm, NormKind, Numerics, Op, Orientation, OwnedGateUp, Pass, Path, Plan, Problem,
    QuantizedGatedLinearParams, QuantizedMatrix, QuantizedMlpParams, QuantizedRef, QuantizedType,
    QuantizedTypes, Rounding, RowParams, RowScale, RowSteps, SavePolicy, Sparsity, StridedRef,
    Wanted, WeightLayout, bf16, f16,
};
pub use swiglu_cpu::{CallOptions, Cpu, CpuOptions, ForkJoin, Isa, LentMlp};
pub use swiglu_formats::{ActivationSource, FormatError, LayerWeights, LoadOptions, TensorNames};

/// CUDA devices, streams, graphs, and matrices in device memory. Kernels, plans and tuning are those of the crate
/// `swiglu-cuda`, which changes more often.
#[cfg(feature = "cuda")]
pub mod cuda {
    pub use swiglu_cuda::{
        BorrowedStream, CapturedCall, Cuda, CudaError, CudaOptions, DeviceBuffer, DeviceData,
        DeviceFacts, DeviceGateUp, DeviceGateUpMut, DeviceGatedLinearParams, DeviceGradientMut,
        DeviceGradientsMut, DeviceKept, DeviceKeptMut, DeviceMatrix, DeviceMatrixMut,
        DeviceMatrixRef, DeviceMlpParams, DeviceScratch, Event, Graph, PinnedMatrix, Stream,
        WithoutLoading, release_unused,
    };
}

/// A gated linear layer, x `[M, K]` → h `[M, H]`, packed for a device.
pub type GatedLinear = Layer<kind::GatedLinearKind>;

/// A feed-forward block, x `[M, K]` → y `[M, K]`, packed for a device.
pub type Mlp = Layer<kind::MlpKind>;

/// The weights of a gated linear layer, not packed yet.
pub type GatedLinearWeights = Weights<kind::GatedLinearKind>;

/// The weights of a feed-forward block, not packed yet.
pub type MlpWeights = Weights<kind::MlpKind>;
