//! The archive: a folder that is unpacked over a prefix such as `/usr/local`.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::Result;

use super::tree;

/// Builds the archive in `folder`. Returns its name.
pub(super) fn build(program: &Path, scratch: &Path, folder: &Path) -> Result<String> {
    let name = format!(
        "lmc-{}-linux-{}",
        env!("CARGO_PKG_VERSION"),
        std::env::consts::ARCH
    );
    let top = scratch.join(&name);
    tree::write(program, &top, &tree::COMPLETIONS)?;
    tree::copy(
        "packaging/README.md",
        &top.join("share/doc/lmc/README.md"),
        0o644,
    )?;
    tree::copy("LICENSE", &top.join("share/doc/lmc/LICENSE"), 0o644)?;
    let file = format!("{name}.tar.gz");
    // The same files make the same bytes, whichever user packs them, and when.
    let mut tar = Command::new("tar");
    tar.args(["--format=gnu", "--sort=name", "--numeric-owner"])
        .args(["--owner=0", "--group=0"])
        .arg(format!("--mtime=@{}", tree::commit_time()))
        .arg("--use-compress-program=gzip --no-name --best")
        .args(["--create", "--file"])
        .arg(folder.join(&file))
        .arg("--directory")
        .arg(scratch)
        .arg(&name);
    tree::run(&mut tar)?;
    fs::remove_dir_all(top)?;
    Ok(file)
}
