//! Shared memory of another process: an engine's own KV cache.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::ptr::NonNull;

use thiserror::Error;

use crate::arena::map::Mapping;
use crate::arena::shared_file;
use crate::sigbus::Guard;
use crate::{NameError, SharedName};

/// A segment that cannot be mapped, or that is no longer what it was.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SegmentError {
    /// The name is not acceptable.
    #[error(transparent)]
    Name(#[from] NameError),
    /// The segment does not exist, or may not be opened or mapped.
    #[error("cannot open shared memory {name}: {source}")]
    Open {
        /// The segment.
        name: SharedName,
        /// Error of the system call.
        source: io::Error,
    },
    /// The segment is smaller than announced, or than it was when it was mapped.
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
    /// The segment belongs to another user than the one who named it.
    #[error(
        "shared memory {name} belongs to user {owner}, but the connection to user {user}: \
         a server maps only segments of the user that names them"
    )]
    OtherUser {
        /// The segment.
        name: SharedName,
        /// User that owns it.
        owner: u32,
        /// User that named it.
        user: u32,
    },
    /// The segment is not a regular file with one name. With a second name it could be memory
    /// that its user never gave to this server.
    #[error("shared memory {name} is not a regular file with one link")]
    NotPlain {
        /// The segment.
        name: SharedName,
    },
    /// The owner cut the segment short, or the system had no page left for it, while we were
    /// using it. Nothing copied since can be trusted; the engine must register again.
    #[error("shared memory {name} was cut short or ran out of pages while it was in use")]
    Lost {
        /// The segment.
        name: SharedName,
    },
}

/// A foreign POSIX shared-memory segment, mapped read/write and unmapped on drop.
///
/// Its owner may cut it short at any moment. Copies in this crate survive that: see
/// [`MappedSegment::check`]. The mapping stays good when the owner only removes the name.
#[derive(Debug)]
pub struct MappedSegment {
    /// Dropped before the mapping, so that it never guards a range that is not ours.
    guard: Guard,
    map: Mapping,
    file: File,
    name: SharedName,
}

impl MappedSegment {
    /// Maps the first `len` bytes of a segment of any user.
    ///
    /// # Errors
    /// See [`SegmentError`]; a `len` of 0 is an error of [`SegmentError::Open`].
    pub fn open(name: &SharedName, len: u64) -> Result<Self, SegmentError> {
        Self::find(name).and_then(|found| found.map(len))
    }

    /// Maps the first `len` bytes of a segment that a user owns.
    ///
    /// A process that may open more than its clients must ask for no less: it would read and
    /// write for one user what belongs to another. Root is no exception: a proxy that root runs
    /// connects for any user.
    ///
    /// # Errors
    /// [`SegmentError::OtherUser`], and those of [`MappedSegment::open`].
    pub fn open_for(user: u32, name: &SharedName, len: u64) -> Result<Self, SegmentError> {
        let found = Self::find(name)?;
        let owner = found.owner;
        if user != owner {
            let name = name.clone();
            return Err(SegmentError::OtherUser { name, owner, user });
        }
        found.map(len)
    }

    /// Opens a segment and checks what it is.
    fn find(name: &SharedName) -> Result<Found, SegmentError> {
        let open = |source| SegmentError::Open {
            name: name.clone(),
            source,
        };
        let file = shared_file::open(name, false).map_err(open)?;
        if shared_file::is_pool(name, &file).map_err(open)? {
            return Err(SegmentError::OwnPool { name: name.clone() });
        }
        let meta = file.metadata().map_err(open)?;
        // No links at all: the engine has removed the name since.
        if !meta.is_file() || meta.nlink() > 1 {
            return Err(SegmentError::NotPlain { name: name.clone() });
        }
        Ok(Found {
            name: name.clone(),
            owner: meta.uid(),
            file,
        })
    }

    /// Returns true if another mapping is of the same file, under whatever name.
    pub fn is_same_file(&self, other: &Self) -> bool {
        let identity = |of: &Self| of.file.metadata().map(|meta| (meta.dev(), meta.ino()));
        matches!((identity(self), identity(other)), (Ok(ours), Ok(theirs)) if ours == theirs)
    }

    /// Name of the segment.
    pub fn name(&self) -> &SharedName {
        &self.name
    }

    /// Bytes mapped.
    pub fn len(&self) -> u64 {
        self.map.len() as u64
    }

    /// Never true: an empty segment cannot be mapped.
    pub fn is_empty(&self) -> bool {
        self.map.len() == 0
    }

    /// First byte of the mapping. Reads and writes through it need a [`MappedSegment::check`]
    /// afterwards, as the copies of this crate do.
    pub fn base_ptr(&self) -> NonNull<u8> {
        self.map.base()
    }

    /// Checks that the segment still has all the bytes that are mapped, and that none was lost.
    /// Bytes read between two successful checks are the ones that the owner had written.
    ///
    /// # Errors
    /// [`SegmentError::Size`] or [`SegmentError::Lost`], which stay for good.
    pub fn check(&self) -> Result<(), SegmentError> {
        if self.guard.is_lost() {
            return Err(SegmentError::Lost {
                name: self.name.clone(),
            });
        }
        check_size(&self.file, &self.name, self.len())
    }
}

/// A segment that is open and not mapped yet.
struct Found {
    name: SharedName,
    owner: u32,
    file: File,
}

impl Found {
    fn map(self, len: u64) -> Result<MappedSegment, SegmentError> {
        let Self { name, owner, file } = self;
        let open = |source| SegmentError::Open {
            name: name.clone(),
            source,
        };
        check_size(&file, &name, len)?;
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

fn check_size(file: &File, name: &SharedName, expected: u64) -> Result<(), SegmentError> {
    let found = file
        .metadata()
        .map_err(|source| SegmentError::Open {
            name: name.clone(),
            source,
        })?
        .len();
    if found < expected {
        return Err(SegmentError::Size {
            name: name.clone(),
            expected,
            found,
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;

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
