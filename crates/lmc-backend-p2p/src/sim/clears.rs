//! Clears at the worst moments of a read, and their way to every daemon.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use lmc_backend::{Clears, TooManyClears, now};
use lmc_key::{ChunkKey, ClearsId};
use lmc_testkit::rounds;
use parking_lot::Mutex;

use super::chunks::one_clear_each;
use super::net::{Faults, Net};
use super::schedules::{LOCATE, faults, fetch, prompt};
use super::{LEN, Rng, delay, run};
use crate::message::{
    ChunkLease, ChunkState, ClearsPage, KeyBatch, Lease, MAX_PAGES, PAGE_ENTRIES, Reply, Request,
    Stamped,
};

/// Most entries of a map.
const MOST: u64 = Clears::MAX_STARTS as u64;
/// Time in which daemons that reach each other come to know all clears.
const SETTLED: Duration = Duration::from_secs(20);

/// Starts two daemons, the first of which has the chunks.
async fn owner_and_reader(seed: u64) -> (Net, Vec<ChunkKey>) {
    let net = Net::with_daemons(seed, Faults::none(), 2).await;
    let keys = prompt(0, 4);
    keys.iter().for_each(|&key| net.chunks(0).store(key, 0));
    (net, keys)
}

/// Clears the owner's chunks, which its engine computes again at once.
fn clear(net: &Net, keys: &[ChunkKey]) {
    net.chunks(0).clear();
    keys.iter().for_each(|&key| net.chunks(0).store(key, 0));
}

/// Returns the clears of both maps.
fn joined(one: &Clears, other: &Clears) -> Clears {
    let mut joined = one.clone();
    joined.join(other).expect("few");
    joined
}

/// Counts the pages of clears that a daemon is sent.
pub(super) fn count_pages(net: &Net, host: usize) -> Arc<AtomicUsize> {
    let count = Arc::new(AtomicUsize::new(0));
    let pages = Arc::clone(&count);
    net.forge(host, move |request, reply| {
        let is_page = matches!(request, Request::Clears(_));
        pages.fetch_add(usize::from(is_page), Ordering::Relaxed);
        Some(reply)
    });
    count
}

/// Lets a daemon answer to pages of clears otherwise than it would.
fn forge_pages(net: &Net, host: usize, forge: impl Fn(&mut ClearsPage) + Send + Sync + 'static) {
    net.forge(host, move |_, mut reply| {
        if let Reply::Cleared(page) = &mut reply {
            forge(page);
        }
        Some(reply)
    });
}

#[test]
fn chunks_that_are_cleared_between_a_locate_and_its_lease_are_misses() {
    run(async {
        let (net, keys) = owner_and_reader(61).await;
        let (at, cleared) = (net.clone(), keys.clone());
        net.forge(0, move |request, reply| {
            if matches!(request, Request::Locate(keys) if keys.message.len() == 3) {
                clear(&at, &cleared);
            }
            Some(reply)
        });
        let tally = fetch(&net, 1, &keys).await;
        assert_eq!((tally.hits, tally.misses), (0, 4), "{tally:?}");
        net.forge(0, |_, reply| Some(reply));
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(fetch(&net, 1, &keys).await.hits, 4);
    });
}

/// A check before the chunks are held would lease what is cleared while they are.
#[test]
fn chunks_that_are_cleared_before_they_are_granted_are_not_leased() {
    run(async {
        let (net, keys) = owner_and_reader(63).await;
        let (at, cleared) = (net.clone(), keys.clone());
        net.chunks(0).after_lease(move || clear(&at, &cleared));
        let tally = fetch(&net, 1, &keys).await;
        assert_eq!((tally.hits, tally.misses), (0, 4), "{tally:?}");
        assert_eq!(net.node(0).counters().served, 0);
    });
}

