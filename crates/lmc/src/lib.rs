//! A KV cache for LLM serving inside another program: one dependency for DRAM, disk, peers and shared
//! stores.
//!
//! [`CacheBuilder`] makes a [`PromptCache`], which stores and looks up the chunks of prompts of one
//! model and layout. [`PromptCache::engine`] is the [`CacheEngine`] under it, and the modules are
//! the crates under it.
//!
//! *Not* included: any protocol or server (`lmc-server`).
//!
//! The README has an example that runs.

#[cfg(feature = "shared")]
mod shared;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use thiserror::Error;

pub use lmc_backend as backend;
pub use lmc_backend_disk as disk;
#[cfg(feature = "shared")]
pub use lmc_backend_p2p as p2p;
#[cfg(feature = "shared")]
pub use lmc_backend_remote as remote;
pub use lmc_engine as engine;
pub use lmc_key as key;
pub use lmc_memory as memory;
#[cfg(feature = "shared")]
pub use lmc_transfer as transfer;

#[doc(no_inline)]
pub use lmc_engine::{
    CacheEngine, CloseReport, EngineConfig, EngineContext, Found, InUse, Lookup, OwnerId, TenantId,
};

use backend::Backend;
use disk::{DiskConfig, DiskError};
use engine::{
    EngineError, EngineHost, HostSpace, LookupRequest, LowerTier, Rank, SpaceBook, StoreRequest,
    StoreStart,
};
use key::{ChunkHasher, ChunkKey, HashAlgorithm, KeySpace, LayoutFingerprint, SpaceId};
use memory::{ArenaConfig, ArenaError};

/// Bytes of DRAM if [`CacheBuilder::dram`] is not called.
const DEFAULT_DRAM: usize = 1 << 30;

