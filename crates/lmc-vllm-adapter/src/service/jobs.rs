//! Work that copies, and the named threads that do it.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

use crate::protocol::Reply;
use crate::service::ClientId;

/// Retrieves that may overtake a waiting store.
const RETRIEVES_PER_STORE: u32 = 4;

/// Threads and priority of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lane {
    /// Copies out of the pool. A request waits for them, so they go before stores.
    Retrieve,
    /// Copies into the pool.
    Store,
    /// As [`Lane::Retrieve`], into memory of a GPU. Such copies wait for work of the engine first, so
    /// they have threads of their own.
    GpuRetrieve,
    /// As [`Lane::Store`], out of memory of a GPU.
    GpuStore,
    /// Clears, which have a thread of their own: a slow tier may hold it up for seconds.
    Clear,
}

/// Work whose answer comes later.
pub(crate) struct Job {
    pub(crate) lane: Lane,
    work: Box<dyn FnOnce() -> Reply + Send>,
}

impl Job {
    pub(crate) fn new(lane: Lane, work: impl FnOnce() -> Reply + Send + 'static) -> Self {
        Self {
            lane,
            work: Box::new(work),
        }
    }

    pub(crate) fn run(self) -> Reply {
        (self.work)()
    }
}

type Work = Box<dyn FnOnce() + Send>;

/// Threads `{name}-{i}` that run jobs.
///
/// Each connection has a queue of retrieves and one of stores. Connections are served in turn, and
/// retrieves before stores, except that a waiting store goes after four retrieves. The threads end
/// when the last handle is dropped. The queues are bounded by the requests that connections may
/// have in flight.
#[derive(Debug)]
pub(crate) struct JobThreads {
    queue: Arc<JobQueue>,
}

#[derive(Default)]
struct JobQueue {
    waiting: Mutex<Waiting<Work>>,
    arrived: Condvar,
}

impl std::fmt::Debug for JobQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("JobQueue").finish_non_exhaustive()
    }
}

impl JobThreads {
    pub(crate) fn start(name: &str, threads: usize) -> io::Result<Self> {
        let this = Self {
            queue: Arc::default(),
        };
        for index in 0..threads.max(1) {
            let queue = Arc::clone(&this.queue);
            std::thread::Builder::new()
                .name(format!("{name}-{index}"))
                .spawn(move || serve(&queue))?;
        }
        Ok(this)
    }

    pub(crate) fn run(&self, client: ClientId, lane: Lane, work: Work) {
        self.queue.waiting.lock().push(client, lane, work);
        self.queue.arrived.notify_one();
    }

    /// Drops the jobs that wait for a connection that has ended.
    pub(crate) fn forget(&self, client: ClientId) {
        let dropped = self.queue.waiting.lock().forget(client);
        // The leases of the jobs are released here, where nothing is locked.
        drop(dropped);
    }
}

impl Drop for JobThreads {
    fn drop(&mut self) {
        self.queue.waiting.lock().closed = true;
        self.queue.arrived.notify_all();
    }
}

fn serve(queue: &JobQueue) {
    let mut waiting = queue.waiting.lock();
    loop {
        if let Some(work) = waiting.pop() {
            drop(waiting);
            work();
            waiting = queue.waiting.lock();
        } else if waiting.closed {
            return;
        } else {
            queue.arrived.wait(&mut waiting);
        }
    }
}

/// Work that has not begun.
struct Waiting<W> {
    retrieves: Turns<W>,
    stores: Turns<W>,
    /// Retrieves that have begun while a store waited.
    overtaken: u32,
    closed: bool,
}

impl<W> Default for Waiting<W> {
    fn default() -> Self {
        Self {
            retrieves: Turns::default(),
            stores: Turns::default(),
            overtaken: 0,
            closed: false,
        }
    }
}

