//! The tier on a real folder, through its public face.

#![allow(clippy::unwrap_used, reason = "helpers of tests may panic")]

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use lmc_backend::conformance::{
    Conformance, Faults, Faulty, Guarantee, block_on, check_value, fill_value, load_batch,
    store_batch, test_key,
};
use lmc_backend::{Backend, Health, LoadItem, Loaded, NoEngine, StoreItem, Stored, WriteBackend};
use lmc_backend_disk::{DiskBackend, DiskConfig, DiskError, DiskIo};
use lmc_memory::Pool;
use lmc_testkit::{Folder, pool, soon, test_arguments, until};

const MIB: u64 = 1 << 20;
const CHUNK: u64 = 64 << 10;

fn new_folder() -> Folder {
    Folder::inside(env!("CARGO_TARGET_TMPDIR"))
}

fn config_of(folder: &Folder, size: u64) -> DiskConfig {
    DiskConfig::new([&**folder], size)
        .with_keep_free(0)
        .with_new_drives()
}

/// Bytes that the files of a folder take on the drive.
fn taken(folder: &Folder) -> u64 {
    let files = fs::read_dir(folder).unwrap();
    files
        // One may be removed meanwhile.
        .filter_map(|file| Some(file.unwrap().metadata().ok()?.blocks() * 512))
        .sum()
}

fn store(tier: &DiskBackend, pool: &Pool, numbers: impl IntoIterator<Item = u64>) -> Vec<Stored> {
    let item = |n| {
        let mut slot = pool.reserve(CHUNK).expect("space in the pool");
        fill_value(&test_key(n), slot.bytes_mut());
        StoreItem::new(test_key(n), slot.written().seal())
    };
    let items = numbers.into_iter().map(item).collect();
    let stored = store_batch(tier, items, soon());
    stored
        .into_iter()
        .map(|stored| stored.expect("a store that works"))
        .collect()
}

/// Returns how many of these chunks are read back, each with the bytes that were stored.
fn load(tier: &DiskBackend, pool: &Pool, numbers: impl IntoIterator<Item = u64>) -> usize {
    let mut hits = 0;
    for n in numbers {
        let slot = pool.reserve(CHUNK).expect("space in the pool");
        let loaded = load_batch(tier, vec![LoadItem::new(test_key(n), slot)], soon());
        for slot in loaded.into_iter().filter_map(Loaded::hit) {
            check_value(&test_key(n), slot.seal().bytes()).expect("the bytes that were stored");
            hits += 1;
        }
    }
    hits
}

/// Both ways to move bytes, where this machine has both.
fn engines() -> Vec<DiskIo> {
    let folder = new_folder();
    match config_of(&folder, 16 * MIB)
        .with_io(DiskIo::Uring)
        .open(&NoEngine::default())
    {
        Ok(_) => vec![DiskIo::Uring, DiskIo::Threads],
        Err(error) => {
            println!("skipped: io_uring cannot be used here ({error})");
            vec![DiskIo::Threads]
        }
    }
}

/// Slow: the whole kit, over io_uring and over threads, on a drive.
#[test]
fn the_contract_holds_on_a_real_folder() {
    for io in engines() {
        for guarantee in [Guarantee::Exact, Guarantee::Lossy] {
            let folder = new_folder();
            let kit = Conformance::new(guarantee);
            // A header takes a block of each chunk's extent.
            let size = match guarantee {
                Guarantee::Exact => 16 * kit.bytes_needed() + 64 * MIB,
                _ => 5 * MIB,
            };
            let config = config_of(&folder, size).with_io(io).with_segment_bytes(MIB);
            let tier = config.open(&NoEngine::default()).unwrap();
            let tally = kit.run(&tier);
            assert!(tally.hits > 50, "{io:?}: {tally:?}");
        }
    }
}

