//! A shard: one part of the index, under one lock.

use std::collections::HashMap;
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use lmc_key::{ChunkKey, FoldState};
use lmc_memory::SealedSlot;

use crate::TenantId;
use crate::class::Class;
use crate::origin::Origin;
use crate::policy::{EvictionPolicy, List, NIL, PolicyKind};
use crate::slab::{Entry, EntryRef, EvictionState, Identity, Life, Slab};
use crate::table::Table;

/// Most entries that one step of eviction sets aside, so that the lock is held for microseconds. The lease,
/// pin or child that causes it has paid for each.
const ASIDE_PER_STEP: u32 = 256;

/// Number of keys that are warmed at once: about as many as a core has memory reads in flight.
pub(crate) const WARM: usize = 32;

/// Indices at which the warmed keys probably are.
pub(crate) struct Likely([u32; WARM]);

/// The eviction order of one tenant class in one shard.
struct Order {
    policy: Box<dyn EvictionPolicy>,
    /// Entries whose turn to be evicted came while children were resident; the earliest is at the tail.
    parents: List,
    class: Arc<Class>,
}

pub(crate) struct Shard {
    id: usize,
    kind: PolicyKind,
    /// This shard's share of the pool, in bytes.
    share: u64,
    /// Bytes of this shard's chunks.
    bytes: u64,
    /// Bytes that slots are aligned to.
    align: u64,
    /// Bytes of the pool used by chunks that are leased or pinned, each chunk counted once.
    held: u64,
    /// Counter in which each shard publishes `held`.
    published_held: Arc<[AtomicU64]>,
    table: Table,
    slab: Slab,
    shared: Order,
    /// Orders of the tenants with a quota.
    quotas: HashMap<TenantId, Order>,
    /// Exclusive write marks: the number of the reservation. A key has at most one.
    writing: HashMap<ChunkKey, u64, FoldState>,
    /// Shared write marks: the numbers of the reservations. No value is empty.
    shared_writes: HashMap<ChunkKey, Vec<u64>, FoldState>,
    /// Number of pins of each pinned entry, by slab index.
    pins: HashMap<u32, u32>,
}

/// One leased chunk of a lease.
#[derive(Debug)]
pub(crate) struct Leased {
    /// A handle of the bytes: they stay in memory even when the chunk is removed.
    pub(crate) slot: SealedSlot,
    pub(crate) name: EntryRef,
    pub(crate) origin: Origin,
}

/// An entry that was removed from the index. After releasing the lock, the caller drops the slot and
/// subtracts the entry from its parent's count.
pub(crate) struct Taken {
    pub(crate) key: ChunkKey,
    pub(crate) slot: SealedSlot,
    pub(crate) parent: EntryRef,
    pub(crate) tenant: TenantId,
    pub(crate) origin: Origin,
    pub(crate) life: Life,
}

/// Outcome of one step of eviction.
pub(crate) enum EvictionStep {
    Evicted(Taken),
    /// Entries were set aside and more are queued: call again.
    Again,
    /// Nothing is queued any more.
    Empty,
}

/// An entry with its leases, pins and children.
#[cfg(test)]
pub(crate) struct Shown {
    pub(crate) key: ChunkKey,
    pub(crate) tenant: TenantId,
    pub(crate) leases: u32,
    pub(crate) pinned: bool,
}

/// An entry and its parent.
pub(crate) struct Linked {
    pub(crate) name: EntryRef,
    pub(crate) parent: EntryRef,
    pub(crate) key: ChunkKey,
    pub(crate) len: u64,
}

fn fingerprint(key: &ChunkKey) -> u32 {
    (key.fold() >> 16) as u32
}

impl Order {
    fn new(kind: PolicyKind, class: Arc<Class>) -> Self {
        Self {
            policy: kind.build(),
            parents: List::default(),
            class,
        }
    }

    /// Publishes for the other shards how old this shard's next candidate is.
    fn publish(&self, shard: usize, slab: &Slab) {
        let parent = self.parents.tail().map(|id| slab.nodes[id].stamp());
        self.class
            .publish(shard, self.policy.coldest(&slab.nodes), parent);
    }

    /// Removes an entry from the order for good, whatever its state.
    fn drop_out(&mut self, slab: &mut Slab, index: u32) {
        match slab.entry(index).eviction() {
            EvictionState::Queued => self.policy.remove(&mut slab.nodes, index),
            EvictionState::Parent => self.parents.remove(&mut slab.nodes, index),
            EvictionState::Held => {}
        }
    }

