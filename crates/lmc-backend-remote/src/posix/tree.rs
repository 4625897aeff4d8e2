//! Paths below the root folder. Links there are not followed, because other users may write to the folder.

use std::ffi::{CStr, CString};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;

/// Permissions of new files and folders, minus the umask.
const FILE_MODE: Mode = Mode::from_raw_mode(0o666);
const FOLDER_MODE: Mode = Mode::from_raw_mode(0o777);

/// The root folder. It is opened at the first operation, so that a file system that hangs blocks a thread of
/// the store and not the start of a server.
#[derive(Debug)]
pub(super) struct Tree {
    root: PathBuf,
    opened: Mutex<Opened>,
    has_openat2: AtomicBool,
}

#[derive(Debug, Default)]
struct Opened {
    folder: Option<Arc<OwnedFd>>,
    /// Mount point of the file system on which the folder was when it was last opened.
    mount: Option<PathBuf>,
}

impl Tree {
    pub(super) fn new(root: PathBuf) -> Self {
        Self {
            root,
            opened: Mutex::default(),
            has_openat2: AtomicBool::new(true),
        }
    }

    /// Returns the path of the root, for an operator.
    pub(super) fn root_path(&self) -> &Path {
        &self.root
    }

    fn root(&self) -> io::Result<Arc<OwnedFd>> {
        if let Some(root) = &self.opened.lock().folder {
            return Ok(Arc::clone(root));
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let opened = rustix::fs::openat(CWD, &self.root, flags, Mode::empty());
        let opened = opened.map_err(|error| {
            let root = self.root.display();
            let error = io::Error::from(error);
            io::Error::new(
                error.kind(),
                format!("{root}: {error}; mount the file system and create the folder"),
            )
        })?;
        let folder = Arc::new(opened);
        let mount = mount_point(&self.root)?;
        let mut opened = self.opened.lock();
        match &opened.mount {
            // A folder at the mount point now belongs to another file system, such as the host's own.
            Some(before) if *before != mount && before.starts_with(&mount) => {
                let (root, before) = (self.root.display(), before.display());
                return Err(io::Error::other(format!(
                    "{root}: the file system of {before} is not mounted any more; mount it again, or \
                     restart to use what is there without it"
                )));
            }
            None if mount == Path::new("/") && is_empty(&folder) => tracing::warn!(
                folder = %self.root.display(),
                "the folder of the shared store is empty and on the root file system of this host, \
                 whose capacity the chunks use: mount the shared file system there, which is used \
                 from then on, or set --remote-size"
            ),
            _ => {}
        }
        opened.mount = Some(mount);
        opened.folder = Some(Arc::clone(&folder));
        Ok(folder)
    }

    /// Opens the root again if its path now leads to another folder, because the folder was removed and
    /// created again, or a file system was mounted there. Otherwise, files would be written to a folder that
    /// no other process sees.
    ///
    /// # Errors
    /// The path leads nowhere.
    pub(super) fn refresh(&self) -> io::Result<()> {
        let Some(folder) = self.opened.lock().folder.clone() else {
            return Ok(());
        };
        let id = |stat: Stat| (stat.st_dev, stat.st_ino);
        let (held, now) = (rustix::fs::fstat(&*folder), rustix::fs::stat(&self.root));
        if let (Ok(held), Ok(now)) = (held, now)
            && id(held) == id(now)
        {
            return Ok(());
        }
        self.opened.lock().folder = None;
        self.root()?;
        tracing::warn!(
            folder = %self.root.display(),
            "the folder of the shared store was replaced, or a file system was mounted there: it is \
             used from now on, and chunks of the one before are not found"
        );
        Ok(())
    }

    /// Runs an operation, and once more with a new root if the old one is unusable: the server no longer
    /// knows it, or the process that had mounted it has ended.
    fn with_root<T>(&self, run: impl Fn(&OwnedFd) -> Result<T, Errno>) -> io::Result<T> {
        let root = self.root()?;
        match run(&root) {
            Err(Errno::STALE | Errno::NOTCONN | Errno::SHUTDOWN) => {
                self.opened.lock().folder = None;
                Ok(run(&*self.root()?)?)
            }
            result => Ok(result?),
        }
    }

    /// Opens an existing file or folder. Never waits for the other end of a pipe.
    pub(super) fn open(&self, path: &str, flags: OFlags) -> io::Result<OwnedFd> {
        self.with_root(|root| self.open_below(root, path, flags | OFlags::NONBLOCK))
    }

    fn open_below(&self, root: &OwnedFd, path: &str, flags: OFlags) -> Result<OwnedFd, Errno> {
        let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        if self.has_openat2.load(Ordering::Relaxed) {
            let resolve =
                ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
            match rustix::fs::openat2(root, path, flags, Mode::empty(), resolve) {
                Err(Errno::NOSYS | Errno::PERM) => {
                    self.has_openat2.store(false, Ordering::Relaxed);
                }
                result => return result,
            }
        }
        let (folders, name) = path.rsplit_once('/').unwrap_or(("", path));
        let folder = walk(root, folders)?;
        let folder = folder.as_ref().unwrap_or(root);
        rustix::fs::openat(folder, name, flags, Mode::empty())
    }

    /// Opens the folder that contains a path's last name, and returns that name.
    pub(super) fn parent<'a>(&self, path: &'a str) -> io::Result<(OwnedFd, &'a str)> {
        let (folder, name) = path.rsplit_once('/').unwrap_or((".", path));
        let flags = OFlags::PATH | OFlags::DIRECTORY;
        let folder = self.with_root(|root| self.open_below(root, folder, flags))?;
        Ok((folder, name))
    }

