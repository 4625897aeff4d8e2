//! Resource limits of this process.

use rustix::process::{Resource, getrlimit, setrlimit};

/// Raises a limit to the maximum that the system allows this process. If that fails, code that needs more
/// reports an error when it reaches the limit.
pub(crate) fn raise(resource: Resource) {
    let mut limit = getrlimit(resource);
    limit.current = limit.maximum;
    let _ = setrlimit(resource, limit);
}

/// Returns the number of files that this process may have open.
pub(crate) fn open_files() -> usize {
    let limit = getrlimit(Resource::Nofile).current;
    limit.map_or(usize::MAX, |limit| {
        usize::try_from(limit).unwrap_or(usize::MAX)
    })
}
