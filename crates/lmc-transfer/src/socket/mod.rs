//! [`SocketChannel`]: transfers over TCP and Unix sockets.
//!
//! A connection has several streams, each on one thread; a batch is spread over them by bytes.
//! Objects go from the arena to the kernel and from the kernel into the arena without a copy in
//! between, in pieces of 256 KiB with a checksum each, unless
//! [`crate::ChannelConfig::object_checksums`] is off on both sides. Frames are always sealed.
//! Objects are sealed only where [`crate::ChannelConfig::encrypt_objects`] asks for it, which costs
//! a copy.
//!
//! Waking a thread costs about as much as a small transfer, so the caller writes frames of up to
//! 64 KiB directly when the stream is idle, and small objects are inlined in the offer of a send.
//! Each side holds at most 4 MiB of inlined objects per connection.
//!
//! Over the streams a slot of a call can be revoked at any time, since only this process writes to
//! it: bytes that still come from the peer are read and discarded. So nothing is ever quarantined.
//!
//! With the feature `nixl`, NIXL moves the bytes of one-sided reads where both sides have it
//! (`plane`).

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use lmc_memory::{ReservedSlot, SealedSlot};
use tokio::runtime::Handle;
use tokio_util::task::AbortOnDropHandle;

use crate::net::Listener;
use crate::session::{self, Local};
use crate::timer::Timer;
use crate::{
    Address, BoxFuture, ConnectError, DataPlane, Filled, InArena, Index, MAX_MESSAGE, PeerId,
    ReadLease, Sent, TransferChannel, TransferError, WriteLease, checks,
};

#[cfg(feature = "nixl")]
mod announcement;
mod asking;
mod budget;
mod channel_core;
mod config;
mod connection;
mod frame;
mod handshake;
mod landing;
mod offers;
mod one_sided;
mod outgoing;
mod paired;
#[cfg(feature = "nixl")]
mod plane;
#[cfg(feature = "nixl")]
mod plane_link;
mod reader;
mod shared;
mod spread;
mod stats;
mod stream_writer;
mod supervise;
mod threads;
mod window;
mod writer;

#[cfg(test)]
mod tests;

pub use config::{SocketConfig, SocketError};
use shared::{ChannelState, Stop};
pub use stats::SocketStats;
use threads::Threads;

/// Time that dropping a channel waits for the end of NIXL.
#[cfg(feature = "nixl")]
const DROP_WAIT: std::time::Duration = std::time::Duration::from_secs(2);

/// Decodes any bytes as frames, and as payloads of a handshake.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn fuzz(data: &[u8]) {
    frame::fuzz(data);
    handshake::fuzz(data);
    session::fuzz(data);
}

/// A channel over TCP or Unix sockets. Its work is done by threads of its own, named
/// `lmc-socket`.
#[derive(Debug)]
pub struct SocketChannel {
    shared: Arc<ChannelState>,
    address: Address,
}

impl SocketChannel {
    fn start(config: SocketConfig) -> Result<Self, SocketError> {
        let threads = Threads::start(config.threads, config.nice)?;
        let listen = config.listen.clone();
        let listener = {
            let _entered = threads.first().enter();
            Listener::bind(&listen).map_err(|error| SocketError::Listen {
                address: listen,
                error: error.into(),
            })?
        };
        let local = Local::new(&config.channel)?;
        let protected = local.check_listener(&listener);
        protected.map_err(SocketError::Unprotected)?;
        let address = listener.address().clone();
        let timer = Timer::start()?;
        #[cfg(feature = "nixl")]
        if let Some(nixl) = &config.nixl {
            nixl.take(&config.channel)?;
        }
        let shared = Arc::new(ChannelState::new(config, local, timer, threads));
        let serve = session::serve(Arc::clone(&shared), listener);
        shared.threads.first().spawn(serve);
        Ok(Self { shared, address })
    }

