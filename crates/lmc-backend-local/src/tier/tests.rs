//! Random operations against a model: index, leases, pins, eviction, quotas.
//!
//! The model does not predict victims. It learns of them from the events, and checks
//! that each victim could be evicted. It predicts everything else.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use lmc_backend::conformance::{check_value, fill_value, test_key};
use lmc_key::ChunkKey;
use lmc_memory::{ArenaConfig, Pool, PoolConfig};
use lmc_testkit::rounds;
use parking_lot::Mutex;
use proptest::prelude::*;

use super::*;
use crate::{
    Clear, Inserted, Leases, RemovedEvent, ReserveError, StoredEvent, Write, WriteGrant, WriteStart,
};

const KEYS: u64 = 48;
const UNIT: u64 = 64;
const CAPACITY: u64 = 24;
const CLEARS: [Clear; 3] = [Clear::Idle, Clear::Unleased, Clear::All];

#[derive(Debug, Default)]
struct Log(Mutex<Vec<Event>>);

#[derive(Clone, Debug)]
enum Event {
    Stored(ChunkKey),
    Removed(ChunkKey, Removal),
    Left(ChunkKey),
}

impl Event {
    fn key(&self) -> ChunkKey {
        match self {
            Self::Stored(key) | Self::Removed(key, _) | Self::Left(key) => *key,
        }
    }
}

impl LocalSink for Log {
    fn on_stored(&self, event: StoredEvent<'_>) {
        check_value(event.key, event.slot.bytes()).unwrap();
        self.0.lock().push(Event::Stored(*event.key));
    }

    fn on_removed(&self, event: RemovedEvent<'_>) {
        check_value(event.key, event.slot.bytes()).unwrap();
        self.0.lock().push(Event::Removed(*event.key, event.cause));
    }

    fn on_left(&self, event: RemovedEvent<'_>) {
        check_value(event.key, event.slot.bytes()).unwrap();
        self.0.lock().push(Event::Left(*event.key));
    }
}

#[derive(Clone, Debug)]
enum Op {
    /// Reserve a run of keys and commit the first of them.
    Write {
        start: u64,
        len: u64,
        commit: u64,
        tenant: u32,
        lease: bool,
    },
    /// Leave a reservation open, or close the oldest open one.
    Open {
        key: u64,
        tenant: u32,
    },
    Close {
        commit: bool,
    },
    LeaseLeading {
        start: u64,
        len: u64,
        owner: u64,
    },
    LeaseEach {
        start: u64,
        len: u64,
        owner: u64,
    },
    Release {
        which: usize,
        keep: usize,
    },
    Touch {
        start: u64,
        len: u64,
    },
    Lookup {
        start: u64,
        len: u64,
    },
    Pin {
        key: u64,
    },
    Unpin {
        key: u64,
    },
    Remove {
        start: u64,
        len: u64,
    },
    Clear {
        which: Clear,
    },
    Quota {
        tenant: u32,
        units: Option<u64>,
    },
    Maintain {
        max: usize,
    },
    Reserve {
        tenant: u32,
    },
}

fn op() -> impl Strategy<Value = Op> {
    let run = || (0..KEYS, 1..9_u64);
    prop_oneof![
        8 => (run(), 0..9_u64, 0..3_u32, any::<bool>()).prop_map(|((start, len), commit, tenant, lease)| {
            Op::Write { start, len, commit, tenant, lease }
        }),
        2 => (0..KEYS, 0..3_u32).prop_map(|(key, tenant)| Op::Open { key, tenant }),
        2 => any::<bool>().prop_map(|commit| Op::Close { commit }),
        4 => (run(), 0..3_u64).prop_map(|((start, len), owner)| Op::LeaseLeading { start, len, owner }),
        2 => (run(), 0..3_u64).prop_map(|((start, len), owner)| Op::LeaseEach { start, len, owner }),
        6 => (any::<usize>(), 0..4_usize).prop_map(|(which, keep)| Op::Release { which, keep }),
        2 => run().prop_map(|(start, len)| Op::Touch { start, len }),
        2 => run().prop_map(|(start, len)| Op::Lookup { start, len }),
        1 => (0..KEYS).prop_map(|key| Op::Pin { key }),
        2 => (0..KEYS).prop_map(|key| Op::Unpin { key }),
        2 => (0..KEYS, 1..3_u64).prop_map(|(start, len)| Op::Remove { start, len }),
        1 => prop::sample::select(&CLEARS[..]).prop_map(|which| Op::Clear { which }),
        2 => (0..3_u32, prop::option::of(1..CAPACITY)).prop_map(|(tenant, units)| Op::Quota { tenant, units }),
        2 => (0..9_usize).prop_map(|max| Op::Maintain { max }),
        2 => (0..3_u32).prop_map(|tenant| Op::Reserve { tenant }),
    ]
}

