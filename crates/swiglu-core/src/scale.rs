//! Factors of the rows of a result that is added to another matrix, or that gradients go through.

use crate::error::{Error, Result};

/// What each row of a result is multiplied with before it is added, or was where gradients go through it: nothing for a residual,
/// one factor, or one for each row, as a router weighs the tokens of an expert.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum RowScale<'a> {
    /// The result as it is.
    None,
    /// All rows by one factor.
    Factor(f32),
    /// Each row by its own, M values.
    Rows(&'a [f32]),
}

impl RowScale<'_> {
    /// Refuses another number of factors than there are rows.
    ///
    /// # Errors
    /// [`Error::Shape`].
    pub fn validate(&self, rows: usize) -> Result<()> {
        match self {
            RowScale::Rows(factors) if factors.len() != rows => Err(Error::Shape {
                what: "row scale".into(),
                expected: format!("[{rows}]"),
                given: format!("[{}]", factors.len()),
            }),
            _ => Ok(()),
        }
    }

    /// The factor of a row.
    ///
    /// # Panics
    /// If there are factors for other rows alone.
    pub fn of_row(&self, row: usize) -> f32 {
        match self {
            RowScale::None => 1.0,
            RowScale::Factor(factor) => *factor,
            RowScale::Rows(factors) => factors[row],
        }
    }
}
