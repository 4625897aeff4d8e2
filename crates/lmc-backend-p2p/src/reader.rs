//! [`Reader`]: locates chunks at peers, and reads them from the peers' memory.
//!
//! A chunk that was read is accepted only if its lease was valid without a gap from grant to release, and its
//! bytes match the owner's digest. The owner knows the former: its answer to a release states it for each chunk,
//! together with digests that did not come with the lease. A read over sockets needs no answer if all digests came
//! with the lease and the lease is certainly valid at the read's end: the owner sends no byte without the lease.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use futures_util::future::{join, join_all};
use futures_util::stream::{self, FuturesUnordered, StreamExt};
use lmc_backend::{
    Answers, BackendError, FailedSlot, Handle, LoadItem, Loaded, LocateHint, Located, Location,
    Unavailable, now,
};
use lmc_key::ChunkKey;
use lmc_memory::{ReservedSlot, WrittenSlot};
use lmc_transfer::{BoxFuture, DataPlane, Filled, PeerId, Slot, TransferError};
use tokio_util::task::AbortOnDropHandle;

use crate::digest::chunk_digest;
use crate::directory::DirectoryClient;
use crate::leases::LEASE_BYTES;
use crate::link::{Link, timeout_at};
use crate::message::{
    ChunkLease, ChunkState, KeyBatch, LATE_DIGEST, Lease, Leased, Located as LocatedMessage,
    Refusal, Release, Released, Renew, Reply, Request, Stamped,
};
use crate::peers::ConnectedPeer;
use crate::session::{AskError, HOLD_MARGIN, Sessions};
use crate::summing::sum;

/// Number of chunks that one request may name before any is known to be at a peer.
pub(crate) const ASKED_AT_ONCE: usize = 256;
/// Most holders of a chunk that are remembered from a `locate` to its `load`.
const ROUTE_PEERS: usize = 4;
/// Most peers that are tried for a chunk, one after the other.
const MAX_ROUNDS: u32 = 8;
/// Fraction of a lease's duration that the reader relies on: clock speeds differ by less.
const TRUSTED: f64 = 0.9;
/// Least time that other peers have to answer a `locate` after one peer has all chunks.
const AS_LONG_AGAIN: Duration = Duration::from_micros(500);
/// Time for a lease's answer, in addition to the time that the owner may take.
const ANSWER_MARGIN: Duration = Duration::from_millis(250);
/// Time after a lease's end at which a read that is still running is aborted.
const READ_MARGIN: Duration = Duration::from_millis(500);
/// Least time that a caller must leave for a lease or a read so that its timeout counts against the peer.
const PATIENT: Duration = Duration::from_millis(500);
/// Timeout of a release.
const RELEASE_TIMEOUT: Duration = Duration::from_millis(500);

/// Peers that can be asked for a chunk, the best first.
type Route = Vec<PeerId>;

/// A chunk to load whose outcome is open.
#[derive(Debug)]
struct Wanted {
    /// Position in the batch.
    index: usize,
    key: ChunkKey,
    slot: ReservedSlot,
    /// The holders that were not asked yet, except the one that is being asked.
    others: Route,
}

/// Outcome of one chunk of a lease.
enum ChunkRead {
    Done(usize, Loaded),
    /// The peer did not serve the chunk; another peer may.
    Elsewhere(Wanted, Option<BackendError>),
}

/// This daemon as a reader of its peers' chunks. It has no lock: the holders that a lookup found are in the
/// handles of its locations, and each load has leases of its own.
pub(crate) struct Reader<L> {
    pub(crate) sessions: Arc<Sessions<L>>,
    pub(crate) directories: Arc<DirectoryClient<L>>,
}

impl<L: Link> Reader<L> {
    /// Implements [`Node::locate`](crate::Node::locate).
    pub(crate) async fn locate(
        &self,
        keys: &[ChunkKey],
        hint: &LocateHint,
        deadline: Instant,
    ) -> Vec<Result<Located, BackendError>> {
        let mut located = Vec::with_capacity(keys.len());
        while let Some((batch, len)) = KeyBatch::leading(&keys[located.len()..]) {
            let some = &keys[located.len()..located.len() + len];
            located.extend(self.locate_batch(some, batch, hint, deadline).await);
        }
        located
    }

