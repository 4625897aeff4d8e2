//! Descriptors that a child process does not inherit.

/// Closes all descriptors except the standard ones in the programs that this process starts: some may be
/// inherited pipes, which end only when no process has them. If the system does not allow that, nothing
/// changes.
pub(super) fn keep_descriptors() {
    // SAFETY: the call closes no descriptor of this process; it only sets the close-on-exec flag.
    unsafe {
        libc::syscall(
            libc::SYS_close_range,
            3,
            libc::c_uint::MAX,
            libc::CLOSE_RANGE_CLOEXEC,
        );
    }
}