    /// As [`Tree::parent`], but also creates missing folders.
    pub(super) fn made_parent<'a>(&self, path: &'a str) -> io::Result<(OwnedFd, &'a str)> {
        match self.parent(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            result => return result,
        }
        for (end, _) in path.match_indices('/') {
            let folder = &path[..end];
            let (parent, name) = self.parent(folder)?;
            match rustix::fs::mkdirat(&parent, name, FOLDER_MODE) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(error) => return Err(error.into()),
            }
        }
        self.parent(path)
    }

    /// Syncs the folder that contains a path's last name, so that the folder's names survive a crash.
    pub(super) fn sync_parent(&self, path: &str) -> io::Result<()> {
        let (folder, _) = self.parent(path)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = rustix::fs::openat(folder, ".", flags, Mode::empty())?;
        Ok(rustix::fs::fsync(folder)?)
    }

    /// Removes a folder and those above it, as far as they are empty. A writer that needs such a folder
    /// creates it again.
    pub(super) fn remove_empty(&self, folder: &str) {
        let mut path = folder;
        loop {
            let removed = self.parent(path).and_then(|(parent, name)| {
                Ok(rustix::fs::unlinkat(&parent, name, AtFlags::REMOVEDIR)?)
            });
            match (removed, path.rsplit_once('/')) {
                (Ok(()), Some((above, _))) => path = above,
                _ => return,
            }
        }
    }

    /// Returns the state of a file without following a link.
    pub(super) fn stat(&self, path: &str) -> io::Result<Stat> {
        let (folder, name) = self.parent(path)?;
        Ok(rustix::fs::statat(
            &folder,
            name,
            AtFlags::SYMLINK_NOFOLLOW,
        )?)
    }

    /// Lists the names in a folder that pass a filter; none if the folder does not exist.
    pub(super) fn names(
        &self,
        path: &str,
        mut pass: impl FnMut(&str) -> io::Result<bool>,
    ) -> io::Result<Vec<String>> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY;
        let folder = match self.open(path, flags) {
            Err(error) if is_absent(&error) => return Ok(Vec::new()),
            folder => folder?,
        };
        let mut names = Vec::new();
        for entry in Dir::new(folder)? {
            let entry = entry?;
            if let Ok(name) = entry.file_name().to_str()
                && ![".", ".."].contains(&name)
                && pass(name)?
            {
                names.push(name.to_owned());
            }
        }
        Ok(names)
    }
}

/// Returns the mount point of the file system of a path.
fn mount_point(path: &Path) -> io::Result<PathBuf> {
    let path = path.canonicalize()?;
    let device = path.metadata()?.dev();
    let is_on_it = |path: &&Path| path.metadata().is_ok_and(|found| found.dev() == device);
    let highest = path.ancestors().take_while(is_on_it).last();
    Ok(highest.unwrap_or(&path).to_owned())
}

