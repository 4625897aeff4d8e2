//! Requests of clients and replies of the server, independent of any encoding.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use lmc_key::{ChunkHash, TagsId};

use crate::protocol::msgpack::encoded;
use crate::protocol::{KvDescriptor, MAX_TRACE_PARENT, TRACE_PARENT, TraceParent};

/// Declares [`Operation`] with the wire name of each operation and, for older ones, its number.
macro_rules! operations {
    ($($(#[$doc:meta])* $variant:ident = $name:literal $(, $id:literal)?;)+) => {
        /// An operation of LMCache's multiprocess protocol as of lmcache 0.5.6.
        ///
        /// Older operations have a number on the wire, newer ones a name.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Operation {
            $($(#[$doc])* $variant,)+
        }

        impl Operation {
            /// Every operation.
            pub const ALL: &[Self] = &[$(Self::$variant),+];

            /// Returns the name of the operation, which never changes.
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)+ }
            }

            /// Returns the number of the operation, if it has one; it never changes.
            pub fn id(self) -> Option<u8> {
                match self { $(Self::$variant => operations!(@id $($id)?),)+ }
            }
        }
    };
    (@id $id:literal) => { Some($id) };
    (@id) => { None };
}

operations! {
    /// Registers a worker whose paged KV memory the server copies from and to.
    RegisterKvCache = "register_kv_cache", 1;
    /// Ends a registration by [`Self::RegisterKvCache`].
    UnregisterKvCache = "unregister_kv_cache", 2;
    /// Query-ring caching; not supported.
    RegisterQCache = "register_q_cache", 3;
    /// Query-ring caching; not supported.
    UnregisterQCache = "unregister_q_cache", 4;
    /// Query-ring caching; not supported.
    StoreQ = "store_q", 5;
    /// Copies blocks of a registered worker into the cache.
    Store = "store", 6;
    /// Copies cached chunks into blocks of a registered worker.
    Retrieve = "retrieve", 7;
    /// Looks up the leading chunks of a prompt and leases them.
    Lookup = "lookup", 8;
    /// Returns the result of a lookup, or nothing while chunks are being promoted.
    QueryPrefetchStatus = "query_prefetch_status", 9;
    /// Waits for the result of a lookup.
    WaitPrefetchStatus = "wait_prefetch_status", 10;
    /// Releases part of the leases of a lookup.
    FreeLookupLocks = "free_lookup_locks", 12;
    /// Ends a request and releases all its leases.
    EndSession = "end_session", 13;
    /// Registers a worker that copies by itself from and to the shared pool.
    RegisterEngineDriven = "register_kv_cache_engine_driven_context", 14;
    /// Ends a registration by [`Self::RegisterEngineDriven`].
    UnregisterEngineDriven = "unregister_kv_cache_engine_driven_context", 15;
    /// Reserves slots for chunks that the worker will write.
    PrepareStore = "prepare_store", 16;
    /// Commits a prepared store after its slots are written.
    CommitStore = "commit_store", 17;
    /// Leases the slots of cached chunks for the worker to read.
    PrepareRetrieve = "prepare_retrieve", 18;
    /// Ends a prepared retrieve after its slots are read.
    CommitRetrieve = "commit_retrieve", 19;
    /// Clears the cache.
    Clear = "clear", 20;
    /// Returns the server's chunk size in tokens.
    GetChunkSize = "get_chunk_size", 21;
    /// Reports that a worker or scheduler is alive.
    Ping = "ping", 22;
    /// Reports the blocks that the engine allocated to each request; the server only counts them.
    ReportBlockAllocation = "report_block_allocation", 23;
    /// Does nothing; the reply is "OK".
    Noop = "noop", 24;
    /// CacheBlend; not supported.
    CbRegisterRope = "cb_register_rope", 25;
    /// CacheBlend; not supported.
    CbUnregisterRope = "cb_unregister_rope", 26;
    /// CacheBlend; not supported.
    CbRetrievePreComputed = "cb_retrieve_pre_computed", 27;
    /// CacheBlend; not supported.
    CbUnifiedLookup = "cb_unified_lookup", 28;
    /// Peer-to-peer reads; not supported yet.
    P2pLookupAndLock = "p2p_lookup_and_lock", 29;
    /// Peer-to-peer reads; not supported yet.
    P2pQueryLookupResults = "p2p_query_lookup_results", 30;
    /// Peer-to-peer reads; not supported yet.
    P2pUnlockObjects = "p2p_unlock_objects", 31;
    /// Returns the optional capabilities of this server.
    GetExperimental = "get_experimental", 32;
    /// CacheBlend; not supported.
    CbProtocolHandshake = "cb_protocol_handshake", 33;
    /// Subscribes to a stream of stored and removed chunks.
    SubscribeKvEvents = "subscribe_kv_events";
    /// Extensions of LMCache's server; not supported.
    ServerModuleCall = "server_module_call";
    /// CacheBlend; not supported.
    CbReorderPlan = "cb_reorder_plan";
    /// Gives back the slots of a prepared store that is not written; lmc's own.
    AbandonStore = "lmc_abandon_store";
    /// Gives back all slots that a worker's earlier connections left prepared, because the worker
    /// no longer copies into or out of any of them; lmc's own.
    AbandonEarlier = "lmc_abandon_earlier";
    /// Passes the descriptor of the pool, with the first byte of the reply; the reply is the pool's
    /// size in bytes. Over Unix sockets, once for each connection; lmc's own.
    PoolDescriptor = "lmc_pool_descriptor";
    /// Waits for the result of a lookup, and returns it with the tiers that the chunks came from;
    /// lmc's own.
    WaitLookup = "lmc_wait_lookup";
}

