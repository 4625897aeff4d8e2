//! Permits that limit the bytes being promoted: each tier has a share, and owners take turns.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use lmc_backend_local::OwnerId;
#[cfg(test)]
use lmc_testkit::interleave::Mutex;
#[cfg(not(test))]
use parking_lot::Mutex;
use tokio::sync::oneshot;

/// Units that owners acquire for tiers and release.
///
/// Half of the units are divided into a share for each tier; the other half is common to all tiers. A single
/// tier has all units. However many units one tier uses without releasing them, every other tier still has
/// its share. A tier with no units in use is granted one request of any size. Requests for the same tiers are
/// served by owner in turn, and each owner's requests in their order.
#[derive(Debug, Clone)]
pub(super) struct Permits(Arc<Mutex<PermitPool>>);

#[derive(Debug)]
struct PermitPool {
    /// Units reserved for each tier.
    share: u32,
    /// Units that any tier may use in addition to its share.
    common: u32,
    /// Units in use, for each tier.
    used: Vec<u32>,
    /// Waiting requests, in the order in which they are considered.
    queues: VecDeque<PermitQueue>,
}

/// Requests that wait for units of the same tiers.
#[derive(Debug)]
struct PermitQueue {
    /// Set of tiers, one bit for each.
    tiers: u64,
    waiting: HashMap<OwnerId, VecDeque<Waiting>>,
    /// Owners that wait, the next one first.
    turns: VecDeque<OwnerId>,
}

#[derive(Debug)]
struct Waiting {
    units: Vec<u32>,
    granted: oneshot::Sender<Vec<Permit>>,
}

/// Acquired units of one tier. Dropping the permit releases them.
#[derive(Debug)]
pub(super) struct Permit {
    permits: Permits,
    tier: usize,
    units: u32,
}

fn bits(units: &[u32]) -> u64 {
    let tiers = units.iter().enumerate().filter(|(_, units)| **units > 0);
    tiers.fold(0, |bits, (tier, _)| bits | 1 << tier)
}

impl PermitPool {
    /// Returns true if a request for these units of each tier can be granted now.
    fn fits(&self, units: &[u32]) -> bool {
        let over = |(used, units): (&u32, &u32)| (used + units).saturating_sub(self.share);
        let over: Vec<u32> = self.used.iter().zip(units).map(over).collect();
        let has_own = |tier| units[tier] == 0 || over[tier] == 0 || self.used[tier] == 0;
        over.iter().sum::<u32>() <= self.common || (0..units.len()).all(has_own)
    }

    /// Returns the tiers that earlier requests wait for. Requests for several tiers block no others, because
    /// one of their tiers may hang.
    fn awaited(&self) -> u64 {
        let single = self
            .queues
            .iter()
            .filter(|queue| queue.tiers.is_power_of_two());
        single.fold(0, |bits, queue| bits | queue.tiers)
    }

    fn take(&mut self, units: &[u32]) {
        let used = self.used.iter_mut().zip(units);
        used.for_each(|(used, units)| *used += units);
    }

    /// Removes the next request that can be granted from its queue, and takes its units.
    fn next(&mut self) -> Option<Waiting> {
        self.queues.iter_mut().for_each(PermitQueue::skip_closed);
        self.queues.retain(|queue| !queue.turns.is_empty());
        let is_granted = |queue: &PermitQueue| {
            let front = queue.front();
            front.is_some_and(|front| self.fits(&front.units))
        };
        let at = self.queues.iter().position(is_granted)?;
        let mut queue = self.queues.remove(at)?;
        let next = queue.pop()?;
        if !queue.turns.is_empty() {
            self.queues.push_back(queue);
        }
        self.take(&next.units);
        Some(next)
    }
}

impl PermitQueue {
    fn front(&self) -> Option<&Waiting> {
        self.waiting.get(self.turns.front()?)?.front()
    }

    /// Removes the next request, and moves its owner to the end of the turns.
    fn pop(&mut self) -> Option<Waiting> {
        let owner = self.turns.pop_front()?;
        let queue = self.waiting.get_mut(&owner)?;
        let next = queue.pop_front();
        if queue.is_empty() {
            self.waiting.remove(&owner);
        } else {
            self.turns.push_back(owner);
        }
        next
    }

