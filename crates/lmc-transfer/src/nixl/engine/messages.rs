//! Messages of peers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use lmc_memory::SealedSlot;

use super::{Asking, Engine, Peer};
use crate::lease::{Access, Denied, Pin, Range, Region};
use crate::nixl::paired::Outbox;
use crate::nixl::plan::Part;
use crate::nixl::transfers::{Batch, Transfer};
use crate::nixl::wire::{FETCH, Message, USE, reason};
use crate::{MAX_BATCH, Rights, Sent, TransferError};

/// Batches that one peer may have fetched at a time.
const SERVED: usize = 1024;
/// Objects in them, at most.
const SERVED_OBJECTS: usize = 16 * MAX_BATCH;
/// A fetch is given up after this long at most; its reader says when it does so.
const SERVE: Duration = Duration::from_secs(600);

/// A fetch is given up so long after its reader's deadline.
const SLACK: Duration = Duration::from_secs(2);

/// Ranges of this side's memory that a peer may move: their offsets, and what keeps them.
type Resolved = (Vec<u64>, Vec<Pin>);

impl Engine {
    pub(super) fn heard(&mut self, number: u64, message: Message) {
        let from = self.state.peers.values_mut().find_map(|connected| {
            let mut links = connected.links.iter_mut();
            let link = links.find(|link| link.number == number)?;
            link.used |= message != Message::Settled;
            Some(Arc::clone(&connected.peer))
        });
        let Some(peer) = from else {
            return;
        };
        let mut outbox = Outbox::new();
        match message {
            Message::Settled => self.settle(peer.incarnation, Instant::now()),
            Message::Offer { send, tag, lens } => {
                if lens.len() > MAX_BATCH || send & (FETCH | USE) != 0 {
                    outbox.push((peer, Message::Cancel { send }));
                } else if self.state.closing.is_none() {
                    let paired = &mut self.state.paired;
                    paired.offered(&peer, send, tag, lens, &mut outbox);
                }
            }
            Message::Withdraw { send } => self.state.paired.withdrawn(&peer, send, &mut outbox),
            Message::Offsets { send, offsets } => {
                self.answered(&peer, send, &offsets, &mut outbox);
            }
            Message::Unfit {
                send,
                object,
                sent,
                capacity,
            } => {
                let object = usize::try_from(object).unwrap_or(usize::MAX);
                let error = TransferError::Length {
                    object,
                    sent,
                    capacity,
                };
                self.state.paired.refused(&peer, send, error);
            }
            Message::Fetch {
                send,
                ranges,
                offsets,
                millis,
            } => match self.serve(&peer, send, &ranges, &offsets, millis) {
                Ok(()) => {}
                Err(Unserved::Denied(denied)) => outbox.push((peer, denied)),
                Err(Unserved::Invalid(why)) => {
                    let over = Message::Over {
                        send,
                        done: 0,
                        idle: true,
                        reason: Some(why),
                    };
                    outbox.push((peer, over));
                }
            },
            Message::Use {
                send,
                write,
                ranges,
            } => {
                if let Some(answer) = self.lend(&peer, send, write, &ranges) {
                    outbox.push((peer, answer));
                }
            }
            Message::Used { send, offsets } => self.used(&peer, send, &offsets, &mut outbox),
            Message::Denied {
                send,
                object,
                read_only,
            } => {
                let object = usize::try_from(object).unwrap_or(usize::MAX);
                let error = match read_only {
                    true => TransferError::ReadOnly,
                    false => TransferError::NotLeased { object },
                };
                match self.take_asking(&peer, send) {
                    Some(asking) => asking.batch.refuse(error),
                    None => self.state.paired.denied(&peer, send, error),
                }
            }
            Message::Cancel { send } => self.cancelled(&peer, send),
            Message::Over {
                send,
                done,
                idle,
                reason: why,
            } => {
                let why = why.map(|why| reason(&why));
                match send & USE {
                    0 => self.state.paired.over(&peer, send, done, idle, why),
                    _ if idle => drop(self.state.uses.remove(&(peer.incarnation, send))),
                    // The same comes again.
                    _ => {}
                }
            }
        }
        self.send(outbox);
    }

