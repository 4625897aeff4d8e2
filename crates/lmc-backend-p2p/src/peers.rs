//! This daemon's knowledge about its peers: which peers are connected, how fast they are, and what failed. No
//! I/O and no clock.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use lmc_backend::now;
use lmc_key::{ClearsId, LayoutFingerprint};
use lmc_transfer::PeerId;
use serde::{Serialize, Serializer};

use crate::link::Session;
use crate::message::{Described, FEATURE_DIRECTORY, Hello};

/// Assumed read rate of a peer before the first read: 10 Gbit/s.
const ASSUMED_RATE: f64 = 1.25e9;
/// Assumed round trip of a peer before the first request.
const ASSUMED_ROUND_TRIP: Duration = Duration::from_micros(200);
/// Time for which a peer is not asked after its first failure, and longest such time after further failures.
const BACK_OFF: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(10));
/// Time for which a peer is not read after a first failed lease or read, and longest such time.
const READ_BACK_OFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));
/// Time within which a peer has to lend again so that a prompt keeps waiting for it: that of two pauses in a
/// row.
const SOON: Duration = Duration::from_secs(3);
/// Time without an exchange of clears after a first failed exchange, and longest such time.
const EXCHANGE_BACK_OFF: (Duration, Duration) =
    (Duration::from_millis(100), Duration::from_secs(5));
/// Most pushes of one daemon that a peer reads at a time.
pub(crate) const MAX_PUSHES: usize = 4;
/// Most disconnected peers that are remembered.
const MAX_GONE: usize = 16;
/// Weight of the latest measurement.
const WEIGHT: f64 = 0.2;

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counters of one peer since this daemon's start, in both directions.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct PeerCounters {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl PeerCounters {
            fn add(&mut self, other: &Self) {
                $(self.$name += other.$name;)*
            }

            /// Returns each counter with its name, which fits a metric's label.
            pub(crate) fn named(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name),)*]
            }

            /// Returns the counters by their names.
            pub(crate) fn by_name(&self) -> BTreeMap<&'static str, u64> {
                self.named().into_iter().collect()
            }
        }
    };
}

counters! {
    /// Chunks read from the peer, verified.
    read,
    /// Payload bytes of the chunks read from the peer.
    read_bytes,
    /// Payload bytes of those chunks that came over NIXL.
    read_nixl_bytes,
    /// Chunks leased to the peer.
    served,
    /// Payload bytes of the chunks leased to the peer.
    served_bytes,
    /// Chunks that the peer was said to have but did not lease.
    missed,
    /// Chunks that the peer did not lease for lack of capacity.
    busy,
    /// Chunks that were pushed to the peer and that it has in memory.
    pushed,
    /// Chunks that were not pushed to the peer, or that the peer did not read, for lack of memory, capacity
    /// or time.
    push_dropped,
    /// Chunks whose bytes did not match their digest.
    corrupt,
    /// Chunks whose lease had a gap, or whose release was not answered.
    lapsed,
    /// Requests and reads that failed or came late.
    failed,
    /// Times that the peer passed on clears that had not been carried out here.
    clears,
    /// Frames of the peer that are invalid in the protocol.
    malformed,
    /// Requests of the peer that were refused.
    refused,
}

/// A failure, and its time.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct Failure {
    /// The reason, for an operator.
    pub reason: String,
    #[serde(rename = "seconds_ago", serialize_with = "seconds_since")]
    at: Instant,
}

impl Failure {
    pub(crate) fn new(reason: String, at: Instant) -> Self {
        Self { reason, at }
    }
}

fn seconds_since<S: Serializer>(at: &Instant, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(now().saturating_duration_since(*at).as_secs_f64())
}

/// A peer that disconnected.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct GonePeer {
    /// Name on the channel.
    pub id: String,
    /// Name for an operator; none if no hello was accepted.
    pub name: Option<String>,
    /// Address at which the peer listened; none if no hello was accepted.
    pub address: Option<String>,
    /// Reason of the disconnect.
    pub failure: Failure,
    /// Counters of the peer, from its connect to its disconnect.
    pub counters: BTreeMap<&'static str, u64>,
}

