//! Runs commands one after the other, shows them, counts what they checked.

use std::io::{BufRead, BufReader, PipeReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use crate::output::{Counts, Reader, Skipped};
use crate::test::succeeds;

/// Report of nextest's profile `xtask` (.config/nextest.toml).
const JUNIT: &str = "target/nextest/xtask/junit.xml";
/// A step that says nothing for this long is said to be at work.
const SILENCE: Duration = Duration::from_secs(60);

/// Steps of a run.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct StepArgs {
    /// Steps to run; all of them unless some are named
    #[arg(value_name = "STEP")]
    steps: Vec<String>,
    /// List the steps and their commands, without running them
    #[arg(long)]
    list: bool,
}

impl StepArgs {
    /// Returns true if no step is named.
    pub(crate) fn is_all(&self) -> bool {
        self.steps.is_empty()
    }

    /// Returns true if nothing shall be run.
    pub(crate) fn lists(&self) -> bool {
        self.list
    }

    /// Returns those that are asked for.
    ///
    /// # Errors
    /// There is no step of a name.
    pub(crate) fn choose(&self, mut steps: Vec<CommandStep>) -> Result<Vec<CommandStep>> {
        let unknown = |wanted: &&String| !steps.iter().any(|step| step.name == **wanted);
        if let Some(unknown) = self.steps.iter().find(unknown) {
            let names: Vec<&str> = steps.iter().map(|step| step.name).collect();
            bail!(
                "unknown step {unknown:?}, expected one of {}",
                names.join(", ")
            );
        }
        if !self.is_all() {
            steps.retain(|step| self.steps.iter().any(|wanted| wanted == step.name));
        }
        Ok(steps)
    }
}

/// A command with a name.
pub(crate) struct CommandStep {
    pub(crate) name: &'static str,
    line: String,
    variables: Vec<(&'static str, &'static str)>,
    budget: Option<Duration>,
    /// A command of cargo that a machine may lack, and the line that installs it.
    needs: Option<(&'static str, &'static str)>,
}

impl CommandStep {
    /// A command as it would be typed; its words hold no spaces.
    pub(crate) fn new(name: &'static str, line: impl Into<String>) -> Self {
        Self {
            name,
            line: words(&line.into()),
            variables: Vec::new(),
            budget: None,
            needs: None,
        }
    }

    /// Adds a variable to the command's environment.
    pub(crate) fn with(mut self, variable: &'static str, value: &'static str) -> Self {
        self.variables.push((variable, value));
        self
    }

    /// Sets the seconds that it may take, beyond which a warning is printed.
    pub(crate) fn within(mut self, seconds: u64) -> Self {
        self.budget = Some(Duration::from_secs(seconds));
        self
    }

    /// Names a command of cargo without which it is skipped, and the line that installs it.
    pub(crate) fn needs(mut self, command: &'static str, install: &'static str) -> Self {
        self.needs = Some((command, install));
        self
    }

    /// Returns the reason why it cannot run.
    fn lacks(&self) -> Option<String> {
        let (command, install) = self.needs?;
        let there = succeeds("cargo", &[command, "--version"]);
        (!there).then(|| format!("no `cargo {command}`: `{install}`, then try again"))
    }

    /// The command line, ready to be pasted into a shell.
    pub(crate) fn typed(&self) -> String {
        let mut typed = String::new();
        for (variable, value) in &self.variables {
            typed.push_str(&format!("{variable}={value} "));
        }
        typed + &self.line
    }

    /// Adds filters: the test runner runs the tests whose names contain one of them.
    pub(crate) fn only(mut self, names: &[String]) -> Self {
        for name in names {
            self.line.push(' ');
            self.line.push_str(name);
        }
        self
    }

    /// Returns the time that it may take; none is zero.
    #[cfg(test)]
    pub(crate) fn budget(&self) -> Duration {
        self.budget.unwrap_or_default()
    }

    fn command(&self) -> Command {
        let mut words = self.line.split_whitespace();
        let mut command = Command::new(words.next().expect("a step has a command"));
        command.args(words).envs(self.variables.iter().copied());
        command
    }
}

