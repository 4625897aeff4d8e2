//! The network of the simulation, and the memory that it reaches.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use lmc_backend::{Clears, now};
use lmc_memory::{ReservedSlot, SealedSlot};
use lmc_transfer::{
    Address, BoxFuture, ConnectError, DataPlane, Filled, Index, PeerId, Slot, TransferError,
};
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::Notify;

use super::chunks::{SimChunks, StateFile};
use super::schedules::{LOCATE, receive};
use super::{LEN, Rng, delay, once_in};
use crate::config::NodeConfig;
use crate::directory::{DirectoryHost, TableLimits};
use crate::link::{Link, Session};
use crate::message::{Reply, Request};
use crate::node::Node;
use crate::peers::{ConnectedPeer, Peers};

pub(super) type SimNode = Node<SimLink>;

/// Bytes of a daemon's pool as a network card sees them, whichever chunk owns them now.
#[derive(Debug, Clone, Default)]
pub(super) struct Memory(Arc<Mutex<HashMap<u64, Vec<u8>>>>);

impl Memory {
    pub(super) fn overwrite(&self, offset: u64, bytes: &[u8]) {
        self.0.lock().insert(offset, bytes.to_vec());
    }

    fn read(&self, offset: u64) -> Vec<u8> {
        let memory = self.0.lock();
        memory
            .get(&offset)
            .cloned()
            .unwrap_or_else(|| vec![0; LEN as usize])
    }
}

/// Faults of a network. `lost: 50` loses one message of 50 on average; 0 loses none.
#[derive(Debug, Clone)]
pub(super) struct Faults {
    pub(super) lost: u64,
    pub(super) repeated: u64,
    /// Pieces of reads with a changed bit.
    pub(super) corrupt: u64,
    /// Longest delay of a message, and of a piece of a read.
    pub(super) delay: (Duration, Duration),
    /// True where an index that is not leased is refused, as sockets do.
    pub(super) enforced: bool,
    /// Slots of reads that fail which something may write to for a while.
    pub(super) quarantined: u64,
    /// Pieces at which a read fails while its lease stands.
    pub(super) broken: u64,
    /// Longest time until a daemon hears that a peer is connected or gone.
    pub(super) events: Duration,
    /// Calls of a daemon's chunks right before which they are cleared.
    pub(super) clears: u64,
}

impl Faults {
    pub(super) fn none() -> Self {
        Self {
            lost: 0,
            repeated: 0,
            corrupt: 0,
            delay: (Duration::from_micros(100), Duration::from_micros(20)),
            enforced: false,
            quarantined: 0,
            broken: 0,
            events: Duration::ZERO,
            clears: 0,
        }
    }
}

/// Changes a daemon's reply to a request on its way; `None` loses it.
pub(super) type Forgery = Arc<dyn Fn(&Request, Reply) -> Option<Reply> + Send + Sync>;

/// A daemon as the network knows it.
pub(super) struct Host {
    pub(super) incarnation: u64,
    pub(super) node: Arc<SimNode>,
    pub(super) chunks: SimChunks,
    memory: Memory,
    pub(super) alive: bool,
    frozen_until: Option<Instant>,
    forgery: Option<Forgery>,
    freezes: Arc<Notify>,
    /// The grants that stand, by their number.
    grants: BTreeMap<u64, Granted>,
    /// Tasks of the node's own, which end with it.
    tasks: Vec<tokio::task::JoinHandle<()>>,
    /// Answers instead of the node.
    pub(super) directory: Option<Arc<DirectoryHost>>,
}

/// Memory that a peer may read.
struct Granted {
    reader: usize,
    /// Offsets of the slots.
    offsets: Vec<u64>,
}

