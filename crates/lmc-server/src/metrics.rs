//! The `/metrics` page: every name in one table, which `docs/metrics.md` repeats.
//!
//! Metrics have the names of LMCache's MP server where the meaning is the same, so that dashboards keep
//! working; names of the process (`process_`) are those of Prometheus' own clients; all other names begin with
//! `lmc_`. LMCache's names have the form that its Prometheus exporter
//! gives to `lmcache_mp.lookups` and the like: the unit follows the name, then `_total`. Durations and
//! speeds come from completed operations only.

use std::fmt::Write;

use lmc_backend_disk::FORMAT_VERSION;
use lmc_backend_p2p::directory::DirectoryStatus;
use lmc_engine::{DistributionSnapshot, EngineTimes, HistogramSnapshot, LowerStatus};
use lmc_key::Salt;
use lmc_vllm_adapter::{LMCACHE_RELEASE, ServiceStatus, UsageStatus};

use crate::log;
use crate::process::{self, OwnProcess};

/// Content type of the text exposition format.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// One series of the page: a name, with its labels if it has any.
struct Metric {
    name: &'static str,
    kind: &'static str,
    help: &'static str,
    value: fn(&ServiceStatus) -> f64,
}

macro_rules! metrics {
    ($($name:literal $kind:ident $help:literal = |$status:ident| $value:expr;)+) => {
        static METRICS: &[Metric] = &[$(Metric {
            name: $name,
            kind: stringify!($kind),
            help: $help,
            value: |$status| ($value) as f64,
        }),+];
    };
}

