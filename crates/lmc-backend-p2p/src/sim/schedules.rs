//! Seeded schedules: what peers do to each other, and what must hold whatever they do.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use futures_util::StreamExt;
use lmc_backend::{LoadItem, Loaded, Located};
use lmc_key::ChunkKey;

use super::net::{Faults, Net};
use super::{LEN, Rng, bytes, key, run};
use crate::link::now;

const LOCATE: Duration = Duration::from_millis(20);
const LOAD: Duration = Duration::from_millis(300);
/// Time that a load may take beyond its deadline: the release of a lease.
const BEYOND: Duration = Duration::from_millis(600);

/// What happened in a schedule, so that a test can tell that it tested something.
#[derive(Debug, Default, Clone, Copy)]
struct Tally {
    hits: u64,
    misses: u64,
    failed: u64,
    pending: u64,
    lapsed: u64,
    corrupt: u64,
    busy: u64,
    elsewhere: u64,
}

impl Tally {
    fn add(&mut self, other: Self) {
        self.hits += other.hits;
        self.misses += other.misses;
        self.failed += other.failed;
        self.pending += other.pending;
        self.lapsed += other.lapsed;
        self.corrupt += other.corrupt;
        self.busy += other.busy;
        self.elsewhere += other.elsewhere;
    }
}

/// Does what an engine does for a prompt: locates its chunks, loads those that peers have, checks
/// every byte, and commits them.
async fn fetch(net: &Net, host: usize, keys: &[ChunkKey]) -> Tally {
    let mut tally = Tally::default();
    let (node, chunks) = (net.node(host), net.chunks(host));
    let missing = keys.iter().position(|key| !chunks.has(key));
    let keys = &keys[missing.unwrap_or(keys.len())..];
    let mut located = Vec::new();
    for some in [keys.get(..1), keys.get(1..)].into_iter().flatten() {
        let begun = now();
        let answers = node.locate(some, begun + LOCATE).await;
        assert_eq!(answers.len(), some.len(), "one answer for each key");
        assert!(now() <= begun + LOCATE + Duration::from_millis(1), "a locate was late");
        let pending = |answer: &Result<Located, _>| matches!(answer, Ok(Located::Pending));
        tally.pending += answers.iter().filter(|answer| pending(answer)).count() as u64;
        let present = answers.into_iter().map_while(|answer| answer.ok()?.present());
        let found = present.take_while(|one| one.epoch.is_valid_at(chunks.known_epoch()));
        let before = located.len();
        located.extend(found);
        if located.len() - before < some.len() {
            break;
        }
    }
    let mut items = Vec::new();
    let mut reserved = Vec::new();
    for (key, location) in keys.iter().zip(&located) {
        assert_eq!(location.len, LEN);
        let Some(slot) = chunks.reserve(net.below(u64::MAX)) else {
            break;
        };
        items.push(LoadItem::new(*key, slot));
        reserved.push(*key);
    }
    let (begun, count) = (now(), items.len());
    let mut answers = node.load(items, begun + LOAD);
    let mut answered = vec![false; count];
    while let Some((index, loaded)) = answers.next().await {
        assert!(!std::mem::replace(&mut answered[index], true), "two answers for one key");
        match loaded {
            Loaded::Hit { slot, epoch } => {
                let key = reserved[index];
                assert_eq!(slot.bytes(), bytes(&key, epoch.counter), "wrong bytes");
                tally.hits += 1;
                chunks.commit(key, slot, epoch);
            }
            Loaded::Miss(_) => tally.misses += 1,
            Loaded::Failed { .. } => tally.failed += 1,
        }
    }
    assert!(answered.into_iter().all(|answered| answered), "a key without an answer");
    assert!(now() <= begun + LOAD + BEYOND, "a load was late: {:?}", now() - begun);
    tally
}

fn prompt(number: u64, len: u64) -> Vec<ChunkKey> {
    (0..len).map(|chunk| key(number, chunk)).collect()
}

fn faults(rng: &mut Rng) -> Faults {
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
    }
}

