//! An engine for tests: real shared-memory segments full of bytes that tell where they are,
//! and a reference that finds every element by its indices alone.

use std::fs;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::kv_group::{KvGroup, KvOrder, KvTensor};
use super::paged::{KvSegments, PagedError, PagedKv};
use crate::{DType, KvMemory, MappedSegment, SharedName};

/// A segment as an engine makes it, removed on drop.
pub(crate) struct Segment {
    name: SharedName,
    pub(crate) mapped: Arc<MappedSegment>,
}

impl Segment {
    pub(crate) fn new(bytes: &[u8]) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = SharedName::new(&format!("lmc_test_kv_{}_{count}", std::process::id())).unwrap();
        fs::write(name.path(), bytes).unwrap();
        let mapped = Arc::new(MappedSegment::open(&name, bytes.len() as u64).unwrap());
        Self { name, mapped }
    }

    pub(crate) fn name(&self) -> &SharedName {
        &self.name
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let len = self.mapped.len() as usize;
        // SAFETY: the mapping has that many bytes, and no copy runs while a test looks.
        unsafe { slice::from_raw_parts(self.mapped.base_ptr().as_ptr(), len) }.to_vec()
    }

    pub(crate) fn fill(&self, bytes: &[u8]) {
        assert_eq!(bytes.len() as u64, self.mapped.len());
        fs::write(self.name.path(), bytes).unwrap();
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        let _ = fs::remove_file(self.name.path());
    }
}

/// A byte that depends on where it is.
pub(crate) fn mark(seed: u64, at: usize) -> u8 {
    let mixed = (seed ^ at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 56) as u8
}

pub(crate) fn marked(seed: u64, len: usize) -> Vec<u8> {
    (0..len).map(|at| mark(seed, at)).collect()
}

/// Meaning of one axis of a KV tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Axis {
    Plane,
    Block,
    Token,
    Head,
    Element,
}

/// The axes of an engine's KV tensors, outermost first.
pub(crate) type Format = &'static [Axis];

/// Every shape that vLLM's tensors have.
pub(crate) const FORMATS: [Format; 7] = {
    use Axis::{Block, Element, Head, Plane, Token};
    [
        &[Plane, Block, Token, Head, Element],
        &[Plane, Block, Head, Token, Element],
        &[Block, Plane, Token, Head, Element],
        &[Block, Plane, Head, Token, Element],
        &[Block, Token, Head, Element],
        &[Block, Head, Token, Element],
        &[Block, Token, Element],
    ]
};

/// `[2, blocks, tokens, heads, size]`: K and V apart.
pub(crate) const SPLIT: Format = FORMATS[0];
/// `[blocks, tokens, size]`: MLA.
pub(crate) const LATENT: Format = FORMATS[6];

/// Returns the position of an axis.
pub(crate) fn position(format: Format, axis: Axis) -> Option<usize> {
    format.iter().position(|&a| a == axis)
}

/// Returns vLLM's name for the order of tokens and heads.
pub(crate) fn order(format: Format) -> KvOrder {
    match position(format, Axis::Head) < position(format, Axis::Token) {
        true => KvOrder::HeadsFirst,
        false => KvOrder::TokensFirst,
    }
}

/// Sizes of a cache.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub(crate) layers: u64,
    pub(crate) blocks: u64,
    pub(crate) block_tokens: u64,
    pub(crate) heads: u64,
    pub(crate) element: u64,
    /// Unused elements between blocks, and between K and V.
    pub(crate) padding: u64,
    pub(crate) one_segment: bool,
}

/// A KV tensor, as a test changes it.
#[derive(Clone, Debug)]
pub(crate) struct Tensor {
    pub(crate) segment: usize,
    pub(crate) storage_offset: u64,
    pub(crate) shape: Vec<u64>,
    pub(crate) strides: Vec<u64>,
}

/// An engine's cache of one format.
pub(crate) struct Engine {
    pub(crate) format: Format,
    pub(crate) dtype: DType,
    pub(crate) tensors: Vec<Tensor>,
    pub(crate) segments: Vec<Segment>,
    pub(crate) sizes: Sizes,
}

