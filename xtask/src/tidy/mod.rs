//! Rules about the tree that no compiler checks. They run as ordinary tests, and as
//! `cargo xtask tidy`.

mod crates;
mod invariants;
mod lines;
mod links;
mod pages;
mod sentences;
mod source;
mod tree;
mod unsafe_code;
mod walk;
mod words;

pub(crate) use links::link_targets;
pub(crate) use pages::GUIDE;
pub(crate) use tree::{File, Tree, normal};

use std::path::PathBuf;

use anyhow::Result;

/// Check layering, file sizes, lengths of pages, links, invariants, unsafe code
#[derive(Debug, clap::Args)]
pub(crate) struct TidyArgs {
    /// Print the lines of Rust in each crate instead, product code and tests
    #[arg(long)]
    lines: bool,
    /// Another tree to count the lines of, such as a worktree of an earlier commit
    #[arg(long, requires = "lines")]
    of: Option<PathBuf>,
}

/// Findings of a rule.
#[derive(Debug, Default)]
struct Findings {
    /// Lines that break the rule, each with its path.
    faults: Vec<String>,
    /// Lines that come close to breaking it.
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
        name: "types say what they are",
        check: source::names,
    },
    Rule {
        name: "public errors can be copied",
        check: source::errors,
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
        name: "the pages of the guide are short",
        check: pages::lengths,
    },
    Rule {
        name: "texts use the words of the glossary, and doc comments stand alone",
        check: words::plain,
    },
    Rule {
        name: "pronouns of doc comments stand for a noun",
        check: sentences::nouns,
    },
    Rule {
        name: "the walk names functions that exist",
        check: walk::functions,
    },
    Rule {
        name: "invariants name tests that exist",
        check: invariants::named_tests,
    },
];

/// Runs every rule. Returns true if the tree keeps them all.
pub(crate) fn run(args: &TidyArgs) -> Result<bool> {
    let root = args.of.clone().unwrap_or_else(crate::root);
    let tree = Tree::read(&root)?;
    if args.lines {
        lines::print(&tree);
        return Ok(true);
    }
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

    #[test]
    fn the_tree_keeps_every_rule() {
        let tree = Tree::read(&crate::root()).expect("the tree can be read");
        for rule in RULES {
            let mut findings = Findings::default();
            (rule.check)(&tree, &mut findings);
            assert!(
                findings.faults.is_empty(),
                "{}:\n{}",
                rule.name,
                findings.faults.join("\n")
            );
        }
    }
}
