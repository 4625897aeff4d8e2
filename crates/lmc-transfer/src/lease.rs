//! Leases: the memory of this side that a peer may access, and for how long.
//!
//! The owner grants slots to one incarnation of one peer. A lease is named by a number that its
//! channel never uses twice, so an old index never names new contents: the channel looks up each
//! index before a byte moves, and between any two pieces. Each access under way holds a [`Pin`]. A
//! revoked lease gives out no more pins, and its slots come back with the last pin.

use std::collections::HashMap;
use std::sync::Arc;

use lmc_memory::{ReservedSlot, SealedSlot};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

use crate::in_arena::{InArena, check_slots};
use crate::{ChannelConfig, Index, PeerId, Rights, TransferError};

/// The memory that a range lies in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) enum Region {
    Arena,
    Lease(u64),
    /// Objects of a send.
    Offer(u64),
}

/// A range of the other side's memory, as a request names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Range {
    pub(crate) region: Region,
    /// The slot of the lease, or the object of the offer.
    pub(crate) slot: u64,
    /// Bytes from the start of the slot, the object or the arena.
    pub(crate) offset: u64,
    /// Bytes; never 0.
    pub(crate) len: u64,
}

/// A range of an arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Segment {
    /// Bytes from the arena's start.
    pub(crate) offset: u64,
    /// Bytes; never 0.
    pub(crate) len: u64,
}

impl Segment {
    /// Returns a part of the segment; `None` if the part exceeds it.
    pub(crate) fn part(self, offset: u64, len: u64) -> Option<Self> {
        let end = offset.checked_add(len)?;
        (end <= self.len).then(|| Self {
            offset: self.offset + offset,
            len,
        })
    }
}

/// The access that a lease allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Write,
}

#[derive(Debug)]
enum Slots {
    Read(Vec<SealedSlot>),
    Write(Vec<ReservedSlot>),
}

/// The slots of a lease, for as long as something may touch them.
#[derive(Debug)]
struct Held {
    slots: Option<Slots>,
    back: Option<oneshot::Sender<Slots>>,
}

impl Drop for Held {
    fn drop(&mut self) {
        if let (Some(back), Some(slots)) = (self.back.take(), self.slots.take()) {
            // Where the lease was dropped, its slots go back to their pool.
            let _ = back.send(slots);
        }
    }
}

/// Pins the slots of a lease for one access.
#[derive(Debug, Clone)]
pub(crate) struct Pin {
    held: Arc<Held>,
}

impl Pin {
    /// Returns a slot of a lease for reading.
    pub(crate) fn sealed(&self, slot: u64) -> Option<&SealedSlot> {
        let Some(Slots::Read(slots)) = &self.held.slots else {
            return None;
        };
        slots.get(usize::try_from(slot).ok()?)
    }
}

/// A lease, as the channel sees it.
#[derive(Debug)]
pub(crate) struct Granted {
    number: u64,
    access: Access,
    peer_incarnation: u64,
    segments: Vec<Segment>,
    /// `None` once it is revoked.
    held: Mutex<Option<Arc<Held>>>,
}

impl Granted {
    /// Begins an access; `None` once the lease is revoked.
    pub(crate) fn pin(&self) -> Option<Pin> {
        let held = self.held.lock().clone()?;
        Some(Pin { held })
    }

    /// Returns the part of the arena that a range of the lease covers.
    pub(crate) fn segment(&self, range: Range) -> Option<Segment> {
        let slot = usize::try_from(range.slot).ok()?;
        self.segments.get(slot)?.part(range.offset, range.len)
    }

    fn revoke(&self) {
        let held = self.held.lock().take();
        drop(held);
    }
}

/// All leases of a channel.
#[derive(Debug)]
pub(crate) struct Leases {
    incarnation: u64,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    last: u64,
    leases: HashMap<u64, Arc<Granted>>,
}

impl Leases {
    pub(crate) fn new(incarnation: u64) -> Arc<Self> {
        Arc::new(Self {
            incarnation,
            table: Mutex::default(),
        })
    }

    /// Grants slots for reading. `connected` looks up the peer's incarnation.
    pub(crate) fn grant_read(
        self: &Arc<Self>,
        config: &ChannelConfig,
        peer: &PeerId,
        slots: Vec<SealedSlot>,
        connected: impl Fn() -> Result<u64, TransferError>,
    ) -> Result<ReadLease, TransferError> {
        check_slots(&config.arena, &slots)?;
        let (segments, slots) = (segments(&slots), Slots::Read(slots));
        let lease = self.grant(peer, connected()?, Access::Read, segments, slots);
        lease.check(connected).map(ReadLease)
    }

