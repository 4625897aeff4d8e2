//! Notices: the end of the stores of a request, for proxies that wait for it.
//!
//! A request is watched from its first lookup, which names its chunks. It counts as stored once
//! each of its ranks has had all of them in DRAM, and as failed if its session ends without that.

use std::collections::HashMap;
use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use lmc_engine::{CacheEngine, ChunkEvent, DRAM, EventSink, Rank};
use lmc_key::{ChunkHash, ChunkKey, ClearsId, FoldState};
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::protocol::CacheKey;
use crate::service::ClientId;
use crate::service::prefills::LATE_STORES;

/// Maximum chunks of all watched requests, each counted for each rank; they take about 60 MB.
pub(super) const MAX_KEYS: usize = 1 << 18;
/// Keys that the engine is asked about at a time.
const KEYS_AT_A_TIME: usize = 1024;
/// Maximum arrivals that are kept between two looks; beyond that all chunks are looked at.
pub(super) const MAX_ARRIVALS: usize = 1 << 14;
/// Maximum notices of unwatched requests between two looks.
const MAX_REFUSED: usize = 4096;
/// Time for which a store may go on after its request has ended.
const LONGEST_COPY: Duration = Duration::from_secs(10);
/// Time between two looks at a request whose stores may still go on.
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// Longest time between two looks at watched requests: a clear wakes nothing.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The end of the stores of one request of an engine.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Notice {
    /// Id of the request, as the engine sends it.
    pub request_id: String,
    /// Id that a proxy gave the request (`lmcache.pd.id`); the decode engine's request may wait for
    /// it. Empty without one.
    pub pd_id: String,
    /// Model name as the engine gives it.
    pub model_name: String,
    /// Number of ranks that each chunk's KV cache is split over.
    pub world_size: u32,
    /// True if every rank has had every whole chunk of the prompt in DRAM. False if the request
    /// ended without that.
    pub is_stored: bool,
}

impl Notice {
    fn of(key: &CacheKey, pd_id: Option<Arc<str>>) -> Self {
        Self {
            request_id: key.request_id.clone(),
            pd_id: pd_id.map_or_else(String::new, |id| id.to_string()),
            model_name: key.model_name.clone(),
            world_size: key.world_size,
            is_stored: false,
        }
    }
}

/// A rank of a request in one of the layouts that it may be stored in, and the chunks that it lacks.
#[derive(Debug)]
struct RankProgress {
    rank: Rank,
    missing: usize,
}

/// A request whose chunks are being stored.
#[derive(Debug)]
struct Watched {
    client: ClientId,
    notice: Notice,
    clears: ClearsId,
    hashes: Vec<ChunkHash>,
    ranks: Vec<RankProgress>,
    /// Time from which the request's engine begins no more stores; `None` while the request is
    /// under way.
    over_at: Option<Instant>,
}

impl Watched {
    fn keys(&self) -> usize {
        self.ranks.len().max(1) * self.hashes.len().max(1)
    }

    /// Returns true if each rank has had each chunk, in one of its layouts.
    fn is_stored(&self) -> bool {
        (0..self.notice.world_size).all(|kv_rank| {
            let is_whole = |progress: &RankProgress| {
                u32::from(progress.rank.kv_rank) == kv_rank && progress.missing == 0
            };
            self.ranks.iter().any(is_whole)
        })
    }

    /// Returns true if nothing more is stored for the request. `has_stores` returns whether the
    /// server still carries out stores of a request.
    fn is_over(
        &self,
        has_stores: impl Fn(&str) -> bool,
        engine: &CacheEngine,
        now: Instant,
    ) -> bool {
        let Some(over_at) = self.over_at.filter(|over_at| *over_at <= now) else {
            return false;
        };
        let is_stored = || has_stores(&self.notice.request_id) || self.is_writing(engine);
        now >= over_at + LONGEST_COPY || !is_stored()
    }

    fn is_writing(&self, engine: &CacheEngine) -> bool {
        let incomplete = self.ranks.iter().filter(|progress| progress.missing > 0);
        let mut keys =
            incomplete.flat_map(|progress| self.hashes.iter().map(|hash| progress.rank.key(*hash)));
        keys.any(|key| engine.is_writing(self.clears, key))
    }
}

