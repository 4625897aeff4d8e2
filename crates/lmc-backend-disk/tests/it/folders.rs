//! Contents of folders on which a tier is opened.

#![allow(clippy::unwrap_used, reason = "helpers of tests may panic")]

use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::process::Command;
use std::time::Duration;

use lmc_backend::conformance::{
    block_on, check_value, fill_value, lens_of, load_batch, store_batch, test_key,
};
use lmc_backend::{Backend, LoadItem, Loaded, NoEngine, StoreItem, Stored, WriteBackend};
use lmc_backend_disk::{DiskBackend, DiskConfig, DiskError};
use lmc_memory::Pool;
use lmc_testkit::{Folder, pool, soon, test_arguments};

const MIB: u64 = 1 << 20;
const CHUNK: u64 = 4096;
const WORDS: &str = "years of work";

fn new_folder() -> Folder {
    Folder::inside(env!("CARGO_TARGET_TMPDIR"))
}

fn config(folder: &Folder) -> DiskConfig {
    DiskConfig::new([&**folder], 64 * MIB)
        .with_keep_free(0)
        .with_new_drives()
        .with_segment_bytes(MIB)
}

fn names(folder: &Folder) -> Vec<String> {
    let files = fs::read_dir(folder).unwrap();
    let names = files.map(|file| file.unwrap().file_name().into_string().unwrap());
    names.collect()
}

fn item(pool: &Pool, number: u64) -> StoreItem {
    let mut slot = pool.reserve(CHUNK).unwrap();
    fill_value(&test_key(number), slot.bytes_mut());
    StoreItem::new(test_key(number), slot.written().seal())
}

fn store(tier: &DiskBackend, pool: &Pool, number: u64) {
    let stored = store_batch(tier, vec![item(pool, number)], soon()).remove(0);
    assert_eq!(stored.unwrap(), Stored::Written);
}

/// Returns true if a chunk is there, with the bytes that were stored.
fn is_there(tier: &DiskBackend, pool: &Pool, number: u64) -> bool {
    let slot = pool.reserve(CHUNK).unwrap();
    let loaded = load_batch(tier, vec![LoadItem::new(test_key(number), slot)], soon());
    let hit = loaded.into_iter().next().and_then(Loaded::hit);
    hit.is_some_and(|slot| check_value(&test_key(number), slot.seal().bytes()).is_ok())
}

fn is_refused(folder: &Folder) {
    let refused = config(folder)
        .open(&NoEngine::default())
        .expect_err("it is not ours");
    assert!(matches!(refused, DiskError::NotOurs { .. }), "{refused}");
}

#[test]
fn a_folder_of_another_program_is_left_as_it_is() {
    let folder = new_folder();
    fs::write(folder.join("thesis.tex"), WORDS).unwrap();
    is_refused(&folder);
    assert_eq!(names(&folder), ["thesis.tex"]);
    fs::write(folder.join("lock"), WORDS).unwrap();
    is_refused(&folder);
    fs::remove_file(folder.join("thesis.tex")).unwrap();
    is_refused(&folder);
    assert_eq!(fs::read_to_string(folder.join("lock")).unwrap(), WORDS);

    let folder = new_folder();
    fs::create_dir(folder.join("home-of-a-user")).unwrap();
    is_refused(&folder);
    assert_eq!(names(&folder), ["home-of-a-user"]);
}

#[test]
fn a_lock_that_is_a_link_is_not_followed() {
    let (folder, other) = (new_folder(), new_folder());
    let target = other.join("thesis.tex");
    fs::write(&target, WORDS).unwrap();
    symlink(&target, folder.join("lock")).unwrap();
    is_refused(&folder);
    fs::remove_file(folder.join("lock")).unwrap();
    drop(config(&folder).open(&NoEngine::default()).unwrap());
    fs::remove_file(folder.join("lock")).unwrap();
    symlink(&target, folder.join("lock")).unwrap();
    config(&folder)
        .open(&NoEngine::default())
        .expect_err("a link is no lock");
    assert_eq!(fs::read_to_string(&target).unwrap(), WORDS);
}