metrics! {
    "lmcache_mp_lookups_requests_total" counter "Lookups answered." = |s| s.counts.lookups;
    "lmcache_mp_lookup_early_exit_requests_total{reason=\"no_gpu_context\"}" counter "Lookups for a model that no engine has registered." = |s| s.counts.lookups_unregistered;
    "lmcache_mp_lookup_requested_tokens_total" counter "Tokens of whole chunks that lookups asked for." = |s| s.counts.lookup_tokens;
    "lmcache_mp_lookup_hit_tokens_total" counter "Tokens that lookups found, in any tier. Engines need not retrieve them: see lmc_retrieved_tokens_total." = |s| s.counts.hit_tokens;
    "lmcache_mp_lookup_hit_l1_tokens_total" counter "Tokens that lookups found in memory." = |s| s.counts.hit_tokens_dram;
    "lmcache_mp_lookup_hit_l2_tokens_total" counter "Tokens that lookups found in lower tiers, in addition to those in memory." = |s| s.counts.hit_tokens_lower;
    "lmc_tail_hit_tokens_total" counter "Tokens of tails, the blocks after a prompt's last whole chunk, that lookups of lmc's own connector found. Not in lmcache_mp_lookup_hit_tokens_total." = |s| s.counts.hit_tokens_tail;
    "lmc_tail_retrieved_tokens_total" counter "Tokens of tails that engines retrieved. Not in lmc_retrieved_tokens_total." = |s| s.counts.retrieved_tokens_tail;
    "lmc_lookup_missed_tokens_total{reason=\"never_stored\"}" counter "Tokens of whole chunks that lookups did not find, by the reason why the first missing chunk was missing. docs/misses.md explains the reasons, and says which are probable. The sum is the requested tokens that were not found, without lookups that ended before their answer." = |s| s.counts.missed_never_stored;
    "lmc_lookup_missed_tokens_total{reason=\"evicted\"}" counter "" = |s| s.counts.missed_evicted;
    "lmc_lookup_missed_tokens_total{reason=\"cleared\"}" counter "" = |s| s.counts.missed_cleared;
    "lmc_lookup_missed_tokens_total{reason=\"removed\"}" counter "" = |s| s.counts.missed_removed;
    "lmc_lookup_missed_tokens_total{reason=\"other_space\"}" counter "" = |s| s.counts.missed_other_space;
    "lmc_lookup_missed_tokens_total{reason=\"other_settings\"}" counter "" = |s| s.counts.missed_other_settings;
    "lmc_lookup_missed_tokens_total{reason=\"unregistered\"}" counter "" = |s| s.counts.missed_unregistered;
    "lmc_lookup_missed_tokens_total{reason=\"tier_late\"}" counter "" = |s| s.counts.missed_tier_late;
    "lmc_lookup_missed_tokens_total{reason=\"tier_down\"}" counter "" = |s| s.counts.missed_tier_down;
    "lmc_lookup_missed_tokens_total{reason=\"tier_lost\"}" counter "" = |s| s.counts.missed_tier_lost;
    "lmc_lookup_missed_tokens_total{reason=\"limit\"}" counter "" = |s| s.counts.missed_limit;
    "lmc_lookup_missed_tokens_total{reason=\"recompute\"}" counter "" = |s| s.counts.missed_recompute;
    "lmc_lookup_tail_tokens_total" counter "Tokens after the last whole chunks of prompts, which the stock connector cannot cache. Neither in lmcache_mp_lookup_requested_tokens_total nor in lmc_lookup_missed_tokens_total." = |s| s.counts.lookup_tail_tokens;
    "lmc_retrieved_tokens_total" counter "Tokens of chunks that engines retrieved: hits. Each token is counted once, however many workers an engine has." = |s| s.counts.retrieved_tokens;
    "lmcache_mp_l1_read_chunks_total" counter "Chunks read from memory by engines, and for copies to lower tiers." = |s| s.counts.retrieved_chunks + s.lower.iter().map(|tier| tier.written).sum::<u64>();
    "lmcache_mp_l1_write_chunks_total" counter "Chunks written to memory by engines, and by promotion from lower tiers." = |s| s.counts.stored_chunks + s.lower.iter().map(|tier| tier.promoted).sum::<u64>();
    "lmcache_mp_num_chunks_loaded_total" counter "Chunks loaded into engines." = |s| s.counts.retrieved_chunks;
    "lmcache_mp_l1_memory_usage_bytes" gauge "Bytes of the pool that are in use." = |s| s.usage.used_bytes;
    "lmcache_mp_l1_usage_ratio" gauge "Share of the pool that is in use." = |s| s.usage.used_bytes as f64 / (s.usage.pool_bytes as f64).max(1.0);
    "lmcache_mp_l1_evicted_chunks_total" counter "Chunks evicted." = |s| s.engine.evicted_room + s.engine.evicted_quota + s.engine.evicted_watermark;
    "lmcache_mp_l1_allocation_failure_chunks_total{during=\"l1_store\"}" counter "Chunks not stored because no pool memory could be reserved for them." = |s| s.counts.chunks_no_room;
    "lmcache_mp_num_finished_stores_total" counter "Stores that ended, with or without success." = |s| s.counts.stores + s.counts.stores_failed;
    "lmcache_mp_num_finished_retrieves_total" counter "Retrieves that ended, with or without success." = |s| s.counts.retrieves + s.counts.retrieves_missed;
    "lmcache_mp_l1_eviction_loop_ticks_total" counter "Checks of the pool's watermark." = |s| s.engine.watermark_checks;
    "lmcache_mp_l1_eviction_loop_triggered_total" counter "Checks of the pool's watermark that evicted chunks." = |s| s.engine.watermark_evictions;
    "lmcache_mp_l2_store_submitted_requests_total" counter "Batches of chunks that lower tiers were given to write." = |s| of_tiers(s, |tier| tier.write_batches);
    "lmcache_mp_l2_store_submitted_objects_chunks_total" counter "Chunks that lower tiers were given to write." = |s| of_tiers(s, |tier| tier.write_given);
    "lmcache_mp_l2_store_completed_objects_chunks_total" counter "Chunks that lower tiers have written." = |s| of_tiers(s, |tier| tier.written);
    "lmcache_mp_l2_prefetch_lookup_requests_total" counter "Lookups that did not find all chunks in memory and continued in lower tiers." = |s| s.engine.lower_lookups;
    "lmcache_mp_l2_prefetch_lookup_objects_chunks_total" counter "Chunks that lookups asked lower tiers for, counted for each rank." = |s| s.engine.lower_lookup_chunks;
    "lmcache_mp_l2_prefetch_load_submitted_requests_total" counter "Batches of chunks that lower tiers were asked to read." = |s| of_tiers(s, |tier| tier.promote_batches);
    "lmcache_mp_l2_prefetch_load_submitted_objects_chunks_total" counter "Chunks that lower tiers were asked to read." = |s| of_tiers(s, |tier| tier.promote_asked);
    "lmcache_mp_l2_prefetch_load_completed_chunks_total" counter "Chunks that were read from lower tiers." = |s| of_tiers(s, |tier| tier.promoted);
    "lmcache_mp_l2_prefetch_failure_chunks_total{reason=\"not_found\"}" counter "Chunks that were expected in a lower tier and were not read, by reason: the tier did not have the chunk, or the read failed or was late." = |s| of_tiers(s, |tier| tier.promote_missed);
    "lmcache_mp_l2_prefetch_failure_chunks_total{reason=\"failed\"}" counter "" = |s| of_tiers(s, |tier| tier.promote_failed);
    "lmcache_mp_active_prefetch_jobs" gauge "Lookups whose chunks are being promoted." = |s| s.sessions.promoting;
    "lmcache_mp_kv_events_log_depth" gauge "Events kept for subscribers." = |s| s.events.depth;
    "lmc_uptime_seconds" gauge "Seconds since the start." = |s| s.uptime_seconds;
    "lmc_pool_bytes" gauge "Bytes of the pool." = |s| s.usage.pool_bytes;
    "lmc_pool_prefaulted_bytes" gauge "Bytes of the pool that are backed by physical memory." = |s| s.usage.prefaulted_bytes;
    "lmc_pool_largest_free_bytes" gauge "Longest run of free bytes in the pool." = |s| s.usage.largest_free_bytes;
    "lmc_chunks" gauge "Chunks that can be found." = |s| s.usage.chunks;
    "lmc_chunk_bytes" gauge "Bytes of chunks that can be found." = |s| s.usage.chunk_bytes;
    "lmc_leases" gauge "Leases of chunks in memory." = |s| s.usage.leases;
    "lmc_pinned_chunks" gauge "Chunks pinned in memory." = |s| s.usage.pinned;
    "lmc_reserved_slots" gauge "Slots reserved and not committed." = |s| s.usage.reserved_slots;
    "lmc_quarantined_slots" gauge "Slots to which a failed copy may still be writing." = |s| s.usage.quarantined_slots;
    "lmc_pool_withheld_bytes" gauge "Bytes of the pool for which the system has no memory, because /dev/shm is full." = |s| s.usage.withheld_bytes;
    "lmc_faulty_tiers" gauge "Tiers with a fault, which GET /status names." = |s| s.tiers.iter().filter(|tier| tier.fault.is_some()).count();
    "lmc_draining" gauge "1 while the server is drained and stores no chunks, else 0." = |s| u64::from(s.is_draining);
    "lmc_sessions" gauge "Requests under way." = |s| s.sessions.sessions;
    "lmc_workers" gauge "Workers registered." = |s| s.instances.len();
    "lmc_pending_stores" gauge "Stores prepared and not committed." = |s| s.transfers.stores;
    "lmc_pending_retrieves" gauge "Retrieves prepared and not committed." = |s| s.transfers.retrieves;
    "lmc_orphaned_transfers" gauge "Stores and retrieves whose connection has ended; their slots are still held." = |s| s.transfers.orphaned;
    "lmc_overdue_transfers" gauge "Stores and retrieves that are past their deadline." = |s| s.transfers.overdue;
    "lmc_stores_total" counter "Stores that succeeded." = |s| s.counts.stores;
    "lmc_retrieves_total" counter "Retrieves that succeeded." = |s| s.counts.retrieves;
    "lmc_stored_chunks_total" counter "Chunks that engines stored." = |s| s.counts.stored_chunks;
    "lmc_stored_bytes_total" counter "Bytes of chunks that engines stored." = |s| s.counts.stored_bytes;
    "lmc_retrieved_chunks_total" counter "Chunks that engines retrieved." = |s| s.counts.retrieved_chunks;
    "lmc_retrieved_bytes_total" counter "Bytes of chunks that engines retrieved." = |s| s.counts.retrieved_bytes;
    "lmc_stores_skipped_total" counter "Stores skipped because the request asked for it (lmcache.skip_save), or because its engine may change the blocks before they are copied (sliding windows with lmcache_driven)." = |s| s.counts.stores_skipped;
    "lmc_source_waits_total" counter "Lookups whose request names a peer, and that may wait until the peer's engine has computed the prompt (lmcache.pd.wait_ms)." = |s| s.counts.source_waits;
    "lmc_source_waits_refused_total" counter "Lookups that did not wait for a peer because too many other lookups waited." = |s| s.counts.source_waits_refused;
    "lmc_pushes_unknown_total" counter "Lookups whose request names a peer to push to (lmcache.pd.to) that is not connected." = |s| s.counts.pushes_unknown;
    "lmc_pd_notices_total{outcome=\"stored\"}" counter "Notices of requests for the proxies of --pd-notify, by outcome: all ranks have stored the chunks, or the request has failed." = |s| s.counts.notices_stored;
    "lmc_pd_notices_total{outcome=\"failed\"}" counter "" = |s| s.counts.notices_failed;
    "lmc_pd_notices_lost_total" counter "Notices that a proxy of --pd-notify did not take in time, counted for each proxy." = |s| s.counts.notices_lost;
    "lmc_spans_lost_total" counter "Spans that the collector of --otlp-endpoint refused, or did not take in time." = |s| s.counts.spans_lost;
    "lmc_stores_failed_total" counter "Stores that were dropped or failed." = |s| s.counts.stores_failed;
    "lmc_stores_abandoned_total" counter "Stores abandoned by a worker that went away." = |s| s.counts.stores_abandoned;
    "lmc_commits_foreign_total" counter "Commits and unregistrations refused because another connection owns the transfer or the worker." = |s| s.counts.commits_foreign;
    "lmc_slots_orphaned_total" counter "Slots that stayed held after the end of the connection that had prepared them." = |s| s.counts.slots_orphaned;
    "lmc_slots_released_by_death_total" counter "Slots of ended connections released because their process was dead." = |s| s.counts.slots_released_by_death;
    "lmc_slots_released_by_worker_total" counter "Slots of ended connections released because their worker reported that none of its copies uses them." = |s| s.counts.slots_released_by_worker;
    "lmc_slots_released_by_grace_total" counter "Slots of ended connections released because the grace time was over." = |s| s.counts.slots_released_by_grace;
    "lmc_retrieves_missed_total" counter "Retrieves that missed a chunk." = |s| s.counts.retrieves_missed;
    "lmc_gather_seconds_total" counter "Time that the server spent copying into the pool." = |s| s.counts.gather_nanos as f64 / 1e9;
    "lmc_gather_bytes_total" counter "Bytes that the server copied into the pool." = |s| s.counts.gather_bytes;
    "lmc_scatter_seconds_total" counter "Time that the server spent copying out of the pool." = |s| s.counts.scatter_nanos as f64 / 1e9;
    "lmc_scatter_bytes_total" counter "Bytes that the server copied out of the pool." = |s| s.counts.scatter_bytes;
    "lmc_commits_unknown_total" counter "Commits of transfers that were not prepared." = |s| s.counts.commits_unknown;
    "lmc_pickles_refused_total" counter "Pickled payloads refused." = |s| s.counts.pickles_refused;
    "lmc_registrations_total" counter "Workers registered since the start." = |s| s.counts.registrations;
    "lmc_registrations_refused_total" counter "Registrations refused." = |s| s.counts.registrations_refused;
    "lmc_opaque_layouts_shared_total" counter "Number of times that two engines were found to share a KV layout of dtype uint8, which does not name its format: one of the engines may read wrong KV data." = |s| s.counts.opaque_layouts_shared;
    "lmc_workers_reaped_total" counter "Workers removed because they sent no messages or their connection ended." = |s| s.counts.workers_reaped;
    "lmc_sessions_expired_total" counter "Sessions that expired." = |s| s.counts.sessions_expired;
    "lmc_lookup_leases_expired_total" counter "Leases of lookups that expired." = |s| s.counts.lookup_leases_expired;
    "lmc_copies_too_late_total" counter "Copies that were not made, or were stopped, because their worker was gone or no longer waited." = |s| s.counts.copies_too_late;
    "lmc_over_limit_total" counter "Requests refused because a limit was reached." = |s| s.counts.over_limit;
    "lmc_pings_total" counter "Pings of workers." = |s| s.counts.pings;
    "lmc_reported_blocks_total" counter "Blocks that engines reported as allocated." = |s| s.counts.reported_blocks;
    "lmc_chunks_present_total" counter "Chunks not stored because they were already stored or being written." = |s| s.counts.chunks_present;
    "lmc_chunks_outdated_total" counter "Chunks not stored because the cache was cleared, or may have been cleared, since their request began." = |s| s.counts.chunks_outdated;
    "lmc_chunks_drained_total" counter "Chunks not stored because the server was being drained." = |s| s.counts.chunks_drained;
    "lmc_chunks_null_total" counter "Chunks not stored because the engine had dropped some of their blocks." = |s| s.counts.chunks_null;
    "lmc_chunk_hits_total" counter "Chunks that lookups and retrieves asked for and found, each time." = |s| s.engine.hits;
    "lmc_chunk_misses_total" counter "Chunks that lookups and retrieves asked for and did not find, each time." = |s| s.engine.misses;
    "lmc_chunks_merged_total" counter "Chunks merged from the chunks of several ranks of an engine with more tensor parallelism." = |s| s.engine.merged;
    "lmc_chunks_removed_total" counter "Chunks removed by their keys." = |s| s.engine.removed;
    "lmc_chunks_cleared_total" counter "Chunks removed by a clear." = |s| s.engine.cleared;
    "lmc_clears_total{from=\"here\"}" counter "Clears that were carried out, by origin: this server, or other servers through peers, stores or drives." = |s| s.engine.clears_here;
    "lmc_clears_total{from=\"elsewhere\"}" counter "" = |s| s.engine.clears_elsewhere;
    "lmc_reservations_over_quota_total" counter "Reservations refused by a quota." = |s| s.engine.over_quota;
    "lmc_evicted_chunks_total{reason=\"room\"}" counter "Chunks evicted, by reason: memory for another chunk, a quota, or the watermark." = |s| s.engine.evicted_room;
    "lmc_evicted_chunks_total{reason=\"quota\"}" counter "" = |s| s.engine.evicted_quota;
    "lmc_evicted_chunks_total{reason=\"watermark\"}" counter "" = |s| s.engine.evicted_watermark;
    "lmc_kv_events_total" counter "KV events since the start." = |s| s.events.next_seq;
    "lmc_kv_event_subscribers" gauge "Subscriptions to KV events." = |s| s.events.subscribers;
    "lmc_evicted_bytes_total" counter "Bytes of evicted chunks." = |s| s.engine.evicted_bytes;
    "lmc_hash_memo_bytes" gauge "Bytes of memory that the memo of chunk hashes uses." = |s| s.memo_bytes;
    "lmc_hash_memo_known_total" counter "Chunks whose hash was in the memo." = |s| s.memo_known;
    "lmc_hash_memo_hashed_total" counter "Chunks that were hashed." = |s| s.memo_hashed;
    "lmc_connections" gauge "Open connections." = |s| s.transport.connections_open;
    "lmc_connections_accepted_total" counter "Connections accepted." = |s| s.transport.connections_accepted;
    "lmc_connections_refused_total" counter "Connections closed at once because there were too many." = |s| s.transport.connections_refused;
    "lmc_connections_untrusted_total" counter "Connections closed at once because their user is not one of --trusted-users, or because the client had closed its end before its user was known." = |s| s.transport.untrusted;
    "lmc_connections_broken_total" counter "Connections closed because the client broke the protocol." = |s| s.transport.broken;
    "lmc_connections_stalled_total" counter "Connections closed because the client stalled." = |s| s.transport.stalled;
    "lmc_connections_silent_total" counter "Connections closed because the client sent no requests." = |s| s.transport.silent;
    "lmc_connections_closed_idle_total" counter "Connections closed to admit others: they owned nothing and had been idle for longest." = |s| s.transport.closed_idle;
    "lmc_messages_unanswerable_total" counter "Messages dropped because no valid request id could be read from them." = |s| s.transport.unanswerable;
    "lmc_unknown_operations_total" counter "Requests with an unknown operation." = |s| s.transport.unknown_operations;
    "lmc_log_lines_dropped_total" counter "Log lines that were not written because stderr is gone or is not read fast enough." = |_status| log::dropped_lines();
    "lmc_received_bytes_total" counter "Bytes received from engines." = |s| s.transport.bytes_in;
    "lmc_sent_bytes_total" counter "Bytes sent to engines." = |s| s.transport.bytes_out;
}

