//! Settings of a socket channel.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;

use super::SocketChannel;
use crate::{Address, ChannelConfig, ConfigError, ConnectError};

/// Streams of one connection at most.
pub(super) const MAX_STREAMS: usize = 64;

/// Time between two signs of life at most.
pub(super) const MAX_KEEPALIVE: Duration = Duration::from_secs(60);

/// Memory that peers may make a channel hold, in bytes, at least.
const MIN_PEER_MEMORY: usize = 8 << 20;

/// Settings of a [`SocketChannel`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct SocketConfig {
    /// Settings that every channel has.
    pub channel: ChannelConfig,
    /// Address to listen at: `tcp://HOST:PORT` or `unix:PATH`.
    pub listen: Address,
    /// Streams of each connection, 1 to 64; the smaller number of the two sides counts. Default: 4.
    pub streams: usize,
    /// Threads that move bytes; each stream stays on one thread. Default: one for each core, at
    /// most 4.
    pub threads: usize,
    /// Time between two pings on each stream. A peer that sends nothing, reads nothing, or answers
    /// nothing on a stream for three to five times this long is considered dead. 10 ms to 1 min;
    /// the longer time of the two sides counts. Default: 5 s.
    pub keepalive: Duration,
    /// Bytes that requests and offers of all peers together may hold on this side, outside
    /// the arena; one peer may hold a quarter. A peer that exceeds this is disconnected. At least
    /// 8 MiB. Default: 64 MiB.
    pub peer_memory: usize,
    /// Added to the nice value of the threads, 0 to 19: above 0 the other threads of this host run
    /// first where there are not enough cores. Default: 0.
    pub nice: u8,
    /// NIXL, for the bytes of one-sided reads with peers that have it too. Default: none.
    #[cfg(feature = "nixl")]
    pub nixl: Option<crate::NixlPlane>,
}

/// A socket channel could not be built.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum SocketError {
    /// A setting is invalid.
    #[error(transparent)]
    Setting(#[from] ConfigError),
    /// The address is open to a network, and there is no key.
    #[error(transparent)]
    Unprotected(ConnectError),
    /// The address could not be bound.
    #[error("cannot listen at {address}: {error}")]
    Listen {
        /// The address.
        address: Address,
        /// The error of the system.
        error: Arc<io::Error>,
    },
    /// Threads could not be started, or the system has no random numbers.
    #[error("cannot start the channel: {0}")]
    Start(#[source] Arc<io::Error>),
}

impl From<io::Error> for SocketError {
    fn from(error: io::Error) -> Self {
        Self::Start(Arc::new(error))
    }
}

impl SocketConfig {
    /// Returns the defaults.
    pub fn new(channel: ChannelConfig, listen: Address) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            channel,
            listen,
            streams: 4,
            threads: cores.min(4),
            keepalive: Duration::from_secs(5),
            peer_memory: 64 << 20,
            nice: 0,
            #[cfg(feature = "nixl")]
            nixl: None,
        }
    }

    /// Listens, and starts the threads.
    ///
    /// # Errors
    /// [`SocketError`].
    pub fn build(self) -> Result<SocketChannel, SocketError> {
        let check = ConfigError::unless;
        self.channel.check()?;
        let streams = (1..=MAX_STREAMS).contains(&self.streams);
        check(streams, "streams", "1 to 64", &self.streams)?;
        let threads = (1..=1024).contains(&self.threads);
        check(threads, "threads", "1 to 1024", &self.threads)?;
        let keepalive = (Duration::from_millis(10)..=MAX_KEEPALIVE).contains(&self.keepalive);
        check(keepalive, "keepalive", "10 ms to 1 min", &self.keepalive)?;
        let memory = self.peer_memory >= MIN_PEER_MEMORY;
        check(memory, "peer_memory", "8 MiB or more", &self.peer_memory)?;
        check(self.nice <= 19, "nice", "0 to 19", &self.nice)?;
        SocketChannel::start(self)
    }
}
