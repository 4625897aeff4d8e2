//! The scheduler's side: looks up prompts.

use std::collections::{HashMap, HashSet};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use lmc_key::ChunkHash;
use parking_lot::Mutex;

use crate::adapters::common::{Common, Server, ServerState};
use crate::adapters::link::{Answer, Link, LinkError, SessionId, Setup};
use crate::adapters::log::{Level, shown};
use crate::adapters::prompt::tail_request_id;
use crate::adapters::{AdapterError, Endpoint, EngineDescription, LogLine, Prompt, Timeouts};
use crate::protocol::{MAX_SOURCE_WAIT, Reply, Request, RequestConfigs};

/// Longest promotion of a lookup's chunks; a live server answers earlier.
const PROMOTION_TIMEOUT: Duration = Duration::from_secs(60);
/// Longest wait for a clear, which lower tiers record.
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
    /// Lookups that ended without an answer of the server, and count as misses.
    pub lookups_failed: u64,
    /// Tokens of the prompts that were looked up.
    pub lookup_tokens: u64,
    /// Tokens that the server found.
    pub hit_tokens: u64,
    /// Connections to the server that were lost.
    pub connections_lost: u64,
}

#[derive(Debug, Default)]
struct SchedulerCounters {
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
    /// Tiers that the tokens came from, in the order of the tokens; empty if they are not known.
    tiers: Vec<(String, u64)>,
}

impl FoundTokens {
    /// Reads the answer to a lookup of this many tokens, `unit` in each chunk.
    fn read(answer: Answer, unit: u32, most: u64) -> Result<Self, Answer> {
        let tokens = |chunks: u64| chunks.saturating_mul(u64::from(unit));
        let (chunks, tiers) = match answer {
            Ok(Reply::Int(chunks)) => (chunks, Vec::new()),
            Ok(Reply::Found { chunks, tiers }) => (chunks, tiers),
            _ => return Err(answer),
        };
        let named = tiers.iter().map(|tier| tier.chunks);
        let named = named.fold(0_u64, u64::saturating_add);
        let tiers = tiers.into_iter().filter(|_| named == chunks);
        Ok(Self {
            // At most as many tokens as were asked for, whatever the server answers.
            tokens: tokens(chunks).min(most),
            tiers: tiers
                .map(|found| (found.tier, tokens(found.chunks)))
                .collect(),
        })
    }

    /// Appends the tokens of the tail. Names no tier unless the tiers of all tokens are known.
    fn followed_by(mut self, after: Self) -> Self {
        let is_named = |found: &Self| found.tokens == 0 || !found.tiers.is_empty();
        let are_named = is_named(&self) && is_named(&after);
        self.tokens += after.tokens;
        self.tiers.extend(after.tiers);
        self.tiers.retain(|_| are_named);
        self
    }
}

/// The lookups of requests.
#[derive(Debug, Default)]
struct Lookups {
    results: HashMap<String, Lookup>,
    /// Requests whose tails were looked up under ids of their own, until the requests end.
    tails: HashSet<String>,
}

#[derive(Debug)]
struct SchedulerState {
    common: Arc<Common>,
    lookups: Mutex<Lookups>,
    counters: SchedulerCounters,
}

impl SchedulerState {
    /// Notes the result of a lookup, unless the engine no longer needs it.
    fn found(&self, request_id: &str, number: u64, found: FoundTokens) {
        (self.counters.hits).fetch_add(found.tokens, Ordering::Relaxed);
        let mut lookups = self.lookups.lock();
        if let Some(lookup) = lookups.results.get_mut(request_id)
            && matches!(lookup, Lookup::Pending(pending) if *pending == number)
        {
            *lookup = Lookup::Known(found);
        }
    }

    /// Tells the server that the chunks it keeps under an id are no longer used.
    fn end_session(self: &Arc<Self>, link: &Link, name: String) {
        let shared = Arc::clone(self);
        let end = Request::EndSession {
            request_id: name.clone(),
        };
        link.ask(end, self.common.timeouts.answer, move |answer| {
            if answer.is_err() {
                shared.log_failure("end of the session", &name, &answer);
            }
        });
    }

    /// Logs why the server did not do what it was asked to do. The link logs a missing server.
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

/// A lookup under way: first of the whole chunks, then of the tail after the chunks that were
/// found.
struct PendingLookup {
    shared: Arc<SchedulerState>,
    link: Weak<Link>,
    request_id: String,
    number: u64,
    server: Server,
    cache_salt: String,
    configs: RequestConfigs,
    /// Hashes of all whole blocks of the prompt; empty if its tail is not looked up.
    blocks: Arc<[ChunkHash]>,
}

impl PendingLookup {
    /// Looks up the whole chunks, and then the tail.
    fn find_chunks(self, prompt: &Prompt, tokens: usize) {
        let (name, unit) = (self.request_id.clone(), self.server.chunk_size);
        self.ask(name, prompt, tokens, unit, |this, found| match found {
            // A prompt of which nothing is cached costs one request.
            Ok(found) if found.tokens == 0 => this.end(found),
            Ok(found) => this.find_tail(found),
            Err(answer) => {
                this.failed(&answer);
                this.end(FoundTokens::default());
            }
        });
    }