#[test]
fn the_contract_holds_on_two_drives_and_with_faults_on_the_way() {
    let folders = [new_folder(), new_folder()];
    let paths = folders.iter().map(|folder| &**folder);
    let kit = Conformance::new(Guarantee::Exact);
    let config = DiskConfig::new(paths, 32 * kit.bytes_needed() + 128 * MIB)
        .with_keep_free(0)
        .with_new_drives();
    let tier = config
        .with_segment_bytes(MIB)
        .open(&NoEngine::default())
        .unwrap();
    let tally = kit.run(&tier);
    assert!(tally.hits > 100, "{tally:?}");
    for folder in &folders {
        assert!(taken(folder) > MIB, "both drives are used");
    }
    let folder = new_folder();
    let config = config_of(&folder, 64 * MIB).with_segment_bytes(MIB);
    let faulty = Faulty::new(
        config.open(&NoEngine::default()).unwrap(),
        Faults::some(),
        1,
    );
    let tally = Conformance::new(Guarantee::Lossy).run(&faulty);
    assert!(tally.hits > 20 && tally.failures > 50, "{tally:?}");
}

#[test]
fn chunks_are_there_again_after_a_stop_and_after_a_kill() {
    for io in engines() {
        let (folder, pool) = (new_folder(), pool(8 * MIB));
        let config = config_of(&folder, 64 * MIB).with_io(io);
        let tier = config.open(&NoEngine::default()).unwrap();
        store(&tier, &pool, 0..20);
        block_on(tier.close(soon())).unwrap();
        drop(tier);
        let tier = config.open(&NoEngine::default()).unwrap();
        assert_eq!(load(&tier, &pool, 0..20), 20, "{io:?}, after a stop");
        store(&tier, &pool, 20..40);
        assert_eq!(
            block_on(tier.remove(&[test_key(3)], soon()))[0]
                .as_ref()
                .ok(),
            Some(&true)
        );
        // Nothing is said to the drive: what was acknowledged is durable all the same.
        drop(tier);
        let tier = config.open(&NoEngine::default()).unwrap();
        assert_eq!(load(&tier, &pool, 0..40), 39, "{io:?}, after a kill");
        assert_eq!(load(&tier, &pool, [3]), 0, "what was removed stays removed");
        assert_eq!(pool.usage().used, 0);
    }
}

#[test]
fn the_size_is_held_and_the_oldest_give_way() {
    let (folder, pool) = (new_folder(), pool(8 * MIB));
    let size = 24 * MIB;
    let config = config_of(&folder, size).with_segment_bytes(2 * MIB);
    let tier = config.open(&NoEngine::default()).unwrap();
    for round in 0..20 {
        for stored in store(&tier, &pool, round * 64..round * 64 + 64) {
            assert_eq!(stored, Stored::Written);
        }
        assert!(
            taken(&folder) <= size,
            "{} of {size} in round {round}",
            taken(&folder)
        );
    }
    assert_eq!(
        load(&tier, &pool, 19 * 64..20 * 64),
        64,
        "the newest are there"
    );
    assert_eq!(load(&tier, &pool, 0..64), 0, "the oldest are not");
    let usage = tier.usage().expect("it is open");
    assert!(usage.bytes > size / 2, "{usage:?}: most of it is used");
    assert!(tier.stats().evicted > 500);
    drop(tier);
    let tier = config_of(&folder, size / 2)
        .open(&NoEngine::default())
        .unwrap();
    assert_eq!(load(&tier, &pool, 19 * 64..20 * 64), 64);
    for n in 2000..2200 {
        store(&tier, &pool, [n]);
    }
    block_on(tier.close(soon())).unwrap();
    assert!(taken(&folder) <= size / 2, "{} bytes", taken(&folder));
    let held = tier.held();
    assert!(Some(held.bytes) <= held.capacity, "{held:?}");
    drop(tier);
    let tier = config_of(&folder, size / 2)
        .open(&NoEngine::default())
        .unwrap();
    assert!(
        load(&tier, &pool, 2150..2200) == 50,
        "what is newest is there"
    );
}

