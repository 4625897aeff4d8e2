//! The service's face: one method that takes a request and says what becomes of it.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize};
use std::time::{Duration, Instant};

use lmc_engine::CacheEngine;
use lmc_key::{HashMemo, Printable, SpaceId};
use lmc_memory::CopyPool;
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::protocol::{EngineDrivenContext, Operation, RegisterKvCache, Reply, Request};
use crate::service::config::{ServiceConfig, ServiceError};
use crate::service::events::{EventLog, NextBatch, Subscription};
use crate::service::generation::Joined;
use crate::service::instance::{Instance, RegisterError, Transport};
use crate::service::job::{Job, Lane, Workers};
use crate::service::pulse::Pulse;
use crate::service::session::Wait;
use crate::service::spaces::Spaces;
use crate::service::state::State;
use crate::service::stats::{Stats, TransportCounters, add};
use crate::service::throttle::Throttle;
use crate::service::{ClientId, Outcome};

/// Capability that tells clients of [`Operation::SubscribeKvEvents`].
const KV_EVENT_STREAM: &str = "kv_event_stream";

/// Carries out the protocol's operations on a [`CacheEngine`].
///
/// A handle: clones share one service.
#[derive(Clone)]
pub struct Service {
    pub(super) shared: Arc<Shared>,
}

pub(super) struct Shared {
    pub(super) config: ServiceConfig,
    pub(super) engine: CacheEngine,
    pub(super) memo: HashMemo,
    pub(super) copies: CopyPool,
    pub(super) workers: Workers,
    /// Runs clears, one after the other.
    clears: Workers,
    pub(super) events: Arc<EventLog>,
    pub(super) spaces: Arc<Spaces>,
    pub(super) state: Mutex<State>,
    pub(super) stats: Stats,
    pub(super) pulse: Pulse,
    pub(super) started: Instant,
    /// Numbers lookups.
    pub(super) lookups: AtomicU64,
    /// Lookups whose chunks are being promoted.
    pub(super) promoting: AtomicUsize,
    /// Spaces of layouts whose last worker has gone, until their chunks are removed.
    pub(super) ended_spaces: Mutex<HashSet<SpaceId>>,
    /// Held by the thread that looks at the processes behind ended connections.
    pub(super) looking: Mutex<()>,
    /// Limits warnings that peers can provoke.
    warnings: Throttle,
    /// Limits warnings about refused registrations, which other warnings must not suppress.
    refusals: Throttle,
}

impl std::fmt::Debug for Service {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Service")
            .field("config", &self.shared.config)
            .finish_non_exhaustive()
    }
}

impl Service {
    /// Starts a service on an engine.
    ///
    /// # Errors
    /// [`ServiceError`] when a thread cannot be started.
    pub fn new(config: ServiceConfig, engine: CacheEngine) -> Result<Self, ServiceError> {
        let events = Arc::new(EventLog::new(config.kv_event_log_size, config.incarnation));
        let spaces = Arc::new(Spaces::new(Arc::clone(&events)));
        engine.set_events(Arc::clone(&spaces) as _);
        let shared = Shared {
            memo: HashMemo::new(config.hash_memo_bytes),
            copies: CopyPool::new(config.copy_threads)?,
            workers: Workers::start("lmc-transfer", config.transfer_threads)?,
            clears: Workers::start("lmc-clear", 1)?,
            events,
            spaces,
            state: Mutex::default(),
            stats: Stats::new(),
            pulse: Pulse::new(config.copy_deadline / 2),
            started: Instant::now(),
            promoting: AtomicUsize::new(0),
            ended_spaces: Mutex::default(),
            looking: Mutex::default(),
            lookups: AtomicU64::new(0),
            warnings: Throttle::default(),
            refusals: Throttle::default(),
            config,
            engine,
        };
        Ok(Self {
            shared: Arc::new(shared),
        })
    }

    /// The settings it runs with.
    pub fn config(&self) -> &ServiceConfig {
        &self.shared.config
    }

    /// The engine behind it.
    pub fn engine(&self) -> &CacheEngine {
        &self.shared.engine
    }

