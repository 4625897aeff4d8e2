//! The tiers below DRAM: what goes down to them and comes up again.
//!
//! Everything here happens on threads of its own, behind the caller's back: a store never waits
//! for a copy, and a lookup is told later what has come up.

mod copy;
mod fetch;
mod permits;

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak, mpsc};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

use lmc_backend::{Backend, Health};
use lmc_backend_local::LocalTier;
use lmc_key::{ChunkKey, FoldState, SpaceId};
use parking_lot::{Mutex, RwLock, RwLockReadGuard};
use serde::Serialize;
use tokio::runtime::{Builder, Runtime};

use crate::TierHealth;
use crate::config::{EngineConfig, EngineError};
use copy::Copies;
pub(crate) use copy::OfferItem;
pub use fetch::Fetch;
pub(crate) use fetch::Source;
use permits::Permits;

/// What a tier below DRAM holds, and what went to and fro.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct LowerStatus {
    /// Name of the tier.
    pub tier: String,
    /// Chunks it holds.
    pub chunks: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Bytes it may hold.
    pub capacity: Option<u64>,
    /// Bytes of copies that are on their way down.
    pub queued_bytes: u64,
    /// Copies that it has taken.
    pub copied: u64,
    /// Their bytes.
    pub copied_bytes: u64,
    /// Copies that were dropped because too many were on their way.
    pub dropped: u64,
    /// Copies that it did not want, by its admission rule or for want of room.
    pub declined: u64,
    /// Copies that failed.
    pub copy_failed: u64,
    /// Chunks that came up.
    pub fetched: u64,
    /// Their bytes.
    pub fetched_bytes: u64,
    /// Chunks that should have come up and were not there, or not as they had been stored.
    pub fetch_missed: u64,
    /// Chunks that could not be read, or not in time.
    pub fetch_failed: u64,
    /// What the tier itself counted.
    pub counters: BTreeMap<&'static str, u64>,
}

/// What was counted of one tier.
#[derive(Debug, Default)]
struct Counters {
    copied: AtomicU64,
    copied_bytes: AtomicU64,
    dropped: AtomicU64,
    declined: AtomicU64,
    copy_failed: AtomicU64,
    fetched: AtomicU64,
    fetched_bytes: AtomicU64,
    fetch_missed: AtomicU64,
    fetch_failed: AtomicU64,
}

fn count(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}

#[derive(Debug)]
struct Tier {
    backend: Arc<dyn Backend>,
    copies: Copies,
    counters: Counters,
}

/// What the threads and the engine share.
#[derive(Debug)]
pub(crate) struct Shared {
    local: LocalTier,
    tiers: Vec<Tier>,
    /// Units of [`fetch::UNIT`] bytes that may be promoted at a time.
    permits: Permits,
    rising_units: u32,
    /// Chunks that prompts promote now.
    promoting: Mutex<HashSet<ChunkKey, FoldState>>,
    fetch_deadline: Duration,
    store_deadline: Duration,
    /// Written while DRAM and the queues of copies forget: nobody offers what they no longer have.
    forgetting: RwLock<()>,
    /// Clears under way. Meanwhile nothing comes up: what the tiers still have is to be forgotten.
    clearing: AtomicU64,
    /// Chunks that are being removed. Nor do those come up.
    removing: Mutex<Vec<Arc<HashSet<ChunkKey>>>>,
}

/// Time at the end of a close that copies leave to the tiers, at most.
const CLOSING: Duration = Duration::from_secs(1);

/// Chunks that did not get down to a tier.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Missed {
    /// For want of time.
    pub(crate) late: u64,
    /// Which the tier declined.
    pub(crate) declined: u64,
    /// For errors, and for want of room on the way.
    pub(crate) failed: u64,
}

/// Time beyond a deadline for those who had it to tell how far they came.
const ANSWER: Duration = Duration::from_secs(1);

