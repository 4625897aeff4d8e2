//! [`Node`]: one daemon among its peers. This file: peers come and go, and their requests are
//! served. What this daemon asks of them is in `reading`.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use lmc_backend::{Host, HostLease, now};
use lmc_key::{ChunkKey, ClearsId};
use lmc_transfer::{DataPlane, Keys, PeerId, TransferError};
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::digest::{digest, known_digest, unsummed};
use crate::directory::{ChangedKeys, Contacts, Dials, Finds};
use crate::exchange::{IN_STEP_EVERY, KnownClears};
use crate::link::{Link, until};
use crate::message::{
    ChunkLease, ChunkState, FEATURE_LATE_DIGESTS, Hello, Holder, KeyBatch, LATE_DIGEST, Lease,
    Leased, Located, MAX_HOLDERS, MessageError, OLDEST_VERSION, Refusal, Release, Released, Renew,
    Reply, Request, Stamped, VERSION,
};
use crate::owner::{Busy, Owner, OwnerLimits, Session};
use crate::peers::{self, Failure, PeerCounters, Peers};
use crate::pushing::Pushes;
use crate::recent::Recent;
use crate::spaces::{OwnSpaces, cut};
use crate::summing::{self, SummingTurn};
use crate::unfit::Unfit;

/// Requests of one peer under way at a time, at most, of the kinds that take time.
pub(crate) const MAX_SERVING: usize = 64;
/// Chunks of which other holders are known, at most.
const HOLDERS: usize = 1 << 16;
/// Time that a hello may take.
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);
/// Time that an owner keeps a peer waiting for a lease, at most.
const MAX_WAIT: Duration = Duration::from_millis(500);
/// Time beyond that for what is in memory to be leased and summed.
pub(crate) const HOLD_MARGIN: Duration = Duration::from_millis(250);
/// Pause of a request that waits for the rate at which peers may lease.
const RATE_PAUSE: Duration = Duration::from_millis(5);

/// Settings of a [`Node`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct NodeConfig {
    /// Name of this daemon, for people.
    pub name: String,
    /// Address that peers connect to.
    pub address: String,
    /// Tokens in a chunk.
    pub chunk_size: u32,
    /// Name of the algorithm of prefix hashes.
    pub algorithm: String,
    /// Bounds of what peers may lease here.
    pub limits: OwnerLimits,
    /// Duration of the leases that this daemon asks for; renewed after a third of it. Default:
    /// 2 s.
    pub lease: Duration,
    /// Payload bytes of a chunk, at most: a peer that claims to have a longer one does not have it.
    /// Default: 1 GiB.
    pub max_chunk: u64,
    /// Time for which a peer may keep this daemon waiting for a lease, because others have leased
    /// all that it lends or because the chunks are on its disk. Default: 200 ms.
    pub lease_wait: Duration,
    /// True if directories are asked for the peers that have chunks; otherwise every connected
    /// peer is asked. Default: false.
    pub uses_directories: bool,
    /// Keys under which the salts of tenants are described to peers: those of the channel.
    pub(crate) salt_keys: Option<Keys>,
    /// Oldest and newest version of the protocol to speak. Default: all that the crate knows.
    pub versions: (u16, u16),
}

impl NodeConfig {
    /// Returns the defaults for a pool of `pool` bytes.
    pub fn new(name: impl Into<String>, address: impl Into<String>, pool: u64) -> Self {
        Self {
            name: name.into(),
            address: address.into(),
            chunk_size: 256,
            algorithm: "blake3".to_owned(),
            limits: OwnerLimits::for_pool(pool),
            lease: Duration::from_secs(2),
            max_chunk: 1 << 30,
            lease_wait: Duration::from_millis(200),
            uses_directories: false,
            salt_keys: None,
            versions: (OLDEST_VERSION, VERSION),
        }
    }
}

