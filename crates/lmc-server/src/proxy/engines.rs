//! The engines behind the proxy, and the order in which they are asked.

use std::cmp::Reverse;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::Result;
use axum::body::Body;
use axum::http::{HeaderMap, Method, Request};
use hyper::body::Bytes;
use parking_lot::Mutex;

use super::warm::{HadPrompts, PromptBlocks};

/// Time for which an engine that has failed is asked after the others.
const PENALTY: Duration = Duration::from_secs(5);

/// Number of requests by which an engine that had a prompt may exceed the least loaded engine and still be
/// preferred.
const SPARE_LOAD: usize = 2;

/// Address of an engine: `http://HOST:PORT`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct EngineUrl(String);

impl FromStr for EngineUrl {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let url = text.trim_end_matches('/');
        let url = url.strip_suffix("/v1").unwrap_or(url);
        let Some(authority) = url.strip_prefix("http://") else {
            return Err("expected an engine's address that begins with http://".to_owned());
        };
        match authority.parse::<axum::http::uri::Authority>() {
            Ok(parsed) if parsed.port().is_some() && !authority.contains('@') => {
                Ok(Self(url.to_owned()))
            }
            _ => Err("expected an engine's address as http://HOST:PORT".to_owned()),
        }
    }
}

/// One engine, with the counts of the requests to it.
#[derive(Debug)]
pub(super) struct Engine {
    /// Index among the engines of its role.
    index: usize,
    url: String,
    /// Name or address of the engine's server, as other servers know it.
    peer: Option<String>,
    in_flight: AtomicUsize,
    /// Requests for which the engine was chosen, before they are sent.
    chosen: AtomicUsize,
    requests: AtomicU64,
    failures: AtomicU64,
    /// Time until which it is asked after the other engines.
    down_until: Mutex<Option<Instant>>,
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.url)
    }
}

/// An engine that was chosen for a request. Dropping this ends the choice.
#[derive(Debug)]
pub(super) struct Chosen(Arc<Engine>);

impl Chosen {
    fn new(engine: Arc<Engine>) -> Self {
        engine.chosen.fetch_add(1, Ordering::Relaxed);
        Self(engine)
    }

    /// Returns the name or address of the engine's server, if it is known.
    pub(super) fn peer(&self) -> Option<&str> {
        self.0.peer()
    }
}

impl Drop for Chosen {
    fn drop(&mut self) {
        self.0.chosen.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A request under way to an engine. Dropping this ends it.
#[derive(Debug)]
pub(super) struct InFlight(Arc<Engine>);

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Engine {
    pub(super) fn begin(self: &Arc<Self>) -> InFlight {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        self.requests.fetch_add(1, Ordering::Relaxed);
        InFlight(Arc::clone(self))
    }

    pub(super) fn request(
        &self,
        method: &Method,
        path: &str,
        headers: &HeaderMap,
        body: Bytes,
    ) -> Result<Request<Body>> {
        let request = Request::builder().method(method.clone());
        let mut request = request
            .uri(format!("{}{path}", self.url))
            .body(Body::from(body))?;
        *request.headers_mut() = headers.clone();
        Ok(request)
    }

    pub(super) fn peer(&self) -> Option<&str> {
        self.peer.as_deref()
    }

    /// Records that the engine has answered.
    pub(super) fn note_answer(&self) {
        *self.down_until.lock() = None;
    }

    /// Records that the engine has failed. Returns true if it had not failed before.
    pub(super) fn note_failure(&self, now: Instant) -> bool {
        self.failures.fetch_add(1, Ordering::Relaxed);
        self.down_until.lock().replace(now + PENALTY).is_none()
    }

    /// Returns the number of requests under way and of requests that it was chosen for.
    fn load(&self) -> usize {
        self.in_flight.load(Ordering::Relaxed) + self.chosen.load(Ordering::Relaxed)
    }

    /// Returns true from a failure to the next answer.
    fn has_failed(&self) -> bool {
        self.down_until.lock().is_some()
    }

    fn is_penalized(&self, now: Instant) -> bool {
        self.down_until.lock().is_some_and(|until| now < until)
    }

    /// Returns the numbers of requests under way, of all requests, and of failed requests.
    pub(super) fn counts(&self) -> (usize, u64, u64) {
        (
            self.in_flight.load(Ordering::Relaxed),
            self.requests.load(Ordering::Relaxed),
            self.failures.load(Ordering::Relaxed),
        )
    }
}

/// The engines of one role.
#[derive(Debug)]
pub(super) struct Engines {
    all: Vec<Arc<Engine>>,
    turn: AtomicUsize,
    had: HadPrompts,
}

impl fmt::Display for Engines {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.all.iter().map(|engine| &engine.url[..]).collect();
        f.write_str(&names.join(" "))
    }
}

impl Engines {
    /// Creates the engines at these addresses, with the servers of the first of them.
    pub(super) fn new(urls: &[EngineUrl], peers: &[String]) -> Self {
        let mut peers = peers.iter();
        let engine = |(index, EngineUrl(url)): (usize, &EngineUrl)| {
            Arc::new(Engine {
                index,
                url: url.clone(),
                peer: peers.next().cloned(),
                in_flight: AtomicUsize::new(0),
                chosen: AtomicUsize::new(0),
                requests: AtomicU64::new(0),
                failures: AtomicU64::new(0),
                down_until: Mutex::new(None),
            })
        };
        Self {
            all: urls.iter().enumerate().map(engine).collect(),
            turn: AtomicUsize::new(0),
            had: HadPrompts::new(Instant::now()),
        }
    }

