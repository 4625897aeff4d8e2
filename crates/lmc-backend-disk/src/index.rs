//! The index of one drive: its chunks, its segments, and which segment is written or evicted next.
//!
//! Pure: no files, no clock. Changes are [`Record`]s, both at run time and during recovery.

use std::collections::{HashMap, VecDeque};

use hashbrown::HashTable;
use lmc_backend::{Change, Events};
use lmc_key::{ChunkKey, ClearsId, SpaceId};
use xxhash_rust::xxh3::xxh3_64;

use crate::TIER;
use crate::format::{Location, PutRecord, Record, blocks};

/// A chunk in the list of its segment.
#[derive(Clone, Copy, Debug)]
struct Chunk {
    key: ChunkKey,
    block: u32,
    /// Bytes of the payload; 0 once the chunk is gone.
    len: u64,
    payload_sum: u64,
}

/// The segment of a chunk, and its index in the segment's list.
#[derive(Clone, Copy, Debug)]
struct Entry {
    /// Hash of the chunk's key.
    hash: u64,
    segment: u32,
    /// Index in the segment's list.
    at: u32,
}

/// Reference to the entry of a chunk that was found. It leads to the chunk until the chunk is removed or moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EntryRef {
    segment: u32,
    /// Index in the segment's list.
    at: u32,
    /// Number of the use of the segment.
    generation: u64,
}

fn hash_of(key: &ChunkKey) -> u64 {
    let mut bytes = [0; 52];
    bytes[..16].copy_from_slice(key.space.as_bytes());
    bytes[16..48].copy_from_slice(key.hash.as_bytes());
    bytes[48..50].copy_from_slice(&key.kv_rank.to_le_bytes());
    bytes[50..].copy_from_slice(&key.group.to_le_bytes());
    xxh3_64(&bytes)
}

/// A segment's state.
#[derive(Clone, Debug, Default)]
pub(crate) struct Segment {
    pub(crate) generation: u64,
    /// Blocks allocated in this use, from the segment's start.
    used: u32,
    /// Chunks of this use, in the order of their arrival.
    list: Vec<Chunk>,
    /// Number of chunks that can be found.
    chunks: u32,
    bytes: u64,
    /// Number of loads since an eviction last passed over the segment.
    hits: u32,
    /// Number of operations that are reading from or writing to the segment.
    busy: u32,
    /// True if the segment's file exists.
    made: bool,
    /// True if the index was cleared while the segment was busy: the segment becomes free when its operations
    /// end.
    cleared: bool,
}

/// Space for a chunk: its header's block, and the payload after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Extent {
    pub(crate) location: Location,
    /// Number of blocks of header and payload.
    pub(crate) blocks: u32,
}

/// Outcome of an allocation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Allocation {
    /// The extent in the current segment.
    Extent(Extent),
    /// The extent is at the start of a segment's next use, which must be logged.
    Begun {
        extent: Extent,
        begin: Record,
        /// True if the segment's file must be made first.
        make: bool,
    },
    /// No space: all segments are being read or written.
    Busy,
    /// There is no segment that may be evicted; another file must be made, if the drive can grow.
    MayGrow,
    /// A chunk of this size fits into no segment.
    TooLarge { max: u64 },
}

/// Most segments of a drive. Each is an open file, and a process can usually open this many files; a greater
/// number in a file is damage.
pub(crate) const MAX_SEGMENTS: u32 = 1 << 20;
/// Highest valid generation, which leaves numbers for all later uses; a greater number in a file is damage.
const MAX_GENERATION: u64 = 1 << 63;
/// Most segments with recent reads that are passed over before one of them is evicted.
const SECOND_CHANCES: usize = 16;

#[derive(Debug)]
pub(crate) struct Index {
    /// One entry for each chunk.
    entries: HashTable<Entry>,
    segments: Vec<Segment>,
    segment_blocks: u32,
    /// The segment that is being written, if any.
    active: Option<u32>,
    /// Full segments, the one begun first at the front.
    full: VecDeque<u32>,
    /// Segments that have a file and no chunks; the last one is used next.
    free: Vec<u32>,
    /// Digest of the clears after which the chunks were stored.
    clears: ClearsId,
    /// Generation that the last of these clears took. Segments begun before it are empty.
    cleared_at: u64,
    chunks: u64,
    bytes: u64,
    evicted_chunks: u64,
    evicted_segments: u64,
    /// Bus for events; set when the drive is open: recovery reports nothing.
    events: Option<Events>,
}

