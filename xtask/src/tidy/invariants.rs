//! The table of docs/invariants.md names the tests that hold them.
//!
//! A test is named by its crate and its path there, of unit tests and integration tests alike:
//! `lmc-engine::module::tests::test`, `lmc-engine::module_of_it::test`; or `test-vllm::scenario` for one of
//! `cargo xtask test-vllm`.

use super::Findings;
use super::tree::Tree;

const PAGE: &str = "docs/invariants.md";
/// Files of the scenarios, which are all imported by the first.
const SCENARIOS: [&str; 6] = [
    "xtask/python/scenarios.py",
    "xtask/python/own.py",
    "xtask/python/own_models.py",
    "xtask/python/quickstart.py",
    "xtask/python/unequal.py",
    "xtask/python/pd.py",
];
/// Fewer rows mean that the table was lost, not that there is little to hold.
const LEAST_ROWS: usize = 15;

/// Every row of the table names tests, and they exist.
pub(crate) fn named_tests(tree: &Tree, findings: &mut Findings) {
    let text = tree.text(PAGE);
    let mut rows = 0;
    for (index, line) in table(text) {
        rows += 1;
        let held_by = line.trim_end_matches('|').rsplit('|').next();
        let names: Vec<&str> = held_by
            .unwrap_or_default()
            .split('`')
            .skip(1)
            .step_by(2)
            .collect();
        let mut fault = |what: String| {
            findings
                .faults
                .push(format!("{PAGE}:{}: {what}", index + 1));
        };
        if names.is_empty() {
            fault("no test holds this invariant".to_owned());
        }
        for name in names {
            if let Some(what) = missing(tree, name) {
                fault(format!("{name}: {what}"));
            }
        }
    }
    if rows < LEAST_ROWS {
        findings.faults.push(format!(
            "{PAGE} has a table of {rows} invariants, expected at least {LEAST_ROWS}"
        ));
    }
}

/// Rows of the table of the page.
fn table(text: &str) -> impl Iterator<Item = (usize, &str)> {
    text.lines()
        .enumerate()
        .skip_while(|(_, line)| *line != "# Invariants")
        .skip(1)
        .take_while(|(_, line)| !line.starts_with("## "))
        .filter(|(_, line)| line.starts_with('|'))
        // The head and the line below it.
        .skip(2)
}

/// Why a test cannot be found under its name; none when it can.
fn missing(tree: &Tree, name: &str) -> Option<String> {
    let parts: Vec<&str> = name.split("::").collect();
    let [package, modules @ .., test] = &parts[..] else {
        return Some("expected crate::module::test".to_owned());
    };
    if *package == "test-vllm" {
        let scenario = format!("\ndef {test}(run):");
        let there = |file: &&str| tree.text(file).contains(&scenario);
        let found = SCENARIOS.iter().any(there);
        return (!found).then(|| format!("{} have no such scenario", SCENARIOS.join(", ")));
    }
    let folder = if *package == "xtask" {
        "xtask".to_owned()
    } else {
        format!("crates/{package}")
    };
    let candidates = candidates(&folder, modules);
    let found = candidates.iter().filter_map(|path| tree.file(path));
    let mut files = found.peekable();
    if files.peek().is_none() {
        return Some(format!("none of {} exists", candidates.join(", ")));
    }
    let there = files.any(|file| is_test(&file.text, test));
    (!there).then(|| format!("no such test in {}", candidates.join(", ")))
}

/// Files in which a test of that path may stand.
fn candidates(folder: &str, modules: &[&str]) -> Vec<String> {
    let mut found = Vec::new();
    // The innermost module may be one inside its parent's file: `mod tests { … }`.
    for modules in [modules, &modules[..modules.len().saturating_sub(1)]] {
        let path = modules.join("/");
        if path.is_empty() {
            found.push(format!("{folder}/src/lib.rs"));
            found.push(format!("{folder}/src/main.rs"));
        } else {
            found.push(format!("{folder}/src/{path}.rs"));
            found.push(format!("{folder}/src/{path}/mod.rs"));
            found.push(format!("{folder}/tests/it/{path}.rs"));
            found.push(format!("{folder}/tests/{path}.rs"));
        }
    }
    found
}

/// Returns true if a function of that name follows a test attribute.
fn is_test(text: &str, name: &str) -> bool {
    let start = format!("fn {name}(");
    let mut attribute = false;
    for line in text.lines().map(str::trim) {
        if line.starts_with("#[test]") || line.starts_with("#[tokio::test") {
            attribute = true;
        } else if line.starts_with("#[") || line.starts_with("//") {
            continue;
        } else if attribute && line.trim_start_matches("async ").starts_with(&start) {
            return true;
        } else {
            attribute = false;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_is_found_by_its_path_and_attribute() {
        let tree = Tree::of(&[
            (
                "crates/a/src/b.rs",
                "mod tests {\n    #[test]\n    // Why.\n    fn held() {}\n    fn helper() {}\n}",
            ),
            ("crates/a/tests/c.rs", "#[tokio::test]\nasync fn waits() {}"),
            (SCENARIOS[0], "import x\n\ndef restart(run):\n"),
            (SCENARIOS[2], "\ndef lora(run):\n    def inner(run):\n"),
        ]);
        let check = |name: &str, there: bool| {
            assert_eq!(
                missing(&tree, name).is_none(),
                there,
                "{name}: {:?}",
                missing(&tree, name)
            );
        };
        check("a::b::tests::held", true);
        check("a::c::waits", true);
        check("test-vllm::restart", true);
        check("test-vllm::lora", true);
        check("test-vllm::inner", false);
        check("a::b::tests::helper", false);
        check("a::c::held", false);
        check("held", false);
        check("test-vllm::start", false);
    }

    #[test]
    fn rows_of_other_tables_are_left_out() {
        let text = "| no | no |\n# Invariants\ntext\n| invariant | held by |\n|---|---|\n| x | `y` |\n## Next\n| no |";
        let rows: Vec<_> = table(text).collect();
        assert_eq!(rows, [(5, "| x | `y` |")]);
    }
}
