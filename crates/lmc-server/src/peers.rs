//! The tier of peers as the configuration asks for it, and what this server lends to them.

use std::cmp::Reverse;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use lmc_backend::{BoxFuture, Clears, LocateHint, TooManyClears, Usage};
use lmc_backend_p2p::directory::{ChangedKeys, DirectoryHost, DirectoryServer, TableLimits};
use lmc_backend_p2p::message::{ChunkState, MAX_SPACES, SpaceNote};
use lmc_backend_p2p::{
    Chunks, LeasedChunk, NodeConfig, OwnerLimits, P2pBackend, P2pConfig, new_peer_id,
};
use lmc_engine::{
    CacheEngine, ClearLog, EventSink, Leases, OwnChunk, RemovedEvent, StoredEvent, TenantId,
    WeakEngine,
};
use lmc_key::ChunkKey;
use lmc_memory::{Arena, SealedSlot};
use lmc_transfer::{Address, ChannelConfig, Keys, PeerId, SocketConfig};
use lmc_vllm_adapter::{Service, SpaceStatus, WeakService};
use tokio::net::TcpStream;
use tokio::runtime::Handle;
use tracing::{info, warn};

use crate::config::{HostPort, ServeConfig};
use crate::nixl;

/// Static peers above which a warning says that each prompt asks all of them.
const MANY_PEERS: usize = 8;

/// Nice value of the threads that move bytes between peers: where cores are short, the copies of
/// local engines get three times as much of them.
pub(crate) const SERVING_NICE: u8 = 5;

/// The engine whose chunks are lent; set once it is made, above the tier that lends them.
#[derive(Debug, Clone)]
pub struct Lender(Arc<Lent>);

#[derive(Debug, Default)]
struct Lent {
    engine: OnceLock<WeakEngine>,
    clears: ClearLog,
    /// List of the engine's changes; set where there are directories.
    announced: OnceLock<Arc<ChangedKeys>>,
    service: OnceLock<WeakService>,
    /// The keys under which tenants' salts are described.
    keys: OnceLock<Keys>,
    /// Held while chunks of a request are summed: one request at a time, so that peers keep one
    /// thread busy at most.
    summing: tokio::sync::Mutex<()>,
}

/// Time in which a peer says which of the chunks it has that it ordered to read.
const FETCH_LOCATE_TIMEOUT: Duration = Duration::from_secs(5);

/// Bytes that are summed on another thread before the request is looked at again, about: it may
/// have ended.
const SUMMED_AT_ONCE: u64 = 8 << 20;

impl Lender {
    /// A lender of an engine with this log, which lends nothing yet.
    pub fn new(clears: ClearLog) -> Self {
        Self(Arc::new(Lent {
            clears,
            ..Lent::default()
        }))
    }

    /// Lends the chunks of this engine from now on.
    pub fn lend(&self, engine: &CacheEngine) {
        // It is called once.
        let _ = self.0.engine.set(engine.downgrade());
        if let Some(changed) = self.0.announced.get() {
            engine.set_announcer(Arc::new(Announcer(Arc::clone(changed))));
        }
    }

    /// Notes the chunks that come and go in the engine that is lent from afterwards.
    fn announce_to(&self, changed: &Arc<ChangedKeys>) {
        // It is called once.
        let _ = self.0.announced.set(Arc::clone(changed));
    }

    /// Describes the spaces of this service's engines from now on.
    pub(crate) fn describe(&self, service: &Service) {
        // It is called once.
        let _ = self.0.service.set(service.downgrade());
    }

    fn service(&self) -> Option<Service> {
        self.0.service.get()?.upgrade()
    }

    /// Returns the tenant of a prompt's chunks.
    fn tenant(&self, keys: &[ChunkKey]) -> TenantId {
        let tenant = keys.first().zip(self.service());
        tenant.map_or_else(TenantId::default, |(key, service)| {
            service.tenant_of(service.engine().space_of(key.space))
        })
    }

