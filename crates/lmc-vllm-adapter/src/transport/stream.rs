//! The two kinds of sockets that engines connect by.

use std::io;

use bytes::BytesMut;
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{Interest, Ready};
use tokio::net::{TcpStream, UnixStream};

use super::peer;
use super::router::Keepalive;
use crate::service::Peer;

/// A connection that was accepted.
#[derive(Debug)]
pub(super) enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Stream {
    /// Sets what every connection has.
    pub(super) fn prepare(&self, keepalive: &Keepalive) -> io::Result<()> {
        let Self::Tcp(stream) = self else {
            return Ok(());
        };
        // Answers are small and awaited; waiting to fill a segment would only delay them.
        stream.set_nodelay(true)?;
        // A host that is gone sends nothing, and what it holds would be held for ever.
        let socket = SockRef::from(stream);
        let probes = TcpKeepalive::new()
            .with_time(keepalive.idle)
            .with_interval(keepalive.interval)
            .with_retries(keepalive.probes);
        socket.set_tcp_keepalive(&probes)?;
        // The same for a connection with unacknowledged bytes, which keepalive does not probe.
        socket.set_tcp_user_timeout(Some(keepalive.total()))
    }

    /// The other end.
    pub(super) fn peer(&self) -> Peer {
        match self {
            Self::Tcp(stream) => peer::of_tcp(stream),
            Self::Unix(stream) => peer::of_unix(stream),
        }
    }

    pub(super) async fn ready(&self, interest: Interest) -> io::Result<Ready> {
        match self {
            Self::Tcp(stream) => stream.ready(interest).await,
            Self::Unix(stream) => stream.ready(interest).await,
        }
    }

    pub(super) fn try_read_buf(&self, into: &mut BytesMut) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.try_read_buf(into),
            Self::Unix(stream) => stream.try_read_buf(into),
        }
    }

    pub(super) fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.try_write(bytes),
            Self::Unix(stream) => stream.try_write(bytes),
        }
    }
}
