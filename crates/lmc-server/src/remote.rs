//! Opens the tiers of shared stores of the configuration.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use lmc_backend::Backend;
use lmc_backend_remote::{RemoteConfig, RemoteTier, SaltDigest, StoreOptions, open_store};
use lmc_engine::{EngineHost, LowerTier, TenantId, TierPolicy};
use lmc_transfer::Keys;
use lmc_vllm_adapter::Service;
use tokio::runtime::Handle;
use tracing::info;

use crate::config::{RemoteSettings, ServeConfig};
use crate::late_filter::LateFilter;

/// Time that the stores have to answer before the server starts without them.
const START: Duration = Duration::from_millis(500);

/// The tier of a store, with its policy, and the spaces whose chunks it takes.
pub(crate) struct Remote {
    tier: Arc<RemoteTier>,
    policy: TierPolicy,
    spaces: LateFilter,
}

impl Remote {
    /// Returns the tier for the engine.
    pub(crate) fn lower_tier(&self) -> LowerTier {
        LowerTier::new(
            Arc::clone(&self.tier) as Arc<dyn Backend>,
            self.policy.clone(),
        )
    }

    /// Returns the tier for the operator.
    pub(crate) fn tier(&self) -> Arc<RemoteTier> {
        Arc::clone(&self.tier)
    }

    /// Serves this service from now on. Takes the whole chunks that can be found again later, only
    /// those of `tenants` if given. Tails are not stored: each of their blocks would be a separate
    /// object.
    pub(crate) fn serve(self, service: &Service, tenants: Option<HashSet<TenantId>>) {
        let (lasting, whole) = (service.lasting_spaces(), service.whole_chunk_spaces());
        let picked = move |space| lasting(space) && whole(space);
        match tenants {
            None => self.spaces.decide(picked),
            Some(tenants) => {
                let service = service.downgrade();
                self.spaces.decide(move |space| {
                    let service = service.upgrade();
                    let is_of = |service: Service| tenants.contains(&service.tenant_of(space));
                    picked(space) && service.is_some_and(is_of)
                });
            }
        }
    }
}

/// Reads the key for digests: the key of the store, or else the key of the peers.
pub(crate) fn keys(config: &ServeConfig, store: Option<&RemoteSettings>) -> Result<Option<Keys>> {
    let own = store.and_then(|store| store.key.as_ref());
    let own = own.map(|path| ("--remote-key", path));
    let shared = config.p2p_key.as_ref().map(|path| ("--p2p-key", path));
    let read = |(flag, path): (&str, &PathBuf)| {
        Keys::read(path).map_err(|error| anyhow!("{flag}: {error}"))
    };
    own.or(shared).map(read).transpose()
}

/// Starts the tiers of the configured stores, in their order. Blocks for at most [`START`]. A server
/// starts without a store that does not answer; it is reached in the background.
pub(crate) fn open(config: &ServeConfig, host: &EngineHost) -> Result<Vec<Remote>> {
    let stores = config.remotes().enumerate();
    let open = |(number, store)| open_one(store, number, keys(config, Some(store))?, host);
    let remotes: Vec<Remote> = stores.map(open).collect::<Result<_>>()?;
    // Most stores answer at once. The engine then knows from the start what was cleared.
    let starting = Instant::now() + START;
    for remote in &remotes {
        Handle::current().block_on(remote.tier.ready(starting));
    }
    Ok(remotes)
}

fn open_one(
    config: &RemoteSettings,
    number: usize,
    keys: Option<Keys>,
    host: &EngineHost,
) -> Result<Remote> {
    let url = config.url.as_ref().context("a store has a URL")?;
    let mut options = StoreOptions::default();
    options.max_bytes = config.size;
    options.ttl = config.ttl;
    let store = open_store(url.with_secrets(), options);
    let store = store.map_err(|error| anyhow!("--remote {url}: {error}"))?;
    let mut tier = RemoteConfig::nth(number);
    let name = tier.name.clone();
    tier.absent_ttl = config.negative_ttl;
    tier.timeout = config.timeout;
    let digest = |keys: Keys| SaltDigest::new(move |salt| keys.digest(salt.as_bytes()));
    tier.salt_digest = keys.map(digest);
    let tier = tier.start(store.store(), Arc::new(host.clone()), Handle::current());
    let spaces = LateFilter::default();
    let mut policy = TierPolicy::of_store(config.timeout);
    policy.write = config.write;
    policy.admit = config.admit;
    policy.fill = config.fill;
    policy.spaces = spaces.filter();
    policy.locate_timeout = config.locate_timeout;
    info!("{name}: {url}");
    Ok(Remote {
        tier: Arc::new(tier),
        policy,
        spaces,
    })
}