/// One connected peer.
#[derive(Debug)]
pub(crate) struct ConnectedPeer {
    pub(crate) session: Session,
    pub(crate) since: Instant,
    /// The peer's hello; `None` until it arrives, or if it was refused.
    pub(crate) hello: Option<Hello>,
    /// True once one side has refused the other because of its settings.
    pub(crate) is_unfit: bool,
    /// Digest of the peer's clears when it last sent one; `None` if it may have changed.
    pub(crate) clears: Option<ClearsId>,
    /// Time at which the peer last reported that it lacks this side's hello, and was sent it at once.
    pub(crate) lacked_hello: Option<Instant>,
    /// Exchanges of clears.
    pub(crate) exchanges: BackOff,
    /// Content of the peer when it last described it; the digest is 0 until it has described more than its
    /// hello.
    pub(crate) holds: Described,
    /// Models that the peer serves in another space, and that were already logged.
    pub(crate) warned: BTreeSet<String>,
    pub(crate) counters: PeerCounters,
    /// Cloned for each request of the peer in progress here.
    pub(crate) serving: Arc<()>,
    /// Cloned while chunks are being read on an order of the peer.
    copying: Arc<()>,
    /// Cloned for each push of the peer whose chunks are being read.
    pushing: Arc<()>,
    round_trip: f64,
    replies: u64,
    /// Bytes per second.
    rate: f64,
    reads: u64,
    /// Fraction of its lease limit that the peer had leased when it last sent this.
    pub(crate) load: u8,
    answers: BackOff,
    /// Timeout of the request whose failure began the last pause.
    allowed: Duration,
    /// True from the beginning of a pause until the peer is probed for whether it is only slow.
    is_unprobed: bool,
    /// Pause of leases and reads.
    lending: BackOff,
    pub(crate) last_failure: Option<Failure>,
}

/// A pause after failures, which doubles with each failure.
#[derive(Debug)]
pub(crate) struct BackOff {
    bounds: (Duration, Duration),
    failures: u32,
    ends_at: Option<Instant>,
}

impl BackOff {
    fn new(bounds: (Duration, Duration)) -> Self {
        Self {
            bounds,
            failures: 0,
            ends_at: None,
        }
    }

    /// Begins a pause, unless one is running: requests that were sent before the pause fail together. Returns
    /// true if it began a pause.
    pub(crate) fn failed(&mut self, now: Instant) -> bool {
        if !self.is_over(now) {
            return false;
        }
        let pause = self.bounds.0 * 2u32.saturating_pow(self.failures.min(16));
        self.failures = self.failures.saturating_add(1);
        self.ends_at = Some(now + pause.min(self.bounds.1));
        true
    }

    pub(crate) fn succeeded(&mut self) {
        (self.failures, self.ends_at) = (0, None);
    }

    /// Records that the operation works, only slowly: limits the pause to the length of a first one.
    fn worked_late(&mut self, now: Instant) {
        self.failures = 0;
        self.ends_at = self.ends_at.map(|at| at.min(now + self.bounds.0));
    }

    pub(crate) fn is_over(&self, now: Instant) -> bool {
        self.ends_at.is_none_or(|at| at <= now)
    }
}

impl ConnectedPeer {
    fn new(session: Session, since: Instant) -> Self {
        Self {
            session,
            since,
            hello: None,
            is_unfit: false,
            clears: None,
            lacked_hello: None,
            exchanges: BackOff::new(EXCHANGE_BACK_OFF),
            holds: Described::default(),
            warned: BTreeSet::new(),
            counters: PeerCounters::default(),
            serving: Arc::new(()),
            copying: Arc::new(()),
            pushing: Arc::new(()),
            round_trip: ASSUMED_ROUND_TRIP.as_secs_f64(),
            replies: 0,
            rate: ASSUMED_RATE,
            reads: 0,
            load: 0,
            answers: BackOff::new(BACK_OFF),
            allowed: Duration::ZERO,
            is_unprobed: false,
            lending: BackOff::new(READ_BACK_OFF),
            last_failure: None,
        }
    }

    /// Returns the estimated time to read `bytes` bytes, from the measurements so far.
    pub(crate) fn cost(&self, bytes: u64) -> Duration {
        // A lease, a read and a release.
        let seconds = 3.0 * self.round_trip + bytes as f64 / self.rate;
        Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
    }

