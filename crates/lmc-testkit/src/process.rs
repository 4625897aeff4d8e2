//! Programs that a test starts.

use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::thread;

use parking_lot::{Condvar, Mutex};

use crate::{soon, until};

/// A program that was started for a test, with what it writes to its standard error. It is killed
/// on drop; if the test is panicking then, its log is printed.
#[derive(Debug)]
pub struct Process {
    child: Child,
    log: Arc<Log>,
}

#[derive(Debug, Default)]
struct Log {
    lines: Mutex<Lines>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Lines {
    seen: Vec<String>,
    ended: bool,
}

impl Process {
    /// Starts a program.
    ///
    /// # Panics
    /// When the program cannot be started.
    pub fn spawn(command: &mut Command) -> Self {
        let (this, stderr) = Self::spawn_unread(command);
        this.log.lines.lock().ended = false;
        let lines = Arc::clone(&this.log);
        thread::spawn(move || {
            for line in BufReader::new(stderr).split(b'\n').map_while(Result::ok) {
                let line = String::from_utf8(line).expect("the log is UTF-8");
                lines.lines.lock().seen.push(line);
                lines.changed.notify_all();
            }
            lines.lines.lock().ended = true;
            lines.changed.notify_all();
        });
        this
    }

    /// Starts a program whose standard error is left to the caller: its log stays empty.
    ///
    /// # Panics
    /// When the program cannot be started.
    pub fn spawn_unread(command: &mut Command) -> (Self, ChildStderr) {
        let mut child = command
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program starts");
        let stderr = child.stderr.take().expect("it is piped");
        let log = Arc::new(Log::default());
        log.lines.lock().ended = true;
        (Self { child, log }, stderr)
    }

    /// Returns the id of the process.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Takes the program's standard input and output, which the caller's command has piped.
    ///
    /// # Panics
    /// If they were not piped, or were taken before.
    pub fn pipes(&mut self) -> (ChildStdin, ChildStdout) {
        let stdin = self.child.stdin.take().expect("standard input is piped");
        let stdout = self.child.stdout.take().expect("standard output is piped");
        (stdin, stdout)
    }

    /// Returns the log so far, by lines.
    pub fn log(&self) -> Vec<String> {
        self.log.lines.lock().seen.clone()
    }

    /// Waits for the first line of the log that contains `part`, and returns it.
    ///
    /// # Panics
    /// When the log ends without such a line, or the deadline has passed.
    #[track_caller]
    pub fn line(&self, part: &str) -> String {
        let deadline = soon();
        let mut lines = self.log.lines.lock();
        let mut looked_at = 0;
        loop {
            if let Some(line) = lines.seen[looked_at..].iter().find(|l| l.contains(part)) {
                return line.clone();
            }
            looked_at = lines.seen.len();
            let late = lines.ended
                || self
                    .log
                    .changed
                    .wait_until(&mut lines, deadline)
                    .timed_out();
            assert!(
                !late || lines.seen.len() > looked_at,
                "no line with {part:?}; the log: {:#?}",
                lines.seen
            );
        }
    }

    /// Sends a signal.
    pub fn signal(&self, signal: libc::c_int) {
        let pid = libc::pid_t::try_from(self.child.id()).expect("a pid is positive");
        // SAFETY: the process is our child and has not been waited for, so the pid is its own.
        assert_eq!(unsafe { libc::kill(pid, signal) }, 0, "signal {signal}");
    }

    /// Stops all threads of the process, until it is sent `SIGCONT`.
    ///
    /// # Panics
    /// When the threads do not stop within the deadline.
    pub fn stop(&self) {
        self.signal(libc::SIGSTOP);
        until("all threads are stopped", || {
            let threads = std::fs::read_dir(format!("/proc/{}/task", self.id()));
            let mut threads = threads.expect("a process has threads").flatten();
            // The state follows the name, which is in brackets.
            threads.all(|thread| {
                let stat = std::fs::read_to_string(thread.path().join("stat"));
                stat.is_ok_and(|stat| stat.contains(") T "))
            })
        });
    }

    /// Returns how the process ended, or `None` while it runs.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("it is our child")
    }

    /// Waits until the process has ended and its log is complete.
    ///
    /// # Panics
    /// When the process does not end within the deadline.
    #[track_caller]
    pub fn wait(&mut self) -> ExitStatus {
        let mut status = None;
        until("the process ends", || {
            status = self.ended();
            status.is_some()
        });
        // A child of the process may hold its standard error open, so this wait has a deadline too.
        let deadline = soon();
        let mut lines = self.log.lines.lock();
        while !lines.ended {
            let late = self
                .log
                .changed
                .wait_until(&mut lines, deadline)
                .timed_out();
            assert!(!late, "the log does not end: {:#?}", lines.seen);
        }
        status.expect("it has ended")
    }

    /// Kills the process and waits for its end.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
        if thread::panicking() {
            eprintln!("log of process {}:\n{}", self.id(), self.log().join("\n"));
        }
    }
}
