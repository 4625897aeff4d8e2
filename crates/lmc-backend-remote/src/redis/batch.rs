//! Batches of requests: each request goes to the server that has its key, on connections that one batch at a
//! time uses.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use futures_util::stream;
use lmc_backend::Answers;
use parking_lot::Mutex;
use tokio::sync::{Semaphore, mpsc};

use super::RedisStore;
use super::servers::Servers;
use super::wire::{Address, Answer, Answered, Command, Terms, Wire, refused};
use crate::store::{GetItem, Got, Put, PutItem, StoreError, until};

/// Most times that a request is redirected to another server.
const MAX_MOVES: usize = 2;

/// Time for which an idle connection is kept.
const IDLE: Duration = Duration::from_secs(30);

/// Idle connections.
#[derive(Debug, Default)]
pub(super) struct Idle(Mutex<IdleWires>);

#[derive(Debug, Default)]
struct IdleWires {
    /// Connections, each with the time of its last use, the newest last.
    wires: HashMap<Address, Vec<(Instant, Wire)>>,
    generation: Generation,
}

/// Number of times that all connections were dropped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Generation(u64);

impl Idle {
    fn generation(&self) -> Generation {
        self.0.lock().generation
    }

    fn take(&self, node: &Address, now: Instant) -> Option<Wire> {
        let mut state = self.0.lock();
        for wires in state.wires.values_mut() {
            wires.retain(|(used, _)| now.saturating_duration_since(*used) < IDLE);
        }
        let wires = state.wires.get_mut(node)?;
        wires.pop().map(|(_, wire)| wire)
    }

    /// Stores a connection, unless all connections were dropped since `generation`.
    fn put(&self, node: &Address, wire: Wire, generation: Generation, now: Instant) {
        let mut state = self.0.lock();
        if state.generation == generation {
            let wires = state.wires.entry(node.clone()).or_default();
            wires.push((now, wire));
        }
    }

    pub(super) fn clear(&self) {
        let mut state = self.0.lock();
        state.generation.0 += 1;
        state.wires.clear();
    }
}

/// Most payload bytes that are requested and not yet received on one connection with small values. Four
/// connections with this many bytes fill a link of 10 Gbit/s for 7 ms.
const MANY_SMALL: usize = 2 << 20;
/// Most such requests; this many fit into the buffers along the path.
const MANY: usize = 256;

/// A value to read or write, or a query.
pub(super) trait Job: Sized + Send + Sync {
    type Answer: Send;
    /// Most unanswered requests on one connection. Jobs with [`Job::answer_bytes`] may have more, up to
    /// [`MANY_SMALL`] bytes.
    const WINDOW: usize;

    /// Returns the payload bytes of the answer; `None` keeps the number of such jobs within the window.
    fn answer_bytes(&self) -> Option<usize> {
        None
    }

    fn key(&self, store: &RedisStore) -> String;

    /// Returns the limit of connections for such jobs, and the limit for one batch and server.
    fn permits(store: &RedisStore) -> (&Semaphore, usize);

    /// Writes the request; it may be sent later.
    fn send(
        &self,
        wire: &mut Wire,
        key: &str,
        terms: Terms,
    ) -> impl Future<Output = io::Result<()>> + Send;

    /// Reads the answer. Leaves the job in its slot unless it returns [`Answered::Done`].
    fn receive(
        job: &mut Option<Self>,
        wire: &mut Wire,
        terms: Terms,
    ) -> impl Future<Output = Result<Answered<Self::Answer>, StoreError>> + Send;

    fn failed(self, error: StoreError) -> Self::Answer;
}

impl Job for GetItem {
    type Answer = Got;
    /// The next request is sent while the bytes of the first answer arrive.
    const WINDOW: usize = 2;

    fn answer_bytes(&self) -> Option<usize> {
        Some(self.slot.len() as usize)
    }

    fn key(&self, store: &RedisStore) -> String {
        store.key(self.name.into())
    }

    fn permits(store: &RedisStore) -> (&Semaphore, usize) {
        (&store.readers, store.config.connections)
    }

    async fn send(&self, wire: &mut Wire, key: &str, terms: Terms) -> io::Result<()> {
        wire.ask_for_value(key, terms).await
    }

    async fn receive(
        job: &mut Option<Self>,
        wire: &mut Wire,
        terms: Terms,
    ) -> Result<Answered<Got>, StoreError> {
        wire.value(job, terms).await
    }

    fn failed(self, error: StoreError) -> Got {
        Got::failed(error, self.slot)
    }
}

impl Job for PutItem {
    type Answer = Result<Put, StoreError>;
    const WINDOW: usize = 2;

