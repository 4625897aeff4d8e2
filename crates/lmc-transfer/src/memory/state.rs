//! The channels of a hub, their connections, and what is under way.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::mem;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use tokio::sync::oneshot;

use super::copying::{Copy, Delivery, Half, Turn};
use crate::config::PeerEvent;
use crate::lease::Leases;
use crate::{ChannelConfig, ConnectError, Keys, PeerId, TransferError};

/// One incarnation of a channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct EndId(pub(super) u64);

/// A channel that is open.
#[derive(Debug)]
pub(super) struct End {
    pub(super) name: String,
    pub(super) config: ChannelConfig,
    pub(super) leases: Arc<Leases>,
    /// The incarnation that each name stands for.
    pub(super) peers: HashMap<PeerId, EndId>,
}

/// The outcome of a connect.
pub(super) type Connected = Result<Option<Bytes>, ConnectError>;

/// A connect that waits for the peer's answer.
#[derive(Debug)]
pub(super) struct Handshake {
    pub(super) number: u64,
    pub(super) from: EndId,
    pub(super) to: EndId,
    pub(super) peer: PeerId,
    pub(super) deadline: Instant,
    pub(super) reply: oneshot::Sender<Connected>,
}

/// A close or a disconnect that waits for what is still under way.
#[derive(Debug)]
pub(super) struct Closing {
    pub(super) number: u64,
    pub(super) end: EndId,
    /// Only with this peer.
    pub(super) peer: Option<EndId>,
    pub(super) deadline: Instant,
    pub(super) reply: oneshot::Sender<Result<(), TransferError>>,
}

/// All of a hub, behind one lock.
#[derive(Debug, Default)]
pub(super) struct State {
    next: u64,
    ends: HashMap<EndId, End>,
    names: HashMap<String, EndId>,
    pub(super) handshakes: Vec<Handshake>,
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

    /// Adds a channel; `None` when the name is taken.
    pub(super) fn open(
        &mut self,
        name: &str,
        config: ChannelConfig,
    ) -> Option<(EndId, Arc<Leases>)> {
        if self.names.contains_key(name) {
            return None;
        }
        let id = EndId(self.number());
        let end = End {
            name: name.to_owned(),
            config,
            leases: Leases::new(id.0),
            peers: HashMap::new(),
        };
        let leases = Arc::clone(&end.leases);
        self.ends.insert(id, end);
        self.names.insert(name.to_owned(), id);
        Some((id, leases))
    }

    /// Ends a channel: peers know at once, and what it takes part in goes no further.
    pub(super) fn close(&mut self, id: EndId) -> Vec<Delivery> {
        let Some(end) = self.ends.remove(&id) else {
            return Vec::new();
        };
        self.names.remove(&end.name);
        end.leases.end_all();
        let mut out = Vec::new();
        for peer in end.peers.values() {
            if let Some(peer) = self.ends.get_mut(peer) {
                peer.lose(id, &mut out);
            }
        }
        out.extend(self.fail_halves(Instant::now()));
        let (ended, others) = mem::take(&mut self.handshakes)
            .into_iter()
            .partition(|handshake| handshake.from == id || handshake.to == id);
        self.handshakes = others;
        let ended: Vec<Handshake> = ended;
        for handshake in ended {
            let error = match handshake.from == id {
                true => ConnectError::Closed,
                false => io::Error::from(io::ErrorKind::ConnectionReset).into(),
            };
            handshake.answer(Err(error), &mut out);
        }
        out
    }

    /// Ends the connection of a channel to a peer. Returns the peer's incarnation.
    pub(super) fn disconnect(
        &mut self,
        id: EndId,
        peer: &PeerId,
    ) -> (Option<EndId>, Vec<Delivery>) {
        let mut out = Vec::new();
        let Some(other) = self
            .ends
            .get(&id)
            .and_then(|end| end.peers.get(peer))
            .copied()
        else {
            return (None, out);
        };
        for (one, other) in [(id, other), (other, id)] {
            if let Some(end) = self.ends.get_mut(&one) {
                end.lose(other, &mut out);
            }
        }
        out.extend(self.fail_halves(Instant::now()));
        (Some(other), out)
    }

