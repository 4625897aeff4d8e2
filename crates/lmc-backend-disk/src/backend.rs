//! The tier: several drives behind the `Backend` contract.

use std::io;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use lmc_backend::{
    Answers, Backend, BackendError, BoxFuture, Cleared, Clears, Cursor, FailedSlot, Handle, Health,
    Listed, LoadItem, Loaded, LocalIndex, LocateHint, Located, Location, Page, StoreItem, Stored,
    Usage, WriteBackend, ready,
};
use lmc_key::ChunkKey;
use parking_lot::Mutex;

use crate::TIER;
use crate::batch::AnswerBatch;
use crate::counters::{DiskCounters, DiskStats};
use crate::drive::Drive;
use crate::drive_set::{DriveSet, missing_text};
use crate::format::blocks;
use crate::index::EntryRef;
use crate::set::SetMember;
use crate::spaces::{Unreachable, UnreachableSegment};
use crate::timer::Timer;
use crate::volume::BLOCK;

/// A tier of chunks on one or more drives, which finds them again after any kill.
///
/// Made by [`crate::DiskConfig::open`]. Chunks are distributed over the drives by their hash. A drive that
/// fails is taken out of use, and its chunks become misses; the tier probes it from time to time.
/// [`WriteBackend::store`] answers when a chunk and its index entry are durable.
#[derive(Debug)]
pub struct DiskBackend {
    drives: Arc<[Drive]>,
    set: DriveSet,
    unreachable: Vec<Unreachable>,
    /// Segments with such chunks. Segments at the end of the list are dropped once their chunks are gone.
    unreachable_segments: Mutex<Vec<UnreachableSegment>>,
    counters: DiskCounters,
    timer: Timer,
}

/// The location of a chunk, in a [`Handle`].
#[derive(Clone, Copy)]
struct OnDrive {
    /// Index of the drive.
    drive: usize,
    entry: EntryRef,
}

impl DiskBackend {
    pub(crate) fn new(drives: Vec<Drive>, set: DriveSet) -> io::Result<Self> {
        Ok(Self {
            drives: drives.into(),
            set,
            unreachable: Vec::new(),
            unreachable_segments: Mutex::default(),
            counters: DiskCounters::default(),
            timer: Timer::start()?,
        })
    }

    pub(crate) fn with_unreachable(
        mut self,
        unreachable: Vec<Unreachable>,
        segments: Vec<UnreachableSegment>,
    ) -> Self {
        self.unreachable = unreachable;
        self.unreachable_segments = Mutex::new(segments);
        self
    }

    /// Returns the chunks that were present at the start and cannot be hit, because they were stored under
    /// other settings than [`crate::DiskConfig::with_key_settings`] names.
    pub fn unreachable(&self) -> &[Unreachable] {
        &self.unreachable
    }

    /// Returns the sums of all drives' counters.
    pub fn stats(&self) -> DiskStats {
        let mut stats = self.counters.read();
        for drive in self.drives.iter() {
            stats.add(&drive.stats());
        }
        stats
    }

    /// Returns the sum of all drives' usage.
    pub fn held(&self) -> Usage {
        let (mut chunks, mut bytes, mut capacity) = (0, 0, 0);
        for drive in self.drives.iter() {
            let usage = drive.usage();
            chunks += usage.chunks;
            bytes += usage.bytes;
            capacity += drive.capacity();
        }
        Usage::new(chunks, bytes).with_capacity(capacity)
    }

    /// Describes the I/O of each drive for an operator, for example `io_uring, direct I/O`.
    pub fn describe(&self) -> Vec<String> {
        self.drives.iter().map(Drive::describe).collect()
    }

    /// Returns the health of each drive.
    pub fn drive_health(&self) -> Vec<Health> {
        self.drives.iter().map(Drive::health).collect()
    }

    /// Returns the drives of the set that are not open. A drive that was absent during a clear is emptied
    /// when it is opened again.
    pub fn missing(&self) -> &[SetMember] {
        self.set.missing()
    }

    pub(crate) fn drives(&self) -> &[Drive] {
        &self.drives
    }

    pub(crate) fn timer(&self) -> &Timer {
        &self.timer
    }

    fn closed(&self) -> bool {
        self.drives.iter().all(Drive::closed)
    }

    /// Returns the drives in a key's order. The first working drive stores a new chunk of the key.
    fn order(&self, key: &ChunkKey) -> impl Iterator<Item = usize> + use<> {
        let hash = key.hash.as_bytes();
        let hash = u64::from_le_bytes(hash[8..16].try_into().expect("eight bytes of 32"));
        let count = self.drives.len();
        let first = hash as usize % count;
        (0..count).map(move |step| (first + step) % count)
    }

