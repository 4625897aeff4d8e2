//! Runs commands one after the other, shows them, counts what they checked.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// What a step found.
struct Done {
    name: &'static str,
    command: String,
    took: Duration,
    ok: bool,
    counts: Counts,
}

/// Checks that a step's output speaks of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counts {
    passed: u64,
    failed: u64,
    skipped: u64,
}

impl Counts {
    fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

/// Steps of one run.
#[derive(Default)]
pub(crate) struct Steps {
    done: Vec<Done>,
}

impl Steps {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// Runs a command as it would be typed, with `set` adding to its environment.
    pub(crate) fn run(
        &mut self,
        name: &'static str,
        line: &str,
        set: impl FnOnce(&mut Command) -> &mut Command,
    ) {
        println!("\n==> {name}: {line}");
        let started = Instant::now();
        let mut words = line.split_whitespace();
        let mut command = Command::new(words.next().expect("a step has a command"));
        command
            .args(words)
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        // Tests and tools print to both; read both in the order in which they come.
        let (ok, counts) = match watch(set(&mut command)) {
            Ok(found) => found,
            Err(error) => {
                println!("cannot run it: {error}");
                (false, Counts::default())
            }
        };
        let took = started.elapsed();
        println!("==> {name}: {} in {:.1} s", verdict(ok), took.as_secs_f64());
        self.done.push(Done {
            name,
            command: line.to_owned(),
            took,
            ok,
            counts,
        });
    }

    /// Prints the table and the closing line. Whether all is well.
    pub(crate) fn finish(self) -> bool {
        println!(
            "\n{:<14} {:>8} {:>8} {:>8} {:>8}",
            "step", "seconds", "passed", "failed", "skipped"
        );
        let mut all = Counts::default();
        for step in &self.done {
            // A step that counts nothing (a linter) is one check.
            let counts = match step.counts {
                counts if counts == Counts::default() => Counts {
                    passed: u64::from(step.ok),
                    failed: u64::from(!step.ok),
                    skipped: 0,
                },
                mut counts => {
                    counts.failed += u64::from(!step.ok && counts.failed == 0);
                    counts
                }
            };
            println!(
                "{:<14} {:>8.1} {:>8} {:>8} {:>8}",
                step.name,
                step.took.as_secs_f64(),
                counts.passed,
                counts.failed,
                counts.skipped
            );
            all.add(counts);
        }
        for step in self.done.iter().filter(|step| !step.ok) {
            println!("failed: {}; run it again with: {}", step.name, step.command);
        }
        println!(
            "{} passed, {} failed, {} skipped",
            all.passed, all.failed, all.skipped
        );
        self.done.iter().all(|step| step.ok)
    }
}

fn verdict(ok: bool) -> &'static str {
    if ok { "ok" } else { "FAILED" }
}

fn watch(command: &mut Command) -> std::io::Result<(bool, Counts)> {
    let (reader, writer) = std::io::pipe()?;
    command.stdout(writer.try_clone()?).stderr(writer);
    let mut child = command.spawn()?;
    // The command holds the other ends of the pipe, which must close for the reading to end.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut counts = Counts::default();
    let mut lines = BufReader::new(reader);
    let mut line = Vec::new();
    while lines.read_until(b'\n', &mut line)? > 0 {
        let text = String::from_utf8_lossy(&line);
        print!("{text}");
        counts.add(counted(text.trim()));
        line.clear();
    }
    Ok((child.wait()?.success(), counts))
}

/// Reads the closing line of a test runner.
fn counted(line: &str) -> Counts {
    let number_before = |word: &str| -> u64 {
        let Some(at) = line.find(word) else { return 0 };
        line[..at]
            .trim_end()
            .rsplit(' ')
            .next()
            .and_then(|n| n.parse().ok())
            .unwrap_or(0)
    };
    let nextest = line.contains("tests run:");
    let cargo = line.starts_with("test result:");
    let plain = line.split(", ").all(|part| {
        part.split_once(' ').is_some_and(|(n, word)| {
            n.parse::<u64>().is_ok() && ["passed", "failed", "skipped"].contains(&word)
        })
    });
    if !(nextest || cargo || plain) {
        return Counts::default();
    }
    Counts {
        passed: number_before("passed"),
        failed: number_before("failed"),
        skipped: number_before("skipped") + number_before("ignored"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closing_lines_of_the_runners_are_understood() {
        let check = |line: &str, passed, failed, skipped| {
            assert_eq!(
                counted(line),
                Counts {
                    passed,
                    failed,
                    skipped
                },
                "{line}"
            );
        };
        check(
            "Summary [   1.797s] 56 tests run: 54 passed, 2 failed, 3 skipped",
            54,
            2,
            3,
        );
        check(
            "test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out",
            3,
            0,
            1,
        );
        check("41 passed, 2 failed", 41, 2, 0);
        check("PASS both modes: 3 passed", 0, 0, 0);
        check("", 0, 0, 0);
    }
}
