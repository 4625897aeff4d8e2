//! What happens by itself: time passes, connections end.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::protocol::{Operation, Reply};
use crate::service::handle::Service;
use crate::service::state::{Connection, Pending, State, Transfer};
use crate::service::stats::add;
use crate::service::{ClientId, ConnectionEnd, Peer};

/// How long the "no" to an unknown worker's sign of life is remembered.
const TOLD_TTL: Duration = Duration::from_secs(600);

impl Service {
    /// Ends what has outlived its time. To be called about once a second.
    pub fn tick(&self, now: Instant) {
        let shared = &self.shared;
        let config = &shared.config;
        let mut state = shared.state.lock();
        let mut expired_leases = 0;
        let (mut ended, mut expired, mut tired) = (Vec::new(), Vec::new(), Vec::new());
        state.sessions.retain(|session| {
            tired.append(&mut session.tired(now));
            if now.saturating_duration_since(session.last_used) < config.session_ttl {
                if let Some((leases, lookup)) = session.expire(now) {
                    expired_leases += leases;
                    expired.push(lookup);
                }
                return true;
            }
            ended.push(session.take());
            false
        });
        let silent = silent_workers(&state, now, config);
        let mut ended_generations = Vec::new();
        let mut removed = Vec::with_capacity(silent.len());
        for instance_id in &silent {
            if let Some(instance) = state.instances.remove(instance_id) {
                ended_generations.extend(state.ended_generation(&instance));
                removed.push(instance);
            }
        }
        state
            .told_to_register
            .retain(|_, told| now.saturating_duration_since(*told) < TOLD_TTL);
        drop(state);
        // Unmapping an engine's memory takes long, so no lock is held.
        drop(removed);
        self.end_generations(ended_generations);
        // Those who wait for one hear that there is nothing.
        drop(expired);
        tired
            .into_iter()
            .for_each(|waiter| waiter.tell(Reply::None));
        for instance_id in &silent {
            // Its transfers stay: silence does not prove that it has stopped copying.
            shared.events.unsubscribe(*instance_id);
            tracing::warn!(
                instance = instance_id,
                "worker removed: it was silent for too long"
            );
        }
        let counters = &shared.stats.service;
        add(&counters.workers_reaped, silent.len() as u64);
        add(&counters.sessions_expired, ended.len() as u64);
        add(&counters.lookup_leases_expired, expired_leases as u64);
    }

    /// A connection is accepted. To be called before its first request.
    pub fn connected(&self, client: ClientId, peer: Peer) {
        let connection = Connection { peer };
        self.shared
            .state
            .lock()
            .connections
            .insert(client, connection);
    }

    /// The user at the other end of a connection; `None` where the kernel does not tell, as for a
    /// peer on another host or in another network namespace.
    #[expect(dead_code, reason = "registrations of engine memory will ask for it")]
    pub(crate) fn uid_of(&self, client: ClientId) -> Option<u32> {
        let state = self.shared.state.lock();
        state.connections.get(&client)?.peer.uid
    }

    /// A connection is over.
    ///
    /// When the peer ended it, the slots that its workers had prepared come back: the process
    /// that was copying is gone. When this side ended it they stay held, because the process
    /// may still be copying; a commit gives them back.
    pub fn client_gone(&self, client: ClientId, end: ConnectionEnd, now: Instant) {
        let mut state = self.shared.state.lock();
        state.connections.remove(&client);
        state.bindings.remove(&client);
        let mut silent = Vec::new();
        for (&instance_id, instance) in &mut state.instances {
            if instance.client == client {
                instance.orphaned = Some(now);
                silent.push(instance_id);
            }
        }
        let mut sessions = Vec::new();
        // A request belongs to its connection: on another nobody can end it.
        state.sessions.retain(|session| {
            let keep = session.client != client;
            if !keep {
                sessions.push(session.take());
            }
            keep
        });
        let dropped = match end {
            ConnectionEnd::Gone => state.take_transfers(|transfer| transfer.client == client),
            ConnectionEnd::Closed => Vec::new(),
        };
        drop(state);
        for instance_id in silent {
            self.shared.events.unsubscribe(instance_id);
        }
        self.shared.workers.forget(client);
        self.count_abandoned(&dropped);
    }

    /// Whether the workers of a connection have slots that they may be copying into or out of.
    pub(crate) fn holds_slots(&self, client: ClientId) -> bool {
        let state = self.shared.state.lock();
        let mut transfers = state.transfers.values().flat_map(HashMap::values);
        transfers.any(|transfer| transfer.client == client)
    }

    /// Notes that the process runs. To be called about twice a second by whoever reads requests
    /// from sockets; one who calls it never has them counted as read at once.
    pub(crate) fn beat(&self, now: Instant) {
        self.shared.pulse.beat(now);
    }

    /// Answers a copy that is not begun because its connection has too much under way.
    pub(crate) fn decline_copy(&self, asked: Operation) -> Reply {
        let counters = &self.shared.stats.service;
        add(&counters.over_limit, 1);
        match asked {
            Operation::Store => add(&counters.stores_failed, 1),
            _ => add(&counters.retrieves_missed, 1),
        }
        Reply::Transferred(false)
    }

    pub(super) fn count_abandoned(&self, dropped: &[Transfer]) {
        let stores = dropped
            .iter()
            .filter(|t| matches!(t.pending, Pending::Store { .. }))
            .count();
        add(&self.shared.stats.service.stores_abandoned, stores as u64);
    }
}

/// Workers whose silence has lasted longer than they are granted.
fn silent_workers(state: &State, now: Instant, config: &crate::service::ServiceConfig) -> Vec<u64> {
    state
        .instances
        .iter()
        .filter(|(_, instance)| {
            if let Some(orphaned) = instance.orphaned {
                return now.saturating_duration_since(orphaned) >= config.orphan_grace;
            }
            if config.reap_timeout.is_zero() {
                return false;
            }
            let granted = if instance.pinged {
                config.reap_timeout
            } else {
                config.registration_grace
            };
            now.saturating_duration_since(instance.last_seen) >= granted
        })
        .map(|(&instance_id, _)| instance_id)
        .collect()
}
