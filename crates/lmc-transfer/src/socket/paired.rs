//! Sending to a peer that receives.
//!
//! The sender offers; the receiver reads the offered objects as it would any others, and says
//! when it is done. The bytes of a few small objects go along with their offer: the receiver has
//! them already, and only says so.
//!
//! What the receiver has may be received until it hears that the offer is taken back. So to that
//! it answers, and the sender knows.

use std::sync::Arc;
use std::time::{Duration, Instant};

use lmc_memory::{ReservedSlot, SealedSlot};
use tokio::sync::oneshot;

use super::connection::{Connection, Offered, Outgoing, Payload, Source};
use super::frame::{Frame, Outcome, Segment, may_be_carried, reason};
use super::rendezvous::{Offer, room_of};
use super::shared::{Shared, Stop};
use crate::{Filled, PeerId, Sent, Slot, TransferError, checks};

/// Time that a peer has, after a send's deadline, to say that it has seen the taking back.
const GRACE: Duration = Duration::from_millis(200);

impl Shared {
    pub(super) async fn send(
        &self,
        objects: Vec<SealedSlot>,
        peer: &PeerId,
        tag: u64,
        deadline: Instant,
    ) -> Sent {
        self.counters.operations.add(1);
        let (count, connection) = match self.paired(&objects, peer, deadline) {
            Ok(Some(connection)) => (objects.len(), connection),
            Ok(None) => return Sent::all(0),
            Err(error) => return Sent::failed(error),
        };
        let mut offering = None;
        let offer = async {
            let room = Arc::clone(&connection.offer_room);
            let room = room.acquire_many_owned(room_of(count) as u32).await.ok()?;
            let (finish, finished) = oneshot::channel();
            let segments = objects.iter().map(|slot| Segment {
                offset: slot.offset(),
                len: slot.len(),
            });
            let segments: Vec<Segment> = segments.collect();
            let objects = Arc::new(objects);
            let id = connection.next_id();
            let offered = Offered {
                objects: Some(Arc::clone(&objects)),
                finish,
                pulled: false,
                carried: None,
                room,
            };
            connection.offers.lock().insert(id, offered);
            let offering = offering.insert(Offering {
                connection: Arc::clone(&connection),
                id,
                finished,
                carried: false,
            });
            if connection.end().is_some() {
                return None;
            }
            offering.send(tag, segments, objects);
            (&mut offering.finished).await.ok()
        };
        let error = match self.within(deadline, offer).await {
            Ok(Some((done, outcome))) => return finished(count, done, outcome),
            Ok(None) => {
                let quiet = offering.as_ref().is_none_or(|offering| !offering.carried);
                match self.within(deadline, connection.gone(quiet)).await {
                    Ok(error) => error,
                    Err(stop) => stop.error(quiet),
                }
            }
            Err(stop) => {
                let mut quiet = offering.as_mut().is_none_or(Offering::withdraw);
                if let Some(offering) = offering.filter(|o| o.carried && stop == Stop::Deadline) {
                    let grace = Instant::now() + GRACE;
                    match self.within(grace, offering.finished()).await {
                        Ok(Some((_, Outcome::Withdrawn))) => quiet = true,
                        Ok(Some((done, outcome))) => return finished(count, done, outcome),
                        Ok(None) | Err(_) => {}
                    }
                }
                stop.error(quiet)
            }
        };
        Sent::failed(error)
    }

