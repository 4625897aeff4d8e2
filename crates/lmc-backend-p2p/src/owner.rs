//! [`Owner`]: this daemon as the owner of its chunks. It answers requests of peers.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lmc_backend::{ChunkRun, HostChunk, HostLease, LocateHint, now};
use lmc_key::{ChunkHash, ChunkKey, ClearsId};
use lmc_transfer::DataPlane;
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::digest::{digest, known_digest, unsummed};
use crate::directory::ChangedKeys;
use crate::exchange::Exchange;
use crate::leases::{Busy, LeaseTable, OwnerLimits};
use crate::link::{Link, Session, timeout_at};
use crate::message::{
    ChunkLease, ChunkState, FEATURE_LATE_DIGESTS, Holder, KeyBatch, LATE_DIGEST, Lease, Leased,
    Located, MAX_HOLDERS, MessageError, Push, Pushed, Refusal, Release, Released, Renew, Reply,
    Request, Stamped,
};
use crate::peers::{self, ConnectedPeer};
use crate::recent::Recent;
use crate::session::{HOLD_MARGIN, ORDER_TIMEOUT, Sessions};
use crate::summing::{self, SummingTurn};

/// Most requests of one peer in progress, of the kinds that take time.
pub(crate) const MAX_SERVING: usize = 64;
/// Most chunks for which other holders are remembered.
const HOLDERS: usize = 1 << 16;
/// Longest time that an owner lets a peer wait for a lease.
const MAX_WAIT: Duration = Duration::from_millis(500);
/// Pause of a request that waits because of the rate limit for leases.
const RATE_PAUSE: Duration = Duration::from_millis(5);
/// Timeout for the ordering daemon to answer which of the chunks it has. No prompt waits for the answer.
const ORDER_LOCATE_TIMEOUT: Duration = Duration::from_secs(5);

/// Chunks that a peer has leased. Dropping it ends the access, and the chunks can be evicted again.
#[derive(Debug)]
struct Served<G> {
    _grant: G,
    leased: Vec<HostLease>,
    /// True if the digests come with the release.
    is_late: bool,
}

/// Leases of peers in this daemon's memory, and the peers that hold chunks which they read here.
///
/// Lock order: `leases` and `holders` before the peers of [`Sessions`], never one under the other.
pub(crate) struct LentChunks<G> {
    leases: Mutex<LeaseTable<Served<G>>>,
    /// Notified when the next lease expires earlier than before.
    expiry: Notify,
    /// Notified when a lease has ended: requests that wait for capacity continue in order.
    freed: Notify,
    /// Peers that hold chunks which they read here.
    holders: Mutex<Recent<Vec<Session>>>,
}

impl<G> LentChunks<G> {
    pub(crate) fn new(limits: OwnerLimits) -> Self {
        Self {
            leases: Mutex::new(LeaseTable::new(limits)),
            expiry: Notify::new(),
            freed: Notify::new(),
            holders: Mutex::new(Recent::new(HOLDERS)),
        }
    }

    /// Ends the leases of a session that [`Sessions`] no longer has: no lease is granted to it afterwards.
    pub(crate) fn end(&self, session: &Session) {
        let ended = self.leases.lock().end_session(session);
        drop(ended);
        self.freed.notify_waiters();
        self.holders.lock().retain(|holders| {
            holders.retain(|holder| holder != session);
            !holders.is_empty()
        });
    }
}

/// This daemon as the owner of its chunks: answers the requests of peers, and leases memory to peers within
/// limits. Its locks are those of [`LentChunks`].
pub(crate) struct Owner<L: Link> {
    sessions: Arc<Sessions<L>>,
    exchange: Arc<Exchange<L>>,
    lent: Arc<LentChunks<L::Grant>>,
    /// Chunks whose state directories have to be sent again.
    changed: Arc<ChangedKeys>,
    summing: SummingTurn,
}

impl<L: Link> Owner<L> {
    pub(crate) fn new(
        sessions: Arc<Sessions<L>>,
        exchange: Arc<Exchange<L>>,
        lent: Arc<LentChunks<L::Grant>>,
        changed: Arc<ChangedKeys>,
    ) -> Self {
        Self {
            sessions,
            exchange,
            lent,
            changed,
            summing: Arc::default(),
        }
    }

