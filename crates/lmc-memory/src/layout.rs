//! The shape, element type and byte order of a chunk.

use thiserror::Error;

use crate::DType;

/// Most layers of one group.
pub(crate) const MAX_LAYERS: u32 = 4096;
/// Most rows of one chunk.
pub(crate) const MAX_ROWS: u32 = 1 << 20;
/// Most elements of one row in one layer and plane.
pub(crate) const MAX_HIDDEN: u32 = 1 << 22;
/// Most groups of one model.
pub(crate) const MAX_GROUPS: usize = 64;
/// Most bytes of one chunk of one group: 64 GiB.
pub(crate) const MAX_CHUNK_BYTES: u64 = 64 << 30;

/// A layout beyond its limits. Dimensions come from the network, so each is limited.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// A dimension is zero or beyond its limit.
    #[error("{dimension} of a layout must be between 1 and {max}, found {found}")]
    Dimension {
        /// Name of the dimension.
        dimension: &'static str,
        /// Largest accepted value.
        max: u64,
        /// Value given.
        found: u64,
    },
    /// Every dimension is within its limit, but their product is not.
    #[error("a chunk of this layout takes {found} bytes, more than the {MAX_CHUNK_BYTES} accepted")]
    TooLarge {
        /// Bytes of the chunk.
        found: u64,
    },
}

/// Number of planes of a row in each layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Planes {
    /// One: MLA's latent vector, or K and V packed side by side.
    Fused,
    /// Two: K, then V.
    KeyValue,
}

impl Planes {
    /// Returns 1 or 2.
    pub fn count(self) -> u32 {
        match self {
            Self::Fused => 1,
            Self::KeyValue => 2,
        }
    }
}

/// The layout of one object: a chunk of one KV group, on one worker.
///
/// Bytes are row-major in `[2, layers, rows, hidden]` ([`Planes::KeyValue`]: MHA, GQA) or `[layers, rows,
/// hidden]` ([`Planes::Fused`]: MLA and packed K/V), without padding. Either a row is one token, and `hidden`
/// is heads × head size for the heads of this worker; or a row is one of the engine's blocks, and `hidden` is
/// the number of its elements (see [`KvGroup`](crate::KvGroup)).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GroupLayout {
    planes: Planes,
    layers: u32,
    rows: u32,
    hidden: u32,
    dtype: DType,
}

impl GroupLayout {
    /// Checks every dimension and their product, and makes the layout.
    ///
    /// # Errors
    /// [`LayoutError`] if a dimension is zero or beyond its limit, or if a chunk is larger than 64 GiB.
    pub fn new(
        planes: Planes,
        layers: u32,
        rows: u32,
        hidden: u32,
        dtype: DType,
    ) -> Result<Self, LayoutError> {
        for (dimension, max, found) in [
            ("layers", MAX_LAYERS, layers),
            ("rows (tokens or blocks)", MAX_ROWS, rows),
            ("hidden size", MAX_HIDDEN, hidden),
        ] {
            if found == 0 || found > max {
                return Err(LayoutError::Dimension {
                    dimension,
                    max: u64::from(max),
                    found: u64::from(found),
                });
            }
        }
        let layout = Self {
            planes,
            layers,
            rows,
            hidden,
            dtype,
        };
        // Below 2 * 2^12 * 2^20 * 2^22 * 2^3 = 2^58, so u64 cannot overflow.
        match layout.chunk_bytes() {
            found if found > MAX_CHUNK_BYTES => Err(LayoutError::TooLarge { found }),
            _ => Ok(layout),
        }
    }

