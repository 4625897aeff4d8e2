//! The tier of a shared store as the configuration asks for it.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use lmc_backend::Backend;
use lmc_backend_remote::format::SpaceRecord;
use lmc_backend_remote::{RemoteConfig, RemoteTier, StoreOptions, open_store};
use lmc_engine::{LowerTier, SpaceFilter, TenantId, TierPolicy};
use lmc_key::KeySpace;
use lmc_transfer::Keys;
use lmc_vllm_adapter::{Service, WeakService};
use tokio::runtime::Handle;
use tracing::info;

use crate::config::ServeConfig;

/// Time that the store has to answer before the server goes on without it.
const START: Duration = Duration::from_millis(500);

/// The tenants whose chunks are written to the store. The service, which knows them, is made after
/// the tier.
#[derive(Debug, Default)]
pub(crate) struct Salts(Arc<OnceLock<(WeakService, HashSet<TenantId>)>>);

impl Salts {
    fn filter(&self) -> SpaceFilter {
        let known = Arc::clone(&self.0);
        SpaceFilter::new(move |space| {
            let known = known.get();
            known.is_some_and(|(service, tenants)| {
                let service = service.upgrade();
                service.is_some_and(|service| tenants.contains(&service.tenant_of(space)))
            })
        })
    }

    /// Picks the tenants of these salts.
    pub(crate) fn pick(&self, service: &Service, tenants: HashSet<TenantId>) {
        // It is called once.
        let _ = self.0.set((service.downgrade(), tenants));
    }
}

/// The tier with its policy, and the key of the digests of salts.
pub(crate) struct Remote {
    tier: Arc<RemoteTier>,
    policy: TierPolicy,
    keys: Option<Keys>,
}

impl Remote {
    /// Returns the tier for the engine.
    pub(crate) fn lower_tier(&self) -> LowerTier {
        LowerTier::new(
            Arc::clone(&self.tier) as Arc<dyn Backend>,
            self.policy.clone(),
        )
    }

    /// Describes the spaces of this service's engines in the store from now on.
    pub(crate) fn describe(self, service: &Service) {
        let (service, keys) = (service.downgrade(), self.keys);
        let describe = move |space: &KeySpace| {
            let digest = |keys: &Keys| keys.digest(space.salt.as_str().as_bytes());
            SpaceRecord::new(space, keys.as_ref().map(digest))
        };
        self.tier.describe_spaces(move |space| {
            let fields = service.upgrade()?.describe_space(space)?;
            Some(describe(&fields))
        });
    }
}

/// Reads the key of the digests: that of the store, or else that of the peers.
fn keys(config: &ServeConfig) -> Result<Option<Keys>> {
    let own = config
        .remote_key
        .as_ref()
        .map(|path| ("--remote-key", path));
    let shared = config.p2p_key.as_ref().map(|path| ("--p2p-key", path));
    let read = |(flag, path): (&str, &PathBuf)| {
        Keys::read(path).map_err(|error| anyhow!("{flag}: {error}"))
    };
    own.or(shared).map(read).transpose()
}

/// Starts the tier, if the configuration has one. Blocks for a moment. A server starts without its
/// store, which is reached in the background.
pub(crate) fn open(config: &ServeConfig, salts: &Salts) -> Result<Option<Remote>> {
    let Some(url) = &config.remote else {
        return Ok(None);
    };
    let keys = keys(config)?;
    let mut options = StoreOptions::default();
    options.max_bytes = config.remote_size;
    options.ttl = config.remote_ttl;
    let store = open_store(url.with_secrets(), options);
    let store = store.map_err(|error| anyhow!("--remote {url}: {error}"))?;
    let mut tier = RemoteConfig::default();
    tier.absent_ttl = config.remote_negative_ttl;
    tier.timeout = config.remote_timeout;
    let runtime = Handle::current();
    let tier = RemoteTier::start(tier, store, runtime.clone());
    // Most stores answer at once: then the engine knows from the start what was cleared.
    runtime.block_on(tier.ready(Instant::now() + START));
    let mut policy = TierPolicy::default();
    policy.write = config.remote_write;
    policy.admit = config.remote_admit;
    if config.remote_salts.is_some() {
        policy.spaces = salts.filter();
    }
    policy.locate_timeout = config.remote_locate_timeout;
    policy.read_timeout = Some(config.remote_timeout);
    info!("remote: {url}");
    let tier = Arc::new(tier);
    Ok(Some(Remote { tier, policy, keys }))
}
