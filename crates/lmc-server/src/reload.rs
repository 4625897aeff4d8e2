//! Settings that change while the server runs: SIGHUP and `lmc reload` read them again.

use std::fmt;
use std::sync::Arc;

use anyhow::Result;
use lmc_key::Salt;
use lmc_vllm_adapter::Service;
use parking_lot::{Mutex, RwLock};
use tracing::{info, warn};

use crate::config::{ConfigError, Loaded};
use crate::http::access::{Access, LiveAccess};
use crate::log;
use crate::quotas::{self, KeptQuotas, Quotas};
use crate::salts::SaltDigests;
use crate::state;

/// Settings that take effect when they are read again. All others need a restart.
const LIVE: [&str; 5] = [
    LOG_LEVEL,
    REQUEST_LOG,
    "quota",
    QUOTA_FILE,
    "http-allowed-host",
];
const LOG_LEVEL: &str = "log-level";
const REQUEST_LOG: &str = "request-log";
const QUOTA_FILE: &str = "quota-file";
/// Name for all tables of the file, used if no single setting can be named.
const TIERS: &str = "[[tier]]";
/// Prefixes of the names of settings that tables have, too.
const TIER_SETTINGS: [&str; 3] = ["disk", "p2p", "remote"];

/// The settings in effect, and the way to read them again.
pub struct Reload {
    read: Box<dyn Fn() -> Result<Loaded, ConfigError> + Send + Sync>,
    service: Service,
    digests: SaltDigests,
    loaded: RwLock<Arc<Loaded>>,
    access: LiveAccess,
    /// The quotas of the settings in effect, and the quotas that were set over HTTP. Locked while settings
    /// are read, so that changes follow each other.
    quotas: Mutex<(Quotas, KeptQuotas)>,
}

/// Names of the settings that differ from the settings in effect.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct SettingChanges {
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
    /// Sets the quotas of `loaded`, with which the service runs. `read` reads the settings again.
    ///
    /// # Errors
    /// An error of a file of quotas, of the token or of TLS.
    pub fn new(
        loaded: Loaded,
        read: impl Fn() -> Result<Loaded, ConfigError> + Send + Sync + 'static,
        service: Service,
        digests: SaltDigests,
    ) -> Result<Self> {
        let quotas = quotas::of(&loaded.config)?;
        let access = LiveAccess::new(Access::read(&loaded.config)?);
        quotas::set(&quotas, &Quotas::new(), &service, &digests);
        let kept = KeptQuotas::open(state::quotas_file(&loaded.config), &quotas, &service);
        Ok(Self {
            access,
            read: Box::new(read),
            service,
            digests,
            loaded: RwLock::new(Arc::new(loaded)),
            quotas: Mutex::new((quotas, kept)),
        })
    }

    /// Returns the settings in effect.
    pub(crate) fn loaded(&self) -> Arc<Loaded> {
        Arc::clone(&self.loaded.read())
    }

    /// Returns the rules for access to the HTTP side.
    pub(crate) fn access(&self) -> &LiveAccess {
        &self.access
    }

    pub(crate) fn digests(&self) -> &SaltDigests {
        &self.digests
    }

    /// Sets or removes a quota. Returns true if it lasts over a restart. May block, as [`Self::now`].
    pub(crate) fn set_quota(&self, salt: &Salt, bytes: Option<u64>) -> bool {
        let (configured, kept) = &mut *self.quotas.lock();
        (self.service.engine()).set_quota(self.service.tenant(salt), bytes);
        kept.note(salt, bytes, configured)
    }

    /// Reads the settings again. May block on files, and on the evictions of a new quota.
    ///
    /// # Errors
    /// An error of the settings or of a file that they name. No setting has then changed.
    pub(crate) fn now(&self) -> Result<SettingChanges> {
        let (quotas_before, kept) = &mut *self.quotas.lock();
        let mut loaded = Loaded::clone(&self.loaded());
        let read = (self.read)()?;
        let quotas = quotas::of(&read.config)?;
        loaded.config.http_allowed_hosts = read.config.http_allowed_hosts;
        // Of the settings in effect: other file names need a restart.
        let access = Access::read(&loaded.config)?;
        for warning in &read.warnings {
            warn!("{warning}");
        }
        let mut changes = SettingChanges::default();
        for new in read.entries {
            let mut entries = loaded.entries.iter_mut();
            let Some(old) = entries.find(|old| old.info.name == new.info.name) else {
                continue;
            };
            match LIVE.contains(&new.info.name) {
                _ if old.raw == new.raw => {}
                true => {
                    changes.changed.push(new.info.name);
                    *old = new;
                }
                false => changes.restart.push(new.info.name),
            }
        }
        let config = &mut loaded.config;
        let has_tier = |name: &&str| TIER_SETTINGS.iter().any(|of| name.starts_with(of));
        if config.tiers != read.config.tiers && !changes.restart.iter().any(has_tier) {
            changes.restart.push(TIERS);
        }
        config.log_level = read.config.log_level;
        config.request_log = read.config.request_log;
        config.quotas = read.config.quotas;
        config.quota_file = read.config.quota_file;
        log::set_level(&config.log_level);
        self.access.set(access);
        self.service.set_request_log(config.request_log);
        let has_quota = changes.changed.iter().any(|name| name.starts_with("quota"));
        if quotas != *quotas_before && !has_quota {
            changes.changed.push(QUOTA_FILE);
        }
        *self.loaded.write() = Arc::new(loaded);
        quotas::set(&quotas, quotas_before, &self.service, &self.digests);
        kept.follow(&quotas);
        *quotas_before = quotas;
        info!("settings read again: {changes}");
        Ok(changes)
    }
}

impl fmt::Display for SettingChanges {
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
