//! Random operations against a tier and a map.

use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant, SystemTime};

use lmc_key::ChunkKey;
use lmc_memory::{Arena, ArenaConfig, Pool, PoolConfig};

use super::{Rng, block_on, check_value, fill_value, test_key};
use crate::{
    Answers, Backend, BackendError, Clears, Cursor, FailedSlot, Health, LoadItem, Loaded,
    LocateHint, Located, Sharing, StartId, StoreItem, Stored, WriteBackend,
};
use futures_util::{FutureExt, StreamExt};

/// The guarantee of the tier under test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guarantee {
    /// A stored chunk is present until it is removed, and nothing fails. A tier that evicts gives this
    /// guarantee too as long as it has more capacity than the kit fills: [`Conformance::bytes_needed`].
    Exact,
    /// A chunk may vanish and an operation may fail at any time. Bytes that are read are right. A chunk that
    /// was removed or never stored is not found, unless a store of it failed before: a server may carry out
    /// such a store after the removal, for example when only its answer was cut off.
    Lossy,
}

/// Number of different keys.
const KEYS: u64 = 48;
/// Bytes of the largest chunk.
const MAX_LEN: u64 = 20_000;

/// The kit. The doc comment of each setter names its default.
#[derive(Clone, Debug)]
pub struct Conformance {
    guarantee: Guarantee,
    seed: u64,
    operations: usize,
    tolerance: Duration,
    arena: Option<Arc<Arena>>,
}

/// Counts of a run, so that a test can tell that the run did something.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Tally {
    /// Chunks written.
    pub written: u64,
    /// Chunks loaded and compared byte for byte.
    pub hits: u64,
    /// Loads that missed.
    pub misses: u64,
    /// Keys that failed.
    pub failures: u64,
    /// Chunks removed.
    pub removed: u64,
    /// Operations dropped half-way.
    pub cancelled: u64,
}

/// The model's knowledge of a key that may be present.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Known {
    /// The chunk was stored, and not removed since.
    Stored,
    /// A store or a removal failed or was dropped.
    Unsure,
}

impl Conformance {
    /// Makes a kit with a fresh seed, or with the seed in the environment variable `LMC_SEED`.
    pub fn new(guarantee: Guarantee) -> Self {
        let fresh = || {
            let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
            now.map_or(1, |now| now.as_nanos() as u64)
        };
        let given = env::var("LMC_SEED").ok().and_then(|seed| seed.parse().ok());
        Self {
            guarantee,
            seed: given.unwrap_or_else(fresh),
            operations: 500,
            tolerance: Duration::from_secs(30),
            arena: None,
        }
    }

    /// Sets the seed.
    pub fn with_seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Sets the number of batches. Default: 500.
    pub fn with_operations(mut self, operations: usize) -> Self {
        self.operations = operations;
        self
    }

    /// Sets the time for which slots of cancelled operations may stay away, and by which an operation may
    /// overrun its deadline. Default: 30 s.
    pub fn with_tolerance(mut self, tolerance: Duration) -> Self {
        self.tolerance = tolerance;
        self
    }

    /// Sets the memory of the slots; all of it must be free. Default: memory of the kit's own.
    pub fn with_arena(mut self, arena: Arc<Arena>) -> Self {
        self.arena = Some(arena);
        self
    }

    /// Returns the most bytes that the kit stores at one time, each chunk rounded up to 4,096 bytes.
    pub fn bytes_needed(&self) -> u64 {
        KEYS * MAX_LEN.next_multiple_of(4096)
    }

    /// Runs the operations, closes the tier, and checks that every slot came back.
    ///
    /// # Panics
    /// If the tier breaks its contract; the seed is printed first.
    pub fn run(&self, backend: &dyn WriteBackend) -> Tally {
        let is_offered = backend.writer().is_some();
        assert!(
            is_offered,
            "an engine writes to a tier by `Backend::writer` only"
        );
        self.run_beside(backend, backend)
    }

    /// Runs the operations on a tier that only reads, and closes it. The tier must find what the kit stores
    /// with `writer`, and must not find what the kit removes with it.
    ///
    /// # Panics
    /// If the tier breaks its contract; the seed is printed first.
    pub fn run_beside(&self, backend: &dyn Backend, writer: &dyn WriteBackend) -> Tally {
        let run = AssertUnwindSafe(|| block_on(Run::new(self, backend, writer).all()));
        catch_unwind(run).unwrap_or_else(|panic| {
            let (name, seed) = (backend.name(), self.seed);
            eprintln!("conformance of {name} failed; rerun with LMC_SEED={seed}");
            resume_unwind(panic)
        })
    }
}

