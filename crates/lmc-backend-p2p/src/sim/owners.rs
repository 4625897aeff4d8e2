//! Owners that stop, or answer otherwise than they do.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use lmc_backend::now;
use lmc_key::ChunkKey;

use super::net::{Faults, Net};
use super::run;
use super::schedules::{
    Found, LOCATE, Tally, begin_to_read_again, fetch, found, load, look_up, prompt, slow,
};
use crate::message::{ChunkLease, LATE_DIGEST, Released, Reply, Request};

/// Time that a load may take, much longer than any owner is waited for.
const LONG: Duration = Duration::from_secs(30);

/// Returns the chunks that peers have.
async fn locate(net: &Net, host: usize, keys: &[ChunkKey]) -> Vec<Found> {
    found(keys, look_up(net, host, keys).await)
}

/// An owner that stops after a lookup was once waited for until the load's deadline.
#[test]
fn an_owner_that_stops_before_the_lease_costs_part_of_the_deadline() {
    run(async {
        let net = Net::with_daemons(31, Faults::none(), 3).await;
        let keys = prompt(0, 8);
        for (owner, count) in [(1, 8), (2, 7)] {
            keys[..count]
                .iter()
                .for_each(|&key| net.chunks(owner).store(key, 0));
        }
        // The first of them has the longer prefix: it is asked first.
        let found = locate(&net, 0, &keys).await;
        assert_eq!(found.len(), 8);
        net.freeze(1, LONG * 2);
        let begun = now();
        let tally = load(&net, 0, &found, LONG).await;
        assert_eq!((tally.hits, tally.failed), (7, 1), "{tally:?}");
        assert!(
            now() < begun + Duration::from_secs(1),
            "{:?}",
            now() - begun
        );
    });
}

/// A table of 65,536 chunks once knew where they had been found, and forgot the oldest.
#[test]
fn what_was_located_is_read_however_much_is_located_meanwhile() {
    run(async {
        let net = Net::with_daemons(41, Faults::none(), 2).await;
        let keys = prompt(0, 4);
        keys.iter().for_each(|&key| net.chunks(1).store(key, 0));
        let found = locate(&net, 0, &keys).await;
        let others = prompt(1, (1 << 16) + 1);
        others
            .iter()
            .for_each(|&key| net.chunks(1).store_on_disk(key));
        for some in others.chunks(1024) {
            assert_eq!(locate(&net, 0, some).await.len(), some.len());
        }
        assert_eq!(load(&net, 0, &found, LONG).await.hits, 4);
        let forgotten: Vec<Found> = keys.iter().map(|key| (*key, None)).collect();
        assert_eq!(load(&net, 0, &forgotten, LONG).await.misses, 4);
    });
}

/// Begins to load eight chunks of host 0 at host 1, piece by piece of up to this time.
async fn begin_to_load(
    net: &Net,
    lease: Duration,
    piece: Duration,
) -> tokio::task::JoinHandle<Tally> {
    for host in 0..2 {
        net.start(host, 64, |config| config.lease = lease);
    }
    assert!(net.connect(0, 1).await);
    let keys = prompt(0, 8);
    keys.iter().for_each(|&key| net.chunks(0).store(key, 0));
    let found = locate(net, 1, &keys).await;
    assert_eq!(found.len(), 8);
    net.0.lock().faults.delay.1 = piece;
    let reader = net.clone();
    let reading = tokio::spawn(async move { load(&reader, 1, &found, LONG).await });
    while net.node(0).leased().0 == 0 {
        tokio::time::sleep(Duration::from_micros(50)).await;
    }
    reading
}

/// An owner that stops while it is read was waited for, too.
#[test]
fn a_read_is_given_up_soon_after_its_lease() {
    run(async {
        let net = Net::new(33, slow(Duration::from_micros(200), Duration::ZERO));
        let hours = Duration::from_secs(1 << 16);
        let reading = begin_to_load(&net, Duration::from_secs(2), hours).await;
        let begun = now();
        net.freeze(0, LONG * 2);
        let tally = reading.await.expect("every byte was right");
        assert_eq!((tally.hits, tally.failed), (0, 8), "{tally:?}");
        assert!(
            now() < begun + Duration::from_secs(3),
            "{:?}",
            now() - begun
        );
        assert_eq!(net.chunks(1).pool.usage().slots, 0, "a slot was left");
    });
}