/// Sums a value of all lower tiers.
fn of_tiers(status: &ServiceStatus, value: fn(&LowerStatus) -> u64) -> u64 {
    status.lower.iter().map(value).sum()
}

/// Name, kind, help and value of a tier's metric.
type TierMetric = (
    &'static str,
    &'static str,
    &'static str,
    fn(&LowerStatus) -> u64,
);

/// Metrics of the lower tiers, with the label `tier`.
#[rustfmt::skip]
const TIER_METRICS: &[TierMetric] = &[
    ("lmc_tier_hit_tokens_total", "counter", "Tokens that lookups found in this lower tier. Tokens that another lookup was promoting are in lmcache_mp_lookup_hit_l2_tokens_total only.", |t| t.hit_tokens),
    ("lmc_tier_chunks", "gauge", "Chunks in this lower tier.", |t| t.chunks),
    ("lmc_tier_bytes", "gauge", "Bytes of chunks in this lower tier.", |t| t.bytes),
    ("lmc_tier_capacity_bytes", "gauge", "Bytes that this tier may hold.", |t| t.capacity.unwrap_or(0)),
    ("lmc_tier_queued_bytes", "gauge", "Bytes of chunks queued to be written to this tier.", |t| t.queued_bytes),
    ("lmc_tier_copied_chunks_total", "counter", "Chunks written to this tier since the start.", |t| t.written),
    ("lmc_tier_copied_bytes_total", "counter", "Bytes of chunks written to this tier since the start.", |t| t.written_bytes),
    ("lmc_tier_copies_dropped_total", "counter", "Chunks not written to this tier because its queue was full.", |t| t.write_dropped),
    ("lmc_tier_copies_declined_total", "counter", "Chunks that this tier declined, by its admission rule or for lack of capacity.", |t| t.write_declined),
    ("lmc_tier_copies_failed_total", "counter", "Chunks that could not be written to this tier.", |t| t.write_failed),
    ("lmc_tier_fetched_chunks_total", "counter", "Chunks promoted from this tier into memory.", |t| t.promoted),
    ("lmc_tier_fetched_bytes_total", "counter", "Bytes of chunks promoted from this tier into memory.", |t| t.promoted_bytes),
    ("lmc_tier_fetches_missed_total", "counter", "Chunks that were expected in this tier and were missing, differed from what was stored, or had another length than the chunks of their space.", |t| t.promote_missed),
    ("lmc_tier_fetches_failed_total", "counter", "Chunks that could not be read from this tier, or not in time.", |t| t.promote_failed),
    ("lmc_tier_fetches_skipped_total", "counter", "Chunks that were not read from this tier because recomputing them is faster.", |t| t.promote_skipped),
    ("lmc_tier_lookups_failed_total", "counter", "Lookups that this tier did not answer, or not in time.", |t| t.locate_failed),
];
/// Metrics of the lower tiers under LMCache's names, with the label `l2_name`.
#[rustfmt::skip]
const L2_METRICS: &[TierMetric] = &[
    ("lmcache_mp_l2_usage_bytes", "gauge", "Bytes of chunks in this lower tier.", |t| t.bytes),
    ("lmcache_mp_l2_store_completed_requests_total", "counter", "Batches of chunks whose write to this tier has ended.", |t| t.write_batches_ended),
    ("lmcache_mp_l2_load_completed_requests_total", "counter", "Batches of chunks whose read from this tier has ended.", |t| t.promote_batches_ended),
    ("lmcache_mp_num_inflight_l2_stores", "gauge", "Batches of chunks that are being written to this tier.", |t| t.write_batches.saturating_sub(t.write_batches_ended)),
    ("lmcache_mp_num_inflight_l2_loads", "gauge", "Batches of chunks that are being read from this tier.", |t| t.promote_batches.saturating_sub(t.promote_batches_ended)),
    ("lmcache_mp_inflight_load_memory_usage_bytes", "gauge", "Bytes of memory for the chunks that are being read from this tier.", |t| t.promoting_bytes),
];
/// Metrics of the lower tiers, each table with the label that names the tier.
const BY_TIER: [(&[TierMetric], &str); 2] = [(TIER_METRICS, "tier"), (L2_METRICS, "l2_name")];