/// One side's check is enough where the other has none.
#[test]
fn an_answer_at_another_digest_is_not_taken() {
    run(async {
        let others: [fn(&mut Reply); 2] = [
            |reply| {
                if let Reply::Located(located) = reply {
                    located.clears = ClearsId::new([1; 16]);
                }
            },
            |reply| {
                if let Reply::Leased(leased) = reply {
                    leased.clears = ClearsId::new([1; 16]);
                }
            },
        ];
        for change in others {
            let (net, keys) = owner_and_reader(64).await;
            net.forge(0, move |_, mut reply| {
                change(&mut reply);
                Some(reply)
            });
            assert_eq!(fetch(&net, 1, &keys).await.hits, 0);
            tokio::time::sleep(Duration::from_secs(1)).await;
            assert_eq!(net.node(0).leased(), (0, 0), "the lease is given back");
            net.forge(0, |_, reply| Some(reply));
            assert_eq!(fetch(&net, 1, &keys).await.hits, 4);
        }
    });
}

#[test]
fn a_question_at_another_digest_is_answered_absent_and_grants_nothing() {
    run(async {
        let (net, keys) = owner_and_reader(66).await;
        let (batch, _) = KeyBatch::leading(&keys).expect("four keys");
        let lease = Lease {
            keys: batch.clone(),
            duration_ms: 2_000,
            wait_ms: 0,
        };
        let ask = async |clears| {
            let mut replies = Vec::new();
            for request in [
                Request::Locate(Stamped::new(clears, batch.clone())),
                Request::Lease(Stamped::new(clears, lease.clone())),
                Request::Copy(Stamped::new(clears, batch.clone())),
            ] {
                let request = request.to_bytes().expect("it fits");
                let reply = net.node(0).serve(&net.session(1), &request).await;
                replies.push(Reply::from_bytes(&reply).expect("a reply"));
            }
            let [
                Reply::Located(located),
                Reply::Leased(leased),
                Reply::Copying(read),
            ] = &replies[..]
            else {
                panic!("{replies:?}");
            };
            assert_eq!([located.clears, leased.clears], [ClearsId::NONE; 2]);
            let located = located.message.states.clone();
            let granted = leased.message.chunks.iter();
            let granted = granted
                .filter(|chunk| **chunk != ChunkLease::Absent)
                .count();
            (located, granted, *read)
        };
        let absent = vec![ChunkState::Absent; 4];
        assert_eq!(ask(ClearsId::new([1; 16])).await, (absent, 0, 0));
        assert_eq!(net.node(0).leased(), (0, 0));
        let memory = vec![ChunkState::Memory { len: LEN }; 4];
        assert_eq!(ask(ClearsId::NONE).await, (memory, 4, 4));
    });
}

/// Finding 4 of a review: a clear that no peer had was acknowledged as any other, and a restart
/// lost it.
#[test]
fn a_peer_that_is_cut_off_at_a_clear_is_named_and_learns_of_it_when_it_is_back() {
    run(async {
        let (net, keys) = owner_and_reader(65).await;
        keys.iter().for_each(|&key| net.chunks(1).store(key, 0));
        net.cut(0, 1, true, Duration::from_secs(60));
        net.chunks(0).clear();
        assert_eq!(net.pass_on(0).await, ["host-1"]);
        net.kill(0, Duration::ZERO);
        tokio::time::sleep(LOCATE).await;
        net.start(0, 64, |_| ());
        net.cut(0, 1, false, Duration::ZERO);
        assert!(net.connect(0, 1).await);
        assert_eq!(net.chunks(1).len(), 0, "they are from before the clear");
        assert_eq!(fetch(&net, 0, &keys).await.hits, 0);
        assert_eq!(net.chunks(0).carried_out().total(), 1);
        assert_eq!(net.pass_on(0).await, [""; 0]);
        assert_eq!(net.node(1).counters().clears, 1);
    });
}

#[test]
fn a_peer_that_cannot_note_a_clear_carries_it_out_and_does_not_confirm_it() {
    run(async {
        let (net, keys) = owner_and_reader(66).await;
        keys.iter().for_each(|&key| net.chunks(1).store(key, 0));
        let volatile = &net.chunks(1).is_volatile;
        volatile.store(true, Ordering::Relaxed);
        net.chunks(0).clear();
        let unconfirmed = net.pass_on(0).await;
        assert_eq!(
            unconfirmed,
            ["host-1 (carried out; its restart may undo it)"]
        );
        assert_eq!(net.chunks(1).len(), 0);
        // Also where the two are known to be at one digest.
        tokio::time::sleep(SETTLED).await;
        assert_eq!(net.pass_on(0).await, unconfirmed);
        keys.iter().for_each(|&key| net.chunks(1).store(key, 0));
        assert_eq!(fetch(&net, 0, &keys).await.hits, keys.len() as u64);
        volatile.store(false, Ordering::Relaxed);
        assert_eq!(net.pass_on(0).await, [""; 0]);
    });
}

