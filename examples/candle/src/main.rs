//! A Llama block made of candle's layers, and the same computed by swiglu as one op over candle's memory: results compared
//! within derived bounds, then times.
//!
//! `cargo run --release --manifest-path examples/candle/Cargo.toml`, on a CUDA device with `--features cuda`

#[cfg(feature = "cuda")]
mod gpu;

use std::time::Instant;

use candle_core::{
    CpuStorage, CustomOp1, DType, Device, Error, Layout, Module, Result, Shape, Storage, Tensor,
    WithDType, bail,
};
use candle_nn::Linear;
use half::bf16;
use swiglu::cuda::Cuda;
use swiglu::half;
use swiglu::{
    Activation, Element, GateUpWeights, GatedLinearParams, MatrixMut, MatrixRef, Mlp, MlpParams,
    Numerics, Orientation, Rounding,
};
use swiglu_core::bounds;

const HIDDEN: usize = 896;
const INTERMEDIATE: usize = 4864;

/// The block as candle's users have it.
struct LlamaMlp {
    gate: Linear,
    up: Linear,
    down: Linear,
}

impl LlamaMlp {
    fn linears(&self) -> [&Linear; 3] {
        [&self.gate, &self.up, &self.down]
    }

    fn to(&self, device: &Device) -> Result<Self> {
        let there =
            |l: &Linear| -> Result<Linear> { Ok(Linear::new(l.weight().to_device(device)?, None)) };
        Ok(Self { gate: there(&self.gate)?, up: there(&self.up)?, down: there(&self.down)? })
    }
}

impl Module for LlamaMlp {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let gate = candle_nn::ops::silu(&self.gate.forward(x)?)?;
        self.down.forward(&(gate * self.up.forward(x)?)?)
    }
}

/// Element types of both.
#[cfg(not(feature = "cuda"))]
trait Value: Element + WithDType {}
#[cfg(feature = "cuda")]
trait Value:
    Element + WithDType + candle_core::cuda::CudaDType + candle_core::cuda::cudarc::driver::DeviceRepr
{
}
impl Value for f32 {}
impl Value for bf16 {}

/// The same block as one op.
struct FusedMlp {
    layer: Mlp,
    /// On a CUDA device that device, opened once, and what the layer reads where it lies, after the layer, which goes first.
    lent: Option<(Cuda, [Tensor; 3])>,
}

impl FusedMlp {
    /// Packs the weights of linear layers from where candle has them; on a CUDA device they stay there.
    fn new<T: Value>(mlp: &LlamaMlp) -> Result<Self> {
        match mlp.gate.weight().device() {
            Device::Cpu => {
                let device = swiglu::Device::cpu().map_err(Error::wrap)?;
                let layer = with_params::<T, _>(mlp, |params| Mlp::from_params(&device, params))?;
                Ok(Self { layer, lent: None })
            }
            #[cfg(feature = "cuda")]
            Device::Cuda(_) => {
                let weights = mlp.linears().map(|linear| linear.weight().clone());
                // SAFETY: the weights are kept beside the layer, and candle frees memory in the order of its stream.
                let (layer, cuda) = unsafe { gpu::layer::<T>(weights.each_ref()) }?;
                Ok(Self { layer, lent: Some((cuda, weights)) })
            }
            other => bail!("no kernels for {other:?}"),
        }
    }

    fn rows<T: Element + WithDType>(
        &self,
        storage: &CpuStorage,
        layout: &Layout,
    ) -> Result<Vec<T>> {
        let x = matrix::<T>(storage, layout)?;
        let mut y = vec![T::default(); x.rows() * HIDDEN];
        let out = MatrixMut::new(&mut y, x.rows(), HIDDEN).map_err(Error::wrap)?;
        self.layer.forward_into(x, out).map_err(Error::wrap)?;
        Ok(y)
    }
}

impl CustomOp1 for FusedMlp {
    fn name(&self) -> &'static str {
        "swiglu-mlp"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let y = match storage {
            CpuStorage::F32(_) => CpuStorage::F32(self.rows(storage, layout)?),
            CpuStorage::BF16(_) => CpuStorage::BF16(self.rows(storage, layout)?),
            CpuStorage::F16(_) => CpuStorage::F16(self.rows(storage, layout)?),
            _ => bail!("x: expected f32, f16 or bf16"),
        };
        Ok((y, layout.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        storage: &candle_core::CudaStorage,
        layout: &Layout,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        use candle_core::backend::BackendStorage;
        let Some((cuda, _)) = &self.lent else { bail!("the layer was made for a CPU") };
        let layer = (&self.layer, cuda);
        let y = match storage.dtype() {
            DType::F32 => gpu::forward::<f32>(layer, storage, layout)?,
            DType::BF16 => gpu::forward::<bf16>(layer, storage, layout)?,
            other => bail!("x: expected f32 or bf16, given {other:?}"),
        };
        Ok((y, layout.shape().clone()))
    }
}

impl Module for FusedMlp {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.apply_op1_no_bwd(self)
    }
}

/// A tensor as rows of its last dimension, where it lies.
fn matrix<'a, T: Element + WithDType>(
    storage: &'a CpuStorage,
    layout: &Layout,
) -> Result<MatrixRef<'a, T>> {
    let Some((start, end)) = layout.contiguous_offsets() else {
        bail!("expected a contiguous tensor, given {layout:?}; call contiguous()");
    };
    let cols = layout.dims().last().copied().unwrap_or(1);
    let data = &T::cpu_storage_as_slice(storage)?[start..end];
    MatrixRef::new(data, data.len() / cols.max(1), cols).map_err(Error::wrap)
}

