//! A volume in a real directory.

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Weak};

use lmc_memory::Arena;
use memmap2::{Advice, Mmap};
use parking_lot::Mutex;
use rustix::fs::{FallocateFlags, OFlags, fallocate, fcntl_setfl};
use rustix::io::{Errno, retry_on_intr};

use super::engine::Engine;
use super::task::{OpenFile, Task, stopped};
use super::threads::{self, Threads};
use super::uring::Uring;
use super::{AlignedBuf, BLOCK, FileId, Volume, VolumeOp, difference, system};
use crate::DiskIo;

/// Prefix of the names of files that test direct I/O; a killed process may leave them.
pub(crate) const PROBE: &str = ".lmc-probe-";

/// Configuration of a folder volume.
#[derive(Clone, Debug)]
pub(crate) struct FolderConfig {
    /// The I/O engine. Default: [`DiskIo::Auto`].
    pub(crate) engine: DiskIo,
    /// Most operations that the kernel is given at a time (io_uring), from 1 to 4096. Default: 64.
    pub(crate) depth: u32,
    /// Number of threads of the thread engine, at least 1. Default: 8.
    pub(crate) threads: usize,
    /// The pool's memory, which is registered with the ring once its prefault has finished. Registration
    /// makes an arena without a prefault present. Default: none.
    pub(crate) arena: Option<Arc<Arena>>,
}

impl Default for FolderConfig {
    fn default() -> Self {
        Self {
            engine: DiskIo::Auto,
            depth: 64,
            threads: 8,
            arena: None,
        }
    }
}

/// A file in the state in which this volume has left it.
#[derive(Clone, Debug)]
struct Left {
    len: u64,
    /// The file, while it is open.
    open: Weak<OpenFile>,
}

/// A directory whose files bypass the page cache if the file system supports that.
#[derive(Debug)]
pub(crate) struct FolderVolume {
    path: PathBuf,
    /// Kept open to sync the names.
    dir: File,
    direct: bool,
    engine: Box<dyn Engine>,
    /// Reason why another engine than the configured one is used; empty if there is none.
    instead: String,
    files: Mutex<HashMap<FileId, Arc<OpenFile>>>,
    /// Files that this volume has opened or read, by name. A name is not in the map while it is being
    /// changed.
    names: Mutex<BTreeMap<String, Left>>,
    next_id: AtomicU32,
    stopped: AtomicBool,
}

impl FolderVolume {
    /// Opens an existing, writable directory, and starts the engine.
    pub(crate) fn open(path: &Path, config: FolderConfig) -> io::Result<Self> {
        // Stored as absolute path: the process may change its directory.
        let path = fs::canonicalize(path)?;
        let dir = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_DIRECTORY)
            .open(&path)?;
        let direct = can_do_direct(&path)?;
        let FolderConfig {
            engine,
            depth,
            threads,
            arena,
        } = config;
        let (engine, instead): (Box<dyn Engine>, _) = match engine {
            DiskIo::Threads => (Box::new(Threads::start(threads)?), String::new()),
            DiskIo::Uring => (Box::new(Uring::start(depth, arena)?), String::new()),
            DiskIo::Auto => match Uring::start(depth, arena) {
                Ok(uring) => (Box::new(uring), String::new()),
                Err(error) => (
                    Box::new(Threads::start(threads)?),
                    format!(" (io_uring: {error})"),
                ),
            },
        };
        Ok(Self {
            path,
            dir,
            direct,
            engine,
            instead,
            files: Mutex::new(HashMap::new()),
            names: Mutex::new(BTreeMap::new()),
            next_id: AtomicU32::new(0),
            stopped: AtomicBool::new(false),
        })
    }

    /// Returns the path of a file, if the name is valid.
    fn at(&self, name: &str) -> io::Result<PathBuf> {
        if matches!(name, "" | "." | "..") || name.contains(['/', '\0']) {
            let why = format!("{name:?} is not the name of a file in a folder");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        Ok(self.path.join(name))
    }

    /// Opens or creates (but never both) a file, with direct I/O if that works.
    fn open_file(&self, path: &Path, make: bool) -> io::Result<OpenFile> {
        let open = |flags| {
            OpenOptions::new()
                .read(true)
                .write(true)
                .create_new(make)
                .mode(0o600)
                .custom_flags(flags | libc::O_NOFOLLOW)
                .open(path)
        };
        let (file, direct) = if self.direct {
            match open(libc::O_DIRECT) {
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => (open(0)?, false),
                opened => (opened?, true),
            }
        } else {
            (open(0)?, false)
        };
        if !file.metadata()?.is_file() {
            let why = format!("{} is not a regular file", path.display());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        Ok(OpenFile::new(file, direct))
    }

    /// Creates a file of `len` allocated bytes, or extends an existing one to that length.
    fn make_file(&self, path: &Path, len: u64) -> io::Result<OpenFile> {
        let (file, is_new) = match self.open_file(path, true) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                (self.open_file(path, false)?, false)
            }
            made => (made?, true),
        };
        if let Err(error) = allocate(&file.file, len) {
            if is_new {
                // The error to report is the one at hand.
                let _ = fs::remove_file(path);
            }
            return Err(error);
        }
        Ok(file)
    }
}

