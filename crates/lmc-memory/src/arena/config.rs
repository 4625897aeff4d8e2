//! Configuration of an arena, and the report of what was obtained.

use std::io;

use thiserror::Error;

use crate::{NameError, SharedName};

/// Degree to which a property is wanted: off, preferred or required.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Demand {
    /// The property is not wanted.
    #[default]
    Off,
    /// Wanted if it can be had; if not, [`ArenaReport::notes`] says why not.
    Auto,
    /// An error if it cannot be had.
    Required,
}

/// Policy that makes pages present before they are first used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Prefault {
    /// The first touch of each page pays for it.
    #[default]
    None,
    /// Threads named `lmc-prefault-{i}` walk the range while it is already in use.
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
    /// The label and an unpredictable suffix.
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

    /// Private memory of `bytes` bytes, rounded up to whole pages.
    pub fn anonymous(bytes: usize) -> Self {
        Self::new(Kind::Anonymous, bytes)
    }

    /// POSIX shared memory under `name` (such as `lmc_5555`), mode 0600, `bytes` bytes.
    ///
    /// The free space of `/dev/shm` is checked when the arena is made, but only pages that are
    /// present are sure to stay: if something else fills the file system first, a client that
    /// touches the next page is killed by SIGBUS, and in this process the arena is lost
    /// ([`crate::Arena::is_lost`]). [`Prefault::Background`] takes the
    /// pages from the file system by `fallocate`, which fails with an error instead
    /// ([`PrefaultProgress::error`]); once it is through, no touch can fail.
    pub fn shared(name: impl Into<String>, bytes: usize) -> Self {
        Self::new(Kind::Shared(Naming::Exact(name.into())), bytes)
    }

    /// As [`ArenaConfig::shared`], under the name `<label>_<16 hexadecimal digits>`, which other
    /// users cannot predict and so cannot take first; [`crate::Arena::shared_name`] returns it.
    ///
    /// An error while a running server of this user has a segment of the same label. Segments of
    /// killed servers are left to [`crate::reclaim_stale_segments`].
    pub fn shared_unique(label: impl Into<String>, bytes: usize) -> Self {
        Self::new(Kind::Shared(Naming::Unique(label.into())), bytes)
    }

    /// Shared memory without a name, `bytes` bytes, sealed so that no process can cut it short or
    /// lengthen it (a `memfd`); processes that map it get [`crate::Arena::shared_file`].
    ///
    /// Huge pages are not supported: [`Demand::Required`] is an error, [`Demand::Auto`] a note.
    pub fn sealed(bytes: usize) -> Self {
        Self::new(Kind::Sealed, bytes)
    }

    /// Sets the use of huge pages. Default: [`Demand::Off`].
    pub fn with_huge_pages(mut self, demand: Demand) -> Self {
        self.huge_pages = demand;
        self
    }

    /// Sets the locking of pages into memory as they become present. Default: [`Demand::Off`].
    pub fn with_lock(mut self, demand: Demand) -> Self {
        self.lock = demand;
        self
    }

    /// Sets the NUMA node to bind to; an error if that fails. Default: none.
    pub fn with_numa_node(mut self, node: Option<u32>) -> Self {
        self.numa_node = node;
        self
    }

    /// Sets the policy that makes pages present in the background. Default: [`Prefault::None`].
    pub fn with_prefault(mut self, prefault: Prefault) -> Self {
        self.prefault = prefault;
        self
    }
}

/// Properties that an arena obtained, of those that were asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArenaReport {
    /// Bytes of the range, rounded up to whole pages.
    pub bytes: usize,
    /// True if huge pages back the arena (or may back it, for transparent ones).
    pub huge_pages: bool,
    /// True if pages are locked once present.
    pub locked: bool,
    /// NUMA node that the arena is bound to.
    pub numa_node: Option<u32>,
    /// True if a stale segment of the same name was reclaimed.
    pub reclaimed: bool,
    /// Properties that were not obtained, and other notes for an operator; one sentence each.
    pub notes: Vec<String>,
}

/// Progress of the background prefault.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PrefaultProgress {
    /// Bytes made present.
    pub done: u64,
    /// Bytes to make present; 0 when no prefault was asked for.
    pub total: u64,
    /// The reason why it waits, if it does: there is no memory. It tries again every second.
    pub error: Option<String>,
}

/// Memory that cannot be had as asked.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ArenaError {
    /// A size of zero or beyond the address space.
    #[error("an arena of {bytes} bytes cannot be made: ask for at least 1 and at most {max}")]
    Size {
        /// Bytes asked for.
        bytes: usize,
        /// The most accepted.
        max: usize,
    },
    /// Prefault with no thread.
    #[error("prefault needs at least one thread: use Prefault::None to disable it")]
    PrefaultThreads,
    /// The name of a shared arena is not acceptable.
    #[error(transparent)]
    Name(#[from] NameError),
    /// Another process holds the name.
    #[error(
        "shared memory {name} is held by a running process ({owner}): stop that server or \
         choose another shared-memory name"
    )]
    Held {
        /// The name.
        name: SharedName,
        /// Process that holds the name, such as `pid 1234`.
        owner: String,
    },
    /// The file beside the segment, which would say who owns it, cannot be trusted. It was not
    /// touched.
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
    /// A segment of that name exists and lmc did not make it.
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
        /// Bytes asked for.
        need: u64,
        /// Bytes free.
        available: u64,
    },
    /// Huge pages were required and cannot be had.
    #[error("huge pages are required but {why}")]
    HugePages {
        /// Cause and remedy.
        why: String,
    },
    /// Locking was required and cannot be had.
    #[error("cannot lock {bytes} bytes in memory: {source}; {remedy}")]
    Lock {
        /// Bytes to lock.
        bytes: usize,
        /// Setting to change.
        remedy: String,
        /// Error of the system call.
        source: io::Error,
    },
    /// The memory cannot be bound to the node.
    #[error("cannot bind memory to NUMA node {node}: {why}")]
    Numa {
        /// The node asked for.
        node: u32,
        /// Cause and remedy.
        why: String,
    },
    /// A system call failed in a way that has no better name.
    #[error("{what} failed: {source}")]
    System {
        /// The call and its object.
        what: String,
        /// Error of the system call.
        source: io::Error,
    },
}
