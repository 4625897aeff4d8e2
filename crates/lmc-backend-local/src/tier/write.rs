//! Writes of chunks: reservation, marks and commit.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use lmc_key::ChunkKey;
use lmc_memory::{ReservedSlot, WrittenSlot};

use super::{Inner, LocalTier, ReserveError};
use crate::class::Tenant;
use crate::origin::Origin;
use crate::shard::{Leased, Shard};
use crate::slab::EntryRef;
use crate::{Leases, OwnerId, StoredEvent, TenantId};

/// Result of the commit of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inserted {
    /// The chunk is in the index now.
    New,
    /// The key was already present with its bytes; the new slot was returned to the pool.
    Present,
    /// The key was removed, or the tier cleared, after this write had begun. The chunk is not found, and its
    /// slot was returned to the pool.
    Cleared,
}

/// The answer to [`LocalTier::begin_write`].
#[derive(Debug)]
pub enum WriteStart {
    /// The chunk is already present. Nothing is to be written, and no use was counted: [`LocalTier::touch`]
    /// does that for a whole prompt.
    Present,
    /// Another reservation has an exclusive mark on the key.
    Busy,
    /// The key is marked, and its memory is reserved for the caller to write.
    Reserved(WriteGrant),
}

/// A key that is marked as being written, and the memory for it.
#[derive(Debug)]
pub struct WriteGrant {
    /// The mark. While it exists and is exclusive, [`LocalTier::begin_write`] answers all other callers with
    /// [`WriteStart::Busy`].
    pub mark: InFlight,
    /// The reserved memory. It may be passed on, for example to a load from a lower tier.
    pub slot: ReservedSlot,
}

impl WriteGrant {
    /// Makes a chunk that can be committed. The caller has written all bytes of the slot.
    pub fn written(self, parent: Option<ChunkKey>) -> Write {
        Write {
            mark: self.mark,
            parent,
            origin: Origin::COMPUTED,
            slot: self.slot.written(),
        }
    }
}

/// The id of a write mark, without ownership of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MarkId {
    key: ChunkKey,
    number: u64,
}

/// Marks a key as being written by an owner. Dropping the mark removes it, which is enough to abort a write.
///
/// A mark is *exclusive* or *shared*. A key has at most one exclusive mark, and any number of shared marks in
/// addition. Each mark has a slot of its own. The first commit makes the chunk findable, and a later commit
/// is answered with [`Inserted::Present`]. Marks of both kinds are void after [`LocalTier::clear`], and after
/// [`LocalTier::remove`] of their key.
pub struct InFlight {
    tier: Arc<Inner>,
    owner: OwnerId,
    tenant: Arc<Tenant>,
    key: ChunkKey,
    len: u64,
    number: u64,
}

impl InFlight {
    /// Returns the key that is being written.
    pub fn key(&self) -> ChunkKey {
        self.key
    }

    /// Returns the id of the mark, for [`LocalTier::share_writes`].
    pub fn id(&self) -> MarkId {
        MarkId {
            key: self.key,
            number: self.number,
        }
    }

    /// Returns the owner that writes the chunk.
    pub fn owner(&self) -> OwnerId {
        self.owner
    }

    /// Returns the tenant of the chunk.
    pub fn tenant(&self) -> TenantId {
        self.tenant.id
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        let shard = self.tier.shard_of(self.key.fold());
        let mut shard = self.tier.shards[shard].lock();
        shard.end_write(&self.key, self.number);
        drop(shard);
        self.tenant.end_write(self.len);
        self.tier.writes.give(self.owner, 1, 0);
    }
}

impl fmt::Debug for InFlight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "InFlight({:?}, {:?})", self.owner, self.key)
    }
}

/// A marked chunk whose bytes are complete.
#[derive(Debug)]
pub struct Write {
    /// The mark. It is removed when the chunk is findable.
    pub mark: InFlight,
    /// Key of the chunk before this one in its prompt. That chunk is kept at least as long as this one where
    /// possible.
    pub parent: Option<ChunkKey>,
    /// Origin of the chunk.
    pub origin: Origin,
    /// Slot with the chunk's bytes.
    pub slot: WrittenSlot,
}

impl LocalTier {
    /// Marks a key exclusively as being written by `owner` and reserves `len` bytes for it, evicting chunks
    /// if necessary. Nothing is reserved if the key is present or has another exclusive mark.
    ///
    /// # Errors
    /// [`ReserveError`] if there is no memory for the chunk; no mark is left then.
    pub fn begin_write(
        &self,
        owner: OwnerId,
        tenant: TenantId,
        key: ChunkKey,
        len: u64,
    ) -> Result<WriteStart, ReserveError> {
        self.begin_marked(owner, tenant, key, len, Shard::begin_write)
    }

