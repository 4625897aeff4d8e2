//! Sends and receives, which both sides call.
//!
//! The sender offers; the receiver reads the offered objects like any others, and reports when it
//! is done. A few small objects are inlined in their offer: the receiver has them already.
//!
//! The receiver may take inlined objects until it sees that the offer is withdrawn. It answers the
//! withdrawal, so that the sender knows which came first.

use std::sync::Arc;
use std::time::{Duration, Instant};

use lmc_memory::{ReservedSlot, SealedSlot};
use tokio::sync::oneshot;

use super::connection::{Connection, Offered};
use super::frame::{Frame, FrameOutcome, may_be_inlined};
use super::offers::{Offer, size_of_offer};
use super::outgoing::{Outgoing, PayloadSource, Run};
use super::shared::{ChannelState, Stop};
use crate::in_arena::check_slots;
use crate::lease::{Range, Region, Segment};
use crate::session::reason;
use crate::{DataPlane, Filled, InArena, PeerId, Sent, Slot, TransferError};

/// Time that a peer has, after a send's deadline, to confirm that it has seen the withdrawal.
const GRACE: Duration = Duration::from_millis(200);

impl ChannelState {
    pub(super) async fn send(
        &self,
        objects: Vec<SealedSlot>,
        peer: &PeerId,
        tag: u64,
        deadline: Instant,
    ) -> Sent {
        self.core.counters.operations.add(1);
        let (count, connection) = match self.paired(&objects, peer, deadline) {
            Ok(Some(connection)) => (objects.len(), connection),
            Ok(None) => return Sent::all(0),
            Err(error) => return Sent::failed(error),
        };
        let mut offering = None;
        let offer = async {
            let capacity = Arc::clone(&connection.offer_capacity);
            let permits = size_of_offer(count) as u32;
            let permit = capacity.acquire_many_owned(permits).await.ok()?;
            let (finish, finished) = oneshot::channel();
            let objects = Arc::new(objects);
            let id = connection.next_id();
            let offered = Offered {
                objects: Some(Arc::clone(&objects)),
                finish,
                pulled: false,
                inlined: None,
                permit,
            };
            connection.offered.lock().insert(id, offered);
            let offering = offering.insert(Offering {
                connection: Arc::clone(&connection),
                id,
                finished,
                inlined: false,
            });
            if connection.end().is_some() {
                return None;
            }
            offering.send(tag, objects);
            (&mut offering.finished).await.ok()
        };
        let (error, idle) = match self.within(deadline, offer).await {
            Ok(Some((done, outcome))) => return finished(count, done, outcome),
            Ok(None) => {
                let idle = offering.as_ref().is_none_or(|offering| !offering.inlined);
                let (error, by_peer) = self.gone(&connection, deadline).await;
                (error, idle || by_peer)
            }
            Err(stop) => {
                let mut idle = offering.as_mut().is_none_or(Offering::withdraw);
                if let Some(offering) = offering.filter(|o| o.inlined && stop == Stop::Deadline) {
                    let grace = Instant::now() + GRACE;
                    match self.within(grace, offering.finished()).await {
                        Ok(Some((_, FrameOutcome::Withdrawn))) => idle = true,
                        Ok(Some((done, outcome))) => return finished(count, done, outcome),
                        Ok(None) | Err(_) => {}
                    }
                }
                (stop.into(), idle)
            }
        };
        Sent {
            idle,
            ..Sent::failed(error)
        }
    }

