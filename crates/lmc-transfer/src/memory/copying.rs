//! Transfers, and copying them a piece at a time.

use std::sync::Arc;
use std::time::Instant;

use lmc_memory::{Arena, ReservedSlot, SealedSlot};
use tokio::sync::oneshot;

use super::raw;
use super::state::{EndId, State};
use crate::lease::Granted;
use crate::{Filled, PeerId, Sent, Slot, TransferError};

/// Bytes that are copied before the next transfer has its turn.
const PIECE: usize = 256 << 10;

/// Hands an outcome over; called without locks.
pub(super) type Delivery = Box<dyn FnOnce() + Send>;

/// A caller that waits.
#[derive(Debug)]
pub(super) struct Party<T> {
    /// Number of the call.
    pub(super) number: u64,
    pub(super) end: EndId,
    pub(super) peer: EndId,
    pub(super) peer_id: PeerId,
    pub(super) deadline: Instant,
    pub(super) reply: oneshot::Sender<T>,
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
            });
        }
        (now >= self.deadline).then_some(TransferError::Deadline)
    }

    pub(super) fn deliver(self, value: T) -> Delivery {
        Box::new(move || drop(self.reply.send(value)))
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

    /// Returns whether the two are the halves of one transfer.
    pub(super) fn fits(&self, other: &Self) -> bool {
        let ends = match (&self.what, &other.what) {
            (Paired::Send(from, _), Paired::Receive(to, _))
            | (Paired::Receive(to, _), Paired::Send(from, _)) => {
                from.end == to.peer
                    && from.peer == to.end
                    && !from.reply.is_closed()
                    && !to.reply.is_closed()
            }
            _ => false,
        };
        ends && self.tag == other.tag
    }
}

/// A range of the other side's arena.
#[derive(Debug)]
pub(super) struct Far {
    pub(super) offset: u64,
    /// `None` where the arena is open.
    pub(super) lease: Option<Arc<Granted>>,
}

/// The source and the target of a copy. It keeps everything that it touches.
#[derive(Debug)]
enum Work {
    Write {
        party: Party<Sent>,
        objects: Vec<SealedSlot>,
        arena: Arc<Arena>,
        far: Vec<Far>,
    },
    Read {
        party: Party<Filled>,
        slots: Vec<ReservedSlot>,
        arena: Arc<Arena>,
        far: Vec<Far>,
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
    /// The object whose lease does not stand any more.
    revoked: Option<usize>,
}

/// The next step of a copy.
pub(super) enum Turn {
    /// Another piece may be copied.
    Further(Copy),
    /// The copy has ended.
    Over(Vec<Delivery>),
}

impl Copy {
    pub(super) fn write(
        party: Party<Sent>,
        objects: Vec<SealedSlot>,
        arena: Arc<Arena>,
        far: Vec<Far>,
    ) -> Self {
        Self::new(Work::Write {
            party,
            objects,
            arena,
            far,
        })
    }

    pub(super) fn read(
        party: Party<Filled>,
        slots: Vec<ReservedSlot>,
        arena: Arc<Arena>,
        far: Vec<Far>,
    ) -> Self {
        Self::new(Work::Read {
            party,
            slots,
            arena,
            far,
        })
    }

    /// Two halves that fit.
    ///
    /// # Errors
    /// The outcomes of both where their lengths differ.
    pub(super) fn pair(one: Half, other: Half) -> Result<Self, Vec<Delivery>> {
        let (sender, objects, receiver, slots) = match (one.what, other.what) {
            (Paired::Send(sender, objects), Paired::Receive(receiver, slots))
            | (Paired::Receive(receiver, slots), Paired::Send(sender, objects)) => {
                (sender, objects, receiver, slots)
            }
            (one, other) => unreachable!("two halves of one kind: {one:?}, {other:?}"),
        };
        let capacity = |object: usize| slots.get(object).map_or(0, ReservedSlot::len);
        let wrong = |(object, sent): (usize, &SealedSlot)| {
            (sent.len() != capacity(object)).then(|| TransferError::Length {
                object,
                sent: sent.len(),
                capacity: capacity(object),
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
            revoked: None,
        }
    }

    /// Returns whether it touches the memory of a side.
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
        let mut left = PIECE;
        while left > 0 && self.done < self.objects() {
            let (object, at) = (self.done, self.at);
            let lease = match &self.work {
                Work::Write { far, .. } | Work::Read { far, .. } => far[object].lease.as_ref(),
                Work::Pair { .. } => None,
            };
            let pin = lease.map(|granted| granted.pin());
            if matches!(pin, Some(None)) {
                self.revoked = Some(object);
                return;
            }
            let len = match &mut self.work {
                Work::Write {
                    objects,
                    arena,
                    far,
                    ..
                } => {
                    let len = left.min(objects[object].len() as usize - at);
                    let offset = far[object].offset + at as u64;
                    raw::write(&objects[object], at, arena, offset, len);
                    len
                }
                Work::Read {
                    slots, arena, far, ..
                } => {
                    let len = left.min(slots[object].len() as usize - at);
                    let offset = far[object].offset + at as u64;
                    raw::read(arena, offset, &mut slots[object], at, len);
                    len
                }
                Work::Pair { objects, slots, .. } => {
                    let bytes = &objects[object].bytes()[at..];
                    let bytes = &bytes[..left.min(bytes.len())];
                    slots[object].bytes_mut()[at..at + bytes.len()].copy_from_slice(bytes);
                    bytes.len()
                }
            };
            left -= len;
            self.at += len;
            if self.at as u64 == self.bytes(object) {
                (self.done, self.at) = (object + 1, 0);
            }
        }
    }

    fn objects(&self) -> usize {
        match &self.work {
            Work::Write { objects, .. } | Work::Pair { objects, .. } => objects.len(),
            Work::Read { slots, .. } => slots.len(),
        }
    }

    fn bytes(&self, object: usize) -> u64 {
        match &self.work {
            Work::Write { objects, .. } | Work::Pair { objects, .. } => objects[object].len(),
            Work::Read { slots, .. } => slots[object].len(),
        }
    }

    /// Ends the copy when it is done or no longer wanted.
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
            Work::Write { party, .. } => party.reply.is_closed(),
            Work::Read { party, .. } => party.reply.is_closed(),
            Work::Pair {
                sender, receiver, ..
            } => sender.reply.is_closed() || receiver.reply.is_closed(),
        };
        let revoked = self.revoked;
        let goes_on = to_sender.is_none() && to_receiver.is_none() && revoked.is_none();
        if !whole && goes_on && !dropped {
            return Turn::Further(self);
        }
        // A side without a reason of its own gets the other's.
        let error = |own: Option<TransferError>| {
            let other = || match revoked {
                Some(object) => TransferError::NotLeased { object },
                None => TransferError::Failed("the other side gave up".to_owned()),
            };
            (!whole).then(|| own.unwrap_or_else(other))
        };
        let done = self.done;
        let sent = |own| Sent {
            done,
            error: error(own),
            idle: true,
        };
        let filled = |slots: Vec<ReservedSlot>, own| Filled {
            slots: slots
                .into_iter()
                .enumerate()
                .map(|(object, slot)| match object < done {
                    true => Slot::Written(slot.written()),
                    false => Slot::Idle(slot),
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