/// Chunks that a peer has leased. Dropping it ends the access, and lets them be evicted.
#[derive(Debug)]
pub(crate) struct Served<G> {
    _grant: G,
    leased: Vec<HostLease>,
    /// True if digests come with the release.
    is_late: bool,
}

/// One daemon among its peers: it lends them the chunks of its engine, and reads theirs.
#[derive(Debug)]
pub struct Node<L: Link> {
    pub(crate) link: L,
    pub(crate) host: Arc<dyn Host>,
    pub(crate) config: NodeConfig,
    pub(crate) owner: Mutex<Owner<Served<L::Grant>>>,
    /// Set when the next lease ends earlier than before.
    expiry: Notify,
    /// Set when a lease has ended: those that wait for capacity go on in their order.
    freed: Notify,
    /// Peers that hold chunks which they read here.
    holders: Mutex<Recent<Vec<Session>>>,
    pub(crate) known_clears: Mutex<KnownClears>,
    /// Set when a message has another digest of clears, or a peer lacks this side's hello.
    pub(crate) out_of_step: Notify,
    pub(crate) peers: Mutex<Peers>,
    pub(crate) contacts: Mutex<Contacts>,
    pub(crate) dials: Mutex<Dials>,
    /// Set when a peer's hello was accepted.
    pub(crate) hello_came: Notify,
    pub(crate) changed: Arc<ChangedKeys>,
    pub(crate) finds: Finds,
    pub(crate) pushes: Pushes,
    pub(crate) own_spaces: Mutex<Option<OwnSpaces>>,
    summing: SummingTurn,
}

impl<L: Link> Node<L> {
    /// Returns a node without peers.
    pub fn new(config: NodeConfig, link: L, host: Arc<dyn Host>) -> Arc<Self> {
        let changed = Arc::<ChangedKeys>::default();
        if config.uses_directories {
            host.events().listen(Arc::clone(&changed) as _);
        }
        Arc::new(Self {
            owner: Mutex::new(Owner::new(config.limits.clone())),
            expiry: Notify::new(),
            freed: Notify::new(),
            holders: Mutex::new(Recent::new(HOLDERS)),
            known_clears: Mutex::default(),
            out_of_step: Notify::new(),
            peers: Mutex::default(),
            contacts: Mutex::default(),
            dials: Mutex::default(),
            hello_came: Notify::new(),
            changed,
            finds: Finds::default(),
            pushes: Pushes::default(),
            own_spaces: Mutex::default(),
            summing: Arc::default(),
            link,
            host,
            config,
        })
    }

    /// Notes that an incarnation of a peer is connected, and exchanges hellos with it. Returns
    /// once the peer has answered, or could not.
    ///
    /// # Errors
    /// [`HelloError`].
    pub async fn connected(&self, session: &Session) -> Result<(), HelloError> {
        if !self.link.is_current(session) {
            return Err(HelloError::NoAnswer("the peer disconnected".to_owned()));
        }
        self.note_connected(session);
        let hello = Request::Hello(self.hello());
        let deadline = now() + HELLO_TIMEOUT;
        let result = match self.ask(&session.peer, &hello, deadline).await {
            Ok(Reply::Hello(theirs)) => {
                let accepted = self.accept_hello(session, theirs);
                accepted.map_err(HelloError::Unfit)
            }
            Ok(Reply::Refused(refusal)) => Err(match Unfit::refused(&self.config, &refusal) {
                Some(unfit) => HelloError::Unfit(unfit),
                None => HelloError::Refused(refusal),
            }),
            Ok(_) => Err(HelloError::NoAnswer(
                "another reply than a hello".to_owned(),
            )),
            Err(error) => Err(HelloError::NoAnswer(error)),
        };
        if let (Err(error), Some(peer)) = (&result, self.peers.lock().of_session(session)) {
            peer.is_unfit = error.is_unfit();
            peer.last_failure = Some(Failure::new(error.to_string(), now()));
        }
        if !self.link.is_current(session) {
            // It may have gone before it was noted.
            self.disconnected(session, "the peer disconnected");
        } else if result.is_ok() {
            self.exchange_with(session, deadline).await;
        }
        result
    }

