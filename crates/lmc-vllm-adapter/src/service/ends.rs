//! The end of a connection, and the slots that outlive it.
//!
//! A connection that ends proves nothing about the process behind it: a proxy, a firewall or this
//! server may have ended it, and the process may still be copying into or out of the slots that
//! it has prepared. So its transfers are *orphaned*: their slots and leases stay held until their
//! worker commits them on another connection, until the process is known to be dead, or for a
//! grace time that is longer than any copy takes. Others may write the same chunks meanwhile.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

use serde::Serialize;

use crate::service::ClientId;
use crate::service::handle::Service;
use crate::service::peer::{Life, Peer, Witness};
use crate::service::prepared::{Pending, Transfer};
use crate::service::session::Session;
use crate::service::state::{Connection, Ended};
use crate::service::stats::add;
use crate::service::tick::SESSIONS_AT_A_TIME;

/// The slots of a connection that has ended, and why they are still held.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct HeldStatus {
    /// Address of the other end.
    pub peer: String,
    /// Processes that held the other end and map the pool, as far as they are known.
    pub pids: Vec<u32>,
    /// Slots of transfers that were prepared and not committed.
    pub slots: usize,
    /// Seconds since the connection ended.
    pub seconds: f64,
    /// Condition of the release: `grace` (the process is unknown, or may be running), `stopped` (the
    /// process is stopped or frozen and would go on copying) or `dead` (they go back at once).
    pub waits_for: &'static str,
}

/// Reason why slots of an ended connection are released.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Proof {
    /// The processes behind it are dead.
    Death,
    /// The grace time is over, and no copy takes that long.
    Grace,
}

struct Released {
    client: ClientId,
    connection: Connection,
    proof: Proof,
    transfers: Vec<Transfer>,
}

impl Service {
    /// Registers a connection. To be called before its first request.
    pub fn connected(&self, client: ClientId, peer: Peer) {
        let connection = Connection {
            peer,
            ..Connection::default()
        };
        let mut state = self.shared.state.lock();
        state.connections.insert(client, connection);
    }

    /// Returns the user at the other end of a connection; `None` where the kernel does not show it, as for a
    /// peer on another host or in another network namespace.
    pub(crate) fn uid_of(&self, client: ClientId) -> Option<u32> {
        let state = self.shared.state.lock();
        state.connections.get(&client)?.peer.uid
    }

    /// Sets the watcher of the processes at the other end of a connection.
    pub(crate) fn set_witness(&self, client: ClientId, witness: Arc<dyn Witness>) {
        let mut state = self.shared.state.lock();
        if let Some(connection) = state.connections.get_mut(&client) {
            connection.witness = Some(witness);
        }
    }

    /// Ends a connection, whichever side closed it.
    ///
    /// The connection's requests end. Slots that its workers had prepared stay held, see [`Self::tick`].
    pub fn client_gone(&self, client: ClientId, now: Instant) {
        let mut state = self.shared.state.lock();
        let mut silent = Vec::new();
        for (&instance_id, instance) in &mut state.instances {
            if instance.client == client {
                instance.gate.cut();
                let first = instance.orphaned.replace(now).is_none();
                silent.push((instance_id, first));
            }
        }
        let requests = state.sessions.take_names(client);
        let (mut slots, mut marks) = (0, Vec::new());
        for transfer in state.transfers.of_mut(client) {
            transfer.orphaned = true;
            slots += transfer.pending.slots();
            marks.append(&mut transfer.share());
        }
        let connection = state.connections.entry(client).or_default();
        let (peer, witness) = (connection.peer.clone(), connection.witness.clone());
        match slots {
            0 => drop(state.connections.remove(&client)),
            _ => connection.ended = Some(Ended::new(now)),
        }
        drop(state);
        self.end_sessions(client, &requests);
        // A transfer may have bound it again until the last of its requests ended.
        self.shared.state.lock().bindings.remove(&client);
        for (instance, first) in silent {
            self.shared.events.unsubscribe(instance);
            if first {
                tracing::info!(instance, peer = peer.address, "worker's connection ended");
            }
        }
        self.shared.workers.forget(client);
        if slots > 0 {
            self.shared.engine.share_writes(&marks);
            add(&self.shared.stats.service.slots_orphaned, slots as u64);
            tracing::warn!(
                %client,
                peer = ?peer.address,
                pids = ?witness.map(|witness| witness.pids()).unwrap_or_default(),
                slots,
                grace_seconds = self.shared.config.slot_grace.as_secs_f64(),
                "connection ended before its transfers were committed; their slots stay held \
                 until the worker commits, its process is dead, or the grace time is over"
            );
        }
    }

    /// Ends requests of a connection, a share at a time: others are served in between.
    fn end_sessions(&self, client: ClientId, requests: &[Arc<str>]) {
        for requests in requests.chunks(SESSIONS_AT_A_TIME) {
            let mut state = self.shared.state.lock();
            let end = |request: &Arc<str>| state.sessions.end(client, request);
            let ended: Vec<Session> = requests.iter().filter_map(end).collect();
            drop(state);
            // Their leases go back here, where nothing is locked.
            drop(ended);
        }
    }

    /// Returns true while the workers of a connection have slots that they may be copying into or
    /// out of.
    pub(crate) fn holds_slots(&self, client: ClientId) -> bool {
        self.shared.state.lock().transfers.has(client)
    }

