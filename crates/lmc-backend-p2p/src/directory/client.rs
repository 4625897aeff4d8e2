//! The member's side of directories: announces which chunks this daemon can lend, and asks for
//! members that have the chunks of a prompt.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use futures_util::stream::{FuturesUnordered, StreamExt};
use lmc_backend::{ChunkEvent, EventSink, now};
use lmc_key::ChunkKey;
use lmc_transfer::{BoxFuture, PeerId};
use parking_lot::Mutex;

use super::buckets::Fingerprint;
use super::lendable::{Lendable, Progress};
use super::message::{Announce, Announced, Candidate, Find, Found};
use crate::link::{Link, until};
use crate::message::{Reply, Request};
use crate::node::Node;
use crate::status::DirectoryUse;

/// Time between two announcements to a directory, at least; what changes meanwhile goes together.
const FLUSH_EVERY: Duration = Duration::from_millis(100);
/// Time between two announcements to a directory, at most: it learns that this daemon is alive.
const ALIVE_EVERY: Duration = Duration::from_secs(4);
/// Time between two listings of all chunks, which find what no event said.
const LIST_EVERY: Duration = Duration::from_secs(300);
/// Chunks listed at a time, and such pages between two announcements.
const PAGE: (usize, usize) = (1024, 16);
/// Keys of chunks that may have changed, at most; above that all chunks are listed.
const MAX_CHANGED: usize = 1 << 16;
/// Keys whose state is asked for at once.
const STATES_AT_ONCE: usize = 1024;
/// Time that a directory has for an announcement.
const ANNOUNCE_TIMEOUT: Duration = Duration::from_secs(2);
/// Pause after an announcement that failed.
const FAILED_PAUSE: Duration = Duration::from_millis(500);
/// Time between two generations, at least.
const BEGIN_EVERY: Duration = Duration::from_secs(2);
/// Time after which everything is announced again to a directory that was full.
const FULL_PAUSE: Duration = Duration::from_secs(60);
/// Time that a connect to a member may take.
const DIAL_TIMEOUT: Duration = Duration::from_secs(2);
/// Time after which a member that could not be connected to is tried again.
const DIAL_AGAIN: Duration = Duration::from_secs(1);
/// Members that are connected because a directory named them, at most.
const MAX_DIALED: usize = 64;
/// Time without a question after which such a member may be disconnected for another.
const DIALED_IDLE: Duration = Duration::from_secs(30);

/// A directory, as the tier of peers uses it.
pub trait Directory: Send + Sync {
    /// Announces what this daemon can lend.
    ///
    /// # Errors
    /// The reason, for people.
    fn announce(
        &self,
        announce: Announce,
        deadline: Instant,
    ) -> BoxFuture<'_, Result<Announced, String>>;

    /// Asks which members have chunks of a prompt.
    ///
    /// # Errors
    /// The reason, for people.
    fn find(&self, find: Find, deadline: Instant) -> BoxFuture<'_, Result<Found, String>>;
}

/// A directory that another daemon hosts.
struct HostedDirectory<L: Link> {
    node: Arc<Node<L>>,
    peer: PeerId,
}

impl<L: Link> Directory for HostedDirectory<L> {
    fn announce(
        &self,
        announce: Announce,
        deadline: Instant,
    ) -> BoxFuture<'_, Result<Announced, String>> {
        Box::pin(async move {
            let request = Request::Announce(self.node.stamped(announce));
            match self.node.ask(&self.peer, &request, deadline).await? {
                Reply::Announced(answer) => {
                    self.node.is_in_step(&self.peer, answer.clears);
                    Ok(answer.message)
                }
                Reply::Refused(refusal) => Err(refusal.to_string()),
                _ => Err("another reply than to an announcement".to_owned()),
            }
        })
    }

    fn find(&self, find: Find, deadline: Instant) -> BoxFuture<'_, Result<Found, String>> {
        Box::pin(async move {
            let request = Request::Find(self.node.stamped(find));
            match self.node.ask(&self.peer, &request, deadline).await? {
                Reply::Found(found) => {
                    self.node.is_in_step(&self.peer, found.clears);
                    Ok(found.message)
                }
                Reply::Refused(refusal) => Err(refusal.to_string()),
                _ => Err("another reply than to a question for chunks".to_owned()),
            }
        })
    }
}

