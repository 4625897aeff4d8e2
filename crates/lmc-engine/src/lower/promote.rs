//! Promotion of chunks from lower tiers to DRAM.

use std::collections::{HashMap, HashSet, VecDeque};
use std::mem;
use std::ops::Range;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::future::{Either, join_all, select};
use lmc_backend::{BackendError, LoadItem, Loaded, LocateHint, now};
use lmc_backend_local::{
    InFlight, Leases, LocalTier, Origin, OwnerId, ReserveError, TenantId, Write, WriteStart,
};
use lmc_key::{ChunkKey, FoldState};
use lmc_memory::SealedSlot;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use super::permits::Permit;
use super::{ANSWER, ChunkSource, OfferReason, TierCounters, Tiers, count};
use crate::misses::{Miss, MissReason};
use crate::request::fits;

/// Bytes that one permit stands for.
pub(super) const UNIT: u64 = 4096;
/// Bytes that are read in one batch. A longer prompt has several batches in flight.
const WINDOW: u64 = 64 << 20;
/// Most batches of one prompt in flight.
const WINDOWS: usize = 3;
/// Most chunks that are committed together when they arrive together.
const COMMIT_TOGETHER: usize = 32;
/// Time between two checks of a chunk that a worker writes.
const POLL: Duration = Duration::from_millis(1);
/// Longest wait for a worker that is writing a chunk that a lower tier has. A worker may take arbitrarily
/// long to commit, or never commit.
const WRITER_TIMEOUT: Duration = Duration::from_millis(50);

/// A chunk that is read: its index in the prompt, its write mark, and the slot for its bytes.
type Load = (usize, InFlight, LoadItem);
/// A function that marks a chunk as being written and reserves memory for it.
type Begin = fn(&LocalTier, OwnerId, TenantId, ChunkKey, u64) -> Result<WriteStart, ReserveError>;

/// A range of a prompt that is being read.
struct Window {
    /// Indices of the chunks.
    range: Range<usize>,
    /// Leases of the resident chunks. Held until the whole range is leased, so that no chunk of it is evicted
    /// earlier.
    kept: Arc<Mutex<Vec<Leases>>>,
    /// The chunks to read next from each tier.
    loads: Vec<Vec<Load>>,
    /// Chunks that another prompt promotes or that a worker writes.
    rest: Vec<Rest>,
    /// The chunks that are read here; other prompts wait for them.
    promoting: Promoting,
}

/// A chunk that is read after the others of its range.
#[derive(Clone)]
struct Rest {
    /// Index of the chunk in the prompt.
    index: usize,
    /// Source of the chunk, if it is a tier without a local index.
    asked: Option<ChunkSource>,
    /// The tier that has the chunk, but failed to load it or had no permit for it.
    failed: Option<usize>,
}

/// Chunks that are read from another tier than first located, by their index.
type Elsewhere = HashMap<usize, Rest>;

/// Bytes of each tier that may be read with the acquired permits.
struct Allowed(Vec<u64>);

impl Allowed {
    fn of(permits: &[Permit], tiers: usize) -> Self {
        let mut bytes = vec![0; tiers];
        for permit in permits {
            bytes[permit.tier()] += u64::from(permit.units()) * UNIT;
        }
        Self(bytes)
    }

    /// Subtracts the bytes of a chunk. Returns false if the permit of its tier does not cover them.
    fn take(&mut self, source: &ChunkSource) -> bool {
        let ChunkSource::Tier { index, len, .. } = source else {
            return true;
        };
        let left = self.0[*index].checked_sub(*len);
        self.0[*index] = left.unwrap_or(self.0[*index]);
        left.is_some()
    }
}

/// Chunks that one prompt promotes. Other prompts wait for these chunks until this is dropped.
struct Promoting {
    tiers: Arc<Tiers>,
    keys: HashSet<ChunkKey, FoldState>,
}

impl Promoting {
    fn new(tiers: &Arc<Tiers>) -> Self {
        Self {
            tiers: Arc::clone(tiers),
            keys: HashSet::default(),
        }
    }

