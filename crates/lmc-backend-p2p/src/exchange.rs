//! Exchange of clears: every peer comes to carry out every clear, whatever the order in which
//! daemons meet.
//!
//! Each side remembers the digest that the other one last said. Maps only grow, so of two sides at
//! different digests at least one knows of the difference, and exchanges. It sends its map page by
//! page, and each answer has the page of the same number of the other map. Joins only move entries
//! to later pages, so that pages read in their order miss no entry.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use lmc_backend::{Clears, TooManyClears, now};
use lmc_key::ClearsId;
use lmc_transfer::PeerId;

use crate::link::{Link, until};
use crate::message::{ClearsPage, Reply, Request, Stamped};
use crate::node::Node;
use crate::owner::Session;
use crate::peers::{Peer, Peers};

/// Time between two exchanges with peers at another digest, and of what each side holds.
pub(crate) const IN_STEP_EVERY: Duration = Duration::from_secs(5);
/// Time that peers have to answer in one: a slow one does not delay the next of the others.
const IN_STEP_TIMEOUT: Duration = Duration::from_secs(1);
/// Pause between two exchanges that messages cause.
const IN_STEP_PAUSE: Duration = Duration::from_millis(50);

/// A map of clears with its digest, so that this is computed once for each map.
pub(crate) type KnownClears = Option<(Arc<Clears>, ClearsId)>;

impl<L: Link> Node<L> {
    /// Returns the clears that this daemon has carried out, and their digest.
    pub(crate) fn clears(&self) -> (Arc<Clears>, ClearsId) {
        let clears = self.host.clears();
        let mut known = self.known_clears.lock();
        if let Some((map, id)) = &*known
            && Arc::ptr_eq(map, &clears)
        {
            return (clears, *id);
        }
        let id = clears.id();
        *known = Some((Arc::clone(&clears), id));
        (clears, id)
    }

    /// Adds the digest of this daemon's clears to a message.
    pub(crate) fn stamped<T>(&self, message: T) -> Stamped<T> {
        Stamped::new(self.clears().1, message)
    }

    /// Returns true if a peer that sent this digest has carried out the clears of this daemon, and no
    /// others. If not, the two exchange their maps at once.
    pub(crate) fn is_in_step(&self, peer: &PeerId, theirs: ClearsId) -> bool {
        let same = theirs == self.clears().1;
        if !same {
            if let Some(peer) = self.peers.lock().get_mut(peer) {
                peer.clears = None;
            }
            self.out_of_step.notify_one();
        }
        same
    }

    /// Returns a page of this daemon's clears, whose digest this is.
    fn page(&self, clears: &Clears, id: ClearsId, number: u16) -> ClearsPage {
        ClearsPage {
            is_volatile: !self.host.clears_are_noted(),
            ..ClearsPage::of(clears, id, number)
        }
    }

    /// Takes in clears that a peer has carried out.
    ///
    /// # Errors
    /// [`TooManyClears`], which the peer's status shows. Nothing is taken in then.
    async fn learn(&self, session: &Session, theirs: &Clears) -> Result<(), TooManyClears> {
        let is_known = self.host.clears().contains(theirs);
        if is_known && self.host.clears_are_noted() {
            return Ok(());
        }
        let learned = self.host.learn(theirs.clone(), "a peer").await;
        match &learned {
            Ok(()) if is_known => {}
            Ok(()) => {
                self.count(session, |counters| counters.clears += 1);
                tracing::info!(peer = %session.peer, "clears of a peer were carried out here");
            }
            Err(error) => {
                if let Some(peer) = self.peers.lock().of_session(session)
                    && peer.did_not_exchange(error.to_string(), now())
                {
                    tracing::warn!(peer = %session.peer, %error, "a peer has carried out other clears, and no chunk passes between it and this server");
                }
            }
        }
        learned
    }

    /// Takes in a page of a peer's clears. Returns the page of the same number of this daemon's.
    pub(crate) async fn answer_page(&self, session: &Session, theirs: ClearsPage) -> ClearsPage {
        if let Some(peer) = self.peers.lock().of_session(session) {
            peer.clears = Some(theirs.clears);
        }
        // The status shows an error, and the answer does not have what was not taken in.
        let _ = self.learn(session, &theirs.entries).await;
        let (clears, id) = self.clears();
        self.page(&clears, id, theirs.page)
    }

    /// Exchanges clears with a peer. The peer's status shows why that failed.
    pub(crate) async fn exchange_with(&self, session: &Session, deadline: Instant) {
        let known = self.clears().1;
        let is_at = |peer: &mut Peer| peer.clears == Some(known);
        if self.peers.lock().of_session(session).is_some_and(is_at) {
            return;
        }
        let Ok((theirs, _)) = self.send_clears(session, deadline).await else {
            return;
        };
        if self.learn(session, &theirs).await.is_ok()
            && let Some(peer) = self.peers.lock().of_session(session)
        {
            peer.exchanges.succeeded();
        }
    }

