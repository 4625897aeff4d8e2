//! Reads the output of test runners: how many tests passed, which were skipped and why.
//!
//! A test that finds that the machine lacks what it needs prints `skipped: REASON` and returns.
//! The runners count it as passed; we do not.

/// Checks that were made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    pub(crate) skipped: u64,
}

impl Counts {
    pub(crate) fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

/// A test that was not run, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Skipped {
    pub(crate) test: String,
    pub(crate) reason: String,
}

/// Longest time of a test that gives no reason for it, in seconds.
const LONG: f64 = 2.0;

/// Reads the output of a step line by line.
#[derive(Debug, Default)]
pub(crate) struct Reader {
    pub(crate) skipped: Vec<Skipped>,
    /// Lines that begin with `note: `, which belong under the table at the end.
    pub(crate) notes: Vec<String>,
    /// Tests that took longer than [`LONG`], and their seconds.
    pub(crate) slow: Vec<(String, f64)>,
    /// Names of what failed.
    failed: Vec<String>,
    /// Counts of the closing lines.
    said: Counts,
    /// Tests that the closing lines count as passed and that skipped themselves.
    not_passed: u64,
    /// The test whose output is being shown (`cargo test -- --show-output`); empty between tests.
    current: String,
}

impl Reader {
    /// Returns the counts so far.
    pub(crate) fn counts(&self) -> Counts {
        Counts {
            passed: self.said.passed.saturating_sub(self.not_passed),
            failed: self.said.failed,
            skipped: self.said.skipped + self.not_passed,
        }
    }

    /// Returns the names of what failed, each once.
    pub(crate) fn failed(&self) -> &[String] {
        &self.failed
    }

    /// Takes one line of a step's output.
    pub(crate) fn line(&mut self, line: &str) {
        let line = line.trim_end();
        if let Some(name) = header(line) {
            self.current = name.to_owned();
        }
        if ["successes:", "failures:"].contains(&line) {
            self.current.clear();
        }
        if !self.current.is_empty() {
            // What a test prints besides is its own matter.
            if let Some(reason) = line.strip_prefix("skipped: ") {
                self.skip(self.current.clone(), reason);
            }
            return;
        }
        if let Some(rest) = ignored(line).or_else(|| left_out(line)) {
            self.skipped.push(rest);
        } else if let Some(note) = line.strip_prefix("note: ") {
            // The compiler has notes too; ours come from xtask and name themselves.
            if let Some(note) = note.strip_prefix("xtask: ") {
                self.notes.push(note.to_owned());
            }
        }
        if let Some(name) = failure(line).filter(|name| !self.failed.contains(name)) {
            self.failed.push(name);
        }
        self.said.add(closing_line(line));
    }

    /// Takes the report that nextest wrote, in which the output of each test stands.
    pub(crate) fn junit(&mut self, report: &str) {
        for case in report.split("<testcase ").skip(1) {
            let name = attribute(case, "name");
            let crate_name = attribute(case, "classname");
            let seconds = attribute(case, "time").parse().unwrap_or(0.0);
            if seconds > LONG {
                self.slow.push((format!("{crate_name} {name}"), seconds));
            }
            let case = case.split("</testcase>").next().unwrap_or(case);
            let reason = case
                .lines()
                .find_map(|line| line.split_once("skipped: ").map(|(_, reason)| reason));
            if let Some(reason) = reason {
                let reason = reason.split("</system-out>").next().unwrap_or(reason);
                self.skip(format!("{crate_name} {name}"), &unescaped(reason));
            }
        }
    }

    fn skip(&mut self, test: String, reason: &str) {
        self.skipped.push(Skipped {
            test,
            reason: reason.trim().to_owned(),
        });
        self.not_passed += 1;
    }
}

/// `---- a::test stdout ----`
fn header(line: &str) -> Option<&str> {
    line.strip_prefix("---- ")?.strip_suffix(" stdout ----")
}