/// A folder was opened with a smaller size than it had taken, and kept all of it for as long as
/// nothing was written.
#[test]
fn a_smaller_size_is_held_without_a_write() {
    let (folder, pool) = (new_folder(), pool(8 * MIB));
    let size = 24 * MIB;
    let config = config_of(&folder, size).with_segment_bytes(2 * MIB);
    let tier = config.open(&NoEngine::default()).unwrap();
    for n in 0..320 {
        store(&tier, &pool, [n]);
    }
    drop(tier);
    assert!(taken(&folder) > size / 2);
    let tier = config_of(&folder, size / 2)
        .open(&NoEngine::default())
        .unwrap();
    until("the files are smaller", || taken(&folder) <= size / 2);
    let held = tier.held();
    assert!(Some(held.bytes) <= held.capacity, "{held:?}");
    let there = load(&tier, &pool, 0..320);
    assert!(there as u64 * CHUNK > size / 4, "{there} chunks");
    assert_eq!(load(&tier, &pool, 300..320), 20, "the newest are there");
    drop(tier);
    let tier = config_of(&folder, size / 2)
        .open(&NoEngine::default())
        .unwrap();
    assert_eq!(load(&tier, &pool, 0..320), there);
}

#[test]
fn logs_that_are_over_give_their_space_back() {
    for io in engines() {
        let (folder, pool) = (new_folder(), pool(8 * MIB));
        let tier = config_of(&folder, 32 * MIB)
            .with_io(io)
            .open(&NoEngine::default())
            .unwrap();
        for n in 0..400 {
            store(&tier, &pool, [n]);
        }
        assert!(tier.stats().checkpoints > 4, "logs were over");
        let path = fs::canonicalize(&*folder).unwrap();
        let open = fs::read_dir("/proc/self/fd").unwrap();
        let open = open.filter_map(|fd| fs::read_link(fd.unwrap().path()).ok());
        let deleted: Vec<_> = open
            .filter(|file| file.starts_with(&path))
            .filter(|file| file.to_string_lossy().ends_with("(deleted)"))
            .collect();
        assert!(deleted.is_empty(), "{io:?}: {deleted:?} are held open");
    }
}

#[test]
fn a_drive_that_vanishes_costs_its_chunks_and_nothing_else() {
    let (first, second, pool) = (new_folder(), new_folder(), pool(8 * MIB));
    let config = DiskConfig::new([&*first, &*second], 64 * MIB)
        .with_keep_free(0)
        .with_new_drives()
        .with_probe_every(Duration::from_millis(1));
    let tier = config.open(&NoEngine::default()).unwrap();
    store(&tier, &pool, 0..40);
    // Bytes that come back are not those that were written.
    for file in fs::read_dir(&*second).unwrap() {
        let path = file.unwrap().path();
        if path
            .file_name()
            .unwrap()
            .to_string_lossy()
            .starts_with("segment")
        {
            let len = fs::metadata(&path).unwrap().len();
            // A file that is cut short, even for a moment, takes the drive out.
            let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
            file.write_all_at(&vec![0xA5; len as usize], 0).unwrap();
        }
    }
    let hits = load(&tier, &pool, 0..40);
    assert!((10..31).contains(&hits), "{hits} of 40");
    let stats = tier.stats();
    assert_eq!(stats.bad_headers + stats.bad_payloads, 40 - hits as u64);
    assert_eq!(
        load(&tier, &pool, 0..40),
        hits,
        "and they are not read again"
    );
    assert_eq!(
        store(&tier, &pool, 0..40)
            .iter()
            .filter(|s| **s == Stored::Written)
            .count(),
        40 - hits
    );
    assert_eq!(load(&tier, &pool, 0..40), 40);
    assert_eq!(tier.health(), Health::Ready);
    assert_eq!(pool.usage().used, 0);
}

/// Flips one byte of each stored chunk, at an offset from the start of its payload.
fn flip_in_each_chunk(folder: &Folder, numbers: std::ops::Range<u64>, from_payload: i64) {
    let mut heads: HashMap<[u8; 64], u64> = numbers
        .map(|n| {
            let mut value = vec![0; CHUNK as usize];
            fill_value(&test_key(n), &mut value);
            (*value.first_chunk().unwrap(), n)
        })
        .collect();
    for file in fs::read_dir(folder).unwrap() {
        let path = file.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if !name.starts_with("segment") {
            continue;
        }
        let mut bytes = fs::read(&path).unwrap();
        // Payloads begin at a block.
        for at in (0..bytes.len()).step_by(4096) {
            let head = bytes[at..].first_chunk().unwrap();
            if heads.remove(head).is_some() {
                bytes[at.checked_add_signed(from_payload as isize).unwrap()] ^= 1;
            }
        }
        fs::write(&path, bytes).unwrap();
    }
    assert!(
        heads.is_empty(),
        "{} chunks are not in the files",
        heads.len()
    );
}

