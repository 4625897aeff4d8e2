//! Reasons of misses: counted in tokens, and logged with the request.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use lmc_engine::{DRAM, Found, Miss, MissReason, Missing, TierRun};
use lmc_key::ChunkKey;

use crate::protocol::{CacheKey, Naming, TraceParent};
use crate::service::context::{Context, Hashed};
use crate::service::request_log::RequestLog;
use crate::service::shown::shown;
use crate::service::spans::SpanStep;
use crate::service::stats::{ServiceCounters, add};
use crate::service::throttle::Throttle;
use crate::service::usage::Usage;

/// Time after which a lookup is slow.
const SLOW: Duration = Duration::from_millis(100);

/// Reason of a miss, as counters and the log name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reason {
    /// Reason that the engine gives.
    Engine(MissReason),
    /// Another space of the tenant has, or had, chunks of the same tokens.
    OtherSpace,
    /// No worker of the request's model is registered.
    Unregistered,
    /// A drive has chunks that were stored under other settings.
    OtherSettings,
}

impl Reason {
    /// Returns the name of a reason, and its counter.
    fn of(self, counters: &ServiceCounters) -> (&'static str, &AtomicU64) {
        use MissReason as M;
        match self {
            Self::Engine(M::NeverStored) => ("never_stored", &counters.missed_never_stored),
            Self::Engine(M::Evicted) => ("evicted", &counters.missed_evicted),
            Self::Engine(M::Cleared) => ("cleared", &counters.missed_cleared),
            Self::Engine(M::Removed) => ("removed", &counters.missed_removed),
            Self::OtherSpace => ("other_space", &counters.missed_other_space),
            Self::OtherSettings => ("other_settings", &counters.missed_other_settings),
            Self::Unregistered => ("unregistered", &counters.missed_unregistered),
            Self::Engine(M::TierLate(_)) => ("tier_late", &counters.missed_tier_late),
            Self::Engine(M::TierDown(_)) => ("tier_down", &counters.missed_tier_down),
            Self::Engine(M::TierLost(_)) => ("tier_lost", &counters.missed_tier_lost),
            Self::Engine(M::Limit) => ("limit", &counters.missed_limit),
            Self::Engine(M::Recompute) => ("recompute", &counters.missed_recompute),
        }
    }
}

/// Everything that is known about a miss.
#[derive(Debug)]
struct MissDetail {
    reason: Reason,
    is_certain: bool,
    /// Names of the fields in which the space that has the chunk differs; empty for other reasons.
    differs: Vec<&'static str>,
}

impl MissDetail {
    fn new(reason: Reason, is_certain: bool) -> Self {
        Self {
            reason,
            is_certain,
            differs: Vec::new(),
        }
    }
}

impl From<Miss> for MissDetail {
    fn from(miss: Miss) -> Self {
        Self::new(Reason::Engine(miss.reason), miss.is_certain)
    }
}

/// The range of a prompt that is looked up, with the fields for counting and logging its misses.
#[derive(Debug, Clone, Copy)]
pub(super) struct LookupRange {
    /// First chunk of the range.
    first: usize,
    /// Chunks of the range.
    chunks: usize,
    naming: Naming,
    /// Chunks of the range that are looked up: fewer if the range exceeds the limit of a lookup.
    looked_up: usize,
    /// Tokens after the last whole chunk, which the stock connector cannot store.
    tail: u64,
    /// True if a worker of the model is registered.
    is_registered: bool,
    /// Parent of the request's spans.
    parent: Option<TraceParent>,
    begun: Instant,
    /// Time after which the lookup is slow.
    slow_after: Duration,
}

/// A lookup that has ended and is counted, for the log.
#[derive(Debug)]
pub(super) struct LookupNote {
    asked: LookupRange,
    /// Chunks that were found; `resident` counts those that were in DRAM.
    hits: usize,
    resident: usize,
    /// The tiers of the chunks, in prompt order; empty if no chunk was read from a lower tier.
    runs: Vec<TierRun>,
    why: Option<MissDetail>,
    took: Duration,
}

