//! The memory of one side.

use std::sync::Arc;

use lmc_memory::{Arena, ArenaConfig, Demand, Pool, PoolConfig, ReservedSlot, SealedSlot};
use lmc_transfer::conformance::{check_value, fill_value};

use crate::{Failure, Shape};

/// Bytes for the largest batch twice, and for the gaps between its objects.
const ARENA: usize = 160 << 20;
/// The bytes of a slot before an object is in it.
pub(crate) const BEFORE: u8 = 0xEE;
/// Bytes of what is between objects, so that no two of them are neighbours and each is a
/// descriptor of its own.
const BETWEEN: u64 = 4096;

/// An arena that was written to from its first byte to its last, and its pool.
pub(crate) struct Memory {
    pub(crate) pool: Pool,
    between: Vec<ReservedSlot>,
}

impl Memory {
    pub(crate) fn new() -> Result<Self, Failure> {
        let arena = ArenaConfig::anonymous(ARENA).with_huge_pages(Demand::Auto);
        let arena = Arc::new(arena.build()?);
        let pool = Pool::new(arena, PoolConfig::default())?;
        let mut whole = pool
            .reserve(ARENA as u64)
            .ok_or("an empty pool has targets")?;
        whole.bytes_mut().fill(BEFORE);
        drop(whole);
        let between = Vec::new();
        Ok(Self { pool, between })
    }

    pub(crate) fn arena(&self) -> &Arc<Arena> {
        self.pool.arena()
    }

    /// Reserves slots for a batch, cleared.
    pub(crate) fn targets(&mut self, shape: Shape) -> Result<Vec<ReservedSlot>, Failure> {
        let mut slots = self.lay_out(shape)?;
        for slot in &mut slots {
            slot.bytes_mut().fill(BEFORE);
        }
        Ok(slots)
    }

    /// Objects of a batch.
    pub(crate) fn objects(&mut self, shape: Shape, seed: u64) -> Result<Vec<SealedSlot>, Failure> {
        let mut slots = self.lay_out(shape)?;
        for (number, slot) in slots.iter_mut().enumerate() {
            fill_value(seed, number, slot.bytes_mut());
        }
        Ok(slots
            .into_iter()
            .map(|slot| slot.written().seal())
            .collect())
    }

    /// Keeps what lies between the objects that are laid out from here on, nothing else.
    pub(crate) fn begin(&mut self) {
        self.between.clear();
    }

    fn lay_out(&mut self, shape: Shape) -> Result<Vec<ReservedSlot>, Failure> {
        let full = "the arena is too small for the batch";
        let mut slots = Vec::with_capacity(shape.count);
        for _ in 0..shape.count {
            slots.push(self.pool.reserve(shape.len as u64).ok_or(full)?);
            self.between.push(self.pool.reserve(BETWEEN).ok_or(full)?);
        }
        Ok(slots)
    }

    /// Reserves the slots that were given up just before.
    pub(crate) fn again(&self, shape: Shape) -> Result<Vec<ReservedSlot>, Failure> {
        let slot = |_| self.pool.reserve(shape.len as u64);
        let slots: Option<Vec<_>> = (0..shape.count).map(slot).collect();
        slots.ok_or_else(|| "what was given up is not there".into())
    }
}

/// Compares a batch with what it must be.
pub(crate) fn verify<'a>(
    objects: impl Iterator<Item = &'a [u8]>,
    seed: u64,
) -> Result<(), Failure> {
    for (number, bytes) in objects.enumerate() {
        check_value(seed, number, bytes)?;
    }
    Ok(())
}
