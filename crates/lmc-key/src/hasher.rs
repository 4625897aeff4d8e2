//! Chained chunk hashes, byte for byte as LMCache 0.5.6 and vLLM compute them.

use sha2::{Digest, Sha256};
use xxhash_rust::xxh3::Xxh3Default;

use crate::{ChunkHash, HashAlgorithm, Token};

/// Most tokens of a chunk.
const MAX_CHUNK_SIZE: u32 = 65_536;

/// Default seed of the start value: vLLM's fixed default.
const DEFAULT_SEED: &str = "vllm-none-hash";

/// Number of tokens that are encoded on the stack at a time: a whole chunk of LMCache's default size.
const BLOCK: usize = 256;

/// Hashes chunks of `chunk_size` tokens, each together with the hash before it.
///
/// Cheap to copy: it holds the configuration, not a running state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkHasher {
    algorithm: HashAlgorithm,
    chunk_size: u32,
    start: ChunkHash,
}

impl ChunkHasher {
    /// Makes a hasher with the start value that LMCache 0.5.6 has when `PYTHONHASHSEED` is not set.
    ///
    /// For `xxhash_cbor` Python draws a new random start value in every process; this hasher has the fixed
    /// `vllm-none-hash`. If the hashes of two programs must agree, give both the same seed.
    ///
    /// # Errors
    /// If `chunk_size` is zero or larger than 65,536.
    pub fn new(algorithm: HashAlgorithm, chunk_size: u32) -> Result<Self, ChunkSizeError> {
        Self::with_seed(algorithm, chunk_size, DEFAULT_SEED)
    }

    /// Makes a hasher that agrees with Python processes whose `PYTHONHASHSEED` is `seed`. BLAKE3 ignores the
    /// seed, as in LMCache.
    ///
    /// # Errors
    /// If `chunk_size` is zero or larger than 65,536.
    pub fn with_seed(
        algorithm: HashAlgorithm,
        chunk_size: u32,
        seed: &str,
    ) -> Result<Self, ChunkSizeError> {
        if chunk_size == 0 || chunk_size > MAX_CHUNK_SIZE {
            return Err(ChunkSizeError(chunk_size));
        }
        let start = match algorithm {
            // An eight-byte zero for "no parent", then the single token 0.
            HashAlgorithm::Blake3 => ChunkHash::new(*blake3::hash(&[0; 12]).as_bytes()),
            HashAlgorithm::Sha256Cbor => digest_cbor_text::<Sha256>(seed),
            HashAlgorithm::Xxh3 => digest_cbor_text::<Xxh3Default>(seed),
        };
        Ok(Self {
            algorithm,
            chunk_size,
            start,
        })
    }

    /// Returns the algorithm.
    pub const fn algorithm(&self) -> HashAlgorithm {
        self.algorithm
    }

    /// Returns the number of tokens in a chunk.
    pub const fn chunk_size(&self) -> u32 {
        self.chunk_size
    }

    /// Returns [`chunk_size`](Self::chunk_size) as a `usize`.
    pub(crate) const fn chunk_len(&self) -> usize {
        self.chunk_size as usize
    }

    /// Returns the hash before the first chunk of every prompt.
    pub const fn start(&self) -> ChunkHash {
        self.start
    }

    /// Returns the hash of the chunk `tokens` after `parent`, for any number of tokens.
    pub(crate) fn hash_chunk(&self, parent: &ChunkHash, tokens: &[Token]) -> ChunkHash {
        match self.algorithm {
            HashAlgorithm::Blake3 => blake3_chunk(parent, tokens),
            HashAlgorithm::Sha256Cbor => {
                digest_cbor_chunk::<Sha256>(parent.digest(self.algorithm), tokens)
            }
            HashAlgorithm::Xxh3 => {
                digest_cbor_chunk::<Xxh3Default>(parent.digest(self.algorithm), tokens)
            }
        }
    }