impl LookupNote {
    /// Returns the number of lines that were suppressed before the line of this lookup; `None` if
    /// it gets no line. `now` is as for [`Throttle::pass`].
    fn pass(&self, log: RequestLog, slow: &Throttle, now: Duration) -> Option<u64> {
        let is_slow = self.took >= self.asked.slow_after;
        match log {
            RequestLog::All => Some(0),
            // When a tier is slow, many requests are slow at once.
            RequestLog::Slow if is_slow => slow.pass(now),
            RequestLog::Slow | RequestLog::Off => None,
        }
    }
}

impl LookupRange {
    /// Returns the range of a key, unless it names a tail, whose chunks are counted apart.
    pub(super) fn of(key: &CacheKey, hashed: &Hashed, chunk: u64, begun: Instant) -> Option<Self> {
        if key.unit.is_some() {
            return None;
        }
        let whole = (hashed.chunks.end as u64 * chunk).max(key.start);
        let tail = match key.chunk_hashes.is_empty() {
            true => tail_end(key, chunk).saturating_sub(whole),
            // The tail has a lookup of its own.
            false => 0,
        };
        let chunks = hashed.chunks.len();
        Some(Self {
            first: hashed.chunks.start,
            chunks,
            naming: hashed.naming,
            looked_up: chunks,
            tail,
            is_registered: true,
            parent: key.configs.parent,
            begun,
            slow_after: SLOW,
        })
    }

    /// Notes the time for which the lookup may wait for peers to compute chunks.
    pub(super) fn waiting(self, wait: Option<Duration>) -> Self {
        Self {
            slow_after: SLOW + wait.unwrap_or_default(),
            ..self
        }
    }

    /// Notes how many of the chunks are looked up, and whether a worker of the model is registered.
    pub(super) fn looked_up(self, chunks: usize, is_registered: bool) -> Self {
        Self {
            looked_up: chunks,
            is_registered,
            ..self
        }
    }
}

impl Context {
    /// Counts the tokens that a lookup asked for.
    pub(super) fn count_asked(&self, asked: LookupRange, usage: Option<&Usage>) {
        let counters = self.counters();
        add(&counters.lookups, 1);
        add(&counters.lookup_tokens, self.tokens(asked.chunks));
        if let Some(usage) = usage {
            add(&usage.lookup_tokens, self.tokens(asked.chunks));
        }
        if asked.tail > 0 {
            add(&counters.lookup_tail_tokens, asked.tail);
        }
    }

    /// Counts the misses of a lookup by their reason. Call [`Self::report_lookup`] after the reply.
    pub(super) fn count_misses(
        &self,
        asked: LookupRange,
        (found, runs): (&Found, &[TierRun]),
        usage: Option<&Usage>,
    ) -> LookupNote {
        if let Some(usage) = usage {
            add(&usage.hit_tokens, self.tokens(found.hits));
        }
        let is_whole = found.hits >= asked.chunks;
        let why = (!is_whole).then(|| self.why(asked, found));
        LookupNote {
            runs: runs.to_vec(),
            ..self.count_end(asked, (found.hits, found.resident), why)
        }
    }

    /// As [`Self::count_misses`], for a lookup that is not made because its connection is at a
    /// limit.
    pub(super) fn count_refused(&self, asked: LookupRange, usage: Option<&Usage>) -> LookupNote {
        self.count_asked(asked, usage);
        let why = MissDetail::from(Miss::certain(MissReason::Limit));
        self.count_end(asked, (0, 0), Some(why))
    }

    fn count_end(
        &self,
        asked: LookupRange,
        (hits, resident): (usize, usize),
        why: Option<MissDetail>,
    ) -> LookupNote {
        if let Some(why) = &why {
            let missed = self.tokens(asked.chunks.saturating_sub(hits));
            add(why.reason.of(self.counters()).1, missed);
        }
        LookupNote {
            asked,
            hits,
            resident,
            runs: Vec::new(),
            why,
            took: asked.begun.elapsed(),
        }
    }

    fn tokens(&self, chunks: usize) -> u64 {
        chunks as u64 * u64::from(self.config.hasher.chunk_size())
    }

