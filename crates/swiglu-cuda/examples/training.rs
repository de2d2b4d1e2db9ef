//! Device time of training a block, in turns in one run: the forward pass that saves, the gradients of gate and up, the
//! whole backward pass, fused and unfused, and both through factors of the rows with the gradients of these, beside the six products of cuBLASLt alone: gate and up, down, dh, dx, dWg and
//! dWu, dWd.
//!
//! `cargo run --release -p swiglu-cuda --example training`, or with `-- portable` by the kernels of every architecture, which
//! are then taken wherever they can be, also where a product with dh in memory is expected to be faster.

#![allow(clippy::print_stdout)]

use std::error::Error;

use swiglu_core::{
    Activation, GateUpWeights, GatedLinearParams, Matrix, MlpParams, Orientation, Path, bf16,
    random,
};
use swiglu_cuda::{
    Cuda, CudaOptions, DeviceGradientsMut, DeviceMatrix, GatedLinear, Mlp, Stream, ceilings,
};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const SHAPES: [[usize; 3]; 6] = [
    [8192, 4096, 14336],
    [8192, 2048, 8192],
    [8192, 896, 4864],
    [2048, 4096, 14336],
    [2048, 896, 4864],
    [512, 4096, 14336],
];
const ROUNDS: usize = 15;
const NAMES: [&str; 10] = [
    "h",
    "h, saving",
    "forward",
    "forward, saving",
    "gate and up",
    "gate and up, unfused",
    "backward",
    "backward, unfused",
    "gate and up, scaled",
    "backward, scaled",
];

