//! Daemons that find each other through directories, under seeded schedules.

use std::cell::RefCell;
use std::collections::{BTreeSet, HashSet};
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use lmc_backend::{Host, Located, now};
use lmc_key::{ChunkKey, ClearsId};
use lmc_testkit::rounds;

use super::chunks::one_clear_each;
use super::clears::count_pages;
use super::net::{Faults, Net, name};
use super::schedules::{LOCATE, Tally, faults, fetch, look_up, prompt};
use super::{Rng, delay, key, run};
use crate::directory::{Announce, Announced, Find, Fingerprint, MAX_ANNOUNCED, TableLimits};
use crate::message::{Hello, OLDEST_VERSION, Refusal, Reply, Request, Stamped, VERSION};

/// Time after which members and directories know everything of each other.
const SETTLED: Duration = Duration::from_secs(40);

/// Starts a member of directories, which connects to those that it is not connected to.
fn start_member(net: &Net, host: usize, slots: u64, directories: &[usize], named: &[usize]) {
    net.start(host, slots, |config| config.uses_directories = true);
    let (net, directories) = (net.clone(), directories.to_vec());
    let named: HashSet<_> = named.iter().map(|&host| name(host)).collect();
    let node = net.node(host);
    let me = net.session(host);
    tokio::spawn(async move {
        while net.session(host) == me {
            for &directory in &directories {
                let session = net.session(directory);
                let connected = node.sessions.peers.lock().of_session(&session).is_some();
                if !connected {
                    net.connect(host, directory).await;
                }
            }
            let known = |host: &&usize| node.sessions.peers.lock().get(&name(**host)).is_some();
            let connected = directories.iter().filter(known).map(|&host| name(host));
            node.set_contacts(named.clone(), connected.collect());
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    });
}

/// Leaves clears out that would go on to the end of a schedule.
fn settling(faults: Faults) -> Faults {
    Faults {
        clears: 0,
        ..faults
    }
}

/// Returns a network of directories and members. Each member has met all directories.
async fn started(seed: u64, faults: Faults, directories: usize, members: usize) -> Net {
    let net = Net::new(seed, faults);
    for directory in 0..directories {
        net.start_directory(directory, TableLimits::default());
    }
    let all: Vec<usize> = (0..directories).collect();
    for member in directories..directories + members {
        start_member(&net, member, 64, &all, &[]);
    }
    // Until the directories have settled.
    tokio::time::sleep(Duration::from_secs(12)).await;
    net
}

/// Time until what changed is announced.
async fn announced() {
    tokio::time::sleep(Duration::from_millis(300)).await;
}

fn store(net: &Net, host: usize, keys: &[ChunkKey]) {
    keys.iter().for_each(|&key| net.chunks(host).store(key, 0));
}

async fn truth(net: &Net, host: usize) -> BTreeSet<Fingerprint> {
    let (keys, _) = net.chunks(host).list(0, usize::MAX).await;
    keys.iter().map(Fingerprint::of).collect()
}

#[test]
fn what_one_has_is_found_by_another_that_does_not_name_it() {
    run(async {
        let net = started(1, Faults::none(), 1, 3).await;
        let keys = prompt(0, 8);
        store(&net, 1, &keys);
        announced().await;
        assert_eq!(fetch(&net, 2, &keys).await.hits, 8);
        // Now two have it, and the third asks no more of them than it needs.
        announced().await;
        assert_eq!(fetch(&net, 3, &keys).await.hits, 8);
        let located = look_up(&net, 3, &prompt(1, 1)).await;
        assert!(matches!(located[0], Ok(Located::Absent)), "{located:?}");
    });
}

/// A directory answers for a daemon that has evicted everything; the daemon's answer to the first
/// `locate` that finds nothing corrects it, even where no event said so.
#[test]
fn a_daemon_that_returns_empty_attracts_no_load() {
    run(async {
        let net = started(3, Faults::none(), 1, 2).await;
        let keys = prompt(0, 4);
        store(&net, 1, &keys);
        announced().await;
        let directory = net.directory(0).expect("a directory");
        assert_eq!(directory.status().entries, 4);
        while net.chunks(1).evict(0).is_some() {}
        std::mem::take(&mut *net.node(1).directories.changed.keys.lock());
        announced().await;
        assert_eq!(directory.status().entries, 4, "no event said so");
        assert_eq!(fetch(&net, 2, &keys[..1]).await.hits, 0);
        announced().await;
        assert_eq!(directory.status().entries, 3);
        // What a predecessor of the same name had is not answered either.
        net.kill(1, Duration::ZERO);
        tokio::time::sleep(Duration::from_millis(1)).await;
        start_member(&net, 1, 64, &[0], &[]);
        tokio::time::sleep(Duration::from_secs(2)).await;
        let find = Find {
            keys: keys.iter().map(Fingerprint::of).collect(),
        };
        assert!(directory.find(&net.session(2), &find).candidates.is_empty());
        tokio::time::sleep(SETTLED).await;
        let status = directory.status();
        assert_eq!((status.members, status.entries), (2, 0));
    });
}

#[test]
fn without_a_directory_chunks_are_unknown_and_static_peers_are_asked() {
    run(async {
        let net = started(5, Faults::none(), 2, 2).await;
        let keys = prompt(0, 4);
        store(&net, 2, &keys);
        announced().await;
        // The first does not answer: from then on the second is asked.
        net.freeze(0, Duration::from_secs(600));
        assert_eq!(fetch(&net, 3, &keys).await.hits, 4);
        net.kill(1, Duration::ZERO);
        net.kill(0, Duration::ZERO);
        tokio::time::sleep(Duration::from_secs(1)).await;
        let other = prompt(1, 1);
        let located = look_up(&net, 3, &other).await;
        assert!(located[0].is_err(), "{located:?}");
        start_member(&net, 3, 64, &[0, 1], &[2]);
        assert!(net.connect(3, 2).await);
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert_eq!(fetch(&net, 3, &keys).await.hits, 4);
        // The directory comes back with nothing, and members announce everything.
        net.start_directory(0, TableLimits::default());
        tokio::time::sleep(SETTLED).await;
        let directory = net.directory(0).expect("a directory");
        assert_eq!(directory.status().entries, 8);
    });
}

#[test]
fn a_clear_reaches_daemons_that_never_met_through_the_directory() {
    run(async {
        let net = started(7, Faults::none(), 1, 2).await;
        let keys = prompt(0, 4);
        store(&net, 1, &keys);
        store(&net, 2, &keys);
        let noticed = Duration::from_millis(10);
        net.cut(0, 2, true, noticed);
        tokio::time::sleep(noticed * 2).await;
        net.chunks(1).clear();
        net.node(1).exchange_clears(now() + LOCATE).await;
        assert_eq!((net.chunks(1).len(), net.chunks(2).len()), (0, 4));
        // Meanwhile the directory starts again, and has to learn of the clear from the first.
        net.kill(0, noticed);
        tokio::time::sleep(noticed * 2).await;
        net.start_directory(0, TableLimits::default());
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert_eq!(net.chunks(2).len(), 4, "it is cut off");
        net.cut(0, 2, false, noticed);
        tokio::time::sleep(Duration::from_secs(8)).await;
        assert_eq!(net.chunks(2).len(), 0);
        assert_eq!(net.chunks(1).carried_out(), net.chunks(2).carried_out());
    });
}

/// Chunks that were announced before a clear have other names, so that no digest is compared here.
#[test]
fn a_member_that_has_cleared_is_not_sent_to_members_that_have_not() {
    run(async {
        let net = started(8, Faults::none(), 1, 2).await;
        let keys = prompt(0, 4);
        store(&net, 1, &keys);
        announced().await;
        let directory = net.directory(0).expect("a directory");
        let find = |net: &Net| {
            let names = keys.iter().map(|key| net.chunks(2).name(key));
            let keys = names.map(|name| Fingerprint::of(&name)).collect();
            directory.find(&net.session(2), &Find { keys }).candidates
        };
        assert_eq!(find(&net).len(), 1);
        net.chunks(2).clear();
        assert_eq!(find(&net), []);
        // The directory hears of the clear with the first question, and the first member from it.
        let pages = count_pages(&net, 0);
        assert_eq!(fetch(&net, 2, &keys).await.hits, 0);
        tokio::time::sleep(LOCATE).await;
        assert!(pages.load(Ordering::Relaxed) > 0);
        tokio::time::sleep(Duration::from_secs(6)).await;
        assert_eq!(net.chunks(1).len(), 0);
        store(&net, 1, &keys);
        announced().await;
        assert_eq!(find(&net).len(), 1);
        assert_eq!(fetch(&net, 2, &keys).await.hits, 4);
    });
}

/// A directory answers with its pages, and asks for none.
#[test]
fn a_map_of_more_than_one_page_passes_through_a_directory() {
    run(async {
        let net = Net::new(10, Faults::none());
        let clears = one_clear_each(0..5000);
        net.start_directory(0, TableLimits::default());
        net.note_clears(1, clears.clone());
        (1..3).for_each(|member| start_member(&net, member, 8, &[0], &[]));
        tokio::time::sleep(Duration::from_secs(12)).await;
        assert_eq!(*net.chunks(2).carried_out(), clears);
    });
}

#[test]
fn idle_members_say_little_and_busy_ones_are_bounded() {
    run(async {
        let net = started(9, Faults::none(), 1, 4).await;
        let directory = net.directory(0).expect("a directory");
        let messages = || directory.status().counters.announced;
        let before = messages();
        tokio::time::sleep(Duration::from_secs(100)).await;
        let idle = messages() - before;
        assert!((80..=140).contains(&idle), "{idle}: each every 4 s");
        let before = messages();
        for round in 0..1000 {
            store(&net, 1, &prompt(round, 2));
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let busy = messages() - before;
        assert!((50..=150).contains(&busy), "{busy} in 10 s");
    });
}

/// One with the key that means harm: every answer is a refusal or costs itself, and others go on.
#[test]
fn a_hostile_member_is_bounded_and_counted() {
    run(async {
        let net = started(11, Faults::none(), 1, 2).await;
        let keys = prompt(0, 4);
        store(&net, 1, &keys);
        announced().await;
        let directory = net.directory(0).expect("a directory");
        let mut hostile = net.session(2);
        (hostile.peer, hostile.incarnation) = ("hostile".parse().expect("a name"), 99);
        let announced =
            |announce: &Announce| Request::Announce(Stamped::new(ClearsId::NONE, announce.clone()));
        let applied = Stamped::new(ClearsId::NONE, Announced::Applied);
        let send = |request: &Request| {
            let bytes = request.to_bytes().expect("it fits");
            let reply = directory.serve(&hostile, &bytes);
            Reply::from_bytes(&reply).expect("a reply")
        };
        let first = Fingerprint::of(&keys[0]);
        let mut announce = Announce {
            generation: 1,
            sequence: 1,
            added: [first].into_iter().collect(),
            ..Announce::default()
        };
        assert_eq!(
            send(&announced(&announce)),
            Reply::Refused(Refusal::NoHello)
        );
        // It claims the first chunk, at the address of another.
        let hello = Hello {
            oldest: OLDEST_VERSION,
            newest: VERSION,
            features: 0,
            name: "hostile".into(),
            address: "host-1:1".into(),
            chunk_size: 16,
            algorithm: "xxh3".into(),
            clears: ClearsId::NONE,
            spaces: Vec::new(),
            is_draining: false,
        };
        assert!(matches!(send(&Request::Hello(hello)), Reply::Hello(_)));
        assert_eq!(send(&announced(&announce)), Reply::Announced(applied));
        // It floods: every message another generation, and more fingerprints than fit.
        let full = rounds(150, 5000) as u64;
        let mut refused = 0;
        for generation in 2..5000 {
            (announce.generation, announce.sequence) = (generation, generation % 2 + 1);
            let most = if generation < full { MAX_ANNOUNCED } else { 8 };
            let keys = (0..most as u64).map(|n| key(generation, n));
            announce.added = keys.map(|key| Fingerprint::of(&key)).collect();
            refused += u64::from(matches!(
                send(&announced(&announce)),
                Reply::Refused(Refusal::TooMany)
            ));
        }
        assert!(refused > 2000, "{refused}");
        let status = directory.status();
        assert!(status.counters.refused >= refused && status.counters.restarted > 0);
        assert_eq!(status.members, 3);
        // Others find what is there.
        assert_eq!(fetch(&net, 2, &keys).await.hits, 4);
        tokio::time::sleep(SETTLED).await;
        let status = directory.status();
        assert_eq!((status.members, status.entries), (2, 8), "it went silent");
    });
}

/// A directory that names the wrong members costs misses: each of its answers is checked by a `locate`.
#[test]
fn a_wrong_directory_costs_a_miss_and_nothing_else() {
    run(async {
        let net = started(13, Faults::none(), 2, 3).await;
        let keys = prompt(0, 4);
        store(&net, 2, &keys);
        announced().await;
        // The first directory believes that the third daemon has it all.
        let directory = net.directory(0).expect("a directory");
        let mut added = Vec::new();
        for generation in 50..52 {
            let wrong = Announce {
                generation,
                sequence: 1,
                added: keys.iter().map(Fingerprint::of).collect(),
                ..Announce::default()
            };
            added.extend(directory.announce(&net.session(3), &wrong));
        }
        assert_eq!(added[0], Announced::Applied);
        let read = fetch(&net, 4, &keys).await;
        assert_eq!(read.hits, 4, "the one that has it is named, too: {read:?}");
        // The third finds out by its next announcement, and announces everything again.
        tokio::time::sleep(SETTLED).await;
        for directory in 0..2 {
            let host = net.directory(directory).expect("a directory");
            assert_eq!(host.status().entries, 8);
        }
    });
}

#[test]
fn a_full_directory_refuses_with_its_limit_and_serves_what_it_has() {
    run(async {
        let net = Net::new(15, Faults::none());
        let mut limits = TableLimits::for_entries(20);
        limits.member_entries = 12;
        net.start_directory(0, limits);
        (1..4).for_each(|member| start_member(&net, member, 64, &[0], &[]));
        tokio::time::sleep(Duration::from_secs(12)).await;
        store(&net, 1, &prompt(0, 16));
        announced().await;
        store(&net, 2, &prompt(1, 16));
        announced().await;
        let directory = net.directory(0).expect("a directory");
        let status = directory.status();
        assert_eq!((status.entries, status.limit), (20, 20));
        assert!(status.counters.full >= 2, "{status:?}");
        assert!(fetch(&net, 3, &prompt(0, 16)).await.hits > 0);
        // The release of the last lease.
        announced().await;
        // Once there is space everything is announced again.
        net.kill(2, Duration::ZERO);
        while net.chunks(1).evict(0).is_some() {}
        while net.chunks(3).evict(0).is_some() {}
        store(&net, 1, &prompt(2, 8));
        tokio::time::sleep(Duration::from_secs(100)).await;
        assert_eq!(directory.status().entries, 8);
    });
}

/// Runs one schedule: members and directories come and go, messages are lost, doubled and late.
/// Afterwards every directory knows what there is, and nothing else.
async fn schedule(seed: u64) -> Tally {
    let mut rng = Rng::new(seed);
    let (directories, members) = (1 + rng.below(2) as usize, 2 + rng.below(3) as usize);
    let mut faults = settling(faults(&mut rng));
    faults.delay.0 = faults.delay.0.min(Duration::from_millis(3));
    let net = started(seed ^ 0xd1, faults, directories, members).await;
    let all: Vec<usize> = (0..directories).collect();
    let hosts = directories + members;
    let sum = Rc::new(RefCell::new(Tally::default()));
    let local = tokio::task::LocalSet::new();
    local
        .run_until(async {
            for _ in 0..60 + rng.below(60) {
                let host = directories + rng.below(members as u64) as usize;
                let other = rng.below(hosts as u64) as usize;
                let keys = prompt(rng.below(4), 1 + rng.below(10));
                let noticed = delay(&mut rng, Duration::from_secs(2));
                match rng.below(30) {
                    0 => {
                        net.kill(host, noticed);
                        tokio::time::sleep(delay(&mut rng, Duration::from_secs(1))).await;
                        start_member(&net, host, 64, &all, &[]);
                    }
                    1 => {
                        let directory = rng.below(directories as u64) as usize;
                        net.kill(directory, noticed);
                        tokio::time::sleep(delay(&mut rng, Duration::from_secs(1))).await;
                        net.start_directory(directory, TableLimits::default());
                    }
                    2 => net.freeze(other, delay(&mut rng, Duration::from_secs(4))),
                    3 | 4 if other != host => net.cut(host, other, true, noticed),
                    5..8 if other != host => net.cut(host, other, false, noticed),
                    8 => {
                        net.chunks(host).clear();
                    }
                    9..16 => store(&net, host, &keys),
                    16 => keys
                        .iter()
                        .for_each(|&key| net.chunks(host).store_on_disk(key)),
                    17..20 => {
                        for _ in 0..rng.below(20) {
                            net.chunks(host).evict(rng.next_u64());
                        }
                    }
                    _ => {
                        let (net, sum) = (net.clone(), Rc::clone(&sum));
                        tokio::task::spawn_local(async move {
                            let tally = fetch(&net, host, &keys).await;
                            sum.borrow_mut().add(tally);
                        });
                    }
                }
                tokio::time::sleep(delay(&mut rng, Duration::from_millis(800))).await;
            }
            for a in 0..hosts {
                for b in 0..a {
                    net.cut(a, b, false, Duration::ZERO);
                }
            }
            net.0.lock().faults = Faults::none();
            tokio::time::sleep(SETTLED).await;
        })
        .await;
    assert!(!net.0.lock().panicked, "a request made its daemon panic");
    let clears: BTreeSet<_> = (directories..hosts)
        .map(|host| net.chunks(host).carried_out().id())
        .collect();
    assert_eq!(clears.len(), 1, "all have carried out all clears");
    for directory in 0..directories {
        let found = net.directory(directory).expect("a directory");
        let mut entries = 0;
        for host in directories..hosts {
            let truth = truth(&net, host).await;
            entries += truth.len();
            assert_eq!(found.entries_of(&net.session(host)), truth);
        }
        let status = found.status();
        assert_eq!((status.members, status.entries), (members, entries));
    }
    *sum.borrow()
}

#[test]
fn whatever_happens_directories_come_to_know_what_there_is() {
    let seeds = std::env::var("LMC_P2P_SEEDS").ok();
    let seeds = seeds.and_then(|seeds| seeds.parse().ok());
    let seeds = seeds.unwrap_or(rounds(12, 200) as u64);
    let mut sum = Tally::default();
    for seed in 0..seeds {
        println!("seed {seed}");
        sum.add(run(schedule(seed)));
    }
    println!("{sum:?}");
    assert!(sum.hits > 0 && sum.failed + sum.misses > 0, "{sum:?}");
}