pub(super) struct State {
    pub(super) rng: Rng,
    pub(super) faults: Faults,
    pub(super) hosts: Vec<Host>,
    /// Pairs of hosts between which nothing passes, the lower number first.
    cut: BTreeSet<(usize, usize)>,
    /// Pairs of hosts that are connected, the lower number first.
    linked: BTreeSet<(usize, usize)>,
    last_grant: u64,
    last_incarnation: u64,
    /// The files in which daemons note their clears, which restarts find.
    state_files: BTreeMap<usize, StateFile>,
    /// Host that ends just after a daemon has looked whether it is connected.
    pub(super) leaving: Option<usize>,
    /// True once serving a request has panicked.
    pub(super) panicked: bool,
    /// Runtime of the thread at which all replies arrive, where there is one.
    pub(super) home: Option<Handle>,
}

/// All daemons and the network between the daemons.
#[derive(Clone)]
pub(super) struct Net(pub(super) Arc<Mutex<State>>);

impl std::fmt::Debug for Net {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Net")
    }
}

pub(super) fn name(host: usize) -> PeerId {
    format!("host-{host}").parse().expect("a name")
}

fn number(peer: &PeerId) -> usize {
    let number = peer.as_str().trim_start_matches("host-");
    number.parse().expect("hosts are numbered")
}

impl Net {
    pub(super) fn new(seed: u64, faults: Faults) -> Self {
        Self(Arc::new(Mutex::new(State {
            rng: Rng::new(seed),
            faults,
            hosts: Vec::new(),
            cut: BTreeSet::new(),
            linked: BTreeSet::new(),
            last_grant: 0,
            last_incarnation: 0,
            state_files: BTreeMap::new(),
            leaving: None,
            panicked: false,
            home: None,
        })))
    }

    /// Returns a network of daemons with pools of 64 chunks, the first of which is connected to all
    /// others.
    pub(super) async fn with_daemons(seed: u64, faults: Faults, daemons: usize) -> Self {
        let net = Self::new(seed, faults);
        (0..daemons).for_each(|host| net.start(host, 64, |_| ()));
        for other in 1..daemons {
            assert!(net.connect(0, other).await);
        }
        net
    }

    /// Starts a daemon with a pool of `slots` chunks; again, if one of this number has ended.
    pub(super) fn start(&self, host: usize, slots: u64, change: impl FnOnce(&mut NodeConfig)) {
        let memory = Memory::default();
        let (incarnation, chunks) = {
            let mut state = self.0.lock();
            let seed = state.rng.next_u64();
            state.last_incarnation += 1;
            let incarnation = state.last_incarnation;
            let file = Arc::clone(state.state_files.entry(host).or_default());
            let chunks = SimChunks::new(slots, memory.clone(), incarnation, file);
            chunks.clear_at_any_moment(seed, state.faults.clears);
            (incarnation, chunks)
        };
        let link = SimLink {
            net: Arc::downgrade(&self.0),
            me: host,
            incarnation,
        };
        let mut config = NodeConfig::new(format!("host-{host}"), format!("host-{host}:1"), 0);
        config.limits.bytes = slots * LEN / 4;
        config.limits.peer_bytes = slots * LEN / 8;
        change(&mut config);
        let announces = config.uses_directories;
        let node = Node::new(config, link, Arc::new(chunks.clone()));
        let (weak, reader) = (Arc::downgrade(&self.0), Arc::downgrade(&node));
        chunks.set_reader(Arc::new(move |own, names, hint| {
            let (net, node) = (weak.upgrade().map(Net), reader.upgrade());
            Box::pin(async move {
                if let (Some(net), Some(node)) = (net, node) {
                    receive(&net, (&node, &own), &names, &hint).await;
                }
            })
        }));
        let pushing = tokio::spawn({
            let node = Arc::clone(&node);
            async move { node.push_waiting().await }
        });
        let freezes = Arc::new(Notify::new());
        let in_step = tokio::spawn({
            let node = Arc::clone(&node);
            async move { node.stay_in_step().await }
        });
        let expiring = tokio::spawn({
            let (node, net, freezes) = (Arc::clone(&node), self.clone(), Arc::clone(&freezes));
            async move {
                // A stopped process ends no lease either; it does so when it goes on.
                loop {
                    tokio::select! {
                        () = freezes.notified() => net.thaw(host).await,
                        () = node.expire_leases() => {}
                    }
                }
            }
        });
        let mut tasks = vec![expiring, in_step, pushing];
        if announces {
            tasks.push(tokio::spawn(Arc::clone(&node).announce_chunks(incarnation)));
        }
        let new = Host {
            incarnation,
            node,
            chunks,
            memory,
            alive: true,
            frozen_until: None,
            forgery: None,
            freezes,
            grants: BTreeMap::new(),
            tasks,
            directory: None,
        };
        let mut state = self.0.lock();
        state.linked.retain(|(a, b)| *a != host && *b != host);
        let old = match state.hosts.get_mut(host) {
            Some(old) => Some(std::mem::replace(old, new)),
            None => {
                state.hosts.push(new);
                None
            }
        };
        drop(state);
        // Its grants look for the network's lock.
        drop(old);
    }

