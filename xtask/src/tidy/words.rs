//! Words that the glossary of docs/words.md replaced, and doc comments that do not stand alone.

use super::Findings;
use super::tree::{File, Tree};

/// Words of the old dialect, in prose and as parts of names, with the words to use instead.
const WORDS: &[(&str, &str)] = &[
    ("place", "offset, index, slot, location"),
    ("places", "offsets, indices, slots, locations"),
    ("placed", "stored, located"),
    ("room", "capacity, free space, permit"),
    ("rooms", "capacity, free space, permits"),
    ("quiet", "idle, released"),
    ("rising", "promoting"),
    ("risen", "promoted"),
    ("told", "reported, notified, named"),
    ("door", "handshake limiter"),
    ("greet", "accept"),
    ("fate", "fault"),
    ("befall", "inject"),
    ("bury", "remove, free"),
    ("tired", "expired"),
    ("outlast", "outlive"),
    ("patience", "timeout, deadline"),
    ("anew", "again"),
    ("nobody", "no thread, no process, no user"),
    ("somebody", "another process, another user"),
    ("whoever", "the caller, the thread that"),
    ("whomever", "the caller, the thread that"),
];

/// Uses of those words that stay: names of the standard library, phrases without another word.
const ALLOWED: &[&str] = &[
    "in place",
    "in_place",
    "takes place",
    "placeholder",
    "release_proven_quiet",
    "--quiet",
    // A variable of OpenMP.
    "OMP_PLACES",
    // Names in JSON and in metrics.
    "evicted_room",
    "chunks_no_room",
    "no_room\"",
    "reason=\\\"room",
    "reason=\"room\"",
];

/// First words of a doc comment that makes no sense without its neighbours.
const OPENINGS: &[&str] = &[
    "Whether",
    "What",
    "Who",
    "Whom",
    "Whose",
    "Where",
    "How",
    "Their",
    "Its",
    "It",
    "They",
    "Them",
    "Those",
    "These",
    "That",
    "The same",
    "Of",
    "By",
    "One of them",
    "One that",
    "All of them",
    "All of it",
    "As before",
    "Since when",
    "From when",
    "From now on",
    "For people",
    "For programs",
    "None yet",
    "Not known yet",
    "To be",
    "Here",
    "So",
];

/// Phrases of the old dialect, in any text, with the words to use instead.
const PHRASES: &[(&str, &str)] = &[
    ("come up", "promoted"),
    ("comes up", "promoted"),
    ("came up", "promoted"),
    ("coming up", "promoted"),
    ("go down", "written through, demoted"),
    ("goes down", "written through, demoted"),
    ("went down", "written through, demoted"),
    ("did not want", "declined"),
];

/// Texts use the glossary's words, and doc comments begin with a line that stands alone.
pub(crate) fn plain(tree: &Tree, findings: &mut Findings) {
    let files = ["rs", "md", "py"]
        .into_iter()
        .flat_map(|e| tree.with_ending(e));
    for file in files {
        // The names of code that is gone, and this file's own lists.
        let quotes = ["docs/removed.md", "xtask/src/tidy/words.rs"];
        if quotes.contains(&file.path.as_str()) {
            continue;
        }
        check(file, findings);
    }
}

fn check(file: &File, findings: &mut Findings) {
    let mut in_doc = false;
    for (index, line) in file.text.lines().enumerate() {
        let doc = doc_text(line);
        if let Some(text) = doc.filter(|_| !in_doc)
            && let Some(opening) = OPENINGS.iter().find(|opening| begins_with(text, opening))
        {
            findings.faults.push(format!(
                "{}: a doc comment that begins with {opening:?}; begin with the subject, or with a \
                 verb (Returns, Writes)",
                file.at(index)
            ));
        }
        in_doc = doc.is_some();
        if let Some(opening) = metric_help(line)
            .and_then(|help| OPENINGS.iter().find(|opening| begins_with(help, opening)))
        {
            findings.faults.push(format!(
                "{}: the help of a metric that begins with {opening:?}; it is shown alone, so \
                 begin with the thing that is counted",
                file.at(index)
            ));
        }
        for (phrase, instead) in PHRASES {
            if line.contains(phrase) {
                findings.faults.push(format!(
                    "{}: {phrase:?}; the glossary has: {instead}",
                    file.at(index)
                ));
            }
        }
        let mut rest = line.to_owned();
        for allowed in ALLOWED {
            rest = rest.replace(allowed, "");
        }
        for word in words(&rest) {
            if let Some((word, instead)) = WORDS.iter().find(|(old, _)| *old == word) {
                findings.faults.push(format!(
                    "{}: {word:?}; the glossary has: {instead}",
                    file.at(index)
                ));
            }
        }
    }
}

