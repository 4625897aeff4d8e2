//! NIXL as the second plane of a connection: what of it is known, and reads over it.
//!
//! `docs/decisions/one-session-two-planes.md` has the frames and the rights.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

use super::budget::Charge;
use super::connection::{Connection, Outgoing, Pending, Reply};
use super::frame::{Frame, Outcome};
use super::landing::{Landing, Target};
use super::one_sided::Tally;
use super::shared::{Shared, Stop};
use super::spread::{Portion, cut};
use crate::nixl::{BLOCK, Block, MAX_METADATA, Plane, Registration, Remote};
use crate::{DataPlane, PeerId, TransferError};

/// After a failure NIXL is not used for this long, twice as long after each further one...
const PAUSE: Duration = Duration::from_secs(5);
/// ...and so often doubled at most.
const DOUBLED: u32 = 6;
/// A peer that does not know this side's memory yet is not asked for this long.
const ASK_AGAIN: Duration = Duration::from_millis(100);
/// Fetches of one read that are under way at a time: one is copied while others come.
const DEPTH: usize = 4;
/// Half of the time that a read has left is for the streams, should NIXL not answer; a fetch gets the
/// other half, and this at most...
const FETCH_TIMEOUT: Duration = Duration::from_secs(5);
/// ...and one that had less than this says nothing of NIXL.
const FAIR_TIMEOUT: Duration = Duration::from_secs(1);
/// A read waits no longer for a block that others use, before it goes over the streams.
const BLOCK_TIMEOUT: Duration = Duration::from_millis(100);
/// Ranges of a fetch at most: as many as one request of NIXL takes.
const FETCHED_RANGES: usize = 512;
/// Fetches of one connection that are served at a time; others are for the streams. One that was given
/// up counts until NIXL's thread has seen that.
const SERVED: usize = 32;

/// Describes the memory that a peer may write to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Announcement {
    pub(super) agent: String,
    pub(super) metadata: Vec<u8>,
    pub(super) base: u64,
    pub(super) len: u64,
}

impl From<&Registration> for Announcement {
    fn from(registration: &Registration) -> Self {
        Self {
            agent: registration.agent.clone(),
            metadata: registration.metadata.clone(),
            base: registration.base,
            len: registration.len,
        }
    }
}

impl Announcement {
    /// Returns whether its numbers are those of memory.
    pub(super) fn is_sound(&self) -> bool {
        self.metadata.len() <= MAX_METADATA
            && self.agent.len() <= 512
            && self.base.checked_add(self.len).is_some()
    }
}

/// The plane's state of one connection.
#[derive(Debug)]
pub(super) struct PlaneLink {
    pub(super) plane: Arc<Plane>,
    /// Number of the connection among those of the plane.
    pub(super) number: u64,
    state: Mutex<State>,
    /// Fetches of the peer that NIXL serves.
    serving: Mutex<HashMap<u64, Serving>>,
}

/// A fetch of the peer.
#[derive(Debug)]
struct Serving {
    /// True once the peer wants no more.
    stopped: Arc<AtomicBool>,
    /// Present until the fetch is answered: the peer's requests without an answer on its stream, and
    /// what this one holds.
    answer: Option<(Arc<AtomicUsize>, Charge)>,
}

#[derive(Debug, Default)]
struct State {
    /// True when this side's memory has been announced.
    announced: bool,
    /// Present when the peer has announced its memory.
    heard: Option<Charge>,
    /// The memory that it lets this side write to.
    known: Option<Arc<Remote>>,
    failures: u32,
    paused_until: Option<Instant>,
}

impl PlaneLink {
    pub(super) fn new(plane: &Arc<Plane>) -> Self {
        Self {
            plane: Arc::clone(plane),
            number: plane.next_number(),
            state: Mutex::default(),
            serving: Mutex::default(),
        }
    }

    /// Notes a peer's announcement; `false` for a second one.
    pub(super) fn hear(&self, charge: Charge) -> bool {
        self.state.lock().heard.replace(charge).is_none()
    }

