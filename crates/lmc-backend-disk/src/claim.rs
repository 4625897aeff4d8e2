//! The claim of a folder for this process, if the folder is empty or has a drive.
//!
//! Both the folder itself and the file `lock` in it are locked (flock). The file is needed because some file
//! systems cannot lock folders, and it names the process that uses the folder. The folder's lock is needed
//! because a program that removes files cannot remove it.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use tracing::debug;

use crate::clears_file::CLEARS_NAME;
use crate::error::DiskError;
use crate::files::{HEADER_NAME, UNFINISHED_HEADER};
use crate::format::{BLOCK_LEN, DRIVE_MAGIC};
use crate::log::is_numbered;
use crate::set::SET_NAME;
use crate::spaces::SPACES_NAME;
use crate::volume::{PROBE, difference};

/// Time that an open waits for a folder that is in use.
const TIMEOUT: Duration = Duration::from_millis(500);
/// Name of the file that names the process that uses the folder.
const LOCK: &str = "lock";
/// First bytes of the lock file, unless it is empty.
const SIGN: &[u8] = b"pid ";
/// Folder that a file system creates in its root.
const OF_THE_FILE_SYSTEM: &str = "lost+found";
/// First bytes of every file of a drive to which something was written.
const OURS: &[u8] = b"LMC";

/// A folder that this process has locked, until this is dropped.
#[derive(Debug)]
pub(crate) struct Claim {
    /// Absolute path without links.
    path: PathBuf,
    folder: File,
    lock: File,
}

impl Claim {
    /// Claims a folder. Its content stays as it is; an empty folder has the file `lock` afterwards.
    ///
    /// # Errors
    /// [`DiskError::NotOurs`] for a folder with other content, before anything in it is changed;
    /// [`DiskError::Locked`] and [`DiskError::NotWritable`].
    pub(crate) fn new(path: &Path) -> Result<Self, DiskError> {
        let refused = |source: io::Error| DiskError::NotWritable {
            path: path.to_owned(),
            source: source.into(),
        };
        if content(path).map_err(refused)? == Content::Other {
            let path = path.to_owned();
            return Err(DiskError::NotOurs { path });
        }
        let absolute = fs::canonicalize(path).map_err(refused)?;
        let folder = File::open(&absolute).map_err(refused)?;
        let locked = || DiskError::Locked {
            path: path.to_owned(),
            owner: owner(path),
        };
        match lock_soon(&folder) {
            Ok(true) => {}
            Ok(false) => return Err(locked()),
            Err(error) => debug!(path = %path.display(), %error, "cannot lock the folder itself"),
        }
        let lock = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            // A link may point to a file of another user, who has not agreed to a lock on it.
            .custom_flags(libc::O_NOFOLLOW)
            .open(path.join(LOCK))
            .map_err(refused)?;
        if !lock_soon(&lock).map_err(refused)? {
            return Err(locked());
        }
        Ok(Self {
            path: absolute,
            folder,
            lock,
        })
    }

    /// Writes the name of this process into the lock file of a folder that is known to belong to lmc. The
    /// text is for people, so a full file system does not matter.
    pub(crate) fn sign(&self) {
        let name = format!("pid {}", std::process::id());
        let _ = self.lock.set_len(0);
        let _ = self.lock.write_all_at(name.as_bytes(), 0);
    }

    /// Returns what has changed at the folder's path; `None` while the path leads to this folder with its
    /// lock.
    pub(crate) fn changed(&self) -> Option<String> {
        let path = self.path.display();
        if let Some(how) = difference(Some(&self.folder), &self.path, 0) {
            return Some(format!("the folder {path} {how}"));
        }
        let how = difference(Some(&self.lock), &self.path.join(LOCK), 0)?;
        Some(format!("`{LOCK}` in {path} {how}"))
    }

    /// Writes the drive's header if it is missing or truncated, so that the next start opens the remaining
    /// files, or an empty drive if the folder was created again. Returns false without writing if the folder
    /// is on another file system than the drive was (the drive's file system may not be mounted), or if it
    /// has files that are not lmc's.
    pub(crate) fn restore_header(&self, header: &[u8]) -> io::Result<bool> {
        let here = File::open(&self.path)?;
        if here.metadata()?.dev() != self.folder.metadata()?.dev() {
            return Ok(false);
        }
        // The folder that was opened, whatever the path leads to by now.
        let path = PathBuf::from(format!("/proc/self/fd/{}", here.as_raw_fd()));
        if !matches!(content(&path)?, Content::Nothing | Content::Remains(_)) {
            return Ok(false);
        }
        let unfinished = path.join(UNFINISHED_HEADER);
        let mut file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW)
            .open(&unfinished)?;
        file.write_all(header)?;
        file.sync_all()?;
        fs::rename(&unfinished, path.join(HEADER_NAME))?;
        here.sync_all()?;
        Ok(true)
    }
}

