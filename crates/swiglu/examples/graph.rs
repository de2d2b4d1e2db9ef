//! A feed-forward block as a CUDA graph: captured once, launched for each token, on whichever stream.
//!
//! `cargo run --release -p swiglu --example graph`

#![allow(clippy::print_stdout)]

use std::error::Error;
use std::path::Path;

use swiglu::cuda::DeviceMatrix;
use swiglu::{Device, LoadOptions, Matrix, Model, bf16};

fn main() -> Result<(), Box<dyn Error>> {
    run(swiglu_fixtures::STORIES15M_FILE.as_ref())
}

pub(crate) fn run(layer: &Path) -> Result<(), Box<dyn Error>> {
    let weights = Model::open(layer)?.mlp(&LoadOptions::default())?.dtype(swiglu::DType::Bf16);
    let device: Device = "cuda".parse()?;
    let Device::Cuda(cuda) = &device else { return Err("not a CUDA device".into()) };
    let (mlp, stream) = (weights.to(&device)?, cuda.new_stream()?);

    // The graph owns its input and output, and keeps the weights.
    let x = DeviceMatrix::<bf16>::zeros(&stream, 1, mlp.hidden())?;
    let out = DeviceMatrix::<bf16>::zeros(&stream, 1, mlp.out_features())?;
    let mut graph = mlp.capture_on(&stream, x, out)?;
    for token in 1..=3u8 {
        let values = vec![bf16::from_f32(f32::from(token) / 8.0); mlp.hidden()];
        let values = Matrix::from_vec(values, 1, mlp.hidden())?;
        graph.x_mut().upload(&stream, values.view())?;
        graph.launch(&stream)?;
        let y = graph.out().to_host()?;
        assert_eq!(y.as_slice(), mlp.forward(&values)?.as_slice());
        println!("token {token}: y begins with {:?}", &y.as_slice()[..4]);
    }
    Ok(())
}
