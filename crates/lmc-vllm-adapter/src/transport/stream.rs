//! TCP and Unix sockets as one type.

use std::io;
#[cfg(feature = "service")]
use std::os::fd::BorrowedFd;
#[cfg(feature = "adapters")]
use std::os::fd::OwnedFd;
#[cfg(feature = "service")]
use std::time::Duration;

use bytes::BytesMut;
#[cfg(feature = "service")]
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{Interest, Ready};
use tokio::net::{TcpStream, UnixStream};

#[cfg(feature = "adapters")]
use super::passing::receive_with;
#[cfg(feature = "service")]
use super::{passing::send_with, peer, process::PoolTaker};
#[cfg(feature = "service")]
use crate::peer::ClientSocket;

/// Keepalive timeouts of TCP: a connection whose host or network is gone is closed after them.
#[cfg(feature = "service")]
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Keepalive {
    /// Idle time before the first probe. Default: 30 s.
    pub idle: Duration,
    /// Time between two probes. Default: 10 s.
    pub interval: Duration,
    /// Number of unanswered probes after which the connection is closed. Default: 3.
    pub probes: u32,
}

#[cfg(feature = "service")]
impl Default for Keepalive {
    fn default() -> Self {
        Self {
            idle: Duration::from_secs(30),
            interval: Duration::from_secs(10),
            probes: 3,
        }
    }
}

#[cfg(feature = "service")]
impl Keepalive {
    /// Returns the time from the last received packet to the end of the connection.
    pub(super) fn total(&self) -> Duration {
        self.idle + self.interval * self.probes
    }
}

/// A connection.
#[derive(Debug)]
pub(crate) enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

#[cfg(feature = "service")]
impl Stream {
    /// Sets the socket options of a connection.
    pub(super) fn prepare(&self, keepalive: &Keepalive) -> io::Result<()> {
        let Self::Tcp(stream) = self else {
            return Ok(());
        };
        // Replies are small and awaited, so they are not delayed until a segment is full.
        stream.set_nodelay(true)?;
        // A host that is gone sends nothing; without keepalive its slots would be held forever.
        let socket = SockRef::from(stream);
        let probes = TcpKeepalive::new()
            .with_time(keepalive.idle)
            .with_interval(keepalive.interval)
            .with_retries(keepalive.probes);
        socket.set_tcp_keepalive(&probes)?;
        // Keepalive does not probe a connection with unacknowledged bytes; this timeout ends it.
        socket.set_tcp_user_timeout(Some(keepalive.total()))
    }

    /// Looks up the other end of the connection.
    pub(super) fn peer(&self) -> ClientSocket {
        match self {
            Self::Tcp(stream) => peer::of_tcp(stream),
            Self::Unix(stream) => peer::of_unix(stream),
        }
    }

    /// Returns the process at the other end, which was passed the pool; `None` if the kernel does
    /// not identify it.
    pub(super) fn pool_taker(&self) -> Option<PoolTaker> {
        match self {
            Self::Tcp(_) => None,
            Self::Unix(stream) => PoolTaker::of(stream),
        }
    }

    /// Sends bytes, and a descriptor with the first of them.
    pub(super) fn try_write_with(
        &self,
        bytes: &[u8],
        descriptor: BorrowedFd<'_>,
    ) -> io::Result<usize> {
        match self {
            Self::Tcp(_) => Err(io::ErrorKind::Unsupported.into()),
            Self::Unix(stream) => {
                stream.try_io(Interest::WRITABLE, || send_with(stream, bytes, descriptor))
            }
        }
    }
}

impl Stream {
    pub(crate) async fn ready(&self, interest: Interest) -> io::Result<Ready> {
        match self {
            Self::Tcp(stream) => stream.ready(interest).await,
            Self::Unix(stream) => stream.ready(interest).await,
        }
    }

    pub(crate) fn try_read_buf(&self, into: &mut BytesMut) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.try_read_buf(into),
            Self::Unix(stream) => stream.try_read_buf(into),
        }
    }

    /// Reads bytes, and keeps a descriptor that came with them. [`Self::try_read_buf`] leaves such
    /// descriptors to the kernel, which closes them.
    #[cfg(feature = "adapters")]
    pub(crate) fn try_read_with(
        &self,
        into: &mut BytesMut,
        descriptor: &mut Option<OwnedFd>,
    ) -> io::Result<usize> {
        /// The replies that carry a descriptor are short.
        const MOST: usize = 4096;
        match self {
            Self::Tcp(_) => self.try_read_buf(into),
            Self::Unix(stream) => stream.try_io(Interest::READABLE, || {
                receive_with(stream, into, MOST, descriptor)
            }),
        }
    }

    pub(crate) fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.try_write(bytes),
            Self::Unix(stream) => stream.try_write(bytes),
        }
    }
}
