//! Results against the float64 oracle, whole or by a sample of rows.

use anyhow::{Result, bail};
use swiglu::{DType, Device, Element, Matrix, MatrixRef};
use swiglu_core::bounds::{Judgement, Reference, relative_frobenius};
use swiglu_core::conformance::Backend;
use swiglu_core::random;
use swiglu_cuda::CudaBackend;

use crate::layer::Params;

/// Multiply-adds the oracle may take: about a second.
const BUDGET: f64 = 3e8;
/// Inputs and intermediate values the oracle may hold: small layers have many for their work.
const LAYER_BUDGET: f64 = 4e6;
/// The sample is a property of the problem, not of the run.
const SEED: u64 = 0x5eed;

/// The reference of the checked rows of a result.
pub(crate) struct Check {
    pub(crate) rows: Vec<usize>,
    /// Rows of the whole result.
    m: usize,
    pub(crate) reference: Reference,
}

/// An element type cannot hold the exact result.
#[derive(Debug, thiserror::Error)]
#[error("{0}; --dtype bf16 or --dtype f32 holds it")]
pub(crate) struct Unrepresentable(String);

impl Check {
    /// The check of a layer's result for `x`: whole where the oracle is quick, else of random rows.
    pub(crate) fn of<T: Element>(
        device: &Device,
        params: &Params<'_, T>,
        x: MatrixRef<'_, T>,
    ) -> Result<Self> {
        let (m, row) = (x.rows(), params.problem(1));
        let by_work = BUDGET / (row.flops() / 2.0).max(1.0);
        let by_memory = LAYER_BUDGET / (row.hidden + row.intermediate).max(1) as f64;
        let rows = random::sample(SEED, m, by_work.min(by_memory).max(1.0) as usize);
        let roundoff = factor_roundoff(device, T::DTYPE);
        let reference = params.reference(gather_rows(x, &rows)?.view(), roundoff)?;
        Ok(Self { rows, m, reference })
    }

    /// Holds a result against the reference; an element is told by its place in the whole.
    pub(crate) fn judge<T: Element>(&self, out: MatrixRef<'_, T>) -> Result<Judgement> {
        let mut judgement = self.reference.judge(gather_rows(out, &self.rows)?.view())?;
        let overflow = judgement.overflow.as_mut().map(|overflow| &mut overflow.at.0);
        let lost = judgement.lost.as_mut().map(|lost| &mut lost.at.0);
        overflow.into_iter().chain(lost).for_each(|row| *row = self.rows[*row]);
        Ok(judgement)
    }

    /// The bound that a judgement of these rows exceeds, and where.
    pub(crate) fn exceeded(&self, judgement: &Judgement) -> Option<String> {
        (!judgement.passed()).then(|| swiglu_lab::complaint(judgement, &self.rows))
    }

    /// Refuses an element type that cannot hold the exact result: rounding alone would lose too much.
    pub(crate) fn expect_representable<T: Element>(&self) -> Result<()> {
        /// In units of the roundoff, the most that a normal number loses.
        const TOLERATED: f64 = 4.0;
        let exact = &self.reference.value;
        let rounded: Vec<T> = exact.as_slice().iter().map(|v| T::from_f64(*v)).collect();
        let rounded = Matrix::from_vec(rounded, exact.rows(), exact.cols())?;
        let loss = relative_frobenius(rounded.view(), exact.view());
        let finite = exact.as_slice().iter().map(|v| v.abs()).filter(|v| v.is_finite());
        let largest = finite.fold(0.0, f64::max);
        let what = if largest >= T::DTYPE.least_infinite() {
            format!("reaches {largest:.3e}, beyond the {:.3e} of", T::DTYPE.max_finite())
        } else if loss > TOLERATED * T::DTYPE.unit_roundoff() {
            format!("is of at most {largest:.3e}, so small that {loss:.1e} of it is lost in")
        } else {
            return Ok(());
        };
        bail!(Unrepresentable(format!("the exact result {what} {}", T::DTYPE)))
    }

    pub(crate) fn extent(&self) -> Option<String> {
        let (checked, m) = (self.rows.len(), self.m);
        (checked < m).then(|| format!("{checked} of {m} rows"))
    }
}

/// What a device rounds the factors of its products by, relative to them.
pub(crate) fn factor_roundoff(device: &Device, dtype: DType) -> f64 {
    match device {
        Device::Cuda(cuda) => CudaBackend::planned(cuda).factor_roundoff(dtype),
        _ => 0.0,
    }
}

pub(crate) fn gather_rows<T: Copy + Default>(
    m: MatrixRef<'_, T>,
    rows: &[usize],
) -> Result<Matrix<T>> {
    let values = rows.iter().flat_map(|&r| m.row(r)).copied();
    Ok(Matrix::from_values(values, rows.len(), m.cols())?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inputs::{self, Derived};
    use swiglu_lab::{Case, CaseOp, DeviceKind};

    #[test]
    fn small_results_are_checked_whole_and_wrong_ones_found() {
        let case = Case::new(DeviceKind::Cpu, CaseOp::GatedLinear, [6, 20, 30], DType::F32);
        let layer = Derived::<f32>::derive(&case, 3, true).unwrap();
        let (params, x) = (layer.params(), inputs::x(&case, 3).unwrap());
        let device = Device::cpu().unwrap();
        let check = Check::of(&device, &params, x.view()).unwrap();
        assert_eq!(check.extent(), None);
        let mut out = Matrix::zeros(6, 30).unwrap();
        params.pack(&device, None, None).unwrap().forward_into(x.view(), out.view_mut()).unwrap();
        assert!(check.judge(out.view()).unwrap().passed());
        out.as_mut_slice()[77] += 1e-3;
        assert!(!check.judge(out.view()).unwrap().passed());
    }
}
