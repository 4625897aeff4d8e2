//! Counters by model and tenant, for a bounded number of pairs.
//!
//! **Invariant:** the sum of a counter over all pairs and the common counters never decreases. A pair that is
//! replaced leaves its counts to the common counters.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use lmc_key::Salt;
use parking_lot::Mutex;

/// Shortest time without a request after which a pair may be replaced. It keeps pairs of tenants that come
/// and go from replacing each other.
const IDLE: Duration = Duration::from_secs(600);

/// Counters of one model and tenant, or the common ones of all other pairs.
#[derive(Debug, Default)]
pub(crate) struct Usage {
    /// Index in the order in which the pairs were named; 0 for all others.
    number: usize,
    /// Time of the last request; `None` for all others.
    used: Mutex<Option<Instant>>,
    /// True once another pair has replaced this one: its counts belong to all others.
    is_replaced: AtomicBool,
    pub(crate) lookup_tokens: AtomicU64,
    pub(crate) hit_tokens: AtomicU64,
    pub(crate) retrieved_tokens: AtomicU64,
    pub(crate) stored_bytes: AtomicU64,
    pub(crate) evicted_bytes: AtomicU64,
}

impl Usage {
    /// Notes a request of the pair.
    pub(crate) fn note_use(&self, now: Instant) {
        if self.number > 0 {
            *self.used.lock() = Some(now);
        }
    }

    pub(crate) fn is_replaced(&self) -> bool {
        self.is_replaced.load(Ordering::Relaxed)
    }

    fn is_idle(&self, now: Instant) -> bool {
        let used = *self.used.lock();
        used.is_some_and(|used| now.saturating_duration_since(used) >= IDLE)
    }

    fn counters(&self) -> [&AtomicU64; 5] {
        [
            &self.lookup_tokens,
            &self.hit_tokens,
            &self.retrieved_tokens,
            &self.stored_bytes,
            &self.evicted_bytes,
        ]
    }

    fn counts(&self) -> [u64; 5] {
        self.counters()
            .map(|counter| counter.load(Ordering::Relaxed))
    }
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
    pairs: Mutex<Pairs>,
    others: Arc<Usage>,
}

#[derive(Debug, Default)]
struct Pairs {
    named: HashMap<Pair, Arc<Usage>>,
    /// Pairs that were replaced, as long as anything may still count in them.
    replaced: Vec<Arc<Usage>>,
    last_number: usize,
}

impl Pairs {
    /// Removes the pair without chunks that has been idle for longest. Returns false if there is none.
    fn make_space(&mut self, now: Instant, held: impl FnOnce() -> HeldBytes) -> bool {
        let mut idle: Vec<(&Pair, &Arc<Usage>)> = self.named.iter().collect();
        idle.retain(|(_, usage)| usage.is_idle(now));
        if idle.is_empty() {
            return false;
        }
        let held = held();
        idle.retain(|(_, usage)| held.of(usage) == 0);
        let Some((of, _)) = idle.iter().min_by_key(|(_, usage)| *usage.used.lock()) else {
            return false;
        };
        let of = (*of).clone();
        let usage = self.named.remove(&of).expect("it was just found");
        usage.is_replaced.store(true, Ordering::Relaxed);
        self.replaced.push(usage);
        true
    }

    /// Adds the counts of replaced pairs in which nothing counts any more to `others`.
    fn settle(&mut self, others: &Usage) {
        self.replaced.retain_mut(|usage| {
            let Some(usage) = Arc::get_mut(usage) else {
                return true;
            };
            for (counter, count) in others.counters().into_iter().zip(usage.counts()) {
                counter.fetch_add(count, Ordering::Relaxed);
            }
            false
        });
    }
}

impl Usages {
    pub(crate) fn new(limit: usize) -> Self {
        Self {
            limit,
            pairs: Mutex::default(),
            others: Arc::default(),
        }
    }

