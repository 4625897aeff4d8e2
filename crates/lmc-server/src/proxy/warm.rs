//! Prompts that engines had. An engine that had most of a prompt is asked before others. If a decode engine
//! had nearly all of a prompt, the prompt goes to that engine only.
//!
//! Only engines know the tokens of a text, so prompts are compared here by their bytes, as clients wrote
//! them. An engine that has evicted a prompt since then computes it again.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde_json::value::RawValue;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::fields::Fields;

/// Bytes of a prompt that have one hash.
const BLOCK: usize = 1024;
/// Limit on the blocks of one prompt: 4 MiB of text. The rest of a longer prompt counts as unknown.
const MAX_BLOCKS_OF_PROMPT: usize = 1 << 12;
/// Limit on the blocks of one generation: 64 MiB of text, in about 2 MiB of memory.
const MAX_BLOCKS: usize = 1 << 16;
/// Time of one generation. A prompt is remembered for one to two generations.
const GENERATION: Duration = Duration::from_secs(300);
/// Engines of a role that are distinguished.
const MAX_ENGINES: usize = u64::BITS as usize;
/// An engine that lacks less than this fraction (one eighth) of a prompt may be asked alone.
const SMALL_PART: usize = 8;

/// The text of a prompt in blocks. The hash of a block also covers all blocks before it.
#[derive(Debug, Default, PartialEq)]
pub(super) struct PromptBlocks {
    blocks: Vec<u64>,
    /// Bytes of the whole text.
    len: usize,
}

impl PromptBlocks {
    /// Returns the blocks of a request's prompt. `prompt` names the fields with its text, with the fields
    /// first that the next turn of a conversation repeats. Other fields count as a part of the prompt unless
    /// `is_apart` picks them.
    pub(super) fn of(
        body: &Fields<'_>,
        prompt: &[&str],
        is_apart: impl Fn(&str) -> bool,
        seed: u64,
    ) -> Self {
        let mut hash = seed;
        for (name, value) in body.iter() {
            if !prompt.contains(&name) && !is_apart(name) {
                hash = xxh3_64_with_seed(name.as_bytes(), hash);
                hash = xxh3_64_with_seed(value.get().as_bytes(), hash);
            }
        }
        let (mut text, mut len) = (Vec::new(), 0_usize);
        for name in prompt {
            let value = body.get(name).map_or("", RawValue::get).as_bytes();
            let rest = (MAX_BLOCKS_OF_PROMPT * BLOCK).saturating_sub(len);
            text.extend_from_slice(&value[..value.len().min(rest)]);
            len += value.len();
        }
        // The next turn of a conversation continues before the closing bracket.
        len = len.saturating_sub(1);
        text.truncate(len);
        let blocks = text.chunks_exact(BLOCK).map(|block| {
            hash = xxh3_64_with_seed(block, hash);
            hash
        });
        Self {
            blocks: blocks.collect(),
            len,
        }
    }

    /// Returns true if the first `blocks` blocks are at least half of the prompt.
    fn is_most(&self, blocks: usize) -> bool {
        blocks > 0 && 2 * blocks * BLOCK >= self.len
    }

    /// Returns true if few bytes follow the first `blocks` blocks: fewer than `least`, or less than an eighth
    /// of the prompt.
    pub(super) fn is_nearly_all(&self, blocks: usize, least: usize) -> bool {
        let rest = self.len - blocks * BLOCK;
        least > 0 && self.is_most(blocks) && (rest < least || rest < self.len / SMALL_PART)
    }
}

/// The blocks that engines had: a bit for each engine.
type Generation = HashMap<u64, u64>;

#[derive(Debug)]
struct Table {
    /// The generation that is written to, and the one before it.
    generations: [Generation; 2],
    /// Start of the first generation.
    since: Instant,
}

