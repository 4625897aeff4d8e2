//! The service's interface: takes a request and returns what happens next.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use lmc_engine::{CacheEngine, HostSpace, InUse, SpaceBook, TenantId};
use lmc_key::{KeySpace, LayoutFingerprint, SpaceId};
use lmc_memory::CopyPool;
use tokio::sync::watch;

use crate::peer::{ClientSocket, Witness};
use crate::protocol::{
    ABANDON_EARLIER, ENGINE_KEYS, NOTICES, Operation, POOL_DESCRIPTOR, Reply, Request, UNITS,
    WAIT_LOOKUP,
};
use crate::service::config::{ServiceConfig, ServiceError};
use crate::service::connections::Connections;
use crate::service::context::{Context, refuse};
use crate::service::copies::{Blocks, Copies};
use crate::service::events::{NextBatch, Subscription};
use crate::service::jobs::{Job, JobThreads, Lane};
use crate::service::lookups::Lookups;
use crate::service::notices::Notice;
use crate::service::registry::Registry;
use crate::service::request_log::RequestLog;
use crate::service::session::Wait;
use crate::service::spaces::SpaceStatus;
use crate::service::spans::Span;
use crate::service::stats::{TransportCounters, add};
use crate::service::status::ServiceStatus;
use crate::service::transfers::Transfers;
use crate::service::{ClientId, InspectError, RequestOutcome};

/// Capability that announces [`Operation::SubscribeKvEvents`] to clients.
const KV_EVENT_STREAM: &str = "kv_event_stream";

/// Threads of copies in memory of GPUs. Most of them wait for work of their engine.
const GPU_THREADS: usize = 16;

/// Carries out the protocol's operations on a [`CacheEngine`].
///
/// A handle: clones share one service. Its parts own their state, each under its own locks. Locks
/// are taken in the order of the fields of `Parts`, from the last to the first.
#[derive(Clone, Debug)]
pub struct Service(pub(super) Arc<Parts>);

/// A handle that does not keep the service alive: for a tier that the service's engine uses.
#[derive(Clone, Debug)]
pub struct WeakService(Weak<Parts>);

impl WeakService {
    /// Returns the service; `None` once it is gone.
    pub fn upgrade(&self) -> Option<Service> {
        self.0.upgrade().map(Service)
    }
}

impl SpaceBook for WeakService {
    fn tenant(&self, space: SpaceId) -> TenantId {
        let service = self.upgrade();
        service.map_or_else(TenantId::default, |service| service.tenant_of(space))
    }

    /// Returns the spaces: first those that engines use, then those with the most chunks.
    fn spaces(&self) -> Vec<HostSpace> {
        let mut spaces = self
            .upgrade()
            .map_or_else(Vec::new, |service| service.spaces());
        spaces.sort_by_key(|space| (Reverse((space.registered, space.chunks)), space.id));
        let described = |space: SpaceStatus| HostSpace {
            id: space.id,
            description: space.description,
        };
        spaces.into_iter().map(described).collect()
    }

    fn describe(&self, space: SpaceId) -> Option<KeySpace> {
        self.upgrade()?.0.context.spaces.description(space)
    }

    fn is_used(&self, space: SpaceId) -> bool {
        let service = self.upgrade();
        service.is_some_and(|service| service.0.context.spaces.description(space).is_some())
    }

    fn merges_layout(&self, layout: LayoutFingerprint, ranks: u32) -> bool {
        let service = self.upgrade();
        service.is_some_and(|service| service.0.registry.merges_layout(layout, ranks))
    }

    fn merged(&self, space: SpaceId, kv_rank: u16) -> Option<(SpaceId, u16)> {
        self.upgrade()?.0.context.spaces.merged(space, kv_rank)
    }

    fn is_over(&self, request: &str) -> bool {
        let service = self.upgrade();
        service.is_some_and(|service| service.0.lookups.is_over(request))
    }
}

