//! A prompt as an engine names it: by its tokens, or by hashes of its blocks.

use std::sync::Arc;

use lmc_key::ChunkHash;

use crate::adapters::common::Server;
use crate::protocol::CacheKey;

/// The tokens of a prompt, or the hashes of its chunks from the first on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Prompt {
    /// Token ids, which the server hashes.
    Tokens(Arc<[u32]>),
    /// Hashes that the engine made: those of [`chunk_hashes`].
    Chunks(Arc<[ChunkHash]>),
}

impl Prompt {
    /// Returns the number of whole chunks.
    pub fn chunks(&self, chunk_size: u32) -> usize {
        match self {
            Self::Tokens(tokens) => tokens.len() / chunk_size.max(1) as usize,
            Self::Chunks(hashes) => hashes.len(),
        }
    }

    /// Returns true if a server understands the prompt's name.
    pub(crate) fn is_known_to(&self, server: Server) -> bool {
        server.engine_keys || matches!(self, Self::Tokens(_))
    }

    /// Names the first `end` tokens of the prompt in a key.
    pub(crate) fn name(&self, key: &mut CacheKey, end: usize, chunk_size: u32) {
        match self {
            Self::Tokens(tokens) => key.token_ids = tokens[..end.min(tokens.len())].to_vec(),
            Self::Chunks(hashes) => {
                let chunks = (end / chunk_size.max(1) as usize).min(hashes.len());
                key.chunk_hashes = hashes[..chunks].to_vec();
            }
        }
    }
}

/// Returns the hashes of a prompt's whole chunks: the hash of the last block of each.
///
/// An engine's block hash covers all tokens up to the block's end, so that of a chunk's last block
/// names the chunk. A hash of another length than 32 bytes is replaced by its BLAKE3 digest.
pub fn chunk_hashes<'a>(
    block_hashes: impl IntoIterator<Item = &'a [u8]>,
    blocks_per_chunk: usize,
) -> Vec<ChunkHash> {
    let last = block_hashes.into_iter().skip(blocks_per_chunk - 1);
    let hash = |hash: &[u8]| match hash.try_into() {
        Ok(hash) => ChunkHash::new(hash),
        Err(_) => ChunkHash::new(*blake3::hash(hash).as_bytes()),
    };
    last.step_by(blocks_per_chunk).map(hash).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_is_named_by_its_last_block() {
        let blocks: Vec<[u8; 32]> = (0..7).map(|block| [block; 32]).collect();
        let named = |per_chunk| chunk_hashes(blocks.iter().map(|hash| &hash[..]), per_chunk);
        let hash = |block| ChunkHash::new([block; 32]);
        assert_eq!(named(1).len(), 7);
        assert_eq!(named(3), [hash(2), hash(5)]);
        assert_eq!(named(8), []);
        let short = chunk_hashes([&[1_u8; 16][..]], 1);
        assert_eq!(short, [ChunkHash::new(*blake3::hash(&[1; 16]).as_bytes())]);
    }
}