    fn key(&self, store: &RedisStore) -> String {
        store.key(self.name().into())
    }

    fn permits(store: &RedisStore) -> (&Semaphore, usize) {
        (&store.writers, store.config.connections)
    }

    async fn send(&self, wire: &mut Wire, key: &str, terms: Terms) -> io::Result<()> {
        wire.send_value(key, self, terms).await
    }

    async fn receive(
        job: &mut Option<Self>,
        wire: &mut Wire,
        terms: Terms,
    ) -> Result<Answered<Self::Answer>, StoreError> {
        let len = job.as_ref().map_or(0, |job| job.header.value_len());
        wire.sent(len, terms).await
    }

    fn failed(self, error: StoreError) -> Self::Answer {
        Err(error)
    }
}

/// Commands about one key, or to one server, with their joint answers.
#[derive(Debug)]
pub(super) struct Question {
    pub(super) key: String,
    pub(super) commands: Vec<Command>,
}

impl Job for Question {
    type Answer = Result<Vec<Answer>, StoreError>;
    /// This many fit into the buffers along the path, with their answers.
    const WINDOW: usize = 256;

    fn key(&self, _store: &RedisStore) -> String {
        self.key.clone()
    }

    fn permits(store: &RedisStore) -> (&Semaphore, usize) {
        (&store.askers, 1)
    }

    async fn send(&self, wire: &mut Wire, _key: &str, terms: Terms) -> io::Result<()> {
        wire.send_commands(&self.commands, terms).await
    }

    async fn receive(
        job: &mut Option<Self>,
        wire: &mut Wire,
        terms: Terms,
    ) -> Result<Answered<Self::Answer>, StoreError> {
        let commands = job.as_ref().map_or(&[][..], |job| &job.commands);
        let answered = wire.answers(commands, terms).await?;
        Ok(answered.map(Ok))
    }

    fn failed(self, error: StoreError) -> Self::Answer {
        Err(error)
    }
}

/// A job of a batch.
struct Queued<J> {
    /// Index in the batch.
    index: usize,
    job: J,
    /// True if the key's slot is being migrated to this server.
    is_asking: bool,
}

/// The jobs of a batch for one server.
type ServerQueue<J> = Mutex<VecDeque<Queued<J>>>;
type Queues<J> = HashMap<Address, VecDeque<Queued<J>>>;
type Sender<J> = mpsc::UnboundedSender<(usize, <J as Job>::Answer)>;

/// State that the connections of one batch share.
struct JobBatch<'a, J: Job> {
    store: &'a RedisStore,
    servers: Arc<Servers>,
    /// Generation of the connections when the servers were found.
    generation: Generation,
    deadline: Instant,
    answers: Sender<J>,
    /// Jobs that a server has redirected to another one.
    moved: Mutex<Vec<(Address, Queued<J>)>>,
}

impl RedisStore {
    /// Runs the jobs of a batch; ends when the stream is dropped.
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
        // If the caller is gone, the receiver is gone, and this task ends with it.
        let answer = |index, one| drop(answers.send((index, one)));
        let batch = match self.batch(deadline, answers.clone()).await {
            Ok(batch) => batch,
            Err(error) => {
                for (index, job) in jobs.into_iter().enumerate() {
                    answer(index, job.failed(error.clone()));
                }
                return;
            }
        };
        let mut queues: Queues<J> = HashMap::new();
        for (index, job) in jobs.into_iter().enumerate() {
            match batch.servers.node(&job.key(self)) {
                Some(node) => queues.entry(node.clone()).or_default().push_back(Queued {
                    index,
                    job,
                    is_asking: false,
                }),
                None => {
                    let error =
                        StoreError::unavailable("no node of the cluster has the key's slot");
                    answer(index, job.failed(error));
                }
            }
        }
        batch.run(queues).await;
    }

    /// Sends a server a query that concerns no key.
    pub(super) async fn ask_server(
        &self,
        node: &Address,
        command: Command,
        deadline: Instant,
    ) -> Result<Answer, StoreError> {
        let (answers, mut answered) = mpsc::unbounded_channel();
        let batch = self.batch(deadline, answers).await?;
        let job = Question {
            key: String::new(),
            commands: vec![command],
        };
        let queued = Queued {
            index: 0,
            job,
            is_asking: false,
        };
        let queue = VecDeque::from([queued]);
        batch.run(HashMap::from([(node.clone(), queue)])).await;
        let (_, answers) = answered.try_recv().map_err(|_| StoreError::Deadline)?;
        match answers?.pop() {
            Some(Answer::Error(text)) => Err(self.login.clean(refused(&text, 0))),
            Some(answer) => Ok(answer),
            None => Err(StoreError::unavailable("the answer is missing")),
        }
    }

    async fn batch<J: Job>(
        &self,
        deadline: Instant,
        answers: Sender<J>,
    ) -> Result<JobBatch<'_, J>, StoreError> {
        let generation = self.idle.generation();
        Ok(JobBatch {
            store: self,
            servers: self.servers(deadline).await?,
            generation,
            deadline,
            answers,
            moved: Mutex::default(),
        })
    }
}

