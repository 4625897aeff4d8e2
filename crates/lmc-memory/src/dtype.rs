//! Element types of a KV cache, with their torch names.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// The type of one element of a KV cache.
///
/// Only the size matters for copies. The name is part of a chunk's identity, so that `float16` bytes are
/// never given to an engine that would read them as `bfloat16`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum DType {
    /// `torch.float64`, also `double`.
    Float64,
    /// `torch.float32`, also `float`.
    Float32,
    /// `torch.float16`, also `half`.
    Float16,
    /// `torch.bfloat16`.
    BFloat16,
    /// `torch.float8_e4m3fn`.
    Float8E4M3Fn,
    /// `torch.float8_e4m3fnuz`.
    Float8E4M3FnUz,
    /// `torch.float8_e5m2`.
    Float8E5M2,
    /// `torch.float8_e5m2fnuz`.
    Float8E5M2FnUz,
    /// `torch.float8_e8m0fnu`.
    Float8E8M0Fnu,
    /// `torch.int64`, also `long`.
    Int64,
    /// `torch.int32`, also `int`.
    Int32,
    /// `torch.int16`, also `short`.
    Int16,
    /// `torch.int8`.
    Int8,
    /// `torch.uint8`, which packed and quantised caches use.
    UInt8,
    /// `torch.bool`, one byte per element.
    Bool,
}

/// Every type with its canonical name, size in bytes, and code in canonical bytes. Codes are part of layout
/// fingerprints: never renumber them, only append.
const TABLE: [(DType, &str, u8, u8); 15] = [
    (DType::Float64, "float64", 8, 1),
    (DType::Float32, "float32", 4, 2),
    (DType::Float16, "float16", 2, 3),
    (DType::BFloat16, "bfloat16", 2, 4),
    (DType::Float8E4M3Fn, "float8_e4m3fn", 1, 5),
    (DType::Float8E4M3FnUz, "float8_e4m3fnuz", 1, 6),
    (DType::Float8E5M2, "float8_e5m2", 1, 7),
    (DType::Float8E5M2FnUz, "float8_e5m2fnuz", 1, 8),
    (DType::Float8E8M0Fnu, "float8_e8m0fnu", 1, 9),
    (DType::Int64, "int64", 8, 10),
    (DType::Int32, "int32", 4, 11),
    (DType::Int16, "int16", 2, 12),
    (DType::Int8, "int8", 1, 13),
    (DType::UInt8, "uint8", 1, 14),
    (DType::Bool, "bool", 1, 15),
];

impl DType {
    fn row(self) -> &'static (Self, &'static str, u8, u8) {
        TABLE
            .iter()
            .find(|row| row.0 == self)
            .expect("the table holds every variant")
    }

    /// Returns the bytes of one element.
    pub fn size(self) -> usize {
        usize::from(self.row().2)
    }

    /// Returns the canonical torch name without the `torch.` prefix, as sent over the wire.
    pub fn name(self) -> &'static str {
        self.row().1
    }

    /// Returns true if the type has a known element size but no known format: vLLM registers `fp8_e4m3`,
    /// `fp8_e5m2`, `nvfp4` and every packed format as `uint8`.
    pub fn is_opaque(self) -> bool {
        self == Self::UInt8
    }

    /// Returns the stable code of this type in canonical bytes.
    pub fn code(self) -> u8 {
        self.row().3
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A name that is not a known element type.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("unknown dtype {name:?}: expected a torch name such as float16, bfloat16 or float8_e4m3fn")]
pub struct UnknownDType {
    /// The given name, truncated to 64 characters since it may come from the network.
    pub name: String,
}

impl FromStr for DType {
    type Err = UnknownDType;

    fn from_str(text: &str) -> Result<Self, UnknownDType> {
        let name = text.strip_prefix("torch.").unwrap_or(text);
        let name = match name {
            "double" => "float64",
            "float" => "float32",
            "half" => "float16",
            "long" => "int64",
            "int" => "int32",
            "short" => "int16",
            other => other,
        };
        TABLE
            .iter()
            .find(|row| row.1 == name)
            .map(|row| row.0)
            .ok_or_else(|| UnknownDType {
                name: text.chars().take(64).collect(),
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn torch_names_round_trip_with_and_without_prefix() {
        for (dtype, name, size, _) in TABLE {
            assert_eq!(name.parse(), Ok(dtype));
            assert_eq!(format!("torch.{name}").parse(), Ok(dtype));
            assert_eq!(dtype.to_string(), name);
            assert_eq!(dtype.size(), usize::from(size));
        }
        assert_eq!("half".parse(), Ok(DType::Float16));
        assert_eq!("torch.float".parse(), Ok(DType::Float32));
    }

    #[test]
    fn codes_are_distinct() {
        let mut codes: Vec<u8> = TABLE.iter().map(|row| row.3).collect();
        codes.dedup();
        assert_eq!(codes, (1..=15).collect::<Vec<u8>>());
    }

    #[test]
    fn an_unknown_name_is_quoted_and_cut() {
        let err = "x".repeat(1000).parse::<DType>().unwrap_err();
        assert_eq!(err.name.len(), 64);
        assert!("torch.torch.half".parse::<DType>().is_err());
    }
}
