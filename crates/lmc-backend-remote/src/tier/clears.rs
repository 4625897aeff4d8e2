//! Clears: those known here, and the object through which daemons pass them on.

use std::sync::Arc;
use std::time::{Duration, Instant};

use lmc_backend::{BackendError, Cleared, Clears, TooManyClears, Unavailable, now};
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};

use super::access::StoreAccess;
use crate::format::{
    ChunkFolder, ClearsError, ClearsRecord, Generation, MAX_CLEARS_LEN, Name, Scope,
};
use crate::store::{Store, StoreError, until};

/// Most attempts to write the object while other daemons write it too.
const MAX_ATTEMPTS: usize = 8;
/// Timeout for one reading of the object, whatever timeout other operations have.
const READ_TIMEOUT: Duration = Duration::from_secs(2);
/// Number of intervals for which the clears that were read count as complete.
const LEASE: u32 = 3;
/// Number of intervals after which a lost object gets a new generation.
const GRACE: u32 = 2;
/// Pause before the object is rewritten unchanged, so that a lifecycle rule does not remove it: the first
/// pause, and all later ones.
const REWRITES: (Duration, Duration) = (Duration::from_secs(3600), Duration::from_secs(24 * 3600));
/// Number of names that one request lists to find out whether there are any.
const PAGE: usize = 1000;

/// Clears and generation as known here. All times are of the boot clock.
#[derive(Debug)]
struct Known {
    /// The clears that the engine has carried out.
    current: Arc<Clears>,
    /// The clears of `current`, and all clears that the store has passed on.
    all: Arc<Clears>,
    /// True if the store has passed on clears that the engine has not carried out yet.
    is_behind: bool,
    /// The folder in which chunks are stored and looked up, once the generation is known.
    folder: Option<ChunkFolder>,
    /// Time of the last reading that found the object, taken before the reading; `None` if the object is no
    /// longer understood.
    read_at: Option<Duration>,
    /// Time of the first reading since then that did not find the object.
    lost_at: Option<Duration>,
    rewrite_at: Duration,
    /// Reason why the last reading failed.
    fault: Option<String>,
}

impl Known {
    fn new(current: Arc<Clears>, now: Duration) -> Self {
        Self {
            all: Arc::clone(&current),
            current,
            is_behind: false,
            folder: None,
            read_at: None,
            lost_at: None,
            rewrite_at: now + REWRITES.0,
            fault: None,
        }
    }

    /// Adds the clears that the engine has carried out by now.
    ///
    /// Two clears of one engine may arrive in any order: an older map than the current one changes nothing.
    fn carried_out(&mut self, clears: Arc<Clears>) -> Result<(), TooManyClears> {
        if self.current.contains(&clears) {
            return Ok(());
        }
        Arc::make_mut(&mut self.all).join(&clears)?;
        if let Some(folder) = &mut self.folder {
            folder.clears = clears.id();
        }
        self.current = clears;
        self.is_behind = !self.current.contains(&self.all);
        Ok(())
    }

    /// Adds the content of the object, which was read after `now`.
    fn found(&mut self, object: &ClearsRecord, now: Duration) -> Result<(), TooManyClears> {
        // Until the content was added, the clears are not known.
        self.read_at = None;
        if !self.all.contains(&object.clears) {
            Arc::make_mut(&mut self.all).join(&object.clears)?;
            self.is_behind = true;
        }
        self.folder = Some(ChunkFolder {
            generation: object.generation,
            clears: self.current.id(),
        });
        (self.read_at, self.lost_at, self.fault) = (Some(now), None, None);
        Ok(())
    }

