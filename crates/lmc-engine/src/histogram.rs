//! Histograms of durations, ages and uses: atomics, no locks.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde::Serialize;

/// Buckets of a [`Histogram`]: four for each doubling, from 1 µs to about 67 s.
const HISTOGRAM_BUCKETS: usize = 4 * 26 + 1;

/// Durations, in buckets whose bounds grow by a quarter of a doubling.
#[derive(Debug)]
pub struct Histogram {
    buckets: [AtomicU64; HISTOGRAM_BUCKETS],
    sum_nanos: AtomicU64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self {
            buckets: [const { AtomicU64::new(0) }; HISTOGRAM_BUCKETS],
            sum_nanos: 0.into(),
        }
    }
}

impl Histogram {
    /// Counts one duration.
    pub fn record(&self, took: Duration) {
        let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        self.buckets[bucket(nanos)].fetch_add(1, Ordering::Relaxed);
        self.sum_nanos.fetch_add(nanos, Ordering::Relaxed);
    }

    /// Returns the counts so far.
    pub fn snapshot(&self) -> HistogramSnapshot {
        HistogramSnapshot {
            buckets: self
                .buckets
                .iter()
                .map(|count| count.load(Ordering::Relaxed))
                .collect(),
            sum_seconds: self.sum_nanos.load(Ordering::Relaxed) as f64 / 1e9,
        }
    }
}

fn bucket(nanos: u64) -> usize {
    let micros = nanos / 1000;
    if micros == 0 {
        return 0;
    }
    let doubling = micros.ilog2();
    let quarter = (nanos * 4 / 1000) >> doubling & 3;
    (1 + 4 * doubling as usize + quarter as usize).min(HISTOGRAM_BUCKETS - 1)
}

/// Counts of a [`Histogram`] at one moment.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct HistogramSnapshot {
    /// Count of each bucket; the bound of bucket `i` is [`Self::upper_bound`].
    pub buckets: Vec<u64>,
    /// Sum of all durations, in seconds.
    pub sum_seconds: f64,
}

impl HistogramSnapshot {
    /// Returns the upper bound of a bucket, in seconds.
    pub fn upper_bound(bucket: usize) -> f64 {
        if bucket == 0 {
            return 1e-6;
        }
        let (doubling, quarter) = ((bucket - 1) / 4, (bucket - 1) % 4);
        (1u64 << doubling) as f64 * (1.0 + (quarter + 1) as f64 / 4.0) * 1e-6
    }

    /// Returns the counts of the durations that were counted after `earlier`, a snapshot of the same histogram.
    pub fn since(&self, earlier: &Self) -> Self {
        let before = earlier.buckets.iter().copied().chain(std::iter::repeat(0));
        let counts = self.buckets.iter().zip(before);
        Self {
            buckets: counts
                .map(|(now, before)| now.saturating_sub(before))
                .collect(),
            sum_seconds: (self.sum_seconds - earlier.sum_seconds).max(0.0),
        }
    }

    /// Returns the number of durations counted.
    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// Returns a quantile in seconds (`0.5` is the median); 0 if nothing was counted. The result is a
    /// bucket's upper bound, so it is at most a quarter too high.
    pub fn quantile(&self, share: f64) -> f64 {
        let wanted = (self.count() as f64 * share).ceil() as u64;
        let mut seen = 0;
        for (index, count) in self.buckets.iter().enumerate() {
            seen += count;
            if seen >= wanted.max(1) {
                return Self::upper_bound(index);
            }
        }
        0.0
    }
}

/// Counts of whole numbers, in buckets with given bounds.
#[derive(Debug)]
pub(crate) struct Distribution {
    bounds: &'static [u64],
    /// One bucket more than bounds, for numbers above the last bound.
    buckets: Box<[AtomicU64]>,
    sum: AtomicU64,
}

impl Distribution {
    /// Returns empty buckets with these bounds, in ascending order. A bound belongs to its bucket.
    pub(crate) fn new(bounds: &'static [u64]) -> Self {
        Self {
            bounds,
            buckets: (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect(),
            sum: AtomicU64::new(0),
        }
    }

    /// Counts a number.
    pub(crate) fn record(&self, number: u64) {
        let bucket = self.bounds.partition_point(|bound| *bound < number);
        self.buckets[bucket].fetch_add(1, Ordering::Relaxed);
        self.sum.fetch_add(number, Ordering::Relaxed);
    }

    pub(crate) fn snapshot(&self) -> DistributionSnapshot {
        let buckets = self.buckets.iter();
        DistributionSnapshot {
            bounds: self.bounds,
            buckets: buckets.map(|count| count.load(Ordering::Relaxed)).collect(),
            sum: self.sum.load(Ordering::Relaxed),
        }
    }
}

/// Counts of whole numbers, such as ages in seconds, at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct DistributionSnapshot {
    /// Upper bound of each bucket except the last.
    pub bounds: &'static [u64],
    /// Count of each bucket. The last one counts numbers above all bounds.
    pub buckets: Vec<u64>,
    /// Sum of all numbers.
    pub sum: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_grow_with_the_duration_and_bound_it() {
        let mut last = 0;
        for nanos in (0..40)
            .map(|shift| 1u64 << shift)
            .chain([999, 1_000, 1_249, 1_250, 1_999])
        {
            let index = bucket(nanos);
            if nanos.is_power_of_two() {
                assert!(index >= last, "{nanos} ns fell back to bucket {index}");
                last = index;
            }
            let bound = HistogramSnapshot::upper_bound(index);
            assert!(
                (nanos as f64) / 1e9 < bound || index == HISTOGRAM_BUCKETS - 1,
                "{nanos} ns"
            );
        }
    }

    #[test]
    fn quantiles_come_from_the_counts() {
        let histogram = Histogram::default();
        for micros in 1..=100 {
            histogram.record(Duration::from_micros(micros));
        }
        let snapshot = histogram.snapshot();
        assert_eq!(snapshot.count(), 100);
        let median = snapshot.quantile(0.5);
        assert!((50e-6..=63e-6).contains(&median), "{median}");
        assert!(snapshot.quantile(1.0) >= 100e-6);
        assert!((snapshot.sum_seconds - 5050e-6).abs() < 1e-9);
        histogram.record(Duration::from_secs(1));
        let since = histogram.snapshot().since(&snapshot);
        assert_eq!((since.count(), since.quantile(0.5) >= 1.0), (1, true));
        assert_eq!(snapshot.since(&HistogramSnapshot::default()), snapshot);
    }

    #[test]
    fn a_number_is_counted_up_to_its_bound() {
        let distribution = Distribution::new(&[0, 1, 8]);
        for number in [0, 1, 1, 2, 8, 9] {
            distribution.record(number);
        }
        let snapshot = distribution.snapshot();
        assert_eq!(snapshot.buckets, [1, 2, 2, 1]);
        assert_eq!(snapshot.sum, 21);
    }
}
