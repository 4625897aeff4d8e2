//! Reads and writes that only this side calls for.

use std::sync::Arc;
use std::time::{Duration, Instant};

use lmc_memory::{ReservedSlot, SealedSlot};
use tokio::sync::oneshot;

use super::connection::{Connection, Outgoing, Payload, Pending, Progress, Reply, Source};
use super::frame::{Frame, Outcome, Segment};
use super::landing::Landing;
use super::shared::{Shared, Stop};
use super::spread::{Portion, spread};
use crate::{Filled, Index, PeerId, Sent, Slot, TransferError, checks};

/// Time that a peer has, after a write's deadline, to say that it has seen the breaking off.
const GRACE: Duration = Duration::from_millis(50);

/// The connection to a peer, and where objects lie in its arena: bytes from the start.
type Places = (Arc<Connection>, Vec<u64>);

/// What became of the objects of a batch.
struct Tally {
    /// Parts of each object that are not yet in place.
    left: Vec<u32>,
    error: Option<TransferError>,
    /// Whether the peer said that the offer was taken back before all of it was read.
    withdrawn: bool,
}

impl Tally {
    fn new(objects: usize) -> Self {
        Self {
            left: vec![0; objects],
            error: None,
            withdrawn: false,
        }
    }

    fn expect(&mut self, portions: &[Portion]) {
        for portion in portions {
            self.left[portion.place] += 1;
        }
    }

    fn settle(&mut self, portions: &[Portion], reply: Reply) {
        let error = match reply {
            Reply::Outcome(Outcome::Done) => {
                self.arrived(portions, &[]);
                return;
            }
            Reply::Arrived { bad, aborted } => {
                if !aborted {
                    self.arrived(portions, &bad);
                }
                let bad = bad.first().and_then(|bad| portions.get(*bad as usize));
                match bad {
                    Some(portion) => TransferError::Corrupt {
                        place: portion.place,
                    },
                    None if aborted => TransferError::Refused("broken off".into()),
                    None => return,
                }
            }
            Reply::Outcome(Outcome::Corrupt(segment)) => match portions.get(segment as usize) {
                Some(portion) => TransferError::Corrupt {
                    place: portion.place,
                },
                None => TransferError::Refused("no such segment was sent".into()),
            },
            Reply::Outcome(Outcome::Withdrawn) => {
                self.withdrawn = true;
                return;
            }
            // By this side, whose call says why.
            Reply::Outcome(Outcome::Aborted) => return,
            Reply::Outcome(Outcome::Refused(why)) => TransferError::Refused(why),
            Reply::Outcome(Outcome::Length { place, sent, room }) => TransferError::Length {
                place: place as usize,
                sent,
                room,
            },
        };
        self.error.get_or_insert(error);
    }

    fn arrived(&mut self, portions: &[Portion], bad: &[u32]) {
        for (number, portion) in (0..).zip(portions) {
            if !bad.contains(&number) {
                self.left[portion.place] -= 1;
            }
        }
    }
}

/// Objects that were to be fetched into slots.
pub(super) struct Fetched {
    pub(super) slots: Vec<ReservedSlot>,
    /// For each object whether all of it lies in its slot. There may be more slots.
    pub(super) whole: Vec<bool>,
    pub(super) error: Option<TransferError>,
    pub(super) withdrawn: bool,
}

impl Fetched {
    pub(super) fn done(&self) -> usize {
        self.whole.iter().take_while(|whole| **whole).count()
    }

    pub(super) fn into_filled(self) -> Filled {
        let whole = self.whole.into_iter().chain(std::iter::repeat(false));
        let slot = |(slot, whole): (ReservedSlot, bool)| match whole {
            true => Slot::Written(slot.written()),
            false => Slot::Quiet(slot),
        };
        Filled {
            slots: self.slots.into_iter().zip(whole).map(slot).collect(),
            error: self.error,
        }
    }
}

