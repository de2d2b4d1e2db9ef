//! A layer of a model's file: what is in it, packed for a device in two element types, and its results beside plain loops.
//!
//! `cargo run --release -p swiglu --example load [FILE [LAYER]]`

#![allow(clippy::print_stdout)]

use std::error::Error;

use swiglu::{
    DType, Device, Element, Half, LoadOptions, Matrix, Mlp, MlpParams, Model, with_dtype,
};

const STORIES: &str = swiglu_fixtures::STORIES15M_FILE;

/// y of one token in float64, from the definition.
fn by_definition<T: Element>(params: &MlpParams<'_, T>, x: &[f32]) -> Vec<f64> {
    let (gated, weights) = (&params.gated, &params.gated.weights);
    let dot = |half, h| {
        let products =
            x.iter().enumerate().map(|(k, x)| f64::from(*x) * weights.at(half, h, k).to_f64());
        products.sum::<f64>()
    };
    let h: Vec<f64> = (0..weights.intermediate())
        .map(|h| gated.activation.forward(dot(Half::Gate, h), dot(Half::Up, h)))
        .collect();
    (0..x.len())
        .map(|k| h.iter().enumerate().map(|(i, h)| h * params.down_at(k, i).to_f64()).sum())
        .collect()
}

fn result<T: Element>(mlp: &Mlp, x: &[f32]) -> swiglu::Result<Vec<f64>> {
    let x = x.iter().map(|v| T::from_f32(*v)).collect();
    let y = mlp.forward(&Matrix::from_vec(x, 1, mlp.hidden())?)?;
    Ok(y.as_slice().iter().map(|v| v.to_f64()).collect())
}

pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1).filter(|_| !cfg!(test));
    let model = Model::open(args.next().unwrap_or_else(|| STORIES.into()))?;
    let layer = args.next().map_or(Ok(0), |n| n.parse())?;
    let weights = model.mlp(&LoadOptions::new(layer))?;
    println!("{}: {}", model.path().display(), weights.stored().describe());
    println!("activation {} ({:?})", weights.resolved_activation()?, weights.activation_source());

    let device = Device::best()?;
    let x: Vec<f32> =
        (0..weights.stored().hidden()).map(|i| ((i * 37 % 101) as f32 - 50.0) / 50.0).collect();
    let exact = by_definition(&weights.host::<f32>()?.mlp()?, &x);
    let norm = |v: &mut dyn Iterator<Item = f64>| v.map(|v| v * v).sum::<f64>().sqrt();
    for dtype in [DType::F32, DType::Bf16] {
        let mlp = weights.clone().dtype(dtype).to(&device)?;
        let y = with_dtype!(dtype, T => result::<T>(&mlp, &x))?;
        let off =
            norm(&mut y.iter().zip(&exact).map(|(a, b)| a - b)) / norm(&mut exact.iter().copied());
        println!(
            "{dtype} on {device}: {}, {} kB of weights, off by {off:.1e}",
            mlp.plan(1),
            mlp.weight_bytes() / 1000
        );
        // Roundings that are not all to one side: of the inputs, the weights, h and y, and of sums in f32.
        let terms = weights.stored().intermediate() as f64;
        let sums = terms.sqrt() * DType::F32.unit_roundoff();
        if off > 8.0 * dtype.unit_roundoff() + sums {
            return Err(format!("{dtype} is off by {off:.1e}").into());
        }
    }
    Ok(())
}
