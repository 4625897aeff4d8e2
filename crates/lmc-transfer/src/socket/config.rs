//! How a socket channel is set up.

use std::io;
use std::time::Duration;

use thiserror::Error;

use super::SocketChannel;
use crate::{Address, ChannelConfig, ConfigError};

/// Streams of one connection at most.
pub(super) const MAX_STREAMS: usize = 64;

/// Time between two signs of life at most.
pub(super) const MAX_KEEPALIVE: Duration = Duration::from_secs(60);

/// What a [`SocketChannel`] is made from.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct SocketConfig {
    /// What every channel is made from.
    pub channel: ChannelConfig,
    /// Where to listen: `tcp://HOST:PORT` or `unix:PATH`.
    pub listen: Address,
    /// Streams of each connection, 1 to 64; a peer that wants fewer gets fewer. Default: 4.
    pub streams: usize,
    /// Threads that move bytes; what a stream needs stays on one of them. Default: one for each
    /// core, at most 4.
    pub threads: usize,
    /// How often this side speaks to a peer when there is nothing else to send; after three to
    /// five times this without a byte a peer is taken for gone, and so is one that takes nothing
    /// for so long. 10 ms to a minute; of two sides the longer one counts. Default: 5 s.
    pub keepalive: Duration,
}

/// A socket channel could not be built.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SocketError {
    /// The address is no socket's.
    #[error("{0} is no address of a socket: expected tcp://HOST:PORT or unix:PATH")]
    Address(Address),
    /// A setting that makes no sense.
    #[error(transparent)]
    Setting(#[from] ConfigError),
    /// The address could not be bound.
    #[error("cannot listen at {address}: {error}")]
    Listen {
        /// The address.
        address: Address,
        /// Why not.
        error: io::Error,
    },
    /// Threads could not be started, or there are no random numbers.
    #[error("cannot start: {0}")]
    Start(#[source] io::Error),
}

impl SocketConfig {
    /// The defaults.
    pub fn new(channel: ChannelConfig, listen: Address) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            channel,
            listen,
            streams: 4,
            threads: cores.min(4),
            keepalive: Duration::from_secs(5),
        }
    }

    /// Listens, and starts the threads.
    ///
    /// # Errors
    /// [`SocketError`].
    pub fn build(self) -> Result<SocketChannel, SocketError> {
        let setting = |ok: bool, name, expected, found: String| match ok {
            true => Ok(()),
            false => Err(ConfigError {
                name,
                expected,
                found,
            }),
        };
        self.channel.check()?;
        setting(
            (1..=MAX_STREAMS).contains(&self.streams),
            "streams",
            "1 to 64",
            self.streams.to_string(),
        )?;
        setting(
            (1..=1024).contains(&self.threads),
            "threads",
            "1 to 1024",
            self.threads.to_string(),
        )?;
        setting(
            (Duration::from_millis(10)..=MAX_KEEPALIVE).contains(&self.keepalive),
            "keepalive",
            "10 ms to a minute",
            format!("{:?}", self.keepalive),
        )?;
        SocketChannel::start(self)
    }
}