    pub(super) async fn receive(
        &self,
        mut slots: Vec<ReservedSlot>,
        peer: &PeerId,
        tag: u64,
        deadline: Instant,
    ) -> Filled {
        self.counters.operations.add(1);
        let connection = match self.paired(&slots, peer, deadline) {
            Ok(Some(connection)) => connection,
            Ok(None) => {
                return Filled {
                    slots: Vec::new(),
                    error: None,
                };
            }
            Err(error) => return Filled::untouched(slots, error),
        };
        loop {
            let wait = async {
                let waiting = connection.rendezvous.receive(tag)?;
                waiting.offer().await
            };
            let offer = match self.within(deadline, wait).await {
                Ok(Some(offer)) => offer,
                Ok(None) => {
                    let gone = self.within(deadline, connection.gone(true)).await;
                    let error = gone.unwrap_or_else(|stop| stop.error(true));
                    return Filled::untouched(slots, error);
                }
                Err(stop) => return Filled::untouched(slots, stop.error(true)),
            };
            let mut pull = Pull {
                offer,
                finished: false,
            };
            if let Some((place, sent, room)) = misfit(&pull.offer, &slots) {
                pull.finish(
                    0,
                    Outcome::Length {
                        place: place as u32,
                        sent,
                        room,
                    },
                );
                return Filled::untouched(slots, TransferError::Length { place, sent, room });
            }
            if let Some(bytes) = pull.offer.bytes.take() {
                pull.finish(pull.offer.objects.len(), Outcome::Done);
                return unpack(slots, &pull.offer.objects, &bytes);
            }
            let places: Vec<u64> = pull.offer.objects.iter().map(|o| o.offset).collect();
            let (from, id) = (Arc::clone(&pull.offer.connection), pull.offer.id);
            let fetched = self.fetch(&from, Some(id), slots, &places, deadline).await;
            if fetched.withdrawn && fetched.error.is_none() {
                // It was not sent after all: this waits for what will be.
                pull.withdrawn();
                slots = fetched.slots;
                continue;
            }
            let outcome = match &fetched.error {
                None => Outcome::Done,
                Some(TransferError::Corrupt { place }) => Outcome::Corrupt(*place as u32),
                Some(TransferError::Deadline { .. }) => Outcome::Aborted,
                // The connection ends, and that tells the peer.
                Some(TransferError::Closed | TransferError::PeerGone { .. }) => {
                    pull.finished = true;
                    return fetched.into_filled();
                }
                Some(error) => Outcome::Refused(reason(&error.to_string())),
            };
            pull.finish(fetched.done(), outcome);
            return fetched.into_filled();
        }
    }

    /// What can be said before a byte moves. None: there is nothing to do.
    fn paired<S: checks::InArena>(
        &self,
        slots: &[S],
        peer: &PeerId,
        deadline: Instant,
    ) -> Result<Option<Arc<Connection>>, TransferError> {
        if self.is_closed() {
            return Err(TransferError::Closed);
        }
        checks::slots(self.window.arena(), slots)?;
        if slots.is_empty() {
            return Ok(None);
        }
        let connection = self.connection(peer)?;
        if Instant::now() >= deadline {
            return Err(TransferError::Deadline { quiet: true });
        }
        Ok(Some(connection))
    }
}

/// The first object that has no slot of its length.
fn misfit(offer: &Offer, slots: &[ReservedSlot]) -> Option<(usize, u64, u64)> {
    let room = slots.iter().map(ReservedSlot::len);
    let room = room.chain(std::iter::repeat(0));
    let both = offer.objects.iter().map(|object| object.len).zip(room);
    let misfit = both.enumerate().find(|(_, (sent, room))| sent != room);
    misfit.map(|(place, (sent, room))| (place, sent, room))
}

/// Slots with the bytes that came along with an offer.
fn unpack(slots: Vec<ReservedSlot>, objects: &[Segment], mut bytes: &[u8]) -> Filled {
    let mut objects = objects.iter();
    let fill = |mut slot: ReservedSlot| {
        let Some(object) = objects.next() else {
            return Slot::Quiet(slot);
        };
        let (now, rest) = bytes.split_at(object.len as usize);
        slot.bytes_mut().copy_from_slice(now);
        bytes = rest;
        Slot::Written(slot.written())
    };
    Filled {
        slots: slots.into_iter().map(fill).collect(),
        error: None,
    }
}

