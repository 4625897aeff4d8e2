//! Copies in a worker's memory: the registration that they are made for, and their end when the
//! worker goes.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

type Then = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Inside {
    /// Number of the registration whose copies are admitted.
    open: u64,
    /// Number of connections of this registration that have ended. A copy that was requested before
    /// such an end is not made after it: no answer reaches the worker, which reuses the blocks.
    cuts: u64,
    copies: usize,
    /// Actions to run when the last copy is over.
    then: Vec<Then>,
    /// Time at which a ping of the worker was last answered. While pings are answered, the worker
    /// waits for copies.
    answered: Option<Instant>,
}

/// Admits copies into the memory of a registered worker. Dropping it admits no more; it is dropped
/// with the registration.
#[derive(Debug, Default)]
pub(crate) struct Gate(Entrance);

impl Gate {
    /// Returns the gate of a worker that registers again. This gate admits no more copies; the new
    /// one also counts those under way.
    pub(crate) fn next(&self) -> Self {
        let inside = Arc::clone(&self.0.inside);
        let mut locked = inside.lock();
        locked.open += 1;
        let registration = locked.open;
        drop(locked);
        Self(Entrance {
            inside,
            registration,
            cuts: 0,
        })
    }

    /// Returns the entrance for copies that are requested on the worker's present connection.
    pub(crate) fn entrance(&self) -> Entrance {
        let cuts = self.0.inside.lock().cuts;
        Entrance {
            cuts,
            ..self.0.clone()
        }
    }

    /// Notes that the worker's connection has ended: copies that were requested on it stop.
    pub(crate) fn cut(&self) {
        self.0.inside.lock().cuts += 1;
    }

    /// Notes that a ping of the worker was answered.
    pub(crate) fn answered(&self, now: Instant) {
        self.0.inside.lock().answered = Some(now);
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        let mut inside = self.0.inside.lock();
        if inside.open == self.0.registration {
            inside.open += 1;
        }
    }
}

/// The way into a worker's memory, for as long as the worker is registered.
#[derive(Clone, Default)]
pub(crate) struct Entrance {
    inside: Arc<Mutex<Inside>>,
    registration: u64,
    cuts: u64,
}

impl Entrance {
    /// Returns the right to make a copy that was requested at `asked`. `None` if the worker is not
    /// registered any more, its connection has ended since, or no answer has reached it for
    /// `tolerance`.
    pub(crate) fn enter(&self, asked: Instant, tolerance: Duration) -> Option<Copying> {
        let mut inside = self.inside.lock();
        if !inside.lets_in(self) || inside.gave_up(asked, tolerance) {
            return None;
        }
        inside.copies += 1;
        Some(Copying(self.clone()))
    }

    /// Runs `then` as soon as no copy is under way: now, or on the thread that ends the last one.
    pub(crate) fn when_idle(&self, then: Then) {
        let mut inside = self.inside.lock();
        if inside.copies > 0 {
            inside.then.push(then);
            return;
        }
        drop(inside);
        then();
    }
}

impl Inside {
    fn lets_in(&self, entrance: &Entrance) -> bool {
        (self.open, self.cuts) == (entrance.registration, entrance.cuts)
    }

    fn gave_up(&self, asked: Instant, tolerance: Duration) -> bool {
        let heard = self.answered.map_or(asked, |answered| answered.max(asked));
        heard.elapsed() >= tolerance
    }
}

impl fmt::Debug for Entrance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inside = self.inside.lock();
        write!(f, "Entrance({} copies)", inside.copies)
    }
}

/// A copy in a worker's memory.
#[derive(Debug)]
pub(crate) struct Copying(Entrance);

impl Copying {
    /// Returns false when the copy must stop: the registration or the connection is over, or no
    /// answer has reached the worker for `tolerance`, so it may have reused the blocks.
    pub(crate) fn may_go_on(&self, asked: Instant, tolerance: Duration) -> bool {
        let inside = self.0.inside.lock();
        inside.lets_in(&self.0) && !inside.gave_up(asked, tolerance)
    }
}

impl Drop for Copying {
    fn drop(&mut self) {
        let mut inside = self.0.inside.lock();
        inside.copies -= 1;
        let then = match inside.copies {
            0 => std::mem::take(&mut inside.then),
            _ => Vec::new(),
        };
        drop(inside);
        then.into_iter().for_each(|then| then());
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    const TOLERANCE: Duration = Duration::from_secs(5);

    fn enter(entrance: &Entrance) -> Option<Copying> {
        entrance.enter(Instant::now(), TOLERANCE)
    }

    #[test]
    fn a_closed_gate_lets_no_copy_in_and_reports_the_end_of_the_last() {
        let gate = Gate::default();
        let entrance = gate.entrance();
        let first = enter(&entrance);
        let again = gate.next();
        drop(gate);
        assert!(first.is_some() && enter(&entrance).is_none());
        let second = enter(&again.entrance());
        assert!(second.is_some(), "it is registered again");
        drop(again);
        let reports = Arc::new(AtomicUsize::new(0));
        let report = || {
            let reports = Arc::clone(&reports);
            Box::new(move || {
                reports.fetch_add(1, Ordering::Relaxed);
            })
        };
        entrance.when_idle(report());
        drop(second);
        assert_eq!(reports.load(Ordering::Relaxed), 0, "the first is under way");
        drop(first);
        assert_eq!(reports.load(Ordering::Relaxed), 1);
        entrance.when_idle(report());
        assert_eq!(reports.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn a_copy_under_way_stops_when_its_registration_is_over_or_its_worker_gave_up() {
        let now = Instant::now();
        for again in [false, true] {
            let gate = Gate::default();
            let copying = enter(&gate.entrance()).expect("it is registered");
            assert!(copying.may_go_on(now, TOLERANCE));
            let next = again.then(|| gate.next());
            drop(gate);
            assert!(!copying.may_go_on(now, TOLERANCE));
            drop(next);
        }
        let gate = Gate::default();
        let before = gate.entrance();
        let copying = enter(&before).expect("it is registered");
        gate.cut();
        assert!(!copying.may_go_on(now, TOLERANCE) && enter(&before).is_none());
        assert!(enter(&gate.entrance()).is_some(), "it is back");
        let gate = Gate::default();
        let copying = enter(&gate.entrance()).expect("it is registered");
        let long_ago = now - TOLERANCE;
        assert!(!copying.may_go_on(long_ago, TOLERANCE));
        gate.answered(now);
        assert!(
            copying.may_go_on(long_ago, TOLERANCE),
            "it is answered, so it waits"
        );
    }

    #[test]
    fn a_worker_that_is_answered_waits() {
        let gate = Gate::default();
        let long_ago = Instant::now() - 2 * TOLERANCE;
        assert!(gate.entrance().enter(long_ago, TOLERANCE).is_none());
        gate.answered(Instant::now() - TOLERANCE / 2);
        assert!(gate.entrance().enter(long_ago, TOLERANCE).is_some());
    }
}
