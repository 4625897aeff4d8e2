//! Changes of a drive's files by other programs, while the drive is open and before.

#![allow(clippy::unwrap_used, reason = "helpers of tests may panic")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use lmc_backend::conformance::{
    block_on, check_value, clear_all, fill_value, load_batch, store_batch, test_key,
};
use lmc_backend::{Backend, Health, LoadItem, NoEngine, StoreItem, Stored};
use lmc_backend_disk::{DiskBackend, DiskConfig, DiskError};
use lmc_testkit::{Folder, pool, soon, until};

use crate::tier::on_a_mount;

const MIB: u64 = 1 << 20;
const CHUNK: u64 = 4096;
const CHUNKS: usize = 8;

/// A drive in a folder that may be removed.
fn config(drive: &Path) -> DiskConfig {
    DiskConfig::new([drive], 16 * MIB)
        .with_keep_free(0)
        .with_segment_bytes(MIB)
        .with_probe_every(Duration::from_millis(1))
}

fn new_folder() -> Folder {
    Folder::inside(env!("CARGO_TARGET_TMPDIR"))
}

/// A new drive, after a clear, with chunks.
fn filled(drive: &Path) -> DiskBackend {
    let tier = config(drive)
        .with_new_drives()
        .open(&NoEngine::default())
        .unwrap();
    clear_all(&tier, soon()).unwrap();
    assert_eq!(store(&tier), CHUNKS);
    tier
}

/// Stores all chunks. Returns how many were written.
fn store(tier: &DiskBackend) -> usize {
    let pool = pool(MIB);
    let item = |number| {
        let mut slot = pool.reserve(CHUNK).unwrap();
        fill_value(&test_key(number), slot.bytes_mut());
        StoreItem::new(test_key(number), slot.written().seal())
    };
    let items = (0..CHUNKS as u64).map(item).collect();
    let stored = store_batch(tier, items, soon());
    let written = |stored: &&Result<_, _>| matches!(stored, Ok(Stored::Written));
    stored.iter().filter(written).count()
}

/// Loads all chunks. Returns how many are there, each with its bytes.
fn found(tier: &DiskBackend) -> usize {
    let pool = pool(MIB);
    let item = |number| LoadItem::new(test_key(number), pool.reserve(CHUNK).unwrap());
    let loaded = load_batch(tier, (0..CHUNKS as u64).map(item).collect(), soon());
    let hits = (0..).zip(loaded).filter_map(|(number, loaded)| {
        let slot = loaded.hit()?.seal();
        check_value(&test_key(number), slot.bytes()).expect("the bytes of this key");
        Some(())
    });
    hits.count()
}

