//! Files of a package: the program and all that belongs to it, in the folders of a prefix such as `usr`.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::shown;

/// Longest time of a tool that packs files.
pub(super) const LIMIT: Duration = Duration::from_secs(300);

/// A completion script: its shell, and its path under a prefix.
pub(super) type Completion = (&'static str, &'static str);

/// Completions where distributions keep those of packages in `/usr`.
pub(super) const COMPLETIONS: [Completion; 3] = [
    ("bash", "share/bash-completion/completions/lmc"),
    ("zsh", "share/zsh/site-functions/_lmc"),
    ("fish", "share/fish/vendor_completions.d/lmc.fish"),
];

/// The board for Grafana and the alert rules for Prometheus, with their paths under a prefix.
const MONITORING: [(&str, &str); 2] = [
    ("packaging/grafana/lmc.json", "share/lmc/grafana/lmc.json"),
    (
        "packaging/prometheus/lmc.rules.yml",
        "share/lmc/prometheus/lmc.rules.yml",
    ),
];

/// Writes the program, its manual pages, its completions, and what monitors it under a prefix.
pub(super) fn write(program: &Path, prefix: &Path, completions: &[Completion]) -> Result<()> {
    put(&fs::read(program)?, &prefix.join("bin/lmc"), 0o755)?;
    let pages = prefix.join("share/man/man1");
    folder(&pages)?;
    run(Command::new(program).args(["man", "--folder"]).arg(&pages))?;
    for page in fs::read_dir(&pages)? {
        fs::set_permissions(page?.path(), fs::Permissions::from_mode(0o644))?;
    }
    for (shell, path) in completions {
        let script = run(Command::new(program).args(["completions", shell]))?;
        put(script.as_bytes(), &prefix.join(path), 0o644)?;
    }
    for (from, to) in MONITORING {
        copy(from, &prefix.join(to), 0o644)?;
    }
    Ok(())
}

/// Writes a file with a mode that depends on no umask, and the folders above it.
pub(super) fn put(bytes: &[u8], path: &Path, mode: u32) -> Result<()> {
    folder(path.parent().context("a file lies in a folder")?)?;
    fs::write(path, bytes).with_context(|| path.display().to_string())?;
    fs::set_permissions(path, fs::Permissions::from_mode(mode))?;
    Ok(())
}

/// Copies a file of the repository.
pub(super) fn copy(from: &str, to: &Path, mode: u32) -> Result<()> {
    put(&fs::read(from).with_context(|| from.to_owned())?, to, mode)
}

/// Makes a folder, and those above it, which every user can read.
fn folder(path: &Path) -> Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    folder(path.parent().context("a folder lies in another")?)?;
    fs::create_dir(path).with_context(|| path.display().to_string())?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))?;
    Ok(())
}

/// Runs a command. Returns what it printed.
pub(super) fn run(command: &mut Command) -> Result<String> {
    shown::capture(command, LIMIT)
}

/// Returns the time of the commit that is checked out, in seconds since 1970, which every file of a
/// package has; 0 for sources without git.
pub(super) fn commit_time() -> u64 {
    let time = run(Command::new("git").args(["log", "-1", "--format=%ct"]));
    time.ok()
        .and_then(|time| time.trim().parse().ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_depend_on_no_umask() {
        let top = std::env::temp_dir().join(format!("lmc-tree-{}", std::process::id()));
        let file = top.join("a/b/c");
        put(b"text", &file, 0o640).expect("a file");
        let mode = |path: &Path| {
            let about = fs::metadata(path).expect("it is there");
            about.permissions().mode() & 0o777
        };
        assert_eq!(mode(&file), 0o640);
        assert_eq!(mode(&top.join("a/b")), 0o755);
        fs::remove_dir_all(top).expect("it is ours");
    }
}
