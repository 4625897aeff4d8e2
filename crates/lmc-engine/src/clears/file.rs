//! The state file: a copy of the map of clears outside all tiers.

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, SyncSender};
use std::thread;
use std::time::Duration;

use lmc_backend::{Clears, TooManyClears};
use parking_lot::Mutex;
use thiserror::Error;
use xxhash_rust::xxh3::xxh3_64;

/// Subfolder of a state folder that has the files.
const FOLDER: &str = "clears";
const MAGIC: [u8; 8] = *b"LMCCLRST";
const VERSION: u32 = 1;
const HEAD_LEN: usize = 16;
const UNFINISHED: &str = ".unfinished";
const LOCK: &str = ".lock";
/// Longest wait for a write. A file system that hangs must not block a clear.
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);

/// Reason why the clears are not known.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum StateFileError {
    /// Another process with this name is running.
    #[error(
        "{} is locked by another process: give each daemon of this host a --state-dir of its own",
        path.display()
    )]
    Locked {
        /// The file.
        path: PathBuf,
    },
    /// The file or its folder cannot be read or created.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// Cause of the failure.
        source: Arc<io::Error>,
    },
    /// The file does not have the format of lmc.
    #[error(
        "{} is damaged or from another version of lmc: remove it, and run `lmc clear` once the \
         server runs unless nothing was ever cleared",
        path.display()
    )]
    Damaged {
        /// The file.
        path: PathBuf,
    },
    /// The files together have more clears than a map can hold.
    #[error(transparent)]
    TooMany(#[from] TooManyClears),
}

impl StateFileError {
    fn io(path: &Path) -> impl Fn(io::Error) -> Self {
        move |source| Self::Io {
            path: path.to_owned(),
            source: source.into(),
        }
    }
}

/// The state file of one daemon. Created at the first clear, and locked from then on.
#[derive(Debug)]
pub(super) struct StateFile {
    /// Channel to the writing thread, which ends when this sender is dropped.
    writes: SyncSender<(Arc<Clears>, SyncSender<io::Result<()>>)>,
    lock: Arc<Mutex<Option<File>>>,
    path: PathBuf,
}

impl StateFile {
    /// Opens the file, and reads it and the files of the same name in other folders.
    pub(super) fn open(
        folder: &Path,
        name: &str,
        others: &[PathBuf],
    ) -> Result<(Self, Clears), StateFileError> {
        let path = folder.join(FOLDER).join(name);
        let lock = match path.exists() {
            true => Some(take_lock(&path)?),
            false => None,
        };
        let lock = Arc::new(Mutex::new(lock));
        let mut clears = read(&path)?;
        clears.join(&read_all(name, others)?)?;
        let (writes, asked) = mpsc::sync_channel::<(Arc<Clears>, SyncSender<_>)>(1);
        let (to, held) = (path.clone(), Arc::clone(&lock));
        thread::Builder::new()
            .name("lmc-state".to_owned())
            .spawn(move || {
                for (clears, done) in asked {
                    // The caller may have stopped waiting.
                    let _ = done.send(write(&to, &mut held.lock(), &clears));
                }
            })
            .map_err(StateFileError::io(&path))?;
        Ok((Self { writes, lock, path }, clears))
    }

    /// Writes the map durably. Returns false, and logs a line, if that failed.
    pub(super) fn write(&self, clears: &Arc<Clears>) -> bool {
        let (done, written) = mpsc::sync_channel(1);
        let asked = self.writes.try_send((Arc::clone(clears), done));
        let late = |_| io::Error::from(io::ErrorKind::TimedOut);
        let written = match asked {
            Ok(()) => written
                .recv_timeout(WRITE_TIMEOUT)
                .unwrap_or_else(|e| Err(late(e))),
            Err(_) => Err(io::Error::from(io::ErrorKind::TimedOut)),
        };
        if let Err(error) = &written {
            tracing::warn!(
                path = %self.path.display(),
                %error,
                "a clear is not in the state file: a restart may serve chunks that drives and stores have from before the clear; make the folder writable and clear again"
            );
        }
        written.is_ok()
    }
}

