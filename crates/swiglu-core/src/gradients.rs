//! What a backward pass is asked for and gives: what the forward pass keeps for it, which gradients are wanted, and where
//! they go.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::dtype::{DType, Element};
use crate::error::{Error, Result, expect_len};
use crate::layout::Orientation;
use crate::matrix::{Matrix, MatrixMut};
use crate::problem::{Accumulate, Op, Problem};
use crate::scale::RowScale;
use crate::setters;

/// What a forward pass keeps of gate and up for the backward pass. x is borrowed, not kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum SavePolicy {
    /// Both, 2H values of T a token. The backward pass of a block takes the time of six products of M·K·H.
    #[default]
    Save,
    /// Gate, H values a token: up is computed again, which makes them seven.
    SaveGate,
    /// Neither: both are computed again, which makes them eight.
    Recompute,
}

impl SavePolicy {
    /// Every policy.
    pub const ALL: [SavePolicy; 3] =
        [SavePolicy::Save, SavePolicy::SaveGate, SavePolicy::Recompute];

    /// `save`, `save-gate` or `recompute`.
    pub const fn name(self) -> &'static str {
        match self {
            SavePolicy::Save => "save",
            SavePolicy::SaveGate => "save-gate",
            SavePolicy::Recompute => "recompute",
        }
    }

    /// Bytes that `m` tokens keep between the passes; the most there are where it is more.
    pub fn kept_bytes(self, m: usize, intermediate: usize, dtype: DType) -> usize {
        let values = match self {
            SavePolicy::Save => 2,
            SavePolicy::SaveGate => 1,
            SavePolicy::Recompute => 0,
        };
        (values * dtype.size()).saturating_mul(m).saturating_mul(intermediate)
    }
}

impl fmt::Display for SavePolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for SavePolicy {
    type Err = Error;
    fn from_str(s: &str) -> Result<Self> {
        let found = Self::ALL.into_iter().find(|policy| policy.name() == s);
        found.ok_or_else(|| Error::UnknownName {
            what: "save policy",
            given: s.to_owned(),
            choices: Self::ALL.map(Self::name).join(", "),
        })
    }
}

/// Which gradients a backward pass computes: what is not wanted costs nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Wanted {
    /// ∂L/∂x.
    pub dx: bool,
    /// ∂L/∂Wg.
    pub gate: bool,
    /// ∂L/∂Wu.
    pub up: bool,
    /// ∂L/∂Wd, of a block.
    pub down: bool,
    /// ∂L/∂bg, ∂L/∂bu and, of a block, ∂L/∂bd, where the layer has biases.
    pub biases: bool,
}

impl Wanted {
    /// All of them.
    pub const ALL: Wanted = Wanted { dx: true, gate: true, up: true, down: true, biases: true };
    /// None.
    pub const NONE: Wanted =
        Wanted { dx: false, gate: false, up: false, down: false, biases: false };
    /// ∂L/∂x alone: the weights are frozen.
    pub const INPUT: Wanted = Wanted { dx: true, ..Wanted::NONE };
    /// Those of weights and biases: nothing before the layer learns.
    pub const WEIGHTS: Wanted = Wanted { dx: false, ..Wanted::ALL };

    setters! {
        /// Whether ∂L/∂x is wanted.
        with_dx(dx: bool);
        /// Whether ∂L/∂Wg is wanted.
        with_gate(gate: bool);
        /// Whether ∂L/∂Wu is wanted.
        with_up(up: bool);
        /// Whether ∂L/∂Wd is wanted.
        with_down(down: bool);
        /// Whether those of biases are wanted.
        with_biases(biases: bool);
    }
}

impl Default for Wanted {
    fn default() -> Self {
        Wanted::ALL
    }
}

/// Gradients in matrices of their own. Those of weights have the orientation of the layer's weights: for
/// [`Orientation::OutIn`] ∂L/∂Wg and ∂L/∂Wu are `[H, K]` and ∂L/∂Wd is `[K, H]`, for [`Orientation::InOut`] they are the
/// transposes. Gate and up are apart in every arrangement.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Gradients<T> {
    /// ∂L/∂x, `[M, K]`.
    pub dx: Option<Matrix<T>>,
    /// ∂L/∂Wg.
    pub gate: Option<Matrix<T>>,
    /// ∂L/∂Wu.
    pub up: Option<Matrix<T>>,
    /// ∂L/∂Wd.
    pub down: Option<Matrix<T>>,
    /// ∂L/∂bg, H values.
    pub gate_bias: Option<Vec<f32>>,
    /// ∂L/∂bu, H values.
    pub up_bias: Option<Vec<f32>>,
    /// ∂L/∂bd, K values.
    pub down_bias: Option<Vec<f32>>,
}

