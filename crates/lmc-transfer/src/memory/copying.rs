//! Transfers, and copying them a piece at a time.

use std::sync::Arc;
use std::time::Instant;

use lmc_memory::{Arena, ReservedSlot, SealedSlot};

use super::raw;
use super::state::{EndId, State};
use crate::cell::Cell;
use crate::{Filled, PeerId, Sent, Slot, TransferError};

/// Bytes that are copied before the next transfer has its turn.
const PIECE: usize = 256 << 10;

/// A result on its way to who waits for it; handed over without locks.
pub(super) type Delivery = Box<dyn FnOnce() + Send>;

/// One that called, and waits.
#[derive(Debug)]
pub(super) struct Party<T> {
    /// What the call knows it by.
    pub(super) number: u64,
    pub(super) end: EndId,
    pub(super) peer: EndId,
    pub(super) peer_id: PeerId,
    pub(super) deadline: Instant,
    pub(super) cell: Arc<Cell<T>>,
}

impl<T: Send + 'static> Party<T> {
    /// Why it goes no further.
    pub(super) fn stopped(&self, state: &State, now: Instant) -> Option<TransferError> {
        let Some(end) = state.end(self.end) else {
            return Some(TransferError::Closed);
        };
        if end.peers.get(&self.peer_id) != Some(&self.peer) {
            return Some(TransferError::PeerGone {
                peer: self.peer_id.clone(),
                reason: "its channel ended".to_owned(),
                quiet: true,
            });
        }
        (now >= self.deadline).then_some(TransferError::Deadline { quiet: true })
    }

    pub(super) fn deliver(self, value: T) -> Delivery {
        Box::new(move || self.cell.put(value))
    }
}

/// A send or a receive that waits for the other half.
#[derive(Debug)]
pub(super) struct Half {
    pub(super) tag: u64,
    pub(super) what: Paired,
}

#[derive(Debug)]
pub(super) enum Paired {
    Send(Party<Sent>, Vec<SealedSlot>),
    Receive(Party<Filled>, Vec<ReservedSlot>),
}

impl Half {
    pub(super) fn number(&self) -> u64 {
        match &self.what {
            Paired::Send(party, _) => party.number,
            Paired::Receive(party, _) => party.number,
        }
    }

    pub(super) fn deadline(&self) -> Instant {
        match &self.what {
            Paired::Send(party, _) => party.deadline,
            Paired::Receive(party, _) => party.deadline,
        }
    }

    pub(super) fn stopped(&self, state: &State, now: Instant) -> Option<TransferError> {
        match &self.what {
            Paired::Send(party, _) => party.stopped(state, now),
            Paired::Receive(party, _) => party.stopped(state, now),
        }
    }

    pub(super) fn fail(self, error: TransferError) -> Delivery {
        match self.what {
            Paired::Send(party, _) => party.deliver(Sent::failed(error)),
            Paired::Receive(party, slots) => party.deliver(Filled::untouched(slots, error)),
        }
    }

    /// Whether the two are the halves of one transfer.
    pub(super) fn fits(&self, other: &Self) -> bool {
        let ends = match (&self.what, &other.what) {
            (Paired::Send(from, _), Paired::Receive(to, _))
            | (Paired::Receive(to, _), Paired::Send(from, _)) => {
                from.end == to.peer
                    && from.peer == to.end
                    && !from.cell.is_dropped()
                    && !to.cell.is_dropped()
            }
            _ => false,
        };
        ends && self.tag == other.tag
    }
}

/// What is copied, from where to where. It keeps everything that it touches.
#[derive(Debug)]
enum Work {
    Write {
        party: Party<Sent>,
        objects: Vec<SealedSlot>,
        arena: Arc<Arena>,
        places: Vec<u64>,
    },
    Read {
        party: Party<Filled>,
        slots: Vec<ReservedSlot>,
        arena: Arc<Arena>,
        places: Vec<u64>,
    },
    Pair {
        sender: Party<Sent>,
        objects: Vec<SealedSlot>,
        receiver: Party<Filled>,
        slots: Vec<ReservedSlot>,
    },
}

/// A transfer under way.
#[derive(Debug)]
pub(super) struct Copy {
    work: Work,
    /// Objects that are done.
    done: usize,
    /// Bytes of the next one that are done.
    at: usize,
}

/// How it goes on.
pub(super) enum Turn {
    /// Another piece may be copied.
    Further(Copy),
    /// It is over.
    Over(Vec<Delivery>),
}

impl Copy {
    pub(super) fn write(
        party: Party<Sent>,
        objects: Vec<SealedSlot>,
        arena: Arc<Arena>,
        places: Vec<u64>,
    ) -> Self {
        Self::new(Work::Write {
            party,
            objects,
            arena,
            places,
        })
    }

    pub(super) fn read(
        party: Party<Filled>,
        slots: Vec<ReservedSlot>,
        arena: Arc<Arena>,
        places: Vec<u64>,
    ) -> Self {
        Self::new(Work::Read {
            party,
            slots,
            arena,
            places,
        })
    }

