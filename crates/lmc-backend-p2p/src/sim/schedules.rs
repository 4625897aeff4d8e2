//! Seeded schedules: what peers do to each other, and what must hold whatever they do.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::StreamExt;
use lmc_backend::{
    BackendError, ChunkRun, FailedSlot, Handle, Host as _, LoadItem, Loaded, LocateHint, Located,
    now,
};
use lmc_key::ChunkKey;
use lmc_testkit::rounds;
use tokio::task::AbortHandle;

use super::chunks::SimChunks;
use super::net::{Faults, Net, SimNode, name};
use super::prefills::Prefill;
use super::{LEN, Rng, bytes, delay, key, once_in, run};
use crate::message::{OLDEST_VERSION, VERSION};

pub(super) const LOCATE: Duration = Duration::from_millis(20);
const LOAD: Duration = Duration::from_millis(300);
/// Time that a load may take beyond its deadline: the release of a lease.
const BEYOND: Duration = Duration::from_millis(600);
/// Longest time of a load.
pub(super) const LATEST: Duration = LOAD.saturating_add(BEYOND);

/// Counts of what happened in a schedule, so that a test can tell that it tested something.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Tally {
    pub(super) hits: u64,
    pub(super) misses: u64,
    pub(super) failed: u64,
    pending: u64,
    lapsed: u64,
    corrupt: u64,
    busy: u64,
    /// Chunks that were pushed, and those that were to be.
    pushed: u64,
    push_dropped: u64,
    pub(super) quarantined: u64,
    /// Waits for a peer that ended with every chunk, those that ended without and before their time, and those
    /// whose time was over.
    pub(super) waits_whole: u64,
    pub(super) waits_short: u64,
    pub(super) waits_late: u64,
}

impl Tally {
    pub(super) fn add(&mut self, other: Self) {
        self.hits += other.hits;
        self.misses += other.misses;
        self.failed += other.failed;
        self.pending += other.pending;
        self.lapsed += other.lapsed;
        self.corrupt += other.corrupt;
        self.busy += other.busy;
        self.pushed += other.pushed;
        self.push_dropped += other.push_dropped;
        self.quarantined += other.quarantined;
        self.waits_whole += other.waits_whole;
        self.waits_short += other.waits_short;
        self.waits_late += other.waits_late;
    }
}

/// Asks the peers of a daemon for chunks.
pub(super) async fn look_up(
    net: &Net,
    host: usize,
    keys: &[ChunkKey],
) -> Vec<Result<Located, BackendError>> {
    let deadline = now() + LOCATE;
    net.node(host)
        .locate(keys, LocateHint::none(), deadline)
        .await
}

/// Does what an engine does for a prompt: locates its chunks, loads those that peers have, checks
/// every byte, and commits them.
pub(super) async fn fetch(net: &Net, host: usize, keys: &[ChunkKey]) -> Tally {
    fetch_from(net, host, keys, LocateHint::none()).await
}

/// As [`fetch`], with advice for the lookup.
async fn fetch_from(net: &Net, host: usize, keys: &[ChunkKey], hint: &LocateHint) -> Tally {
    let (node, chunks) = (net.node(host), net.chunks(host));
    let missing = keys.iter().position(|key| !chunks.has(key));
    let keys = &keys[missing.unwrap_or(keys.len())..];
    // A lookup names its chunks once.
    let names: Vec<ChunkKey> = keys.iter().map(|key| chunks.name(key)).collect();
    fetch_named(net, (&node, &chunks), &names, hint).await
}

/// Returns chunks of a prompt as they are pushed.
pub(super) fn run_of(chunks: &SimChunks, keys: &[ChunkKey]) -> ChunkRun {
    ChunkRun {
        keys: keys.iter().map(|key| chunks.name(key)).collect(),
        chunk_bytes: LEN,
        parent: None,
    }
}

/// Reads chunks that a peer has pushed.
pub(super) async fn receive(
    net: &Net,
    (node, chunks): (&Arc<SimNode>, &SimChunks),
    names: &[ChunkKey],
    hint: &LocateHint,
) {
    let missing = names.iter().position(|name| !chunks.has_named(name));
    let names = &names[missing.unwrap_or(names.len())..];
    fetch_named(net, (node, chunks), names, hint).await;
}

