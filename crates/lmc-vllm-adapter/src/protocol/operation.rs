//! What clients ask and what the server answers, independent of any encoding.

use std::fmt;

use crate::protocol::KvDescriptor;

/// Declares [`Operation`] with its wire name and, for the older ones, its frozen number.
macro_rules! operations {
    ($($(#[$doc:meta])* $variant:ident = $name:literal $(, $id:literal)?;)+) => {
        /// An operation of LMCache's multiprocess protocol as of lmcache 0.5.6.
        ///
        /// The older ones have a number on the wire, the newer ones a name.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Operation {
            $($(#[$doc])* $variant,)+
        }

        impl Operation {
            /// Every operation.
            pub const ALL: &[Self] = &[$(Self::$variant),+];

            /// The stable name.
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)+ }
            }

            /// The frozen number, for the operations that have one.
            pub fn id(self) -> Option<u8> {
                match self { $(Self::$variant => operations!(@id $($id)?),)+ }
            }
        }
    };
    (@id $id:literal) => { Some($id) };
    (@id) => { None };
}

operations! {
    /// Registers an engine's paged KV memory; the server copies.
    RegisterKvCache = "register_kv_cache", 1;
    /// Ends such a registration.
    UnregisterKvCache = "unregister_kv_cache", 2;
    /// Query-ring caching; not supported.
    RegisterQCache = "register_q_cache", 3;
    /// Query-ring caching; not supported.
    UnregisterQCache = "unregister_q_cache", 4;
    /// Query-ring caching; not supported.
    StoreQ = "store_q", 5;
    /// Copies blocks of a registered engine into the cache.
    Store = "store", 6;
    /// Copies cached chunks into blocks of a registered engine.
    Retrieve = "retrieve", 7;
    /// Asks how much of a prompt is cached, and holds it.
    Lookup = "lookup", 8;
    /// The answer to a lookup, when it is there.
    QueryPrefetchStatus = "query_prefetch_status", 9;
    /// The answer to a lookup, waiting for it.
    WaitPrefetchStatus = "wait_prefetch_status", 10;
    /// Gives back part of what a lookup holds.
    FreeLookupLocks = "free_lookup_locks", 12;
    /// The request is over; gives back all that it holds.
    EndSession = "end_session", 13;
    /// Registers an engine that copies by itself through shared memory.
    RegisterEngineDriven = "register_kv_cache_engine_driven_context", 14;
    /// Ends such a registration.
    UnregisterEngineDriven = "unregister_kv_cache_engine_driven_context", 15;
    /// Asks for slots to write chunks into.
    PrepareStore = "prepare_store", 16;
    /// The slots of a prepared store are written.
    CommitStore = "commit_store", 17;
    /// Asks for the slots that hold cached chunks.
    PrepareRetrieve = "prepare_retrieve", 18;
    /// The slots of a prepared retrieve are read.
    CommitRetrieve = "commit_retrieve", 19;
    /// Empties the cache.
    Clear = "clear", 20;
    /// Tokens of a chunk.
    GetChunkSize = "get_chunk_size", 21;
    /// Sign of life.
    Ping = "ping", 22;
    /// Which blocks the engine gave to which request; counted.
    ReportBlockAllocation = "report_block_allocation", 23;
    /// Answers "OK".
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
    /// Optional capabilities of this server.
    GetExperimental = "get_experimental", 32;
    /// CacheBlend; not supported.
    CbProtocolHandshake = "cb_protocol_handshake", 33;
    /// A stream of stored and removed chunks.
    SubscribeKvEvents = "subscribe_kv_events";
    /// Extensions of LMCache's server; not supported.
    ServerModuleCall = "server_module_call";
    /// CacheBlend; not supported.
    CbReorderPlan = "cb_reorder_plan";
}

impl Operation {
    /// The operation with this number.
    pub fn from_id(id: u64) -> Option<Self> {
        Self::ALL
            .iter()
            .copied()
            .find(|op| op.id().is_some_and(|known| u64::from(known) == id))
    }

    /// The operation with this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|op| op.name() == name)
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A range of a prompt and whose cache it belongs to (`IPCCacheServerKey` on the wire).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheKey {
    /// Model name as the engine gives it.
    pub model_name: String,
    /// Pieces that one chunk's KV cache is split into.
    pub world_size: u32,
    /// Piece of this worker; none for a scheduler, which means all of them.
    pub worker_id: Option<u32>,
    /// The prompt from its first token.
    pub token_ids: Vec<u32>,
    /// First token of the range; a multiple of the chunk size.
    pub start: u64,
    /// Token after the range.
    pub end: u64,
    /// The engine's name for the request.
    pub request_id: String,
    /// Tenant.
    pub cache_salt: String,
    /// Workers that will each retrieve the same piece (MLA under tensor parallelism); 0 when
    /// the client did not say.
    pub num_kv_readers: u32,
    /// Settings of the request: what its `kv_transfer_params` say to this server.
    pub configs: RequestConfigs,
}

/// Settings of one request, from the entries of its `kv_transfer_params` that begin with
/// `lmcache.`, which the stock connector forwards as `request_configs`. Other entries are ignored.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RequestConfigs {
    /// `lmcache.skip_save`: chunks of this request are not stored.
    pub skip_save: bool,
}

