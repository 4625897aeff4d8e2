//! The clears that this process has carried out, and the names of chunks after these clears.

mod file;

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use lmc_backend::{Clears, StartId, TooManyClears, now};
use lmc_key::{ClearsId, SpaceId};
use parking_lot::{Mutex, RwLock};
use thiserror::Error;

use self::file::StateFile;
pub use self::file::StateFileError;

/// Most names whose spaces are remembered.
const MAX_NAMES: usize = 1 << 18;

/// Reason why a clear was not carried out.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum ClearError {
    /// The map of clears is full.
    #[error(transparent)]
    TooMany(#[from] TooManyClears),
    /// No random id for this process's clears could be drawn.
    #[error("the system has no random numbers: {0}")]
    Random(Arc<getrandom::Error>),
}

/// The clears that this process has carried out or learned of, recorded in a file of a state folder.
///
/// Made before any tier, and passed to the tiers: no tier may serve chunks or ask other processes before the
/// clears are known. A handle: clones share one log.
#[derive(Clone, Default)]
pub struct ClearLog(Arc<Log>);

#[derive(Default)]
struct Log {
    current: RwLock<Current>,
    /// Locked while the map changes, so that changes are written and carried out in one order.
    changing: Mutex<Changing>,
    /// Number of clears made here, and number of clears learned from elsewhere, since the log was opened.
    counted: AtomicU64,
    learned: AtomicU64,
    /// True if clears were carried out that a restart may not find.
    is_volatile: AtomicBool,
    on_learned: OnceLock<Box<dyn Fn() + Send + Sync>>,
    /// The spaces that names stand for, by name.
    names: RwLock<HashMap<SpaceId, Named>>,
}

#[derive(Clone, Default)]
struct Current {
    clears: Arc<Clears>,
    id: ClearsId,
    /// Times of the first and of the last change of the map; the time of the start for clears from before the
    /// start.
    since: Option<(Instant, Instant)>,
}

#[derive(Default)]
struct Changing {
    start: Option<StartId>,
    file: Option<StateFile>,
}

/// The space that a name stands for, and the clears that the name contains.
#[derive(Clone, Copy)]
struct Named {
    space: SpaceId,
    clears: ClearsId,
}

impl ClearLog {
    /// Opens the state file of the daemon `name` in a folder, and creates the folder if it is missing. Reads
    /// also the files of this name in the folders `others`. The file stays locked until the log is dropped.
    ///
    /// # Errors
    /// [`StateFileError`]: the clears are not known, so nothing must be served.
    pub fn open(folder: &Path, name: &str, others: &[PathBuf]) -> Result<Self, StateFileError> {
        let (file, clears) = StateFile::open(folder, name, others)?;
        let this = Self::default();
        this.switch(Arc::new(clears));
        this.0.changing.lock().file = Some(file);
        Ok(this)
    }

    /// Reads the state files of this name in some folders, and writes none: later clears are not noted
    /// anywhere.
    ///
    /// # Errors
    /// [`StateFileError`]: the clears are not known, so nothing must be served.
    pub fn read(name: &str, folders: &[PathBuf]) -> Result<Self, StateFileError> {
        let this = Self::default();
        this.switch(Arc::new(file::read_all(name, folders)?));
        this.0.is_volatile.store(true, Ordering::Relaxed);
        Ok(this)
    }

    /// Returns the clears.
    pub fn clears(&self) -> Arc<Clears> {
        Arc::clone(&self.0.current.read().clears)
    }

    /// Returns the digest of the clears.
    pub fn id(&self) -> ClearsId {
        self.0.current.read().id
    }

    /// Returns false if clears were carried out that are not in the state file. A log without a state file
    /// has nothing to note, and returns true.
    pub fn is_noted(&self) -> bool {
        !self.0.is_volatile.load(Ordering::Relaxed)
    }

    /// Returns the time at which the last clear was carried out here, or the time of the start if the last
    /// clear was before it. `None` before the first clear.
    pub fn last_clear(&self) -> Option<Instant> {
        self.0.current.read().since.map(|(_, last)| last)
    }

    /// Returns the time of the first clear, in the same way as [`Self::last_clear`].
    pub fn first_clear(&self) -> Option<Instant> {
        self.0.current.read().since.map(|(first, _)| first)
    }

