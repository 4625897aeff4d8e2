//! Permits to promote a bounded number of bytes at a time, handed out fairly.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use lmc_backend_local::OwnerId;
#[cfg(test)]
use lmc_testkit::interleave::Mutex;
#[cfg(not(test))]
use parking_lot::Mutex;
use tokio::sync::oneshot;

/// A number of units that owners take and give back. Owners that wait are served in turn, each
/// in the order in which it asked; no later request overtakes an earlier one.
#[derive(Debug, Clone)]
pub(super) struct Permits(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    free: u32,
    waiting: HashMap<OwnerId, VecDeque<Waiting>>,
    /// Owners that wait, the next one first.
    turns: VecDeque<OwnerId>,
}

#[derive(Debug)]
struct Waiting {
    units: u32,
    granted: oneshot::Sender<Permit>,
}

/// Units that were taken. Dropping it gives them back.
#[derive(Debug)]
pub(super) struct Permit {
    permits: Permits,
    units: u32,
}

impl Permits {
    pub(super) fn new(units: u32) -> Self {
        Self(Arc::new(Mutex::new(State {
            free: units,
            waiting: HashMap::new(),
            turns: VecDeque::new(),
        })))
    }

    /// Takes units if they are free and no owner waits.
    pub(super) fn try_acquire(&self, units: u32) -> Option<Permit> {
        let mut state = self.0.lock();
        if !state.turns.is_empty() || state.free < units {
            return None;
        }
        state.free -= units;
        Some(self.permit(units))
    }

    /// Waits for units. They must be no more than there are in all.
    pub(super) async fn acquire(&self, owner: OwnerId, units: u32) -> Option<Permit> {
        if let Some(permit) = self.try_acquire(units) {
            return Some(permit);
        }
        let (granted, permit) = oneshot::channel();
        {
            let mut state = self.0.lock();
            let queue = state.waiting.entry(owner).or_default();
            let first = queue.is_empty();
            queue.push_back(Waiting { units, granted });
            if first {
                state.turns.push_back(owner);
            }
        }
        self.grant();
        permit.await.ok()
    }

    fn permit(&self, units: u32) -> Permit {
        Permit {
            permits: self.clone(),
            units,
        }
    }

    /// Grants waiting requests while enough units are free.
    fn grant(&self) {
        // A permit whose receiver is gone comes back through its own drop, after the lock.
        let mut refused = Vec::new();
        let mut state = self.0.lock();
        while let Some(owner) = state.turns.front().copied() {
            let free = state.free;
            let Some(queue) = state.waiting.get_mut(&owner) else {
                state.turns.pop_front();
                continue;
            };
            while queue.front().is_some_and(|next| next.granted.is_closed()) {
                queue.pop_front();
            }
            if queue.front().is_some_and(|next| next.units > free) {
                return;
            }
            let next = queue.pop_front();
            if queue.is_empty() {
                state.waiting.remove(&owner);
                state.turns.pop_front();
            } else {
                state.turns.rotate_left(1);
            }
            if let Some(Waiting { units, granted }) = next {
                state.free -= units;
                refused.extend(granted.send(self.permit(units)).err());
            }
        }
        drop(state);
        drop(refused);
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.permits.0.lock().free += self.units;
        self.permits.grant();
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::{Pin, pin};
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::task::{Context, Poll, Waker};

    use lmc_testkit::interleave::{block_on, explore, random_below, spawn, yield_now};
    use lmc_testkit::rounds;

    use super::*;

    fn poll<T>(future: Pin<&mut impl Future<Output = T>>) -> Option<T> {
        match future.poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(done) => Some(done),
            Poll::Pending => None,
        }
    }

    #[test]
    fn owners_take_turns_however_many_permits_one_waits_for() {
        let (greedy, modest) = (OwnerId(1), OwnerId(2));
        let permits = Permits::new(10);
        let first = permits.try_acquire(10).expect("all are free");
        let mut waits: Vec<_> = (0..5)
            .map(|_| Box::pin(permits.acquire(greedy, 10)))
            .collect();
        for wait in &mut waits {
            assert!(poll(wait.as_mut()).is_none());
        }
        let mut other = pin!(permits.acquire(modest, 1));
        assert!(poll(other.as_mut()).is_none());
        assert!(permits.try_acquire(1).is_none());
        drop(first);
        let second = poll(waits[0].as_mut()).flatten().expect("it came first");
        assert!(poll(other.as_mut()).is_none());
        drop(second);
        // Its turn, although four others came before.
        let its = poll(other.as_mut()).flatten().expect("its turn");
        assert!(poll(waits[1].as_mut()).is_none(), "nine are free");
        drop(its);
        // One that gave up waiting is passed over.
        let third = poll(waits[1].as_mut()).flatten().expect("all are free");
        drop(waits.remove(2));
        drop(third);
        let last = poll(waits[2].as_mut()).flatten().expect("all are free");
        waits.clear();
        drop(last);
        let all = permits.try_acquire(10);
        assert!(all.is_some(), "everything came back");
    }
    #[test]
    fn every_unit_comes_back_and_every_waiter_is_served_in_any_order_of_threads() {
        const UNITS: u32 = 4;
        explore(rounds(1000, 4000), || {
            let permits = Permits::new(UNITS);
            let used = Arc::new(AtomicU32::new(0));
            let thread = |owner| {
                let (permits, used) = (permits.clone(), Arc::clone(&used));
                spawn(move || {
                    for _ in 0..3 {
                        let units = 1 + random_below(UNITS as usize) as u32;
                        let mut wait = Box::pin(permits.acquire(OwnerId(owner), units));
                        // Some give up waiting, perhaps while they are being served.
                        if random_below(4) == 0 {
                            drop(poll(wait.as_mut()));
                            yield_now();
                            continue;
                        }
                        let permit = block_on(wait).expect("permits are never closed");
                        let now = used.fetch_add(units, Ordering::Relaxed) + units;
                        assert!(now <= UNITS, "{now} of {UNITS} units are in use");
                        yield_now();
                        used.fetch_sub(units, Ordering::Relaxed);
                        drop(permit);
                    }
                })
            };
            let threads: Vec<_> = (0..3).map(thread).collect();
            for thread in threads {
                thread.join().expect("no panic");
            }
            assert!(permits.try_acquire(UNITS).is_some(), "a unit is lost");
        });
    }
}
