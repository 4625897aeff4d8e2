//! `cargo xtask book`: the documents as a site with a search, which needs no server and no network.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::outcomes::Outcomes;
use crate::scripts::{self, NotToBeHad};
use crate::tidy::{File, GUIDE, Tree, link_targets, normal};
use crate::{root, shown, target};

/// Time for mdBook to write the site.
const LIMIT: Duration = Duration::from_secs(120);

/// The parts of the site with the first pages of each. The other pages of a folder follow by name.
const PARTS: [(&str, &[&str], &str); 5] = [
    ("Guide", GUIDE, ""),
    (
        "Running lmc",
        &[
            "docs/configuration.md",
            "docs/metrics.md",
            "docs/alerts.md",
            "docs/misses.md",
            "docs/dead-server.md",
            "packaging/README.md",
            "python/README.md",
            "docs/connector.md",
            "docs/gpu.md",
            "docs/p2p.md",
            "docs/pd.md",
            "docs/remote.md",
            "docs/clears.md",
            "docs/benchmarks.md",
            "SECURITY.md",
            "CHANGELOG.md",
        ],
        "",
    ),
    (
        "Inside lmc",
        &[
            "ARCHITECTURE.md",
            "CONTRIBUTING.md",
            "docs/contributing.md",
            "fuzz/README.md",
        ],
        "docs",
    ),
    ("Decisions", &["docs/decisions/README.md"], "docs/decisions"),
    ("Crates", &["crates/lmc/README.md"], "crates"),
];

const SETTINGS: &str = r#"[book]
title = "lmc"
language = "en"

[build]
build-dir = "html"
use-default-preprocessors = false

[output.html.print]
enable = false
"#;

/// Builds the site below the target folder, and follows every link in it. Returns true if all is well.
pub(crate) fn run() -> Result<bool> {
    let mdbook = match scripts::set_up("xtask/python/mdbook.sh", &[]) {
        Ok(folder) => Path::new(&folder).join("bin/mdbook"),
        Err(why) if why.is::<NotToBeHad>() => return Ok(scripts::skipped("book", &why)),
        Err(fault) => return Err(fault),
    };
    let mut outcomes = Outcomes::default();
    outcomes.ran("book", build(&mdbook));
    Ok(outcomes.finish())
}

fn build(mdbook: &Path) -> Result<String> {
    let folder = target()?.join("book");
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    let tree = Tree::read(&root())?;
    let contents = contents(&tree);
    let source = folder.join("src");
    for path in contents.iter().flat_map(|(_, pages)| pages) {
        let page = tree.file(path).with_context(|| format!("no {path}"))?;
        write(&source.join(path), page.text.as_bytes())?;
        for (_, target) in link_targets(&page.text) {
            copy_linked(page, &target, &source)?;
        }
    }
    write(
        &source.join("SUMMARY.md"),
        summary(&tree, &contents).as_bytes(),
    )?;
    write(&folder.join("book.toml"), SETTINGS.as_bytes())?;
    shown::output(Command::new(mdbook).arg("build").arg(&folder), LIMIT)?;
    let site = folder.join("html");
    let links = follow_links(&site)?;
    println!("the site is {}", site.join("index.html").display());
    let pages: usize = contents.iter().map(|(_, pages)| pages.len()).sum();
    Ok(format!("{pages} pages, {links} links"))
}

/// Returns the parts of the site, each with the paths of its pages.
fn contents(tree: &Tree) -> Vec<(&'static str, Vec<String>)> {
    let mut contents = vec![("", vec!["README.md".to_owned()])];
    let named = PARTS.iter().flat_map(|(_, first, _)| *first);
    let named: Vec<&str> = named.copied().collect();
    for (title, first, folder) in PARTS {
        let is_here = |file: &&File| match folder {
            "" => false,
            "crates" => file.path.starts_with("crates/") && file.path.ends_with("/README.md"),
            folder => file.folder() == folder,
        };
        let others = tree.with_ending("md").filter(is_here);
        let others = others.map(|file| file.path.as_str());
        let others = others.filter(|path| !named.contains(path));
        let pages = first.iter().copied().chain(others);
        contents.push((title, pages.map(str::to_owned).collect()));
    }
    contents
}

/// Returns mdBook's table of contents. A page has the title of its first heading.
fn summary(tree: &Tree, contents: &[(&str, Vec<String>)]) -> String {
    let mut summary = String::new();
    for (title, pages) in contents {
        if !title.is_empty() {
            summary += &format!("\n# {title}\n\n");
        }
        for path in pages {
            let heading = tree
                .text(path)
                .lines()
                .find_map(|line| line.strip_prefix("# "));
            let bullet = if title.is_empty() { "" } else { "- " };
            summary += &format!("{bullet}[{}]({path})\n", heading.unwrap_or(path));
        }
    }
    summary
}

