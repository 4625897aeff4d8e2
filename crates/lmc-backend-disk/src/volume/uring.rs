//! The engine on io_uring: one ring, owned by one thread.
//!
//! Submitters put tasks into an inbox. If the thread sleeps, they signal an eventfd that the ring polls; the
//! thread sleeps in the kernel only. Tasks that the kernel is working on are in [`InFlight`] with their
//! buffers until they complete.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::mem;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use io_uring::types::{Fd, FsyncFlags, SubmitArgs, Timespec};
use io_uring::{IoUring, opcode, squeue};
use lmc_memory::Arena;
use parking_lot::Mutex;

use super::engine::{Engine, STOP_TIMEOUT, ThreadGroup, end_on_new_thread};
use super::fixed_files::FixedFiles;
use super::pool_buffers::PoolBuffers;
use super::system::Wake;
use super::task::{Later, Task, TaskStep, is_passing, stopped};
use super::{FileId, Kind, abandoned_error};

/// Marks the completion of the poll on the eventfd; the completions of tasks have the task's index.
const WAKE: u64 = u64::MAX;

/// Bounds of the depth.
const DEPTHS: (u32, u32) = (1, 4096);

/// A ring with its thread, named `lmc-disk-uring`.
#[derive(Debug)]
pub(super) struct Uring {
    shared: Arc<RingChannel>,
    threads: ThreadGroup,
    depth: u32,
}

#[derive(Debug)]
struct RingChannel {
    inbox: Mutex<Inbox>,
    wake: Wake,
    /// Result of the pool's registration, for an operator.
    pool: Mutex<String>,
}

#[derive(Debug, Default)]
struct Inbox {
    messages: VecDeque<Message>,
    /// True if the thread sleeps or is about to: then the eventfd must be signalled.
    asleep: bool,
    /// Time at which the engine began to stop.
    stopping: Option<Instant>,
}

#[derive(Debug)]
enum Message {
    Run(Task),
    Forget(FileId),
}

impl Uring {
    /// Starts a ring with at most `depth` tasks in the kernel, and tests it.
    pub(super) fn start(depth: u32, arena: Option<Arc<Arena>>) -> io::Result<Self> {
        let this = Self {
            shared: Arc::new(RingChannel {
                inbox: Mutex::new(Inbox::default()),
                wake: Wake::new()?,
                pool: Mutex::new(String::new()),
            }),
            threads: ThreadGroup::default(),
            depth: depth.clamp(DEPTHS.0, DEPTHS.1),
        };
        let shared = Arc::clone(&this.shared);
        let depth = this.depth;
        let (send, received) = mpsc::sync_channel(1);
        this.threads.spawn("lmc-disk-uring".to_owned(), move || {
            // Made on this thread, because a ring may accept submissions from its creator only.
            let ring = match open_ring(depth) {
                Ok(ring) => ring,
                Err(error) => return drop(send.send(Err(error))),
            };
            let mut ring = Ring::new(ring, shared, depth, arena);
            if send.send(Ok(())).is_err() {
                return;
            }
            if let Err(error) = ring.run() {
                tracing::error!(
                    "disk ring failed: {error}; {} operations were in flight, and their memory is quarantined",
                    ring.in_flight.count
                );
            }
        })?;
        received
            .recv()
            .map_err(|_| io::Error::other("the ring's thread ended at once"))??;
        Ok(this)
    }
}

/// Checks that this process may use io_uring, by opening a ring and completing one operation.
///
/// # Errors
/// The kernel, or a container's sandbox, refuses io_uring.
pub fn check_io_uring() -> io::Result<()> {
    open_ring(DEPTHS.0).map(drop)
}

