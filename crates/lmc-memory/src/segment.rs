//! Memory of an engine's KV cache: shared by another process, or memory of this process.

use std::fmt;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::fs::{SealFlags, fcntl_get_seals};
use rustix::io::Errno;
use thiserror::Error;

use crate::arena::map::{Mapping, page_size};
use crate::arena::shared_file;
use crate::sigbus::Guard;
use crate::{NameError, SharedName};

/// A segment that cannot be mapped, or that has changed since.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum SegmentError {
    /// The name is invalid.
    #[error(transparent)]
    Name(#[from] NameError),
    /// The segment does not exist, or may not be opened or mapped.
    #[error("cannot open shared memory {name}: {source}")]
    Open {
        /// The segment.
        name: SharedName,
        /// Error of the system call.
        source: Arc<io::Error>,
    },
    /// The segment is smaller than announced, or smaller than it was when it was mapped.
    #[error("shared memory {name} has {found} bytes, but {expected} were announced")]
    Size {
        /// The segment.
        name: SharedName,
        /// Bytes announced.
        expected: u64,
        /// Bytes of the segment.
        found: u64,
    },
    /// The segment is a pool of lmc. An engine must not register it as its own memory, because it could then
    /// read and write the chunks of others.
    #[error("shared memory {name} is a pool of lmc, not the KV memory of an engine")]
    OwnPool {
        /// The segment.
        name: SharedName,
    },
    /// The segment belongs to another user than the user of the connection that named it.
    #[error(
        "shared memory {name} belongs to user {owner}, but the connection to user {user}: \
         a server maps only segments of the user that names them"
    )]
    OtherUser {
        /// The segment.
        name: SharedName,
        /// User that owns the segment.
        owner: u32,
        /// User that named the segment.
        user: u32,
    },
    /// The segment is not a regular file with a single name. With a second name it could be memory that its
    /// user never gave to this server.
    #[error("shared memory {name} is not a regular file with one link")]
    NotPlain {
        /// The segment.
        name: SharedName,
    },
    /// The descriptor received is not of shared memory: it could be of a file whose pages take arbitrarily
    /// long to read.
    #[error("the descriptor that was passed for the pool is not of shared memory: {source}")]
    NotShared {
        /// Error of the system call.
        source: Arc<io::Error>,
    },
    /// The pool has no name and could be truncated.
    #[error("the pool that was passed has no name and is not sealed against a change of its size")]
    Unsealed,
    /// The owner truncated the segment, or the system had no page left for it, while it was being used. No
    /// bytes copied since then can be trusted; the engine must register again.
    #[error("shared memory {name} was cut short or ran out of pages while it was in use")]
    Lost {
        /// The segment.
        name: SharedName,
    },
}

/// Memory that copies of [`CopyPool`](crate::CopyPool) read and write.
///
/// # Safety
/// From `base_ptr`, `size` bytes stay mapped for reads and writes until the value is dropped, even if their
/// content is lost; `check` reports lost bytes.
pub unsafe trait KvMemory: fmt::Debug + Send + Sync {
    /// Returns the first byte.
    fn base_ptr(&self) -> NonNull<u8>;

    /// Returns the number of bytes.
    fn size(&self) -> u64;

    /// Checks that no bytes were lost. Bytes read between two successful checks are the bytes that were
    /// written.
    ///
    /// # Errors
    /// [`SegmentError`], permanently.
    fn check(&self) -> Result<(), SegmentError>;
}

/// Memory of this process that its owner lends, such as the tensors of an engine.
#[derive(Debug)]
pub struct ProcessMemory {
    base: NonNull<u8>,
    len: u64,
}

// SAFETY: it is an address; the copies that use it coordinate through `PagedKv`.
unsafe impl Send for ProcessMemory {}
// SAFETY: as above.
unsafe impl Sync for ProcessMemory {}

impl ProcessMemory {
    /// Wraps `len` bytes from `base` on.
    ///
    /// # Safety
    /// The bytes stay allocated, readable and writable until the value is dropped, and no code of this
    /// process holds a Rust reference to them. Other code may read and write them at any time.
    pub unsafe fn new(base: NonNull<u8>, len: u64) -> Self {
        Self { base, len }
    }
}

// SAFETY: `ProcessMemory::new` has the caller's promise.
unsafe impl KvMemory for ProcessMemory {
    fn base_ptr(&self) -> NonNull<u8> {
        self.base
    }

    fn size(&self) -> u64 {
        self.len
    }