#[test]
fn what_the_making_of_a_drive_leaves_is_no_obstacle() {
    let (folder, pool) = (new_folder(), pool(MIB));
    fs::create_dir(folder.join("lost+found")).unwrap();
    fs::write(folder.join("lock"), "pid 1").unwrap();
    fs::write(folder.join("drive.unfinished"), "half of it").unwrap();
    let tier = config(&folder).open(&NoEngine::default()).unwrap();
    store(&tier, &pool, 1);
    let owner = format!("pid {}", std::process::id());
    assert_eq!(fs::read_to_string(folder.join("lock")).unwrap(), owner);
    drop(tier);
    assert!(is_there(
        &config(&folder).open(&NoEngine::default()).unwrap(),
        &pool,
        1
    ));
}

#[test]
fn a_size_of_segment_that_cannot_be_is_an_error() {
    for bytes in [1 << 44, u64::MAX] {
        let folder = new_folder();
        let refused = config(&folder)
            .with_segment_bytes(bytes)
            .open(&NoEngine::default());
        let refused = refused.expect_err("no segment is as large");
        assert!(refused.to_string().contains("segment size"), "{refused}");
        assert!(!names(&folder).contains(&"drive".to_owned()));
    }
}

#[test]
fn a_segment_that_was_half_made_gets_its_blocks() {
    let (folder, pool) = (new_folder(), pool(MIB));
    drop(config(&folder).open(&NoEngine::default()).unwrap());
    fs::write(folder.join("segment-00000000"), []).unwrap();
    let tier = config(&folder).open(&NoEngine::default()).unwrap();
    let segment = fs::metadata(folder.join("segment-00000000")).unwrap();
    assert_eq!((segment.len(), segment.blocks() * 512), (MIB, MIB));
    store(&tier, &pool, 1);
    assert!(is_there(&tier, &pool, 1));
}

#[test]
fn a_stray_file_with_the_name_of_a_segment_is_left_alone() {
    let (folder, pool) = (new_folder(), pool(MIB));
    store(
        &config(&folder).open(&NoEngine::default()).unwrap(),
        &pool,
        1,
    );
    fs::write(folder.join("segment-ffffffff"), WORDS).unwrap();
    let tier = config(&folder).open(&NoEngine::default()).unwrap();
    assert!(is_there(&tier, &pool, 1));
    assert_eq!(tier.inspect()[0].segments.len(), 1);
    let stray = fs::read_to_string(folder.join("segment-ffffffff")).unwrap();
    assert_eq!(stray, WORDS);
}

#[test]
fn a_drive_on_a_file_system_that_others_filled_opens_with_what_it_holds() {
    let (folder, pool) = (new_folder(), pool(MIB));
    store(
        &config(&folder).open(&NoEngine::default()).unwrap(),
        &pool,
        1,
    );
    // As if that much was missing.
    let full = config(&folder).with_keep_free(1 << 60);
    let tier = full.open(&NoEngine::default()).unwrap();
    assert!(is_there(&tier, &pool, 1));
    store(&tier, &pool, 2);
    let capacity = tier.held().capacity.unwrap();
    assert!(capacity < 32 * MIB, "{capacity}");
    drop(tier);
    let tier = config(&folder).open(&NoEngine::default()).unwrap();
    assert!(is_there(&tier, &pool, 1) && is_there(&tier, &pool, 2));
    let refused = config(&new_folder())
        .with_keep_free(1 << 60)
        .open(&NoEngine::default());
    assert!(matches!(refused, Err(DiskError::Space { .. })));
}

#[test]
fn a_drive_of_more_files_than_may_be_open_says_so_and_loses_nothing() {
    let (folder, pool) = (new_folder(), pool(MIB));
    let config = config(&folder).with_segment_bytes(16 << 10);
    let tier = config.open(&NoEngine::default()).unwrap();
    (0..200).for_each(|number| store(&tier, &pool, number));
    drop(tier);
    let opened = Command::new("sh")
        .args(["-c", "ulimit -n 64 && exec \"$0\" \"$@\""])
        .arg(std::env::current_exe().unwrap())
        .args(test_arguments(a_drive_where_few_files_may_be_open))
        .env("LMC_TEST_FOLDER", &*folder)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&opened.stdout);
    assert!(opened.status.success(), "{text}");
    assert!(text.contains("1 passed"), "{text}");
    let tier = config.open(&NoEngine::default()).unwrap();
    assert!((0..200).all(|number| is_there(&tier, &pool, number)));
}

