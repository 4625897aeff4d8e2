//! Knowledge of this daemon about its peers: which are connected, how fast they are, what failed. No
//! IO and no clock.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use lmc_backend::now;
use lmc_key::{ClearsId, LayoutFingerprint};
use lmc_transfer::PeerId;
use serde::{Serialize, Serializer};

use crate::link::Session;
use crate::message::{Described, FEATURE_DIRECTORY, Hello};

/// Rate of reads that is assumed of a peer before the first one: 10 Gbit/s.
const ASSUMED_RATE: f64 = 1.25e9;
/// Round trip that is assumed of a peer before the first one.
const ASSUMED_ROUND_TRIP: Duration = Duration::from_micros(200);
/// Time for which a peer is not asked after its first failure in a row, and at most.
const BACK_OFF: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(10));
/// Time for which a peer is not read after a first lease or read failed, and at most.
const READ_BACK_OFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));
/// Time within which a peer has to lend again for a prompt to go on waiting for it: that of two pauses
/// in a row.
const SOON: Duration = Duration::from_secs(3);
/// Time without an exchange of clears after a first one failed, and at most.
const EXCHANGE_BACK_OFF: (Duration, Duration) =
    (Duration::from_millis(100), Duration::from_secs(5));
/// Pushes of one daemon that a peer reads at a time, at most.
pub(crate) const MAX_PUSHES: usize = 4;
/// Peers that are remembered after they went.
const MAX_GONE: usize = 16;
/// Weight of the newest measurement.
const WEIGHT: f64 = 0.2;

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counters of one peer since this daemon's start, both directions.
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
    /// Payload bytes of those that came over NIXL.
    read_nixl_bytes,
    /// Chunks leased to the peer.
    served,
    /// Payload bytes of the chunks leased to the peer.
    served_bytes,
    /// Chunks that the peer was said to have and did not lease.
    missed,
    /// Chunks that the peer did not lease for lack of capacity.
    busy,
    /// Chunks that were pushed to the peer, which has them in memory.
    pushed,
    /// Chunks that were not pushed to the peer, or that the peer did not read, for lack of memory, capacity
    /// or time.
    push_dropped,
    /// Chunks whose bytes were not those of their digest.
    corrupt,
    /// Chunks whose lease had a gap, or whose release was not answered.
    lapsed,
    /// Requests and reads that failed or came late.
    failed,
    /// Times that the peer passed on clears that were not carried out here.
    clears,
    /// Frames of the peer that are not of the protocol.
    malformed,
    /// Requests of the peer that were refused.
    refused,
}

/// A failure, and when it was.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct Failure {
    /// The reason, for people.
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
    /// Name for people; none where no hello was accepted.
    pub name: Option<String>,
    /// Address at which the peer listened; none where no hello was accepted.
    pub address: Option<String>,
    /// Reason of the disconnect.
    pub failure: Failure,
    /// Counters of the peer, from its connect to its end.
    pub counters: BTreeMap<&'static str, u64>,
}

/// One connected peer.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) session: Session,
    pub(crate) since: Instant,
    /// The peer's hello; `None` until it came, or where it was refused.
    pub(crate) hello: Option<Hello>,
    /// True once one side refused the other for its settings.
    pub(crate) is_unfit: bool,
    /// Digest of the peer's clears, as it said that last; `None` if that may be another now.
    pub(crate) clears: Option<ClearsId>,
    /// Time at which the peer last said that it lacks this side's hello, and was sent it at once.
    pub(crate) lacked_hello: Option<Instant>,
    /// Exchanges of clears.
    pub(crate) exchanges: BackOff,
    /// Content of the peer, as it described that last; its digest is 0 until it said more than its hello.
    pub(crate) holds: Described,
    /// Models that it serves in another space, of which the log has warned.
    pub(crate) warned: BTreeSet<String>,
    pub(crate) counters: PeerCounters,
    /// Cloned for each request of the peer under way here.
    pub(crate) serving: Arc<()>,
    /// Cloned while chunks are read on an order of the peer.
    copying: Arc<()>,
    /// Cloned for each push of the peer whose chunks are being read.
    pushing: Arc<()>,
    round_trip: f64,
    replies: u64,
    /// Bytes a second.
    rate: f64,
    reads: u64,
    /// Share of what the peer may lease that it had leased when it last said so.
    pub(crate) load: u8,
    answers: BackOff,
    /// Time that the request had whose failure began the last pause.
    allowed: Duration,
    /// True from the begin of a pause until the peer is asked whether it is only slow.
    is_unprobed: bool,
    /// Leases and reads.
    lending: BackOff,
    pub(crate) last_failure: Option<Failure>,
}

/// A pause after failures, which doubles with each.
#[derive(Debug)]
pub(crate) struct BackOff {
    bounds: (Duration, Duration),
    failures: u32,
    until: Option<Instant>,
}

