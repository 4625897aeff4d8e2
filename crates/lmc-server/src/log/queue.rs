//! A bounded queue of log lines, and the thread that writes them.
//!
//! Stderr may be a pipe without a reader: a write to it then never returns. Only this queue's thread
//! may wait for it. When the queue is full, lines are dropped and counted.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use tracing::warn;

/// Bytes of lines that may wait.
const MAX_BYTES: usize = 1 << 20;

/// Lines that wait for a writer.
#[derive(Debug)]
pub(super) struct LineQueue {
    waiting: Mutex<Waiting>,
    pushed: Condvar,
    drained: Condvar,
    /// Lines that were not written.
    dropped: AtomicU64,
}

#[derive(Debug)]
struct Waiting {
    lines: VecDeque<Vec<u8>>,
    bytes: usize,
    is_writing: bool,
    /// Lines dropped since the last warning because the queue was full.
    overflowed: u64,
}

impl LineQueue {
    pub(super) const fn new() -> Self {
        Self {
            waiting: Mutex::new(Waiting {
                lines: VecDeque::new(),
                bytes: 0,
                is_writing: false,
                overflowed: 0,
            }),
            pushed: Condvar::new(),
            drained: Condvar::new(),
            dropped: AtomicU64::new(0),
        }
    }

    /// Queues a line, or counts it as dropped if the queue is full.
    pub(super) fn push(&self, line: &[u8]) {
        let mut waiting = self.waiting.lock();
        if waiting.bytes + line.len() > MAX_BYTES {
            waiting.overflowed += 1;
            drop(waiting);
            self.dropped.fetch_add(1, Ordering::Relaxed);
            return;
        }
        waiting.bytes += line.len();
        waiting.lines.push_back(line.to_owned());
        drop(waiting);
        self.pushed.notify_one();
    }

    /// Returns the number of lines that were not written: the queue was full, or the write failed.
    pub(super) fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    /// Waits until every queued line is written, at most `timeout`. Returns false at the timeout.
    pub(super) fn flush(&self, timeout: Duration) -> bool {
        let mut waiting = self.waiting.lock();
        let is_busy = |waiting: &mut Waiting| waiting.is_writing || !waiting.lines.is_empty();
        self.drained.wait_while_for(&mut waiting, is_busy, timeout);
        !is_busy(&mut waiting)
    }

    /// Writes lines forever.
    pub(super) fn write_to(&self, mut writer: impl Write) -> ! {
        loop {
            let line = self.next();
            match writer.write_all(&line).and_then(|()| writer.flush()) {
                Ok(()) => self.warn_of_overflow(),
                Err(_) => {
                    self.dropped.fetch_add(1, Ordering::Relaxed);
                }
            }
            let mut waiting = self.waiting.lock();
            waiting.bytes -= line.len();
            waiting.is_writing = false;
            if waiting.lines.is_empty() {
                drop(waiting);
                self.drained.notify_all();
            }
        }
    }

    fn next(&self) -> Vec<u8> {
        let mut waiting = self.waiting.lock();
        loop {
            if let Some(line) = waiting.lines.pop_front() {
                waiting.is_writing = true;
                return line;
            }
            self.pushed.wait(&mut waiting);
        }
    }

    /// Logs how many lines were dropped, once half of the queue is free again.
    fn warn_of_overflow(&self) {
        let lines = {
            let mut waiting = self.waiting.lock();
            if waiting.overflowed == 0 || waiting.bytes > MAX_BYTES / 2 {
                return;
            }
            std::mem::take(&mut waiting.overflowed)
        };
        warn!(
            lines,
            "log lines were dropped here: stderr was not read fast enough"
        );
    }
}

/// A writer of one event: each call of [`Write::write`] queues a whole line.
#[derive(Debug, Clone, Copy)]
pub(super) struct LineWriter(pub(super) &'static LineQueue);

impl Write for LineWriter {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.0.push(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// A writer that sends its lines to a channel, and waits while the channel is full.
    struct Slow(mpsc::SyncSender<Vec<u8>>);

    impl Write for Slow {
        fn write(&mut self, line: &[u8]) -> io::Result<usize> {
            match self.0.send(line.to_owned()) {
                Ok(()) => Ok(line.len()),
                Err(_) => Err(io::ErrorKind::BrokenPipe.into()),
            }
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn queue() -> (&'static LineQueue, mpsc::Receiver<Vec<u8>>) {
        let queue: &'static LineQueue = Box::leak(Box::new(LineQueue::new()));
        let (sender, receiver) = mpsc::sync_channel(0);
        std::thread::spawn(move || queue.write_to(Slow(sender)));
        (queue, receiver)
    }

    #[test]
    fn lines_beyond_the_bound_are_dropped_and_counted() {
        let (queue, read) = queue();
        let line = [b'x'; 1 << 10];
        let pushed = 3 * MAX_BYTES / line.len();
        for _ in 0..pushed {
            queue.push(&line);
        }
        assert!(!queue.flush(Duration::from_millis(1)), "it has no reader");
        let kept = MAX_BYTES / line.len();
        assert_eq!(queue.dropped() as usize, pushed - kept);
        for _ in 0..kept {
            let found = read.recv_timeout(lmc_testkit::DEADLINE);
            assert_eq!(found.expect("a line"), line);
        }
        assert!(queue.flush(lmc_testkit::DEADLINE), "all is read");
        assert_eq!(queue.dropped() as usize, pushed - kept);
    }

    #[test]
    fn lines_that_cannot_be_written_are_counted() {
        let (queue, read) = queue();
        drop(read);
        queue.push(b"one\n");
        queue.push(b"two\n");
        assert!(queue.flush(lmc_testkit::DEADLINE));
        assert_eq!(queue.dropped(), 2);
    }
}
