//! NIXL as the second plane of a connection: its state, and reads over it.
//!
//! `docs/decisions/one-session-two-planes.md` has the frames and the rights.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use super::connection::{Connection, Pending, Reply};
use super::frame::{Frame, FrameOutcome};
use super::landing::{Landing, Target};
use super::one_sided::Tally;
use super::outgoing::Outgoing;
use super::plane_link::PlaneLink;
use super::shared::{ChannelState, Stop};
use super::spread::{Portion, cut};
use crate::nixl::{BLOCK, Block};
use crate::{DataPlane, PeerId, TransferError};

/// Fetches of one read that are under way at a time: one is copied while others come.
const DEPTH: usize = 4;
/// Longest time of a fetch. A fetch gets half of the time that its read has left; the other half is
/// for the streams, should NIXL not answer.
const FETCH_TIMEOUT: Duration = Duration::from_secs(5);
/// A fetch that timed out with less time than this is no sign of a failure of NIXL.
const FAIR_TIMEOUT: Duration = Duration::from_secs(1);
/// Longest wait of a read for a block that others use; then the read goes over the streams.
const BLOCK_TIMEOUT: Duration = Duration::from_millis(100);
/// Most ranges of a fetch: as many as one request of NIXL takes.
const FETCHED_RANGES: usize = 512;

/// A fetch that waits for its answer. Dropping it cancels the fetch.
struct Asked<'a> {
    connection: &'a Connection,
    stream: usize,
    id: u64,
    portions: Vec<Portion>,
    target: Arc<Target>,
    reply: oneshot::Receiver<Reply>,
    since: Instant,
    /// Time after which the fetch is cancelled.
    limit: Instant,
    answered: bool,
}

impl Asked<'_> {
    /// Cancels the fetch, and returns its answer if that has come before.
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

/// The reason why NIXL reads no more.
enum Halt {
    /// NIXL has failed: the rest is for the streams.
    Failed(String),
    /// The peer does not know this side's memory, or there was too little time: the rest is for the
    /// streams.
    Absent,
    /// The call ends, with the error that was noted.
    Over,
}

/// Takes an answer. If it ends neither the call nor the use of NIXL, it goes to the tally.
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
        Reply::Outcome(FrameOutcome::NoPlane) => Some(Halt::Absent),
        Reply::Unmoved(reason) => Some(Halt::Failed(reason)),
        reply => {
            tally.settle(portions, reply, leased);
            Some(Halt::Over)
        }
    }
}

impl ChannelState {
    /// Returns the plane that moves the bytes of reads from a peer now.
    pub(super) fn data_plane(&self, peer: &PeerId) -> Option<DataPlane> {
        let connection = self.connection(peer).ok()?;
        let link = connection.plane.as_ref();
        Some(match link.is_some_and(PlaneLink::is_usable) {
            true => DataPlane::Nixl,
            false => DataPlane::Sockets,
        })
    }

    /// Reads portions of the peer's memory by NIXL. Returns the portions that are left for the
    /// streams; none if the tally has an error.
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
                    // Other reads use the blocks, or the peer may still write to them: the streams
                    // are free.
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

/// Asks the peer to write ranges of its memory to a block. `None` after the end of the connection.
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
