//! The file behind a shared arena: created and owned by one process.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::thread::{self, JoinHandle};

use parking_lot::Mutex;
use rustix::fs::{FallocateFlags, fallocate, fstatvfs};
use rustix::io::retry_on_intr;

use super::ArenaError;
use super::config::Naming;
use super::record::{self, Record, StaleSegment};
use crate::SharedName;

/// A segment that this process created and owns. Its name and its record are removed on drop.
#[derive(Debug)]
pub(super) struct SharedFile {
    name: SharedName,
    file: File,
    id: FileId,
    /// Holds the lock, and is therefore closed last.
    record: Record,
}

/// Device and inode of a file.
type FileId = (u64, u64);

/// Segments that this process owns, so that none of them is mapped as an engine's memory under another name.
static OWN: Mutex<Vec<FileId>> = Mutex::new(Vec::new());

fn system(what: String) -> impl FnOnce(io::Error) -> ArenaError {
    move |source| ArenaError::System {
        what,
        source: source.into(),
    }
}

/// Opens a segment, or creates one, as `shm_open` does.
pub(crate) fn open(name: &SharedName, make: bool) -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(make)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(name.path())
}

/// Returns true if an open segment is the pool of an lmc process: of this process under any name, or, by its
/// record, of another process of the same user.
pub(crate) fn is_pool(name: &SharedName, file: &File) -> io::Result<bool> {
    let meta = file.metadata()?;
    if OWN.lock().contains(&(meta.dev(), meta.ino())) {
        return Ok(true);
    }
    let record = fs::symlink_metadata(name.owner_path());
    Ok(record
        .is_ok_and(|record| record.is_file() && record.uid() == meta.uid() && record.nlink() == 1))
}

impl SharedFile {
    /// Creates the segment with `len` bytes, with no pages allocated yet. Also returns a description of the
    /// stale segment that it replaced.
    pub(super) fn create(naming: &Naming, len: u64) -> Result<(Self, Option<String>), ArenaError> {
        let name = match naming {
            Naming::Exact(name) => SharedName::new(name)?,
            Naming::Unique(label) => {
                let label = SharedName::new(label)?;
                if let Some((name, owner)) = record::holder(&label) {
                    return Err(ArenaError::Held { name, owner });
                }
                let suffix =
                    record::unpredictable().map_err(system("reading /dev/urandom".to_owned()))?;
                SharedName::new(&format!("{label}_{suffix}"))?
            }
        };
        let (record, stale) = Record::create(&name)?;
        let made = open(&name, true);
        let with_id = made.and_then(|file| {
            let meta = file.metadata()?;
            Ok((file, (meta.dev(), meta.ino())))
        });
        let (file, id) = with_id.map_err(|source| {
            record.remove();
            if source.kind() == io::ErrorKind::AlreadyExists {
                return ArenaError::NotOurs { name: name.clone() };
            }
            let what = format!("making shared memory {name}");
            ArenaError::System {
                what,
                source: source.into(),
            }
        })?;
        OWN.lock().push(id);
        let this = Self {
            name,
            file,
            id,
            record,
        };
        let mut note = None;
        if let Some(stale) = stale {
            note = Some(format!(
                "reclaimed shared memory {}, which a killed server left ({})",
                stale.name(),
                stale.owner()
            ));
            let fits = check_space(&this.file, len).is_ok();
            let freeing = free_pages(stale);
            if let Some(freeing) = freeing.filter(|_| !fits) {
                // The thread only closes a file, which does not panic.
                let _ = freeing.join();
            }
        }
        check_space(&this.file, len)?;
        let what = format!("giving shared memory {} its size of {len} bytes", this.name);
        this.file.set_len(len).map_err(system(what))?;
        Ok((this, note))
    }

    /// Returns the file of the segment.
    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Returns the name of the segment.
    pub(super) fn name(&self) -> &SharedName {
        &self.name
    }

    /// Removes both names, if they still belong to this segment: after an operator's `rm` or an earlier call,
    /// another server may have taken the name.
    pub(super) fn unlink(&self) {
        if self.record.is_in_place() {
            let path = self.name.path();
            if record::is_at(&path, &self.file).unwrap_or(false) {
                let _ = fs::remove_file(path);
            }
            // The record is removed last: a segment without a record would look as if lmc had not made it.
            self.record.remove();
        }
    }
}

impl Drop for SharedFile {
    fn drop(&mut self) {
        self.unlink();
        OWN.lock().retain(|id| *id != self.id);
    }
}

/// Checks that a file system has `need` bytes of free space. Touching a page for which it has no space kills
/// a process (SIGBUS), so this is checked while the segment is still empty.
fn check_space(file: &File, need: u64) -> Result<(), ArenaError> {
    let stat = fstatvfs(file).map_err(|error| {
        let what = "statvfs of shared memory".to_owned();
        system(what)(error.into())
    })?;
    // A mount without blocks has no limit of its own.
    let available = stat.f_bavail.saturating_mul(stat.f_frsize);
    if stat.f_blocks > 0 && available < need {
        return Err(ArenaError::Space { need, available });
    }
    Ok(())
}

/// Returns true if the file system of a file has `need` bytes free.
pub(super) fn has_space(file: &File, need: u64) -> bool {
    check_space(file, need).is_ok()
}

/// Allocates the pages of a part of a file in its file system, so that touching them cannot fail later.
/// Existing bytes are kept.
pub(super) fn reserve(file: &File, offset: u64, len: u64) -> io::Result<()> {
    let add_pages = || fallocate(file, FallocateFlags::empty(), offset, len);
    Ok(retry_on_intr(add_pages)?)
}

/// Frees the pages of a stale segment in the background, so that a server with enough free space need not
/// wait. `None` if no thread could be started and the pages were freed in this call.
fn free_pages(stale: StaleSegment) -> Option<JoinHandle<()>> {
    let thread = thread::Builder::new()
        .name("lmc-reclaim".to_owned())
        .spawn(move || drop(stale));
    thread.ok()
}
