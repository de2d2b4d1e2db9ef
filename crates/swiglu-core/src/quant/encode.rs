//! Quantisation of values, as ggml's reference functions (`quantize_row_q8_0_ref` and so on) define
//! it, for the types whose blocks follow from their values by a formula.

use half::f16;

use crate::dtype::Element;
use crate::error::{Error, Result};
use crate::matrix::MatrixRef;
use crate::quant::{BlockType, QuantizedMatrix};

impl BlockType {
    /// Whether [`Self::quantize`] knows the type.
    pub const fn is_quantizable(self) -> bool {
        matches!(self, BlockType::Q8_0 | BlockType::Q4_0 | BlockType::Q4_1)
    }

    /// Quantises an `[out, in]` matrix, each block of 32 inputs by itself:
    ///
    /// - Q8_0: d = max|w| / 127, q = round(w / d), halves away from zero;
    /// - Q4_0: d = w₀ / −8 with w₀ the value of the largest magnitude, q = ⌊w / d + 8.5⌋, at most 15;
    /// - Q4_1: d = (max − min) / 15, m = min, q = ⌊(w − m) / d + 0.5⌋, at most 15.
    ///
    /// Quotients are products with 1/d in `f32`, before d and m are rounded to f16.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for the other types, [`Error::OutOfRange`] if rows are not whole blocks
    /// or a scale exceeds f16, [`Error::NonFinite`].
    pub fn quantize<T: Element>(self, values: MatrixRef<'_, T>) -> Result<QuantizedMatrix> {
        let encode = match self {
            BlockType::Q8_0 => q8_0,
            BlockType::Q4_0 => q4_0,
            BlockType::Q4_1 => q4_1,
            _ => {
                return Err(Error::Unsupported {
                    what: format!("quantising to {self}"),
                    why: "its scales are found by a search, which tools that write GGUF files do; \
                          Q8_0, Q4_0 and Q4_1 follow from a formula"
                        .into(),
                });
            }
        };
        let [rows, cols] = values.shape();
        if !cols.is_multiple_of(self.elements()) {
            return Err(Error::OutOfRange {
                what: "columns of weights to quantise",
                given: cols.to_string(),
                expected: format!("whole {self} blocks of {}", self.elements()),
            });
        }
        values.expect_finite("weights to quantise")?;
        let mut data = Vec::with_capacity(rows * (cols / self.elements()) * self.bytes());
        for row in 0..rows {
            for block in values.row(row).as_chunks::<32>().0 {
                encode(&block.map(T::to_f32), &mut data)?;
            }
        }
        QuantizedMatrix::from_vec(self, data, rows, cols)
    }
}

fn push_half(value: f32, out: &mut Vec<u8>) -> Result<()> {
    let half = f16::from_f32(value);
    if !half.is_finite() {
        return Err(Error::OutOfRange {
            what: "scale or minimum of a quantised block",
            given: value.to_string(),
            expected: "at most 65504, what f16 holds; scale the weights down".into(),
        });
    }
    out.extend(half.to_le_bytes());
    Ok(())
}

/// 1/d, and 0 for a block of equal values.
fn inverse(d: f32) -> f32 {
    if d == 0.0 { 0.0 } else { 1.0 / d }
}

fn q8_0(w: &[f32; 32], out: &mut Vec<u8>) -> Result<()> {
    let d = w.iter().fold(0.0f32, |max, v| max.max(v.abs())) / 127.0;
    push_half(d, out)?;
    let inverse = inverse(d);
    out.extend(w.iter().map(|v| ((v * inverse).round() as i8).cast_unsigned()));
    Ok(())
}

fn q4_0(w: &[f32; 32], out: &mut Vec<u8>) -> Result<()> {
    // The first of the largest, as the reference takes it.
    let largest = w.iter().fold(0.0f32, |max, &v| if v.abs() > max.abs() { v } else { max });
    let d = largest / -8.0;
    push_half(d, out)?;
    let inverse = inverse(d);
    push_nibbles(w, |v| v * inverse + 8.5, out);
    Ok(())
}

fn q4_1(w: &[f32; 32], out: &mut Vec<u8>) -> Result<()> {
    let (min, max) = w
        .iter()
        .fold((f32::INFINITY, f32::NEG_INFINITY), |(min, max), &v| (min.min(v), max.max(v)));
    let d = (max - min) / 15.0;
    push_half(d, out)?;
    push_half(min, out)?;
    let inverse = inverse(d);
    push_nibbles(w, |v| (v - min) * inverse + 0.5, out);
    Ok(())
}