fn names(drive: &Path) -> Vec<String> {
    let files = fs::read_dir(drive).unwrap();
    let mut names: Vec<_> = files
        .map(|file| file.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// The file whose name begins so.
fn file(drive: &Path, begin: &str) -> PathBuf {
    let names = names(drive);
    drive.join(names.iter().find(|name| name.starts_with(begin)).unwrap())
}

fn why_out(tier: &DiskBackend) -> Option<String> {
    match tier.health() {
        Health::Down { reason } => Some(reason),
        _ => None,
    }
}

/// Changes something under an open drive, which is out then. Returns how many chunks the next start
/// finds, if there is one.
fn after(change: impl FnOnce(&Path)) -> Result<usize, DiskError> {
    let folder = new_folder();
    let drive = folder.join("drive of a test");
    let tier = filled(&drive);
    change(&drive);
    until("the drive is out", || why_out(&tier).is_some());
    let reason = why_out(&tier).unwrap();
    assert!(
        reason.contains("drive of a test") && reason.contains("restart"),
        "{reason}"
    );
    assert_eq!((found(&tier), store(&tier)), (0, 0), "{reason}");
    block_on(tier.close(soon())).unwrap();
    drop(tier);
    let tier = config(&drive).open(&NoEngine::default())?;
    let there = found(&tier);
    store(&tier);
    assert_eq!(found(&tier), CHUNKS, "{reason}");
    assert_eq!(tier.health(), Health::Ready);
    Ok(there)
}

#[test]
fn a_removed_file_takes_a_drive_out_and_a_restart_goes_on_with_the_others() {
    // Without its map of clears a drive is emptied.
    for (begin, left) in [
        ("drive", CHUNKS),
        ("lock", CHUNKS),
        ("set", CHUNKS),
        ("clears", 0),
        ("segment-", 0),
        ("log-", 0),
        // The first log has all from the beginning.
        ("checkpoint-", CHUNKS),
    ] {
        let there = after(|drive| fs::remove_file(file(drive, begin)).unwrap());
        assert_eq!(there.unwrap(), left, "{begin}");
    }
    let all = after(|drive| {
        for name in names(drive) {
            fs::remove_file(drive.join(name)).unwrap();
        }
    });
    assert_eq!(all.unwrap(), 0);
}

#[test]
fn a_replaced_file_takes_a_drive_out() {
    for begin in ["drive", "lock", "segment-", "log-"] {
        after(|drive| {
            let file = file(drive, begin);
            fs::copy(&file, drive.join("copy")).unwrap();
            fs::rename(drive.join("copy"), &file).unwrap();
        })
        .unwrap();
    }
}

#[test]
fn a_file_that_is_cut_short_takes_a_drive_out() {
    for begin in ["drive", "clears", "segment-", "log-", "checkpoint-"] {
        for bytes in [0, 100] {
            let cut = |drive: &Path| {
                let file = fs::OpenOptions::new().write(true).open(file(drive, begin));
                file.unwrap().set_len(bytes).unwrap();
            };
            let there = after(cut).unwrap();
            let is_whole = ["drive", "checkpoint-"].contains(&begin);
            assert_eq!(there, if is_whole { CHUNKS } else { 0 }, "{begin}");
        }
    }
}

#[test]
fn a_folder_that_is_removed_or_renamed_or_made_again_takes_a_drive_out() {
    let away = |drive: &Path| fs::rename(drive, drive.with_extension("away")).unwrap();
    let gone = [
        after(away),
        after(|drive| fs::remove_dir_all(drive).unwrap()),
    ];
    for refused in gone {
        assert!(
            matches!(refused, Err(DiskError::NoDriveYet { .. })),
            "{refused:?}"
        );
    }
    let made_again = after(|drive| {
        away(drive);
        fs::create_dir(drive).unwrap();
    });
    assert_eq!(made_again.unwrap(), 0);
}

#[test]
fn a_folder_that_is_made_again_for_something_else_is_left_alone() {
    let refused = after(|drive| {
        fs::remove_dir_all(drive).unwrap();
        let other = drive.with_extension("other");
        fs::create_dir(&other).unwrap();
        fs::write(other.join("thesis.tex"), "years of work").unwrap();
        fs::rename(other, drive).unwrap();
    });
    assert!(
        matches!(refused, Err(DiskError::NotOurs { .. })),
        "{refused:?}"
    );
}

#[test]
fn a_folder_that_is_back_is_used_again() {
    let folder = new_folder();
    let (drive, away) = (folder.join("d"), folder.join("away"));
    let tier = filled(&drive);
    fs::rename(&drive, &away).unwrap();
    until("the drive is out", || why_out(&tier).is_some());
    assert_eq!((found(&tier), store(&tier)), (0, 0));
    fs::rename(&away, &drive).unwrap();
    until("it is used again", || tier.health() == Health::Ready);
    assert_eq!(found(&tier), CHUNKS);
}

#[test]
fn a_mount_over_the_folder_takes_a_drive_out_until_it_is_gone() {
    let user = ["--user", "--map-root-user"];
    on_a_mount(&user, "-t tmpfs tmpfs", a_mount_over_the_folder);
}

#[test]
#[ignore = "runs inside the mount namespace of a_mount_over_the_folder_takes_a_drive_out_until_it_is_gone"]
fn a_mount_over_the_folder() {
    let mount = std::env::var_os("LMC_TEST_MOUNT").expect("run by the other test");
    let drive = Path::new(&mount).join("d");
    let tier = filled(&drive);
    let run = |command: &mut Command| assert!(command.status().unwrap().success());
    let cover = || {
        run(Command::new("mount")
            .args(["-t", "tmpfs", "tmpfs"])
            .arg(&drive));
        until("the drive is out", || why_out(&tier).is_some());
    };
    let is_bare = || assert!(names(&drive).is_empty(), "{:?}", names(&drive));
    cover();
    assert_eq!((found(&tier), store(&tier)), (0, 0));
    clear_all(&tier, soon()).unwrap();
    is_bare();
    run(Command::new("umount").arg(&drive));
    until("it is used again", || tier.health() == Health::Ready);
    assert_eq!(found(&tier), 0, "all was cleared");
    assert_eq!(store(&tier), CHUNKS);
    cover();
    block_on(tier.close(soon())).unwrap();
    is_bare();
}

/// A cleaner removed `lock`. A second server opened the drive, and of 360 chunks that the first one
/// had acknowledged 98 were left.
#[test]
fn a_drive_in_use_is_refused_whatever_files_were_removed() {
    let folder = new_folder();
    let drive = folder.join("d");
    let tier = filled(&drive);
    for (begin, config) in [
        ("lock", config(&drive)),
        ("drive", config(&drive).with_new_drives()),
    ] {
        fs::remove_file(file(&drive, begin)).unwrap();
        let refused = config.open(&NoEngine::default()).expect_err("it is in use");
        assert!(
            matches!(refused, DiskError::Locked { .. }),
            "{begin}: {refused}"
        );
    }
    let moved = folder.join("moved");
    fs::rename(&drive, &moved).unwrap();
    let refused = config(&moved)
        .open(&NoEngine::default())
        .expect_err("it is in use");
    assert!(matches!(refused, DiskError::Locked { .. }), "{refused}");
    drop(tier);
    config(&moved).open(&NoEngine::default()).unwrap();
}

/// A unit that starts again whenever it ends did so for ever: the folder was "not empty, and not an
/// lmc drive".
#[test]
fn a_drive_without_its_header_starts_empty() {
    for cut in [None, Some(0), Some(100)] {
        let folder = new_folder();
        let drive = folder.join("d");
        let tier = filled(&drive);
        let clears = tier.clears();
        drop(tier);
        let header = drive.join("drive");
        match cut {
            None => fs::remove_file(&header).unwrap(),
            Some(bytes) => {
                let header = fs::OpenOptions::new().write(true).open(&header);
                header.unwrap().set_len(bytes).unwrap();
            }
        }
        let tier = config(&drive).open(&NoEngine::default()).unwrap();
        assert_eq!((found(&tier), tier.inspect()[0].segments.len()), (0, 0));
        assert_eq!(tier.clears(), clears, "what was cleared stays known");
        assert_eq!(store(&tier), CHUNKS);
        drop(tier);
        assert_eq!(
            found(&config(&drive).open(&NoEngine::default()).unwrap()),
            CHUNKS
        );
    }
}

#[test]
fn files_of_others_are_not_taken_for_what_is_left_of_a_drive() {
    const WORDS: &str = "years of work";
    // Beside a drive without its header, and alone.
    for is_beside in [true, false] {
        for (name, text) in [
            ("thesis.tex", WORDS),
            ("segment-00000009", WORDS),
            ("set", WORDS),
            ("drive", WORDS),
            ("spaces", ""),
        ] {
            let folder = new_folder();
            let drive = folder.join("d");
            match is_beside {
                true => drop(filled(&drive)),
                false => fs::create_dir(&drive).unwrap(),
            }
            let _ = fs::remove_file(drive.join("drive"));
            fs::write(drive.join(name), text).unwrap();
            // A file that is empty is no loss.
            if is_beside && text.is_empty() {
                continue;
            }
            let before = names(&drive);
            for config in [config(&drive), config(&drive).with_new_drives()] {
                let refused = config
                    .open(&NoEngine::default())
                    .expect_err("it is not ours");
                assert!(
                    matches!(refused, DiskError::NotOurs { .. }),
                    "{name}: {refused}"
                );
            }
            assert_eq!(names(&drive), before);
            assert_eq!(fs::read_to_string(drive.join(name)).unwrap(), text);
        }
    }
}
