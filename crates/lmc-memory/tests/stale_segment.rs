//! A server that is killed leaves its shared memory behind; the next one takes it over. A
//! server that runs is never robbed. Real processes: this test starts itself again as the
//! other server.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use lmc_memory::{ArenaConfig, ArenaError, Pool, PoolConfig};

const NAME_VARIABLE: &str = "LMC_TEST_STALE_SEGMENT";

/// The other server: makes the segment, fills it, says so and waits to be killed.
/// Runs nothing when the test suite calls it by itself.
#[test]
fn other_server() {
    let Ok(name) = std::env::var(NAME_VARIABLE) else {
        return;
    };
    let arena = ArenaConfig::shared(name, 1 << 20)
        .build()
        .expect("the name is free");
    let pool = Pool::new(arena.into(), PoolConfig::default()).expect("a valid pool");
    let mut slot = pool.reserve(1 << 20).expect("an empty pool");
    slot.bytes_mut().fill(0xab);
    println!("\nready {}", std::process::id());
    std::thread::sleep(std::time::Duration::from_secs(60));
}

fn start(name: &str) -> Child {
    let this = std::env::current_exe().expect("a test has a path");
    let mut child = Command::new(this)
        .args(["--exact", "other_server", "--nocapture", "--test-threads=1"])
        .env(NAME_VARIABLE, name)
        .stdout(Stdio::piped())
        .spawn()
        .expect("the test starts itself");
    let stdout = BufReader::new(child.stdout.take().expect("piped"));
    let ready = stdout
        .lines()
        .map_while(Result::ok)
        .any(|line| line.starts_with("ready"));
    assert!(ready, "the other server ended early");
    child
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
}

/// Whoever still maps a stale segment keeps its old bytes and does not see the new server's.
#[test]
fn a_client_of_the_killed_server_keeps_its_mapping() {
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
}

/// Many servers that start at once over a stale segment: one wins, the others are told.
#[test]
fn a_race_for_a_stale_segment_has_one_winner() {
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
}