/// The parts of a service.
pub(super) struct Parts {
    pub(super) context: Arc<Context>,
    connections: Arc<Connections>,
    pub(super) registry: Arc<Registry>,
    lookups: Arc<Lookups>,
    pub(super) transfers: Arc<Transfers>,
    copies: Arc<Copies>,
    copy_threads: JobThreads,
    /// Started with the first job for a GPU; `None` if that failed.
    gpu_threads: OnceLock<Option<JobThreads>>,
    /// Runs clears, one after the other.
    clears: Arc<JobThreads>,
}

impl fmt::Debug for Parts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.context.fmt(f)
    }
}

impl ServiceConfig {
    /// Starts a service on an engine.
    ///
    /// # Errors
    /// [`ServiceError`] when a thread cannot be started.
    pub fn start(self, engine: CacheEngine) -> Result<Service, ServiceError> {
        let pool = CopyPool::new(self.copy_threads)?;
        let copy_threads = JobThreads::start("lmc-copy-job", self.transfer_threads)?;
        let clears = Arc::new(JobThreads::start("lmc-clear", 1)?);
        let context = Arc::new(Context::new(self, engine));
        let connections = Arc::new(Connections::default());
        let registry = Arc::new(Registry::new(
            Arc::clone(&context),
            Arc::clone(&connections),
            Arc::clone(&clears),
        ));
        let lookups = Arc::new(Lookups::new(Arc::clone(&context), Arc::clone(&registry)));
        let transfers = Arc::new(Transfers::new(
            Arc::clone(&context),
            Arc::clone(&connections),
            Arc::clone(&registry),
            Arc::clone(&lookups),
        ));
        let copies = Arc::new(Copies::new(
            Arc::clone(&context),
            Arc::clone(&registry),
            Arc::clone(&transfers),
            pool,
        ));
        let service = Service(Arc::new(Parts {
            context,
            connections,
            registry,
            lookups,
            transfers,
            copies,
            copy_threads,
            gpu_threads: OnceLock::new(),
            clears,
        }));
        let host = service.engine().host();
        host.set_book(Arc::new(service.downgrade()));
        Ok(service)
    }
}

impl Service {
    /// Returns a handle that does not keep the service alive.
    pub fn downgrade(&self) -> WeakService {
        WeakService(Arc::downgrade(&self.0))
    }

    /// Returns the settings that the service runs with.
    pub fn config(&self) -> &ServiceConfig {
        &self.0.context.config
    }

    /// Changes the requests that the log shows.
    pub fn set_request_log(&self, log: RequestLog) {
        self.0.context.request_log.set(log);
    }

    /// Waits until [`Self::take_notices`] may return more; forever if [`ServiceConfig::notices`] is
    /// false.
    pub async fn notices_changed(&self) {
        match &self.0.context.notices {
            Some(notices) => notices.changed().await,
            None => std::future::pending().await,
        }
    }

    /// Returns the notices that are due, and when to ask again even if nothing changes. There is
    /// one notice for each request that is looked up: as soon as all ranks have its chunks, or when
    /// the request has ended without them.
    pub fn take_notices(&self, now: Instant) -> (Vec<Notice>, Option<Instant>) {
        let Some(notices) = &self.0.context.notices else {
            return (Vec::new(), None);
        };
        let (taken, next) = notices.take(&self.0.context.engine, now);
        (self.counted(taken), next)
    }

    /// Returns the notices of all requests that have none yet: they have failed.
    pub fn take_last_notices(&self) -> Vec<Notice> {
        let notices = self.0.context.notices.as_ref();
        self.counted(notices.map_or_else(Vec::new, |notices| notices.fail_all()))
    }

    /// Waits until [`Self::take_spans`] may return some; forever if [`ServiceConfig::max_spans`] is
    /// 0.
    pub async fn spans_changed(&self) {
        match &self.0.context.spans {
            Some(spans) => spans.changed().await,
            None => std::future::pending().await,
        }
    }

    /// Returns the spans that have ended since the last call, in the order of their ends.
    pub fn take_spans(&self) -> Vec<Span> {
        let spans = self.0.context.spans.as_ref();
        spans.map_or_else(Vec::new, |spans| spans.take())
    }

