//! Request traces in Mooncake's format: one JSON object a line with the time of a request, the length of its
//! prompt, and an id for each block of the prompt. Equal ids mean equal prompts up to the end of the block.
//! vLLM's `timed_trace` has the same fields by default, with times in seconds.

use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use serde::Deserialize;

/// Text after the help of commands that read a trace.
pub(crate) const FORMAT: &str = "\
TRACE is a file with one JSON object a line, in the format that Mooncake publishes
(FAST25-release/traces):
  {\"timestamp\": 0, \"input_length\": 6758, \"output_length\": 500, \"hash_ids\": [0, 1, 2]}
The fields timestamp, input_length and hash_ids are read, under these names only; all other fields are
ignored. timestamp is in milliseconds, or in seconds with --time-unit s. hash_ids has an id for each block
of the prompt; equal ids mean equal prompts up to the end of that block.
vLLM's timed_trace reads these fields too. Without --timed-trace-sec-multiplier its traces need
--time-unit s; fields that --timed-trace-label-... renames must first get the names above.";

/// Limit on the bytes of a line.
const MAX_LINE: u64 = 64 << 20;
/// Limit on the tokens of a prompt.
const MAX_TOKENS: u64 = 1 << 30;

/// Unit of the times of a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum TimeUnit {
    /// Milliseconds, as in Mooncake's traces
    Ms,
    /// Seconds, as in vLLM's timed_trace and the traces of Alibaba's Qwen
    S,
}

impl TimeUnit {
    /// Returns the seconds of one unit.
    fn seconds(self) -> f64 {
        match self {
            Self::Ms => 1e-3,
            Self::S => 1.0,
        }
    }
}

/// One request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct TraceRequest {
    /// Time since the start of the trace.
    pub(crate) at: Duration,
    /// Tokens of the prompt.
    pub(crate) tokens: usize,
    /// Ids of the blocks of the prompt.
    pub(crate) blocks: Vec<u64>,
}

/// The requests of a trace, in their order.
#[derive(Debug)]
pub(crate) struct Trace {
    pub(crate) requests: Vec<TraceRequest>,
    /// Tokens of a block.
    pub(crate) block_tokens: usize,
}

#[derive(Deserialize)]
struct Line {
    #[serde(default)]
    timestamp: f64,
    input_length: u64,
    hash_ids: Option<Vec<u64>>,
}

impl Trace {
    /// Reads a trace. If `block_tokens` is `None`, the tokens of a block are derived from the requests.
    pub(crate) fn read(path: &Path, block_tokens: Option<usize>, unit: TimeUnit) -> Result<Self> {
        let shown = path.display();
        let file = File::open(path).with_context(|| format!("cannot read {shown}"))?;
        let mut reader = BufReader::new(file);
        let mut requests = Vec::new();
        let mut number = 0_u64;
        let mut text = String::new();
        loop {
            text.clear();
            number += 1;
            let mut limited = std::io::Read::take(&mut reader, MAX_LINE);
            let read = limited.read_line(&mut text);
            if read.with_context(|| format!("cannot read {shown}, line {number}"))? == 0 {
                break;
            }
            if text.trim().is_empty() {
                continue;
            }
            let request =
                request(&text, unit).with_context(|| format!("{shown}, line {number}"))?;
            requests.push(request);
        }
        ensure!(!requests.is_empty(), "{shown} has no requests");
        let block_tokens = match block_tokens {
            Some(tokens) => tokens,
            None => block_of(&requests).with_context(|| format!("{shown}"))?,
        };
        Ok(Self {
            requests,
            block_tokens,
        })
    }

    /// Returns the number of blocks of all prompts together.
    pub(crate) fn blocks(&self) -> usize {
        self.requests.iter().map(|one| one.blocks.len()).sum()
    }

    /// Returns the time of the last request.
    pub(crate) fn duration(&self) -> Duration {
        let times = self.requests.iter().map(|one| one.at);
        times.max().unwrap_or_default()
    }
}

