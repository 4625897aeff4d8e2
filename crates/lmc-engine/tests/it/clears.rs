//! Clears over several daemons, drives and a shared store, in any order, with restarts and restored
//! copies: what is found was computed after every clear that has reached the daemon.

use std::sync::Arc;
use std::time::Instant;

use lmc_backend::conformance::{Rng, test_hash};
use lmc_backend::{Backend, Clears, MemoryBackend};
use lmc_engine::{
    CacheEngine, ClearLog, ClearsId, EngineConfig, EngineContext, EngineHost, InUse, LookupRequest,
    OwnerId, Rank, StoreRequest, StoreStart, TenantId,
};
use lmc_key::{ChunkKey, SpaceId};
use lmc_memory::ArenaConfig;
use lmc_testkit::{rounds, soon};
use tokio::runtime::{Builder, Handle, Runtime};

const CHUNK: u64 = 64;
const KEYS: u64 = 2;
const HOSTS: u64 = 3;
const SPACE: SpaceId = SpaceId::new([7; 16]);

/// A request of an engine: it computes with the weights of its beginning.
#[derive(Clone)]
struct Request {
    host: usize,
    after: ClearsId,
    /// Number of its chunks' bytes, by which they are known.
    number: usize,
}

struct Host {
    engine: CacheEngine,
    drive: Arc<MemoryBackend>,
    /// An older copy of the drive.
    copy: MemoryBackend,
    /// Clears that were acknowledged here, or have reached this host.
    known: Clears,
}

struct Fleet {
    runtime: Runtime,
    rng: Rng,
    store: Arc<MemoryBackend>,
    hosts: Vec<Host>,
    /// Clears that had reached the host of each request when it began.
    began: Vec<Clears>,
    requests: Vec<Request>,
    hits: usize,
}

fn start(runtime: &Handle, log: &ClearLog, tiers: [Arc<dyn Backend>; 2]) -> CacheEngine {
    let mut config = EngineConfig::default();
    config.align = CHUNK as usize;
    config.shards = Some(1);
    let arena = ArenaConfig::anonymous(1 << 16).build().expect("memory");
    let host = EngineHost::new(log.clone());
    let mut context = EngineContext::new(Arc::new(arena), host).with_tiers(tiers);
    context.runtime = Some(runtime.clone());
    config.start(context).expect("an engine")
}

impl Fleet {
    fn new(seed: u64) -> Self {
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .enable_time()
            .build();
        let runtime = runtime.expect("a runtime");
        let store = Arc::new(MemoryBackend::shared());
        let host = |_| {
            let drive = Arc::new(MemoryBackend::default());
            let tiers = [Arc::clone(&drive) as _, Arc::clone(&store) as _];
            Host {
                engine: start(runtime.handle(), &ClearLog::default(), tiers),
                copy: MemoryBackend::clone(&drive),
                drive,
                known: Clears::default(),
            }
        };
        Self {
            rng: Rng::new(seed),
            hosts: (0..HOSTS).map(host).collect(),
            store,
            runtime,
            began: Vec::new(),
            requests: Vec::new(),
            hits: 0,
        }
    }

    fn some_host(&mut self) -> usize {
        self.rng.below(HOSTS) as usize
    }

    /// Takes in what has reached a host by itself, through the store.
    fn see(&mut self, host: usize) {
        let host = &mut self.hosts[host];
        let reached = host.engine.clear_log().clears();
        host.known.join(&reached).expect("few");
    }

    fn begin(&mut self) {
        let host = self.some_host();
        let after = self.hosts[host].engine.clears_id();
        self.see(host);
        self.began.push(self.hosts[host].known.clone());
        let number = self.began.len() - 1;
        self.requests.push(Request {
            host,
            after,
            number,
        });
    }

    fn store(&mut self) {
        if self.requests.is_empty() {
            return self.begin();
        }
        // Most of them are of now, and some of long ago.
        let last = self.requests.len() as u64;
        let oldest = if self.rng.chance(100) {
            0
        } else {
            last.saturating_sub(6)
        };
        let which = (oldest + self.rng.below(last - oldest)) as usize;
        let Request {
            host,
            after,
            number,
        } = self.requests[which];
        let key = ChunkKey {
            space: SPACE,
            kv_rank: 0,
            group: 0,
            hash: test_hash(self.rng.below(KEYS)),
        };
        let request = StoreRequest {
            key,
            parent: None,
            tenant: TenantId(0),
            len: CHUNK,
        };
        let engine = self.hosts[host].engine.clone();
        let started = engine.store(OwnerId(1), after, &[request]).pop();
        let Some(StoreStart::Reserved(mut ticket)) = started else {
            return;
        };
        ticket.bytes_mut()[..8].copy_from_slice(&(number as u64).to_le_bytes());
        if self.rng.chance(200) {
            // It is overtaken between prepare and commit.
            self.clear();
        }
        engine.commit(vec![ticket]);
    }

