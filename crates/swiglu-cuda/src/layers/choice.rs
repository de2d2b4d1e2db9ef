//! The algorithm that is chosen for a call of a layer, and the scratch memory it uses.

use swiglu_core::{Element, Op, Plan};

use super::layer::{Asked, Layer};
use super::part;
use super::weights::padded;
use crate::device::error::{CudaError, Result};
use crate::device::lt::Lt;
use crate::device::stream::Stream;
use crate::kernels::decode_mlp::{Decode, Design, MOST_TOKENS};
use crate::kernels::down::Down;
use crate::kernels::elementwise::{self, Stored, Tensor};
use crate::kernels::gate::{Formula, GateCode};
use crate::kernels::gated_gemm::Call;
use crate::plan::{Algorithm, Choices, Planner, ToH, Why, choose, explain};

impl<K, T: Element> Layer<K, T> {
    /// The planner that chooses for this layer, whatever planners have followed it.
    pub(super) fn planner(&self) -> &Planner {
        &self.whole.planner
    }

    /// How `m` tokens will be computed.
    pub fn plan(&self, m: usize) -> Plan {
        let (planner, algorithm) = (self.planner(), self.choose(m));
        let reason = match self.asked {
            Asked::Path(path) => {
                let (to_h, why) = self.whole.choose(m);
                let mut reason = explain(to_h, why, &self.whole.problem(m), planner);
                if let Some(lent) = self.operands.lent() {
                    let packed = choose(planner, &self.problem.with_m(m), path, None).0;
                    if let Err(obstacle) = lent.check(&packed, T::DTYPE) {
                        reason += &format!("; packed weights would go by {packed}: {obstacle}");
                    }
                }
                reason
            }
            _ => explain(algorithm, Why::AskedFor, &self.problem.with_m(m), planner),
        };
        self.cuda.plan_of(self.problem.with_m(m), algorithm, reason)
    }

    /// The design of the decode kernel that `m` tokens go through; none where they go step by step.
    pub fn design(&self, m: usize) -> Option<Design> {
        self.choose(m).design()
    }

    /// Bytes of the weights and biases in device memory that are the layer's own: none of lent ones.
    pub fn weight_bytes(&self) -> usize {
        self.operands.bytes()
    }

    /// Tokens that one pass computes: all, but of quantised weights a few.
    fn pass(&self, m: usize) -> usize {
        if self.problem.quantized.is_some() { m.min(MOST_TOKENS) } else { m }
    }

    pub(super) fn choose(&self, m: usize) -> Algorithm {
        let m = self.pass(m);
        match self.asked {
            Asked::Algorithm(algorithm) => algorithm,
            Asked::Design(design) if m <= MOST_TOKENS => {
                // Quantised weights have no other way: the call is refused.
                let computes = |design: &Design| {
                    self.problem.quantized.is_some() || self.decode_by(*design, m).is_some()
                };
                design.filter(computes).map_or_else(|| self.step_by_step(m), Algorithm::Decode)
            }
            Asked::Path(_) | Asked::Design(_) => self.of_choices(&self.whole, m),
        }
    }

    fn of_choices(&self, choices: &Choices, m: usize) -> Algorithm {
        choices.get(m).of(self.problem.op)
    }

    /// What computes h, then cuBLASLt: what takes every x, and weights however they lie.
    pub(super) fn step_by_step(&self, m: usize) -> Algorithm {
        self.of_choices(&self.stepwise, m)
    }

    /// What is chosen where nothing will do for h but a fused kernel.
    pub(super) fn choose_fused(&self, m: usize) -> Algorithm {
        self.of_choices(&self.fused, m)
    }

    /// Whether a fused kernel does instead what cuBLASLt refused: where cuBLASLt does not take this x, or no memory is
    /// left for its workspace, unless one way was asked for. Nothing of it is remembered: the next call tries again.
    pub(super) fn hands_over(&self, algorithm: Algorithm, why: &CudaError) -> bool {
        let refused = matches!(why, CudaError::Unsupported { .. } | CudaError::OutOfMemory { .. });
        refused && self.may_hand_over(algorithm)
    }

    pub(super) fn may_hand_over(&self, algorithm: Algorithm) -> bool {
        self.asked == Asked::Path(None) && algorithm.stored().is_some()
    }

    /// Elements from row to row of h in the workspace.
    pub(super) fn h_stride(&self) -> usize {
        self.operands.h_stride(self.problem.intermediate)
    }

    pub(super) fn h_bytes(&self, m: usize) -> usize {
        match self.problem.op {
            Op::Mlp => part([self.pass(m), self.h_stride(), size_of::<T>()]),
            _ => 0,
        }
    }

    pub(super) fn between_bytes(&self, m: usize, stored: Stored) -> usize {
        let columns = padded::<T>(self.problem.intermediate);
        part([m, 2, columns, stored.size(T::DTYPE)])
    }

