//! What is where on one drive: chunks, segments, and which segment is written or given up next.
//!
//! Pure: no files, no clock. Changes come as [`Record`]s, the same at run time and at recovery.

use std::collections::VecDeque;

use hashbrown::HashMap;
use lmc_key::ChunkKey;
use xxhash_rust::xxh3::Xxh3DefaultBuilder;

use crate::format::{Place, PutRecord, Record, blocks};

/// A chunk that is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    segment: u32,
    block: u32,
    /// The lower half of the segment's generation. Where it differs from the segment's, the
    /// entry is of an earlier use and counts as absent.
    generation: u32,
    /// Blocks of the payload, so that an entry has no holes; its exact bytes are `len`.
    len: u64,
    payload_sum: u64,
}

/// A segment's state.
#[derive(Clone, Debug, Default)]
pub(crate) struct Segment {
    pub(crate) generation: u64,
    /// Blocks from its start that were given out in this use.
    used: u32,
    /// Chunks of this use that are there, and their bytes.
    chunks: u32,
    bytes: u64,
    /// Loads since it was last passed over.
    hits: u32,
    /// Operations that read from it or write to it.
    busy: u32,
    /// Whether a file of it exists.
    made: bool,
}

/// Room that was given to a chunk: its header's block, its payload after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Extent {
    pub(crate) place: Place,
    /// Blocks of header and payload.
    pub(crate) blocks: u32,
}

/// Where room was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Room {
    /// Here.
    Extent(Extent),
    /// Here, at the start of a segment's next use, which the log must be told of.
    Begun {
        extent: Extent,
        begin: Record,
        /// Whether the segment's file must be made first.
        make: bool,
    },
    /// Nowhere: all segments are being read or written.
    Busy,
    /// The drive may not grow, and there is no segment to give up: another file must be made.
    MayGrow,
    /// A chunk of this size fits no segment.
    TooLarge { max: u64 },
}

/// Segments that a drive may have. Each is an open file, and a process may usually have as many
/// of those; a greater number is damage.
pub(crate) const MAX_SEGMENTS: u32 = 1 << 20;
/// How many segments that were read from are passed over before one is given up all the same.
const SECOND_CHANCES: usize = 16;

#[derive(Debug)]
pub(crate) struct Index {
    entries: HashMap<ChunkKey, Entry, Xxh3DefaultBuilder>,
    segments: Vec<Segment>,
    segment_blocks: u32,
    /// The segment that is written to, if any.
    active: Option<u32>,
    /// Full segments, the one that was begun first in front.
    full: VecDeque<u32>,
    /// Segments whose file is there and that hold nothing; the last is used next.
    free: Vec<u32>,
    chunks: u64,
    bytes: u64,
    evicted_chunks: u64,
    evicted_segments: u64,
}

