//! Collection: keeps a tree within its size and age, one folder of the fan-out at a time.
//!
//! Hashes are even, so that each of the 256 folders holds about the same. Several daemons may
//! collect one tree: each takes folders at random, and what another one has removed is no error.

use std::io;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rustix::fs::{AtFlags, OFlags};

use super::clock::modified;
use super::tree::{TEMPORARY, is_absent, is_file, temporary};
use super::value::Values;
use crate::format::Name;
use crate::store::StoreError;

/// Age at which a file that was being written is given up.
const TEMPORARY_AGE: Duration = Duration::from_secs(3600);
/// Files of a folder that are looked at in one collection, at most.
const MAX_FILES: usize = 1 << 20;
/// Folders of the fan-out.
const FOLDERS: u64 = 256;
/// Time for the collection of one folder.
const TIMEOUT: Duration = Duration::from_secs(600);

/// Limits of a tree.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Limits {
    /// Most bytes.
    pub(super) max_bytes: Option<u64>,
    /// Greatest age.
    pub(super) ttl: Option<Duration>,
}

/// The outcome of a collection of one folder.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Collected {
    /// Bytes of the chunks that were found.
    pub bytes: u64,
    /// Number of chunks that were removed because they were too old.
    pub expired: u64,
    /// Number of chunks that were removed because the folder was too large.
    pub evicted: u64,
    /// Bytes of the chunks that were removed.
    pub removed_bytes: u64,
    /// Number of files removed that were being written an hour ago or earlier.
    pub temporary: u64,
}

struct File {
    path: String,
    modified: Duration,
    len: u64,
}

impl Values {
    /// Collects one folder.
    pub(super) fn collect(&self, fanout: u8, limits: Limits) -> Result<Collected, StoreError> {
        self.read_clock()?;
        let now = self.clock.now();
        let now = now.ok_or_else(|| StoreError::unavailable("the file server shows no time"))?;
        let deadline = Instant::now() + TIMEOUT;
        let mut collected = Collected::default();
        let mut files = Vec::new();
        for space in self.spaces_of(fanout, deadline)? {
            self.files_of(&space, now, &mut files, &mut collected)?;
        }
        files.sort_by_key(|file| file.modified);
        let most = limits.max_bytes.map_or(u64::MAX, |bytes| bytes / FOLDERS);
        let mut left = collected.bytes;
        for file in files {
            let is_expired = limits
                .ttl
                .is_some_and(|ttl| now.saturating_sub(file.modified) > ttl);
            if !is_expired && left <= most {
                break;
            }
            left -= file.len;
            if self.unlink(&file.path)? {
                collected.removed_bytes += file.len;
                match is_expired {
                    true => collected.expired += 1,
                    false => collected.evicted += 1,
                }
            }
        }
        Ok(collected)
    }

    /// Adds the chunks of a folder, and removes what was being written long ago.
    fn files_of(
        &self,
        folder: &str,
        now: Duration,
        files: &mut Vec<File>,
        collected: &mut Collected,
    ) -> Result<(), StoreError> {
        let names = self.tree.names(folder, |_| Ok(true))?;
        if names.is_empty() {
            // A writer that is about to use it makes it again.
            let (parent, name) = self.tree.parent(folder)?;
            let _ = rustix::fs::unlinkat(parent, name, AtFlags::REMOVEDIR);
        }
        for name in names {
            let path = format!("{folder}/{name}");
            let is_temporary = name.starts_with(TEMPORARY);
            if !is_temporary && path.parse::<Name>().is_err() || files.len() >= MAX_FILES {
                continue;
            }
            let stat = match self.tree.stat(&path) {
                Err(error) if is_absent(&error) => continue,
                stat => stat?,
            };
            let (Some(modified), true) = (modified(&stat), is_file(&stat)) else {
                continue;
            };
            let len = u64::try_from(stat.st_size).unwrap_or_default();
            if !is_temporary {
                collected.bytes += len;
                files.push(File {
                    path,
                    modified,
                    len,
                });
            } else if now.saturating_sub(modified) > TEMPORARY_AGE {
                collected.temporary += u64::from(self.unlink(&path)?);
            }
        }
        Ok(())
    }

    /// Returns false for a file that is not there.
    pub(super) fn unlink(&self, path: &str) -> io::Result<bool> {
        let unlink = || {
            let (folder, name) = self.tree.parent(path)?;
            Ok(rustix::fs::unlinkat(&folder, name, AtFlags::empty())?)
        };
        match unlink() {
            Ok(()) => Ok(true),
            Err(error) if is_absent(&error) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Reads the file server's clock off a file that is written for that.
    fn read_clock(&self) -> io::Result<()> {
        let (folder, _) = self.tree.made_parent(&Name::Clears.to_string())?;
        let (file, name) = temporary(&folder, OFlags::WRONLY)?;
        let written = rustix::io::write(&file, b"clock");
        self.clock.note(&file);
        rustix::fs::unlinkat(&folder, &name, AtFlags::empty())?;
        written?;
        Ok(())
    }
}

/// A thread that collects a tree until this is dropped.
#[derive(Debug)]
pub(super) struct Collector(Arc<(Mutex<bool>, Condvar)>);

impl Collector {
    /// Starts to collect a folder after each pause; four pauses are one where that was too large.
    pub(super) fn start(values: &Arc<Values>, limits: Limits, pause: Duration) -> io::Result<Self> {
        let ended: Arc<(Mutex<bool>, Condvar)> = Arc::default();
        let (shared, values) = (Arc::clone(&ended), Arc::downgrade(values));
        let named = thread::Builder::new().name("lmc-remote-gc".to_owned());
        named.spawn(move || run(&shared, &values, limits, pause))?;
        Ok(Self(ended))
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        *self.0.0.lock() = true;
        self.0.1.notify_all();
    }
}

fn run(shared: &(Mutex<bool>, Condvar), values: &Weak<Values>, limits: Limits, pause: Duration) {
    let mut wait = pause;
    loop {
        {
            let mut ended = shared.0.lock();
            let until = Instant::now() + wait;
            while !*ended && !shared.1.wait_until(&mut ended, until).timed_out() {}
            if *ended {
                return;
            }
        }
        let Some(values) = values.upgrade() else {
            return;
        };
        let mut fanout = [0];
        // Without random numbers the first folder is collected, and others by other daemons.
        let _ = getrandom::fill(&mut fanout);
        wait = match values.collect(fanout[0], limits) {
            Ok(collected) if collected.evicted > 0 => pause / 4,
            Ok(_) => pause,
            Err(error) => {
                tracing::warn!(%error, "remote folder not collected; it may grow beyond its size");
                pause * 4
            }
        };
    }
}
