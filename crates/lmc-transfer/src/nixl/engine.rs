//! The thread `lmc-nixl`: owns the agents and the transfers.
//!
//! It polls while a transfer is under way: it spins first, and then polls less and less often.
//! Otherwise it sleeps, after a moment in which the next call may come.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use super::agent::{Registered, Remote};
use super::initiators::{AgentEvent, Initiators, spawn};
use super::transfers::{BatchProgress, Transfer, WriteError};
use crate::blocking::yield_briefly;

/// Commands that are taken before transfers are polled again.
const COMMANDS: usize = 256;
/// The thread spins until this long after the last progress.
const SPIN: Duration = Duration::from_micros(50);
/// The thread yields until this long after the last progress.
const YIELD: Duration = Duration::from_millis(1);
/// The thread takes short naps until this long after the last progress, and longer naps then.
const NAP_AFTER: Duration = Duration::from_millis(20);
const NAP: Duration = Duration::from_micros(50);
const LONG_NAP: Duration = Duration::from_millis(1);
/// Time between polls of abandoned requests.
const ABANDONED: Duration = Duration::from_millis(2);
/// Time between polls when there is nothing to do.
const IDLE: Duration = Duration::from_millis(100);

/// Commands of the thread.
pub(super) enum Command {
    Begin(Transfer),
    /// Ends all transfers of a connection; no other begins.
    Gone(u64),
    /// An agent of the initiators was made or has ended.
    Agent(AgentEvent),
    /// The target's agent has ended.
    TargetEnded,
    /// A batch was stopped.
    Look,
    /// Ends all transfers, the agents and the thread.
    End,
}

/// Commands the thread.
#[derive(Clone)]
pub(super) struct Commands(Sender<Command>);

impl Commands {
    pub(super) fn new() -> (Self, Receiver<Command>) {
        let (sender, receiver) = mpsc::channel();
        (Self(sender), receiver)
    }

    /// Once the thread has ended, the command is dropped, and with it its reply.
    pub(super) fn give(&self, command: Command) {
        let _ = self.0.send(command);
    }
}

/// The thread and everything it owns.
pub(super) struct Engine {
    commands: Commands,
    received: Receiver<Command>,
    target: Option<Registered>,
    initiators: Initiators,
    /// Connections that were written for and have not ended.
    live: HashMap<u64, Arc<Remote>>,
    transfers: Vec<Transfer>,
    /// True once the plane is to end.
    ends: bool,
    ending_target: bool,
    last_moved: Option<Instant>,
    last_tended: Option<Instant>,
}

impl Engine {
    pub(super) fn new(
        commands: Commands,
        received: Receiver<Command>,
        target: Registered,
        initiators: Initiators,
    ) -> Self {
        Self {
            commands,
            received,
            target: Some(target),
            initiators,
            live: HashMap::new(),
            transfers: Vec::new(),
            ends: false,
            ending_target: false,
            last_moved: None,
            last_tended: None,
        }
    }