/// One bit of each chunk is another, in its payload or in its header, and all else is as written:
/// each check must find it without the other.
#[test]
fn one_changed_bit_of_a_payload_or_of_a_header_is_a_miss() {
    for (at, in_header) in [(0, false), (CHUNK as i64 - 1, false), (-4096, true)] {
        let (folder, pool) = (new_folder(), pool(8 * MIB));
        let tier = config_of(&folder, 64 * MIB)
            .open(&NoEngine::default())
            .unwrap();
        store(&tier, &pool, 0..20);
        flip_in_each_chunk(&folder, 0..20, at);
        assert_eq!(load(&tier, &pool, 0..20), 0, "byte {at}");
        let stats = tier.stats();
        let found = (stats.bad_headers, stats.bad_payloads);
        assert_eq!(
            found,
            if in_header { (20, 0) } else { (0, 20) },
            "byte {at}"
        );
        assert_eq!(store(&tier, &pool, 0..20), [Stored::Written; 20]);
        assert_eq!(load(&tier, &pool, 0..20), 20);
    }
}

/// Peers and disk compare a chunk with the same sum: the first of them computes it.
#[test]
fn a_checksum_is_computed_once_for_all_tiers() {
    let (folder, pool) = (new_folder(), pool(8 * MIB));
    let tier = config_of(&folder, 64 * MIB)
        .open(&NoEngine::default())
        .unwrap();
    let write = |n, note: Option<u64>| {
        let mut slot = pool.reserve(CHUNK).expect("space in the pool");
        fill_value(&test_key(n), slot.bytes_mut());
        let slot = slot.written();
        let slot = match note {
            Some(sum) => slot.with_checksum(sum).seal(),
            None => slot.seal(),
        };
        let item = StoreItem::new(test_key(n), slot.clone());
        store_batch(&tier, vec![item], soon());
        slot.known_checksum()
    };
    let read = |n| {
        let slot = pool.reserve(CHUNK).expect("space in the pool");
        let mut loaded = load_batch(&tier, vec![LoadItem::new(test_key(n), slot)], soon());
        let slot = loaded.pop().and_then(Loaded::hit)?;
        slot.known_checksum()
    };
    let sum = write(0, None);
    assert!(sum.is_some(), "the copy to the drive computes it");
    assert_eq!(read(0), sum, "and the copy from the drive brings it");
    // A wrong one shows that it is not computed again.
    assert_eq!((write(1, Some(7)), read(1)), (Some(7), None));
    assert_eq!(tier.stats().bad_payloads, 1);
}

