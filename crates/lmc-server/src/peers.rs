//! Opens the tier of peers of the configuration.

use std::sync::Arc;

use anyhow::{Context, Result, anyhow};
use lmc_backend_p2p::directory::{DirectoryHost, DirectoryServer, TableLimits};
use lmc_backend_p2p::{NodeConfig, OwnerLimits, P2pBackend, P2pConfig, new_peer_id};
use lmc_engine::EngineHost;
use lmc_memory::Arena;
use lmc_transfer::{Address, ChannelConfig, Keys, SocketConfig};
use tokio::net::TcpStream;
use tokio::runtime::Handle;
use tracing::{info, warn};

use crate::config::{HostPort, ServeConfig};
use crate::nixl;

/// Number of static peers above which a warning says that each prompt asks all of them.
const MANY_PEERS: usize = 8;

/// Nice value of the threads that move bytes between peers: when cores are short, the copies of local
/// engines get three times as much CPU time.
const SERVING_NICE: u8 = 5;

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
        // Without a key, only loopback addresses are used. Every user of this host can connect and
        // listen there, so each connection's user is checked.
        let users = config.trusted_users.clone();
        let admit = move |stream: &TcpStream| match users.check(stream) {
            Ok(_) => Ok(()),
            Err(why) => Err(why.to_string()),
        };
        channel.admit = Some(Arc::new(admit));
    }
    channel.encrypt_objects = config.p2p_encrypt;
    Ok(SocketConfig::new(channel, address(listen)))
}

/// Starts the tier, if the configuration has one.
pub(crate) fn open(
    config: &ServeConfig,
    arena: &Arc<Arena>,
    host: EngineHost,
) -> Result<Option<Arc<P2pBackend>>> {
    let Some((peers, listen)) = config
        .peers()
        .and_then(|peers| Some((peers, peers.listen.as_ref()?)))
    else {
        return Ok(None);
    };
    let name = config.p2p_name.clone().unwrap_or_else(host_name);
    let mut channel = channel(config, arena, &name, listen)?;
    channel.nice = SERVING_NICE;
    nixl::open(config, peers, &mut channel)?;
    let pool = arena.len() as u64;
    let advertised = peers.advertise.as_ref();
    let advertised = advertised.map_or_else(String::new, HostPort::to_string);
    let mut node = NodeConfig::new(name, advertised, pool);
    node.chunk_size = u32::try_from(config.chunk_size).context("--chunk-size")?;
    node.algorithm = config.hash_algorithm.name().to_owned();
    node.limits = OwnerLimits::for_pool(pool);
    node.max_chunk = pool / 16;
    node.limits.bytes_per_second = peers.serve_rate;
    let mut tier = P2pConfig::new(node, channel);
    tier.peers = peers.peers.iter().map(HostPort::to_string).collect();
    let directories = peers.directories.iter().map(HostPort::to_string);
    tier.directories = directories.collect();
    if tier.peers.len() > MANY_PEERS {
        warn!(
            peers = tier.peers.len(),
            "lookups slow down with more than {MANY_PEERS} peers, because all peers are asked for each prompt that this server does not have; name fewer peers in --p2p-peer, or use --p2p-directory"
        );
    }
    let tier = tier
        .start(Arc::new(host), Handle::current())
        .map_err(|error| anyhow!("--p2p-listen {listen}: {error}"))?;
    info!("peers: listening on {}", tier.address());
    Ok(Some(Arc::new(tier)))
}

fn address(at: &HostPort) -> Address {
    Address::Tcp {
        host: at.host.clone(),
        port: at.port,
    }
}

/// Returns the name of this host, without characters that a peer's name must not have.
fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let valid = |c: &char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    let name: String = name.trim().chars().filter(valid).take(64).collect();
    match name.is_empty() {
        true => "lmc".to_owned(),
        false => name,
    }
}