    /// Returns the drive for new chunks with this key.
    fn home(&self, key: &ChunkKey) -> Option<usize> {
        let works = |&drive: &usize| self.drives[drive].unavailable().is_none();
        self.order(key).find(works)
    }

    /// Returns the location of a chunk that its handle names, if the drive works.
    fn located(&self, item: &LoadItem) -> Option<OnDrive> {
        let located: OnDrive = *item.handle.as_ref()?.get()?;
        let drive = self.drives.get(located.drive)?;
        drive.unavailable().is_none().then_some(located)
    }

    /// Returns the location of a chunk on a working drive, and the chunk's length.
    fn find(&self, key: &ChunkKey) -> Option<(OnDrive, u64)> {
        self.order(key).find_map(|drive| {
            let (entry, len) = self.drives[drive].find(key)?;
            let works = self.drives[drive].unavailable().is_none();
            works.then_some((OnDrive { drive, entry }, len))
        })
    }

    /// Probes drives that failed, so that they can return.
    fn probe(&self) {
        self.drives.iter().for_each(Drive::probe);
    }

    /// Returns the reason why no drive works; `None` if at least one works.
    fn all_out(&self) -> Option<lmc_backend::Unavailable> {
        self.probe();
        let mut reasons = self.drives.iter().map(Drive::unavailable);
        let first = reasons.next().flatten();
        reasons.all(|reason| reason.is_some()).then_some(first)?
    }

    /// Returns the number of operations without an answer, by drive.
    fn late(&self, drives: impl Iterator<Item = usize>) -> impl Iterator<Item = (&Drive, u64)> {
        let mut late = vec![0; self.drives.len()];
        drives.for_each(|drive| late[drive] += 1);
        self.drives.iter().zip(late)
    }

    fn load_all(&self, items: Vec<LoadItem>, deadline: Instant) -> Answers<'_, Loaded> {
        let begun = Instant::now();
        let failed = |error, item: LoadItem| Loaded::Failed {
            error,
            slot: FailedSlot::Released(item.slot),
        };
        if let Some(out) = self.all_out() {
            let unavailable = |item| failed(BackendError::Unavailable(out.clone()), item);
            return ready(items.into_iter().map(unavailable).collect::<Vec<_>>());
        }
        let batch = AnswerBatch::new(items.len());
        let mut on = Vec::with_capacity(items.len());
        for (index, item) in items.into_iter().enumerate() {
            if begun >= deadline {
                batch.answer(index, failed(BackendError::Deadline, item));
                on.push(0);
                continue;
            }
            // A chunk that no drive has is loaded from a working drive, which answers with a miss or with
            // closed.
            let found = (self.located(&item)).or_else(|| Some(self.find(&item.key)?.0));
            let drive = found.map(|found| found.drive);
            let drive = drive.or_else(|| self.home(&item.key)).unwrap_or(0);
            on.push(drive);
            let entry = found.map(|found| found.entry);
            self.drives[drive].load(item, entry, (Arc::clone(&batch), index));
        }
        let late = move |missing: Vec<usize>| {
            let late = self.late(missing.iter().map(|&index| on[index]));
            for (drive, late) in late {
                drive.late_reads(late, begun.elapsed());
            }
            let quarantined = |_| Loaded::Failed {
                error: BackendError::Deadline,
                slot: FailedSlot::Quarantined,
            };
            missing.into_iter().map(quarantined).collect()
        };
        Box::pin(batch.answers(&self.timer, deadline, late))
    }

    fn store_all(
        &self,
        items: Vec<StoreItem>,
        deadline: Instant,
    ) -> Answers<'_, Result<Stored, BackendError>> {
        let begun = Instant::now();
        self.probe();
        let batch = AnswerBatch::new(items.len());
        let mut on = Vec::with_capacity(items.len());
        for (index, item) in items.into_iter().enumerate() {
            let (drive, refusal) = match (self.find(&item.key), self.home(&item.key)) {
                _ if self.closed() => (0, Some(Err(BackendError::Closed))),
                _ if Instant::now() >= deadline => (0, Some(Err(BackendError::Deadline))),
                (Some((found, _)), _) => (found.drive, Some(Ok(Stored::Present))),
                (None, None) => {
                    let out = self.drives[0].unavailable();
                    let out = out.map_or(Ok(Stored::Declined), |out| Err(out.into()));
                    (0, Some(out))
                }
                (None, Some(home)) => (home, None),
            };
            on.push(drive);
            if let Some(refusal) = refusal {
                batch.answer(index, refusal);
                continue;
            }
            self.drives[drive].store(item, (Arc::clone(&batch), index));
        }
        let late = move |missing: Vec<usize>| {
            let late = self.late(missing.iter().map(|&index| on[index]));
            for (drive, late) in late.filter(|(_, late)| *late > 0) {
                drive.late_writes(late, begun.elapsed());
            }
            let late = missing.iter().map(|_| Err(BackendError::Deadline));
            late.collect()
        };
        Box::pin(batch.answers(&self.timer, deadline, late))
    }

    async fn remove_all(
        &self,
        keys: &[ChunkKey],
        deadline: Instant,
    ) -> Vec<Result<bool, BackendError>> {
        if self.closed() {
            return keys.iter().map(|_| Err(BackendError::Closed)).collect();
        }
        if Instant::now() >= deadline {
            return keys.iter().map(|_| Err(BackendError::Deadline)).collect();
        }
        if let Some(out) = self.all_out() {
            return keys.iter().map(|_| Err(out.clone().into())).collect();
        }
        // Every drive is asked: a drive that was out may have an older copy.
        let count = self.drives.len();
        let batch = AnswerBatch::new(keys.len() * count);
        for (index, key) in keys.iter().enumerate() {
            for (number, drive) in self.drives.iter().enumerate() {
                drive.remove(key, (Arc::clone(&batch), index * count + number));
            }
        }
        let (answers, _) = batch.all(&self.timer, deadline, || None).await;
        answers
            .chunks(count)
            .map(|answers| {
                if answers.iter().any(Option::is_none) {
                    return Err(BackendError::Deadline);
                }
                Ok(answers.contains(&Some(true)))
            })
            .collect()
    }

    async fn clear_all(
        &self,
        clears: Arc<Clears>,
        deadline: Instant,
    ) -> Result<Cleared, BackendError> {
        if self.closed() {
            return Err(BackendError::Closed);
        }
        self.set.reach(&clears);
        let batch = AnswerBatch::new(self.drives.len());
        // Including drives that are out, because they may return.
        let on =
            |(number, drive): (usize, &Drive)| drive.clear(&clears, (Arc::clone(&batch), number));
        let removed = self.drives.iter().enumerate().map(on).sum();
        let (durable, _) = batch.all(&self.timer, deadline, || None).await;
        let cleared = Cleared::new(removed);
        Ok(match durable.iter().all(|durable| *durable == Some(true)) {
            true => cleared.durable(),
            false => cleared,
        })
    }
}

