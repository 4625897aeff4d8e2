//! `lmc sim`: the share of a trace's prompts that each eviction policy would have found, by cache size.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;

use anyhow::{Context, Result, ensure};
use clap::Args;
use indicatif::ProgressBar;
use lmc_backend_local::{LocalConfig, OwnerId, PolicyKind, TenantId, WriteStart};
use lmc_key::{ChunkHash, ChunkKey, SpaceId};
use lmc_memory::{ArenaConfig, Pool, PoolConfig};
use serde_json::{Value, json};

use super::format::duration;
use crate::bars;
use crate::config::{GIB, human_bytes, parse_bytes, policy_name};
use crate::stdout::{out, outln};
use crate::trace::{self, TimeUnit, Trace};

/// Returns the text after the help of the command.
pub(super) fn help() -> String {
    format!(
        "Examples:\n  \
         lmc sim conversation_trace.jsonl\n  \
         lmc sim conversation_trace.jsonl --token-size 144KiB --size 64GiB --size 1TiB\n\n\
         `lmc plan` shows the bytes of a model's token. The column best is Belady's rule, which knows the\n\
         future.\n\n{}",
        trace::FORMAT
    )
}

/// Bytes that represent a block; their content does not matter.
const BLOCK: u64 = 64;
/// Sizes that are shown without `--size`, as shares of the different blocks.
const SHARES: [f64; 7] = [0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.7];

// A doc comment here would become the text of the command.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Trace files; each trace is played through an empty cache.
    #[arg(required = true, value_name = "TRACE")]
    traces: Vec<PathBuf>,
    /// Bytes of a token in the cache, such as 144KiB.
    #[arg(long, value_name = "SIZE", value_parser = |text: &str| parse_bytes(text, 1))]
    token_size: Option<u64>,
    /// A size of the cache, such as 500GiB; repeatable. A bare number is GiB.
    #[arg(long, value_name = "SIZE", requires = "token_size", value_parser = |text: &str| parse_bytes(text, GIB))]
    size: Vec<u64>,
    /// Tokens of a block of the trace; by default derived from its prompts.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    block_tokens: Option<u64>,
    /// Unit of the times of the trace.
    #[arg(long, value_name = "UNIT", value_enum, default_value_t = TimeUnit::Ms)]
    time_unit: TimeUnit,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

pub(super) fn run(arguments: &Arguments) -> Result<()> {
    ensure!(
        arguments.token_size != Some(0) && !arguments.size.contains(&0),
        "--token-size and --size: expected more than 0 bytes"
    );
    let mut reports = Vec::new();
    for path in &arguments.traces {
        let block_tokens = arguments.block_tokens.map(|tokens| tokens as usize);
        let trace = Trace::read(path, block_tokens, arguments.time_unit)?;
        let report = Report::of(path, &trace, arguments)?;
        match arguments.json {
            true => reports.push(report.json()),
            false => out!("{}", report.text()),
        }
    }
    if arguments.json {
        outln!("{}", serde_json::to_string_pretty(&reports)?);
    }
    Ok(())
}

/// Shares of the blocks of a trace that caches of one size would have found.
#[derive(Debug)]
struct Row {
    blocks: usize,
    /// Found with each policy, in the order of [`PolicyKind::ALL`].
    found: Vec<usize>,
    best: usize,
}

#[derive(Debug)]
struct Report {
    name: String,
    requests: usize,
    seconds: f64,
    block_tokens: u64,
    /// Bytes of a token, if known.
    token_size: Option<u64>,
    blocks: usize,
    different: usize,
    /// Blocks that a cache without limit finds.
    ceiling: usize,
    rows: Vec<Row>,
}

impl Report {
    fn of(path: &Path, trace: &Trace, arguments: &Arguments) -> Result<Self> {
        let prompts: Vec<&[u64]> = (trace.requests.iter())
            .map(|request| &request.blocks[..])
            .collect();
        let different: HashSet<u64> = prompts.iter().copied().flatten().copied().collect();
        let block_tokens = trace.block_tokens as u64;
        let sizes: Vec<usize> = match arguments.token_size {
            Some(bytes) if !arguments.size.is_empty() => {
                let block = block_tokens.saturating_mul(bytes);
                let blocks = |size: &u64| (size / block) as usize;
                arguments.size.iter().map(blocks).collect()
            }
            _ => SHARES
                .iter()
                .map(|share| ((different.len() as f64 * share) as usize).max(1))
                .collect(),
        };
        let bar = bar(sizes.len());
        let rows = sizes.into_iter().map(|blocks| {
            let row = row(&prompts, blocks, different.len());
            bar.inc(1);
            row
        });
        let rows = rows.collect::<Result<_>>()?;
        bar.finish_and_clear();
        Ok(Self {
            name: path.display().to_string(),
            requests: trace.requests.len(),
            seconds: trace.duration().as_secs_f64(),
            block_tokens,
            token_size: arguments.token_size,
            blocks: trace.blocks(),
            different: different.len(),
            ceiling: belady(&prompts, usize::MAX),
            rows,
        })
    }

