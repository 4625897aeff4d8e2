//! A memo of chunk hashes: a prompt seen before is compared instead of hashed.
//!
//! A chained hash cannot be computed in parallel: BLAKE3 takes half a millisecond for 512 chunks of 256
//! tokens. Comparing the tokens with a copy takes a tenth of that, and is exact.
//!
//! The memo holds *runs*: up to [`RUN_CHUNKS`] consecutive chunks of one prompt in one allocation, with the
//! hash before them. A probe (XXH3 of the first chunk's tokens, seeded with the parent) finds a run; one
//! comparison checks the rest. Where a prompt leaves a run, the prompt's own tail begins a new run, so
//! prompts with a common beginning share it, as in a radix tree. A probe only proposes a run: parent,
//! algorithm, chunk size and all tokens are compared before a hash is used.

use std::collections::VecDeque;
use std::collections::hash_map::RandomState;
use std::fmt;
use std::hash::BuildHasher;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use hashbrown::HashMap;
use parking_lot::Mutex;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::key::FoldState;
use crate::{ChunkHash, ChunkHasher, HashAlgorithm, Salt, Token, bytes};

/// Most chunks of a run. Long enough that the fixed cost of a run (a probe, a lock) is negligible; short
/// enough that evicting a run does not delay a request.
const RUN_CHUNKS: usize = 64;
/// Most bytes of a run, for large chunks.
const RUN_BYTES: usize = 256 << 10;
/// Words of a hash.
const HASH_WORDS: usize = 8;
/// Bytes of a run besides its words: the headers of the heap and of the `Arc`, a table slot at the usual
/// load, a ring entry.
const RUN_OVERHEAD: usize = 144;
/// Least memory of a shard: about sixty long runs, so that the shards fill about evenly by chance. A lock is
/// held for tens of nanoseconds in every microsecond, so few shards are enough.
const SHARD_BYTES: usize = 4 << 20;
const MAX_SHARDS: usize = 64;
/// Most runs that one eviction passes over because they were used since they were last considered. The limit
/// keeps an insertion O(1) even when all runs were used.
const SECOND_CHANCES: usize = 16;

/// A bounded memo of (parent hash, tokens) → chunk hash, shared by any number of threads.
///
/// Memory grows with the prompts, up to the limit. Beyond the limit, runs that were not used since they were
/// last considered are evicted (CLOCK).
///
/// Prompts of different salts never share a run, even where this would save time: otherwise the time that a
/// hash takes would show one tenant what another tenant has asked.
pub struct HashMemo {
    shards: Box<[Shard]>,
    /// Most bytes of one shard.
    shard_bytes: usize,
    /// Random secret of this memo, so that no user can prepare prompts whose probes collide.
    seed: u64,
    known: AtomicU64,
    hashed: AtomicU64,
}

/// Counters of a [`HashMemo`]. The unit is chunks unless stated otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoStats {
    /// Bytes held now, overhead included.
    pub bytes: usize,
    /// Most bytes held.
    pub max_bytes: usize,
    /// Runs of chunks held now.
    pub runs: usize,
    /// Chunks whose hash was in the memo, since the start.
    pub known: u64,
    /// Chunks that were hashed, since the start.
    pub hashed: u64,
    /// Runs evicted, since the start.
    pub evicted: u64,
}

/// A shard on two cache lines of its own, because other threads write its neighbours.
#[derive(Default)]
#[repr(align(128))]
struct Shard(Mutex<ShardState>);

#[derive(Default)]
struct ShardState {
    runs: HashMap<u64, Slot, FoldState>,
    /// Probes of all runs, in the order in which the clock's hand visits them.
    ring: VecDeque<u64>,
    bytes: usize,
    evicted: u64,
}

struct Slot {
    run: Run,
    used: bool,
}

/// Consecutive chunks of a prompt.
#[derive(Clone)]
struct Run {
    algorithm: HashAlgorithm,
    chunk_size: u32,
    chunks: u32,
    /// Parent hash, hashes of the chunks, tokens of the chunks: one allocation that is read sequentially.
    words: Arc<[u32]>,
}