    /// Notes the memory that the peer lets this side write to.
    pub(super) fn know(&self, remote: Arc<Remote>) {
        self.state.lock().known = Some(remote);
    }

    /// The memory that the peer lets this side write to.
    pub(super) fn known(&self) -> Option<Arc<Remote>> {
        self.state.lock().known.clone()
    }

    /// Returns whether this side reads by it: where both sides have announced their memory, and NIXL
    /// has not failed a moment ago.
    fn is_usable(&self) -> bool {
        let state = self.state.lock();
        let paused = state.paused_until;
        let paused = paused.is_some_and(|until| Instant::now() < until);
        state.announced && state.known.is_some() && !paused
    }

    /// Notes that NIXL has failed, unless it just has in another call.
    fn failed(&self, peer: &PeerId, reason: &str) {
        let mut state = self.state.lock();
        let now = Instant::now();
        if state.paused_until.is_some_and(|until| now < until) {
            return;
        }
        let pause = PAUSE * 2u32.pow(state.failures.min(DOUBLED));
        state.failures += 1;
        state.paused_until = Some(now + pause);
        drop(state);
        tracing::warn!(%peer, reason, ?pause, "NIXL failed; the peer is read over sockets");
    }

    /// Leaves a peer alone for a moment.
    fn ask_later(&self) {
        let mut state = self.state.lock();
        state.paused_until = state.paused_until.max(Some(Instant::now() + ASK_AGAIN));
    }

    fn worked(&self) {
        self.state.lock().failures = 0;
    }

    /// Notes that NIXL refuses the peer's metadata.
    pub(super) fn refuses(&self, peer: &PeerId, reason: &str) {
        if self.state.lock().known.take().is_some() {
            tracing::warn!(%peer, reason, "NIXL does not reach a peer; it reads over sockets");
        }
    }

    /// Adds a fetch of the peer, which is answered by [`Self::answer`]. Its flag is set when the peer
    /// has given it up. `None` where [`SERVED`] are served, or another has its number.
    pub(super) fn serve(
        &self,
        id: u64,
        unanswered: &Arc<AtomicUsize>,
        charge: Charge,
    ) -> Option<Arc<AtomicBool>> {
        let mut serving = self.serving.lock();
        if serving.len() >= SERVED || serving.contains_key(&id) {
            return None;
        }
        let stopped = Arc::<AtomicBool>::default();
        let fetch = Serving {
            stopped: Arc::clone(&stopped),
            answer: Some((Arc::clone(unanswered), charge)),
        };
        serving.insert(id, fetch);
        Some(stopped)
    }

    /// The answer to a fetch that has none. `ends`: nothing serves it any more.
    pub(super) fn answer(&self, id: u64, frame: &Frame, ends: bool) -> Option<Outgoing> {
        let mut serving = self.serving.lock();
        let answer = serving.get_mut(&id)?.answer.take();
        if ends {
            serving.remove(&id);
        }
        drop(serving);
        let (unanswered, charge) = answer?;
        Some(Outgoing {
            answers: Some(unanswered),
            _charge: Some(charge),
            ..Outgoing::of(frame)
        })
    }

    /// The peer has given up a fetch. Its answer, if it has none yet: the plane's thread may hang.
    pub(super) fn stop(&self, id: u64) -> Option<Outgoing> {
        let serving = self.serving.lock();
        serving.get(&id)?.stopped.store(true, Ordering::Release);
        drop(serving);
        let unmoved = Frame::Unmoved {
            id,
            idle: false,
            reason: "it was given up".to_owned(),
        };
        let answer = self.answer(id, &unmoved, false)?;
        self.plane.look();
        Some(answer)
    }

    /// The connection has ended.
    pub(super) fn end(&self) {
        self.plane.gone(self.number);
    }
}

/// Announces the memory that the peer of a connection may write to, once the arena is registered,
/// too. It never returns.
pub(super) async fn announce<T>(connection: Arc<Connection>) -> T {
    if let Some(link) = &connection.plane {
        let registration = link.plane.registered().await;
        connection.send(0, &Frame::Plane(registration.into()));
        link.state.lock().announced = true;
    }
    std::future::pending().await
}

