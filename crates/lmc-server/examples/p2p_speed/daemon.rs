//! A daemon as far as peers need it: a pool, an engine, the tier of peers. And a bare channel.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::Result;
use lmc_backend::Backend;
use lmc_backend::conformance::test_key;
use lmc_backend_p2p::{NodeConfig, P2pBackend, P2pConfig, new_peer_id};
use lmc_engine::{CacheEngine, EngineConfig};
use lmc_key::{ChunkKey, SpaceId};
use lmc_memory::{Arena, ArenaConfig, Demand, Prefault};
use lmc_server::Lender;
use lmc_transfer::{ChannelConfig, SocketChannel, SocketConfig};
use tokio::runtime::{Builder, Runtime};

pub(crate) const SPACE: SpaceId = SpaceId::new([1; 16]);
/// Name of the owner's bare channel.
pub(crate) const BARE_OWNER: &str = "bare-owner";
/// Chunks of a prompt, at most.
const MOST_CHUNKS: u64 = 1 << 16;

/// Returns the keys of a prompt.
pub(crate) fn prompt(number: u64, chunks: usize) -> Vec<ChunkKey> {
    let first = number * MOST_CHUNKS;
    let key = |n| ChunkKey {
        space: SPACE,
        kv_rank: 0,
        group: 0,
        ..test_key(4 * n)
    };
    (first..first + chunks as u64).map(key).collect()
}

/// Returns memory that is there.
pub(crate) fn arena(bytes: usize) -> Result<Arc<Arena>> {
    let arena = ArenaConfig::anonymous(bytes)
        .with_huge_pages(Demand::Auto)
        .with_prefault(Prefault::Background { threads: 2 })
        .build()?;
    while arena.prefault_progress().done < arena.prefault_progress().total {
        thread::sleep(Duration::from_millis(1));
    }
    Ok(Arc::new(arena))
}

/// Opens a channel whose peers read any slot of the memory.
pub(crate) fn bare_channel(name: &str, memory: &Arc<Arena>) -> Result<SocketChannel> {
    let mut config = ChannelConfig::new(name.parse()?, Arc::clone(memory));
    config.open_arena = true;
    Ok(SocketConfig::new(config, "tcp://127.0.0.1:0".parse()?).build()?)
}

/// A daemon among its peers.
pub(crate) struct Daemon {
    pub(crate) engine: CacheEngine,
    pub(crate) memory: Arc<Arena>,
    /// Address that peers connect to.
    pub(crate) address: String,
    _runtime: Runtime,
}

impl Daemon {
    pub(crate) fn start(name: &str, pool: usize, peers: Vec<String>) -> Result<Self> {
        let memory = arena(pool)?;
        // As `lmc serve` has it.
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let runtime = Builder::new_multi_thread()
            .worker_threads(cores.clamp(2, 8))
            .enable_all()
            .build()?;
        let channel = ChannelConfig::new(new_peer_id(name)?, Arc::clone(&memory));
        let channel = SocketConfig::new(channel, "tcp://127.0.0.1:0".parse()?);
        let node = NodeConfig::new(name, "", pool as u64);
        let mut tier = P2pConfig::new(node, channel);
        tier.peers = peers;
        let lender = Lender::default();
        let tier = P2pBackend::start(tier, lender.clone(), runtime.handle().clone())?;
        let address = tier.address().to_string();
        let mut config = EngineConfig::default();
        config.runtime = Some(runtime.handle().clone());
        let tiers: Vec<Arc<dyn Backend>> = vec![Arc::new(tier)];
        let engine = CacheEngine::with_tiers(config, Arc::clone(&memory), tiers)?;
        lender.lend(&engine);
        Ok(Self {
            engine,
            memory,
            // Peers are named without the scheme.
            address: address.trim_start_matches("tcp://").to_owned(),
            _runtime: runtime,
        })
    }
}