impl LocalIndex for DiskBackend {
    fn locate_now(&self, keys: &[ChunkKey]) -> Vec<Result<Located, BackendError>> {
        let closed = self.closed();
        let out = self.all_out();
        let located = |key: &ChunkKey| match (closed, &out) {
            (true, _) => Err(BackendError::Closed),
            (false, Some(out)) => Err(out.clone().into()),
            (false, None) => Ok(self.find(key).map_or(Located::Absent, |(found, len)| {
                let drive = &self.drives[found.drive];
                let cost = drive.read_time((1 + blocks(len)) * BLOCK);
                let location = Location::new(len).with_cost(cost);
                Located::Present(location.with_handle(Handle::new(found)))
            })),
        };
        keys.iter().map(located).collect()
    }

    fn fault_of(&self, key: &ChunkKey) -> Option<BackendError> {
        if self.closed() {
            return Some(BackendError::Closed);
        }
        if let Some(out) = self.all_out() {
            return Some(out.into());
        }
        // A drive that is out keeps its index until it returns.
        let has_it = |drive: &&Drive| drive.find(key).is_some();
        let mut holders = self.drives.iter().filter(has_it);
        holders.find_map(Drive::unavailable).map(Into::into)
    }
}

impl Backend for DiskBackend {
    fn name(&self) -> &str {
        TIER
    }

    fn writer(&self) -> Option<&dyn WriteBackend> {
        Some(self)
    }

    fn index(&self) -> Option<&dyn LocalIndex> {
        Some(self)
    }

