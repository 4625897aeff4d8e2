//! Lookups, leases, pins, removals and listings.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use lmc_key::{ChunkKey, SpaceId};

use super::batch::{group, parts};
use super::{Inner, LocalTier};
#[cfg(test)]
use crate::shard::Shown;
use crate::shard::{Leased, Shard};
use crate::shard::{Linked, WARM};
use crate::slab::EntryRef;
use crate::sync::Mutex;
use crate::{Lease, Leases, OwnerId, Removal};

/// Chunks that a walk over the index removes under one lock.
const AT_ONCE: usize = 256;

/// The chunks that [`LocalTier::clear`] removes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clear {
    /// Chunks that are neither leased nor pinned.
    Idle,
    /// Chunks that are not leased; pins end.
    Unleased,
    /// All chunks. A leased chunk becomes unfindable at once; its memory is released with the last lease.
    All,
}

impl Clear {
    fn spares(self, shard: &Shard, index: u32) -> bool {
        match self {
            Self::Idle => shard.entry(index).busy(),
            Self::Unleased => shard.is_leased(index),
            Self::All => false,
        }
    }
}

/// Outcome of [`LocalTier::clear`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Cleared {
    /// Chunks that were removed.
    pub removed: u64,
    /// Keys of the chunks that remain.
    pub left: Vec<ChunkKey>,
}

/// A chunk of a listing, with its depth in its prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ListedChunk {
    /// Key of the chunk.
    pub key: ChunkKey,
    /// Key of the chunk before this one in its prompt, if that chunk is present.
    pub parent: Option<ChunkKey>,
    /// Bytes of the chunk.
    pub len: u64,
    /// Number of chunks before this one in its prompt, as far as they are present.
    pub depth: u32,
}

impl LocalTier {
    /// Returns the number of leading keys that are present. Takes no leases and does not count as a use; the
    /// chunks may be gone before the caller acts on the answer.
    pub fn lookup_leading(&self, keys: &[ChunkKey]) -> usize {
        let inner = &self.0;
        let limit = inner.leading_bound(keys);
        let batch = inner.batch(keys[..limit].iter().copied());
        let mut leading = limit;
        for (shard, positions) in batch.shards() {
            let shard = inner.shards[shard].lock();
            for positions in positions.rchunks(WARM) {
                shard.warm(positions, &batch.folds);
                for &position in positions.iter().rev() {
                    let position = position as usize;
                    if position < leading
                        && shard.find(batch.folds[position], &keys[position]).is_none()
                    {
                        leading = position;
                    }
                }
            }
        }
        inner.count_lookup(keys.len(), leading);
        leading
    }

    /// Leases the leading keys that are present, and counts them as used.
    pub fn lease_leading(&self, owner: OwnerId, keys: &[ChunkKey]) -> Leases {
        let leases = self.lease_first(owner, keys, true);
        self.0.count_lookup(keys.len(), leases.len());
        leases
    }

    /// Leases the leading keys that are present. Counts neither as a lookup nor as a use of the
    /// chunks: for keys that were looked up before, and for the tier's own work.
    pub fn lease_uncounted(&self, owner: OwnerId, keys: &[ChunkKey]) -> Leases {
        self.lease_first(owner, keys, false)
    }

    fn lease_first(&self, owner: OwnerId, keys: &[ChunkKey], is_use: bool) -> Leases {
        let inner = &self.0;
        let limit = inner.leading_bound(keys);
        let (mut leased, missing, fresh) = inner.lease_each(&keys[..limit], is_use);
        // A key nearer to the head was missing: rare, as tails are evicted before heads.
        let surplus = missing.map_or_else(Vec::new, |at| leased.split_off(at));
        inner.give_back(surplus.into_iter().flatten().collect());
        // No key before the first missing one is missing.
        let leased: Vec<_> = leased.into_iter().flatten().collect();
        inner.count_leases(owner, &leased);
        Leases::new(inner, owner, leased).with_fresh(fresh)
    }

    /// Leases each key that is present, and counts it as a use.
    pub fn lease(&self, owner: OwnerId, keys: &[ChunkKey]) -> Vec<Option<Lease>> {
        let inner = &self.0;
        let (leased, _, _) = inner.lease_each(keys, true);
        let count = leased.iter().flatten().count();
        inner.count_lookup(keys.len(), count);
        inner.count_leases(owner, leased.iter().flatten());
        let lease = |leased: Option<Leased>| Some(Lease::new(inner, owner, leased?));
        leased.into_iter().map(lease).collect()
    }

