//! What a call costs the host on a CUDA device, beside a bare launch of an empty kernel through cudarc: for layers of one
//! size, and with the number of tokens changing from call to call, as in continuous batching.
//!
//! `cargo run --release -p swiglu --example host_time -- --json`

#![allow(clippy::print_stdout)]

use std::error::Error;
use std::time::Instant;

use cudarc::driver::{CudaContext, LaunchConfig};
use cudarc::nvrtc::Ptx;
use swiglu::cuda::{Cuda, DeviceGateUp, DeviceMatrix, PinnedMatrix, Stream};
use swiglu::{
    Activation, DType, Device, GateUpWeights, GatedLinear, GatedLinearParams, Matrix, Mlp,
    MlpParams, Numerics, Orientation, bf16,
};

const HIDDEN: usize = 896;
const INTERMEDIATE: usize = 4864;
/// Calls that are enqueued before the device is waited for: fewer than a stream's queue holds.
const BATCH: usize = 128;
const ROUNDS: usize = 41;
const TOKENS: usize = 256;
const LAYERS: usize = 24;
/// In the instruction set of the oldest device there is a kernel for.
const EMPTY: &str =
    ".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry empty() { ret; }\n";

type Call<'a> = Box<dyn FnMut(usize) -> Result<(), Box<dyn Error>> + 'a>;

fn random(rows: usize, cols: usize) -> Result<Matrix<bf16>, swiglu::CoreError> {
    let value = |i: usize| ((i * 2_654_435_761) % 1000) as f32 / 1e5 - 0.005;
    Matrix::from_vec((0..rows * cols).map(|i| bf16::from_f32(value(i))).collect(), rows, cols)
}

