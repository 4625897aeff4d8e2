//! Connections to the configured peers, and the reasons why some are not connected.

use std::collections::{BTreeSet, HashMap};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use lmc_backend::now;
use lmc_transfer::{Address, ConnectError, PeerId, TransferChannel};
use parking_lot::Mutex;

use crate::daemon_link::DaemonLink;
use crate::node::Node;
use crate::peers::Failure;
use crate::resolve::Names;
use crate::status::NamedPeer;

/// Time after which a failed connect to a peer is retried.
const CONNECT_EVERY: Duration = Duration::from_secs(1);
/// Timeout of a connect.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// The configured peers with their connections, for an operator.
pub(crate) type Named = Arc<Mutex<Vec<NamedPeer>>>;

/// Names, addresses and connections of the configured peers.
#[derive(Debug)]
pub(crate) struct Dialer {
    names: Names,
    connected: HashMap<SocketAddr, PeerId>,
    failures: HashMap<SocketAddr, Failure>,
}

impl Dialer {
    pub(crate) fn new<'a>(names: impl IntoIterator<Item = &'a String>) -> Self {
        Self {
            names: Names::new(names),
            connected: HashMap::new(),
            failures: HashMap::new(),
        }
    }

    /// Keeps connections to the configured peers. Runs until it is dropped.
    pub(crate) async fn stay_connected(
        mut self,
        node: Arc<Node<DaemonLink>>,
        peers: Vec<String>,
        directories: Vec<String>,
        named: Named,
    ) {
        let mut strangers = BTreeSet::new();
        let own = node.sessions.link.channel.id().clone();
        loop {
            self.resolve(lookup).await;
            self.connect(&node).await;
            *named.lock() = self.named(&own);
            let directories = self.connected_of(&directories);
            warn_of_strangers(&node, &directories, &mut strangers);
            node.set_contacts(self.connected_of(&peers).into_iter().collect(), directories);
            tokio::time::sleep(CONNECT_EVERY).await;
        }
    }

    /// Resolves the names whose resolution is due.
    pub(crate) async fn resolve<F>(&mut self, lookup: impl Fn(String) -> F)
    where
        F: Future<Output = std::io::Result<Vec<SocketAddr>>> + Send + 'static,
    {
        if !self.names.resolve(lookup).await {
            return;
        }
        let addresses: BTreeSet<SocketAddr> = self.names.addresses().collect();
        let named = |address: &SocketAddr| addresses.contains(address);
        self.connected.retain(|address, _| named(address));
        self.failures.retain(|address, _| named(address));
    }

    /// Connects to each address whose peer is not connected.
    pub(crate) async fn connect(&mut self, node: &Node<DaemonLink>) {
        let addresses: BTreeSet<SocketAddr> = self.names.addresses().collect();
        let connects = addresses.into_iter().map(|address| {
            let known = self.connected.get(&address).cloned();
            async move { (address, connect(node, address, known).await) }
        });
        for (address, connected) in join_all(connects).await {
            match connected {
                Ok(peer) => {
                    self.connected.insert(address, peer);
                    self.failures.remove(&address);
                }
                Err(error) => {
                    // The peer may have restarted under another name.
                    self.connected.remove(&address);
                    let error = error.to_string();
                    let new = Failure::new(error.clone(), now());
                    let old = self.failures.insert(address, new);
                    if old.is_none_or(|old| old.reason != error) {
                        tracing::warn!(%address, %error, "a peer cannot be connected to; retrying every second");
                    }
                }
            }
        }
    }

    /// Returns the connected peers of these names.
    fn connected_of(&self, names: &[String]) -> Vec<PeerId> {
        let addresses = names.iter().filter_map(|name| self.names.get(name));
        let peers = addresses
            .flatten()
            .filter_map(|address| self.connected.get(address));
        peers.cloned().collect()
    }

    /// Returns the configured peers with their connections, for an operator.
    pub(crate) fn named(&self, own: &PeerId) -> Vec<NamedPeer> {
        let mut named = Vec::new();
        for (name, addresses, failure) in self.names.iter() {
            for address in addresses {
                let id = self.connected.get(address);
                named.push(NamedPeer {
                    name: name.clone(),
                    address: Some(address.to_string()),
                    id: id.map(PeerId::to_string),
                    itself: id == Some(own),
                    failure: self.failures.get(address).cloned(),
                });
            }
            if addresses.is_empty() {
                named.push(NamedPeer {
                    name: name.clone(),
                    address: None,
                    id: None,
                    itself: false,
                    failure: failure.cloned(),
                });
            }
        }
        named
    }
}

async fn lookup(name: String) -> std::io::Result<Vec<SocketAddr>> {
    tokio::net::lookup_host(name).await.map(Iterator::collect)
}

/// Connects to the peer at an address, unless it is already connected or is this daemon itself.
async fn connect(
    node: &Node<DaemonLink>,
    address: SocketAddr,
    known: Option<PeerId>,
) -> Result<PeerId, ConnectError> {
    let channel = &node.sessions.link.channel;
    if let Some(peer) = known.filter(|peer| channel.is_connected(peer) || peer == channel.id()) {
        return Ok(peer);
    }
    let deadline = now() + CONNECT_TIMEOUT;
    let at = Address::Tcp {
        host: address.ip().to_string(),
        port: address.port(),
    };
    let peer = channel.identify(&at, deadline).await?;
    if peer != *channel.id() {
        TransferChannel::connect(channel, &peer, &at, None, deadline).await?;
    }
    Ok(peer)
}

/// Warns once about each daemon that is configured as a directory but is not one.
fn warn_of_strangers(
    node: &Node<DaemonLink>,
    directories: &[PeerId],
    known: &mut BTreeSet<PeerId>,
) {
    let peers = node.sessions.peers.lock();
    for peer in directories.iter().filter_map(|peer| peers.get(peer)) {
        let name = &peer.session.peer;
        if peer.is_daemon() && known.insert(name.clone()) {
            tracing::warn!(peer = %name, "no directory listens at an address of --p2p-directory; name the address of a server's --p2p-directory-listen");
        }
    }
}
