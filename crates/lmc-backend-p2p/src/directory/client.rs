//! [`DirectoryClient`]: the member's side of directories. It announces the chunks that this daemon can lend,
//! and asks for members that have the chunks of a prompt.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use futures_util::stream::{FuturesUnordered, StreamExt};
use lmc_backend::{ChunkEvent, EventSink, now};
use lmc_key::ChunkKey;
use lmc_transfer::PeerId;
use parking_lot::Mutex;
use serde::Serialize;

use super::buckets::Fingerprint;
use super::lendable::{Lendable, Progress};
use super::message::{Announce, Announced, Candidate, Find, Found};
use crate::link::{Link, tcp_address, timeout_at};
use crate::message::{Reply, Request};
use crate::peers::{ConnectedPeer, Peers};
use crate::session::{AskError, Sessions};

/// Least time between two announcements to a directory; changes in between are sent together.
const FLUSH_EVERY: Duration = Duration::from_millis(100);
/// Longest time between two announcements to a directory, by which it knows that this daemon is alive.
const ALIVE_EVERY: Duration = Duration::from_secs(4);
/// Time between two listings of all chunks, which find changes that no event reported.
const LIST_EVERY: Duration = Duration::from_secs(300);
/// Number of chunks listed at a time, and number of such pages between two announcements.
const PAGE: (usize, usize) = (1024, 16);
/// Most keys of chunks that may have changed; beyond that all chunks are listed.
const MAX_CHANGED: usize = 1 << 16;
/// Number of keys whose state is looked up at once.
const STATES_AT_ONCE: usize = 1024;
/// Timeout of an announcement.
const ANNOUNCE_TIMEOUT: Duration = Duration::from_secs(2);
/// Pause after a failed announcement.
const FAILED_PAUSE: Duration = Duration::from_millis(500);
/// Least time between two generations.
const BEGIN_EVERY: Duration = Duration::from_secs(2);
/// Time after which everything is announced again to a directory that was full.
const FULL_PAUSE: Duration = Duration::from_secs(60);
/// Timeout of a connect to a member.
const DIAL_TIMEOUT: Duration = Duration::from_secs(2);
/// Time after which a failed connect to a member is retried.
const DIAL_AGAIN: Duration = Duration::from_secs(1);
/// Most members that are connected because a directory named them.
const MAX_DIALED: usize = 64;
/// Time without a request after which such a member may be disconnected in favour of another.
const DIALED_IDLE: Duration = Duration::from_secs(30);

/// Keys of chunks that may have come or gone.
#[derive(Debug, Default)]
pub(crate) struct ChangedKeys {
    pub(crate) keys: Mutex<Vec<ChunkKey>>,
    /// True if there were too many keys.
    overflowed: AtomicBool,
}

impl ChangedKeys {
    /// Records that a chunk may have come or gone. Quick, because it may be called under a lock.
    pub(crate) fn note(&self, key: &ChunkKey) {
        let mut keys = self.keys.lock();
        match keys.len() < MAX_CHANGED {
            true => keys.push(*key),
            false => self.overflowed.store(true, Ordering::Release),
        }
    }
}

impl EventSink for ChangedKeys {
    fn changed(&self, event: &ChunkEvent<'_>) {
        self.note(event.key);
    }

    fn any_changed(&self, _tier: &str) {
        self.overflowed.store(true, Ordering::Release);
    }
}

/// Use of a directory by this daemon, since the directory connected.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct DirectoryUse {
    /// True for the directory that is currently asked first.
    pub is_asked: bool,
    /// Prompts whose holders the directory was asked for, and answered.
    pub answered: u64,
    /// Prompts for which the directory named a holder.
    pub found: u64,
    /// Prompts for which the directory gave no answer in time.
    pub failed: u64,
    /// Chunks that this daemon can lend and announces.
    pub chunks: u64,
    /// True while the directory does not know all of these chunks.
    pub is_behind: bool,
    /// Limit because of which the directory did not keep all of these chunks.
    pub limit: Option<u64>,
}

impl DirectoryUse {
    fn answered(&mut self, found: bool) {
        self.answered += 1;
        self.found += u64::from(found);
    }
}

/// The configured peers that are connected.
#[derive(Debug, Default)]
struct ConfiguredPeers {
    named: HashSet<PeerId>,
    /// Directories, in the order in which they are asked.
    directories: Vec<PeerId>,
}

