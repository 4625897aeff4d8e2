//! The small objects of a store: the maps of clears, and the descriptions of spaces.

use std::collections::HashMap;
use std::time::Instant;

use lmc_backend::Clears;
use lmc_key::SpaceId;

use crate::format::{
    ChunkFolder, ClearsError, ClearsRecord, MAX_CLEARS_LEN, MAX_SPACE_LEN, Name, SpaceError,
    SpaceRecord, Standing,
};
use crate::store::{Store, StoreError};

/// Reads all clears and the generation; `None` if there is no object of clears.
///
/// # Errors
/// [`StoreError`] for the read, and [`ClearsError`] for its result.
pub async fn read_clears(
    store: &dyn Store,
    deadline: Instant,
) -> Result<Result<Option<ClearsRecord>, ClearsError>, StoreError> {
    match store.read_clears(MAX_CLEARS_LEN, deadline).await {
        Ok(None) => Ok(Ok(None)),
        Ok(Some((bytes, _))) => Ok(ClearsRecord::decode(&bytes).map(Some)),
        Err(StoreError::TooLarge { found, .. }) => Ok(Err(ClearsError::Len(found))),
        Err(error) => Err(error),
    }
}

/// Reads the map of a folder; `None` if the folder has no readable map.
///
/// # Errors
/// [`StoreError`].
pub async fn read_map(
    store: &dyn Store,
    folder: ChunkFolder,
    deadline: Instant,
) -> Result<Option<Clears>, StoreError> {
    let read = store.read(Name::Map(folder), MAX_CLEARS_LEN, deadline);
    match read.await {
        Ok(bytes) => Ok(bytes.and_then(|bytes| ClearsRecord::decode_map(folder, &bytes))),
        Err(StoreError::TooLarge { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Reads the description of a space of a folder, by its name in keys; `None` if there is none.
///
/// # Errors
/// [`StoreError`] for the read, and [`SpaceError`] for its result.
pub async fn read_description(
    store: &dyn Store,
    folder: ChunkFolder,
    space: SpaceId,
    deadline: Instant,
) -> Result<Option<Result<SpaceRecord, SpaceError>>, StoreError> {
    let read = store.read(Name::Space(folder, space), MAX_SPACE_LEN, deadline);
    match read.await {
        Ok(found) => Ok(found.map(|bytes| SpaceRecord::decode(space, folder.clears, &bytes))),
        // No valid description is that long.
        Err(StoreError::TooLarge { .. }) => Ok(Some(Err(SpaceError::Damaged))),
        Err(error) => Err(error),
    }
}

/// Finds the folders whose chunks no daemon looks for any more.
///
/// Make a new value for each page of a listing, after reading the page: a listed generation was in
/// `v2/clears` before its first chunk, so if it is not there now, it was replaced.
#[derive(Debug)]
pub struct StaleFolders {
    all: ClearsRecord,
    judged: HashMap<ChunkFolder, Standing>,
}

impl StaleFolders {
    /// Reads the deciding clears; `None` if they are absent or cannot be read: then no folder is known to be
    /// stale.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn read(store: &dyn Store, deadline: Instant) -> Result<Option<Self>, StoreError> {
        let all = read_clears(store, deadline).await?.ok().flatten();
        Ok(all.map(|all| Self {
            all,
            judged: HashMap::new(),
        }))
    }

    /// Returns true if a folder is known to be stale.
    ///
    /// # Errors
    /// [`StoreError`] when reading the folder's map.
    pub async fn contains(
        &mut self,
        store: &dyn Store,
        folder: ChunkFolder,
        deadline: Instant,
    ) -> Result<bool, StoreError> {
        let standing = self.standing(store, folder, deadline).await?;
        Ok(standing == Standing::Stale)
    }

    /// Returns the status of a folder.
    ///
    /// # Errors
    /// [`StoreError`] when reading the folder's map.
    pub async fn standing(
        &mut self,
        store: &dyn Store,
        folder: ChunkFolder,
        deadline: Instant,
    ) -> Result<Standing, StoreError> {
        if let Some(&standing) = self.judged.get(&folder) {
            return Ok(standing);
        }
        let standing = match self.all.standing(folder, None) {
            Standing::Unknown => {
                let map = read_map(store, folder, deadline).await?;
                self.all.standing(folder, map.as_ref())
            }
            known => known,
        };
        self.judged.insert(folder, standing);
        Ok(standing)
    }
}
