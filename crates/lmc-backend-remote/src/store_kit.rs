//! The kit that every store passes.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use lmc_backend::conformance::{check_value, fill_value, test_key};
use lmc_backend::{Answers, in_order, now};
use lmc_key::ChunkKey;
use lmc_key::ClearsId;
use lmc_memory::{ArenaConfig, Pool, PoolConfig, checksum};

use crate::format::{ChunkFolder, Generation, Header, Name, Refusal, Scope, ValueName};
use crate::store::{GetItem, Got, Put, PutItem, PutMode, Store, StoreError, Version};

/// Number of values.
const KEYS: u64 = 24;
/// Bytes of the pool; most of them are never touched.
const POOL: usize = 64 << 20;

/// Checks the rules of [`Store`] on an empty store, and closes it. Must be awaited on a runtime with time.
/// `timeout` is for each answer of a slow store.
///
/// # Panics
/// If the store breaks a rule.
pub async fn check_store(store: Arc<dyn Store>, timeout: Duration) {
    let arena = ArenaConfig::anonymous(POOL).build();
    let arena = Arc::new(arena.expect("a test machine has the memory"));
    let pool = Pool::new(arena, PoolConfig::default());
    let kit = Kit {
        store,
        pool: pool.expect("the default alignment fits every arena"),
        timeout,
    };
    kit.empty_batches().await;
    kit.values().await;
    kit.replaced().await;
    kit.listings().await;
    kit.removals().await;
    kit.small_objects().await;
    kit.clears().await;
    kit.late().await;
    kit.closed().await;
    assert_eq!(kit.pool.usage().slots, 0, "every slot came back");
}

/// Checks that of several clients that have read the same version of [`Name::Clears`], or found none, exactly
/// one replaces it. The store must be empty, and is empty again afterwards.
///
/// # Panics
/// If none or several of them replace it.
pub async fn check_swaps(clients: &[Arc<dyn Store>], timeout: Duration) {
    let soon = || now() + timeout;
    let mut version = None;
    for round in 0..20 {
        let text = |n: usize| format!("{n} of round {round}");
        let swaps = clients.iter().enumerate();
        let swaps =
            swaps.map(|(n, client)| client.swap_clears(text(n).into(), version.clone(), soon()));
        let swapped = futures_util::future::join_all(swaps).await.into_iter();
        // A client that loses to another one may get an error of the store instead.
        let is_winner = |swapped: Result<bool, _>| swapped.is_ok_and(|is_written| is_written);
        let winners = swapped
            .enumerate()
            .filter_map(|(n, s)| is_winner(s).then(|| text(n)));
        let winners: Vec<String> = winners.collect();
        let found = clients[round % clients.len()]
            .read_clears(100, soon())
            .await;
        let (bytes, found) = found.expect("a read").expect("one has written");
        assert_eq!(winners, [String::from_utf8_lossy(&bytes)]);
        version = Some(found);
    }
    let removed = clients[0].remove(&[Name::Clears], soon()).await;
    assert!(matches!(removed[..], [Ok(true)]), "{removed:?}");
}

/// Number of values that replace each other in [`check_replaced_values`].
const REPLACED: u64 = 60;

