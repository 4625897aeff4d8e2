//! The registered workers, with their layouts and connections.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use lmc_engine::{Host as _, OwnerId};
use lmc_key::{LayoutFingerprint, Printable, Salt, SpaceId};
use lmc_memory::cuda::Gpus;
use parking_lot::Mutex;
use thiserror::Error;

use crate::protocol::{
    CacheKey, EngineDrivenContext, IdentityDigest, KvDescriptor, RegisterKvCache, Reply,
};
use crate::service::connections::Connections;
use crate::service::context::{Context, refuse};
use crate::service::instance::{Instance, Transport};
use crate::service::jobs::{Job, JobThreads, Lane};
use crate::service::opaque::Joined;
use crate::service::opened::ServerCopies;
use crate::service::register_error::RegisterError;
use crate::service::stats::add;
use crate::service::status::InstanceStatus;
use crate::service::throttle::Throttle;
use crate::service::wider::WiderLayout;
use crate::service::{ClientId, RequestOutcome};

/// A worker's memory cannot be inspected as requested.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum InspectError {
    /// No worker has registered with this id.
    #[error("instance_id {0} not registered")]
    Unknown(u64),
    /// The worker copies by itself, so the server has never mapped its memory.
    #[error("worker {0} copies by itself; the server does not map its memory")]
    NotMapped(u64),
    /// The blocks do not make whole chunks of this worker.
    #[error("{0}")]
    Blocks(String),
    /// The caller does not wait any more.
    #[error("cancelled by the caller")]
    Cancelled,
}

/// Layouts of one model above which a lookup finds nothing: each of them would have to have the
/// chunk.
const MAX_LAYOUTS: usize = 64;

/// Longest time for which memory of a GPU stays open after its worker's connection has ended.
const GPU_GRACE: Duration = Duration::from_secs(3);

/// Time for which a ping of an unknown worker is remembered.
const REFUSED_TTL: Duration = Duration::from_secs(600);

/// The layout of the engine behind a scheduler's connection, as far as its requests have shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Binding {
    One(LayoutFingerprint),
    /// Requests of this connection were served by workers of several layouts.
    Several,
}

/// The workers, and the layouts that their requests have shown for schedulers.
#[derive(Debug, Default)]
pub(crate) struct Workers {
    pub(crate) instances: HashMap<u64, Instance>,
    pub(crate) bindings: HashMap<ClientId, Binding>,
    /// Unknown workers whose first ping was answered with "no", so that they register again.
    pub(crate) refused: HashMap<u64, Instant>,
    next_owner: u64,
}

impl Workers {
    /// Returns a number that no other worker has or had.
    fn new_owner(&mut self) -> OwnerId {
        self.next_owner += 1;
        OwnerId(self.next_owner)
    }

    /// Returns the layouts that workers of this model, identity and tokens per chunk have, each
    /// once. A layout whose workers have all lost their connections counts only if there is no
    /// other: the engine behind it is most likely dead, and its chunks say nothing about the living
    /// engines.
    pub(crate) fn layouts(
        &self,
        model: &str,
        world_size: u32,
        identity: Option<IdentityDigest>,
        unit: Option<u32>,
    ) -> Vec<LayoutOf<'_>> {
        let is_meant = |i: &&Instance| {
            let is_named = (i.identity, i.unit) == (identity, unit);
            i.world_size == world_size && is_named && i.model.as_str() == model
        };
        let mut found: Vec<LayoutOf<'_>> = Vec::new();
        for instance in self.instances.values().filter(is_meant) {
            let fingerprint = instance.fingerprint;
            let known = |layout: &LayoutOf<'_>| layout.instance.fingerprint == fingerprint;
            let index = found.iter().position(known).unwrap_or_else(|| {
                found.push(LayoutOf::new(instance));
                found.len() - 1
            });
            found[index].add(instance);
        }
        if found.iter().any(|layout| layout.connected) {
            found.retain(|layout| layout.connected);
        }
        found
    }
}

