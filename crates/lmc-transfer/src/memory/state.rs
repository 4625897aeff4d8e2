//! Who is there, who is connected to whom, and what is under way.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::mem;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use lmc_memory::Arena;

use super::copying::{Copy, Delivery, Half, Turn};
use crate::cell::Cell;
use crate::{ChannelConfig, ConnectError, PeerId, TransferError};

/// One incarnation of a channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct EndId(pub(super) u64);

/// A channel that is open.
#[derive(Debug)]
pub(super) struct End {
    pub(super) name: String,
    pub(super) config: ChannelConfig,
    /// Which incarnation each name stands for.
    pub(super) peers: HashMap<PeerId, EndId>,
}

/// What a connect comes to.
pub(super) type Connected = Result<Option<Bytes>, ConnectError>;

/// A connect that waits for the peer's answer.
#[derive(Debug)]
pub(super) struct Handshake {
    pub(super) number: u64,
    pub(super) from: EndId,
    pub(super) to: EndId,
    pub(super) peer: PeerId,
    pub(super) deadline: Instant,
    pub(super) cell: Arc<Cell<Connected>>,
}

/// A connect that waits for the end of another of the same side to the same peer.
#[derive(Debug)]
pub(super) struct Behind {
    pub(super) number: u64,
    pub(super) handshake: u64,
    pub(super) deadline: Instant,
    pub(super) cell: Arc<Cell<()>>,
}

/// A close that waits for what the channel still does.
#[derive(Debug)]
pub(super) struct Closing {
    pub(super) number: u64,
    pub(super) end: EndId,
    pub(super) deadline: Instant,
    pub(super) cell: Arc<Cell<Result<(), TransferError>>>,
}

/// All of a hub, behind one lock.
#[derive(Debug, Default)]
pub(super) struct State {
    next: u64,
    ends: HashMap<EndId, End>,
    names: HashMap<String, EndId>,
    pub(super) handshakes: Vec<Handshake>,
    pub(super) behind: Vec<Behind>,
    pub(super) halves: Vec<Half>,
    pub(super) copies: VecDeque<Copy>,
    /// Answers of a channel that are being made up, without the lock.
    answering: HashMap<EndId, usize>,
    pub(super) closing: Vec<Closing>,
    /// The hub is gone.
    pub(super) over: bool,
}

impl State {
    /// A number that nothing else has.
    pub(super) fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    pub(super) fn end(&self, end: EndId) -> Option<&End> {
        self.ends.get(&end)
    }

    pub(super) fn find(&self, name: &str) -> Option<(EndId, &End)> {
        let end = *self.names.get(name)?;
        Some((end, self.ends.get(&end)?))
    }

    /// A new channel; `None` when the name is taken.
    pub(super) fn open(&mut self, name: &str, config: ChannelConfig) -> Option<EndId> {
        if self.names.contains_key(name) {
            return None;
        }
        let id = EndId(self.number());
        let end = End {
            name: name.to_owned(),
            config,
            peers: HashMap::new(),
        };
        self.ends.insert(id, end);
        self.names.insert(name.to_owned(), id);
        Some(id)
    }

    /// Ends a channel: peers know at once, and what it takes part in goes no further.
    pub(super) fn close(&mut self, id: EndId) -> Vec<Delivery> {
        let Some(end) = self.ends.remove(&id) else {
            return Vec::new();
        };
        self.names.remove(&end.name);
        for peer in end.peers.values() {
            if let Some(peer) = self.ends.get_mut(peer) {
                peer.peers.retain(|_, other| *other != id);
            }
        }
        let mut out = self.fail_halves(Instant::now());
        let (ended, others) = mem::take(&mut self.handshakes)
            .into_iter()
            .partition(|handshake| handshake.from == id || handshake.to == id);
        self.handshakes = others;
        for handshake in ended {
            let error = match handshake.from == id {
                true => ConnectError::Closed,
                false => io::Error::from(io::ErrorKind::ConnectionReset).into(),
            };
            self.answer(handshake, Err(error), &mut out);
        }
        out
    }

    /// Whether another peer may be connected.
    fn has_room(&self, end: EndId, peer: &PeerId) -> Result<(), ConnectError> {
        let Some(end) = self.ends.get(&end) else {
            return Err(io::Error::from(io::ErrorKind::ConnectionReset).into());
        };
        let max = end.config.max_peers;
        if end.peers.len() < max || end.peers.contains_key(peer) {
            return Ok(());
        }
        let id = &end.config.id;
        Err(ConnectError::Refused(format!("{id} has {max} peers")))
    }

    /// Whether two channels may be connected.
    pub(super) fn may_link(&self, from: EndId, to: EndId) -> Result<(), ConnectError> {
        let id = |end: EndId| self.ends.get(&end).map(|end| &end.config.id);
        let Some(from_id) = id(from) else {
            return Err(ConnectError::Closed);
        };
        self.has_room(to, from_id)?;
        id(to).map_or(Ok(()), |to_id| self.has_room(from, to_id))
    }

    /// Connects two channels. Where either held its peer's name for another incarnation, that
    /// connection ends.
    pub(super) fn link(&mut self, from: EndId, to: EndId) -> Result<Vec<Delivery>, ConnectError> {
        self.may_link(from, to)?;
        for (one, other) in [(from, to), (to, from)] {
            let name = self.ends[&other].config.id.clone();
            let end = self.ends.get_mut(&one).expect("may_link found it");
            let before = end.peers.insert(name, other).filter(|old| *old != other);
            if let Some(old) = before.and_then(|old| self.ends.get_mut(&old)) {
                old.peers.retain(|_, end| *end != one);
            }
        }
        Ok(self.fail_halves(Instant::now()))
    }

