//! The store of a shared file system.

#![allow(clippy::unwrap_used, reason = "helpers of tests may panic")]

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures_util::StreamExt as _;
use lmc_backend::conformance::{
    block_on, clear_all, fill_value, load_batch, store_batch, test_key,
};
use lmc_backend::{Backend, BackendError, Health, LoadItem, NoEngine, StoreItem, Stored};
use lmc_backend_remote::conformance::{
    MemoryStore, check_replaced_values, check_store, check_swaps,
};
use lmc_backend_remote::format::{ChunkFolder, Generation, ValueName};
use lmc_backend_remote::{
    FileConfig, FileStore, GetItem, Limits, RemoteConfig, RemoteTier, Shares, Store, StoreError,
    read_clears,
};
use lmc_key::{ChunkKey, ClearsId};
use lmc_memory::Pool;
use lmc_testkit::{Folder, is_root, pool, soon, until};
use tokio::runtime::Runtime;

use crate::common::{is_hit, item, passes_the_kit, passes_the_lossy_kit, runtime, wait_until_used};

const TIMEOUT: Duration = Duration::from_secs(60);
const LEN: u64 = 10_000;

/// A folder on a disk, where direct I/O is possible.
fn folder() -> Folder {
    Folder::inside(env!("CARGO_TARGET_TMPDIR"))
}

fn store(folder: &Folder) -> Arc<FileStore> {
    Arc::new(FileConfig::new(folder.to_path_buf()).open().unwrap())
}

/// A tier over a folder.
struct Rig {
    tier: RemoteTier,
    folder: Folder,
    pool: Pool,
    runtime: Runtime,
}

impl Rig {
    fn new() -> Self {
        Self::limited(None)
    }

    /// A tier over a folder whose chunks may have this number of bytes.
    fn limited(max_bytes: Option<u64>) -> Self {
        let folder = folder();
        let mut files = FileConfig::new(folder.to_path_buf());
        files.max_bytes = max_bytes;
        let store = Arc::new(files.open().unwrap());
        let runtime = runtime();
        let mut config = RemoteConfig::default();
        config.absent_ttl = Duration::ZERO;
        // The machine may be busy.
        config.timeout = TIMEOUT;
        config.clears_interval = Duration::from_millis(500);
        let tier = config.start(
            store,
            Arc::new(NoEngine::default()),
            runtime.handle().clone(),
        );
        wait_until_used(&tier);
        Self {
            tier,
            folder,
            pool: pool(1 << 20),
            runtime,
        }
    }

    fn store(&self, key: ChunkKey) -> Result<Stored, BackendError> {
        let item = item(&self.pool, key, LEN);
        store_batch(&self.tier, vec![item], soon()).pop().unwrap()
    }

    fn is_hit(&self, key: ChunkKey) -> bool {
        let item = LoadItem::new(key, self.pool.reserve(LEN).unwrap());
        is_hit(
            &key,
            load_batch(&self.tier, vec![item], soon()).pop().unwrap(),
        )
    }

    fn name(&self, key: ChunkKey) -> ValueName {
        // The store that reads it is of this one question.
        let store = store(&self.folder);
        let clears = block_on(
            self.runtime
                .spawn(async move { read_clears(&*store, soon()).await }),
        );
        let clears = clears.unwrap().unwrap().unwrap().unwrap();
        clears.folder().value(key)
    }

    fn path(&self, key: ChunkKey) -> PathBuf {
        self.folder.join(self.name(key).to_string())
    }

    /// The chunks of the folder, and what is being written.
    fn files(&self) -> usize {
        let is_small = |path: &PathBuf| {
            path.ends_with("map") || path.parent().is_some_and(|p| p.ends_with("clears"))
        };
        let files = files(&self.folder);
        files.iter().filter(|path| !is_small(path)).count()
    }
}

fn files(folder: &std::path::Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    // A collector may have removed it.
    for entry in fs::read_dir(folder).into_iter().flatten() {
        let entry = entry.unwrap();
        match entry.file_type().unwrap().is_dir() {
            true => files.extend(self::files(&entry.path())),
            false => files.push(entry.path()),
        }
    }
    files
}