    fn check(&self) -> Result<(), SegmentError> {
        Ok(())
    }
}

// SAFETY: the mapping lasts as long as the value, and the guard keeps a page that is gone readable and
// writable, which `check` reports.
unsafe impl KvMemory for MappedSegment {
    fn base_ptr(&self) -> NonNull<u8> {
        self.base_ptr()
    }

    fn size(&self) -> u64 {
        self.len()
    }

    fn check(&self) -> Result<(), SegmentError> {
        self.check()
    }
}

/// A POSIX shared-memory segment of another process, mapped read/write and unmapped on drop.
///
/// Its owner may truncate it at any moment. Copies in this crate survive that: see [`MappedSegment::check`].
/// The mapping stays valid if the owner only removes the name.
#[derive(Debug)]
pub struct MappedSegment {
    /// Dropped before the mapping, so that it never guards a range that belongs to another mapping.
    guard: Guard,
    map: Mapping,
    file: File,
    name: SharedName,
}

impl MappedSegment {
    /// Maps the first `len` bytes of a segment of any user.
    ///
    /// # Errors
    /// [`SegmentError`]; a `len` of 0 is a [`SegmentError::Open`].
    pub fn open(name: &SharedName, len: u64) -> Result<Self, SegmentError> {
        Self::find(name, false).and_then(|found| found.map(len))
    }

    /// Maps the first `len` bytes of a segment that `user` owns.
    ///
    /// A process with more rights than its clients must use this function: otherwise it would read and write
    /// one user's memory for another user. Root is no exception: a proxy that runs as root connects for any
    /// user.
    ///
    /// # Errors
    /// [`SegmentError::OtherUser`], and the errors of [`MappedSegment::open`].
    pub fn open_for(user: u32, name: &SharedName, len: u64) -> Result<Self, SegmentError> {
        let found = Self::find(name, false)?;
        let owner = found.owner;
        if user != owner {
            let name = name.clone();
            return Err(SegmentError::OtherUser { name, owner, user });
        }
        found.map(len)
    }

    /// Maps the first `len` bytes of a server's pool, as its workers do.
    ///
    /// # Errors
    /// Those of [`MappedSegment::open`].
    pub fn open_pool(name: &SharedName, len: u64) -> Result<Self, SegmentError> {
        Self::find(name, true).and_then(|found| found.map(len))
    }

    /// Maps exactly `len` bytes of a server's pool from a descriptor that the server passed.
    ///
    /// A pool without a name must be sealed against shrinking and growing. A pool with a name cannot be
    /// sealed, so its owner may truncate it, which [`MappedSegment::check`] detects.
    ///
    /// # Errors
    /// [`SegmentError::NotShared`], [`SegmentError::Unsealed`], and the errors of [`MappedSegment::open`].
    pub fn of_descriptor(
        descriptor: OwnedFd,
        name: Option<&SharedName>,
        len: u64,
    ) -> Result<Self, SegmentError> {
        // Only files of shared memory have seals. Checked first, because on a file of FUSE other calls could
        // block.
        let seals = fcntl_get_seals(&descriptor).map_err(|error| SegmentError::NotShared {
            source: Arc::new(error.into()),
        })?;
        let sealed = seals.contains(SealFlags::SHRINK | SealFlags::GROW);
        if name.is_none() && !sealed {
            return Err(SegmentError::Unsealed);
        }
        let name = name.cloned().unwrap_or_else(SharedName::of_sealed);
        let file = File::from(descriptor);
        let found = Found::check(name, file)?;
        if found.size > len {
            return Err(wrong_size(&found.name, len, found.size));
        }
        found.map(len)
    }

    /// Opens a segment and checks its kind. A pool is refused unless `pool` is true.
    fn find(name: &SharedName, pool: bool) -> Result<Found, SegmentError> {
        let open = |source: io::Error| SegmentError::Open {
            name: name.clone(),
            source: source.into(),
        };
        let file = shared_file::open(name, false).map_err(open)?;
        if !pool && shared_file::is_pool(name, &file).map_err(open)? {
            return Err(SegmentError::OwnPool { name: name.clone() });
        }
        Found::check(name.clone(), file)
    }

    /// Returns true if the other mapping is of the same file, under whatever name.
    pub fn is_same_file(&self, other: &Self) -> bool {
        let identity = |of: &Self| of.file.metadata().map(|meta| (meta.dev(), meta.ino()));
        matches!((identity(self), identity(other)), (Ok(ours), Ok(theirs)) if ours == theirs)
    }

