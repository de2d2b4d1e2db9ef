//! Values as definitions have them, with refusals in words that people use.

use std::fmt;
use std::marker::PhantomData;

use serde::Deserialize;
use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::de::{self, Deserializer, IntoDeserializer, MapAccess, SeqAccess, Visitor};

use crate::case::MAX_EXTENT;

/// A number of rows or columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "toml::Value")]
pub(super) struct Extent(pub(super) usize);

impl TryFrom<toml::Value> for Extent {
    type Error = String;

    fn try_from(value: toml::Value) -> Result<Self, String> {
        let given = value.as_integer().and_then(|n| usize::try_from(n).ok());
        let fits = given.filter(|n| (1..=MAX_EXTENT).contains(n)).map(Extent);
        let quoted = if value.is_str() { value.to_string() } else { format!("`{value}`") };
        fits.ok_or(format!(
            "invalid value: {quoted}, expected a whole number from 1 to {MAX_EXTENT}"
        ))
    }
}

pub(super) struct Many<T>(pub(super) Vec<T>);

impl<T> Default for Many<T> {
    fn default() -> Self {
        Many(Vec::new())
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Many<T> {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        d.deserialize_any(ManyVisitor(PhantomData)).map(Many)
    }
}

struct ManyVisitor<T>(PhantomData<T>);

macro_rules! one {
    ($($visit:ident($type:ty)),*) => {$(
        fn $visit<E: de::Error>(self, v: $type) -> Result<Self::Value, E> {
            Ok(vec![T::deserialize(v.into_deserializer())?])
        }
    )*};
}

impl<'de, T: Deserialize<'de>> Visitor<'de> for ManyVisitor<T> {
    type Value = Vec<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("one value or an array of them")
    }
    one!(visit_bool(bool), visit_i64(i64), visit_f64(f64), visit_str(&str));

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
        Ok(vec![T::deserialize(MapAccessDeserializer::new(map))?])
    }
    fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<Self::Value, A::Error> {
        Vec::deserialize(SeqAccessDeserializer::new(seq))
    }
}