    fn locate<'a>(
        &'a self,
        keys: &'a [ChunkKey],
        _: &'a LocateHint,
        _deadline: Instant,
    ) -> BoxFuture<'a, Vec<Result<Located, BackendError>>> {
        Box::pin(std::future::ready(self.locate_now(keys)))
    }

    fn load(&self, items: Vec<LoadItem>, deadline: Instant) -> Answers<'_, Loaded> {
        self.load_all(items, deadline)
    }

    fn clear(
        &self,
        clears: Arc<Clears>,
        deadline: Instant,
    ) -> BoxFuture<'_, Result<Cleared, BackendError>> {
        Box::pin(self.clear_all(clears, deadline))
    }

    fn clears(&self) -> Arc<Clears> {
        self.set.clears()
    }

    fn usage(&self) -> Option<Usage> {
        (!self.closed()).then(|| self.held())
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        self.stats().named()
    }

    fn has_unreachable(&self) -> bool {
        let mut segments = self.unreachable_segments.lock();
        // No key of this process names these chunks, so they only disappear with whole segments, by eviction
        // or a clear.
        while let Some(last) = segments.last() {
            if self.drives[last.drive].has_chunks_of(last.segment, last.generation) {
                return true;
            }
            segments.pop();
        }
        false
    }

    fn health(&self) -> Health {
        if self.closed() {
            return Health::Down {
                reason: "the tier is closed: the server is stopping".to_owned(),
            };
        }
        self.probe();
        let each: Vec<Health> = self.drive_health();
        let faults = each
            .iter()
            .enumerate()
            .filter_map(|(number, health)| match health {
                Health::Degraded { reason } | Health::Down { reason } => {
                    Some(format!("drive {number}: {reason}"))
                }
                _ => None,
            });
        let faults = faults.chain(self.set.missing().iter().map(missing_text));
        let reason = faults.collect::<Vec<_>>().join("; ");
        if each
            .iter()
            .all(|health| matches!(health, Health::Down { .. }))
        {
            return Health::Down { reason };
        }
        match reason.is_empty() {
            true => Health::Ready,
            false => Health::Degraded { reason },
        }
    }

    fn close(&self, deadline: Instant) -> BoxFuture<'_, Result<(), BackendError>> {
        Box::pin(async move {
            let batch = AnswerBatch::new(self.drives.len());
            for number in 0..self.drives.len() {
                let (drives, ended) = (Arc::clone(&self.drives), Arc::clone(&batch));
                // Stopping waits for the drive, so it runs on a thread of its own.
                let thread = thread::Builder::new().name("lmc-disk-close".to_owned());
                let spawned = thread.spawn(move || {
                    let result = drives[number].stop(true);
                    ended.answer(number, result.map_err(BackendError::from));
                });
                if let Err(error) = spawned {
                    batch.answer(number, Err(BackendError::from(error)));
                }
            }
            let late = || Err(BackendError::Deadline);
            let (ended, was_late) = batch.all(&self.timer, deadline, late).await;
            if was_late {
                self.drives.iter().for_each(Drive::give_up);
            }
            ended.into_iter().collect()
        })
    }
}

impl WriteBackend for DiskBackend {
    fn store(
        &self,
        items: Vec<StoreItem>,
        deadline: Instant,
    ) -> Answers<'_, Result<Stored, BackendError>> {
        self.store_all(items, deadline)
    }

    fn remove<'a>(
        &'a self,
        keys: &'a [ChunkKey],
        deadline: Instant,
    ) -> BoxFuture<'a, Vec<Result<bool, BackendError>>> {
        Box::pin(self.remove_all(keys, deadline))
    }

    fn list(
        &self,
        cursor: Cursor,
        limit: usize,
        _deadline: Instant,
    ) -> BoxFuture<'_, Result<Page, BackendError>> {
        if self.closed() {
            return Box::pin(std::future::ready(Err(BackendError::Closed)));
        }
        // Drive, segment and block of a location; plus one, so that 0 is before all locations.
        let raw = cursor.raw();
        let mut drive = (raw >> 64) as usize;
        let mut after = (raw as u64)
            .checked_sub(1)
            .map(|location| ((location >> 32) as u32, location as u32));
        let mut page = Page::default();
        while drive < self.drives.len() && page.items.len() < limit {
            if self.drives[drive].unavailable().is_some() {
                // The chunks of this drive are misses.
                drive += 1;
                after = None;
                continue;
            }
            let missing = limit - page.items.len();
            let found = self.drives[drive].list(after, missing);
            after = found
                .last()
                .map(|last| (last.location.segment, last.location.block));
            let items = found.iter().map(|found| Listed::new(found.key, found.len));
            page.items.extend(items);
            if found.len() < missing {
                drive += 1;
                after = None;
            }
        }
        page.next = (drive < self.drives.len()).then(|| {
            let location = after.map_or(0, |(segment, block)| {
                (u64::from(segment) << 32 | u64::from(block)) + 1
            });
            Cursor::from_raw((drive as u128) << 64 | u128::from(location))
        });
        Box::pin(std::future::ready(Ok(page)))
    }
}

impl Drop for DiskBackend {
    fn drop(&mut self) {
        // A close that no caller waits for any more also holds the drives.
        self.drives.iter().for_each(Drive::give_up);
    }
}
