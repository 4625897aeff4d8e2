//! Models and tenants of spaces, for as long as the cache holds any chunk of them.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::time::Instant;

use lmc_engine::{CacheEngine, Change, ChunkEvent, DRAM, EventSink, FingerprintTable, TenantId};
use lmc_key::{ChunkHash, KeySpace, LayoutFingerprint, Salt, SpaceId};
use parking_lot::RwLock;

use crate::protocol::Naming;
use crate::service::events::EventLog;
use crate::service::stats::add;
use crate::service::usage::{HeldBytes, Usage, UsageStatus, Usages};

/// Names of spaces, and of tenants, above which those without chunks are forgotten.
const PURGE_ABOVE: usize = 65_536;

/// A space that has chunks in DRAM, or whose layout a registered worker has.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct SpaceStatus {
    /// Id of the space.
    pub id: SpaceId,
    /// Fields of the space.
    pub description: KeySpace,
    /// Number of the space's chunks in DRAM.
    pub chunks: u64,
    /// True if a worker with the space's layout is registered.
    pub registered: bool,
}

#[derive(Debug)]
struct Space {
    model: Arc<str>,
    /// All fields of the space; `None` if only its id is known.
    description: Option<KeySpace>,
    /// Hash of the salt in the description, by which `last_spaces` knows tenants.
    salt_hash: Option<u64>,
    /// True once a request named it: a registration alone names no salt.
    requested: bool,
    /// Space of this host into which its chunks can be merged, and the number of its KV ranks that
    /// make one rank there.
    merged: Option<(SpaceId, u16)>,
    /// The generation that the space belongs to, see `generation`.
    generation: Option<LayoutFingerprint>,
    /// The way in which the last stored chunks are named.
    naming: AtomicU8,
    /// Counters of the space's model and tenant, and the bytes of one of its chunks.
    usage: Option<(Arc<Usage>, u64)>,
    chunks: AtomicU64,
}

impl Space {
    fn chunks(&self) -> u64 {
        self.chunks.load(Ordering::Relaxed)
    }

    fn has_whole_chunks(&self, chunk_size: u32) -> bool {
        let description = self.description.as_ref();
        description.is_none_or(|space| space.chunk_size == chunk_size)
    }
}

#[derive(Debug)]
struct Table {
    spaces: HashMap<SpaceId, Space>,
    /// The last space of each [`tag_of`] that was named.
    tagged: HashMap<u16, SpaceId>,
    purge_spaces_above: usize,
    tenants: HashMap<Salt, TenantId>,
    purge_tenants_above: usize,
    next_tenant: u32,
}

impl Default for Table {
    fn default() -> Self {
        Self {
            spaces: HashMap::new(),
            tagged: HashMap::new(),
            purge_spaces_above: PURGE_ABOVE,
            tenants: HashMap::new(),
            purge_tenants_above: PURGE_ABOVE,
            next_tenant: 0,
        }
    }
}

impl Table {
    /// Returns the bytes of chunks in DRAM for each model and tenant.
    fn held_bytes(&self) -> HeldBytes {
        let mut held = HeldBytes::default();
        for space in self.spaces.values() {
            if let Some((usage, chunk_bytes)) = &space.usage {
                held.add(usage, space.chunks() * chunk_bytes);
            }
        }
        held
    }

    /// Returns a space's entry, which is added if missing.
    fn entry(&mut self, space: SpaceId, model: &str) -> &mut Space {
        if self.spaces.len() > self.purge_spaces_above {
            self.spaces.retain(|_, space| space.chunks() > 0);
            self.purge_spaces_above = PURGE_ABOVE.max(2 * self.spaces.len());
        }
        let tagged = &mut self.tagged;
        self.spaces.entry(space).or_insert_with(|| {
            tagged.insert(tag_of(space), space);
            Space {
                model: model.into(),
                description: None,
                salt_hash: None,
                requested: false,
                merged: None,
                generation: None,
                naming: AtomicU8::new(Naming::Tokens as u8),
                usage: None,
                chunks: AtomicU64::new(0),
            }
        })
    }
}