    /// Adds a chunk, if it is not there yet. Returns false if another prompt promotes it.
    fn add(&mut self, key: ChunkKey) -> bool {
        if self.keys.contains(&key) {
            return true;
        }
        let added = self.tiers.promoting.lock().insert(key);
        if added {
            self.keys.insert(key);
        }
        added
    }

    /// Removes a chunk that was added.
    fn remove(&mut self, key: &ChunkKey) {
        self.keys.remove(key);
        self.tiers.end_promotions([*key]);
    }

    /// Removes the chunks for which `pick` returns false.
    fn retain(&mut self, pick: impl Fn(&ChunkKey) -> bool) {
        self.tiers
            .end_promotions(self.keys.extract_if(|key| !pick(key)));
    }
}

impl Drop for Promoting {
    fn drop(&mut self) {
        self.tiers.end_promotions(self.keys.drain());
    }
}

/// A task that is aborted when its owner drops it.
struct Task(JoinHandle<Leases>);

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Counts a batch of reads as in progress until it is dropped.
struct UnderWay<'a> {
    counters: &'a TierCounters,
    bytes: u64,
}

impl<'a> UnderWay<'a> {
    fn new(counters: &'a TierCounters, items: &[LoadItem]) -> Self {
        let bytes = items.iter().map(|item| item.slot.len()).sum();
        count(&counters.promote_batches, 1);
        count(&counters.promote_asked, items.len() as u64);
        count(&counters.promoting_bytes, bytes);
        Self { counters, bytes }
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        let bytes = &self.counters.promoting_bytes;
        bytes.fetch_sub(self.bytes, Ordering::Relaxed);
        count(&self.counters.promote_batches_ended, 1);
    }
}

/// The chunks of one rank of a prompt that are to be promoted.
#[derive(Debug)]
pub(crate) struct Prompt {
    pub(crate) owner: OwnerId,
    pub(crate) tenant: TenantId,
    /// Key of the chunk before the first one, if known.
    pub(crate) before: Option<ChunkKey>,
    pub(crate) keys: Vec<ChunkKey>,
    /// Hints for tiers that are asked; `None` if no tier is to be asked.
    pub(crate) hint: Option<LocateHint>,
    /// Sources of `keys` from index `first` on.
    pub(crate) sources: Vec<ChunkSource>,
    pub(crate) first: usize,
    /// Start of the reads.
    pub(crate) begun: Instant,
    pub(crate) deadline: Instant,
    /// Number of leading chunks that every rank of the prompt may still get. Shared by the ranks; a rank that
    /// ends earlier lowers it.
    pub(crate) reach: Arc<AtomicUsize>,
    /// Time after which other tiers are asked for chunks that wait for permits.
    pub(crate) half: tokio::time::Instant,
    /// Indices of the chunks that were read for this prompt, each with the index of its tier.
    pub(crate) read: Mutex<Vec<(usize, usize)>>,
    /// Indices of the chunks that were not read, each with a reason. A chunk that failed at several tiers has
    /// several entries.
    pub(crate) misses: Mutex<Vec<(usize, Miss)>>,
}

