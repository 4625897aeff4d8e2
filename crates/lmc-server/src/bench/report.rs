//! Rows of results: as a table, as JSON, as CSV.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::args::{BenchArgs, Workload};
use super::drive::{Case, Counts, Measured, Tally};
use super::process::Usage;
use super::stats::Summary;

/// One kind of operation in one run.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) workload: Workload,
    pub(crate) operation: &'static str,
    pub(crate) tokens: usize,
    pub(crate) clients: usize,
    pub(crate) seconds: f64,
    pub(crate) latency: Summary,
    pub(crate) control: Summary,
    pub(crate) bytes: u64,
    pub(crate) gb_per_s: f64,
    /// Costs of the whole run, the same in all its rows.
    pub(crate) run: RunCosts,
}

/// Costs and counters of a run.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct RunCosts {
    pub(crate) errors: u64,
    pub(crate) misses: u64,
    pub(crate) verified_bytes: u64,
    pub(crate) wrong_bytes: u64,
    pub(crate) stored_chunks: u64,
    pub(crate) moved_bytes: u64,
    /// Cores that the generator kept busy.
    pub(crate) generator_cores: f64,
    /// CPU seconds of the server while the clock ran; `None` if its process is not known.
    pub(crate) server_cpu_seconds: Option<f64>,
    /// Growth of the server's own memory since before the run's first store.
    pub(crate) server_growth_bytes: Option<i64>,
}

impl RunCosts {
    pub(crate) fn server_cpu_seconds_per_gb(&self) -> Option<f64> {
        let seconds = self.server_cpu_seconds?;
        (self.moved_bytes > 0).then(|| seconds / (self.moved_bytes as f64 / 1e9))
    }

    pub(crate) fn growth_per_chunk(&self) -> Option<f64> {
        let growth = self.server_growth_bytes?;
        (self.stored_chunks > 0).then(|| growth as f64 / self.stored_chunks as f64)
    }
}

/// Resources used before and after a run.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Snapshots {
    pub(crate) server_before: Option<Usage>,
    pub(crate) server: [Option<Usage>; 2],
    pub(crate) own: [Option<Usage>; 2],
    pub(crate) server_after: Option<Usage>,
}

impl Row {
    pub(crate) fn ops_per_s(&self) -> f64 {
        self.latency.count as f64 / self.seconds
    }
}

/// Returns the rows of one run, without rows that have no operations.
pub(crate) fn rows(case: Case<'_>, tally: Tally, seconds: f64, shots: &Snapshots) -> Vec<Row> {
    let Counts {
        misses,
        verified_bytes,
        wrong_bytes,
        ref errors,
        stored_chunks,
        ..
    } = tally.counts;
    let cpu = |[from, to]: [Option<Usage>; 2]| Some(to?.cpu_seconds - from?.cpu_seconds);
    let growth = || {
        let (from, to) = (shots.server_before?, shots.server_after?);
        Some(to.anonymous_bytes as i64 - from.anonymous_bytes as i64)
    };
    let run = RunCosts {
        errors: errors.len() as u64,
        misses,
        verified_bytes,
        wrong_bytes,
        stored_chunks,
        moved_bytes: tally.store.bytes + tally.retrieve.bytes,
        generator_cores: cpu(shots.own).unwrap_or_default() / seconds,
        server_cpu_seconds: cpu(shots.server),
        server_growth_bytes: growth(),
    };
    let mut rows = Vec::new();
    for (operation, measured) in [
        ("noop", tally.noop),
        ("lookup", tally.lookup),
        ("store", tally.store),
        ("retrieve", tally.retrieve),
    ] {
        let Measured {
            latency,
            control,
            bytes,
            bytes_per_second,
        } = measured;
        let latency = latency.summary();
        if latency.count > 0 {
            rows.push(Row {
                workload: case.workload,
                operation,
                tokens: if operation == "noop" { 0 } else { case.tokens },
                clients: case.clients,
                seconds,
                latency,
                control: control.summary(),
                bytes,
                gb_per_s: bytes_per_second / 1e9,
                run,
            });
        }
    }
    rows
}

