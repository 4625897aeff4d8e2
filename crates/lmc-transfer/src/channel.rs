//! The [`TransferChannel`] trait: the contract of every transport.

use std::fmt;
use std::time::Instant;

use bytes::Bytes;
use lmc_memory::{ReservedSlot, SealedSlot};

use crate::{
    Address, BoxFuture, ConnectError, DataPlane, Filled, InArena, Index, PeerId, ReadLease, Sent,
    TransferError, WriteLease,
};

/// Moves bytes between this process's arena and those of peers.
///
/// What every implementation MUST do:
///
/// - **Order and number.** Objects and indices correspond by their number in the batch. An empty
///   batch is done at once, also with a peer that is gone; batches of more than
///   [`crate::MAX_BATCH`] are refused. Objects of a batch may differ in size.
/// - **Checks first.** A call is refused before a byte moves, with an error that names the fault,
///   for: a slot of another arena, a number of indices that differs from the number of objects, an
///   index of an earlier incarnation, an unknown peer.
/// - **Leases.** A peer may read and write the slots that it was granted while the lease stands.
///   Once [`ReadLease::revoke`] or [`WriteLease::revoke`] has resolved, no access under the lease
///   is under way. A lease ends with the peer's incarnation. Indices of a lease that does not stand
///   are refused: they never name the next contents of a slot.
/// - **Deadlines.** Every call ends soon after its deadline, whatever the peer does.
/// - **Ownership.** Slots belong to the call. Slots that are read from are kept until nothing reads
///   them. A slot that is written to is returned as [`crate::Slot::Written`] only with all bytes of
///   the peer's object; as [`crate::Slot::Idle`] only when nothing writes to it any more. Otherwise
///   the implementation quarantines it ([`crate::Slot::Quarantined`]), and returns it to its pool
///   once it is proven idle: by the transport's completion, or by the end of everything that could
///   write to it.
/// - **Cancellation.** A future may be dropped at any point; the rules for slots hold then, too.
/// - **The arena and nothing else.** A peer reaches no byte outside the registered arena.
/// - **Incarnations.** The channel notices when a peer ends and starts again at its address: leases
///   and indices of the earlier incarnation are gone, [`TransferChannel::is_connected`] returns
///   `false`, and connecting works again.
/// - **Names.** No other identity takes over the name of a peer that is connected.
/// - **No panics** for anything that a peer, a network or a library may do.
pub trait TransferChannel: fmt::Debug + Send + Sync {
    /// Returns a short name for logs and metrics: `socket`.
    fn kind(&self) -> &'static str;

    /// Returns the name of this side.
    fn id(&self) -> &PeerId;

    /// Returns the number that distinguishes this channel from earlier ones of the same name.
    fn incarnation(&self) -> u64;

    /// Returns the address that peers connect to.
    fn address(&self) -> &Address;

    /// Connects to a peer, once: `message` goes to the peer's [`crate::OnConnect`], whose answer is
    /// returned. If the peer is connected already, nothing is sent, and `None` is returned.
    /// Afterwards both sides know each other. A connect that failed at its deadline may have
    /// succeeded at the peer: then the message was delivered, and the answer is lost.
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

    /// Ends all connections to a peer, and all leases granted to it. Resolves when nothing of that
    /// peer is under way at this side, as far as the transport can tell.
    ///
    /// # Errors
    /// [`TransferError::Deadline`].
    fn disconnect<'a>(
        &'a self,
        peer: &'a PeerId,
        deadline: Instant,
    ) -> BoxFuture<'a, Result<(), TransferError>>;

    /// Returns the incarnation of a peer that is connected.
    fn peer_incarnation(&self, peer: &PeerId) -> Option<u64>;

    /// Returns whether the peer can be named in transfers: from a connect of either side until the
    /// peer is known to be gone.
    fn is_connected(&self, peer: &PeerId) -> bool {
        self.peer_incarnation(peer).is_some()
    }

    /// Returns the plane that moves the bytes of reads from a peer now; `None` for a peer that is not
    /// connected.
    fn data_plane(&self, peer: &PeerId) -> Option<DataPlane>;

    /// Lets a connected peer read these slots until the lease ends. The lease pins them.
    ///
    /// # Errors
    /// [`TransferError::UnknownPeer`], [`TransferError::NotRegistered`],
    /// [`TransferError::TooMany`], [`TransferError::Closed`].
    fn grant_read(&self, peer: &PeerId, slots: Vec<SealedSlot>)
    -> Result<ReadLease, TransferError>;

    /// Lets a connected peer write to these slots until the lease ends.
    ///
    /// # Errors
    /// As [`Self::grant_read`], and [`TransferError::ReadOnly`] when the channel's rights are
    /// [`crate::Rights::Read`].
    fn grant_write(
        &self,
        peer: &PeerId,
        slots: Vec<ReservedSlot>,
    ) -> Result<WriteLease, TransferError>;

    /// Returns the unit of this side: the bytes that one step of an open arena's index stands for.
    fn unit(&self) -> u64;

    /// Returns indices of these slots in the open arena. Any peer may read under these indices, and
    /// write if it has the right, also after the slots hold other objects: the indices pin nothing
    /// and never end. Only for peers of one trust domain: see [`crate::ChannelConfig::open_arena`].
    ///
    /// # Errors
    /// [`TransferError::NotOpen`], [`TransferError::NotRegistered`],
    /// [`TransferError::Unaligned`].
    fn arena_indices(&self, slots: &[&dyn InArena]) -> Result<Vec<Index>, TransferError>;

    /// Sends objects to a peer that receives under the same tag. Resolves when the objects have
    /// arrived.
    fn send<'a>(
        &'a self,
        objects: Vec<SealedSlot>,
        peer: &'a PeerId,
        tag: u64,
        deadline: Instant,
    ) -> BoxFuture<'a, Sent>;

    /// Receives the objects that a peer sends under the same tag, each into the slot with its
    /// number. A peer may send fewer objects than there are slots; each object has the length of
    /// its slot.
    fn receive<'a>(
        &'a self,
        slots: Vec<ReservedSlot>,
        peer: &'a PeerId,
        tag: u64,
        deadline: Instant,
    ) -> BoxFuture<'a, Filled>;

    /// Writes objects into a peer's memory, at indices that the peer granted for writing. The
    /// peer calls nothing.
    ///
    /// Writes to the same index have no order: a write that ends without being idle
    /// ([`Sent::idle`]) may still arrive after a later write.
    fn write<'a>(
        &'a self,
        objects: Vec<SealedSlot>,
        peer: &'a PeerId,
        indices: &'a [Index],
        deadline: Instant,
    ) -> BoxFuture<'a, Sent>;

    /// Reads from a peer's memory, at indices that the peer granted. Each slot is filled. The peer
    /// calls nothing.
    fn read<'a>(
        &'a self,
        slots: Vec<ReservedSlot>,
        peer: &'a PeerId,
        indices: &'a [Index],
        deadline: Instant,
    ) -> BoxFuture<'a, Filled>;

    /// Ends all connections and deregisters the memory. Calls under way, and later ones, fail with
    /// [`TransferError::Closed`]. Nothing is left running afterwards.
    ///
    /// # Errors
    /// [`TransferError::Deadline`] when a transfer could not be ended in time: it keeps the memory
    /// that it may still touch.
    fn close(&self, deadline: Instant) -> BoxFuture<'_, Result<(), TransferError>>;
}