impl Operation {
    /// Returns the operation with this number.
    pub fn from_id(id: u64) -> Option<Self> {
        Self::ALL
            .iter()
            .copied()
            .find(|op| op.id().is_some_and(|known| u64::from(known) == id))
    }

    /// Returns the operation with this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|op| op.name() == name)
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Capability of a server that reads identities and chunk hashes in keys, and knows
/// [`Operation::AbandonStore`].
pub(crate) const ENGINE_KEYS: &str = "lmc_engine_keys";

/// Capability of a server that knows [`Operation::AbandonEarlier`].
pub(crate) const ABANDON_EARLIER: &str = "lmc_abandon_earlier";

/// Capability of a server that knows [`Operation::PoolDescriptor`], on connections that can pass one.
pub(crate) const POOL_DESCRIPTOR: &str = "lmc_pool_descriptor";

/// Capability of a server that knows [`Operation::WaitLookup`].
pub(crate) const WAIT_LOOKUP: &str = "lmc_wait_lookup";

/// Capability of a server that knows chunks of other sizes than its own, where the engine names them.
pub(crate) const UNITS: &str = "lmc_units";

/// Capability of a server that sends notices of the ends of stores. The session of a request that
/// computes for another engine then lasts until that request ends.
pub(crate) const NOTICES: &str = "lmc_notices";

/// Suffix of the request id under which lmc's own connector looks up the tail: the tokens after the
/// whole chunks of a request.
pub(crate) const TAIL_LOOKUP: &str = "\u{1f}tail";

/// A range of a prompt, with the model, rank and tenant whose KV cache it is (`IPCCacheServerKey`
/// on the wire).
#[derive(Debug, Clone, Default, PartialEq)]
pub struct CacheKey {
    /// Model name as the engine gives it.
    pub model_name: String,
    /// Number of ranks that each chunk's KV cache is split over.
    pub world_size: u32,
    /// KV rank of the worker; `None` for a scheduler, which means all ranks.
    pub worker_id: Option<u32>,
    /// Tokens of the prompt, from its first; empty where `chunk_hashes` name the chunks.
    pub token_ids: Vec<u32>,
    /// Hashes of the prompt's chunks, from its first, where the engine hashes its prompts itself.
    /// Only valid with an `identity`, which says how they are made.
    pub chunk_hashes: Vec<ChunkHash>,
    /// Tokens of each of `chunk_hashes`, if not the server's chunk size. The range then counts from
    /// the first token that they cover.
    pub unit: Option<u32>,
    /// Identity of the engine, where its client states one.
    pub identity: Option<IdentityDigest>,
    /// Index of the first token of the range; a multiple of the chunk size.
    pub start: u64,
    /// Index of the token after the range.
    pub end: u64,
    /// Id of the request, chosen by the engine or its user.
    pub request_id: String,
    /// Name of the tenant; chunks of different salts are never shared.
    pub cache_salt: String,
    /// Number of workers that will each retrieve the same rank (MLA under tensor parallelism); 0 if
    /// the client did not set it.
    pub num_kv_readers: u32,
    /// Settings of the request, from its `kv_transfer_params`.
    pub configs: RequestConfigs,
}

/// The way in which chunks are named. The same tokens have other hashes under each of these.
#[cfg(feature = "service")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Naming {
    /// Hashes that the server computes from the tokens.
    Tokens,
    /// The engine's own block hashes.
    EngineHashes,
}

