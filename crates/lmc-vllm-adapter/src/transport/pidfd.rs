//! A handle of a process that stays valid when the kernel reuses the process id.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

/// Handle of a process, running or dead.
#[derive(Debug)]
pub(super) struct PidFd(OwnedFd);

impl PidFd {
    /// Opens the process that has this id now.
    pub(super) fn open(pid: u32) -> io::Result<Self> {
        // SAFETY: the call takes two integers and touches no memory of ours.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid as libc::pid_t, 0) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just opened this descriptor for us, so we alone own it. A
        // descriptor always fits the type.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd as libc::c_int) }))
    }

    /// Opens the process that connected to the other end of a Unix socket, in whatever PID namespace
    /// it is.
    ///
    /// # Errors
    /// `ENOPROTOOPT` before Linux 6.5; another error if the process is gone.
    pub(super) fn of_peer(socket: impl AsFd) -> io::Result<Self> {
        let mut fd: libc::c_int = -1;
        let mut len = size_of_val(&fd) as libc::socklen_t;
        // SAFETY: the kernel writes at most `len` bytes into `fd`, and both live across the call.
        let result = unsafe {
            libc::getsockopt(
                socket.as_fd().as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERPIDFD,
                (&raw mut fd).cast(),
                &raw mut len,
            )
        };
        if result < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just opened this descriptor for us, so we alone own it.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Returns true if all threads of the process have ended. Its memory and files, GPU device
    /// files included, are released by then.
    pub(super) fn is_dead(&self) -> bool {
        let mut poll = libc::pollfd {
            fd: self.0.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one entry is given and lives across the call, which does not wait.
        let ready = unsafe { libc::poll(&mut poll, 1, 0) };
        ready == 1 && poll.revents & libc::POLLIN != 0
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_process_is_dead_once_it_was_killed_and_not_before() {
        let mut child = Command::new("cat");
        let mut child = child.stdin(Stdio::piped()).spawn().expect("a child");
        let process = PidFd::open(child.id()).expect("it lives");
        assert!(!process.is_dead());
        child.kill().expect("it lives");
        lmc_testkit::until("it is seen dead", || process.is_dead());
        // Dead before its parent has asked for its status, and after.
        child.wait().expect("it ended");
        assert!(process.is_dead());
    }
}