pub(super) async fn fetch_named(
    net: &Net,
    (node, chunks): (&Arc<SimNode>, &SimChunks),
    keys: &[ChunkKey],
    hint: &LocateHint,
) -> Tally {
    let mut tally = Tally::default();
    let mut located = Vec::new();
    for some in [keys.get(..1), keys.get(1..)].into_iter().flatten() {
        let begun = now();
        let answers = node.locate(some, hint, begun + LOCATE).await;
        assert_eq!(answers.len(), some.len(), "one answer for each key");
        assert!(
            now() <= begun + LOCATE + Duration::from_millis(1),
            "a locate was late"
        );
        let pending = |answer: &Result<Located, _>| matches!(answer, Ok(Located::Pending));
        tally.pending += answers.iter().filter(|answer| pending(answer)).count() as u64;
        let present = answers
            .into_iter()
            .map_while(|answer| answer.ok()?.present());
        let before = located.len();
        located.extend(present);
        if located.len() - before < some.len() {
            break;
        }
    }
    assert!(located.iter().all(|location| location.len == LEN));
    let handles = located.into_iter().map(|location| location.handle);
    let found: Vec<Found> = keys.iter().copied().zip(handles).collect();
    tally.add(load_on(net, (node, chunks), &found, LOAD).await);
    tally
}

/// A chunk that was located, with what the tier knows of it.
pub(super) type Found = (ChunkKey, Option<Handle>);

/// Returns the chunks that peers have.
pub(super) fn found(keys: &[ChunkKey], located: Vec<Result<Located, BackendError>>) -> Vec<Found> {
    let located = keys.iter().zip(located);
    let present =
        |(key, one): (&ChunkKey, Result<Located, _>)| Some((*key, one.ok()?.present()?.handle));
    located.filter_map(present).collect()
}

/// Loads chunks that were located within a time, checks every byte, and commits them.
pub(super) async fn load(net: &Net, host: usize, keys: &[Found], within: Duration) -> Tally {
    load_on(net, (&net.node(host), &net.chunks(host)), keys, within).await
}

async fn load_on(
    net: &Net,
    (node, chunks): (&Arc<SimNode>, &SimChunks),
    keys: &[Found],
    within: Duration,
) -> Tally {
    let mut tally = Tally::default();
    let mut items = Vec::new();
    let mut reserved = Vec::new();
    for (key, handle) in keys {
        let Some(slot) = chunks.reserve(net.below(u64::MAX)) else {
            break;
        };
        items.push(LoadItem::new(*key, slot).with_handle(handle.clone()));
        reserved.push(*key);
    }
    let (begun, count) = (now(), items.len());
    let mut answers = node.load(items, begun + within);
    let mut answered = vec![false; count];
    while let Some((index, loaded)) = answers.next().await {
        assert!(
            !std::mem::replace(&mut answered[index], true),
            "two answers for one key"
        );
        match loaded {
            Loaded::Hit(slot) => {
                let key = reserved[index];
                assert_eq!(slot.bytes(), bytes(&key), "wrong bytes");
                tally.hits += 1;
                chunks.commit(key, slot);
            }
            Loaded::Miss(_) => tally.misses += 1,
            Loaded::Failed { slot, .. } => {
                tally.failed += 1;
                tally.quarantined += u64::from(matches!(slot, FailedSlot::Quarantined));
            }
        }
    }
    assert!(
        answered.into_iter().all(|answered| answered),
        "a key without an answer"
    );
    assert!(
        now() <= begun + within + BEYOND,
        "a load was late: {:?}",
        now() - begun
    );
    tally
}

pub(super) fn prompt(number: u64, len: u64) -> Vec<ChunkKey> {
    (0..len).map(|chunk| key(number, chunk)).collect()
}

pub(super) fn faults(rng: &mut Rng) -> Faults {
    let mut one_of = |choices: [u64; 4]| choices[rng.below(4) as usize];
    Faults {
        lost: one_of([0, 0, 50, 8]),
        repeated: one_of([0, 0, 20, 4]),
        corrupt: one_of([0, 0, 100, 10]),
        delay: (
            Duration::from_micros(one_of([50, 500, 3_000, 30_000])),
            Duration::from_micros(one_of([5, 100, 2_000, 60_000])),
        ),
        enforced: one_of([0, 0, 1, 1]) == 1,
        quarantined: one_of([0, 0, 4, 1]),
        broken: one_of([0, 0, 40, 8]),
        events: Duration::from_millis(one_of([0, 1, 50, 2_000])),
        clears: one_of([0, 0, 300, 30]),
    }
}

/// Asserts that nothing is left of what daemons did to each other, some time after the last of it.
pub(super) fn assert_idle(net: &Net, hosts: usize) {
    assert!(!net.0.lock().panicked, "a request made its daemon panic");
    for host in 0..hosts {
        let (node, chunks) = (net.node(host), net.chunks(host));
        assert_eq!(node.leased(), (0, 0), "a lease was left");
        assert_eq!(net.grants(host), 0, "a grant was left");
        assert!(node.pusher.is_empty(), "a push was left");
        let slots = chunks.pool.usage().slots;
        assert_eq!(slots, chunks.len() as u64, "a slot was left");
        let (connected, known) = net.connected(host);
        assert_eq!(connected, known, "peers of host {host}");
    }
}

