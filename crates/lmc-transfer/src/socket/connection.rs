//! A connection to one incarnation of a peer: its streams, and the requests under way on them.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use lmc_memory::SealedSlot;
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot, watch};

use super::budget::Account;
use super::channel_core::ChannelCore;
use super::frame::{Frame, FrameOutcome};
use super::landing::Target;
use super::offers::{INLINED_OFFERS, OFFER_CAPACITY, Offer, Offers};
use super::outgoing::{Outgoing, PieceForm};
#[cfg(feature = "nixl")]
use super::plane_link::PlaneLink;
use super::writer::{AT_ONCE, SendQueue};
use crate::checks::PeerMemory;
use crate::net::Sockets;
#[cfg(feature = "nixl")]
use crate::nixl::Block;
use crate::session::Sealer;
use crate::{PeerId, PublicIdentity};

/// Requests that one side may have under way on one stream. More break the protocol.
pub(super) const MAX_REQUESTS: usize = 64;

/// The other side of a connection.
#[derive(Debug, Clone)]
pub(super) struct Remote {
    pub(super) id: PeerId,
    pub(super) incarnation: u64,
    pub(super) identity: PublicIdentity,
    pub(super) memory: PeerMemory,
    /// True if it connected to this side.
    pub(super) incoming: bool,
    /// Number of the initiator's attempt.
    pub(super) attempt: u64,
    /// Time between two signs of life, of either side.
    pub(super) keepalive: Duration,
    /// Form of pieces of objects, both ways.
    pub(super) form: PieceForm,
    /// True if it has NIXL.
    #[cfg(feature = "nixl")]
    pub(super) nixl: bool,
}

#[derive(Debug)]
pub(super) struct Connection {
    pub(super) remote: Remote,
    pub(super) streams: Vec<Stream>,
    /// The thread of the first stream.
    pub(super) home: Handle,
    /// Offers of the peer, and the receives that wait for them.
    pub(super) incoming: Arc<Offers<Self>>,
    /// Offers of this side.
    pub(super) offered: Mutex<HashMap<u64, Offered>>,
    pub(super) offer_capacity: Arc<Semaphore>,
    pub(super) inline_capacity: Arc<Semaphore>,
    /// Inlined offers of the peer that are not finished yet.
    pub(super) inlined: Arc<AtomicUsize>,
    pub(super) account: Arc<Account>,
    /// The other plane, where both sides have it.
    #[cfg(feature = "nixl")]
    pub(super) plane: Option<PlaneLink>,
    /// Number of the last pong.
    pong: watch::Sender<u64>,
    next_id: AtomicU64,
    next_stream: AtomicUsize,
    pub(super) stop: watch::Sender<bool>,
    pub(super) end: watch::Sender<Option<End>>,
}

/// One stream, as the calls see it.
#[derive(Debug)]
pub(super) struct Stream {
    pub(super) queue: SendQueue,
    /// Requests of this side without an answer; `None` after the end.
    pending: Mutex<Option<HashMap<u64, Pending>>>,
    pub(super) capacity: Arc<Semaphore>,
    /// Requests of the peer without an answer.
    pub(super) unanswered: Arc<AtomicUsize>,
    /// Grows with every byte received.
    pub(super) received: AtomicU64,
    /// Grows with every answer, and every byte of one.
    pub(super) answered: AtomicU64,
}

/// A request of this side that is not answered yet.
#[derive(Debug)]
pub(super) struct Pending {
    /// The target of the requested data; `None` for a write or a question.
    pub(super) target: Option<Arc<Target>>,
    /// The block that the peer writes to, for a read by NIXL.
    #[cfg(feature = "nixl")]
    pub(super) block: Option<Block>,
    pub(super) reply: oneshot::Sender<Reply>,
    pub(super) permit: OwnedSemaphorePermit,
}

impl Pending {
    /// Returns a request that the streams alone serve.
    pub(super) fn of_streams(
        target: Option<Arc<Target>>,
        reply: oneshot::Sender<Reply>,
        permit: OwnedSemaphorePermit,
    ) -> Self {
        Self {
            target,
            #[cfg(feature = "nixl")]
            block: None,
            reply,
            permit,
        }
    }

    /// Returns whether the request is a read by NIXL.
    pub(super) fn is_by_nixl(&self) -> bool {
        #[cfg(feature = "nixl")]
        return self.block.is_some();
        #[cfg(not(feature = "nixl"))]
        false
    }

