//! The tier over real servers of S3: `s3s-fs` and `moto`; killed, stopped, refusing, and with wrong
//! credentials. Run by `cargo xtask test-remote`.

#![allow(clippy::unwrap_used, reason = "helpers of tests may panic")]

mod servers;

use std::fs::{self, File};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant, SystemTime};

use lmc_backend::conformance::{Conformance, Guarantee, lens_of, test_key};
use lmc_backend::{Backend, BackendError, Health, LoadItem, Loaded, Stored};
use lmc_backend_remote::conformance::{check_store, check_swaps};
use lmc_backend_remote::format::{HEADER_LEN, Name, Scope, probe};
use lmc_backend_remote::s3::{S3Config, S3Store};
use lmc_backend_remote::{Store, StoreError};
use lmc_testkit::{DEADLINE, soon, until};

use self::servers::{BUCKET, Fault, KEY, Kind, Proxy, SECRET, Server, TOKEN};
use crate::common::{clears_object, passes_the_kit, runtime};

fn store(port: u16, bucket: &str, secret: &str) -> Arc<S3Store> {
    let variables = servers::variables(port).into_iter();
    let variables = variables.map(|(name, value)| {
        let value = if value == SECRET {
            secret.to_owned()
        } else {
            value
        };
        (name.to_owned(), value)
    });
    let url = format!("s3://{bucket}/of/lmc").parse().unwrap();
    let store = S3Config::new(url, variables).unwrap().open();
    Arc::new(store.unwrap())
}

type Rig = crate::common::Rig<S3Store>;

/// Lengths of chunks: larger than any buffer on the way, too.
const LENS: [u64; 5] = [1, 255, 4096, 70_000, 3_000_001];

fn rig_with(port: u16, bucket: &str, secret: &str) -> Rig {
    Rig::over(store(port, bucket, secret), LENS, |config| {
        config.clears_interval = Duration::from_secs(3600);
    })
}

fn rig_at(port: u16) -> Rig {
    rig_with(port, BUCKET, SECRET).used()
}

/// Puts an object of any bytes under a name.
fn put(rig: &Rig, number: u64, bytes: &[u8]) {
    let name = rig.name(number);
    let write = rig.store.write(name, bytes.to_vec().into(), soon());
    rig.runtime.block_on(write).unwrap();
}

/// Returns the number of objects in a scope, each of which has an age and a length.
fn listed(rig: &Rig, scope: Scope) -> usize {
    let listed = rig.listed(scope, 1000);
    for object in &listed {
        assert!(object.age.is_some() && object.len.is_some(), "{object:?}");
    }
    listed.len()
}

fn ages_of(rig: &Rig, numbers: Range<u64>) -> Vec<Option<u64>> {
    let keys: Vec<_> = numbers.map(|n| rig.folder().value(test_key(n))).collect();
    let heads = rig.runtime.block_on(rig.store.heads(&keys, soon()));
    let age = |head: Result<Option<lmc_backend_remote::Head>, _>| head.unwrap()?.age;
    heads
        .into_iter()
        .map(|head| age(head).map(|age| age.as_secs()))
        .collect()
}

/// Returns all that a person may get to see.
fn shown_by(rig: &Rig) -> String {
    format!("{:?} {:?} {:?}", rig.tier.health(), rig.tier, rig.store)
}

/// Returns the file of a value.
fn file(server: &Server, rig: &Rig, number: u64) -> File {
    let name = rig.name(number).to_string();
    let path = server.folder.join(BUCKET).join("of/lmc").join(name);
    File::options().read(true).write(true).open(path).unwrap()
}

fn passes_the_kits(kind: Kind) {
    let server = Server::start(kind);
    let store = || store(server.port, BUCKET, SECRET);
    let runtime = runtime();
    // `s3s-fs` looks at a condition and then writes.
    if let Kind::Moto = kind {
        let clients: Vec<Arc<dyn Store>> = (0..4).map(|_| store() as _).collect();
        runtime.block_on(check_swaps(&clients, DEADLINE));
    }
    runtime.block_on(check_store(store(), DEADLINE));
    passes_the_kit(&rig_at(server.port).tier);
}

