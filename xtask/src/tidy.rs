//! Rules about the tree that no compiler checks. They run as ordinary tests, and as
//! `cargo xtask tidy`.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Result;

/// What each crate may use of ours: the arrows of ARCHITECTURE.md. Nothing points upward.
const LAYERS: &[(&str, &[&str])] = &[
    ("lmc-key", &[]),
    ("lmc-memory", &[]),
    ("lmc-backend", &["lmc-key", "lmc-memory"]),
    (
        "lmc-backend-local",
        &["lmc-key", "lmc-memory", "lmc-backend"],
    ),
    (
        "lmc-engine",
        &["lmc-key", "lmc-memory", "lmc-backend", "lmc-backend-local"],
    ),
    ("lmc-vllm-adapter", &["lmc-key", "lmc-memory", "lmc-engine"]),
    (
        "lmc-server",
        &["lmc-key", "lmc-memory", "lmc-engine", "lmc-vllm-adapter"],
    ),
];

/// Lines above which a source file must say why it is that long.
const LONG: usize = 1000;
const EXCUSE: &str = "//! Long because: ";

type Faults = Vec<String>;
type Rule = fn(&Path) -> Faults;

/// Runs every rule. Whether the tree keeps them all.
pub(crate) fn run() -> Result<bool> {
    let root = crate::root();
    let rules: [(&str, Rule); 7] = [
        ("layering", layering),
        ("file sizes", sizes),
        ("links", links),
        ("reasons of dependencies", reasons),
        ("crates describe themselves", descriptions),
        ("invariants name their tests", invariants),
        ("forbidden words", forbidden),
    ];
    let mut ok = true;
    for (name, rule) in rules {
        let faults = rule(&root);
        println!("{} {name}", if faults.is_empty() { "PASS" } else { "FAIL" });
        for fault in &faults {
            println!("  {fault}");
        }
        ok &= faults.is_empty();
    }
    Ok(ok)
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

/// Files below a folder with an ending, build outputs and hidden folders left out.
fn files(folder: &Path, ending: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with('.') || ["target", "corpus", "artifacts"].contains(&&*name) {
            continue;
        }
        if path.is_dir() {
            found.extend(files(&path, ending));
        } else if name.ends_with(ending) {
            found.push(path);
        }
    }
    found.sort();
    found
}

fn shown<'a>(root: &Path, path: &'a Path) -> std::path::Display<'a> {
    path.strip_prefix(root).unwrap_or(path).display()
}

/// Crates use only what lies below them.
fn layering(root: &Path) -> Faults {
    let mut faults = Faults::new();
    let allowed: BTreeMap<_, _> = LAYERS.iter().copied().collect();
    for folder in fs::read_dir(root.join("crates"))
        .into_iter()
        .flatten()
        .flatten()
    {
        let manifest: toml::Table = read(&folder.path().join("Cargo.toml"))
            .parse()
            .unwrap_or_default();
        let name = manifest["package"]["name"]
            .as_str()
            .unwrap_or_default()
            .to_owned();
        if *name != *folder.file_name().to_string_lossy() {
            faults.push(format!(
                "crate {name} lies in another folder: {:?}",
                folder.file_name()
            ));
        }
        let Some(allowed) = allowed.get(name.as_str()) else {
            faults.push(format!(
                "crate {name} has no place in xtask/src/tidy.rs LAYERS"
            ));
            continue;
        };
        let used = manifest.get("dependencies").and_then(toml::Value::as_table);
        for used in used.into_iter().flat_map(toml::Table::keys) {
            if used.starts_with("lmc-") && !allowed.contains(&used.as_str()) {
                faults.push(format!("{name} uses {used}, which is not below it"));
            }
        }
    }
    faults
}

/// No source file outgrows its reader.
fn sizes(root: &Path) -> Faults {
    let sources = files(root, ".rs")
        .into_iter()
        .map(|path| (read(&path), path));
    sources
        .filter(|(text, _)| text.lines().count() > LONG && !text.contains(EXCUSE))
        .map(|(text, path)| {
            let lines = text.lines().count();
            format!(
                "{} has {lines} lines: split it, or say `{EXCUSE}…`",
                shown(root, &path)
            )
        })
        .collect()
}

/// Links between our documents lead somewhere.
fn links(root: &Path) -> Faults {
    let mut faults = Faults::new();
    for path in files(root, ".md") {
        let text = read(&path);
        for (target, line) in link_targets(&text) {
            if target.contains("://") || target.starts_with("mailto:") {
                continue;
            }
            let (file, anchor) = target.split_once('#').unwrap_or((&target, ""));
            let folder = path.parent().expect("a file lies in a folder");
            let linked = if file.is_empty() {
                path.clone()
            } else {
                folder.join(file)
            };
            if !linked.exists() {
                faults.push(format!("{}:{line} links to {target}", shown(root, &path)));
            } else if !anchor.is_empty() && !anchors(&read(&linked)).contains(&anchor.to_owned()) {
                faults.push(format!(
                    "{}:{line}: no heading for #{anchor}",
                    shown(root, &path)
                ));
            }
        }
    }
    faults
}

/// Targets of inline links with their line numbers, code left out.
fn link_targets(text: &str) -> Vec<(String, usize)> {
    let (mut found, mut fenced) = (Vec::new(), false);
    for (number, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        }
        if fenced {
            continue;
        }
        let plain: String = line.split('`').step_by(2).collect();
        for part in plain.split("](").skip(1) {
            if let Some((target, _)) = part.split_once(')') {
                found.push((target.to_owned(), number + 1));
            }
        }
    }
    found
}