    /// Removes requests at the front whose callers no longer wait. Their owners keep their turns.
    fn skip_closed(&mut self) {
        while let Some(owner) = self.turns.front() {
            let Some(queue) = self.waiting.get_mut(owner) else {
                self.turns.pop_front();
                continue;
            };
            while queue.front().is_some_and(|next| next.granted.is_closed()) {
                queue.pop_front();
            }
            if !queue.is_empty() {
                return;
            }
            self.waiting.remove(owner);
            self.turns.pop_front();
        }
    }
}

impl Permits {
    pub(super) fn new(units: u32, tiers: usize) -> Self {
        let shared = if tiers > 1 { units / 2 } else { units };
        let share = (shared / tiers.max(1) as u32).max(1);
        Self(Arc::new(Mutex::new(PermitPool {
            share,
            common: units.saturating_sub(share * tiers as u32),
            used: vec![0; tiers],
            queues: VecDeque::new(),
        })))
    }

    /// Returns the units reserved for each tier.
    pub(super) fn share(&self) -> u32 {
        self.0.lock().share
    }

    /// Acquires units of each tier if they are free and no earlier request waits for them.
    pub(super) fn try_acquire(&self, units: &[u32]) -> Option<Vec<Permit>> {
        let mut state = self.0.lock();
        if state.awaited() & bits(units) != 0 || !state.fits(units) {
            return None;
        }
        state.take(units);
        Some(self.permits(units))
    }

    /// Waits for the units of each tier and acquires them.
    pub(super) async fn acquire(&self, owner: OwnerId, units: Vec<u32>) -> Option<Vec<Permit>> {
        if let Some(permits) = self.try_acquire(&units) {
            return Some(permits);
        }
        let tiers = bits(&units);
        let (granted, permits) = oneshot::channel();
        {
            let mut state = self.0.lock();
            let at = state.queues.iter().position(|queue| queue.tiers == tiers);
            let at = at.unwrap_or_else(|| {
                state.queues.push_back(PermitQueue {
                    tiers,
                    waiting: HashMap::new(),
                    turns: VecDeque::new(),
                });
                state.queues.len() - 1
            });
            let queue = &mut state.queues[at];
            let waiting = queue.waiting.entry(owner).or_default();
            if waiting.is_empty() {
                queue.turns.push_back(owner);
            }
            waiting.push_back(Waiting { units, granted });
        }
        self.grant();
        permits.await.ok()
    }

    fn permits(&self, units: &[u32]) -> Vec<Permit> {
        let taken = units.iter().enumerate().filter(|(_, units)| **units > 0);
        let permit = |(tier, &units): (usize, &u32)| Permit {
            permits: self.clone(),
            tier,
            units,
        };
        taken.map(permit).collect()
    }

    /// Grants waiting requests while units are free.
    fn grant(&self) {
        // If a receiver is gone, dropping its permits releases them, after the lock.
        let mut refused = Vec::new();
        let mut state = self.0.lock();
        while let Some(Waiting { units, granted }) = state.next() {
            refused.extend(granted.send(self.permits(&units)).err());
        }
        drop(state);
        drop(refused);
    }
}

impl Permit {
    pub(super) fn tier(&self) -> usize {
        self.tier
    }

    pub(super) fn units(&self) -> u32 {
        self.units
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.permits.0.lock().used[self.tier] -= self.units;
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
        let permits = Permits::new(10, 1);
        let first = permits.try_acquire(&[10]).expect("all are free");
        let mut waits: Vec<_> = (0..5)
            .map(|_| Box::pin(permits.acquire(greedy, vec![10])))
            .collect();
        for wait in &mut waits {
            assert!(poll(wait.as_mut()).is_none());
        }
        let mut other = pin!(permits.acquire(modest, vec![1]));
        assert!(poll(other.as_mut()).is_none());
        assert!(permits.try_acquire(&[1]).is_none());
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
        let all = permits.try_acquire(&[10]);
        assert!(all.is_some(), "everything came back");
    }

