//! Tests that take long without a reason.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

/// Begins the line of a test's documentation that gives the reason.
const REASON: &str = "/// Slow: ";

/// Returns a line for each of the slow tests whose documentation has no line `Slow: REASON`.
pub(crate) fn without_a_reason(slow: &[&(String, f64)]) -> Result<Vec<String>> {
    if slow.is_empty() {
        return Ok(Vec::new());
    }
    let mut reasoned = Vec::new();
    for crates in ["crates", "python", "xtask"] {
        collect(Path::new(crates), &mut reasoned)?;
    }
    let lines = slow.iter().filter_map(|(name, seconds)| {
        // `crate::program module::test`
        let function = name.rsplit([':', ' ']).next().unwrap_or(name);
        let has_reason = reasoned.iter().any(|test| test == function);
        (!has_reason).then(|| format!("{name} took {seconds:.1} s, and has no line `{REASON}…`"))
    });
    Ok(lines.collect())
}

/// Adds the functions below a folder that give a reason.
fn collect(folder: &Path, found: &mut Vec<String>) -> Result<()> {
    let entries = fs::read_dir(folder).with_context(|| folder.display().to_string())?;
    for entry in entries {
        let path = entry?.path();
        if path.is_dir() {
            collect(&path, found)?;
        } else if path.extension().is_some_and(|ending| ending == "rs") {
            let text = fs::read_to_string(&path);
            found.extend(reasoned(&text.with_context(|| path.display().to_string())?));
        }
    }
    Ok(())
}

/// The functions of a file that give a reason.
fn reasoned(text: &str) -> Vec<String> {
    let mut functions = Vec::new();
    let mut has_reason = false;
    for line in text.lines().map(str::trim_start) {
        if line.starts_with(REASON) {
            has_reason = true;
        } else if let Some((_, rest)) = line.split_once("fn ").filter(|_| has_reason) {
            let name = rest.split(['(', '<']).next().unwrap_or(rest);
            functions.push(name.to_owned());
            has_reason = false;
        } else if line.is_empty() {
            has_reason = false;
        }
    }
    functions
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_test_gives_its_reason_in_its_documentation() {
        let text = "/// It does.\n/// Slow: it waits.\n#[test]\nfn one() {}\n\nfn two() {}\n";
        assert_eq!(reasoned(text), ["one"]);
    }
}
