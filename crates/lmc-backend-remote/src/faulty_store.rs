//! A store with injected faults, over any other.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::StreamExt;
use lmc_backend::conformance::Rng;
use lmc_backend::{Answers, BoxFuture};
use parking_lot::Mutex;

use crate::format::{Name, Scope, ValueName};
use crate::memory_store::StoreFaults;
use crate::store::{
    Each, GetItem, Got, Head, ListPage, Put, PutItem, Single, Store, StoreError, Version,
};

/// A real store that fails as [`StoreFaults`] says. Answers fail after the store has done its work,
/// so every write that fails has taken effect; nothing is torn.
pub struct FaultyStore {
    store: Arc<dyn Store>,
    faults: StoreFaults,
    rng: Mutex<Rng>,
    denies_clears: AtomicBool,
}

impl fmt::Debug for FaultyStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FaultyStore")
            .field("store", &self.store)
            .field("faults", &self.faults)
            .finish_non_exhaustive()
    }
}

impl FaultyStore {
    /// Wraps a store in seeded faults.
    pub fn new(store: Arc<dyn Store>, faults: StoreFaults, seed: u64) -> Self {
        let rng = Mutex::new(Rng::new(seed));
        Self {
            store,
            faults,
            rng,
            denies_clears: AtomicBool::new(false),
        }
    }

    /// Denies this client the object of clears from now on, and nothing else; or allows it again.
    pub fn deny_clears(&self, is_denied: bool) {
        self.denies_clears.store(is_denied, Ordering::SeqCst);
    }

    fn chance(&self, per_mille: u16) -> bool {
        per_mille > 0 && self.rng.lock().chance(per_mille)
    }

    /// Fails an answer now and then.
    fn answer<T>(&self, answer: Result<T, StoreError>) -> Result<T, StoreError> {
        match self.chance(self.faults.errors) {
            true => Err(StoreError::unavailable("injected")),
            false => answer,
        }
    }

    async fn delay(&self, deadline: Instant) {
        if self.chance(self.faults.delays) {
            let delay = Duration::from_micros(self.rng.lock().below(3000));
            tokio::time::sleep_until(deadline.min(Instant::now() + delay).into()).await;
        }
    }

    /// Fails answers of a batch now and then, and waits before all.
    async fn each<T>(&self, batch: Each<'_, T>, deadline: Instant) -> Vec<Result<T, StoreError>> {
        self.delay(deadline).await;
        let answers = batch.await.into_iter();
        answers.map(|answer| self.answer(answer)).collect()
    }

    async fn single<T>(&self, one: Single<'_, T>, deadline: Instant) -> Result<T, StoreError> {
        self.delay(deadline).await;
        self.answer(one.await)
    }

    /// Fails a read, or flips a bit of what was read, now and then.
    fn got(&self, got: Got) -> Got {
        let Got::Value {
            header,
            mut slot,
            age,
        } = got
        else {
            return got;
        };
        if self.chance(self.faults.errors) {
            return Got::failed(StoreError::unavailable("injected"), slot);
        }
        let bytes = slot.bytes_mut();
        if self.chance(self.faults.flipped) && !bytes.is_empty() {
            let bit = self.rng.lock().below(bytes.len() as u64 * 8) as usize;
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
        Got::Value { header, slot, age }
    }
}

fn denied<'a, T: Send + 'a>() -> Single<'a, T> {
    let reason = "injected".to_owned();
    Box::pin(std::future::ready(Err(StoreError::Denied { reason })))
}

impl Store for FaultyStore {
    fn kind(&self) -> &'static str {
        self.store.kind()
    }

    fn payload_offset(&self) -> u64 {
        self.store.payload_offset()
    }

    fn max_value_len(&self) -> u64 {
        self.store.max_value_len()
    }

    fn ttl(&self) -> Option<Duration> {
        self.store.ttl()
    }

    fn touch_age(&self) -> Option<Duration> {
        self.store.touch_age()
    }

    fn heads<'a>(&'a self, names: &'a [ValueName], deadline: Instant) -> Each<'a, Option<Head>> {
        Box::pin(self.each(self.store.heads(names, deadline), deadline))
    }

    fn get(&self, items: Vec<GetItem>, deadline: Instant) -> Answers<'_, Got> {
        let got = self.store.get(items, deadline);
        Box::pin(got.map(|(index, got)| (index, self.got(got))))
    }

    fn put(&self, items: Vec<PutItem>, deadline: Instant) -> Answers<'_, Result<Put, StoreError>> {
        let put = self.store.put(items, deadline);
        Box::pin(put.map(|(index, put)| (index, self.answer(put))))
    }

    fn remove<'a>(&'a self, names: &'a [Name], deadline: Instant) -> Each<'a, bool> {
        Box::pin(self.each(self.store.remove(names, deadline), deadline))
    }

    fn touch<'a>(&'a self, names: &'a [ValueName], deadline: Instant) -> Each<'a, bool> {
        Box::pin(self.each(self.store.touch(names, deadline), deadline))
    }

    fn list<'a>(
        &'a self,
        scope: Scope,
        token: Option<&'a str>,
        limit: usize,
        deadline: Instant,
    ) -> Single<'a, ListPage> {
        Box::pin(self.single(self.store.list(scope, token, limit, deadline), deadline))
    }

    fn read(&self, name: Name, max: usize, deadline: Instant) -> Single<'_, Option<Bytes>> {
        Box::pin(self.single(self.store.read(name, max, deadline), deadline))
    }

    fn write(&self, name: Name, bytes: Bytes, deadline: Instant) -> Single<'_, ()> {
        Box::pin(self.single(self.store.write(name, bytes, deadline), deadline))
    }

    fn read_clears(&self, max: usize, deadline: Instant) -> Single<'_, Option<(Bytes, Version)>> {
        if self.denies_clears.load(Ordering::SeqCst) {
            return denied();
        }
        Box::pin(self.single(self.store.read_clears(max, deadline), deadline))
    }

    fn swap_clears(
        &self,
        bytes: Bytes,
        read: Option<Version>,
        deadline: Instant,
    ) -> Single<'_, bool> {
        if self.denies_clears.load(Ordering::SeqCst) {
            return denied();
        }
        Box::pin(self.single(self.store.swap_clears(bytes, read, deadline), deadline))
    }

    fn old_chunks(&self, deadline: Instant) -> Single<'_, Option<String>> {
        self.store.old_chunks(deadline)
    }

    fn close(&self, deadline: Instant) -> BoxFuture<'_, ()> {
        self.store.close(deadline)
    }
}
