//! A tier that errs on purpose.

use std::future::poll_fn;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::Instant;

use lmc_key::ChunkKey;
use parking_lot::Mutex;

use super::Rng;
use crate::{
    Backend, BackendError, BoxFuture, Cursor, FailedSlot, Health, LoadItem, Loaded, Page,
    StoreItem, Stored, Unavailable, Usage,
};

/// How often what goes wrong, in thousandths of the keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    /// Errors. Half of the failed stores and removals have taken effect nevertheless.
    pub errors: u16,
    /// Errors that say the deadline passed.
    pub deadlines: u16,
    /// Loads and lookups that miss although the chunk is there.
    pub misses: u16,
    /// Stores that are declined.
    pub declined: u16,
    /// Operations that are not ready at once, but after up to 8 polls.
    pub delays: u16,
}

impl Faults {
    /// Some of everything.
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
    clears: AtomicU64,
}

/// What happens to one key.
enum Fate {
    Fine,
    /// It fails; `true` when it was carried out all the same.
    Error(bool),
    Deadline,
    Miss,
    Declined,
}

impl<B: Backend> Faulty<B> {
    /// The same seed gives the same faults to the same operations.
    pub fn new(inner: B, faults: Faults, seed: u64) -> Self {
        let rng = Mutex::new(Rng::new(seed));
        Self {
            inner,
            faults,
            rng,
            clears: AtomicU64::new(0),
        }
    }

    /// The tier inside.
    pub fn inner(&self) -> &B {
        &self.inner
    }

    fn fate(&self) -> Fate {
        let mut rng = self.rng.lock();
        if rng.chance(self.faults.errors) {
            return Fate::Error(rng.chance(500));
        }
        if rng.chance(self.faults.deadlines) {
            return Fate::Deadline;
        }
        if rng.chance(self.faults.misses) {
            return Fate::Miss;
        }
        if rng.chance(self.faults.declined) {
            return Fate::Declined;
        }
        Fate::Fine
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

/// Puts the answers of the keys that went through back between those that did not.
fn merge<T>(fates: Vec<Option<T>>, through: Vec<T>) -> Vec<T> {
    let mut through = through.into_iter();
    let answer = |fate: Option<T>| {
        fate.or_else(|| through.next())
            .expect("the inner tier answers once for each key")
    };
    fates.into_iter().map(answer).collect()
}

impl<B: Backend> Backend for Faulty<B> {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn contains<'a>(
        &'a self,
        keys: &'a [ChunkKey],
        deadline: Instant,
    ) -> BoxFuture<'a, Vec<Result<Option<u64>, BackendError>>> {
        Box::pin(async move {
            self.delay().await;
            let mut found = self.inner.contains(keys, deadline).await;
            for found in &mut found {
                match self.fate() {
                    Fate::Error(_) => *found = Err(injected().into()),
                    Fate::Deadline => *found = Err(BackendError::Deadline),
                    Fate::Miss => *found = Ok(None),
                    Fate::Declined | Fate::Fine => {}
                }
            }
            found
        })
    }

