//! One batch under way.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use lmc_memory::{ReservedSlot, SealedSlot};
use tokio::sync::oneshot;

use super::agent::{Operation, PostError, Progress, Request};
use super::engine::Peer;
use super::initiators::{Initiators, Kept};
use super::plan::{Part, Plan};
use crate::lease::Pin;
use crate::{Filled, Sent, Slot, TransferError};

/// Requests of one batch that are under way at a time: the next is there when one ends.
const WINDOW: usize = 4;

/// The slots of a batch, and the reply to its caller.
#[derive(Debug)]
pub(super) enum Batch {
    Write {
        objects: Vec<SealedSlot>,
        reply: oneshot::Sender<Sent>,
        /// Number of the send or use that this is.
        send: Option<u64>,
    },
    Read {
        slots: Vec<ReservedSlot>,
        reply: oneshot::Sender<Filled>,
        /// Number of the use that this is.
        send: Option<u64>,
    },
    /// A peer's fetch.
    Serve {
        objects: usize,
        /// Number of the fetch.
        send: u64,
        /// Keeps the leased objects.
        pins: Vec<Pin>,
    },
}

impl Batch {
    /// The offsets of its slots in this side's arena, and their lengths, in bytes.
    pub(super) fn here(&self) -> Vec<(u64, u64)> {
        match self {
            Self::Write { objects, .. } => {
                let objects = objects.iter();
                objects.map(|slot| (slot.offset(), slot.len())).collect()
            }
            Self::Read { slots, .. } => {
                let slots = slots.iter();
                slots.map(|slot| (slot.offset(), slot.len())).collect()
            }
            Self::Serve { .. } => Vec::new(),
        }
    }

    /// Numbers the use that the batch is.
    pub(super) fn with_use(mut self, number: u64) -> Self {
        match &mut self {
            Self::Write { send, .. } | Self::Read { send, .. } => *send = Some(number),
            Self::Serve { .. } => {}
        }
        self
    }

    /// Returns whether the call was dropped.
    pub(super) fn is_dropped(&self) -> bool {
        match self {
            Self::Write { reply, .. } => reply.is_closed(),
            Self::Read { reply, .. } => reply.is_closed(),
            Self::Serve { .. } => false,
        }
    }

    /// Ends a batch of which nothing was begun.
    pub(super) fn refuse(self, error: TransferError) {
        // Where the call was dropped, the slots go back with the reply.
        match self {
            Self::Write { reply, .. } => drop(reply.send(Sent::failed(error))),
            Self::Read { slots, reply, .. } => drop(reply.send(Filled::untouched(slots, error))),
            Self::Serve { .. } => {}
        }
    }
}

/// A batch under way.
#[derive(Debug)]
pub(super) struct Transfer {
    pub(super) peer: Arc<Peer>,
    batch: Batch,
    plan: Plan,
    deadline: Instant,
    /// Generation of the agent that it goes through, from its first request on.
    pub(super) agent: Option<u64>,
    /// The piece to be posted next.
    next: usize,
    posted: VecDeque<(usize, Request)>,
    /// True for each piece that has arrived.
    done: Vec<bool>,
}

/// The state of a batch after a look at it.
#[derive(Debug)]
pub(super) enum Step {
    /// Nothing changed.
    Same,
    /// Something was begun or is done.
    Moved,
    /// Every byte is in place.
    Done,
    /// The batch ends here. `broken`: NIXL's connection to the peer is.
    Ended { error: TransferError, broken: bool },
}

/// The end of a batch that was a send or a use.
#[derive(Debug)]
pub(super) struct SendOver {
    pub(super) send: u64,
    pub(super) done: usize,
    pub(super) idle: bool,
    pub(super) error: Option<TransferError>,
}

impl Transfer {
    /// A batch whose offsets, in bytes from the start of the peer's arena, were checked. `piece`:
    /// bytes of this side's arena that are registered by themselves.
    pub(super) fn new(
        peer: Arc<Peer>,
        batch: Batch,
        offsets: &[u64],
        deadline: Instant,
        piece: u64,
    ) -> Self {
        let part = |((local, len), &remote)| Part { local, remote, len };
        let parts = batch.here().into_iter().zip(offsets).map(part);
        Self::of_parts(peer, batch, parts, deadline, piece)
    }

    /// Plans the transfer of a batch whose objects lie in `parts`.
    pub(super) fn of_parts(
        peer: Arc<Peer>,
        batch: Batch,
        parts: impl Iterator<Item = Part>,
        deadline: Instant,
        piece: u64,
    ) -> Self {
        let (here, there) = (piece.max(1), peer.remote.piece.max(1));
        let plan = Plan::new(parts, here, there);
        Self {
            peer,
            batch,
            deadline,
            agent: None,
            next: 0,
            posted: VecDeque::new(),
            done: vec![false; plan.pieces.len()],
            plan,
        }
    }

    /// Number of the send that it is.
    pub(super) fn send(&self) -> Option<u64> {
        match &self.batch {
            Batch::Write { send, .. } | Batch::Read { send, .. } => *send,
            Batch::Serve { send, .. } => Some(*send),
        }
    }

    /// Objects of the fetch that it is.
    pub(super) fn served(&self) -> Option<usize> {
        match self.batch {
            Batch::Serve { objects, .. } => Some(objects),
            Batch::Write { .. } | Batch::Read { .. } => None,
        }
    }