/// Copies a file that a page links to and that is no page.
fn copy_linked(page: &File, target: &str, source: &Path) -> Result<()> {
    let path = target.split('#').next().unwrap_or_default();
    let path = format!("{}/{path}", page.folder());
    let Some(path) = normal(path.trim_start_matches('/')) else {
        return Ok(());
    };
    let from = root().join(&path);
    if target.contains("://") || path.ends_with(".md") || !from.is_file() {
        return Ok(());
    }
    write(&source.join(&path), &fs::read(from)?)
}

fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    let folder = path.parent().context("a file lies in a folder")?;
    fs::create_dir_all(folder)?;
    fs::write(path, bytes).with_context(|| path.display().to_string())
}

/// Checks that each link of the site leads to a file in it, and each anchor to an element. Returns the number
/// of links.
fn follow_links(site: &Path) -> Result<usize> {
    let mut pages = HashMap::new();
    collect(site, &mut pages)?;
    let (mut count, mut broken) = (0, Vec::new());
    for (page, text) in &pages {
        let folder = page.parent().unwrap_or(site);
        for link in attributes(text) {
            let is_outside = link.contains(':') || link.starts_with('/') || link.is_empty();
            if is_outside {
                continue;
            }
            count += 1;
            let (path, anchor) = link.split_once('#').unwrap_or((link, ""));
            let to = match path {
                "" => page.clone(),
                path => normalize(&folder.join(path)),
            };
            let is_there = match pages.get(&to) {
                Some(text) => anchor.is_empty() || text.contains(&format!("id=\"{anchor}\"")),
                None => to.exists(),
            };
            if !is_there {
                broken.push(format!("{}: {link}", page.display()));
            }
        }
    }
    ensure!(
        broken.is_empty(),
        "links lead nowhere:\n{}",
        broken.join("\n")
    );
    Ok(count)
}

/// Reads the pages of a site, with its folders.
fn collect(folder: &Path, pages: &mut HashMap<PathBuf, String>) -> Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            collect(&path, pages)?;
        } else if path.extension().is_some_and(|end| end == "html") {
            pages.insert(normalize(&path), fs::read_to_string(&path)?);
        }
    }
    Ok(())
}

/// Returns the values of `href`, `src` and `srcset` in a page.
fn attributes(text: &str) -> impl Iterator<Item = &str> {
    let after = |name| text.split(name).skip(1);
    let values = after(" href=\"")
        .chain(after(" src=\""))
        .chain(after(" srcset=\""));
    values.filter_map(|rest| rest.split('"').next())
}

/// Returns a path without `.` and `..`.
fn normalize(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for part in path.components() {
        match part {
            std::path::Component::ParentDir => drop(normal.pop()),
            std::path::Component::CurDir => {}
            part => normal.push(part),
        }
    }
    normal
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_document_is_a_page_once() {
        let tree = Tree::read(&root()).expect("the tree");
        let contents = contents(&tree);
        let mut pages: Vec<&String> = contents.iter().flat_map(|(_, pages)| pages).collect();
        assert!(pages.iter().all(|path| tree.file(path).is_some()));
        pages.sort();
        let count = pages.len();
        pages.dedup();
        assert_eq!(pages.len(), count);
        let is_page = |file: &File| pages.contains(&&file.path);
        let left: Vec<&str> = (tree.with_ending("md").filter(|file| !is_page(file)))
            .map(|file| file.path.as_str())
            .collect();
        assert!(left.is_empty(), "in no part of the site: {left:?}");
    }

    #[test]
    fn links_that_lead_nowhere_are_named() {
        let folder = std::env::temp_dir().join(format!("lmc-book-{}", std::process::id()));
        let page = r##"<h1 id="one">x</h1><a href="#one">x</a><a href="b/c.html#two">x</a><a href="https://x.y">x</a>"##;
        write(&folder.join("a.html"), page.as_bytes()).expect("space");
        write(
            &folder.join("b/c.html"),
            b"<p id=\"two\"><a href=\"../a.html\">",
        )
        .expect("space");
        let good = follow_links(&folder);
        write(
            &folder.join("d.html"),
            b"<a href=\"e.html\"><a href=\"a.html#no\">",
        )
        .expect("space");
        let bad = follow_links(&folder)
            .expect_err("two links lead nowhere")
            .to_string();
        fs::remove_dir_all(&folder).expect("a folder");
        assert_eq!(good.expect("good links"), 3);
        assert!(
            bad.contains("d.html: e.html") && bad.contains("d.html: a.html#no"),
            "{bad}"
        );
    }
}
