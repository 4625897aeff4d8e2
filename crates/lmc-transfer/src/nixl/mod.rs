//! [`NixlChannel`]: transfers over NIXL, whose library is found at run time.
//!
//! Bytes go through NIXL, metadata does not: peers exchange it over a session
//! ([`crate::session`]), whose end is also how the death of a peer is noticed. One thread makes
//! all calls for transfers (`engine`, `agent`).
//!
//! Transfers are NIXL requests of at most 8 MiB, neighbours joined, a few of each batch at a
//! time. Prepared descriptor lists are not used: they name whole descriptors, and slots are of
//! any length at any offset.
//!
//! NIXL registers the whole arena: it has no rights for a part of it, and no way to take them
//! back. A peer asks the owner before it touches leased ranges, and says when it is done; the
//! owner keeps them until then. Peers that are channels of this crate keep to that, and others
//! must not have the key.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use lmc_memory::{ReservedSlot, SealedSlot};
use tokio::sync::{oneshot, watch};

mod agent;
mod control;
mod engine;
mod initiators;
mod library;
mod link;
mod paired;
mod plan;
mod reach;
mod transfers;
mod wire;

pub use agent::NixlMemory;
pub use reach::{NixlReads, has_rdma};

use agent::{Registered, Remote, Role, Setup};
use control::{Exposures, Host, left};
use engine::{Command, Commands, Engine, JoinError, Peer, Shared, State};
use initiators::{Initiators, spawn};
use reach::Reach;
use transfers::Batch;
use wire::{Intro, MAX_METADATA, agent_name};

use crate::checks::PeerMemory;
use crate::connect_once::ConnectOnce;
use crate::lease::Leases;
use crate::net::Listener;
use crate::session::{self, Local};
use crate::{
    Address, BoxFuture, ChannelConfig, ConfigError, ConnectError, Filled, InArena, Index,
    MAX_MESSAGE, PeerId, ReadLease, Rights, Sent, TransferChannel, TransferError, WriteLease,
    checks,
};

/// Time that dropping a channel waits for its end.
const DROP_WAIT: Duration = Duration::from_secs(2);

/// Settings of a [`NixlChannel`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct NixlConfig {
    /// Settings that every channel has. [`ChannelConfig::keys`] is required.
    pub channel: ChannelConfig,
    /// Address to listen at for control connections: `tcp://HOST:PORT` or `unix:PATH`.
    pub listen: Address,
    /// Path of NIXL's library `libnixl_capi.so`. Default: the one that the variable
    /// `LMC_NIXL_LIBRARY` names; else the one that the loader finds; else that of a wheel in the
    /// active Python.
    pub library: Option<PathBuf>,
    /// NIXL's name of the backend. Default: `UCX`.
    pub backend: String,
    /// Parameters of the backend, such as `("ucx_error_handling_mode", "peer")`. Default: none.
    /// NIXL ignores names that it does not know.
    pub parameters: Vec<(String, String)>,
    /// Kind of memory that the arena is. Default: the host's.
    pub memory: NixlMemory,
    /// Side that moves the bytes of a read. Default: this side where that is safe and fast.
    pub reads: NixlReads,
    /// Bytes of the arena that are registered at a time: with RDMA each registration pins its
    /// pages. A multiple of 4096. Default: 1 GiB.
    pub piece: u64,
}

impl NixlConfig {
    /// Returns the defaults.
    pub fn new(channel: ChannelConfig, listen: Address) -> Self {
        Self {
            channel,
            listen,
            library: None,
            backend: "UCX".to_owned(),
            parameters: Vec::new(),
            memory: NixlMemory::default(),
            reads: NixlReads::default(),
            piece: 1 << 30,
        }
    }

    /// Loads the library, registers the first piece of the arena, and listens. Blocks, for about
    /// half a second the first time in a process. The other pieces are registered in the
    /// background; until that is done, connects of either side fail with
    /// [`ConnectError::NotReady`] and may be repeated ([`NixlChannel::is_ready`]).
    ///
    /// UCX and NIXL read environment variables when they are loaded. This crate sets none; the
    /// embedder should set these before any thread starts: `UCX_MODULES=^efa` (the module for EFA
    /// loads the system's libibverbs next to the wheel's, and such a process dies at its exit),
    /// `UCX_LOG_FILE=stderr` (UCX logs to stdout otherwise), `UCX_LOG_LEVEL=error`,
    /// `NIXL_LOG_LEVEL=ERROR`.
    ///
    /// NIXL trusts the metadata of peers, and the ports that UCX opens ask for no key: the shared
    /// key is required, metadata is sent encrypted and only to peers that have proved the key, and
    /// a firewall must keep others from UCX's ports.
    ///
    /// The arena stays mapped until every peer has ended its connection after a close, and to
    /// the end of the process where one does not, or where [`NixlChannel::agent`] was called.
    ///
    /// # Errors
    /// [`ConnectError::Library`] when there is no NIXL, with how to install it, or when it
    /// refuses; [`ConnectError::Config`]; [`ConnectError::Io`] for the address.
    pub fn build(self) -> Result<NixlChannel, ConnectError> {
        NixlChannel::new(self)
    }
}

