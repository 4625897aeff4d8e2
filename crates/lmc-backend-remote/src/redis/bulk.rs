//! Values on connections of their own, several at a time.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::time::Instant;

use futures_util::future::join_all;
use futures_util::stream;
use lmc_backend::Answers;
use parking_lot::Mutex;
use tokio::sync::{Semaphore, mpsc};

use super::RedisStore;
use super::wire::{Address, Answered, Wire};
use crate::format::Name;
use crate::store::{GetItem, Got, Put, PutItem, StoreError, until};

/// Requests on one connection that are not answered yet: the next one is on the way while the
/// bytes of the first arrive.
const WINDOW: usize = 2;
/// Times that a value is asked for at another server, where the first one sends us on.
const MAX_MOVES: usize = 2;

/// Connections that no request uses.
#[derive(Debug, Default)]
pub(super) struct Idle(Mutex<HashMap<Address, Vec<Wire>>>);

impl Idle {
    fn take(&self, node: &Address) -> Option<Wire> {
        self.0.lock().get_mut(node)?.pop()
    }

    fn put(&self, node: &Address, wire: Wire) {
        self.0.lock().entry(node.clone()).or_default().push(wire);
    }

    pub(super) fn clear(&self) {
        self.0.lock().clear();
    }
}

/// A value to be read or written.
pub(super) trait Job: Sized + Send + Sync {
    type Answer: Send;

    fn name(&self) -> Name;

    /// Returns the bound of connections for such jobs.
    fn permits(store: &RedisStore) -> &Semaphore;

    fn send(
        &self,
        wire: &mut Wire,
        name: &str,
        ttl_ms: Option<u64>,
    ) -> impl Future<Output = io::Result<()>> + Send;

    /// Reads the answer. Leaves the job where it is unless it returns [`Answered::Done`].
    fn receive(
        job: &mut Option<Self>,
        wire: &mut Wire,
    ) -> impl Future<Output = Result<Answered<Self::Answer>, StoreError>> + Send;

    fn failed(self, error: StoreError) -> Self::Answer;
}

impl Job for GetItem {
    type Answer = Got;

    fn name(&self) -> Name {
        Name::Value(self.key)
    }

    fn permits(store: &RedisStore) -> &Semaphore {
        &store.readers
    }

    async fn send(&self, wire: &mut Wire, name: &str, _: Option<u64>) -> io::Result<()> {
        wire.ask(name).await
    }

    async fn receive(job: &mut Option<Self>, wire: &mut Wire) -> Result<Answered<Got>, StoreError> {
        wire.value(job).await
    }

    fn failed(self, error: StoreError) -> Got {
        Got::failed(error, self.slot)
    }
}

impl Job for PutItem {
    type Answer = Result<Put, StoreError>;

    fn name(&self) -> Name {
        Name::Value(self.header.key)
    }

    fn permits(store: &RedisStore) -> &Semaphore {
        &store.writers
    }

    async fn send(&self, wire: &mut Wire, name: &str, ttl_ms: Option<u64>) -> io::Result<()> {
        wire.send(name, self, ttl_ms).await
    }

    async fn receive(
        job: &mut Option<Self>,
        wire: &mut Wire,
    ) -> Result<Answered<Self::Answer>, StoreError> {
        let len = job.as_ref().map_or(0, |job| job.header.value_len());
        Ok(match wire.sent(len).await? {
            Answered::Done(true) => Answered::Done(Ok(Put::Written)),
            Answered::Done(false) => Answered::Done(Ok(Put::Present)),
            Answered::Moved(to) => Answered::Moved(to),
            Answered::Refused(error) => Answered::Refused(error),
        })
    }

    fn failed(self, error: StoreError) -> Self::Answer {
        Err(error)
    }
}

/// The jobs of a batch for one server, each with its index in the batch.
type Queue<J> = Mutex<VecDeque<(usize, J)>>;
type Sender<J> = mpsc::UnboundedSender<(usize, <J as Job>::Answer)>;

/// The state that the connections of one batch share.
struct Batch<'a, J: Job> {
    store: &'a RedisStore,
    deadline: Instant,
    answers: Sender<J>,
    /// Jobs that a server has sent on to another.
    moved: Mutex<Vec<(Address, usize, J)>>,
}

impl RedisStore {
    /// Does the jobs of a batch; ends when the stream is dropped.
    pub(super) fn run<J: Job + 'static>(
        &self,
        jobs: Vec<J>,
        deadline: Instant,
    ) -> Answers<'_, J::Answer>
    where
        J::Answer: 'static,
    {
        let (answers, mut answered) = mpsc::unbounded_channel();
        let work = self.run_all(jobs, deadline, answers);
        let none = stream::unfold(Some(work), async |work| {
            work?.await;
            None
        });
        let answered = stream::poll_fn(move |context| answered.poll_recv(context));
        Box::pin(stream::select(none, answered))
    }

    async fn run_all<J: Job>(&self, jobs: Vec<J>, deadline: Instant, answers: Sender<J>) {
        // The receiver is gone when the caller is, and this with it.
        let answer = |index, one| drop(answers.send((index, one)));
        let link = match self.link(deadline).await {
            Ok(link) => link,
            Err(error) => {
                for (index, job) in jobs.into_iter().enumerate() {
                    answer(index, job.failed(error.again()));
                }
                return;
            }
        };
        let mut queues: HashMap<Address, VecDeque<(usize, J)>> = HashMap::new();
        for (index, job) in jobs.into_iter().enumerate() {
            match link.node(&self.key(job.name())) {
                Some(node) => queues
                    .entry(node.clone())
                    .or_default()
                    .push_back((index, job)),
                None => {
                    let error =
                        StoreError::unavailable("no node of the cluster has the key's slot");
                    answer(index, job.failed(error));
                }
            }
        }
        let batch = Batch {
            store: self,
            deadline,
            answers,
            moved: Mutex::default(),
        };
        for _ in 0..=MAX_MOVES {
            let served = queues.drain().map(|(node, jobs)| batch.serve(node, jobs));
            join_all(served).await;
            let moved = std::mem::take(&mut *batch.moved.lock());
            if moved.is_empty() {
                return;
            }
            self.lose(&link);
            for (node, index, job) in moved {
                queues.entry(node).or_default().push_back((index, job));
            }
        }
        for (index, job) in queues.into_values().flatten() {
            let error =
                StoreError::unavailable("the cluster's nodes do not agree on who has a key");
            let _ = batch.answers.send((index, job.failed(error)));
        }
    }
}