impl<J: Job> JobBatch<'_, J> {
    async fn run(&self, mut queues: Queues<J>) {
        for _ in 0..=MAX_MOVES {
            let served = queues.drain().map(|(node, jobs)| self.serve(node, jobs));
            join_all(served).await;
            let moved = std::mem::take(&mut *self.moved.lock());
            if moved.is_empty() {
                return;
            }
            if moved.iter().any(|(_, queued)| !queued.is_asking) {
                self.store.lose(&self.servers);
            }
            for (node, queued) in moved {
                queues.entry(node).or_default().push_back(queued);
            }
        }
        for Queued { index, job, .. } in queues.into_values().flatten() {
            let error =
                StoreError::unavailable("the cluster's nodes do not agree on who has a key");
            self.answer(index, job.failed(error));
        }
    }

    fn answer(&self, index: usize, one: J::Answer) {
        let _ = self.answers.send((index, one));
    }

    /// Runs the jobs for one server, on several connections.
    async fn serve(&self, node: Address, jobs: VecDeque<Queued<J>>) {
        let (_, connections) = J::permits(self.store);
        let connections = connections.min(jobs.len());
        let queue = Mutex::new(jobs);
        let work = (0..connections).map(|_| self.work(&node, &queue));
        let mut failures = join_all(work).await.into_iter().flatten();
        let failure = failures.next().unwrap_or(StoreError::Deadline);
        for Queued { index, job, .. } in queue.into_inner() {
            self.answer(index, job.failed(failure.clone()));
        }
    }

    /// Runs jobs on one connection until none is left. Returns the error if the connection ended earlier.
    async fn work(&self, node: &Address, queue: &ServerQueue<J>) -> Option<StoreError> {
        let (permits, _) = J::permits(self.store);
        let permit = permits.acquire();
        let permit = tokio::time::timeout_at(self.deadline.into(), permit).await;
        let Ok(Ok(_permit)) = permit else {
            return Some(StoreError::Deadline);
        };
        if queue.lock().is_empty() {
            return None;
        }
        // The server may have closed an idle connection.
        if let Some(wire) = self.store.idle.take(node, Instant::now()) {
            match self.drive(wire, node, queue).await {
                Driven::Ended => return None,
                Driven::Unused => {}
                Driven::Failed(error) => return Some(error),
            }
        }
        let login = &self.store.login;
        let wire = match Wire::connect(node, login, self.deadline).await {
            Ok(wire) => wire,
            Err(error) => {
                self.store.lose(&self.servers);
                return Some(error);
            }
        };
        match self.drive(wire, node, queue).await {
            Driven::Ended => None,
            Driven::Unused => {
                self.store.lose(&self.servers);
                Some(StoreError::unavailable("the server closed the connection"))
            }
            Driven::Failed(error) => Some(error),
        }
    }

    async fn drive(&self, wire: Wire, node: &Address, queue: &ServerQueue<J>) -> Driven {
        let mut driving = Driving {
            wire,
            sent: VecDeque::new(),
            is_proven: false,
        };
        loop {
            match self.step(&mut driving, queue).await {
                Ok(true) => {}
                Ok(false) => {
                    let idle = &self.store.idle;
                    idle.put(node, driving.wire, self.generation, Instant::now());
                    return Driven::Ended;
                }
                Err(error) => return self.give_up(driving, queue, error),
            }
        }
    }

    /// Sends requests up to the window, and reads the next answer. Returns false if no job is left.
    async fn step(
        &self,
        driving: &mut Driving<J>,
        queue: &ServerQueue<J>,
    ) -> Result<bool, StoreError> {
        let Driving {
            wire,
            sent,
            is_proven,
        } = driving;
        let window = self.window(queue, sent);
        let free = match sent.len() <= window / 2 {
            true => window - sent.len(),
            false => 0,
        };
        for _ in 0..free {
            let Some(queued) = queue.lock().pop_front() else {
                break;
            };
            let Queued {
                index,
                job,
                is_asking,
            } = queued;
            let key = job.key(self.store);
            let ttl_ms = self.store.ttl_ms();
            let terms = Terms { ttl_ms, is_asking };
            let sending = job.send(wire, &key, terms);
            let outcome = until(self.deadline, sending).await;
            let job = Some(job);
            sent.push_back(Sent { index, job, terms });
            outcome?;
        }
        let Some(Sent { index, job, terms }) = sent.front_mut() else {
            return Ok(false);
        };
        until(self.deadline, wire.flush()).await?;
        let index = *index;
        let answered = until(self.deadline, J::receive(job, wire, *terms)).await?;
        *is_proven = true;
        if let Answered::Lost(error) = answered {
            self.store.lose(&self.servers);
            return Err(self.store.login.clean(error));
        }
        let job = sent.pop_front().and_then(|sent| sent.job);
        let move_on = |to, job, is_asking| {
            let queued = Queued {
                index,
                job,
                is_asking,
            };
            self.moved.lock().push((to, queued));
        };
        match (answered, job) {
            (Answered::Done(one), _) => self.answer(index, one),
            (Answered::Refused(error) | Answered::Lost(error), Some(job)) => {
                let error = self.store.login.clean(error);
                self.answer(index, job.failed(error));
            }
            (Answered::Moved(to), Some(job)) => move_on(to, job, false),
            (Answered::Ask(to), Some(job)) => move_on(to, job, true),
            // Only `Done` takes the job.
            (_, None) => {}
        }
        Ok(true)
    }

    /// Returns the most unanswered requests on this connection: for small values, its share of the queue.
    fn window(&self, queue: &ServerQueue<J>, sent: &VecDeque<Sent<J>>) -> usize {
        let queue = queue.lock();
        let Some(bytes) = queue.front().and_then(|next| next.job.answer_bytes()) else {
            return J::WINDOW;
        };
        let waits = |sent: &Sent<J>| sent.job.as_ref().and_then(Job::answer_bytes);
        let bytes = sent.iter().filter_map(waits).fold(bytes, usize::max);
        let share = sent.len() + queue.len().div_ceil(self.store.config.connections.max(1));
        share
            .min(MANY_SMALL / bytes.max(1))
            .min(MANY)
            .max(J::WINDOW)
    }

    /// Ends the use of a failed connection. Its unanswered jobs fail with it; if the connection never worked,
    /// they are queued again.
    fn give_up(&self, driving: Driving<J>, queue: &ServerQueue<J>, failure: StoreError) -> Driven {
        let jobs = driving.sent.into_iter().filter_map(|sent| {
            Some(Queued {
                index: sent.index,
                job: sent.job?,
                is_asking: sent.terms.is_asking,
            })
        });
        if !driving.is_proven && !matches!(failure, StoreError::Deadline) {
            let mut queue = queue.lock();
            for job in jobs.rev() {
                queue.push_front(job);
            }
            return Driven::Unused;
        }
        // A server that has answered may need longer than the deadline. A server that has never answered may
        // be cut off.
        if !driving.is_proven || !matches!(failure, StoreError::Deadline) {
            self.store.lose(&self.servers);
        }
        for Queued { index, job, .. } in jobs {
            self.answer(index, job.failed(failure.clone()));
        }
        Driven::Failed(failure)
    }
}

