//! One side of a transfer: an arena, its pool, and a channel over it.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use lmc_memory::{Arena, ArenaConfig, Pool, PoolConfig, ReservedSlot, SealedSlot, WrittenSlot};

use super::{Rig, check_value, fill_value};
use crate::{
    ChannelConfig, ConnectError, DataPlane, Filled, InArena, Index, PeerId, ReadLease, Rights,
    Sent, Slot, TransferChannel, WriteLease, block_on,
};

/// Time limit for everything that ends by itself.
pub(super) const TIMEOUT: Duration = Duration::from_secs(60);

/// Time after its deadline within which a call must end, on a busy machine.
pub(super) const LATE: Duration = Duration::from_secs(30);

/// A deadline that nothing healthy misses.
pub(super) fn soon() -> Instant {
    Instant::now() + TIMEOUT
}

/// A deadline far beyond [`TIMEOUT`]: a call that reaches it has not ended by itself.
pub(super) fn later() -> Instant {
    Instant::now() + 20 * TIMEOUT
}

/// A deadline that is meant to pass.
pub(super) fn shortly() -> Instant {
    Instant::now() + Duration::from_millis(50)
}

/// Waits until a condition holds.
///
/// # Panics
/// If the condition does not hold in time.
#[track_caller]
pub(super) fn eventually(what: &str, mut so: impl FnMut() -> bool) {
    let deadline = soon();
    while !so() {
        assert!(Instant::now() < deadline, "{what}: not within {TIMEOUT:?}");
        thread::sleep(Duration::from_millis(2));
    }
}

/// The name of a peer.
pub(super) fn peer(id: &str) -> PeerId {
    id.parse()
        .expect("the suite's names are short and printable")
}

/// Bytes that no object begins with, for slots that are to be overwritten.
pub(super) const POISON: u64 = u64::MAX;

/// Memory and a channel over it.
#[derive(Debug)]
pub struct Side<C> {
    /// Name of the side.
    pub id: PeerId,
    /// Slots of its arena.
    pub pool: Pool,
    /// The channel.
    pub channel: C,
    /// The plane of its channel.
    plane: DataPlane,
}

impl<C: TransferChannel> Side<C> {
    /// A side with 32 MiB of memory and the default configuration.
    pub fn new<R: Rig<Channel = C>>(rig: &R, id: &str) -> Self {
        Self::with(rig, id, 4096, |_| {})
    }

    /// A side with 32 MiB of memory and slots of some alignment.
    ///
    /// # Panics
    /// If there is no memory.
    pub fn with<R: Rig<Channel = C>>(
        rig: &R,
        id: &str,
        align: usize,
        change: impl FnOnce(&mut ChannelConfig),
    ) -> Self {
        let arena = ArenaConfig::anonymous(32 << 20).build();
        let arena = Arc::new(arena.expect("a test machine has 32 MiB"));
        let config = PoolConfig::default().with_align(align);
        let pool = Pool::new(Arc::clone(&arena), config).expect("a pool over 32 MiB");
        let channel = rig.channel(id, arena, |config| {
            // Every side of the suite trusts every other, unless a property says otherwise.
            config.open_arena = true;
            config.rights = Rights::ReadWrite;
            change(config);
        });
        let id = peer(id);
        assert_eq!(channel.id(), &id, "the rig gives the channel its name");
        let plane = rig.plane();
        Self {
            id,
            pool,
            channel,
            plane,
        }
    }

    /// The arena.
    pub fn arena(&self) -> &Arc<Arena> {
        self.pool.arena()
    }

    /// Connects without a message.
    ///
    /// # Panics
    /// If the connect fails.
    #[track_caller]
    pub fn connect(&self, to: &Self) {
        let connected = self.try_connect(to, soon());
        connected.unwrap_or_else(|error| panic!("{} to {}: {error}", self.id, to.id));
        self.knows(to);
        to.knows(self);
    }

    /// Connects without a message.
    pub(super) fn try_connect(&self, to: &Self, deadline: Instant) -> Result<(), ConnectError> {
        let connecting = self
            .channel
            .connect(&to.id, to.channel.address(), None, deadline);
        block_on(connecting).map(|_| ())
    }

    /// A slot that holds poison.
    ///
    /// # Panics
    /// If there is no capacity.
    #[track_caller]
    pub fn slot(&self, len: u64) -> ReservedSlot {
        let slot = self.pool.reserve(len);
        let mut slot = slot.unwrap_or_else(|| panic!("no capacity: {:?}", self.pool.usage()));
        fill_value(POISON, 0, slot.bytes_mut());
        slot
    }

    /// Slots that hold poison.
    #[track_caller]
    pub fn slots(&self, lens: &[u64]) -> Vec<ReservedSlot> {
        lens.iter().map(|&len| self.slot(len)).collect()
    }