    async fn locate_batch(
        &self,
        keys: &[ChunkKey],
        batch: KeyBatch,
        hint: &LocateHint,
        deadline: Instant,
    ) -> Vec<Result<Located, BackendError>> {
        let mut of_hinted = batch.clone();
        of_hinted.awaited = hint.awaited.clone().filter(|_| hint.wait.is_some());
        let of_hinted = Request::Locate(self.sessions.stamped(of_hinted));
        let request = Request::Locate(self.sessions.stamped(batch));
        let begun = now();
        let hinted = match hint.sources.is_empty() {
            true => Vec::new(),
            false => self
                .sessions
                .peers
                .lock()
                .to_ask_first(&hint.sources, begun),
        };
        let (request, of_hinted) = (&request, &of_hinted);
        let ask = |peer: PeerId, request| async move {
            let answer = self.sessions.ask(&peer, request, deadline).await;
            (peer, answer)
        };
        let mut answers = FuturesUnordered::new();
        let (mut asked, mut heard, mut silent) = (hinted.len(), 0, None);
        answers.extend(hinted.iter().cloned().map(|peer| ask(peer, of_hinted)));
        let mut answered: Vec<(PeerId, Stamped<LocatedMessage>)> = Vec::new();
        let (mut asks_others, mut wait_until) = (!hint.is_repeated && !hint.sources_only, begun);
        if hint.is_repeated || hint.sources_only {
            wait_until = deadline;
        } else if !hinted.is_empty() {
            wait_until += deadline.saturating_duration_since(begun) / 2;
        }
        loop {
            let answer = match asked {
                0 => None,
                _ => timeout_at(wait_until, answers.next()).await.flatten(),
            };
            let Some((peer, answer)) = answer else {
                if !std::mem::take(&mut asks_others) {
                    break;
                }
                let to_ask = self.directories.to_ask(keys, deadline).await;
                silent = silent.or(to_ask.unknown);
                let others = to_ask.peers.into_iter();
                let others: Vec<PeerId> = others.filter(|peer| !hinted.contains(peer)).collect();
                asked += others.len();
                answers.extend(others.into_iter().map(|peer| ask(peer, request)));
                wait_until = deadline;
                continue;
            };
            heard += 1;
            match answer {
                Ok(Reply::Located(mut answer)) if answer.message.states.len() == keys.len() => {
                    let located = &mut answer.message;
                    self.refuse_misfits(&peer, hint, located);
                    // Once one peer has all chunks, the others get the same time again: they may be less
                    // loaded, and are asked if the first one does not lend.
                    if located.has_all() {
                        let again =
                            now() + now().saturating_duration_since(begun).max(AS_LONG_AGAIN);
                        wait_until = wait_until.min(again);
                    }
                    let load = located.load;
                    self.sessions.with_peer(&peer, |peer| peer.load = load);
                    let is_complete = hinted.contains(&peer)
                        && self.is_complete(located)
                        && self.sessions.is_in_step(&peer, answer.clears);
                    answered.push((peer, answer));
                    if is_complete {
                        // No chunk is absent, whatever the other peers have.
                        asked = heard;
                        break;
                    }
                }
                Ok(_) => silent = Some(format!("{peer} gave an unexpected answer")),
                Err(error) => {
                    self.sessions.probe(&peer);
                    silent = Some(format!("{peer}: {error}"));
                }
            }
        }
        if heard < asked {
            silent.get_or_insert_with(|| "a peer has not answered yet".to_owned());
        }
        // Peers from which nothing is expected.
        let mut refused: Vec<PeerId> = Vec::new();
        let in_step = answered.into_iter().filter_map(|(peer, answer)| {
            let same = self.sessions.is_in_step(&peer, answer.clears);
            if !same || answer.message.is_over {
                refused.push(peer.clone());
            }
            same.then_some((peer, answer.message))
        });
        let mut answered: Vec<(PeerId, LocatedMessage)> = in_step.collect();
        self.sort_peers(keys, &hinted, &mut answered);
        let peers = self.sessions.peers.lock();
        let is_expected = hint.wait.is_some() && peers.may_lend(&hint.sources, &refused, now());
        let is_late = now() >= deadline;
        // Consecutive chunks mostly have the same holders.
        let mut last: Option<(Route, Handle)> = None;
        let mut handle_of = |route: Route| match &last {
            Some((known, handle)) if *known == route => handle.clone(),
            _ => {
                let handle = Handle::new(route.clone());
                last.insert((route, handle)).1.clone()
            }
        };
        let answer = |index: usize| {
            let holders = answered.iter().filter_map(|(peer, located)| {
                let state = located.states[index];
                Some((peer, self.sound(state)?))
            });
            let mut holders = holders.take(ROUTE_PEERS).peekable();
            if let Some(&(best, len)) = holders.peek() {
                // Holders that disagree about the length cannot serve the same slot.
                let agree = holders.filter(|(_, other)| *other == len);
                let route: Route = agree.map(|(peer, _)| peer.clone()).collect();
                let cost = peers.get(best).map(|peer| peer.cost(len));
                let location = Location::new(len).with_cost(cost.unwrap_or_default());
                return Ok(Located::Present(location.with_handle(handle_of(route))));
            }
            let mut states = answered.iter().map(|(_, located)| located.states[index]);
            if states.any(|state| state == ChunkState::Writing) {
                return Ok(Located::Pending);
            }
            if is_expected {
                return Ok(Located::Expected);
            }
            match &silent {
                None => Ok(Located::Absent),
                Some(_) if is_late => Err(BackendError::Deadline),
                Some(reason) => Err(Unavailable {
                    reason: reason.clone(),
                }
                .into()),
            }
        };
        (0..keys.len()).map(answer).collect()
    }

