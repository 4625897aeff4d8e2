//! Quotas: from the configuration (`--quota` and the file of `--quota-file`), and from operators over HTTP.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, anyhow};
use lmc_key::Salt;
use lmc_transfer::read_secret;
use lmc_vllm_adapter::Service;
use serde::{Deserialize, Serialize};
use tracing::warn;

use crate::config::{Raw, ServeConfig, human_bytes, parse_quotas};
use crate::salts::SaltDigests;
use crate::state::write_private;

/// Bytes of each tenant that has a quota.
pub(crate) type Quotas = BTreeMap<Salt, u64>;

/// The quotas that were set or removed over HTTP, in a file that only this user may read.
#[derive(Debug)]
pub(crate) struct KeptQuotas {
    path: Option<PathBuf>,
    kept: BTreeMap<Salt, KeptQuota>,
}

/// A quota that was set or removed over HTTP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct KeptQuota {
    /// `None` if the quota was removed.
    bytes: Option<u64>,
    /// The quota of the configuration at that time. If the configuration changes it, the new one counts.
    configured: Option<u64>,
}

impl KeptQuotas {
    /// Reads the file, and sets the quotas that the configuration has not changed since. A file that cannot
    /// be read is left unchanged, and no quotas are kept.
    pub(crate) fn open(path: Option<PathBuf>, configured: &Quotas, service: &Service) -> Self {
        let Some(path) = path else {
            return Self {
                path: None,
                kept: BTreeMap::new(),
            };
        };
        let read = match path.exists() {
            true => read_kept(&path),
            false => Ok(BTreeMap::new()),
        };
        let (path, kept) = match read {
            Ok(kept) => (Some(path), kept),
            Err(error) => {
                warn!(
                    "quotas that were set over HTTP cannot be read, and new ones are not kept over a restart: {error:#}"
                );
                (None, BTreeMap::new())
            }
        };
        let mut this = Self { path, kept };
        this.follow(configured);
        for (salt, kept) in &this.kept {
            (service.engine()).set_quota(service.tenant(salt), kept.bytes);
        }
        this
    }

    /// Records a quota that was set or removed. Returns true if it lasts over a restart.
    pub(crate) fn note(&mut self, salt: &Salt, bytes: Option<u64>, configured: &Quotas) -> bool {
        let configured = configured.get(salt).copied();
        match bytes == configured {
            true => drop(self.kept.remove(salt)),
            false => drop(
                self.kept
                    .insert(salt.clone(), KeptQuota { bytes, configured }),
            ),
        }
        self.write()
    }

    /// Drops the kept quotas for which the configuration has another quota by now. A quota that the
    /// configuration no longer has stays as it was set over HTTP.
    pub(crate) fn follow(&mut self, configured: &Quotas) {
        let before = self.kept.clone();
        self.kept.retain(|salt, kept| match configured.get(salt) {
            Some(bytes) => kept.configured == Some(*bytes),
            None => {
                kept.configured = None;
                kept.bytes.is_some()
            }
        });
        if self.kept != before {
            self.write();
        }
    }

    fn write(&self) -> bool {
        let Some(path) = &self.path else {
            return false;
        };
        let kept: BTreeMap<&str, &KeptQuota> = self
            .kept
            .iter()
            .map(|(salt, kept)| (salt.as_str(), kept))
            .collect();
        let written = serde_json::to_string(&kept).map_err(io::Error::other);
        let written = written.and_then(|text| write_private(path, &text));
        if let Err(error) = &written {
            warn!(%error, path = %path.display(), "a quota that was set over HTTP cannot be written to its file, and is lost at the next restart");
        }
        written.is_ok()
    }
}

fn read_kept(path: &Path) -> Result<BTreeMap<Salt, KeptQuota>> {
    let text = read_secret(path)?;
    let kept: BTreeMap<String, KeptQuota> =
        serde_json::from_str(&text).with_context(|| format!("{}", path.display()))?;
    let salted = |(salt, kept): (String, KeptQuota)| Ok((salt.parse()?, kept));
    kept.into_iter().map(salted).collect()
}

/// Returns the quotas of the configuration. `--quota` wins over the file.
pub(crate) fn of(config: &ServeConfig) -> Result<Quotas> {
    let mut quotas = of_file(config)?;
    quotas.extend(config.quotas.iter().cloned());
    Ok(quotas)
}

/// Sets the quotas that differ from `before`, and removes the quotas that only `before` has. Quotas that
/// operators have set over HTTP stay.
pub(crate) fn set(quotas: &Quotas, before: &Quotas, service: &Service, digests: &SaltDigests) {
    let engine = service.engine();
    let pool = engine.pool_bytes();
    for (salt, bytes) in before {
        let tenant = service.tenant(salt);
        let is_set = engine.tenant(tenant).quota == Some(*bytes);
        if is_set && !quotas.contains_key(salt) {
            engine.set_quota(tenant, None);
        }
    }
    let changed = quotas
        .iter()
        .filter(|(salt, bytes)| before.get(*salt) != Some(*bytes));
    for (salt, bytes) in changed {
        if *bytes > pool {
            warn!(
                "quota of {}: {} is more than the pool of {}, so the quota has no effect; set a \
                 smaller quota or a larger --l1-size-gb",
                digests.of(salt),
                human_bytes(*bytes),
                human_bytes(pool)
            );
        }
        engine.set_quota(service.tenant(salt), Some(*bytes));
    }
}

/// Reads the file: one quota on each line.
fn of_file(config: &ServeConfig) -> Result<Quotas> {
    let Some(path) = &config.quota_file else {
        return Ok(Quotas::new());
    };
    let text = read_secret(path).map_err(|error| anyhow!("--quota-file: {error}"))?;
    let mut quotas = Quotas::new();
    for (index, line) in text.lines().enumerate() {
        if line.trim_start().starts_with('#') {
            continue;
        }
        let found = parse_quotas(&Raw::Text(line.to_owned())).map_err(|error| {
            let (path, number) = (path.display(), index + 1);
            anyhow!("--quota-file: {path}: line {number}: {error}")
        })?;
        quotas.extend(found);
    }
    Ok(quotas)
}
