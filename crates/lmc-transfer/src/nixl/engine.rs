//! The thread `lmc-nixl`: owns the agents, the transfers and the peers.
//!
//! It polls while something is under way, spinning first and then less and less often. Otherwise
//! it sleeps, after a moment in which the next call may come.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use lmc_memory::{Arena, ReservedSlot, SealedSlot};
use parking_lot::{Condvar, Mutex, RwLock};
use tokio::runtime::Runtime;
use tokio::sync::oneshot;
use tokio::task::AbortHandle;

mod closing;
mod messages;
mod peers;
#[cfg(test)]
mod tests;

use self::closing::Closing;
use super::agent::{Registered, Remote};
use super::control::{Exposures, Seat};
use super::initiators::{Initiators, SendKey, spawn};
use super::link::Link;
use super::paired::{Fetching, Outbox, Paired, Receiving, SETTLE, Sending};
use super::reach::{NixlReads, Reach};
use super::transfers::{Batch, SendOver, Step, Transfer};
use super::wire::{Intro, Message, USE, reason};
use crate::blocking::yield_briefly;
use crate::checks::{self, PeerMemory};
use crate::lease::{Leases, Pin, Range, Region};
use crate::session;
use crate::{
    ChannelConfig, ConnectError, Filled, Index, PeerId, PublicIdentity, Sent, TransferError,
};

/// Commands that are taken before transfers are looked at again.
const COMMANDS: usize = 256;
/// After something moved, the thread does not sleep for this long...
const SPIN: Duration = Duration::from_micros(50);
/// ...then it yields, up to this long...
const YIELD: Duration = Duration::from_millis(1);
/// ...then it naps, and after that for longer.
const NAP_AFTER: Duration = Duration::from_millis(20);
const NAP: Duration = Duration::from_micros(50);
const LONG_NAP: Duration = Duration::from_millis(1);
/// Between looks at what was given up.
const STRAGGLERS: Duration = Duration::from_millis(2);
/// Between looks when there is nothing to do.
const IDLE: Duration = Duration::from_millis(100);
/// Connections of one peer at most: two where both sides connected at once.
const MAX_LINKS: usize = 4;
/// Time that the remaining tasks of the control plane have to end.
const RUNTIME: Duration = Duration::from_secs(1);

/// A peer that was connected.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) id: PeerId,
    pub(super) incarnation: u64,
    /// `None` where it is no channel of ours.
    pub(super) identity: Option<PublicIdentity>,
    pub(super) memory: PeerMemory,
    pub(super) remote: Remote,
    /// True if this side reads its memory by itself.
    pub(super) direct: bool,
    /// True if any range may be named, without a lease.
    pub(super) open: bool,
    /// True if it may be written to.
    pub(super) writable: bool,
}

/// Why a connection is not taken.
#[derive(Debug, thiserror::Error)]
pub(super) enum JoinError {
    /// Another connection is in the way, which may end soon.
    #[error("{0}")]
    NotYet(&'static str),
    #[error(transparent)]
    Other(ConnectError),
}

impl From<ConnectError> for JoinError {
    fn from(error: ConnectError) -> Self {
        Self::Other(error)
    }
}

/// A peer as long as it is connected.
#[derive(Debug)]
struct Connected {
    peer: Arc<Peer>,
    /// More than one where both sides connected at once; none where it is no channel of ours.
    links: Vec<Link>,
}

/// Commands of the thread.
pub(super) enum Command {
    Transfer {
        batch: Batch,
        peer: PeerId,
        indices: Vec<Index>,
        deadline: Instant,
    },
    Send {
        objects: Vec<SealedSlot>,
        peer: PeerId,
        tag: u64,
        deadline: Instant,
        reply: oneshot::Sender<Sent>,
    },
    Receive {
        slots: Vec<ReservedSlot>,
        peer: PeerId,
        tag: u64,
        deadline: Instant,
        reply: oneshot::Sender<Filled>,
    },
    Join {
        peer: session::Remote,
        intro: Box<Intro>,
        link: Link,
        reply: oneshot::Sender<Result<(), JoinError>>,
    },
    /// A peer that is no channel of ours.
    Introduce {
        peer: Peer,
        reply: oneshot::Sender<Result<(), JoinError>>,
    },
    /// Ends all that there is with a peer.
    Disconnect {
        peer: PeerId,
        reply: Option<oneshot::Sender<()>>,
    },
    /// All of the memory is registered with the target's agent, or the channel closes.
    Target(Registered),
    Said {
        number: u64,
        message: Message,
        seat: Seat,
    },
    LinkDown {
        number: u64,
        fault: String,
        end: LinkEnd,
    },
    /// An agent was made, or could not be.
    Made(Result<Registered, String>),
    /// An agent has ended; of these sends nothing is under way.
    Ended { generation: u64, over: Vec<SendKey> },
    /// The target's agent has ended.
    TargetEnded,
    /// A future was dropped.
    Look,
    Close {
        deadline: Instant,
        reply: oneshot::Sender<Result<(), TransferError>>,
    },
}

/// Knowledge about a connection's end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LinkEnd {
    /// The peer has ended its half, or its process has ended.
    Ended,
    /// The peer is not understood. That it ends its half may yet be seen.
    NotYet,
    /// The peer cannot be reached. Nothing more will be known.
    Unknown,
}

