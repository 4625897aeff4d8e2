//! [`RemoteTier`]: a store as a tier of the engine.

mod breaker;
mod claims;
mod clears;
mod counters;
mod list;
#[cfg(all(test, feature = "conformance"))]
mod model;
mod read;
mod recent;
mod refusals;
mod spaces;
mod stale;
mod write;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use lmc_backend::{
    Answers, Backend, BackendError, BoxFuture, Cleared, Clears, Cursor, Health, LoadItem, Loaded,
    LocateHint, Located, Page, ReadRate, Sharing, StoreItem, Stored, Unavailable, Usage,
    WriteBackend, now,
};
use lmc_key::{ChunkKey, ClearsId, SpaceId};
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

use self::breaker::{Attempt, Paths};
use self::claims::Claims;
use self::clears::Knowledge;
use self::counters::Counters;
use self::list::Listings;
use self::recent::RecentKeys;
use self::refusals::Refusals;
use self::spaces::Spaces;
pub use self::stale::StaleDeleted;
use crate::clock::BootClock;
use crate::format::{ChunkFolder, SpaceRecord};
use crate::store::{Store, StoreError};

/// Lookups that may be under way at a time.
const MAX_LOOKUPS: usize = 64;
/// Damaged values that are remembered, and for how long.
const DAMAGED: (Duration, usize) = (Duration::from_secs(60), 4096);

/// Keys that are remembered as touched.
const MAX_TOUCHED: usize = 65_536;
/// Time before a key is touched again, where its store keeps it for twice as long or longer.
const TOUCH_PAUSE: Duration = Duration::from_secs(3600);

/// Settings of a [`RemoteTier`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RemoteConfig {
    /// Name of the tier in logs and metrics. Default: `remote`.
    pub name: String,
    /// Time for which a key that the store does not have is not asked for again. Default: 2 s.
    pub absent_ttl: Duration,
    /// Keys that are remembered as absent, at most. Default: 65,536.
    pub max_absent: usize,
    /// Time that the store has to answer before that counts as a failure, also when the caller
    /// waits for less. Default: 2 s.
    pub timeout: Duration,
    /// Pause between two reads of the clears that other daemons have passed on. The store is used
    /// only while they were read within three of it. Default: 2 s.
    pub clears_interval: Duration,
    /// Clock that says how long ago they were read. Default: `CLOCK_BOOTTIME`.
    pub boot_clock: BootClock,
    /// Pause before the clears are read again after a failure, and before a request tries a path of the
    /// store that was taken out: at first, and at most. Default: 250 ms and 15 s.
    pub probe_pause: (Duration, Duration),
}

impl RemoteConfig {
    /// Returns the settings of the nth store of a program, counted from 0: named `remote`, `remote2`,
    /// `remote3`.
    pub fn nth(number: usize) -> Self {
        let mut this = Self::default();
        if number > 0 {
            this.name += &(number + 1).to_string();
        }
        this
    }
}

impl Default for RemoteConfig {
    fn default() -> Self {
        Self {
            name: "remote".to_owned(),
            absent_ttl: Duration::from_secs(2),
            max_absent: 65_536,
            timeout: Duration::from_secs(2),
            clears_interval: Duration::from_secs(2),
            boot_clock: BootClock::default(),
            probe_pause: (Duration::from_millis(250), Duration::from_secs(15)),
        }
    }
}

/// A shared store as a tier of the engine.
///
/// Every operation runs as a task of the runtime that the tier was started on, so that it may be
/// awaited on any other.
#[derive(Debug)]
pub struct RemoteTier {
    shared: Arc<Shared>,
    /// The task that keeps the clears in step, and the one that describes spaces; they end with the
    /// tier.
    minders: Mutex<Vec<AbortOnDropHandle<()>>>,
}

/// The state that the tier and its tasks share.
#[derive(Debug)]
struct Shared {
    store: Arc<dyn Store>,
    config: RemoteConfig,
    runtime: Handle,
    /// Tasks that run to their end although their caller has left.
    tasks: TaskTracker,
    is_closed: AtomicBool,
    paths: Paths,
    clears: Knowledge,
    spaces: Spaces,
    absent: RecentKeys,
    /// Keys whose value was found damaged: absent for a minute, unless they are stored here again.
    damaged: RecentKeys,
    /// Keys that were touched.
    touched: RecentKeys,
    refusals: Refusals,
    claims: Arc<Claims>,
    lookups: Semaphore,
    listings: Listings,
    rate: ReadRate,
    counters: Counters,
}