/// A channel over NIXL.
pub struct NixlChannel {
    host: Arc<Host>,
    address: Address,
    shared: Arc<Shared>,
    leases: Arc<Leases>,
    connects: ConnectOnce,
    closed: AtomicBool,
}

impl fmt::Debug for NixlChannel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NixlChannel")
            .field("id", &self.host.config.id)
            .field("address", &self.address)
            .finish_non_exhaustive()
    }
}

/// Describes an agent of NIXL, so that another that is no channel of this crate can reach its
/// memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NixlAgent {
    /// The agent's name.
    pub agent: String,
    /// The metadata that `get_agent_metadata` returns in Python, `get_local_md` in Rust.
    pub metadata: Vec<u8>,
    /// Address of the registered memory, in its process.
    pub base: u64,
    /// Bytes of the registered memory.
    pub len: u64,
    /// The kind of memory.
    pub memory: NixlMemory,
}

impl NixlChannel {
    fn new(config: NixlConfig) -> Result<Self, ConnectError> {
        let channel = config.channel;
        channel.check()?;
        let keyed = channel.keys.is_some();
        ConfigError::unless(keyed, "keys", "set for a NIXL channel", &"none")?;
        let piece = config.piece;
        let aligned = piece > 0 && piece.is_multiple_of(4096);
        ConfigError::unless(aligned, "piece", "a multiple of 4096 above 0", &piece)?;
        library::load(config.library.as_deref())?;
        let arena = Arc::clone(&channel.arena);
        let local = Local::new("nixl", &channel)?;
        let incarnation = local.incarnation;
        let agent = agent_name(channel.id.as_str(), incarnation);
        let setup = Setup {
            arena: Arc::clone(&arena),
            memory: config.memory,
            backend: config.backend,
            parameters: config.parameters,
            piece,
        };
        let library = ConnectError::Library;
        let (commands, received) = Commands::new();
        let initiators = Initiators::new(agent.clone(), setup.clone(), commands.clone());
        let target = Registered::new(&agent, &setup, Role::Target).map_err(library)?;
        let first = initiators.next_name();
        let first = Registered::new(&first, &setup, Role::Initiator).map_err(library)?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("lmc-nixl-net")
            .enable_all()
            .build()?;
        let listener = {
            let _entered = runtime.enter();
            Listener::bind(&config.listen)?
        };
        let address = listener.address().clone();
        let reach = Reach::of_this_process();
        let host = Arc::new(Host {
            local,
            intro: OnceLock::new(),
            config: channel.clone(),
            commands: commands.clone(),
            runtime: runtime.handle().clone(),
            refused: AtomicU64::new(0),
            links: AtomicU64::new(0),
            closing: watch::Sender::new(false),
            exposures: Arc::new(Exposures::default()),
        });
        let intro = Intro {
            agent,
            metadata: Vec::new(),
            base: arena.base_ptr().as_ptr() as u64,
            len: arena.len() as u64,
            unit: channel.unit,
            piece,
            gpu: match config.memory {
                NixlMemory::Host => None,
                NixlMemory::Gpu(device) => Some(device),
            },
            reach: reach.clone(),
            open: channel.open_arena,
            writable: channel.rights == Rights::ReadWrite,
        };
        let registering = Registering {
            host: Arc::clone(&host),
            target,
            first,
            intro,
        };
        registering.start(arena.len() as u64 <= piece)?;
        let accepting = runtime.spawn(session::serve(Arc::clone(&host), listener));
        let shared = Arc::new(Shared::default());
        let leases = Leases::new(incarnation);
        let engine = Engine {
            commands,
            received,
            shared: Arc::clone(&shared),
            config: channel,
            leases: Arc::clone(&leases),
            piece,
            reads: config.reads,
            reach,
            target: None,
            arena,
            exposures: Arc::clone(&host.exposures),
            initiators,
            runtime: Some(runtime),
            accepting: accepting.abort_handle(),
            state: State::default(),
        };
        engine.start();
        Ok(Self {
            host,
            address,
            shared,
            leases,
            connects: ConnectOnce::default(),
            closed: AtomicBool::new(false),
        })
    }