/// The watched requests, and the chunks that they lack.
#[derive(Debug, Default)]
struct Table {
    watched: HashMap<u64, Watched>,
    /// Numbers of the requests by connection and name. A preempted request begins again.
    by_name: HashMap<(ClientId, String), u64>,
    /// The requests that lack a chunk, each with the index of the rank.
    lacking: HashMap<ChunkKey, Vec<(u64, usize)>, FoldState>,
}

impl Table {
    fn begin(&mut self, number: u64, mut request: Watched, engine: &CacheEngine) {
        for (index, progress) in request.ranks.iter_mut().enumerate() {
            let keys: Vec<ChunkKey> = request
                .hashes
                .iter()
                .map(|hash| progress.rank.key(*hash))
                .collect();
            let there = each_in_dram(engine, request.clears, &keys);
            for (key, _) in keys.iter().zip(there).filter(|(_, there)| !there) {
                let lacking = self.lacking.entry(*key).or_default();
                // A client may name one chunk twice.
                if lacking.last() != Some(&(number, index)) {
                    lacking.push((number, index));
                    progress.missing += 1;
                }
            }
        }
        self.watched.insert(number, request);
    }

    /// Notes that a chunk has arrived in DRAM.
    fn arrived(&mut self, key: &ChunkKey, now: Instant) {
        for (number, index) in self.lacking.remove(key).unwrap_or_default() {
            let Some(request) = self.watched.get_mut(&number) else {
                continue;
            };
            request.ranks[index].missing -= 1;
            // The engine may not have stored the next chunk yet.
            request.over_at = request.over_at.map(|at| at.max(now + LATE_STORES));
        }
    }

    fn end(&mut self, number: u64) -> Option<Watched> {
        let request = self.watched.remove(&number)?;
        let name = (request.client, request.notice.request_id.clone());
        if self.by_name.get(&name) == Some(&number) {
            self.by_name.remove(&name);
        }
        for progress in request.ranks.iter().filter(|progress| progress.missing > 0) {
            for key in request.hashes.iter().map(|hash| progress.rank.key(*hash)) {
                if let Some(numbers) = self.lacking.get_mut(&key) {
                    numbers.retain(|(other, _)| *other != number);
                    if numbers.is_empty() {
                        self.lacking.remove(&key);
                    }
                }
            }
        }
        Some(request)
    }

    /// Finds chunks in DRAM whose arrival was not kept.
    fn look_at_all(&mut self, engine: &CacheEngine, now: Instant) {
        let keys: Vec<ChunkKey> = self.lacking.keys().copied().collect();
        let there = each_in_dram(engine, engine.clears_id(), &keys);
        let there = keys.iter().zip(there).filter(|(_, there)| *there);
        there.for_each(|(key, _)| self.arrived(key, now));
    }
}

/// Returns for each chunk whether it is in DRAM. Stores get their turn in between.
fn each_in_dram(engine: &CacheEngine, clears: ClearsId, keys: &[ChunkKey]) -> Vec<bool> {
    let parts = keys.chunks(KEYS_AT_A_TIME);
    parts
        .flat_map(|part| engine.are_in_dram(clears, part))
        .collect()
}

/// Begins, ends and arrivals since the last look.
#[derive(Debug, Default)]
struct News {
    begun: Vec<(u64, Watched)>,
    /// Ends of sessions, each with the time from which nothing more is stored; `None` if the
    /// request gets no notice.
    ended: Vec<(u64, Option<Instant>)>,
    refused: Vec<Notice>,
    /// Chunks that have arrived in DRAM.
    arrived: Vec<ChunkKey>,
    /// True if some arrivals were not kept.
    has_more: bool,
}

/// The news, and the bounds of what is watched.
#[derive(Debug, Default)]
struct Inbox {
    news: News,
    numbers: u64,
    /// Number of the server's own stores that run or wait, by the ids of their requests.
    stores: HashMap<String, usize>,
    /// Keys of all watched requests, and of the requests of each connection.
    keys: usize,
    by_client: HashMap<ClientId, usize>,
}