    /// Writes clears into the file in which a daemon that is not started yet notes its clears.
    pub(super) fn note_clears(&self, host: usize, clears: Clears) {
        let file = Arc::clone(self.0.lock().state_files.entry(host).or_default());
        *file.lock() = Arc::new(clears);
    }

    /// Starts a directory; again, if one of this number has ended.
    pub(super) fn start_directory(&self, host: usize, limits: TableLimits) {
        self.start(host, 1, |_| ());
        let seed = self.below(u64::MAX);
        let directory = DirectoryHost::with_seed(format!("host-{host}"), limits, seed);
        let house = Arc::clone(&directory);
        let house = tokio::spawn(async move { house.keep_house().await });
        let started = &mut self.0.lock().hosts[host];
        started.directory = Some(directory);
        started.tasks.push(house);
    }

    pub(super) fn directory(&self, host: usize) -> Option<Arc<DirectoryHost>> {
        self.0.lock().hosts[host].directory.clone()
    }

    /// Lets a daemon hear that another is not connected any more, at some time.
    fn part(&self, host: usize, session: &Session, reason: &'static str) {
        let (net, session) = (self.clone(), session.clone());
        let (directory, node) = (self.directory(host), self.node(host));
        tokio::spawn(async move {
            net.event().await;
            match directory {
                Some(directory) => directory.disconnected(&session),
                // As the tier does: the same incarnation may be connected again.
                None if !node.sessions.link.is_current(&session) => {
                    node.disconnected(&session, reason)
                }
                None => {}
            }
        });
    }

    pub(super) fn session(&self, host: usize) -> Session {
        Session {
            peer: name(host),
            incarnation: self.0.lock().hosts[host].incarnation,
        }
    }

    pub(super) fn node(&self, host: usize) -> Arc<SimNode> {
        Arc::clone(&self.0.lock().hosts[host].node)
    }

    pub(super) fn chunks(&self, host: usize) -> SimChunks {
        self.0.lock().hosts[host].chunks.clone()
    }

    pub(super) fn below(&self, n: u64) -> u64 {
        self.0.lock().rng.below(n)
    }

    /// Connects two daemons, which have not heard of it yet. Returns false if one is gone, or they
    /// are cut off from each other.
    pub(super) fn link(&self, a: usize, b: usize) -> bool {
        let mut state = self.0.lock();
        let pair = (a.min(b), a.max(b));
        let alive = state.hosts[a].alive && state.hosts[b].alive;
        if !alive || state.cut.contains(&pair) {
            return false;
        }
        state.linked.insert(pair);
        true
    }

    /// Returns true if two daemons are connected, whether they have heard of it or not.
    pub(super) fn are_linked(&self, a: usize, b: usize) -> bool {
        self.0.lock().linked.contains(&(a.min(b), a.max(b)))
    }

    pub(super) fn is_alive(&self, host: usize) -> bool {
        self.0.lock().hosts[host].alive
    }

