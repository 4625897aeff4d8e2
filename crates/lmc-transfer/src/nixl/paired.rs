//! Sends and receives until bytes move: the sender offers, the receiver answers with offsets as
//! soon as it receives, the sender writes there and says when it is over.
//!
//! No peer knows a receiver's slots before that, so a receive without a sender leaves them
//! untouched. The sender writes because a read over TCP has a third of the speed.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lmc_memory::{QuarantinedSlot, ReservedSlot, SealedSlot};
use tokio::sync::oneshot;

use super::engine::Peer;
use super::wire::{FETCH, Message};
use crate::lease::Range;
use crate::{Filled, MAX_BATCH, Sent, Slot, TransferError};

/// Offers of one peer that wait for a receive, at most.
const MAX_OFFERS: usize = 1024;
/// Objects in them, at most.
const MAX_OFFERED: usize = 4 * MAX_BATCH;
/// After a peer has ended its connections, or its process has, what it had written may still be
/// on its way through this host's buffers for this long.
pub(super) const SETTLE: Duration = Duration::from_secs(2);

/// A send that waits for offsets.
#[derive(Debug)]
pub(super) struct Sending {
    pub(super) peer: Arc<Peer>,
    pub(super) objects: Vec<SealedSlot>,
    pub(super) reply: oneshot::Sender<Sent>,
    pub(super) deadline: Instant,
}

/// A receive.
#[derive(Debug)]
pub(super) struct Receiving {
    pub(super) peer: Arc<Peer>,
    pub(super) tag: u64,
    pub(super) slots: Vec<ReservedSlot>,
    pub(super) reply: oneshot::Sender<Filled>,
    pub(super) deadline: Instant,
    /// Number of the peer's send that writes to the slots, and of its objects.
    pub(super) writer: Option<(u64, usize)>,
}

/// A read that the peer is to do.
#[derive(Debug)]
pub(super) struct Fetching {
    pub(super) receiving: Receiving,
    /// The objects, in the peer's memory.
    pub(super) ranges: Vec<Range>,
}

/// An offer that is not received yet.
#[derive(Debug)]
struct Offer {
    peer: Arc<Peer>,
    send: u64,
    tag: u64,
    lens: Vec<u64>,
}

/// Slots that a peer's send may still write to.
#[derive(Debug, Default)]
struct Late {
    slots: Vec<QuarantinedSlot>,
    /// True if the connections over which it was asked for have ended.
    cut: bool,
    /// Time since which the peer is known to write nothing that was asked for over these
    /// connections.
    ended: Option<Instant>,
}

/// Messages to peers.
pub(super) type Outbox = Vec<(Arc<Peer>, Message)>;

/// All sends and receives in which no byte of ours moves.
#[derive(Debug, Default)]
pub(super) struct Paired {
    sends: HashMap<u64, Sending>,
    receives: Vec<Receiving>,
    offers: Vec<Offer>,
    /// Late sends by the peer's incarnation and the number of the send.
    late: HashMap<(u64, u64), Late>,
    /// Reads that wait, because their peer may still write for one that was given up: no more
    /// than that is ever withheld.
    held: Vec<Fetching>,
    next: u64,
}

impl Paired {
    /// A number that no other send, fetch or use of this side has.
    pub(super) fn number(&mut self) -> u64 {
        self.next += 1;
        self.next - 1
    }

    /// Offers the objects of a send.
    pub(super) fn send(&mut self, sending: Sending, tag: u64, outbox: &mut Outbox) {
        let send = self.number();
        let lens = sending.objects.iter().map(SealedSlot::len).collect();
        let peer = Arc::clone(&sending.peer);
        outbox.push((peer, Message::Offer { send, tag, lens }));
        self.sends.insert(send, sending);
    }

    /// The send that a peer has answered, with offsets for all of its objects.
    pub(super) fn answered(&mut self, peer: &Peer, send: u64) -> Option<Sending> {
        self.sent_to(peer, send)
    }

    fn sent_to(&mut self, peer: &Peer, send: u64) -> Option<Sending> {
        let theirs = self.sends.get(&send)?.peer.incarnation == peer.incarnation;
        theirs.then(|| self.sends.remove(&send)).flatten()
    }

    /// Ends a send that waits for offsets.
    pub(super) fn refused(&mut self, peer: &Peer, send: u64, error: TransferError) {
        if let Some(sending) = self.sent_to(peer, send) {
            // Here and below: where the call was dropped, so is the answer with its slots.
            let _ = sending.reply.send(Sent::failed(error));
        }
    }

