//! The circuit breaker: takes a store out that does not answer, and says when to probe it.

use std::time::Duration;

use lmc_backend::{BackendError, Unavailable};
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::store::StoreError;

/// Failures without a success in between after which the store is out.
const MAX_FAILURES: u32 = 5;

/// The decision whether the store is used. The store is out at first, until it has answered once.
#[derive(Debug)]
pub(super) struct Breaker {
    state: Mutex<State>,
    /// Wakes the task that probes.
    pub(super) tripped: Notify,
    pause: (Duration, Duration),
}

#[derive(Debug)]
struct State {
    failures: u32,
    /// The reason why the store is out.
    out: Option<String>,
    /// Pause before the next probe.
    pause: Duration,
    trips: u64,
}

impl Breaker {
    /// Makes a breaker that probes after `pause.0` at first and after `pause.1` at most.
    pub(super) fn new(pause: (Duration, Duration)) -> Self {
        Self {
            state: Mutex::new(State {
                failures: 0,
                out: Some("the store has not answered yet".to_owned()),
                pause: pause.0,
                trips: 0,
            }),
            tripped: Notify::new(),
            pause,
        }
    }

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
        self.trip(&mut state, error);
    }

    /// Takes a store out that answers and cannot be used.
    pub(super) fn take_out(&self, error: &StoreError) {
        let mut state = self.state.lock();
        if state.out.is_none() {
            self.trip(&mut state, error);
        }
    }

    fn trip(&self, state: &mut State, error: &StoreError) {
        tracing::warn!(%error, "remote store taken out; its chunks are misses until it answers again");
        state.out = Some(error.to_string());
        state.pause = self.pause.0;
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

    /// Notes that a probe failed: the next pause is longer.
    pub(super) fn probe_failed(&self, error: &StoreError) {
        let mut state = self.state.lock();
        if let Some(reason) = &mut state.out {
            *reason = error.to_string();
            state.pause = (state.pause * 2).min(self.pause.1);
        }
    }

    /// Returns the pause before the next probe; `None` while the store is in use.
    pub(super) fn pause(&self) -> Option<Duration> {
        let state = self.state.lock();
        state.out.is_some().then_some(state.pause)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: Duration = Duration::from_millis(250);
    const MOST: Duration = Duration::from_secs(1);

    #[test]
    fn repeated_failures_take_a_store_out_and_a_probe_takes_it_back() {
        let breaker = Breaker::new((FIRST, MOST));
        assert!(breaker.check().is_err(), "it has not answered yet");
        breaker.take_back();
        assert!(breaker.check().is_ok());
        let failed = || breaker.failed(&StoreError::Deadline);
        (1..MAX_FAILURES).for_each(|_| failed());
        breaker.answered();
        (1..MAX_FAILURES).for_each(|_| failed());
        breaker.failed(&StoreError::Full { needed: 1 });
        assert_eq!((breaker.pause(), breaker.trips()), (None, 0));
        failed();
        assert_eq!((breaker.pause(), breaker.trips()), (Some(FIRST), 1));
        failed();
        assert!(breaker.check().is_err() && breaker.trips() == 1);
        let denied = StoreError::Denied {
            reason: "wrong password".to_owned(),
        };
        breaker.answered();
        breaker.probe_failed(&denied);
        assert_eq!(breaker.pause(), Some(2 * FIRST));
        assert_eq!(breaker.out(), Some(denied.to_string()));
        breaker.probe_failed(&denied);
        breaker.probe_failed(&denied);
        assert_eq!(breaker.pause(), Some(MOST));
        breaker.take_back();
        (0..MAX_FAILURES).for_each(|_| failed());
        assert_eq!((breaker.pause(), breaker.trips()), (Some(FIRST), 2));
    }
}
