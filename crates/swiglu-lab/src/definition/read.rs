//! From TOML to an [`Experiment`], with the place of everything that is refused.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::Deserialize;
use swiglu_core::{
    Activation, Arrangement, BlockType, DType, Numerics, Orientation, QuantizedType,
};
use toml::Spanned;

use super::claim::{RawClaim, claim};
use super::values::{Extent, Many};
use super::{DEFINITION_SCHEMA, Experiment, MetricGroup, Pace, ProfileDef};
use crate::case::{Case, CaseOp, DeviceKind, Heat};
use crate::error::Result;
use crate::files::file_stem;
use crate::place::{NAME, Place, is_name};
use crate::text::Named;

/// More cases than this are a slip of the sweep, not an experiment.
const MAX_CASES: usize = 10_000;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Raw {
    schema: Spanned<Extent>,
    id: Spanned<String>,
    title: Spanned<String>,
    question: Spanned<String>,
    why: Spanned<String>,
    #[serde(default)]
    focus: Vec<String>,
    device: DeviceKind,
    profiles: Spanned<Vec<Spanned<ProfileDef>>>,
    cases: Spanned<Vec<Spanned<RawCases>>>,
    metrics: RawMetrics,
    pace: Option<Spanned<Pace>>,
    claim: RawClaim,
    boundary: RawBoundary,
    #[serde(default)]
    decisions: Vec<Spanned<String>>,
}

