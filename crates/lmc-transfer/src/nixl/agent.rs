//! Every call into NIXL.
//!
//! A channel has two kinds of agent. The *target* registers the blocks that peers write to. It has
//! a progress thread of UCX, because over TCP nothing moves unless the side that is written to
//! makes progress. Other calls to it only discard notifications, so its lock is rarely contended.
//! The *initiator* registers the arena, from which this side writes to peers; no peer gets to know
//! that memory. It has no progress thread, and belongs to the thread `lmc-nixl`: its transfers move
//! only inside that thread's calls, faster than behind a progress thread. NIXL takes a lock per
//! agent for the whole of every call.

use std::fmt;
use std::sync::Arc;

use lmc_memory::Arena;
use nixl_sys::{
    Agent, AgentConfig, Backend, MemType, MemoryRegion, NixlDescriptor, NixlError, NotificationMap,
    RegistrationHandle, ThreadSync, XferDescList, XferOp, XferRequest, XferStatus,
};

use super::plan::TransferPart;

/// Time that UCX's progress thread sleeps at most, in µs. Events wake it; with less than 1 it
/// would never sleep.
const PROGRESS_DELAY_US: u64 = 1000;

/// Settings of every agent of a channel.
#[derive(Clone)]
pub(super) struct Setup {
    pub(super) arena: Arc<Arena>,
    /// NIXL's name of the backend.
    pub(super) backend: String,
    pub(super) parameters: Vec<(String, String)>,
    /// Bytes that are registered at a time.
    pub(super) piece: u64,
}

/// A piece of the arena, as NIXL asks for it.
#[derive(Debug)]
struct Region {
    arena: Arc<Arena>,
    offset: usize,
    len: usize,
}

impl MemoryRegion for Region {
    // SAFETY: the caller keeps the region; the agent that registers it does.
    unsafe fn as_ptr(&self) -> *const u8 {
        self.arena.base_ptr().as_ptr().wrapping_add(self.offset)
    }

    fn size(&self) -> usize {
        self.len
    }
}

impl NixlDescriptor for Region {
    fn mem_type(&self) -> MemType {
        MemType::Dram
    }

    fn device_id(&self) -> u64 {
        0
    }
}

/// An agent that registers the arena, piece by piece. Only dropping it ends the requests that it
/// has under way; that may take a while.
pub(super) struct Registered {
    // In the order in which they must go.
    registrations: Vec<RegistrationHandle>,
    agent: Agent,
    _backend: Backend,
    regions: Vec<Region>,
    arena: Arc<Arena>,
    piece: usize,
}

impl fmt::Debug for Registered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Registered")
            .field(&self.registrations)
            .finish()
    }
}

/// The role of an agent: a target makes progress by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    Target,
    Initiator,
}

/// One incarnation of a peer, and the memory that it lets this side write to.
#[derive(Debug, Clone)]
pub(crate) struct Remote {
    /// Name of its target agent, which no other peer has.
    pub(crate) agent: String,
    /// Metadata of the agent, by itself.
    pub(crate) metadata: Vec<u8>,
    /// Address of its memory, in its process.
    pub(crate) base: u64,
    /// Bytes of its memory.
    pub(crate) len: u64,
}

/// The state of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Progress {
    Going,
    Done,
    /// The request failed. That does not prove that it moves nothing any more: NIXL watches the
    /// last of the operations that it made, and forgets the others.
    Failed,
}

/// A request that was posted. Dropping it does not stop it.
pub(super) struct Request(XferRequest);

impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Request(..)")
    }
}

/// Why a request was not posted.
#[derive(Debug)]
pub(super) enum PostError {
    /// The request was never begun: the peer's metadata is refused.
    Refused(String),
    /// The request was never begun.
    NotBegun(String),
    /// Some of the request may have been begun.
    Begun(Request, String),
}

impl Registered {
    /// Makes an agent that has registered all of the arena.
    pub(super) fn whole(name: &str, setup: &Setup, role: Role) -> Result<Self, String> {
        let mut registered = Self::new(name, setup, role)?;
        while registered.register()? {}
        Ok(registered)
    }