#[cfg(feature = "service")]
impl CacheKey {
    /// Returns the way in which the key names its chunks.
    pub(crate) fn naming(&self) -> Naming {
        match self.chunk_hashes.is_empty() {
            true => Naming::Tokens,
            false => Naming::EngineHashes,
        }
    }
}

/// The BLAKE3 digest of an engine's identity record, which stands for the record in each key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct IdentityDigest(pub(crate) [u8; 32]);

impl IdentityDigest {
    /// Returns the digest of a record.
    pub fn of(record: &str) -> Self {
        Self(*blake3::hash(record.as_bytes()).as_bytes())
    }
}

/// Statement of an engine's own client about its KV cache: chunks of two engines are shared only if
/// both texts are equal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineRecord {
    /// Identity record: the model, the format of its KV cache, and how prompts are hashed.
    pub identity: String,
    /// Order of the elements in a chunk.
    pub layout: String,
    /// Tokens of a chunk, if not the server's chunk size. Only keys with the same
    /// [`CacheKey::unit`] name such chunks.
    pub unit: Option<u32>,
}

/// Settings of one request, from the entries of its `kv_transfer_params` that begin with
/// `lmcache.`. vLLM's connector forwards them as `request_configs`.
#[derive(Debug, Clone, Default, PartialEq)]
#[non_exhaustive]
pub struct RequestConfigs {
    /// True if chunks of this request must not be stored (`lmcache.skip_save`).
    pub skip_save: bool,
    /// Peers to ask first for chunks of this request (`lmcache.p2p.source` or `lmcache.pd.source`).
    pub sources: Sources,
    /// Time to wait for those peers to compute chunks that they do not have yet
    /// (`lmcache.pd.wait_ms`). Zero: no wait.
    pub wait: Duration,
    /// Id of the request at both engines (`lmcache.pd.id`): the request with a wait waits until the
    /// request without one has ended. An empty text names none.
    pub awaited: String,
    /// Peer that receives the request's chunks as soon as they are stored (`lmcache.pd.to`): a name
    /// or an address. An empty text names none.
    pub push_to: String,
    /// Parent of the request's spans (`lmcache.traceparent`); a client has its text in `others`.
    pub parent: Option<TraceParent>,
    /// Digest of the entries whose names begin with `lmcache.tag.`; a client has them in `others`.
    pub tags: Option<TagsId>,
    /// Other entries, which a client sends. The server reads only the parent and the tags of them,
    /// so this map is empty in the requests that it reads.
    pub others: BTreeMap<String, ConfigValue>,
}

/// Value of an entry of a request's `kv_transfer_params`.
#[derive(Debug, Clone, PartialEq)]
pub enum ConfigValue {
    /// No value.
    Nil,
    /// A truth value.
    Bool(bool),
    /// A whole number.
    Int(i64),
    /// Another number.
    Float(f64),
    /// A text. Lists and objects are given as their JSON.
    Text(String),
}

/// Names of the entry that names peers; the second one is for hand-overs from prefill to decode.
pub(crate) const SOURCES: [&str; 2] = ["lmcache.p2p.source", "lmcache.pd.source"];
/// Name of the entry with the time to wait for those peers, in milliseconds.
pub(crate) const WAIT: &str = "lmcache.pd.wait_ms";

