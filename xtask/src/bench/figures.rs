//! Figures of both servers, side by side.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::server::Kind;

/// Unit of a figure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Unit {
    Seconds,
    PerSecond,
    GigabytesPerSecond,
    CpuSecondsPerGigabyte,
    Bytes,
}

impl Unit {
    fn more_is_better(self) -> bool {
        matches!(self, Self::PerSecond | Self::GigabytesPerSecond)
    }

    fn show(self, value: f64) -> String {
        match self {
            Self::Seconds if value < 1e-3 => format!("{:.1} µs", value * 1e6),
            Self::Seconds if value < 1.0 => format!("{:.2} ms", value * 1e3),
            Self::Seconds => format!("{value:.2} s"),
            Self::PerSecond => format!("{value:.0}/s"),
            Self::GigabytesPerSecond => format!("{value:.2} GB/s"),
            Self::CpuSecondsPerGigabyte => format!("{value:.3} s/GB"),
            Self::Bytes => format!("{value:.0} B"),
        }
    }
}

/// Values of all rounds, by figure and server. Figures keep the order of their first value.
#[derive(Debug, Default)]
pub(crate) struct Figures {
    order: Vec<(String, Unit)>,
    values: BTreeMap<(String, Kind), Vec<f64>>,
}

impl Figures {
    pub(crate) fn add(&mut self, kind: Kind, name: &str, unit: Unit, value: f64) {
        if !self.order.iter().any(|(known, _)| known == name) {
            self.order.push((name.to_owned(), unit));
        }
        let values = self.values.entry((name.to_owned(), kind)).or_default();
        values.push(value);
    }

    pub(crate) fn median(&self, kind: Kind, name: &str) -> Option<f64> {
        let values = self.values.get(&(name.to_owned(), kind))?;
        Some(median(values))
    }

    /// Returns how many times better lmc is.
    pub(crate) fn ratio(&self, name: &str) -> Option<f64> {
        let (_, unit) = self.order.iter().find(|(known, _)| known == name)?;
        let ours = self.median(Kind::Lmc, name)?;
        let theirs = self.median(Kind::Baseline, name)?;
        let ratio = if unit.more_is_better() {
            ours / theirs
        } else {
            theirs / ours
        };
        ratio.is_finite().then_some(ratio)
    }

    /// Rows of a Markdown table.
    pub(crate) fn markdown(&self, baseline: &str) -> String {
        let mut text =
            format!("| what | lmc | {baseline} | lmc is better by |\n|---|---|---|---|\n");
        for (name, unit) in &self.order {
            let shown = |kind| {
                let value = self.median(kind, name);
                value.map_or_else(|| "–".to_owned(), |value| unit.show(value))
            };
            let ratio = self.ratio(name);
            let ratio = match ratio {
                None => "–".to_owned(),
                Some(ratio) if ratio < 10.0 => format!("{ratio:.2}×"),
                Some(ratio) => format!("{ratio:.0}×"),
            };
            let (ours, theirs) = (shown(Kind::Lmc), shown(Kind::Baseline));
            let _ = writeln!(text, "| {name} | {ours} | {theirs} | {ratio} |");
        }
        text
    }

    pub(crate) fn json(&self) -> Value {
        let all = self.order.iter().map(|(name, unit)| {
            let of = |kind| self.values.get(&(name.clone(), kind));
            json!({
                "name": name,
                "unit": format!("{unit:?}"),
                "lmc": of(Kind::Lmc),
                "lmcache": of(Kind::Baseline),
                "lmc_median": self.median(Kind::Lmc, name),
                "lmcache_median": self.median(Kind::Baseline, name),
                "ratio": self.ratio(name),
            })
        });
        all.collect()
    }
}

/// Returns the median, over the rounds that a script has printed, of the figure at a path in each.
pub(crate) fn median_of_rounds(measured: &Value, path: &[&str]) -> Result<f64> {
    all_rounds(measured, path).map(|all| median(&all))
}

/// Returns the figures at a path in each of a script's rounds, at least one.
pub(crate) fn all_rounds(measured: &Value, path: &[&str]) -> Result<Vec<f64>> {
    let rounds = measured["rounds"].as_array().into_iter().flatten();
    let figure = |round: &Value| path.iter().fold(round, |at, name| &at[*name]).as_f64();
    let all: Option<Vec<f64>> = rounds.map(figure).collect();
    let all = all.filter(|all| !all.is_empty());
    all.with_context(|| format!("the script printed no {}", path.join(", ")))
}

/// Returns the least and the most of some values.
pub(crate) fn range(values: &[f64]) -> (f64, f64) {
    let least = values.iter().copied().fold(f64::INFINITY, f64::min);
    (least, values.iter().copied().fold(0.0, f64::max))
}

/// The middle value, or the mean of the two in the middle; 0 of nothing.
pub(crate) fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => 0.0,
        len if len % 2 == 1 => sorted[middle],
        _ => (sorted[middle - 1] + sorted[middle]) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_say_how_much_better_lmc_is() {
        let mut figures = Figures::default();
        for (ours, theirs) in [(1.0, 9.0), (2.0, 10.0), (3.0, 100.0)] {
            figures.add(Kind::Lmc, "time", Unit::Seconds, ours);
            figures.add(Kind::Baseline, "time", Unit::Seconds, theirs);
            figures.add(Kind::Lmc, "rate", Unit::PerSecond, ours);
            figures.add(Kind::Baseline, "rate", Unit::PerSecond, theirs);
        }
        figures.add(Kind::Lmc, "alone", Unit::Bytes, 128.0);
        assert_eq!(figures.ratio("time"), Some(5.0));
        assert_eq!(figures.ratio("rate"), Some(0.2));
        assert_eq!(figures.ratio("alone"), None);
        let rows = figures.markdown("LMCache");
        assert!(
            rows.contains("| time | 2.00 s | 10.00 s | 5.00× |"),
            "{rows}"
        );
        assert!(rows.contains("| alone | 128 B | – | – |"), "{rows}");
    }

    #[test]
    fn the_median_is_the_middle() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(median(&[]), 0.0);
    }
}