    pub(super) async fn receive(
        &self,
        mut slots: Vec<ReservedSlot>,
        peer: &PeerId,
        tag: u64,
        deadline: Instant,
    ) -> Filled {
        self.core.counters.operations.add(1);
        let connection = match self.paired(&slots, peer, deadline) {
            Ok(Some(connection)) => connection,
            Ok(None) => return Filled::nothing(),
            Err(error) => return Filled::untouched(slots, error),
        };
        loop {
            let wait = async {
                let waiting = connection.incoming.receive(tag)?;
                waiting.offer().await
            };
            let offer = match self.within(deadline, wait).await {
                Ok(Some(offer)) => offer,
                Ok(None) => {
                    let (error, _) = self.gone(&connection, deadline).await;
                    return Filled::untouched(slots, error);
                }
                Err(stop) => return Filled::untouched(slots, stop.into()),
            };
            let mut pull = Pull {
                offer,
                finished: false,
            };
            if let Some((object, sent, capacity)) = misfit(&pull.offer, &slots) {
                let outcome = FrameOutcome::Length {
                    object: object as u32,
                    sent,
                    capacity,
                };
                pull.finish(0, outcome);
                let error = TransferError::Length {
                    object,
                    sent,
                    capacity,
                };
                return Filled::untouched(slots, error);
            }
            if let Some(bytes) = pull.offer.bytes.take() {
                pull.finish(pull.offer.lens.len(), FrameOutcome::Done);
                return unpack(slots, &pull.offer.lens, &bytes);
            }
            let from = Arc::clone(&pull.offer.connection);
            let region = Region::Offer(pull.offer.id);
            let range = |(slot, &len): (u64, &u64)| Range {
                region,
                slot,
                offset: 0,
                len,
            };
            let ranges: Vec<Range> = (0..).zip(&pull.offer.lens).map(range).collect();
            let fetched = self.fetch(&from, slots, &ranges, false, deadline).await;
            if fetched.withdrawn && fetched.error.is_none() {
                // The offer was withdrawn: the next offer is received instead.
                pull.withdrawn();
                let idle = |slot| match slot {
                    Slot::Idle(slot) => Some(slot),
                    Slot::Written(_) | Slot::Quarantined => None,
                };
                slots = fetched.slots.into_iter().filter_map(idle).collect();
                continue;
            }
            let outcome = match &fetched.error {
                None => FrameOutcome::Done,
                Some(TransferError::Corrupt { object }) => FrameOutcome::Corrupt(*object as u32),
                Some(TransferError::Deadline) => FrameOutcome::Aborted,
                // The peer learns it from the end of the connection.
                Some(TransferError::Closed | TransferError::PeerGone { .. }) => {
                    pull.finished = true;
                    return fetched.into_filled();
                }
                Some(error) => FrameOutcome::Refused(reason(&error.to_string())),
            };
            let filled = fetched.into_filled();
            pull.finish(filled.done(), outcome);
            return filled;
        }
    }

    /// Checks a call before a byte moves. `None`: there is nothing to do.
    fn paired<S: InArena>(
        &self,
        slots: &[S],
        peer: &PeerId,
        deadline: Instant,
    ) -> Result<Option<Arc<Connection>>, TransferError> {
        if self.is_closed() {
            return Err(TransferError::Closed);
        }
        check_slots(self.core.window.arena(), slots)?;
        if slots.is_empty() {
            return Ok(None);
        }
        let connection = self.connection(peer)?;
        if Instant::now() >= deadline {
            return Err(TransferError::Deadline);
        }
        Ok(Some(connection))
    }
}

/// Returns the first object that has no slot of its length.
fn misfit(offer: &Offer<Connection>, slots: &[ReservedSlot]) -> Option<(usize, u64, u64)> {
    let capacity = slots.iter().map(ReservedSlot::len);
    let capacity = capacity.chain(std::iter::repeat(0));
    let both = offer.lens.iter().copied().zip(capacity);
    let misfit = both
        .enumerate()
        .find(|(_, (sent, capacity))| sent != capacity);
    misfit.map(|(object, (sent, capacity))| (object, sent, capacity))
}

/// Copies inlined objects into their slots.
fn unpack(slots: Vec<ReservedSlot>, lens: &[u64], mut bytes: &[u8]) -> Filled {
    let mut lens = lens.iter();
    let fill = |mut slot: ReservedSlot| {
        let Some(len) = lens.next() else {
            return Slot::Idle(slot);
        };
        let (now, rest) = bytes.split_at(*len as usize);
        slot.bytes_mut().copy_from_slice(now);
        bytes = rest;
        Slot::Written(slot.written())
    };
    Filled {
        slots: slots.into_iter().map(fill).collect(),
        error: None,
        by: DataPlane::Sockets,
    }
}