/// A sweep: the product of its arrays.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawCases {
    op: CaseOp,
    m: Spanned<Many<Extent>>,
    shapes: Spanned<Vec<Spanned<Shape>>>,
    dtype: Many<Named<DType>>,
    /// Types of quantised weights; without them weights are of `dtype`.
    weights: Option<Spanned<Many<Named<BlockType>>>>,
    #[serde(default)]
    activation: Many<Activation>,
    #[serde(default)]
    numerics: Many<Named<Numerics>>,
    #[serde(default)]
    arrangement: Many<Named<Arrangement>>,
    #[serde(default)]
    orientation: Many<Named<Orientation>>,
    #[serde(default)]
    bias: Many<bool>,
    #[serde(default)]
    heat: Many<Heat>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Shape {
    model: Option<String>,
    hidden: Option<Extent>,
    intermediate: Extent,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawMetrics {
    groups: Spanned<Vec<MetricGroup>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawBoundary {
    text: Spanned<String>,
    #[serde(default)]
    decisions: Vec<Spanned<String>>,
}

pub(super) fn experiment(source: &str, path: &Path) -> Result<Experiment> {
    let place = Place::new(source, path);
    let raw: Raw = place.toml()?;
    header(&raw, &place)?;
    let profiles = profiles(&raw.profiles, &place)?;
    let cases = cases(&raw, &place)?;
    let claim = claim(raw.claim, &profiles, &place)?;
    let pace = pace(raw.pace, &place)?;
    let decisions = raw.decisions.into_iter().chain(raw.boundary.decisions);
    Ok(Experiment {
        id: raw.id.into_inner(),
        title: raw.title.into_inner(),
        question: raw.question.into_inner(),
        why: raw.why.get_ref().trim().to_owned(),
        focus: raw.focus,
        device: raw.device,
        profiles,
        cases,
        metrics: raw.metrics.groups.into_inner(),
        pace,
        claim,
        boundary: raw.boundary.text.get_ref().trim().to_owned(),
        decisions: decisions.map(Spanned::into_inner).collect(),
        definition_hash: String::new(),
        path: path.to_path_buf(),
    })
}

fn pace(raw: Option<Spanned<Pace>>, place: &Place<'_>) -> Result<Pace> {
    let Some(raw) = raw else { return Ok(Pace::default()) };
    let pace = *raw.get_ref();
    let longest = pace.rest_ms.max(pace.warm_ms).max(pace.turn_ms);
    let message = format!("pace: {longest} ms: expected at most {}", Pace::MOST_MS);
    place.expect(longest <= Pace::MOST_MS, &raw, message)?;
    let message = "pace: expected rest_ms, warm_ms or turn_ms above 0, or no [pace]";
    place.expect(!pace.is_none(), &raw, message)?;
    Ok(pace)
}

fn header(raw: &Raw, place: &Place<'_>) -> Result<()> {
    let Extent(schema) = *raw.schema.get_ref();
    let message = format!("schema {schema}: this program reads schema {DEFINITION_SCHEMA}");
    place.expect(schema == DEFINITION_SCHEMA, &raw.schema, message)?;
    let (id, stem) = (raw.id.get_ref(), file_stem(place.path));
    let message = format!("id `{id}`: expected the name of the file, `{stem}`, of {NAME}");
    place.expect(is_name(id) && stem == *id, &raw.id, message)?;
    place.expect_sentence("title", &raw.title)?;
    place.expect_sentence("question", &raw.question)?;
    place.expect_sentence("why", &raw.why)?;
    place.expect_sentence("claim.text", &raw.claim.text)?;
    place.expect_sentence("boundary.text", &raw.boundary.text)?;
    let message = "question: expected one sentence that ends in a question mark";
    place.expect(raw.question.get_ref().ends_with('?'), &raw.question, message)?;
    let message = "no metric groups: expected some of latency, traffic, validation";
    place.expect(!raw.metrics.groups.get_ref().is_empty(), &raw.metrics.groups, message)
}

fn profiles(raw: &Spanned<Vec<Spanned<ProfileDef>>>, place: &Place<'_>) -> Result<Vec<ProfileDef>> {
    let message = "no profiles: expected at least one [[profiles]]";
    place.expect(!raw.get_ref().is_empty(), raw, message)?;
    let mut ids = BTreeSet::new();
    for profile in raw.get_ref() {
        let p = profile.get_ref();
        for (what, name) in [("id", &p.id), ("peer", &p.peer)] {
            let message = format!("profile {what} `{name}`: expected {NAME}");
            place.expect(is_name(name), profile, message)?;
        }
        let message = format!("profile id `{}` is taken: expected a unique id", p.id);
        place.expect(ids.insert(&p.id), profile, message)?;
    }
    Ok(raw.get_ref().iter().map(|p| p.get_ref().clone()).collect())
}

fn cases(raw: &Raw, place: &Place<'_>) -> Result<Vec<Case>> {
    let mut seen = BTreeMap::new();
    let mut all = Vec::new();
    for sweep in raw.cases.get_ref() {
        for case in expand(raw.device, sweep.get_ref(), place)? {
            let key = case.key();
            if let Some(model) = seen.insert(key.clone(), case.model.clone()) {
                let first = model.map(|m| format!(" (first for {m})")).unwrap_or_default();
                let message = format!("the case `{key}` is there twice{first}: expected it once");
                return Err(place.at(sweep.span(), message));
            }
            all.push(case);
        }
        let message = format!("the sweep has more than {MAX_CASES} cases");
        place.expect(all.len() <= MAX_CASES, sweep, message)?;
    }
    place.expect(!all.is_empty(), &raw.cases, "no cases: expected at least one [[cases]]")?;
    Ok(all)
}

/// The product of a sweep's arrays, the first field varying slowest.
fn expand(device: DeviceKind, sweep: &RawCases, place: &Place<'_>) -> Result<Vec<Case>> {
    let mut all = Vec::new();
    for shape in sweep.shapes.get_ref() {
        let [hidden, intermediate] = extents(sweep.op, shape, place)?;
        for Named(arrangement) in &sweep.arrangement.0 {
            let fits = arrangement.validate(intermediate);
            fits.map_err(|e| place.at(shape.span(), e.to_string()))?;
        }
        for &Extent(m) in &sweep.m.get_ref().0 {
            for (dtype, weights) in element_types(sweep, [hidden, intermediate], place)? {
                let mut cases = vec![Case {
                    device,
                    op: sweep.op,
                    m,
                    hidden,
                    intermediate,
                    model: shape.get_ref().model.clone(),
                    dtype,
                    weights,
                    activation: Activation::SWIGLU,
                    numerics: Numerics::default_for(dtype),
                    arrangement: Arrangement::Separate,
                    orientation: Orientation::OutIn,
                    bias: false,
                    heat: Heat::Cold,
                }];
                vary(&mut cases, &sweep.activation, |case, activation| {
                    case.activation = activation
                });
                vary(&mut cases, &sweep.numerics, |case, Named(n)| case.numerics = n);
                vary(&mut cases, &sweep.arrangement, |case, Named(a)| case.arrangement = a);
                vary(&mut cases, &sweep.orientation, |case, Named(o)| case.orientation = o);
                vary(&mut cases, &sweep.bias, |case, bias| case.bias = bias);
                vary(&mut cases, &sweep.heat, |case, heat| case.heat = heat);
                all.extend(cases);
            }
        }
    }
    Ok(all)
}

/// Each case with each value; as it is, if none was given.
fn vary<T: Copy>(cases: &mut Vec<Case>, values: &Many<T>, set: impl Fn(&mut Case, T)) {
    if values.0.is_empty() {
        return;
    }
    for case in std::mem::take(cases) {
        for value in &values.0 {
            let mut varied = case.clone();
            set(&mut varied, *value);
            cases.push(varied);
        }
    }
}

/// The products of element types and types of quantised weights: of `[out, in]` matrices whose rows
/// are whole blocks.
fn element_types(
    sweep: &RawCases,
    extents: [usize; 2],
    place: &Place<'_>,
) -> Result<Vec<(DType, Option<QuantizedType>)>> {
    let dtypes = sweep.dtype.0.iter().map(|&Named(dtype)| dtype);
    let Some(given) = &sweep.weights else { return Ok(dtypes.map(|d| (d, None)).collect()) };
    let blocks: Vec<BlockType> = given.get_ref().0.iter().map(|&Named(block)| block).collect();
    for block in &blocks {
        let inputs = if sweep.op.is_block() { &extents[..] } else { &extents[..1] };
        let broken = inputs.iter().find(|n| !n.is_multiple_of(block.elements()));
        let why = if !sweep.op.has_weights() {
            format!("{} has no weights", sweep.op)
        } else if sweep.op == CaseOp::MlpTrain {
            "quantised weights have no gradients".into()
        } else if !sweep.arrangement.0.is_empty() || !sweep.orientation.0.is_empty() {
            "quantised weights are separate and out-in; expected no others".into()
        } else if let Some(n) = broken {
            format!("{n} inputs are not whole blocks of {}", block.elements())
        } else {
            continue;
        };
        return Err(place.at(given.span(), format!("weights = {block}: {why}")));
    }
    Ok(dtypes.flat_map(|d| blocks.iter().map(move |&block| (d, Some(block.into())))).collect())
}

/// K and H of a shape, which an operation without weights has no K of.
fn extents(op: CaseOp, shape: &Spanned<Shape>, place: &Place<'_>) -> Result<[usize; 2]> {
    let Shape { hidden, intermediate: Extent(intermediate), .. } = *shape.get_ref();
    let hidden = hidden.map(|Extent(hidden)| hidden);
    let message = match (op.has_weights(), hidden) {
        (true, None) => format!("the shape has no `hidden`: {op} needs it"),
        (false, Some(h)) => format!("hidden = {h}: {op} has no weights and no hidden size"),
        (_, hidden) => return Ok([hidden.unwrap_or(0), intermediate]),
    };
    Err(place.at(shape.span(), message))
}