#[cfg(test)]
thread_local! {
    /// Number of segments and chunks that listings and snapshots of this thread have visited.
    static VISITED: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
    /// Number of searches for a key by this thread.
    pub(crate) static SEARCHES: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// Passes the entries through; tests count the visited ones.
fn visits<T>(entries: impl IntoIterator<Item = T>) -> impl Iterator<Item = T> {
    entries.into_iter().inspect(|_| {
        #[cfg(test)]
        VISITED.set(VISITED.get() + 1);
    })
}

/// Chunks of a snapshot that are copied at a time.
pub(crate) const SNAPSHOT_PART: usize = 4096;

/// Progress of a snapshot of an index.
#[derive(Debug)]
pub(crate) struct Snapshot {
    /// Generation of each segment when the snapshot began.
    generations: Vec<u64>,
    /// The segment whose chunks are being copied, and the next index in its list.
    segment: usize,
    at: usize,
}

/// Chunks of one space on a drive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct IndexSpace {
    pub(crate) chunks: u64,
    pub(crate) bytes: u64,
    /// The newest generation of a segment that has a chunk of this space.
    pub(crate) generation: u64,
}

/// Usage and counters of an [`Index`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct IndexUsage {
    pub(crate) chunks: u64,
    pub(crate) bytes: u64,
    pub(crate) segments: u64,
    pub(crate) evicted_chunks: u64,
    pub(crate) evicted_segments: u64,
}

impl Index {
    pub(crate) fn new(segment_bytes: u64) -> Self {
        let segment_blocks = u32::try_from(blocks(segment_bytes)).expect("checked in its header");
        Self {
            entries: HashTable::new(),
            segments: Vec::new(),
            segment_blocks,
            active: None,
            full: VecDeque::new(),
            free: Vec::new(),
            clears: ClearsId::NONE,
            cleared_at: 0,
            chunks: 0,
            bytes: 0,
            evicted_chunks: 0,
            evicted_segments: 0,
            events: None,
        }
    }

    /// Reports changes from now on.
    pub(crate) fn report_to(&mut self, events: Events) {
        self.events = Some(events);
    }

    fn report(&self, key: &ChunkKey, change: Change) {
        if let Some(events) = &self.events {
            events.report(TIER, key, None, change);
        }
    }

    /// Returns the most bytes of a chunk.
    pub(crate) fn max_len(&self) -> u64 {
        // The header takes a block.
        u64::from(self.segment_blocks - 1) * crate::volume::BLOCK
    }

    /// Reserves memory for `records` changes that are about to be applied.
    pub(crate) fn expect(&mut self, records: usize) {
        self.entries.reserve(records, |entry| entry.hash);
    }

    fn segment_mut(&mut self, segment: u32) -> &mut Segment {
        let index = segment as usize;
        if index >= self.segments.len() {
            self.segments.resize(index + 1, Segment::default());
        }
        &mut self.segments[index]
    }

    /// Applies a change. Returns false, without any change, if the record contradicts the index (a chunk
    /// outside its segment, an earlier use).
    pub(crate) fn apply(&mut self, record: &Record) -> bool {
        match *record {
            Record::Put(put) => self.put(&put),
            Record::Remove { key } => {
                self.remove(&key);
                true
            }
            Record::Begin {
                segment,
                generation,
            } => self.begin(segment, generation),
            Record::Cleared { clears, generation } => self.reach(clears, generation),
        }
    }

    /// Removes every chunk, and records the clears. A checkpoint may know later clears than the log that
    /// continues from it: then nothing is changed.
    fn reach(&mut self, clears: ClearsId, generation: u64) -> bool {
        if generation > MAX_GENERATION {
            return false;
        }
        if generation > self.cleared_at {
            (self.clears, self.cleared_at) = (clears, generation);
            self.remove_all();
        }
        true
    }

