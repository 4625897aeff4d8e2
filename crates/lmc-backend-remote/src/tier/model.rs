//! A model of several daemons over one store, whose polls, clears, stores and loads come in any order,
//! with faults of the object of clears in between.

use std::sync::atomic::{AtomicU64, Ordering};

use lmc_backend::conformance::{Rng, test_key};
use lmc_backend::{NoEngine, StartId, in_order};
use lmc_memory::{ArenaConfig, Pool, PoolConfig};
use lmc_testkit::{rounds, soon};

use super::*;
use crate::clock::BootClock;
use crate::conformance::{CallFault, Calls, FaultyStore, MemoryStore, StoreFaults};
use crate::format::{ClearsRecord, Name};

const INTERVAL: Duration = Duration::from_secs(1);
const KEYS: u64 = 3;
const LEN: u64 = 64;

/// Harm that may come to the object of clears.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Harm {
    /// Daemons cannot read or write it for a while, and it stays as it is.
    Denied,
    /// Loss and damage.
    Lost,
    /// Loss, damage, and the content of before.
    RolledBack,
}

struct Daemon {
    tier: RemoteTier,
    view: Arc<FaultyStore>,
    engine: Clears,
    start: StartId,
    began: Duration,
    /// Time of the last reading of the object.
    read_at: Option<Duration>,
    is_denied: bool,
}

impl Daemon {
    /// Notes that the daemon reads the object now, unless that is denied.
    fn reads(&mut self, now: Duration) {
        if !self.is_denied {
            self.read_at = Some(now);
        }
    }
}

/// A chunk that was stored, by its number, which its bytes repeat.
struct Chunk {
    at: Duration,
    clears: Clears,
}

struct Model {
    rng: Rng,
    harm: Harm,
    store: Arc<MemoryStore>,
    clock: Arc<AtomicU64>,
    runtime: tokio::runtime::Runtime,
    pool: Pool,
    daemons: Vec<Daemon>,
    chunks: Vec<Chunk>,
    /// Clears that the store has confirmed, each with the time of that.
    confirmed: Vec<(Duration, Clears)>,
    /// Contents of the object.
    before: Vec<Vec<u8>>,
    starts: u64,
    hits: usize,
}

