//! A feed-forward block over weights, inputs, outputs and a stream of another library: cudarc's slices, none of them copied.
//! Its results are compared with those of the CPU.
//!
//! `cargo run --release -p swiglu --example foreign_pointers`

#![allow(clippy::print_stdout)]

use std::error::Error;

use cudarc::driver::{CudaContext, DevicePtr, DevicePtrMut};
use swiglu::cuda::{
    Cuda, DeviceGatedLinearParams, DeviceMatrixMut, DeviceMatrixRef, DeviceMlpParams, DeviceScratch,
};
use swiglu::{
    Activation, Arrangement, Device, GateUpWeights, GatedLinearParams, Matrix, Mlp, MlpParams,
    Orientation, WeightLayout,
};

const TOKENS: usize = 5;
const HIDDEN: usize = 896;
const INTERMEDIATE: usize = 4864;

fn random(seed: usize, rows: usize, cols: usize) -> Result<Matrix<f32>, swiglu::CoreError> {
    let value = |i: usize| (((i + seed) * 2_654_435_761) % 2048) as f32 / 4e4 - 0.025;
    Matrix::from_vec((0..rows * cols).map(value).collect(), rows, cols)
}

fn main() -> Result<(), Box<dyn Error>> {
    let gate_up = random(1, 2 * INTERMEDIATE, HIDDEN)?;
    let down = random(2, HIDDEN, INTERMEDIATE)?;
    let x = random(3, TOKENS, HIDDEN)?;

    // What the other library has: its stream, and its memory.
    let context = CudaContext::new(0)?;
    let stream = context.new_stream()?;
    let gate_up_there = stream.clone_htod(gate_up.as_slice())?;
    let down_there = stream.clone_htod(down.as_slice())?;
    let x_there = stream.clone_htod(x.as_slice())?;
    let mut y_there = stream.alloc_zeros::<f32>(TOKENS * HIDDEN)?;

    // A layer over it. One matrix has gate and up, `[2H, K]`, as many models store them.
    let cuda = Cuda::new(0)?;
    let (weights, _read) = gate_up_there.device_ptr(&stream);
    let (down_weight, _read) = down_there.device_ptr(&stream);
    // SAFETY: both slices outlive the layer, and nothing writes to them.
    let mlp = unsafe {
        let both =
            DeviceMatrixRef::<f32>::from_raw(&cuda, weights, 2 * INTERMEDIATE, HIDDEN, HIDDEN)?;
        let down =
            DeviceMatrixRef::from_raw(&cuda, down_weight, HIDDEN, INTERMEDIATE, INTERMEDIATE)?;
        let gated = DeviceGatedLinearParams::packed(both, Orientation::OutIn, Activation::SWIGLU)?;
        Mlp::from_device(&cuda, &DeviceMlpParams::new(gated, down, Orientation::OutIn)?)?
    };
    let mut scratch_there = stream.alloc_zeros::<u8>(mlp.workspace_bytes(TOKENS))?;
    {
        let (from, _read) = x_there.device_ptr(&stream);
        let (to, _write) = y_there.device_ptr_mut(&stream);
        let bytes = scratch_there.len();
        let (scratch, _write) = scratch_there.device_ptr_mut(&stream);
        // SAFETY: the stream lives until the guard is dropped, the memory until the stream was waited for; it is this
        // device's, so it need not be asked whose it is, and nothing else uses it meanwhile.
        unsafe {
            let stream = cuda.borrow_stream(stream.cu_stream() as u64)?;
            let x = DeviceMatrixRef::from_raw_trusted(&cuda, from, TOKENS, HIDDEN, HIDDEN)?;
            let y = DeviceMatrixMut::from_raw_trusted(&cuda, to, TOKENS, HIDDEN, HIDDEN)?;
            let mut scratch = DeviceScratch::from_raw(&cuda, scratch, bytes)?;
            mlp.forward_with::<f32>(&stream, x, y, &mut scratch)?;
        }
    }
    let y = stream.clone_dtoh(&y_there)?;

    let gate_up = GateUpWeights::packed(
        gate_up.view(),
        WeightLayout { arrangement: Arrangement::PackedGateFirst, ..WeightLayout::HF },
    )?;
    let params = GatedLinearParams::new(gate_up, Activation::SWIGLU);
    let params = MlpParams::new(params, down.view(), Orientation::OutIn);
    let expected = Mlp::from_params(&Device::cpu()?, &params)?.forward(&x)?;
    let norm = |values: &mut dyn Iterator<Item = f32>| {
        values.map(|v| f64::from(v) * f64::from(v)).sum::<f64>().sqrt()
    };
    let off = norm(&mut y.iter().zip(expected.as_slice()).map(|(a, b)| a - b));
    let off = off / norm(&mut expected.as_slice().iter().copied());
    println!("{}: off by {off:.1e} of the result's norm from the CPU", mlp.plan(TOKENS).kernel);
    if off < 1e-5 { Ok(()) } else { Err("the results differ".into()) }
}
