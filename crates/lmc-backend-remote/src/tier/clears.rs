//! Clears: those that are known here, and the object by which daemons pass them on.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use lmc_backend::{BackendError, Clear, ClearEpoch};
use lmc_key::SpaceId;
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};

use super::Shared;
use crate::format::{ClearSet, ClearsError, Name};
use crate::small::read_clears;
use crate::store::{StoreError, until};

/// Writes of the object after each of which it is read again, at most.
const MAX_WRITES: usize = 4;

/// More clears than were ever made, for an epoch above all that a damaged object may have held.
const LOST_CLEARS: u64 = 1 << 32;

/// The clears that are known here.
#[derive(Debug)]
pub(super) struct Clears {
    known: Mutex<ClearSet>,
    /// One reader and writer of the object at a time.
    syncing: tokio::sync::Mutex<()>,
    /// True once the object was read.
    was_read: watch::Sender<bool>,
    /// Wakes the task that keeps the object in step.
    raised: Notify,
}

impl Default for Clears {
    fn default() -> Self {
        Self {
            known: Mutex::default(),
            syncing: tokio::sync::Mutex::default(),
            was_read: watch::channel(false).0,
            raised: Notify::new(),
        }
    }
}

impl Clears {
    /// Returns the newest epoch known for a space.
    pub(super) fn of(&self, space: SpaceId) -> ClearEpoch {
        self.known.lock().of(space)
    }

    pub(super) fn known(&self) -> Vec<Clear> {
        self.known.lock().clears()
    }

    pub(super) async fn wait_until_read(&self) {
        // The sender lives as long as `self`.
        let _ = self.was_read.subscribe().wait_for(|&read| read).await;
    }
}

impl Shared {
    /// Keeps the clears in step with the store, and probes a store that is out.
    pub(super) async fn mind(self: Arc<Self>) {
        loop {
            let deadline = Instant::now() + self.config.timeout;
            match self.sync_clears(deadline).await {
                Ok(_) => self.breaker.take_back(),
                Err(error) => match self.breaker.pause() {
                    Some(_) => self.breaker.probe_failed(&error),
                    None => self.breaker.failed(&error),
                },
            }
            let pause = self.breaker.pause();
            let pause = jittered(pause.unwrap_or(self.config.clears_interval));
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = self.breaker.tripped.notified() => {
                    let pause = self.breaker.pause().unwrap_or_default();
                    tokio::time::sleep(jittered(pause)).await;
                }
                () = self.clears.raised.notified(), if self.breaker.pause().is_none() => {}
            }
        }
    }

    /// Notes a clear, and passes it on.
    pub(super) async fn clear(
        self: &Arc<Self>,
        clear: Clear,
        deadline: Instant,
    ) -> Result<u64, BackendError> {
        if self.is_closed.load(Ordering::Acquire) {
            return Err(BackendError::Closed);
        }
        self.clears.known.lock().note(clear);
        self.breaker.check()?;
        let shared = Arc::clone(self);
        let passed_on = self.spawn(async move {
            let begun = Instant::now();
            let synced = shared.sync_clears(deadline).await;
            shared.note([&synced], begun);
            if !matches!(synced, Ok(None)) {
                shared.clears.raised.notify_one();
            }
            synced
        });
        match passed_on.await {
            Ok(Ok(None)) => Ok(0),
            Ok(Ok(Some(error)) | Err(error)) => Err(error.into()),
            Err(_) => Err(BackendError::Closed),
        }
    }

    /// Joins the clears of the store with those known here, and writes them where the store does
    /// not know them all.
    ///
    /// Two writers may overtake each other. Each reads again after its write, and every daemon
    /// writes what it knows and does not find at its next read, so that no clear is lost while a
    /// daemon that knows it lives. Returns the refusal of a write where the store may be read.
    async fn sync_clears(&self, deadline: Instant) -> Result<Option<StoreError>, StoreError> {
        let syncing = async { Ok::<_, StoreError>(self.clears.syncing.lock().await) };
        let _syncing = until(deadline, syncing).await?;
        for _ in 0..=MAX_WRITES {
            let mut theirs = match read_clears(&*self.store, deadline).await? {
                Ok(theirs) => theirs,
                Err(ClearsError::Damaged) => {
                    self.counters.clears_unread.add(1);
                    let mut known = self.clears.known.lock();
                    if *self.clears.was_read.borrow() {
                        tracing::warn!(
                            "the clears in the remote store are damaged, and are written again"
                        );
                    } else {
                        // What it said may be in no daemon that lives: a clear that covers it.
                        tracing::warn!(
                            "the clears in the remote store are damaged: all chunks before now count as cleared"
                        );
                        let mut epoch = known.of_all().next();
                        epoch.counter = (epoch.counter + LOST_CLEARS).min(ClearEpoch::MAX_COUNTER);
                        known.note(Clear::all(epoch));
                    }
                    ClearSet::default()
                }
                Err(error) => {
                    // A later lmc passes clears on by it, which are not known here: it is not
                    // overwritten, and what it may have cleared is not served.
                    self.counters.clears_unread.add(1);
                    let error = StoreError::unavailable(format!(
                        "{error}: use one release of lmc with one store"
                    ));
                    self.breaker.take_out(&error);
                    return Err(error);
                }
            };
            let ours = {
                let mut known = self.clears.known.lock();
                known.join(&theirs);
                known.clone()
            };
            self.clears.was_read.send_replace(true);
            if !theirs.join(&ours) {
                return Ok(None);
            }
            let bytes = ours.encode().into();
            match self.store.write(Name::Clears, bytes, deadline).await {
                Ok(()) => *self.refused.lock() = None,
                Err(error) if error.is_refusal() => {
                    self.note_refusal(&error);
                    return Ok(Some(error));
                }
                Err(error) => return Err(error),
            }
        }
        Err(StoreError::unavailable(
            "the object of clears changes faster than it is written",
        ))
    }
}

/// Returns a pause between three and five quarters of the one given, so that daemons which lost
/// a store at one time do not all probe it at one time.
pub(super) fn jittered(pause: Duration) -> Duration {
    let mut byte = [128];
    // Without random numbers the pause is as given.
    let _ = getrandom::fill(&mut byte);
    pause * (384 + u32::from(byte[0])) / 512
}
