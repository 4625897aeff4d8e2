//! A `/dev/shm` for one test alone.

use std::os::unix::fs::MetadataExt;
use std::process::Command;

use crate::test_arguments;

const VARIABLE: &str = "LMC_TEST_OWN_SHM";

/// Returns true if this process runs as root.
pub fn is_root() -> bool {
    std::fs::metadata("/proc/self").is_ok_and(|process| process.uid() == 0)
}

/// Runs `inside` in a process of its own, in a mount namespace with a new tmpfs over `/dev/shm`.
/// Other tests, whose servers reclaim the segments of killed servers, do not see its segments.
/// `options` are the mount options, `test` is the test that calls this.
///
/// Prints that the test was skipped if there are no namespaces.
///
/// # Panics
/// When the test fails in that process.
pub fn with_own_shm(options: &str, test: impl Fn(), inside: fn()) {
    if std::env::var_os(VARIABLE).is_some() {
        return inside();
    }
    let this = std::env::current_exe().expect("a test has a path");
    let script = format!(
        "mount -t tmpfs -o {options} tmpfs /dev/shm || exit 77; exec {} {}",
        this.display(),
        test_arguments(test).join(" ")
    );
    // Root needs no user namespace, and keeps the other users.
    let user: &[&str] = match is_root() {
        true => &[],
        false => &["--user", "--map-root-user"],
    };
    let run = Command::new("unshare")
        .args(user)
        .args(["--mount", "sh", "-c", &script])
        .env(VARIABLE, "1")
        .output();
    match run {
        Ok(out) if out.status.success() => {
            print!("{}", String::from_utf8_lossy(&out.stdout));
        }
        Ok(out) if out.status.code() == Some(77) || !out.stdout.starts_with(b"\nrunning") => {
            println!(
                "skipped: no mount namespace here ({})",
                String::from_utf8_lossy(&out.stderr)
            );
        }
        Ok(out) => panic!(
            "{}\n{}\n{}",
            out.status,
            String::from_utf8_lossy(&out.stdout),
            String::from_utf8_lossy(&out.stderr)
        ),
        Err(err) => println!("skipped: unshare cannot be run: {err}"),
    }
}