    /// The receiver of a send has answered.
    fn answered(&mut self, peer: &Arc<Peer>, send: u64, offsets: &[u64], outbox: &mut Outbox) {
        let Some(sending) = self.state.paired.answered(peer, send) else {
            return;
        };
        let lens = sending.objects.iter().map(SealedSlot::len);
        match inside(lens, offsets, peer.remote.len) {
            Ok(()) => {
                let batch = Batch::Write {
                    objects: sending.objects,
                    reply: sending.reply,
                    send: Some(send),
                };
                let peer = Arc::clone(peer);
                let deadline = sending.deadline;
                let transfer = Transfer::new(peer, batch, offsets, deadline, self.piece);
                self.state.transfers.push(transfer);
            }
            Err(why) => {
                let over = Message::Over {
                    send,
                    done: 0,
                    idle: true,
                    reason: Some(why.clone()),
                };
                outbox.push((Arc::clone(peer), over));
                let sent = Sent::failed(TransferError::Failed(why));
                let _ = sending.reply.send(sent);
            }
        }
    }

    fn take_asking(&mut self, peer: &Peer, send: u64) -> Option<Asking> {
        let its = self.state.asking.get(&send)?.peer.incarnation == peer.incarnation;
        its.then(|| self.state.asking.remove(&send)).flatten()
    }

    /// A peer has granted the use of leased ranges.
    fn used(&mut self, peer: &Arc<Peer>, send: u64, offsets: &[u64], outbox: &mut Outbox) {
        // Where nothing waits any more, the use was given back already.
        let Some(asking) = self.take_asking(peer, send) else {
            return;
        };
        let here = asking.batch.here();
        match inside(here.iter().map(|(_, len)| *len), offsets, peer.remote.len) {
            Ok(()) => {
                let (batch, deadline) = (asking.batch, asking.deadline);
                let transfer = Transfer::new(asking.peer, batch, offsets, deadline, self.piece);
                self.state.transfers.push(transfer);
            }
            Err(why) => {
                let over = Message::Over {
                    send,
                    done: 0,
                    idle: true,
                    reason: None,
                };
                outbox.push((Arc::clone(peer), over));
                asking.batch.refuse(TransferError::Failed(why));
            }
        }
    }

    /// Grants the use of leased ranges to a peer, which says when it is over. Returns the answer.
    fn lend(
        &mut self,
        peer: &Arc<Peer>,
        send: u64,
        write: bool,
        ranges: &[Range],
    ) -> Option<Message> {
        if self.state.closing.is_some() || send & USE == 0 {
            return None;
        }
        let access = if write { Access::Write } else { Access::Read };
        let its = self.state.uses.keys();
        let its = its.filter(|(incarnation, _)| *incarnation == peer.incarnation);
        if ranges.len() > MAX_BATCH || its.count() >= SERVED {
            return Some(denied(send, 0, Denied::NotLeased));
        }
        Some(match self.resolve(peer, access, ranges) {
            Ok((offsets, pins)) => {
                self.state.uses.insert((peer.incarnation, send), pins);
                Message::Used { send, offsets }
            }
            Err((object, why)) => denied(send, object, why),
        })
    }

    /// Resolves and pins ranges that a peer may access.
    fn resolve(
        &self,
        peer: &Peer,
        access: Access,
        ranges: &[Range],
    ) -> Result<Resolved, (usize, Denied)> {
        if access == Access::Write && self.config.rights != Rights::ReadWrite {
            return Err((0, Denied::Access));
        }
        let (mut offsets, mut pins) = (Vec::with_capacity(ranges.len()), Vec::new());
        let mut last = None;
        for (object, range) in ranges.iter().enumerate() {
            let gone = (object, Denied::NotLeased);
            match range.region {
                Region::Arena if self.config.open_arena => {
                    let end = range.offset.checked_add(range.len);
                    end.filter(|end| *end <= self.arena.len() as u64)
                        .ok_or(gone)?;
                    offsets.push(range.offset);
                }
                Region::Lease(number) => {
                    let found = self.leases.find(number, peer.incarnation, access);
                    let granted = found.map_err(|why| (object, why))?;
                    let segment = granted.segment(*range).ok_or(gone)?;
                    offsets.push(segment.offset);
                    if last != Some(number) {
                        pins.push(granted.pin().ok_or(gone)?);
                        last = Some(number);
                    }
                }
                Region::Arena | Region::Offer(_) => return Err(gone),
            }
        }
        Ok((offsets, pins))
    }

