//! The hashes of one request, which grow with its prompt.

use crate::{ChunkHash, ChunkHasher, HashMemo, Salt, Token};

/// The chunk hashes of one request's tokens. A prompt that grows is hashed only where it grew.
///
/// It keeps the tokens of its whole chunks (4 bytes each) and compares them on every call: a
/// request that comes back with other tokens gets the hashes of those, never old ones. For
/// 131,072 tokens that is 512 KiB and some 20 µs, against half a millisecond for hashing anew.
#[derive(Clone, Debug)]
pub struct PrefixHashes {
    hasher: ChunkHasher,
    /// The tokens of the whole chunks; `hashes.len() * chunk_size` of them.
    tokens: Vec<Token>,
    hashes: Vec<ChunkHash>,
}

/// What [`PrefixHashes::extend`] did, in chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extended {
    /// Leading chunks whose hashes stayed.
    pub kept: usize,
    /// Chunks hashed in this call.
    pub added: usize,
    /// Chunks that were known before and had other tokens now, and everything after them.
    pub replaced: usize,
}

/// Why there are no hashes for a range of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RangeError {
    /// A border lies within a chunk.
    #[error(
        "{which} {token} is not a multiple of the chunk size {chunk_size}; \
         round it down to {}", token - token % *chunk_size as usize
    )]
    Unaligned {
        /// `start` or `end`.
        which: &'static str,
        /// The border, in tokens.
        token: usize,
        /// Tokens in a chunk.
        chunk_size: u32,
    },
    /// The range runs backwards.
    #[error("start {start} lies after end {end}; expected start <= end")]
    Backwards {
        /// First token.
        start: usize,
        /// Token after the last.
        end: usize,
    },
    /// The range ends after the last whole chunk.
    #[error("end {end} lies after the last whole chunk, which ends at token {hashed}")]
    BeyondEnd {
        /// Token after the last that was asked for.
        end: usize,
        /// Tokens that have hashes.
        hashed: usize,
    },
}

impl PrefixHashes {
    /// Nothing hashed yet.
    pub const fn new(hasher: ChunkHasher) -> Self {
        Self {
            hasher,
            tokens: Vec::new(),
            hashes: Vec::new(),
        }
    }

    /// What it hashes with.
    pub const fn hasher(&self) -> &ChunkHasher {
        &self.hasher
    }

    /// Takes the whole prompt so far and hashes the whole chunks that are new.
    ///
    /// A prompt that is shorter than the last one, but otherwise the same, keeps all hashes:
    /// requests ask for ranges of a prompt in any order.
    pub fn extend(&mut self, tokens: &[Token]) -> Extended {
        let (extended, new) = self.keep_common(tokens);
        let parent = self.hashes.last().copied().unwrap_or(self.hasher.start());
        self.hasher.hash_chunks(&parent, new, &mut self.hashes);
        self.tokens.extend_from_slice(new);
        extended
    }

    /// As [`extend`](Self::extend), asking `memo` before hashing.
    pub fn extend_with(&mut self, memo: &HashMemo, salt: &Salt, tokens: &[Token]) -> Extended {
        let (extended, new) = self.keep_common(tokens);
        let parent = self.hashes.last().copied().unwrap_or(self.hasher.start());
        memo.hash_chunks(&self.hasher, salt, &parent, new, &mut self.hashes);
        self.tokens.extend_from_slice(new);
        extended
    }

    /// All hashes, one for each whole chunk.
    pub fn hashes(&self) -> &[ChunkHash] {
        &self.hashes
    }

    /// The hashes of the chunks from token `start` up to token `end`.
    ///
    /// # Errors
    /// When a border is no multiple of the chunk size, or lies beyond the hashed tokens.
    pub fn range(&self, start: usize, end: usize) -> Result<&[ChunkHash], RangeError> {
        let chunk_size = self.hasher.chunk_size();
        let chunk_len = self.hasher.chunk_len();
        for (which, token) in [("start", start), ("end", end)] {
            if token % chunk_len != 0 {
                return Err(RangeError::Unaligned {
                    which,
                    token,
                    chunk_size,
                });
            }
        }
        if start > end {
            return Err(RangeError::Backwards { start, end });
        }
        self.hashes
            .get(start / chunk_len..end / chunk_len)
            .ok_or(RangeError::BeyondEnd {
                end,
                hashed: self.tokens.len(),
            })
    }

