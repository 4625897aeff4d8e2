//! [`NixlChannel`]: real NIXL, found when it runs.
//!
//! Bytes go through NIXL, metadata does not: peers exchange it, and who they are, over a control
//! connection of ours (`wire`), whose end is also how the death of a peer is noticed. One thread
//! makes all calls for transfers (`engine`, `agent`).
//!
//! Transfers are NIXL requests of at most 8 MiB, neighbours joined, a few of each batch at a
//! time. Prepared descriptor lists are not used: they name whole descriptors, and slots are of
//! any length at any place.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use lmc_memory::{ReservedSlot, SealedSlot};
use parking_lot::Mutex;
use tokio::sync::{oneshot, watch};

mod agent;
mod control;
mod engine;
mod initiators;
mod library;
mod link;
mod metadata;
mod paired;
mod plan;
mod reach;
mod transfers;
mod wire;

pub use agent::NixlMemory;
pub use reach::NixlReads;

use agent::{Registered, Remote, Role, Setup};
use control::{Exposures, Host, Listener, asking, left};
use engine::{Command, Commands, Engine, Peer, Shared, State};
use initiators::Initiators;
use reach::Reach;
use transfers::Batch;
use wire::{Intro, MAX_METADATA, agent_name};

use crate::{
    Address, BoxFuture, ChannelConfig, ConnectError, Filled, InArena, Index, MAX_MESSAGE, PeerId,
    Sent, TransferChannel, TransferError, checks,
};

/// Time that dropping a channel waits for its end.
const DROP_WAIT: Duration = Duration::from_secs(2);

/// How a [`NixlChannel`] is set up.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct NixlConfig {
    /// What all channels need.
    pub channel: ChannelConfig,
    /// Where peers' control connections come in: `tcp://HOST:PORT` or `unix:PATH`.
    pub listen: Address,
    /// NIXL's library `libnixl_capi.so`. Default: what the variable `LMC_NIXL_LIBRARY` names;
    /// else what the loader finds; else that of a wheel in the active Python.
    pub library: Option<PathBuf>,
    /// NIXL's backend, by its name there. Default: `UCX`.
    pub backend: String,
    /// Parameters of the backend, such as `("ucx_error_handling_mode", "peer")`. Default: none,
    /// for its own. NIXL ignores names that it does not know.
    pub parameters: Vec<(String, String)>,
    /// What kind of memory the arena is. Default: the host's.
    pub memory: NixlMemory,
    /// Who moves the bytes of a read. Default: this side where that is safe and quick.
    pub reads: NixlReads,
}

impl NixlConfig {
    /// The defaults.
    pub fn new(channel: ChannelConfig, listen: Address) -> Self {
        Self {
            channel,
            listen,
            library: None,
            backend: "UCX".to_owned(),
            parameters: Vec::new(),
            memory: NixlMemory::default(),
            reads: NixlReads::default(),
        }
    }

    /// Loads the library, registers the arena and listens. Blocks, for about half a second the
    /// first time in a process; with RDMA also while the arena's pages are pinned.
    ///
    /// The first channel of a process sets variables that UCX and NIXL read when they are loaded
    /// (`UCX_MODULES`, `UCX_LOG_FILE`, `UCX_LOG_LEVEL`, `NIXL_LOG_LEVEL`), those that are not
    /// set: make it before there are threads of C code that read the environment.
    ///
    /// NIXL does not check what a peer says of its agent, and crashes at what is wrong: this side
    /// checks it before, with backend `UCX` to the last byte that UCX itself reads without looking.
    /// What other backends make of theirs, and UCX's transports of their own keys and addresses,
    /// is not checked: peers that know [`ChannelConfig::key`] are trusted not to mean harm; without
    /// a key, every host that reaches the address is.
    ///
    /// The arena stays mapped until every peer has ended its connection after a close, and to
    /// the end of the process where one does not, or where [`NixlChannel::agent`] was called.
    ///
    /// # Errors
    /// [`ConnectError::Library`] when there is no NIXL, with how to install it, or when it
    /// refuses; [`ConnectError::Address`] and [`ConnectError::Io`] for the address.
    pub fn build(self) -> Result<NixlChannel, ConnectError> {
        NixlChannel::new(self)
    }
}