/// Formats rows as a table.
pub(crate) fn table(args: &BenchArgs, chunk_tokens: usize, rows: &[Row]) -> String {
    let mut text = format!(
        "{:<12} {:<8} {:>7} {:>7} {:>8} {:>9} {:>9} {:>9} {:>9} {:>9} {:>7} {:>6} {:>8}\n",
        "workload",
        "op",
        "tokens",
        "clients",
        "ops",
        "ops/s",
        "p50",
        "p90",
        "p99",
        "max",
        "GB/s",
        "gen",
        "cpu s/GB"
    );
    for row in rows {
        let all = &row.latency;
        let per_gb = row.run.server_cpu_seconds_per_gb();
        let _ = writeln!(
            text,
            "{:<12} {:<8} {:>7} {:>7} {:>8} {:>9.1} {:>9} {:>9} {:>9} {:>9} {:>7} {:>6.2} {:>8}",
            row.workload.to_string(),
            row.operation,
            row.tokens,
            row.clients,
            all.count,
            row.ops_per_s(),
            seconds(all.p50),
            seconds(all.p90),
            seconds(all.p99),
            seconds(all.max),
            if row.bytes > 0 {
                format!("{:.2}", row.gb_per_s)
            } else {
                "-".to_owned()
            },
            row.run.generator_cores,
            per_gb.map_or_else(|| "-".to_owned(), |cost| format!("{cost:.3}")),
        );
    }
    let runs = || rows.iter().map(|row| row.run);
    let chunk = args.engine.chunk_bytes(chunk_tokens);
    let _ = writeln!(
        text,
        "\n{}; chunks of {chunk_tokens} tokens, {chunk} bytes per chunk and worker, {} worker(s) \
         per engine.\n\
         ops/s: completed operations per second of the run.\n\
         GB/s: sum over clients of bytes / time inside operations (time to create and verify \
         data is excluded).\n\
         gen: CPU cores used by this tool. cpu s/GB: CPU time of the server per GB.",
        args.engine.mode, args.engine.tp
    );
    if let Some(run) = runs().rfind(|run| run.stored_chunks >= 1000)
        && let Some(growth) = run.growth_per_chunk()
    {
        let _ = writeln!(
            text,
            "Memory of the server per chunk: {growth:.0} bytes in addition to the data ({} chunks stored).",
            run.stored_chunks
        );
    }
    // All rows of one run have the same counts, so only the largest of each is shown.
    let most = |count: fn(&RunCosts) -> u64| runs().map(|run| count(&run)).max().unwrap_or(0);
    let _ = writeln!(
        text,
        "Errors: {}. Misses: {}. Wrong bytes: {} of {} checked.",
        most(|run| run.errors),
        most(|run| run.misses),
        most(|run| run.wrong_bytes),
        most(|run| run.verified_bytes),
    );
    text
}

fn seconds(value: f64) -> String {
    if value < 1e-3 {
        format!("{:.1} µs", value * 1e6)
    } else if value < 1.0 {
        format!("{:.2} ms", value * 1e3)
    } else {
        format!("{value:.2} s")
    }
}