    /// Grants slots for writing. `connected` looks up the peer's incarnation.
    pub(crate) fn grant_write(
        self: &Arc<Self>,
        config: &ChannelConfig,
        peer: &PeerId,
        slots: Vec<ReservedSlot>,
        connected: impl Fn() -> Result<u64, TransferError>,
    ) -> Result<WriteLease, TransferError> {
        if config.rights != Rights::ReadWrite {
            return Err(TransferError::ReadOnly);
        }
        check_slots(&config.arena, &slots)?;
        let (segments, slots) = (segments(&slots), Slots::Write(slots));
        let lease = self.grant(peer, connected()?, Access::Write, segments, slots);
        lease.check(connected).map(WriteLease)
    }

    fn grant(
        self: &Arc<Self>,
        peer: &PeerId,
        peer_incarnation: u64,
        access: Access,
        segments: Vec<Segment>,
        slots: Slots,
    ) -> Lease {
        let (back, returned) = oneshot::channel();
        let held = Arc::new(Held {
            slots: Some(slots),
            back: Some(back),
        });
        let mut table = self.table.lock();
        table.last += 1;
        let number = table.last;
        let index = |slot| Index {
            incarnation: self.incarnation,
            lease: number,
            slot,
        };
        let indices = (0..segments.len() as u64).map(index).collect();
        let granted = Arc::new(Granted {
            number,
            access,
            peer_incarnation,
            segments,
            held: Mutex::new(Some(held)),
        });
        table.leases.insert(number, Arc::clone(&granted));
        Lease {
            leases: Arc::clone(self),
            peer: peer.clone(),
            granted,
            indices,
            returned: Some(returned),
        }
    }

    /// Looks up a lease for the incarnation of a peer.
    ///
    /// # Errors
    /// [`Denied`].
    pub(crate) fn find(
        &self,
        number: u64,
        peer_incarnation: u64,
        access: Access,
    ) -> Result<Arc<Granted>, Denied> {
        let granted = self.table.lock().leases.get(&number).cloned();
        let granted = granted.filter(|granted| granted.peer_incarnation == peer_incarnation);
        match granted {
            None => Err(Denied::NotLeased),
            Some(granted) if granted.access != access => Err(Denied::Access),
            Some(granted) => Ok(granted),
        }
    }

    /// Ends all leases of an incarnation of a peer.
    pub(crate) fn end(&self, peer_incarnation: u64) {
        let mut table = self.table.lock();
        let its =
            |_: &u64, granted: &mut Arc<Granted>| granted.peer_incarnation == peer_incarnation;
        let ended: Vec<Arc<Granted>> = table.leases.extract_if(its).map(|(_, g)| g).collect();
        drop(table);
        ended.iter().for_each(|granted| granted.revoke());
    }

    /// Ends all leases.
    pub(crate) fn end_all(&self) {
        let ended = std::mem::take(&mut self.table.lock().leases);
        ended.values().for_each(|granted| granted.revoke());
    }

    fn revoke(&self, granted: &Granted) {
        let removed = self.table.lock().leases.remove(&granted.number);
        granted.revoke();
        drop(removed);
    }
}

/// The reason why a lease does not serve a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Denied {
    /// The lease was revoked, or never granted to this peer.
    NotLeased,
    /// The lease allows the other kind of access.
    Access,
}

/// The owner's side of a lease. Dropping it revokes the lease.
#[derive(Debug)]
struct Lease {
    leases: Arc<Leases>,
    peer: PeerId,
    granted: Arc<Granted>,
    indices: Vec<Index>,
    returned: Option<oneshot::Receiver<Slots>>,
}

fn segments<S: InArena>(slots: &[S]) -> Vec<Segment> {
    let segment = |slot: &S| Segment {
        offset: slot.offset(),
        len: slot.bytes(),
    };
    slots.iter().map(segment).collect()
}

impl Lease {
    /// Returns the lease, unless the peer was gone before it was made: nothing would end the lease
    /// then.
    fn check(
        self,
        connected: impl Fn() -> Result<u64, TransferError>,
    ) -> Result<Self, TransferError> {
        match connected()? == self.granted.peer_incarnation {
            true => Ok(self),
            false => Err(TransferError::UnknownPeer {
                peer: self.peer.clone(),
            }),
        }
    }

    fn stands(&self) -> bool {
        self.granted.held.lock().is_some()
    }

    /// Revokes at once; the future waits for the slots.
    fn revoke(mut self) -> impl Future<Output = Option<Slots>> + Send + use<> {
        let returned = self.returned.take();
        drop(self);
        async move { returned?.await.ok() }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.leases.revoke(&self.granted);
    }
}

/// The right of one peer to read certain slots, which it pins. Dropping it revokes it.
#[derive(Debug)]
#[must_use = "dropping a lease revokes it"]
pub struct ReadLease(Lease);

/// The right of one peer to write to certain slots. Dropping it revokes it.
#[derive(Debug)]
#[must_use = "dropping a lease revokes it"]
pub struct WriteLease(Lease);