/// `test a::test ... ignored, REASON`
fn ignored(line: &str) -> Option<Skipped> {
    let (test, rest) = line.strip_prefix("test ")?.split_once(" ... ignored")?;
    let reason = rest.strip_prefix(", ").unwrap_or("ignored");
    Some(Skipped {
        test: test.to_owned(),
        reason: reason.to_owned(),
    })
}

/// `SKIPPED NAME: REASON`, of our own tools, whose closing line counts it.
fn left_out(line: &str) -> Option<Skipped> {
    let (test, reason) = line.strip_prefix("SKIPPED ")?.split_once(": ")?;
    Some(Skipped {
        test: test.to_owned(),
        reason: reason.to_owned(),
    })
}

/// `test a::test ... FAILED` of cargo test; `FAIL [ 1.0s] (1/2) crate a::test` of nextest, which
/// writes `TIMEOUT` and signals instead of `FAIL`; `FAILED NAME: WHY` of our own tools.
fn failure(line: &str) -> Option<String> {
    if let Some(test) = line.strip_prefix("test ") {
        return test.strip_suffix(" ... FAILED").map(str::to_owned);
    }
    if let Some((name, _)) = line
        .strip_prefix("FAILED ")
        .and_then(|it| it.split_once(": "))
    {
        return Some(name.to_owned());
    }
    if let Some(ended) = line
        .trim_start()
        .strip_prefix("process didn't exit successfully: ")
    {
        // Of other ends the program itself says what failed.
        return ended.contains("(signal").then(|| ended.to_owned());
    }
    let (verdict, rest) = line.trim_start().split_once(" [")?;
    if !["FAIL", "TIMEOUT", "ABORT"].contains(&verdict) && !verdict.starts_with("SIG") {
        return None;
    }
    let (_, test) = rest.split_once("s] ")?;
    let test = match test.trim_start().strip_prefix('(') {
        Some(counted) => counted.split_once(") ")?.1,
        None => test,
    };
    Some(test.trim().to_owned())
}

fn attribute<'a>(tag: &'a str, name: &str) -> &'a str {
    let start = format!("{name}=\"");
    let found = tag.match_indices(&start).find(|(at, _)| {
        // `name` is also the end of `classname`.
        *at == 0 || tag.as_bytes()[at - 1] == b' '
    });
    found
        .and_then(|(at, _)| tag[at + start.len()..].split('"').next())
        .unwrap_or_default()
}

fn unescaped(text: &str) -> String {
    text.replace("&lt;", "<")
        .replace("&gt;", ">")
        .replace("&quot;", "\"")
        .replace("&apos;", "'")
        .replace("&amp;", "&")
}