    /// Begins a receive.
    pub(super) fn receive(&mut self, receiving: Receiving, outbox: &mut Outbox) {
        let waits = |offer: &Offer| {
            offer.peer.incarnation == receiving.peer.incarnation && offer.tag == receiving.tag
        };
        match self.offers.iter().position(waits) {
            Some(at) => {
                let offer = self.offers.remove(at);
                self.answer(receiving, offer.send, &offer.lens, outbox);
            }
            None => self.receives.push(receiving),
        }
    }

    /// Begins a read that the peer does.
    pub(super) fn fetch(&mut self, fetching: Fetching, outbox: &mut Outbox) {
        self.held.push(fetching);
        self.fetch_held(outbox);
    }

    fn fetch_held(&mut self, outbox: &mut Outbox) {
        let late = &self.late;
        let ready = |one: &mut Fetching| {
            let incarnation = one.receiving.peer.incarnation;
            !late.keys().any(|(peer, _)| *peer == incarnation)
        };
        for fetching in self.held.extract_if(.., ready) {
            let mut receiving = fetching.receiving;
            let send = FETCH | self.next;
            self.next += 1;
            receiving.writer = Some((send, receiving.slots.len()));
            let slots = receiving.slots.iter();
            let left = receiving.deadline.saturating_duration_since(Instant::now());
            let fetch = Message::Fetch {
                send,
                ranges: fetching.ranges,
                offsets: slots.map(ReservedSlot::offset).collect(),
                millis: u64::try_from(left.as_millis()).unwrap_or(u64::MAX),
            };
            outbox.push((Arc::clone(&receiving.peer), fetch));
            self.receives.push(receiving);
        }
    }

    /// Ends reads that wait. No peer knows their slots.
    fn end_held(&mut self, ends: impl Fn(&Receiving) -> Option<TransferError>) {
        let ended = |one: &mut Fetching| ends(&one.receiving).is_some();
        for fetching in self.held.extract_if(.., ended) {
            let receiving = fetching.receiving;
            if let Some(error) = ends(&receiving) {
                let filled = Filled::untouched(receiving.slots, error);
                let _ = receiving.reply.send(filled);
            }
        }
    }

    /// Takes a peer's offer.
    pub(super) fn offered(
        &mut self,
        peer: &Arc<Peer>,
        send: u64,
        tag: u64,
        lens: Vec<u64>,
        outbox: &mut Outbox,
    ) {
        let waits = |receiving: &Receiving| {
            receiving.writer.is_none()
                && receiving.peer.incarnation == peer.incarnation
                && receiving.tag == tag
                && !receiving.reply.is_closed()
        };
        if let Some(at) = self.receives.iter().position(waits) {
            let receiving = self.receives.remove(at);
            self.answer(receiving, send, &lens, outbox);
            return;
        }
        let theirs = self
            .offers
            .iter()
            .filter(|offer| offer.peer.incarnation == peer.incarnation);
        let (count, objects) = theirs.fold((0, lens.len()), |(count, objects), offer| {
            (count + 1, objects + offer.lens.len())
        });
        if count >= MAX_OFFERS || objects > MAX_OFFERED {
            outbox.push((Arc::clone(peer), Message::Cancel { send }));
            return;
        }
        self.offers.push(Offer {
            peer: Arc::clone(peer),
            send,
            tag,
            lens,
        });
    }

    /// Answers with the offsets for a peer's objects, if they fit.
    fn answer(&mut self, mut receiving: Receiving, send: u64, lens: &[u64], outbox: &mut Outbox) {
        let peer = Arc::clone(&receiving.peer);
        let capacity = |object: usize| receiving.slots.get(object).map_or(0, ReservedSlot::len);
        let unfit = (0..lens.len()).find(|object| capacity(*object) != lens[*object]);
        if let Some(object) = unfit {
            let (sent, capacity) = (lens[object], capacity(object));
            let error = TransferError::Length {
                object,
                sent,
                capacity,
            };
            let object = object as u64;
            let message = Message::Unfit {
                send,
                object,
                sent,
                capacity,
            };
            outbox.push((peer, message));
            let filled = Filled::untouched(receiving.slots, error);
            let _ = receiving.reply.send(filled);
            return;
        }
        let slots = receiving.slots[..lens.len()].iter();
        let offsets = slots.map(ReservedSlot::offset).collect();
        outbox.push((peer, Message::Offsets { send, offsets }));
        receiving.writer = Some((send, lens.len()));
        self.receives.push(receiving);
    }

