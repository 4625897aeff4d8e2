//! The Debian package: the program, a service with a user of its own, and its settings.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::tree;

/// Completions where Debian keeps those of packages.
const COMPLETIONS: [tree::Completion; 3] = [
    ("bash", "share/bash-completion/completions/lmc"),
    ("zsh", "share/zsh/vendor-completions/_lmc"),
    ("fish", "share/fish/vendor_completions.d/lmc.fish"),
];

/// Scripts that dpkg runs.
const SCRIPTS: [&str; 3] = ["postinst", "prerm", "postrm"];

/// Files that dpkg keeps as their administrator has changed them.
const CONFFILES: &str = "/etc/lmc/lmc.toml\n";

/// Builds the package in `folder`. Returns its name.
pub(super) fn build(program: &Path, scratch: &Path, folder: &Path) -> Result<String> {
    let version = version();
    let top = scratch.join("deb");
    tree::write(program, &top.join("usr"), &COMPLETIONS)?;
    for page in fs::read_dir(top.join("usr/share/man/man1"))? {
        gzip(&page?.path())?;
    }
    for (from, to) in [
        (
            "packaging/systemd/lmc.service",
            "lib/systemd/system/lmc.service",
        ),
        ("packaging/debian/lmc.toml", "etc/lmc/lmc.toml"),
        ("packaging/debian/copyright", "usr/share/doc/lmc/copyright"),
        ("packaging/README.md", "usr/share/doc/lmc/README.md"),
    ] {
        tree::copy(from, &top.join(to), 0o644)?;
    }
    let control = fs::read_to_string("packaging/debian/control").context("control")?;
    let changelog = top.join("usr/share/doc/lmc/changelog");
    tree::put(changes(&version, &control)?.as_bytes(), &changelog, 0o644)?;
    gzip(&changelog)?;
    let about = top.join("DEBIAN");
    let control = control
        .replace("@VERSION@", &version)
        .replace("@ARCHITECTURE@", architecture()?)
        .replace("@KIBIBYTES@", &kibibytes(&top)?.to_string());
    tree::put(control.as_bytes(), &about.join("control"), 0o644)?;
    tree::put(CONFFILES.as_bytes(), &about.join("conffiles"), 0o644)?;
    tree::put(sums(&top)?.as_bytes(), &about.join("md5sums"), 0o644)?;
    for script in SCRIPTS {
        let from = format!("packaging/debian/{script}");
        tree::copy(&from, &about.join(script), 0o755)?;
    }
    let file = format!("lmc_{version}_{}.deb", architecture()?);
    let mut deb = Command::new("dpkg-deb");
    deb.args(["--root-owner-group", "-Zxz", "--build"])
        .args([&top, &folder.join(&file)])
        .env("SOURCE_DATE_EPOCH", tree::commit_time().to_string());
    tree::run(&mut deb)?;
    fs::remove_dir_all(top)?;
    Ok(file)
}

/// Returns the version: that of the workspace, and the commit's time and name, so that a later commit
/// is an upgrade, and so is the release.
fn version() -> String {
    let mut log = Command::new("git");
    log.args(["log", "-1", "--date=format-local:%Y%m%d%H%M%S"])
        .arg("--format=~%cd.%h")
        .env("TZ", "UTC0");
    let commit = tree::run(&mut log);
    let commit = commit.unwrap_or_default();
    format!("{}{}", env!("CARGO_PKG_VERSION"), commit.trim())
}

/// Returns Debian's name for this machine's kind.
fn architecture() -> Result<&'static str> {
    match std::env::consts::ARCH {
        "x86_64" => Ok("amd64"),
        "aarch64" => Ok("arm64"),
        other => bail!("no Debian packages are built for {other}"),
    }
}

/// Returns the text of Debian's changelog, signed by the maintainer whom `control` names.
fn changes(version: &str, control: &str) -> Result<String> {
    let maintainer = control
        .lines()
        .find_map(|line| line.strip_prefix("Maintainer: "));
    let maintainer = maintainer.context("control names no maintainer")?;
    let date = format!("--date=@{}", tree::commit_time());
    let date = tree::run(Command::new("date").args(["--utc", "--rfc-email", &date]))?;
    Ok(format!(
        "lmc ({version}) unstable; urgency=medium\n\n  * CHANGELOG.md in the sources of lmc lists the \
         changes.\n\n -- {maintainer}  {}\n",
        date.trim()
    ))
}

/// Replaces a file by a compressed one, without its name and time.
fn gzip(path: &Path) -> Result<()> {
    tree::run(Command::new("gzip").args(["--no-name", "--best"]).arg(path)).map(drop)
}

/// Returns the size of the files under a folder.
fn kibibytes(top: &Path) -> Result<u64> {
    let said = tree::run(Command::new("du").args(["-sk", "--apparent-size"]).arg(top))?;
    let size = said.split_whitespace().next().context("du prints a size")?;
    Ok(size.parse()?)
}

/// Returns the checksums by which `dpkg --verify` finds files that were changed.
fn sums(top: &Path) -> Result<String> {
    let line = "find usr lib -type f -print0 | LC_ALL=C sort -z | xargs -0 md5sum";
    tree::run(Command::new("sh").args(["-c", line]).current_dir(top))
}