/// A clear that asked the peers of its begin only was confirmed without those that connected before its
/// answer: they were not asked, and were not missing any more.
#[test]
fn a_peer_that_connects_during_a_clear_confirms_it_or_is_named() {
    run(async {
        for answers in [true, false] {
            let net = Net::new(70, Faults::none());
            (0..3).for_each(|host| net.start(host, 8, |_| ()));
            assert!(net.connect(0, 1).await);
            net.forge(2, move |request, reply| {
                (answers || !matches!(request, Request::Clears(_))).then_some(reply)
            });
            net.chunks(0).clear();
            // The clear waits for the first peer while the second connects.
            net.chunks(1).note_slowly(LOCATE / 2);
            let (unconfirmed, _) = tokio::join!(net.pass_on(0), net.connect(0, 2));
            match answers {
                true => assert_eq!(unconfirmed, [""; 0]),
                false => assert_eq!(unconfirmed, ["host-2"]),
            }
            assert_eq!(net.chunks(2).carried_out(), net.chunks(0).carried_out());
        }
    });
}

#[test]
fn a_clear_ends_by_its_deadline_while_a_disk_hangs() {
    run(async {
        let (net, _) = owner_and_reader(68).await;
        net.chunks(1).clear();
        net.chunks(0).clear();
        net.chunks(0).note_slowly(Duration::from_secs(10));
        let begun = now();
        assert_eq!(net.pass_on(0).await, [""; 0], "it has carried them out");
        assert!(now() <= begun + LOCATE + Duration::from_millis(1));
        tokio::time::sleep(SETTLED).await;
        assert_eq!(net.chunks(0).carried_out().total(), 2);
    });
}

/// Finding 5 of a review: a daemon that started said that it had no clears until its engine was
/// there, and took its peers' clears in place of its own.
#[test]
fn every_message_of_a_daemon_that_starts_has_its_own_clears() {
    run(async {
        let net = Net::new(67, Faults::none());
        // Greater counts of the one absorb nothing of the other.
        let entries = |process, count| {
            let id = super::chunks::start_id(process);
            Clears::from_entries([(id, count)]).expect("one")
        };
        let (own, theirs) = (entries(1000, 2), entries(2000, 5));
        net.note_clears(0, own.clone());
        net.note_clears(1, theirs.clone());
        net.start(0, 64, |_| ());
        net.start(1, 64, |_| ());
        let keys = prompt(0, 4);
        keys.iter().for_each(|&key| net.chunks(1).store(key, 0));
        let heard: Arc<Mutex<Vec<ClearsId>>> = Arc::default();
        let hears = Arc::clone(&heard);
        net.forge(1, move |request, reply| {
            hears.lock().extend(match request {
                Request::Hello(hello) => Some(hello.clears),
                Request::Clears(page) => Some(page.clears),
                Request::Locate(keys) => Some(keys.clears),
                _ => None,
            });
            Some(reply)
        });
        assert!(net.connect(0, 1).await);
        assert_eq!(fetch(&net, 0, &keys).await.hits, 0);
        tokio::time::sleep(SETTLED).await;
        let all = joined(&own, &theirs);
        for host in 0..2 {
            assert_eq!(*net.chunks(host).carried_out(), all);
        }
        assert_eq!(net.chunks(1).len(), 0, "two clears were not known there");
        let heard = heard.lock();
        assert_eq!(heard[0], own.id());
        assert!(heard.iter().all(|id| [own.id(), all.id()].contains(id)));
    });
}

