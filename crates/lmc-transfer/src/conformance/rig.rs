//! The rig: starts channels for the suite, and kills them.

use std::sync::Arc;

use lmc_memory::Arena;

use crate::{ChannelConfig, DataPlane, TransferChannel};

/// A property of channels, checked over a rig.
///
/// It panics where it does not hold.
pub type Property<R> = fn(&R);

/// Starts one kind of channel, and kills it.
pub trait Rig: Sync {
    /// Kind of channel.
    type Channel: TransferChannel;

    /// Returns a channel called `id` over an arena, whose configuration `change` may alter.
    ///
    /// The same `id` has the same address each time, so that a channel may be started again where
    /// an earlier one was killed or closed.
    fn channel(
        &self,
        id: &str,
        arena: Arc<Arena>,
        change: impl FnOnce(&mut ChannelConfig),
    ) -> Self::Channel;

    /// Ends a channel without notifying its users, as close to the death of its process as possible
    /// within one process: the channel moves no byte any more. Calls on it end soon.
    fn kill(&self, channel: &Self::Channel);

    /// Returns the plane that the rig's channels use once they are connected.
    fn plane(&self) -> DataPlane {
        DataPlane::Sockets
    }
}
