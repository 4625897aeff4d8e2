//! Chunks that are promoted from lower tiers into DRAM.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use lmc_backend::{LoadItem, Loaded};
use lmc_backend_local::{InFlight, Leases, OwnerId, TenantId, Write, WriteStart};
use lmc_key::ChunkKey;
use tokio::task::{AbortHandle, JoinHandle};

use super::permits::Permit;
use super::{Lower, Shared, count, now_or_never};

/// Bytes that one permit stands for.
pub(super) const UNIT: u64 = 4096;
/// Bytes that are read in one go. A prompt longer than that has several under way.
const WINDOW: u64 = 64 << 20;
/// Reads of one prompt under way at a time.
const WINDOWS: usize = 3;
/// Time between two looks at a chunk that another prompt promotes or a worker writes.
const LOOK: Duration = Duration::from_millis(1);
/// Longest wait for a worker that writes a chunk that a lower tier has. A worker may take any
/// time to commit, and may never do so.
const WRITER_TIMEOUT: Duration = Duration::from_millis(50);

/// Where a chunk is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    /// In DRAM.
    Dram,
    /// In a lower tier, with its bytes.
    Tier { number: usize, len: u64 },
}

/// A chunk that is read: its place in the prompt, and what it is read into.
type Load = (usize, InFlight, LoadItem);

/// A part of a prompt that is about to be read.
struct Part {
    places: Range<usize>,
    /// Held until the whole part is leased, so that nothing of it is evicted before.
    kept: Vec<Leases>,
    /// What is read from each tier.
    loads: Vec<Vec<Load>>,
    /// Positions of chunks that another prompt promotes or a worker writes.
    busy: Vec<usize>,
    /// The chunks of `loads`, so that other prompts wait for them.
    promoting: Promoting,
}

/// Chunks that one prompt promotes. Other prompts wait for them until this is dropped.
struct Promoting {
    shared: Arc<Shared>,
    keys: Vec<ChunkKey>,
}

impl Promoting {
    fn new(shared: &Arc<Shared>) -> Self {
        Self {
            shared: Arc::clone(shared),
            keys: Vec::new(),
        }
    }

    /// Adds a chunk. Returns false when another prompt promotes it.
    fn add(&mut self, key: ChunkKey) -> bool {
        let added = self.shared.promoting.lock().insert(key);
        if added {
            self.keys.push(key);
        }
        added
    }
}

impl Drop for Promoting {
    fn drop(&mut self) {
        let mut promoting = self.shared.promoting.lock();
        for key in &self.keys {
            promoting.remove(key);
        }
    }
}

/// A running fetch.
#[derive(Debug, Default)]
pub struct Fetch(Option<AbortHandle>);

impl Fetch {
    /// Ends the fetch if it is running. Its `done` is then dropped without a call. Chunks that
    /// another fetch waits for are promoted by that one.
    pub fn cancel(&self) {
        if let Some(task) = &self.0 {
            task.abort();
        }
    }
}

/// A task that ends with its owner.
struct Task(JoinHandle<Leases>);

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A prompt whose chunks shall come up.
#[derive(Debug)]
struct Prompt {
    owner: OwnerId,
    tenant: TenantId,
    keys: Vec<ChunkKey>,
    /// Where each of `keys` is, from the place on where they begin.
    sources: Vec<Source>,
    begin: usize,
    deadline: Instant,
}

impl Lower {
    /// Where the leading of these keys are. Asks only tiers that know at once; those that do not
    /// count as not having any.
    pub(crate) fn locate(&self, keys: &[ChunkKey]) -> Vec<Source> {
        self.shared.locate(keys)
    }

    /// Brings chunks up, in the order of the prompt, and calls `done` with the leases of those
    /// that are in DRAM then, from the first on. `held` are the leases of the first; `sources`
    /// are those of the keys after them. Over at the fetch deadline with what there is.
    pub(crate) fn fetch(
        &self,
        tenant: TenantId,
        keys: Vec<ChunkKey>,
        held: Leases,
        sources: Vec<Source>,
        done: impl FnOnce(Leases) + Send + 'static,
    ) -> Fetch {
        let shared = Arc::clone(&self.shared);
        let prompt = Arc::new(Prompt {
            owner: held.owner(),
            tenant,
            begin: held.len(),
            keys,
            sources,
            deadline: Instant::now() + shared.fetch_deadline,
        });
        let task = self
            .runtime()
            .spawn(async move { done(shared.raise(prompt, held).await) });
        Fetch(Some(task.abort_handle()))
    }
}