#[test]
fn stores_pass_their_kit() {
    let runtime = runtime();
    runtime.block_on(check_store(Arc::new(MemoryStore::default()), TIMEOUT));
    let direct = folder();
    runtime.block_on(check_store(store(&direct), TIMEOUT));
    assert!(
        files(&direct).is_empty(),
        "temporary files: {:?}",
        files(&direct)
    );
    let cached = folder();
    let mut config = FileConfig::new(cached.to_path_buf());
    config.direct = false;
    let cached = Arc::new(config.open().unwrap());
    runtime.block_on(check_store(cached, TIMEOUT));
}

/// Each client is a store of its own, as on hosts that share the folder.
#[test]
fn of_several_writers_of_the_clears_one_succeeds() {
    let runtime = runtime();
    let memory: Arc<dyn Store> = Arc::new(MemoryStore::default());
    runtime.block_on(check_swaps(&vec![memory; 6], TIMEOUT));
    let folder = folder();
    let clients: Vec<Arc<dyn Store>> = (0..6).map(|_| store(&folder) as _).collect();
    runtime.block_on(check_swaps(&clients, TIMEOUT));
    assert!(files(&folder).is_empty(), "versions: {:?}", files(&folder));
}

/// A version that was removed, with its successor, has a number that is free again.
#[test]
fn a_writer_that_was_away_does_not_replace_later_clears() {
    let (runtime, folder) = (runtime(), folder());
    let [early, late] = [store(&folder), store(&folder)];
    let swap = |store: &Arc<FileStore>, text: &str, read| {
        let swap = store.swap_clears(text.to_owned().into(), read, soon());
        runtime.block_on(swap).unwrap()
    };
    let read = |store: &Arc<FileStore>| {
        let read = runtime.block_on(store.read_clears(100, soon()));
        read.unwrap().unwrap()
    };
    assert!(swap(&early, "1", None));
    let (_, first) = read(&late);
    for text in ["2", "3"] {
        let (_, version) = read(&early);
        assert!(swap(&early, text, Some(version)));
    }
    assert!(!swap(&late, "late", Some(first)));
    assert_eq!(read(&late).0, "3");
    assert_eq!(files(&folder).len(), 1);
}

#[test]
fn the_tier_over_a_folder_passes_the_kit() {
    let rig = Rig::new();
    passes_the_kit(&rig.tier);
}

#[test]
fn the_tier_over_a_folder_that_fails_and_flips_bits_passes_the_kit() {
    for seed in 1..=2 {
        let folder = folder();
        passes_the_lossy_kit(store(&folder), seed);
    }
}

#[test]
fn a_value_that_was_torn_or_changed_is_a_miss_and_is_replaced() {
    let rig = Rig::new();
    for (n, len) in [0, 10, 4096, 4097, 4096 + LEN - 1].into_iter().enumerate() {
        let key = test_key(n as u64);
        rig.store(key).unwrap();
        fs::OpenOptions::new()
            .write(true)
            .open(rig.path(key))
            .unwrap()
            .set_len(len)
            .unwrap();
        assert!(!rig.is_hit(key), "cut off after {len} bytes");
        assert_eq!(rig.store(key).unwrap(), Stored::Written);
        assert!(rig.is_hit(key));
    }
    let key = test_key(9);
    rig.store(key).unwrap();
    let mut bytes = fs::read(rig.path(key)).unwrap();
    bytes[4096 + 777] ^= 1;
    fs::write(rig.path(key), bytes).unwrap();
    assert!(!rig.is_hit(key));
    assert_eq!(rig.store(key).unwrap(), Stored::Written);
    assert!(rig.is_hit(key));
}

#[test]
fn a_value_copied_from_a_store_of_another_kind_is_read() {
    let rig = Rig::new();
    let key = test_key(1);
    rig.store(key).unwrap();
    let runtime = runtime();
    let memory = Arc::new(MemoryStore::default());
    let other = RemoteConfig::default().start(
        memory.clone(),
        Arc::new(NoEngine::default()),
        runtime.handle().clone(),
    );
    assert!(block_on(other.ready(soon())));
    until("the store is in use", || other.health() == Health::Ready);
    let mut slot = rig.pool.reserve(LEN).unwrap();
    fill_value(&key, slot.bytes_mut());
    let item = StoreItem::new(key, slot.written().seal());
    store_batch(&other, vec![item], soon())
        .pop()
        .unwrap()
        .unwrap();
    let folder = block_on(read_clears(&*memory, soon()));
    let name = folder.unwrap().unwrap().unwrap().folder().value(key);
    fs::write(rig.path(key), memory.bytes(name.into()).unwrap()).unwrap();
    assert!(rig.is_hit(key));
}

