//! What lent weights cost, by how they lie: device time of a layer over each layout as a multiple of the time of the layer
//! that owns a packed copy, in one run and in turns.
//!
//! `cargo run --release -p swiglu-cuda --example lent_layouts`

#![allow(clippy::print_stdout)]

use std::error::Error;

use swiglu_core::{
    Activation, GateUpWeights, GatedLinearParams, Matrix, MatrixRef, MlpParams, Orientation, bf16,
    random,
};
use swiglu_cuda::{
    Cuda, DeviceGatedLinearParams, DeviceMatrix, DeviceMatrixRef, DeviceMlpParams, GatedLinear,
    Mlp, Stream,
};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const SHAPES: [[usize; 2]; 2] = [[896, 4864], [4096, 14336]];
const TOKENS: [usize; 4] = [1, 16, 512, 4096];
const ROUNDS: usize = 15;
/// What is read between two uses of one copy of the weights: more than any L2 holds.
const ROTATED_BYTES: usize = 200 << 20;

/// How the weights lie.
#[derive(Clone, Copy)]
struct Layout {
    name: &'static str,
    orientation: Orientation,
    /// Elements between rows, and in front of the first.
    gap: usize,
    first: usize,
    bias: bool,
}

const DENSE: Layout = Layout {
    name: "[out, in], dense",
    orientation: Orientation::OutIn,
    gap: 0,
    first: 0,
    bias: false,
};
const LAYOUTS: [Layout; 6] = [
    DENSE,
    Layout { name: "rows 16 bytes further apart", gap: 8, ..DENSE },
    Layout { name: "rows 2 bytes further apart", gap: 1, ..DENSE },
    Layout { name: "2 bytes behind an address of 16", gap: 8, first: 1, ..DENSE },
    Layout { name: "[in, out], dense", orientation: Orientation::InOut, ..DENSE },
    Layout { name: "[out, in], dense, biases", bias: true, ..DENSE },
];

/// One matrix on the device, `first` elements into rows that are `gap` elements longer.
struct Weight {
    there: DeviceMatrix<bf16>,
    first: usize,
    cols: usize,
}

impl Weight {
    fn new(stream: &Stream, layout: &Layout, host: &Matrix<bf16>) -> Result<Self> {
        let (rows, cols) = (host.rows(), host.cols());
        let row = cols + layout.gap.max(layout.first);
        let mut wide = vec![bf16::ZERO; rows * row];
        for (i, to) in wide.chunks_exact_mut(row).enumerate() {
            to[layout.first..][..cols].copy_from_slice(host.view().row(i));
        }
        let there = DeviceMatrix::from_host(stream, MatrixRef::new(&wide, rows, row)?)?;
        Ok(Self { there, first: layout.first, cols })
    }

    fn view(&self) -> Result<DeviceMatrixRef<'_, bf16>> {
        Ok(self.there.view().cols_range(self.first..self.first + self.cols)?)
    }
}

/// The layers over a layout and over packed copies, as many as rotate.
struct Pair {
    lent: Vec<Mlp<bf16>>,
    owned: Vec<Mlp<bf16>>,
    lent_gated: Vec<GatedLinear<bf16>>,
    owned_gated: Vec<GatedLinear<bf16>>,
    /// What the lent ones keep.
    _weights: Vec<[Weight; 3]>,
}