/// Names of spaces and tenants. Receives the cache's reports of stored and removed chunks, and
/// passes removals on to the event log.
#[derive(Debug)]
pub(crate) struct Spaces {
    /// Written when a space or a tenant is named. Reports of chunks only read it: they are made
    /// under the locks of shards, which must not wait for each other here.
    table: RwLock<Table>,
    usages: Usages,
    log: Arc<EventLog>,
    /// Tokens of a whole chunk.
    chunk_size: u32,
    /// The [`tag_of`] the last space in which a whole chunk was stored, by the hashes of the salt
    /// and of the chunk.
    last_spaces: FingerprintTable,
    /// Hasher of salts.
    hasher: RandomState,
    /// True once chunks were stored under hashes of an engine.
    has_engine_hashes: AtomicBool,
}

/// Another space of a tenant that has, or had, a chunk of the same tokens.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct OtherSpace {
    pub(crate) id: SpaceId,
    /// Names of the fields in which the two spaces differ.
    pub(crate) differs: Vec<&'static str>,
    /// True if the two spaces seem to be generations of one engine's chunks: they differ in nothing
    /// but the layout, which is drawn for each generation.
    pub(crate) is_generation: bool,
}

/// Returns two bytes of a space's id. Few spaces share them.
fn tag_of(space: SpaceId) -> u16 {
    let [first, second, ..] = *space.as_bytes();
    u16::from_le_bytes([first, second])
}

impl Spaces {
    pub(crate) fn new(
        log: Arc<EventLog>,
        chunk_size: u32,
        pool_bytes: u64,
        max_usages: usize,
    ) -> Self {
        Self {
            table: RwLock::default(),
            usages: Usages::new(max_usages),
            log,
            chunk_size,
            last_spaces: FingerprintTable::new(pool_bytes),
            hasher: RandomState::new(),
            has_engine_hashes: AtomicBool::new(false),
        }
    }

    /// Returns false for a space whose chunks are known to be of another size than the server's.
    pub(crate) fn has_whole_chunks(&self, space: SpaceId) -> bool {
        let table = self.table.read();
        let known = table.spaces.get(&space);
        known.is_none_or(|space| space.has_whole_chunks(self.chunk_size))
    }

    /// Remembers the model of a space before a store into it.
    pub(crate) fn name(&self, space: SpaceId, model: &str) -> Arc<str> {
        if let Some(known) = self.table.read().spaces.get(&space) {
            return Arc::clone(&known.model);
        }
        Arc::clone(&self.table.write().entry(space, model).model)
    }

    /// Remembers the fields of a space. `requested` is false when a worker registers, before any
    /// request has named a salt.
    pub(crate) fn describe(&self, space: SpaceId, description: KeySpace, requested: bool) {
        let salt_hash = self.hasher.hash_one(&description.salt);
        let mut table = self.table.write();
        let entry = table.entry(space, description.model.as_str());
        entry.salt_hash = Some(salt_hash);
        entry.description = Some(description);
        entry.requested |= requested;
    }

    /// Counts the chunks of a described space, of this many bytes each, for its model and tenant.
    pub(crate) fn count_usage(&self, space: SpaceId, chunk_bytes: u64) {
        let mut table = self.table.write();
        let Some(known) = table.spaces.get(&space) else {
            return;
        };
        let Some(description) = &known.description else {
            return;
        };
        let held = || table.held_bytes();
        let usage = (self.usages).of(&known.model, &description.salt, Instant::now(), held);
        if let Some(known) = table.spaces.get_mut(&space) {
            known.usage = usage.map(|usage| (usage, chunk_bytes));
        }
    }

    /// Returns the counters of a space's model and tenant for a request, or the common ones for an unknown
    /// space; `None` if nothing is counted.
    pub(crate) fn usage(&self, space: Option<SpaceId>) -> Option<Arc<Usage>> {
        let others = self.usages.others()?;
        let known = |space| {
            let table = self.table.read();
            table.spaces.get(&space)?.usage.clone()
        };
        let Some(space) = space else {
            return Some(others);
        };
        let mut usage = known(space);
        if let Some((_, chunk_bytes)) = usage.as_ref().filter(|(usage, _)| usage.is_replaced()) {
            self.count_usage(space, *chunk_bytes);
            usage = known(space);
        }
        let usage = usage.map_or(others, |(usage, _)| usage);
        usage.note_use(Instant::now());
        Some(usage)
    }

    /// Returns the counts of each model and tenant.
    pub(crate) fn usage_status(&self) -> Vec<UsageStatus> {
        let held = self.table.read().held_bytes();
        self.usages.status(&held)
    }