    /// Makes an agent that has registered the first piece of the arena.
    pub(super) fn new(name: &str, setup: &Setup, role: Role) -> Result<Self, String> {
        let config = AgentConfig {
            enable_prog_thread: role == Role::Target,
            pthr_delay_us: PROGRESS_DELAY_US,
            thread_sync: ThreadSync::Rw,
            ..AgentConfig::default()
        };
        let fault = |what: &str| {
            let what = format!("NIXL cannot {what} (its log says more)");
            move |error: NixlError| format!("{what}: {error}")
        };
        let agent = Agent::new_configured(name, &config).map_err(fault("make an agent"))?;
        let backend = &setup.backend;
        let (_, mut parameters) = agent
            .get_plugin_params(backend)
            .map_err(fault(&format!("load its backend {backend}")))?;
        for (name, value) in &setup.parameters {
            parameters
                .set(name, value)
                .map_err(fault(&format!("set parameter {name}")))?;
        }
        let backend = agent
            .create_backend(backend, &parameters)
            .map_err(fault(&format!("start its backend {backend}")))?;
        let mut registered = Self {
            registrations: Vec::new(),
            agent,
            _backend: backend,
            regions: Vec::new(),
            arena: Arc::clone(&setup.arena),
            piece: usize::try_from(setup.piece).unwrap_or(usize::MAX),
        };
        registered.register()?;
        Ok(registered)
    }

    /// Registers the next piece. Returns whether more are left.
    pub(super) fn register(&mut self) -> Result<bool, String> {
        let offset = self.regions.len().saturating_mul(self.piece);
        let left = self.arena.len().saturating_sub(offset);
        if left == 0 {
            return Ok(false);
        }
        let region = Region {
            arena: Arc::clone(&self.arena),
            offset,
            len: left.min(self.piece),
        };
        let registration = self.agent.register_memory(&region, None);
        let fault = |error: NixlError| {
            format!(
                "NIXL cannot register the arena (its log says more; for RDMA, see `ulimit -l`): {error}"
            )
        };
        self.registrations.push(registration.map_err(fault)?);
        self.regions.push(region);
        Ok(left > self.piece)
    }

    /// Returns the metadata that a peer needs to reach this agent's memory.
    pub(super) fn metadata(&self) -> Result<Vec<u8>, String> {
        let fault = |error| format!("NIXL cannot describe its agent: {error}");
        self.agent.get_local_md().map_err(fault)
    }

    /// Makes a peer's agent known to this one. Returns the name in the metadata. An agent that is
    /// refused may stay half known: its connection is known, and none of its memory.
    pub(super) fn load(&self, metadata: &[u8]) -> Result<String, String> {
        let loaded = self.agent.load_remote_md(metadata);
        loaded.map_err(|error| format!("NIXL refuses the peer's metadata: {error}"))
    }

    /// Forgets a peer's agent. Requests under way go on.
    pub(super) fn forget(&self, agent: &str) {
        if let Err(error) = self.agent.invalidate_remote_md(agent) {
            tracing::debug!(agent, %error, "NIXL did not know the agent");
        }
    }

    /// Begins to write parts of the arena to the peer's memory. The caller has checked that they lie
    /// in both.
    pub(super) fn post(
        &self,
        remote: &Remote,
        parts: &[TransferPart],
    ) -> Result<(Request, Progress), PostError> {
        let not_begun = |error: NixlError| PostError::NotBegun(error.to_string());
        let base = self.arena.base_ptr().as_ptr() as usize;
        let mut local = XferDescList::new(MemType::Dram).map_err(not_begun)?;
        let mut far = XferDescList::new(MemType::Dram).map_err(not_begun)?;
        for part in parts {
            let len = part.len as usize;
            local.add_desc(base + part.local as usize, len, 0);
            far.add_desc((remote.base + part.remote) as usize, len, 0);
        }
        let request = self
            .agent
            .create_xfer_req(XferOp::Write, &local, &far, &remote.agent, None)
            .map_err(not_begun)?;
        match self.agent.post_xfer_req(&request, None) {
            Ok(true) => Ok((Request(request), Progress::Going)),
            Ok(false) => Ok((Request(request), Progress::Done)),
            Err(error) => Err(PostError::Begun(Request(request), error.to_string())),
        }
    }

    /// Makes progress, and returns the state of a request.
    pub(super) fn poll(&self, request: &Request) -> Progress {
        match self.agent.get_xfer_status(&request.0) {
            Ok(XferStatus::Success) => Progress::Done,
            Ok(XferStatus::InProgress) => Progress::Going,
            Err(_) => Progress::Failed,
        }
    }

    /// Makes progress without a request, and discards notifications of peers, which would pile up
    /// otherwise.
    pub(super) fn tend(&self) {
        let taken = NotificationMap::new()
            .and_then(|mut said| self.agent.get_notifications(&mut said, None));
        if let Err(error) = taken {
            tracing::debug!(%error, "NIXL cannot return notifications");
        }
    }
}
