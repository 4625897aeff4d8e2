//! A mapping together with the file behind it, if any.

use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use super::map::{HUGE_PAGE, Mapping};
use super::shared_file::{self, SharedFile};
use crate::sigbus::Guard;

/// Bytes that are made present, and recorded as present, together.
const PART: u64 = HUGE_PAGE as u64;

/// The memory or file behind an arena.
#[derive(Debug)]
pub(super) enum Behind {
    /// Nothing: private memory.
    Nothing,
    /// A segment of `/dev/shm`.
    Named(SharedFile),
    /// A sealed file without a name, which cannot be truncated.
    Sealed(File),
}

impl Behind {
    pub(super) fn file(&self) -> Option<&File> {
        match self {
            Self::Nothing => None,
            Self::Named(named) => Some(named.file()),
            Self::Sealed(file) => Some(file),
        }
    }
}

/// The memory of an arena. Fields are dropped in order: the guard first, then the mapping,
/// then the file with its name.
#[derive(Debug)]
pub(super) struct Backing {
    /// Guard of a shared file, whose pages another process can remove.
    guard: Option<Guard>,
    map: Mapping,
    behind: Behind,
    /// Parts of a shared file whose pages were allocated in the file system, one bit for each part. A process
    /// that maps the file can still punch holes into it. If the file system is full, touching such a hole
    /// faults, and the guard survives the fault.
    present: Box<[AtomicU64]>,
    /// True if the file should have huge pages.
    huge: bool,
}

impl Backing {
    pub(super) fn new(map: Mapping, behind: Behind) -> io::Result<Self> {
        let (parts, guard) = match behind {
            Behind::Nothing => (0, None),
            _ => {
                let guard = Guard::new(map.base(), map.len(), None)?;
                ((map.len() as u64).div_ceil(PART), Some(guard))
            }
        };
        let present = (0..parts.div_ceil(64)).map(|_| AtomicU64::new(0));
        let present = present.collect();
        Ok(Self {
            guard,
            map,
            behind,
            present,
            huge: false,
        })
    }

    /// Returns true once bytes were lost: another process truncated the file, or the file system had no page.
    pub(super) fn is_lost(&self) -> bool {
        self.guard.as_ref().is_some_and(Guard::is_lost)
    }

    /// Compares the file's size with the mapping's, and marks the memory as lost if the file is shorter.
    pub(super) fn check_size(&self) {
        let (Some(file), Some(guard)) = (self.behind.file(), &self.guard) else {
            return;
        };
        let len = file.metadata().map(|meta| meta.len());
        if len.is_ok_and(|len| len < self.map.len() as u64) {
            guard.mark_lost();
        }
    }

    /// Requests huge pages, if the file system is mounted with `huge=advise`.
    pub(super) fn advise_huge(&mut self) -> io::Result<()> {
        self.map.advise_huge_pages()?;
        // With a length of zero: checks only whether the kernel knows the call.
        self.map.try_populate(0, 0)?;
        self.huge = true;
        Ok(())
    }

    pub(super) fn map(&self) -> &Mapping {
        &self.map
    }

    pub(super) fn behind(&self) -> &Behind {
        &self.behind
    }

    pub(super) fn len(&self) -> usize {
        self.map.len()
    }

    /// Makes a part present without changing its bytes. For shared memory the pages are allocated in the file
    /// system first, which returns an error where touching them would kill the process.
    pub(super) fn make_present(&self, offset: u64, len: u64) -> io::Result<()> {
        self.ensure(offset, len)?;
        self.map.populate(offset as usize, len as usize)
    }

    /// Allocates the pages of a part of shared memory in the file system, if that was not done before. After
    /// that, a full file system cannot kill this or another process that touches the pages. Anonymous memory
    /// does not have this problem.
    pub(super) fn ensure(&self, offset: u64, len: u64) -> io::Result<()> {
        let Some(file) = self.behind.file() else {
            return Ok(());
        };
        for part in offset / PART..(offset + len).div_ceil(PART) {
            let (word, bit) = (&self.present[part as usize / 64], 1 << (part % 64));
            // The bit orders nothing: it only records that the pages exist.
            if word.load(Ordering::Relaxed) & bit == 0 {
                let start = part * PART;
                let len = PART.min(self.len() as u64 - start);
                if self.huge && shared_file::has_space(file, len) {
                    // The kernel follows the advice when memory is touched; the file system itself ignores
                    // it. Pages that this call does not provide are allocated as small pages below, or fail
                    // there.
                    let _ = self.map.try_populate(start as usize, len as usize);
                }
                shared_file::reserve(file, start, len)?;
                word.fetch_or(bit, Ordering::Relaxed);
            }
        }
        Ok(())
    }
}
