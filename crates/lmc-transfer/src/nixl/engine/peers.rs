//! Peers that come and go.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::{Connected, Engine, JoinError, LinkEnd, MAX_LINKS, Peer};
use crate::config::PeerEvent;
use crate::lease::Pin;
use crate::nixl::link::Link;
use crate::nixl::transfers::Transfer;
use crate::nixl::wire::{Intro, Message};
use crate::session;
use crate::{ConnectError, PeerId, TransferError};

impl Engine {
    pub(super) fn join(
        &mut self,
        peer: session::Remote,
        intro: &Intro,
        link: Link,
    ) -> Result<(), JoinError> {
        let peer = Peer {
            memory: intro.memory(peer.incarnation),
            id: peer.id,
            incarnation: peer.incarnation,
            identity: Some(peer.identity),
            remote: intro.remote(),
            direct: self.reach.reads_from(&intro.reach, self.reads),
            open: intro.open,
            writable: intro.writable,
        };
        self.connected(peer, Some(link))
    }

    pub(super) fn connected(&mut self, peer: Peer, link: Option<Link>) -> Result<(), JoinError> {
        let refused = |why: String| Err(ConnectError::Refused(why).into());
        if self.state.closing.is_some() {
            return Err(ConnectError::Closed.into());
        }
        if let Some(connected) = self.state.peers.get_mut(&peer.id) {
            let same = connected.peer.identity == peer.identity;
            if same && connected.peer.incarnation == peer.incarnation {
                if connected.links.len() >= MAX_LINKS {
                    return refused(format!("{MAX_LINKS} connections to it are open already"));
                }
                connected.links.extend(link);
                return Ok(());
            }
            if !same || connected.peer.incarnation > peer.incarnation {
                let in_use = "the name is in use by another identity, whose connection is alive";
                return Err(JoinError::NotYet(in_use));
            }
            self.gone(&peer.id, "superseded by a newer incarnation", false);
        }
        let agent = &peer.remote.agent;
        let its = |connected: &Connected| connected.peer.remote.agent == *agent;
        if self.state.peers.values().any(its) {
            return refused("another peer has an agent of this name".to_owned());
        }
        if self.initiators.may_touch(agent) {
            let before = "an earlier transfer with it has not ended yet";
            return Err(JoinError::NotYet(before));
        }
        let most = self.config.max_peers;
        if self.state.peers.len() >= most || self.state.unended.len() > most {
            return refused(format!("{most} peers are connected, or have not gone yet"));
        }
        let loaded = self.initiators.try_load(&peer.remote);
        loaded.map_err(ConnectError::Library)?;
        self.initiators.peer_back(&peer.remote.agent);
        let (id, incarnation) = (peer.id.clone(), peer.incarnation);
        self.shared.peers.write().insert(id.clone(), incarnation);
        let mut connected = Connected {
            links: link.into_iter().collect(),
            peer: Arc::new(peer),
        };
        for link in &mut connected.links {
            // Nothing may be under way to it: see above. That message is none for which the end of
            // the connection matters.
            link.send(&Message::Settled);
            link.used = false;
        }
        self.state.peers.insert(id.clone(), connected);
        self.config.tell(&id, PeerEvent::Connected { incarnation });
        Ok(())
    }