/// A resident chunk of the model.
#[derive(Clone, Debug)]
struct Chunk {
    incarnation: u64,
    tenant: TenantId,
    /// The incarnation of its parent, where it was resident when this one came or was used.
    parent: Option<u64>,
    pins: u32,
}

/// A reservation that was left open.
struct Open {
    reservation: WriteGrant,
    /// True if its key was removed since.
    void: bool,
}

struct Rig {
    tier: LocalTier,
    log: Arc<Log>,
    resident: BTreeMap<ChunkKey, Chunk>,
    incarnations: u64,
    /// Leases with the incarnation of each.
    leases: Vec<(Leases, Vec<(ChunkKey, u64)>)>,
    open: Vec<Open>,
    quotas: BTreeMap<u32, u64>,
    parents_evicted: u64,
    units: u64,
    /// Makes the pool, which has whole pages, as small as the test wants it.
    ballast: lmc_memory::ReservedSlot,
}

impl Rig {
    fn new(policy: PolicyKind, shards: usize, units: u64) -> Self {
        let capacity = CAPACITY * UNIT * units;
        let arena = ArenaConfig::anonymous(capacity as usize + 1)
            .build()
            .unwrap();
        let config = PoolConfig::default().with_align(UNIT as usize);
        let pool = Pool::new(Arc::new(arena), config).unwrap();
        let ballast = pool.reserve(pool.usage().capacity - capacity).unwrap();
        let log = Arc::new(Log::default());
        let tier = LocalConfig::default()
            .with_policy(policy)
            .with_shards(shards)
            .with_watermarks(0.9, 0.8)
            .build(pool, Some(Arc::clone(&log) as _))
            .unwrap();
        Self {
            tier,
            log,
            resident: BTreeMap::new(),
            incarnations: 0,
            leases: Vec::new(),
            open: Vec::new(),
            quotas: BTreeMap::new(),
            parents_evicted: 0,
            units,
            ballast,
        }
    }

    /// With one unit all chunks have one size, else up to as many units.
    fn len(&self, n: u64) -> u64 {
        UNIT * (1 + n % self.units) - n % 7
    }

    fn run(&self, start: u64, len: u64) -> Vec<u64> {
        (start..(start + len).min(KEYS)).collect()
    }

    fn keys(&self, start: u64, len: u64) -> Vec<ChunkKey> {
        self.run(start, len).into_iter().map(test_key).collect()
    }

    fn prompt(&self, start: u64, len: u64) -> Vec<(ChunkKey, Option<ChunkKey>)> {
        let numbers = self.run(start, len).into_iter();
        numbers.map(|n| (test_key(n), Self::parent(n))).collect()
    }

    /// Key `n` continues key `n - 1`, but every eighth begins a prompt.
    fn parent(n: u64) -> Option<ChunkKey> {
        (!n.is_multiple_of(8)).then(|| test_key(n - 1))
    }

    fn busy(&self, key: &ChunkKey) -> bool {
        self.resident[key].pins > 0 || self.leased(key)
    }

    fn leased(&self, key: &ChunkKey) -> bool {
        let chunk = &self.resident[key];
        let leased = |(_, held): &(Leases, Vec<(ChunkKey, u64)>)| {
            held.iter()
                .any(|(_, incarnation)| *incarnation == chunk.incarnation)
        };
        self.leases.iter().any(leased)
    }

    fn has_children(&self, key: &ChunkKey) -> bool {
        let incarnation = Some(self.resident[key].incarnation);
        self.resident
            .values()
            .any(|chunk| chunk.parent == incarnation)
    }

    fn class(&self, tenant: TenantId) -> Option<TenantId> {
        self.quotas.contains_key(&tenant.0).then_some(tenant)
    }