/// No bucket is full: the server in between says so.
#[test]
fn a_full_server_refuses_writes_and_is_read_on() {
    for (status, code) in [(507, "InsufficientStorage"), (403, "QuotaExceeded")] {
        let proxy = Proxy::start(0, move |head, _| match head.starts_with("put") {
            true => Fault::error(status, code, "no space is left"),
            false if head.contains("v2/clears") => {
                let headers = "etag: \"x\"\r\nlast-modified: Wed, 25 Nov 2026 07:28:00 GMT\r\n";
                Fault::answer("200 OK", headers, clears_object())
            }
            false => Fault::error(404, "NoSuchKey", ""),
        });
        let rig = rig_at(proxy.port);
        for stored in rig.store(0..10) {
            let full = matches!(stored, Err(BackendError::Full { needed }) if needed > 0);
            assert!(full, "{status}: {stored:?}");
        }
        let health = rig.tier.health();
        assert!(
            matches!(&health, Health::Degraded { reason } if reason.contains("is full")),
            "{health:?}"
        );
        assert_eq!(rig.hits(0..10), 0, "reads go on");
        assert_eq!(rig.pool.usage().used, 0);
    }
}

#[test]
#[ignore = "needs s3s-fs: cargo xtask test-remote"]
fn the_tier_over_files_passes_the_kits() {
    passes_the_kits(Kind::Files);
}

#[test]
#[ignore = "needs moto_server: cargo xtask test-remote"]
fn the_tier_over_moto_passes_the_kits() {
    passes_the_kits(Kind::Moto);
}

#[test]
#[ignore = "needs s3s-fs: cargo xtask test-remote"]
fn a_server_with_errors_passes_the_kit() {
    let server = Server::start(Kind::Files);
    let proxy = Proxy::start(server.port, |head, n| match n % 17 {
        // A write whose answer is lost is sent again, and finds itself: no chunk of another.
        7 | 9 | 11 if head.starts_with("put") => Fault::error(500, "InternalError", ""),
        3 => Fault::error(503, "SlowDown", "reduce your rate"),
        7 => Fault::CutAfter(300),
        9 => Fault::CutAfter(3000),
        11 => Fault::CutAfter(0),
        13 => Fault::error(500, "InternalError", ""),
        15 => Fault::error(400, "InvalidRequest", ""),
        _ => Fault::None,
    });
    let rig = rig_with(proxy.port, BUCKET, SECRET);
    until("the store is in use", || rig.is_ready());
    let kit = Conformance::new(Guarantee::Lossy).with_operations(200);
    let tally = kit.run(&rig.tier);
    assert!(tally.hits > 20 && tally.failures > 5, "{tally:?}");
}

fn values_come_back_and_are_listed_once(kind: Kind) {
    let server = Server::start(kind);
    let (rig, other) = (rig_at(server.port), rig_at(server.port));
    rig.write(0..40);
    assert_eq!(other.hits(0..40), 40);
    for stored in other.store(0..40) {
        assert!(matches!(stored, Ok(Stored::Present)), "{stored:?}");
    }
    rig.refuses_other_lengths(0..40);
    // Values that are empty, too short, or of another program.
    for (number, bytes) in [(0, &b""[..]), (1, b"x"), (2, &[7; 5000])] {
        put(&rig, number, bytes);
    }
    assert_eq!(rig.hits(0..40), 37);
    let keys: Vec<_> = (0..4).map(test_key).collect();
    let found = lens_of(&rig.tier, &keys, soon());
    let found: Vec<_> = found.into_iter().map(Result::unwrap).collect();
    assert_eq!(found, [None, None, None, Some(rig.len(3))]);
    rig.lists_once(40);
    let space = Some(test_key(0).space);
    let values = |fanout, space| {
        let folder = None;
        listed(
            &rig,
            Scope::Values {
                folder,
                fanout,
                space,
            },
        )
    };
    assert!((1..40).contains(&values(None, space)));
    let all: usize = (0..=255).map(|n| values(Some(n), None)).sum();
    let ours: usize = (0..=255).map(|n| values(Some(n), space)).sum();
    assert_eq!((all, ours), (40, values(None, space)));
    let names: Vec<Name> = (0..40).map(|n| rig.name(n)).collect();
    let removed = rig.runtime.block_on(rig.store.remove(&names, soon()));
    assert!(removed.iter().all(Result::is_ok), "{removed:?}");
    assert_eq!(rig.hits(0..40), 0);
    assert!(listed(&rig, Scope::VALUES) == 0);
}

