//! From TOML to an [`Experiment`], with the place of everything that is refused.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::path::Path;

use serde::Deserialize;
use swiglu_core::{Activation, Arrangement, DType, Numerics, Orientation, QuantizedType};
use toml::Spanned;

use super::claim::{RawClaim, claim};
use super::values::{Counts, Extent, MAX_CASES, Many};
use super::{CANDIDATE, DEFINITION_SCHEMA, Experiment, METRICS, MOST_WAYS, Pace, ProfileDef};
use crate::case::{Case, CaseOp, DeviceKind, Heat};
use crate::error::Result;
use crate::files::file_stem;
use crate::place::{NAME, Place, is_name, text_of};
use crate::text::Named;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Raw {
    schema: Spanned<Extent>,
    id: Spanned<String>,
    title: Spanned<String>,
    question: Spanned<String>,
    why: Spanned<String>,
    /// What varies, for people.
    #[serde(default, rename = "focus")]
    _focus: Vec<String>,
    /// Another experiment, whose records answer this one too: what is measured is there, and not here.
    records: Option<Spanned<String>>,
    device: Option<DeviceKind>,
    profiles: Option<Profiles>,
    cases: Option<Sweeps>,
    metrics: Option<RawMetrics>,
    pace: Option<Spanned<Pace>>,
    claim: RawClaim,
    boundary: RawBoundary,
    #[serde(default)]
    decisions: Vec<String>,
}

type Profiles = Spanned<Vec<Spanned<ProfileDef>>>;
type Sweeps = Spanned<Vec<Spanned<RawCases>>>;

/// A sweep: the product of its arrays.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawCases {
    op: CaseOp,
    m: Spanned<Many<Counts>>,
    shapes: Spanned<Vec<Spanned<Shape>>>,
    dtype: Many<Named<DType>>,
    /// Types of quantised weights; without them weights are of `dtype`.
    weights: Option<Spanned<Many<Named<QuantizedType>>>>,
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
    groups: Spanned<Vec<String>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawBoundary {
    text: Spanned<String>,
    #[serde(default)]
    decisions: Vec<String>,
}

pub(super) fn experiment(source: &str, path: &Path) -> Result<Experiment> {
    let place = Place::new(source, path);
    of_raw(place.toml()?, &place)
}

fn of_raw(mut raw: Raw, place: &Place<'_>) -> Result<Experiment> {
    header(&raw, place)?;
    let measured = measured(&mut raw, place)?;
    Ok(Experiment {
        title: place.sentence("title", &raw.title)?,
        question: place.sentence("question", &raw.question)?,
        why: place.sentence("why", &raw.why)?,
        boundary: place.sentence("boundary.text", &raw.boundary.text)?,
        claim: claim(raw.claim, &measured.profiles, place)?,
        decisions: [raw.decisions, raw.boundary.decisions].concat(),
        id: raw.id.into_inner(),
        path: place.path.to_path_buf(),
        ..measured
    })
}

/// What is measured, and as which experiment.
fn measured(raw: &mut Raw, place: &Place<'_>) -> Result<Experiment> {
    let Raw { records, device, profiles, cases, metrics, pace, .. } = raw;
    let there = (device.take(), profiles.take(), cases.take(), metrics.take(), pace.take());
    match (records, there) {
        (Some(records), (None, None, None, None, None)) => {
            let other = of_other(records, place)?;
            Ok(Experiment { records: Some(other.id.clone()), ..other })
        }
        (Some(records), _) => {
            let message = "records: the other experiment says what is measured; expected no device, profiles, \
                           cases, metrics and pace beside it";
            Err(place.at(records.span(), message))
        }
        (None, (Some(device), Some(profiles), Some(cases), Some(metrics), pace)) => {
            Ok(Experiment {
                id: raw.id.get_ref().clone(),
                device,
                profiles: self::profiles(&profiles, place)?,
                cases: self::cases(device, &cases, place)?,
                metrics: groups(metrics, place)?,
                pace: self::pace(pace, place)?,
                ..Experiment::default()
            })
        }
        (None, (device, profiles, cases, metrics, _)) => {
            let there = [device.is_some(), profiles.is_some(), cases.is_some(), metrics.is_some()];
            let named = ["device", "profiles", "cases", "metrics"].into_iter().zip(there);
            let missing: Vec<_> = named.filter(|(_, there)| !there).map(|(name, _)| name).collect();
            let message = format!(
                "missing {}: expected what is measured, or `records`, an experiment that measures it",
                missing.join(", ")
            );
            Err(place.at(0..0, message))
        }
    }
}