/// The block's weights as parameters, none of them copied.
fn with_params<T: Element + WithDType, R>(
    mlp: &LlamaMlp,
    f: impl FnOnce(&MlpParams<'_, T>) -> swiglu::Result<R>,
) -> Result<R> {
    let [gate, up, down] = mlp.linears().map(|l| l.weight().storage_and_layout());
    let view = |(storage, layout)| match storage {
        &Storage::Cpu(ref storage) => matrix::<T>(storage, layout),
        _ => bail!("a weight is not on the CPU"),
    };
    let (gate, up, down) =
        (view((&*gate.0, gate.1))?, view((&*up.0, up.1))?, view((&*down.0, down.1))?);
    let weights = GateUpWeights::separate(gate, up, Orientation::OutIn).map_err(Error::wrap)?;
    let gated = GatedLinearParams::new(weights, Activation::SWIGLU);
    f(&MlpParams::new(gated, down, Orientation::OutIn)).map_err(Error::wrap)
}

/// Both within their bounds of the exact result, so that they differ by no more than the bounds' sum; returns the largest
/// part of it, the relative difference in the Frobenius norm, and the limits of both for that.
fn compare<T: Element + WithDType>(
    mlp: &LlamaMlp,
    x: &Tensor,
    [ours, theirs]: [&Tensor; 2],
) -> Result<[f64; 3]> {
    let (storage, layout) = x.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else { bail!("x is not on the CPU") };
    let x = matrix::<T>(storage, layout)?;
    let [fused, eager] = with_params::<T, _>(mlp, |params| {
        // candle rounds after each operation, as PyTorch does.
        let eager = params.gated.with_numerics(Numerics::precise(Rounding::Eager));
        Ok([bounds::mlp(x, params)?, bounds::mlp(x, &params.with_gated(eager))?])
    })?;
    let values = |t: &Tensor| t.flatten_all()?.to_dtype(DType::F64)?.to_vec1::<f64>();
    let (ours, theirs) = (values(ours)?, values(theirs)?);
    let (mut worst, mut error, mut norm) = (0.0f64, 0.0, 0.0);
    for (i, (a, b)) in ours.iter().zip(&theirs).enumerate() {
        let bound = fused.bound.as_slice()[i] + eager.bound.as_slice()[i];
        worst = worst.max((a - b).abs() / bound);
        (error, norm) = (error + (a - b).powi(2), norm + b.powi(2));
    }
    Ok([worst, (error / norm).sqrt(), fused.frobenius_limit + eager.frobenius_limit])
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn run<T: Value>(device: &Device) -> Result<()> {
    let linear = |inputs: usize, outputs: usize| -> Result<Linear> {
        let std = 1.0 / (inputs as f32).sqrt();
        let weight = Tensor::randn(0f32, std, (outputs, inputs), &Device::Cpu)?;
        Ok(Linear::new(weight.to_dtype(<T as WithDType>::DTYPE)?, None))
    };
    let on_host = LlamaMlp {
        gate: linear(HIDDEN, INTERMEDIATE)?,
        up: linear(HIDDEN, INTERMEDIATE)?,
        down: linear(INTERMEDIATE, HIDDEN)?,
    };
    let theirs = on_host.to(device)?;
    let ours = FusedMlp::new::<T>(&theirs)?;
    // A device is waited for once in so many calls.
    let calls = if device.is_cpu() { 1 } else { 50 };
    for m in [1, 16, 128] {
        let x = Tensor::randn(0f32, 1.0, (1, m, HIDDEN), &Device::Cpu)?;
        let x = x.to_dtype(<T as WithDType>::DTYPE)?;
        let there = x.to_device(device)?;
        let results = [ours.forward(&there)?, theirs.forward(&there)?];
        let results = [results[0].to_device(&Device::Cpu)?, results[1].to_device(&Device::Cpu)?];
        let [worst, relative, limit] = compare::<T>(&on_host, &x, results.each_ref())?;
        // In turns: a shared machine's speed changes within seconds.
        let mut times = [Vec::new(), Vec::new()];
        for _ in 0..31 {
            for (module, times) in [&ours as &dyn Module, &theirs].into_iter().zip(&mut times) {
                let start = Instant::now();
                for _ in 0..calls {
                    module.forward(&there)?;
                }
                device.synchronize()?;
                times.push(start.elapsed().as_secs_f64() * 1e6 / f64::from(calls));
            }
        }
        let [ours, theirs] = times.map(median);
        println!(
            "{:<4} M = {m:<3}  candle {theirs:>7.1} µs  swiglu {ours:>7.1} µs  {:>5.1} ×   \
             differ by {relative:.1e} of at most {limit:.1e}",
            <T as Element>::DTYPE,
            theirs / ours,
        );
        if worst > 1.0 || relative > limit {
            bail!("the results differ by more than rounding explains");
        }
    }
    Ok(())
}

fn main() -> Result<()> {
    let mut devices = vec![(Device::Cpu, swiglu::Device::cpu())];
    if cfg!(feature = "cuda") {
        devices.push((Device::new_cuda(0)?, "cuda".parse()));
    }
    for (theirs, ours) in devices {
        println!("{HIDDEN} → {INTERMEDIATE} → {HIDDEN}, SwiGLU, on {}", ours.map_err(Error::wrap)?);
        run::<f32>(&theirs)?;
        run::<bf16>(&theirs)?;
    }
    Ok(())
}