fn allocate(file: &File, len: u64) -> io::Result<()> {
    if len == 0 {
        return Ok(());
    }
    match retry_on_intr(|| fallocate(file, FallocateFlags::empty(), 0, len)) {
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => {
            if file.metadata()?.len() < len {
                file.set_len(len)?;
            }
            Ok(())
        }
        taken => Ok(taken?),
    }
}

/// Returns true if a block can be written and read with direct I/O in this directory. Returns errors other
/// than a refusal of direct I/O.
fn can_do_direct(path: &Path) -> io::Result<bool> {
    let file = probe_file(path)?;
    let set = fcntl_setfl(&file, OFlags::DIRECT).map_err(io::Error::from);
    let tried = set.and_then(|()| {
        let mut block = AlignedBuf::new(BLOCK);
        file.write_at(&block, 0)?;
        file.read_at(&mut block, 0)
    });
    match tried {
        Ok(_) => Ok(true),
        Err(error) => match error.raw_os_error() {
            Some(libc::EINVAL | libc::EOPNOTSUPP) => Ok(false),
            // A full drive accepted the flag, and that is the answer.
            Some(libc::ENOSPC | libc::EDQUOT) => Ok(true),
            _ => Err(error),
        },
    }
}

/// Makes a file without a name.
fn probe_file(path: &Path) -> io::Result<File> {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o600);
    if let Ok(file) = options.clone().custom_flags(libc::O_TMPFILE).open(path) {
        return Ok(file);
    }
    // Not every file system supports that; then the file has a name for a moment.
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let path = path.join(format!("{PROBE}{}-{count}", std::process::id()));
    let file = options
        .create(true)
        .custom_flags(libc::O_NOFOLLOW)
        .open(&path)?;
    fs::remove_file(&path)?;
    Ok(file)
}