impl Tiers {
    /// Promotes the chunks of a prompt in order. Returns the leases of the leading chunks that are then in
    /// DRAM. `held` are the leases of the keys before the first source. Ends at the prompt's deadline with
    /// the chunks read by then.
    pub(crate) async fn promote(
        self: &Arc<Self>,
        prompt: &Arc<Prompt>,
        mut held: Leases,
    ) -> Leases {
        let wanted = (prompt.first + prompt.sources.len()).min(prompt.keys.len());
        let mut next = prompt.first;
        let mut under_way: VecDeque<(usize, Task)> = VecDeque::new();
        loop {
            // Chunks after a gap, here or in another rank, are useless to this prompt.
            let end = wanted.min(prompt.reach.load(Ordering::Relaxed));
            if held.len() >= end {
                break;
            }
            while under_way.len() < WINDOWS && next < end {
                let range = prompt.window(next..end, self.most());
                let units = self.units(prompt.sources(&range));
                let mut elsewhere = Elsewhere::new();
                let mut permits = self.permits.try_acquire(&units);
                if permits.is_none() && under_way.is_empty() {
                    let wanted: Vec<_> = self.located(prompt, range.clone()).collect();
                    permits = self.permits(prompt, &wanted, &mut elsewhere).await;
                }
                let Some(permits) = permits else {
                    break;
                };
                let is_whole = permits
                    .iter()
                    .map(Permit::units)
                    .eq(units.into_iter().filter(|n| *n > 0));
                let len = range.len();
                next = range.end;
                // In prompt order: the tail of a prompt must not take the memory of its head.
                let window = self.prepare(prompt, range, &permits, &elsewhere);
                if window.range.len() < len {
                    next = wanted;
                }
                let (tiers, prompt) = (Arc::clone(self), Arc::clone(prompt));
                let task = tokio::spawn(async move { tiers.read(&prompt, window, permits).await });
                under_way.push_back((len, Task(task)));
                if !is_whole {
                    break;
                }
            }
            let Some((len, mut task)) = under_way.pop_front() else {
                break;
            };
            let Ok(leases) = (&mut task.0).await else {
                break;
            };
            let whole = leases.len() == len;
            if held.append(leases).is_err() || !whole {
                break;
            }
        }
        // The prompt's tasks end here.
        let before = prompt.reach.fetch_min(held.len(), Ordering::Relaxed);
        if held.len() < before {
            prompt.note_end(held.len());
        }
        held
    }

