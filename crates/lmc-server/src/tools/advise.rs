//! `lmc advise`: the hit ratios that other cache sizes would have had.

use std::fmt::Write;

use serde_json::Value;

use super::format::{bytes, number, percent};

/// Text after the help of the command.
pub(super) const HELP: &str = "\
The server follows a sample of the requested chunks since its start. The output is an estimate of the share
of all requested chunks that LRU caches of several sizes would have found: the size of memory alone, of
memory with drives, and more. Peers and shared stores do not count.";

/// Uses of followed chunks below which there is no estimate.
const LEAST_FOLLOWED: f64 = 1000.0;
/// Columns of the widest bar.
const BAR: f64 = 40.0;

pub(super) fn table(answer: &Value) -> String {
    let followed = number(&answer["followed"]);
    if followed < LEAST_FOLLOWED {
        return format!(
            "too few chunks were requested for an estimate: {followed} of {LEAST_FOLLOWED}; ask again later\n"
        );
    }
    let sizes = answer["sizes"]
        .as_array()
        .map(Vec::as_slice)
        .unwrap_or_default();
    let mut out = format!("from {followed} uses of chunks since the start\n\n");
    let has_drives = number(&answer["drive_bytes"]) > 0.0;
    for size in sizes {
        let name = size["what"].as_str().unwrap_or_default();
        if name == "memory and drives" && !has_drives {
            continue;
        }
        let ratio = number(&size["hit_ratio"]);
        let columns = (BAR * ratio).round() as usize;
        // Writing to a string cannot fail.
        let _ = writeln!(
            out,
            "{name:<18} {:>10} {:>8}  {}",
            bytes(&size["bytes"]),
            percent(ratio, 1.0),
            "#".repeat(columns)
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn each_size_has_a_line_and_few_chunks_give_no_estimate() {
        let answer = |followed: u64, drives: u64| {
            let size = |what: &str, bytes: u64, ratio: f64| json!({"what": what, "bytes": bytes, "hit_ratio": ratio});
            let sizes = [
                size("memory", 1 << 36, 0.5),
                size("memory and drives", 1 << 36, 0.5),
                size("twice that", 1 << 37, 0.75),
            ];
            json!({"followed": followed, "drive_bytes": drives, "sizes": sizes})
        };
        assert!(table(&answer(999, 0)).contains("too few"));
        let text = table(&answer(1000, 0));
        let lines: Vec<&str> = text.lines().skip(2).collect();
        assert_eq!(lines.len(), 2, "{text}");
        assert!(
            lines[0].contains("64.0 GiB") && lines[0].contains("50.0 %"),
            "{text}"
        );
        assert!(lines[1].ends_with(&"#".repeat(30)), "{text}");
        assert_eq!(table(&answer(1000, 1)).lines().count(), 5);
    }
}