    /// Returns the connections that own a worker, a request or a prepared transfer, or that are
    /// known to be a scheduler's.
    pub(crate) fn owners(&self) -> HashSet<ClientId> {
        let state = self.shared.state.lock();
        let instances = state.instances.values().map(|instance| instance.client);
        let mut owners: HashSet<ClientId> = state.transfers.clients().collect();
        owners.extend(instances);
        owners.extend(state.bindings.keys());
        owners.extend(state.sessions.clients());
        owners
    }

    /// Lets others write the chunks of stores that are overdue.
    pub(super) fn share_overdue(&self, now: Instant) {
        let deadline = self.shared.config.transfer_deadline;
        let mut marks = Vec::new();
        for transfer in self.shared.state.lock().transfers.iter_mut() {
            if now.saturating_duration_since(transfer.since) >= deadline {
                marks.append(&mut transfer.share());
            }
        }
        self.shared.engine.share_writes(&marks);
    }

    /// Gives back the slots of ended connections whose processes are dead, unless another thread
    /// is about to. May read files of `/proc`.
    pub(crate) fn release_dead(&self, now: Instant) {
        if let Some(_looking) = self.shared.looking.try_lock() {
            self.release_looked_at(now);
        }
    }

    /// Gives back the slots of ended connections that nothing touches any more. May read files
    /// of `/proc`.
    pub(crate) fn release_ended(&self, now: Instant) {
        let _looking = self.shared.looking.lock();
        self.release_looked_at(now);
    }

    fn release_looked_at(&self, now: Instant) {
        let ended: Vec<(ClientId, Option<Arc<dyn Witness>>)> = {
            let state = self.shared.state.lock();
            let ended = |(_, connection): &(_, &Connection)| connection.ended.is_some();
            let ended = state.connections.iter().filter(ended);
            let witness = |(&client, connection): (_, &Connection)| {
                (client, connection.witness.as_ref().map(Arc::clone))
            };
            ended.map(witness).collect()
        };
        if ended.is_empty() {
            return;
        }
        // Looked at while the state is not locked.
        for (_, witness) in &ended {
            witness.iter().for_each(|witness| witness.look());
        }
        let life = |witness: Option<Arc<dyn Witness>>| witness.map(|witness| witness.life());
        let ended = ended.into_iter();
        let ended: Vec<_> = ended
            .map(|(client, witness)| (client, life(witness)))
            .collect();
        // A stop of this process may have stopped the workers on this host as well.
        let steady = self.shared.pulse.is_steady(Instant::now());
        let mut released = Vec::new();
        let mut state = self.shared.state.lock();
        for (client, life) in ended {
            let Some(connection) = state.connections.get_mut(&client) else {
                continue;
            };
            let Some(end) = &mut connection.ended else {
                continue;
            };
            let proof = match life {
                Some(Life::Dead) => Some(Proof::Death),
                Some(Life::Stopped) => {
                    end.grace_from = end.grace_from.max(now);
                    None
                }
                Some(Life::Running) | None if !steady => {
                    end.grace_from = end.grace_from.max(now);
                    None
                }
                Some(Life::Running) | None => {
                    let waited = now.saturating_duration_since(end.grace_from);
                    (waited >= self.shared.config.slot_grace).then_some(Proof::Grace)
                }
            };
            end.life = life;
            if !state.transfers.has(client) {
                // All of it was committed since.
                state.connections.remove(&client);
            } else if let Some(proof) = proof {
                let transfers = state.transfers.take_of(client);
                let connection = state.connections.remove(&client).unwrap_or_default();
                released.push(Released {
                    client,
                    connection,
                    proof,
                    transfers,
                });
            }
        }
        drop(state);
        for released in released {
            self.released(released, now);
        }
    }

    fn released(&self, released: Released, now: Instant) {
        let Released {
            client,
            connection,
            proof,
            transfers,
        } = released;
        let counters = &self.shared.stats.service;
        let slots: usize = transfers.iter().map(|t| t.pending.slots()).sum();
        let stores = transfers
            .iter()
            .filter(|t| matches!(t.pending, Pending::Store { .. }))
            .count();
        add(&counters.stores_abandoned, stores as u64);
        let (counter, why) = match proof {
            Proof::Death => (&counters.slots_released_by_death, "process is dead"),
            Proof::Grace => (&counters.slots_released_by_grace, "grace time is over"),
        };
        add(counter, slots as u64);
        tracing::info!(
            %client,
            peer = ?connection.peer.address,
            slots,
            held_seconds = connection.ended.map_or(0.0, |end| end.seconds(now)),
            why,
            "slots of an ended connection released"
        );
    }

    /// Returns the slots that ended connections hold.
    pub(super) fn held_status(&self, now: Instant) -> Vec<HeldStatus> {
        let state = self.shared.state.lock();
        let mut slots: HashMap<ClientId, usize> = HashMap::new();
        for (_, transfer) in state.transfers.iter() {
            if transfer.orphaned {
                *slots.entry(transfer.client).or_default() += transfer.pending.slots();
            }
        }
        let held = |(client, slots): (ClientId, usize)| {
            let connection = state.connections.get(&client)?;
            let end = connection.ended?;
            Some(HeldStatus {
                peer: connection.peer.address.clone(),
                pids: state.pids_of(client),
                slots,
                seconds: end.seconds(now),
                waits_for: match end.life {
                    Some(Life::Dead) => "dead",
                    Some(Life::Stopped) => "stopped",
                    Some(Life::Running) | None => "grace",
                },
            })
        };
        let mut held: Vec<HeldStatus> = slots.into_iter().filter_map(held).collect();
        held.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
        held
    }
}