/// Runs one schedule: some hosts, some prompts, everything that may go wrong. Returns what
/// happened once every lease has ended.
async fn schedule(seed: u64) -> Tally {
    let mut rng = Rng::new(seed);
    let hosts = 2 + rng.below(4) as usize;
    let slots = 16 + rng.below(64);
    let faults = faults(&mut rng);
    let corrupts = faults.corrupt > 0;
    let net = Net::new(seed ^ 0x5eed, faults);
    let lease = Duration::from_millis([20, 100, 2_000][rng.below(3) as usize]);
    let start = |net: &Net, host| net.start(host, slots, |config| config.lease = lease);
    (0..hosts).for_each(|host| start(&net, host));
    for a in 0..hosts {
        for b in 0..a {
            net.connect(a, b).await;
        }
    }
    let sum = Rc::new(RefCell::new(Tally::default()));
    // Tasks of engines, which end with their hosts.
    let mut engines: Vec<Vec<AbortHandle>> = vec![Vec::new(); hosts];
    let local = tokio::task::LocalSet::new();
    local
        .run_until(async {
            for _ in 0..60 + rng.below(100) {
                let host = rng.below(hosts as u64) as usize;
                let other = (host + 1 + rng.below(hosts as u64 - 1) as usize) % hosts;
                let chunks = net.chunks(host);
                let keys = prompt(rng.below(4), 1 + rng.below(10));
                let noticed = delay(&mut rng, Duration::from_secs(2));
                match rng.below(54) {
                    0 => {
                        net.kill(host, noticed);
                        engines[host].drain(..).for_each(|task| task.abort());
                        tokio::time::sleep(delay(&mut rng, Duration::from_secs(1))).await;
                        start(&net, host);
                        for peer in (0..hosts).filter(|&peer| peer != host) {
                            let net = net.clone();
                            tokio::task::spawn_local(async move { net.connect(host, peer).await });
                        }
                    }
                    1 | 2 => net.freeze(host, delay(&mut rng, Duration::from_secs(4))),
                    3 | 4 => net.cut(host, other, true, noticed),
                    5 | 6 => {
                        net.cut(host, other, false, noticed);
                        let net = net.clone();
                        tokio::task::spawn_local(async move { net.connect(host, other).await });
                    }
                    7 => {
                        chunks.clear();
                        let node = net.node(host);
                        tokio::task::spawn_local(async move {
                            node.exchange_clears(now() + LOCATE).await
                        });
                    }
                    8..16 => keys
                        .iter()
                        .for_each(|&key| chunks.store(key, rng.next_u64())),
                    16..18 => {
                        keys.iter().for_each(|&key| chunks.begin_store(key));
                        let pick = rng.next_u64();
                        let after = delay(&mut rng, Duration::from_millis(40));
                        tokio::task::spawn_local(async move {
                            tokio::time::sleep(after).await;
                            keys.iter().for_each(|&key| chunks.store(key, pick));
                        });
                    }
                    18 => keys.iter().for_each(|&key| chunks.store_on_disk(key)),
                    19..24 => {
                        for _ in 0..rng.below(20) {
                            chunks.evict(rng.next_u64());
                        }
                    }
                    40..44 => {
                        let fitting = [0, 1, 3, usize::MAX][rng.below(4) as usize];
                        net.chunks(other).fitting.store(fitting, Ordering::Relaxed);
                        let run = run_of(&chunks, &keys);
                        net.node(host).push(run, name(other).as_str());
                    }
                    44..50 => {
                        let keys = prompt(rng.below(8), keys.len() as u64);
                        let mut prefill = Prefill::any(&mut rng, other, keys);
                        if once_in(&mut rng, 3) {
                            prefill = prefill.pushed_to(host);
                        }
                        for _ in 0..1 + rng.below(2) {
                            let reader = (other + 1 + rng.below(hosts as u64 - 1) as usize) % hosts;
                            let wait = [0, 50, 1_000, 20_000][rng.below(4) as usize];
                            let leaves = once_in(&mut rng, 6).then(|| delay(&mut rng, 2 * LOAD));
                            let (net, sum, prefill) =
                                (net.clone(), Rc::clone(&sum), prefill.clone());
                            let waiting = tokio::task::spawn_local(async move {
                                let wait = Duration::from_millis(wait);
                                let waited = prefill.wait(&net, reader, wait);
                                let stays = leaves.unwrap_or(Duration::MAX);
                                if let Ok((tally, _)) = tokio::time::timeout(stays, waited).await {
                                    sum.borrow_mut().add(tally);
                                }
                            });
                            engines[reader].push(waiting.abort_handle());
                        }
                        let net = net.clone();
                        let computing =
                            tokio::task::spawn_local(async move { prefill.compute(&net).await });
                        engines[other].push(computing.abort_handle());
                    }
                    50 | 51 => {
                        let is_draining = once_in(&mut rng, 2);
                        chunks.is_draining.store(is_draining, Ordering::Relaxed);
                        chunks.events().report_host();
                    }
                    52 | 53 => {
                        // Its memory is full of what is in use.
                        let slots = std::iter::from_fn(|| chunks.reserve(rng.next_u64()));
                        let slots: Vec<_> = slots.collect();
                        let time = delay(&mut rng, Duration::from_millis(200));
                        tokio::task::spawn_local(async move {
                            tokio::time::sleep(time).await;
                            drop(slots);
                        });
                    }
                    _ => {
                        let (net, sum) = (net.clone(), Rc::clone(&sum));
                        let leaves = once_in(&mut rng, 6).then(|| delay(&mut rng, LOAD));
                        tokio::task::spawn_local(async move {
                            let fetched = fetch(&net, host, &keys);
                            let stays = leaves.unwrap_or(Duration::MAX);
                            if let Ok(tally) = tokio::time::timeout(stays, fetched).await {
                                sum.borrow_mut().add(tally);
                            }
                        });
                    }
                }
                tokio::time::sleep(delay(&mut rng, Duration::from_millis(30))).await;
            }
            // All leases end by themselves, whatever became of their readers.
            tokio::time::sleep(Duration::from_secs(60)).await;
        })
        .await;
    drop(local);
    assert_idle(&net, hosts);
    for host in 0..hosts {
        let counters = net.node(host).counters();
        assert!(corrupts || counters.corrupt == 0, "bytes without a lease");
        let mut sum = sum.borrow_mut();
        sum.lapsed += counters.lapsed;
        sum.corrupt += counters.corrupt;
        sum.busy += counters.busy;
        sum.pushed += counters.pushed;
        sum.push_dropped += counters.push_dropped;
    }
    *sum.borrow()
}

