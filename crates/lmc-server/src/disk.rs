//! The disk tier as the configuration asks for it.

use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail};
use lmc_backend::Backend;
use lmc_backend_disk::{Admit, DiskConfig, DiskIo, usable_bytes};
use lmc_memory::Arena;
use tracing::info;

use crate::config::{DiskAdmit, DiskIoName, PoolSize, ServeConfig, human_bytes};

/// Bytes that may be on their way to the drives: those that stall leave most of the pool to
/// others. All of it may be for one drive, so that none refuses what was let in.
pub(crate) fn max_writing(pool: u64) -> u64 {
    (pool / 8).min(1 << 30)
}

/// Opens the tier and says what was found.
pub(crate) fn open(config: &ServeConfig, arena: &Arc<Arena>) -> Result<Arc<dyn Backend>> {
    let size = match config.disk_size {
        PoolSize::Bytes(bytes) => bytes,
        PoolSize::Auto => auto_size(config)?,
    };
    let tier = DiskConfig::new(&config.disk, size)
        .with_keep_free(config.disk_keep_free)
        .with_io(match config.disk_io {
            DiskIoName::Auto => DiskIo::Auto,
            DiskIoName::Uring => DiskIo::Uring,
            DiskIoName::Threads => DiskIo::Threads,
        })
        .with_depth(config.disk_depth)
        .with_admission(match config.disk_admit {
            DiskAdmit::Always => Admit::Always,
            DiskAdmit::Second => Admit::SecondTouch,
        })
        .with_max_writing(max_writing(arena.len() as u64))
        .with_arena(Arc::clone(arena))
        .open()
        // Its text names the cause already.
        .map_err(|error| anyhow!("the disk tier cannot be opened: {error}"))?;
    for (path, how) in config.disk.iter().zip(tier.describe()) {
        info!("disk: {} by {how}", path.display());
    }
    let held = tier.held();
    info!(
        "disk: {} chunks found ({}), room for {}",
        held.chunks,
        human_bytes(held.bytes),
        human_bytes(held.capacity.unwrap_or(size)),
    );
    Ok(Arc::new(tier))
}

/// Half of what is free, the same on each drive, so that the smallest decides. What the folders
/// hold already counts as free.
fn auto_size(config: &ServeConfig) -> Result<u64> {
    let mut least = u64::MAX;
    for path in &config.disk {
        let usable = usable_bytes(path).with_context(|| path.display().to_string())?;
        least = least.min(usable.saturating_sub(config.disk_keep_free) / 2);
    }
    if least < 64 << 20 {
        bail!(
            "--disk-size auto: less than 128 MiB are free beside --disk-keep-free {}; free some, \
             or say how much",
            human_bytes(config.disk_keep_free)
        );
    }
    let size = least * config.disk.len() as u64;
    info!("disk: {}, half of what is free", human_bytes(size));
    Ok(size)
}