    /// Returns the engines in the order in which they are to be asked for a prompt. First comes the engine
    /// that had most of the prompt, unless it is much busier than others. Then follow the other engines by
    /// the number of requests under way; engines with equal numbers take turns. Engines that failed just now
    /// come last.
    pub(super) fn order(&self, prompt: &PromptBlocks, now: Instant) -> Vec<Arc<Engine>> {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let (order, _) = self.sorted(turn, prompt, now);
        order.into_iter().cloned().collect()
    }

    /// Returns the engines in the order in which they are to be asked at a turn, and the number of leading
    /// blocks of the prompt that the first engine had.
    fn sorted(
        &self,
        turn: usize,
        prompt: &PromptBlocks,
        now: Instant,
    ) -> (Vec<&Arc<Engine>>, usize) {
        let known = self.had.known(self.all.len(), prompt, now);
        let mut order: Vec<(&Arc<Engine>, usize)> = self.all.iter().zip(known).collect();
        if !order.is_empty() {
            order.rotate_left(turn % self.all.len());
        }
        // A failed engine has no requests, and would count as the least loaded.
        let answering = self.all.iter().filter(|engine| !engine.has_failed());
        let least = answering.map(|engine| engine.load()).min();
        let most = least.unwrap_or(usize::MAX - SPARE_LOAD) + SPARE_LOAD;
        for (engine, known) in &mut order {
            if engine.load() > most {
                *known = 0;
            }
        }
        order.sort_by_cached_key(|(engine, known)| {
            (engine.is_penalized(now), Reverse(*known), engine.load())
        });
        let of_first = order.first().map_or(0, |(_, known)| *known);
        (
            order.into_iter().map(|(engine, _)| engine).collect(),
            of_first,
        )
    }

    /// Chooses the engine that will be asked first, if the servers of all engines are known.
    pub(super) fn choose(&self, prompt: &PromptBlocks, now: Instant) -> Option<Chosen> {
        // A turn is taken once for each request.
        if self.all.iter().any(|engine| engine.peer.is_none()) {
            return None;
        }
        let first = self.order(prompt, now).into_iter().next()?;
        Some(Chosen::new(first))
    }

    /// Chooses the engine that would be asked first, if it had nearly all of the prompt: see
    /// [`PromptBlocks::is_nearly_all`].
    pub(super) fn choose_warm(
        &self,
        prompt: &PromptBlocks,
        least: usize,
        now: Instant,
    ) -> Option<Chosen> {
        let (order, known) = self.sorted(self.turn.load(Ordering::Relaxed), prompt, now);
        let first = order.into_iter().next()?;
        let is_warm = prompt.is_nearly_all(known, least) && !first.is_penalized(now);
        is_warm.then(|| Chosen::new(Arc::clone(first)))
    }

    /// Records that an engine has a prompt in its cache now.
    pub(super) fn note_had(&self, engine: &Engine, prompt: &PromptBlocks, now: Instant) {
        self.had.note(engine.index, prompt, now);
    }

    /// Forgets which prompts an engine had: its host may be gone.
    pub(super) fn forget_had(&self, engine: &Engine) {
        self.had.forget(engine.index);
    }

    /// Returns the engines in the order in which they are to be asked: the chosen one first, unless it has
    /// failed since.
    pub(super) fn order_after(&self, chosen: Chosen, now: Instant) -> Vec<Arc<Engine>> {
        let mut order = self.all.clone();
        order.sort_by_cached_key(|engine| (engine.is_penalized(now), engine.load()));
        let first = &chosen.0;
        if !first.is_penalized(now) {
            order.sort_by_key(|engine| !Arc::ptr_eq(engine, first));
        }
        order
    }

    pub(super) fn any_is_up(&self, now: Instant) -> bool {
        self.all.iter().any(|engine| !engine.is_penalized(now))
    }