    fn touch(&mut self, slab: &mut Slab, index: u32, stamp: u64) {
        match slab.entry(index).eviction() {
            EvictionState::Queued => self.policy.touch(&mut slab.nodes, index, stamp),
            EvictionState::Parent => {
                self.parents.remove(&mut slab.nodes, index);
                self.policy.revive(&mut slab.nodes, index, stamp);
                slab.entry_mut(index).set_eviction(EvictionState::Queued);
            }
            EvictionState::Held => {}
        }
    }
}

impl Shard {
    pub(crate) fn new(
        id: usize,
        kind: PolicyKind,
        (share, align): (u64, u64),
        shared: Arc<Class>,
        published_held: Arc<[AtomicU64]>,
    ) -> Self {
        Self {
            id,
            kind,
            share,
            bytes: 0,
            align,
            held: 0,
            published_held,
            table: Table::default(),
            slab: Slab::new(id),
            shared: Order::new(kind, shared),
            quotas: HashMap::new(),
            writing: HashMap::default(),
            shared_writes: HashMap::default(),
            pins: HashMap::new(),
        }
    }

    #[inline]
    pub(crate) fn find(&self, fold: u64, key: &ChunkKey) -> Option<u32> {
        self.table
            .find(fold, |index| self.slab.identity(index).key == *key)
    }

    /// Reads ahead the memory that a search for these keys will read, in tight loops, so that the processor
    /// has many of the reads in flight at once. In a large index each read misses every cache, and only the
    /// reads of one key depend on each other.
    pub(crate) fn warm(&self, positions: &[u32], folds: &[u64]) -> Likely {
        let mut likely = [NIL; WARM];
        for (likely, &position) in likely.iter_mut().zip(positions) {
            *likely = self.table.glance(folds[position as usize]).unwrap_or(NIL);
        }
        let found = likely.iter().filter(|&&index| index != NIL);
        let read = found.fold(0, |read, &index| read ^ self.slab.identity(index).children);
        black_box(read);
        Likely(likely)
    }

    /// Reads ahead the memory that a use of the found entries reads.
    pub(crate) fn warm_use(&self, likely: &Likely) {
        let found = likely.0.iter().filter(|&&index| index != NIL);
        let read = found.fold(0, |read, &index| read ^ self.slab.glance(index));
        black_box(read);
    }

    pub(crate) fn entry(&self, index: u32) -> &Entry {
        self.slab.entry(index)
    }

    pub(crate) fn key(&self, index: u32) -> &ChunkKey {
        &self.slab.identity(index).key
    }

    pub(crate) fn tenant(&self, index: u32) -> TenantId {
        self.slab.tenant(index)
    }

    pub(crate) fn life(&self, index: u32) -> Life {
        self.slab.life(index)
    }

    pub(crate) fn name(&self, index: u32) -> EntryRef {
        self.slab.name(index)
    }

    fn order(&mut self, tenant: TenantId) -> (&mut Order, &mut Slab) {
        let order = match self.quotas.is_empty() {
            true => &mut self.shared,
            false => self.quotas.get_mut(&tenant).unwrap_or(&mut self.shared),
        };
        (order, &mut self.slab)
    }

    fn order_of(&mut self, index: u32) -> (&mut Order, &mut Slab) {
        let tenant = match self.quotas.is_empty() {
            true => TenantId::default(),
            false => self.slab.tenant(index),
        };
        self.order(tenant)
    }

    /// Publishes the ages of all classes. Called at the end of every batch that changed the order.
    pub(crate) fn publish(&self) {
        self.shared.publish(self.id, &self.slab);
        for order in self.quotas.values() {
            order.publish(self.id, &self.slab);
        }
        let held = &self.published_held[self.id];
        if held.load(Ordering::Relaxed) != self.held {
            held.store(self.held, Ordering::Relaxed);
        }
    }

    /// Adds a chunk that is not present.
    pub(crate) fn insert(
        &mut self,
        fold: u64,
        key: ChunkKey,
        slot: SealedSlot,
        tenant: TenantId,
        origin: Origin,
        (stamp, seconds): (u64, u32),
    ) -> u32 {
        let bytes = slot.len();
        self.bytes += bytes;
        if self.table.is_full() {
            self.grow_table();
        }
        let index = self.slab.insert(key, slot, tenant, origin, seconds);
        self.table.insert(fold, index);
        let (order, slab) = self.order(tenant);
        let print = fingerprint(&key);
        order.policy.insert(&mut slab.nodes, index, print, stamp);
        order.class.add(bytes);
        index
    }

