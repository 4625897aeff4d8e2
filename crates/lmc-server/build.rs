//! Tells the crate which commit it is built from, as `BUILD_COMMIT`, and by which compiler, as
//! `BUILD_RUSTC`.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!(
        "cargo:rustc-env=BUILD_COMMIT={}",
        commit().unwrap_or_default()
    );
    println!(
        "cargo:rustc-env=BUILD_RUSTC={}",
        rustc().unwrap_or_default()
    );
}

/// The commit that is checked out; `None` for sources that came without git, or that lie unknown
/// to it inside another repository.
fn commit() -> Option<String> {
    git(&["ls-files", "--error-unmatch", "build.rs"])?;
    // Written by every commit, checkout and rebase; the script runs again when they change. A path
    // that is not there would make it run at every build.
    for file in ["HEAD", "logs/HEAD"] {
        let path = git(&["rev-parse", "--git-path", file])?;
        if Path::new(&path).exists() {
            println!("cargo:rerun-if-changed={path}");
        }
    }
    git(&["rev-parse", "--short=12", "HEAD"])
}

/// The version of the compiler, such as 1.90.0.
fn rustc() -> Option<String> {
    let said = run(&std::env::var("RUSTC").ok()?, &["--version"])?;
    said.split_whitespace().nth(1).map(str::to_owned)
}

fn git(args: &[&str]) -> Option<String> {
    run("git", args)
}

/// Returns the output of a command in this folder; `None` when it fails or is not installed.
fn run(program: &str, args: &[&str]) -> Option<String> {
    let output = Command::new(program).args(args).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    let text = text.trim();
    (output.status.success() && !text.is_empty()).then(|| text.to_owned())
}