/// Name of the entry with the id of the request that computes the prompt.
pub(crate) const AWAITED: &str = "lmcache.pd.id";
/// Bytes of that id, at most.
pub(crate) const MAX_AWAITED: usize = 256;
/// Name of the entry with the peer that receives the request's chunks.
pub(crate) const PUSH_TO: &str = "lmcache.pd.to";

/// Longest time for which a server may wait for another engine, whatever its settings and the
/// request say.
pub const MAX_SOURCE_WAIT: Duration = Duration::from_secs(300);

/// Returns the time that an entry asks for; zero for a negative number.
pub(crate) fn wait_of(millis: i128) -> Duration {
    Duration::from_millis(u64::try_from(millis.max(0)).unwrap_or(u64::MAX))
}

/// Start of the names of tags, which keep chunks apart.
pub(crate) const TAG: &str = "lmcache.tag.";
/// Entries of one request that this version does not know, at most.
const MAX_OTHERS: usize = 48;
/// Tags of one request that are sent unchanged, at most. With the digest of further tags, the other
/// entries and the settings that this version knows, a request stays below the 256 entries that a
/// server reads.
const MAX_TAGS: usize = 200;
/// Name of the tag whose value is the digest of further tags.
const FURTHER_TAGS: &str = "lmcache.tag.lmc.further";
/// Bytes of the name of such an entry, at most.
const MAX_OTHER_NAME: usize = 256;
/// Bytes of a text in such an entry, at most.
const MAX_OTHER_TEXT: usize = 4096;

impl RequestConfigs {
    /// Takes an entry of a request's `kv_transfer_params`. Leaves out entries beyond 48, names
    /// above 256 bytes and texts above 4,096 bytes: a server would refuse a request with them. A
    /// tag with such a name or text, and tags beyond 200, are sent as a digest.
    pub fn set(&mut self, name: &str, value: ConfigValue) {
        match (name, value) {
            ("lmcache.skip_save", value) => self.skip_save = value == ConfigValue::Bool(true),
            (name, value) if SOURCES.contains(&name) => {
                self.sources = match value {
                    ConfigValue::Nil => Sources::default(),
                    ConfigValue::Text(text) => Sources::parse(&text),
                    _ => Sources::NO_TEXT,
                };
            }
            (WAIT, ConfigValue::Int(millis)) => self.wait = wait_of(millis.into()),
            (WAIT, _) => {}
            (AWAITED, ConfigValue::Text(id)) if id.len() <= MAX_AWAITED => self.awaited = id,
            (AWAITED, _) => {}
            (PUSH_TO, ConfigValue::Text(name)) if name.len() <= MAX_SOURCE => self.push_to = name,
            (PUSH_TO, _) => {}
            (TRACE_PARENT, ConfigValue::Text(text)) if text.len() > MAX_TRACE_PARENT => {}
            // Kept whatever other entries the request has.
            (TRACE_PARENT, value @ ConfigValue::Text(_)) => {
                self.others.insert(name.to_owned(), value);
            }
            (TRACE_PARENT, _) => {}
            // No tag is left out: the chunks that it keeps apart would be mixed.
            (name, value) if name.starts_with(TAG) => {
                let text = |text: &str| blake3::hash(text.as_bytes()).to_string();
                let name = match name.len() > MAX_OTHER_NAME {
                    true => format!("{TAG}{}", text(name)),
                    false => name.to_owned(),
                };
                let value = match value {
                    ConfigValue::Text(long) if long.len() > MAX_OTHER_TEXT => {
                        ConfigValue::Text(text(&long))
                    }
                    value => value,
                };
                self.set_tag(name, value);
            }
            (name, _) if name.len() > MAX_OTHER_NAME || self.others.len() >= MAX_OTHERS => {}
            (_, ConfigValue::Text(text)) if text.len() > MAX_OTHER_TEXT => {}
            (name, value) => {
                self.others.insert(name.to_owned(), value);
            }
        }
    }

