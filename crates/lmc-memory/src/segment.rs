//! Shared memory that belongs to somebody else: an engine's own KV cache.

use std::io;

use thiserror::Error;

use crate::{NameError, SharedName};

/// A segment that cannot be mapped, or that is no longer what it was.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SegmentError {
    /// The name is not acceptable.
    #[error(transparent)]
    Name(#[from] NameError),
    /// There is no such segment, or it may not be opened.
    #[error("cannot open shared memory {name}: {source}")]
    Open {
        /// The segment.
        name: SharedName,
        /// What the system said.
        source: io::Error,
    },
    /// The segment is smaller than the registration claims.
    #[error("shared memory {name} has {found} bytes, but {expected} were announced")]
    Size {
        /// The segment.
        name: SharedName,
        /// Bytes announced.
        expected: u64,
        /// Bytes it has.
        found: u64,
    },
    /// The segment is a pool of lmc; an engine may not register it as its own memory, since
    /// that would let it read and write the chunks of others.
    #[error("shared memory {name} is a pool of lmc, not the KV memory of an engine")]
    OwnPool {
        /// The segment.
        name: SharedName,
    },
    /// The owner cut the segment short, or the system had no page left for it, while we were
    /// using it. Nothing read from it since can be trusted; register again.
    #[error("shared memory {name} was cut short or ran out of pages while it was in use")]
    Lost {
        /// The segment.
        name: SharedName,
    },
}

/// A foreign POSIX shared-memory segment, mapped read/write and unmapped on drop.
#[derive(Debug)]
pub struct MappedSegment {
    name: SharedName,
    len: u64,
}

impl MappedSegment {
    /// Maps the first `len` bytes of a segment.
    ///
    /// # Errors
    /// See [`SegmentError`].
    pub fn open(name: &SharedName, len: u64) -> Result<Self, SegmentError> {
        let _ = (name, len);
        unimplemented!()
    }

    /// Its name.
    pub fn name(&self) -> &SharedName {
        &self.name
    }

    /// Bytes mapped.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Never true: an empty segment cannot be mapped.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether the segment still has all the bytes that are mapped, and none was lost.
    ///
    /// # Errors
    /// [`SegmentError::Size`] or [`SegmentError::Lost`].
    pub fn check(&self) -> Result<(), SegmentError> {
        unimplemented!()
    }
}
