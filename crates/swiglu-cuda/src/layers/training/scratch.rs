//! Where gate, up and their gradients lie in a backward pass, and the scratch memory that it takes.

use swiglu_core::{DType, Element, Op, Problem};

use super::kept::Kept;
use super::part;
use crate::device::context::Cuda;
use crate::device::lt::{LinearWeights, Lt};
use crate::kernels::elementwise::{Stored, Tensor};
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
    /// Whether the gradients lie in scratch memory, for that product.
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
        wants_dx: bool,
    ) -> Self {
        let Problem { op, hidden: k, intermediate: h, .. } = layer.problem;
        let half = padded::<T>(h);
        let both = match dense.gate_up.products(Stored::Elements) {
            Products::Both(both) if h > 0 && k > 0 => Some(both),
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
            moves: both.is_some() && wants_dx && !kept.up.is_some_and(together),
            up_again: kept.up.is_none().then(|| layer.up_again(m, dense)),
            round_dx: wants_dx && both.is_none() && T::DTYPE != DType::F32,
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

    pub(super) fn needs(&self, stores_dh: bool) -> Needs {
        let [m, k] = self.rows;
        let sums_of_dx = if self.round_dx { m * k } else { 0 };
        let sums_of_up = if self.up_again == Some(Stored::Sums) { m * self.half } else { 0 };
        Needs {
            dtype: self.dtype,
            tokens: m,
            half: self.half,
            is_block: self.is_block,
            stores_dh,
            has_up: self.kept.up.is_some(),
            moves: self.moves,
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
    /// Whether dh passes through memory.
    pub(super) stores_dh: bool,
    /// Whether up is there.
    pub(super) has_up: bool,
    /// Whether gradients of gate and up may not lie where these do: elsewhere they lie as one product takes both.
    pub(super) moves: bool,
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
    pub(super) sums: usize,
    pub(super) lt: usize,
}

impl Needs {
    pub(super) fn parts(self, cuda: &Cuda) -> Parts {
        let rows = |cols: usize| part(self.tokens * cols * self.dtype.size());
        let with = |needed: bool| if needed { rows(self.half) } else { 0 };
        Parts {
            h: with(self.is_block),
            dh: with(self.is_block && self.stores_dh),
            gate_up: if self.moves { rows(2 * self.half) } else { with(!self.has_up) },
            sums: part(self.sums * size_of::<f32>()),
            lt: Lt::scratch_bytes(cuda.arch()),
        }
    }
}

impl Parts {
    pub(super) fn total(&self) -> usize {
        self.h + self.dh + self.gate_up + self.sums + self.lt
    }
}
