//! The quotas of the configuration, from `--quota` and from the file of `--quota-file`.

use anyhow::{Result, anyhow};
use lmc_key::Salt;
use lmc_transfer::read_secret;
use lmc_vllm_adapter::Service;
use tracing::warn;

use crate::config::{Raw, ServeConfig, human_bytes, parse_quotas};
use crate::salts::SaltDigests;

/// Sets the quotas of the configuration. Those of `--quota` win over those of the file.
pub(crate) fn set(config: &ServeConfig, service: &Service, digests: &SaltDigests) -> Result<()> {
    let engine = service.engine();
    let pool = engine.pool_bytes();
    for (salt, bytes) in of_file(config)?.iter().chain(&config.quotas) {
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
    Ok(())
}

/// Reads the file: one quota on each line.
fn of_file(config: &ServeConfig) -> Result<Vec<(Salt, u64)>> {
    let Some(path) = &config.quota_file else {
        return Ok(Vec::new());
    };
    let text = read_secret(path).map_err(|error| anyhow!("--quota-file: {error}"))?;
    let mut quotas = Vec::new();
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