    fn share(&self, found: usize) -> f64 {
        100.0 * found as f64 / self.blocks as f64
    }

    /// Returns the size of a number of blocks in tokens, and in bytes if the bytes of a token are known.
    fn size(&self, blocks: usize) -> String {
        let tokens = (blocks as u64).saturating_mul(self.block_tokens);
        match self.token_size {
            Some(bytes) => format!(
                "{tokens} tokens ({})",
                human_bytes(tokens.saturating_mul(bytes))
            ),
            None => format!("{tokens} tokens"),
        }
    }

    fn text(&self) -> String {
        let mut out = String::new();
        let _ = writeln!(
            out,
            "trace        {}: {} requests in {}, blocks of {} tokens",
            self.name,
            self.requests,
            duration(self.seconds),
            self.block_tokens
        );
        let _ = writeln!(out, "prompts      {}", self.size(self.blocks));
        let _ = writeln!(out, "different    {}", self.size(self.different));
        let _ = writeln!(
            out,
            "no limit     {:.1} % of the prompts' blocks found\n",
            self.share(self.ceiling)
        );
        let _ = write!(out, "{:<36}", "a cache of");
        for kind in PolicyKind::ALL {
            let _ = write!(out, " {:>8}", policy_name(kind));
        }
        let _ = writeln!(out, " {:>8}", "best");
        for row in &self.rows {
            let _ = write!(out, "{:<36}", self.size(row.blocks));
            for found in row.found.iter().chain([&row.best]) {
                let _ = write!(out, " {:>6.1} %", self.share(*found));
            }
            out.push('\n');
        }
        out.push('\n');
        out
    }

    fn json(&self) -> Value {
        let share = |found: usize| self.share(found) / 100.0;
        let rows = self.rows.iter().map(|row| {
            let found = PolicyKind::ALL.iter().zip(&row.found);
            let found =
                found.map(|(kind, found)| (policy_name(*kind).to_owned(), share(*found).into()));
            let found: serde_json::Map<String, Value> = found.collect();
            let tokens = row.blocks as u64 * self.block_tokens;
            json!({
                "tokens": tokens,
                "bytes": self.token_size.map(|bytes| tokens.saturating_mul(bytes)),
                "found": found,
                "best": share(row.best),
            })
        });
        json!({
            "trace": self.name,
            "requests": self.requests,
            "seconds": self.seconds,
            "block_tokens": self.block_tokens,
            "blocks": self.blocks,
            "different_blocks": self.different,
            "no_limit": share(self.ceiling),
            "sizes": rows.collect::<Vec<_>>(),
        })
    }
}

fn bar(rows: usize) -> ProgressBar {
    let style = bars::style("{wide_bar} {pos} of {len} sizes, {eta} left");
    ProgressBar::new(rows as u64).with_style(style)
}

/// Plays a trace through a cache of each policy, each on a thread of its own.
fn row(prompts: &[&[u64]], blocks: usize, different: usize) -> Result<Row> {
    // A cache larger than all different blocks makes no difference.
    let capacity = blocks.clamp(1, different.max(1));
    let found = thread::scope(|scope| {
        let played = PolicyKind::ALL.map(|kind| scope.spawn(move || play(prompts, kind, capacity)));
        let best = belady(prompts, capacity);
        let found = played.map(|thread| thread.join().expect("it does not panic"));
        found
            .into_iter()
            .collect::<Result<_>>()
            .map(|found| (found, best))
    });
    let (found, best) = found?;
    Ok(Row {
        blocks,
        found,
        best,
    })
}

fn key(id: u64) -> ChunkKey {
    let mut hash = [0; 32];
    // Spread like digests.
    let spread = id.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    hash[..8].copy_from_slice(&(spread ^ (spread >> 29)).to_le_bytes());
    hash[8..16].copy_from_slice(&id.to_le_bytes());
    ChunkKey {
        space: SpaceId::new([1; 16]),
        kv_rank: 0,
        group: 0,
        hash: ChunkHash::new(hash),
    }
}