    /// Looks up the tail after the tokens that were found, and ends the lookup with both results.
    fn find_tail(self, found: FoundTokens) {
        // A tail without whole chunks before it is the request's only lookup.
        let is_only = found.tokens == 0;
        let tail = self.tail(found.tokens);
        let Some(tail) = tail.filter(|_| is_only || self.begin_tail()) else {
            return self.end(found);
        };
        let name = match is_only {
            true => self.request_id.clone(),
            false => tail_request_id(&self.request_id),
        };
        let unit = self.shared.common.engine.block_size;
        let tokens = tail.len() * unit as usize;
        let prompt = Prompt::Tail(tail);
        self.ask(name, &prompt, tokens, unit, move |this, tail| {
            let tail = tail.unwrap_or_else(|answer| {
                this.failed(&answer);
                FoundTokens::default()
            });
            if !is_only {
                this.give_back_if_over();
            }
            this.end(found.followed_by(tail));
        });
    }

    /// Ends the tail's session again if the request ended while its tail was being looked up.
    fn give_back_if_over(&self) {
        let is_over = !self.shared.lookups.lock().tails.contains(&self.request_id);
        if let (true, Some(link)) = (is_over, self.link.upgrade()) {
            (self.shared).end_session(&link, tail_request_id(&self.request_id));
        }
    }

    /// Returns the blocks that a tail after the tokens that were found may have.
    fn tail(&self, found: u64) -> Option<Arc<[ChunkHash]>> {
        let block_size = self.shared.common.engine.block_size;
        // All blocks of a chunk would make a whole chunk.
        let most = (self.server.chunk_size / block_size).saturating_sub(1) as usize;
        let first = usize::try_from(found / u64::from(block_size)).ok()?;
        let rest = self.blocks.get(first..)?;
        let tail = &rest[..rest.len().min(most)];
        (!tail.is_empty()).then(|| tail.into())
    }

    /// Notes that the tail is looked up under an id of its own. Returns false if the engine no
    /// longer needs it.
    fn begin_tail(&self) -> bool {
        let mut lookups = self.shared.lookups.lock();
        let is_pending = self.is_pending(&lookups);
        if is_pending {
            lookups.tails.insert(self.request_id.clone());
        }
        is_pending
    }

    fn is_pending(&self, lookups: &Lookups) -> bool {
        let lookup = lookups.results.get(&self.request_id);
        matches!(lookup, Some(Lookup::Pending(number)) if *number == self.number)
    }

    /// Sends a lookup of the first `tokens` tokens of `prompt` under `name`, and passes the result to
    /// `then`.
    fn ask(
        self,
        name: String,
        prompt: &Prompt,
        tokens: usize,
        unit: u32,
        then: impl FnOnce(Self, Result<FoundTokens, Answer>) + Send + 'static,
    ) {
        let common = &self.shared.common;
        let (salt, configs, timeout) = (&self.cache_salt, &self.configs, common.timeouts.answer);
        let key = common.key(self.server, &name, prompt, 0..tokens, salt, configs);
        let Some(link) = self.link.upgrade() else {
            return then(self, Err(Err(LinkError::Down)));
        };
        link.ask(Request::Lookup(key), timeout, move |sent| {
            let link = match (sent, self.link.upgrade()) {
                (Ok(_), Some(link)) => link,
                (Ok(_), None) => return then(self, Err(Err(LinkError::Down))),
                (refused, _) => return then(self, Err(refused)),
            };
            let time = PROMOTION_TIMEOUT + self.configs.wait.min(MAX_SOURCE_WAIT);
            let (request_id, seconds) = (name, time.as_secs_f64());
            let wait = match self.server.wait_lookup {
                true => Request::WaitLookup {
                    request_id,
                    timeout: seconds,
                },
                false => Request::WaitPrefetchStatus {
                    request_id,
                    timeout: seconds,
                },
            };
            link.ask(wait, time + timeout, move |answer| {
                then(self, FoundTokens::read(answer, unit, tokens as u64));
            });
        });
    }

    /// Counts and logs a lookup without an answer.
    fn failed(&self, answer: &Answer) {
        self.shared.counters.failed.fetch_add(1, Ordering::Relaxed);
        self.shared.log_failure("lookup", &self.request_id, answer);
    }

