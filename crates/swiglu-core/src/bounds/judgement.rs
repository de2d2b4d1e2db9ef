//! The comparison of a result with its reference.

use super::Reference;
use crate::dtype::{DType, Element};
use crate::error::Result;
use crate::matrix::MatrixRef;

/// ‖out − reference‖ / ‖reference‖ in the Frobenius norm, of the elements whose reference is finite: what
/// the others are has no distance. 0 where both norms are zero.
pub fn relative_frobenius<T: Element>(out: MatrixRef<'_, T>, reference: MatrixRef<'_, f64>) -> f64 {
    let mut squares = Squares::default();
    let mut row = vec![0.0; out.cols()];
    for i in 0..out.rows() {
        out.widen_row(i, &mut row);
        squares.add(&row, reference.row(i));
    }
    let Squares { error, norm } = squares;
    if error == 0.0 { 0.0 } else { (error / norm).sqrt() }
}

/// Sums of squares.
#[derive(Default)]
struct Squares {
    error: f64,
    norm: f64,
}

impl Squares {
    fn add(&mut self, out: &[f64], reference: &[f64]) {
        for (o, r) in out.iter().zip(reference).filter(|(_, r)| r.is_finite()) {
            self.error += (o - r).powi(2);
            self.norm += r * r;
        }
    }
}

/// What a comparison with a [`Reference`] found.
#[derive(Debug, Clone, PartialEq)]
pub struct Judgement {
    /// ‖error‖ / ‖reference‖.
    pub relative_frobenius: f64,
    /// What the relative Frobenius error may be.
    pub frobenius_limit: f64,
    /// The largest |error|.
    pub max_abs: f64,
    /// The largest |error| ÷ bound; above 1 a result is wrong.
    pub worst_ratio: f64,
    /// Where that is.
    pub worst_at: (usize, usize),
    /// The first element whose exact value rounds to infinity: no result of it is right.
    pub overflow: Option<Overflow>,
    /// The first element that is not finite where its exact value is, and would fit.
    pub lost: Option<Lost>,
}

/// A result that is not finite where the exact one fits the element type.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Lost {
    /// Row and column.
    pub at: (usize, usize),
    /// The exact value.
    pub value: f64,
    /// What was computed.
    pub given: f64,
    /// The intermediate that exceeds the element type, and its largest value; none if none does.
    pub intermediate: Option<(&'static str, f64)>,
    /// The element type.
    pub dtype: DType,
}

impl std::fmt::Display for Lost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { at, value, given, intermediate, dtype } = self;
        write!(f, "element {at:?} is {given}, exactly {value:.3e}")?;
        match intermediate {
            Some((name, largest)) => {
                let most = dtype.max_finite();
                write!(f, ": {name} reaches {largest:.3e}, beyond the {most:.3e} of {dtype}")
            }
            None => Ok(()),
        }
    }
}

/// An exact value that is not near the largest of the element type any more: it rounds to infinity.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Overflow {
    /// Row and column.
    pub at: (usize, usize),
    /// The value.
    pub value: f64,
    /// The element type.
    pub dtype: DType,
}

impl std::fmt::Display for Overflow {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { at, value, dtype } = self;
        let largest = dtype.max_finite();
        write!(
            f,
            "the exact value of element {at:?} is {value:.3e}, beyond the {largest:.3e} of {dtype}"
        )
    }
}

impl Judgement {
    /// Whether both bounds hold.
    pub fn passed(&self) -> bool {
        self.worst_ratio <= 1.0
            && (self.relative_frobenius <= self.frobenius_limit || self.relative_frobenius.is_nan())
    }
}

impl Reference {
    /// The first value that rounds to infinity. One a little beyond the largest of the type has that as
    /// its right result.
    fn overflow(&self, dtype: DType) -> Option<Overflow> {
        let least = dtype.least_infinite();
        let columns = self.value.cols().max(1);
        let mut values = self.value.as_slice().iter().enumerate();
        let (i, &value) = values.find(|(_, v)| v.is_finite() && v.abs() >= least)?;
        Some(Overflow { at: (i / columns, i % columns), value, dtype })
    }

    fn lost(&self, at: (usize, usize), value: f64, given: f64, dtype: DType) -> Lost {
        let beyond = |&&(_, largest): &&(_, f64)| largest >= dtype.least_infinite();
        let intermediate = self.intermediates.iter().find(beyond).copied();
        Lost { at, value, given, intermediate, dtype }
    }

    /// Compares a result with the reference.
    ///
    /// # Errors
    /// [`crate::Error::Shape`] if the shapes differ.
    pub fn judge<T: Element>(&self, out: MatrixRef<'_, T>) -> Result<Judgement> {
        out.expect_shape("output", self.value.shape())?;
        let mut j = Judgement {
            relative_frobenius: relative_frobenius(out, self.value.view()),
            frobenius_limit: self.frobenius_limit,
            max_abs: 0.0,
            worst_ratio: 0.0,
            worst_at: (0, 0),
            overflow: self.overflow(T::DTYPE),
            lost: None,
        };
        let mut row = vec![0.0; out.cols()];
        for i in 0..out.rows() {
            out.widen_row(i, &mut row);
            self.judge_row(i, &row, T::DTYPE, &mut j);
        }
        Ok(j)
    }

    fn judge_row(&self, i: usize, out: &[f64], dtype: DType, j: &mut Judgement) {
        let (values, bounds) = (self.value.view().row(i), self.bound.view().row(i));
        for (c, (&o, (&r, &bound))) in out.iter().zip(values.iter().zip(bounds)).enumerate() {
            let error = (o - r).abs();
            let fits = r.abs() < dtype.least_infinite();
            if j.lost.is_none() && fits && !o.is_finite() {
                j.lost = Some(self.lost((i, c), r, o, dtype));
            }
            let ratio = if r.is_nan() {
                if o.is_nan() { 0.0 } else { f64::INFINITY }
            } else if o == r {
                0.0
            } else {
                error / bound
            };
            // An overflow that the bound admits compares as ∞/∞; an inadmissible NaN is wrong.
            let ratio = match ratio.is_nan() {
                true if bound == f64::INFINITY => 0.0,
                true => f64::INFINITY,
                false => ratio,
            };
            if error.is_finite() {
                j.max_abs = j.max_abs.max(error);
            }
            if ratio > j.worst_ratio {
                (j.worst_ratio, j.worst_at) = (ratio, (i, c));
            }
        }
    }
}