/// The tiers below DRAM, with the threads that serve them.
pub(crate) struct Lower {
    shared: Arc<Shared>,
    /// `None` only while being dropped.
    runtime: Option<Runtime>,
}

impl Lower {
    pub(crate) fn start(
        local: LocalTier,
        backends: Vec<Arc<dyn Backend>>,
        config: &EngineConfig,
    ) -> Result<Self, EngineError> {
        let pool = local.pool().usage().capacity;
        let queue_bytes = config.copy_queue_bytes.unwrap_or(pool / 8);
        let units = config.fetch_bytes.unwrap_or(pool / 4) / fetch::UNIT;
        let rising_units = units.clamp(1, u64::from(u32::MAX >> 4)) as u32;
        let tier = |backend| Tier {
            backend,
            copies: Copies::new(queue_bytes),
            counters: Counters::default(),
        };
        let shared = Arc::new(Shared {
            local,
            tiers: backends.into_iter().map(tier).collect(),
            permits: Permits::new(rising_units),
            rising_units,
            promoting: Mutex::default(),
            fetch_deadline: config.fetch_deadline,
            store_deadline: config.store_deadline,
            forgetting: RwLock::new(()),
            clearing: AtomicU64::new(0),
            removing: Mutex::default(),
        });
        let runtime = Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("lmc-tiers")
            .enable_time()
            .build()?;
        for number in 0..shared.tiers.len() {
            runtime.spawn(copy::serve(Arc::clone(&shared), number));
        }
        Ok(Self {
            shared,
            runtime: Some(runtime),
        })
    }

    /// Offers chunks to every tier. Never waits: what is too much is dropped and counted.
    pub(crate) fn offer(&self, items: &[OfferItem]) {
        self.shared.offer(items);
    }

    /// Waits until so many bytes more may be on their way to every tier. False when the deadline
    /// came first.
    pub(crate) fn wait_for_room(&self, bytes: u64, deadline: Instant) -> bool {
        let tiers = &self.shared.tiers;
        while !tiers.iter().all(|tier| tier.copies.has_room(bytes)) {
            if Instant::now() >= deadline {
                return false;
            }
            thread::sleep(copy::LOOK);
        }
        Instant::now() < deadline
    }

    /// Copies that did not get down so far.
    pub(crate) fn missed(&self) -> Missed {
        self.shared.missed()
    }

