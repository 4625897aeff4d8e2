//! Lines for the log of the engine, which the engine fetches.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Lines that are kept until they are fetched; the oldest go first.
const KEPT: usize = 64;
/// Time between two lines about failures of one kind.
const FAILURE_INTERVAL: Duration = Duration::from_secs(1);
/// Characters of another process's text that a line shows.
const SHOWN: usize = 400;

/// Importance of a [`LogLine`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    /// Information.
    Info,
    /// A warning that requires action.
    Warning,
}

/// A line for the log of the engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogLine {
    /// Importance.
    pub level: Level,
    /// The line.
    pub text: String,
}

/// Operation that failed, and the kind of its failure.
pub(crate) type Kind = (&'static str, &'static str);

/// Failures of one kind.
#[derive(Debug)]
struct Failures {
    logged: Instant,
    /// Failures since the last line.
    unlogged: u64,
}

/// The lines that have not been fetched yet.
#[derive(Debug, Default)]
pub(crate) struct Log {
    lines: Mutex<VecDeque<LogLine>>,
    failures: Mutex<HashMap<Kind, Failures>>,
}

impl Log {
    pub(crate) fn push(&self, level: Level, text: String) {
        let mut lines = self.lines.lock();
        // A repeated line is logged once until the engine fetches it.
        if lines.back().is_some_and(|last| last.text == text) {
            return;
        }
        if lines.len() >= KEPT {
            lines.pop_front();
        }
        lines.push_back(LogLine { level, text });
    }

    /// Logs a failure as a warning, at most once a second for each kind. The next line of the kind
    /// says how many failures were not logged. `text` is called only for a line.
    pub(crate) fn failed(&self, kind: Kind, now: Instant, text: impl FnOnce() -> String) {
        let unlogged = {
            let mut failures = self.failures.lock();
            match failures.get_mut(&kind) {
                Some(failures) if now < failures.logged + FAILURE_INTERVAL => {
                    failures.unlogged += 1;
                    return;
                }
                Some(failures) => {
                    failures.logged = now;
                    std::mem::take(&mut failures.unlogged)
                }
                None => {
                    let first = Failures {
                        logged: now,
                        unlogged: 0,
                    };
                    failures.insert(kind, first);
                    0
                }
            }
        };
        let text = match unlogged {
            0 => text(),
            more => format!("{} ({more} more since the last such line)", text()),
        };
        self.push(Level::Warning, text);
    }

    pub(crate) fn take(&self) -> Vec<LogLine> {
        self.lines.lock().drain(..).collect()
    }
}

/// Returns the start of another process's text for a line, without control characters.
pub(crate) fn shown(text: &str) -> String {
    let mut shown: String = text.chars().flat_map(escaped).take(SHOWN).collect();
    if text.chars().flat_map(escaped).nth(SHOWN).is_some() {
        shown.push('…');
    }
    shown
}

fn escaped(character: char) -> impl Iterator<Item = char> {
    let (escaped, plain) = match character {
        // Quotes and backslashes are readable as they are.
        '"' | '\'' | '\\' => (None, Some(character)),
        other => (Some(other.escape_debug()), None),
    };
    escaped.into_iter().flatten().chain(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_failure_of_each_kind_is_logged_in_a_second() {
        let (log, start) = (Log::default(), Instant::now());
        let at = |millis| start + Duration::from_millis(millis);
        for millis in [0, 1, 999] {
            log.failed(("store", "copy"), at(millis), || format!("store {millis}"));
        }
        log.failed(("lookup", ""), at(2), || "lookup".to_owned());
        log.failed(("store", "copy"), at(1000), || "store 1000".to_owned());
        log.failed(("store", "copy"), at(2000), || "store 2000".to_owned());
        let lines: Vec<String> = log.take().into_iter().map(|line| line.text).collect();
        let wanted = [
            "store 0",
            "lookup",
            "store 1000 (2 more since the last such line)",
            "store 2000",
        ];
        assert_eq!(lines, wanted);
    }

    #[test]
    fn texts_of_other_processes_are_bounded_and_stay_in_their_line() {
        assert_eq!(shown("no \"space\" left"), "no \"space\" left");
        assert_eq!(shown("a\nb\u{1b}[31m\r"), r"a\nb\u{1b}[31m\r");
        let long = shown(&"\n".repeat(1 << 20));
        assert_eq!(long.chars().count(), SHOWN + 1);
        assert!(long.ends_with('…'));
        assert_eq!(shown(&"x".repeat(SHOWN)), "x".repeat(SHOWN));
    }
}
