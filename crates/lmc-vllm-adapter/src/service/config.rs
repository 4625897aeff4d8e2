//! Settings of a [`Service`](crate::Service).

use std::sync::Arc;
use std::time::Duration;

use lmc_key::{ChunkHasher, IdentityText};
use thiserror::Error;

use crate::service::request_log::RequestLog;

/// Settings of a service.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ServiceConfig {
    /// Chunk size and hash algorithm.
    pub hasher: ChunkHasher,
    /// Text that the operator adds to the identity of every chunk, for what engines do not send:
    /// weights, revision, quantisation, format of the KV cache. Default: empty.
    pub identity: IdentityText,
    /// Bytes of the memo of chunk hashes. Default: 64 MiB.
    pub hash_memo_bytes: usize,
    /// Block id that stands for "no data". Default: 0, as vLLM has it.
    pub null_block_id: Option<u32>,
    /// Opens memory on GPUs for engines whose user is not known, such as engines in containers
    /// of their own. Default: false.
    pub isolated_ipc: bool,
    /// Time for which a lookup holds the chunks it found. Default: 300 s.
    pub lookup_lease: Duration,
    /// Idle time after which a session ends. Default: 600 s.
    pub session_ttl: Duration,
    /// Age at which a prepared transfer counts as overdue. Its slots are not released by time: the
    /// worker may still be copying. Default: 600 s.
    pub transfer_deadline: Duration,
    /// Time after which a worker that has received no answer reuses the blocks of its transfers. A
    /// copy that has not begun in half of it is not made; a copy that has not ended in three
    /// quarters of it is stopped. Default: 10 s, as in the stock client.
    pub copy_deadline: Duration,
    /// Silence after which a worker that has sent pings is removed; with zero it is never removed.
    /// Default: 120 s.
    pub reap_timeout: Duration,
    /// Silence tolerated of a worker that has never sent a ping. Default: 3600 s.
    pub registration_grace: Duration,
    /// Time between the end of a worker's connection and its removal, in which the worker may come
    /// back; a stock worker tries every 10 s. Default: 30 s.
    pub orphan_grace: Duration,
    /// Time for which slots stay held after the connection that had prepared them ended, unless the
    /// process behind it is known to be dead earlier. Must be longer than any copy of a worker
    /// takes. Default: 120 s.
    pub slot_grace: Duration,
    /// Longest time for which a lookup waits for the peers that its request names to compute
    /// chunks; with zero no lookup waits. Default: 30 s.
    pub max_source_wait: Duration,
    /// Lookups that may wait for peers to compute at a time. Default: 256.
    pub max_source_waits: usize,
    /// Makes notices of the ends of stores ([`Service::take_notices`](crate::Service::take_notices)).
    /// Default: false.
    pub notices: bool,
    /// Spans kept for a tracer that takes them
    /// ([`Service::take_spans`](crate::Service::take_spans)); with 0 none are made. Default: 0.
    pub max_spans: usize,
    /// Events kept for subscribers; 0 switches them off. Default: 32,768.
    pub kv_event_log_size: usize,
    /// Requests that the log shows, each with the reason of its misses. Default:
    /// [`RequestLog::Slow`].
    pub request_log: RequestLog,
    /// Pairs of model and tenant that have counters of their own; all further pairs share one set. A
    /// new pair replaces a pair that has been idle for 10 minutes and has no chunks in DRAM. With 0
    /// nothing is counted. Default: 64.
    pub max_usages: usize,
    /// Sessions at a time. Default: 65,536.
    pub max_sessions: usize,
    /// Chunks that lookups hold at a time, each counted for each rank. Default: 4,194,304, which
    /// take 128 MiB.
    pub max_lookup_leases: u64,
    /// Workers at a time. Default: 4,096.
    pub max_instances: usize,
    /// Prepared transfers of one worker. Default: 1,024.
    pub max_transfers: usize,
    /// Threads that run the copies of server-driven workers. Default: 2.
    pub transfer_threads: usize,
    /// Threads that help each copy. Default: 1 less than the machine's cores.
    pub copy_threads: usize,
    /// Distinguishes this start from every other in the event stream, for instance a time in
    /// nanoseconds.
    pub incarnation: u64,
}

impl ServiceConfig {
    /// Returns the defaults for this hasher.
    pub fn new(hasher: ChunkHasher) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let since_epoch = std::time::UNIX_EPOCH.elapsed().unwrap_or_default();
        Self {
            hasher,
            identity: IdentityText::default(),
            hash_memo_bytes: 64 << 20,
            null_block_id: Some(0),
            isolated_ipc: false,
            lookup_lease: Duration::from_secs(300),
            session_ttl: Duration::from_secs(600),
            transfer_deadline: Duration::from_secs(600),
            copy_deadline: Duration::from_secs(10),
            reap_timeout: Duration::from_secs(120),
            registration_grace: Duration::from_secs(3600),
            orphan_grace: Duration::from_secs(30),
            slot_grace: Duration::from_secs(120),
            max_source_wait: Duration::from_secs(30),
            max_source_waits: 256,
            notices: false,
            max_spans: 0,
            kv_event_log_size: 32_768,
            request_log: RequestLog::default(),
            max_usages: 64,
            max_sessions: 65_536,
            max_lookup_leases: 4 << 20,
            max_instances: 4096,
            max_transfers: 1024,
            transfer_threads: 2,
            copy_threads: cores.saturating_sub(1),
            incarnation: u64::try_from(since_epoch.as_nanos()).unwrap_or(u64::MAX),
        }
    }
}

/// A service cannot be started.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum ServiceError {
    /// A thread cannot be started.
    #[error("cannot start a thread: {0}")]
    Thread(#[source] Arc<std::io::Error>),
}

impl From<std::io::Error> for ServiceError {
    fn from(error: std::io::Error) -> Self {
        Self::Thread(Arc::new(error))
    }
}