/// How a layer's weights lie, as far as the shapes of their gradients follow from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct GradientShapes {
    /// Rows and columns of ∂L/∂Wg and of ∂L/∂Wu.
    pub gate_up: [usize; 2],
    /// Of ∂L/∂Wd; none where there is no down projection.
    pub down: Option<[usize; 2]>,
    /// K.
    pub hidden: usize,
    /// H.
    pub intermediate: usize,
}

impl GradientShapes {
    /// The shapes of a layer whose weights have these orientations.
    pub fn new(problem: &Problem, down: Orientation) -> Self {
        let (k, h) = (problem.hidden, problem.intermediate);
        let gate_up = problem.layout.orientation.shape(h, k);
        let down = (problem.op == Op::Mlp).then(|| down.shape(k, h));
        Self { gate_up, down, hidden: k, intermediate: h }
    }

    /// Refuses factors of a result's rows, and places for their gradients, where these are given and there is no down
    /// projection.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub fn expect_row_scale(&self, given: bool) -> Result<()> {
        match given && self.down.is_none() {
            false => Ok(()),
            true => Err(Error::Unsupported {
                what: "a row scale in the backward pass of a gated linear layer".into(),
                why: "factors are of the rows of a block's result; multiply the gradient of h by them".into(),
            }),
        }
    }
}

impl<T: Element> Gradients<T> {
    /// Zeros for the gradients of `m` tokens that are wanted; biases where the layer has some.
    ///
    /// # Errors
    /// As [`Matrix::zeros`].
    pub fn zeros(m: usize, shapes: &GradientShapes, wanted: Wanted, bias: bool) -> Result<Self> {
        let matrix = |wanted: bool, [rows, cols]: [usize; 2]| {
            wanted.then(|| Matrix::zeros(rows, cols)).transpose()
        };
        let down = shapes.down.map(|shape| matrix(wanted.down, shape)).transpose()?;
        let biases = |n: usize| (wanted.biases && bias).then(|| vec![0.0; n]);
        Ok(Self {
            dx: matrix(wanted.dx, [m, shapes.hidden])?,
            gate: matrix(wanted.gate, shapes.gate_up)?,
            up: matrix(wanted.up, shapes.gate_up)?,
            down: down.flatten(),
            gate_bias: biases(shapes.intermediate),
            up_bias: biases(shapes.intermediate),
            down_bias: shapes.down.and(biases(shapes.hidden)),
        })
    }

    /// These matrices as the places that gradients go to.
    pub fn as_mut(&mut self) -> GradientsMut<'_, T> {
        GradientsMut {
            dx: self.dx.as_mut().map(Matrix::view_mut),
            gate: self.gate.as_mut().map(|m| GradientMut::Element(m.view_mut())),
            up: self.up.as_mut().map(|m| GradientMut::Element(m.view_mut())),
            down: self.down.as_mut().map(|m| GradientMut::Element(m.view_mut())),
            gate_bias: self.gate_bias.as_deref_mut(),
            up_bias: self.up_bias.as_deref_mut(),
            down_bias: self.down_bias.as_deref_mut(),
            ..GradientsMut::default()
        }
    }
}

/// Where the gradient of a weight goes: as values of T, or of `f32`, which it is summed in.
#[derive(Debug)]
#[non_exhaustive]
pub enum GradientMut<'a, T> {
    /// Values of T.
    Element(MatrixMut<'a, T>),
    /// Values of `f32`.
    F32(MatrixMut<'a, f32>),
}

impl<T: Element> GradientMut<'_, T> {
    /// The type of the values.
    pub fn dtype(&self) -> DType {
        match self {
            GradientMut::Element(_) => T::DTYPE,
            GradientMut::F32(_) => DType::F32,
        }
    }

    /// Refuses another shape.
    ///
    /// # Errors
    /// [`Error::Shape`], which names `what`.
    pub fn expect_shape(&self, what: &str, expected: [usize; 2]) -> Result<()> {
        match self {
            GradientMut::Element(m) => m.expect_shape(what, expected),
            GradientMut::F32(m) => m.expect_shape(what, expected),
        }
    }
}