#[test]
#[ignore = "needs s3s-fs: cargo xtask test-remote"]
fn values_in_files_come_back_and_are_listed_once() {
    values_come_back_and_are_listed_once(Kind::Files);
}

#[test]
#[ignore = "needs moto_server: cargo xtask test-remote"]
fn values_in_moto_come_back_and_are_listed_once() {
    values_come_back_and_are_listed_once(Kind::Moto);
}

#[test]
#[ignore = "needs s3s-fs: cargo xtask test-remote"]
fn a_flipped_bit_is_a_miss_and_is_written_again() {
    use std::os::unix::fs::FileExt;
    let server = Server::start(Kind::Files);
    let rig = rig_at(server.port);
    rig.write(0..10);
    for (number, at) in [(3, HEADER_LEN as u64 + 65_000), (4, 40), (8, 255)] {
        let (file, mut byte) = (file(&server, &rig, number), [0]);
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 4], at).unwrap();
    }
    assert_eq!(rig.hits(0..10), 7);
    rig.write(3..5);
    assert_eq!(rig.hits(0..10), 9);
}

#[test]
#[ignore = "needs moto_server: cargo xtask test-remote"]
fn of_two_writers_one_writes() {
    let server = Server::start(Kind::Moto);
    let (rig, other) = (rig_at(server.port), rig_at(server.port));
    std::thread::scope(|scope| {
        let ours = scope.spawn(|| rig.store(0..40));
        let theirs = scope.spawn(|| other.store(0..40));
        let both = ours.join().unwrap().into_iter().zip(theirs.join().unwrap());
        for (ours, theirs) in both {
            let (ours, theirs) = (ours.unwrap(), theirs.unwrap());
            let written = [ours, theirs].map(|stored| usize::from(stored == Stored::Written));
            assert_eq!(written[0] + written[1], 1, "{ours:?} {theirs:?}");
        }
    });
    assert_eq!((rig.hits(0..40), other.hits(0..40)), (40, 40));
}

#[test]
#[ignore = "needs s3s-fs: cargo xtask test-remote"]
fn a_server_without_conditional_writes_is_not_used_and_says_why() {
    let server = Server::start(Kind::Files);
    let proxy = Proxy::start(server.port, |head, _| {
        match head.contains("if-none-match") {
            true => Fault::error(501, "NotImplemented", "a header implies functionality"),
            false => Fault::None,
        }
    });
    let rig = rig_with(proxy.port, BUCKET, SECRET);
    until("the reason is known", || {
        shown_by(&rig).contains("does not have: it does not implement")
    });
    assert!(rig.store(0..1)[0].is_err());
}

#[test]
#[ignore = "needs s3s-fs: cargo xtask test-remote"]
fn values_grow_old_and_are_made_young() {
    let server = Server::start(Kind::Files);
    let rig = rig_at(server.port);
    rig.write(3..5);
    let old = SystemTime::now() - Duration::from_secs(5000);
    file(&server, &rig, 4).set_modified(old).unwrap();
    let ages = ages_of(&rig, 3..6);
    assert!(ages[0].is_some_and(|age| age < 1000), "{ages:?}");
    assert!(ages[1].is_some_and(|age| age >= 4990), "{ages:?}");
    assert_eq!(ages[2], None);
    let keys: Vec<_> = (3..6).map(|n| rig.folder().value(test_key(n))).collect();
    let touched = rig.runtime.block_on(rig.store.touch(&keys, soon()));
    let touched: Vec<bool> = touched.into_iter().map(Result::unwrap).collect();
    assert_eq!(touched, [true, true, false]);
    let ages = ages_of(&rig, 3..5);
    assert!(ages.iter().all(|age| age.is_some_and(|age| age < 1000)));
    assert_eq!(rig.hits(3..5), 2);
}

