//! Taking a folder for this process, if it holds a drive or nothing.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use crate::config::UNFINISHED_HEADER;
use crate::drive::HEADER_NAME;
use crate::error::DiskError;
use crate::format::DRIVE_MAGIC;
use crate::volume::PROBE;

/// Time that an open waits for a folder that is in use.
const TIMEOUT: Duration = Duration::from_millis(500);
/// Name of the file whose lock says that a folder is in use.
const LOCK: &str = "lock";
/// First bytes of the lock file, unless it is empty.
const SIGN: &[u8] = b"pid ";
/// Folder that a file system makes in its root.
const OF_THE_FILE_SYSTEM: &str = "lost+found";

/// Takes a folder until the file is closed. What is in it stays as it is; an empty one has the
/// file `lock` afterwards.
///
/// # Errors
/// [`DiskError::NotOurs`] for a folder that holds something else, before anything is done to it;
/// [`DiskError::Locked`] and [`DiskError::NotWritable`].
pub(crate) fn claim(path: &Path) -> Result<File, DiskError> {
    let refused = |source| DiskError::NotWritable {
        path: path.to_owned(),
        source,
    };
    if !may_be_ours(path).map_err(refused)? {
        let path = path.to_owned();
        return Err(DiskError::NotOurs { path });
    }
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        // A link may point to a file of another user, who has not asked for a lock.
        .custom_flags(libc::O_NOFOLLOW)
        .open(path.join(LOCK))
        .map_err(refused)?;
    let begun = Instant::now();
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) => {}
            Err(TryLockError::Error(error)) => return Err(refused(error)),
        }
        // The process that holds it may be ending.
        if begun.elapsed() < TIMEOUT {
            thread::sleep(Duration::from_millis(20));
            continue;
        }
        let mut owner = String::new();
        let _ = (&mut file).take(64).read_to_string(&mut owner);
        return Err(DiskError::Locked {
            path: path.to_owned(),
            owner: owner.trim().to_owned(),
        });
    }
}

/// Writes into the lock of a folder that is known to be ours who has it. That is for people, so
/// a full file system does not matter.
pub(crate) fn sign(lock: &File) {
    let name = format!("pid {}", std::process::id());
    let _ = lock.set_len(0);
    let _ = lock.write_all_at(name.as_bytes(), 0);
}

/// Returns true if a folder holds a drive, or only the files that an unfinished creation left.
pub(crate) fn may_be_ours(path: &Path) -> io::Result<bool> {
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        let is_file = entry.file_type()?.is_file();
        let known = match entry.file_name().to_str() {
            Some(LOCK) => is_file && is_lock(&entry.path())?,
            Some(OF_THE_FILE_SYSTEM) => !is_file,
            Some(name) => is_file && (name == UNFINISHED_HEADER || name.starts_with(PROBE)),
            None => false,
        };
        if !known {
            // Looked at last: another process may be making the drive.
            return is_header(&path.join(HEADER_NAME));
        }
    }
    Ok(true)
}

/// Returns true if a file exists, is not a link, and begins as a drive's header.
fn is_header(path: &Path) -> io::Result<bool> {
    match fs::symlink_metadata(path) {
        Ok(about) => Ok(about.is_file() && begin(path, &DRIVE_MAGIC)? == DRIVE_MAGIC),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Returns true if a file is empty or holds what [`sign`] writes.
fn is_lock(path: &Path) -> io::Result<bool> {
    let begin = begin(path, SIGN)?;
    Ok(begin.is_empty() || begin == SIGN)
}

/// The first bytes of a file, as many as these, or fewer if there are no more.
fn begin(path: &Path, expected: &[u8]) -> io::Result<Vec<u8>> {
    let mut begin = Vec::new();
    let len = expected.len() as u64;
    File::open(path)?.take(len).read_to_end(&mut begin)?;
    Ok(begin)
}
