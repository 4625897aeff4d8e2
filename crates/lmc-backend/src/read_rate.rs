//! The measured read speed of a tier, for cost estimates.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Time to read one byte before anything was measured: 1 GB/s.
const ASSUMED_NANOS_PER_BYTE: f64 = 1.0;
/// Bytes after which older measurements count half.
const WINDOW: f64 = (256u64 << 20) as f64;

/// Bytes read, and the time during which at least one read was in progress. Estimates of
/// [`Location::cost`](crate::Location::cost) are computed from them.
#[derive(Debug)]
pub struct ReadRate(Mutex<ReadMeter>);

#[derive(Debug)]
struct ReadMeter {
    bytes: f64,
    nanos: f64,
    under_way: u32,
    busy_since: Instant,
}

impl Default for ReadRate {
    fn default() -> Self {
        let bytes = WINDOW / 16.0;
        Self(Mutex::new(ReadMeter {
            bytes,
            nanos: bytes * ASSUMED_NANOS_PER_BYTE,
            under_way: 0,
            busy_since: Instant::now(),
        }))
    }
}

impl ReadRate {
    /// Records that a read begins.
    pub fn begin(&self, now: Instant) {
        let mut state = self.0.lock();
        if state.under_way == 0 {
            state.busy_since = now;
        }
        state.under_way += 1;
    }

    /// Records that a read has ended, with the number of bytes that it read.
    pub fn end(&self, bytes: u64, now: Instant) {
        let mut state = self.0.lock();
        state.under_way = state.under_way.saturating_sub(1);
        let busy = now.saturating_duration_since(state.busy_since);
        state.busy_since = now;
        state.nanos += busy.as_nanos() as f64;
        state.bytes += bytes as f64;
        if state.bytes > WINDOW {
            state.bytes /= 2.0;
            state.nanos /= 2.0;
        }
    }

    /// Returns the estimated time to read `bytes` bytes while other reads are in progress.
    pub fn time(&self, bytes: u64) -> Duration {
        let state = self.0.lock();
        Duration::from_nanos((bytes as f64 * state.nanos / state.bytes) as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_estimate_follows_the_bytes_of_the_busy_time() {
        let rate = ReadRate::default();
        assert_eq!(rate.time(1 << 20), Duration::from_nanos(1 << 20));
        let mut now = Instant::now();
        // Two at a time, 4 MiB in 1 ms: four gigabytes a second.
        for _ in 0..1000 {
            rate.begin(now);
            rate.begin(now);
            now += Duration::from_millis(1);
            rate.end(2 << 20, now);
            rate.end(2 << 20, now);
            // Idle time does not count.
            now += Duration::from_secs(1);
        }
        let nanos = rate.time(4 << 20).as_nanos();
        assert!((950_000..1_050_000).contains(&nanos), "{nanos}");
    }
}