/// Members that are connected because a directory named them.
#[derive(Debug, Default)]
struct DialedMembers {
    under_way: HashSet<PeerId>,
    failed: HashMap<PeerId, Instant>,
    /// Time of the last request to each of these members.
    asked_at: HashMap<PeerId, Instant>,
}

/// State of the announcements to one directory.
struct Announcing {
    progress: Progress,
    sending: bool,
    /// Earliest time of the next announcement.
    next: Instant,
    /// Latest time of the next announcement.
    alive: Instant,
    begun: Option<Instant>,
    again: Option<Instant>,
}

/// Peers to send a `locate` to.
pub(crate) struct ToAsk {
    pub(crate) peers: Vec<PeerId>,
    /// Reason why other peers may have the chunks too.
    pub(crate) unknown: Option<String>,
}

/// The directories that this daemon announces chunks to and asks.
///
/// Lock order: `dialed` after the peers of [`Sessions`]; each of its other locks is held alone.
pub(crate) struct DirectoryClient<L> {
    sessions: Arc<Sessions<L>>,
    configured: Mutex<ConfiguredPeers>,
    dialed: Mutex<DialedMembers>,
    pub(crate) changed: Arc<ChangedKeys>,
    /// Use of each connected directory.
    uses: Mutex<HashMap<PeerId, DirectoryUse>>,
    /// Lookups that a directory answered.
    asked: AtomicU64,
    /// Lookups that no directory answered.
    failed: AtomicU64,
    /// Announcements that a directory did not keep completely.
    full: AtomicU64,
}

impl<L: Link> DirectoryClient<L> {
    pub(crate) fn new(sessions: Arc<Sessions<L>>) -> Self {
        let changed = Arc::<ChangedKeys>::default();
        if sessions.config.uses_directories {
            sessions.host.events().listen(Arc::clone(&changed) as _);
        }
        Self {
            sessions,
            configured: Mutex::default(),
            dialed: Mutex::default(),
            changed,
            uses: Mutex::default(),
            asked: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            full: AtomicU64::new(0),
        }
    }