#[test]
fn links_pipes_and_folders_instead_of_files_are_not_followed() {
    let rig = Rig::new();
    let (key, other) = (test_key(1), test_key(2));
    rig.store(key).unwrap();
    rig.store(other).unwrap();
    let outside = folder();
    let secret = outside.join("secret");
    fs::rename(rig.path(key), &secret).unwrap();
    symlink(&secret, rig.path(key)).unwrap();
    assert!(!rig.is_hit(key), "a link");
    let before = fs::read(&secret).unwrap();
    assert_eq!(
        rig.store(key).unwrap(),
        Stored::Written,
        "the link is replaced"
    );
    assert!(rig.is_hit(key) && fs::symlink_metadata(rig.path(key)).unwrap().is_file());
    assert_eq!(fs::read(&secret).unwrap(), before);
    fs::remove_file(rig.path(other)).unwrap();
    let path = rig.path(other);
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &path,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RWXU,
        0,
    )
    .unwrap();
    assert!(!rig.is_hit(other), "a pipe");
    // A folder on the way that leads out.
    let space = rig.path(key).parent().unwrap().to_owned();
    let moved = outside.join("space");
    let count = fs::read_dir(&space).unwrap().count();
    fs::rename(&space, &moved).unwrap();
    symlink(&moved, &space).unwrap();
    assert!(!rig.is_hit(key));
    assert!(rig.store(key).is_err());
    assert_eq!(fs::read_dir(&moved).unwrap().count(), count);
}

#[test]
fn a_folder_that_is_not_there_is_not_made_and_is_used_once_it_is() {
    let parent = folder();
    let root = parent.join("mount");
    let runtime = runtime();
    let mut config = RemoteConfig::default();
    config.probe_pause = (Duration::from_millis(1), Duration::from_millis(5));
    let store = Arc::new(FileConfig::new(&root).open().unwrap());
    let tier = config.start(
        store,
        Arc::new(NoEngine::default()),
        runtime.handle().clone(),
    );
    until("the reason is known", || match tier.health() {
        Health::Down { reason } => reason.contains("mount"),
        _ => false,
    });
    assert!(!root.exists());
    fs::create_dir(&root).unwrap();
    until("the store is in use", || tier.health() == Health::Ready);
}

#[test]
fn a_folder_without_permission_is_an_error_and_no_miss() {
    if is_root() {
        eprintln!("skipped: root may write everywhere");
        return;
    }
    let folder = folder();
    fs::set_permissions(&*folder, fs::Permissions::from_mode(0o500)).unwrap();
    let bytes = "x".as_bytes().into();
    let store = store(&folder);
    let written = runtime().block_on(store.swap_clears(bytes, None, soon()));
    assert!(
        matches!(written, Err(StoreError::Denied { .. })),
        "{written:?}"
    );
}

/// Sets the time of a file's last change.
fn make_old(path: &std::path::Path, age: Duration) {
    let file = fs::OpenOptions::new().write(true).open(path).unwrap();
    file.set_modified(SystemTime::now() - age).unwrap();
}

/// Shares of a size, for a tree whose other folders are known to be empty.
fn alone(size: u64, fanout: u8) -> Shares {
    let mut shares = Shares::of(Some(size));
    let others = (0..=u8::MAX).filter(|&other| other != fanout);
    others.for_each(|other| shares.skip(other));
    shares
}

/// The share was taken of the folder as it was last seen, which was nothing where it was empty then.
#[test]
fn a_folder_that_was_empty_keeps_its_share_of_what_has_come_since() {
    let rig = Rig::new();
    let (full, first) = (test_key(4), test_key(0));
    let of = |key: ChunkKey| key.hash.as_bytes()[0];
    assert_ne!(of(full), of(first));
    let store = store(&rig.folder);
    let mut shares = Shares::of(Some((4096 + LEN) * 11));
    let mut collect = |fanout| {
        let collected = store.collect(fanout, Limits::default(), &mut shares, None);
        collected.unwrap().evicted
    };
    let write = |key, count| {
        let keys = (0..count).map(move |group| ChunkKey { group, ..key });
        keys.for_each(|key| assert_eq!(rig.store(key).unwrap(), Stored::Written));
    };
    write(full, 8);
    assert_eq!((0..=u8::MAX).map(&mut collect).sum::<u64>(), 0);
    write(first, 4);
    assert_eq!(collect(of(first)), 1, "of 12 chunks one is too much");
}

