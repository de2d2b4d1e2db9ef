//! Results against the float64 oracle, whole or by a sample of rows and columns.

use swiglu::{
    DType, Device, Element, GateUpRef, GateUpWeights, GatedLinearParams, Half, Matrix, MatrixRef,
    Orientation, Problem,
};
use swiglu_core::bounds::{self, Judgement, Reference};
use swiglu_core::conformance::Backend;
use swiglu_cuda::CudaBackend;

use crate::layer::Params;
use crate::quantized::Blocks;
use crate::random;

/// Multiply-adds the oracle may take: about a second.
const BUDGET: f64 = 3e8;
/// Inputs and intermediate values the oracle may hold: small layers have many for their work.
const LAYER_BUDGET: f64 = 4e6;
/// Elements of an activation the oracle may take.
const ACTIVATION_BUDGET: usize = 1 << 20;
/// The sample is a property of the problem, not of the run.
const SEED: u64 = 0x5eed;

/// The reference of the checked part of a result.
#[derive(Debug)]
pub(crate) struct Check {
    rows: Vec<usize>,
    /// `None`: every column.
    columns: Option<Vec<usize>>,
    shape: [usize; 2],
    reference: Reference,
}

impl Check {
    /// The check of a layer's result on `device` for `x`: whole where the oracle is quick, else of
    /// random rows and, where one row is too much, of random features.
    pub(crate) fn of_layer<T: Element>(
        device: &Device,
        params: &Params<'_, T>,
        x: MatrixRef<'_, T>,
    ) -> swiglu_core::Result<Self> {
        let roundoff = factor_roundoff(device, T::DTYPE);
        let (m, features) = (x.rows(), params.out_features());
        let problem = params.problem(1);
        let macs_per_row = problem.flops() / 2.0;
        let rows = random::sample(SEED, m, rows_in_budget(&problem));
        let part = gather_rows(x, &rows)?;
        let shape = [m, features];
        match params {
            Params::GatedLinear(p) if macs_per_row > BUDGET => {
                let count = (BUDGET / macs_per_row * features as f64).max(1.0) as usize;
                let columns = random::sample(SEED ^ 1, features, count);
                let reference = some_features(p, part.view(), &columns, roundoff)?;
                Ok(Self { rows, columns: Some(columns), shape, reference })
            }
            _ => {
                let reference = params.reference(part.view(), roundoff)?;
                Ok(Self { rows, columns: None, shape, reference })
            }
        }
    }

    /// As [`Self::of_layer`], of quantised weights: some rows, and every column.
    pub(crate) fn of_blocks<T: Element>(
        blocks: &Blocks<'_>,
        x: MatrixRef<'_, T>,
    ) -> swiglu_core::Result<Self> {
        let shape = [x.rows(), blocks.out_features()];
        let rows = random::sample(SEED, shape[0], rows_in_budget(&blocks.problem::<T>(1)));
        let reference = blocks.reference(gather_rows(x, &rows)?.view())?;
        Ok(Self { rows, columns: None, shape, reference })
    }

    /// The check of an activation's result.
    pub(crate) fn of_activation<T: Element>(
        act: &swiglu::Activation,
        numerics: swiglu::Numerics,
        inputs: &GateUpRef<'_, T>,
    ) -> swiglu_core::Result<Self> {
        let shape = [inputs.rows(), inputs.intermediate()];
        let count = ACTIVATION_BUDGET / shape[1].max(1);
        let rows = random::sample(SEED, shape[0], count.max(1));
        let [first, second] = inputs.tensors();
        let first = gather_rows(first, &rows)?;
        let reference = if inputs.arrangement().is_packed() {
            let part = GateUpRef::packed(first.view(), inputs.arrangement())?;
            bounds::activation(act, numerics, &part)?
        } else {
            let second = gather_rows(second, &rows)?;
            let part = GateUpRef::separate(first.view(), second.view())?;
            bounds::activation(act, numerics, &part)?
        };
        Ok(Self { rows, columns: None, shape, reference })
    }

    /// Judges the checked part of a result.
    pub(crate) fn judge<T: Element>(
        &self,
        out: MatrixRef<'_, T>,
    ) -> swiglu_core::Result<Judgement> {
        out.expect_shape("output", self.shape)?;
        let mut judgement = self.reference.judge(self.part(out)?.view())?;
        if let Some(overflow) = &mut judgement.overflow {
            overflow.at = self.place(overflow.at);
        }
        Ok(judgement)
    }

    /// Where an element of the checked part is in the result.
    pub(crate) fn place(&self, (row, column): (usize, usize)) -> (usize, usize) {
        (self.rows[row], self.columns.as_ref().map_or(column, |columns| columns[column]))
    }

    /// The checked part of a result.
    pub(crate) fn part<T: Copy + Default>(
        &self,
        out: MatrixRef<'_, T>,
    ) -> swiglu_core::Result<Matrix<T>> {
        self.columns_of(gather_rows(out, &self.rows)?)
    }

    /// The checked part of the rows that are checked.
    pub(crate) fn columns_of<T: Copy + Default>(
        &self,
        rows: Matrix<T>,
    ) -> swiglu_core::Result<Matrix<T>> {
        match &self.columns {
            None => Ok(rows),
            Some(columns) => {
                let row = |r| columns.iter().map(move |&c| (r, c));
                let at = (0..rows.rows()).flat_map(row);
                let values = at.map(|(r, c)| rows.view().row(r)[c]);
                Matrix::from_values(values, rows.rows(), columns.len())
            }
        }
    }

