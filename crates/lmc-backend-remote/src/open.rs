//! URLs of stores.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;

use crate::posix::{FileConfig, FileStore};
use crate::store::Store;

/// Settings of a store beside its URL.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct StoreOptions {
    /// Most bytes of all chunks together, for a store that lmc collects. Default: no limit.
    pub max_bytes: Option<u64>,
    /// Age at which a chunk is removed. Default: none.
    pub ttl: Option<Duration>,
}

/// The reason why a URL names no store.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The URL has no scheme, or one that is not known.
    #[error("expected file:///FOLDER")]
    Scheme,
    /// The URL of a folder names a host, or a path that is not absolute.
    #[error("expected an absolute path after file://, such as file:///mnt/shared/lmc")]
    Path,
    /// The store cannot be started.
    #[error("the store cannot be started: {0}")]
    Start(#[from] std::io::Error),
}

/// Checks that a URL names a store.
///
/// # Errors
/// [`OpenError`], without the URL: it may hold a password.
pub fn check_url(url: &str) -> Result<(), OpenError> {
    folder(url).map(drop)
}

/// Makes the store that a URL names. It is reached with the first operation.
///
/// # Errors
/// [`OpenError`].
pub fn open_store(url: &str, options: StoreOptions) -> Result<Arc<dyn Store>, OpenError> {
    let mut config = FileConfig::new(folder(url)?);
    config.max_bytes = options.max_bytes;
    config.ttl = options.ttl;
    Ok(Arc::new(FileStore::new(config)?))
}

fn folder(url: &str) -> Result<PathBuf, OpenError> {
    let path = url.strip_prefix("file://").ok_or(OpenError::Scheme)?;
    let path = PathBuf::from(path);
    path.is_absolute().then_some(path).ok_or(OpenError::Path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_name_stores() {
        check_url("file:///mnt/shared/lmc").unwrap();
        for url in ["", "/mnt/shared", "file:", "ftp://host/x", "file2:///x"] {
            assert!(matches!(check_url(url), Err(OpenError::Scheme)), "{url}");
        }
        for url in ["file://", "file://host/x", "file://x"] {
            assert!(matches!(check_url(url), Err(OpenError::Path)), "{url}");
        }
    }
}
