//! Candidates of a plan as ways of a case: those of one layer compute over the same packed weights, whatever the number of tokens.

use std::any::Any;
use std::cell::RefCell;
use std::rc::Rc;

use anyhow::{Context, bail};
use serde::de::Error;
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use swiglu::{CoreError, Element, Path};
use swiglu_cuda::{Candidate, Cuda};
use swiglu_lab::{Case, CaseOp};

use crate::inputs::Dense;
use crate::layer::{ByCandidate, by_candidate};

/// A candidate whose expected time is at most so many times the plan's is near it.
const NEAR: f64 = 1.2;

/// Which candidate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Which {
    Planned,
    /// Gate and up as elements in memory.
    Unfused,
    /// Of those near the plan that are neither, by expected time, from 1 on.
    Near(usize),
}

impl<'de> Deserialize<'de> for Which {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let given = Value::deserialize(d)?;
        let near = given.as_u64().filter(|at| *at > 0).map(|at| Which::Near(at as usize));
        let named = match given.as_str() {
            Some("planned") => Some(Which::Planned),
            Some("unfused") => Some(Which::Unfused),
            _ => near,
        };
        named.ok_or_else(|| {
            let expected = "expected `planned`, `unfused` or a number from 1 on";
            D::Error::custom(format!("candidate = {given}, {expected}"))
        })
    }
}

/// The candidate of a case, and how many are near its plan.
pub(super) fn find(cuda: &Cuda, case: &Case, which: Which) -> anyhow::Result<(Candidate, usize)> {
    let problem = case.problem().filter(|_| case.op != CaseOp::MlpTrain && case.weights.is_none());
    let Some(problem) = problem.filter(|_| case.op.has_weights()) else {
        bail!(
            "option candidate: it is one of layers with weights of elements, forward; not of {case}"
        );
    };
    let unfused = cuda.plan(problem, Some(Path::Unfused)).kernel;
    let (planned, others): (Vec<_>, Vec<_>) =
        cuda.candidates(&problem, None).into_iter().partition(|candidate| candidate.chosen);
    let planned = planned.into_iter().next().context("no candidate is the plan")?;
    let most = planned.expected_us.unwrap_or(f64::INFINITY) * NEAR;
    let is_near = |c: &&Candidate| {
        let expected = c.expected_us.filter(|_| c.refusal.is_none() && c.name != unfused);
        expected.is_some_and(|us| us <= most)
    };
    let mut near: Vec<_> = others.iter().filter(is_near).cloned().collect();
    near.sort_by(|a, b| a.expected_us.unwrap_or(most).total_cmp(&b.expected_us.unwrap_or(most)));
    let count = near.len();
    let found = match which {
        Which::Unfused if planned.name != unfused => others.into_iter().find(|c| c.name == unfused),
        Which::Planned | Which::Unfused => Some(planned),
        Which::Near(at) => near.into_iter().nth(at - 1),
    };
    let found = found.ok_or_else(|| CoreError::Unsupported {
        what: "another candidate".into(),
        why: format!("{count} are expected to take at most {NEAR} times as long as the plan"),
    })?;
    Ok((found, count))
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
    ) -> anyhow::Result<Rc<Vec<ByCandidate<T>>>> {
        let of = layer_of(case, seed);
        let known = self.0.borrow().clone().filter(|(layer, _)| *layer == of);
        let known = known.and_then(|(_, layers)| layers.downcast::<Vec<ByCandidate<T>>>().ok());
        if let Some(known) = known.filter(|known| known.len() >= count) {
            return Ok(known);
        }
        // Others, or too few of these, make room.
        *self.0.borrow_mut() = None;
        let weights = Dense::<T>::derive(case, seed)?;
        let params = weights.params();
        let layers = (0..count).map(|_| by_candidate(cuda, &params));
        let layers = Rc::new(layers.collect::<anyhow::Result<Vec<_>>>()?);
        *self.0.borrow_mut() = Some((of, layers.clone()));
        Ok(layers)
    }
}
