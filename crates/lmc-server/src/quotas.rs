//! The quotas of the configuration, from `--quota` and from the file of `--quota-file`.

use std::collections::BTreeMap;

use anyhow::{Result, anyhow};
use lmc_key::Salt;
use lmc_transfer::read_secret;
use lmc_vllm_adapter::Service;
use tracing::warn;

use crate::config::{Raw, ServeConfig, human_bytes, parse_quotas};
use crate::salts::SaltDigests;

/// Bytes of each tenant that has a quota.
pub(crate) type Quotas = BTreeMap<Salt, u64>;

/// Returns the quotas of the configuration. Those of `--quota` win over those of the file.
pub(crate) fn of(config: &ServeConfig) -> Result<Quotas> {
    let mut quotas = of_file(config)?;
    quotas.extend(config.quotas.iter().cloned());
    Ok(quotas)
}

/// Sets the quotas that differ from those of `before`, and removes those that are gone. Other quotas, which
/// operators have set over HTTP, stay.
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
                "quota of {}: {} are more than the pool of {}, so it limits nothing; set a \
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