macro_rules! lease {
    ($($lease:ident),*) => {$(
        impl $lease {
            /// Returns the peer that the lease was granted to.
            pub fn peer(&self) -> &PeerId {
                &self.0.peer
            }

            /// Returns the index of each slot, in the order in which they were granted.
            pub fn indices(&self) -> &[Index] {
                &self.0.indices
            }

            /// Returns whether the lease stands. It ends with the peer's last connection.
            pub fn stands(&self) -> bool {
                self.0.stands()
            }
        }
    )*};
}
lease!(ReadLease, WriteLease);

impl ReadLease {
    /// Revokes the lease at once. The future resolves when nothing of the peer reads the slots any
    /// more; it may be dropped.
    ///
    /// Over sockets that takes until the piece of 256 KiB that is being sent is out, or until the
    /// connection ends if the peer reads no more. Over NIXL it takes until the peer's transfer
    /// ends.
    pub fn revoke(self) -> impl Future<Output = ()> + Send + use<> {
        let returned = self.0.revoke();
        async move {
            drop(returned.await);
        }
    }
}

impl WriteLease {
    /// Revokes the lease at once. The future resolves when nothing of the peer writes to the slots
    /// any more, and returns them. If it is dropped, the slots go back to their pool then.
    ///
    /// Only the peer knows which slots it has written; the bytes of other slots are undefined.
    pub fn revoke(self) -> impl Future<Output = Vec<ReservedSlot>> + Send + use<> {
        let returned = self.0.revoke();
        async move {
            match returned.await {
                Some(Slots::Write(slots)) => slots,
                Some(Slots::Read(_)) | None => Vec::new(),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Waker};

    use lmc_memory::{ArenaConfig, Pool, PoolConfig};

    use super::*;
    use crate::block_on;

    fn pool() -> (Pool, ChannelConfig) {
        let arena = ArenaConfig::anonymous(1 << 20).build().expect("1 MiB");
        let pool = Pool::new(Arc::new(arena), PoolConfig::default()).expect("a pool");
        let owner = "owner".parse().expect("an id");
        let mut config = ChannelConfig::new(owner, Arc::clone(pool.arena()));
        config.rights = Rights::ReadWrite;
        (pool, config)
    }

    fn is_three() -> Result<u64, TransferError> {
        Ok(3)
    }

    fn range(lease: &ReadLease, slot: usize, offset: u64, len: u64) -> Range {
        Range {
            region: Region::Lease(lease.indices()[slot].lease),
            slot: lease.indices()[slot].slot,
            offset,
            len,
        }
    }

    #[test]
    fn a_revoked_lease_gives_its_slots_back_with_the_last_pin() {
        let ((pool, config), leases) = (pool(), Leases::new(7));
        let peer: PeerId = "peer".parse().expect("an id");
        let slot = |len| pool.reserve(len).expect("capacity");
        let sealed = vec![slot(10).written().seal(), slot(20).written().seal()];
        let lease = leases.grant_read(&config, &peer, sealed, is_three);
        let lease = lease.expect("connected");
        let number = lease.indices()[0].lease;
        assert!(
            leases.find(number, 4, Access::Read).is_err(),
            "another peer"
        );
        let denied = leases.find(number, 3, Access::Write).map(|_| ());
        assert_eq!(denied, Err(Denied::Access));
        let granted = leases.find(number, 3, Access::Read).expect("granted");
        assert_eq!(
            granted.segment(range(&lease, 1, 5, 15)).map(|s| s.len),
            Some(15)
        );
        for (slot, offset, len) in [(1, 5, 16), (0, 11, 1), (0, u64::MAX, 2)] {
            assert!(granted.segment(range(&lease, slot, offset, len)).is_none());
        }
        let pin = granted.pin().expect("it stands");
        let mut revoked = pin!(lease.revoke());
        let mut context = Context::from_waker(Waker::noop());
        assert!(revoked.as_mut().poll(&mut context).is_pending());
        assert!(granted.pin().is_none(), "no new access");
        assert_eq!(pool.usage().slots, 2);
        drop(pin);
        assert!(revoked.as_mut().poll(&mut context).is_ready());
        assert_eq!(pool.usage().slots, 0);
    }

    #[test]
    fn slots_to_be_written_come_back_and_numbers_are_never_used_again() {
        let ((pool, config), leases) = (pool(), Leases::new(7));
        let peer: PeerId = "peer".parse().expect("an id");
        let grant = || {
            let slots = vec![pool.reserve(10).expect("capacity")];
            let lease = leases.grant_write(&config, &peer, slots, is_three);
            lease.expect("connected")
        };
        let lease = grant();
        let first = lease.indices()[0];
        assert_eq!(block_on(lease.revoke()).len(), 1);
        let lease = grant();
        assert_ne!(lease.indices()[0], first);
        assert!(leases.find(first.lease, 3, Access::Write).is_err());
        leases.end(3);
        assert!(!lease.stands());
        assert_eq!(pool.usage().slots, 1, "the owner gets them back");
        assert_eq!(block_on(lease.revoke()).len(), 1);
        drop(grant());
        assert_eq!(pool.usage().slots, 0);
    }
}
