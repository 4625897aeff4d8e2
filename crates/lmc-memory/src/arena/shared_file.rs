//! The file behind a shared arena: made once, owned by one process, recognised when stale.
//!
//! Beside the segment `/dev/shm/<name>` lies `/dev/shm/<name>.lmc-owner`, which holds the
//! owner's pid in text. The owner keeps an exclusive `flock` on it for life, and the kernel
//! drops the lock with the process, however it dies. So:
//!
//! | record | lock | segment | meaning |
//! |---|---|---|---|
//! | there | held | any | a running server owns the name: error, with its pid |
//! | there | free | there | a server was killed: the segment is stale and is replaced |
//! | absent | – | there | somebody else's segment: error, never touched |
//! | any | free | absent | nothing in the way |
//!
//! The segment itself is never used for this, so that its offset 0 belongs to the pool.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::process;
use std::thread::{self, JoinHandle};

use super::ArenaError;
use crate::SharedName;

/// A segment that this process made and owns. Both files go on drop.
#[derive(Debug)]
pub(super) struct SharedFile {
    name: SharedName,
    file: File,
    /// Holds the lock; closed last.
    record: File,
    reclaimed: Option<String>,
}

/// How often to start over when another process wins a race for the record.
const ATTEMPTS: usize = 16;

fn system(what: String) -> impl FnOnce(io::Error) -> ArenaError {
    move |source| ArenaError::System { what, source }
}

/// Opens or makes a segment by `shm_open`, which knows where the system keeps them.
pub(crate) fn shm_open(name: &SharedName, flags: libc::c_int) -> io::Result<File> {
    let c_name = name.to_c();
    // SAFETY: the name is NUL-terminated and lives across the call.
    let fd = unsafe { libc::shm_open(c_name.as_ptr(), flags | libc::O_CLOEXEC, 0o600) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just opened and nobody else has it.
    Ok(unsafe { File::from_raw_fd(fd) })
}

/// Whether an lmc process owns or owned a segment of that name.
pub(crate) fn is_ours(name: &SharedName) -> bool {
    name.owner_path().exists()
}

/// Tries to lock a file for this process; `false` when another holds it.
fn lock(file: &File) -> io::Result<bool> {
    // SAFETY: the descriptor is open for as long as the call lasts.
    if unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } == 0 {
        return Ok(true);
    }
    let error = io::Error::last_os_error();
    if error.kind() == io::ErrorKind::WouldBlock {
        Ok(false)
    } else {
        Err(error)
    }
}

/// What a record says about its owner.
fn owner(record: &mut File) -> String {
    let mut text = String::new();
    let read = record
        .rewind()
        .and_then(|()| record.take(64).read_to_string(&mut text));
    match read {
        Ok(_) if !text.trim().is_empty() => text.trim().to_owned(),
        _ => "its pid is not recorded".to_owned(),
    }
}

/// Takes the record's lock: the locked file, and who left it behind if anybody did.
fn acquire(name: &SharedName) -> Result<(File, Option<String>), ArenaError> {
    let path = name.owner_path();
    let fail = |source| ArenaError::System {
        what: format!("opening {}", path.display()),
        source,
    };
    for _ in 0..ATTEMPTS {
        let made = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path);
        let (mut record, existed) = match made {
            Ok(record) => (record, false),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                match OpenOptions::new().read(true).write(true).open(&path) {
                    Ok(record) => (record, true),
                    // Its owner left between the two calls.
                    Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                    Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                        let owner = format!("of another user: {} is not ours", path.display());
                        return Err(ArenaError::Held {
                            name: name.clone(),
                            owner,
                        });
                    }
                    Err(error) => return Err(fail(error)),
                }
            }
            Err(error) => return Err(fail(error)),
        };
        if !lock(&record).map_err(fail)? {
            let owner = owner(&mut record);
            return Err(ArenaError::Held {
                name: name.clone(),
                owner,
            });
        }
        // The last owner may have removed the record before we got its lock, and somebody
        // else may have made a new one since: the lock counts only on the file in place.
        if !same_file(&path, &record).unwrap_or(false) {
            continue;
        }
        let left_by = existed.then(|| owner(&mut record));
        record
            .set_len(0)
            .and_then(|()| record.rewind())
            .and_then(|()| write!(record, "pid {}", process::id()))
            .map_err(fail)?;
        return Ok((record, left_by));
    }
    Err(ArenaError::Held {
        name: name.clone(),
        owner: "several processes are starting".to_owned(),
    })
}