    /// Marks a key as being written by `owner`, perhaps among others, and reserves `len` bytes for it. Never
    /// answers [`WriteStart::Busy`], so the caller need not wait for the owner of the exclusive mark: a read
    /// from a lower tier continues while a worker writes the same chunk.
    ///
    /// # Errors
    /// [`ReserveError`] if there is no memory for the chunk; no mark is left then.
    pub fn begin_shared_write(
        &self,
        owner: OwnerId,
        tenant: TenantId,
        key: ChunkKey,
        len: u64,
    ) -> Result<WriteStart, ReserveError> {
        let mark = |shard: &mut Shard, key, number| {
            shard.begin_shared_write(key, number);
            true
        };
        self.begin_marked(owner, tenant, key, len, mark)
    }

    /// Marks a key that is not present, if `mark` can, and reserves memory for it.
    fn begin_marked(
        &self,
        owner: OwnerId,
        tenant: TenantId,
        key: ChunkKey,
        len: u64,
        mark: impl FnOnce(&mut Shard, ChunkKey, u64) -> bool,
    ) -> Result<WriteStart, ReserveError> {
        let inner = self.inner();
        let fold = key.fold();
        let number = inner.reservations.fetch_add(1, Ordering::Relaxed);
        let mut shard = inner.shards[inner.shard_of(fold)].lock();
        if shard.find(fold, &key).is_some() {
            return Ok(WriteStart::Present);
        }
        let marked = mark(&mut shard, key, number);
        drop(shard);
        if !marked {
            inner.counters.busy.add(1);
            return Ok(WriteStart::Busy);
        }
        let tenant = inner.tenants.get(tenant);
        inner.writes.take(owner, 1, 0);
        // From here on, dropping this value removes the mark. It counts no bytes yet, so that they are not
        // charged to the quota twice.
        let mut mark = InFlight {
            tier: Arc::clone(inner),
            owner,
            tenant,
            key,
            len: 0,
            number,
        };
        let slot = inner.reserve(len, &mark.tenant)?;
        mark.tenant.begin_write(len);
        mark.len = len;
        Ok(WriteStart::Reserved(WriteGrant { mark, slot }))
    }

    /// Turns exclusive marks into shared ones, so that other owners may write the same chunks into slots of
    /// their own. For writers that are not expected to commit soon: their slots stay reserved, and a commit
    /// of theirs still counts. Marks that no longer exist are ignored.
    pub fn share_writes(&self, marks: &[MarkId]) {
        let inner = self.inner();
        for mark in marks {
            let mut shard = inner.shards[inner.shard_of(mark.key.fold())].lock();
            shard.share_write(mark.key, mark.number);
        }
    }

    /// Returns true if this key has an exclusive write mark.
    pub fn is_writing(&self, key: &ChunkKey) -> bool {
        let inner = self.inner();
        inner.shards[inner.shard_of(key.fold())]
            .lock()
            .is_writing(key)
    }

    /// Makes written chunks findable. Returns one answer for each, in order; a batch should be in the order
    /// of the prompt. A write that began before [`LocalTier::clear`], or before the [`LocalTier::remove`] of
    /// its key, is not found after it.
    ///
    /// # Panics
    /// If a write began on another tier: its memory is not of this pool.
    pub fn commit(&self, writes: Vec<Write>) -> Vec<Inserted> {
        self.commit_with(writes, None).0
    }

    /// Makes written chunks findable and leases each at once, before it can be evicted. The leases are those
    /// of the chunks that are findable, in order.
    ///
    /// # Panics
    /// As [`LocalTier::commit`].
    pub fn commit_leased(&self, owner: OwnerId, writes: Vec<Write>) -> (Vec<Inserted>, Leases) {
        self.commit_with(writes, Some(owner))
    }

