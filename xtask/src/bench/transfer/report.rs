//! The report, as tables and as JSON.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::{Batch, Beside, Pair, Sample};
use crate::bench::figures::median;

/// The most that a small transfer may take more than the bare one, in µs.
const SMALL_AIM: f64 = 20.0;

/// One round of a row: ours, and what it is beside.
#[derive(Debug, Clone, Copy)]
pub(super) struct Round {
    pub(super) ours: Sample,
    pub(super) other: Sample,
    pub(super) also: Option<Sample>,
}

/// All rounds of one row.
struct Row {
    pair: &'static str,
    what: String,
    large: bool,
    aim: f64,
    rounds: Vec<Round>,
}

impl Row {
    /// The median over rounds; of what stands between two, that of what stands between them in
    /// one round.
    fn median(&self, of: impl Fn(&Round) -> f64) -> f64 {
        median(&self.rounds.iter().map(of).collect::<Vec<_>>())
    }

    fn ours(&self, of: impl Fn(&Sample) -> f64) -> f64 {
        self.median(|round| of(&round.ours))
    }

    fn other(&self, of: impl Fn(&Sample) -> f64) -> f64 {
        self.median(|round| of(&round.other))
    }
}

pub(super) struct Report {
    conditions: Vec<(&'static str, String)>,
    rows: Vec<Row>,
    ceilings: Vec<(String, Vec<Sample>)>,
    idle: Vec<(&'static str, Vec<(f64, f64)>)>,
}

impl Report {
    pub(super) fn new(conditions: Vec<(&'static str, String)>) -> Self {
        Self {
            conditions,
            rows: Vec::new(),
            ceilings: Vec::new(),
            idle: Vec::new(),
        }
    }

    pub(super) fn large(&mut self, pair: &Pair, way: &str, batch: Batch, round: Round) {
        let what = format!("{way} {}", batch.name());
        println!(
            "{}: {what}: {:.2} GiB/s of {:.2}",
            pair.name, round.ours.gib_per_s, round.other.gib_per_s
        );
        self.add(pair, what, true, round);
    }

    pub(super) fn small(&mut self, pair: &Pair, way: &str, batch: Batch, round: Round) {
        let what = format!("{way} {}", batch.name());
        println!(
            "{}: {what}: p50 {:.1} µs beside {:.1} µs",
            pair.name,
            micros(&round.ours, |s| s.p50),
            micros(&round.other, |s| s.p50)
        );
        self.add(pair, what, false, round);
    }

    fn add(&mut self, pair: &Pair, what: String, large: bool, round: Round) {
        let same = |row: &&mut Row| row.pair == pair.name && row.what == what && row.large == large;
        if let Some(row) = self.rows.iter_mut().find(same) {
            row.rounds.push(round);
            return;
        }
        self.rows.push(Row {
            pair: pair.name,
            what,
            large,
            aim: pair.aim,
            rounds: vec![round],
        });
    }

    pub(super) fn ceiling(&mut self, name: &str, batch: Batch, found: Sample) {
        let name = format!("{name}, {}", batch.name());
        match self.ceilings.iter_mut().find(|(known, _)| *known == name) {
            Some((_, samples)) => samples.push(found),
            None => self.ceilings.push((name, vec![found])),
        }
    }

    pub(super) fn idle(&mut self, pair: &Pair, shares: (f64, f64)) {
        match self.idle.iter_mut().find(|(name, _)| *name == pair.name) {
            Some((_, all)) => all.push(shares),
            None => self.idle.push((pair.name, vec![shares])),
        }
    }

    pub(super) fn text(&self, rounds: usize, seconds: f64) -> String {
        let mut text = format!(
            "## Transfer channels beside what they stand on\n\n`cargo xtask bench transfer`: medians \
             of {rounds} round(s) of {seconds} s a cell, ours and the other in turn, two processes on \
             one machine; all figures are in [transfer.json](benchmarks/transfer.json).\n\n"
        );
        for (what, value) in &self.conditions {
            let _ = writeln!(text, "- {what}: {value}");
        }
        text.push_str(ABOUT);
        for pair in super::PAIRS {
            let rows: Vec<&Row> = self
                .rows
                .iter()
                .filter(|row| row.pair == pair.name)
                .collect();
            if !rows.is_empty() {
                text.push_str(&pair_text(&pair, &rows));
            }
        }
        text.push_str(
            "\n| what else the machine does | GiB/s | CPU s/GiB, here + there |\n|---|---|---|\n",
        );
        for (name, samples) in &self.ceilings {
            let of = |of: fn(&Sample) -> f64| median(&samples.iter().map(of).collect::<Vec<_>>());
            let _ = writeln!(
                text,
                "| {name} | {:.2} | {:.3} + {:.3} |",
                of(|s| s.gib_per_s),
                of(|s| s.cpu_s_per_gib.0),
                of(|s| s.cpu_s_per_gib.1)
            );
        }
        text.push_str("\n| connected and idle | of a core, here + there |\n|---|---|\n");
        for (name, shares) in &self.idle {
            let of = |of: fn(&(f64, f64)) -> f64| {
                100.0 * median(&shares.iter().map(of).collect::<Vec<_>>())
            };
            let _ = writeln!(
                text,
                "| {name} | {:.1} % + {:.1} % |",
                of(|s| s.0),
                of(|s| s.1)
            );
        }
        text
    }

    pub(super) fn json(&self) -> Value {
        let sample = |s: &Sample| {
            json!({
                "gib_per_s": s.gib_per_s,
                "cpu_s_per_gib": [s.cpu_s_per_gib.0, s.cpu_s_per_gib.1],
                "p50_s": s.p50,
                "p99_s": s.p99,
            })
        };
        let row = |row: &Row| {
            let all = |of: fn(&Round) -> Option<Sample>| -> Vec<Value> {
                let samples = row.rounds.iter().filter_map(of);
                samples.map(|found| sample(&found)).collect()
            };
            json!({
                "pair": row.pair,
                "what": row.what,
                "lmc": all(|round| Some(round.ours)),
                "beside": all(|round| Some(round.other)),
                "also": all(|round| round.also),
            })
        };
        let ceiling = |(name, samples): &(String, Vec<Sample>)| json!({"what": name, "found": samples.iter().map(sample).collect::<Vec<_>>()});
        let idle = |(name, shares): &(&str, Vec<(f64, f64)>)| json!({"pair": name, "cores": shares.iter().map(|s| [s.0, s.1]).collect::<Vec<_>>()});
        json!({
            "conditions": self.conditions.iter().map(|(what, value)| json!([what, value])).collect::<Vec<_>>(),
            "rows": self.rows.iter().map(row).collect::<Vec<_>>(),
            "ceilings": self.ceilings.iter().map(ceiling).collect::<Vec<_>>(),
            "idle": self.idle.iter().map(idle).collect::<Vec<_>>(),
        })
    }
}

/// Explains the comparisons.
const ABOUT: &str = "
Objects lie apart in both arenas, so that none can be joined with its neighbour; all memory was \
written to before. A batch counts from the call to its return; each is asked for when the one before \
is done, with nothing in between to hide the start of one behind the end of another. Every byte that \
the last batch left was compared with what it must be, outside the time. Each row's ratio is the \
median of those of the rounds.

- **lmc, sockets**: every byte is under a checksum (XXH3) that the sender makes and the receiver \
verifies, lands in the slot that was named and nowhere else, and is acknowledged; under a deadline.
- **lmc, NIXL**: no checksum (the transport's own stands); under a deadline, in requests of 8 MiB, \
by a thread that other calls share. `send` waits for what the receiver says; a `read` over UCX's tcp \
is written by the peer, because UCX would emulate it.
- **iperf3**: sends one and the same buffer again and again without end and throws away what comes, so \
that its bytes stay in a core's cache and no batch ends; no checksum, no answer. Writes are as long as \
an object, its limit of 1 MiB at most. Before version 3.16 one thread serves all its streams.
- **bare sockets**: a thread per stream and side, `writev` from objects in memory to objects in memory, \
one byte of answer per batch; no checksum, no offsets, no deadline. They have a sender's buffer of \
256 KiB, and those of TCP wake their reader for up to 1 MiB at a time, as ours.
- **bare NIXL**: the same agents, registered memory, UCX settings and descriptors by nixl-sys alone; \
one request for the batch, made, posted, and asked after without a pause, which burns a core; no \
deadline, and nothing looks after a request that does not end. Its `send` is a \
notification each way, by which the sender learns of the slots, and a write that notifies.
- **memcpy**: one thread, from objects in memory to objects in memory of one process.
";

fn pair_text(pair: &Pair, rows: &[&Row]) -> String {
    let beside = match pair.beside {
        Beside::Iperf(streams) => format!("iperf3 -P {streams}"),
        Beside::Player("bare-nixl") => "bare NIXL".to_owned(),
        Beside::Player(_) => "bare sockets, as many".to_owned(),
    };
    let mut text = format!(
        "\n### {}\n\n| GiB/s | lmc | {beside} | ratio | aim | CPU s/GiB lmc, here + there | of the other |",
        pair.name
    );
    let mut line = "\n|---|---|---|---|---|---|---|".to_owned();
    if pair.also.is_some() {
        text.push_str(" bare sockets, as many | ratio | CPU s/GiB |");
        line.push_str("---|---|---|");
    }
    text.push_str(&line);
    for row in rows.iter().filter(|row| row.large) {
        let ratio = row.median(|r| r.ours.gib_per_s / r.other.gib_per_s);
        let _ = write!(
            text,
            "\n| {} | {:.2} | {:.2} | {:.0} % | {:.0} %, {} | {:.3} + {:.3} | {:.3} + {:.3} |",
            row.what,
            row.ours(|s| s.gib_per_s),
            row.other(|s| s.gib_per_s),
            100.0 * ratio,
            100.0 * row.aim,
            verdict(ratio >= row.aim),
            row.ours(|s| s.cpu_s_per_gib.0),
            row.ours(|s| s.cpu_s_per_gib.1),
            row.other(|s| s.cpu_s_per_gib.0),
            row.other(|s| s.cpu_s_per_gib.1),
        );
        if pair.also.is_some() {
            let also = |of: fn(&Sample) -> f64| {
                row.median(|round| round.also.as_ref().map_or(f64::NAN, of))
            };
            let share = |round: &Round| {
                let also = round.also.map_or(f64::NAN, |s| s.gib_per_s);
                round.ours.gib_per_s / also
            };
            let _ = write!(
                text,
                " {:.2} | {:.0} % | {:.3} + {:.3} |",
                also(|s| s.gib_per_s),
                100.0 * row.median(share),
                also(|s| s.cpu_s_per_gib.0),
                also(|s| s.cpu_s_per_gib.1),
            );
        }
    }
    let bare = match pair.ucx {
        Some(_) => "bare NIXL",
        None => "one bare socket",
    };
    let _ = write!(
        text,
        "\n\n| µs | lmc p50 | p99 | {bare} p50 | p99 | more | aim |\n|---|---|---|---|---|---|---|\n"
    );
    for row in rows.iter().filter(|row| !row.large) {
        let more = row.median(|r| micros(&r.ours, |s| s.p50) - micros(&r.other, |s| s.p50));
        let _ = writeln!(
            text,
            "| {} | {:.1} | {:.1} | {:.1} | {:.1} | {more:.1} | {SMALL_AIM:.0}, {} |",
            row.what,
            row.ours(|s| micros(s, |s| s.p50)),
            row.ours(|s| micros(s, |s| s.p99)),
            row.other(|s| micros(s, |s| s.p50)),
            row.other(|s| micros(s, |s| s.p99)),
            verdict(more <= SMALL_AIM),
        );
    }
    text
}

fn verdict(met: bool) -> &'static str {
    if met { "met" } else { "missed" }
}

fn micros(sample: &Sample, of: impl Fn(&Sample) -> Option<f64>) -> f64 {
    of(sample).map_or(f64::NAN, |seconds| seconds * 1e6)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(gib_per_s: f64, p50: f64) -> Sample {
        Sample {
            gib_per_s,
            cpu_s_per_gib: (0.25, 0.5),
            p50: Some(p50),
            p99: Some(2.0 * p50),
        }
    }

    #[test]
    fn ratios_are_those_of_the_same_round() {
        let pair = &crate::bench::transfer::PAIRS[0];
        let mut report = Report::new(vec![("cores", "2".to_owned())]);
        // Each side's median is 2, but in two rounds of three ours had half of the other's.
        for (ours, other) in [(1.0, 2.0), (2.0, 4.0), (3.0, 1.0)] {
            let batch = Batch::new(64, 1 << 20);
            let round = Round {
                ours: sample(ours, 0.1),
                other: sample(other, 0.1),
                also: Some(sample(2.0 * ours, 0.1)),
            };
            report.large(pair, "write", batch, round);
        }
        let round = Round {
            ours: sample(1.0, 30e-6),
            other: sample(1.0, 9e-6),
            also: None,
        };
        report.small(pair, "read", Batch::new(1, 8), round);
        let text = report.text(3, 1.0);
        let large = "| write 64 × 1 MiB | 2.00 | 2.00 | 50 % | 90 %, missed | 0.250 + 0.500 |";
        assert!(text.contains(large), "{text}");
        let also = "| 0.250 + 0.500 | 4.00 | 50 % | 0.250 + 0.500 |\n";
        assert!(text.contains(also), "{text}");
        let small = "| read 8 B | 30.0 | 60.0 | 9.0 | 18.0 | 21.0 | 20, missed |";
        assert!(text.contains(small), "{text}");
        assert!(!text.contains("### NIXL"), "{text}");
        let rows = report.json()["rows"].as_array().map(Vec::len);
        assert_eq!(rows, Some(2));
    }
}
