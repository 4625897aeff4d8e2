//! Agents that begin transfers, one after the other, and the requests that they may still have
//! under way.
//!
//! An abandoned request goes on, and a failed one may: only its success, or the end of its agent,
//! proves that it moves nothing more. Until then an [`AbandonedTransfer`] keeps it, and no new
//! request to its peer begins, so that a stuck peer has few abandoned transfers.
//!
//! When a request fails, or does not end although its peer is gone, its agent is *retired* and
//! another is made. A retired agent is destroyed once no active transfer and no abandoned request
//! to a live peer uses it. Destroying it earlier is unsafe over TCP: UCX aborts the *peer's*
//! process when it handles a request of a destroyed agent, even if that peer was only suspended.
//! Only a channel that closes does not wait.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::agent::{PostError, Progress, Registered, Remote, Request, Role, Setup};
use super::plan::{Sources, TransferPart};

/// Time for a request whose peer is gone to end by itself.
const GRACE: Duration = Duration::from_secs(1);
/// Pause before the next attempt to make an agent.
const RETRY: Duration = Duration::from_secs(1);
/// Pause before an agent is made again because metadata was refused. A peer can cause that at will,
/// and each new agent registers the whole arena.
const WORN: Duration = Duration::from_secs(60);

/// A transfer that was abandoned and may still be under way.
struct AbandonedTransfer {
    requests: Vec<Request>,
    /// Memory that the requests may still read.
    sources: Sources,
    /// Number of its connection.
    connection: u64,
    remote: Arc<Remote>,
    /// Time at which the connection was gone.
    gone: Option<Instant>,
    /// True if a request failed: then only the end of this side's agent proves anything.
    unproven: bool,
}

impl AbandonedTransfer {
    /// Returns whether the transfer may yet end by itself: its peer lives, as far as is known.
    fn may_end(&self) -> bool {
        self.gone.is_none() && !self.unproven
    }
}

struct Initiator {
    generation: u64,
    registered: Registered,
    /// Agents of peers that this agent knows, with their metadata.
    loaded: HashMap<String, Vec<u8>>,
    /// Agents of peers that this agent forgets as soon as nothing uses them.
    unwanted: HashSet<String>,
    abandoned: Vec<AbandonedTransfer>,
    /// Set for good when a peer's agent was refused and stays half known: this agent is used until
    /// there is another.
    worn: bool,
    retired: bool,
}

/// An agent's change, from the thread that makes or ends it.
pub(super) enum AgentEvent {
    /// An agent was made, or could not be.
    Made(Result<Registered, String>),
    /// An agent has ended.
    Ended { generation: u64 },
}

/// Takes changes of agents, on any thread.
pub(super) type OnAgent = Arc<dyn Fn(AgentEvent) + Send + Sync>;

/// Initiators of a channel, the newest last.
pub(super) struct Initiators {
    /// Prefix of the agents' names.
    name: String,
    setup: Setup,
    on_agent: OnAgent,
    all: Vec<Initiator>,
    /// Generation of the next initiator.
    next: u64,
    /// Time of the next attempt, or present while an initiator is being made.
    making: Option<Instant>,
    made: bool,
    /// Agents of peers that ending agents may still write to, by the generation of the ending
    /// agent.
    ending: HashMap<u64, Vec<String>>,
    closed: bool,
}

impl Initiators {
    /// Returns a set without an initiator: [`Self::made`] adds the first.
    pub(super) fn new(name: String, setup: Setup, on_agent: OnAgent) -> Self {
        Self {
            name,
            setup,
            on_agent,
            all: Vec::new(),
            next: 0,
            making: Some(Instant::now()),
            made: false,
            ending: HashMap::new(),
            closed: false,
        }
    }

    /// The name of the next agent.
    pub(super) fn next_name(&self) -> String {
        format!("{}/{}", self.name, self.next)
    }

    fn add(&mut self, registered: Registered) {
        self.all.push(Initiator {
            generation: self.next,
            registered,
            loaded: HashMap::new(),
            unwanted: HashSet::new(),
            abandoned: Vec::new(),
            worn: false,
            retired: false,
        });
        self.next += 1;
    }

    fn get(&mut self, generation: u64) -> Option<&mut Initiator> {
        self.all
            .iter_mut()
            .find(|initiator| initiator.generation == generation)
    }

    /// Returns the agent for a new transfer; `None` while one is being made.
    pub(super) fn current(&self) -> Option<u64> {
        let newest = self.all.last()?;
        (!newest.retired).then_some(newest.generation)
    }

