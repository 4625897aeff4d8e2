//! The clients of one run, and their measurements.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use lmc_vllm_adapter::{Client, Request};

use super::args::{BenchArgs, Workload};
use super::engine::{Engine, Moved, Plan};
use super::prompt::{Prompt, PromptShape, Random};
use super::stats::Samples;
use super::wire::Encoded;

/// One combination of workload, tokens and clients.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Case<'a> {
    pub(crate) args: &'a BenchArgs,
    pub(crate) workload: Workload,
    pub(crate) tokens: usize,
    pub(crate) clients: usize,
    /// Index among all runs; prompts of different runs differ.
    pub(crate) number: u64,
}

/// Measurements of one kind of operation.
#[derive(Debug, Default)]
pub(crate) struct Measured {
    /// Times until the answer arrived.
    pub(crate) latency: Samples,
    /// Times of the control messages alone: LOOKUP's own answer, or a transfer without its copies.
    pub(crate) control: Samples,
    pub(crate) bytes: u64,
    /// Sum over clients of bytes per second, within the time of each client's operations.
    pub(crate) bytes_per_second: f64,
}

impl Measured {
    fn merge(&mut self, mut other: Self, busy: Duration) {
        if other.bytes > 0 {
            other.bytes_per_second += other.bytes as f64 / busy.as_secs_f64();
        }
        self.latency.append(other.latency);
        self.control.append(other.control);
        self.bytes += other.bytes;
        self.bytes_per_second += other.bytes_per_second;
    }
}

/// Counters of a run, apart from its times.
#[derive(Debug, Clone, Default)]
pub(crate) struct Counts {
    /// Requested prompts that were not (or no longer) cached.
    pub(crate) misses: u64,
    pub(crate) verified_bytes: u64,
    pub(crate) wrong_bytes: u64,
    pub(crate) errors: Vec<String>,
    /// Chunks stored, also before the clock ran.
    pub(crate) stored_chunks: u64,
    pub(crate) stored_bytes: u64,
}

/// Results of one client, or of all clients.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub(crate) noop: Measured,
    pub(crate) lookup: Measured,
    pub(crate) store: Measured,
    pub(crate) retrieve: Measured,
    pub(crate) counts: Counts,
    busy_store: Duration,
    busy_retrieve: Duration,
}

impl Tally {
    fn merge(&mut self, other: Self) {
        self.noop.merge(other.noop, Duration::ZERO);
        self.lookup.merge(other.lookup, Duration::ZERO);
        self.store.merge(other.store, other.busy_store);
        self.retrieve.merge(other.retrieve, other.busy_retrieve);
        let (mine, its) = (&mut self.counts, other.counts);
        mine.misses += its.misses;
        mine.verified_bytes += its.verified_bytes;
        mine.wrong_bytes += its.wrong_bytes;
        mine.errors.extend(its.errors);
        mine.stored_chunks += its.stored_chunks;
        mine.stored_bytes += its.stored_bytes;
    }
}

const WARM_UP: u8 = 0;
const MEASURE: u8 = 1;
const STOP: u8 = 2;

/// State that all threads of a run read.
#[derive(Debug)]
pub(crate) struct Clock {
    phase: AtomicU8,
    count: Option<u64>,
    completed: AtomicU64,
    ready: Barrier,
}

impl Clock {
    /// Returns the number of measured operations of all clients so far.
    pub(crate) fn completed(&self) -> u64 {
        self.completed.load(Ordering::Relaxed)
    }

    fn measures(&self) -> bool {
        self.phase.load(Ordering::Acquire) == MEASURE
    }

    /// Returns true if a client that has completed `done` measured operations continues.
    fn goes_on(&self, done: u64) -> bool {
        self.phase.load(Ordering::Acquire) != STOP && self.count.is_none_or(|count| done < count)
    }