/// Counters of a tier itself, with the labels `tier` and `what`.
const TIER_EVENTS: (&str, &str) = (
    "lmc_tier_events_total",
    "Events that a tier itself counts, such as damaged chunks and failed reads.",
);
/// Counters of a tier itself that count bytes, with the labels `tier` and `what`.
const TIER_EVENT_BYTES: (&str, &str) = (
    "lmc_tier_event_bytes_total",
    "Payload bytes that a tier itself counts, such as bytes read and written.",
);
/// Suffix of the names of counters that count bytes.
const BYTES: &str = "_bytes";

/// State of each tier, with the label `tier`.
const TIER_FAULTY: (&str, &str) = (
    "lmc_tier_faulty",
    "1 while this tier has a fault, which GET /status names, else 0; memory is the tier dram.",
);

/// Gauges of peers.
const PEERS: [(&str, &str); 2] = [
    ("lmc_peers_connected", "Peers that are connected."),
    (
        "lmc_peers_missing",
        "Peers of --p2p-peer and directories of --p2p-directory that are not connected; `lmc peers` names them.",
    ),
];

/// Metrics of models and tenants, with the labels `model` and `tenant`.
type TenantMetric = (
    &'static str,
    &'static str,
    &'static str,
    fn(&UsageStatus) -> u64,
);