    /// Counts the chunks of a prompt that are present as used, the head last, and links each to its parent,
    /// which may have been stored later.
    pub fn touch(&self, prompt: &[(ChunkKey, Option<ChunkKey>)]) {
        let inner = &self.0;
        let batch = inner.batch(prompt.iter().map(|&(key, _)| key));
        let first = inner.stamps(prompt.len());
        let mut names = vec![EntryRef::NONE; prompt.len()];
        for (shard, positions) in batch.shards() {
            let mut shard = inner.shards[shard].lock();
            for &position in positions {
                let position = position as usize;
                if let Some(index) = shard.find(batch.folds[position], &prompt[position].0) {
                    shard.touch(index, first + (prompt.len() - 1 - position) as u64);
                    names[position] = shard.name(index);
                }
            }
            shard.publish();
        }
        inner.link_all(&names, prompt);
    }

    /// Returns the length of each key that is present. Does not count as a use, nor as a hit or miss.
    pub fn contains(&self, keys: &[ChunkKey]) -> Vec<Option<u64>> {
        let inner = &self.0;
        let batch = inner.batch(keys.iter().copied());
        let mut found = vec![None; keys.len()];
        for (shard, positions) in batch.shards() {
            let shard = inner.shards[shard].lock();
            for &position in positions {
                let position = position as usize;
                let index = shard.find(batch.folds[position], &keys[position]);
                found[position] = index.map(|index| shard.entry(index).slot.len());
            }
        }
        found
    }

    /// Keeps chunks from eviction until they are unpinned as often as they were pinned. Returns true for each
    /// key that is present and now pinned. [`LocalTier::remove`] and [`Clear::All`] remove pinned chunks
    /// nevertheless, together with their pins.
    pub fn pin(&self, keys: &[ChunkKey]) -> Vec<bool> {
        let mut pinned = vec![false; keys.len()];
        self.0.visit(keys, |shard, index, position| {
            pinned[position] = shard.pin(index)
        });
        pinned
    }

    /// Removes one pin of each key. Returns true for each key that was pinned.
    pub fn unpin(&self, keys: &[ChunkKey]) -> Vec<bool> {
        let mut unpinned = vec![false; keys.len()];
        let stamp = self.0.stamps(1);
        self.0.visit(keys, |shard, index, position| {
            unpinned[position] = shard.unpin(index, stamp);
        });
        unpinned
    }

    /// Makes chunks unfindable. Returns true for each that was present. The memory of a leased chunk is
    /// released with its last lease. A chunk whose write had begun is not found afterwards either.
    pub fn remove(&self, keys: &[ChunkKey]) -> Vec<bool> {
        let inner = &self.0;
        let mut removed = vec![false; keys.len()];
        let mut taken = Vec::new();
        let batch = inner.batch(keys.iter().copied());
        for (shard, positions) in batch.shards() {
            let mut shard = inner.shards[shard].lock();
            for &position in positions {
                let position = position as usize;
                shard.void_write(&keys[position]);
                if let Some(index) = shard.find(batch.folds[position], &keys[position]) {
                    let entry = shard.take(index);
                    inner.account(&entry, Removal::Removed);
                    removed[position] = true;
                    taken.push(entry);
                }
            }
            shard.publish();
        }
        for entry in taken {
            inner.free_removed(entry);
        }
        removed
    }

    /// Removes the given chunks that are not leased; their pins end. Returns the present chunks that remain.
    pub fn remove_unleased(&self, keys: &[ChunkKey]) -> Vec<ChunkKey> {
        let mut left = Vec::new();
        let mut taken = Vec::new();
        self.0.visit(keys, |shard, index, position| {
            if Clear::Unleased.spares(shard, index) {
                left.push(keys[position]);
                return;
            }
            let entry = shard.take(index);
            self.0.account(&entry, Removal::Cleared);
            taken.push(entry);
        });
        for entry in taken {
            self.0.free_removed(entry);
        }
        left
    }

    /// Removes many chunks at once, and reports those that [`Clear::Unleased`] leaves. A chunk whose write
    /// had begun is not found afterwards either. A chunk whose write begins during the clear may stay.
    pub fn clear(&self, which: Clear) -> Cleared {
        let inner = &self.0;
        let mut cleared = Cleared::default();
        for shard in &inner.shards {
            let mut start = 0;
            shard.lock().void_writes(|_| true);
            loop {
                let mut taken = Vec::new();
                let mut locked = shard.lock();
                let indices = locked.indices(start, AT_ONCE);
                for &index in &indices {
                    if !which.spares(&locked, index) {
                        let entry = locked.take(index);
                        inner.account(&entry, Removal::Cleared);
                        taken.push(entry);
                    } else {
                        if which == Clear::Unleased {
                            inner.report_left(&locked, index);
                        }
                        cleared.left.push(*locked.key(index));
                    }
                }
                locked.publish();
                drop(locked);
                cleared.removed += taken.len() as u64;
                for entry in taken {
                    inner.free_removed(entry);
                }
                let Some(last) = indices.last() else {
                    break;
                };
                start = last + 1;
            }
        }
        cleared
    }