    /// Answers a request of a connected peer.
    pub(crate) async fn serve(&self, session: &Session, request: &[u8]) -> Vec<u8> {
        let reply = match Request::from_bytes(request) {
            Err(MessageError::Kind(kind)) => Reply::Unsupported(kind),
            Err(_) => {
                self.sessions
                    .with(session, |peer| peer.counters.malformed += 1);
                Reply::Refused(Refusal::of_unparsed(request))
            }
            Ok(request) => match self.begin(session, &request) {
                Err(refusal) => Reply::Refused(refusal),
                Ok(_serving) => self.answer(session, request).await,
            },
        };
        if matches!(reply, Reply::Refused(_)) {
            self.sessions
                .with(session, |peer| peer.counters.refused += 1);
        }
        // Every field of a reply is limited so that it fits.
        let too_long = |_| Reply::Refused(Refusal::Malformed).to_bytes();
        reply.to_bytes().or_else(too_long).unwrap_or_default()
    }

    /// Begins to serve a request. The request counts until the returned value is dropped. Returns `None` for
    /// requests that are answered at once and never refused: renewals and releases free capacity.
    fn begin(&self, session: &Session, request: &Request) -> Result<Option<Arc<()>>, Refusal> {
        let hello = matches!(request, Request::Hello(_));
        if hello && self.sessions.link.is_current(session) {
            self.sessions.note_connected(session);
            if !self.sessions.link.is_current(session) {
                // The peer may have disconnected before this was recorded.
                self.sessions.disconnected(session, "the peer disconnected");
            }
        }
        let is_brief = matches!(
            request,
            Request::Hello(_) | Request::Renew(_) | Request::Release(_) | Request::Clears(_)
        );
        let begun = self.sessions.with(session, |peer| match is_brief {
            _ if peer.hello.is_none() && !hello => Err(Refusal::NoHello),
            true => Ok(None),
            false => {
                let serving = peers::begin(&peer.serving, MAX_SERVING);
                serving.map(Some).ok_or(Refusal::TooMany)
            }
        });
        begun.unwrap_or(Err(Refusal::NoHello))
    }

    async fn answer(&self, session: &Session, request: Request) -> Reply {
        match request {
            Request::Hello(hello) => match self.sessions.accept_hello(session, hello) {
                Ok(()) => Reply::Hello(self.sessions.hello()),
                Err(unfit) => Reply::Refused(unfit.refusal()),
            },
            Request::Locate(keys) => Reply::Located(self.located(session, &keys)),
            Request::Lease(lease) => Reply::Leased(self.lease(session, &lease).await),
            Request::Renew(Renew { lease, duration_ms }) => {
                let duration = Duration::from_millis(duration_ms.into());
                let mut leases = self.lent.leases.lock();
                Reply::Renewed(leases.renew(session, lease, duration, now()))
            }
            Request::Release(release) => Reply::Released(self.release(session, release).await),
            Request::Holds(keys) => {
                if self.sessions.is_in_step(&session.peer, keys.clears) {
                    self.note_holder(session, &keys.message);
                }
                Reply::Noted(())
            }
            Request::Announce(_) | Request::Find(_) => Reply::Unsupported(request.kind()),
            Request::Copy(keys) => self.read_for(session, &keys).await,
            Request::Push(push) => self.receive(session, &push).await,
            Request::Describe(asked) => Reply::Described(self.sessions.spaces.described(asked)),
            Request::Clears(page) => Reply::Cleared(self.exchange.answer_page(session, page).await),
        }
    }

    /// Records that a peer holds chunks that it read here.
    fn note_holder(&self, session: &Session, keys: &KeyBatch) {
        let mut holders = self.lent.holders.lock();
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
        // While the lease is valid, so that only leased chunks are summed.
        let unsummed = match self.lent.leases.lock().granted(session, lease) {
            Some(served) if served.is_late => unsummed(served.leased.iter()),
            _ => Vec::new(),
        };
        if !unsummed.is_empty() {
            summing::in_turn(Arc::clone(&self.summing), unsummed).await;
        }
        let released = self.lent.leases.lock().release(session, lease, now());
        self.lent.freed.notify_waiters();
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
        let states = self.sessions.host.states(keys).into_iter();
        states.map(ChunkState::from).collect()
    }

