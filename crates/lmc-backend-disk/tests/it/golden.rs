//! A drive as an earlier build wrote it is opened and read.

#![allow(clippy::unwrap_used, reason = "helpers of tests may panic")]

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use lmc_backend::conformance::{
    block_on, check_value, fill_value, load_batch, store_batch, test_key,
};
use lmc_backend::{Backend, Clears, LoadItem, Loaded, NoEngine, StartId, StoreItem, WriteBackend};
use lmc_backend_disk::{DiskBackend, DiskConfig, FORMAT_VERSION};
use lmc_memory::Pool;
use lmc_testkit::{Folder, pool, soon};

/// Bytes of chunk `n`.
fn len(n: u64) -> u64 {
    [1, 4096, 5000, 8191][(n % 4) as usize]
}

/// The chunks of the image: the first were stored before a stop (so that a checkpoint tells of
/// them), the others before a kill (so that only the log does).
const STOPPED: u64 = 6;
const ALL: u64 = 10;
/// Removed, one before the stop and one after it.
const REMOVED: [u64; 2] = [2, 7];

/// The process that cleared before the stop.
const START: StartId = StartId::new([9; 16]);

fn image() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/data/v{FORMAT_VERSION}"))
}

fn copy(from: &Path, to: &Path) {
    let _ = fs::remove_dir_all(to);
    fs::create_dir_all(to).unwrap();
    for file in fs::read_dir(from).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), to.join(file.file_name())).unwrap();
    }
}

fn found(tier: &DiskBackend, pool: &Pool, n: u64) -> bool {
    let slot = pool.reserve(len(n)).unwrap();
    let loaded = load_batch(tier, vec![LoadItem::new(test_key(n), slot)], soon());
    match loaded.into_iter().next() {
        Some(Loaded::Hit(slot)) => {
            check_value(&test_key(n), slot.seal().bytes()).unwrap();
            true
        }
        Some(Loaded::Miss(_)) => false,
        other => panic!("chunk {n}: {other:?}"),
    }
}

fn open(folder: &Folder) -> DiskBackend {
    DiskConfig::existing([&**folder])
        .unwrap()
        .open(&NoEngine::default())
        .unwrap()
}

/// A copy of the image.
fn copied() -> Folder {
    let folder = Folder::inside(env!("CARGO_TARGET_TMPDIR"));
    copy(&image(), &folder);
    folder
}

#[test]
fn the_image_is_read_and_written_on() {
    let (folder, pool) = (copied(), pool(1 << 20));
    let tier = open(&folder);
    let inspected = tier.inspect().remove(0);
    // What was cleared before all that is in no image.
    let mut clears = Clears::default();
    clears.count(START).unwrap();
    assert_eq!(*inspected.clears, clears);
    assert_eq!(*tier.clears(), clears);
    assert_eq!(inspected.spaces[0].settings.as_deref(), Some("golden"));
    assert_eq!(inspected.members.len(), 1);
    assert_eq!(inspected.chunks, ALL - REMOVED.len() as u64);
    for n in 0..ALL {
        assert_eq!(found(&tier, &pool, n), !REMOVED.contains(&n), "chunk {n}");
    }
    assert_eq!(store(&tier, &pool, ALL..ALL + 2), 2);
    drop(tier);
    let tier = open(&folder);
    let all = (0..ALL + 2).filter(|&n| found(&tier, &pool, n)).count();
    assert_eq!(all as u64, ALL + 2 - REMOVED.len() as u64);
}

#[test]
fn an_image_of_another_version_is_refused_and_left_alone() {
    for version in [FORMAT_VERSION - 1, FORMAT_VERSION + 1] {
        let folder = copied();
        let mut header = fs::read(folder.join("drive")).unwrap();
        header[8..12].copy_from_slice(&version.to_le_bytes());
        fs::write(folder.join("drive"), header).unwrap();
        let config = DiskConfig::new([&*folder], 64 << 20).with_new_drives();
        let refused = config.open(&NoEngine::default()).unwrap_err().to_string();
        let said = format!("version {version}, this lmc reads and writes version {FORMAT_VERSION}");
        assert!(refused.contains(&said), "{refused}");
        assert!(refused.contains("--disk-create"), "{refused}");
        for file in fs::read_dir(image()).unwrap() {
            let name = file.unwrap().file_name();
            let (was, is) = (image().join(&name), folder.join(&name));
            assert!(name == "drive" || fs::read(was).unwrap() == fs::read(is).unwrap());
        }
    }
}

fn store(tier: &DiskBackend, pool: &Pool, numbers: std::ops::Range<u64>) -> usize {
    let item = |n| {
        let mut slot = pool.reserve(len(n)).unwrap();
        fill_value(&test_key(n), slot.bytes_mut());
        let item = StoreItem::new(test_key(n), slot.written().seal());
        match n.checked_sub(1) {
            Some(before) => item.with_parent(test_key(before)),
            None => item,
        }
    };
    let stored = store_batch(tier, numbers.map(item).collect(), soon());
    stored.into_iter().map(Result::unwrap).count()
}

#[test]
#[ignore = "writes the image: only when the format has changed"]
fn write_the_image() {
    let folder = Folder::inside(env!("CARGO_TARGET_TMPDIR"));
    let _ = fs::remove_dir_all(&folder);
    let pool = pool(1 << 20);
    let open = || {
        let config = DiskConfig::new([&*folder], 4 << 20)
            .with_keep_free(0)
            .with_new_drives();
        let config = config.with_segment_bytes(32 << 10);
        config
            .with_key_settings("golden")
            .open(&NoEngine::default())
            .unwrap()
    };
    let tier = open();
    store(&tier, &pool, STOPPED..ALL);
    let mut clears = Clears::default();
    clears.count(START).unwrap();
    block_on(tier.clear(Arc::new(clears), soon())).unwrap();
    store(&tier, &pool, 0..STOPPED);
    block_on(tier.remove(&[test_key(REMOVED[0])], soon()));
    block_on(tier.close(soon())).unwrap();
    drop(tier);
    let tier = open();
    store(&tier, &pool, STOPPED..ALL);
    block_on(tier.remove(&[test_key(REMOVED[1])], soon()));
    drop(tier);
    let image = image();
    copy(&folder, &image);
    fs::remove_file(image.join("lock")).unwrap();
    // The rest of a log's file beyond its frames is made again when it is opened.
    for file in fs::read_dir(&image).unwrap() {
        let path = file.unwrap().path();
        let bytes = fs::read(&path).unwrap();
        let used = bytes
            .iter()
            .rposition(|&byte| byte != 0)
            .map_or(0, |last| last + 1);
        if path
            .file_name()
            .unwrap()
            .to_string_lossy()
            .starts_with("log-")
        {
            fs::write(&path, &bytes[..used.next_multiple_of(4096)]).unwrap();
        }
    }
}