    fn note_connected(&self, session: &Session) {
        let replaced = self.peers.lock().connected(session, now());
        if let Some(old) = replaced {
            self.end(&old);
        }
    }

    /// Notes that an incarnation of a peer is gone, for this reason: its leases end.
    pub fn disconnected(&self, session: &Session, reason: &str) {
        let failure = Failure::new(reason.to_owned(), now());
        self.peers.lock().disconnected(session, failure);
        self.dials.lock().gone(&session.peer);
        self.end(session);
    }

    fn end(&self, session: &Session) {
        let ended = self.owner.lock().end_session(session);
        drop(ended);
        self.freed.notify_waiters();
        self.holders.lock().retain(|holders| {
            holders.retain(|holder| holder != session);
            !holders.is_empty()
        });
    }

    fn hello(&self) -> Hello {
        let short = |text: &String| {
            let mut text = text.clone();
            cut(&mut text);
            text
        };
        Hello {
            oldest: self.config.versions.0,
            newest: self.config.versions.1,
            features: FEATURE_LATE_DIGESTS,
            name: short(&self.config.name),
            address: short(&self.config.address),
            chunk_size: self.config.chunk_size,
            algorithm: short(&self.config.algorithm),
            clears: self.clears().1,
            spaces: self.own_spaces().spaces.to_vec(),
        }
    }

    /// Accepts a peer's hello, if the two sides fit.
    fn accept_hello(&self, session: &Session, hello: Hello) -> Result<(), Unfit> {
        Unfit::check(&self.config, &hello)?;
        self.peers.lock().accept(session, hello);
        self.hello_came.notify_waiters();
        Ok(())
    }

    /// Answers a request of a connected peer.
    pub async fn serve(&self, session: &Session, request: &[u8]) -> Vec<u8> {
        let reply = match Request::from_bytes(request) {
            Err(MessageError::Kind(kind)) => Reply::Unsupported(kind),
            Err(_) => {
                self.count(session, |counters| counters.malformed += 1);
                Reply::Refused(Refusal::of_unparsed(request))
            }
            Ok(request) => match self.begin(session, &request) {
                Err(refusal) => Reply::Refused(refusal),
                Ok(_serving) => self.answer(session, request).await,
            },
        };
        if matches!(reply, Reply::Refused(_)) {
            self.count(session, |counters| counters.refused += 1);
        }
        // Every field of a reply is bounded so that it fits.
        let too_long = |_| Reply::Refused(Refusal::Malformed).to_bytes();
        reply.to_bytes().or_else(too_long).unwrap_or_default()
    }

    /// Begins to serve a request, which counts until what is returned is dropped. `None` for one
    /// that is answered at once and is never one too many: renewals and releases are what gives
    /// capacity back.
    fn begin(&self, session: &Session, request: &Request) -> Result<Option<Arc<()>>, Refusal> {
        let hello = matches!(request, Request::Hello(_));
        if hello && self.link.is_current(session) {
            self.note_connected(session);
            if !self.link.is_current(session) {
                // It may have gone before it was noted.
                self.disconnected(session, "the peer disconnected");
            }
        }
        let is_brief = matches!(
            request,
            Request::Hello(_) | Request::Renew(_) | Request::Release(_) | Request::Clears(_)
        );
        let mut peers = self.peers.lock();
        let Some(peer) = peers.of_session(session) else {
            return Err(Refusal::NoHello);
        };
        if peer.hello.is_none() && !hello {
            return Err(Refusal::NoHello);
        }
        if is_brief {
            return Ok(None);
        }
        let serving = peers::begin(&peer.serving, MAX_SERVING);
        serving.map(Some).ok_or(Refusal::TooMany)
    }

