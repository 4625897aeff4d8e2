//! The tiers that other processes share: peers and stores.

use std::net::IpAddr;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use lmc_backend::{Backend, Host};
use lmc_backend_p2p::{NodeConfig, P2pBackend, P2pConfig, new_peer_id};
use lmc_backend_remote::{RemoteConfig, RemoteTier, StoreOptions, open_store};
use lmc_engine::{EngineContext, LowerTier, TierPolicy};
use lmc_key::KeySpace;
use lmc_memory::Arena;
use lmc_transfer::{Address, ChannelConfig, Keys, SocketConfig, SocketError};
use tokio::runtime::{Builder, Handle, Runtime};

use crate::BuildError;

/// Time that the stores have to answer before the cache goes on without them.
const START: Duration = Duration::from_millis(500);

/// The shared tiers that settings name.
#[derive(Debug, Clone, Default)]
pub(crate) struct Settings {
    pub(crate) peers: Option<Peers>,
    pub(crate) stores: Vec<String>,
}

/// Settings of the tier of peers.
#[derive(Debug, Clone)]
pub(crate) struct Peers {
    pub(crate) listen: String,
    pub(crate) keys: Keys,
    pub(crate) peers: Vec<String>,
}

/// The shared tiers of a cache.
#[derive(Debug, Default)]
pub(crate) struct SharedTiers {
    pub(crate) peers: Option<Arc<P2pBackend>>,
    stores: Vec<Arc<RemoteTier>>,
    /// The threads of the tiers, if they are the cache's own.
    threads: Option<Arc<Threads>>,
}

/// A runtime whose drop does not wait for its tasks.
#[derive(Debug)]
struct Threads(Option<Runtime>);

impl Drop for Threads {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

impl SharedTiers {
    /// Returns the tiers for the engine: peers, then the stores in their order.
    pub(crate) fn tiers(&self) -> Vec<LowerTier> {
        let peers = self.peers.iter().map(|peers| {
            let tier = Arc::clone(peers) as Arc<dyn Backend>;
            LowerTier::from(tier)
        });
        let stores = self.stores.iter().map(|store| {
            let tier = Arc::clone(store) as Arc<dyn Backend>;
            LowerTier::new(tier, TierPolicy::of_store(RemoteConfig::default().timeout))
        });
        let keep = |tier: LowerTier| match &self.threads {
            Some(threads) => tier.keeping(Arc::clone(threads) as _),
            None => tier,
        };
        peers.chain(stores).map(keep).collect()
    }

    /// Waits until the stores have answered, at most for [`START`]: most answer at once.
    fn await_stores(&self, runtime: &Handle) {
        let deadline = Instant::now() + START;
        let (done, all_done) = mpsc::channel::<()>();
        for store in &self.stores {
            let (store, done) = (Arc::clone(store), done.clone());
            runtime.spawn(async move {
                store.ready(deadline).await;
                drop(done);
            });
        }
        drop(done);
        // Returns when each task has dropped its sender.
        let _ = all_done.recv_timeout(START);
    }
}

impl Settings {
    /// Opens the tiers, on the engine's runtime.
    pub(crate) fn open(
        self,
        context: &mut EngineContext,
        space: &KeySpace,
        chunk_bytes: u64,
    ) -> Result<SharedTiers, BuildError> {
        let mut shared = SharedTiers::default();
        if self.peers.is_none() && self.stores.is_empty() {
            return Ok(shared);
        }
        let runtime = match &context.runtime {
            Some(runtime) => runtime.clone(),
            None => {
                let builder = &mut Builder::new_multi_thread();
                let builder = builder.worker_threads(2).thread_name("lmc-tiers");
                let runtime = builder.enable_all().build();
                let runtime = runtime.map_err(|error| BuildError::Runtime(error.into()))?;
                let handle = runtime.handle().clone();
                shared.threads = Some(Arc::new(Threads(Some(runtime))));
                handle
            }
        };
        context.runtime = Some(runtime.clone());
        let (arena, host) = (&context.arena, &context.host);
        if let Some(peers) = self.peers {
            let mut node = NodeConfig::new("lmc", "", arena.len() as u64);
            node.chunk_size = space.chunk_size;
            node.max_chunk = chunk_bytes;
            let tier = peers.start(node, arena, Arc::new(host.clone()), runtime.clone())?;
            shared.peers = Some(Arc::new(tier));
        }
        for (number, url) in self.stores.iter().enumerate() {
            let store = open_store(url, StoreOptions::default())?.store();
            let config = RemoteConfig::nth(number);
            let tier = config.start(store, Arc::new(host.clone()), runtime.clone());
            shared.stores.push(Arc::new(tier));
        }
        shared.await_stores(&runtime);
        Ok(shared)
    }
}

impl Peers {
    fn start(
        self,
        node: NodeConfig,
        arena: &Arc<Arena>,
        host: Arc<dyn Host>,
        runtime: Handle,
    ) -> Result<P2pBackend, BuildError> {
        let id = new_peer_id(&node.name).map_err(SocketError::from)?;
        let mut channel = ChannelConfig::new(id, Arc::clone(arena));
        channel.keys = Some(self.keys);
        let listen: Address = format!("tcp://{}", self.listen).parse()?;
        // Other processes reach this one by that address.
        if let Address::Tcp { host, .. } = &listen
            && host.parse::<IpAddr>().is_ok_and(|ip| ip.is_unspecified())
        {
            return Err(BuildError::EveryAddress { host: host.clone() });
        }
        let mut config = P2pConfig::new(node, SocketConfig::new(channel, listen));
        config.peers = self.peers;
        Ok(config.start(host, runtime)?)
    }
}
