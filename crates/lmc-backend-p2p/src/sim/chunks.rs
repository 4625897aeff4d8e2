//! The chunks of a simulated daemon: a real pool, and what an engine does with it.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use lmc_backend::{
    BoxFuture, Change, ChunkRun, Clears, Events, Host, HostChunk, HostLease, HostSpace, LocateHint,
    Received, StartId, TooManyClears, Usage, now,
};
use lmc_key::ChunkKey;
use lmc_memory::{ArenaConfig, Pool, PoolConfig, ReservedSlot, SealedSlot, WrittenSlot, checksum};
use parking_lot::Mutex;

use super::net::Memory;
use super::{LEN, Rng, bytes, once_in, space};

/// Time that a simulated promotion from disk takes.
const PROMOTION: Duration = Duration::from_millis(3);

/// Time that a daemon takes to note clears durably.
const NOTING: Duration = Duration::from_millis(1);

#[derive(Debug)]
struct Entry {
    slot: SealedSlot,
    /// Checksum of every other chunk, so that digests of the rest come with the release.
    checksum: Option<u64>,
}

#[derive(Debug)]
struct State {
    resident: BTreeMap<ChunkKey, Entry>,
    disk: BTreeSet<ChunkKey>,
    writing: BTreeSet<ChunkKey>,
    spaces: Vec<HostSpace>,
}

/// The file in which a daemon notes its clears; a restart finds it.
pub(super) type StateFile = Arc<Mutex<Arc<Clears>>>;

/// The chunks of one daemon. Tests give keys as [`key`](super::key) makes them, and the nodes names:
/// with the digest of the clears that came before.
#[derive(Clone)]
pub(super) struct SimChunks {
    pub(super) pool: Pool,
    memory: Memory,
    start: StartId,
    clears_noted: StateFile,
    /// Time that noting clears takes.
    noting: Arc<Mutex<Duration>>,
    /// True while its clears cannot be noted.
    pub(super) is_volatile: Arc<AtomicBool>,
    state: Arc<Mutex<State>>,
    events: Events,
    /// Random numbers, and the calls of the node of which one, on average, finds the chunks
    /// cleared and computed again.
    clears: Arc<Mutex<(Rng, u64)>>,
    /// Function to call right after the chunks of the next lease are held.
    at_lease: Arc<Mutex<Option<Hook>>>,
    /// True while it takes no chunks.
    pub(super) is_draining: Arc<AtomicBool>,
    /// Ids of requests that have ended.
    pub(super) over: Arc<Mutex<HashSet<String>>>,
    reader: Arc<Mutex<Option<Reader>>>,
    /// Chunks of one push that there is memory for.
    pub(super) fitting: Arc<AtomicUsize>,
}

impl std::fmt::Debug for SimChunks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SimChunks")
    }
}

type Hook = Box<dyn FnOnce() + Send>;

/// Reads chunks from peers.
type Reader =
    Arc<dyn Fn(SimChunks, Vec<ChunkKey>, LocateHint) -> BoxFuture<'static, ()> + Send + Sync>;

impl SimChunks {
    pub(super) fn new(slots: u64, memory: Memory, start: u64, clears_noted: StateFile) -> Self {
        let arena = ArenaConfig::anonymous(slots as usize * 4096).build();
        let arena = Arc::new(arena.expect("a test machine has some memory"));
        let pool = Pool::new(arena, PoolConfig::default()).expect("the defaults are valid");
        let state = State {
            resident: BTreeMap::new(),
            disk: BTreeSet::new(),
            writing: BTreeSet::new(),
            spaces: Vec::new(),
        };
        Self {
            pool,
            memory,
            start: start_id(start),
            clears_noted,
            noting: Arc::new(Mutex::new(NOTING)),
            is_volatile: Arc::default(),
            state: Arc::new(Mutex::new(state)),
            events: Events::default(),
            clears: Arc::new(Mutex::new((Rng::new(0), 0))),
            at_lease: Arc::default(),
            is_draining: Arc::default(),
            over: Arc::default(),
            reader: Arc::default(),
            fitting: Arc::new(AtomicUsize::new(usize::MAX)),
        }
    }