    /// Counts chunks with another length than expected as absent, and pauses the peer that claims to have
    /// them.
    fn refuse_misfits(&self, peer: &PeerId, hint: &LocateHint, located: &mut LocatedMessage) {
        let Some(chunk_bytes) = hint.chunk_bytes else {
            return;
        };
        let wrong = located.states.iter_mut().filter(|state| {
            let len = state.bytes();
            len.is_some_and(|len| len != chunk_bytes)
        });
        let wrong = wrong.map(|state| *state = ChunkState::Absent).count();
        if wrong > 0 {
            self.sessions.with_peer(peer, |peer| {
                peer.counters.missed += wrong as u64;
                let reason = "it has chunks of another length than their space's";
                peer.lent_badly(reason.to_owned(), now());
            });
        }
    }

    /// Returns the payload bytes of a chunk that a peer has, unless the length is impossible.
    fn sound(&self, state: ChunkState) -> Option<u64> {
        let len = state.bytes()?;
        (len > 0 && len <= self.sessions.config.max_chunk).then_some(len)
    }

    /// Returns true if a peer has every chunk, or is writing it.
    fn is_complete(&self, located: &LocatedMessage) -> bool {
        let there =
            |&state: &ChunkState| state == ChunkState::Writing || self.sound(state).is_some();
        located.states.iter().all(there)
    }

    /// Orders peers by their chunks. Hinted peers that have the first chunk come first, then peers with the
    /// longest prefix. Of equals, the first key selects two, and the less loaded of the two comes first, so
    /// that many readers of one prompt spread over the holders.
    fn sort_peers(
        &self,
        keys: &[ChunkKey],
        hinted: &[PeerId],
        answered: &mut [(PeerId, LocatedMessage)],
    ) {
        let peers = self.sessions.peers.lock();
        let prefix = |located: &LocatedMessage| {
            let states = located.states.iter();
            states.take_while(|state| state.bytes().is_some()).count()
        };
        let rate = |peer: &PeerId| {
            peers
                .get(peer)
                .map_or(Duration::MAX, |peer| peer.cost(1 << 20))
        };
        answered.sort_by_key(|(peer, located)| (std::cmp::Reverse(prefix(located)), rate(peer)));
        let best = answered.first().map_or(0, |(_, located)| prefix(located));
        let equal = answered
            .iter()
            .take_while(|(_, l)| prefix(l) == best)
            .count();
        if equal >= 2 {
            let seed = keys[0].fold() ^ address_seed(&self.sessions.config.address);
            let one = (seed % equal as u64) as usize;
            let other = (one + 1 + ((seed >> 32) % (equal as u64 - 1)) as usize) % equal;
            let chosen = match answered[one].1.load <= answered[other].1.load {
                true => one,
                false => other,
            };
            answered[..=chosen].rotate_right(1);
        }
        answered.sort_by_key(|(peer, located)| !hinted.contains(peer) || prefix(located) == 0);
    }