/// Metrics of models and tenants. Models and tenants without series of their own share the label [`OTHER`].
#[rustfmt::skip]
const TENANT_METRICS: &[TenantMetric] = &[
    ("lmc_tenant_lookup_tokens_total", "counter", "Tokens of whole chunks that lookups of this model and tenant asked for. --metrics-tenants limits the pairs; all further pairs, and lookups that were refused, count as other.", |u| u.lookup_tokens),
    ("lmc_tenant_hit_tokens_total", "counter", "Tokens that lookups of this model and tenant found, in any tier.", |u| u.hit_tokens),
    ("lmc_tenant_retrieved_tokens_total", "counter", "Tokens that engines retrieved for this model and tenant.", |u| u.retrieved_tokens),
    ("lmc_tenant_stored_bytes_total", "counter", "Payload bytes that engines stored for this model and tenant.", |u| u.stored_bytes),
    ("lmc_tenant_evicted_bytes_total", "counter", "Payload bytes of this model and tenant that were evicted from memory.", |u| u.evicted_bytes),
    ("lmc_tenant_bytes", "gauge", "Payload bytes of this model and tenant in memory.", |u| u.held_bytes),
];
/// Model and tenant of all pairs that have no series of their own.
const OTHER: &str = "other";

/// Name, help and value of a histogram.
type Row<S, T> = (&'static str, &'static str, fn(&S) -> &T);

/// Histograms of the lower tiers, with the label `tier`.
#[rustfmt::skip]
const TIER_HISTOGRAMS: &[Row<LowerStatus, HistogramSnapshot>] = &[
    ("lmc_tier_fetch_seconds", "Time from asking this tier for chunks until each chunk is in memory.", |t| &t.read_time),
    ("lmc_tier_copy_seconds", "Time from passing chunks to this tier until each chunk is stored there, without the wait in the queue.", |t| &t.write_time),
];