    /// Returns the name of the segment.
    pub fn name(&self) -> &SharedName {
        &self.name
    }

    /// Returns the number of bytes mapped.
    pub fn len(&self) -> u64 {
        self.map.len() as u64
    }

    /// Returns false: an empty segment cannot be mapped.
    pub fn is_empty(&self) -> bool {
        self.map.len() == 0
    }

    /// Returns the first byte of the mapping. After reads and writes through it, [`MappedSegment::check`]
    /// must be called, as the copies of this crate do.
    pub fn base_ptr(&self) -> NonNull<u8> {
        self.map.base()
    }

    /// Enters the pages of a part into the page table of this process, so that the first copies do not fault
    /// at each page. Returns false if some of the pages are not in memory yet: their owner has to make them
    /// present.
    ///
    /// # Errors
    /// Errors of the system: the part is outside the segment or does not begin at a page, or Linux is older
    /// than 5.14.
    pub fn enter_pages(&self, part: Range<u64>) -> io::Result<bool> {
        let (page, len) = (page_size() as u64, self.len());
        if part.start >= part.end || part.end > len || !part.start.is_multiple_of(page) {
            return Err(Errno::INVAL.into());
        }
        let (start, len) = (part.start as usize, (part.end - part.start) as usize);
        let are_there = self.map.is_in_memory(start, len)?;
        if are_there {
            self.map.try_populate(start, len)?;
        }
        Ok(are_there)
    }

    /// Checks that the segment still has all mapped bytes, and that none was lost. Bytes read between two
    /// successful checks are the bytes that the owner had written.
    ///
    /// # Errors
    /// [`SegmentError::Size`] or [`SegmentError::Lost`], permanently.
    pub fn check(&self) -> Result<(), SegmentError> {
        if self.guard.is_lost() {
            return Err(SegmentError::Lost {
                name: self.name.clone(),
            });
        }
        let meta = self.file.metadata().map_err(|source| SegmentError::Open {
            name: self.name.clone(),
            source: source.into(),
        })?;
        match meta.len() < self.len() {
            true => Err(wrong_size(&self.name, self.len(), meta.len())),
            false => Ok(()),
        }
    }
}

/// A segment that is open but not mapped yet.
struct Found {
    name: SharedName,
    owner: u32,
    size: u64,
    file: File,
}

impl Found {
    /// Checks that a file is a regular one.
    fn check(name: SharedName, file: File) -> Result<Self, SegmentError> {
        let meta = match file.metadata() {
            Ok(meta) => meta,
            Err(source) => {
                return Err(SegmentError::Open {
                    name,
                    source: source.into(),
                });
            }
        };
        // No links: the file never had a name, or its owner has removed the name since.
        if !meta.is_file() || meta.nlink() > 1 {
            return Err(SegmentError::NotPlain { name });
        }
        Ok(Self {
            name,
            owner: meta.uid(),
            size: meta.len(),
            file,
        })
    }

    fn map(self, len: u64) -> Result<MappedSegment, SegmentError> {
        let Self {
            name,
            owner,
            size,
            file,
        } = self;
        if size < len {
            return Err(wrong_size(&name, len, size));
        }
        let open = |source: io::Error| SegmentError::Open {
            name: name.clone(),
            source: source.into(),
        };
        let bytes = usize::try_from(len).map_err(|e| open(io::Error::other(e)))?;
        let map = Mapping::shared(&file, bytes).map_err(open)?;
        let guard = Guard::new(map.base(), map.len(), Some(owner)).map_err(open)?;
        Ok(MappedSegment {
            guard,
            map,
            file,
            name,
        })
    }
}

