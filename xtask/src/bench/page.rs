//! Sections of docs/benchmarks.md that a benchmark writes by itself.

use std::fs;

use anyhow::{Context, Result};
use serde_json::Value;

const PAGE: &str = "docs/benchmarks.md";

/// Puts a benchmark's section in place of the one that is there, or at the end, and writes its
/// figures into a file.
pub(crate) fn write(bench: &str, text: &str, json: &str, figures: &Value) -> Result<()> {
    let old = fs::read_to_string(PAGE).context(PAGE)?;
    fs::write(PAGE, with_section(&old, bench, text)).context(PAGE)?;
    fs::write(json, serde_json::to_string_pretty(figures)? + "\n").context(json.to_owned())
}

fn with_section(page: &str, bench: &str, text: &str) -> String {
    let begin = format!("<!-- cargo xtask {bench}: begin -->");
    let end = format!("<!-- cargo xtask {bench}: end -->");
    let section = format!("{begin}\n{}\n\n{end}\n", text.trim_end());
    match (page.find(&begin), page.find(&end)) {
        (Some(from), Some(to)) if from < to => {
            let rest = page[to + end.len()..].trim_start_matches('\n');
            let gap = if rest.is_empty() { "" } else { "\n" };
            format!("{}{section}{gap}{rest}", &page[..from])
        }
        _ => format!("{}\n\n{section}", page.trim_end()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_section_replaces_the_one_that_is_there() {
        let page = with_section("# Page\n", "bench a", "first");
        let page = with_section(&page, "bench b", "second");
        let again = with_section(&page, "bench a", "third");
        assert_eq!(again, page.replace("first", "third"));
        assert!(again.starts_with("# Page\n\n<!-- cargo xtask bench a: begin -->\nthird\n"));
    }
}
