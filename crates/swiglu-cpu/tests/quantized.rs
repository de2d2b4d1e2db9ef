//! Quantised weights read back through all kernels, which are compiled once for this program.

use swiglu_core::{
    Activation, BlockType, DType, Element, Matrix, MatrixRef, Op, Path, QuantizedGatedLinearParams,
    QuantizedMatrix, QuantizedRef, bf16, bounds, random,
};
use swiglu_cpu::{Cpu, CpuOptions, GatedLinear, Isa, expect_quantized, quantized_types};

/// x·W as the gate of a layer whose up features are 1: their weights are 0.
fn linear<T: Element>(cpu: &Cpu, gate: QuantizedRef<'_>) -> GatedLinear<T> {
    let block = gate.kind().block().unwrap();
    let zeros = vec![0; gate.bytes().len()];
    let up = QuantizedMatrix::from_vec(block, zeros, gate.rows(), gate.cols()).unwrap();
    let ones = vec![1.0; gate.rows()];
    let mut params =
        QuantizedGatedLinearParams::new(gate, up.view(), Activation::BILINEAR, T::DTYPE);
    params.up_bias = Some(&ones);
    GatedLinear::quantized(cpu, &params).unwrap()
}

/// Blocks of random bits; scales and minima are finite.
fn blocks(block: BlockType, rows: usize, cols: usize) -> Vec<u8> {
    let bytes = rows * cols / block.elements() * block.bytes();
    let mut data: Vec<u8> =
        (0..bytes).map(|i| random::bits(block.id().into(), i as u64) as u8).collect();
    for b in data.chunks_exact_mut(block.bytes()) {
        halves(block).iter().for_each(|&at| b[at + 1] &= 0xBF);
        if block == BlockType::MXFP4 {
            // Subnormal scales, and others at which no sum overflows.
            b[0] = b[0].min(190);
        }
    }
    data
}

/// Where a block has its f16 scale, and behind it its minimum.
fn halves(block: BlockType) -> &'static [usize] {
    match block {
        BlockType::Q2_K => &[80, 82],
        BlockType::Q3_K => &[108],
        BlockType::Q6_K => &[208],
        BlockType::MXFP4 => &[],
        _ if block.has_minimum() => &[0, 2],
        _ => &[0],
    }
}

/// What has no kernels is refused with the types that have, and planned as decoded ones.
#[test]
fn types_without_kernels_are_refused() {
    let cpu = Cpu::new(&CpuOptions::default().with_threads(1)).unwrap();
    let others = BlockType::ALL.into_iter().filter(|&b| !quantized_types().contains(&b.into()));
    let mut refused = 0;
    for block in others {
        let data = blocks(block, 3, block.elements());
        let weights = QuantizedRef::new(block, &data, 3, block.elements()).unwrap();
        let params =
            QuantizedGatedLinearParams::new(weights, weights, Activation::SWIGLU, DType::F32);
        let e = GatedLinear::<f32>::quantized(&cpu, &params).unwrap_err().to_string();
        assert!(e.contains(block.name()) && e.contains("kernels for Q4_0, "), "{e}");
        let e = expect_quantized(Op::Mlp, DType::Bf16, block.into()).unwrap_err().to_string();
        assert!(e.contains(&format!("mlp of bf16 with {block} weights")), "{e}");
        for m in [1, 100] {
            let plan = cpu.plan(params.problem(m, DType::F32), Path::Fused).unwrap();
            assert!(plan.reason.contains("weights decoded to f32"), "{plan}: {}", plan.reason);
        }
        refused += 1;
    }
    assert_eq!(refused + quantized_types().len(), BlockType::ALL.len());
}

/// A row of x that is 1 at one input reads the weights of that input, to the bit: through the digits
/// with few rows, through decoded panels or, in bfloat16, integers with many.
#[test]
fn one_hot_rows_read_the_weights_to_the_bit() {
    weights_are_read_back::<f32>();
    weights_are_read_back::<bf16>();
}

