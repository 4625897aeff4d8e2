//! Files without a name that no process can cut short.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};

/// Makes a file of `len` bytes in memory, none of them backed by a page yet, sealed against
/// shrinking and growing and against other seals.
pub(super) fn create(len: u64) -> io::Result<File> {
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // SAFETY: the name is NUL-terminated and lives across the call.
    let fd = unsafe { libc::memfd_create(c"lmc-pool".as_ptr(), flags) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just opened and has no other owner.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(len)?;
    let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
    // SAFETY: the descriptor is open; adding seals touches no memory.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) } {
        0 => Ok(file),
        _ => Err(io::Error::last_os_error()),
    }
}
