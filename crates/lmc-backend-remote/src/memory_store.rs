//! A store in memory, with faults on request.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::{StreamExt, stream};
use lmc_backend::conformance::Rng;
use lmc_backend::{Answers, BoxFuture, now};
use parking_lot::Mutex;
use tokio::sync::Semaphore;

use crate::format::{HEADER_LEN, Name, OLD_ROOT, Refusal, Scope, ValueName};
use crate::store::{
    Each, GetItem, Got, Head, ListPage, ListedObject, Put, PutItem, PutMode, Single, Store,
    StoreError, Version,
};

/// Frequency of each fault, in thousandths of the objects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreFaults {
    /// Errors. Half of the failed writes and removals take effect nevertheless.
    pub errors: u16,
    /// Values in which a bit is flipped when they are read.
    pub flipped: u16,
    /// Values that are truncated when they are written, permanently.
    pub torn: u16,
    /// Operations that take up to 3 ms.
    pub delays: u16,
}

impl StoreFaults {
    /// Some of every fault.
    pub fn some() -> Self {
        Self {
            errors: 40,
            flipped: 60,
            torn: 60,
            delays: 200,
        }
    }
}

/// The writes that a store in memory denies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Denied {
    /// None.
    #[default]
    Nothing,
    /// Writes of descriptions of spaces.
    Descriptions,
    /// Writes of values and of small objects.
    Writes,
    /// Writes of values and of small objects, for lack of capacity.
    WritesFull,
    /// Writes of values and of small objects, because of their size.
    WritesTooLarge,
}

/// Bytes in a map: the twin of every real store in tests. Must be used on a runtime.
#[derive(Debug)]
pub struct MemoryStore {
    objects: Mutex<BTreeMap<String, Object>>,
    faults: StoreFaults,
    rng: Mutex<Rng>,
    ttl: Option<Duration>,
    is_stalled: AtomicBool,
    is_down: AtomicBool,
    stalls_touches: AtomicBool,
    denied: Mutex<Denied>,
    /// Each value that was read is returned only with a permit of this gate.
    gate: Mutex<Option<Arc<Semaphore>>>,
    requests: AtomicU64,
    values_read: AtomicU64,
}

#[derive(Debug)]
struct Object {
    bytes: Vec<u8>,
    touched: Instant,
}

impl Object {
    fn new(bytes: Vec<u8>) -> Self {
        let touched = now();
        Self { bytes, touched }
    }
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::faulty(StoreFaults::default(), 0)
    }
}

impl MemoryStore {
    /// Makes a store with seeded faults.
    pub fn faulty(faults: StoreFaults, seed: u64) -> Self {
        Self {
            objects: Mutex::default(),
            faults,
            rng: Mutex::new(Rng::new(seed)),
            ttl: None,
            is_stalled: AtomicBool::new(false),
            is_down: AtomicBool::new(false),
            stalls_touches: AtomicBool::new(false),
            denied: Mutex::default(),
            gate: Mutex::default(),
            requests: AtomicU64::new(0),
            values_read: AtomicU64::new(0),
        }
    }

    /// Sets the time to live that the store reports for values. Default: none. Nothing expires.
    #[must_use]
    pub fn with_ttl(mut self, ttl: Duration) -> Self {
        self.ttl = Some(ttl);
        self
    }

    /// Makes every operation last until its deadline, or ends that.
    pub fn set_stalled(&self, is_stalled: bool) {
        self.is_stalled.store(is_stalled, Ordering::SeqCst);
    }

    /// Makes every operation fail at once, or ends that.
    pub fn set_down(&self, is_down: bool) {
        self.is_down.store(is_down, Ordering::SeqCst);
    }

    /// Makes every touch last until its deadline, or ends that.
    pub fn set_touches_stalled(&self, is_stalled: bool) {
        self.stalls_touches.store(is_stalled, Ordering::SeqCst);
    }

    /// Denies these writes from now on, and no others.
    pub fn deny(&self, denied: Denied) {
        *self.denied.lock() = denied;
    }