impl Engine {
    /// Lays out one tensor a layer, densely within a block, and fills them.
    pub(crate) fn new(format: Format, dtype: DType, sizes: Sizes) -> Self {
        let size = |axis: Axis| match axis {
            Axis::Plane => 2,
            Axis::Block => sizes.blocks,
            Axis::Token => sizes.block_tokens,
            Axis::Head => sizes.heads,
            Axis::Element => sizes.element,
        };
        let shape: Vec<u64> = format.iter().map(|&axis| size(axis)).collect();
        let block_axis = position(format, Axis::Block).unwrap();
        let mut strides = vec![0; shape.len()];
        let mut elements = 1;
        for i in (0..shape.len()).rev() {
            elements += if i <= block_axis { sizes.padding } else { 0 };
            // An axis of one entry may have any stride.
            let unused = i > block_axis && shape[i] == 1;
            strides[i] = if unused { 7 } else { elements };
            elements *= shape[i];
        }
        let item = dtype.size();
        let tensor = |layer: u64| Tensor {
            segment: if sizes.one_segment { 0 } else { layer as usize },
            storage_offset: if sizes.one_segment {
                layer * elements + 3
            } else {
                0
            },
            shape: shape.clone(),
            strides: strides.clone(),
        };
        let lens = if sizes.one_segment {
            vec![(sizes.layers * elements + 3) as usize * item]
        } else {
            vec![elements as usize * item; sizes.layers as usize]
        };
        let segments = lens
            .into_iter()
            .enumerate()
            .map(|(seed, len)| Segment::new(&marked(seed as u64, len)))
            .collect();
        Self {
            format,
            dtype,
            tensors: (0..sizes.layers).map(tensor).collect(),
            segments,
            sizes,
        }
    }

    pub(crate) fn mapped(&self) -> Vec<Arc<dyn KvMemory>> {
        let mapped = |segment: &Segment| Arc::clone(&segment.mapped) as _;
        self.segments.iter().map(mapped).collect()
    }

    /// Describes the cache for chunks of `chunk_tokens` tokens.
    pub(crate) fn describe(&self, chunk_tokens: u64) -> Result<KvGroup, PagedError> {
        let tensors: Vec<_> = self
            .tensors
            .iter()
            .map(|tensor| KvTensor {
                dtype: self.dtype,
                shape: &tensor.shape,
                strides: &tensor.strides,
                storage_offset: tensor.storage_offset,
            })
            .collect();
        KvGroup::describe(&tensors, order(self.format), None, chunk_tokens as u32)
    }

    /// Describes and opens the cache for chunks of `chunk_blocks` blocks.
    pub(crate) fn try_paged(&self, chunk_blocks: u64) -> Result<PagedKv, PagedError> {
        let segments: Vec<_> = self.tensors.iter().map(|tensor| tensor.segment).collect();
        let group = self.describe(chunk_blocks * self.sizes.block_tokens)?;
        group.open(&segments, KvSegments::Host(self.mapped()))
    }

    pub(crate) fn paged(&self, chunk_blocks: u64) -> PagedKv {
        self.try_paged(chunk_blocks).unwrap()
    }

    /// Visits every element of a chunk, from the tensors' shape and strides alone:
    /// `(byte in the chunk, index in the table, segment, byte)`.
    pub(crate) fn each_element(
        &self,
        table: &[u32],
        first: u64,
        blocks: u64,
        mut visit: impl FnMut(usize, u64, usize, usize),
    ) {
        let block_axis = position(self.format, Axis::Block).unwrap();
        let item = self.dtype.size();
        let mut at = 0;
        for plane in 0..if block_axis == 1 { 2 } else { 1 } {
            for tensor in &self.tensors {
                for index in first..first + blocks {
                    let block = u64::from(table[index as usize]);
                    let mut start = tensor.storage_offset + block * tensor.strides[block_axis];
                    if block_axis == 1 {
                        start += plane * tensor.strides[0];
                    }
                    let inner = &tensor.shape[block_axis + 1..];
                    for element in 0..inner.iter().product() {
                        let (mut rest, mut offset) = (element, start);
                        let strides = &tensor.strides[block_axis + 1..];
                        for (&size, &stride) in inner.iter().zip(strides).rev() {
                            offset += rest % size * stride;
                            rest /= size;
                        }
                        visit(at, index, tensor.segment, offset as usize * item);
                        at += item;
                    }
                }
            }
        }
    }
}
