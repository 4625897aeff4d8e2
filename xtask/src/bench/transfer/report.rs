//! The report, as tables and as JSON.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::{BatchShape, Beside, Pair, Sample};
use crate::bench::conditions;
use crate::bench::rounds::Rounds;

/// The most that a small transfer may take more than the bare one, in µs.
const SMALL_AIM: f64 = 20.0;
/// Names of the figures.
const SPEED: &str = "gib_per_s";
const CPU: [&str; 2] = ["cpu_s_per_gib_here", "cpu_s_per_gib_there"];
const P50: &str = "p50_s";
const P99: &str = "p99_s";
/// Names of who was measured.
const LMC: &str = "lmc";
const OTHER: &str = "beside";
const ALSO: &str = "also";

/// One round of a row: ours, and what it is beside.
#[derive(Debug, Clone, Copy)]
pub(super) struct Round {
    pub(super) ours: Sample,
    pub(super) other: Sample,
    pub(super) also: Option<Sample>,
}

pub(super) struct Report {
    conditions: Vec<(&'static str, String)>,
    large: Rounds,
    small: Rounds,
    ceilings: Rounds,
    idle: Rounds,
}

fn add(rounds: &mut Rounds, row: &str, who: &str, sample: &Sample) {
    let (here, there) = sample.cpu_s_per_gib;
    let figures = [(SPEED, sample.gib_per_s), (CPU[0], here), (CPU[1], there)];
    rounds.add(row, who, &figures);
    for (what, seconds) in [(P50, sample.p50), (P99, sample.p99)] {
        if let Some(seconds) = seconds {
            rounds.add(row, who, &[(what, seconds)]);
        }
    }
}

fn add_round(rounds: &mut Rounds, row: &str, round: &Round) {
    add(rounds, row, LMC, &round.ours);
    add(rounds, row, OTHER, &round.other);
    if let Some(also) = &round.also {
        add(rounds, row, ALSO, also);
    }
}

impl Report {
    pub(super) fn new(conditions: Vec<(&'static str, String)>) -> Self {
        Self {
            conditions,
            large: Rounds::default(),
            small: Rounds::default(),
            ceilings: Rounds::default(),
            idle: Rounds::default(),
        }
    }

    pub(super) fn large(&mut self, pair: &Pair, way: &str, batch: BatchShape, round: Round) {
        let row = format!("{}: {way} {}", pair.name, batch.name());
        let (ours, other) = (round.ours.gib_per_s, round.other.gib_per_s);
        println!("{row}: {ours:.2} GiB/s of {other:.2}");
        add_round(&mut self.large, &row, &round);
    }

    pub(super) fn small(&mut self, pair: &Pair, way: &str, batch: BatchShape, round: Round) {
        let row = format!("{}: {way} {}", pair.name, batch.name());
        let [ours, other] = [round.ours, round.other].map(|s| s.p50.unwrap_or(f64::NAN) * 1e6);
        println!("{row}: p50 {ours:.1} µs beside {other:.1} µs");
        add_round(&mut self.small, &row, &round);
    }

    pub(super) fn ceiling(&mut self, name: &str, batch: BatchShape, found: Sample) {
        let row = format!("{name}, {}", batch.name());
        add(&mut self.ceilings, &row, name, &found);
    }

    pub(super) fn idle(&mut self, pair: &Pair, (here, there): (f64, f64)) {
        let figures = [(CPU[0], here), (CPU[1], there)];
        self.idle.add(pair.name, LMC, &figures);
    }

    pub(super) fn text(&self, rounds: usize, seconds: f64) -> String {
        let mut text = format!(
            "## Transfer channels beside what they stand on\n\n`cargo xtask bench transfer`: medians \
             of {rounds} round(s) of {seconds} s a cell, ours and the other in turn, two processes on \
             one machine; all figures are in [transfer.json](benchmarks/transfer.json).\n\n"
        );
        text.push_str(&conditions::lines(&self.conditions));
        text.push_str(ABOUT);
        for pair in super::PAIRS {
            let of_pair = format!("{}: ", pair.name);
            if self
                .large
                .rows()
                .iter()
                .any(|row| row.starts_with(&of_pair))
            {
                text.push_str(&self.pair_text(&pair, &of_pair));
            }
        }
        text.push_str(
            "\n| what else the machine does | GiB/s | CPU s/GiB, here + there |\n|---|---|---|\n",
        );
        for row in self.ceilings.rows() {
            for who in self.ceilings.measured(row) {
                let of = |what| self.ceilings.median(row, who, what).unwrap_or(f64::NAN);
                let cpu = cpu(&self.ceilings, row, who);
                let _ = writeln!(text, "| {row} | {:.2} | {cpu} |", of(SPEED));
            }
        }
        text.push_str("\n| connected and idle | of a core, here + there |\n|---|---|\n");
        for row in self.idle.rows() {
            let of = |what| 100.0 * self.idle.median(row, LMC, what).unwrap_or(f64::NAN);
            let _ = writeln!(
                text,
                "| {row} | {:.1} % + {:.1} % |",
                of(CPU[0]),
                of(CPU[1])
            );
        }
        text
    }

    pub(super) fn json(&self) -> Value {
        json!({
            "conditions": self.conditions,
            "large": self.large.json(),
            "small": self.small.json(),
            "ceilings": self.ceilings.json(),
            "idle": self.idle.json(),
        })
    }

    fn pair_text(&self, pair: &Pair, of_pair: &str) -> String {
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
        for row in self.large.rows() {
            let Some(what) = row.strip_prefix(of_pair) else {
                continue;
            };
            let speed = |who| self.large.median(row, who, SPEED).unwrap_or(f64::NAN);
            let cpu = |who| cpu(&self.large, row, who);
            let ratio = |of| self.large.between(row, [LMC, of], SPEED, |a, b| a / b);
            let ratio = |of| ratio(of).unwrap_or(f64::NAN);
            let _ = write!(
                text,
                "\n| {what} | {:.2} | {:.2} | {:.0} % | {:.0} %, {} | {} | {} |",
                speed(LMC),
                speed(OTHER),
                100.0 * ratio(OTHER),
                100.0 * pair.aim,
                verdict(ratio(OTHER) >= pair.aim),
                cpu(LMC),
                cpu(OTHER),
            );
            if pair.also.is_some() {
                let (speed, share) = (speed(ALSO), 100.0 * ratio(ALSO));
                let _ = write!(text, " {speed:.2} | {share:.0} % | {} |", cpu(ALSO));
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
        for row in self.small.rows() {
            let Some(what) = row.strip_prefix(of_pair) else {
                continue;
            };
            let micros = |who, what| 1e6 * self.small.median(row, who, what).unwrap_or(f64::NAN);
            let more = self.small.between(row, [LMC, OTHER], P50, |a, b| a - b);
            let more = 1e6 * more.unwrap_or(f64::NAN);
            let _ = writeln!(
                text,
                "| {what} | {:.1} | {:.1} | {:.1} | {:.1} | {more:.1} | {SMALL_AIM:.0}, {} |",
                micros(LMC, P50),
                micros(LMC, P99),
                micros(OTHER, P50),
                micros(OTHER, P99),
                verdict(more <= SMALL_AIM),
            );
        }
        text
    }
}

/// CPU seconds per GiB of both sides.
fn cpu(rounds: &Rounds, row: &str, who: &str) -> String {
    let of = |what| rounds.median(row, who, what).unwrap_or(f64::NAN);
    format!("{:.3} + {:.3}", of(CPU[0]), of(CPU[1]))
}

fn verdict(met: bool) -> &'static str {
    if met { "met" } else { "missed" }
}

/// Explains the comparisons.
const ABOUT: &str = "
Objects lie apart in both arenas, so that no two can be joined; all memory was written to before. A \
batch is timed from the call to its return, and begins when the batch before has ended, so batches do \
not overlap. Every byte of the last batch was verified, outside the timed part. Each row's ratio is the \
median of the rounds' ratios.

- **lmc, sockets**: the sender computes a checksum (XXH3) of every byte, and the receiver verifies \
it. Bytes are written to the named slot only, and acknowledged, under a deadline.
- **lmc, NIXL**: reads have a checksum of every byte, as over sockets, and a deadline. The owner \
writes the bytes to a block next to the reader's arena, and the reader copies and sums them in one \
pass. A `write` goes over the session's Unix or TCP sockets. A `send` waits for the receiver's answer.
- **iperf3**: sends one buffer again and again without end and discards what it receives, so its bytes \
stay in a core's cache and no batch ends; no checksum, no answer. Each write is as long as an object, up \
to iperf3's limit of 1 MiB. Before version 3.16 one thread serves all its streams.
- **bare sockets**: one thread for each stream on each side, `writev` from objects in memory to objects \
in memory, one byte of answer for each batch; no checksum, no offsets, no deadline. As in lmc, the \
sender's buffer has 256 KiB, and a TCP reader is woken for up to 1 MiB at a time.
- **bare NIXL**: the same agents, registered memory, UCX settings and descriptors, by nixl-sys alone. \
One request for each batch is made, posted and polled without a pause, which keeps a core busy; no \
deadline, and nothing handles a request that does not end. Its `send` is a notification each way, from \
which the sender learns the slots, and a write that notifies.
- **memcpy**: one thread, from objects in memory to objects in memory of one process.
";

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
            let batch = BatchShape::new(64, 1 << 20);
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
        report.small(pair, "read", BatchShape::new(1, 8), round);
        let text = report.text(3, 1.0);
        let large = "| write 64 × 1 MiB | 2.00 | 2.00 | 50 % | 90 %, missed | 0.250 + 0.500 |";
        assert!(text.contains(large), "{text}");
        let also = "| 0.250 + 0.500 | 4.00 | 50 % | 0.250 + 0.500 |\n";
        assert!(text.contains(also), "{text}");
        let small = "| read 8 B | 30.0 | 60.0 | 9.0 | 18.0 | 21.0 | 20, missed |";
        assert!(text.contains(small), "{text}");
        assert!(!text.contains("### NIXL"), "{text}");
        let json = report.json();
        let cells = |table: &str| json[table].as_array().map(Vec::len);
        assert_eq!((cells("large"), cells("small")), (Some(3), Some(2)));
        assert_eq!(json["large"][0]["gib_per_s"], json!([1.0, 2.0, 3.0]));
    }
}