/// Anchors that a renderer gives to the headings of a document.
fn anchors(text: &str) -> Vec<String> {
    let headings = text.lines().filter(|line| line.starts_with('#'));
    headings
        .map(|line| {
            let title = line.trim_start_matches('#').trim().to_lowercase();
            let kept = title
                .chars()
                .filter(|c| c.is_alphanumeric() || " -_".contains(*c));
            kept.map(|c| if c == ' ' { '-' } else { c }).collect()
        })
        .collect()
}

/// Each outside crate has its reason in the workspace's manifest.
fn reasons(root: &Path) -> Faults {
    let manifest = read(&root.join("Cargo.toml"));
    let mut faults = Faults::new();
    let (mut inside, mut explained) = (false, false);
    for line in manifest.lines() {
        if line.starts_with('[') {
            inside = line == "[workspace.dependencies]";
        } else if inside && line.starts_with('#') {
            explained = true;
        } else if inside && line.is_empty() {
            explained = false;
        } else if inside
            && line.contains('=')
            && !line.starts_with(['l', ' ', '}', ']'])
            && !explained
        {
            faults.push(format!("Cargo.toml: no reason above `{line}`"));
        }
    }
    faults
}

/// Each crate says what it is: description, README, first lines of its docs.
fn descriptions(root: &Path) -> Faults {
    let mut faults = Faults::new();
    for (name, _) in LAYERS {
        let folder = root.join("crates").join(name);
        let manifest: toml::Table = read(&folder.join("Cargo.toml")).parse().unwrap_or_default();
        let text = |key: &str| {
            manifest
                .get("package")
                .and_then(|p| p.get(key)?.as_str())
                .unwrap_or_default()
                .len()
        };
        if text("description") < 20 {
            faults.push(format!("{name} has no description in its Cargo.toml"));
        }
        if read(&folder.join("README.md")).len() < 100 {
            faults.push(format!("{name} has no README.md"));
        }
        if !read(&folder.join("src/lib.rs")).starts_with("//! ") {
            faults.push(format!("{name}: src/lib.rs does not say what the crate is"));
        }
    }
    faults
}

/// Tests that ARCHITECTURE.md names for its invariants exist.
fn invariants(root: &Path) -> Faults {
    let text = read(&root.join("ARCHITECTURE.md"));
    let sources: String = files(root, ".rs")
        .iter()
        .chain(&files(root, ".py"))
        .map(|path| read(path))
        .collect();
    let rows = text
        .lines()
        .filter(|line| line.starts_with('|') && line.contains("test: "));
    let mut faults: Faults = rows
        .clone()
        .flat_map(|row| row.split("test: ").skip(1))
        .filter_map(|rest| {
            rest.strip_prefix('`')?
                .split_once('`')
                .map(|(name, _)| name)
        })
        .filter(|name| {
            let own = name.rsplit("::").next().unwrap_or(name);
            !sources.contains(&format!("fn {own}(")) && !sources.contains(&format!("def {own}("))
        })
        .map(|name| format!("ARCHITECTURE.md names a test that does not exist: {name}"))
        .collect();
    if rows.count() < 10 {
        faults.push("ARCHITECTURE.md has no table of invariants with their tests".to_owned());
    }
    faults
}

/// Unfinished work does not land.
fn forbidden(root: &Path) -> Faults {
    let words = ["todo!(", "unimplemented!(", "dbg!("];
    let mut faults = Faults::new();
    for path in files(root, ".rs") {
        if path.ends_with("xtask/src/tidy.rs") {
            continue;
        }
        let text = read(&path);
        // Tests may unwrap; they stand at the end of a file or in files of their own.
        let product = text.split("#[cfg(test)]").next().unwrap_or_default();
        let is_test = ["/tests/", "/examples/", "/xtask/"]
            .iter()
            .any(|part| path.to_string_lossy().contains(part))
            || path.ends_with("tests.rs")
            || path.ends_with("testing.rs");
        for (number, line) in text.lines().enumerate() {
            if let Some(word) = words.iter().find(|word| line.contains(**word)) {
                faults.push(format!("{}:{}: {word}", shown(root, &path), number + 1));
            }
        }
        for (number, line) in product.lines().enumerate().filter(|_| !is_test) {
            if line.contains(".unwrap()") && !line.trim_start().starts_with("//") {
                faults.push(format!("{}:{}: .unwrap()", shown(root, &path), number + 1));
            }
        }
    }
    faults
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(rule: Rule) {
        let faults = rule(&crate::root());
        assert!(faults.is_empty(), "{}", faults.join("\n"));
    }

    #[test]
    fn crates_use_only_what_lies_below_them() {
        check(layering);
    }

    #[test]
    fn no_file_outgrows_its_reader() {
        check(sizes);
    }

    #[test]
    fn links_lead_somewhere() {
        check(links);
    }

    #[test]
    fn dependencies_have_reasons() {
        check(reasons);
    }

    #[test]
    fn crates_describe_themselves() {
        check(descriptions);
    }

    #[test]
    fn invariants_name_tests_that_exist() {
        check(invariants);
    }

    #[test]
    fn nothing_unfinished_is_left() {
        check(forbidden);
    }

    #[test]
    fn links_and_anchors_are_read_as_renderers_read_them() {
        let text = "# A title, here\n[x](a.md#b) `[no](c.md)`\n```\n[no](d.md)\n```\n";
        assert_eq!(link_targets(text), [("a.md#b".to_owned(), 2)]);
        assert_eq!(anchors(text), ["a-title-here"]);
    }
}