    async fn answer(&self, session: &Session, request: Request) -> Reply {
        match request {
            Request::Hello(hello) => match self.accept_hello(session, hello) {
                Ok(()) => Reply::Hello(self.hello()),
                Err(unfit) => Reply::Refused(unfit.refusal()),
            },
            Request::Locate(keys) => Reply::Located(self.located(session, &keys)),
            Request::Lease(lease) => Reply::Leased(self.lease(session, &lease).await),
            Request::Renew(Renew { lease, duration_ms }) => {
                let duration = Duration::from_millis(duration_ms.into());
                let mut owner = self.owner.lock();
                Reply::Renewed(owner.renew(session, lease, duration, now()))
            }
            Request::Release(release) => Reply::Released(self.release(session, release).await),
            Request::Holds(keys) => {
                if self.is_in_step(&session.peer, keys.clears) {
                    self.note_holder(session, &keys.message);
                }
                Reply::Noted(())
            }
            Request::Announce(_) | Request::Find(_) => Reply::Unsupported(request.kind()),
            Request::Copy(keys) => self.read_for(session, &keys).await,
            Request::Push(push) => self.receive(session, &push).await,
            Request::Describe(asked) => Reply::Described(self.described(asked)),
            Request::Clears(page) => Reply::Cleared(self.answer_page(session, page).await),
        }
    }

    /// Notes that a peer holds chunks that it read here.
    fn note_holder(&self, session: &Session, keys: &KeyBatch) {
        let mut holders = self.holders.lock();
        for key in keys.keys() {
            let of_key = holders.entry(key, Vec::new);
            of_key.retain(|holder| holder.peer != session.peer);
            of_key.push(session.clone());
            if of_key.len() > MAX_HOLDERS {
                of_key.remove(0);
            }
        }
    }

    async fn release(&self, session: &Session, Release { lease }: Release) -> Released {
        // While the lease stands: what is summed stays within its bounds.
        let unsummed = match self.owner.lock().granted(session, lease) {
            Some(served) if served.is_late => unsummed(served.leased.iter()),
            _ => Vec::new(),
        };
        if !unsummed.is_empty() {
            summing::in_turn(Arc::clone(&self.summing), unsummed).await;
        }
        let released = self.owner.lock().release(session, lease, now());
        self.freed.notify_waiters();
        let Some((served, keys)) = released else {
            return Released::default();
        };
        let digest = |(key, chunk): (&ChunkKey, &HostLease)| digest(key, chunk);
        let digests = keys.iter().zip(&served.leased).map(digest);
        Released {
            held: vec![true; keys.len()],
            digests: match served.is_late {
                true => digests.collect(),
                false => Vec::new(),
            },
        }
    }

    fn states(&self, keys: &[ChunkKey]) -> Vec<ChunkState> {
        let states = self.host.states(keys).into_iter();
        states.map(ChunkState::from).collect()
    }

    fn located(&self, session: &Session, asked: &Stamped<KeyBatch>) -> Stamped<Located> {
        let keys = asked.message.keys();
        let load = self.owner.lock().load();
        if !self.is_in_step(&session.peer, asked.clears) {
            let states = vec![ChunkState::Absent; keys.len()];
            return self.stamped(Located {
                states,
                load,
                is_over: false,
            });
        }
        // First: what is stored before the end is there then.
        let awaited = asked.message.awaited.as_deref();
        let is_over = awaited.is_some_and(|request| self.host.is_over(request));
        let states = self.states(&keys);
        // A prefill is asked about again and again, and directories named it for nothing.
        if self.config.uses_directories && awaited.is_none() {
            // A directory may have named this daemon for the first that is absent.
            let mut asked = keys.iter().zip(&states);
            if let Some((key, _)) = asked.find(|(_, state)| state.bytes().is_none()) {
                self.changed.note(key);
            }
        }
        let located = Located {
            states,
            load,
            is_over,
        };
        Stamped::new(asked.clears, located)
    }