/// Formats rows as JSON, in seconds and bytes.
pub(crate) fn json(
    args: &BenchArgs,
    chunk_tokens: usize,
    rows: &[Row],
    errors: &[String],
    passed: bool,
) -> Value {
    let summary = |all: &Summary| {
        json!({
            "count": all.count,
            "mean": if all.count > 0 { all.sum / all.count as f64 } else { 0.0 },
            "p50": all.p50, "p90": all.p90, "p99": all.p99, "max": all.max,
        })
    };
    let rows: Vec<Value> = rows
        .iter()
        .map(|row| {
            json!({
                "workload": row.workload.to_string(),
                "operation": row.operation,
                "tokens": row.tokens,
                "clients": row.clients,
                "seconds": row.seconds,
                "ops": row.latency.count,
                "ops_per_s": row.ops_per_s(),
                "latency_seconds": summary(&row.latency),
                "control_seconds": summary(&row.control),
                "bytes": row.bytes,
                "gb_per_s": row.gb_per_s,
                "errors": row.run.errors,
                "misses": row.run.misses,
                "verified_bytes": row.run.verified_bytes,
                "wrong_bytes": row.run.wrong_bytes,
                "stored_chunks": row.run.stored_chunks,
                "generator_cores": row.run.generator_cores,
                "server_cpu_seconds": row.run.server_cpu_seconds,
                "server_cpu_seconds_per_gb": row.run.server_cpu_seconds_per_gb(),
                "server_growth_bytes": row.run.server_growth_bytes,
                "server_growth_bytes_per_chunk": row.run.growth_per_chunk(),
            })
        })
        .collect();
    json!({
        "passed": passed,
        "errors": errors,
        "mode": args.engine.mode.to_string(),
        "tp": args.engine.tp,
        "chunk_tokens": chunk_tokens,
        "chunk_bytes": args.engine.chunk_bytes(chunk_tokens),
        "verify": args.engine.verify,
        "rows": rows,
    })
}

/// Formats rows as comma-separated values, for spreadsheets.
pub(crate) fn csv(rows: &[Row]) -> String {
    let mut text =
        "workload,operation,tokens,clients,seconds,ops,ops_per_s,p50_s,p90_s,p99_s,max_s,\
                    control_p50_s,bytes,gb_per_s,errors,misses,verified_bytes,wrong_bytes,\
                    generator_cores,server_cpu_s\n"
            .to_owned();
    for row in rows {
        let all = &row.latency;
        let cpu = row.run.server_cpu_seconds;
        let _ = writeln!(
            text,
            "{},{},{},{},{:.3},{},{:.3},{:.9},{:.9},{:.9},{:.9},{:.9},{},{:.4},{},{},{},{},{:.3},{}",
            row.workload,
            row.operation,
            row.tokens,
            row.clients,
            row.seconds,
            all.count,
            row.ops_per_s(),
            all.p50,
            all.p90,
            all.p99,
            all.max,
            row.control.p50,
            row.bytes,
            row.gb_per_s,
            row.run.errors,
            row.run.misses,
            row.run.verified_bytes,
            row.run.wrong_bytes,
            row.run.generator_cores,
            cpu.map_or_else(String::new, |cpu| format!("{cpu:.3}")),
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_are_divided_by_bytes_and_chunks() {
        let run = RunCosts {
            moved_bytes: 4_000_000_000,
            stored_chunks: 1000,
            server_cpu_seconds: Some(2.0),
            server_growth_bytes: Some(128_000),
            ..RunCosts::default()
        };
        assert_eq!(run.server_cpu_seconds_per_gb(), Some(0.5));
        assert_eq!(run.growth_per_chunk(), Some(128.0));
        let idle = RunCosts::default();
        assert_eq!(idle.server_cpu_seconds_per_gb(), None);
        assert_eq!(idle.growth_per_chunk(), None);
    }

    #[test]
    fn times_have_a_unit_that_suits_them() {
        assert_eq!(seconds(0.000_012_34), "12.3 µs");
        assert_eq!(seconds(0.012_34), "12.34 ms");
        assert_eq!(seconds(12.34), "12.34 s");
    }

    #[test]
    fn every_line_of_csv_has_all_columns() {
        let row = Row {
            workload: Workload::LookupCold,
            operation: "lookup",
            tokens: 1,
            clients: 2,
            seconds: 3.0,
            latency: Summary::default(),
            control: Summary::default(),
            bytes: 4,
            gb_per_s: 5.0,
            run: RunCosts::default(),
        };
        let text = csv(&[row]);
        let columns: Vec<usize> = text.lines().map(|line| line.split(',').count()).collect();
        assert_eq!(columns, [20, 20]);
    }
}