/// Locks a file or a folder. Returns false if another process keeps the lock beyond the timeout.
fn lock_soon(file: &File) -> io::Result<bool> {
    let begun = Instant::now();
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(true),
            Err(TryLockError::WouldBlock) if begun.elapsed() < TIMEOUT => {
                thread::sleep(Duration::from_millis(20));
            }
            Err(TryLockError::WouldBlock) => return Ok(false),
            Err(TryLockError::Error(error)) => return Err(error),
        }
    }
}

/// Returns the process that uses a folder, according to its lock file.
fn owner(path: &Path) -> String {
    match begin(&path.join(LOCK), 64) {
        Ok(owner) if !owner.is_empty() => String::from_utf8_lossy(&owner).trim().to_owned(),
        _ => format!("`{LOCK}` does not name it"),
    }
}

/// Content of a folder, as far as it decides what lmc may do with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    /// No files, or only files of an unfinished creation.
    Nothing,
    /// A drive.
    Drive,
    /// Files of a drive, with these names, whose header is missing or truncated.
    Remains(Vec<String>),
    /// Files or folders that are not lmc's.
    Other,
}

/// Returns the content of a folder.
pub(crate) fn content(path: &Path) -> io::Result<Content> {
    let header = path.join(HEADER_NAME);
    if is_header(&header)? {
        return Ok(Content::Drive);
    }
    let (mut remains, mut is_proven, mut is_other) = (Vec::new(), false, false);
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        let is_file = entry.file_type()?.is_file();
        let path = entry.path();
        is_other |= match entry.file_name().into_string() {
            Ok(name) if name == LOCK => !(is_file && is_lock(&path)?),
            Ok(name) if name == OF_THE_FILE_SYSTEM => is_file,
            Ok(name) if name == UNFINISHED_HEADER || name.starts_with(PROBE) => !is_file,
            Ok(name) if is_file && is_name_of_ours(&name) => {
                let begin = begin(&path, DRIVE_MAGIC.len() as u64)?;
                let (is_ours, is_blank) =
                    (begin.starts_with(OURS), begin.iter().all(|&byte| byte == 0));
                is_proven |= is_ours;
                remains.push(name);
                !is_ours && !is_blank
            }
            _ => true,
        };
        if is_other {
            break;
        }
    }
    // Checked once more: another process may be creating the drive.
    if is_header(&header)? {
        return Ok(Content::Drive);
    }
    Ok(match remains.is_empty() {
        _ if is_other => Content::Other,
        true => Content::Nothing,
        false if is_proven => Content::Remains(remains),
        // Names like these alone may be those of any program.
        false => Content::Other,
    })
}

/// Removes the files of [`Content::Remains`], except the map of clears, so that the clears stay known.
pub(crate) fn remove_remains(path: &Path, names: &[String]) -> io::Result<()> {
    let names = names.iter().filter(|name| *name != CLEARS_NAME);
    names
        .map(|name| path.join(name))
        .try_for_each(fs::remove_file)
}

/// Returns true for names of a drive's files, complete or not.
fn is_name_of_ours(name: &str) -> bool {
    let whole = name.strip_suffix(".unfinished").unwrap_or(name);
    let small = [
        HEADER_NAME,
        SET_NAME,
        CLEARS_NAME,
        SPACES_NAME,
        "checkpoint",
    ];
    small.contains(&whole) || is_numbered(name)
}

/// Returns true if a file exists, is not a link, and has the length and the first bytes of a drive's header.
fn is_header(path: &Path) -> io::Result<bool> {
    match fs::symlink_metadata(path) {
        Ok(about) => Ok(about.is_file()
            && about.len() >= BLOCK_LEN as u64
            && begin(path, DRIVE_MAGIC.len() as u64)? == DRIVE_MAGIC),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Returns true if a file is empty or has the text that [`Claim::sign`] writes.
fn is_lock(path: &Path) -> io::Result<bool> {
    let begin = begin(path, SIGN.len() as u64)?;
    Ok(begin.is_empty() || begin == SIGN)
}

/// Returns the first `len` bytes of a file, or fewer if the file is shorter.
fn begin(path: &Path, len: u64) -> io::Result<Vec<u8>> {
    let mut begin = Vec::new();
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW)
        .open(path)?;
    file.take(len).read_to_end(&mut begin)?;
    Ok(begin)
}