impl Model {
    fn new(seed: u64, harm: Harm) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        let arena = ArenaConfig::anonymous(1 << 20).build();
        let arena = Arc::new(arena.expect("a test machine has the memory"));
        let mut this = Self {
            rng: Rng::new(seed),
            harm,
            store: Arc::default(),
            clock: Arc::default(),
            runtime: runtime.expect("a runtime"),
            pool: Pool::new(arena, PoolConfig::default()).expect("the default alignment"),
            daemons: Vec::new(),
            chunks: Vec::new(),
            confirmed: Vec::new(),
            before: Vec::new(),
            starts: 0,
            hits: 0,
        };
        for _ in 0..3 {
            let daemon = this.start(Clears::default());
            this.daemons.push(daemon);
        }
        this
    }

    fn now(&self) -> Duration {
        Duration::from_millis(self.clock.load(Ordering::SeqCst))
    }

    fn start(&mut self, engine: Clears) -> Daemon {
        self.starts += 1;
        let mut start = [0; 16];
        start[..8].copy_from_slice(&self.starts.to_le_bytes());
        let view = FaultyStore::new(self.store.clone(), StoreFaults::default(), 0);
        let view = Arc::new(view);
        let clock = Arc::clone(&self.clock);
        let config = RemoteConfig {
            absent_ttl: Duration::ZERO,
            clears_interval: INTERVAL,
            boot_clock: BootClock::driven(move || {
                Duration::from_millis(clock.load(Ordering::SeqCst))
            }),
            ..RemoteConfig::default()
        };
        let host = Arc::new(NoEngine::new(engine.clone()));
        let runtime = self.runtime.handle().clone();
        Daemon {
            tier: RemoteTier::new(config, view.clone(), host, runtime),
            view,
            engine,
            start: StartId::new(start),
            began: self.now(),
            read_at: None,
            is_denied: false,
        }
    }

    fn poll(&mut self, n: usize) {
        let now = self.now();
        self.daemons[n].reads(now);
        let daemon = &self.daemons[n];
        let _ = self.runtime.block_on(daemon.tier.clears.sync(soon()));
        self.before.extend(self.store.bytes(Name::Clears));
    }

    /// Carries out what others have cleared, as an engine does.
    fn follow(&mut self, n: usize) {
        let daemon = &mut self.daemons[n];
        let all = daemon.tier.clears();
        if daemon.engine.join(&all).expect("few clears") {
            self.pass_on(n);
        }
    }

    fn pass_on(&mut self, n: usize) {
        let now = self.now();
        self.daemons[n].reads(now);
        let daemon = &self.daemons[n];
        let clears = Arc::new(daemon.engine.clone());
        let cleared = self.runtime.block_on(daemon.tier.clear(clears, soon()));
        if cleared.is_ok_and(|cleared| cleared.is_durable) {
            let object = self.object().expect("the object that was confirmed");
            assert!(
                object.clears.contains(&daemon.engine),
                "a false confirmation"
            );
            self.confirmed.push((now, daemon.engine.clone()));
        }
    }

    fn object(&self) -> Option<ClearsRecord> {
        ClearsRecord::decode(&self.store.bytes(Name::Clears)?).ok()
    }

    fn clear(&mut self, n: usize) {
        let daemon = &mut self.daemons[n];
        daemon.engine.count(daemon.start).expect("few clears");
        self.pass_on(n);
    }

    fn store(&mut self, n: usize) {
        let key = test_key(self.rng.below(KEYS));
        let number = self.chunks.len() as u64;
        let mut slot = self.pool.reserve(LEN).expect("the slots came back");
        slot.bytes_mut()
            .as_chunks_mut()
            .0
            .fill(number.to_le_bytes());
        let item = StoreItem::new(key, slot.written().seal());
        let daemon = &self.daemons[n];
        self.chunks.push(Chunk {
            at: self.now(),
            clears: daemon.engine.clone(),
        });
        if daemon.tier.clears.check().is_err() {
            return;
        }
        let stored = daemon.tier.store(vec![item], soon());
        let stored = self.runtime.block_on(in_order(stored, 1));
        assert!(matches!(stored[..], [Some(Ok(_))]), "{stored:?}");
    }

    fn load(&mut self, n: usize) {
        let daemon = &self.daemons[n];
        if daemon.tier.clears.check().is_err() {
            return;
        }
        let slot = self.pool.reserve(LEN).expect("the slots came back");
        let item = LoadItem::new(test_key(self.rng.below(KEYS)), slot);
        let loaded = daemon.tier.load(vec![item], soon());
        let loaded = self.runtime.block_on(in_order(loaded, 1)).pop().flatten();
        let Some(slot) = loaded.expect("an answer").hit() else {
            return;
        };
        self.hits += 1;
        let (number, _) = slot.bytes().split_first_chunk().expect("8 bytes");
        let chunk = &self.chunks[u64::from_le_bytes(*number) as usize];
        assert_eq!(
            chunk.clears, daemon.engine,
            "a chunk from before or after a clear that this engine has not, or has, carried out"
        );
        if self.harm == Harm::RolledBack {
            return;
        }
        // Also of clears that have not reached this daemon.
        for (at, clears) in &self.confirmed {
            let must_know = daemon.began > *at || self.now() > *at + 3 * INTERVAL;
            let is_cleared = chunk.at < *at && !chunk.clears.contains(clears);
            assert!(
                !(must_know && is_cleared),
                "stored at {:?} and found at {:?}, cleared at {at:?}",
                chunk.at,
                self.now()
            );
        }
    }

    /// Restarts a daemon, with its state file or without.
    fn restart(&mut self, n: usize) {
        let keeps_state = self.rng.chance(700);
        let engine = match keeps_state {
            true => self.daemons[n].engine.clone(),
            false => Clears::default(),
        };
        self.daemons[n] = self.start(engine);
    }

    fn deny(&mut self, n: usize, is_denied: bool) {
        let fault = is_denied.then_some(CallFault::Denied);
        self.daemons[n].view.set_fault(Calls::Clears, fault);
        self.daemons[n].is_denied = is_denied;
    }

    /// Harms the object. It is lost only while all daemons that may put it back know what it says: one
    /// that read it before the last clear would put that back, also where it uses the store no more
    /// because its engine is behind.
    fn harm(&mut self) {
        let (now, object) = (self.now(), self.object());
        let knows = |daemon: &Daemon| {
            let puts_back = daemon.read_at.is_some_and(|at| now - at <= 3 * INTERVAL);
            let all = daemon.tier.clears();
            !puts_back || object.as_ref().is_none_or(|o| all.contains(&o.clears))
        };
        if self.harm == Harm::Denied || !self.daemons.iter().all(knows) {
            return;
        }
        let bytes = match self.rng.below(3) {
            0 => None,
            1 => Some(b"LMCCLEAR\x02".to_vec()),
            _ if self.harm == Harm::RolledBack && !self.before.is_empty() => {
                let at = self.rng.below(self.before.len() as u64) as usize;
                Some(self.before[at].clone())
            }
            _ => return,
        };
        self.store.set_bytes(Name::Clears, bytes);
    }

    fn step(&mut self) {
        let n = self.rng.below(self.daemons.len() as u64) as usize;
        match self.rng.below(100) {
            0..30 => _ = self.clock.fetch_add(self.rng.below(800), Ordering::SeqCst),
            30..46 => self.poll(n),
            46..52 => self.follow(n),
            52..70 => self.store(n),
            70..86 => self.load(n),
            86..91 => self.clear(n),
            91..94 => self.restart(n),
            94..97 => self.deny(n, !self.daemons[n].is_denied),
            _ => self.harm(),
        }
    }

    /// Lets all daemons meet: they agree on all clears that any of them knows, and on their chunks.
    fn settle(&mut self) {
        for round in 0..6 {
            for n in 0..self.daemons.len() {
                self.deny(n, false);
                self.poll(n);
                self.follow(n);
            }
            if round < 4 {
                self.clock.fetch_add(900, Ordering::SeqCst);
            }
        }
        for pair in self.daemons.windows(2) {
            assert_eq!(pair[0].engine, pair[1].engine);
            let folders = pair.iter().map(|daemon| daemon.tier.clears.folder());
            let folders: Vec<_> = folders.collect();
            assert!(
                folders[0].is_ok() && folders[0] == folders[1],
                "{folders:?}"
            );
        }
        let object = self.object().map(|object| object.clears);
        assert_eq!(object.as_ref(), Some(&self.daemons[0].engine));
        let before = self.hits;
        (0..40).for_each(|_| self.store(0));
        (0..40).for_each(|_| self.load(1));
        assert_eq!(self.hits, before + 40);
    }
}

#[test]
fn what_was_cleared_is_never_found() {
    let mut hits = 0;
    for harm in [Harm::Denied, Harm::Lost, Harm::RolledBack] {
        for seed in 0..rounds(100, 1000) as u64 {
            let run = std::panic::AssertUnwindSafe(|| {
                let mut model = Model::new(seed, harm);
                (0..150).for_each(|_| model.step());
                let hits = model.hits;
                model.settle();
                hits
            });
            match std::panic::catch_unwind(run) {
                Ok(found) => hits += found,
                Err(panic) => {
                    eprintln!("{harm:?}, seed {seed}");
                    std::panic::resume_unwind(panic);
                }
            }
        }
    }
    assert!(hits > 500, "{hits} hits");
}