impl Shared {
    pub(super) async fn read(
        &self,
        slots: Vec<ReservedSlot>,
        peer: &PeerId,
        indices: &[Index],
        deadline: Instant,
    ) -> Filled {
        self.counters.operations.add(1);
        let lens = slots.iter().map(ReservedSlot::len);
        let checked = checks::slots(self.window.arena(), &slots)
            .and_then(|()| self.places(lens, peer, indices, deadline));
        let (connection, places) = match checked {
            Ok(Some(checked)) => checked,
            Ok(None) => {
                return Filled {
                    slots: Vec::new(),
                    error: None,
                };
            }
            Err(error) => return Filled::untouched(slots, error),
        };
        let fetched = self.fetch(&connection, None, slots, &places, deadline);
        fetched.await.into_filled()
    }

    /// What can be said before a byte moves. None: there is nothing to do.
    fn places(
        &self,
        lens: impl ExactSizeIterator<Item = u64>,
        peer: &PeerId,
        indices: &[Index],
        deadline: Instant,
    ) -> Result<Option<Places>, TransferError> {
        if self.is_closed() {
            return Err(TransferError::Closed);
        }
        if lens.len() == 0 && indices.is_empty() {
            return Ok(None);
        }
        let connection = self.connection(peer)?;
        let remote = &connection.remote;
        let places = checks::places(lens, indices, remote.unit, remote.arena)?;
        if Instant::now() >= deadline {
            return Err(TransferError::Deadline { quiet: true });
        }
        Ok(Some((connection, places)))
    }

    /// Reads objects from places of the peer's arena into the first slots; those of an offer
    /// while that stands.
    pub(super) async fn fetch(
        &self,
        connection: &Arc<Connection>,
        offer: Option<u64>,
        slots: Vec<ReservedSlot>,
        places: &[u64],
        deadline: Instant,
    ) -> Fetched {
        let mut landing = Landing::new(slots);
        let objects = landing.slots().iter().zip(places).enumerate();
        let objects = objects.map(|(place, (slot, &remote))| Portion {
            place,
            local: Segment {
                offset: slot.offset(),
                len: slot.len(),
            },
            remote,
        });
        let frames = spread(objects, connection.lanes.len());
        let first = connection.next_lane(bytes_of(&frames));
        let mut tally = Tally::new(places.len());
        frames
            .iter()
            .for_each(|(_, portions)| tally.expect(portions));

        let mut requests: Vec<(Vec<Portion>, oneshot::Receiver<Reply>)> = Vec::new();
        let ask = async {
            for (stream, portions) in frames {
                let lane = &connection.lanes[(first + stream) % connection.lanes.len()];
                let room = lane.acquire().await?;
                let id = connection.next_id();
                let target = landing.open(portions.iter().map(|p| p.local).collect());
                let (reply, replied) = oneshot::channel();
                let pending = Pending {
                    target: Some(target),
                    reply,
                    room,
                };
                let frame = Frame::Read {
                    id,
                    offer,
                    segments: portions.iter().map(Portion::at_peer).collect(),
                };
                let outgoing = Outgoing::of(frame.encode());
                if !lane.request(id, pending, outgoing) {
                    return None;
                }
                requests.push((portions, replied));
            }
            for (portions, reply) in &mut requests {
                tally.settle(portions, reply.await.ok()?);
                portions.clear();
            }
            Some(())
        };
        let asked = self.within(deadline, ask).await;
        if asked != Ok(Some(())) {
            let error = match asked {
                Err(stop) => stop.error(true),
                Ok(_) => match self.within(deadline, connection.gone(true)).await {
                    Ok(error) => error,
                    Err(stop) => stop.error(true),
                },
            };
            tally.error.get_or_insert(error);
        }
        // From here on nothing arrives; what did before the end counts.
        let slots = landing.close();
        for (portions, mut reply) in requests {
            if let Ok(reply) = reply.try_recv() {
                tally.settle(&portions, reply);
            }
        }
        let whole = tally.left.iter().all(|left| *left == 0);
        let withdrawn = tally.withdrawn && offer.is_some();
        if !whole && !withdrawn && tally.error.is_none() {
            let reason = "the peer sent less than it was asked for".into();
            let quiet = true;
            tally.error = Some(TransferError::Failed { reason, quiet });
        }
        Fetched {
            slots,
            whole: tally.left.iter().map(|left| *left == 0).collect(),
            error: tally.error,
            withdrawn,
        }
    }