#[test]
fn maps_of_more_than_one_page_are_joined_also_after_an_exchange_that_was_cut_off() {
    run(async {
        let net = Net::new(69, Faults::none());
        // Their ids lie between each other's.
        let own = one_clear_each((0..5000).map(|n| 2 * n));
        let theirs = one_clear_each((0..9000).map(|n| 2 * n + 1));
        net.note_clears(0, own.clone());
        net.note_clears(1, theirs.clone());
        (0..2).for_each(|host| net.start(host, 8, |_| ()));
        for host in 0..2 {
            net.forge(host, |request, reply| {
                let lost = matches!(request, Request::Clears(page) if page.page > 0);
                (!lost).then_some(reply)
            });
        }
        assert!(net.connect(0, 1).await);
        let all = joined(&own, &theirs);
        for host in 0..2 {
            let some = net.chunks(host).carried_out();
            assert!(all.contains(&some) && !some.contains(&all));
        }
        assert!(net.chunks(1).carried_out().contains(&theirs));
        assert!(
            net.chunks(1).carried_out().starts() > 9000,
            "a page was joined"
        );
        (0..2).for_each(|host| net.forge(host, |_, reply| Some(reply)));
        tokio::time::sleep(SETTLED).await;
        for host in 0..2 {
            assert_eq!(*net.chunks(host).carried_out(), all);
        }
    });
}

/// Two maps that together are too large lose no clear, and no chunk passes.
#[test]
fn a_peer_with_more_clears_than_a_map_holds_is_not_in_step_and_its_status_says_why() {
    run(async {
        let net = Net::new(71, Faults::none());
        let (full, one) = (one_clear_each(0..MOST), one_clear_each([MOST]));
        net.note_clears(0, full.clone());
        net.note_clears(1, one.clone());
        (0..2).for_each(|host| net.start(host, 64, |_| ()));
        let pages = [0, 1].map(|host| count_pages(&net, host));
        assert!(net.connect(0, 1).await);
        let keys = prompt(0, 4);
        keys.iter().for_each(|&key| net.chunks(1).store(key, 0));
        const SECONDS: usize = 20;
        for _ in 0..SECONDS {
            assert_eq!(fetch(&net, 0, &keys).await.hits, 0);
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        assert_eq!(*net.chunks(0).carried_out(), full);
        // It has joined the pages that fit.
        assert!(net.chunks(1).carried_out().contains(&one));
        for host in 0..2 {
            let status = net.node(host).status();
            let found = Clears::MAX_STARTS + 1;
            let failure = status.peers[0].last_failure.as_ref().map(|one| &one.reason);
            assert_eq!(failure, Some(&TooManyClears { found }.to_string()));
            assert_eq!(net.pass_on(host).await, [format!("host-{}", 1 - host)]);
        }
        let pages = pages.iter().map(|pages| pages.load(Ordering::Relaxed));
        let most = 2 * (SECONDS / 5 + 8) * usize::from(MAX_PAGES);
        let pages: usize = pages.sum();
        assert!(pages < most, "{pages} pages");
    });
}

#[test]
fn a_peer_whose_pages_are_out_of_order_changes_nothing() {
    run(async {
        // Another page than was asked for: the next, one again and again, and one behind the last.
        let others: [fn(u16) -> u16; 3] = [|page| page + 1, |_| 3, |_| MAX_PAGES - 1];
        for other in others {
            let net = Net::new(73, Faults::none());
            (0..2).for_each(|host| net.start(host, 8, |_| ()));
            forge_pages(&net, 1, move |page| {
                page.page = other(page.page);
                page.pages = MAX_PAGES;
                page.clears = ClearsId::new([1; 16]);
                page.entries = one_clear_each(0..9);
            });
            net.chunks(0).clear();
            let before = net.chunks(0).carried_out();
            assert!(net.connect(0, 1).await);
            assert_eq!(net.chunks(0).carried_out(), before);
            assert_eq!(net.pass_on(0).await, ["host-1"]);
        }
    });
}

/// A peer always has one page more, with entries of its own invention.
#[test]
fn a_peer_that_makes_clears_up_is_asked_for_few_pages_and_fills_one_map_at_most() {
    run(async {
        let net = Net::new(75, Faults::none());
        (0..3).for_each(|host| net.start(host, 8, |_| ()));
        let made_up = AtomicUsize::new(0);
        let asked = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&asked);
        forge_pages(&net, 1, move |page| {
            count.fetch_add(1, Ordering::Relaxed);
            let first = made_up.fetch_add(PAGE_ENTRIES, Ordering::Relaxed) as u64;
            page.pages = MAX_PAGES;
            page.clears = ClearsId::new([1; 16]);
            page.entries = one_clear_each((first..first + PAGE_ENTRIES as u64).map(|n| n + 1000));
        });
        net.chunks(0).clear();
        let before = net.chunks(0).carried_out();
        assert!(net.connect(0, 1).await);
        assert_eq!(asked.load(Ordering::Relaxed), usize::from(MAX_PAGES));
        // One more than a map holds, with its own.
        assert_eq!(net.chunks(0).carried_out(), before);
        // Others are reached all the same.
        assert!(net.connect(0, 2).await);
        assert_eq!(net.chunks(2).carried_out(), before);
    });
}