impl SharedFile {
    /// Makes the segment with `len` bytes, none of them backed by a page yet.
    pub(super) fn create(name: SharedName, len: u64) -> Result<Self, ArenaError> {
        let (record, left_by) = acquire(&name)?;
        let exclusive = libc::O_RDWR | libc::O_CREAT | libc::O_EXCL;
        let (mut reclaimed, mut stale) = (None, None);
        let file = match shm_open(&name, exclusive) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                let Some(left_by) = left_by else {
                    // We made the record, so it is ours to remove; the segment is not.
                    let _ = fs::remove_file(name.owner_path());
                    return Err(ArenaError::NotOurs { name });
                };
                reclaimed = Some(left_by);
                // While it is open, removing its name frees no page and takes no time.
                stale = shm_open(&name, libc::O_RDONLY).ok();
                fs::remove_file(name.path()).map_err(system(format!(
                    "removing the stale {}",
                    name.path().display()
                )))?;
                shm_open(&name, exclusive)
            }
            other => other,
        };
        let file = file.map_err(|source| {
            let _ = fs::remove_file(name.owner_path());
            ArenaError::System {
                what: format!("shm_open of {name}"),
                source,
            }
        })?;
        let this = Self {
            name,
            file,
            record,
            reclaimed,
        };
        let what = format!("giving shared memory {} its size of {len} bytes", this.name);
        if let Some(stale) = stale {
            let room = this.check_space(len).is_ok();
            let freeing = free_pages(stale);
            if let Some(freeing) = freeing.filter(|_| !room) {
                // Closing a file does not panic.
                let _ = freeing.join();
            }
        }
        this.check_space(len)?;
        this.file.set_len(len).map_err(system(what))?;
        Ok(this)
    }

    /// A page that the file system has no room for kills whoever touches it (SIGBUS), so the
    /// room is checked while the segment is still empty.
    fn check_space(&self, need: u64) -> Result<(), ArenaError> {
        // SAFETY: statvfs is plain data for which zeroes are valid.
        let mut stat: libc::statvfs = unsafe { std::mem::zeroed() };
        // SAFETY: the descriptor is open and the target is writable for the call.
        if unsafe { libc::fstatvfs(self.file.as_raw_fd(), &mut stat) } != 0 {
            let what = format!("statvfs of shared memory {}", self.name);
            return Err(system(what)(io::Error::last_os_error()));
        }
        // No blocks at all means that the mount has no limit of its own.
        let available = stat.f_bavail.saturating_mul(stat.f_frsize);
        if stat.f_blocks > 0 && available < need {
            return Err(ArenaError::Space { need, available });
        }
        Ok(())
    }

    /// Whether the file system has so much room.
    pub(super) fn has_room(&self, need: u64) -> bool {
        self.check_space(need).is_ok()
    }

    /// Takes pages for a part from the file system now, so that touching it cannot fail later.
    /// Keeps bytes that are there.
    pub(super) fn reserve(&self, offset: u64, len: u64) -> io::Result<()> {
        let signed = |value: u64| {
            libc::off_t::try_from(value).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))
        };
        let (offset, len) = (signed(offset)?, signed(len)?);
        loop {
            // SAFETY: the descriptor is open; mode 0 only adds pages.
            if unsafe { libc::fallocate(self.file.as_raw_fd(), 0, offset, len) } == 0 {
                return Ok(());
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
    }

    /// The segment.
    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Its name.
    pub(super) fn name(&self) -> &SharedName {
        &self.name
    }

    /// Who left a stale segment of that name, if anybody did.
    pub(super) fn reclaimed(&self) -> Option<&str> {
        self.reclaimed.as_deref()
    }

    /// Removes both names, if they are still those of this segment: after an operator's `rm`
    /// or an earlier call another server may have taken the name.
    pub(super) fn unlink(&self) {
        let path = self.name.owner_path();
        let ours = same_file(&path, &self.record);
        if ours.unwrap_or(false) {
            // The record goes last: a segment without one would look like somebody else's.
            let _ = fs::remove_file(self.name.path());
            let _ = fs::remove_file(path);
        }
    }
}

impl Drop for SharedFile {
    fn drop(&mut self) {
        self.unlink();
    }
}

/// Gives the pages of an unlinked segment back in the background: a tenth of a second for each
/// GiB, which a server that has room enough need not wait for.
/// None when no thread could be had and they were freed here.
fn free_pages(segment: File) -> Option<JoinHandle<()>> {
    let thread = thread::Builder::new()
        .name("lmc-reclaim".to_owned())
        .spawn(move || drop(segment));
    thread.ok()
}

/// Whether a path still leads to an open file.
fn same_file(path: &Path, file: &File) -> io::Result<bool> {
    let (there, ours) = (fs::metadata(path)?, file.metadata()?);
    Ok((there.dev(), there.ino()) == (ours.dev(), ours.ino()))
}
