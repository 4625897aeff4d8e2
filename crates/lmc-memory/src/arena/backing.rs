//! A mapping together with the file behind it, if any.

use std::io;

use super::map::Mapping;
use super::shared_file::SharedFile;

/// The memory of an arena. Fields are dropped in order: the mapping first,
/// then the file with its name.
#[derive(Debug)]
pub(super) struct Backing {
    map: Mapping,
    file: Option<SharedFile>,
}

impl Backing {
    pub(super) fn new(map: Mapping, file: Option<SharedFile>) -> Self {
        Self { map, file }
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
        if let Some(file) = &self.file {
            file.reserve(offset, len)?;
        }
        self.map.populate(offset as usize, len as usize)
    }
}
