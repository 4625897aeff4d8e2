//! NIXL as a second plane of a session: it moves the bytes of one-sided reads, by a library that is
//! found at run time.
//!
//! The owner of the objects writes them to memory of the reader that serves for nothing else
//! (`blocks`), and the reader copies them to its slots. So no peer has a key to an arena: NIXL has
//! no rights for a part of registered memory, no way to revoke them, and no proof that an
//! unreachable peer writes nothing any more. The owner moves the bytes because UCX emulates a read
//! where it has neither RDMA nor shared memory: at a third of the speed, and if the reader dies
//! meanwhile, UCX 1.23 aborts the *owner* (`ucp_request.inl: Fatal: unexpected error: Endpoint
//! timeout`).
//!
//! One thread makes all calls for transfers (`engine`, `agent`). Prepared descriptor lists are not
//! used: they name whole descriptors, and slots are of any length at any offset.

use std::fmt;
use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use lmc_memory::Arena;
use tokio::sync::watch;

mod agent;
mod blocks;
mod engine;
mod initiators;
mod library;
mod plan;
mod transfers;

pub(crate) use agent::Remote;
pub(crate) use blocks::{BLOCK, Block, Blocks};
pub(crate) use plan::{Sources, TransferPart};
pub(crate) use transfers::{NixlBatch, Report, WriteError};

use agent::{Registered, Role, Setup};
use engine::{Command, Commands, Engine};
use initiators::{AgentEvent, Initiators, spawn};
use transfers::Transfer;

use crate::{ChannelConfig, ConfigError, ConnectError, session};

/// Bytes of an agent's metadata at most; it takes about 500, and more for each network device.
pub(crate) const MAX_METADATA: usize = 64 << 10;
/// Minimum bytes that are registered by themselves.
const MIN_PIECE: u64 = 1 << 20;

/// Settings of NIXL.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct NixlConfig {
    /// Path of NIXL's library `libnixl_capi.so`. Default: the file that the variable
    /// `LMC_NIXL_LIBRARY` names; else the file that the loader finds; else the file of a wheel in
    /// the active Python.
    pub library: Option<PathBuf>,
    /// NIXL's name of the backend. Default: `UCX`.
    pub backend: String,
    /// Parameters of the backend, such as `("ucx_error_handling_mode", "peer")`. Default: none.
    /// NIXL ignores names that it does not know.
    pub parameters: Vec<(String, String)>,
    /// Bytes of memory, separate from the arena, that peers write to and objects are copied from: a
    /// multiple of 4 MiB, from 16 MiB. Each read uses 16 MiB at most. Default: 64 MiB.
    pub blocks: u64,
    /// Bytes of the arena that are registered at a time: with RDMA each registration pins its
    /// pages. A multiple of 4096, from 1 MiB. Default: 1 GiB.
    pub piece: u64,
}

impl Default for NixlConfig {
    fn default() -> Self {
        Self {
            library: None,
            backend: "UCX".to_owned(),
            parameters: Vec::new(),
            blocks: 64 << 20,
            piece: 1 << 30,
        }
    }
}

impl NixlConfig {
    /// Loads the library, and registers the first piece of a channel's arena, from which this side
    /// writes to peers. Blocks the caller: the first time in a process for about half a second. The
    /// other pieces are registered in the background.
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
    /// Peers can write to the memory of [`Self::blocks`], never to the arena. If a peer may still
    /// write when the channel closes, that memory stays mapped to the end of the process.
    ///
    /// # Errors
    /// [`ConnectError::Library`] when NIXL is missing (the error says how to install it) or
    /// refuses; [`ConnectError::Config`].
    pub fn open(self, channel: &ChannelConfig) -> Result<NixlPlane, ConnectError> {
        channel.check()?;
        let keyed = channel.keys.is_some();
        ConfigError::unless(keyed, "keys", "set for NIXL", &"none")?;
        let plain = !channel.encrypt_objects;
        ConfigError::unless(plain, "encrypt_objects", "false for NIXL", &true)?;
        let piece = self.piece;
        let aligned = piece >= MIN_PIECE && piece.is_multiple_of(4096);
        ConfigError::unless(aligned, "piece", "a multiple of 4096, from 1 MiB", &piece)?;
        let blocks = self.blocks;
        let whole = blocks >= 4 * BLOCK && blocks.is_multiple_of(BLOCK);
        ConfigError::unless(whole, "blocks", "a multiple of 4 MiB, from 16 MiB", &blocks)?;
        library::load(self.library.as_deref())?;
        Plane::open(self, channel)
    }
}