    /// Writes to a peer what it wants to read.
    fn serve(
        &mut self,
        peer: &Arc<Peer>,
        send: u64,
        ranges: &[Range],
        there: &[u64],
        millis: u64,
    ) -> Result<(), Unserved> {
        let number = ranges.len();
        let sound = there.len() == number && number <= MAX_BATCH && send & FETCH != 0;
        if !sound {
            return Err(Unserved::Invalid("an invalid fetch".to_owned()));
        }
        if self.state.closing.is_some() {
            return Ok(());
        }
        let its = |one: &&Transfer| one.peer.incarnation == peer.incarnation;
        let served = self.state.transfers.iter().filter(its);
        let served = served.filter_map(Transfer::served);
        let (count, objects) = served.fold((0, number), |(count, objects), one| {
            (count + 1, objects + one)
        });
        if count >= SERVED || objects > SERVED_OBJECTS {
            let why = "too many batches of one peer are under way".to_owned();
            return Err(Unserved::Invalid(why));
        }
        let lens = ranges.iter().map(|range| range.len);
        inside(lens, there, peer.remote.len).map_err(Unserved::Invalid)?;
        let resolved = self.resolve(peer, Access::Read, ranges);
        let (here, pins) =
            resolved.map_err(|(object, why)| Unserved::Denied(denied(send, object, why)))?;
        let part = |((local, &remote), range): ((u64, &u64), &Range)| Part {
            local,
            remote,
            len: range.len,
        };
        let parts = here.into_iter().zip(there).zip(ranges).map(part);
        let objects = number;
        let batch = Batch::Serve {
            objects,
            send,
            pins,
        };
        // The reader gives up first, and says so.
        let limit = Duration::from_millis(millis).saturating_add(SLACK);
        let deadline = Instant::now() + SERVE.min(limit);
        let peer = Arc::clone(peer);
        let transfer = Transfer::of_parts(peer, batch, parts, deadline, self.piece);
        self.state.transfers.push(transfer);
        Ok(())
    }

    /// The receiver of a send wants no more.
    fn cancelled(&mut self, peer: &Arc<Peer>, send: u64) {
        let error = TransferError::Failed("the receiver has given up".to_owned());
        self.state.paired.refused(peer, send, error.clone());
        let its =
            |one: &Transfer| one.send() == Some(send) && one.peer.incarnation == peer.incarnation;
        if let Some(at) = self.state.transfers.iter().position(its) {
            let transfer = self.state.transfers.remove(at);
            self.end(transfer, Some(error), false);
        }
    }
}

/// Why a fetch is not served.
enum Unserved {
    /// The answer.
    Denied(Message),
    Invalid(String),
}

fn denied(send: u64, object: usize, why: Denied) -> Message {
    Message::Denied {
        send,
        object: object as u64,
        read_only: why == Denied::Access,
    }
}

/// Checks that objects of these lengths lie in a peer's arena at these offsets.
fn inside(
    lens: impl ExactSizeIterator<Item = u64>,
    offsets: &[u64],
    arena: u64,
) -> Result<(), String> {
    let fits = |(len, offset): (u64, &u64)| {
        let end = offset.checked_add(len);
        len > 0 && end.is_some_and(|end| end <= arena)
    };
    match lens.len() == offsets.len() && lens.zip(offsets).all(fits) {
        true => Ok(()),
        false => Err("offsets that exceed the peer's arena".to_owned()),
    }
}
