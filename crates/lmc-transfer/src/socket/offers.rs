//! Offers of a peer and receives of this side, matched by tag, first come first served.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;

use super::budget::Charge;
use crate::MAX_BATCH;

/// Objects that a peer may offer on one connection before any of them is received.
pub(super) const OFFER_CAPACITY: usize = 4 * MAX_BATCH;
/// Least number of objects that an offer counts as.
const LEAST: usize = 64;

/// Inlined offers of one connection that are not yet received. A side may hold
/// [`super::frame::MAX_INLINED`] bytes for each.
pub(super) const INLINED_OFFERS: usize = 64;

/// Returns the capacity that an offer takes.
pub(super) fn size_of_offer(objects: usize) -> usize {
    objects.max(LEAST)
}

/// Objects that a peer offers to send on a connection.
#[derive(Debug)]
pub(super) struct Offer<C> {
    pub(super) connection: Arc<C>,
    pub(super) id: u64,
    /// Bytes of each object.
    pub(super) lens: Vec<u64>,
    /// True if the objects were inlined.
    pub(super) inlined: bool,
    /// The inlined objects, one after another. `None`: the objects are to be read.
    pub(super) bytes: Option<Vec<u8>>,
    pub(super) _charge: Charge,
}

impl<C> Offer<C> {
    /// Returns the offer's key, which is unique among the offers of the peer's two connections.
    fn key(&self) -> Key {
        key(&self.connection, self.id)
    }
}

/// Address of a connection, which no other connection has while an offer keeps it, and the offer's
/// number.
type Key = (usize, u64);

fn key<C>(connection: &Arc<C>, id: u64) -> Key {
    (Arc::as_ptr(connection).addr(), id)
}

/// Offers and waiting receives of one incarnation of a peer.
#[derive(Debug)]
pub(super) struct Offers<C>(Mutex<Option<Tags<C>>>);

#[derive(Debug)]
struct Tags<C> {
    tags: HashMap<u64, Tag<C>>,
    /// The tag of each offer and its number under that tag.
    index: HashMap<Key, (u64, u64)>,
    /// Capacity that the offers take.
    taken: usize,
    next: u64,
}

/// Offers and receives of a tag: the first offer is for the first receive that waits, the second
/// for the second, and so on.
#[derive(Debug)]
struct Tag<C> {
    /// Offers by the number of their arrival.
    offers: BTreeMap<u64, Offer<C>>,
    waiting: VecDeque<(u64, Waker)>,
}

impl<C> Tag<C> {
    fn new() -> Self {
        Self {
            offers: BTreeMap::new(),
            waiting: VecDeque::new(),
        }
    }

    fn is_empty(&self) -> bool {
        self.offers.is_empty() && self.waiting.is_empty()
    }

    /// Returns the waker of the receive that the last offer is for.
    fn last_served(&self) -> Option<Waker> {
        let last = self.offers.len().checked_sub(1)?;
        self.waiting.get(last).map(|(_, waker)| waker.clone())
    }

    fn position(&self, ticket: u64) -> Option<usize> {
        self.waiting.iter().position(|(other, _)| *other == ticket)
    }
}

impl<C> Tags<C> {
    /// Takes an offer out of a tag.
    fn take(&mut self, tag: u64, number: u64) -> Option<Offer<C>> {
        let entry = self.tags.get_mut(&tag)?;
        let offer = entry.offers.remove(&number)?;
        if entry.is_empty() {
            self.tags.remove(&tag);
        }
        self.index.remove(&offer.key());
        self.taken -= size_of_offer(offer.lens.len());
        Some(offer)
    }
}

impl<C> Offers<C> {
    pub(super) fn new() -> Self {
        Self(Mutex::new(Some(Tags {
            tags: HashMap::new(),
            index: HashMap::new(),
            taken: 0,
            next: 0,
        })))
    }

    /// Adds an offer; `false` if there are too many, or if another offer has its number.
    pub(super) fn offer(&self, tag: u64, offer: Offer<C>) -> bool {
        let waker = {
            let mut state = self.0.lock();
            let Some(tags) = state.as_mut() else {
                return true;
            };
            let size = size_of_offer(offer.lens.len());
            // Twice, since a peer may have two connections.
            if tags.taken + size > 2 * OFFER_CAPACITY || tags.index.contains_key(&offer.key()) {
                return false;
            }
            tags.taken += size;
            tags.next += 1;
            tags.index.insert(offer.key(), (tag, tags.next));
            let tag = tags.tags.entry(tag).or_insert_with(Tag::new);
            tag.offers.insert(tags.next, offer);
            tag.last_served()
        };
        waker.into_iter().for_each(Waker::wake);
        true
    }