/// One such folder turned the collection of all by size off, with a line in the log for each attempt.
#[test]
fn a_folder_that_cannot_be_collected_keeps_no_other_from_it() {
    if is_root() {
        eprintln!("skipped: root may read everywhere");
        return;
    }
    let rig = Rig::new();
    let keys: Vec<_> = (0..20).map(test_key).collect();
    for &key in &keys {
        rig.store(key).unwrap();
    }
    let (bad, fanout) = (rig.path(keys[0]), keys[0].hash.as_bytes()[0]);
    let set_mode = |mode| {
        let mode = fs::Permissions::from_mode(mode);
        fs::set_permissions(bad.parent().unwrap(), mode).unwrap();
    };
    set_mode(0o000);
    let mut config = FileConfig::new(rig.folder.to_path_buf());
    config.max_bytes = Some(1);
    config.collect_pause = Duration::from_millis(1);
    let collector = config.open().unwrap();
    let others = || {
        let others = keys.iter().filter(|key| key.hash.as_bytes()[0] != fanout);
        others.filter(|key| rig.path(**key).exists()).count()
    };
    until("the others are collected", || others() == 0);
    drop(collector);
    set_mode(0o700);
    assert!(rig.path(keys[0]).exists());
}

#[test]
fn a_collection_removes_the_oldest_of_a_folder_beyond_its_share() {
    let rig = Rig::new();
    // Four values of one folder of the fan-out, which may hold two and a half.
    let first = test_key(0);
    let keys: Vec<ChunkKey> = (0..4).map(|group| ChunkKey { group, ..first }).collect();
    for (n, &key) in keys.iter().enumerate() {
        rig.store(key).unwrap();
        make_old(&rig.path(key), Duration::from_secs(100 * (4 - n as u64)));
    }
    let elsewhere = test_key(4);
    rig.store(elsewhere).unwrap();
    let unknown = rig.path(first).with_file_name("notes");
    fs::write(&unknown, "of another user").unwrap();
    let (old, young) = (
        rig.path(first).with_file_name(".tmp-old"),
        rig.path(first).with_file_name(".tmp-young"),
    );
    fs::write(&old, "torn").unwrap();
    fs::write(&young, "being written").unwrap();
    make_old(&old, Duration::from_secs(3700));
    let store = store(&rig.folder);
    let limits = Limits::default();
    let dry = Limits {
        dry_run: true,
        ..limits
    };
    let fanout = first.hash.as_bytes()[0];
    let size = (4096 + LEN) * 5 / 2;
    let mut shares = alone(size, fanout);
    let would = store.collect(fanout, dry, &mut shares, None).unwrap();
    assert!(keys.iter().all(|&key| rig.is_hit(key)) && old.exists());
    let collected = store.collect(fanout, limits, &mut shares, None).unwrap();
    assert_eq!(would, collected);
    assert_eq!(
        (collected.evicted, collected.expired, collected.temporary),
        (2, 0, 1)
    );
    assert_eq!(collected.bytes, 4 * (4096 + LEN));
    let hits: Vec<bool> = keys.iter().map(|&key| rig.is_hit(key)).collect();
    assert_eq!(hits, [false, false, true, true]);
    assert!(rig.is_hit(elsewhere) && unknown.exists() && young.exists() && !old.exists());
    let again = store.collect(fanout, limits, &mut shares, None).unwrap();
    assert_eq!((again.evicted, again.removed_bytes), (0, 0));
}

/// Returns the files below a folder of chunks.
fn files_of(rig: &Rig, folder: ChunkFolder) -> usize {
    let path = rig.folder.join(folder.to_string());
    if path.exists() { files(&path).len() } else { 0 }
}

