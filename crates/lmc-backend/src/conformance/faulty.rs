//! A tier with injected faults.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;
use std::time::Instant;

use futures_core::Stream;
use futures_util::{FutureExt, stream};
use lmc_key::ChunkKey;
use parking_lot::Mutex;

use super::Rng;
use crate::{
    Answers, Backend, BackendError, BoxFuture, Cleared, Clears, Cursor, FailedSlot, LoadItem,
    Loaded, LocalIndex, LocateHint, Located, Page, StoreItem, Stored, Unavailable, WriteBackend,
    in_order,
};

/// Frequency of each fault, in thousandths of the keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    /// Errors. Half of the failed stores and removals take effect nevertheless.
    pub errors: u16,
    /// Errors that say the deadline passed.
    pub deadlines: u16,
    /// Loads and lookups that miss although the chunk is there.
    pub misses: u16,
    /// Stores that are declined.
    pub declined: u16,
    /// Operations that are not ready at once, but only after up to 8 polls.
    pub delays: u16,
}

impl Faults {
    /// Some of every fault.
    pub fn some() -> Self {
        Self {
            errors: 60,
            deadlines: 30,
            misses: 80,
            declined: 50,
            delays: 300,
        }
    }
}

/// Wraps a tier in seeded faults.
#[derive(Debug)]
pub struct Faulty<B> {
    inner: B,
    faults: Faults,
    rng: Mutex<Rng>,
}

/// A fault injected for one key.
enum Fault {
    None,
    /// The operation fails; `true` when it was carried out all the same.
    Error(bool),
    Deadline,
    Miss,
    Declined,
}

impl<B: Backend> Faulty<B> {
    /// Wraps a tier. The same seed gives the same faults to the same operations.
    pub fn new(inner: B, faults: Faults, seed: u64) -> Self {
        let rng = Mutex::new(Rng::new(seed));
        Self { inner, faults, rng }
    }

    /// Returns the tier inside.
    pub fn inner(&self) -> &B {
        &self.inner
    }

    fn fault(&self) -> Fault {
        let mut rng = self.rng.lock();
        if rng.chance(self.faults.errors) {
            return Fault::Error(rng.chance(500));
        }
        if rng.chance(self.faults.deadlines) {
            return Fault::Deadline;
        }
        if rng.chance(self.faults.misses) {
            return Fault::Miss;
        }
        if rng.chance(self.faults.declined) {
            return Fault::Declined;
        }
        Fault::None
    }

    /// Injects a fault into the answer to a lookup.
    fn distort(&self, located: Result<Located, BackendError>) -> Result<Located, BackendError> {
        match self.fault() {
            Fault::Error(_) => Err(injected().into()),
            Fault::Deadline => Err(BackendError::Deadline),
            Fault::Miss => Ok(Located::Absent),
            Fault::Declined | Fault::None => located,
        }
    }

    /// Returns answers in another order than that of the batch.
    fn shuffled<T: Send + 'static>(
        &self,
        answers: Vec<T>,
    ) -> impl Stream<Item = (usize, T)> + use<B, T> {
        let mut answers: Vec<(usize, T)> = answers.into_iter().enumerate().collect();
        let mut rng = self.rng.lock();
        for last in (1..answers.len()).rev() {
            answers.swap(last, rng.below(last as u64 + 1) as usize);
        }
        stream::iter(answers)
    }

    fn delay(&self) -> impl Future<Output = ()> + Send + use<B> {
        let mut rng = self.rng.lock();
        let mut polls = match rng.chance(self.faults.delays) {
            true => 1 + rng.below(8),
            false => 0,
        };
        poll_fn(move |context| {
            if polls == 0 {
                return Poll::Ready(());
            }
            polls -= 1;
            context.waker().wake_by_ref();
            Poll::Pending
        })
    }
}

fn injected() -> Unavailable {
    Unavailable {
        reason: "injected by the faulty twin".to_owned(),
    }
}

/// Merges the injected answers with the answers of the keys that were passed on to the inner tier.
fn merge<T>(faults: Vec<Option<T>>, through: Vec<Option<T>>) -> Vec<T> {
    let mut through = through.into_iter();
    let answer = |fault: Option<T>| {
        let answer = fault.or_else(|| through.next().flatten());
        answer.expect("the inner tier answers once for each key")
    };
    faults.into_iter().map(answer).collect()
}

impl<B: Backend> LocalIndex for Faulty<B> {
    fn locate_now(&self, keys: &[ChunkKey]) -> Vec<Result<Located, BackendError>> {
        let located = self.inner.index().map(|index| index.locate_now(keys));
        let located = located.unwrap_or_default();
        located.into_iter().map(|one| self.distort(one)).collect()
    }
}

impl<B: WriteBackend> Backend for Faulty<B> {
    crate::forward!(inner: name sharing clears usage counters health close);

    fn writer(&self) -> Option<&dyn WriteBackend> {
        Some(self)
    }

