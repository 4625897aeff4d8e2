//! Configuration of an arena, and the report of what was obtained.

use std::io;
use std::sync::Arc;

use thiserror::Error;

use crate::{NameError, SharedName};

/// Demand for a property: off, preferred or required.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Demand {
    /// The property is not used.
    #[default]
    Off,
    /// The property is used if available; if not, [`ArenaReport::notes`] has the reason.
    Auto,
    /// Building fails if the property is not available.
    Required,
}

/// Policy for making pages present before their first use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Prefault {
    /// Each page becomes present on first touch.
    #[default]
    None,
    /// Threads named `lmc-prefault-{i}` walk the range while it is already being used.
    Background {
        /// Number of threads; at least 1.
        threads: usize,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Anonymous,
    Shared(Naming),
    Sealed,
}

/// Source of a shared segment's name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Naming {
    Exact(String),
    /// The label with an unpredictable suffix.
    Unique(String),
}

/// Configuration of an arena. [`ArenaConfig::build`] checks it and makes the
/// [`crate::Arena`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArenaConfig {
    pub(super) kind: Kind,
    pub(super) bytes: usize,
    pub(super) huge_pages: Demand,
    pub(super) lock: Demand,
    pub(super) numa_node: Option<u32>,
    pub(super) prefault: Prefault,
}

impl ArenaConfig {
    fn new(kind: Kind, bytes: usize) -> Self {
        Self {
            kind,
            bytes,
            huge_pages: Demand::Off,
            lock: Demand::Off,
            numa_node: None,
            prefault: Prefault::None,
        }
    }

    /// Returns the configuration of private memory of `bytes` bytes, rounded up to whole pages.
    pub fn anonymous(bytes: usize) -> Self {
        Self::new(Kind::Anonymous, bytes)
    }

    /// Returns the configuration of POSIX shared memory of `bytes` bytes under `name` (such as `lmc_5555`),
    /// mode 0600.
    ///
    /// The free space of `/dev/shm` is checked when the arena is made, but only pages that are present are
    /// guaranteed. If other files fill the file system first, a client that touches the next page is killed
    /// by SIGBUS, and in this process the arena is lost ([`crate::Arena::is_lost`]). [`Prefault::Background`]
    /// allocates the pages with `fallocate`, which returns an error instead ([`PrefaultProgress::error`]);
    /// once it has finished, no touch can fail.
    pub fn shared(name: impl Into<String>, bytes: usize) -> Self {
        Self::new(Kind::Shared(Naming::Exact(name.into())), bytes)
    }

    /// As [`ArenaConfig::shared`], under the name `<label>_<16 hexadecimal digits>`. Other users cannot
    /// predict the name, so they cannot create it first. [`crate::Arena::shared_name`] returns it.
    ///
    /// Building fails while a running server of this user has a segment with the same label. Segments of
    /// killed servers are not removed; [`crate::reclaim_stale_segments`] does that.
    pub fn shared_unique(label: impl Into<String>, bytes: usize) -> Self {
        Self::new(Kind::Shared(Naming::Unique(label.into())), bytes)
    }

    /// Returns the configuration of shared memory of `bytes` bytes without a name, sealed so that no process
    /// can resize it (a `memfd`). Processes that map it are passed [`crate::Arena::shared_file`].
    ///
    /// Huge pages are not supported: [`Demand::Required`] is an error, [`Demand::Auto`] adds a note to the
    /// report.
    pub fn sealed(bytes: usize) -> Self {
        Self::new(Kind::Sealed, bytes)
    }

    /// Sets whether huge pages are used. Default: [`Demand::Off`].
    pub fn with_huge_pages(mut self, demand: Demand) -> Self {
        self.huge_pages = demand;
        self
    }

    /// Sets whether pages are locked into memory when they become present. Default: [`Demand::Off`].
    pub fn with_lock(mut self, demand: Demand) -> Self {
        self.lock = demand;
        self
    }

