//! Sentences of doc comments whose pronouns stand for no noun.

use super::Findings;
use super::tree::Tree;
use super::words::doc_text;

/// Words that may stand in for a noun.
const PRONOUNS: &[&str] = &[
    "one", "those", "that", "such", "all", "others", "what", "them", "which",
];

/// Words before a pronoun that are no noun which it could belong to.
const BEFORE: &[&str] = &[
    "", ",", ";", ".", "of", "for", "to", "from", "by", "with", "in", "on", "at", "than", "and",
    "or", "but", "as", "if", "the", "an", "a", "only", "also", "is", "are", "was", "were", "be",
    "not", "then", "so", "until", "while", "when", "where", "because", "before", "after",
    "between", "under", "over", "into", "each", "any", "every", "both",
];

/// Words after it with which it is no adjective: `one chunk` is fine, `one of` is not.
const AFTER: &[&str] = &[
    "", ",", ";", ".", "of", "that", "which", "who", "in", "to", "for", "with", "is", "are", "was",
    "were", "has", "have", "may", "can", "must", "by", "at", "on", "from", "and", "or", "as",
    "than", "but", "goes", "comes", "it", "they",
];

/// Most sentences of the whole tree that have one such pronoun. This number is only ever lowered.
const MOST_WITH_ONE: usize = 986;

/// A sentence has at most one pronoun that stands for no noun, and few sentences have one.
pub(crate) fn nouns(tree: &Tree, findings: &mut Findings) {
    let hint = "two pronouns stand for no noun: name what they stand for";
    let mut with_one = 0;
    for file in tree.with_ending("rs") {
        let (found, others) = sentences(file);
        let faults = found.into_iter();
        let faults = faults.map(|sentence| format!("{sentence} ({hint})"));
        findings.faults.extend(faults);
        with_one += others;
    }
    if with_one > MOST_WITH_ONE {
        findings.faults.push(format!(
            "{with_one} sentences of doc comments have a pronoun that stands for no noun, at most {MOST_WITH_ONE} \
             are allowed: name what the pronoun of a new sentence stands for"
        ));
    }
}

/// Returns the faults of a file, each with its line, and the number of sentences that have one such pronoun.
fn sentences(file: &super::tree::File) -> (Vec<String>, usize) {
    let mut found = Vec::new();
    let mut with_one = 0;
    let mut paragraph = String::new();
    let mut began = 0;
    for (index, line) in file.text.lines().chain([""]).enumerate() {
        match doc_text(line).filter(|text| !text.is_empty() && !text.starts_with('|')) {
            Some(text) => {
                if paragraph.is_empty() {
                    began = index;
                }
                paragraph += text;
                paragraph.push(' ');
            }
            None => {
                let paragraph = std::mem::take(&mut paragraph);
                for sentence in split(&paragraph) {
                    match pronouns(sentence) {
                        0 => {}
                        1 => with_one += 1,
                        _ => found.push(format!("{}: {sentence}", file.at(began))),
                    }
                }
            }
        }
    }
    (found, with_one)
}

/// Returns the sentences of a paragraph, and the parts between colons and semicolons.
fn split(paragraph: &str) -> impl Iterator<Item = &str> {
    let sentences = paragraph.split(". ");
    let parts = sentences.flat_map(|sentence| sentence.split("; "));
    parts.flat_map(|part| part.split(": "))
}

/// Counts the pronouns of a sentence that have no noun.
fn pronouns(sentence: &str) -> usize {
    let tokens = tokens(sentence);
    let at = |index: usize| tokens.get(index).map_or("", String::as_str);
    (0..tokens.len())
        .filter(|&index| {
            let before = if index == 0 { "" } else { at(index - 1) };
            let of_several = before == "of" && ["them", "which"].contains(&at(index));
            PRONOUNS.contains(&at(index))
                && !of_several
                && BEFORE.contains(&before)
                && AFTER.contains(&at(index + 1))
        })
        .count()
}

/// Returns the words of a sentence in lower case, and its commas and stops.
fn tokens(sentence: &str) -> Vec<String> {
    let mut tokens = vec![String::new()];
    for c in sentence.chars() {
        match c {
            ',' | ';' | '.' => tokens.extend([c.to_string(), String::new()]),
            c if c.is_alphanumeric() || "_'".contains(c) => {
                let last = tokens.last_mut().expect("it begins with one");
                last.extend(c.to_lowercase());
            }
            _ => tokens.push(String::new()),
        }
    }
    tokens.retain(|token| !token.is_empty());
    tokens
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_pronouns_without_a_noun_are_found() {
        for (text, expected) in [
            ("Names of those that came, and all that come.", 2),
            ("Reads one chunk with one request, that of the prompt.", 1),
            ("Returns the chunks that a peer has.", 0),
        ] {
            assert_eq!(pronouns(text), expected, "{text}");
        }
    }

    #[test]
    fn a_sentence_may_go_over_lines() {
        let text =
            "/// Names of those that\n/// are there, and all that\n/// come. Fine.\nfn f() {}\n";
        let tree = Tree::of(&[("crates/a/src/lib.rs", text)]);
        let found = tree.with_ending("rs").map(sentences);
        let found: Vec<String> = found.flat_map(|(found, _)| found).collect();
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(
            found[0].starts_with("crates/a/src/lib.rs:1: Names of those"),
            "{found:?}"
        );
    }
}
