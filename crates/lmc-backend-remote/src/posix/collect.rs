//! Collection: keeps a tree within its size and age, one folder of the fan-out at a time.
//!
//! A tree within its size loses nothing. A tree beyond its size loses chunks of each folder that is
//! collected, until the whole tree is within its size: first the chunks that no daemon looks for any more,
//! then the oldest ones. Chunks whose clears are not known here are left alone. Several daemons may collect
//! one tree: each processes the folders in an order of its own, and a file that another daemon has removed is
//! not an error.

use std::collections::HashSet;
use std::io;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use lmc_key::SpaceId;
use parking_lot::{Condvar, Mutex};
use rustix::fs::{AtFlags, OFlags};

use super::clock::modified;
use super::tree::{TEMPORARY, is_absent, is_file, temporary};
use super::value::Values;
use crate::format::{
    ChunkFolder, ClearsRecord, MAX_CLEARS_LEN, Name, PROBE_FOLDER, ROOT, Standing,
};
use crate::store::StoreError;

/// Age at which an unfinished file is removed.
const TEMPORARY_AGE: Duration = Duration::from_secs(3600);
/// Most files of a folder that are examined in one collection.
const MAX_FILES: usize = 1 << 20;
/// Number of folders of the fan-out.
const FOLDERS: usize = 256;
/// Timeout for the collection of one folder.
const TIMEOUT: Duration = Duration::from_secs(600);

/// Limits of a folder, in addition to its share of the tree's size.
#[derive(Clone, Copy, Debug, Default)]
pub struct Limits {
    /// Age at which a chunk is removed. Default: none.
    pub ttl: Option<Duration>,
    /// Removes nothing, and only counts what would be removed. Default: false.
    pub dry_run: bool,
}

/// Outcome of collecting one folder.
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
    /// Number of unfinished files removed that were at least an hour old.
    pub temporary: u64,
}

/// Sizes of the folders of a tree when they were last examined, from which each folder's share is computed.
#[derive(Clone, Debug)]
pub struct Shares {
    most: Option<u64>,
    bytes: [Option<u64>; FOLDERS],
}

impl Shares {
    /// Makes the shares of a tree whose chunks may have `most` bytes; `None` for no limit.
    pub fn of(most: Option<u64>) -> Self {
        Self {
            most,
            bytes: [None; FOLDERS],
        }
    }

    /// Records the bytes of the chunks of a folder.
    fn note(&mut self, fanout: u8, bytes: u64) {
        self.bytes[usize::from(fanout)] = Some(bytes);
    }

    /// Records that a folder could not be read: it counts with its size when it was last examined.
    pub fn skip(&mut self, fanout: u8) {
        self.bytes[usize::from(fanout)].get_or_insert(0);
    }

    /// Returns the most bytes that a folder may keep; `None` while the tree is within its size, and before
    /// every folder was examined.
    fn share(&self, fanout: u8) -> Option<u64> {
        let all: u128 = (self.bytes.iter())
            .map(|bytes| bytes.map(u128::from))
            .sum::<Option<u128>>()?;
        let own = u128::from(self.bytes[usize::from(fanout)]?);
        let most = u128::from(self.most?);
        // At most `most`, because a folder is no larger than the whole tree.
        (all > most).then(|| (own * most / all) as u64)
    }
}

struct File {
    path: String,
    is_stale: bool,
    modified: Duration,
    len: u64,
}

