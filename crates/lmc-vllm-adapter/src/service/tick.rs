//! Expiry of sessions, workers and slots.

use std::time::{Duration, Instant};

use crate::protocol::{Operation, Reply};
use crate::service::handle::Service;
use crate::service::state::State;
use crate::service::stats::add;

/// How long the "no" to an unknown worker's sign of life is remembered.
const TOLD_TTL: Duration = Duration::from_secs(600);

/// Sessions that are visited under one lock of the state.
pub(super) const SESSIONS_AT_A_TIME: usize = 512;

impl Service {
    /// Ends what has outlived its time. To be called about once a second, on a thread that may
    /// read files of `/proc`.
    ///
    /// Slots that workers of an ended connection had prepared are released when its process is known
    /// to be dead, or when [`ServiceConfig::slot_grace`](crate::ServiceConfig::slot_grace) is
    /// over, which restarts as long as the process is stopped.
    pub fn tick(&self, now: Instant) {
        let shared = &self.shared;
        let config = &shared.config;
        self.release_ended(now);
        self.share_overdue(now);
        self.sweep_sessions(now);
        let mut state = shared.state.lock();
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
        let disconnected: Vec<bool> = removed
            .iter()
            .map(|instance| instance.orphaned.is_some())
            .collect();
        drop(removed);
        self.end_generations(ended_generations);
        for (instance, disconnected) in silent.iter().zip(disconnected) {
            // Its transfers stay: silence does not prove that it has stopped copying.
            shared.events.unsubscribe(*instance);
            match disconnected {
                true => tracing::info!(
                    instance,
                    "worker removed: its connection ended and it did not come back"
                ),
                false => tracing::warn!(instance, "worker removed: it was silent for too long"),
            }
        }
        let counters = &shared.stats.service;
        add(&counters.workers_reaped, silent.len() as u64);
    }

    /// Ends lookups, waits and requests whose time is over, a share at a time: others are served
    /// in between.
    fn sweep_sessions(&self, now: Instant) {
        let shared = &self.shared;
        let counters = &shared.stats.service;
        let mut to_visit = shared.state.lock().sessions.to_visit();
        while to_visit > 0 {
            let names = to_visit.min(SESSIONS_AT_A_TIME);
            to_visit -= names;
            let mut expired_leases = 0;
            let (mut expired, mut timed_out) = (Vec::new(), Vec::new());
            let mut state = shared.state.lock();
            let ended = state.sessions.sweep(names, |session| {
                timed_out.append(&mut session.take_timed_out(now));
                if now.saturating_duration_since(session.last_used) >= shared.config.session_ttl {
                    return false;
                }
                if let Some((leases, lookup)) = session.expire(now) {
                    expired_leases += leases;
                    expired.push(lookup);
                }
                true
            });
            drop(state);
            add(&counters.sessions_expired, ended.len() as u64);
            add(&counters.lookup_leases_expired, expired_leases as u64);
            // Leases go back and waiters are answered here, where nothing is locked.
            drop((ended, expired));
            timed_out
                .into_iter()
                .for_each(|waiter| waiter.tell(Reply::None));
        }
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