impl Drop for StateFile {
    /// Unlocks the file for the next daemon of the name, unless a write hangs.
    fn drop(&mut self) {
        if let Some(mut lock) = self.lock.try_lock_for(WRITE_TIMEOUT) {
            *lock = None;
        }
    }
}

/// Creates a folder that a server of another user can read: its content is not secret.
fn make(folder: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o755).create(folder)
}

/// Reads the files of one name in several folders.
pub(super) fn read_all(name: &str, folders: &[PathBuf]) -> Result<Clears, StateFileError> {
    let mut clears = Clears::default();
    for folder in folders {
        let path = folder.join(FOLDER).join(name);
        match read(&path) {
            Ok(theirs) => _ = clears.join(&theirs)?,
            // For example the home of another user: the clears of that user's servers do not concern this
            // one.
            Err(StateFileError::Io { source, .. })
                if source.kind() == io::ErrorKind::PermissionDenied =>
            {
                tracing::warn!(path = %path.display(), "no permission to read this state file; its clears are ignored");
            }
            Err(error) => return Err(error),
        }
    }
    Ok(clears)
}

fn is_absent(error: &io::Error) -> bool {
    use io::ErrorKind::{NotADirectory, NotFound};
    matches!(error.kind(), NotFound | NotADirectory)
}

/// Returns the clears in a file; none if the file does not exist.
fn read(path: &Path) -> Result<Clears, StateFileError> {
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if is_absent(&error) => return Ok(Clears::default()),
        Err(error) => return Err(StateFileError::io(path)(error)),
    };
    decode(&bytes).ok_or_else(|| StateFileError::Damaged {
        path: path.to_owned(),
    })
}

fn with_end(path: &Path, end: &str) -> PathBuf {
    let mut path = path.as_os_str().to_owned();
    path.push(end);
    path.into()
}

fn take_lock(path: &Path) -> Result<File, StateFileError> {
    let locked = with_end(path, LOCK);
    let lock = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(&locked)
        .map_err(StateFileError::io(&locked))?;
    match lock.try_lock() {
        Ok(()) => Ok(lock),
        Err(TryLockError::WouldBlock) => Err(StateFileError::Locked {
            path: path.to_owned(),
        }),
        Err(TryLockError::Error(source)) => Err(StateFileError::io(&locked)(source)),
    }
}

/// Replaces the file with one that has this map, even if the folder was removed meanwhile.
fn write(path: &Path, lock: &mut Option<File>, clears: &Clears) -> io::Result<()> {
    let folder = path.parent().expect("the file lies in a folder");
    if !folder.is_dir() {
        make(folder)?;
        // The lock was removed with the folder.
        *lock = None;
        // The folder's own directory entry must be as durable as the file.
        for folder in folder.ancestors().skip(1).take(2) {
            if let Ok(folder) = File::open(folder) {
                folder.sync_all()?;
            }
        }
    }
    if lock.is_none() {
        *lock = Some(take_lock(path).map_err(io::Error::other)?);
    }
    let unfinished = with_end(path, UNFINISHED);
    // A leftover of a killed process, or a link of someone else.
    match fs::remove_file(&unfinished) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o644)
        .open(&unfinished)?;
    file.write_all(&encode(clears))?;
    file.sync_all()?;
    fs::rename(&unfinished, path)?;
    File::open(folder)?.sync_all()
}

/// Returns the bytes of the file: magic (8), version (4), zero (4), the map, and a checksum (8) of all
/// preceding bytes.
fn encode(clears: &Clears) -> Vec<u8> {
    let mut bytes = Vec::from(MAGIC);
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend([0; 4]);
    bytes.extend(clears.encode());
    bytes.extend(xxh3_64(&bytes).to_le_bytes());
    bytes
}