    /// Removes every chunk. Returns the number of chunks, and the record of the clear.
    pub(crate) fn clear(&mut self, clears: ClearsId) -> (u64, Record) {
        let gone = self.chunks;
        let generation = self.next_generation();
        let record = Record::Cleared { clears, generation };
        self.apply(&record);
        (gone, record)
    }

    /// Empties every segment. Each is written from its start again, in its next use.
    fn remove_all(&mut self) {
        self.entries.clear();
        if let Some(events) = &self.events {
            events.report_any(TIER);
        }
        (self.chunks, self.bytes) = (0, 0);
        self.active = None;
        self.free.clear();
        self.full.clear();
        // From the last to the first, so that the first is used first.
        for (number, segment) in self.segments.iter_mut().enumerate().rev() {
            let number = number as u32;
            *segment = Segment {
                generation: segment.generation,
                made: segment.made,
                busy: segment.busy,
                ..Segment::default()
            };
            // A segment that is still being read or written must not be overwritten.
            match (segment.made, segment.busy) {
                (false, _) => {}
                (true, 0) => self.free.push(number),
                (true, _) => {
                    segment.cleared = true;
                    self.full.push_front(number);
                }
            }
        }
    }

    fn put(&mut self, put: &PutRecord) -> bool {
        let Location {
            segment,
            block,
            generation,
        } = put.location;
        let taken = 1 + blocks(put.len);
        let end = u64::from(block) + taken;
        if put.len == 0 || end > u64::from(self.segment_blocks) {
            return false;
        }
        let Some(known) = self.segments.get(segment as usize) else {
            return false;
        };
        if known.generation != generation || generation <= self.cleared_at {
            return false;
        }
        self.take(&put.key);
        let known = &mut self.segments[segment as usize];
        let entry = Entry {
            hash: hash_of(&put.key),
            segment,
            at: known.list.len() as u32,
        };
        known.list.push(Chunk {
            key: put.key,
            block,
            len: put.len,
            payload_sum: put.payload_sum,
        });
        self.entries
            .insert_unique(entry.hash, entry, |entry| entry.hash);
        known.used = known.used.max(end as u32);
        known.chunks += 1;
        known.bytes += put.len;
        self.chunks += 1;
        self.bytes += put.len;
        self.report(&put.key, Change::Stored);
        true
    }

    /// Removes a chunk. Returns true if it was present.
    pub(crate) fn remove(&mut self, key: &ChunkKey) -> bool {
        let was_there = self.take(key);
        if was_there {
            self.report(key, Change::Removed);
        }
        was_there
    }

    /// Removes a chunk without reporting it. Returns true if it was present.
    fn take(&mut self, key: &ChunkKey) -> bool {
        let (hash, segments) = (hash_of(key), &mut self.segments);
        let found = self.entries.find_entry(hash, |entry| {
            entry.hash == hash
                && segments[entry.segment as usize].list[entry.at as usize].key == *key
        });
        let Ok(found) = found else { return false };
        let (entry, _) = found.remove();
        let segment = &mut segments[entry.segment as usize];
        let len = std::mem::take(&mut segment.list[entry.at as usize].len);
        segment.chunks -= 1;
        segment.bytes -= len;
        if segment.chunks == 0 {
            segment.list.clear();
        }
        self.chunks -= 1;
        self.bytes -= len;
        true
    }

    fn begin(&mut self, segment: u32, generation: u64) -> bool {
        if segment >= MAX_SEGMENTS || generation > MAX_GENERATION {
            return false;
        }
        let known = self.segment_mut(segment);
        if generation < known.generation {
            return false;
        }
        if generation == known.generation {
            return true;
        }
        let used = Segment {
            generation,
            made: known.made,
            busy: known.busy,
            ..Segment::default()
        };
        let before = std::mem::replace(known, used);
        self.chunks -= u64::from(before.chunks);
        self.bytes -= before.bytes;
        self.evicted_chunks += u64::from(before.chunks);
        self.evicted_segments += u64::from(before.chunks > 0);
        for (at, chunk) in (0u32..)
            .zip(&before.list)
            .filter(|(_, chunk)| chunk.len > 0)
        {
            let is_it = |entry: &Entry| (entry.segment, entry.at) == (segment, at);
            if let Ok(found) = self.entries.find_entry(hash_of(&chunk.key), is_it) {
                found.remove();
                self.report(&chunk.key, Change::Evicted);
            }
        }
        true
    }