    async fn lease(&self, session: &Session, asked: &Stamped<Lease>) -> Stamped<Leased> {
        let Stamped {
            clears,
            message: lease,
        } = asked;
        let keys = lease.keys.keys();
        if !self.is_in_step(&session.peer, *clears) {
            return self.stamped(not_leased(vec![ChunkLease::Absent; keys.len()]));
        }
        let wait = Duration::from_millis(lease.wait_ms.into()).min(MAX_WAIT);
        let wait_until = now() + wait;
        let states = self.states(&keys);
        let present = |(key, state): (&ChunkKey, &ChunkState)| Some((*key, state.bytes()?));
        let asked: Vec<(ChunkKey, u64)> = keys.iter().zip(&states).filter_map(present).collect();
        let lens: Vec<u64> = asked.iter().map(|(_, len)| *len).collect();
        let reserved = self.admit(session, &lens, wait_until).await;
        let admitted = reserved.chunks;
        let allowed: Vec<ChunkKey> = asked[..admitted].iter().map(|(key, _)| *key).collect();
        let is_late = self.takes_late_digests(session);
        let held = async {
            let held = self.host.lease(&allowed, wait_until).await;
            if !is_late {
                let unsummed = unsummed(held.iter().flatten());
                summing::in_turn(Arc::clone(&self.summing), unsummed).await;
            }
            held
        };
        // A promotion that does not end in time is a miss of all.
        let held = until(wait_until + HOLD_MARGIN, held).await;
        let held = held.unwrap_or_default();
        let held = allowed.iter().copied().zip(held);
        let held: Vec<(ChunkKey, HostLease)> =
            held.filter_map(|(key, held)| Some((key, held?))).collect();
        let duration = Duration::from_millis(lease.duration_ms.into());
        let granted = self.grant(reserved, held, *clears, is_late, duration);
        let mut leased = not_leased(Vec::with_capacity(keys.len()));
        let mut found = Vec::new();
        if let Some((number, duration, chunks)) = granted {
            leased.lease = number;
            leased.duration_ms = u32::try_from(duration.as_millis()).unwrap_or(u32::MAX);
            found = chunks;
        }
        let mut found = found.into_iter().peekable();
        let mut present = 0;
        let mut busy = None;
        for (key, state) in keys.iter().zip(&states) {
            present += usize::from(state.bytes().is_some());
            let chunk = match found.next_if(|(granted, _)| granted == key) {
                Some((_, chunk)) => chunk,
                // Admission stops at the first chunk that does not fit.
                None if state.bytes().is_some() && present > admitted => {
                    busy.get_or_insert(key);
                    ChunkLease::Busy
                }
                None => ChunkLease::Absent,
            };
            leased.chunks.push(chunk);
        }
        if let Some(first) = busy {
            leased.holders = self.other_holders(session, first);
        }
        Stamped::new(*clears, leased)
    }

