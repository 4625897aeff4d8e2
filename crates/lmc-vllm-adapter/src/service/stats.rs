//! Counters that handlers increment and other threads read: atomics, no locks.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use lmc_engine::{Histogram, HistogramSnapshot};
use serde::Serialize;

use crate::protocol::{Operation, Reply};

/// Counters of one operation.
#[derive(Debug, Default)]
struct PerOperation {
    refused: AtomicU64,
    latency: Histogram,
}

/// Counters of the transport.
#[derive(Debug, Default)]
pub(crate) struct TransportCounters {
    pub(crate) connections_open: AtomicU64,
    pub(crate) connections_accepted: AtomicU64,
    pub(crate) connections_refused: AtomicU64,
    pub(crate) untrusted: AtomicU64,
    pub(crate) broken: AtomicU64,
    pub(crate) stalled: AtomicU64,
    pub(crate) silent: AtomicU64,
    pub(crate) closed_idle: AtomicU64,
    pub(crate) unanswerable: AtomicU64,
    pub(crate) bytes_in: AtomicU64,
    pub(crate) bytes_out: AtomicU64,
}

/// Declares the service's counters and their snapshot together.
macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)+) => {
        #[derive(Debug, Default)]
        pub(crate) struct ServiceCounters { $(pub(crate) $name: AtomicU64,)+ }

        /// Counts since the service started.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
        #[non_exhaustive]
        pub struct ServiceCounts { $($(#[$doc])* pub $name: u64,)+ }

        impl ServiceCounters {
            pub(crate) fn snapshot(&self) -> ServiceCounts {
                ServiceCounts { $($name: self.$name.load(Ordering::Relaxed),)+ }
            }
        }
    };
}

counters! {
    /// Lookups answered.
    lookups,
    /// Tokens of whole chunks that lookups asked for.
    lookup_tokens,
    /// Tokens that lookups found, in any tier.
    hit_tokens,
    /// Tokens that lookups found in DRAM, in every rank.
    hit_tokens_dram,
    /// Tokens that lookups found in lower tiers, in addition to those in DRAM.
    hit_tokens_lower,
    /// Tokens of tails that lookups found; not in `hit_tokens`.
    hit_tokens_tail,
    /// Tokens missed because the first missing chunk is unknown: probably never stored.
    missed_never_stored,
    /// Tokens missed because the first missing chunk was evicted, probably.
    missed_evicted,
    /// Tokens missed because the first missing chunk was computed before a clear, probably.
    missed_cleared,
    /// Tokens missed because the first missing chunk was removed by its key or with its space, or was
    /// damaged, probably.
    missed_removed,
    /// Tokens missed because the first missing chunk was stored in another space, probably.
    missed_other_space,
    /// Tokens missed while a drive has chunks of other settings, probably because of that.
    missed_other_settings,
    /// Tokens missed because no worker of the model is registered.
    missed_unregistered,
    /// Tokens missed because a lower tier was late, probably.
    missed_tier_late,
    /// Tokens missed because a tier failed or was out of use, probably.
    missed_tier_down,
    /// Tokens missed because a lower tier had lost a chunk that was expected there, probably.
    missed_tier_lost,
    /// Tokens missed because a limit on leases, sessions or memory was reached.
    missed_limit,
    /// Tokens missed because reading them takes longer than computing them.
    missed_recompute,
    /// Tokens after the last whole chunks of prompts, which the stock connector cannot cache; not in
    /// `lookup_tokens`.
    lookup_tail_tokens,
    /// Lookups for a model that no engine has registered.
    lookups_unregistered,
    /// Stores that succeeded, in either mode.
    stores,
    /// Stores that were dropped or failed.
    stores_failed,
    /// Stores skipped because the request asked for it (`lmcache.skip_save`).
    stores_skipped,
    /// Lookups whose request names a peer, and that may wait for it (`lmcache.pd.wait_ms`).
    source_waits,
    /// Lookups that did not wait for a peer because too many other lookups waited.
    source_waits_refused,
    /// Lookups whose request names a peer to push to (`lmcache.pd.to`) that is not connected.
    pushes_unknown,
    /// Requests whose chunks all ranks had stored.
    notices_stored,
    /// Requests that ended before all ranks had stored their chunks, or that were not watched.
    notices_failed,
    /// Notices that a proxy did not take, counted for each proxy.
    notices_lost,
    /// Spans that the tracer did not take in time, or that its collector did not take.
    spans_lost,
    /// Chunks that engines stored.
    stored_chunks,
    /// Bytes of chunks that engines stored.
    stored_bytes,
    /// Chunks not stored because they were already stored or being written.
    chunks_present,
    /// Chunks not stored because no pool memory could be reserved.
    chunks_no_room,
    /// Chunks not stored because the cache was cleared, or may have been cleared, since their request
    /// began.
    chunks_outdated,
    /// Chunks not stored because the engine was being drained.
    chunks_drained,
    /// Chunks not stored because the engine had dropped some of their blocks.
    chunks_null,
    /// Retrieves that succeeded, in either mode.
    retrieves,
    /// Retrieves that missed a chunk.
    retrieves_missed,
    /// Tokens that engines retrieved; each token counts once, however many workers an engine has.
    retrieved_tokens,
    /// Tokens of tails that engines retrieved; not in `retrieved_tokens`.
    retrieved_tokens_tail,
    /// Chunks that engines retrieved.
    retrieved_chunks,
    /// Bytes of chunks that engines retrieved.
    retrieved_bytes,
    /// Nanoseconds that the server spent copying into the cache.
    gather_nanos,
    /// Nanoseconds that the server spent copying out of the cache.
    scatter_nanos,
    /// Bytes that the server copied into the cache.
    gather_bytes,
    /// Bytes that the server copied out of the cache.
    scatter_bytes,
    /// Copies that were not made because their worker was gone or no longer waited.
    copies_too_late,
    /// Commits of transfers that were never prepared, or were already committed.
    commits_unknown,
    /// Commits and unregistrations refused because another connection owns the transfer or the
    /// worker.
    commits_foreign,
    /// Stores abandoned by a worker that went away.
    stores_abandoned,
    /// Slots that stayed held after the end of the connection that had prepared them.
    slots_orphaned,
    /// Slots of ended connections released because their process was dead.
    slots_released_by_death,
    /// Slots of ended connections released because their worker reported that none of its copies uses
    /// them.
    slots_released_by_worker,
    /// Slots of ended connections released because the grace time was over.
    slots_released_by_grace,
    /// Pickled payloads refused.
    pickles_refused,
    /// Workers registered.
    registrations,
    /// Registrations refused.
    registrations_refused,
    /// Number of times that two engines were found to share a KV layout that does not name its format.
    opaque_layouts_shared,
    /// Workers removed because they sent no messages or their connection ended.
    workers_reaped,
    /// Sessions that expired before the engine ended them.
    sessions_expired,
    /// Leases of lookups that expired before the engine ended them.
    lookup_leases_expired,
    /// Requests refused because a limit on sessions, workers or transfers was reached.
    over_limit,
    /// Blocks that engines reported as allocated.
    reported_blocks,
    /// Pings of workers.
    pings,
}

/// Counters of one operation at one moment.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct OperationCounts {
    /// Name of the operation.
    pub operation: &'static str,
    /// Requests refused with an error text.
    pub refused: u64,
    /// Time from the last byte of the request to the answer.
    pub latency: HistogramSnapshot,
}

/// Counters of the transport at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct TransportCounts {
    /// Connections open now.
    pub connections_open: u64,
    /// Connections accepted since the start.
    pub connections_accepted: u64,
    /// Connections closed at once because there were too many.
    pub connections_refused: u64,
    /// Connections closed at once because their user is not trusted, or because the client had closed
    /// its end before its user was known.
    pub untrusted: u64,
    /// Connections closed because the client broke the protocol.
    pub broken: u64,
    /// Connections closed because the client stalled.
    pub stalled: u64,
    /// Connections closed because the client sent no requests.
    pub silent: u64,
    /// Connections closed to admit others: they owned nothing and had been idle for longest.
    pub closed_idle: u64,
    /// Messages dropped because they name no request to answer.
    pub unanswerable: u64,
    /// Requests whose operation is unknown.
    pub unknown_operations: u64,
    /// Bytes received.
    pub bytes_in: u64,
    /// Bytes sent.
    pub bytes_out: u64,
}

