//! [`DaemonLink`]: the channels of a daemon to its peers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use lmc_backend::now;
use lmc_memory::{ReservedSlot, SealedSlot};
use lmc_transfer::{
    Address, AddressError, BoxFuture, ConnectError, Filled, Index, PeerId, ReadLease,
    SocketChannel, TransferChannel, TransferError,
};
use tokio::runtime::Handle;

use crate::link::Link;
use crate::message::{NixlAddress, Transport};
use crate::owner::Session;

/// Time that the end of a NIXL session may take.
const DISCONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// The channels of a daemon to its peers: sockets, and NIXL beside them.
///
/// A session over sockets is what makes a peer connected; one over NIXL moves bytes while it
/// stands, and ends with it.
#[derive(Debug)]
pub struct DaemonLink {
    pub(crate) sockets: SocketChannel,
    nixl: Option<Arc<dyn TransferChannel>>,
}

impl DaemonLink {
    pub(crate) fn new(sockets: SocketChannel, nixl: Option<Arc<dyn TransferChannel>>) -> Self {
        Self { sockets, nixl }
    }

    /// Connects to the NIXL channel of a peer, unless it is connected or this side has none.
    pub(crate) async fn connect_nixl(
        &self,
        peer: &PeerId,
        nixl: NixlAddress,
        at: &Address,
        deadline: Instant,
    ) -> Result<(), ConnectError> {
        let Some(channel) = &self.nixl else {
            return Ok(());
        };
        if self.has_nixl(peer, nixl) {
            return Ok(());
        }
        channel.connect(peer, at, None, deadline).await?;
        tracing::info!(%peer, "peer connected over NIXL");
        if !self.sockets.is_connected(peer) {
            // It went meanwhile.
            self.disconnect_nixl(peer).await;
        }
        Ok(())
    }

    /// Ends the NIXL session with a peer.
    pub(crate) async fn disconnect_nixl(&self, peer: &PeerId) {
        if let Some(channel) = &self.nixl {
            // What it cannot end stays in quarantine.
            let _ = channel.disconnect(peer, now() + DISCONNECT_TIMEOUT).await;
        }
    }

    pub(crate) async fn close(&self, deadline: Instant) -> Result<(), TransferError> {
        let nixl = match &self.nixl {
            Some(channel) => channel.close(deadline).await,
            None => Ok(()),
        };
        self.sockets.close(deadline).await.and(nixl)
    }

    fn channel(&self, by: Transport) -> Result<&dyn TransferChannel, TransferError> {
        match by {
            Transport::Sockets => Ok(&self.sockets),
            Transport::Nixl => self.nixl.as_deref().ok_or(TransferError::Closed),
        }
    }
}

/// Parses the address that a peer's hello or a directory names, with or without `tcp://`.
pub(crate) fn tcp_address(text: &str) -> Result<Address, AddressError> {
    let bare = text.strip_prefix("tcp://").unwrap_or(text);
    format!("tcp://{bare}").parse()
}

impl Link for DaemonLink {
    type Grant = ReadLease;

    fn connect<'a>(
        &'a self,
        peer: &'a PeerId,
        address: &'a str,
        deadline: Instant,
    ) -> BoxFuture<'a, Result<(), String>> {
        Box::pin(async move {
            let at = tcp_address(address).map_err(|error| error.to_string())?;
            let connected = self.sockets.connect(peer, &at, None, deadline).await;
            connected.map(drop).map_err(|error| error.to_string())
        })
    }

    fn disconnect<'a>(&'a self, peer: &'a PeerId, deadline: Instant) -> BoxFuture<'a, ()> {
        // What has not ended by the deadline ends later.
        Box::pin(async move { drop(self.sockets.disconnect(peer, deadline).await) })
    }

    fn is_current(&self, session: &Session) -> bool {
        self.sockets.peer_incarnation(&session.peer) == Some(session.incarnation)
    }

    fn home(&self, peer: &PeerId) -> Option<Handle> {
        self.sockets.home(peer)
    }

    fn nixl(&self) -> Option<NixlAddress> {
        let channel = self.nixl.as_ref()?;
        match channel.address() {
            Address::Tcp { port, .. } => Some(NixlAddress {
                port: *port,
                incarnation: channel.incarnation(),
            }),
            _ => None,
        }
    }

    fn has_nixl(&self, peer: &PeerId, nixl: NixlAddress) -> bool {
        let channel = self.nixl.as_ref();
        channel.and_then(|channel| channel.peer_incarnation(peer)) == Some(nixl.incarnation)
    }

    fn request<'a>(
        &'a self,
        peer: &'a PeerId,
        body: Vec<u8>,
        deadline: Instant,
    ) -> BoxFuture<'a, Result<Vec<u8>, TransferError>> {
        Box::pin(async move {
            let answer = self.sockets.ask(peer, body.into(), deadline).await;
            answer.map(Vec::from)
        })
    }

    fn grant(
        &self,
        peer: &PeerId,
        by: Transport,
        slots: Vec<SealedSlot>,
    ) -> Result<(Vec<Index>, ReadLease), TransferError> {
        let lease = self.channel(by)?.grant_read(peer, slots)?;
        Ok((lease.indices().to_vec(), lease))
    }

    fn read<'a>(
        &'a self,
        peer: &'a PeerId,
        by: Transport,
        slots: Vec<ReservedSlot>,
        indices: &'a [Index],
        deadline: Instant,
    ) -> BoxFuture<'a, Filled> {
        match self.channel(by) {
            Ok(channel) => channel.read(slots, peer, indices, deadline),
            Err(error) => Box::pin(std::future::ready(Filled::untouched(slots, error))),
        }
    }
}