    pub(super) async fn write(
        &self,
        objects: Vec<SealedSlot>,
        peer: &PeerId,
        indices: &[Index],
        deadline: Instant,
    ) -> Sent {
        self.counters.operations.add(1);
        let lens = objects.iter().map(SealedSlot::len);
        let checked = checks::slots(self.window.arena(), &objects)
            .and_then(|()| self.places(lens, peer, indices, deadline));
        let (connection, places) = match checked {
            Ok(Some(checked)) => checked,
            Ok(None) => return Sent::all(0),
            Err(error) => return Sent::failed(error),
        };
        let portions = objects.iter().zip(places).enumerate();
        let portions = portions.map(|(place, (slot, remote))| Portion {
            place,
            local: Segment {
                offset: slot.offset(),
                len: slot.len(),
            },
            remote,
        });
        let portions: Vec<Portion> = portions.collect();
        let frames = spread(portions.iter().copied(), connection.lanes.len());
        let first = connection.next_lane(bytes_of(&frames));
        let mut tally = Tally::new(objects.len());
        frames
            .iter()
            .for_each(|(_, portions)| tally.expect(portions));

        let objects = Arc::new(objects);
        let mut sending: Vec<Sending> = Vec::new();
        let put = async {
            for (stream, portions) in frames {
                let lane = &connection.lanes[(first + stream) % connection.lanes.len()];
                let room = lane.acquire().await?;
                let id = connection.next_id();
                let (reply, replied) = oneshot::channel();
                let pending = Pending {
                    target: None,
                    reply,
                    room,
                };
                let frame = Frame::Write {
                    id,
                    segments: portions.iter().map(Portion::at_peer).collect(),
                };
                let progress = Arc::new(Progress::new(id, Arc::clone(&objects)));
                let outgoing = Outgoing {
                    payload: Some(Payload {
                        segments: portions.iter().map(|p| p.local).collect(),
                        source: Source::Write(Arc::clone(&progress)),
                    }),
                    ..Outgoing::of(frame.encode())
                };
                if !lane.request(id, pending, outgoing) {
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
        match self.within(deadline, put).await {
            Ok(Some(())) => {}
            Ok(None) => {
                let quiet = cancel_all(&mut sending);
                let gone = self.within(deadline, connection.gone(quiet)).await;
                let error = gone.unwrap_or_else(|stop| stop.error(quiet));
                tally.error.get_or_insert(error);
            }
            Err(Stop::Closed) => {
                tally.error.get_or_insert(TransferError::Closed);
            }
            Err(Stop::Deadline) => {
                let mut quiet = cancel_all(&mut sending);
                if !quiet {
                    let rest = await_all(&mut sending, &mut tally);
                    let seen = self.within(Instant::now() + GRACE, rest).await;
                    quiet = seen == Ok(Some(()));
                }
                tally.error.get_or_insert(TransferError::Deadline { quiet });
            }
        }
        let done = tally.left.iter().take_while(|left| **left == 0).count();
        let error = tally.error;
        if error.is_none() && done < tally.left.len() {
            let reason = "the peer answered less than it was asked".into();
            return Sent {
                done,
                error: Some(TransferError::Failed {
                    reason,
                    quiet: false,
                }),
            };
        }
        Sent { done, error }
    }
}

fn bytes_of(frames: &[(usize, Vec<Portion>)]) -> u64 {
    let portions = frames.iter().flat_map(|(_, portions)| portions);
    portions.map(|portion| portion.local.len).sum()
}

/// A frame of a write that is under way. Broken off when dropped.
struct Sending {
    progress: Arc<Progress>,
    portions: Vec<Portion>,
    reply: oneshot::Receiver<Reply>,
    /// Answered, or never to be sent.
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

/// Breaks all off; whether the peer's memory is quiet.
fn cancel_all(sending: &mut [Sending]) -> bool {
    sending.iter_mut().for_each(Sending::cancel);
    sending.iter().all(|sending| sending.over)
}

/// Waits for all answers; none when the connection ended first.
async fn await_all(sending: &mut [Sending], tally: &mut Tally) -> Option<()> {
    for sending in sending.iter_mut().filter(|sending| !sending.over) {
        let reply = (&mut sending.reply).await.ok()?;
        sending.over = true;
        tally.settle(&sending.portions, reply);
    }
    Some(())
}
