//! Counters by model and tenant, for a bounded number of pairs.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use lmc_key::Salt;
use parking_lot::Mutex;

/// Counters of one model and tenant, or the common ones of all other pairs.
#[derive(Debug, Default)]
pub(crate) struct Usage {
    /// Index in the order in which the pairs were named; 0 for all others.
    number: usize,
    pub(crate) lookup_tokens: AtomicU64,
    pub(crate) hit_tokens: AtomicU64,
    pub(crate) retrieved_tokens: AtomicU64,
    pub(crate) stored_bytes: AtomicU64,
    pub(crate) evicted_bytes: AtomicU64,
}

/// Counts of a model and a tenant at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct UsageStatus {
    /// Model and salt of the tenant; `None` for all other pairs together.
    pub of: Option<(Arc<str>, Salt)>,
    /// Tokens of whole chunks that lookups asked for.
    pub lookup_tokens: u64,
    /// Tokens that lookups found, in any tier.
    pub hit_tokens: u64,
    /// Tokens that engines retrieved.
    pub retrieved_tokens: u64,
    /// Payload bytes that engines stored.
    pub stored_bytes: u64,
    /// Payload bytes that were evicted from DRAM.
    pub evicted_bytes: u64,
    /// Payload bytes of the chunks in DRAM.
    pub held_bytes: u64,
}

/// A model, and the salt of a tenant.
type Pair = (Arc<str>, Salt);

/// The counters of each model and tenant, in the order in which they were named.
#[derive(Debug)]
pub(crate) struct Usages {
    /// Most pairs that have counters of their own; with 0 nothing is counted.
    limit: usize,
    pairs: Mutex<HashMap<Pair, Arc<Usage>>>,
    others: Arc<Usage>,
}

impl Usages {
    pub(crate) fn new(limit: usize) -> Self {
        Self {
            limit,
            pairs: Mutex::default(),
            others: Arc::default(),
        }
    }

    /// Returns the counters of a model and a tenant, or the common ones when the limit of pairs is
    /// reached; `None` if nothing is counted.
    pub(crate) fn of(&self, model: &Arc<str>, salt: &Salt) -> Option<Arc<Usage>> {
        let others = self.others()?;
        let mut pairs = self.pairs.lock();
        let of = (Arc::clone(model), salt.clone());
        if let Some(usage) = pairs.get(&of) {
            return Some(Arc::clone(usage));
        }
        if pairs.len() == self.limit {
            return Some(others);
        }
        let number = pairs.len() + 1;
        let usage = Arc::new(Usage {
            number,
            ..Usage::default()
        });
        pairs.insert(of, Arc::clone(&usage));
        Some(usage)
    }

    /// Returns the common counters of all other pairs; `None` if nothing is counted.
    pub(crate) fn others(&self) -> Option<Arc<Usage>> {
        (self.limit > 0).then(|| Arc::clone(&self.others))
    }

    /// Returns all counts, the common ones first. `held` has the bytes of chunks in DRAM.
    pub(crate) fn status(&self, held: &HeldBytes) -> Vec<UsageStatus> {
        let Some(others) = self.others() else {
            return Vec::new();
        };
        let pairs = self.pairs.lock();
        let pairs = pairs.iter().map(|(of, usage)| (Some(of.clone()), usage));
        let mut all: Vec<_> = pairs.chain([(None, &others)]).collect();
        all.sort_by_key(|(_, usage)| usage.number);
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let status = |(of, usage): (_, &Arc<Usage>)| UsageStatus {
            of,
            lookup_tokens: read(&usage.lookup_tokens),
            hit_tokens: read(&usage.hit_tokens),
            retrieved_tokens: read(&usage.retrieved_tokens),
            stored_bytes: read(&usage.stored_bytes),
            evicted_bytes: read(&usage.evicted_bytes),
            held_bytes: held.0.get(&usage.number).copied().unwrap_or(0),
        };
        all.into_iter().map(status).collect()
    }
}

/// Payload bytes of chunks in DRAM, by the numbers of the counters.
#[derive(Debug, Default)]
pub(crate) struct HeldBytes(HashMap<usize, u64>);

impl HeldBytes {
    pub(crate) fn add(&mut self, usage: &Usage, bytes: u64) {
        *self.0.entry(usage.number).or_default() += bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::service::stats::add;

    fn salt(text: &str) -> Salt {
        text.parse().expect("a salt")
    }

    #[test]
    fn pairs_beyond_the_limit_count_as_others() {
        let usages = Usages::new(2);
        let model: Arc<str> = "model".into();
        let of = |text: &str| usages.of(&model, &salt(text)).expect("counters");
        for (text, tokens) in [("a", 1), ("b", 10), ("c", 100), ("d", 1000), ("a", 1)] {
            add(&of(text).lookup_tokens, tokens);
        }
        let mut held = HeldBytes::default();
        held.add(&of("b"), 5);
        held.add(&of("b"), 2);
        let status = usages.status(&held);
        let of = |tenant: &str| Some((Arc::clone(&model), salt(tenant)));
        let shown = status
            .iter()
            .map(|one| (one.of.clone(), one.lookup_tokens, one.held_bytes));
        let expected = [(None, 1100, 0), (of("a"), 2, 0), (of("b"), 10, 7)];
        assert_eq!(shown.collect::<Vec<_>>(), expected);
    }

    #[test]
    fn nothing_is_counted_without_pairs() {
        let usages = Usages::new(0);
        assert!(usages.of(&"model".into(), &Salt::default()).is_none());
        assert!(usages.status(&HeldBytes::default()).is_empty());
    }
}
