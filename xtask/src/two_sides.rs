//! Runs `crates/lmc-transfer/examples/two_sides`: a server and a driver, each where it shall run.

use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::outcomes::Wrong;
use crate::shown;

/// Time in which a server must be up.
const STARTING: Duration = Duration::from_secs(30);
/// Least time in which a run can do something.
const LEAST: Duration = Duration::from_secs(5);
/// Time beyond the program's own limit, after which it is killed.
const GRACE: Duration = Duration::from_secs(15);

/// Makes an empty folder for logs: what an earlier run said proves nothing for this one.
pub(crate) fn fresh(logs: &Path) -> Result<()> {
    let _ = std::fs::remove_dir_all(logs);
    std::fs::create_dir_all(logs).with_context(|| logs.display().to_string())
}

/// Returns the time that a run has: `limit`, or what is left until the whole must be done.
pub(crate) fn within(limit: Duration, until: Option<Instant>) -> Result<Duration> {
    let Some(until) = until else {
        return Ok(limit);
    };
    let left = until.saturating_duration_since(Instant::now());
    ensure!(left >= LEAST, "no time is left");
    Ok(limit.min(left))
}

/// One of the two processes.
#[derive(Default, Clone)]
pub(crate) struct End {
    /// Words before the program on the command line, such as `ip netns exec NAME`.
    pub(crate) within: Vec<String>,
    pub(crate) variables: Vec<(String, String)>,
}

/// A run of both.
pub(crate) struct TwoSides<'a> {
    pub(crate) program: &'a Path,
    /// Host that the server listens at.
    pub(crate) host: &'a str,
    pub(crate) flags: Vec<String>,
    pub(crate) server: End,
    pub(crate) driver: End,
    /// A folder of its own for what is said.
    pub(crate) logs: &'a Path,
    /// Time limit of the whole run.
    pub(crate) limit: Duration,
}

/// The report of a driver.
#[derive(Debug, Default)]
pub(crate) struct Report {
    /// Names of the checks that passed.
    pub(crate) passed: Vec<String>,
    /// Checks that failed, and why.
    pub(crate) failed: Vec<String>,
    /// True if one of them failed before its time was over.
    wrong: bool,
    pub(crate) cells: Vec<Cell>,
    done: bool,
}

/// The output of the suite's processes, one after the other.
#[derive(Debug, Default)]
pub(crate) struct Suite {
    /// Properties that held.
    pub(crate) held: usize,
    /// Lines of UCX's log.
    pub(crate) ucx: String,
    /// Processes that there must be, at least.
    pub(crate) wanted: usize,
    begun: usize,
    passed: usize,
    failed: bool,
    last: String,
}

impl Suite {
    /// Takes a line that one printed.
    pub(crate) fn line(&mut self, line: &str) {
        // `NAME: SECONDS s` when a property holds.
        let seconds = |time: &str| time.strip_suffix(" s").map(str::parse::<f64>);
        let timed = line.rsplit_once(": ").and_then(|(_, time)| seconds(time));
        self.held += usize::from(timed.is_some_and(|seconds| seconds.is_ok()));
        self.begun += usize::from(line == "running 1 test");
        self.failed |= line.starts_with("test result: FAILED");
        let passed = line.starts_with("test result: ok. 1 passed; 0 failed");
        self.passed += usize::from(passed);
        if !line.trim().is_empty() {
            line.clone_into(&mut self.last);
        }
    }

    /// Returns the failure of a property, if there is one: it counts however the run ends.
    pub(crate) fn is_right(&self) -> Result<()> {
        match self.failed {
            true => self.verdict(),
            false => Ok(()),
        }
    }

    /// Returns whether every property held.
    pub(crate) fn verdict(&self) -> Result<()> {
        if self.failed {
            bail!(Wrong("a property of the suite does not hold".to_owned()));
        }
        ensure!(
            self.held > 0 && self.passed == self.begun,
            "{} properties of the suite held, and one did not; its last line: {}",
            self.held,
            self.last
        );
        ensure!(
            self.begun >= self.wanted,
            "of {} processes of the suite only {} began; the last line: {}",
            self.wanted,
            self.begun,
            self.last
        );
        Ok(())
    }
}

/// A size and a number of objects, and how fast an operation on them was.
#[derive(Debug, Clone)]
pub(crate) struct Cell {
    pub(crate) operation: String,
    /// Bytes of one object.
    pub(crate) bytes: u64,
    /// Objects of a batch.
    pub(crate) batch: u64,
    /// Batches that were timed.
    pub(crate) rounds: u64,
    /// Median time of one batch.
    pub(crate) median_us: f64,
    pub(crate) gib_per_s: f64,
}