impl BackOff {
    fn new(bounds: (Duration, Duration)) -> Self {
        Self {
            bounds,
            failures: 0,
            until: None,
        }
    }

    /// Begins a pause, unless one runs: requests that were sent before it fail together. Returns
    /// true if it began one.
    pub(crate) fn failed(&mut self, now: Instant) -> bool {
        if !self.is_over(now) {
            return false;
        }
        let pause = self.bounds.0 * 2u32.saturating_pow(self.failures.min(16));
        self.failures = self.failures.saturating_add(1);
        self.until = Some(now + pause.min(self.bounds.1));
        true
    }

    pub(crate) fn succeeded(&mut self) {
        (self.failures, self.until) = (0, None);
    }

    /// Notes that what failed works, only slowly: the pause is no longer than a first one.
    fn worked_late(&mut self, now: Instant) {
        self.failures = 0;
        self.until = self.until.map(|until| until.min(now + self.bounds.0));
    }

    pub(crate) fn is_over(&self, now: Instant) -> bool {
        self.until.is_none_or(|until| until <= now)
    }
}

impl Peer {
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

    /// Returns the time that reading `bytes` bytes takes, as measured so far.
    pub(crate) fn cost(&self, bytes: u64) -> Duration {
        // A lease, a read, a release.
        let seconds = 3.0 * self.round_trip + bytes as f64 / self.rate;
        Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
    }

    /// Notes an answer. One that would have been in time for the request that failed last ends the
    /// pause.
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

    /// Returns the measured bytes a second of reads.
    pub(crate) fn read_rate(&self) -> Option<f64> {
        (self.reads > 0).then_some(self.rate)
    }

    /// Returns the time for which the peer is not asked, or asked and not read.
    pub(crate) fn paused(&self, now: Instant) -> Option<Duration> {
        let until = self.answers.until.max(self.lending.until)?;
        let left = until.saturating_duration_since(now);
        (!left.is_zero()).then_some(left)
    }

    pub(crate) fn read(&mut self, bytes: u64, took: Duration) {
        let rate = bytes as f64 / took.as_secs_f64().max(1e-9);
        self.rate += WEIGHT * (rate - self.rate);
        self.reads += 1;
    }

    /// Notes that a request failed, which had this time to be answered.
    pub(crate) fn failed(&mut self, reason: String, allowed: Duration, now: Instant) {
        self.counters.failed += 1;
        if self.answers.failed(now) {
            (self.allowed, self.is_unprobed) = (allowed, true);
        }
        self.last_failure = Some(Failure::new(reason, now));
    }

    /// Notes that the peer lent nothing, or not what it had said. It is not asked for a while.
    /// Returns true if that pause begins now.
    pub(crate) fn lent_badly(&mut self, reason: String, now: Instant) -> bool {
        self.counters.failed += 1;
        self.last_failure = Some(Failure::new(reason, now));
        self.lending.failed(now)
    }

    /// Notes that an exchange of clears failed. Returns true if it did not fail for this reason just
    /// before.
    pub(crate) fn did_not_exchange(&mut self, reason: String, now: Instant) -> bool {
        self.exchanges.failed(now);
        let new = Failure::new(reason, now);
        let old = self.last_failure.replace(new.clone());
        old.is_none_or(|old| old.reason != new.reason)
    }

    /// Notes that a chunk of the peer was read and verified. Ends no pause: other chunks of the
    /// same lease may have begun it.
    pub(crate) fn lent(&mut self, now: Instant) {
        if self.lending.is_over(now) {
            self.lending.succeeded();
        }
    }

    /// Returns the peer's name for people; that on the channel where it has none.
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

    /// Returns true if the peer has said that it is drained.
    pub(crate) fn is_draining(&self) -> bool {
        self.holds.is_draining
    }

    /// Returns true if the peer's hello was accepted and says that it is no directory.
    pub(crate) fn is_daemon(&self) -> bool {
        self.hello.is_some() && !self.is_directory()
    }

    /// Returns true if the peer has said that it is a directory.
    pub(crate) fn is_directory(&self) -> bool {
        self.has_feature(FEATURE_DIRECTORY)
    }

    /// Returns false while no lease is asked of the peer, because one or a read failed.
    pub(crate) fn lends(&self, now: Instant) -> bool {
        self.lending.is_over(now)
    }

    /// Begins to read on an order of the peer, until what is returned is dropped; `None` while
    /// another is carried out.
    pub(crate) fn begin_copy(&self) -> Option<Arc<()>> {
        begin(&self.copying, 1)
    }

    /// Notes that a push of the peer is read, until the returned value is dropped; `None` where too many
    /// are under way.
    pub(crate) fn begin_push(&self) -> Option<Arc<()>> {
        begin(&self.pushing, MAX_PUSHES)
    }