fn weights_are_read_back<T: Element>() {
    for isa in Isa::available() {
        let cpu = Cpu::new(&CpuOptions::default().with_isa(isa).with_threads(2)).unwrap();
        for block in quantized_types().iter().filter_map(|kind| kind.block()) {
            let (outputs, inputs) = (37, 2 * block.elements());
            let data = blocks(block, outputs, inputs);
            let weights = QuantizedRef::new(block, &data, outputs, inputs).unwrap();
            let expected = weights.to_matrix::<f32>().unwrap();
            let layer = linear::<T>(&cpu, weights);
            let few = cpu.quantized_rows(T::DTYPE, block);
            for m in [1, 2, few, few + 1, inputs] {
                for first in (0..inputs).step_by(m) {
                    let mut x = Matrix::<T>::zeros(m, inputs).unwrap();
                    for i in 0..m {
                        x.as_mut_slice()[i * inputs + (first + i) % inputs] = T::from_f32(1.0);
                    }
                    let mut y = Matrix::<T>::zeros(m, outputs).unwrap();
                    layer.forward(x.view(), y.view_mut()).unwrap();
                    for (i, got) in y.as_slice().iter().enumerate() {
                        let (k, o) = ((first + i / outputs) % inputs, i % outputs);
                        let want = T::from_f32(expected.as_slice()[o * inputs + k]);
                        // A sum of zeros has either sign.
                        let at = format!("{isa} {block} m = {m}: output {o}, input {k}");
                        assert_eq!(got.to_f32(), want.to_f32(), "{at}");
                    }
                }
            }
        }
    }
}

/// Weights and inputs whose products are as large as they can be, so that sums come closest to the ends of 16 and
/// 32 bits, and runs in which one input is far above the others.
#[test]
fn extremes_keep_to_the_bound() {
    const COLS: usize = 512;
    // Digits of 8 bits that are all 127, all −127, and 127 or −127 before two that are −128 or 127; digits of 16
    // bits that are 2¹⁴ and −2¹⁵; the least and the largest of a binade.
    let constants = [0x7F_7F7F, -0x7F_7F7F, 0x7E_7F80, -0x7E_8081, 0x3FFF_8000, 1, 0xFF_FFFF];
    let rows = 2 * constants.len() + 1;
    let value = |r: usize, i: usize| match constants.get(r / 2) {
        Some(&c) if r.is_multiple_of(2) || (i / 2).is_multiple_of(2) => c as f32,
        Some(&c) => -c as f32,
        None if i == 40 => 1e6,
        None => random::normal(1, i as u64),
    };
    let x: Vec<f32> = (0..rows * COLS).map(|i| value(i / COLS, i % COLS)).collect();
    let x = Matrix::from_vec(x, rows, COLS).unwrap();
    for block in quantized_types().iter().filter_map(|kind| kind.block()) {
        for byte in [0x00, 0xFF, 0x7F, 0x80, 0x0F, 0xF0] {
            let outputs = 19;
            let mut data = vec![byte; outputs * COLS / block.elements() * block.bytes()];
            for b in data.chunks_exact_mut(block.bytes()) {
                for (&at, value) in halves(block).iter().zip([0x3C00_u16, 0x3400]) {
                    b[at..at + 2].copy_from_slice(&value.to_le_bytes());
                }
                if block == BlockType::MXFP4 {
                    b[0] = 128;
                }
            }
            let gate = QuantizedRef::new(block, &data, outputs, COLS).unwrap();
            let zeros = vec![0; data.len()];
            let up = QuantizedRef::new(block, &zeros, outputs, COLS).unwrap();
            let ones = vec![1.0; outputs];
            let mut params =
                QuantizedGatedLinearParams::new(gate, up, Activation::BILINEAR, DType::F32);
            params.up_bias = Some(&ones);
            for isa in Isa::available() {
                let cpu = Cpu::new(&CpuOptions::default().with_isa(isa).with_threads(1)).unwrap();
                let layer = GatedLinear::<f32>::quantized(&cpu, &params).unwrap();
                for m in [1, 2, 3, rows] {
                    for first in (0..=rows - m).step_by(m) {
                        let x = x.view().rows_range(first..first + m).unwrap();
                        let mut y = Matrix::zeros(m, outputs).unwrap();
                        layer.forward(x, y.view_mut()).unwrap();
                        let judged = bounds::quantized_gated_linear(x, &params).unwrap();
                        let judged = judged.judge(y.view()).unwrap();
                        assert!(
                            judged.worst_ratio <= 1.0,
                            "{isa} {block} {byte:#x} {first} {m}: {judged:?}"
                        );
                    }
                }
            }
        }
    }
}