/// Opens a ring, and checks that it answers.
fn open_ring(depth: u32) -> io::Result<IoUring> {
    // One entry more for the poll on the eventfd.
    let entries = (depth + 1).next_power_of_two();
    // Completions are then processed when this thread asks for them, without interrupting it.
    let mut ring = IoUring::builder()
        .setup_single_issuer()
        .setup_defer_taskrun()
        .setup_submit_all()
        .build(entries)
        .or_else(|_| IoUring::new(entries))?;
    if !ring.params().is_feature_ext_arg() || !ring.params().is_feature_nodrop() {
        let why = "the kernel is older than 5.11";
        return Err(io::Error::new(io::ErrorKind::Unsupported, why));
    }
    let nop = opcode::Nop::new().build();
    // SAFETY: it names no memory and no file.
    unsafe { ring.submission().push(&nop) }.expect("an empty queue has capacity");
    ring.submit_and_wait(1)?;
    let answer = ring.completion().next().map(|answer| answer.result());
    match answer {
        Some(0..) => Ok(ring),
        Some(error) => Err(io::Error::from_raw_os_error(-error)),
        None => Err(io::Error::other("the ring did not answer")),
    }
}

/// A task in flight, with its index in the ring's table of files.
#[derive(Debug)]
struct Queued {
    task: Task,
    file_index: Option<u32>,
}

/// Tasks that the kernel is working on, by their index.
///
/// However the thread ends, buffers that the kernel may still write to are never freed: tasks that are still
/// here when this is dropped are leaked.
struct InFlight {
    tasks: Vec<Option<Queued>>,
    free: Vec<u32>,
    count: usize,
}

impl InFlight {
    fn new(depth: u32) -> Self {
        Self {
            tasks: (0..depth).map(|_| None).collect(),
            free: (0..depth).rev().collect(),
            count: 0,
        }
    }

    /// Inserts a task; there must be capacity.
    fn insert(&mut self, queued: Queued) -> (u32, &mut Queued) {
        let index = self
            .free
            .pop()
            .expect("the caller checks the capacity first");
        self.count += 1;
        (index, self.tasks[index as usize].insert(queued))
    }

    fn remove(&mut self, index: u64) -> Option<Queued> {
        let queued = self.tasks.get_mut(usize::try_from(index).ok()?)?.take()?;
        self.free.push(index as u32);
        self.count -= 1;
        Some(queued)
    }

    fn has_capacity(&self) -> bool {
        !self.free.is_empty()
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        for queued in self.tasks.drain(..).flatten() {
            let why = "the drive did not answer before the stop";
            queued
                .task
                .abandon(io::Error::new(io::ErrorKind::TimedOut, why));
        }
    }
}

/// State of the thread. The ring is declared first, so that it is dropped before the memory that it uses.
struct Ring {
    ring: IoUring,
    pool: PoolBuffers,
    files: FixedFiles,
    in_flight: InFlight,
    /// Tasks for which the kernel has no capacity yet, in order.
    waiting: VecDeque<Queued>,
    later: Later<Queued>,
    wake_armed: bool,
    shared: Arc<RingChannel>,
    /// Completions taken from the ring; a field to reuse its allocation.
    answers: Vec<(u64, i32)>,
    /// Tasks whose callback has yet to run.
    ended: Vec<(Queued, io::Result<()>)>,
}

impl fmt::Debug for Ring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a ring with {} tasks in flight", self.in_flight.count)
    }
}

impl Ring {
    fn new(ring: IoUring, shared: Arc<RingChannel>, depth: u32, arena: Option<Arc<Arena>>) -> Self {
        Self {
            files: FixedFiles::new(&ring.submitter()),
            ring,
            pool: PoolBuffers::new(arena),
            in_flight: InFlight::new(depth),
            waiting: VecDeque::new(),
            later: Later::new(),
            wake_armed: false,
            shared,
            answers: Vec::new(),
            ended: Vec::new(),
        }
    }

