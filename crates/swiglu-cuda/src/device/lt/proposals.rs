//! What cuBLASLt proposes for a product, and which of it is taken.

use std::ffi::c_int;

use swiglu_core::{DType, Element};

use super::api::{Algorithm, Choice, NOT_SUPPORTED, Owned, lt};
use super::gemm::{Fastest, Gemm};
use super::key::Key;
use super::{By, GemmAlgorithm, LinearWeights, Lt, Prepared, Product};
use crate::device::error::{CudaError, Result};
use crate::device::memory::{DeviceMatrixMut, DeviceMatrixRef};

/// How many algorithms are asked for: of Hopper's there were never more, also where 32 were asked for.
const ASKED: u8 = 8;
/// The number of rows that the algorithm for every number of them is asked for.
const FIXED_ROWS: usize = 128;
/// What addresses and rows are taken to be multiples of there: one row of a matrix begins at other multiples than the next.
pub(super) const FIXED_ALIGNMENT: u32 = 16;

impl Lt {
    /// The algorithm for a problem.
    pub(super) fn algorithm(&self, key: &Key, prepared: &Prepared) -> Result<Algorithm> {
        match key.product.by {
            By::Fixed => self.fixed(key, prepared),
            By::Planned => self.planned(key, prepared),
            By::Proposal(number) => {
                let proposals = self.proposals(key, prepared)?;
                let count = proposals.len();
                proposals.get(usize::from(number)).copied().ok_or_else(|| {
                    let why = format!("cuBLASLt proposes {count}, number {number} was asked for");
                    CudaError::Unsupported { what: key.to_string(), why }
                })
            }
        }
    }

    /// What was measured to be the fastest, where it is proposed; else short tiles, where they are preferred; else the first.
    fn planned(&self, key: &Key, prepared: &Prepared) -> Result<Algorithm> {
        let (gemm, proposals) = (key.gemm(), self.proposals(key, prepared)?);
        let measured = gemm.and_then(|gemm| self.fastest(&gemm)).and_then(|(fastest, _)| {
            proposals.iter().find(|proposal| self.api.identify(proposal) == Some(fastest))
        });
        let short = || {
            gemm.filter(|gemm| gemm.prefers_short_tiles(self.arch))?;
            proposals.iter().find(|proposal| self.api.has_short_tiles(proposal))
        };
        let chosen = measured.or_else(short).or(proposals.first());
        chosen.copied().ok_or_else(|| no_algorithm(key))
    }

    fn fastest(&self, gemm: &Gemm) -> Option<Fastest> {
        let exact = self.measured.iter().find_map(|measured| measured.exact(gemm));
        exact.or_else(|| self.measured.iter().find_map(|measured| measured.between(gemm)))
    }

    /// The algorithms that cuBLASLt proposes and that fit into the scratch memory, in its order.
    pub(super) fn proposals(&self, key: &Key, p: &Prepared) -> Result<Vec<Algorithm>> {
        let preference = Owned::preference(self.api, self.scratch_bytes, key.alignments, true)?;
        self.heuristic(p, [&p.x, &p.y], &preference)
    }

    /// What identifies them, for a product to be measured.
    ///
    /// # Errors
    /// [`CudaError::Unsupported`] if there are none, or if cuBLASLt does not say it; what it reports.
    pub(crate) fn proposed<T: Element, Y: Element>(
        &self,
        x: &DeviceMatrixRef<'_, T>,
        w: &LinearWeights,
        y: &DeviceMatrixMut<'_, Y>,
        product: Product,
    ) -> Result<Vec<GemmAlgorithm>> {
        self.context.bind()?;
        let key = Key::of(x, w, y, product);
        let proposals = self.proposals(&key, &self.describe(&key)?)?;
        if proposals.is_empty() {
            return Err(no_algorithm(&key));
        }
        let identified = proposals.iter().map(|proposal| self.api.identify(proposal));
        identified.collect::<Option<_>>().ok_or_else(|| CudaError::Unsupported {
            what: key.to_string(),
            why: "cuBLASLt does not say what identifies its algorithms: no plan could follow \
                  what is measured of them"
                .into(),
        })
    }

    fn heuristic(
        &self,
        p: &Prepared,
        [x, y]: [&Owned; 2],
        preference: &Owned,
    ) -> Result<Vec<Algorithm>> {
        let mut choices = [Choice::default(); ASKED as usize];
        let mut found: c_int = 0;
        // SAFETY: live descriptors, and places for as many results as are asked for.
        let status = unsafe {
            (self.api.cublasLtMatmulAlgoGetHeuristic)(
                self.handle.raw(),
                p.operation.raw(),
                p.weights.raw(),
                x.raw(),
                y.raw(),
                y.raw(),
                preference.raw(),
                c_int::from(ASKED),
                choices.as_mut_ptr(),
                &mut found,
            )
        };
        if status != NOT_SUPPORTED {
            self.api.check("cublasLtMatmulAlgoGetHeuristic", status)?;
        }
        let found = usize::try_from(found).unwrap_or(0).min(choices.len());
        let fits = |c: &&Choice| c.state == 0 && c.workspace_bytes <= self.scratch_bytes;
        Ok(choices[..found].iter().filter(fits).map(|choice| choice.algorithm).collect())
    }

    /// The algorithm for every number of rows, which cuBLASLt has for these, too.
    fn fixed(&self, key: &Key, p: &Prepared) -> Result<Algorithm> {
        let (api, [_, of_x, of_y, _]) = (self.api, key.alignments);
        let layout = |dtype: DType, cols: usize, alignment: u32| {
            let stride = cols.next_multiple_of(alignment as usize / dtype.size());
            Owned::layout(api, dtype, cols, FIXED_ROWS, stride)
        };
        let (x, y) = (layout(key.dtype, key.k, of_x)?, layout(key.out, key.n, of_y)?);
        let preference = Owned::preference(api, self.scratch_bytes, key.alignments, false)?;
        let proposed = self.heuristic(p, [&x, &y], &preference)?;
        let first = proposed.first().ok_or_else(|| no_algorithm(key))?;
        let mut choice = Choice::default();
        // SAFETY: live descriptors, and a place for the result.
        unsafe {
            lt!(
                api,
                cublasLtMatmulAlgoCheck(
                    self.handle.raw(),
                    p.operation.raw(),
                    p.weights.raw(),
                    p.x.raw(),
                    p.y.raw(),
                    p.y.raw(),
                    first,
                    &mut choice,
                )
            )
        }?;
        if choice.workspace_bytes > self.scratch_bytes {
            let why = "cuBLASLt's algorithm for every number of rows needs more scratch memory";
            return Err(CudaError::Unsupported { what: key.to_string(), why: why.into() });
        }
        Ok(*first)
    }
}

fn no_algorithm(key: &Key) -> CudaError {
    let why = "cuBLASLt has no algorithm for it".into();
    CudaError::Unsupported { what: key.to_string(), why }
}