/// Returns the number of schedules to run.
pub(super) fn seeds() -> u64 {
    let seeds = std::env::var("LMC_P2P_SEEDS").ok();
    let seeds = seeds.and_then(|seeds| seeds.parse().ok());
    seeds.unwrap_or(rounds(30, 300) as u64)
}

#[test]
fn no_schedule_gives_a_wrong_byte_or_leaves_a_lease() {
    let seeds = seeds();
    let mut sum = Tally::default();
    for seed in 0..seeds {
        println!("seed {seed}");
        sum.add(run(schedule(seed)));
    }
    println!("{sum:?}");
    // One schedule alone, which shall be seen again, may have none of some.
    if seeds < 30 {
        return;
    }
    assert!(sum.hits > 0 && sum.misses > 0 && sum.failed > 0, "{sum:?}");
    assert!(sum.pushed > 0 && sum.push_dropped > 0, "{sum:?}");
    let waits = [sum.waits_whole, sum.waits_short, sum.waits_late];
    assert!(waits.into_iter().all(|ended| ended > 0), "{sum:?}");
    // A few schedules may have none of what is rare.
    if seeds < 300 {
        return;
    }
    assert!(sum.pending > 0, "{sum:?}");
    assert!(sum.lapsed > 0 && sum.corrupt > 0 && sum.busy > 0, "{sum:?}");
    assert!(sum.quarantined > 0, "{sum:?}");
}

/// Faults of a network that only delays.
pub(super) fn slow(message: Duration, piece: Duration) -> Faults {
    Faults {
        delay: (message, piece),
        ..Faults::none()
    }
}

#[test]
fn a_thousand_readers_of_one_prompt_stay_within_the_owners_bounds() {
    let most_readers = rounds(250, 1000);
    let tally = run(async {
        let net = Net::new(
            1,
            slow(Duration::from_millis(2), Duration::from_micros(300)),
        );
        net.start(0, 256, |_| ());
        let keys = prompt(0, 16);
        keys.iter().for_each(|&key| net.chunks(0).store(key, 0));
        for reader in 1..=most_readers {
            net.start(reader, 32, |_| ());
            assert!(net.connect(reader, 0).await);
        }
        let most = net.node(0);
        let watch = tokio::spawn(async move {
            let mut peak = 0;
            loop {
                peak = most.leased().1.max(peak);
                assert!(
                    peak <= most.sessions.config.limits.bytes,
                    "{peak} bytes are leased"
                );
                tokio::time::sleep(Duration::from_micros(50)).await;
                if peak > 0 && most.leased().0 == 0 {
                    return peak;
                }
            }
        });
        let keys = &keys;
        let readers = (1..=most_readers).map(|reader| {
            let net = net.clone();
            async move { fetch(&net, reader, keys).await }
        });
        let mut sum = Tally::default();
        for tally in futures_util::future::join_all(readers).await {
            sum.add(tally);
        }
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert!(watch.await.expect("no bound was broken") > 0);
        assert_eq!(net.node(0).leased(), (0, 0));
        sum.busy = net.node(0).counters().served;
        sum
    });
    // Four at a time, for as long as they are ready to wait.
    assert!(tally.hits >= 16 * 20 && tally.failed > 0, "{tally:?}");
}

