//! A server that is killed leaves its shared memory behind; the next one takes it over. A
//! server that runs is never robbed. Real processes: this test starts itself again as the
//! other server.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use lmc_memory::{
    ArenaConfig, ArenaError, MappedSegment, Pool, PoolConfig, SegmentError, SharedName,
    reclaim_stale_segments,
};
use lmc_testkit::{own_test, with_own_shm};

const NAME_VARIABLE: &str = "LMC_TEST_STALE_SEGMENT";

/// The other server: makes the segment, fills it, says so and waits to be killed.
/// Runs nothing when the test suite calls it by itself.
#[test]
fn other_server() {
    let Ok(name) = std::env::var(NAME_VARIABLE) else {
        return;
    };
    let config = match name.strip_prefix("unique:") {
        Some(label) => ArenaConfig::shared_unique(label, 1 << 20),
        None => ArenaConfig::shared(&name, 1 << 20),
    };
    let arena = config.build().expect("the name is free");
    let name = arena.shared_name().expect("it is shared").to_string();
    let pool = Pool::new(arena.into(), PoolConfig::default()).expect("a valid pool");
    let mut slot = pool.reserve(1 << 20).expect("an empty pool");
    slot.bytes_mut().fill(0xab);
    println!("\nready {name}");
    std::thread::sleep(std::time::Duration::from_secs(240));
}

fn start(name: &str) -> Child {
    start_named(name).0
}

/// Starts the other server, and returns the name of its segment too.
fn start_named(name: &str) -> (Child, String) {
    let mut child = own_test(other_server)
        .env(NAME_VARIABLE, name)
        .stdout(Stdio::piped())
        .spawn()
        .expect("the test starts itself");
    let stdout = BufReader::new(child.stdout.take().expect("piped"));
    let name = stdout
        .lines()
        .map_while(Result::ok)
        .find_map(|line| line.strip_prefix("ready ").map(str::to_owned));
    (child, name.expect("the other server ended early"))
}

fn paths(name: &str) -> [PathBuf; 2] {
    [
        format!("/dev/shm/{name}"),
        format!("/dev/shm/{name}.lmc-owner"),
    ]
    .map(PathBuf::from)
}

#[test]
fn a_killed_server_is_replaced_and_a_running_one_is_not() {
    with_own_shm(
        "size=64m",
        a_killed_server_is_replaced_and_a_running_one_is_not,
        || {
            let name = format!("lmc_test_stale_{}", std::process::id());
            let mut child = start(&name);

            let err = ArenaConfig::shared(&name, 1 << 20).build().unwrap_err();
            assert!(matches!(err, ArenaError::Held { .. }), "{err}");
            let text = err.to_string();
            assert!(text.contains(&format!("(pid {})", child.id())), "{text}");
            assert_eq!(
                fs::read(&paths(&name)[0]).unwrap(),
                vec![0xab; 1 << 20],
                "left as it was"
            );

            child.kill().expect("SIGKILL");
            child.wait().expect("the child ends");
            assert!(
                paths(&name).iter().all(|path| path.exists()),
                "SIGKILL cleans nothing up"
            );

            // Larger than before, so that reuse of the old segment would show.
            let arena = ArenaConfig::shared(&name, 2 << 20)
                .build()
                .expect("the stale one goes");
            assert!(arena.report().reclaimed);
            let note = &arena.report().notes[0];
            assert!(note.contains(&format!("(pid {})", child.id())), "{note}");
            assert_eq!(
                fs::read(&paths(&name)[0]).unwrap(),
                vec![0; 2 << 20],
                "new, zeroed memory"
            );
            drop(arena);
            assert!(
                paths(&name).iter().all(|path| !path.exists()),
                "a clean stop leaves nothing"
            );
        },
    );
}

/// A process that still maps a stale segment keeps its old bytes and does not see the new server's.
#[test]
fn a_client_of_the_killed_server_keeps_its_mapping() {
    with_own_shm(
        "size=64m",
        a_client_of_the_killed_server_keeps_its_mapping,
        || {
            let name = format!("lmc_test_stale_client_{}", std::process::id());
            let mut child = start(&name);
            let client = fs::File::open(&paths(&name)[0]).unwrap();
            child.kill().expect("SIGKILL");
            child.wait().expect("the child ends");
            let _arena = ArenaConfig::shared(&name, 1 << 20)
                .build()
                .expect("the stale one goes");
            use std::os::unix::fs::FileExt;
            let mut byte = [0];
            client.read_exact_at(&mut byte, 12_345).unwrap();
            assert_eq!(byte, [0xab]);
        },
    );
}

