//! Memory for chunks.

use std::sync::Arc;

use lmc_memory::{ArenaConfig, Pool, PoolConfig};

/// Returns a pool of anonymous memory with the default alignment.
///
/// # Panics
/// When the memory cannot be allocated.
pub fn pool(bytes: u64) -> Pool {
    let bytes = usize::try_from(bytes).expect("a test's pool lies in memory");
    let arena = ArenaConfig::anonymous(bytes).build().expect("memory");
    Pool::new(Arc::new(arena), PoolConfig::default()).expect("a valid alignment")
}