    /// A peer has withdrawn an offer: nothing was written. Who was about to receive it waits on.
    pub(super) fn withdrawn(&mut self, peer: &Peer, send: u64, outbox: &mut Outbox) {
        if send & FETCH != 0 {
            return;
        }
        let its = |other: &Peer| other.incarnation == peer.incarnation;
        self.offers
            .retain(|offer| !(its(&offer.peer) && offer.send == send));
        let waits = |receiving: &Receiving| {
            its(&receiving.peer) && receiving.writer.is_some_and(|(writer, _)| writer == send)
        };
        if let Some(at) = self.receives.iter().position(waits) {
            let mut receiving = self.receives.remove(at);
            receiving.writer = None;
            self.receive(receiving, outbox);
        } else {
            self.settle((peer.incarnation, send));
        }
    }

    /// A fetch was refused: nothing was written.
    pub(super) fn denied(&mut self, peer: &Peer, send: u64, error: TransferError) {
        let waits = |receiving: &Receiving| {
            receiving.peer.incarnation == peer.incarnation
                && receiving.writer.is_some_and(|(writer, _)| writer == send)
        };
        if let Some(at) = self.receives.iter().position(waits) {
            let receiving = self.receives.remove(at);
            let filled = Filled::untouched(receiving.slots, error);
            let _ = receiving.reply.send(filled);
        } else {
            self.settle((peer.incarnation, send));
        }
    }

    /// A peer's send has ended.
    pub(super) fn over(
        &mut self,
        peer: &Peer,
        send: u64,
        done: u64,
        idle: bool,
        reason: Option<String>,
    ) {
        let its = |other: &Peer| other.incarnation == peer.incarnation;
        self.offers
            .retain(|offer| !(its(&offer.peer) && offer.send == send));
        let waits = |receiving: &Receiving| {
            its(&receiving.peer) && receiving.writer.is_some_and(|(writer, _)| writer == send)
        };
        if let Some(at) = self.receives.iter().position(waits) {
            let receiving = self.receives.remove(at);
            let done = usize::try_from(done).unwrap_or(usize::MAX);
            self.received(receiving, done, idle, reason);
        } else if idle {
            self.settle((peer.incarnation, send));
        }
    }

    fn received(&mut self, receiving: Receiving, done: usize, idle: bool, reason: Option<String>) {
        let Some((_, offered)) = receiving.writer else {
            return;
        };
        if done < offered {
            let reason = reason.unwrap_or_else(|| "the sender gave up".to_owned());
            self.give_up(receiving, done, idle, TransferError::Failed(reason));
            return;
        }
        let fill = |(object, slot): (usize, ReservedSlot)| match object < offered {
            true => Slot::Written(slot.written()),
            false => Slot::Idle(slot),
        };
        let slots = receiving.slots.into_iter().enumerate().map(fill).collect();
        let _ = receiving.reply.send(Filled { slots, error: None });
    }

    /// Ends a receive. The first `done` objects are there; unless it is `idle`, a peer may write
    /// to the slots of the others.
    fn give_up(&mut self, receiving: Receiving, done: usize, idle: bool, error: TransferError) {
        let (send, offered) = receiving.writer.unwrap_or((0, 0));
        let mut late = Vec::new();
        let mut slots = Vec::with_capacity(receiving.slots.len());
        for (object, slot) in receiving.slots.into_iter().enumerate() {
            slots.push(if object < done {
                Slot::Written(slot.written())
            } else if idle || object >= offered {
                Slot::Idle(slot)
            } else {
                late.push(slot.quarantine());
                Slot::Quarantined
            });
        }
        if !late.is_empty() {
            let slots = late;
            let key = (receiving.peer.incarnation, send);
            let late = self.late.entry(key).or_default();
            late.slots.extend(slots);
            late.ended = None;
        }
        let error = Some(error);
        let _ = receiving.reply.send(Filled { slots, error });
    }

    /// Ends a receive that a peer may write for already.
    fn abandon(&mut self, receiving: Receiving, error: TransferError) {
        let idle = receiving.writer.is_none();
        self.give_up(receiving, 0, idle, error);
    }

    fn settle(&mut self, key: (u64, u64)) {
        if let Some(late) = self.late.remove(&key) {
            for slot in late.slots {
                slot.release_proven_quiet();
            }
        }
    }