/// Returns true if a folder is empty.
fn is_empty(folder: &OwnedFd) -> bool {
    let is_name = |name: &CStr| ![c".", c".."].contains(&name);
    Dir::read_from(folder).is_ok_and(|mut names| {
        !names.any(|entry| entry.is_ok_and(|entry| is_name(entry.file_name())))
    })
}

/// Opens nested folders one after the other. `None` for the root itself.
fn walk(root: &OwnedFd, folders: &str) -> Result<Option<OwnedFd>, Errno> {
    let mut opened: Option<OwnedFd> = None;
    for name in folders.split('/').filter(|name| !name.is_empty()) {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let folder = opened.as_ref().unwrap_or(root);
        opened = Some(rustix::fs::openat(folder, name, flags, Mode::empty())?);
    }
    Ok(opened)
}

/// Creates a file in a folder under a name that is not used yet.
pub(super) fn temporary(folder: impl AsFd, flags: OFlags) -> io::Result<(OwnedFd, CString)> {
    let mut random = [0; 8];
    getrandom::fill(&mut random).map_err(io::Error::other)?;
    let name = format!("{TEMPORARY}{:016x}", u64::from_le_bytes(random));
    let name = CString::new(name).map_err(io::Error::other)?;
    let flags = flags | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::openat(folder, &name, flags, FILE_MODE)?;
    Ok((file, name))
}

/// Prefix of the names of unfinished files.
pub(super) const TEMPORARY: &str = ".tmp-";

/// Returns true for errors that mean that a file does not exist: its name is missing, another host has
/// removed it meanwhile, or the name is not of a file.
pub(super) fn is_absent(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw_os_error);
    let absent = [Errno::NOENT, Errno::STALE, Errno::NOTDIR, Errno::LOOP];
    errno.is_some_and(|errno| absent.contains(&errno))
}

/// Returns true for a regular file.
pub(super) fn is_file(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
}

#[cfg(test)]
mod tests {
    use std::fs;

    use lmc_testkit::Folder;

    use super::*;

    /// Once, a share that was mounted after the start was not used if its file system differed from that of
    /// the folder under the mount point; and after a share had gone, the folder under it was filled.
    #[test]
    fn a_folder_is_used_unless_its_file_system_has_gone() {
        assert_eq!(
            mount_point(Path::new("/")).expect("a folder"),
            Path::new("/")
        );
        let proc = mount_point(Path::new("/proc/self/fd")).expect("a folder");
        assert_eq!(proc, Path::new("/proc"), "links are followed");
        let after = |path: &Path, mount: &Path| {
            let tree = Tree::new(path.to_owned());
            tree.opened.lock().mount = Some(mount.to_owned());
            tree.root().map(drop).map_err(|error| error.to_string())
        };
        let folder = Folder::temporary();
        let gone = after(&folder, &folder).expect_err("nothing is mounted there");
        assert!(gone.contains("is not mounted any more"), "{gone}");
        // A file system came on the folder or above it, or the path leads elsewhere.
        for mount in ["/", "/proc", "/other"] {
            after(Path::new("/proc/sys"), Path::new(mount)).expect("it is used");
        }
    }

    /// Chunks filled the disk of a host whose share was not mounted, without a word.
    #[test]
    fn an_empty_folder_of_the_root_file_system_is_named_in_the_log() {
        let (folder, logs) = (Folder::temporary(), Folder::temporary());
        if mount_point(&folder).expect("a folder") != Path::new("/") {
            return eprintln!("skipped: temporary files are on a file system of their own");
        }
        let is_named = |folder: &Path| {
            let log = logs.join("log");
            let file = Arc::new(fs::File::create(&log).expect("a file"));
            let subscriber = tracing_subscriber::fmt().with_writer(file).finish();
            let open = || Tree::new(folder.to_owned()).root().map(drop);
            tracing::subscriber::with_default(subscriber, open).expect("it is opened");
            let said = fs::read_to_string(log).expect("a file");
            said.contains("root file system")
        };
        assert!(is_named(&folder));
        fs::write(folder.join("v2"), "").expect("space");
        assert!(!is_named(&folder), "it is in use");
        assert!(!is_named(Path::new("/proc/sys")), "it is mounted");
    }
}