/// A channel over NIXL.
pub struct NixlChannel {
    host: Arc<Host>,
    address: Address,
    shared: Arc<Shared>,
    closed: AtomicBool,
    /// Peers that are being connected to, each by one.
    connecting: Mutex<Vec<(PeerId, Arc<tokio::sync::Mutex<()>>)>>,
}

impl fmt::Debug for NixlChannel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NixlChannel")
            .field("id", &self.host.config.id)
            .field("address", &self.address)
            .finish_non_exhaustive()
    }
}

/// What an agent of NIXL that is no channel of ours needs to reach this side's arena, or this
/// side to reach its memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NixlAgent {
    /// The agent's name.
    pub agent: String,
    /// What `get_agent_metadata` gives in Python, `get_local_md` in Rust.
    pub metadata: Vec<u8>,
    /// Address of the registered memory, in its process.
    pub base: u64,
    /// Bytes of the registered memory.
    pub len: u64,
    /// What kind of memory it is.
    pub memory: NixlMemory,
}

impl NixlChannel {
    fn new(config: NixlConfig) -> Result<Self, ConnectError> {
        library::load(config.library.as_deref())?;
        let channel = config.channel;
        channel.check()?;
        let arena = Arc::clone(&channel.arena);
        let mut random = [0; 8];
        getrandom::fill(&mut random).map_err(std::io::Error::from)?;
        let incarnation = u64::from_le_bytes(random);
        let agent = agent_name(channel.id.as_str(), incarnation);
        let setup = Setup {
            arena: Arc::clone(&arena),
            memory: config.memory,
            backend: config.backend,
            parameters: config.parameters,
        };
        let library = ConnectError::Library;
        let target = Registered::new(&agent, &setup, Role::Target).map_err(library)?;
        let (commands, received) = Commands::new();
        let initiators =
            Initiators::new(agent.clone(), setup, commands.clone()).map_err(library)?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("lmc-nixl-net")
            .enable_all()
            .build()?;
        let (listener, address) = runtime.block_on(Listener::bind(&config.listen))?;
        let metadata = target.metadata().map_err(library)?;
        if metadata.len() > MAX_METADATA {
            let fault = format!(
                "{} bytes of metadata, {MAX_METADATA} are sent",
                metadata.len()
            );
            return Err(ConnectError::Library(fault));
        }
        let max_peers = channel.max_peers;
        let reach = Reach::of_this_process();
        let host = Arc::new(Host {
            intro: Intro {
                peer: channel.id.to_string(),
                wanted: None,
                incarnation,
                agent,
                metadata,
                base: arena.base_ptr().as_ptr() as u64,
                len: arena.len() as u64,
                unit: channel.unit,
                gpu: match config.memory {
                    NixlMemory::Host => None,
                    NixlMemory::Gpu(device) => Some(device),
                },
                reach: reach.clone(),
                message: None,
            },
            config: channel,
            commands: commands.clone(),
            runtime: runtime.handle().clone(),
            refused: AtomicU64::new(0),
            links: AtomicU64::new(0),
            closing: watch::Sender::new(false),
            exposures: Arc::new(Exposures::default()),
            asking: asking(),
        });
        let accepting = runtime.spawn(Arc::clone(&host).serve(listener));
        let shared = Arc::new(Shared::default());
        let engine = Engine {
            commands,
            received,
            shared: Arc::clone(&shared),
            max_peers,
            reads: config.reads,
            reach,
            target: Some(target),
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
            closed: AtomicBool::new(false),
            connecting: Mutex::new(Vec::new()),
        })
    }

    /// Handshakes of others that were refused.
    pub fn refused_handshakes(&self) -> u64 {
        self.host.refused.load(Ordering::Relaxed)
    }

    /// Slots that stay in quarantine to the end of the process: peers that vanished without a word,
    /// as with their host or its network, had their places, and NIXL has no way to take those back.
    pub fn stranded_slots(&self) -> u64 {
        self.shared.stranded.load(Ordering::Relaxed)
    }

    /// What an agent that is no channel of ours needs to read and write this side's arena.
    pub fn agent(&self) -> NixlAgent {
        self.host.exposures.lose();
        let intro = &self.host.intro;
        NixlAgent {
            agent: intro.agent.clone(),
            metadata: intro.metadata.clone(),
            base: intro.base,
            len: intro.len,
            memory: intro.remote().memory,
        }
    }

    /// Makes an agent known that is no channel of ours, so that its memory can be read and
    /// written, in steps of `unit` bytes. Nothing says when it is gone but a transfer that fails;
    /// [`Self::forget`] does.
    ///
    /// # Errors
    /// [`ConnectError`].
    pub async fn introduce(
        &self,
        peer: PeerId,
        agent: NixlAgent,
        unit: u64,
    ) -> Result<(), ConnectError> {
        let mut incarnation = [0; 8];
        getrandom::fill(&mut incarnation).map_err(std::io::Error::from)?;
        let inside = agent.base.checked_add(agent.len).is_some();
        if !unit.is_power_of_two() || agent.metadata.len() > MAX_METADATA || !inside {
            let fault = "an agent that cannot be".to_owned();
            return Err(ConnectError::Malformed(fault));
        }
        let peer = Peer {
            id: peer,
            incarnation: u64::from_le_bytes(incarnation),
            unit,
            remote: Remote {
                agent: agent.agent,
                metadata: agent.metadata,
                base: agent.base,
                len: agent.len,
                memory: agent.memory,
            },
            direct: true,
        };
        let (reply, joined) = oneshot::channel();
        self.host.commands.give(Command::Introduce { peer, reply });
        joined.await.map_err(|_| ConnectError::Closed)?
    }

    /// Ends what there is with a peer, as if it had gone.
    pub fn forget(&self, peer: &PeerId) {
        let peer = peer.clone();
        self.host.commands.give(Command::Forget { peer });
    }

    /// What can be said of a batch before the peer is looked at. `Some` where it ends here.
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
        let turn = {
            let mut connecting = self.connecting.lock();
            connecting.retain(|(_, turn)| Arc::strong_count(turn) > 1);
            let same = connecting.iter().find(|(other, _)| *other == peer);
            let turn = same.map(|(_, turn)| Arc::clone(turn)).unwrap_or_default();
            connecting.push((peer.clone(), Arc::clone(&turn)));
            turn
        };
        let shared = Arc::clone(&self.shared);
        let (reply, connected) = oneshot::channel();
        self.host.runtime.spawn(async move {
            let work = async {
                let turn = tokio::time::timeout(left(deadline), turn.lock());
                let late = |_| ConnectError::Deadline { peer: peer.clone() };
                let _turn = turn.await.map_err(late)?;
                // Who was before may have done it.
                if shared.peers.read().contains(&peer) {
                    return Ok(None);
                }
                host.connect(&peer, &address, message, deadline).await
            };
            // Who has dropped the future wants no answer.
            let _ = reply.send(work.await);
        });
        connected.await.map_err(|_| ConnectError::Closed)?
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

    fn is_connected(&self, peer: &PeerId) -> bool {
        self.shared.peers.read().contains(peer)
    }

    fn unit(&self) -> u64 {
        self.host.config.unit
    }

    fn indices(&self, slots: &[&dyn InArena]) -> Result<Vec<Index>, TransferError> {
        checks::indices(&self.host.config.arena, self.unit(), slots)
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
            sent.unwrap_or_else(|| Sent::failed(TransferError::Closed))
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
            sent.unwrap_or_else(|| Sent::failed(TransferError::Closed))
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
            let batch = Batch::Read { slots, reply };
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
            tracing::warn!("a NIXL channel goes on ending in the background");
        }
    }
}

fn filled_early(slots: Vec<ReservedSlot>, early: Result<(), TransferError>) -> Filled {
    match early {
        Ok(()) => Filled {
            slots: Vec::new(),
            error: None,
        },
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
