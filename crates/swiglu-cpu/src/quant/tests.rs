//! Fixed-point inputs.

use swiglu_core::{Element, Matrix, bf16, f16, random};

use super::RUN;
use super::digits::{Digits, PackDigits, PackUnits, Run, row_bytes, units};
use crate::panels::SendPtr;
use crate::simd::{Kernel, Simd, dispatch};
use crate::{Isa, compiled};

fn packed<T: Element>(isa: Isa, x: &Matrix<T>, offset: u32, halves: bool) -> Vec<Run> {
    let none = Run { digits: [[0; 4]; 8], start: [[7; 2]; 2], scale: 7.0, sums: [7.0; 2] };
    let mut out = vec![none; x.rows() * x.cols() / RUN];
    assert_eq!(size_of_val(out.as_slice()), row_bytes(x.rows(), x.cols()));
    let to = SendPtr(out.as_mut_ptr().cast());
    let task = PackDigits { x: x.view(), first: 0, offset, halves, out: to };
    // SAFETY: the façade is available, the buffer has the size of the rows.
    unsafe { compiled::pack_digits(isa, PackUnits(task, 0..units(x.rows(), x.cols()))) };
    out
}

/// How a façade takes inputs for weights with this offset.
struct DigitsOf(u32);

impl Kernel for DigitsOf {
    type Output = Digits;
    unsafe fn run<S: Simd>(self) -> Digits {
        Digits::of::<S>(self.0)
    }
}

/// The number that the digits of input `i` stand for, without the scale.
fn number(run: &Run, i: usize, digits: Digits) -> i64 {
    let words = &run.digits[i / 4];
    let byte = |p: usize| i64::from(words[p].to_le_bytes()[i % 4].cast_signed());
    let half = |p: usize| {
        let word = words[2 * p + i % 2].to_le_bytes();
        i64::from(i16::from_le_bytes([word[i % 4 / 2 * 2], word[i % 4 / 2 * 2 + 1]]))
    };
    match digits {
        Digits::ThreeBytes => (0..3).map(|p| byte(p) << (8 * p)).sum(),
        Digits::TwoHalves => half(0) + (half(1) << 16),
    }
}

/// Runs of ordinary values, of widely different ones, of subnormals, zeros and the largest there are, and of
/// values around the largest number of three signed bytes.
fn inputs<T: Element>() -> Matrix<T> {
    let kinds = 8;
    let value = |run: usize, i: usize| {
        let normal = random::normal(run as u64, i as u64);
        let few = random::bits(9, (run * RUN + i) as u64) % 60;
        match run % kinds {
            0 | 1 => normal,
            2 => normal * 0.5f32.powi(few as i32),
            3 => normal * f32::MIN_POSITIVE,
            4 => 0.0,
            5 => f32::from_bits((random::bits(5, i as u64) % 0x7F) as u32),
            6 => normal.signum() * (0x00FE_FEF0 + (run + i) as u32 % 32) as f32 / 1024.0,
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
        // SAFETY: the façade is available.
        let digits = unsafe { dispatch(isa, DigitsOf(offset)) };
        for (run, values) in packed(isa, &x, offset, halves).iter().zip(x.as_slice().chunks(RUN)) {
            let scale = f64::from(run.scale);
            let largest = values.iter().fold(0.0f64, |max, v| max.max(v.to_f64().abs()));
            for (i, v) in values.iter().enumerate() {
                let number = number(run, i, digits);
                let (v, error) = (v.to_f64(), number as f64 * scale - v.to_f64());
                let limit = match digits {
                    Digits::ThreeBytes => largest * 1.004 * 0.5f64.powi(23),
                    _ if v.abs() >= largest / 64.0 => 0.0,
                    _ => largest * 0.5f64.powi(30),
                };
                assert!(error.abs() <= limit, "{isa} {v:e} is off by {error:e} of {largest:e}");
            }
            let total = |range: std::ops::Range<usize>| -> i64 {
                range.map(|i| number(run, i, digits)).sum()
            };
            let starts = run.start.map(|starts| {
                let of = |p: usize| i64::from(starts[p].cast_signed()) << (16 * p);
                (0..2).map(of).sum::<i64>()
            });
            let expected = match halves {
                false => [total(0..RUN); 2],
                true => [total(0..RUN / 2), total(RUN / 2..RUN)],
            };
            assert_eq!(starts, expected.map(|t| -t * i64::from(offset)), "{isa}");
            assert_eq!(run.sums, expected.map(|t| t as f32 * run.scale), "{isa}");
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
                let sums = run.sums.map(f32::is_nan);
                assert_eq!((run.scale.is_nan(), sums), (i == 1, [i == 1; 2]), "{isa} {i}");
            }
        }
    }
}