/// Shows the log to a test, as the finest level of all crates has it.
fn log() -> impl Fn() -> String {
    type Lines = Arc<parking_lot::Mutex<Vec<u8>>>;
    struct Sink(Lines);
    impl std::io::Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let lines = Lines::default();
    let sink = Arc::clone(&lines);
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing_subscriber::filter::LevelFilter::TRACE)
        .with_writer(move || Sink(Arc::clone(&sink)));
    subscriber.init();
    move || String::from_utf8_lossy(&lines.lock()).into_owned()
}

#[test]
#[ignore = "needs s3s-fs and moto_server: cargo xtask test-remote"]
fn wrong_credentials_and_buckets_are_named_and_secrets_shown_nowhere() {
    let log = log();
    let server = Server::start(Kind::Files);
    // As a store does that repeats the request in its answer.
    let proxy = Proxy::start(server.port, |head, _| {
        Fault::error(403, "AccessDenied", head)
    });
    let moto = Server::start(Kind::Moto);
    let right = rig_at(server.port);
    right.write(0..5);
    assert_eq!(right.hits(0..5), 5);
    let mut shown = shown_by(&right);
    for (port, bucket, secret, word) in [
        (
            server.port,
            BUCKET,
            "marked-secret-wrong",
            "SignatureDoesNotMatch",
        ),
        (proxy.port, BUCKET, SECRET, "AccessDenied"),
        (moto.port, "no-bucket", SECRET, "NoSuchBucket"),
    ] {
        let rig = rig_with(port, bucket, secret);
        until("the reason is known", || shown_by(&rig).contains(word));
        assert!(!rig.is_ready());
        let key = [right.folder().value(test_key(0))];
        let head = rig.runtime.block_on(rig.store.heads(&key, soon()));
        let is_denied = matches!(head[..], [Err(StoreError::Denied { .. })]);
        assert_eq!(is_denied, word != "NoSuchBucket", "{head:?}");
        assert!(head[0].is_err(), "a bucket that is missing is no miss");
        let loaded = rig.load(0..1, 0, soon());
        shown += &format!("{} {head:?} {loaded:?}", shown_by(&rig));
    }
    let logged = log();
    assert!(logged.contains("remote store in use"), "{logged}");
    shown += &logged;
    for marked in [KEY, SECRET, TOKEN, "marked-"] {
        assert!(!shown.contains(marked), "{marked} in {shown}");
    }
}

fn is_taken_out_and_back(kind: Kind) {
    let mut server = Server::start(kind);
    let rig = rig_at(server.port);
    rig.write(0..20);
    server.kill();
    assert_eq!(rig.hits(0..20), 0);
    until("the tier is out", || rig.hits(0..1) == 0 && !rig.is_ready());
    server.start_again();
    until("the tier is back", || rig.is_back());
    if let Kind::Moto = kind {
        assert_eq!(rig.hits(0..20), 0, "it forgot them");
        rig.write(0..20);
    }
    assert_eq!(rig.hits(0..20), 20);
    server.process.stop();
    let deadline = Instant::now() + Duration::from_millis(200);
    assert_eq!(rig.hits_by(0..20, deadline), 0);
    // What a lookup learns after its caller has left counts.
    until("the tier is out", || {
        lens_of(&rig.tier, &[test_key(0)], Instant::now());
        !rig.is_ready()
    });
    assert_eq!(rig.pool.usage().used, 0, "no slot is kept");
    server.process.signal(libc::SIGCONT);
    until("the tier is back", || rig.is_back());
    assert_eq!(rig.hits(0..20), 20);
}

#[test]
#[ignore = "needs s3s-fs: cargo xtask test-remote"]
fn files_that_are_killed_or_stopped_cost_hits_and_are_taken_back() {
    is_taken_out_and_back(Kind::Files);
}

#[test]
#[ignore = "needs moto_server: cargo xtask test-remote"]
fn moto_that_is_killed_or_stopped_costs_hits_and_is_taken_back() {
    is_taken_out_and_back(Kind::Moto);
}