    /// Grows the table. Rebuilding holds the lock while all keys are read, so it is done rarely: the new
    /// table is large enough for all chunks of the average size that fit into this shard's share, but at most
    /// eight times its current size, in case later chunks are larger.
    fn grow_table(&mut self) {
        let len = self.table.len();
        let capacity = self.share as f64 / self.bytes as f64 * (len + 1) as f64;
        // Shards do not fill evenly: two standard deviations above the mean.
        let capacity = (capacity + 2.0 * capacity.sqrt()).min(8.0 * len as f64 + 64.0) as usize;
        // In slab order, so that the keys are read sequentially.
        let all = self.slab.occupied(0);
        let all = all.map(|(index, _)| (self.slab.identity(index).key.fold(), index));
        self.table.rebuild(capacity, all);
    }

    /// Counts a lookup or a retrieve that found an entry.
    pub(crate) fn count_use(&mut self, index: u32) {
        self.slab.nodes[index].count_use();
    }

    pub(crate) fn touch(&mut self, index: u32, stamp: u64) {
        let (order, slab) = self.order_of(index);
        order.touch(slab, index, stamp);
    }

    /// Leases an entry. The second value is true if no lease or pin held it before.
    pub(crate) fn lease(&mut self, index: u32) -> (Leased, bool) {
        let name = self.slab.name(index);
        let entry = self.slab.entry_mut(index);
        let fresh = entry.holds == 0;
        if fresh {
            self.held += entry.slot.len().next_multiple_of(self.align);
        }
        entry.holds += 1;
        let leased = Leased {
            slot: entry.slot.clone(),
            name,
            origin: entry.origin(),
        };
        (leased, fresh)
    }

    /// Ends a lease. If the entry was removed meanwhile, nothing is done.
    pub(crate) fn unlease(&mut self, name: EntryRef, stamp: u64) {
        let Some(entry) = self.slab.named(name) else {
            return;
        };
        // Each lease is released once, so the count does not fall below zero. Only a stale name that became
        // valid again after 2^24 inserts could make it, hence the saturation.
        if entry.holds == 1 {
            self.held -= entry.slot.len().next_multiple_of(self.align);
        }
        entry.holds = entry.holds.saturating_sub(1);
        if !entry.busy() && entry.eviction() == EvictionState::Held {
            self.revive(name.index(), stamp);
        }
    }

    /// Queues an entry that was leased or pinned.
    fn revive(&mut self, index: u32, stamp: u64) {
        self.slab
            .entry_mut(index)
            .set_eviction(EvictionState::Queued);
        let (order, slab) = self.order_of(index);
        order.policy.revive(&mut slab.nodes, index, stamp);
    }

    /// Adds a pin to an entry. Returns false if it is pinned 2^32 - 1 times already.
    pub(crate) fn pin(&mut self, index: u32) -> bool {
        let count = self.pins.entry(index).or_insert(0);
        let Some(more) = count.checked_add(1) else {
            return false;
        };
        *count = more;
        if more == 1 {
            let entry = self.slab.entry_mut(index);
            if entry.holds == 0 {
                self.held += entry.slot.len().next_multiple_of(self.align);
            }
            entry.holds += 1;
        }
        true
    }

    /// Removes one pin. Returns false if there is none.
    pub(crate) fn unpin(&mut self, index: u32, stamp: u64) -> bool {
        let Some(count) = self.pins.get_mut(&index) else {
            return false;
        };
        *count -= 1;
        if *count > 0 {
            return true;
        }
        self.pins.remove(&index);
        let entry = self.slab.entry_mut(index);
        entry.holds -= 1;
        if entry.holds == 0 {
            self.held -= entry.slot.len().next_multiple_of(self.align);
        }
        if !entry.busy() && entry.eviction() == EvictionState::Held {
            self.revive(index, stamp);
        }
        true
    }

    pub(crate) fn is_leased(&self, index: u32) -> bool {
        self.entry(index).holds > u32::from(self.pins.contains_key(&index))
    }

