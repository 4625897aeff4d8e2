//! A prompt as an engine names it: by its tokens, or by hashes of its blocks.
//!
//! The *tail* of a prompt is its whole blocks after the last whole chunk. Each is stored as a chunk of
//! one block.

use std::ops::Range;
use std::sync::Arc;

use lmc_key::ChunkHash;

use crate::protocol::{CacheKey, TAIL_LOOKUP};

/// The tokens of a prompt, or the hashes of its leading chunks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Prompt {
    /// Token ids, which the server hashes.
    Tokens(Arc<[u32]>),
    /// Hashes of chunks that the engine made, as [`chunk_hashes`] returns them.
    Chunks(Arc<[ChunkHash]>),
    /// Hashes of all whole blocks, which name whole chunks and the tail.
    Blocks(Arc<[ChunkHash]>),
    /// Hashes of a tail's blocks. The first block starts where a chunk would start.
    Tail(Arc<[ChunkHash]>),
}

impl Prompt {
    /// Returns the number of whole chunks, for an engine with blocks of this size.
    pub fn chunks(&self, chunk_size: u32, block_size: u32) -> usize {
        let chunk_size = chunk_size.max(1) as usize;
        match self {
            Self::Tokens(tokens) => tokens.len() / chunk_size,
            Self::Chunks(hashes) => hashes.len(),
            Self::Blocks(hashes) => hashes.len() * block_size as usize / chunk_size,
            Self::Tail(_) => 0,
        }
    }

    /// Returns true for a tail, whose hashes name single blocks.
    pub(crate) fn is_tail(&self) -> bool {
        matches!(self, Self::Tail(_))
    }

    /// Names a range of the prompt's tokens in a key.
    pub(crate) fn name(
        &self,
        key: &mut CacheKey,
        tokens: Range<usize>,
        chunk_size: u32,
        block_size: u32,
    ) {
        (key.start, key.end) = (tokens.start as u64, tokens.end as u64);
        let (chunk_size, unit) = (chunk_size.max(1) as usize, block_size.max(1) as usize);
        let chunks = tokens.end / chunk_size;
        let first = |hashes: &[ChunkHash], count: usize| hashes[..count.min(hashes.len())].to_vec();
        match self {
            Self::Tokens(ids) => key.token_ids = ids[..tokens.end.min(ids.len())].to_vec(),
            Self::Chunks(hashes) => key.chunk_hashes = first(hashes, chunks),
            Self::Blocks(hashes) => {
                let per_chunk = (chunk_size / unit).max(1);
                let last = hashes.iter().skip(per_chunk - 1).step_by(per_chunk);
                key.chunk_hashes = last.take(chunks).copied().collect();
            }
            Self::Tail(hashes) => {
                (key.start, key.end) = (0, tokens.len() as u64);
                key.chunk_hashes = first(hashes, tokens.len() / unit);
                key.unit = Some(block_size);
            }
        }
    }
}

/// Returns the id under which a tail after whole chunks is looked up and retrieved: the server
/// keeps one lookup for each id. No user can give this id to a request.
pub(crate) fn tail_request_id(request_id: &str) -> String {
    format!("{request_id}{TAIL_LOOKUP}")
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
