//! Rules about the tree that no compiler checks. They run as ordinary tests, and as
//! `cargo xtask tidy`.

mod crates;
mod invariants;
mod links;
mod source;
mod tree;
mod unsafe_code;

use anyhow::Result;

use self::tree::Tree;

/// What a rule found.
#[derive(Debug, Default)]
struct Findings {
    /// What breaks the rule, each with its place.
    faults: Vec<String>,
    /// What comes close to breaking it.
    notes: Vec<String>,
}

/// A rule: looks at the tree and says what breaks it.
struct Rule {
    name: &'static str,
    check: fn(&Tree, &mut Findings),
}

const RULES: &[Rule] = &[
    Rule {
        name: "crates use only what lies below them",
        check: crates::layering,
    },
    Rule {
        name: "each dependency has a reason and a user",
        check: crates::reasons,
    },
    Rule {
        name: "each crate says what it is, and its licence",
        check: crates::descriptions,
    },
    Rule {
        name: "no two examples have one name",
        check: crates::examples,
    },
    Rule {
        name: "dependencies build with the declared Rust",
        check: crates::rust_versions,
    },
    Rule {
        name: "no file outgrows its reader",
        check: source::sizes,
    },
    Rule {
        name: "nothing unfinished, and no unwrap outside tests",
        check: source::forbidden,
    },
    Rule {
        name: "an ignored test says why",
        check: source::ignored,
    },
    Rule {
        name: "unsafe code stays where it is expected",
        check: unsafe_code::expected,
    },
    Rule {
        name: "links and paths in documents lead somewhere",
        check: links::links,
    },
    Rule {
        name: "invariants name tests that exist",
        check: invariants::named_tests,
    },
];

/// Runs every rule. Whether the tree keeps them all.
pub(crate) fn run() -> Result<bool> {
    let tree = Tree::read(&crate::root())?;
    let (mut passed, mut failed) = (0, 0);
    for rule in RULES {
        let mut findings = Findings::default();
        (rule.check)(&tree, &mut findings);
        let ok = findings.faults.is_empty();
        println!("{} {}", if ok { "PASS" } else { "FAIL" }, rule.name);
        for fault in &findings.faults {
            println!("  {fault}");
        }
        for note in &findings.notes {
            println!("  (note) {note}");
        }
        passed += u64::from(ok);
        failed += u64::from(!ok);
    }
    println!("{passed} passed, {failed} failed, 0 skipped");
    Ok(failed == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(rule: fn(&Tree, &mut Findings)) {
        let tree = Tree::read(&crate::root()).expect("the tree can be read");
        let mut findings = Findings::default();
        rule(&tree, &mut findings);
        assert!(findings.faults.is_empty(), "{}", findings.faults.join("\n"));
    }

    #[test]
    fn crates_use_only_what_lies_below_them() {
        check(crates::layering);
    }

    #[test]
    fn dependencies_have_a_reason_and_a_user() {
        check(crates::reasons);
    }

    #[test]
    fn crates_describe_themselves() {
        check(crates::descriptions);
    }

    #[test]
    fn examples_have_names_of_their_own() {
        check(crates::examples);
    }

    #[test]
    fn no_file_outgrows_its_reader() {
        check(source::sizes);
    }

    #[test]
    fn nothing_unfinished_is_left() {
        check(source::forbidden);
    }

    #[test]
    fn ignored_tests_say_why() {
        check(source::ignored);
    }

    #[test]
    fn unsafe_code_stays_where_it_is_expected() {
        check(unsafe_code::expected);
    }

    #[test]
    fn links_lead_somewhere() {
        check(links::links);
    }

    #[test]
    fn invariants_name_tests_that_exist() {
        check(invariants::named_tests);
    }
}