    pub(crate) fn pinned(&self) -> u64 {
        self.pins.len() as u64
    }

    /// Returns true if an entry is present and names this parent.
    pub(crate) fn has_parent(&mut self, child: EntryRef, parent: EntryRef) -> bool {
        self.slab.named(child).is_some() && self.slab.identity(child.index()).parent == parent
    }

    /// Sets the parent of an entry. Returns false if the entry is gone, or has this parent already.
    pub(crate) fn set_parent(&mut self, child: EntryRef, parent: EntryRef) -> bool {
        if self.slab.named(child).is_none() || self.has_parent(child, parent) {
            return false;
        }
        self.slab.identity_mut(child.index()).parent = parent;
        true
    }

    /// Counts one more child. Returns false if the parent is gone.
    pub(crate) fn add_child(&mut self, parent: EntryRef) -> bool {
        if self.slab.named(parent).is_none() {
            return false;
        }
        self.slab.identity_mut(parent.index()).children += 1;
        true
    }

    /// Counts one child less. A parent whose turn to be evicted came before returns to the old end.
    pub(crate) fn drop_child(&mut self, parent: EntryRef) {
        let Some(entry) = self.slab.named(parent) else {
            return;
        };
        let set_aside = entry.eviction() == EvictionState::Parent;
        let index = parent.index();
        // As for leases: saturates only for a stale name that became valid again after 2^24 inserts.
        let children = &mut self.slab.identity_mut(index).children;
        *children = children.saturating_sub(1);
        if *children > 0 || !set_aside {
            return;
        }
        self.slab
            .entry_mut(index)
            .set_eviction(EvictionState::Queued);
        let (order, slab) = self.order_of(index);
        order.parents.remove(&mut slab.nodes, index);
        order.policy.put_back(&mut slab.nodes, index);
        self.publish();
    }

    /// Removes an entry from the index, leased or not. Its leases keep the bytes until they end.
    pub(crate) fn take(&mut self, index: u32) -> Taken {
        let (order, slab) = self.order_of(index);
        order.drop_out(slab, index);
        self.unlist(index)
    }

    /// Removes an entry that is in no queue.
    fn unlist(&mut self, index: u32) -> Taken {
        let (tenant, life) = (self.slab.tenant(index), self.slab.life(index));
        let (Identity { key, parent, .. }, entry) = self.slab.remove(index);
        let origin = entry.origin();
        let Entry { slot, holds, .. } = entry;
        self.table.remove(key.fold(), index);
        self.bytes -= slot.len();
        if holds > 0 {
            self.pins.remove(&index);
            self.held -= slot.len().next_multiple_of(self.align);
        }
        self.order(tenant).0.class.sub(slot.len());
        Taken {
            key,
            slot,
            parent,
            tenant,
            origin,
            life,
        }
    }

    /// Evicts the next entry of a class that is not leased, pinned or a parent.
    pub(crate) fn evict(&mut self, tenant: Option<TenantId>) -> EvictionStep {
        let Some((order, slab)) = self.order_for(tenant) else {
            return EvictionStep::Empty;
        };
        for _ in 0..ASIDE_PER_STEP {
            let Some(index) = order.policy.pop(&mut slab.nodes) else {
                return EvictionStep::Empty;
            };
            let entry = slab.entry_mut(index);
            if entry.busy() {
                entry.set_eviction(EvictionState::Held);
            } else if slab.identity(index).children > 0 {
                slab.entry_mut(index).set_eviction(EvictionState::Parent);
                order.parents.push_head(&mut slab.nodes, index);
            } else {
                let print = fingerprint(&slab.identity(index).key);
                order.policy.evicted(&slab.nodes, index, print);
                return EvictionStep::Evicted(self.unlist(index));
            }
        }
        EvictionStep::Again
    }

    /// Evicts a parent, when no shard has a better candidate. The parents deepest in their prefix had their
    /// turn first, and are evicted first.
    pub(crate) fn evict_parent(&mut self, tenant: Option<TenantId>) -> EvictionStep {
        let Some((order, slab)) = self.order_for(tenant) else {
            return EvictionStep::Empty;
        };
        for _ in 0..ASIDE_PER_STEP {
            let Some(index) = order.parents.pop_tail(&mut slab.nodes) else {
                return EvictionStep::Empty;
            };
            let entry = slab.entry_mut(index);
            if entry.busy() {
                entry.set_eviction(EvictionState::Held);
                continue;
            }
            let print = fingerprint(&slab.identity(index).key);
            order.policy.evicted(&slab.nodes, index, print);
            return EvictionStep::Evicted(self.unlist(index));
        }
        EvictionStep::Again
    }