    /// Returns the counters with their names, which fit a metric's label.
    pub(crate) fn counters(&self) -> [(&'static str, u64); 3] {
        [
            ("directory_asked", self.asked.load(Ordering::Relaxed)),
            ("directory_failed", self.failed.load(Ordering::Relaxed)),
            ("directory_full", self.full.load(Ordering::Relaxed)),
        ]
    }

    /// Returns the use of each connected directory.
    pub(crate) fn uses(&self) -> HashMap<PeerId, DirectoryUse> {
        let mut uses = self.uses.lock().clone();
        if let Some(asked) = self.asked_directory() {
            uses.entry(asked).or_default().is_asked = true;
        }
        uses
    }

    /// Implements [`Node::set_contacts`](crate::Node::set_contacts).
    pub(crate) fn set_contacts(&self, named: HashSet<PeerId>, directories: Vec<PeerId>) {
        let mut uses = self.uses.lock();
        uses.retain(|directory, _| directories.contains(directory));
        drop(uses);
        *self.configured.lock() = ConfiguredPeers { named, directories };
    }

    /// Announces to a directory the chunks that this daemon can lend.
    async fn announce(
        &self,
        directory: &PeerId,
        announce: Announce,
    ) -> Result<Announced, AskError> {
        let request = Request::Announce(self.sessions.stamped(announce));
        let deadline = now() + ANNOUNCE_TIMEOUT;
        match self.sessions.ask(directory, &request, deadline).await? {
            Reply::Announced(answer) => {
                self.sessions.is_in_step(directory, answer.clears);
                Ok(answer.message)
            }
            other => Err(AskError::unexpected(other)),
        }
    }

    /// Asks a directory for the members that have chunks of a prompt.
    async fn find_at(
        &self,
        directory: &PeerId,
        find: Find,
        deadline: Instant,
    ) -> Result<Found, AskError> {
        let request = Request::Find(self.sessions.stamped(find));
        match self.sessions.ask(directory, &request, deadline).await? {
            Reply::Found(found) => {
                self.sessions.is_in_step(directory, found.clears);
                Ok(found.message)
            }
            other => Err(AskError::unexpected(other)),
        }
    }

    /// Announces to the directories the chunks that this daemon can lend. Runs until it is dropped.
    pub(crate) async fn announce_chunks(&self, seed: u64) {
        let mut lendable = Lendable::new(seed);
        let mut announcing: HashMap<PeerId, Announcing> = HashMap::new();
        let mut sending = FuturesUnordered::new();
        let mut listing: Option<u128> = None;
        let mut list_at = now();
        let mut flush = tokio::time::interval(FLUSH_EVERY);
        flush.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = flush.tick() => {
                    if self.note_changed(&mut lendable).await {
                        list_at = now();
                    }
                    if listing.is_none() && now() >= list_at {
                        lendable.begin_listing();
                        (listing, list_at) = (Some(0), now() + LIST_EVERY);
                    }
                    listing = self.list(&mut lendable, listing).await;
                }
                Some((peer, answer)) = sending.next() => {
                    self.note_answer(&peer, answer, &lendable, announcing.get_mut(&peer));
                }
            }
            let directories = self.configured.lock().directories.clone();
            announcing.retain(|peer, state| state.sending || directories.contains(peer));
            let now = now();
            for peer in directories {
                let able = self.sessions.with_peer(&peer, |peer| peer.is_directory());
                self.uses.lock().entry(peer.clone()).or_default();
                let state = announcing
                    .entry(peer.clone())
                    .or_insert_with(|| Announcing {
                        progress: Progress::nothing(),
                        sending: false,
                        next: now,
                        alive: now,
                        begun: None,
                        again: None,
                    });
                if state.again.is_some_and(|at| now >= at) {
                    state.progress.begin_again(&lendable);
                    state.again = None;
                }
                let due = lendable.has_news(&state.progress) || now >= state.alive;
                if able != Some(true) || state.sending || now < state.next || !due {
                    continue;
                }
                state.sending = true;
                let announce = lendable.next(&mut state.progress);
                sending.push(async move {
                    let answer = self.announce(&peer, announce).await;
                    (peer, answer)
                });
            }
        }
    }

    /// Records the state of chunks that may have changed. Returns true if there were too many.
    async fn note_changed(&self, lendable: &mut Lendable) -> bool {
        let changed = std::mem::take(&mut *self.changed.keys.lock());
        for keys in changed.chunks(STATES_AT_ONCE) {
            for (key, state) in keys.iter().zip(self.sessions.host.states(keys)) {
                lendable.note(Fingerprint::of(key), state.bytes().is_some());
            }
            tokio::task::yield_now().await;
        }
        self.changed.overflowed.swap(false, Ordering::Acquire)
    }

    /// Records some chunks of a listing. Returns the position for the next call.
    async fn list(&self, lendable: &mut Lendable, mut listing: Option<u128>) -> Option<u128> {
        for _ in 0..PAGE.1 {
            let (keys, next) = self.sessions.host.list(listing?, PAGE.0).await;
            for key in keys {
                lendable.note(Fingerprint::of(&key), true);
            }
            listing = next;
            if next.is_none() {
                lendable.end_listing();
            }
        }
        listing
    }

    fn note_answer(
        &self,
        peer: &PeerId,
        answer: Result<Announced, AskError>,
        lendable: &Lendable,
        state: Option<&mut Announcing>,
    ) {
        let Some(state) = state else {
            return;
        };
        let now = now();
        state.sending = false;
        state.alive = now + ALIVE_EVERY;
        if let Ok(answer) = answer {
            state.progress.answered(answer, lendable);
        }
        state.next = match answer {
            Ok(Announced::Restart { .. }) => {
                let begun = state.begun.replace(now);
                begun.map_or(now, |begun| now.max(begun + BEGIN_EVERY))
            }
            Ok(Announced::Applied | Announced::Full { .. })
                if lendable.is_ahead_of(&state.progress) =>
            {
                now
            }
            Ok(Announced::Applied | Announced::Full { .. }) => now + FLUSH_EVERY,
            Ok(Announced::Busy) | Err(_) => now + FAILED_PAUSE,
        };
        if let Some(of_it) = self.uses.lock().get_mut(peer) {
            of_it.chunks = lendable.len() as u64;
            of_it.is_behind = lendable.has_news(&state.progress);
            of_it.limit = match answer {
                Ok(Announced::Full { limit }) => Some(limit),
                Err(_) => of_it.limit,
                Ok(_) => None,
            };
        }
        if matches!(answer, Ok(Announced::Full { .. })) {
            self.full.fetch_add(1, Ordering::Relaxed);
        }
        match answer {
            Ok(Announced::Full { limit }) if state.again.is_none() => {
                state.again = Some(now + FULL_PAUSE);
                tracing::warn!(directory = %peer, limit, "the directory keeps no more chunks, so peers do not find all chunks of this server; start the directory with a larger --p2p-directory-entries, or use several directories");
            }
            Err(error) => tracing::debug!(directory = %peer, %error, "announcement failed"),
            _ => {}
        }
    }

    /// Returns the peers to ask for chunks of a prompt: those that a directory names and the configured ones,
    /// or all peers if there are no directories.
    pub(crate) async fn to_ask(self: &Arc<Self>, keys: &[ChunkKey], deadline: Instant) -> ToAsk {
        let (all, left_out) = self.sessions.peers.lock().to_ask(now());
        let not_asked = |peer: &PeerId| format!("{peer} is not asked now");
        if !self.sessions.config.uses_directories {
            return ToAsk {
                peers: all,
                unknown: left_out.first().map(not_asked),
            };
        }
        let named = &self.configured.lock().named.clone();
        let mut peers: Vec<PeerId> = all
            .into_iter()
            .filter(|peer| named.contains(peer))
            .collect();
        let found = self.find(keys, deadline).await;
        let counter = match &found {
            Some(_) => &self.asked,
            None => &self.failed,
        };
        counter.fetch_add(1, Ordering::Relaxed);
        let Some(found) = found else {
            let unknown = Some("no directory has answered".to_owned());
            return ToAsk { peers, unknown };
        };
        let mut unknown = (!found.settled).then(|| "the directory has just started".to_owned());
        let named_one = left_out.iter().find(|peer| named.contains(*peer));
        unknown = unknown.or_else(|| named_one.map(not_asked));
        let candidates = self.connected_of(found.candidates, deadline).await;
        for (peer, connected) in candidates {
            match connected {
                true if left_out.contains(&peer) => unknown = Some(not_asked(&peer)),
                true if !peers.contains(&peer) => peers.push(peer),
                true => {}
                false => unknown = Some(format!("{peer} is not connected yet")),
            }
        }
        ToAsk { peers, unknown }
    }

    /// Returns the directory that is currently asked first.
    fn asked_directory(&self) -> Option<PeerId> {
        let directories = self.configured.lock().directories.clone();
        let peers = self.sessions.peers.lock();
        directories.into_iter().find(|one| answers(&peers, one))
    }

    /// Asks the directories one after the other until one answers.
    async fn find(&self, keys: &[ChunkKey], deadline: Instant) -> Option<Found> {
        let directories = self.configured.lock().directories.clone();
        let find = Find {
            keys: keys.iter().map(Fingerprint::of).collect(),
        };
        let mut unsettled = None;
        for peer in directories {
            if !answers(&self.sessions.peers.lock(), &peer) {
                continue;
            }
            // The other half is for the members that it names.
            let half = deadline.saturating_duration_since(now()) / 2;
            let answer = self.find_at(&peer, find.clone(), now() + half).await;
            if let Some(of_it) = self.uses.lock().get_mut(&peer) {
                match &answer {
                    Ok(found) => of_it.answered(!found.candidates.is_empty()),
                    Err(_) => of_it.failed += 1,
                }
            }
            match answer {
                Ok(found) if found.settled || !found.candidates.is_empty() => return Some(found),
                Ok(found) => unsettled = Some(found),
                Err(error) => {
                    self.sessions.probe(&peer);
                    tracing::debug!(directory = %peer, %error, "no answer");
                }
            }
        }
        unsettled
    }

    /// Connects to the candidates that are not connected. Returns for each whether it can be asked. If none
    /// can, waits for half of the time until the deadline.
    async fn connected_of(
        self: &Arc<Self>,
        candidates: Vec<Candidate>,
        deadline: Instant,
    ) -> Vec<(PeerId, bool)> {
        let parsed = candidates.into_iter();
        let parsed = parsed.filter_map(|one| Some((one.peer.parse::<PeerId>().ok()?, one.address)));
        let candidates: Vec<(PeerId, String)> = parsed.collect();
        let can_be_asked = |peer: &mut ConnectedPeer| peer.can_be_asked(now());
        let able = |peer: &PeerId| self.sessions.with_peer(peer, can_be_asked) == Some(true);
        for (peer, address) in &candidates {
            match self.sessions.with_peer(peer, |_| ()) {
                Some(()) => self.dialed.lock().asked(peer),
                None => self.dial(peer, address),
            }
        }
        let wait_until = now() + deadline.saturating_duration_since(now()) / 2;
        loop {
            let hello = self.sessions.hello_came.notified();
            tokio::pin!(hello);
            hello.as_mut().enable();
            let dialing = {
                let dialed = self.dialed.lock();
                candidates
                    .iter()
                    .any(|(peer, _)| dialed.under_way.contains(peer))
            };
            let any = candidates.iter().any(|(peer, _)| able(peer));
            if any || !dialing || timeout_at(wait_until, hello).await.is_none() {
                break;
            }
        }
        let answer = |(peer, _): (PeerId, String)| {
            let able = able(&peer);
            (peer, able)
        };
        candidates.into_iter().map(answer).collect()
    }

    /// Connects to a member, in the background.
    fn dial(self: &Arc<Self>, peer: &PeerId, address: &str) {
        let dial = {
            let peers = self.sessions.peers.lock();
            self.dialed.lock().begin(peer, &peers, now())
        };
        let Dial::Yes { instead_of: idle } = dial else {
            return;
        };
        let (this, peer, address) = (Arc::clone(self), peer.clone(), address.to_owned());
        tokio::spawn(async move {
            let deadline = now() + DIAL_TIMEOUT;
            let sessions = &this.sessions;
            if let Some(idle) = idle {
                sessions.link.disconnect(&idle, deadline).await;
            }
            let mut connected = match tcp_address(&address) {
                Ok(at) => sessions.link.connect(&peer, &at, deadline).await.is_ok(),
                Err(_) => false,
            };
            // The member can be asked once the hellos are exchanged.
            while connected {
                let hello = sessions.hello_came.notified();
                tokio::pin!(hello);
                hello.as_mut().enable();
                if sessions.with_peer(&peer, |peer| peer.hello.is_some()) == Some(true) {
                    break;
                }
                connected = timeout_at(deadline, hello).await.is_some();
            }
            this.dialed.lock().end(&peer, connected, now());
            sessions.hello_came.notify_waiters();
        });
    }
}