    /// Records an answer. If it would have been in time for the last request that failed, the pause ends.
    pub(crate) fn answered(&mut self, after: Duration, now: Instant) {
        self.round_trip += WEIGHT * (after.as_secs_f64() - self.round_trip);
        self.replies += 1;
        match after <= self.allowed || self.answers.is_over(now) {
            true => self.answers.succeeded(),
            false => self.answers.worked_late(now),
        }
    }

    /// Returns true once for each pause.
    pub(crate) fn begin_probe(&mut self) -> bool {
        std::mem::take(&mut self.is_unprobed)
    }

    /// Returns the measured seconds from a request to its answer.
    pub(crate) fn round_trip(&self) -> Option<f64> {
        (self.replies > 0).then_some(self.round_trip)
    }

    /// Returns the measured read rate in bytes per second.
    pub(crate) fn read_rate(&self) -> Option<f64> {
        (self.reads > 0).then_some(self.rate)
    }

    /// Returns the time for which the peer is not asked, or is asked but not read.
    pub(crate) fn paused(&self, now: Instant) -> Option<Duration> {
        let ends_at = self.answers.ends_at.max(self.lending.ends_at)?;
        let left = ends_at.saturating_duration_since(now);
        (!left.is_zero()).then_some(left)
    }

    pub(crate) fn read(&mut self, bytes: u64, took: Duration) {
        let rate = bytes as f64 / took.as_secs_f64().max(1e-9);
        self.rate += WEIGHT * (rate - self.rate);
        self.reads += 1;
    }

    /// Records that a request with this timeout failed.
    pub(crate) fn failed(&mut self, reason: String, allowed: Duration, now: Instant) {
        self.counters.failed += 1;
        if self.answers.failed(now) {
            (self.allowed, self.is_unprobed) = (allowed, true);
        }
        self.last_failure = Some(Failure::new(reason, now));
    }

    /// Records that the peer lent nothing, or not the chunks that it had reported. It is not asked for a
    /// while. Returns true if this pause begins now.
    pub(crate) fn lent_badly(&mut self, reason: String, now: Instant) -> bool {
        self.counters.failed += 1;
        self.last_failure = Some(Failure::new(reason, now));
        self.lending.failed(now)
    }

    /// Records that an exchange of clears failed. Returns true if the previous failure had another reason.
    pub(crate) fn did_not_exchange(&mut self, reason: String, now: Instant) -> bool {
        self.exchanges.failed(now);
        let new = Failure::new(reason, now);
        let old = self.last_failure.replace(new.clone());
        old.is_none_or(|old| old.reason != new.reason)
    }

    /// Records that a chunk of the peer was read and verified. Ends no pause: other chunks of the same lease
    /// may have begun it.
    pub(crate) fn lent(&mut self, now: Instant) {
        if self.lending.is_over(now) {
            self.lending.succeeded();
        }
    }

    /// Returns the peer's name for an operator, or its name on the channel if it has none.
    pub(crate) fn name(&self) -> String {
        let name = self.hello.as_ref().map(|hello| hello.name.as_str());
        let name = name.filter(|name| !name.is_empty());
        name.unwrap_or(self.session.peer.as_str()).to_owned()
    }

    /// Returns true if the peer's hello has a feature bit.
    pub(crate) fn has_feature(&self, bit: u64) -> bool {
        let hello = self.hello.as_ref();
        hello.is_some_and(|hello| hello.features & bit != 0)
    }

    /// Returns true if the peer has reported that it is drained.
    pub(crate) fn is_draining(&self) -> bool {
        self.holds.is_draining
    }

    /// Returns true if the peer's hello was accepted and the peer is not a directory.
    pub(crate) fn is_daemon(&self) -> bool {
        self.hello.is_some() && !self.is_directory()
    }

    /// Returns true if the peer has reported that it is a directory.
    pub(crate) fn is_directory(&self) -> bool {
        self.has_feature(FEATURE_DIRECTORY)
    }

    /// Returns false while no lease is requested from the peer, because a lease or a read failed.
    pub(crate) fn lends(&self, now: Instant) -> bool {
        self.lending.is_over(now)
    }

