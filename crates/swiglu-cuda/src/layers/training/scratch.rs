//! Where gate, up and their gradients lie in a backward pass, and the scratch memory that it takes.

use swiglu_core::{DType, Element, Op, Pass, Path, Problem, SavePolicy};

use super::kept::Kept;
use super::{part, product};
use crate::device::cuda::Cuda;
use crate::device::lt::{LinearWeights, Lt};
use crate::kernels::elementwise::{Stored, Tensor};
use crate::layers::gradients::DeviceGradientsMut;
use crate::layers::layer::Layer;
use crate::layers::operands::Dense;
use crate::layers::weights::{Products, padded};

/// Gate and up, and their gradients, of which scratch memory has some: where they can, gradients take the place of what they
/// are of.
#[derive(Debug, Clone, Copy)]
pub(super) struct Placed {
    dtype: DType,
    is_block: bool,
    /// M and K.
    rows: [usize; 2],
    /// H, padded.
    pub(super) half: usize,
    kept: Kept,
    /// The weights of gate and up, whose one product gives ∂L/∂x where both gradients lie as they do.
    pub(super) both: Option<LinearWeights>,
    /// Whether the gradients lie in scratch memory: for that product, or because gate and up stay.
    moves: bool,
    /// What an up that was not kept is computed as.
    pub(super) up_again: Option<Stored>,
    /// Whether ∂L/∂x is a sum of two products, in f32.
    pub(super) round_dx: bool,
}

impl Placed {
    pub(super) fn new<K, T: Element>(
        layer: &Layer<K, T>,
        m: usize,
        dense: &Dense<T>,
        kept: Kept,
        into: &DeviceGradientsMut<'_, T>,
    ) -> Self {
        let wants_dx = into.dx.is_some();
        let Problem { op, hidden: k, intermediate: h, .. } = layer.problem;
        let half = padded::<T>(h);
        let both = match dense.gate_up.products(Stored::Elements) {
            Products::Both(both) if h > 0 && k > 0 && !into.apart => Some(both),
            _ => None,
        };
        let together = |up: Tensor| {
            let behind = kept.gate.data + (h * size_of::<T>()) as u64;
            half == h && kept.gate.stride == up.stride && up.data == behind
        };
        Self {
            dtype: T::DTYPE,
            is_block: op == Op::Mlp,
            rows: [m, k],
            half,
            kept,
            both,
            moves: kept.stays || both.is_some() && wants_dx && !kept.up.is_some_and(together),
            up_again: kept.up.is_none().then(|| layer.up_again(m, dense)),
            round_dx: wants_dx && both.is_none() && T::DTYPE != DType::F32 && !into.apart,
        }
    }

    /// Gate and up, and their gradients, with this address of scratch memory.
    pub(super) fn at(&self, scratch: u64) -> [[Tensor; 2]; 2] {
        let (gate, half) = (self.kept.gate, self.half);
        let up = scratch + (half * self.dtype.size()) as u64;
        let halves = [scratch, up].map(|at| Tensor::new(at, 2 * half));
        match (self.kept.up, self.moves) {
            (Some(up), true) => [[gate, up], halves],
            (Some(up), false) => [[gate, up]; 2],
            (None, true) => [[gate, halves[1]], halves],
            (None, false) => [[gate, Tensor::new(scratch, half)]; 2],
        }
    }

    pub(super) fn needs(&self, stores_dh: bool, wants_h: bool, dots: usize) -> Needs {
        let [m, k] = self.rows;
        let sums_of_dx = if self.round_dx { m.saturating_mul(k) } else { 0 };
        let sums_of_up =
            if self.up_again == Some(Stored::Sums) { m.saturating_mul(self.half) } else { 0 };
        Needs {
            dtype: self.dtype,
            tokens: m,
            half: self.half,
            is_block: self.is_block,
            wants_h,
            stores_dh,
            has_up: self.kept.up.is_some(),
            moves: self.moves,
            dots,
            sums: sums_of_dx.max(sums_of_up),
        }
    }
}

/// What a backward pass has no place of the caller's for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Needs {
    pub(super) dtype: DType,
    /// M.
    pub(super) tokens: usize,
    /// H, padded.
    pub(super) half: usize,
    pub(super) is_block: bool,
    /// Whether h is computed again.
    pub(super) wants_h: bool,
    /// Whether dh passes through memory.
    pub(super) stores_dh: bool,
    /// Whether up is there.
    pub(super) has_up: bool,
    /// Whether gradients of gate and up do not lie where these do: elsewhere they lie as one product takes both.
    pub(super) moves: bool,
    /// Sums of h·dh that a row has on the way to the gradient of its factor.
    pub(super) dots: usize,
    /// Values in f32, which are first an up and then ∂L/∂x.
    pub(super) sums: usize,
}