/// Layers of every type where rows of bfloat16 are multiplied as pairs.
fn with_pairs(blocks: usize, test: impl Fn(&GatedLinear<bf16>, BlockType, QuantizedRef<'_>)) {
    for isa in Isa::available().filter(|isa| *isa >= Isa::Avx512Bf16) {
        let cpu = Cpu::new(&CpuOptions::default().with_isa(isa).with_threads(2)).unwrap();
        for block in quantized_types().iter().filter_map(|kind| kind.block()) {
            let inputs = blocks * block.elements();
            let weights =
                random::quantized_matrix(7, block, 45, inputs, 1.0 / inputs as f32).unwrap();
            let layer = linear::<bf16>(&cpu, weights.view());
            assert!(layer.plan(PAIR_ROWS).reason.contains("as bfloat16 integers"), "{block}");
            test(&layer, block, weights.view());
        }
    }
}

/// Rows of one block that are multiplied as pairs.
const PAIR_ROWS: usize = 12;

fn forward(layer: &GatedLinear<bf16>, x: MatrixRef<'_, bf16>) -> Matrix<bf16> {
    let mut y = Matrix::zeros(x.rows(), 45).unwrap();
    layer.forward(x, y.view_mut()).unwrap();
    y
}

/// Over many chunks a row has the same bits in one block of rows as in one of several, and one that is
/// not finite spoils itself alone.
#[test]
fn rows_of_pairs_have_the_same_bits_in_every_block() {
    with_pairs(70, |layer, block, weights| {
        let x = random::normal_matrix::<bf16>(1, 3 * PAIR_ROWS, weights.cols(), 1.0).unwrap();
        let clean = forward(layer, x.view());
        let mut spoilt = x.clone();
        spoilt.as_mut_slice()[17 * weights.cols() + 40] = bf16::INFINITY;
        let spoilt = forward(layer, spoilt.view());
        for first in (0..x.rows()).step_by(PAIR_ROWS) {
            let some = forward(layer, x.view().rows_range(first..first + PAIR_ROWS).unwrap());
            for r in 0..PAIR_ROWS {
                let row = first + r;
                assert_eq!(some.view().row(r), clean.view().row(row), "{block} row {row}");
                match row {
                    17 => assert!(spoilt.view().row(row).iter().all(|v| !v.is_finite()), "{block}"),
                    _ => assert_eq!(spoilt.view().row(row), clean.view().row(row), "{block}"),
                }
            }
        }
    });
}

/// Inputs as large as there are do not overflow before the result does, and small ones, down to where
/// pair dot products flush, keep their accuracy.
#[test]
fn pairs_keep_to_their_bound_at_every_magnitude() {
    with_pairs(2, |layer, block, weights| {
        let cols = weights.cols();
        let largest = bf16::MAX.to_f32() / 8.0;
        for scale in [largest, 2f32.powi(100), 1.0, 2f32.powi(-90), 2f32.powi(-110)] {
            let mut x = random::normal_matrix::<bf16>(1, PAIR_ROWS + 1, cols, 1.0).unwrap();
            for v in x.as_mut_slice() {
                *v = bf16::from_f32(v.to_f32().clamp(-8.0, 8.0) * scale);
            }
            let y = forward(layer, x.view());
            for (i, y) in y.as_slice().iter().enumerate() {
                let (r, o) = (i / 45, i % 45);
                let (mut value, mut bound, mut x) = (0.0, 0.0, x.view().row(r).iter());
                block.terms(weights.row(o), |product, minimum| {
                    let x = x.next().unwrap().to_f64();
                    let (product, minimum) = (f64::from(product), f64::from(minimum));
                    value += x * (product + minimum);
                    // As `swiglu_core::bounds` derives it.
                    let rounded = 1.2 * cols as f64 * f64::from(f32::EPSILON) / 2.0;
                    let error = rounded * x.abs() + 2f64.powi(-112);
                    bound += error * (product.abs() + minimum.abs());
                });
                let bound = bound + (value.abs() + bound) / 256.0 + 2f64.powi(-134);
                let error = (y.to_f64() - value).abs();
                assert!(error <= bound, "{block} {scale:e}: {y} is off by {error:e} of {value:e}");
            }
        }
    });
}
