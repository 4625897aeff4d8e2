//! State of a service, for its status page and metrics.

use std::time::Instant;

use lmc_engine::{EngineStats, EngineTimes, EngineUsage, LowerStatus, TierHealth};
use lmc_key::MemoStats;
use serde::{Serialize, Serializer};

use crate::service::context::Context;
use crate::service::stats::{OperationCounts, ServiceCounts, TransportCounts};
use crate::service::usage::UsageStatus;

/// A registered worker.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct InstanceStatus {
    /// Id that the worker chose; text in JSON, whose readers may round numbers above 2^53.
    #[serde(serialize_with = "as_text")]
    pub instance_id: u64,
    /// Model name as the engine gives it.
    pub model: String,
    /// Number of ranks that each chunk's KV cache is split over.
    pub world_size: u32,
    /// `engine_driven` or `lmcache_driven`.
    pub mode: &'static str,
    /// GPU whose memory the server copies from and to.
    pub gpu: Option<String>,
    /// Bytes of the GPU's memory that are open.
    pub gpu_bytes: u64,
    /// Shape of a chunk.
    pub shape: Vec<u64>,
    /// Torch name of the element type.
    pub dtype: &'static str,
    /// Bytes of a chunk.
    pub chunk_bytes: u64,
    /// True for multi-head latent attention; `None` if the registration does not show it.
    pub mla: Option<bool>,
    /// Fingerprint of the layout, in hexadecimal.
    pub layout: String,
    /// The first fields of the registration that this version does not know; all count in the layout.
    pub unknown_fields: Vec<String>,
    /// Seconds since the registration.
    pub age_seconds: f64,
    /// Seconds since the worker's last request.
    pub silent_seconds: f64,
    /// True while the worker's connection is open.
    pub connected: bool,
    /// Processes at the other end of the worker's connection that map the pool, as far as they are
    /// known; searched for when the worker first prepares a transfer.
    pub pids: Vec<u32>,
    /// Transfers that the worker has prepared and not committed.
    pub transfers: usize,
}

/// The requests that are under way.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[non_exhaustive]
pub struct SessionStatus {
    /// Number of requests under way.
    pub sessions: usize,
    /// Number of requests whose chunks are being promoted.
    pub promoting: usize,
}

/// The transfers that workers have prepared and not committed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct TransferStatus {
    /// Stores under way, into the pool.
    pub stores: usize,
    /// Retrieves under way, out of the pool.
    pub retrieves: usize,
    /// Transfers of either kind older than the deadline: held until the worker is known to be done.
    pub overdue: usize,
    /// Transfers of either kind whose connection has ended.
    pub orphaned: usize,
    /// Slots of the stores among the orphaned transfers.
    pub orphaned_store_slots: usize,
}

/// The slots of a connection that has ended, and the reason why they are still held.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct HeldStatus {
    /// Address of the other end.
    pub peer: String,
    /// Processes that held the other end and map the pool, as far as they are known.
    pub pids: Vec<u32>,
    /// Slots of transfers that were prepared and not committed.
    pub slots: usize,
    /// Seconds since the connection ended.
    pub seconds: f64,
    /// Condition of the release: `grace` (the process is unknown, or may be running), `stopped`
    /// (the process is stopped or frozen and could continue to copy) or `dead` (the slots are
    /// released at once).
    pub waits_for: &'static str,
}

/// The event log.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[non_exhaustive]
pub struct EventLogStatus {
    /// True if there is an event log.
    pub enabled: bool,
    /// Id of this start, another with each start; text in JSON, as ids are.
    #[serde(serialize_with = "as_text")]
    pub incarnation: u64,
    /// Events kept.
    pub depth: usize,
    /// Events that can be kept.
    pub capacity: usize,
    /// Sequence number of the next event.
    pub next_seq: u64,
    /// Subscriptions.
    pub subscribers: usize,
}

/// State of the whole service at one moment.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ServiceStatus {
    /// Tokens of a chunk.
    pub chunk_size: u32,
    /// Hash algorithm of chunks.
    pub hash_algorithm: String,
    /// Text that the operator added to the identity of every chunk; empty by default.
    pub identity: String,
    /// Seconds since the start.
    pub uptime_seconds: f64,
    /// True while no chunks are stored.
    pub is_draining: bool,
    /// Workers, oldest first.
    pub instances: Vec<InstanceStatus>,
    /// Bytes of the pool that are registered with the driver of GPUs.
    pub gpu_registered_bytes: u64,
    /// Requests under way.
    pub sessions: SessionStatus,
    /// Transfers under way.
    pub transfers: TransferStatus,
    /// Slots of connections that have ended, the longest held first.
    pub held: Vec<HeldStatus>,
    /// State of each tier, fastest first.
    pub tiers: Vec<TierHealth>,
    /// Contents of the tiers below DRAM, and chunks moved to and from them.
    pub lower: Vec<LowerStatus>,
    /// Memory, leases, reservations.
    pub usage: EngineUsage,
    /// Counters of the tiers.
    pub engine: EngineStats,
    /// Times that the engine has measured.
    #[serde(skip)]
    pub times: EngineTimes,
    /// Event log.
    pub events: EventLogStatus,
    /// Bytes of the memo of chunk hashes.
    pub memo_bytes: usize,
    /// Chunks whose hash was known.
    pub memo_known: u64,
    /// Chunks that were hashed.
    pub memo_hashed: u64,
    /// Counters of the service.
    pub counts: ServiceCounts,
    /// Names of the fields in which the space of the last lookup that missed for the reason
    /// `other_space` differs from the space that has the chunk.
    pub other_space_differs: Vec<&'static str>,
    /// Counts of each model and tenant, the common ones first. They contain salts in clear text, so
    /// they are not part of the status that users see.
    #[serde(skip)]
    pub usages: Vec<UsageStatus>,
    /// Counters of the transport.
    pub transport: TransportCounts,
    /// Counters of each operation.
    pub operations: Vec<OperationCounts>,
}

fn as_text<S: Serializer>(id: &u64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(id)
}

impl ServiceStatus {
    /// Composes the status of the parts.
    pub(super) fn of(
        context: &Context,
        instances: Vec<InstanceStatus>,
        gpu_registered_bytes: u64,
        sessions: SessionStatus,
        transfers: TransferStatus,
        held: Vec<HeldStatus>,
        now: Instant,
    ) -> Self {
        let memo: MemoStats = context.memo.stats();
        let events = context.events.status();
        let uptime = now.saturating_duration_since(context.started);
        Self {
            chunk_size: context.config.hasher.chunk_size(),
            hash_algorithm: context.config.hasher.algorithm().to_string(),
            identity: context.config.identity.to_string(),
            uptime_seconds: uptime.as_secs_f64(),
            is_draining: context.engine.is_draining(),
            instances,
            gpu_registered_bytes,
            sessions,
            transfers,
            held,
            tiers: context.engine.health(),
            lower: context.engine.lower_status(),
            usage: context.engine.usage(),
            engine: context.engine.stats(),
            times: context.engine.times(),
            events: EventLogStatus {
                enabled: events.enabled,
                incarnation: events.incarnation,
                depth: events.depth,
                capacity: events.capacity,
                next_seq: events.next_seq,
                subscribers: events.subscribers,
            },
            memo_bytes: memo.bytes,
            memo_known: memo.known,
            memo_hashed: memo.hashed,
            counts: context.stats.service.snapshot(),
            other_space_differs: context.other_space_differs.lock().clone(),
            usages: context.spaces.usage_status(),
            transport: context.stats.transport(),
            operations: context.stats.operations(),
        }
    }
}