/// A connection in use.
struct Driving<J> {
    wire: Wire,
    /// Jobs that were sent and not answered yet, the oldest first.
    sent: VecDeque<Sent<J>>,
    /// True once the server has answered.
    is_proven: bool,
}

/// A job that was sent on a connection.
struct Sent<J> {
    index: usize,
    job: Option<J>,
    terms: Terms,
}

/// Outcome of using a connection.
enum Driven {
    /// No job is left.
    Ended,
    /// The connection gave no answer at all, and its jobs are queued again.
    Unused,
    Failed(StoreError),
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A server behind a firewall that forgets silent connections, and one that lost a failover,
    /// were asked on connections from before.
    #[test]
    fn idle_connections_are_kept_for_a_while_and_until_all_are_dropped() {
        let (idle, now) = (Idle::default(), Instant::now());
        let node = Address {
            host: "a".to_owned(),
            port: 1,
        };
        let put = |generation| idle.put(&node, Wire::over(tokio::io::empty()), generation, now);
        put(idle.generation());
        put(idle.generation());
        assert!(idle.take(&node, now).is_some());
        assert!(idle.take(&node, now + IDLE).is_none(), "too old");
        let before = idle.generation();
        put(before);
        idle.clear();
        assert!(idle.take(&node, now).is_none());
        put(before);
        assert!(idle.take(&node, now).is_none(), "dropped meanwhile");
        put(idle.generation());
        assert!(idle.take(&node, now).is_some());
    }
}
