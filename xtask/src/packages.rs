//! Packages of the distribution, by name: what a step needs and the machine lacks.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::shown;
use crate::test::succeeds;

const INSTALLING: Duration = Duration::from_secs(300);

/// Returns true if a program can be found.
pub(crate) fn found(program: &str) -> bool {
    succeeds("sh", &["-c", &format!("command -v {program}")])
}

/// Returns true if this process may change the machine.
pub(crate) fn is_root() -> bool {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata("/proc/self").is_ok_and(|own| own.uid() == 0)
}

/// Returns true if apt-get may be run, as root or by a sudo that does not ask.
fn may_install() -> bool {
    is_root() || succeeds("sudo", &["-n", "true"])
}

/// apt-get as root. It waits for another one to end.
fn apt_get() -> Command {
    let mut command = match is_root() {
        true => Command::new("env"),
        false => {
            let mut command = Command::new("sudo");
            command.args(["-n", "env"]);
            command
        }
    };
    command.args(["DEBIAN_FRONTEND=noninteractive", "apt-get"]);
    command.args(["-o", "DPkg::Lock::Timeout=120"]);
    command
}

/// Checks that a program is there, or that [`install`] may get it. The error says why not.
pub(crate) fn obtainable(program: &str, package: &str) -> Result<()> {
    if found(program) {
        return Ok(());
    }
    if !found("apt-get") {
        bail!("{program} is missing, and there is no apt-get to install {package} with");
    }
    match may_install() {
        true => Ok(()),
        false => bail!("{program} is missing: apt-get install {package}"),
    }
}

/// Fetches the lists of packages. Package files that an old list names are gone from mirrors.
fn update() -> Result<()> {
    shown::output(apt_get().arg("update"), INSTALLING).map(drop)
}

/// Sees to it that a program is there. The error says why it cannot be.
pub(crate) fn install(program: &str, package: &str) -> Result<()> {
    if found(program) {
        return Ok(());
    }
    obtainable(program, package)?;
    let install = || {
        let mut command = apt_get();
        command.args(["install", "--yes", "--no-install-recommends", package]);
        shown::output(&mut command, INSTALLING)
    };
    if install().is_err() {
        update()?;
        install()?;
    }
    match found(program) {
        true => Ok(()),
        false => bail!("{package} is installed, but there is no {program}"),
    }
}

/// The first package that a metapackage depends on: of `linux-image-amd64`, the newest kernel.
pub(crate) fn depends(metapackage: &str) -> Result<String> {
    // An old list names packages that mirrors no longer have, and a new machine has none. Without
    // a mirror, what is asked for next says so.
    if may_install() {
        let _ = update();
    }
    let mut ask = Command::new("apt-cache");
    // Its words are translated elsewhere.
    ask.args(["depends", metapackage]).env("LC_ALL", "C");
    let said = shown::capture(&mut ask, INSTALLING)?;
    let found = said
        .lines()
        .find_map(|line| line.trim().strip_prefix("Depends: "));
    found.map(str::to_owned).with_context(|| {
        format!("apt-cache does not know {metapackage}: run `apt-get update` as root")
    })
}

/// Takes files out of a package without installing it. Members are patterns of GNU tar, such as
/// `./boot/vmlinuz-*`.
pub(crate) fn extract(package: &str, members: &[String], into: &Path) -> Result<()> {
    if !found("apt-get") || !found("dpkg-deb") {
        bail!("{package} is a package of Debian, and there is no apt-get here");
    }
    let folder = into.join("download");
    std::fs::create_dir_all(&folder)?;
    let mut download = Command::new("apt-get");
    download.args(["download", package]).current_dir(&folder);
    shown::output(&mut download, INSTALLING)
        .context("if the mirror has a newer one, run `apt-get update` as root")?;
    let file = std::fs::read_dir(&folder)?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| path.extension().is_some_and(|ending| ending == "deb"))
        .with_context(|| format!("{package} could not be downloaded"))?;
    let mut unpack = Command::new("sh");
    unpack
        .args([
            "-ec",
            "dpkg-deb --fsys-tarfile \"$0\" | tar --extract --wildcards \"$@\"",
        ])
        .arg(&file)
        .args(["--directory"])
        .arg(into)
        .args(members);
    shown::output(&mut unpack, INSTALLING)?;
    std::fs::remove_dir_all(&folder)?;
    Ok(())
}
