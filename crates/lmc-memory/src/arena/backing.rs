//! A mapping together with the file behind it, if any.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use super::map::{HUGE_PAGE, Mapping};
use super::shared_file::SharedFile;

/// Bytes that are made present together, and noted together.
const PART: u64 = HUGE_PAGE as u64;

/// The memory of an arena. Fields are dropped in order: the mapping first,
/// then the file with its name.
#[derive(Debug)]
pub(super) struct Backing {
    map: Mapping,
    file: Option<SharedFile>,
    /// Parts of a shared file whose pages are known to be there, a bit each. Nobody takes pages
    /// out of it, so that a bit once set stays right.
    present: Box<[AtomicU64]>,
    /// Whether pages of the file are to be huge.
    huge: bool,
}

impl Backing {
    pub(super) fn new(map: Mapping, file: Option<SharedFile>) -> Self {
        let parts = match file {
            Some(_) => (map.len() as u64).div_ceil(PART),
            None => 0,
        };
        let present = (0..parts.div_ceil(64)).map(|_| AtomicU64::new(0));
        let present = present.collect();
        Self {
            map,
            file,
            present,
            huge: false,
        }
    }

    /// Asks for huge pages, where the file system was told to heed that.
    pub(super) fn advise_huge(&mut self) -> io::Result<()> {
        self.map.advise(libc::MADV_HUGEPAGE)?;
        // No bytes: whether the kernel knows the call at all.
        self.map.try_populate(0, 0)?;
        self.huge = true;
        Ok(())
    }

    pub(super) fn map(&self) -> &Mapping {
        &self.map
    }

    pub(super) fn file(&self) -> Option<&SharedFile> {
        self.file.as_ref()
    }

    pub(super) fn len(&self) -> usize {
        self.map.len()
    }

    /// Makes a part present without changing its bytes. For shared memory the pages are taken
    /// from the file system first: that fails with an error where touching would kill.
    pub(super) fn make_present(&self, offset: u64, len: u64) -> io::Result<()> {
        self.ensure(offset, len)?;
        self.map.populate(offset as usize, len as usize)
    }

    /// Takes pages for a part of shared memory from the file system, where that was not done
    /// before: whoever touches them then, here or in another process, cannot be killed because
    /// the file system is full. Anonymous memory has no such error to give.
    pub(super) fn ensure(&self, offset: u64, len: u64) -> io::Result<()> {
        let Some(file) = &self.file else {
            return Ok(());
        };
        for part in offset / PART..(offset + len).div_ceil(PART) {
            let (word, bit) = (&self.present[part as usize / 64], 1 << (part % 64));
            // Only whether the pages are there is told, and no byte of theirs.
            if word.load(Ordering::Relaxed) & bit == 0 {
                let start = part * PART;
                let len = PART.min(self.len() as u64 - start);
                if self.huge && file.has_room(len) {
                    // The advice is heeded where memory is touched, and not by the file system
                    // itself. What this does not bring is taken in small pages, or fails there.
                    let _ = self.map.try_populate(start as usize, len as usize);
                }
                file.reserve(start, len)?;
                word.fetch_or(bit, Ordering::Relaxed);
            }
        }
        Ok(())
    }
}
