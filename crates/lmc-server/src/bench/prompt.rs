//! Prompts, and the bytes that their chunks must have.
//!
//! The bytes of a chunk are derived from all tokens up to its end and from the worker's rank, so
//! a chunk of another prompt, another position or another worker is detected.

/// A prompt, and the seeds of its chunks' bytes.
#[derive(Debug, Clone)]
pub(crate) struct Prompt {
    pub(crate) tokens: Vec<u32>,
    /// One for each whole chunk, from all tokens up to its end.
    pub(crate) seeds: Vec<u64>,
}

/// Shape that all prompts of a run share.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PromptShape {
    pub(crate) tokens: usize,
    pub(crate) chunk_tokens: usize,
    pub(crate) shared_tokens: usize,
    pub(crate) seed: u64,
}

const VOCABULARY: u64 = 128_000;

impl Prompt {
    /// Returns prompt number `number`; different prompts differ from the first token that is not shared.
    pub(crate) fn new(shape: PromptShape, number: u64) -> Self {
        let mut shared = Random::new(shape.seed);
        let mut own = Random::new(shape.seed ^ mix(number + 1));
        let tokens = (0..shape.tokens).map(|index| {
            let random = if index < shape.shared_tokens {
                &mut shared
            } else {
                &mut own
            };
            random.token()
        });
        Self::of(tokens.collect(), shape.chunk_tokens)
    }

    /// Returns the prompt of these tokens.
    pub(crate) fn of(tokens: Vec<u32>, chunk_tokens: usize) -> Self {
        let mut state = 0;
        let seeds = tokens
            .chunks_exact(chunk_tokens)
            .map(|chunk| {
                for &token in chunk {
                    state = mix(state ^ u64::from(token));
                }
                state
            })
            .collect();
        Self { tokens, seeds }
    }

    pub(crate) fn chunks(&self) -> usize {
        self.seeds.len()
    }

    /// Returns the first `chunks` chunks of the prompt, as a prompt.
    pub(crate) fn leading(&self, chunks: usize, chunk_tokens: usize) -> Self {
        Self {
            tokens: self.tokens[..chunks * chunk_tokens].to_vec(),
            seeds: self.seeds[..chunks].to_vec(),
        }
    }
}

/// SplitMix64's finaliser: every bit of the input reaches every bit of the output.
pub(crate) fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// A small generator (SplitMix64).
#[derive(Debug, Clone)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(mix(seed))
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// Returns a random token.
    pub(crate) fn token(&mut self) -> u32 {
        (self.next() % VOCABULARY) as u32
    }

    /// Returns a random number from 0 up to, but not including, 1.
    pub(crate) fn share(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }
}

/// Returns the seed of a piece of memory from its chunk, its worker and its part of the chunk.
pub(crate) fn piece_seed(chunk_seed: u64, rank: u32, part: u64) -> u64 {
    mix(chunk_seed ^ mix(u64::from(rank) << 32 | part))
}

/// Returns word number `index` of a piece. The odd step between words makes a shift visible, and lets the
/// compiler use vector instructions.
fn word(seed: u64, index: u64) -> [u8; 8] {
    let value = seed.wrapping_add(index.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    (value ^ (value >> 29)).to_le_bytes()
}

/// Fills a piece.
pub(crate) fn fill(seed: u64, bytes: &mut [u8]) {
    let mut words = bytes.chunks_exact_mut(8);
    let mut index = 0;
    for to in &mut words {
        to.copy_from_slice(&word(seed, index));
        index += 1;
    }
    let rest = words.into_remainder();
    let last = word(seed, index);
    rest.copy_from_slice(&last[..rest.len()]);
}

/// Returns the number of wrong bytes of a piece.
pub(crate) fn wrong_bytes(seed: u64, bytes: &[u8]) -> u64 {
    let words = bytes.chunks(8).zip(0_u64..);
    words
        .map(|(found, index)| {
            let expected = word(seed, index);
            if found == &expected[..found.len()] {
                return 0;
            }
            let differ = found.iter().zip(expected).filter(|(a, b)| **a != *b);
            differ.count() as u64
        })
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: PromptShape = PromptShape {
        tokens: 100,
        chunk_tokens: 16,
        shared_tokens: 40,
        seed: 7,
    };

    #[test]
    fn prompts_share_only_the_shared_tokens() {
        let (one, two) = (Prompt::new(SHAPE, 0), Prompt::new(SHAPE, 1));
        assert_eq!(one.tokens[..40], two.tokens[..40]);
        assert_ne!(one.tokens[40], two.tokens[40]);
        assert_eq!(one.chunks(), 6);
        assert_eq!(one.seeds[..2], two.seeds[..2]);
        assert_ne!(one.seeds[2], two.seeds[2]);
        assert_eq!(Prompt::new(SHAPE, 1).tokens, two.tokens);
    }

    #[test]
    fn every_wrong_byte_is_counted() {
        let mut bytes = vec![0; 1003];
        let seed = piece_seed(9, 0, 0);
        fill(seed, &mut bytes);
        assert_eq!(wrong_bytes(seed, &bytes), 0);
        let other = piece_seed(10, 0, 0);
        assert!(wrong_bytes(other, &bytes) > 900, "another seed differs");
        assert!(wrong_bytes(seed, &bytes[8..]) > 900, "a shift differs");
        for index in [0, 500, 1002] {
            bytes[index] ^= 1;
        }
        assert_eq!(wrong_bytes(seed, &bytes), 3);
    }

    #[test]
    fn ranks_and_parts_have_bytes_of_their_own() {
        let seeds = [
            piece_seed(1, 0, 0),
            piece_seed(1, 1, 0),
            piece_seed(1, 0, 1),
            piece_seed(2, 0, 0),
        ];
        for (index, seed) in seeds.iter().enumerate() {
            assert!(!seeds[..index].contains(seed));
        }
    }
}
