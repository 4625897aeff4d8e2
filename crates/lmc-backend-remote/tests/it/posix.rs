//! The store of a shared file system.

#![allow(clippy::unwrap_used, reason = "helpers of tests may panic")]

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures_util::StreamExt as _;
use lmc_backend::conformance::{block_on, fill_value, load_batch, store_batch, test_key};
use lmc_backend::{Backend, BackendError, Health, LoadItem, StoreItem, Stored};
use lmc_backend_remote::conformance::{MemoryStore, check_replaced_values, check_store};
use lmc_backend_remote::format::Name;
use lmc_backend_remote::{
    FileConfig, FileStore, GetItem, Limits, RemoteConfig, RemoteTier, Store, StoreError,
};
use lmc_key::ChunkKey;
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
    Arc::new(FileStore::new(FileConfig::new(folder.to_path_buf())).unwrap())
}

/// A tier over a folder.
struct Rig {
    tier: RemoteTier,
    folder: Folder,
    pool: Pool,
    _runtime: Runtime,
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
        let store = Arc::new(FileStore::new(files).unwrap());
        let runtime = runtime();
        let mut config = RemoteConfig::default();
        config.absent_ttl = Duration::ZERO;
        // The machine may be busy.
        config.timeout = TIMEOUT;
        config.clears_interval = Duration::from_millis(50);
        let tier = RemoteTier::start(config, store, runtime.handle().clone());
        wait_until_used(&tier);
        Self {
            tier,
            folder,
            pool: pool(1 << 20),
            _runtime: runtime,
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

    fn path(&self, key: ChunkKey) -> PathBuf {
        self.folder.join(Name::Value(key).to_string())
    }

    /// The files of the folder.
    fn files(&self) -> usize {
        files(&self.folder).len()
    }
}

fn files(folder: &std::path::Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
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
    let cached = Arc::new(FileStore::new(config).unwrap());
    runtime.block_on(check_store(cached, TIMEOUT));
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
    let other = RemoteTier::start(
        RemoteConfig::default(),
        memory.clone(),
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
    fs::write(rig.path(key), memory.bytes(Name::Value(key)).unwrap()).unwrap();
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
    let store = Arc::new(FileStore::new(FileConfig::new(&root)).unwrap());
    let tier = RemoteTier::start(config, store, runtime.handle().clone());
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
    let written = runtime().block_on(store.write(Name::Clears, bytes, soon()));
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
    let limits = Limits {
        max_bytes: Some((4096 + LEN) * 5 / 2),
        ..Limits::default()
    };
    let dry = Limits {
        dry_run: true,
        ..limits
    };
    let fanout = first.hash.as_bytes()[0];
    let would = store.collect(fanout, dry, None).unwrap();
    assert!(keys.iter().all(|&key| rig.is_hit(key)) && old.exists());
    let collected = store.collect(fanout, limits, None).unwrap();
    assert_eq!(would, collected);
    assert_eq!(
        (collected.evicted, collected.expired, collected.temporary),
        (2, 0, 1)
    );
    assert_eq!(collected.bytes, 4 * (4096 + LEN));
    let hits: Vec<bool> = keys.iter().map(|&key| rig.is_hit(key)).collect();
    assert_eq!(hits, [false, false, true, true]);
    assert!(rig.is_hit(elsewhere) && unknown.exists() && young.exists() && !old.exists());
    let again = store.collect(fanout, limits, None).unwrap();
    assert_eq!((again.evicted, again.removed_bytes), (0, 0));
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
    let result = runtime.block_on(store.touch(&[touched], soon()));
    assert!(matches!(result[..], [Ok(true)]), "{result:?}");
    for key in [old, touched] {
        store.collect(key.hash.as_bytes()[0], limits, None).unwrap();
    }
    assert!(!rig.is_hit(old) && rig.is_hit(touched));
    let head = runtime.block_on(store.heads(&[touched], soon()));
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
    runtime.block_on(store.heads(&[good], soon()));
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
        runtime.block_on(store.heads(&[key], soon()));
        let slot = rig.pool.reserve(LEN).unwrap();
        let got = store.get(vec![GetItem { key, slot }], soon());
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
    let collectors: Vec<FileStore> = (0..3)
        .map(|_| FileStore::new(config.clone()).unwrap())
        .collect();
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
            Arc::new(FileStore::new(config).unwrap())
        };
        runtime().block_on(check_replaced_values(store(), store(), TIMEOUT));
        assert_eq!(files(&folder).len(), 1, "temporary files are left");
    }
}