    fn operation(&self) -> Operation {
        match self.batch {
            Batch::Write { .. } | Batch::Serve { .. } => Operation::Write,
            Batch::Read { .. } => Operation::Read,
        }
    }

    /// Looks at what is under way, and begins one request more.
    pub(super) fn step(&mut self, initiators: &mut Initiators, now: Instant) -> Step {
        if self.batch.is_dropped() {
            let error = TransferError::Closed;
            return Step::Ended {
                error,
                broken: false,
            };
        }
        let mut moved = false;
        if let Some(agent) = self.agent {
            while let Some((piece, request)) = self.posted.front() {
                match initiators.poll(agent, request) {
                    Progress::Done => {
                        self.done[*piece] = true;
                        self.posted.pop_front();
                        moved = true;
                    }
                    Progress::Going => break,
                    Progress::Failed => return self.broken("NIXL says that a request failed"),
                }
            }
        }
        if self.done.iter().all(|done| *done) {
            return Step::Done;
        }
        if now >= self.deadline {
            return Step::Ended {
                error: TransferError::Deadline,
                broken: false,
            };
        }
        if self.posted.len() < WINDOW && self.next < self.plan.pieces.len() {
            match self.agent.or_else(|| initiators.current()) {
                Some(agent) if !initiators.may_touch(&self.peer.remote.agent) => {
                    return self.post(initiators, agent);
                }
                // Until there is one and nothing that was given up is under way, or the deadline.
                Some(_) | None => {}
            }
        }
        if moved { Step::Moved } else { Step::Same }
    }

    fn post(&mut self, initiators: &mut Initiators, agent: u64) -> Step {
        self.agent = Some(agent);
        let (piece, operation) = (self.next, self.operation());
        self.next += 1;
        let parts = self.plan.parts(piece);
        match initiators.post(agent, operation, &self.peer.remote, parts) {
            Ok((_, Progress::Done)) => {
                self.done[piece] = true;
                if self.done.iter().all(|done| *done) {
                    return Step::Done;
                }
                Step::Moved
            }
            Ok((request, _)) => {
                self.posted.push_back((piece, request));
                Step::Moved
            }
            Err(PostError::NotBegun(reason)) => {
                self.next -= 1;
                Step::Ended {
                    error: TransferError::Failed(reason),
                    broken: false,
                }
            }
            Err(PostError::Begun(request, reason)) => {
                self.posted.push_back((piece, request));
                self.broken(&reason)
            }
        }
    }

    fn broken(&self, reason: &str) -> Step {
        let peer = self.peer.id.clone();
        let reason = reason.to_owned();
        let error = TransferError::PeerGone { peer, reason };
        Step::Ended {
            error,
            broken: true,
        }
    }

    /// Ends the batch: answers, and hands what may still be under way to `initiators`.
    /// `failed`: a request of it has. `ended`: the peer's memory is out of reach. What became of
    /// it, where it is a send or a use.
    pub(super) fn end(
        self,
        initiators: &mut Initiators,
        error: Option<TransferError>,
        failed: bool,
        ended: bool,
    ) -> Option<SendOver> {
        let idle = self.posted.is_empty();
        // Of each object: whether all of it is in place, and whether a request may touch it.
        let objects = match &self.batch {
            Batch::Write { objects, .. } => objects.len(),
            Batch::Read { slots, .. } => slots.len(),
            Batch::Serve { objects, .. } => *objects,
        };
        let (mut whole, mut touched) = (vec![true; objects], vec![false; objects]);
        for (piece, done) in self.plan.pieces.iter().zip(&self.done) {
            if !done {
                whole[piece.objects.clone()].fill(false);
            }
        }
        for (piece, _) in &self.posted {
            touched[self.plan.pieces[*piece].objects.clone()].fill(true);
        }
        let leading = whole.iter().take_while(|whole| **whole).count();
        let send = self.send();
        let over = send.map(|send| SendOver {
            send,
            done: leading,
            idle,
            error: error.clone(),
        });
        let mut kept = Kept {
            send: send.map(|send| (self.peer.incarnation, send)),
            ..Kept::default()
        };
        match self.batch {
            Batch::Write { objects, reply, .. } => {
                let under_way = objects.into_iter().zip(&touched).filter(|(_, t)| **t);
                kept.sources = under_way.map(|(slot, _)| slot).collect();
                // Where the call was dropped, so is the reply, here and below.
                let done = leading;
                let idle = idle || ended;
                let _ = reply.send(Sent { done, error, idle });
            }
            Batch::Read { slots, reply, .. } => {
                let mut filled = Vec::with_capacity(slots.len());
                for ((slot, touched), whole) in slots.into_iter().zip(touched).zip(whole) {
                    filled.push(match (touched, whole) {
                        (true, _) => {
                            kept.targets.push(slot.quarantine());
                            Slot::Quarantined
                        }
                        (false, true) => Slot::Written(slot.written()),
                        (false, false) => Slot::Idle(slot),
                    });
                }
                let slots = filled;
                let _ = reply.send(Filled { slots, error });
            }
            Batch::Serve { pins, .. } => kept.pins = pins,
        }
        if let (false, Some(agent)) = (idle, self.agent) {
            let requests = self.posted.into_iter().map(|(_, request)| request);
            let name = &self.peer.remote.agent;
            initiators.keep(agent, name, requests.collect(), kept, failed);
        }
        over
    }
}
