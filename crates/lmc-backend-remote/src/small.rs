//! The small objects of a store: the clears, and the descriptions of spaces.

use std::time::Instant;

use lmc_key::SpaceId;

use crate::format::{
    ClearSet, ClearsError, MAX_CLEARS_LEN, MAX_SPACE_LEN, Name, SpaceError, SpaceRecord,
};
use crate::store::{Store, StoreError};

/// Reads the clears; none where there is no object of them.
///
/// # Errors
/// [`StoreError`] of the read, and [`ClearsError`] of what was read.
pub async fn read_clears(
    store: &dyn Store,
    deadline: Instant,
) -> Result<Result<ClearSet, ClearsError>, StoreError> {
    match store.read(Name::Clears, MAX_CLEARS_LEN, deadline).await {
        Ok(None) => Ok(Ok(ClearSet::default())),
        Ok(Some(bytes)) => Ok(ClearSet::decode(&bytes)),
        Err(StoreError::TooLarge { found, .. }) => Ok(Err(ClearsError::Len(found))),
        Err(error) => Err(error),
    }
}

/// Reads the description of a space; `None` where it has none.
///
/// # Errors
/// [`StoreError`] of the read, and [`SpaceError`] of what was read.
pub async fn read_description(
    store: &dyn Store,
    space: SpaceId,
    deadline: Instant,
) -> Result<Option<Result<SpaceRecord, SpaceError>>, StoreError> {
    match store
        .read(Name::Space(space), MAX_SPACE_LEN, deadline)
        .await
    {
        Ok(found) => Ok(found.map(|bytes| SpaceRecord::decode(space, &bytes))),
        // No description is so long.
        Err(StoreError::TooLarge { .. }) => Ok(Some(Err(SpaceError::Damaged))),
        Err(error) => Err(error),
    }
}
