//! The settings, the engine and the counters that every part of the service uses.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use lmc_engine::{CacheEngine, Host};
use lmc_key::{ChunkHash, ChunkKey, HashMemo, Printable, Salt, SpaceId};
use parking_lot::Mutex;

use crate::protocol::{CacheKey, Naming, Reply, TAIL_LOOKUP, TraceParent};
use crate::service::config::ServiceConfig;
use crate::service::events::EventLog;
use crate::service::notices::Notices;
use crate::service::pulse::Pulse;
use crate::service::request_log::{AtomicRequestLog, RequestLog};
use crate::service::shown::shown;
use crate::service::spaces::Spaces;
use crate::service::spans::{Copied, Span, SpanStep, Spans};
use crate::service::stats::{ServiceCounters, Stats, add};
use crate::service::throttle::Throttle;

/// Values that every part of the service uses. None is state of the protocol.
pub(super) struct Context {
    pub(super) config: ServiceConfig,
    pub(super) engine: CacheEngine,
    pub(super) memo: HashMemo,
    pub(super) events: Arc<EventLog>,
    pub(super) spaces: Arc<Spaces>,
    pub(super) stats: Stats,
    pub(super) pulse: Pulse,
    /// `None` if notices are off.
    pub(super) notices: Option<Arc<Notices>>,
    /// `None` if spans are off.
    pub(super) spans: Option<Spans>,
    pub(super) started: Instant,
    /// Requests that the log shows; may change.
    pub(super) request_log: AtomicRequestLog,
    /// Bytes of slots that workers may be writing to.
    pub(super) store_bytes: AtomicU64,
    /// Names of the fields that differ between the last miss's space and the space that has the
    /// chunk.
    pub(super) other_space_differs: Mutex<Vec<&'static str>>,
    /// Limits log lines of slow lookups.
    pub(super) slow_lookups: Throttle,
    /// Limits warnings that peers can provoke.
    warnings: Throttle,
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context")
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

impl Context {
    pub(super) fn new(config: ServiceConfig, engine: CacheEngine) -> Self {
        let events = Arc::new(EventLog::new(config.kv_event_log_size, config.incarnation));
        let chunk_size = config.hasher.chunk_size();
        let spaces = Arc::new(Spaces::new(
            Arc::clone(&events),
            chunk_size,
            engine.pool_bytes(),
            config.max_usages,
        ));
        engine.host().events().listen(Arc::clone(&spaces) as _);
        let notices = config.notices.then(Arc::<Notices>::default);
        if let Some(notices) = &notices {
            engine.host().events().listen(Arc::clone(notices) as _);
        }
        Self {
            memo: HashMemo::new(config.hash_memo_bytes),
            events,
            spaces,
            notices,
            spans: Spans::new(config.max_spans),
            stats: Stats::new(),
            pulse: Pulse::new(config.copy_deadline / 2),
            started: Instant::now(),
            request_log: AtomicRequestLog::new(config.request_log),
            store_bytes: AtomicU64::new(0),
            other_space_differs: Mutex::default(),
            slow_lookups: Throttle::default(),
            warnings: Throttle::default(),
            config,
            engine,
        }
    }

    /// Returns the counters of the service.
    pub(super) fn counters(&self) -> &ServiceCounters {
        &self.stats.service
    }

    /// Hashes a range of a prompt, unless the engine has. The end is cut down to whole chunks that
    /// the prompt has.
    ///
    /// # Errors
    /// The refusal of a request with an invalid range or salt.
    pub(super) fn hash(&self, key: &CacheKey) -> Result<Hashed, Reply> {
        let chunk = self.tokens_per_chunk(key);
        if !key.start.is_multiple_of(chunk) {
            return Err(refuse(&format!(
                "start {} is not a multiple of the chunk size {chunk}",
                key.start
            )));
        }
        let named = key.chunk_hashes.len();
        let end = match named {
            0 => key.end.min(key.token_ids.len() as u64) / chunk,
            named => (key.end / chunk).min(named as u64),
        };
        let start = (key.start / chunk).min(end);
        let salt: Salt = match key.cache_salt.parse() {
            Ok(salt) => salt,
            Err(error) => return Err(refuse(&format!("{error}"))),
        };
        let (start, end) = (start as usize, end as usize);
        let hashes = if named > 0 {
            key.chunk_hashes[..end].to_vec()
        } else {
            let tokens = &key.token_ids[..end * chunk as usize];
            (self.memo).hash_prompt(&self.config.hasher, &salt, tokens)
        };
        Ok(Hashed {
            hashes,
            chunks: start..end,
            salt,
            naming: key.naming(),
        })
    }

    /// Returns the number of tokens in each chunk that a key names.
    pub(super) fn tokens_per_chunk(&self, key: &CacheKey) -> u64 {
        u64::from(key.unit.unwrap_or(self.config.hasher.chunk_size()))
    }

    /// Returns the tokens of a chunk, for the event that announces it; none without subscribers.
    pub(super) fn chunk_tokens(&self, key: &CacheKey, index: usize) -> Box<[u32]> {
        if !self.events.enabled() {
            return Box::default();
        }
        let chunk = self.config.hasher.chunk_size() as usize;
        let from = key.start as usize + index * chunk;
        key.token_ids
            .get(from..from + chunk)
            .unwrap_or_default()
            .into()
    }