    /// Objects with the bytes that belong to the stamp.
    #[track_caller]
    pub fn objects(&self, stamp: u64, lens: &[u64]) -> Vec<SealedSlot> {
        let mut slots = self.slots(lens);
        stamp_all(stamp, &mut slots);
        slots
            .into_iter()
            .map(|slot| slot.written().seal())
            .collect()
    }

    /// The indices of these slots in the open arena.
    ///
    /// # Panics
    /// If a slot has none.
    #[track_caller]
    pub fn indices<S: InArena>(&self, slots: &[S]) -> Vec<Index> {
        let slots: Vec<_> = slots.iter().map(|slot| slot as &dyn InArena).collect();
        let indices = self.channel.arena_indices(&slots);
        indices.expect("slots of the channel's own pool have indices")
    }

    /// The index of a unit of the open arena.
    pub fn at(&self, unit: u64) -> Index {
        Index::arena(self.channel.incarnation(), unit)
    }

    /// Lets another side read slots.
    ///
    /// # Panics
    /// If that side is not connected.
    #[track_caller]
    pub fn lets_read(&self, other: &Self, slots: Vec<SealedSlot>) -> ReadLease {
        self.knows(other);
        let lease = self.channel.grant_read(&other.id, slots);
        lease.expect("a peer that is connected is granted slots")
    }

    /// Lets another side write to slots.
    ///
    /// # Panics
    /// If that side is not connected.
    #[track_caller]
    pub fn lets_write(&self, other: &Self, slots: Vec<ReservedSlot>) -> WriteLease {
        self.knows(other);
        let lease = self.channel.grant_write(&other.id, slots);
        lease.expect("a peer that is connected is granted slots")
    }

    /// Waits until the other side is connected; it may have connected to this one.
    #[track_caller]
    pub(super) fn knows(&self, other: &Self) {
        let incarnation = Some(other.channel.incarnation());
        eventually("the other side is known", || {
            self.channel.peer_incarnation(&other.id) == incarnation
                && self.channel.data_plane(&other.id) == Some(self.plane)
        });
    }

    /// Writes objects with this stamp.
    pub fn write(&self, stamp: u64, lens: &[u64], to: &Self, indices: &[Index]) -> Sent {
        self.write_by(stamp, lens, to, indices, soon())
    }

    /// Writes objects with this stamp, by a deadline.
    pub(super) fn write_by(
        &self,
        stamp: u64,
        lens: &[u64],
        to: &Self,
        indices: &[Index],
        deadline: Instant,
    ) -> Sent {
        let objects = self.objects(stamp, lens);
        block_on(self.channel.write(objects, &to.id, indices, deadline))
    }

    /// Reads objects.
    pub fn read(&self, lens: &[u64], from: &Self, indices: &[Index]) -> Filled {
        let slots = self.slots(lens);
        block_on(self.channel.read(slots, &from.id, indices, soon()))
    }

    /// Writes objects to a connected peer, and checks the bytes that arrived.
    ///
    /// # Panics
    /// If objects are missing or differ.
    #[track_caller]
    pub fn writes(&self, stamp: u64, lens: &[u64], to: &Self) {
        let lease = to.lets_write(self, to.slots(lens));
        let sent = self.write(stamp, lens, to, lease.indices());
        assert_eq!(sent.into_result(), Ok(lens.len()));
        let slots = block_on(lease.revoke());
        assert_eq!(slots.len(), lens.len(), "a revoked lease returns its slots");
        let slots: Vec<_> = slots.into_iter().map(ReservedSlot::written).collect();
        check_all(stamp, &slots);
    }

    /// Reads objects from a connected peer, and checks the bytes that arrived.
    ///
    /// # Panics
    /// If objects are missing or differ.
    #[track_caller]
    pub fn reads(&self, stamp: u64, lens: &[u64], from: &Self) {
        let lease = from.lets_read(self, from.objects(stamp, lens));
        let filled = self.read(lens, from, lease.indices());
        check_filled(filled, stamp, lens.len());
        block_on(lease.revoke());
    }

    /// Moves objects both ways, one-sided, under leases.
    #[track_caller]
    pub fn works_with(&self, stamp: u64, other: &Self) {
        let lens = [1, 5000, 4096];
        self.writes(stamp, &lens, other);
        self.reads(stamp + 1, &lens, other);
        other.writes(stamp + 2, &lens, self);
        other.reads(stamp + 3, &lens, self);
    }

    /// Waits until every slot is back.
    ///
    /// # Panics
    /// If a slot does not come back.
    #[track_caller]
    pub fn slots_come_back(&self) {
        self.slots_come_back_but(0);
    }

    /// Waits until every slot is back, except those that the caller holds.
    #[track_caller]
    pub(super) fn slots_come_back_but(&self, held: usize) {
        let back = || {
            let usage = self.pool.usage();
            usage.slots == held as u64 && usage.quarantined_slots == 0
        };
        eventually("every slot comes back", back);
    }

