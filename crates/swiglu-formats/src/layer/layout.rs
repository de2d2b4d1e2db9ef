//! Orientation and arrangement: stated by the caller, fixed by a convention, or decided by the
//! shapes; never guessed.

use swiglu_core::{Arrangement, Orientation};

use super::names::{Convention, Kind, is_linear_weight};
use super::{TensorNames, transposed};
use crate::error::{FormatError, Result};
use crate::family::Family;
use crate::model::{FileFormat, Model};
use crate::tensor::StoredMatrix;

/// What convention and family fix.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Known {
    pub(super) orientation: Option<Orientation>,
    /// Of a packed tensor.
    pub(super) arrangement: Option<Arrangement>,
}

pub(super) fn known(
    model: &Model,
    found: Option<(&'static Convention, Kind)>,
    family: Option<&'static Family>,
    names: &TensorNames,
) -> Known {
    if let Some((convention, kind)) = found {
        let stack = family.and_then(|f| f.stack).filter(|_| kind == Kind::Stack);
        // A parameter's name says nothing of its order; its family does.
        let of_family = match convention.orientation {
            None => stack.map(|(orientation, _)| orientation),
            fixed => fixed,
        };
        let packed = match stack {
            Some((_, arrangement)) => Some(arrangement),
            None => family.and_then(|f| f.packed),
        };
        return Known { orientation: of_family, arrangement: convention.arrangement.or(packed) };
    }
    // GGUF multiplies by the adjacent dimension, and a torch linear layer's name fixes its shape,
    // also where a caller picked the tensors.
    let weights = [&names.gate, &names.up, &names.gate_up, &names.down];
    let linear = weights.into_iter().flatten().all(|n| is_linear_weight(n));
    let fixed = model.format() == FileFormat::Gguf || linear;
    Known { orientation: fixed.then_some(Orientation::OutIn), arrangement: None }
}

/// The shapes a layer consists of.
pub(super) struct Shapes<'a> {
    /// Gate, or gate and up in one.
    pub(super) gate: &'a StoredMatrix,
    pub(super) packed: bool,
    /// Whether the down weight has the other orientation.
    pub(super) down_transposed: bool,
    pub(super) down: Option<&'a StoredMatrix>,
    /// Each bias: its name, its length, and whether it has K, H or 2H elements.
    pub(super) biases: Vec<(&'a str, usize, BiasOf)>,
    /// K, if it is stated.
    pub(super) hidden: Option<usize>,
}

/// What a bias is added to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BiasOf {
    Half,
    Both,
    Down,
}

/// Orientation, hidden and intermediate size.
type Oriented = (Orientation, usize, usize);

/// A wrong shape: the tensor, what was expected, and its shape.
type Misfit<'a> = (&'a str, String, Vec<usize>);

impl<'a> Shapes<'a> {
    /// The sizes if everything fits under an orientation.
    fn check(&self, orientation: Orientation) -> std::result::Result<Oriented, Misfit<'a>> {
        let given = vec![self.gate.rows, self.gate.cols];
        let [features, hidden] = orientation.shape(self.gate.rows, self.gate.cols);
        let wrong = |expected: String| (self.gate.name.as_str(), expected, given.clone());
        if self.packed && !features.is_multiple_of(2) {
            return Err(wrong(format!("an even number of features, {orientation}")));
        }
        let intermediate = if self.packed { features / 2 } else { features };
        if hidden == 0 || intermediate == 0 {
            return Err(wrong("at least one input and one output feature".into()));
        }
        if let Some(k) = self.hidden.filter(|&k| k != hidden) {
            return Err(wrong(format!(
                "{k} input features, {orientation}, the hidden size that is stated (LoadOptions::with_orientation, or LoadOptions::with_ignored(hidden_size))"
            )));
        }
        if let Some(down) = self.down {
            let of = if self.down_transposed { transposed(orientation) } else { orientation };
            let expected = of.shape(hidden, intermediate);
            if [down.rows, down.cols] != expected {
                let expected = format!("{expected:?} ({orientation}, from {given:?} of the gate)");
                return Err((&down.name, expected, vec![down.rows, down.cols]));
            }
        }
        for &(name, len, of) in &self.biases {
            let expected = match of {
                BiasOf::Half => intermediate,
                BiasOf::Both => features,
                BiasOf::Down => hidden,
            };
            if len != expected {
                return Err((name, format!("[{expected}]"), vec![len]));
            }
        }
        Ok((orientation, hidden, intermediate))
    }

    /// Decides the orientation.
    ///
    /// The caller's word holds over a convention's.
    pub(super) fn orient(
        self,
        model: &Model,
        stated: Option<Orientation>,
        known: Option<Orientation>,
    ) -> Result<Oriented> {
        let refuse = |(tensor, expected, given): Misfit<'_>| {
            FormatError::shape(model.path(), tensor, expected, &given)
        };
        if let Some(orientation) = stated.or(known) {
            return self.check(orientation).map_err(refuse);
        }
        match (self.check(Orientation::OutIn), self.check(Orientation::InOut)) {
            (Ok(only), Err(_)) | (Err(_), Ok(only)) => Ok(only),
            (Err(a), Err(b)) => {
                let expected = format!("as out-in {}: {}; as in-out {}: {}", a.0, a.1, b.0, b.1);
                Err(FormatError::shape(
                    model.path(),
                    &self.gate.name,
                    expected,
                    &[self.gate.rows, self.gate.cols],
                ))
            }
            (Ok(_), Ok(_)) => Err(FormatError::Ambiguous {
                path: model.path().to_owned(),
                what: "the orientation",
                why: format!(
                    "{} is [{}, {}], which fits both ways, and its name fixes neither",
                    self.gate.name, self.gate.rows, self.gate.cols
                ),
                choices:
                    "LoadOptions::with_orientation: out-in (one row per output feature) or in-out"
                        .into(),
            }),
        }
    }
}

/// Decides the arrangement.
pub(super) fn arrange(
    model: &Model,
    packed: Option<&str>,
    stated: Option<Arrangement>,
    known: Option<Arrangement>,
    architecture: Option<&str>,
) -> Result<Arrangement> {
    let contradiction = |why: String| FormatError::Contradiction {
        path: model.path().to_owned(),
        what: "arrangement",
        why,
    };
    match (packed, stated.or(known)) {
        (None, _) if stated.is_some_and(Arrangement::is_packed) => Err(contradiction(format!(
            "{} given, but gate and up are two tensors",
            stated.unwrap_or(Arrangement::Separate)
        ))),
        (None, _) => Ok(Arrangement::Separate),
        (Some(name), Some(Arrangement::Separate)) => {
            Err(contradiction(format!("separate given, but {name} holds both gate and up")))
        }
        (Some(_), Some(arrangement)) => Ok(arrangement),
        (Some(name), None) => Err(FormatError::Ambiguous {
            path: model.path().to_owned(),
            what: "the arrangement",
            why: format!(
                "{name} holds gate and up, models differ in the order, and {}",
                match architecture {
                    Some(a) => format!("that of `{a}` is not known here"),
                    None => "nothing names the architecture".into(),
                }
            ),
            choices: "LoadOptions::with_arrangement: gate-first, up-first or interleaved-G".into(),
        }),
    }
}
