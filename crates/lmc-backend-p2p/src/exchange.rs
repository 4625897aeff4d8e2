//! The exchange of clears: every peer eventually carries out every clear, in whatever order daemons meet.
//!
//! Each side remembers the digest that the other side sent last. Maps only grow, so of two sides with
//! different digests at least one sees the difference, and exchanges. It sends its map page by page, and each
//! answer has the page with the same number of the other map. A join only moves entries to later pages, so
//! reading the pages in order misses no entry.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use lmc_backend::{Clears, TooManyClears, now};
use lmc_key::{ClearsId, Printable};

use crate::link::{Link, Session, timeout_at};
use crate::message::{ClearsPage, Describe, Reply, Request};
use crate::peers::{ConnectedPeer, Peers};
use crate::session::{AskError, HelloError, IN_STEP_EVERY, Sessions};
use crate::spaces::mismatches;

/// Timeout of peers in one round of exchanges: a slow peer delays the next exchange of the others only by
/// this time.
const IN_STEP_TIMEOUT: Duration = Duration::from_secs(1);
/// Pause between two exchanges that messages trigger.
pub(crate) const IN_STEP_PAUSE: Duration = Duration::from_millis(50);
/// Timeout of a hello and the exchange of clears after it.
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);

/// Reason why an exchange of clears ended early; the peer's status shows it.
#[derive(Debug, thiserror::Error)]
enum ExchangeError {
    /// The peer did not answer with the requested page.
    #[error(transparent)]
    Ask(#[from] AskError),
    /// The peer's map has too many entries.
    #[error(transparent)]
    TooManyClears(#[from] TooManyClears),
}

/// Exchanges clears and descriptions with peers. The state of a peer's exchanges is in its
/// [`ConnectedPeer`].
pub(crate) struct Exchange<L> {
    pub(crate) sessions: Arc<Sessions<L>>,
}

impl<L: Link> Exchange<L> {
    /// Implements [`Node::connected`](crate::Node::connected).
    pub(crate) async fn connected(&self, session: &Session) -> Result<(), HelloError> {
        let deadline = now() + HELLO_TIMEOUT;
        self.sessions.exchange_hellos(session, deadline).await?;
        self.exchange_with(session, deadline).await;
        Ok(())
    }

    /// Returns a page of this daemon's clears. `id` is their digest.
    fn page(&self, clears: &Clears, id: ClearsId, number: u16) -> ClearsPage {
        ClearsPage {
            is_volatile: !self.sessions.host.clears_are_noted(),
            ..ClearsPage::of(clears, id, number)
        }
    }

    /// Carries out clears of a peer.
    ///
    /// # Errors
    /// [`TooManyClears`], which the peer's status shows. Nothing is carried out then.
    async fn learn(&self, session: &Session, theirs: &Clears) -> Result<(), TooManyClears> {
        let is_known = self.sessions.host.clears().contains(theirs);
        if is_known && self.sessions.host.clears_are_noted() {
            return Ok(());
        }
        let learned = self.sessions.host.learn(theirs.clone(), "a peer").await;
        match &learned {
            Ok(()) if is_known => {}
            Ok(()) => {
                let count = |peer: &mut ConnectedPeer| peer.counters.clears += 1;
                self.sessions.with(session, count);
                tracing::info!(peer = %session.peer, "clears of a peer were carried out here");
            }
            Err(error) => {
                let is_new =
                    |peer: &mut ConnectedPeer| peer.did_not_exchange(error.to_string(), now());
                if self.sessions.with(session, is_new) == Some(true) {
                    tracing::warn!(peer = %session.peer, %error, "a peer has carried out other clears, and no chunk passes between it and this server");
                }
            }
        }
        learned
    }

    /// Carries out a page of a peer's clears. Returns the page with the same number of this daemon's clears.
    pub(crate) async fn answer_page(&self, session: &Session, theirs: ClearsPage) -> ClearsPage {
        let clears = theirs.clears;
        self.sessions
            .with(session, |peer| peer.clears = Some(clears));
        // The status shows an error, and the answer lacks the clears that were not carried out.
        let _ = self.learn(session, &theirs.entries).await;
        let (clears, id) = self.sessions.clears();
        self.page(&clears, id, theirs.page)
    }

    /// Exchanges clears with a peer. After a failure, the peer's status shows the reason.
    pub(crate) async fn exchange_with(&self, session: &Session, deadline: Instant) {
        let known = self.sessions.clears().1;
        if self.sessions.with(session, |peer| peer.clears) == Some(Some(known)) {
            return;
        }
        let Some((theirs, _)) = self.send_clears(session, deadline).await else {
            return;
        };
        if self.learn(session, &theirs).await.is_ok() {
            self.sessions
                .with(session, |peer| peer.exchanges.succeeded());
        }
    }

    /// Sends a peer all clears that were carried out here. Returns the peer's clears, which are not carried
    /// out here yet, and whether a restart of the peer finds its clears. Returns `None` without an accepted
    /// hello, or after a failure, which the peer's status shows.
    async fn send_clears(
        &self,
        session: &Session,
        deadline: Instant,
    ) -> Option<(Arc<Clears>, bool)> {
        let (ours, id) = self.sessions.clears();
        let has_hello = self.sessions.with(session, |peer| peer.hello.is_some());
        has_hello.filter(|has_hello| *has_hello)?;
        match self.send_pages(session, (&ours, id), deadline).await {
            Ok((theirs, is_noted)) => Some((theirs.map_or(ours, Arc::new), is_noted)),
            Err(error) => {
                let failed =
                    |peer: &mut ConnectedPeer| peer.did_not_exchange(error.to_string(), now());
                self.sessions.with(session, failed);
                None
            }
        }
    }

    /// Sends all pages of a map. Returns the map of the peer, or `None` if it is the same, and whether a
    /// restart of the peer finds it.
    async fn send_pages(
        &self,
        session: &Session,
        (ours, id): (&Clears, ClearsId),
        deadline: Instant,
    ) -> Result<(Option<Clears>, bool), ExchangeError> {
        let mut heard = Clears::default();
        let mut number = 0;
        loop {
            let page = self.page(ours, id, number);
            let pages = page.pages;
            let request = Request::Clears(page);
            let theirs = match self.sessions.ask(&session.peer, &request, deadline).await? {
                Reply::Cleared(theirs) if theirs.page == number => theirs,
                other => return Err(AskError::unexpected(other).into()),
            };
            let clears = theirs.clears;
            self.sessions
                .with(session, |peer| peer.clears = Some(clears));
            let is_noted = !theirs.is_volatile;
            if clears == id {
                return Ok((None, is_noted));
            }
            heard.join(&theirs.entries)?;
            number += 1;
            if number >= pages.max(theirs.pages) {
                return Ok((Some(heard), is_noted));
            }
        }
    }

    /// Implements [`Node::exchange_clears`](crate::Node::exchange_clears).
    pub(crate) async fn exchange_clears(&self, deadline: Instant) {
        let due: Vec<Session> = {
            let peers = self.sessions.peers.lock();
            let due = |peer: &&ConnectedPeer| peer.hello.is_some() && peer.exchanges.is_over(now());
            peers
                .iter()
                .filter(due)
                .map(|p| p.session.clone())
                .collect()
        };
        let exchanges = due.iter().map(|peer| self.exchange_with(peer, deadline));
        join_all(exchanges).await;
    }

    /// Passes clears on to all connected peers, including those that connect meanwhile. Returns the names of
    /// the peers that have not confirmed by the deadline that they have carried out the clears and that their
    /// restart finds them. Also returns the names of `missing` peers; these are looked up after every
    /// connected peer was asked and before another one can connect.
    pub(crate) async fn pass_on(
        &self,
        clears: &Clears,
        deadline: Instant,
        missing: impl Fn(&Peers) -> Vec<String>,
    ) -> Vec<String> {
        let (mut asked, mut named) = (HashSet::new(), Vec::new());
        loop {
            let new: Vec<(Session, String)> = {
                let peers = self.sessions.peers.lock();
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
                let Some((theirs, is_noted)) = self.send_clears(&session, deadline).await else {
                    return Some(name);
                };
                // Clears that are not noted by the deadline are exchanged again later.
                let _ = timeout_at(deadline, self.learn(&session, &theirs)).await;
                match theirs.contains(clears) {
                    true if is_noted => None,
                    true => Some(format!("{name} (carried out; its restart may undo it)")),
                    false => Some(name),
                }
            });
            named.extend(join_all(unconfirmed).await.into_iter().flatten());
        }
    }

    /// Implements [`Node::stay_in_step`](crate::Node::stay_in_step).
    pub(crate) async fn stay_in_step(&self) {
        loop {
            let _ = timeout_at(now() + IN_STEP_EVERY, self.sessions.out_of_step.notified()).await;
            let deadline = now() + IN_STEP_TIMEOUT;
            let strangers = self.sessions.peers.lock().without_hello();
            // The peer's last failure shows the reason.
            let hellos = strangers.iter().map(|session| self.connected(session));
            let hellos = timeout_at(deadline, join_all(hellos));
            let exchange = self.exchange_clears(deadline);
            tokio::join!(exchange, hellos, self.describe_peers(deadline));
            tokio::time::sleep(IN_STEP_PAUSE).await;
        }
    }

    /// Sends all peers another hello as soon as engines of this host use another space, or the host is
    /// drained. A peer that has the chunks of an engine with more ranks looks only for those whose space it
    /// knows. A peer that misses the hello asks for both within seconds.
    pub(crate) async fn tell_of_host(&self) {
        let now_is = || {
            let spaces = self.sessions.spaces.notes().digest;
            (spaces, self.sessions.host.is_draining())
        };
        let mut described = now_is();
        loop {
            self.sessions.spaces.changed().await;
            let changed = now_is();
            if std::mem::replace(&mut described, changed) == changed {
                continue;
            }
            let peers: Vec<Session> = {
                let peers = self.sessions.peers.lock();
                peers.daemons().map(|peer| peer.session.clone()).collect()
            };
            let deadline = now() + IN_STEP_TIMEOUT;
            let hellos = peers
                .iter()
                .map(|session| self.sessions.exchange_hellos(session, deadline));
            join_all(hellos).await;
            tokio::time::sleep(IN_STEP_PAUSE).await;
        }
    }

    /// Asks all peers for their descriptions, and warns about models for which they share no space with this
    /// daemon.
    pub(crate) async fn describe_peers(&self, deadline: Instant) {
        let asked: Vec<_> = {
            let peers = self.sessions.peers.lock();
            let asked = peers.daemons();
            let asked = asked.map(|peer| (peer.session.clone(), peer.holds.digest));
            asked.collect()
        };
        let own = self.sessions.spaces.notes();
        let answers = asked.iter().map(|(session, digest)| async move {
            let request = Request::Describe(Describe { digest: *digest });
            (
                session,
                self.sessions.ask(&session.peer, &request, deadline).await,
            )
        });
        for (session, answer) in join_all(answers).await {
            let mut peers = self.sessions.peers.lock();
            let peer = peers.of_session(session);
            // A peer with an earlier release described its spaces in its hello only.
            if let (Some(peer), Ok(Reply::Described(mut described))) = (peer, answer) {
                if described.digest == peer.holds.digest {
                    described.spaces = std::mem::take(&mut peer.holds.spaces);
                }
                peer.holds = described;
            }
        }
        let merged = self.sessions.spaces.merged(&self.sessions.peers);
        let mut peers = self.sessions.peers.lock();
        for (session, _) in &asked {
            let Some(peer) = peers.of_session(session) else {
                continue;
            };
            for mismatch in mismatches(&own.spaces, &peer.holds.spaces, &merged) {
                let fields = mismatch.differences.iter().map(|one| one.field);
                let fields: Vec<&str> = fields.collect();
                // Different tenants do not share chunks on purpose.
                let expected = fields == ["salt"];
                if !expected && peer.warned.insert(mismatch.model.clone()) {
                    tracing::warn!(
                        peer = %session.peer,
                        model = %Printable(&mismatch.model),
                        ?fields,
                        "a peer serves this model in another space, so this side finds none of its \
                         chunks of it; `lmc peers` shows both values of these fields"
                    );
                }
            }
        }
    }
}