    /// Returns the counters of a model and a tenant; `None` if nothing is counted. When the limit of pairs is
    /// reached, a new pair replaces an idle pair that has no chunks in DRAM, or else shares the common
    /// counters. `held` has the bytes of chunks in DRAM.
    pub(crate) fn of(
        &self,
        model: &Arc<str>,
        salt: &Salt,
        now: Instant,
        held: impl FnOnce() -> HeldBytes,
    ) -> Option<Arc<Usage>> {
        let others = self.others()?;
        let mut pairs = self.pairs.lock();
        let of = (Arc::clone(model), salt.clone());
        if let Some(usage) = pairs.named.get(&of) {
            usage.note_use(now);
            return Some(Arc::clone(usage));
        }
        if pairs.named.len() == self.limit && !pairs.make_space(now, held) {
            return Some(others);
        }
        pairs.settle(&others);
        pairs.last_number += 1;
        let usage = Arc::new(Usage {
            number: pairs.last_number,
            used: Mutex::new(Some(now)),
            ..Usage::default()
        });
        pairs.named.insert(of, Arc::clone(&usage));
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
        let mut pairs = self.pairs.lock();
        pairs.settle(&others);
        // Chunks may have come back in spaces of a replaced pair since.
        let replaced = pairs.replaced.iter().chain([&others]);
        let rest = replaced.fold(([0; 5], 0), |(mut counts, bytes), usage| {
            let added = counts.iter_mut().zip(usage.counts());
            added.for_each(|(sum, count)| *sum += count);
            (counts, bytes + held.of(usage))
        });
        let mut named: Vec<_> = pairs.named.iter().collect();
        named.sort_by_key(|(_, usage)| usage.number);
        let named = named.into_iter();
        let named = named.map(|(of, usage)| (Some(of.clone()), usage.counts(), held.of(usage)));
        [(None, rest.0, rest.1)]
            .into_iter()
            .chain(named)
            .map(|(of, counts, held_bytes)| {
                let [
                    lookup_tokens,
                    hit_tokens,
                    retrieved_tokens,
                    stored_bytes,
                    evicted_bytes,
                ] = counts;
                UsageStatus {
                    of,
                    lookup_tokens,
                    hit_tokens,
                    retrieved_tokens,
                    stored_bytes,
                    evicted_bytes,
                    held_bytes,
                }
            })
            .collect()
    }
}

/// Payload bytes of chunks in DRAM, by the numbers of the counters.
#[derive(Debug, Default)]
pub(crate) struct HeldBytes(HashMap<usize, u64>);

impl HeldBytes {
    pub(crate) fn add(&mut self, usage: &Usage, bytes: u64) {
        *self.0.entry(usage.number).or_default() += bytes;
    }

    fn of(&self, usage: &Usage) -> u64 {
        self.0.get(&usage.number).copied().unwrap_or(0)
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
        let now = Instant::now();
        let of = |text: &str| {
            let usage = usages.of(&model, &salt(text), now, HeldBytes::default);
            usage.expect("counters")
        };
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
    fn a_new_pair_replaces_the_pair_without_chunks_that_is_idle_for_longest() {
        let usages = Usages::new(3);
        let model: Arc<str> = "model".into();
        let start = Instant::now();
        let of = |text: &str, seconds: u64, holder: Option<&Arc<Usage>>| {
            let now = start + Duration::from_secs(seconds);
            let held = || {
                let mut held = HeldBytes::default();
                holder.inspect(|usage| held.add(usage, 8));
                held
            };
            usages.of(&model, &salt(text), now, held).expect("counters")
        };
        let (a, b, c) = (of("a", 0, None), of("b", 1, None), of("c", 2, None));
        for usage in [&a, &b, &c] {
            add(&usage.lookup_tokens, 10);
        }
        assert_eq!(of("early", 599, Some(&a)).number, 0, "no pair is idle");
        // The oldest pair has chunks, so the second is replaced.
        let d = of("d", 700, Some(&a));
        assert!(b.is_replaced() && !a.is_replaced() && !c.is_replaced());
        add(&d.lookup_tokens, 1);
        let shown = || {
            let status = usages.status(&HeldBytes::default());
            let shown = status.into_iter().map(|one| {
                let tenant = one.of.map(|(_, salt)| salt.as_str().to_owned());
                (tenant, one.lookup_tokens)
            });
            shown.collect::<Vec<_>>()
        };
        let expected = |other| {
            let named = [("a", 10), ("c", 10), ("d", 1)];
            let named = named.map(|(tenant, tokens)| (Some(tenant.to_owned()), tokens));
            [vec![(None, other)], named.to_vec()].concat()
        };
        assert_eq!(shown(), expected(10));
        // A request that was under way counts in the replaced pair.
        add(&b.lookup_tokens, 5);
        assert_eq!(shown(), expected(15));
        drop(b);
        assert_eq!(shown(), expected(15));
        assert_eq!(shown(), expected(15), "its counts are added once");
        // It comes back as a new pair, which replaces the next idle one.
        assert_eq!(
            of("b", 1_400, Some(&a))
                .lookup_tokens
                .load(Ordering::Relaxed),
            0
        );
        assert!(c.is_replaced());
    }

    #[test]
    fn nothing_is_counted_without_pairs() {
        let usages = Usages::new(0);
        let of = usages.of(
            &"model".into(),
            &Salt::default(),
            Instant::now(),
            HeldBytes::default,
        );
        assert!(of.is_none());
        assert!(usages.status(&HeldBytes::default()).is_empty());
    }
}
