//! The store of files over file systems that are full, hang or go: `cargo xtask test-remote` runs
//! these tests where it can mount some.

#![allow(clippy::unwrap_used, reason = "helpers of tests may panic")]

use std::fs;
use std::io::pipe;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lmc_backend::conformance::{block_on, test_key};
use lmc_backend::{Backend, BackendError, Health, Stored, WriteBackend};
use lmc_backend_remote::{FileConfig, FileStore};
use lmc_testkit::{Folder, Process, soon, until};

type Rig = crate::common::Rig<FileStore>;

/// Bytes of the file systems that get full.
const SIZE: u64 = 8 << 20;
/// Chunks that are removed from a full file system.
const REMOVED: usize = 20;
const SFTP: &str = "/usr/lib/openssh/sftp-server";

fn rig(folder: &Path) -> Rig {
    let store = FileConfig::new(folder).open().unwrap();
    let lens = [100_000, 4096, 65_536, 100_001, 99_999];
    let rig = Rig::over(Arc::new(store), lens, |config| {
        config.timeout = Duration::from_secs(1);
        config.clears_interval = Duration::from_millis(300);
    });
    rig.used()
}

fn ran(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(
        output.status.success(),
        "{program} {arguments:?}: {output:?}"
    );
}

/// A folder that a file system is mounted on.
struct Mounted(Folder);

impl Mounted {
    fn tmpfs() -> Self {
        let point = Folder::temporary();
        let size = format!("size={SIZE}");
        ran("mount", &["-t", "tmpfs", "-o", &size, "lmc", point.text()]);
        Self(point)
    }

    /// A file system on a file in `files`.
    fn ext4(files: &Folder) -> Self {
        let (point, image) = (Folder::temporary(), files.join("image"));
        fs::File::create(&image).unwrap().set_len(SIZE).unwrap();
        let image = image.to_str().unwrap();
        ran("mkfs.ext4", &["-q", image]);
        ran("mount", &["-o", "loop", image, point.text()]);
        Self(point)
    }

    fn is_mounted(&self) -> bool {
        let of = |path: &Path| fs::metadata(path).map(|metadata| metadata.dev()).ok();
        of(&self.0) != of(self.0.parent().unwrap())
    }

    fn unmount(&self) {
        // It may have been unmounted already.
        let _ = Command::new("umount")
            .args(["--lazy", self.0.text()])
            .output();
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        self.unmount();
    }
}

/// A folder of a file server, mounted on another folder.
struct Served {
    server: Process,
    client: Process,
}

impl Served {
    fn mount(served: &Folder, on: &Mounted) -> Self {
        let ((from_client, to_server), (from_server, to_client)) =
            (pipe().unwrap(), pipe().unwrap());
        let server = Process::spawn(Command::new(SFTP).stdin(from_client).stdout(to_client));
        let mut client = Command::new("sshfs");
        client.args(["-f", "-o", "passive,dir_cache=no"]);
        client.args([&format!(":{}", served.text()), on.0.text()]);
        let client = Process::spawn(client.stdin(from_server).stdout(to_server));
        until("the folder is mounted", || on.is_mounted());
        Self { server, client }
    }
}

fn is_full_and_read_on(mounted: &Mounted) {
    let rig = rig(&mounted.0);
    let stored = rig.store(0..250);
    let is_written = |stored: &Result<_, _>| matches!(stored, Ok(Stored::Written));
    let is_full = |stored: &Result<_, _>| matches!(stored, Err(BackendError::Full { .. }));
    let written = stored.iter().filter(|stored| is_written(stored)).count();
    let full = stored.iter().filter(|stored| is_full(stored)).count();
    assert!(
        written > REMOVED && full > 0,
        "{written} written, {full} full"
    );
    assert_eq!(written + full, 250, "{stored:?}");
    assert_eq!(rig.hits(0..250), written);
    // The last refusal of so long a chunk may have come before the last one that was written.
    let mut longest = (250..).filter(|number| rig.len(*number) == 100_001);
    until("one more is refused", || {
        let number = longest.next().expect("an endless range");
        rig.store(number..number + 1)[0].is_err()
    });
    let health = rig.tier.health();
    assert!(
        matches!(&health, Health::Degraded { reason } if reason.contains("is full")),
        "{health:?}"
    );
    assert_eq!(temporary_files(&mounted.0), 0);
    let positions = stored.iter().enumerate();
    let removed: Vec<u64> = positions
        .filter(|(_, stored)| is_written(stored))
        .map(|(at, _)| at as u64)
        .take(REMOVED)
        .collect();
    let keys: Vec<_> = removed.iter().copied().map(test_key).collect();
    for removed in block_on(rig.tier.remove(&keys, soon())) {
        assert!(removed.unwrap());
    }
    assert_eq!(rig.hits(0..250), written - REMOVED);
    // ext4 keeps the blocks of removed files until its journal's next commit, and some of them for
    // itself: not all chunks can be written again, and one that cannot is refused each time.
    until("half of them are written again", || {
        rig.store(removed[0]..removed[REMOVED / 2]);
        rig.is_ready()
    });
    assert!(rig.hits(0..250) > written - REMOVED);
}

