//! The shape, element type and byte order of a chunk.

use thiserror::Error;

use crate::DType;

/// Most layers of one group.
pub const MAX_LAYERS: u32 = 4096;
/// Most tokens of one chunk.
pub const MAX_CHUNK_TOKENS: u32 = 1 << 20;
/// Most elements of one token in one layer and plane.
pub const MAX_HIDDEN: u32 = 1 << 22;
/// Most groups of one model.
pub const MAX_GROUPS: usize = 64;
/// Most bytes of one chunk of one group: 64 GiB.
pub const MAX_CHUNK_BYTES: u64 = 64 << 30;

/// A layout that cannot be: dimensions come from the network, so each is bounded.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// A dimension is zero or beyond its bound.
    #[error("{dimension} of a layout must be between 1 and {max}, found {found}")]
    Dimension {
        /// Which one.
        dimension: &'static str,
        /// The largest that is accepted.
        max: u64,
        /// What was asked for.
        found: u64,
    },
    /// Every dimension is within bounds, but their product is not.
    #[error("a chunk of this layout takes {found} bytes, more than the {MAX_CHUNK_BYTES} accepted")]
    TooLarge {
        /// Bytes of the chunk.
        found: u128,
    },
    /// A shape of a rank that no layout has.
    #[error(
        "a chunk's shape is [2, layers, tokens, hidden], [1, layers, tokens, hidden] or \
         [layers, tokens, hidden], found {found:?}"
    )]
    Shape {
        /// The shape, at most its first eight dimensions.
        found: Vec<u64>,
    },
}

/// How many planes a token has in each layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Planes {
    /// One: MLA's latent vector, or K and V packed side by side within a head.
    Fused,
    /// Two: K, then V.
    KeyValue,
}

impl Planes {
    /// 1 or 2.
    pub fn count(self) -> u32 {
        match self {
            Self::Fused => 1,
            Self::KeyValue => 2,
        }
    }
}

/// The layout of one object: a chunk of one KV group, on one worker.
///
/// Bytes are row-major in `[2, layers, tokens, hidden]` ([`Planes::KeyValue`]: MHA, GQA) or
/// `[layers, tokens, hidden]` ([`Planes::Fused`]: MLA and packed K/V), without padding.
/// `hidden` is heads × head size for the heads that this worker holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GroupLayout {
    planes: Planes,
    layers: u32,
    tokens: u32,
    hidden: u32,
    dtype: DType,
}

impl GroupLayout {
    /// Checks every dimension and their product.
    ///
    /// # Errors
    /// [`LayoutError`] for a dimension of zero or beyond its bound, or a chunk beyond
    /// [`MAX_CHUNK_BYTES`].
    pub fn new(
        planes: Planes,
        layers: u32,
        tokens: u32,
        hidden: u32,
        dtype: DType,
    ) -> Result<Self, LayoutError> {
        for (dimension, max, found) in [
            ("layers", MAX_LAYERS, layers),
            ("tokens", MAX_CHUNK_TOKENS, tokens),
            ("hidden", MAX_HIDDEN, hidden),
        ] {
            if found == 0 || found > max {
                return Err(LayoutError::Dimension {
                    dimension,
                    max: u64::from(max),
                    found: u64::from(found),
                });
            }
        }
        // Below 2 * 2^12 * 2^20 * 2^22 * 2^3 = 2^58, so u64 cannot overflow.
        let bytes = u64::from(planes.count())
            * u64::from(layers)
            * u64::from(tokens)
            * u64::from(hidden)
            * dtype.size() as u64;
        if bytes > MAX_CHUNK_BYTES {
            return Err(LayoutError::TooLarge {
                found: u128::from(bytes),
            });
        }
        Ok(Self {
            planes,
            layers,
            tokens,
            hidden,
            dtype,
        })
    }

    /// MHA or GQA: `[2, layers, tokens, hidden]`.
    ///
    /// # Errors
    /// As [`GroupLayout::new`].
    pub fn mha(layers: u32, tokens: u32, hidden: u32, dtype: DType) -> Result<Self, LayoutError> {
        Self::new(Planes::KeyValue, layers, tokens, hidden, dtype)
    }