    /// Returns true if an operation that has ended counts. `measured`: it began while the clock ran.
    fn counts(&self, measured: bool) -> bool {
        let counts = measured && self.measures();
        if counts {
            self.completed.fetch_add(1, Ordering::Relaxed);
        }
        counts
    }
}

/// Runs one case: sets up, warms up, measures. `measured` is called when the clock starts and when it has
/// stopped; `tick` is called repeatedly in between.
pub(crate) fn run(
    plan: &Arc<Plan>,
    case: Case<'_>,
    mut measured: impl FnMut(),
    tick: impl Fn(&Clock),
) -> Result<(Tally, Duration)> {
    let groups = groups(case);
    let clock = Clock {
        phase: WARM_UP.into(),
        count: case.args.count,
        completed: 0.into(),
        ready: Barrier::new(groups.len() + 1),
    };
    thread::scope(|scope| {
        let threads: Vec<_> = groups
            .into_iter()
            .map(|clients| {
                let clock = &clock;
                let work = move || client_thread(plan, case, clients, clock);
                thread::Builder::new()
                    .name("bench-client".to_owned())
                    .spawn_scoped(scope, work)
            })
            .collect();
        // Every started thread waits at the barrier for all threads, so none may be missing.
        let threads: Vec<_> = threads
            .into_iter()
            .collect::<Result<_, _>>()
            .unwrap_or_else(|error| panic!("cannot start a thread for each client: {error}"));
        clock.ready.wait();
        thread::sleep(Duration::from_secs_f64(case.args.warmup));
        measured();
        let started = Instant::now();
        clock.phase.store(MEASURE, Ordering::Release);
        let end = Duration::from_secs_f64(case.args.duration);
        while threads.iter().any(|thread| !thread.is_finished()) {
            if case.args.count.is_none() && started.elapsed() >= end {
                break;
            }
            thread::sleep(Duration::from_millis(if case.args.count.is_some() {
                2
            } else {
                20
            }));
            tick(&clock);
        }
        let took = started.elapsed();
        measured();
        clock.phase.store(STOP, Ordering::Release);
        let mut total = Tally::default();
        for thread in threads {
            match thread.join() {
                Ok(Ok(tally)) => total.merge(tally),
                Ok(Err(error)) => total.counts.errors.push(format!("{error:#}")),
                Err(_) => bail!("a client panicked"),
            }
        }
        Ok((total, took))
    })
}

/// Returns the clients of each thread.
fn groups(case: Case<'_>) -> Vec<Vec<u64>> {
    let alone = !matches!(
        case.workload,
        Workload::Noop | Workload::Lookup | Workload::LookupCold
    );
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let size = match case.args.connections_per_thread {
        _ if alone => 1,
        0 if case.clients <= 2 * cores => 1,
        0 => case.clients.div_ceil(cores),
        size => size,
    };
    let clients: Vec<u64> = (0..case.clients as u64).collect();
    clients.chunks(size).map(<[u64]>::to_vec).collect()
}

fn client_thread(
    plan: &Arc<Plan>,
    case: Case<'_>,
    clients: Vec<u64>,
    clock: &Clock,
) -> Result<Tally> {
    // A failure before the barrier must not keep the other threads waiting.
    if case.workload == Workload::Noop {
        let ready = clients
            .iter()
            .map(|_| Asker::noop(plan))
            .collect::<Result<Vec<_>>>();
        clock.ready.wait();
        return Ok(ask_in_turn(plan, ready?, clock));
    }
    let prompts = Prompts::new(plan, case, clients[0]);
    let mut tally = Tally::default();
    let prepared = prepare(plan, case, &clients, prompts, &mut tally);
    clock.ready.wait();
    let (mut engine, askers, prompts) = prepared?;
    match case.workload {
        Workload::Noop | Workload::Lookup | Workload::LookupCold => {
            tally.merge(ask_in_turn(plan, askers, clock));
        }
        Workload::Store | Workload::Retrieve | Workload::Mixed => {
            let outcome = transfer(case, &mut engine, prompts, clock, &mut tally);
            if let Err(error) = outcome {
                tally.counts.errors.push(format!("{error:#}"));
            }
        }
    }
    if let Err(error) = engine.stop() {
        let text = format!("unregistering failed: {error:#}");
        tally.counts.errors.push(text);
    }
    Ok(tally)
}