    /// Carries out a request, or says how it will be.
    pub(crate) fn handle(&self, client: ClientId, request: Request, now: Instant) -> Outcome {
        let counters = &self.shared.stats.service;
        let reply = match request {
            Request::RegisterKvCache(registration) => {
                let reply = self.register_server_driven(client, &registration, now);
                self.log_refusal(
                    client,
                    registration.instance_id,
                    &registration.model_name,
                    &reply,
                );
                reply
            }
            Request::RegisterEngineDriven(context) => {
                let reply = self.register_engine_driven(client, &context, now);
                self.log_refusal(client, context.instance_id, &context.model_name, &reply);
                reply
            }
            Request::Unregister { instance_id, .. } => return self.unregister(client, instance_id),
            Request::Store {
                key,
                instance_id,
                block_ids,
            } => {
                return self.store(client, key, instance_id, block_ids, now);
            }
            Request::Retrieve {
                key,
                instance_id,
                block_ids,
                skip_first_n_tokens,
            } => {
                return self.retrieve(
                    client,
                    key,
                    instance_id,
                    block_ids,
                    skip_first_n_tokens,
                    now,
                );
            }
            Request::Lookup(key) => self.lookup(client, &key, now),
            Request::QueryPrefetchStatus { request_id } => {
                self.prefetch_status(client, &request_id, now)
            }
            Request::WaitPrefetchStatus {
                request_id,
                timeout,
            } => match self.prefetch_status(client, &request_id, now) {
                Reply::None => return Outcome::Wait(Wait::new(client, request_id, timeout, now)),
                known => known,
            },
            Request::FreeLookupLocks(key) => self.free_lookup_locks(client, &key, now),
            Request::EndSession { request_id } => self.end_session(client, &request_id),
            Request::PrepareStore { key, instance_id } => {
                self.prepare_store(client, &key, instance_id, now)
            }
            Request::CommitStore {
                key,
                instance_id,
                pickled,
            } => self.commit_store(client, &key, instance_id, pickled, now),
            Request::PrepareRetrieve { key, instance_id } => {
                self.prepare_retrieve(client, &key, instance_id, now)
            }
            Request::CommitRetrieve { key, instance_id } => {
                self.commit_retrieve(client, &key, instance_id, now)
            }
            Request::Clear { force } => return self.clear(force),
            Request::GetChunkSize => Reply::Int(u64::from(self.shared.config.hasher.chunk_size())),
            Request::Ping { instance_id } => self.ping(client, instance_id, now),
            Request::ReportBlockAllocation { records, .. } => {
                let blocks: usize = records.iter().map(|record| record.blocks).sum();
                add(&counters.reported_blocks, blocks as u64);
                Reply::None
            }
            Request::Noop => Reply::Text("OK".to_owned()),
            Request::GetExperimental => Reply::Strings(if self.shared.events.enabled() {
                vec![KV_EVENT_STREAM.to_owned()]
            } else {
                Vec::new()
            }),
            Request::SubscribeKvEvents {
                instance_id,
                model_name,
                cursor,
                max_events,
            } => {
                if !(1..=super::events::MAX_BATCH).contains(&max_events) {
                    let text = format!("lmc: max_events must be 1 to 1024, found {max_events}");
                    return Outcome::Reply(Reply::Error(text));
                }
                let events = &self.shared.events;
                let subscription =
                    events.subscribe(client, instance_id, model_name, cursor, max_events);
                return Outcome::Stream(subscription);
            }
        };
        Outcome::Reply(reply)
    }

    /// Forgets everything. An engine that clears its own cache may have new weights: nothing of
    /// the old ones may be found in any tier.
    fn clear(&self, force: bool) -> Outcome {
        let engine = self.shared.engine.clone();
        Outcome::Job(Job::new(Lane::Clear, move || {
            match engine.clear(force).complete {
                true => Reply::None,
                false => refuse("a tier below memory could not forget all it had: see its health"),
            }
        }))
    }

    fn register_engine_driven(
        &self,
        client: ClientId,
        context: &EngineDrivenContext,
        now: Instant,
    ) -> Reply {
        let Some(name) = self.shared.engine.shared_name() else {
            add(&self.shared.stats.service.registrations_refused, 1);
            return refuse("this server's pool is not shared memory, so no worker can map it");
        };
        let registered = Reply::Registered {
            shm_name: name.to_string(),
            pool_size: self.shared.engine.pool_bytes(),
        };
        let chunk_size = self.shared.config.hasher.chunk_size();
        let instance = Instance::engine_driven(context, client, chunk_size, now);
        self.add_instance(context.instance_id, instance, registered)
    }

