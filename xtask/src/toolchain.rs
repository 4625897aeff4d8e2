//! The Rust toolchain whose warnings are errors.

use std::process::Command;

/// The Rust of whose warnings and lints the tree is free. A later one has lints that this one
/// lacks, so its warnings are shown and do not fail a run.
const CHECKED: &str = "1.95";

/// Returns true if a warning fails a run.
pub(crate) fn denies_warnings() -> bool {
    let version = Command::new("rustc").arg("--version").output();
    version.is_ok_and(|said| is_checked(&String::from_utf8_lossy(&said.stdout)))
}

fn is_checked(version: &str) -> bool {
    let number = version.strip_prefix("rustc ").unwrap_or_default();
    let minor = number.strip_prefix(CHECKED).unwrap_or_default();
    minor.starts_with('.') && !number.contains("-nightly")
}

/// Returns the note of a run in which warnings do not fail.
pub(crate) fn note() -> String {
    format!(
        "warnings did not fail this run, because they are errors under Rust {CHECKED} only: \
         raise CHECKED in xtask/src/toolchain.rs once the tree is free of a newer one's"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A new stable toolchain brings new lints, which once failed a run without a change of ours.
    #[test]
    fn warnings_of_other_toolchains_fail_nothing() {
        assert!(is_checked("rustc 1.95.0 (59807616e 2026-04-14)"));
        assert!(is_checked("rustc 1.95.1"));
        for other in [
            "rustc 1.96.0",
            "rustc 1.9.5",
            "rustc 1.95.0-nightly",
            "rustc 1.950.0",
            "",
        ] {
            assert!(!is_checked(other), "{other}");
        }
    }
}
