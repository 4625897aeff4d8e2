//! [`Pusher`]: pushes chunks to a peer, because a request or an operator wants them there. This daemon names
//! the chunks, and the peer reads them as it reads any other chunk, into memory of its own.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use lmc_backend::{ChunkRun, HostChunk, now};
use lmc_key::{ChunkKey, ClearsId};
use lmc_transfer::PeerId;
use parking_lot::Mutex;
use thiserror::Error;
use tokio::sync::Notify;

use crate::link::{Link, timeout_at};
use crate::message::{KeyBatch, Push, Pushed, Refusal, Reply, Request};
use crate::peers::MAX_PUSHES;
use crate::session::{AskError, ORDER_TIMEOUT, Sessions};

/// Most bytes that a peer is asked to read at a time.
const BATCH_BYTES: u64 = 32 << 20;
/// Time for the answer, in addition to [`ORDER_TIMEOUT`].
const ANSWER_MARGIN: Duration = Duration::from_secs(2);
/// Most chunks that wait for one peer.
const MAX_WAITING: usize = 1 << 16;
/// Time for which a push is retried; after that, the request has read or computed the chunks itself.
const PUSH_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause before a push that the peer could not read is retried, and longest pause.
const PAUSE: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));

/// Reason why a copy did not finish.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CopyError {
    /// The peer is reading for another order of this daemon.
    #[error("the peer is still reading chunks for an earlier order")]
    Busy,
    /// The peer's release does not support copies.
    #[error("the peer's release does not take orders to copy")]
    Unsupported,
    /// The peer did not answer.
    #[error(transparent)]
    NoAnswer(AskError),
}

/// Names chunks of this daemon to peers, which then read them. No other lock is taken under its own.
pub(crate) struct Pusher<L> {
    sessions: Arc<Sessions<L>>,
    waiting: PushQueues,
    /// Chunks that were not pushed because their peer had disconnected.
    dropped: AtomicU64,
}

/// The chunks that wait to be pushed.
#[derive(Debug, Default)]
struct PushQueues {
    by_peer: Mutex<HashMap<PeerId, PushQueue>>,
    /// Notified when chunks arrive.
    came: Notify,
}

#[derive(Debug, Default)]
struct PushQueue {
    runs: VecDeque<WaitingRun>,
    /// Keys of the runs that wait or are being pushed.
    keys: HashSet<ChunkKey>,
    /// Number of runs that are being pushed.
    pushing: usize,
}

#[derive(Debug)]
struct WaitingRun {
    run: ChunkRun,
    /// Clears in the names of the keys.
    clears: ClearsId,
    deadline: Instant,
}