impl Values {
    /// Collects one folder. With `spaces`, only the chunks of these spaces count and are removed.
    pub(super) fn collect(
        &self,
        fanout: u8,
        limits: Limits,
        shares: &mut Shares,
        spaces: Option<&HashSet<SpaceId>>,
    ) -> Result<Collected, StoreError> {
        self.read_clock()?;
        let now = self.clock.now();
        let now = now.ok_or_else(|| StoreError::unavailable("the file server shows no time"))?;
        let deadline = Instant::now() + TIMEOUT;
        let mut collected = Collected::default();
        let mut files = Vec::new();
        let is_picked = |folder: &str| {
            let id = || folder.rsplit('/').next()?.parse::<SpaceId>().ok();
            spaces.is_none_or(|spaces| id().is_some_and(|id| spaces.contains(&id)))
        };
        let chunk_folders = self.chunk_folders_by_standing(deadline)?;
        for (folder, standing) in &chunk_folders {
            let part = format!("{folder}/{fanout:02x}");
            let mut folders = self.subfolders::<SpaceId>(&part, deadline)?;
            folders.retain(|folder| is_picked(folder));
            for space in folders {
                let times = (now, deadline);
                self.files_of(&space, *standing, times, limits, &mut files, &mut collected)?;
            }
        }
        if fanout == 0 && spaces.is_none() {
            self.collect_others(&chunk_folders, now, limits, &mut collected)?;
        }
        files.sort_by_key(|file| (!file.is_stale, file.modified));
        // The share is of the current content: chunks that came since the last collection of this folder are
        // the youngest.
        shares.note(fanout, collected.bytes);
        let most = shares.share(fanout).unwrap_or(u64::MAX);
        let mut left = collected.bytes;
        let mut refused = None;
        for file in files {
            let is_expired = limits
                .ttl
                .is_some_and(|ttl| now.saturating_sub(file.modified) > ttl);
            if !is_expired && left <= most {
                continue;
            }
            if Instant::now() >= deadline {
                return Err(StoreError::Deadline);
            }
            match self.take_away(&file.path, limits) {
                Ok(true) => {
                    collected.removed_bytes += file.len;
                    match is_expired {
                        true => collected.expired += 1,
                        false => collected.evicted += 1,
                    }
                }
                Ok(false) => {}
                // Other files may still be removable, so that the folder reaches its size.
                Err(error) => {
                    refused.get_or_insert(error);
                    continue;
                }
            }
            left -= file.len;
            shares.note(fanout, left);
        }
        match refused {
            Some(error) => Err(error.into()),
            None => Ok(collected),
        }
    }

    /// Returns the folders of chunks with their status.
    fn chunk_folders_by_standing(
        &self,
        deadline: Instant,
    ) -> Result<Vec<(String, Standing)>, StoreError> {
        // A listed generation was in the object of clears before its first chunk. So if it is not in the
        // object, which is read afterwards, it was replaced.
        let mut folders = self.chunk_folders(deadline)?;
        // The probes of a running check do not count: the check removes them itself.
        folders.retain(|folder| *folder != PROBE_FOLDER.to_string());
        let all = self.read_clears(MAX_CLEARS_LEN)?;
        let all = all.and_then(|(bytes, _)| ClearsRecord::decode(&bytes).ok());
        let standing = |path: &str| {
            let (Some(all), Some(folder)) = (&all, chunk_folder(path)) else {
                return Ok(Standing::Unknown);
            };
            let map = match self.read_file(&Name::Map(folder).to_string(), MAX_CLEARS_LEN) {
                Ok(bytes) => ClearsRecord::decode_map(folder, &bytes),
                Err(StoreError::TooLarge { .. }) => None,
                Err(StoreError::Io(error)) if is_absent(&error) => None,
                Err(error) => return Err(error),
            };
            Ok(all.standing(folder, map.as_ref()))
        };
        let with_standing = |path: String| {
            let standing = standing(&path)?;
            Ok((path, standing))
        };
        folders.into_iter().map(with_standing).collect()
    }

