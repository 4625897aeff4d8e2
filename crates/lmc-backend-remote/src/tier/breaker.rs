//! Circuit breakers: each takes one path of the store out of use if it fails or hangs, and no other path.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::config::RemoteConfig;
use crate::store::StoreError;

/// Failures in a row after which a path is out.
const MAX_FAILURES: u32 = 5;
/// Number of longest pauses after which a path that no request has tried again no longer counts as faulty.
/// The same applies to a store whose refusals are not repeated.
pub(super) const IDLE_PAUSES: u32 = 4;

/// A kind of requests. Success of one kind shows nothing about another: a store may answer small requests at
/// once and move no value.
///
/// The clears are a path as well. It is taken out not by failures, but by the age of the last reading
/// (`Known`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Path {
    /// Reads of headers.
    Lookups,
    /// Reads of values.
    Loads,
    /// Writes of values.
    Writes,
}

impl Path {
    fn name(self) -> &'static str {
        match self {
            Self::Lookups => "lookups",
            Self::Loads => "loads",
            Self::Writes => "writes",
        }
    }

    /// Returns the name of the counter of how often the path was taken out.
    fn counter(self) -> &'static str {
        match self {
            Self::Lookups => "lookups_taken_out",
            Self::Loads => "loads_taken_out",
            Self::Writes => "writes_taken_out",
        }
    }

    fn consequence(self) -> &'static str {
        match self {
            Self::Lookups | Self::Loads => "its chunks are misses",
            Self::Writes => "chunks are read from it, and not written",
        }
    }
}

/// The paths of a store that failures in a row take out of use.
#[derive(Debug)]
pub(super) struct Paths {
    pub(super) lookups: Arc<Breaker>,
    pub(super) loads: Arc<Breaker>,
    pub(super) writes: Arc<Breaker>,
}

impl Paths {
    pub(super) fn new(config: &RemoteConfig) -> Self {
        let breaker = |path| Arc::new(Breaker::new(path, config));
        Self {
            lookups: breaker(Path::Lookups),
            loads: breaker(Path::Loads),
            writes: breaker(Path::Writes),
        }
    }

    /// Returns how often each path was taken out.
    pub(super) fn trips(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let paths = [&self.lookups, &self.loads, &self.writes];
        paths
            .into_iter()
            .map(|one| (one.path.counter(), one.state.lock().trips))
    }
}

/// Decides whether a path of the store answers well enough to be used.
#[derive(Debug)]
pub(super) struct Breaker {
    path: Path,
    timeout: Duration,
    /// Pause before a path that is out is tried again: the first one, and the longest one.
    pauses: (Duration, Duration),
    state: Mutex<BreakerState>,
}

#[derive(Debug, Default)]
struct BreakerState {
    failures: u32,
    out: Option<Out>,
    trips: u64,
}

/// State of a path that is out.
#[derive(Debug)]
struct Out {
    reason: String,
    pause: Duration,
    retry_at: Instant,
    /// Start of the request that tries the path.
    tried_since: Option<Instant>,
}

impl BreakerState {
    fn check(&self, now: Instant) -> Result<(), StoreError> {
        match &self.out {
            Some(out) if out.tried_since.is_some() || now < out.retry_at => {
                Err(StoreError::Unavailable {
                    reason: out.reason.clone(),
                })
            }
            _ => Ok(()),
        }
    }
}

impl Breaker {
    fn new(path: Path, config: &RemoteConfig) -> Self {
        Self {
            path,
            timeout: config.timeout,
            pauses: config.probe_pause,
            state: Mutex::default(),
        }
    }

    /// Returns an error while no request of this path may begin.
    pub(super) fn check(&self, now: Instant) -> Result<(), StoreError> {
        self.state.lock().check(now)
    }

    /// Begins a request of this path. While the path is out, one request at a time may try it, after a pause.
    pub(super) fn begin(self: &Arc<Self>, now: Instant) -> Result<Attempt, StoreError> {
        let mut state = self.state.lock();
        state.check(now)?;
        if let Some(out) = &mut state.out {
            out.tried_since = Some(now);
        }
        Ok(Attempt {
            breaker: Arc::clone(self),
            begun: now,
            has_failed: false,
        })
    }

    /// Returns the reason why the path is out. Returns `None` also if no request has tried it for a while,
    /// because nothing is known about an unused path.
    pub(super) fn fault(&self, now: Instant) -> Option<String> {
        let state = self.state.lock();
        let out = state.out.as_ref()?;
        let known_until = out.retry_at + IDLE_PAUSES * self.pauses.1;
        (out.tried_since.is_some() || now < known_until).then(|| out.reason.clone())
    }