#[test]
fn a_read_goes_on_for_as_long_as_its_lease_is_renewed() {
    run(async {
        let net = Net::new(35, slow(Duration::from_micros(200), Duration::ZERO));
        let (lease, piece) = (Duration::from_millis(30), Duration::from_secs(1));
        let reading = begin_to_load(&net, lease, piece).await;
        let begun = now();
        let tally = reading.await.expect("every byte was right");
        assert_eq!(tally.hits, 8, "{tally:?}");
        assert!(now() > begun + 40 * lease, "{:?}", now() - begun);
    });
}

/// Each answer to a `locate` once ended the pause of a peer that lends nothing.
#[test]
fn a_peer_that_has_chunks_and_lends_none_is_left_alone() {
    run(async {
        let net = Net::with_daemons(37, Faults::none(), 2).await;
        let keys = prompt(0, 4);
        keys.iter().for_each(|&key| net.chunks(1).store(key, 0));
        net.forge(1, |request, reply| {
            (!matches!(request, Request::Lease(_))).then_some(reply)
        });
        let begun = now();
        for _ in 0..20 {
            let found = locate(&net, 0, &keys).await;
            assert_eq!(load(&net, 0, &found, LONG).await.hits, 0);
        }
        assert!(
            now() < begun + Duration::from_secs(2),
            "{:?}",
            now() - begun
        );
        // What it has meanwhile is not known, and it is asked again later.
        let located = look_up(&net, 0, &keys).await;
        assert!(located[0].is_err(), "{located:?}");
        // People are shown why.
        let paused = || net.node(0).status().peers[0].paused_seconds;
        assert!(paused().is_some_and(|seconds| seconds > 0.1));
        net.forge(1, |_, reply| Some(reply));
        tokio::time::sleep(Duration::from_secs(61)).await;
        assert_eq!(paused(), None);
        assert_eq!(fetch(&net, 0, &keys).await.hits, 4);
    });
}

/// Eight requests that failed together once doubled the pause eight times.
#[test]
fn requests_that_fail_together_make_one_pause() {
    run(async {
        let net = Net::with_daemons(39, Faults::none(), 2).await;
        let keys = prompt(0, 1);
        net.chunks(1).store(keys[0], 0);
        net.freeze(1, LOCATE * 2);
        let locates = (0..8).map(|_| locate(&net, 0, &keys));
        let found = futures_util::future::join_all(locates).await;
        assert!(found.iter().all(Vec::is_empty));
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert_eq!(locate(&net, 0, &keys).await.len(), 1);
    });
}

/// Digests that come with the release are compared as those of leases are.
#[test]
fn a_late_digest_that_is_wrong_or_does_not_come_is_a_miss() {
    for comes in [true, false] {
        run(async {
            let net = Net::with_daemons(42, Faults::none(), 2).await;
            let keys = prompt(0, 8);
            keys.iter().for_each(|&key| net.chunks(1).store(key, 0));
            let late = Arc::new(AtomicUsize::new(0));
            let count = Arc::clone(&late);
            net.forge(1, move |_, mut reply| {
                match &mut reply {
                    Reply::Leased(leased) => {
                        let is_late = |chunk: &&ChunkLease| {
                            matches!(chunk, ChunkLease::Granted { digest, .. } if *digest == LATE_DIGEST)
                        };
                        let late = leased.message.chunks.iter().filter(is_late).count();
                        count.fetch_add(late, Ordering::Relaxed);
                    }
                    Reply::Released(Released { digests, .. }) => match comes {
                        true => digests.iter_mut().for_each(|digest| *digest ^= 1),
                        false => digests.clear(),
                    },
                    _ => {}
                }
                Some(reply)
            });
            let tally = fetch(&net, 0, &keys).await;
            let late = late.load(Ordering::Relaxed) as u64;
            assert!((1..8).contains(&late), "{late} of 8");
            assert_eq!((tally.hits, tally.misses), (8 - late, late), "{tally:?}");
            assert_eq!(net.node(0).counters().corrupt, late);
        });
    }
}