#[test]
fn a_compacted_drive_gives_back_the_space_of_what_was_removed() {
    let (folder, pool) = (new_folder(), pool(8 * MIB));
    let config = config_of(&folder, 64 * MIB).with_segment_bytes(2 * MIB);
    let tier = config.open(&NoEngine::default()).unwrap();
    for part in 0..4 {
        store(&tier, &pool, part * 100..part * 100 + 100);
    }
    let kept = |n: &u64| n.is_multiple_of(4);
    let gone: Vec<_> = (0..400).filter(|n| !kept(n)).map(test_key).collect();
    let removed = block_on(tier.remove(&gone, soon()));
    assert!(removed.iter().all(|removed| matches!(removed, Ok(true))));
    drop(tier);
    let before = taken(&folder);

    let tier = DiskConfig::existing([&*folder])
        .unwrap()
        .open(&NoEngine::default())
        .unwrap();
    let inspected = tier.inspect().remove(0);
    assert_eq!((inspected.chunks, inspected.bytes), (100, 100 * CHUNK));
    assert_eq!(inspected.segment_bytes, 2 * MIB);
    let mut progress = Vec::new();
    let compact = tier.compact(&pool, 0.5, Duration::from_secs(60), |done, of| {
        progress.push((done, of))
    });
    let done = block_on(compact).unwrap();
    assert_eq!(done.lost, 0);
    assert!(
        done.moved > 50 && progress.last() == Some(&(done.moved, done.moved)),
        "{done:?}"
    );
    assert!(
        taken(&folder) + done.freed_bytes / 2 < before,
        "{done:?}, {before} before"
    );
    assert_eq!(load(&tier, &pool, (0..400).filter(kept)), 100);
    drop(tier);
    let tier = config.open(&NoEngine::default()).unwrap();
    assert_eq!(
        load(&tier, &pool, (0..400).filter(kept)),
        100,
        "after a kill, too"
    );
    assert_eq!(load(&tier, &pool, (0..400).filter(|n| !kept(n))), 0);
    store(&tier, &pool, 500..600);
    assert_eq!(load(&tier, &pool, 500..600), 100, "and it takes new ones");
    let nothing = DiskConfig::existing([folder.join("nothing")]);
    assert!(matches!(nothing, Err(DiskError::NoDrive { .. })));
}

fn refused(config: &DiskConfig) -> DiskError {
    config
        .open(&NoEngine::default())
        .expect_err("this cannot be opened")
}

#[test]
fn what_cannot_be_opened_says_why_and_is_left_alone() {
    let folder = new_folder();
    fs::remove_dir(&*folder).unwrap();
    assert!(matches!(
        refused(&DiskConfig::new(Vec::<PathBuf>::new(), MIB)),
        DiskError::NoFolder
    ));
    let too_small = refused(&config_of(&folder, MIB));
    assert!(too_small.to_string().contains("too few"), "{too_small}");
    assert!(!folder.exists());

    fs::write(&*folder, "a file").unwrap();
    let file = refused(&config_of(&folder, 64 * MIB));
    assert!(matches!(file, DiskError::NotAFolder { .. }), "{file}");
    let below = DiskConfig::new([folder.join("a/b")], 64 * MIB).with_new_drives();
    let below = refused(&below);
    assert!(matches!(below, DiskError::Missing { .. }), "{below}");
    let proc = refused(&DiskConfig::new(["/proc/self"], 64 * MIB).with_new_drives());
    assert!(matches!(proc, DiskError::NoFiles { .. }), "{proc}");
    assert_eq!(fs::read_to_string(&*folder).unwrap(), "a file");
    fs::remove_file(&*folder).unwrap();

    fs::create_dir(&*folder).unwrap();
    fs::write(folder.join("thesis.tex"), "years of work").unwrap();
    let ours = refused(&config_of(&folder, 64 * MIB));
    assert!(matches!(ours, DiskError::NotOurs { .. }), "{ours}");
    assert!(ours.to_string().contains("name an empty folder"), "{ours}");
    assert!(folder.join("thesis.tex").exists());
    fs::remove_dir_all(&*folder).unwrap();

    let space = refused(&config_of(&folder, 1 << 50));
    assert!(matches!(space, DiskError::Space { .. }), "{space}");
    assert!(space.to_string().contains("ask for less"), "{space}");
}

#[test]
fn a_folder_belongs_to_one_at_a_time() {
    let (folder, pool) = (new_folder(), pool(8 * MIB));
    let config = config_of(&folder, 64 * MIB);
    let tier = config.open(&NoEngine::default()).unwrap();
    store(&tier, &pool, 0..4);
    let locked = refused(&config);
    assert!(matches!(locked, DiskError::Locked { .. }), "{locked}");
    let owner = format!("pid {}", std::process::id());
    assert!(locked.to_string().contains(&owner), "{locked}");
    assert_eq!(load(&tier, &pool, 0..4), 4, "the one who has it goes on");
    drop(tier);
    assert_eq!(
        load(&config.open(&NoEngine::default()).unwrap(), &pool, 0..4),
        4
    );
}