    pub(super) fn set_reader(&self, reader: Reader) {
        *self.reader.lock() = Some(reader);
    }

    fn note(&self, key: &ChunkKey) {
        self.events.report("sim", key, None, Change::Stored);
    }

    /// Clears the chunks at any moment from now on: right before one call of `calls`.
    pub(super) fn clear_at_any_moment(&self, seed: u64, calls: u64) {
        *self.clears.lock() = (Rng::new(seed), calls);
    }

    /// Lets the disk take this time to note clears.
    pub(super) fn note_slowly(&self, time: Duration) {
        *self.noting.lock() = time;
    }

    /// Lets something happen right after the chunks of the next lease are held.
    pub(super) fn after_lease(&self, hook: impl FnOnce() + Send + 'static) {
        *self.at_lease.lock() = Some(Box::new(hook));
    }

    /// Lets another thread clear the chunks, whose engine computes them again at once.
    fn any_moment(&self) {
        let (rng, calls) = &mut *self.clears.lock();
        if once_in(rng, *calls) {
            let keys: Vec<ChunkKey> = self.state.lock().resident.keys().copied().collect();
            self.clear();
            keys.iter().for_each(|&key| self.store(key, key.fold()));
        }
    }

    /// Returns the clears that were carried out, as the node sees them.
    pub(super) fn carried_out(&self) -> Arc<Clears> {
        Arc::clone(&self.clears_noted.lock())
    }

    /// Returns the name of a chunk that is computed now.
    pub(super) fn name(&self, key: &ChunkKey) -> ChunkKey {
        ChunkKey {
            space: space().after(self.carried_out().id()),
            ..*key
        }
    }

    pub(super) fn has(&self, key: &ChunkKey) -> bool {
        self.state.lock().resident.contains_key(&self.name(key))
    }

    pub(super) fn has_named(&self, name: &ChunkKey) -> bool {
        self.state.lock().resident.contains_key(name)
    }

    pub(super) fn len(&self) -> usize {
        self.state.lock().resident.len()
    }

    /// Reserves a slot; evicts what nothing holds if there is none.
    pub(super) fn reserve(&self, pick: u64) -> Option<ReservedSlot> {
        if let Some(slot) = self.pool.reserve(LEN) {
            return Some(slot);
        }
        self.evict(pick)?;
        self.pool.reserve(LEN)
    }

    /// Evicts one chunk that nothing holds. Whatever reads the memory from outside sees it change
    /// at once.
    pub(super) fn evict(&self, pick: u64) -> Option<()> {
        let mut state = self.state.lock();
        let idle = state.resident.iter().filter(|(_, e)| e.slot.owners() == 1);
        let idle: Vec<ChunkKey> = idle.map(|(key, _)| *key).collect();
        let key = idle.get((pick % idle.len().max(1) as u64) as usize)?;
        self.note(key);
        let entry = state.resident.remove(key)?;
        self.memory
            .overwrite(entry.slot.offset(), &[0xee; LEN as usize]);
        Some(())
    }

    /// Begins a store by an engine of this host.
    pub(super) fn begin_store(&self, key: ChunkKey) {
        let name = self.name(&key);
        self.state.lock().writing.insert(name);
    }

    /// Ends a store of an engine that has not computed the chunk.
    pub(super) fn give_up_store(&self, name: &ChunkKey) {
        self.state.lock().writing.remove(name);
    }

    /// Keeps a chunk from eviction while the returned slot is there.
    pub(super) fn keep(&self, name: &ChunkKey) -> Option<SealedSlot> {
        let state = self.state.lock();
        state.resident.get(name).map(|entry| entry.slot.clone())
    }