    /// Returns the object to write in place of a lost one, after a reading that began at `now`; `None` while
    /// that is undecided.
    fn successor(
        &mut self,
        now: Duration,
        interval: Duration,
        is_empty: bool,
    ) -> Result<Option<ClearsRecord>, getrandom::Error> {
        let lost_at = *self.lost_at.get_or_insert(now);
        let generation = match self.folder {
            // No other daemon has made a new generation yet.
            Some(folder) if self.is_read(now, interval) => folder.generation,
            _ if is_empty || now.saturating_sub(lost_at) >= GRACE * interval => {
                Generation::random()?
            }
            _ => return Ok(None),
        };
        let clears = Clears::clone(&self.all);
        Ok(Some(ClearsRecord { generation, clears }))
    }

    fn is_read(&self, now: Duration, interval: Duration) -> bool {
        let age = self.read_at.map(|at| now.saturating_sub(at));
        age.is_some_and(|age| age <= LEASE * interval)
    }

    /// Returns the folder of chunks, or the reason why no folder may be used.
    fn folder(&self, now: Duration, interval: Duration) -> Result<ChunkFolder, Unavailable> {
        let Some(folder) = self.folder.filter(|_| self.is_read(now, interval)) else {
            let fault = self
                .fault
                .as_deref()
                .unwrap_or("the store has not answered yet");
            let reason = format!(
                "the clears that other daemons have carried out are not known: {fault}; check that the \
                 store answers, and that this user may read and write {} there",
                Name::Clears
            );
            return Err(Unavailable { reason });
        };
        if self.is_behind {
            let reason =
                "other daemons have carried out clears that this daemon has not: this daemon carries \
                          them out within seconds; if not, read its log for the reason"
                    .to_owned();
            return Err(Unavailable { reason });
        }
        Ok(folder)
    }
}

/// The clears as known here, kept in step with the object in the store.
///
/// Lock order: `syncing`, `known`, `mapped`.
#[derive(Debug)]
pub(super) struct ClearsSync {
    access: Arc<StoreAccess>,
    known: Mutex<Known>,
    /// Limits the object to one reader and writer at a time.
    syncing: tokio::sync::Mutex<()>,
    /// True once the object was read.
    was_read: watch::Sender<bool>,
    /// Wakes the task that keeps the object in step.
    raised: Notify,
    /// The folder whose map this process has written last.
    mapped: Mutex<Option<ChunkFolder>>,
}

impl ClearsSync {
    pub(super) fn new(access: &Arc<StoreAccess>, current: Arc<Clears>) -> Self {
        let now = access.config.boot_clock.now();
        Self {
            access: Arc::clone(access),
            known: Mutex::new(Known::new(current, now)),
            syncing: tokio::sync::Mutex::default(),
            was_read: watch::channel(false).0,
            raised: Notify::new(),
            mapped: Mutex::default(),
        }
    }

    /// Returns all clears that are known here.
    pub(super) fn all(&self) -> Arc<Clears> {
        Arc::clone(&self.known.lock().all)
    }

    /// Waits until the object was read once.
    pub(super) async fn wait_until_read(&self) {
        // The sender lives as long as `self`.
        let _ = self.was_read.subscribe().wait_for(|&read| read).await;
    }

    /// Returns the folder in which chunks may be stored and looked up now, or the reason why there is none.
    pub(super) fn folder(&self) -> Result<ChunkFolder, Unavailable> {
        let config = &self.access.config;
        let now = config.boot_clock.now();
        self.known.lock().folder(now, config.clears_interval)
    }

    /// Returns the folder for an operation that begins now, or the reason why none can begin on any path.
    pub(super) fn check(&self) -> Result<ChunkFolder, BackendError> {
        self.access.check_open()?;
        Ok(self.folder()?)
    }

    /// Keeps the clears in step with the store.
    pub(super) async fn keep_in_step(self: Arc<Self>) {
        let (first, most) = self.access.config.probe_pause;
        let (mut failures, mut was_known) = (0u32, false);
        loop {
            let pause = match self.sync(now() + READ_TIMEOUT).await {
                Ok(_) => {
                    failures = 0;
                    self.access.config.clears_interval
                }
                Err(_) => {
                    failures = failures.saturating_add(1);
                    most.min(first * 2u32.saturating_pow(failures - 1))
                }
            };
            match self.folder() {
                Err(Unavailable { reason }) if was_known && failures > 0 => {
                    tracing::warn!(reason, "remote store not used; its chunks are misses");
                    was_known = false;
                }
                Ok(_) if !was_known => {
                    tracing::info!("remote store in use");
                    was_known = true;
                }
                _ => {}
            }
            tokio::select! {
                () = tokio::time::sleep(jittered(pause)) => {}
                () = self.raised.notified() => {}
            }
        }
    }