/// Cached and new prompts of one client.
struct Prompts {
    shape: PromptShape,
    next: u64,
    cached: Vec<Prompt>,
}

impl Prompts {
    fn new(plan: &Plan, case: Case<'_>, client: u64) -> Self {
        let shared = case.tokens as f64 * case.args.shared_prefix;
        Self {
            shape: PromptShape {
                tokens: case.tokens,
                chunk_tokens: plan.chunk_tokens,
                shared_tokens: shared as usize,
                seed: case.args.seed,
            },
            next: case.number << 44 | client << 28,
            cached: Vec::new(),
        }
    }

    fn fresh(&mut self) -> Prompt {
        self.next += 1;
        Prompt::new(self.shape, self.next)
    }
}

/// Registers an engine, and stores the prompts that the clients of this thread will request.
fn prepare(
    plan: &Arc<Plan>,
    case: Case<'_>,
    clients: &[u64],
    mut prompts: Prompts,
    tally: &mut Tally,
) -> Result<(Engine, Vec<Asker>, Prompts)> {
    ensure!(
        case.tokens >= plan.chunk_tokens,
        "--tokens: expected at least the server's chunk of {} tokens, found {}",
        plan.chunk_tokens,
        case.tokens
    );
    let mut engine = Engine::start(plan)?;
    let mut store = |prompts: &mut Prompts| -> Result<Prompt> {
        let prompt = prompts.fresh();
        let moved = engine.store(&prompt)?;
        tally.counts.stored_chunks += moved.chunks;
        tally.counts.stored_bytes += moved.bytes;
        Ok(prompt)
    };
    let mut askers = Vec::new();
    match case.workload {
        Workload::Noop | Workload::Store => {}
        Workload::Lookup => {
            for &client in clients {
                let mut prompts = Prompts::new(plan, case, client);
                let stored = (0..case.args.prompts).map(|_| store(&mut prompts));
                let stored = stored.collect::<Result<Vec<_>>>()?;
                let ask = stored.iter().zip(0..);
                let ask = ask.map(|(prompt, number)| Ask::lookup(plan, prompt, client, number));
                askers.push(Asker::new(plan, RequestSource::Turns(ask.collect()))?);
            }
            // Work that a server does after its answer must not cause misses.
            settle(&mut askers, plan)?;
        }
        Workload::LookupCold => {
            for &client in clients {
                let prompts = Prompts::new(plan, case, client);
                askers.push(Asker::new(plan, RequestSource::Fresh(prompts, client))?);
            }
        }
        Workload::Retrieve | Workload::Mixed => {
            for _ in 0..case.args.prompts {
                let prompt = store(&mut prompts)?;
                prompts.cached.push(prompt);
            }
        }
    }
    Ok((engine, askers, prompts))
}

/// Looks up each prompt until all its chunks are found, before the clock runs.
fn settle(askers: &mut [Asker], plan: &Plan) -> Result<()> {
    let deadline = Instant::now() + plan.args.timeout;
    for asker in askers {
        let RequestSource::Turns(asks) = &asker.source else {
            continue;
        };
        for ask in asks {
            loop {
                ask.first.ask(&mut asker.client)?;
                let found = loop {
                    ask.query.send(&mut asker.client)?;
                    if let Some(found) = ask.query.receive_hits(&mut asker.client)? {
                        break found;
                    }
                };
                ask.end.ask(&mut asker.client)?;
                if found == ask.expected {
                    break;
                }
                ensure!(
                    Instant::now() < deadline,
                    "{found} of {} chunks are found after they were stored: the pool may be too small \
                     for --clients times --prompts; use fewer, or a larger pool",
                    ask.expected
                );
                thread::sleep(Duration::from_millis(5));
            }
        }
    }
    Ok(())
}