    /// Sets the numbers of the segment files that exist after recovery. Segments with chunks are full, except
    /// the segment that was written last; the others are free. The returned records log which segments are
    /// gone with their files and chunks.
    #[must_use = "what they held would come back with the next file of the name"]
    pub(crate) fn set_made(&mut self, made: &[u32]) -> Vec<Record> {
        for &segment in made {
            self.segment_mut(segment).made = true;
        }
        // Chunks of segments without a file are lost.
        let lost: Vec<Record> = (0u32..)
            .zip(&self.segments)
            .filter(|(_, segment)| !segment.made && segment.chunks > 0)
            .map(|(number, segment)| Record::Begin {
                segment: number,
                generation: segment.generation + 1,
            })
            .collect();
        for begin in &lost {
            self.apply(begin);
        }
        let mut used: Vec<u32> = Vec::new();
        self.free.clear();
        for (number, segment) in (0u32..).zip(&self.segments) {
            if !segment.made {
                continue;
            }
            if segment.chunks == 0 {
                self.free.push(number);
            } else {
                used.push(number);
            }
        }
        used.sort_by_key(|&number| self.segments[number as usize].generation);
        // The segment begun last has the highest generation: generations count uses of all segments.
        self.active = used.pop();
        self.full = used.into();
        // The lowest number is used first.
        self.free.reverse();
        lost
    }

    /// Returns the number for the next segment file.
    pub(crate) fn next_segment(&self) -> u32 {
        let missing = self.segments.iter().position(|segment| !segment.made);
        missing.unwrap_or(self.segments.len()) as u32
    }

    /// Records that a segment's file exists now, empty.
    pub(crate) fn made(&mut self, segment: u32) {
        let known = self.segment_mut(segment);
        (known.made, known.cleared) = (true, false);
        self.free.push(segment);
    }

    fn next_generation(&self) -> u64 {
        let newest = self.segments.iter().map(|segment| segment.generation).max();
        newest.unwrap_or(0).max(self.cleared_at) + 1
    }

    /// Allocates space for a chunk of `len` bytes. With `may_grow`, a drive whose segments are all full
    /// answers [`Allocation::MayGrow`] before it evicts one. With `victims`, only one of these segments is
    /// evicted, unless none of their files exists any more.
    pub(crate) fn allocate(
        &mut self,
        len: u64,
        may_grow: bool,
        victims: Option<&[u32]>,
    ) -> Allocation {
        let needed = 1 + blocks(len);
        if needed > u64::from(self.segment_blocks) {
            let max = self.max_len();
            return Allocation::TooLarge { max };
        }
        let needed = needed as u32;
        if let Some(active) = self.active {
            let segment = &mut self.segments[active as usize];
            if needed <= self.segment_blocks - segment.used {
                let extent = extent(active, segment, needed);
                return Allocation::Extent(extent);
            }
            self.full.push_back(active);
            self.active = None;
        }
        let next = match self.free.pop() {
            Some(free) => free,
            None if may_grow && self.next_segment() < MAX_SEGMENTS => return Allocation::MayGrow,
            None => {
                let is_made = |victim: &u32| self.segments[*victim as usize].made;
                let victim = match victims {
                    Some(victims) if victims.iter().any(is_made) => self.victim_of(victims),
                    _ => self.victim(),
                };
                let Some(victim) = victim else {
                    return Allocation::Busy;
                };
                victim
            }
        };
        let generation = self.next_generation();
        let begin = Record::Begin {
            segment: next,
            generation,
        };
        self.apply(&begin);
        self.active = Some(next);
        let segment = &mut self.segments[next as usize];
        let extent = extent(next, segment, needed);
        Allocation::Begun {
            extent,
            begin,
            make: !segment.made,
        }
    }