    /// Remembers a space whose chunks are merged into those of another space, and its fields.
    pub(crate) fn describe_merged(
        &self,
        space: SpaceId,
        description: KeySpace,
        into: (SpaceId, u16),
    ) {
        let mut table = self.table.write();
        let entry = table.entry(space, description.model.as_str());
        entry.description = Some(description);
        entry.merged = Some(into);
    }

    /// Returns the space and KV rank into which the chunks of a rank are merged.
    pub(crate) fn merged(&self, space: SpaceId, kv_rank: u16) -> Option<(SpaceId, u16)> {
        let (into, ranks) = self.table.read().spaces.get(&space)?.merged?;
        Some((into, kv_rank / ranks))
    }

    /// Returns the spaces that have chunks in DRAM, and the spaces of these layouts of registered
    /// workers: those that requests named, or else the space without a salt.
    pub(crate) fn live(&self, registered: &HashSet<LayoutFingerprint>) -> Vec<SpaceStatus> {
        let table = self.table.read();
        let requested: HashSet<LayoutFingerprint> = (table.spaces.values())
            .filter(|space| space.requested)
            .filter_map(|space| Some(space.description.as_ref()?.layout))
            .collect();
        let live = table.spaces.iter().filter_map(|(&id, space)| {
            let description = space.description.as_ref()?;
            let layout = description.layout;
            let named = space.requested || !requested.contains(&layout);
            let registered = named && registered.contains(&layout);
            (registered || space.chunks() > 0).then(|| SpaceStatus {
                id,
                description: description.clone(),
                chunks: space.chunks(),
                registered,
            })
        });
        live.collect()
    }

    /// Returns the tenant of a space; tenant 0 for an unknown space.
    pub(crate) fn tenant_of(&self, space: SpaceId, engine: &CacheEngine) -> TenantId {
        let salt = self.description(space).map(|description| description.salt);
        self.tenant(&salt.unwrap_or_default(), engine)
    }

    /// Returns true if there are chunks of a space in DRAM.
    pub(crate) fn has_chunks(&self, space: SpaceId) -> bool {
        let table = self.table.read();
        let known = table.spaces.get(&space);
        known.is_some_and(|space| space.chunks() > 0)
    }

    /// Returns the fields of a space; `None` if only its id is known.
    pub(crate) fn description(&self, space: SpaceId) -> Option<KeySpace> {
        self.table.read().spaces.get(&space)?.description.clone()
    }

    /// Returns another space in which a chunk with this hash was stored last, as far as that is
    /// remembered. Both spaces belong to one tenant: the reason of a miss must not reveal what
    /// another tenant has stored.
    pub(crate) fn other_space(&self, space: SpaceId, hash: &ChunkHash) -> Option<OtherSpace> {
        let table = self.table.read();
        let asked = table.spaces.get(&space)?;
        let tag = self.last_spaces.get((asked.salt_hash?, hash))?;
        let id = *table.tagged.get(&tag)?;
        let other = table.spaces.get(&id)?;
        let description = asked.description.as_ref()?;
        let differs = description.differences(other.description.as_ref()?);
        let is_other = !differs.is_empty() && !differs.contains(&"salt");
        let are_generations = asked.generation.is_some() && other.generation.is_some();
        is_other.then(|| OtherSpace {
            id,
            is_generation: are_generations && differs == ["layout"],
            differs,
        })
    }

    /// Remembers how the chunks that are stored in a named space are named.
    pub(crate) fn set_naming(&self, space: SpaceId, naming: Naming) {
        if naming == Naming::EngineHashes {
            self.has_engine_hashes.store(true, Ordering::Relaxed);
        }
        if let Some(space) = self.table.read().spaces.get(&space) {
            space.naming.store(naming as u8, Ordering::Relaxed);
        }
    }

    /// Returns true if a space has no chunks in DRAM, and a space of the same model and tenant has chunks
    /// that are named in another way: an engine's chunks cannot be found under the other naming.
    pub(crate) fn has_other_naming(&self, space: SpaceId, naming: Naming) -> bool {
        if !self.has_engine_hashes.load(Ordering::Relaxed) {
            return false;
        }
        let table = self.table.read();
        let Some(asked) = table.spaces.get(&space).filter(|asked| asked.chunks() == 0) else {
            return false;
        };
        let is_other = |other: &Space| {
            other.salt_hash == asked.salt_hash
                && other.model == asked.model
                && other.naming.load(Ordering::Relaxed) != naming as u8
                && other.chunks() > 0
        };
        table.spaces.values().any(is_other)
    }

