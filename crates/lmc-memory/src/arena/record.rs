//! Owner records: which process owns a shared segment, and which segments are stale.
//!
//! Next to the segment `/dev/shm/<name>` there is a file `/dev/shm/<name>.lmc-owner`. It has the owner's pid
//! and the name as text: `pid 1234 <name>`. The owner holds an exclusive `flock` on the file for life, and
//! the kernel releases the lock when the process ends, in whatever way. So:
//!
//! | record | lock | segment | meaning |
//! |---|---|---|---|
//! | there | held | any | a running server owns the name: error, with its pid |
//! | there | free | there | a server was killed: the segment is stale and is reclaimed |
//! | absent | – | there | not made by lmc: error, never touched |
//! | any | free | absent | the name is free |
//!
//! Every user may create names in `/dev/shm`. So a record counts only if it is a regular file of this user
//! that has the name of its own segment: where `fs.protected_hardlinks` is 0, another user can link a record
//! of this user to a second name. A stale record must also have only one link. A new record is locked and
//! complete before a rename, which replaces no file, gives it its name. An existing file is only opened with
//! `O_NOFOLLOW`, and never written.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process;

use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::process::geteuid;

use super::ArenaError;
use crate::SharedName;

/// Most attempts when other processes win the race for the record.
const ATTEMPTS: usize = 16;

/// Longest record, in bytes: a name has up to 255.
const MAX_RECORD: u64 = 320;

/// A segment whose owner was killed. Its name is removed; its pages are freed on drop, which takes about a
/// tenth of a second per GiB.
#[derive(Debug)]
pub struct StaleSegment {
    name: SharedName,
    owner: String,
    bytes: u64,
    /// Keeps the pages allocated until drop.
    _file: Option<File>,
}

impl StaleSegment {
    /// Returns the name that the segment had.
    pub fn name(&self) -> &SharedName {
        &self.name
    }

    /// Returns the process that owned the segment, such as `pid 1234`.
    pub fn owner(&self) -> &str {
        &self.owner
    }

