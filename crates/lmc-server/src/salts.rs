//! Salts of tenants, as operators write them and as output shows them.
//!
//! A salt names the chunks of its tenant. Trusted users see salts in clear; other users and the log see
//! digests.

use std::fmt;

use anyhow::{Context, Result};
use lmc_key::{NameError, Salt};
use lmc_transfer::{Key, Keys};

/// Name of traffic without a salt in LMCache's tools.
pub(crate) const DEFAULT_SALT: &str = "_default";

/// Returns the salt that an operator's text names.
pub(crate) fn parse(text: &str) -> Result<Salt, NameError> {
    match text {
        DEFAULT_SALT => Ok(Salt::default()),
        text => text.parse(),
    }
}

/// Returns the text that names a salt, in clear.
pub(crate) fn in_clear(salt: &Salt) -> &str {
    match salt.is_empty() {
        true => DEFAULT_SALT,
        false => salt.as_str(),
    }
}

/// The key under which this server shows digests of salts.
#[derive(Debug, Clone)]
pub struct SaltDigests(Keys);

impl SaltDigests {
    /// Takes the key of the store or the peers ([`crate::remote::keys`]), so that the digests are the same
    /// as in `lmc remote du` and `lmc peers`. Without a key, makes a random key for this start.
    ///
    /// # Errors
    /// The system has no random bytes.
    pub(crate) fn new(keys: Option<Keys>) -> Result<Self> {
        let keys = match keys {
            Some(keys) => keys,
            None => Key::random().context("no random bytes")?.into(),
        };
        Ok(Self(keys))
    }

    /// Returns the text that names a salt without showing it.
    pub(crate) fn of(&self, salt: &Salt) -> impl fmt::Display + use<> {
        match salt.is_empty() {
            true => DEFAULT_SALT.to_owned(),
            false => format!("digest {}", self.digits(salt)),
        }
    }

    /// Returns the first 12 digits of a salt's digest, for labels.
    pub(crate) fn short(&self, salt: &Salt) -> String {
        match salt.is_empty() {
            true => DEFAULT_SALT.to_owned(),
            false => self.digits(salt)[..12].to_owned(),
        }
    }

    fn digits(&self, salt: &Salt) -> String {
        let digest = self.0.digest(salt.as_str().as_bytes());
        format!("{:032x}", u128::from_be_bytes(digest))
    }
}