/// Histograms of all tiers together.
#[rustfmt::skip]
const HISTOGRAMS: &[Row<EngineTimes, HistogramSnapshot>] = &[
    ("lmc_promotion_seconds", "Time from a lookup to its outcome, for lookups that asked or read lower tiers, without lookups that may wait for a peer to compute.", |t| &t.promotion),
    ("lmc_promotion_first_chunk_seconds", "Time from the start of reading a prompt from lower tiers to its first chunk in memory, for each rank.", |t| &t.first_chunk),
];

/// Histograms of whole numbers.
#[rustfmt::skip]
const DISTRIBUTIONS: &[Row<EngineTimes, DistributionSnapshot>] = &[
    ("lmcache_mp_l1_chunk_lifetime_seconds", "Time from the store of a chunk in memory to its eviction.", |t| &t.evicted_age_seconds),
    ("lmc_evicted_chunk_uses", "Number of lookups and retrieves that had found a chunk before its eviction.", |t| &t.evicted_uses),
];

/// Name, help and value of a metric of a directory.
type DirectoryMetric = (&'static str, &'static str, fn(&DirectoryStatus) -> usize);

/// Gauges of the directory that this server hosts.
#[rustfmt::skip]
const DIRECTORY_METRICS: &[DirectoryMetric] = &[
    ("lmc_directory_members", "Members of the directory that this server hosts.", |d| d.members),
    ("lmc_directory_entries", "Entries of the directory, one for each chunk of each member.", |d| d.entries),
    ("lmc_directory_entries_limit", "Limit on the entries of the directory.", |d| d.limit),
    ("lmc_directory_bytes", "Bytes of memory that the directory uses.", |d| d.bytes),
];
/// Counters of the directory, with the label `what`.
const DIRECTORY_EVENTS: (&str, &str) = (
    "lmc_directory_events_total",
    "Announcements and questions that the directory answered, by kind and outcome.",
);

/// Name, help and labels of the metric of the build.
const BUILD_INFO: (&str, &str) = (
    "lmc_build_info",
    "Version and commit of this server, version of the compiler, version of the format of its drives, and release of LMCache whose protocol it speaks, as labels; always 1.",
);
/// Labels of [`BUILD_INFO`], for the documentation.
const BUILD_LABELS: &str = "`version`, `commit`, `rustc`, `disk_format` and `lmcache`";

/// Name, kind, help and value of a metric of the process.
type ProcessMetric = (
    &'static str,
    &'static str,
    &'static str,
    fn(&OwnProcess) -> f64,
);

/// Metrics of the process, under the names of Prometheus' own clients.
#[rustfmt::skip]
const PROCESS_METRICS: &[ProcessMetric] = &[
    ("process_cpu_seconds_total", "counter", "User and system CPU time of the server.", |p| p.cpu_seconds),
    ("process_resident_memory_bytes", "gauge", "Resident memory of the server, with the pages of the pool that it has touched.", |p| p.resident_bytes as f64),
    ("process_start_time_seconds", "gauge", "Time of the start of the server, in seconds since 1970.", |p| p.start_seconds),
    ("process_open_fds", "gauge", "Open file descriptors of the server.", |p| p.open_files as f64),
    ("process_max_fds", "gauge", "Limit on the open file descriptors of the server.", |p| p.max_files as f64),
];

/// Metrics by operation, with the label `operation`.
const OPERATION_SECONDS: &str = "lmc_operation_seconds";
const OPERATION_REFUSED: &str = "lmc_operation_refused_total";

/// Returns the page. `tenant` names a salt without showing it; `connections` are the number of connected
/// peers and the number of missing peers.
pub fn page(
    status: &ServiceStatus,
    tenant: impl Fn(&Salt) -> String,
    connections: Option<(usize, usize)>,
    directory: Option<DirectoryStatus>,
) -> String {
    let mut out = String::with_capacity(16 << 10);
    let (name, help) = BUILD_INFO;
    head(&mut out, name, "gauge", help);
    let (version, commit) = (env!("CARGO_PKG_VERSION"), env!("BUILD_COMMIT"));
    let rustc = env!("BUILD_RUSTC");
    // Writing to a string cannot fail.
    let _ = writeln!(
        out,
        "{name}{{version=\"{version}\",commit=\"{commit}\",rustc=\"{rustc}\",disk_format=\"{FORMAT_VERSION}\",lmcache=\"{LMCACHE_RELEASE}\"}} 1"
    );
    if let Some(process) = process::own() {
        for (name, kind, help, value) in PROCESS_METRICS {
            head(&mut out, name, kind, help);
            let _ = writeln!(out, "{name} {}", value(&process));
        }
    }
    for metric in METRICS {
        let Metric {
            name,
            kind,
            help,
            value,
        } = metric;
        let value = value(status);
        // Series of one name follow each other; the first has the help.
        if !help.is_empty() {
            head(&mut out, family(name), kind, help);
        }
        // Writing to a string cannot fail.
        let _ = writeln!(out, "{name} {value}");
    }
    let (name, help) = TIER_FAULTY;
    head(&mut out, name, "gauge", help);
    for tier in &status.tiers {
        let (tier, is_faulty) = (&tier.tier, u8::from(tier.fault.is_some()));
        let _ = writeln!(out, "{name}{{tier=\"{tier}\"}} {is_faulty}");
    }
    if let Some((connected, missing)) = connections {
        for ((name, help), value) in PEERS.iter().zip([connected, missing]) {
            head(&mut out, name, "gauge", help);
            let _ = writeln!(out, "{name} {value}");
        }
    }
    tenants(&mut out, &status.usages, tenant);
    tiers(&mut out, &status.lower);
    for (name, help, value) in HISTOGRAMS {
        head(&mut out, name, "histogram", help);
        histogram(&mut out, name, "", value(&status.times));
    }
    for (name, help, value) in DISTRIBUTIONS {
        head(&mut out, name, "histogram", help);
        distribution(&mut out, name, value(&status.times));
    }
    if let Some(status) = directory {
        directory_metrics(&mut out, &status);
    }
    head(
        &mut out,
        OPERATION_SECONDS,
        "histogram",
        "Time from the last byte of a request to its answer.",
    );
    for operation in &status.operations {
        let latency = &operation.latency;
        if latency.count() > 0 {
            let label = format!("operation=\"{}\"", operation.operation);
            histogram(&mut out, OPERATION_SECONDS, &label, latency);
        }
    }
    head(
        &mut out,
        OPERATION_REFUSED,
        "counter",
        "Requests refused with an error text.",
    );
    for operation in &status.operations {
        let (name, refused) = (operation.operation, operation.refused);
        let _ = writeln!(out, "{OPERATION_REFUSED}{{operation=\"{name}\"}} {refused}");
    }
    out
}

