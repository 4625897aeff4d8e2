//! The report, as a table and as JSON.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::{BatchShape, Reads};
use crate::bench::conditions;
use crate::bench::rounds::{Rounds, shown};

/// Kinds of reads, as the program names them.
pub(super) const FIRST: &str = "first";
pub(super) const LATER: &str = "later";
pub(super) const BARE: &str = "bare";
pub(super) const MOONCAKE: &str = "mooncake";
pub(super) const LMCACHE: &str = "lmcache";
/// Names of the figures.
const P50: &str = "p50_s";
const P99: &str = "p99_s";
const SPEED: &str = "gb_per_s";
const CPU_READER: &str = "cpu_s_per_gb_reader";
const CPU_OWNER: &str = "cpu_s_per_gb_owner";
const MISSED: &str = "missed";

const ABOUT: &str = "
A prefix is timed from the engine's lookup until all its chunks are leased in the reader's pool: locate, lease, read, release, verify, commit.
At a *first* lease the owner has no checksum of the chunks yet; at a *later* lease it has them.
The *bare* channel reads the same slots of the owner into memory of the reader, in turn with the later leases, with a checksum for each piece of 256 KiB.
GB/s are bytes divided by the p50. The p99 is the median of the rounds' p99; in a round of up to 100 reads that is the second slowest read.
CPU is the time of all threads of a process while a prefix is read, in seconds for each GB.

";

/// Kind and name of each system that lmc is compared with, and how it is measured.
const RACES: [(&str, &str, &str); 2] = [
    (
        MOONCAKE,
        "Mooncake",
        "Mooncake Store (`mooncake-transfer-engine-non-cuda` 0.3.13.post1) over TCP, with the same chunks in the same rounds, after lmc: one `batch_get_into` of a prefix from Python into registered memory of the reader. It asks the master and reads; it compares no checksum and commits nothing.",
    ),
    (
        LMCACHE,
        "LMCache",
        "LMCache's P2P (`lmcache` 0.5.6 with `nixl-cu12` 1.5.1, UCX over TCP on `lo`), end to end, in the same rounds: a coordinator and two `lmcache server`. A client looks up a prefix at one server and asks every millisecond for its state, until that server has read all of it from the other and holds it locked in memory. No checksum is compared. CPU is that of the two servers.",
    ),
];

