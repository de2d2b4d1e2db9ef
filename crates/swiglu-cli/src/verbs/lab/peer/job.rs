//! What the peers have in common: a case with an order to compute it, and the job that is made of it.

use std::any::Any;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use anyhow::Result;
use swiglu::{
    DType, Device, Element, GateUpRef, Half, MatrixRef, Numerics, Orientation, SavePolicy,
    StridedRef, bf16, f16,
};
use swiglu_cuda::Cuda;
use swiglu_lab::{Case, CaseOp, Heat};

use super::options::Options;
use crate::inputs::Derived;
use crate::layer::Packed;
use crate::step::{ByCandidate, by_candidate};

/// Copies of cold data on the CPU together have at least this many bytes: far more than any cache.
const COLD_BYTES: f64 = 400e6;
/// Tiny data are in a cache whatever is done; this many copies are enough of them.
const MAX_COPIES: f64 = 1000.0;

/// A prepared case: data in place and kernels compiled.
pub(super) trait Job {
    /// One turn: microseconds per call.
    fn turn(&mut self, budget_us: u64) -> Result<Vec<f64>>;

    /// Those rows of a result of the calls that are timed, little-endian.
    fn verify(&mut self, case: &Case, rows: &[usize]) -> Result<Vec<u8>>;
}

/// A job, and what a record says about it.
pub(super) struct Prepared {
    pub(super) job: Box<dyn Job>,
    pub(super) plan: Option<String>,
    /// The hash of each kernel that was compiled for it, or of the program, by the name of its part.
    pub(super) variants: BTreeMap<String, String>,
    pub(super) notes: Vec<String>,
}

pub(crate) struct Order<'a> {
    pub(crate) case: &'a Case,
    pub(crate) options: Options,
    pub(crate) seed: u64,
    /// Copies of the data; by default as many as exceed the caches.
    pub(crate) copies: Option<usize>,
    /// What ways of one case have in common.
    pub(crate) shared: Shared,
}

impl<'a> Order<'a> {
    /// Of a case without options.
    pub(crate) fn plain(case: &'a Case, copies: Option<usize>) -> Self {
        Self { case, options: Options::default(), seed: 1, copies, shared: Shared::default() }
    }

    /// Bytes that a call must move: of quantised weights that are decoded, those of elements.
    pub(super) fn bytes(&self) -> f64 {
        match self.case.problem().filter(|p| p.quantized.is_some() && self.options.decode) {
            Some(problem) => problem.with_quantized(None).compulsory_bytes(),
            None => self.case.compulsory_bytes(),
        }
    }

    /// What is kept between the passes of a training step.
    pub(super) fn policy(&self) -> SavePolicy {
        self.options.keep.unwrap_or_default()
    }

    /// What else a record says about how the case is computed.
    pub(super) fn notes(&self, numerics: Numerics, copies: usize) -> Vec<String> {
        let Case { op, m, intermediate, dtype, .. } = *self.case;
        let kept = self.policy().kept_bytes(m, intermediate, dtype);
        let kept = format!("keeps {kept} bytes between the passes, beside x");
        let mut notes =
            vec![format!("rounds as {numerics}"), format!("{copies} copies in rotation")];
        notes.extend((op == CaseOp::MlpTrain).then_some(kept));
        notes
    }

    /// Copies of the layer, by the path that was asked for; quantised weights as they are, or decoded once.
    pub(super) fn layers<T: Element>(&self, device: &Device, count: usize) -> Result<Vec<Packed>> {
        let layer = Derived::<T>::derive(self.case, self.seed, self.options.decode)?;
        let keep = (self.case.op == CaseOp::MlpTrain).then(|| self.policy());
        (0..count).map(|_| Ok(layer.params().pack(device, self.options.path, keep)?)).collect()
    }

    /// Copies of the data on the CPU, of which a call touches this many bytes.
    pub(super) fn copies_of(&self, bytes: f64) -> usize {
        self.copies.unwrap_or(match self.case.heat {
            Heat::Hot => 1,
            Heat::Cold => (COLD_BYTES / bytes.max(1.0)).ceil().clamp(1.0, MAX_COPIES) as usize,
        })
    }
}