/// Checks that a reader of a value that a writer replaces continuously always finds one whole value. `writer`
/// and `reader` are two clients of one store.
///
/// # Panics
/// If the reader finds half a value, or none.
pub async fn check_replaced_values(
    writer: Arc<dyn Store>,
    reader: Arc<dyn Store>,
    timeout: Duration,
) {
    let arena = ArenaConfig::anonymous(POOL).build();
    let arena = Arc::new(arena.expect("a test machine has the memory"));
    let pool = Pool::new(arena, PoolConfig::default()).expect("the default alignment");
    let soon = || now() + timeout;
    let key = keys().into_iter().max_by_key(len).expect("some keys");
    let is_written = AtomicBool::new(false);
    let rounds_read = AtomicUsize::new(0);
    let put = |round: u64| {
        let mut slot = pool.reserve(len(&key)).expect("the slots came back");
        slot.bytes_mut().fill(round as u8);
        let sum = checksum(slot.bytes_mut());
        let slot = slot.written().seal();
        let item = PutItem {
            folder: FOLDER,
            header: Header::raw(key, writer.payload_offset(), slot.len(), sum),
            slot,
            mode: PutMode::Replace,
        };
        writer.put(vec![item], soon())
    };
    let write = async {
        // A busy machine may read late.
        let late = soon();
        for round in 0.. {
            let is_enough = rounds_read.load(Ordering::SeqCst) > 1 || now() >= late;
            if round >= REPLACED && is_enough {
                break;
            }
            let put = all(put(round), 1).await.pop();
            assert!(matches!(put, Some(Ok(Put::Written))), "{put:?}");
        }
        is_written.store(true, Ordering::SeqCst);
    };
    assert!(all(put(0), 1).await.pop().is_some_and(|put| put.is_ok()));
    let mut rounds = BTreeSet::new();
    let read = async {
        while !is_written.load(Ordering::SeqCst) {
            let slot = pool.reserve(len(&key)).expect("the slots came back");
            let name = FOLDER.value(key);
            let got = reader.get(vec![GetItem { name, slot }], soon());
            let got = all(got, 1).await.pop();
            let Some(Got::Value { header, slot, .. }) = got else {
                panic!("{got:?}");
            };
            let slot = slot.written().seal();
            let round = slot.bytes()[0];
            assert!(
                slot.bytes() == vec![round; slot.bytes().len()],
                "half a value"
            );
            assert_eq!(checksum(slot.bytes()), header.plain_sum);
            let head = reader.heads(&[name], soon()).await.pop();
            let head = head.expect("an answer").expect("a head");
            assert!(head.expect("the value is there").check(&key).is_ok());
            rounds.insert(round);
            rounds_read.store(rounds.len(), Ordering::SeqCst);
        }
    };
    tokio::join!(write, read);
    assert!(
        rounds.len() > 1,
        "no read while it was replaced: {rounds:?}"
    );
}

struct Kit {
    store: Arc<dyn Store>,
    pool: Pool,
    timeout: Duration,
}

/// Returns the length of a chunk: below, at and above whole blocks, and one of 1 MiB.
fn len(key: &ChunkKey) -> u64 {
    [1, 4095, 4096, 70_001, 1 << 20][key.fold() as usize % 5]
}

fn keys() -> Vec<ChunkKey> {
    (0..KEYS).map(test_key).collect()
}

/// Folder of the values.
const FOLDER: ChunkFolder = folder(1);

const fn folder(n: u8) -> ChunkFolder {
    ChunkFolder {
        generation: Generation::new([7; 8]),
        clears: ClearsId::new([n; 16]),
    }
}

/// Returns the key that determines the bytes of a value written in a round.
fn of_round(key: &ChunkKey, round: u16) -> ChunkKey {
    ChunkKey {
        group: round,
        ..*key
    }
}

fn names(keys: &[ChunkKey]) -> Vec<ValueName> {
    keys.iter().map(|&key| FOLDER.value(key)).collect()
}

async fn all<T>(answers: Answers<'_, T>, len: usize) -> Vec<T> {
    let answers = in_order(answers, len).await.into_iter();
    let answer = |answer: Option<T>| answer.expect("one answer for each item");
    answers.map(answer).collect()
}

impl Kit {
    fn soon(&self) -> Instant {
        now() + self.timeout
    }

    fn put_item(&self, key: ChunkKey, round: u16, mode: PutMode) -> PutItem {
        let mut slot = self.pool.reserve(len(&key)).expect("the slots came back");
        fill_value(&of_round(&key, round), slot.bytes_mut());
        let sum = checksum(slot.bytes_mut());
        let slot = slot.written().seal();
        PutItem {
            folder: FOLDER,
            header: Header::raw(key, self.store.payload_offset(), slot.len(), sum),
            slot,
            mode,
        }
    }