    /// Keeps a tag, or adds it to the digest of further tags.
    fn set_tag(&mut self, name: String, value: ConfigValue) {
        let is_tag = |name: &&String| name.starts_with(TAG);
        let is_known = self.others.contains_key(&name);
        if is_known || self.others.keys().filter(is_tag).count() < MAX_TAGS {
            self.others.insert(name, value);
            return;
        }
        let before = self.others.get(FURTHER_TAGS).map(encoded);
        let mut digest = blake3::Hasher::new();
        for part in [
            &before.unwrap_or_default(),
            &encoded(&name),
            &encoded(&value),
        ] {
            digest
                .update(&(part.len() as u64).to_le_bytes())
                .update(part);
        }
        let digest = digest.finalize().to_string();
        self.others
            .insert(FURTHER_TAGS.to_owned(), ConfigValue::Text(digest));
    }
}

/// Peers that a request names (`lmcache.p2p.source`, `lmcache.pd.source`): names or addresses with commas between them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Sources {
    /// The peers; none where the request names none.
    Named(Arc<[String]>),
    /// Reason why the value names no peers. A lookup is refused with it.
    Malformed(&'static str),
}

impl Default for Sources {
    fn default() -> Self {
        // Empty slices share one allocation.
        Self::Named(Arc::default())
    }
}

/// Peers that one request may name.
const MAX_SOURCES: usize = 8;
/// Bytes that one name may have.
pub(crate) const MAX_SOURCE: usize = 256;

impl Sources {
    /// Reason why a value that is no text is malformed.
    pub(crate) const NO_TEXT: Self = Self::Malformed(
        "lmcache.p2p.source and lmcache.pd.source must be a text of at most 4096 bytes: names or \
         addresses of peers, with commas between them",
    );

    /// Parses the value of such an entry.
    pub fn parse(text: &str) -> Self {
        let names: Vec<&str> = text.split(',').map(str::trim).collect();
        let valid = |name: &&str| {
            let is_short = (1..=MAX_SOURCE).contains(&name.len());
            is_short && !name.contains(|c: char| c.is_control() || c.is_whitespace())
        };
        if names.len() > MAX_SOURCES {
            return Self::Malformed(
                "lmcache.p2p.source and lmcache.pd.source may name at most 8 peers",
            );
        }
        if !names.iter().all(valid) {
            return Self::Malformed(
                "each name in lmcache.p2p.source and lmcache.pd.source must have 1 to 256 bytes, without \
                 white space",
            );
        }
        Self::Named(names.into_iter().map(str::to_owned).collect())
    }
}

/// Fields of a map in a registration that this version does not know, with their values in
/// MessagePack.
///
/// A field may change what the bytes of a chunk mean, so unknown fields are part of a chunk's
/// identity.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UnknownFields(pub(crate) BTreeMap<String, Vec<u8>>);

impl UnknownFields {
    /// Returns unknown fields, as a client that is newer than the server sends them.
    pub fn of<'a>(fields: impl IntoIterator<Item = (&'a str, ConfigValue)>) -> Self {
        let field = |(name, value): (&str, ConfigValue)| (name.to_owned(), encoded(&value).into());
        Self(fields.into_iter().map(field).collect())
    }

    /// Returns the names of the fields in alphabetical order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }
}

/// KV group of an engine: layers that share block ids and a shape.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EngineGroup {
    /// Id of the engine's block-id space.
    pub engine_group_id: u32,
    /// Indices of the group's layers in the registered tensors.
    pub layer_indices: Vec<u32>,
    /// Tokens per block; 0 if the engine did not set it.
    pub tokens_per_block: u32,
    /// Sliding window in tokens; negative if there is none.
    pub sw_size_tokens: i64,
    /// Number of the connector's own pool that the group belongs to; 0 for the model's KV cache.
    pub extra_object_group_tag: u32,
    /// True if the blocks contain recurrent state instead of attention KV.
    pub recurrent_state: bool,
    /// Further fields.
    pub unknown: UnknownFields,
}

/// Registration of a worker whose memory the server copies from and to.
#[derive(Debug, Clone, PartialEq)]
pub struct RegisterKvCache {
    /// Id of the worker, chosen by its engine.
    pub instance_id: u64,
    /// Descriptor of each layer's tensor.
    pub kv_caches: Vec<KvDescriptor>,
    /// Model name as the engine gives it.
    pub model_name: String,
    /// Number of ranks that each chunk's KV cache is split over.
    pub world_size: u32,
    /// Name of the engine: `vllm`, `sglang`, …
    pub engine_type: String,
    /// Order of the axes, `NHD` or `HND`; `None` if the engine did not set it.
    pub kv_layout: Option<String>,
    /// Further entries of `layout_hints`.
    pub unknown_hints: UnknownFields,
    /// KV groups; empty for a model with a single group.
    pub groups: Vec<EngineGroup>,
}