    /// Returns true if a chunk of `len` bytes fits without an eviction and without a new segment.
    pub(crate) fn has_spare_space(&self, len: u64) -> bool {
        let needed = 1 + blocks(len);
        let active = self.active.map(|active| &self.segments[active as usize]);
        let left = active.map_or(0, |active| self.segment_blocks - active.used);
        needed <= u64::from(left)
            || needed <= u64::from(self.segment_blocks) && !self.free.is_empty()
    }

    /// Returns the oldest full segment that is not being read or written and has no recent reads.
    fn victim(&mut self) -> Option<u32> {
        let mut chances = SECOND_CHANCES;
        for _ in 0..2 * self.full.len() {
            let candidate = self.full.pop_front()?;
            let segment = &mut self.segments[candidate as usize];
            let spared = segment.hits > 0 && segment.chunks > 0 && chances > 0;
            if segment.busy == 0 && !spared {
                return Some(candidate);
            }
            if segment.busy == 0 {
                segment.hits = 0;
                chances -= 1;
            }
            self.full.push_back(candidate);
        }
        None
    }

    /// Returns the first of these segments that is full and not being read or written.
    fn victim_of(&mut self, victims: &[u32]) -> Option<u32> {
        let at = victims.iter().find_map(|victim| {
            let idle = self.segments[*victim as usize].busy == 0;
            let at = self.full.iter().position(|full| full == victim);
            at.filter(|_| idle)
        })?;
        self.full.remove(at)
    }

    /// Returns the record of a chunk, if it is present.
    pub(crate) fn find(&self, key: &ChunkKey) -> Option<PutRecord> {
        self.find_entry(key).map(|(_, found)| found)
    }

    /// Returns the record of a chunk, if it is present, and the entry that leads to it without a search.
    pub(crate) fn find_entry(&self, key: &ChunkKey) -> Option<(EntryRef, PutRecord)> {
        #[cfg(test)]
        SEARCHES.set(SEARCHES.get() + 1);
        let hash = hash_of(key);
        let locate = |entry: &Entry| {
            let segment = &self.segments[entry.segment as usize];
            (segment, &segment.list[entry.at as usize])
        };
        let found = self.entries.find(hash, |entry| {
            entry.hash == hash && locate(entry).1.key == *key
        })?;
        let (segment, chunk) = locate(found);
        let entry = EntryRef {
            segment: found.segment,
            at: found.at,
            generation: segment.generation,
        };
        Some((entry, segment.record(found.segment, chunk)))
    }

    /// Returns the record of a chunk that was found at `entry`; `None` if the chunk is no longer there.
    pub(crate) fn record_at(&self, entry: EntryRef, key: &ChunkKey) -> Option<PutRecord> {
        let segment = self.segments.get(entry.segment as usize)?;
        let chunk = segment.list.get(entry.at as usize)?;
        let is_it = segment.generation == entry.generation && chunk.len > 0 && chunk.key == *key;
        is_it.then(|| segment.record(entry.segment, chunk))
    }

    /// Removes a chunk whose bytes turned out to be wrong, if it is still at this location.
    pub(crate) fn retire(&mut self, found: &PutRecord) -> bool {
        self.find(&found.key) == Some(*found) && self.remove(&found.key)
    }

    /// Records that an operation on a segment begins; the segment is not evicted before [`Self::leave`].
    pub(crate) fn enter(&mut self, segment: u32, hit: bool) {
        let segment = &mut self.segments[segment as usize];
        segment.busy += 1;
        segment.hits = segment.hits.saturating_add(u32::from(hit));
    }

    pub(crate) fn leave(&mut self, segment: u32) {
        let known = &mut self.segments[segment as usize];
        known.busy -= 1;
        if known.busy == 0 && known.cleared {
            self.reuse(segment);
        }
    }

    /// Stops writing to a segment, after a write or a sync of it failed.
    pub(crate) fn close_active(&mut self, segment: u32) {
        if self.active == Some(segment) {
            self.full.push_back(segment);
            self.active = None;
        }
    }

