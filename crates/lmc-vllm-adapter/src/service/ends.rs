//! The end of a connection, and the slots that outlive it.
//!
//! A connection that ends proves nothing about the process behind it: a proxy, a firewall or this
//! server may have ended it, and the process may still be copying into or out of the slots that
//! it has prepared. So its transfers are *orphaned*: their slots and leases stay held until their
//! worker commits them on another connection, until the process is known to be dead, or for a
//! grace time that is longer than any copy takes. Others may write the same chunks meanwhile.

use std::collections::HashMap;
use std::time::Instant;

use crate::peer::Life;
use crate::service::ClientId;
use crate::service::connections::Connection;
use crate::service::prepared::{Direction, Pending, Transfer};
use crate::service::stats::add;
use crate::service::status::{HeldStatus, TransferStatus};
use crate::service::transfers::Transfers;

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

impl Transfers {
    /// Ends the transfers of a connection, whichever side closed it. The slots that its workers had
    /// prepared stay held, see [`Self::release_ended`].
    pub(super) fn orphan(&self, client: ClientId, now: Instant) {
        let (mut slots, mut marks) = (0, Vec::new());
        let (peer, pids) = {
            let mut prepared = self.prepared.lock();
            for transfer in prepared.of_mut(client) {
                transfer.orphaned = true;
                slots += transfer.pending.slots();
                marks.append(&mut transfer.share());
            }
            self.connections.end(client, slots > 0, now)
        };
        if slots == 0 {
            return;
        }
        self.context.engine.share_writes(&marks);
        add(&self.context.counters().slots_orphaned, slots as u64);
        tracing::warn!(
            %client,
            peer = ?peer.address,
            ?pids,
            slots,
            grace_seconds = self.context.config.slot_grace.as_secs_f64(),
            "connection ended before its transfers were committed; their slots stay held \
             until the worker commits, its process is dead, or the grace time is over"
        );
    }

    /// Returns true while the workers of a connection have slots that they may be copying into or
    /// out of.
    pub(crate) fn holds_slots(&self, client: ClientId) -> bool {
        self.prepared.lock().has(client)
    }

    /// Returns the connections that have transfers.
    pub(super) fn clients(&self) -> Vec<ClientId> {
        self.prepared.lock().clients().collect()
    }

    /// Returns the bytes of a connection's slots, and the number of other connections with slots.
    pub(super) fn bytes_and_others(&self, client: ClientId) -> (u64, usize) {
        let prepared = self.prepared.lock();
        let others = prepared.clients().filter(|&other| other != client);
        (prepared.bytes_of(client), others.count())
    }

    /// Returns the number of transfers of a worker.
    pub(super) fn len_of(&self, instance_id: u64) -> usize {
        self.prepared.lock().len_of(instance_id)
    }

    /// Returns the transfers that are not committed.
    pub(super) fn status(&self, now: Instant) -> TransferStatus {
        let deadline = self.context.config.transfer_deadline;
        let mut status = TransferStatus::default();
        for (direction, transfer) in self.prepared.lock().iter() {
            match direction {
                Direction::Store => status.stores += 1,
                Direction::Retrieve => status.retrieves += 1,
            }
            let age = now.saturating_duration_since(transfer.since);
            status.overdue += usize::from(age >= deadline);
            status.orphaned += usize::from(transfer.orphaned);
            if transfer.orphaned && direction == Direction::Store {
                status.orphaned_store_slots += transfer.pending.slots();
            }
        }
        status
    }

    /// Lets other workers write the chunks of overdue stores.
    pub(super) fn share_overdue(&self, now: Instant) {
        let deadline = self.context.config.transfer_deadline;
        let mut marks = Vec::new();
        for transfer in self.prepared.lock().iter_mut() {
            if now.saturating_duration_since(transfer.since) >= deadline {
                marks.append(&mut transfer.share());
            }
        }
        self.context.engine.share_writes(&marks);
    }

    /// Releases the slots of ended connections whose processes are dead, unless another thread is
    /// about to. May read files of `/proc`.
    pub(crate) fn release_dead(&self, now: Instant) {
        if let Some(_looking) = self.looking.try_lock() {
            self.release_looked_at(now);
        }
    }

    /// Releases the slots of ended connections that nothing touches any more. May read files of
    /// `/proc`.
    pub(crate) fn release_ended(&self, now: Instant) {
        let _looking = self.looking.lock();
        self.release_looked_at(now);
    }

    fn release_looked_at(&self, now: Instant) {
        let ended = self.connections.ended();
        if ended.is_empty() {
            return;
        }
        // Processes are checked while nothing is locked.
        for (_, witness) in &ended {
            witness.iter().for_each(|witness| witness.look());
        }
        let ended = ended.into_iter();
        let ended: Vec<_> = ended
            .map(|(client, witness)| (client, witness.map(|witness| witness.life())))
            .collect();
        // A stop of this process may have stopped the workers on this host as well.
        let steady = self.context.pulse.is_steady(Instant::now());
        let mut released = Vec::new();
        let mut prepared = self.prepared.lock();
        for (client, life) in ended {
            let proof = self.connections.with_ended(client, |_, end| {
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
                        (waited >= self.context.config.slot_grace).then_some(Proof::Grace)
                    }
                };
                end.life = life;
                proof
            });
            let Some(proof) = proof else {
                continue;
            };
            if !prepared.has(client) {
                // All transfers were committed since.
                self.connections.remove(client);
            } else if let Some(proof) = proof {
                released.push(Released {
                    client,
                    connection: self.connections.remove(client).unwrap_or_default(),
                    proof,
                    transfers: prepared.take_of(client),
                });
            }
        }
        self.publish_bytes(&prepared);
        drop(prepared);
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
        let counters = &self.context.stats.service;
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
        let mut slots: HashMap<ClientId, usize> = HashMap::new();
        for (_, transfer) in self.prepared.lock().iter() {
            if transfer.orphaned {
                *slots.entry(transfer.client).or_default() += transfer.pending.slots();
            }
        }
        let held = |(client, slots): (ClientId, usize)| {
            let pids = self.connections.pids_of(client);
            self.connections.with_ended(client, |peer, end| HeldStatus {
                peer: peer.address.clone(),
                pids,
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
