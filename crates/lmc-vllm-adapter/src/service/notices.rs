//! Notices: a proxy learns that all ranks have stored the chunks of a request, or that they will not.

use std::collections::HashMap;
use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use lmc_engine::{CacheEngine, ChunkEvent, DRAM, EventSink, Rank};
use lmc_key::{ChunkHash, ChunkKey, ClearsId};
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::protocol::CacheKey;
use crate::service::prefills::LATE_STORES;

/// Chunks of all requests that are watched, at most, each counted once for all ranks: 32 MiB of hashes.
const MAX_CHUNKS: usize = 1 << 20;

/// Time for which a store that has begun may go on after its request has ended.
const LONGEST_COPY: Duration = Duration::from_secs(10);
/// Time between two looks at such a store.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// What became of the chunks of one request of an engine.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Notice {
    /// Id of the request, as the engine sends it.
    pub request_id: String,
    /// Id that its proxy gave it (`lmcache.pd.id`). Empty without one.
    pub pd_id: String,
    /// Model name as the engine gives it.
    pub model_name: String,
    /// Number of ranks that each chunk's KV cache is split over.
    pub world_size: u32,
    /// True if every rank had every whole chunk of the prompt in DRAM. False if the request has ended
    /// without that.
    pub is_stored: bool,
}

/// A request whose chunks are being stored.
#[derive(Debug)]
struct Watched {
    number: u64,
    notice: Notice,
    clears: ClearsId,
    hashes: Vec<ChunkHash>,
    /// The ranks, in each layout that they may be stored in, and the leading chunks that they have.
    ranks: Vec<(Rank, usize)>,
    /// Time from which its engine begins no more stores for it; none while it is under way.
    over_at: Option<Instant>,
    /// True if its chunks are not watched.
    is_refused: bool,
}

fn keys(rank: Rank, hashes: &[ChunkHash]) -> impl Iterator<Item = ChunkKey> {
    hashes.iter().map(move |&hash| ChunkKey {
        space: rank.space,
        kv_rank: rank.kv_rank,
        group: 0,
        hash,
    })
}

impl Watched {
    /// Returns true if every rank has every chunk in one of its layouts.
    fn is_stored(&mut self, engine: &CacheEngine) -> bool {
        if self.is_refused {
            return false;
        }
        for (rank, stored) in &mut self.ranks {
            let rest = keys(*rank, &self.hashes[*stored..]);
            *stored += engine.leading_in_dram(self.clears, rest);
        }
        (0..self.notice.world_size).all(|kv_rank| {
            let mut of_rank = self.ranks.iter();
            let is_whole = |(rank, stored): &(Rank, usize)| {
                u32::from(rank.kv_rank) == kv_rank && *stored == self.hashes.len()
            };
            self.hashes.is_empty() || of_rank.any(is_whole)
        })
    }

    /// Returns true if nothing more is stored for it.
    fn is_over(&self, engine: &CacheEngine, now: Instant) -> bool {
        let Some(over_at) = self.over_at.filter(|over_at| *over_at <= now) else {
            return self.is_refused;
        };
        let is_writing = |(rank, stored): &(Rank, usize)| {
            let next = keys(*rank, &self.hashes[*stored..]).next();
            next.is_some_and(|next| engine.is_writing(self.clears, next))
        };
        now >= over_at + LONGEST_COPY || !self.ranks.iter().any(is_writing)
    }
}

/// Requests that have begun and ended since the last look.
#[derive(Debug, Default)]
struct Changes {
    numbers: u64,
    begun: Vec<Watched>,
    ended: Vec<(u64, Instant)>,
}

/// The requests of engines, until their chunks are stored or will not be.
#[derive(Debug, Default)]
pub(super) struct Notices {
    changes: Mutex<Changes>,
    watched: Mutex<HashMap<u64, Watched>>,
    /// Requests that have no notice yet, so that others cost a commit nothing.
    requests: AtomicUsize,
    /// Their chunks.
    chunks: AtomicUsize,
    /// Set when a request has begun or ended, or a chunk has come.
    changed: Notify,
}

