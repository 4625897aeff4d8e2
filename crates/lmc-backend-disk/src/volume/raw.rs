//! System calls that the standard library does not offer.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Reads at an offset, up to `len` bytes.
///
/// # Safety
/// `at` is good for writing `len` bytes, and nothing else touches them during the call.
pub(super) unsafe fn pread(fd: RawFd, at: *mut u8, len: u64, offset: u64) -> io::Result<u64> {
    // SAFETY: the memory is good by the caller's promise.
    let bytes = unsafe { libc::pread(fd, at.cast(), len as usize, offset as libc::off_t) };
    u64::try_from(bytes).map_err(|_| io::Error::last_os_error())
}

/// Writes at an offset, up to `len` bytes.
///
/// # Safety
/// `at` is good for reading `len` bytes, and nothing writes to them during the call.
pub(super) unsafe fn pwrite(fd: RawFd, at: *const u8, len: u64, offset: u64) -> io::Result<u64> {
    // SAFETY: the memory is good by the caller's promise.
    let bytes = unsafe { libc::pwrite(fd, at.cast(), len as usize, offset as libc::off_t) };
    u64::try_from(bytes).map_err(|_| io::Error::last_os_error())
}

/// Writes at an offset as [`pwrite`] does; the bytes are durable when it returns.
///
/// # Safety
/// As [`pwrite`].
pub(super) unsafe fn pwrite_durably(
    fd: RawFd,
    at: *const u8,
    len: u64,
    offset: u64,
) -> io::Result<u64> {
    let part = libc::iovec {
        iov_base: at.cast_mut().cast(),
        iov_len: len as usize,
    };
    // SAFETY: the memory is good by the caller's promise, and is only read.
    let bytes = unsafe { libc::pwritev2(fd, &part, 1, offset as libc::off_t, libc::RWF_DSYNC) };
    u64::try_from(bytes).map_err(|_| io::Error::last_os_error())
}

/// Allocates blocks for the first `len` bytes of a file, and makes it at least that long.
pub(super) fn fallocate(file: &File, len: u64) -> io::Result<()> {
    let len = libc::off_t::try_from(len).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))?;
    loop {
        // SAFETY: a call on an open descriptor, without memory.
        if unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, len) } == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// Sends an open file past the page cache from now on.
pub(super) fn set_direct(file: &File) -> io::Result<()> {
    // SAFETY: a call on an open descriptor, without memory.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFL, libc::O_DIRECT) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The medium behind a file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Medium {
    /// A drive, or something that lmc does not know.
    Drive,
    /// Memory: files are gone after a reboot. With its name.
    Memory(&'static str),
    /// Nothing: its files are made up by the kernel. With its name.
    Nothing(&'static str),
}

/// Returns the medium behind the file system of `path`.
pub(crate) fn medium(path: &Path) -> io::Result<Medium> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let mut stat = MaybeUninit::<libc::statfs>::uninit();
    // SAFETY: a terminated string, and memory for the one struct that is filled in.
    if unsafe { libc::statfs(path.as_ptr(), stat.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call succeeded, so it filled the struct in.
    let stat = unsafe { stat.assume_init() };
    // Numbers of linux/magic.h.
    Ok(match stat.f_type as u32 {
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

/// Free bytes on a file system that has no size, such as one in memory without a limit.
pub(crate) const NO_SIZE: u64 = u64::MAX >> 1;

/// Bytes that a user may still take on the file system of `path`.
pub(crate) fn free_bytes(path: &Path) -> io::Result<u64> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let mut stat = MaybeUninit::<libc::statvfs>::uninit();
    // SAFETY: a terminated string, and memory for the one struct that is filled in.
    if unsafe { libc::statvfs(path.as_ptr(), stat.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call succeeded, so it filled the struct in.
    let stat = unsafe { stat.assume_init() };
    if stat.f_blocks == 0 {
        return Ok(NO_SIZE);
    }
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// Wakes a thread that waits on a ring.
#[derive(Debug)]
pub(super) struct Wake(OwnedFd);

impl Wake {
    pub(super) fn new() -> io::Result<Self> {
        // SAFETY: a call without memory.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new and has no other owner.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    pub(super) fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    pub(super) fn ring(&self) {
        let one = 1u64.to_ne_bytes();
        // The one error there can be is a full counter, and then it rings already.
        // SAFETY: eight bytes that live during the call.
        let _ = unsafe { libc::write(self.fd(), one.as_ptr().cast(), one.len()) };
    }

    /// Clears the event until the next ring.
    pub(super) fn clear(&self) {
        let mut count = [0u8; 8];
        // The one error there can be is that it did not ring.
        // SAFETY: eight bytes that live during the call.
        let _ = unsafe { libc::read(self.fd(), count.as_mut_ptr().cast(), count.len()) };
    }
}