    /// MLA, or K and V packed within a head: `[layers, tokens, hidden]`.
    ///
    /// # Errors
    /// As [`GroupLayout::new`].
    pub fn mla(layers: u32, tokens: u32, hidden: u32, dtype: DType) -> Result<Self, LayoutError> {
        Self::new(Planes::Fused, layers, tokens, hidden, dtype)
    }

    /// Reads a shape as it stands in a message.
    ///
    /// # Errors
    /// [`LayoutError::Shape`] for a wrong rank or plane count, else as [`GroupLayout::new`].
    pub fn from_shape(shape: &[u64], dtype: DType) -> Result<Self, LayoutError> {
        let (planes, rest) = match *shape {
            [2, l, t, h] => (Planes::KeyValue, [l, t, h]),
            [1, l, t, h] | [l, t, h] => (Planes::Fused, [l, t, h]),
            _ => {
                let found = shape.iter().copied().take(8).collect();
                return Err(LayoutError::Shape { found });
            }
        };
        let names = ["layers", "tokens", "hidden"];
        let mut dims = [0u32; 3];
        for ((dim, found), dimension) in dims.iter_mut().zip(rest).zip(names) {
            let max = u64::from(u32::MAX);
            *dim = u32::try_from(found).map_err(|_| LayoutError::Dimension {
                dimension,
                max,
                found,
            })?;
        }
        Self::new(planes, dims[0], dims[1], dims[2], dtype)
    }

    /// The same layout for another number of tokens (a partial chunk).
    ///
    /// # Errors
    /// As [`GroupLayout::new`].
    pub fn with_tokens(self, tokens: u32) -> Result<Self, LayoutError> {
        Self::new(self.planes, self.layers, tokens, self.hidden, self.dtype)
    }

    /// One or two planes.
    pub fn planes(&self) -> Planes {
        self.planes
    }

    /// Layers of the group.
    pub fn layers(&self) -> u32 {
        self.layers
    }

    /// Tokens of a chunk.
    pub fn tokens(&self) -> u32 {
        self.tokens
    }

    /// Elements of one token in one layer and plane.
    pub fn hidden(&self) -> u32 {
        self.hidden
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Bytes of one token in one layer and plane: the longest run that is contiguous in any
    /// chunk whatever its token count.
    pub fn token_bytes(&self) -> u64 {
        u64::from(self.hidden) * self.dtype.size() as u64
    }

    /// Bytes of one plane of one layer: `tokens` × [`GroupLayout::token_bytes`].
    pub fn layer_bytes(&self) -> u64 {
        u64::from(self.tokens) * self.token_bytes()
    }

    /// Bytes of a whole chunk of this group.
    pub fn chunk_bytes(&self) -> u64 {
        u64::from(self.planes.count()) * u64::from(self.layers) * self.layer_bytes()
    }

    /// The shape that a client sees: four dimensions, or three for [`Planes::Fused`].
    pub fn shape(&self) -> Vec<u64> {
        let rest = [self.layers, self.tokens, self.hidden].map(u64::from);
        match self.planes {
            Planes::KeyValue => [&[2][..], &rest].concat(),
            Planes::Fused => rest.to_vec(),
        }
    }
}

/// The layout of a model's chunks: one [`GroupLayout`] for each KV group.
///
/// Most models have one group. Hybrid models (sliding window beside full attention, several
/// head sizes) have more, and each group's chunk is an object of its own.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Layout {
    groups: Vec<GroupLayout>,
}

impl Layout {
    /// A model with several groups, in the engine's order.
    ///
    /// # Errors
    /// [`LayoutError::Dimension`] for no group or more than [`MAX_GROUPS`].
    pub fn new(groups: Vec<GroupLayout>) -> Result<Self, LayoutError> {
        if groups.is_empty() || groups.len() > MAX_GROUPS {
            return Err(LayoutError::Dimension {
                dimension: "number of groups",
                max: MAX_GROUPS as u64,
                found: groups.len() as u64,
            });
        }
        Ok(Self { groups })
    }

    /// A model with one group.
    pub fn single(group: GroupLayout) -> Self {
        Self {
            groups: vec![group],
        }
    }

    /// The groups, in the engine's order.
    pub fn groups(&self) -> &[GroupLayout] {
        &self.groups
    }