    /// Returns each value that is read from now on only with a permit of the gate; without a gate at once.
    pub fn hold_values(&self, gate: Option<Arc<Semaphore>>) {
        *self.gate.lock() = gate;
    }

    /// Returns the number of values read so far, including values that the gate holds.
    pub fn values_read(&self) -> u64 {
        self.values_read.load(Ordering::SeqCst)
    }

    /// Returns the number of operations so far; a batch counts once.
    pub fn requests(&self) -> u64 {
        self.requests.load(Ordering::SeqCst)
    }

    /// Returns the bytes of an object.
    pub fn bytes(&self, name: Name) -> Option<Vec<u8>> {
        let objects = self.objects.lock();
        objects.get(&name.to_string()).map(|o| o.bytes.clone())
    }

    /// Sets the bytes of any object; `None` removes it.
    pub fn set_bytes(&self, name: Name, bytes: Option<Vec<u8>>) {
        let name = name.to_string();
        match bytes {
            Some(bytes) => self.insert(name, bytes),
            None => drop(self.objects.lock().remove(&name)),
        }
    }

    /// Makes all objects older.
    pub fn age_by(&self, time: Duration) {
        for object in self.objects.lock().values_mut() {
            object.touched = object.touched.checked_sub(time).unwrap_or(object.touched);
        }
    }

    /// Returns the age of an object.
    pub fn age(&self, name: Name) -> Option<Duration> {
        let objects = self.objects.lock();
        let object = objects.get(&name.to_string());
        object.map(|object| now() - object.touched)
    }

    /// Returns the names of all objects.
    pub fn names(&self) -> Vec<String> {
        self.objects.lock().keys().cloned().collect()
    }

    /// Stores an object under an arbitrary name.
    pub fn set_foreign(&self, name: &str, bytes: Vec<u8>) {
        self.insert(name.to_owned(), bytes);
    }

    fn insert(&self, name: String, bytes: Vec<u8>) {
        self.objects.lock().insert(name, Object::new(bytes));
    }

    /// Fails a write if it is denied.
    fn allow(&self, is_description: bool) -> Result<(), StoreError> {
        let denied = StoreError::Denied {
            reason: "injected".to_owned(),
        };
        match *self.denied.lock() {
            Denied::Nothing => Ok(()),
            Denied::Descriptions if !is_description => Ok(()),
            Denied::Descriptions | Denied::Writes => Err(denied),
            Denied::WritesFull => Err(StoreError::Full { needed: 1 }),
            Denied::WritesTooLarge => Err(StoreError::TooLarge { max: 0, found: 1 }),
        }
    }

    fn chance(&self, per_mille: u16) -> bool {
        per_mille > 0 && self.rng.lock().chance(per_mille)
    }

    fn below(&self, bound: u64) -> u64 {
        self.rng.lock().below(bound)
    }

    /// Begins an operation: waits according to the faults.
    async fn begin(&self, deadline: Instant) -> Result<(), StoreError> {
        self.requests.fetch_add(1, Ordering::SeqCst);
        let until = |end: Instant| tokio::time::sleep_until(end.into());
        if self.is_down.load(Ordering::SeqCst) {
            return Err(StoreError::unavailable("the store in memory is down"));
        }
        while self.is_stalled.load(Ordering::SeqCst) {
            if now() >= deadline {
                return Err(StoreError::Deadline);
            }
            until(deadline.min(now() + Duration::from_millis(1))).await;
        }
        if self.chance(self.faults.delays) {
            let delay = Duration::from_micros(self.below(3000));
            until(deadline.min(now() + delay)).await;
        }
        match now() < deadline {
            true => Ok(()),
            false => Err(StoreError::Deadline),
        }
    }

    /// Answers each item of a batch, after one delay for the batch.
    async fn each<I, T>(
        &self,
        items: Vec<I>,
        deadline: Instant,
        answer: impl Fn(I, Result<(), StoreError>) -> T,
    ) -> Vec<T> {
        if items.is_empty() {
            return Vec::new();
        }
        let begun = self.begin(deadline).await;
        let one = |item| {
            let begun = match &begun {
                Ok(()) if self.chance(self.faults.errors) => {
                    Err(StoreError::unavailable("injected"))
                }
                Ok(()) => Ok(()),
                Err(error) => Err(error.clone()),
            };
            answer(item, begun)
        };
        items.into_iter().map(one).collect()
    }