struct Run<'a> {
    kit: &'a Conformance,
    backend: &'a dyn Backend,
    /// The tier itself, or the one that it reads from.
    writer: &'a dyn WriteBackend,
    pool: Pool,
    rng: Rng,
    model: BTreeMap<ChunkKey, Known>,
    /// Keys of which a store failed or was dropped: in a lossy tier it may take effect after a
    /// removal.
    late: BTreeSet<ChunkKey>,
    lens: BTreeMap<ChunkKey, u64>,
    /// Payload bytes of each key, by its number.
    lens_by_number: Vec<u64>,
    keys: Vec<ChunkKey>,
    /// The clears so far, after which the keys are named.
    clears: Clears,
    start: StartId,
    /// True if the tier has acknowledged the last of them.
    is_cleared: bool,
    tally: Tally,
}

impl<'a> Run<'a> {
    fn new(kit: &'a Conformance, backend: &'a dyn Backend, writer: &'a dyn WriteBackend) -> Self {
        let mut rng = Rng::new(kit.seed);
        let len = |rng: &mut Rng| match rng.below(4) {
            0 => MAX_LEN,
            1 => 1 + rng.below(MAX_LEN.min(16)),
            _ => 1 + rng.below(MAX_LEN),
        };
        let lens = (0..KEYS).map(|_| len(&mut rng)).collect();
        // A batch has at most 16 chunks, and a cancelled one may hold its slots for a while.
        let bytes = MAX_LEN.next_multiple_of(4096) * 16 * 4;
        let arena = kit.arena.clone().unwrap_or_else(|| {
            let arena = ArenaConfig::anonymous(bytes as usize).build();
            Arc::new(arena.expect("a test machine has the memory for a few batches"))
        });
        let pool = Pool::new(arena, PoolConfig::default());
        let mut this = Self {
            kit,
            backend,
            writer,
            pool: pool.expect("the default alignment fits every arena"),
            rng,
            model: BTreeMap::new(),
            late: BTreeSet::new(),
            lens: BTreeMap::new(),
            lens_by_number: lens,
            keys: Vec::new(),
            clears: Clears::clone(&backend.clears()),
            start: StartId::new(
                kit.seed
                    .to_le_bytes()
                    .repeat(2)
                    .try_into()
                    .expect("16 bytes"),
            ),
            is_cleared: true,
            tally: Tally::default(),
        };
        this.name_keys();
        this
    }

    fn exact(&self) -> bool {
        self.kit.guarantee == Guarantee::Exact
    }

    fn deadline(&self) -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    fn some_keys(&mut self) -> Vec<ChunkKey> {
        let count = self.rng.below(17) as usize;
        let start = self.rng.below(self.keys.len() as u64) as usize;
        if self.rng.chance(500) {
            let run = self.keys.iter().cycle().skip(start).take(count);
            return run.copied().collect();
        }
        let pick = |_| self.keys[self.rng.below(KEYS) as usize];
        (0..count).map(pick).collect()
    }

    async fn all(mut self) -> Tally {
        assert!(!matches!(self.backend.health(), Health::Down { .. }));
        self.empty_batches().await;
        // However few operations there are.
        self.short_deadline().await;
        for _ in 0..self.kit.operations {
            match self.rng.below(100) {
                0..30 => self.store().await,
                30..60 => self.load().await,
                60..78 => self.locate().await,
                78..80 => self.short_deadline().await,
                80..90 => self.remove().await,
                90..94 => self.list().await,
                94..96 => self.usage().await,
                96 => self.clear().await,
                _ => self.cancel().await,
            }
        }
        self.close().await;
        self.slots_come_back();
        self.tally
    }

    async fn empty_batches(&mut self) {
        let deadline = self.deadline();
        assert!(
            self.backend
                .locate(&[], LocateHint::none(), deadline)
                .await
                .is_empty()
        );
        assert!(self.backend.load(vec![], deadline).next().await.is_none());
        assert!(self.writer.store(vec![], deadline).next().await.is_none());
        assert!(self.writer.remove(&[], deadline).await.is_empty());
    }