    /// Returns the units of each tier that reading these sources takes.
    fn units<'a>(&self, sources: impl IntoIterator<Item = &'a ChunkSource>) -> Vec<u32> {
        let mut bytes = vec![0; self.tiers.len()];
        for source in sources {
            if let ChunkSource::Tier { index, len, .. } = source {
                bytes[*index] += len;
            }
        }
        let units = |bytes: u64| bytes.div_ceil(UNIT).min(u64::from(u32::MAX >> 4)) as u32;
        bytes.into_iter().map(units).collect()
    }

    /// Acquires permits for the chunks of each tier that has free ones. If none has, waits for the tier of
    /// the first chunk until the deadline, and then returns `None`. After half of the time, asks the other
    /// tiers and returns at once with the chunks to read from them.
    async fn permits(
        &self,
        prompt: &Prompt,
        wanted: &[(Rest, ChunkSource)],
        elsewhere: &mut Elsewhere,
    ) -> Option<Vec<Permit>> {
        let units = self.units(wanted.iter().map(|(_, source)| source));
        let alone = |tier: usize| {
            let mut alone = vec![0; units.len()];
            alone[tier] = units[tier];
            alone
        };
        let tiers = (0..units.len()).filter(|tier| units[*tier] > 0);
        let free: Vec<Permit> = tiers
            .filter_map(|tier| self.permits.try_acquire(&alone(tier)))
            .flatten()
            .collect();
        let first = wanted.iter().find_map(|(_, source)| source.tier());
        let Some(first) = first.filter(|_| free.is_empty()) else {
            return Some(free);
        };
        let mut granted = pin!(self.permits.acquire(prompt.owner, alone(first)));
        if let Ok(granted) = tokio::time::timeout_at(prompt.half, &mut granted).await {
            return granted;
        }
        // A chunk that failed at one tier, or that other tiers were asked for, is not asked for again.
        let waits = |(one, source): &(Rest, ChunkSource)| {
            let waits = one.failed.is_none() && source.tier() == Some(first);
            waits.then_some((one.index, first))
        };
        let waiting: Vec<_> = wanted.iter().filter_map(waits).collect();
        let found = self.locate_elsewhere(prompt, &waiting).await;
        let found = found
            .into_iter()
            .filter(|one| self.source_of(prompt, one).is_some());
        elsewhere.extend(found.map(|one| (one.index, one)));
        if !elsewhere.is_empty() {
            return Some(Vec::new());
        }
        let deadline = tokio::time::Instant::from_std(prompt.deadline);
        tokio::time::timeout_at(deadline, granted).await.ok()?
    }

    /// Finds the current sources of the leading chunks of a range. Chunks that were in DRAM when the prompt
    /// was located may have been evicted for its head, and the other way round. A tier that had a chunk is
    /// not asked again: its load shows whether the chunk is still there.
    fn located(
        &self,
        prompt: &Prompt,
        range: Range<usize>,
    ) -> impl Iterator<Item = (Rest, ChunkSource)> {
        let keys = &prompt.keys[range.clone()];
        let known = prompt.sources(&range).iter().map(|source| match source {
            ChunkSource::Tier { .. } => Some(source.clone()),
            ChunkSource::Dram => None,
        });
        let mut now = self
            .sources_after(keys, known, prompt.chunk_bytes())
            .into_iter();
        range.map_while(move |index| {
            let source = now.next()??;
            // A tier with a local index is looked at again before a later read.
            let is_asked = |tier: usize| self.tiers[tier].backend.index().is_none();
            let rest = Rest {
                index,
                asked: source
                    .tier()
                    .filter(|tier| is_asked(*tier))
                    .map(|_| source.clone()),
                failed: None,
            };
            Some((rest, source))
        })
    }

    /// Leases the resident chunks of a range, and reserves slots for the others. Chunks without a permit are
    /// read last.
    fn prepare(
        self: &Arc<Self>,
        prompt: &Prompt,
        range: Range<usize>,
        permits: &[Permit],
        elsewhere: &Elsewhere,
    ) -> Window {
        // A chunk that is located now is marked before a removal can begin, and the removal voids the mark.
        let _held = self.block_removal();
        let start = range.start;
        let wanted: Vec<_> = self.located(prompt, range).collect();
        let range = start..start + wanted.len();
        let mut allowed = Allowed::of(permits, self.tiers.len());
        let (wanted, rest): (Vec<_>, Vec<_>) = wanted
            .into_iter()
            .partition(|(_, source)| allowed.take(source));
        let mut window = Window {
            range,
            kept: Arc::default(),
            loads: Vec::new(),
            rest: rest
                .into_iter()
                .map(|(one, _)| moved(one, elsewhere))
                .collect(),
            promoting: Promoting::new(self),
        };
        window.loads.resize_with(self.tiers.len(), Vec::new);
        let end = self.reserve(prompt, &mut window, wanted, LocalTier::begin_write);
        window.range.end = end;
        window.rest.retain(|one| one.index < end);
        window
    }

    /// Leases resident chunks, and reserves slots for the others. Returns the index of the first chunk for
    /// which there is no memory, or the window's end. The caller must block removal.
    fn reserve(
        &self,
        prompt: &Prompt,
        window: &mut Window,
        wanted: Vec<(Rest, ChunkSource)>,
        begin: Begin,
    ) -> usize {
        let mut end = window.range.end;
        for (rest, source) in wanted {
            let (index, key) = (rest.index, prompt.keys[rest.index]);
            if index >= end {
                continue;
            }
            let ChunkSource::Tier {
                index: tier,
                len,
                handle,
                ..
            } = source
            else {
                let lease = self.local.lease_uncounted(prompt.owner, &[key]);
                window.kept.lock().push(lease);
                continue;
            };
            // Before the slot is reserved, so that a promoted chunk is never mistaken for one that a worker
            // writes.
            if !window.promoting.add(key) {
                window.rest.push(rest);
                continue;
            }
            match begin(&self.local, prompt.owner, prompt.tenant, key, len) {
                Ok(WriteStart::Reserved(new)) => {
                    let item = LoadItem::new(key, new.slot).with_handle(handle);
                    window.loads[tier].push((index, new.mark, item));
                    continue;
                }
                Ok(WriteStart::Present) => {}
                Ok(WriteStart::Busy) => window.rest.push(rest),
                Err(_) => {
                    prompt.note(index, Miss::certain(MissReason::Limit));
                    end = index;
                }
            }
            window.promoting.remove(&key);
        }
        end
    }

    /// Reads a range of a prompt, and leases the leading chunks of the range.
    async fn read(&self, prompt: &Prompt, mut window: Window, permits: Vec<Permit>) -> Leases {
        let writers_until = prompt.deadline.min(now() + WRITER_TIMEOUT);
        // Two prompts that wait for each other's chunks first read their own.
        self.read_anywhere(prompt, &mut window, permits).await;
        while !window.rest.is_empty() && now() < prompt.deadline {
            let mut rest = mem::take(&mut window.rest);
            self.wait_for(prompt, &rest, writers_until).await;
            let Some(permits) = self.reserve_rest(prompt, &mut window, &mut rest).await else {
                break;
            };
            window.rest.extend(rest);
            self.read_anywhere(prompt, &mut window, permits).await;
        }
        drop(window.promoting);
        let keys = &prompt.keys[window.range];
        self.lease_uncounted(prompt.owner, keys, prompt.chunk_bytes())
    }

    /// Leases the leading chunks in DRAM that have the length of their space's chunks, if that is known.
    /// Counts neither as a lookup nor as a use: the lookup that caused this was counted.
    pub(crate) fn lease_uncounted(
        &self,
        owner: OwnerId,
        keys: &[ChunkKey],
        chunk_bytes: Option<u64>,
    ) -> Leases {
        let mut leases = self.local.lease_uncounted(owner, keys);
        // A chunk in DRAM may have another length, because its tier was not asked about it.
        let is_wrong = |slot: &SealedSlot| !fits(slot.len(), chunk_bytes);
        let wrong = leases.iter().position(is_wrong);
        leases.truncate(wrong.unwrap_or(leases.len()));
        leases
    }

    /// Reads the chunks that have slots. If a load fails, or a chunk is missing after half of the prompt's
    /// time, the chunk is read once more from the next tier that has it; the first answer counts.
    async fn read_anywhere(&self, prompt: &Prompt, window: &mut Window, permits: Vec<Permit>) {
        let of_tiers = window.loads.iter().enumerate();
        let of_tiers =
            of_tiers.flat_map(|(tier, loads)| loads.iter().map(move |load| (load.0, tier)));
        let all: Vec<(usize, usize)> = of_tiers.collect();
        let missing = || {
            let is_missing = |(index, _): &(usize, usize)| {
                let key = prompt.keys[*index];
                self.local.contains(&[key]) == [None]
            };
            all.iter().copied().filter(is_missing).collect::<Vec<_>>()
        };
        let overtaken = Notify::new();
        let first = pin!(self.load_all(prompt, window, permits, &overtaken));
        let late = pin!(tokio::time::sleep_until(half_of(prompt.deadline)));
        match select(first, late).await {
            Either::Left((failed, _)) => self.read_elsewhere(prompt, window, failed).await,
            Either::Right(((), first)) => {
                let elsewhere = pin!(self.read_elsewhere(prompt, window, missing()));
                match select(first, elsewhere).await {
                    Either::Left((_, elsewhere)) if !missing().is_empty() => elsewhere.await,
                    Either::Left(_) => {}
                    Either::Right(((), first)) => {
                        if missing().is_empty() {
                            overtaken.notify_waiters();
                        }
                        first.await;
                    }
                }
            }
        }
        window.promoting.retain(|_| false);
    }

    /// Reads chunks whose loads failed from the next tiers that have them.
    async fn read_elsewhere(
        &self,
        prompt: &Prompt,
        window: &mut Window,
        failed: Vec<(usize, usize)>,
    ) {
        // Other prompts wait for these chunks until they are read from elsewhere.
        let keys = failed.iter().map(|(index, _)| prompt.keys[*index]);
        let keys: HashSet<_, FoldState> = keys.collect();
        window.promoting.retain(|key| keys.contains(key));
        if failed.is_empty() || now() >= prompt.deadline {
            return;
        }
        let mut rest = self.locate_elsewhere(prompt, &failed).await;
        let never = Notify::new();
        while !rest.is_empty()
            && now() < prompt.deadline
            && let Some(permits) = self.reserve_rest(prompt, window, &mut rest).await
        {
            self.load_all(prompt, window, permits, &never).await;
        }
    }

    /// Records that chunks are not promoted any more, and wakes the prompts that wait for them.
    fn end_promotions(&self, keys: impl IntoIterator<Item = ChunkKey>) {
        let mut promoting = self.promoting.lock();
        for key in keys {
            promoting.remove(&key);
        }
        drop(promoting);
        self.promoted.notify_waiters();
    }

    /// Waits for chunks that will probably be findable soon: chunks that other prompts promote, and, until
    /// `writers_until`, chunks that workers are writing.
    async fn wait_for(&self, prompt: &Prompt, busy: &[Rest], writers_until: Instant) {
        for one in busy {
            let key = &prompt.keys[one.index];
            while now() < prompt.deadline {
                let mut promoted = pin!(self.promoted.notified());
                // Before the check, so that no promotion ends between the two unnoticed.
                promoted.as_mut().enable();
                let until = match self.promoting.lock().contains(key) {
                    true => prompt.deadline,
                    false if self.local.is_writing(key) && now() < writers_until => now() + POLL,
                    false => break,
                };
                let until = tokio::time::Instant::from_std(until);
                // Ends in time or not: the chunk is checked again.
                let _ = tokio::time::timeout_at(until, promoted).await;
            }
        }
    }

    /// Asks the other tiers for chunks whose load failed. Each index comes with the tier that failed.
    async fn locate_elsewhere(&self, prompt: &Prompt, failed: &[(usize, usize)]) -> Vec<Rest> {
        let of_tiers = failed.chunk_by(|a, b| a.1 == b.1);
        let located = of_tiers.map(|of_tier| async move {
            let tier = of_tier[0].1;
            let keys: Vec<ChunkKey> = of_tier.iter().map(|(n, _)| prompt.keys[*n]).collect();
            let asked = match &prompt.hint {
                Some(hint) => self.ask_others(&keys, hint, tier).await,
                None => vec![None; keys.len()],
            };
            let other = |(&(index, _), asked)| Rest {
                index,
                asked,
                failed: Some(tier),
            };
            of_tier.iter().zip(asked).map(other).collect::<Vec<_>>()
        });
        join_all(located).await.into_iter().flatten().collect()
    }

    /// Returns the current source of a chunk; none while it is being removed.
    fn source_of(&self, prompt: &Prompt, rest: &Rest) -> Option<ChunkSource> {
        let key = [prompt.keys[rest.index]];
        let now = self.sources_now(&key, prompt.chunk_bytes(), rest.failed);
        now.into_iter().next()?.or_else(|| rest.asked.clone())
    }

    /// Acquires permits and memory for the first of these chunks, at most one tier's share, to read them at
    /// the same time as others write them. Leaves the other chunks in `rest`. Returns `None` if there are no
    /// permits by the deadline.
    async fn reserve_rest(
        &self,
        prompt: &Prompt,
        window: &mut Window,
        rest: &mut Vec<Rest>,
    ) -> Option<Vec<Permit>> {
        let mut wanted = Vec::new();
        rest.sort_unstable_by_key(|one| one.index);
        for one in mem::take(rest) {
            match self.source_of(prompt, &one) {
                Some(ChunkSource::Dram) => {
                    let key = [prompt.keys[one.index]];
                    let lease = self.local.lease_uncounted(prompt.owner, &key);
                    window.kept.lock().push(lease);
                }
                Some(source) => wanted.push((one, source)),
                None => {}
            }
        }
        let sources = wanted.iter().map(|(_, source)| source);
        let later = wanted.split_off(leading(sources, self.most()));
        rest.extend(later.into_iter().map(|(one, _)| one));
        let mut elsewhere = Elsewhere::new();
        let permits = self.permits(prompt, &wanted, &mut elsewhere).await?;
        let mut allowed = Allowed::of(&permits, self.tiers.len());
        let later = wanted.extract_if(.., |(_, source)| !allowed.take(source));
        rest.extend(later.map(|(one, _)| moved(one, &elsewhere)));
        // As in `prepare`: a removal may have begun meanwhile.
        let _held = self.block_removal();
        wanted.retain(|(one, _)| !self.is_removing(&prompt.keys[one.index]));
        self.reserve(prompt, window, wanted, LocalTier::begin_shared_write);
        Some(permits)
    }

    /// Returns the most bytes that one batch of a prompt reads.
    fn most(&self) -> u64 {
        WINDOW.min(u64::from(self.permits.share()) * UNIT)
    }

    /// Reads the chunks that have slots from all tiers at the same time. Returns the chunks whose load
    /// failed, with their tiers. When `overtaken` ends, chunks that have not arrived count as failed.
    fn load_all<'a>(
        &'a self,
        prompt: &'a Prompt,
        window: &mut Window,
        mut permits: Vec<Permit>,
        overtaken: &'a Notify,
    ) -> impl Future<Output = Vec<(usize, usize)>> + Send + use<'a> {
        let loads = window.loads.iter_mut().map(mem::take).enumerate();
        let loads = loads.filter(|(_, loads)| !loads.is_empty());
        let loads: Vec<_> = loads
            .map(|(tier, loads)| {
                // The units of each tier are released with its last chunk, however slow the other tiers are.
                let permit = permits
                    .extract_if(.., |permit| permit.tier() == tier)
                    .next();
                let kept = Arc::clone(&window.kept);
                async move {
                    let failed = self.load(prompt, tier, loads, &kept, overtaken).await;
                    drop(permit);
                    failed
                }
            })
            .collect();
        async { join_all(loads).await.concat() }
    }

    /// Reads chunks from one tier, and commits each when it arrives. Returns the chunks whose load failed, as
    /// [`Self::load_all`] does.
    async fn load(
        &self,
        prompt: &Prompt,
        tier_index: usize,
        loads: Vec<Load>,
        kept: &Mutex<Vec<Leases>>,
        overtaken: &Notify,
    ) -> Vec<(usize, usize)> {
        let tier = &self.tiers[tier_index];
        let counters = &tier.counters;
        let split = |(index, mark, item)| (Some((index, mark)), item);
        let (mut marks, items): (Vec<_>, Vec<_>) = loads.into_iter().map(split).unzip();
        let _under_way = UnderWay::new(counters, &items);
        let mut failed = Vec::new();
        let begun = now();
        let timeout = tier.policy.read_timeout.map(|time| begun + time);
        let deadline = timeout.map_or(prompt.deadline, |until| until.min(prompt.deadline));
        let answers = tier.backend.load(items, deadline);
        let answers = answers.take_until(overtaken.notified());
        let mut answers = pin!(answers.ready_chunks(COMMIT_TOGETHER));
        // A tier that breaks its contract must not keep a prompt from its head.
        let until = tokio::time::Instant::from_std(deadline + ANSWER);
        while let Ok(Some(arrived)) = tokio::time::timeout_at(until, answers.next()).await {
            let mut writes = Vec::with_capacity(arrived.len());
            let mut read = Vec::with_capacity(arrived.len());
            for (item, loaded) in arrived {
                let Some((index, mark)) = marks.get_mut(item).and_then(Option::take) else {
                    continue;
                };
                match loaded {
                    Loaded::Hit(slot) => {
                        read.push((index, tier_index));
                        writes.push(Write {
                            mark,
                            parent: prompt.parent(index),
                            origin: Origin::tier(tier_index),
                            slot,
                        });
                    }
                    Loaded::Miss(_) => {
                        count(&counters.promote_missed, 1);
                        // The chunk may only have been assumed to be in the tier.
                        prompt.note(index, Miss::probable(MissReason::TierLost(tier_index)));
                        failed.push((index, tier_index));
                    }
                    Loaded::Failed { error, .. } => {
                        count(&counters.promote_failed, 1);
                        prompt.note(index, Miss::of_read(&error, tier_index));
                        failed.push((index, tier_index));
                    }
                }
            }
            if self.local.pool().arena().is_lost() {
                // The bytes may have been written to memory that no longer belongs to the pool.
                count(&counters.promote_failed, writes.len() as u64);
                writes.clear();
            }
            if writes.is_empty() {
                continue;
            }
            let arrived = now();
            let is_first = {
                let mut all = prompt.read.lock();
                let is_first = all.is_empty();
                all.append(&mut read);
                is_first
            };
            if is_first {
                let took = arrived.saturating_duration_since(prompt.begun);
                self.first_chunk_time.record(took);
            }
            let took = arrived.saturating_duration_since(begun);
            writes.iter().for_each(|_| counters.read_time.record(took));
            count(&counters.promoted, writes.len() as u64);
            let bytes = writes.iter().map(|write| write.slot.len()).sum();
            count(&counters.promoted_bytes, bytes);
            let leases = self.commit_promoted(prompt.owner, writes);
            kept.lock().push(leases);
        }
        for (index, _) in marks.into_iter().flatten() {
            count(&counters.promote_failed, 1);
            prompt.note(index, Miss::of_read(&BackendError::Deadline, tier_index));
            failed.push((index, tier_index));
        }
        failed
    }

    /// Makes chunks that were read findable, and offers them to the other tiers. Returns the leases of the
    /// findable chunks; a chunk that was removed meanwhile is not findable.
    fn commit_promoted(&self, owner: OwnerId, writes: Vec<Write>) -> Leases {
        if !self.takes_promoted() {
            return self.local.commit_leased(owner, writes).1;
        }
        let _held = self.block_removal();
        self.commit_and_offer(owner, writes, OfferReason::Promoted)
            .1
    }
}