    /// Adds the clears that the engine has carried out, and passes them on.
    pub(super) async fn clear(
        self: &Arc<Self>,
        clears: Arc<Clears>,
        deadline: Instant,
    ) -> Result<Cleared, BackendError> {
        self.access.check_open()?;
        let carried_out = self.known.lock().carried_out(clears);
        carried_out.map_err(StoreError::unavailable)?;
        let this = Arc::clone(self);
        let passed_on = self.access.spawn(async move {
            let synced = this.sync(deadline).await;
            if !matches!(synced, Ok(None)) {
                this.raised.notify_one();
            }
            synced
        });
        match passed_on.await {
            Ok(Ok(None)) => Ok(Cleared::new(0).durable()),
            Ok(Ok(Some(error)) | Err(error)) => Err(error.into()),
            Err(_) => Err(BackendError::Closed),
        }
    }

    /// Joins the clears of the store with those known here, and writes them if the store lacks any. Returns
    /// the refusal of the write if the store can still be read.
    pub(super) async fn sync(&self, deadline: Instant) -> Result<Option<StoreError>, StoreError> {
        let syncing = async { Ok::<_, StoreError>(self.syncing.lock().await) };
        let _syncing = until(deadline, syncing).await?;
        let synced = self.try_sync(deadline).await;
        if let Err(error) = &synced {
            self.access.counters.clears_unread.add(1);
            self.known.lock().fault = Some(error.to_string());
        }
        synced
    }

    async fn try_sync(&self, deadline: Instant) -> Result<Option<StoreError>, StoreError> {
        for _ in 0..MAX_ATTEMPTS {
            let read_at = self.access.config.boot_clock.now();
            let read = match self
                .access
                .store
                .read_clears(MAX_CLEARS_LEN, deadline)
                .await
            {
                Err(StoreError::TooLarge { found, .. }) => {
                    return Err(self.not_understood(ClearsError::Len(found)));
                }
                read => read?,
            };
            let (object, version) = match read {
                None => (None, None),
                Some((bytes, version)) => match ClearsRecord::decode(&bytes) {
                    Ok(object) => (Some(object), Some(version)),
                    Err(ClearsError::Damaged) => (None, Some(version)),
                    Err(error) => return Err(self.not_understood(error)),
                },
            };
            let is_found = object.is_some();
            let object = match object {
                Some(object) => match self.note_object(&object, read_at)? {
                    None => return Ok(None),
                    Some(newer) => newer,
                },
                None => self.successor(read_at, version.is_some(), deadline).await?,
            };
            let bytes = object.encode();
            let len = bytes.len() as u64;
            match self
                .access
                .store
                .swap_clears(bytes.into(), version, deadline)
                .await
            {
                Ok(true) => {
                    let all_are_in = self.note_object(&object, read_at)?.is_none();
                    self.known.lock().rewrite_at = read_at + REWRITES.1;
                    self.access.refusals.written(len, now());
                    // Clears that came meanwhile are written at once.
                    if all_are_in {
                        return Ok(None);
                    }
                }
                Ok(false) => {}
                Err(error) if is_found && error.is_refusal() => {
                    self.access.refusals.refused(&error, len, now());
                    return Ok(Some(error));
                }
                Err(error) => return Err(error),
            }
        }
        Err(StoreError::unavailable(
            "the object of clears changes faster than it is written",
        ))
    }