    pub(super) fn all(&self) -> &[Arc<Engine>] {
        &self.all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_hosts_with_ports() {
        let parsed = |text: &str| text.parse().map(|EngineUrl(url)| url);
        for (text, url) in [
            ("http://a:8000", "http://a:8000"),
            ("http://a:8000/", "http://a:8000"),
            ("http://a:8000/v1/", "http://a:8000"),
            ("http://[::1]:8000", "http://[::1]:8000"),
        ] {
            assert_eq!(parsed(text), Ok(url.to_owned()));
        }
        for wrong in [
            "",
            "a:8000",
            "https://a:8000",
            "http://a",
            "http://a:8000/x",
            "http://user:secret@a:8000",
        ] {
            let refusal = parsed(wrong).expect_err(wrong);
            assert!(!refusal.contains("secret"), "{refusal}");
        }
    }

    #[test]
    fn an_engine_that_is_chosen_for_later_counts_as_loaded_and_is_then_asked_first() {
        let urls = ["http://a:1", "http://b:1"].map(|url| url.parse().expect(url));
        let peers = ["alpha", "beta"].map(str::to_owned);
        let (engines, now) = (Engines::new(&urls, &peers), Instant::now());
        let new = PromptBlocks::default();
        let choose = || engines.choose(&new, now).expect("its server is known");
        let names = |engines: Vec<Arc<Engine>>| -> Vec<String> {
            engines.iter().map(ToString::to_string).collect()
        };
        // One after the other, each is sent its request before the next is chosen.
        for first in ["alpha", "beta", "alpha", "beta"] {
            let chosen = choose();
            assert_eq!(chosen.peer(), Some(first));
            engines.order_after(chosen, now);
        }
        // Streams that go on and requests that will come count together.
        let [a, b] = [0, 1].map(|index| &engines.all[index]);
        let _streams = [a, a, a, b].map(Engine::begin);
        let (one, other) = (choose(), choose());
        assert_eq!((one.peer(), other.peer()), (Some("beta"), Some("beta")));
        let _more = [b, b, b].map(Engine::begin);
        let order = ["http://b:1", "http://a:1"];
        assert_eq!(names(engines.order_after(one, now)), order);
        b.note_failure(now);
        let order = ["http://a:1", "http://b:1"];
        assert_eq!(names(engines.order_after(other, now)), order);
        // If none is chosen, equal engines take turns.
        let engines = Engines::new(&urls, &[]);
        for first in ["http://a:1", "http://b:1", "http://a:1"] {
            assert!(engines.choose(&new, now).is_none());
            assert_eq!(engines.order(&new, now)[0].to_string(), first);
        }
    }

    #[test]
    fn the_least_loaded_is_asked_first_equals_by_turns_and_failed_ones_last() {
        let urls = ["http://a:1", "http://b:1", "http://c:1"].map(|url| url.parse().expect(url));
        let (engines, now) = (Engines::new(&urls, &[]), Instant::now());
        let new = PromptBlocks::default();
        let first = |now| engines.order(&new, now)[0].to_string();
        let turns: Vec<String> = (0..4).map(|_| first(now)).collect();
        assert_eq!(
            turns,
            ["http://a:1", "http://b:1", "http://c:1", "http://a:1"]
        );
        let used = [engines.all[0].begin(), engines.all[1].begin()];
        assert_eq!([first(now), first(now)], ["http://c:1"; 2]);
        assert!(engines.all[2].note_failure(now) && !engines.all[2].note_failure(now));
        assert_ne!(first(now), "http://c:1");
        assert_eq!(first(now + PENALTY), "http://c:1");
        drop(used);
        for engine in &engines.all {
            engine.note_failure(now);
        }
        assert!(!engines.any_is_up(now) && engines.any_is_up(now + PENALTY));
        assert_eq!(
            engines.order(&new, now).len(),
            3,
            "failed engines are asked, too"
        );
        engines.all[1].note_answer();
        assert_eq!(first(now), "http://b:1");
    }

    #[test]
    fn the_engine_that_had_a_prompt_is_asked_first_unless_it_is_busier_than_others() {
        let urls = ["http://a:1", "http://b:1", "http://c:1"].map(|url| url.parse().expect(url));
        let (engines, now) = (Engines::new(&urls, &[]), Instant::now());
        let prompt = PromptBlocks::of_text(&"word ".repeat(1000));
        let first = || engines.order(&prompt, now)[0].to_string();
        let warm = |least| {
            let chosen = engines.choose_warm(&prompt, least, now)?;
            Some(chosen.0.to_string())
        };
        let [a, b, c] = [0, 1, 2].map(|index| &engines.all[index]);
        assert_eq!(warm(usize::MAX), None, "none had it");
        engines.note_had(b, &prompt, now);
        let turns: Vec<String> = (0..3).map(|_| first()).collect();
        assert_eq!(turns, ["http://b:1"; 3]);
        assert_eq!(warm(1024).as_deref(), Some("http://b:1"));
        assert_eq!(warm(0), None, "asked for by --min-prompt 0");
        // An engine that does not answer has no requests.
        c.note_failure(now);
        let _busy: Vec<InFlight> = (0..=SPARE_LOAD).map(|_| b.begin()).collect();
        assert_eq!((first(), warm(1024)), ("http://a:1".to_owned(), None));
        let _other = a.begin();
        assert_eq!(first(), "http://b:1");
        b.note_failure(now);
        assert_eq!((first(), warm(1024)), ("http://a:1".to_owned(), None));
        b.note_answer();
        assert_eq!(first(), "http://b:1");
        engines.forget_had(b);
        assert_eq!((first(), warm(1024)), ("http://a:1".to_owned(), None));
    }
}
