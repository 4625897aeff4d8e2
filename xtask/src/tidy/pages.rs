//! The length of the pages that guide a user.

use super::Findings;
use super::links::prose;
use super::tree::Tree;

/// Pages of the guide, in the order in which a user reads them.
pub(crate) const GUIDE: &[&str] = &[
    "docs/quickstart.md",
    "docs/vllm.md",
    "docs/size.md",
    "docs/deploy.md",
    "docs/operate.md",
    "docs/from-lmcache.md",
    "docs/troubleshoot.md",
];
/// Words that a reader reads in about four minutes.
const TOO_LONG: usize = 800;

/// Every page of the guide exists and is short.
pub(crate) fn lengths(tree: &Tree, findings: &mut Findings) {
    for path in GUIDE {
        let fault = match tree.file(path).map(|file| words(&file.text)) {
            None => format!("{path} does not exist"),
            Some(words) if words > TOO_LONG => {
                format!("{path} has {words} words, expected at most {TOO_LONG}: remove repetition")
            }
            Some(_) => continue,
        };
        findings.faults.push(fault);
    }
}

/// Returns the number of words outside fenced code. Targets of links and the lines of tables do not count.
fn words(text: &str) -> usize {
    let count = |(_, line): (usize, &str)| {
        let targets_out = line
            .split("](")
            .enumerate()
            .map(|(index, part)| match index {
                0 => part,
                _ => part.split_once(')').map_or("", |(_, rest)| rest),
            });
        let plain = targets_out.collect::<Vec<_>>().join("]");
        let is_word = |word: &&str| word.contains(char::is_alphanumeric);
        plain.split_whitespace().filter(is_word).count()
    };
    prose(text).map(count).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_link_targets_and_lines_of_tables_are_no_words() {
        let text = "# One two\n\n```\nnot these\n```\n| three | [four](a b.md#c), five |\n|---|---|\n- six\n";
        assert_eq!(words(text), 6);
    }
}