/// The registered workers.
#[derive(Debug)]
pub(super) struct Registry {
    pub(super) context: Arc<Context>,
    pub(super) connections: Arc<Connections>,
    pub(super) workers: Mutex<Workers>,
    /// Runs clears and removals, one after the other.
    pub(super) clears: Arc<JobThreads>,
    /// Spaces of layouts whose last worker has gone, kept until their chunks are removed.
    pub(super) ended_spaces: Arc<Mutex<HashSet<SpaceId>>>,
    /// GPUs that workers have memory on.
    gpus: Gpus,
    /// Limits warnings about refused registrations, which other warnings must not suppress.
    refusals: Throttle,
    /// True once a warning was logged that chunks of unknown order are shared with other hosts.
    warned_of_order: AtomicBool,
}

/// A layout in which a lookup must find a chunk.
pub(super) struct Candidate {
    pub(super) space: SpaceId,
    pub(super) layout: LayoutFingerprint,
    pub(super) chunk_bytes: u64,
    /// Ranks that workers of this layout are known to have.
    pub(super) ranks: RankSet,
    /// True if the rank of a worker of this layout is not known yet.
    pub(super) unknown_rank: bool,
    /// Spaces of engines with more ranks, whose chunks can be merged into those of the layout.
    pub(super) wider: Vec<WiderSpace>,
}

/// A space of an engine with more ranks.
pub(super) struct WiderSpace {
    pub(super) space: SpaceId,
    pub(super) layout: WiderLayout,
    /// True if workers of this host have the layout.
    pub(super) is_registered: bool,
}

impl Registry {
    pub(super) fn new(
        context: Arc<Context>,
        connections: Arc<Connections>,
        clears: Arc<JobThreads>,
    ) -> Self {
        let gpus = Gpus::new(Arc::clone(context.engine.arena()));
        Self {
            gpus,
            context,
            connections,
            workers: Mutex::default(),
            clears,
            ended_spaces: Arc::default(),
            refusals: Throttle::default(),
            warned_of_order: AtomicBool::new(false),
        }
    }

    /// Returns true if the pool can be passed over a connection.
    pub(super) fn can_pass_pool(&self, client: ClientId) -> bool {
        self.context.engine.arena().shared_file().is_some()
            && self.connections.takes_descriptors(client)
    }

    /// Returns the size of the pool; the descriptor goes with the reply. A connection gets it once:
    /// each descriptor that a client has not read counts against the limit of this process.
    pub(super) fn pass_pool(&self, client: ClientId) -> Reply {
        if !self.can_pass_pool(client) {
            return refuse(
                "the pool's descriptor passes only over the Unix socket of --ipc-path, and only if \
                 the pool is shared memory",
            );
        }
        match self.connections.pass_pool(client) {
            true => Reply::Int(self.context.engine.arena().len() as u64),
            false => refuse("this connection has the pool's descriptor already"),
        }
    }

    pub(super) fn register_engine_driven(
        &self,
        client: ClientId,
        context: &EngineDrivenContext,
        now: Instant,
    ) -> Reply {
        let shm_name = match self.context.engine.shared_name() {
            Some(name) => name.to_string(),
            None if self.connections.has_pool(client) => String::new(),
            None => {
                add(&self.context.stats.service.registrations_refused, 1);
                let text = match self.context.engine.arena().shared_file() {
                    Some(_) => {
                        "this server's pool has no name: only lmc's own connector can map it, over \
                         the Unix socket of --ipc-path"
                    }
                    None => "this server's pool is not shared memory, so no worker can map it",
                };
                return refuse(text);
            }
        };
        let registered = Reply::Registered {
            shm_name,
            pool_size: self.context.engine.pool_bytes(),
        };
        let chunk_size = self.context.config.hasher.chunk_size();
        let instance = Instance::engine_driven(context, client, chunk_size, now);
        self.add_instance(context.instance_id, instance, registered)
    }

    /// Registers a worker whose memory the server copies from and to. The driver of a GPU may take
    /// seconds, so memory on a GPU is registered by a job.
    pub(super) fn register_kv_cache(
        self: &Arc<Self>,
        client: ClientId,
        registration: Box<RegisterKvCache>,
        now: Instant,
    ) -> RequestOutcome {
        let on_gpu = |memory: &KvDescriptor| matches!(memory, KvDescriptor::Cuda(_));
        if !registration.kv_caches.iter().any(on_gpu) {
            return RequestOutcome::Reply(self.register_server_driven(client, &registration, now));
        }
        let registry = Arc::clone(self);
        RequestOutcome::Job(Job::new(Lane::GpuStore, move || {
            let reply = registry.register_server_driven(client, &registration, now);
            if !registry.connections.is_open(client) {
                // When the connection ended, this worker was not registered yet.
                registry.cut(client, Instant::now());
            }
            reply
        }))
    }

