//! Ranges of memory.

use std::ptr::NonNull;

mod config;
pub use config::{ArenaConfig, ArenaError, ArenaReport, Demand, Prefault, PrefaultProgress};

use crate::SharedName;

/// One range of memory, usable from the moment it is built.
#[derive(Debug)]
pub struct Arena {
    base: NonNull<u8>,
    len: usize,
    name: Option<SharedName>,
    report: ArenaReport,
}

// SAFETY: the arena owns its mapping.
unsafe impl Send for Arena {}
// SAFETY: as above.
unsafe impl Sync for Arena {}

impl Arena {
    /// Bytes of the range, rounded up to whole pages.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never true: an empty arena is refused.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// First byte of the range.
    pub fn base_ptr(&self) -> NonNull<u8> {
        self.base
    }

    /// The name under which other processes map it; `None` for anonymous memory.
    pub fn shared_name(&self) -> Option<&SharedName> {
        self.name.as_ref()
    }

    /// What was got of what was asked for.
    pub fn report(&self) -> &ArenaReport {
        &self.report
    }

    /// How far the background prefault is.
    pub fn prefault_progress(&self) -> PrefaultProgress {
        unimplemented!()
    }

    /// Takes the name of a shared arena away at once; memory stays mapped until drop.
    /// A server calls this on a clean stop, where leaked (quarantined) slots keep the arena
    /// alive to the end of the process.
    pub fn unlink(&self) {
        unimplemented!()
    }
}