    /// Sends a peer all clears that were carried out here. Returns clears that the peer has carried out,
    /// which are not taken in yet, and whether a restart of the peer finds them.
    ///
    /// # Errors
    /// The reason, for people.
    async fn send_clears(
        &self,
        session: &Session,
        deadline: Instant,
    ) -> Result<(Arc<Clears>, bool), String> {
        let (ours, id) = self.clears();
        let has_hello = |peer: &mut Peer| peer.hello.is_some();
        if !self.peers.lock().of_session(session).is_some_and(has_hello) {
            return Err("no hello was exchanged".to_owned());
        }
        let sent = self.send_pages(session, (&ours, id), deadline).await;
        if let (Err(reason), Some(peer)) = (&sent, self.peers.lock().of_session(session)) {
            peer.did_not_exchange(reason.clone(), now());
        }
        let (theirs, is_noted) = sent?;
        Ok((theirs.map_or(ours, Arc::new), is_noted))
    }

    /// Sends all pages of a map. Returns the map of the peer, `None` if that is the same, and whether
    /// a restart of the peer finds it.
    async fn send_pages(
        &self,
        session: &Session,
        (ours, id): (&Clears, ClearsId),
        deadline: Instant,
    ) -> Result<(Option<Clears>, bool), String> {
        let mut heard = Clears::default();
        let mut number = 0;
        loop {
            let page = self.page(ours, id, number);
            let pages = page.pages;
            let request = Request::Clears(page);
            let theirs = match self.ask(&session.peer, &request, deadline).await? {
                Reply::Cleared(theirs) if theirs.page == number => theirs,
                Reply::Refused(refusal) => return Err(refusal.to_string()),
                _ => return Err("another answer than to a page of clears".to_owned()),
            };
            if let Some(peer) = self.peers.lock().of_session(session) {
                peer.clears = Some(theirs.clears);
            }
            let is_noted = !theirs.is_volatile;
            if theirs.clears == id {
                return Ok((None, is_noted));
            }
            let joined = heard.join(&theirs.entries);
            joined.map_err(|error| error.to_string())?;
            number += 1;
            if number >= pages.max(theirs.pages) {
                return Ok((Some(heard), is_noted));
            }
        }
    }

    /// Exchanges clears with the connected peers that are not known to have carried out the same
    /// ones, except those with which that failed a moment ago.
    pub async fn exchange_clears(&self, deadline: Instant) {
        let due: Vec<Session> = {
            let peers = self.peers.lock();
            let due = |peer: &&Peer| peer.hello.is_some() && peer.exchanges.is_over(now());
            peers
                .iter()
                .filter(due)
                .map(|p| p.session.clone())
                .collect()
        };
        let exchanges = due.iter().map(|peer| self.exchange_with(peer, deadline));
        join_all(exchanges).await;
    }

    /// Passes clears on to all connected peers, also to those that connect meanwhile. Returns the names of
    /// the peers that have not confirmed by the deadline that they have carried them out, so that their
    /// restart finds them, and the names of `missing` peers, which are looked up once every connected peer
    /// was asked, before another can connect.
    pub(crate) async fn pass_on(
        &self,
        clears: &Clears,
        deadline: Instant,
        missing: impl Fn(&Peers) -> Vec<String>,
    ) -> Vec<String> {
        let (mut asked, mut named) = (HashSet::new(), Vec::new());
        loop {
            let new: Vec<(Session, String)> = {
                let peers = self.peers.lock();
                let new = peers
                    .iter()
                    .filter(|peer| asked.insert(peer.session.clone()));
                let new: Vec<_> = new.map(|p| (p.session.clone(), p.name())).collect();
                if new.is_empty() {
                    named.extend(missing(&peers));
                    return named;
                }
                new
            };
            let unconfirmed = new.into_iter().map(|(session, name)| async move {
                let Ok((theirs, is_noted)) = self.send_clears(&session, deadline).await else {
                    return Some(name);
                };
                // What is not noted by the deadline is exchanged once more.
                let _ = until(deadline, self.learn(&session, &theirs)).await;
                match theirs.contains(clears) {
                    true if is_noted => None,
                    true => Some(format!("{name} (carried out; its restart may undo it)")),
                    false => Some(name),
                }
            });
            named.extend(join_all(unconfirmed).await.into_iter().flatten());
        }
    }

    /// Exchanges clears with peers at another digest, and sends a hello again to peers without one,
    /// from time to time and as soon as a message shows either; asks peers what they hold. Runs
    /// until it is dropped.
    pub async fn stay_in_step(&self) {
        loop {
            let _ = until(now() + IN_STEP_EVERY, self.out_of_step.notified()).await;
            let deadline = now() + IN_STEP_TIMEOUT;
            let strangers = self.peers.lock().without_hello();
            // The peer's last failure has the reason.
            let hellos = strangers.iter().map(|session| self.connected(session));
            let hellos = until(deadline, join_all(hellos));
            let exchange = self.exchange_clears(deadline);
            tokio::join!(exchange, hellos, self.describe_peers(deadline));
            tokio::time::sleep(IN_STEP_PAUSE).await;
        }
    }
}
