//! `cargo xtask test --repeat N --load M`: finds tests that fail by chance.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use anyhow::{Result, ensure};

use crate::output::{Counts, Reader};
use crate::steps::{self, Steps};
use crate::test;

/// Number of runs of the tests, and the load beside them.
#[derive(Debug, clap::Args)]
pub(crate) struct RepeatArgs {
    /// Run the tests N times, and name those that failed in any of them
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    repeat: Option<u32>,
    /// Keep M threads busy beside the tests
    #[arg(long, value_name = "M")]
    load: Option<usize>,
    /// Run the tests whose names contain this; may be repeated
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
}

impl RepeatArgs {
    /// Returns true if any of it is given.
    pub(crate) fn is_asked(&self) -> bool {
        self.repeat.is_some() || self.load.is_some() || !self.only.is_empty()
    }
}

/// Runs the tests as often as is asked. Whether none has failed.
pub(crate) fn run(args: &RepeatArgs, nextest: bool) -> Result<bool> {
    let rounds = args.repeat.unwrap_or(1);
    let load = args.load.unwrap_or(0);
    let step = test::tests(nextest, "").only(&args.only);
    // Built before, so that the load does not make a build of minutes one of an hour.
    let built = test::tests(nextest, "--no-run");
    let mut steps = Steps::default();
    steps.run(built, "build", false);
    ensure!(steps.finish(), "the tests do not build");

    let mut failures: BTreeMap<String, u32> = BTreeMap::new();
    let mut all = Counts::default();
    for round in 1..=rounds {
        println!(
            "\n==> round {round} of {rounds} beside {load} busy threads: {}",
            step.typed()
        );
        let busy = Busy::threads(load);
        let (ok, found) = steps::run_once(&step);
        drop(busy);
        ensure!(
            !ok || found.counts() != Counts::default(),
            "no test was run"
        );
        all.add(found.counts());
        for test in failed(ok, &found) {
            *failures.entry(test).or_default() += 1;
        }
    }
    println!();
    for (test, count) in &failures {
        println!("FAILED {test}: in {count} of {rounds} rounds");
    }
    println!(
        "{rounds} rounds beside {load} busy threads: {} passed, {} failed, {} skipped",
        all.passed, all.failed, all.skipped
    );
    Ok(failures.is_empty())
}

/// Returns the names of what failed; one that stands for all where the output names none.
fn failed(ok: bool, found: &Reader) -> Vec<String> {
    match found.failed() {
        [] if !ok => vec!["the run itself".to_owned()],
        names => names.to_vec(),
    }
}

/// Threads that compute, until this goes.
struct Busy {
    over: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Busy {
    fn threads(count: usize) -> Self {
        let over = Arc::new(AtomicBool::new(false));
        let spin = || {
            let over = Arc::clone(&over);
            thread::spawn(move || {
                while !over.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            })
        };
        let threads = (0..count).map(|_| spin()).collect();
        Self { over, threads }
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_that_fails_without_a_name_has_failed() {
        let mut found = Reader::default();
        assert_eq!(failed(true, &found), Vec::<String>::new());
        assert_eq!(failed(false, &found).len(), 1);
        found.line("test a ... FAILED");
        assert_eq!(failed(false, &found), ["a"]);
    }
}
