//! Links, anchors and paths in documents.

use super::Findings;
use super::tree::{File, Tree, normal};

/// Folders whose paths, where a document names them in code type, must exist.
const OURS: [&str; 4] = ["crates/", "docs/", "xtask/", "fuzz/"];
/// Made when it is needed, so that a document may name it all the same.
const MADE: [&str; 2] = ["fuzz/corpus", "fuzz/artifacts"];

/// Links between our documents lead somewhere, and so do the paths that they name.
pub(crate) fn links(tree: &Tree, findings: &mut Findings) {
    for file in tree.with_ending("md") {
        for (index, target) in link_targets(&file.text) {
            if target.contains("://") || target.starts_with("mailto:") {
                continue;
            }
            if let Some(fault) = broken(tree, file, &target) {
                findings.faults.push(format!("{}: {fault}", file.at(index)));
            }
        }
        for (index, path) in named_paths(&file.text) {
            if !tree.exists(&path) && !MADE.iter().any(|made| path.starts_with(made)) {
                findings
                    .faults
                    .push(format!("{}: {path} does not exist", file.at(index)));
            }
        }
    }
}

fn broken(tree: &Tree, from: &File, target: &str) -> Option<String> {
    let (path, anchor) = target.split_once('#').unwrap_or((target, ""));
    let path = if path.is_empty() {
        from.path.clone()
    } else {
        let Some(path) = normal(&format!("{}/{path}", from.folder()).replace("//", "/"))
            .or_else(|| normal(path))
        else {
            return Some(format!("{target} leads out of the repository"));
        };
        path
    };
    if !tree.exists(&path) {
        return Some(format!("{target} does not exist"));
    }
    let known = anchor.is_empty() || anchors(tree.text(&path)).iter().any(|a| a == anchor);
    (!known).then(|| format!("no heading in {path} for #{anchor}"))
}

/// Lines outside fenced code, with their indices.
pub(super) fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut fenced = false;
    text.lines().enumerate().filter(move |(_, line)| {
        let fence = line.trim_start().starts_with("```");
        fenced ^= fence;
        !fenced && !fence
    })
}

/// Beginnings and ends of targets: of links, and of pictures in HTML.
const TARGETS: [(&str, char); 3] = [("](", ')'), (" src=\"", '"'), (" srcset=\"", '"')];

/// Targets of inline links and of pictures, code left out.
pub(crate) fn link_targets(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (index, line) in prose(text) {
        let plain: String = line.split('`').step_by(2).collect();
        for (begin, end) in TARGETS {
            let targets = plain.split(begin).skip(1);
            let targets = targets.filter_map(|rest| Some(rest.split_once(end)?.0));
            found.extend(targets.map(|target| (index, target.to_owned())));
        }
    }
    found
}

/// Paths from the root in code type: one word that begins with a folder of ours.
fn named_paths(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (index, line) in prose(text) {
        for code in line.split('`').skip(1).step_by(2) {
            let path = code.trim_end_matches('/');
            let pattern = path.contains([' ', '*', '<', '{', '…']);
            if !pattern && OURS.iter().any(|folder| code.starts_with(folder)) {
                found.push((index, path.to_owned()));
            }
        }
    }
    found
}

/// Anchors that a renderer gives to the headings of a document.
fn anchors(text: &str) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    for (_, line) in prose(text) {
        if !line.starts_with('#') {
            continue;
        }
        let title = line.trim_start_matches('#').trim().to_lowercase();
        let kept = title
            .chars()
            .filter(|c| c.is_alphanumeric() || " -_".contains(*c));
        let anchor: String = kept.map(|c| if c == ' ' { '-' } else { c }).collect();
        // A heading that comes again gets a number.
        let earlier = found.iter().filter(|other| **other == anchor).count();
        found.push(if earlier == 0 {
            anchor
        } else {
            format!("{anchor}-{earlier}")
        });
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_and_anchors_are_read_as_renderers_read_them() {
        let text = "# A title, here\n[x](a.md#b) `[no](c.md)`\n```\n[no](d.md)\n# no\n```\n# A title, here\n\
            <source srcset=\"e.png\"> <img src=\"f.png\">\n";
        let targets = [(1, "a.md#b"), (7, "f.png"), (7, "e.png")];
        assert_eq!(
            link_targets(text),
            targets.map(|(at, to)| (at, to.to_owned()))
        );
        assert_eq!(anchors(text), ["a-title-here", "a-title-here-1"]);
    }

    #[test]
    fn broken_links_and_paths_are_found() {
        let tree = Tree::of(&[
            (
                "docs/a.md",
                "# One\n[ok](#one) [ok](../b.md#two)\n[no](b.md)\n[no](../b.md#one)\n`crates/no`",
            ),
            ("b.md", "# Two\n[ok](docs/a.md) [out](../x)"),
        ]);
        let mut findings = Findings::default();
        links(&tree, &mut findings);
        assert_eq!(
            findings.faults,
            [
                "docs/a.md:3: b.md does not exist",
                "docs/a.md:4: no heading in b.md for #one",
                "docs/a.md:5: crates/no does not exist",
                "b.md:2: ../x leads out of the repository",
            ]
        );
    }
}
