//! Slots of an arena.

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
    /// Alignment and granularity of slots in bytes, a power of two from 64 to 2 MiB.
    /// Default: 4096.
    pub fn with_align(mut self, align: usize) -> Self {
        self.align = align;
        self
    }
}

/// A pool that cannot be made.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PoolError {
    /// Not a power of two, or outside its bounds.
    #[error("a pool's alignment must be a power of two from 64 to 2097152, found {found}")]
    Align {
        /// Bytes asked for.
        found: usize,
    },
    /// The arena holds no slot at all, or more than can be numbered.
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
    /// Bytes that can be handed out in all.
    pub capacity: u64,
    /// Bytes handed out, rounded up to the alignment; quarantined ones included.
    pub used: u64,
    /// Slots handed out, quarantined ones included.
    pub slots: u64,
    /// The largest slot that fits now, in bytes. Exact while no more than 64 free ranges share
    /// the largest size class, else up to 1/16 too small.
    pub largest_free: u64,
    /// Bytes in quarantine.
    pub quarantined_bytes: u64,
    /// Slots in quarantine.
    pub quarantined_slots: u64,
    /// Bytes that the system had no memory for when they were to be handed out: `/dev/shm` is
    /// full. [`Pool::recover`] tries them again.
    pub withheld_bytes: u64,
}

/// Hands out slots of an arena, in O(1) and without touching their bytes.
/// Clones share the same pool.
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
    /// Owners of each slot.
    counts: PerSlot<AtomicU32>,
    /// Checksums of slots, 0 where none is known: then it is computed again.
    sums: PerSlot<AtomicU64>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    fit: SegregatedFit,
    slots: u64,
    quarantined_units: u64,
    quarantined_slots: u64,
    /// Nodes that there was no memory for, with their first units.
    withheld: Vec<(u32, u32)>,
    /// The reason why they are withheld.
    fault: Option<String>,
}

/// Ranges without memory that one reservation may meet.
const WITHHELD_PER_RESERVE: u32 = 8;

impl Pool {
    /// A pool over all of an arena.
    ///
    /// # Errors
    /// [`PoolError`] for an alignment that is no power of two or an arena too small or large.
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
        let state = State {
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

    /// The arena under it.
    pub fn arena(&self) -> &Arc<Arena> {
        &self.inner.arena
    }

    /// Alignment and granularity of slots, in bytes.
    pub fn align(&self) -> u64 {
        1 << self.inner.align_bits
    }

    /// Reserves a slot of `len` bytes, with the content that its memory had before. Returns `None`
    /// when nothing large enough is free or `len` is 0. O(1), touches no byte of the slot.
    ///
    /// Memory of a shared arena is taken from the file system the first time, so that a full
    /// `/dev/shm` is an error here, and does not kill the process that writes to the slot.
    pub fn reserve(&self, len: u64) -> Option<ReservedSlot> {
        let units = u32::try_from(len.div_ceil(self.align())).ok()?;
        let take = |_| self.take(units);
        let (node, unit) = (0..WITHHELD_PER_RESERVE).find_map(take)??;
        self.inner.forget_sum(node);
        Some(ReservedSlot(Handle::new(&self.inner, node, unit, len)))
    }

    /// A range to hand out; `Some(None)` when none is free, `None` when the one found has no
    /// memory and another may.
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

    /// Tries again to get memory for what is withheld. To be called from time to time.
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

    /// The reason why a part of the memory cannot be used, and what to do about it; `None` while all can.
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
    /// Notes that the bytes of a slot are about to change.
    fn forget_sum(&self, node: u32) {
        if let Some(sum) = self.sums.get(node) {
            sum.store(0, Ordering::Relaxed);
        }
    }

    fn ensure(&self, unit: u32, units: u32) -> io::Result<()> {
        let bytes = |units: u32| u64::from(units) << self.align_bits;
        self.arena.ensure(bytes(unit), bytes(units))
    }

    /// Takes back the range of a slot whose last owner went.
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