    /// Bytes of scratch memory that a call with `m` tokens uses: the stream's, or that of [`Self::forward_with`].
    pub fn workspace_bytes(&self, m: usize) -> usize {
        let chosen = self.choose(m);
        let bytes = self.bytes_by(m, chosen);
        match self.falls_back(chosen) {
            true => bytes.max(self.bytes_by(m, self.step_by_step(m))),
            false => bytes,
        }
    }

    /// Whether an x that the algorithm does not take goes step by step.
    fn falls_back(&self, algorithm: Algorithm) -> bool {
        algorithm.design().is_some() && self.problem.quantized.is_none()
    }

    /// h first, and behind it what the steps use one after the other. An empty call has no steps.
    pub(super) fn bytes_by(&self, m: usize, algorithm: Algorithm) -> usize {
        let between = |stored| self.between_bytes(m, stored);
        self.bytes_with(m, algorithm, between)
    }

    /// The same where gate and up are saved by the caller.
    pub(super) fn bytes_saving(&self, m: usize, algorithm: Algorithm) -> usize {
        self.bytes_with(m, algorithm, |_| 0)
    }

    fn bytes_with(
        &self,
        m: usize,
        algorithm: Algorithm,
        between: impl Fn(Stored) -> usize,
    ) -> usize {
        if m == 0 || self.problem.intermediate == 0 {
            return 0;
        }
        let scratch = Lt::scratch_bytes(self.cuda.arch());
        let to_h = algorithm.stored().map_or(0, |stored| between(stored).saturating_add(scratch));
        let down = if algorithm.down() == Some(Down::CublasLt) { scratch } else { 0 };
        self.h_bytes(m).saturating_add(to_h.max(down))
    }

    /// Makes the first call with `m` tokens as cheap as every other: compiles or loads its kernels and
    /// reserves its workspace on `stream`. Needed before a capture into a graph, for each number of
    /// tokens that is captured: another number may go another way. Where few tokens are decoded, so is each smaller number.
    ///
    /// # Errors
    /// As [`Self::forward`].
    pub fn reserve(&self, stream: &Stream, m: usize) -> Result<()> {
        let empty = self.problem.hidden.min(self.problem.intermediate) == 0;
        if m == 0 || empty && self.problem.op == Op::Mlp {
            return Ok(());
        }
        for m in 1..=m.min(MOST_TOKENS) {
            if self.problem.quantized.is_some() {
                self.expect_decode(None, m)?.prepare(&self.cuda, self.code())?;
            } else if let Some(decode) = self.choose(m).design().and_then(|d| self.decode_by(d, m))
            {
                decode.prepare(&self.cuda, self.code())?;
            }
        }
        let chosen = self.choose(m);
        if self.may_hand_over(chosen) {
            self.prepare(self.choose_fused(m), m)?;
        }
        if self.falls_back(chosen) {
            self.prepare(self.step_by_step(m), m)?;
        }
        self.prepare(chosen, m)?;
        self.cuda.reserve_workspace(stream, self.workspace_bytes(m))
    }

    /// The kernels of an algorithm, but for the decode kernel's.
    fn prepare(&self, algorithm: Algorithm, m: usize) -> Result<()> {
        let problem = self.problem.with_m(m);
        let act = self.problem.activation;
        let Algorithm::ByH(to_h, down) = algorithm else { return Ok(()) };
        match to_h {
            ToH::Gated(kernel) => {
                // Of dense matrices at whole addresses: lent weights decide which kernel takes them.
                let out = Tensor::new(0, self.problem.intermediate);
                let x = Tensor::new(0, self.problem.hidden);
                let dense = self.operands.dense()?;
                let (weights, maps) = (dense.gate_up.fused(), &dense.maps);
                let (code, formula) = (self.code(), Formula::new(&act));
                let call = Call { code, formula, m, x, out, weights, saved: None, maps };
                self.launchable(kernel, &call)?.prepare(&self.cuda, &call)?;
            }
            ToH::Unfused(stored) => {
                let code = GateCode::elementwise(&act, self.numerics(), T::DTYPE);
                elementwise::prepare_forward(&self.cuda, code, stored)?;
            }
        }
        down.map_or(Ok(()), |down| down.prepare(&self.cuda, &problem))
    }

    /// How a design launches `m` tokens, where it computes them.
    pub(super) fn decode_by(&self, design: Design, m: usize) -> Option<Decode> {
        let fitted = || {
            let problem = self.problem.with_m(m);
            let limits = Planner::of(&self.cuda).limits();
            Decode::check_problem(design, &problem, limits).ok()
        };
        let planned = match self.asked {
            Asked::Design(design) => design,
            _ => self.choose(m).design(),
        };
        match planned == Some(design) {
            true => self.decodes.get(m, fitted),
            // Only tuners ask for another.
            false => fitted(),
        }
    }
}