/// Returns the outcome of a send from the receiver's report.
fn finished(count: usize, done: u64, outcome: FrameOutcome) -> Sent {
    let done = usize::try_from(done).unwrap_or(count).min(count);
    let failed = |reason: &str| TransferError::Failed(reason.to_owned());
    let error = match outcome {
        FrameOutcome::Done if done == count => None,
        FrameOutcome::Done => Some(failed("the receiver has finished with less than was sent")),
        FrameOutcome::Corrupt(object) => Some(TransferError::Corrupt {
            object: object as usize,
        }),
        FrameOutcome::Length {
            object,
            sent,
            capacity,
        } => Some(TransferError::Length {
            object: object as usize,
            sent,
            capacity,
        }),
        FrameOutcome::Aborted => Some(failed("the receiver gave up")),
        FrameOutcome::Withdrawn => Some(failed("the receiver found nothing to receive")),
        FrameOutcome::NotLeased(_) | FrameOutcome::ReadOnly | FrameOutcome::NoPlane => {
            Some(failed("the receiver may not read"))
        }
        FrameOutcome::Refused(why) => Some(TransferError::Refused(why)),
    };
    Sent {
        done,
        error,
        idle: true,
    }
}

/// An offer of this side; withdrawn when dropped before its end.
struct Offering {
    connection: Arc<Connection>,
    id: u64,
    finished: oneshot::Receiver<(u64, FrameOutcome)>,
    /// True if the objects are inlined.
    inlined: bool,
}

impl Offering {
    /// Sends the offer. The objects are inlined if they are small and can be sent without waiting.
    fn send(&mut self, tag: u64, slots: Arc<Vec<SealedSlot>>) {
        let (connection, id) = (&self.connection, self.id);
        let lens: Vec<u64> = slots.iter().map(SealedSlot::len).collect();
        let capacity = Arc::clone(&connection.inline_capacity);
        let permit = may_be_inlined(&lens).then(|| capacity.try_acquire_owned());
        if let Some(Ok(permit)) = permit {
            // Before it is sent, since the peer may be done with it at once.
            connection.set_inlined(id, Some(permit));
            let segment = |slot: &SealedSlot| Segment {
                offset: slot.offset(),
                len: slot.len(),
            };
            let segments = slots.iter().map(segment).collect();
            let offer = Frame::Offer {
                id,
                tag,
                lens: lens.clone(),
                inlined: true,
            };
            let source = PayloadSource::Offer(slots);
            self.inlined = connection.streams[0].queue.push_now(Outgoing {
                payload: vec![Run { source, segments }],
                ..Outgoing::of(&offer)
            });
            if self.inlined {
                return;
            }
            connection.set_inlined(id, None);
        }
        let offer = Frame::Offer {
            id,
            tag,
            lens,
            inlined: false,
        };
        connection.send(0, &offer);
    }

    /// Withdraws the offer. Returns whether the peer had not begun to read it, and never will.
    fn withdraw(&mut self) -> bool {
        let mut offered = self.connection.offered.lock();
        let Some(offer) = offered.get_mut(&self.id) else {
            return false;
        };
        let withdraw = Outgoing::of(&Frame::Withdraw { id: self.id });
        let queue = &self.connection.streams[0].queue;
        if self.inlined {
            // The entry stays until the peer has answered: the peer has the bytes until then.
            let slots = offer.objects.take();
            drop(offered);
            if slots.is_some() {
                queue.push(withdraw);
            }
            return false;
        }
        let offer = offered.remove(&self.id);
        drop(offered);
        let Some(Offered { permit, pulled, .. }) = offer else {
            return false;
        };
        // The offer counts until the withdrawal is sent: a peer that reads nothing gets no more
        // offers.
        queue.push(Outgoing {
            _permit: Some(permit),
            ..withdraw
        });
        !pulled
    }

    /// Waits for the peer's answer; `None` when the connection ended first.
    async fn finished(mut self) -> Option<(u64, FrameOutcome)> {
        (&mut self.finished).await.ok()
    }
}

impl Drop for Offering {
    fn drop(&mut self) {
        self.withdraw();
    }
}

/// An offer of the peer that is being received. Its end is reported to the peer.
struct Pull {
    offer: Offer<Connection>,
    finished: bool,
}

impl Pull {
    fn finish(&mut self, done: usize, outcome: FrameOutcome) {
        self.finished = true;
        self.offer.finish(done, outcome);
    }

    /// Notes that the peer has withdrawn the offer.
    fn withdrawn(&mut self) {
        self.finished = true;
        if self.offer.inlined {
            self.offer.finish(0, FrameOutcome::Withdrawn);
        }
    }
}

impl Drop for Pull {
    fn drop(&mut self) {
        if !self.finished {
            self.finish(0, FrameOutcome::Aborted);
        }
    }
}
