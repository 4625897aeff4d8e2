//! Limits of the memory that this side holds for peers, in total and for each peer.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Divisor of the budget: one peer has at most this fraction.
const SHARE: usize = 4;

/// The budget of a channel.
#[derive(Debug)]
pub(super) struct Budget {
    limit: usize,
    used: AtomicUsize,
}

/// The account of one connection.
#[derive(Debug)]
pub(super) struct Account {
    budget: Arc<Budget>,
    used: AtomicUsize,
}

/// Bytes that are accounted for, until dropped.
#[derive(Debug)]
pub(super) struct Charge {
    account: Arc<Account>,
    bytes: usize,
}

impl Budget {
    pub(super) fn new(limit: usize) -> Arc<Self> {
        let used = AtomicUsize::new(0);
        Arc::new(Self { limit, used })
    }

    pub(super) fn account(self: &Arc<Self>) -> Arc<Account> {
        Arc::new(Account {
            budget: Arc::clone(self),
            used: AtomicUsize::new(0),
        })
    }

    #[cfg(test)]
    pub(super) fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }
}

fn take(used: &AtomicUsize, bytes: usize, limit: usize) -> bool {
    let more = |used: usize| used.checked_add(bytes).filter(|sum| *sum <= limit);
    used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more)
        .is_ok()
}

impl Account {
    /// Accounts for bytes; `None` if the peer, or all peers together, would exceed the budget.
    pub(super) fn charge(self: &Arc<Self>, bytes: usize) -> Option<Charge> {
        if !take(&self.used, bytes, self.budget.limit / SHARE) {
            return None;
        }
        if !take(&self.budget.used, bytes, self.budget.limit) {
            self.used.fetch_sub(bytes, Ordering::Relaxed);
            return None;
        }
        Some(Charge {
            account: Arc::clone(self),
            bytes,
        })
    }
}

impl Charge {
    /// Returns the bytes that are accounted for.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.account.used.fetch_sub(self.bytes, Ordering::Relaxed);
        let budget = &self.account.budget;
        budget.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peers_share_a_budget_and_none_takes_it_all() {
        let budget = Budget::new(400);
        let accounts: Vec<_> = (0..5).map(|_| budget.account()).collect();
        assert!(accounts[0].charge(101).is_none(), "more than its share");
        let mut charges: Vec<_> = accounts.iter().map(|one| one.charge(90)).collect();
        assert!(charges[3].is_some() && charges[4].is_none(), "all together");
        assert_eq!(budget.used(), 360);
        charges.truncate(3);
        assert_eq!(budget.used(), 270);
        assert!(accounts[4].charge(90).is_some());
        drop(charges);
        assert_eq!(budget.used(), 0);
    }
}
