//! Reads and writes, which only this side calls.

use std::sync::Arc;
use std::time::{Duration, Instant};

use lmc_memory::{ReservedSlot, SealedSlot};
use tokio::sync::oneshot;

use super::connection::{Arrival, Connection, Pending, Reply};
use super::frame::{Frame, FrameOutcome};
use super::landing::Landing;
use super::outgoing::{Outgoing, PayloadSource, Progress, Run};
use super::shared::{ChannelState, Stop};
use super::spread::{Portion, spread};
use crate::in_arena::check_slots;
use crate::lease::{Range, Segment};
use crate::{DataPlane, Filled, Index, PeerId, Sent, Slot, TransferError, checks};

/// Time that a peer has, after a write's deadline, to confirm that it has seen the abort.
const GRACE: Duration = Duration::from_millis(50);

/// The connection to a peer, and the ranges of its memory that a batch names.
type Checked = (Arc<Connection>, Vec<Range>);

/// Progress of the objects of a batch.
pub(super) struct Tally {
    /// Bytes of each object that are not yet in place.
    left: Vec<u64>,
    error: Option<TransferError>,
    /// True if the peer said that the offer was withdrawn before all of it was read.
    withdrawn: bool,
    /// For each object the checksum of a part of the object, and the bytes of that part.
    sums: Vec<Option<(u64, u64)>>,
}

impl Tally {
    fn new(objects: &[Portion]) -> Self {
        Self {
            left: objects.iter().map(|object| object.local.len).collect(),
            error: None,
            withdrawn: false,
            sums: vec![None; objects.len()],
        }
    }

    /// Ends the call with an error.
    #[cfg(feature = "nixl")]
    pub(super) fn fail(&mut self, error: TransferError) {
        self.error.get_or_insert(error);
    }

    /// Returns whether the call ends, whatever else arrives.
    #[cfg(feature = "nixl")]
    pub(super) fn is_over(&self) -> bool {
        self.error.is_some() || self.withdrawn
    }

    pub(super) fn settle(&mut self, portions: &[Portion], reply: Reply, leased: bool) {
        let object = |number: u32| portions.get(number as usize).map(|portion| portion.object);
        let first = portions.first().map_or(0, |portion| portion.object);
        let invalid = || TransferError::Refused("the answer does not match the request".into());
        let error = match reply {
            Reply::Outcome(FrameOutcome::Done) => {
                self.arrived(portions, &[]);
                return;
            }
            Reply::Arrived(Arrival { bad, aborted, sums }) => {
                if !aborted {
                    for (number, sum) in sums {
                        if let Some(portion) = portions.get(number as usize) {
                            self.sums[portion.object] = Some((portion.local.len, sum));
                        }
                    }
                    self.arrived(portions, &bad);
                }
                match bad.first().and_then(|bad| object(*bad)) {
                    Some(object) => TransferError::Corrupt { object },
                    None if aborted && leased => TransferError::NotLeased { object: first },
                    None if aborted => {
                        TransferError::Refused("the sender aborted the payload".into())
                    }
                    None => return,
                }
            }
            Reply::Outcome(FrameOutcome::Corrupt(number)) => match object(number) {
                Some(object) => TransferError::Corrupt { object },
                None => invalid(),
            },
            Reply::Outcome(FrameOutcome::NotLeased(number)) => match object(number) {
                Some(object) => TransferError::NotLeased { object },
                None => invalid(),
            },
            Reply::Message(_) => invalid(),
            #[cfg(feature = "nixl")]
            Reply::Unmoved(_) => invalid(),
            Reply::Outcome(FrameOutcome::NoPlane) => invalid(),
            Reply::Outcome(FrameOutcome::ReadOnly) => TransferError::ReadOnly,
            Reply::Outcome(FrameOutcome::Withdrawn) => {
                self.withdrawn = true;
                return;
            }
            // This side aborted the request, and its call reports the reason.
            Reply::Outcome(FrameOutcome::Aborted) => return,
            Reply::Outcome(FrameOutcome::Refused(why)) => TransferError::Refused(why),
            Reply::Outcome(FrameOutcome::Length {
                object,
                sent,
                capacity,
            }) => TransferError::Length {
                object: object as usize,
                sent,
                capacity,
            },
        };
        self.error.get_or_insert(error);
    }

    fn arrived(&mut self, portions: &[Portion], bad: &[u32]) {
        for (number, portion) in (0..).zip(portions) {
            if !bad.contains(&number) {
                self.left[portion.object] -= portion.local.len;
            }
        }
    }
}

/// Objects that were to be read into slots. There may be more slots.
pub(super) struct Fetched {
    pub(super) slots: Vec<Slot>,
    pub(super) error: Option<TransferError>,
    /// True if the peer said that the offer was withdrawn before all of it was read.
    pub(super) withdrawn: bool,
    pub(super) by: DataPlane,
}

impl Fetched {
    pub(super) fn into_filled(self) -> Filled {
        Filled {
            slots: self.slots,
            error: self.error,
            by: self.by,
        }
    }
}

