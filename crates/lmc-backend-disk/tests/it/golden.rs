//! A drive of each version of the format, as it was written then, is opened and read.

#![allow(clippy::unwrap_used, reason = "helpers of tests may panic")]

use std::fs;
use std::path::{Path, PathBuf};

use lmc_backend::conformance::{
    block_on, check_value, clear_all, fill_value, load_batch, store_batch, test_key,
};
use lmc_backend::{Backend, Clear, LoadItem, Loaded, StoreItem};
use lmc_backend_disk::{DiskBackend, DiskConfig};
use lmc_key::SpaceId;
use lmc_memory::Pool;
use lmc_testkit::{Folder, pool, soon};

/// Bytes of chunk `n`.
fn len(n: u64) -> u64 {
    [1, 4096, 5000, 8191][(n % 4) as usize]
}

/// The chunks of every image: the first were stored before a stop (so that a checkpoint tells of
/// them), the others before a kill (so that only the log does).
const STOPPED: u64 = 6;
const ALL: u64 = 10;
/// Removed, one before the stop and one after it.
const REMOVED: [u64; 2] = [2, 7];

fn image(version: u32) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/data/v{version}"))
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
        Some(Loaded::Hit { slot, .. }) => {
            check_value(&test_key(n), slot.seal().bytes()).unwrap();
            true
        }
        Some(Loaded::Miss(_)) => false,
        other => panic!("chunk {n}: {other:?}"),
    }
}

#[test]
fn images_of_every_version_are_read_and_written_on() {
    for version in [1, 2, 3] {
        let folder = Folder::inside(env!("CARGO_TARGET_TMPDIR"));
        copy(&image(version), &folder);
        let pool = pool(1 << 20);
        let tier = DiskConfig::existing([&*folder]).unwrap().open().unwrap();
        let inspected = tier.inspect().remove(0);
        assert_eq!(inspected.version, version);
        // What was cleared before all that is in no image.
        let cleared = inspected.epoch.counter;
        assert_eq!(cleared, u64::from(version > 1));
        let settings = inspected.spaces[0].settings.as_deref();
        assert_eq!(settings, (version > 1).then_some("golden"));
        assert_eq!(inspected.members.len() as u64, cleared);
        let of_space = tier
            .clears()
            .into_iter()
            .find(|clear| clear.space.is_some());
        assert_eq!(of_space.is_some(), version > 2);
        assert_eq!(inspected.chunks, ALL - REMOVED.len() as u64);
        for n in 0..ALL {
            assert_eq!(
                found(&tier, &pool, n),
                !REMOVED.contains(&n),
                "v{version}, chunk {n}"
            );
        }
        assert_eq!(store(&tier, &pool, ALL..ALL + 2), 2, "v{version}");
        drop(tier);
        let tier = DiskConfig::existing([&*folder]).unwrap().open().unwrap();
        let all = (0..ALL + 2).filter(|&n| found(&tier, &pool, n)).count();
        assert_eq!(all as u64, ALL + 2 - REMOVED.len() as u64, "v{version}");
        drop(tier);
        fs::remove_dir_all(&folder).unwrap();
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
#[ignore = "writes the image of the newest version: only when the format has changed"]
fn write_the_image() {
    let folder = Folder::inside(env!("CARGO_TARGET_TMPDIR"));
    let _ = fs::remove_dir_all(&folder);
    let pool = pool(1 << 20);
    let open = || {
        let config = DiskConfig::new([&*folder], 4 << 20)
            .with_keep_free(0)
            .with_new_drives();
        let config = config.with_segment_bytes(32 << 10);
        config.with_key_settings("golden").open().unwrap()
    };
    let tier = open();
    store(&tier, &pool, STOPPED..ALL);
    clear_all(&tier, soon()).unwrap();
    let epoch = tier.clears()[0].epoch.next();
    let of_space = Clear::space(SpaceId::new([9; 16]), epoch);
    block_on(tier.clear(of_space, soon())).unwrap();
    store(&tier, &pool, 0..STOPPED);
    block_on(tier.remove(&[test_key(REMOVED[0])], soon()));
    block_on(tier.close(soon())).unwrap();
    drop(tier);
    let tier = open();
    store(&tier, &pool, STOPPED..ALL);
    block_on(tier.remove(&[test_key(REMOVED[1])], soon()));
    let version = tier.inspect().remove(0).version;
    drop(tier);
    let image = image(version);
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
