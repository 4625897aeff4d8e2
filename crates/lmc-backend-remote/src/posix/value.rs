//! Reading and writing values, without the page cache where the file system allows it.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use bytes::Bytes;
use lmc_backend::FailedSlot;
use parking_lot::Mutex;
use rustix::fd::OwnedFd;
use rustix::fs::{AtFlags, OFlags};
use rustix::io::Errno;

use super::clock::Clock;
use super::tree::{Tree, is_absent, is_file, temporary};
use crate::format::{HEADER_LEN, Name, Refusal, ValueName};
use crate::store::{GetItem, Got, Head, HeaderBytes, Put, PutItem, PutMode, StoreError};

/// Most attempts to write into a folder that other daemons remove because it is empty.
pub(super) const MAX_ATTEMPTS: usize = 4;

/// Bytes of a block: the alignment of direct I/O, and the offset of the payload.
pub(super) const BLOCK: usize = 4096;

/// A block in memory.
#[repr(C, align(4096))]
struct Block([u8; BLOCK]);

impl Block {
    fn zeroed() -> Box<Self> {
        Box::new(Self([0; BLOCK]))
    }
}

/// Names of a folder after a path, in order.
#[derive(Debug)]
pub(super) struct Names {
    pub(super) folder: String,
    pub(super) after: String,
    pub(super) paths: VecDeque<String>,
    /// False if more names may follow.
    pub(super) is_whole: bool,
}

/// Values in the files of a tree.
#[derive(Debug)]
pub(super) struct Values {
    pub(super) tree: Tree,
    pub(super) clock: Clock,
    /// Remaining names of the folder in which the last page ended.
    pub(super) read_ahead: Mutex<Option<Names>>,
    /// True until the file system refuses direct I/O.
    direct: AtomicBool,
}

/// Outcome of reading a value, before the caller is answered.
enum Read {
    Value { header: Box<HeaderBytes>, len: u64 },
    Refused(Refusal),
}

impl Values {
    pub(super) fn new(tree: Tree, direct: bool) -> Self {
        Self {
            tree,
            clock: Clock::default(),
            read_ahead: Mutex::default(),
            direct: AtomicBool::new(direct),
        }
    }

    /// Returns true while files are read and written without the page cache.
    pub(super) fn is_direct(&self) -> bool {
        self.direct.load(Ordering::Relaxed)
    }

    /// Runs an operation with direct I/O, and again without it if it is refused. A single entry may refuse
    /// direct I/O (a folder, a file of another program): only a file written by lmc shows that the file
    /// system refuses it.
    fn direct_or_not<T>(&self, mut run: impl FnMut(OFlags) -> io::Result<T>) -> io::Result<T> {
        if !self.is_direct() {
            return run(OFlags::empty());
        }
        match run(OFlags::DIRECT) {
            Err(error) if is_invalid(&error) => {
                let again = run(OFlags::empty());
                if again.is_ok() && !self.takes_direct() {
                    tracing::info!(
                        "remote file system does not support direct I/O; its files go through the page cache"
                    );
                    self.direct.store(false, Ordering::Relaxed);
                }
                again
            }
            result => result,
        }
    }

    /// Tests direct I/O with a file that is written for this purpose. Returns false if the file system
    /// refuses it.
    fn takes_direct(&self) -> bool {
        let probe = || -> io::Result<()> {
            let (folder, _) = self.tree.made_parent(&Name::Clears.to_string())?;
            let (file, name) = temporary(&folder, OFlags::WRONLY | OFlags::DIRECT)?;
            let written = rustix::io::write(&file, &Block::zeroed().0);
            rustix::fs::unlinkat(&folder, &name, AtFlags::empty())?;
            written?;
            Ok(())
        };
        !probe().is_err_and(|error| is_invalid(&error))
    }

    pub(super) fn head(&self, name: ValueName) -> Result<Option<Head>, StoreError> {
        let path = name.to_string();
        let head = self.direct_or_not(|direct| {
            let file = self.tree.open(&path, OFlags::RDONLY | direct)?;
            let stat = rustix::fs::fstat(&file)?;
            let mut block = Block::zeroed();
            let is_file = is_file(&stat);
            let read = match is_file {
                true => read_full(&file, [&mut block.0, &mut [], &mut []], 0, HEADER_LEN)?,
                false => 0,
            };
            let header = block.0.first_chunk().copied().map(Box::new);
            Ok(Head {
                header: header.filter(|_| read >= HEADER_LEN),
                value_len: if is_file { stat.st_size as u64 } else { 0 },
                age: self.clock.age(&stat),
            })
        });
        match head {
            Err(error) if is_absent(&error) => Ok(None),
            head => Ok(Some(head?)),
        }
    }