    /// Checks that another peer may be connected.
    fn has_capacity(&self, end: EndId, peer: &PeerId) -> Result<(), ConnectError> {
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

    /// Checks that two channels may be connected.
    pub(super) fn may_link(&self, from: EndId, to: EndId) -> Result<(), ConnectError> {
        let Some(caller) = self.ends.get(&from) else {
            return Err(ConnectError::Closed);
        };
        self.has_capacity(to, &caller.config.id)?;
        let Some(other) = self.ends.get(&to) else {
            return Ok(());
        };
        self.has_capacity(from, &other.config.id)?;
        for (one, peer, new) in [(caller, other, to), (other, caller, from)] {
            let id = &peer.config.id;
            if one.peers.get(id).is_some_and(|old| *old != new) {
                return Err(ConnectError::Refused(format!("{id} is connected already")));
            }
            let known = one.config.known_peers.get(id);
            let public = peer
                .config
                .identity
                .as_ref()
                .map(|identity| identity.public());
            if known.is_some_and(|known| Some(*known) != public) {
                return Err(ConnectError::Identity { peer: id.clone() });
            }
        }
        Ok(())
    }

    /// Connects two channels.
    pub(super) fn link(&mut self, from: EndId, to: EndId) -> Result<Vec<Delivery>, ConnectError> {
        self.may_link(from, to)?;
        let mut out: Vec<Delivery> = Vec::new();
        for (one, other) in [(from, to), (to, from)] {
            let name = self.ends[&other].config.id.clone();
            let end = self.ends.get_mut(&one).expect("may_link found it");
            if end.peers.insert(name.clone(), other).is_none() {
                let (config, incarnation) = (end.config.clone(), other.0);
                let event = PeerEvent::Connected { incarnation };
                out.push(Box::new(move || config.tell(&name, event)));
            }
        }
        Ok(out)
    }

    /// Ends halves whose other half cannot come any more.
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
        let Some(at) = self.halves.iter().position(fits) else {
            self.halves.push(half);
            return Vec::new();
        };
        match Copy::pair(half, self.halves.remove(at)) {
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

    /// Removes what a dropped call began. A copy ends at its next turn.
    pub(super) fn forget(&mut self, number: u64) -> Option<Half> {
        let half = self.halves.iter().position(|half| half.number() == number);
        let half = half.map(|at| self.halves.remove(at));
        self.handshakes.retain(|other| other.number != number);
        self.closing.retain(|closing| closing.number != number);
        half
    }

    /// Ends what has passed its deadline, and closes that wait for nothing any more. For the
    /// hub's thread.
    pub(super) fn expire(&mut self, now: Instant) -> Vec<Delivery> {
        let mut out = self.fail_halves(now);
        let late = |handshake: &mut Handshake| handshake.deadline <= now;
        let late: Vec<_> = self.handshakes.extract_if(.., late).collect();
        for handshake in late {
            let peer = handshake.peer.clone();
            handshake.answer(Err(ConnectError::Deadline { peer }), &mut out);
        }
        for closing in mem::take(&mut self.closing) {
            // The thread asks between two pieces, so that none is being copied now.
            let touches = |copy: &Copy| {
                copy.touches(closing.end) && closing.peer.is_none_or(|peer| copy.touches(peer))
            };
            let idle = !self.copies.iter().any(touches);
            if idle && !self.answering.contains_key(&closing.end) {
                out.push(Box::new(move || drop(closing.reply.send(Ok(())))));
            } else if closing.deadline <= now {
                let error = TransferError::Deadline;
                out.push(Box::new(move || drop(closing.reply.send(Err(error)))));
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
        let closing = self.closing.iter().map(|closing| closing.deadline);
        halves.chain(handshakes).chain(closing).min()
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

    /// A peer by its name, as a side knows it.
    ///
    /// # Errors
    /// The side is closed, or the peer unknown.
    pub(super) fn peer(&self, end: EndId, peer: &PeerId) -> Result<(EndId, &End), TransferError> {
        let end = self.ends.get(&end).ok_or(TransferError::Closed)?;
        let found = end.peers.get(peer).copied();
        let found = found.and_then(|id| Some((id, self.ends.get(&id)?)));
        found.ok_or_else(|| TransferError::UnknownPeer { peer: peer.clone() })
    }
}

impl End {
    /// A peer is gone.
    fn lose(&mut self, gone: EndId, out: &mut Vec<Delivery>) {
        self.leases.end(gone.0);
        for (name, _) in self.peers.extract_if(|_, end| *end == gone) {
            let config = self.config.clone();
            let event = PeerEvent::Gone {
                incarnation: gone.0,
                reason: "its channel ended".to_owned(),
            };
            out.push(Box::new(move || config.tell(&name, event)));
        }
    }

    /// Returns whether a channel that connects with these keys is accepted.
    pub(super) fn accepts(&self, keys: Option<&Keys>) -> bool {
        match (&self.config.keys, keys) {
            (None, None) => true,
            (Some(ours), Some(theirs)) => ours.accepted().any(|key| key == theirs.first()),
            _ => false,
        }
    }
}

impl Handshake {
    /// Ends a handshake that was taken out.
    pub(super) fn answer(self, connected: Connected, out: &mut Vec<Delivery>) {
        out.push(Box::new(move || drop(self.reply.send(connected))));
    }
}