/// Returns the slots; those with a whole object are written, with a checksum if one covers the
/// object.
fn filled(slots: Vec<ReservedSlot>, tally: &Tally) -> Vec<Slot> {
    let whole = tally.left.iter().map(|left| *left == 0);
    let whole = whole.chain(std::iter::repeat(false));
    let sums = tally.sums.iter().copied().chain(std::iter::repeat(None));
    let slot = |((slot, whole), sum): ((ReservedSlot, bool), Option<(u64, u64)>)| match whole {
        true => Slot::Written(match sum.filter(|(len, _)| *len == slot.len()) {
            Some((_, sum)) => slot.written().with_checksum(sum),
            None => slot.written(),
        }),
        false => Slot::Idle(slot),
    };
    slots.into_iter().zip(whole).zip(sums).map(slot).collect()
}

/// The objects of a batch, with their slots on this side.
fn portions<'a>(
    slots: impl Iterator<Item = (u64, u64)> + 'a,
    ranges: &'a [Range],
) -> impl Iterator<Item = Portion> + 'a {
    let portion = |(object, ((offset, len), remote)): (usize, (_, &Range))| Portion {
        object,
        local: Segment { offset, len },
        remote: *remote,
    };
    slots.zip(ranges).enumerate().map(portion)
}

impl ChannelState {
    pub(super) async fn read(
        &self,
        slots: Vec<ReservedSlot>,
        peer: &PeerId,
        indices: &[Index],
        deadline: Instant,
    ) -> Filled {
        self.core.counters.operations.add(1);
        let lens = slots.iter().map(ReservedSlot::len);
        let checked = check_slots(self.core.window.arena(), &slots)
            .and_then(|()| self.ranges(lens, peer, indices, deadline));
        let (connection, ranges) = match checked {
            Ok(Some(checked)) => checked,
            Ok(None) => return Filled::nothing(),
            Err(error) => return Filled::untouched(slots, error),
        };
        let fetched = self.fetch(&connection, slots, &ranges, true, deadline);
        fetched.await.into_filled()
    }

    /// Checks a call before a byte moves. `None`: there is nothing to do.
    fn ranges(
        &self,
        lens: impl ExactSizeIterator<Item = u64>,
        peer: &PeerId,
        indices: &[Index],
        deadline: Instant,
    ) -> Result<Option<Checked>, TransferError> {
        if self.is_closed() {
            return Err(TransferError::Closed);
        }
        if lens.len() == 0 && indices.is_empty() {
            return Ok(None);
        }
        let connection = self.connection(peer)?;
        let ranges = checks::ranges(lens, indices, connection.remote.memory)?;
        if Instant::now() >= deadline {
            return Err(TransferError::Deadline);
        }
        Ok(Some((connection, ranges)))
    }

    /// Reads ranges of the peer's memory into the first slots.
    pub(super) async fn fetch(
        &self,
        connection: &Arc<Connection>,
        slots: Vec<ReservedSlot>,
        ranges: &[Range],
        leased: bool,
        deadline: Instant,
    ) -> Fetched {
        let mut landing = Landing::new(slots);
        let lies = landing.slots().iter();
        let lies: Vec<(u64, u64)> = lies.map(|slot| (slot.offset(), slot.len())).collect();
        let objects: Vec<Portion> = portions(lies.into_iter(), ranges).collect();
        let mut tally = Tally::new(&objects);
        #[cfg(feature = "nixl")]
        let (objects, by) = {
            let (landing, tally) = (&mut landing, &mut tally);
            let left = self.fetch_by_nixl(connection, landing, tally, objects, leased, deadline);
            let left = left.await;
            let by = match left.is_empty() {
                true => DataPlane::Nixl,
                false => DataPlane::Sockets,
            };
            (left, by)
        };
        #[cfg(not(feature = "nixl"))]
        let by = DataPlane::Sockets;
        let frames = spread(objects.iter().copied(), connection.streams.len());
        let first = connection.next_stream(bytes_of(&frames));

        let mut requests: Vec<(Vec<Portion>, oneshot::Receiver<Reply>)> = Vec::new();
        let ask = async {
            for (number, portions) in frames {
                let stream = &connection.streams[(first + number) % connection.streams.len()];
                let permit = stream.acquire().await?;
                let id = connection.next_id();
                let target = landing.open(portions.iter().map(|p| p.local).collect());
                let (reply, replied) = oneshot::channel();
                let pending = Pending::of_streams(Some(target), reply, permit);
                let ranges = portions.iter().map(|portion| portion.remote).collect();
                let outgoing = Outgoing::of(&Frame::Read { id, ranges });
                if !stream.request(id, pending, outgoing) {
                    return None;
                }
                requests.push((portions, replied));
            }
            for (portions, reply) in &mut requests {
                tally.settle(portions, reply.await.ok()?, leased);
                portions.clear();
            }
            Some(())
        };
        let asked = self.within(deadline, ask).await;
        if asked != Ok(Some(())) {
            let error = match asked {
                Err(stop) => stop.into(),
                Ok(_) => self.gone(connection, deadline).await.0,
            };
            tally.error.get_or_insert(error);
        }
        // Nothing arrives from here on; bytes that arrived before the end count.
        let slots = landing.close();
        for (portions, mut reply) in requests {
            if let Ok(reply) = reply.try_recv() {
                tally.settle(&portions, reply, leased);
            }
        }
        let whole = tally.left.iter().all(|left| *left == 0);
        let withdrawn = tally.withdrawn && !leased;
        if !whole && !withdrawn && tally.error.is_none() {
            let reason = "the peer sent less than it was asked for";
            tally.error = Some(TransferError::Failed(reason.into()));
        }
        Fetched {
            slots: match withdrawn {
                true => slots.into_iter().map(Slot::Idle).collect(),
                false => filled(slots, &tally),
            },
            error: tally.error,
            withdrawn,
            by,
        }
    }