    /// Runs until the plane has ended.
    pub(super) fn run(mut self) {
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
            if self.has_ended() {
                return;
            }
            if moved {
                self.last_moved = Some(now);
            }
            self.wait(now);
        }
    }

    /// Sleeps until there may be something to do.
    fn wait(&mut self, now: Instant) {
        let still = self
            .last_moved
            .map_or(Duration::MAX, |moved| now.saturating_duration_since(moved));
        let polls = !self.transfers.is_empty();
        if polls && still < SPIN {
            std::hint::spin_loop();
            return;
        }
        // With nothing to poll, the thread waits for another thread, which may wait for this core:
        // on two cores a peer's answer took three times as long otherwise.
        let awake = if polls { YIELD } else { SPIN };
        if still < awake && yield_briefly() {
            return;
        }
        let limit = if polls && still < NAP_AFTER {
            NAP
        } else if polls {
            LONG_NAP
        } else if self.initiators.has_abandoned() || self.ends {
            ABANDONED
        } else {
            IDLE
        };
        match self.received.recv_timeout(limit) {
            Ok(command) => {
                self.take(command);
                self.last_moved = Some(Instant::now());
            }
            // This side holds a sender, so `Disconnected` cannot occur.
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {}
        }
    }

    fn take(&mut self, command: Command) {
        match command {
            Command::Begin(transfer) if self.ends => {
                transfer.end(&mut self.initiators, Some(WriteError::Closed), false);
            }
            Command::Begin(transfer) => {
                let remote = Arc::clone(&transfer.remote);
                self.initiators.peer_back(&remote.agent);
                self.live.insert(transfer.connection, remote);
                self.transfers.push(transfer);
            }
            Command::Gone(connection) => self.gone(connection),
            Command::Agent(AgentEvent::Made(made)) => self.initiators.made(made),
            Command::Agent(AgentEvent::Ended { generation }) => self.initiators.ended(generation),
            Command::TargetEnded => self.ending_target = false,
            Command::Look => {}
            Command::End => self.close(),
        }
    }

    fn gone(&mut self, connection: u64) {
        let remote = self.live.remove(&connection);
        let its = |one: &mut Transfer| one.connection == connection;
        for transfer in self.transfers.extract_if(.., its).collect::<Vec<_>>() {
            transfer.end(&mut self.initiators, Some(WriteError::Closed), false);
        }
        let agent = remote.map(|remote| remote.agent.clone());
        let another = |agent: &String| self.live.values().any(|live| live.agent == *agent);
        let agent = agent.filter(|agent| !another(agent));
        self.initiators.gone(connection, agent.as_deref());
    }

    fn close(&mut self) {
        if std::mem::replace(&mut self.ends, true) {
            return;
        }
        for transfer in std::mem::take(&mut self.transfers) {
            transfer.end(&mut self.initiators, Some(WriteError::Closed), false);
        }
        self.initiators.close();
    }

    /// Returns whether nothing is left; moves the end on.
    fn has_ended(&mut self) -> bool {
        if !self.ends || !self.initiators.is_over() {
            return false;
        }
        if let Some(target) = self.target.take() {
            self.ending_target = true;
            let commands = self.commands.clone();
            spawn("lmc-nixl-end", move || {
                drop(target);
                commands.give(Command::TargetEnded);
            });
        }
        !self.ending_target
    }

    /// Polls everything once. Returns whether something moved.
    fn advance(&mut self, now: Instant) -> bool {
        let mut moved = false;
        let mut at = 0;
        while let Some(transfer) = self.transfers.get_mut(at) {
            match transfer.step(&mut self.initiators, now) {
                BatchProgress::Same => at += 1,
                BatchProgress::Moved => {
                    moved = true;
                    at += 1;
                }
                BatchProgress::Done => {
                    moved = true;
                    let transfer = self.transfers.remove(at);
                    transfer.end(&mut self.initiators, None, false);
                }
                BatchProgress::Ended { error, broken } => {
                    moved = true;
                    let transfer = self.transfers.remove(at);
                    let agent = transfer.remote.agent.clone();
                    transfer.end(&mut self.initiators, Some(error.clone()), broken);
                    if broken {
                        // Other transfers with it end as well: start over.
                        let its = |one: &mut Transfer| one.remote.agent == agent;
                        for other in self.transfers.extract_if(.., its).collect::<Vec<_>>() {
                            other.end(&mut self.initiators, Some(error.clone()), false);
                        }
                        at = 0;
                    }
                }
            }
        }
        let busy = self.transfers.iter().filter_map(|one| one.agent);
        self.initiators.tend(&busy.collect(), now);
        if self.last_tended.is_none_or(|tended| now >= tended + IDLE) {
            self.last_tended = Some(now);
            self.initiators.progress();
            if let Some(target) = &self.target {
                target.tend();
            }
        }
        moved
    }
}
