//! Values that travel as their names: `fused+fast`, `gate-first`.

use std::fmt::Display;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

/// An enum whose values have one name each: in definitions, in records and for people.
macro_rules! named {
    (
        $(#[$meta:meta])*
        pub enum $type:ident { $($(#[$doc:meta])* $value:ident = $name:literal,)+ }
    ) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
        pub enum $type { $($(#[$doc])* #[serde(rename = $name)] $value,)+ }

        impl $type {
            /// The name in definitions, in records and for people.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$value => $name,)+ }
            }
        }

        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.name())
            }
        }
    };
}
pub(crate) use named;

pub(crate) fn serialize<T: Display, S: Serializer>(value: &T, s: S) -> Result<S::Ok, S::Error> {
    s.collect_str(value)
}

pub(crate) fn deserialize<'de, T: FromStr<Err: Display>, D: Deserializer<'de>>(
    d: D,
) -> Result<T, D::Error> {
    String::deserialize(d)?.parse().map_err(D::Error::custom)
}

/// A value given by its name.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(transparent, bound(serialize = "T: Display", deserialize = "T: FromStr<Err: Display>"))]
pub struct Named<T>(#[serde(with = "self")] pub T);