/// Returns the words of a command line with one space between them.
fn words(line: &str) -> String {
    line.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Prints steps and their commands.
pub(crate) fn list(steps: &[CommandStep]) {
    for step in steps {
        println!("{:<14} {}", step.name, step.typed());
    }
}

/// Result of a step.
pub(crate) struct Done {
    pub(crate) step: CommandStep,
    pub(crate) took: Duration,
    pub(crate) ok: bool,
    pub(crate) counts: Counts,
    pub(crate) skipped: Vec<Skipped>,
    /// Names of what failed, as far as the output tells.
    pub(crate) failed: Vec<String>,
    /// Names of what failed, and passed when the step was run once more.
    pub(crate) unstable: Vec<String>,
    /// Tests that took long, and their seconds.
    pub(crate) slow: Vec<(String, f64)>,
    notes: Vec<String>,
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

    /// Returns the steps so far.
    pub(crate) fn done(&self) -> &[Done] {
        &self.done
    }

    /// Returns the sum of the counts.
    pub(crate) fn counts(&self) -> Counts {
        let mut all = Counts::default();
        self.done.iter().for_each(|done| all.add(done.counts));
        all
    }

    /// Runs steps one after the other. With `again`, a step that fails is run once more: what passes
    /// then is unstable, and the step has failed all the same.
    pub(crate) fn run_all(&mut self, steps: Vec<CommandStep>, again: bool) {
        let count = steps.len();
        for (index, step) in steps.into_iter().enumerate() {
            match step.lacks() {
                Some(why) => self.skip(step, &why),
                None => self.run(step, &format!("{} of {count}", index + 1), again),
            }
        }
    }

    /// Counts a step that cannot run on this machine, and why.
    pub(crate) fn skip(&mut self, step: CommandStep, why: &str) {
        println!("\nSKIPPED {}: {why}", step.name);
        let counts = Counts {
            skipped: 1,
            ..Counts::default()
        };
        let skipped = Skipped {
            test: step.name.to_owned(),
            reason: why.to_owned(),
        };
        self.done.push(Done {
            step,
            took: Duration::ZERO,
            ok: true,
            counts,
            skipped: vec![skipped],
            failed: Vec::new(),
            unstable: Vec::new(),
            slow: Vec::new(),
            notes: Vec::new(),
        });
    }

    /// Runs a step, shows its output as it comes, and remembers what it found.
    pub(crate) fn run(&mut self, step: CommandStep, which: &str, again: bool) {
        let (name, typed) = (step.name, step.typed());
        println!("\n==> {which}, {name}: {typed}");
        let started = Instant::now();
        let (ok, found) = run_once(&step);
        let mut failed = found.failed().to_vec();
        let mut unstable = Vec::new();
        if !ok && again {
            println!("\n==> {name} once more: what passes now is unstable");
            let (second_ok, second) = run_once(&step);
            if second_ok && failed.is_empty() {
                failed.push(name.to_owned());
            }
            // A second run that names nothing and fails tells nothing of the tests.
            if second_ok || !second.failed().is_empty() {
                let repeated = |test: &String| second.failed().contains(test);
                (failed, unstable) = failed.into_iter().partition(repeated);
                let new = second.failed().iter().filter(|test| !failed.contains(test));
                unstable.extend(new.cloned());
            }
        }
        let took = started.elapsed();
        let mut verdict = if ok { "ok" } else { "FAILED" }.to_owned();
        if let Some(budget) = step.budget.filter(|budget| took > *budget) {
            verdict += &format!(", over its budget of {} s", budget.as_secs());
        }
        println!("==> {name}: {verdict} in {:.1} s", took.as_secs_f64());
        // A step that counts nothing (a linter) is one check; one that ends badly has failed.
        let mut counts = found.counts();
        if ok && counts == Counts::default() {
            counts.passed = 1;
        }
        if !ok && counts.failed == 0 {
            counts.failed = 1;
        }
        self.done.push(Done {
            step,
            took,
            ok,
            counts,
            skipped: found.skipped,
            failed,
            unstable,
            slow: found.slow,
            notes: found.notes,
        });
    }

    /// Prints the table and the closing lines. Whether all is well.
    pub(crate) fn finish(&self) -> bool {
        println!(
            "\n{:<14} {:>8} {:>8} {:>8} {:>8} {:>8}",
            "step", "seconds", "budget", "passed", "failed", "skipped"
        );
        let mut took = Duration::ZERO;
        let mut budget = Duration::ZERO;
        for done in &self.done {
            row(done.step.name, done.took, done.step.budget, done.counts);
            took += done.took;
            budget += done.step.budget.unwrap_or_default();
        }
        let all = self.counts();
        row("all", took, (!budget.is_zero()).then_some(budget), all);
        println!();
        for line in reasons(self.done.iter().flat_map(|done| &done.skipped)) {
            println!("skipped {line}");
        }
        let notes = self.done.iter().flat_map(|done| &done.notes);
        for note in self.notes.iter().chain(notes) {
            println!("note: {note}");
        }
        if !budget.is_zero() && took > budget {
            println!(
                "warning: {} s, over the budget of {} s for a fresh clone on 2 cores: \
                 docs/contributing.md says what to do",
                took.as_secs(),
                budget.as_secs()
            );
        }
        for done in self.done.iter().filter(|done| !done.ok) {
            let (name, typed) = (done.step.name, done.step.typed());
            for test in &done.unstable {
                println!("UNSTABLE {name}: {test}");
            }
            for test in &done.failed {
                println!("FAILED {name}: {test}");
            }
            println!("FAILED {name}; run it again with: {typed}");
        }
        println!(
            "{} passed, {} failed, {} skipped",
            all.passed, all.failed, all.skipped
        );
        self.done.iter().all(|done| done.ok)
    }
}

/// Returns a line for each reason why something was skipped, with what it was skipped for.
pub(crate) fn reasons<'a>(skipped: impl Iterator<Item = &'a Skipped>) -> Vec<String> {
    let mut by_reason: Vec<(&str, Vec<&str>)> = Vec::new();
    for skipped in skipped {
        match by_reason.iter_mut().find(|(it, _)| *it == skipped.reason) {
            Some((_, tests)) => tests.push(&skipped.test),
            None => by_reason.push((&skipped.reason, vec![&skipped.test])),
        }
    }
    let line = |(reason, tests): (&str, Vec<&str>)| match tests[..] {
        [test] => format!("{test}: {reason}"),
        [first, ..] => format!("{} tests, {first} among them: {reason}", tests.len()),
        [] => reason.to_owned(),
    };
    by_reason.into_iter().map(line).collect()
}