    /// Adds the chunks of a folder, and removes old unfinished files.
    fn files_of(
        &self,
        folder: &str,
        standing: Standing,
        (now, deadline): (Duration, Instant),
        limits: Limits,
        files: &mut Vec<File>,
        collected: &mut Collected,
    ) -> Result<(), StoreError> {
        let names = self.tree.names(folder, |_| Ok(true))?;
        let is_known = standing != Standing::Unknown;
        if names.is_empty() && !limits.dry_run && is_known {
            self.tree.remove_empty(folder);
        }
        for name in names {
            if Instant::now() >= deadline {
                return Err(StoreError::Deadline);
            }
            let path = format!("{folder}/{name}");
            if name.starts_with(TEMPORARY) {
                if is_known {
                    self.collect_temporary(&path, now, limits, collected)?;
                }
            } else if path.parse::<Name>().is_ok()
                && files.len() < MAX_FILES
                && let Some((modified, len)) = self.file(&path)?
            {
                collected.bytes += len;
                if is_known {
                    files.push(File {
                        path,
                        is_stale: standing == Standing::Stale,
                        modified,
                        len,
                    });
                }
            }
        }
        Ok(())
    }

    /// Removes old unfinished files outside the folders of the fan-out, and the small objects of stale
    /// folders without chunks.
    fn collect_others(
        &self,
        chunk_folders: &[(String, Standing)],
        now: Duration,
        limits: Limits,
        collected: &mut Collected,
    ) -> Result<(), StoreError> {
        let mut beside = vec![ROOT.to_owned(), Name::Clears.to_string()];
        for (folder, standing) in chunk_folders {
            let spaces = format!("{folder}/spaces");
            let is_other = |name: &str| Ok(name != "map" && name != "spaces");
            let is_empty = self.tree.names(folder, is_other)?.is_empty();
            match standing {
                Standing::Unknown => continue,
                Standing::Stale if is_empty && !limits.dry_run => {
                    // The map is removed last: without it, the remaining objects would not be known to be
                    // stale.
                    for name in self.tree.names(&spaces, |_| Ok(true))? {
                        self.unlink(&format!("{spaces}/{name}"))?;
                    }
                    self.tree.remove_empty(&spaces);
                    self.unlink(&format!("{folder}/map"))?;
                    self.tree.remove_empty(folder);
                }
                _ => beside.extend([folder.clone(), spaces]),
            }
        }
        for folder in beside {
            let is_temporary = |name: &str| Ok(name.starts_with(TEMPORARY));
            for name in self.tree.names(&folder, is_temporary)? {
                let path = format!("{folder}/{name}");
                self.collect_temporary(&path, now, limits, collected)?;
            }
        }
        Ok(())
    }

    /// Removes an unfinished file, if it is old.
    fn collect_temporary(
        &self,
        path: &str,
        now: Duration,
        limits: Limits,
        collected: &mut Collected,
    ) -> Result<(), StoreError> {
        let file = self.file(path)?;
        if file.is_some_and(|(modified, _)| now.saturating_sub(modified) > TEMPORARY_AGE) {
            let is_removed = self.take_away(path, limits);
            collected.temporary += u64::from(is_removed.unwrap_or(false));
        }
        Ok(())
    }

    /// Removes a file, unless this is a dry run. Returns false if the file did not exist.
    fn take_away(&self, path: &str, limits: Limits) -> io::Result<bool> {
        match limits.dry_run {
            true => Ok(true),
            false => self.unlink(path),
        }
    }

    /// Returns the time of a file's last change and its length; `None` if there is no file.
    fn file(&self, path: &str) -> io::Result<Option<(Duration, u64)>> {
        let stat = match self.tree.stat(path) {
            Err(error) if is_absent(&error) => return Ok(None),
            stat => stat?,
        };
        let len = u64::try_from(stat.st_size).unwrap_or_default();
        let modified = modified(&stat).filter(|_| is_file(&stat));
        Ok(modified.map(|modified| (modified, len)))
    }

    /// Removes a file. Returns false if it did not exist.
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

    /// Reads the file server's clock from a file that is written for this purpose.
    pub(super) fn read_clock(&self) -> io::Result<()> {
        let (folder, _) = self.tree.made_parent(&Name::Clears.to_string())?;
        let (file, name) = temporary(&folder, OFlags::WRONLY)?;
        let written = rustix::io::write(&file, b"clock");
        self.clock.note(&file);
        rustix::fs::unlinkat(&folder, &name, AtFlags::empty())?;
        written?;
        Ok(())
    }
}