    fn commit_with(&self, writes: Vec<Write>, owner: Option<OwnerId>) -> (Vec<Inserted>, Leases) {
        let inner = self.inner();
        let count = writes.len();
        let batch = inner.batch(writes.iter().map(|write| write.mark.key));
        let lineage: Vec<_> = writes
            .iter()
            .map(|write| (write.mark.key, write.parent))
            .collect();
        let (mut marks, mut slots) = (Vec::with_capacity(count), Vec::with_capacity(count));
        for write in writes {
            assert!(
                Arc::ptr_eq(&write.mark.tier, inner),
                "a chunk is committed to the tier that it was reserved in"
            );
            marks.push(write.mark);
            slots.push(Some((write.slot, write.origin)));
        }
        let mut inserted = vec![Inserted::Present; count];
        let mut names = vec![EntryRef::NONE; count];
        let mut leased: Vec<Option<Leased>> = Vec::new();
        leased.resize_with(count, || None);
        let (mut duplicates, mut cleared) = (Vec::new(), Vec::new());
        let first = inner.stamps(count);
        for (shard, positions) in batch.shards() {
            let mut shard = inner.shards[shard].lock();
            for &position in positions {
                let position = position as usize;
                let (slot, origin) = slots[position].take().expect("each position comes once");
                let mark = &marks[position];
                if !shard.holds_write(&mark.key, mark.number) {
                    inserted[position] = Inserted::Cleared;
                    cleared.push(slot);
                    continue;
                }
                let (fold, stamp) = (batch.folds[position], first + (count - 1 - position) as u64);
                let index = match shard.find(fold, &mark.key) {
                    Some(index) => {
                        shard.touch(index, stamp);
                        duplicates.push(slot);
                        index
                    }
                    None => {
                        inserted[position] = Inserted::New;
                        // Before the shard has the entry, because it may be evicted from then on.
                        mark.tenant.add(slot.len());
                        let slot = slot.seal();
                        let came = (stamp, inner.seconds());
                        let index =
                            shard.insert(fold, mark.key, slot, mark.tenant.id, origin, came);
                        inner.count_insert(&shard, index, &lineage[position], mark.tenant.id);
                        index
                    }
                };
                names[position] = shard.name(index);
                if owner.is_some() {
                    leased[position] = Some(shard.lease(index).0);
                }
            }
            shard.publish();
        }
        inner.counters.duplicates.add(duplicates.len() as u64);
        drop((duplicates, cleared));
        inner.link_all(&names, &lineage);
        let leased: Vec<_> = leased.into_iter().flatten().collect();
        let owner = match owner {
            Some(owner) => {
                inner.count_leases(owner, &leased);
                owner
            }
            None => OwnerId::default(),
        };
        let leases = Leases::new(inner, owner, leased);
        // Not earlier: no lookup may find a key that is neither present nor being written.
        drop(marks);
        (inserted, leases)
    }
}

impl Inner {
    /// Counts a chunk that was added, and reports it to the event sink. Called under its shard's lock.
    fn count_insert(
        &self,
        shard: &Shard,
        index: u32,
        (key, parent): &(ChunkKey, Option<ChunkKey>),
        tenant: TenantId,
    ) {
        let entry = shard.entry(index);
        let slot = &entry.slot;
        self.counters.inserted.add(1);
        self.counters.inserted_bytes.add(slot.len());
        if let Some(events) = &self.events {
            events.on_stored(StoredEvent {
                key,
                parent: parent.as_ref(),
                tenant,
                origin: entry.origin(),
                slot,
            });
        }
    }

    /// Links chunks to their parents, where both are present. `names` are those of the chunks.
    pub(super) fn link_all(&self, names: &[EntryRef], prompt: &[(ChunkKey, Option<ChunkKey>)]) {
        for (position, &name) in names.iter().enumerate() {
            let (_, Some(parent)) = prompt[position] else {
                continue;
            };
            if name == EntryRef::NONE {
                continue;
            }
            let before = position.checked_sub(1).filter(|&at| prompt[at].0 == parent);
            let parent = match before {
                Some(at) => names[at],
                None => self.name_of(&parent),
            };
            if parent != EntryRef::NONE {
                self.link(name, parent);
            }
        }
    }

    fn name_of(&self, key: &ChunkKey) -> EntryRef {
        let fold = key.fold();
        let shard = self.shards[self.shard_of(fold)].lock();
        let found = shard.find(fold, key);
        found.map_or(EntryRef::NONE, |index| shard.name(index))
    }

    /// Counts a child for its parent, once. Takes one lock after the other, so either entry may be evicted in
    /// between: then there is nothing to count. If the child already names another parent, that parent is
    /// gone, because a key has one entry.
    fn link(&self, child: EntryRef, parent: EntryRef) {
        let linked = |child: EntryRef| self.shards[child.shard()].lock().has_parent(child, parent);
        if child == parent || linked(child) {
            return;
        }
        if !self.shards[parent.shard()].lock().add_child(parent) {
            return;
        }
        if !self.shards[child.shard()].lock().set_parent(child, parent) {
            self.shards[parent.shard()].lock().drop_child(parent);
        }
    }
}