#[test]
#[ignore = "needs s3s-fs: cargo xtask test-remote"]
fn touches_that_hang_do_not_delay_lookups() {
    let server = Server::start(Kind::Files);
    rig_at(server.port).write(0..1);
    // A touch reads the whole value; a lookup, a range of it.
    let proxy = Proxy::start(server.port, |head, _| {
        let is_value = head.contains("v2/") && !head.contains("v2/clears");
        match is_value && !head.contains("range: bytes=") {
            true => Fault::StallAfter(0),
            false => Fault::None,
        }
    });
    let rig = rig_at(proxy.port);
    let (store, folder) = (Arc::clone(&rig.store), rig.folder());
    let touching = rig.runtime.spawn(async move {
        let keys: Vec<_> = (0..200).map(|n| folder.value(test_key(n))).collect();
        store.touch(&keys, soon() + DEADLINE).await
    });
    let before = proxy.requests.load(Ordering::SeqCst);
    until("values are read to be touched", || {
        proxy.requests.load(Ordering::SeqCst) > before
    });
    let name = folder.value(test_key(0));
    let heads = rig.runtime.block_on(rig.store.heads(&[name], soon()));
    assert!(matches!(&heads[..], [Ok(Some(_))]), "{heads:?}");
    touching.abort();
}

#[test]
#[ignore = "needs s3s-fs: cargo xtask test-remote"]
fn a_server_without_conditional_overwrites_keeps_the_age_of_chunks() {
    let server = Server::start(Kind::Files);
    let proxy = Proxy::start(server.port, |head, _| match head.contains("\nif-match") {
        true => Fault::error(501, "NotImplemented", ""),
        false => Fault::None,
    });
    let rig = rig_at(proxy.port);
    rig.write(0..2);
    let folder = rig.folder();
    let touched = |number| {
        let keys = [folder.value(test_key(number))];
        rig.runtime
            .block_on(rig.store.touch(&keys, soon()))
            .remove(0)
    };
    assert!(matches!(touched(0), Ok(false)));
    let before = proxy.requests.load(Ordering::SeqCst);
    assert!(matches!(touched(1), Ok(false)));
    assert_eq!(
        proxy.requests.load(Ordering::SeqCst),
        before,
        "not tried again"
    );
    assert_eq!(rig.hits(0..2), 2);
}

#[test]
#[ignore = "needs s3s-fs: cargo xtask test-remote"]
fn a_server_that_wants_less_is_asked_again_later() {
    let server = Server::start(Kind::Files);
    let proxy = Proxy::start(server.port, |_, n| match n % 3 {
        2 => Fault::None,
        _ => Fault::error(503, "SlowDown", "reduce your rate"),
    });
    // Without a tier, whose own requests would take some of the answers.
    let bare = store(proxy.port, BUCKET, SECRET);
    let read = bare.read(Name::Clears, 100, soon());
    assert!(matches!(runtime().block_on(read), Ok(None)));
    assert_eq!(proxy.requests.load(Ordering::SeqCst), 3);
    let never = Proxy::start(server.port, |_, _| Fault::error(503, "SlowDown", ""));
    let rig = rig_with(never.port, BUCKET, SECRET);
    until("the reason is known", || {
        shown_by(&rig).contains("503 SlowDown")
    });
    let before = never.requests.load(Ordering::SeqCst);
    let name = probe([1; 32]);
    let head = rig.runtime.block_on(rig.store.heads(&[name], soon()));
    assert!(
        matches!(&head[..], [Err(StoreError::Unavailable { reason })] if reason.contains("SlowDown")),
        "{head:?}"
    );
    assert!(never.requests.load(Ordering::SeqCst) >= before + 4);
}

#[test]
#[ignore = "needs s3s-fs: cargo xtask test-remote"]
fn values_that_stall_or_break_off_hold_no_slot_and_no_caller() {
    let server = Server::start(Kind::Files);
    let direct = rig_at(server.port);
    direct.write(4..5);
    let is_value = |head: &str| head.contains("v2/") && !head.contains("v2/clears");
    let stalling = Proxy::start(server.port, move |head, _| match is_value(head) {
        true => Fault::StallAfter(1_000_000),
        false => Fault::None,
    });
    let rig = rig_at(stalling.port);
    let deadline = Instant::now() + Duration::from_millis(300);
    let loaded = rig.load(4..5, 0, deadline);
    let is_late = matches!(
        loaded[..],
        [Loaded::Failed {
            error: BackendError::Deadline,
            ..
        }]
    );
    assert!(is_late, "{loaded:?}");
    drop(loaded);
    assert_eq!(rig.pool.usage().used, 0);
    // A caller that leaves before the deadline.
    let item = LoadItem::new(test_key(4), rig.pool.reserve(rig.len(4)).unwrap());
    let asked = stalling.requests.load(Ordering::SeqCst);
    let stream = rig.tier.load(vec![item], soon());
    until("the value is asked for", || {
        stalling.requests.load(Ordering::SeqCst) > asked
    });
    drop(stream);
    until("the slot is back", || rig.pool.usage().used == 0);
    // A value that breaks off is asked for again, from there on.
    let breaking = Proxy::start(server.port, move |head, n| {
        match is_value(head) && n % 2 == 1 {
            true => Fault::CutAfter(1_000_000),
            false => Fault::None,
        }
    });
    let rig = rig_at(breaking.port);
    for _ in 0..4 {
        assert_eq!(rig.hits(4..5), 1);
    }
}