#[test]
fn an_owner_that_comes_back_and_evicts_gives_no_wrong_byte() {
    run(async {
        // A read of sixteen chunks takes longer than the lease that its stopped owner cannot renew.
        let net = Net::new(
            3,
            slow(Duration::from_micros(200), Duration::from_millis(80)),
        );
        let lease = Duration::from_millis(60);
        for host in 0..2 {
            net.start(host, 64, |config| config.lease = lease);
        }
        assert!(net.connect(0, 1).await);
        let keys = prompt(0, 8);
        keys.iter().for_each(|&key| net.chunks(0).store(key, 0));
        let reading = {
            let (net, keys) = (net.clone(), keys.clone());
            tokio::spawn(async move { fetch(&net, 1, &keys).await })
        };
        while net.node(0).leased().0 == 0 {
            tokio::time::sleep(Duration::from_micros(50)).await;
        }
        net.freeze(0, Duration::from_millis(100));
        tokio::time::sleep(Duration::from_millis(130)).await;
        assert_eq!(net.node(0).leased(), (0, 0), "the lease is over");
        for pick in 0..8 {
            net.chunks(0).evict(pick).expect("nothing keeps the chunks");
        }
        let tally = reading.await.expect("every byte was right");
        // What had not arrived by the deadline failed; the rest was read beyond its lease.
        assert_eq!(
            (tally.hits, tally.misses + tally.failed),
            (0, 8),
            "{tally:?}"
        );
        assert_eq!(net.node(1).counters().lapsed, tally.misses);
        assert!(tally.misses > 0, "{tally:?}");
    });
}

#[test]
fn a_long_read_keeps_its_lease_by_renewing_it() {
    run(async {
        let net = Net::new(
            3,
            slow(Duration::from_micros(200), Duration::from_millis(40)),
        );
        for host in 0..2 {
            net.start(host, 64, |config| config.lease = Duration::from_millis(30));
        }
        assert!(net.connect(0, 1).await);
        let keys = prompt(0, 8);
        keys.iter().for_each(|&key| net.chunks(0).store(key, 0));
        let begun = now();
        let tally = fetch(&net, 1, &keys).await;
        assert_eq!(tally.hits, 8, "{tally:?}");
        assert!(
            now() - begun > Duration::from_millis(90),
            "three leases long"
        );
    });
}

#[test]
fn what_was_cleared_at_one_side_of_a_cut_is_served_by_neither_afterwards() {
    run(async {
        let net = Net::new(5, Faults::none());
        (0..3).for_each(|host| net.start(host, 64, |_| ()));
        for (a, b) in [(0, 1), (0, 2), (1, 2)] {
            assert!(net.connect(a, b).await);
        }
        let keys = prompt(0, 4);
        for host in 0..2 {
            keys.iter().for_each(|&key| net.chunks(host).store(key, 0));
        }
        let noticed = Duration::from_millis(10);
        net.cut(0, 1, true, noticed);
        net.cut(0, 2, true, noticed);
        tokio::time::sleep(noticed * 2).await;
        net.chunks(0).clear();
        let missing = net.pass_on(0).await;
        assert_eq!(missing.len(), 0, "no other is connected");
        // Meanwhile the other side goes on with what it has.
        assert_eq!(fetch(&net, 2, &keys).await.hits, 4);
        net.cut(0, 1, false, noticed);
        assert!(net.connect(0, 1).await);
        assert_eq!((net.chunks(0).len(), net.chunks(1).len()), (0, 0));
        // The third learns of it from the second, whom it asks.
        keys.iter().for_each(|&key| net.chunks(1).store(key, 0));
        let more = prompt(0, 5);
        net.chunks(1).store(more[4], 0);
        let first = fetch(&net, 2, &more).await.hits;
        tokio::time::sleep(LOCATE).await;
        let left = net.chunks(2).len() as u64;
        assert!(
            left == first && first <= 1,
            "its own were older, and are gone"
        );
        assert_eq!(fetch(&net, 2, &more).await.hits, 5);
    });
}