fn tenants(out: &mut String, usages: &[UsageStatus], tenant: impl Fn(&Salt) -> String) {
    if usages.is_empty() {
        return;
    }
    let labels = |usage: &UsageStatus| match &usage.of {
        Some((model, salt)) => (escaped(model), escaped(&tenant(salt))),
        None => (OTHER.to_owned(), OTHER.to_owned()),
    };
    let labels: Vec<_> = usages.iter().map(labels).collect();
    for (name, kind, help, value) in TENANT_METRICS {
        head(out, name, kind, help);
        for (usage, (model, tenant)) in usages.iter().zip(&labels) {
            let value = value(usage);
            let _ = writeln!(
                out,
                "{name}{{model=\"{model}\",tenant=\"{tenant}\"}} {value}"
            );
        }
    }
}

/// Escapes a text from outside for the value of a label.
fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n")
}

fn tiers(out: &mut String, tiers: &[LowerStatus]) {
    if tiers.is_empty() {
        return;
    }
    for (metrics, label) in BY_TIER {
        for (name, kind, help, value) in metrics {
            head(out, name, kind, help);
            for tier in tiers {
                let (tier, value) = (&tier.tier, value(tier));
                let _ = writeln!(out, "{name}{{{label}=\"{tier}\"}} {value}");
            }
        }
    }
    for ((name, help), are_bytes) in [(TIER_EVENTS, false), (TIER_EVENT_BYTES, true)] {
        head(out, name, "counter", help);
        for tier in tiers {
            let counters = tier.counters.iter();
            for (what, count) in counters.filter(|(what, _)| what.ends_with(BYTES) == are_bytes) {
                let (tier, what) = (&tier.tier, what.trim_end_matches(BYTES));
                let _ = writeln!(out, "{name}{{tier=\"{tier}\",what=\"{what}\"}} {count}");
            }
        }
    }
    for (name, help, value) in TIER_HISTOGRAMS {
        head(out, name, "histogram", help);
        for tier in tiers {
            let label = format!("tier=\"{}\"", tier.tier);
            histogram(out, name, &label, value(tier));
        }
    }
}

fn directory_metrics(out: &mut String, status: &DirectoryStatus) {
    for (name, help, value) in DIRECTORY_METRICS {
        head(out, name, "gauge", help);
        let _ = writeln!(out, "{name} {}", value(status));
    }
    let (name, help) = DIRECTORY_EVENTS;
    head(out, name, "counter", help);
    for (what, count) in status.counters.named() {
        let _ = writeln!(out, "{name}{{what=\"{what}\"}} {count}");
    }
}

/// Returns the name of a series without its labels.
fn family(series: &str) -> &str {
    series.split('{').next().unwrap_or(series)
}

fn head(out: &mut String, name: &str, kind: &str, help: &str) {
    let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
}

/// Writes a histogram with buckets of whole doublings; only `lmc status` uses the finer buckets.
fn histogram(out: &mut String, name: &str, label: &str, times: &HistogramSnapshot) {
    let mut below = 0;
    // The last bucket also counts all longer times.
    let bounded = times.buckets.len().saturating_sub(1);
    let counts = times.buckets[..bounded].iter().enumerate();
    let counts = counts.map(|(index, count)| {
        below += count;
        (index, below)
    });
    let doublings = counts.filter(|(index, _)| index % 4 == 0);
    let bounds = doublings.map(|(index, below)| (HistogramSnapshot::upper_bound(index), below));
    buckets(out, name, label, bounds);
    totals(out, name, label, times.sum_seconds, times.count());
}

fn distribution(out: &mut String, name: &str, numbers: &DistributionSnapshot) {
    let mut below = 0;
    let counts = numbers.bounds.iter().zip(&numbers.buckets);
    let bounds = counts.map(|(bound, count)| {
        below += count;
        (*bound as f64, below)
    });
    buckets(out, name, "", bounds);
    let count = numbers.buckets.iter().sum();
    totals(out, name, "", numbers.sum as f64, count);
}

fn buckets(out: &mut String, name: &str, label: &str, bounds: impl Iterator<Item = (f64, u64)>) {
    let comma = if label.is_empty() { "" } else { "," };
    for (bound, below) in bounds {
        let _ = writeln!(out, "{name}_bucket{{{label}{comma}le=\"{bound}\"}} {below}");
    }
}

fn totals(out: &mut String, name: &str, label: &str, sum: f64, count: u64) {
    let (comma, labels) = match label {
        "" => ("", String::new()),
        label => (",", format!("{{{label}}}")),
    };
    let _ = writeln!(
        out,
        "{name}_bucket{{{label}{comma}le=\"+Inf\"}} {count}\n\
         {name}_sum{labels} {sum}\n\
         {name}_count{labels} {count}"
    );
}

