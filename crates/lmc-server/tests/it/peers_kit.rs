//! The kit of all tiers, on the tier of peers: what one daemon's engine stores, another reads.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lmc_backend::conformance::{Conformance, Guarantee, test_key};
use lmc_backend::{
    Answers, Backend, BackendError, BoxFuture, Cleared, Clears, Cursor, Health, Host, HostChunk,
    Listed, LocateHint, Located, Page, StoreItem, Stored, WriteBackend, now, ready,
};
use lmc_backend_p2p::{NodeConfig, P2pBackend, P2pConfig, new_peer_id};
use lmc_engine::{
    CacheEngine, EngineConfig, EngineContext, EngineHost, Inserted, OwnerId, StoreRequest,
    StoreStart, TenantId,
};
use lmc_key::ChunkKey;
use lmc_memory::{Arena, ArenaConfig};
use lmc_testkit::{rounds, until};
use lmc_transfer::{Address, ChannelConfig, Key, SocketConfig};
use tokio::runtime::Runtime;

const POOL: usize = 8 << 20;
const WRITER: OwnerId = OwnerId(1);

/// A daemon as far as peers need it.
#[derive(Debug)]
struct Daemon {
    host: EngineHost,
    tier: P2pBackend,
}

impl Daemon {
    fn start(name: &str, arena: &Arc<Arena>, peers: Vec<String>, runtime: &Runtime) -> Self {
        let mut channel = ChannelConfig::new(new_peer_id(name).expect("an id"), Arc::clone(arena));
        channel.keys = Some(Key::new(&[7; 32]).expect("a key").into());
        let any_port: Address = "tcp://127.0.0.1:0".parse().expect("an address");
        let node = NodeConfig::new(name, "", POOL as u64);
        let mut config = P2pConfig::new(node, SocketConfig::new(channel, any_port));
        config.peers = peers;
        let host = EngineHost::default();
        let handle = runtime.handle().clone();
        let tier = config
            .start(Arc::new(host.clone()), handle)
            .expect("a tier");
        Self { host, tier }
    }

    fn address(&self) -> String {
        let address = self.tier.address().to_string();
        address.trim_start_matches("tcp://").to_owned()
    }
}

/// The daemon under test. As an engine does, it notes clears before its tier is given them.
impl Backend for Daemon {
    lmc_backend::forward!(tier: name sharing load usage counters health close);

    /// A peer whose answer was late is not asked for a while. As for a prompt that comes again, it is
    /// asked until that is over.
    fn locate<'a>(
        &'a self,
        keys: &'a [ChunkKey],
        hint: &'a LocateHint,
        deadline: Instant,
    ) -> BoxFuture<'a, Vec<Result<Located, BackendError>>> {
        Box::pin(async move {
            loop {
                let located = self.tier.locate(keys, hint, deadline).await;
                let paused = |one: &Result<_, _>| matches!(one, Err(BackendError::Unavailable(_)));
                if !located.iter().any(paused) || now() >= deadline {
                    return located;
                }
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        })
    }

    fn clear(
        &self,
        clears: Arc<Clears>,
        deadline: Instant,
    ) -> BoxFuture<'_, Result<Cleared, BackendError>> {
        Box::pin(async move {
            let learned = self.host.learn(Clears::clone(&clears), "the kit").await;
            learned.expect("the kit clears a few times");
            self.tier.clear(clears, deadline).await
        })
    }

    fn clears(&self) -> Arc<Clears> {
        self.host.clears()
    }
}

/// An engine whose chunks the other daemon reads.
#[derive(Debug)]
struct Owner {
    engine: CacheEngine,
    _daemon: Daemon,
}

impl Owner {
    /// Returns the key that stands for a name, unless there was a clear since it was named.
    fn unnamed(&self, name: &ChunkKey) -> Option<ChunkKey> {
        let clears = self.engine.clears_id();
        let named = |key: &ChunkKey| ChunkKey {
            space: key.space.after(clears),
            ..*key
        };
        (0..64).map(test_key).find(|key| named(key) == *name)
    }

    fn store_one(&self, item: &StoreItem) -> Stored {
        let Some(key) = self.unnamed(&item.key) else {
            return Stored::Declined;
        };
        let request = StoreRequest {
            key,
            parent: None,
            tenant: TenantId::default(),
            len: item.slot.len(),
        };
        let clears = self.engine.clears_id();
        let mut started = self.engine.store(WRITER, clears, &[request]);
        let mut ticket = match started.remove(0) {
            StoreStart::Reserved(ticket) => ticket,
            StoreStart::Present => return Stored::Present,
            _ => return Stored::Declined,
        };
        ticket.bytes_mut().copy_from_slice(item.slot.bytes());
        match self.engine.commit(vec![ticket])[0] {
            Inserted::New => Stored::Written,
            Inserted::Present => Stored::Present,
            Inserted::Cleared => Stored::Declined,
        }
    }
}

impl Backend for Owner {
    lmc_backend::forward!(_daemon: name sharing locate load usage health close clear);

    fn writer(&self) -> Option<&dyn WriteBackend> {
        Some(self)
    }
}

impl WriteBackend for Owner {
    fn store(
        &self,
        items: Vec<StoreItem>,
        _: Instant,
    ) -> Answers<'_, Result<Stored, BackendError>> {
        let stored: Vec<_> = items.iter().map(|item| Ok(self.store_one(item))).collect();
        ready(stored)
    }

    fn remove<'a>(
        &'a self,
        keys: &'a [ChunkKey],
        _: Instant,
    ) -> BoxFuture<'a, Vec<Result<bool, BackendError>>> {
        let remove = |name: &ChunkKey| {
            let key = self.unnamed(name);
            Ok(key.is_some_and(|key| self.engine.remove(&[key]).found[0]))
        };
        Box::pin(std::future::ready(keys.iter().map(remove).collect()))
    }

    fn list(
        &self,
        cursor: Cursor,
        limit: usize,
        _: Instant,
    ) -> BoxFuture<'_, Result<Page, BackendError>> {
        Box::pin(async move {
            let host = self.engine.host();
            let (keys, next) = host.list(cursor.raw(), limit).await;
            let states = host.states(&keys);
            let listed =
                |(key, state): (&ChunkKey, &HostChunk)| Some(Listed::new(*key, state.bytes()?));
            Ok(Page {
                items: keys.iter().zip(&states).filter_map(listed).collect(),
                next: next.map(Cursor::from_raw),
            })
        })
    }
}

#[test]
fn peers_pass_the_kit() {
    let seeds: Range<u64> = 0..rounds(2, 30) as u64;
    for seed in seeds {
        let runtime = Runtime::new().expect("a runtime");
        let arena = Arc::new(ArenaConfig::anonymous(POOL).build().expect("memory"));
        let daemon = Daemon::start("owner", &arena, Vec::new(), &runtime);
        let address = daemon.address();
        let context = EngineContext::new(arena, daemon.host.clone());
        let engine = EngineConfig::default().start(context).expect("an engine");
        let owner = Owner {
            engine,
            _daemon: daemon,
        };
        let arena = Arc::new(ArenaConfig::anonymous(POOL).build().expect("memory"));
        let reader = Daemon::start("reader", &arena, vec![address], &runtime);
        let _on = runtime.enter();
        let ready = || reader.health() == Health::Ready;
        until("the peers have met", ready);
        let kit = Conformance::new(Guarantee::Lossy).with_seed(seed);
        let kit = kit.with_arena(arena);
        let tally = kit.with_operations(300).run_beside(&reader, &owner);
        println!("{tally:?}");
        assert!(tally.hits > 20 && tally.misses > 20, "{tally:?}");
    }
}