    /// Implements [`Node::load`](crate::Node::load).
    pub(crate) fn load(
        self: &Arc<Self>,
        items: Vec<LoadItem>,
        deadline: Instant,
    ) -> Answers<'static, Loaded> {
        let mut groups: Vec<(PeerId, Vec<Wanted>, u64)> = Vec::new();
        let mut misses = Vec::new();
        for (index, item) in items.into_iter().enumerate() {
            let LoadItem { key, slot, .. } = item;
            let route = item.handle.as_ref().and_then(Handle::get::<Route>);
            let Some((peer, others)) = route.and_then(|route| route.split_first()) else {
                misses.push((index, Loaded::Miss(slot)));
                continue;
            };
            let len = slot.len();
            let wanted = Wanted {
                index,
                key,
                slot,
                others: others.to_vec(),
            };
            let group = groups.iter_mut().rev().find(|(one, ..)| one == peer);
            match group {
                Some((_, items, bytes)) if *bytes + len <= LEASE_BYTES => {
                    items.push(wanted);
                    *bytes += len;
                }
                _ => groups.push((peer.clone(), vec![wanted], len)),
            }
        }
        let read = |(peer, items, _)| self.begin_group(peer, items, deadline);
        let groups: FuturesUnordered<_> = groups.into_iter().map(read).collect();
        Box::pin(stream::iter(misses).chain(groups.flat_map(stream::iter)))
    }

    /// Begins to read chunks from one peer, on the thread at which its replies arrive: waiting for a reply
    /// elsewhere would wake a thread each time.
    fn begin_group(
        self: &Arc<Self>,
        peer: PeerId,
        items: Vec<Wanted>,
        deadline: Instant,
    ) -> BoxFuture<'static, Vec<(usize, Loaded)>> {
        let home = self.sessions.link.home(&peer);
        let indices: Vec<usize> = items.iter().map(|item| item.index).collect();
        let mut group = Box::pin(Arc::clone(self).load_group(peer, items, deadline));
        let Some(home) = home else {
            return group;
        };
        // The request is sent from this thread, before the other thread is awake.
        let entered = home.enter();
        if let Some(done) = (&mut group).now_or_never() {
            return Box::pin(std::future::ready(done));
        }
        drop(entered);
        let group = AbortOnDropHandle::new(home.spawn(group));
        Box::pin(async move {
            group.await.unwrap_or_else(|_| {
                // The thread has ended, and the slots were returned to their pool.
                let failed = |index| {
                    let error = BackendError::Closed;
                    let slot = FailedSlot::Quarantined;
                    (index, Loaded::Failed { error, slot })
                };
                indices.into_iter().map(failed).collect()
            })
        })
    }

    /// Reads chunks from one peer. Reads the chunks that it does not serve from other peers.
    async fn load_group(
        self: Arc<Self>,
        peer: PeerId,
        items: Vec<Wanted>,
        deadline: Instant,
    ) -> Vec<(usize, Loaded)> {
        let mut done = Vec::with_capacity(items.len());
        let mut left = BTreeMap::from([(peer, items)]);
        for round in 1.. {
            let asked = std::mem::take(&mut left).into_iter().map(|(peer, items)| {
                let this = Arc::clone(&self);
                async move { this.read_from(&peer, items, deadline).await }
            });
            for reads in join_all(asked).await {
                for read in reads {
                    let (mut item, error) = match read {
                        ChunkRead::Done(index, loaded) => {
                            done.push((index, loaded));
                            continue;
                        }
                        ChunkRead::Elsewhere(item, error) => (item, error),
                    };
                    self.retain_connected(&mut item.others);
                    if item.others.is_empty() || round >= MAX_ROUNDS || now() >= deadline {
                        done.push((item.index, not_loaded(item.slot, error)));
                        continue;
                    }
                    let other = item.others.remove(0);
                    let items: &mut Vec<Wanted> = left.entry(other).or_default();
                    items.push(item);
                }
            }
            if left.is_empty() {
                break;
            }
        }
        done
    }

    /// Removes the peers that have disconnected since the lookup.
    fn retain_connected(&self, route: &mut Route) {
        if !route.is_empty() {
            let peers = self.sessions.peers.lock();
            route.retain(|one| peers.get(one).is_some());
        }
    }

    /// Leases chunks of one peer, reads them, and releases the lease.
    async fn read_from(
        &self,
        peer: &PeerId,
        items: Vec<Wanted>,
        deadline: Instant,
    ) -> Vec<ChunkRead> {
        let mut reads = Vec::with_capacity(items.len());
        let mut rest = items;
        while !rest.is_empty() {
            let keys: Vec<ChunkKey> = rest.iter().map(|item| item.key).collect();
            let Some((batch, len)) = KeyBatch::leading(&keys) else {
                break;
            };
            let later = rest.split_off(len);
            reads.extend(self.read_batch(peer, batch, rest, deadline).await);
            rest = later;
        }
        reads
    }

    async fn read_batch(
        &self,
        peer: &PeerId,
        batch: KeyBatch,
        mut items: Vec<Wanted>,
        deadline: Instant,
    ) -> Vec<ChunkRead> {
        if self.sessions.with_peer(peer, |peer| peer.lends(now())) != Some(true) {
            return elsewhere(items, || Some(self.unavailable(peer, None)));
        }
        // If another peer has the chunks too, it is asked before anything is waited for.
        self.retain_connected(&mut items[0].others);
        let sent = now();
        let is_patient = |begun| deadline.saturating_duration_since(begun) >= PATIENT;
        let config = &self.sessions.config;
        let wait = match items[0].others.is_empty() {
            false => Duration::ZERO,
            // The other half is for reading.
            true => (deadline.saturating_duration_since(sent) / 2).min(config.lease_wait),
        };
        let request = Request::Lease(self.sessions.stamped(Lease {
            keys: batch,
            duration_ms: millis(config.lease),
            wait_ms: millis(wait),
        }));
        let answers = |leased: &Leased| leased.chunks.len() == items.len();
        let answer_by = deadline.min(sent + wait + HOLD_MARGIN + ANSWER_MARGIN);
        let Stamped {
            clears,
            message: leased,
        } = match self.sessions.ask(peer, &request, answer_by).await {
            Ok(Reply::Leased(leased)) if answers(&leased.message) => leased,
            answer => {
                let is_late = answer.is_err() && now() >= answer_by && !is_patient(sent);
                if !is_late && answer != Ok(Reply::Refused(Refusal::TooMany)) {
                    let reason = "a lease was not answered".to_owned();
                    self.sessions
                        .with_peer(peer, |peer| _ = peer.lent_badly(reason, now()));
                }
                let error = answer.as_ref().err();
                return elsewhere(items, || Some(self.unavailable(peer, error)));
            }
        };
        let mut lease = LeaseGuard {
            sessions: Arc::clone(&self.sessions),
            peer: peer.clone(),
            number: leased.lease,
            duration: Duration::from_millis(leased.duration_ms.into()),
            // The owner may have waited, but counts from its answer at the latest. So this time is earlier
            // than the lease's beginning.
            sent,
        };
        if !self.sessions.is_in_step(peer, clears) {
            return elsewhere(items, || None);
        }
        let held = vec![true; leased.chunks.len()];
        let (granted, mut reads) = self.sort_out(peer, leased, items);
        if granted.is_empty() {
            return reads;
        }
        let (mut slots, mut indices, mut named) = (Vec::new(), Vec::new(), Vec::new());
        for (ordinal, item, index, digest) in granted {
            indices.push(index);
            slots.push(item.slot);
            named.push((ordinal, item.index, item.key, digest, item.others));
        }
        let has_digests = (named.iter()).all(|(.., digest, _)| *digest != LATE_DIGEST);
        let bytes: u64 = slots.iter().map(ReservedSlot::len).sum();
        let begun = now();
        let filled = lease.while_renewed(self.sessions.link.read(peer, slots, &indices, deadline));
        let filled = filled.await;
        let took = now().saturating_duration_since(begun);
        self.sessions.with_peer(peer, |peer| match &filled {
            Some(Filled { error: None, .. }) => peer.read(bytes, took),
            Some(Filled {
                error: Some(TransferError::Deadline),
                ..
            }) if !is_patient(begun) => peer.counters.failed += 1,
            Some(Filled {
                error: Some(error), ..
            }) => {
                peer.lent_badly(format!("a read: {error}"), now());
            }
            None => {
                let reason = "a lease was not renewed in time; the read was aborted";
                peer.lent_badly(reason.to_owned(), now());
            }
        });
        let (slots, by, Released { held, digests }) = match filled {
            // All that the answer to the release would say is known. NIXL reads memory without asking the owner.
            Some(Filled { slots, by, .. })
                if has_digests && by == DataPlane::Sockets && lease.is_trusted() =>
            {
                drop(lease);
                let digests = Vec::new();
                (sum(slots).await, by, Released { held, digests })
            }
            Some(Filled { slots, by, .. }) => {
                // Missing checksums are computed while the owner answers.
                let (released, slots) = join(lease.release(), sum(slots)).await;
                (slots, by, released)
            }
            // The channel returns the slots to their pool.
            None => {
                drop(lease);
                (Vec::new(), DataPlane::default(), Released::default())
            }
        };
        let mut slots = slots.into_iter();
        let mut good = Vec::new();
        for (ordinal, index, key, digest, others) in named {
            let wanted = |slot| Wanted {
                index,
                key,
                slot,
                others,
            };
            let loaded = match slots.next() {
                Some(Slot::Written(slot)) => {
                    let held = held.get(ordinal).is_some_and(|held| *held);
                    let digest = match (digest, digests.get(ordinal)) {
                        (LATE_DIGEST, Some(late)) => *late,
                        _ => digest,
                    };
                    match self.verified((peer, by), key, slot, digest, held) {
                        Ok(slot) => Loaded::Hit(slot),
                        Err(slot) => {
                            reads.push(ChunkRead::Elsewhere(wanted(slot), None));
                            continue;
                        }
                    }
                }
                Some(Slot::Idle(slot)) => {
                    let error = self.unavailable(peer, None);
                    reads.push(ChunkRead::Elsewhere(wanted(slot), Some(error)));
                    continue;
                }
                Some(Slot::Quarantined) | None => Loaded::Failed {
                    error: self.unavailable(peer, None),
                    slot: FailedSlot::Quarantined,
                },
            };
            if matches!(loaded, Loaded::Hit(_)) {
                good.push(key);
            }
            reads.push(ChunkRead::Done(index, loaded));
        }
        self.send_holds(peer, &good);
        reads
    }

    /// Splits a peer's answer to a lease into chunks to read, each with its number among the granted chunks,
    /// its location and its digest, and chunks that the peer does not serve.
    #[allow(
        clippy::type_complexity,
        reason = "a number, an item, its index, its digest"
    )]
    fn sort_out(
        &self,
        peer: &PeerId,
        leased: Leased,
        items: Vec<Wanted>,
    ) -> (
        Vec<(usize, Wanted, lmc_transfer::Index, u64)>,
        Vec<ChunkRead>,
    ) {
        let (mut granted, mut reads) = (Vec::new(), Vec::new());
        let (mut grants, mut wrong, mut missed, mut busy) = (0, 0, 0, 0);
        for (item, chunk) in items.into_iter().zip(leased.chunks) {
            match chunk {
                ChunkLease::Granted { index, len, digest } => {
                    let ordinal = grants;
                    grants += 1;
                    if len == item.slot.len() {
                        granted.push((ordinal, item, index, digest));
                    } else {
                        wrong += 1;
                        reads.push(ChunkRead::Elsewhere(item, None));
                    }
                }
                ChunkLease::Absent => {
                    missed += 1;
                    reads.push(ChunkRead::Elsewhere(item, None));
                }
                ChunkLease::Busy => {
                    busy += 1;
                    let full = BackendError::Full {
                        needed: item.slot.len(),
                    };
                    reads.push(ChunkRead::Elsewhere(item, Some(full)));
                }
            }
        }
        let named = leased.holders.iter().map(|holder| holder.address.as_str());
        let holders = self.peers_at(named);
        for read in &mut reads {
            if let ChunkRead::Elsewhere(item, Some(BackendError::Full { .. })) = read {
                let new = holders.iter().filter(|holder| *holder != peer);
                let new: Route = new
                    .filter(|one| !item.others.contains(one))
                    .cloned()
                    .collect();
                item.others.extend(new);
            }
        }
        self.sessions.with_peer(peer, |peer| {
            peer.counters.missed += missed + wrong;
            if wrong > 0 {
                let reason = "it lent chunks of another length than it had said";
                peer.lent_badly(reason.to_owned(), now());
            }
            peer.counters.busy += busy;
        });
        (granted, reads)
    }

    /// Returns the connected peers that listen at these addresses.
    fn peers_at<'a>(&self, addresses: impl Iterator<Item = &'a str>) -> Vec<PeerId> {
        let peers = self.sessions.peers.lock();
        let at = |address: &str| {
            let listens = |peer: &&ConnectedPeer| {
                let hello = peer.hello.as_ref();
                hello.is_some_and(|hello| hello.address == address)
            };
            Some(peers.iter().find(listens)?.session.peer.clone())
        };
        addresses.filter_map(at).collect()
    }

    /// Returns the slot if its bytes match the chunk's digest.
    fn verified(
        &self,
        (peer, by): (&PeerId, DataPlane),
        key: ChunkKey,
        slot: WrittenSlot,
        digest: u64,
        held: bool,
    ) -> Result<WrittenSlot, ReservedSlot> {
        if !held {
            self.sessions
                .with_peer(peer, |peer| peer.counters.lapsed += 1);
            return Err(slot.into_reserved());
        }
        if chunk_digest(&key, slot.checksum()) != digest {
            self.sessions.with_peer(peer, |known| {
                known.counters.corrupt += 1;
                // One log line for each pause.
                if known.lent_badly("a chunk with a wrong checksum".to_owned(), now()) {
                    tracing::warn!(%peer, %key, "a chunk that was read from a peer has a wrong checksum: it counts as a miss, and the peer is not asked for a while");
                }
            });
            return Err(slot.into_reserved());
        }
        self.sessions.with_peer(peer, |peer| {
            peer.lent(now());
            peer.counters.read += 1;
            peer.counters.read_bytes += slot.len();
            if by == DataPlane::Nixl {
                peer.counters.read_nixl_bytes += slot.len();
            }
        });
        Ok(slot)
    }

    /// Sends the owner a request that names this daemon as a further holder of chunks that were verified.
    /// Waits neither for an answer nor for the commit of the chunks: a holder is only advice, and if the
    /// commit fails, another reader sends one request in vain.
    fn send_holds(&self, peer: &PeerId, keys: &[ChunkKey]) {
        let Some((batch, _)) = KeyBatch::leading(keys) else {
            return;
        };
        let (sessions, peer) = (Arc::clone(&self.sessions), peer.clone());
        let request = Request::Holds(self.sessions.stamped(batch));
        tokio::spawn(async move {
            let deadline = now() + RELEASE_TIMEOUT;
            let _ = sessions.ask(&peer, &request, deadline).await;
        });
    }

    fn unavailable(&self, peer: &PeerId, error: Option<&AskError>) -> BackendError {
        let known = || {
            let failure =
                |peer: &mut ConnectedPeer| Some(peer.last_failure.as_ref()?.reason.clone());
            self.sessions.with_peer(peer, failure).flatten()
        };
        let reason = error.map(AskError::to_string).or_else(known);
        let reason = reason.unwrap_or_else(|| "it gave an unexpected answer".into());
        Unavailable {
            reason: format!("{peer}: {reason}"),
        }
        .into()
    }
}

