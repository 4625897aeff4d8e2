//! Rules about Rust sources.

use super::Findings;
use super::tree::Tree;

/// Lines above which a file is mentioned, and above which it must say why it is that long.
const LONG: usize = 700;
const TOO_LONG: usize = 1000;
const EXCUSE: &str = "//! Long because: ";

/// No source file outgrows its reader.
pub(crate) fn sizes(tree: &Tree, findings: &mut Findings) {
    for file in tree.with_ending("rs") {
        let lines = file.text.lines().count();
        if lines > TOO_LONG && !file.text.contains(EXCUSE) {
            findings.faults.push(format!(
                "{} has {lines} lines: split it, or say `{EXCUSE}…`",
                file.path
            ));
        } else if lines > LONG {
            findings
                .notes
                .push(format!("{} has {lines} lines", file.path));
        }
    }
}