/// Returns the page of the documentation that lists every metric.
pub fn documentation() -> String {
    let mut out = String::from(
        "# Metrics\n\n\
         The metrics that `GET /metrics` on the HTTP port shows, in Prometheus' text format.\n\
         Names that begin with `lmcache_mp_` have the same meaning as at LMCache's MP server, but not its labels for models, salts and devices; a series of a lower tier has the label `l2_name`. Names that begin with `process_` are those of Prometheus' own clients.\n\
         [alerts.md](alerts.md) has a board for Grafana and alert rules.\n\
         Durations and bytes are counted when an operation has completed, so a rate of bytes divided by a rate of seconds is a measured speed:\n\n\
         ```\n\
         rate(lmc_gather_bytes_total[1m]) / rate(lmc_gather_seconds_total[1m])                        bytes per second into the pool\n\
         rate(lmcache_mp_lookup_hit_tokens_total[5m]) / rate(lmcache_mp_lookup_requested_tokens_total[5m])   share of tokens that lookups found\n\
         rate(lmc_retrieved_tokens_total[5m]) / rate(lmcache_mp_lookup_requested_tokens_total[5m])   share of tokens that engines retrieved: the hit rate\n\
         histogram_quantile(0.99, rate(lmc_operation_seconds_bucket{operation=\"lookup\"}[5m]))\n\
         ```\n\n\
         | name | kind | meaning |\n|---|---|---|\n",
    );
    for Metric {
        name, kind, help, ..
    } in METRICS.iter().filter(|metric| !metric.help.is_empty())
    {
        let labels = labels_of(family(name));
        let _ = writeln!(out, "| `{}` | {kind}{labels} | {help} |", family(name));
    }
    let (name, help) = TIER_FAULTY;
    let _ = writeln!(out, "| `{name}` | gauge, by `tier` | {help} |");
    for (name, help) in PEERS {
        let _ = writeln!(out, "| `{name}` | gauge | {help} |");
    }
    for (name, kind, help, _) in TENANT_METRICS {
        let _ = writeln!(
            out,
            "| `{name}` | {kind}, by `model` and `tenant` | {help} |"
        );
    }
    for (metrics, label) in BY_TIER {
        for (name, kind, help, _) in metrics {
            let _ = writeln!(out, "| `{name}` | {kind}, by `{label}` | {help} |");
        }
    }
    let (name, help) = BUILD_INFO;
    let _ = writeln!(out, "| `{name}` | gauge, by {BUILD_LABELS} | {help} |");
    for (name, kind, help, _) in PROCESS_METRICS {
        let _ = writeln!(out, "| `{name}` | {kind} | {help} |");
    }
    for (name, help) in [TIER_EVENTS, TIER_EVENT_BYTES] {
        let _ = writeln!(out, "| `{name}` | counter, by `tier` and `what` | {help} |");
    }
    for (name, help, _) in TIER_HISTOGRAMS {
        let _ = writeln!(out, "| `{name}` | histogram, by `tier` | {help} |");
    }
    let histograms = HISTOGRAMS.iter().map(|(name, help, _)| (name, help));
    let numbers = DISTRIBUTIONS.iter().map(|(name, help, _)| (name, help));
    for (name, help) in histograms.chain(numbers) {
        let _ = writeln!(out, "| `{name}` | histogram | {help} |");
    }
    for (name, help, _) in DIRECTORY_METRICS {
        let _ = writeln!(out, "| `{name}` | gauge | {help} |");
    }
    let (name, help) = DIRECTORY_EVENTS;
    let _ = writeln!(out, "| `{name}` | counter, by `what` | {help} |");
    let _ = writeln!(
        out,
        "| `{OPERATION_SECONDS}` | histogram, by `operation` | Time from the last byte of a request to its answer. |\n\
         | `{OPERATION_REFUSED}` | counter, by `operation` | Requests refused with an error text. |"
    );
    out
}

/// Returns the labels of the series of one name, for the documentation.
fn labels_of(name: &str) -> String {
    let labels: Vec<&str> = METRICS
        .iter()
        .filter(|metric| family(metric.name) == name)
        .filter_map(|metric| metric.name.split_once('{')?.1.strip_suffix('}'))
        .collect();
    match labels.as_slice() {
        [] => String::new(),
        labels => format!(", with `{}`", labels.join("`, `")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes the page when it runs with `LMC_WRITE_DOCS=1`.
    #[test]
    fn the_documentation_lists_every_metric() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/metrics.md");
        if std::env::var_os("LMC_WRITE_DOCS").is_some() {
            std::fs::write(path, documentation()).unwrap();
        }
        assert_eq!(
            std::fs::read_to_string(path).unwrap_or_default(),
            documentation()
        );
    }

    /// Prometheus refuses a page that opens a name twice, and tools expect a counter behind `_total`.
    #[test]
    fn every_name_is_opened_once_and_shows_its_kind() {
        let mut seen: Vec<&str> = Vec::new();
        for Metric {
            name, kind, help, ..
        } in METRICS
        {
            let name = family(name);
            let again = seen.last() == Some(&name);
            assert_eq!(
                again,
                help.is_empty(),
                "{name} needs its help on the first series only"
            );
            assert!(again || !seen.contains(&name), "{name} is opened twice");
            assert_eq!(
                name.ends_with("_total"),
                *kind == "counter",
                "{name} is a {kind}"
            );
            seen.push(name);
        }
    }

    #[test]
    fn names_are_unique() {
        let mut names: Vec<_> = METRICS.iter().map(|metric| metric.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), METRICS.len());
    }
}