    /// Returns the hashes of the whole chunks of a prompt. A partial chunk at the end is ignored.
    pub fn hash_prompt(&self, tokens: &[Token]) -> Vec<ChunkHash> {
        let mut parent = self.start;
        tokens
            .chunks_exact(self.chunk_len())
            .map(|chunk| {
                parent = self.hash_chunk(&parent, chunk);
                parent
            })
            .collect()
    }
}

/// A chunk size that is out of range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("chunk size {0} is out of range; expected 1 to {MAX_CHUNK_SIZE} tokens (256 is usual)")]
pub struct ChunkSizeError(pub u32);

fn blake3_chunk(parent: &ChunkHash, tokens: &[Token]) -> ChunkHash {
    let mut bytes = [0_u8; 32 + 4 * BLOCK];
    bytes[..32].copy_from_slice(parent.as_bytes());
    if tokens.len() <= BLOCK {
        // One call over one buffer: the state of the streaming hasher alone costs as much again.
        put_big_endian(&mut bytes[32..], tokens);
        return ChunkHash::new(*blake3::hash(&bytes[..32 + 4 * tokens.len()]).as_bytes());
    }
    let mut hasher = blake3::Hasher::new();
    hasher.update(parent.as_bytes());
    for block in tokens.chunks(BLOCK) {
        put_big_endian(&mut bytes, block);
        hasher.update(&bytes[..4 * block.len()]);
    }
    ChunkHash::new(*hasher.finalize().as_bytes())
}

fn put_big_endian(out: &mut [u8], tokens: &[Token]) {
    for (bytes, token) in out.chunks_exact_mut(4).zip(tokens) {
        bytes.copy_from_slice(&token.to_be_bytes());
    }
}

/// A digest that is computed over CBOR.
trait CborDigest: Default {
    fn write(&mut self, bytes: &[u8]);
    fn end(self) -> ChunkHash;
}

impl CborDigest for Sha256 {
    fn write(&mut self, bytes: &[u8]) {
        self.update(bytes);
    }

    fn end(self) -> ChunkHash {
        ChunkHash::new(self.finalize().into())
    }
}

impl CborDigest for Xxh3Default {
    fn write(&mut self, bytes: &[u8]) {
        self.update(bytes);
    }

    fn end(self) -> ChunkHash {
        // The canonical form of an XXH3-128 digest is big-endian.
        ChunkHash::from_digest(HashAlgorithm::Xxh3, &self.digest128().to_be_bytes())
            .expect("a u128 has 16 bytes")
    }
}

const CBOR_BYTES: u8 = 2 << 5;
const CBOR_TEXT: u8 = 3 << 5;
const CBOR_ARRAY: u8 = 4 << 5;
const CBOR_NULL: u8 = 0xf6;

/// Writes the head of a CBOR item in its shortest form and returns its length.
fn cbor_head(out: &mut [u8], major: u8, value: u32) -> usize {
    let be = value.to_be_bytes();
    match value {
        0..24 => {
            out[0] = major | be[3];
            1
        }
        24..0x100 => {
            out[..2].copy_from_slice(&[major | 24, be[3]]);
            2
        }
        0x100..0x1_0000 => {
            out[..3].copy_from_slice(&[major | 25, be[2], be[3]]);
            3
        }
        _ => {
            out[0] = major | 26;
            out[1..5].copy_from_slice(&be);
            5
        }
    }
}

/// Writes a token as a CBOR integer to the front of `out`, which has at least five bytes, and returns the
/// integer's length. Uses no branch: the widths of a prompt's tokens cannot be predicted, and mispredicted
/// branches cost more than hashing the tokens.
#[inline]
fn cbor_token(out: &mut [u8], token: Token) -> usize {
    const HEAD: [u8; 4] = [0, 24, 25, 26];
    const SHIFT: [u8; 4] = [24, 24, 16, 0];
    const LEN: [u8; 4] = [1, 2, 3, 5];
    let width =
        usize::from(token >= 24) + usize::from(token >= 0x100) + usize::from(token >= 0x1_0000);
    // A token below 24 is its own head; the byte written after it is overwritten by the next token.
    let small = if width == 0 { token as u8 } else { 0 };
    out[0] = HEAD[width] | small;
    out[1..5].copy_from_slice(&(token << SHIFT[width]).to_be_bytes());
    LEN[width].into()
}