    /// Names the keys after the clears so far.
    fn name_keys(&mut self) {
        let id = self.clears.id();
        let named = |key: ChunkKey| ChunkKey {
            space: key.space.after(id),
            ..key
        };
        self.keys = (0..KEYS).map(test_key).map(named).collect();
        let lens = self.lens_by_number.iter().copied();
        self.lens.extend(self.keys.iter().copied().zip(lens));
    }

    fn one_more_clear(&self) -> Clears {
        let mut clears = self.clears.clone();
        clears.count(self.start).expect("one process");
        clears
    }

    /// Waits for the answers to a batch: one for each key.
    async fn answers<T>(&self, answers: Answers<'_, T>, len: usize) -> Vec<T> {
        let mut ordered: Vec<Option<T>> = std::iter::repeat_with(|| None).take(len).collect();
        let mut answers = answers;
        while let Some((index, answer)) = answers.next().await {
            let answered = ordered
                .get_mut(index)
                .expect("an answer to a key of the batch");
            assert!(answered.is_none(), "key {index} is answered twice");
            *answered = Some(answer);
        }
        let answer = |answer: Option<T>| answer.expect("one answer for each key");
        ordered.into_iter().map(answer).collect()
    }

    fn items_to_store(&mut self) -> Vec<StoreItem> {
        let mut parent = None;
        let mut items = Vec::new();
        for key in self.some_keys() {
            let slot = self.pool.reserve(self.lens[&key]);
            let mut slot = slot.expect("every slot of earlier batches came back");
            fill_value(&key, slot.bytes_mut());
            let item = StoreItem::new(key, slot.written().seal());
            items.push(match parent.replace(key) {
                Some(parent) => item.with_parent(parent),
                None => item,
            });
        }
        items
    }

    /// Notes that a store of a key has failed or was dropped.
    fn may_be_stored(&mut self, key: ChunkKey) {
        self.model.entry(key).or_insert(Known::Unsure);
        self.late.insert(key);
    }

    async fn store(&mut self) {
        let items = self.items_to_store();
        let keys: Vec<_> = items.iter().map(|item| item.key).collect();
        let answers = self.writer.store(items, self.deadline());
        let answers = self.answers(answers, keys.len()).await;
        // A tier may work on a batch in any order, so the first of two equal keys may find that
        // the second was written.
        let twice = |key: &ChunkKey| keys.iter().filter(|other| *other == key).count() > 1;
        for (&key, answer) in keys.iter().zip(answers) {
            let known = self.model.get(&key).copied();
            match answer {
                Ok(Stored::Written) => {
                    let is_new = known != Some(Known::Stored) || !self.exact();
                    assert!(is_new, "{key:?} was written twice");
                    self.tally.written += 1;
                    self.model.insert(key, Known::Stored);
                }
                Ok(Stored::Present) => {
                    let possible = known.is_some() || twice(&key);
                    assert!(possible, "{key:?} is present and was never stored");
                    self.model.insert(key, Known::Stored);
                }
                Ok(Stored::Declined) => {
                    assert!(!self.exact(), "{key:?} was declined by an exact tier");
                }
                Err(error) => {
                    assert!(!self.exact(), "storing {key:?}: {error}");
                    self.tally.failures += 1;
                    // A chunk that was there stays there; one that was not may be now.
                    self.may_be_stored(key);
                }
            }
        }
    }

    fn items_to_load(&mut self) -> Vec<LoadItem> {
        let mut items = Vec::new();
        for key in self.some_keys() {
            let mut len = self.lens[&key];
            if self.rng.chance(50) {
                len = match self.rng.chance(500) && len > 1 {
                    true => len - 1,
                    false => len + 1,
                };
            }
            let slot = self.pool.reserve(len);
            let mut slot = slot.expect("every slot of earlier batches came back");
            // A tier that says "hit" without writing does not get away with old bytes.
            slot.bytes_mut().fill(0xA5);
            items.push(LoadItem::new(key, slot));
        }
        items
    }

