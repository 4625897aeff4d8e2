//! [`MemoryChannel`]: channels within one process.
//!
//! One thread of the hub copies, 256 KiB of each transfer in turn, and keeps the deadlines: a
//! call can be dropped, be late, lose its lease or its peer between two pieces, as on any
//! transport, and no executor's thread is held up by a copy. The thread owns the slots of a
//! transfer and checks before each piece whether it is still wanted, so nothing is ever
//! quarantined.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Instant;

use bytes::Bytes;
use lmc_memory::{ReservedSlot, SealedSlot};
use parking_lot::Mutex;
use thiserror::Error;
use tokio::sync::oneshot;

use crate::checks::{self, PeerMemory};
use crate::connect_once::ConnectOnce;
use crate::lease::{Access, Leases, Range, Region};
use crate::timer::Timer;
use crate::{
    Address, BoxFuture, ChannelConfig, ConfigError, ConnectError, Filled, InArena, Index,
    MAX_MESSAGE, PeerId, ReadLease, Rights, Sent, TransferChannel, TransferError, WriteLease,
};

mod call;
mod copying;
mod raw;
mod state;
mod worker;

use call::Call;
use copying::{Copy, Far, Half, Paired, Party};
use state::{Closing, Connected, End, EndId, Handshake, State};
use worker::{Shared, deliver};

/// A memory channel could not be opened.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// Another channel of the hub has the name.
    #[error("memory:{0} is taken: close that channel, or choose another name")]
    Taken(String),
    /// A setting is invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
}

/// Connects channels of one process by name. Clones share the same hub.
#[derive(Clone, Debug)]
pub struct MemoryHub(Arc<Hub>);

#[derive(Debug)]
struct Hub {
    shared: Arc<Shared>,
    timer: Timer,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl MemoryHub {
    /// Starts a hub, with its threads.
    ///
    /// # Errors
    /// A thread could not be started.
    pub fn new() -> io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let running = Arc::clone(&shared);
        let thread = thread::Builder::new().name("lmc-memory-copy".to_owned());
        let thread = thread.spawn(move || running.run())?;
        let hub = Hub {
            shared,
            timer: Timer::start()?,
            thread: Mutex::new(Some(thread)),
        };
        Ok(Self(Arc::new(hub)))
    }

    /// Opens a channel at `memory:NAME`.
    ///
    /// # Errors
    /// [`MemoryError`].
    pub fn channel(&self, name: &str, config: ChannelConfig) -> Result<MemoryChannel, MemoryError> {
        config.check()?;
        let open = |state: &mut State| state.open(name, config.clone());
        let opened = self.0.shared.with(open);
        let (end, leases) = opened.ok_or_else(|| MemoryError::Taken(name.to_owned()))?;
        Ok(MemoryChannel {
            end,
            leases,
            connects: ConnectOnce::default(),
            address: Address::Memory(name.to_owned()),
            config,
            hub: self.clone(),
        })
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        self.shared.with(|state| state.over = true);
        let Some(thread) = self.thread.lock().take() else {
            return;
        };
        // The last channel may go with a task that the thread itself has woken.
        if thread.thread().id() != thread::current().id() {
            thread.join().expect("the hub's thread does not panic");
        }
    }
}

/// A channel to others of the same [`MemoryHub`]; for tests and simulation.
///
/// Dropped, it ends as if closed.
pub struct MemoryChannel {
    end: EndId,
    leases: Arc<Leases>,
    connects: ConnectOnce,
    address: Address,
    config: ChannelConfig,
    hub: MemoryHub,
}

impl fmt::Debug for MemoryChannel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryChannel")
            .field("address", &self.address)
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

impl Drop for MemoryChannel {
    fn drop(&mut self) {
        deliver(self.shared().with(|state| state.close(self.end)));
    }
}

/// The next step of a connect.
enum Step<'a> {
    Done(Connected),
    Wait(Call<'a, Connected>),
}

impl MemoryChannel {
    fn shared(&self) -> &Shared {
        &self.hub.0.shared
    }