    /// Sets the NUMA node to bind the memory to; building fails if that is not possible. Default: none.
    pub fn with_numa_node(mut self, node: Option<u32>) -> Self {
        self.numa_node = node;
        self
    }

    /// Sets the policy for making pages present in the background. Default: [`Prefault::None`].
    pub fn with_prefault(mut self, prefault: Prefault) -> Self {
        self.prefault = prefault;
        self
    }
}

/// Properties that an arena has, of the requested ones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArenaReport {
    /// Bytes of the range, rounded up to whole pages.
    pub bytes: usize,
    /// True if huge pages back the arena (or may back it, for transparent huge pages).
    pub huge_pages: bool,
    /// True if pages are locked when they become present.
    pub locked: bool,
    /// NUMA node that the arena is bound to.
    pub numa_node: Option<u32>,
    /// True if a stale segment of the same name was reclaimed.
    pub reclaimed: bool,
    /// Notes for an operator, such as properties that are not available; one sentence each.
    pub notes: Vec<String>,
}

/// Progress of the background prefault.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PrefaultProgress {
    /// Bytes made present.
    pub done: u64,
    /// Bytes to make present; 0 without a prefault.
    pub total: u64,
    /// Reason why the prefault waits for memory, if it does. It retries every second.
    pub error: Option<String>,
}

/// Memory that is not available as configured.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum ArenaError {
    /// The size is zero or beyond the address space.
    #[error("an arena of {bytes} bytes cannot be made: ask for at least 1 and at most {max}")]
    Size {
        /// Bytes in the configuration.
        bytes: usize,
        /// Largest accepted size.
        max: usize,
    },
    /// The prefault has no threads.
    #[error("prefault needs at least one thread: use Prefault::None to disable it")]
    PrefaultThreads,
    /// The name of a shared arena is invalid.
    #[error(transparent)]
    Name(#[from] NameError),
    /// Another process uses the name.
    #[error(
        "shared memory {name} is held by a running process ({owner}): stop that server or \
         choose another shared-memory name"
    )]
    Held {
        /// The name.
        name: SharedName,
        /// Process that uses the name, such as `pid 1234`.
        owner: String,
    },
    /// The owner record next to the segment cannot be trusted. It was not touched.
    #[error(
        "{} is {what}, so shared memory {name} cannot be owned by this server: choose another \
         name, or let the file's owner remove it", name.owner_path().display()
    )]
    ForeignRecord {
        /// The name.
        name: SharedName,
        /// Kind of the file.
        what: &'static str,
    },
    /// A segment with this name exists, and lmc did not create it.
    #[error(
        "shared memory {name} exists and was not made by lmc: choose another name, or remove \
         {} if nothing uses it", name.path().display()
    )]
    NotOurs {
        /// The name.
        name: SharedName,
    },
    /// The file system of shared memory is too small.
    #[error(
        "shared memory needs {need} bytes but /dev/shm has {available} free: make the pool \
         smaller, or enlarge it (mount -o remount,size=… /dev/shm; in a container --shm-size)"
    )]
    Space {
        /// Bytes needed.
        need: u64,
        /// Bytes free.
        available: u64,
    },
    /// Huge pages were required and are not available.
    #[error("huge pages are required but {why}")]
    HugePages {
        /// Cause and remedy.
        why: String,
    },
    /// Locking was required and is not possible.
    #[error("cannot lock {bytes} bytes in memory: {source}; {remedy}")]
    Lock {
        /// Bytes to lock.
        bytes: usize,
        /// Setting to change.
        remedy: String,
        /// Error of the system call.
        source: Arc<io::Error>,
    },
    /// The memory cannot be bound to the node.
    #[error("cannot bind memory to NUMA node {node}: {why}")]
    Numa {
        /// Node in the configuration.
        node: u32,
        /// Cause and remedy.
        why: String,
    },
    /// Another system call failed.
    #[error("{what} failed: {source}")]
    System {
        /// The call and its object.
        what: String,
        /// Error of the system call.
        source: Arc<io::Error>,
    },
}