    /// Pushes chunks that are in DRAM, each given with the chunk before it, to the peer that a
    /// request names. Does nothing for an empty text.
    pub(super) fn push<C>(&self, to: &str, chunks: impl FnOnce() -> C)
    where
        C: IntoIterator<Item = (ChunkKey, Option<ChunkHash>)>,
    {
        if to.is_empty() {
            return;
        }
        let parent = |(key, parent): (ChunkKey, Option<ChunkHash>)| {
            (key, parent.map(|hash| ChunkKey { hash, ..key }))
        };
        let chunks: Vec<_> = chunks().into_iter().map(parent).collect();
        // A peer that goes meanwhile is no error of the request.
        let _ = self.engine.push(&chunks, to);
    }

    /// Counts and logs a peer to push to that a request names and that is not connected.
    pub(super) fn check_push(&self, to: &str) {
        if !to.is_empty() && !self.engine.push(&[], to) {
            add(&self.counters().pushes_unknown, 1);
            self.warn_throttled(&format!(
                "lmcache.pd.to: no peer of the name or address {to} is connected; `lmc peers` lists \
                 the peers, --p2p-listen and --p2p-peer connect to them"
            ));
        }
    }

    /// Logs a warning that a peer can provoke, at most once a second, on one line whatever text the
    /// peer has put into it.
    pub(super) fn warn_throttled(&self, text: &str) {
        if let Some(suppressed) = self.warnings.pass(self.started.elapsed()) {
            let suppressed = (suppressed > 0).then_some(suppressed);
            tracing::warn!(suppressed, "{}", Printable(text));
        }
    }

    /// Notes a span where there is a tracer and the request's parent, if it names one, records the trace.
    pub(super) fn add_span(
        &self,
        names: (&str, &str),
        parent: Option<TraceParent>,
        took: Duration,
        step: impl FnOnce() -> SpanStep,
    ) {
        let Some(spans) = &self.spans else {
            return;
        };
        if parent.is_some_and(|parent| !parent.is_sampled) {
            return;
        }
        let span = Span::new(names, parent, took, step());
        if !spans.add(span) {
            add(&self.counters().spans_lost, 1);
        }
    }

    /// Counts a store that failed, and notes its span. `begun` is the time of the worker's request.
    pub(super) fn store_failed(&self, key: &CacheKey, begun: Instant) {
        add(&self.stats.service.stores_failed, 1);
        self.add_copy(key, begun.elapsed(), SpanStep::Store(Copied::failed(key)));
    }

    /// Counts a retrieve that failed, and notes its span. `begun` is the time of the worker's request.
    pub(super) fn retrieve_failed(&self, key: &CacheKey, begun: Instant) {
        add(&self.stats.service.retrieves_missed, 1);
        self.add_copy(
            key,
            begun.elapsed(),
            SpanStep::Retrieve(Copied::failed(key)),
        );
    }

    /// As [`Self::add_span`], for a range that a worker has copied, and logs the copy if every request is
    /// logged.
    pub(super) fn add_copy(&self, key: &CacheKey, took: Duration, step: SpanStep) {
        let id = key.request_id.as_str();
        // A tail is retrieved under an id of its own.
        let id = id.strip_suffix(TAIL_LOOKUP).unwrap_or(id);
        let names = (id, key.model_name.as_str());
        if self.request_log.get() == RequestLog::All {
            log_copy(names, took, &step);
        }
        self.add_span(names, key.configs.parent, took, || step);
    }
}

/// Logs a store or retrieve of a worker.
fn log_copy((request, model): (&str, &str), took: Duration, step: &SpanStep) {
    let (what, copied) = match step {
        SpanStep::Store(copied) => ("store", copied),
        SpanStep::Retrieve(copied) => ("retrieve", copied),
        SpanStep::Lookup { .. } => return,
    };
    // Names from outside are quoted: a space in them begins no field.
    tracing::info!(
        request = shown(request),
        model = shown(model),
        rank = copied.kv_rank,
        chunks = copied.chunks,
        bytes = copied.bytes,
        failed = copied.has_failed.then_some(true),
        ms = took.as_millis() as u64,
        "{what}"
    );
}

/// A range of a prompt in chunks, with the hashes up to its end.
pub(super) struct Hashed {
    /// Hashes of all chunks from the first to the end of the range.
    pub(super) hashes: Vec<ChunkHash>,
    /// The range, in chunks.
    pub(super) chunks: Range<usize>,
    pub(super) salt: Salt,
    pub(super) naming: Naming,
}

impl Hashed {
    /// Hash of a chunk, counted from the start of the prompt.
    pub(super) fn hash(&self, chunk: usize) -> ChunkHash {
        self.hashes[chunk]
    }

    /// Returns the hash of the chunk before; `None` for the first chunk.
    pub(super) fn parent(&self, chunk: usize) -> Option<ChunkHash> {
        chunk.checked_sub(1).map(|before| self.hashes[before])
    }

    /// Returns the keys of the range for one KV rank.
    pub(super) fn keys(&self, space: SpaceId, kv_rank: u16) -> Vec<ChunkKey> {
        let key = |&hash: &ChunkHash| ChunkKey {
            space,
            kv_rank,
            group: 0,
            hash,
        };
        self.hashes[self.chunks.clone()].iter().map(key).collect()
    }
}

/// Returns a refusal in the form that clients show.
pub(super) fn refuse(text: &str) -> Reply {
    Reply::Error(format!("lmc: {text}"))
}
