//! The process at the other end of a connection, as far as the kernel tells.

use std::fmt;

/// The other end of a connection.
///
/// Everything but the address is `None` where the kernel does not tell: a peer on another host
/// or in another network namespace.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Peer {
    /// Address of the other end, for logs.
    pub address: String,
    /// User that owns the other end's socket.
    pub uid: Option<u32>,
    /// Inode of the other end's socket, which `/proc/PID/fd` shows for each process that holds it.
    pub inode: Option<u64>,
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.address)
    }
}