    /// Applies the tier's events, checking each eviction. `linked` are the chunks that the
    /// operation inserts or finds present: their parents are counted only after all of them are in.
    fn learn(&mut self, tenant: TenantId, linked: &[u64]) {
        let events = std::mem::take(&mut *self.log.0.lock());
        let mut linked_yet = linked.is_empty();
        for event in events {
            match event {
                Event::Stored(key) => {
                    assert!(!linked_yet);
                    self.incarnations += 1;
                    let chunk = Chunk {
                        incarnation: self.incarnations,
                        tenant,
                        parent: None,
                        pins: 0,
                    };
                    assert!(self.resident.insert(key, chunk).is_none(), "stored twice");
                }
                Event::Removed(key, cause) => {
                    if !linked_yet {
                        self.link(linked);
                        linked_yet = true;
                    }
                    if matches!(
                        cause,
                        Removal::Capacity | Removal::Quota | Removal::Watermark
                    ) {
                        self.check_eviction(&key);
                    }
                    assert!(self.resident.remove(&key).is_some(), "removed from nowhere");
                }
                Event::Left(_) => panic!("only a clear leaves chunks"),
            }
        }
        if !linked_yet {
            self.link(linked);
        }
        assert_eq!(self.tier.stats().evicted_parents, self.parents_evicted);
    }

    fn link(&mut self, linked: &[u64]) {
        for &n in linked {
            let parent = Self::parent(n).and_then(|parent| self.resident.get(&parent));
            let parent = parent.map(|parent| parent.incarnation);
            if let Some(chunk) = self.resident.get_mut(&test_key(n)) {
                chunk.parent = parent.or(chunk.parent);
            }
        }
    }

    fn check_eviction(&mut self, key: &ChunkKey) {
        assert_ne!(self.tier.policy(), PolicyKind::None);
        assert!(!self.busy(key), "evicted a leased or pinned chunk");
        if self.has_children(key) {
            self.parents_evicted += 1;
            let class = self.class(self.resident[key].tenant);
            let better = self.resident.iter().find(|(other, chunk)| {
                let same = self.class(chunk.tenant) == class;
                same && !self.busy(other) && !self.has_children(other)
            });
            assert!(
                better.is_none(),
                "evicted a parent although {better:?} was there"
            );
        }
    }

    fn idle(&self, class: Option<TenantId>) -> usize {
        let idle = |(key, chunk): &(&ChunkKey, &Chunk)| {
            self.class(chunk.tenant) == class && !self.busy(key)
        };
        self.resident.iter().filter(idle).count()
    }

    /// With chunks of one size, a refusal means that nothing was left that may go.
    fn check_refusal(&self, tenant: TenantId, error: &ReserveError) {
        if self.tier.policy() == PolicyKind::None || self.units > 1 {
            return;
        }
        let own = self.class(tenant);
        match error {
            ReserveError::NoSpace { .. } => {
                assert_eq!(self.idle(own), 0, "there was an own chunk to evict");
                assert_eq!(self.idle(None), 0, "there was a shared chunk to evict");
                let promised: u64 = self.quotas.values().sum();
                let over = self.quotas.iter().filter(|(id, quota)| {
                    let id = TenantId(**id);
                    let used = self.tier.tenant_usage(id).bytes;
                    used > **quota && self.idle(Some(id)) > 0
                });
                assert_eq!(
                    over.count(),
                    0,
                    "a tenant had too much, {promised} promised"
                );
            }
            ReserveError::Quota { len, quota, .. } => {
                assert_eq!(self.quotas.get(&tenant.0), Some(quota));
                assert!(
                    len > quota || self.idle(own) == 0,
                    "there was an own chunk to evict"
                );
            }
            other => panic!("{other}"),
        }
    }