    async fn put(&self, keys: &[ChunkKey], round: u16, mode: PutMode) -> Vec<Put> {
        let items = keys.iter().map(|&key| self.put_item(key, round, mode));
        let put = self.store.put(items.collect(), self.soon());
        let put = all(put, keys.len()).await.into_iter();
        put.map(|put| put.expect("a put")).collect()
    }

    fn get_item(&self, key: ChunkKey, len: u64) -> GetItem {
        let mut slot = self.pool.reserve(len).expect("the slots came back");
        slot.bytes_mut().fill(0xA5);
        let name = FOLDER.value(key);
        GetItem { name, slot }
    }

    async fn get(&self, keys: &[ChunkKey]) -> Vec<Got> {
        let items = keys.iter().map(|&key| self.get_item(key, len(&key)));
        let got = self.store.get(items.collect(), self.soon());
        all(got, keys.len()).await
    }

    /// Checks that every value exists as a round has written it.
    async fn has_all(&self, keys: &[ChunkKey], round: u16) {
        let heads = self.store.heads(&names(keys), self.soon()).await;
        assert_eq!(heads.len(), keys.len());
        for (key, head) in keys.iter().zip(heads) {
            let head = head.expect("heads").expect("the value is there");
            let header = head.check(key).expect("the header is right");
            assert_eq!(header.plain_len, len(key));
            if let Some(age) = head.age {
                assert!(age < Duration::from_secs(3600), "{key:?} is {age:?} old");
            }
        }
        for (key, got) in keys.iter().zip(self.get(keys).await) {
            let Got::Value { header, slot, .. } = got else {
                panic!("{key:?}: {got:?}");
            };
            assert_eq!(header.key, *key);
            let expected = of_round(key, round);
            if let Err(mismatch) = check_value(&expected, slot.written().bytes()) {
                panic!("a wrong byte: {mismatch}");
            }
        }
    }

    async fn empty_batches(&self) {
        assert!(self.store.heads(&[], self.soon()).await.is_empty());
        assert!(all(self.store.get(vec![], self.soon()), 0).await.is_empty());
        assert!(all(self.store.put(vec![], self.soon()), 0).await.is_empty());
        assert!(self.store.remove(&[], self.soon()).await.is_empty());
        assert!(self.store.touch(&[], self.soon()).await.is_empty());
    }

    async fn values(&self) {
        let keys = keys();
        for head in self.store.heads(&names(&keys), self.soon()).await {
            assert!(head.expect("heads").is_none(), "an empty store");
        }
        for (key, got) in keys.iter().zip(self.get(&keys).await) {
            let Got::Absent(slot) = got else {
                panic!("{key:?} in an empty store: {got:?}");
            };
            assert_eq!(slot.len(), len(key));
        }
        let put = self.put(&keys, 1, PutMode::Create).await;
        assert!(put.iter().all(|put| *put == Put::Written), "{put:?}");
        self.has_all(&keys, 1).await;
        let longer = vec![self.get_item(keys[0], len(&keys[0]) + 1)];
        let got = all(self.store.get(longer, self.soon()), 1).await;
        let is_refused = matches!(
            got[..],
            [Got::Refused {
                refusal: Refusal::Length { .. },
                ..
            }]
        );
        assert!(is_refused, "a slot of another length: {got:?}");
    }

    async fn replaced(&self) {
        let keys = keys();
        let put = self.put(&keys, 2, PutMode::Create).await;
        assert!(put.iter().all(|put| *put == Put::Present), "{put:?}");
        self.has_all(&keys, 1).await;
        let put = self.put(&keys, 3, PutMode::Replace).await;
        assert!(put.iter().all(|put| *put == Put::Written), "{put:?}");
        self.has_all(&keys, 3).await;
    }