fn pair(cuda: &Cuda, layout: &Layout, [k, h]: [usize; 2]) -> Result<Pair> {
    let stream = cuda.stream();
    let copies = ROTATED_BYTES.div_ceil(3 * k * h * 2).max(1);
    let mut pair = Pair {
        lent: Vec::new(),
        owned: Vec::new(),
        lent_gated: Vec::new(),
        owned_gated: Vec::new(),
        _weights: Vec::new(),
    };
    for copy in 0..copies as u64 {
        let matrix = |seed, out, inn| {
            let [rows, cols] = layout.orientation.shape(out, inn);
            random::normal_matrix::<bf16>(3 * copy + seed, rows, cols, 0.02)
        };
        let [gate, up, down] = [matrix(0, h, k)?, matrix(1, h, k)?, matrix(2, k, h)?];
        let weights = [&gate, &up, &down].map(|host| Weight::new(&stream, layout, host));
        let [there_gate, there_up, there_down] = weights;
        let weights = [there_gate?, there_up?, there_down?];
        let host_bias = [
            random::normal_matrix::<bf16>(9, 1, h, 0.1)?,
            random::normal_matrix::<bf16>(8, 1, k, 0.1)?,
        ];
        let [bias_h, bias_k] = &host_bias;
        let (there_h, there_k) = (
            DeviceMatrix::from_host(&stream, bias_h.view())?,
            DeviceMatrix::from_host(&stream, bias_k.view())?,
        );
        let activation = Activation::SWIGLU;
        let [lent_gate, lent_up, lent_down] = weights.each_ref().map(Weight::view);
        let mut gated = DeviceGatedLinearParams::separate(
            lent_gate?,
            lent_up?,
            layout.orientation,
            activation,
        )?;
        if layout.bias {
            gated = gated.biases(Some(there_h.view()), Some(there_h.view()))?;
        }
        // SAFETY: the layer keeps the memory of the matrices, and nothing writes them.
        pair.lent_gated.push(unsafe { GatedLinear::from_device(cuda, &gated) }?);
        let mut block = DeviceMlpParams::new(gated, lent_down?, layout.orientation)?;
        if layout.bias {
            block = block.down_bias(there_k.view())?;
        }
        // SAFETY: as above.
        pair.lent.push(unsafe { Mlp::from_device(cuda, &block) }?);

        let both = GateUpWeights::separate(gate.view(), up.view(), layout.orientation)?;
        let mut gated = GatedLinearParams::new(both, activation);
        let floats = |bias: &Matrix<bf16>| bias.as_slice().iter().map(|b| b.to_f32()).collect();
        let (floats_h, floats_k): (Vec<f32>, Vec<f32>) = (floats(bias_h), floats(bias_k));
        if layout.bias {
            (gated.gate_bias, gated.up_bias) = (Some(&floats_h[..]), Some(&floats_h[..]));
        }
        pair.owned_gated.push(GatedLinear::new(cuda, &gated)?);
        let mut block = MlpParams::new(gated, down.view(), layout.orientation);
        block.down_bias = layout.bias.then_some(&floats_k);
        pair.owned.push(Mlp::new(cuda, &block)?);
        pair._weights.push(weights);
    }
    Ok(pair)
}

/// Microseconds of device time of a call, over enough of them that the host is ahead.
fn time(stream: &Stream, calls: usize, mut call: impl FnMut(usize) -> Result<()>) -> Result<f64> {
    stream.synchronize()?;
    let start = stream.record()?;
    (0..calls).try_for_each(&mut call)?;
    let end = stream.record()?;
    end.synchronize()?;
    Ok(f64::from(end.elapsed_ms(&start)?) * 1e3 / calls as f64)
}

/// The median, and the quartiles.
fn quartiles(mut values: Vec<f64>) -> [f64; 3] {
    values.sort_by(f64::total_cmp);
    [1, 2, 3].map(|i| values[(values.len() - 1) * i / 4])
}

fn main() -> Result<()> {
    let cuda = Cuda::new(0)?;
    println!(
        "{}: bf16, device time of a call, lent over owned: median [quartiles] of {ROUNDS} turns",
        cuda.facts().name
    );
    for [k, h] in SHAPES {
        for layout in &LAYOUTS {
            let pair = pair(&cuda, layout, [k, h])?;
            for m in TOKENS {
                let stream = cuda.new_stream()?;
                let x = random::normal_matrix::<bf16>(7, m, k, 1.0)?;
                let x = DeviceMatrix::from_host(&stream, x.view())?;
                let mut y = DeviceMatrix::<bf16>::zeros(&stream, m, k)?;
                let mut h_out = DeviceMatrix::<bf16>::zeros(&stream, m, h)?;
                let calls = if m > 64 { 8 } else { 64 };
                let mut mlp = |layers: &[Mlp<bf16>]| {
                    time(&stream, calls, |i| {
                        Ok(layers[i % layers.len()].forward(&stream, x.view(), y.view_mut())?)
                    })
                };
                let mut gated = |layers: &[GatedLinear<bf16>]| {
                    time(&stream, calls, |i| {
                        Ok(layers[i % layers.len()].forward(&stream, x.view(), h_out.view_mut())?)
                    })
                };
                let (mut blocks, mut layers, mut block_us, mut layer_us) =
                    (vec![], vec![], vec![], vec![]);
                for round in 0..ROUNDS + 2 {
                    let [owned, lent] = [mlp(&pair.owned)?, mlp(&pair.lent)?];
                    let owned_gated = gated(&pair.owned_gated)?;
                    let lent_gated = gated(&pair.lent_gated)?;
                    // The first rounds compile and allocate.
                    if round >= 2 {
                        blocks.push(lent / owned);
                        layers.push(lent_gated / owned_gated);
                        block_us.push(owned);
                        layer_us.push(owned_gated);
                    }
                }
                let [low, block, high] = quartiles(blocks);
                let [low_gated, layer, high_gated] = quartiles(layers);
                println!(
                    "{k:>5}/{h:<5} {m:>5} {:<32} block {:8.1} us {block:.3} [{low:.3}, {high:.3}]  gated {:8.1} us {layer:.3} [{low_gated:.3}, {high_gated:.3}]",
                    layout.name,
                    quartiles(block_us)[1],
                    quartiles(layer_us)[1],
                );
            }
        }
    }
    Ok(())
}