    /// Counts spans that the tracer's collector did not take.
    pub fn count_lost_spans(&self, spans: usize) {
        add(&self.0.context.counters().spans_lost, spans as u64);
    }

    fn counted(&self, notices: Vec<Notice>) -> Vec<Notice> {
        let stored = notices.iter().filter(|notice| notice.is_stored).count();
        let counters = self.0.context.counters();
        add(&counters.notices_stored, stored as u64);
        add(&counters.notices_failed, (notices.len() - stored) as u64);
        notices
    }

    /// Counts a notice that a proxy did not take.
    pub fn count_lost_notice(&self) {
        add(&self.0.context.counters().notices_lost, 1);
    }

    /// Returns the engine of the service.
    pub fn engine(&self) -> &CacheEngine {
        &self.0.context.engine
    }

    /// Carries out a request, or returns how it will be carried out.
    pub(crate) fn handle(
        &self,
        client: ClientId,
        request: Request,
        now: Instant,
    ) -> RequestOutcome {
        let parts = &*self.0;
        let counters = &parts.context.stats.service;
        let reply = match request {
            Request::RegisterKvCache(registration) => {
                return parts.registry.register_kv_cache(client, registration, now);
            }
            Request::RegisterEngineDriven(context) => {
                let reply = parts.registry.register_engine_driven(client, &context, now);
                parts.registry.log_refusal(
                    client,
                    context.instance_id,
                    &context.model_name,
                    &reply,
                );
                reply
            }
            Request::Unregister { instance_id, .. } => {
                return parts.registry.unregister(client, instance_id);
            }
            Request::Store {
                key,
                instance_id,
                block_ids,
                event,
            } => {
                let ids = block_ids;
                let blocks = Blocks { ids, event };
                return (parts.copies).store(client, key, instance_id, blocks, now);
            }
            Request::Retrieve {
                key,
                instance_id,
                block_ids,
                event,
                skip_first_n_tokens,
            } => {
                let ids = block_ids;
                let blocks = Blocks { ids, event };
                let skip = skip_first_n_tokens;
                return (parts.copies).retrieve(client, key, instance_id, blocks, skip, now);
            }
            Request::Lookup(key) => parts.lookups.lookup(client, &key, now),
            Request::QueryPrefetchStatus { request_id } => {
                (parts.lookups).prefetch_status(client, &request_id, false, now)
            }
            Request::WaitPrefetchStatus {
                request_id,
                timeout,
            } => return self.answer_lookup(client, request_id, timeout, false, now),
            Request::WaitLookup {
                request_id,
                timeout,
            } => return self.answer_lookup(client, request_id, timeout, true, now),
            Request::FreeLookupLocks(key) => parts.lookups.free_lookup_locks(client, &key, now),
            Request::EndSession { request_id } => parts.lookups.end_session(client, &request_id),
            Request::PrepareStore { key, instance_id } => {
                parts
                    .transfers
                    .prepare_store(client, &key, instance_id, now)
            }
            Request::CommitStore {
                key,
                instance_id,
                pickled,
            } => parts
                .transfers
                .commit_store(client, &key, instance_id, pickled, now),
            Request::AbandonStore { key, instance_id } => {
                parts
                    .transfers
                    .abandon_store(client, &key, instance_id, now)
            }
            Request::AbandonEarlier { instance_id } => {
                parts.transfers.abandon_earlier(client, instance_id)
            }
            Request::PrepareRetrieve { key, instance_id } => {
                parts
                    .transfers
                    .prepare_retrieve(client, &key, instance_id, now)
            }
            Request::CommitRetrieve { key, instance_id } => {
                parts
                    .transfers
                    .commit_retrieve(client, &key, instance_id, now)
            }
            Request::Clear { force } => return self.clear(InUse::of_force(force)),
            Request::GetChunkSize => {
                Reply::Int(u64::from(parts.context.config.hasher.chunk_size()))
            }
            Request::Ping { instance_id } => parts.registry.ping(client, instance_id, now),
            Request::ReportBlockAllocation { records, .. } => {
                let blocks: usize = records.iter().map(|record| record.blocks).sum();
                add(&counters.reported_blocks, blocks as u64);
                Reply::None
            }
            Request::Noop => Reply::Text("OK".to_owned()),
            Request::GetExperimental => {
                let events = parts.context.events.enabled().then_some(KV_EVENT_STREAM);
                let pool = (parts.registry.can_pass_pool(client)).then_some(POOL_DESCRIPTOR);
                let own = [ENGINE_KEYS, ABANDON_EARLIER, WAIT_LOOKUP, UNITS];
                let notices = parts.context.notices.as_ref().map(|_| NOTICES);
                let capabilities = events.into_iter().chain(own).chain(notices);
                let capabilities = capabilities.chain(pool);
                Reply::Strings(capabilities.map(str::to_owned).collect())
            }
            Request::PoolDescriptor => parts.registry.pass_pool(client),
            Request::SubscribeKvEvents {
                instance_id,
                model_name,
                cursor,
                max_events,
            } => {
                if !(1..=super::events::MAX_BATCH).contains(&max_events) {
                    let text = format!("lmc: max_events must be 1 to 1024, found {max_events}");
                    return RequestOutcome::Reply(Reply::Error(text));
                }
                let events = &parts.context.events;
                let subscription =
                    events.subscribe(client, instance_id, model_name, cursor, max_events);
                return RequestOutcome::Stream(subscription);
            }
        };
        RequestOutcome::Reply(reply)
    }