impl Run {
    /// Makes a run of the chunks of `pending.known`, if any, followed by `hashes` with their `tokens`.
    fn new(
        hasher: &ChunkHasher,
        pending: &Pending,
        hashes: &[ChunkHash],
        tokens: &[Token],
    ) -> Self {
        let parent = to_words(&pending.parent);
        let (parent, old_hashes, old_tokens) = match &pending.known {
            Some(run) => (run.parent(), run.hash_words(), run.tokens()),
            None => (&parent[..], &[][..], &[][..]),
        };
        let chunks = old_hashes.len() / HASH_WORDS + hashes.len();
        let len = (1 + chunks) * HASH_WORDS + old_tokens.len() + tokens.len();
        let mut words: Arc<[u32]> = std::iter::repeat_n(0, len).collect();
        let mut rest = Arc::get_mut(&mut words).expect("it has one owner");
        let mut put = |part: &[u32]| {
            let (to, behind) = std::mem::take(&mut rest).split_at_mut(part.len());
            to.copy_from_slice(part);
            rest = behind;
        };
        put(parent);
        put(old_hashes);
        hashes.iter().for_each(|hash| put(&to_words(hash)));
        put(old_tokens);
        put(tokens);
        Self {
            algorithm: hasher.algorithm(),
            chunk_size: hasher.chunk_size(),
            chunks: u32::try_from(chunks).expect("a run has at most RUN_CHUNKS chunks"),
            words,
        }
    }

    fn chunks(&self) -> usize {
        self.chunks as usize
    }

    fn parent(&self) -> &[u32] {
        &self.words[..HASH_WORDS]
    }

    fn hash_words(&self) -> &[u32] {
        &self.words[HASH_WORDS..(1 + self.chunks()) * HASH_WORDS]
    }

    fn tokens(&self) -> &[Token] {
        &self.words[(1 + self.chunks()) * HASH_WORDS..]
    }

    /// Returns how many leading chunks of `tokens`, which follow `parent`, match this run.
    fn matching(&self, hasher: &ChunkHasher, parent: &ChunkHash, tokens: &[Token]) -> usize {
        if self.algorithm != hasher.algorithm()
            || self.chunk_size != hasher.chunk_size()
            || self.parent() != to_words(parent)
        {
            return 0;
        }
        let chunk_len = hasher.chunk_len();
        let pairs = self
            .tokens()
            .chunks_exact(chunk_len)
            .zip(tokens.chunks_exact(chunk_len));
        pairs.take_while(|(mine, theirs)| mine == theirs).count()
    }

    fn bytes(&self) -> usize {
        run_bytes(self.chunks(), self.chunk_size as usize)
    }
}

impl HashMemo {
    /// Default limit in bytes: 60 prompts of 262,144 tokens.
    pub const DEFAULT_BYTES: usize = 64 << 20;

    /// Makes a memo that holds at most `max_bytes`, overhead included. With zero it holds nothing, and every
    /// chunk is hashed.
    pub fn new(max_bytes: usize) -> Self {
        let wanted = (max_bytes / SHARD_BYTES).clamp(1, MAX_SHARDS);
        // A power of two, rounded down.
        let count = 1 << wanted.ilog2();
        Self {
            shards: std::iter::repeat_with(Shard::default).take(count).collect(),
            shard_bytes: max_bytes / count,
            seed: RandomState::new().hash_one(0),
            known: AtomicU64::new(0),
            hashed: AtomicU64::new(0),
        }
    }