#[test]
#[ignore = "runs under the limit of a_drive_of_more_files_than_may_be_open_says_so_and_loses_nothing"]
fn a_drive_where_few_files_may_be_open() {
    let folder = std::env::var_os("LMC_TEST_FOLDER").expect("run by the other test");
    let refused = DiskConfig::new([folder], 64 * MIB)
        .with_keep_free(0)
        .with_new_drives()
        .open(&NoEngine::default());
    let refused = refused.expect_err("it has a hundred segments");
    assert!(
        matches!(refused, DiskError::OpenFiles { .. }),
        "{refused:?}"
    );
    assert!(refused.to_string().contains("ulimit -n"), "{refused}");
}

#[test]
fn a_file_or_a_link_named_drive_is_left_as_it_is_and_nothing_put_beside_it() {
    let folder = new_folder();
    fs::write(folder.join("drive"), WORDS).unwrap();
    is_refused(&folder);
    assert_eq!(names(&folder), ["drive"]);

    let other = new_folder();
    symlink(folder.join("drive"), other.join("drive")).unwrap();
    is_refused(&other);
    assert!(other.join("drive").is_symlink());
    assert_eq!(names(&other), ["drive"]);
    assert_eq!(fs::read_to_string(folder.join("drive")).unwrap(), WORDS);
}

/// A file system that compresses, or a copy of a folder that left out what is zero: the files take
/// less than they are long.
#[test]
fn compacting_files_with_holes_gives_no_chunk_up() {
    let folder = new_folder();
    let pool = pool(MIB);
    let tier = config(&folder)
        .with_segment_bytes(256 << 10)
        .open(&NoEngine::default())
        .unwrap();
    // All bytes zero, as an unused layer is.
    let blank = |number: u64| {
        let mut slot = pool.reserve(64 << 10).unwrap();
        slot.bytes_mut().fill(0);
        StoreItem::new(test_key(number), slot.written().seal())
    };
    for number in 0..240 {
        let stored = store_batch(&tier, vec![blank(number)], soon()).remove(0);
        assert_eq!(stored.unwrap(), Stored::Written);
    }
    // Some segments are emptied to a third.
    let gone: Vec<_> = (0..60).filter(|n| n % 3 > 0).map(test_key).collect();
    drop(block_on(tier.remove(&gone, soon())));
    block_on(tier.close(soon())).unwrap();
    drop(tier);
    for name in names(&folder) {
        if name.starts_with("segment-") {
            let copied = Command::new("cp")
                .arg("--sparse=always")
                .args([folder.join(&name), folder.join("copy")])
                .status();
            assert!(copied.unwrap().success());
            fs::rename(folder.join("copy"), folder.join(&name)).unwrap();
        }
    }
    let tier = DiskConfig::existing([&*folder])
        .unwrap()
        .open(&NoEngine::default())
        .unwrap();
    let known = || {
        let keys: Vec<_> = (0..240).map(test_key).collect();
        let found = lens_of(&tier, &keys, soon());
        let found = found.iter().filter(|found| matches!(found, Ok(Some(_))));
        found.count()
    };
    assert_eq!(known(), 200);
    let timeout = Duration::from_secs(60);
    let done = block_on(tier.compact(&pool, 0.5, timeout, |_, _| {})).unwrap();
    // What it gave up would go meanwhile.
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(known(), 200, "{done:?}");
}

/// A smaller tier than before is asked for in a folder whose segments are large.
#[test]
fn a_size_below_two_segments_of_a_folder_is_refused() {
    let folder = new_folder();
    let pool = pool(MIB);
    let config = |size| {
        DiskConfig::new([&*folder], size)
            .with_keep_free(0)
            .with_new_drives()
            .with_segment_bytes(16 * MIB)
    };
    store(
        &config(64 * MIB).open(&NoEngine::default()).unwrap(),
        &pool,
        0,
    );
    let refused = config(8 * MIB)
        .open(&NoEngine::default())
        .expect_err("a segment takes more");
    let DiskError::TooSmall { least, .. } = refused else {
        panic!("{refused}");
    };
    let tier = config(least).open(&NoEngine::default()).unwrap();
    assert!(is_there(&tier, &pool, 0));
    // As many as may wait for the drive at a time.
    for first in (1..6000).step_by(100) {
        let items = (first..first + 100).map(|number| item(&pool, number));
        for stored in store_batch(&tier, items.collect(), soon()) {
            assert_eq!(stored.unwrap(), Stored::Written);
        }
    }
    let lengths = names(&folder).into_iter();
    let lengths = lengths.map(|name| folder.join(&name).metadata().unwrap().len());
    let taken: u64 = lengths.sum();
    assert!(taken <= least, "{taken} of {least} bytes");
}