impl RemoteTier {
    /// Starts a tier, with the clears that the daemon has carried out. It answers
    /// [`BackendError::Unavailable`] until the clears of other daemons were read from the store.
    pub fn start(
        config: RemoteConfig,
        store: Arc<dyn Store>,
        clears: Arc<Clears>,
        runtime: Handle,
    ) -> Self {
        let shared = Shared::new(config, store, clears, runtime);
        let minding = shared.spawn(Arc::clone(&shared).mind());
        let describing = shared.spawn(Arc::clone(&shared).describe_spaces());
        Self {
            shared,
            minders: Mutex::new(vec![minding, describing]),
        }
    }
    /// Describes the spaces that chunks are stored in, in the background, by a function that knows
    /// their fields. It is given the name of a space in keys ([`SpaceId::after`]), and the digest of
    /// the clears that is in there. Only the first call counts; without one no space is described.
    pub fn describe_spaces(
        &self,
        describe: impl Fn(SpaceId, ClearsId) -> Option<SpaceRecord> + Send + Sync + 'static,
    ) {
        self.shared.spaces.describe_by(Box::new(describe));
    }

    /// Deletes the chunks in the store that no daemon asks for any more, page by page, and reports its
    /// progress after each: those of other generations, and those that clears came after. Ends with
    /// its caller.
    ///
    /// # Errors
    /// [`BackendError`] at the first page that the store fails; what was deleted until then was
    /// reported.
    pub async fn delete_stale(
        &self,
        progress: impl Fn(StaleDeleted) + Send + Sync + 'static,
    ) -> Result<StaleDeleted, BackendError> {
        let deleting = Arc::clone(&self.shared).delete_stale(progress);
        let deleted = self.shared.spawn(deleting).await;
        deleted.unwrap_or(Err(BackendError::Closed))
    }

    /// Waits until the store has answered once, so that the clears of others are known. Returns
    /// false if the deadline came first.
    pub async fn ready(&self, deadline: Instant) -> bool {
        let shared = Arc::clone(&self.shared);
        let wait = async move {
            let ready = shared.clears.wait_until_read();
            tokio::time::timeout_at(deadline.into(), ready)
                .await
                .is_ok()
        };
        self.shared.spawn(wait).await.unwrap_or(false)
    }
}

impl Shared {
    fn new(
        config: RemoteConfig,
        store: Arc<dyn Store>,
        clears: Arc<Clears>,
        runtime: Handle,
    ) -> Arc<Self> {
        Arc::new(Self {
            paths: Paths::new(&config),
            clears: Knowledge::new(clears, config.boot_clock.now()),
            spaces: Spaces::default(),
            absent: RecentKeys::new(config.absent_ttl, config.max_absent),
            damaged: RecentKeys::new(DAMAGED.0, DAMAGED.1),
            touched: RecentKeys::new(touch_pause(store.touch_age()), MAX_TOUCHED),
            refusals: Refusals::new(&config),
            claims: Arc::default(),
            lookups: Semaphore::new(MAX_LOOKUPS),
            listings: Listings::default(),
            rate: ReadRate::default(),
            counters: Counters::default(),
            tasks: TaskTracker::new(),
            is_closed: AtomicBool::new(false),
            store,
            config,
            runtime,
        })
    }

    /// Returns the folder of the chunks that an operation which begins now is about, or the reason why
    /// none can begin on any path.
    fn check(&self) -> Result<ChunkFolder, BackendError> {
        if self.is_closed.load(Ordering::Acquire) {
            return Err(BackendError::Closed);
        }
        let folder = self.folder();
        Ok(folder.map_err(|reason| Unavailable { reason })?)
    }

    /// Runs a task of the tier that ends with its caller.
    fn spawn<T: Send + 'static>(
        &self,
        task: impl Future<Output = T> + Send + 'static,
    ) -> AbortOnDropHandle<T> {
        AbortOnDropHandle::new(self.runtime.spawn(task))
    }

    /// Runs a task of the tier to its end.
    fn spawn_tracked(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.tasks.spawn_on(task, &self.runtime);
    }

    /// Notes the outcome of a batch: one success shows that the path works.
    fn note<T>(&self, mut attempt: Attempt, results: &[Result<T, StoreError>]) {
        if results.iter().any(Result::is_ok) {
            attempt.succeeded();
        } else if let Some(Err(error)) = results.last() {
            self.note_failure(&mut attempt, error);
        }
    }

    fn note_failure(&self, attempt: &mut Attempt, error: &StoreError) {
        if attempt.failed(error, now()) {
            self.counters.failed.add(1);
        }
    }

    /// Notes the failure of a write of `len` bytes. A refusal does not take writes out: the next one may
    /// be smaller, or find capacity.
    fn note_failed_write(&self, attempt: &mut Attempt, error: &StoreError, len: u64) {
        match error.is_refusal() {
            true => {
                self.counters.failed.add(1);
                self.refusals.refused(error, len, now());
            }
            false => self.note_failure(attempt, error),
        }
    }

    /// Notes the outcome of requests that prove nothing of any path, such as removals.
    fn note_aside<T>(&self, results: &[Result<T, StoreError>]) {
        for error in results.iter().filter_map(|result| result.as_ref().err()) {
            self.counters.failed.add(1);
            self.refusals.refused(error, 0, now());
        }
    }
}

