//! The file behind a shared arena: made once, owned by one process.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::MetadataExt;
use std::thread::{self, JoinHandle};

use parking_lot::Mutex;

use super::ArenaError;
use super::config::Naming;
use super::record::{self, Record, StaleSegment};
use crate::SharedName;

/// A segment that this process made and owns. Its name and its record are removed on drop.
#[derive(Debug)]
pub(super) struct SharedFile {
    name: SharedName,
    file: File,
    id: FileId,
    /// Holds the lock; closed last.
    record: Record,
}

/// Device and inode of a file.
type FileId = (u64, u64);

/// The segments that this process owns, so that none is mapped as an engine's memory under
/// another name.
static OWN: Mutex<Vec<FileId>> = Mutex::new(Vec::new());

fn system(what: String) -> impl FnOnce(io::Error) -> ArenaError {
    move |source| ArenaError::System { what, source }
}

/// Opens or makes a segment by `shm_open`, which knows where the system keeps them.
pub(crate) fn shm_open(name: &SharedName, flags: libc::c_int) -> io::Result<File> {
    let c_name = name.to_c();
    let flags = flags | libc::O_CLOEXEC | libc::O_NOFOLLOW | libc::O_NONBLOCK;
    // SAFETY: the name is NUL-terminated and lives across the call.
    let fd = unsafe { libc::shm_open(c_name.as_ptr(), flags, 0o600) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just opened and has no other owner.
    Ok(unsafe { File::from_raw_fd(fd) })
}

/// Returns true if an open segment is the pool of an lmc process: one of this process under any
/// name, or one with a record of the same user.
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
    /// Makes the segment with `len` bytes, none of them backed by a page yet, and returns a
    /// description of the stale segment that it replaced.
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
        let made = shm_open(&name, libc::O_RDWR | libc::O_CREAT | libc::O_EXCL);
        let with_id = made.and_then(|file| {
            let meta = file.metadata()?;
            Ok((file, (meta.dev(), meta.ino())))
        });
        let (file, id) = with_id.map_err(|source| {
            record.remove();
            if source.kind() == io::ErrorKind::AlreadyExists {
                return ArenaError::NotOurs { name: name.clone() };
            }
            let what = format!("shm_open of {name}");
            ArenaError::System { what, source }
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
                // Closing a file does not panic.
                let _ = freeing.join();
            }
        }
        check_space(&this.file, len)?;
        let what = format!("giving shared memory {} its size of {len} bytes", this.name);
        this.file.set_len(len).map_err(system(what))?;
        Ok((this, note))
    }

    /// The segment.
    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Name of the segment.
    pub(super) fn name(&self) -> &SharedName {
        &self.name
    }

    /// Removes both names, if they are still those of this segment: after an operator's `rm`
    /// or an earlier call another server may have taken the name.
    pub(super) fn unlink(&self) {
        if self.record.is_in_place() {
            let path = self.name.path();
            if record::is_at(&path, &self.file).unwrap_or(false) {
                let _ = fs::remove_file(path);
            }
            // The record goes last: a segment without one would look as if lmc had not made it.
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

/// Checks that a file system has so much free space. A page that it has no space for kills
/// a process that touches it (SIGBUS), so this is checked while the segment is still empty.
fn check_space(file: &File, need: u64) -> Result<(), ArenaError> {
    // SAFETY: statvfs is plain data for which zeroes are valid.
    let mut stat: libc::statvfs = unsafe { std::mem::zeroed() };
    // SAFETY: the descriptor is open and the target is writable for the call.
    if unsafe { libc::fstatvfs(file.as_raw_fd(), &mut stat) } != 0 {
        let what = "statvfs of shared memory".to_owned();
        return Err(system(what)(io::Error::last_os_error()));
    }
    // No blocks at all means that the mount has no limit of its own.
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

/// Takes pages for a part of a file from its file system now, so that touching it cannot fail
/// later. Keeps bytes that are there.
pub(super) fn reserve(file: &File, offset: u64, len: u64) -> io::Result<()> {
    let signed = |value: u64| {
        libc::off_t::try_from(value).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))
    };
    let (offset, len) = (signed(offset)?, signed(len)?);
    loop {
        // SAFETY: the descriptor is open; mode 0 only adds pages.
        if unsafe { libc::fallocate(file.as_raw_fd(), 0, offset, len) } == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// Frees the pages of a stale segment in the background, which a server with enough free space
/// need not wait for. `None` when no thread could be started and they were freed here.
fn free_pages(stale: StaleSegment) -> Option<JoinHandle<()>> {
    let thread = thread::Builder::new()
        .name("lmc-reclaim".to_owned())
        .spawn(move || drop(stale));
    thread.ok()
}
