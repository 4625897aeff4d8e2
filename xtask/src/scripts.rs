//! The scripts in `xtask/python` that set up what checks need.

use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

/// Exit status of a script where something cannot be had on this machine.
const NOT_TO_BE_HAD: i32 = 75;
/// Seconds in which a script must have installed and fetched what it is for.
const LIMIT: &str = "1200";
/// Exit status of `timeout` when the time was over.
const TIMED_OUT: i32 = 124;

/// Something that this machine cannot get, with the reason; any other error is a fault.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct NotToBeHad(pub(crate) String);

/// Runs a script, shows what it logs, and returns the last line that it printed.
///
/// # Errors
/// [`NotToBeHad`], or the script failed.
pub(crate) fn set_up(script: &str, args: &[&str]) -> Result<String> {
    let done = Command::new("timeout")
        .args(["--kill-after=10", LIMIT, "bash", script])
        .args(args)
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .context("cannot run timeout and bash")?;
    let said = String::from_utf8_lossy(&done.stdout);
    let last = said.lines().last().unwrap_or_default().to_owned();
    match done.status.code() {
        Some(0) => Ok(last),
        Some(NOT_TO_BE_HAD) => bail!(NotToBeHad(last)),
        Some(TIMED_OUT) => bail!(NotToBeHad(format!("{script} was not done in {LIMIT} s"))),
        _ => bail!("{script} failed: see above"),
    }
}

/// Prints that checks cannot run here, as `cargo xtask lab` counts it. Always true: nothing has
/// failed.
pub(crate) fn skipped(checks: &str, why: &anyhow::Error) -> bool {
    println!("SKIPPED {checks}: {why:#}");
    println!("0 passed, 0 failed, 1 skipped");
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::path::PathBuf;

    /// Makes a folder that stands for a machine: its only programs are those given as scripts,
    /// and a few of this machine's.
    struct Machine(PathBuf);

    impl Machine {
        fn with(name: &str, programs: &[(&str, &str)]) -> Self {
            use std::os::unix::fs::{PermissionsExt, symlink};
            let folder = std::env::temp_dir().join(format!("lmc-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&folder);
            let bin = folder.join("bin");
            fs::create_dir_all(&bin).expect("a temporary folder");
            for own in [
                "bash", "cat", "cut", "dirname", "env", "flock", "grep", "head", "id",
            ]
            .into_iter()
            .chain(["mkdir", "rm", "sed", "sh", "sha256sum", "touch"])
            {
                let paths = std::env::var_os("PATH").expect("a PATH");
                let found = std::env::split_paths(&paths).map(|path| path.join(own));
                let found = found.into_iter().find(|path| path.exists());
                symlink(found.expect(own), bin.join(own)).expect("a link");
            }
            for (program, script) in programs {
                let path = bin.join(program);
                // Written through a link, it would replace this machine's own program.
                let _ = fs::remove_file(&path);
                fs::write(&path, format!("#!/bin/sh\n{script}\n")).expect("a file");
                let executable = fs::Permissions::from_mode(0o755);
                fs::set_permissions(&path, executable).expect("a mode");
            }
            Self(folder)
        }

        /// Exit status and last line of a script that runs there.
        fn runs(&self, script: &str, args: &[&str]) -> (Option<i32>, String) {
            let done = Command::new("bash")
                .arg(crate::root().join(script))
                .args(args)
                .env("PATH", self.0.join("bin"))
                .env("LMC_CACHE_DIR", self.0.join("cache"))
                .env_remove("LIBCLANG_PATH")
                .stdin(Stdio::null())
                .output()
                .expect("bash runs");
            let said = String::from_utf8_lossy(&done.stdout);
            let last = said.lines().last().unwrap_or_default().to_owned();
            (done.status.code(), last)
        }
    }

    impl Drop for Machine {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    const VLLM: &str = "xtask/python/setup.sh";
    const NIXL: &str = "xtask/python/nixl.sh";
    const WHEEL: &str = "xtask/python/wheel.sh";
    const KUBERNETES: &str = "xtask/python/kubernetes.sh";
    const DEBIAN: &str = "xtask/python/debian.sh";

    /// A machine with another Python, without a registry or without apt-get once failed the run.
    #[test]
    fn what_cannot_be_had_is_not_a_fault() {
        let says_no = "case \"$*\" in *'-m pip'*|*install*) echo refused >&2; exit 1;; esac";
        // `python -m venv FOLDER` makes the program that pip is run with.
        let venv =
            "case \"$*\" in '-m venv'*) mkdir -p \"$3/bin\"; cp \"$0\" \"$3/bin/python\";; esac";
        let offline = format!("{says_no}; {venv}");
        let other = "case \"$*\" in *'(3, 11)'*) exit 1;; esac";
        let old = "case \"$*\" in *'(3, 10)'*) exit 1;; esac";
        let root = ("id", "echo 0");
        for (name, programs, script, wanted) in [
            ("no-python", vec![], VLLM, "apt-get"),
            (
                "python-3.14",
                vec![("python3", other), ("apt-get", ":"), root],
                VLLM,
                "3.11",
            ),
            (
                "no-pypi",
                vec![("python3", &*offline), ("cp", "exec /bin/cp \"$@\"")],
                VLLM,
                "pip",
            ),
            (
                "no-pypi",
                vec![("python3", &*offline), ("cp", "exec /bin/cp \"$@\"")],
                NIXL,
                "pip",
            ),
            (
                "no-pypi",
                vec![("python3", &*offline), ("cp", "exec /bin/cp \"$@\"")],
                WHEEL,
                "pip",
            ),
            (
                "no-pypi",
                vec![("python3", &*offline), ("cp", "exec /bin/cp \"$@\"")],
                KUBERNETES,
                "pip",
            ),
            ("no-apt", vec![root], DEBIAN, "apt-get"),
            ("no-root", vec![("id", "echo 1000")], DEBIAN, "root"),
            (
                "python-3.9",
                vec![("python3", old), ("apt-get", ":"), root],
                WHEEL,
                "3.10",
            ),
            (
                "no-debian",
                vec![("apt-get", says_no), root],
                NIXL,
                "apt-get",
            ),
        ] {
            let machine = Machine::with(name, &programs);
            let (status, reason) = machine.runs(script, &["2.28"]);
            assert_eq!(status, Some(NOT_TO_BE_HAD), "{name}: {reason}");
            assert!(reason.contains(wanted), "{name}: {reason}");
        }
    }
}
