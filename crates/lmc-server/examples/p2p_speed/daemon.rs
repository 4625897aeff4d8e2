//! A daemon as far as peers need it: a pool, an engine, the tier of peers. And a bare channel.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::{Result, bail};
use lmc_backend::Backend;
use lmc_backend::conformance::test_key;
use lmc_backend_p2p::{NodeConfig, P2pBackend, P2pConfig, new_peer_id};
use lmc_engine::{CacheEngine, EngineConfig, EngineContext, EngineHost};
use lmc_key::{ChunkKey, SpaceId};
use lmc_memory::{Arena, ArenaConfig, Demand, Prefault};
use lmc_transfer::{Address, ChannelConfig, Key, PeerId, SocketConfig, TransferChannel};
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

/// Transport of the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Transport {
    Sockets,
    Nixl,
}

impl Transport {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Sockets => "sockets",
            Self::Nixl => "nixl",
        }
    }

    pub(crate) fn named(name: Option<&str>) -> Result<Self> {
        match name {
            Some("sockets") => Ok(Self::Sockets),
            Some("nixl") => Ok(Self::Nixl),
            other => bail!("no such transport: {other:?}"),
        }
    }

    /// Opens a channel whose peers read any slot of the memory.
    pub(crate) fn bare_channel(
        self,
        name: &str,
        memory: &Arc<Arena>,
    ) -> Result<Arc<dyn TransferChannel>> {
        let mut config = channel(name.parse()?, memory)?;
        config.open_arena = true;
        Ok(Arc::new(
            self.over(SocketConfig::new(config, any_port()?))?.build()?,
        ))
    }

    /// Gives a channel NIXL where it is to have that.
    fn over(self, config: SocketConfig) -> Result<SocketConfig> {
        match self {
            Self::Sockets => Ok(config),
            Self::Nixl => nixl(config),
        }
    }
}

fn any_port() -> Result<Address> {
    Ok("tcp://127.0.0.1:0".parse()?)
}

fn channel(id: PeerId, memory: &Arc<Arena>) -> Result<ChannelConfig> {
    let mut config = ChannelConfig::new(id, Arc::clone(memory));
    config.keys = Some(Key::new(&[7; 32])?.into());
    Ok(config)
}

#[cfg(feature = "nixl")]
fn nixl(mut config: SocketConfig) -> Result<SocketConfig> {
    config.nixl = Some(lmc_transfer::NixlConfig::default().open(&config.channel)?);
    Ok(config)
}

#[cfg(not(feature = "nixl"))]
fn nixl(_: SocketConfig) -> Result<SocketConfig> {
    bail!("built without the feature `nixl`")
}

/// A daemon among its peers.
pub(crate) struct Daemon {
    pub(crate) engine: CacheEngine,
    pub(crate) memory: Arc<Arena>,
    pub(crate) tier: Arc<P2pBackend>,
    /// Address that peers connect to.
    pub(crate) address: String,
    _runtime: Runtime,
}

impl Daemon {
    pub(crate) fn start(
        name: &str,
        pool: usize,
        peers: Vec<String>,
        transport: Transport,
    ) -> Result<Self> {
        let memory = arena(pool)?;
        // As `lmc serve` has it.
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let runtime = Builder::new_multi_thread()
            .worker_threads(cores.clamp(2, 8))
            .enable_all()
            .build()?;
        let channel = channel(new_peer_id(name)?, &memory)?;
        let channel = transport.over(SocketConfig::new(channel, any_port()?))?;
        let node = NodeConfig::new(name, "", pool as u64);
        let mut tier = P2pConfig::new(node, channel);
        tier.peers = peers;
        let mut context = EngineContext::new(Arc::clone(&memory), EngineHost::default());
        let host = Arc::new(context.host.clone());
        let tier = tier.start(host, runtime.handle().clone())?;
        let address = tier.address().to_string();
        context.runtime = Some(runtime.handle().clone());
        let tier = Arc::new(tier);
        let engine = context.with_tiers([Arc::clone(&tier) as Arc<dyn Backend>]);
        let engine = EngineConfig::default().start(engine)?;
        Ok(Self {
            engine,
            memory,
            tier,
            // Peers are named without the scheme.
            address: address.trim_start_matches("tcp://").to_owned(),
            _runtime: runtime,
        })
    }
}
