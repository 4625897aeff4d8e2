//! Starts and kills channels with NIXL.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use lmc_memory::Arena;
use lmc_transfer::conformance::Rig;
use lmc_transfer::{
    Address, ChannelConfig, DataPlane, Key, NixlConfig, SocketChannel, SocketConfig, SocketError,
    TransferChannel, block_on,
};

/// Names the scenario of a process of a test.
pub(crate) const SCENARIO: &str = "LMC_NIXL_SCENARIO";

/// Returns whether there is no library; says so where that is.
pub(crate) fn skipped() -> bool {
    if std::env::var_os("LMC_NIXL_LIBRARY").is_some() {
        return false;
    }
    println!("skipped: LMC_NIXL_LIBRARY names no library of NIXL; `cargo xtask test-nixl` gets it");
    true
}

/// Channels whose sessions are Unix sockets in a folder of their own.
pub(crate) struct NixlRig {
    folder: PathBuf,
    own: bool,
    tcp: bool,
    /// Bytes that are registered at a time.
    pub(crate) piece: u64,
}

impl NixlRig {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let next = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("lmc-nixl-{}-{next}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&folder).expect("a folder for sockets");
        Self {
            folder,
            own: true,
            tcp: false,
            piece: 1 << 30,
        }
    }

    /// Makes a rig whose sessions are of TCP, at free ports.
    pub(crate) fn with_ports() -> Self {
        let mut rig = Self::beside(PathBuf::new());
        rig.tcp = true;
        rig
    }

    /// Over the folder of another process.
    pub(crate) fn beside(folder: PathBuf) -> Self {
        Self {
            folder,
            own: false,
            tcp: false,
            piece: 1 << 30,
        }
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }
}

impl Drop for NixlRig {
    fn drop(&mut self) {
        if self.own {
            let _ = std::fs::remove_dir_all(&self.folder);
        }
    }
}

impl Rig for NixlRig {
    type Channel = SocketChannel;

    fn channel(
        &self,
        id: &str,
        arena: Arc<Arena>,
        change: impl FnOnce(&mut ChannelConfig),
    ) -> SocketChannel {
        let address = match self.tcp {
            true => "tcp://127.0.0.1:0".parse().expect("an address"),
            false => Address::Unix(self.folder.join(id)),
        };
        let mut config = ChannelConfig::new(id.parse().expect("a name of the suite"), arena);
        config.keys = Key::new(b"the key of all channels of a test")
            .ok()
            .map(Into::into);
        change(&mut config);
        let mut nixl = NixlConfig::default();
        nixl.piece = self.piece;
        let nixl = config.keys.is_some().then(|| nixl.open(&config));
        let mut config = SocketConfig::new(config, address);
        config.nixl = nixl.map(|nixl| nixl.expect("NIXL's library"));
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            match config.clone().build() {
                Ok(channel) => return channel,
                // One that was dropped lets go of its address in the background.
                Err(SocketError::Listen { .. }) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                Err(error) => panic!("{error}"),
            }
        }
    }

    fn plane(&self) -> DataPlane {
        DataPlane::Nixl
    }

    fn kill(&self, channel: &SocketChannel) {
        let deadline = Instant::now() + Duration::from_secs(30);
        block_on(channel.close(deadline)).expect("nothing holds it");
    }
}