/// A read that ends while its lease is certainly valid, and whose digests came with the lease, needs no answer to
/// its release. Late digests need it.
#[test]
fn chunks_whose_digests_are_known_wait_for_no_release() {
    for are_known in [true, false] {
        run(async {
            let net = Net::with_daemons(43, Faults::none(), 2).await;
            let keys = prompt(0, 8);
            keys.iter().for_each(|&key| net.chunks(1).store(key, 0));
            if are_known {
                // The owner sums the chunks for this read.
                assert_eq!(fetch(&net, 0, &keys).await.hits, 8);
                tokio::time::sleep(Duration::from_secs(1)).await;
                while net.chunks(0).evict(0).is_some() {}
            }
            net.forge(1, |_, reply| {
                let is_release = matches!(reply, Reply::Released(_));
                (!is_release).then_some(reply)
            });
            let begun = tokio::time::Instant::now();
            let tally = fetch(&net, 0, &keys).await;
            let was_fast = begun.elapsed() < Duration::from_millis(100);
            let lapsed = net.node(0).counters().lapsed;
            let found = (tally.hits, lapsed, was_fast);
            let expected = if are_known {
                (8, 0, true)
            } else {
                (0, 8, false)
            };
            assert_eq!(found, expected, "{tally:?}");
        });
    }
}

/// A loaded host that answered each lookup a moment too late was once left alone for ever longer.
#[test]
fn a_peer_that_answers_late_is_soon_asked_again() {
    run(async {
        let net = Net::with_daemons(43, Faults::none(), 2).await;
        let keys = prompt(0, 1);
        net.chunks(1).store(keys[0], 0);
        let (pause, late) = (Duration::from_millis(100), LOCATE * 3);
        for _ in 0..12 {
            let failed = net.node(0).counters().failed;
            net.freeze(1, late);
            assert_eq!(locate(&net, 0, &keys).await.len(), 0);
            assert_eq!(net.node(0).counters().failed, failed + 1, "it was asked");
            // Its answer came meanwhile, too late for a lookup.
            tokio::time::sleep(late).await;
            assert_eq!(locate(&net, 0, &keys).await.len(), 0, "not asked");
            tokio::time::sleep(pause - late).await;
        }
        assert_eq!(locate(&net, 0, &keys).await.len(), 1);
        // One that answers in time again is asked at once.
        net.freeze(1, LOCATE + LOCATE / 10);
        assert_eq!(locate(&net, 0, &keys).await.len(), 0);
        tokio::time::sleep(pause / 10).await;
        assert_eq!(locate(&net, 0, &keys).await.len(), 1);
        // One that gives no answer is left alone for longer each time.
        net.freeze(1, LONG);
        for _ in 0..8 {
            locate(&net, 0, &keys).await;
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        let paused = net.node(0).status().peers[0].paused_seconds;
        assert!(paused.is_some_and(|seconds| seconds > 0.1), "{paused:?}");
    });
}

/// Slots that a read does not return must not shift those of other chunks.
#[test]
fn slots_that_are_lost_in_a_read_leave_the_others_to_their_chunks() {
    let mut sum = Tally::default();
    for seed in 0..16 {
        sum.add(run(async {
            let faults = Faults {
                quarantined: 2,
                broken: 8,
                ..slow(Duration::from_micros(200), Duration::from_millis(20))
            };
            let net = Net::with_daemons(seed, faults, 2).await;
            let (_, reading) = begin_to_read_again(&net).await;
            let tally = reading.await.expect("every byte was right");
            let counters = net.node(1).counters();
            assert_eq!(counters.corrupt, 0, "the bytes of another chunk");
            tally
        }));
    }
    assert!(sum.hits > 0 && sum.quarantined > 0, "{sum:?}");
}

/// A chunk of another length than was located once shifted the answers to a release by one.
#[test]
fn a_chunk_of_another_length_spoils_no_other_and_pauses_its_owner() {
    run(async {
        let net = Net::with_daemons(41, Faults::none(), 2).await;
        let keys = prompt(0, 8);
        keys.iter().for_each(|&key| net.chunks(1).store(key, 0));
        net.forge(1, |_, mut reply| {
            match &mut reply {
                Reply::Leased(leased) => match &mut leased.message.chunks[0] {
                    ChunkLease::Granted { len, .. } => *len += 1,
                    other => panic!("not granted: {other:?}"),
                },
                Reply::Released(released) => released.held[0] = false,
                _ => {}
            }
            Some(reply)
        });
        let tally = fetch(&net, 0, &keys).await;
        assert_eq!((tally.hits, tally.misses), (7, 1), "{tally:?}");
        let located = look_up(&net, 0, &keys).await;
        assert!(located[0].is_err(), "{located:?}");
    });
}