impl PushQueues {
    /// Adds the chunks of a run that are not queued yet, as far as the limit allows. Returns the number of
    /// chunks beyond the limit.
    fn add(&self, peer: &PeerId, run: &ChunkRun, clears: ClearsId, deadline: Instant) -> usize {
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
            let waiting = |run| WaitingRun {
                run,
                clears,
                deadline,
            };
            queue.runs.extend(added.into_iter().map(waiting));
            self.came.notify_one();
        }
        dropped
    }

    /// Removes and returns the runs that may be pushed now, and those whose time is over.
    fn take(&self, now: Instant) -> Vec<(PeerId, WaitingRun)> {
        let mut taken = Vec::new();
        for (peer, queue) in &mut *self.by_peer.lock() {
            while let Some(first) = queue.runs.front()
                && (queue.pushing < MAX_PUSHES || first.deadline <= now)
                && let Some(run) = queue.runs.pop_front()
            {
                queue.pushing += 1;
                taken.push((peer.clone(), run));
            }
        }
        taken
    }

    /// Returns the time at which the first waiting run times out.
    fn next_end(&self) -> Option<Instant> {
        let by_peer = self.by_peer.lock();
        let first = |queue: &PushQueue| Some(queue.runs.front()?.deadline);
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

impl<L: Link> Pusher<L> {
    pub(crate) fn new(sessions: Arc<Sessions<L>>) -> Self {
        Self {
            sessions,
            waiting: PushQueues::default(),
            dropped: AtomicU64::new(0),
        }
    }

    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.by_peer.lock().is_empty()
    }

    /// Returns the number of chunks that were not pushed because their peer had disconnected.
    pub(crate) fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    /// Implements [`Node::push`](crate::Node::push).
    pub(crate) fn push(&self, run: ChunkRun, to: &str) -> bool {
        let Some(peer) = self.peer_to_push_to(to) else {
            let config = &self.sessions.config;
            return to == config.name || to == config.address;
        };
        let (clears, end) = (self.sessions.clears().1, now() + PUSH_TIMEOUT);
        let dropped = self.waiting.add(&peer, &run, clears, end);
        self.count_pushed(&peer, 0, dropped);
        true
    }

    /// Returns the peer with this name that connected last.
    fn peer_to_push_to(&self, name: &str) -> Option<PeerId> {
        let name = [name.to_owned()];
        let peers = self.sessions.peers.lock();
        let named = peers.daemons().filter(|peer| peer.is_one_of(&name));
        let last = named.max_by_key(|peer| peer.since)?;
        Some(last.session.peer.clone())
    }

    /// Pushes the waiting chunks. Runs until it is dropped.
    pub(crate) async fn push_waiting(&self) {
        let mut pushing = FuturesUnordered::new();
        loop {
            let runs = self.waiting.take(now()).into_iter();
            pushing.extend(runs.map(|(peer, run)| async move {
                let pushed = self.push_run(&peer, &run).await;
                self.count_pushed(&peer, pushed, run.run.keys.len() - pushed);
                (peer, run)
            }));
            let came = self.waiting.came.notified();
            let came = async {
                match self.waiting.next_end() {
                    Some(end) => _ = timeout_at(end, came).await,
                    None => came.await,
                }
            };
            tokio::select! {
                () = came => {}
                Some((peer, run)) = pushing.next() => self.waiting.ended(&peer, &run),
            }
        }
    }

    /// Pushes a run. Returns the number of leading chunks that the peer then has in memory.
    async fn push_run(&self, peer: &PeerId, waiting: &WaitingRun) -> usize {
        let mut pushed = 0;
        let mut pause = PAUSE.0;
        // A request after a clear uses other keys.
        while now() < waiting.deadline
            && self.sessions.clears().1 == waiting.clears
            && let Some((push, len)) = batch(&waiting.run, pushed)
        {
            let push = Request::Push(self.sessions.stamped(push));
            let deadline = now() + ORDER_TIMEOUT + ANSWER_MARGIN;
            let (read, is_wanted) = match self.sessions.ask(peer, &push, deadline).await {
                Ok(Reply::Pushed(Pushed { chunks, is_wanted })) => (chunks as usize, is_wanted),
                Ok(Reply::Refused(Refusal::TooMany)) => (0, true),
                // The peer has failed, or its release does not support pushes.
                _ => break,
            };
            let read = read.min(len);
            pushed += read;
            if read > 0 {
                pause = PAUSE.0;
            }
            if read < len {
                // Chunks after one that is gone here are useless.
                let next = &waiting.run.keys[pushed..=pushed];
                if !is_wanted || self.sessions.host.states(next)[..] == [HostChunk::Absent] {
                    break;
                }
                let rest = waiting.deadline.saturating_duration_since(now());
                tokio::time::sleep(pause.min(rest)).await;
                pause = (2 * pause).min(PAUSE.1);
            }
        }
        pushed
    }

    fn count_pushed(&self, peer: &PeerId, pushed: usize, dropped: usize) {
        let (pushed, dropped) = (pushed as u64, dropped as u64);
        match self.sessions.peers.lock().get_mut(peer) {
            Some(peer) => {
                peer.counters.pushed += pushed;
                peer.counters.push_dropped += dropped;
            }
            // The peer has disconnected meanwhile.
            None => _ = self.dropped.fetch_add(dropped, Ordering::Relaxed),
        }
    }

    /// Implements [`Node::copy_to`](crate::Node::copy_to).
    pub(crate) async fn copy_to(
        &self,
        peer: &PeerId,
        chunks: &[(ChunkKey, u64)],
    ) -> Result<u64, CopyError> {
        let mut copied = 0;
        let mut rest = chunks;
        while !rest.is_empty() {
            let mut bytes = 0;
            let fits = |(_, len): &&(ChunkKey, u64)| {
                bytes += len;
                bytes <= BATCH_BYTES
            };
            let most = rest.iter().take_while(fits).count().max(1);
            let keys: Vec<ChunkKey> = rest[..most].iter().map(|(key, _)| *key).collect();
            let Some((batch, len)) = KeyBatch::leading(&keys) else {
                break;
            };
            rest = &rest[len..];
            let deadline = now() + ORDER_TIMEOUT + ANSWER_MARGIN;
            let order = Request::Copy(self.sessions.stamped(batch));
            let there = match self.sessions.ask(peer, &order, deadline).await {
                Ok(Reply::Copying(there)) => (there as usize).min(len),
                Ok(Reply::Refused(Refusal::TooMany)) => return Err(CopyError::Busy),
                Ok(Reply::Unsupported(_)) => return Err(CopyError::Unsupported),
                Ok(other) => return Err(CopyError::NoAnswer(AskError::unexpected(other))),
                Err(error) => return Err(CopyError::NoAnswer(error)),
            };
            copied += there as u64;
            if there < len {
                // Chunks after a gap are useless.
                break;
            }
        }
        Ok(copied)
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
