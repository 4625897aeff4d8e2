//! Pushes: a request wants its chunks at a peer. This daemon names them as they come, and the peer
//! reads them as it reads any other chunk, into memory of its own.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use lmc_backend::{ChunkRun, HostChunk, now};
use lmc_key::{ChunkHash, ChunkKey, ClearsId};
use lmc_transfer::PeerId;
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::copying::{ANSWER_MARGIN, BATCH_BYTES, ORDER_LOCATE_TIMEOUT, ORDER_TIMEOUT};
use crate::link::{Link, until};
use crate::message::{FEATURE_DIRECTORY, KeyBatch, Push, Pushed, Refusal, Reply, Request, Stamped};
use crate::node::Node;
use crate::owner::Session;

/// Pushes of one daemon that a peer reads at a time, at most.
pub(crate) const MAX_PUSHES: usize = 4;
/// Chunks that wait for one peer, at most.
const MAX_WAITING: usize = 1 << 16;
/// Time for which a push is tried: later its request has read or computed the chunks itself.
const PUSH_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause before a push is tried again that the peer could not read, and at most.
const PAUSE: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));

/// The chunks that wait to be pushed.
#[derive(Debug, Default)]
pub(crate) struct Pushes {
    by_peer: Mutex<HashMap<PeerId, PushQueue>>,
    /// Set when chunks came.
    came: Notify,
    /// Chunks that were not pushed to peers which had gone.
    pub(crate) dropped: AtomicU64,
}

#[derive(Debug, Default)]
struct PushQueue {
    runs: VecDeque<WaitingRun>,
    /// Keys of the runs that wait and that are being pushed.
    keys: HashSet<ChunkKey>,
    /// Runs that are being pushed.
    pushing: usize,
}

#[derive(Debug)]
struct WaitingRun {
    run: ChunkRun,
    /// Clears after which the keys are named.
    clears: ClearsId,
    until: Instant,
}

impl Pushes {
    /// Adds the chunks of a run that are not known yet, as far as the bound allows. Returns the number of
    /// chunks that it does not allow.
    fn add(&self, peer: &PeerId, run: &ChunkRun, clears: ClearsId, until: Instant) -> usize {
        let mut by_peer = self.by_peer.lock();
        let known = by_peer.get(peer).map_or(0, |queue| queue.keys.len());
        let mut left = MAX_WAITING.saturating_sub(known);
        let (mut dropped, mut parent) = (0, run.parent);
        let mut added: Vec<ChunkRun> = Vec::new();
        for key in &run.keys {
            let is_known = (by_peer.get(peer)).is_some_and(|queue| queue.keys.contains(key));
            match added.last_mut() {
                _ if is_known => {}
                _ if left == 0 => dropped += 1,
                Some(last) if last.keys.last() == parent.as_ref() => {
                    last.keys.push(*key);
                    left -= 1;
                }
                _ => {
                    added.push(ChunkRun {
                        keys: vec![*key],
                        parent,
                        ..*run
                    });
                    left -= 1;
                }
            }
            parent = Some(*key);
        }
        if !added.is_empty() {
            let queue = by_peer.entry(peer.clone()).or_default();
            queue.keys.extend(added.iter().flat_map(|run| &run.keys));
            let waiting = |run| WaitingRun { run, clears, until };
            queue.runs.extend(added.into_iter().map(waiting));
            self.came.notify_one();
        }
        dropped
    }

    /// Takes the runs that may be pushed now, and those whose time is over.
    fn take(&self, now: Instant) -> Vec<(PeerId, WaitingRun)> {
        let mut taken = Vec::new();
        for (peer, queue) in &mut *self.by_peer.lock() {
            while let Some(first) = queue.runs.front()
                && (queue.pushing < MAX_PUSHES || first.until <= now)
                && let Some(run) = queue.runs.pop_front()
            {
                queue.pushing += 1;
                taken.push((peer.clone(), run));
            }
        }
        taken
    }

    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn is_empty(&self) -> bool {
        self.by_peer.lock().is_empty()
    }

    /// Returns the time at which the first waiting run is given up.
    fn next_end(&self) -> Option<Instant> {
        let by_peer = self.by_peer.lock();
        let first = |queue: &PushQueue| Some(queue.runs.front()?.until);
        by_peer.values().filter_map(first).min()
    }

    fn ended(&self, peer: &PeerId, run: &WaitingRun) {
        let mut by_peer = self.by_peer.lock();
        if let Some(queue) = by_peer.get_mut(peer) {
            queue.pushing -= 1;
            for key in &run.run.keys {
                queue.keys.remove(key);
            }
            if queue.pushing == 0 && queue.runs.is_empty() {
                by_peer.remove(peer);
            }
        }
    }
}

impl<L: Link> Node<L> {
    /// Pushes chunks to the peer that a name, an address or a name on the channel means. Returns false
    /// if no such peer is connected. A daemon pushes nothing to itself.
    pub fn push(&self, run: ChunkRun, to: &str) -> bool {
        let Some(peer) = self.peer_to_push_to(to) else {
            return to == self.config.name || to == self.config.address;
        };
        let dropped = (self.pushes).add(&peer, &run, self.clears().1, now() + PUSH_TIMEOUT);
        self.count_pushed(&peer, 0, dropped);
        true
    }

