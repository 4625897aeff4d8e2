//! Transfers over sockets, for hosts without anything faster.
//!
//! A connection has several streams, each on one thread; a batch is spread over them by bytes.
//! Bytes go from the arena to the kernel and from the kernel into the arena, with no copy
//! between. Each piece of 256 KiB has a checksum, made just before it is sent and verified just
//! after it came.
//!
//! To wake a thread takes as long as a small transfer. So who has a frame of up to 64 KiB sends it
//! himself while its stream is idle, and a send of so few bytes brings them along with its offer;
//! a side holds up to 4 MiB of those for each connection, and they alone are copied once more.
//!
//! A slot of a call can be taken back at any time, since only this process writes to it: what
//! still comes from the peer is then read and thrown away. So nothing waits in quarantine.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use lmc_memory::{ReservedSlot, SealedSlot};
use tokio::sync::OwnedMutexGuard;
use tokio::task::JoinHandle;

use crate::{
    Address, BoxFuture, ConnectError, Filled, InArena, Index, MAX_MESSAGE, PeerId, Sent,
    TransferChannel, TransferError, checks,
};

mod config;
mod connection;
mod door;
mod endpoint;
mod frame;
mod greet;
mod handshake;
mod inlet;
mod landing;
mod one_sided;
mod outlet;
mod paired;
mod rendezvous;
mod shared;
mod spread;
mod stats;
mod threads;
mod timer;
mod window;

#[cfg(test)]
mod tests;

pub use config::{SocketConfig, SocketError};
use endpoint::Listener;
use shared::{Shared, Stop};
pub use stats::SocketStats;
use threads::Threads;
use timer::Timer;

/// Any bytes as frames, and as a handshake.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn fuzz(data: &[u8]) {
    frame::fuzz(data);
    handshake::fuzz(data);
}

/// A channel over TCP or Unix sockets. Its work is done by threads of its own, named
/// `lmc-socket…`.
///
/// Writes to the same place are not kept in order: one that was not quiet when it ended may
/// still arrive after a later one.
#[derive(Debug)]
pub struct SocketChannel {
    shared: Arc<Shared>,
    address: Address,
}

impl SocketChannel {
    fn start(config: SocketConfig) -> Result<Self, SocketError> {
        let threads = Threads::start(config.threads).map_err(SocketError::Start)?;
        let listen = config.listen.clone();
        let listener = {
            let _entered = threads.first().enter();
            match Listener::bind(&listen) {
                None => return Err(SocketError::Address(listen)),
                Some(bound) => bound.map_err(|error| SocketError::Listen {
                    address: listen,
                    error,
                })?,
            }
        };
        let address = listener.address().clone();
        let incarnation = greet::incarnation().map_err(SocketError::Start)?;
        let timer = Timer::start().map_err(SocketError::Start)?;
        let shared = Arc::new(Shared::new(config, incarnation, timer, threads));
        let accept = greet::accept(Arc::clone(&shared), listener);
        shared.threads.first().spawn(accept);
        Ok(Self { shared, address })
    }

    /// What was counted so far.
    pub fn stats(&self) -> SocketStats {
        self.shared.counters.read()
    }
}

impl Drop for SocketChannel {
    fn drop(&mut self) {
        self.shared.close();
        self.shared.threads.stop();
        self.shared.timer.stop();
    }
}

impl TransferChannel for SocketChannel {
    fn kind(&self) -> &'static str {
        "socket"
    }

    fn id(&self) -> &PeerId {
        &self.shared.config.channel.id
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

    fn is_connected(&self, peer: &PeerId) -> bool {
        self.shared.connection(peer).is_ok()
    }

    fn unit(&self) -> u64 {
        self.shared.config.channel.unit
    }

    fn indices(&self, slots: &[&dyn InArena]) -> Result<Vec<Index>, TransferError> {
        checks::indices(self.shared.window.arena(), self.unit(), slots)
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
            let turn = Turn::wait(shared, peer).await;
            if self.is_connected(peer) {
                return Ok(None);
            }
            let (shared, peer) = (Arc::clone(shared), peer.clone());
            let address = address.clone();
            let connect = async move {
                // The task's, since it may come to its end although nobody waits for it any more:
                // another would then take the place of what it has connected.
                let _turn = turn;
                greet::connect(&shared, &peer, &address, message).await
            };
            let task = AbortOnDrop(self.shared.threads.first().spawn(connect));
            task.join().await
        };
        match shared.within(deadline, connect).await {
            Ok(connected) => connected,
            Err(Stop::Closed) => Err(ConnectError::Closed),
            Err(Stop::Deadline) => Err(ConnectError::Deadline { peer: peer.clone() }),
        }
    }

    async fn close(&self, deadline: Instant) -> Result<(), TransferError> {
        self.shared.close();
        self.shared.threads.stop();
        tokio::select! {
            biased;
            () = self.shared.threads.ended() => {}
            () = self.shared.timer.at(deadline) => {
                return Err(TransferError::Deadline { quiet: false });
            }
        }
        self.shared.timer.stop();
        Ok(())
    }
}

/// The right to connect to a peer, one after another.
struct Turn {
    _guard: OwnedMutexGuard<()>,
    _entry: TurnEntry,
}

impl Turn {
    async fn wait(shared: &Arc<Shared>, peer: &PeerId) -> Self {
        let entry = TurnEntry::new(shared, peer);
        let guard = Arc::clone(&entry.lock).lock_owned().await;
        Self {
            _guard: guard,
            _entry: entry,
        }
    }
}

/// An entry in the table of turns, for as long as somebody has or waits for one.
struct TurnEntry {
    shared: Arc<Shared>,
    peer: PeerId,
    lock: Arc<tokio::sync::Mutex<()>>,
}

impl TurnEntry {
    fn new(shared: &Arc<Shared>, peer: &PeerId) -> Self {
        let mut turns = shared.turns.lock();
        let lock = Arc::clone(turns.entry(peer.clone()).or_default());
        Self {
            shared: Arc::clone(shared),
            peer: peer.clone(),
            lock,
        }
    }
}

impl Drop for TurnEntry {
    fn drop(&mut self) {
        let mut turns = self.shared.turns.lock();
        // The table's and this one.
        if Arc::strong_count(&self.lock) == 2 {
            turns.remove(&self.peer);
        }
    }
}

/// A task that ends with whoever waits for it.
struct AbortOnDrop(JoinHandle<Result<Option<Bytes>, ConnectError>>);

impl AbortOnDrop {
    async fn join(mut self) -> Result<Option<Bytes>, ConnectError> {
        match (&mut self.0).await {
            Ok(connected) => connected,
            Err(error) if error.is_cancelled() => Err(ConnectError::Closed),
            Err(error) => Err(ConnectError::Library(error.to_string())),
        }
    }
}

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}