impl Report {
    /// Takes a line that a driver printed.
    pub(crate) fn line(&mut self, line: &str) -> Result<()> {
        let line: Value = serde_json::from_str(line).with_context(|| format!("{line:?}"))?;
        let text = |key: &str| line[key].as_str().unwrap_or_default().to_owned();
        if line["check"].is_string() {
            match line["ok"] == true {
                true => self.passed.push(text("check")),
                false => {
                    let failure = format!("{}: {}", text("check"), text("error"));
                    self.failed.push(failure);
                    self.wrong |= line["late"] != true;
                }
            }
        } else if line["sweep"].is_string() {
            let number = |key: &str| line[key].as_u64().with_context(|| format!("no {key}"));
            self.cells.push(Cell {
                operation: text("sweep"),
                bytes: number("bytes")?,
                batch: number("batch")?,
                rounds: number("rounds")?,
                median_us: line["median_us"].as_f64().context("no median_us")?,
                gib_per_s: line["gib_per_s"].as_f64().context("no gib_per_s")?,
            });
        } else if line["done"] == true {
            self.done = true;
        }
        Ok(())
    }

    /// Bytes that the sweep moved: to the server, and from it. There was a bit more than that.
    pub(crate) fn moved(&self) -> (u64, u64) {
        let of = |to_server: bool| {
            let cells = self.cells.iter();
            let cells = cells.filter(|cell| (cell.operation == "write") == to_server);
            cells
                .map(|cell| cell.bytes * cell.batch * cell.rounds)
                .sum()
        };
        (of(true), of(false))
    }

    /// Returns whether all checks were made and passed.
    ///
    /// # Errors
    /// Which did not, or that the driver did not come to its end.
    pub(crate) fn verdict(&self) -> Result<()> {
        if let Some(failure) = self.failed.first() {
            match self.wrong {
                true => bail!(Wrong(failure.clone())),
                false => bail!("{failure}"),
            }
        }
        ensure!(
            self.done,
            "the driver ended after {} checks",
            self.passed.len()
        );
        ensure!(!self.passed.is_empty(), "the driver checked nothing");
        Ok(())
    }

    /// Returns the wrong result of a check, if there is one: it counts however the run ends.
    pub(crate) fn is_right(&self) -> Result<()> {
        match self.wrong {
            true => self.verdict(),
            false => Ok(()),
        }
    }

    /// The sweep as a table: GiB/s, and µs of a batch where that is small.
    pub(crate) fn table(&self) -> String {
        let mut table = String::new();
        let mut cells = self.cells.iter().peekable();
        while let Some(first) = cells.next() {
            let _ = write!(table, "    {:>4} × {:<8}", first.batch, size(first.bytes));
            let mut cell = Some(first);
            while let Some(this) = cell {
                let _ = write!(
                    table,
                    "  {} {:>7.3} GiB/s {:>9.0} µs",
                    this.operation, this.gib_per_s, this.median_us
                );
                let same = |next: &&Cell| (next.bytes, next.batch) == (first.bytes, first.batch);
                cell = cells.next_if(same);
            }
            table.push('\n');
        }
        table
    }
}

/// `4 KiB`, `1 MiB`.
fn size(bytes: u64) -> String {
    match bytes {
        _ if bytes >= 1 << 20 => format!("{} MiB", bytes >> 20),
        _ => format!("{} KiB", bytes >> 10),
    }
}

impl TwoSides<'_> {
    /// Runs them to the end.
    pub(crate) fn run(&self) -> Result<Report> {
        let mut server = self.start("serve", &format!("{}:0", self.host), &self.server)?;
        let report = self.drive(&mut server);
        if report.is_err() {
            shown::end(&mut server.child);
        }
        report
    }

    fn drive(&self, server: &mut Running) -> Result<Report> {
        let ready = server.next(Instant::now() + STARTING)?;
        let ready = ready.context("the server ended before it was up")?;
        let ready: Value = serde_json::from_str(&ready).with_context(|| ready.clone())?;
        let address = ready["ready"].as_str().context("the server is not ready")?;
        let mut driver = self.start("drive", address, &self.driver)?;
        let mut report = Report::default();
        let heard = self.listen(&mut driver, &mut report);
        shown::end(&mut driver.child);
        // The last check aborts it; a failed one ends the connection that it lives by.
        let ended = shown::wait(&mut server.child, GRACE);
        report.is_right()?;
        heard?;
        ended.context("the server outlived its driver")?;
        Ok(report)
    }

    fn listen(&self, driver: &mut Running, report: &mut Report) -> Result<()> {
        let deadline = Instant::now() + self.limit + GRACE;
        while let Some(line) = driver.next(deadline)? {
            report.line(&line)?;
        }
        let status = shown::wait(&mut driver.child, GRACE)?;
        if report.failed.is_empty() {
            ensure!(
                status.success(),
                "the driver ended with {status}; see {}",
                self.logs.display()
            );
        }
        Ok(())
    }

    fn start(&self, verb: &str, address: &str, end: &End) -> Result<Running> {
        let mut words: Vec<&str> = end.within.iter().map(String::as_str).collect();
        let program = self.program.to_str().context("a path in UTF-8")?;
        words.extend([program, verb, address]);
        let mut command = Command::new(words[0]);
        command
            .args(&words[1..])
            .args(&self.flags)
            .args(["--limit", &self.limit.as_secs().to_string()])
            .envs(end.variables.iter().cloned());
        println!("$ {}", shown::typed(&command));
        let said = self.logs.join(format!("{verb}.stdout"));
        let errors = self.logs.join(format!("{verb}.stderr"));
        let errors = std::fs::File::create(&errors)?;
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(errors)
            .spawn()
            .with_context(|| format!("cannot run {}", words[0]))?;
        let output = child.stdout.take().context("a piped output")?;
        let copy = std::fs::File::create(&said)?;
        let lines = lines(output, copy);
        Ok(Running { child, lines })
    }
}

