//! Settings that change while the server runs: they are read again by SIGHUP and `lmc reload`.

use std::fmt;

use anyhow::Result;
use lmc_vllm_adapter::Service;
use parking_lot::Mutex;
use tracing::{info, warn};

use crate::config::{ConfigError, Loaded};
use crate::log;
use crate::quotas::{self, Quotas};
use crate::salts::SaltDigests;

/// Settings that take effect when they are read again. All others need a restart.
const LIVE: [&str; 4] = [LOG_LEVEL, REQUEST_LOG, "quota", QUOTA_FILE];
const LOG_LEVEL: &str = "log-level";
const REQUEST_LOG: &str = "request-log";
const QUOTA_FILE: &str = "quota-file";
/// Stands for the tables of the file, of which no single setting is named.
const TIERS: &str = "[[tier]]";

/// The settings in effect, and the way to read them again.
pub struct Reload {
    read: Box<dyn Fn() -> Result<Loaded, ConfigError> + Send + Sync>,
    service: Service,
    digests: SaltDigests,
    /// Held while settings are read, so that one reload follows the other.
    current: Mutex<Current>,
}

struct Current {
    loaded: Loaded,
    quotas: Quotas,
}

/// Settings that differ from those in effect, by name.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Outcome {
    /// In effect now.
    pub(crate) changed: Vec<&'static str>,
    /// In effect after a restart.
    pub(crate) restart: Vec<&'static str>,
}

impl fmt::Debug for Reload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reload").finish_non_exhaustive()
    }
}

impl Reload {
    /// Makes the way to read settings again, for a service that runs with `loaded` and whose quotas are
    /// set.
    ///
    /// # Errors
    /// An error of the file of quotas.
    pub fn new(
        loaded: Loaded,
        read: impl Fn() -> Result<Loaded, ConfigError> + Send + Sync + 'static,
        service: Service,
        digests: SaltDigests,
    ) -> Result<Self> {
        let quotas = quotas::of(&loaded.config)?;
        quotas::set(&quotas, &Quotas::new(), &service, &digests);
        Ok(Self {
            read: Box::new(read),
            service,
            digests,
            current: Mutex::new(Current { loaded, quotas }),
        })
    }

    /// Returns the settings in effect.
    pub(crate) fn loaded(&self) -> Loaded {
        self.current.lock().loaded.clone()
    }

    pub(crate) fn digests(&self) -> &SaltDigests {
        &self.digests
    }

    /// Reads the settings again. May block: on files, and on the evictions of a new quota.
    ///
    /// # Errors
    /// An error of the settings or the file of quotas; then nothing has changed.
    pub(crate) fn now(&self) -> Result<Outcome> {
        let mut current = self.current.lock();
        let read = (self.read)()?;
        let quotas = quotas::of(&read.config)?;
        for warning in &read.warnings {
            warn!("{warning}");
        }
        let mut outcome = Outcome::default();
        for new in read.entries {
            let mut entries = current.loaded.entries.iter_mut();
            let Some(old) = entries.find(|old| old.info.name == new.info.name) else {
                continue;
            };
            match LIVE.contains(&new.info.name) {
                _ if old.raw == new.raw => {}
                true => {
                    outcome.changed.push(new.info.name);
                    *old = new;
                }
                false => outcome.restart.push(new.info.name),
            }
        }
        let config = &mut current.loaded.config;
        if outcome.restart.is_empty() && config.tiers != read.config.tiers {
            outcome.restart.push(TIERS);
        }
        config.log_level = read.config.log_level;
        config.request_log = read.config.request_log;
        config.quotas = read.config.quotas;
        config.quota_file = read.config.quota_file;
        log::set_level(&config.log_level);
        self.service.set_request_log(config.request_log);
        if quotas != current.quotas && !outcome.changed.iter().any(|name| name.starts_with("quota"))
        {
            outcome.changed.push(QUOTA_FILE);
        }
        quotas::set(&quotas, &current.quotas, &self.service, &self.digests);
        current.quotas = quotas;
        info!("settings read again: {outcome}");
        Ok(outcome)
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.changed.is_empty() {
            true => f.write_str("nothing changed")?,
            false => write!(f, "changed {}", self.changed.join(", "))?,
        }
        match self.restart.is_empty() {
            true => Ok(()),
            false => write!(f, "; a restart is needed for {}", self.restart.join(", ")),
        }
    }
}
