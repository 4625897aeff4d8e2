//! Lines of Rust in each crate, for the table of `docs/removed.md`.

use std::collections::{BTreeMap, BTreeSet};

use super::crates::TEST_CRATES;
use super::tree::{File, Tree};

/// Folders and modules that hold tests only, whatever crate they are in.
const TEST_PARTS: [&str; 8] = [
    "tests",
    "benches",
    "examples",
    "sim",
    "conformance",
    "fuzzing",
    "fuzz_targets",
    "interleavings",
];

/// Lines of a crate.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Lines {
    product: usize,
    tests: usize,
}

/// Prints a row for each crate, and a row of sums: lines of product code, lines of tests.
pub(crate) fn print(tree: &Tree) {
    let mut all = Lines::default();
    println!("| crate | product | tests |\n|---|---|---|");
    for (name, lines) in count(tree) {
        println!("| `{name}` | {} | {} |", lines.product, lines.tests);
        all.product += lines.product;
        all.tests += lines.tests;
    }
    println!("| all | {} | {} |", all.product, all.tests);
}

/// Counts the lines of files, comments included. Tests are unit tests, test programs, simulations,
/// conformance kits, fuzz functions, benches and examples.
fn count(tree: &Tree) -> BTreeMap<String, Lines> {
    let test_modules: BTreeSet<String> = tree.with_ending("rs").flat_map(test_modules).collect();
    let mut crates: BTreeMap<String, Lines> = BTreeMap::new();
    for file in tree.with_ending("rs") {
        let path = file.path.strip_prefix("crates/").unwrap_or(&file.path);
        let Some((name, inside)) = path.split_once('/') else {
            continue;
        };
        let parts = || inside.trim_end_matches(".rs").split('/');
        let is_test = TEST_CRATES.contains(&name)
            || parts().any(|part| TEST_PARTS.contains(&part))
            || test_modules
                .iter()
                .any(|module| lies_in(&file.path, module));
        let lines = file.text.lines().count();
        let tests = match is_test {
            true => lines,
            false => lines_of_test_modules(&file.text),
        };
        let of_crate = crates.entry(name.to_owned()).or_default();
        of_crate.product += lines - tests;
        of_crate.tests += tests;
    }
    crates
}

/// Returns true for the file of a module and for those of the modules in it.
fn lies_in(path: &str, module: &str) -> bool {
    path.strip_prefix(module)
        .is_some_and(|rest| rest == ".rs" || rest.starts_with('/'))
}

/// Returns the modules of a file that are compiled for tests only and have a file of their own, each
/// as its path without `.rs`.
fn test_modules(file: &File) -> Vec<String> {
    let stem = file.path.trim_end_matches(".rs");
    let own = ["/lib", "/mod", "/main"]
        .iter()
        .find_map(|root| stem.strip_suffix(root));
    let folder = own.unwrap_or(stem);
    let modules = after_test_attributes(&file.text)
        .filter_map(|(_, line)| line.trim().strip_suffix(';')?.split_once("mod "))
        .map(|(_, name)| format!("{folder}/{name}"));
    modules.collect()
}

/// Returns the lines of a file's inline modules that are compiled for tests only.
fn lines_of_test_modules(text: &str) -> usize {
    let lines: Vec<&str> = text.lines().collect();
    let modules = after_test_attributes(text).filter(|(_, line)| {
        line.trim_end().ends_with('{') && line.split_whitespace().any(|word| word == "mod")
    });
    let len = |(start, line): (usize, &str)| {
        let indent = line.len() - line.trim_start().len();
        let end = format!("{}}}", " ".repeat(indent));
        let rest = lines[start..].iter().position(|line| *line == end);
        // With the attribute in front.
        rest.map_or(0, |rest| rest + 2)
    };
    modules.map(len).sum()
}

/// Returns the first line after each `#[cfg(test)]` that is no attribute, with its index.
fn after_test_attributes(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let lines: Vec<&str> = text.lines().collect();
    let is_test = |line: &str| {
        let line = line.trim_start();
        line.starts_with("#[cfg(test)]") || line.starts_with("#[cfg(all(test")
    };
    let starts: Vec<usize> = (0..lines.len()).filter(|&at| is_test(lines[at])).collect();
    starts.into_iter().filter_map(move |start| {
        let next = lines[start + 1..]
            .iter()
            .position(|line| !line.trim_start().starts_with("#["))?;
        Some((start + 1 + next, lines[start + 1 + next]))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_tests_are_counted_apart() {
        let inline =
            "fn one() {}\n\n#[cfg(test)]\nmod tests {\n    fn two() {\n    }\n}\nfn three() {}\n";
        let tree = Tree::of(&[
            ("crates/a/src/lib.rs", inline),
            ("crates/a/src/b.rs", "#[cfg(test)]\nmod model;\n"),
            ("crates/a/src/b/model.rs", "fn four() {}\n"),
            ("crates/a/src/b/model/deep.rs", "fn five() {}\n"),
            ("crates/a/tests/api.rs", "fn six() {}\n"),
            ("xtask/src/main.rs", "fn main() {}\n"),
        ]);
        let count = count(&tree);
        let lines = |product, tests| Lines { product, tests };
        assert_eq!(count["a"], lines(5, 8));
        assert_eq!(count["xtask"], lines(1, 0));
    }
}
