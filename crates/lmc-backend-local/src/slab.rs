//! Entries at fixed indices.

use lmc_key::ChunkKey;
use lmc_memory::SealedSlot;

use crate::TenantId;
use crate::chunked::{CHUNK, Chunked};
use crate::origin::Origin;
use crate::policy::{NIL, Node, Nodes};

/// A reference to one entry of the tier: shard, index, and a generation that differs for the next entry at
/// the same index. 8 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct EntryRef(u64);

impl EntryRef {
    pub(crate) const NONE: Self = Self(u64::MAX);

    fn new(shard: usize, index: u32, generation: u32) -> Self {
        Self((shard as u64) << 56 | u64::from(generation) << 32 | u64::from(index))
    }

    pub(crate) fn shard(self) -> usize {
        (self.0 >> 56) as usize
    }

    pub(crate) fn index(self) -> u32 {
        self.0 as u32
    }

    fn generation(self) -> u32 {
        (self.0 >> 32) as u32 & GENERATION
    }
}

const GENERATION: u32 = 0x00ff_ffff;
const STATE_BITS: u32 = 2;
const STATE_MASK: u8 = 0b11;

/// The state of an entry in the eviction order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum EvictionState {
    /// Queued by its policy.
    Queued = 0,
    /// Set aside because it was leased or pinned at its turn; it is queued again as just used.
    Held,
    /// In its class's list of parents: its turn came while children were resident.
    Parent,
}

/// The part of an entry that a lookup reads: one cache line.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(crate) struct Identity {
    pub(crate) key: ChunkKey,
    /// Number of resident entries whose parent this entry is.
    pub(crate) children: u32,
    /// Entry of the chunk before this one in its prompt, whose `children` counts this entry.
    pub(crate) parent: EntryRef,
}

impl Default for Identity {
    fn default() -> Self {
        Self {
            key: ChunkKey::from_bytes(&[0; ChunkKey::BYTES]),
            children: 0,
            parent: EntryRef::NONE,
        }
    }
}

/// The part of an entry, besides its identity, that a use reads: half a cache line.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) slot: SealedSlot,
    /// Number of leases, plus one while the entry is pinned. Only an entry with 0 is evicted.
    pub(crate) holds: u32,
    generation: [u8; 3],
    /// Low two bits: the eviction state. High bits: the origin.
    eviction_and_origin: u8,
}

impl Entry {
    /// Returns true if the entry is leased or pinned and must not be evicted.
    pub(crate) fn busy(&self) -> bool {
        self.holds > 0
    }

    pub(crate) fn eviction(&self) -> EvictionState {
        match self.eviction_and_origin & STATE_MASK {
            0 => EvictionState::Queued,
            1 => EvictionState::Held,
            _ => EvictionState::Parent,
        }
    }

    pub(crate) fn set_eviction(&mut self, state: EvictionState) {
        self.eviction_and_origin = self.eviction_and_origin & !STATE_MASK | state as u8;
    }

    pub(crate) fn origin(&self) -> Origin {
        Origin::from_number(self.eviction_and_origin >> STATE_BITS)
    }
}

/// Time of an entry's insert, and the number of its uses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Life {
    /// Second of the insert, less exact for older entries. Wrong, namely too late, after 16 million further
    /// inserts.
    pub(crate) inserted_at: u32,
    /// Number of lookups and retrieves that found the entry, up to 255.
    pub(crate) uses: u8,
}

/// Times of inserts by insert number: an entry's generation gives its time, so the entry needs no field for
/// it.
#[derive(Debug, Default)]
struct Marks {
    /// Number and second of each insert that was the first of its second, oldest first.
    marks: Vec<(u32, u32)>,
}

impl Marks {
    const MAX: usize = 64;

    fn note(&mut self, insert: u32, seconds: u32) {
        if self.marks.last().is_some_and(|last| last.1 == seconds) {
            return;
        }
        if self.marks.len() == Self::MAX {
            // Removes the mark whose neighbours are closest together relative to their age: ages of old
            // entries may be coarse.
            let gap = |at: usize| {
                let (before, after) = (self.marks[at - 1].1, self.marks[at + 1].1);
                f64::from(after - before) / f64::from(seconds - before)
            };
            let closest = (1..Self::MAX - 1).min_by(|a, b| gap(*a).total_cmp(&gap(*b)));
            self.marks
                .remove(closest.expect("there are marks in between"));
        }
        self.marks.push((insert, seconds));
    }

    /// Returns the second of the insert that was `since` inserts before `last`.
    fn before(&self, last: u32, since: u32) -> u32 {
        let is_before = |mark: &(u32, u32)| last.wrapping_sub(mark.0) >= since;
        let after = self.marks.partition_point(is_before);
        let mark = self.marks.get(after.saturating_sub(1));
        mark.map_or(0, |mark| mark.1)
    }
}

/// The entries of a shard with their nodes and tenants.
#[derive(Debug)]
pub(crate) struct Slab {
    identities: Chunked<Identity>,
    entries: Chunked<Option<Entry>>,
    pub(crate) nodes: Nodes,
    tenants: Chunked<TenantId>,
    /// Head of the free indices, linked by `Node::next`.
    free: u32,
    /// Number of inserts, whose low 24 bits are the latest generation. All indices share the counter, so it
    /// wraps after 16 million inserts, not after 16 million uses of one index. A stale reference is mistaken
    /// for another entry only if exactly that many inserts lie in between.
    inserts: u32,
    marks: Marks,
    shard: usize,
}

impl Slab {
    pub(crate) fn new(shard: usize) -> Self {
        Self {
            identities: Chunked::default(),
            entries: Chunked::default(),
            nodes: Nodes::default(),
            tenants: Chunked::default(),
            free: NIL,
            inserts: 0,
            marks: Marks::default(),
            shard,
        }
    }