/// Where gradients go that a caller has the memory for, and what they go through: what has no place is not computed. Shapes are
/// those of [`Gradients`].
#[derive(Debug)]
#[non_exhaustive]
pub struct GradientsMut<'a, T> {
    /// ∂L/∂x, `[M, K]`: always overwritten.
    pub dx: Option<MatrixMut<'a, T>>,
    /// ∂L/∂Wg.
    pub gate: Option<GradientMut<'a, T>>,
    /// ∂L/∂Wu.
    pub up: Option<GradientMut<'a, T>>,
    /// ∂L/∂Wd.
    pub down: Option<GradientMut<'a, T>>,
    /// ∂L/∂bg, H values.
    pub gate_bias: Option<&'a mut [f32]>,
    /// ∂L/∂bu, H values.
    pub up_bias: Option<&'a mut [f32]>,
    /// ∂L/∂bd, K values.
    pub down_bias: Option<&'a mut [f32]>,
    /// What each row of a block's result was multiplied with, M factors s or one, where the gradient that is given is that of
    /// s ⊙ y: as a router weighs the tokens of an expert. All gradients are then those through the product, whose forward pass
    /// `forward_add` is on a CPU. h times its factor has to be finite in T.
    pub row_scale: RowScale<'a>,
    /// ∂L/∂s of each row, M values, of a block: always overwritten. It does not depend on the factors, and y need not be kept
    /// for it; where all rows have one factor, that has their sum.
    pub row_scale_grad: Option<&'a mut [f32]>,
    /// Whether gradients of weights and biases replace what is there or are added to it.
    pub accumulate: Accumulate,
}

impl<T> Default for GradientsMut<'_, T> {
    fn default() -> Self {
        Self {
            dx: None,
            gate: None,
            up: None,
            down: None,
            gate_bias: None,
            up_bias: None,
            down_bias: None,
            row_scale: RowScale::None,
            row_scale_grad: None,
            accumulate: Accumulate::Overwrite,
        }
    }
}

