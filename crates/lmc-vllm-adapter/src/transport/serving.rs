//! Configuration of the listening sockets, and values that their connections share.

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::transport::process::MappedFile;
use crate::transport::stream::Keepalive;
use crate::transport::trust::TrustedUsers;
use crate::transport::zmtp::Limits;

/// Configuration of a [`ZmqServer`](crate::ZmqServer): addresses, limits and timeouts.
#[derive(Debug, Clone)]
pub struct ZmqConfig {
    /// Host name or address to listen on. Default: `127.0.0.1`.
    pub host: String,
    /// TCP port to listen on; 0 means any free port. Default: 5555.
    pub port: u16,
    /// Path of an additional Unix socket, which clients reach as `ipc://PATH`. Its mode is 0600, or
    /// 0666 where other users are trusted too. Default: `None`.
    pub ipc_path: Option<PathBuf>,
    /// Users of this host that are served. Default: the server's own user and root.
    pub trusted_users: TrustedUsers,
    /// Size limits of one message. Default: [`Limits::default`].
    pub limits: Limits,
    /// Most open connections; one user may have three quarters of them. A new connection beyond the
    /// limit replaces the one that has been idle for longest and owns nothing; if there is none,
    /// the new one is closed and counted. Default: 1024.
    pub max_connections: usize,
    /// Requests of one connection that may be in flight. Beyond this number copies are declined at
    /// once; at twice this number the connection is not read until a reply is sent. Default: 1024.
    pub max_in_flight: usize,
    /// Bytes of unread replies at which the server stops reading from a connection. Default: 16
    /// MiB.
    pub max_unread: usize,
    /// Timeout of the handshake, of one message from its first to its last byte, and of the
    /// acceptance of any byte of a reply. Default: 30 s.
    pub peer_timeout: Duration,
    /// Timeout from the start of a connection to its first request. Default: 60 s.
    pub first_request_timeout: Duration,
    /// Keepalive timeouts of TCP connections. Default: [`Keepalive::default`].
    pub keepalive: Keepalive,
    /// Longest time for which a stop waits for requests in flight. Default: 5 s.
    pub stop_timeout: Duration,
}

impl Default for ZmqConfig {
    fn default() -> Self {
        Self {
            host: "127.0.0.1".to_owned(),
            port: 5555,
            ipc_path: None,
            trusted_users: TrustedUsers::default(),
            limits: Limits::default(),
            max_connections: 1024,
            max_in_flight: 1024,
            max_unread: 16 << 20,
            peer_timeout: Duration::from_secs(30),
            first_request_timeout: Duration::from_secs(60),
            keepalive: Keepalive::default(),
            stop_timeout: Duration::from_secs(5),
        }
    }
}

impl ZmqConfig {
    /// Returns the number of requests in flight, of any kind, at which a connection is not read.
    pub(super) fn hard_in_flight_limit(&self) -> usize {
        self.max_in_flight.saturating_mul(2)
    }
}

/// Values shared by all connections.
#[derive(Debug)]
pub(super) struct Serving {
    pub(super) config: ZmqConfig,
    /// File of the pool, as in the memory maps of processes.
    pub(super) pool: Option<MappedFile>,
    /// Connections that may still begin to poll: one for each thread of the runtime, since more
    /// would only delay the requests of other connections.
    pub(super) polls: AtomicUsize,
}

impl Serving {
    /// Permits one more connection to poll; `None` if each thread has a connection that polls.
    pub(super) fn poll(&self) -> Option<Polling<'_>> {
        let take = |left: usize| left.checked_sub(1);
        self.polls
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, take)
            .ok()
            .map(|_| Polling(&self.polls))
    }
}

/// Permission to poll, given back on drop.
#[derive(Debug)]
pub(super) struct Polling<'a>(&'a AtomicUsize);

impl Drop for Polling<'_> {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}
