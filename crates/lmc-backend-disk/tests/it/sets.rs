//! Drive sets on real folders: cleared chunks stay cleared, and missing drives are named.

#![allow(clippy::unwrap_used, reason = "helpers of tests may panic")]

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use lmc_backend::conformance::{
    check_value, clear_all, fill_value, lens_of, load_batch, store_batch, test_key,
};
use lmc_backend::{
    Backend, Clears, Handle, Health, LoadItem, Loaded, Located, NoEngine, StoreItem,
};
use lmc_backend_disk::{DiskBackend, DiskConfig, DiskError};
use lmc_key::ChunkKey;
use lmc_testkit::{Folder, pool, soon, until};

const MIB: u64 = 1 << 20;
const CHUNKS: u64 = 16;

/// A folder for the drives of a test.
struct Drives(Folder);

impl Drives {
    fn new() -> Self {
        Self(Folder::inside(env!("CARGO_TARGET_TMPDIR")))
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Drives by their names. None is made.
    fn drives(&self, names: &[&str]) -> DiskConfig {
        let paths = names.iter().map(|name| self.at(name));
        DiskConfig::new(paths, 64 * MIB * names.len() as u64)
            .with_keep_free(0)
            .with_segment_bytes(MIB)
    }

    fn copy(&self, from: &str, to: &str) {
        let _ = fs::remove_dir_all(self.at(to));
        fs::create_dir(self.at(to)).unwrap();
        for file in fs::read_dir(self.at(from)).unwrap() {
            let file = file.unwrap();
            fs::copy(file.path(), self.at(to).join(file.file_name())).unwrap();
        }
    }
}

fn store(tier: &DiskBackend) {
    let pool = pool(MIB);
    let item = |number| {
        let mut slot = pool.reserve(4096).unwrap();
        fill_value(&test_key(number), slot.bytes_mut());
        StoreItem::new(test_key(number), slot.written().seal())
    };
    for stored in store_batch(tier, (0..CHUNKS).map(item).collect(), soon()) {
        stored.unwrap();
    }
}

fn count(tier: &DiskBackend) -> usize {
    let keys: Vec<_> = (0..CHUNKS).map(test_key).collect();
    let found = lens_of(tier, &keys, soon());
    let found = found.iter().filter(|found| matches!(found, Ok(Some(_))));
    found.count()
}

fn clear(tier: &DiskBackend) {
    clear_all(tier, soon()).unwrap();
}

/// A drive was replaced by a copy of itself from before a clear, and served what was cleared.
#[test]
fn an_old_copy_of_the_only_drive_is_cleared() {
    let folder = Drives::new();
    let tier = folder
        .drives(&["a"])
        .with_new_drives()
        .open(&NoEngine::default())
        .unwrap();
    store(&tier);
    drop(tier);
    folder.copy("a", "backup");
    let tier = folder.drives(&["a"]).open(&NoEngine::default()).unwrap();
    assert_eq!(count(&tier), CHUNKS as usize);
    clear(&tier);
    let clears = tier.clears();
    drop(tier);
    let host = NoEngine::new(Clears::clone(&clears));
    let known = || folder.drives(&["a"]).open(&host);
    // As it was, and as it was before it had a set.
    for record in [true, false] {
        folder.copy("backup", "a");
        if !record {
            fs::remove_file(folder.at("a").join("set")).unwrap();
        }
        let tier = known().unwrap();
        assert_eq!(count(&tier), 0, "with a record of its set: {record}");
        assert_eq!(tier.clears(), clears);
        store(&tier);
        drop(tier);
        assert_eq!(count(&known().unwrap()), CHUNKS as usize);
    }
    // An old copy of what was stored after the last clear is no danger.
    folder.copy("a", "backup");
    folder.copy("backup", "a");
    let tier = known().unwrap();
    assert_eq!(count(&tier), CHUNKS as usize);
    drop(tier);
    assert_eq!(
        folder
            .drives(&["a"])
            .open(&NoEngine::default())
            .unwrap()
            .clears(),
        clears
    );
}

#[test]
fn a_missing_drive_is_named_until_it_is_forgotten() {
    let folder = Drives::new();
    let both = folder.drives(&["a", "b"]).with_new_drives();
    drop(both.open(&NoEngine::default()).unwrap());
    let tier = folder.drives(&["a"]).open(&NoEngine::default()).unwrap();
    let [missing] = tier.missing() else {
        panic!("{:?}", tier.missing());
    };
    assert_eq!(missing.path, folder.at("b").canonicalize().unwrap());
    assert!(missing.last_seen > 1_700_000_000);
    let id = missing.drive_id;
    let Health::Degraded { reason } = tier.health() else {
        panic!("{:?}", tier.health());
    };
    let path = missing.path.to_str().unwrap();
    assert!(reason.contains(path), "{reason}");
    drop(tier);
    let tools = DiskConfig::existing([folder.at("a")]).unwrap();
    let tools = tools.open(&NoEngine::default()).unwrap();
    assert_eq!(tools.inspect()[0].members.len(), 2);
    assert!(tools.forget_member(&id).unwrap());
    assert!(!tools.forget_member(&id).unwrap());
    drop(tools);
    let tier = folder.drives(&["a"]).open(&NoEngine::default()).unwrap();
    assert!(tier.missing().is_empty());
    assert_eq!(tier.health(), Health::Ready);
}

/// An empty mount point was taken for a new drive, on the file system above it.
#[test]
fn a_folder_that_is_no_drive_is_refused_and_left_empty() {
    let folder = Drives::new();
    fs::create_dir(folder.at("mnt")).unwrap();
    for name in ["mnt", "nothing", "nothing/below"] {
        let refused = folder
            .drives(&[name])
            .open(&NoEngine::default())
            .unwrap_err();
        let DiskError::NoDriveYet { expected, .. } = &refused else {
            panic!("{refused}");
        };
        assert_eq!(expected, "");
        assert!(refused.to_string().contains("--disk-create"), "{refused}");
    }
    assert_eq!(fs::read_dir(folder.at("mnt")).unwrap().count(), 0);
    assert!(!folder.at("nothing").exists());
    let deep = folder.drives(&["mnt", "nothing/below"]).with_new_drives();
    drop(deep.open(&NoEngine::default()).unwrap());
    folder
        .drives(&["nothing/below", "mnt"])
        .open(&NoEngine::default())
        .unwrap();
}

#[test]
fn what_was_in_an_empty_mount_point_is_named() {
    let folder = Drives::new();
    let both = folder.drives(&["a", "b"]);
    let made = both
        .clone()
        .with_new_drives()
        .open(&NoEngine::default())
        .unwrap();
    let id = made.inspect()[1].drive_id;
    drop(made);
    fs::rename(folder.at("b"), folder.at("unmounted")).unwrap();
    fs::create_dir(folder.at("b")).unwrap();
    let id: String = id.iter().map(|byte| format!("{byte:02x}")).collect();
    // The other drive knows.
    let refused = both.open(&NoEngine::default()).unwrap_err();
    assert!(refused.to_string().contains(&id), "{refused}");
    // It is another drive now, and the first is missing.
    let tier = both.with_new_drives().open(&NoEngine::default()).unwrap();
    assert_eq!(tier.missing().len(), 1);
}

#[test]
fn drives_of_two_sets_do_not_serve_together() {
    let folder = Drives::new();
    for name in ["a", "b"] {
        store(
            &folder
                .drives(&[name])
                .with_new_drives()
                .open(&NoEngine::default())
                .unwrap(),
        );
    }
    let refused = folder
        .drives(&["a", "b"])
        .open(&NoEngine::default())
        .unwrap_err();
    assert!(
        matches!(refused, DiskError::DifferentSets { .. }),
        "{refused}"
    );
    assert_eq!(
        count(&folder.drives(&["b"]).open(&NoEngine::default()).unwrap()),
        CHUNKS as usize
    );
    // A new drive joins, and its set is that of the other from then on.
    let joined = folder
        .drives(&["a", "c"])
        .with_new_drives()
        .open(&NoEngine::default())
        .unwrap();
    assert_eq!(count(&joined), CHUNKS as usize);
    drop(joined);
    let refused = folder
        .drives(&["c", "b"])
        .open(&NoEngine::default())
        .unwrap_err();
    assert!(
        matches!(refused, DiskError::DifferentSets { .. }),
        "{refused}"
    );
}

#[test]
fn chunks_of_other_settings_are_counted() {
    let folder = Drives::new();
    let open = |settings: &str| {
        let config = folder.drives(&["a", "b"]).with_new_drives();
        config
            .with_key_settings(settings)
            .open(&NoEngine::default())
            .unwrap()
    };
    // Of a version, or an embedder, that named none.
    store(
        &folder
            .drives(&["a", "b"])
            .with_new_drives()
            .open(&NoEngine::default())
            .unwrap(),
    );
    let tier = open("chunks of 256");
    assert!(tier.unreachable().is_empty());
    clear(&tier);
    store(&tier);
    drop(tier);
    for _ in 0..2 {
        let tier = open("chunks of 128");
        let [other] = tier.unreachable() else {
            panic!("{:?}", tier.unreachable());
        };
        let counted = (other.settings.as_str(), other.chunks, other.bytes);
        assert_eq!(counted, ("chunks of 256", CHUNKS, CHUNKS * 4096));
        assert_eq!(count(&tier), CHUNKS as usize);
        assert!(tier.has_unreachable());
    }
    let tier = open("chunks of 256");
    assert!(tier.unreachable().is_empty() && !tier.has_unreachable());
    drop(tier);
    // What comes after a clear is of the present settings.
    let tier = open("chunks of 128");
    assert!(tier.has_unreachable());
    clear(&tier);
    assert!(!tier.has_unreachable());
    store(&tier);
    assert!(!tier.has_unreachable());
}

/// Chunks of a drive that is out were misses without a fault as long as another drive works.
#[test]
fn a_drive_that_is_out_is_the_fault_of_its_own_chunks_alone() {
    let folder = Drives::new();
    let tier = folder.drives(&["a", "b"]).with_new_drives();
    let tier = tier.with_probe_every(Duration::from_millis(1));
    let tier = tier.open(&NoEngine::default()).unwrap();
    clear(&tier);
    store(&tier);
    let faults = || {
        let index = tier.index().unwrap();
        let keys: Vec<_> = (0..CHUNKS).map(test_key).collect();
        let located = index.locate_now(&keys);
        let of = |(key, located): (_, Result<Located, _>)| {
            let is_there = located.unwrap() != Located::Absent;
            (is_there, index.fault_of(key).is_some())
        };
        keys.iter().zip(located).map(of).collect::<Vec<_>>()
    };
    assert_eq!(faults(), [(true, false); CHUNKS as usize]);
    fs::remove_file(folder.at("a").join("lock")).unwrap();
    until("the drive is out", || {
        !matches!(tier.health(), Health::Ready)
    });
    let after = faults();
    assert!(
        after
            .iter()
            .all(|(is_there, is_fault)| is_there != is_fault)
    );
    assert!(after.contains(&(true, false)) && after.contains(&(false, true)));
    // Nothing keeps the tier from a chunk that no drive has.
    let other = test_key(CHUNKS);
    assert!(tier.index().unwrap().fault_of(&other).is_none());
}

/// A handle names the drive of a chunk. A handle that is outdated, or of another tier, costs a miss at most.
#[test]
fn a_chunk_is_read_from_the_drive_that_its_handle_names() {
    let folder = Drives::new();
    let tier = folder
        .drives(&["a", "b"])
        .with_new_drives()
        .open(&NoEngine::default())
        .unwrap();
    store(&tier);
    let pool = pool(MIB);
    let keys: Vec<_> = (0..CHUNKS).map(test_key).collect();
    let located = tier.index().unwrap().locate_now(&keys);
    let handles = located
        .into_iter()
        .map(|located| located.unwrap().present().unwrap().handle);
    let handles: Vec<Option<Handle>> = handles.collect();
    let load = |handles: &[Option<Handle>]| {
        let item = |(key, handle): (&ChunkKey, &Option<Handle>)| {
            LoadItem::new(*key, pool.reserve(4096).unwrap()).with_handle(handle.clone())
        };
        let items = keys.iter().zip(handles).map(item).collect();
        let loaded = load_batch(&tier, items, soon()).into_iter();
        let is_hit = |(key, loaded): (&ChunkKey, Loaded)| match loaded {
            Loaded::Hit(slot) => {
                check_value(key, slot.bytes()).unwrap();
                true
            }
            Loaded::Miss(_) => false,
            failed @ Loaded::Failed { .. } => panic!("{failed:?}"),
        };
        keys.iter()
            .zip(loaded)
            .map(is_hit)
            .filter(|is_hit| *is_hit)
            .count()
    };
    assert!(handles.iter().all(Option::is_some));
    assert_eq!(load(&handles), CHUNKS as usize);
    assert_eq!(load(&vec![None; CHUNKS as usize]), CHUNKS as usize);
    assert_eq!(
        load(&vec![Some(Handle::new(7)); CHUNKS as usize]),
        CHUNKS as usize
    );
    let others: Vec<_> = handles.iter().rev().cloned().collect();
    assert!(
        load(&others) < CHUNKS as usize,
        "some are on the other drive"
    );
    clear(&tier);
    assert_eq!(load(&handles), 0);
}