    /// Stores an entry at a free index.
    pub(crate) fn insert(
        &mut self,
        key: ChunkKey,
        slot: SealedSlot,
        tenant: TenantId,
        origin: Origin,
        seconds: u32,
    ) -> u32 {
        if self.free == NIL {
            self.grow();
        }
        let index = self.free;
        self.free = self.nodes[index].next;
        self.nodes[index] = Node::default();
        self.inserts = self.inserts.wrapping_add(1);
        self.marks.note(self.inserts, seconds);
        let [a, b, c, _] = self.inserts.to_le_bytes();
        self.tenants[index] = tenant;
        self.identities[index] = Identity {
            key,
            ..Identity::default()
        };
        self.entries[index] = Some(Entry {
            slot,
            holds: 0,
            generation: [a, b, c],
            eviction_and_origin: origin.number() << STATE_BITS,
        });
        index
    }

    fn grow(&mut self) {
        let start = self.entries.len();
        let end = start + CHUNK;
        assert!(end < NIL as usize, "a shard holds fewer than 2^32 chunks");
        self.identities.grow();
        self.entries.grow();
        self.nodes.grow();
        self.tenants.grow();
        for index in (start as u32..end as u32).rev() {
            self.nodes[index].next = self.free;
            self.free = index;
        }
    }

    /// Removes the entry at an index.
    pub(crate) fn remove(&mut self, index: u32) -> (Identity, Entry) {
        let entry = self.entries[index].take();
        self.nodes[index].next = self.free;
        self.free = index;
        let entry = entry.expect("only indices that the table names are removed");
        (self.identities[index], entry)
    }

    /// Returns the key and the relatives of the entry that is, or was, at this index.
    #[inline]
    pub(crate) fn identity(&self, index: u32) -> &Identity {
        &self.identities[index]
    }

    #[inline]
    pub(crate) fn identity_mut(&mut self, index: u32) -> &mut Identity {
        &mut self.identities[index]
    }

    #[inline]
    pub(crate) fn entry(&self, index: u32) -> &Entry {
        let entry = self.entries[index].as_ref();
        entry.expect("the table and the queues name occupied indices only")
    }

    #[inline]
    pub(crate) fn entry_mut(&mut self, index: u32) -> &mut Entry {
        let entry = self.entries[index].as_mut();
        entry.expect("the table and the queues name occupied indices only")
    }

    /// Reads the first word of the part that a use of the entry reads.
    #[inline]
    pub(crate) fn glance(&self, index: u32) -> u32 {
        let entry = self.entries[index].as_ref();
        entry.map_or(0, |entry| entry.holds) ^ self.nodes[index].next
    }

    pub(crate) fn tenant(&self, index: u32) -> TenantId {
        self.tenants[index]
    }

    /// Returns the time of an entry's insert and the number of its uses since.
    pub(crate) fn life(&self, index: u32) -> Life {
        let [a, b, c] = self.entry(index).generation;
        let generation = u32::from_le_bytes([a, b, c, 0]);
        let since = self.inserts.wrapping_sub(generation) & GENERATION;
        Life {
            inserted_at: self.marks.before(self.inserts, since),
            uses: self.nodes[index].uses(),
        }
    }

    /// Returns the reference to an entry.
    pub(crate) fn name(&self, index: u32) -> EntryRef {
        let [a, b, c] = self.entry(index).generation;
        EntryRef::new(self.shard, index, u32::from_le_bytes([a, b, c, 0]))
    }

    /// Returns the entry that a reference names, if it is still present.
    #[inline]
    pub(crate) fn named(&mut self, name: EntryRef) -> Option<&mut Entry> {
        let entry = self.entries.get_mut(name.index())?.as_mut()?;
        let [a, b, c] = entry.generation;
        (u32::from_le_bytes([a, b, c, 0]) == name.generation()).then_some(entry)
    }

    /// Returns the occupied indices from `start` on.
    pub(crate) fn occupied(&self, start: u32) -> impl Iterator<Item = (u32, &Entry)> {
        let end = self.entries.len() as u32;
        (start..end).filter_map(|index| Some((index, self.entries.get(index)?.as_ref()?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_costs_what_the_docs_say() {
        assert_eq!(size_of::<Option<Entry>>(), 32);
        assert_eq!(size_of::<Identity>(), 64);
        assert_eq!(size_of::<Node>(), 16);
        assert_eq!(size_of::<TenantId>(), 4);
    }

    #[test]
    fn marks_tell_the_second_of_an_insert_and_grow_coarse() {
        let mut marks = Marks::default();
        assert_eq!(marks.before(0, 0), 0);
        // Ten inserts a second, the last number of which wraps.
        let number = |insert: u32| insert.wrapping_sub(5000);
        (0..10_000).for_each(|insert| marks.note(number(insert), insert / 10));
        assert!(marks.marks.len() <= Marks::MAX);
        let last = 9_999;
        let second = |since| marks.before(number(last), since);
        assert_eq!([second(0), second(9), second(10)], [999, 999, 998]);
        for since in [100, 1000, 5000, 9000] {
            let (right, found) = ((last - since) / 10, second(since));
            assert!(
                found <= right && right - found <= since / 20,
                "{since}: {found}"
            );
        }
        assert_eq!(second(last), 0);
    }

    #[test]
    fn names_are_taken_apart_as_they_were_put_together() {
        let name = EntryRef::new(255, 0xdead_beef, GENERATION);
        assert_eq!(
            (name.shard(), name.index(), name.generation()),
            (255, 0xdead_beef, GENERATION)
        );
    }
}