    /// Sends a question to a connected peer, whose [`crate::ChannelConfig::on_ask`] answers it.
    /// Questions to one peer are answered in any order.
    ///
    /// # Errors
    /// [`TransferError::UnknownPeer`], [`TransferError::PeerGone`],
    /// [`TransferError::Refused`] where the peer answers no questions or the question is longer
    /// than [`MAX_MESSAGE`], [`TransferError::Closed`], and [`TransferError::Deadline`], after
    /// which the peer may have seen the question.
    pub fn ask<'a>(
        &'a self,
        peer: &'a PeerId,
        question: Bytes,
        deadline: Instant,
    ) -> BoxFuture<'a, Result<Bytes, TransferError>> {
        Box::pin(self.shared.ask(peer, question, deadline))
    }

    /// Returns the runtime of the thread at which a connected peer's answers arrive. A task there
    /// that asks and waits for answers in turn wakes no other thread; it must not block.
    pub fn home(&self, peer: &PeerId) -> Option<Handle> {
        let connection = self.shared.connection(peer).ok()?;
        Some(connection.home.clone())
    }

    /// Returns the name of the peer that listens at an address.
    ///
    /// # Errors
    /// [`ConnectError`].
    pub async fn identify(
        &self,
        address: &Address,
        deadline: Instant,
    ) -> Result<PeerId, ConnectError> {
        let no_name: PeerId = "?".parse().expect("a printable character");
        match self.connect(&no_name, address, None, deadline).await {
            Err(ConnectError::WrongPeer { found, .. }) => Ok(found),
            Err(error) => Err(error),
            // A peer may have chosen that name.
            Ok(_) => Ok(no_name),
        }
    }

    /// Returns the counters.
    pub fn stats(&self) -> SocketStats {
        self.shared.core.counters.read()
    }
}

impl Drop for SocketChannel {
    fn drop(&mut self) {
        self.shared.close();
        self.shared.threads.stop();
        #[cfg(feature = "nixl")]
        if let Some(plane) = self.shared.plane() {
            plane.end();
            if !plane.ends_by(Instant::now() + DROP_WAIT) {
                tracing::warn!("NIXL is still ending in the background");
            }
        }
        self.shared.timer.stop();
    }
}

impl TransferChannel for SocketChannel {
    fn kind(&self) -> &'static str {
        "socket"
    }

    fn id(&self) -> &PeerId {
        &self.shared.core.config.channel.id
    }

    fn address(&self) -> &Address {
        &self.address
    }

    fn connect<'a>(
        &'a self,
        peer: &'a PeerId,
        address: &'a Address,
        message: Option<Bytes>,
        deadline: Instant,
    ) -> BoxFuture<'a, Result<Option<Bytes>, ConnectError>> {
        Box::pin(self.connect(peer, address, message, deadline))
    }

    fn incarnation(&self) -> u64 {
        self.shared.local.incarnation
    }

    fn disconnect<'a>(
        &'a self,
        peer: &'a PeerId,
        deadline: Instant,
    ) -> BoxFuture<'a, Result<(), TransferError>> {
        Box::pin(self.disconnect(peer, deadline))
    }

    fn peer_incarnation(&self, peer: &PeerId) -> Option<u64> {
        self.connected(peer).ok()
    }

    #[cfg(feature = "nixl")]
    fn data_plane(&self, peer: &PeerId) -> Option<DataPlane> {
        self.shared.data_plane(peer)
    }

    #[cfg(not(feature = "nixl"))]
    fn data_plane(&self, peer: &PeerId) -> Option<DataPlane> {
        self.is_connected(peer).then_some(DataPlane::Sockets)
    }

    fn grant_read(
        &self,
        peer: &PeerId,
        slots: Vec<SealedSlot>,
    ) -> Result<ReadLease, TransferError> {
        let connected = || self.connected(peer);
        self.shared
            .core
            .leases
            .grant_read(&self.shared.core.config.channel, peer, slots, connected)
    }

    fn grant_write(
        &self,
        peer: &PeerId,
        slots: Vec<ReservedSlot>,
    ) -> Result<WriteLease, TransferError> {
        let connected = || self.connected(peer);
        self.shared.core.leases.grant_write(
            &self.shared.core.config.channel,
            peer,
            slots,
            connected,
        )
    }

    fn unit(&self) -> u64 {
        self.shared.core.config.channel.unit
    }

    fn arena_indices(&self, slots: &[&dyn InArena]) -> Result<Vec<Index>, TransferError> {
        checks::arena_indices(&self.shared.core.config.channel, self.incarnation(), slots)
    }

    fn send<'a>(
        &'a self,
        objects: Vec<SealedSlot>,
        peer: &'a PeerId,
        tag: u64,
        deadline: Instant,
    ) -> BoxFuture<'a, Sent> {
        Box::pin(self.shared.send(objects, peer, tag, deadline))
    }

    fn receive<'a>(
        &'a self,
        slots: Vec<ReservedSlot>,
        peer: &'a PeerId,
        tag: u64,
        deadline: Instant,
    ) -> BoxFuture<'a, Filled> {
        Box::pin(self.shared.receive(slots, peer, tag, deadline))
    }

    fn write<'a>(
        &'a self,
        objects: Vec<SealedSlot>,
        peer: &'a PeerId,
        indices: &'a [Index],
        deadline: Instant,
    ) -> BoxFuture<'a, Sent> {
        Box::pin(self.shared.write(objects, peer, indices, deadline))
    }

    fn read<'a>(
        &'a self,
        slots: Vec<ReservedSlot>,
        peer: &'a PeerId,
        indices: &'a [Index],
        deadline: Instant,
    ) -> BoxFuture<'a, Filled> {
        Box::pin(self.shared.read(slots, peer, indices, deadline))
    }

    fn close(&self, deadline: Instant) -> BoxFuture<'_, Result<(), TransferError>> {
        Box::pin(self.close(deadline))
    }
}

