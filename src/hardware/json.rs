//! The JSON forms of values in requirements.

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::{hex, unhex};

/// A number, in JSON as `0x` and hexadecimal digits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Number(pub u64);

/// `N` bytes, in JSON as hexadecimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Digits<const N: usize>(pub [u8; N]);

/// Returns whether the field has its default value and is left out.
pub fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

impl<const N: usize> From<[u8; N]> for Digits<N> {
    fn from(bytes: [u8; N]) -> Digits<N> {
        Digits(bytes)
    }
}

impl<const N: usize> Serialize for Digits<N> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&hex(&self.0))
    }
}

impl<'de, const N: usize> Deserialize<'de> for Digits<N> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Digits<N>, D::Error> {
        let text = String::deserialize(deserializer)?;
        let bytes = unhex(&text).and_then(|bytes| bytes.try_into().ok());
        bytes.map(Digits).ok_or_else(|| {
            let digits = 2 * N;
            D::Error::custom(format!(
                "{}: expected {digits} hexadecimal digits",
                base::text::quoted(&text, 100)
            ))
        })
    }
}

impl Serialize for Number {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&format!("{:#x}", self.0))
    }
}

impl<'de> Deserialize<'de> for Number {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Number, D::Error> {
        let text = String::deserialize(deserializer)?;
        let digits = text
            .strip_prefix("0x")
            .filter(|digits| !digits.starts_with('+'));
        let number = digits.and_then(|digits| u64::from_str_radix(digits, 16).ok());
        let expected = "expected 0x and at most 16 hexadecimal digits";
        number.map(Number).ok_or_else(|| D::Error::custom(expected))
    }
}