    /// Adds the span of a lookup, and logs the request, where these are on.
    pub(super) fn report_lookup(&self, request: &str, model: &str, note: &LookupNote) {
        let (asked, why) = (&note.asked, note.why.as_ref());
        self.add_span((request, model), asked.parent, note.took, || {
            SpanStep::Lookup {
                tokens: self.tokens(asked.chunks),
                memory: self.tokens(note.resident),
                lower: self.tokens(note.hits - note.resident),
                reason: why.map(|why| why.reason.of(self.counters()).0),
                is_certain: why.is_none_or(|why| why.is_certain),
                tier: why.and_then(|why| Some(self.tier_of(why.reason)?.to_owned())),
            }
        });
        let (log, since_start) = (self.request_log.get(), self.started.elapsed());
        let Some(suppressed) = note.pass(log, &self.slow_lookups, since_start) else {
            return;
        };
        let tier = why.and_then(|why| self.tier_of(why.reason));
        let differs = why.map(|why| why.differs.join(","));
        let mut read: BTreeMap<&str, u64> = BTreeMap::new();
        for run in &note.runs {
            if let Some(tier) = run.tier.and_then(|tier| self.engine.tier_name(tier)) {
                *read.entry(tier).or_default() += self.tokens(run.chunks);
            }
        }
        let read = read.iter().map(|(tier, tokens)| format!("{tier}:{tokens}"));
        let read = read.collect::<Vec<_>>().join(",");
        // Names from outside are quoted: a space in them begins no field.
        tracing::info!(
            request = shown(request),
            model = shown(model),
            tokens = self.tokens(asked.chunks),
            memory = self.tokens(note.resident),
            lower = self.tokens(note.hits - note.resident),
            read_from = (!read.is_empty()).then_some(read),
            missed = self.tokens(asked.chunks.saturating_sub(note.hits)),
            reason = why.map(|why| why.reason.of(self.counters()).0),
            certainty = why.map(|why| if why.is_certain { "exact" } else { "probably" }),
            tier,
            differs = differs.as_deref().filter(|fields| !fields.is_empty()),
            tail = (asked.tail > 0).then_some(asked.tail),
            ms = note.took.as_millis() as u64,
            suppressed = (suppressed > 0).then_some(suppressed),
            "lookup"
        );
    }

    fn why(&self, asked: LookupRange, found: &Found) -> MissDetail {
        if !asked.is_registered {
            return MissDetail::new(Reason::Unregistered, true);
        }
        let Some(missing) = &found.missing else {
            return MissDetail::from(match found.hits == asked.looked_up {
                true => Miss::certain(MissReason::Limit),
                false if self.engine.pool_is_lost() => Miss::certain(MissReason::TierDown(None)),
                // The engine is being closed.
                false => Miss::probable(MissReason::TierDown(None)),
            });
        };
        let miss = self.engine.miss(missing);
        if miss.reason != MissReason::NeverStored {
            return miss.into();
        }
        if let Some(why) = self.other_space(missing) {
            return why;
        }
        // A chunk of another chunk size, hash, identity or naming has a name that no present prompt has.
        let is_first = asked.first + found.hits == 0;
        let other_naming = || (self.spaces).has_other_naming(missing.rank.space, asked.naming);
        if is_first && self.engine.has_unreachable() {
            MissDetail::new(Reason::OtherSettings, false)
        } else if is_first && other_naming() {
            MissDetail {
                differs: vec!["hash_mode"],
                ..MissDetail::new(Reason::OtherSettings, false)
            }
        } else {
            miss.into()
        }
    }