    async fn load(&mut self) {
        let mut items = self.items_to_load();
        if self.rng.chance(700) {
            self.add_handles(&mut items).await;
        }
        let asked: Vec<_> = items
            .iter()
            .map(|i| (i.key, i.slot.len(), i.slot.offset()))
            .collect();
        let loaded = self.backend.load(items, self.deadline());
        let loaded = self.answers(loaded, asked.len()).await;
        for ((key, len, offset), loaded) in asked.into_iter().zip(loaded) {
            let known = self.model.get(&key).copied();
            let fits = len == self.lens[&key];
            match loaded {
                Loaded::Hit(slot) => {
                    assert_eq!((slot.len(), slot.offset()), (len, offset), "not its slot");
                    assert!(fits, "{key:?} was loaded into a slot of the wrong length");
                    if let Err(mismatch) = check_value(&key, slot.bytes()) {
                        panic!("a wrong byte: {mismatch}");
                    }
                    assert!(known.is_some(), "{key:?} was found and is not there");
                    self.tally.hits += 1;
                }
                Loaded::Miss(slot) => {
                    assert_eq!((slot.len(), slot.offset()), (len, offset), "not its slot");
                    let lost = known == Some(Known::Stored) && self.exact();
                    assert!(!lost, "{key:?} was stored and is not found");
                    self.tally.misses += 1;
                }
                Loaded::Failed { error, slot } => {
                    let due = !fits && matches!(error, BackendError::Length { .. });
                    assert!(due || !self.exact(), "loading {key:?}: {error}");
                    if let FailedSlot::Released(slot) = slot {
                        assert_eq!((slot.len(), slot.offset()), (len, offset), "not its slot");
                    }
                    self.tally.failures += 1;
                }
            }
        }
    }

    /// Locates chunks that are to be loaded.
    async fn add_handles(&self, items: &mut [LoadItem]) {
        let keys: Vec<ChunkKey> = items.iter().map(|item| item.key).collect();
        let (hint, deadline) = (LocateHint::none(), self.deadline());
        let located = self.backend.locate(&keys, hint, deadline).await;
        for (item, located) in items.iter_mut().zip(&located) {
            match located {
                // A caller that knows the length gives a slot of that length.
                Ok(Located::Present(location)) if location.len == item.slot.len() => {
                    item.handle.clone_from(&location.handle);
                }
                _ => {}
            }
        }
        self.check_located(&keys, located);
    }

    async fn locate(&mut self) {
        let keys = self.some_keys();
        let located = self
            .backend
            .locate(&keys, LocateHint::none(), self.deadline())
            .await;
        self.check_located(&keys, located);
        if let Some(index) = self.backend.index() {
            self.check_located(&keys, index.locate_now(&keys));
        }
    }

    fn check_located(&self, keys: &[ChunkKey], located: Vec<Result<Located, BackendError>>) {
        assert_eq!(located.len(), keys.len(), "one answer for each key");
        for (key, located) in keys.iter().zip(located) {
            let known = self.model.get(key).copied();
            let location = match located {
                Ok(located) => located.present(),
                Err(error) => {
                    assert!(!self.exact(), "looking up {key:?}: {error}");
                    continue;
                }
            };
            if let Some(location) = location {
                assert!(known.is_some(), "{key:?} is said to be there");
                assert_eq!(location.len, self.lens[key], "the length of {key:?}");
            } else {
                let lost = known == Some(Known::Stored) && self.exact();
                assert!(!lost, "{key:?} was stored and is not there");
            }
        }
    }

    /// Asks with a deadline that passes at once: every operation ends soon after it.
    async fn short_deadline(&mut self) {
        let keys = self.some_keys();
        let items = self.items_to_load();
        let len = items.len();
        let deadline = Instant::now() + Duration::from_millis(1);
        let located = self
            .backend
            .locate(&keys, LocateHint::none(), deadline)
            .await;
        assert_eq!(located.len(), keys.len(), "one answer for each key");
        let loaded = self.backend.load(items, deadline);
        drop(self.answers(loaded, len).await);
        let late = deadline.elapsed();
        assert!(
            late <= self.kit.tolerance,
            "ended {late:?} after the deadline"
        );
        self.slots_come_back();
    }

    async fn remove(&mut self) {
        let keys = self.some_keys();
        let keys = &keys[..keys.len().min(6)];
        let removed = self.writer.remove(keys, self.deadline()).await;
        assert_eq!(removed.len(), keys.len(), "one answer for each key removed");
        let before = self.model.clone();
        let mut failed = Vec::new();
        for (key, removed) in keys.iter().zip(&removed) {
            match removed {
                Ok(was_there) => {
                    let kept = self.backend.sharing() == Sharing::Shared;
                    let possible = before.contains_key(key) || !was_there || kept;
                    assert!(possible, "{key:?} was removed from nowhere");
                    self.tally.removed += u64::from(*was_there);
                    match self.late.contains(key) && !self.exact() {
                        true => self.model.insert(*key, Known::Unsure),
                        false => self.model.remove(key),
                    };
                }
                Err(error) => {
                    assert!(!self.exact(), "removing {key:?}: {error}");
                    self.tally.failures += 1;
                    failed.push(*key);
                }
            }
        }
        for key in failed {
            if let Some(known) = self.model.get_mut(&key) {
                *known = Known::Unsure;
            }
        }
        if !self.exact() {
            return;
        }
        for (key, known) in before {
            // Of two equal keys in a batch one was there, whichever came first.
            let answers = keys
                .iter()
                .zip(&removed)
                .filter(|(other, _)| **other == key);
            let asked = answers.clone().count() > 0;
            let times = answers
                .filter(|(_, removed)| matches!(removed, Ok(true)))
                .count();
            let lost = known == Known::Stored && asked && times != 1;
            assert!(!lost, "{key:?} was stored and was removed {times} times");
        }
    }

