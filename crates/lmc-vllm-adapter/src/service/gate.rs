//! Copies in a worker's memory, and their end when the worker goes.

use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;

type Then = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Inside {
    closed: bool,
    copies: usize,
    /// What happens when the last copy is over.
    then: Vec<Then>,
}

/// Lets copies into the memory of a registered worker. Dropping it lets no more in; it goes with
/// the registration.
#[derive(Debug, Default)]
pub(crate) struct Gate(Entrance);

impl Gate {
    /// Where copies come in.
    pub(crate) fn entrance(&self) -> Entrance {
        self.0.clone()
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.0.0.lock().closed = true;
    }
}

/// The way into a worker's memory, for as long as the worker is registered.
#[derive(Clone, Default)]
pub(crate) struct Entrance(Arc<Mutex<Inside>>);

impl Entrance {
    /// The right to copy; none when the worker is not registered any more.
    pub(crate) fn enter(&self) -> Option<Copying> {
        let mut inside = self.0.lock();
        if inside.closed {
            return None;
        }
        inside.copies += 1;
        Some(Copying(self.clone()))
    }

    /// Does something as soon as no copy is under way: now, or where the last one ends.
    pub(crate) fn when_quiet(&self, then: Then) {
        let mut inside = self.0.lock();
        if inside.copies > 0 {
            inside.then.push(then);
            return;
        }
        drop(inside);
        then();
    }
}

impl fmt::Debug for Entrance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inside = self.0.lock();
        write!(f, "Entrance({} copies)", inside.copies)
    }
}

/// A copy in a worker's memory.
#[derive(Debug)]
pub(crate) struct Copying(Entrance);

impl Drop for Copying {
    fn drop(&mut self) {
        let mut inside = self.0.0.lock();
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

    #[test]
    fn a_closed_gate_lets_nobody_in_and_tells_when_the_last_is_out() {
        let gate = Gate::default();
        let entrance = gate.entrance();
        let (first, second) = (entrance.enter(), entrance.enter());
        assert!(first.is_some() && second.is_some());
        drop(gate);
        assert!(entrance.enter().is_none());
        let told = Arc::new(AtomicUsize::new(0));
        let tell = || {
            let told = Arc::clone(&told);
            Box::new(move || {
                told.fetch_add(1, Ordering::Relaxed);
            })
        };
        entrance.when_quiet(tell());
        drop(first);
        assert_eq!(told.load(Ordering::Relaxed), 0);
        drop(second);
        assert_eq!(told.load(Ordering::Relaxed), 1);
        entrance.when_quiet(tell());
        assert_eq!(told.load(Ordering::Relaxed), 2);
    }
}