    /// The end of a connection over which something was said ends all of the peer's: it has
    /// forgotten what that was. Another may be of a handshake that the peer gave up.
    pub(super) fn link_down(&mut self, number: u64, fault: &str, end: LinkEnd) {
        let its = |link: &Link| link.number == number;
        let mut peers = self.state.peers.values_mut();
        let found = peers.find(|connected| connected.links.iter().any(its));
        if let Some(connected) = found {
            let unused = |link: &Link| its(link) && !link.used;
            if connected.links.len() > 1 && connected.links.iter().any(unused) {
                connected.links.retain(|link| !its(link));
                return;
            }
            let id = connected.peer.id.clone();
            self.gone(&id, fault, end == LinkEnd::Ended);
        }
        if end == LinkEnd::NotYet {
            return;
        }
        let Some(incarnation) = self.state.unended.remove(&number) else {
            return;
        };
        if self.may_yet_end(incarnation) {
            return;
        }
        let now = Instant::now();
        if end == LinkEnd::Ended {
            self.settle(incarnation, now);
            return;
        }
        let pins = self.state.cut.get(&incarnation).map_or(0, Vec::len);
        let slots = (self.state.paired.stranded(incarnation) + pins) as u64;
        if slots > 0 {
            tracing::warn!(
                slots,
                fault,
                "slots stay in quarantine until a peer that cannot be reached comes back: it may \
                 still touch them"
            );
            let before = self.state.stranded.insert(incarnation, slots).unwrap_or(0);
            let more = slots.saturating_sub(before);
            self.shared.stranded.fetch_add(more, Ordering::Relaxed);
        }
    }

    /// Gives back what a peer touched over connections that have ended: its bytes may be on their
    /// way through this host's buffers for a moment, and no others.
    pub(super) fn settle(&mut self, incarnation: u64, now: Instant) {
        self.state.paired.peer_ended(incarnation, now);
        if let Some(pins) = self.state.cut.remove(&incarnation) {
            self.state.settling.push((now, pins));
        }
        if let Some(slots) = self.state.stranded.remove(&incarnation) {
            self.shared.stranded.fetch_sub(slots, Ordering::Relaxed);
        }
    }

    /// Returns whether a peer has connections that it may yet be seen to end.
    fn may_yet_end(&self, incarnation: u64) -> bool {
        let mut connected = self.state.peers.values();
        let mut unended = self.state.unended.values();
        unended.any(|other| *other == incarnation)
            || connected.any(|one| one.peer.incarnation == incarnation)
    }

    /// Ends all that there is with a peer. `ended`: it has ended the connection itself, so that it
    /// is dead, or closes and reuses its memory for nothing until this side has ended its half.
    pub(super) fn gone(&mut self, id: &PeerId, fault: &str, ended: bool) {
        let Some(connected) = self.state.peers.remove(id) else {
            return;
        };
        tracing::info!(peer = %id, fault, "a peer is gone");
        self.shared.peers.write().remove(id);
        let peer = connected.peer;
        let incarnation = peer.incarnation;
        let its = |one: &mut Transfer| one.peer.incarnation == incarnation;
        let transfers: Vec<Transfer> = self.state.transfers.extract_if(.., its).collect();
        for transfer in transfers {
            let error = TransferError::PeerGone {
                peer: id.clone(),
                reason: fault.to_owned(),
            };
            transfer.end(&mut self.initiators, Some(error), false, ended);
        }
        self.end_asking(|asking| {
            let its = asking.peer.incarnation == incarnation;
            its.then(|| TransferError::PeerGone {
                peer: id.clone(),
                reason: fault.to_owned(),
            })
        });
        self.state.paired.peer_gone(&peer, fault);
        let its = |(peer, _): &(u64, u64), _: &mut Vec<Pin>| *peer == incarnation;
        let uses = self.state.uses.extract_if(its).flat_map(|(_, pins)| pins);
        let uses: Vec<Pin> = uses.collect();
        if !uses.is_empty() {
            self.state.cut.entry(incarnation).or_default().extend(uses);
        }
        self.state
            .abandoned
            .retain(|_, (waits, _)| waits.incarnation != incarnation);
        self.initiators.peer_gone(&peer.remote.agent);
        let numbers = connected.links.iter().map(|link| link.number);
        let unended = numbers.map(|number| (number, incarnation));
        self.state.unended.extend(unended);
        let agent = peer.remote.agent.clone();
        self.state.farewells.push((agent, connected.links));
        self.leases.end(incarnation);
        let reason = fault.to_owned();
        let event = PeerEvent::Gone {
            incarnation,
            reason,
        };
        self.config.tell(id, event);
    }
}