struct Running {
    child: Child,
    lines: Receiver<String>,
}

impl Running {
    /// The next line; none when there are no more.
    fn next(&mut self, deadline: Instant) -> Result<Option<String>> {
        let left = deadline.saturating_duration_since(Instant::now());
        match self.lines.recv_timeout(left) {
            Ok(line) => Ok(Some(line)),
            Err(RecvTimeoutError::Disconnected) => Ok(None),
            Err(RecvTimeoutError::Timeout) => bail!("it says nothing more"),
        }
    }
}

/// Reads lines on a thread of its own, so that waiting for them can have a deadline. All are
/// copied; those that hold an object of JSON are handed on.
pub(crate) fn lines(
    output: impl Read + Send + 'static,
    mut copy: impl Write + Send + 'static,
) -> Receiver<String> {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        for line in BufReader::new(output).lines().map_while(|line| line.ok()) {
            let _ = copy.write_all(format!("{line}\n").as_bytes());
            if line.starts_with('{') && sender.send(line).is_err() {
                break;
            }
        }
    });
    receiver
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(text: &str) -> Report {
        let mut report = Report::default();
        for line in text.lines() {
            report.line(line).expect("a line of a driver");
        }
        report
    }

    #[test]
    fn a_driver_that_does_not_come_to_its_end_has_failed() {
        let passed = r#"{"check":"write","ok":true,"ms":1}"#;
        let done = r#"{"done":true,"passed":1,"failed":0}"#;
        let failed = r#"{"check":"read","ok":false,"ms":1,"error":"object 0 differs"}"#;
        assert!(report(&format!("{passed}\n{done}")).verdict().is_ok());
        for text in ["", passed, done, &format!("{passed}\n{failed}\n{done}")] {
            assert!(report(text).verdict().is_err(), "{text}");
        }
        let late = failed.replace("false", "false,\"late\":true");
        for (text, wrong) in [(failed, true), (&*late, false)] {
            let error = report(text).verdict().expect_err("it failed");
            assert_eq!(error.is::<Wrong>(), wrong, "{text}");
        }
    }

    #[test]
    fn a_suite_has_passed_when_each_process_says_so() {
        let text = "running 1 test\ntest scenario ... writes_land\nwrites_land: 0.113 s\nok\n\n\
            test result: ok. 1 passed; 0 failed; 0 ignored";
        let suite = |text: &str| {
            let mut suite = Suite::default();
            text.lines().for_each(|line| suite.line(line));
            suite
        };
        let whole = suite(&format!("{text}\n{text}"));
        assert!(whole.verdict().is_ok() && whole.held == 2);
        let mut more_wanted = suite(text);
        more_wanted.wanted = 2;
        assert!(more_wanted.verdict().is_err(), "one did not begin");
        let cut_off = format!("{text}\nrunning 1 test\ntest scenario ... reads_land");
        for text in [
            "",
            &cut_off,
            "running 1 test\ntest result: ok. 1 passed; 0 failed",
        ] {
            assert!(suite(text).verdict().is_err(), "{text}");
        }
    }

    #[test]
    fn what_the_sweep_moved_is_added_up_for_each_way() {
        let cell = |operation: &str, rounds: u32| {
            format!(
                r#"{{"sweep":"{operation}","bytes":4096,"batch":2,"rounds":{rounds},"median_us":8.5,"gib_per_s":0.5}}"#
            )
        };
        let cells = [cell("write", 3), cell("read", 5), cell("send", 7)];
        let report = report(&cells.join("\n"));
        assert_eq!(report.moved(), (3 * 8192, 12 * 8192));
        assert_eq!(report.table().lines().count(), 1);
    }
}
