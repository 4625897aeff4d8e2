//! The chunks of a simulated daemon: a real pool, and what an engine does with it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use lmc_backend::{BoxFuture, ClearEpoch, Usage};
use lmc_key::{ChunkKey, SpaceId};
use lmc_memory::{ArenaConfig, Pool, PoolConfig, ReservedSlot, SealedSlot, WrittenSlot, checksum};
use lmc_transfer::PeerId;
use parking_lot::Mutex;

use super::net::Memory;
use super::{LEN, Rng, bytes, once_in};
use crate::chunks::{Chunks, LeasedChunk};
use crate::directory::ChangedKeys;
use crate::link::now;
use crate::message::{ChunkState, SpaceNote};

/// Time that a simulated promotion from disk takes.
const PROMOTION: std::time::Duration = std::time::Duration::from_millis(3);

#[derive(Debug)]
struct Entry {
    slot: SealedSlot,
    /// Checksum of every other chunk, so that digests of the rest come with the release.
    checksum: Option<u64>,
}

#[derive(Debug)]
struct State {
    resident: BTreeMap<ChunkKey, Entry>,
    /// Chunks on disk, with the counter of the epoch that they were computed under.
    disk: BTreeMap<ChunkKey, u64>,
    writing: BTreeSet<ChunkKey>,
    epoch: ClearEpoch,
    spaces: Vec<SpaceNote>,
}

/// The chunks of one daemon.
#[derive(Clone)]
pub(super) struct SimChunks {
    pub(super) pool: Pool,
    memory: Memory,
    state: Arc<Mutex<State>>,
    /// Set once there is a node.
    pub(super) changed: Arc<OnceLock<Arc<ChangedKeys>>>,
    /// Random numbers, and the calls of the node of which one, on average, finds the chunks
    /// cleared and computed again.
    clears: Arc<Mutex<(Rng, u64)>>,
    /// Functions to call right before and right after the chunks of the next lease are held.
    at_lease: Arc<Mutex<[Option<Hook>; 2]>>,
}

impl std::fmt::Debug for SimChunks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SimChunks")
    }
}

type Hook = Box<dyn FnOnce() + Send>;

impl SimChunks {
    pub(super) fn new(slots: u64, memory: Memory) -> Self {
        let arena = ArenaConfig::anonymous(slots as usize * 4096).build();
        let arena = Arc::new(arena.expect("a test machine has some memory"));
        let pool = Pool::new(arena, PoolConfig::default()).expect("the defaults are valid");
        let state = State {
            resident: BTreeMap::new(),
            disk: BTreeMap::new(),
            writing: BTreeSet::new(),
            epoch: ClearEpoch::default(),
            spaces: Vec::new(),
        };
        Self {
            pool,
            memory,
            state: Arc::new(Mutex::new(state)),
            changed: Arc::default(),
            clears: Arc::new(Mutex::new((Rng::new(0), 0))),
            at_lease: Arc::default(),
        }
    }

    fn note(&self, key: &ChunkKey) {
        if let Some(changed) = self.changed.get() {
            changed.note(key);
        }
    }

    /// Clears the chunks at any moment from now on: right before one call of `calls`.
    pub(super) fn clear_at_any_moment(&self, seed: u64, calls: u64) {
        *self.clears.lock() = (Rng::new(seed), calls);
    }

    /// Lets something happen right before the chunks of the next lease are held.
    pub(super) fn before_lease(&self, hook: impl FnOnce() + Send + 'static) {
        self.at_lease.lock()[0] = Some(Box::new(hook));
    }

    /// Lets something happen right after the chunks of the next lease are held.
    pub(super) fn after_lease(&self, hook: impl FnOnce() + Send + 'static) {
        self.at_lease.lock()[1] = Some(Box::new(hook));
    }

