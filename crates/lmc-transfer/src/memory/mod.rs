//! Channels within one process.
//!
//! One thread of the hub copies, 256 KiB of each transfer in turn, and keeps the deadlines: so
//! a call can be dropped, be late, or lose its peer between two pieces, as on any transport, and
//! no executor's thread is held up by a copy. It owns the slots of a transfer and looks before
//! each piece whether anybody still wants it, so whatever it hands back is quiet, and nothing is
//! ever in quarantine.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Instant;

use bytes::Bytes;
use lmc_memory::{ReservedSlot, SealedSlot};
use parking_lot::Mutex;
use thiserror::Error;

use crate::{
    Address, BoxFuture, ChannelConfig, ConfigError, ConnectError, Filled, InArena, Index,
    MAX_MESSAGE, PeerId, Sent, TransferChannel, TransferError, cell::Cell, checks,
};

mod call;
mod copying;
mod raw;
mod state;
mod worker;

use call::Call;
use copying::{Copy, Half, Paired, Party};
use state::{Behind, Closing, Connected, EndId, Handshake, State};
use worker::{Shared, deliver};

/// A channel that cannot be opened.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// Another channel of the hub has the name.
    #[error("memory:{0} is taken: close the channel that has it, or choose another name")]
    Taken(String),
    /// The configuration makes no sense.
    #[error(transparent)]
    Config(#[from] ConfigError),
}

/// Where channels of one process find each other by name. Clones share the same hub.
#[derive(Clone, Debug)]
pub struct MemoryHub(Arc<Hub>);

#[derive(Debug)]
struct Hub {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl MemoryHub {
    /// A hub with its thread.
    ///
    /// # Errors
    /// There is no thread to be had.
    pub fn new() -> io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let running = Arc::clone(&shared);
        let thread = thread::Builder::new().name("lmc-memory-copy".to_owned());
        let thread = thread.spawn(move || running.run())?;
        let thread = Mutex::new(Some(thread));
        Ok(Self(Arc::new(Hub { shared, thread })))
    }

    /// A channel at `memory:NAME`.
    ///
    /// # Errors
    /// [`MemoryError`].
    pub fn channel(&self, name: &str, config: ChannelConfig) -> Result<MemoryChannel, MemoryError> {
        config.check()?;
        let open = |state: &mut State| state.open(name, config.clone());
        let end = self.0.shared.with(open);
        Ok(MemoryChannel {
            end: end.ok_or_else(|| MemoryError::Taken(name.to_owned()))?,
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

/// What a connect does next.
enum Step<'a> {
    Over(Connected),
    Wait(Call<'a, Connected>),
    /// Another call connects to the same peer.
    Behind(Call<'a, ()>),
}

impl MemoryChannel {
    fn shared(&self) -> &Shared {
        &self.hub.0.shared
    }

    /// This side, as the caller of something with a peer.
    fn party<T>(
        &self,
        state: &mut State,
        peer: EndId,
        peer_id: &PeerId,
        deadline: Instant,
    ) -> Party<T> {
        Party {
            number: state.number(),
            end: self.end,
            peer,
            peer_id: peer_id.clone(),
            deadline,
            cell: Cell::new(),
        }
    }

    fn waiting<T>(&self, cell: &Arc<Cell<T>>, number: u64) -> Call<'_, T> {
        Call {
            wait: cell.wait(),
            shared: self.shared(),
            number,
        }
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
                return Ok((Step::Over(Ok(None)), Vec::new()));
            }
            let now = Instant::now();
            if now >= deadline {
                return Err(ConnectError::Deadline { peer: peer.clone() });
            }
            let same = |other: &&Handshake| other.from == self.end && other.peer == *peer;
            if let Some(handshake) = state.handshakes.iter().find(same) {
                let handshake = handshake.number;
                let (number, cell) = (state.number(), Cell::new());
                let call = self.waiting(&cell, number);
                state.behind.push(Behind {
                    number,
                    handshake,
                    deadline,
                    cell,
                });
                return Ok((Step::Behind(call), Vec::new()));
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
            if found.config.key != self.config.key {
                return Err(ConnectError::Key);
            }
            let timeout = self.config.handshake_timeout;
            let Some(answer) = found.config.on_connect.clone() else {
                return Ok((Step::Over(Ok(None)), state.link(self.end, to)?));
            };
            state.may_link(self.end, to)?;
            let (number, cell) = (state.number(), Cell::new());
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
                cell: Arc::clone(&cell),
            });
            let call = self.waiting(&cell, number);
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
            let (end, ..) = state.peer(self.end, peer)?;
            let party = self.party(state, end, peer, deadline);
            let call = self.waiting(&party.cell, party.number);
            let what = what(party);
            Ok((call, state.meet(Half { tag, what })))
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
        copy: impl FnOnce(Party<T>, Arc<lmc_memory::Arena>, Vec<u64>) -> Copy,
    ) -> Result<Call<'_, T>, TransferError> {
        self.shared().with(|state| {
            let (end, arena, unit) = state.peer(self.end, peer)?;
            let places = checks::places(lens, indices, unit, arena.len() as u64)?;
            let party = self.party(state, end, peer, deadline);
            let call = self.waiting(&party.cell, party.number);
            state.copies.push_back(copy(party, arena, places));
            Ok(call)
        })
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
            loop {
                match self.begin_connect(peer, name, &message, deadline)? {
                    Step::Over(connected) => return connected,
                    Step::Wait(call) => return call.await,
                    Step::Behind(call) => call.await,
                }
            }
        })
    }

    fn is_connected(&self, peer: &PeerId) -> bool {
        self.shared()
            .look(|state| state.peer(self.end, peer).is_ok())
    }

    fn unit(&self) -> u64 {
        self.config.unit
    }

    fn indices(&self, slots: &[&dyn InArena]) -> Result<Vec<Index>, TransferError> {
        checks::indices(&self.config.arena, self.config.unit, slots)
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
                return nothing();
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
            let copy = |party, arena, places| Copy::write(party, objects, arena, places);
            match self.begin_one_sided(peer, lens.into_iter(), indices, deadline, copy) {
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
                return nothing();
            }
            if let Err(error) = checks::slots(&self.config.arena, &slots) {
                return Filled::untouched(slots, error);
            }
            let lens: Vec<_> = slots.iter().map(ReservedSlot::len).collect();
            let mut slots = Some(slots);
            let copy = |party, arena, places| {
                Copy::read(party, slots.take().unwrap_or_default(), arena, places)
            };
            match self.begin_one_sided(peer, lens.into_iter(), indices, deadline, copy) {
                Ok(call) => call.await,
                Err(error) => Filled::untouched(slots.unwrap_or_default(), error),
            }
        })
    }

    fn close(&self, deadline: Instant) -> BoxFuture<'_, Result<(), TransferError>> {
        Box::pin(async move {
            let (call, out) = self.shared().with(|state| {
                let out = state.close(self.end);
                let (number, cell) = (state.number(), Cell::new());
                state.closing.push(Closing {
                    number,
                    end: self.end,
                    deadline,
                    cell: Arc::clone(&cell),
                });
                let call = self.waiting(&cell, number);
                (call, out)
            });
            deliver(out);
            call.await
        })
    }
}

/// What filling no slot comes to.
fn nothing() -> Filled {
    Filled {
        slots: Vec::new(),
        error: None,
    }
}