/// Many servers that start at once over a stale segment: one wins, the others get an error.
#[test]
fn a_race_for_a_stale_segment_has_one_winner() {
    with_own_shm(
        "size=64m",
        a_race_for_a_stale_segment_has_one_winner,
        || {
            let name = format!("lmc_test_stale_race_{}", std::process::id());
            let mut child = start(&name);
            child.kill().expect("SIGKILL");
            child.wait().expect("the child ends");
            for _ in 0..20 {
                let results: Vec<_> = std::thread::scope(|scope| {
                    let build = || ArenaConfig::shared(&name, 4096).build();
                    let threads: Vec<_> = (0..4).map(|_| scope.spawn(build)).collect();
                    threads
                        .into_iter()
                        .map(|thread| thread.join().expect("no panic"))
                        .collect()
                });
                let (won, lost): (Vec<_>, Vec<_>) = results.into_iter().partition(Result::is_ok);
                assert_eq!(won.len(), 1);
                for err in lost.into_iter().map(Result::unwrap_err) {
                    assert!(matches!(err, ArenaError::Held { .. }), "{err}");
                }
                assert!(paths(&name).iter().all(|path| path.exists()));
                drop(won);
            }
        },
    );
}

/// Finding 3 of the review: a server that ran as root followed a link at the predictable name of
/// its record, cut the file behind it and wrote `pid …` into it.
#[test]
fn nothing_is_written_through_a_squatted_record() {
    with_own_shm(
        "size=64m",
        nothing_is_written_through_a_squatted_record,
        || {
            let victim = PathBuf::from("/dev/shm/victim");
            fs::write(&victim, "secret").expect("space");
            let check = |what: &str, squat: &dyn Fn(&PathBuf)| {
                let [segment, record] = paths(what);
                squat(&record);
                let err = ArenaConfig::shared(what, 4096).build().unwrap_err();
                assert!(matches!(err, ArenaError::ForeignRecord { .. }), "{err}");
                assert_eq!(fs::read(&victim).unwrap(), b"secret", "{what}");
                assert!(!segment.exists(), "{what}");
                assert!(record.symlink_metadata().is_ok(), "{what} was removed");
                // A server whose name is not given in full gets one that no other process could take.
                ArenaConfig::shared_unique(what, 4096).build().unwrap();
                assert!(record.symlink_metadata().is_ok(), "{what} was removed");
            };
            check("symlink", &|record| symlink(&victim, record).unwrap());
            check("dangling", &|record| {
                symlink("/dev/shm/no", record).unwrap()
            });
            check("hard_link", &|record| {
                fs::hard_link(&victim, record).unwrap()
            });
            check("folder", &|record| fs::create_dir(record).unwrap());
            check("pipe", &|record| {
                let made = Command::new("mkfifo").arg(record).status();
                assert!(made.expect("mkfifo is there").success());
            });
            check("text", &|record| fs::write(record, "no pid").unwrap());
            check("pid_alone", &|record| fs::write(record, "pid 1").unwrap());
            if fs::metadata("/proc/self").unwrap().uid() == 0 {
                check("other_user", &|record| {
                    fs::write(record, "pid 1 other_user").unwrap();
                    std::os::unix::fs::chown(record, Some(65_534), None).unwrap();
                });
            }
            assert!(reclaim_stale_segments().is_empty());
        },
    );
}

/// A hard link to a running server's record, which other users can make where
/// `fs.protected_hardlinks` is 0, stood for a server of another name: no server of that name
/// started, and once its target was gone, a file that lmc had not made was deleted for it.
#[test]
fn a_link_to_the_record_of_another_segment_is_no_record() {
    with_own_shm(
        "size=64m",
        a_link_to_the_record_of_another_segment_is_no_record,
        || {
            let (mut running, name) = start_named("unique:lmc_1");
            let [_, record] = paths(&name);
            let linked = "lmc_2_0000000000000000";
            fs::hard_link(&record, &paths(linked)[1]).unwrap();
            fs::write(&paths("theirs")[0], "not lmc's").unwrap();
            fs::hard_link(&record, &paths("theirs")[1]).unwrap();
            ArenaConfig::shared_unique("lmc_2", 4096).build().unwrap();
            let held = ArenaConfig::shared_unique("lmc_1", 4096).build();
            assert!(matches!(held, Err(ArenaError::Held { .. })), "{held:?}");
            running.kill().expect("SIGKILL");
            running.wait().expect("the child ends");
            // The links are all that is left of the record.
            fs::remove_file(&record).unwrap();
            fs::remove_file(&paths(linked)[1]).unwrap();
            assert!(reclaim_stale_segments().is_empty());
            assert_eq!(fs::read(&paths("theirs")[0]).unwrap(), b"not lmc's");
        },
    );
}

