//! `lmc remote` over every kind of store. `cargo xtask test-remote` runs the tests that need a
//! server.

#[allow(dead_code, reason = "the tests of the tier use all of it")]
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use lmc_backend::conformance::fill_value;
use lmc_backend::{Clears, StartId, in_order};
use lmc_backend_remote::format::{
    ChunkFolder, ClearsRecord, Generation, Header, Name, Scope, SpaceRecord, ValueName, probe,
};
use lmc_backend_remote::redis::RedisConfig;
use lmc_backend_remote::s3::S3Config;
use lmc_backend_remote::{FileConfig, Put, PutItem, PutMode, Store};
use lmc_key::{
    ChunkHash, ChunkKey, ClearsId, HashAlgorithm, IdentityText, KeySpace, LayoutFingerprint,
    SpaceId,
};
use lmc_testkit::{Folder, pool, soon, write_secret};
use serde_json::Value;
use tokio::runtime::Runtime;

use crate::common::redis::Redis;
use crate::s3_servers::{BUCKET, Fault, Kind, Proxy, Server as S3Server};

/// Bytes of a chunk, and what a store has of it beside the header.
const LEN: u64 = 5000;

/// A store that tests fill, and the program's way to it.
struct Rig {
    store: Arc<dyn Store>,
    runtime: Runtime,
    url: String,
    variables: Vec<(&'static str, String)>,
}

fn runtime() -> Runtime {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    let builder = builder.worker_threads(1).enable_all();
    builder.build().expect("a runtime")
}

fn folder() -> Folder {
    Folder::inside(env!("CARGO_TARGET_TMPDIR"))
}

/// A space of a model and a tenant.
fn space(model: &str, salt: &str) -> KeySpace {
    KeySpace {
        algorithm: HashAlgorithm::Blake3,
        chunk_size: 256,
        model: model.parse().expect("a name"),
        world_size: 1,
        layout: LayoutFingerprint::of(b"layout"),
        dtype: "half".parse().expect("a name"),
        salt: salt.parse().expect("a salt"),
        identity: IdentityText::default(),
        tags: None,
    }
}

/// Folder of the chunks, from before the first clear.
const FOLDER: ChunkFolder = ChunkFolder {
    generation: Generation::new([7; 8]),
    clears: ClearsId::NONE,
};

/// Keys of a space, spread over the folders.
fn keys(space: SpaceId, count: u8) -> Vec<ValueName> {
    let key = |n: u8| ChunkKey {
        space,
        kv_rank: 0,
        group: 0,
        hash: ChunkHash::new([n.wrapping_mul(37); 32]),
    };
    (0..count).map(key).map(|key| FOLDER.value(key)).collect()
}

impl Rig {
    fn over(folder: &Folder) -> Self {
        let store = FileConfig::new(folder.to_path_buf())
            .open()
            .expect("a store");
        Self {
            store: Arc::new(store),
            runtime: runtime(),
            url: format!("file://{}", folder.text()),
            variables: Vec::new(),
        }
    }

    fn over_redis(port: u16) -> Self {
        let url = format!("redis://127.0.0.1:{port}");
        let config = RedisConfig::new(url.parse().expect("a URL"));
        Self {
            store: Arc::new(config.open().expect("a store")),
            runtime: runtime(),
            url,
            variables: Vec::new(),
        }
    }

    fn over_s3(port: u16) -> Self {
        let variables = crate::s3_servers::variables(port);
        let url = format!("s3://{BUCKET}/of/lmc");
        let owned = |(name, value): &(&str, String)| ((*name).to_owned(), value.clone());
        let config = S3Config::new(url.parse().expect("a URL"), variables.iter().map(owned));
        Self {
            store: Arc::new(config.expect("settings").open().expect("a store")),
            runtime: runtime(),
            url,
            variables,
        }
    }

    fn put(&self, keys: &[ValueName]) {
        let pool = pool(8 << 20);
        let item = |name: &ValueName| {
            let mut slot = pool.reserve(LEN).expect("memory");
            fill_value(&name.key, slot.bytes_mut());
            let slot = slot.written().seal();
            let offset = self.store.payload_offset();
            PutItem {
                folder: name.folder,
                header: Header::raw(name.key, offset, LEN, slot.checksum()),
                slot,
                mode: PutMode::Create,
            }
        };
        let items = keys.iter().map(item).collect();
        let puts = in_order(self.store.put(items, soon()), keys.len());
        for put in self.runtime.block_on(puts) {
            assert!(matches!(put, Some(Ok(Put::Written))), "{put:?}");
        }
    }