#[test]
fn a_folder_of_a_later_version_or_a_damaged_one_is_left_alone() {
    let (folder, pool) = (new_folder(), pool(8 * MIB));
    let config = config_of(&folder, 64 * MIB);
    store(&config.open(&NoEngine::default()).unwrap(), &pool, 0..4);
    let path = folder.join("drive");
    let right = fs::read(&path).unwrap();
    for (at, what) in [(0, "magic"), (8, "version"), (40, "damage")] {
        let mut bytes = right.clone();
        bytes[at] ^= 0x40;
        fs::write(&path, &bytes).unwrap();
        let error = refused(&config);
        let expected = match error {
            DiskError::NotOurs { .. } => what == "magic",
            DiskError::Format { .. } => what != "magic",
            _ => false,
        };
        assert!(expected, "{what}: {error}");
        assert!(error.to_string().len() > 40, "{what}: {error}");
    }
    fs::write(&path, &right).unwrap();
    assert_eq!(
        load(&config.open(&NoEngine::default()).unwrap(), &pool, 0..4),
        4,
        "nothing was lost"
    );
}

/// Runs another test of this file where the folder is a mount of its own, which needs a mount
/// namespace; where that cannot be had, says that the test was skipped.
pub(super) fn on_a_mount(unshare: &[&str], mount: &str, test: impl Fn()) {
    let folder = new_folder();
    let script = format!(
        "mount {mount} {} && exec {} {}",
        folder.display(),
        std::env::current_exe().unwrap().display(),
        test_arguments(test).join(" ")
    );
    let run = Command::new("unshare")
        .args(unshare)
        .args(["--mount", "sh", "-c", &script])
        .env("LMC_TEST_MOUNT", &*folder)
        .output();
    match run {
        Ok(out) if out.status.success() => {}
        Ok(out) if !String::from_utf8_lossy(&out.stdout).contains("running 1 test") => {
            let why = String::from_utf8_lossy(&out.stderr).into_owned();
            println!("skipped: no mount namespace here ({})", why.trim());
        }
        Ok(out) => panic!("{}", String::from_utf8_lossy(&out.stdout)),
        Err(error) => println!("skipped: unshare cannot be run: {error}"),
    }
}

/// The mount that the test outside has made.
fn mounted() -> DiskConfig {
    let path = std::env::var_os("LMC_TEST_MOUNT").expect("run by the other test");
    DiskConfig::new([PathBuf::from(path)], 64 * MIB)
        .with_keep_free(0)
        .with_new_drives()
}

#[test]
fn a_folder_that_cannot_be_written_says_so() {
    // Root writes everywhere but on a read-only mount.
    let user = ["--user", "--map-root-user"];
    on_a_mount(&user, "-t tmpfs -o ro tmpfs", a_read_only_folder);
}

#[test]
#[ignore = "runs inside the mount namespace of a_folder_that_cannot_be_written_says_so"]
fn a_read_only_folder() {
    let config = mounted();
    let error = refused(&config);
    assert!(matches!(error, DiskError::NotWritable { .. }), "{error}");
    assert!(error.to_string().contains("read-only"), "{error}");
}

#[test]
fn a_file_system_without_direct_io_is_served_through_the_page_cache() {
    // ramfs knows neither direct I/O nor fallocate, nor how much space there is. Only real root
    // may mount it.
    on_a_mount(&[], "-t ramfs ramfs", a_folder_without_direct_io);
}

#[test]
#[ignore = "runs inside the mount namespace of a_file_system_without_direct_io_is_served_through_the_page_cache"]
fn a_folder_without_direct_io() {
    for io in engines() {
        let (config, pool) = (mounted().with_io(io), pool(8 * MIB));
        let tier = config.open(&NoEngine::default()).unwrap();
        let how = tier.describe().remove(0);
        assert!(
            !how.contains("direct I/O,") && how.contains("page cache"),
            "{how}"
        );
        store(&tier, &pool, 0..16);
        drop(tier);
        let tier = config.open(&NoEngine::default()).unwrap();
        assert_eq!(load(&tier, &pool, 0..16), 16, "{io:?}");
        block_on(tier.remove(&(0..16).map(test_key).collect::<Vec<_>>(), soon()));
    }
}