/// One KV group of an engine: layers that share block ids and a shape.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EngineGroup {
    /// The engine's block-id space.
    pub engine_group_id: u32,
    /// Indices into the registered tensors.
    pub layer_indices: Vec<u32>,
    /// Tokens that one block id covers; 0 when the engine did not say.
    pub tokens_per_block: u32,
    /// Sliding window in tokens; negative when there is none.
    pub sw_size_tokens: i64,
    /// Whether the pages hold recurrent state rather than attention KV.
    pub recurrent_state: bool,
}

/// Registration of memory that the server copies from and to.
#[derive(Debug, Clone, PartialEq)]
pub struct RegisterKvCache {
    /// The worker's id.
    pub instance_id: u64,
    /// One descriptor a layer.
    pub kv_caches: Vec<KvDescriptor>,
    /// Model name as the engine gives it.
    pub model_name: String,
    /// Pieces that one chunk's KV cache is split into.
    pub world_size: u32,
    /// `vllm`, `sglang`, …
    pub engine_type: String,
    /// `NHD`, `HND`, … when the engine said so.
    pub kv_layout: Option<String>,
    /// Empty for a model with a single group.
    pub groups: Vec<EngineGroup>,
}

/// Registration of a worker that copies by itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineDrivenContext {
    /// The worker's id.
    pub instance_id: u64,
    /// Model name as the engine gives it.
    pub model_name: String,
    /// Pieces that one chunk's KV cache is split into.
    pub world_size: u32,
    /// Tokens of a block.
    pub block_size: u32,
    /// Layers of the model on this worker.
    pub num_layers: u32,
    /// Elements of one token in one layer and plane.
    pub hidden_dim_size: u32,
    /// Torch name of the element type.
    pub dtype: String,
    /// One plane instead of two (MLA, or K and V packed).
    pub use_mla: bool,
    /// Tokens of a chunk as the worker lays it out; none means the server's chunk size.
    pub num_physical_slots: Option<u32>,
}

/// Blocks and tokens that the engine added to a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockAllocation {
    /// The engine's name for the request.
    pub request_id: String,
    /// How many blocks.
    pub blocks: usize,
    /// How many tokens.
    pub tokens: usize,
}

/// What a client asks.
#[derive(Debug, Clone, PartialEq)]
pub enum Request {
    /// See [`Operation::RegisterKvCache`].
    RegisterKvCache(Box<RegisterKvCache>),
    /// See [`Operation::UnregisterKvCache`] and [`Operation::UnregisterEngineDriven`].
    Unregister {
        /// The worker's id.
        instance_id: u64,
        /// Which of the two operations it came as.
        engine_driven: bool,
    },
    /// See [`Operation::RegisterEngineDriven`].
    RegisterEngineDriven(EngineDrivenContext),
    /// See [`Operation::Store`].
    Store {
        /// Range to store.
        key: CacheKey,
        /// The worker's id.
        instance_id: u64,
        /// Block ids for each KV group.
        block_ids: Vec<Vec<u32>>,
    },
    /// See [`Operation::Retrieve`].
    Retrieve {
        /// Range to retrieve.
        key: CacheKey,
        /// The worker's id.
        instance_id: u64,
        /// Block ids for each KV group.
        block_ids: Vec<Vec<u32>>,
        /// Tokens at the start of the range that must not be written.
        skip_first_n_tokens: u64,
    },
    /// See [`Operation::Lookup`].
    Lookup(CacheKey),
    /// See [`Operation::QueryPrefetchStatus`].
    QueryPrefetchStatus {
        /// The engine's name for the request.
        request_id: String,
    },
    /// See [`Operation::WaitPrefetchStatus`].
    WaitPrefetchStatus {
        /// The engine's name for the request.
        request_id: String,
        /// Longest wait, seconds.
        timeout: f64,
    },
    /// See [`Operation::FreeLookupLocks`].
    FreeLookupLocks(CacheKey),
    /// See [`Operation::EndSession`].
    EndSession {
        /// The engine's name for the request.
        request_id: String,
    },
    /// See [`Operation::PrepareStore`].
    PrepareStore {
        /// Range to store.
        key: CacheKey,
        /// The worker's id.
        instance_id: u64,
    },
    /// See [`Operation::CommitStore`].
    CommitStore {
        /// Range that was prepared.
        key: CacheKey,
        /// The worker's id.
        instance_id: u64,
        /// Bytes of a pickled payload that came along; it is never loaded.
        pickled: usize,
    },
    /// See [`Operation::PrepareRetrieve`].
    PrepareRetrieve {
        /// Range to retrieve.
        key: CacheKey,
        /// The worker's id.
        instance_id: u64,
    },
    /// See [`Operation::CommitRetrieve`].
    CommitRetrieve {
        /// Range that was prepared.
        key: CacheKey,
        /// The worker's id.
        instance_id: u64,
    },
    /// See [`Operation::Clear`].
    Clear {
        /// Also forget what is leased; its memory comes back when the leases end.
        force: bool,
    },
    /// See [`Operation::GetChunkSize`].
    GetChunkSize,
    /// See [`Operation::Ping`].
    Ping {
        /// The worker's id; none for a scheduler.
        instance_id: Option<u64>,
    },
    /// See [`Operation::ReportBlockAllocation`].
    ReportBlockAllocation {
        /// Process id of the scheduler.
        instance_id: u64,
        /// Model name as the engine gives it.
        model_name: String,
        /// One record a request.
        records: Vec<BlockAllocation>,
    },
    /// See [`Operation::Noop`].
    Noop,
    /// See [`Operation::GetExperimental`].
    GetExperimental,
    /// See [`Operation::SubscribeKvEvents`].
    SubscribeKvEvents {
        /// The worker's id; it has at most one subscription.
        instance_id: u64,
        /// Only chunks of this model.
        model_name: String,
        /// Last sequence number that the subscriber knows.
        cursor: u64,
        /// Most events of one batch, 1 to 1024.
        max_events: usize,
    },
}

