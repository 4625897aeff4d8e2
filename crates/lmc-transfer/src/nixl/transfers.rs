//! One batch under way.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use thiserror::Error;

use super::agent::{PostError, Progress, Remote, Request};
use super::initiators::Initiators;
use super::plan::{Plan, Sources, TransferPart};

/// Requests of one batch that are under way at a time: when one ends, the next is already posted.
const WINDOW: usize = 4;

/// The reason why a batch ended early.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub(crate) enum WriteError {
    #[error("the peer's NIXL: {0}")]
    Failed(String),
    #[error("{0}")]
    Refused(String),
    #[error("the deadline passed")]
    Deadline,
    #[error("the reader cancelled it")]
    Stopped,
    #[error("NIXL is closing")]
    Closed,
}

/// The outcome of a batch.
#[derive(Debug)]
pub(crate) struct Report {
    pub(crate) error: Option<WriteError>,
    /// True if nothing of the batch is under way.
    pub(crate) idle: bool,
}

/// Takes the report of a batch. It must not block.
pub(crate) type OnReport = Box<dyn FnOnce(Report) + Send>;

/// Objects that are to be written to a peer.
pub(crate) struct NixlBatch {
    /// Number of the connection that it is for.
    pub(crate) connection: u64,
    pub(crate) remote: Arc<Remote>,
    /// One for each object; each was checked.
    pub(crate) parts: Vec<TransferPart>,
    pub(crate) sources: Sources,
    /// True once the peer wants no more.
    pub(crate) stopped: Arc<AtomicBool>,
    pub(crate) report: OnReport,
    pub(crate) deadline: Instant,
}

impl fmt::Debug for NixlBatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NixlBatch")
            .field("connection", &self.connection)
            .field("parts", &self.parts.len())
            .finish_non_exhaustive()
    }
}

/// A batch under way.
pub(crate) struct Transfer {
    pub(super) connection: u64,
    pub(super) remote: Arc<Remote>,
    sources: Sources,
    stopped: Arc<AtomicBool>,
    report: OnReport,
    plan: Plan,
    deadline: Instant,
    /// Generation of the agent that it goes through, from its first request on.
    pub(super) agent: Option<u64>,
    /// The request of the plan to be posted next.
    next: usize,
    posted: VecDeque<Request>,
}

/// The state of a batch after a look at it.
#[derive(Debug)]
pub(super) enum BatchProgress {
    /// Nothing changed.
    Same,
    /// Something was begun or is done.
    Moved,
    /// Every byte is in place.
    Done,
    /// The batch ends here. `broken`: NIXL's connection to the peer is broken.
    Ended { error: WriteError, broken: bool },
}

impl Transfer {
    /// `piece`: bytes of the arena that are registered by themselves.
    pub(super) fn new(batch: NixlBatch, piece: u64) -> Self {
        Self {
            connection: batch.connection,
            remote: batch.remote,
            sources: batch.sources,
            stopped: batch.stopped,
            report: batch.report,
            plan: Plan::new(batch.parts, piece),
            deadline: batch.deadline,
            agent: None,
            next: 0,
            posted: VecDeque::new(),
        }
    }

    /// Polls the requests under way, and begins one more.
    pub(super) fn step(&mut self, initiators: &mut Initiators, now: Instant) -> BatchProgress {
        let ended = |error| BatchProgress::Ended {
            error,
            broken: false,
        };
        if self.stopped.load(Ordering::Acquire) {
            return ended(WriteError::Stopped);
        }
        let mut moved = false;
        if let Some(agent) = self.agent {
            while let Some(request) = self.posted.front() {
                match initiators.poll(agent, request) {
                    Progress::Done => {
                        self.posted.pop_front();
                        moved = true;
                    }
                    Progress::Going => break,
                    Progress::Failed => return broken("NIXL reports that a request failed"),
                }
            }
        }
        if self.is_done() {
            return BatchProgress::Done;
        }
        if now >= self.deadline {
            return ended(WriteError::Deadline);
        }
        if self.posted.len() < WINDOW && self.next < self.plan.requests.len() {
            let failed = |reason: &str| ended(WriteError::Failed(reason.to_owned()));
            return match self.agent.or_else(|| initiators.current()) {
                None => failed("its agent is being replaced"),
                Some(_) if initiators.may_touch(&self.remote.agent) => {
                    failed("an earlier request is stuck")
                }
                Some(agent) => self.post(initiators, agent),
            };
        }
        if moved {
            BatchProgress::Moved
        } else {
            BatchProgress::Same
        }
    }

    fn is_done(&self) -> bool {
        self.posted.is_empty() && self.next == self.plan.requests.len()
    }

    fn post(&mut self, initiators: &mut Initiators, agent: u64) -> BatchProgress {
        self.agent = Some(agent);
        match initiators.post(agent, &self.remote, self.plan.parts(self.next)) {
            Ok((request, progress)) => {
                self.next += 1;
                if progress != Progress::Done {
                    self.posted.push_back(request);
                } else if self.is_done() {
                    return BatchProgress::Done;
                }
                BatchProgress::Moved
            }
            Err(PostError::Refused(reason)) => BatchProgress::Ended {
                error: WriteError::Refused(reason),
                broken: false,
            },
            Err(PostError::NotBegun(reason)) => BatchProgress::Ended {
                error: WriteError::Failed(reason),
                broken: false,
            },
            Err(PostError::Begun(request, reason)) => {
                self.posted.push_back(request);
                broken(&reason)
            }
        }
    }

    /// Ends the batch: reports, and hands requests that may still be under way to `initiators`.
    /// `failed`: one of them has failed.
    pub(super) fn end(self, initiators: &mut Initiators, error: Option<WriteError>, failed: bool) {
        let idle = self.posted.is_empty();
        (self.report)(Report { error, idle });
        if let (false, Some(agent)) = (idle, self.agent) {
            let of = (self.connection, self.remote);
            initiators.keep(agent, of, self.posted.into(), self.sources, failed);
        }
    }
}

fn broken(reason: &str) -> BatchProgress {
    BatchProgress::Ended {
        error: WriteError::Failed(reason.to_owned()),
        broken: true,
    }
}