    /// While this is held nothing is forgotten. Whoever offers what was found, committed or evicted
    /// holds it over both.
    pub(crate) fn hold(&self) -> RwLockReadGuard<'_, ()> {
        self.shared.forgetting.read()
    }

    /// For whoever offers chunks and must not keep the tiers alive.
    pub(crate) fn downgrade(&self) -> Weak<Shared> {
        Arc::downgrade(&self.shared)
    }

    fn runtime(&self) -> &Runtime {
        self.runtime.as_ref().expect("it lives as long as this")
    }

    /// How each tier is.
    pub(crate) fn health(&self) -> impl Iterator<Item = TierHealth> {
        self.shared.tiers.iter().map(|tier| TierHealth {
            tier: tier.backend.name().to_owned(),
            fault: match tier.backend.health() {
                Health::Degraded { reason } | Health::Down { reason } => Some(reason),
                _ => None,
            },
        })
    }

    pub(crate) fn status(&self) -> Vec<LowerStatus> {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let status = |tier: &Tier| {
            let deadline = Instant::now() + Duration::from_secs(1);
            let usage = now_or_never(tier.backend.usage(deadline));
            let usage = usage.and_then(Result::ok).unwrap_or_default();
            let counters = &tier.counters;
            LowerStatus {
                tier: tier.backend.name().to_owned(),
                chunks: usage.chunks,
                bytes: usage.bytes,
                capacity: usage.capacity,
                queued_bytes: tier.copies.queued(),
                copied: read(&counters.copied),
                copied_bytes: read(&counters.copied_bytes),
                dropped: read(&counters.dropped),
                declined: read(&counters.declined),
                copy_failed: read(&counters.copy_failed),
                fetched: read(&counters.fetched),
                fetched_bytes: read(&counters.fetched_bytes),
                fetch_missed: read(&counters.fetch_missed),
                fetch_failed: read(&counters.fetch_failed),
                counters: tier.backend.counters().into_iter().collect(),
            }
        };
        self.shared.tiers.iter().map(status).collect()
    }

    /// Forgets everything that is below, and first does what `above` does. What is being copied
    /// or read meanwhile is not found afterwards. Waits, at most until the deadline.
    ///
    /// How many chunks went from below, and whether all did.
    pub(crate) fn clear<T>(&self, deadline: Instant, above: impl FnOnce() -> T) -> (T, u64, bool) {
        self.shared.clearing.fetch_add(1, Ordering::SeqCst);
        let done = {
            let _alone = self.shared.forgetting.write();
            for tier in &self.shared.tiers {
                tier.copies.drop_queued();
            }
            above()
        };
        let shared = Arc::clone(&self.shared);
        let cleared = self.wait(
            deadline + ANSWER,
            async move { shared.clear(deadline).await },
        );
        self.shared.clearing.fetch_sub(1, Ordering::SeqCst);
        let (removed, all) = cleared.unwrap_or((0, false));
        (done, removed, all)
    }

    /// Forgets chunks below, and first does what `above` does. What is being copied or read
    /// meanwhile is not found afterwards. Waits, at most until the deadline.
    ///
    /// Whether each was in any tier, and whether every tier has forgotten them all.
    pub(crate) fn remove<T>(
        &self,
        keys: &[ChunkKey],
        deadline: Instant,
        above: impl FnOnce() -> T,
    ) -> (T, Vec<bool>, bool) {
        let removed: Arc<HashSet<ChunkKey>> = Arc::new(keys.iter().copied().collect());
        self.shared.removing.lock().push(Arc::clone(&removed));
        let done = {
            let _alone = self.shared.forgetting.write();
            let tiers = self.shared.tiers.iter();
            tiers.for_each(|tier| tier.copies.drop_queued_of(|key| removed.contains(key)));
            above()
        };
        let shared = Arc::clone(&self.shared);
        let asked: Arc<[ChunkKey]> = keys.into();
        let below = self.wait(deadline + ANSWER, async move {
            let (mut any, mut all) = (vec![false; asked.len()], true);
            for tier in &shared.tiers {
                let under_way = tier.copies.under_way();
                let mut removed = tier.backend.remove(&asked, deadline).await;
                for (any, removed) in any.iter_mut().zip(&removed) {
                    *any |= matches!(removed, Ok(true));
                }
                if under_way {
                    // What was being copied is there once its store has ended.
                    all &= tier.copies.settled(deadline).await;
                    removed = tier.backend.remove(&asked, deadline).await;
                }
                all &= removed.iter().all(Result::is_ok);
            }
            (any, all)
        });
        let over = |set: &Arc<_>| Arc::ptr_eq(set, &removed);
        self.shared.removing.lock().retain(|set| !over(set));
        let (below, all) = below.unwrap_or_else(|| (vec![false; keys.len()], false));
        (done, below, all)
    }

    /// Drops queued copies of some spaces.
    pub(crate) fn drop_copies_of(&self, spaces: &HashSet<SpaceId>) {
        for tier in &self.shared.tiers {
            let of_spaces = |key: &ChunkKey| spaces.contains(&key.space);
            tier.copies.drop_queued_of(of_spaces);
        }
    }

    /// Bytes of memory that copies hold.
    pub(crate) fn queued(&self) -> u64 {
        // One slot may be on its way to several tiers.
        let queued = self.shared.tiers.iter().map(|tier| tier.copies.queued());
        queued.max().unwrap_or(0)
    }

    /// Time that a prompt has to come up.
    pub(crate) fn fetch_deadline(&self) -> Duration {
        self.shared.fetch_deadline
    }

    /// Waits until all copies are down, then closes the tiers. Each that could not, and why; and
    /// what did not get down so far, with what was on its way when there was no more time for it.
    pub(crate) fn close(&self, deadline: Instant) -> (Vec<(String, String)>, Missed) {
        let shared = Arc::clone(&self.shared);
        let left = deadline.saturating_duration_since(Instant::now());
        // What is written then is put in order.
        let copies_until = deadline - (left / 8).min(CLOSING);
        let closed = self.wait(deadline + ANSWER, async move {
            let (mut failed, mut late) = (Vec::new(), 0);
            for tier in &shared.tiers {
                tier.copies.idle(copies_until).await;
            }
            for tier in &shared.tiers {
                late += tier.copies.drop_queued();
                if let Err(error) = tier.backend.close(deadline).await {
                    failed.push((tier.backend.name().to_owned(), error.to_string()));
                }
            }
            for tier in &shared.tiers {
                // What a tier was given it answers when it is closed.
                tier.copies.idle(Instant::now() + ANSWER / 4).await;
                late += tier.copies.left();
            }
            let missed = shared.missed();
            (failed, Missed { late, ..missed })
        });
        closed.unwrap_or_else(|| {
            let why = "not closed in time".to_owned();
            let late = self
                .shared
                .tiers
                .iter()
                .map(|tier| tier.copies.left())
                .sum();
            let missed = self.shared.missed();
            (vec![("tiers".to_owned(), why)], Missed { late, ..missed })
        })
    }

    /// Runs something on the tiers' threads and waits for it. `None` when it takes too long.
    fn wait<T: Send + 'static>(
        &self,
        deadline: Instant,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Option<T> {
        let (sender, receiver) = mpsc::sync_channel(1);
        let task = self.runtime().spawn(async move {
            // Whoever waited may have given up.
            let _ = sender.send(work.await);
        });
        let left = deadline.saturating_duration_since(Instant::now());
        let done = receiver.recv_timeout(left).ok();
        if done.is_none() {
            task.abort();
        }
        done
    }
}

