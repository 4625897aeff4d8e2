//! A wrapper that injects faults into any store.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::{FutureExt, StreamExt};
use lmc_backend::conformance::Rng;
use lmc_backend::{Answers, BoxFuture, now, ready};
use parking_lot::Mutex;

use crate::format::{Name, Scope, ValueName};
use crate::memory_store::StoreFaults;
use crate::store::{
    Each, GetItem, Got, Head, ListPage, Put, PutItem, Single, Store, StoreError, Version,
};

/// A kind of calls to a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Calls {
    /// Reads of headers, and listings.
    Lookups,
    /// Reads of values.
    Loads,
    /// Writes, touches and removals of values.
    Writes,
    /// Reads and writes of the object of clears.
    Clears,
    /// Reads and writes of other small objects: maps and descriptions.
    Small,
}

/// A fault of all calls of a kind. The calls do not reach the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallFault {
    /// Calls are denied.
    Denied,
    /// Calls fail at once.
    Failing,
    /// Calls last until their deadline, or until the fault ends.
    Hanging,
}

/// A real store with the faults of [`StoreFaults`]. Answers fail after the store has done its work, so every
/// failed write has taken effect; nothing is torn.
pub struct FaultyStore {
    store: Arc<dyn Store>,
    faults: StoreFaults,
    rng: Mutex<Rng>,
    /// The fault of each kind of calls, and the number of calls that it has affected.
    broken: [Mutex<(Option<CallFault>, u64)>; 5],
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
            broken: Default::default(),
        }
    }

    /// Sets the fault of one kind of calls; `None` ends it.
    pub fn set_fault(&self, calls: Calls, fault: Option<CallFault>) {
        self.broken[calls as usize].lock().0 = fault;
    }

    /// Returns the number of calls of a kind that a fault has affected so far; a batch counts once.
    pub fn broken_calls(&self, calls: Calls) -> u64 {
        self.broken[calls as usize].lock().1
    }

    /// Fails or delays a call whose kind has a fault.
    async fn begin(&self, calls: Calls, deadline: Instant) -> Result<(), StoreError> {
        let broken = &self.broken[calls as usize];
        let fault = {
            let mut broken = broken.lock();
            broken.1 += u64::from(broken.0.is_some());
            broken.0
        };
        let reason = "injected".to_owned();
        match fault {
            None => return Ok(()),
            Some(CallFault::Denied) => return Err(StoreError::Denied { reason }),
            Some(CallFault::Failing) => return Err(StoreError::Unavailable { reason }),
            Some(CallFault::Hanging) => {}
        }
        while broken.lock().0.is_some() {
            if now() >= deadline {
                return Err(StoreError::Deadline);
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        Ok(())
    }

    fn chance(&self, per_mille: u16) -> bool {
        per_mille > 0 && self.rng.lock().chance(per_mille)
    }

    /// Fails an answer at random.
    fn answer<T>(&self, answer: Result<T, StoreError>) -> Result<T, StoreError> {
        match self.chance(self.faults.errors) {
            true => Err(StoreError::unavailable("injected")),
            false => answer,
        }
    }

    async fn delay(&self, deadline: Instant) {
        if self.chance(self.faults.delays) {
            let delay = Duration::from_micros(self.rng.lock().below(3000));
            tokio::time::sleep_until(deadline.min(now() + delay).into()).await;
        }
    }

    /// Fails answers of a batch at random, after one delay for the batch.
    async fn each<T>(
        &self,
        calls: Calls,
        len: usize,
        batch: Each<'_, T>,
        deadline: Instant,
    ) -> Vec<Result<T, StoreError>> {
        if let Err(error) = self.begin(calls, deadline).await {
            return error.each(len);
        }
        self.delay(deadline).await;
        let answers = batch.await.into_iter();
        answers.map(|answer| self.answer(answer)).collect()
    }

    async fn single<T>(
        &self,
        calls: Calls,
        one: Single<'_, T>,
        deadline: Instant,
    ) -> Result<T, StoreError> {
        self.begin(calls, deadline).await?;
        self.delay(deadline).await;
        self.answer(one.await)
    }

    /// Fails a read, or flips a bit of the value, at random.
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
        let heads = self.store.heads(names, deadline);
        Box::pin(self.each(Calls::Lookups, names.len(), heads, deadline))
    }

    fn get(&self, items: Vec<GetItem>, deadline: Instant) -> Answers<'_, Got> {
        let got = async move {
            match self.begin(Calls::Loads, deadline).await {
                Ok(()) => self.store.get(items, deadline),
                Err(error) => {
                    let failed = |item: GetItem| Got::failed(error.clone(), item.slot);
                    ready(items.into_iter().map(failed).collect::<Vec<_>>())
                }
            }
        };
        let got = got.flatten_stream();
        Box::pin(got.map(|(index, got)| (index, self.got(got))))
    }

    fn put(&self, items: Vec<PutItem>, deadline: Instant) -> Answers<'_, Result<Put, StoreError>> {
        let put = async move {
            match self.begin(Calls::Writes, deadline).await {
                Ok(()) => self.store.put(items, deadline),
                Err(error) => ready(error.each(items.len())),
            }
        };
        let put = put.flatten_stream();
        Box::pin(put.map(|(index, put)| (index, self.answer(put))))
    }

    fn remove<'a>(&'a self, names: &'a [Name], deadline: Instant) -> Each<'a, bool> {
        let removed = self.store.remove(names, deadline);
        Box::pin(self.each(Calls::Writes, names.len(), removed, deadline))
    }

    fn touch<'a>(&'a self, names: &'a [ValueName], deadline: Instant) -> Each<'a, bool> {
        let touched = self.store.touch(names, deadline);
        Box::pin(self.each(Calls::Writes, names.len(), touched, deadline))
    }

    fn list<'a>(
        &'a self,
        scope: Scope,
        token: Option<&'a str>,
        limit: usize,
        deadline: Instant,
    ) -> Single<'a, ListPage> {
        let page = self.store.list(scope, token, limit, deadline);
        Box::pin(self.single(Calls::Lookups, page, deadline))
    }

    fn read(&self, name: Name, max: usize, deadline: Instant) -> Single<'_, Option<Bytes>> {
        let read = self.store.read(name, max, deadline);
        Box::pin(self.single(Calls::Small, read, deadline))
    }

    fn write(&self, name: Name, bytes: Bytes, deadline: Instant) -> Single<'_, ()> {
        let written = self.store.write(name, bytes, deadline);
        Box::pin(self.single(Calls::Small, written, deadline))
    }

    fn read_clears(&self, max: usize, deadline: Instant) -> Single<'_, Option<(Bytes, Version)>> {
        let read = self.store.read_clears(max, deadline);
        Box::pin(self.single(Calls::Clears, read, deadline))
    }

    fn swap_clears(
        &self,
        bytes: Bytes,
        read: Option<Version>,
        deadline: Instant,
    ) -> Single<'_, bool> {
        let swapped = self.store.swap_clears(bytes, read, deadline);
        Box::pin(self.single(Calls::Clears, swapped, deadline))
    }

    fn old_chunks(&self, deadline: Instant) -> Single<'_, Option<String>> {
        self.store.old_chunks(deadline)
    }

    fn close(&self, deadline: Instant) -> BoxFuture<'_, ()> {
        self.store.close(deadline)
    }
}
