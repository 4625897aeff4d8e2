//! Commands that are shown as they run, and end by a deadline.

use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

/// A command as it would be typed.
pub(crate) fn typed(command: &Command) -> String {
    let mut words: Vec<String> = command
        .get_envs()
        .filter_map(|(key, value)| Some((key.to_str()?, value?.to_str()?)))
        .map(|(key, value)| format!("{key}={}", quoted(value)))
        .collect();
    words.push(quoted(&command.get_program().to_string_lossy()));
    words.extend(command.get_args().map(|arg| quoted(&arg.to_string_lossy())));
    words.join(" ")
}

fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,@+%".contains(c);
    match !word.is_empty() && word.chars().all(plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

/// Shows a command and runs it to its end. What it prints comes back.
pub(crate) fn output(command: &mut Command, limit: Duration) -> Result<String> {
    println!("$ {}", typed(command));
    capture(command, limit)
}

/// Runs a command to its end as [`output`] does, without showing it.
pub(crate) fn capture(command: &mut Command, limit: Duration) -> Result<String> {
    let name = typed(command);
    let (mut reader, writer) = std::io::pipe()?;
    command
        .stdin(Stdio::null())
        .stdout(writer.try_clone()?)
        .stderr(writer);
    let child = command.spawn();
    // The command holds the pipe's other ends, and is not ours to drop.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = child.with_context(|| format!("cannot run {name}"))?;
    let text = thread::spawn(move || {
        let mut text = Vec::new();
        let _ = std::io::Read::read_to_end(&mut reader, &mut text);
        String::from_utf8_lossy(&text).into_owned()
    });
    let status = wait(&mut child, limit).with_context(|| name.clone())?;
    let text = text.join().unwrap_or_default();
    ensure!(status.success(), "{name}: {status}: {}", text.trim());
    Ok(text)
}

/// Waits for a process, and kills it when the time is over.
pub(crate) fn wait(child: &mut Child, limit: Duration) -> Result<ExitStatus> {
    let begun = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        if begun.elapsed() > limit {
            end(child);
            bail!("not done after {limit:?}");
        }
        thread::sleep(Duration::from_millis(10));
    }
}

/// Kills a process that may have ended already.
pub(crate) fn end(child: &mut Child) {
    let _ = child.kill();
    let _ = child.wait();
}

/// Returns the number of tests that passed in the output of one run of `cargo test`.
pub(crate) fn passed(said: &str) -> Result<u32> {
    let counts = said.lines().filter_map(|line| {
        let rest = line.strip_prefix("test result: ok. ")?;
        rest.split(" passed").next()?.parse::<u32>().ok()
    });
    let counts: Vec<u32> = counts.collect();
    let ran = !counts.is_empty() && !counts.contains(&0);
    ensure!(ran, "a program of tests ran none: {counts:?}");
    Ok(counts.iter().sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_shown_so_that_a_shell_takes_it() {
        let mut command = Command::new("sh");
        command
            .args(["-c", "echo 'a b'"])
            .env("UCX_MODULES", "^efa");
        assert_eq!(
            typed(&command),
            r"UCX_MODULES='^efa' sh -c 'echo '\''a b'\'''"
        );
        let text = capture(&mut command, Duration::from_secs(20)).expect("sh runs");
        assert_eq!(text, "a b\n");
    }

    #[test]
    fn a_command_that_hangs_is_ended() {
        let mut command = Command::new("sleep");
        command.arg("60");
        let error = capture(&mut command, Duration::from_millis(50)).expect_err("it is too slow");
        assert!(
            format!("{error:#}").contains("not done after 50ms"),
            "{error:#}"
        );
    }
}
