//! A block that learns another one: weights in f32 that an optimiser changes, passes in bfloat16 over their rounded values,
//! gradients summed in f32 over two micro-batches a step.
//!
//! `cargo run --release -p swiglu --example train`

#![allow(clippy::print_stdout)]

use std::error::Error;

use swiglu::{
    Accumulate, Activation, CallOptions, Device, GateUpWeights, GatedLinearParams, GradientsMut,
    Matrix, Mlp, MlpParams, Orientation, SavePolicy, bf16,
};

const TOKENS: usize = 48;
const HIDDEN: usize = 24;
const INTERMEDIATE: usize = 56;
const STEPS: i32 = 300;

/// Reproducible numbers around 0 with about the given deviation.
fn random(seed: u64, rows: usize, cols: usize, deviation: f32) -> swiglu::Result<Matrix<f32>> {
    let value = |i: u64| {
        let bits = (i + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(seed << 32);
        let bits = (bits ^ bits >> 29).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        ((bits >> 40) as f32 / (1u32 << 23) as f32 - 1.0) * 1.7 * deviation
    };
    Ok(Matrix::from_values((0..(rows * cols) as u64).map(value), rows, cols)?)
}

/// Adam over one matrix.
struct Weight {
    value: Matrix<f32>,
    gradient: Matrix<f32>,
    moments: Vec<[f32; 2]>,
}

impl Weight {
    fn new(seed: u64, rows: usize, cols: usize) -> swiglu::Result<Self> {
        let value = random(seed, rows, cols, 1.0 / (cols as f32).sqrt())?;
        let moments = vec![[0.0; 2]; rows * cols];
        Ok(Self { value, gradient: Matrix::zeros(rows, cols)?, moments })
    }

    fn step(&mut self, steps_done: i32) {
        let corrected = |decay: f32| 1.0 - decay.powi(steps_done + 1);
        let values = self.value.as_mut_slice().iter_mut().zip(self.gradient.as_slice());
        for ((value, &g), [first, second]) in values.zip(&mut self.moments) {
            *first = 0.9 * *first + 0.1 * g;
            *second = 0.99 * *second + 0.01 * g * g;
            let root = (*second / corrected(0.99)).sqrt();
            *value -= 1e-2 * (*first / corrected(0.9)) / (root + 1e-8);
        }
    }
}

/// The values of three weights as a layer of bfloat16 takes them.
struct Rounded([Matrix<bf16>; 3]);

impl Rounded {
    fn of(weights: &[Weight; 3]) -> swiglu::Result<Self> {
        let [gate, up, down] = weights.each_ref().map(|w| w.value.view().to_dtype());
        Ok(Self([gate?, up?, down?]))
    }

    fn params(&self) -> swiglu::Result<MlpParams<'_, bf16>> {
        let [gate, up, down] = &self.0;
        let weights = GateUpWeights::separate(gate.view(), up.view(), Orientation::OutIn)?;
        let gated = GatedLinearParams::new(weights, Activation::SWIGLU);
        Ok(MlpParams::new(gated, down.view(), Orientation::OutIn))
    }
}

/// Losses before the first and after the last step.
fn train(device: &Device, policy: SavePolicy) -> Result<[f32; 2], Box<dyn Error>> {
    let block = |seed| -> swiglu::Result<[Weight; 3]> {
        Ok([
            Weight::new(seed, INTERMEDIATE, HIDDEN)?,
            Weight::new(seed + 1, INTERMEDIATE, HIDDEN)?,
            Weight::new(seed + 2, HIDDEN, INTERMEDIATE)?,
        ])
    };
    let teacher = Rounded::of(&block(1)?)?;
    let teacher = Mlp::from_params(device, &teacher.params()?)?;
    let mut weights = block(7)?;
    let mut student = Mlp::for_training(device, &Rounded::of(&weights)?.params()?, policy)?;

    let mut losses = Vec::new();
    for step in 0..=STEPS {
        let mut loss = 0.0;
        for batch in 0..2u64 {
            // The same few batches again and again.
            let x = random(
                100 + 2 * u64::from((step % 4).unsigned_abs()) + batch,
                TOKENS,
                HIDDEN,
                1.0,
            )?;
            let x: Matrix<bf16> = x.view().to_dtype()?;
            let (y, saved) = student.forward_train(&x)?;
            let target = teacher.forward(&x)?;
            let error =
                y.as_slice().iter().zip(target.as_slice()).map(|(y, t)| y.to_f32() - t.to_f32());
            let error: Vec<f32> = error.collect();
            loss += error.iter().map(|e| e * e).sum::<f32>() / error.len() as f32 / 2.0;
            let dy = error.iter().map(|e| bf16::from_f32(e / error.len() as f32));
            let dy = Matrix::from_values(dy, TOKENS, HIDDEN)?;
            let [gate, up, down] = weights.each_mut().map(|w| &mut w.gradient);
            // The first micro-batch replaces the gradients of the step before.
            let accumulate = if batch == 0 { Accumulate::Overwrite } else { Accumulate::Add };
            let into = GradientsMut::default()
                .with_gate_f32(gate)
                .with_up_f32(up)
                .with_down_f32(down)
                .with_accumulate(accumulate);
            student.backward_into(saved, &dy, into, &CallOptions::default())?;
        }
        losses.push(loss);
        weights.iter_mut().for_each(|w| w.step(step));
        // The layer has packed copies: these are its weights of the next step.
        student.update(&Rounded::of(&weights)?.params()?)?;
    }
    Ok([losses[0], losses[losses.len() - 1]])
}

pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    let device = Device::cpu()?;
    let [first, last] = train(&device, SavePolicy::Save)?;
    println!("{STEPS} steps: a loss of {first:.4} became {last:.6}");
    assert!(last < first / 20.0, "{first} {last}");
    // What is kept between the passes is a matter of memory and time, not of results.
    assert_eq!(train(&device, SavePolicy::Recompute)?, [first, last]);
    Ok(())
}