#[derive(Debug)]
pub(crate) struct Stats {
    operations: Vec<PerOperation>,
    unknown_operations: AtomicU64,
    pub(crate) transport: TransportCounters,
    pub(crate) service: ServiceCounters,
}

impl Stats {
    pub(crate) fn new() -> Self {
        Self {
            operations: Operation::ALL
                .iter()
                .map(|_| PerOperation::default())
                .collect(),
            unknown_operations: AtomicU64::new(0),
            transport: TransportCounters::default(),
            service: ServiceCounters::default(),
        }
    }

    fn of(&self, operation: Operation) -> &PerOperation {
        &self.operations[operation as usize]
    }

    pub(crate) fn record(&self, operation: Operation, reply: &Reply, took: Duration) {
        let counters = self.of(operation);
        counters.latency.record(took);
        if matches!(reply, Reply::Error(_)) {
            counters.refused.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(crate) fn record_refusal(&self, operation: Option<Operation>) {
        let counter = match operation {
            Some(operation) => &self.of(operation).refused,
            None => &self.unknown_operations,
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn operations(&self) -> Vec<OperationCounts> {
        let all = Operation::ALL.iter().zip(&self.operations);
        all.map(|(operation, counters)| OperationCounts {
            operation: operation.name(),
            refused: counters.refused.load(Ordering::Relaxed),
            latency: counters.latency.snapshot(),
        })
        .collect()
    }

    pub(crate) fn transport(&self) -> TransportCounts {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let t = &self.transport;
        TransportCounts {
            connections_open: read(&t.connections_open),
            connections_accepted: read(&t.connections_accepted),
            connections_refused: read(&t.connections_refused),
            untrusted: read(&t.untrusted),
            broken: read(&t.broken),
            stalled: read(&t.stalled),
            silent: read(&t.silent),
            closed_idle: read(&t.closed_idle),
            unanswerable: read(&t.unanswerable),
            unknown_operations: read(&self.unknown_operations),
            bytes_in: read(&t.bytes_in),
            bytes_out: read(&t.bytes_out),
        }
    }
}

/// Adds to a counter.
pub(crate) fn add(counter: &AtomicU64, amount: u64) {
    counter.fetch_add(amount, Ordering::Relaxed);
}