/// Another user's name in place of a segment is a file that lmc did not make.
#[test]
fn nothing_is_written_through_a_squatted_segment() {
    with_own_shm(
        "size=64m",
        nothing_is_written_through_a_squatted_segment,
        || {
            fs::write("/dev/shm/victim", "secret").expect("space");
            symlink("/dev/shm/victim", "/dev/shm/taken").unwrap();
            let err = ArenaConfig::shared("taken", 4096).build().unwrap_err();
            assert!(matches!(err, ArenaError::NotOurs { .. }), "{err}");
            assert_eq!(fs::read("/dev/shm/victim").unwrap(), b"secret");
            assert!(!paths("taken")[1].exists(), "the record went again");
        },
    );
}

/// D16: a server that was killed on another port left its segment, half a machine's memory, for
/// ever.
#[test]
fn stale_segments_of_any_name_are_reclaimed_and_others_are_not() {
    with_own_shm(
        "size=64m",
        stale_segments_of_any_name_are_reclaimed_and_others_are_not,
        || {
            let (mut killed, name) = start_named("unique:lmc_1");
            let (mut running, other) = start_named("unique:lmc_2");
            fs::write("/dev/shm/engine", "not lmc's").unwrap();
            let held = ArenaConfig::shared_unique("lmc_1", 4096).build();
            assert!(matches!(held, Err(ArenaError::Held { .. })), "{held:?}");
            killed.kill().expect("SIGKILL");
            killed.wait().expect("the child ends");

            let stale = reclaim_stale_segments();
            let found: Vec<_> = stale.iter().map(|s| s.name().as_str()).collect();
            assert_eq!(found, [name.as_str()]);
            assert_eq!(stale[0].owner(), format!("pid {}", killed.id()));
            assert_eq!(stale[0].bytes(), 1 << 20);
            assert!(paths(&name).iter().all(|path| !path.exists()));
            assert!(paths(&other).iter().all(|path| path.exists()));
            assert_eq!(fs::read("/dev/shm/engine").unwrap(), b"not lmc's");
            assert!(reclaim_stale_segments().is_empty());

            let arena = ArenaConfig::shared_unique("lmc_1", 4096).build().unwrap();
            let fresh = arena.shared_name().unwrap();
            assert!(fresh.as_str().starts_with("lmc_1_") && fresh.as_str() != name);
            running.kill().expect("SIGKILL");
            running.wait().expect("the child ends");
        },
    );
}

/// Finding 16 of the review: the pool was refused as an engine's memory under its own name only,
/// and copies between the two would have overlapped.
#[test]
fn a_pool_is_no_memory_of_an_engine_under_any_name() {
    with_own_shm(
        "size=64m",
        a_pool_is_no_memory_of_an_engine_under_any_name,
        || {
            let arena = ArenaConfig::shared_unique("lmc_own", 4096).build().unwrap();
            let name = arena.shared_name().unwrap();
            fs::hard_link(name.path(), "/dev/shm/linked").unwrap();
            symlink(name.path(), "/dev/shm/symlinked").unwrap();
            for name in [name.as_str(), "linked"] {
                let name = SharedName::new(name).unwrap();
                let err = MappedSegment::open(&name, 4096).unwrap_err();
                assert!(matches!(err, SegmentError::OwnPool { .. }), "{name}: {err}");
            }
            let name = SharedName::new("symlinked").unwrap();
            let err = MappedSegment::open(&name, 4096).unwrap_err();
            assert!(matches!(err, SegmentError::Open { .. }), "{err}");

            fs::write("/dev/shm/engine", [0; 4096]).unwrap();
            fs::hard_link("/dev/shm/engine", "/dev/shm/second").unwrap();
            let name = SharedName::new("engine").unwrap();
            let err = MappedSegment::open(&name, 4096).unwrap_err();
            assert!(matches!(err, SegmentError::NotPlain { .. }), "{err}");

            let (mut other, name) = start_named("unique:lmc_other");
            let name = SharedName::new(&name).unwrap();
            let err = MappedSegment::open(&name, 4096).unwrap_err();
            assert!(matches!(err, SegmentError::OwnPool { .. }), "{err}");
            other.kill().expect("SIGKILL");
            other.wait().expect("the child ends");
        },
    );
}