    fn begin(&mut self, owner: u64, tenant: TenantId, n: u64) -> Option<WriteGrant> {
        let (key, len) = (test_key(n), self.len(n));
        let writes = |open: &Open| !open.void && open.reservation.mark.key() == key;
        let open = self.open.iter().any(writes);
        let started = self.tier.begin_write(OwnerId(owner), tenant, key, len);
        let was_there = self.resident.contains_key(&key);
        self.learn(tenant, &[]);
        match started {
            Ok(WriteStart::Present) => assert!(was_there),
            Ok(WriteStart::Busy) => assert!(open && !was_there),
            Ok(WriteStart::Reserved(mut reservation)) => {
                assert!(!open && !was_there);
                fill_value(&key, reservation.slot.bytes_mut());
                return Some(reservation);
            }
            Err(error) => {
                assert!(!open && !was_there);
                self.check_refusal(tenant, &error);
            }
        }
        None
    }

    fn inserted(&mut self, tenant: TenantId, asked: &[u64], answers: &[Inserted]) {
        for (n, answer) in asked.iter().zip(answers) {
            let expected = match self.resident.contains_key(&test_key(*n)) {
                true => Inserted::Present,
                false => Inserted::New,
            };
            assert_eq!(*answer, expected);
        }
        self.learn(tenant, asked);
    }

    fn keep(&mut self, leases: Leases, keys: &[ChunkKey]) {
        assert_eq!(leases.len(), keys.len());
        let held = |(slot, key): (&lmc_memory::SealedSlot, &ChunkKey)| {
            check_value(key, slot.bytes()).unwrap();
            (*key, self.resident[key].incarnation)
        };
        let held = leases.iter().zip(keys).map(held).collect();
        self.leases.push((leases, held));
    }

