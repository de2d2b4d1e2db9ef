//! Fixed-point inputs, and weights read back through all kernels.

use swiglu_core::{BlockType, DType, Element, Matrix, MatrixRef, QuantizedRef, bf16, f16, random};

use super::digits::{PackDigits, PackUnits, Run, row_bytes, units};
use super::{RUN, Way, digit_rows_max, quantized_types, takes_pairs};
use crate::compiled;
use crate::layers::Linear;
use crate::panels::SendPtr;
use crate::{Cpu, CpuOptions, Isa};

fn packed<T: Element>(isa: Isa, x: &Matrix<T>, offset: u32, halves: bool) -> Vec<Run> {
    let none = Run { digits: [[0; 4]; 8], start: [[7; 4]; 2], scale: 7.0, sum: 7.0 };
    let mut out = vec![none; x.rows() * x.cols() / RUN];
    assert_eq!(size_of_val(out.as_slice()), row_bytes(x.rows(), x.cols()));
    let to = SendPtr(out.as_mut_ptr().cast());
    let task = PackDigits { x: x.view(), first: 0, offset, halves, out: to };
    // SAFETY: the façade is available, the buffer has the size of the rows.
    unsafe { compiled::pack_digits(isa, PackUnits(task, 0..units(x.rows(), x.cols()))) };
    out
}

/// The number that the digits of input `i` stand for, without the scale.
fn number(run: &Run, i: usize) -> i64 {
    let digit = |p: usize| i64::from(run.digits[i / 4][p].to_le_bytes()[i % 4].cast_signed());
    (0..4).map(|p| digit(p) << (8 * p)).sum()
}

/// Runs of ordinary values, of widely different ones, of subnormals, zeros and the largest there are.
fn inputs<T: Element>() -> Matrix<T> {
    let kinds = 7;
    let value = |run: usize, i: usize| {
        let normal = random::normal(run as u64, i as u64);
        let few = random::bits(9, (run * RUN + i) as u64) % 60;
        match run % kinds {
            0 | 1 => normal,
            2 => normal * 0.5f32.powi(few as i32),
            3 => normal * f32::MIN_POSITIVE,
            4 => 0.0,
            5 => f32::from_bits((random::bits(5, i as u64) % 0x7F) as u32),
            _ => normal.signum() * T::DTYPE.max_finite() as f32,
        }
    };
    let cols = 40 * RUN;
    let data = (0..3 * cols).map(|i| T::from_f32(value(i / RUN, i % RUN))).collect();
    Matrix::from_vec(data, 3, cols).unwrap()
}

fn digits_are_the_inputs<T: Element>(isa: Isa) {
    let x = inputs::<T>();
    for (offset, halves) in [(0, false), (128, false), (32, true)] {
        for (run, values) in packed(isa, &x, offset, halves).iter().zip(x.as_slice().chunks(RUN)) {
            let scale = f64::from(run.scale);
            let largest = values.iter().fold(0.0f64, |max, v| max.max(v.to_f64().abs()));
            for (i, v) in values.iter().enumerate() {
                let (v, error) = (v.to_f64(), number(run, i) as f64 * scale - v.to_f64());
                let exact = v.abs() >= largest / 64.0;
                let limit = if exact { 0.0 } else { largest * 0.5f64.powi(30) };
                assert!(error.abs() <= limit, "{isa} {v:e} is off by {error:e} of {largest:e}");
            }
            let total =
                |range: std::ops::Range<usize>| -> i64 { range.map(|i| number(run, i)).sum() };
            assert_eq!(run.sum, total(0..RUN) as f32 * run.scale, "{isa}");
            let starts = run.start.map(|digits| {
                let of = |p: usize| i64::from(digits[p].cast_signed()) << (8 * p);
                (0..4).map(of).sum::<i64>()
            });
            let expected = match halves {
                false => [total(0..RUN); 2],
                true => [total(0..RUN / 2), total(RUN / 2..RUN)],
            };
            assert_eq!(starts, expected.map(|t| -t * i64::from(offset)), "{isa}");
        }
    }
}

