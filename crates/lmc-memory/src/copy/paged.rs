//! Where an engine keeps its KV cache.

use std::sync::Arc;

use thiserror::Error;

use crate::{DType, GroupLayout, LayoutError, MappedSegment};

/// What one axis of an engine's KV tensor counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Axis {
    /// Layers, in tensors that hold all of them.
    Layer,
    /// K and V.
    Plane,
    /// Paged blocks.
    Block,
    /// Tokens of a block.
    Token,
    /// KV heads.
    Head,
    /// Elements of a head (or of a token, where there is no head axis).
    Element,
    /// An axis of one element that carries nothing.
    One,
}

/// Whether tokens or heads come first within a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvOrder {
    /// Tokens, then heads (vLLM's `NHD`, and `BLNHC`).
    TokensFirst,
    /// Heads, then tokens (vLLM's `HND`, and `BLHNC`; what vLLM's CPU attention uses).
    HeadsFirst,
}

/// The axes of an engine's KV tensors, outermost first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvFormat(&'static [Axis]);

impl KvFormat {
    /// `[2, blocks, tokens, heads, size]`.
    pub const TWO_NB_BS_NH_HS: Self = Self(&[
        Axis::Plane,
        Axis::Block,
        Axis::Token,
        Axis::Head,
        Axis::Element,
    ]);
    /// `[2, blocks, heads, tokens, size]`.
    pub const TWO_NB_NH_BS_HS: Self = Self(&[
        Axis::Plane,
        Axis::Block,
        Axis::Head,
        Axis::Token,
        Axis::Element,
    ]);
    /// `[blocks, 2, tokens, heads, size]`.
    pub const NB_TWO_BS_NH_HS: Self = Self(&[
        Axis::Block,
        Axis::Plane,
        Axis::Token,
        Axis::Head,
        Axis::Element,
    ]);
    /// `[blocks, 2, heads, tokens, size]`.
    pub const NB_TWO_NH_BS_HS: Self = Self(&[
        Axis::Block,
        Axis::Plane,
        Axis::Head,
        Axis::Token,
        Axis::Element,
    ]);
    /// `[blocks, tokens, heads, 2 * size]`: K and V packed within a head.
    pub const NB_BS_NH_CS: Self = Self(&[Axis::Block, Axis::Token, Axis::Head, Axis::Element]);
    /// `[blocks, heads, tokens, 2 * size]`: K and V packed within a head.
    pub const NB_NH_BS_CS: Self = Self(&[Axis::Block, Axis::Head, Axis::Token, Axis::Element]);
    /// `[blocks, tokens, size]`: MLA.
    pub const NB_BS_HS: Self = Self(&[Axis::Block, Axis::Token, Axis::Element]);
    /// `[blocks, layers, 2, tokens, heads, size]`: one tensor for all layers.
    pub const NB_NL_TWO_BS_NH_HS: Self = Self(&[
        Axis::Block,
        Axis::Layer,
        Axis::Plane,
        Axis::Token,
        Axis::Head,
        Axis::Element,
    ]);
    /// `[blocks, layers, 2, heads, tokens, size]`: one tensor for all layers.
    pub const NB_NL_TWO_NH_BS_HS: Self = Self(&[
        Axis::Block,
        Axis::Layer,
        Axis::Plane,
        Axis::Head,
        Axis::Token,
        Axis::Element,
    ]);

    /// The axes, outermost first.
    pub fn axes(&self) -> &'static [Axis] {
        self.0
    }

    /// Tells the format of vLLM's per-layer tensors from one tensor's shape and strides (in
    /// elements), by the rules that LMCache 0.5.6 uses; the order is the engine's hint.
    ///
    /// # Errors
    /// [`PagedError::Format`] when no rule fits.
    pub fn detect_vllm(shape: &[u64], strides: &[u64], order: KvOrder) -> Result<Self, PagedError> {
        let _ = (shape, strides, order);
        unimplemented!()
    }
}

/// One tensor of an engine, as it lies in a segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorView {
    /// Which of the segments.
    pub segment: usize,
    /// First element, counted in elements from the start of the segment.
    pub storage_offset: u64,
    /// Elements along each axis.
    pub shape: Vec<u64>,
    /// Elements from one index to the next along each axis.
    pub strides: Vec<u64>,
}

/// Where the first byte of one plane of one layer lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlaneBase {
    /// Which of the segments.
    pub segment: usize,
    /// Bytes from its start.
    pub offset: u64,
}

/// How blocks, tokens and heads lie within one plane of one layer; all strides in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PagedGeometry {
    /// Number of blocks.
    pub blocks: u32,
    /// Tokens of a block.
    pub block_tokens: u32,
    /// From one block to the next.
    pub block_stride: u64,
    /// From one token of a block to the next.
    pub token_stride: u64,
    /// Heads of a token; 1 where a token is one run.
    pub heads: u32,
    /// From one head of a token to the next.
    pub head_stride: u64,
    /// Bytes of one head, which are contiguous.
    pub head_bytes: u64,
}

/// A description of paged memory that cannot be, or does not fit its segments.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PagedError {
    /// No format fits the tensors.
    #[error("no KV format fits: {why}")]
    Format {
        /// What was found.
        why: String,
    },
    /// A chunk of that shape cannot be.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// A part lies outside its segment.
    #[error("plane {plane} needs bytes up to {end} of segment {segment}, which has {len}")]
    Outside {
        /// Index of the plane, in chunk order.
        plane: usize,
        /// Index of the segment.
        segment: usize,
        /// First byte beyond the plane.
        end: u128,
        /// Bytes of the segment.
        len: u64,
    },
}

/// An engine's paged KV cache of one group, checked against the segments it lies in.
#[derive(Clone, Debug)]
pub struct PagedKv {
    layout: GroupLayout,
    geometry: PagedGeometry,
    planes: Vec<PlaneBase>,
    segments: Vec<Arc<MappedSegment>>,
}

impl PagedKv {
    /// Checks that every byte of every block lies inside its segment.
    ///
    /// `planes` is in chunk order: all layers of K, then all layers of V (or just the layers
    /// for [`crate::Planes::Fused`]). `layout` gives planes, layers, hidden and type.
    ///
    /// # Errors
    /// [`PagedError`].
    pub fn new(
        layout: GroupLayout,
        geometry: PagedGeometry,
        planes: Vec<PlaneBase>,
        segments: Vec<Arc<MappedSegment>>,
    ) -> Result<Self, PagedError> {
        Ok(Self {
            layout,
            geometry,
            planes,
            segments,
        })
    }

    /// Reads the description off an engine's tensors: one for each layer, or one for all when
    /// the format has a layer axis. The layout comes out with `chunk_tokens` tokens.
    ///
    /// # Errors
    /// [`PagedError`].
    pub fn from_tensors(
        format: KvFormat,
        tensors: &[TensorView],
        dtype: DType,
        chunk_tokens: u32,
        segments: Vec<Arc<MappedSegment>>,
    ) -> Result<Self, PagedError> {
        let _ = (format, tensors, dtype, chunk_tokens, segments);
        unimplemented!()
    }

    /// The layout of a full chunk of this cache.
    pub fn layout(&self) -> &GroupLayout {
        &self.layout
    }

    /// Blocks, tokens and strides.
    pub fn geometry(&self) -> &PagedGeometry {
        &self.geometry
    }

    /// The bases, in chunk order.
    pub fn planes(&self) -> &[PlaneBase] {
        &self.planes
    }

    /// The segments that the planes lie in.
    pub fn segments(&self) -> &[Arc<MappedSegment>] {
        &self.segments
    }
}