    fn located(&self, session: &Session, asked: &Stamped<KeyBatch>) -> Stamped<Located> {
        let keys = asked.message.keys();
        let load = self.lent.leases.lock().load();
        if !self.sessions.is_in_step(&session.peer, asked.clears) {
            let states = vec![ChunkState::Absent; keys.len()];
            return self.sessions.stamped(Located {
                states,
                load,
                is_over: false,
            });
        }
        // Checked first: chunks that were stored before the request's end are found below.
        let awaited = asked.message.awaited.as_deref();
        let is_over = awaited.is_some_and(|request| self.sessions.host.is_over(request));
        let states = self.states(&keys);
        // A prefill is asked for repeatedly, and no directory named this daemon for it.
        if self.sessions.config.uses_directories && awaited.is_none() {
            // A directory may have named this daemon for the first absent chunk.
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
        if !self.sessions.is_in_step(&session.peer, *clears) {
            return self
                .sessions
                .stamped(not_leased(vec![ChunkLease::Absent; keys.len()]));
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
            let held = self.sessions.host.lease(&allowed, wait_until).await;
            if !is_late {
                let unsummed = unsummed(held.iter().flatten());
                summing::in_turn(Arc::clone(&self.summing), unsummed).await;
            }
            held
        };
        // If a promotion does not end in time, all chunks are misses.
        let held = timeout_at(wait_until + HOLD_MARGIN, held).await;
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
                // Admission stops at the first chunk that exceeds the limits.
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

    /// Waits until at least the first of these chunks may be leased to the peer. Returns how many chunks may
    /// be leased.
    async fn admit(
        &self,
        session: &Session,
        lens: &[u64],
        wait_until: Instant,
    ) -> Reservation<'_, L::Grant> {
        let reservation = |chunks: usize, number| Reservation {
            lent: &self.lent,
            session: session.clone(),
            chunks,
            number,
        };
        loop {
            let freed = self.lent.freed.notified();
            tokio::pin!(freed);
            // From here on no end of a lease is missed.
            freed.as_mut().enable();
            let busy = {
                let mut leases = self.lent.leases.lock();
                let (admitted, busy) = leases.admit(session, lens, now());
                if admitted > 0 {
                    let bytes = lens[..admitted].iter().sum();
                    return reservation(admitted, leases.reserve(session, bytes));
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
            let _ = timeout_at(pause, freed).await;
        }
    }

    /// Grants the reserved chunks that are present; none if this daemon has carried out a clear since the
    /// request.
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
        let mut leases = self.lent.leases.lock();
        // Under the same lock as the grant, so that nothing is admitted in between.
        leases.unreserve(session, reserved.number);
        self.sessions.peers.lock().of_session(session)?;
        if held.is_empty() || self.sessions.clears().1 != asked_at {
            return None;
        }
        let slots = held.iter().map(|(_, chunk)| chunk.slot.clone()).collect();
        let (indices, grant) = self.sessions.link.grant(&session.peer, slots).ok()?;
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
        if is_late && self.sessions.link.data_plane(&session.peer) == DataPlane::Nixl {
            // Sockets compute checksums while sending.
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
        let (number, duration) = leases.grant(session.clone(), chunks, duration, served, now());
        drop(leases);
        self.lent.expiry.notify_one();
        self.sessions.with(session, |peer| {
            peer.counters.served += count;
            peer.counters.served_bytes += bytes;
        });
        Some((number, duration, granted))
    }

    fn takes_late_digests(&self, session: &Session) -> bool {
        let takes = |peer: &mut ConnectedPeer| peer.has_feature(FEATURE_LATE_DIGESTS);
        self.sessions.with_peer(&session.peer, takes) == Some(true)
    }

    fn other_holders(&self, session: &Session, key: &ChunkKey) -> Vec<Holder> {
        let holders = self.lent.holders.lock();
        let sessions = holders.get(key).into_iter().flatten().rev();
        let others: Vec<&Session> = sessions
            .filter(|other| other.peer != session.peer)
            .collect();
        let peers = self.sessions.peers.lock();
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

    /// Ends leases when they expire. Runs until it is dropped.
    pub(crate) async fn expire_leases(&self) {
        loop {
            let (over, next) = {
                let mut leases = self.lent.leases.lock();
                (leases.expire(now()), leases.next_expiry())
            };
            if !over.is_empty() {
                drop(over);
                self.lent.freed.notify_waiters();
            }
            let again = self.lent.expiry.notified();
            match next {
                Some(at) => {
                    let _ = timeout_at(at, again).await;
                }
                None => again.await,
            }
        }
    }

    /// Reads chunks from a peer that asked for it. Answers how many of them are then in memory.
    async fn read_for(&self, session: &Session, keys: &Stamped<KeyBatch>) -> Reply {
        if !self.sessions.is_in_step(&session.peer, keys.clears) {
            return Reply::Copying(0);
        }
        let begun = self.sessions.with(session, |peer| peer.begin_copy());
        let Some(Some(_one_at_a_time)) = begun else {
            return Reply::Refused(Refusal::TooMany);
        };
        let keys = keys.message.keys();
        let hint = LocateHint::default()
            .with_sources(Arc::new([session.peer.to_string()]))
            .with_timeout(ORDER_LOCATE_TIMEOUT);
        // Chunks that are not read by then are not waited for.
        let _ = timeout_at(
            now() + ORDER_TIMEOUT,
            self.sessions.host.promote(&keys, hint),
        )
        .await;
        let states = self.sessions.host.states(&keys).into_iter();
        let there = states.filter(|state| matches!(state, HostChunk::Memory { .. }));
        Reply::Copying(there.count() as u32)
    }

    /// Reads chunks that a peer pushes. Answers how many of them are then in memory.
    async fn receive(&self, session: &Session, push: &Stamped<Push>) -> Reply {
        let Stamped { clears, message } = push;
        let none = |is_wanted| {
            Reply::Pushed(Pushed {
                chunks: 0,
                is_wanted,
            })
        };
        if !(1..=self.sessions.config.max_chunk).contains(&message.chunk_bytes) {
            return none(false);
        }
        if !self.sessions.is_in_step(&session.peer, *clears) {
            return none(true);
        }
        let begun = self.sessions.with(session, |peer| peer.begin_push());
        let Some(Some(_one_of_few)) = begun else {
            return Reply::Refused(Refusal::TooMany);
        };
        let keys = message.keys.keys();
        let parent = message.parent.zip(keys.first());
        let run = ChunkRun {
            parent: parent.map(|(hash, first)| ChunkKey {
                hash: ChunkHash::new(hash),
                ..*first
            }),
            keys,
            chunk_bytes: message.chunk_bytes,
        };
        let peer = session.peer.as_str();
        let received = self.sessions.host.receive(run, peer, ORDER_LOCATE_TIMEOUT);
        // Chunks that are not read by then are not waited for.
        match timeout_at(now() + ORDER_TIMEOUT, received).await {
            Some(received) => Reply::Pushed(Pushed {
                chunks: received.chunks as u32,
                is_wanted: received.is_wanted,
            }),
            None => none(true),
        }
    }

    /// Returns the number of leases that peers have here, and their bytes.
    pub(crate) fn leased(&self) -> (usize, u64) {
        let leases = self.lent.leases.lock();
        (leases.len(), leases.bytes())
    }

    /// Returns the number of leases of each session that has any, and their bytes.
    pub(crate) fn leased_by_session(&self) -> HashMap<Session, (usize, u64)> {
        self.lent.leases.lock().by_session()
    }
}

/// Bytes reserved for a peer's lease, until the chunks are in memory.
struct Reservation<'a, G> {
    lent: &'a LentChunks<G>,
    session: Session,
    /// Number of leading chunks that it covers.
    chunks: usize,
    number: u64,
}

impl<G> Drop for Reservation<'_, G> {
    fn drop(&mut self) {
        self.lent
            .leases
            .lock()
            .unreserve(&self.session, self.number);
        self.lent.freed.notify_waiters();
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