    fn apply(&mut self, op: Op) {
        match op {
            Op::Write {
                start,
                len,
                commit,
                tenant,
                lease,
            } => {
                let tenant = TenantId(tenant);
                let (mut writes, mut asked) = (Vec::new(), Vec::new());
                for n in self.run(start, len) {
                    if let Some(reservation) = self.begin(9, tenant, n) {
                        assert!(self.tier.is_writing(&test_key(n)));
                        asked.push(n);
                        writes.push(reservation.written(Self::parent(n)));
                    }
                }
                writes.truncate(commit as usize);
                asked.truncate(commit as usize);
                self.commit(tenant, &asked, writes, lease);
                assert_eq!(self.tier.writes_of(OwnerId(9)), 0);
            }
            Op::Open { key, tenant } => {
                let reservation = self.begin(8, TenantId(tenant), key);
                self.open.extend(reservation.map(|reservation| Open {
                    reservation,
                    void: false,
                }));
            }
            Op::Close { commit } => {
                if self.open.is_empty() {
                    return;
                }
                let Open { reservation, void } = self.open.remove(0);
                let key = reservation.mark.key();
                if !commit || void {
                    if commit {
                        let tenant = reservation.mark.tenant();
                        let write = reservation.written(None);
                        let (answers, leases) = self.tier.commit_leased(OwnerId(0), vec![write]);
                        assert_eq!((answers, leases.len()), (vec![Inserted::Cleared], 0));
                        // What came in before it may have to go now.
                        self.learn(tenant, &[]);
                    } else {
                        drop(reservation);
                    }
                    let again = |open: &Open| !open.void && open.reservation.mark.key() == key;
                    assert_eq!(self.tier.is_writing(&key), self.open.iter().any(again));
                    return;
                }
                let n = (0..KEYS).find(|&n| test_key(n) == key).unwrap();
                let tenant = reservation.mark.tenant();
                let write = reservation.written(Self::parent(n));
                self.commit(tenant, &[n], vec![write], false);
            }
            Op::LeaseLeading { start, len, owner } => {
                let keys = self.keys(start, len);
                let leading = keys
                    .iter()
                    .take_while(|key| self.resident.contains_key(key));
                let leading = leading.count();
                let leases = self.tier.lease_leading(OwnerId(owner), &keys);
                self.keep(leases, &keys[..leading]);
            }
            Op::LeaseEach { start, len, owner } => {
                let keys = self.keys(start, len);
                let leases = self.tier.lease(OwnerId(owner), &keys);
                for (key, lease) in keys.iter().zip(leases) {
                    assert_eq!(lease.is_some(), self.resident.contains_key(key));
                    if let Some(lease) = lease {
                        self.keep(lease.into(), &[*key]);
                    }
                }
            }
            Op::Release { which, keep } => {
                if self.leases.is_empty() {
                    return;
                }
                let which = which % self.leases.len();
                let (mut leases, mut held) = self.leases.swap_remove(which);
                // What was removed since still has its bytes.
                for (slot, (key, _)) in leases.iter().zip(&held) {
                    check_value(key, slot.bytes()).unwrap();
                }
                leases.truncate(keep);
                held.truncate(keep);
                if !held.is_empty() {
                    self.leases.push((leases, held));
                }
            }
            Op::Touch { start, len } => {
                self.tier.touch(&self.prompt(start, len));
                self.link(&self.run(start, len));
            }
            Op::Lookup { start, len } => {
                let keys = self.keys(start, len);
                let leading = keys
                    .iter()
                    .take_while(|key| self.resident.contains_key(key));
                assert_eq!(self.tier.lookup_leading(&keys), leading.count());
            }
            Op::Pin { key } => {
                let key = test_key(key);
                let chunk = self.resident.get_mut(&key);
                assert_eq!(self.tier.pin(&[key]), [chunk.is_some()]);
                if let Some(chunk) = chunk {
                    chunk.pins += 1;
                }
            }
            Op::Unpin { key } => {
                let key = test_key(key);
                let chunk = self.resident.get_mut(&key).filter(|chunk| chunk.pins > 0);
                assert_eq!(self.tier.unpin(&[key]), [chunk.is_some()]);
                if let Some(chunk) = chunk {
                    chunk.pins -= 1;
                }
            }
            Op::Remove { start, len } => {
                let keys = self.keys(start, len);
                let there: Vec<_> = keys
                    .iter()
                    .map(|key| self.resident.contains_key(key))
                    .collect();
                assert_eq!(self.tier.remove(&keys), there);
                for open in &mut self.open {
                    open.void |= keys.contains(&open.reservation.mark.key());
                }
                self.learn(TenantId(0), &[]);
            }
            Op::Clear { which } => {
                let busy: Vec<_> = self
                    .resident
                    .keys()
                    .filter(|key| match which {
                        Clear::Idle => self.busy(key),
                        Clear::Unleased => self.leased(key),
                        Clear::All => false,
                    })
                    .copied()
                    .collect();
                let before = self.resident.len();
                let left = busy;
                let mut cleared = self.tier.clear(which);
                cleared.left.sort();
                let removed = (before - left.len()) as u64;
                assert_eq!((cleared.removed, &cleared.left), (removed, &left));
                let is_left = |event: &mut Event| matches!(event, Event::Left(_));
                let reported = self
                    .log
                    .0
                    .lock()
                    .extract_if(.., is_left)
                    .collect::<Vec<_>>();
                let mut reported: Vec<_> = reported.iter().map(Event::key).collect();
                reported.sort();
                let is_reported = which == Clear::Unleased;
                assert_eq!(
                    reported,
                    if is_reported {
                        left.clone()
                    } else {
                        Vec::new()
                    }
                );
                self.learn(TenantId(0), &[]);
                assert_eq!(self.resident.keys().copied().collect::<Vec<_>>(), left);
                self.open.iter_mut().for_each(|open| open.void = true);
            }
            Op::Quota { tenant, units } => {
                let quota = units.map(|units| units * UNIT * self.units);
                match quota {
                    Some(quota) => self.quotas.insert(tenant, quota),
                    None => self.quotas.remove(&tenant),
                };
                self.tier.set_quota(TenantId(tenant), quota);
            }
            Op::Maintain { max } => {
                let used = self.tier.pool().usage().used;
                let done = self.tier.maintain(max);
                self.learn(TenantId(0), &[]);
                assert!(done.evicted <= max as u64);
                let low = self.tier.pool().usage().capacity * 8 / 10;
                assert!(
                    done.evicted == 0 || used > low,
                    "evicted below the low watermark"
                );
                assert!(!done.more || done.evicted == max as u64);
            }
            Op::Reserve { tenant } => {
                let tenant = TenantId(tenant);
                // A key that no other operation names.
                let key = test_key(KEYS);
                let reserved = self.tier.begin_write(OwnerId(0), tenant, key, UNIT);
                self.learn(tenant, &[]);
                if let Err(error) = reserved {
                    self.check_refusal(tenant, &error);
                }
            }
        }
    }