/// What an [`Index`] holds and did.
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
            entries: HashMap::with_hasher(Xxh3DefaultBuilder::new()),
            segments: Vec::new(),
            segment_blocks,
            active: None,
            full: VecDeque::new(),
            free: Vec::new(),
            chunks: 0,
            bytes: 0,
            evicted_chunks: 0,
            evicted_segments: 0,
        }
    }

    /// Most bytes of a chunk.
    pub(crate) fn max_len(&self) -> u64 {
        // Its header takes a block.
        u64::from(self.segment_blocks - 1) * crate::volume::BLOCK
    }

    /// Takes memory for so many changes that are about to be applied.
    pub(crate) fn expect(&mut self, records: usize) {
        self.entries.reserve(records);
    }

    fn segment_mut(&mut self, segment: u32) -> &mut Segment {
        let index = segment as usize;
        if index >= self.segments.len() {
            self.segments.resize(index + 1, Segment::default());
        }
        &mut self.segments[index]
    }

    fn live(&self, entry: &Entry) -> bool {
        self.segments[entry.segment as usize].generation as u32 == entry.generation
    }

    /// Applies a change. False when it contradicts what is known (a chunk outside its segment,
    /// an earlier use); nothing is changed then.
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
        }
    }

    fn put(&mut self, put: &PutRecord) -> bool {
        let Place {
            segment,
            block,
            generation,
        } = put.place;
        let taken = 1 + blocks(put.len);
        let end = u64::from(block) + taken;
        if put.len == 0 || end > u64::from(self.segment_blocks) {
            return false;
        }
        let Some(known) = self.segments.get(segment as usize) else {
            return false;
        };
        if known.generation != generation {
            return false;
        }
        self.remove(&put.key);
        let entry = Entry {
            segment,
            block,
            generation: generation as u32,
            len: put.len,
            payload_sum: put.payload_sum,
        };
        self.entries.insert(put.key, entry);
        let known = &mut self.segments[segment as usize];
        known.used = known.used.max(end as u32);
        known.chunks += 1;
        known.bytes += put.len;
        self.chunks += 1;
        self.bytes += put.len;
        true
    }

    /// Forgets a chunk. Whether it was there.
    pub(crate) fn remove(&mut self, key: &ChunkKey) -> bool {
        let Some(entry) = self.entries.remove(key) else {
            return false;
        };
        if !self.live(&entry) {
            return false;
        }
        let segment = &mut self.segments[entry.segment as usize];
        segment.chunks -= 1;
        segment.bytes -= entry.len;
        self.chunks -= 1;
        self.bytes -= entry.len;
        true
    }

    fn begin(&mut self, segment: u32, generation: u64) -> bool {
        if segment >= MAX_SEGMENTS {
            return false;
        }
        let known = self.segment_mut(segment);
        if generation < known.generation {
            return false;
        }
        if generation == known.generation {
            return true;
        }
        let (chunks, bytes) = (known.chunks, known.bytes);
        *known = Segment {
            generation,
            made: known.made,
            busy: known.busy,
            ..Segment::default()
        };
        self.chunks -= u64::from(chunks);
        self.bytes -= bytes;
        self.evicted_chunks += u64::from(chunks);
        if chunks > 0 {
            self.evicted_segments += 1;
        }
        // Entries of the earlier use stay in the map until there are as many as live ones.
        if self.entries.len() as u64 > 2 * self.chunks + 4096 {
            self.sweep();
        }
        true
    }

    /// Drops what earlier uses of segments left.
    fn sweep(&mut self) {
        let segments = &self.segments;
        self.entries.retain(|_, entry| {
            segments[entry.segment as usize].generation as u32 == entry.generation
        });
    }

    /// After recovery: which segment files are there. Those that hold chunks are full, but for
    /// the one that was written to last; the others are free.
    pub(crate) fn set_made(&mut self, made: &[u32]) {
        for &segment in made {
            self.segment_mut(segment).made = true;
        }
        // Chunks of segments whose file is gone are gone.
        let lost: Vec<(u32, u64)> = (0u32..)
            .zip(&self.segments)
            .filter(|(_, segment)| !segment.made && segment.chunks > 0)
            .map(|(number, segment)| (number, segment.generation + 1))
            .collect();
        for (segment, generation) in lost {
            self.begin(segment, generation);
        }
        self.sweep();
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
        // The one begun last has the highest generation: generations count uses of all segments.
        self.active = used.pop();
        self.full = used.into();
        // The lowest is handed out first.
        self.free.reverse();
    }

    /// The number of the next segment file, when another is wanted.
    pub(crate) fn next_segment(&self) -> u32 {
        let missing = self.segments.iter().position(|segment| !segment.made);
        missing.unwrap_or(self.segments.len()) as u32
    }

    /// Says that a segment's file is there now, empty.
    pub(crate) fn made(&mut self, segment: u32) {
        self.segment_mut(segment).made = true;
        self.free.push(segment);
    }

    fn next_generation(&self) -> u64 {
        let newest = self.segments.iter().map(|segment| segment.generation).max();
        newest.unwrap_or(0) + 1
    }

    /// Finds room for a chunk of `len` bytes. With `may_grow`, a drive whose segments are all
    /// full answers [`Room::MayGrow`] before it gives one up.
    pub(crate) fn take_room(&mut self, len: u64, may_grow: bool) -> Room {
        let needed = 1 + blocks(len);
        if needed > u64::from(self.segment_blocks) {
            let max = self.max_len();
            return Room::TooLarge { max };
        }
        let needed = needed as u32;
        if let Some(active) = self.active {
            let segment = &mut self.segments[active as usize];
            if needed <= self.segment_blocks - segment.used {
                let extent = extent(active, segment, needed);
                return Room::Extent(extent);
            }
            self.full.push_back(active);
            self.active = None;
        }
        let next = match self.free.pop() {
            Some(free) => free,
            None if may_grow && self.next_segment() < MAX_SEGMENTS => return Room::MayGrow,
            None => match self.victim() {
                Some(victim) => victim,
                None => return Room::Busy,
            },
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
        Room::Begun {
            extent,
            begin,
            make: !segment.made,
        }
    }

    /// The oldest full segment that nothing reads or writes and that was not read from lately.
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

    /// Where a chunk is, if it is there.
    pub(crate) fn find(&self, key: &ChunkKey) -> Option<PutRecord> {
        let entry = self.entries.get(key).filter(|entry| self.live(entry))?;
        Some(self.record(key, entry))
    }

    fn record(&self, key: &ChunkKey, entry: &Entry) -> PutRecord {
        PutRecord {
            key: *key,
            place: Place {
                segment: entry.segment,
                block: entry.block,
                generation: self.segments[entry.segment as usize].generation,
            },
            len: entry.len,
            payload_sum: entry.payload_sum,
        }
    }

    /// Forgets a chunk if it is still the one at this place, because its bytes turned out wrong.
    pub(crate) fn retire(&mut self, found: &PutRecord) -> bool {
        self.find(&found.key) == Some(*found) && self.remove(&found.key)
    }

    /// An operation on a segment begins; it is not given up before [`Self::leave`].
    pub(crate) fn enter(&mut self, segment: u32, hit: bool) {
        let segment = &mut self.segments[segment as usize];
        segment.busy += 1;
        segment.hits = segment.hits.saturating_add(u32::from(hit));
    }

    pub(crate) fn leave(&mut self, segment: u32) {
        self.segments[segment as usize].busy -= 1;
    }

    /// Ends the use of a segment for writing, after a write or a sync of it failed.
    pub(crate) fn close_active(&mut self, segment: u32) {
        if self.active == Some(segment) {
            self.full.push_back(segment);
            self.active = None;
        }
    }

    /// The chunks at the lowest places after `after`, at most `limit`, in the order of places.
    pub(crate) fn list(&self, after: Option<(u32, u32)>, limit: usize) -> Vec<PutRecord> {
        let mut found: Vec<(u32, u32, &ChunkKey, &Entry)> = self
            .entries
            .iter()
            .map(|(key, entry)| (entry.segment, entry.block, key, entry))
            .filter(|&(segment, block, _, entry)| {
                after.is_none_or(|after| (segment, block) > after) && self.live(entry)
            })
            .collect();
        if found.len() > limit {
            found.select_nth_unstable_by_key(limit, |&(segment, block, ..)| (segment, block));
            found.truncate(limit);
        }
        found.sort_unstable_by_key(|&(segment, block, ..)| (segment, block));
        found
            .into_iter()
            .map(|(.., key, entry)| self.record(key, entry))
            .collect()
    }

    /// All there is to know, as records that make it again: segments first.
    pub(crate) fn snapshot(&self) -> Vec<Record> {
        let begins = (0u32..)
            .zip(&self.segments)
            .filter(|(_, s)| s.generation > 0);
        let begins = begins.map(|(segment, state)| Record::Begin {
            segment,
            generation: state.generation,
        });
        let live = self.entries.iter().filter(|(_, entry)| self.live(entry));
        let puts = live.map(|(key, entry)| Record::Put(self.record(key, entry)));
        begins.chain(puts).collect()
    }

    /// The segments whose files are there, by their numbers.
    pub(crate) fn segments(&self) -> impl Iterator<Item = (u32, &Segment)> {
        (0u32..)
            .zip(&self.segments)
            .filter(|(_, segment)| segment.made)
    }

    /// Gives up the file of a segment that holds nothing and that nobody uses. False when it
    /// does, or when it is the one that is written to.
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

    /// Forgets every chunk: each segment is begun anew. How many chunks there were, and the
    /// records that tell of it; there are none only if no segment was ever used.
    pub(crate) fn clear(&mut self) -> (u64, Vec<Record>) {
        let gone = self.chunks;
        self.entries.clear();
        (self.chunks, self.bytes) = (0, 0);
        self.active = None;
        self.free.clear();
        self.full.clear();
        let mut generation = self.next_generation();
        let mut begins = Vec::new();
        // From the last on, so that the first is taken first.
        for (number, segment) in self.segments.iter_mut().enumerate().rev() {
            let number = number as u32;
            if segment.generation > 0 {
                *segment = Segment {
                    generation,
                    made: segment.made,
                    busy: segment.busy,
                    ..Segment::default()
                };
                begins.push(Record::Begin {
                    segment: number,
                    generation,
                });
                generation += 1;
            }
            // What is still read or written must not be written over.
            match (segment.made, segment.busy) {
                (false, _) => {}
                (true, 0) => self.free.push(number),
                (true, _) => self.full.push_front(number),
            }
        }
        (gone, begins)
    }

    /// Whether a segment can be begun without giving one up.
    pub(crate) fn has_free(&self) -> bool {
        !self.free.is_empty()
    }

    /// Whether it is time to make another segment: none is free, and half of the one that is
    /// written to is taken.
    pub(crate) fn runs_low(&self) -> bool {
        let active = self.active.map(|active| &self.segments[active as usize]);
        let half = active.is_some_and(|active| active.used >= self.segment_blocks / 2);
        half && self.free.is_empty()
    }

    /// Empties a segment so that its file can be given back, one that holds nothing before one
    /// that does. With the record that tells of it.
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

    /// Which use of a segment is the present one.
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
        place: Place {
            segment: number,
            block,
            generation: segment.generation,
        },
        blocks: needed,
    }
}

impl Segment {
    /// Blocks from its start that were given out.
    pub(crate) fn used_blocks(&self) -> u32 {
        self.used
    }

    /// Chunks that are there, and their bytes.
    pub(crate) fn live(&self) -> (u32, u64) {
        (self.chunks, self.bytes)
    }
}