    /// Waits until at least the first of these chunks may be leased to the peer. Returns how many
    /// may be.
    async fn admit(
        &self,
        session: &Session,
        lens: &[u64],
        wait_until: Instant,
    ) -> Reservation<'_, L::Grant> {
        let reservation = |chunks: usize, number| Reservation {
            owner: &self.owner,
            freed: &self.freed,
            session: session.clone(),
            chunks,
            number,
        };
        loop {
            let freed = self.freed.notified();
            tokio::pin!(freed);
            // From here on no end of a lease is missed.
            freed.as_mut().enable();
            let busy = {
                let mut owner = self.owner.lock();
                let (admitted, busy) = owner.admit(session, lens, now());
                if admitted > 0 {
                    let bytes = lens[..admitted].iter().sum();
                    return reservation(admitted, owner.reserve(session, bytes));
                }
                busy
            };
            if lens.is_empty() || now() >= wait_until {
                return reservation(0, 0);
            }
            let pause = match busy {
                Some(Busy::Rate) => wait_until.min(now() + RATE_PAUSE),
                _ => wait_until,
            };
            let _ = until(pause, freed).await;
        }
    }

    /// Grants the chunks that were reserved, as far as they are there; none where this daemon has
    /// carried out a clear since they were asked for.
    #[allow(
        clippy::type_complexity,
        reason = "number, duration, and an answer for each chunk"
    )]
    fn grant(
        &self,
        reserved: Reservation<'_, L::Grant>,
        held: Vec<(ChunkKey, HostLease)>,
        asked_at: ClearsId,
        is_late: bool,
        duration: Duration,
    ) -> Option<(u64, Duration, Vec<(ChunkKey, ChunkLease)>)> {
        let session = &reserved.session;
        let mut owner = self.owner.lock();
        // Under the same lock as the grant: nothing is admitted in between.
        owner.unreserve(session, reserved.number);
        self.peers.lock().of_session(session)?;
        if held.is_empty() || self.clears().1 != asked_at {
            return None;
        }
        let slots = held.iter().map(|(_, chunk)| chunk.slot.clone()).collect();
        let (indices, grant) = self.link.grant(&session.peer, slots).ok()?;
        let unsummed = unsummed(held.iter().map(|(_, chunk)| chunk));
        let is_late = is_late && !unsummed.is_empty();
        let chunk = |((key, chunk), index): (&(ChunkKey, HostLease), _)| {
            let granted = ChunkLease::Granted {
                index,
                len: chunk.slot.len(),
                digest: match is_late {
                    true => known_digest(key, chunk).unwrap_or(LATE_DIGEST),
                    false => digest(key, chunk),
                },
            };
            (*key, granted)
        };
        let granted = held.iter().zip(indices).map(chunk).collect();
        if is_late && self.link.data_plane(&session.peer) == DataPlane::Nixl {
            // Sockets sum what they send.
            tokio::spawn(summing::in_turn(Arc::clone(&self.summing), unsummed));
        }
        let chunks = held.iter().map(|(key, chunk)| (*key, chunk.slot.len()));
        let chunks: Vec<(ChunkKey, u64)> = chunks.collect();
        let bytes: u64 = chunks.iter().map(|(_, len)| len).sum();
        let served = Served {
            _grant: grant,
            leased: held.into_iter().map(|(_, chunk)| chunk).collect(),
            is_late,
        };
        let count = chunks.len() as u64;
        let (number, duration) = owner.grant(session.clone(), chunks, duration, served, now());
        drop(owner);
        self.expiry.notify_one();
        self.count(session, |counters| {
            counters.served += count;
            counters.served_bytes += bytes;
        });
        Some((number, duration, granted))
    }

    fn takes_late_digests(&self, session: &Session) -> bool {
        let peers = self.peers.lock();
        let hello = peers
            .get(&session.peer)
            .and_then(|peer| peer.hello.as_ref());
        hello.is_some_and(|hello| hello.features & FEATURE_LATE_DIGESTS != 0)
    }

    fn other_holders(&self, session: &Session, key: &ChunkKey) -> Vec<Holder> {
        let holders = self.holders.lock();
        let sessions = holders.get(key).into_iter().flatten().rev();
        let others: Vec<&Session> = sessions
            .filter(|other| other.peer != session.peer)
            .collect();
        let peers = self.peers.lock();
        let address = |other: &&Session| {
            let hello = peers.get(&other.peer)?.hello.as_ref()?;
            let address = hello.address.clone();
            Some(Holder { address })
        };
        others
            .iter()
            .filter_map(address)
            .take(MAX_HOLDERS)
            .collect()
    }

    /// Ends leases when their time is over. Runs until it is dropped.
    pub async fn expire_leases(&self) {
        loop {
            let (over, next) = {
                let mut owner = self.owner.lock();
                (owner.expire(now()), owner.next_expiry())
            };
            if !over.is_empty() {
                drop(over);
                self.freed.notify_waiters();
            }
            let again = self.expiry.notified();
            match next {
                Some(at) => {
                    let _ = until(at, again).await;
                }
                None => again.await,
            }
        }
    }

    pub(crate) fn count(&self, session: &Session, change: impl FnOnce(&mut PeerCounters)) {
        if let Some(peer) = self.peers.lock().of_session(session) {
            change(&mut peer.counters);
        }
    }

    /// Sends a request, and notes how long the peer took or that it failed.
    ///
    /// # Errors
    /// The reason, for people.
    pub(crate) async fn ask(
        &self,
        peer: &PeerId,
        request: &Request,
        deadline: Instant,
    ) -> Result<Reply, String> {
        let body = request.to_bytes().map_err(|error| error.to_string())?;
        let sent = now();
        let reply = match self.link.request(peer, body, deadline).await {
            Err(TransferError::Deadline) => Err("no answer by the deadline".to_owned()),
            Err(error) => Err(error.to_string()),
            Ok(bytes) => Reply::from_bytes(&bytes).map_err(|error| {
                let mut peers = self.peers.lock();
                if let Some(peer) = peers.get_mut(peer) {
                    peer.counters.malformed += 1;
                }
                error.to_string()
            }),
        };
        if let Some(peer) = self.peers.lock().get_mut(peer) {
            match &reply {
                // The answer comes when the peer has read, or noted what it learned.
                Ok(Reply::Copying(_) | Reply::Pushed(_) | Reply::Cleared(_)) => {}
                Ok(reply) => {
                    peer.answered(now().saturating_duration_since(sent), now());
                    if *reply == Reply::Refused(Refusal::NoHello) {
                        // It does not know this side, or not yet.
                        peer.hello = None;
                        let (last, now) = (peer.lacked_hello, now());
                        // A peer that never takes it is sent it no more often than others.
                        if last.is_none_or(|last| now >= last + IN_STEP_EVERY) {
                            peer.lacked_hello = Some(now);
                            self.out_of_step.notify_one();
                        }
                    }
                }
                Err(reason) => {
                    let allowed = deadline.saturating_duration_since(sent);
                    peer.failed(reason.clone(), allowed, now());
                }
            }
        }
        reply
    }

    /// Returns the counters of all peers together.
    pub fn counters(&self) -> PeerCounters {
        let mut counters = self.peers.lock().counters();
        counters.push_dropped += self.pushes.dropped.load(Ordering::Relaxed);
        counters
    }

    /// Returns the number of leases that peers have here, and their bytes.
    pub fn leased(&self) -> (usize, u64) {
        let owner = self.owner.lock();
        (owner.len(), owner.bytes())
    }
}

/// Bytes that a peer may lease, until the chunks are there.
struct Reservation<'a, G> {
    owner: &'a Mutex<Owner<Served<G>>>,
    freed: &'a Notify,
    session: Session,
    /// Leading chunks that it is for.
    chunks: usize,
    number: u64,
}

impl<G> Drop for Reservation<'_, G> {
    fn drop(&mut self) {
        self.owner.lock().unreserve(&self.session, self.number);
        self.freed.notify_waiters();
    }
}

/// The reason for which a connected peer is not used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HelloError {
    /// The two sides do not fit, as this side or the peer found.
    #[error("{0}")]
    Unfit(Unfit),
    /// The peer refuses this side.
    #[error("refused by the peer: {0}")]
    Refused(Refusal),
    /// The peer gave no answer.
    #[error("no answer to a hello: {0}")]
    NoAnswer(String),
}

impl HelloError {
    /// Returns true if the two sides do not fit, for as long as they run.
    fn is_unfit(&self) -> bool {
        matches!(self, Self::Unfit(_))
    }
}

fn not_leased(chunks: Vec<ChunkLease>) -> Leased {
    Leased {
        lease: 0,
        duration_ms: 0,
        chunks,
        holders: Vec::new(),
    }
}