    /// Returns the bytes of the pool that are registered with the driver of GPUs.
    pub(super) fn gpu_registered_bytes(&self) -> u64 {
        self.gpus.pinned_bytes()
    }

    fn register_server_driven(
        &self,
        client: ClientId,
        registration: &RegisterKvCache,
        now: Instant,
    ) -> Reply {
        if registration.engine_type != "vllm" {
            add(&self.context.stats.service.registrations_refused, 1);
            return refuse(&format!(
                "the layout of engine {:?} is not known to this server, which copies for vllm \
                 only: let the engine copy, with lmcache.mp.mp_transfer_mode=engine_driven",
                registration.engine_type
            ));
        }
        let config = &self.context.config;
        let user = self.connections.uid_of(client);
        let instance = Instance::server_driven(registration, client, user, &self.gpus, config, now);
        let id = registration.instance_id;
        let reply = self.add_instance(id, instance, Reply::None);
        self.log_refusal(client, id, &registration.model_name, &reply);
        reply
    }

    /// Logs a refused registration. Otherwise only the engine's log would show it, which the
    /// operator of this server may not see.
    pub(super) fn log_refusal(
        &self,
        client: ClientId,
        instance_id: u64,
        model: &str,
        reply: &Reply,
    ) {
        let Reply::Error(reason) = reply else {
            return;
        };
        let context = &self.context;
        let Some(suppressed) = self.refusals.pass(context.started.elapsed()) else {
            return;
        };
        let peer = self.connections.address_of(client);
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
        let counters = &self.context.stats.service;
        let mut instance = match instance {
            Ok(instance) => instance,
            Err(error) => {
                add(&counters.registrations_refused, 1);
                return refuse(&error.to_string());
            }
        };
        if instance.chunk_bytes > self.context.engine.pool_bytes() {
            add(&counters.registrations_refused, 1);
            return refuse(&format!(
                "one chunk of this model takes {} bytes, the whole pool has {}: \
                 start the server with a larger --l1-size-gb",
                instance.chunk_bytes,
                self.context.engine.pool_bytes()
            ));
        }
        let mut workers = self.workers.lock();
        let full = workers.instances.len() >= self.context.config.max_instances;
        let of_client = |known: &&Instance| known.client == instance.client;
        let most = self.context.config.max_instances;
        let own = workers.instances.values().filter(of_client).count();
        if (full || own >= most - most / 4) && !workers.instances.contains_key(&instance_id) {
            add(&counters.over_limit, 1);
            return refuse("too many workers are registered");
        }
        if let Some(known) = workers.instances.get(&instance_id)
            && !known.belongs_to(instance.client)
        {
            // Two processes may have one id where ids are made of pids. Copies for one process
            // would land in the other's memory.
            add(&counters.registrations_refused, 1);
            return refuse(&format!(
                "another worker is connected under instance_id {instance_id}: \
                 ids must differ between workers of one server"
            ));
        }
        if !self.context.config.identity.is_empty() {
            // The operator's identity answers for the format.
            instance.opaque = None;
        }
        let joined = match workers.join_generation(instance_id, &mut instance) {
            Ok(joined) => joined,
            Err(error) => {
                add(&counters.registrations_refused, 1);
                return refuse(&format!("no random bytes for this layout's keys: {error}"));
            }
        };
        if let Some(known) = workers.instances.get(&instance_id) {
            instance.gate = known.gate.next();
            if known.fingerprint == instance.fingerprint {
                instance.ranks.clone_from(&known.ranks);
            }
        }
        let space = instance.key_space(&self.context.config, &Salt::default(), None);
        instance.describe_wider(&self.context, &space);
        self.context.spaces.describe(space.id(), space, false);
        let (model, shape) = (instance.model.clone(), instance.shape.clone());
        let (world_size, mode) = (instance.world_size, instance.mode());
        let (dtype, chunk_bytes, unit) = (instance.dtype, instance.chunk_bytes, instance.unit);
        let (unknown, declares_order) =
            (instance.unknown_fields.clone(), instance.declares_order());
        let frees_early = instance.frees_early();
        workers.refused.remove(&instance_id);
        instance.owner = workers.new_owner();
        // A worker that registers again describes itself again. The transfers that it had prepared
        // stay: their slots may still be in use.
        let replaced = workers.instances.insert(instance_id, instance);
        let two_engines = workers.two_engines(instance_id, None);
        let ended = replaced
            .as_ref()
            .and_then(|replaced| workers.ended_generation(replaced));
        drop(workers);
        self.context.engine.host().events().report_host();
        // Unmapping an engine's memory takes long, and so may a log line: no lock is held.
        if let Some(replaced) = replaced {
            replaced.close();
        }
        match unit {
            None => tracing::info!(
                instance = instance_id,
                model = model.as_str(),
                world_size,
                mode,
                ?shape,
                %dtype,
                chunk_bytes,
                "worker registered"
            ),
            Some(tokens) => tracing::debug!(
                instance = instance_id,
                tokens,
                chunk_bytes,
                "chunks of another size registered"
            ),
        }
        if !unknown.is_empty() {
            tracing::warn!(
                instance = instance_id,
                fields = ?unknown,
                "this version of lmc does not know these fields of the registration: chunks are \
                 shared only between workers that send the same values in them"
            );
        }
        if frees_early {
            tracing::warn!(
                instance = instance_id,
                "nothing of this engine is kept: its layers have sliding windows, and it may compute other \
                 tokens in their blocks before this server has copied them; start vLLM with \
                 --disable-hybrid-kv-cache-manager, or with lmc's own connector"
            );
        }
        if !declares_order {
            self.warn_of_order();
        }
        if joined == Some(Joined::First) {
            self.report_opaque(instance_id, &model);
        }
        if let Some(two) = two_engines {
            self.warn_of_two_engines(&two);
        }
        self.end_generations(ended);
        if unit.is_none() {
            add(&counters.registrations, 1);
        }
        registered
    }

