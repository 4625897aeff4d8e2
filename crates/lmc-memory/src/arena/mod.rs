//! Arenas: ranges of memory.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;

mod backing;
mod build;
mod config;
mod host;
pub(crate) mod map;
mod memfd;
mod prefault;
pub(crate) mod record;
pub(crate) mod shared_file;

use backing::{Backing, Behind};
pub use config::{ArenaConfig, ArenaError, ArenaReport, Demand, Prefault, PrefaultProgress};
pub use map::use_all_nodes;
use prefault::Prefaulter;
pub use record::{StaleSegment, own_uid, reclaim_stale_segments};

use crate::SharedName;

/// One range of memory, usable from the moment it is built.
///
/// Memory of a shared arena is zero-filled and has mode 0600. Its name is removed when the arena is dropped;
/// processes that have mapped the arena keep their mapping.
#[derive(Debug)]
pub struct Arena {
    /// Declared first, so that its threads are joined before the memory is unmapped.
    prefault: Option<Prefaulter>,
    backing: Arc<Backing>,
    report: ArenaReport,
}

impl Arena {
    /// Returns the bytes of the range, rounded up to whole pages.
    pub fn len(&self) -> usize {
        self.backing.len()
    }

    /// Returns false: there are no empty arenas.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the first byte of the range.
    pub fn base_ptr(&self) -> NonNull<u8> {
        self.backing.map().base()
    }

    /// Returns the name under which other processes map the arena; `None` for anonymous memory.
    pub fn shared_name(&self) -> Option<&SharedName> {
        match self.backing.behind() {
            Behind::Named(file) => Some(file.name()),
            Behind::Nothing | Behind::Sealed(_) => None,
        }
    }

    /// Returns the file behind a shared or sealed arena, for a process that is to map it: send the descriptor
    /// over a Unix socket (`SCM_RIGHTS`). `None` for anonymous memory.
    pub fn shared_file(&self) -> Option<BorrowedFd<'_>> {
        self.backing.behind().file().map(AsFd::as_fd)
    }

    /// Returns true once bytes of a shared arena were lost: another process truncated its file, or punched a
    /// hole for which the file system has no page. Bytes that were read before this returned `false` are the
    /// bytes written; after the loss, reads return zeroes. Costs one atomic load.
    ///
    /// A loss is permanent: the arena's owner must stop using its content.
    pub fn is_lost(&self) -> bool {
        self.backing.is_lost()
    }

    /// As [`Arena::is_lost`], but also asks the system whether the file was truncated without any byte being
    /// touched. To be called from time to time.
    pub fn check_lost(&self) -> bool {
        self.backing.check_size();
        self.is_lost()
    }

    /// Returns the properties that the arena obtained.
    pub fn report(&self) -> &ArenaReport {
        &self.report
    }

    /// Returns the progress of the background prefault.
    pub fn prefault_progress(&self) -> PrefaultProgress {
        self.prefault
            .as_ref()
            .map(Prefaulter::progress)
            .unwrap_or_default()
    }

    /// Ensures that touching a range cannot kill the process for lack of memory in `/dev/shm`. A pool does
    /// that for the slots that it hands out; code that touches offsets named by a peer must call this first.
    /// Later calls for the same range cost almost nothing.
    ///
    /// # Errors
    /// There is no memory for the range (the error has the remedy), or the range is outside the arena.
    pub fn ensure(&self, offset: u64, len: u64) -> io::Result<()> {
        let inside = offset
            .checked_add(len)
            .is_some_and(|end| end <= self.len() as u64);
        if !inside {
            let text = format!("{len} bytes at {offset} lie outside the arena");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let explained = |error: io::Error| io::Error::new(error.kind(), prefault::explain(&error));
        self.backing.ensure(offset, len).map_err(explained)
    }

    /// Removes the name of a shared arena at once; the memory stays mapped until drop.
    ///
    /// A server calls this on a clean stop: a leaked (quarantined) slot keeps the arena, and so its name,
    /// alive until the process ends.
    pub fn unlink(&self) {
        if let Behind::Named(file) = self.backing.behind() {
            file.unlink();
        }
    }
}

#[cfg(test)]
mod tests;
