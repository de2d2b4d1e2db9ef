//! Values as definitions have them, with refusals in words that people use.

use std::fmt;
use std::marker::PhantomData;
use std::str::FromStr;

use serde::Deserialize;
use serde::de::value::{
    BoolDeserializer, F64Deserializer, I64Deserializer, MapAccessDeserializer,
    SeqAccessDeserializer, StrDeserializer,
};
use serde::de::{self, Deserializer, Error, MapAccess, SeqAccess, Unexpected, Visitor};
use toml::Value;

use crate::case::MAX_EXTENT;

/// A number of rows or columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Extent(pub(super) usize);

impl<'de> Deserialize<'de> for Extent {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let expected = format!("a whole number from 1 to {MAX_EXTENT}");
        match Value::deserialize(d)? {
            Value::Integer(n) => match usize::try_from(n) {
                Ok(n @ 1..=MAX_EXTENT) => Ok(Extent(n)),
                _ => Err(D::Error::invalid_value(Unexpected::Signed(n), &&*expected)),
            },
            other => Err(D::Error::invalid_type(unexpected(&other), &&*expected)),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Real(pub(super) f64);

impl<'de> Deserialize<'de> for Real {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        match Value::deserialize(d)? {
            Value::Float(x) => Ok(Real(x)),
            Value::Integer(n) => Ok(Real(n as f64)),
            other => Err(D::Error::invalid_type(unexpected(&other), &"a number")),
        }
    }
}

fn unexpected(value: &Value) -> Unexpected<'_> {
    match value {
        Value::String(text) => Unexpected::Str(text),
        Value::Float(x) => Unexpected::Float(*x),
        other => Unexpected::Other(other.type_str()),
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

impl<'de, T: Deserialize<'de>> Visitor<'de> for ManyVisitor<T> {
    type Value = Vec<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("one value or an array of them")
    }
    fn visit_bool<E: de::Error>(self, v: bool) -> Result<Self::Value, E> {
        Ok(vec![T::deserialize(BoolDeserializer::new(v))?])
    }
    fn visit_i64<E: de::Error>(self, v: i64) -> Result<Self::Value, E> {
        Ok(vec![T::deserialize(I64Deserializer::new(v))?])
    }
    fn visit_f64<E: de::Error>(self, v: f64) -> Result<Self::Value, E> {
        Ok(vec![T::deserialize(F64Deserializer::new(v))?])
    }
    fn visit_str<E: de::Error>(self, v: &str) -> Result<Self::Value, E> {
        Ok(vec![T::deserialize(StrDeserializer::new(v))?])
    }
    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
        Ok(vec![T::deserialize(MapAccessDeserializer::new(map))?])
    }
    fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<Self::Value, A::Error> {
        Vec::deserialize(SeqAccessDeserializer::new(seq))
    }
}

/// A value given by its name.
#[derive(Clone, Copy)]
pub(super) struct Named<T>(pub(super) T);

impl<'de, T: FromStr<Err: fmt::Display>> Deserialize<'de> for Named<T> {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        crate::text::deserialize(d).map(Named)
    }
}
