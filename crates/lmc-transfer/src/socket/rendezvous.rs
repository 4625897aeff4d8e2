//! Where offers of a peer and receives of this side meet, by tag, first come first served.

use std::collections::{HashMap, VecDeque};
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;

use super::connection::{Connection, Outgoing};
use super::frame::{Frame, Outcome, Segment};
use crate::MAX_BATCH;

/// Objects that a peer may offer on one connection before any is received.
pub(super) const OFFER_ROOM: usize = 4 * MAX_BATCH;
/// An offer of fewer counts as one of so many, since to take one back looks at all of them.
const LEAST: usize = 64;

/// Offers whose bytes come along, on one connection, before they are received. For this many a
/// side may hold [`super::frame::MAX_CARRIED`] bytes each.
pub(super) const CARRIED_ROOM: usize = 64;

/// What an offer takes of the room.
pub(super) fn room_of(objects: usize) -> usize {
    objects.max(LEAST)
}

/// Objects that a peer would send.
#[derive(Debug)]
pub(super) struct Offer {
    pub(super) connection: Arc<Connection>,
    pub(super) id: u64,
    /// In the peer's arena.
    pub(super) objects: Vec<Segment>,
    /// Whether their bytes came along.
    pub(super) carried: bool,
    /// Those bytes, one object after another. They are to be fetched where there are none.
    pub(super) bytes: Option<Vec<u8>>,
}

impl Offer {
    /// Tells the peer what became of it.
    pub(super) fn finish(&self, done: usize, outcome: Outcome) {
        let connection = &self.connection;
        let finish = Frame::Finish {
            id: self.id,
            done: done as u64,
            outcome,
        };
        connection.lanes[0].push(Outgoing {
            answers: self.carried.then(|| Arc::clone(&connection.carried)),
            ..Outgoing::of(finish.encode())
        });
    }
}

/// One for each incarnation of a peer.
#[derive(Debug)]
pub(super) struct Rendezvous(Mutex<Option<Tags>>);

#[derive(Debug, Default)]
struct Tags {
    tags: HashMap<u64, Tag>,
    /// Room of the offers.
    taken: usize,
    next_ticket: u64,
}

/// The first offer is for the first who waits, the second for the second, and so on.
#[derive(Debug, Default)]
struct Tag {
    offers: VecDeque<Offer>,
    waiting: VecDeque<(u64, Waker)>,
}

impl Tag {
    fn is_empty(&self) -> bool {
        self.offers.is_empty() && self.waiting.is_empty()
    }

    /// Who the last offer is for.
    fn last_served(&self) -> Option<Waker> {
        let last = self.offers.len().checked_sub(1)?;
        self.waiting.get(last).map(|(_, waker)| waker.clone())
    }

    fn place(&self, ticket: u64) -> Option<usize> {
        self.waiting.iter().position(|(other, _)| *other == ticket)
    }
}

impl Rendezvous {
    pub(super) fn new() -> Self {
        Self(Mutex::new(Some(Tags::default())))
    }

    /// An offer has come; false when there are too many.
    pub(super) fn offer(&self, tag: u64, offer: Offer) -> bool {
        let waker = {
            let mut state = self.0.lock();
            let Some(tags) = state.as_mut() else {
                return true;
            };
            let room = room_of(offer.objects.len());
            // Twice, since a peer may have two connections.
            if tags.taken + room > 2 * OFFER_ROOM {
                return false;
            }
            tags.taken += room;
            let tag = tags.tags.entry(tag).or_default();
            tag.offers.push_back(offer);
            tag.last_served()
        };
        waker.into_iter().for_each(Waker::wake);
        true
    }

    /// Waits for an offer, behind those who wait already; none when the peer is gone.
    pub(super) fn receive(self: &Arc<Self>, tag: u64) -> Option<Waiting> {
        let mut state = self.0.lock();
        let tags = state.as_mut()?;
        tags.next_ticket += 1;
        let ticket = tags.next_ticket;
        let waiting = (ticket, Waker::noop().clone());
        tags.tags.entry(tag).or_default().waiting.push_back(waiting);
        Some(Waiting {
            rendezvous: Arc::clone(self),
            tag,
            ticket,
        })
    }