#[test]
fn a_clear_is_not_lost_to_a_side_that_cleared_more_often() {
    run(async {
        let net = Net::with_daemons(5, Faults::none(), 2).await;
        let noticed = Duration::from_millis(10);
        net.cut(0, 1, true, noticed);
        tokio::time::sleep(noticed * 2).await;
        // One side clears twice and computes; the other clears once, afterwards.
        net.chunks(1).clear();
        net.chunks(1).clear();
        let keys = prompt(0, 4);
        keys.iter().for_each(|&key| net.chunks(1).store(key, 0));
        net.chunks(0).clear();
        net.cut(0, 1, false, noticed);
        assert!(net.connect(0, 1).await);
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(
            net.chunks(1).len(),
            0,
            "they are from before the last clear"
        );
        assert_eq!(fetch(&net, 0, &keys).await.hits, 0);
        keys.iter().for_each(|&key| net.chunks(1).store(key, 0));
        assert_eq!(fetch(&net, 0, &keys).await.hits, 4);
    });
}

#[test]
fn two_daemons_that_ask_each_other_end_at_once() {
    run(async {
        let net = Net::with_daemons(7, Faults::none(), 2).await;
        let keys = prompt(0, 4);
        let begun = now();
        let (one, other) = tokio::join!(fetch(&net, 0, &keys), fetch(&net, 1, &keys));
        assert_eq!(
            (one.pending, other.pending, one.hits, other.hits),
            (0, 0, 0, 0)
        );
        assert!(now() < begun + LOCATE, "neither waits for the other");
        // What an engine writes is pending for the other, and for no one else.
        net.chunks(0).begin_store(keys[0]);
        let located = look_up(&net, 1, &keys).await;
        assert!(matches!(located[0], Ok(Located::Pending)), "{located:?}");
        assert!(matches!(located[1], Ok(Located::Absent)), "{located:?}");
        let located = look_up(&net, 0, &keys).await;
        assert!(matches!(located[0], Ok(Located::Absent)), "{located:?}");
    });
}

#[test]
fn a_silent_peer_is_not_taken_for_one_without_the_chunk() {
    run(async {
        let net = Net::with_daemons(9, Faults::none(), 3).await;
        let keys = prompt(0, 1);
        net.freeze(1, Duration::from_secs(5));
        let located = look_up(&net, 0, &keys).await;
        assert!(located[0].is_err(), "{located:?}");
        // It is not asked again for a while, and what it has is not known.
        let begun = now();
        let located = look_up(&net, 0, &keys).await;
        assert!(located[0].is_err(), "{located:?}");
        assert!(now() < begun + LOCATE, "it is not waited for");
        net.chunks(2).store(keys[0], 0);
        assert_eq!(fetch(&net, 0, &keys).await.hits, 1);
    });
}

/// A peer that stands still delays the first prompt by the timeout, and those after it not at all
/// while it is left alone; those that find their chunks at another peer it delays as little.
#[test]
fn a_peer_that_never_answers_delays_a_lookup_by_the_timeout_at_most() {
    run(async {
        let net = Net::with_daemons(8, Faults::none(), 3).await;
        net.freeze(1, Duration::from_secs(3_600));
        let mut waits = Vec::new();
        for number in 0..20 {
            let begun = now();
            let located = look_up(&net, 0, &prompt(number, 1)).await;
            assert!(located[0].is_err(), "it may have the chunk: {located:?}");
            waits.push(now() - begun);
        }
        assert_eq!(waits[0], LOCATE);
        // The other peer's answer is waited for.
        let others = waits[1..].iter();
        assert!(others.max() <= Some(&(LOCATE / 4)), "{waits:?}");
        // Long after, it is asked again.
        tokio::time::sleep(Duration::from_secs(600)).await;
        let keys = prompt(99, 1);
        net.chunks(2).store(keys[0], 0);
        let begun = now();
        let located = look_up(&net, 0, &keys).await;
        assert!(matches!(located[0], Ok(Located::Present(_))), "{located:?}");
        assert!(now() - begun <= LOCATE / 2, "{:?}", now() - begun);
    });
}

/// The first peer claims to have every chunk, so that the second is not waited for; but its claim
/// is not believed.
#[test]
fn a_peer_that_was_not_waited_for_is_not_taken_for_one_without_the_chunk() {
    run(async {
        let net = Net::new(10, Faults::none());
        net.start(0, 64, |config| config.max_chunk = LEN - 1);
        (1..3).for_each(|host| net.start(host, 64, |_| ()));
        assert!(net.connect(0, 1).await && net.connect(0, 2).await);
        let keys = prompt(0, 1);
        net.chunks(1).store(keys[0], 0);
        net.freeze(2, Duration::from_secs(5));
        let located = look_up(&net, 0, &keys).await;
        assert!(located[0].is_err(), "{located:?}");
    });
}