    /// Returns at most `limit` chunks at the lowest locations after `after`, in order.
    pub(crate) fn list(&self, after: Option<(u32, u32)>, limit: usize) -> Vec<PutRecord> {
        let mut found = Vec::new();
        let first = after.map_or(0, |(segment, _)| segment);
        let rest = self.segments.get(first as usize..).unwrap_or_default();
        for (number, segment) in visits((first..).zip(rest)) {
            let missing = limit - found.len();
            if missing == 0 {
                break;
            }
            if segment.chunks == 0 {
                continue;
            }
            let is_after = |block| after.is_none_or(|after| (number, block) > after);
            let there =
                visits(&segment.list).filter(|chunk| chunk.len > 0 && is_after(chunk.block));
            let mut there: Vec<&Chunk> = there.collect();
            if there.len() > missing {
                there.select_nth_unstable_by_key(missing, |chunk| chunk.block);
                there.truncate(missing);
            }
            there.sort_unstable_by_key(|chunk| chunk.block);
            found.extend(there.into_iter().map(|chunk| segment.record(number, chunk)));
        }
        found
    }

    /// Returns the chunks of each space.
    pub(crate) fn spaces(&self) -> HashMap<SpaceId, IndexSpace> {
        let mut spaces: HashMap<SpaceId, IndexSpace> = HashMap::new();
        for segment in &self.segments {
            for chunk in segment.list.iter().filter(|chunk| chunk.len > 0) {
                let space = spaces.entry(chunk.key.space).or_default();
                space.chunks += 1;
                space.bytes += chunk.len;
                space.generation = space.generation.max(segment.generation);
            }
        }
        spaces
    }

    /// Returns the segments that have chunks of matching spaces, each with its generation.
    pub(crate) fn segments_with(&self, is_of: impl Fn(SpaceId) -> bool) -> Vec<(u32, u64)> {
        let is_of_it = |chunk: &Chunk| chunk.len > 0 && is_of(chunk.key.space);
        (0u32..)
            .zip(&self.segments)
            .filter(|(_, segment)| segment.list.iter().any(is_of_it))
            .map(|(number, segment)| (number, segment.generation))
            .collect()
    }

    /// Returns true if a segment still has chunks of the use with this generation.
    pub(crate) fn has_chunks_of(&self, segment: u32, generation: u64) -> bool {
        let known = self.segments.get(segment as usize);
        known.is_some_and(|known| known.generation == generation && known.chunks > 0)
    }

    /// Begins to write the index as records from which it can be rebuilt: adds the records of segments now;
    /// [`Self::tell`] adds those of chunks.
    pub(crate) fn snapshot(&self, records: &mut Vec<Record>) -> Snapshot {
        if self.cleared_at > 0 {
            records.push(self.cleared());
        }
        let generations: Vec<u64> = visits(&self.segments).map(|s| s.generation).collect();
        let begun = (0u32..).zip(&generations);
        let begun = begun.filter(|&(_, &generation)| generation > 0);
        records.extend(begun.map(|(segment, &generation)| Record::Begin {
            segment,
            generation,
        }));
        Snapshot {
            generations,
            segment: 0,
            at: 0,
        }
    }

    /// Appends the next part of a snapshot, up to [`SNAPSHOT_PART`] records. Returns false after the last
    /// part.
    ///
    /// Between two parts, chunks may be removed and segments may begin their next use: whether these chunks
    /// are copied or not, the change is in the log that continues from the snapshot. No chunk may be added
    /// meanwhile.
    pub(crate) fn tell(&self, snapshot: &mut Snapshot, records: &mut Vec<Record>) -> bool {
        let mut left = SNAPSHOT_PART;
        while left > 0 {
            let Some(&generation) = visits(snapshot.generations.get(snapshot.segment)).next()
            else {
                return false;
            };
            let segment = &self.segments[snapshot.segment];
            // Chunks of the segment's next use do not belong to this snapshot.
            let list = match segment.generation == generation {
                true => segment.list.get(snapshot.at..).unwrap_or_default(),
                false => &[],
            };
            let part = &list[..list.len().min(left)];
            let number = snapshot.segment as u32;
            let there = visits(part).filter(|chunk| chunk.len > 0);
            records.extend(there.map(|chunk| Record::Put(segment.record(number, chunk))));
            left -= part.len();
            snapshot.at += part.len();
            if part.len() == list.len() {
                snapshot.segment += 1;
                snapshot.at = 0;
            }
        }
        true
    }