impl Table {
    fn expire(&mut self, now: Instant) {
        let age = now.saturating_duration_since(self.since);
        if age >= 2 * GENERATION {
            self.generations[0].clear();
        }
        if age >= GENERATION || self.generations[0].len() >= MAX_BLOCKS {
            self.generations.swap(0, 1);
            self.generations[0].clear();
            self.since = now;
        }
    }
}

/// The prompts that the engines of one role had recently.
#[derive(Debug)]
pub(super) struct HadPrompts(Mutex<Table>);

impl HadPrompts {
    pub(super) fn new(now: Instant) -> Self {
        Self(Mutex::new(Table {
            generations: Default::default(),
            since: now,
        }))
    }

    /// Records that an engine, by its index, has a prompt in its cache now.
    pub(super) fn note(&self, engine: usize, prompt: &PromptBlocks, now: Instant) {
        if engine >= MAX_ENGINES {
            return;
        }
        let mut table = self.0.lock();
        table.expire(now);
        for &block in &prompt.blocks {
            *table.generations[0].entry(block).or_default() |= 1 << engine;
        }
    }

    /// Forgets the prompts of an engine, whose cache may be gone.
    pub(super) fn forget(&self, engine: usize) {
        if engine >= MAX_ENGINES {
            return;
        }
        for generation in &mut self.0.lock().generations {
            generation
                .values_mut()
                .for_each(|engines| *engines &= !(1 << engine));
        }
    }

