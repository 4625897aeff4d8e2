//! Names of POSIX shared memory.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use thiserror::Error;

/// Longest name accepted, in bytes. The file system allows 255; the difference is for suffixes.
pub(crate) const MAX_NAME: usize = 240;

/// Suffix of the file next to a segment that names the segment's owner.
const OWNER_SUFFIX: &str = ".lmc-owner";

/// A valid name of a POSIX shared-memory segment, such as `lmc_5555`.
///
/// Stored without the leading slash that `shm_open` takes; accepted with or without it. Python clients open
/// the same name with `multiprocessing.shared_memory`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SharedName(String);

/// A name that is not valid for a shared-memory segment.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum NameError {
    /// The name is empty.
    #[error("shared-memory name is empty: use a name such as lmc_5555")]
    Empty,
    /// The name is longer than 240 bytes.
    #[error("a shared-memory name has {found} bytes, at most {MAX_NAME} are accepted")]
    TooLong {
        /// Bytes of the name.
        found: usize,
    },
    /// A character that would lead out of `/dev/shm` or break a log line.
    #[error(
        "shared-memory name {name:?} has a character or form that is not accepted: \
         use ASCII letters, digits, '_', '-' and '.', not starting with '.'"
    )]
    Character {
        /// The given name.
        name: String,
    },
    /// The name is reserved for the file that records a segment's owner.
    #[error("shared-memory name {name:?} is reserved for owner records: use another name")]
    Reserved {
        /// The given name.
        name: String,
    },
}

impl SharedName {
    /// Checks a name; one leading slash is removed.
    ///
    /// # Errors
    /// [`NameError`] for the rule that the name breaks.
    pub fn new(text: &str) -> Result<Self, NameError> {
        let name = text.strip_prefix('/').unwrap_or(text);
        if name.is_empty() {
            return Err(NameError::Empty);
        }
        if name.len() > MAX_NAME {
            return Err(NameError::TooLong { found: name.len() });
        }
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
        if name.starts_with('.') || !name.chars().all(plain) {
            return Err(NameError::Character {
                name: name.to_owned(),
            });
        }
        if name.ends_with(OWNER_SUFFIX) {
            return Err(NameError::Reserved {
                name: name.to_owned(),
            });
        }
        Ok(Self(name.to_owned()))
    }

    /// Returns the name that messages show for a sealed pool; no file has it.
    pub(crate) fn of_sealed() -> Self {
        Self("lmc-pool".to_owned())
    }

    /// Returns the name without a leading slash, as sent to clients.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the path of the segment: `/dev/shm/<name>`.
    pub fn path(&self) -> PathBuf {
        PathBuf::from("/dev/shm").join(&self.0)
    }

    /// Returns the path of the owner record.
    pub(crate) fn owner_path(&self) -> PathBuf {
        PathBuf::from("/dev/shm").join(format!("{}{OWNER_SUFFIX}", self.0))
    }

    /// Returns the name whose owner record has this file name.
    pub(crate) fn of_record(file_name: &str) -> Option<Self> {
        Self::new(file_name.strip_suffix(OWNER_SUFFIX)?).ok()
    }

    /// Returns true for `label` itself, and for `label` with the random suffix of a unique name.
    pub(crate) fn is_named_for(&self, label: &Self) -> bool {
        let hex = |suffix: &str| {
            let digits = suffix.strip_prefix('_').unwrap_or_default();
            digits.len() == 16 && digits.bytes().all(|digit| digit.is_ascii_hexdigit())
        };
        let suffix = self.0.strip_prefix(&label.0);
        suffix.is_some_and(|suffix| suffix.is_empty() || hex(suffix))
    }
}

impl fmt::Display for SharedName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for SharedName {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        Self::new(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_leading_slash_is_dropped() {
        assert_eq!(SharedName::new("/lmc_5555"), SharedName::new("lmc_5555"));
        assert_eq!(SharedName::new("lmc_5555").unwrap().as_str(), "lmc_5555");
    }

    #[test]
    fn names_that_would_leave_dev_shm_are_refused() {
        for name in ["../x", "a/b", "//x", ".", "..", "a\0b", "a b", "a\nb", "é"] {
            assert!(
                matches!(SharedName::new(name), Err(NameError::Character { .. })),
                "{name:?}"
            );
        }
        assert_eq!(SharedName::new("/"), Err(NameError::Empty));
        let long = "x".repeat(241);
        assert_eq!(
            SharedName::new(&long),
            Err(NameError::TooLong { found: 241 })
        );
        assert!(matches!(
            SharedName::new("a.lmc-owner"),
            Err(NameError::Reserved { .. })
        ));
    }
}