    /// Returns the segments that have a file, with their numbers.
    pub(crate) fn segments(&self) -> impl Iterator<Item = (u32, &Segment)> {
        (0u32..)
            .zip(&self.segments)
            .filter(|(_, segment)| segment.made)
    }

    /// Allows an empty segment that is not in use to be written next.
    pub(crate) fn reuse(&mut self, segment: u32) {
        if self.unmake(segment) {
            self.made(segment);
        }
    }

    /// Drops an empty segment that is not in use, so that its file can be removed. Returns false if the
    /// segment is in use or is being written.
    pub(crate) fn unmake(&mut self, segment: u32) -> bool {
        let known = &mut self.segments[segment as usize];
        if !known.made || known.chunks > 0 || known.busy > 0 || self.active == Some(segment) {
            return false;
        }
        known.made = false;
        self.free.retain(|&other| other != segment);
        self.full.retain(|&other| other != segment);
        true
    }

    /// Returns the digest of the clears after which the chunks were stored.
    pub(crate) fn clears(&self) -> ClearsId {
        self.clears
    }

    /// Returns the record of the last clear.
    pub(crate) fn cleared(&self) -> Record {
        Record::Cleared {
            clears: self.clears,
            generation: self.cleared_at,
        }
    }

    /// Returns true if a segment is empty and may begin its next use at any time.
    pub(crate) fn is_free(&self, segment: u32) -> bool {
        self.free.contains(&segment)
    }

    /// Returns true if a segment is available without an eviction.
    pub(crate) fn has_free(&self) -> bool {
        !self.free.is_empty()
    }

    /// Returns true if another segment should be made: none is free, and half of the segment being written is
    /// used.
    pub(crate) fn runs_low(&self) -> bool {
        let active = self.active.map(|active| &self.segments[active as usize]);
        let half = active.is_some_and(|active| active.used >= self.segment_blocks / 2);
        half && self.free.is_empty()
    }

    /// Empties a segment so that its file can be removed, and returns the record of that. Segments without
    /// chunks are chosen first.
    pub(crate) fn give_up(&mut self) -> Option<(u32, Record)> {
        let segment = self.free.pop().or_else(|| self.victim())?;
        let generation = self.next_generation();
        let begin = Record::Begin {
            segment,
            generation,
        };
        self.apply(&begin);
        self.free.push(segment);
        Some((segment, begin))
    }

    /// Returns the generation of a segment: the number of its present use.
    pub(crate) fn generation(&self, segment: u32) -> u64 {
        let segment = self.segments.get(segment as usize);
        segment.map_or(0, |segment| segment.generation)
    }

    pub(crate) fn is_active(&self, segment: u32) -> bool {
        self.active == Some(segment)
    }

    pub(crate) fn usage(&self) -> IndexUsage {
        IndexUsage {
            chunks: self.chunks,
            bytes: self.bytes,
            segments: self.segments.iter().filter(|segment| segment.made).count() as u64,
            evicted_chunks: self.evicted_chunks,
            evicted_segments: self.evicted_segments,
        }
    }
}

fn extent(number: u32, segment: &mut Segment, needed: u32) -> Extent {
    let block = segment.used;
    segment.used += needed;
    Extent {
        location: Location {
            segment: number,
            block,
            generation: segment.generation,
        },
        blocks: needed,
    }
}

impl Segment {
    fn record(&self, number: u32, chunk: &Chunk) -> PutRecord {
        PutRecord {
            key: chunk.key,
            location: Location {
                segment: number,
                block: chunk.block,
                generation: self.generation,
            },
            len: chunk.len,
            payload_sum: chunk.payload_sum,
        }
    }

    /// Returns the number of blocks allocated from the segment's start.
    pub(crate) fn used_blocks(&self) -> u32 {
        self.used
    }

    /// Returns the number of chunks, and their bytes.
    pub(crate) fn live(&self) -> (u32, u64) {
        (self.chunks, self.bytes)
    }
}

#[cfg(test)]
mod tests;