    fn register_server_driven(
        &self,
        client: ClientId,
        registration: &RegisterKvCache,
        now: Instant,
    ) -> Reply {
        if registration.engine_type != "vllm" {
            add(&self.shared.stats.service.registrations_refused, 1);
            return refuse(&format!(
                "the layout of engine {:?} is not known to this server, which copies for vllm \
                 only: let the engine copy, with lmcache.mp.mp_transfer_mode=engine_driven",
                registration.engine_type
            ));
        }
        let chunk_size = self.shared.config.hasher.chunk_size();
        let user = self.uid_of(client);
        let instance = Instance::server_driven(registration, client, user, chunk_size, now);
        self.add_instance(registration.instance_id, instance, Reply::None)
    }

    /// Logs a refused registration: without this only the engine's log would show it, which the
    /// operator of this server may not see.
    fn log_refusal(&self, client: ClientId, instance_id: u64, model: &str, reply: &Reply) {
        let Reply::Error(reason) = reply else {
            return;
        };
        let shared = &self.shared;
        let Some(suppressed) = shared.refusals.pass(shared.started.elapsed()) else {
            return;
        };
        let peer = {
            let state = shared.state.lock();
            let connection = state.connections.get(&client);
            connection.map_or_else(String::new, |connection| connection.peer.address.clone())
        };
        tracing::warn!(
            instance = instance_id,
            model,
            peer,
            suppressed = (suppressed > 0).then_some(suppressed),
            "registration refused: {}",
            Printable(reason)
        );
    }

    pub(super) fn add_instance(
        &self,
        instance_id: u64,
        instance: Result<Instance, RegisterError>,
        registered: Reply,
    ) -> Reply {
        let counters = &self.shared.stats.service;
        let mut instance = match instance {
            Ok(instance) => instance,
            Err(error) => {
                add(&counters.registrations_refused, 1);
                return refuse(&error.to_string());
            }
        };
        if instance.chunk_bytes > self.shared.engine.pool_bytes() {
            add(&counters.registrations_refused, 1);
            return refuse(&format!(
                "one chunk of this model takes {} bytes, the whole pool has {}: \
                 start the server with a larger --l1-size-gb",
                instance.chunk_bytes,
                self.shared.engine.pool_bytes()
            ));
        }
        let mut state = self.shared.state.lock();
        let full = state.instances.len() >= self.shared.config.max_instances;
        let of_client = |known: &&Instance| known.client == instance.client;
        let most = self.shared.config.max_instances;
        let own = state.instances.values().filter(of_client).count();
        if (full || own >= most - most / 4) && !state.instances.contains_key(&instance_id) {
            add(&counters.over_limit, 1);
            return refuse("too many workers are registered");
        }
        if let Some(known) = state.instances.get(&instance_id)
            && !known.belongs_to(instance.client)
        {
            // Two processes may well have one id where it is made of their pids. Copies for
            // one would land in the other's memory.
            add(&counters.registrations_refused, 1);
            return refuse(&format!(
                "another worker is connected under instance_id {instance_id}: \
                 ids must differ between workers of one server"
            ));
        }
        if !self.shared.config.identity.is_empty() {
            // The operator answers for the format.
            instance.opaque = None;
        }
        let joined = match state.join_generation(instance_id, &mut instance) {
            Ok(joined) => joined,
            Err(error) => {
                add(&counters.registrations_refused, 1);
                return refuse(&format!("no random bytes for this layout's keys: {error}"));
            }
        };
        if let Some(known) = state.instances.get(&instance_id) {
            instance.gate = known.gate.next();
            if known.fingerprint == instance.fingerprint {
                instance.ranks.clone_from(&known.ranks);
            }
        }
        let (model, shape) = (instance.model.clone(), instance.shape.clone());
        let (world_size, mode) = (instance.world_size, instance.mode());
        let (dtype, chunk_bytes) = (instance.dtype, instance.chunk_bytes);
        state.told_to_register.remove(&instance_id);
        instance.owner = state.new_owner();
        // A worker that registers again describes itself anew. Transfers that it had prepared
        // stay as they are: their slots may still be in use.
        let replaced = state.instances.insert(instance_id, instance);
        let two_engines = state.two_engines(instance_id, None);
        let ended = replaced
            .as_ref()
            .and_then(|replaced| state.ended_generation(replaced));
        drop(state);
        // Unmapping an engine's memory takes long, and so may a log line: no lock is held.
        drop(replaced);
        tracing::info!(
            instance = instance_id,
            model = model.as_str(),
            world_size,
            mode,
            ?shape,
            %dtype,
            chunk_bytes,
            "worker registered"
        );
        if joined == Some(Joined::First) {
            self.report_opaque(instance_id, &model);
        }
        if let Some(two) = two_engines {
            self.warn_of_two_engines(&two);
        }
        self.end_generations(ended);
        add(&counters.registrations, 1);
        registered
    }