    /// Warns once that the order of the bytes in shared chunks is not known. Call it while the
    /// workers are not locked.
    fn warn_of_order(&self) {
        let context = &self.context;
        let is_shared = context.config.identity.is_empty() && context.engine.has_shared_tiers();
        if is_shared && !self.warned_of_order.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                "chunks of engine-driven workers are shared with other hosts, and the client does \
                 not say whether a block holds its heads or its tokens first: where hosts differ in \
                 the version or platform of vLLM, its attention backend or VLLM_KV_CACHE_LAYOUT, \
                 start lmc serve with an --identity TEXT of its own for each kind"
            );
        }
    }

    pub(super) fn unregister(&self, client: ClientId, instance_id: u64) -> RequestOutcome {
        let mut workers = self.workers.lock();
        let known = workers.instances.get(&instance_id);
        if known.is_some_and(|instance| !instance.belongs_to(client)) {
            drop(workers);
            add(&self.context.stats.service.commits_foreign, 1);
            return RequestOutcome::Reply(refuse(&format!(
                "worker {instance_id} is connected elsewhere: it unregisters on its own connection"
            )));
        }
        let removed = workers.instances.remove(&instance_id);
        let ended = removed
            .as_ref()
            .and_then(|removed| workers.ended_generation(removed));
        drop(workers);
        self.end_generations(ended);
        let Some(instance) = removed else {
            return RequestOutcome::Reply(Reply::None);
        };
        self.context.events.unsubscribe(instance_id);
        tracing::info!(instance = instance_id, "worker unregistered");
        // The worker's transfers stay: the stock worker ends its copies only after this answer.
        // They end with its commits, or some time after its connection. The server's own copies end
        // before.
        let outcome = match instance.transport {
            Transport::EngineDriven => RequestOutcome::Reply(Reply::None),
            Transport::ServerDriven(_) => RequestOutcome::WhenIdle(instance.gate.entrance()),
        };
        instance.close();
        outcome
    }

    pub(super) fn ping(&self, client: ClientId, instance_id: Option<u64>, now: Instant) -> Reply {
        add(&self.context.stats.service.pings, 1);
        let Some(instance_id) = instance_id else {
            return Reply::Bool(true);
        };
        let mut workers = self.workers.lock();
        if let Some(instance) = workers.instances.get_mut(&instance_id) {
            if instance.belongs_to(client) {
                instance.seen(client, now);
                instance.pinged = true;
                // A ping that waited in a socket may come from a worker that no longer waits.
                if self.context.pulse.is_steady(now) {
                    instance.gate.answered(now);
                }
            }
            return Reply::Bool(true);
        }
        // A worker that this server does not know (it was restarted) registers again only when it
        // has seen the server unhealthy and then healthy. So the answer is "no" once, then "yes".
        let refused = &mut workers.refused;
        let full = refused.len() >= self.context.config.max_instances;
        if full && !refused.contains_key(&instance_id) {
            // The worker that is dropped here gets "no" once more.
            let one = refused.keys().next().copied();
            one.map(|one| refused.remove(&one));
        }
        let first = refused.insert(instance_id, now).is_none();
        Reply::Bool(!first)
    }

    /// Returns the layouts of the registered workers.
    pub(super) fn registered_layouts(&self) -> HashSet<LayoutFingerprint> {
        let workers = self.workers.lock();
        let instances = workers.instances.values();
        instances.map(|instance| instance.fingerprint).collect()
    }

    /// Returns true while no worker is registered.
    pub(super) fn is_empty(&self) -> bool {
        self.workers.lock().instances.is_empty()
    }

    /// Returns the layouts in which a lookup must find a chunk for it to count.
    ///
    /// A scheduler names its model, not its layout. If workers of one model differ in layout, and
    /// it is not known which of them the scheduler drives, only chunks that all of them have are
    /// hits: an engine is never promised a chunk that it cannot get. Workers of one engine may
    /// differ too (stages of a pipeline with more layers and fewer): a rank is asked for in the
    /// layouts of the workers that may have that rank.
    pub(super) fn candidates(
        &self,
        client: ClientId,
        key: &CacheKey,
        salt: &Salt,
    ) -> Vec<Candidate> {
        let workers = self.workers.lock();
        let mut layouts = workers.layouts(&key.model_name, key.world_size, key.identity, key.unit);
        if let Some(Binding::One(bound)) = workers.bindings.get(&client)
            && layouts
                .iter()
                .any(|layout| layout.instance.fingerprint == *bound)
        {
            layouts.retain(|layout| layout.instance.fingerprint == *bound);
        }
        if layouts.len() > MAX_LAYOUTS {
            // No chunk is in more than [`MAX_LAYOUTS`] layouts.
            return Vec::new();
        }
        let is_registered = |layout: LayoutFingerprint| {
            let mut instances = workers.instances.values();
            instances.any(|instance| instance.fingerprint == layout)
        };
        let candidate = |of: LayoutOf<'_>| {
            let spaces = of.instance.spaces(&self.context, salt, key.configs.tags);
            let wider = of.instance.wider.iter().zip(&*spaces.wider);
            let wider = wider.map(|(&layout, &space)| WiderSpace {
                space,
                layout,
                is_registered: is_registered(layout.layout),
            });
            Candidate {
                space: spaces.own,
                layout: of.instance.fingerprint,
                chunk_bytes: of.instance.chunk_bytes,
                ranks: of.ranks,
                unknown_rank: of.unknown_rank,
                wider: wider.collect(),
            }
        };
        layouts.into_iter().map(candidate).collect()
    }

    /// Returns true if workers merge chunks of a layout with this number of KV ranks into their own.
    pub(super) fn merges_layout(&self, layout: LayoutFingerprint, ranks: u32) -> bool {
        let workers = self.workers.lock();
        let merges = |worker: &Instance| {
            let mut wider = worker.wider.iter();
            wider.any(|wider| wider.layout == layout && wider.ranks(worker.world_size) == ranks)
        };
        workers.instances.values().any(merges)
    }

    /// Runs `look` on a worker.
    pub(super) fn with<T>(
        &self,
        instance_id: u64,
        look: impl FnOnce(&mut Instance) -> T,
    ) -> Option<T> {
        self.workers
            .lock()
            .instances
            .get_mut(&instance_id)
            .map(look)
    }

    /// Learns from a worker's transfer which layout a scheduler drives.
    pub(super) fn bind(&self, scheduler: ClientId, fingerprint: LayoutFingerprint) {
        let workers = &mut *self.workers.lock();
        let binding = workers
            .bindings
            .entry(scheduler)
            .or_insert(Binding::One(fingerprint));
        if *binding != Binding::One(fingerprint) {
            // A layout without workers belongs to an engine before its restart.
            let is_registered = |bound| {
                let mut registered = workers.instances.values();
                registered.any(|instance| instance.fingerprint == bound)
            };
            *binding = match *binding {
                Binding::One(bound) if !is_registered(bound) => Binding::One(fingerprint),
                _ => Binding::Several,
            };
        }
    }

    /// Warns if this worker, which serves a KV rank that `readers` workers of one engine read,
    /// shows that two engines share an opaque layout.
    pub(super) fn check_rank(&self, instance_id: u64, rank: u16, readers: u32) {
        let two = self
            .workers
            .lock()
            .two_engines(instance_id, Some((rank, readers)));
        if let Some(two) = two {
            self.warn_of_two_engines(&two);
        }
    }

    /// Notes that the connection of workers has ended. Their copies stop.
    pub(super) fn cut(&self, client: ClientId, now: Instant) {
        let mut silent = Vec::new();
        for (&instance_id, instance) in &mut self.workers.lock().instances {
            if instance.client == client {
                instance.gate.cut();
                let first = instance.orphaned.replace(now).is_none();
                silent.push((instance_id, first && instance.unit.is_none()));
            }
        }
        for (instance, first) in silent {
            self.context.events.unsubscribe(instance);
            if first {
                let peer = self.connections.address_of(client);
                tracing::info!(instance, peer, "worker's connection ended");
            }
        }
    }

    /// Forgets the layout that a scheduler drives.
    pub(super) fn unbind(&self, scheduler: ClientId) {
        self.workers.lock().bindings.remove(&scheduler);
    }

    /// Returns the connections that own a worker, or that are known to belong to a scheduler.
    pub(super) fn clients(&self) -> HashSet<ClientId> {
        let workers = self.workers.lock();
        let instances = workers.instances.values().map(|instance| instance.client);
        instances.chain(workers.bindings.keys().copied()).collect()
    }

    /// Removes workers that have been silent for too long.
    pub(super) fn remove_silent(&self, now: Instant) {
        let context = &self.context;
        let mut workers = self.workers.lock();
        let silent = silent_workers(&workers, now, &context.config);
        let mut ended_generations = Vec::new();
        let mut removed = Vec::with_capacity(silent.len());
        for instance_id in &silent {
            if let Some(instance) = workers.instances.remove(instance_id) {
                ended_generations.extend(workers.ended_generation(&instance));
                removed.push((*instance_id, instance));
            }
        }
        workers
            .refused
            .retain(|_, refused| now.saturating_duration_since(*refused) < REFUSED_TTL);
        drop(workers);
        // Unmapping an engine's memory takes long, so no lock is held.
        let gone: Vec<(u64, bool)> = (removed.iter())
            .filter(|(_, instance)| instance.unit.is_none())
            .map(|(id, instance)| (*id, instance.orphaned.is_some()))
            .collect();
        drop(removed);
        self.end_generations(ended_generations);
        add(&context.counters().workers_reaped, gone.len() as u64);
        for (instance, disconnected) in gone {
            // The worker's transfers stay: silence does not prove that it has stopped copying.
            context.events.unsubscribe(instance);
            match disconnected {
                true => tracing::info!(
                    instance,
                    "worker removed: its connection ended and it did not come back"
                ),
                false => tracing::warn!(instance, "worker removed: it was silent for too long"),
            }
        }
    }

    /// Returns the memory of a worker whose bytes the server copies, and the size of a chunk in
    /// bytes.
    pub(super) fn copies_of(
        &self,
        instance_id: u64,
    ) -> Result<(Arc<ServerCopies>, u64), InspectError> {
        let workers = self.workers.lock();
        let instance = workers
            .instances
            .get(&instance_id)
            .ok_or(InspectError::Unknown(instance_id))?;
        match &instance.transport {
            Transport::EngineDriven => Err(InspectError::NotMapped(instance_id)),
            Transport::ServerDriven(copies) => Ok((Arc::clone(copies), instance.chunk_bytes)),
        }
    }

    /// Returns the workers, the oldest first, without their transfers. A worker's registration of
    /// chunks of another size does not count as a worker.
    pub(super) fn status(&self, now: Instant) -> Vec<InstanceStatus> {
        let workers = self.workers.lock();
        let mut instances: Vec<_> = workers
            .instances
            .iter()
            .filter(|(_, instance)| instance.unit.is_none())
            .map(|(&instance_id, instance)| InstanceStatus {
                instance_id,
                model: instance.model.to_string(),
                world_size: instance.world_size,
                mode: instance.mode(),
                gpu: instance.gpu().map(|(gpu, _)| gpu.to_string()),
                gpu_bytes: instance.gpu().map_or(0, |(_, bytes)| bytes),
                shape: instance.shape.clone(),
                dtype: instance.dtype.name(),
                chunk_bytes: instance.chunk_bytes,
                mla: instance.mla,
                layout: instance.fingerprint.to_string(),
                unknown_fields: instance.unknown_fields.clone(),
                age_seconds: now
                    .saturating_duration_since(instance.registered)
                    .as_secs_f64(),
                silent_seconds: now
                    .saturating_duration_since(instance.last_seen)
                    .as_secs_f64(),
                connected: instance.orphaned.is_none(),
                pids: self.connections.pids_of(instance.client),
                transfers: 0,
            })
            .collect();
        instances.sort_by(|a, b| b.age_seconds.total_cmp(&a.age_seconds));
        instances
    }
}

