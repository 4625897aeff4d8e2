//! Creates the pool's memory: reclaims segments of killed servers, checks the size, maps the arena.

use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use lmc_memory::{Arena, ArenaConfig, ArenaError, Prefault, reclaim_stale_segments};
use tracing::{info, warn};

use crate::config::{PoolSize, SegmentName, ServeConfig, human_bytes};
use crate::{FreeMemory, choose_pool_size, occupant};

/// KV bytes per token of a model of 8 billion parameters (Llama-3-8B: 32 layers, K and V, 1,024
/// values of 2 bytes).
const TOKEN_BYTES_8B: u64 = 128 << 10;

/// Time between two checks that the pool is whole. Copies check it, too.
const LOOK: Duration = Duration::from_millis(250);

/// Creates the arena of the pool.
pub(crate) fn make(config: &ServeConfig, cores: usize) -> Result<Arena> {
    let freeing = reclaim();
    let bytes = size(config, freeing)?;
    let bytes = usize::try_from(bytes).context("--l1-size-gb")?;
    let arena = match &config.shm_name {
        SegmentName::None => ArenaConfig::anonymous(bytes),
        SegmentName::Sealed => ArenaConfig::sealed(bytes),
        SegmentName::Name(name) => ArenaConfig::shared(name.as_str(), bytes),
        // A port that the system chooses is not known yet, so the name uses the process id.
        SegmentName::Auto if config.port == 0 => {
            ArenaConfig::shared_unique(format!("lmc_p{}", std::process::id()), bytes)
        }
        SegmentName::Auto => ArenaConfig::shared_unique(format!("lmc_{}", config.port), bytes),
    };
    let threads = (cores / 2).clamp(1, 8);
    let prefault = if config.prefault {
        Prefault::Background { threads }
    } else {
        Prefault::None
    };
    let arena = arena
        .with_huge_pages(config.huge_pages)
        .with_lock(config.lock_memory)
        .with_numa_node(config.numa_node)
        .with_prefault(prefault)
        .build()
        .map_err(|error| {
            let holder = match &error {
                ArenaError::Held { owner, .. } => occupant::of_pid_text(owner),
                _ => None,
            };
            let error = anyhow!(error);
            match holder {
                Some(holder) => error.context(format!("the pool is held by {holder}")),
                None => error.context("the pool cannot be created"),
            }
        })?;
    for note in &arena.report().notes {
        info!("pool: {note}");
    }
    warn_of_size(config, arena.len() as u64);
    Ok(arena)
}

/// Reclaims the segments of this user's killed servers, on any port, and frees their pages in the
/// background.
fn reclaim() -> Option<JoinHandle<()>> {
    let stale = reclaim_stale_segments();
    for segment in &stale {
        info!(
            "pool: reclaimed {} of shared memory {}, which a killed server left ({})",
            human_bytes(segment.bytes()),
            segment.name(),
            segment.owner()
        );
    }
    if stale.is_empty() {
        return None;
    }
    let thread = thread::Builder::new().name("lmc-reclaim".to_owned());
    // If no thread can be started, the pages are freed on this one.
    thread.spawn(move || drop(stale)).ok()
}

/// Returns the bytes of the pool. If memory seems short, waits until the pages of killed servers are free
/// before it checks the size.
fn size(config: &ServeConfig, freeing: Option<JoinHandle<()>>) -> Result<u64> {
    let shared = config.shm_name.is_in_dev_shm();
    let mut free = FreeMemory::now(shared);
    let decided = match config.pool_size {
        PoolSize::Bytes(bytes) => free.holds(bytes),
        PoolSize::Auto => false,
    };
    if let (false, Some(freeing)) = (decided, freeing) {
        // Closing files does not panic.
        let _ = freeing.join();
        free = FreeMemory::now(shared);
    }
    match config.pool_size {
        PoolSize::Bytes(bytes) => {
            if let Err(why) = free.check_cgroup(bytes) {
                bail!("{why}");
            }
            if bytes > free.available {
                warn!(
                    "pool: --l1-size-gb is {}, and {} of memory are free; the system may kill this \
                     server, or other processes, once the pool fills; set a smaller size",
                    human_bytes(bytes),
                    human_bytes(free.available)
                );
            }
            Ok(bytes)
        }
        PoolSize::Auto => {
            let (bytes, why) = choose_pool_size(free);
            info!("pool: {why}");
            Ok(bytes)
        }
    }
}

/// Returns when another process has taken the pool's memory away.
pub(crate) async fn lost(arena: &Arena) {
    let mut every = tokio::time::interval(LOOK);
    while !arena.check_lost() {
        every.tick().await;
    }
}

/// Warns of a pool that is too small for common models.
fn warn_of_size(config: &ServeConfig, pool: u64) {
    let chunk = TOKEN_BYTES_8B.saturating_mul(config.chunk_size as u64);
    if pool < chunk {
        warn!(
            "the pool of {} is smaller than one chunk of an 8B model ({} per chunk of {} tokens), so engines \
             of such models are refused; set --l1-size-gb to several GiB{}",
            human_bytes(pool),
            human_bytes(chunk),
            config.chunk_size,
            match config.shm_name.is_in_dev_shm() {
                false => "",
                true => ", and enlarge /dev/shm for it (docker --shm-size, or --ipc=host)",
            }
        );
    }
}