impl Shared {
    fn missed(&self) -> Missed {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let mut missed = Missed::default();
        for Tier { counters, .. } in &self.tiers {
            missed.declined += read(&counters.declined);
            missed.failed += read(&counters.dropped) + read(&counters.copy_failed);
        }
        missed
    }

    async fn clear(&self, deadline: Instant) -> (u64, bool) {
        let (mut gone, mut all) = (0, true);
        for tier in &self.tiers {
            let under_way = tier.copies.under_way();
            let mut cleared = tier.backend.clear(deadline).await;
            gone += *cleared.as_ref().unwrap_or(&0);
            if under_way {
                // A copy may have been on its way to the tier, and come there after its clear.
                all &= tier.copies.settled(deadline).await;
                cleared = tier.backend.clear(deadline).await;
                gone += *cleared.as_ref().unwrap_or(&0);
            }
            all &= cleared.is_ok();
        }
        (gone, all)
    }
}

impl fmt::Debug for Lower {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Lower").field(&self.shared).finish()
    }
}

impl Drop for Lower {
    fn drop(&mut self) {
        let Some(runtime) = self.runtime.take() else {
            return;
        };
        // The last handle may go on one of the runtime's own threads (a fetch that ends): it
        // cannot wait there for itself.
        if tokio::runtime::Handle::try_current().is_ok() {
            runtime.shutdown_background();
        } else {
            runtime.shutdown_timeout(Duration::from_secs(1));
        }
    }
}

/// The outcome of something that need not wait; `None` when it would.
fn now_or_never<T>(work: impl Future<Output = T>) -> Option<T> {
    match pin!(work).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(done) => Some(done),
        Poll::Pending => None,
    }
}
