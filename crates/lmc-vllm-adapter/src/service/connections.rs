//! Connections that are open, and ended connections for which slots are still held.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;

use crate::peer::{ClientSocket, Life, Witness};
use crate::service::ClientId;

/// A connection that is open, or that has ended and whose slots are still held.
#[derive(Debug, Default)]
pub(crate) struct Connection {
    pub(crate) peer: ClientSocket,
    pub(crate) witness: Option<Arc<dyn Witness>>,
    pub(crate) ended: Option<Ended>,
    /// True once the pool's descriptor was passed over it.
    has_pool: bool,
}

/// The end of a connection.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ended {
    at: Instant,
    /// Start of the grace time: the end of the connection, or when its process was last seen
    /// stopped.
    pub(crate) grace_from: Instant,
    /// Last answer of the connection's witness.
    pub(crate) life: Option<Life>,
}

impl Ended {
    pub(crate) fn new(now: Instant) -> Self {
        Self {
            at: now,
            grace_from: now,
            life: None,
        }
    }

    /// Returns the seconds since the connection ended.
    pub(crate) fn seconds(&self, now: Instant) -> f64 {
        now.saturating_duration_since(self.at).as_secs_f64()
    }
}

/// All connections. Its lock is taken last: nothing else is locked while it is held.
#[derive(Debug, Default)]
pub(super) struct Connections {
    all: Mutex<HashMap<ClientId, Connection>>,
    alone_since: Mutex<Option<Instant>>,
}

impl Connections {
    /// Adds a connection.
    pub(super) fn open(&self, client: ClientId, peer: ClientSocket) {
        let connection = Connection {
            peer,
            ..Connection::default()
        };
        self.all.lock().insert(client, connection);
        self.changed(Instant::now());
    }

    /// Returns the instant since which there has been exactly one connection; `None` if there is
    /// not exactly one.
    pub(super) fn alone_since(&self) -> Option<Instant> {
        *self.alone_since.lock()
    }

    /// Notes that a connection was opened or has ended.
    fn changed(&self, now: Instant) {
        let connections = self.all.lock();
        let open = connections.values().filter(|one| one.ended.is_none());
        let alone = (open.count() == 1).then_some(now);
        *self.alone_since.lock() = alone;
    }

    /// Returns true until the connection has ended.
    pub(super) fn is_open(&self, client: ClientId) -> bool {
        let connections = self.all.lock();
        (connections.get(&client)).is_some_and(|connection| connection.ended.is_none())
    }

    /// Returns the user at the other end of a connection; `None` where the kernel does not show
    /// it, as for a peer on another host or in another network namespace.
    pub(super) fn uid_of(&self, client: ClientId) -> Option<u32> {
        self.all.lock().get(&client)?.peer.uid
    }

    /// Returns the address of the other end; empty if it is not known.
    pub(super) fn address_of(&self, client: ClientId) -> String {
        let connections = self.all.lock();
        let connection = connections.get(&client);
        connection.map_or_else(String::new, |connection| connection.peer.address.clone())
    }

    /// Returns true if descriptors can be passed over a connection.
    pub(super) fn takes_descriptors(&self, client: ClientId) -> bool {
        let connections = self.all.lock();
        (connections.get(&client)).is_some_and(|connection| connection.peer.takes_descriptors)
    }

    /// Notes that the pool's descriptor is passed over a connection. Returns false if it was passed
    /// before.
    pub(super) fn pass_pool(&self, client: ClientId) -> bool {
        let mut connections = self.all.lock();
        (connections.get_mut(&client))
            .is_some_and(|connection| !std::mem::replace(&mut connection.has_pool, true))
    }

    /// Returns true if the pool's descriptor was passed over a connection.
    pub(super) fn has_pool(&self, client: ClientId) -> bool {
        let connections = self.all.lock();
        (connections.get(&client)).is_some_and(|connection| connection.has_pool)
    }

    /// Sets the watcher of the processes at the other end of a connection.
    pub(super) fn set_witness(&self, client: ClientId, witness: Arc<dyn Witness>) {
        if let Some(connection) = self.all.lock().get_mut(&client) {
            connection.witness = Some(witness);
        }
    }

    /// Returns the processes that are known to be behind a connection.
    pub(super) fn pids_of(&self, client: ClientId) -> Vec<u32> {
        let witness = {
            let connections = self.all.lock();
            let connection = connections.get(&client);
            connection.and_then(|connection| connection.witness.clone())
        };
        witness.map(|witness| witness.pids()).unwrap_or_default()
    }

    /// Ends a connection, and keeps it if slots are `held` for it. Returns its address and the
    /// processes behind it.
    pub(super) fn end(
        &self,
        client: ClientId,
        held: bool,
        now: Instant,
    ) -> (ClientSocket, Vec<u32>) {
        let (peer, witness) = {
            let mut connections = self.all.lock();
            let connection = connections.entry(client).or_default();
            connection.ended = Some(Ended::new(now));
            let ended = (connection.peer.clone(), connection.witness.clone());
            if !held {
                connections.remove(&client);
            }
            ended
        };
        self.changed(now);
        (
            peer,
            witness.map(|witness| witness.pids()).unwrap_or_default(),
        )
    }

    /// Returns the connections that have ended, with the watchers of their processes.
    pub(super) fn ended(&self) -> Vec<(ClientId, Option<Arc<dyn Witness>>)> {
        let connections = self.all.lock();
        let ended = |(_, connection): &(_, &Connection)| connection.ended.is_some();
        let ended = connections.iter().filter(ended);
        let witness = |(&client, connection): (_, &Connection)| {
            (client, connection.witness.as_ref().map(Arc::clone))
        };
        ended.map(witness).collect()
    }

    /// Runs `look` on a connection that has ended.
    pub(super) fn with_ended<T>(
        &self,
        client: ClientId,
        look: impl FnOnce(&ClientSocket, &mut Ended) -> T,
    ) -> Option<T> {
        let mut connections = self.all.lock();
        let connection = connections.get_mut(&client)?;
        Some(look(&connection.peer, connection.ended.as_mut()?))
    }

    /// Removes a connection whose slots are all released.
    pub(super) fn remove(&self, client: ClientId) -> Option<Connection> {
        self.all.lock().remove(&client)
    }
}