fn millis(duration: Duration) -> u32 {
    u32::try_from(duration.as_millis()).unwrap_or(u32::MAX)
}

/// Returns chunks that a peer does not serve, each with a reason.
fn elsewhere(items: Vec<Wanted>, error: impl Fn() -> Option<BackendError>) -> Vec<ChunkRead> {
    let read = |item| ChunkRead::Elsewhere(item, error());
    items.into_iter().map(read).collect()
}

fn not_loaded(slot: ReservedSlot, error: Option<BackendError>) -> Loaded {
    match error {
        None => Loaded::Miss(slot),
        Some(error) => Loaded::Failed {
            error,
            slot: FailedSlot::Released(slot),
        },
    }
}

/// Returns a seed that spreads readers of one prompt over its holders: each reader begins at another one.
fn address_seed(address: &str) -> u64 {
    xxhash_rust::xxh3::xxh3_64(address.as_bytes())
}

/// A lease that this daemon has from a peer. Dropping the guard releases the lease.
struct LeaseGuard<L: Link> {
    sessions: Arc<Sessions<L>>,
    peer: PeerId,
    /// 0 once the lease is released, or if nothing was granted.
    number: u64,
    duration: Duration,
    /// Time at which the request that granted or last renewed the lease was sent. The lease began later.
    sent: Instant,
}