    /// Begins a request.
    pub(super) fn post(
        &mut self,
        generation: u64,
        remote: &Remote,
        parts: &[TransferPart],
    ) -> Result<(Request, Progress), PostError> {
        let Some(initiator) = self.get(generation) else {
            return Err(PostError::NotBegun("its agent is gone".to_owned()));
        };
        initiator.load(remote).map_err(PostError::Refused)?;
        initiator.registered.post(remote, parts)
    }

    pub(super) fn poll(&mut self, generation: u64, request: &Request) -> Progress {
        match self.get(generation) {
            Some(initiator) => initiator.registered.poll(request),
            None => Progress::Failed,
        }
    }

    /// Keeps requests that may still be under way. `failed`: one of them has failed.
    pub(super) fn keep(
        &mut self,
        generation: u64,
        (connection, remote): (u64, Arc<Remote>),
        requests: Vec<Request>,
        sources: Sources,
        failed: bool,
    ) {
        let Some(initiator) = self.get(generation) else {
            // An agent ends only after its transfers, so no request is under way.
            return;
        };
        initiator.abandoned.push(AbandonedTransfer {
            requests,
            sources,
            connection,
            remote,
            gone: None,
            unproven: failed,
        });
        if failed {
            initiator.retire();
        }
    }

    /// Notes that a connection is gone; `agent` is the peer's agent if this was the last connection
    /// to it.
    pub(super) fn gone(&mut self, connection: u64, agent: Option<&str>) {
        for initiator in &mut self.all {
            if let Some(agent) = agent.filter(|agent| initiator.loaded.contains_key(*agent)) {
                initiator.unwanted.insert(agent.to_owned());
            }
            for transfer in &mut initiator.abandoned {
                if transfer.connection == connection {
                    transfer.gone.get_or_insert_with(Instant::now);
                }
            }
        }
    }

    /// Notes that the peer of this agent is connected again.
    pub(super) fn peer_back(&mut self, agent: &str) {
        for initiator in &mut self.all {
            initiator.unwanted.remove(agent);
        }
    }

    /// Polls abandoned transfers, retires and ends agents, and makes a new one if needed. `busy` has
    /// the generations that transfers use.
    pub(super) fn tend(&mut self, busy: &HashSet<u64>, now: Instant) {
        for initiator in &mut self.all {
            initiator.poll_abandoned();
            let late = |transfer: &AbandonedTransfer| {
                let gone = transfer.gone.is_some_and(|since| now >= since + GRACE);
                transfer.unproven || gone
            };
            if initiator.abandoned.iter().any(late) {
                initiator.retire();
            }
            initiator.forget_unwanted(busy.contains(&initiator.generation));
        }
        let closed = self.closed;
        let ended = |one: &mut Initiator| {
            let free = one.retired && !busy.contains(&one.generation);
            free && (closed || !one.abandoned.iter().any(AbandonedTransfer::may_end))
        };
        for initiator in self.all.extract_if(.., ended) {
            let abandoned = initiator.abandoned.iter();
            let peers = abandoned.map(|transfer| transfer.remote.agent.clone());
            self.ending.insert(initiator.generation, peers.collect());
            end(initiator, Arc::clone(&self.on_agent));
        }
        let newest = self.all.last();
        let lasts = newest.is_some_and(|newest| !newest.retired && !newest.worn);
        if !lasts && !self.closed {
            self.make(now);
        }
    }

    /// Makes progress with agents, also those without requests.
    pub(super) fn progress(&self) {
        for initiator in &self.all {
            initiator.registered.tend();
        }
    }

    fn make(&mut self, now: Instant) {
        if self.making.is_some_and(|then| !self.made || now < then) {
            return;
        }
        let worn = self.all.last().is_some_and(|newest| newest.worn);
        self.making = Some(now + if worn { WORN } else { RETRY });
        self.made = false;
        let (name, setup) = (self.next_name(), self.setup.clone());
        let on_agent = Arc::clone(&self.on_agent);
        spawn("lmc-nixl-new", move || {
            let made = Registered::whole(&name, &setup, Role::Initiator);
            on_agent(AgentEvent::Made(made));
        });
    }