#[test]
fn chunks_that_an_owner_does_not_lend_are_read_from_another() {
    run(async {
        let delays = (Duration::from_micros(100), Duration::from_millis(20));
        let net = Net::new(11, slow(delays.0, delays.1));
        // Each of the first two lends four chunks to one peer at a time.
        (0..4).for_each(|host| net.start(host, if host < 2 { 32 } else { 128 }, |_| ()));
        for a in 0..4 {
            for b in 0..a {
                assert!(net.connect(a, b).await);
            }
        }
        // What they say to each other about clears is over.
        tokio::time::sleep(Duration::from_secs(1)).await;
        let keys = prompt(0, 8);
        for host in 0..2 {
            keys.iter().for_each(|&key| net.chunks(host).store(key, 0));
        }
        let read = fetch(&net, 2, &keys).await;
        assert_eq!(read.hits, 8, "{read:?}");
        // The first chunk is located before the others, and may come from the other owner.
        assert!((3..=4).contains(&net.node(2).counters().busy));
        let served = [0, 1].map(|host| net.node(host).counters().served);
        assert_eq!(served, [4, 4]);
    });
}

#[test]
fn peers_that_do_not_fit_are_refused_with_a_reason() {
    use crate::unfit::Unfit;
    use crate::{HelloError, NodeConfig};
    type Change = fn(&mut NodeConfig);
    let cases: [(Change, Unfit); 3] = [
        (
            |c| c.versions = (VERSION + 1, VERSION + 2),
            Unfit::Version {
                here: (VERSION + 1, VERSION + 2),
                there: (OLDEST_VERSION, VERSION),
            },
        ),
        (
            |c| c.chunk_size = 16,
            Unfit::ChunkSize {
                here: 16,
                there: 256,
            },
        ),
        (
            |c| c.algorithm = "xxh3".into(),
            Unfit::Algorithm {
                here: "xxh3".into(),
                there: "blake3".into(),
            },
        ),
    ];
    for (change, unfit) in cases {
        run(async {
            let net = Net::new(13, Faults::none());
            net.start(0, 16, |_| ());
            net.start(1, 16, change);
            assert!(net.link(0, 1));
            let found = net.node(1).connected(&net.session(0)).await;
            assert_eq!(found, Err(HelloError::Unfit(unfit.clone())));
            let status = net.node(1).status();
            let failure = status.peers[0].last_failure.as_ref();
            assert_eq!(failure.map(|one| &one.reason), Some(&unfit.to_string()));
            assert_eq!(status.peers[0].version, None);
            let keys = prompt(0, 1);
            net.chunks(0).store(keys[0], 0);
            let located = look_up(&net, 1, &keys).await;
            assert!(matches!(located[0], Ok(Located::Absent)), "{located:?}");
        });
    }
}

/// Begins to read a prompt of eight chunks slowly from host 0 to host 1.
async fn begin_to_read(net: &Net) -> (Vec<ChunkKey>, tokio::task::JoinHandle<Tally>) {
    (0..2).for_each(|host| net.start(host, 64, |_| ()));
    assert!(net.connect(0, 1).await);
    begin_to_read_again(net).await
}

/// Begins to read between hosts that are connected.
pub(super) async fn begin_to_read_again(
    net: &Net,
) -> (Vec<ChunkKey>, tokio::task::JoinHandle<Tally>) {
    let keys = prompt(0, 8);
    keys.iter().for_each(|&key| net.chunks(0).store(key, 0));
    let (reader, asked) = (net.clone(), keys.clone());
    let reading = tokio::spawn(async move { fetch(&reader, 1, &asked).await });
    while net.node(0).leased().0 == 0 {
        tokio::time::sleep(Duration::from_micros(50)).await;
    }
    (keys, reading)
}

#[test]
fn a_reader_that_leaves_gives_its_lease_back_at_once() {
    run(async {
        let net = Net::new(
            15,
            slow(Duration::from_micros(200), Duration::from_millis(20)),
        );
        let (_, reading) = begin_to_read(&net).await;
        // By then it knows its lease.
        tokio::time::sleep(Duration::from_millis(5)).await;
        reading.abort();
        tokio::time::sleep(Duration::from_millis(10)).await;
        assert_eq!(net.node(0).leased(), (0, 0));
    });
}

#[test]
fn the_leases_of_a_peer_that_is_gone_end_at_once() {
    run(async {
        let net = Net::new(
            17,
            slow(Duration::from_micros(200), Duration::from_millis(20)),
        );
        let (_, reading) = begin_to_read(&net).await;
        net.kill(1, Duration::from_millis(3));
        reading.abort();
        tokio::time::sleep(Duration::from_millis(5)).await;
        assert_eq!((net.node(0).leased(), net.grants(0)), ((0, 0), 0));
    });
}

