//! Copies on their way down to a tier.

use std::collections::{BTreeMap, VecDeque};
use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use lmc_backend::{StoreItem, Stored};
use lmc_key::ChunkKey;
use lmc_memory::SealedSlot;
use parking_lot::Mutex;
use tokio::sync::{Notify, Semaphore};

use super::{Shared, count};

/// Chunks of one store.
const AT_ONCE: usize = 64;
/// Stores that a tier is given at a time, so that it has the next when one is made durable.
const STORES: usize = 4;
/// Time between two looks at whether all copies are down.
pub(super) const LOOK: Duration = Duration::from_millis(1);

/// A chunk that is offered to the tiers below.
#[derive(Debug, Clone)]
pub(crate) struct OfferItem {
    pub(crate) key: ChunkKey,
    pub(crate) parent: Option<ChunkKey>,
    pub(crate) slot: SealedSlot,
}

/// The copies that wait for one tier, bounded in bytes. Each holds its chunk's memory until it is
/// down, also when the chunk is evicted meanwhile.
#[derive(Debug)]
pub(super) struct Copies {
    queue: Mutex<Queue>,
    arrived: Notify,
    /// Bytes in the queue and in stores under way.
    bytes: AtomicU64,
    max_bytes: u64,
}

#[derive(Debug, Default)]
struct Queue {
    waiting: VecDeque<OfferItem>,
    /// Numbers of the stores under way, and how many chunks each has.
    under_way: BTreeMap<u64, usize>,
    next_store: u64,
}

impl Copies {
    pub(super) fn new(max_bytes: u64) -> Self {
        Self {
            queue: Mutex::default(),
            arrived: Notify::new(),
            bytes: AtomicU64::new(0),
            max_bytes,
        }
    }

    pub(super) fn queued(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Whether so many bytes more may be on their way. More than ever may count as fitting: they
    /// are dropped, and waiting would not help.
    pub(super) fn has_room(&self, bytes: u64) -> bool {
        bytes > self.max_bytes || self.queued() + bytes <= self.max_bytes
    }

    /// False when too much is on its way.
    fn push(&self, item: OfferItem) -> bool {
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

    /// The next copies, which are under way from now on, and the number of their store; waits
    /// while there are none.
    async fn next(&self) -> (u64, Vec<OfferItem>) {
        loop {
            {
                let queue = &mut *self.queue.lock();
                let len = queue.waiting.len().min(AT_ONCE);
                if len > 0 {
                    queue.next_store += 1;
                    queue.under_way.insert(queue.next_store, len);
                    return (queue.next_store, queue.waiting.drain(..len).collect());
                }
            }
            self.arrived.notified().await;
        }
    }

    fn give(&self, bytes: u64) {
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    fn ended(&self, store: u64, bytes: u64) {
        self.queue.lock().under_way.remove(&store);
        self.give(bytes);
    }

    /// Gives up what has not begun; how many chunks that is.
    pub(super) fn drop_queued(&self) -> u64 {
        let dropped = mem::take(&mut self.queue.lock().waiting);
        self.give(dropped.iter().map(|item| item.slot.len()).sum());
        dropped.len() as u64
    }

    /// Drops queued copies of the chunks that a condition picks.
    pub(super) fn drop_queued_of(&self, pick: impl Fn(&ChunkKey) -> bool) {
        let mut queue = self.queue.lock();
        let waiting = mem::take(&mut queue.waiting);
        let (dropped, kept): (VecDeque<_>, _) =
            waiting.into_iter().partition(|item| pick(&item.key));
        queue.waiting = kept;
        drop(queue);
        self.give(dropped.iter().map(|item| item.slot.len()).sum());
    }

    /// Whether a tier has been given something that it has not answered, or is about to be.
    pub(super) fn under_way(&self) -> bool {
        !self.queue.lock().under_way.is_empty()
    }

    /// Waits until the stores that are under way now have ended, however many begin meanwhile.
    /// False when the deadline came first.
    pub(super) async fn settled(&self, deadline: Instant) -> bool {
        let newest = self.queue.lock().next_store;
        let under_way = || {
            let queue = self.queue.lock();
            let oldest = queue.under_way.first_key_value();
            oldest.is_some_and(|(&oldest, _)| oldest <= newest)
        };
        while under_way() {
            if Instant::now() >= deadline {
                return false;
            }
            tokio::time::sleep(LOOK).await;
        }
        true
    }

    /// Waits until nothing is on its way, or until the deadline.
    pub(super) async fn idle(&self, deadline: Instant) {
        while self.queued() > 0 && Instant::now() < deadline {
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Chunks on their way.
    pub(super) fn left(&self) -> u64 {
        let queue = self.queue.lock();
        (queue.waiting.len() + queue.under_way.values().sum::<usize>()) as u64
    }
}

impl Shared {
    /// Offers chunks to every tier. Never waits: what is too much is dropped and counted.
    pub(crate) fn offer(&self, items: &[OfferItem]) {
        for tier in &self.tiers {
            for item in items {
                if !tier.copies.push(item.clone()) {
                    count(&tier.counters.dropped, 1);
                }
            }
        }
    }
}

/// Takes copies down to one tier, for as long as its runtime runs.
pub(super) async fn serve(shared: Arc<Shared>, number: usize) {
    let stores = Arc::new(Semaphore::new(STORES));
    loop {
        let Ok(permit) = Arc::clone(&stores).acquire_owned().await else {
            return;
        };
        let (store_number, items) = shared.tiers[number].copies.next().await;
        let shared = Arc::clone(&shared);
        tokio::spawn(async move {
            store(&shared, number, store_number, items).await;
            drop(permit);
        });
    }
}

async fn store(shared: &Shared, number: usize, store_number: u64, items: Vec<OfferItem>) {
    let tier = &shared.tiers[number];
    let lens: Vec<u64> = items.iter().map(|item| item.slot.len()).collect();
    let item = |OfferItem { key, parent, slot }| {
        let item = StoreItem::new(key, slot);
        match parent {
            Some(parent) => item.with_parent(parent),
            None => item,
        }
    };
    let items = items.into_iter().map(item).collect();
    let deadline = Instant::now() + shared.store_deadline;
    let stored = tier.backend.store(items, deadline).await;
    let counters = &tier.counters;
    for (stored, len) in stored.iter().zip(&lens) {
        match stored {
            Ok(Stored::Written) => {
                count(&counters.copied, 1);
                count(&counters.copied_bytes, *len);
            }
            Ok(Stored::Declined) => count(&counters.declined, 1),
            Ok(_) => {}
            Err(_) => count(&counters.copy_failed, 1),
        }
    }
    tier.copies.ended(store_number, lens.iter().sum());
}