impl SocketChannel {
    async fn connect(
        &self,
        peer: &PeerId,
        address: &Address,
        message: Option<Bytes>,
        deadline: Instant,
    ) -> Result<Option<Bytes>, ConnectError> {
        let shared = &self.shared;
        if shared.is_closed() {
            return Err(ConnectError::Closed);
        }
        if let Some(found) = message
            .as_ref()
            .map(Bytes::len)
            .filter(|n| *n > MAX_MESSAGE)
        {
            return Err(ConnectError::Message { found });
        }
        let connect = async {
            let permit = shared.connects.acquire(peer).await;
            if self.is_connected(peer) {
                return Ok(None);
            }
            let (shared, peer) = (Arc::clone(shared), peer.clone());
            let address = address.clone();
            let connect = async move {
                // The task owns the permit, since it may finish although its caller is gone:
                // otherwise another connect would replace the connection that this task makes.
                let _permit = permit;
                handshake::connect(&shared, &peer, &address, message).await
            };
            let task = AbortOnDropHandle::new(self.shared.threads.first().spawn(connect));
            match task.await {
                Ok(connected) => connected,
                Err(error) if error.is_cancelled() => Err(ConnectError::Closed),
                Err(error) => Err(ConnectError::Library(error.to_string())),
            }
        };
        match shared.within(deadline, connect).await {
            Ok(connected) => connected,
            Err(Stop::Closed) => Err(ConnectError::Closed),
            Err(Stop::Deadline) => Err(ConnectError::Deadline { peer: peer.clone() }),
        }
    }

    async fn disconnect(&self, peer: &PeerId, deadline: Instant) -> Result<(), TransferError> {
        let connections = self.shared.connections(peer);
        connections.iter().for_each(|connection| connection.stop());
        let ended = async {
            for connection in connections {
                connection.ended().await;
            }
        };
        Ok(self.shared.within(deadline, ended).await?)
    }

    /// Returns the incarnation of a peer that is connected.
    fn connected(&self, peer: &PeerId) -> Result<u64, TransferError> {
        Ok(self.shared.connection(peer)?.remote.incarnation)
    }

    async fn close(&self, deadline: Instant) -> Result<(), TransferError> {
        self.shared.close();
        self.shared.threads.stop();
        let ended = async {
            #[cfg(feature = "nixl")]
            if let Some(plane) = self.shared.plane() {
                plane.end();
                plane.ended().await;
            }
            self.shared.threads.ended().await;
        };
        tokio::select! {
            biased;
            () = ended => {}
            () = self.shared.timer.at(deadline) => {
                return Err(TransferError::Deadline);
            }
        }
        self.shared.timer.stop();
        Ok(())
    }
}