    #[cfg(test)]
    pub(super) fn tags_in_use(&self) -> usize {
        self.0.lock().as_ref().map_or(0, |tags| tags.tags.len())
    }

    /// The peer takes an offer back. Nothing comes back if it was received before.
    pub(super) fn withdraw(&self, connection: &Arc<Connection>, id: u64) -> Option<Offer> {
        let is_meant = |o: &Offer| o.id == id && Arc::ptr_eq(&o.connection, connection);
        self.take(is_meant).pop()
    }

    /// A connection has ended.
    pub(super) fn forget(&self, connection: &Arc<Connection>) {
        let offers = self.take(|offer| Arc::ptr_eq(&offer.connection, connection));
        drop(offers);
    }

    /// The peer is gone: those who wait are told.
    pub(super) fn end(&self) {
        let tags = self.0.lock().take();
        let tags = tags.into_iter().flat_map(|tags| tags.tags.into_values());
        let waiting = tags.flat_map(|tag| tag.waiting);
        waiting.for_each(|(_, waker)| waker.wake());
    }

    /// Takes out all such offers.
    fn take(&self, are_meant: impl Fn(&Offer) -> bool) -> Vec<Offer> {
        let mut taken = Vec::new();
        let mut state = self.0.lock();
        let Some(tags) = state.as_mut() else {
            return taken;
        };
        tags.tags.retain(|_, tag| {
            let (meant, others): (Vec<_>, Vec<_>) = tag.offers.drain(..).partition(&are_meant);
            tag.offers = others.into();
            taken.extend(meant);
            !tag.is_empty()
        });
        let room = taken.iter().map(|offer| room_of(offer.objects.len()));
        tags.taken -= room.sum::<usize>();
        taken
    }
}

/// A receive that waits.
#[derive(Debug)]
pub(super) struct Waiting {
    rendezvous: Arc<Rendezvous>,
    tag: u64,
    ticket: u64,
}

impl Waiting {
    /// The offer; none when the peer is gone. To be called once.
    pub(super) async fn offer(&self) -> Option<Offer> {
        poll_fn(|context| self.poll(context)).await
    }

    fn poll(&self, context: &mut Context<'_>) -> Poll<Option<Offer>> {
        let mut state = self.rendezvous.0.lock();
        let Some(tags) = state.as_mut() else {
            return Poll::Ready(None);
        };
        let Some(tag) = tags.tags.get_mut(&self.tag) else {
            return Poll::Ready(None);
        };
        let Some(place) = tag.place(self.ticket) else {
            return Poll::Ready(None);
        };
        let Some(offer) = tag.offers.remove(place) else {
            let waker = &mut tag.waiting[place].1;
            let before = std::mem::replace(waker, context.waker().clone());
            drop(state);
            drop(before);
            return Poll::Pending;
        };
        let waited = tag.waiting.remove(place);
        if tag.is_empty() {
            tags.tags.remove(&self.tag);
        }
        tags.taken -= room_of(offer.objects.len());
        drop(state);
        drop(waited);
        Poll::Ready(Some(offer))
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let mut state = self.rendezvous.0.lock();
        let Some(tags) = state.as_mut() else { return };
        let Some(tag) = tags.tags.get_mut(&self.tag) else {
            return;
        };
        let Some(place) = tag.place(self.ticket) else {
            return;
        };
        let left = tag.waiting.remove(place);
        // Its offer, if there was one, is for the next, and so on.
        let woken = (place < tag.offers.len()).then(|| tag.last_served());
        if tag.is_empty() {
            tags.tags.remove(&self.tag);
        }
        drop(state);
        drop(left);
        woken.flatten().into_iter().for_each(Waker::wake);
    }
}