    /// Answers the call, after releasing the permit that the call's next request needs.
    pub(super) fn answer(self, reply: Reply) {
        #[cfg(feature = "nixl")]
        if let Some(block) = self.block {
            // The peer has not begun to write.
            block.over();
        }
        drop(self.permit);
        let _ = self.reply.send(reply);
    }
}

/// The outcome of receiving a payload.
#[derive(Debug, Default)]
pub(super) struct Arrival {
    /// Ranges with a wrong checksum.
    pub(super) bad: Vec<u32>,
    /// True if the sender aborted the payload, or some of it was no longer wanted.
    pub(super) aborted: bool,
    /// Checksums that were computed here for ranges of a read without checksums.
    pub(super) sums: Vec<(u32, u64)>,
}

#[derive(Debug)]
pub(super) enum Reply {
    /// The data of a read.
    Arrived(Arrival),
    /// Outcome of a write, of a read without data, or of a question that was refused.
    Outcome(FrameOutcome),
    /// The answer to a question.
    Message(Vec<u8>),
    /// The reason why the peer has not written everything by NIXL.
    #[cfg(feature = "nixl")]
    Unmoved(String),
}

/// Objects that this side offers to send.
#[derive(Debug)]
pub(super) struct Offered {
    /// `None` once they are withdrawn.
    pub(super) objects: Option<Arc<Vec<SealedSlot>>>,
    /// Receives the number of leading objects that are in place, and the outcome.
    pub(super) finish: oneshot::Sender<(u64, FrameOutcome)>,
    /// True if the peer has begun to read them.
    pub(super) pulled: bool,
    /// Present if the objects were inlined.
    pub(super) inlined: Option<OwnedSemaphorePermit>,
    pub(super) permit: OwnedSemaphorePermit,
}

/// The end of a connection.
#[derive(Debug, Clone)]
pub(super) struct End {
    pub(super) reason: String,
    /// True if the peer closed the connection. A peer closes none of its sockets before everything
    /// that reads from them has ended. So from then on nothing of the peer writes to its memory for
    /// us.
    pub(super) by_peer: bool,
}

/// The reason why a stream ended.
#[derive(Debug)]
pub(super) enum Gone {
    /// The peer closed it.
    Closed,
    Io(io::Error),
    /// The peer broke the protocol.
    Broken(String),
}

impl From<io::Error> for Gone {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl Offer<Connection> {
    /// Reports the outcome of the offer to the peer.
    pub(super) fn finish(&self, done: usize, outcome: FrameOutcome) {
        let connection = &self.connection;
        let finish = Frame::Finish {
            id: self.id,
            done: done as u64,
            outcome,
        };
        connection.streams[0].queue.push(Outgoing {
            answers: self.inlined.then(|| Arc::clone(&connection.inlined)),
            ..Outgoing::of(&finish)
        });
    }
}

impl Connection {
    /// Returns a connection, and for each stream the queue of frames that its task sends.
    pub(super) fn new(
        core: &ChannelCore,
        remote: Remote,
        sockets: &Arc<Sockets>,
        sealers: Vec<Sealer>,
        home: Handle,
        incoming: Arc<Offers<Self>>,
    ) -> (Arc<Self>, Vec<mpsc::UnboundedReceiver<Outgoing>>) {
        let mut queues = Vec::with_capacity(sealers.len());
        let form = remote.form;
        #[cfg(feature = "nixl")]
        let plane = core.config.nixl.as_ref();
        #[cfg(feature = "nixl")]
        let plane = plane.filter(|_| remote.nixl && form != PieceForm::Sealed);
        #[cfg(feature = "nixl")]
        let plane = plane.map(|plane| PlaneLink::new(plane.plane()));
        let stream = |(stream, sealer)| {
            let (queue, receiver) = SendQueue::new(core, sockets, stream, sealer, form);
            queues.push(receiver);
            Stream {
                queue,
                pending: Mutex::new(Some(HashMap::new())),
                capacity: Arc::new(Semaphore::new(MAX_REQUESTS)),
                unanswered: Arc::default(),
                received: AtomicU64::new(0),
                answered: AtomicU64::new(0),
            }
        };
        let connection = Self {
            remote,
            streams: sealers.into_iter().enumerate().map(stream).collect(),
            home,
            incoming,
            offered: Mutex::default(),
            offer_capacity: Arc::new(Semaphore::new(OFFER_CAPACITY)),
            inline_capacity: Arc::new(Semaphore::new(INLINED_OFFERS)),
            inlined: Arc::default(),
            account: core.budget.account(),
            #[cfg(feature = "nixl")]
            plane,
            pong: watch::Sender::new(0),
            next_id: AtomicU64::new(1),
            next_stream: AtomicUsize::new(0),
            stop: watch::Sender::new(false),
            end: watch::Sender::new(None),
        };
        (Arc::new(connection), queues)
    }