/// NIXL over the arena of one channel, to be passed to [`crate::SocketConfig::nixl`]. Clones are
/// the same plane; the last one that is dropped ends it.
#[derive(Clone)]
pub struct NixlPlane(Arc<Owner>);

struct Owner(Arc<Plane>);

impl Drop for Owner {
    fn drop(&mut self) {
        self.0.end();
    }
}

impl fmt::Debug for NixlPlane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NixlPlane")
            .field("agent", &self.0.0.agent)
            .finish_non_exhaustive()
    }
}

impl NixlPlane {
    pub(crate) fn plane(&self) -> &Arc<Plane> {
        &self.0.0
    }

    /// Checks that the plane is of this channel's arena, and that no channel uses it yet.
    pub(crate) fn take(&self, channel: &ChannelConfig) -> Result<(), ConfigError> {
        let plane = self.plane();
        let its = Arc::ptr_eq(&plane.arena, &channel.arena)
            && plane.agent.starts_with(&format!("{}@", channel.id))
            && channel.keys.is_some()
            && !channel.encrypt_objects
            && !plane.taken.swap(true, Ordering::AcqRel);
        ConfigError::unless(its, "nixl", "opened for this channel alone", &self)
    }
}

/// The memory that peers write to, as it is announced to them.
#[derive(Debug, Clone)]
pub(crate) struct Registration {
    pub(crate) agent: String,
    pub(crate) metadata: Vec<u8>,
    pub(crate) base: u64,
    pub(crate) len: u64,
}

/// The plane, as the sessions of a channel use it.
pub(crate) struct Plane {
    agent: String,
    commands: Commands,
    arena: Arc<Arena>,
    piece: u64,
    blocks: Arc<Blocks>,
    /// Set when the arena is registered, too.
    registration: OnceLock<Registration>,
    /// Turns true with the registration.
    ready: watch::Sender<bool>,
    closing: AtomicBool,
    taken: AtomicBool,
    next: AtomicU64,
    /// Turns true when the thread has ended.
    ended: watch::Sender<bool>,
}

impl fmt::Debug for Plane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Plane").field("agent", &self.agent).finish()
    }
}

impl Plane {
    fn open(config: NixlConfig, channel: &ChannelConfig) -> Result<NixlPlane, ConnectError> {
        let library = ConnectError::Library;
        let number = u64::from_le_bytes(session::random()?);
        let agent = format!("{}@{number:016x}", channel.id);
        let arena = Arc::clone(&channel.arena);
        let blocks = Blocks::new(config.blocks).map_err(|error| library(error.to_string()))?;
        let setup = Setup {
            arena: Arc::clone(&arena),
            backend: config.backend,
            parameters: config.parameters,
            piece: config.piece,
        };
        let landing = Setup {
            arena: Arc::clone(blocks.arena()),
            piece: config.blocks,
            ..setup.clone()
        };
        let target = Registered::whole(&agent, &landing, Role::Target).map_err(library)?;
        let metadata = target.metadata().map_err(library)?;
        if metadata.len() > MAX_METADATA {
            let len = metadata.len();
            let reason = format!("{len} bytes of metadata, at most {MAX_METADATA} are sent");
            return Err(library(reason));
        }
        let registration = Registration {
            agent: agent.clone(),
            metadata,
            base: blocks.arena().base_ptr().as_ptr() as u64,
            len: config.blocks,
        };
        let (commands, received) = Commands::new();
        let on_agent = commands.clone();
        let on_agent = move |event| on_agent.give(Command::Agent(event));
        let initiators = Initiators::new(agent.clone(), setup.clone(), Arc::new(on_agent));
        let first = initiators.next_name();
        let first = Registered::new(&first, &setup, Role::Initiator).map_err(library)?;
        let engine = Engine::new(commands.clone(), received, target, initiators);
        let here = arena.len() as u64 <= config.piece;
        let plane = Arc::new(Self {
            agent,
            commands,
            arena,
            piece: config.piece,
            blocks,
            registration: OnceLock::new(),
            ready: watch::Sender::new(false),
            closing: AtomicBool::new(false),
            taken: AtomicBool::new(false),
            next: AtomicU64::new(0),
            ended: watch::Sender::new(false),
        });
        let runs = Arc::clone(&plane);
        spawn("lmc-nixl", move || {
            engine.run();
            runs.blocks.outlive();
            runs.ended.send_replace(true);
        });
        let owner = NixlPlane(Arc::new(Owner(Arc::clone(&plane))));
        let registering = move || plane.register(first, registration);
        if here {
            registering().map_err(library)?;
        } else {
            spawn("lmc-nixl-memory", move || {
                if let Err(fault) = registering() {
                    tracing::error!(
                        fault,
                        "the memory is not registered with NIXL: peers are read over sockets; RDMA pins all of the memory, so raise the memlock limit (ulimit -l) if that is the reason"
                    );
                }
            });
        }
        Ok(owner)
    }