/// Says when a request ends: when this is dropped.
#[derive(Debug)]
pub(super) struct NoticeGuard {
    notices: Arc<Notices>,
    number: u64,
}

impl Drop for NoticeGuard {
    fn drop(&mut self) {
        let over_at = Instant::now() + LATE_STORES;
        let mut changes = self.notices.changes.lock();
        changes.ended.push((self.number, over_at));
        drop(changes);
        self.notices.changed.notify_one();
    }
}

impl Notices {
    /// Watches a request from its first lookup on, which was made after these clears. Where too many chunks
    /// are watched already, the request counts as failed.
    pub(super) fn begin(
        self: &Arc<Self>,
        key: &CacheKey,
        clears: ClearsId,
        hashes: &[ChunkHash],
        ranks: &[Rank],
    ) -> NoticeGuard {
        let watched = self.chunks.load(Ordering::Relaxed);
        let is_refused = watched.saturating_add(hashes.len()) > MAX_CHUNKS;
        let hashes = if is_refused { &[] } else { hashes };
        let number = self.add(key, clears, hashes, ranks, is_refused);
        NoticeGuard {
            notices: Arc::clone(self),
            number,
        }
    }

    /// Says of a request that is not looked up that it has failed.
    pub(super) fn refuse(&self, key: &CacheKey) {
        self.add(key, ClearsId::NONE, &[], &[], true);
    }

    fn add(
        &self,
        key: &CacheKey,
        clears: ClearsId,
        hashes: &[ChunkHash],
        ranks: &[Rank],
        is_refused: bool,
    ) -> u64 {
        self.chunks.fetch_add(hashes.len(), Ordering::Relaxed);
        self.requests.fetch_add(1, Ordering::Relaxed);
        let mut changes = self.changes.lock();
        changes.numbers += 1;
        let number = changes.numbers;
        changes.begun.push(Watched {
            number,
            notice: Notice {
                request_id: key.request_id.clone(),
                pd_id: key.configs.awaited.clone(),
                model_name: key.model_name.clone(),
                world_size: key.world_size,
                is_stored: false,
            },
            clears,
            hashes: hashes.to_vec(),
            ranks: ranks.iter().map(|rank| (*rank, 0)).collect(),
            over_at: None,
            is_refused,
        });
        drop(changes);
        self.changed.notify_one();
        number
    }

    /// Waits until [`Self::take`] may have more to tell.
    pub(super) async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Returns the notices that are due, and when to look again even if nothing changes.
    pub(super) fn take(
        &self,
        engine: &CacheEngine,
        now: Instant,
    ) -> (Vec<Notice>, Option<Instant>) {
        let mut watched = self.watched.lock();
        let Changes { begun, ended, .. } = {
            let mut changes = self.changes.lock();
            let numbers = changes.numbers;
            let none = Changes {
                numbers,
                ..Changes::default()
            };
            mem::replace(&mut *changes, none)
        };
        watched.extend(begun.into_iter().map(|one| (one.number, one)));
        for (number, over_at) in ended {
            if let Some(one) = watched.get_mut(&number) {
                one.over_at.get_or_insert(over_at);
            }
        }
        let clears = engine.clears_id();
        let mut notices = Vec::new();
        watched.retain(|_, one| {
            let is_stored = one.is_stored(engine);
            let fails = one.clears != clears || one.is_over(engine, now);
            if is_stored || fails {
                self.requests.fetch_sub(1, Ordering::Relaxed);
                self.chunks.fetch_sub(one.hashes.len(), Ordering::Relaxed);
                notices.push(Notice {
                    is_stored,
                    ..one.notice.clone()
                });
            }
            !is_stored && !fails
        });
        let over_at = watched.values().filter_map(|one| one.over_at);
        let next = over_at.map(|over_at| over_at.max(now + LOOK_AGAIN)).min();
        (notices, next)
    }
}

impl EventSink for Notices {
    fn changed(&self, event: &ChunkEvent<'_>) {
        if event.tier == DRAM
            && event.change.is_arrival()
            && self.requests.load(Ordering::Relaxed) > 0
        {
            self.changed.notify_one();
        }
    }

    fn any_changed(&self, _tier: &str) {
        self.changed.notify_one();
    }
}