    /// Stores chunks of a space, and describes it.
    fn fill(&self, space: &KeySpace, count: u8) {
        self.put(&keys(space.id(), count));
        let digest = (!space.salt.is_empty()).then_some([0xd1; 16]);
        let record = SpaceRecord::new(space, digest);
        self.write(Name::Space(FOLDER, space.id()), record.encode());
    }

    fn write(&self, name: Name, bytes: Vec<u8>) {
        let write = self.store.write(name, bytes.into(), soon());
        self.runtime.block_on(write).expect("it is written");
    }

    /// Writes the object of clears, with this many of one process.
    fn clear(&self, count: u64) {
        let entries = (count > 0).then_some((StartId::new([1; 16]), count));
        let record = ClearsRecord {
            generation: FOLDER.generation,
            clears: Clears::from_entries(entries).expect("one"),
        };
        let write = self.store.swap_clears(record.encode().into(), None, soon());
        assert!(self.runtime.block_on(write).expect("it is written"));
    }

    /// Returns the number of objects in a scope.
    fn count(&self, scope: Scope) -> usize {
        let (mut count, mut token) = (0, None);
        loop {
            let page = self.store.list(scope, token.as_deref(), 1000, soon());
            let page = self.runtime.block_on(page).expect("a page");
            count += page.objects.len();
            token = page.next;
            if token.is_none() {
                return count;
            }
        }
    }

    fn count_of(&self, space: &KeySpace) -> usize {
        self.count(Scope::Values {
            folder: None,
            fanout: None,
            space: Some(space.id()),
        })
    }

    fn has_clears(&self) -> bool {
        let read = self.store.read_clears(1 << 20, soon());
        self.runtime.block_on(read).expect("an answer").is_some()
    }

    fn has(&self, name: Name) -> bool {
        let read = self.store.read(name, 1 << 20, soon());
        self.runtime.block_on(read).expect("an answer").is_some()
    }

    /// Returns `lmc remote VERB URL` with flags.
    fn command(&self, verb: &str, flags: &[&str]) -> Command {
        let mut command = crate::common::lmc();
        command.args(["remote", verb, &self.url]).args(flags);
        command.env_remove("LMC_REMOTE").stdin(Stdio::null());
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
        command
    }

    fn run(&self, verb: &str, flags: &[&str]) -> Said {
        Said::of(self.command(verb, flags).output().expect("it runs"))
    }

    fn json(&self, verb: &str, flags: &[&str]) -> Value {
        let said = self.run(verb, flags).succeeded();
        serde_json::from_str(&said.out).unwrap_or_else(|_| panic!("no JSON: {}", said.out))
    }
}

/// The end of the program.
struct Said {
    code: Option<i32>,
    out: String,
    error: String,
}

impl Said {
    fn of(output: Output) -> Self {
        let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
        let this = Self {
            code: output.status.code(),
            out: text(output.stdout),
            error: text(output.stderr),
        };
        assert!(!this.all().contains("marked-"), "a secret: {}", this.all());
        this
    }

    fn all(&self) -> String {
        format!("{}{}", self.out, self.error)
    }

    fn succeeded(self) -> Self {
        assert_eq!(self.code, Some(0), "{}", self.all());
        self
    }

    fn failed_with(&self, part: &str) {
        assert_eq!(self.code, Some(1), "{}", self.all());
        assert!(self.all().contains(part), "no {part:?} in {}", self.all());
    }
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        match path.is_dir() {
            true => files.extend(self::files(&path)),
            false => files.push(path),
        }
    }
    files.sort();
    files
}

/// Checks a store that works. The store has chunks of other users, and a clear.
fn is_checked(rig: &Rig) {
    rig.fill(&space("model", ""), 3);
    rig.clear(3);
    let said = rig.run("check", &[]).succeeded();
    for part in [
        "3 clears were passed on",
        "64.0 KiB: written in",
        "4.00 MiB: written in",
        "at a time",
        "values are listed",
        "the store's clock is within a second of this host's clock",
        "the written values are removed",
        "the store can be used",
    ] {
        assert!(said.out.contains(part), "no {part:?} in {}", said.out);
    }
    assert!(!said.out.contains("FAULT"), "{}", said.out);
    assert_eq!(rig.count(Scope::VALUES), 3, "probes are left");
    assert_eq!(rig.count(Scope::Spaces), 1);
}