impl Prompt {
    /// Returns the first part of a range that one batch reads, of at most `most` bytes.
    fn window(&self, range: Range<usize>, most: u64) -> Range<usize> {
        let sources = self.sources(&range).iter();
        range.start..range.start + leading(sources, most)
    }

    /// Returns the payload bytes of each chunk, if known.
    fn chunk_bytes(&self) -> Option<u64> {
        self.hint.as_ref()?.chunk_bytes
    }

    fn sources(&self, range: &Range<usize>) -> &[ChunkSource] {
        &self.sources[range.start - self.first..range.end - self.first]
    }

    /// Records a reason why a chunk is not read.
    fn note(&self, index: usize, miss: Miss) {
        self.misses.lock().push((index, miss));
    }

    /// Returns the last recorded reason why a chunk was not read; `None` if there is none.
    pub(crate) fn miss_at(&self, index: usize) -> Option<Miss> {
        let misses = self.misses.lock();
        let of_it = misses.iter().rev().find(|(of, _)| *of == index);
        of_it.map(|(_, miss)| *miss)
    }

    /// Records why the prompt ends before a chunk that a tier has, if no read of the chunk failed. The prompt
    /// may have waited for permits of its own lookups, so the tier is only the probable reason.
    fn note_end(&self, index: usize) {
        let source = index.checked_sub(self.first);
        let source = source.and_then(|index| self.sources.get(index));
        let tier = source.and_then(ChunkSource::tier);
        if let Some(tier) = tier.filter(|_| self.miss_at(index).is_none()) {
            let miss = match now() >= self.deadline {
                true => Miss::probable(MissReason::TierLate(Some(tier))),
                // Or a removal, or the close of the engine, came in between.
                false => Miss::probable(MissReason::TierLost(tier)),
            };
            self.note(index, miss);
        }
    }

    fn parent(&self, index: usize) -> Option<ChunkKey> {
        match index.checked_sub(1) {
            Some(before) => Some(self.keys[before]),
            None => self.before,
        }
    }
}

/// Returns the chunk with its other source, if it is read from elsewhere.
fn moved(one: Rest, elsewhere: &Elsewhere) -> Rest {
    elsewhere.get(&one.index).cloned().unwrap_or(one)
}

/// Returns the time at which half of the time until a deadline is over.
pub(crate) fn half_of(deadline: Instant) -> tokio::time::Instant {
    let now = tokio::time::Instant::now();
    let left = tokio::time::Instant::from_std(deadline).saturating_duration_since(now);
    now + left / 2
}

/// Returns how many leading sources have at most `most` bytes in total; at least one, unless there are none.
fn leading<'a>(sources: impl ExactSizeIterator<Item = &'a ChunkSource>, most: u64) -> usize {
    let mut bytes = 0;
    let all = sources.len();
    let fits = |source: &&ChunkSource| {
        bytes += source.bytes();
        bytes <= most
    };
    sources.take_while(fits).count().max(1).min(all)
}
