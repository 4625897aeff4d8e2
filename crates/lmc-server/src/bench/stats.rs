//! Exact samples, and percentiles of them.

use std::time::Duration;

/// Every duration that was measured.
#[derive(Debug, Clone, Default)]
pub(crate) struct Samples(Vec<u64>);

/// Summary of a row's samples, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct Summary {
    pub(crate) count: usize,
    pub(crate) sum: f64,
    pub(crate) p50: f64,
    pub(crate) p90: f64,
    pub(crate) p99: f64,
    pub(crate) max: f64,
}

impl Samples {
    pub(crate) fn push(&mut self, took: Duration) {
        self.0.push(took.as_nanos() as u64);
    }

    pub(crate) fn append(&mut self, mut other: Self) {
        self.0.append(&mut other.0);
    }

    /// Returns the summary. Percentiles are samples (nearest rank), not interpolated values.
    pub(crate) fn summary(mut self) -> Summary {
        self.0.sort_unstable();
        let Some(&max) = self.0.last() else {
            return Summary::default();
        };
        let count = self.0.len();
        let at = |share: f64| {
            let rank = (share * count as f64).ceil() as usize;
            self.0[rank.clamp(1, count) - 1] as f64 / 1e9
        };
        Summary {
            count,
            sum: self.0.iter().sum::<u64>() as f64 / 1e9,
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            max: max as f64 / 1e9,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn summary(nanos: impl IntoIterator<Item = u64>) -> Summary {
        let mut samples = Samples::default();
        for nanos in nanos {
            samples.push(Duration::from_nanos(nanos));
        }
        samples.summary()
    }

    #[test]
    fn percentiles_are_samples() {
        let all = summary((1..=1000).rev().map(|n| n * 1_000_000));
        assert_eq!(all.count, 1000);
        assert_eq!((all.p50, all.p90, all.p99, all.max), (0.5, 0.9, 0.99, 1.0));
        assert!((all.sum - 500.5).abs() < 1e-9);
        let two = summary([1_000_000_000, 3_000_000_000]);
        assert_eq!((two.p50, two.p90, two.max), (1.0, 3.0, 3.0));
        let one = summary([5_000_000_000]);
        assert_eq!((one.p50, one.p99, one.max), (5.0, 5.0, 5.0));
        assert_eq!(summary([]), Summary::default());
    }

    #[test]
    fn samples_of_several_clients_are_one_set() {
        let mut one = Samples::default();
        one.push(Duration::from_secs(1));
        let mut two = Samples::default();
        two.push(Duration::from_secs(9));
        one.append(two);
        assert_eq!(one.summary().max, 9.0);
    }
}