/// Registration of a worker that copies by itself from and to the shared pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineDrivenContext {
    /// Id of the worker, chosen by its engine.
    pub instance_id: u64,
    /// Model name as the engine gives it.
    pub model_name: String,
    /// Number of ranks that each chunk's KV cache is split over.
    pub world_size: u32,
    /// Tokens per block.
    pub block_size: u32,
    /// Number of model layers on this worker.
    pub num_layers: u32,
    /// Number of elements per token in one layer and plane.
    pub hidden_dim_size: u32,
    /// Element type by its torch name, such as `bfloat16`.
    pub dtype: String,
    /// True if each layer has one plane instead of two (MLA, or K and V packed).
    pub use_mla: bool,
    /// Tokens per chunk in the worker's layout; `None` means the server's chunk size.
    pub num_physical_slots: Option<u32>,
    /// Statement of lmc's own client; `None` from the stock client.
    pub record: Option<EngineRecord>,
    /// Further fields.
    pub unknown: UnknownFields,
}

/// Counts of blocks and tokens that the engine added to a request.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BlockAllocation {
    /// Id of the request, chosen by the engine or its user.
    pub request_id: String,
    /// Number of blocks added.
    pub blocks: usize,
    /// Number of tokens added.
    pub tokens: usize,
}

/// A request of a client.
#[derive(Debug, Clone, PartialEq)]
pub enum Request {
    /// See [`Operation::RegisterKvCache`].
    RegisterKvCache(Box<RegisterKvCache>),
    /// See [`Operation::UnregisterKvCache`] and [`Operation::UnregisterEngineDriven`].
    Unregister {
        /// Id of the worker, chosen by its engine.
        instance_id: u64,
        /// True for [`Operation::UnregisterEngineDriven`].
        engine_driven: bool,
    },
    /// See [`Operation::RegisterEngineDriven`].
    RegisterEngineDriven(EngineDrivenContext),
    /// See [`Operation::Store`].
    Store {
        /// Range of the prompt to store.
        key: CacheKey,
        /// Id of the worker, chosen by its engine.
        instance_id: u64,
        /// Block ids of the range, for each KV group.
        block_ids: Vec<Vec<u32>>,
        /// Handle of the event after which the worker's memory is ready, where it lies on a GPU.
        event: Vec<u8>,
    },
    /// See [`Operation::Retrieve`].
    Retrieve {
        /// Range of the prompt to retrieve.
        key: CacheKey,
        /// Id of the worker, chosen by its engine.
        instance_id: u64,
        /// Block ids of the range, for each KV group.
        block_ids: Vec<Vec<u32>>,
        /// Handle of the event after which the worker's memory is ready, where it lies on a GPU.
        event: Vec<u8>,
        /// Number of tokens at the start of the range whose blocks must not be written.
        skip_first_n_tokens: u64,
    },
    /// See [`Operation::Lookup`].
    Lookup(CacheKey),
    /// See [`Operation::QueryPrefetchStatus`].
    QueryPrefetchStatus {
        /// Id of the request, chosen by the engine or its user.
        request_id: String,
    },
    /// See [`Operation::WaitPrefetchStatus`].
    WaitPrefetchStatus {
        /// Id of the request, chosen by the engine or its user.
        request_id: String,
        /// Longest wait in seconds.
        timeout: f64,
    },
    /// See [`Operation::WaitLookup`].
    WaitLookup {
        /// Id of the request, chosen by the engine or its user.
        request_id: String,
        /// Longest wait in seconds.
        timeout: f64,
    },
    /// See [`Operation::FreeLookupLocks`].
    FreeLookupLocks(CacheKey),
    /// See [`Operation::EndSession`].
    EndSession {
        /// Id of the request, chosen by the engine or its user.
        request_id: String,
    },
    /// See [`Operation::PrepareStore`].
    PrepareStore {
        /// Range of the prompt to store.
        key: CacheKey,
        /// Id of the worker, chosen by its engine.
        instance_id: u64,
    },
    /// See [`Operation::CommitStore`].
    CommitStore {
        /// Range of the prepared transfer.
        key: CacheKey,
        /// Id of the worker, chosen by its engine.
        instance_id: u64,
        /// Size in bytes of a pickled payload; it is refused and never loaded.
        pickled: usize,
    },
    /// See [`Operation::AbandonStore`].
    AbandonStore {
        /// Range of the prepared transfer.
        key: CacheKey,
        /// Id of the worker, chosen by its engine.
        instance_id: u64,
    },
    /// See [`Operation::AbandonEarlier`].
    AbandonEarlier {
        /// Id of the worker, chosen by its engine.
        instance_id: u64,
    },
    /// See [`Operation::PrepareRetrieve`].
    PrepareRetrieve {
        /// Range of the prompt to retrieve.
        key: CacheKey,
        /// Id of the worker, chosen by its engine.
        instance_id: u64,
    },
    /// See [`Operation::CommitRetrieve`].
    CommitRetrieve {
        /// Range of the prepared transfer.
        key: CacheKey,
        /// Id of the worker, chosen by its engine.
        instance_id: u64,
    },
    /// See [`Operation::Clear`].
    Clear {
        /// True to clear leased chunks too; their memory is released when the leases end.
        force: bool,
    },
    /// See [`Operation::GetChunkSize`].
    GetChunkSize,
    /// See [`Operation::Ping`].
    Ping {
        /// Id of the worker; `None` for a scheduler.
        instance_id: Option<u64>,
    },
    /// See [`Operation::ReportBlockAllocation`].
    ReportBlockAllocation {
        /// Process id of the scheduler.
        instance_id: u64,
        /// Model name as the engine gives it.
        model_name: String,
        /// Record of each request.
        records: Vec<BlockAllocation>,
    },
    /// See [`Operation::Noop`].
    Noop,
    /// See [`Operation::GetExperimental`].
    GetExperimental,
    /// See [`Operation::PoolDescriptor`].
    PoolDescriptor,
    /// See [`Operation::SubscribeKvEvents`].
    SubscribeKvEvents {
        /// Id of the subscriber, which has at most one subscription.
        instance_id: u64,
        /// Model whose chunks are reported.
        model_name: String,
        /// Last sequence number that the subscriber has received.
        cursor: u64,
        /// Most events per batch, 1 to 1024.
        max_events: usize,
    },
}