    async fn list(&mut self) {
        let limit = 1 + self.rng.below(20) as usize;
        let (mut cursor, mut listed) = (Cursor::START, BTreeSet::new());
        // Each page may be empty, but a listing of a few keys must come to its end.
        for _ in 0..10_000 {
            let page = match self.writer.list(cursor, limit, self.deadline()).await {
                Ok(page) => page,
                Err(error) => {
                    assert!(!self.exact(), "listing: {error}");
                    return;
                }
            };
            assert!(page.items.len() <= limit, "a page longer than asked for");
            for item in page.items {
                let key = item.key;
                let possible =
                    self.model.contains_key(&key) || self.backend.sharing() == Sharing::Shared;
                assert!(possible, "{key:?} is listed and not there");
                assert_eq!(item.len, self.lens[&key], "the length of {key:?}");
                assert!(listed.insert(key), "{key:?} is listed twice");
            }
            match page.next {
                Some(next) => cursor = next,
                None => {
                    for (key, known) in &self.model {
                        let missing = *known == Known::Stored && !listed.contains(key);
                        assert!(!missing || !self.exact(), "{key:?} is not listed");
                    }
                    return;
                }
            }
        }
        panic!("the listing does not end");
    }

    async fn usage(&mut self) {
        let Some(usage) = self.backend.usage() else {
            return;
        };
        let stored = |known: &&Known| **known == Known::Stored;
        let sure = self.model.values().filter(stored).count() as u64;
        assert!(
            !self.exact() || usage.chunks >= sure,
            "{usage:?}, stored {sure}"
        );
        if self.backend.sharing() == Sharing::Shared {
            return;
        }
        assert!(usage.chunks <= self.model.len() as u64, "{usage:?}");
        if sure == self.model.len() as u64 && self.exact() {
            let bytes: u64 = self.model.keys().map(|key| self.lens[key]).sum();
            assert_eq!(usage.bytes, bytes, "payload bytes of the chunks");
        }
    }

    /// Clears while a store is in progress; the store ends or is dropped afterwards. Its chunks have names
    /// from before the clear.
    async fn clear(&mut self) {
        let items = self.items_to_store();
        let keys: Vec<_> = items.iter().map(|item| item.key).collect();
        let mut storing = self.writer.store(items, self.deadline());
        let mut begun = None;
        poll_fn(|context| {
            begun = Some(storing.poll_next_unpin(context).is_ready());
            Poll::Ready(())
        })
        .await;
        let is_private = self.backend.sharing() == Sharing::Private;
        let is_repeated = self.is_cleared && self.rng.chance(200);
        if !is_repeated {
            self.clears = self.one_more_clear();
        }
        let clears = Arc::new(self.clears.clone());
        let result = self.backend.clear(clears, self.deadline()).await;
        let sure = self.model.values();
        let sure = sure.filter(|known| **known == Known::Stored).count() as u64;
        match &result {
            Ok(cleared) if is_repeated => {
                let removed = cleared.removed;
                assert!(!self.exact() || removed == 0, "cleared twice: {removed}");
            }
            Ok(cleared) => {
                let removed = cleared.removed;
                let removes = self.exact() && is_private;
                assert!(!removes || removed >= sure, "{removed} of {sure} are gone");
                self.tally.removed += removed;
                self.model.clear();
                self.late.clear();
            }
            Err(error) => {
                assert!(!self.exact(), "clearing: {error}");
                self.tally.failures += 1;
                self.model
                    .values_mut()
                    .for_each(|known| *known = Known::Unsure);
            }
        }
        self.is_cleared = result.is_ok();
        let noted = self.backend.clears();
        let is_noted = !self.exact() || noted.contains(&self.clears);
        assert!(is_noted, "cleared at {:?}, noted is {noted:?}", self.clears);
        if is_private && result.is_ok() && !is_repeated {
            let before = std::mem::take(&mut self.keys);
            let others: Vec<ChunkKey> = before.into_iter().filter(|k| !keys.contains(k)).collect();
            let deadline = self.deadline();
            let located = self
                .backend
                .locate(&others, LocateHint::none(), deadline)
                .await;
            // None is in the model.
            self.check_located(&others, located);
        }
        self.name_keys();
        for key in keys {
            self.may_be_stored(key);
        }
        if self.rng.chance(500) {
            storing.for_each(|_| std::future::ready(())).await;
        } else {
            drop(storing);
        }
        self.slots_come_back();
    }

