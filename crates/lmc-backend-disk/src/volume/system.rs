//! Facts about file systems, and the event that wakes a thread.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{statfs, statvfs};

/// The medium behind a file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Medium {
    /// A drive, or a file system that lmc does not know.
    Drive,
    /// Memory: files are lost at a reboot. Holds the file system's name.
    Memory(&'static str),
    /// No medium: the kernel generates the files. Holds the file system's name.
    Nothing(&'static str),
}

/// Returns the medium behind the file system of `path`.
pub(crate) fn medium(path: &Path) -> io::Result<Medium> {
    // Numbers from linux/magic.h.
    Ok(match statfs(path)?.f_type as u32 {
        0x0102_1994 => Medium::Memory("tmpfs"),
        0x8584_58f6 => Medium::Memory("ramfs"),
        0x9fa0 => Medium::Nothing("proc"),
        0x6265_6572 => Medium::Nothing("sysfs"),
        0x0027_e0eb | 0x6367_7270 => Medium::Nothing("cgroup"),
        0x6462_6720 => Medium::Nothing("debugfs"),
        0x7472_6163 => Medium::Nothing("tracefs"),
        0x1cd1 => Medium::Nothing("devpts"),
        0x7363_6673 => Medium::Nothing("securityfs"),
        _ => Medium::Drive,
    })
}

/// Free bytes of a file system without a size, such as a tmpfs without a limit.
pub(crate) const NO_SIZE: u64 = u64::MAX >> 1;

/// Returns the bytes that a user may still allocate on the file system of `path`.
pub(crate) fn free_bytes(path: &Path) -> io::Result<u64> {
    let stat = statvfs(path)?;
    if stat.f_blocks == 0 {
        return Ok(NO_SIZE);
    }
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// Describes how the file or folder at a path differs from an open one, or that it has fewer bytes than
/// `len`. `None` if there is no difference.
pub(crate) fn difference(open: Option<&File>, path: &Path, len: u64) -> Option<String> {
    let id = |about: &fs::Metadata| (about.dev(), about.ino());
    let now = match fs::symlink_metadata(path) {
        Ok(now) => now,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Some("was removed or renamed".to_owned());
        }
        Err(error) => return Some(format!("cannot be examined ({error})")),
    };
    let open = open.and_then(|open| open.metadata().ok());
    if open.is_some_and(|open| id(&open) != id(&now)) {
        return Some("was replaced, or is hidden by a mount".to_owned());
    }
    (now.len() < len).then(|| format!("was cut from {len} to {} bytes", now.len()))
}

/// Wakes a thread that waits on a ring.
#[derive(Debug)]
pub(super) struct Wake(OwnedFd);

impl Wake {
    pub(super) fn new() -> io::Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Self(eventfd(0, flags)?))
    }

    pub(super) fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    pub(super) fn ring(&self) {
        // The only possible error is a full counter, and then the event is already set.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Clears the event until the next ring.
    pub(super) fn clear(&self) {
        // The only possible error is that the event was not set.
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}