    fn index(&self) -> Option<&dyn LocalIndex> {
        self.inner.index().map(|_| self as &dyn LocalIndex)
    }

    fn locate<'a>(
        &'a self,
        keys: &'a [ChunkKey],
        hint: &'a LocateHint,
        deadline: Instant,
    ) -> BoxFuture<'a, Vec<Result<Located, BackendError>>> {
        Box::pin(async move {
            self.delay().await;
            let located = self.inner.locate(keys, hint, deadline).await;
            located.into_iter().map(|one| self.distort(one)).collect()
        })
    }

    fn load(&self, items: Vec<LoadItem>, deadline: Instant) -> Answers<'_, Loaded> {
        let loaded = async move {
            self.delay().await;
            let (mut faults, mut through) = (Vec::new(), Vec::new());
            for item in items {
                let failed = |error, slot| Loaded::Failed {
                    error,
                    slot: FailedSlot::Released(slot),
                };
                faults.push(match self.fault() {
                    Fault::Error(true) => {
                        // As after a failure of a device that may still write: the slot is proven idle at
                        // once here, but the caller does not get it back.
                        item.slot.quarantine().release_proven_quiet();
                        Some(Loaded::Failed {
                            error: injected().into(),
                            slot: FailedSlot::Quarantined,
                        })
                    }
                    Fault::Error(false) => Some(failed(injected().into(), item.slot)),
                    Fault::Deadline => Some(failed(BackendError::Deadline, item.slot)),
                    Fault::Miss => Some(Loaded::Miss(item.slot)),
                    Fault::Declined | Fault::None => {
                        through.push(item);
                        None
                    }
                });
            }
            let count = through.len();
            let through = in_order(self.inner.load(through, deadline), count).await;
            self.delay().await;
            self.shuffled(merge(faults, through))
        };
        Box::pin(loaded.flatten_stream())
    }

    fn clear(
        &self,
        clears: Arc<Clears>,
        deadline: Instant,
    ) -> BoxFuture<'_, Result<Cleared, BackendError>> {
        Box::pin(async move {
            self.delay().await;
            match self.fault() {
                Fault::Error(true) => {
                    self.inner.clear(clears, deadline).await?;
                    Err(injected().into())
                }
                Fault::Error(false) => Err(injected().into()),
                Fault::Deadline => Err(BackendError::Deadline),
                Fault::Miss | Fault::Declined | Fault::None => {
                    self.inner.clear(clears, deadline).await
                }
            }
        })
    }
}

impl<B: WriteBackend> WriteBackend for Faulty<B> {
    fn store(
        &self,
        items: Vec<StoreItem>,
        deadline: Instant,
    ) -> Answers<'_, Result<Stored, BackendError>> {
        let stored = async move {
            self.delay().await;
            let (mut faults, mut through) = (Vec::new(), Vec::new());
            for item in items {
                faults.push(match self.fault() {
                    Fault::Error(true) => {
                        in_order(self.inner.store(vec![item], deadline), 1).await;
                        Some(Err(injected().into()))
                    }
                    Fault::Error(false) => Some(Err(injected().into())),
                    Fault::Deadline => Some(Err(BackendError::Deadline)),
                    Fault::Declined => Some(Ok(Stored::Declined)),
                    Fault::Miss | Fault::None => {
                        through.push(item);
                        None
                    }
                });
            }
            let count = through.len();
            let through = in_order(self.inner.store(through, deadline), count).await;
            self.delay().await;
            self.shuffled(merge(faults, through))
        };
        Box::pin(stored.flatten_stream())
    }

    fn remove<'a>(
        &'a self,
        keys: &'a [ChunkKey],
        deadline: Instant,
    ) -> BoxFuture<'a, Vec<Result<bool, BackendError>>> {
        Box::pin(async move {
            self.delay().await;
            let (mut faults, mut through) = (Vec::new(), Vec::new());
            for key in keys {
                faults.push(match self.fault() {
                    Fault::Error(true) => {
                        self.inner.remove(&[*key], deadline).await;
                        Some(Err(injected().into()))
                    }
                    Fault::Error(false) => Some(Err(injected().into())),
                    Fault::Deadline => Some(Err(BackendError::Deadline)),
                    Fault::Miss | Fault::Declined | Fault::None => {
                        through.push(*key);
                        None
                    }
                });
            }
            let through = self.inner.remove(&through, deadline).await;
            merge(faults, through.into_iter().map(Some).collect())
        })
    }

    fn list(
        &self,
        cursor: Cursor,
        limit: usize,
        deadline: Instant,
    ) -> BoxFuture<'_, Result<Page, BackendError>> {
        Box::pin(async move {
            self.delay().await;
            match self.fault() {
                Fault::Error(_) => Err(injected().into()),
                Fault::Deadline => Err(BackendError::Deadline),
                Fault::Miss | Fault::Declined | Fault::None => {
                    self.inner.list(cursor, limit, deadline).await
                }
            }
        })
    }
}
