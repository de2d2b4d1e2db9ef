//! Fixed-point inputs.

use swiglu_core::{Element, Matrix, bf16, f16, random};

use super::RUN;
use super::digits::{PackDigits, PackUnits, Run, row_bytes, units};
use crate::panels::SendPtr;
use crate::{Isa, compiled};

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