pub(super) struct Report {
    conditions: Vec<(&'static str, String)>,
    cells: Rounds,
    ceilings: Rounds,
    over_nixl: bool,
}

impl Report {
    pub(super) fn new(conditions: Vec<(&'static str, String)>, over_nixl: bool) -> Self {
        Self {
            over_nixl,
            conditions,
            cells: Rounds::default(),
            ceilings: Rounds::default(),
        }
    }

    /// Adds a round of one kind of read.
    pub(super) fn cell(&mut self, cell: BatchShape, kind: &str, reads: &Reads) {
        let gb = (cell.count * cell.len) as f64 / 1e9;
        let all = gb * reads.seconds.len() as f64;
        let p50 = reads.at(0.5);
        let figures = [
            (P50, p50),
            (P99, reads.at(0.99)),
            (SPEED, gb / p50),
            (CPU_READER, reads.cpu_reader / all),
            (CPU_OWNER, reads.cpu_owner / all),
        ];
        println!(
            "{}, {kind}: {:.2} ms, {:.2} GB/s",
            cell.name(),
            p50 * 1e3,
            gb / p50
        );
        self.cells.add(&cell.name(), kind, &figures);
    }

    /// Adds the lookups of a cell that found less than all.
    pub(super) fn missed(&mut self, cell: BatchShape, missed: f64) {
        self.cells.add(&cell.name(), FIRST, &[(MISSED, missed)]);
    }

    pub(super) fn ceiling(&mut self, name: &str, gb_per_s: f64) {
        self.ceilings.add(name, name, &[(SPEED, gb_per_s)]);
    }

    pub(super) fn text(&self, rounds: usize) -> String {
        let (title, flag, json) = match self.over_nixl {
            true => (" over NIXL (UCX, TCP)", " --transport nixl", "p2p-nixl"),
            false => ("", "", "p2p"),
        };
        let mut text = format!(
            "## Prefixes read from a peer{title}\n\n`cargo xtask bench p2p{flag}`: medians of \
             {rounds} round(s), the owner and the reader as two processes over loopback; all \
             figures are in [{json}.json](benchmarks/{json}.json).\n\n"
        );
        text.push_str(&conditions::lines(&self.conditions));
        text.push_str(ABOUT);
        text.push_str(
            "| prefix | first lease: p50 / p99 | later lease: p50 / p99 | bare: p50 | GB/s: first / later / bare | later of bare | first beyond bare | CPU s/GB, reader + owner: first / later / bare |\n|---|---|---|---|---|---|---|---|\n",
        );
        for row in self.cells.rows() {
            let _ = writeln!(text, "{}", self.row(row));
        }
        for (kind, name, about) in RACES {
            let raced = |row: &&str| self.cells.median(row, kind, P50).is_some();
            let mut rows = self.cells.rows().into_iter().filter(raced).peekable();
            if rows.peek().is_some() {
                let _ = writeln!(
                    text,
                    "\n{about}\n\n| prefix | {name}: p50 / p99 | GB/s | CPU s/GB, reader + owner | lmc is faster by: first / later lease |\n|---|---|---|---|---|"
                );
            }
            for row in rows {
                let _ = writeln!(text, "{}", self.race(row, kind));
            }
        }
        text.push_str("\n| what else the machine does | GB/s |\n|---|---|\n");
        for row in self.ceilings.rows() {
            let speed = self.ceilings.median(row, row, SPEED);
            let _ = writeln!(text, "| {row} | {} |", shown(speed, |s| format!("{s:.2}")));
        }
        text
    }

    fn row(&self, row: &str) -> String {
        let of = |kind: &str, what| self.cells.median(row, kind, what).unwrap_or(f64::NAN);
        let ms = |kind: &str, what| format!("{:.2}", of(kind, what) * 1e3);
        let times = |kind: &str| format!("{} / {} ms", ms(kind, P50), ms(kind, P99));
        let kinds = [FIRST, LATER, BARE];
        let speeds = kinds
            .map(|kind| format!("{:.2}", of(kind, SPEED)))
            .join(" / ");
        let cpu = |kind| format!("{:.2} + {:.2}", of(kind, CPU_READER), of(kind, CPU_OWNER));
        let cpu = kinds.map(cpu).join(" / ");
        let share = self
            .cells
            .between(row, [LATER, BARE], SPEED, |later, bare| later / bare);
        let beyond = self
            .cells
            .between(row, [FIRST, BARE], P50, |first, bare| first - bare);
        format!(
            "| {row} | {} | {} | {} ms | {speeds} | {} | {} | {cpu} |",
            times(FIRST),
            times(LATER),
            ms(BARE, P50),
            shown(share, |share| format!("{:.0} %", share * 100.0)),
            shown(beyond, |beyond| format!("{:.2} ms", beyond * 1e3)),
        )
    }

    fn race(&self, row: &str, kind: &str) -> String {
        let of = |what| self.cells.median(row, kind, what).unwrap_or(f64::NAN);
        let faster = |ours: &str| {
            let ratio = self
                .cells
                .between(row, [kind, ours], P50, |other, ours| other / ours);
            shown(ratio, |ratio: f64| format!("{ratio:.1}×"))
        };
        format!(
            "| {row} | {:.2} / {:.2} ms | {:.2} | {:.2} + {:.2} | {} / {} |",
            of(P50) * 1e3,
            of(P99) * 1e3,
            of(SPEED),
            of(CPU_READER),
            of(CPU_OWNER),
            faster(FIRST),
            faster(LATER)
        )
    }

    pub(super) fn json(&self) -> Value {
        json!({
            "conditions": conditions::json(&self.conditions),
            "cells": self.cells.json(),
            "ceilings": self.ceilings.json(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_has_each_figure_beside_the_bare_channel() {
        let mut report = Report::new(Vec::new(), false);
        let cell = BatchShape::new(16, 1 << 20);
        for (kind, seconds) in [(FIRST, 0.010), (LATER, 0.008), (BARE, 0.004)] {
            let reads = Reads {
                seconds: vec![seconds],
                cpu_reader: 0.016_777_216,
                cpu_owner: 0.0,
            };
            report.cell(cell, kind, &reads);
        }
        let row = report.row("16 × 1 MiB");
        assert!(
            row.contains("| 10.00 / 10.00 ms | 8.00 / 8.00 ms | 4.00 ms |"),
            "{row}"
        );
        assert!(row.contains("| 50 % | 6.00 ms | 1.00 + 0.00 /"), "{row}");
    }
}
