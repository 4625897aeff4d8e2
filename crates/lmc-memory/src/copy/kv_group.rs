//! vLLM's layouts of a paged KV cache: the known shapes, and the content of their chunks.

use super::paged::{KvSegments, PagedError, PagedKv, PlaneBase};
use crate::{DType, GroupLayout, Planes};

/// Order of tokens and heads within a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvOrder {
    /// Tokens, then heads (vLLM's `NHD` and `BLNHC`).
    TokensFirst,
    /// Heads, then tokens (vLLM's `HND` and `BLHNC`; vLLM's CPU attention uses it).
    HeadsFirst,
}

/// One KV tensor of an engine, in its segment.
#[derive(Clone, Copy, Debug)]
pub struct KvTensor<'a> {
    /// Type of the elements.
    pub dtype: DType,
    /// Elements along each axis, outermost axis first.
    pub shape: &'a [u64],
    /// Elements from one index to the next along each axis.
    pub strides: &'a [u64],
    /// Elements from the start of the segment to the first one of the tensor.
    pub storage_offset: u64,
}

/// The layout of one KV group, derived from its tensors.
///
/// A block of each layer (and of K and V each, if they are separate) must be contiguous, and is copied whole:
/// a chunk holds an engine's blocks with their bytes in the engine's order. The known shapes, outermost axis
/// first, are `[2, blocks, …]`, `[blocks, 2, …]` and `[blocks, …]` with `tokens, heads, size` or `heads,
/// tokens, size` within a block, and `[blocks, tokens, size]` (MLA).
#[derive(Clone, Debug)]
pub struct KvGroup {
    /// Layout of a chunk whose rows are blocks.
    layout: GroupLayout,
    order: ChunkOrder,
    is_latent: bool,
    tokens_per_block: u64,
    blocks: u64,
    /// Elements from one block to the next.
    block_stride: u64,
    /// Elements from K to V.
    plane_stride: u64,
    /// First element of each layer in its segment.
    starts: Vec<u64>,
}

/// The order of the elements in a chunk of a KV group.
///
/// Two groups can read each other's chunks exactly if their orders are equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ChunkOrder {
    /// `[planes, layers, tokens, hidden]`, the order in which engine-driven workers write chunks.
    Tokens(GroupLayout),
    /// Blocks in the engine's own order.
    Blocks {
        /// Layout of a chunk whose rows are blocks.
        blocks: GroupLayout,
        /// Heads of a token; 1 if tokens have a latent vector.
        heads: u64,
        /// Tokens of a block, according to the tensor's shape.
        block_tokens: u64,
        /// 2 if K and V both lie within a block on an axis of their own, else 1.
        inner_planes: u64,
        /// Order of tokens and heads within a block.
        order: KvOrder,
    },
}

fn unsupported<T>(why: String) -> Result<T, PagedError> {
    Err(PagedError::Unsupported { why })
}

fn overflow() -> PagedError {
    PagedError::Unsupported {
        why: "KV tensor sizes overflow".to_owned(),
    }
}

fn narrow(value: u64) -> Result<u32, PagedError> {
    u32::try_from(value).map_err(|_| overflow())
}

