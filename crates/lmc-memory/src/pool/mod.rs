//! A pool: slots of an arena.

use std::io;
use std::sync::Arc;
#[cfg(not(test))]
use std::sync::atomic::AtomicU32;
use std::sync::atomic::{AtomicU64, Ordering};

#[cfg(test)]
use lmc_testkit::interleave::{AtomicU32, Mutex};
#[cfg(not(test))]
use parking_lot::Mutex;
use thiserror::Error;

use crate::Arena;

mod per_slot;
mod segregated_fit;
mod slot;
mod slot_bytes;

use per_slot::PerSlot;
use segregated_fit::SegregatedFit;
use slot::Handle;
pub use slot::{QuarantinedSlot, ReservedSlot, SealedSlot, WrittenSlot};

/// Configuration of a pool: the alignment of its slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolConfig {
    pub(crate) align: usize,
}

impl Default for PoolConfig {
    fn default() -> Self {
        Self { align: 4096 }
    }
}

impl PoolConfig {
    /// Sets the alignment and granularity of slots in bytes, a power of two from 64 to 2 MiB. Default: 4096.
    pub fn with_align(mut self, align: usize) -> Self {
        self.align = align;
        self
    }
}

/// A pool that cannot be created.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PoolError {
    /// The alignment is not a power of two, or outside its limits.
    #[error("a pool's alignment must be a power of two from 64 to 2097152, found {found}")]
    Align {
        /// Alignment in the configuration.
        found: usize,
    },
    /// The arena is too small for one slot, or has more slots than can be numbered.
    #[error(
        "an arena of {bytes} bytes cannot be a pool with alignment {align}: \
         it must hold between 1 and 4294967294 aligned units"
    )]
    Size {
        /// Bytes of the arena.
        bytes: usize,
        /// Alignment.
        align: usize,
    },
}

/// Usage of a pool, in bytes and slots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolUsage {
    /// Total bytes that can be handed out.
    pub capacity: u64,
    /// Bytes handed out, rounded up to the alignment; quarantined bytes included.
    pub used: u64,
    /// Slots handed out, quarantined slots included.
    pub slots: u64,
    /// Size of the largest slot that fits now, in bytes. Exact if at most 64 free ranges are in the largest
    /// size class, otherwise up to 1/16 too small.
    pub largest_free: u64,
    /// Bytes in quarantine.
    pub quarantined_bytes: u64,
    /// Slots in quarantine.
    pub quarantined_slots: u64,
    /// Bytes that the system had no memory for when they were about to be handed out: `/dev/shm` is full.
    /// [`Pool::recover`] retries them.
    pub withheld_bytes: u64,
}

/// A pool that hands out slots of an arena, in O(1) and without touching their bytes. Clones refer to the
/// same pool.
#[derive(Clone, Debug)]
pub struct Pool {
    inner: Arc<Inner>,
}

/// Shared state of a pool, which every slot points to.
#[derive(Debug)]
struct Inner {
    arena: Arc<Arena>,
    align_bits: u32,
    units: u32,
    /// Number of owners of each slot.
    counts: PerSlot<AtomicU32>,
    /// Checksums of slots; 0 stands for an unknown one, which is then computed again.
    sums: PerSlot<AtomicU64>,
    state: Mutex<PoolState>,
}

#[derive(Debug)]
struct PoolState {
    fit: SegregatedFit,
    slots: u64,
    quarantined_units: u64,
    quarantined_slots: u64,
    /// Nodes for which there was no memory, with their first units.
    withheld: Vec<(u32, u32)>,
    /// Reason why these nodes are withheld.
    fault: Option<String>,
}

/// Most ranges without memory that one reservation tries.
const WITHHELD_PER_RESERVE: u32 = 8;

impl Pool {
    /// Makes a pool over a whole arena.
    ///
    /// # Errors
    /// [`PoolError`] if the alignment is not a power of two, or the arena is too small or large.
    pub fn new(arena: Arc<Arena>, config: PoolConfig) -> Result<Self, PoolError> {
        let align = config.align;
        if !align.is_power_of_two() || !(64..=2 << 20).contains(&align) {
            return Err(PoolError::Align { found: align });
        }
        let bytes = arena.len();
        let units = u32::try_from(bytes / align).unwrap_or(u32::MAX);
        if units == 0 || units == u32::MAX {
            return Err(PoolError::Size { bytes, align });
        }
        let state = PoolState {
            fit: SegregatedFit::new(units),
            slots: 0,
            quarantined_units: 0,
            quarantined_slots: 0,
            withheld: Vec::new(),
            fault: None,
        };
        let inner = Inner {
            arena,
            align_bits: align.ilog2(),
            units,
            counts: PerSlot::default(),
            sums: PerSlot::default(),
            state: Mutex::new(state),
        };
        Ok(Self {
            inner: Arc::new(inner),
        })
    }