/// Returns the folder of chunks at a path, unless it is the folder of probes.
fn chunk_folder(path: &str) -> Option<ChunkFolder> {
    let mut names = path.rsplit('/');
    let (clears, generation) = (names.next()?, names.next()?);
    let folder = ChunkFolder {
        generation: generation.parse().ok()?,
        clears: clears.parse().ok()?,
    };
    (folder != PROBE_FOLDER).then_some(folder)
}

/// A thread that collects a tree until this is dropped.
#[derive(Debug)]
pub(super) struct Collector(Arc<(Mutex<bool>, Condvar)>);

impl Collector {
    /// Starts the thread: it collects one folder after each pause. After a collection that evicted chunks it
    /// waits for a quarter of the pause, after a failed one for four pauses.
    pub(super) fn start(
        values: &Arc<Values>,
        limits: Limits,
        shares: Shares,
        pause: Duration,
    ) -> io::Result<Self> {
        let ended: Arc<(Mutex<bool>, Condvar)> = Arc::default();
        let (shared, values) = (Arc::clone(&ended), Arc::downgrade(values));
        let named = thread::Builder::new().name("lmc-remote-gc".to_owned());
        named.spawn(move || run(&shared, &values, limits, shares, pause))?;
        Ok(Self(ended))
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        *self.0.0.lock() = true;
        self.0.1.notify_all();
    }
}

fn run(
    shared: &(Mutex<bool>, Condvar),
    values: &Weak<Values>,
    limits: Limits,
    mut shares: Shares,
    pause: Duration,
) {
    let mut wait = pause;
    let mut order = Vec::new();
    // Folders whose last collection failed.
    let mut failed = HashSet::new();
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
        let fanout = order.pop().unwrap_or_else(|| {
            order = shuffled();
            order.pop().unwrap_or_default()
        });
        wait = match values.collect(fanout, limits, &mut shares, None) {
            Ok(collected) => {
                failed.remove(&fanout);
                match collected.evicted {
                    0 => pause,
                    _ => pause / 4,
                }
            }
            Err(error) => {
                shares.skip(fanout);
                if failed.is_empty() {
                    tracing::warn!(
                        folder = format_args!("{fanout:02x}"), %error,
                        "a folder of the remote store cannot be collected, and may grow; the others are \
                         still collected: allow this user to read and write the whole folder"
                    );
                }
                failed.insert(fanout);
                pause * 4
            }
        };
    }
}

/// Returns all folders in random order, so that daemons do not collect the same folder at the same time.
/// Without random numbers, returns them in the order of their names.
fn shuffled() -> Vec<u8> {
    let mut order: Vec<u8> = (0..=u8::MAX).collect();
    let mut chance = [0; FOLDERS];
    if getrandom::fill(&mut chance).is_ok() {
        for (index, &other) in chance.iter().enumerate() {
            order.swap(index, usize::from(other));
        }
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_within_its_size_has_no_shares_and_a_larger_one_comes_down_to_it() {
        let mut shares = Shares::of(Some(1000));
        for fanout in 0..=u8::MAX {
            assert_eq!(shares.share(fanout), None, "not all folders were seen");
            shares.note(fanout, if fanout < 10 { 100 } else { 0 });
        }
        assert_eq!(shares.share(3), None, "the whole is within its size");
        shares.note(3, 600);
        assert_eq!(shares.share(3), Some(400));
        assert_eq!(shares.share(4), Some(66));
        assert_eq!(shares.share(200), Some(0));
        shares.note(3, 100);
        assert_eq!(shares.share(4), None);
        shares.note(4, u64::MAX);
        assert!(shares.share(4).is_some_and(|share| share <= 1000));
    }

    #[test]
    fn an_order_has_each_folder_once() {
        let mut order = shuffled();
        order.sort_unstable();
        assert!(order.into_iter().eq(0..=u8::MAX));
    }
}