    /// Reserves all of the memory, and checks that nothing writes to it.
    ///
    /// # Panics
    /// If something writes to it, or a slot is still taken.
    #[track_caller]
    pub fn memory_is_still(&self) {
        self.slots_come_back();
        let mut whole = self.slot(self.pool.usage().largest_free);
        fill_value(7, 7, whole.bytes_mut());
        thread::sleep(Duration::from_millis(50));
        let whole = whole.written();
        let still = check_value(7, 7, whole.bytes());
        still.expect("nothing writes to memory that came back");
    }

    /// Closes the channel, and checks that nothing is left of it.
    ///
    /// # Panics
    /// If something is left.
    #[track_caller]
    pub fn ends(self) {
        let closed = block_on(self.channel.close(soon()));
        closed.expect("a channel closes in time");
        let left = self.pool.usage();
        assert_eq!(left.slots, 0, "a closed channel holds slots: {left:?}");
        self.goes();
    }

    /// Drops the channel, and checks that nothing is left of it.
    ///
    /// # Panics
    /// If something is left.
    #[track_caller]
    pub fn goes(self) {
        let Self { pool, channel, .. } = self;
        let side = (pool, drop(channel));
        let back = || side.0.usage().slots == 0;
        eventually("every slot comes back", back);
        let arena = Arc::downgrade(side.0.arena());
        drop(side);
        eventually("the arena goes", || arena.strong_count() == 0);
    }
}

/// Two sides, the first connected to the second.
#[track_caller]
pub(super) fn pair<R: Rig>(rig: &R) -> (Side<R::Channel>, Side<R::Channel>) {
    let (a, b) = (Side::new(rig, "a"), Side::new(rig, "b"));
    a.connect(&b);
    (a, b)
}

/// Writes the bytes that belong to the stamp.
pub(super) fn stamp_all(stamp: u64, slots: &mut [ReservedSlot]) {
    for (number, slot) in slots.iter_mut().enumerate() {
        fill_value(stamp, number, slot.bytes_mut());
    }
}

/// Checks the bytes that belong to the stamp.
#[track_caller]
pub(super) fn check_all(stamp: u64, slots: &[WrittenSlot]) {
    for (number, slot) in slots.iter().enumerate() {
        let checked = check_value(stamp, number, slot.bytes());
        checked.unwrap_or_else(|mismatch| panic!("{mismatch}"));
    }
}

/// Checks that all slots are filled with the bytes that belong to the stamp.
#[track_caller]
pub(super) fn check_filled(filled: Filled, stamp: u64, count: usize) {
    assert_eq!(filled.slots.len(), count, "one outcome for each slot");
    assert_eq!(filled.done(), count, "{:?}", filled.error);
    let slots = filled.into_result().expect("all went well");
    check_all(stamp, &slots);
}

/// Checks that no slot was touched.
#[track_caller]
pub(super) fn check_untouched(slots: Vec<Slot>, count: usize) {
    assert_eq!(slots.len(), count, "one outcome for each slot");
    for slot in slots {
        let Slot::Idle(slot) = slot else {
            panic!("nothing was begun, and a slot is {slot:?}");
        };
        let slot = slot.written();
        check_value(POISON, 0, slot.bytes()).expect("nothing was begun");
    }
}

/// Slots that came back idle, filled again; nothing may change them.
#[derive(Debug, Default)]
pub(super) struct Still(Vec<ReservedSlot>);

/// The stamp of slots that nothing may change.
const STILL: u64 = 0x5711;

impl Still {
    /// Takes slots that came back: checks written ones, and keeps idle ones under watch. Returns
    /// the number of written slots.
    #[track_caller]
    pub(super) fn watch(&mut self, slots: Vec<Slot>, stamp: u64) -> usize {
        let mut written = 0;
        for (number, slot) in slots.into_iter().enumerate() {
            match slot {
                Slot::Written(slot) => {
                    written += 1;
                    let checked = check_value(stamp, number, slot.bytes());
                    checked.unwrap_or_else(|mismatch| panic!("{mismatch}"));
                }
                Slot::Idle(slot) => self.keep(slot),
                Slot::Quarantined => {}
            }
        }
        written
    }

    /// Returns the number of slots that are kept.
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Keeps a slot under watch.
    pub(super) fn keep(&mut self, mut slot: ReservedSlot) {
        fill_value(STILL, 0, slot.bytes_mut());
        self.0.push(slot);
    }

    /// Checks the slots that are kept, and releases them.
    #[track_caller]
    pub(super) fn check(&mut self) {
        for slot in self.0.drain(..) {
            let slot = slot.written();
            let still = check_value(STILL, 0, slot.bytes());
            still.expect("nothing writes to a slot that was said to be idle");
        }
    }
}