    /// Starts an operation and drops it after one poll.
    async fn cancel(&mut self) {
        self.tally.cancelled += 1;
        let deadline = self.deadline();
        match self.rng.below(3) {
            0 => {
                let items = self.items_to_store();
                for item in &items {
                    self.may_be_stored(item.key);
                }
                once(self.writer.store(items, deadline).next().map(drop)).await;
            }
            1 => {
                let items = self.items_to_load();
                once(self.backend.load(items, deadline).next().map(drop)).await;
            }
            _ => {
                let keys = self.some_keys();
                let keys = &keys[..keys.len().min(4)];
                for key in keys {
                    if let Some(known) = self.model.get_mut(key) {
                        *known = Known::Unsure;
                    }
                }
                once(self.writer.remove(keys, deadline)).await;
            }
        }
        self.slots_come_back();
    }

    async fn close(&mut self) {
        let deadline = self.deadline();
        // A tier without chunks has nothing to close, and continues to answer with misses.
        let holds_nothing = self.tally.written == 0;
        for round in 0..2 {
            let closed = self.backend.close(deadline).await;
            closed.unwrap_or_else(|error| panic!("closing, round {round}: {error}"));
        }
        if holds_nothing {
            return;
        }
        let key = self.keys[0];
        let found = self
            .backend
            .locate(&[key], LocateHint::none(), deadline)
            .await;
        let ok = matches!(found[..], [Err(BackendError::Closed)]);
        assert!(
            ok || !self.exact(),
            "looking up in a closed tier: {found:?}"
        );
        let clears = Arc::new(self.one_more_clear());
        let cleared = self.backend.clear(clears, deadline).await;
        let ok = matches!(cleared, Err(BackendError::Closed));
        assert!(ok || !self.exact(), "clearing a closed tier: {cleared:?}");
        let usage = self.backend.usage();
        assert!(
            usage.is_none() || !self.exact(),
            "usage of a closed tier: {usage:?}"
        );
        if self.backend.writer().is_some() {
            self.write_when_closed(key, deadline).await;
        }
    }

    async fn write_when_closed(&self, key: ChunkKey, deadline: Instant) {
        let mut slot = self.pool.reserve(self.lens[&key]).expect("slots came back");
        fill_value(&key, slot.bytes_mut());
        let item = StoreItem::new(key, slot.written().seal());
        let stored = self.writer.store(vec![item], deadline);
        let stored = self.answers(stored, 1).await;
        let ok = matches!(stored[..], [Err(BackendError::Closed)]);
        assert!(
            ok || !self.exact(),
            "storing into a closed tier: {stored:?}"
        );
        let removed = self.writer.remove(&[key], deadline).await;
        let ok = matches!(removed[..], [Err(BackendError::Closed)]);
        assert!(
            ok || !self.exact(),
            "removing from a closed tier: {removed:?}"
        );
        let listed = self.writer.list(Cursor::START, 1, deadline).await;
        let ok = matches!(listed, Err(BackendError::Closed));
        assert!(ok || !self.exact(), "listing a closed tier: {listed:?}");
    }

    /// Cancelled operations may hold slots until the device is done with them, not for ever.
    fn slots_come_back(&self) {
        let deadline = Instant::now() + self.kit.tolerance;
        while self.pool.usage().slots > 0 {
            let used = self.pool.usage();
            assert!(
                Instant::now() < deadline,
                "slots did not come back: {used:?}"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Polls once, and drops the future whether it was ready or not.
async fn once<F: Future + Unpin>(mut future: F) {
    poll_fn(|context| {
        let _ = std::pin::Pin::new(&mut future).poll(context);
        Poll::Ready(())
    })
    .await;
}
