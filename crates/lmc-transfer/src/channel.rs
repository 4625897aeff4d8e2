//! The trait.

use std::fmt;
use std::pin::Pin;
use std::time::Instant;

use bytes::Bytes;
use lmc_memory::{ReservedSlot, SealedSlot};

use crate::{Address, ConnectError, Filled, InArena, Index, PeerId, Sent, TransferError};

/// A boxed future that may move between threads. It needs no particular runtime.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Moves bytes between this process's arena and those of peers.
///
/// What every implementation MUST do:
///
/// - **Order and number.** Objects and indices go together by their place in the batch. An empty
///   batch is done at once, also with a peer that is gone; more than [`crate::MAX_BATCH`] are
///   refused. Objects of a batch may differ in size.
/// - **Checks first.** A slot of another arena, a number of indices that is not that of the
///   objects, a place outside the peer's arena, an unknown peer: refused before a byte moves, with
///   an error that says which.
/// - **Deadlines.** Every call is over soon after its deadline, whatever the peer does.
/// - **Ownership.** Slots belong to the call. Slots that are read from are kept until nothing
///   reads them. A slot that is written to comes back as [`crate::Slot::Written`] only with all bytes of
///   the peer's object; as [`crate::Slot::Quiet`] only when nothing writes to it any more; otherwise the
///   implementation keeps it in quarantine ([`crate::Slot::Quarantined`]) and gives it back to its pool
///   on proof: the transport's completion, or the end of what could write.
/// - **Cancellation.** A future may be dropped at any point: the same holds for its slots.
/// - **The arena and nothing else.** A peer reaches no byte outside the registered arena. Over
///   NIXL, which does not enforce that, this is said of peers that are channels of this crate.
/// - **Incarnations.** A peer that ended and started again at its address is noticed: what it had
///   before is gone, [`TransferChannel::is_connected`] says no, and connecting works anew.
/// - **No panics** for anything that a peer, a network or a library may do.
pub trait TransferChannel: fmt::Debug + Send + Sync {
    /// A short name for logs and metrics: `memory`, `socket`, `nixl`.
    fn kind(&self) -> &'static str;

    /// Who this side is.
    fn id(&self) -> &PeerId;

    /// Where peers connect to.
    fn address(&self) -> &Address;

    /// Connects to a peer, once: memory descriptors are exchanged, `message` goes to the peer's
    /// [`crate::OnConnect`], and what that answers comes back. Connected already: nothing is sent,
    /// and nothing comes back. Afterwards both sides know each other. A connect that is given up
    /// or late may have been one for the peer: its message was heard then, and its answer is lost.
    ///
    /// # Errors
    /// [`ConnectError`].
    fn connect<'a>(
        &'a self,
        peer: &'a PeerId,
        address: &'a Address,
        message: Option<Bytes>,
        deadline: Instant,
    ) -> BoxFuture<'a, Result<Option<Bytes>, ConnectError>>;

    /// Whether the peer can be named in transfers; true from a connect of either side until the
    /// peer is known to be gone.
    fn is_connected(&self, peer: &PeerId) -> bool;

    /// Bytes that one step of an [`Index`] stands for on this side.
    fn unit(&self) -> u64;

    /// The indices under which peers name slots of this side, whatever is in them.
    ///
    /// # Errors
    /// [`TransferError::NotRegistered`], [`TransferError::Unaligned`].
    fn indices(&self, slots: &[&dyn InArena]) -> Result<Vec<Index>, TransferError>;

    /// Sends objects to a peer that receives under the same tag. It is over when they are there.
    fn send<'a>(
        &'a self,
        objects: Vec<SealedSlot>,
        peer: &'a PeerId,
        tag: u64,
        deadline: Instant,
    ) -> BoxFuture<'a, Sent>;

    /// Receives what a peer sends under the same tag: each object into the slot of its place. A
    /// peer may send fewer objects than there are slots; the lengths of those it sends are those
    /// of the slots.
    fn receive<'a>(
        &'a self,
        slots: Vec<ReservedSlot>,
        peer: &'a PeerId,
        tag: u64,
        deadline: Instant,
    ) -> BoxFuture<'a, Filled>;

    /// Writes objects into a peer's arena, at the peer's indices. The peer does nothing.
    ///
    /// Writes to the same place have no order: one that ended without being quiet may still arrive
    /// after a later one.
    fn write<'a>(
        &'a self,
        objects: Vec<SealedSlot>,
        peer: &'a PeerId,
        indices: &'a [Index],
        deadline: Instant,
    ) -> BoxFuture<'a, Sent>;

    /// Reads from a peer's arena, at the peer's indices, as many bytes as each slot has. The peer
    /// does nothing.
    fn read<'a>(
        &'a self,
        slots: Vec<ReservedSlot>,
        peer: &'a PeerId,
        indices: &'a [Index],
        deadline: Instant,
    ) -> BoxFuture<'a, Filled>;

    /// Ends all connections and deregisters the memory. Calls under way end with
    /// [`TransferError::Closed`], later ones begin with it. Nothing is left running afterwards.
    ///
    /// # Errors
    /// [`TransferError::Deadline`] when something could not be ended in time: it keeps what it
    /// may still touch.
    fn close(&self, deadline: Instant) -> BoxFuture<'_, Result<(), TransferError>>;
}