    /// Remembers that a named space belongs to a generation.
    pub(crate) fn set_generation(&self, space: SpaceId, generation: LayoutFingerprint) {
        let table = self.table.read();
        let known = table.spaces.get(&space);
        if known.is_none_or(|space| space.generation == Some(generation)) {
            return;
        }
        drop(table);
        if let Some(space) = self.table.write().spaces.get_mut(&space) {
            space.generation = Some(generation);
        }
    }

    /// Returns true if workers can name a space also after all present workers have gone, because
    /// it belongs to no generation. False for a space that no request has named.
    pub(crate) fn is_lasting(&self, space: SpaceId) -> bool {
        let table = self.table.read();
        let known = table.spaces.get(&space);
        known.is_some_and(|space| space.generation.is_none())
    }

    /// The spaces of a generation.
    pub(crate) fn of_generation(&self, generation: LayoutFingerprint) -> HashSet<SpaceId> {
        let table = self.table.read();
        let of_it = table.spaces.iter();
        let of_it = of_it.filter(|(_, space)| space.generation == Some(generation));
        of_it.map(|(&id, _)| id).collect()
    }

    /// Returns the number of a tenant. The empty salt is tenant 0.
    ///
    /// When there are many tenants, those that use nothing and have no quota are forgotten. A
    /// tenant that is about to store just then may get a second number. Its chunks are found all
    /// the same, since keys carry the salt; the chunks under the old number count against no quota
    /// that is set later.
    pub(crate) fn tenant(&self, salt: &Salt, engine: &CacheEngine) -> TenantId {
        if salt.is_empty() {
            return TenantId::default();
        }
        if let Some(&tenant) = self.table.read().tenants.get(salt) {
            return tenant;
        }
        let mut table = self.table.write();
        if let Some(&tenant) = table.tenants.get(salt) {
            return tenant;
        }
        if table.tenants.len() >= table.purge_tenants_above {
            let used = engine.tenants().into_iter();
            let used = used.filter(|t| t.bytes > 0 || t.writing > 0 || t.quota.is_some());
            let used: HashSet<u32> = used.map(|tenant| tenant.tenant).collect();
            table.tenants.retain(|_, tenant| used.contains(&tenant.0));
            table.purge_tenants_above = PURGE_ABOVE.max(2 * table.tenants.len());
        }
        table.next_tenant += 1;
        let tenant = TenantId(table.next_tenant);
        table.tenants.insert(salt.clone(), tenant);
        tenant
    }

    /// Returns the number of a tenant that has one.
    pub(crate) fn known_tenant(&self, salt: &Salt) -> Option<TenantId> {
        if salt.is_empty() {
            return Some(TenantId::default());
        }
        self.table.read().tenants.get(salt).copied()
    }

    /// Returns the salts of the known tenants among `ids`.
    pub(crate) fn salts_of(&self, ids: &HashSet<TenantId>) -> HashMap<TenantId, Salt> {
        let table = self.table.read();
        let mut salts: HashMap<_, _> = (table.tenants.iter())
            .filter(|(_, id)| ids.contains(id))
            .map(|(salt, &id)| (id, salt.clone()))
            .collect();
        salts.insert(TenantId::default(), Salt::default());
        salts
    }
}

impl EventSink for Spaces {
    fn changed(&self, event: &ChunkEvent<'_>) {
        let Some(id) = event.space.filter(|_| event.tier == DRAM) else {
            return;
        };
        let table = self.table.read();
        let Some(space) = table.spaces.get(&id) else {
            return;
        };
        if let Some((usage, chunk_bytes)) = &space.usage {
            match event.change {
                Change::Stored => add(&usage.stored_bytes, *chunk_bytes),
                Change::Evicted => add(&usage.evicted_bytes, *chunk_bytes),
                _ => {}
            }
        }
        let is_whole = space.has_whole_chunks(self.chunk_size);
        if event.change.is_arrival() {
            space.chunks.fetch_add(1, Ordering::Relaxed);
            // Chunks of tails would displace chunks whose misses have a reason.
            let salt_hash = space.salt_hash.filter(|_| is_whole);
            drop(table);
            if let Some(salt_hash) = salt_hash {
                self.last_spaces
                    .insert((salt_hash, &event.key.hash), tag_of(id));
            }
            return;
        }
        // A space may have been forgotten and named again meanwhile: the count does not go below
        // zero.
        let less = |chunks: u64| chunks.checked_sub(1);
        let _ = (space.chunks).fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        let is_part = space.merged.is_some() && !space.requested;
        if !self.log.enabled() || is_part || !is_whole {
            // The chunk was not announced either.
            return;
        }
        let model = Arc::clone(&space.model);
        drop(table);
        self.log.removed(&model, event.key.hash);
    }
}