/// Returns the workers that have been silent for longer than allowed.
fn silent_workers(
    workers: &Workers,
    now: Instant,
    config: &crate::service::ServiceConfig,
) -> Vec<u64> {
    workers
        .instances
        .iter()
        .filter(|(_, instance)| {
            if let Some(orphaned) = instance.orphaned {
                let grace = match instance.gpu() {
                    // Memory that is open here stays allocated after its engine's death.
                    Some(_) => config.orphan_grace.min(GPU_GRACE),
                    None => config.orphan_grace,
                };
                return now.saturating_duration_since(orphaned) >= grace;
            }
            if config.reap_timeout.is_zero() {
                return false;
            }
            let granted = if instance.pinged {
                config.reap_timeout
            } else {
                config.registration_grace
            };
            now.saturating_duration_since(instance.last_seen) >= granted
        })
        .map(|(&instance_id, _)| instance_id)
        .collect()
}

/// A layout, with the known facts about the workers that have it.
#[derive(Debug)]
pub(crate) struct LayoutOf<'a> {
    /// One of the workers with the layout.
    pub(crate) instance: &'a Instance,
    /// Ranks that workers with the layout are known to have.
    pub(crate) ranks: RankSet,
    /// True if the rank of a worker with the layout is not known yet.
    pub(crate) unknown_rank: bool,
    /// True if a worker with the layout is connected.
    connected: bool,
}