/// The read began before the clear, and has the right bytes of the old names.
#[test]
fn what_is_cleared_while_it_is_read_is_not_found_afterwards() {
    run(async {
        let net = Net::new(
            19,
            slow(Duration::from_micros(200), Duration::from_millis(20)),
        );
        let (keys, reading) = begin_to_read(&net).await;
        net.chunks(0).clear();
        let missing = net.pass_on(0).await;
        assert_eq!(missing, [""; 0]);
        reading.await.expect("every byte was right");
        assert_eq!((net.chunks(0).len(), net.chunks(1).len()), (0, 0));
        for host in 0..2 {
            assert_eq!(fetch(&net, host, &keys).await.hits, 0);
        }
    });
}

#[test]
fn hinted_peers_are_asked_alone_and_others_where_they_do_not_have_all() {
    run(async {
        let net = Net::new(25, Faults::none());
        (0..4).for_each(|host| net.start(host, 64, |_| ()));
        for peer in 1..4 {
            assert!(net.connect(0, peer).await);
        }
        let hint = |name: &str| LocateHint::default().with_sources(Arc::new([name.to_owned()]));
        let served = |net: &Net| [1, 2, 3].map(|host| net.node(host).counters().served);
        let all = [1, 2, 3];
        let cases: [(&str, &[usize], [u64; 3]); 4] = [
            ("host-2", &all, [0, 4, 0]),
            // By its address.
            ("host-3:1", &all, [0, 0, 4]),
            // What it lacks is read from others.
            ("host-2", &[3], [0, 0, 4]),
            // Unknown names are ignored.
            ("stranger", &[1], [4, 0, 0]),
        ];
        for (number, (name, owners, expected)) in cases.into_iter().enumerate() {
            let keys = prompt(number as u64, 4);
            for &owner in owners {
                keys.iter().for_each(|&key| net.chunks(owner).store(key, 0));
            }
            let before = served(&net);
            let tally = fetch_from(&net, 0, &keys, &hint(name)).await;
            assert_eq!(tally.hits, 4, "{name}: {tally:?}");
            let after = served(&net);
            let read = [0, 1, 2].map(|one| after[one] - before[one]);
            assert_eq!(read, expected, "{name}");
        }
        // One that has all is not waited with for others.
        let keys = prompt(9, 4);
        for owner in all {
            keys.iter().for_each(|&key| net.chunks(owner).store(key, 0));
        }
        net.freeze(3, Duration::from_millis(100));
        let begun = now();
        let located = net
            .node(0)
            .locate(&keys, &hint("host-1"), begun + LOCATE)
            .await;
        assert!(located.iter().all(Result::is_ok), "{located:?}");
        assert!(now() - begun < LOCATE / 4);
        // One that does not answer costs half of the time, and no chunk.
        let located = net
            .node(0)
            .locate(&keys, &hint("host-3"), begun + LOCATE)
            .await;
        let present = |one: &Result<Located, _>| matches!(one, Ok(Located::Present(_)));
        assert!(located.iter().all(present), "{located:?}");
    });
}

#[test]
fn the_status_names_peers_that_went_until_they_are_back() {
    run(async {
        let net = Net::with_daemons(23, Faults::none(), 3).await;
        let keys = prompt(0, 3);
        keys.iter().for_each(|&key| net.chunks(1).store(key, 0));
        fetch(&net, 0, &keys).await;
        let status = net.node(0).status();
        let ids: Vec<&str> = status.peers.iter().map(|peer| peer.id.as_str()).collect();
        assert_eq!(ids, ["host-1", "host-2"]);
        let counters = &status.peers[0].counters;
        assert_eq!((counters["read"], counters["read_bytes"]), (3, 3 * LEN));
        assert!(status.peers[0].round_trip_seconds.is_some());
        assert_eq!(net.node(1).status().peers[0].counters["served"], 3);
        net.kill(1, Duration::from_millis(1));
        tokio::time::sleep(Duration::from_millis(5)).await;
        let status = net.node(0).status();
        assert_eq!((status.peers.len(), status.gone.len()), (1, 1));
        let gone = &status.gone[0];
        assert_eq!(
            (gone.name.as_deref(), gone.counters["read"]),
            (Some("host-1"), 3)
        );
        assert_eq!(gone.failure.reason, "killed");
        assert_eq!(status.counters["read"], 3);
        net.start(1, 64, |_| ());
        assert!(net.connect(0, 1).await);
        let status = net.node(0).status();
        assert_eq!((status.peers.len(), status.gone.len()), (2, 0));
    });
}