/// Counts the chunks of two models and three tenants.
fn is_counted(rig: &Rig) {
    let salted = space("model", "marked-salt");
    let unknown = space("unknown", "");
    rig.fill(&space("model", ""), 5);
    rig.fill(&salted, 4);
    rig.fill(&space("other \"model\"", ""), 2);
    rig.put(&keys(unknown.id(), 3));
    let value = LEN + rig.store.payload_offset();
    let du = rig.json("du", &["--json"]);
    assert_eq!(
        (&du["chunks"], &du["bytes"]),
        (&14.into(), &(14 * value).into())
    );
    let sums = |sums: &str, of: &str, name: Option<&str>| {
        let sums = du[sums].as_array().expect("an array");
        let sum = sums.iter().find(|sum| sum[of].as_str() == name);
        let sum = sum.unwrap_or_else(|| panic!("no {name:?} in {du}"));
        assert_eq!(
            sum["bytes"],
            sum["chunks"].as_u64().expect("a number") * value
        );
        sum["chunks"].clone()
    };
    assert_eq!(sums("models", "model", Some("model")), 9);
    assert_eq!(sums("models", "model", Some("other \"model\"")), 2);
    assert_eq!(sums("models", "model", None), 3);
    assert_eq!(sums("tenants", "tenant", Some("none")), 7);
    assert_eq!(sums("tenants", "tenant", Some(&"d1".repeat(16))), 4);
    assert_eq!(sums("spaces", "space", Some(&unknown.id().to_string())), 3);
    let said = rig.run("du", &[]).succeeded();
    for part in [
        "14 chunks",
        "model model: 9 chunks",
        &salted.id().to_string(),
        "no description: 3",
    ] {
        assert!(said.out.contains(part), "no {part:?} in {}", said.out);
    }
}

/// Removes chunks by tenant, model and space, each after a look that removes nothing.
fn is_removed_by_selectors(rig: &Rig) {
    let secrets = Folder::temporary();
    let salt = secrets.join("salt");
    let salt_file = salt.to_str().expect("text");
    let (common, salted) = (space("model", ""), space("model", "marked-salt"));
    let (other, unknown) = (space("other", ""), space("unknown", ""));
    let unknown_id = unknown.id().to_string();
    rig.fill(&common, 5);
    rig.fill(&salted, 4);
    rig.fill(&other, 2);
    rig.put(&keys(unknown.id(), 3));
    rig.clear(0);
    let counts = || [&common, &salted, &other, &unknown].map(|space| rig.count_of(space));
    for (flags, part) in [
        (&[][..], "--all"),
        (&["--yes"], "--all"),
        (&["--older-than", "1h", "--yes"], "--all"),
        (&["--model", "model"], "--yes is required"),
        (&["--all"], "--yes is required"),
        (
            &["--model", "nosuch", "--yes"],
            "no space has a description",
        ),
        (&["--space", "00", "--yes"], "32 digits"),
        (&["--tenant", salt_file, "--yes"], "No such file"),
        (
            &["--all", "--older-than", "soon", "--yes"],
            "--older-than soon",
        ),
    ] {
        rig.run("rm", flags).failed_with(part);
    }
    for (text, part) in [
        ("", "the file is empty"),
        ("marked-\0", "expected one salt"),
        ("nosuch", "no space"),
    ] {
        write_secret(&salt, text);
        rig.run("rm", &["--tenant", salt_file, "--yes"])
            .failed_with(part);
    }
    write_secret(&salt, "marked-salt\n");
    let said = rig
        .run("rm", &["--model", "model", "--dry-run"])
        .succeeded();
    assert!(said.out.contains("9 chunks"), "{}", said.out);
    rig.run("rm", &["--tenant", salt_file, "--model", "other", "--yes"])
        .failed_with("no space");
    assert_eq!(counts(), [5, 4, 2, 3]);
    for (mode, refusal) in [(0o644, Some("chmod 600")), (0o600, None)] {
        fs::set_permissions(&salt, fs::Permissions::from_mode(mode)).expect("it is ours");
        let said = rig.run("rm", &["--tenant", salt_file, "--dry-run"]);
        match refusal {
            Some(refusal) => said.failed_with(refusal),
            None => drop(said.succeeded()),
        }
    }
    let said = rig.run("rm", &["--tenant", salt_file, "--yes"]).succeeded();
    assert!(said.out.contains("removed 4 chunks"), "{}", said.out);
    assert_eq!(counts(), [5, 0, 2, 3]);
    assert!(
        !rig.has(Name::Space(FOLDER, salted.id())) && rig.has(Name::Space(FOLDER, common.id()))
    );
    rig.run("rm", &["--space", &unknown_id, "--yes"])
        .succeeded();
    assert_eq!(counts(), [5, 0, 2, 0]);
    // All are young, or of an age that is not known.
    rig.run("rm", &["--all", "--older-than", "1h", "--yes"])
        .succeeded();
    write_secret(&salt, "_default");
    rig.run("rm", &["--tenant", salt_file, "--model", "model", "--yes"])
        .succeeded();
    assert_eq!(counts(), [0, 0, 2, 0]);
    rig.run("rm", &["--all", "--yes"]).succeeded();
    assert_eq!((rig.count(Scope::VALUES), rig.count(Scope::Spaces)), (0, 0));
    assert!(rig.has_clears(), "clears are passed on");
}