    /// Returns whether all of the memory is registered, so that peers can be connected to.
    pub fn is_ready(&self) -> bool {
        self.host.intro.get().is_some()
    }

    /// Returns the number of handshakes of others that failed.
    pub fn refused_handshakes(&self) -> u64 {
        self.host.refused.load(Ordering::Relaxed)
    }

    /// Returns the number of slots that peers may still touch that vanished with their host or its
    /// network, which NIXL cannot prevent. They stay in quarantine until that incarnation of the
    /// peer connects again, or to the end of the process.
    pub fn stranded_slots(&self) -> u64 {
        self.shared.stranded.load(Ordering::Relaxed)
    }

    /// Describes this side's agent for one that is no channel of this crate: with it, that agent
    /// reads and writes all of the arena. `None` until all of the memory is registered.
    pub fn agent(&self) -> Option<NixlAgent> {
        let intro = self.host.intro.get()?;
        self.host.exposures.lose();
        Some(NixlAgent {
            agent: intro.agent.clone(),
            metadata: intro.metadata.clone(),
            base: intro.base,
            len: intro.len,
            memory: intro.remote().memory,
        })
    }

    /// Makes an agent known that is no channel of this crate, so that its memory can be read and
    /// written, in steps of `unit` bytes. Only a transfer that fails shows that it is gone;
    /// [`TransferChannel::disconnect`] forgets it. Returns its incarnation, for
    /// [`Index::arena`].
    ///
    /// # Errors
    /// [`ConnectError`].
    pub async fn introduce(
        &self,
        peer: PeerId,
        agent: NixlAgent,
        unit: u64,
    ) -> Result<u64, ConnectError> {
        let incarnation = u64::from_le_bytes(session::random()?);
        let inside = agent.base.checked_add(agent.len).is_some();
        if !unit.is_power_of_two() || agent.metadata.len() > MAX_METADATA || !inside {
            let fault = "an invalid description of an agent".to_owned();
            return Err(ConnectError::Malformed(fault));
        }
        let peer = Peer {
            id: peer,
            incarnation,
            identity: None,
            memory: PeerMemory {
                incarnation,
                arena: agent.len,
                unit,
            },
            open: true,
            writable: true,
            remote: Remote {
                agent: agent.agent,
                metadata: agent.metadata,
                base: agent.base,
                len: agent.len,
                // It is known to be one piece.
                piece: u64::MAX,
                memory: agent.memory,
            },
            direct: true,
        };
        let (reply, joined) = oneshot::channel();
        self.host.commands.give(Command::Introduce { peer, reply });
        match joined.await {
            Ok(Ok(())) => Ok(incarnation),
            Ok(Err(JoinError::Other(error))) => Err(error),
            Ok(Err(JoinError::NotYet(why))) => Err(ConnectError::Refused(why.to_owned())),
            Err(_) => Err(ConnectError::Closed),
        }
    }

    /// Checks a batch before the peer is looked up; `Some` where it ends here.
    fn early<S: InArena>(&self, slots: &[S]) -> Option<Result<(), TransferError>> {
        if self.closed.load(Ordering::Acquire) {
            return Some(Err(TransferError::Closed));
        }
        match checks::slots(&self.host.config.arena, slots) {
            Err(error) => Some(Err(error)),
            Ok(()) => slots.is_empty().then_some(Ok(())),
        }
    }

    async fn connect_once(
        &self,
        peer: &PeerId,
        address: &Address,
        message: Option<Bytes>,
        deadline: Instant,
    ) -> Result<Option<Bytes>, ConnectError> {
        let (peer, address) = (peer.clone(), address.clone());
        let host = Arc::clone(&self.host);
        let (shared, connects) = (Arc::clone(&self.shared), self.connects.clone());
        let (reply, connected) = oneshot::channel();
        self.host.runtime.spawn(async move {
            let work = async {
                let turn = tokio::time::timeout(left(deadline), connects.turn(&peer));
                let late = |_| ConnectError::Deadline { peer: peer.clone() };
                let _turn = turn.await.map_err(late)?;
                // The one before may have done it.
                if shared.peers.read().contains_key(&peer) {
                    return Ok(None);
                }
                host.connect(&peer, &address, message, deadline).await
            };
            // A caller that has dropped the future wants no answer.
            let _ = reply.send(work.await);
        });
        connected.await.map_err(|_| ConnectError::Closed)?
    }

