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

/// Words that say nothing about a type.
const LONE: [&str; 11] = [
    "State", "Shared", "Outcome", "Queue", "Counters", "Batch", "Step", "Op", "Source", "Part",
    "Peer",
];

/// A type of the product says what it is.
pub(crate) fn names(tree: &Tree, findings: &mut Findings) {
    let is_test = |path: &str| {
        path.contains("/sim/")
            || ["tests.rs", "model.rs"]
                .iter()
                .any(|end| path.ends_with(end))
    };
    let product = |path: &str| path.contains("/src/") && !is_test(path);
    for file in tree.with_ending("rs").filter(|file| product(&file.path)) {
        for (index, line) in file.text.lines().enumerate() {
            if let Some(name) = declared(line).filter(|name| LONE.contains(name)) {
                let at = file.at(index);
                findings
                    .faults
                    .push(format!("{at}: {name} does not say what it is"));
            }
        }
    }
}

/// Returns the name of a type that a line declares at the top of its module.
fn declared(line: &str) -> Option<&str> {
    let line = match line.strip_prefix("pub") {
        Some(rest) => rest.split_once(' ')?.1,
        None => line,
    };
    let (kind, rest) = line.split_once(' ')?;
    let is_type = ["struct", "enum", "trait", "type"].contains(&kind);
    let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_');
    is_type.then(|| &rest[..end.unwrap_or(rest.len())])
}

/// A public error can be given to each of several callers.
pub(crate) fn errors(tree: &Tree, findings: &mut Findings) {
    for file in tree.with_ending("rs") {
        let lines: Vec<&str> = file.text.lines().collect();
        for (index, line) in lines.iter().enumerate() {
            let Some(derived) = line.strip_prefix("#[derive(") else {
                continue;
            };
            let words = || derived.split(|c: char| !c.is_alphanumeric());
            let is_copied = words().any(|word| word == "Clone");
            let item = lines[index..].iter().find(|line| declared(line).is_some());
            let is_public = item.is_some_and(|line| line.starts_with("pub "));
            if words().any(|word| word == "Error") && is_public && !is_copied {
                let at = file.at(index);
                findings
                    .faults
                    .push(format!("{at}: a public error that is not Clone"));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn public_errors_that_cannot_be_copied_are_found() {
        let text = "#[derive(Debug, Error)]\n#[error(\"a\")]\npub struct A;\n\
                    #[derive(Debug, Error)]\nenum B {}\n\
                    #[derive(Clone, Debug, Error)]\npub enum C {}\n";
        let tree = Tree::of(&[("crates/a/src/b.rs", text)]);
        let mut findings = Findings::default();
        errors(&tree, &mut findings);
        let expected = ["crates/a/src/b.rs:1: a public error that is not Clone"];
        assert_eq!(findings.faults, expected);
    }

    #[test]
    fn types_with_empty_names_are_found() {
        let text =
            "pub(crate) struct State {\nenum Outcome<T> {\nstruct LinkState;\n    type Op = u8;\n";
        let tree = Tree::of(&[("crates/a/src/b.rs", text), ("crates/a/src/tests.rs", text)]);
        let mut findings = Findings::default();
        names(&tree, &mut findings);
        let expected = [
            "crates/a/src/b.rs:1: State does not say what it is",
            "crates/a/src/b.rs:2: Outcome does not say what it is",
        ];
        assert_eq!(findings.faults, expected);
    }
}