    /// Returns the reason for a chunk that was stored in another space. The reason is certain while
    /// the chunk is in DRAM there. A chunk of another generation counts as removed.
    fn other_space(&self, missing: &Missing) -> Option<MissDetail> {
        let space = missing.rank.space;
        let other = self.spaces.other_space(space, &missing.hash)?;
        if other.is_generation {
            // Chunks are removed with the last worker of their generation.
            return Some(Miss::probable(MissReason::Removed).into());
        }
        let differs = other.differs;
        let chunk = ChunkKey {
            space: other.id,
            ..missing.rank.key(missing.hash)
        };
        let clears = self.engine.clears_id();
        let is_certain = self.engine.are_in_dram(clears, &[chunk]) == [true];
        self.other_space_differs.lock().clone_from(&differs);
        Some(MissDetail {
            differs,
            ..MissDetail::new(Reason::OtherSpace, is_certain)
        })
    }

    fn tier_of(&self, reason: Reason) -> Option<&str> {
        match reason {
            Reason::Engine(MissReason::TierDown(None)) => Some(DRAM),
            Reason::Engine(MissReason::TierDown(tier) | MissReason::TierLate(tier)) => {
                self.engine.tier_name(tier?)
            }
            Reason::Engine(MissReason::TierLost(tier)) => self.engine.tier_name(tier),
            _ => None,
        }
    }
}

/// Returns the end of the tokens that a request asks for. LMCache cuts the end of the range down to
/// whole chunks, and sends the tokens of the whole prompt.
fn tail_end(key: &CacheKey, chunk: u64) -> u64 {
    let tokens = key.token_ids.len() as u64;
    let is_whole_prompt = key.end >= tokens / chunk * chunk;
    if is_whole_prompt { tokens } else { key.end }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;

    /// Returns the note of a lookup that was granted a wait.
    fn note(took: Duration, wait: Option<Duration>) -> LookupNote {
        let asked = LookupRange {
            first: 0,
            chunks: 1,
            naming: Naming::Tokens,
            looked_up: 1,
            tail: 0,
            is_registered: true,
            parent: None,
            begun: Instant::now(),
            slow_after: SLOW,
        };
        LookupNote {
            asked: asked.waiting(wait),
            hits: 1,
            resident: 1,
            runs: Vec::new(),
            why: None,
            took,
        }
    }

    #[test]
    fn slow_lookups_have_one_line_a_second_and_fast_ones_none() {
        let throttle = Throttle::default();
        let pass = |log, took: Duration, millis| {
            note(took, None).pass(log, &throttle, Duration::from_millis(millis))
        };
        let fast = SLOW - Duration::from_millis(1);
        assert_eq!(pass(RequestLog::Slow, fast, 0), None);
        let slow = [0, 1, 999, 1000].map(|millis| pass(RequestLog::Slow, SLOW, millis));
        assert_eq!(slow, [Some(0), None, None, Some(2)]);
        assert_eq!(pass(RequestLog::Off, SLOW, 5000), None);
        let all = [fast, SLOW, SLOW].map(|took| pass(RequestLog::All, took, 5000));
        assert_eq!(all, [Some(0); 3]);
    }

    #[test]
    fn a_granted_wait_makes_no_lookup_slow() {
        let wait = Duration::from_secs(10);
        let is_slow = |took| {
            let note = note(took, Some(wait));
            let passed = note.pass(RequestLog::Slow, &Throttle::default(), Duration::ZERO);
            passed.is_some()
        };
        assert!(!is_slow(wait));
        assert!(is_slow(wait + SLOW));
    }

    #[test]
    fn every_reason_has_a_counter_of_its_own_name() {
        let engine = [
            MissReason::NeverStored,
            MissReason::Evicted,
            MissReason::Cleared,
            MissReason::Removed,
            MissReason::TierLate(None),
            MissReason::TierDown(None),
            MissReason::TierLost(0),
            MissReason::Limit,
            MissReason::Recompute,
        ];
        let others = [
            Reason::OtherSpace,
            Reason::Unregistered,
            Reason::OtherSettings,
        ];
        for reason in engine.map(Reason::Engine).into_iter().chain(others) {
            let counters = ServiceCounters::default();
            let (name, counter) = reason.of(&counters);
            counter.store(7, Ordering::Relaxed);
            let counts = serde_json::to_value(counters.snapshot()).expect("JSON");
            let counter = format!("missed_{name}");
            assert_eq!(counts[&counter], 7, "{counter}");
        }
    }
}