    fn note(&self, space: &SpaceStatus) -> SpaceNote {
        let described = &space.description;
        let salt = described.salt.as_str().as_bytes();
        let keys = self.0.keys.get().filter(|_| !salt.is_empty());
        SpaceNote {
            space: *space.id.as_bytes(),
            model: described.model.as_str().to_owned(),
            world_size: described.world_size,
            layout: *described.layout.as_bytes(),
            dtype: described.dtype.as_str().to_owned(),
            salt: keys.map_or([0; 16], |keys| keys.digest(salt)),
            identity: described.identity.as_str().to_owned(),
        }
    }

    fn engine(&self) -> Option<CacheEngine> {
        self.0.engine.get()?.upgrade()
    }

    async fn sum_in_turn(&self, mut slots: Vec<SealedSlot>) {
        let _summing = self.0.summing.lock().await;
        slots.retain(|slot| slot.known_checksum().is_none());
        while !slots.is_empty() {
            let mut bytes = 0;
            let fits = |slot: &&SealedSlot| {
                bytes += slot.len();
                bytes <= SUMMED_AT_ONCE
            };
            let count = slots.iter().take_while(fits).count().max(1);
            let rest = slots.split_off(count);
            let now = std::mem::replace(&mut slots, rest);
            let summing = tokio::task::spawn_blocking(move || {
                for slot in now {
                    slot.checksum();
                }
            });
            // A thread that cannot be had leaves the sums to the caller.
            let _ = summing.await;
        }
    }
}

impl Chunks for Lender {
    fn states(&self, keys: &[ChunkKey]) -> Vec<ChunkState> {
        let Some(engine) = self.engine() else {
            return vec![ChunkState::Absent; keys.len()];
        };
        let state = |held| match held {
            OwnChunk::Dram { len } => ChunkState::Memory { len },
            OwnChunk::Lower { len } => ChunkState::Disk { len },
            OwnChunk::Writing => ChunkState::Writing,
            OwnChunk::Absent => ChunkState::Absent,
        };
        engine.own_chunks(keys).into_iter().map(state).collect()
    }

    fn lease<'a>(
        &'a self,
        keys: &'a [ChunkKey],
        promote_until: Instant,
    ) -> BoxFuture<'a, Vec<Option<LeasedChunk>>> {
        Box::pin(async move {
            let Some(engine) = self.engine() else {
                return keys.iter().map(|_| None).collect();
            };
            let tenant = self.tenant(keys);
            let leased = engine.lease_own(tenant, keys, promote_until).await;
            let chunk = |leases: Option<Leases>| {
                let leases = leases?;
                let slot = leases.get(0)?.clone();
                Some(LeasedChunk {
                    checksum: None,
                    slot,
                    lease: Box::new(leases),
                })
            };
            let mut held: Vec<_> = leased.into_iter().map(chunk).collect();
            if engine.pool_is_lost() {
                held.iter_mut().for_each(|chunk| *chunk = None);
            }
            held
        })
    }

    fn sum(&self, slots: Vec<SealedSlot>) -> BoxFuture<'static, ()> {
        let this = self.clone();
        Box::pin(async move { this.sum_in_turn(slots).await })
    }

    fn list(&self, from: u128, limit: usize) -> BoxFuture<'_, (Vec<ChunkKey>, Option<u128>)> {
        Box::pin(async move {
            match self.engine() {
                Some(engine) => engine.list_own(from, limit).await,
                None => (Vec::new(), None),
            }
        })
    }

    fn fetch<'a>(&'a self, keys: &'a [ChunkKey], from: &'a PeerId) -> BoxFuture<'a, ()> {
        Box::pin(async move {
            if let Some(engine) = self.engine() {
                let sources = Arc::new([from.to_string()]);
                let hint = LocateHint::default().with_sources(sources);
                // No prompt waits for it.
                let hint = hint.with_timeout(FETCH_LOCATE_TIMEOUT);
                engine.promote_for_peer(self.tenant(keys), keys, hint).await;
            }
        })
    }

    fn clears(&self) -> Arc<Clears> {
        self.0.clears.clears()
    }

    fn clears_are_noted(&self) -> bool {
        self.0.clears.is_noted()
    }

    fn learn(&self, clears: Clears) -> BoxFuture<'_, Result<(), TooManyClears>> {
        let log = self.0.clears.clone();
        Box::pin(async move {
            // It blocks for the state file.
            let learning = tokio::task::spawn_blocking(move || log.learn(&clears, "a peer"));
            // The runtime ends with the process alone.
            learning.await.map_or(Ok(()), |learned| learned.map(drop))
        })
    }

    fn spaces(&self) -> Vec<SpaceNote> {
        let Some(service) = self.service() else {
            return Vec::new();
        };
        let mut spaces = service.spaces();
        spaces.sort_by_key(|space| (Reverse((space.registered, space.chunks)), space.id));
        spaces.truncate(MAX_SPACES);
        spaces.iter().map(|space| self.note(space)).collect()
    }

    fn usage(&self) -> Usage {
        let engine = self.engine();
        engine.map_or_else(Usage::default, |engine| {
            let usage = engine.usage();
            Usage::new(usage.chunks, usage.chunk_bytes).with_capacity(usage.pool_bytes)
        })
    }
}

