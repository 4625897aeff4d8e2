//! Changes of a drive's files by other programs.

#![allow(clippy::unwrap_used, reason = "helpers of tests may panic")]

use std::fs;
use std::path::{Path, PathBuf};

use lmc_backend::conformance::{
    check_value, clear_all, fill_value, load_batch, store_batch, test_key,
};
use lmc_backend::{Backend, LoadItem, StoreItem, Stored};
use lmc_backend_disk::{DiskBackend, DiskConfig, DiskError};
use lmc_testkit::{Folder, pool, soon};

const MIB: u64 = 1 << 20;
const CHUNK: u64 = 4096;
const CHUNKS: usize = 8;

/// A drive in a folder that may be removed.
fn config(drive: &Path) -> DiskConfig {
    DiskConfig::new([drive], 16 * MIB)
        .with_keep_free(0)
        .with_segment_bytes(MIB)
}

fn new_folder() -> Folder {
    Folder::inside(env!("CARGO_TARGET_TMPDIR"))
}

/// A new drive, after a clear, with chunks.
fn filled(drive: &Path) -> DiskBackend {
    let tier = config(drive).with_new_drives().open().unwrap();
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
        let refused = config.open().expect_err("it is in use");
        assert!(
            matches!(refused, DiskError::Locked { .. }),
            "{begin}: {refused}"
        );
    }
    let moved = folder.join("moved");
    fs::rename(&drive, &moved).unwrap();
    let refused = config(&moved).open().expect_err("it is in use");
    assert!(matches!(refused, DiskError::Locked { .. }), "{refused}");
    drop(tier);
    config(&moved).open().unwrap();
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
        let tier = config(&drive).open().unwrap();
        assert_eq!((found(&tier), tier.inspect()[0].segments.len()), (0, 0));
        assert_eq!(tier.clears(), clears, "what was cleared stays known");
        assert_eq!(store(&tier), CHUNKS);
        drop(tier);
        assert_eq!(found(&config(&drive).open().unwrap()), CHUNKS);
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
                let refused = config.open().expect_err("it is not ours");
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
