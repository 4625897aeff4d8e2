//! [`Sessions`]: the sessions of this daemon with its peers: hellos, requests with their answers, and the
//! digest of the clears.

use std::sync::Arc;
use std::time::{Duration, Instant};

use lmc_backend::{Clears, Host, now};
use lmc_key::ClearsId;
use lmc_transfer::{PeerId, TransferError};
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::config::NodeConfig;
use crate::link::{Link, Session};
use crate::message::{
    Describe, FEATURE_LATE_DIGESTS, Hello, MessageError, Refusal, Reply, Request, Stamped,
};
use crate::peers::{ConnectedPeer, Failure, Peers};
use crate::spaces::{OwnSpaces, cut};
use crate::unfit::Unfit;

/// Interval of exchanges with peers at another digest, and of descriptions.
pub(crate) const IN_STEP_EVERY: Duration = Duration::from_secs(5);
/// Time that an owner needs to lease and sum chunks in memory, in addition to the time that it may wait.
pub(crate) const HOLD_MARGIN: Duration = Duration::from_millis(250);
/// Longest time that a peer takes to read chunks on an order.
pub(crate) const ORDER_TIMEOUT: Duration = Duration::from_secs(20);
/// Timeout of a probe, after which the peer counts as gone.
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);

/// Reason why a request to a peer brought no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AskError {
    /// The peer did not answer by the deadline; it may have handled the request.
    #[error("no answer by the deadline")]
    Deadline,
    /// The channel did not deliver the request or the answer.
    #[error(transparent)]
    Channel(TransferError),
    /// The answer is not a frame of the protocol, or the request does not fit into one.
    #[error(transparent)]
    Message(#[from] MessageError),
    /// The peer refuses the request.
    #[error(transparent)]
    Refused(Refusal),
    /// The answer belongs to another kind of request.
    #[error("an unexpected kind of answer")]
    OtherReply,
}

impl AskError {
    /// Returns the error for an answer of the wrong kind.
    pub(crate) fn unexpected(reply: Reply) -> Self {
        match reply {
            Reply::Refused(refusal) => Self::Refused(refusal),
            _ => Self::OtherReply,
        }
    }
}

/// Reason why a connected peer is not used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HelloError {
    /// The settings of the two sides do not fit, as found by this side or by the peer.
    #[error("{0}")]
    Unfit(Unfit),
    /// The peer refuses this side.
    #[error("refused by the peer: {0}")]
    Refused(Refusal),
    /// The peer gave no answer.
    #[error("no answer to a hello: {0}")]
    NoAnswer(AskError),
}

/// A map of clears with its digest.
type KnownClears = (Arc<Clears>, ClearsId);

/// The sessions of this daemon with its peers.
///
/// Lock order: `peers` is locked after the locks of [`LentChunks`](crate::owner::LentChunks), and
/// before the dialed members of [`DirectoryClient`](crate::directory::DirectoryClient). No other lock of
/// this crate is taken under `peers`.
pub(crate) struct Sessions<L> {
    pub(crate) link: L,
    pub(crate) host: Arc<dyn Host>,
    pub(crate) config: NodeConfig,
    pub(crate) peers: Mutex<Peers>,
    pub(crate) spaces: OwnSpaces,
    /// This daemon's clears at the last call, so that the digest is computed once for each map.
    known_clears: Mutex<Option<KnownClears>>,
    /// Notified when a message has another digest of clears, or a peer lacks this side's hello.
    pub(crate) out_of_step: Notify,
    /// Notified when a peer's hello was accepted.
    pub(crate) hello_came: Notify,
    /// Ends the leases of a session that has ended. Called while no lock is held.
    on_end: Box<dyn Fn(&Session) + Send + Sync>,
}

impl<L: Link> Sessions<L> {
    pub(crate) fn new(
        config: NodeConfig,
        link: L,
        host: Arc<dyn Host>,
        on_end: impl Fn(&Session) + Send + Sync + 'static,
    ) -> Self {
        Self {
            peers: Mutex::default(),
            spaces: OwnSpaces::new(Arc::clone(&host), config.salt_keys.clone()),
            known_clears: Mutex::default(),
            out_of_step: Notify::new(),
            hello_came: Notify::new(),
            on_end: Box::new(on_end),
            link,
            host,
            config,
        }
    }

    /// Records that an incarnation of a peer is connected, and exchanges hellos with it.
    ///
    /// # Errors
    /// [`HelloError`].
    pub(crate) async fn exchange_hellos(
        &self,
        session: &Session,
        deadline: Instant,
    ) -> Result<(), HelloError> {
        if !self.link.is_current(session) {
            let peer = session.peer.clone();
            let gone = TransferError::UnknownPeer { peer };
            return Err(HelloError::NoAnswer(AskError::Channel(gone)));
        }
        self.note_connected(session);
        let hello = Request::Hello(self.hello());
        let result = match self.ask(&session.peer, &hello, deadline).await {
            Ok(Reply::Hello(theirs)) => {
                let accepted = self.accept_hello(session, theirs);
                accepted.map_err(HelloError::Unfit)
            }
            Ok(Reply::Refused(refusal)) => Err(match Unfit::refused(&self.config, &refusal) {
                Some(unfit) => HelloError::Unfit(unfit),
                None => HelloError::Refused(refusal),
            }),
            Ok(_) => Err(HelloError::NoAnswer(AskError::OtherReply)),
            Err(error) => Err(HelloError::NoAnswer(error)),
        };
        if let Err(error) = &result {
            self.with(session, |peer| {
                // For as long as both processes run.
                peer.is_unfit = matches!(error, HelloError::Unfit(_));
                peer.last_failure = Some(Failure::new(error.to_string(), now()));
            });
        }
        if !self.link.is_current(session) {
            // The peer may have disconnected before this was recorded.
            self.disconnected(session, "the peer disconnected");
        }
        result
    }

