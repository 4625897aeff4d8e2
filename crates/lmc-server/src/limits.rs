//! Limit of open files of this process.

use rustix::process::{Resource, getrlimit, setrlimit};

/// Raises the limit to the most that the system lets this process have: each connection and each
/// segment of a disk tier is an open file, and the usual limit is meant for programs that call
/// `select`. Where it cannot be raised, what needs more says so when it meets the limit.
pub(crate) fn raise_limit() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    let _ = setrlimit(Resource::Nofile, limit);
}