impl<W> Waiting<W> {
    fn push(&mut self, client: ClientId, lane: Lane, work: W) {
        match lane {
            Lane::Retrieve | Lane::GpuRetrieve => self.retrieves.push(client, work),
            Lane::Store | Lane::GpuStore | Lane::Clear => self.stores.push(client, work),
        }
    }

    fn pop(&mut self) -> Option<W> {
        let store_waits = !self.stores.order.is_empty();
        if store_waits && self.overtaken >= RETRIEVES_PER_STORE {
            self.overtaken = 0;
            return self.stores.pop();
        }
        if let Some(work) = self.retrieves.pop() {
            self.overtaken += u32::from(store_waits);
            return Some(work);
        }
        self.overtaken = 0;
        self.stores.pop()
    }

    fn forget(&mut self, client: ClientId) -> [VecDeque<W>; 2] {
        [&mut self.retrieves, &mut self.stores].map(|turns| turns.forget(client))
    }
}

/// A queue for each connection. Connections take turns.
struct Turns<W> {
    of: HashMap<ClientId, VecDeque<W>>,
    /// Connections whose queue is not empty, the next one first.
    order: VecDeque<ClientId>,
}

impl<W> Default for Turns<W> {
    fn default() -> Self {
        Self {
            of: HashMap::new(),
            order: VecDeque::new(),
        }
    }
}

impl<W> Turns<W> {
    fn push(&mut self, client: ClientId, work: W) {
        let queue = self.of.entry(client).or_default();
        if queue.is_empty() {
            self.order.push_back(client);
        }
        queue.push_back(work);
    }

    fn pop(&mut self) -> Option<W> {
        let client = self.order.pop_front()?;
        let queue = self.of.get_mut(&client)?;
        let work = queue.pop_front();
        if queue.is_empty() {
            self.of.remove(&client);
        } else {
            self.order.push_back(client);
        }
        work
    }

    fn forget(&mut self, client: ClientId) -> VecDeque<W> {
        self.order.retain(|&other| other != client);
        self.of.remove(&client).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs the queue dry: `(connection, number)` of each job.
    fn drain(waiting: &mut Waiting<(u64, u32)>) -> Vec<(u64, u32)> {
        std::iter::from_fn(|| waiting.pop()).collect()
    }

    fn push(waiting: &mut Waiting<(u64, u32)>, client: u64, lane: Lane, numbers: &[u32]) {
        for &number in numbers {
            waiting.push(ClientId::new(client), lane, (client, number));
        }
    }

    #[test]
    fn connections_take_turns_however_much_one_has_queued() {
        let mut waiting = Waiting::default();
        push(&mut waiting, 1, Lane::Store, &[1, 2, 3, 4]);
        push(&mut waiting, 2, Lane::Store, &[1, 2]);
        push(&mut waiting, 3, Lane::Store, &[1]);
        let order = [(1, 1), (2, 1), (3, 1), (1, 2), (2, 2), (1, 3), (1, 4)];
        assert_eq!(drain(&mut waiting), order);
    }

    #[test]
    fn retrieves_go_before_stores_and_do_not_starve_them() {
        let mut waiting = Waiting::default();
        push(&mut waiting, 1, Lane::Store, &[1, 2, 3]);
        push(&mut waiting, 2, Lane::Retrieve, &[11, 12, 13, 14, 15, 16]);
        let numbers: Vec<u32> = drain(&mut waiting).iter().map(|job| job.1).collect();
        assert_eq!(numbers, [11, 12, 13, 14, 1, 15, 16, 2, 3]);
    }

    #[test]
    fn what_waits_for_a_connection_goes_with_it() {
        let mut waiting = Waiting::default();
        push(&mut waiting, 1, Lane::Store, &[1, 2]);
        push(&mut waiting, 1, Lane::Retrieve, &[3]);
        push(&mut waiting, 2, Lane::Store, &[4]);
        let dropped = waiting.forget(ClientId::new(1));
        assert_eq!(dropped.iter().map(VecDeque::len).sum::<usize>(), 3);
        assert_eq!(drain(&mut waiting), [(2, 4)]);
    }
}