    /// Carries out clears that were made elsewhere: when this returns, chunks that were computed before them
    /// are not found any more. `from` names the medium for the log. Returns true if at least one clear was
    /// not known. Blocks until the state file is written; [`Self::is_noted`] returns whether that succeeded.
    ///
    /// # Errors
    /// [`TooManyClears`]; nothing is carried out then.
    pub fn learn(&self, others: &Clears, from: &str) -> Result<bool, TooManyClears> {
        if self.is_noted() && self.clears().contains(others) {
            return Ok(false);
        }
        let changing = self.0.changing.lock();
        let before = self.clears();
        let mut clears = Clears::clone(&before);
        if !clears.join(others)? {
            self.note(&changing, &before);
            return Ok(false);
        }
        let learned = clears.total().saturating_sub(before.total());
        self.carry_out(&changing, Arc::new(clears));
        self.0.learned.fetch_add(learned, Ordering::Relaxed);
        tracing::info!(
            from,
            clears = learned,
            "carried out clears of other daemons"
        );
        if let Some(on_learned) = self.0.on_learned.get() {
            on_learned();
        }
        Ok(true)
    }

    /// Counts a clear of this process. Returns the map with this clear, and whether a restart finds it.
    /// Blocks until the state file is written.
    pub(crate) fn count(&self) -> Result<(Arc<Clears>, bool), ClearError> {
        let mut changing = self.0.changing.lock();
        let start = match changing.start {
            Some(start) => start,
            None => StartId::random().map_err(|error| ClearError::Random(Arc::new(error)))?,
        };
        let mut clears = Clears::clone(&self.clears());
        clears.count(start)?;
        changing.start = Some(start);
        let clears = Arc::new(clears);
        let is_durable = self.carry_out(&changing, Arc::clone(&clears));
        self.0.counted.fetch_add(1, Ordering::Relaxed);
        Ok((clears, is_durable))
    }

    /// Returns the number of clears made here, and of clears learned from elsewhere, since the log was
    /// opened.
    pub(crate) fn totals(&self) -> (u64, u64) {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        (read(&self.0.counted), read(&self.0.learned))
    }

    /// Sets the function to call after clears were learned from elsewhere. Only the first call has an effect.
    pub(crate) fn on_learned(&self, call: impl Fn() + Send + Sync + 'static) {
        // One engine has one log.
        let _ = self.0.on_learned.set(Box::new(call));
    }

    /// Writes the map, and uses it for names from then on. Returns true if a restart finds the map.
    fn carry_out(&self, changing: &Changing, clears: Arc<Clears>) -> bool {
        let is_durable = self.note(changing, &clears);
        self.switch(clears);
        is_durable
    }

    /// Writes the map. Returns true if a restart finds the map.
    fn note(&self, changing: &Changing, clears: &Arc<Clears>) -> bool {
        let Some(file) = &changing.file else {
            return false;
        };
        let is_durable = file.write(clears);
        self.0.is_volatile.store(!is_durable, Ordering::Relaxed);
        is_durable
    }

    fn switch(&self, clears: Arc<Clears>) {
        let id = clears.id();
        let known: HashSet<SpaceId> = self.0.names.read().values().map(|n| n.space).collect();
        let now = (!clears.is_empty()).then(now);
        let first = self.first_clear().or(now);
        *self.0.current.write() = Current {
            clears,
            id,
            since: first.zip(now),
        };
        known.into_iter().for_each(|space| _ = self.name(space, id));
    }

    /// Returns the name of a space's chunks that are computed after these clears, and remembers the name's
    /// space. Called wherever chunks under the name may exist.
    pub(crate) fn name(&self, space: SpaceId, clears: ClearsId) -> SpaceId {
        let name = space.after(clears);
        if !self.0.names.read().contains_key(&name) {
            let mut names = self.0.names.write();
            if names.len() >= MAX_NAMES {
                // Most of the names are probably of spaces without chunks. Chunks under a dropped name count
                // for no space.
                names.clear();
            }
            names.insert(name, Named { space, clears });
        }
        name
    }

    /// Returns the space that a name stands for; the name itself if its space is unknown.
    pub(crate) fn space_of(&self, name: SpaceId) -> SpaceId {
        let names = self.0.names.read();
        names.get(&name).map_or(name, |named| named.space)
    }

    /// Returns the space that a name stands for, as [`Self::space_of`]; `None` if chunks of this name are
    /// known to be from before the last clear.
    pub(crate) fn current_space_of(&self, name: SpaceId) -> Option<SpaceId> {
        let now = self.id();
        let names = self.0.names.read();
        let Some(named) = names.get(&name) else {
            return Some(name);
        };
        (named.clears == now).then_some(named.space)
    }