    fn failed(&self, error: &StoreError, begun: Instant, now: Instant) {
        let state = &mut *self.state.lock();
        let pause = match &state.out {
            Some(out) if out.tried_since == Some(begun) => self.pauses.1.min(2 * out.pause),
            // The request began before the path was taken out.
            Some(_) => return,
            None => {
                state.failures += 1;
                if state.failures < MAX_FAILURES {
                    return;
                }
                let (path, consequence) = (self.path.name(), self.path.consequence());
                tracing::warn!(
                    path,
                    %error,
                    "path of the remote store taken out; {consequence} until a request of this kind \
                     succeeds; to find the cause: lmc remote check"
                );
                state.trips += 1;
                self.pauses.0
            }
        };
        state.out = Some(Out {
            reason: format!(
                "{} fail: {error}; {}; to find the cause: lmc remote check",
                self.path.name(),
                self.path.consequence()
            ),
            pause,
            retry_at: now + pause,
            tried_since: None,
        });
    }
}

/// A request of one path. If it ends without an outcome, it shows nothing about the path.
#[derive(Debug)]
pub(super) struct Attempt {
    breaker: Arc<Breaker>,
    begun: Instant,
    has_failed: bool,
}

impl Attempt {
    /// Records a success: the path is in use again.
    pub(super) fn succeeded(&self) {
        let mut state = self.breaker.state.lock();
        state.failures = 0;
        if state.out.take().is_some() {
            let path = self.breaker.path.name();
            tracing::info!(path, "path of the remote store in use again");
        }
    }

    /// Records a failure. Returns false if it does not count: an error of one object, a further failure of a
    /// batch, or a deadline that left the store less than half of its time.
    pub(super) fn failed(&mut self, error: &StoreError, now: Instant) -> bool {
        let is_brief = matches!(error, StoreError::Deadline)
            && now.saturating_duration_since(self.begun) < self.breaker.timeout / 2;
        if self.has_failed || error.is_of_object() || is_brief {
            return false;
        }
        self.has_failed = true;
        self.breaker.failed(error, self.begun, now);
        true
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        if let Some(out) = &mut self.breaker.state.lock().out
            && out.tried_since == Some(self.begun)
        {
            out.tried_since = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn paths() -> Paths {
        Paths::new(&RemoteConfig {
            timeout: 20 * MS,
            probe_pause: (10 * MS, 25 * MS),
            ..RemoteConfig::default()
        })
    }

    fn fail(breaker: &Arc<Breaker>, now: Instant) {
        let mut attempt = breaker.begin(now).expect("a request may begin");
        assert!(attempt.failed(&StoreError::unavailable("injected"), now));
        assert!(!attempt.failed(&StoreError::unavailable("injected"), now));
    }

    #[test]
    fn failures_in_a_row_take_a_path_out_and_one_request_at_a_time_tries_it() {
        let (paths, mut now) = (paths(), Instant::now());
        let loads = &paths.loads;
        (1..MAX_FAILURES).for_each(|_| fail(loads, now));
        loads.begin(now).expect("in use").succeeded();
        (1..MAX_FAILURES).for_each(|_| fail(loads, now));
        let before = loads.begin(now).expect("in use");
        fail(loads, now);
        let reason = loads.fault(now).expect("out");
        assert!(reason.starts_with("loads fail") && reason.contains("injected"));
        assert_eq!(
            paths.trips().map(|(_, trips)| trips).collect::<Vec<_>>(),
            [0, 1, 0]
        );
        for pause in [10, 20, 25, 25] {
            now += (pause - 1) * MS;
            assert!(loads.check(now).is_err() && loads.begin(now).is_err());
            now += MS;
            let mut trial = loads.begin(now).expect("it is time");
            assert!(loads.check(now).is_err() && loads.begin(now).is_err());
            // A request that was left by its caller.
            drop(trial);
            trial = loads.begin(now).expect("no other tries it");
            assert!(trial.failed(&StoreError::unavailable("injected"), now));
        }
        assert!(loads.fault(now + 124 * MS).is_some());
        assert_eq!(loads.fault(now + 125 * MS), None, "it was not tried again");
        now += 25 * MS;
        let trial = loads.begin(now).expect("it is time");
        assert!(loads.fault(now + 1000 * MS).is_some());
        trial.succeeded();
        assert!(loads.fault(now).is_none() && loads.begin(now).is_ok());
        // What began before says as much.
        (0..MAX_FAILURES).for_each(|_| fail(loads, now));
        before.succeeded();
        assert!(loads.check(now).is_ok());
    }

    #[test]
    fn what_says_nothing_of_the_path_is_not_counted() {
        let (paths, now) = (paths(), Instant::now());
        for _ in 0..2 * MAX_FAILURES {
            let mut attempt = paths.writes.begin(now).expect("in use");
            assert!(!attempt.failed(&StoreError::Full { needed: 1 }, now));
            assert!(!attempt.failed(&StoreError::Deadline, now + 9 * MS));
        }
        assert!(paths.writes.check(now).is_ok());
        for _ in 0..MAX_FAILURES {
            let mut attempt = paths.writes.begin(now).expect("in use");
            assert!(attempt.failed(&StoreError::Deadline, now + 10 * MS));
        }
        assert!(paths.writes.check(now).is_err());
    }
}
