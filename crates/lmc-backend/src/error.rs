//! The error of a tier's operations.

use std::io;
use std::sync::Arc;

use thiserror::Error;

/// The reason why a tier is unavailable.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("the tier is not available: {reason}")]
pub struct Unavailable {
    /// Text for an operator.
    pub reason: String,
}

/// An operation of a tier that failed, for one key or as a whole.
///
/// A chunk that is absent, or whose bytes do not match its checksum, is a miss and not an error.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum BackendError {
    /// The deadline passed before the operation was complete.
    #[error("the deadline passed before the operation was complete")]
    Deadline,
    /// The tier was closed.
    #[error("the tier is closed")]
    Closed,
    /// The tier is down, or was taken out of use.
    #[error(transparent)]
    Unavailable(#[from] Unavailable),
    /// The device or the connection failed.
    #[error("I/O failed: {0}")]
    Io(#[source] Arc<io::Error>),
    /// The slot of a load has another length than the chunk.
    #[error("the chunk has {expected} bytes, the slot to load it into {found}: look it up again")]
    Length {
        /// Bytes of the chunk.
        expected: u64,
        /// Bytes of the slot.
        found: u64,
    },
    /// The tier has no free capacity for a chunk, and no chunk that it may evict.
    #[error("no free capacity for {needed} bytes, and nothing that may be evicted")]
    Full {
        /// Bytes of the chunk.
        needed: u64,
    },
    /// A chunk is larger than any that the tier can hold.
    #[error("a chunk of {found} bytes is larger than the {max} that the tier can hold")]
    TooLarge {
        /// Most bytes of a chunk.
        max: u64,
        /// Bytes of this chunk.
        found: u64,
    },
}

impl From<io::Error> for BackendError {
    fn from(error: io::Error) -> Self {
        Self::Io(Arc::new(error))
    }
}
