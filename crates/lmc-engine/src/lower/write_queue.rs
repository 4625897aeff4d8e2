//! Queues of writes to lower tiers.

use std::collections::{BTreeMap, VecDeque};
use std::mem;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use futures_util::StreamExt;
use lmc_backend::{StoreItem, Stored, now, ready};
use lmc_backend_local::{Inserted, Leases, Origin, OwnerId, Write};
use lmc_key::{ChunkKey, SpaceId};
use lmc_memory::SealedSlot;
use parking_lot::Mutex;
use tokio::sync::{Notify, Semaphore};

use super::{Tier, Tiers, count};
use crate::policy::WritePolicy;

/// Most chunks of one batch.
const BATCH: usize = 64;
/// Most batches that a tier works on at a time, so that it writes the next one while it makes a batch
/// durable.
const BATCHES: usize = 4;

/// A chunk that is offered to the lower tiers.
#[derive(Debug, Clone)]
pub(crate) struct Offer {
    pub(crate) key: ChunkKey,
    /// Key of the chunk before this one in its prompt, if known.
    pub(crate) parent: Option<ChunkKey>,
    pub(crate) origin: Origin,
    pub(crate) slot: SealedSlot,
}

/// Reason for offering a chunk to lower tiers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OfferReason {
    /// The chunk was computed and committed.
    Computed,
    /// The chunk was promoted from a tier.
    Promoted,
    /// The chunk was found in DRAM.
    Found,
    /// The chunk was evicted above the high watermark, or the engine is being closed or drained.
    Leaving,
}

/// The queued writes for one tier, bounded in bytes. Each write holds its chunk's memory until it has ended,
/// even if the chunk is evicted meanwhile.
#[derive(Debug)]
pub(super) struct WriteQueue {
    queue: Mutex<PendingWrites>,
    arrived: Notify,
    /// Notified when writes have ended or were dropped.
    ended: Notify,
    /// Bytes in the queue and in batches in progress.
    bytes: AtomicU64,
    max_bytes: u64,
}

#[derive(Debug, Default)]
struct PendingWrites {
    waiting: VecDeque<StoreItem>,
    /// Batches in progress by number, with the number of unfinished chunks of each.
    batches: BTreeMap<u64, usize>,
    /// Number of the last batch.
    last_batch: u64,
}

impl WriteQueue {
    pub(super) fn new(max_bytes: u64) -> Self {
        Self {
            queue: Mutex::default(),
            arrived: Notify::new(),
            ended: Notify::new(),
            bytes: AtomicU64::new(0),
            max_bytes,
        }
    }

    /// Returns the bytes that are queued or being written.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Returns true if the queue has capacity for `bytes` bytes. Also true for a chunk larger than the queue:
    /// it is dropped, and waiting would not help.
    pub(super) fn has_capacity(&self, bytes: u64) -> bool {
        bytes > self.max_bytes || self.bytes() + bytes <= self.max_bytes
    }

