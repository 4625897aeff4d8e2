//! `lmc doctor`: checks this host for `lmc serve` with the same settings, and says what to change. It changes
//! nothing itself.

mod checks;

use std::fmt::Write as _;
use std::process::ExitCode;

use serde_json::json;

use crate::config::Loaded;
use crate::stdout::{out, outln};

pub(crate) const HELP: &str = "\
Reads the settings of `lmc serve` from the same flags, variables and file. With a problem the server does
not start, or does not do what the settings ask for; with a warning it works less well. The exit code is
1 if there is a problem.

Examples:
  lmc doctor                             this host, with the default settings
  lmc doctor --config /etc/lmc/lmc.toml  with the service's settings; run it as the service's user";

/// Judgement of one property of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    /// Nothing to change.
    Ok,
    /// The server works, but would work better with a change.
    Warning,
    /// The server does not start, or does not do what the settings ask for.
    Problem,
}

impl Verdict {
    fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Problem => "problem",
        }
    }
}

/// One property of the host.
#[derive(Debug, PartialEq, Eq)]
struct Finding {
    /// Name of the property, for people and programs.
    check: &'static str,
    verdict: Verdict,
    /// State of the property.
    found: String,
    /// Change that helps; empty if nothing is to be changed, or if `found` already names it.
    remedy: String,
}

impl Finding {
    fn ok(check: &'static str, found: impl Into<String>) -> Self {
        Self {
            check,
            verdict: Verdict::Ok,
            found: found.into(),
            remedy: String::new(),
        }
    }

    fn warning(check: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self {
            verdict: Verdict::Warning,
            remedy: remedy.into(),
            ..Self::ok(check, found)
        }
    }

    fn problem(check: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self {
            verdict: Verdict::Problem,
            ..Self::warning(check, found, remedy)
        }
    }
}

/// Checks the host for a configuration, and prints what was found.
pub(crate) fn run(loaded: &Loaded, is_json: bool) -> ExitCode {
    let findings = checks::all(&loaded.config);
    match is_json {
        true => outln!("{:#}", as_json(&findings)),
        false => out!("{}", table(&findings)),
    }
    match count(&findings, Verdict::Problem) {
        0 => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    }
}

fn count(findings: &[Finding], verdict: Verdict) -> usize {
    let found = findings.iter().filter(|found| found.verdict == verdict);
    found.count()
}

fn as_json(findings: &[Finding]) -> serde_json::Value {
    let checks: Vec<_> = findings
        .iter()
        .map(|found| {
            json!({
                "check": found.check,
                "verdict": found.verdict.name(),
                "found": found.found,
                "remedy": found.remedy,
            })
        })
        .collect();
    json!({
        "problems": count(findings, Verdict::Problem),
        "warnings": count(findings, Verdict::Warning),
        "checks": checks,
    })
}

fn table(findings: &[Finding]) -> String {
    let mut out = String::new();
    for found in findings {
        let (verdict, check) = (found.verdict.name(), found.check);
        // Writing to a string cannot fail.
        let _ = writeln!(out, "{verdict:<8} {check:<12} {}", found.found);
        if !found.remedy.is_empty() {
            let _ = writeln!(out, "{:<21} {}", "", found.remedy);
        }
    }
    let numbers = |verdict| count(findings, verdict);
    let _ = writeln!(
        out,
        "{} problems, {} warnings",
        numbers(Verdict::Problem),
        numbers(Verdict::Warning)
    );
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn people_and_programs_get_the_same_findings() {
        let findings = [
            Finding::ok("kernel", "Linux 6.1"),
            Finding::warning("huge pages", "none", "mount them"),
            Finding::problem("port", "taken", ""),
        ];
        assert_eq!(
            table(&findings),
            "ok       kernel       Linux 6.1\n\
             warning  huge pages   none\n                      mount them\n\
             problem  port         taken\n1 problems, 1 warnings\n"
        );
        let json = as_json(&findings);
        assert_eq!(
            (&json["problems"], &json["warnings"]),
            (&json!(1), &json!(1))
        );
        assert_eq!(json["checks"][1]["remedy"], "mount them");
    }
}