    /// Registers the arena, piece by piece.
    fn register(&self, mut first: Registered, registration: Registration) -> Result<(), String> {
        let mut pieces = || -> Result<bool, String> {
            while first.register()? {
                if self.closing.load(Ordering::Acquire) {
                    return Ok(false);
                }
            }
            Ok(true)
        };
        let registered = pieces();
        let made = AgentEvent::Made(Ok(first));
        self.commands.give(Command::Agent(made));
        if registered? {
            // The first time: only this function sets it, and it is called once.
            let _ = self.registration.set(registration);
            self.ready.send_replace(true);
        }
        Ok(())
    }

    /// Waits until all of the memory is registered; for ever if it cannot be.
    pub(crate) async fn registered(&self) -> &Registration {
        let mut ready = self.ready.subscribe();
        loop {
            if let Some(registration) = self.registration.get() {
                return registration;
            }
            // The sender is this plane's own, so there is no error.
            let _ = ready.changed().await;
        }
    }

    /// Returns a number for a connection.
    pub(crate) fn next_number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// The memory that peers write to.
    pub(crate) fn blocks(&self) -> &Arc<Blocks> {
        &self.blocks
    }

    /// Begins to write to a peer. NIXL connects to the peer now, and not before: UCX 1.23 aborts
    /// the process if a peer dies while UCX connects to it (`stubs.c:107 Assertion '0' failed`, in
    /// `uct_tcp_ep_pending_purge`).
    pub(crate) fn begin(&self, batch: NixlBatch) {
        let transfer = Transfer::new(batch, self.piece);
        self.commands.give(Command::Begin(transfer));
    }

    /// Ends all transfers of a connection; those that may be under way keep their memory. No other
    /// begins.
    pub(crate) fn gone(&self, connection: u64) {
        self.commands.give(Command::Gone(connection));
    }

    /// Makes the thread look at stopped batches at once.
    pub(crate) fn look(&self) {
        self.commands.give(Command::Look);
    }

    /// Ends all transfers, the agents and the thread, in the background.
    pub(crate) fn end(&self) {
        self.closing.store(true, Ordering::Release);
        self.commands.give(Command::End);
    }

    /// Waits for the end of the thread, without a runtime. Returns `false` at the deadline.
    pub(crate) fn ends_by(&self, deadline: Instant) -> bool {
        while !*self.ended.borrow() {
            if Instant::now() >= deadline {
                return false;
            }
            thread::sleep(Duration::from_millis(2));
        }
        true
    }

    /// Waits for the end of the thread.
    pub(crate) async fn ended(&self) {
        // The sender is this plane's own, so there is no error.
        let _ = self.ended.subscribe().wait_for(|ended| *ended).await;
    }
}

/// Returns whether an RDMA device of this host has a port that is up.
pub fn has_rdma() -> bool {
    let entries = |path: PathBuf| fs::read_dir(path).into_iter().flatten().flatten();
    entries("/sys/class/infiniband".into())
        .flat_map(|device| entries(device.path().join("ports")))
        .filter_map(|port| fs::read_to_string(port.path().join("state")).ok())
        .any(|state| state.contains("ACTIVE"))
}
