//! [`DaemonLink`]: the channel of a daemon to its peers.

use std::time::Instant;

use lmc_memory::{ReservedSlot, SealedSlot};
use lmc_transfer::{
    Address, AddressError, BoxFuture, DataPlane, Filled, Index, PeerId, ReadLease, SocketChannel,
    TransferChannel, TransferError,
};
use tokio::runtime::Handle;

use crate::link::Link;
use crate::owner::Session;

/// The channel of a daemon to its peers.
#[derive(Debug)]
pub struct DaemonLink {
    pub(crate) channel: SocketChannel,
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
            let connected = self.channel.connect(peer, &at, None, deadline).await;
            connected.map(drop).map_err(|error| error.to_string())
        })
    }

    fn disconnect<'a>(&'a self, peer: &'a PeerId, deadline: Instant) -> BoxFuture<'a, ()> {
        // What has not ended by the deadline ends later.
        Box::pin(async move { drop(self.channel.disconnect(peer, deadline).await) })
    }

    fn is_current(&self, session: &Session) -> bool {
        self.channel.peer_incarnation(&session.peer) == Some(session.incarnation)
    }

    fn home(&self, peer: &PeerId) -> Option<Handle> {
        self.channel.home(peer)
    }

    fn data_plane(&self, peer: &PeerId) -> DataPlane {
        self.channel.data_plane(peer).unwrap_or_default()
    }

    fn request<'a>(
        &'a self,
        peer: &'a PeerId,
        body: Vec<u8>,
        deadline: Instant,
    ) -> BoxFuture<'a, Result<Vec<u8>, TransferError>> {
        Box::pin(async move {
            let answer = self.channel.ask(peer, body.into(), deadline).await;
            answer.map(Vec::from)
        })
    }

    fn grant(
        &self,
        peer: &PeerId,
        slots: Vec<SealedSlot>,
    ) -> Result<(Vec<Index>, ReadLease), TransferError> {
        let lease = self.channel.grant_read(peer, slots)?;
        Ok((lease.indices().to_vec(), lease))
    }

    fn read<'a>(
        &'a self,
        peer: &'a PeerId,
        slots: Vec<ReservedSlot>,
        indices: &'a [Index],
        deadline: Instant,
    ) -> BoxFuture<'a, Filled> {
        self.channel.read(slots, peer, indices, deadline)
    }
}
