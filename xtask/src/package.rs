//! `cargo xtask package`: what operators install, in target/packages, with its checksums.
//!
//! Archive and Debian package hold the program of the wheel, which is linked for an old glibc, and its
//! pages and completions, which the program prints itself.

mod archive;
mod deb;
mod tree;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result};

use crate::scripts::{self, NotToBeHad};
use crate::wheel::{self, GLIBC};
use crate::{packages, shown, target};

/// File of checksums beside the packages.
const SUMS: &str = "SHA256SUMS";

/// Build what operators install: an archive, a Debian package with a service, and the wheel
///
/// The packages and their checksums are in target/packages.
#[derive(Debug, clap::Args)]
pub(crate) struct PackageArgs {
    /// Check what was built: its contents, and that it installs and starts
    #[arg(long)]
    check: bool,
}

/// Builds the packages, and checks them where that is asked for. Returns true if all is well.
pub(crate) fn run(args: &PackageArgs) -> Result<bool> {
    let tools = match wheel::tools() {
        Ok(tools) => tools,
        Err(why) if why.is::<NotToBeHad>() => return Ok(scripts::skipped("package", &why)),
        Err(fault) => return Err(fault),
    };
    let other = match args.check {
        true => Some(wheel::other_program(&tools)?),
        false => None,
    };
    let wheel = wheel::build(&tools)?;
    let program = wheel::program(&tools)?;
    let folder = build(&program, &wheel)?;
    match other {
        Some(other) => Ok(check(&tools, &folder, &other)? & check_kubernetes(&program)?),
        None => Ok(true),
    }
}

/// Builds every package of a program, and copies the wheel that contains it. Returns their folder.
fn build(program: &Path, wheel: &Path) -> Result<PathBuf> {
    let folder = target()?.join("packages");
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder)?;
    let scratch = target()?.join("package");
    let _ = fs::remove_dir_all(&scratch);
    let mut built = vec![archive::build(program, &scratch, &folder)?];
    match packages::found("dpkg-deb") {
        true => built.push(deb::build(program, &scratch, &folder)?),
        false => println!("no dpkg-deb here: no Debian package is built"),
    }
    fs::remove_dir_all(&scratch)?;
    let name = wheel.file_name().context("the wheel is a file")?;
    fs::copy(wheel, folder.join(name))?;
    built.push(name.to_string_lossy().into_owned());
    let mut sums = Command::new("sha256sum");
    let sums = sums.args(&built).current_dir(&folder);
    let sums = shown::output(sums, tree::LIMIT)?;
    fs::write(folder.join(SUMS), sums)?;
    println!(
        "{} and {SUMS} are in {}",
        built.join(", "),
        folder.display()
    );
    Ok(folder)
}

/// Runs the checks of the packages. The service is upgraded to `other`, a program of the same sources.
fn check(tools: &Path, folder: &Path, other: &Path) -> Result<bool> {
    let mut check = Command::new(tools.join("python"));
    check
        .args(["xtask/python/package_check.py", GLIBC])
        .args([folder, other]);
    passes(&mut check)
}

/// Runs the checks of the files for Kubernetes, with the program that they start.
fn check_kubernetes(program: &Path) -> Result<bool> {
    let environment = match scripts::set_up("xtask/python/kubernetes.sh", &[]) {
        Ok(environment) => environment,
        Err(why) if why.is::<NotToBeHad>() => return Ok(scripts::skipped("kubernetes", &why)),
        Err(fault) => return Err(fault),
    };
    let mut check = Command::new(Path::new(&environment).join("bin/python"));
    check.arg("xtask/python/kubernetes_check.py").arg(program);
    passes(&mut check)
}

/// Shows a command that checks something, and runs it. Returns true if it succeeds.
fn passes(check: &mut Command) -> Result<bool> {
    println!("$ {}", shown::typed(check));
    let status = check.stdin(Stdio::null()).status();
    Ok(status.context("cannot run the checks")?.success())
}
