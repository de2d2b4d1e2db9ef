//! Layers over weights that stay in a device's memory, made when tensors are met for the first time and remembered.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use swiglu::cuda::BorrowedStream;
use swiglu::{CoreError, DType, Numerics, with_dtype};

use crate::activation::{Activation, How};
use crate::alike::{Alike, done};
use crate::error::Failure;
use crate::layer::Layer;
use crate::tensor::Tensor;
use crate::weights::Weights;

/// What a layer over lent weights is: one with the same is the same layer.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Lent {
    ordinal: usize,
    dtype: DType,
    numerics: Option<Numerics>,
    /// Address, rows and columns of each, and elements between rows.
    weights: [Option<[usize; 4]>; 6],
}

/// By their activations.
type Layers = Vec<(swiglu::Activation, Arc<Layer>)>;

static LENT: Mutex<Option<HashMap<Lent, Layers>>> = Mutex::new(None);

/// Layers that are remembered.
const MOST_LENT: usize = 4096;

/// Scratch memory that a stream keeps for calls, which has room for cuBLASLt's 32 MiB; more is asked of PyTorch for each.
pub(crate) const OWN_SCRATCH: usize = 48 << 20;

/// A layer over weights where they lie, for tensors as kernels take them, on the stream that is current: x, the weights that
/// are there, and what is written. `false` where anything speaks against it, and nothing was done.
pub(crate) fn layer_at_once(how: How, tensors: Alike, weights: [bool; 6]) -> Result<bool, Failure> {
    let Some(stream) = tensors.current_stream() else { return Ok(false) };
    let mut tensors = tensors.tensors.into_iter();
    let (Some(x), Some(out)) = (tensors.next(), tensors.next_back()) else { return Ok(false) };
    let mut there = weights.into_iter().map(|there| there.then(|| tensors.next()).flatten());
    let mut next = || there.next().flatten();
    let Some(gate) = next() else { return Ok(false) };
    let weights = Weights(gate, next(), next(), next(), next(), next());
    let Ok(layer) = lent(&stream, how, &weights) else { return Ok(false) };
    let (hidden, features) = (layer.hidden(), layer.out_features());
    let fits = x.shape.split_last().zip(out.shape.split_last()).is_some_and(
        |((&inside, rows), (&outside, out_rows))| {
            (inside, outside, rows) == (hidden, features, out_rows)
        },
    );
    let tokens = x.shape.iter().product::<usize>() / hidden.max(1);
    let scratch = layer.workspace_bytes(tokens);
    // Scratch memory of a graph is PyTorch's: it knows how long the graph lives.
    if !fits || scratch > OWN_SCRATCH || scratch > 0 && stream.is_capturing()? {
        return Ok(false);
    }
    done(with_dtype!(x.dtype, T => layer.enqueue_on::<T>(&stream, &x, &out, (0, 0))))
}

/// The layer of these weights, made where it is new.
pub(crate) fn lent(
    stream: &BorrowedStream,
    how: How,
    weights: &Weights,
) -> Result<Arc<Layer>, Failure> {
    let Weights(gate, up, down, gate_bias, up_bias, down_bias) = weights;
    let others = [up, down, gate_bias, up_bias, down_bias].map(Option::as_ref);
    let place = |t: &Tensor| {
        // Dimensions in front would be taken for rows.
        if t.shape.len() > 2 {
            let (expected, given) = ("[out, in] or [out]".into(), t.shape_text());
            return Err(CoreError::Shape { what: "weight".into(), expected, given });
        }
        let [rows, cols, stride] = t.strided("weight")?;
        Ok::<_, CoreError>([t.address, rows, cols, stride])
    };
    let mut places = [Some(place(gate)?), None, None, None, None, None];
    for (known, t) in places[1..].iter_mut().zip(others) {
        *known = t.map(place).transpose()?;
    }
    let (ordinal, dtype) = (stream.cuda().ordinal(), gate.dtype);
    let key = Lent { ordinal, dtype, numerics: how.numerics, weights: places };
    let mut known = LENT.lock().unwrap_or_else(PoisonError::into_inner);
    let known = known.get_or_insert_default();
    let same = |layers: &Layers| {
        let found = layers.iter().find(|(of, _)| *of == how.act);
        found.map(|(_, layer)| layer.clone())
    };
    if let Some(layer) = known.get(&key).and_then(same) {
        return Ok(layer);
    }
    let act = Activation(how.act);
    let kind = with_dtype!(dtype, T => weights.borrow::<T>(ordinal, act, how.numerics))?;
    if known.len() >= MOST_LENT {
        known.clear();
    }
    let layer = Arc::new(Layer::from(kind));
    known.entry(key).or_default().push((how.act, layer.clone()));
    Ok(layer)
}

/// Forgets the layers of the parent in a forked child.
pub(crate) fn forget_lent() {
    std::mem::forget(LENT.lock().unwrap_or_else(PoisonError::into_inner).take());
}
