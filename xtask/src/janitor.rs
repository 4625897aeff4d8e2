//! Undoes what was set up on the machine, also when this process is stopped or killed.

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, Stdio};

use anyhow::{Context, Result};

/// Reads commands, and runs them, the last one first, when its input ends.
const SCRIPT: &str = r#"todo=; while IFS= read -r line; do todo="$line
$todo"; done; eval "$todo""#;

/// A shell that waits for the end of its input, which comes with the end of this process.
pub(crate) struct Janitor {
    shell: Child,
    input: Option<ChildStdin>,
}

impl Janitor {
    /// Begins with nothing to undo.
    pub(crate) fn new() -> Result<Self> {
        let mut shell = Command::new("sh")
            .args(["-c", SCRIPT])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // Ctrl-C goes to the terminal's group; this one shall outlive it.
            .process_group(0)
            .spawn()
            .context("cannot run sh")?;
        let input = shell.stdin.take();
        Ok(Self { shell, input })
    }

    /// Adds a command, one line of shell, to be run in the end. Said before the thing that it
    /// undoes is done.
    pub(crate) fn in_the_end(&mut self, command: &str) -> Result<()> {
        let input = self.input.as_mut().context("the janitor is at work")?;
        writeln!(input, "{command}").context("the janitor is gone")
    }
}

impl Drop for Janitor {
    fn drop(&mut self) {
        drop(self.input.take());
        let _ = self.shell.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_done_is_undone_the_last_first() {
        let file = std::env::temp_dir().join(format!("lmc-janitor-{}", std::process::id()));
        let mut janitor = Janitor::new().expect("sh is there");
        for word in ["one", "two"] {
            let command = format!("echo {word} >> '{}'", file.display());
            janitor.in_the_end(&command).expect("it listens");
        }
        assert!(!file.exists(), "it waits");
        drop(janitor);
        let text = std::fs::read_to_string(&file).expect("it ran");
        let _ = std::fs::remove_file(&file);
        assert_eq!(text, "two\none\n");
    }
}