/// Notes the chunks that come and go in DRAM, for directories.
#[derive(Debug)]
struct Announcer(Arc<ChangedKeys>);

impl EventSink for Announcer {
    fn on_stored(&self, event: StoredEvent<'_>) {
        self.0.note(event.key);
    }

    fn on_removed(&self, event: RemovedEvent<'_>) {
        self.0.note(event.key);
    }
}

/// Starts the directory that this server hosts, if the configuration has one.
pub(crate) fn host_directory(
    config: &ServeConfig,
    arena: &Arc<Arena>,
) -> Result<Option<DirectoryServer>> {
    let Some(listen) = &config.p2p_directory_listen else {
        return Ok(None);
    };
    let name = config.p2p_name.clone().unwrap_or_else(host_name);
    let channel = channel(config, arena, &format!("{name}-directory"), listen)?;
    let limits = TableLimits::for_entries(config.p2p_directory_entries);
    let directory = DirectoryHost::new(name, limits)
        .and_then(|host| DirectoryServer::start(host, channel, Handle::current()))
        .map_err(|error| anyhow!("--p2p-directory-listen {listen}: {error}"))?;
    info!("directory: listening on {}", directory.address());
    Ok(Some(directory))
}

/// Returns the settings of a channel to other daemons.
fn channel(
    config: &ServeConfig,
    arena: &Arc<Arena>,
    name: &str,
    listen: &HostPort,
) -> Result<SocketConfig> {
    let id = new_peer_id(name).with_context(|| format!("no random number for {listen}"))?;
    let mut channel = ChannelConfig::new(id, Arc::clone(arena));
    if let Some(path) = &config.p2p_key {
        channel.keys = Some(Keys::read(path).map_err(|error| anyhow!("--p2p-key: {error}"))?);
    } else {
        // Every user of this host can connect to loopback and listen there, and no other address is
        // used without a key.
        let users = config.trusted_users.clone();
        let admit = move |stream: &TcpStream| users.check(stream).map_err(|why| why.to_string());
        channel.admit = Some(Arc::new(admit));
    }
    channel.encrypt_objects = config.p2p_encrypt;
    Ok(SocketConfig::new(channel, address(listen)))
}

/// The tier of peers that lends the chunks of this server's engine.
pub(crate) type Peers = Arc<P2pBackend<Lender>>;