    /// Begins to read on an order of the peer, until the returned value is dropped. Returns `None` while
    /// another order is carried out.
    pub(crate) fn begin_copy(&self) -> Option<Arc<()>> {
        begin(&self.copying, 1)
    }

    /// Begins to read a push of the peer, until the returned value is dropped. Returns `None` if too many are
    /// in progress.
    pub(crate) fn begin_push(&self) -> Option<Arc<()>> {
        begin(&self.pushing, MAX_PUSHES)
    }

    /// Returns true if the peer's name, its address or its name on the channel is in `names`.
    pub(crate) fn is_one_of(&self, names: &[String]) -> bool {
        let hello = self.hello.as_ref();
        let own = hello.map_or([""; 2], |hello| [&hello.name, &hello.address]);
        let is_own = |name: &String| !name.is_empty() && own.contains(&name.as_str());
        names
            .iter()
            .any(|name| is_own(name) || name == self.session.peer.as_str())
    }

    pub(crate) fn can_be_asked(&self, now: Instant) -> bool {
        self.hello.is_some() && self.answers.is_over(now) && self.lends(now)
    }
}

/// Counts one more operation as in progress, until the returned value is dropped. Returns `None` if `most`
/// are in progress.
pub(crate) fn begin(under_way: &Arc<()>, most: usize) -> Option<Arc<()>> {
    let is_free = Arc::strong_count(under_way) <= most;
    is_free.then(|| Arc::clone(under_way))
}

/// The peers that are connected, by their name on the channel.
#[derive(Debug, Default)]
pub(crate) struct Peers {
    connected: HashMap<PeerId, ConnectedPeer>,
    /// Counters of all peers that are gone.
    past: PeerCounters,
    /// The peers that disconnected last, the latest first.
    gone: VecDeque<GonePeer>,
}

impl Peers {
    /// Records that an incarnation of a peer is connected. Returns the session that it replaces.
    pub(crate) fn connected(&mut self, session: &Session, now: Instant) -> Option<Session> {
        let peer = self.connected.get(&session.peer);
        if peer.is_some_and(|peer| peer.session == *session) {
            return None;
        }
        let new = ConnectedPeer::new(session.clone(), now);
        let old = self.connected.insert(session.peer.clone(), new)?;
        self.past.add(&old.counters);
        Some(old.session)
    }

    /// Records that an incarnation of a peer is gone.
    pub(crate) fn disconnected(&mut self, session: &Session, failure: Failure) {
        if self.of_session(session).is_some()
            && let Some(peer) = self.connected.remove(&session.peer)
        {
            self.past.add(&peer.counters);
            let hello = peer.hello.as_ref();
            self.gone.push_front(GonePeer {
                id: session.peer.to_string(),
                name: hello.map(|hello| hello.name.clone()),
                address: hello.map(|hello| hello.address.clone()),
                failure,
                counters: peer.counters.by_name(),
            });
            self.gone.truncate(MAX_GONE);
        }
    }

    /// Accepts a peer's hello. A peer that was at the same address before is no longer missed.
    pub(crate) fn accept(&mut self, session: &Session, mut hello: Hello) {
        let address = Some(&hello.address);
        self.gone.retain(|gone| gone.address.as_ref() != address);
        if let Some(peer) = self.of_session(session) {
            peer.holds.spaces = std::mem::take(&mut hello.spaces);
            peer.holds.digest = 0;
            peer.holds.is_draining = hello.is_draining;
            peer.clears = Some(hello.clears);
            peer.hello = Some(hello);
        }
    }

    /// Returns the peers that disconnected last and did not return, the latest first.
    pub(crate) fn gone(&self) -> impl Iterator<Item = &GonePeer> {
        self.gone.iter()
    }

    pub(crate) fn get(&self, peer: &PeerId) -> Option<&ConnectedPeer> {
        self.connected.get(peer)
    }

    pub(crate) fn get_mut(&mut self, peer: &PeerId) -> Option<&mut ConnectedPeer> {
        self.connected.get_mut(peer)
    }

    pub(crate) fn of_session(&mut self, session: &Session) -> Option<&mut ConnectedPeer> {
        let peer = self.connected.get_mut(&session.peer);
        peer.filter(|peer| peer.session == *session)
    }

