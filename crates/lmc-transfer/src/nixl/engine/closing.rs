//! The end of a channel.

use std::sync::Arc;
use std::time::{Duration, Instant};

use lmc_memory::Arena;
use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::{Command, Engine};
use crate::TransferError;
use crate::nixl::initiators::spawn;
use crate::nixl::paired::Outbox;

/// A channel that closes waits this long for its peers to end their connections; and from the last
/// deadline of who closes it, for those that may still write to it.
const FAREWELL: Duration = Duration::from_secs(5);

/// Phases of a close, in this order.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The end of what is under way, here and to here.
    Transfers,
    /// Peers, which are to end their connections by then.
    Peers(Instant),
    /// The target's agent.
    Target,
    Over,
}

pub(super) struct Closing {
    phase: Phase,
    /// Until when writes of peers are waited for.
    limit: Instant,
    waiting: Vec<(Instant, oneshot::Sender<Result<(), TransferError>>)>,
}

/// Arenas of closed channels that a peer may still write to. Over shared memory nothing stops it,
/// and what came to lie where they were would be changed.
static KEPT: Mutex<Vec<Arc<Arena>>> = Mutex::new(Vec::new());

impl Closing {
    /// Says that the target's agent has ended.
    pub(super) fn target_ended(&mut self) {
        self.phase = Phase::Over;
    }
}

impl Engine {
    pub(super) fn close(
        &mut self,
        deadline: Instant,
        reply: oneshot::Sender<Result<(), TransferError>>,
    ) {
        let limit = deadline.checked_add(FAREWELL).unwrap_or(deadline);
        if let Some(closing) = &mut self.state.closing {
            closing.limit = closing.limit.max(limit);
            closing.waiting.push((deadline, reply));
            return;
        }
        self.state.closing = Some(Closing {
            phase: Phase::Transfers,
            limit,
            waiting: vec![(deadline, reply)],
        });
        self.accepting.abort();
        for transfer in std::mem::take(&mut self.state.transfers) {
            // Peers hear of it by the end of their connections.
            transfer.end(
                &mut self.initiators,
                Some(TransferError::Closed),
                false,
                false,
            );
        }
        let mut outbox = Outbox::new();
        self.state.paired.close(&mut outbox);
        self.send(outbox);
        self.end_asking(|_| Some(TransferError::Closed));
        self.shared.peers.write().clear();
        self.leases.end_all();
        self.initiators.close();
    }

    /// Goes on with closing. Whether nothing is left.
    pub(super) fn closed(&mut self, now: Instant) -> bool {
        let Some(closing) = &mut self.state.closing else {
            return false;
        };
        match closing.phase {
            Phase::Transfers if self.initiators.is_over() => {
                let (paired, uses, cut) = (&self.state.paired, &self.state.uses, &self.state.cut);
                let late = |incarnation: u64| {
                    paired.is_late(incarnation)
                        || uses.keys().any(|(peer, _)| *peer == incarnation)
                        || cut.contains_key(&incarnation)
                };
                self.state.peers.retain(|_, one| late(one.peer.incarnation));
                // Of those that cannot be reached, nothing more will be known.
                let mut unended = self.state.unended.values();
                let waits =
                    !self.state.peers.is_empty() || unended.any(|incarnation| late(*incarnation));
                if !waits && !paired.settles() && self.state.settling.is_empty() {
                    closing.phase = Phase::Peers(now + FAREWELL);
                } else if now >= closing.limit {
                    tracing::warn!("a peer may still write to a channel that is closed");
                    self.exposures.lose();
                    self.state.peers.clear();
                    closing.phase = Phase::Peers(now);
                }
            }
            Phase::Peers(until) if !self.exposures.are_live() || now >= until => {
                if !self.exposures.are_over() {
                    tracing::info!("memory stays mapped: a peer may still write to it");
                    KEPT.lock().push(Arc::clone(&self.arena));
                }
                closing.phase = Phase::Target;
                let (target, commands) = (self.target.take(), self.commands.clone());
                spawn("lmc-nixl-end", move || {
                    drop(target);
                    commands.give(Command::TargetEnded);
                });
            }
            Phase::Transfers | Phase::Peers(_) | Phase::Target | Phase::Over => {}
        }
        let over = closing.phase == Phase::Over;
        let passed = |one: &mut (Instant, oneshot::Sender<_>)| over || now >= one.0;
        for (_, reply) in closing.waiting.extract_if(.., passed) {
            let outcome = if over {
                Ok(())
            } else {
                Err(TransferError::Deadline)
            };
            // Who has dropped the future wants no answer.
            let _ = reply.send(outcome);
        }
        over
    }
}