/// A fetch that waits for its answer. Dropping it gives it up.
struct Asked<'a> {
    connection: &'a Connection,
    stream: usize,
    id: u64,
    portions: Vec<Portion>,
    target: Arc<Target>,
    reply: oneshot::Receiver<Reply>,
    since: Instant,
    /// Time after which it is given up.
    limit: Instant,
    answered: bool,
}

impl Asked<'_> {
    /// Gives it up, and returns what has come before.
    fn give_up(&mut self) -> Option<Reply> {
        self.target.revoke();
        let reply = self.reply.try_recv().ok();
        self.answered |= reply.is_some();
        reply
    }
}

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        if !self.answered {
            self.target.revoke();
            let stop = Frame::Stop { id: self.id };
            self.connection.send(self.stream, &stop);
        }
    }
}

/// The reason why no more is read by NIXL.
enum Halt {
    /// NIXL has failed: the rest is for the streams.
    Failed(String),
    /// The peer does not know this side's memory, or there was too little time: the rest is for the
    /// streams.
    Absent,
    /// The call ends, with the error that was noted.
    Over,
}

/// Sorts an answer: what does not end the call or the use of NIXL goes to the tally.
fn take(reply: Reply, portions: &[Portion], tally: &mut Tally, leased: bool) -> Option<Halt> {
    match reply {
        Reply::Arrived(arrival) if arrival.aborted => Some(Halt::Over),
        Reply::Arrived(arrival) if !arrival.bad.is_empty() => {
            Some(Halt::Failed("bytes arrived with a wrong checksum".into()))
        }
        Reply::Arrived(_) => {
            tally.settle(portions, reply, leased);
            None
        }
        Reply::Outcome(Outcome::NoPlane) => Some(Halt::Absent),
        Reply::Unmoved(reason) => Some(Halt::Failed(reason)),
        reply => {
            tally.settle(portions, reply, leased);
            Some(Halt::Over)
        }
    }
}

impl Shared {
    /// Returns the plane that moves the bytes of reads from a peer now.
    pub(super) fn data_plane(&self, peer: &PeerId) -> Option<DataPlane> {
        let connection = self.connection(peer).ok()?;
        let link = connection.plane.as_ref();
        Some(match link.is_some_and(PlaneLink::is_usable) {
            true => DataPlane::Nixl,
            false => DataPlane::Sockets,
        })
    }

