//! Slots of an arena.

use std::sync::Arc;

use thiserror::Error;

use crate::Arena;

mod slot;
pub use slot::{QuarantinedSlot, ReservedSlot, SealedSlot, WrittenSlot};

/// How a pool cuts up its arena.
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

/// What a pool holds, in bytes and slots.
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
}

/// Hands out slots of an arena. Clones share the same pool.
#[derive(Clone, Debug)]
pub struct Pool {
    arena: Arc<Arena>,
}

impl Pool {
    /// A pool over all of an arena.
    ///
    /// # Errors
    /// [`PoolError`] for an alignment that is no power of two or an arena too small or large.
    pub fn new(arena: Arc<Arena>, config: PoolConfig) -> Result<Self, PoolError> {
        let _ = config;
        Ok(Self { arena })
    }

    /// The arena under it.
    pub fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    /// Takes a slot of `len` bytes, whose content is whatever was there before; `None` when
    /// nothing large enough is free or `len` is 0. O(1), touches no byte of the slot.
    pub fn reserve(&self, len: u64) -> Option<ReservedSlot> {
        let _ = len;
        unimplemented!()
    }

    /// What the pool holds now.
    pub fn usage(&self) -> PoolUsage {
        unimplemented!()
    }
}
