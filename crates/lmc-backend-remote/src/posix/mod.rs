//! [`FileStore`]: a folder of a shared file system as a store.

mod clears;
mod clock;
mod collect;
mod list;
mod threads;
mod tree;
mod value;

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::{FutureExt, stream};
use lmc_backend::{Answers, BoxFuture, FailedSlot};
use lmc_key::SpaceId;
use parking_lot::Mutex;
use rustix::fs::{AtFlags, Timespec, Timestamps, UTIME_NOW};

use self::collect::Collector;
pub use self::collect::{Collected, Limits, Shares};
use self::threads::{JobOutcome, Lane, Threads};
use self::tree::{Tree, is_absent};
use self::value::{BLOCK, Values, store_error};
use crate::format::{Name, OLD_ROOT, Scope, ValueName};
use crate::store::{
    Each, GetItem, Got, Head, ListPage, Put, PutItem, Single, Store, StoreError, Version,
};

/// Number of objects that one job processes.
const NAMES_OF_A_JOB: usize = 8;

/// Settings of a [`FileStore`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct FileConfig {
    /// The folder. It must exist, so that an empty mount point is not taken for the file system.
    pub root: PathBuf,
    /// Number of threads for blocking calls, at least 4. Default: 16.
    pub threads: usize,
    /// Reads and writes values without the page cache if the file system supports that. Default: true.
    pub direct: bool,
    /// Most bytes of the folder's chunks, those of all daemons together; the oldest chunks are removed.
    /// Default: no limit.
    pub max_bytes: Option<u64>,
    /// Age at which a chunk is removed. Default: none.
    pub ttl: Option<Duration>,
    /// Pause between the collections of two of the 256 folders, if there is a limit. Default: 2 s.
    pub collect_pause: Duration,
}

impl FileConfig {
    /// Returns the configuration of a folder without limits.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self {
            root: root.into(),
            threads: 16,
            direct: true,
            max_bytes: None,
            ttl: None,
            collect_pause: Duration::from_secs(2),
        }
    }
}

/// A folder of a shared file system: NFS, Lustre, Weka, a cluster's scratch.
///
/// A value is a file that is written under another name and then renamed, so that no reader sees an
/// incomplete one. There are no locks, and values are not synced. Files and folders have the permissions that
/// the umask leaves, and no link below the folder is followed.
#[derive(Debug)]
pub struct FileStore {
    values: Arc<Values>,
    threads: Threads,
    max_bytes: Option<u64>,
    ttl: Option<Duration>,
    collector: Mutex<Option<Collector>>,
}

/// Precision of the time of a chunk's last use, by which a tree beyond its size is collected.
const LAST_USE: Duration = Duration::from_secs(3600);

impl FileConfig {
    /// Makes a store. The folder is opened at the first operation.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn open(self) -> std::io::Result<FileStore> {
        let values = Arc::new(Values::new(Tree::new(self.root), self.direct));
        let Self { max_bytes, ttl, .. } = self;
        let limits = Limits {
            ttl,
            dry_run: false,
        };
        let is_limited = max_bytes.is_some() || ttl.is_some();
        let shares = Shares::of(max_bytes);
        let start = || Collector::start(&values, limits, shares, self.collect_pause);
        let collector = is_limited.then(start).transpose()?;
        Ok(FileStore {
            threads: Threads::new(self.threads),
            values,
            max_bytes,
            ttl,
            collector: Mutex::new(collector),
        })
    }
}