    /// Returns the pool's arena.
    pub fn arena(&self) -> &Arc<Arena> {
        &self.inner.arena
    }

    /// Returns the alignment and granularity of slots, in bytes.
    pub fn align(&self) -> u64 {
        1 << self.inner.align_bits
    }

    /// Reserves a slot of `len` bytes, with the former content of its memory. Returns `None` if no free range
    /// is large enough or `len` is 0. O(1), touches no byte of the slot.
    ///
    /// Memory of a shared arena is allocated in the file system the first time, so that a full `/dev/shm`
    /// fails here instead of killing the process that writes to the slot.
    pub fn reserve(&self, len: u64) -> Option<ReservedSlot> {
        let units = u32::try_from(len.div_ceil(self.align())).ok()?;
        let take = |_| self.take(units);
        let (node, unit) = (0..WITHHELD_PER_RESERVE).find_map(take)??;
        self.inner.forget_sum(node);
        Some(ReservedSlot(Handle::new(&self.inner, node, unit, len)))
    }

    /// Takes a range to hand out. `Some(None)`: no range is free. `None`: the range found has no memory, but
    /// another range may.
    fn take(&self, units: u32) -> Option<Option<(u32, u32)>> {
        let (node, unit) = {
            let mut state = self.inner.state.lock();
            let Some(taken) = state.fit.take(units) else {
                return Some(None);
            };
            state.slots += 1;
            taken
        };
        let Err(fault) = self.inner.ensure(unit, units) else {
            return Some(Some((node, unit)));
        };
        let mut state = self.inner.state.lock();
        state.slots -= 1;
        state.withheld.push((node, unit));
        state.fault = Some(fault.to_string());
        None
    }

    /// Retries to get memory for the withheld ranges. To be called from time to time.
    pub fn recover(&self) {
        loop {
            let (node, unit, units) = {
                let mut state = self.inner.state.lock();
                let Some((node, unit)) = state.withheld.pop() else {
                    state.fault = None;
                    return;
                };
                (node, unit, state.fit.units_of(node))
            };
            let ensured = self.inner.ensure(unit, units);
            let mut state = self.inner.state.lock();
            if let Err(fault) = ensured {
                state.withheld.push((node, unit));
                state.fault = Some(fault.to_string());
                return;
            }
            state.fit.give(node);
        }
    }

    /// Returns the reason why a part of the memory cannot be used, with the remedy; `None` if all of it can.
    pub fn fault(&self) -> Option<String> {
        let fault = self.inner.state.lock().fault.clone();
        fault.or_else(|| self.arena().prefault_progress().error)
    }

    /// Returns the current usage.
    pub fn usage(&self) -> PoolUsage {
        let inner = &self.inner;
        let bytes = |units: u32| u64::from(units) << inner.align_bits;
        let state = inner.state.lock();
        PoolUsage {
            capacity: bytes(inner.units),
            used: bytes(inner.units - state.fit.free_units()),
            slots: state.slots,
            largest_free: bytes(state.fit.largest_free()),
            quarantined_bytes: state.quarantined_units << inner.align_bits,
            quarantined_slots: state.quarantined_slots,
            withheld_bytes: state
                .withheld
                .iter()
                .map(|&(node, _)| bytes(state.fit.units_of(node)))
                .sum(),
        }
    }
}

impl Inner {
    /// Drops the checksum of a slot, because the slot's bytes are about to change.
    fn forget_sum(&self, node: u32) {
        if let Some(sum) = self.sums.get(node) {
            sum.store(0, Ordering::Relaxed);
        }
    }

    fn ensure(&self, unit: u32, units: u32) -> io::Result<()> {
        let bytes = |units: u32| u64::from(units) << self.align_bits;
        self.arena.ensure(bytes(unit), bytes(units))
    }

    /// Frees the range of a slot whose last owner is gone.
    fn give(&self, node: u32) {
        let mut state = self.state.lock();
        state.fit.give(node);
        state.slots -= 1;
    }

    /// Counts a slot into or out of quarantine.
    fn quarantined(&self, node: u32, enters: bool) {
        let mut state = self.state.lock();
        let units = u64::from(state.fit.units_of(node));
        if enters {
            state.quarantined_units += units;
            state.quarantined_slots += 1;
        } else {
            state.quarantined_units -= units;
            state.quarantined_slots -= 1;
        }
    }
}

#[cfg(test)]
mod interleavings;
#[cfg(test)]
mod tests;