    /// Notes the result.
    fn end(self, found: FoundTokens) {
        self.shared.found(&self.request_id, self.number, found);
    }
}

/// Looks up prompts for an engine's scheduler, without ever waiting on the engine's thread.
#[derive(Debug)]
pub struct SchedulerAdapter {
    shared: Arc<SchedulerState>,
    link: Arc<Link>,
    numbers: AtomicU64,
}

impl SchedulerAdapter {
    /// Connects to a server, and waits at most 5 s for it. Without a server every lookup is a miss
    /// until there is one.
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
            shared: Arc::new(SchedulerState {
                common,
                lookups: Mutex::default(),
                counters: SchedulerCounters::default(),
            }),
            link: Arc::new(link),
            numbers: AtomicU64::new(0),
        })
    }

    /// Sends a lookup of a prompt's whole chunks, unless the request has a lookup already. For a
    /// [`Prompt::Blocks`], the tail after the found chunks is looked up next. A prompt of which
    /// nothing can be found is a miss.
    pub fn maybe_submit_lookup_request(
        &self,
        request_id: &str,
        prompt: &Prompt,
        cache_salt: &str,
        configs: &RequestConfigs,
    ) {
        let number = self.numbers.fetch_add(1, Ordering::Relaxed);
        // A prompt that was named for another server is a miss.
        let server = (self.shared.common.server()).filter(|server| server.understands(prompt));
        let block_size = self.shared.common.engine.block_size;
        let chunks = server.map_or(0, |server| prompt.chunks(server.chunk_size, block_size));
        let blocks = match (prompt, server) {
            (Prompt::Blocks(hashes), Some(Server { tails: true, .. })) => Arc::clone(hashes),
            _ => Arc::default(),
        };
        let is_asked = chunks > 0 || !blocks.is_empty();
        {
            let mut lookups = self.shared.lookups.lock();
            if lookups.results.contains_key(request_id) {
                return;
            }
            let lookup = match is_asked {
                false => Lookup::Known(FoundTokens::default()),
                true => Lookup::Pending(number),
            };
            lookups.results.insert(request_id.to_owned(), lookup);
        }
        let Some(server) = server.filter(|_| is_asked) else {
            return;
        };
        let tokens = chunks * server.chunk_size as usize;
        let counters = &self.shared.counters;
        counters.lookups.fetch_add(1, Ordering::Relaxed);
        let named = tokens.max(blocks.len() * block_size as usize);
        counters.tokens.fetch_add(named as u64, Ordering::Relaxed);
        let lookup = PendingLookup {
            shared: Arc::clone(&self.shared),
            link: Arc::downgrade(&self.link),
            request_id: request_id.to_owned(),
            number,
            server,
            cache_salt: cache_salt.to_owned(),
            configs: configs.clone(),
            blocks,
        };
        match chunks {
            0 => lookup.find_tail(FoundTokens::default()),
            _ => lookup.find_chunks(prompt, tokens),
        }
    }

    /// Returns the tokens that a lookup found, or `None` while it is pending. 0 for a request
    /// without a lookup.
    pub fn check_lookup_result(&self, request_id: &str) -> Option<u64> {
        match self.shared.lookups.lock().results.get(request_id) {
            None => Some(0),
            Some(Lookup::Known(found)) => Some(found.tokens),
            Some(Lookup::Pending(_)) => None,
        }
    }

    /// Returns the tiers that the tokens of a lookup came from, in the order of the tokens: `dram`,
    /// or a lower tier's name, and the number of tokens. Empty if the server does not report them.
    pub fn lookup_tiers(&self, request_id: &str) -> Vec<(String, u64)> {
        match self.shared.lookups.lock().results.get(request_id) {
            Some(Lookup::Known(found)) => found.tiers.clone(),
            _ => Vec::new(),
        }
    }

    /// Removes the result of a request's lookup. The server keeps the chunks for the request until
    /// they are retrieved or the session ends.
    pub fn cleanup_lookup_result(&self, request_id: &str) {
        self.shared.lookups.lock().results.remove(request_id);
    }

    /// Ends a request: the server may evict the chunks that it kept for the request.
    pub fn end_session(&self, request_id: &str) {
        let had_tail = {
            let mut lookups = self.shared.lookups.lock();
            lookups.results.remove(request_id);
            lookups.tails.remove(request_id)
        };
        let tail = had_tail.then(|| tail_request_id(request_id));
        for name in [Some(request_id.to_owned()), tail].into_iter().flatten() {
            self.shared.end_session(&self.link, name);
        }
    }

    /// Clears the server's cache, except for chunks in use, and waits for it, at most 10 s. Returns
    /// false if the cache was not cleared.
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