    #[test]
    fn what_one_tier_does_not_give_back_leaves_the_others_their_shares() {
        let (one, other) = (OwnerId(1), OwnerId(2));
        for hung in 0..3 {
            let units = |units: &[(usize, u32)]| {
                let mut of_tiers = vec![0; 3];
                (units.iter()).for_each(|(tier, units)| of_tiers[(hung + tier) % 3] = *units);
                of_tiers
            };
            // A share of two for each, and six for all.
            let permits = Permits::new(12, 3);
            let large = permits.try_acquire(&units(&[(1, 20)]));
            assert!(large.is_some(), "one chunk may be larger than all");
            assert!(permits.try_acquire(&units(&[(1, 1)])).is_none());
            assert!(permits.try_acquire(&units(&[(2, 2)])).is_some());
            drop(large);
            let hung: Vec<_> = (0..4)
                .map(|_| permits.try_acquire(&units(&[(0, 2)])))
                .collect();
            assert!(hung.iter().all(Option::is_some));
            let mut more = pin!(permits.acquire(one, units(&[(0, 1)])));
            assert!(
                poll(more.as_mut()).is_none(),
                "its share and what is common are used"
            );
            let mut mixed = pin!(permits.acquire(one, units(&[(0, 1), (1, 1)])));
            assert!(poll(mixed.as_mut()).is_none());
            for _ in 0..3 {
                // Not even those of the same owner wait for the tier that hangs.
                let first = poll(pin!(permits.acquire(one, units(&[(1, 2)]))));
                let second = poll(pin!(permits.acquire(other, units(&[(2, 2)]))));
                assert!(first.flatten().is_some() && second.flatten().is_some());
                let now = permits.try_acquire(&units(&[(1, 2)]));
                assert!(now.is_some(), "what waits for two tiers keeps no units");
            }
            drop(hung);
            assert!(poll(more.as_mut()).flatten().is_some());
            let mut mixed = poll(mixed.as_mut()).flatten().expect("all are free");
            // What has ended comes back before the rest has.
            mixed.pop();
            assert_eq!(permits.0.lock().used.iter().sum::<u32>(), 1);
            drop(mixed);
            assert!(permits.try_acquire(&[4, 4, 4]).is_some(), "a unit is lost");
        }
    }

    #[test]
    fn every_unit_comes_back_and_every_waiter_is_served_in_any_order_of_threads() {
        const UNITS: u32 = 8;
        explore(rounds(1000, 4000), || {
            let permits = Permits::new(UNITS, 2);
            let used = [0, 1].map(|_| Arc::new(AtomicU32::new(0)));
            let thread = |owner| {
                let (permits, used) = (permits.clone(), used.clone());
                spawn(move || {
                    for _ in 0..3 {
                        let share = permits.share() as usize + 1;
                        let units: Vec<u32> = (0..2).map(|_| random_below(share) as u32).collect();
                        let mut wait = Box::pin(permits.acquire(OwnerId(owner), units.clone()));
                        // Some give up waiting, perhaps while they are being served.
                        if random_below(4) == 0 {
                            drop(poll(wait.as_mut()));
                            yield_now();
                            continue;
                        }
                        let permit = block_on(wait).expect("permits are never closed");
                        let add = |(used, units): (&Arc<AtomicU32>, &u32)| {
                            used.fetch_add(*units, Ordering::Relaxed) + units
                        };
                        let now: u32 = used.iter().zip(&units).map(add).sum();
                        assert!(now <= UNITS, "{now} of {UNITS} units are in use");
                        yield_now();
                        let remove = |(used, units): (&Arc<AtomicU32>, &u32)| {
                            used.fetch_sub(*units, Ordering::Relaxed);
                        };
                        used.iter().zip(&units).for_each(remove);
                        drop(permit);
                    }
                })
            };
            let threads: Vec<_> = (0..3).map(thread).collect();
            for thread in threads {
                thread.join().expect("no panic");
            }
            let all = permits.try_acquire(&[UNITS / 2, UNITS / 2]);
            assert!(all.is_some(), "a unit is lost");
        });
    }
}