impl KvGroup {
    /// Derives the layout from the tensors of a group's layers.
    ///
    /// Sizes do not distinguish tokens from heads, so `order` decides. `tokens_per_block` is the number of
    /// tokens that a block id covers according to the engine, if the engine states it. It may be a multiple
    /// of the tokens of a block (compressed caches).
    ///
    /// # Errors
    /// [`PagedError::Unsupported`] if the tensors differ, have an unknown shape or are not contiguous within
    /// a block, or if the blocks do not divide `chunk_tokens`. [`PagedError::Layout`] if a chunk is beyond
    /// the limits of [`GroupLayout`].
    pub fn describe(
        tensors: &[KvTensor<'_>],
        order: KvOrder,
        tokens_per_block: Option<u32>,
        chunk_tokens: u32,
    ) -> Result<Self, PagedError> {
        let Some(first) = tensors.first() else {
            return unsupported("a KV group has no layers".to_owned());
        };
        let (shape, strides) = (first.shape, first.strides);
        let is_alike =
            |t: &KvTensor<'_>| (t.shape, t.strides, t.dtype) == (shape, strides, first.dtype);
        if !tensors.iter().all(is_alike) {
            let why = "the layers of a KV group differ in shape, stride or dtype";
            return unsupported(why.to_owned());
        }
        // Rank 5 has a K/V axis, rank 4 packs K and V within a head, rank 3 is MLA.
        let (planes, block_axis, inner_planes) = match *shape {
            [2, _, _, _, _] => (Planes::KeyValue, 1, 1),
            [_, 2, _, _, _] => (Planes::Fused, 0, 2),
            [_, _, _, _] | [_, _, _] => (Planes::Fused, 0, 1),
            _ => {
                let shape = &shape[..shape.len().min(8)];
                return unsupported(format!(
                    "KV tensors of shape {shape:?} are not a layout of vLLM that this server knows"
                ));
            }
        };
        let (heads, block_tokens, head_size) = match (shape, order) {
            (&[_, tokens, size], _) => (1, tokens, size),
            (&[.., heads, tokens, size], KvOrder::HeadsFirst)
            | (&[.., tokens, heads, size], KvOrder::TokensFirst) => (heads, tokens, size),
            _ => unreachable!("the shape was matched above"),
        };
        let block_elements = contiguous(shape, strides, block_axis + 1)?;
        let tokens_per_block = tokens_per_block.map_or(block_tokens, u64::from);
        if tokens_per_block == 0 || u64::from(chunk_tokens) % tokens_per_block != 0 {
            return unsupported(format!(
                "blocks of {tokens_per_block} tokens do not divide the chunk size {chunk_tokens}: \
                 start the server with a --chunk-size that is a multiple of the engine's block size"
            ));
        }
        let layers = narrow(tensors.len() as u64)?;
        let blocks_per_chunk = narrow(u64::from(chunk_tokens) / tokens_per_block)?;
        let dtype = first.dtype;
        let hidden = narrow(block_elements)?;
        let layout = GroupLayout::new(planes, layers, blocks_per_chunk, hidden, dtype)?;
        // Tokens without gaps between them: the same bytes as in token order. The bytes of a page have no
        // known meaning: fp8 pages of DSA end with their scales. Nor do the bytes of a head: vLLM's CPU
        // attention stores the keys of all of a block's tokens before the values there.
        let is_in_token_order = dtype != DType::UInt8
            && inner_planes == 1
            && block_tokens == tokens_per_block
            && (order == KvOrder::TokensFirst || shape.len() == 3);
        let order = if is_in_token_order {
            let hidden = narrow(heads.saturating_mul(head_size))?;
            let layout = GroupLayout::new(planes, layers, chunk_tokens, hidden, dtype)?;
            ChunkOrder::Tokens(layout)
        } else {
            ChunkOrder::Blocks {
                blocks: layout,
                heads,
                block_tokens,
                inner_planes,
                order,
            }
        };
        Ok(Self {
            layout,
            order,
            is_latent: shape.len() == 3,
            tokens_per_block,
            blocks: shape[block_axis],
            block_stride: strides[block_axis],
            plane_stride: strides[0],
            starts: tensors.iter().map(|tensor| tensor.storage_offset).collect(),
        })
    }

    /// Returns the cache in these segments. `tensor_segments` has the index of each layer's segment, in the
    /// order of the tensors.
    ///
    /// # Errors
    /// [`PagedError`] if a block is outside its segment.
    ///
    /// # Panics
    /// If the length of `tensor_segments` is not the number of described tensors.
    pub fn open(
        &self,
        tensor_segments: &[usize],
        segments: KvSegments,
    ) -> Result<PagedKv, PagedError> {
        assert_eq!(tensor_segments.len(), self.starts.len(), "one a layer");
        let size = self.layout.dtype().size() as u64;
        let bytes = |elements: u64| elements.checked_mul(size).ok_or_else(overflow);
        let mut planes = Vec::with_capacity(2 * self.starts.len());
        for plane in 0..u64::from(self.layout.planes().count()) {
            for (&start, &segment) in self.starts.iter().zip(tensor_segments) {
                let first = plane
                    .checked_mul(self.plane_stride)
                    .and_then(|inside| inside.checked_add(start))
                    .ok_or_else(overflow)?;
                planes.push(PlaneBase {
                    segment,
                    offset: bytes(first)?,
                });
            }
        }
        let stride = bytes(self.block_stride)?;
        let blocks = narrow(self.blocks)?;
        PagedKv::new(self.layout, blocks, stride, planes, segments)
    }

    /// Returns the bytes of one chunk of this group.
    pub fn chunk_bytes(&self) -> u64 {
        self.layout.chunk_bytes()
    }

    /// Returns the order of the elements in a chunk, which is a part of the chunk's identity.
    pub fn order(&self) -> ChunkOrder {
        self.order
    }

    /// Returns the type of the elements.
    pub fn dtype(&self) -> DType {
        self.layout.dtype()
    }

    /// Returns true if tokens have one latent vector instead of heads: rank 3, vLLM's layout for MLA.
    pub fn is_latent(&self) -> bool {
        self.is_latent
    }

    /// Returns the number of tokens that one block id covers.
    pub fn tokens_per_block(&self) -> u64 {
        self.tokens_per_block
    }

    /// Returns the number of blocks in one chunk.
    pub fn blocks_per_chunk(&self) -> u64 {
        u64::from(self.layout.rows())
    }
}

/// Returns the number of elements along the axes from `first` on, which must be contiguous.
fn contiguous(shape: &[u64], strides: &[u64], first: usize) -> Result<u64, PagedError> {
    let mut elements = 1u64;
    for axis in (first..shape.len()).rev() {
        if strides.len() != shape.len() || (strides[axis] != elements && shape[axis] > 1) {
            return unsupported(format!(
                "a block of the KV tensors is not contiguous: shape {shape:?}, stride {strides:?}"
            ));
        }
        elements = elements.saturating_mul(shape[axis]);
    }
    Ok(elements)
}

#[cfg(test)]
mod tests;