    /// Answers a lookup, or lets its client wait `timeout` seconds for the answer.
    fn answer_lookup(
        &self,
        client: ClientId,
        request_id: String,
        timeout: f64,
        with_tiers: bool,
        now: Instant,
    ) -> RequestOutcome {
        let lookups = &self.0.lookups;
        match lookups.prefetch_status(client, &request_id, with_tiers, now) {
            Reply::None => {
                RequestOutcome::Wait(Wait::new(client, request_id, timeout, with_tiers, now))
            }
            known => RequestOutcome::Reply(known),
        }
    }

    /// Clears everything. An engine that clears its own cache may have new weights: no chunk of the
    /// old ones may be found in any tier.
    fn clear(&self, in_use: InUse) -> RequestOutcome {
        let engine = self.0.context.engine.clone();
        RequestOutcome::Job(Job::new(Lane::Clear, move || match engine.clear(in_use) {
            Ok(cleared) if cleared.unconfirmed.is_empty() => Reply::None,
            Ok(cleared) => refuse(&format!(
                "cleared here; not confirmed by {}: see `lmc status`",
                cleared.unconfirmed.join(", ")
            )),
            Err(error) => refuse(&format!("nothing was cleared: {error}")),
        }))
    }

    /// Registers a connection. Call it before the connection's first request.
    pub fn connected(&self, client: ClientId, peer: ClientSocket) {
        self.0.connections.open(client, peer);
    }

    /// Sets the watcher of the processes at the other end of a connection.
    pub(crate) fn set_witness(&self, client: ClientId, witness: Arc<dyn Witness>) {
        self.0.connections.set_witness(client, witness);
    }

    /// Ends a connection, whichever side closed it.
    ///
    /// The connection's requests end. Slots that its workers had prepared stay held, see
    /// [`Self::tick`].
    pub fn client_gone(&self, client: ClientId, now: Instant) {
        let parts = &*self.0;
        parts.registry.cut(client, now);
        parts.lookups.end_of(client);
        parts.transfers.orphan(client, now);
        // Again: a registration may have completed before the connection counted as ended.
        parts.registry.cut(client, now);
        // A transfer may have bound the connection again until the last of its requests ended.
        parts.registry.unbind(client);
        parts.copy_threads.forget(client);
        if let Some(Some(threads)) = parts.gpu_threads.get() {
            threads.forget(client);
        }
    }

    /// Returns true while the workers of a connection have slots that they may be copying into or
    /// out of.
    pub(crate) fn holds_slots(&self, client: ClientId) -> bool {
        self.0.transfers.holds_slots(client)
    }