    /// Returns the peer that was connected last, of those that a name means.
    fn peer_to_push_to(&self, name: &str) -> Option<PeerId> {
        let name = [name.to_owned()];
        let peers = self.peers.lock();
        let named = peers.iter().filter(|peer| {
            let hello = peer.hello.as_ref();
            let takes = hello.is_some_and(|hello| hello.features & FEATURE_DIRECTORY == 0);
            takes && peer.is_one_of(&name)
        });
        let last = named.max_by_key(|peer| peer.since)?;
        Some(last.session.peer.clone())
    }

    /// Pushes the chunks that wait. Runs until it is dropped.
    pub async fn push_waiting(&self) {
        let mut pushing = FuturesUnordered::new();
        loop {
            let runs = self.pushes.take(now()).into_iter();
            pushing.extend(runs.map(|(peer, run)| async move {
                let pushed = self.push_run(&peer, &run).await;
                self.count_pushed(&peer, pushed, run.run.keys.len() - pushed);
                (peer, run)
            }));
            let came = self.pushes.came.notified();
            let came = async {
                match self.pushes.next_end() {
                    Some(end) => _ = until(end, came).await,
                    None => came.await,
                }
            };
            tokio::select! {
                () = came => {}
                Some((peer, run)) = pushing.next() => self.pushes.ended(&peer, &run),
            }
        }
    }

    /// Returns the number of leading chunks that the peer has in memory then.
    async fn push_run(&self, peer: &PeerId, waiting: &WaitingRun) -> usize {
        let mut pushed = 0;
        let mut pause = PAUSE.0;
        // A request after a clear asks for other keys.
        while now() < waiting.until
            && self.clears().1 == waiting.clears
            && let Some((push, len)) = batch(&waiting.run, pushed)
        {
            let push = Request::Push(self.stamped(push));
            let deadline = now() + ORDER_TIMEOUT + ANSWER_MARGIN;
            let (read, is_wanted) = match self.ask(peer, &push, deadline).await {
                Ok(Reply::Pushed(Pushed { chunks, is_wanted })) => (chunks as usize, is_wanted),
                Ok(Reply::Refused(Refusal::TooMany)) => (0, true),
                // The peer has failed, or its release takes no pushes.
                _ => break,
            };
            let read = read.min(len);
            pushed += read;
            if read > 0 {
                pause = PAUSE.0;
            }
            if read < len {
                // Chunks after one that is gone here are of no use.
                let next = &waiting.run.keys[pushed..=pushed];
                if !is_wanted || self.host.states(next)[..] == [HostChunk::Absent] {
                    break;
                }
                let rest = waiting.until.saturating_duration_since(now());
                tokio::time::sleep(pause.min(rest)).await;
                pause = (2 * pause).min(PAUSE.1);
            }
        }
        pushed
    }

    fn count_pushed(&self, peer: &PeerId, pushed: usize, dropped: usize) {
        let (pushed, dropped) = (pushed as u64, dropped as u64);
        match self.peers.lock().get_mut(peer) {
            Some(peer) => {
                peer.counters.pushed += pushed;
                peer.counters.push_dropped += dropped;
            }
            // It has gone meanwhile.
            None => _ = self.pushes.dropped.fetch_add(dropped, Ordering::Relaxed),
        }
    }

    /// Reads chunks that a peer pushes. Answers how many of them are in memory then.
    pub(crate) async fn receive(&self, session: &Session, push: &Stamped<Push>) -> Reply {
        let Stamped { clears, message } = push;
        let none = |is_wanted| {
            Reply::Pushed(Pushed {
                chunks: 0,
                is_wanted,
            })
        };
        if !(1..=self.config.max_chunk).contains(&message.chunk_bytes) {
            return none(false);
        }
        if !self.is_in_step(&session.peer, *clears) {
            return none(true);
        }
        let begun = self
            .peers
            .lock()
            .of_session(session)
            .map(|peer| peer.begin_push());
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
        let received = self.host.receive(run, peer, ORDER_LOCATE_TIMEOUT);
        // A chunk that was not read by then is not waited for.
        match until(now() + ORDER_TIMEOUT, received).await {
            Some(received) => Reply::Pushed(Pushed {
                chunks: received.chunks as u32,
                is_wanted: received.is_wanted,
            }),
            None => none(true),
        }
    }
}

/// Returns the chunks that are pushed at once from an index on, and their number; `None` at the end.
fn batch(run: &ChunkRun, from: usize) -> Option<(Push, usize)> {
    let most = (BATCH_BYTES / run.chunk_bytes.max(1)).max(1) as usize;
    let rest = &run.keys[from..];
    let (keys, len) = KeyBatch::leading(&rest[..rest.len().min(most)])?;
    let parent = match from.checked_sub(1) {
        Some(before) => Some(run.keys[before]),
        None => run.parent,
    };
    let push = Push {
        keys,
        chunk_bytes: run.chunk_bytes,
        parent: parent.map(|parent| *parent.hash.as_bytes()),
    };
    Some((push, len))
}