/// The packed layers that the candidates of a layer's cases compute over, until a case of another layer is prepared.
#[derive(Debug, Clone, Default)]
pub(crate) struct Shared(Rc<RefCell<Option<Known>>>);

/// The layer that they are of, and they.
type Known = (Layer, Rc<dyn Any>);

/// A case with any number of tokens, and the seed of its data.
type Layer = (Case, u64);

fn layer_of(case: &Case, seed: u64) -> Layer {
    (Case { m: 0, ..case.clone() }, seed)
}

impl Shared {
    /// Gives up the layers of other cases: what they occupy is for this one.
    pub(super) fn make_room(&self, case: &Case, seed: u64) {
        let mut known = self.0.borrow_mut();
        if known.as_ref().is_some_and(|(layer, _)| *layer != layer_of(case, seed)) {
            *known = None;
        }
    }

    /// At least as many layers of the case as asked for: those that are there, or new ones.
    pub(super) fn layers<T: Element>(
        &self,
        cuda: &Cuda,
        case: &Case,
        seed: u64,
        count: usize,
    ) -> Result<Rc<Vec<ByCandidate<T>>>> {
        let of = layer_of(case, seed);
        let known = self.0.borrow().clone().filter(|(layer, _)| *layer == of);
        let known = known.and_then(|(_, layers)| layers.downcast::<Vec<ByCandidate<T>>>().ok());
        if let Some(known) = known.filter(|known| known.len() >= count) {
            return Ok(known);
        }
        // Others, or too few of these, make room.
        *self.0.borrow_mut() = None;
        let weights = Derived::<T>::derive(case, seed, true)?;
        let layers = Rc::new(by_candidate(cuda, &weights.params(), count)?);
        *self.0.borrow_mut() = Some((of, layers.clone()));
        Ok(layers)
    }
}

/// What a call writes, each matrix with how it lies.
pub(super) type Written<'a, T> = [(MatrixRef<'a, T>, Orientation)];

/// Rows of the output of a case, little-endian.
pub(super) fn rows<T: Element>(
    case: &Case,
    written: &Written<'_, T>,
    rows: &[usize],
) -> Result<Vec<u8>> {
    let values: Vec<T> = match case.op {
        CaseOp::MlpTrain => rows.iter().flat_map(|&r| stacked(written, r)).collect(),
        CaseOp::ActivationBackward => {
            // Gradients are shown beside each other, however they are arranged.
            let gradients = match *written {
                [(gate, _), (up, _)] => GateUpRef::separate(gate, up),
                _ => GateUpRef::packed(written[0].0, case.arrangement),
            }?;
            let halves = rows.iter().flat_map(|r| [(*r, Half::Gate), (*r, Half::Up)]);
            let at = |(r, half, i)| gradients.at(half, r, i);
            let all = 0..gradients.intermediate();
            halves.flat_map(|(r, half)| all.clone().map(move |i| (r, half, i))).map(at).collect()
        }
        _ => rows.iter().flat_map(|&r| written[0].0.row(r)).copied().collect(),
    };
    Ok(values.into_iter().flat_map(bytes).collect())
}

/// A row of the matrices that have K columns, one behind the other: y, and the gradients of x, of gate's and up's weights and,
/// transposed, of down's.
fn stacked<T: Element>(written: &Written<'_, T>, mut row: usize) -> Vec<T> {
    for (i, (matrix, lies)) in written.iter().enumerate() {
        let is_down = i + 1 == written.len();
        let across = is_down == (*lies == Orientation::OutIn);
        let lying = StridedRef::from(*matrix);
        let lying = if across { lying.transposed() } else { lying };
        let [rows, cols] = lying.shape();
        if row < rows {
            return (0..cols).map(|c| lying.at(row, c)).collect();
        }
        row -= rows;
    }
    Vec::new()
}

/// An element, little-endian.
fn bytes<T: Element>(value: T) -> Vec<u8> {
    // Exact: it is a value of T.
    let value = value.to_f32();
    match T::DTYPE {
        DType::F32 => value.to_le_bytes().into(),
        DType::F16 => f16::from_f32(value).to_le_bytes().into(),
        _ => bf16::from_f32(value).to_le_bytes().into(),
    }
}