impl Shared {
    fn locate(&self, keys: &[ChunkKey]) -> Vec<Source> {
        if self.clearing.load(Ordering::SeqCst) > 0 {
            return Vec::new();
        }
        let keys = {
            let removing = self.removing.lock();
            let removed = |key: &ChunkKey| removing.iter().any(|set| set.contains(key));
            let first = (!removing.is_empty()).then(|| keys.iter().position(removed));
            &keys[..first.flatten().unwrap_or(keys.len())]
        };
        // Most prompts that DRAM does not know are known to nobody.
        if keys.is_empty() || (keys.len() > 1 && self.locate(&keys[..1]).is_empty()) {
            return Vec::new();
        }
        let local = self.local.contains(keys);
        let mut found: Vec<Option<Source>> =
            local.iter().map(|len| len.map(|_| Source::Dram)).collect();
        let deadline = Instant::now() + self.fetch_deadline;
        for (number, tier) in self.tiers.iter().enumerate() {
            let contains = now_or_never(tier.backend.contains(keys, deadline));
            for (found, contained) in found.iter_mut().zip(contains.unwrap_or_default()) {
                if let (None, Ok(Some(len))) = (&found, contained) {
                    *found = Some(Source::Tier { number, len });
                }
            }
        }
        found.into_iter().map_while(|found| found).collect()
    }

    async fn raise(self: &Arc<Self>, prompt: Arc<Prompt>, mut held: Leases) -> Leases {
        let end = (prompt.begin + prompt.sources.len()).min(prompt.keys.len());
        let mut next = prompt.begin;
        let mut under_way: VecDeque<(usize, Task)> = VecDeque::new();
        loop {
            while under_way.len() < WINDOWS && next < end {
                let window = prompt.window(next..end, u64::from(self.rising_units) * UNIT);
                let Some(permit) = self.permit(&prompt, &window, under_way.is_empty()).await else {
                    break;
                };
                let len = window.len();
                next = window.end;
                // In the prompt's order: its tail must not take the room of its head.
                let part = self.prepare(&prompt, window);
                if part.places.len() < len {
                    next = end;
                }
                let (shared, prompt) = (Arc::clone(self), Arc::clone(&prompt));
                let task = tokio::spawn(async move {
                    let leases = shared.read(&prompt, part).await;
                    drop(permit);
                    leases
                });
                under_way.push_back((len, Task(task)));
            }
            let Some((len, mut task)) = under_way.pop_front() else {
                return held;
            };
            let Ok(leases) = (&mut task.0).await else {
                break;
            };
            let whole = leases.len() == len;
            if held.append(leases).is_err() || !whole {
                break;
            }
        }
        // What follows a gap is of no use to this prompt: its tasks end here.
        held
    }

    /// The right to promote a part. `None` when there is none: now, or by the deadline for one
    /// who waits.
    async fn permit(&self, prompt: &Prompt, window: &Range<usize>, waits: bool) -> Option<Permit> {
        let units = prompt.bytes(window).div_ceil(UNIT).max(1) as u32;
        let units = units.min(self.rising_units);
        if !waits {
            return self.permits.try_acquire(units);
        }
        let deadline = tokio::time::Instant::from_std(prompt.deadline);
        let permit = self.permits.acquire(prompt.owner, units);
        tokio::time::timeout_at(deadline, permit).await.ok()?
    }

    /// Leases what is in DRAM of a part of a prompt, and takes room for what is not.
    fn prepare(self: &Arc<Self>, prompt: &Prompt, window: Range<usize>) -> Part {
        // What is located now is marked before it can be forgotten, which voids the marks.
        let _held = self.forgetting.read();
        // What was in DRAM when the prompt was looked at may have made room for its head.
        let sources = self.locate(&prompt.keys[window.clone()]);
        let mut part = Part {
            places: window.start..window.start + sources.len(),
            kept: Vec::new(),
            loads: Vec::new(),
            busy: Vec::new(),
            promoting: Promoting::new(self),
        };
        part.loads.resize_with(self.tiers.len(), Vec::new);
        for (place, source) in window.clone().zip(sources) {
            let key = prompt.keys[place];
            let Source::Tier { number, len } = source else {
                part.kept.push(self.local.lease_again(prompt.owner, &[key]));
                continue;
            };
            match self
                .local
                .begin_write(prompt.owner, prompt.tenant, key, len)
            {
                Ok(WriteStart::Reserved(new)) => {
                    part.promoting.add(key);
                    part.loads[number].push((place, new.mark, LoadItem::new(key, new.slot)));
                }
                Ok(WriteStart::Present) => {}
                Ok(WriteStart::Busy) => part.busy.push(place),
                Err(_) => {
                    part.places.end = place;
                    break;
                }
            }
        }
        part
    }

