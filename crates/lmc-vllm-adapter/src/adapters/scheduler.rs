//! The scheduler's side: looks prompts up.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::adapters::common::{Common, ServerState};
use crate::adapters::link::{Answer, Link, LinkError, SessionId, Setup};
use crate::adapters::log::{Level, shown};
use crate::adapters::{AdapterError, Endpoint, EngineDescription, LogLine, Prompt, Timeouts};
use crate::protocol::{Reply, Request, RequestConfigs};

/// Longest promotion of a lookup's chunks; a server that is alive answers before.
const PROMOTION_TIMEOUT: Duration = Duration::from_secs(60);
/// Longest wait for a clear, which lower tiers note.
const CLEAR_TIMEOUT: Duration = Duration::from_secs(10);

struct SchedulerSetup(Arc<Common>);

impl Setup for SchedulerSetup {
    fn next(
        &self,
        _session: SessionId,
        replies: &[Reply],
        _descriptor: &mut Option<OwnedFd>,
    ) -> Result<Option<Request>, String> {
        self.0.next_setup(replies)
    }
}

/// Figures of a [`SchedulerAdapter`] since its start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SchedulerStats {
    /// Lookups that were sent to the server.
    pub lookups: u64,
    /// Lookups that ended without an answer of the server and count as misses.
    pub lookups_failed: u64,
    /// Tokens of the prompts that were looked up.
    pub lookup_tokens: u64,
    /// Tokens that the server found.
    pub hit_tokens: u64,
    /// Connections to the server that were lost.
    pub connections_lost: u64,
}

#[derive(Debug, Default)]
struct Counters {
    lookups: AtomicU64,
    failed: AtomicU64,
    tokens: AtomicU64,
    hits: AtomicU64,
}

#[derive(Debug, Clone)]
enum Lookup {
    /// Number of the lookup: a request may have several, one after the other.
    Pending(u64),
    Known(FoundTokens),
}

/// Tokens that a lookup found.
#[derive(Debug, Clone, Default)]
struct FoundTokens {
    tokens: u64,
    /// Tiers that they came from, in the order of the tokens; empty where they are not known.
    tiers: Vec<(String, u64)>,
}

impl FoundTokens {
    /// Reads the answer to a lookup of this many tokens.
    fn read(answer: &Answer, chunk_size: u32, most: u64) -> Result<Self, &Answer> {
        let tokens = |chunks: u64| chunks.saturating_mul(u64::from(chunk_size));
        let (chunks, tiers) = match answer {
            Ok(Reply::Int(chunks)) => (*chunks, &[][..]),
            Ok(Reply::Found { chunks, tiers }) => (*chunks, &tiers[..]),
            _ => return Err(answer),
        };
        let named = tiers.iter().map(|tier| tier.chunks);
        let named = named.fold(0_u64, u64::saturating_add);
        let tiers = tiers.iter().filter(|_| named == chunks);
        Ok(Self {
            // No more than was asked for, whatever the server says.
            tokens: tokens(chunks).min(most),
            tiers: tiers
                .map(|found| (found.tier.clone(), tokens(found.chunks)))
                .collect(),
        })
    }
}

#[derive(Debug)]
struct Shared {
    common: Arc<Common>,
    lookups: Mutex<HashMap<String, Lookup>>,
    counters: Counters,
}

impl Shared {
    /// Notes the result of a lookup, unless the engine has no use for it any more.
    fn found(&self, request_id: &str, number: u64, found: Result<FoundTokens, &Answer>) {
        let counters = &self.counters;
        let found = found.unwrap_or_else(|answer| {
            counters.failed.fetch_add(1, Ordering::Relaxed);
            self.log_failure("lookup", request_id, answer);
            FoundTokens::default()
        });
        counters.hits.fetch_add(found.tokens, Ordering::Relaxed);
        let mut lookups = self.lookups.lock();
        if let Some(lookup) = lookups.get_mut(request_id)
            && matches!(lookup, Lookup::Pending(pending) if *pending == number)
        {
            *lookup = Lookup::Known(found);
        }
    }

    /// Logs why the server did not do what it was asked for. That it is away is the link's to say.
    fn log_failure(&self, kind: &'static str, request_id: &str, answer: &Answer) {
        let why = match answer {
            Err(LinkError::Down) => return,
            Err(error) => error.to_string(),
            Ok(reply) => format!("the server answered {}", shown(&format!("{reply:?}"))),
        };
        self.common.log.failed((kind, ""), Instant::now(), || {
            format!("{kind} failed for request {}: {why}", shown(request_id))
        });
    }
}

/// Looks prompts up for an engine's scheduler, without ever waiting on its thread.
#[derive(Debug)]
pub struct SchedulerAdapter {
    shared: Arc<Shared>,
    link: Arc<Link>,
    numbers: AtomicU64,
}

impl SchedulerAdapter {
    /// Connects to a server. Waits at most 5 s for it; without one every lookup is a miss until it
    /// is there.
    ///
    /// # Errors
    /// [`AdapterError`]: the server's chunks are not whole blocks of the engine, or no thread can be
    /// started.
    pub fn start(endpoint: Endpoint, engine: EngineDescription) -> Result<Self, AdapterError> {
        Self::start_with(endpoint, engine, Timeouts::default())
    }