impl<'a> LayoutOf<'a> {
    fn new(instance: &'a Instance) -> Self {
        Self {
            instance,
            ranks: RankSet::default(),
            unknown_rank: false,
            connected: false,
        }
    }

    fn add(&mut self, worker: &Instance) {
        for &rank in &worker.ranks {
            self.ranks.insert(rank);
        }
        self.unknown_rank |= worker.ranks.is_empty();
        self.connected |= worker.orphaned.is_none();
    }
}

/// A set of KV ranks.
#[derive(Debug, Clone, Default)]
pub(crate) struct RankSet(Vec<u64>);

impl RankSet {
    fn insert(&mut self, rank: u16) {
        let word = usize::from(rank / 64);
        if self.0.len() <= word {
            self.0.resize(word + 1, 0);
        }
        self.0[word] |= 1 << (rank % 64);
    }

    /// Adds the ranks of another set.
    pub(crate) fn add(&mut self, other: &Self) {
        if self.0.len() < other.0.len() {
            self.0.resize(other.0.len(), 0);
        }
        for (word, other) in self.0.iter_mut().zip(&other.0) {
            *word |= other;
        }
    }

    pub(crate) fn has(&self, rank: u16) -> bool {
        let word = self.0.get(usize::from(rank / 64));
        word.is_some_and(|word| word & 1 << (rank % 64) != 0)
    }

    pub(crate) fn len(&self) -> usize {
        self.0.iter().map(|word| word.count_ones() as usize).sum()
    }
}