    /// Connects two daemons. Each of them hears of it at some time.
    pub(super) async fn connect(&self, a: usize, b: usize) -> bool {
        if !self.link(a, b) {
            return false;
        }
        let both = tokio::join!(
            self.hears_of(a, self.session(b)),
            self.hears_of(b, self.session(a))
        );
        both.0 && both.1
    }

    async fn hears_of(&self, host: usize, session: Session) -> bool {
        self.event().await;
        // A directory asks nothing.
        match self.directory(host) {
            Some(_) => true,
            None => self.node(host).connected(&session).await.is_ok(),
        }
    }

    /// Passes on what a daemon has cleared. Returns the peers that have not confirmed that in time.
    pub(super) async fn pass_on(&self, host: usize) -> Vec<String> {
        let (node, clears) = (self.node(host), self.chunks(host).carried_out());
        let missing = |_: &Peers| Vec::new();
        node.exchange
            .pass_on(&clears, now() + LOCATE, missing)
            .await
    }

    /// Waits until an event is heard of.
    async fn event(&self) {
        let after = {
            let State { rng, faults, .. } = &mut *self.0.lock();
            delay(rng, faults.events)
        };
        tokio::time::sleep(after).await;
    }

    /// Returns the peers that are connected to a daemon, and those that the daemon knows.
    pub(super) fn connected(&self, host: usize) -> (Vec<PeerId>, Vec<PeerId>) {
        let node = self.node(host);
        let state = self.0.lock();
        let others = (0..state.hosts.len()).filter(|&other| {
            let pair = (host.min(other), host.max(other));
            other != host && state.linked.contains(&pair)
        });
        let peers = node.sessions.peers.lock();
        let current = |peer: &&ConnectedPeer| {
            let session = &peer.session;
            state.hosts[number(&session.peer)].incarnation == session.incarnation
        };
        assert!(peers.iter().all(|peer| current(&peer)), "an old session");
        assert!(peers.without_hello().is_empty(), "a peer without a hello");
        (others.map(name).collect(), peers.with_hello())
    }

    /// Kills a daemon at once. Others learn of it after `noticed`.
    pub(super) fn kill(&self, host: usize, noticed: Duration) {
        let session = self.session(host);
        let others = {
            let mut state = self.0.lock();
            let killed = &mut state.hosts[host];
            killed.alive = false;
            killed.tasks.iter().for_each(|task| task.abort());
            killed.grants.clear();
            state.hosts.len()
        };
        let net = self.clone();
        tokio::spawn(async move {
            tokio::time::sleep(noticed).await;
            if net.session(host) == session {
                let mut state = net.0.lock();
                state.linked.retain(|(a, b)| *a != host && *b != host);
                drop(state);
            }
            (0..others).for_each(|other| net.part(other, &session, "killed"));
        });
    }

    /// Cuts two daemons off from each other, or joins them again. A cut is noticed after
    /// `noticed`, if it stands then.
    pub(super) fn cut(&self, a: usize, b: usize, cut: bool, noticed: Duration) {
        let pair = (a.min(b), a.max(b));
        {
            let mut state = self.0.lock();
            match cut {
                true => state.cut.insert(pair),
                false => state.cut.remove(&pair),
            };
        }
        let (net, ends) = (self.clone(), [(a, self.session(b)), (b, self.session(a))]);
        tokio::spawn(async move {
            tokio::time::sleep(noticed).await;
            if cut && net.0.lock().cut.contains(&pair) {
                net.0.lock().linked.remove(&pair);
                for (host, session) in ends {
                    net.part(host, &session, "cut off");
                }
            }
        });
    }

    /// Stops a daemon for a while: it answers nothing and ends no lease, and its memory is read on.
    pub(super) fn freeze(&self, host: usize, time: Duration) {
        let frozen = &mut self.0.lock().hosts[host];
        frozen.frozen_until = Some(now() + time);
        frozen.freezes.notify_one();
    }

