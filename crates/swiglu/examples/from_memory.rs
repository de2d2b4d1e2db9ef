//! A block from a program's own memory: weights as bytes of a mapped file, rows of a larger buffer as input and output, and
//! the residual added in the same call.
//!
//! `cargo run --release -p swiglu --example from_memory`

#![allow(clippy::print_stdout)]

use std::error::Error;

use swiglu::{
    Activation, Device, GateUpWeights, GatedLinearParams, MatrixMut, MatrixRef, Mlp, MlpParams,
    Orientation, RowScale,
};

const TOKENS: usize = 3;
const HIDDEN: usize = 64;
const INTERMEDIATE: usize = 160;

/// What a mapped file has: numbers as little-endian bytes, of which the first is where a number may be.
fn mapped(seed: usize, len: usize) -> Vec<u32> {
    let value = |i: usize| ((i + seed) * 2_654_435_761 % 2048) as f32 / 4e3 - 0.25;
    (0..len).map(|i| value(i).to_bits().to_le()).collect()
}

fn bytes(words: &[u32]) -> &[u8] {
    // SAFETY: any part of memory is bytes.
    unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), size_of_val(words)) }
}

pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    let weight = HIDDEN * INTERMEDIATE;
    let [gate, up, down] = [1, 2, 3].map(|seed| mapped(seed, weight));
    let of = |file, rows, cols| MatrixRef::<f32>::from_le_bytes(bytes(file), rows, cols);
    let gate_up = GateUpWeights::separate(
        of(&gate, INTERMEDIATE, HIDDEN)?,
        of(&up, INTERMEDIATE, HIDDEN)?,
        Orientation::OutIn,
    )?;
    let down = of(&down, HIDDEN, INTERMEDIATE)?;
    let gated = GatedLinearParams::new(gate_up, Activation::SWIGLU);
    let params = MlpParams::new(gated, down, Orientation::OutIn);
    let mlp = Mlp::from_params(&Device::cpu()?, &params)?;
    println!(
        "{} takes {} bytes for {TOKENS} tokens",
        mlp.plan(TOKENS),
        mlp.workspace_bytes(TOKENS)
    );

    // A buffer of the program: each token's hidden state stands beside something else.
    let stride = HIDDEN + 16;
    let states: Vec<f32> = (0..TOKENS * stride).map(|i| (i % 19) as f32 / 19.0 - 0.5).collect();
    let x = MatrixRef::with_stride(&states, TOKENS, HIDDEN, stride)?;
    let mut next = states.clone();
    let mut out = MatrixMut::with_stride(&mut next, TOKENS, HIDDEN, stride)?;
    mlp.forward_add_into(x, RowScale::None, &mut out)?; // next = states + y

    let y = mlp.forward(x)?;
    for (i, (next, state)) in next.iter().zip(&states).enumerate() {
        let (row, col) = (i / stride, i % stride);
        let expected = if col < HIDDEN { state + y[(row, col)] } else { *state };
        assert_eq!(*next, expected, "row {row}, column {col}");
    }
    println!("token 0: {:?} became {:?}", &states[..3], &next[..3]);

    // What does not fit is refused with its values.
    let error = mlp.forward(x.cols_range(1..HIDDEN)?).expect_err("a column is missing");
    println!("{:?}: {error}", error.kind());
    Ok(())
}