    /// Returns the connections that own a worker, a request or a prepared transfer, or that are
    /// known to be a scheduler's.
    pub(crate) fn owners(&self) -> HashSet<ClientId> {
        let mut owners = self.0.registry.clients();
        owners.extend(self.0.transfers.clients());
        owners.extend(self.0.lookups.clients());
        owners
    }

    /// Releases the slots of ended connections that nothing touches any more. May read files of
    /// `/proc`.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn release_ended(&self, now: Instant) {
        self.0.transfers.release_ended(now);
    }

    /// Releases the slots of ended connections whose processes are dead, unless another thread is
    /// about to. May read files of `/proc`.
    pub(crate) fn release_dead(&self, now: Instant) {
        self.0.transfers.release_dead(now);
    }

    /// Ends everything that has expired. Call it about once a second, on a thread that may read
    /// files of `/proc`.
    ///
    /// Slots that workers of an ended connection had prepared are released when the connection's
    /// process is known to be dead, or when
    /// [`ServiceConfig::slot_grace`](crate::ServiceConfig::slot_grace) is over. The grace time
    /// restarts as long as the process is stopped.
    pub fn tick(&self, now: Instant) {
        let parts = &*self.0;
        parts.transfers.release_ended(now);
        parts.transfers.share_overdue(now);
        parts.lookups.sweep(now);
        parts.registry.remove_silent(now);
    }

    /// Notes that the process runs. The thread that reads requests from sockets calls it about
    /// twice a second. If it is never called, every request counts as read at once.
    pub(crate) fn beat(&self, now: Instant) {
        self.0.context.pulse.beat(now);
    }

    /// Answers a copy that is not begun because its connection has too many requests under way.
    pub(crate) fn decline_copy(&self, asked: Operation) -> Reply {
        let counters = &self.0.context.stats.service;
        add(&counters.over_limit, 1);
        match asked {
            Operation::Store => add(&counters.stores_failed, 1),
            _ => add(&counters.retrieves_missed, 1),
        }
        Reply::Transferred(false)
    }

    /// Passes the answer of a lookup whose chunks are being promoted to `tell`, as soon as there is
    /// one or the timeout has passed.
    pub(crate) fn wait(&self, wait: &Wait, tell: Box<dyn FnOnce(Reply) + Send>) {
        self.0.lookups.wait(wait, tell);
    }

    /// Gathers each chunk of a server-driven worker's blocks as a store would, but into a buffer of
    /// its own, and returns the results of `digest`, for diagnostics. `blocks_per_chunk` must be
    /// that of the worker's layout. Ends early when `digest` returns `None`.
    ///
    /// # Errors
    /// [`InspectError`].
    pub fn inspect_blocks<T>(
        &self,
        instance_id: u64,
        block_ids: &[u32],
        blocks_per_chunk: u64,
        digest: impl FnMut(&[u8]) -> Option<T>,
    ) -> Result<Vec<T>, InspectError> {
        let copies = &self.0.copies;
        copies.inspect_blocks(instance_id, block_ids, blocks_per_chunk, digest)
    }

    /// Returns the state of the whole service, for people and scrapers. Takes locks for a moment.
    pub fn status(&self, now: Instant) -> ServiceStatus {
        let parts = &*self.0;
        let mut instances = parts.registry.status(now);
        for instance in &mut instances {
            instance.transfers = parts.transfers.len_of(instance.instance_id);
        }
        ServiceStatus::of(
            &parts.context,
            instances,
            parts.registry.gpu_registered_bytes(),
            parts.lookups.status(),
            parts.transfers.status(now),
            parts.transfers.held_status(now),
            now,
        )
    }

    /// Returns the spaces that have chunks in DRAM or belong to a registered worker's layout, as far
    /// as engines have named them since the start.
    pub fn spaces(&self) -> Vec<SpaceStatus> {
        let layouts = self.0.registry.registered_layouts();
        self.0.context.spaces.live(&layouts)
    }

    /// Returns a function that is true for spaces whose chunks can be found after all present
    /// workers have gone. Chunks of other spaces need not go to a tier that outlives this process.
    /// The function is false for spaces that no engine has named; it may be used after the service
    /// has ended.
    pub fn lasting_spaces(&self) -> impl Fn(SpaceId) -> bool + Send + Sync + 'static {
        let spaces = Arc::clone(&self.0.context.spaces);
        move |space| spaces.is_lasting(space)
    }

    /// Returns a function that is true for spaces whose chunks have the server's chunk size, as far as
    /// is known.
    pub fn whole_chunk_spaces(&self) -> impl Fn(SpaceId) -> bool + Send + Sync + 'static {
        let spaces = Arc::clone(&self.0.context.spaces);
        move |space| spaces.has_whole_chunks(space)
    }

    /// Returns the tenant of a space; tenant 0 if no engine has named the space.
    pub fn tenant_of(&self, space: SpaceId) -> TenantId {
        let context = &self.0.context;
        context.spaces.tenant_of(space, &context.engine)
    }

    /// Returns the salts of the known tenants among `ids`.
    pub fn salts_of(&self, ids: &HashSet<TenantId>) -> HashMap<TenantId, lmc_key::Salt> {
        self.0.context.spaces.salts_of(ids)
    }

    /// Returns the number of a tenant that was named before.
    pub fn known_tenant(&self, salt: &lmc_key::Salt) -> Option<TenantId> {
        self.0.context.spaces.known_tenant(salt)
    }

    /// Returns the number of a tenant in the engine, for quotas.
    pub fn tenant(&self, salt: &lmc_key::Salt) -> TenantId {
        let context = &self.0.context;
        context.spaces.tenant(salt, &context.engine)
    }

    /// Logs a warning that a peer can provoke, at most once a second.
    pub(crate) fn warn_throttled(&self, text: &str) {
        self.0.context.warn_throttled(text);
    }

    /// Returns the connections of engines that are open, and those that were accepted since the start.
    pub fn connections(&self) -> (u64, u64) {
        let counters = self.transport_counters();
        let open = counters.connections_open.load(Ordering::Relaxed);
        (open, counters.connections_accepted.load(Ordering::Relaxed))
    }

    pub(crate) fn transport_counters(&self) -> &TransportCounters {
        &self.0.context.stats.transport
    }

    pub(crate) fn record(&self, operation: Operation, reply: &Reply, took: Duration) {
        self.0.context.stats.record(operation, reply, took);
    }

    pub(crate) fn record_refusal(&self, operation: Option<Operation>) {
        self.0.context.stats.record_refusal(operation);
    }

    /// Returns the threads of jobs for GPUs, which hosts without a GPU do not need. If they cannot
    /// be started, such jobs take turns with the others.
    fn gpu_threads(&self) -> &JobThreads {
        let parts = &*self.0;
        let start = || JobThreads::start("lmc-gpu-job", GPU_THREADS).ok();
        let started = parts.gpu_threads.get_or_init(start);
        started.as_ref().unwrap_or(&parts.copy_threads)
    }

    pub(crate) fn run_job(&self, client: ClientId, lane: Lane, work: Box<dyn FnOnce() + Send>) {
        let threads = match lane {
            Lane::Retrieve | Lane::Store => &self.0.copy_threads,
            Lane::GpuRetrieve | Lane::GpuStore => self.gpu_threads(),
            Lane::Clear => &self.0.clears,
        };
        threads.run(client, lane, work);
    }

    pub(crate) fn watch_events(&self) -> watch::Receiver<u64> {
        self.0.context.events.watch()
    }

    pub(crate) fn next_batch(&self, subscription: &mut Subscription) -> NextBatch {
        self.0.context.events.next(subscription)
    }

    pub(crate) fn subscription_ended(&self, subscription: &Subscription) -> bool {
        self.0.context.events.ended(subscription)
    }

    pub(crate) fn forget_subscription(&self, subscription: &Subscription) {
        self.0.context.events.forget(subscription);
    }
}