    /// Bytes of one chunk over all groups.
    pub fn chunk_bytes(&self) -> u64 {
        // At most 64 groups of 2^36 bytes: no overflow.
        self.groups.iter().map(GroupLayout::chunk_bytes).sum()
    }

    /// Bytes that two layouts share only if chunks of one can be read as chunks of the other.
    /// The key crate hashes them into the layout fingerprint.
    ///
    /// Version byte `1`, group count, then for each group: planes, dtype code, and layers,
    /// tokens and hidden as little-endian `u32`.
    pub fn canonical_bytes(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(2 + self.groups.len() * 14);
        out.push(1);
        out.push(u8::try_from(self.groups.len()).expect("at most 64 groups"));
        for group in &self.groups {
            out.push(u8::try_from(group.planes.count()).expect("one or two"));
            out.push(group.dtype.code());
            for dim in [group.layers, group.tokens, group.hidden] {
                out.extend_from_slice(&dim.to_le_bytes());
            }
        }
        out
    }
}

impl From<GroupLayout> for Layout {
    fn from(group: GroupLayout) -> Self {
        Self::single(group)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_follow_from_the_shape() {
        let mha = GroupLayout::mha(32, 256, 1024, DType::BFloat16).unwrap();
        assert_eq!(mha.chunk_bytes(), 2 * 32 * 256 * 1024 * 2);
        assert_eq!(mha.shape(), [2, 32, 256, 1024]);
        let mla = GroupLayout::mla(61, 256, 576, DType::Float8E4M3Fn).unwrap();
        assert_eq!(mla.chunk_bytes(), 61 * 256 * 576);
        assert_eq!(mla.shape(), [61, 256, 576]);
        let both = Layout::new(vec![mha, mla]).unwrap();
        assert_eq!(both.chunk_bytes(), mha.chunk_bytes() + mla.chunk_bytes());
        assert_eq!(
            mha.with_tokens(17).unwrap().chunk_bytes(),
            2 * 32 * 17 * 1024 * 2
        );
    }

    #[test]
    fn shapes_of_messages_are_read_and_bounded() {
        let read = |shape: &[u64]| GroupLayout::from_shape(shape, DType::Float16);
        assert_eq!(read(&[2, 4, 16, 8]).unwrap().planes(), Planes::KeyValue);
        assert_eq!(read(&[1, 4, 16, 8]).unwrap(), read(&[4, 16, 8]).unwrap());
        assert!(matches!(
            read(&[3, 4, 16, 8]),
            Err(LayoutError::Shape { .. })
        ));
        assert!(matches!(read(&[]), Err(LayoutError::Shape { .. })));
        assert!(matches!(
            read(&[4, u64::MAX, 8]),
            Err(LayoutError::Dimension {
                dimension: "tokens",
                found: u64::MAX,
                ..
            })
        ));
        assert!(matches!(
            read(&[0, 16, 8]),
            Err(LayoutError::Dimension { .. })
        ));
        assert!(matches!(
            read(&[2, 4096, 1 << 20, 1 << 22]),
            Err(LayoutError::TooLarge { .. })
        ));
    }

    #[test]
    fn canonical_bytes_are_frozen() {
        let layout = Layout::single(GroupLayout::mha(3, 256, 1024, DType::BFloat16).unwrap());
        assert_eq!(
            layout.canonical_bytes(),
            [1, 1, 2, 4, 3, 0, 0, 0, 0, 1, 0, 0, 0, 4, 0, 0]
        );
    }

    #[test]
    fn layouts_that_differ_have_different_canonical_bytes() {
        let base = GroupLayout::mha(2, 16, 8, DType::Float16).unwrap();
        let others = [
            GroupLayout::mla(2, 16, 8, DType::Float16).unwrap(),
            GroupLayout::mha(3, 16, 8, DType::Float16).unwrap(),
            GroupLayout::mha(2, 17, 8, DType::Float16).unwrap(),
            GroupLayout::mha(2, 16, 9, DType::Float16).unwrap(),
            GroupLayout::mha(2, 16, 8, DType::BFloat16).unwrap(),
        ];
        let bytes = Layout::single(base).canonical_bytes();
        for other in others {
            assert_ne!(bytes, Layout::single(other).canonical_bytes(), "{other:?}");
        }
        let twice = Layout::new(vec![base, base]).unwrap();
        assert_ne!(bytes, twice.canonical_bytes());
    }
}