    /// Returns the hashes of the whole chunks of a prompt, as [`ChunkHasher::hash_prompt`] does,
    /// for the tenant of `salt`.
    ///
    /// The salt is not part of the hashes. It keeps tenants apart, so that the time of a call shows no tenant
    /// what another has asked.
    pub fn hash_prompt(
        &self,
        hasher: &ChunkHasher,
        salt: &Salt,
        tokens: &[Token],
    ) -> Vec<ChunkHash> {
        let chunk_len = hasher.chunk_len();
        let run_chunks = self.run_chunks(chunk_len);
        let total = tokens.len() / chunk_len;
        if run_chunks == 0 {
            self.hashed.fetch_add(total as u64, Relaxed);
            return hasher.hash_prompt(tokens);
        }
        let mut out = Vec::with_capacity(total);
        let seed = self.probe_seed(hasher, salt);

        let mut parent = hasher.start();
        let mut done = 0;
        let mut known = 0;
        // The run that ends directly before the next chunk, which may extend it.
        let mut tail: Option<(u64, Run)> = None;
        let mut pending: Option<Pending> = None;
        while done < total {
            let rest = &tokens[done * chunk_len..];
            let probe = probe(seed, &parent, &rest[..chunk_len]);
            let found = self.find(probe).and_then(|run| {
                let count = run.matching(hasher, &parent, rest);
                (count > 0).then_some((run, count))
            });
            if let Some((run, count)) = found {
                if let Some(pending) = pending.take() {
                    let new = pending.at..done;
                    self.keep(hasher, &pending, &tokens[..done * chunk_len], &out, new);
                }
                out.extend(
                    run.hash_words()
                        .chunks_exact(HASH_WORDS)
                        .take(count)
                        .map(from_words),
                );
                parent = *out.last().expect("at least one was pushed");
                done += count;
                known += count;
                tail = (count == run.chunks()).then_some((probe, run));
                continue;
            }

            let begun = pending.get_or_insert_with(|| match tail.take() {
                Some((probe, run)) if run.chunks() < run_chunks => Pending {
                    at: done,
                    parent,
                    probe,
                    free: run_chunks - run.chunks(),
                    known: Some(run),
                },
                _ => Pending {
                    at: done,
                    parent,
                    probe,
                    known: None,
                    free: run_chunks,
                },
            });
            parent = hasher.hash_chunk(&parent, &rest[..chunk_len]);
            out.push(parent);
            done += 1;
            let full = done - begun.at == begun.free;
            if full || done == total {
                let begun = pending.take().expect("begun above");
                let new = begun.at..done;
                self.keep(hasher, &begun, &tokens[..done * chunk_len], &out, new);
            }
        }
        self.known.fetch_add(known as u64, Relaxed);
        self.hashed.fetch_add((total - known) as u64, Relaxed);
        out
    }

    /// Returns the counters, for metrics.
    pub fn stats(&self) -> MemoStats {
        let mut stats = MemoStats {
            max_bytes: self.shard_bytes * self.shards.len(),
            known: self.known.load(Relaxed),
            hashed: self.hashed.load(Relaxed),
            ..MemoStats::default()
        };
        for shard in &self.shards {
            let shard = shard.0.lock();
            stats.bytes += shard.bytes;
            stats.runs += shard.runs.len();
            stats.evicted += shard.evicted;
        }
        stats
    }

    /// Returns the most chunks of a run: zero if not even one chunk fits.
    fn run_chunks(&self, chunk_len: usize) -> usize {
        let chunk_bytes = run_bytes(1, chunk_len);
        if chunk_bytes > self.shard_bytes {
            return 0;
        }
        // A quarter of a shard, so that one run does not evict all others.
        (RUN_BYTES.min(self.shard_bytes / 4) / chunk_bytes).clamp(1, RUN_CHUNKS)
    }

    /// Returns the seed of all probes of one hasher and tenant.
    fn probe_seed(&self, hasher: &ChunkHasher, salt: &Salt) -> u64 {
        let hasher = u64::from(hasher.algorithm().code()) << 32 | u64::from(hasher.chunk_size());
        xxh3_64_with_seed(salt.as_str().as_bytes(), self.seed ^ hasher)
    }

    fn shard(&self, probe: u64) -> &Mutex<ShardState> {
        // The table takes the low bits and the top seven, the shard takes bits in between.
        &self.shards[(probe >> 40) as usize & (self.shards.len() - 1)].0
    }

    fn find(&self, probe: u64) -> Option<Run> {
        let mut shard = self.shard(probe).lock();
        let slot = shard.runs.get_mut(&probe)?;
        slot.used = true;
        Some(slot.run.clone())
    }

    /// Stores the chunks `new` of a prompt; `tokens` and `hashes` are the prompt's.
    fn keep(
        &self,
        hasher: &ChunkHasher,
        pending: &Pending,
        tokens: &[Token],
        hashes: &[ChunkHash],
        new: std::ops::Range<usize>,
    ) {
        let tokens = &tokens[new.start * hasher.chunk_len()..new.end * hasher.chunk_len()];
        self.insert(
            pending.probe,
            Run::new(hasher, pending, &hashes[new], tokens),
        );
    }