    /// Returns for each layout, given with its number of KV ranks, whether one of the peers in `sources` has
    /// described a live space with it; without sources, any peer counts.
    pub(crate) fn have_layouts(
        &self,
        layouts: &[(LayoutFingerprint, u32)],
        names: &[String],
    ) -> Vec<bool> {
        let mut found = vec![false; layouts.len()];
        let is_meant = |peer: &&ConnectedPeer| names.is_empty() || peer.is_one_of(names);
        for space in self
            .iter()
            .filter(is_meant)
            .flat_map(|peer| &peer.holds.spaces)
        {
            for (found, (layout, ranks)) in found.iter_mut().zip(layouts) {
                *found |= (space.layout, space.world_size) == (*layout.as_bytes(), *ranks);
            }
        }
        found
    }

    /// Returns the connected peers with this name, address or name on the channel.
    pub(crate) fn named(&self, name: &str) -> Vec<PeerId> {
        let name = [name.to_owned()];
        let named = self.iter().filter(|peer| peer.is_one_of(&name));
        named.map(|peer| peer.session.peer.clone()).collect()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &ConnectedPeer> {
        self.connected.values()
    }

    /// Returns the daemons among the peers whose hello was accepted.
    pub(crate) fn daemons(&self) -> impl Iterator<Item = &ConnectedPeer> {
        self.iter().filter(|peer| peer.is_daemon())
    }

    /// Returns the names on the channel of the peers whose hello was accepted.
    pub(crate) fn with_hello(&self) -> Vec<PeerId> {
        let known = self.iter().filter(|peer| peer.hello.is_some());
        let mut names: Vec<PeerId> = known.map(|peer| peer.session.peer.clone()).collect();
        names.sort_unstable();
        names
    }

    /// Returns the sessions of the peers without an accepted hello.
    pub(crate) fn without_hello(&self) -> Vec<Session> {
        let strangers = self.iter().filter(|peer| peer.hello.is_none());
        strangers.map(|peer| peer.session.clone()).collect()
    }

    /// Returns the names of the peers that can be asked for chunks now. Also returns the names of the peers
    /// that may have chunks but are not asked, because they failed a moment ago or have sent no hello yet.
    pub(crate) fn to_ask(&self, now: Instant) -> (Vec<PeerId>, Vec<PeerId>) {
        let may_have = |peer: &&ConnectedPeer| !peer.is_directory() && !peer.is_unfit;
        let (able, left_out): (Vec<&ConnectedPeer>, Vec<&ConnectedPeer>) = self
            .iter()
            .filter(may_have)
            .partition(|peer| peer.can_be_asked(now));
        let names = |peers: Vec<&ConnectedPeer>| {
            let mut names: Vec<PeerId> = peers.iter().map(|p| p.session.peer.clone()).collect();
            names.sort_unstable();
            names
        };
        (names(able), names(left_out))
    }

    /// Returns the askable peers that match any of `names`, by name or address.
    pub(crate) fn to_ask_first(&self, names: &[String], now: Instant) -> Vec<PeerId> {
        let is_meant = |peer: &PeerId| self.get(peer).is_some_and(|peer| peer.is_one_of(names));
        self.to_ask(now).0.into_iter().filter(is_meant).collect()
    }

    /// Returns true if a peer with one of these names is connected and may lend chunks once it has them. A
    /// peer that has refused does not count, nor does a peer that accepts no more chunks. A busy peer that
    /// has not answered counts.
    pub(crate) fn may_lend(&self, names: &[String], refused: &[PeerId], now: Instant) -> bool {
        // A busy peer fails sometimes.
        let soon = now + SOON;
        let lends =
            |peer: &ConnectedPeer| !peer.is_draining() && !peer.is_unfit && peer.lends(soon);
        self.daemons().any(|peer| {
            !refused.contains(&peer.session.peer) && peer.is_one_of(names) && lends(peer)
        })
    }

    /// Returns the counters of all peers, including disconnected ones.
    pub(crate) fn counters(&self) -> PeerCounters {
        let mut sum = self.past;
        self.iter().for_each(|peer| sum.add(&peer.counters));
        sum
    }
}