#[test]
fn a_collection_takes_what_no_daemon_asks_for_first_and_leaves_what_it_does_not_know() {
    let rig = Rig::new();
    let first = test_key(0);
    let keys: Vec<ChunkKey> = (0..4).map(|group| ChunkKey { group, ..first }).collect();
    rig.store(keys[0]).unwrap();
    let stale = rig.name(keys[0]).folder;
    clear_all(&rig.tier, soon()).unwrap();
    rig.store(keys[1]).unwrap();
    make_old(&rig.path(keys[1]), Duration::from_secs(1000));
    let used = rig.name(keys[1]).folder;
    assert_ne!(stale, used);
    // Of another generation, and without a map.
    let replaced = ChunkFolder {
        generation: Generation::new([9; 8]),
        ..used
    };
    let unknown = ChunkFolder {
        clears: ClearsId::new([9; 16]),
        ..used
    };
    for (folder, key) in [(replaced, keys[2]), (unknown, keys[3])] {
        let path = rig.folder.join(folder.value(key).to_string());
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::copy(rig.path(keys[1]), path).unwrap();
    }
    let store = store(&rig.folder);
    let fanout = first.hash.as_bytes()[0];
    let collect = |chunks| {
        let mut shares = alone((4096 + LEN) * chunks, fanout);
        let collected = store.collect(fanout, Limits::default(), &mut shares, None);
        collected.unwrap().evicted
    };
    assert_eq!(collect(2), 2);
    assert!(rig.is_hit(keys[1]), "it is older");
    assert_eq!((files_of(&rig, unknown), files_of(&rig, replaced)), (1, 0));
    assert_eq!(files_of(&rig, stale), 1, "its map");
    assert_eq!(collect(2), 0, "folders that are empty now are removed");
    let collected = store.collect(0, Limits::default(), &mut Shares::of(None), None);
    collected.unwrap();
    assert_eq!(files_of(&rig, stale), 0);
    assert_eq!(collect(0), 1);
    assert!(!rig.is_hit(keys[1]));
    assert_eq!(files_of(&rig, unknown), 1, "it is left in any case");
    // Without the clears nothing is known.
    rig.store(keys[1]).unwrap();
    runtime().block_on(rig.tier.close(soon())).unwrap();
    fs::remove_dir_all(rig.folder.join("v2/clears")).unwrap();
    assert_eq!(collect(0), 0);
}

#[test]
fn the_command_that_removes_the_old_layout_is_known() {
    let folder = folder();
    let store = store(&folder);
    let old = || runtime().block_on(store.old_chunks(soon())).unwrap();
    assert_eq!(old(), None);
    fs::create_dir(folder.join("v1")).unwrap();
    assert_eq!(old(), Some(format!("rm -r {}/v1", folder.text())));
}

#[test]
fn a_collection_removes_what_is_too_old_by_the_file_servers_clock() {
    let rig = Rig::new();
    let (old, touched) = (test_key(0), test_key(1));
    for key in [old, touched] {
        rig.store(key).unwrap();
        make_old(&rig.path(key), Duration::from_secs(7200));
    }
    let store = store(&rig.folder);
    let limits = Limits {
        ttl: Some(Duration::from_secs(3600)),
        ..Limits::default()
    };
    let runtime = runtime();
    let result = runtime.block_on(store.touch(&[rig.name(touched)], soon()));
    assert!(matches!(result[..], [Ok(true)]), "{result:?}");
    for key in [old, touched] {
        let (fanout, mut shares) = (key.hash.as_bytes()[0], Shares::of(None));
        store.collect(fanout, limits, &mut shares, None).unwrap();
    }
    assert!(!rig.is_hit(old) && rig.is_hit(touched));
    let head = runtime.block_on(store.heads(&[rig.name(touched)], soon()));
    let age = head[0].as_ref().unwrap().as_ref().unwrap().age;
    assert!(
        age.is_some_and(|age| age < Duration::from_secs(3600)),
        "{age:?}"
    );
}

/// Chunks went by the time of their write, so that the prefixes that all prompts share went first.
#[test]
fn a_chunk_that_is_read_is_as_young_as_a_new_one_where_the_size_is_limited() {
    let rig = Rig::limited(Some(1 << 40));
    let [old, younger] = [test_key(0), test_key(1)];
    for (key, minutes) in [(old, 120), (younger, 30)] {
        rig.store(key).unwrap();
        make_old(&rig.path(key), Duration::from_secs(60 * minutes));
        assert!(rig.is_hit(key));
    }
    let age = |key| {
        let modified = fs::metadata(rig.path(key)).unwrap().modified().unwrap();
        SystemTime::now()
            .duration_since(modified)
            .unwrap_or_default()
    };
    until("it is as young as a new one", || {
        age(old) < Duration::from_secs(1800)
    });
    assert!(
        age(younger) >= Duration::from_secs(1800),
        "an hour is precise enough"
    );
}