    /// Returns true if one of these is the peer's name, its address or its name on the channel.
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

/// Notes that one more is under way, until the returned value is dropped; `None` where `most` are.
pub(crate) fn begin(under_way: &Arc<()>, most: usize) -> Option<Arc<()>> {
    let is_free = Arc::strong_count(under_way) <= most;
    is_free.then(|| Arc::clone(under_way))
}

/// The peers that are connected, by their name on the channel.
#[derive(Debug, Default)]
pub(crate) struct Peers {
    connected: HashMap<PeerId, Peer>,
    /// Counters of all peers that are gone.
    past: PeerCounters,
    /// The peers that went last, the last first.
    gone: VecDeque<GonePeer>,
}

impl Peers {
    /// Notes that an incarnation of a peer is connected. Returns the session that it replaces.
    pub(crate) fn connected(&mut self, session: &Session, now: Instant) -> Option<Session> {
        let peer = self.connected.get(&session.peer);
        if peer.is_some_and(|peer| peer.session == *session) {
            return None;
        }
        let new = Peer::new(session.clone(), now);
        let old = self.connected.insert(session.peer.clone(), new)?;
        self.past.add(&old.counters);
        Some(old.session)
    }

    /// Notes that an incarnation of a peer is gone.
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

    /// Takes a peer's hello. The peer that was at its address before is not missed any more.
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

    /// Returns the peers that went last and did not come back, the last first.
    pub(crate) fn gone(&self) -> impl Iterator<Item = &GonePeer> {
        self.gone.iter()
    }

    pub(crate) fn get(&self, peer: &PeerId) -> Option<&Peer> {
        self.connected.get(peer)
    }

    pub(crate) fn get_mut(&mut self, peer: &PeerId) -> Option<&mut Peer> {
        self.connected.get_mut(peer)
    }

    pub(crate) fn of_session(&mut self, session: &Session) -> Option<&mut Peer> {
        let peer = self.connected.get_mut(&session.peer);
        peer.filter(|peer| peer.session == *session)
    }

    /// Returns for each layout, with its number of KV ranks, whether one of these peers has described a
    /// live space of it; any peer where none is named.
    pub(crate) fn have_layouts(
        &self,
        layouts: &[(LayoutFingerprint, u32)],
        names: &[String],
    ) -> Vec<bool> {
        let mut found = vec![false; layouts.len()];
        let is_meant = |peer: &&Peer| names.is_empty() || peer.is_one_of(names);
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

    /// Returns the connected peers that a name, an address or a name on the channel means.
    pub(crate) fn named(&self, name: &str) -> Vec<PeerId> {
        let name = [name.to_owned()];
        let named = self.iter().filter(|peer| peer.is_one_of(&name));
        named.map(|peer| peer.session.peer.clone()).collect()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Peer> {
        self.connected.values()
    }

    /// Returns the daemons among the peers, whose hello was accepted.
    pub(crate) fn daemons(&self) -> impl Iterator<Item = &Peer> {
        self.iter().filter(|peer| peer.is_daemon())
    }

    /// Returns the names of the peers whose hello was accepted.
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

    /// Returns the names of the peers that can be asked for chunks now, and of those that may have
    /// some and are not asked: they failed a moment ago, or have sent no hello yet.
    pub(crate) fn to_ask(&self, now: Instant) -> (Vec<PeerId>, Vec<PeerId>) {
        let may_have = |peer: &&Peer| !peer.is_directory() && !peer.is_unfit;
        let (able, left_out): (Vec<&Peer>, Vec<&Peer>) = self
            .iter()
            .filter(may_have)
            .partition(|peer| peer.can_be_asked(now));
        let names = |peers: Vec<&Peer>| {
            let mut names: Vec<PeerId> = peers.iter().map(|p| p.session.peer.clone()).collect();
            names.sort_unstable();
            names
        };
        (names(able), names(left_out))
    }

    /// Returns the names of those of them that one of these names or addresses means.
    pub(crate) fn to_ask_first(&self, names: &[String], now: Instant) -> Vec<PeerId> {
        let is_meant = |peer: &PeerId| self.get(peer).is_some_and(|peer| peer.is_one_of(names));
        self.to_ask(now).0.into_iter().filter(is_meant).collect()
    }

    /// Returns true if a peer with one of these names is connected and may lend chunks once it has
    /// them. A peer that has refused does not count, nor one that takes none any more; a peer that is busy
    /// and has not answered does.
    pub(crate) fn may_lend(&self, names: &[String], refused: &[PeerId], now: Instant) -> bool {
        // A busy one fails now and then.
        let soon = now + SOON;
        let lends = |peer: &Peer| !peer.is_draining() && !peer.is_unfit && peer.lends(soon);
        self.daemons().any(|peer| {
            !refused.contains(&peer.session.peer) && peer.is_one_of(names) && lends(peer)
        })
    }

    /// Returns the counters of all peers, those that are gone included.
    pub(crate) fn counters(&self) -> PeerCounters {
        let mut sum = self.past;
        self.iter().for_each(|peer| sum.add(&peer.counters));
        sum
    }
}