/// Returns the digest of `[parent, [tokens…], null]`: LMCache calls `f((prefix, tuple(tokens), None))`.
fn digest_cbor_chunk<D: CborDigest>(parent: &[u8], tokens: &[Token]) -> ChunkHash {
    // Two heads, a parent of at most 32 bytes and a block of tokens of at most 5 bytes each.
    let mut buffer = [0_u8; 1 + 2 + 32 + 5 + 5 * BLOCK];
    let count = u32::try_from(tokens.len()).expect("a chunk has fewer than 2^32 tokens");
    buffer[0] = CBOR_ARRAY | 3;
    let mut len = 1;
    len += cbor_head(&mut buffer[len..], CBOR_BYTES, parent.len() as u32);
    buffer[len..len + parent.len()].copy_from_slice(parent);
    len += parent.len();
    len += cbor_head(&mut buffer[len..], CBOR_ARRAY, count);

    let mut digest = D::default();
    for block in tokens.chunks(BLOCK) {
        for &token in block {
            len += cbor_token(&mut buffer[len..len + 5], token);
        }
        digest.write(&buffer[..len]);
        len = 0;
    }
    buffer[len] = CBOR_NULL;
    digest.write(&buffer[..=len]);
    digest.end()
}

/// Returns the digest of one CBOR text string: vLLM's start value is `f(seed)`.
fn digest_cbor_text<D: CborDigest>(text: &str) -> ChunkHash {
    let mut head = [0; 5];
    let bytes = u32::try_from(text.len()).expect("a seed is shorter than 4 GiB");
    let len = cbor_head(&mut head, CBOR_TEXT, bytes);
    let mut digest = D::default();
    digest.write(&head[..len]);
    digest.write(text.as_bytes());
    digest.end()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunk_sizes_are_bounded() {
        for bad in [0, MAX_CHUNK_SIZE + 1, u32::MAX] {
            assert_eq!(
                ChunkHasher::new(HashAlgorithm::Blake3, bad),
                Err(ChunkSizeError(bad))
            );
        }
        assert!(ChunkHasher::new(HashAlgorithm::Blake3, MAX_CHUNK_SIZE).is_ok());
    }

    #[test]
    fn cbor_heads_are_the_shortest() {
        for (value, expected) in [
            (0, &[0x00][..]),
            (23, &[0x17]),
            (24, &[0x18, 24]),
            (255, &[0x18, 255]),
            (256, &[0x19, 1, 0]),
            (65_535, &[0x19, 255, 255]),
            (65_536, &[0x1a, 0, 1, 0, 0]),
            (u32::MAX, &[0x1a, 255, 255, 255, 255]),
        ] {
            let mut out = [0; 5];
            let len = cbor_head(&mut out, 0, value);
            assert_eq!(&out[..len], expected, "{value}");
            let len = cbor_token(&mut out, value);
            assert_eq!(&out[..len], expected, "{value}");
        }
    }

    #[test]
    fn long_chunks_hash_as_short_ones_do() {
        // A chunk that needs several blocks against the plain definition.
        let hasher = ChunkHasher::new(HashAlgorithm::Blake3, 1024).unwrap();
        let tokens: Vec<Token> = (0..1000).map(|i| i * 77_777).collect();
        let mut bytes = hasher.start().as_bytes().to_vec();
        bytes.extend(tokens.iter().flat_map(|token| token.to_be_bytes()));
        assert_eq!(
            hasher.hash_chunk(&hasher.start(), &tokens).as_bytes(),
            blake3::hash(&bytes).as_bytes()
        );
    }

    #[test]
    fn a_partial_chunk_has_no_hash() {
        let hasher = ChunkHasher::new(HashAlgorithm::Blake3, 4).unwrap();
        assert_eq!(hasher.hash_prompt(&[1, 2, 3]), []);
        assert_eq!(
            hasher.hash_prompt(&[1, 2, 3, 4, 5]),
            hasher.hash_prompt(&[1, 2, 3, 4])
        );
    }
}