impl Inbox {
    /// Counts the keys of a request. Returns false where all connections together are at the limit, or one
    /// connection has three quarters of it.
    fn take_keys(&mut self, client: ClientId, keys: usize) -> bool {
        let of_client = self.by_client.get(&client).copied().unwrap_or(0);
        let most = MAX_KEYS - MAX_KEYS / 4;
        let fits =
            self.keys.saturating_add(keys) <= MAX_KEYS && of_client.saturating_add(keys) <= most;
        if fits {
            self.keys += keys;
            *self.by_client.entry(client).or_default() += keys;
        }
        fits
    }

    fn give_back_keys(&mut self, client: ClientId, keys: usize) {
        self.keys -= keys;
        if let Some(of_client) = self.by_client.get_mut(&client) {
            *of_client -= keys;
            if *of_client == 0 {
                self.by_client.remove(&client);
            }
        }
    }
}

/// The requests of engines, from their first lookups to their notices.
#[derive(Debug, Default)]
pub(super) struct Notices {
    inbox: Mutex<Inbox>,
    table: Mutex<Table>,
    /// Requests that are watched: without any, an arrival costs nothing.
    requests: AtomicUsize,
    /// Set when there is news.
    changed: Notify,
}

/// Notes the end of a request's session when it is dropped.
#[derive(Debug)]
pub(super) struct NoticeGuard {
    notices: Arc<Notices>,
    number: u64,
    is_cancelled: bool,
}

impl NoticeGuard {
    /// Ends the watch without a notice.
    pub(super) fn cancel(mut self) {
        self.is_cancelled = true;
    }
}

impl Drop for NoticeGuard {
    fn drop(&mut self) {
        let over_at = (!self.is_cancelled).then(|| Instant::now() + LATE_STORES);
        let mut inbox = self.notices.inbox.lock();
        inbox.news.ended.push((self.number, over_at));
        drop(inbox);
        self.notices.changed.notify_one();
    }
}

/// Counts a store that the server carries out, until it is dropped.
#[derive(Debug)]
pub(super) struct StoreCount {
    notices: Arc<Notices>,
    request_id: String,
}

impl Drop for StoreCount {
    fn drop(&mut self) {
        let mut inbox = self.notices.inbox.lock();
        if let Some(count) = inbox.stores.get_mut(&self.request_id) {
            *count -= 1;
            if *count == 0 {
                inbox.stores.remove(&self.request_id);
            }
        }
    }
}

impl Notices {
    /// Counts a store of a request that the server carries out itself, from the store's arrival.
    pub(super) fn count_store(self: &Arc<Self>, request_id: &str) -> StoreCount {
        let mut inbox = self.inbox.lock();
        *inbox.stores.entry(request_id.to_owned()).or_default() += 1;
        StoreCount {
            notices: Arc::clone(self),
            request_id: request_id.to_owned(),
        }
    }

    /// Watches a request whose first lookup was made after these clears. If too much is watched
    /// already, the request counts as failed.
    pub(super) fn begin(
        self: &Arc<Self>,
        client: ClientId,
        key: &CacheKey,
        pd_id: Option<Arc<str>>,
        clears: ClearsId,
        hashes: Vec<ChunkHash>,
        ranks: Vec<Rank>,
    ) -> Option<NoticeGuard> {
        let progress = |rank| RankProgress { rank, missing: 0 };
        let request = Watched {
            client,
            notice: Notice::of(key, pd_id),
            clears,
            hashes,
            ranks: ranks.into_iter().map(progress).collect(),
            over_at: None,
        };
        let mut inbox = self.inbox.lock();
        if !inbox.take_keys(client, request.keys()) {
            drop(inbox);
            self.refuse(request.notice);
            return None;
        }
        inbox.numbers += 1;
        let number = inbox.numbers;
        self.requests.fetch_add(1, Ordering::Relaxed);
        inbox.news.begun.push((number, request));
        drop(inbox);
        self.changed.notify_one();
        Some(NoticeGuard {
            notices: Arc::clone(self),
            number,
            is_cancelled: false,
        })
    }

    /// Queues the notice of a request that is not looked up: it has failed.
    pub(super) fn refuse_request(&self, key: &CacheKey, pd_id: Option<Arc<str>>) {
        self.refuse(Notice::of(key, pd_id));
    }

    fn refuse(&self, notice: Notice) {
        let mut inbox = self.inbox.lock();
        if inbox.news.refused.len() < MAX_REFUSED {
            inbox.news.refused.push(notice);
        }
        drop(inbox);
        self.changed.notify_one();
    }

