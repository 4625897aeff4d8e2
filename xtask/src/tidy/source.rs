//! Rules about Rust sources.

use super::Findings;
use super::tree::{File, Tree};

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

/// Unfinished work does not land, and `expect` says why a thing cannot fail.
pub(crate) fn forbidden(tree: &Tree, findings: &mut Findings) {
    // Put together here, or this file would break its own rule.
    let unfinished = ["todo", "unimplemented", "dbg"].map(|word| format!("{word}!("));
    let unwrap = concat!(".unwrap", "()");
    let test_only = tree.test_only();
    let for_tests = |file: &File| {
        // Examples show how to use a crate, so they keep the rule.
        file.path.contains("/tests/")
            || test_only.iter().any(|path| {
                file.path == *path || (path.ends_with('/') && file.path.starts_with(path))
            })
    };
    for file in tree.with_ending("rs") {
        let product = if for_tests(file) {
            Vec::new()
        } else {
            product_lines(&file.text)
        };
        for (index, line) in file.text.lines().enumerate() {
            let code = line.split("//").next().unwrap_or_default();
            if let Some(word) = unfinished.iter().find(|word| code.contains(word.as_str())) {
                findings.faults.push(format!("{}: {word}", file.at(index)));
            }
            if code.contains(unwrap) && product.contains(&index) {
                findings.faults.push(format!(
                    "{}: {unwrap}; use expect(\"why this cannot fail\") or an error",
                    file.at(index)
                ));
            }
        }
    }
}

/// Indices of the lines outside `#[cfg(test)]` items, as rustfmt lays them out: an item ends
/// with a line that is its closing brace, or with its semicolon.
fn product_lines(text: &str) -> Vec<usize> {
    let mut lines = text.lines().enumerate();
    let mut product = Vec::new();
    while let Some((index, line)) = lines.next() {
        if line.trim_start() != "#[cfg(test)]" {
            product.push(index);
            continue;
        }
        let indent = &line[..line.len() - line.trim_start().len()];
        let end = format!("{indent}}}");
        for (_, line) in lines.by_ref() {
            let one_line = line.starts_with(indent)
                && !line[indent.len()..].starts_with([' ', '#', '/'])
                && (line.ends_with(';') || line.ends_with("{}"));
            if line == end || one_line {
                break;
            }
        }
    }
    product
}

/// An ignored test says what it needs, because the reason is all that a reader of the closing
/// lines gets.
pub(crate) fn ignored(tree: &Tree, findings: &mut Findings) {
    let bare = concat!("#[ignore", "]");
    for file in tree.with_ending("rs") {
        for (index, line) in file.text.lines().enumerate() {
            if line.trim() == bare {
                findings.faults.push(format!(
                    "{}: no reason; write #[ignore = \"…\"",
                    file.at(index)
                ));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_for_tests_are_left_out() {
        let text = "a\n#[cfg(test)]\nuse b;\nc\nimpl X {\n    #[cfg(test)]\n    fn d() {\n        e;\n    \
                    }\n    f\n}\n#[cfg(test)]\n#[allow(g)]\nmod tests {\n    h;\n}\ni";
        let kept: Vec<&str> = product_lines(text)
            .into_iter()
            .map(|index| text.lines().nth(index).expect("an index of a line").trim())
            .collect();
        assert_eq!(kept, ["a", "c", "impl X {", "f", "}", "i"]);
    }

    #[test]
    fn an_unwrap_is_found_outside_tests_only() {
        let line = concat!("    x.unwrap", "();\n");
        let product =
            format!("fn a() {{\n{line}}}\n/// {line}#[cfg(test)]\nmod tests {{\n{line}}}\n");
        let tree = Tree::of(&[
            ("crates/a/src/lib.rs", &product),
            ("crates/a/tests/b.rs", line),
        ]);
        let mut findings = Findings::default();
        forbidden(&tree, &mut findings);
        assert_eq!(findings.faults.len(), 1, "{:?}", findings.faults);
        assert!(findings.faults[0].starts_with("crates/a/src/lib.rs:2: "));
    }
}