    fn insert(&self, probe: u64, run: Run) {
        // Dropped runs are freed after the lock is released.
        let mut freed = Vec::new();
        let mut shard = self.shard(probe).lock();
        let shard = &mut *shard;
        shard.bytes += run.bytes();
        match shard.runs.get_mut(&probe) {
            Some(slot) => {
                let old = std::mem::replace(&mut slot.run, run);
                shard.bytes -= old.bytes();
                freed.push(old);
            }
            None => {
                shard.runs.insert(probe, Slot { run, used: false });
                shard.ring.push_back(probe);
            }
        }
        let mut chances = SECOND_CHANCES;
        while shard.bytes > self.shard_bytes {
            let oldest = shard
                .ring
                .pop_front()
                .expect("bytes are held by runs of the ring");
            let slot = shard
                .runs
                .get_mut(&oldest)
                .expect("the ring holds the keys of the table");
            if slot.used && chances > 0 {
                chances -= 1;
                slot.used = false;
                shard.ring.push_back(oldest);
                continue;
            }
            let Slot { run, .. } = shard.runs.remove(&oldest).expect("found above");
            shard.bytes -= run.bytes();
            shard.evicted += 1;
            freed.push(run);
        }
    }
}

impl Default for HashMemo {
    fn default() -> Self {
        Self::new(Self::DEFAULT_BYTES)
    }
}

impl fmt::Debug for HashMemo {
    /// Shows the counters only: the content is long, and is what users asked.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("HashMemo").field(&self.stats()).finish()
    }
}

/// Chunks that were hashed and will become a run.
struct Pending {
    /// Index of the first of these chunks in the prompt.
    at: usize,
    /// Hash of the chunk before them.
    parent: ChunkHash,
    /// Key of the run in the table.
    probe: u64,
    /// The run that these chunks extend.
    known: Option<Run>,
    /// Number of chunks that can still be added to the run.
    free: usize,
}

fn probe(seed: u64, parent: &ChunkHash, chunk: &[Token]) -> u64 {
    xxh3_64_with_seed(bytes::of_tokens(chunk), seed ^ parent.prefix_u64())
}

/// Returns the bytes of a run of `chunks` chunks.
const fn run_bytes(chunks: usize, chunk_len: usize) -> usize {
    RUN_OVERHEAD + size_of::<u32>() * (HASH_WORDS + chunks * (HASH_WORDS + chunk_len))
}

fn to_words(hash: &ChunkHash) -> [u32; HASH_WORDS] {
    let (words, _) = hash.as_bytes().as_chunks::<4>();
    std::array::from_fn(|i| u32::from_ne_bytes(words[i]))
}