/// Stores and retrieves, one operation after the other.
fn transfer(
    case: Case<'_>,
    engine: &mut Engine,
    mut prompts: Prompts,
    clock: &Clock,
    tally: &mut Tally,
) -> Result<()> {
    let mut random = Random::new(case.args.seed ^ prompts.next);
    let (mut done, mut turn) = (0, 0);
    while clock.goes_on(done) {
        let mix = case.args.mix;
        let kind = match case.workload {
            Workload::Mixed => match random.share() {
                share if share < mix.lookup => Workload::Lookup,
                share if share < mix.lookup + mix.store => Workload::Store,
                _ => Workload::Retrieve,
            },
            other => other,
        };
        turn += 1;
        match kind {
            Workload::Store => {
                let prompt = prompts.fresh();
                let measured = clock.measures();
                let moved = engine.store(&prompt)?;
                tally.counts.stored_chunks += moved.chunks;
                tally.counts.stored_bytes += moved.bytes;
                if clock.counts(measured) {
                    done += 1;
                    tally.busy_store += moved.took;
                    record(&mut tally.store, &moved);
                }
                if case.workload == Workload::Mixed {
                    let oldest = turn % prompts.cached.len();
                    prompts.cached[oldest] = prompt;
                }
            }
            Workload::Retrieve => {
                let prompt = &prompts.cached[turn % prompts.cached.len()];
                let measured = clock.measures();
                let moved = engine.retrieve(prompt)?;
                let counts = clock.counts(measured);
                done += u64::from(counts);
                let Some(moved) = moved else {
                    tally.counts.misses += 1;
                    continue;
                };
                tally.counts.verified_bytes += moved.verified;
                tally.counts.wrong_bytes += moved.wrong;
                if counts {
                    tally.busy_retrieve += moved.took;
                    record(&mut tally.retrieve, &moved);
                }
            }
            _ => {
                let prompt = &prompts.cached[turn % prompts.cached.len()];
                let measured = clock.measures();
                let (found, took) = engine.lookup(prompt)?;
                tally.counts.misses += u64::from(found < prompt.chunks() as u64);
                if clock.counts(measured) {
                    done += 1;
                    tally.lookup.latency.push(took);
                }
            }
        }
    }
    Ok(())
}

fn record(measured: &mut Measured, moved: &Moved) {
    measured.latency.push(moved.took);
    measured.control.push(moved.control);
    measured.bytes += moved.bytes;
}

/// The requests of one lookup: the lookup, the poll for its result, and the end.
struct Ask {
    first: Encoded,
    query: Encoded,
    end: Encoded,
    expected: u64,
}

impl Ask {
    fn lookup(plan: &Plan, prompt: &Prompt, client: u64, number: u64) -> Self {
        let request_id = format!("bench-lookup-{client}-{number}");
        Self {
            first: Encoded::new(&Request::Lookup(plan.key(prompt, None, &request_id))),
            query: Encoded::new(&Request::QueryPrefetchStatus {
                request_id: request_id.clone(),
            }),
            end: Encoded::new(&Request::EndSession { request_id }),
            expected: prompt.chunks() as u64,
        }
    }
}

enum RequestSource {
    Noop(Encoded),
    Turns(Vec<Ask>),
    Fresh(Prompts, u64),
}

#[derive(Clone, Copy, PartialEq)]
enum LookupPhase {
    First,
    Query,
    End,
}

/// A connection that sends one request after the other.
struct Asker {
    client: Client,
    source: RequestSource,
    turn: usize,
    fresh: Option<Ask>,
    phase: LookupPhase,
    started: Instant,
    measured: bool,
    done: u64,
}

impl Asker {
    fn new(plan: &Plan, source: RequestSource) -> Result<Self> {
        Ok(Self {
            client: plan.connect()?,
            source,
            turn: 0,
            fresh: None,
            phase: LookupPhase::First,
            started: Instant::now(),
            measured: false,
            done: 0,
        })
    }