    /// The first element of the checked part that is no finite number where another one is expected, or
    /// the reverse: an error that has no size.
    pub(crate) fn unlike<T: Element>(
        &self,
        part: &Matrix<T>,
        expected: &Matrix<f64>,
    ) -> Option<Unlike> {
        let pairs =
            part.as_slice().iter().map(|v| v.to_f64()).zip(expected.as_slice().iter().copied());
        let like = |a: f64, b: f64| {
            a == b || (a.is_finite() && b.is_finite()) || (a.is_nan() && b.is_nan())
        };
        let (i, (computed, expected)) = pairs.enumerate().find(|&(_, (a, b))| !like(a, b))?;
        let columns = part.cols().max(1);
        Some(Unlike { at: self.place((i / columns, i % columns)), computed, expected })
    }

    /// The oracle's values of the checked part.
    pub(crate) fn value(&self) -> MatrixRef<'_, f64> {
        self.reference.value.view()
    }

    /// The rows that are checked.
    pub(crate) fn rows(&self) -> &[usize] {
        &self.rows
    }

    /// How much of the result is checked, for people.
    pub(crate) fn extent(&self) -> Option<String> {
        let [m, n] = self.shape;
        let rows = (self.rows.len() < m).then(|| format!("{} of {m} rows", self.rows.len()));
        let columns = self.columns.as_ref().map(|c| format!("{} of {n} columns", c.len()));
        let parts: Vec<String> = rows.into_iter().chain(columns).collect();
        (!parts.is_empty()).then(|| parts.join(" and "))
    }
}

/// An element of a result that is NaN or infinite and should not be, or is not and should be.
#[derive(Debug)]
pub(crate) struct Unlike {
    at: (usize, usize),
    computed: f64,
    expected: f64,
}

impl std::fmt::Display for Unlike {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { at, computed, expected } = self;
        write!(f, "element {at:?} is {computed}, expected {expected}")
    }
}

/// Rows of a problem with one row that the oracle is quick for.
fn rows_in_budget(row: &Problem) -> usize {
    let by_work = BUDGET / (row.flops() / 2.0).max(1.0);
    let by_memory = LAYER_BUDGET / (row.hidden + row.intermediate).max(1) as f64;
    by_work.min(by_memory).max(1.0) as usize
}

/// What a device rounds the factors of its products by, relative to them.
fn factor_roundoff(device: &Device, dtype: DType) -> f64 {
    match device {
        Device::Cuda(cuda) => CudaBackend::planned(cuda).factor_roundoff(dtype),
        _ => 0.0,
    }
}

/// Chosen rows in a matrix of their own.
pub(crate) fn gather_rows<T: Copy + Default>(
    m: MatrixRef<'_, T>,
    rows: &[usize],
) -> swiglu_core::Result<Matrix<T>> {
    Matrix::from_values(rows.iter().flat_map(|&r| m.row(r)).copied(), rows.len(), m.cols())
}

/// The reference of chosen output features: a layer that has only those.
fn some_features<T: Element>(
    params: &GatedLinearParams<'_, T>,
    x: MatrixRef<'_, T>,
    features: &[usize],
    roundoff: f64,
) -> swiglu_core::Result<Reference> {
    let w = &params.weights;
    let half = |half: Half| {
        let row = |&h: &usize| (0..w.hidden()).map(move |k| w.at(half, h, k));
        Matrix::from_values(features.iter().flat_map(row), features.len(), w.hidden())
    };
    let bias = |b: Option<&[f32]>| b.map(|b| features.iter().map(|&h| b[h]).collect::<Vec<_>>());
    let (gate, up) = (half(Half::Gate)?, half(Half::Up)?);
    let (gate_bias, up_bias) = (bias(params.gate_bias), bias(params.up_bias));
    let part = GatedLinearParams {
        weights: GateUpWeights::separate(gate.view(), up.view(), Orientation::OutIn)?,
        gate_bias: gate_bias.as_deref(),
        up_bias: up_bias.as_deref(),
        ..*params
    };
    bounds::gated_linear_with(x, &part, roundoff)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::LayerOp;
    use crate::random::SyntheticLayer;
    use swiglu::{Activation, Numerics};

    fn layer() -> (SyntheticLayer<f32>, Matrix<f32>) {
        let layer = SyntheticLayer::normal(3, LayerOp::GatedLinear, 20, 30).unwrap();
        (layer, random::normal(4, 6, 20, 1.0).unwrap())
    }

    #[test]
    fn small_results_are_checked_whole_and_wrong_ones_found() {
        let (layer, x) = layer();
        let params = layer.params(Activation::GLU, Numerics::default()).unwrap();
        let check = Check::of_layer(&Device::cpu().unwrap(), &params, x.view()).unwrap();
        assert_eq!(check.extent(), None);
        let mut out = Matrix::zeros(6, 30).unwrap();
        params.naive(x.view(), out.view_mut()).unwrap();
        assert!(check.judge(out.view()).unwrap().passed());
        out.as_mut_slice()[77] += 1e-3;
        assert!(!check.judge(out.view()).unwrap().passed());
    }

    #[test]
    fn chosen_features_are_those_of_the_whole_layer() {
        let (layer, x) = layer();
        let params = layer.params(Activation::SWIGLU, Numerics::default()).unwrap();
        let whole = params.oracle(x.view()).unwrap();
        let part = some_features(params.gated(), x.view(), &[2, 17, 29], 0.0).unwrap();
        for r in 0..6 {
            let expected = [2, 17, 29].map(|c| whole.view().row(r)[c]);
            assert_eq!(part.value.view().row(r), expected);
        }
    }
}