impl<J: Job> Batch<'_, J> {
    fn answer(&self, index: usize, one: J::Answer) {
        let _ = self.answers.send((index, one));
    }

    /// Does the jobs for one server, on several connections.
    async fn serve(&self, node: Address, jobs: VecDeque<(usize, J)>) {
        let connections = self.store.config.connections.min(jobs.len());
        let queue = Mutex::new(jobs);
        let work = (0..connections).map(|_| self.work(&node, &queue));
        let failures: Vec<StoreError> = join_all(work).await.into_iter().flatten().collect();
        let why = || {
            failures
                .first()
                .map_or(StoreError::Deadline, StoreError::again)
        };
        for (index, job) in queue.into_inner() {
            self.answer(index, job.failed(why()));
        }
    }

    /// Does jobs on one connection until there are none. Returns the error that ended it before.
    async fn work(&self, node: &Address, queue: &Queue<J>) -> Option<StoreError> {
        let permit = J::permits(self.store).acquire();
        let permit = tokio::time::timeout_at(self.deadline.into(), permit).await;
        let Ok(Ok(_permit)) = permit else {
            return Some(StoreError::Deadline);
        };
        if queue.lock().is_empty() {
            return None;
        }
        // The server may have closed a connection that was idle.
        if let Some(wire) = self.store.idle.take(node) {
            match self.drive(wire, node, queue).await {
                Driven::Ended => return None,
                Driven::Unused => {}
                Driven::Failed(error) => return Some(error),
            }
        }
        let login = &self.store.login;
        let wire = match Wire::connect(node, login, self.deadline).await {
            Ok(wire) => wire,
            Err(error) => return Some(error),
        };
        match self.drive(wire, node, queue).await {
            Driven::Ended => None,
            Driven::Unused => Some(StoreError::unavailable("the server closed the connection")),
            Driven::Failed(error) => Some(error),
        }
    }

    async fn drive(&self, wire: Wire, node: &Address, queue: &Queue<J>) -> Driven {
        let mut driving = Driving {
            wire,
            sent: VecDeque::new(),
            is_proven: false,
        };
        loop {
            match self.step(&mut driving, queue).await {
                Ok(true) => {}
                Ok(false) => {
                    self.store.idle.put(node, driving.wire);
                    return Driven::Ended;
                }
                Err(error) => return self.give_up(driving, queue, error),
            }
        }
    }

    /// Sends requests up to the window, and reads the next answer. Returns false if no job is left.
    async fn step(&self, driving: &mut Driving<J>, queue: &Queue<J>) -> Result<bool, StoreError> {
        let Driving {
            wire,
            sent,
            is_proven,
        } = driving;
        while sent.len() < WINDOW {
            let Some((index, job)) = queue.lock().pop_front() else {
                break;
            };
            let name = self.store.key(job.name());
            let sending = job.send(wire, &name, self.store.ttl_ms());
            let outcome = until(self.deadline, sending).await;
            sent.push_back((index, Some(job)));
            outcome?;
        }
        let Some((index, job)) = sent.front_mut() else {
            return Ok(false);
        };
        let index = *index;
        let answered = until(self.deadline, J::receive(job, wire)).await?;
        *is_proven = true;
        let job = sent.pop_front().and_then(|(_, job)| job);
        match (answered, job) {
            (Answered::Done(one), _) => self.answer(index, one),
            (Answered::Refused(error), Some(job)) => self.answer(index, job.failed(error)),
            (Answered::Moved(to), Some(job)) => self.moved.lock().push((to, index, job)),
            // A job is taken only with `Done`.
            (_, None) => {}
        }
        Ok(true)
    }

    /// Ends the use of a connection that failed: with all that was sent on it, unless the connection
    /// never worked.
    fn give_up(&self, driving: Driving<J>, queue: &Queue<J>, failure: StoreError) -> Driven {
        let jobs = driving.sent.into_iter();
        let jobs = jobs.filter_map(|(index, job)| Some((index, job?)));
        if !driving.is_proven && !matches!(failure, StoreError::Deadline) {
            let mut queue = queue.lock();
            for job in jobs.rev() {
                queue.push_front(job);
            }
            return Driven::Unused;
        }
        for (index, job) in jobs {
            self.answer(index, job.failed(failure.again()));
        }
        Driven::Failed(failure)
    }
}

/// A connection at work.
struct Driving<J> {
    wire: Wire,
    /// Jobs that were sent and are not answered, the oldest first.
    sent: VecDeque<(usize, Option<J>)>,
    /// True once the server has answered.
    is_proven: bool,
}

/// Outcome of the use of a connection.
enum Driven {
    /// No job is left.
    Ended,
    /// The connection gave no answer at all, and its jobs are in the queue again.
    Unused,
    Failed(StoreError),
}
