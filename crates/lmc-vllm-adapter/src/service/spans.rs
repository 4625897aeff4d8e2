//! Spans: the steps of requests that have ended, for a tracer.

use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::protocol::{CacheKey, TraceParent};

/// Longest name from outside in a span, in bytes.
const MAX_NAME: usize = 256;

/// A step of a request that has ended.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Span {
    /// Id of the request, as its engine gives it.
    pub request: String,
    /// Name of the model.
    pub model: String,
    /// Parent that the request names; the parent records its trace.
    pub parent: Option<TraceParent>,
    /// End of the step.
    pub ended: SystemTime,
    /// Time from the engine's request to the end of the step.
    pub took: Duration,
    /// The step, with its outcome.
    pub step: SpanStep,
}

/// Step of a request, with its outcome.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum SpanStep {
    /// The chunks of a prompt were looked up. The counts are tokens of whole chunks.
    Lookup {
        /// Tokens that were looked up.
        tokens: u64,
        /// Tokens that were in DRAM.
        memory: u64,
        /// Tokens that were read from lower tiers.
        lower: u64,
        /// Reason of the first miss, as the counters name it; `None` if everything was found.
        reason: Option<&'static str>,
        /// False if the reason is only probable.
        is_certain: bool,
        /// Tier that failed or was late, where that is the reason.
        tier: Option<String>,
    },
    /// A worker has stored a range of its rank.
    Store(Copied),
    /// A worker has retrieved a range of its rank.
    Retrieve(Copied),
}

impl Span {
    /// Returns the span of a step that ends now.
    pub(super) fn new(
        (request, model): (&str, &str),
        parent: Option<TraceParent>,
        took: Duration,
        step: SpanStep,
    ) -> Self {
        Self {
            request: cut(request),
            model: cut(model),
            parent,
            ended: SystemTime::now(),
            took,
            step,
        }
    }
}

/// Range of a prompt that a worker has copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Copied {
    /// KV rank of the worker.
    pub kv_rank: u32,
    /// Chunks that were copied; chunks that were there already are not counted.
    pub chunks: u64,
    /// Bytes of these chunks.
    pub bytes: u64,
    /// True if the store or retrieve failed, so that nothing was copied.
    pub has_failed: bool,
}

impl Copied {
    pub(super) fn new(key: &CacheKey, chunks: usize, bytes: u64) -> Self {
        Self {
            kv_rank: key.worker_id.unwrap_or_default(),
            chunks: chunks as u64,
            bytes,
            has_failed: false,
        }
    }

    pub(super) fn failed(key: &CacheKey) -> Self {
        Self {
            has_failed: true,
            ..Self::new(key, 0, 0)
        }
    }
}

/// The spans that the tracer has not taken yet.
#[derive(Debug)]
pub(super) struct Spans {
    ended: Mutex<Vec<Span>>,
    changed: Notify,
    most: usize,
}

impl Spans {
    /// Returns a queue of this many spans; none for 0.
    pub(super) fn new(most: usize) -> Option<Self> {
        (most > 0).then(|| Self {
            ended: Mutex::default(),
            changed: Notify::new(),
            most,
        })
    }

    /// Returns false if the queue is full.
    pub(super) fn add(&self, span: Span) -> bool {
        let mut ended = self.ended.lock();
        let has_capacity = ended.len() < self.most;
        if has_capacity {
            ended.push(span);
        }
        drop(ended);
        self.changed.notify_one();
        has_capacity
    }

    /// Waits until there may be a span.
    pub(super) async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Takes all spans, in the order of their ends.
    pub(super) fn take(&self) -> Vec<Span> {
        std::mem::take(&mut self.ended.lock())
    }
}

/// Returns the start of a name from outside.
fn cut(name: &str) -> String {
    let mut end = name.len().min(MAX_NAME);
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    name[..end].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(request: &str) -> Span {
        Span {
            request: cut(request),
            model: "m".to_owned(),
            parent: None,
            ended: SystemTime::UNIX_EPOCH,
            took: Duration::ZERO,
            step: SpanStep::Store(Copied::failed(&CacheKey::default())),
        }
    }

    #[test]
    fn a_full_queue_takes_no_span_until_it_is_emptied() {
        let spans = Spans::new(2).expect("a queue");
        assert!(spans.add(span("a")) && spans.add(span("b")));
        assert!(!spans.add(span("c")));
        let names = |spans: Vec<Span>| spans.into_iter().map(|span| span.request);
        assert_eq!(names(spans.take()).collect::<Vec<_>>(), ["a", "b"]);
        assert!(spans.add(span("d")));
        assert!(Spans::new(0).is_none());
    }

    #[test]
    fn a_long_name_is_cut_between_characters() {
        assert_eq!(cut(&"é".repeat(MAX_NAME)), "é".repeat(MAX_NAME / 2));
    }
}