/// The counts in the closing line of cargo test, nextest or one of our own tools. Nextest shows
/// the output of failed tests indented, which tells their closing lines from its own.
fn closing_line(line: &str) -> Counts {
    let number_before = |word: &str| -> u64 {
        let Some(at) = line.find(word) else { return 0 };
        let number = line[..at].trim_end().rsplit(' ').next();
        number.and_then(|n| n.parse().ok()).unwrap_or(0)
    };
    let nextest = line.contains("tests run:") || line.contains("test run:");
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
        failed: number_before("failed") + number_before("timed out"),
        skipped: number_before("skipped") + number_before("ignored"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closing_lines_of_the_runners_are_understood() {
        let check = |line: &str, passed, failed, skipped| {
            let wanted = Counts {
                passed,
                failed,
                skipped,
            };
            assert_eq!(closing_line(line), wanted, "{line}");
        };
        check(
            "Summary [   1.797s] 56 tests run: 54 passed (1 slow), 2 failed, 3 skipped",
            54,
            2,
            3,
        );
        check(
            "Summary [  9.001s] 5 tests run: 4 passed, 1 timed out, 0 skipped",
            4,
            1,
            0,
        );
        check(
            "test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out",
            3,
            0,
            1,
        );
        check(
            "    test result: FAILED. 0 passed; 1 failed; 0 ignored",
            0,
            0,
            0,
        );
        check("Summary [ 0.1s] 1 test run: 1 passed, 9 skipped", 1, 0, 9);
        check("41 passed, 2 failed", 41, 2, 0);
        check("PASS both modes: 3 passed", 0, 0, 0);
        check("", 0, 0, 0);
    }

    #[test]
    fn what_failed_is_named() {
        for (line, wanted) in [
            ("test a::b ... FAILED", Some("a::b")),
            ("test a::b ... ok", None),
            (
                "        FAIL [   1.2s] (10/13) lmc-key::it a::b",
                Some("lmc-key::it a::b"),
            ),
            ("     TIMEOUT [ 240.0s] lmc-key a::b", Some("lmc-key a::b")),
            (
                "     SIGSEGV [   0.0s] (1/1) lmc-key a::b",
                Some("lmc-key a::b"),
            ),
            ("        PASS [   1.2s] (10/13) lmc-key::it a::b", None),
            ("FAILED guest: object 0 differs", Some("guest")),
            ("test result: FAILED. 0 passed; 1 failed", None),
            (
                "  process didn't exit successfully: `it` (signal: 6, SIGABRT)",
                Some("`it` (signal: 6, SIGABRT)"),
            ),
            (
                "  process didn't exit successfully: `it` (exit status: 101)",
                None,
            ),
        ] {
            assert_eq!(failure(line).as_deref(), wanted, "{line}");
        }
    }

    fn skipped(test: &str, reason: &str) -> Skipped {
        Skipped {
            test: test.to_owned(),
            reason: reason.to_owned(),
        }
    }

    #[test]
    fn a_test_that_says_it_was_skipped_is_not_counted_as_passed() {
        let mut reader = Reader::default();
        let text = "test a ... ok\ntest b ... ignored, needs a GPU\nsuccesses:\n\n\
                    ---- a stdout ----\nskipped: no mount namespace here\n\n\
                    ---- c stdout ----\nFAILED b: why\n3 passed, 2 failed\n\n\
                    successes:\n    a\n    c\n\ntest result: ok. 2 passed; 0 failed; 1 ignored; 0 measured";
        text.lines().for_each(|line| reader.line(line));
        assert_eq!(
            reader.skipped,
            [
                skipped("b", "needs a GPU"),
                skipped("a", "no mount namespace here")
            ]
        );
        let wanted = Counts {
            passed: 1,
            failed: 0,
            skipped: 2,
        };
        assert_eq!(reader.counts(), wanted);
        // Test c printed that.
        assert!(reader.failed().is_empty());
    }

    #[test]
    fn what_our_tools_leave_out_is_counted_once() {
        let mut reader = Reader::default();
        let text = "SKIPPED rxe: no root: none\n1 passed, 0 failed, 1 skipped";
        text.lines().for_each(|line| reader.line(line));
        assert_eq!(reader.skipped, [skipped("rxe", "no root: none")]);
        assert_eq!((reader.counts().passed, reader.counts().skipped), (1, 1));
    }

    #[test]
    fn a_report_of_nextest_names_the_tests_that_skipped_themselves() {
        let mut reader = Reader::default();
        reader.line("Summary [ 1.0s] 2 tests run: 2 passed, 0 skipped");
        reader.junit(
            "<testsuite name=\"x\"><testcase name=\"fits\" classname=\"lmc-memory::shm\" \
             time=\"2.5\">\n<system-out>running 1 test\nskipped: no &lt;namespace&gt; here\n\
             </system-out></testcase><testcase name=\"ok\" classname=\"lmc-key\">\n\
             <system-out>fine</system-out></testcase></testsuite>",
        );
        assert_eq!(
            reader.skipped,
            [skipped("lmc-memory::shm fits", "no <namespace> here")]
        );
        assert_eq!(reader.slow, [("lmc-memory::shm fits".to_owned(), 2.5)]);
        let wanted = Counts {
            passed: 1,
            failed: 0,
            skipped: 1,
        };
        assert_eq!(reader.counts(), wanted);
    }

    #[test]
    fn only_our_own_notes_are_kept() {
        let mut reader = Reader::default();
        reader.line("note: xtask: no nightly toolchain");
        reader.line("note: `#[warn(unused)]` on by default");
        assert_eq!(reader.notes, ["no nightly toolchain"]);
    }
}
