//! A connection to one incarnation of a peer: its streams, what is under way on them, its end.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use lmc_memory::SealedSlot;
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::{Duration, MissedTickBehavior, interval, timeout};

use super::endpoint::{Socket, Sockets};
use super::frame::{Frame, Outcome, Segment};
use super::inlet::Inlet;
use super::landing::Target;
use super::outlet::{AT_ONCE, Outbox, Outlet};
use super::rendezvous::{CARRIED_ROOM, OFFER_ROOM, Rendezvous};
use super::shared::Shared;
use crate::{PeerId, TransferError};

/// Requests that one side may have under way on one stream. More break the protocol.
pub(super) const LANE_ROOM: usize = 64;
/// Intervals of the keepalive without a byte, from a peer or taken by it on a stream where some
/// wait, after which it is taken for gone.
const SILENT_INTERVALS: u32 = 3;
/// Time to find, after an error of a stream, that the peer has closed another or the same.
const CLOSED_TOO: Duration = Duration::from_millis(100);

/// Where the streams of a connection lead to.
#[derive(Debug, Clone)]
pub(super) struct Remote {
    pub(super) id: PeerId,
    pub(super) incarnation: u64,
    /// Bytes of its arena.
    pub(super) arena: u64,
    pub(super) unit: u64,
    /// Whether it connected to this side.
    pub(super) incoming: bool,
    /// Which attempt of the initiator's this is.
    pub(super) attempt: u64,
    /// Time between two signs of life, of either side.
    pub(super) keepalive: Duration,
}

#[derive(Debug)]
pub(super) struct Connection {
    pub(super) remote: Remote,
    pub(super) lanes: Vec<Lane>,
    pub(super) rendezvous: Arc<Rendezvous>,
    /// What this side offers.
    pub(super) offers: Mutex<HashMap<u64, Offered>>,
    pub(super) offer_room: Arc<Semaphore>,
    pub(super) carried_room: Arc<Semaphore>,
    /// Offers of the peer whose bytes came along, until it is told what became of them.
    pub(super) carried: Arc<AtomicUsize>,
    /// Grows with every byte received.
    pub(super) heard: AtomicU64,
    next_id: AtomicU64,
    next_lane: AtomicUsize,
    stop: watch::Sender<bool>,
    end: watch::Sender<Option<End>>,
}

/// One stream, as the calls see it.
#[derive(Debug)]
pub(super) struct Lane {
    pub(super) outbox: Outbox,
    /// Requests of this side without an answer; none after the end.
    pending: Mutex<Option<HashMap<u64, Pending>>>,
    pub(super) room: Arc<Semaphore>,
    /// Requests of the peer without an answer.
    pub(super) unanswered: Arc<AtomicUsize>,
}

/// A request of this side.
#[derive(Debug)]
pub(super) struct Pending {
    /// Where the data goes that is asked for; none for a write.
    pub(super) target: Option<Arc<Target>>,
    pub(super) reply: oneshot::Sender<Reply>,
    pub(super) room: OwnedSemaphorePermit,
}

impl Pending {
    /// Tells who waits. There is room for his next request before he hears of it.
    pub(super) fn answer(self, reply: Reply) {
        drop(self.room);
        let _ = self.reply.send(reply);
    }
}

#[derive(Debug)]
pub(super) enum Reply {
    /// The data of a read, but for segments that arrived with a wrong checksum.
    Arrived { bad: Vec<u32>, aborted: bool },
    /// Of a write, or of a read without data.
    Outcome(Outcome),
}

/// Objects that this side offers.
#[derive(Debug)]
pub(super) struct Offered {
    /// None once it is taken back.
    pub(super) objects: Option<Arc<Vec<SealedSlot>>>,
    /// Leading objects that are in place, and why not all.
    pub(super) finish: oneshot::Sender<(u64, Outcome)>,
    /// Whether the peer has begun to read them.
    pub(super) pulled: bool,
    /// There where their bytes have gone along.
    pub(super) carried: Option<OwnedSemaphorePermit>,
    pub(super) room: OwnedSemaphorePermit,
}

