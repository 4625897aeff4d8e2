//! The engine for hosts where io_uring is forbidden: threads that read and write.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::os::unix::fs::FileExt;
use std::slice;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rustix::io::{ReadWriteFlags, pwritev2};

use super::engine::{Engine, STOP_TIMEOUT, ThreadGroup, end_on_new_thread};
use super::task::{Later, Task, TaskStep, stopped};
use super::{FileId, Kind, abandoned_error};

/// Threads named `lmc-disk-{i}` on one queue.
#[derive(Debug)]
pub(super) struct Threads {
    shared: Arc<SharedTasks>,
    threads: ThreadGroup,
    count: usize,
}

#[derive(Debug)]
struct SharedTasks {
    queue: Mutex<TaskQueue>,
    more: Condvar,
}

#[derive(Debug)]
struct TaskQueue {
    ready: VecDeque<Task>,
    later: Later<Task>,
    stopping: bool,
}

/// Next action of a thread.
enum ThreadAction {
    Run(Task),
    /// End a task, because the engine stops.
    Refuse(Task),
    Leave,
}

impl Threads {
    pub(super) fn start(count: usize) -> io::Result<Self> {
        let count = count.max(1);
        let this = Self {
            shared: Arc::new(SharedTasks {
                queue: Mutex::new(TaskQueue {
                    ready: VecDeque::new(),
                    later: Later::new(),
                    stopping: false,
                }),
                more: Condvar::new(),
            }),
            threads: ThreadGroup::default(),
            count,
        };
        for i in 0..count {
            let shared = Arc::clone(&this.shared);
            this.threads
                .spawn(format!("lmc-disk-{i}"), move || shared.run())?;
        }
        Ok(this)
    }
}

impl SharedTasks {
    fn run(&self) {
        loop {
            match self.next() {
                ThreadAction::Run(task) => self.work(task),
                ThreadAction::Refuse(task) => task.end(Err(stopped())),
                ThreadAction::Leave => return,
            }
        }
    }

    fn next(&self) -> ThreadAction {
        let mut queue = self.queue.lock();
        loop {
            let TaskQueue {
                ready,
                later,
                stopping,
            } = &mut *queue;
            if *stopping {
                ready.extend(later.take_all());
                return ready
                    .pop_front()
                    .map_or(ThreadAction::Leave, ThreadAction::Refuse);
            }
            ready.extend(later.take_due(Instant::now()));
            if let Some(task) = ready.pop_front() {
                return ThreadAction::Run(task);
            }
            match later.next() {
                Some(due) => drop(self.more.wait_until(&mut queue, due)),
                None => self.more.wait(&mut queue),
            }
        }
    }

    fn work(&self, task: Task) {
        if task.is_abandoned() {
            return task.end(Err(abandoned_error()));
        }
        let task = task.unless_refused();
        if let Some((task, pause)) = task.and_then(until_pause) {
            self.queue.lock().later.push(Instant::now() + pause, task);
            // Other threads must not wait longer than that.
            self.more.notify_one();
        }
    }
}

/// Runs a task on this thread.
pub(super) fn carry_out(task: Task) {
    let mut next = task.unless_refused();
    while let Some((task, pause)) = next.and_then(until_pause) {
        thread::sleep(pause);
        next = Some(task);
    }
}

/// Works on a task until it has ended. A task that is to be continued later is returned, with the pause until
/// then.
fn until_pause(mut task: Task) -> Option<(Task, Duration)> {
    loop {
        let answer = call(&mut task);
        match task.step(answer) {
            TaskStep::End(result) => {
                task.end(result);
                return None;
            }
            TaskStep::Again => {}
            TaskStep::Later(pause) => return Some((task, pause)),
        }
    }
}

/// Makes one system call for the rest of the task.
fn call(task: &mut Task) -> io::Result<u64> {
    let (kind, offset, left) = (task.kind(), task.offset(), task.left() as usize);
    if kind == Kind::Sync {
        return task.file().file.sync_data().map(|()| 0);
    }
    let at = task.memory();
    let file = &task.file().file;
    let moved = match kind {
        // SAFETY: `memory` is good for `left` bytes while the task lives, which is borrowed here;
        // a read has a buffer that nothing else touches.
        Kind::Read => file.read_at(unsafe { slice::from_raw_parts_mut(at, left) }, offset)?,
        _ => {
            // SAFETY: as above; a write's memory is only read.
            let bytes = unsafe { slice::from_raw_parts(at, left) };
            match kind {
                Kind::WriteDurably => {
                    pwritev2(file, &[IoSlice::new(bytes)], offset, ReadWriteFlags::DSYNC)?
                }
                _ => file.write_at(bytes, offset)?,
            }
        }
    };
    Ok(moved as u64)
}

impl Engine for Threads {
    fn submit(&self, tasks: Vec<Task>) {
        let several = tasks.len() > 1;
        let mut queue = self.shared.queue.lock();
        if queue.stopping {
            drop(queue);
            return end_on_new_thread(tasks);
        }
        queue.ready.extend(tasks);
        drop(queue);
        if several {
            self.shared.more.notify_all();
        } else {
            self.shared.more.notify_one();
        }
    }

    fn forget(&self, _file: FileId) {}

    fn name(&self) -> String {
        format!("{} threads", self.count)
    }

    fn details(&self) -> String {
        String::new()
    }

    fn stop(&self) {
        self.shared.queue.lock().stopping = true;
        self.shared.more.notify_all();
        if !self.threads.wait(STOP_TIMEOUT) {
            tracing::warn!("disk I/O threads are still busy; they end when their operations do");
        }
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.stop();
    }
}
