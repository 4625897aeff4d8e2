//! Reads lmc's own figures of its lookups from its `/metrics`.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use anyhow::{Context, Result};

/// Counts of a histogram at one moment, by upper bound in nanoseconds.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Histogram(BTreeMap<u64, f64>);

/// The lookups that a server has answered so far.
pub(crate) fn lookups(http: u16) -> Result<Histogram> {
    let mut stream = TcpStream::connect(("127.0.0.1", http))?;
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    write!(
        stream,
        "GET /metrics HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"
    )?;
    let mut text = String::new();
    stream
        .read_to_string(&mut text)
        .context("/metrics of lmc")?;
    Ok(parse(&text))
}

fn parse(text: &str) -> Histogram {
    let lines = text.lines().filter(|line| {
        line.starts_with("lmc_operation_seconds_bucket") && line.contains("operation=\"lookup\"")
    });
    let buckets = lines.filter_map(|line| {
        let (_, rest) = line.split_once("le=\"")?;
        let (bound, rest) = rest.split_once('"')?;
        let bound: f64 = bound.parse().ok()?;
        let count = rest.rsplit(' ').next()?.parse().ok()?;
        bound.is_finite().then_some(((bound * 1e9) as u64, count))
    });
    Histogram(buckets.collect())
}

impl Histogram {
    /// The p50 of what came since `before`, interpolated inside its bucket. Seconds.
    pub(crate) fn median_since(&self, before: &Self) -> Option<f64> {
        let since = |bound: &u64, count: f64| count - before.0.get(bound).copied().unwrap_or(0.0);
        let total = self.0.iter().map(|(b, &c)| since(b, c)).next_back()?;
        let (mut below, mut from) = (0.0, 0);
        for (bound, &count) in &self.0 {
            let count = since(bound, count);
            if total > 0.0 && count >= total / 2.0 {
                let share = (total / 2.0 - below) / (count - below).max(1.0);
                return Some((from as f64 + share * (bound - from) as f64) / 1e9);
            }
            (below, from) = (count, *bound);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_what_is_new_is_found() {
        let page = |counts: [u32; 3]| {
            parse(&format!(
                "lmc_operation_seconds_bucket{{operation=\"noop\",le=\"0.1\"}} 9\n\
                 lmc_operation_seconds_bucket{{operation=\"lookup\",le=\"0.001\"}} {}\n\
                 lmc_operation_seconds_bucket{{operation=\"lookup\",le=\"0.002\"}} {}\n\
                 lmc_operation_seconds_bucket{{operation=\"lookup\",le=\"0.004\"}} {}\n\
                 lmc_operation_seconds_bucket{{operation=\"lookup\",le=\"+Inf\"}} 99\n",
                counts[0], counts[1], counts[2]
            ))
        };
        let before = page([5, 5, 5]);
        let after = page([5, 15, 15]);
        assert_eq!(after.median_since(&before), Some(0.0015));
        assert_eq!(after.median_since(&after), None);
        assert_eq!(Histogram::default().median_since(&before), None);
    }
}