    /// Works until the stop. An error means that the ring is unusable.
    fn run(&mut self) -> io::Result<()> {
        loop {
            let stopping = self.take_inbox();
            self.waiting.extend(self.later.take_due(Instant::now()));
            let mut until = self.later.next();
            if let Some(since) = stopping {
                self.end_all_waiting();
                if self.in_flight.count == 0 {
                    return Ok(());
                }
                let timeout_ends = since + STOP_TIMEOUT;
                if Instant::now() >= timeout_ends {
                    return Err(io::Error::from(io::ErrorKind::TimedOut));
                }
                until = Some(timeout_ends);
            }
            self.register_pool();
            self.arm_wake();
            self.fill();
            self.enter(until)?;
            self.shared.inbox.lock().asleep = false;
            self.take_answers()?;
            self.tell_ends()?;
        }
    }

    /// Empties the inbox; later submissions wake the thread.
    fn take_inbox(&mut self) -> Option<Instant> {
        let mut inbox = self.shared.inbox.lock();
        let messages = mem::take(&mut inbox.messages);
        let stopping = inbox.stopping;
        inbox.asleep = true;
        drop(inbox);
        for message in messages {
            match message {
                Message::Forget(id) => self.files.forget(id, &self.ring.submitter()),
                Message::Run(task) => {
                    let Some(task) = task.unless_refused() else {
                        continue;
                    };
                    let file_index = self.files.enter(&task, &self.ring.submitter());
                    self.waiting.push_back(Queued { task, file_index });
                }
            }
        }
        stopping
    }

    fn end_all_waiting(&mut self) {
        self.waiting.extend(self.later.take_all());
        while let Some(queued) = self.waiting.pop_front() {
            self.end(queued, Err(stopped()));
        }
    }

    fn end(&mut self, queued: Queued, result: io::Result<()>) {
        self.files.leave(queued.file_index, &self.ring.submitter());
        queued.task.end(result);
    }

    fn register_pool(&mut self) {
        if self.waiting.is_empty() {
            return;
        }
        if let Some(news) = self.pool.advance(&self.ring.submitter()) {
            tracing::debug!("io_uring of the disk tier: {news}");
            *self.shared.pool.lock() = format!(", {news}");
        }
    }

    fn arm_wake(&mut self) {
        if self.wake_armed {
            return;
        }
        let poll = opcode::PollAdd::new(Fd(self.shared.wake.fd()), libc::POLLIN as u32)
            .build()
            .user_data(WAKE);
        // SAFETY: it names no memory, and a file that outlives the ring.
        unsafe { self.ring.submission().push(&poll) }.expect("the queue has an entry for the poll");
        self.wake_armed = true;
    }

    /// Gives tasks to the kernel as far as it has capacity. A task that no caller waits for any more ends
    /// here.
    fn fill(&mut self) {
        let mut unwanted = Vec::new();
        let mut submission = self.ring.submission();
        while self.in_flight.has_capacity() {
            let Some(queued) = self.waiting.pop_front() else {
                break;
            };
            if queued.task.is_abandoned() {
                unwanted.push(queued);
                continue;
            }
            let (index, queued) = self.in_flight.insert(queued);
            let entry = entry(queued, &self.pool).user_data(u64::from(index));
            // SAFETY: the memory and the file belong to the task, which stays in `in_flight`
            // until the completion is there and is leaked if it never comes.
            unsafe { submission.push(&entry) }.expect("the queue has an entry for every task");
        }
        drop(submission);
        for queued in unwanted {
            self.end(queued, Err(abandoned_error()));
        }
    }