/// The text of a line of a doc comment.
pub(super) fn doc_text(line: &str) -> Option<&str> {
    let line = line.trim_start();
    let text = line.strip_prefix("///").or(line.strip_prefix("//!"))?;
    (!text.starts_with('/')).then_some(text.trim_start())
}

/// The help of a metric in a line that declares one: the string after its kind.
fn metric_help(line: &str) -> Option<&str> {
    let after = ["gauge", "counter"].into_iter().find_map(|kind| {
        let (_, rest) = line.split_once(&format!("{kind} \""))?;
        Some(rest)
    });
    let quoted = ["\"gauge\", \"", "\"counter\", \""];
    let in_tuple = || {
        quoted
            .into_iter()
            .find_map(|kind| Some(line.split_once(kind)?.1))
    };
    let in_table = || {
        let mut cells = line.strip_prefix("| `lmc")?.split(" | ").skip(1);
        let kind = cells.next()?;
        (kind.starts_with("gauge") || kind.starts_with("counter")).then(|| cells.next())?
    };
    after.or_else(in_tuple).or_else(in_table)
}

fn begins_with(text: &str, opening: &str) -> bool {
    let rest = text.strip_prefix(opening);
    rest.is_some_and(|rest| !rest.starts_with(|c: char| c.is_alphanumeric()))
}

/// The words of a line in lower case, those inside of names among them: `NoRoom` and `no_room` are
/// two words each.
fn words(line: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut previous = ' ';
    for c in line.chars() {
        let new_name = c.is_uppercase() && !previous.is_uppercase();
        if !c.is_alphabetic() || new_name {
            words.push(String::new());
        }
        if c.is_alphabetic() {
            let last = words.last_mut().expect("it begins with one");
            last.extend(c.to_lowercase());
        }
        previous = c;
    }
    words.retain(|word| !word.is_empty());
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    fn faults(text: &str) -> usize {
        let mut findings = Findings::default();
        let tree = Tree::of(&[("crates/new/src/lib.rs", text)]);
        plain(&tree, &mut findings);
        findings.faults.len()
    }

    #[test]
    fn old_words_are_found_in_prose_and_in_names() {
        for (text, wanted) in [
            ("// Nobody knows.", 1),
            ("fn no_room() -> NoRoom {", 2),
            ("struct Place;", 1),
            (
                "ptr::drop_in_place(x); // replaced in place, a placeholder",
                0,
            ),
            ("slot.release_proven_quiet();", 0),
            ("/// Whether it is.", 1),
            ("/// Returns it.\n/// What follows is the same comment.", 0),
            ("/// Itself, which is another word.", 0),
            ("/// Of the request.", 1),
            (
                "    (\"lmc_a\", \"gauge\", \"Their bytes.\", |t| t.bytes),",
                1,
            ),
            ("    \"lmc_a\" counter \"Its bytes.\" = |s| s.bytes;", 1),
            ("| `lmc_a` | gauge, by `tier` | Their bytes. |", 1),
            (
                "    \"lmc_a\" counter \"Bytes of chunks.\" = |s| s.bytes;",
                0,
            ),
            ("// Chunks that came up into memory.", 1),
        ] {
            assert_eq!(faults(text), wanted, "{text}");
        }
    }
}
