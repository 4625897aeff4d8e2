//! Access of the tier's types to the store, with the health of its paths, and their tasks.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use lmc_backend::{BackendError, Health, Unavailable, now};
use tokio::runtime::Handle;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

use super::breaker::{Attempt, Paths};
use super::config::RemoteConfig;
use super::counters::RemoteCounters;
use super::refusals::Refusals;
use crate::store::{Store, StoreError};

/// A store, with its health according to the outcomes of all requests. All types of the tier use it, and it
/// uses none of them.
#[derive(Debug)]
pub(super) struct StoreAccess {
    pub(super) store: Arc<dyn Store>,
    pub(super) config: RemoteConfig,
    pub(super) paths: Paths,
    pub(super) refusals: Refusals,
    pub(super) counters: RemoteCounters,
    runtime: Handle,
    /// Tasks that run to their end even if their caller is gone.
    tasks: TaskTracker,
    is_closed: AtomicBool,
}

impl StoreAccess {
    pub(super) fn new(config: RemoteConfig, store: Arc<dyn Store>, runtime: Handle) -> Self {
        Self {
            paths: Paths::new(&config),
            refusals: Refusals::new(&config),
            counters: RemoteCounters::default(),
            tasks: TaskTracker::new(),
            is_closed: AtomicBool::new(false),
            store,
            config,
            runtime,
        }
    }

    /// Returns an error once the tier was closed.
    pub(super) fn check_open(&self) -> Result<(), BackendError> {
        match self.is_closed.load(Ordering::Acquire) {
            true => Err(BackendError::Closed),
            false => Ok(()),
        }
    }

    /// Runs a task of the tier that ends with its caller.
    pub(super) fn spawn<T: Send + 'static>(
        &self,
        task: impl Future<Output = T> + Send + 'static,
    ) -> AbortOnDropHandle<T> {
        AbortOnDropHandle::new(self.runtime.spawn(task))
    }

    /// Runs a task of the tier to its end.
    pub(super) fn spawn_tracked(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.tasks.spawn_on(task, &self.runtime);
    }

    /// Records the outcome of a batch: a single success shows that the path works.
    pub(super) fn note<T>(&self, mut attempt: Attempt, results: &[Result<T, StoreError>]) {
        if results.iter().any(Result::is_ok) {
            attempt.succeeded();
        } else if let Some(Err(error)) = results.last() {
            self.note_failure(&mut attempt, error);
        }
    }

    pub(super) fn note_failure(&self, attempt: &mut Attempt, error: &StoreError) {
        if attempt.failed(error, now()) {
            self.counters.failed.add(1);
        }
    }

    /// Records the failure of a write of `len` bytes. A refusal does not take the path of writes out of use:
    /// the next write may be smaller, or find free capacity.
    pub(super) fn note_failed_write(&self, attempt: &mut Attempt, error: &StoreError, len: u64) {
        match error.is_refusal() {
            true => {
                self.counters.failed.add(1);
                self.refusals.refused(error, len, now());
            }
            false => self.note_failure(attempt, error),
        }
    }

    /// Records the outcome of requests that prove nothing about any path, such as removals.
    pub(super) fn note_aside<T>(&self, results: &[Result<T, StoreError>]) {
        for error in results.iter().filter_map(|result| result.as_ref().err()) {
            self.counters.failed.add(1);
            self.refusals.refused(error, 0, now());
        }
    }

    /// Returns the health of the paths. `clears`: the reason why the clears are not known.
    pub(super) fn health(&self, clears: Option<Unavailable>) -> Health {
        let (now, paths) = (now(), &self.paths);
        let unknown = clears.map(|unknown| unknown.reason);
        if let Some(reason) = unknown.or_else(|| paths.lookups.fault(now)) {
            return Health::Down { reason };
        }
        let refused = self.refusals.fault();
        let faults = [paths.loads.fault(now), paths.writes.fault(now), refused];
        let faults: Vec<String> = faults.into_iter().flatten().collect();
        match faults.is_empty() {
            true => Health::Ready,
            false => Health::Degraded {
                reason: faults.join("; "),
            },
        }
    }

    /// Closes the tier for further operations.
    pub(super) fn set_closed(&self) {
        self.is_closed.store(true, Ordering::Release);
    }

    /// Waits for the tracked tasks, and closes the store.
    pub(super) async fn close(&self, deadline: Instant) -> Result<(), BackendError> {
        self.tasks.close();
        // Tasks that still run then were not acknowledged.
        let ended = tokio::time::timeout_at(deadline.into(), self.tasks.wait()).await;
        self.store.close(deadline).await;
        ended.map_err(|_| BackendError::Deadline)
    }
}

/// Returns one error for each key of a batch.
pub(super) fn each<T>(len: usize, error: &BackendError) -> Vec<Result<T, BackendError>> {
    (0..len).map(|_| Err(error.clone())).collect()
}
