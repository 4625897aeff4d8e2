//! NIXL between peers: when it is used, and the variables that it reads from the environment.

use anyhow::Result;
use lmc_transfer::SocketConfig;

use crate::config::{PeerTransport, PeersSettings, ServeConfig};

/// Returns true if the configuration allows NIXL.
fn is_allowed(config: &ServeConfig) -> bool {
    let peers = config.peers();
    peers.is_some_and(|peers| peers.transport != PeerTransport::Sockets) && !config.p2p_encrypt
}

#[cfg(not(feature = "nixl"))]
pub(crate) fn set_variables(_: &ServeConfig) {}

/// Fails if the configuration requires NIXL, which this build does not have.
#[cfg(not(feature = "nixl"))]
pub(crate) fn open(
    config: &ServeConfig,
    peers: &PeersSettings,
    _: &mut SocketConfig,
) -> Result<()> {
    anyhow::ensure!(
        !is_allowed(config) || peers.transport != PeerTransport::Nixl,
        "--p2p-transport nixl: this build of lmc has no NIXL; build lmc with `--features nixl`, or \
         choose sockets or auto"
    );
    Ok(())
}

#[cfg(feature = "nixl")]
pub(crate) use with_nixl::{open, set_variables};

#[cfg(feature = "nixl")]
mod with_nixl {
    use std::thread::{self, ScopedJoinHandle};

    use anyhow::bail;
    use lmc_transfer::{NixlConfig, has_rdma};
    use tracing::{info, warn};

    use super::*;

    /// Calls `f` on a thread with the nice value of threads that serve peers. Threads that `f` starts,
    /// also those of NIXL and UCX, inherit the value.
    fn nicer<T: Send>(nice: u8, f: impl FnOnce() -> T + Send) -> T {
        let call = || {
            // For this thread only. It cannot fail: the system refuses only lower values.
            let _ = rustix::process::nice(nice.into());
            f()
        };
        let thread = thread::Builder::new().name("lmc-nixl-start".to_owned());
        thread::scope(|scope| {
            let called = thread.spawn_scoped(scope, call).map(ScopedJoinHandle::join);
            match called.expect("a process that starts has threads") {
                Ok(value) => value,
                Err(panic) => std::panic::resume_unwind(panic),
            }
        })
    }

    /// Variables that UCX and NIXL read when they are loaded; see [`NixlConfig::open`].
    const VARIABLES: [(&str, &str); 4] = [
        ("UCX_MODULES", "^efa"),
        ("UCX_LOG_FILE", "stderr"),
        ("UCX_LOG_LEVEL", "error"),
        ("NIXL_LOG_LEVEL", "ERROR"),
    ];

    /// Sets the variables of UCX and NIXL that are not set. Must be called before any thread
    /// starts.
    pub(crate) fn set_variables(config: &ServeConfig) {
        if !is_allowed(config) {
            return;
        }
        let unset = |(name, _): &(&str, &str)| std::env::var_os(name).is_none();
        let interfaces = config.peers().and_then(|peers| peers.interfaces.as_deref());
        let interfaces = interfaces.map(|names| ("UCX_NET_DEVICES", names));
        for (name, value) in VARIABLES.into_iter().filter(unset).chain(interfaces) {
            // SAFETY: the process has only one thread so far, so no other thread reads the environment.
            unsafe { std::env::set_var(name, value) };
        }
    }

    /// Opens NIXL for a channel, if it is to be used. Blocks for about half a second.
    ///
    /// # Errors
    /// The configuration requires NIXL, and it cannot be opened.
    pub(crate) fn open(
        config: &ServeConfig,
        peers: &PeersSettings,
        channel: &mut SocketConfig,
    ) -> Result<()> {
        let demanded = peers.transport == PeerTransport::Nixl;
        let why_not = match () {
            () if !is_allowed(config) => return Ok(()),
            () if demanded => None,
            () if !has_rdma() => Some("no RDMA port of this host is active"),
            () if channel.channel.keys.is_none() => Some("NIXL requires --p2p-key"),
            () => None,
        };
        if let Some(why) = why_not {
            info!("peers: bytes go over sockets: {why}");
            return Ok(());
        }
        match nicer(channel.nice, || {
            NixlConfig::default().open(&channel.channel)
        }) {
            Ok(nixl) => {
                info!("peers: bytes go over NIXL if both sides have it");
                channel.nixl = Some(nixl);
                Ok(())
            }
            Err(error) if demanded => bail!("--p2p-transport nixl: {error}"),
            Err(error) => {
                warn!("peers: bytes go over sockets: {error}");
                Ok(())
            }
        }
    }
}