    /// Returns the number of leading blocks of a prompt that each engine had; 0 for less than half of the
    /// prompt, which may be a prefix that many prompts share.
    pub(super) fn known(&self, engines: usize, prompt: &PromptBlocks, now: Instant) -> Vec<usize> {
        let mut known = vec![0; engines];
        let mut table = self.0.lock();
        table.expire(now);
        let mut with_all = u64::MAX;
        for block in &prompt.blocks {
            let had = |generation: &Generation| generation.get(block).copied().unwrap_or(0);
            with_all &= table
                .generations
                .iter()
                .map(had)
                .fold(0, |all, had| all | had);
            if with_all == 0 {
                break;
            }
            let counts = known.iter_mut().take(MAX_ENGINES).enumerate();
            counts.for_each(|(engine, count)| *count += usize::from(with_all >> engine & 1 == 1));
        }
        drop(table);
        for count in &mut known {
            if !prompt.is_most(*count) {
                *count = 0;
            }
        }
        known
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::clip::blocks;
    use super::*;

    impl PromptBlocks {
        pub(in super::super) fn of_text(text: &str) -> Self {
            of(&json!({"prompt": text}))
        }
    }

    fn of(body: &Value) -> PromptBlocks {
        of_path("/v1/completions", body, 7)
    }

    fn of_path(path: &str, body: &Value, seed: u64) -> PromptBlocks {
        blocks(path, body.to_string().as_bytes(), seed)
    }

    fn text(blocks: usize) -> String {
        // Its first byte is a quote.
        "x".repeat(blocks * BLOCK)
    }

    #[test]
    fn a_block_covers_all_before_it_and_the_other_fields_of_the_prompt() {
        let whole = PromptBlocks::of_text(&text(10));
        assert_eq!(whole.blocks.len(), 10);
        let start = PromptBlocks::of_text(&text(5));
        assert_eq!(start.blocks, whole.blocks[..5]);
        let same = |other: &PromptBlocks| {
            let pairs = whole.blocks.iter().zip(&other.blocks);
            pairs.filter(|(one, other)| one == other).count()
        };
        let other = format!("y{}", &text(10)[1..]);
        assert_eq!(same(&PromptBlocks::of_text(&other)), 0);
        for more in ["model", "cache_salt", "kv_transfer_params", "suffix", "any"] {
            assert_eq!(
                same(&of(&json!({"prompt": text(10), more: "b"}))),
                0,
                "{more}"
            );
        }
        for apart in ["max_tokens", "stream", "temperature", "stream_options"] {
            assert_eq!(
                same(&of(&json!({"prompt": text(10), apart: "b"}))),
                10,
                "{apart}"
            );
        }
        let of_other = of_path("/v1/completions", &json!({"prompt": text(10)}), 8);
        assert_eq!(same(&of_other), 0, "of another process");
        for unread in ["", "[]", "{}"] {
            let none = blocks("/v1/completions", unread.as_bytes(), 7);
            assert_eq!(none, PromptBlocks::default(), "{unread}");
        }
        let huge = PromptBlocks::of_text(&text(MAX_BLOCKS_OF_PROMPT + 5));
        assert_eq!(huge.blocks.len(), MAX_BLOCKS_OF_PROMPT);
    }

    #[test]
    fn the_next_turn_of_a_conversation_begins_with_the_blocks_of_the_one_before() {
        let chat = |messages: &[(&str, usize)]| {
            let message = |(role, len): &(&str, usize)| json!({"role": role, "content": "word ".repeat(*len)});
            let messages: Vec<Value> = messages.iter().map(message).collect();
            let body = json!({"messages": messages, "tools": [{"type": "function"}]});
            of_path("/v1/chat/completions", &body, 7)
        };
        let first = [("user", 9000)];
        let second = [first[0], ("assistant", 500), ("user", 20)];
        let (first, second) = (chat(&first), chat(&second));
        let known = first.blocks.len();
        assert_eq!(first.blocks, second.blocks[..known]);
        // 2,600 bytes and the rest of a block, of 47,600.
        assert!(second.is_nearly_all(known, 1));
        assert!(!second.is_nearly_all(known / 2 + 1, 1024));
        assert!(
            !second.is_nearly_all(known, 0),
            "asked for by --min-prompt 0"
        );
    }

    #[test]
    fn each_engine_had_its_recent_prompts() {
        let now = Instant::now();
        let had = HadPrompts::new(now);
        let (short, long) = (
            PromptBlocks::of_text(&text(6)),
            PromptBlocks::of_text(&text(10)),
        );
        let little = PromptBlocks::of_text(&text(4));
        had.note(0, &long, now);
        had.note(2, &short, now);
        had.note(3, &little, now);
        had.note(MAX_ENGINES, &long, now);
        let known = |now| had.known(MAX_ENGINES + 1, &long, now)[..4].to_vec();
        assert_eq!(known(now), [10, 0, 6, 0], "less than half is none");
        assert_eq!(had.known(MAX_ENGINES + 1, &long, now)[MAX_ENGINES], 0);
        // One engine has it again, which does not extend it for other engines.
        had.note(2, &short, now + GENERATION);
        assert_eq!(known(now + GENERATION), [10, 0, 6, 0]);
        assert_eq!(known(now + 2 * GENERATION), [0, 0, 6, 0]);
        assert_eq!(known(now + 5 * GENERATION), [0; 4]);
        had.note(0, &long, now + 5 * GENERATION);
        had.note(2, &long, now + 5 * GENERATION);
        had.forget(0);
        assert_eq!(known(now + 5 * GENERATION), [0, 0, 10, 0]);
    }

    #[test]
    fn the_memory_for_prompts_is_bounded() {
        let now = Instant::now();
        let had = HadPrompts::new(now);
        for number in 0..3 * MAX_BLOCKS / MAX_BLOCKS_OF_PROMPT {
            let first = (number * MAX_BLOCKS_OF_PROMPT) as u64;
            let prompt = PromptBlocks {
                blocks: (first..first + MAX_BLOCKS_OF_PROMPT as u64).collect(),
                len: 1,
            };
            had.note(0, &prompt, now);
            let most = MAX_BLOCKS + MAX_BLOCKS_OF_PROMPT;
            let table = had.0.lock();
            assert!(
                table
                    .generations
                    .iter()
                    .all(|generation| generation.len() <= most)
            );
        }
    }
}
