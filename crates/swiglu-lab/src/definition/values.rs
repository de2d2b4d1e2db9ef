//! Values as definitions have them, with refusals in words that people use.

use serde::de::{DeserializeOwned, Error};
use serde::{Deserialize, Deserializer};
use toml::Value;

use crate::case::MAX_EXTENT;

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
