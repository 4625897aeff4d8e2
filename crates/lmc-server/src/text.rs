//! Texts that every command prints.

/// Returns the version, with the commit if it is known.
pub(crate) fn version() -> String {
    let version = env!("CARGO_PKG_VERSION");
    match env!("BUILD_COMMIT") {
        "" => version.to_owned(),
        commit => format!("{version} (commit {commit})"),
    }
}

/// Returns an error with its causes, each once: a context often already ends with the text of an I/O error.
pub(crate) fn error_text(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain() {
        let cause = cause.to_string();
        if text.contains(&cause) {
            continue;
        }
        if !text.is_empty() {
            text.push_str(": ");
        }
        text.push_str(&cause);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cause_of_an_error_is_said_once() {
        let refused = || std::io::Error::from_raw_os_error(111);
        let twice = anyhow::Error::new(refused()).context(format!("http: {}", refused()));
        let twice = twice.context("no server answers");
        let expected = format!("no server answers: http: {}", refused());
        assert_eq!(error_text(&twice), expected);
        let chain = anyhow::anyhow!("c").context("b").context("a");
        assert_eq!(error_text(&chain), "a: b: c");
    }
}