impl Request {
    /// Returns the operation of the request.
    pub fn operation(&self) -> Operation {
        match self {
            Self::RegisterKvCache(_) => Operation::RegisterKvCache,
            Self::Unregister {
                engine_driven: false,
                ..
            } => Operation::UnregisterKvCache,
            Self::Unregister {
                engine_driven: true,
                ..
            } => Operation::UnregisterEngineDriven,
            Self::RegisterEngineDriven(_) => Operation::RegisterEngineDriven,
            Self::Store { .. } => Operation::Store,
            Self::Retrieve { .. } => Operation::Retrieve,
            Self::Lookup(_) => Operation::Lookup,
            Self::QueryPrefetchStatus { .. } => Operation::QueryPrefetchStatus,
            Self::WaitPrefetchStatus { .. } => Operation::WaitPrefetchStatus,
            Self::WaitLookup { .. } => Operation::WaitLookup,
            Self::FreeLookupLocks(_) => Operation::FreeLookupLocks,
            Self::EndSession { .. } => Operation::EndSession,
            Self::PrepareStore { .. } => Operation::PrepareStore,
            Self::CommitStore { .. } => Operation::CommitStore,
            Self::AbandonStore { .. } => Operation::AbandonStore,
            Self::AbandonEarlier { .. } => Operation::AbandonEarlier,
            Self::PrepareRetrieve { .. } => Operation::PrepareRetrieve,
            Self::CommitRetrieve { .. } => Operation::CommitRetrieve,
            Self::Clear { .. } => Operation::Clear,
            Self::GetChunkSize => Operation::GetChunkSize,
            Self::Ping { .. } => Operation::Ping,
            Self::ReportBlockAllocation { .. } => Operation::ReportBlockAllocation,
            Self::Noop => Operation::Noop,
            Self::GetExperimental => Operation::GetExperimental,
            Self::PoolDescriptor => Operation::PoolDescriptor,
            Self::SubscribeKvEvents { .. } => Operation::SubscribeKvEvents,
        }
    }
}

