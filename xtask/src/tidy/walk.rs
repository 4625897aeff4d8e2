//! The functions that docs/walk.md names.

use super::Findings;
use super::tree::{File, Tree};

const PAGE: &str = "docs/walk.md";

/// Each `Type::function` of the walk is a function of that type.
pub(crate) fn functions(tree: &Tree, findings: &mut Findings) {
    let sources: Vec<&File> = tree
        .with_ending("rs")
        .filter(|file| file.path.starts_with("crates/") && file.path.contains("/src/"))
        .collect();
    for (index, line) in tree.text(PAGE).lines().enumerate() {
        for code in line.split('`').skip(1).step_by(2) {
            let Some((name, function)) = code.split_once("::") else {
                continue;
            };
            let is_type = name.starts_with(|c: char| c.is_ascii_uppercase());
            let is_function = function.starts_with(|c: char| c.is_ascii_lowercase());
            if !is_type || !is_function || sources.iter().any(|file| has(file, name, function)) {
                continue;
            }
            let fault = format!("{PAGE}:{}: there is no {code}", index + 1);
            findings.faults.push(fault);
        }
    }
}

/// Returns true if a file implements or declares a type or trait and has a function of this name.
fn has(file: &File, name: &str, function: &str) -> bool {
    let is_of = |line: &&str| {
        let line = line
            .trim_start_matches("pub ")
            .trim_start_matches("pub(crate) ");
        let is_head = line.starts_with("impl") || line.starts_with("trait ");
        let mut words = line.split(|c: char| !c.is_alphanumeric() && c != '_');
        is_head && words.any(|word| word == name)
    };
    let declared = format!("fn {function}");
    let is_function = |line: &str| {
        let rest = line.split_once(&declared).map(|(_, rest)| rest);
        rest.is_some_and(|rest| rest.starts_with(['(', '<']))
    };
    file.text.lines().any(is_function) && file.text.lines().any(|line| is_of(&line))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_function_that_is_gone_is_named() {
        let tree = Tree::of(&[
            (
                PAGE,
                "| `Store::put`, `Store::gone` | `Put` |\n`Other::put` and `Got::Value`",
            ),
            (
                "crates/a/src/lib.rs",
                "pub trait Store {\n    fn put<T>(t: T);\n}",
            ),
        ]);
        let mut findings = Findings::default();
        functions(&tree, &mut findings);
        let expected = [
            "docs/walk.md:1: there is no Store::gone",
            "docs/walk.md:2: there is no Other::put",
        ];
        assert_eq!(findings.faults, expected);
    }
}