/// The bytes of each part, in the order in which they lie.
#[derive(Debug, Clone, Copy)]
pub(super) struct Parts {
    pub(super) h: usize,
    pub(super) dh: usize,
    /// An up that was not kept, and gradients of gate and up.
    pub(super) gate_up: usize,
    pub(super) dots: usize,
    pub(super) sums: usize,
    pub(super) lt: usize,
}

impl Needs {
    pub(super) fn parts(self, cuda: &Cuda) -> Parts {
        let rows = |cols: usize| part([self.tokens, cols, self.dtype.size()]);
        let with = |needed: bool| if needed { rows(self.half) } else { 0 };
        Parts {
            h: with(self.wants_h),
            dh: with(self.is_block && self.stores_dh),
            gate_up: if self.moves { rows(2 * self.half) } else { with(!self.has_up) },
            dots: part([self.tokens, self.dots, size_of::<f32>()]),
            sums: part([self.sums, size_of::<f32>()]),
            lt: Lt::scratch_bytes(cuda.arch()),
        }
    }
}

impl Parts {
    pub(super) fn total(&self) -> usize {
        [self.h, self.dh, self.gate_up, self.dots, self.sums, self.lt]
            .into_iter()
            .fold(0, usize::saturating_add)
    }
}

impl Cuda {
    /// Bytes of memory that a backward pass of a layer with packed weights takes meanwhile, for all gradients but those of rows'
    /// factors: scratch memory of the stream, and where nothing was kept gate and up.
    pub fn backward_scratch_bytes(
        &self,
        problem: &Problem,
        policy: SavePolicy,
        path: Option<Path>,
    ) -> usize {
        let Problem { m, hidden, intermediate: h, dtype, .. } = *problem;
        let half = h.next_multiple_of(16 / dtype.size());
        let has_up = policy != SavePolicy::SaveGate;
        let needs = Needs {
            dtype,
            tokens: m,
            half,
            is_block: problem.op == Op::Mlp,
            wants_h: problem.op == Op::Mlp,
            stores_dh: self.differentiated(problem, path).is_none(),
            has_up,
            moves: hidden > 0 && h > 0 && !(has_up && half == h),
            dots: 0,
            sums: if !has_up && self.up_again(problem, path) == Stored::Sums {
                m.saturating_mul(half)
            } else {
                0
            },
        };
        let parts = needs.parts(self);
        if matches!(policy, SavePolicy::Save | SavePolicy::SaveGate) {
            return parts.total();
        }
        // A gated layer computes h beside gate and up, a block has room for it anyway.
        let before = match self.planned(problem.with_pass(Pass::Saving), path).path {
            _ if needs.is_block => 0,
            Path::Unfused => part([m, half, dtype.size()]).saturating_add(parts.lt),
            _ => part([m, half, dtype.size()]),
        };
        parts.total().max(before).saturating_add(product([2, half, m, dtype.size()]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::common;
    use crate::layers::training::gate_up::BlockTensors;
    use crate::{DeviceMatrix, GatedLinear, Mlp};
    use swiglu_core::conformance::{Case, Parameters};
    use swiglu_core::{Numerics, bf16};

    /// What a layer's backward pass takes of a stream's scratch memory, where gate and up lie as [`crate::HostSaved`] has them.
    fn scratch<K>(layer: &Layer<K, bf16>, m: usize, policy: SavePolicy) -> usize {
        let (dense, k, h) = (layer.operands.dense().unwrap(), layer.hidden(), layer.intermediate());
        let half = padded::<bf16>(h);
        let [gate, up] = [0, half as u64 * 2].map(|at| Tensor::new(at, 2 * half));
        let kept = match policy {
            SavePolicy::SaveGate => Kept { gate: Tensor::new(0, half), up: None, stays: false },
            _ => Kept { gate, up: Some(up), stays: false },
        };
        let mut dx = DeviceMatrix::<bf16>::new(&layer.cuda.stream(), m, k).unwrap();
        let into = DeviceGradientsMut::default().with_dx(dx.view_mut());
        let placed = Placed::new(layer, m, dense, kept, &into);
        let [saved, grads] = placed.at(0);
        let io = BlockTensors {
            m,
            dy: Tensor::new(0, k),
            saved,
            grads,
            h: Some(Tensor::new(0, half)),
            scale: None,
        };
        let down = dense.down().ok();
        let fused = down.and_then(|down| layer.dgated_kernel(&layer.dgated_call(down, io, dense)));
        placed.needs(fused.is_none(), down.is_some(), 0).parts(&layer.cuda).total()
    }

    /// The same, of which pre-activations take a part before, and with these, where nothing was kept.
    fn meanwhile<K>(layer: &Layer<K, bf16>, m: usize, policy: SavePolicy) -> usize {
        let of_backward = scratch(layer, m, policy);
        if policy != SavePolicy::Recompute {
            return of_backward;
        }
        let algorithm = layer.saving_algorithm(m);
        let before = layer.bytes_saving(m, algorithm) + layer.unwanted_h_bytes(m);
        of_backward.max(before) + 2 * 2 * m * padded::<bf16>(layer.intermediate())
    }

    #[test]
    fn sizes_that_no_memory_has_are_the_largest_there_are() {
        let Some(cuda) = common::device() else { return };
        let case = Case::new(Op::Mlp, [1, 64, 96], DType::Bf16);
        let parameters = Parameters::<bf16>::new(&case).unwrap();
        let block = parameters.mlp();
        for path in [None, Some(Path::Unfused)] {
            let mlp = path.map_or_else(
                || Mlp::new(&cuda, &block),
                |path| Mlp::with_path(&cuda, &block, path),
            );
            let mlp = mlp.unwrap();
            let m = 1 << 60;
            assert_eq!(mlp.workspace_bytes(m), usize::MAX, "{path:?}");
            for policy in [SavePolicy::Save, SavePolicy::SaveGate, SavePolicy::Recompute] {
                assert_eq!(mlp.training_bytes(m, policy), usize::MAX, "{policy:?} {path:?}");
                let bytes = cuda.backward_scratch_bytes(&block.problem(m), policy, path);
                assert_eq!(bytes, usize::MAX, "{policy:?} {path:?}");
            }
            assert!(mlp.reserve(&cuda.stream(), m).is_err());
        }
    }

    /// Plans of both passes are of what layers do: of the algorithm that stores gate and up, and of the memory that a backward pass
    /// takes.
    #[test]
    fn plans_of_a_training_step_are_of_what_layers_do() {
        let Some(cuda) = common::device() else { return };
        let shapes =
            [(1, 64, 96, false), (40, 64, 96, true), (70, 72, 100, true), (300, 64, 8, false)];
        let all = shapes.into_iter().flat_map(|shape| Numerics::all().map(move |n| (shape, n)));
        for ((m, k, h, bias), numerics) in all {
            let case = Case { bias, numerics, ..Case::new(Op::Mlp, [m, k, h], DType::Bf16) };
            let parameters = Parameters::<bf16>::new(&case).unwrap();
            let (block, gated) = (parameters.mlp(), parameters.gated());
            for path in [None, Some(Path::Unfused)] {
                let (mlp, linear) = match path {
                    None => (Mlp::new(&cuda, &block), GatedLinear::new(&cuda, &gated)),
                    Some(path) => (
                        Mlp::with_path(&cuda, &block, path),
                        GatedLinear::with_path(&cuda, &gated, path),
                    ),
                };
                let (mlp, linear) = (mlp.unwrap(), linear.unwrap());
                for (problem, algorithm) in [
                    (block.problem(m), mlp.saving_algorithm(m)),
                    (gated.problem(m), linear.saving_algorithm(m)),
                ] {
                    let plan = cuda.plan(problem.with_pass(Pass::Saving), path).unwrap();
                    assert_eq!(plan.kernel, algorithm.kernels(), "{problem} {path:?}");
                    let candidates = cuda.candidates(&problem.with_pass(Pass::Saving), path);
                    let chosen: Vec<_> = candidates.iter().filter(|c| c.chosen).collect();
                    assert_eq!(
                        (chosen.len(), chosen[0].algorithm),
                        (1, Some(algorithm)),
                        "{problem}"
                    );
                }
                for policy in SavePolicy::ALL {
                    let said = |problem| cuda.backward_scratch_bytes(&problem, policy, path);
                    let of_block = meanwhile(&mlp, m, policy);
                    assert_eq!(of_block, said(block.problem(m)), "{case} {path:?} {policy}");
                    let of_linear = meanwhile(&linear, m, policy);
                    assert_eq!(of_linear, said(gated.problem(m)), "{case} {path:?} {policy}");
                }
            }
        }
    }
}
