//! The message that describes the memory that a peer may write to.

use serde::{Deserialize, Serialize};

use crate::nixl::{MAX_METADATA, Registration};

/// Describes the memory that a peer may write to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Announcement {
    pub(super) agent: String,
    pub(super) metadata: Vec<u8>,
    pub(super) base: u64,
    pub(super) len: u64,
}

impl From<&Registration> for Announcement {
    fn from(registration: &Registration) -> Self {
        Self {
            agent: registration.agent.clone(),
            metadata: registration.metadata.clone(),
            base: registration.base,
            len: registration.len,
        }
    }
}

impl Announcement {
    /// Returns whether its lengths are within bounds and its memory does not overflow the address
    /// space.
    pub(super) fn is_sound(&self) -> bool {
        self.metadata.len() <= MAX_METADATA
            && self.agent.len() <= 512
            && self.base.checked_add(self.len).is_some()
    }
}