/// Returns true if a directory of this name is connected and not paused after a failure.
fn answers(peers: &Peers, directory: &PeerId) -> bool {
    let peer = peers.get(directory);
    peer.is_some_and(|peer| peer.is_directory() && peer.can_be_asked(now()))
}

/// Answer to whether a member may be connected to.
enum Dial {
    No,
    Yes { instead_of: Option<PeerId> },
}

impl DialedMembers {
    fn asked(&mut self, peer: &PeerId) {
        if let Some(asked) = self.asked_at.get_mut(peer) {
            *asked = now();
        }
    }

    fn begin(&mut self, peer: &PeerId, connected: &Peers, now: Instant) -> Dial {
        self.asked_at
            .retain(|peer, _| connected.get(peer).is_some());
        self.failed.retain(|_, at| now < *at + DIAL_AGAIN);
        if self.failed.contains_key(peer) || self.under_way.contains(peer) {
            return Dial::No;
        }
        if self.under_way.len() + self.failed.len() >= MAX_DIALED {
            return Dial::No;
        }
        let mut instead_of = None;
        if self.asked_at.len() + self.under_way.len() >= MAX_DIALED {
            let oldest = self.asked_at.iter().min_by_key(|(_, asked)| **asked);
            let idle = oldest.filter(|(_, asked)| now >= **asked + DIALED_IDLE);
            let Some((idle, _)) = idle else {
                return Dial::No;
            };
            instead_of = Some(idle.clone());
        }
        if let Some(idle) = &instead_of {
            self.asked_at.remove(idle);
        }
        self.under_way.insert(peer.clone());
        Dial::Yes { instead_of }
    }

    fn end(&mut self, peer: &PeerId, connected: bool, now: Instant) {
        self.under_way.remove(peer);
        match connected {
            true => self.asked_at.insert(peer.clone(), now),
            false => self.failed.insert(peer.clone(), now),
        };
    }
}