    pub(super) fn next_id(&self) -> u64 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    /// Returns the stream that a call of `bytes` bytes begins with: another stream for each call. A
    /// small call uses the first stream while it is idle, since its thread is the likeliest to be
    /// awake.
    pub(super) fn next_stream(&self, bytes: u64) -> usize {
        if bytes <= AT_ONCE && self.streams[0].is_idle() {
            return 0;
        }
        self.next_stream.fetch_add(1, Ordering::Relaxed) % self.streams.len()
    }

    /// Sends a frame without payload.
    pub(super) fn send(&self, stream: usize, frame: &Frame) {
        self.streams[stream].queue.push(Outgoing::of(frame));
    }

    /// Sends a frame without payload if that needs no waiting.
    pub(super) fn send_now(&self, stream: usize, frame: &Frame) {
        self.streams[stream].queue.push_now(Outgoing::of(frame));
    }

    /// Notes whether the objects of an offer are inlined.
    pub(super) fn set_inlined(&self, offer: u64, permit: Option<OwnedSemaphorePermit>) {
        let mut offered = self.offered.lock();
        if let Some(offered) = offered.get_mut(&offer) {
            offered.inlined = permit;
        }
    }

    /// Notes a pong.
    pub(super) fn ponged(&self, number: u64) {
        self.pong.send_modify(|last| *last = number.max(*last));
    }

    /// Asks the peer for a sign of life. Returns `false` if the connection ended instead.
    pub(super) async fn is_alive(&self, again: Duration) -> bool {
        let mut pong = self.pong.subscribe();
        let first = self.next_id();
        let answered = async {
            // Only an answer to this question counts: other bytes may have been sent before the
            // peer died.
            let _ = pong.wait_for(|last| *last >= first).await;
        };
        let asking = async {
            let mut number = first;
            loop {
                self.send_now(0, &Frame::Ping(number));
                tokio::time::sleep(again).await;
                number = self.next_id();
            }
        };
        tokio::select! {
            () = answered => true,
            _ = self.ended() => false,
            () = asking => unreachable!("it asks until it is dropped"),
        }
    }

    /// Returns how the connection ended, if it has.
    pub(super) fn end(&self) -> Option<End> {
        self.end.borrow().clone()
    }

    /// Waits for the end of the connection.
    pub(super) async fn ended(&self) -> End {
        let mut end = self.end.subscribe();
        let ended = end.wait_for(Option::is_some).await;
        let ended = ended.ok().and_then(|end| end.clone());
        ended.unwrap_or_else(|| End {
            reason: "the connection ended".into(),
            by_peer: false,
        })
    }

    /// Asks the connection to end.
    pub(super) fn stop(&self) {
        self.stop.send_replace(true);
    }
}

impl Stream {
    /// Returns whether no request is under way, as far as this side knows.
    fn is_idle(&self) -> bool {
        self.capacity.available_permits() == MAX_REQUESTS
            && self.unanswered.load(Ordering::Relaxed) == 0
            && self.queue.behind().is_none()
    }

    /// Waits for capacity for a request; `None` after the end.
    pub(super) async fn acquire(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.capacity).acquire_owned().await.ok()
    }

    /// Sends a request; `false` after the end.
    pub(super) fn request(&self, id: u64, pending: Pending, outgoing: Outgoing) -> bool {
        {
            let mut requests = self.pending.lock();
            let Some(requests) = requests.as_mut() else {
                return false;
            };
            requests.insert(id, pending);
        }
        self.queue.push(outgoing);
        true
    }

    /// Removes a request, because it is answered or will never be sent.
    pub(super) fn take(&self, id: u64) -> Option<Pending> {
        self.pending.lock().as_mut()?.remove(&id)
    }

    /// Returns whether any unanswered request was abandoned by its call.
    pub(super) fn has_given_up(&self) -> bool {
        let pending = self.pending.lock();
        let mut requests = pending.iter().flat_map(HashMap::values);
        requests.any(|request| request.reply.is_closed())
    }

    /// Ends all requests.
    pub(super) fn close(&self) {
        self.capacity.close();
        let requests = self.pending.lock().take();
        drop(requests);
    }
}
