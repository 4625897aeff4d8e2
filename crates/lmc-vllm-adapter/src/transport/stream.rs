//! TCP and Unix sockets as one type.

use std::io;

use bytes::BytesMut;
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{Interest, Ready};
use tokio::net::{TcpStream, UnixStream};

use super::peer;
use super::router::Keepalive;
use crate::service::Peer;

/// An accepted connection.
#[derive(Debug)]
pub(super) enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Stream {
    /// Sets the socket options of a connection.
    pub(super) fn prepare(&self, keepalive: &Keepalive) -> io::Result<()> {
        let Self::Tcp(stream) = self else {
            return Ok(());
        };
        // Replies are small and awaited, so they must not wait until a segment is full.
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