/// Runs one schedule: some hosts, some prompts, everything that may go wrong. Returns what
/// happened once every lease has ended.
async fn schedule(seed: u64) -> Tally {
    let mut rng = Rng(seed);
    let hosts = 2 + rng.below(4) as usize;
    let slots = 16 + rng.below(64);
    let faults = faults(&mut rng);
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
    let local = tokio::task::LocalSet::new();
    local
        .run_until(async {
            for _ in 0..60 + rng.below(100) {
                let host = rng.below(hosts as u64) as usize;
                let other = (host + 1 + rng.below(hosts as u64 - 1) as usize) % hosts;
                let chunks = net.chunks(host);
                let keys = prompt(rng.below(4), 1 + rng.below(10));
                let noticed = rng.delay(Duration::from_secs(2));
                match rng.below(40) {
                    0 => {
                        net.kill(host, noticed);
                        tokio::time::sleep(rng.delay(Duration::from_secs(1))).await;
                        start(&net, host);
                        for peer in (0..hosts).filter(|&peer| peer != host) {
                            let net = net.clone();
                            tokio::task::spawn_local(async move { net.connect(host, peer).await });
                        }
                    }
                    1 | 2 => net.freeze(host, rng.delay(Duration::from_secs(4))),
                    3 | 4 => net.cut(host, other, true, noticed),
                    5 | 6 => {
                        net.cut(host, other, false, noticed);
                        let net = net.clone();
                        tokio::task::spawn_local(async move { net.connect(host, other).await });
                    }
                    7 => {
                        let clear = chunks.clear();
                        let node = net.node(host);
                        tokio::task::spawn_local(async move {
                            node.pass_on(&[clear], now() + LOCATE).await
                        });
                    }
                    8..16 => keys.iter().for_each(|&key| chunks.store(key, rng.next())),
                    16..18 => {
                        keys.iter().for_each(|&key| chunks.begin_store(key));
                        let pick = rng.next();
                        let after = rng.delay(Duration::from_millis(40));
                        tokio::task::spawn_local(async move {
                            tokio::time::sleep(after).await;
                            keys.iter().for_each(|&key| chunks.store(key, pick));
                        });
                    }
                    18 => keys.iter().for_each(|&key| chunks.store_on_disk(key)),
                    19..24 => {
                        for _ in 0..rng.below(20) {
                            chunks.evict(rng.next());
                        }
                    }
                    _ => {
                        let (net, sum) = (net.clone(), Rc::clone(&sum));
                        let leaves = rng.once_in(6).then(|| rng.delay(LOAD));
                        tokio::task::spawn_local(async move {
                            let fetched = fetch(&net, host, &keys);
                            let stays = leaves.unwrap_or(Duration::MAX);
                            if let Ok(tally) = tokio::time::timeout(stays, fetched).await {
                                sum.borrow_mut().add(tally);
                            }
                        });
                    }
                }
                tokio::time::sleep(rng.delay(Duration::from_millis(30))).await;
            }
            // All leases end by themselves, whatever became of their readers.
            tokio::time::sleep(Duration::from_secs(60)).await;
        })
        .await;
    drop(local);
    for host in 0..hosts {
        let (node, chunks) = (net.node(host), net.chunks(host));
        assert_eq!(node.leased(), (0, 0), "a lease was left");
        assert_eq!(net.grants(host), 0, "a grant was left");
        let slots = chunks.pool.usage().slots;
        assert_eq!(slots, chunks.len() as u64, "a slot was left");
        let counters = node.counters();
        let mut sum = sum.borrow_mut();
        sum.lapsed += counters.lapsed;
        sum.corrupt += counters.corrupt;
        sum.busy += counters.busy;
    }
    let sum = *sum.borrow();
    sum
}

#[test]
fn no_schedule_gives_a_wrong_byte_or_leaves_a_lease() {
    let seeds = std::env::var("LMC_P2P_SEEDS").ok();
    let seeds = seeds.and_then(|seeds| seeds.parse().ok()).unwrap_or(300);
    let mut sum = Tally::default();
    for seed in 0..seeds {
        println!("seed {seed}");
        sum.add(run(schedule(seed)));
    }
    println!("{sum:?}");
    assert!(sum.hits > 0 && sum.misses > 0 && sum.failed > 0 && sum.pending > 0, "{sum:?}");
    assert!(sum.lapsed > 0 && sum.corrupt > 0 && sum.busy > 0, "{sum:?}");
}