    /// The incarnation of a peer that is connected.
    fn connected(&self, peer: &PeerId) -> Result<u64, TransferError> {
        if self.closed.load(Ordering::Acquire) {
            return Err(TransferError::Closed);
        }
        let unknown = || TransferError::UnknownPeer { peer: peer.clone() };
        self.peer_incarnation(peer).ok_or_else(unknown)
    }
}

/// Registers the memory, piece by piece.
struct Registering {
    host: Arc<Host>,
    target: Registered,
    first: Registered,
    intro: Intro,
}

impl Registering {
    /// Goes on here where little is left, and otherwise on a thread.
    fn start(self, here: bool) -> Result<(), ConnectError> {
        if here {
            return self.finish().map_err(ConnectError::Library);
        }
        spawn("lmc-nixl-memory", move || {
            if let Err(fault) = self.finish() {
                tracing::error!(
                    fault,
                    "the memory is not registered with NIXL: no peer can connect over it; RDMA pins all of it, so raise the memlock limit (ulimit -l) if that is the reason"
                );
            }
        });
        Ok(())
    }

    fn finish(mut self) -> Result<(), String> {
        let registered = self.register();
        let commands = &self.host.commands;
        commands.give(Command::Target(self.target));
        commands.give(Command::Made(Ok(self.first)));
        let metadata = registered?;
        // Only now the thread may be asked to take a peer.
        if let Some(metadata) = metadata {
            let intro = Intro {
                metadata,
                ..self.intro
            };
            let _ = self.host.intro.set(intro);
        }
        Ok(())
    }

    /// The metadata of all pieces; `None` when the channel closes first.
    fn register(&mut self) -> Result<Option<Vec<u8>>, String> {
        while self.target.register()? | self.first.register()? {
            if *self.host.closing.borrow() {
                return Ok(None);
            }
        }
        let metadata = self.target.metadata()?;
        match metadata.len() {
            0..=MAX_METADATA => Ok(Some(metadata)),
            len => Err(format!(
                "{len} bytes of metadata, at most {MAX_METADATA} are sent: choose larger pieces"
            )),
        }
    }
}

/// Makes the thread look at once at what was dropped.
struct Dropped<'a> {
    commands: &'a Commands,
    answered: bool,
}

impl Drop for Dropped<'_> {
    fn drop(&mut self) {
        if !self.answered {
            self.commands.give(Command::Look);
        }
    }
}

/// Waits for the thread's answer.
async fn answer<T>(commands: &Commands, answered: oneshot::Receiver<T>) -> Option<T> {
    let mut dropped = Dropped {
        commands,
        answered: false,
    };
    let answer = answered.await.ok();
    dropped.answered = true;
    answer
}