/// A folder under a chunk's name, and a value of another layout, turned direct I/O off for good.
#[test]
fn an_entry_that_takes_no_direct_io_says_nothing_of_the_others() {
    let rig = Rig::new();
    let store = store(&rig.folder);
    let [good, folder, odd] = [test_key(0), test_key(1), test_key(2)];
    for key in [good, odd] {
        rig.store(key).unwrap();
    }
    let runtime = runtime();
    runtime.block_on(store.heads(&[rig.name(good)], soon()));
    if !store.is_direct() {
        return println!("skipped: the file system of the tests takes no direct I/O");
    }
    fs::create_dir_all(rig.path(folder)).unwrap();
    let bytes = fs::read(rig.path(odd)).unwrap();
    // The payload at 4,097 instead of 4,096.
    let mut moved = bytes.clone();
    moved[32..40].copy_from_slice(&4097_u64.to_le_bytes());
    moved.insert(4096, 0);
    fs::write(rig.path(odd), moved).unwrap();
    for key in [folder, odd] {
        runtime.block_on(store.heads(&[rig.name(key)], soon()));
        let (name, slot) = (rig.name(key), rig.pool.reserve(LEN).unwrap());
        let got = store.get(vec![GetItem { name, slot }], soon());
        let got: Vec<_> = runtime.block_on(got.collect());
        assert_eq!(got.len(), 1);
        assert!(store.is_direct(), "{key:?}");
    }
    assert!(rig.is_hit(good) && !rig.is_hit(folder));
}

/// Operators empty a store by `rm -rf FOLDER; mkdir FOLDER`: nothing was written or found there any
/// more until a restart, and the tier was well.
#[test]
fn a_folder_that_was_removed_is_a_fault_and_one_that_was_made_again_is_used() {
    let rig = Rig::new();
    let [before, after] = [test_key(0), test_key(1)];
    rig.store(before).unwrap();
    let root = rig.folder.to_path_buf();
    let aside = root.with_extension("aside");
    fs::rename(&root, &aside).unwrap();
    until(
        "the tier says that the folder is gone",
        || matches!(rig.tier.health(), Health::Down { ref reason, .. } if reason.contains("create the folder")),
    );
    fs::create_dir(&root).unwrap();
    wait_until_used(&rig.tier);
    rig.store(after).unwrap();
    assert!(rig.is_hit(after) && !rig.is_hit(before));
    assert!(rig.path(after).exists());
    // A folder is replaced at once.
    fs::rename(&root, root.with_extension("second")).unwrap();
    fs::rename(&aside, &root).unwrap();
    until("the first folder is used again", || rig.is_hit(before));
    assert!(!rig.is_hit(after));
    fs::remove_dir_all(root.with_extension("second")).unwrap();
}

#[test]
fn several_collectors_keep_a_folder_within_its_size_while_it_is_written() {
    let rig = Rig::new();
    let mut config = FileConfig::new(rig.folder.to_path_buf());
    config.max_bytes = Some(1);
    config.collect_pause = Duration::from_millis(1);
    let collectors: Vec<FileStore> = (0..3).map(|_| config.clone().open().unwrap()).collect();
    for n in 0..200 {
        rig.store(test_key(n)).unwrap();
    }
    until("everything is removed", || rig.files() == 0);
    drop(collectors);
    rig.store(test_key(0)).unwrap();
    assert!(rig.is_hit(test_key(0)));
}

#[test]
fn readers_never_see_half_of_a_value_that_is_replaced() {
    for direct in [true, false] {
        let folder = folder();
        let store = || {
            let mut config = FileConfig::new(folder.to_path_buf());
            config.direct = direct;
            Arc::new(config.open().unwrap())
        };
        runtime().block_on(check_replaced_values(store(), store(), TIMEOUT));
        assert_eq!(files(&folder).len(), 1, "temporary files are left");
    }
}
