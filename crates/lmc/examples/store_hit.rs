//! Measures how long a prompt takes to come from a shared store into memory, from the lookup to the
//! last chunk.
//!
//! ```text
//! cargo xtask bench store-hit URL [BYTES of a chunk] [CHUNKS of the prompt] [CHUNKS that are stored]
//! ```
//! Each round stores a prompt with one cache, and looks it up with another, whose memory is empty and
//! whose first connection is a part of the time. The prompts stay in the store.

use std::error::Error;
use std::time::{Duration, Instant};

use lmc::{CacheBuilder, PromptCache};

const ROUNDS: u32 = 9;
/// Tokens of a chunk.
const TOKENS: u32 = 16;
const DEADLINE: Duration = Duration::from_secs(60);

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let url = args
        .next()
        .ok_or("which store? redis://…, s3://… or file:///…")?;
    let mut number = |default| args.next().map_or(Ok(default), |text| text.parse::<u32>());
    let bytes = number(64 << 10)?;
    let chunks = number(256)?;
    let stored = number(chunks)?.min(chunks);
    let memory = 2 * bytes as usize * chunks as usize;
    let cache = |round: u32| -> Result<PromptCache, Box<dyn Error>> {
        let builder = CacheBuilder::new("store-hit", "bytes", u64::from(bytes));
        let salt = format!("{}-{round}", std::process::id());
        let builder = builder
            .chunk_size(TOKENS)
            .salt(&salt)
            .dram(memory.max(1 << 30));
        Ok(builder.store(&url).build()?)
    };
    let mut times = Vec::new();
    for round in 0..ROUNDS {
        let prompt: Vec<u32> = (0..TOKENS * chunks)
            .map(|token| token * 7 + round)
            .collect();
        let writer = cache(round)?;
        // What a lookup has not found is written without a question.
        writer.lookup(&prompt).wait_blocking();
        let head = &prompt[..(TOKENS * stored) as usize];
        writer.store(head, |_, bytes| bytes.fill(42));
        writer.close(Instant::now() + DEADLINE);
        let reader = cache(round)?;
        let began = Instant::now();
        let hits = reader.lookup(&prompt).wait_blocking().hits;
        times.push(began.elapsed());
        reader.close(Instant::now() + DEADLINE);
        if hits != stored as usize {
            return Err(format!("{hits} of {stored} chunks were found").into());
        }
    }
    times.sort_unstable();
    println!(
        "{stored} of {chunks} chunks of {bytes} bytes: median {:.1} ms, best {:.1} ms of {ROUNDS} rounds",
        times[times.len() / 2].as_secs_f64() * 1e3,
        times[0].as_secs_f64() * 1e3
    );
    Ok(())
}
