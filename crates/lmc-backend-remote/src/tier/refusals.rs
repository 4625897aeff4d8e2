//! Refusals of writes by a store that can be read.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::breaker::IDLE_PAUSES;
use super::config::RemoteConfig;
use crate::store::StoreError;

/// Knowledge that a store refuses writes.
///
/// A successful write at least as large as the refused one ends the fault at once. A smaller write shows
/// nothing about larger ones, unless no write was refused for a while: perhaps no chunk of that size is ever
/// written again.
#[derive(Debug)]
pub(super) struct Refusals {
    /// Time after the last refusal from which any successful write ends the fault.
    known_for: Duration,
    largest: Mutex<Option<Refused>>,
}

/// The largest write that the store refused.
#[derive(Debug)]
struct Refused {
    reason: String,
    len: u64,
    /// Time of the last refusal of any write.
    last: Instant,
}

impl Refusals {
    pub(super) fn new(config: &RemoteConfig) -> Self {
        Self {
            known_for: IDLE_PAUSES * config.probe_pause.1,
            largest: Mutex::default(),
        }
    }

    /// Records that the store, which can be read, refused a write of `len` bytes.
    pub(super) fn refused(&self, error: &StoreError, len: u64, now: Instant) {
        let Some(remedy) = error.remedy_of_write() else {
            return;
        };
        let mut largest = self.largest.lock();
        match &mut *largest {
            None => tracing::warn!(
                %error,
                "remote store refuses writes; chunks are read from it, and not written: {remedy}"
            ),
            Some(larger) if larger.len > len => {
                larger.last = now;
                return;
            }
            Some(_) => {}
        }
        *largest = Some(Refused {
            reason: format!("writes are refused: {error}; {remedy}"),
            len,
            last: now,
        });
    }

    /// Records that the store accepted a write of `len` bytes.
    pub(super) fn written(&self, len: u64, now: Instant) {
        let ends =
            |refused: &mut Refused| refused.len <= len || now >= refused.last + self.known_for;
        if self.largest.lock().take_if(ends).is_some() {
            tracing::info!("remote store accepts writes again");
        }
    }

    /// Returns the reason why writes are refused, with the remedy.
    pub(super) fn fault(&self) -> Option<String> {
        let largest = self.largest.lock();
        largest.as_ref().map(|refused| refused.reason.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A store was degraded until the restart of its daemon once only smaller chunks were written.
    #[test]
    fn smaller_writes_end_a_refusal_that_is_not_repeated_for_a_while() {
        let (refusals, begun) = (Refusals::new(&RemoteConfig::default()), Instant::now());
        let at = |seconds| begun + Duration::from_secs(seconds);
        let refused = |len, seconds| {
            refusals.refused(&StoreError::Full { needed: len }, len, at(seconds));
        };
        let is_fault = |needed: u64| {
            let fault = refusals.fault();
            fault.is_some_and(|reason| reason.contains(&format!(" {needed} bytes")))
        };
        refusals.refused(&StoreError::Deadline, 100, at(0));
        assert_eq!(refusals.fault(), None);
        refused(100, 0);
        refusals.written(99, at(59));
        refused(10, 59);
        refusals.written(99, at(118));
        assert!(is_fault(100), "of the largest");
        refusals.written(9, at(119));
        assert_eq!(refusals.fault(), None);
        refused(10, 119);
        refused(100, 119);
        assert!(is_fault(100));
        refusals.written(100, at(119));
        assert_eq!(refusals.fault(), None);
    }
}
