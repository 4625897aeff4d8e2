//! Initramfs archives, in the format that Linux calls `newc`
//! (Documentation/driver-api/early-userspace/buffer-format.rst).

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

enum Entry {
    Folder,
    File(PathBuf),
    Text(String),
    Link(String),
    /// A character device: major and minor number.
    Device(u32, u32),
}

/// The contents of an archive, by path without a leading slash.
#[derive(Default)]
pub(crate) struct Archive {
    entries: BTreeMap<String, Entry>,
}

impl Archive {
    fn add(&mut self, path: &str, entry: Entry) {
        let path = path.trim_start_matches('/');
        for (at, _) in path.match_indices('/') {
            let folder = self.entries.entry(path[..at].to_owned());
            folder.or_insert(Entry::Folder);
        }
        self.entries.insert(path.to_owned(), entry);
    }

    pub(crate) fn folder(&mut self, path: &str) {
        self.add(path, Entry::Folder);
    }

    /// A copy of a file, or of what a link points to. Everybody may run it.
    pub(crate) fn file(&mut self, path: &str, from: &Path) {
        self.add(path, Entry::File(from.to_owned()));
    }

    /// A script.
    pub(crate) fn text(&mut self, path: &str, text: &str) {
        self.add(path, Entry::Text(text.to_owned()));
    }

    pub(crate) fn link(&mut self, path: &str, to: &str) {
        self.add(path, Entry::Link(to.to_owned()));
    }

    pub(crate) fn device(&mut self, path: &str, major: u32, minor: u32) {
        self.add(path, Entry::Device(major, minor));
    }

    /// Writes the archive.
    pub(crate) fn write(&self, out: &mut impl Write) -> io::Result<()> {
        // Parents sort before what is in them.
        for (number, (path, entry)) in (1..).zip(&self.entries) {
            match entry {
                Entry::Folder => record(out, number, path, 0o040_755, (0, 0), &[])?,
                Entry::File(from) => {
                    let bytes = std::fs::read(from).map_err(|error| {
                        io::Error::new(error.kind(), format!("{}: {error}", from.display()))
                    })?;
                    record(out, number, path, 0o100_755, (0, 0), &bytes)?;
                }
                Entry::Text(text) => {
                    record(out, number, path, 0o100_755, (0, 0), text.as_bytes())?;
                }
                Entry::Link(to) => record(out, number, path, 0o120_777, (0, 0), to.as_bytes())?,
                Entry::Device(major, minor) => {
                    record(out, number, path, 0o020_600, (*major, *minor), &[])?;
                }
            }
        }
        record(out, 0, "TRAILER!!!", 0, (0, 0), &[])
    }
}

fn record(
    out: &mut impl Write,
    number: u32,
    path: &str,
    mode: u32,
    (major, minor): (u32, u32),
    bytes: &[u8],
) -> io::Result<()> {
    let size = u32::try_from(bytes.len()).map_err(io::Error::other)?;
    let name = path.len() as u32 + 1;
    write!(out, "070701")?;
    // inode, mode, owner, group, links, time, size, device, special device, name, checksum
    for field in [number, mode, 0, 0, 1, 0, size, 0, 0, major, minor, name, 0] {
        write!(out, "{field:08x}")?;
    }
    out.write_all(path.as_bytes())?;
    // Header and name end at a multiple of 4, and so does the file; the header has 110 bytes.
    out.write_all(&[0; 4][..1 + (4 - (110 + path.len() + 1) % 4) % 4])?;
    out.write_all(bytes)?;
    out.write_all(&[0; 4][..(4 - bytes.len() % 4) % 4])
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn folders_come_before_what_is_in_them() {
        let mut archive = Archive::default();
        archive.text("etc/deep/greeting", "hello");
        archive.link("etc/other", "deep/greeting");
        archive.device("dev/null", 1, 3);
        let mut bytes = Vec::new();
        archive.write(&mut bytes).expect("memory takes all");
        assert_eq!(bytes.len() % 4, 0);
        let text = String::from_utf8_lossy(&bytes);
        let at = |path: &str| text.find(&format!("{path}\0")).expect("it is in there");
        assert!(at("etc") < at("etc/deep") && at("etc/deep") < at("etc/deep/greeting"));
        assert!(text.contains("hello") && text.ends_with("TRAILER!!!\0\0\0\0"));
    }

    #[test]
    fn other_tools_read_it() {
        let mut archive = Archive::default();
        archive.text("a/file", "12345");
        archive.text("a/other", "123456");
        let mut bytes = Vec::new();
        archive.write(&mut bytes).expect("memory takes all");
        let cpio = Command::new("cpio")
            .args(["--list", "--quiet"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        let Ok(mut cpio) = cpio else {
            println!("skipped: no cpio here");
            return;
        };
        let mut input = cpio.stdin.take().expect("a pipe");
        input.write_all(&bytes).expect("it reads");
        drop(input);
        let output = cpio.wait_with_output().expect("it ends");
        assert_eq!(
            String::from_utf8_lossy(&output.stdout),
            "a\na/file\na/other\n"
        );
    }
}
