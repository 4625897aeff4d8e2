//! Tokens → prefix hashes → chunk keys: the identity of cached KV bytes.
//!
//! A prompt is divided into chunks of `chunk_size` tokens. A [`ChunkHash`] names a chunk *and everything
//! before it*. A [`ChunkKey`] adds everything else that decides the meaning of the bytes: KV rank, object
//! group, and a [`SpaceId`], the digest of model, layout, world size, tenant salt and the operator's text.
//! Hashes equal those of LMCache 0.5.6 and vLLM byte for byte, so KV events of all three agree.
//!
//! This crate holds no cached bytes, does no I/O and knows no wire protocol. Start with [`ChunkHasher`],
//! [`HashMemo`] (one per process) and [`KeySpace`].
//!
//! ```
//! use lmc_key::{ChunkHasher, ChunkKey, HashAlgorithm, HashMemo, KeySpace, LayoutFingerprint};
//!
//! let hasher = ChunkHasher::new(HashAlgorithm::Blake3, 256)?;
//! let space = KeySpace {
//!     algorithm: hasher.algorithm(),
//!     chunk_size: hasher.chunk_size(),
//!     model: "meta-llama/Llama-3.1-8B".parse()?,
//!     world_size: 1,
//!     layout: LayoutFingerprint::of(b"[2, 32, 256, 1024] bfloat16"),
//!     dtype: "bfloat16".parse()?,
//!     salt: "tenant-a".parse()?,
//!     identity: "weights of 2026-11".parse()?,
//!     tags: None,
//! };
//!
//! let prompt: Vec<u32> = (0..600).collect();
//! let memo = HashMemo::default();
//! // Two whole chunks; the partial third has no hash.
//! let keys: Vec<ChunkKey> = memo
//!     .hash_prompt(&hasher, &space.salt, &prompt)
//!     .into_iter()
//!     .map(|hash| ChunkKey { space: space.id(), kv_rank: 0, group: 0, hash })
//!     .collect();
//! assert_eq!(keys.len(), 2);
//! assert_eq!(
//!     keys[0].hash.to_string(),
//!     "084547b6c40ed5b05ba8cd0305db5bf74d5617673948d9ed193ab7d6cbc484d4",
//! );
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod algorithm;
pub use algorithm::{HashAlgorithm, UnknownAlgorithm};

mod bytes;

mod hash;
pub use hash::{ChunkHash, HashParseError, Token};

mod hasher;
pub use hasher::{ChunkHasher, ChunkSizeError};

mod key;
pub use key::{ChunkKey, FoldHasher, FoldState};

mod memo;
pub use memo::{HashMemo, MemoStats};

mod names;
pub use names::{DtypeName, IdentityText, ModelName, NameError, Salt};

mod printable;
pub use printable::Printable;

mod space;
pub use space::{ClearsId, KeySpace, LayoutFingerprint, SpaceId, TagsId};

/// The README's examples, compiled and run with the doctests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