/// Location and layout of one chunk in the shared pool.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SlotDescriptor {
    /// Offset in the pool, in bytes.
    pub offset: u64,
    /// Size of the chunk in bytes.
    pub length: u64,
    /// Shape of the chunk's tensor.
    pub shape: Vec<u64>,
    /// Element type by its torch name, such as `bfloat16`.
    pub dtype: String,
}

/// Consecutive chunks that a lookup found in one tier.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TierChunks {
    /// Name of the tier: `dram`, or a lower tier's, such as `disk`.
    pub tier: String,
    /// Number of chunks.
    pub chunks: u64,
}

impl TierChunks {
    /// Name of the first tier.
    pub const DRAM: &str = "dram";
    /// Most tiers in one answer; where there are more, no tier is named.
    pub(crate) const MAX: usize = 64;
}

/// Kind of a [`KvEvent`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum KvEventKind {
    /// The chunk became findable.
    Stored,
    /// The chunk is no longer findable.
    #[default]
    Removed,
}

/// Change of one chunk in the cache.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KvEvent {
    /// Sequence number in the server's event log.
    pub seq: u64,
    /// Kind of the change.
    pub kind: KvEventKind,
    /// Model of the chunk.
    pub model_name: String,
    /// Prefix hash of the chunk.
    pub hash: Vec<u8>,
    /// Prefix hash of the previous chunk; `None` for a prompt's first chunk and for removals.
    pub parent: Option<Vec<u8>>,
    /// Tokens of the chunk; empty for removals.
    pub tokens: Vec<u32>,
}

/// Batch of successive changes of the cache.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KvEventBatch {
    /// True if the server keeps an event log.
    pub enabled: bool,
    /// Id of this start of the server; each start has another id.
    pub incarnation: u64,
    /// Cursor from which the next batch continues.
    pub next_cursor: u64,
    /// True if changes between the cursor and the first event were dropped.
    pub lost: bool,
    /// Changes, oldest first.
    pub events: Vec<KvEvent>,
}

impl KvEventBatch {
    /// Estimates the size of the encoded batch in bytes.
    pub(crate) fn encoded_bytes(&self) -> usize {
        let event = |event: &KvEvent| 160 + event.model_name.len() + 5 * event.tokens.len();
        self.events.iter().map(event).sum()
    }
}

/// A reply of the server.
#[derive(Debug, Clone, PartialEq)]
pub enum Reply {
    /// No value; also the end of an event stream.
    None,
    /// A boolean.
    Bool(bool),
    /// A number.
    Int(u64),
    /// A string.
    Text(String),
    /// A list of strings.
    Strings(Vec<String>),
    /// Name and size of the shared pool, after [`Operation::RegisterEngineDriven`].
    Registered {
        /// Name of the shared pool, without the leading slash.
        shm_name: String,
        /// Size of the pool in bytes.
        pool_size: u64,
    },
    /// Outcome of a lookup.
    Found {
        /// Leading chunks that were found.
        chunks: u64,
        /// Tiers of these chunks, in their order; empty where they are not known.
        tiers: Vec<TierChunks>,
    },
    /// Slots that the worker is to write.
    StoreSlots {
        /// Slot of each chunk to write; stored chunks have none.
        slots: Vec<SlotDescriptor>,
        /// Index of each slot's chunk in the range.
        chunk_indices: Vec<u64>,
    },
    /// Slots that the worker may read; `None` if a chunk is missing.
    RetrieveSlots(Option<Vec<SlotDescriptor>>),
    /// True if the server made the copy.
    Transferred(bool),
    /// Batch of an event stream.
    Events(KvEventBatch),
    /// Refusal of the request, with the reason as text.
    ///
    /// The text is sent instead of the operation, so that the pending call in LMCache's client
    /// fails at once with this text.
    Error(String),
}