    /// Returns [`Self::current_space_of`] as a function that neither keeps the log alive nor its file locked.
    pub(crate) fn spaces_of_names(
        &self,
    ) -> impl Fn(SpaceId) -> Option<SpaceId> + Send + Sync + 'static {
        let log = Arc::downgrade(&self.0);
        move |name| match log.upgrade() {
            Some(log) => Self(log).current_space_of(name),
            None => Some(name),
        }
    }

    /// Returns all names that stand for any of these spaces.
    pub(crate) fn names_of(&self, spaces: &HashSet<SpaceId>) -> HashSet<SpaceId> {
        let names = self.0.names.read();
        let of_spaces = names
            .iter()
            .filter(|(_, named)| spaces.contains(&named.space));
        of_spaces
            .map(|(&name, _)| name)
            .chain(spaces.iter().copied())
            .collect()
    }

    /// Drops names from before the last clear, except those in use.
    pub(crate) fn forget_names(&self, in_use: &HashSet<SpaceId>) {
        let mut names = self.0.names.write();
        let now = self.id();
        names.retain(|name, named| named.clears == now || in_use.contains(name));
    }
}

impl fmt::Debug for ClearLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ClearLog").field(&self.clears()).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use lmc_testkit::Folder;

    use super::*;

    fn space(n: u8) -> SpaceId {
        SpaceId::new([n; 16])
    }

    #[test]
    fn a_name_stands_for_its_space_until_it_is_forgotten() {
        let log = ClearLog::default();
        assert_eq!(log.id(), ClearsId::NONE);
        assert_eq!(log.name(space(1), log.id()), space(1));
        assert_eq!(log.current_space_of(space(1)), Some(space(1)));
        log.count().expect("the first clear");
        let first = log.id();
        let old = log.name(space(1), first);
        assert_eq!(log.current_space_of(old), Some(space(1)));
        assert_eq!(log.current_space_of(space(1)), None);
        log.count().expect("the second clear");
        let new = log.name(space(1), log.id());
        assert_eq!(log.clears().starts(), 1);
        assert_eq!(log.current_space_of(new), Some(space(1)));
        assert_eq!(log.current_space_of(old), None);
        assert_eq!((log.space_of(old), log.space_of(new)), (space(1), space(1)));
        let names = log.names_of(&HashSet::from([space(1)]));
        assert_eq!(names, HashSet::from([space(1), old, new]));
        log.forget_names(&HashSet::from([old]));
        assert_eq!(log.space_of(old), space(1));
        log.forget_names(&HashSet::new());
        assert_eq!((log.space_of(old), log.space_of(new)), (old, space(1)));
    }

    #[test]
    fn clears_that_the_state_file_lacks_are_not_noted_until_it_has_them() {
        let folder = Folder::temporary();
        let log = ClearLog::open(&folder, "a", &[]).expect("new");
        let other = ClearLog::default();
        other.count().expect("a clear");
        assert!(log.is_noted() && other.is_noted());
        let in_the_way = folder.join("clears");
        fs::write(&in_the_way, b"a file").expect("written");
        assert_eq!(log.learn(&other.clears(), "a test"), Ok(true));
        assert_eq!((log.id(), log.is_noted()), (other.id(), false));
        assert_eq!(log.learn(&other.clears(), "a test"), Ok(false));
        assert!(!log.is_noted());
        fs::remove_file(&in_the_way).expect("removed");
        assert_eq!(log.learn(&other.clears(), "a test"), Ok(false));
        assert!(log.is_noted());
        drop(log);
        let folders = [folder.to_path_buf()];
        let log = ClearLog::read("a", &folders).expect("readable");
        assert_eq!((log.id(), log.is_noted()), (other.id(), false));
    }

    #[test]
    fn names_are_bounded() {
        let log = ClearLog::default();
        for n in 0..=MAX_NAMES as u128 {
            log.name(SpaceId::new(n.to_le_bytes()), log.id());
        }
        assert_eq!(log.0.names.read().len(), 1);
    }

    #[test]
    fn what_is_learned_is_joined_and_reported_once() {
        let (one, other) = (ClearLog::default(), ClearLog::default());
        let calls = Arc::new(Mutex::new(0));
        let count = Arc::clone(&calls);
        one.on_learned(move || *count.lock() += 1);
        one.count().expect("a clear");
        (0..3).for_each(|_| drop(other.count().expect("a clear")));
        let own = one.clears();
        assert_eq!(one.learn(&other.clears(), "a test"), Ok(true));
        assert_eq!(one.learn(&other.clears(), "a test"), Ok(false));
        assert_eq!(other.learn(&own, "a test"), Ok(true));
        assert_eq!((one.id(), *calls.lock()), (other.id(), 1));
        assert_eq!(one.clears().total(), 4);
    }
}