/// Keys of chunks that may have come or gone.
#[derive(Debug, Default)]
pub(crate) struct ChangedKeys {
    pub(crate) keys: Mutex<Vec<ChunkKey>>,
    /// True if there were too many.
    overflowed: AtomicBool,
}

impl ChangedKeys {
    /// Notes that a chunk may have come or gone. Quick: it may be called under a lock.
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

/// Peers that the configuration names, as far as they are connected.
#[derive(Debug, Default)]
pub(crate) struct Contacts {
    pub(crate) named: HashSet<PeerId>,
    /// Directories in the order in which they are asked.
    pub(crate) directories: Vec<PeerId>,
}

/// Members that are connected because a directory named them.
#[derive(Debug, Default)]
pub(crate) struct Dials {
    under_way: HashSet<PeerId>,
    failed: HashMap<PeerId, Instant>,
    /// Time of the last question to each.
    dialed: HashMap<PeerId, Instant>,
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

/// Counters of the member's side.
#[derive(Debug, Default)]
pub(crate) struct Finds {
    /// Use of each connected directory.
    pub(crate) of_directory: Mutex<HashMap<PeerId, DirectoryUse>>,
    /// Questions that a directory answered.
    pub(crate) asked: AtomicU64,
    /// Questions that no directory answered.
    pub(crate) failed: AtomicU64,
    /// Announcements of which a directory did not keep everything.
    pub(crate) full: AtomicU64,
}

/// Peers to send a `locate` to.
pub(crate) struct ToAsk {
    pub(crate) peers: Vec<PeerId>,
    /// The reason for which others may have the chunks, too.
    pub(crate) unknown: Option<String>,
}

impl<L: Link> Node<L> {
    /// Sets which of the connected peers are named in the configuration: those that are asked for
    /// every prompt, and directories, the first first.
    pub fn set_contacts(&self, named: HashSet<PeerId>, directories: Vec<PeerId>) {
        let mut of_directory = self.finds.of_directory.lock();
        of_directory.retain(|directory, _| directories.contains(directory));
        drop(of_directory);
        *self.contacts.lock() = Contacts { named, directories };
    }

    fn directory(self: &Arc<Self>, peer: &PeerId) -> HostedDirectory<L> {
        HostedDirectory {
            node: Arc::clone(self),
            peer: peer.clone(),
        }
    }

    /// Announces to the directories which chunks this daemon can lend. Runs until it is dropped.
    pub async fn announce_chunks(self: Arc<Self>, seed: u64) {
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
            let directories = self.contacts.lock().directories.clone();
            announcing.retain(|peer, state| state.sending || directories.contains(peer));
            let now = now();
            for peer in directories {
                let able = self
                    .peers
                    .lock()
                    .get(&peer)
                    .is_some_and(|peer| peer.is_directory());
                self.finds
                    .of_directory
                    .lock()
                    .entry(peer.clone())
                    .or_default();
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
                if !able || state.sending || now < state.next || !due {
                    continue;
                }
                state.sending = true;
                let announce = lendable.next(&mut state.progress);
                let directory = self.directory(&peer);
                sending.push(async move {
                    let answer = directory.announce(announce, now + ANNOUNCE_TIMEOUT).await;
                    (peer, answer)
                });
            }
        }
    }

    /// Notes the state of chunks that may have changed. Returns true if there were too many.
    async fn note_changed(&self, lendable: &mut Lendable) -> bool {
        let changed = std::mem::take(&mut *self.changed.keys.lock());
        for keys in changed.chunks(STATES_AT_ONCE) {
            for (key, state) in keys.iter().zip(self.host.states(keys)) {
                lendable.note(Fingerprint::of(key), state.bytes().is_some());
            }
            tokio::task::yield_now().await;
        }
        self.changed.overflowed.swap(false, Ordering::Acquire)
    }

