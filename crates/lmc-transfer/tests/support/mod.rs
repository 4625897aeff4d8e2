//! Starts and kills channels of one process.

use std::sync::Arc;
use std::time::{Duration, Instant};

use lmc_memory::Arena;
use lmc_transfer::conformance::Rig;
use lmc_transfer::{ChannelConfig, MemoryChannel, MemoryHub, TransferChannel, block_on};

/// A hub of its own.
pub(crate) struct MemoryRig(MemoryHub);

impl MemoryRig {
    pub(crate) fn new() -> Self {
        Self(MemoryHub::new().expect("a thread"))
    }
}

impl Rig for MemoryRig {
    type Channel = MemoryChannel;

    fn channel(
        &self,
        id: &str,
        arena: Arc<Arena>,
        change: impl FnOnce(&mut ChannelConfig),
    ) -> MemoryChannel {
        let id_parsed = id.parse().expect("a name of the suite");
        let mut config = ChannelConfig::new(id_parsed, arena);
        change(&mut config);
        self.0.channel(id, config).expect("the name is free")
    }

    fn kill(&self, channel: &MemoryChannel) {
        // Peers of one process know of an end however it came about.
        let deadline = Instant::now() + Duration::from_secs(30);
        block_on(channel.close(deadline)).expect("nothing holds it");
    }
}
