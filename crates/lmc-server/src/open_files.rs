//! Limit of open files of this process.

/// Raises the limit to the most that the system lets this process have: each connection and each
/// segment of a disk tier is an open file, and the usual limit is meant for programs that call
/// `select`. Where it cannot be raised, what needs more says so when it meets the limit.
pub(crate) fn raise_limit() {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: the struct is good for writing during the call.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } != 0 {
        return;
    }
    limit.rlim_cur = limit.rlim_max;
    // SAFETY: the struct is good for reading during the call.
    unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
}
