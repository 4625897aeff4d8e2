//! The other end of a connection, as far as the kernel shows it.

use std::fmt;

/// The client's socket of a connection.
///
/// User and inode are `None` where the kernel does not show them: the client is on another host
/// or in another network namespace.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClientSocket {
    /// Address of the socket, for logs.
    pub address: String,
    /// User that owns the socket.
    pub uid: Option<u32>,
    /// Inode of the socket, which `/proc/PID/fd` shows for each process that holds it.
    pub inode: Option<u64>,
    /// True for a Unix socket, over which descriptors can be passed.
    pub takes_descriptors: bool,
}

/// State of the processes that map the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Life {
    /// At least one lives, and none is stopped.
    Running,
    /// At least one is stopped by a signal, or frozen: it would continue where it stopped.
    Stopped,
    /// All have ended.
    Dead,
}

/// Watches the processes at the other end of a connection.
pub(crate) trait Witness: fmt::Debug + Send + Sync {
    /// Notes the deaths of known processes. Called for all witnesses before [`Self::life`], so that
    /// one walk over `/proc` serves all.
    fn look(&self) {}

    /// Returns the state of the processes. May read files of `/proc`.
    fn life(&self) -> Life;

    /// Process ids, for logs.
    fn pids(&self) -> Vec<u32>;
}
