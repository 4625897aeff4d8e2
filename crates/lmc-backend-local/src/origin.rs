//! The origin of a resident chunk.

/// Source of a chunk when it became resident: computed here, or read from a lower tier. A chunk is never
/// written to the tier that it came from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Origin(u8);

impl Origin {
    /// An engine of this host computed the chunk.
    pub const COMPUTED: Self = Self(0);
    /// Largest number of lower tiers.
    pub const MAX_TIERS: usize = 63;

    /// Returns the origin of a chunk that was read from the lower tier with this index, which is below
    /// [`Self::MAX_TIERS`].
    pub fn tier(index: usize) -> Self {
        debug_assert!(index < Self::MAX_TIERS, "{index} is no index of a tier");
        Self(index as u8 + 1)
    }

    /// Returns true if the chunk was read from the lower tier with this index.
    pub fn is_tier(self, index: usize) -> bool {
        usize::from(self.0) == index + 1
    }

    /// Returns true if the chunk was read from a tier after the one with this index.
    pub fn is_after(self, index: usize) -> bool {
        usize::from(self.0) > index + 1
    }

    pub(crate) fn number(self) -> u8 {
        self.0
    }

    pub(crate) fn from_number(number: u8) -> Self {
        Self(number)
    }
}