    /// Ends what waits for a peer that is gone. It may live and write on: see
    /// [`Self::peer_ended`].
    pub(super) fn peer_gone(&mut self, peer: &Peer, reason: &str) {
        let gone = || TransferError::PeerGone {
            peer: peer.id.clone(),
            reason: reason.to_owned(),
        };
        let its = |other: &Peer| other.incarnation == peer.incarnation;
        for (_, sending) in self.sends.extract_if(|_, sending| its(&sending.peer)) {
            let _ = sending.reply.send(Sent::failed(gone()));
        }
        self.offers.retain(|offer| !its(&offer.peer));
        self.end_held(|one| its(&one.peer).then(gone));
        let mut ended = Vec::new();
        ended.extend(self.receives.extract_if(.., |one| its(&one.peer)));
        for receiving in ended {
            self.abandon(receiving, gone());
        }
        for ((incarnation, _), late) in &mut self.late {
            late.cut |= *incarnation == peer.incarnation;
        }
    }

    /// A peer writes nothing more that was asked for over connections that have ended.
    pub(super) fn peer_ended(&mut self, incarnation: u64, now: Instant) {
        for ((peer, _), late) in &mut self.late {
            if *peer == incarnation && late.cut {
                late.ended.get_or_insert(now);
            }
        }
    }

    /// Slots that a peer may write to of which nothing more will be known.
    pub(super) fn stranded(&self, incarnation: u64) -> usize {
        let late = self.late.iter();
        let its = late.filter(|((peer, _), late)| *peer == incarnation && late.ended.is_none());
        its.map(|(_, late)| late.slots.len()).sum()
    }

    /// Ends what is past its deadline or no longer wanted.
    pub(super) fn tend(&mut self, now: Instant, outbox: &mut Outbox) {
        let ended = |sending: &Sending| now >= sending.deadline || sending.reply.is_closed();
        for (send, sending) in self.sends.extract_if(|_, sending| ended(sending)) {
            outbox.push((sending.peer, Message::Withdraw { send }));
            let error = TransferError::Deadline;
            let _ = sending.reply.send(Sent::failed(error));
        }
        let ended = |one: &mut Receiving| now >= one.deadline || one.reply.is_closed();
        let ended: Vec<Receiving> = self.receives.extract_if(.., ended).collect();
        for receiving in ended {
            if let Some((send, _)) = receiving.writer {
                outbox.push((Arc::clone(&receiving.peer), Message::Cancel { send }));
            }
            self.abandon(receiving, TransferError::Deadline);
        }
        let settled = |late: &Late| late.ended.is_some_and(|since| now >= since + SETTLE);
        let settled = self.late.iter().filter(|(_, late)| settled(late));
        let settled: Vec<(u64, u64)> = settled.map(|(key, _)| *key).collect();
        settled.into_iter().for_each(|key| self.settle(key));
        self.end_held(|one| {
            let ended = now >= one.deadline || one.reply.is_closed();
            ended.then_some(TransferError::Deadline)
        });
        self.fetch_held(outbox);
    }

    /// Ends all of it, for a channel that closes. Peers hear of it by the end of their
    /// connections; only those that write are asked to stop.
    pub(super) fn close(&mut self, outbox: &mut Outbox) {
        for (_, sending) in self.sends.drain() {
            let _ = sending.reply.send(Sent::failed(TransferError::Closed));
        }
        self.offers.clear();
        self.end_held(|_| Some(TransferError::Closed));
        for receiving in std::mem::take(&mut self.receives) {
            if let Some((send, _)) = receiving.writer {
                outbox.push((Arc::clone(&receiving.peer), Message::Cancel { send }));
            }
            self.abandon(receiving, TransferError::Closed);
        }
    }

    /// Returns the earliest deadline of what is under way.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let sends = self.sends.values().map(|sending| sending.deadline);
        let held = self.held.iter().map(|one| &one.receiving);
        let receives = self.receives.iter().chain(held).map(|one| one.deadline);
        let late = self.late.values().filter_map(|late| late.ended);
        sends
            .chain(receives)
            .chain(late.map(|since| since + SETTLE))
            .min()
    }

    /// Returns whether slots of receives that have ended go back in a moment.
    pub(super) fn settles(&self) -> bool {
        self.late.values().any(|late| late.ended.is_some())
    }

    /// Returns whether this peer may still write to slots of receives that have ended.
    pub(super) fn is_late(&self, incarnation: u64) -> bool {
        self.late.keys().any(|(peer, _)| *peer == incarnation)
    }
}