    /// Ends a store: the engine has computed the chunk after the last clear.
    pub(super) fn store(&self, key: ChunkKey, pick: u64) {
        let name = self.name(&key);
        self.state.lock().writing.remove(&name);
        if self.has(&key) {
            return;
        }
        let Some(mut slot) = self.reserve(pick) else {
            return;
        };
        let content = bytes(&name);
        slot.bytes_mut().copy_from_slice(&content);
        self.memory.overwrite(slot.offset(), &content);
        self.commit(name, slot.written());
    }

    /// Changes a byte of a chunk in memory, and not its checksum.
    pub(super) fn spoil(&self, key: &ChunkKey) {
        let mut slot = self.pool.reserve(LEN).expect("a slot");
        let name = self.name(key);
        let mut state = self.state.lock();
        let entry = state.resident.get_mut(&name).expect("it is in memory");
        entry.checksum = Some(entry.slot.checksum());
        slot.bytes_mut().copy_from_slice(entry.slot.bytes());
        slot.bytes_mut()[0] ^= 1;
        entry.slot = slot.written().seal();
    }

    /// Puts a chunk on disk.
    pub(super) fn store_on_disk(&self, key: ChunkKey) {
        let name = self.name(&key);
        self.state.lock().disk.insert(name);
        self.note(&name);
    }

    /// Keeps a chunk under its name, as a lease does through a clear.
    pub(super) fn leave(&self, name: ChunkKey) {
        let mut slot = self.reserve(0).expect("there is memory");
        let content = bytes(&name);
        slot.bytes_mut().copy_from_slice(&content);
        self.memory.overwrite(slot.offset(), &content);
        let entry = Entry {
            slot: slot.written().seal(),
            checksum: None,
        };
        self.state.lock().resident.insert(name, entry);
    }

    /// Makes a chunk findable by its name, unless there was a clear since it got that.
    pub(super) fn commit(&self, key: ChunkKey, slot: WrittenSlot) {
        let mut state = self.state.lock();
        if key != self.name(&key) {
            return;
        }
        let checksum = key.hash.as_bytes()[8]
            .is_multiple_of(2)
            .then(|| checksum(slot.bytes()));
        let slot = slot.seal();
        self.note(&key);
        state
            .resident
            .entry(key)
            .or_insert(Entry { slot, checksum });
    }

    /// Registers an engine, as far as peers learn of it.
    pub(super) fn add_space(&self, space: HostSpace) {
        self.state.lock().spaces.push(space);
    }

    /// Clears all chunks, as an operator does.
    pub(super) fn clear(&self) {
        let mut clears = self.carried_out().as_ref().clone();
        clears.count(self.start).expect("few processes clear");
        self.carry_out(clears);
    }

    /// Notes clears, and removes all chunks.
    fn carry_out(&self, clears: Clears) {
        let mut state = self.state.lock();
        *self.clears_noted.lock() = Arc::new(clears);
        let all = state.resident.keys().chain(&state.disk);
        all.for_each(|key| self.note(key));
        state.resident.clear();
        state.disk.clear();
    }
}

/// Returns the id of the process of this number.
pub(super) fn start_id(number: u64) -> StartId {
    let mut id = [0; 16];
    id[..8].copy_from_slice(&number.to_be_bytes());
    StartId::new(id)
}

/// Returns the map of one clear of each of these processes.
pub(super) fn one_clear_each(processes: impl IntoIterator<Item = u64>) -> Clears {
    let entries = processes.into_iter().map(|number| (start_id(number), 1));
    Clears::from_entries(entries).expect("numbered once, and no more than a map holds")
}

impl Host for SimChunks {
    fn is_over(&self, request: &str) -> bool {
        self.over.lock().contains(request)
    }

    fn states(&self, keys: &[ChunkKey]) -> Vec<HostChunk> {
        self.any_moment();
        let state = self.state.lock();
        let of = |key: &ChunkKey| match () {
            () if state.resident.contains_key(key) => HostChunk::Memory { len: LEN },
            () if state.disk.contains(key) => HostChunk::Lower { len: LEN },
            () if state.writing.contains(key) => HostChunk::Writing,
            () => HostChunk::Absent,
        };
        keys.iter().map(of).collect()
    }