    /// Connects to a server as [`Self::start`] does, with other timeouts.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn start_with(
        endpoint: Endpoint,
        engine: EngineDescription,
        timeouts: Timeouts,
    ) -> Result<Self, AdapterError> {
        let common = Arc::new(Common::new(engine, timeouts)?);
        let setup = Arc::new(SchedulerSetup(Arc::clone(&common)));
        let link = Link::start(endpoint, setup, Arc::clone(&common.log), timeouts.ping)?;
        common.wait_for_server(&link)?;
        Ok(Self {
            shared: Arc::new(Shared {
                common,
                lookups: Mutex::default(),
                counters: Counters::default(),
            }),
            link: Arc::new(link),
            numbers: AtomicU64::new(0),
        })
    }

    /// Sends a lookup of a prompt's whole chunks, unless the request has one already or the prompt
    /// has no whole chunk.
    pub fn maybe_submit_lookup_request(
        &self,
        request_id: &str,
        prompt: &Prompt,
        cache_salt: &str,
        configs: &RequestConfigs,
    ) {
        let number = self.numbers.fetch_add(1, Ordering::Relaxed);
        // A prompt that was named for another server is a miss.
        let server = (self.shared.common.server()).filter(|&server| prompt.is_known_to(server));
        let chunk_size = server.map_or(0, |server| server.chunk_size);
        let chunks = match chunk_size {
            0 => 0,
            size => prompt.chunks(size),
        };
        {
            let mut lookups = self.shared.lookups.lock();
            if lookups.contains_key(request_id) {
                return;
            }
            let lookup = match chunks {
                0 => Lookup::Known(FoundTokens::default()),
                _ => Lookup::Pending(number),
            };
            lookups.insert(request_id.to_owned(), lookup);
        }
        let Some(server) = server.filter(|_| chunks > 0) else {
            return;
        };
        let tokens = chunks * chunk_size as usize;
        let common = &self.shared.common;
        let key = common.key(server, request_id, prompt, 0..tokens, cache_salt, configs);
        let timeout = common.timeouts.answer;
        let counters = &self.shared.counters;
        counters.lookups.fetch_add(1, Ordering::Relaxed);
        counters.tokens.fetch_add(tokens as u64, Ordering::Relaxed);
        let (shared, link) = (Arc::clone(&self.shared), Arc::downgrade(&self.link));
        let request_id = request_id.to_owned();
        self.link.ask(Request::Lookup(key), timeout, move |sent| {
            let (Ok(_), Some(link)) = (&sent, link.upgrade()) else {
                return shared.found(&request_id, number, Err(&sent));
            };
            let (id, seconds) = (request_id.clone(), PROMOTION_TIMEOUT.as_secs_f64());
            let wait = match server.wait_lookup {
                true => Request::WaitLookup {
                    request_id: id,
                    timeout: seconds,
                },
                false => Request::WaitPrefetchStatus {
                    request_id: id,
                    timeout: seconds,
                },
            };
            link.ask(wait, PROMOTION_TIMEOUT + timeout, move |answer| {
                let found = FoundTokens::read(&answer, chunk_size, tokens as u64);
                shared.found(&request_id, number, found);
            });
        });
    }

    /// Returns the tokens that a lookup found, or `None` while it is pending. 0 for a request
    /// without a lookup.
    pub fn check_lookup_result(&self, request_id: &str) -> Option<u64> {
        match self.shared.lookups.lock().get(request_id) {
            None => Some(0),
            Some(Lookup::Known(found)) => Some(found.tokens),
            Some(Lookup::Pending(_)) => None,
        }
    }

    /// Returns the tiers that the tokens of a lookup came from, in the order of the tokens: `dram`,
    /// or a lower tier's name, and the number of tokens. Empty where the server does not say.
    pub fn lookup_tiers(&self, request_id: &str) -> Vec<(String, u64)> {
        match self.shared.lookups.lock().get(request_id) {
            Some(Lookup::Known(found)) => found.tiers.clone(),
            _ => Vec::new(),
        }
    }

    /// Removes the result of a request's lookup. The server keeps the chunks for the request until
    /// they were retrieved or the session ends.
    pub fn cleanup_lookup_result(&self, request_id: &str) {
        self.shared.lookups.lock().remove(request_id);
    }

    /// Ends a request: the server may evict what it kept for it.
    pub fn end_session(&self, request_id: &str) {
        self.cleanup_lookup_result(request_id);
        let (shared, request_id) = (Arc::clone(&self.shared), request_id.to_owned());
        let end = Request::EndSession {
            request_id: request_id.clone(),
        };
        let timeout = self.shared.common.timeouts.answer;
        self.link.ask(end, timeout, move |answer| {
            if answer.is_err() {
                shared.log_failure("end of the session", &request_id, &answer);
            }
        });
    }

    /// Clears the server's cache, but for chunks in use, and waits for it, at most 10 s. Returns
    /// false if it was not cleared.
    pub fn reset_cache(&self) -> bool {
        let clear = Request::Clear { force: false };
        let answer = self.link.call(clear, CLEAR_TIMEOUT);
        if let Err(error) = &answer {
            let text = format!("the server's cache was not cleared: {error}");
            self.shared.common.log.push(Level::Warning, text);
        }
        answer.is_ok()
    }

    /// Returns the state of the connection to the server.
    pub fn server(&self) -> ServerState {
        self.shared.common.state(&self.link)
    }

    /// Returns the lines for the engine's log since the last call.
    pub fn take_log(&self) -> Vec<LogLine> {
        self.shared.common.log.take()
    }

    /// Returns the figures since the start.
    pub fn stats(&self) -> SchedulerStats {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counters = &self.shared.counters;
        SchedulerStats {
            lookups: get(&counters.lookups),
            lookups_failed: get(&counters.failed),
            lookup_tokens: get(&counters.tokens),
            hit_tokens: get(&counters.hits),
            connections_lost: self.link.lost(),
        }
    }

    /// Ends the connection and its thread.
    pub fn shutdown(&self) {
        self.link.stop();
    }
}