    /// Adds a chunk. Returns false if the queue is full.
    fn push(&self, item: StoreItem) -> bool {
        let len = item.slot.len();
        let fits = |bytes: u64| (bytes + len <= self.max_bytes).then_some(bytes + len);
        let taken = self
            .bytes
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits);
        if taken.is_err() {
            return false;
        }
        self.queue.lock().waiting.push_back(item);
        self.arrived.notify_one();
        true
    }

    /// Waits for the next batch, and returns it with its number.
    async fn next(&self) -> (u64, Vec<StoreItem>) {
        loop {
            {
                let queue = &mut *self.queue.lock();
                let len = queue.waiting.len().min(BATCH);
                if len > 0 {
                    queue.last_batch += 1;
                    queue.batches.insert(queue.last_batch, len);
                    return (queue.last_batch, queue.waiting.drain(..len).collect());
                }
            }
            self.arrived.notified().await;
        }
    }

    fn release(&self, bytes: u64) {
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
        self.ended.notify_waiters();
    }

    /// Records that a batch has been answered.
    fn batch_ended(&self, batch: u64) {
        self.queue.lock().batches.remove(&batch);
        self.ended.notify_waiters();
    }

    /// Records that the write of one chunk of a batch has ended.
    fn ended(&self, batch: u64, bytes: u64) {
        if let Some(left) = self.queue.lock().batches.get_mut(&batch) {
            *left = left.saturating_sub(1);
        }
        self.release(bytes);
    }

    /// Drops the writes that have not begun, and returns the number of them.
    pub(super) fn drop_queued(&self) -> u64 {
        let dropped = mem::take(&mut self.queue.lock().waiting);
        self.release(dropped.iter().map(|item| item.slot.len()).sum());
        dropped.len() as u64
    }

    /// Drops the queued writes of the chunks for which `pick` returns true.
    pub(super) fn drop_queued_of(&self, pick: impl Fn(&ChunkKey) -> bool) {
        let mut queue = self.queue.lock();
        let waiting = mem::take(&mut queue.waiting);
        let (dropped, kept): (VecDeque<_>, _) =
            waiting.into_iter().partition(|item| pick(&item.key));
        queue.waiting = kept;
        drop(queue);
        self.release(dropped.iter().map(|item| item.slot.len()).sum());
    }

    /// Returns true if the tier has been given a batch that it has not answered yet, or is about to be given
    /// one.
    pub(super) fn is_writing(&self) -> bool {
        !self.queue.lock().batches.is_empty()
    }

    /// Waits until the batches that are in progress now have ended; later batches do not count. Returns false
    /// if the deadline passed first.
    pub(super) async fn settled(&self, deadline: Instant) -> bool {
        let last = self.queue.lock().last_batch;
        let is_over = || {
            let queue = self.queue.lock();
            let oldest = queue.batches.first_key_value();
            oldest.is_none_or(|(&oldest, _)| oldest > last)
        };
        self.wait(deadline, is_over).await
    }

    /// Waits until no chunk is queued or being written, or until the deadline.
    pub(super) async fn idle(&self, deadline: Instant) {
        self.wait(deadline, || self.bytes() == 0).await;
    }

    /// Waits until enough writes have ended. Returns false if the deadline passed first.
    async fn wait(&self, deadline: Instant, is_over: impl Fn() -> bool) -> bool {
        let deadline = tokio::time::Instant::from_std(deadline);
        loop {
            let mut ended = pin!(self.ended.notified());
            // Before the check, so that no write ends between the two unnoticed.
            ended.as_mut().enable();
            if is_over() {
                return true;
            }
            if tokio::time::timeout_at(deadline, ended).await.is_err() {
                return is_over();
            }
        }
    }

    /// Returns the number of chunks that are queued or being written.
    pub(super) fn left(&self) -> u64 {
        let queue = self.queue.lock();
        (queue.waiting.len() + queue.batches.values().sum::<usize>()) as u64
    }
}

impl Tiers {
    /// Makes written chunks findable, leases each, and offers those that are new. The caller must block
    /// removal, so that no chunk is offered that a clear has removed.
    pub(crate) fn commit_and_offer(
        &self,
        owner: OwnerId,
        writes: Vec<Write>,
        reason: OfferReason,
    ) -> (Vec<Inserted>, Leases) {
        let written = |write: &Write| (write.mark.key(), write.parent, write.origin);
        let written: Vec<_> = writes.iter().map(written).collect();
        let (inserted, leases) = self.local.commit_leased(owner, writes);
        let found = written.into_iter().zip(&inserted);
        let found = found.filter(|(_, inserted)| **inserted != Inserted::Cleared);
        let new = found.zip(leases.iter());
        let new = new.filter(|((_, inserted), _)| **inserted == Inserted::New);
        let offer = |(((key, parent, origin), _), slot): ((_, _), &SealedSlot)| Offer {
            key,
            parent,
            origin,
            slot: slot.clone(),
        };
        self.offer(&new.map(offer).collect::<Vec<_>>(), reason);
        (inserted, leases)
    }

    /// Offers chunks to every tier except the one that they came from; each tier's policy decides whether the
    /// chunk is queued. Never waits: a chunk that finds a queue full is dropped and counted.
    pub(crate) fn offer(&self, offers: &[Offer], reason: OfferReason) {
        for offer in offers {
            // A chunk that a clear has left here for its readers is not written to any tier.
            let Some(space) = self.clears.current_space_of(offer.key.space) else {
                continue;
            };
            for (index, tier) in self.tiers.iter().enumerate() {
                if !self.offer_to(index, space, offer, reason) {
                    count(&tier.counters.write_dropped, 1);
                }
            }
        }
    }