/// Microseconds of host time of each call, the median of rounds in turns.
fn medians(stream: &Stream, calls: &mut [(String, Call<'_>)]) -> Result<Vec<f64>, Box<dyn Error>> {
    let mut times = vec![Vec::new(); calls.len()];
    // The first rounds compile, plan and allocate.
    for round in 0..ROUNDS + 4 {
        for ((_, call), times) in calls.iter_mut().zip(&mut times) {
            stream.synchronize()?;
            let start = Instant::now();
            (0..BATCH).try_for_each(|i| call(round * BATCH + i))?;
            let us = start.elapsed().as_secs_f64() * 1e6 / BATCH as f64;
            if round >= 4 {
                times.push(us);
            }
        }
    }
    for times in &mut times {
        times.sort_by(f64::total_cmp);
    }
    Ok(times.iter().map(|times| times[times.len() / 2]).collect())
}

fn main() -> Result<(), Box<dyn Error>> {
    let json = std::env::args().any(|argument| argument == "--json");
    let device: Device = "cuda".parse()?;
    let Device::Cuda(cuda) = &device else { return Err("not a CUDA device".into()) };
    let stream = cuda.new_stream()?;

    let bare = CudaContext::new(cuda.ordinal())?;
    let empty = bare.load_module(Ptx::from_src(EMPTY))?.load_function("empty")?;
    let bare_stream = bare.new_stream()?;

    let weight = random(INTERMEDIATE, HIDDEN)?;
    let down = random(HIDDEN, INTERMEDIATE)?;
    let both = || GateUpWeights::separate(weight.view(), weight.view(), Orientation::OutIn);
    let gated = GatedLinearParams::new(both()?, Activation::SWIGLU);
    let layer = GatedLinear::from_params(&device, &gated)?;
    let layers = (0..LAYERS).map(|_| GatedLinear::from_params(&device, &gated));
    let layers = layers.collect::<Result<Vec<_>, _>>()?;
    let block = MlpParams::new(gated, down.view(), Orientation::OutIn);
    let mlp = Mlp::from_params(&device, &block)?;

    let matrix = |rows, cols| DeviceMatrix::<bf16>::zeros(&stream, rows, cols);
    let x = matrix(TOKENS, HIDDEN)?;
    let (gate, up, mut h) =
        (matrix(1, INTERMEDIATE)?, matrix(1, INTERMEDIATE)?, matrix(1, INTERMEDIATE)?);
    let mut calls: Vec<(String, Call<'_>)> = Vec::new();
    calls.push((
        "bare launch".into(),
        Box::new(|_| {
            let config =
                LaunchConfig { grid_dim: (1, 1, 1), block_dim: (32, 1, 1), shared_mem_bytes: 0 };
            // SAFETY: the kernel takes nothing and does nothing.
            unsafe { bare_stream.launch_builder(&empty).launch(config) }?;
            Ok(())
        }),
    ));
    calls.push(("activation".into(), {
        let (cuda, stream): (&Cuda, _) = (cuda, &stream);
        Box::new(move |_| {
            let numerics = Numerics::default_for(DType::Bf16);
            let inputs = DeviceGateUp::separate(gate.view(), up.view())?;
            Ok(cuda.activation(stream, &Activation::SWIGLU, numerics, inputs, h.view_mut())?)
        })
    }));
    calls.push(("gated linear, 1 token".into(), {
        let mut out = matrix(1, INTERMEDIATE)?;
        let (layer, stream, x) = (&layer, &stream, &x);
        Box::new(move |_| {
            Ok(layer.forward_on(stream, x.view().rows_range(0..1)?, out.view_mut())?)
        })
    }));
    // As a model's layers follow each other, on a stream that did not bring their weights.
    for (tokens, count) in [(16, 1), (16, LAYERS)] {
        let (mut out, layers) = (matrix(tokens, INTERMEDIATE)?, &layers[..count]);
        let (stream, x) = (&stream, &x);
        calls.push((
            format!("gated linear, {tokens} tokens, {count} layers in turn"),
            Box::new(move |i| {
                let x = x.view().rows_range(0..tokens)?;
                Ok(layers[i % layers.len()].forward_on(stream, x, out.view_mut())?)
            }),
        ));
    }
    // These copy, compute and wait.
    let pinned = |cols| PinnedMatrix::<bf16>::zeros(cuda, 1, cols);
    let (pinned_x, mut pinned_out) = (pinned(HIDDEN)?, pinned(INTERMEDIATE)?);
    let (host_x, mut host_out) = (random(1, HIDDEN)?, random(1, INTERMEDIATE)?);
    calls.push(("gated linear, 1 token, from and to the host, with its end".into(), {
        let layer = &layer;
        Box::new(move |_| Ok(layer.forward_into(&host_x, &mut host_out)?))
    }));
    calls.push(("gated linear, 1 token, from and to pinned memory, with its end".into(), {
        let layer = &layer;
        Box::new(move |_| Ok(layer.forward_into(&pinned_x, &mut pinned_out)?))
    }));
    // Downwards from the most, so that all of them go the same way.
    for (counts, most) in
        [(1, 1), (8, 8), (1, 16), (8, 16), (1, 64), (32, 64), (1, TOKENS), (128, TOKENS)]
    {
        let mut out = matrix(TOKENS, HIDDEN)?;
        let (mlp, stream, x) = (&mlp, &stream, &x);
        calls.push((
            format!("mlp, up to {most} tokens, {counts} numbers of them in turn"),
            Box::new(move |i| {
                let m = most - i % counts;
                let out = out.view_mut().rows_range(0..m)?;
                Ok(mlp.forward_on(stream, x.view().rows_range(0..m)?, out)?)
            }),
        ));
    }
    let medians = medians(&stream, &mut calls)?;
    if json {
        let values = calls.iter().zip(&medians).map(|((name, _), us)| (name.clone(), *us));
        let values: std::collections::BTreeMap<String, f64> = values.collect();
        println!("{}", serde_json::json!({ "device": device.to_string(), "host_us": values }));
        return Ok(());
    }
    println!("{device}: microseconds of host time a call, bf16, K {HIDDEN}, H {INTERMEDIATE}");
    for ((name, _), us) in calls.iter().zip(&medians) {
        println!("{us:7.2}  {name}");
    }
    Ok(())
}