/// Plays a trace through a [`LocalTier`](lmc_backend_local::LocalTier), as an engine uses it: each request
/// leases the leading blocks that are present, and stores the others. Returns the number of blocks found.
fn play(prompts: &[&[u64]], policy: PolicyKind, blocks: usize) -> Result<usize> {
    let arena = ArenaConfig::anonymous(blocks * BLOCK as usize).build();
    let arena = arena.context("not enough memory for the simulated cache")?;
    let config = PoolConfig::default().with_align(BLOCK as usize);
    let surplus = arena.len() as u64 / BLOCK - blocks as u64;
    let pool = Pool::new(Arc::new(arena), config)?;
    let tier = LocalConfig::default()
        .with_policy(policy)
        .build(pool, None)?;
    // Memory comes in whole pages: the surplus is held by writes that are never committed.
    let held = (0..surplus).map(|number| {
        let key = key(u64::MAX - number);
        tier.begin_write(OwnerId(1), TenantId(0), key, BLOCK)
    });
    let _held = held.collect::<Result<Vec<_>, _>>()?;
    let mut found = 0;
    for prompt in prompts {
        let keys: Vec<ChunkKey> = prompt.iter().map(|&id| key(id)).collect();
        let leases = tier.lease_leading(OwnerId(0), &keys);
        found += leases.len();
        let parent = |position: usize| position.checked_sub(1).map(|parent| keys[parent]);
        // Of the remaining chunks, those present count as used, and the others are stored.
        let rest = (leases.len()..keys.len()).map(|position| (keys[position], parent(position)));
        tier.touch(&rest.collect::<Vec<_>>());
        let mut writes = Vec::new();
        for (position, &key) in keys.iter().enumerate().skip(leases.len()) {
            match tier.begin_write(OwnerId(0), TenantId(0), key, BLOCK) {
                Ok(WriteStart::Reserved(grant)) => writes.push(grant.written(parent(position))),
                Ok(WriteStart::Present | WriteStart::Busy) => {}
                // A request larger than the cache stores what fits.
                Err(_) => break,
            }
        }
        tier.commit(writes);
    }
    Ok(found)
}

/// Returns the number of blocks that Belady's rule finds: it evicts the block whose next use is farthest,
/// and does not store a block that would be evicted at once. Only leading blocks count as found.
fn belady(prompts: &[&[u64]], blocks: usize) -> usize {
    let mut uses: HashMap<u64, Vec<usize>> = HashMap::new();
    for (at, prompt) in prompts.iter().enumerate() {
        for &id in *prompt {
            uses.entry(id).or_default().push(at);
        }
    }
    let next = |id: u64, now: usize| {
        let uses = &uses[&id];
        let later = uses.partition_point(|&at| at <= now);
        uses.get(later).copied().unwrap_or(usize::MAX)
    };
    let mut resident: HashMap<u64, (usize, usize)> = HashMap::new();
    // By next use, then by depth: the last blocks of a prompt are evicted first.
    let mut order: BTreeSet<(usize, usize, u64)> = BTreeSet::new();
    let mut found = 0;
    for (now, prompt) in prompts.iter().enumerate() {
        let leading = prompt.iter().take_while(|id| resident.contains_key(id));
        found += leading.count();
        for (depth, &id) in prompt.iter().enumerate() {
            if let Some((before, depth)) = resident.remove(&id) {
                order.remove(&(before, depth, id));
            }
            let at = next(id, now);
            resident.insert(id, (at, depth));
            order.insert((at, depth, id));
            if resident.len() > blocks {
                let (_, _, gone) = order.pop_last().expect("it is over-full");
                resident.remove(&gone);
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::prompt::Random;

    /// Prompts of three conversations that continue in turns, among prompts that occur once.
    fn prompts() -> Vec<Vec<u64>> {
        let mut random = Random::new(1);
        let mut lengths = [4; 3];
        (0..300)
            .map(|turn| match random.next() % 2 {
                0 => (0..8).map(|block| 1_000_000 + turn * 8 + block).collect(),
                _ => {
                    let talk = (random.next() % 3) as usize;
                    lengths[talk] += 1;
                    let first = talk as u64 * 10_000;
                    (first..first + lengths[talk]).collect()
                }
            })
            .collect()
    }

    fn with(prompts: &[Vec<u64>], blocks: usize) -> Row {
        let prompts: Vec<&[u64]> = prompts.iter().map(Vec::as_slice).collect();
        let different: HashSet<u64> = prompts.iter().copied().flatten().copied().collect();
        row(&prompts, blocks, different.len()).expect("memory")
    }

    #[test]
    fn no_policy_finds_more_than_the_best_and_more_memory_finds_more() {
        let prompts = prompts();
        let (small, large) = (with(&prompts, 40), with(&prompts, 200));
        for row in [&small, &large] {
            assert!(row.found.iter().all(|found| *found <= row.best), "{row:?}");
        }
        assert!(small.best < large.best && small.found[0] < large.found[0]);
    }

    #[test]
    fn all_policies_find_the_same_if_everything_fits() {
        let prompts = prompts();
        let row = with(&prompts, 1 << 20);
        let mut known: HashSet<u64> = HashSet::new();
        let mut expected = 0;
        for prompt in &prompts {
            expected += prompt.iter().take_while(|id| known.contains(*id)).count();
            known.extend(prompt);
        }
        assert!(expected > 0);
        assert_eq!(row.best, expected);
        assert_eq!(row.found, vec![expected; PolicyKind::ALL.len()]);
    }
}