/// Returns the number of files that are being written.
fn temporary_files(folder: &Path) -> usize {
    let entries = fs::read_dir(folder).unwrap().flatten();
    let count = entries.map(|entry| match entry.file_type().unwrap().is_dir() {
        true => temporary_files(&entry.path()),
        false => usize::from(entry.file_name().to_string_lossy().starts_with(".tmp-")),
    });
    count.sum()
}

#[test]
#[ignore = "mounts file systems: cargo xtask test-remote"]
fn a_full_file_system_refuses_writes_and_is_read_on() {
    is_full_and_read_on(&Mounted::tmpfs());
    let files = Folder::inside(env!("CARGO_TARGET_TMPDIR"));
    is_full_and_read_on(&Mounted::ext4(&files));
}

#[test]
#[ignore = "mounts file systems: cargo xtask test-remote"]
fn a_file_server_that_hangs_costs_hits_and_is_taken_back() {
    let (files, on) = (Folder::temporary(), Mounted(Folder::temporary()));
    let served = Served::mount(&files, &on);
    let rig = rig(&on.0);
    rig.write(0..20);
    assert_eq!(rig.hits(0..20), 20);
    served.server.stop();
    let begun = Instant::now();
    assert_eq!(rig.hits_by(0..20, begun + Duration::from_millis(200)), 0);
    assert!(begun.elapsed() < Duration::from_secs(5));
    until("the tier is out", || !rig.is_ready());
    served.server.signal(libc::SIGCONT);
    until("the tier is back", || rig.is_back());
    assert_eq!(rig.hits(0..20), 20);
    until("no slot is kept", || rig.pool.usage().used == 0);
}

/// The folder stayed the one of the mount that had ended, and the store was out until the daemon's
/// next start.
#[test]
#[ignore = "mounts file systems: cargo xtask test-remote"]
fn a_file_system_that_goes_costs_hits_and_is_taken_back_when_it_is_mounted_again() {
    let (files, on) = (Folder::temporary(), Mounted(Folder::temporary()));
    let mut served = Served::mount(&files, &on);
    let rig = rig(&on.0);
    rig.write(0..20);
    served.server.kill();
    served.client.wait();
    on.unmount();
    assert!(!on.is_mounted());
    assert_eq!(rig.hits(0..20), 0);
    until(
        "the bare folder is not taken for the store",
        || matches!(rig.tier.health(), Health::Down { reason } if reason.contains("mount")),
    );
    assert_eq!(fs::read_dir(&on.0).unwrap().count(), 0);
    let _served = Served::mount(&files, &on);
    until("the tier is back", || rig.is_back());
    assert_eq!(rig.hits(0..20), 20);
}

/// The folder under the mount point was used until the next start, or nothing was.
#[test]
#[ignore = "mounts file systems: cargo xtask test-remote"]
fn a_file_system_that_is_mounted_later_is_used_from_then_on() {
    let on = Mounted(Folder::temporary());
    let rig = rig(&on.0);
    rig.write(0..5);
    assert_eq!(rig.hits(0..5), 5);
    let size = format!("size={SIZE}");
    let mount = || ran("mount", &["-t", "tmpfs", "-o", &size, "lmc", on.0.text()]);
    mount();
    assert_eq!(fs::read_dir(&on.0).unwrap().count(), 0);
    until("it is used", || {
        rig.store(0..5);
        rig.hits(0..5) == 5 && fs::read_dir(&on.0).unwrap().count() > 0
    });
    on.unmount();
    until(
        "the folder under it is not taken for the store",
        || matches!(rig.tier.health(), Health::Down { reason } if reason.contains("mounted")),
    );
    mount();
    until("the file system is used again", || rig.is_ready());
}
