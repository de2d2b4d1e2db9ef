//! Values as definitions have them, with refusals in words that people use.

use serde::de::{DeserializeOwned, Error};
use serde::{Deserialize, Deserializer};
use toml::Value;

use crate::case::MAX_EXTENT;

/// More cases than this are a slip of the sweep, not an experiment.
pub(super) const MAX_CASES: usize = 10_000;

/// A number of rows or columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "Value")]
pub(super) struct Extent(pub(super) usize);

impl TryFrom<Value> for Extent {
    type Error = String;

    fn try_from(value: Value) -> Result<Self, String> {
        let given = value.as_integer().and_then(|n| usize::try_from(n).ok());
        let fits = given.filter(|n| (1..=MAX_EXTENT).contains(n)).map(Extent);
        let quoted = if value.is_str() { value.to_string() } else { format!("`{value}`") };
        fits.ok_or(format!(
            "invalid value: {quoted}, expected a whole number from 1 to {MAX_EXTENT}"
        ))
    }
}

/// Numbers of tokens: one, or a range of them, `"1..=64"` or `"72..=512 by 8"`, whose end is one of them.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "Value")]
pub(super) struct Counts(pub(super) Vec<usize>);

impl TryFrom<Value> for Counts {
    type Error = String;

    fn try_from(value: Value) -> Result<Self, String> {
        let Some(text) = value.as_str() else {
            return Extent::try_from(value).map(|Extent(one)| Counts(vec![one]));
        };
        range(text).map(Counts).ok_or_else(|| {
            format!(
                "invalid value: {value}, expected a whole number from 1 to {MAX_EXTENT}, or a range of at most \
                 {MAX_CASES} such as \"1..=64\" or \"72..=512 by 8\", which its steps end"
            )
        })
    }
}

fn range(text: &str) -> Option<Vec<usize>> {
    let (first, rest) = text.split_once("..=")?;
    let (last, step) = rest.split_once(" by ").unwrap_or((rest, "1"));
    let [first, last, step]: [usize; 3] =
        [first.parse().ok()?, last.parse().ok()?, step.parse().ok()?];
    let steps = last.checked_sub(first)?;
    let whole = first > 0 && last <= MAX_EXTENT && step > 0 && steps.is_multiple_of(step);
    let fits = whole && steps / step < MAX_CASES;
    fits.then(|| (first..=last).step_by(step).collect())
}

/// One value or an array of them.
pub(super) struct Many<T>(pub(super) Vec<T>);

impl<T> Default for Many<T> {
    fn default() -> Self {
        Many(Vec::new())
    }
}

impl<'de, T: DeserializeOwned> Deserialize<'de> for Many<T> {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let all = match Value::deserialize(d)? {
            Value::Array(all) => all,
            one => vec![one],
        };
        let read = |value: Value| {
            T::deserialize(value).map_err(|e: toml::de::Error| D::Error::custom(e.message().trim()))
        };
        all.into_iter().map(read).collect::<Result<_, _>>().map(Many)
    }
}