impl TransferChannel for NixlChannel {
    fn kind(&self) -> &'static str {
        "nixl"
    }

    fn id(&self) -> &PeerId {
        &self.host.config.id
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
    ) -> BoxFuture<'a, Result<Option<Bytes>, ConnectError>> {
        Box::pin(async move {
            if self.closed.load(Ordering::Acquire) {
                return Err(ConnectError::Closed);
            }
            let found = message.as_ref().map_or(0, Bytes::len);
            if found > MAX_MESSAGE {
                return Err(ConnectError::Message { found });
            }
            if self.is_connected(peer) {
                return Ok(None);
            }
            self.connect_once(peer, address, message, deadline).await
        })
    }

    fn incarnation(&self) -> u64 {
        self.host.local.incarnation
    }

    fn disconnect<'a>(
        &'a self,
        peer: &'a PeerId,
        deadline: Instant,
    ) -> BoxFuture<'a, Result<(), TransferError>> {
        Box::pin(async move {
            let (reply, done) = oneshot::channel();
            self.host.commands.give(Command::Disconnect {
                peer: peer.clone(),
                reply: Some(reply),
            });
            // It is quick, and the runtime's clock is not at hand here.
            let _ = (done.await, deadline);
            Ok(())
        })
    }

    fn peer_incarnation(&self, peer: &PeerId) -> Option<u64> {
        self.shared.peers.read().get(peer).copied()
    }

    fn grant_read(
        &self,
        peer: &PeerId,
        slots: Vec<SealedSlot>,
    ) -> Result<ReadLease, TransferError> {
        let connected = || self.connected(peer);
        self.leases
            .grant_read(&self.host.config, peer, slots, connected)
    }

    fn grant_write(
        &self,
        peer: &PeerId,
        slots: Vec<ReservedSlot>,
    ) -> Result<WriteLease, TransferError> {
        let connected = || self.connected(peer);
        self.leases
            .grant_write(&self.host.config, peer, slots, connected)
    }

    fn unit(&self) -> u64 {
        self.host.config.unit
    }

    fn arena_indices(&self, slots: &[&dyn InArena]) -> Result<Vec<Index>, TransferError> {
        checks::arena_indices(&self.host.config, self.incarnation(), slots)
    }

    fn send<'a>(
        &'a self,
        objects: Vec<SealedSlot>,
        peer: &'a PeerId,
        tag: u64,
        deadline: Instant,
    ) -> BoxFuture<'a, Sent> {
        Box::pin(async move {
            match self.early(&objects) {
                Some(Ok(())) => return Sent::all(0),
                Some(Err(error)) => return Sent::failed(error),
                None => {}
            }
            let (reply, sent) = oneshot::channel();
            self.host.commands.give(Command::Send {
                objects,
                peer: peer.clone(),
                tag,
                deadline,
                reply,
            });
            let sent = answer(&self.host.commands, sent).await;
            sent.unwrap_or_else(|| Sent {
                idle: false,
                ..Sent::failed(TransferError::Closed)
            })
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
            if let Some(early) = self.early(&slots) {
                return filled_early(slots, early);
            }
            let count = slots.len();
            let (reply, filled) = oneshot::channel();
            self.host.commands.give(Command::Receive {
                slots,
                peer: peer.clone(),
                tag,
                deadline,
                reply,
            });
            let filled = answer(&self.host.commands, filled).await;
            filled.unwrap_or_else(|| lost(count))
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
            match self.early(&objects) {
                Some(Ok(())) if indices.is_empty() => return Sent::all(0),
                Some(Err(error)) => return Sent::failed(error),
                Some(Ok(())) | None => {}
            }
            let (reply, sent) = oneshot::channel();
            let batch = Batch::Write {
                objects,
                reply,
                send: None,
            };
            self.host.commands.give(Command::Transfer {
                batch,
                peer: peer.clone(),
                indices: indices.to_vec(),
                deadline,
            });
            let sent = answer(&self.host.commands, sent).await;
            sent.unwrap_or_else(|| Sent {
                idle: false,
                ..Sent::failed(TransferError::Closed)
            })
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
            match self.early(&slots) {
                Some(Ok(())) if !indices.is_empty() => {}
                Some(early) => return filled_early(slots, early),
                None => {}
            }
            let count = slots.len();
            let (reply, filled) = oneshot::channel();
            let batch = Batch::Read {
                slots,
                reply,
                send: None,
            };
            self.host.commands.give(Command::Transfer {
                batch,
                peer: peer.clone(),
                indices: indices.to_vec(),
                deadline,
            });
            let filled = answer(&self.host.commands, filled).await;
            filled.unwrap_or_else(|| lost(count))
        })
    }

    fn close(&self, deadline: Instant) -> BoxFuture<'_, Result<(), TransferError>> {
        Box::pin(async move {
            self.closed.store(true, Ordering::Release);
            self.host.closing.send_replace(true);
            let (reply, closed) = oneshot::channel();
            self.host.commands.give(Command::Close { deadline, reply });
            // The thread has ended: a close before has done it.
            closed.await.unwrap_or(Ok(()))
        })
    }
}

impl Drop for NixlChannel {
    fn drop(&mut self) {
        let deadline = Instant::now() + DROP_WAIT;
        self.host.closing.send_replace(true);
        let (reply, _) = oneshot::channel();
        self.host.commands.give(Command::Close { deadline, reply });
        let mut ended = self.shared.ended.lock();
        while !*ended && !self.shared.end.wait_until(&mut ended, deadline).timed_out() {}
        if !*ended {
            tracing::warn!("a NIXL channel is still closing in the background");
        }
    }
}

fn filled_early(slots: Vec<ReservedSlot>, early: Result<(), TransferError>) -> Filled {
    match early {
        Ok(()) => Filled::nothing(),
        Err(error) => Filled::untouched(slots, error),
    }
}

/// The thread ended with the slots: they are in their pool again, or in quarantine.
fn lost(count: usize) -> Filled {
    Filled {
        slots: (0..count).map(|_| crate::Slot::Quarantined).collect(),
        error: Some(TransferError::Closed),
    }
}
