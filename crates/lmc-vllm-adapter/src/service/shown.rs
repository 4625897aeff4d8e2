//! Names from outside in log lines.

/// Most characters of a name from outside in a log line.
const SHOWN: usize = 128;

/// Returns the start of a name from outside.
pub(super) fn shown(name: &str) -> &str {
    let end = name.char_indices().nth(SHOWN);
    &name[..end.map_or(name.len(), |(at, _)| at)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_name_is_shown_in_part() {
        assert_eq!(shown("request"), "request");
        let long = "é".repeat(200);
        assert_eq!(shown(&long).chars().count(), SHOWN);
    }
}
