//! Figures of the proxy: its page of metrics.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::engines::{Engine, Engines};

/// Outcome of a request's prefill.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Prefill {
    /// A prefill engine has computed the prompt.
    Done,
    /// The prompt is short.
    Short,
    /// The decode engine would not read its cache for the request.
    Uncached,
    /// The decode engine had nearly all of the prompt.
    Warm,
    /// The request is invalid, or the prefill engine refused it; the decode engine answers with the reason.
    Refused,
    /// No prefill engine answered.
    Failed,
    /// No prefill engine answered in time.
    Late,
}

const OUTCOMES: [(Prefill, &str); 7] = [
    (Prefill::Done, "done"),
    (Prefill::Short, "short"),
    (Prefill::Uncached, "uncached"),
    (Prefill::Warm, "warm"),
    (Prefill::Refused, "refused"),
    (Prefill::Failed, "failed"),
    (Prefill::Late, "late"),
];

#[derive(Debug, Default)]
pub(super) struct ProxyCounters {
    outcomes: [AtomicU64; OUTCOMES.len()],
    /// Time of the successful prefills.
    prefill_micros: AtomicU64,
}

impl ProxyCounters {
    pub(super) fn count(&self, outcome: Prefill) {
        self.outcomes[outcome as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a successful prefill and its time.
    pub(super) fn count_done(&self, took: Duration) {
        self.count(Prefill::Done);
        let micros = took.as_micros() as u64;
        self.prefill_micros.fetch_add(micros, Ordering::Relaxed);
    }
}

/// Metrics with a value for each engine: name, kind, help, value.
type OfEngines = (&'static str, &'static str, &'static str, fn(&Engine) -> u64);
const OF_ENGINES: [OfEngines; 3] = [
    (
        "lmc_proxy_engine_requests_total",
        "counter",
        "Requests to an engine, including requests that could not be sent to it.",
        |engine| engine.counts().1,
    ),
    (
        "lmc_proxy_engine_failures_total",
        "counter",
        "Requests that failed at an engine: it could not be reached, broke off, gave no answer in time, or answered with an error of its own.",
        |engine| engine.counts().2,
    ),
    (
        "lmc_proxy_engine_in_flight",
        "gauge",
        "Requests to an engine that are under way.",
        |engine| engine.counts().0 as u64,
    ),
];

/// Returns the page in Prometheus's text format.
pub(super) fn page(counters: &ProxyCounters, prefill: &Engines, decode: &Engines) -> String {
    let mut page = String::new();
    let head = |page: &mut String, name: &str, kind: &str, help: &str| {
        let _ = writeln!(page, "# HELP {name} {help}\n# TYPE {name} {kind}");
    };
    let name = "lmc_proxy_requests_total";
    let help = "Requests of clients, by the outcome of their prefill.";
    head(&mut page, name, "counter", help);
    for ((_, outcome), count) in OUTCOMES.iter().zip(&counters.outcomes) {
        let count = count.load(Ordering::Relaxed);
        let _ = writeln!(page, "{name}{{prefill=\"{outcome}\"}} {count}");
    }
    let name = "lmc_proxy_prefill_seconds_total";
    head(
        &mut page,
        name,
        "counter",
        "Time of the successful prefills.",
    );
    let seconds = counters.prefill_micros.load(Ordering::Relaxed) as f64 / 1e6;
    let _ = writeln!(page, "{name} {seconds}");
    for (name, kind, help, value) in OF_ENGINES {
        head(&mut page, name, kind, help);
        for (role, engines) in [("prefill", prefill), ("decode", decode)] {
            for engine in engines.all() {
                // An address has no character that ends a label.
                let _ = writeln!(
                    page,
                    "{name}{{role=\"{role}\",engine=\"{engine}\"}} {}",
                    value(engine)
                );
            }
        }
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outcomes_are_listed_in_their_order() {
        for (at, (outcome, _)) in OUTCOMES.iter().enumerate() {
            assert_eq!(*outcome as usize, at);
        }
    }

    #[test]
    fn every_metric_is_documented() {
        let guide = include_str!("../../../../docs/pd.md");
        let engines = Engines::new(&["http://a:1".parse().expect("an address")], &[]);
        let page = page(&ProxyCounters::default(), &engines, &engines);
        let names = page.lines().filter_map(|line| line.strip_prefix("# TYPE "));
        let names: Vec<&str> = names.filter_map(|line| line.split(' ').next()).collect();
        assert_eq!(names.len(), 5);
        for name in names {
            assert!(guide.contains(&format!("`{name}`")), "{name}");
        }
    }
}