    /// Returns the order of exactly this class; `None` stands for the shared one.
    fn order_for(&mut self, tenant: Option<TenantId>) -> Option<(&mut Order, &mut Slab)> {
        let order = match tenant {
            None => &mut self.shared,
            Some(tenant) => self.quotas.get_mut(&tenant)?,
        };
        Some((order, &mut self.slab))
    }

    /// Gives a tenant a class of its own and moves its entries there. They keep their order of age; other
    /// knowledge of the policy is lost.
    pub(crate) fn split_off(&mut self, tenant: TenantId, class: Arc<Class>) {
        if self.quotas.contains_key(&tenant) {
            return;
        }
        let order = Order::new(self.kind, class);
        self.move_entries(tenant, |shard| {
            shard.quotas.insert(tenant, order);
        });
    }

    /// Moves a tenant's entries back to the shared class.
    pub(crate) fn join(&mut self, tenant: TenantId) {
        if !self.quotas.contains_key(&tenant) {
            return;
        }
        self.move_entries(tenant, |shard| {
            if let Some(order) = shard.quotas.remove(&tenant) {
                order.class.publish(shard.id, None, None);
            }
        });
    }

    fn move_entries(&mut self, tenant: TenantId, change: impl FnOnce(&mut Self)) {
        let of_tenant =
            |(index, _): (u32, &Entry)| (self.slab.tenant(index) == tenant).then_some(index);
        let mut indices: Vec<u32> = self.slab.occupied(0).filter_map(of_tenant).collect();
        indices.sort_by_key(|&index| self.slab.nodes[index].stamp());
        let mut bytes = 0;
        for &index in &indices {
            let (order, slab) = self.order(tenant);
            order.drop_out(slab, index);
            bytes += slab.entry(index).slot.len();
        }
        self.order(tenant).0.class.sub(bytes);
        change(self);
        self.order(tenant).0.class.add(bytes);
        for &index in &indices {
            let (order, slab) = self.order(tenant);
            let entry = slab.entry_mut(index);
            if entry.eviction() == EvictionState::Held {
                continue;
            }
            entry.set_eviction(EvictionState::Queued);
            let print = fingerprint(&slab.identity(index).key);
            let stamp = slab.nodes[index].stamp();
            order.policy.insert(&mut slab.nodes, index, print, stamp);
        }
        self.publish();
    }

    /// Marks a key exclusively as being written by one reservation. Returns false if another reservation has
    /// an exclusive mark; shared marks do not count.
    pub(crate) fn begin_write(&mut self, key: ChunkKey, reservation: u64) -> bool {
        match self.writing.entry(key) {
            std::collections::hash_map::Entry::Occupied(_) => false,
            std::collections::hash_map::Entry::Vacant(vacant) => {
                vacant.insert(reservation);
                true
            }
        }
    }

    /// Adds a shared mark: the key is being written by this reservation, perhaps among others.
    pub(crate) fn begin_shared_write(&mut self, key: ChunkKey, reservation: u64) {
        self.shared_writes.entry(key).or_default().push(reservation);
    }

    /// Turns an exclusive mark into a shared one. Does nothing if the mark does not exist.
    pub(crate) fn share_write(&mut self, key: ChunkKey, reservation: u64) {
        if self.writing.get(&key) == Some(&reservation) {
            self.writing.remove(&key);
            self.begin_shared_write(key, reservation);
        }
    }

    /// Removes the mark of a reservation.
    pub(crate) fn end_write(&mut self, key: &ChunkKey, reservation: u64) {
        if self.writing.get(key) == Some(&reservation) {
            self.writing.remove(key);
        } else if let Some(numbers) = self.shared_writes.get_mut(key) {
            numbers.retain(|&number| number != reservation);
            if numbers.is_empty() {
                self.shared_writes.remove(key);
            }
        }
    }

    /// Removes all marks of a key: what is being written will not become findable.
    pub(crate) fn void_write(&mut self, key: &ChunkKey) {
        self.writing.remove(key);
        self.shared_writes.remove(key);
    }