    async fn listed(&self, scope: Scope, limit: usize) -> BTreeSet<String> {
        let (mut token, mut listed) = (None, BTreeSet::new());
        // Each page may be empty, but a listing of a few names must come to its end.
        for _ in 0..10_000 {
            let page = self.store.list(scope, token.as_deref(), limit, self.soon());
            let page = page.await.expect("a page");
            assert!(page.objects.len() <= limit, "a page longer than asked for");
            for object in page.objects {
                let name = object.name;
                assert!(scope.covers(&name), "{name} is not in {scope:?}");
                if let (Name::Value(name), Some(found)) = (name, object.len) {
                    let key = name.key;
                    assert_eq!(found, self.store.payload_offset() + len(&key));
                }
                assert!(listed.insert(name.to_string()), "{name} is listed twice");
            }
            match page.next {
                Some(next) => token = Some(next),
                None => return listed,
            }
        }
        panic!("the listing does not end");
    }

    async fn listings(&self) {
        let texts = |keep: &dyn Fn(&ChunkKey) -> bool| -> BTreeSet<String> {
            let keys = keys().into_iter().filter(|key| keep(key));
            keys.map(|key| FOLDER.value(key).to_string()).collect()
        };
        for limit in [1, 5, 1000] {
            assert_eq!(self.listed(Scope::VALUES, limit).await, texts(&|_| true));
        }
        let first = keys()[0];
        let (byte, space) = (first.hash.as_bytes()[0], first.space);
        for (fanout, space) in [
            (None, None),
            (Some(byte), None),
            (None, Some(space)),
            (Some(byte), Some(space)),
        ] {
            for folder in [None, Some(FOLDER)] {
                let scope = Scope::Values {
                    folder,
                    fanout,
                    space,
                };
                let in_scope = |key: &ChunkKey| scope.covers(&FOLDER.value(*key).into());
                assert_eq!(self.listed(scope, 2).await, texts(&in_scope));
            }
        }
        assert!(self.listed(Scope::values_of(folder(2)), 2).await.is_empty());
        assert!(self.listed(Scope::Spaces, 2).await.is_empty());
        assert_eq!(self.listed(Scope::Folders, 7).await, texts(&|_| true));
    }

    async fn removals(&self) {
        let keys = keys();
        let objects: Vec<Name> = names(&keys).into_iter().map(Name::Value).collect();
        for touched in self.store.touch(&names(&keys), self.soon()).await {
            assert!(touched.expect("a touch"), "the value is there");
        }
        let removed = self.store.remove(&objects[..10], self.soon()).await;
        assert!(
            removed.iter().all(|one| matches!(one, Ok(true))),
            "{removed:?}"
        );
        let heads = self.store.heads(&names(&keys[..11]), self.soon()).await;
        for (n, head) in heads.into_iter().enumerate() {
            assert_eq!(head.expect("heads").is_some(), n == 10, "value {n}");
        }
        for touched in self.store.touch(&names(&keys[..10]), self.soon()).await {
            assert!(!touched.expect("a touch"), "the value was removed");
        }
        for removed in self.store.remove(&objects, self.soon()).await {
            removed.expect("removing what is there, and what is not");
        }
        assert!(self.listed(Scope::VALUES, 100).await.is_empty());
    }

    async fn small_objects(&self) {
        let space = test_key(0).space;
        let names = [
            Name::Map(FOLDER),
            Name::Space(FOLDER, space),
            Name::Space(folder(2), space),
        ];
        for name in names {
            let read = |max| self.store.read(name, max, self.soon());
            assert_eq!(read(100).await.expect("a read"), None);
            for text in ["first", "second, and longer", "third"] {
                let bytes = text.as_bytes();
                let write = self.store.write(name, bytes.into(), self.soon());
                write.await.expect("a write");
                assert_eq!(
                    read(bytes.len()).await.expect("a read").as_deref(),
                    Some(bytes)
                );
                let error = read(bytes.len() - 1).await.expect_err("too long");
                assert!(matches!(error, StoreError::TooLarge { .. }), "{error}");
            }
        }
        let texts = |names: &[Name]| names.iter().map(Name::to_string).collect::<BTreeSet<_>>();
        assert_eq!(self.listed(Scope::Spaces, 1).await, texts(&names[1..]));
        assert_eq!(self.listed(Scope::Folders, 1).await, texts(&names));
        assert!(self.listed(Scope::VALUES, 10).await.is_empty());
        let removed = self.store.remove(&names, self.soon()).await;
        assert!(removed.iter().all(Result::is_ok), "{removed:?}");
        let read = self.store.read(names[0], 100, self.soon()).await;
        assert_eq!(read.expect("a read"), None);
    }