/// What the receiver said.
fn finished(count: usize, done: u64, outcome: Outcome) -> Sent {
    let done = usize::try_from(done).unwrap_or(count).min(count);
    let failed = |reason: &str| TransferError::Failed {
        reason: reason.to_owned(),
        quiet: true,
    };
    let error = match outcome {
        Outcome::Done if done == count => None,
        Outcome::Done => Some(failed("the receiver is done with less than was sent")),
        Outcome::Corrupt(place) => Some(TransferError::Corrupt {
            place: place as usize,
        }),
        Outcome::Length { place, sent, room } => Some(TransferError::Length {
            place: place as usize,
            sent,
            room,
        }),
        Outcome::Aborted => Some(failed("the receiver gave up")),
        Outcome::Withdrawn => Some(failed("the receiver found nothing to receive")),
        Outcome::Refused(why) => Some(TransferError::Refused(why)),
    };
    Sent { done, error }
}

/// An offer of this side; withdrawn when dropped before its end.
struct Offering {
    connection: Arc<Connection>,
    id: u64,
    finished: oneshot::Receiver<(u64, Outcome)>,
    /// Whether the bytes have gone along.
    carried: bool,
}

impl Offering {
    /// Sends the offer; the bytes go along where they are few and need not wait.
    fn send(&mut self, tag: u64, objects: Vec<Segment>, slots: Arc<Vec<SealedSlot>>) {
        let (connection, id) = (&self.connection, self.id);
        let room = Arc::clone(&connection.carried_room);
        let room = may_be_carried(&objects).then(|| room.try_acquire_owned());
        if let Some(Ok(room)) = room {
            // Before it is sent, since the peer may be done with it at once.
            connection.set_carried(id, Some(room));
            let segments = objects.clone();
            let offer = Frame::Offer {
                id,
                tag,
                objects: segments.clone(),
                carried: true,
            };
            let source = Source::Offer { _slots: slots };
            self.carried = connection.lanes[0].outbox.push_now(Outgoing {
                payload: Some(Payload { segments, source }),
                ..Outgoing::of(offer.encode())
            });
            if self.carried {
                return;
            }
            connection.set_carried(id, None);
        }
        let offer = Frame::Offer {
            id,
            tag,
            objects,
            carried: false,
        };
        connection.say(0, &offer);
    }

    /// Whether the peer had not begun to read it, and will not.
    fn withdraw(&mut self) -> bool {
        let mut offers = self.connection.offers.lock();
        let Some(offered) = offers.get_mut(&self.id) else {
            return false;
        };
        let withdraw = Outgoing::of(Frame::Withdraw { id: self.id }.encode());
        let lane = &self.connection.lanes[0];
        if self.carried {
            // The rest stays until the peer has answered: it has the bytes for so long.
            let slots = offered.objects.take();
            drop(offers);
            if slots.is_some() {
                lane.push(withdraw);
            }
            return false;
        }
        let offered = offers.remove(&self.id);
        drop(offers);
        let Some(Offered { room, pulled, .. }) = offered else {
            return false;
        };
        // Until it is sent the offer counts: a peer that takes nothing gets no more of them.
        lane.push(Outgoing {
            _room: Some(room),
            ..withdraw
        });
        !pulled
    }

    /// What the peer says; none when the connection ended first.
    async fn finished(mut self) -> Option<(u64, Outcome)> {
        (&mut self.finished).await.ok()
    }
}

impl Drop for Offering {
    fn drop(&mut self) {
        self.withdraw();
    }
}

/// An offer of the peer that is being received; the peer is told how it ended.
struct Pull {
    offer: Offer,
    finished: bool,
}

impl Pull {
    fn finish(&mut self, done: usize, outcome: Outcome) {
        self.finished = true;
        self.offer.finish(done, outcome);
    }

    /// The peer has taken it back.
    fn withdrawn(&mut self) {
        self.finished = true;
        if self.offer.carried {
            self.offer.finish(0, Outcome::Withdrawn);
        }
    }
}

impl Drop for Pull {
    fn drop(&mut self) {
        if !self.finished {
            self.finish(0, Outcome::Aborted);
        }
    }
}