impl<L: Link> LeaseGuard<L> {
    /// Returns the time until which the lease can be relied on.
    fn trusted_until(&self) -> Instant {
        self.sent + self.duration.mul_f64(TRUSTED)
    }

    /// Returns true if the lease is valid by this side's clock.
    fn is_trusted(&self) -> bool {
        now() < self.trusted_until()
    }

    /// Awaits a read, and renews the lease meanwhile. If the lease could not be renewed and the read
    /// continues beyond its end for a short time, the read is aborted and the result is `None`. If the read
    /// ends earlier but after the time for which the lease is trusted, the owner's answer to the release
    /// states whether the lease was valid.
    async fn while_renewed<T>(&mut self, read: impl Future<Output = T>) -> Option<T> {
        tokio::pin!(read);
        let mut renew_at = self.sent + self.duration / 3;
        loop {
            match timeout_at(renew_at, &mut read).await {
                Some(read) => return Some(read),
                None if !self.is_trusted() => {
                    return timeout_at(self.sent + self.duration + READ_MARGIN, read).await;
                }
                None => {}
            }
            let request = Request::Renew(Renew {
                lease: self.number,
                duration_ms: millis(self.duration),
            });
            let sent = now();
            let (sessions, peer) = (Arc::clone(&self.sessions), self.peer.clone());
            let renewal = sessions.ask(&peer, &request, self.trusted_until());
            tokio::pin!(renewal);
            tokio::select! {
                read = &mut read => return Some(read),
                renewed = &mut renewal => {
                    if matches!(renewed, Ok(Reply::Renewed(true))) {
                        self.sent = sent;
                    }
                }
            }
            renew_at = (self.sent + self.duration / 3).max(now() + self.duration / 10);
        }
    }

    /// Releases the lease. Returns the owner's answer, or an empty one if none comes in time.
    async fn release(mut self) -> Released {
        let request = Request::Release(Release { lease: self.number });
        let deadline = now() + RELEASE_TIMEOUT;
        let released = self.sessions.ask(&self.peer, &request, deadline).await;
        // Until here, dropping this would send another release.
        self.number = 0;
        match released {
            Ok(Reply::Released(released)) => released,
            _ => Released::default(),
        }
    }
}

impl<L: Link> Drop for LeaseGuard<L> {
    fn drop(&mut self) {
        let Ok(runtime) = tokio::runtime::Handle::try_current() else {
            return;
        };
        if self.number == 0 {
            return;
        }
        let request = Request::Release(Release { lease: self.number });
        let (sessions, peer) = (Arc::clone(&self.sessions), self.peer.clone());
        runtime.spawn(async move {
            let _ = sessions.ask(&peer, &request, now() + RELEASE_TIMEOUT).await;
        });
    }
}
