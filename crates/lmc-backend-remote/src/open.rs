//! URLs of stores.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;

use crate::posix::{FileConfig, FileStore};
#[cfg(feature = "redis")]
use crate::redis::{RedisConfig, RedisStore, RedisUrl};
#[cfg(feature = "s3")]
use crate::s3::{S3Config, S3Store, S3Url};
use crate::store::Store;

/// Settings of a store, in addition to its URL.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct StoreOptions {
    /// Most bytes of all chunks together, for a store whose chunks lmc collects. Default: no limit.
    pub max_bytes: Option<u64>,
    /// Age at which a chunk is removed. Default: none.
    pub ttl: Option<Duration>,
}

/// Reason why a URL does not name a store.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The URL has no scheme, or an unknown one.
    #[error("expected file:///FOLDER, redis://HOST or s3://BUCKET/PREFIX")]
    Scheme,
    /// The URL of a folder has a host, or a path that is not absolute.
    #[error("expected an absolute path after file://, such as file:///mnt/shared/lmc")]
    Path,
    /// The URL, or a setting from the environment, is invalid for this kind of store; or this build does not
    /// support the kind.
    #[error("{0}")]
    Store(String),
    /// The store limits its size itself.
    #[error("{0}; do not set a size here")]
    Size(&'static str),
    /// The store cannot be started.
    #[error("the store cannot be started: {0}")]
    Start(#[source] Arc<std::io::Error>),
}

impl From<std::io::Error> for OpenError {
    fn from(error: std::io::Error) -> Self {
        Self::Start(Arc::new(error))
    }
}

/// Checks that a URL names a store, and returns the URL without its login.
///
/// # Errors
/// [`OpenError`], without the URL: it may hold a password.
pub fn check_url(url: &str) -> Result<String, OpenError> {
    Ok(match location(url)? {
        Location::Folder(_) => url.to_owned(),
        #[cfg(feature = "redis")]
        Location::Redis(url) => url.to_string(),
        #[cfg(feature = "s3")]
        Location::S3(url) => url.to_string(),
    })
}

/// A store that was opened from a URL, by its kind.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Opened {
    /// A folder of a shared file system.
    File(Arc<FileStore>),
    /// Redis.
    #[cfg(feature = "redis")]
    Redis(Arc<RedisStore>),
    /// A bucket.
    #[cfg(feature = "s3")]
    S3(Arc<S3Store>),
}

impl Opened {
    /// Returns the store, whatever its kind is.
    pub fn store(&self) -> Arc<dyn Store> {
        match self {
            Self::File(store) => Arc::clone(store) as Arc<dyn Store>,
            #[cfg(feature = "redis")]
            Self::Redis(store) => Arc::clone(store) as Arc<dyn Store>,
            #[cfg(feature = "s3")]
            Self::S3(store) => Arc::clone(store) as Arc<dyn Store>,
        }
    }
}

/// Makes the store of a URL. The store connects at the first operation.
///
/// # Errors
/// [`OpenError`].
pub fn open_store(url: &str, options: StoreOptions) -> Result<Opened, OpenError> {
    match location(url)? {
        Location::Folder(folder) => {
            let mut config = FileConfig::new(folder);
            config.max_bytes = options.max_bytes;
            config.ttl = options.ttl;
            Ok(Opened::File(Arc::new(config.open()?)))
        }
        #[cfg(feature = "redis")]
        Location::Redis(_) if options.max_bytes.is_some() => Err(OpenError::Size(
            "a Redis bounds its size by itself: set maxmemory and maxmemory-policy there",
        )),
        #[cfg(feature = "redis")]
        Location::Redis(url) => {
            let mut config = RedisConfig::new(url);
            config.ttl = options.ttl;
            let store = config.open().map_err(of_store)?;
            Ok(Opened::Redis(Arc::new(store)))
        }
        #[cfg(feature = "s3")]
        Location::S3(_) if options.max_bytes.is_some() => Err(OpenError::Size(
            "a bucket has no size: set a lifecycle rule there that removes old objects",
        )),
        #[cfg(feature = "s3")]
        Location::S3(url) => {
            // `vars` panics if any variable of the process is not UTF-8.
            let variables = std::env::vars_os().filter_map(|(name, value)| {
                Some((name.into_string().ok()?, value.into_string().ok()?))
            });
            let mut config = S3Config::new(url, variables).map_err(of_store)?;
            config.ttl = options.ttl;
            let store = config.open().map_err(of_store)?;
            Ok(Opened::S3(Arc::new(store)))
        }
    }
}

fn of_store(error: impl fmt::Display) -> OpenError {
    OpenError::Store(error.to_string())
}

enum Location {
    Folder(PathBuf),
    #[cfg(feature = "redis")]
    Redis(RedisUrl),
    #[cfg(feature = "s3")]
    S3(S3Url),
}

fn location(url: &str) -> Result<Location, OpenError> {
    let (scheme, path) = url.split_once("://").ok_or(OpenError::Scheme)?;
    match scheme {
        "file" => {
            let path = PathBuf::from(path);
            let path = path.is_absolute().then_some(path).ok_or(OpenError::Path);
            path.map(Location::Folder)
        }
        #[cfg(feature = "redis")]
        scheme if scheme.starts_with("redis") => url.parse().map(Location::Redis).map_err(of_store),
        #[cfg(feature = "s3")]
        "s3" => url.parse().map(Location::S3).map_err(of_store),
        scheme if scheme == "s3" || scheme.starts_with("redis") => Err(of_store(
            "this build does not support this kind of store: build with the feature of its name",
        )),
        _ => Err(OpenError::Scheme),
    }
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
        assert!(
            matches!(check_url("redis://:secret@"), Err(OpenError::Store(text)) if !text.contains("secret"))
        );
    }

    #[cfg(feature = "redis")]
    #[test]
    fn a_redis_takes_no_size() {
        let shown = check_url("rediss://user:secret@cache:6380/1").unwrap();
        assert_eq!(shown, "rediss://cache:6380/1");
        let options = StoreOptions {
            max_bytes: Some(1),
            ttl: None,
        };
        let opened = open_store("redis://cache", options);
        assert!(matches!(opened, Err(OpenError::Size(_))));
    }
}