    /// Returns the same layout with another number of layers.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn with_layers(&self, layers: u32) -> Result<Self, LayoutError> {
        Self::new(self.planes, layers, self.rows, self.hidden, self.dtype)
    }

    /// Returns the planes of a row.
    pub fn planes(&self) -> Planes {
        self.planes
    }

    /// Returns the number of layers of the group.
    pub fn layers(&self) -> u32 {
        self.layers
    }

    /// Returns the number of rows of a chunk.
    pub fn rows(&self) -> u32 {
        self.rows
    }

    /// Returns the type of the elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the bytes of one row in one layer and plane, which are contiguous.
    pub fn row_bytes(&self) -> u64 {
        u64::from(self.hidden) * self.dtype.size() as u64
    }

    /// Returns the bytes of a whole chunk of this group.
    pub fn chunk_bytes(&self) -> u64 {
        let rows = u64::from(self.planes.count()) * u64::from(self.layers) * u64::from(self.rows);
        rows * self.row_bytes()
    }

    /// Returns the shape for clients: four dimensions, or three for [`Planes::Fused`].
    pub fn shape(&self) -> Vec<u64> {
        let rest = [self.layers, self.rows, self.hidden].map(u64::from);
        match self.planes {
            Planes::KeyValue => [&[2][..], &rest].concat(),
            Planes::Fused => rest.to_vec(),
        }
    }

    /// Returns bytes that are equal for two models' groups only if chunks of one can be read as chunks of the
    /// other. The key crate hashes these bytes into the layout fingerprint.
    ///
    /// Version byte `1`, group count, then for each group: planes, dtype code, and layers,
    /// rows and hidden as little-endian `u32`.
    ///
    /// # Errors
    /// [`LayoutError::Dimension`] if there is no group or more than 64.
    pub fn canonical_bytes(groups: &[Self]) -> Result<Vec<u8>, LayoutError> {
        if groups.is_empty() || groups.len() > MAX_GROUPS {
            return Err(LayoutError::Dimension {
                dimension: "number of groups",
                max: MAX_GROUPS as u64,
                found: groups.len() as u64,
            });
        }
        let mut out = Vec::with_capacity(2 + groups.len() * 14);
        out.push(1);
        out.push(u8::try_from(groups.len()).expect("at most 64 groups"));
        for group in groups {
            out.push(u8::try_from(group.planes.count()).expect("one or two"));
            out.push(group.dtype.code());
            for dim in [group.layers, group.rows, group.hidden] {
                out.extend_from_slice(&dim.to_le_bytes());
            }
        }
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mha(layers: u32, rows: u32, hidden: u32, dtype: DType) -> GroupLayout {
        GroupLayout::new(Planes::KeyValue, layers, rows, hidden, dtype).unwrap()
    }

    fn mla(layers: u32, rows: u32, hidden: u32, dtype: DType) -> GroupLayout {
        GroupLayout::new(Planes::Fused, layers, rows, hidden, dtype).unwrap()
    }

    #[test]
    fn sizes_follow_from_the_shape() {
        let layout = mha(32, 256, 1024, DType::BFloat16);
        assert_eq!(layout.chunk_bytes(), 2 * 32 * 256 * 1024 * 2);
        assert_eq!(layout.shape(), [2, 32, 256, 1024]);
        let layout = mla(61, 256, 576, DType::Float8E4M3Fn);
        assert_eq!(layout.chunk_bytes(), 61 * 256 * 576);
        assert_eq!(layout.shape(), [61, 256, 576]);
    }

    #[test]
    fn dimensions_are_bounded() {
        let make = |layers, rows, hidden| {
            GroupLayout::new(Planes::KeyValue, layers, rows, hidden, DType::Float16)
        };
        for (layers, rows, hidden) in [
            (0, 16, 8),
            (4, 0, 8),
            (4, 16, 0),
            (MAX_LAYERS + 1, 16, 8),
            (4, u32::MAX, 8),
            (4, 16, MAX_HIDDEN + 1),
        ] {
            let made = make(layers, rows, hidden);
            assert!(matches!(made, Err(LayoutError::Dimension { .. })));
        }
        let made = make(MAX_LAYERS, MAX_ROWS, MAX_HIDDEN);
        assert!(matches!(made, Err(LayoutError::TooLarge { .. })));
        let one = mha(1, 1, 1, DType::Float16);
        for count in [0, 65] {
            let made = GroupLayout::canonical_bytes(&vec![one; count]);
            assert!(matches!(made, Err(LayoutError::Dimension { max: 64, .. })));
        }
    }

    #[test]
    fn canonical_bytes_are_frozen() {
        let layout = mha(3, 256, 1024, DType::BFloat16);
        assert_eq!(
            GroupLayout::canonical_bytes(&[layout]).unwrap(),
            [1, 1, 2, 4, 3, 0, 0, 0, 0, 1, 0, 0, 0, 4, 0, 0]
        );
    }

    #[test]
    fn layouts_that_differ_have_different_canonical_bytes() {
        let base = mha(2, 16, 8, DType::Float16);
        let others = [
            mla(2, 16, 8, DType::Float16),
            mha(3, 16, 8, DType::Float16),
            mha(2, 17, 8, DType::Float16),
            mha(2, 16, 9, DType::Float16),
            mha(2, 16, 8, DType::BFloat16),
        ];
        let bytes = |groups: &[GroupLayout]| GroupLayout::canonical_bytes(groups).unwrap();
        for other in others {
            assert_ne!(bytes(&[base]), bytes(&[other]), "{other:?}");
        }
        assert_ne!(bytes(&[base]), bytes(&[base, base]));
    }
}