#[test]
#[ignore = "needs s3s-fs: cargo xtask test-remote"]
fn answers_that_make_no_sense_are_errors() {
    let server = Server::start(Kind::Files);
    let most = u64::MAX;
    let range = format!("content-range: bytes 0-{most}/{most}\r\netag: \"x\"\r\n");
    let token = format!(
        "<ListBucketResult><NextContinuationToken>{}</NextContinuationToken></ListBucketResult>",
        "t".repeat(10_000)
    );
    let proxy = Proxy::start(server.port, move |head, _| {
        let answer = |status, headers: &str, body: &str| Fault::answer(status, headers, body);
        if head.contains("v2/clears") {
            Fault::None
        } else if head.contains("range: bytes=") {
            answer("206 Partial Content", &range, "x")
        } else if head.starts_with("post") {
            let other = "<DeleteResult><Error><Key>other</Key><Code>X</Code><Message></Message></Error></DeleteResult>";
            answer("200 OK", "", other)
        } else if head.contains("list-type=2") && head.contains("00000000") {
            answer("200 OK", "", "<html>a portal")
        } else if head.contains("list-type=2") {
            answer("200 OK", "", &token)
        } else {
            answer("200 OK", "etag: \"x\"\r\nlast-modified: yesterday\r\n", "x")
        }
    });
    drop(rig_at(server.port));
    let rig = rig_at(proxy.port);
    let run = &rig.runtime;
    let name = probe([1; 32]);
    let heads = run.block_on(rig.store.heads(&[name], soon()));
    assert!(matches!(heads[..], [Err(_)]), "{heads:?}");
    let names = [Name::Value(name), Name::Value(probe([2; 32]))];
    let removed = run.block_on(rig.store.remove(&names, soon()));
    assert!(matches!(removed[..], [Err(_), Err(_)]), "{removed:?}");
    for scope in [Scope::VALUES, Scope::PROBES] {
        let listed = run.block_on(rig.store.list(scope, None, 10, soon()));
        assert!(listed.is_err(), "{listed:?}");
    }
    let loaded = rig.load(0..1, 0, soon());
    assert!(matches!(loaded[..], [Loaded::Failed { .. }]), "{loaded:?}");
}

#[test]
#[ignore = "needs s3s-fs: cargo xtask test-remote"]
fn small_objects_are_bounded_and_a_closed_store_says_so() {
    let server = Server::start(Kind::Files);
    let rig = rig_at(server.port);
    let (run, clears) = (&rig.runtime, Name::Space(rig.folder(), test_key(0).space));
    let read = |max| run.block_on(rig.store.read(clears, max, soon()));
    assert!(matches!(read(5), Ok(None)));
    run.block_on(rig.store.write(clears, "12345".into(), soon()))
        .unwrap();
    assert_eq!(read(5).unwrap().as_deref(), Some(&b"12345"[..]));
    let too_large = read(4);
    assert!(
        matches!(too_large, Err(StoreError::TooLarge { max: 4, found: 5 })),
        "{too_large:?}"
    );
    let over = run.block_on(rig.store.read(clears, 5, Instant::now()));
    assert!(matches!(over, Err(StoreError::Deadline)), "{over:?}");
    run.block_on(rig.store.close(soon()));
    assert!(matches!(read(5), Err(StoreError::Unavailable { .. })));
    assert!(fs::metadata(server.folder.join(BUCKET)).is_ok());
}