    /// Waits until [`Self::take`] may return more.
    pub(super) async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Returns the notices that are due, and when to look again even if nothing changes.
    pub(super) fn take(
        &self,
        engine: &CacheEngine,
        now: Instant,
    ) -> (Vec<Notice>, Option<Instant>) {
        let mut table = self.table.lock();
        let news = mem::take(&mut self.inbox.lock().news);
        let mut notices = news.refused;
        let mut ended = Vec::new();
        // Arrivals go before the requests that have begun since: a new request finds the chunks
        // that are still there.
        for key in &news.arrived {
            table.arrived(key, now);
        }
        if news.has_more {
            table.look_at_all(engine, now);
        }
        for (number, request) in news.begun {
            let name = (request.client, request.notice.request_id.clone());
            if let Some(before) = table.by_name.insert(name, number) {
                // The earlier request continues as this one.
                ended.extend(table.end(before));
            }
            table.begin(number, request, engine);
        }
        for (number, over_at) in news.ended {
            match (over_at, table.watched.get_mut(&number)) {
                (Some(_), Some(request)) => request.over_at = over_at,
                (None, Some(_)) => ended.extend(table.end(number)),
                (_, None) => {}
            }
        }
        let clears = engine.clears_id();
        let has_stores = |request_id: &str| self.inbox.lock().stores.contains_key(request_id);
        let outcome = |(number, request): (&u64, &Watched)| {
            let is_stored = request.clears == clears && request.is_stored();
            let is_due =
                is_stored || request.clears != clears || request.is_over(has_stores, engine, now);
            is_due.then_some((*number, is_stored))
        };
        let due: Vec<(u64, bool)> = table.watched.iter().filter_map(outcome).collect();
        for (number, is_stored) in due {
            if let Some(request) = table.end(number) {
                notices.push(Notice {
                    is_stored,
                    ..request.notice.clone()
                });
                ended.push(request);
            }
        }
        self.forget(&ended);
        let over_at = table.watched.values().filter_map(|request| request.over_at);
        let over_at = over_at.map(|over_at| over_at.max(now + LOOK_AGAIN)).min();
        let next = (!table.watched.is_empty()).then_some(now + LOOK_EVERY);
        (
            notices,
            next.map(|next| over_at.map_or(next, |at| at.min(next))),
        )
    }

    /// Ends all watches. Returns the notices of the watched requests, as failed.
    pub(super) fn fail_all(&self) -> Vec<Notice> {
        let mut table = self.table.lock();
        let news = mem::take(&mut self.inbox.lock().news);
        let watched = mem::take(&mut *table).watched.into_values();
        let begun = news.begun.into_iter().map(|(_, request)| request);
        let ended: Vec<Watched> = watched.chain(begun).collect();
        self.forget(&ended);
        let failed = ended.into_iter().map(|request| request.notice);
        news.refused.into_iter().chain(failed).collect()
    }

    #[cfg(test)]
    pub(super) fn is_idle(&self) -> bool {
        let (table, inbox) = (self.table.lock(), self.inbox.lock());
        let maps = (
            table.watched.len(),
            table.by_name.len(),
            table.lacking.len(),
        );
        maps == (0, 0, 0)
            && (inbox.keys, inbox.by_client.len()) == (0, 0)
            && self.requests.load(Ordering::Relaxed) == 0
    }

    fn forget(&self, ended: &[Watched]) {
        if ended.is_empty() {
            return;
        }
        self.requests.fetch_sub(ended.len(), Ordering::Relaxed);
        let mut inbox = self.inbox.lock();
        for request in ended {
            inbox.give_back_keys(request.client, request.keys());
        }
    }
}

impl EventSink for Notices {
    fn changed(&self, event: &ChunkEvent<'_>) {
        let Some(space) = event.space.filter(|_| event.tier == DRAM) else {
            return;
        };
        if !event.change.is_arrival() || self.requests.load(Ordering::Relaxed) == 0 {
            return;
        }
        let mut inbox = self.inbox.lock();
        match inbox.news.arrived.len() < MAX_ARRIVALS {
            true => inbox.news.arrived.push(ChunkKey {
                space,
                ..*event.key
            }),
            false => inbox.news.has_more = true,
        }
        drop(inbox);
        self.changed.notify_one();
    }
}

#[cfg(test)]
mod model;
