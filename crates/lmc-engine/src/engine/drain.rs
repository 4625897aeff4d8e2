//! Draining and closing: the engine accepts no chunks, and DRAM is written back to the tiers.

use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use lmc_backend::{Host as _, now};
use lmc_backend_local::ListedChunk;

use super::{CLOSE_MARGIN, CacheEngine, CloseReport, NOT_BEGUN, WRITER};
use crate::lower::{LowerTiers, Offer, Tiers};
use crate::policy::WritePolicy;

/// Time between two checks for capacity in the queues of writes.
const POLL: Duration = Duration::from_millis(1);

impl CacheEngine {
    /// Stops accepting chunks from engines and peers; lookups and reads continue. Reservations made before
    /// can still be committed.
    pub fn begin_drain(&self) {
        // A store that has not seen the flag is already counted as in progress.
        self.0.is_draining.store(true, Ordering::SeqCst);
        self.host().events().report_host();
    }

    /// Accepts chunks again, and ends [`Self::write_back`].
    pub fn end_drain(&self) {
        self.0.is_draining.store(false, Ordering::SeqCst);
        self.0.unoffered.store(NOT_BEGUN, Ordering::Relaxed);
        self.host().events().report_host();
    }

    /// Returns the number of chunks that callers of [`Self::store`] have reserved and neither committed nor
    /// dropped.
    pub fn stores_under_way(&self) -> u64 {
        self.0.storing.load(Ordering::SeqCst)
    }

    /// Returns true while the engine accepts no chunks.
    pub fn is_draining(&self) -> bool {
        self.0.is_draining.load(Ordering::SeqCst)
    }

    /// Offers all chunks in DRAM to the tiers with [`WritePolicy::Back`] while the engine drains, the heads
    /// of prompts first. Returns when each tier has been offered all chunks, or when the drain has ended. The
    /// tiers may still be writing then, as [`Self::unwritten_bytes`] shows.
    pub fn write_back(&self) {
        if let Some(lower) = self.0.written_back().filter(|_| !self.pool_is_lost()) {
            self.write_all_back(lower, || !self.is_draining());
        }
        if !self.is_draining() {
            self.0.unoffered.store(NOT_BEGUN, Ordering::Relaxed);
        }
    }

    /// Waits until queued writes have ended, and closes the lower tiers. First writes all chunks in DRAM to
    /// the tiers with [`WritePolicy::Back`], the heads of prompts before the chunks that follow them. Returns
    /// what could not be done by the deadline.
    pub fn close(&self, deadline: Instant) -> CloseReport {
        let Some(lower) = &self.0.lower else {
            return CloseReport::default();
        };
        let before = lower.tiers().unwritten();
        let mut late = 0;
        if self.0.written_back().is_some() && !self.pool_is_lost() {
            // The rest of the time is for writes that are then in progress.
            let left = deadline.saturating_duration_since(now());
            let deadline = deadline - (left / 4).min(CLOSE_MARGIN);
            late = self.write_all_back(lower, || now() >= deadline);
        }
        let (failed, unwritten) = lower.close(deadline);
        CloseReport {
            failed,
            late: late + unwritten.late,
            declined: unwritten.declined - before.declined,
            write_failed: unwritten.failed - before.failed,
        }
    }

    /// Offers every chunk to each tier with [`WritePolicy::Back`], as soon as that tier's queue has capacity
    /// for it, independently of the other tiers' queues. Stops when `is_over` returns true. Returns the
    /// number of chunks for which there was no time, counted once for each tier.
    fn write_all_back(&self, lower: &LowerTiers, is_over: impl Fn() -> bool) -> u64 {
        let tiers = lower.tiers();
        let chunks = self.0.tier.list_heads_first();
        // For each tier: the next chunk, and the bytes of this and all later chunks.
        let all: u64 = chunks.iter().map(|chunk| chunk.len).sum();
        let of_tier = |tier| (tier, 0, all);
        let mut next: Vec<_> = tiers.written(WritePolicy::Back).map(of_tier).collect();
        loop {
            let left = next.iter().map(|(_, _, left)| *left).max().unwrap_or(0);
            self.0.unoffered.store(left, Ordering::Relaxed);
            if left == 0 || is_over() {
                break;
            }
            let mut is_waiting = true;
            for (tier, at, left) in &mut next {
                if let Some(chunk) = chunks.get(*at)
                    && tiers.has_capacity(*tier, chunk.len)
                    && self.offer_leaving(tiers, *tier, chunk)
                {
                    *at += 1;
                    *left -= chunk.len;
                    is_waiting = false;
                }
            }
            if is_waiting {
                thread::sleep(POLL);
            }
        }
        next.iter()
            .map(|(_, at, _)| (chunks.len() - at) as u64)
            .sum()
    }

    /// Offers a chunk to a tier with [`WritePolicy::Back`], if the chunk is still in DRAM. Returns false if
    /// it has to be offered again: evicted chunks go to the same queue and may fill it.
    fn offer_leaving(&self, tiers: &Tiers, tier: usize, chunk: &ListedChunk) -> bool {
        let _held = tiers.block_removal();
        let leases = self.0.tier.lease_uncounted(WRITER, &[chunk.key]);
        let mut offers = leases.iter().zip(leases.origins()).map(|(slot, origin)| {
            let offer = Offer {
                key: chunk.key,
                parent: chunk.parent,
                origin,
                slot: slot.clone(),
            };
            tiers.offer_leaving_to(tier, &offer)
        });
        offers.all(|is_taken| is_taken)
    }

    /// Returns the bytes of chunks that lower tiers may lack if the process ends now: queued writes and
    /// writes in progress. For tiers that store chunks on eviction only ([`WritePolicy::Back`]), also the
    /// bytes that [`Self::write_back`] or [`Self::close`] has not offered yet; before these calls, all bytes
    /// in DRAM.
    pub fn unwritten_bytes(&self) -> u64 {
        let Some(lower) = &self.0.lower else {
            return 0;
        };
        let unoffered = match self.0.unoffered.load(Ordering::Relaxed) {
            _ if self.0.written_back().is_none() => 0,
            NOT_BEGUN => self.usage().chunk_bytes,
            bytes => bytes,
        };
        lower.queued() + unoffered
    }
}
