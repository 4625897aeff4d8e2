//! Choice of the requests that are logged.

use std::sync::atomic::{AtomicU8, Ordering};

/// Requests that the log shows, each with one line. It shows no tails, and no lookups that their
/// engines end before the answer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum RequestLog {
    /// Every request that looks up, and every store and retrieve of a worker.
    All,
    /// Requests whose lookup takes 100 ms or longer, not counting a granted wait for peers to
    /// compute; at most one a second.
    #[default]
    Slow,
    /// None.
    Off,
}

/// A [`RequestLog`] that may change while requests are logged.
#[derive(Debug)]
pub(super) struct AtomicRequestLog(AtomicU8);

impl AtomicRequestLog {
    pub(super) fn new(log: RequestLog) -> Self {
        Self(AtomicU8::new(log as u8))
    }

    pub(super) fn get(&self) -> RequestLog {
        let kinds = [RequestLog::All, RequestLog::Slow, RequestLog::Off];
        kinds[usize::from(self.0.load(Ordering::Relaxed))]
    }

    pub(super) fn set(&self, log: RequestLog) {
        self.0.store(log as u8, Ordering::Relaxed);
    }
}