/// Tells the thread.
#[derive(Clone)]
pub(super) struct Commands(Sender<Command>);

impl Commands {
    pub(super) fn new() -> (Self, Receiver<Command>) {
        let (sender, receiver) = mpsc::channel();
        (Self(sender), receiver)
    }

    /// Once the thread has ended, what is given is dropped: who waits for an answer sees that.
    pub(super) fn give(&self, command: Command) {
        let _ = self.0.send(command);
    }
}

/// The part of the thread's state that others see.
#[derive(Debug, Default)]
pub(super) struct Shared {
    /// The incarnation of each peer that is connected.
    pub(super) peers: RwLock<HashMap<PeerId, u64>>,
    /// Slots that stay in quarantine.
    pub(super) stranded: AtomicU64,
    /// True if the thread has ended.
    pub(super) ended: Mutex<bool>,
    pub(super) end: Condvar,
}

/// The thread and everything it owns.
pub(super) struct Engine {
    pub(super) commands: Commands,
    pub(super) received: Receiver<Command>,
    pub(super) shared: Arc<Shared>,
    pub(super) config: ChannelConfig,
    pub(super) leases: Arc<Leases>,
    /// Bytes of the arena that are registered by themselves.
    pub(super) piece: u64,
    pub(super) reads: NixlReads,
    pub(super) reach: Reach,
    pub(super) target: Option<Registered>,
    pub(super) arena: Arc<Arena>,
    pub(super) exposures: Arc<Exposures>,
    pub(super) initiators: Initiators,
    pub(super) runtime: Option<Runtime>,
    pub(super) accepting: AbortHandle,
    pub(super) state: State,
}

/// A batch that waits for the right to its ranges.
struct Asking {
    peer: Arc<Peer>,
    batch: Batch,
    deadline: Instant,
}

/// The part of the state that begins empty.
#[derive(Default)]
pub(super) struct State {
    peers: HashMap<PeerId, Connected>,
    transfers: Vec<Transfer>,
    paired: Paired,
    /// Batches of this side, by the number of their use.
    asking: HashMap<u64, Asking>,
    /// Leased ranges that peers move by themselves: by incarnation and number.
    uses: HashMap<(u64, u64), Vec<Pin>>,
    /// Leased ranges that peers were moving when their connections ended, by incarnation.
    cut: HashMap<u64, Vec<Pin>>,
    /// Slots that a peer out of reach may still touch, by its incarnation.
    stranded: HashMap<u64, u64>,
    /// Uses of peers that have ended, with the time of that: their bytes may still be on their way.
    settling: Vec<(Instant, Vec<Pin>)>,
    /// Peers that wait for the end of sends and uses that were given up, with what was done.
    abandoned: HashMap<SendKey, (Arc<Peer>, u64)>,
    /// Connections of peers that are gone, with the names of their agents: they end as soon as
    /// nothing of this side is under way to them.
    farewells: Vec<(String, Vec<Link>)>,
    /// Numbers of connections of peers that are gone, which these have not ended yet, with the
    /// peers' incarnations.
    unended: HashMap<u64, u64>,
    closing: Option<Closing>,
    last_moved: Option<Instant>,
    last_tended: Option<Instant>,
}