    /// The object of clears is created only if absent, and replaced only as it was read.
    async fn clears(&self) {
        let read = |max| self.store.read_clears(max, self.soon());
        let swap = |text: &str, version: &Option<Version>| {
            let bytes = text.as_bytes().to_vec().into();
            self.store.swap_clears(bytes, version.clone(), self.soon())
        };
        let found = async || {
            let found = read(100).await.expect("a read");
            found.map_or_else(Default::default, |(bytes, version)| {
                (String::from_utf8_lossy(&bytes).into_owned(), Some(version))
            })
        };
        let (text, none) = found().await;
        assert_eq!((text.as_str(), &none), ("", &None));
        assert!(swap("first", &none).await.expect("a write"));
        assert!(!swap("other", &none).await.expect("a look"), "it is there");
        let (text, first) = found().await;
        assert_eq!(text, "first");
        assert!(swap("second, and longer", &first).await.expect("a write"));
        for late in [&first, &none] {
            assert!(
                !swap("other", late).await.expect("a look"),
                "it has changed"
            );
        }
        let (text, _) = found().await;
        assert_eq!(text, "second, and longer");
        let error = read(text.len() - 1).await.expect_err("too long");
        assert!(matches!(error, StoreError::TooLarge { .. }), "{error}");
        assert!(self.listed(Scope::Folders, 10).await.is_empty());
        let before = found().await.1;
        let removed = self.store.remove(&[Name::Clears], self.soon()).await;
        assert!(matches!(removed[..], [Ok(true)]), "{removed:?}");
        assert_eq!(found().await, (String::new(), None));
        assert!(!swap("late", &before).await.expect("a look"), "it is gone");
        assert!(swap("new", &None).await.expect("a write"));
        assert_eq!(found().await.0, "new");
        let removed = self.store.remove(&[Name::Clears], self.soon()).await;
        assert!(matches!(removed[..], [Ok(true)]), "{removed:?}");
    }

    /// Runs operations with a deadline that has passed: each item is answered, and every operation ends.
    async fn late(&self) {
        let keys = keys();
        let ends = async |deadline: Instant| {
            let items = keys.iter().map(|&key| self.get_item(key, len(&key)));
            all(self.store.get(items.collect(), deadline), keys.len()).await;
            let items = (keys.iter()).map(|&key| self.put_item(key, 4, PutMode::Create));
            all(self.store.put(items.collect(), deadline), keys.len()).await;
            assert_eq!(
                self.store.heads(&names(&keys), deadline).await.len(),
                keys.len()
            );
        };
        for wait in [Duration::ZERO, Duration::from_millis(1)] {
            let ended = tokio::time::timeout(self.timeout, ends(now() + wait)).await;
            ended.expect("operations end soon after their deadline");
        }
        // Slots that something still writes to come back when the writing is over.
        let deadline = self.soon();
        while self.pool.usage().slots > 0 && now() < deadline {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    async fn closed(&self) {
        self.store.close(self.soon()).await;
        self.store.close(self.soon()).await;
        let key = keys()[0];
        let heads = self.store.heads(&names(&[key]), self.soon()).await;
        assert!(
            matches!(heads[..], [Err(StoreError::Unavailable { .. })]),
            "{heads:?}"
        );
        let got = self.get(&[key]).await;
        assert!(matches!(got[..], [Got::Failed { .. }]), "{got:?}");
    }
}