    fn load(&self, items: Vec<LoadItem>, deadline: Instant) -> BoxFuture<'_, Vec<Loaded>> {
        Box::pin(async move {
            self.delay().await;
            let (mut fates, mut through) = (Vec::new(), Vec::new());
            for item in items {
                let failed = |error, slot| Loaded::Failed {
                    error,
                    slot: FailedSlot::Quiet(slot),
                };
                fates.push(match self.fate() {
                    Fate::Error(true) => {
                        // As a device would that may still write: it is proven quiet at once
                        // here, but the caller does not get it back.
                        item.slot.quarantine().release_proven_quiet();
                        Some(Loaded::Failed {
                            error: injected().into(),
                            slot: FailedSlot::Quarantined,
                        })
                    }
                    Fate::Error(false) => Some(failed(injected().into(), item.slot)),
                    Fate::Deadline => Some(failed(BackendError::Deadline, item.slot)),
                    Fate::Miss => Some(Loaded::Miss(item.slot)),
                    Fate::Declined | Fate::Fine => {
                        through.push(item);
                        None
                    }
                });
            }
            let through = self.inner.load(through, deadline).await;
            self.delay().await;
            merge(fates, through)
        })
    }

    fn store(
        &self,
        items: Vec<StoreItem>,
        deadline: Instant,
    ) -> BoxFuture<'_, Vec<Result<Stored, BackendError>>> {
        let clears = self.clears.load(Ordering::SeqCst);
        Box::pin(async move {
            self.delay().await;
            // What has not reached the tier when all is forgotten is forgotten too.
            let forgotten = || self.clears.load(Ordering::SeqCst) != clears;
            let (mut fates, mut through) = (Vec::new(), Vec::new());
            for item in items {
                fates.push(match self.fate() {
                    _ if forgotten() => Some(Ok(Stored::Declined)),
                    Fate::Error(true) => {
                        self.inner.store(vec![item], deadline).await;
                        Some(Err(injected().into()))
                    }
                    Fate::Error(false) => Some(Err(injected().into())),
                    Fate::Deadline => Some(Err(BackendError::Deadline)),
                    Fate::Declined => Some(Ok(Stored::Declined)),
                    Fate::Miss | Fate::Fine => {
                        through.push(item);
                        None
                    }
                });
            }
            let through = match forgotten() {
                true => through.iter().map(|_| Ok(Stored::Declined)).collect(),
                false => self.inner.store(through, deadline).await,
            };
            self.delay().await;
            merge(fates, through)
        })
    }

    fn remove<'a>(
        &'a self,
        keys: &'a [ChunkKey],
        deadline: Instant,
    ) -> BoxFuture<'a, Vec<Result<bool, BackendError>>> {
        Box::pin(async move {
            self.delay().await;
            let (mut fates, mut through) = (Vec::new(), Vec::new());
            for key in keys {
                fates.push(match self.fate() {
                    Fate::Error(true) => {
                        self.inner.remove(&[*key], deadline).await;
                        Some(Err(injected().into()))
                    }
                    Fate::Error(false) => Some(Err(injected().into())),
                    Fate::Deadline => Some(Err(BackendError::Deadline)),
                    Fate::Miss | Fate::Declined | Fate::Fine => {
                        through.push(*key);
                        None
                    }
                });
            }
            let through = self.inner.remove(&through, deadline).await;
            merge(fates, through)
        })
    }

    fn clear(&self, deadline: Instant) -> BoxFuture<'_, Result<u64, BackendError>> {
        self.clears.fetch_add(1, Ordering::SeqCst);
        Box::pin(async move {
            self.delay().await;
            match self.fate() {
                Fate::Error(true) => {
                    self.inner.clear(deadline).await?;
                    Err(injected().into())
                }
                Fate::Error(false) => Err(injected().into()),
                Fate::Deadline => Err(BackendError::Deadline),
                Fate::Miss | Fate::Declined | Fate::Fine => self.inner.clear(deadline).await,
            }
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
            match self.fate() {
                Fate::Error(_) => Err(injected().into()),
                Fate::Deadline => Err(BackendError::Deadline),
                Fate::Miss | Fate::Declined | Fate::Fine => {
                    self.inner.list(cursor, limit, deadline).await
                }
            }
        })
    }

    fn usage(&self, deadline: Instant) -> BoxFuture<'_, Result<Usage, BackendError>> {
        Box::pin(async move {
            self.delay().await;
            match self.fate() {
                Fate::Error(_) => Err(injected().into()),
                Fate::Deadline => Err(BackendError::Deadline),
                Fate::Miss | Fate::Declined | Fate::Fine => self.inner.usage(deadline).await,
            }
        })
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        self.inner.counters()
    }

    fn health(&self) -> Health {
        self.inner.health()
    }

    fn close(&self, deadline: Instant) -> BoxFuture<'_, Result<(), BackendError>> {
        self.inner.close(deadline)
    }
}
