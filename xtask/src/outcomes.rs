//! Outcomes of the parts of an action, printed in its last lines.

use anyhow::{Error, anyhow};

use crate::scripts::NotToBeHad;

/// A check that came to its end and found a wrong result. It fails a [lenient](Outcomes::lenient) run as well.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Wrong(pub(crate) String);

/// Outcome of one part.
pub(crate) enum PartOutcome {
    /// The part passed; with a note.
    Passed(String),
    /// The machine cannot; why.
    Skipped(String),
    /// The machine can, and it did not go well.
    Failed(String),
}

/// Parts by their names.
#[derive(Default)]
pub(crate) struct Outcomes {
    parts: Vec<(String, PartOutcome)>,
    /// True if a part that was asked for and cannot run is a failure.
    required: bool,
    /// True if only a [`Wrong`] result is a failure.
    lenient: bool,
}

impl Outcomes {
    /// Makes a list. With `required`, a part that was asked for and cannot run is a failure.
    pub(crate) fn new(required: bool) -> Self {
        Self {
            required,
            ..Self::default()
        }
    }

    /// Makes a list in which only a [`Wrong`] result is a failure, and all else is skipped.
    pub(crate) fn lenient() -> Self {
        Self {
            lenient: true,
            ..Self::default()
        }
    }

    /// A part that ran.
    pub(crate) fn ran(&mut self, name: &str, outcome: Result<String, Error>) {
        let outcome = match outcome {
            Ok(how) => PartOutcome::Passed(how),
            Err(error) if self.lenient && !error.is::<Wrong>() => {
                PartOutcome::Skipped(format!("not done: {error:#}"))
            }
            Err(error) => {
                println!("FAILED: {error:#}");
                PartOutcome::Failed(format!("{error:#}"))
            }
        };
        self.parts.push((name.to_owned(), outcome));
    }

    /// A part that was asked for and cannot be had.
    pub(crate) fn cannot(&mut self, name: &str, why: Error) {
        match self.required {
            true => self.ran(name, Err(why)),
            false => self.skip(name, &why),
        }
    }

    /// A part without NIXL: it cannot be had, or to get it did not go well.
    pub(crate) fn no_nixl(&mut self, name: &str, why: &Error) {
        let reason = anyhow!("no NIXL: {why:#}");
        match why.is::<NotToBeHad>() {
            true => self.cannot(name, reason),
            false => self.ran(name, Err(reason)),
        }
    }

    /// A part that could not.
    pub(crate) fn skip(&mut self, name: &str, why: &Error) {
        let why = PartOutcome::Skipped(format!("{why:#}"));
        self.parts.push((name.to_owned(), why));
    }

    /// Prints them all, one line each, and the line that `cargo xtask lab` counts. Whether none
    /// has failed.
    pub(crate) fn finish(self) -> bool {
        println!();
        let [mut passed, mut failed, mut skipped] = [0; 3];
        for (name, outcome) in &self.parts {
            match outcome {
                PartOutcome::Passed(how) => {
                    passed += 1;
                    println!("ran {name}: {how}");
                }
                PartOutcome::Skipped(why) => {
                    skipped += 1;
                    println!("SKIPPED {name}: {}", why.replace('\n', " "));
                }
                PartOutcome::Failed(why) => {
                    failed += 1;
                    println!("FAILED {name}: {why}");
                }
            }
        }
        println!("{passed} passed, {failed} failed, {skipped} skipped");
        failed == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A library that is named and is not there once passed for a machine without NIXL.
    #[test]
    fn only_what_cannot_be_had_is_skipped() {
        let fault = || anyhow!("no library /nowhere/libnixl_capi.so");
        let lacks = || Error::from(NotToBeHad("no PyPI".to_owned())).context("setting up");
        for (why, required, well) in [
            (lacks(), false, true),
            (lacks(), true, false),
            (fault(), false, false),
            (fault(), true, false),
        ] {
            let mut outcomes = Outcomes::new(required);
            outcomes.no_nixl("tcp", &why);
            assert_eq!(outcomes.finish(), well, "{why:#}, required: {required}");
        }
        let mut outcomes = Outcomes::default();
        outcomes.cannot("device", fault());
        assert!(outcomes.finish());
        // Of a run whose time is bounded, a wrong result fails alone.
        for (why, well) in [(fault(), true), (Wrong("a byte".to_owned()).into(), false)] {
            let mut outcomes = Outcomes::lenient();
            outcomes.ran("guest", Err(Error::context(why, "over RDMA")));
            assert_eq!(outcomes.finish(), well);
        }
        let mut outcomes = Outcomes::new(true);
        outcomes.skip("rxe", &fault());
        outcomes.ran("guest", Ok("well".to_owned()));
        assert!(outcomes.finish(), "better levels than the one that ran");
    }
}