    fn lease<'a>(
        &'a self,
        keys: &'a [ChunkKey],
        promote_until: Instant,
    ) -> BoxFuture<'a, Vec<Option<HostLease>>> {
        Box::pin(async move {
            let on_disk = |key: &&ChunkKey| {
                let state = self.state.lock();
                !state.resident.contains_key(key) && state.disk.contains(key)
            };
            let promoted: Vec<ChunkKey> = keys.iter().filter(on_disk).copied().collect();
            if !promoted.is_empty() && now() + PROMOTION < promote_until {
                tokio::time::sleep(PROMOTION).await;
                for key in promoted {
                    let is_there = self.state.lock().disk.contains(&key);
                    if is_there {
                        self.store(key, key.fold());
                    }
                }
            }
            self.any_moment();
            let state = self.state.lock();
            let hold = |key: &ChunkKey| {
                let entry = state.resident.get(key)?;
                Some(HostLease {
                    slot: entry.slot.clone(),
                    checksum: entry.checksum,
                    lease: Box::new(()),
                })
            };
            let held = keys.iter().map(hold).collect();
            drop(state);
            let hook = self.at_lease.lock().take();
            if let Some(hook) = hook {
                hook();
            }
            held
        })
    }

    fn list(&self, _: u128, _: usize) -> BoxFuture<'_, (Vec<ChunkKey>, Option<u128>)> {
        let state = self.state.lock();
        let all = state.resident.keys().chain(&state.disk);
        let all: BTreeSet<ChunkKey> = all.copied().collect();
        Box::pin(std::future::ready((all.into_iter().collect(), None)))
    }

    fn promote<'a>(&'a self, keys: &'a [ChunkKey], _: LocateHint) -> BoxFuture<'a, ()> {
        Box::pin(async move {
            for key in keys {
                tokio::time::sleep(PROMOTION).await;
                self.store(*key, key.fold());
            }
        })
    }

    fn receive<'a>(
        &'a self,
        run: ChunkRun,
        peer: &'a str,
        timeout: Duration,
    ) -> BoxFuture<'a, Received> {
        Box::pin(async move {
            let fitting = self.fitting.load(Ordering::Relaxed);
            let keys = &run.keys[..run.keys.len().min(fitting)];
            let reader = self.reader.lock().clone();
            if let Some(reader) = reader {
                let hint = LocateHint::default()
                    .with_sources(Arc::new([peer.to_owned()]))
                    .only_sources()
                    .with_chunk_bytes(Some(run.chunk_bytes))
                    .with_timeout(timeout);
                reader(self.clone(), keys.to_vec(), hint).await;
            }
            let state = self.state.lock();
            let there = keys
                .iter()
                .take_while(|key| state.resident.contains_key(key));
            Received {
                chunks: there.count(),
                is_wanted: true,
            }
        })
    }

    fn clears(&self) -> Arc<Clears> {
        self.any_moment();
        self.carried_out()
    }

    fn clears_are_noted(&self) -> bool {
        !self.is_volatile.load(Ordering::Relaxed)
    }

    fn learn(&self, clears: Clears, _: &'static str) -> BoxFuture<'_, Result<(), TooManyClears>> {
        Box::pin(async move {
            let noting = *self.noting.lock();
            tokio::time::sleep(noting).await;
            let mut joined = self.carried_out().as_ref().clone();
            if joined.join(&clears)? {
                self.carry_out(joined);
            }
            Ok(())
        })
    }

    fn events(&self) -> &Events {
        &self.events
    }

    fn spaces(&self) -> Vec<HostSpace> {
        self.state.lock().spaces.clone()
    }

    fn is_draining(&self) -> bool {
        self.is_draining.load(Ordering::Relaxed)
    }

    fn usage(&self) -> Usage {
        let chunks = self.len() as u64;
        Usage::new(chunks, chunks * LEN).with_capacity(self.pool.arena().len() as u64)
    }
}
