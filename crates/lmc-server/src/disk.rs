//! Opens the disk tier of the configuration.

use std::sync::Arc;

use anyhow::{Result, anyhow, bail};
use lmc_backend::{Backend, Host};
use lmc_backend_disk::{DiskConfig, usable_bytes};
use lmc_memory::Arena;
use tracing::{info, warn};

use crate::config::{DiskSettings, LEAST_DRIVE, PoolSize, ServeConfig, human_bytes};

/// Returns the limit on the bytes that are being written to the drives, so that a stalled drive leaves
/// most of the pool free. All of these bytes may be for one drive, so that no drive refuses an admitted
/// write.
pub(crate) fn max_writing(pool: u64) -> u64 {
    (pool / 8).min(1 << 30)
}

/// Opens the tier with the host's clears, and logs what it holds.
pub(crate) fn open(
    config: &ServeConfig,
    disk: &DiskSettings,
    arena: &Arc<Arena>,
    host: &dyn Host,
) -> Result<Arc<dyn Backend>> {
    let size = match disk.size {
        PoolSize::Bytes(bytes) => bytes,
        PoolSize::Auto => auto_size(disk)?,
    };
    let mut tier = DiskConfig::new(&disk.folders, size);
    if disk.create {
        tier = tier.with_new_drives();
    }
    let tier = tier
        .with_keep_free(disk.keep_free)
        .with_io(disk.io)
        .with_depth(disk.depth)
        .with_max_writing(max_writing(arena.len() as u64))
        .with_arena(Arc::clone(arena))
        .with_key_settings(&key_settings(config))
        .open(host)
        // Its text names the cause already.
        .map_err(|error| anyhow!("the disk tier cannot be opened: {error}"))?;
    for (path, how) in disk.folders.iter().zip(tier.describe()) {
        info!("disk: {} by {how}", path.display());
    }
    let held = tier.held();
    info!(
        "disk: {} chunks found ({}), capacity {}",
        held.chunks,
        human_bytes(held.bytes),
        human_bytes(held.capacity.unwrap_or(size)),
    );
    for other in tier.unreachable() {
        warn!(
            "disk: {} chunks ({}) were stored with {} and cannot be hit with {}: start with the old \
             settings again, or let new chunks replace the old chunks (`lmc clear` removes all chunks at once)",
            other.chunks,
            human_bytes(other.bytes),
            other.settings,
            key_settings(config),
        );
    }
    Ok(Arc::new(tier))
}

/// Formats the settings that are in every key, as flags.
fn key_settings(config: &ServeConfig) -> String {
    let identity = match config.identity.as_str() {
        "" => String::new(),
        identity => format!(" --identity {identity:?}"),
    };
    format!(
        "--chunk-size {} --hash-algorithm {}{identity}",
        config.chunk_size,
        config.hash_algorithm.name()
    )
}

/// Returns half of the free space, with the same size on each drive, so that the smallest drive decides.
/// Space that the drives' own files use counts as free.
fn auto_size(disk: &DiskSettings) -> Result<u64> {
    let mut least = u64::MAX;
    for path in &disk.folders {
        // Its text names the folder already.
        let usable = usable_bytes(path).map_err(|error| anyhow!("{error}"))?;
        least = least.min(usable.saturating_sub(disk.keep_free) / 2);
    }
    if least < LEAST_DRIVE {
        bail!(
            "--disk-size auto: expected at least {} of free space in addition to --disk-keep-free {}; \
             free some space, or set --disk-size",
            human_bytes(2 * LEAST_DRIVE),
            human_bytes(disk.keep_free)
        );
    }
    let size = least * disk.folders.len() as u64;
    info!("disk: {}, half of the free space", human_bytes(size));
    Ok(size)
}