impl FileStore {
    /// Collects one of the 256 folders, and records its size in `shares`, which determine how many chunks it
    /// loses. Blocks.
    ///
    /// With `spaces`, only the chunks of these spaces count towards the limits and are removed; of unfinished
    /// files, only those next to such chunks are removed.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn collect(
        &self,
        fanout: u8,
        limits: Limits,
        shares: &mut Shares,
        spaces: Option<&HashSet<SpaceId>>,
    ) -> Result<Collected, StoreError> {
        self.values.collect(fanout, limits, shares, spaces)
    }

    /// Returns true while files are read and written without the page cache.
    pub fn is_direct(&self) -> bool {
        self.values.is_direct()
    }

    /// Reads the file server's clock from a file that is written for this purpose, so that the ages of files
    /// are known. Blocks.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn read_clock(&self) -> Result<(), StoreError> {
        let read = self.values.read_clock();
        read.map_err(|error| store_error(error, 0))
    }

    /// Returns the milliseconds by which the file server's clock is ahead of this host's, negative if it is
    /// behind; `None` before the first write.
    pub fn clock_ahead_ms(&self) -> Option<i64> {
        self.values.clock.ahead_ms()
    }

    /// Runs a job on the lane for names.
    async fn run<A: Send + 'static, T: Send + 'static>(
        &self,
        arguments: A,
        deadline: Instant,
        run: impl FnOnce(&Values, A) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        let values = Arc::clone(&self.values);
        let run = move |arguments| run(&values, arguments);
        match self
            .threads
            .run(Lane::Names, arguments, deadline, run)
            .await
        {
            JobOutcome::Done(result) => result,
            JobOutcome::Late(_) | JobOutcome::Running => Err(StoreError::Deadline),
            JobOutcome::Refused(_, reason) => Err(StoreError::unavailable(reason)),
        }
    }

    /// Runs one operation for each of many objects, several objects per job.
    async fn each<I: Copy + Send + 'static, T: Send + 'static>(
        &self,
        items: &[I],
        deadline: Instant,
        one: impl Fn(&Values, I) -> Result<T, StoreError> + Copy + Send + 'static,
    ) -> Vec<Result<T, StoreError>> {
        let jobs = items.chunks(NAMES_OF_A_JOB).map(|items| {
            let len = items.len();
            let all = move |values: &Values, items: Vec<I>| {
                let in_time = |item| match Instant::now() < deadline {
                    true => one(values, item),
                    false => Err(StoreError::Deadline),
                };
                Ok(items.into_iter().map(in_time).collect::<Vec<_>>())
            };
            let done = self.run(items.to_vec(), deadline, all);
            done.map(move |done| match done {
                Ok(results) => results,
                Err(error) => error.each(len),
            })
        });
        let results = futures_util::future::join_all(jobs).await;
        results.into_iter().flatten().collect()
    }
}