    /// Returns the bytes that the segment takes from the file system until drop.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// Removes the segments of this user in `/dev/shm` whose lmc server was killed, whatever their name. Segments
/// that cannot be removed are left for the next call.
pub fn reclaim_stale_segments() -> Vec<StaleSegment> {
    let reclaim = |name: SharedName| match look(&name) {
        Ok(Found::Stale(record)) => reclaim(&name, record).ok(),
        _ => None,
    };
    recorded_names().filter_map(reclaim).collect()
}

/// A record that this process created and locked.
#[derive(Debug)]
pub(super) struct Record {
    path: PathBuf,
    file: File,
}

const NOT_A_RECORD: &str = "not the record of an lmc server for this name";

/// State of the file at a record's path.
enum Found {
    Absent,
    /// The owner is running, such as `pid 1234`.
    Held(String),
    /// The owner is dead; this process has locked the record.
    Stale(StaleRecord),
    /// The file is not a record of this user.
    Foreign(&'static str),
}

struct StaleRecord {
    file: File,
    owner: String,
}

/// Returns the effective user of this process, whose records and segments are trusted.
pub fn own_uid() -> u32 {
    geteuid().as_raw()
}

/// Returns 16 hexadecimal digits that other users cannot predict.
pub(super) fn unpredictable() -> io::Result<String> {
    let mut bytes = [0; 8];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(format!("{:016x}", u64::from_ne_bytes(bytes)))
}

/// Opens a file of this user without following links or blocking on a pipe.
fn open_plain(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(path)
}

/// Examines the record of a name without changing it.
fn look(name: &SharedName) -> io::Result<Found> {
    let path = name.owner_path();
    let file = match open_plain(&path) {
        Ok(file) => file,
        Err(error) => {
            return match (error.kind(), error.raw_os_error()) {
                (io::ErrorKind::NotFound, _) => Ok(Found::Absent),
                (io::ErrorKind::PermissionDenied, _) => Ok(Found::Foreign("of another user")),
                (_, Some(libc::ELOOP)) => Ok(Found::Foreign("a symbolic link")),
                (_, Some(libc::ENXIO)) => Ok(Found::Foreign("a socket")),
                _ => Err(error),
            };
        }
    };
    let meta = file.metadata()?;
    if !meta.is_file() {
        return Ok(Found::Foreign("not a regular file"));
    }
    if meta.uid() != own_uid() {
        return Ok(Found::Foreign("of another user"));
    }
    let owner = owner(&file, name);
    match (file.try_lock(), &owner) {
        (Ok(()), _) => {}
        (Err(TryLockError::WouldBlock), Some(owner)) => return Ok(Found::Held(owner.clone())),
        (Err(TryLockError::WouldBlock), None) => return Ok(Found::Foreign(NOT_A_RECORD)),
        (Err(TryLockError::Error(error)), _) => return Err(error),
    }
    // The previous owner may have removed the record before this process got its lock.
    if !is_at(&path, &file).unwrap_or(false) {
        return Ok(Found::Absent);
    }
    if meta.nlink() != 1 {
        return Ok(Found::Foreign("a hard link to another file"));
    }
    Ok(match owner {
        Some(owner) => Found::Stale(StaleRecord { file, owner }),
        None => Found::Foreign(NOT_A_RECORD),
    })
}

/// Returns the owner in the record of a segment, such as `pid 1234`.
fn owner(record: &File, name: &SharedName) -> Option<String> {
    let mut text = String::new();
    record.take(MAX_RECORD).read_to_string(&mut text).ok()?;
    let (owner, segment) = text.trim().rsplit_once(' ')?;
    (owner.starts_with("pid ") && segment == name.as_str()).then(|| owner.to_owned())
}

/// Returns true if a path leads to an open file, without following links.
pub(super) fn is_at(path: &Path, file: &File) -> io::Result<bool> {
    let (there, ours) = (fs::symlink_metadata(path)?, file.metadata()?);
    Ok((there.dev(), there.ino()) == (ours.dev(), ours.ino()))
}

/// Returns the names for which there is a record.
fn recorded_names() -> impl Iterator<Item = SharedName> {
    let entries = fs::read_dir("/dev/shm").into_iter().flatten().flatten();
    entries.filter_map(|entry| SharedName::of_record(entry.file_name().to_str()?))
}

/// Returns the running server of this user whose segment has the name `label`, or that label with a suffix.
pub(super) fn holder(label: &SharedName) -> Option<(SharedName, String)> {
    let mut names = recorded_names().filter(|name| name.is_named_for(label));
    names.find_map(|name| match look(&name) {
        Ok(Found::Held(owner)) => Some((name, owner)),
        _ => None,
    })
}

/// Removes a stale segment and then its record, which this process has locked.
fn reclaim(name: &SharedName, record: StaleRecord) -> io::Result<StaleSegment> {
    let path = name.path();
    let own = |file: &File| {
        let meta = file.metadata();
        meta.is_ok_and(|meta| meta.is_file() && meta.uid() == own_uid())
    };
    // While the segment is open, removing its name frees no page and takes no time.
    let segment = open_plain(&path).ok().filter(own);
    if let Some(segment) = &segment
        && is_at(&path, segment).unwrap_or(false)
    {
        fs::remove_file(&path)?;
    }
    // The record is removed last: a segment without a record would look as if lmc had not made it.
    fs::remove_file(name.owner_path())?;
    drop(record.file);
    let bytes = segment.as_ref().and_then(|segment| segment.metadata().ok());
    Ok(StaleSegment {
        name: name.clone(),
        owner: record.owner,
        bytes: bytes.map_or(0, |meta| meta.blocks() * 512),
        _file: segment,
    })
}

impl Record {
    /// Makes the record of a name, after reclaiming a stale segment of that name.
    pub(super) fn create(name: &SharedName) -> Result<(Self, Option<StaleSegment>), ArenaError> {
        let path = name.owner_path();
        let fail = |source: io::Error| ArenaError::System {
            what: format!("making {}", path.display()),
            source: source.into(),
        };
        let mut reclaimed = None;
        for _ in 0..ATTEMPTS {
            match look(name).map_err(fail)? {
                Found::Absent => match Self::link(&path, name) {
                    Ok(this) => return Ok((this, reclaimed)),
                    Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                    Err(error) => return Err(fail(error)),
                },
                Found::Stale(record) => reclaimed = Some(reclaim(name, record).map_err(fail)?),
                Found::Held(owner) => {
                    return Err(ArenaError::Held {
                        name: name.clone(),
                        owner,
                    });
                }
                Found::Foreign(what) => {
                    return Err(ArenaError::ForeignRecord {
                        name: name.clone(),
                        what,
                    });
                }
            }
        }
        Err(ArenaError::Held {
            name: name.clone(),
            owner: "several processes are starting".to_owned(),
        })
    }

    /// Creates a locked record with this process's pid, and then links it to its name without replacing a
    /// file.
    fn link(path: &Path, name: &SharedName) -> io::Result<Self> {
        let new = path.with_file_name(format!(".lmc-{}", unpredictable()?));
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&new)?;
        let named = match file.try_lock() {
            Ok(()) => write!(file, "pid {} {name}", process::id()).and_then(|()| {
                renameat_with(CWD, &new, CWD, path, RenameFlags::NOREPLACE).map_err(io::Error::from)
            }),
            Err(error) => Err(error.into()),
        };
        if let Err(error) = named {
            let _ = fs::remove_file(&new);
            return Err(error);
        }
        Ok(Self {
            path: path.to_owned(),
            file,
        })
    }

    /// Returns true while the record has its name: after an operator's `rm`, another server may have taken
    /// the name.
    pub(super) fn is_in_place(&self) -> bool {
        is_at(&self.path, &self.file).unwrap_or(false)
    }

    /// Removes the record.
    pub(super) fn remove(&self) {
        let _ = fs::remove_file(&self.path);
    }
}