    /// Records that an incarnation of a peer is connected.
    pub(crate) fn note_connected(&self, session: &Session) {
        let replaced = self.peers.lock().connected(session, now());
        if let Some(old) = replaced {
            (self.on_end)(&old);
        }
    }

    /// Records that an incarnation of a peer is gone, with the reason.
    pub(crate) fn disconnected(&self, session: &Session, reason: &str) {
        let failure = Failure::new(reason.to_owned(), now());
        self.peers.lock().disconnected(session, failure);
        (self.on_end)(session);
    }

    /// Returns the hello of this side.
    pub(crate) fn hello(&self) -> Hello {
        let short = |text: &String| {
            let mut text = text.clone();
            cut(&mut text);
            text
        };
        Hello {
            oldest: self.config.versions.0,
            newest: self.config.versions.1,
            features: FEATURE_LATE_DIGESTS,
            name: short(&self.config.name),
            address: short(&self.config.address),
            chunk_size: self.config.chunk_size,
            algorithm: short(&self.config.algorithm),
            clears: self.clears().1,
            spaces: self.spaces.notes().spaces.to_vec(),
            is_draining: self.host.is_draining(),
        }
    }

    /// Accepts a peer's hello, if the two sides fit.
    ///
    /// # Errors
    /// [`Unfit`].
    pub(crate) fn accept_hello(&self, session: &Session, hello: Hello) -> Result<(), Unfit> {
        Unfit::check(&self.config, &hello)?;
        self.peers.lock().accept(session, hello);
        self.hello_came.notify_waiters();
        Ok(())
    }

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

    /// Returns true if a peer that sent this digest has carried out the same clears as this daemon. If not,
    /// the two exchange their maps at once.
    pub(crate) fn is_in_step(&self, peer: &PeerId, theirs: ClearsId) -> bool {
        let same = theirs == self.clears().1;
        if !same {
            self.with_peer(peer, |peer| peer.clears = None);
            self.out_of_step.notify_one();
        }
        same
    }

    /// Calls a function with the peer of a session, under the lock of the peers. Returns `None` if the
    /// session has ended.
    pub(crate) fn with<T>(
        &self,
        session: &Session,
        act: impl FnOnce(&mut ConnectedPeer) -> T,
    ) -> Option<T> {
        self.peers.lock().of_session(session).map(act)
    }

    /// Calls a function with a peer, under the lock of the peers. Returns `None` if the peer is not
    /// connected.
    pub(crate) fn with_peer<T>(
        &self,
        peer: &PeerId,
        act: impl FnOnce(&mut ConnectedPeer) -> T,
    ) -> Option<T> {
        self.peers.lock().get_mut(peer).map(act)
    }

    /// Sends a request, and records the peer's response time or the failure. A refusal is an answer.
    ///
    /// # Errors
    /// [`AskError`].
    pub(crate) async fn ask(
        &self,
        peer: &PeerId,
        request: &Request,
        deadline: Instant,
    ) -> Result<Reply, AskError> {
        let body = request.to_bytes()?;
        let sent = now();
        let reply = match self.link.request(peer, body, deadline).await {
            Err(TransferError::Deadline) => Err(AskError::Deadline),
            Err(error) => Err(AskError::Channel(error)),
            Ok(bytes) => Reply::from_bytes(&bytes).map_err(AskError::Message),
        };
        self.with_peer(peer, |peer| match &reply {
            // These answers come only after the peer has read chunks or noted clears, so they measure no
            // round trip.
            Ok(Reply::Copying(_) | Reply::Pushed(_) | Reply::Cleared(_)) => {}
            Ok(reply) => {
                peer.answered(now().saturating_duration_since(sent), now());
                if *reply == Reply::Refused(Refusal::NoHello) {
                    // The peer does not know this side, or does not know it yet.
                    peer.hello = None;
                    let (last, now) = (peer.lacked_hello, now());
                    // A peer that never accepts the hello is sent it no more often than others.
                    if last.is_none_or(|last| now >= last + IN_STEP_EVERY) {
                        peer.lacked_hello = Some(now);
                        self.out_of_step.notify_one();
                    }
                }
            }
            Err(error) => {
                peer.counters.malformed += u64::from(matches!(error, AskError::Message(_)));
                let allowed = deadline.saturating_duration_since(sent);
                peer.failed(error.to_string(), allowed, now());
            }
        });
        reply
    }

    /// Sends a small request in the background to a peer whose pause has just begun: its answer ends the
    /// pause, or shortens the pause if it is late too.
    pub(crate) fn probe(self: &Arc<Self>, peer: &PeerId) {
        let begun = |peer: &mut ConnectedPeer| peer.begin_probe().then_some(peer.holds.digest);
        let Some(digest) = self.with_peer(peer, begun).flatten() else {
            return;
        };
        let (this, peer) = (Arc::clone(self), peer.clone());
        tokio::spawn(async move {
            let request = Request::Describe(Describe { digest });
            // `ask` records the outcome.
            let _ = this.ask(&peer, &request, now() + PROBE_TIMEOUT).await;
        });
    }
}