    fn head(&self, name: &ValueName) -> Option<Head> {
        let objects = self.objects.lock();
        let object = objects.get(&name.to_string())?;
        Some(Head {
            header: object.bytes.first_chunk().copied().map(Box::new),
            value_len: object.bytes.len() as u64,
            age: Some(now() - object.touched),
        })
    }

    fn get_one(&self, item: GetItem) -> Got {
        let Some(head) = self.head(&item.name) else {
            return Got::Absent(item.slot);
        };
        let Some(mut bytes) = self.bytes(item.name.into()) else {
            return Got::Absent(item.slot);
        };
        if self.chance(self.faults.flipped) && !bytes.is_empty() {
            let bit = self.below(bytes.len() as u64 * 8) as usize;
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
        let header = bytes.first_chunk::<HEADER_LEN>().ok_or(Refusal::Damaged);
        let header = header.and_then(|header| item.check(header, bytes.len() as u64));
        let GetItem { mut slot, .. } = item;
        match header {
            Ok(header) => {
                let payload = &bytes[header.payload_offset as usize..];
                slot.bytes_mut().copy_from_slice(payload);
                let age = head.age;
                Got::Value { header, slot, age }
            }
            Err(refusal) => Got::Refused { refusal, slot },
        }
    }

    fn put_one(&self, item: &PutItem) -> Put {
        let name = item.name().to_string();
        let present = self.objects.lock().contains_key(&name);
        if present && item.mode == PutMode::Create {
            return Put::Present;
        }
        let mut bytes = item.start();
        bytes.extend_from_slice(item.slot.bytes());
        if self.chance(self.faults.torn) {
            bytes.truncate(self.below(bytes.len() as u64) as usize);
        }
        self.insert(name, bytes);
        Put::Written
    }

    fn list_now(&self, scope: Scope, token: Option<&str>, limit: usize) -> ListPage {
        let objects = self.objects.lock();
        let from = token.map_or(Bound::Unbounded, Bound::Excluded);
        let mut rest = objects
            .range::<str, _>((from, Bound::Unbounded))
            .filter_map(|(text, object)| Some((text, text.parse::<Name>().ok()?, object)))
            .filter(|(_, name, _)| scope.covers(name));
        let (mut page, mut last) = (ListPage::default(), None);
        for (text, name, object) in rest.by_ref().take(limit) {
            page.objects.push(ListedObject {
                name,
                len: Some(object.bytes.len() as u64),
                age: Some(now() - object.touched),
            });
            last = Some(text.clone());
        }
        page.next = rest.next().and(last);
        page
    }
}

impl Store for MemoryStore {
    fn kind(&self) -> &'static str {
        "memory"
    }

    fn ttl(&self) -> Option<Duration> {
        self.ttl
    }

    fn heads<'a>(&'a self, names: &'a [ValueName], deadline: Instant) -> Each<'a, Option<Head>> {
        let head = |name, begun: Result<(), StoreError>| begun.map(|()| self.head(&name));
        Box::pin(self.each(names.to_vec(), deadline, head))
    }

