//! Request traces in Mooncake's format, which is also the format of vLLM's `timed_trace`: one JSON object a
//! line with the time of a request, the length of its prompt, and an id for each block of the prompt. Equal
//! ids mean equal prompts up to the end of the block.

use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;

/// Text after the help of commands that read a trace.
pub(crate) const FORMAT: &str = "\
TRACE is a file with one JSON object a line, in the format that Mooncake publishes
(FAST25-release/traces) and vLLM's timed_trace takes:
  {\"timestamp\": 0, \"input_length\": 6758, \"output_length\": 500, \"hash_ids\": [0, 1, 2]}
timestamp is in milliseconds. hash_ids has an id for each block of the prompt; equal ids mean equal
prompts up to the end of that block.";

/// Limit on the bytes of a line.
const MAX_LINE: u64 = 64 << 20;
/// Limit on the tokens of a prompt.
const MAX_TOKENS: u64 = 1 << 30;

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
    pub(crate) fn read(path: &Path, block_tokens: Option<usize>) -> Result<Self> {
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
            let request = request(&text).with_context(|| format!("{shown}, line {number}"))?;
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

fn request(text: &str) -> Result<TraceRequest> {
    let line: Line = serde_json::from_str(text).context("expected a request as JSON")?;
    let at = Duration::try_from_secs_f64(line.timestamp / 1e3);
    let at = at.map_err(|_| anyhow::anyhow!("timestamp: expected milliseconds from 0"))?;
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
        let folder = Folder::temporary();
        let path = folder.join("trace.jsonl");
        std::fs::write(&path, text).expect("a temporary folder");
        Trace::read(&path, None)
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