    /// Notes some chunks of a listing. Returns where it goes on.
    async fn list(&self, lendable: &mut Lendable, mut listing: Option<u128>) -> Option<u128> {
        for _ in 0..PAGE.1 {
            let (keys, next) = self.host.list(listing?, PAGE.0).await;
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
        answer: Result<Announced, String>,
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
        if let Some(of_it) = self.finds.of_directory.lock().get_mut(peer) {
            of_it.chunks = lendable.len() as u64;
            of_it.is_behind = lendable.has_news(&state.progress);
            of_it.limit = match answer {
                Ok(Announced::Full { limit }) => Some(limit),
                Err(_) => of_it.limit,
                Ok(_) => None,
            };
        }
        if matches!(answer, Ok(Announced::Full { .. })) {
            self.finds.full.fetch_add(1, Ordering::Relaxed);
        }
        match answer {
            Ok(Announced::Full { limit }) if state.again.is_none() => {
                state.again = Some(now + FULL_PAUSE);
                tracing::warn!(directory = %peer, limit, "the directory keeps no more chunks, so peers do not find all of this server's; start it with a larger --p2p-directory-entries, or use several directories");
            }
            Err(reason) => tracing::debug!(directory = %peer, reason, "announcement failed"),
            _ => {}
        }
    }

    /// Returns the peers to ask for chunks of a prompt: those that a directory names and those that
    /// the configuration names, or all where there are no directories.
    pub(crate) async fn to_ask(self: &Arc<Self>, keys: &[ChunkKey], deadline: Instant) -> ToAsk {
        let (all, left_out) = self.peers.lock().to_ask(now());
        let not_asked = |peer: &PeerId| format!("{peer} is not asked now");
        if !self.config.uses_directories {
            return ToAsk {
                peers: all,
                unknown: left_out.first().map(not_asked),
            };
        }
        let named = &self.contacts.lock().named.clone();
        let mut peers: Vec<PeerId> = all
            .into_iter()
            .filter(|peer| named.contains(peer))
            .collect();
        let found = self.find(keys, deadline).await;
        let counter = match &found {
            Some(_) => &self.finds.asked,
            None => &self.finds.failed,
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

    /// Returns the directory that is asked first now.
    pub(crate) fn asked_directory(&self) -> Option<PeerId> {
        let directories = self.contacts.lock().directories.clone();
        let peers = self.peers.lock();
        directories.into_iter().find(|directory| {
            let peer = peers.get(directory);
            peer.is_some_and(|peer| peer.is_directory() && peer.can_be_asked(now()))
        })
    }

    /// Asks the directories one after the other until one answers.
    async fn find(self: &Arc<Self>, keys: &[ChunkKey], deadline: Instant) -> Option<Found> {
        let directories = self.contacts.lock().directories.clone();
        let find = Find {
            keys: keys.iter().map(Fingerprint::of).collect(),
        };
        let mut unsettled = None;
        for peer in directories {
            let able = {
                let peers = self.peers.lock();
                let peer = peers.get(&peer);
                peer.is_some_and(|peer| peer.is_directory() && peer.can_be_asked(now()))
            };
            if !able {
                continue;
            }
            // The other half is for those that it names.
            let half = deadline.saturating_duration_since(now()) / 2;
            let answer = self.directory(&peer).find(find.clone(), now() + half).await;
            if let Some(of_it) = self.finds.of_directory.lock().get_mut(&peer) {
                match &answer {
                    Ok(found) => of_it.answered(!found.candidates.is_empty()),
                    Err(_) => of_it.failed += 1,
                }
            }
            match answer {
                Ok(found) if found.settled || !found.candidates.is_empty() => return Some(found),
                Ok(found) => unsettled = Some(found),
                Err(reason) => {
                    self.probe(&peer);
                    tracing::debug!(directory = %peer, reason, "no answer");
                }
            }
        }
        unsettled
    }

    /// Connects to the candidates that are not connected. Returns for each whether it can be asked;
    /// waits for half of the time until the deadline if none can.
    async fn connected_of(
        self: &Arc<Self>,
        candidates: Vec<Candidate>,
        deadline: Instant,
    ) -> Vec<(PeerId, bool)> {
        let parsed = candidates.into_iter();
        let parsed = parsed.filter_map(|one| Some((one.peer.parse::<PeerId>().ok()?, one.address)));
        let candidates: Vec<(PeerId, String)> = parsed.collect();
        let able = |peer: &PeerId| {
            let peers = self.peers.lock();
            peers.get(peer).is_some_and(|peer| peer.can_be_asked(now()))
        };
        for (peer, address) in &candidates {
            let known = self.peers.lock().get(peer).is_some();
            match known {
                true => self.dials.lock().asked(peer),
                false => self.dial(peer, address),
            }
        }
        let wait_until = now() + deadline.saturating_duration_since(now()) / 2;
        loop {
            let hello = self.hello_came.notified();
            tokio::pin!(hello);
            hello.as_mut().enable();
            let dialing = {
                let dials = self.dials.lock();
                candidates
                    .iter()
                    .any(|(peer, _)| dials.under_way.contains(peer))
            };
            let any = candidates.iter().any(|(peer, _)| able(peer));
            if any || !dialing || until(wait_until, hello).await.is_none() {
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
        let idle = match self.dials.lock().begin(peer, now()) {
            Dial::No => return,
            Dial::Yes { instead_of } => instead_of,
        };
        let (this, peer, address) = (Arc::clone(self), peer.clone(), address.to_owned());
        tokio::spawn(async move {
            let deadline = now() + DIAL_TIMEOUT;
            if let Some(idle) = idle {
                this.link.disconnect(&idle, deadline).await;
            }
            let connected = this.link.connect(&peer, &address, deadline).await;
            let mut connected = connected.is_ok();
            // It is asked once the hellos are exchanged.
            while connected {
                let hello = this.hello_came.notified();
                tokio::pin!(hello);
                hello.as_mut().enable();
                let known = this
                    .peers
                    .lock()
                    .get(&peer)
                    .is_some_and(|peer| peer.hello.is_some());
                if known {
                    break;
                }
                connected = until(deadline, hello).await.is_some();
            }
            this.dials.lock().end(&peer, connected, now());
            this.hello_came.notify_waiters();
        });
    }
}

/// Answer to whether a member may be connected to.
enum Dial {
    No,
    Yes { instead_of: Option<PeerId> },
}

impl Dials {
    fn asked(&mut self, peer: &PeerId) {
        if let Some(asked) = self.dialed.get_mut(peer) {
            *asked = now();
        }
    }

    fn begin(&mut self, peer: &PeerId, now: Instant) -> Dial {
        self.failed.retain(|_, at| now < *at + DIAL_AGAIN);
        if self.failed.contains_key(peer) || self.under_way.contains(peer) {
            return Dial::No;
        }
        if self.under_way.len() + self.failed.len() >= MAX_DIALED {
            return Dial::No;
        }
        let mut instead_of = None;
        if self.dialed.len() + self.under_way.len() >= MAX_DIALED {
            let oldest = self.dialed.iter().min_by_key(|(_, asked)| **asked);
            let idle = oldest.filter(|(_, asked)| now >= **asked + DIALED_IDLE);
            let Some((idle, _)) = idle else {
                return Dial::No;
            };
            instead_of = Some(idle.clone());
        }
        if let Some(idle) = &instead_of {
            self.dialed.remove(idle);
        }
        self.under_way.insert(peer.clone());
        Dial::Yes { instead_of }
    }

    fn end(&mut self, peer: &PeerId, connected: bool, now: Instant) {
        self.under_way.remove(peer);
        match connected {
            true => self.dialed.insert(peer.clone(), now),
            false => self.failed.insert(peer.clone(), now),
        };
    }

    /// Notes that a peer is not connected any more.
    pub(crate) fn gone(&mut self, peer: &PeerId) {
        self.dialed.remove(peer);
    }
}
