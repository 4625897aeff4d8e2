//! Daemons that write to one store at the same time, that are cut off from it, or have a slow link.
//! `cargo xtask test-remote` runs the tests that need a server.

use std::thread;

use lmc_testkit::{in_lab, until};
use lmc_vllm_adapter::{ClientError, Request};

use crate::common::prompt::{CHUNKS, Prompt, await_hits, hits_so_far, register_wide};
use crate::common::redis::Redis;
use crate::common::relay::Relay;
use crate::common::remote::{Daemon, Target, folder};

/// Prompts that are written.
const PROMPTS: u32 = 8;
/// Values for each token, layer and half: a chunk has 256 KiB.
const WIDE: u32 = 64;
/// Bytes in a second of a slow link in each direction, 5 Mbit/s: a prompt takes 2.5 s.
const SLOW: u64 = 625_000;
/// Prompts that are written over it: their 7.5 MiB fit into the write queue.
const SLOWLY: u32 = 5;

/// Starts a daemon whose worker has large chunks.
fn wide(target: &Target) -> Daemon {
    let mut daemon = Daemon::start_in(target);
    daemon.shm_name = register_wide(&mut daemon.client, WIDE);
    daemon
}

fn events(daemon: &Daemon, what: &str) -> f64 {
    let series = format!("lmc_tier_events_total{{tier=\"remote\",what=\"{what}\"}}");
    daemon.server.metric(&series)
}

/// Two daemons write the same chunks at once while a third one reads them; a fourth one, which was
/// not there, reads them afterwards. Each read compares every byte.
fn daemons_write_the_same_chunks(target: &Target) {
    let writers = [wide(target), wide(target)];
    let mut reader = wide(target);
    let read_all = |reader: &mut Daemon| {
        for number in 0..PROMPTS {
            let mut tries = 0;
            until("the prompt is found whole", || {
                tries += 1;
                let request = format!("reading-{number}-{tries}");
                let (client, shm_name) = (&mut reader.client, &reader.shm_name);
                Prompt(number).retrieve(client, shm_name, &request) == CHUNKS as u64
            });
        }
    };
    thread::scope(|scope| {
        let writing = writers.map(|mut writer| {
            scope.spawn(move || {
                for number in 0..PROMPTS {
                    Prompt(number).store(&mut writer.client, &writer.shm_name);
                }
                writer
            })
        });
        read_all(&mut reader);
        for writer in writing {
            let writer = writer.join().expect("it has written");
            assert_eq!(events(&writer, "damaged"), 0.0);
        }
    });
    assert_eq!(target.chunks(), u64::from(PROMPTS) * CHUNKS as u64);
    let mut late = wide(target);
    read_all(&mut late);
    for reader in [reader, late] {
        assert_eq!(events(&reader, "damaged"), 0.0);
        assert_eq!(reader.written(), 0.0, "it has only read");
    }
}

#[test]
fn daemons_write_the_same_chunks_to_a_folder_at_once() {
    let folder = folder();
    daemons_write_the_same_chunks(&Target::new(format!("file://{}", folder.text())));
}

#[test]
#[ignore = "needs redis-server: cargo xtask test-remote"]
fn daemons_write_the_same_chunks_to_a_redis_at_once() {
    let redis = Redis::start(&[]);
    let url = format!("redis://127.0.0.1:{}", redis.port);
    daemons_write_the_same_chunks(&Target::new(url));
}

/// Clears everything at a daemon. A daemon that cannot reach its store answers that the clear is not
/// complete, and passes it on later.
fn clear(daemon: &Daemon) {
    let clear = Request::Clear { force: true };
    let cleared = daemon.server.client().ask(&clear);
    let is_answered = matches!(cleared, Ok(_) | Err(ClientError::Refused { .. }));
    assert!(is_answered, "{cleared:?}");
}

/// Two daemons have the prompt when one of them, or both, are cut off from their store. It is
/// cleared at the one or at the other meanwhile, and the cut ends: neither serves anything from
/// before the clear then, and neither does a daemon that starts later.
fn a_clear_reaches_a_daemon_that_was_cut_off(
    near: &Target,
    far: &Target,
    cut: &dyn Fn(bool),
    is_near_cut: bool,
) {
    for is_cleared_near in [true, false] {
        let (mut first, mut second) = (Daemon::start_in(near), Daemon::start_in(far));
        first.store();
        second.until_read();
        cut(true);
        let cleared = match is_cleared_near {
            true => &first,
            false => &second,
        };
        clear(cleared);
        if is_cleared_near && !is_near_cut {
            first.until_absent();
        }
        cut(false);
        first.until_absent();
        second.until_absent();
        until("the store is used again", || {
            let statuses = [&first, &second].map(|daemon| daemon.server.get("/status"));
            statuses
                .iter()
                .all(|status| !status.contains("\"fault\":\""))
        });
        // What the store still has does not come back either.
        for _ in 0..10 {
            assert_eq!((first.found(), second.found()), (0, 0));
        }
        let mut late = Daemon::start_in(near);
        assert_eq!(late.found(), 0);
        // The next round has to find what is stored from here on.
        late.store();
        first.until_read();
        second.until_read();
        clear(&late);
        second.until_absent();
    }
}