impl Volume for FolderVolume {
    fn list(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.path)? {
            let entry = entry?;
            // Names that are not UTF-8 are not lmc's.
            let Ok(name) = entry.file_name().into_string() else {
                continue;
            };
            let is_file = match entry.file_type() {
                Ok(kind) => kind.is_file(),
                // The file was removed meanwhile.
                Err(error) if error.kind() == io::ErrorKind::NotFound => false,
                Err(error) => return Err(error),
            };
            if is_file && !name.starts_with(PROBE) {
                names.push(name);
            }
        }
        Ok(names)
    }

    fn read_all(&self, name: &str) -> io::Result<Box<dyn AsRef<[u8]>>> {
        let path = self.at(name)?;
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NOFOLLOW)
            .open(&path)?;
        let about = file.metadata()?;
        if !about.is_file() {
            let why = format!("{} is not a regular file", path.display());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        let left = Left {
            len: about.len(),
            open: Weak::new(),
        };
        self.names.lock().entry(name.to_owned()).or_insert(left);
        if about.len() == 0 {
            return Ok(Box::new([]));
        }
        // SAFETY: the file is neither written nor cut: the caller says so of this process, and the
        // lock on the directory keeps other servers away.
        let map = unsafe { Mmap::map(&file) }?;
        // An unreadable sector is an error here. At a later access it would be a SIGBUS.
        match map.advise(Advice::PopulateRead) {
            Ok(()) => Ok(Box::new(map)),
            // Kernels before 5.14 do not support this, nor does every file system.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                Ok(Box::new(fs::read(&path)?))
            }
            Err(error) => Err(error),
        }
    }

    fn open(&self, name: &str, make: Option<u64>) -> io::Result<FileId> {
        let path = self.at(name)?;
        let file = match make {
            Some(len) => self.make_file(&path, len)?,
            None => self.open_file(&path, false)?,
        };
        let id = FileId(self.next_id.fetch_add(1, Ordering::Relaxed));
        let file = Arc::new(file);
        let left = Left {
            len: file.file.metadata()?.len(),
            open: Arc::downgrade(&file),
        };
        self.names.lock().insert(name.to_owned(), left);
        self.files.lock().insert(id, file);
        Ok(id)
    }

    fn close(&self, file: FileId) {
        let Some(open) = self.files.lock().remove(&file) else {
            return;
        };
        // In this order, so that a late operation leaves nothing in the engine.
        open.set_closed();
        self.engine.forget(file);
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let left = {
            let mut names = self.names.lock();
            names.remove(to);
            names.remove(from)
        };
        fs::rename(self.at(from)?, self.at(to)?)?;
        if let Some(left) = left {
            self.names.lock().insert(to.to_owned(), left);
        }
        Ok(())
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.names.lock().remove(name);
        fs::remove_file(self.at(name)?)
    }

    fn sync_names(&self) -> io::Result<()> {
        self.dir.sync_all()
    }

    fn changed(&self) -> Option<String> {
        let names = self.names.lock().clone();
        let changed = names.into_iter().filter_map(|(name, left)| {
            let open = left.open.upgrade();
            let open = open.as_ref().map(|open| &open.file);
            let how = difference(open, &self.path.join(&name), left.len)?;
            // This volume may have changed the file meanwhile.
            let names = self.names.lock();
            let same = names
                .get(&name)
                .is_some_and(|now| now.len == left.len && Weak::ptr_eq(&now.open, &left.open));
            same.then(|| format!("`{name}` in {} {how}", self.path.display()))
        });
        let mut changed = changed.fuse();
        let first = changed.next()?;
        Some(match changed.count() {
            0 => first,
            others => format!("{first} (and {others} other files changed)"),
        })
    }

    fn free(&self) -> io::Result<u64> {
        system::free_bytes(&self.path)
    }

    fn submit(&self, ops: Vec<VolumeOp>) {
        if ops.is_empty() {
            return;
        }
        let files = self.files.lock();
        let tasks: Vec<_> = ops
            .into_iter()
            .map(|op| {
                let file = files.get(&op.file).cloned();
                Task::new(op, file)
            })
            .collect();
        drop(files);
        self.engine.submit(tasks);
    }

    fn carry_out(&self, op: VolumeOp) {
        let file = self.files.lock().get(&op.file).cloned();
        let task = Task::new(op, file);
        match self.stopped.load(Ordering::Acquire) {
            true => task.end(Err(stopped())),
            false => threads::carry_out(task),
        }
    }

    fn describe(&self) -> String {
        let way = if self.direct {
            "direct I/O"
        } else {
            "page cache"
        };
        let (name, details) = (self.engine.name(), self.engine.details());
        format!("{name}{}, {way}{details}", self.instead)
    }

    fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        self.engine.stop();
    }
}

#[cfg(test)]
mod tests;