/// Leased slots that a peer may touch of which nothing more will be known. Their pools must not
/// give them out again.
static STRANDED: Mutex<Vec<Vec<Pin>>> = Mutex::new(Vec::new());

impl Engine {
    /// Lets the thread begin.
    pub(super) fn start(self) {
        spawn("lmc-nixl", move || self.run());
    }

    fn run(mut self) {
        loop {
            let mut moved = false;
            for _ in 0..COMMANDS {
                let Ok(command) = self.received.try_recv() else {
                    break;
                };
                self.take(command);
                moved = true;
            }
            let now = Instant::now();
            moved |= self.advance(now);
            if self.closed(now) {
                break;
            }
            if moved {
                self.state.last_moved = Some(now);
            }
            self.wait(now);
        }
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(RUNTIME);
        }
        let left = self.state.uses.drain().map(|(_, pins)| pins);
        let left = left.chain(self.state.cut.drain().map(|(_, pins)| pins));
        STRANDED.lock().extend(left);
        let shared = Arc::clone(&self.shared);
        drop(self);
        *shared.ended.lock() = true;
        shared.end.notify_all();
    }

    /// Sleeps until there may be something to do.
    fn wait(&mut self, now: Instant) {
        let still = self
            .state
            .last_moved
            .map_or(Duration::MAX, |moved| now.saturating_duration_since(moved));
        let polls = !self.state.transfers.is_empty();
        if polls && still < SPIN {
            std::hint::spin_loop();
            return;
        }
        // With nothing to poll, what is waited for comes from another thread, which may wait for
        // this core: on two cores a peer's answer took three times as long otherwise.
        let awake = if polls { YIELD } else { SPIN };
        if still < awake && yield_briefly() {
            return;
        }
        let limit = if polls && still < NAP_AFTER {
            NAP
        } else if polls {
            LONG_NAP
        } else if self.initiators.has_stragglers()
            || self.state.closing.is_some()
            || !self.state.settling.is_empty()
        {
            STRAGGLERS
        } else {
            let asking = self.state.asking.values().map(|one| one.deadline).min();
            let next = self
                .state
                .paired
                .next_deadline()
                .into_iter()
                .chain(asking)
                .min();
            next.map_or(IDLE, |next| next.saturating_duration_since(now).min(IDLE))
        };
        match self.received.recv_timeout(limit) {
            Ok(command) => {
                self.take(command);
                self.state.last_moved = Some(Instant::now());
            }
            // This side holds a sender, so that the other error cannot be.
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {}
        }
    }

    fn take(&mut self, command: Command) {
        match command {
            Command::Transfer {
                batch,
                peer,
                indices,
                deadline,
            } => self.transfer(batch, &peer, &indices, deadline),
            Command::Send {
                objects,
                peer,
                tag,
                deadline,
                reply,
            } => match self.linked(&peer) {
                Ok(peer) => {
                    let sending = Sending {
                        peer,
                        objects,
                        reply,
                        deadline,
                    };
                    let mut outbox = Outbox::new();
                    self.state.paired.send(sending, tag, &mut outbox);
                    self.send(outbox);
                }
                Err(error) => drop(reply.send(Sent::failed(error))),
            },
            Command::Receive {
                slots,
                peer,
                tag,
                deadline,
                reply,
            } => match self.linked(&peer) {
                Ok(peer) => {
                    let receiving = Receiving {
                        peer,
                        tag,
                        slots,
                        reply,
                        deadline,
                        writer: None,
                    };
                    let mut outbox = Outbox::new();
                    self.state.paired.receive(receiving, &mut outbox);
                    self.send(outbox);
                }
                Err(error) => drop(reply.send(Filled::untouched(slots, error))),
            },
            Command::Join {
                peer,
                intro,
                link,
                reply,
            } => {
                let joined = self.join(peer, &intro, link);
                let _ = reply.send(joined);
            }
            Command::Introduce { peer, reply } => {
                let joined = self.connected(peer, None);
                let _ = reply.send(joined);
            }
            Command::Disconnect { peer, reply } => {
                self.gone(&peer, "this side ended the connection", false);
                if let Some(reply) = reply {
                    let _ = reply.send(());
                }
            }
            Command::Target(target) => self.target = Some(target),
            Command::Said {
                number,
                message,
                seat,
            } => {
                self.heard(number, message);
                drop(seat);
            }
            Command::LinkDown { number, fault, end } => self.link_down(number, &fault, end),
            Command::Made(made) => self.initiators.made(made),
            Command::Ended { generation, over } => {
                self.initiators.ended(generation);
                over.into_iter().for_each(|send| self.tell_idle(send));
            }
            Command::TargetEnded => {
                if let Some(closing) = &mut self.state.closing {
                    closing.target_ended();
                }
            }
            Command::Look => {}
            Command::Close { deadline, reply } => self.close(deadline, reply),
        }
    }

    /// A connected peer, or why no transfer with it may begin.
    fn peer(&self, peer: &PeerId) -> Result<&Connected, TransferError> {
        if self.state.closing.is_some() {
            return Err(TransferError::Closed);
        }
        let unknown = || TransferError::UnknownPeer { peer: peer.clone() };
        self.state.peers.get(peer).ok_or_else(unknown)
    }

    /// A peer that takes messages.
    fn linked(&self, peer: &PeerId) -> Result<Arc<Peer>, TransferError> {
        let connected = self.peer(peer)?;
        if connected.links.is_empty() {
            let reason = "it is not a channel: it can only be read and written".to_owned();
            return Err(TransferError::Refused(reason));
        }
        Ok(Arc::clone(&connected.peer))
    }

    fn transfer(&mut self, batch: Batch, peer: &PeerId, indices: &[Index], deadline: Instant) {
        let write = matches!(batch, Batch::Write { .. });
        let checked = self.peer(peer).and_then(|connected| {
            let peer = &connected.peer;
            let lens: Vec<u64> = batch.here().into_iter().map(|(_, len)| len).collect();
            let ranges = checks::ranges(lens.into_iter(), indices, peer.memory)?;
            let in_arena = |range: &Range| range.region == Region::Arena;
            match ranges.iter().position(in_arena) {
                _ if write && !peer.writable => Err(TransferError::ReadOnly),
                Some(object) if !peer.open => Err(TransferError::NotLeased { object }),
                _ => Ok((Arc::clone(peer), ranges)),
            }
        });
        let (peer, ranges) = match checked {
            Ok(checked) => checked,
            Err(error) => return batch.refuse(error),
        };
        let mut outbox = Outbox::new();
        match batch {
            Batch::Read { slots, reply, .. } if !peer.direct => {
                let receiving = Receiving {
                    peer,
                    tag: 0,
                    slots,
                    reply,
                    deadline,
                    writer: None,
                };
                let fetching = Fetching { receiving, ranges };
                self.state.paired.fetch(fetching, &mut outbox);
            }
            batch if ranges.iter().all(|range| range.region == Region::Arena) => {
                let offsets: Vec<u64> = ranges.iter().map(|range| range.offset).collect();
                let transfer = Transfer::new(peer, batch, &offsets, deadline, self.piece);
                self.state.transfers.push(transfer);
            }
            batch => {
                let send = USE | self.state.paired.number();
                let message = Message::Use {
                    send,
                    write,
                    ranges,
                };
                outbox.push((Arc::clone(&peer), message));
                let asking = Asking {
                    peer,
                    batch: batch.with_use(send),
                    deadline,
                };
                self.state.asking.insert(send, asking);
            }
        }
        self.send(outbox);
    }

    /// Ends batches that wait for the right to their ranges.
    fn end_asking(&mut self, ends: impl Fn(&Asking) -> Option<TransferError>) {
        let mut outbox = Outbox::new();
        let ended = |_: &u64, one: &mut Asking| ends(one).is_some();
        let ended: Vec<_> = self.state.asking.extract_if(ended).collect();
        for (send, asking) in ended {
            if let Some(error) = ends(&asking) {
                let over = Message::Over {
                    send,
                    done: 0,
                    idle: true,
                    reason: None,
                };
                outbox.push((asking.peer, over));
                asking.batch.refuse(error);
            }
        }
        self.send(outbox);
    }

    /// Ends a batch, and says so to the receiver of a send or the owner of a lease.
    fn end(&mut self, transfer: Transfer, error: Option<TransferError>, failed: bool) {
        let peer = Arc::clone(&transfer.peer);
        let Some(over) = transfer.end(&mut self.initiators, error, failed, false) else {
            return;
        };
        let SendOver {
            send,
            done,
            idle,
            error,
        } = over;
        let done = done as u64;
        let why = error.map(|error| reason(&error.to_string()));
        if !idle {
            let key = (peer.incarnation, send);
            self.state.abandoned.insert(key, (Arc::clone(&peer), done));
        }
        let over = Message::Over {
            send,
            done,
            idle,
            reason: why,
        };
        self.send(vec![(peer, over)]);
    }

    /// Tells the other side of a send or use that was given up that nothing of it is under way.
    fn tell_idle(&mut self, key: SendKey) {
        let Some((peer, done)) = self.state.abandoned.remove(&key) else {
            return;
        };
        let (_, send) = key;
        let over = Message::Over {
            send,
            done,
            idle: true,
            reason: None,
        };
        self.send(vec![(peer, over)]);
    }

    fn send(&mut self, outbox: Outbox) {
        for (peer, message) in outbox {
            let connected = self.state.peers.get_mut(&peer.id);
            let connected =
                connected.filter(|connected| connected.peer.incarnation == peer.incarnation);
            let sent = connected
                .and_then(|connected| connected.links.first_mut())
                .is_none_or(|link| link.send(&message));
            if !sent {
                self.gone(&peer.id, "it does not take messages", false);
            }
        }
    }

    /// Looks at everything once. Whether something moved.
    fn advance(&mut self, now: Instant) -> bool {
        let mut moved = false;
        let mut at = 0;
        while let Some(transfer) = self.state.transfers.get_mut(at) {
            match transfer.step(&mut self.initiators, now) {
                Step::Same => at += 1,
                Step::Moved => {
                    moved = true;
                    at += 1;
                }
                Step::Done => {
                    moved = true;
                    let transfer = self.state.transfers.remove(at);
                    self.end(transfer, None, false);
                }
                Step::Ended { error, broken } => {
                    moved = true;
                    let transfer = self.state.transfers.remove(at);
                    let peer = transfer.peer.id.clone();
                    self.end(transfer, Some(error), broken);
                    if broken {
                        // Other transfers with it end as well: start over.
                        self.gone(&peer, "NIXL's connection to it is broken", false);
                        at = 0;
                    }
                }
            }
        }
        let mut outbox = Outbox::new();
        self.state.paired.tend(now, &mut outbox);
        self.send(outbox);
        self.end_asking(|asking| {
            let ended = now >= asking.deadline || asking.batch.is_dropped();
            ended.then_some(TransferError::Deadline)
        });
        let settled = |(since, _): &mut (Instant, Vec<Pin>)| now >= *since + SETTLE;
        drop(
            self.state
                .settling
                .extract_if(.., settled)
                .collect::<Vec<_>>(),
        );
        let busy = self.state.transfers.iter().filter_map(|one| one.agent);
        let over = self.initiators.tend(&busy.collect(), now);
        over.into_iter().for_each(|send| self.tell_idle(send));
        let initiators = &self.initiators;
        self.state
            .farewells
            .retain(|(agent, _)| initiators.may_touch(agent));
        let tended = self.state.last_tended;
        if tended.is_none_or(|tended| now >= tended + IDLE) {
            self.state.last_tended = Some(now);
            self.initiators.progress();
            if let Some(target) = &self.target {
                target.tend();
            }
        }
        moved
    }
}