    /// This side, as a caller, and its call.
    fn party<T>(
        &self,
        state: &mut State,
        peer: EndId,
        peer_id: &PeerId,
        deadline: Instant,
    ) -> (Party<T>, Call<'_, T>) {
        let number = state.number();
        let (reply, call) = self.call(number);
        let party = Party {
            number,
            end: self.end,
            peer,
            peer_id: peer_id.clone(),
            deadline,
            reply,
        };
        (party, call)
    }

    fn call<T>(&self, number: u64) -> (oneshot::Sender<T>, Call<'_, T>) {
        let (reply, outcome) = oneshot::channel();
        let call = Call {
            outcome,
            shared: self.shared(),
            number,
        };
        (reply, call)
    }

    fn begin_connect(
        &self,
        peer: &PeerId,
        name: &str,
        message: &Option<Bytes>,
        deadline: Instant,
    ) -> Result<Step<'_>, ConnectError> {
        let shared = Arc::clone(&self.hub.0.shared);
        let begin = |state: &mut State| {
            let end = state.end(self.end).ok_or(ConnectError::Closed)?;
            if end.peers.contains_key(peer) {
                return Ok((Step::Done(Ok(None)), Vec::new()));
            }
            let now = Instant::now();
            if now >= deadline {
                return Err(ConnectError::Deadline { peer: peer.clone() });
            }
            let (to, found) = state
                .find(name)
                .ok_or_else(|| io::Error::from(io::ErrorKind::ConnectionRefused))?;
            if found.config.id != *peer {
                return Err(ConnectError::WrongPeer {
                    expected: peer.clone(),
                    found: found.config.id.clone(),
                });
            }
            if !found.accepts(self.config.keys.as_ref()) {
                return Err(ConnectError::Key);
            }
            let timeout = self.config.handshake_timeout;
            let Some(answer) = found.config.on_connect.clone() else {
                return Ok((Step::Done(Ok(None)), state.link(self.end, to)?));
            };
            state.may_link(self.end, to)?;
            let number = state.number();
            let (reply, call) = self.call(number);
            let (from, message) = (self.config.id.clone(), message.clone());
            let thread = thread::Builder::new().name("lmc-memory-hello".to_owned());
            let asking = Arc::clone(&shared);
            thread.spawn(move || {
                Arc::clone(&asking).ask(number, &answer, &from, message);
                // The handler may keep what its channel must let go of.
                drop(answer);
                asking.with(|state| state.answered(to));
            })?;
            state.answering(to);
            state.handshakes.push(Handshake {
                number,
                from: self.end,
                to,
                peer: peer.clone(),
                deadline: now
                    .checked_add(timeout)
                    .map_or(deadline, |t| t.min(deadline)),
                reply,
            });
            Ok((Step::Wait(call), Vec::new()))
        };
        let (step, out) = self.shared().with(begin)?;
        deliver(out);
        Ok(step)
    }

    fn begin_paired<T>(
        &self,
        peer: &PeerId,
        tag: u64,
        deadline: Instant,
        what: impl FnOnce(Party<T>) -> Paired,
    ) -> Result<Call<'_, T>, TransferError> {
        let (call, out) = self.shared().with(|state| {
            let (end, _) = state.peer(self.end, peer)?;
            let (party, call) = self.party(state, end, peer, deadline);
            let what = what(party);
            Ok::<_, TransferError>((call, state.meet(Half { tag, what })))
        })?;
        deliver(out);
        Ok(call)
    }

    fn begin_one_sided<T>(
        &self,
        peer: &PeerId,
        lens: impl ExactSizeIterator<Item = u64>,
        indices: &[Index],
        deadline: Instant,
        access: Access,
        copy: impl FnOnce(Party<T>, Arc<lmc_memory::Arena>, Vec<Far>) -> Copy,
    ) -> Result<Call<'_, T>, TransferError> {
        self.shared().with(|state| {
            let (end, found) = state.peer(self.end, peer)?;
            let arena = Arc::clone(&found.config.arena);
            let memory = PeerMemory {
                incarnation: end.0,
                arena: arena.len() as u64,
                unit: found.config.unit,
            };
            let ranges = checks::ranges(lens, indices, memory)?;
            let far: Result<Vec<Far>, _> = ranges
                .into_iter()
                .enumerate()
                .map(|(object, range)| far(found, self.end, access, object, range))
                .collect();
            let far = far?;
            let (party, call) = self.party(state, end, peer, deadline);
            state.copies.push_back(copy(party, arena, far));
            Ok(call)
        })
    }

    /// The incarnation of a peer that is connected.
    fn connected(&self, peer: &PeerId) -> Result<u64, TransferError> {
        self.shared()
            .look(|state| state.peer(self.end, peer).map(|(end, _)| end.0))
    }

    fn closing(
        &self,
        peer: Option<&PeerId>,
        deadline: Instant,
    ) -> Call<'_, Result<(), TransferError>> {
        let (call, out) = self.shared().with(|state| {
            let (peer, out) = match peer {
                None => (None, state.close(self.end)),
                Some(peer) => state.disconnect(self.end, peer),
            };
            let number = state.number();
            let (reply, call) = self.call(number);
            state.closing.push(Closing {
                number,
                end: self.end,
                peer,
                deadline,
                reply,
            });
            (call, out)
        });
        deliver(out);
        call
    }
}