    /// Adds the content of the object, which was read or written after `now`. Returns the object to write
    /// instead, if it lacks clears or is old.
    fn note_object(
        &self,
        object: &ClearsRecord,
        now: Duration,
    ) -> Result<Option<ClearsRecord>, StoreError> {
        let mut known = self.known.lock();
        known.found(object, now).map_err(StoreError::unavailable)?;
        self.was_read.send_replace(true);
        let is_old = now >= known.rewrite_at;
        if is_old {
            known.rewrite_at = now + REWRITES.0;
            // The map of the folder is written again with the next chunk.
            *self.mapped.lock() = None;
        }
        let is_whole = object.clears.contains(&known.all);
        Ok((is_old || !is_whole).then(|| ClearsRecord {
            generation: object.generation,
            clears: Clears::clone(&known.all),
        }))
    }

    /// Returns the object to write in place of an absent or damaged one.
    async fn successor(
        &self,
        now: Duration,
        is_damaged: bool,
        deadline: Instant,
    ) -> Result<ClearsRecord, StoreError> {
        let interval = self.access.config.clears_interval;
        let what = if is_damaged { "damaged" } else { "absent" };
        let next = |is_empty| {
            let next = self.known.lock().successor(now, interval, is_empty);
            next.map_err(StoreError::unavailable)
        };
        let next = match next(false)? {
            Some(next) => Some(next),
            None if has_nothing(&*self.access.store, deadline).await => next(true)?,
            None => None,
        };
        let next = next.ok_or_else(|| {
            let wait = GRACE * interval;
            StoreError::unavailable(format!(
                "{} is {what}: unless a daemon that has used it puts it back within {wait:?}, chunks \
                 from before are not found any more",
                Name::Clears
            ))
        })?;
        tracing::warn!(generation = %next.generation, "{} of the remote store is {what}; writing it", Name::Clears);
        if !is_damaged && let Ok(Some(command)) = self.access.store.old_chunks(deadline).await {
            tracing::warn!(
                "the remote store has chunks of an older lmc, which are not read; to remove them: {command}"
            );
        }
        Ok(next)
    }

    /// Discards what is known: a later lmc passes clears on through this object, and those are not known
    /// here. The object is not overwritten.
    fn not_understood(&self, error: ClearsError) -> StoreError {
        self.known.lock().read_at = None;
        StoreError::unavailable(format!("{error}: use one release of lmc with one store"))
    }

    /// Writes the map of a folder, unless that was done before. Called before the first chunk. Returns false
    /// if the engine has cleared meanwhile, so that no lookup will use the folder.
    pub(super) async fn write_map(
        &self,
        folder: ChunkFolder,
        deadline: Instant,
    ) -> Result<bool, StoreError> {
        if *self.mapped.lock() == Some(folder) {
            return Ok(true);
        }
        let clears = Clears::clone(&self.known.lock().current);
        let generation = folder.generation;
        let map = ClearsRecord { generation, clears };
        if map.folder() != folder {
            return Ok(false);
        }
        let write = self
            .access
            .store
            .write(Name::Map(folder), map.encode().into(), deadline);
        write.await?;
        *self.mapped.lock() = Some(folder);
        Ok(true)
    }
}

/// Returns true if a store has no visible chunk, map or description.
async fn has_nothing(store: &dyn Store, deadline: Instant) -> bool {
    let mut token = None::<String>;
    loop {
        let page = store.list(Scope::Folders, token.as_deref(), PAGE, deadline);
        match page.await {
            Ok(page) if page.objects.is_empty() && page.next.is_some() => token = page.next,
            page => return page.is_ok_and(|page| page.objects.is_empty()),
        }
    }
}

/// Returns a random pause between three and five quarters of the given one, so that daemons that lost a store
/// at the same time do not all probe it at the same time.
pub(super) fn jittered(pause: Duration) -> Duration {
    let mut byte = [128];
    // Without random numbers, the pause is as given.
    let _ = getrandom::fill(&mut byte);
    pause * (384 + u32::from(byte[0])) / 512
}
