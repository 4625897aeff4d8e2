//! [`RemoteTier`]: a store as a tier of the engine.

mod access;
mod breaker;
mod claims;
mod clears;
mod config;
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
use std::time::{Duration, Instant};

use lmc_backend::{
    Answers, Backend, BackendError, BoxFuture, Cleared, Clears, Cursor, Health, Host, LoadItem,
    Loaded, LocateHint, Located, Page, Sharing, StoreItem, Stored, Usage, WriteBackend,
};
use lmc_key::ChunkKey;
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio_util::task::AbortOnDropHandle;

use self::access::StoreAccess;
use self::clears::ClearsSync;
pub use self::config::{RemoteConfig, SaltDigest};
use self::list::Listings;
use self::read::ValueReader;
use self::recent::RecentKeys;
use self::spaces::SpaceDescriptions;
pub use self::stale::StaleDeleted;
use self::write::ValueWriter;
use crate::store::Store;

/// Time for which a damaged value counts as absent, and most keys of such values.
const DAMAGED: (Duration, usize) = (Duration::from_secs(60), 4096);

/// A shared store as a tier of the engine.
///
/// Every operation runs as a task of the runtime on which the tier was started, so that it may be awaited on
/// any runtime.
#[derive(Debug)]
pub struct RemoteTier {
    access: Arc<StoreAccess>,
    clears: Arc<ClearsSync>,
    spaces: Arc<SpaceDescriptions>,
    reader: Arc<ValueReader>,
    writer: Arc<ValueWriter>,
    listings: Arc<Listings>,
    /// The task that keeps the clears in step, and the task that describes spaces. They end with the tier.
    tasks: Mutex<Vec<AbortOnDropHandle<()>>>,
}

impl RemoteConfig {
    /// Starts a tier. It answers with [`BackendError::Unavailable`] until the clears of other daemons were
    /// read from the store. Spaces in which chunks are stored are described in the store, if the host knows
    /// their fields ([`Host::describe`]).
    pub fn start(self, store: Arc<dyn Store>, host: Arc<dyn Host>, runtime: Handle) -> RemoteTier {
        let this = RemoteTier::new(self, store, host, runtime);
        let syncing = Arc::clone(&this.clears).keep_in_step();
        let describing = Arc::clone(&this.spaces).describe_all();
        this.tasks
            .lock()
            .extend([this.access.spawn(syncing), this.access.spawn(describing)]);
        this
    }
}

impl RemoteTier {
    /// Makes a tier without its tasks.
    fn new(
        config: RemoteConfig,
        store: Arc<dyn Store>,
        host: Arc<dyn Host>,
        runtime: Handle,
    ) -> Self {
        let absent = Arc::new(RecentKeys::new(config.absent_ttl, config.max_absent));
        let damaged = Arc::new(RecentKeys::new(DAMAGED.0, DAMAGED.1));
        let access = Arc::new(StoreAccess::new(config, store, runtime));
        let clears = Arc::new(ClearsSync::new(&access, host.clears()));
        let spaces = Arc::new(SpaceDescriptions::new(&access, &clears, host));
        let reader = ValueReader::new(&access, &clears, &absent, &damaged);
        let writer = ValueWriter::new(&access, &clears, &spaces, &absent, &damaged);
        Self {
            reader: Arc::new(reader),
            writer: Arc::new(writer),
            listings: Arc::new(Listings::new(&access, &clears)),
            access,
            clears,
            spaces,
            tasks: Mutex::default(),
        }
    }

    /// Deletes the chunks in the store that no daemon looks for any more: chunks of other generations, and
    /// chunks from before a clear. Works page by page, and reports its progress after each page. Ends with
    /// its caller.
    ///
    /// # Errors
    /// [`BackendError`] at the first page that fails; deletions before that were reported.
    pub async fn delete_stale(
        &self,
        progress: impl Fn(StaleDeleted) + Send + Sync + 'static,
    ) -> Result<StaleDeleted, BackendError> {
        let (access, clears) = (Arc::clone(&self.access), Arc::clone(&self.clears));
        let deleting = stale::delete_stale(access, clears, progress);
        let deleted = self.access.spawn(deleting).await;
        deleted.unwrap_or(Err(BackendError::Closed))
    }

    /// Waits until the store has answered once, so that the clears of other daemons are known. Returns false
    /// if the deadline passed first.
    pub async fn ready(&self, deadline: Instant) -> bool {
        let clears = Arc::clone(&self.clears);
        let wait = async move {
            let ready = clears.wait_until_read();
            tokio::time::timeout_at(deadline.into(), ready)
                .await
                .is_ok()
        };
        self.access.spawn(wait).await.unwrap_or(false)
    }
}

impl Backend for RemoteTier {
    fn name(&self) -> &str {
        &self.access.config.name
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
        Box::pin(self.reader.locate(keys, deadline))
    }

    fn load(&self, items: Vec<LoadItem>, deadline: Instant) -> Answers<'_, Loaded> {
        self.reader.load(items, deadline)
    }

    /// Passes the clears on to the daemons that use the store. They take effect here at once, even if the
    /// store does not answer, and are passed on as soon as it does.
    fn clear(
        &self,
        clears: Arc<Clears>,
        deadline: Instant,
    ) -> BoxFuture<'_, Result<Cleared, BackendError>> {
        Box::pin(self.clears.clear(clears, deadline))
    }

    fn clears(&self) -> Arc<Clears> {
        self.clears.all()
    }

    fn usage(&self) -> Option<Usage> {
        None
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        let mut counters = self.access.counters.named();
        counters.extend(self.access.paths.trips());
        counters
    }

    fn health(&self) -> Health {
        if self.access.check_open().is_err() {
            return Health::Down {
                reason: "the tier is closed: the server is stopping".to_owned(),
            };
        }
        self.access.health(self.clears.folder().err())
    }

    fn close(&self, deadline: Instant) -> BoxFuture<'_, Result<(), BackendError>> {
        self.access.set_closed();
        let tasks = std::mem::take(&mut *self.tasks.lock());
        let access = Arc::clone(&self.access);
        let closing = self.access.spawn(async move {
            drop(tasks);
            access.close(deadline).await
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
        self.writer.store(items, deadline)
    }

    fn remove<'a>(
        &'a self,
        keys: &'a [ChunkKey],
        deadline: Instant,
    ) -> BoxFuture<'a, Vec<Result<bool, BackendError>>> {
        Box::pin(self.writer.remove(keys, deadline))
    }

    fn list(
        &self,
        cursor: Cursor,
        limit: usize,
        deadline: Instant,
    ) -> BoxFuture<'_, Result<Page, BackendError>> {
        Box::pin(self.listings.list(cursor, limit, deadline))
    }
}