/// What is to be sent.
#[derive(Debug)]
pub(super) struct Outgoing {
    pub(super) bytes: Vec<u8>,
    pub(super) payload: Option<Payload>,
    /// Requests of the peer without an answer, where this is one.
    pub(super) answers: Option<Arc<AtomicUsize>>,
    /// Comes back when it is sent.
    pub(super) _room: Option<OwnedSemaphorePermit>,
}

impl Outgoing {
    /// Bytes alone, which answer nothing.
    pub(super) fn of(bytes: Vec<u8>) -> Self {
        Self {
            bytes,
            payload: None,
            answers: None,
            _room: None,
        }
    }

    /// What of the arena goes along.
    pub(super) fn segments(&self) -> &[Segment] {
        let payload = self.payload.as_ref();
        payload.map_or(&[], |payload| &payload.segments)
    }

    /// The slots of a write, to be kept until it is sent; none when it may not begin.
    pub(super) fn begin(&self) -> Option<Arc<Vec<SealedSlot>>> {
        match &self.payload.as_ref()?.source {
            Source::Write(progress) => progress.begin(),
            Source::Places | Source::Offer { .. } => None,
        }
    }

    /// To be called before it is sent: the peer may ask anew as soon as it has the answer.
    pub(super) fn is_sent(&self) {
        if let Some(unanswered) = &self.answers {
            unanswered.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// It was not sent after all.
    pub(super) fn is_unsent(&self) {
        if let Some(unanswered) = &self.answers {
            unanswered.fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[derive(Debug)]
pub(super) struct Payload {
    pub(super) segments: Vec<Segment>,
    pub(super) source: Source,
}

/// What a payload is read from.
#[derive(Debug)]
pub(super) enum Source {
    /// Places that the peer named.
    Places,
    /// Slots that this side offers.
    Offer { _slots: Arc<Vec<SealedSlot>> },
    /// Slots of a write.
    Write(Arc<Progress>),
}

/// How far the sending of a write is.
#[derive(Debug)]
pub(super) struct Progress {
    /// Of the request.
    pub(super) id: u64,
    /// Its slots, until it begins or is cancelled.
    slots: Mutex<Option<Arc<Vec<SealedSlot>>>>,
    cancelled: AtomicBool,
}

impl Progress {
    pub(super) fn new(id: u64, slots: Arc<Vec<SealedSlot>>) -> Self {
        Self {
            id,
            slots: Mutex::new(Some(slots)),
            cancelled: AtomicBool::new(false),
        }
    }

    fn begin(&self) -> Option<Arc<Vec<SealedSlot>>> {
        self.slots.lock().take()
    }

    pub(super) fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Acquire)
    }

    /// Breaks it off. Whether it will not even begin; the slots are let go then.
    pub(super) fn cancel(&self) -> bool {
        self.cancelled.store(true, Ordering::Release);
        let never_sent = self.slots.lock().take();
        never_sent.is_some()
    }
}

/// How a connection ended.
#[derive(Debug, Clone)]
pub(super) struct End {
    pub(super) reason: String,
    /// Whether the peer closed it. A peer closes none of its sockets before all that reads from
    /// them has ended, so from then on nothing of it writes to its memory for us.
    pub(super) by_peer: bool,
}

/// Why a stream ended.
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

impl Connection {
    /// A connection, and what its streams are to send.
    pub(super) fn new(
        shared: &Shared,
        remote: Remote,
        sockets: &Arc<Sockets>,
        rendezvous: Arc<Rendezvous>,
    ) -> (Arc<Self>, Vec<mpsc::UnboundedReceiver<Outgoing>>) {
        let lanes = sockets.0.len();
        let mut queues = Vec::with_capacity(lanes);
        let lane = |lane| {
            let (outbox, queue) = Outbox::new(shared, sockets, lane);
            queues.push(queue);
            Lane {
                outbox,
                pending: Mutex::new(Some(HashMap::new())),
                room: Arc::new(Semaphore::new(LANE_ROOM)),
                unanswered: Arc::default(),
            }
        };
        let connection = Self {
            remote,
            lanes: (0..lanes).map(lane).collect(),
            rendezvous,
            offers: Mutex::default(),
            offer_room: Arc::new(Semaphore::new(OFFER_ROOM)),
            carried_room: Arc::new(Semaphore::new(CARRIED_ROOM)),
            carried: Arc::default(),
            heard: AtomicU64::new(0),
            next_id: AtomicU64::new(0),
            next_lane: AtomicUsize::new(0),
            stop: watch::Sender::new(false),
            end: watch::Sender::new(None),
        };
        (Arc::new(connection), queues)
    }

    pub(super) fn next_id(&self) -> u64 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    /// The stream that a call of so many bytes begins with: another each time. For few, the first
    /// where nothing is under way on it, since its thread is the likeliest to be awake.
    pub(super) fn next_lane(&self, bytes: u64) -> usize {
        if bytes <= AT_ONCE && self.lanes[0].is_idle() {
            return 0;
        }
        self.next_lane.fetch_add(1, Ordering::Relaxed) % self.lanes.len()
    }

    /// Sends a frame without payload.
    pub(super) fn say(&self, lane: usize, frame: &Frame) {
        self.lanes[lane].push(Outgoing::of(frame.encode()));
    }

    /// Notes whether the bytes of an offer go along.
    pub(super) fn set_carried(&self, offer: u64, room: Option<OwnedSemaphorePermit>) {
        let mut offers = self.offers.lock();
        if let Some(offered) = offers.get_mut(&offer) {
            offered.carried = room;
        }
    }

    /// How it ended, if it has.
    pub(super) fn end(&self) -> Option<End> {
        self.end.borrow().clone()
    }

    /// Waits for its end.
    pub(super) async fn ended(&self) -> End {
        let mut end = self.end.subscribe();
        let ended = end.wait_for(Option::is_some).await;
        let ended = ended.ok().and_then(|end| end.clone());
        ended.unwrap_or_else(|| End {
            reason: "the connection is no more".into(),
            by_peer: false,
        })
    }

    /// Asks it to end.
    pub(super) fn stop(&self) {
        self.stop.send_replace(true);
    }

    /// The error of a call that its end interrupted.
    pub(super) async fn gone(&self, quiet: bool) -> TransferError {
        let end = self.ended().await;
        TransferError::PeerGone {
            peer: self.remote.id.clone(),
            reason: end.reason,
            quiet: quiet || end.by_peer,
        }
    }
}

impl Lane {
    /// Whether nothing is under way, as far as this side knows.
    fn is_idle(&self) -> bool {
        self.room.available_permits() == LANE_ROOM
            && self.unanswered.load(Ordering::Relaxed) == 0
            && self.outbox.behind().is_none()
    }

    pub(super) fn push(&self, outgoing: Outgoing) {
        self.outbox.push(outgoing);
    }

    /// Waits for room for a request; none after the end.
    pub(super) async fn acquire(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.room).acquire_owned().await.ok()
    }

    /// Sends a request; false after the end.
    pub(super) fn request(&self, id: u64, pending: Pending, outgoing: Outgoing) -> bool {
        {
            let mut requests = self.pending.lock();
            let Some(requests) = requests.as_mut() else {
                return false;
            };
            requests.insert(id, pending);
        }
        self.push(outgoing);
        true
    }

    /// Takes a request out, because it is answered or will never be sent.
    pub(super) fn take(&self, id: u64) -> Option<Pending> {
        self.pending.lock().as_mut()?.remove(&id)
    }
}

/// Runs the streams of a connection until it ends, each on its thread, and sees to it that
/// nothing is left of it.
pub(super) async fn supervise(
    shared: Arc<Shared>,
    connection: Arc<Connection>,
    sockets: Arc<Sockets>,
    streams: Vec<(Handle, mpsc::UnboundedReceiver<Outgoing>)>,
) {
    // All tasks own all sockets: none is closed before all tasks have ended (see `End`).
    let unix = sockets.0.iter().all(Socket::is_unix);
    let mut tasks = JoinSet::new();
    for (lane, (thread, queue)) in streams.into_iter().enumerate() {
        let inlet = Inlet::new(&shared, &connection, &sockets, lane);
        tasks.spawn_on(inlet.run(), &thread);
        let outlet = Outlet::new(&shared, &connection, &sockets, lane, queue);
        tasks.spawn_on(outlet.run(), &thread);
    }
    let mut stop = connection.stop.subscribe();
    let keepalive = connection.remote.keepalive;
    let mut ticks = interval(keepalive);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut heard = Standstill::default();
    let mut taken = vec![Standstill::default(); connection.lanes.len()];
    let by_us = |reason: String| End {
        reason,
        by_peer: false,
    };
    let ended = loop {
        tokio::select! {
            biased;
            _ = stop.wait_for(|stop| *stop) => {
                break Err(by_us("this side ended the connection".into()));
            }
            Some(ended) = tasks.join_next() => break Ok(ended),
            _ = ticks.tick() => {
                let silence = keepalive * SILENT_INTERVALS;
                if heard.lasts(Some(connection.heard.load(Ordering::Relaxed))) {
                    break Err(by_us(format!("not a byte in {silence:?}")));
                }
                let behind: Vec<_> = connection.lanes.iter().map(|l| l.outbox.behind()).collect();
                let stuck = |(taken, now): (&mut Standstill, &_)| taken.lasts(*now);
                if taken.iter_mut().zip(&behind).any(stuck) {
                    break Err(by_us(format!("it took not a byte in {silence:?}")));
                }
                // What waits there tells the peer as much.
                if behind[0].is_none() {
                    connection.say(0, &Frame::Ping);
                }
            }
        }
    };
    let end = match ended {
        Err(end) => end,
        Ok(Err(error)) => by_us(format!("a task failed: {error}")),
        Ok(Ok(Gone::Io(error))) => {
            let closed = timeout(CLOSED_TOO, closed_too(&mut tasks)).await;
            end_of(closed.unwrap_or(Gone::Io(error)), unix, &shared)
        }
        Ok(Ok(gone)) => end_of(gone, unix, &shared),
    };
    tasks.shutdown().await;
    drop(sockets);
    tracing::debug!(peer = %connection.remote.id, reason = end.reason, "connection ended");
    shared.forget(&connection);
    // What it offered is received by nobody who has heard of its end.
    connection.rendezvous.forget(&connection);
    connection.end.send_replace(Some(end));
    connection.offer_room.close();
    let offers = std::mem::take(&mut *connection.offers.lock());
    drop(offers);
    for lane in &connection.lanes {
        lane.room.close();
        let requests = lane.pending.lock().take();
        drop(requests);
    }
}

/// How long a counter has stood still.
#[derive(Debug, Clone, Default)]
struct Standstill {
    last: Option<u64>,
    intervals: u32,
}

impl Standstill {
    /// To be called once in each interval; whether it has lasted too long. None: all is well.
    fn lasts(&mut self, now: Option<u64>) -> bool {
        let still = now.is_some() && now == self.last;
        self.intervals = if still { self.intervals + 1 } else { 0 };
        self.last = now;
        self.intervals > SILENT_INTERVALS
    }
}

/// Waits for a stream on which the peer has said that it closed.
async fn closed_too(tasks: &mut JoinSet<Gone>) -> Gone {
    loop {
        match tasks.join_next().await {
            Some(Ok(Gone::Closed)) => return Gone::Closed,
            Some(_) => {}
            None => std::future::pending().await,
        }
    }
}

fn end_of(gone: Gone, unix: bool, shared: &Shared) -> End {
    let closed = |reason: &str| End {
        reason: reason.into(),
        by_peer: true,
    };
    match gone {
        Gone::Closed => closed("it closed the connection"),
        // Only its end can say that of a Unix socket; of TCP anything on the way can.
        Gone::Io(error) if unix && is_reset(&error) => closed("it closed the connection"),
        Gone::Io(error) => End {
            reason: error.to_string(),
            by_peer: false,
        },
        Gone::Broken(what) => {
            shared.counters.broken.add(1);
            End {
                reason: format!("it broke the protocol: {what}"),
                by_peer: false,
            }
        }
    }
}

fn is_reset(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset};
    matches!(error.kind(), ConnectionReset | BrokenPipe)
}