    pub(super) fn get(&self, mut item: GetItem) -> Got {
        let path = item.name.to_string();
        let mut age = None;
        let read = self.direct_or_not(|direct| {
            // A slot of a pool with another alignment is read through the page cache.
            let is_aligned = item.slot.bytes_mut().as_ptr().addr().is_multiple_of(BLOCK);
            let direct = if is_aligned { direct } else { OFlags::empty() };
            let file = self.tree.open(&path, OFlags::RDONLY | direct)?;
            let stat = rustix::fs::fstat(&file)?;
            if !is_file(&stat) {
                return Ok(Read::Refused(Refusal::Damaged));
            }
            age = self.clock.age(&stat);
            self.read_value(&file, stat.st_size as u64, &mut item, direct)
        });
        match read {
            Ok(Read::Value { header, len }) => match item.check(&header, len) {
                Ok(header) => {
                    let slot = item.slot;
                    Got::Value { header, slot, age }
                }
                Err(refusal) => refused(refusal, item),
            },
            Ok(Read::Refused(refusal)) => refused(refusal, item),
            Err(error) if is_absent(&error) => Got::Absent(item.slot),
            Err(error) => Got::Failed {
                error: error.into(),
                slot: FailedSlot::Released(item.slot),
            },
        }
    }

    /// Reads header and payload of a value with the usual layout in one call. If the bytes turn out not to be
    /// the slot's chunk, they do no harm: the slot belongs to the caller alone.
    fn read_value(
        &self,
        file: &OwnedFd,
        len: u64,
        item: &mut GetItem,
        direct: OFlags,
    ) -> io::Result<Read> {
        let slot = item.slot.bytes_mut();
        let is_usual = len == (BLOCK + slot.len()) as u64;
        let mut header = Block::zeroed();
        let mut last = Block::zeroed();
        if is_usual {
            let whole = slot.len() / BLOCK * BLOCK;
            let (blocks, rest) = slot.split_at_mut(whole);
            let want = len as usize;
            let parts = match direct.is_empty() {
                true => [&mut header.0[..], blocks, &mut *rest],
                false => [&mut header.0[..], blocks, &mut last.0[..]],
            };
            if read_full(file, parts, 0, want)? < want {
                return Ok(Read::Refused(Refusal::Damaged));
            }
            if !direct.is_empty() {
                rest.copy_from_slice(&last.0[..rest.len()]);
            }
        } else if read_full(file, [&mut header.0, &mut [], &mut []], 0, HEADER_LEN)? < HEADER_LEN {
            return Ok(Read::Refused(Refusal::Damaged));
        }
        let bytes: HeaderBytes = *header.0.first_chunk().expect("a block has a header");
        let header = match item.check(&bytes, len) {
            Ok(header) => header,
            Err(refusal) => return Ok(Read::Refused(refusal)),
        };
        if header.payload_offset != BLOCK as u64 {
            // The value was copied from a store of another kind.
            if !direct.is_empty() {
                return Err(Errno::INVAL.into());
            }
            let slot = item.slot.bytes_mut();
            let want = slot.len();
            if read_full(file, [slot, &mut [], &mut []], header.payload_offset, want)? < want {
                return Ok(Read::Refused(Refusal::Damaged));
            }
        }
        Ok(Read::Value {
            header: Box::new(bytes),
            len,
        })
    }

    /// Writes a value under a temporary name and renames it.
    pub(super) fn put(&self, item: &PutItem, deadline: Instant) -> Result<Put, StoreError> {
        let path = item.name().to_string();
        let needed = item.header.value_len();
        if item.mode == PutMode::Create {
            match self.tree.stat(&path) {
                Ok(stat) if is_file(&stat) => return Ok(Put::Present),
                // An entry that is not a file is replaced.
                Ok(_) => {}
                Err(error) if is_absent(&error) => {}
                Err(error) => return Err(store_error(error, needed)),
            }
        }
        let payload = item.slot.bytes();
        let written = self.direct_or_not(|direct| {
            let is_aligned = payload.as_ptr().addr().is_multiple_of(BLOCK);
            let direct = if is_aligned { direct } else { OFlags::empty() };
            self.write_renamed(&path, direct, deadline, |file| {
                let mut header = Block::zeroed();
                header.0[..HEADER_LEN].copy_from_slice(&item.header.encode());
                let whole = payload.len() / BLOCK * BLOCK;
                let (blocks, rest) = payload.split_at(whole);
                let mut last = Block::zeroed();
                last.0[..rest.len()].copy_from_slice(rest);
                if direct.is_empty() || rest.is_empty() {
                    return write_full(file, [&header.0, blocks, rest]);
                }
                write_full(file, [&header.0, blocks, &last.0])?;
                Ok(rustix::fs::ftruncate(file, needed)?)
            })
        });
        match written {
            Ok(true) => Ok(Put::Written),
            Ok(false) => Err(StoreError::Deadline),
            Err(error) => Err(store_error(error, needed)),
        }
    }