    /// Waits for an offer, behind the receives that wait already; `None` when the peer is gone.
    pub(super) fn receive(self: &Arc<Self>, tag: u64) -> Option<Waiting<C>> {
        let mut state = self.0.lock();
        let tags = state.as_mut()?;
        tags.next += 1;
        let ticket = tags.next;
        let waiting = (ticket, Waker::noop().clone());
        tags.tags
            .entry(tag)
            .or_insert_with(Tag::new)
            .waiting
            .push_back(waiting);
        Some(Waiting {
            offers: Arc::clone(self),
            tag,
            ticket,
        })
    }

    #[cfg(test)]
    pub(super) fn tags_in_use(&self) -> usize {
        self.0.lock().as_ref().map_or(0, |tags| tags.tags.len())
    }

    /// Removes an offer that the peer withdraws; `None` if it was received before.
    pub(super) fn withdraw(&self, connection: &Arc<C>, id: u64) -> Option<Offer<C>> {
        let mut state = self.0.lock();
        let tags = state.as_mut()?;
        let (tag, number) = *tags.index.get(&key(connection, id))?;
        tags.take(tag, number)
    }

    /// Removes the offers of a connection that has ended.
    pub(super) fn forget(&self, connection: &Arc<C>) {
        let mut state = self.0.lock();
        let Some(tags) = state.as_mut() else { return };
        let its = |key: &&Key| key.0 == Arc::as_ptr(connection).addr();
        let keys: Vec<Key> = tags.index.keys().filter(its).copied().collect();
        let forgotten: Vec<Offer<C>> = keys
            .into_iter()
            .filter_map(|key| {
                let (tag, number) = *tags.index.get(&key)?;
                tags.take(tag, number)
            })
            .collect();
        drop(state);
        drop(forgotten);
    }

    /// Ends all receives: the peer is gone.
    pub(super) fn end(&self) {
        let tags = self.0.lock().take();
        let tags = tags.into_iter().flat_map(|tags| tags.tags.into_values());
        let waiting = tags.flat_map(|tag| tag.waiting);
        waiting.for_each(|(_, waker)| waker.wake());
    }
}

/// A receive that waits for its offer.
#[derive(Debug)]
pub(super) struct Waiting<C> {
    offers: Arc<Offers<C>>,
    tag: u64,
    ticket: u64,
}

impl<C> Waiting<C> {
    /// Waits for the offer; `None` when the peer is gone. Call it once.
    pub(super) async fn offer(&self) -> Option<Offer<C>> {
        poll_fn(|context| self.poll(context)).await
    }

    fn poll(&self, context: &mut Context<'_>) -> Poll<Option<Offer<C>>> {
        let mut state = self.offers.0.lock();
        let Some(tags) = state.as_mut() else {
            return Poll::Ready(None);
        };
        let Some(tag) = tags.tags.get_mut(&self.tag) else {
            return Poll::Ready(None);
        };
        let Some(position) = tag.position(self.ticket) else {
            return Poll::Ready(None);
        };
        let Some(number) = tag.offers.keys().nth(position).copied() else {
            let waker = &mut tag.waiting[position].1;
            let before = std::mem::replace(waker, context.waker().clone());
            drop(state);
            drop(before);
            return Poll::Pending;
        };
        let waited = tag.waiting.remove(position);
        let offer = tags.take(self.tag, number);
        drop(state);
        drop(waited);
        Poll::Ready(offer)
    }
}

impl<C> Drop for Waiting<C> {
    fn drop(&mut self) {
        let mut state = self.offers.0.lock();
        let Some(tags) = state.as_mut() else { return };
        let Some(tag) = tags.tags.get_mut(&self.tag) else {
            return;
        };
        let Some(position) = tag.position(self.ticket) else {
            return;
        };
        let left = tag.waiting.remove(position);
        // Its offer, if there was one, is for the next receive, and so on.
        let woken = (position < tag.offers.len()).then(|| tag.last_served());
        if tag.is_empty() {
            tags.tags.remove(&self.tag);
        }
        drop(state);
        drop(left);
        woken.flatten().into_iter().for_each(Waker::wake);
    }
}