fn decode(bytes: &[u8]) -> Option<Clears> {
    let (body, sum) = bytes.split_last_chunk()?;
    let (head, map) = body.split_at_checked(HEAD_LEN)?;
    let is_ours = head[..8] == MAGIC
        && head[8..12] == VERSION.to_le_bytes()
        && head[12..] == [0; 4]
        && xxh3_64(body) == u64::from_le_bytes(*sum);
    Clears::decode(map).ok().filter(|_| is_ours)
}

#[cfg(test)]
mod tests {
    use lmc_backend::StartId;
    use lmc_testkit::Folder;

    use super::*;

    fn clears(n: u8) -> Arc<Clears> {
        let entry = (StartId::new([n; 16]), u64::from(n));
        Arc::new(Clears::from_entries([entry]).expect("one"))
    }

    #[test]
    fn what_was_written_is_known_at_the_next_start_of_the_same_name() {
        let folder = Folder::temporary();
        let (file, before) = StateFile::open(&folder, "a", &[]).expect("new");
        assert!(before.is_empty());
        assert!(!folder.join(FOLDER).exists(), "nothing was cleared");
        assert!(file.write(&clears(1)) && file.write(&clears(2)));
        let locked = StateFile::open(&folder, "a", &[]);
        assert!(
            matches!(locked, Err(StateFileError::Locked { .. })),
            "{locked:?}"
        );
        let (other, beside) = StateFile::open(&folder, "b", &[]).expect("another name");
        assert!(beside.is_empty(), "another daemon");
        drop((file, other));
        let elsewhere = Folder::temporary();
        let others = [folder.to_path_buf(), folder.join("not there")];
        let (_, known) = StateFile::open(&elsewhere, "a", &others).expect("new");
        assert_eq!(known, *clears(2));
    }

    #[test]
    fn a_file_that_cannot_be_read_is_an_error_and_one_that_is_not_there_is_none() {
        let (one, other) = (Folder::temporary(), Folder::temporary());
        let (file, _) = StateFile::open(&one, "a", &[]).expect("new");
        assert!(file.write(&clears(2)));
        let folders = [other.to_path_buf(), one.to_path_buf()];
        assert_eq!(read_all("a", &folders).expect("read"), *clears(2));
        fs::create_dir_all(other.join(FOLDER).join("a")).expect("a folder with the name of a file");
        let unread = read_all("a", &folders);
        assert!(
            matches!(unread, Err(StateFileError::Io { .. })),
            "{unread:?}"
        );
    }

    #[test]
    fn a_damaged_file_is_an_error_and_an_unfinished_one_is_none() {
        let folder = Folder::temporary();
        let (file, _) = StateFile::open(&folder, "a", &[]).expect("new");
        assert!(file.write(&clears(3)));
        drop(file);
        let path = folder.join(FOLDER).join("a");
        fs::write(folder.join(FOLDER).join("b.unfinished"), b"half").expect("written");
        assert!(StateFile::open(&folder, "a", &[]).is_ok());
        let good = fs::read(&path).expect("read");
        for at in 0..good.len() {
            let mut bytes = good.clone();
            bytes[at] ^= 1;
            assert_eq!(decode(&bytes), None, "byte {at}");
            assert_eq!(decode(&good[..at]), None, "cut at {at}");
        }
        fs::write(&path, &good[..9]).expect("written");
        let damaged = StateFile::open(&folder, "a", &[]);
        assert!(
            matches!(damaged, Err(StateFileError::Damaged { .. })),
            "{damaged:?}"
        );
    }

    #[test]
    fn a_folder_that_was_removed_is_made_again_and_one_that_cannot_be_is_said() {
        let folder = Folder::temporary();
        let (file, _) = StateFile::open(&folder, "a", &[]).expect("new");
        fs::remove_dir_all(&folder).expect("removed");
        assert!(file.write(&clears(1)));
        fs::remove_dir_all(&folder).expect("removed");
        fs::write(&folder, b"a file").expect("written");
        assert!(!file.write(&clears(1)));
        fs::remove_file(&folder).expect("removed");
    }
}
