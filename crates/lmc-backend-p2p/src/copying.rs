//! Copies to a peer on an operator's order: this daemon names its chunks, the peer reads them as
//! it reads any other.

use std::sync::Arc;
use std::time::Duration;

use lmc_backend::{HostChunk, LocateHint, now};
use lmc_key::ChunkKey;
use lmc_transfer::PeerId;
use thiserror::Error;

use crate::link::{Link, until};
use crate::message::{KeyBatch, Refusal, Reply, Request, Stamped};
use crate::node::Node;
use crate::owner::Session;

/// Bytes that a peer is ordered to read at a time, at most.
pub(crate) const BATCH_BYTES: u64 = 32 << 20;
/// Time that a peer takes for one order, at most.
pub(crate) const ORDER_TIMEOUT: Duration = Duration::from_secs(20);
/// Time in which the daemon that orders says which of the chunks it has. No prompt waits for it.
pub(crate) const ORDER_LOCATE_TIMEOUT: Duration = Duration::from_secs(5);
/// Time beyond that for the answer.
pub(crate) const ANSWER_MARGIN: Duration = Duration::from_secs(2);

/// A copy that did not come to its end.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CopyError {
    /// The peer reads for another order of this daemon.
    #[error("the peer is still reading for an earlier order")]
    Busy,
    /// The peer's release cannot copy.
    #[error("the peer's release does not take orders to copy")]
    Unsupported,
    /// The peer did not answer.
    #[error("{0}")]
    NoAnswer(String),
}

impl<L: Link> Node<L> {
    /// Reads chunks from a peer that asked for it. Answers how many of them are in memory then.
    pub(crate) async fn read_for(&self, session: &Session, keys: &Stamped<KeyBatch>) -> Reply {
        if !self.is_in_step(&session.peer, keys.clears) {
            return Reply::Copying(0);
        }
        let begun = self
            .peers
            .lock()
            .of_session(session)
            .map(|peer| peer.begin_copy());
        let Some(Some(_one_at_a_time)) = begun else {
            return Reply::Refused(Refusal::TooMany);
        };
        let keys = keys.message.keys();
        let hint = LocateHint::default()
            .with_sources(Arc::new([session.peer.to_string()]))
            .with_timeout(ORDER_LOCATE_TIMEOUT);
        // What was not read by then is not waited for.
        let _ = until(now() + ORDER_TIMEOUT, self.host.promote(&keys, hint)).await;
        let states = self.host.states(&keys).into_iter();
        let there = states.filter(|state| matches!(state, HostChunk::Memory { .. }));
        Reply::Copying(there.count() as u32)
    }

    /// Returns the connected peers that a name, an address or a name on the channel means.
    pub fn peers_named(&self, name: &str) -> Vec<PeerId> {
        let peers = self.peers.lock();
        let name = [name.to_owned()];
        let named = peers.iter().filter(|peer| peer.is_one_of(&name));
        named.map(|peer| peer.session.peer.clone()).collect()
    }

    /// Orders a peer to read chunks of one prompt from this daemon, in their order, which must be
    /// the prompt's: key and payload bytes of each. Returns how many of them the peer has in memory
    /// then; fewer where its bounds or those of this daemon's leases do not allow more.
    ///
    /// # Errors
    /// [`CopyError`].
    pub async fn copy_to(
        &self,
        peer: &PeerId,
        chunks: &[(ChunkKey, u64)],
    ) -> Result<u64, CopyError> {
        let mut copied = 0;
        let mut rest = chunks;
        while !rest.is_empty() {
            let mut bytes = 0;
            let fits = |(_, len): &&(ChunkKey, u64)| {
                bytes += len;
                bytes <= BATCH_BYTES
            };
            let most = rest.iter().take_while(fits).count().max(1);
            let keys: Vec<ChunkKey> = rest[..most].iter().map(|(key, _)| *key).collect();
            let Some((batch, len)) = KeyBatch::leading(&keys) else {
                break;
            };
            rest = &rest[len..];
            let deadline = now() + ORDER_TIMEOUT + ANSWER_MARGIN;
            let order = Request::Copy(self.stamped(batch));
            let there = match self.ask(peer, &order, deadline).await {
                Ok(Reply::Copying(there)) => (there as usize).min(len),
                Ok(Reply::Refused(Refusal::TooMany)) => return Err(CopyError::Busy),
                Ok(Reply::Unsupported(_)) => return Err(CopyError::Unsupported),
                Ok(other) => return Err(CopyError::NoAnswer(format!("{other:?}"))),
                Err(reason) => return Err(CopyError::NoAnswer(reason)),
            };
            copied += there as u64;
            if there < len {
                // What follows a gap is of no use.
                break;
            }
        }
        Ok(copied)
    }
}