/// Makes a file older.
fn make_old(path: &Path, hours: u64) {
    let file = fs::File::options().write(true).open(path).expect("a file");
    let then = SystemTime::now() - Duration::from_secs(3600 * hours);
    file.set_modified(then).expect("it is ours");
}

/// Collects chunks by tenant, model and space. The store has its objects as files, at these paths.
/// Of three old chunks and a young one the size leaves `left`.
fn is_collected_by_selectors(rig: &Rig, path: &dyn Fn(Name) -> PathBuf, size: u64, left: usize) {
    let secrets = Folder::temporary();
    let salt = secrets.join("salt");
    let salt_file = salt.to_str().expect("text");
    write_secret(&salt, "marked-salt");
    let (common, salted) = (space("model", ""), space("model", "marked-salt"));
    let other = space("other", "");
    // Without it no chunk is known to be one that daemons do not need.
    rig.clear(0);
    let probe = probe([3; 32]);
    rig.put(&[probe]);
    make_old(&path(Name::Value(probe)), 48);
    for space in [&common, &salted, &other] {
        rig.fill(space, 4);
        make_old(&path(Name::Space(FOLDER, space.id())), 48);
        for key in &keys(space.id(), 4)[..3] {
            make_old(&path(Name::Value(*key)), 48);
        }
    }
    let counts = || [&common, &salted, &other].map(|space| rig.count_of(space));
    for (flags, part) in [
        (["--model", "nosuch"], "no space has a description"),
        (["--space", "00"], "32 digits"),
        (["--tenant", "/nosuch"], "No such file"),
    ] {
        let flags = [&flags[..], &["--older-than", "1d"]].concat();
        rig.run("gc", &flags).failed_with(part);
    }
    let flags = ["--model", "model", "--older-than", "1d", "--dry-run"];
    let said = rig.run("gc", &flags).succeeded();
    assert!(said.out.contains("would remove 6 chunks"), "{}", said.out);
    assert_eq!(counts(), [4, 4, 4]);
    let flags = ["--tenant", salt_file, "--older-than", "1d"];
    let said = rig.run("gc", &flags).succeeded();
    assert!(said.out.contains("removed 3 chunks"), "{}", said.out);
    assert_eq!(counts(), [4, 1, 4]);
    // Both spaces of the model fit, and so does the other model alone; all together would not.
    let value = LEN + rig.store.payload_offset();
    let (both, one) = (5 * value, 4 * value);
    for (model, size, left) in [("model", both, 4), ("other", one, 4), ("other", size, left)] {
        rig.run("gc", &["--model", model, "--size", &size.to_string()])
            .succeeded();
        assert_eq!(counts(), [4, 1, left]);
    }
    let common_id = common.id().to_string();
    rig.run("gc", &["--space", &common_id, "--older-than", "1d"])
        .succeeded();
    assert_eq!(counts(), [1, 1, left]);
    assert_eq!(rig.count(Scope::PROBES), 1, "a probe is of no model");
}