    /// Removes all chunks of some spaces and returns their number. A leased chunk becomes unfindable at once;
    /// its memory is released with the last lease. Walks the whole index.
    pub fn remove_spaces(&self, spaces: &HashSet<SpaceId>) -> u64 {
        let mut removed = 0;
        for shard in &self.0.shards {
            let mut start = 0;
            loop {
                let mut taken = Vec::new();
                let mut locked = shard.lock();
                let indices = locked.indices(start, AT_ONCE);
                for &index in &indices {
                    if spaces.contains(&locked.key(index).space) {
                        let entry = locked.take(index);
                        self.0.account(&entry, Removal::Removed);
                        taken.push(entry);
                    }
                }
                locked.publish();
                drop(locked);
                removed += taken.len() as u64;
                for entry in taken {
                    self.0.free_removed(entry);
                }
                let Some(last) = indices.last() else {
                    break;
                };
                start = last + 1;
            }
        }
        removed
    }

    /// Returns some of the chunks, and the position for the next call; `None` at the end. The first position
    /// is 0. A chunk that is present from the first call to the last is listed exactly once.
    pub fn list(&self, from: u64, limit: usize) -> (Vec<ChunkKey>, Option<u64>) {
        let (mut shard, mut index) = ((from >> 32) as usize, from as u32);
        let mut keys = Vec::new();
        while let Some(locked) = self.0.shards.get(shard).map(Mutex::lock) {
            let indices = locked.indices(index, limit.saturating_sub(keys.len()).min(AT_ONCE));
            keys.extend(indices.iter().map(|&index| locked.key(index)));
            match indices.last() {
                None if keys.len() < limit => (shard, index) = (shard + 1, 0),
                None => return (keys, Some((shard as u64) << 32 | u64::from(index))),
                Some(last) => index = last + 1,
            }
        }
        (keys, None)
    }

    /// Returns every chunk, with its leases, pins and children.
    #[cfg(test)]
    pub(crate) fn list_shown(&self) -> Vec<Shown> {
        let shards = self.0.shards.iter();
        shards.flat_map(|shard| shard.lock().list()).collect()
    }

    /// Returns every chunk, the heads of prompts first, then the chunks that follow them, and so on: every
    /// beginning of the list consists of whole prefixes. For use at shutdown: the list has an entry for each
    /// chunk.
    pub fn list_heads_first(&self) -> Vec<ListedChunk> {
        let mut shown: Vec<Linked> = Vec::new();
        for shard in &self.0.shards {
            shown.extend(shard.lock().list_linked());
        }
        let positions: HashMap<EntryRef, usize> = shown
            .iter()
            .enumerate()
            .map(|(position, linked)| (linked.name, position))
            .collect();
        let parent = |position: usize| positions.get(&shown[position].parent).copied();
        let mut depths: Vec<Option<u32>> = vec![None; shown.len()];
        let mut path = Vec::new();
        for position in 0..shown.len() {
            // Towards the head, up to a chunk whose depth is known, and back.
            let mut next = Some(position);
            let mut depth = 0;
            while let Some(position) = next {
                if let Some(known) = depths[position] {
                    depth = known + 1;
                    break;
                }
                // Marked, so that a cycle would end here. There is none.
                depths[position] = Some(0);
                path.push(position);
                next = parent(position);
            }
            while let Some(position) = path.pop() {
                depths[position] = Some(depth);
                depth += 1;
            }
        }
        let listed = |(position, depth): (usize, &Option<u32>)| ListedChunk {
            key: shown[position].key,
            parent: parent(position).map(|parent| shown[parent].key),
            len: shown[position].len,
            depth: depth.unwrap_or(0),
        };
        let mut listed: Vec<ListedChunk> = depths.iter().enumerate().map(listed).collect();
        listed.sort_by_key(|listed| listed.depth);
        listed
    }
}