/// Byte j holds elements j (low) and j + 16 (high); `q` is cut to an integer of four bits.
fn push_nibbles(w: &[f32; 32], q: impl Fn(f32) -> f32, out: &mut Vec<u8>) {
    let nibble = |v: f32| (q(v) as u8).min(15);
    out.extend((0..16).map(|j| nibble(w[j]) | nibble(w[j + 16]) << 4));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random;
    use crate::{DType, Matrix};

    #[test]
    fn blocks_by_hand() {
        let mut w = [0.0f32; 32];
        (w[0], w[1], w[2], w[17]) = (-127.0, 0.5, 126.49, 1.5);
        let q = BlockType::Q8_0.quantize(MatrixRef::new(&w, 1, 32).unwrap()).unwrap().into_vec();
        assert_eq!(q[..2], f16::from_f32(1.0).to_le_bytes());
        assert_eq!([q[2], q[3], q[4], q[19]].map(u8::cast_signed), [-127, 1, 126, 2]);

        // The largest magnitude becomes −8, whatever its sign; +8 does not exist and is cut to 7.
        (w[0], w[1], w[2], w[17]) = (8.0, -8.0, 3.5, -4.0);
        let q = BlockType::Q4_0.quantize(MatrixRef::new(&w, 1, 32).unwrap()).unwrap().into_vec();
        assert_eq!(q[..2], f16::from_f32(-1.0).to_le_bytes());
        assert_eq!([q[2] & 15, q[3] & 15, q[4] & 15, q[3] >> 4, q[5]], [0, 15, 5, 12, 0x88]);

        (w[0], w[1], w[2], w[17]) = (-3.0, 12.0, 0.6, 4.4);
        let q = BlockType::Q4_1.quantize(MatrixRef::new(&w, 1, 32).unwrap()).unwrap().into_vec();
        assert_eq!(q[..4], [0x00, 0x3C, 0x00, 0xC2]);
        assert_eq!([q[4] & 15, q[5] & 15, q[6] & 15, q[5] >> 4, q[7]], [0, 15, 4, 7, 0x33]);
    }

    /// Half a step of the block, and what rounding d and m to f16 moves the value by.
    #[test]
    fn values_come_back_within_half_a_step() {
        for block in [BlockType::Q8_0, BlockType::Q4_0, BlockType::Q4_1] {
            let w = random::normal_matrix::<f32>(5, 7, 96, 3.0).unwrap();
            let back = block.quantize(w.view()).unwrap().view().to_matrix::<f32>().unwrap();
            for (given, got) in w.as_slice().chunks(32).zip(back.as_slice().chunks(32)) {
                let largest = given.iter().fold(0.0f32, |m, v| m.max(v.abs()));
                let min = given.iter().copied().fold(f32::INFINITY, f32::min);
                let max = given.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let (d, steps) = match block {
                    BlockType::Q8_0 => (largest / 127.0, 127.0),
                    BlockType::Q4_0 => (largest / 8.0, 8.0),
                    _ => ((max - min) / 15.0, 15.0),
                };
                let half = DType::F16.unit_roundoff() as f32;
                let room = half * (d * steps + min.abs()) * 1.01;
                // The opposite of the largest value would be +8 in Q4_0, and is cut to 7.
                let cut = if block == BlockType::Q4_0 { d } else { 0.5 * d * 1.0001 };
                for (a, b) in given.iter().zip(got) {
                    let whole = if a.abs() > 7.4 * d { cut } else { 0.5 * d * 1.0001 };
                    assert!((a - b).abs() <= whole + room, "{block}: {a} became {b}, step {d}");
                }
            }
            // A second time nothing changes: values on the grid stay.
            if block != BlockType::Q4_1 {
                let twice = block.quantize(back.view()).unwrap().view().to_matrix::<f32>().unwrap();
                for (a, b) in back.as_slice().iter().zip(twice.as_slice()) {
                    assert!((a - b).abs() <= a.abs() * DType::F16.unit_roundoff() as f32 * 2.0);
                }
            }
        }
    }

    #[test]
    fn equal_values_zeros_and_refusals() {
        let zeros = Matrix::<f32>::zeros(2, 64).unwrap();
        for block in BlockType::ALL {
            let Ok(q) = block.quantize(zeros.view()) else {
                assert!(!block.is_quantizable());
                let e = block.quantize(zeros.view()).unwrap_err().to_string();
                assert!(e.contains(block.name()) && e.contains("Q8_0, Q4_0 and Q4_1"), "{e}");
                continue;
            };
            assert_eq!(q.view().to_matrix::<f32>().unwrap(), zeros);
        }
        let equal = Matrix::from_vec(vec![0.75f32; 32], 1, 32).unwrap();
        let back = BlockType::Q4_1.quantize(equal.view()).unwrap();
        assert_eq!(back.view().to_matrix::<f32>().unwrap(), equal);

        let refused = |w: Vec<f32>| {
            let cols = w.len();
            BlockType::Q8_0.quantize(MatrixRef::new(&w, 1, cols).unwrap()).unwrap_err()
        };
        assert!(matches!(refused(vec![0.0; 33]), Error::OutOfRange { .. }));
        assert!(matches!(refused(vec![f32::NAN; 32]), Error::NonFinite { .. }));
        assert!(matches!(refused(vec![1e30; 32]), Error::OutOfRange { .. }));
    }
}