#[test]
fn clears_made_at_once_do_not_chase_each_other() {
    for seed in 0..rounds(5, 20) as u64 {
        run(async move {
            let net = Net::new(seed, Faults::none());
            let count = 2 + seed as usize % 5;
            (0..count).for_each(|host| net.start(host, 8, |_| ()));
            for a in 0..count {
                for b in 0..a {
                    assert!(net.connect(a, b).await);
                }
            }
            let pages: Vec<_> = (0..count).map(|host| count_pages(&net, host)).collect();
            let sent = || pages.iter().map(|one| one.load(Ordering::Relaxed)).sum();
            (0..count).for_each(|host| net.chunks(host).clear());
            let passing = (0..count).map(|host| net.pass_on(host));
            let unconfirmed = futures_util::future::join_all(passing).await;
            assert_eq!(unconfirmed.concat(), [""; 0]);
            tokio::time::sleep(SETTLED).await;
            for host in 0..count {
                let clears = net.chunks(host).carried_out();
                assert_eq!((clears.starts(), clears.total()), (count, count as u64));
                assert!(net.node(host).counters().clears < 2 * count as u64);
            }
            let settled: usize = sent();
            assert!(settled <= 4 * count * count, "{settled} pages");
            tokio::time::sleep(SETTLED).await;
            assert_eq!(sent(), settled, "nothing is left to say");
        });
    }
}

/// Daemons clear, start again, and are cut off from each other, while messages are lost and
/// repeated. In the end each has carried out every clear, and no other.
async fn cuts_and_restarts(seed: u64) {
    let mut rng = Rng::new(seed);
    let mut faults = faults(&mut rng);
    (faults.clears, faults.delay.0) = (0, Duration::from_millis(2));
    let net = Net::new(seed, faults);
    let count = 2 + rng.below(4) as usize;
    (0..count).for_each(|host| net.start(host, 8, |_| ()));
    let mut all = Clears::default();
    for _ in 0..rng.below(60) {
        let host = rng.below(count as u64) as usize;
        let other = (host + 1 + rng.below(count as u64 - 1) as usize) % count;
        let noticed = delay(&mut rng, Duration::from_secs(2));
        match rng.below(10) {
            0..4 => {
                net.chunks(host).clear();
                let clears = net.chunks(host).carried_out();
                all.join(&clears).expect("few");
                let unconfirmed = net.pass_on(host).await;
                for other in (0..count).filter(|&other| other != host) {
                    let is_known = net
                        .node(host)
                        .sessions
                        .peers
                        .lock()
                        .get(&super::net::name(other))
                        .is_some();
                    if is_known && !unconfirmed.contains(&format!("host-{other}")) {
                        assert!(net.chunks(other).carried_out().contains(&clears));
                    }
                }
            }
            4 => {
                net.kill(host, noticed);
                tokio::time::sleep(delay(&mut rng, Duration::from_secs(1))).await;
                net.start(host, 8, |_| ());
            }
            5 => net.cut(host, other, true, noticed),
            6 => net.cut(host, other, false, noticed),
            _ => {
                let net = net.clone();
                tokio::spawn(async move { net.connect(host, other).await });
            }
        }
        tokio::time::sleep(delay(&mut rng, Duration::from_millis(500))).await;
    }
    net.0.lock().faults = Faults::none();
    for a in 0..count {
        for b in 0..a {
            net.cut(a, b, false, Duration::ZERO);
            net.connect(a, b).await;
        }
    }
    tokio::time::sleep(SETTLED).await;
    for host in 0..count {
        assert_eq!(*net.chunks(host).carried_out(), all, "host {host}");
    }
}

#[test]
fn no_clear_is_lost_over_cuts_and_restarts() {
    for seed in 0..rounds(40, 400) as u64 {
        println!("seed {seed}");
        run(cuts_and_restarts(seed));
    }
}
