//! Sending to a peer that receives.
//!
//! The sender offers; the receiver reads the offered objects as it would any others, and says
//! when it is done. So bytes go into slots in one way only.

use std::sync::Arc;
use std::time::Instant;

use lmc_memory::{ReservedSlot, SealedSlot};
use tokio::sync::oneshot;

use super::connection::{Connection, Offered, Outgoing};
use super::frame::{Frame, Outcome, Segment, reason};
use super::rendezvous::{Offer, room_of};
use super::shared::Shared;
use crate::{Filled, PeerId, Sent, TransferError, checks};

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
            let id = connection.next_id();
            let offered = Offered {
                objects: Arc::new(objects),
                finish,
                pulled: false,
                room,
            };
            connection.offers.lock().insert(id, offered);
            offering = Some(Offering {
                connection: Arc::clone(&connection),
                id,
            });
            if connection.end().is_some() {
                return None;
            }
            let offer = Frame::Offer {
                id,
                tag,
                objects: segments,
            };
            connection.say(0, &offer);
            finished.await.ok()
        };
        let error = match self.within(deadline, offer).await {
            Ok(Some((done, outcome))) => return finished(count, done, outcome),
            Ok(None) => match self.within(deadline, connection.gone(true)).await {
                Ok(error) => error,
                Err(stop) => stop.error(true),
            },
            Err(stop) => stop.error(offering.as_mut().is_none_or(Offering::withdraw)),
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
                let mut waiting = connection.rendezvous.receive(tag)?;
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
            let places: Vec<u64> = pull.offer.objects.iter().map(|o| o.offset).collect();
            let (from, id) = (Arc::clone(&pull.offer.connection), pull.offer.id);
            let fetched = self.fetch(&from, Some(id), slots, &places, deadline).await;
            if fetched.withdrawn && fetched.error.is_none() {
                // It was not sent after all: this waits for what will be.
                pull.finished = true;
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
}

impl Offering {
    /// Whether the peer had not begun to read it, and will not.
    fn withdraw(&mut self) -> bool {
        let offered = self.connection.offers.lock().remove(&self.id);
        let Some(Offered { room, pulled, .. }) = offered else {
            return false;
        };
        let withdraw = Frame::Withdraw { id: self.id };
        // Until it is sent the offer counts: a peer that takes nothing gets no more of them.
        self.connection.lanes[0].push(Outgoing {
            _room: Some(room),
            ..Outgoing::of(withdraw.encode())
        });
        !pulled
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
        let finish = Frame::Finish {
            id: self.offer.id,
            done: done as u64,
            outcome,
        };
        self.offer.connection.say(0, &finish);
    }
}

impl Drop for Pull {
    fn drop(&mut self) {
        if !self.finished {
            self.finish(0, Outcome::Aborted);
        }
    }
}