    /// Lets a daemon reply otherwise than it would.
    pub(super) fn forge(
        &self,
        host: usize,
        forgery: impl Fn(&Request, Reply) -> Option<Reply> + Send + Sync + 'static,
    ) {
        self.0.lock().hosts[host].forgery = Some(Arc::new(forgery));
    }

    fn forged(&self, host: usize, request: &[u8], reply: Vec<u8>) -> Option<Vec<u8>> {
        let Some(forgery) = self.0.lock().hosts[host].forgery.clone() else {
            return Some(reply);
        };
        let request = Request::from_bytes(request).expect("nodes send requests");
        let reply = Reply::from_bytes(&reply).expect("nodes send replies");
        let reply = forgery(&request, reply)?;
        Some(reply.to_bytes().expect("it is as long as before"))
    }

    async fn thaw(&self, host: usize) {
        let until = self.0.lock().hosts[host].frozen_until;
        if let Some(until) = until {
            tokio::time::sleep_until(until.into()).await;
        }
    }

    /// Waits for a message's way; false if it is lost.
    async fn travel(&self, from: usize, to: usize) -> bool {
        let (delay, lost) = {
            let State { rng, faults, .. } = &mut *self.0.lock();
            (delay(rng, faults.delay.0), once_in(rng, faults.lost))
        };
        tokio::time::sleep(delay).await;
        let state = self.0.lock();
        let cut = state.cut.contains(&(from.min(to), from.max(to)));
        !lost && !cut && state.hosts[from].alive && state.hosts[to].alive
    }

    /// Returns a slot whose read has failed. Some are written to for a while, as by a network card
    /// that was not stopped in time.
    fn unwritten(&self, slot: ReservedSlot, own: &Memory) -> Slot {
        let State { rng, faults, .. } = &mut *self.0.lock();
        if !once_in(rng, faults.quarantined) {
            return Slot::Idle(slot);
        }
        let (after, own) = (delay(rng, Duration::from_secs(5)), own.clone());
        tokio::spawn(async move {
            tokio::time::sleep(after).await;
            own.overwrite(slot.offset(), &[0xdd; LEN as usize]);
        });
        Slot::Quarantined
    }

    /// Number of grants that stand at a daemon.
    pub(super) fn grants(&self, host: usize) -> usize {
        self.0.lock().hosts[host].grants.len()
    }
}

/// The network, as one daemon reaches it.
#[derive(Debug)]
pub(super) struct SimLink {
    net: Weak<Mutex<State>>,
    me: usize,
    incarnation: u64,
}

impl SimLink {
    fn net(&self) -> Net {
        Net(self.net.upgrade().expect("the network is there to the end"))
    }

    /// False once this daemon was killed, or another began under its number.
    fn is_mine(&self, state: &State) -> bool {
        let host = &state.hosts[self.me];
        host.alive && host.incarnation == self.incarnation
    }
}

/// Ends a grant when it is dropped.
#[derive(Debug)]
pub(super) struct SimGrant {
    net: Weak<Mutex<State>>,
    host: usize,
    number: u64,
    /// Keeps the slots, as the channel's lease does.
    _slots: Vec<SealedSlot>,
}

impl Drop for SimGrant {
    fn drop(&mut self) {
        if let Some(state) = self.net.upgrade() {
            state.lock().hosts[self.host].grants.remove(&self.number);
        }
    }
}

impl Link for SimLink {
    type Grant = SimGrant;

    fn is_current(&self, session: &Session) -> bool {
        let net = self.net();
        let mut state = net.0.lock();
        let state = &mut *state;
        let other = number(&session.peer);
        let leaves = state.leaving == Some(other);
        let host = &mut state.hosts[other];
        let pair = (self.me.min(other), self.me.max(other));
        let is_current =
            host.alive && host.incarnation == session.incarnation && state.linked.contains(&pair);
        host.alive &= !leaves;
        is_current
    }