/// Returns the time before a key of a store is touched again. A value is touched from `touch_age` on,
/// which is at most half of its time, so a pause of that length lets none expire that is read later.
fn touch_pause(touch_age: Option<Duration>) -> Duration {
    touch_age.map_or(TOUCH_PAUSE, |age| TOUCH_PAUSE.min(age))
}

/// Returns one error for each key of a batch.
fn each<T>(len: usize, error: &BackendError) -> Vec<Result<T, BackendError>> {
    (0..len).map(|_| Err(same(error))).collect()
}

/// Returns an error again that stops a whole batch.
fn same(error: &BackendError) -> BackendError {
    match error {
        BackendError::Deadline => BackendError::Deadline,
        BackendError::Closed => BackendError::Closed,
        other => Unavailable {
            reason: match other {
                BackendError::Unavailable(unavailable) => unavailable.reason.clone(),
                other => other.to_string(),
            },
        }
        .into(),
    }
}

impl Backend for RemoteTier {
    fn name(&self) -> &str {
        &self.shared.config.name
    }

    fn writer(&self) -> Option<&dyn WriteBackend> {
        Some(self)
    }

    fn sharing(&self) -> Sharing {
        Sharing::Shared
    }

    fn locate<'a>(
        &'a self,
        keys: &'a [ChunkKey],
        hint: &'a LocateHint,
        deadline: Instant,
    ) -> BoxFuture<'a, Vec<Result<Located, BackendError>>> {
        if hint.sources_only {
            let absent = keys.iter().map(|_| Ok(Located::Absent)).collect();
            return Box::pin(std::future::ready(absent));
        }
        Box::pin(self.shared.locate(keys, deadline))
    }

    fn load(&self, items: Vec<LoadItem>, deadline: Instant) -> Answers<'_, Loaded> {
        self.shared.load(items, deadline)
    }

    /// Passes the clears on to the daemons that use the store. They count here at once, whether the
    /// store answers or not, and are passed on as soon as it does.
    fn clear(
        &self,
        clears: Arc<Clears>,
        deadline: Instant,
    ) -> BoxFuture<'_, Result<Cleared, BackendError>> {
        Box::pin(self.shared.clear(clears, deadline))
    }

    fn clears(&self) -> Arc<Clears> {
        self.shared.clears.all()
    }

    fn usage(&self) -> Option<Usage> {
        None
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        let mut counters = self.shared.counters.named();
        counters.extend(self.shared.paths.trips());
        counters
    }

    fn health(&self) -> Health {
        if self.shared.is_closed.load(Ordering::Acquire) {
            return Health::Down {
                reason: "closed".to_owned(),
            };
        }
        let (now, paths) = (now(), &self.shared.paths);
        let unknown = self.shared.folder().err();
        if let Some(reason) = unknown.or_else(|| paths.lookups.fault(now)) {
            return Health::Down { reason };
        }
        let refused = self.shared.refusals.fault();
        let faults = [paths.loads.fault(now), paths.writes.fault(now), refused];
        let faults: Vec<String> = faults.into_iter().flatten().collect();
        match faults.is_empty() {
            true => Health::Ready,
            false => Health::Degraded {
                reason: faults.join("; "),
            },
        }
    }

    fn close(&self, deadline: Instant) -> BoxFuture<'_, Result<(), BackendError>> {
        self.shared.is_closed.store(true, Ordering::Release);
        let minders = std::mem::take(&mut *self.minders.lock());
        let shared = Arc::clone(&self.shared);
        let closing = self.shared.spawn(async move {
            drop(minders);
            shared.tasks.close();
            // What still runs then was not acknowledged.
            let ended = tokio::time::timeout_at(deadline.into(), shared.tasks.wait()).await;
            shared.store.close(deadline).await;
            ended.map_err(|_| BackendError::Deadline)
        });
        Box::pin(async move { closing.await.unwrap_or(Err(BackendError::Closed)) })
    }
}

impl WriteBackend for RemoteTier {
    fn store(
        &self,
        items: Vec<StoreItem>,
        deadline: Instant,
    ) -> Answers<'_, Result<Stored, BackendError>> {
        self.shared.store(items, deadline)
    }

    fn remove<'a>(
        &'a self,
        keys: &'a [ChunkKey],
        deadline: Instant,
    ) -> BoxFuture<'a, Vec<Result<bool, BackendError>>> {
        Box::pin(self.shared.remove(keys, deadline))
    }

    fn list(
        &self,
        cursor: Cursor,
        limit: usize,
        deadline: Instant,
    ) -> BoxFuture<'_, Result<Page, BackendError>> {
        Box::pin(self.shared.list(cursor, limit, deadline))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_touched_once_an_hour_where_its_time_allows_that_and_before_it_expires() {
        let minutes = |n: u64| Duration::from_secs(60 * n);
        for (age, pause) in [(1, 1), (59, 59), (60, 60), (10_000, 60)] {
            assert_eq!(touch_pause(Some(minutes(age))), minutes(pause), "{age}");
        }
        assert_eq!(touch_pause(None), minutes(60));
    }
}