#[test]
fn a_folder_is_collected_by_model_tenant_and_space() {
    let folder = folder();
    let rig = Rig::over(&folder);
    let path = |name: Name| folder.join(name.to_string());
    is_collected_by_selectors(&rig, &path, 1, 0);
    // Leftovers go with their space: its chunks have gone, and not long ago it was described.
    let [of_model, of_other, unused] = ["model", "other", "unused"].map(|model| space(model, ""));
    rig.write(
        Name::Space(FOLDER, unused.id()),
        SpaceRecord::new(&unused, None).encode(),
    );
    make_old(&path(Name::Space(FOLDER, unused.id())), 2);
    let temporary = |space: &KeySpace| {
        let chunk = path(Name::Value(keys(space.id(), 1)[0]));
        let file = chunk.with_file_name(".tmp-00");
        fs::create_dir_all(file.parent().expect("a folder")).expect("space");
        file
    };
    let leftovers = [
        temporary(&of_model),
        temporary(&of_other),
        folder.join("v2/.tmp-00"),
    ];
    for file in &leftovers {
        fs::write(file, "x").expect("space");
        make_old(file, 2);
    }
    let described =
        || [&of_model, &of_other, &unused].map(|s| rig.has(Name::Space(FOLDER, s.id())));
    assert_eq!(described(), [true, false, true]);
    rig.fill(&of_other, 1);
    make_old(&path(Name::Space(FOLDER, of_other.id())), 2);
    rig.run("gc", &["--model", "other"]).succeeded();
    assert_eq!(described(), [true, true, true]);
    rig.run("gc", &["--model", "unused"]).succeeded();
    assert_eq!(described(), [true, true, false]);
    let left = leftovers.map(|file| file.exists());
    assert_eq!(left, [true, false, true]);
}

#[test]
fn chunks_of_a_folder_are_removed_by_model_tenant_and_space() {
    is_removed_by_selectors(&Rig::over(&folder()));
}

#[test]
fn chunks_of_a_folder_are_removed_by_age() {
    let folder = folder();
    let rig = Rig::over(&folder);
    let space = space("model", "");
    rig.fill(&space, 4);
    for key in &keys(space.id(), 4)[..3] {
        make_old(&folder.join(Name::Value(*key).to_string()), 48);
    }
    let said = rig
        .run("rm", &["--model", "model", "--older-than", "1d", "--yes"])
        .succeeded();
    assert!(said.out.contains("removed 3 chunks"), "{}", said.out);
    assert_eq!(rig.count_of(&space), 1);
    assert!(
        rig.has(Name::Space(FOLDER, space.id())),
        "the space has chunks"
    );
}

#[test]
fn a_folder_is_collected_by_age_and_size_and_leftovers_go() {
    let folder = folder();
    let rig = Rig::over(&folder);
    let (used, unused, new) = (space("used", ""), space("unused", ""), space("new", ""));
    rig.clear(0);
    rig.fill(&used, 6);
    for space in [&unused, &new] {
        let record = SpaceRecord::new(space, None);
        rig.write(Name::Space(FOLDER, space.id()), record.encode());
    }
    let (probe, young_probe) = (probe([3; 32]), probe([4; 32]));
    rig.put(&[probe, young_probe]);
    let path = |name: Name| folder.join(name.to_string());
    let of_chunk = |n: usize| path(Name::Value(keys(used.id(), 6)[n]));
    let leftovers = [
        folder.join("v2/.tmp-00"),
        folder.join(format!("{FOLDER}/spaces/.tmp-00")),
        of_chunk(0).with_file_name(".tmp-00"),
    ];
    let foreign = of_chunk(0).with_file_name("..-0-0");
    for file in leftovers.iter().chain([&foreign]) {
        fs::write(file, "x").expect("space");
        make_old(file, 2);
    }
    let young = folder.join("v2/.tmp-01");
    fs::write(&young, "x").expect("space");
    for (n, hours) in [(0, 50), (1, 40), (2, 2)] {
        make_old(&of_chunk(n), hours);
    }
    for name in [
        Name::Space(FOLDER, unused.id()),
        Name::Space(FOLDER, used.id()),
        Name::Value(probe),
    ] {
        make_old(&path(name), 2);
    }
    let before = files(&folder);
    let flags = ["--older-than", "1d", "--dry-run"];
    let said = rig.run("gc", &flags).succeeded();
    for part in [
        "would remove 2 chunks",
        "2 chunks too old",
        "would remove 3 files",
        "1 descriptions",
        "would remove 1 values",
    ] {
        assert!(said.out.contains(part), "no {part:?} in {}", said.out);
    }
    assert_eq!(files(&folder), before);
    rig.run("gc", &flags[..2]).succeeded();
    let mut left = before;
    let gone = [
        of_chunk(0),
        of_chunk(1),
        path(Name::Space(FOLDER, unused.id())),
        path(Name::Value(probe)),
    ];
    left.retain(|file| !leftovers.contains(file) && !gone.contains(file));
    assert_eq!(files(&folder), left);
    assert!(young.exists() && foreign.exists());
    // 1/256 of the size was less than a chunk until 336c9b4, so that a folder below it lost all.
    let value = LEN + rig.store.payload_offset();
    for chunks in [4, 3] {
        rig.run("gc", &["--size", &(chunks * value).to_string()])
            .succeeded();
        assert_eq!(rig.count_of(&used), chunks as usize);
    }
    rig.run("gc", &["--size", "1"]).succeeded();
    assert_eq!(rig.count_of(&used), 0);
    rig.run("gc", &["--size", "x"]).failed_with("--size x");
}

