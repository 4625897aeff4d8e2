//! Runs commands one after the other, shows them, counts what they checked.

use std::io::{BufRead, BufReader, PipeReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use crate::output::{Counts, Reader};

/// Report of nextest's profile `xtask` (.config/nextest.toml).
const JUNIT: &str = "target/nextest/xtask/junit.xml";
/// A step that says nothing for this long is said to be at work.
const SILENCE: Duration = Duration::from_secs(60);

/// A command with a name.
pub(crate) struct Step {
    pub(crate) name: &'static str,
    line: &'static str,
    variables: Vec<(&'static str, &'static str)>,
}

impl Step {
    /// A command as it would be typed; its words hold no spaces.
    pub(crate) fn new(name: &'static str, line: &'static str) -> Self {
        Self {
            name,
            line,
            variables: Vec::new(),
        }
    }

    /// Adds a variable to the command's environment.
    pub(crate) fn with(mut self, variable: &'static str, value: &'static str) -> Self {
        self.variables.push((variable, value));
        self
    }

    /// The command line, ready to be pasted into a shell.
    pub(crate) fn typed(&self) -> String {
        let mut typed = String::new();
        for (variable, value) in &self.variables {
            typed.push_str(&format!("{variable}={value} "));
        }
        typed + self.line
    }

    fn command(&self) -> Command {
        let mut words = self.line.split_whitespace();
        let mut command = Command::new(words.next().expect("a step has a command"));
        command.args(words).envs(self.variables.iter().copied());
        command
    }
}

/// Result of a step.
struct Done {
    step: Step,
    took: Duration,
    ok: bool,
    counts: Counts,
    found: Reader,
}

/// Steps of one run.
#[derive(Default)]
pub(crate) struct Steps {
    done: Vec<Done>,
    notes: Vec<String>,
}

impl Steps {
    /// Adds a line under the table at the end.
    pub(crate) fn note(&mut self, note: &str) {
        self.notes.push(note.to_owned());
    }

    /// Counts a step that cannot run on this machine, and why.
    pub(crate) fn skip(&mut self, step: Step, why: &str) {
        println!("\nSKIPPED {}: {why}", step.name);
        let mut found = Reader::default();
        found.line(&format!("SKIPPED {}: {why}", step.name));
        let counts = Counts {
            skipped: 1,
            ..Counts::default()
        };
        self.done.push(Done {
            step,
            took: Duration::ZERO,
            ok: true,
            counts,
            found,
        });
    }

    /// Runs a step, shows its output as it comes, and remembers what it found.
    pub(crate) fn run(&mut self, step: Step, index: usize, count: usize) {
        let name = step.name;
        println!("\n==> {index} of {count}, {name}: {}", step.typed());
        // A report of an earlier run must not speak for this one.
        let _ = std::fs::remove_file(JUNIT);
        let started = Instant::now();
        let mut found = Reader::default();
        let ok = match watch(step.command(), &mut found) {
            Ok(ok) => ok,
            Err(error) => {
                println!("cannot run it: {error}");
                false
            }
        };
        if let Ok(report) = std::fs::read_to_string(JUNIT) {
            found.junit(&report);
        }
        // A step that counts nothing (a linter) is one check; one that ends badly has failed.
        let mut counts = found.counts();
        if ok && counts == Counts::default() {
            counts.passed = 1;
        }
        if !ok && counts.failed == 0 {
            counts.failed = 1;
        }
        let took = started.elapsed();
        let verdict = if ok { "ok" } else { "FAILED" };
        println!("==> {name}: {verdict} in {:.1} s", took.as_secs_f64());
        self.done.push(Done {
            step,
            took,
            ok,
            counts,
            found,
        });
    }

    /// Prints the table and the closing line. Whether all is well.
    pub(crate) fn finish(self) -> bool {
        println!(
            "\n{:<14} {:>8} {:>8} {:>8} {:>8}",
            "step", "seconds", "passed", "failed", "skipped"
        );
        let mut all = Counts::default();
        let mut took = Duration::ZERO;
        for done in &self.done {
            row(done.step.name, done.took, done.counts);
            all.add(done.counts);
            took += done.took;
        }
        row("all", took, all);
        println!();
        for skipped in self.done.iter().flat_map(|done| &done.found.skipped) {
            println!("skipped {}: {}", skipped.test, skipped.reason);
        }
        let notes = self.done.iter().flat_map(|done| &done.found.notes);
        for note in self.notes.iter().chain(notes) {
            println!("note: {note}");
        }
        for done in self.done.iter().filter(|done| !done.ok) {
            println!(
                "FAILED {}; run it again with: {}",
                done.step.name,
                done.step.typed()
            );
        }
        println!(
            "{} passed, {} failed, {} skipped",
            all.passed, all.failed, all.skipped
        );
        self.done.iter().all(|done| done.ok)
    }
}

fn row(name: &str, took: Duration, counts: Counts) {
    println!(
        "{name:<14} {:>8.1} {:>8} {:>8} {:>8}",
        took.as_secs_f64(),
        counts.passed,
        counts.failed,
        counts.skipped
    );
}

/// Runs a command and reads what it prints. Whether it ended well.
fn watch(mut command: Command, found: &mut Reader) -> std::io::Result<bool> {
    // Tests and tools print to both; one pipe keeps the order in which lines come.
    let (reader, writer) = std::io::pipe()?;
    command
        .stdin(Stdio::null())
        .stdout(writer.try_clone()?)
        .stderr(writer);
    let started = Instant::now();
    let mut child = command.spawn()?;
    // It holds the other ends of the pipe, which must close for the reading to end.
    drop(command);
    let lines = lines(reader);
    let mut last = Instant::now();
    loop {
        match lines.recv_timeout(Duration::from_secs(1)) {
            Ok(line) => {
                let text = String::from_utf8_lossy(&line);
                print!("{text}");
                found.line(&text);
                last = Instant::now();
            }
            Err(RecvTimeoutError::Disconnected) => return Ok(child.wait()?.success()),
            // A grandchild that outlives the command may hold the pipe for ever.
            Err(RecvTimeoutError::Timeout) => {
                if let Some(status) = ended(&mut child)? {
                    return Ok(status);
                }
                if last.elapsed() > SILENCE {
                    println!("    … at work for {} s", started.elapsed().as_secs());
                    last = Instant::now();
                }
            }
        }
    }
}

fn ended(child: &mut Child) -> std::io::Result<Option<bool>> {
    Ok(child.try_wait()?.map(|status| status.success()))
}

/// Reads lines on a thread of its own, so that waiting for them can have a deadline.
fn lines(reader: PipeReader) -> Receiver<Vec<u8>> {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        let mut reader = BufReader::new(reader);
        let mut line = Vec::new();
        while reader.read_until(b'\n', &mut line).is_ok_and(|n| n > 0) {
            if sender.send(std::mem::take(&mut line)).is_err() {
                break;
            }
        }
    });
    receiver
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> (bool, Reader) {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        let mut found = Reader::default();
        let ok = watch(command, &mut found).expect("sh can be run");
        (ok, found)
    }

    #[test]
    fn both_streams_of_a_command_are_counted() {
        let (ok, found) = shell("echo 3 passed, 1 failed; echo 2 passed, 0 failed >&2; exit 1");
        assert!(!ok);
        assert_eq!((found.counts().passed, found.counts().failed), (5, 1));
    }

    #[test]
    fn a_process_left_behind_does_not_hold_up_the_run() {
        let started = Instant::now();
        let (ok, found) = shell("sleep 60 & echo 1 passed, 0 failed; exit 0");
        assert!(ok && started.elapsed() < Duration::from_secs(30));
        assert_eq!(found.counts().passed, 1);
    }

    #[test]
    fn a_step_is_shown_as_it_would_be_typed() {
        let step = Step::new("docs", "cargo doc --no-deps").with("RUSTDOCFLAGS", "-Dwarnings");
        assert_eq!(step.typed(), "RUSTDOCFLAGS=-Dwarnings cargo doc --no-deps");
    }
}
