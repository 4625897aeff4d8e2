//! The circuit breaker: takes a store out that does not answer.

use lmc_backend::{BackendError, Unavailable};
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::store::StoreError;

/// Failures without a success in between after which the store is out.
const MAX_FAILURES: u32 = 5;

/// The decision whether the store answers well enough to be used.
#[derive(Debug, Default)]
pub(super) struct Breaker {
    state: Mutex<State>,
    /// Wakes the task that probes.
    pub(super) tripped: Notify,
}

#[derive(Debug, Default)]
struct State {
    failures: u32,
    /// The reason why the store is out.
    out: Option<String>,
    trips: u64,
}

impl Breaker {
    /// Returns the reason why the store is out.
    pub(super) fn out(&self) -> Option<String> {
        self.state.lock().out.clone()
    }

    /// Returns an error while the store is out.
    pub(super) fn check(&self) -> Result<(), BackendError> {
        match self.out() {
            Some(reason) => Err(Unavailable { reason }.into()),
            None => Ok(()),
        }
    }

    /// Returns the number of times that the store was taken out.
    pub(super) fn trips(&self) -> u64 {
        self.state.lock().trips
    }

    /// Notes that the store answered an operation.
    pub(super) fn answered(&self) {
        self.state.lock().failures = 0;
    }

    /// Notes that the store failed an operation. An error of one object does not count.
    pub(super) fn failed(&self, error: &StoreError) {
        if error.is_of_object() {
            return;
        }
        let mut state = self.state.lock();
        state.failures = state.failures.saturating_add(1);
        if state.out.is_some() || state.failures < MAX_FAILURES {
            return;
        }
        tracing::warn!(%error, "remote store taken out; its chunks are misses until it answers again");
        state.out = Some(error.to_string());
        state.trips += 1;
        self.tripped.notify_one();
    }

    /// Notes that a probe was answered: the store is used again.
    pub(super) fn take_back(&self) {
        let mut state = self.state.lock();
        state.failures = 0;
        if let Some(reason) = state.out.take() {
            tracing::info!(before = reason, "remote store in use");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_failures_take_a_store_out_and_a_probe_takes_it_back() {
        let breaker = Breaker::default();
        let failed = || breaker.failed(&StoreError::Deadline);
        (1..MAX_FAILURES).for_each(|_| failed());
        breaker.answered();
        (1..MAX_FAILURES).for_each(|_| failed());
        breaker.failed(&StoreError::Full { needed: 1 });
        assert!(breaker.check().is_ok() && breaker.trips() == 0);
        failed();
        assert_eq!(breaker.out(), Some(StoreError::Deadline.to_string()));
        failed();
        breaker.answered();
        assert!(breaker.check().is_err() && breaker.trips() == 1);
        breaker.take_back();
        assert!(breaker.check().is_ok());
        (0..MAX_FAILURES).for_each(|_| failed());
        assert!(breaker.check().is_err() && breaker.trips() == 2);
    }
}