fn from_words(words: &[u32]) -> ChunkHash {
    let mut bytes = [0; 32];
    for (bytes, word) in bytes.chunks_exact_mut(4).zip(words) {
        bytes.copy_from_slice(&word.to_ne_bytes());
    }
    ChunkHash::new(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(seed: u32, chunks: usize, chunk_len: usize) -> Vec<Token> {
        (0..(chunks * chunk_len) as u32)
            .map(|i| i.wrapping_mul(seed) ^ seed)
            .collect()
    }

    /// Asks the memo and compares with the hasher; returns how many chunks were known.
    fn check(memo: &HashMemo, hasher: &ChunkHasher, tokens: &[Token]) -> u64 {
        let before = memo.stats();
        let out = memo.hash_prompt(hasher, &Salt::default(), tokens);
        assert_eq!(out, hasher.hash_prompt(tokens));
        let after = memo.stats();
        assert!(after.bytes <= after.max_bytes, "{after:?}");
        let (known, hashed) = (after.known - before.known, after.hashed - before.hashed);
        assert_eq!(known + hashed, out.len() as u64);
        known
    }

    #[test]
    fn a_prompt_is_hashed_once() {
        for algorithm in HashAlgorithm::ALL {
            let hasher = ChunkHasher::new(algorithm, 256).unwrap();
            let memo = HashMemo::default();
            let prompt = tokens(7, 150, 256);
            assert_eq!(check(&memo, &hasher, &prompt), 0);
            assert_eq!(memo.stats().runs, 3);
            assert_eq!(check(&memo, &hasher, &prompt), 150);
            assert_eq!(check(&memo, &hasher, &prompt[..256 * 10 + 5]), 10);
        }
    }

    #[test]
    fn a_common_beginning_is_shared() {
        let hasher = ChunkHasher::new(HashAlgorithm::Blake3, 16).unwrap();
        let memo = HashMemo::default();
        let common = tokens(3, 100, 16);
        let with = |tail: u32| [&common[..], &tokens(tail, 20, 16)].concat();
        assert_eq!(check(&memo, &hasher, &with(5)), 0);
        let bytes = memo.stats().bytes;
        assert_eq!(check(&memo, &hasher, &with(9)), 100);
        assert!(
            memo.stats().bytes - bytes < 3_000,
            "only the tail was stored"
        );
        assert_eq!(check(&memo, &hasher, &with(5)), 120);
        assert_eq!(check(&memo, &hasher, &with(9)), 120);
    }

    #[test]
    fn a_growing_prompt_stays_in_few_runs() {
        let hasher = ChunkHasher::new(HashAlgorithm::Blake3, 16).unwrap();
        let memo = HashMemo::default();
        let prompt = tokens(11, 130, 16);
        for chunks in 1..=130 {
            assert_eq!(
                check(&memo, &hasher, &prompt[..chunks * 16]),
                chunks as u64 - 1
            );
        }
        assert_eq!(memo.stats().runs, 3);
        assert_eq!(memo.stats().bytes, run_bytes(64, 16) * 2 + run_bytes(2, 16));
    }

    #[test]
    fn what_looks_the_same_is_not() {
        let memo = HashMemo::default();
        let prompt = tokens(13, 8, 16);
        let hasher = ChunkHasher::new(HashAlgorithm::Blake3, 16).unwrap();
        check(&memo, &hasher, &prompt);
        let half = ChunkHasher::new(HashAlgorithm::Blake3, 8).unwrap();
        assert_eq!(check(&memo, &half, &prompt), 0);
        let cbor = ChunkHasher::new(HashAlgorithm::Sha256Cbor, 16).unwrap();
        assert_eq!(check(&memo, &cbor, &prompt), 0);
        let seeded = ChunkHasher::with_seed(HashAlgorithm::Sha256Cbor, 16, "0").unwrap();
        assert_eq!(check(&memo, &seeded, &prompt), 0);

        let out = memo.hash_prompt(&hasher, &Salt::parse("tenant").unwrap(), &prompt);
        assert_eq!(out, hasher.hash_prompt(&prompt));
        assert_eq!(
            memo.stats().known,
            0,
            "tenants do not warm each other's memo"
        );
    }

    /// A planted collision: a run behind the probe of other tokens must not be believed.
    #[test]
    fn a_probe_is_never_trusted() {
        let hasher = ChunkHasher::new(HashAlgorithm::Blake3, 16).unwrap();
        let memo = HashMemo::default();
        let (mine, other) = (tokens(17, 1, 16), tokens(19, 1, 16));
        let start = hasher.start();
        let seed = memo.probe_seed(&hasher, &Salt::default());
        let pending = |parent| Pending {
            at: 0,
            parent,
            probe: 0,
            known: None,
            free: 1,
        };
        let wrong = [ChunkHash::new([1; 32])];
        let at = probe(seed, &start, &mine);
        memo.insert(at, Run::new(&hasher, &pending(start), &wrong, &other));
        assert_eq!(check(&memo, &hasher, &mine), 0);
        // The same tokens behind another parent.
        memo.insert(at, Run::new(&hasher, &pending(wrong[0]), &wrong, &mine));
        assert_eq!(check(&memo, &hasher, &mine), 0);
    }

    #[test]
    fn memory_is_bounded_and_used_runs_stay() {
        let hasher = ChunkHasher::new(HashAlgorithm::Blake3, 16).unwrap();
        let memo = HashMemo::new(64 << 10);
        let hot = tokens(23, 4, 16);
        check(&memo, &hasher, &hot);
        for seed in 100..400 {
            check(&memo, &hasher, &tokens(seed, 20, 16));
            assert_eq!(check(&memo, &hasher, &hot), 4);
        }
        assert!(memo.stats().evicted > 200);
    }

    #[test]
    fn nothing_is_held_where_nothing_fits() {
        let hasher = ChunkHasher::new(HashAlgorithm::Blake3, 256).unwrap();
        for bytes in [0, 100, run_bytes(1, 256) - 1] {
            let memo = HashMemo::new(bytes);
            let prompt = tokens(29, 3, 256);
            check(&memo, &hasher, &prompt);
            assert_eq!(check(&memo, &hasher, &prompt), 0);
            assert_eq!(memo.stats().runs, 0);
        }
    }
}