/// Starts the tier, if the configuration has one.
pub(crate) fn open(
    config: &ServeConfig,
    arena: &Arc<Arena>,
    lender: &Lender,
) -> Result<Option<Peers>> {
    let Some(listen) = &config.p2p_listen else {
        return Ok(None);
    };
    let name = config.p2p_name.clone().unwrap_or_else(host_name);
    let mut channel = channel(config, arena, &name, listen)?;
    let nixl = nixl::open(config, &channel.channel, listen)?;
    if let Some(keys) = &channel.channel.keys {
        // It is called once.
        let _ = lender.0.keys.set(keys.clone());
    }
    channel.nice = SERVING_NICE;
    let pool = arena.len() as u64;
    let advertised = config.p2p_advertise.as_ref();
    let advertised = advertised.map_or_else(String::new, HostPort::to_string);
    let mut node = NodeConfig::new(name, advertised, pool);
    node.chunk_size = u32::try_from(config.chunk_size).context("--chunk-size")?;
    node.algorithm = config.hash_algorithm.name().to_owned();
    node.limits = OwnerLimits::for_pool(pool);
    node.max_chunk = pool / 16;
    node.limits.bytes_per_second = config.p2p_serve_rate;
    let mut tier = P2pConfig::new(node, channel);
    tier.nixl = nixl;
    tier.peers = config.p2p_peers.iter().map(HostPort::to_string).collect();
    let directories = config.p2p_directories.iter().map(HostPort::to_string);
    tier.directories = directories.collect();
    if tier.peers.len() > MANY_PEERS {
        warn!(
            peers = tier.peers.len(),
            "lookups slow down with more than {MANY_PEERS} peers, because each prompt that is not here asks all of them; name fewer in --p2p-peer, or use --p2p-directory"
        );
    }
    let tier = P2pBackend::start(tier, lender.clone(), Handle::current())
        .map_err(|error| anyhow!("--p2p-listen {listen}: {error}"))?;
    info!("peers: listening on {}", tier.address());
    if !config.p2p_directories.is_empty() {
        lender.announce_to(tier.node().changed());
    }
    Ok(Some(Arc::new(tier)))
}

fn address(at: &HostPort) -> Address {
    Address::Tcp {
        host: at.host.clone(),
        port: at.port,
    }
}

/// Returns the name of this host, as far as a peer's name may have its characters.
fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let valid = |c: &char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    let name: String = name.trim().chars().filter(valid).take(64).collect();
    match name.is_empty() {
        true => "lmc".to_owned(),
        false => name,
    }
}

#[cfg(test)]
mod tests {
    use lmc_backend::conformance::{fill_value, test_key};
    use lmc_engine::{EngineConfig, OwnerId, StoreRequest, StoreStart, TenantId};
    use lmc_memory::{ArenaConfig, checksum};
    use lmc_testkit::soon;

    use super::*;

    /// Bytes of a chunk of which two are summed apart.
    const LEN: u64 = SUMMED_AT_ONCE / 2 + 4096;

    #[tokio::test]
    async fn a_lease_sums_nothing_and_sums_that_are_asked_for_stay() {
        let arena = ArenaConfig::anonymous(64 << 20).build().expect("64 MiB");
        let engine = CacheEngine::new(EngineConfig::default(), Arc::new(arena));
        let engine = engine.expect("an engine");
        let lender = Lender::new(ClearLog::default());
        lender.lend(&engine);
        let keys = [0, 12, 24].map(test_key);
        let request = |key| StoreRequest {
            key,
            parent: None,
            tenant: TenantId(0),
            len: LEN,
        };
        let starts = engine.store(OwnerId(1), engine.clears_id(), &keys.map(request));
        let ticket = |start| match start {
            StoreStart::Reserved(ticket) => ticket,
            other => panic!("{other:?}"),
        };
        let mut tickets: Vec<_> = starts.into_iter().map(ticket).collect();
        for (key, ticket) in keys.iter().zip(&mut tickets) {
            fill_value(key, ticket.bytes_mut());
        }
        engine.commit(tickets);
        let known = || {
            let leases = engine
                .acquire(OwnerId(1), engine.clears_id(), &keys)
                .expect("they are there");
            let known = leases.iter().map(SealedSlot::known_checksum);
            known.collect::<Vec<_>>()
        };
        assert_eq!(known(), [None; 3], "a store sums nothing");
        let leased = lender.lease(&keys, soon()).await;
        let slots: Vec<SealedSlot> = leased.into_iter().flatten().map(|c| c.slot).collect();
        assert_eq!((slots.len(), known()), (3, vec![None; 3]));
        for _ in 0..2 {
            lender.sum(slots.clone()).await;
            let sums = slots.iter().map(|slot| Some(checksum(slot.bytes())));
            assert_eq!(sums.collect::<Vec<_>>(), known());
        }
    }
}