    /// Submits, and sleeps until there is a completion or until `until`.
    fn enter(&mut self, until: Option<Instant>) -> io::Result<()> {
        let entered = match until {
            None => self.ring.submit_and_wait(1),
            Some(until) => {
                // A little longer, so that the next item is due after the sleep.
                let pause = until.saturating_duration_since(Instant::now());
                let time = Timespec::from(pause + Duration::from_micros(1));
                let args = SubmitArgs::new().timespec(&time);
                self.ring.submitter().submit_with_args(1, &args)
            }
        };
        match entered {
            Ok(_) => Ok(()),
            Err(error) if error.raw_os_error() == Some(libc::ETIME) => Ok(()),
            Err(error) if is_passing(&error) => {
                // The kernel is short of memory or wants its completions to be taken first. Without a
                // completion no task can progress, so this pause delays nothing.
                if self.ring.completion().is_empty() {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    fn take_answers(&mut self) -> io::Result<()> {
        let mut answers = mem::take(&mut self.answers);
        answers.extend(
            self.ring
                .completion()
                .map(|answer| (answer.user_data(), answer.result())),
        );
        for (index, answer) in answers.drain(..) {
            let answer = match u64::try_from(answer) {
                Ok(bytes) => Ok(bytes),
                Err(_) => Err(io::Error::from_raw_os_error(-answer)),
            };
            if index == WAKE {
                self.woken(answer)?;
                continue;
            }
            let Some(mut queued) = self.in_flight.remove(index) else {
                return Err(io::Error::other(
                    "the kernel completed an operation that was not submitted",
                ));
            };
            match queued.task.step(answer) {
                TaskStep::End(result) => self.ended.push((queued, result)),
                TaskStep::Again => self.waiting.push_front(queued),
                TaskStep::Later(pause) => self.later.push(Instant::now() + pause, queued),
            }
        }
        self.answers = answers;
        Ok(())
    }

    /// Runs the callbacks of ended tasks. A callback may read every byte, so the kernel gets the waiting
    /// tasks first.
    fn tell_ends(&mut self) -> io::Result<()> {
        if self.ended.is_empty() {
            return Ok(());
        }
        self.fill();
        if !self.ring.submission().is_empty() {
            match self.ring.submit() {
                Err(error) if !is_passing(&error) => return Err(error),
                _ => {}
            }
        }
        let mut ended = mem::take(&mut self.ended);
        for (queued, result) in ended.drain(..) {
            self.end(queued, result);
        }
        self.ended = ended;
        Ok(())
    }

    fn woken(&mut self, answer: io::Result<u64>) -> io::Result<()> {
        self.wake_armed = false;
        self.shared.wake.clear();
        match answer {
            Err(error) if !is_passing(&error) => Err(error),
            _ => Ok(()),
        }
    }
}

/// Returns the kernel's submission entry for the rest of a task.
fn entry(queued: &mut Queued, pool: &PoolBuffers) -> squeue::Entry {
    let task = &mut queued.task;
    let (fd, flags) = match queued.file_index {
        Some(index) => (Fd(index as i32), squeue::Flags::FIXED_FILE),
        None => (Fd(task.file().file.as_raw_fd()), squeue::Flags::empty()),
    };
    let (offset, left) = (task.offset(), task.left());
    let len = left as u32;
    let entry = match task.kind() {
        Kind::Sync => opcode::Fsync::new(fd).flags(FsyncFlags::DATASYNC).build(),
        Kind::Read => {
            let at = task.memory();
            match pool.index_of(at, left) {
                Some(part) => opcode::ReadFixed::new(fd, at, len, part)
                    .offset(offset)
                    .build(),
                None => opcode::Read::new(fd, at, len).offset(offset).build(),
            }
        }
        kind @ (Kind::Write | Kind::WriteDurably) => {
            let at = task.memory();
            let how = match kind {
                Kind::WriteDurably => libc::RWF_DSYNC,
                _ => 0,
            };
            match pool.index_of(at, left) {
                Some(part) => opcode::WriteFixed::new(fd, at, len, part)
                    .offset(offset)
                    .rw_flags(how)
                    .build(),
                None => opcode::Write::new(fd, at, len)
                    .offset(offset)
                    .rw_flags(how)
                    .build(),
            }
        }
    };
    entry.flags(flags)
}

impl Drop for Ring {
    fn drop(&mut self) {
        // No new message may come, however the thread ends. Dropped tasks end as stopped.
        let mut inbox = self.shared.inbox.lock();
        inbox.stopping.get_or_insert_with(Instant::now);
        let messages = mem::take(&mut inbox.messages);
        drop(inbox);
        drop(messages);
    }
}

impl Uring {
    /// Puts messages into the inbox; returns them after the stop.
    fn send<M: Iterator<Item = Message>>(&self, messages: M) -> Result<(), M> {
        let mut inbox = self.shared.inbox.lock();
        if inbox.stopping.is_some() {
            return Err(messages);
        }
        inbox.messages.extend(messages);
        let ring = mem::take(&mut inbox.asleep);
        drop(inbox);
        if ring {
            self.shared.wake.ring();
        }
        Ok(())
    }
}

impl Engine for Uring {
    fn submit(&self, tasks: Vec<Task>) {
        let Err(back) = self.send(tasks.into_iter().map(Message::Run)) else {
            return;
        };
        let tasks = back.filter_map(|message| match message {
            Message::Run(task) => Some(task),
            Message::Forget(_) => None,
        });
        end_on_new_thread(tasks.collect());
    }

    fn forget(&self, file: FileId) {
        // After the stop, the ring's table no longer exists.
        let _ = self.send([Message::Forget(file)].into_iter());
    }

    fn name(&self) -> String {
        "io_uring".to_owned()
    }

    fn details(&self) -> String {
        format!(", depth {}{}", self.depth, self.shared.pool.lock())
    }

    fn stop(&self) {
        self.shared
            .inbox
            .lock()
            .stopping
            .get_or_insert_with(Instant::now);
        self.shared.wake.ring();
        // The thread stops waiting by itself; it gets a little more time for that.
        if !self.threads.wait(STOP_TIMEOUT + Duration::from_secs(2)) {
            tracing::warn!("disk ring is still busy; it ends when its operations do");
        }
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        self.stop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::pool;
    use crate::volume::task::OpenFile;
    use crate::volume::{AlignedBuf, BLOCK, Buf, Done, SlotPart, VolumeOp};

    #[test]
    fn memory_that_the_kernel_may_still_have_is_never_given_back() {
        let pool = pool();
        let into = pool.reserve(BLOCK).unwrap();
        let from = pool.reserve(BLOCK).unwrap().written().seal();
        let file = Arc::new(OpenFile::new(
            std::fs::File::open("/dev/null").unwrap(),
            false,
        ));
        let (send, received) = mpsc::channel();
        let mut in_flight = InFlight::new(4);
        for (kind, buf) in [
            (Kind::Read, Buf::Into(SlotPart::whole(into))),
            (Kind::Write, Buf::From(from)),
            (Kind::Read, Buf::Own(AlignedBuf::new(BLOCK))),
        ] {
            let send = send.clone();
            let done = Box::new(move |done: Done| send.send(done).unwrap());
            let buf = Some(buf);
            let op = VolumeOp {
                kind,
                file: FileId(0),
                offset: 0,
                len: BLOCK,
                buf,
                abandoned: None,
                done,
            };
            let task = Task::new(op, Some(Arc::clone(&file)))
                .unless_refused()
                .unwrap();
            in_flight.insert(Queued {
                task,
                file_index: None,
            });
        }
        let second = in_flight.remove(1).unwrap();
        assert!(in_flight.remove(1).is_none() && in_flight.remove(99).is_none());
        in_flight.insert(second);
        drop(in_flight);
        for _ in 0..3 {
            let done = received.try_recv().unwrap();
            assert!(done.buf.is_none());
            assert_eq!(done.result.unwrap_err().kind(), io::ErrorKind::TimedOut);
        }
        let usage = pool.usage();
        assert_eq!((usage.slots, usage.quarantined_slots), (2, 1));
    }
}