    /// Tokens that have hashes: those of whole chunks.
    pub fn hashed_tokens(&self) -> usize {
        self.tokens.len()
    }

    /// Drops what `tokens` contradicts; returns the whole chunks of `tokens` that have no hash.
    fn keep_common<'a>(&mut self, tokens: &'a [Token]) -> (Extended, &'a [Token]) {
        let chunk_len = self.hasher.chunk_len();
        let known = self.hashes.len();
        let common = tokens.len().min(self.tokens.len());
        // One comparison of everything first: it is what nearly always holds, and runs at the
        // speed of memory. A partial chunk counts too: it can contradict a whole one.
        if tokens[..common] != self.tokens[..common] {
            let pairs = tokens.chunks(chunk_len).zip(self.tokens.chunks(chunk_len));
            let kept = pairs
                .take_while(|(new, old)| **new == old[..new.len()])
                .count();
            self.hashes.truncate(kept);
            self.tokens.truncate(kept * chunk_len);
        }
        let kept = self.hashes.len();
        let whole = &tokens[..tokens.len() - tokens.len() % chunk_len];
        let new = whole.get(self.tokens.len()..).unwrap_or(&[]);
        let extended = Extended {
            kept,
            added: new.len() / chunk_len,
            replaced: known - kept,
        };
        (extended, new)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::HashAlgorithm;

    fn prefix() -> PrefixHashes {
        PrefixHashes::new(ChunkHasher::new(HashAlgorithm::Blake3, 4).unwrap())
    }

    #[test]
    fn growth_hashes_what_is_new() {
        let mut prefix = prefix();
        let tokens: Vec<Token> = (0..11).collect();
        assert_eq!(
            prefix.extend(&tokens[..3]),
            Extended {
                kept: 0,
                added: 0,
                replaced: 0
            }
        );
        assert_eq!(
            prefix.extend(&tokens[..9]),
            Extended {
                kept: 0,
                added: 2,
                replaced: 0
            }
        );
        assert_eq!(
            prefix.extend(&tokens),
            Extended {
                kept: 2,
                added: 0,
                replaced: 0
            }
        );
        assert_eq!(
            prefix.extend(&tokens[..5]),
            Extended {
                kept: 2,
                added: 0,
                replaced: 0
            }
        );
        assert_eq!(prefix.hashed_tokens(), 8);
        assert_eq!(prefix.hashes(), prefix.hasher().hash_prompt(&tokens));
    }

    #[test]
    fn a_changed_prefix_never_gives_old_hashes() {
        let mut prefix = prefix();
        let mut tokens: Vec<Token> = (0..16).collect();
        prefix.extend(&tokens);
        tokens[9] = 99;
        assert_eq!(
            prefix.extend(&tokens),
            Extended {
                kept: 2,
                added: 2,
                replaced: 2
            }
        );
        assert_eq!(prefix.hashes(), prefix.hasher().hash_prompt(&tokens));
        tokens[0] = 99;
        // Shorter and different: what lies behind the difference must go too.
        assert_eq!(
            prefix.extend(&tokens[..8]),
            Extended {
                kept: 0,
                added: 2,
                replaced: 4
            }
        );
        assert_eq!(prefix.hashes(), prefix.hasher().hash_prompt(&tokens[..8]));
        // A partial chunk that contradicts a whole one takes it away.
        tokens[5] = 99;
        assert_eq!(
            prefix.extend(&tokens[..6]),
            Extended {
                kept: 1,
                added: 0,
                replaced: 1
            }
        );
        assert_eq!(prefix.hashes(), prefix.hasher().hash_prompt(&tokens[..4]));
    }

    #[test]
    fn ranges_are_checked() {
        let mut prefix = prefix();
        prefix.extend(&(0..13).collect::<Vec<_>>());
        let all = prefix.hashes();
        assert_eq!(prefix.range(4, 12), Ok(&all[1..3]));
        assert_eq!(prefix.range(12, 12), Ok(&[][..]));
        assert_eq!(
            prefix.range(8, 4),
            Err(RangeError::Backwards { start: 8, end: 4 })
        );
        assert_eq!(
            prefix.range(8, 16),
            Err(RangeError::BeyondEnd {
                end: 16,
                hashed: 12
            })
        );
        assert_eq!(
            prefix.range(0, 13).unwrap_err().to_string(),
            "end 13 is not a multiple of the chunk size 4; round it down to 12"
        );
        assert!(prefix.range(usize::MAX - 3, usize::MAX).is_err());
    }
}
