//! Starts and kills socket channels.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use lmc_memory::Arena;
use lmc_testkit::{free_port, until};
use lmc_transfer::conformance::Rig;
use lmc_transfer::{
    Address, ChannelConfig, SocketChannel, SocketConfig, TransferChannel, block_on,
};
use parking_lot::Mutex;

fn start(
    id: &str,
    arena: Arc<Arena>,
    listen: Address,
    change: impl FnOnce(&mut ChannelConfig),
) -> SocketChannel {
    let id = id.parse().expect("the suite's names are valid");
    let mut config = SocketConfig::new(ChannelConfig::new(id, arena), listen);
    change(&mut config.channel);
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        match config.clone().build() {
            Ok(channel) => return channel,
            // One that was dropped lets go of its address in the background.
            Err(_) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(5)),
            Err(error) => panic!("{error}"),
        }
    }
}

/// Leaves to peers what a killed process leaves: closed sockets.
fn kill(channel: &SocketChannel) {
    let soon = Instant::now() + Duration::from_secs(60);
    block_on(channel.close(soon)).expect("threads end");
}

#[derive(Default)]
pub(crate) struct Tcp {
    ports: Mutex<HashMap<String, u16>>,
}

impl Rig for Tcp {
    type Channel = SocketChannel;

    fn channel(
        &self,
        id: &str,
        arena: Arc<Arena>,
        change: impl FnOnce(&mut ChannelConfig),
    ) -> SocketChannel {
        let mut ports = self.ports.lock();
        // A channel may start again at its port, which no other process may take meanwhile.
        let port = *ports.entry(id.to_owned()).or_insert_with(free_port);
        let host = "127.0.0.1".to_owned();
        let listen = Address::Tcp { host, port };
        start(id, arena, listen, change)
    }

    fn kill(&self, channel: &SocketChannel) {
        kill(channel);
    }
}

/// Names its sockets in a folder of its own.
pub(crate) struct Unix {
    folder: PathBuf,
}

impl Unix {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let next = NEXT.fetch_add(1, Ordering::Relaxed);
        let folder = format!("lmc-socket-{}-{next}", std::process::id());
        let folder = std::env::temp_dir().join(folder);
        std::fs::create_dir_all(&folder).expect("a folder in the temporary one");
        Self { folder }
    }
}

impl Drop for Unix {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            // The threads of a channel end after it.
            let left = || std::fs::read_dir(&self.folder).map_or(0, Iterator::count);
            until("channels take their sockets away", || left() == 0);
        }
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

impl Rig for Unix {
    type Channel = SocketChannel;

    fn channel(
        &self,
        id: &str,
        arena: Arc<Arena>,
        change: impl FnOnce(&mut ChannelConfig),
    ) -> SocketChannel {
        let listen = Address::Unix(self.folder.join(id));
        start(id, arena, listen, change)
    }

    fn kill(&self, channel: &SocketChannel) {
        kill(channel);
    }
}