fn request(text: &str, unit: TimeUnit) -> Result<TraceRequest> {
    let line: Line = serde_json::from_str(text).context("expected a request as JSON")?;
    let at = Duration::try_from_secs_f64(line.timestamp * unit.seconds());
    let at = at.map_err(|_| anyhow::anyhow!("timestamp: expected a time from 0"))?;
    ensure!(
        (1..=MAX_TOKENS).contains(&line.input_length),
        "input_length: expected 1 to {MAX_TOKENS} tokens"
    );
    let blocks = line
        .hash_ids
        .context("the request has no hash_ids, which say what prompts have in common")?;
    ensure!(
        !blocks.is_empty() && blocks.len() as u64 <= line.input_length,
        "hash_ids: expected an id for each block of the prompt"
    );
    Ok(TraceRequest {
        at,
        tokens: line.input_length as usize,
        blocks,
    })
}

/// Returns the tokens of a block for which every prompt has as many blocks as ids. If several lengths fit,
/// prefers a power of two.
fn block_of(requests: &[TraceRequest]) -> Result<usize> {
    let (mut least, mut most) = (1, usize::MAX);
    for request in requests {
        let blocks = request.blocks.len();
        least = least.max(request.tokens.div_ceil(blocks));
        if blocks > 1 {
            most = most.min((request.tokens - 1) / (blocks - 1));
        }
    }
    let power = least.next_power_of_two();
    match () {
        () if power <= most => Ok(power),
        () if least <= most => Ok(least),
        () => bail!(
            "no single length of blocks fits all its prompts: give the tokens of a block with --block-tokens"
        ),
    }
}

#[cfg(test)]
mod tests {
    use lmc_testkit::Folder;

    use super::*;

    fn read(text: &str) -> Result<Trace> {
        read_in(text, TimeUnit::Ms)
    }

    fn read_in(text: &str, unit: TimeUnit) -> Result<Trace> {
        let folder = Folder::temporary();
        let path = folder.join("trace.jsonl");
        std::fs::write(&path, text).expect("a temporary folder");
        Trace::read(&path, None, unit)
    }

    #[test]
    fn a_trace_is_read_and_the_length_of_its_blocks_follows() {
        let trace = read(
            "{\"timestamp\": 0, \"input_length\": 6758, \"output_length\": 5, \"hash_ids\": [0,1,2,3,4,5,6,7,8,9,10,11,12,13]}\n\
             \n\
             {\"timestamp\": 1500, \"input_length\": 513, \"hash_ids\": [0, 99]}\n",
        )
        .expect("a trace");
        assert_eq!(trace.block_tokens, 512);
        assert_eq!((trace.requests.len(), trace.blocks()), (2, 16));
        assert_eq!(trace.duration(), Duration::from_millis(1500));
        assert_eq!(trace.requests[1].blocks, [0, 99]);
    }

    /// A line of the traces of Alibaba's Qwen. vLLM's timed_trace reads seconds, too.
    #[test]
    fn times_may_be_seconds_and_unknown_fields_are_ignored() {
        let text = "{\"chat_id\": 159, \"parent_chat_id\": -1, \"timestamp\": 61.5, \"input_length\": 20, \
                    \"output_length\": 132, \"type\": \"text\", \"turn\": 1, \"hash_ids\": [7, 8]}";
        let trace = read_in(text, TimeUnit::S).expect("a trace");
        assert_eq!(trace.duration(), Duration::from_millis(61_500));
        assert_eq!((trace.requests[0].tokens, trace.block_tokens), (20, 16));
    }

    #[test]
    fn a_line_that_is_no_request_is_named() {
        for (text, expected) in [
            ("", "has no requests"),
            ("nope", "line 1: expected a request"),
            ("{\"input_length\": 5}", "has no hash_ids"),
            (
                "{\"input_length\": 5, \"hash_ids\": []}",
                "an id for each block",
            ),
            ("{\"input_length\": 0, \"hash_ids\": [1]}", "input_length"),
            ("{\"input_length\": 1e300, \"hash_ids\": [1]}", "line 1"),
            (
                "{\"timestamp\": -1, \"input_length\": 5, \"hash_ids\": [1]}",
                "timestamp",
            ),
            (
                "{\"input_length\": 9, \"hash_ids\": [1]}\n{\"input_length\": 9, \"hash_ids\": [1, 2, 3, 4]}",
                "--block-tokens",
            ),
        ] {
            let error = format!("{:#}", read(text).expect_err(text));
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