    /// Reads portions of the peer's memory by NIXL. Returns what is left for the streams; nothing
    /// where the tally has an error.
    pub(super) async fn fetch_by_nixl(
        &self,
        connection: &Connection,
        landing: &mut Landing,
        tally: &mut Tally,
        objects: Vec<Portion>,
        leased: bool,
        deadline: Instant,
    ) -> Vec<Portion> {
        let link = connection.plane.as_ref();
        let Some(link) = link.filter(|link| link.is_usable()) else {
            return objects;
        };
        let frames = cut(objects.into_iter(), BLOCK, FETCHED_RANGES);
        let mut frames: VecDeque<_> = frames.into_iter().map(|(_, portions)| portions).collect();
        let mut under_way: VecDeque<Asked<'_>> = VecDeque::new();
        let halt = loop {
            while under_way.len() < DEPTH
                && let Some(portions) = frames.pop_front()
            {
                let now = Instant::now();
                let left = deadline.saturating_duration_since(now);
                let limit = now + (left / 2).min(FETCH_TIMEOUT);
                let (blocks, peer) = (link.plane.blocks(), &connection.remote.id);
                let block = match blocks.take(peer) {
                    Ok(block) => Ok(Some(block)),
                    Err(_) if !under_way.is_empty() => {
                        frames.push_front(portions);
                        break;
                    }
                    Err(_) => {
                        let limit = limit.min(now + BLOCK_TIMEOUT);
                        self.within(limit, blocks.taken(peer)).await
                    }
                };
                let asking = async {
                    // Others use them, or the peer still may: the streams are free.
                    let block = block?.ok_or(Stop::Deadline)?;
                    self.within(limit, ask(connection, landing, &portions, block, limit))
                        .await
                };
                match asking.await {
                    Ok(Some(mut asked)) => {
                        asked.portions = portions;
                        under_way.push_back(asked);
                    }
                    Ok(None) => {
                        tally.fail(self.gone(connection, deadline).await.0);
                        break;
                    }
                    Err(Stop::Closed) => {
                        tally.fail(TransferError::Closed);
                        break;
                    }
                    Err(Stop::Deadline) => {
                        frames.push_front(portions);
                        break;
                    }
                }
            }
            if tally.is_over() {
                break Some(Halt::Over);
            }
            let Some(mut asked) = under_way.pop_front() else {
                break None;
            };
            let halt = match self.within(asked.limit, &mut asked.reply).await {
                Ok(Ok(reply)) => {
                    asked.answered = true;
                    take(reply, &asked.portions, tally, leased)
                }
                Ok(Err(_)) => {
                    tally.fail(self.gone(connection, deadline).await.0);
                    Some(Halt::Over)
                }
                Err(Stop::Closed) => {
                    tally.fail(TransferError::Closed);
                    Some(Halt::Over)
                }
                Err(Stop::Deadline) => {
                    let halt = match asked.limit - asked.since < FAIR_TIMEOUT {
                        true => Halt::Absent,
                        false => Halt::Failed("a fetch was not answered in time".into()),
                    };
                    under_way.push_front(asked);
                    break Some(halt);
                }
            };
            if let Some(halt) = halt {
                if !matches!(halt, Halt::Over) {
                    frames.push_front(std::mem::take(&mut asked.portions));
                }
                break Some(halt);
            }
        };
        let mut left: Vec<Portion> = frames.into_iter().flatten().collect();
        for asked in &mut under_way {
            let reply = asked.give_up();
            let taken = reply.map(|reply| take(reply, &asked.portions, tally, leased));
            if !matches!(taken, Some(None)) {
                left.append(&mut asked.portions);
            }
        }
        drop(under_way);
        match halt {
            None if left.is_empty() => link.worked(),
            None => {}
            Some(Halt::Absent) => link.ask_later(),
            Some(Halt::Failed(reason)) => {
                self.core.counters.nixl_failed.add(1);
                link.failed(&connection.remote.id, &reason);
            }
            Some(Halt::Over) => {}
        }
        match tally.is_over() {
            true => Vec::new(),
            false => left,
        }
    }
}

/// Has the peer write ranges of its memory to a block. `None` after the end of the connection.
async fn ask<'a>(
    connection: &'a Connection,
    landing: &mut Landing,
    portions: &[Portion],
    mut block: Block,
    limit: Instant,
) -> Option<Asked<'a>> {
    let bytes: u64 = portions.iter().map(|portion| portion.local.len).sum();
    let number = connection.next_stream(bytes);
    let stream = &connection.streams[number];
    let permit = stream.acquire().await?;
    let id = connection.next_id();
    let left = limit.saturating_duration_since(Instant::now());
    let frame = Frame::Fetch {
        id,
        ranges: portions.iter().map(|portion| portion.remote).collect(),
        offset: block.offset(),
        millis: u64::try_from(left.as_millis()).unwrap_or(u64::MAX),
    };
    let target = landing.open(portions.iter().map(|portion| portion.local).collect());
    let (reply, replied) = oneshot::channel();
    block.lend();
    let pending = Pending {
        target: Some(Arc::clone(&target)),
        block: Some(block),
        reply,
        permit,
    };
    let asked = Asked {
        connection,
        stream: number,
        id,
        portions: Vec::new(),
        target,
        reply: replied,
        since: Instant::now(),
        limit,
        answered: false,
    };
    stream
        .request(id, pending, Outgoing::of(&frame))
        .then_some(asked)
}