impl<'a, T: Element> GradientsMut<'a, T> {
    setters! {
        /// A place for ∂L/∂x.
        with_dx(dx: impl Into<MatrixMut<'a, T>>, Some(dx.into()));
        /// A place for ∂L/∂Wg in values of T.
        with_gate(gate: impl Into<MatrixMut<'a, T>>, Some(GradientMut::Element(gate.into())));
        /// A place for ∂L/∂Wu in values of T.
        with_up(up: impl Into<MatrixMut<'a, T>>, Some(GradientMut::Element(up.into())));
        /// A place for ∂L/∂Wd in values of T.
        with_down(down: impl Into<MatrixMut<'a, T>>, Some(GradientMut::Element(down.into())));
        /// A place for ∂L/∂Wg in `f32`.
        with_gate_f32(gate: impl Into<MatrixMut<'a, f32>>, Some(GradientMut::F32(gate.into())));
        /// A place for ∂L/∂Wu in `f32`.
        with_up_f32(up: impl Into<MatrixMut<'a, f32>>, Some(GradientMut::F32(up.into())));
        /// A place for ∂L/∂Wd in `f32`.
        with_down_f32(down: impl Into<MatrixMut<'a, f32>>, Some(GradientMut::F32(down.into())));
        /// A place for ∂L/∂bg.
        with_gate_bias(gate_bias: &'a mut [f32], Some(gate_bias));
        /// A place for ∂L/∂bu.
        with_up_bias(up_bias: &'a mut [f32], Some(up_bias));
        /// A place for ∂L/∂bd.
        with_down_bias(down_bias: &'a mut [f32], Some(down_bias));
        /// The factors of a block's rows.
        with_row_scale(row_scale: RowScale<'a>);
        /// A place for the gradient of each row's factor.
        with_row_scale_grad(row_scale_grad: &'a mut [f32], Some(row_scale_grad));
        /// Adds to what is there, or replaces it.
        with_accumulate(accumulate: Accumulate);
    }

    /// Refuses places of other shapes than the gradients of `m` tokens have.
    ///
    /// # Errors
    /// [`Error::Shape`]; also for a down projection that there is none of. [`Error::Unsupported`] for factors of the rows of a
    /// layer without one.
    pub fn validate(&self, m: usize, shapes: &GradientShapes) -> Result<()> {
        let GradientShapes { gate_up, down, hidden, intermediate } = *shapes;
        if let Some(dx) = &self.dx {
            dx.expect_shape("dx", [m, hidden])?;
        }
        for (what, place) in [("dw_gate", &self.gate), ("dw_up", &self.up)] {
            place.as_ref().map_or(Ok(()), |place| place.expect_shape(what, gate_up))?;
        }
        let none = || Error::Shape {
            what: "gradient of the down projection".into(),
            expected: "none: the layer has no down projection".into(),
            given: "a place for one".into(),
        };
        match (&self.down, down) {
            (Some(place), Some(shape)) => place.expect_shape("dw_down", shape)?,
            (Some(_), None) => return Err(none()),
            (None, _) => {}
        }
        if self.down_bias.is_some() && down.is_none() {
            return Err(none());
        }
        let scales = self.row_scale != RowScale::None || self.row_scale_grad.is_some();
        shapes.expect_row_scale(scales)?;
        self.row_scale.validate(m)?;
        expect_len("d_row_scale", self.row_scale_grad.as_deref(), m)?;
        let biases = [
            ("db_gate", &self.gate_bias, intermediate),
            ("db_up", &self.up_bias, intermediate),
            ("db_down", &self.down_bias, hidden),
        ];
        for (what, place, n) in biases {
            expect_len(what, place.as_deref(), n)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::activation::Activation;

    fn shapes(op: Op) -> GradientShapes {
        let problem = Problem::new(op, 3, 4, 5, DType::F32, Activation::SWIGLU);
        GradientShapes::new(&problem, Orientation::OutIn)
    }

    #[test]
    fn names_round_trip_and_bytes_are_those_kept() {
        for policy in SavePolicy::ALL {
            assert_eq!(policy.to_string().parse::<SavePolicy>().unwrap(), policy);
        }
        assert!("keep".parse::<SavePolicy>().unwrap_err().to_string().contains("save-gate"));
        let kept = SavePolicy::ALL.map(|policy| policy.kept_bytes(3, 5, DType::Bf16));
        assert_eq!(kept, [60, 30, 0]);
    }

    #[test]
    fn what_is_wanted_has_a_place_of_its_shape() {
        let shapes = shapes(Op::Mlp);
        let mut all = Gradients::<f32>::zeros(3, &shapes, Wanted::ALL, true).unwrap();
        assert_eq!(all.dx.as_ref().unwrap().shape(), [3, 4]);
        assert_eq!(all.down.as_ref().unwrap().shape(), [4, 5]);
        assert_eq!(all.gate_bias.as_ref().unwrap().len(), 5);
        all.as_mut().validate(3, &shapes).unwrap();
        let error = all.as_mut().validate(2, &shapes).unwrap_err().to_string();
        assert!(error.contains("dx") && error.contains("[2, 4]"), "{error}");
        let frozen = Gradients::<f32>::zeros(3, &shapes, Wanted::INPUT, true).unwrap();
        assert!(frozen.dx.is_some() && frozen.gate.is_none() && frozen.gate_bias.is_none());
        assert!(Gradients::<f32>::zeros(3, &shapes, Wanted::ALL, false).unwrap().up_bias.is_none());
    }

    #[test]
    fn places_that_fit_nothing_are_refused_by_name() {
        let mut short = [0.0f32; 4];
        let places = GradientsMut::<f32>::default().with_up_bias(&mut short);
        assert!(places.validate(3, &shapes(Op::Mlp)).unwrap_err().to_string().contains("db_up"));
        let mut down = Matrix::<f32>::zeros(4, 5).unwrap();
        let places = GradientsMut::<f32>::default().with_down(&mut down);
        let error = places.validate(3, &shapes(Op::GatedLinear)).unwrap_err().to_string();
        assert!(error.contains("no down projection"), "{error}");
        let scaled = |by| GradientsMut::<f32>::default().with_row_scale(by);
        let factors = [1.0; 2];
        let error = scaled(RowScale::Rows(&factors)).validate(3, &shapes(Op::Mlp));
        assert!(error.unwrap_err().to_string().starts_with("row scale: expected [3]"));
        let error = scaled(RowScale::Factor(2.0)).validate(3, &shapes(Op::GatedLinear));
        assert!(error.unwrap_err().to_string().contains("a gated linear layer"));
        let mut short = [0.0f32; 2];
        let places = GradientsMut::<f32>::default().with_row_scale_grad(&mut short);
        let error = places.validate(3, &shapes(Op::Mlp)).unwrap_err().to_string();
        assert!(error.starts_with("d_row_scale: expected [3]"), "{error}");
    }
}
