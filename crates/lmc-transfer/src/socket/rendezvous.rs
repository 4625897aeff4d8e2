//! Where offers of a peer and receives of this side meet, by tag, first come first served.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::connection::Connection;
use super::frame::Segment;
use crate::MAX_BATCH;

/// Objects that a peer may offer on one connection before any is received.
pub(super) const OFFER_ROOM: usize = 4 * MAX_BATCH;
/// An offer of fewer counts as one of so many, since to take one back looks at all of them.
const LEAST: usize = 64;

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
}

/// One for each incarnation of a peer.
#[derive(Debug)]
pub(super) struct Rendezvous(Mutex<Option<Tags>>);

#[derive(Debug, Default)]
struct Tags {
    offers: HashMap<u64, VecDeque<Offer>>,
    waiting: HashMap<u64, VecDeque<oneshot::Sender<Offer>>>,
    /// Room of the offers.
    taken: usize,
}

impl Rendezvous {
    pub(super) fn new() -> Self {
        Self(Mutex::new(Some(Tags::default())))
    }

    /// An offer has come; false when there are too many.
    pub(super) fn offer(&self, tag: u64, offer: Offer) -> bool {
        let mut state = self.0.lock();
        let Some(tags) = state.as_mut() else {
            return true;
        };
        let Some(offer) = tags.hand_over(tag, offer) else {
            return true;
        };
        let room = room_of(offer.objects.len());
        // Twice, since a peer may have two connections.
        if tags.taken + room > 2 * OFFER_ROOM {
            return false;
        }
        tags.taken += room;
        tags.offers.entry(tag).or_default().push_back(offer);
        true
    }

    /// Gives back an offer that was handed to a receive that ended at that moment.
    fn give_back(&self, tag: u64, offer: Offer) {
        let mut state = self.0.lock();
        let Some(tags) = state.as_mut() else { return };
        if offer.connection.end().is_some() {
            return;
        }
        let Some(offer) = tags.hand_over(tag, offer) else {
            return;
        };
        tags.taken += room_of(offer.objects.len());
        tags.offers.entry(tag).or_default().push_front(offer);
    }

    /// A receive has ended.
    fn leave(&self, tag: u64) {
        let mut state = self.0.lock();
        let Some(tags) = state.as_mut() else { return };
        if let Some(waiting) = tags.waiting.get_mut(&tag) {
            waiting.retain(|sender| !sender.is_closed());
            if waiting.is_empty() {
                tags.waiting.remove(&tag);
            }
        }
    }

    /// Waits for an offer; none when the peer is gone.
    pub(super) fn receive(self: &Arc<Self>, tag: u64) -> Option<Waiting> {
        let (sender, receiver) = oneshot::channel();
        let mut state = self.0.lock();
        let tags = state.as_mut()?;
        match tags.take(tag) {
            Some(offer) => {
                let _ = sender.send(offer);
            }
            None => {
                tags.waiting.entry(tag).or_default().push_back(sender);
            }
        }
        Some(Waiting {
            rendezvous: Arc::clone(self),
            tag,
            receiver,
        })
    }

    #[cfg(test)]
    pub(super) fn tags_waited_for(&self) -> usize {
        self.0.lock().as_ref().map_or(0, |tags| tags.waiting.len())
    }

    /// The peer has taken an offer back.
    pub(super) fn withdraw(&self, connection: &Arc<Connection>, id: u64) {
        self.retain(|o| !(o.id == id && Arc::ptr_eq(&o.connection, connection)));
    }

    /// A connection has ended.
    pub(super) fn forget(&self, connection: &Arc<Connection>) {
        self.retain(|offer| !Arc::ptr_eq(&offer.connection, connection));
    }

    /// The peer is gone: those who wait are told.
    pub(super) fn end(&self) {
        let tags = self.0.lock().take();
        drop(tags);
    }

    fn retain(&self, keep: impl Fn(&Offer) -> bool) {
        let mut state = self.0.lock();
        let Some(tags) = state.as_mut() else { return };
        for offers in tags.offers.values_mut() {
            offers.retain(&keep);
        }
        tags.offers.retain(|_, offers| !offers.is_empty());
        let offers = tags.offers.values().flatten();
        tags.taken = offers.map(|offer| room_of(offer.objects.len())).sum();
    }
}

impl Tags {
    /// Gives an offer to who waits longest; gives it back when nobody does.
    fn hand_over(&mut self, tag: u64, mut offer: Offer) -> Option<Offer> {
        let waiting = self.waiting.get_mut(&tag);
        let mut senders = waiting.map(std::mem::take).unwrap_or_default();
        let mut left = loop {
            let Some(sender) = senders.pop_front() else {
                break Some(offer);
            };
            match sender.send(offer) {
                Ok(()) => break None,
                Err(back) => offer = back,
            }
        };
        if senders.is_empty() {
            self.waiting.remove(&tag);
        } else {
            self.waiting.insert(tag, senders);
        }
        left.take()
    }

    fn take(&mut self, tag: u64) -> Option<Offer> {
        let offers = self.offers.get_mut(&tag)?;
        let offer = offers.pop_front()?;
        if offers.is_empty() {
            self.offers.remove(&tag);
        }
        self.taken -= room_of(offer.objects.len());
        Some(offer)
    }
}

/// A receive that waits. When dropped, an offer that it had already got is there for the next.
#[derive(Debug)]
pub(super) struct Waiting {
    rendezvous: Arc<Rendezvous>,
    tag: u64,
    receiver: oneshot::Receiver<Offer>,
}

impl Waiting {
    /// The offer; none when the peer is gone.
    pub(super) async fn offer(&mut self) -> Option<Offer> {
        (&mut self.receiver).await.ok()
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.receiver.close();
        match self.receiver.try_recv() {
            Ok(offer) => self.rendezvous.give_back(self.tag, offer),
            Err(_) => self.rendezvous.leave(self.tag),
        }
    }
}