    fn noop(plan: &Plan) -> Result<Self> {
        Self::new(plan, RequestSource::Noop(Encoded::new(&Request::Noop)))
    }

    /// Sends the first request of the next operation.
    fn begin(&mut self, plan: &Plan, clock: &Clock) -> Result<()> {
        self.turn += 1;
        self.phase = LookupPhase::First;
        if let RequestSource::Fresh(prompts, client) = &mut self.source {
            let mut ask = Ask::lookup(plan, &prompts.fresh(), *client, self.turn as u64);
            ask.expected = (prompts.shape.shared_tokens / plan.chunk_tokens) as u64;
            self.fresh = Some(ask);
        }
        let first = match (&self.source, &self.fresh) {
            (RequestSource::Noop(request), _) => request,
            (RequestSource::Turns(asks), _) => &asks[self.turn % asks.len()].first,
            (RequestSource::Fresh(..), fresh) => &fresh.as_ref().context("it was just made")?.first,
        };
        self.measured = clock.measures();
        self.started = Instant::now();
        first.send(&mut self.client)
    }

    /// Takes the next answer. Returns true if the operation is over.
    fn advance(&mut self, clock: &Clock, tally: &mut Tally) -> Result<bool> {
        let ask = match (&self.source, &self.fresh) {
            (RequestSource::Noop(request), _) => {
                request.receive(&mut self.client)?;
                if clock.counts(self.measured) {
                    tally.noop.latency.push(self.started.elapsed());
                    self.done += 1;
                }
                return Ok(true);
            }
            (RequestSource::Turns(asks), _) => &asks[self.turn % asks.len()],
            (RequestSource::Fresh(..), fresh) => fresh.as_ref().context("it was begun")?,
        };
        match self.phase {
            LookupPhase::First => {
                ask.first.receive(&mut self.client)?;
                if self.measured {
                    tally.lookup.control.push(self.started.elapsed());
                }
                ask.query.send(&mut self.client)?;
                self.phase = LookupPhase::Query;
            }
            LookupPhase::Query => match ask.query.receive_hits(&mut self.client)? {
                None => ask.query.send(&mut self.client)?,
                Some(found) => {
                    if clock.counts(self.measured) {
                        tally.lookup.latency.push(self.started.elapsed());
                        self.done += 1;
                    }
                    ensure!(
                        found <= ask.expected,
                        "the server reports {found} chunks of a prompt as cached, but only {} were stored",
                        ask.expected
                    );
                    // No chunks of a cold prompt are expected, so it has no misses.
                    let misses =
                        matches!(self.source, RequestSource::Turns(_)) && found < ask.expected;
                    tally.counts.misses += u64::from(misses);
                    ask.end.send(&mut self.client)?;
                    self.phase = LookupPhase::End;
                }
            },
            LookupPhase::End => {
                ask.end.receive(&mut self.client)?;
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// Keeps one request of each connection under way and takes the answers in turn. With several connections
/// per thread, an answer may wait for its turn, which counts as latency.
fn ask_in_turn(plan: &Plan, askers: Vec<Asker>, clock: &Clock) -> Tally {
    let mut tally = Tally::default();
    let mut active = Vec::new();
    for mut asker in askers {
        match asker.begin(plan, clock) {
            Ok(()) => active.push(asker),
            Err(error) => tally.counts.errors.push(format!("{error:#}")),
        }
    }
    while !active.is_empty() {
        active.retain_mut(|asker| {
            let step = asker.advance(clock, &mut tally).and_then(|over| {
                if !over {
                    return Ok(true);
                }
                if !clock.goes_on(asker.done) {
                    return Ok(false);
                }
                asker.begin(plan, clock).map(|()| true)
            });
            step.unwrap_or_else(|error| {
                tally.counts.errors.push(format!("{:#}", anyhow!(error)));
                false
            })
        });
    }
    tally
}