    /// Offers a chunk to one tier, as [`Self::offer`] does to all. Returns false if its queue is full: the
    /// chunk can be offered later. A chunk that is larger than the queue is dropped and counted.
    pub(crate) fn offer_leaving_to(&self, index: usize, offer: &Offer) -> bool {
        let Some(space) = self.clears.current_space_of(offer.key.space) else {
            return true;
        };
        let tier = &self.tiers[index];
        let is_taken = self.offer_to(index, space, offer, OfferReason::Leaving);
        let is_too_large = !is_taken && offer.slot.len() > tier.queue.max_bytes;
        count(&tier.counters.write_dropped, u64::from(is_too_large));
        is_taken || is_too_large
    }

    /// Returns false if the tier's policy takes the chunk but the queue is full.
    fn offer_to(&self, index: usize, space: SpaceId, offer: &Offer, reason: OfferReason) -> bool {
        let tier = &self.tiers[index];
        if offer.origin.is_tier(index)
            || tier.backend.writer().is_none()
            || !tier.policy.spaces.picks(space)
            || !tier.takes(&offer.key, reason, offer.origin.is_after(index))
        {
            return true;
        }
        let mut item = StoreItem::new(offer.key, offer.slot.clone());
        item.parent = offer.parent;
        tier.queue.push(item)
    }
}

impl Tier {
    /// Returns true if the tier's policy is to write a chunk now. `is_from_after`: the chunk came from a tier
    /// after this one.
    fn takes(&self, key: &ChunkKey, reason: OfferReason, is_from_after: bool) -> bool {
        let is_through = self.policy.write == WritePolicy::Through;
        let accepts_reason = match reason {
            OfferReason::Computed => is_through,
            OfferReason::Promoted => is_through && self.policy.fill && is_from_after,
            // Without use counts, the chunk was already written when it was computed.
            OfferReason::Found => is_through && self.uses.is_some(),
            OfferReason::Leaving => !is_through,
        };
        let Some(uses) = &self.uses else {
            return accepts_reason;
        };
        let used = match reason {
            OfferReason::Leaving => uses.of(key),
            _ => uses.add(key),
        };
        if reason == OfferReason::Found {
            // Without a local index, finding out whether the tier already has the chunk costs a request.
            let is_new = used == uses.least || self.backend.index().is_some();
            return accepts_reason && used >= uses.least && is_new;
        }
        if accepts_reason && used < uses.least {
            count(&self.counters.write_declined, 1);
        }
        accepts_reason && used >= uses.least
    }
}

/// Writes the queued chunks of one tier, until the task is aborted.
pub(super) async fn serve(tiers: Arc<Tiers>, index: usize) {
    let batches = Arc::new(Semaphore::new(BATCHES));
    // The writes are aborted with this task.
    let mut writing = tokio::task::JoinSet::new();
    loop {
        let Ok(permit) = Arc::clone(&batches).acquire_owned().await else {
            return;
        };
        let (batch, items) = tiers.tiers[index].queue.next().await;
        while writing.try_join_next().is_some() {}
        let tiers = Arc::clone(&tiers);
        writing.spawn(async move {
            write(&tiers, index, batch, items).await;
            drop(permit);
        });
    }
}

async fn write(tiers: &Tiers, index: usize, batch: u64, items: Vec<StoreItem>) {
    let tier = &tiers.tiers[index];
    let counters = &tier.counters;
    let mut lens: Vec<Option<u64>> = items.iter().map(|item| Some(item.slot.len())).collect();
    count(&counters.write_batches, 1);
    count(&counters.write_given, items.len() as u64);
    let begun = now();
    let deadline = begun + tier.policy.write_timeout;
    let mut stored = match tier.backend.writer() {
        Some(writer) => writer.store(items, deadline),
        None => ready([]),
    };
    while let Some((item, stored)) = stored.next().await {
        let Some(len) = lens.get_mut(item).and_then(Option::take) else {
            continue;
        };
        match stored {
            Ok(Stored::Written) => {
                count(&counters.written, 1);
                count(&counters.written_bytes, len);
                let took = now().saturating_duration_since(begun);
                counters.write_time.record(took);
            }
            Ok(Stored::Declined) => count(&counters.write_declined, 1),
            Ok(_) => {}
            Err(_) => count(&counters.write_failed, 1),
        }
        tier.queue.ended(batch, len);
    }
    // A tier that omitted an answer breaks its contract.
    for len in lens.into_iter().flatten() {
        count(&counters.write_failed, 1);
        tier.queue.ended(batch, len);
    }
    tier.queue.batch_ended(batch);
    count(&counters.write_batches_ended, 1);
}