    fn home(&self, _: &PeerId) -> Option<Handle> {
        self.net().0.lock().home.clone()
    }

    fn connect<'a>(
        &'a self,
        peer: &'a PeerId,
        at: &'a Address,
        _: Instant,
    ) -> BoxFuture<'a, Result<(), ConnectError>> {
        let (net, me, to) = (self.net(), self.me, number(peer));
        Box::pin(async move {
            if at.to_string() != format!("tcp://{peer}:1") {
                let (expected, found) = (peer.clone(), name(usize::MAX));
                return Err(ConnectError::WrongPeer { expected, found });
            }
            if !net.travel(me, to).await {
                let peer = peer.clone();
                return Err(ConnectError::Deadline { peer });
            }
            tokio::spawn(async move { net.connect(me, to).await });
            Ok(())
        })
    }

    fn disconnect<'a>(&'a self, peer: &'a PeerId, _: Instant) -> BoxFuture<'a, ()> {
        let (net, me, to) = (self.net(), self.me, number(peer));
        let sessions = (net.session(me), net.session(to));
        net.0.lock().linked.remove(&(me.min(to), me.max(to)));
        net.part(me, &sessions.1, "hung up");
        net.part(to, &sessions.0, "hung up");
        Box::pin(std::future::ready(()))
    }

    fn request<'a>(
        &'a self,
        peer: &'a PeerId,
        body: Vec<u8>,
        deadline: Instant,
    ) -> BoxFuture<'a, Result<Vec<u8>, TransferError>> {
        let (net, me, to) = (self.net(), self.me, number(peer));
        let session = Session {
            peer: name(me),
            incarnation: self.incarnation,
        };
        Box::pin(async move {
            if !self.is_mine(&net.0.lock()) {
                return Err(TransferError::Closed);
            }
            let repeated = {
                let State { rng, faults, .. } = &mut *net.0.lock();
                once_in(rng, faults.repeated)
            };
            let (sender, mut replies) = tokio::sync::mpsc::unbounded_channel();
            for _ in 0..1 + usize::from(repeated) {
                let (net, session, body) = (net.clone(), session.clone(), body.clone());
                let sender = sender.clone();
                let watched = net.clone();
                let delivery = async move {
                    if !net.travel(me, to).await {
                        return;
                    }
                    net.thaw(to).await;
                    let reply = match net.directory(to) {
                        Some(directory) => directory.serve(&session, &body),
                        None => net.node(to).serve(&session, &body).await,
                    };
                    net.thaw(to).await;
                    let Some(reply) = net.forged(to, &body, reply) else {
                        return;
                    };
                    if net.travel(to, me).await {
                        let _ = sender.send(reply);
                    }
                };
                tokio::spawn(async move {
                    let delivery = std::panic::AssertUnwindSafe(delivery).catch_unwind();
                    watched.0.lock().panicked |= delivery.await.is_err();
                });
            }
            drop(sender);
            let reply = crate::link::timeout_at(deadline, replies.recv()).await;
            match reply {
                Some(Some(reply)) => Ok(reply),
                // Lost: nothing says so before the deadline.
                Some(None) => {
                    tokio::time::sleep_until(deadline.into()).await;
                    Err(TransferError::Deadline)
                }
                None => Err(TransferError::Deadline),
            }
        })
    }

    fn data_plane(&self, _: &PeerId) -> DataPlane {
        DataPlane::Sockets
    }

    fn grant(
        &self,
        peer: &PeerId,
        slots: Vec<SealedSlot>,
    ) -> Result<(Vec<Index>, SimGrant), TransferError> {
        let net = self.net();
        let mut state = net.0.lock();
        if !self.is_mine(&state) {
            return Err(TransferError::Closed);
        }
        state.last_grant += 1;
        let number = state.last_grant;
        let reader = self::number(peer);
        let granted = Granted {
            reader,
            offsets: slots.iter().map(SealedSlot::offset).collect(),
        };
        state.hosts[self.me].grants.insert(number, granted);
        let index = |slot| Index::arena(self.incarnation, (number << 16) | slot);
        let indices = (0..slots.len() as u64).map(index).collect();
        let grant = SimGrant {
            net: self.net.clone(),
            host: self.me,
            number,
            _slots: slots,
        };
        Ok((indices, grant))
    }

    fn read<'a>(
        &'a self,
        peer: &'a PeerId,
        slots: Vec<ReservedSlot>,
        indices: &'a [Index],
        deadline: Instant,
    ) -> BoxFuture<'a, Filled> {
        let (net, me, from) = (self.net(), self.me, number(peer));
        Box::pin(async move {
            // Where each slot lies is looked up at the begin only, as a network card does.
            let offsets: Vec<Option<(u64, u64)>> = {
                let state = net.0.lock();
                let host = &state.hosts[from];
                let offset = |index: &Index| {
                    if index.incarnation() != host.incarnation {
                        return None;
                    }
                    let unit = u64::from_le_bytes(index.to_bytes()[16..].try_into().ok()?);
                    let (number, slot) = (unit >> 16, unit & 0xffff);
                    let granted = host.grants.get(&number)?;
                    assert_eq!(granted.reader, me, "another's memory");
                    Some((number, *granted.offsets.get(slot as usize)?))
                };
                indices.iter().map(offset).collect()
            };
            let memory = net.0.lock().hosts[from].memory.clone();
            let own = net.0.lock().hosts[me].memory.clone();
            let incarnation = net.0.lock().hosts[from].incarnation;
            let mut error = None;
            let mut filled = Vec::with_capacity(slots.len());
            let mut slots: Vec<_> = slots.into_iter().zip(offsets).enumerate().collect();
            // Pieces arrive in any order: what is not written may come before what is.
            if net.below(2) == 0 {
                slots.reverse();
            }
            for (at, (mut slot, offset)) in slots {
                let Some((grant, offset)) = offset.filter(|_| error.is_none()) else {
                    error.get_or_insert(TransferError::UnknownPeer { peer: peer.clone() });
                    filled.push((at, net.unwritten(slot, &own)));
                    continue;
                };
                let half = LEN as usize / 2;
                let mut read = Vec::new();
                for part in [0..half, half..LEN as usize] {
                    let (delay, corrupt, broken) = {
                        let State { rng, faults, .. } = &mut *net.0.lock();
                        let corrupt = once_in(rng, faults.corrupt);
                        let broken = once_in(rng, faults.broken);
                        (delay(rng, faults.delay.1), corrupt, broken)
                    };
                    tokio::time::sleep(delay).await;
                    if broken {
                        let reason = "a simulated fault".to_owned();
                        error = Some(TransferError::Failed(reason));
                        break;
                    }
                    let state = net.0.lock();
                    let host = &state.hosts[from];
                    let pair = (me.min(from), me.max(from));
                    let there = host.alive && host.incarnation == incarnation;
                    // A network card reads on when a lease has ended.
                    let leased = !state.faults.enforced || host.grants.contains_key(&grant);
                    if !there || !leased || state.cut.contains(&pair) || now() >= deadline {
                        error = Some(TransferError::Deadline);
                        break;
                    }
                    drop(state);
                    let mut bytes = memory.read(offset)[part].to_vec();
                    bytes[0] ^= u8::from(corrupt);
                    read.extend(bytes);
                }
                if error.is_some() {
                    filled.push((at, net.unwritten(slot, &own)));
                    continue;
                }
                slot.bytes_mut().copy_from_slice(&read);
                own.overwrite(slot.offset(), &read);
                filled.push((at, Slot::Written(slot.written())));
            }
            filled.sort_unstable_by_key(|(at, _)| *at);
            Filled {
                slots: filled.into_iter().map(|(_, slot)| slot).collect(),
                error,
                by: DataPlane::Sockets,
            }
        })
    }
}