    /// Ends halves that wait for nobody any more.
    pub(super) fn fail_halves(&mut self, now: Instant) -> Vec<Delivery> {
        let mut out = Vec::new();
        for half in mem::take(&mut self.halves) {
            match half.stopped(self, now) {
                Some(error) => out.push(half.fail(error)),
                None => self.halves.push(half),
            }
        }
        out
    }

    /// A half meets the other, or waits for it.
    pub(super) fn meet(&mut self, half: Half) -> Vec<Delivery> {
        let now = Instant::now();
        let fits = |other: &Half| half.fits(other) && other.deadline() > now;
        let Some(place) = self.halves.iter().position(fits) else {
            self.halves.push(half);
            return Vec::new();
        };
        match Copy::pair(half, self.halves.remove(place)) {
            Ok(copy) => {
                self.copies.push_back(copy);
                Vec::new()
            }
            Err(out) => out,
        }
    }

    /// Counts an answer that a channel begins to make up.
    pub(super) fn answering(&mut self, end: EndId) {
        *self.answering.entry(end).or_default() += 1;
    }

    /// Counts one that is over.
    pub(super) fn answered(&mut self, end: EndId) {
        if let Some(count) = self.answering.get_mut(&end) {
            *count -= 1;
            if *count == 0 {
                self.answering.remove(&end);
            }
        }
    }

    /// Ends a handshake that was taken out.
    pub(super) fn answer(
        &mut self,
        handshake: Handshake,
        connected: Connected,
        out: &mut Vec<Delivery>,
    ) {
        self.wake_behind(handshake.number, out);
        out.push(Box::new(move || handshake.cell.put(connected)));
    }

    fn wake_behind(&mut self, handshake: u64, out: &mut Vec<Delivery>) {
        let (woken, others) = mem::take(&mut self.behind)
            .into_iter()
            .partition(|behind| behind.handshake == handshake);
        self.behind = others;
        let woken: Vec<Behind> = woken;
        for behind in woken {
            out.push(Box::new(move || behind.cell.put(())));
        }
    }

    /// Takes back what a dropped call began. A copy ends at its next turn.
    pub(super) fn forget(&mut self, number: u64) -> (Option<Half>, Vec<Delivery>) {
        let mut out = Vec::new();
        let half = self.halves.iter().position(|half| half.number() == number);
        let half = half.map(|place| self.halves.remove(place));
        let known = self.handshakes.len();
        self.handshakes.retain(|other| other.number != number);
        if self.handshakes.len() < known {
            self.wake_behind(number, &mut out);
        }
        self.behind.retain(|behind| behind.number != number);
        self.closing.retain(|closing| closing.number != number);
        (half, out)
    }

    /// Ends what has passed its deadline, and closes that wait for nothing any more. For the
    /// hub's thread.
    pub(super) fn expire(&mut self, now: Instant) -> Vec<Delivery> {
        let mut out = self.fail_halves(now);
        let late = |handshake: &mut Handshake| handshake.deadline <= now;
        let late: Vec<_> = self.handshakes.extract_if(.., late).collect();
        for handshake in late {
            let peer = handshake.peer.clone();
            self.answer(handshake, Err(ConnectError::Deadline { peer }), &mut out);
        }
        for behind in self.behind.extract_if(.., |b| b.deadline <= now) {
            out.push(Box::new(move || behind.cell.put(())));
        }
        for closing in mem::take(&mut self.closing) {
            // The thread asks between two pieces, so that none is being copied now.
            let quiet = !self.copies.iter().any(|copy| copy.touches(closing.end));
            if quiet && !self.answering.contains_key(&closing.end) {
                out.push(Box::new(move || closing.cell.put(Ok(()))));
            } else if closing.deadline <= now {
                let error = TransferError::Deadline { quiet };
                out.push(Box::new(move || closing.cell.put(Err(error))));
            } else {
                self.closing.push(closing);
            }
        }
        out
    }

    /// When [`Self::expire`] is next needed.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let halves = self.halves.iter().map(Half::deadline);
        let handshakes = self.handshakes.iter().map(|handshake| handshake.deadline);
        let behind = self.behind.iter().map(|behind| behind.deadline);
        let closing = self.closing.iter().map(|closing| closing.deadline);
        halves.chain(handshakes).chain(behind).chain(closing).min()
    }

    /// The next copy that has a piece to copy; what others came to.
    pub(super) fn next_copy(&mut self, now: Instant) -> (Option<Copy>, Vec<Delivery>) {
        let mut out = Vec::new();
        while let Some(copy) = self.copies.pop_front() {
            match copy.turn(self, now) {
                Turn::Further(copy) => return (Some(copy), out),
                Turn::Over(over) => out.extend(over),
            }
        }
        (None, out)
    }

    /// The peer by its name, as a side knows it, with its memory and unit.
    ///
    /// # Errors
    /// The side is closed, or the peer unknown.
    pub(super) fn peer(
        &self,
        end: EndId,
        peer: &PeerId,
    ) -> Result<(EndId, Arc<Arena>, u64), TransferError> {
        let end = self.ends.get(&end).ok_or(TransferError::Closed)?;
        let found = end.peers.get(peer).copied();
        let found = found.and_then(|id| Some((id, self.ends.get(&id)?)));
        let (id, found) = found.ok_or_else(|| TransferError::UnknownPeer { peer: peer.clone() })?;
        Ok((id, Arc::clone(&found.config.arena), found.config.unit))
    }
}