impl Store for FileStore {
    fn kind(&self) -> &'static str {
        "file"
    }

    fn payload_offset(&self) -> u64 {
        BLOCK as u64
    }

    fn ttl(&self) -> Option<Duration> {
        self.ttl
    }

    fn touch_age(&self) -> Option<Duration> {
        let by_size = self.max_bytes.map(|_| LAST_USE);
        let by_age = self.ttl.map(|ttl| ttl / 2);
        [by_size, by_age].into_iter().flatten().min()
    }

    fn heads<'a>(&'a self, names: &'a [ValueName], deadline: Instant) -> Each<'a, Option<Head>> {
        let head = |values: &Values, name| values.head(name);
        Box::pin(self.each(names, deadline, head))
    }

    fn get(&self, items: Vec<GetItem>, deadline: Instant) -> Answers<'_, Got> {
        let get = move |(index, item): (usize, GetItem)| async move {
            let values = Arc::clone(&self.values);
            let run = move |item: GetItem| values.get(item);
            let got = match self.threads.run(Lane::Reads, item, deadline, run).await {
                JobOutcome::Done(got) => got,
                JobOutcome::Late(item) => Got::failed(StoreError::Deadline, item.slot),
                JobOutcome::Refused(item, reason) => {
                    Got::failed(StoreError::unavailable(reason), item.slot)
                }
                // The thread releases the slot when the call ends.
                JobOutcome::Running => Got::Failed {
                    error: StoreError::Deadline,
                    slot: FailedSlot::Quarantined,
                },
            };
            (index, got)
        };
        // All reads wait for a thread in the order of the batch, which limits how many are in progress.
        let reads: stream::FuturesUnordered<_> = items.into_iter().enumerate().map(get).collect();
        Box::pin(reads)
    }

    fn put(&self, items: Vec<PutItem>, deadline: Instant) -> Answers<'_, Result<Put, StoreError>> {
        let put = move |(index, item): (usize, PutItem)| async move {
            let values = Arc::clone(&self.values);
            let run = move |item: PutItem| values.put(&item, deadline);
            let put = match self.threads.run(Lane::Writes, item, deadline, run).await {
                JobOutcome::Done(put) => put,
                JobOutcome::Late(_) | JobOutcome::Running => Err(StoreError::Deadline),
                JobOutcome::Refused(_, reason) => Err(StoreError::unavailable(reason)),
            };
            (index, put)
        };
        let writes: stream::FuturesUnordered<_> = items.into_iter().enumerate().map(put).collect();
        Box::pin(writes)
    }

    fn remove<'a>(&'a self, names: &'a [Name], deadline: Instant) -> Each<'a, bool> {
        let remove = |values: &Values, name: Name| {
            if name == Name::Clears {
                let removed = values.remove_clears();
                return removed.map_err(|error| store_error(error, 0));
            }
            let path = name.to_string();
            let removed = values.unlink(&path);
            let removed = removed.map_err(|error| store_error(error, 0))?;
            if let Some((folder, _)) = path.rsplit_once('/') {
                values.tree.remove_empty(folder);
            }
            Ok(removed)
        };
        Box::pin(self.each(names, deadline, remove))
    }

    fn touch<'a>(&'a self, names: &'a [ValueName], deadline: Instant) -> Each<'a, bool> {
        let touch = |values: &Values, name: ValueName| {
            let path = name.to_string();
            let touched = values.tree.parent(&path).and_then(|(folder, name)| {
                // The file server's time, not this host's.
                let now = Timespec {
                    tv_sec: 0,
                    tv_nsec: UTIME_NOW,
                };
                let times = Timestamps {
                    last_access: now,
                    last_modification: now,
                };
                let flags = AtFlags::SYMLINK_NOFOLLOW;
                Ok(rustix::fs::utimensat(&folder, name, &times, flags)?)
            });
            match touched {
                Ok(()) => Ok(true),
                Err(error) if is_absent(&error) => Ok(false),
                Err(error) => Err(store_error(error, 0)),
            }
        };
        Box::pin(self.each(names, deadline, touch))
    }

    fn list<'a>(
        &'a self,
        scope: Scope,
        token: Option<&'a str>,
        limit: usize,
        deadline: Instant,
    ) -> Single<'a, ListPage> {
        let list = move |values: &Values, token: Option<String>| {
            values.list(scope, token.as_deref(), limit, deadline)
        };
        Box::pin(self.run(token.map(str::to_owned), deadline, list))
    }

    fn read(&self, name: Name, max: usize, deadline: Instant) -> Single<'_, Option<Bytes>> {
        let read = move |values: &Values, ()| match values.read_file(&name.to_string(), max) {
            Err(StoreError::Io(error)) if is_absent(&error) => Ok(None),
            read => read.map(Some),
        };
        Box::pin(self.run((), deadline, read))
    }

    fn write(&self, name: Name, bytes: Bytes, deadline: Instant) -> Single<'_, ()> {
        let write = move |values: &Values, bytes: Bytes| values.write(name, &bytes, deadline);
        Box::pin(self.run(bytes, deadline, write))
    }

    fn read_clears(&self, max: usize, deadline: Instant) -> Single<'_, Option<(Bytes, Version)>> {
        let read = move |values: &Values, ()| values.read_clears(max);
        Box::pin(self.run((), deadline, read))
    }

    fn swap_clears(
        &self,
        bytes: Bytes,
        read: Option<Version>,
        deadline: Instant,
    ) -> Single<'_, bool> {
        let swap = move |values: &Values, bytes: Bytes| {
            values.swap_clears(&bytes, read.as_ref(), deadline)
        };
        Box::pin(self.run(bytes, deadline, swap))
    }

    fn old_chunks(&self, deadline: Instant) -> Single<'_, Option<String>> {
        let look = move |values: &Values, ()| {
            let has_some = values.tree.stat(OLD_ROOT).is_ok();
            let root = values.tree.root_path().display();
            Ok(has_some.then(|| format!("rm -r {root}/{OLD_ROOT}")))
        };
        Box::pin(self.run((), deadline, look))
    }

    fn close(&self, _deadline: Instant) -> BoxFuture<'_, ()> {
        drop(self.collector.lock().take());
        self.threads.close();
        Box::pin(std::future::ready(()))
    }
}
