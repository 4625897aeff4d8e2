//! Figures of the proxy: its page of metrics.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::engines::{Engine, Engines};

/// End of a request's way through a prefill engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Prefill {
    /// A prefill engine has computed the prompt.
    Done,
    /// The prompt is short.
    Short,
    /// The decode engine would not read its cache for it.
    Uncached,
    /// The decode engine had nearly all of the prompt.
    Warm,
    /// No request, or one that the prefill engine refused; the decode engine says why.
    Refused,
    /// No prefill engine answered.
    Failed,
    /// None answered in time.
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
pub(super) struct Counters {
    outcomes: [AtomicU64; OUTCOMES.len()],
    /// Time of the prefills that were done.
    prefill_micros: AtomicU64,
}

impl Counters {
    pub(super) fn count(&self, outcome: Prefill) {
        self.outcomes[outcome as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a prefill that was done in this time.
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
        "Requests to an engine, also those that it could not be sent.",
        |engine| engine.counts().1,
    ),
    (
        "lmc_proxy_engine_failures_total",
        "counter",
        "Requests that an engine failed: it could not be reached, broke off, gave no answer in time, or answered that it cannot.",
        |engine| engine.counts().2,
    ),
    (
        "lmc_proxy_engine_in_flight",
        "gauge",
        "Requests of an engine that are under way.",
        |engine| engine.counts().0 as u64,
    ),
];

/// Returns the page in Prometheus's text format.
pub(super) fn page(counters: &Counters, prefill: &Engines, decode: &Engines) -> String {
    let mut page = String::new();
    let head = |page: &mut String, name: &str, kind: &str, help: &str| {
        let _ = writeln!(page, "# HELP {name} {help}\n# TYPE {name} {kind}");
    };
    let name = "lmc_proxy_requests_total";
    let help = "Requests of clients, by what became of their prefill.";
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
        "Time of the prefills that were done.",
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
        let page = page(&Counters::default(), &engines, &engines);
        let names = page.lines().filter_map(|line| line.strip_prefix("# TYPE "));
        let names: Vec<&str> = names.filter_map(|line| line.split(' ').next()).collect();
        assert_eq!(names.len(), 5);
        for name in names {
            assert!(guide.contains(&format!("`{name}`")), "{name}");
        }
    }
}
