//! Temporary folders.

use std::ffi::OsStr;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::ops::Deref;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

/// A new, empty folder, removed with its content on drop.
#[derive(Debug)]
pub struct Folder(PathBuf);

impl Folder {
    /// Makes a folder in the system's folder for temporary files.
    ///
    /// # Panics
    /// When the folder cannot be made.
    pub fn temporary() -> Self {
        Self::inside(std::env::temp_dir())
    }

    /// Makes a folder in `parent`. With `env!("CARGO_TARGET_TMPDIR")` it lies on the file system of
    /// the build, which is a real drive where `/tmp` may be memory.
    ///
    /// # Panics
    /// When the folder cannot be made.
    pub fn inside(parent: impl AsRef<Path>) -> Self {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("lmc-test-{}-{count}", std::process::id());
        let path = parent.as_ref().join(name);
        // Files that an earlier process with the same id has left.
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).expect("a folder for a test can be made");
        Self(path)
    }

    /// Returns the path as text.
    ///
    /// # Panics
    /// When the path is not UTF-8.
    pub fn text(&self) -> &str {
        self.0
            .to_str()
            .expect("the path of a test's folder is UTF-8")
    }
}

impl Deref for Folder {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.0
    }
}

impl AsRef<Path> for Folder {
    fn as_ref(&self) -> &Path {
        &self.0
    }
}

impl AsRef<OsStr> for Folder {
    fn as_ref(&self) -> &OsStr {
        self.0.as_os_str()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Writes a file that only its owner may read, as key files require.
///
/// # Panics
/// If the file cannot be written.
pub fn write_secret(path: impl AsRef<Path>, text: &str) {
    let mut options = OpenOptions::new();
    let file = options.write(true).create(true).truncate(true).mode(0o600);
    let written = file
        .open(path)
        .and_then(|mut file| file.write_all(text.as_bytes()));
    written.expect("the folder can be written");
}