fn row(name: &str, took: Duration, budget: Option<Duration>, counts: Counts) {
    println!(
        "{name:<14} {:>8.1} {:>8} {:>8} {:>8} {:>8}",
        took.as_secs_f64(),
        budget.map_or(String::new(), |budget| budget.as_secs().to_string()),
        counts.passed,
        counts.failed,
        counts.skipped
    );
}

/// Runs a step's command. Whether it ended well, and what it said.
pub(crate) fn run_once(step: &CommandStep) -> (bool, Reader) {
    // A report of an earlier run must not speak for this one.
    let _ = std::fs::remove_file(JUNIT);
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
    (ok, found)
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
    fn what_was_skipped_is_grouped_by_its_reason() {
        let skipped = |test: &str, reason: &str| Skipped {
            test: test.to_owned(),
            reason: reason.to_owned(),
        };
        let all = [
            skipped("a", "no root"),
            skipped("b", "slow"),
            skipped("c", "no root"),
        ];
        let wanted = ["2 tests, a among them: no root", "b: slow"];
        assert_eq!(reasons(all.iter()), wanted);
    }

    /// A failure that does not repeat itself is still one.
    #[test]
    fn a_step_that_passes_once_more_has_failed_and_names_what_is_unstable() {
        let folder = std::env::temp_dir().join(format!("lmc-steps-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a temporary folder");
        let script = folder.join("script");
        let text = format!(
            "if test -e {0}/seen; then echo test a ... ok; echo test b ... FAILED; exit 1; fi\n\
             touch {0}/seen; echo test a ... FAILED; echo test b ... FAILED; exit 1",
            folder.display()
        );
        std::fs::write(&script, text).expect("a file");
        let mut steps = Steps::default();
        let step = CommandStep::new("tests", format!("sh {}", script.display()));
        steps.run(step, "1 of 1", true);
        let done = &steps.done()[0];
        assert!(!done.ok && !steps.finish());
        assert_eq!(
            (&done.failed[..], &done.unstable[..]),
            (&["b".to_owned()][..], &["a".to_owned()][..])
        );
        std::fs::remove_dir_all(&folder).expect("it is there");
    }

    #[test]
    fn steps_are_chosen_by_name() {
        let steps = || {
            vec![
                CommandStep::new("tidy", "true"),
                CommandStep::new("docs", "true"),
            ]
        };
        let chosen = |names: &[&str]| {
            let steps_named = names.iter().map(ToString::to_string).collect();
            let args = StepArgs {
                steps: steps_named,
                list: false,
            };
            let chosen = args.choose(steps())?;
            Ok::<_, anyhow::Error>(chosen.iter().map(|step| step.name).collect::<Vec<_>>())
        };
        assert_eq!(chosen(&["docs"]).expect("it is there"), ["docs"]);
        assert_eq!(chosen(&[]).expect("all"), ["tidy", "docs"]);
        assert!(chosen(&["doc"]).is_err());
    }

    #[test]
    fn a_step_is_shown_as_it_would_be_typed() {
        let step =
            CommandStep::new("docs", "cargo doc --no-deps").with("RUSTDOCFLAGS", "-Dwarnings");
        assert_eq!(step.typed(), "RUSTDOCFLAGS=-Dwarnings cargo doc --no-deps");
    }
}