fn wrong_size(name: &SharedName, expected: u64, found: u64) -> SegmentError {
    SegmentError::Size {
        name: name.clone(),
        expected,
        found,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::FileExt;

    use super::*;
    use crate::ArenaConfig;

    /// A segment as an engine makes it: a file under /dev/shm without an owner's record.
    fn engine_segment(tag: &str, bytes: &[u8]) -> SharedName {
        let name = format!("lmc_test_seg_{tag}_{}", std::process::id());
        let name = SharedName::new(&name).unwrap();
        fs::write(name.path(), bytes).unwrap();
        name
    }

    #[test]
    fn bytes_of_the_owner_are_seen_and_the_name_may_go() {
        let name = engine_segment("seen", &[7; 10_000]);
        let segment = MappedSegment::open(&name, 10_000).unwrap();
        fs::remove_file(name.path()).unwrap();
        // SAFETY: the last of the bytes mapped.
        assert_eq!(unsafe { segment.base_ptr().add(9_999).read() }, 7);
        segment.check().unwrap();
    }

    #[test]
    fn a_segment_that_is_too_small_or_absent_is_refused() {
        let name = engine_segment("small", &[1; 100]);
        let err = MappedSegment::open(&name, 101).unwrap_err();
        assert!(
            matches!(
                err,
                SegmentError::Size {
                    expected: 101,
                    found: 100,
                    ..
                }
            ),
            "{err}"
        );
        assert!(MappedSegment::open(&name, 0).is_err());
        fs::remove_file(name.path()).unwrap();
        assert!(matches!(
            MappedSegment::open(&name, 1),
            Err(SegmentError::Open { .. })
        ));
    }

    #[test]
    fn a_pool_of_lmc_cannot_be_registered_as_engine_memory() {
        let name = format!("lmc_test_own_{}", std::process::id());
        let arena = ArenaConfig::shared(&name, 4096).build().unwrap();
        let name = arena.shared_name().unwrap().clone();
        assert!(matches!(
            MappedSegment::open(&name, 4096),
            Err(SegmentError::OwnPool { .. })
        ));
    }

    #[test]
    fn pages_that_are_in_memory_are_entered_and_others_are_left_out() {
        const HALF: u64 = 4 << 20;
        let name = engine_segment("pages", &[7; HALF as usize]);
        let file = File::options().write(true).open(name.path()).unwrap();
        file.set_len(2 * HALF).unwrap();
        let segment = MappedSegment::open(&name, 2 * HALF).unwrap();
        assert!(segment.enter_pages(0..HALF).unwrap());
        assert!(!segment.enter_pages(0..2 * HALF).unwrap());
        assert!(!segment.enter_pages(HALF..2 * HALF).unwrap());
        assert!(segment.enter_pages(HALF..2 * HALF + 1).is_err());
        assert!(segment.enter_pages(1..HALF).is_err());
        assert_eq!(file.metadata().unwrap().blocks() * 512, HALF);
        let pagemap = File::open("/proc/self/pagemap").unwrap();
        let is_entered = |offset: u64| {
            let page = (segment.base_ptr().as_ptr() as u64 + offset) / page_size() as u64;
            let mut entry = [0; 8];
            pagemap.read_exact_at(&mut entry, page * 8).unwrap();
            // Bit 63: the page is present.
            entry[7] & 0x80 != 0
        };
        let entered = (0..2 * HALF)
            .step_by(page_size())
            .filter(|&offset| is_entered(offset));
        assert!(entered.eq((0..HALF).step_by(page_size())));
        fs::remove_file(name.path()).unwrap();
    }

    #[test]
    fn a_segment_cut_short_in_use_is_lost_and_kills_no_process() {
        let name = engine_segment("cut", &[9; 64 * 1024]);
        let segment = MappedSegment::open(&name, 64 * 1024).unwrap();
        let other = engine_segment("whole", &[3; 4096]);
        let other_segment = MappedSegment::open(&other, 4096).unwrap();
        let file = fs::OpenOptions::new()
            .write(true)
            .open(name.path())
            .unwrap();
        file.set_len(4096).unwrap();
        // SAFETY: within the mapping; the page behind it is gone, which raises SIGBUS.
        assert_eq!(unsafe { segment.base_ptr().add(8192).read_volatile() }, 0);
        // SAFETY: as above, for writing.
        unsafe { segment.base_ptr().add(60_000).write_volatile(1) };
        assert!(matches!(segment.check(), Err(SegmentError::Lost { .. })));
        file.set_len(64 * 1024).unwrap();
        assert!(segment.check().is_err(), "a lost segment stays lost");
        other_segment.check().unwrap();
        // SAFETY: the other segment is whole.
        assert_eq!(unsafe { other_segment.base_ptr().read() }, 3);
        fs::remove_file(name.path()).unwrap();
        fs::remove_file(other.path()).unwrap();
    }

    #[test]
    fn a_segment_cut_short_between_copies_is_recognised_by_its_size() {
        let name = engine_segment("idle", &[9; 8192]);
        let segment = MappedSegment::open(&name, 8192).unwrap();
        fs::OpenOptions::new()
            .write(true)
            .open(name.path())
            .unwrap()
            .set_len(1)
            .unwrap();
        assert!(matches!(
            segment.check(),
            Err(SegmentError::Size { found: 1, .. })
        ));
        fs::remove_file(name.path()).unwrap();
    }
}
