//! Descriptors that a program does not inherit.

/// Keeps all descriptors from the programs that this process starts, but for the standard ones: those
/// that it has inherited itself may be pipes that end once no process has them. Where the system does
/// not allow that, nothing changes.
pub(super) fn keep_descriptors() {
    // SAFETY: no descriptor is closed, and the flag changes none of this process.
    unsafe {
        libc::syscall(
            libc::SYS_close_range,
            3,
            libc::c_uint::MAX,
            libc::CLOSE_RANGE_CLOEXEC,
        );
    }
}