/// Reason why a cache cannot be made.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum BuildError {
    /// A name cannot be part of a key.
    #[error("{what} {text:?}: {reason}")]
    Name {
        /// The argument that holds the name.
        what: &'static str,
        /// The name.
        text: String,
        /// The rule that the name breaks.
        reason: String,
    },
    /// The chunk size is invalid.
    #[error("chunk size: {0}")]
    ChunkSize(#[from] key::ChunkSizeError),
    /// The memory cannot be allocated.
    #[error("dram: {0}")]
    Dram(#[from] ArenaError),
    /// The disk tier cannot be opened.
    #[error("disk: {0}")]
    Disk(#[from] DiskError),
    /// The tier of peers cannot be started.
    #[cfg(feature = "shared")]
    #[error("peers: {0}")]
    Peers(#[from] transfer::SocketError),
    /// The address of this process among its peers is invalid.
    #[cfg(feature = "shared")]
    #[error("peers: {0}")]
    PeerAddress(#[from] transfer::AddressError),
    /// The address of this process stands for every address of the host.
    #[cfg(feature = "shared")]
    #[error(
        "peers: expected the address at which other processes reach this one, found {host}, which \
         stands for every address of this host"
    )]
    EveryAddress {
        /// The host of the address.
        host: String,
    },
    /// The URL names no shared store.
    #[cfg(feature = "shared")]
    #[error("store: {0}")]
    Store(#[from] remote::OpenError),
    /// The threads of peers and stores cannot be started.
    #[cfg(feature = "shared")]
    #[error("cannot start a thread: {0}")]
    Runtime(#[source] Arc<std::io::Error>),
    /// The engine refuses its settings.
    #[error(transparent)]
    Engine(#[from] EngineError),
}

/// Settings of a [`PromptCache`].
#[derive(Debug, Clone)]
pub struct CacheBuilder {
    model: String,
    layout: String,
    salt: String,
    chunk_bytes: u64,
    chunk_size: u32,
    dram: usize,
    disk: Option<(PathBuf, u64)>,
    #[cfg(feature = "shared")]
    shared: shared::Settings,
    tiers: Vec<LowerTier>,
    engine: EngineConfig,
    host: Option<EngineHost>,
    #[cfg(feature = "shared")]
    runtime: Option<tokio::runtime::Handle>,
}

impl CacheBuilder {
    /// Returns settings for a cache of one model. `layout` describes shape, element type and order
    /// of a chunk's bytes: chunks of different descriptions are never mixed up. `chunk_bytes` is
    /// the size of a chunk.
    pub fn new(model: &str, layout: &str, chunk_bytes: u64) -> Self {
        Self {
            model: model.to_owned(),
            layout: layout.to_owned(),
            salt: String::new(),
            chunk_bytes,
            chunk_size: 256,
            dram: DEFAULT_DRAM,
            disk: None,
            #[cfg(feature = "shared")]
            shared: shared::Settings::default(),
            tiers: Vec::new(),
            engine: EngineConfig::default(),
            host: None,
            #[cfg(feature = "shared")]
            runtime: None,
        }
    }

    /// Sets the tokens of a chunk. Default: 256.
    #[must_use]
    pub fn chunk_size(mut self, tokens: u32) -> Self {
        self.chunk_size = tokens;
        self
    }

    /// Sets the bytes of DRAM. Default: 1 GiB.
    #[must_use]
    pub fn dram(mut self, bytes: usize) -> Self {
        self.dram = bytes;
        self
    }

    /// Adds a disk tier in a folder, which is created if it is missing, of at most `bytes` bytes.
    /// Chunks found there survive restarts. Default: no disk tier.
    #[must_use]
    pub fn disk(mut self, folder: impl AsRef<Path>, bytes: u64) -> Self {
        self.disk = Some((folder.as_ref().to_owned(), bytes));
        self
    }

    /// Lends the chunks to other processes that have one of these keys, and reads their chunks.
    /// Listens at `HOST:PORT`, at which they must reach this process, and connects to `peers`. Of
    /// two processes, one names the other, or both do. Peers come below the disk. Default: no
    /// peers.
    #[cfg(feature = "shared")]
    #[must_use]
    pub fn peers(
        mut self,
        listen: &str,
        keys: transfer::Keys,
        peers: impl IntoIterator<Item = impl Into<String>>,
    ) -> Self {
        self.shared.peers = Some(shared::Peers {
            listen: listen.to_owned(),
            keys,
            peers: peers.into_iter().map(Into::into).collect(),
        });
        self
    }

    /// Adds a store that other processes use too, below disk and peers: `file:///FOLDER`, and with
    /// the features of these names `redis://HOST` or `s3://BUCKET/PREFIX`. [`Self::build`] waits up
    /// to 500 ms for the store's first answer; until it answers, the store takes no chunks.
    /// Default: none.
    #[cfg(feature = "shared")]
    #[must_use]
    pub fn store(mut self, url: &str) -> Self {
        self.shared.stores.push(url.to_owned());
        self
    }

    /// Adds a tier below DRAM, and below the tiers of the other settings. Default: none.
    #[must_use]
    pub fn tier(mut self, tier: impl Into<LowerTier>) -> Self {
        self.tiers.push(tier.into());
        self
    }

    /// Sets the salt: chunks of different salts are never mixed up. Default: the empty salt.
    #[must_use]
    pub fn salt(mut self, salt: &str) -> Self {
        self.salt = salt.to_owned();
        self
    }

    /// Sets the engine's settings. Default: those of [`EngineConfig::default`].
    #[must_use]
    pub fn engine(mut self, config: EngineConfig) -> Self {
        self.engine = config;
        self
    }

    /// Sets the runtime of the tiers and the engine; it needs a timer, and network I/O for peers and
    /// stores. Default: threads of the cache's own.
    #[cfg(feature = "shared")]
    #[must_use]
    pub fn runtime(mut self, runtime: tokio::runtime::Handle) -> Self {
        self.runtime = Some(runtime);
        self
    }

    /// Sets the engine's host, for tiers that were given it. Default: a host of the cache's own.
    #[must_use]
    pub fn host(mut self, host: EngineHost) -> Self {
        self.host = Some(host);
        self
    }

    /// Makes the cache.
    ///
    /// # Errors
    /// [`BuildError`] names the invalid setting.
    pub fn build(self) -> Result<PromptCache, BuildError> {
        let hasher = ChunkHasher::new(HashAlgorithm::Blake3, self.chunk_size)?;
        let space = KeySpace {
            algorithm: hasher.algorithm(),
            chunk_size: hasher.chunk_size(),
            model: name("model", &self.model)?,
            world_size: 1,
            // Chunks of another size are never shared, whatever the text says.
            layout: LayoutFingerprint::of(
                format!("{} bytes: {}", self.chunk_bytes, self.layout).as_bytes(),
            ),
            dtype: name("dtype", "bytes")?,
            salt: name("salt", &self.salt)?,
            identity: name("identity", "")?,
            tags: None,
        };
        let arena = Arc::new(ArenaConfig::anonymous(self.dram).build()?);
        let host = self.host.unwrap_or_default();
        if host.is_taken() {
            return Err(EngineError::Host.into());
        }
        if !host.has_book() {
            host.set_book(Arc::new(OneSpace(space.clone())));
        }
        #[cfg_attr(not(feature = "shared"), expect(unused_mut))]
        let mut context = EngineContext::new(arena, host);
        #[cfg(feature = "shared")]
        context.runtime.clone_from(&self.runtime);
        let mut tiers: Vec<LowerTier> = Vec::new();
        if let Some((folder, bytes)) = &self.disk {
            let config = DiskConfig::new([folder], *bytes)
                .with_new_drives()
                .with_arena(Arc::clone(&context.arena));
            let disk: Arc<dyn Backend> = Arc::new(config.open(&context.host)?);
            tiers.push(disk.into());
        }
        // Runs before other processes hear of this one.
        for tier in tiers.iter().chain(&self.tiers) {
            let learned = context.host.learn_of(&**tier.backend());
            learned.map_err(EngineError::from)?;
        }
        #[cfg(feature = "shared")]
        let shared = (self.shared).open(&mut context, &space, self.chunk_bytes)?;
        #[cfg(feature = "shared")]
        tiers.extend(shared.tiers());
        tiers.extend(self.tiers);
        Ok(PromptCache {
            engine: self.engine.start(context.with_tiers(tiers))?,
            #[cfg(feature = "shared")]
            shared,
            hasher,
            space: space.id(),
            chunk_bytes: self.chunk_bytes,
            callers: AtomicU64::new(1),
        })
    }
}

/// The one space of a cache, whose chunks count for one tenant.
#[derive(Debug)]
struct OneSpace(KeySpace);

impl SpaceBook for OneSpace {
    fn tenant(&self, _: SpaceId) -> TenantId {
        TenantId::default()
    }

    fn spaces(&self) -> Vec<HostSpace> {
        let description = self.0.clone();
        let id = description.id();
        vec![HostSpace { id, description }]
    }
}

fn name<T>(what: &'static str, text: &str) -> Result<T, BuildError>
where
    T: std::str::FromStr<Err: std::fmt::Display>,
{
    text.parse().map_err(|reason: T::Err| BuildError::Name {
        what,
        text: text.to_owned(),
        reason: reason.to_string(),
    })
}

/// A cache for the prompts of one model and layout.
#[derive(Debug)]
pub struct PromptCache {
    engine: CacheEngine,
    /// Dropped after the engine.
    #[cfg(feature = "shared")]
    shared: shared::SharedTiers,
    hasher: ChunkHasher,
    space: SpaceId,
    chunk_bytes: u64,
    /// Numbers the owners of leases and reservations.
    callers: AtomicU64,
}

impl PromptCache {
    /// Stores the chunks of a prompt that the cache lacks. `fill` writes the bytes of a chunk,
    /// given its index from the start of the prompt. A last, shorter chunk is left out.
    ///
    /// Returns the number of chunks that became findable. A chunk for which no memory can be
    /// reserved is left out: then everything else is leased or pinned.
    pub fn store(&self, tokens: &[u32], mut fill: impl FnMut(usize, &mut [u8])) -> usize {
        let keys = self.keys(tokens);
        let request = |index: usize| StoreRequest {
            key: keys[index],
            parent: index.checked_sub(1).map(|before| keys[before]),
            tenant: TenantId::default(),
            len: self.chunk_bytes,
        };
        let requests: Vec<StoreRequest> = (0..keys.len()).map(request).collect();
        let started = (self.engine).store(self.owner(), self.engine.clears_id(), &requests);
        let mut tickets = Vec::new();
        for (index, start) in started.into_iter().enumerate() {
            if let StoreStart::Reserved(mut ticket) = start {
                fill(index, ticket.bytes_mut());
                tickets.push(ticket);
            }
        }
        let inserted = self.engine.commit(tickets).into_iter();
        inserted.filter(|one| *one == engine::Inserted::New).count()
    }

    /// Looks up the leading chunks of a prompt in all tiers. The leases in the outcome keep the
    /// chunks in memory until they are dropped.
    pub fn lookup(&self, tokens: &[u32]) -> Lookup {
        let hashes = self.hasher.hash_prompt(tokens);
        let rank = Rank {
            space: self.space,
            kv_rank: 0,
            chunk_bytes: Some(self.chunk_bytes),
        };
        let request = LookupRequest::new(self.owner(), hashes, vec![rank]);
        self.engine.lookup(request)
    }

    /// Returns the keys of the whole chunks of a prompt.
    pub fn keys(&self, tokens: &[u32]) -> Vec<ChunkKey> {
        let key = |hash| ChunkKey {
            space: self.space,
            kv_rank: 0,
            group: 0,
            hash,
        };
        self.hasher
            .hash_prompt(tokens)
            .into_iter()
            .map(key)
            .collect()
    }

    /// Returns the engine, for functions that this type does not offer. All tiers end with its last
    /// clone.
    pub fn engine(&self) -> &CacheEngine {
        &self.engine
    }

    /// Returns the tier of peers: its address and its state.
    #[cfg(feature = "shared")]
    pub fn peers(&self) -> Option<&p2p::P2pBackend> {
        self.shared.peers.as_deref()
    }

    /// Waits until all chunks are written to the lower tiers, and closes those tiers.
    pub fn close(&self, deadline: Instant) -> CloseReport {
        self.engine.close(deadline)
    }

    fn owner(&self) -> OwnerId {
        OwnerId(self.callers.fetch_add(1, Ordering::Relaxed))
    }
}

/// The README's examples, compiled and run with the doctests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