impl Inner {
    /// Returns a bound for the position of the first missing key: the number of keys if the last one is
    /// present, else the position of a missing key, found with a few single probes. So a lookup that misses
    /// early does not probe all its keys.
    fn leading_bound(&self, keys: &[ChunkKey]) -> usize {
        let there = |position: usize| {
            let (key, fold) = (&keys[position], keys[position].fold());
            self.shards[self.shard_of(fold)]
                .lock()
                .find(fold, key)
                .is_some()
        };
        let (mut from, mut to) = (0, keys.len());
        if to == 0 || there(to - 1) {
            return to;
        }
        to -= 1;
        while from < to {
            let middle = from + (to - from) / 2;
            match there(middle) {
                true => from = middle + 1,
                false => to = middle,
            }
        }
        to
    }

    fn count_lookup(&self, asked: usize, found: usize) {
        self.counters.hits.add(found as u64);
        self.counters.misses.add((asked - found) as u64);
    }

    /// Counts leases that were granted to an owner.
    pub(super) fn count_leases<'a>(
        &self,
        owner: OwnerId,
        leased: impl IntoIterator<Item = &'a Leased>,
    ) {
        let lens = leased
            .into_iter()
            .map(|leased| self.taken(leased.slot.len()));
        let (count, bytes) = lens.fold((0, 0), |(count, bytes), len| (count + 1, bytes + len));
        self.leases.take(owner, count, bytes);
        self.counters.leased.add(count);
    }

    /// Leases each key that is present. Returns the index of the first missing key, and the bytes of chunks
    /// that nothing held before.
    pub(super) fn lease_each(
        &self,
        keys: &[ChunkKey],
        is_use: bool,
    ) -> (Vec<Option<Leased>>, Option<usize>, u64) {
        let batch = self.batch(keys.iter().copied());
        let first = self.stamps(keys.len());
        let mut leased: Vec<Option<Leased>> = Vec::new();
        leased.resize_with(keys.len(), || None);
        let mut missing = keys.len();
        let mut fresh_bytes = 0;
        for (shard, positions) in batch.shards() {
            let mut shard = self.shards[shard].lock();
            for positions in positions.chunks(WARM) {
                let likely = shard.warm(positions, &batch.folds);
                shard.warm_use(&likely);
                for &position in positions {
                    let position = position as usize;
                    let Some(index) = shard.find(batch.folds[position], &keys[position]) else {
                        missing = missing.min(position);
                        continue;
                    };
                    let stamp = first + (keys.len() - 1 - position) as u64;
                    if is_use {
                        shard.touch(index, stamp);
                        shard.count_use(index);
                    }
                    let (lease, fresh) = shard.lease(index);
                    if fresh {
                        fresh_bytes += self.taken(lease.slot.len());
                    }
                    leased[position] = Some(lease);
                }
            }
            shard.publish();
        }
        let missing = (missing < keys.len()).then_some(missing);
        (leased, missing, fresh_bytes)
    }

    /// Releases leases and subtracts them from their owner's count.
    pub(crate) fn release(&self, owner: OwnerId, items: Vec<Leased>) {
        let count = items.len() as u64;
        let bytes = items.iter().map(|item| self.taken(item.slot.len())).sum();
        self.give_back(items);
        self.leases.give(owner, count, bytes);
        self.counters.released.add(count);
    }

    /// Releases leases.
    fn give_back(&self, items: Vec<Leased>) {
        let Some(last) = items.len().checked_sub(1) else {
            return;
        };
        let first = self.stamps(items.len());
        let shards = items.iter().map(|item| item.name.shard());
        let (order, ends) = group(shards, self.shards.len());
        for (shard, positions) in parts(&order, &ends) {
            let mut shard = self.shards[shard].lock();
            for &position in positions {
                let stamp = first + (last - position as usize) as u64;
                shard.unlease(items[position as usize].name, stamp);
            }
            shard.publish();
        }
        // The slots are dropped after the locks: a removed chunk's memory returns to the pool here.
        drop(items);
    }

    /// Calls `each` for every key that is present, under its shard's lock.
    fn visit(&self, keys: &[ChunkKey], mut each: impl FnMut(&mut Shard, u32, usize)) {
        let batch = self.batch(keys.iter().copied());
        for (shard, positions) in batch.shards() {
            let mut shard = self.shards[shard].lock();
            for &position in positions {
                let position = position as usize;
                if let Some(index) = shard.find(batch.folds[position], &keys[position]) {
                    each(&mut shard, index, position);
                }
            }
            shard.publish();
        }
    }
}

impl LocalTier {
    pub(super) fn inner(&self) -> &Arc<Inner> {
        &self.0
    }
}