/// Microseconds of device time of a call, over enough of them that the host is ahead.
fn time(stream: &Stream, mut call: impl FnMut() -> swiglu_cuda::Result<()>) -> Result<f64> {
    const CALLS: usize = 4;
    stream.synchronize()?;
    let start = stream.record()?;
    (0..CALLS).try_for_each(|_| call())?;
    let end = stream.record()?;
    end.synchronize()?;
    Ok(f64::from(end.elapsed_ms(&start)?) * 1e3 / CALLS as f64)
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() -> Result<()> {
    let portable = std::env::args().nth(1).is_some_and(|arg| arg == "portable");
    let cuda = Cuda::with_options(&CudaOptions::new(0).with_portable_kernels(portable))?;
    println!("{}: bf16, median device time of {ROUNDS} turns, us", cuda.facts().name);
    for [m, k, h] in SHAPES {
        let matrix = |seed, rows, cols, scale| -> Result<Matrix<bf16>> {
            Ok(random::normal_matrix::<bf16>(seed, rows, cols, scale)?)
        };
        let (gate, up, down) =
            (matrix(1, h, k, 0.02)?, matrix(2, h, k, 0.02)?, matrix(3, k, h, 0.02)?);
        let weights = GateUpWeights::separate(gate.view(), up.view(), Orientation::OutIn)?;
        let gated_params = GatedLinearParams::new(weights, Activation::SWIGLU);
        let params = MlpParams::new(gated_params, down.view(), Orientation::OutIn);
        let gated = GatedLinear::new(&cuda, &gated_params)?;
        let fused_path = portable.then_some(Path::Fused);
        let [fused, unfused] = [fused_path, Some(Path::Unfused)].map(|path| match path {
            None => Mlp::new(&cuda, &params),
            Some(path) => Mlp::with_path(&cuda, &params, path),
        });
        let (fused, unfused) = (fused?, unfused?);
        let stream = cuda.new_stream()?;
        let there = |seed, rows, cols| -> Result<DeviceMatrix<bf16>> {
            Ok(DeviceMatrix::from_host(&stream, matrix(seed, rows, cols, 1.0)?.view())?)
        };
        let (x, dy) = (there(4, m, k)?, there(5, m, k)?);
        let new = |rows, cols| DeviceMatrix::<bf16>::new(&stream, rows, cols);
        let (mut y, mut h_out) = (new(m, k)?, new(m, h)?);
        let mut kept = new(m, 2 * h)?;
        let (mut dx, mut gate_up, mut dw_down) = (new(m, k)?, new(2 * h, k)?, new(k, h)?);
        let factors = random::normal_matrix::<f32>(6, 1, m, 1.0)?;
        let factors = DeviceMatrix::from_host(&stream, factors.view())?;
        let mut of_factors = DeviceMatrix::<f32>::new(&stream, 1, m)?;
        let mut us = NAMES.map(|_| Vec::new());
        let (out_in, in_out) = (Orientation::OutIn, Orientation::InOut);
        let product = |shape, transposed, orientation| {
            ceilings::Product::<bf16, bf16>::new(&stream, shape, transposed, orientation)
        };
        let mut products = [
            product([m, k, 2 * h], false, out_in)?,
            product([m, h, k], false, out_in)?,
            product([m, k, h], false, in_out)?,
            product([m, 2 * h, k], false, in_out)?,
            product([2 * h, m, k], true, in_out)?,
            product([k, m, h], true, in_out)?,
        ];
        let (mut products_us, mut six_us) = ([0; 6].map(|_| Vec::new()), Vec::new());
        for round in 0..ROUNDS + 2 {
            for (product, us) in products.iter_mut().zip(&mut products_us) {
                let taken = time(&stream, || product.enqueue(&stream))?;
                if round >= 2 {
                    us.push(taken);
                }
            }
            // In a row, which draws as much power as both passes.
            let taken = time(&stream, || products.iter_mut().try_for_each(|p| p.enqueue(&stream)))?;
            if round >= 2 {
                six_us.push(taken);
            }
            let mut pass = |which: usize| {
                let kept = <[_; 2]>::from(kept.view_mut().split_cols(h)?);
                let layer = if which < 8 && which % 2 == 1 { &unfused } else { &fused };
                let mut into = DeviceGradientsMut::default();
                if which >= 8 {
                    into = into
                        .with_row_scale(factors.view())
                        .with_row_scale_grad(of_factors.view_mut());
                }
                match which {
                    0 => gated.forward(&stream, x.view(), h_out.view_mut()),
                    1 => gated.forward_saving(&stream, x.view(), h_out.view_mut(), kept),
                    2 => fused.forward(&stream, x.view(), y.view_mut()),
                    3 => fused.forward_saving(&stream, x.view(), y.view_mut(), kept),
                    4 | 5 | 8 => layer.backward(&stream, x.view(), dy.view(), kept, into, None),
                    _ => {
                        let (gate_w, up_w) = gate_up.view_mut().split_rows(h)?;
                        let into = into
                            .with_dx(dx.view_mut())
                            .with_gate(gate_w)
                            .with_up(up_w)
                            .with_down(dw_down.view_mut());
                        layer.backward(&stream, x.view(), dy.view(), kept, into, None)
                    }
                }
            };
            for (which, us) in us.iter_mut().enumerate() {
                // What a backward pass consumes is written anew.
                if which > 3 {
                    pass(3)?;
                }
                let taken = time(&stream, || pass(which))?;
                // The first rounds compile and allocate.
                if round >= 2 {
                    us.push(taken);
                }
            }
        }
        let us = us.each_mut().map(|us| median(us));
        let products = products_us.each_mut().map(|us| median(us));
        let six = median(&mut six_us);
        println!("{m}x{k}x{h}: products {products:.0?}, in a row {six:.0}");
        for (name, us) in NAMES.iter().zip(us) {
            println!("  {name:<22} {us:9.1}");
        }
        println!(
            "  saving / not {:.3}; gate and up / product {:.3}; unfused / fused {:.3}; both passes / six products {:.3}; scaled / not {:.3}, {:.3}",
            us[1] / us[0],
            us[4] / products[2],
            us[7] / us[6],
            (us[3] + us[6]) / six,
            us[8] / us[4],
            us[9] / us[6],
        );
    }
    Ok(())
}