    /// Two halves that fit.
    ///
    /// # Errors
    /// What both are told where their lengths do not agree.
    pub(super) fn pair(one: Half, other: Half) -> Result<Self, Vec<Delivery>> {
        let (sender, objects, receiver, slots) = match (one.what, other.what) {
            (Paired::Send(sender, objects), Paired::Receive(receiver, slots))
            | (Paired::Receive(receiver, slots), Paired::Send(sender, objects)) => {
                (sender, objects, receiver, slots)
            }
            (one, other) => unreachable!("two halves of one kind: {one:?}, {other:?}"),
        };
        let room = |place: usize| slots.get(place).map_or(0, ReservedSlot::len);
        let wrong = |(place, object): (usize, &SealedSlot)| {
            (object.len() != room(place)).then(|| TransferError::Length {
                place,
                sent: object.len(),
                room: room(place),
            })
        };
        if let Some(error) = objects.iter().enumerate().find_map(wrong) {
            return Err(vec![
                sender.deliver(Sent::failed(error.clone())),
                receiver.deliver(Filled::untouched(slots, error)),
            ]);
        }
        Ok(Self::new(Work::Pair {
            sender,
            objects,
            receiver,
            slots,
        }))
    }

    fn new(work: Work) -> Self {
        Self {
            work,
            done: 0,
            at: 0,
        }
    }

    /// Whether it touches the memory of a side.
    pub(super) fn touches(&self, end: EndId) -> bool {
        let (one, other) = match &self.work {
            Work::Write { party, .. } => (party.end, party.peer),
            Work::Read { party, .. } => (party.end, party.peer),
            Work::Pair { sender, .. } => (sender.end, sender.peer),
        };
        one == end || other == end
    }

    /// Copies the next piece. No lock is held meanwhile.
    pub(super) fn step(&mut self) {
        let mut room = PIECE;
        while room > 0 && self.done < self.objects() {
            let (place, at) = (self.done, self.at);
            let len = match &mut self.work {
                Work::Write {
                    objects,
                    arena,
                    places,
                    ..
                } => {
                    let len = room.min(objects[place].len() as usize - at);
                    raw::write(&objects[place], at, arena, places[place] + at as u64, len);
                    len
                }
                Work::Read {
                    slots,
                    arena,
                    places,
                    ..
                } => {
                    let len = room.min(slots[place].len() as usize - at);
                    raw::read(arena, places[place] + at as u64, &mut slots[place], at, len);
                    len
                }
                Work::Pair { objects, slots, .. } => {
                    let bytes = &objects[place].bytes()[at..];
                    let bytes = &bytes[..room.min(bytes.len())];
                    slots[place].bytes_mut()[at..at + bytes.len()].copy_from_slice(bytes);
                    bytes.len()
                }
            };
            room -= len;
            self.at += len;
            if self.at as u64 == self.bytes(place) {
                (self.done, self.at) = (place + 1, 0);
            }
        }
    }

    fn objects(&self) -> usize {
        match &self.work {
            Work::Write { objects, .. } | Work::Pair { objects, .. } => objects.len(),
            Work::Read { slots, .. } => slots.len(),
        }
    }

    fn bytes(&self, place: usize) -> u64 {
        match &self.work {
            Work::Write { objects, .. } | Work::Pair { objects, .. } => objects[place].len(),
            Work::Read { slots, .. } => slots[place].len(),
        }
    }

    /// Ends it where it is done or nobody wants it any more.
    pub(super) fn turn(self, state: &State, now: Instant) -> Turn {
        let whole = self.done == self.objects();
        let (to_sender, to_receiver) = match &self.work {
            Work::Write { party, .. } => (party.stopped(state, now), None),
            Work::Read { party, .. } => (None, party.stopped(state, now)),
            Work::Pair {
                sender, receiver, ..
            } => (sender.stopped(state, now), receiver.stopped(state, now)),
        };
        let dropped = match &self.work {
            Work::Write { party, .. } => party.cell.is_dropped(),
            Work::Read { party, .. } => party.cell.is_dropped(),
            Work::Pair {
                sender, receiver, ..
            } => sender.cell.is_dropped() || receiver.cell.is_dropped(),
        };
        if !whole && to_sender.is_none() && to_receiver.is_none() && !dropped {
            return Turn::Further(self);
        }
        // Who has no reason of its own is told of the other's.
        let error = |own: Option<TransferError>| {
            (!whole).then(|| {
                own.unwrap_or_else(|| TransferError::Failed {
                    reason: "the other side gave up".to_owned(),
                    quiet: true,
                })
            })
        };
        let done = self.done;
        let sent = |own| Sent {
            done,
            error: error(own),
        };
        let filled = |slots: Vec<ReservedSlot>, own| Filled {
            slots: slots
                .into_iter()
                .enumerate()
                .map(|(place, slot)| match place < done {
                    true => Slot::Written(slot.written()),
                    false => Slot::Quiet(slot),
                })
                .collect(),
            error: error(own),
        };
        Turn::Over(match self.work {
            Work::Write { party, .. } => vec![party.deliver(sent(to_sender))],
            Work::Read { party, slots, .. } => vec![party.deliver(filled(slots, to_receiver))],
            Work::Pair {
                sender,
                receiver,
                slots,
                ..
            } => vec![
                receiver.deliver(filled(slots, to_receiver)),
                sender.deliver(sent(to_sender)),
            ],
        })
    }
}
