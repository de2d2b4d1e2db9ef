//! The cases in which rings of stages go round.

use swiglu_core::conformance::Case;
use swiglu_core::quant::{QuantizedType, QuantizedTypes};
use swiglu_core::{DType, Op, Problem};

use super::{CudaBackend, Way, problem};
use crate::kernels::decode_mlp::Decode;
use crate::kernels::gated_gemm::Shape;
use crate::kernels::ring::Ring;
use crate::plan::{Algorithm, Planner, ToH};

/// More input features than any ring needs to go round.
const MOST_FEATURES: usize = 1 << 14;
/// More tokens than any way takes that is for few of them.
const MOST_TOKENS: usize = 64;

impl CudaBackend {
    /// The least case of this element type, and of weights of this type if there is one, that fills more than two tiles
    /// each way, or as many tokens as the way takes, and every stage of every ring again; or nothing where the way has no
    /// kernel of ours, or none for such a case on this device.
    pub fn going_round(&self, dtype: DType, quantized: Option<QuantizedType>) -> Option<Case> {
        let sms = self.cuda.facts().sm_count as usize;
        let Way::By(algorithm) = self.way else { return None };
        if algorithm.stored().is_some() {
            return None;
        }
        if let (Some(kernel), None) = (algorithm.kernel_of_h(), algorithm.down()) {
            let case = |m, k, h| Case::new(Op::GatedLinear, [m, k, h], dtype);
            let tile = |m, h| kernel.tile(Shape::of(&problem(&case(m, 1, h)), sms));
            let m = 2 * tile(1, 1)[0] + 1;
            // A tile that is fitted to the features grows with them, up to its widest. Rows of whole 16 bytes are what
            // TMA stores.
            let mut h = 8;
            while h <= 2 * tile(m, h)[1] {
                h = 2 * tile(m, h)[1] + 8;
            }
            return self.least((1..).map(|i| case(m, 8 * i, h)));
        }
        let quantized = quantized.map(|kind| QuantizedTypes::of(Op::Mlp, kind));
        let case = |m, k, h| Case { quantized, ..Case::new(Op::Mlp, [m, k, h], dtype) };
        // Two tiles of 16 rows for each SM, and a part of them a third.
        let features = 32 * sms + 32;
        // As many tokens as are computed; of weights that stay in registers or shared memory as many as fit.
        let sizes = [1, 2, 4, 8].map(|part| (features / part).next_multiple_of(64));
        let sizes = sizes.into_iter().flat_map(|k| sizes.map(|h| [k, h]));
        let mut sizes = sizes.flat_map(|size| (1..=MOST_TOKENS).rev().map(move |m| (m, size)));
        let (m, [k, h]) = sizes.find(|&(m, [k, h])| self.computes(&case(m, k, h)))?;
        self.least((0..).map(|i| case(m, k + 64 * i, h + 64 * (i / 2))))
    }

    /// The first whose rings go round.
    fn least(&self, cases: impl Iterator<Item = Case>) -> Option<Case> {
        let mut cases = cases.take_while(|case| case.hidden <= MOST_FEATURES);
        cases.find(|case| {
            let rings =
                if self.computes(case) { self.rings(&problem(case)) } else { return false };
            rings.into_iter().all(Ring::goes_round)
        })
    }

    fn rings(&self, problem: &Problem) -> Vec<Ring> {
        let sms = self.cuda.facts().sm_count as usize;
        let Way::By(algorithm) = self.way else { return Vec::new() };
        let mut rings = match algorithm {
            Algorithm::ByH(ToH::Gated(kernel), _) => vec![kernel.ring(problem, sms)],
            Algorithm::ByH(ToH::Unfused(_), _) => Vec::new(),
            Algorithm::Decode(design) => {
                let limits = Planner::of(&self.cuda).limits();
                let decode = Decode::check_problem(design, problem, limits);
                decode.map_or_else(|_| Vec::new(), |decode| decode.rings(problem))
            }
        };
        rings.extend(algorithm.down().and_then(|down| down.ring(&self.cuda, problem)));
        rings
    }
}