    /// Reads the file of a small object.
    pub(super) fn read_file(&self, path: &str, max: usize) -> Result<Bytes, StoreError> {
        let file = self.tree.open(path, OFlags::RDONLY)?;
        let stat = rustix::fs::fstat(&file).map_err(io::Error::from)?;
        let found = stat.st_size as u64;
        if !is_file(&stat) || found > max as u64 {
            return Err(StoreError::TooLarge {
                max: max as u64,
                found,
            });
        }
        let mut bytes = vec![0; found as usize];
        let read = read_full(&file, [&mut bytes, &mut [], &mut []], 0, found as usize)?;
        bytes.truncate(read);
        Ok(bytes.into())
    }

    /// Writes a small object under a temporary name, renames it, and syncs both, so that the object survives
    /// a crash of the file server: unlike a value, it cannot be computed again.
    pub(super) fn write(
        &self,
        name: Name,
        bytes: &[u8],
        deadline: Instant,
    ) -> Result<(), StoreError> {
        let path = name.to_string();
        let write = |file: &OwnedFd| {
            write_full(file, [bytes, &[], &[]])?;
            Ok(rustix::fs::fsync(file)?)
        };
        let written = self.write_renamed(&path, OFlags::empty(), deadline, write);
        match written.and_then(|written| self.tree.sync_parent(&path).map(|()| written)) {
            Ok(true) => Ok(()),
            Ok(false) => Err(StoreError::Deadline),
            Err(error) => Err(store_error(error, bytes.len() as u64)),
        }
    }

    /// Writes and renames a file. Returns false if the deadline passed before the rename.
    fn write_renamed(
        &self,
        path: &str,
        flags: OFlags,
        deadline: Instant,
        write: impl Fn(&OwnedFd) -> io::Result<()>,
    ) -> io::Result<bool> {
        let make = || {
            let (folder, target) = self.tree.made_parent(path)?;
            let (file, name) = temporary(&folder, OFlags::WRONLY | flags)?;
            Ok((folder, target, file, name))
        };
        let mut made = make();
        for _ in 1..MAX_ATTEMPTS {
            match made {
                // Another daemon has just removed the empty folder.
                Err(error) if is_absent(&error) => made = make(),
                _ => break,
            }
        }
        let (folder, target, file, name) = made?;
        let written = write(&file).and_then(|()| {
            self.clock.note(&file);
            let in_time = Instant::now() < deadline;
            if in_time {
                rustix::fs::renameat(&folder, &name, &folder, target)?;
            }
            Ok(in_time)
        });
        if !matches!(written, Ok(true)) {
            // A collector removes what remains.
            let _ = rustix::fs::unlinkat(&folder, &name, AtFlags::empty());
        }
        written
    }
}

fn refused(refusal: Refusal, item: GetItem) -> Got {
    let slot = item.slot;
    Got::Refused { refusal, slot }
}

fn is_invalid(error: &io::Error) -> bool {
    error.raw_os_error() == Some(Errno::INVAL.raw_os_error())
}

/// Converts an error of the file system to one of a store.
pub(super) fn store_error(error: io::Error, needed: u64) -> StoreError {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => StoreError::Full { needed },
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => StoreError::Denied {
            reason: error.to_string(),
        },
        io::ErrorKind::NotFound => StoreError::unavailable(error),
        _ => StoreError::from(error),
    }
}

/// Reads `want` bytes into consecutive parts. Returns the number of bytes read: fewer at the end of the file.
fn read_full(file: &OwnedFd, parts: [&mut [u8]; 3], offset: u64, want: usize) -> io::Result<usize> {
    let mut parts = parts.map(IoSliceMut::new);
    let mut parts = &mut parts[..];
    let mut read = 0;
    while read < want {
        match rustix::io::preadv(file, parts, offset + read as u64) {
            Ok(0) => break,
            Ok(count) => {
                read += count;
                IoSliceMut::advance_slices(&mut parts, count);
            }
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(read)
}

/// Writes parts one after the other, from the start of a file.
pub(super) fn write_full(file: &OwnedFd, parts: [&[u8]; 3]) -> io::Result<()> {
    let mut left: usize = parts.iter().map(|part| part.len()).sum();
    let mut parts = parts.map(IoSlice::new);
    let mut parts = &mut parts[..];
    let mut offset = 0;
    while left > 0 {
        match rustix::io::pwritev(file, parts, offset) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => {
                left -= count;
                offset += count as u64;
                IoSlice::advance_slices(&mut parts, count);
            }
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}
