//! What came of each part of an action, in its last lines.

use anyhow::Error;

/// What came of one part.
pub(crate) enum Outcome {
    /// It ran; how.
    Passed(String),
    /// The machine cannot; why.
    Skipped(String),
    /// The machine can, and it did not go well.
    Failed(String),
}

/// Parts by their names.
#[derive(Default)]
pub(crate) struct Outcomes(Vec<(String, Outcome)>);

impl Outcomes {
    /// A part that ran.
    pub(crate) fn ran(&mut self, name: &str, outcome: Result<String, Error>) {
        let outcome = match outcome {
            Ok(how) => Outcome::Passed(how),
            Err(error) => {
                println!("FAILED: {error:#}");
                Outcome::Failed(format!("{error:#}"))
            }
        };
        self.0.push((name.to_owned(), outcome));
    }

    /// A part that could not.
    pub(crate) fn skip(&mut self, name: &str, why: &Error) {
        let why = Outcome::Skipped(format!("{why:#}"));
        self.0.push((name.to_owned(), why));
    }

    /// Prints them all, one line each, and the line that `cargo xtask test` counts. Whether none
    /// has failed.
    pub(crate) fn finish(self) -> bool {
        println!();
        let [mut passed, mut failed, mut skipped] = [0; 3];
        for (name, outcome) in &self.0 {
            match outcome {
                Outcome::Passed(how) => {
                    passed += 1;
                    println!("ran {name}: {how}");
                }
                Outcome::Skipped(why) => {
                    skipped += 1;
                    println!("SKIPPED {name}: {}", why.replace('\n', " "));
                }
                Outcome::Failed(why) => {
                    failed += 1;
                    println!("FAILED {name}: {why}");
                }
            }
        }
        println!("{passed} passed, {failed} failed, {skipped} skipped");
        failed == 0
    }
}