/// What the experiment of a file beside this one measures.
fn of_other(records: &Spanned<String>, place: &Place<'_>) -> Result<Experiment> {
    let id = records.get_ref();
    place.expect(is_name(id), records, format!("records = `{id}`: expected {NAME}"))?;
    let message = format!("records = `{id}`: this is that experiment; expected another");
    place.expect(*id != file_stem(place.path), records, message)?;
    let path = place.path.with_file_name(format!("{id}.toml"));
    let refused = |why: &dyn Display| place.at(records.span(), format!("records = `{id}`: {why}"));
    let source = text_of(&path).map_err(|why| refused(&why))?;
    let other = Place::new(&source, &path);
    let raw: Raw = other.toml().map_err(|why| refused(&why))?;
    if let Some(further) = &raw.records {
        let further = further.get_ref();
        return Err(refused(&format!(
            "it has the records of `{further}`; expected an experiment that is measured"
        )));
    }
    of_raw(raw, &other).map_err(|why| refused(&why))
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
    let message = "question: expected one sentence that ends in a question mark";
    place.expect(raw.question.get_ref().trim().ends_with('?'), &raw.question, message)
}

fn groups(RawMetrics { groups }: RawMetrics, place: &Place<'_>) -> Result<Vec<String>> {
    let known = groups.get_ref().iter().all(|group| METRICS.contains(&group.as_str()));
    let message = format!("metric groups: expected some of {}", METRICS.join(", "));
    place.expect(known && !groups.get_ref().is_empty(), &groups, message)?;
    Ok(groups.into_inner())
}

fn profiles(raw: &Profiles, place: &Place<'_>) -> Result<Vec<ProfileDef>> {
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
        let Some(most) = p.best_of else { continue };
        let message = format!("best_of = {most}: expected a whole number from 1 to {MOST_WAYS}");
        place.expect((1..=MOST_WAYS).contains(&most), profile, message)?;
        let message = format!("option {CANDIDATE}: best_of gives it; expected no other");
        place.expect(!p.options.contains_key(CANDIDATE), profile, message)?;
    }
    Ok(raw.get_ref().iter().map(|p| p.get_ref().clone()).collect())
}

/// Sweeps without an experiment.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawSuite {
    cases: Sweeps,
}

impl Case {
    /// Reads the cases of a list of sweeps, `[[cases]]` as definitions have them; `path` names it in errors.
    ///
    /// # Errors
    /// [`LabError::Definition`](crate::LabError::Definition).
    pub fn read_sweeps(source: &str, path: &Path, device: DeviceKind) -> Result<Vec<Self>> {
        let place = Place::new(source, path);
        let RawSuite { cases } = place.toml()?;
        self::cases(device, &cases, &place)
    }
}

fn cases(device: DeviceKind, sweeps: &Sweeps, place: &Place<'_>) -> Result<Vec<Case>> {
    let mut seen = BTreeMap::new();
    let mut all = Vec::new();
    for sweep in sweeps.get_ref() {
        let cases = expand(device, sweep.get_ref(), place)?;
        place.expect(
            !cases.is_empty(),
            sweep,
            "one of these lists is empty: expected a case at least",
        )?;
        for case in cases {
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
    place.expect(!all.is_empty(), sweeps, "no cases: expected at least one [[cases]]")?;
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
        let model = &shape.get_ref().model;
        let of = |m, dtype| Case::new(device, sweep.op, [m, hidden, intermediate], dtype);
        let weights = weights(sweep, &of(1, DType::F32), place)?;
        for &m in sweep.m.get_ref().0.iter().flat_map(|Counts(m)| m) {
            for &Named(dtype) in &sweep.dtype.0 {
                let mut cases = vec![Case { model: model.clone(), ..of(m, dtype) }];
                vary(&mut cases, &weights, |case, weights| case.weights = weights);
                vary(&mut cases, &sweep.activation.0, |case, a| case.activation = a);
                vary(&mut cases, &sweep.numerics.0, |case, Named(n)| case.numerics = n);
                vary(&mut cases, &sweep.arrangement.0, |case, Named(a)| case.arrangement = a);
                vary(&mut cases, &sweep.orientation.0, |case, Named(o)| case.orientation = o);
                vary(&mut cases, &sweep.bias.0, |case, bias| case.bias = bias);
                vary(&mut cases, &sweep.heat.0, |case, heat| case.heat = heat);
                all.extend(cases);
            }
        }
    }
    Ok(all)
}

/// Each case with each value; as it is, if none was given.
fn vary<T: Copy>(cases: &mut Vec<Case>, values: &[T], set: impl Fn(&mut Case, T)) {
    if values.is_empty() {
        return;
    }
    for case in std::mem::take(cases) {
        for value in values {
            let mut varied = case.clone();
            set(&mut varied, *value);
            cases.push(varied);
        }
    }
}

/// The types of a sweep's weights, each of which its shape can have: rows of `[out, in]` matrices are whole blocks.
fn weights(sweep: &RawCases, like: &Case, place: &Place<'_>) -> Result<Vec<Option<QuantizedType>>> {
    let Some(given) = &sweep.weights else { return Ok(vec![None]) };
    let laid_out = !sweep.arrangement.0.is_empty() || !sweep.orientation.0.is_empty();
    let laid_out = laid_out
        .then(|| "quantised weights are separate and out-in; expected no others".to_owned());
    for &Named(kind) in &given.get_ref().0 {
        if let Some(why) = like.refusal_of(kind).or_else(|| laid_out.clone()) {
            return Err(place.at(given.span(), format!("weights = {kind}: {why}")));
        }
    }
    Ok(given.get_ref().0.iter().map(|&Named(kind)| Some(kind)).collect())
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