    /// Reads a part of a prompt, and leases its leading chunks.
    async fn read(self: &Arc<Self>, prompt: &Prompt, part: Part) -> Leases {
        let Part {
            places,
            mut kept,
            loads,
            mut busy,
            promoting,
        } = part;
        let writers_until = prompt.deadline.min(Instant::now() + WRITER_TIMEOUT);
        self.load_all(prompt, loads, &mut kept).await;
        drop(promoting);
        while !busy.is_empty() && Instant::now() < prompt.deadline {
            for &place in &busy {
                let key = &prompt.keys[place];
                while self.is_awaited(key, writers_until) && Instant::now() < prompt.deadline {
                    tokio::time::sleep(LOOK).await;
                }
            }
            // Of the rest no commit is near: it is read into slots beside those of its writers.
            let (promoting, loads, left) = self.prepare_rest(prompt, &busy);
            self.load_all(prompt, loads, &mut kept).await;
            drop(promoting);
            busy = left;
        }
        // Not a lookup of its own: the one that asked for it was counted.
        self.local.lease_again(prompt.owner, &prompt.keys[places])
    }

    /// Returns true if a chunk is probably findable soon: another prompt promotes it, or, until
    /// `writers_until`, a worker writes it.
    fn is_awaited(&self, key: &ChunkKey, writers_until: Instant) -> bool {
        self.promoting.lock().contains(key)
            || (self.local.is_writing(key) && Instant::now() < writers_until)
    }

    /// Reserves memory for those chunks of `busy` that are still not in DRAM, although others write
    /// them. Returns the positions that another prompt began to promote meanwhile.
    fn prepare_rest(
        self: &Arc<Self>,
        prompt: &Prompt,
        busy: &[usize],
    ) -> (Promoting, Vec<Vec<Load>>, Vec<usize>) {
        // As for `prepare`.
        let _held = self.forgetting.read();
        let mut promoting = Promoting::new(self);
        let mut loads = Vec::new();
        loads.resize_with(self.tiers.len(), Vec::new);
        let mut left = Vec::new();
        for &place in busy {
            let key = prompt.keys[place];
            let sources = self.locate(&[key]);
            let Some(&Source::Tier { number, len }) = sources.first() else {
                continue;
            };
            if !promoting.add(key) {
                left.push(place);
                continue;
            }
            let started = self
                .local
                .begin_shared_write(prompt.owner, prompt.tenant, key, len);
            match started {
                Ok(WriteStart::Reserved(new)) => {
                    loads[number].push((place, new.mark, LoadItem::new(key, new.slot)));
                }
                Ok(_) => {}
                Err(_) => break,
            }
        }
        (promoting, loads, left)
    }

    /// Reads chunks from all tiers, one tier after the other.
    async fn load_all(&self, prompt: &Prompt, loads: Vec<Vec<Load>>, kept: &mut Vec<Leases>) {
        for (number, loads) in loads.into_iter().enumerate() {
            if !loads.is_empty() {
                kept.push(self.load(prompt, number, loads).await);
            }
        }
    }

    /// Reads chunks from one tier and makes them findable.
    async fn load(&self, prompt: &Prompt, number: usize, loads: Vec<Load>) -> Leases {
        let tier = &self.tiers[number];
        let split = |(place, mark, item)| ((place, mark), item);
        let (marks, items): (Vec<_>, Vec<_>) = loads.into_iter().map(split).unzip();
        let loaded = tier.backend.load(items, prompt.deadline).await;
        let counters = &tier.counters;
        let mut writes = Vec::with_capacity(marks.len());
        let mut bytes = 0;
        for ((place, mark), loaded) in marks.into_iter().zip(loaded) {
            match loaded {
                Loaded::Hit(slot) => {
                    bytes += slot.len();
                    let parent = prompt.parent(place);
                    writes.push(Write { mark, parent, slot });
                }
                Loaded::Miss(_) => count(&counters.fetch_missed, 1),
                Loaded::Failed { .. } => count(&counters.fetch_failed, 1),
            }
        }
        if self.local.pool().arena().is_lost() {
            // The bytes may have gone into memory that is no longer the pool's.
            count(&counters.fetch_failed, writes.len() as u64);
            writes.clear();
            bytes = 0;
        }
        count(&counters.fetched, writes.len() as u64);
        count(&counters.fetched_bytes, bytes);
        // What was forgotten meanwhile is not found.
        self.local.commit_leased(prompt.owner, writes).1
    }
}

impl Prompt {
    /// The first part of a range that is read in one go, at most `most` bytes.
    fn window(&self, range: Range<usize>, most: u64) -> Range<usize> {
        let most = WINDOW.min(most);
        let mut bytes = 0;
        let fits = |place: &usize| {
            bytes += self.bytes(&(*place..*place + 1));
            bytes <= most
        };
        let len = range.clone().take_while(fits).count().max(1);
        range.start..range.start + len
    }

    /// Bytes of a part that come from below.
    fn bytes(&self, part: &Range<usize>) -> u64 {
        let sources = &self.sources[part.start - self.begin..part.end - self.begin];
        let len = |source: &Source| match source {
            Source::Dram => 0,
            Source::Tier { len, .. } => *len,
        };
        sources.iter().map(len).sum()
    }

    fn parent(&self, place: usize) -> Option<ChunkKey> {
        place.checked_sub(1).map(|before| self.keys[before])
    }
}