    fn happens(&self, hook: usize) {
        let hook = self.at_lease.lock()[hook].take();
        if let Some(hook) = hook {
            hook();
        }
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

    pub(super) fn known_epoch(&self) -> ClearEpoch {
        self.state.lock().epoch
    }

    pub(super) fn has(&self, key: &ChunkKey) -> bool {
        self.state.lock().resident.contains_key(key)
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
        self.state.lock().writing.insert(key);
    }

    /// Ends a store: the engine has computed the chunk under the present epoch.
    pub(super) fn store(&self, key: ChunkKey, pick: u64) {
        self.state.lock().writing.remove(&key);
        if self.has(&key) {
            return;
        }
        let Some(mut slot) = self.reserve(pick) else {
            return;
        };
        let content = bytes(&key, self.known_epoch().counter);
        slot.bytes_mut().copy_from_slice(&content);
        self.memory.overwrite(slot.offset(), &content);
        let epoch = self.known_epoch();
        self.commit(key, slot.written(), epoch);
    }

    /// Changes a byte of a chunk in memory, and not its checksum.
    pub(super) fn spoil(&self, key: &ChunkKey) {
        let mut slot = self.pool.reserve(LEN).expect("a slot");
        let mut state = self.state.lock();
        let entry = state.resident.get_mut(key).expect("it is in memory");
        entry.checksum = Some(entry.slot.checksum());
        slot.bytes_mut().copy_from_slice(entry.slot.bytes());
        slot.bytes_mut()[0] ^= 1;
        entry.slot = slot.written().seal();
    }

    /// Puts a chunk on disk.
    pub(super) fn store_on_disk(&self, key: ChunkKey) {
        let mut state = self.state.lock();
        let epoch = state.epoch.counter;
        state.disk.insert(key, epoch);
        self.note(&key);
    }

    /// Makes a chunk findable, if it is of the newest epoch.
    pub(super) fn commit(&self, key: ChunkKey, slot: WrittenSlot, epoch: ClearEpoch) -> bool {
        let mut state = self.state.lock();
        if epoch != state.epoch {
            return false;
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
        true
    }

    /// Registers an engine, as far as peers learn of it.
    pub(super) fn add_space(&self, space: SpaceNote) {
        self.state.lock().spaces.push(space);
    }

    /// Clears all spaces, as an operator does.
    pub(super) fn clear(&self) {
        self.learn(self.known_epoch().next());
    }
}

impl Chunks for SimChunks {
    fn states(&self, keys: &[ChunkKey]) -> Vec<ChunkState> {
        self.any_moment();
        let state = self.state.lock();
        let of = |key: &ChunkKey| match () {
            () if state.resident.contains_key(key) => ChunkState::Memory { len: LEN },
            () if state.disk.contains_key(key) => ChunkState::Disk { len: LEN },
            () if state.writing.contains(key) => ChunkState::Writing,
            () => ChunkState::Absent,
        };
        keys.iter().map(of).collect()
    }

    fn lease<'a>(
        &'a self,
        keys: &'a [ChunkKey],
        promote_until: Instant,
    ) -> BoxFuture<'a, (ClearEpoch, Vec<Option<LeasedChunk>>)> {
        Box::pin(async move {
            let on_disk = |key: &&ChunkKey| {
                let state = self.state.lock();
                !state.resident.contains_key(key) && state.disk.contains_key(key)
            };
            let promoted: Vec<ChunkKey> = keys.iter().filter(on_disk).copied().collect();
            if !promoted.is_empty() && now() + PROMOTION < promote_until {
                tokio::time::sleep(PROMOTION).await;
                for key in promoted {
                    let epoch = self.state.lock().disk.get(&key).copied();
                    if epoch == Some(self.known_epoch().counter) {
                        self.store(key, key.fold());
                    }
                }
            }
            self.any_moment();
            self.happens(0);
            let state = self.state.lock();
            let hold = |key: &ChunkKey| {
                let entry = state.resident.get(key)?;
                Some(LeasedChunk {
                    slot: entry.slot.clone(),
                    checksum: entry.checksum,
                    lease: Box::new(()),
                })
            };
            let held = (state.epoch, keys.iter().map(hold).collect());
            drop(state);
            self.happens(1);
            held
        })
    }

    fn list(&self, _: u128, _: usize) -> BoxFuture<'_, (Vec<ChunkKey>, Option<u128>)> {
        let state = self.state.lock();
        let all = state.resident.keys().chain(state.disk.keys());
        let all: BTreeSet<ChunkKey> = all.copied().collect();
        Box::pin(std::future::ready((all.into_iter().collect(), None)))
    }

    fn fetch<'a>(&'a self, keys: &'a [ChunkKey], _: &'a PeerId) -> BoxFuture<'a, ()> {
        Box::pin(async move {
            for key in keys {
                tokio::time::sleep(PROMOTION).await;
                self.store(*key, key.fold());
            }
        })
    }

    fn epoch(&self, _: SpaceId) -> ClearEpoch {
        self.any_moment();
        self.known_epoch()
    }

    fn cleared(&self) -> ClearEpoch {
        self.any_moment();
        self.known_epoch()
    }

    fn learn(&self, epoch: ClearEpoch) {
        let mut state = self.state.lock();
        assert!(epoch.counter > state.epoch.counter, "not newer");
        state.epoch = epoch;
        let all = state.resident.keys().chain(state.disk.keys());
        all.for_each(|key| self.note(key));
        state.resident.clear();
        state.disk.clear();
    }

    fn spaces(&self) -> Vec<SpaceNote> {
        self.state.lock().spaces.clone()
    }

    fn usage(&self) -> Usage {
        let chunks = self.len() as u64;
        Usage::new(chunks, chunks * LEN).with_capacity(self.pool.arena().len() as u64)
    }
}