    /// Removes all marks of the keys for which `pick` returns true.
    pub(crate) fn void_writes(&mut self, pick: impl Fn(&ChunkKey) -> bool) {
        self.writing.retain(|key, _| !pick(key));
        self.shared_writes.retain(|key, _| !pick(key));
    }

    /// Returns true if a key has an exclusive mark.
    pub(crate) fn is_writing(&self, key: &ChunkKey) -> bool {
        self.writing.contains_key(key)
    }

    /// Returns true if the mark of this reservation still exists.
    pub(crate) fn holds_write(&self, key: &ChunkKey, reservation: u64) -> bool {
        let shared = || self.shared_writes.get(key);
        self.writing.get(key) == Some(&reservation)
            || shared().is_some_and(|numbers| numbers.contains(&reservation))
    }

    pub(crate) fn len(&self) -> usize {
        self.table.len()
    }

    /// Returns all entries, with the leases, pins and children of each.
    #[cfg(test)]
    pub(crate) fn list(&self) -> Vec<Shown> {
        let shown = |(index, entry): (u32, &Entry)| {
            let pinned = self.pins.contains_key(&index);
            Shown {
                key: self.slab.identity(index).key,
                tenant: self.slab.tenant(index),
                leases: entry.holds - u32::from(pinned),
                pinned,
            }
        };
        self.slab.occupied(0).map(shown).collect()
    }

    /// Returns all entries, with their parents.
    pub(crate) fn list_linked(&self) -> Vec<Linked> {
        let linked = |(index, entry): (u32, &Entry)| {
            let Identity { key, parent, .. } = *self.slab.identity(index);
            Linked {
                name: self.slab.name(index),
                parent,
                key,
                len: entry.slot.len(),
            }
        };
        self.slab.occupied(0).map(linked).collect()
    }

    /// Returns at most `limit` occupied indices, from `start` on.
    pub(crate) fn indices(&self, start: u32, limit: usize) -> Vec<u32> {
        let occupied = self.slab.occupied(start).map(|(index, _)| index);
        occupied.take(limit).collect()
    }

    /// Checks that counts, queues and tables agree. For tests: walks the whole shard.
    #[cfg(test)]
    pub(crate) fn check(&mut self) {
        let sum: u64 = self
            .slab
            .occupied(0)
            .map(|(_, entry)| entry.slot.len())
            .sum();
        assert_eq!(self.bytes, sum);
        let held = self.slab.occupied(0).filter(|(_, entry)| entry.busy());
        let held: u64 = held
            .map(|(_, entry)| entry.slot.len().next_multiple_of(self.align))
            .sum();
        assert_eq!(self.held, held);
        let mut queued: HashMap<Option<TenantId>, usize> = HashMap::new();
        let mut bytes: HashMap<Option<TenantId>, u64> = HashMap::new();
        for (index, entry) in self.slab.occupied(0) {
            let Identity { key, children, .. } = self.slab.identity(index);
            assert_eq!(self.find(key.fold(), key), Some(index));
            let tenant = self.slab.tenant(index);
            let class = self.quotas.contains_key(&tenant).then_some(tenant);
            *queued.entry(class).or_default() +=
                usize::from(entry.eviction() == EvictionState::Queued);
            *bytes.entry(class).or_default() += entry.slot.len();
            assert!(
                entry.busy() || !self.pins.contains_key(&index),
                "pinned and free"
            );
            assert!(
                entry.eviction() != EvictionState::Held || entry.busy(),
                "held and free"
            );
            let parent = entry.eviction() == EvictionState::Parent;
            assert!(!parent || *children > 0, "a parent without children");
        }
        assert_eq!(self.slab.occupied(0).count(), self.table.len());
        if self.kind == PolicyKind::None {
            return;
        }
        // Empty and refill every queue: what comes out is what should be in there.
        let classes: Vec<_> = [None]
            .into_iter()
            .chain(self.quotas.keys().copied().map(Some))
            .collect();
        for class in classes {
            let (order, slab) = self.order_for(class).expect("it is one of ours");
            let mut out = Vec::new();
            while let Some(index) = order.policy.pop(&mut slab.nodes) {
                assert_eq!(slab.entry(index).eviction(), EvictionState::Queued);
                out.push(index);
            }
            for index in out.iter().rev() {
                order.policy.put_back(&mut slab.nodes, *index);
            }
            assert_eq!(out.len(), queued.get(&class).copied().unwrap_or(0));
        }
    }
}