    fn look_up(&mut self) {
        let at = self.some_host();
        self.see(at);
        let host = &self.hosts[at];
        let hash = test_hash(self.rng.below(KEYS));
        let rank = Rank {
            space: SPACE,
            kv_rank: 0,
            chunk_bytes: Some(CHUNK),
        };
        let request = LookupRequest::new(OwnerId(2), vec![hash], vec![rank]);
        let lookup = host.engine.lookup(request);
        let Some(leases) = lookup.wait_blocking().into_leases() else {
            return;
        };
        for slot in leases.iter() {
            let number = u64::from_le_bytes(slot.bytes()[..8].try_into().expect("8 bytes"));
            let began = &self.began[number as usize];
            assert!(
                began.contains(&host.known),
                "host {at} knows {:?} and found what began after {began:?}",
                host.known
            );
            self.hits += 1;
        }
    }

    fn clear(&mut self) {
        let at = self.some_host();
        let host = &mut self.hosts[at];
        let in_use = InUse::of_force(self.rng.chance(500));
        host.engine.clear(in_use).expect("few clears");
        self.see(at);
    }

    /// Two hosts exchange their maps, as peers do.
    fn meet(&mut self) {
        let (one, other) = (self.some_host(), self.some_host());
        let log = |host: usize| self.hosts[host].engine.clear_log().clone();
        let (here, there) = (log(one), log(other));
        here.learn(&there.clears(), "there").expect("few");
        there.learn(&here.clears(), "here").expect("few");
        self.see(one);
        self.see(other);
    }

    /// A host starts again: killed or stopped, with its drive or an older copy of it, and with its
    /// state file or, where the drive knows all of it, without.
    fn restart(&mut self) {
        let at = self.some_host();
        self.see(at);
        let (is_stopped, is_copied, is_lost) = (
            self.rng.chance(500),
            self.rng.chance(300),
            self.rng.chance(300),
        );
        let handle = self.runtime.handle().clone();
        let host = &mut self.hosts[at];
        if is_stopped {
            host.engine.close(soon());
        }
        let saved = host.engine.clear_log().clears();
        let drive = match is_copied {
            true => host.copy.clone(),
            false => MemoryBackend::clone(&host.drive),
        };
        let is_lost = is_lost && drive.clears().contains(&saved);
        let log = ClearLog::default();
        if !is_lost {
            log.learn(&saved, "its file").expect("few");
        }
        host.drive = Arc::new(drive);
        let tiers = [Arc::clone(&host.drive) as _, Arc::clone(&self.store) as _];
        host.engine = start(&handle, &log, tiers);
        // Its engines start again with it, or go on with what they have begun.
        if self.rng.chance(500) {
            self.requests.retain(|request| request.host != at);
        }
    }

    /// Waits until a host's tiers have what they were given.
    fn settle(&mut self) {
        let host = &self.hosts[self.rng.below(HOSTS) as usize];
        let queued = || {
            host.engine
                .lower_status()
                .iter()
                .any(|tier| tier.queued_bytes > 0)
        };
        let until = soon();
        while queued() && Instant::now() < until {
            std::thread::yield_now();
        }
        if self.rng.chance(300) {
            host.engine.clear_dram(InUse::Remove);
        }
    }

    fn step(&mut self) {
        match self.rng.below(100) {
            0..10 => self.begin(),
            10..38 => self.store(),
            38..72 => self.look_up(),
            72..76 => self.clear(),
            76..83 => self.meet(),
            83..86 => self.restart(),
            86..94 => self.settle(),
            94..96 => {
                let at = self.some_host();
                self.hosts[at].copy = MemoryBackend::clone(&self.hosts[at].drive);
            }
            _ => {}
        }
    }
}

#[test]
fn what_is_found_was_computed_after_every_clear_that_has_reached_the_host() {
    let mut hits = 0;
    for seed in 0..rounds(150, 2000) as u64 {
        let mut fleet = Fleet::new(seed);
        let run = std::panic::AssertUnwindSafe(|| (0..120).for_each(|_| fleet.step()));
        if let Err(panic) = std::panic::catch_unwind(run) {
            eprintln!("seed {seed}");
            std::panic::resume_unwind(panic);
        }
        hits += fleet.hits;
    }
    assert!(hits > 500, "{hits} hits prove little");
}