impl Request {
    /// The operation that this asks for.
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
            Self::FreeLookupLocks(_) => Operation::FreeLookupLocks,
            Self::EndSession { .. } => Operation::EndSession,
            Self::PrepareStore { .. } => Operation::PrepareStore,
            Self::CommitStore { .. } => Operation::CommitStore,
            Self::PrepareRetrieve { .. } => Operation::PrepareRetrieve,
            Self::CommitRetrieve { .. } => Operation::CommitRetrieve,
            Self::Clear { .. } => Operation::Clear,
            Self::GetChunkSize => Operation::GetChunkSize,
            Self::Ping { .. } => Operation::Ping,
            Self::ReportBlockAllocation { .. } => Operation::ReportBlockAllocation,
            Self::Noop => Operation::Noop,
            Self::GetExperimental => Operation::GetExperimental,
            Self::SubscribeKvEvents { .. } => Operation::SubscribeKvEvents,
        }
    }
}

/// Where one chunk lies in the shared pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlotDescriptor {
    /// Bytes from the start of the pool.
    pub offset: u64,
    /// Bytes of the chunk.
    pub length: u64,
    /// Shape of the tensor.
    pub shape: Vec<u64>,
    /// Torch name of the element type.
    pub dtype: String,
}

/// What happened to a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvEventKind {
    /// It can be found.
    Stored,
    /// It is gone.
    Removed,
}

/// One change of the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvEvent {
    /// Position in the server's log.
    pub seq: u64,
    /// What happened.
    pub kind: KvEventKind,
    /// Model whose chunk it is.
    pub model_name: String,
    /// Prefix hash of the chunk.
    pub hash: Vec<u8>,
    /// Prefix hash of the chunk before it; none for the first chunk and for removals.
    pub parent: Option<Vec<u8>>,
    /// Tokens of the chunk; empty for removals.
    pub tokens: Vec<u32>,
}

/// A run of changes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvEventBatch {
    /// Whether the server keeps a log at all.
    pub enabled: bool,
    /// Changes with each start of the server.
    pub incarnation: u64,
    /// Where to go on.
    pub next_cursor: u64,
    /// Whether changes between the cursor and the first event were dropped.
    pub lost: bool,
    /// The changes, oldest first.
    pub events: Vec<KvEvent>,
}

impl KvEventBatch {
    /// Bytes of the encoded batch, about.
    pub(crate) fn encoded_bytes(&self) -> usize {
        let event = |event: &KvEvent| 160 + event.model_name.len() + 5 * event.tokens.len();
        self.events.iter().map(event).sum()
    }
}

/// What the server answers.
#[derive(Debug, Clone, PartialEq)]
pub enum Reply {
    /// Done, nothing to say.
    None,
    /// Yes or no.
    Bool(bool),
    /// A number.
    Int(u64),
    /// A text.
    Text(String),
    /// Texts.
    Strings(Vec<String>),
    /// Registration of a worker that copies by itself.
    Registered {
        /// Name of the shared pool, without the leading slash.
        shm_name: String,
        /// Bytes of the pool.
        pool_size: u64,
    },
    /// Slots to write.
    StoreSlots {
        /// One slot for each chunk to write.
        slots: Vec<SlotDescriptor>,
        /// Position of each slot's chunk in the range.
        chunk_indices: Vec<u64>,
    },
    /// Slots to read; none when a chunk is missing.
    RetrieveSlots(Option<Vec<SlotDescriptor>>),
    /// Outcome of a copy by the server.
    Transferred(bool),
    /// Changes of the cache.
    Events(KvEventBatch),
    /// The operation was not carried out; the text says why.
    ///
    /// It travels in place of the operation's name, which makes the stock client's future fail
    /// at once with this text.
    Error(String),
}
