//! Escaping of text from outside, for one line of a log or table.

use std::fmt;

/// Displays text that a peer chose on one line. Characters that end a line, move a terminal's cursor or
/// change the writing direction become `\n`, `\u001b` and the like, which JSON parsers read too.
///
/// ```
/// use lmc_key::Printable;
///
/// let name = "m\nWARN all chunks lost\u{1b}[2J";
/// assert_eq!(Printable(name).to_string(), r"m\nWARN all chunks lost\u001b[2J");
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Printable<'a>(pub &'a str);

impl fmt::Display for Printable<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for part in self.0.split_inclusive(is_hidden) {
            let mut chars = part.chars();
            match chars.next_back().filter(|&last| is_hidden(last)) {
                None => f.write_str(part)?,
                Some(last) => {
                    f.write_str(chars.as_str())?;
                    match last {
                        '\n' => f.write_str("\\n")?,
                        '\r' => f.write_str("\\r")?,
                        '\t' => f.write_str("\\t")?,
                        // All hidden characters are below U+10000.
                        last => write!(f, "\\u{:04x}", u32::from(last))?,
                    }
                }
            }
        }
        Ok(())
    }
}

/// Returns true for a character that can make a screen show text other than what was written.
fn is_hidden(c: char) -> bool {
    c.is_control()
        || matches!(
            c,
            // Line and paragraph separators; marks, embeddings, overrides and isolates of direction.
            '\u{2028}' | '\u{2029}' | '\u{061c}' | '\u{200e}' | '\u{200f}'
            | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
        )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shown_is_one_line_that_hides_nothing() {
        let check = |text: &str, shown: &str| assert_eq!(Printable(text).to_string(), shown);
        check("", "");
        check(
            "Qwen/Qwen3-8B \"é\" \\n 模型",
            "Qwen/Qwen3-8B \"é\" \\n 模型",
        );
        check("a\nb\r\n\tc", "a\\nb\\r\\n\\tc");
        check(
            "\u{1b}[31m\u{7f}\u{9b}2J\0",
            "\\u001b[31m\\u007f\\u009b2J\\u0000",
        );
        check("a\u{202e}b\u{2028}", "a\\u202eb\\u2028");
    }
}