    fn unregister(&self, client: ClientId, instance_id: u64) -> Outcome {
        let mut state = self.shared.state.lock();
        let known = state.instances.get(&instance_id);
        if known.is_some_and(|instance| !instance.belongs_to(client)) {
            drop(state);
            add(&self.shared.stats.service.commits_foreign, 1);
            return Outcome::Reply(refuse(&format!(
                "worker {instance_id} is connected elsewhere: it unregisters on its own connection"
            )));
        }
        let removed = state.instances.remove(&instance_id);
        let ended = removed
            .as_ref()
            .and_then(|removed| state.ended_generation(removed));
        drop(state);
        self.end_generations(ended);
        let Some(instance) = removed else {
            return Outcome::Reply(Reply::None);
        };
        self.shared.events.unsubscribe(instance_id);
        tracing::info!(instance = instance_id, "worker unregistered");
        // Its transfers stay: the stock worker ends its copies only after this is answered. They
        // go with its commits, or some time after its connection. The server's own copies end
        // before.
        match instance.transport {
            Transport::EngineDriven => Outcome::Reply(Reply::None),
            Transport::ServerDriven(_) => Outcome::Quiet(instance.gate.entrance()),
        }
    }

    fn ping(&self, client: ClientId, instance_id: Option<u64>, now: Instant) -> Reply {
        add(&self.shared.stats.service.pings, 1);
        let Some(instance_id) = instance_id else {
            return Reply::Bool(true);
        };
        let mut state = self.shared.state.lock();
        if let Some(instance) = state.instances.get_mut(&instance_id) {
            if instance.belongs_to(client) {
                instance.seen(client, now);
                instance.pinged = true;
                // One that waited in a socket is answered to a worker that has given up.
                if self.shared.pulse.is_steady(now) {
                    instance.gate.answered(now);
                }
            }
            return Reply::Bool(true);
        }
        // A worker that this server does not know (it was restarted) registers again only when
        // it has seen the server unhealthy and then healthy. So it hears "no" once, then "yes".
        let told = &mut state.told_to_register;
        let full = told.len() >= self.shared.config.max_instances;
        if full && !told.contains_key(&instance_id) {
            // Whichever it is hears "no" once more.
            let one = told.keys().next().copied();
            one.map(|one| told.remove(&one));
        }
        let first = told.insert(instance_id, now).is_none();
        Reply::Bool(!first)
    }

    pub(crate) fn transport_counters(&self) -> &TransportCounters {
        &self.shared.stats.transport
    }

    pub(crate) fn record(&self, operation: Operation, reply: &Reply, took: Duration) {
        self.shared.stats.record(operation, reply, took);
    }

    pub(crate) fn record_refusal(&self, operation: Option<Operation>) {
        self.shared.stats.record_refusal(operation);
    }

    pub(crate) fn run_job(&self, client: ClientId, lane: Lane, work: Box<dyn FnOnce() + Send>) {
        let workers = match lane {
            Lane::Retrieve | Lane::Store => &self.shared.workers,
            Lane::Clear => &self.shared.clears,
        };
        workers.run(client, lane, work);
    }

    pub(crate) fn watch_events(&self) -> watch::Receiver<u64> {
        self.shared.events.watch()
    }

    pub(crate) fn next_batch(&self, subscription: &mut Subscription) -> NextBatch {
        self.shared.events.next(subscription)
    }

    pub(crate) fn subscription_ended(&self, subscription: &Subscription) -> bool {
        self.shared.events.ended(subscription)
    }

    pub(crate) fn forget_subscription(&self, subscription: &Subscription) {
        self.shared.events.forget(subscription);
    }

    /// Logs a warning that a peer can provoke, once a second at most, on one line whatever the
    /// peer put into it.
    pub(crate) fn warn_throttled(&self, text: &str) {
        let shared = &self.shared;
        if let Some(suppressed) = shared.warnings.pass(shared.started.elapsed()) {
            let suppressed = (suppressed > 0).then_some(suppressed);
            tracing::warn!(suppressed, "{}", Printable(text));
        }
    }
}

/// A refusal in the form that clients show.
pub(super) fn refuse(text: &str) -> Reply {
    Reply::Error(format!("lmc: {text}"))
}