#[test]
fn digits_are_the_inputs_on_every_facade() {
    for isa in Isa::available() {
        digits_are_the_inputs::<f32>(isa);
        digits_are_the_inputs::<f16>(isa);
        digits_are_the_inputs::<bf16>(isa);
    }
}

#[test]
fn what_is_not_finite_spoils_its_run() {
    for isa in Isa::available() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = inputs::<f32>();
            x.as_mut_slice()[RUN + 5] = bad;
            for (i, run) in packed(isa, &x, 8, false).iter().enumerate() {
                assert_eq!((run.scale.is_nan(), run.sum.is_nan()), (i == 1, i == 1), "{isa} {i}");
            }
        }
    }
}

/// Blocks of random bits; scales and minima are finite.
fn blocks(block: BlockType, rows: usize, cols: usize) -> Vec<u8> {
    let bytes = rows * cols / block.elements() * block.bytes();
    let mut data: Vec<u8> =
        (0..bytes).map(|i| random::bits(block.id().into(), i as u64) as u8).collect();
    for b in data.chunks_exact_mut(block.bytes()) {
        for &at in super::blocks::file_halves(block) {
            b[at + 1] &= 0xBF;
        }
    }
    data
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
        let cpu = Cpu::new(&CpuOptions { isa: Some(isa), threads: Some(2) }).unwrap();
        for &block in quantized_types() {
            let (outputs, inputs) = (37, 2 * block.elements());
            let data = blocks(block, outputs, inputs);
            let weights = QuantizedRef::new(block, &data, outputs, inputs).unwrap();
            let expected = weights.to_matrix::<f32>().unwrap();
            let layer = Linear::<T>::quantized(&cpu, weights, None).unwrap();
            let few = digit_rows_max(isa, T::DTYPE, block);
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

/// Layers of every type where rows of bfloat16 are multiplied as pairs.
fn with_pairs(blocks: usize, test: impl Fn(&Linear<bf16>, QuantizedRef<'_>)) {
    for isa in Isa::available().filter(|&isa| takes_pairs(isa, DType::Bf16)) {
        let cpu = Cpu::new(&CpuOptions { isa: Some(isa), threads: Some(2) }).unwrap();
        for &block in quantized_types() {
            let inputs = blocks * block.elements();
            let weights =
                random::quantized_matrix(7, block, 45, inputs, 1.0 / inputs as f32).unwrap();
            assert_eq!(Way::of(isa, DType::Bf16, block, PAIR_ROWS), Way::Pairs);
            test(&Linear::quantized(&cpu, weights.view(), None).unwrap(), weights.view());
        }
    }
}

/// Rows of one block that are multiplied as pairs.
const PAIR_ROWS: usize = 12;

fn forward(layer: &Linear<bf16>, x: MatrixRef<'_, bf16>) -> Matrix<bf16> {
    let mut y = Matrix::zeros(x.rows(), 45).unwrap();
    layer.forward(x, y.view_mut()).unwrap();
    y
}

/// Over many chunks a row has the same bits in one block of rows as in one of several, and one that is
/// not finite spoils itself alone.
#[test]
fn rows_of_pairs_have_the_same_bits_in_every_block() {
    with_pairs(70, |layer, weights| {
        let block = weights.block();
        let x = random::normal_matrix::<bf16>(1, 3 * PAIR_ROWS, weights.cols(), 1.0).unwrap();
        let clean = forward(layer, x.view());
        let mut spoilt = x.clone();
        spoilt.as_mut_slice()[17 * weights.cols() + 40] = bf16::INFINITY;
        let spoilt = forward(layer, spoilt.view());
        for first in (0..x.rows()).step_by(PAIR_ROWS) {
            let some = forward(layer, x.view().rows_range(first, PAIR_ROWS).unwrap());
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
    with_pairs(2, |layer, weights| {
        let (block, cols) = (weights.block(), weights.cols());
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