#[test]
fn a_clear_reaches_daemons_whose_folder_was_away() {
    if !in_lab("daemons look for clears in their store every 2 s") {
        return;
    }
    let folder = folder();
    let target = Target::new(format!("file://{}", folder.text()));
    let (here, away) = (folder.join("v2"), folder.join("away"));
    // Nothing can be made or found below a file, which is exchanged with the folder at once.
    std::fs::write(&away, "").expect("space");
    let cut = |_| {
        let exchange = rustix::fs::RenameFlags::EXCHANGE;
        let at = rustix::fs::CWD;
        rustix::fs::renameat_with(at, &here, at, &away, exchange).expect("both are there");
    };
    a_clear_reaches_a_daemon_that_was_cut_off(&target, &target, &cut, true);
}

#[test]
#[ignore = "needs redis-server: cargo xtask test-remote"]
fn a_clear_reaches_a_daemon_that_was_cut_off_from_its_redis() {
    let redis = Redis::start(&[]);
    let relay = Relay::start(redis.port);
    let url = |port| Target::new(format!("redis://127.0.0.1:{port}"));
    let (near, far) = (url(redis.port), url(relay.port));
    a_clear_reaches_a_daemon_that_was_cut_off(&near, &far, &|is_cut| relay.cut(is_cut), false);
}

#[test]
#[ignore = "needs redis-server: cargo xtask test-remote"]
fn a_clear_reaches_daemons_whose_redis_was_stopped() {
    let redis = Redis::start(&[]);
    let target = Target::new(format!("redis://127.0.0.1:{}", redis.port));
    let cut = |is_cut| match is_cut {
        true => redis.process.stop(),
        false => redis.process.signal(libc::SIGCONT),
    };
    a_clear_reaches_a_daemon_that_was_cut_off(&target, &target, &cut, true);
}

/// Hits in memory, and the lookups that find them, are answered while values pass a slow link, first
/// to the store and then from there.
#[test]
#[ignore = "needs redis-server: cargo xtask test-remote"]
fn hits_in_memory_do_not_wait_for_a_redis_behind_a_slow_link() {
    let redis = Redis::start(&[]);
    let relay = Relay::start(redis.port);
    let target = Target::new(format!("redis://127.0.0.1:{}", relay.port));
    let hit = |daemon: &mut Daemon, prompt: Prompt| {
        let found = prompt.retrieve(&mut daemon.client, &daemon.shm_name, "hit");
        assert_eq!(found, CHUNKS as u64);
    };
    let mut writer = wide(&target);
    relay.limit(SLOW);
    for number in 0..SLOWLY {
        Prompt(number).store(&mut writer.client, &writer.shm_name);
    }
    until("a value is in the store", || writer.written() > 0.0);
    for number in 0..SLOWLY {
        hit(&mut writer, Prompt(number));
    }
    let all = f64::from(SLOWLY) * CHUNKS as f64;
    assert!(writer.written() < all, "hits ended after all writes");
    relay.limit(u64::MAX);
    until("all values are in the store", || writer.written() == all);

    let mut reader = wide(&target);
    let near = Prompt(SLOWLY);
    near.store(&mut reader.client, &reader.shm_name);
    until("the link is idle", || reader.written() == CHUNKS as f64);
    relay.limit(SLOW);
    let mut meanwhile = 0;
    for number in 0..SLOWLY {
        let (far, request) = (Prompt(number), format!("far-{number}"));
        far.begin_lookup(&mut reader.client, &request);
        hit(&mut reader, near);
        let found = hits_so_far(&mut reader.client, &request);
        meanwhile += u32::from(found.is_none());
        let found = found.unwrap_or_else(|| await_hits(&mut reader.client, &request));
        far.read_back(&mut reader.client, &reader.shm_name, &request, found);
    }
    // The machine may be busy for longer than a prompt takes, but not each time.
    assert!(meanwhile > 0, "hits ended after all reads");
    assert!(events(&reader, "damaged") == 0.0 && events(&writer, "damaged") == 0.0);
}