    fn get(&self, items: Vec<GetItem>, deadline: Instant) -> Answers<'_, Got> {
        let get = |item: GetItem, begun| match begun {
            Ok(()) => self.get_one(item),
            Err(error) => Got::failed(error, item.slot),
        };
        let gate = self.gate.lock().clone();
        let got = self.each(items, deadline, get);
        let got = stream::once(got).flat_map(|got| stream::iter(got.into_iter().enumerate()));
        Box::pin(got.then(move |got| {
            let gate = gate.clone();
            self.values_read.fetch_add(1, Ordering::SeqCst);
            async move {
                if let Some(gate) = gate {
                    // The gate is never closed.
                    gate.acquire().await.expect("an open gate").forget();
                }
                got
            }
        }))
    }

    fn put(&self, items: Vec<PutItem>, deadline: Instant) -> Answers<'_, Result<Put, StoreError>> {
        let put = |item: PutItem, begun: Result<(), StoreError>| match begun {
            Ok(()) => self.allow(false).map(|()| self.put_one(&item)),
            Err(error) => {
                if !matches!(error, StoreError::Deadline) && self.chance(500) {
                    self.put_one(&item);
                }
                Err(error)
            }
        };
        let put = self.each(items, deadline, put);
        Box::pin(stream::once(put).flat_map(|put| stream::iter(put.into_iter().enumerate())))
    }

    fn remove<'a>(&'a self, names: &'a [Name], deadline: Instant) -> Each<'a, bool> {
        let remove = |name: Name, begun: Result<(), StoreError>| {
            if begun.is_err() && self.chance(500) {
                return begun.map(|()| false);
            }
            let removed = self.objects.lock().remove(&name.to_string()).is_some();
            begun.map(|()| removed)
        };
        Box::pin(self.each(names.to_vec(), deadline, remove))
    }

    fn touch<'a>(&'a self, names: &'a [ValueName], deadline: Instant) -> Each<'a, bool> {
        let touch = |name: ValueName, begun: Result<(), StoreError>| {
            begun?;
            let mut objects = self.objects.lock();
            let object = objects.get_mut(&name.to_string());
            Ok(object.map(|o| o.touched = now()).is_some())
        };
        Box::pin(async move {
            if self.stalls_touches.load(Ordering::SeqCst) {
                tokio::time::sleep_until(deadline.into()).await;
            }
            self.each(names.to_vec(), deadline, touch).await
        })
    }

    fn list<'a>(
        &'a self,
        scope: Scope,
        token: Option<&'a str>,
        limit: usize,
        deadline: Instant,
    ) -> Single<'a, ListPage> {
        Box::pin(async move {
            self.begin(deadline).await?;
            Ok(self.list_now(scope, token, limit))
        })
    }

    fn read(&self, name: Name, max: usize, deadline: Instant) -> Single<'_, Option<Bytes>> {
        Box::pin(async move {
            self.begin(deadline).await?;
            let bytes = self.bytes(name);
            match bytes.as_ref().map(Vec::len).filter(|&len| len > max) {
                Some(len) => Err(StoreError::TooLarge {
                    max: max as u64,
                    found: len as u64,
                }),
                None => Ok(bytes.map(Bytes::from)),
            }
        })
    }

    fn write(&self, name: Name, bytes: Bytes, deadline: Instant) -> Single<'_, ()> {
        Box::pin(async move {
            self.begin(deadline).await?;
            self.allow(matches!(name, Name::Space(..)))?;
            self.insert(name.to_string(), bytes.to_vec());
            Ok(())
        })
    }

    fn swap_clears(
        &self,
        bytes: Bytes,
        read: Option<Version>,
        deadline: Instant,
    ) -> Single<'_, bool> {
        Box::pin(async move {
            self.begin(deadline).await?;
            self.allow(false)?;
            let mut objects = self.objects.lock();
            let name = Name::Clears.to_string();
            let found = objects.get(&name).map(|object| object.bytes.as_slice());
            if found != read.as_ref().map(|read| &read.0[..]) {
                return Ok(false);
            }
            objects.insert(name, Object::new(bytes.to_vec()));
            Ok(true)
        })
    }

    fn old_chunks(&self, _deadline: Instant) -> Single<'_, Option<String>> {
        let is_old = |name: &String| name.starts_with(OLD_ROOT);
        let has_some = self.objects.lock().keys().any(is_old);
        Box::pin(std::future::ready(Ok(
            has_some.then(|| format!("remove {OLD_ROOT}"))
        )))
    }

    fn close(&self, _deadline: Instant) -> BoxFuture<'_, ()> {
        self.set_down(true);
        Box::pin(std::future::ready(()))
    }
}