#[test]
fn a_folder_is_checked_and_nothing_is_left_there() {
    let folder = folder();
    is_checked(&Rig::over(&folder));
    let empty = self::folder();
    let said = Rig::over(&empty).run("check", &[]).succeeded();
    assert!(said.out.contains("no server has used it"), "{}", said.out);
    let left: Vec<_> = fs::read_dir(&*empty).expect("a folder").collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn faults_of_a_folder_are_said_and_the_exit_code_is_1() {
    let folder = folder();
    let mut rig = Rig::over(&folder);
    rig.url += "/missing";
    rig.run("check", &[]).failed_with("create the folder");
    rig.run("du", &[]).failed_with("create the folder");
    let rig = Rig::over(&folder);
    let clears = folder.join("v2/clears/1");
    fs::create_dir_all(folder.join("v2/clears")).expect("a folder");
    fs::write(&clears, [1; 100]).expect("space");
    let said = rig.run("check", &[]).succeeded();
    assert!(said.out.contains("the object of clears is damaged"));
    // A later version, and 1 GB.
    fs::write(&clears, b"LMCCLEAR\x03\0\0\0").expect("space");
    rig.run("check", &[]).failed_with("one release");
    let file = fs::File::create(&clears).expect("a file");
    file.set_len(1 << 30).expect("a sparse file");
    rig.run("check", &[]).failed_with("one release");
    // Something else stands where folders have to be.
    fs::remove_file(&clears).expect("it is there");
    let of_probes = folder.join("v2").join("0".repeat(16));
    fs::write(&of_probes, "a file").expect("space");
    rig.run("check", &[]).failed_with("failed");
    assert_eq!(files(&folder), [of_probes]);
}

#[test]
fn urls_are_checked_and_their_passwords_are_never_shown() {
    for url in [
        "redsis://:marked-secret@host",
        "redis://:marked-secret@",
        "s3://key:marked-secret@bucket",
        "file://marked-secret",
    ] {
        for verb in ["check", "du"] {
            let mut command = crate::common::lmc();
            let output = command
                .args(["remote", verb])
                .env("LMC_REMOTE", url)
                .output();
            Said::of(output.expect("it runs")).failed_with("URL");
        }
    }
    let mut command = crate::common::lmc();
    command.env("LMC_REMOTE", "redis://:marked-secret@127.0.0.1:1");
    let help = command.args(["remote", "check", "--help"]).output();
    assert!(Said::of(help.expect("it runs")).out.contains("Example"));
    let mut command = crate::common::lmc();
    command.env("LMC_REMOTE", "redis://:marked-secret@127.0.0.1:1");
    let refused = command.args(["remote", "check"]).output();
    Said::of(refused.expect("it runs")).failed_with("check that the store runs");
}

#[test]
fn a_folder_is_counted() {
    is_counted(&Rig::over(&folder()));
}

/// Names, links and contents that no lmc wrote change no count and are not followed.
#[test]
fn what_others_put_into_a_folder_is_not_counted() {
    let outside = folder();
    let folder = folder();
    let rig = Rig::over(&folder);
    let described = space("model", "");
    rig.fill(&described, 2);
    let chunk = folder.join(Name::Value(keys(described.id(), 1)[0]).to_string());
    let of_space = chunk.parent().expect("a folder").to_owned();
    let bytes = fs::read(&chunk).expect("a chunk");
    let hash = "0".repeat(64);
    fs::write(outside.join(format!("{hash}-0-0")), &bytes).expect("space");
    for name in [
        "..-0-0".to_owned(),
        format!("{hash}-0-0.."),
        format!("{hash}-00-0"),
        format!("{hash}-0-99999"),
        format!("{}-0-0", "A".repeat(64)),
        ".tmp-0123456789abcdef".to_owned(),
        "x\n\u{1b}[2J".to_owned(),
    ] {
        fs::write(of_space.join(name), &bytes).expect("space");
    }
    fs::write(folder.join("v2/notes.txt"), "x").expect("space");
    fs::create_dir(folder.join("v2/zz")).expect("a folder");
    fs::create_dir(folder.join("v2/01")).expect("a folder");
    let linked = folder.join("v2/01").join(described.id().to_string());
    std::os::unix::fs::symlink(&*outside, &linked).expect("a link");
    std::os::unix::fs::symlink(&chunk, of_space.join(format!("00{}-1-0", &hash[2..])))
        .expect("a link");
    // A folder under the name of a chunk.
    fs::create_dir(of_space.join(format!("{hash}-7-0"))).expect("a folder");
    // A description of 1 GB, and one that is a link to the other.
    let huge = folder.join(Name::Space(FOLDER, SpaceId::new([7; 16])).to_string());
    let file = fs::File::create(&huge).expect("a file");
    file.set_len(1 << 30).expect("a sparse file");
    rig.put(&keys(SpaceId::new([7; 16]), 1));
    let du = rig.json("du", &["--json"]);
    assert_eq!(du["chunks"], 3, "{du}");
    assert_eq!(du["models"].as_array().expect("models").len(), 2, "{du}");
}

/// A folder that has more names than a page has.
#[test]
fn a_folder_of_many_names_is_counted_page_by_page() {
    let folder = folder();
    let rig = Rig::over(&folder);
    let key = keys(SpaceId::new([1; 16]), 1)[0];
    rig.put(&[key]);
    let path = folder.join(Name::Value(key).to_string());
    for group in 1..10_000u16 {
        let twin = FOLDER.value(ChunkKey { group, ..key.key });
        let twin = folder.join(Name::Value(twin).to_string());
        fs::hard_link(&path, twin).expect("a link");
    }
    assert_eq!(rig.json("du", &["--json"])["chunks"], 10_000);
}

#[test]
#[ignore = "needs redis-server: cargo xtask test-remote"]
fn a_redis_is_checked_and_counted() {
    let redis = Redis::start(&["--maxmemory", "400mb"]);
    is_checked(&Rig::over_redis(redis.port));
    let said = Rig::over_redis(redis.port).run("check", &[]).succeeded();
    assert!(
        said.out
            .contains("of 400 MiB in use, maxmemory-policy noeviction")
    );
    let redis = Redis::start(&[]);
    is_counted(&Rig::over_redis(redis.port));
    let said = Rig::over_redis(redis.port).run("check", &[]).succeeded();
    assert!(said.out.contains("maxmemory is not set"), "{}", said.out);
    let redis = Redis::start(&["--maxmemory", "400mb", "--maxmemory-policy", "allkeys-lru"]);
    let said = Rig::over_redis(redis.port).run("check", &[]).succeeded();
    assert!(said.out.contains("maxmemory-policy allkeys-lru"));
    // A server that is full, and one that hangs.
    let redis = Redis::start(&["--maxmemory", "2mb"]);
    Rig::over_redis(redis.port)
        .run("check", &[])
        .failed_with("no free capacity");
    redis.process.stop();
    let rig = Rig::over_redis(redis.port);
    rig.run("check", &[]).failed_with("deadline");
    rig.run("du", &[]).failed_with("deadline");
}

#[test]
#[ignore = "needs redis-server: cargo xtask test-remote"]
fn chunks_of_a_redis_are_removed() {
    let redis = Redis::start(&["--maxmemory", "400mb", "--maxmemory-policy", "allkeys-lru"]);
    let rig = Rig::over_redis(redis.port);
    is_removed_by_selectors(&rig);
    rig.fill(&space("model", ""), 3);
    let said = rig
        .run("rm", &["--all", "--older-than", "1s", "--yes"])
        .succeeded();
    assert!(said.out.contains("3 chunks stay"), "{}", said.out);
    rig.put(&[probe([3; 32])]);
    rig.run("gc", &["--model", "model", "--older-than", "1s"])
        .succeeded();
    let said = rig.run("gc", &["--older-than", "1s"]).succeeded();
    assert!(
        said.out.contains("maxmemory-policy allkeys-lru"),
        "{}",
        said.out
    );
    assert!(
        said.out.contains("removed 1 values of killed checks"),
        "{}",
        said.out
    );
    assert_eq!(rig.count(Scope::VALUES), 3);
}

#[test]
#[ignore = "needs s3s-fs and moto_server: cargo xtask test-remote"]
fn chunks_of_an_s3_are_removed_and_collected() {
    for kind in [Kind::Files, Kind::Moto] {
        let server = S3Server::start(kind);
        is_removed_by_selectors(&Rig::over_s3(server.port));
    }
    let server = S3Server::start(Kind::Files);
    let rig = Rig::over_s3(server.port);
    let space = space("model", "");
    rig.clear(0);
    rig.fill(&space, 6);
    rig.put(&[probe([3; 32])]);
    let bucket = server.folder.join(BUCKET).join("of/lmc");
    for (n, key) in keys(space.id(), 6)[..4].iter().enumerate() {
        make_old(&bucket.join(Name::Value(*key).to_string()), 2 + n as u64);
    }
    make_old(&bucket.join(Name::Value(probe([3; 32])).to_string()), 2);
    let value = LEN + rig.store.payload_offset();
    let size = (4 * value).to_string();
    let said = rig.run("gc", &["--size", &size, "--dry-run"]).succeeded();
    assert!(said.out.contains("would remove 2 chunks"), "{}", said.out);
    rig.run("gc", &["--size", &size]).succeeded();
    assert_eq!((rig.count_of(&space), rig.count(Scope::PROBES)), (4, 0));
    // Chunks that no daemon asks for go first, and what is not known to be one stays.
    let [stale, unknown] = [
        ChunkFolder {
            generation: Generation::new([9; 8]),
            ..FOLDER
        },
        ChunkFolder {
            clears: ClearsId::new([9; 16]),
            ..FOLDER
        },
    ]
    .map(|folder| folder.value(keys(space.id(), 1)[0].key));
    rig.put(&[stale, unknown]);
    make_old(&bucket.join(Name::Value(unknown).to_string()), 48);
    let size = (5 * value).to_string();
    rig.run("gc", &["--size", &size]).succeeded();
    assert!(rig.has(Name::Value(unknown)) && !rig.has(Name::Value(stale)));
    assert_eq!(rig.count_of(&space), 4 + 1, "and the older ones of use");
    rig.run("gc", &["--older-than", "1h"]).succeeded();
    assert_eq!(rig.count_of(&space), 2 + 1);
    rig.run("gc", &[]).succeeded();
    assert_eq!(rig.count_of(&space), 2 + 1);
    let server = S3Server::start(Kind::Files);
    let bucket = server.folder.join(BUCKET).join("of/lmc");
    let path = |name: Name| bucket.join(name.to_string());
    // The youngest chunk fits.
    is_collected_by_selectors(&Rig::over_s3(server.port), &path, value, 1);
}

#[test]
#[ignore = "needs s3s-fs and moto_server: cargo xtask test-remote"]
fn an_s3_is_checked_and_counted() {
    for kind in [Kind::Files, Kind::Moto] {
        let server = S3Server::start(kind);
        is_checked(&Rig::over_s3(server.port));
        let server = S3Server::start(kind);
        is_counted(&Rig::over_s3(server.port));
    }
    // Wrong credentials, and a listing that hangs on its way.
    let server = S3Server::start(Kind::Files);
    let mut rig = Rig::over_s3(server.port);
    rig.fill(&space("model", ""), 3);
    let hangs = |head: &str, _| match head.contains("list-type=2") {
        true => Fault::StallAfter(200),
        false => Fault::None,
    };
    let proxy = Proxy::start(server.port, hangs);
    Rig::over_s3(proxy.port)
        .run("du", &[])
        .failed_with("the listing ended after 0 names");
    let secret = rig
        .variables
        .iter_mut()
        .find(|(name, _)| *name == "AWS_SECRET_ACCESS_KEY");
    secret.expect("it is there").1 = "marked-wrong".to_owned();
    rig.run("check", &[]).failed_with("AWS_");
    rig.run("du", &[]).failed_with("AWS_");
}