/// Resolves a range of a peer's memory, if this side may reach it.
fn far(
    peer: &End,
    own: EndId,
    access: Access,
    object: usize,
    range: Range,
) -> Result<Far, TransferError> {
    let config = &peer.config;
    if access == Access::Write && config.rights != Rights::ReadWrite {
        return Err(TransferError::ReadOnly);
    }
    match range.region {
        Region::Arena if config.open_arena => Ok(Far {
            offset: range.offset,
            lease: None,
        }),
        Region::Lease(number) => {
            let granted = peer.leases.find(number, own.0, access);
            let granted = granted.map_err(|denied| denied.error(object))?;
            let segment = granted.segment(range);
            Ok(Far {
                offset: segment.ok_or(TransferError::NotLeased { object })?.offset,
                lease: Some(granted),
            })
        }
        Region::Arena | Region::Offer(_) => Err(TransferError::NotLeased { object }),
    }
}

impl TransferChannel for MemoryChannel {
    fn kind(&self) -> &'static str {
        "memory"
    }

    fn id(&self) -> &PeerId {
        &self.config.id
    }

    fn address(&self) -> &Address {
        &self.address
    }

    fn connect<'a>(
        &'a self,
        peer: &'a PeerId,
        address: &'a Address,
        message: Option<Bytes>,
        deadline: Instant,
    ) -> BoxFuture<'a, Connected> {
        Box::pin(async move {
            let found = message.as_ref().map_or(0, Bytes::len);
            if found > MAX_MESSAGE {
                return Err(ConnectError::Message { found });
            }
            let Address::Memory(name) = address else {
                return Err(ConnectError::Address {
                    kind: self.kind(),
                    address: address.to_string(),
                });
            };
            let late = || ConnectError::Deadline { peer: peer.clone() };
            let turn = self.connects.turn(peer);
            let _turn = self
                .hub
                .0
                .timer
                .until(deadline, turn)
                .await
                .ok_or_else(late)?;
            match self.begin_connect(peer, name, &message, deadline)? {
                Step::Done(connected) => connected,
                Step::Wait(call) => call.await,
            }
        })
    }

    fn disconnect<'a>(
        &'a self,
        peer: &'a PeerId,
        deadline: Instant,
    ) -> BoxFuture<'a, Result<(), TransferError>> {
        Box::pin(async move {
            if self.is_connected(peer) {
                self.closing(Some(peer), deadline).await?;
            }
            Ok(())
        })
    }

    fn incarnation(&self) -> u64 {
        self.end.0
    }

    fn peer_incarnation(&self, peer: &PeerId) -> Option<u64> {
        self.connected(peer).ok()
    }

    fn grant_read(
        &self,
        peer: &PeerId,
        slots: Vec<SealedSlot>,
    ) -> Result<ReadLease, TransferError> {
        let connected = || self.connected(peer);
        self.leases.grant_read(&self.config, peer, slots, connected)
    }

    fn grant_write(
        &self,
        peer: &PeerId,
        slots: Vec<ReservedSlot>,
    ) -> Result<WriteLease, TransferError> {
        let connected = || self.connected(peer);
        self.leases
            .grant_write(&self.config, peer, slots, connected)
    }

    fn unit(&self) -> u64 {
        self.config.unit
    }

    fn arena_indices(&self, slots: &[&dyn InArena]) -> Result<Vec<Index>, TransferError> {
        checks::arena_indices(&self.config, self.end.0, slots)
    }

    fn send<'a>(
        &'a self,
        objects: Vec<SealedSlot>,
        peer: &'a PeerId,
        tag: u64,
        deadline: Instant,
    ) -> BoxFuture<'a, Sent> {
        Box::pin(async move {
            if objects.is_empty() {
                return Sent::all(0);
            }
            if let Err(error) = checks::slots(&self.config.arena, &objects) {
                return Sent::failed(error);
            }
            let what = |party| Paired::Send(party, objects);
            match self.begin_paired(peer, tag, deadline, what) {
                Ok(call) => call.await,
                Err(error) => Sent::failed(error),
            }
        })
    }

    fn receive<'a>(
        &'a self,
        slots: Vec<ReservedSlot>,
        peer: &'a PeerId,
        tag: u64,
        deadline: Instant,
    ) -> BoxFuture<'a, Filled> {
        Box::pin(async move {
            if slots.is_empty() {
                return Filled::nothing();
            }
            if let Err(error) = checks::slots(&self.config.arena, &slots) {
                return Filled::untouched(slots, error);
            }
            let mut slots = Some(slots);
            let what = |party| Paired::Receive(party, slots.take().unwrap_or_default());
            match self.begin_paired(peer, tag, deadline, what) {
                Ok(call) => call.await,
                Err(error) => Filled::untouched(slots.unwrap_or_default(), error),
            }
        })
    }

    fn write<'a>(
        &'a self,
        objects: Vec<SealedSlot>,
        peer: &'a PeerId,
        indices: &'a [Index],
        deadline: Instant,
    ) -> BoxFuture<'a, Sent> {
        Box::pin(async move {
            if objects.is_empty() && indices.is_empty() {
                return Sent::all(0);
            }
            if let Err(error) = checks::slots(&self.config.arena, &objects) {
                return Sent::failed(error);
            }
            let lens: Vec<_> = objects.iter().map(SealedSlot::len).collect();
            let copy = |party, arena, far| Copy::write(party, objects, arena, far);
            match self.begin_one_sided(
                peer,
                lens.into_iter(),
                indices,
                deadline,
                Access::Write,
                copy,
            ) {
                Ok(call) => call.await,
                Err(error) => Sent::failed(error),
            }
        })
    }

    fn read<'a>(
        &'a self,
        slots: Vec<ReservedSlot>,
        peer: &'a PeerId,
        indices: &'a [Index],
        deadline: Instant,
    ) -> BoxFuture<'a, Filled> {
        Box::pin(async move {
            if slots.is_empty() && indices.is_empty() {
                return Filled::nothing();
            }
            if let Err(error) = checks::slots(&self.config.arena, &slots) {
                return Filled::untouched(slots, error);
            }
            let lens: Vec<_> = slots.iter().map(ReservedSlot::len).collect();
            let mut slots = Some(slots);
            let copy =
                |party, arena, far| Copy::read(party, slots.take().unwrap_or_default(), arena, far);
            match self.begin_one_sided(
                peer,
                lens.into_iter(),
                indices,
                deadline,
                Access::Read,
                copy,
            ) {
                Ok(call) => call.await,
                Err(error) => Filled::untouched(slots.unwrap_or_default(), error),
            }
        })
    }

    fn close(&self, deadline: Instant) -> BoxFuture<'_, Result<(), TransferError>> {
        Box::pin(async move { self.closing(None, deadline).await })
    }
}