    pub(super) async fn write(
        &self,
        objects: Vec<SealedSlot>,
        peer: &PeerId,
        indices: &[Index],
        deadline: Instant,
    ) -> Sent {
        self.core.counters.operations.add(1);
        let lens = objects.iter().map(SealedSlot::len);
        let checked = check_slots(self.core.window.arena(), &objects)
            .and_then(|()| self.ranges(lens, peer, indices, deadline));
        let (connection, ranges) = match checked {
            Ok(Some(checked)) => checked,
            Ok(None) => return Sent::all(0),
            Err(error) => return Sent::failed(error),
        };
        let lies = objects.iter().map(|slot| (slot.offset(), slot.len()));
        let all: Vec<Portion> = portions(lies, &ranges).collect();
        let frames = spread(all.iter().copied(), connection.streams.len());
        let first = connection.next_stream(bytes_of(&frames));
        let mut tally = Tally::new(&all);

        let objects = Arc::new(objects);
        let mut sending: Vec<Sending> = Vec::new();
        let put = async {
            for (number, portions) in frames {
                let stream = &connection.streams[(first + number) % connection.streams.len()];
                let permit = stream.acquire().await?;
                let id = connection.next_id();
                let (reply, replied) = oneshot::channel();
                let pending = Pending::of_streams(None, reply, permit);
                let ranges = portions.iter().map(|portion| portion.remote).collect();
                let progress = Arc::new(Progress::new(id, Arc::clone(&objects)));
                let run = Run {
                    source: PayloadSource::Write(Arc::clone(&progress)),
                    segments: portions.iter().map(|portion| portion.local).collect(),
                };
                let outgoing = Outgoing {
                    payload: vec![run],
                    ..Outgoing::of(&Frame::Write { id, ranges })
                };
                if !stream.request(id, pending, outgoing) {
                    return None;
                }
                sending.push(Sending {
                    progress,
                    portions,
                    reply: replied,
                    over: false,
                });
            }
            await_all(&mut sending, &mut tally).await
        };
        let put = self.within(deadline, put).await;
        let mut idle = true;
        match put {
            Ok(Some(())) => {}
            Ok(None) => {
                idle = cancel_all(&mut sending);
                let (error, by_peer) = self.gone(&connection, deadline).await;
                idle |= by_peer;
                tally.error.get_or_insert(error);
            }
            Err(Stop::Closed) => {
                idle = cancel_all(&mut sending);
                tally.error.get_or_insert(TransferError::Closed);
            }
            Err(Stop::Deadline) => {
                idle = cancel_all(&mut sending);
                if !idle {
                    let rest = await_all(&mut sending, &mut tally);
                    let seen = self.within(Instant::now() + GRACE, rest).await;
                    idle = seen == Ok(Some(()));
                }
                tally.error.get_or_insert(TransferError::Deadline);
            }
        }
        let done = tally.left.iter().take_while(|left| **left == 0).count();
        if tally.error.is_none() && done < tally.left.len() {
            let reason = "the peer confirmed less than was written";
            tally.error = Some(TransferError::Failed(reason.into()));
            idle = false;
        }
        Sent {
            done,
            error: tally.error,
            idle,
        }
    }
}

fn bytes_of(frames: &[(usize, Vec<Portion>)]) -> u64 {
    let portions = frames.iter().flat_map(|(_, portions)| portions);
    portions.map(|portion| portion.local.len).sum()
}

/// A frame of a write that is under way. Aborted when dropped.
struct Sending {
    progress: Arc<Progress>,
    portions: Vec<Portion>,
    reply: oneshot::Receiver<Reply>,
    /// True once the frame is answered, or will never be sent.
    over: bool,
}

impl Sending {
    fn cancel(&mut self) {
        self.over |= self.progress.cancel();
    }
}

impl Drop for Sending {
    fn drop(&mut self) {
        self.cancel();
    }
}

/// Aborts all frames. Returns whether the peer's memory is idle.
fn cancel_all(sending: &mut [Sending]) -> bool {
    sending.iter_mut().for_each(Sending::cancel);
    sending.iter().all(|sending| sending.over)
}

/// Waits for all answers; `None` when the connection ended first.
async fn await_all(sending: &mut [Sending], tally: &mut Tally) -> Option<()> {
    for sending in sending.iter_mut().filter(|sending| !sending.over) {
        let reply = (&mut sending.reply).await.ok()?;
        sending.over = true;
        tally.settle(&sending.portions, reply, true);
    }
    Some(())
}