    fn commit(&mut self, tenant: TenantId, asked: &[u64], writes: Vec<Write>, lease: bool) {
        if !lease {
            let answers = self.tier.commit(writes);
            self.inserted(tenant, asked, &answers);
            return;
        }
        let (answers, leases) = self.tier.commit_leased(OwnerId(0), writes);
        let keys: Vec<_> = asked.iter().copied().map(test_key).collect();
        self.inserted(tenant, asked, &answers);
        self.keep(leases, &keys);
    }

    /// Everything that can be asked agrees with the model.
    fn check(&self) {
        let keys: Vec<_> = (0..KEYS).map(test_key).collect();
        let found = self.tier.contains(&keys);
        let mut bytes: HashMap<TenantId, u64> = HashMap::new();
        for (n, key) in keys.iter().enumerate() {
            let chunk = self.resident.get(key);
            assert_eq!(found[n], chunk.map(|_| self.len(n as u64)), "{key:?}");
            if let Some(chunk) = chunk {
                *bytes.entry(chunk.tenant).or_default() += self.len(n as u64);
            }
        }
        for tenant in (0..3).map(TenantId) {
            let usage = self.tier.tenant_usage(tenant);
            assert_eq!(usage.bytes, bytes.get(&tenant).copied().unwrap_or(0));
            assert_eq!(usage.quota, self.quotas.get(&tenant.0).copied());
            let open = self.open.iter().map(|open| &open.reservation);
            let open = open.filter(|open| open.mark.tenant() == tenant);
            assert_eq!(usage.writing, open.map(|open| open.slot.len()).sum::<u64>());
        }
        let usage = self.tier.usage();
        assert_eq!(usage.chunks, self.resident.len() as u64);
        assert_eq!(usage.bytes, bytes.values().sum::<u64>());
        assert_eq!(usage.writing, self.open.len() as u64);
        assert_eq!(
            usage.pinned,
            self.resident.values().filter(|c| c.pins > 0).count() as u64
        );
        for owner in (0..3).map(OwnerId) {
            let held = self
                .leases
                .iter()
                .filter(|(leases, _)| leases.owner() == owner);
            let held: usize = held.map(|(leases, _)| leases.len()).sum();
            assert_eq!(self.tier.leases_of(owner), held as u64);
        }
        let listed = self.tier.list_shown();
        assert_eq!(listed.len(), self.resident.len());
        for item in listed {
            let chunk = &self.resident[&item.key];
            assert_eq!((item.tenant, item.pinned), (chunk.tenant, chunk.pins > 0));
            let leases = self.leases.iter().flat_map(|(_, held)| held);
            let leases = leases.filter(|(_, incarnation)| *incarnation == chunk.incarnation);
            assert_eq!(item.leases as usize, leases.count());
        }
        let listed = self.tier.list_heads_first();
        assert_eq!(listed.len(), self.resident.len());
        assert!(listed.is_sorted_by_key(|chunk| chunk.depth));
        for chunk in listed {
            let before = |key: &ChunkKey| {
                let incarnation = self.resident[key].parent?;
                let mut resident = self.resident.iter();
                let found = resident.find(|(_, chunk)| chunk.incarnation == incarnation);
                found.map(|(key, _)| *key)
            };
            let chain = std::iter::successors(before(&chunk.key), before);
            assert_eq!(chunk.depth as usize, chain.count());
            assert_eq!(chunk.parent, before(&chunk.key));
        }
    }

    fn end(mut self) {
        self.leases.clear();
        self.open.clear();
        assert_eq!(self.tier.usage().leases, 0);
        assert_eq!(self.tier.lease_owners(), []);
        assert_eq!(self.tier.usage().writing, 0);
        self.tier.check();
        self.tier.clear(Clear::All);
        assert_eq!(self.tier.usage().bytes, 0);
        drop(self.ballast);
        assert_eq!(self.tier.pool().usage().used, 0);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(rounds(40, 400) as u32))]

    #[test]
    fn the_tier_agrees_with_the_model(
        policy in 0..4_usize,
        shards in 0..4_u32,
        units in 1..4_u64,
        ops in prop::collection::vec(op(), 1..160),
    ) {
        let mut rig = Rig::new(PolicyKind::ALL[policy], 1 << shards, units);
        for op in ops {
            rig.apply(op);
            rig.check();
        }
        rig.end();
    }
}