    /// Adds an agent that was made.
    pub(super) fn made(&mut self, made: Result<Registered, String>) {
        self.made = true;
        match made {
            Ok(registered) => {
                for initiator in &mut self.all {
                    initiator.retired |= initiator.worn;
                }
                self.add(registered);
                if self.closed {
                    self.close();
                }
            }
            Err(fault) => tracing::warn!(fault, "cannot make another NIXL agent; trying again"),
        }
    }

    /// Notes that an agent has ended.
    pub(super) fn ended(&mut self, generation: u64) {
        self.ending.remove(&generation);
    }

    /// Retires all agents; no other is made.
    pub(super) fn close(&mut self) {
        self.closed = true;
        for initiator in &mut self.all {
            initiator.retired = true;
        }
    }

    /// Returns whether no agent is left, and none is being made.
    pub(super) fn is_over(&self) -> bool {
        self.all.is_empty() && self.ending.is_empty() && self.made
    }

    /// Returns whether an abandoned request to this agent of a peer may be under way.
    pub(super) fn may_touch(&self, agent: &str) -> bool {
        let mut abandoned = self.all.iter().flat_map(|one| &one.abandoned);
        let mut ending = self.ending.values().flatten();
        abandoned.any(|transfer| transfer.remote.agent == agent) || ending.any(|peer| peer == agent)
    }

    /// Returns whether abandoned requests must be polled.
    pub(super) fn has_abandoned(&self) -> bool {
        self.all
            .iter()
            .any(|initiator| !initiator.abandoned.is_empty() || initiator.retired)
    }
}

impl Initiator {
    fn retire(&mut self) {
        if !std::mem::replace(&mut self.retired, true) {
            tracing::info!(
                generation = self.generation,
                "a NIXL agent is replaced: a transfer did not end"
            );
        }
    }

    fn load(&mut self, remote: &Remote) -> Result<(), String> {
        match self.loaded.get(&remote.agent) {
            Some(metadata) if *metadata == remote.metadata => return Ok(()),
            // Another agent has the same name, which only a program that is not a channel of ours
            // can cause.
            Some(_) => {
                self.registered.forget(&remote.agent);
                self.loaded.remove(&remote.agent);
            }
            None => {}
        }
        let name = self.registered.load(&remote.metadata);
        let name = name.inspect_err(|_| self.worn = true)?;
        if name != remote.agent {
            // Another peer's agent may have been loaded under that name before: it is loaded again.
            self.registered.forget(&name);
            self.loaded.remove(&name);
            return Err("the peer's metadata belongs to another agent".to_owned());
        }
        let metadata = remote.metadata.clone();
        self.loaded.insert(remote.agent.clone(), metadata);
        Ok(())
    }

    fn poll_abandoned(&mut self) {
        let registered = &self.registered;
        let proven = |transfer: &mut AbandonedTransfer| {
            transfer.requests.retain(|request| {
                match registered.poll(request) {
                    Progress::Done => return false,
                    Progress::Failed => transfer.unproven = true,
                    Progress::Going => {}
                }
                true
            });
            transfer.requests.is_empty() && !transfer.unproven
        };
        self.abandoned.retain_mut(|transfer| !proven(transfer));
    }

    fn forget_unwanted(&mut self, busy: bool) {
        if busy || self.unwanted.is_empty() {
            return;
        }
        let used: HashSet<&str> = self
            .abandoned
            .iter()
            .map(|transfer| transfer.remote.agent.as_str())
            .collect();
        let free: Vec<String> = self
            .unwanted
            .iter()
            .filter(|agent| !used.contains(agent.as_str()))
            .cloned()
            .collect();
        for agent in free {
            self.registered.forget(&agent);
            self.loaded.remove(&agent);
            self.unwanted.remove(&agent);
        }
    }
}

/// Ends an agent and its requests under way, on a thread of its own: it may take a while.
fn end(initiator: Initiator, on_agent: OnAgent) {
    spawn("lmc-nixl-end", move || {
        let mut sources = Vec::new();
        for transfer in initiator.abandoned {
            drop(transfer.requests);
            sources.push(transfer.sources);
        }
        drop(initiator.registered);
        drop(sources);
        let generation = initiator.generation;
        on_agent(AgentEvent::Ended { generation });
    });
}

/// Runs a thread of this name.
pub(crate) fn spawn(name: &str, work: impl FnOnce() + Send + 'static) {
    let spawned = thread::Builder::new().name(name.to_owned()).spawn(work);
    // A thread cannot be started when memory has run out: the process cannot go on in any case.
    spawned.expect("the system can start a thread");
}
