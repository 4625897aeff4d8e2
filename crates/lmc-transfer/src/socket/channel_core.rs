//! The parts of a channel that its connections use.

use std::sync::Arc;

use super::budget::Budget;
use super::config::SocketConfig;
use super::stats::SocketCounters;
use super::window::Window;
use crate::lease::Leases;

/// Settings, memory, leases and counters of a channel.
#[derive(Debug)]
pub(super) struct ChannelCore {
    pub(super) config: SocketConfig,
    pub(super) window: Window,
    pub(super) leases: Arc<Leases>,
    pub(super) counters: Arc<SocketCounters>,
    pub(super) budget: Arc<Budget>,
}

impl ChannelCore {
    /// Returns the core of a channel with this incarnation, without leases.
    pub(super) fn new(config: SocketConfig, incarnation: u64) -> Self {
        Self {
            window: Window::new(Arc::clone(&config.channel.arena)),
            leases: Leases::new(incarnation),
            counters: Arc::default(),
            budget: Budget::new(config.peer_memory),
            config,
        }
    }
}