#[cfg(test)]
mod tests {
    use lmc_key::ChunkKey;

    use super::*;

    const WHOLE: u32 = 256;
    const HASH: ChunkHash = ChunkHash::new([7; 32]);

    fn space(model: &str, chunk_size: u32, layout: &[u8]) -> KeySpace {
        KeySpace {
            algorithm: lmc_key::HashAlgorithm::Blake3,
            chunk_size,
            model: model.parse().expect("a name"),
            world_size: 1,
            layout: LayoutFingerprint::of(layout),
            dtype: "half".parse().expect("a name"),
            salt: Salt::default(),
            identity: lmc_key::IdentityText::default(),
            tags: None,
        }
    }

    /// Describes spaces, and stores one chunk in the last of them.
    fn stored(described: &[&KeySpace]) -> Spaces {
        let log = Arc::new(EventLog::new(0, 0));
        let spaces = Spaces::new(log, WHOLE, 0, 0);
        for space in described {
            spaces.describe(space.id(), (*space).clone(), true);
        }
        let last = described.last().expect("a space").id();
        let key = ChunkKey {
            space: last,
            kv_rank: 0,
            group: 0,
            hash: HASH,
        };
        spaces.changed(&ChunkEvent {
            tier: DRAM,
            key: &key,
            parent: None,
            space: Some(last),
            change: Change::Stored,
        });
        spaces
    }

    #[test]
    fn chunks_under_another_naming_are_known_until_the_space_has_some_of_its_own() {
        let stock = space("m", WHOLE, b"layout");
        let own = KeySpace {
            identity: "{}".parse().expect("a text"),
            ..stock.clone()
        };
        let others = [
            space("other", WHOLE, b"layout"),
            KeySpace {
                salt: "tenant".parse().expect("a salt"),
                ..stock.clone()
            },
        ];
        let spaces = stored(&[&own, &others[0], &others[1], &stock]);
        spaces.set_naming(stock.id(), Naming::Tokens);
        let misses = |naming| {
            [&own, &others[0], &others[1], &stock]
                .map(|it| spaces.has_other_naming(it.id(), naming))
        };
        assert_eq!(
            misses(Naming::EngineHashes),
            [false; 4],
            "no engine sends hashes"
        );
        spaces.set_naming(own.id(), Naming::EngineHashes);
        assert_eq!(misses(Naming::EngineHashes), [true, false, false, false]);
        assert_eq!(misses(Naming::Tokens), [false; 4]);
    }

    #[test]
    fn whole_chunks_of_another_space_are_remembered_and_those_of_tails_are_not() {
        let asked = space("m", WHOLE, b"layout");
        let other = space("other", WHOLE, b"layout");
        let found = stored(&[&asked, &other]).other_space(asked.id(), &HASH);
        let expected = OtherSpace {
            id: other.id(),
            differs: vec!["model"],
            is_generation: false,
        };
        assert_eq!(found, Some(expected));
        let tail = space("other", 16, b"layout");
        let found = stored(&[&asked, &tail]).other_space(asked.id(), &HASH);
        assert_eq!(found, None);
    }

    #[test]
    fn two_generations_differ_in_nothing_but_the_layout() {
        let (asked, other) = (space("m", WHOLE, b"1"), space("m", WHOLE, b"2"));
        let spaces = stored(&[&asked, &other]);
        let is_generation = |spaces: &Spaces| {
            let other = spaces.other_space(asked.id(), &HASH);
            other.map(|other| other.is_generation)
        };
        spaces.set_generation(other.id(), other.layout);
        assert_eq!(is_generation(&spaces), Some(false));
        spaces.set_generation(asked.id(), asked.layout);
        assert_eq!(is_generation(&spaces), Some(true));
        let model = space("other", WHOLE, b"2");
        let spaces = stored(&[&asked, &model]);
        spaces.set_generation(asked.id(), asked.layout);
        spaces.set_generation(model.id(), model.layout);
        assert_eq!(is_generation(&spaces), Some(false));
    }
}
