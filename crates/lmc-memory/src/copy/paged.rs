//! Where an engine keeps its KV cache.

use std::sync::Arc;

use thiserror::Error;

use super::overlap;
use crate::layout::MAX_CHUNK_TOKENS;
use crate::{DType, GroupLayout, LayoutError, MappedSegment, Planes};

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

    /// `[2, blocks, heads, 1, tokens, size]`: vLLM on RBLN.
    pub const TWO_NB_NH_ONE_BS_HS: Self = Self(&[
        Axis::Plane,
        Axis::Block,
        Axis::Head,
        Axis::One,
        Axis::Token,
        Axis::Element,
    ]);

    /// The axes, outermost first.
    pub fn axes(&self) -> &'static [Axis] {
        self.0
    }

    /// Tells the format of one of vLLM's tensors, by the rules that LMCache 0.5.6 follows.
    ///
    /// The axes must stand in order of their strides, as they do on the wire (see
    /// [`TensorView::by_stride`]). Tokens and heads cannot be told apart by their sizes, so
    /// the engine's `kv_layout` hint decides, unless `block_tokens` (where it is known)
    /// contradicts it: with a single head the two axes have no order of their own.
    ///
    /// # Errors
    /// [`PagedError::Format`] when no rule fits.
    pub fn detect_vllm(
        shape: &[u64],
        order: KvOrder,
        block_tokens: Option<u32>,
    ) -> Result<Self, PagedError> {
        use KvOrder::{HeadsFirst, TokensFirst};
        // The two middle axes of the formats that have both tokens and heads.
        let order = |first: u64, second: u64| {
            let (tokens, other) = match order {
                TokensFirst => (first, second),
                HeadsFirst => (second, first),
            };
            match (block_tokens.map(u64::from), order) {
                (Some(expected), TokensFirst) if tokens != expected && other == expected => {
                    HeadsFirst
                }
                (Some(expected), HeadsFirst) if tokens != expected && other == expected => {
                    TokensFirst
                }
                _ => order,
            }
        };
        match *shape {
            [_, _, _] => Ok(Self::NB_BS_HS),
            [_, a, b, _] => Ok(match order(a, b) {
                TokensFirst => Self::NB_BS_NH_CS,
                HeadsFirst => Self::NB_NH_BS_CS,
            }),
            [2, _, a, b, _] => Ok(match order(a, b) {
                TokensFirst => Self::TWO_NB_BS_NH_HS,
                HeadsFirst => Self::TWO_NB_NH_BS_HS,
            }),
            [_, 2, a, b, _] => Ok(match order(a, b) {
                TokensFirst => Self::NB_TWO_BS_NH_HS,
                HeadsFirst => Self::NB_TWO_NH_BS_HS,
            }),
            [2, _, _, 1, _, _] => Ok(Self::TWO_NB_NH_ONE_BS_HS),
            [_, _, 2, a, b, _] => Ok(match order(a, b) {
                TokensFirst => Self::NB_NL_TWO_BS_NH_HS,
                HeadsFirst => Self::NB_NL_TWO_NH_BS_HS,
            }),
            _ => Err(format_error(format!(
                "a tensor of shape {:?}",
                &shape[..shape.len().min(8)]
            ))),
        }
    }
}

fn format_error(why: String) -> PagedError {
    PagedError::Format { why }
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

impl TensorView {
    /// The same bytes with the axes in order of their strides, largest first, and axes of one
    /// element last among equals: how LMCache's clients normalise a tensor before they send it.
    pub fn by_stride(&self) -> Self {
        let mut axes: Vec<(u64, u64)> = self
            .strides
            .iter()
            .copied()
            .zip(self.shape.iter().copied())
            .collect();
        axes.sort_by_key(|&(stride, size)| std::cmp::Reverse((stride, size != 1)));
        Self {
            segment: self.segment,
            storage_offset: self.storage_offset,
            shape: axes.iter().map(|axis| axis.1).collect(),
            strides: axes.iter().map(|axis| axis.0).collect(),
        }
    }
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
    /// No format fits the tensors, or they contradict each other.
    #[error("this KV cache cannot be read: {why}")]
    Format {
        /// What was expected and found.
        why: String,
    },
    /// A chunk of that shape cannot be.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// A part lies outside its segment.
    #[error("plane {plane} needs {end} bytes of segment {segment}, which has {len}")]
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
/// Clones share the same description.
#[derive(Clone, Debug)]
pub struct PagedKv {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    layout: GroupLayout,
    geometry: PagedGeometry,
    planes: Vec<PlaneBase>,
    segments: Vec<Arc<MappedSegment>>,
    /// True if no byte belongs to two of its runs.
    disjoint: bool,
}

impl PagedKv {
    /// Checks that every byte of every block lies inside its segment.
    ///
    /// `planes` is in chunk order: all layers of K, then all layers of V (or just the layers
    /// for [`Planes::Fused`]). `layout` gives planes, layers, hidden, type and chunk tokens.
    ///
    /// # Errors
    /// [`PagedError`].
    pub fn new(
        layout: GroupLayout,
        geometry: PagedGeometry,
        planes: Vec<PlaneBase>,
        segments: Vec<Arc<MappedSegment>>,
    ) -> Result<Self, PagedError> {
        let expected = layout.planes().count() as usize * layout.layers() as usize;
        if planes.len() != expected {
            let why = format!("{expected} planes are needed, {} were given", planes.len());
            return Err(format_error(why));
        }
        let PagedGeometry {
            blocks,
            block_tokens,
            heads,
            head_bytes,
            ..
        } = geometry;
        if blocks == 0 || heads == 0 || block_tokens == 0 || block_tokens > MAX_CHUNK_TOKENS {
            return Err(format_error(format!(
                "{blocks} blocks of {block_tokens} tokens with {heads} heads: each must be at \
                 least 1 and a block have at most {MAX_CHUNK_TOKENS} tokens"
            )));
        }
        let token_bytes = layout.token_bytes();
        if u128::from(heads) * u128::from(head_bytes) != u128::from(token_bytes) {
            return Err(format_error(format!(
                "{heads} heads of {head_bytes} bytes do not make a token of {token_bytes}"
            )));
        }
        // Every factor is below 2^64 and 2^32, so u128 cannot overflow.
        let span = |count: u32, stride: u64| u128::from(count - 1) * u128::from(stride);
        let extent = span(blocks, geometry.block_stride)
            + span(block_tokens, geometry.token_stride)
            + span(heads, geometry.head_stride)
            + u128::from(head_bytes);
        for (plane, base) in planes.iter().enumerate() {
            let len = segments
                .get(base.segment)
                .map_or(0, |segment| segment.len());
            let end = u128::from(base.offset) + extent;
            if end > u128::from(len) {
                return Err(PagedError::Outside {
                    plane,
                    segment: base.segment,
                    end,
                    len,
                });
            }
        }
        let disjoint = overlap::is_disjoint(&geometry, &planes);
        Ok(Self {
            inner: Arc::new(Inner {
                layout,
                geometry,
                planes,
                segments,
                disjoint,
            }),
        })
    }

    /// Reads the description off an engine's tensors: one for each layer, or one for all when
    /// the format has a layer axis. The layout comes out with `chunk_tokens` tokens, which
    /// count slots of the tensor.
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
        let [first, ..] = tensors else {
            return Err(format_error("no tensor was given".to_owned()));
        };
        let axes = Axes::read(format, first)?;
        if let Some(i) = tensors
            .iter()
            .position(|t| (&t.shape, &t.strides) != (&first.shape, &first.strides))
        {
            return Err(format_error(format!(
                "tensor {i} differs in shape or strides from the first of its group"
            )));
        }
        let layers = match (axes.layer, tensors.len()) {
            (None, count) => narrow("layers", count as u64)?,
            (Some((count, _)), 1) => narrow("layers", count)?,
            (Some(_), count) => {
                let why = format!("{count} tensors were given for a format that holds all layers");
                return Err(format_error(why));
            }
        };
        let size = dtype.size() as u64;
        let bytes = |stride: u64| {
            stride
                .checked_mul(size)
                .ok_or_else(|| format_error(format!("a stride of {stride} elements")))
        };
        let heads = axes.head.unwrap_or((1, 0));
        let hidden = heads.0.saturating_mul(axes.element.0);
        let kind = if axes.plane.is_some() {
            Planes::KeyValue
        } else {
            Planes::Fused
        };
        let layout =
            GroupLayout::new(kind, layers, chunk_tokens, narrow("hidden", hidden)?, dtype)?;
        let geometry = PagedGeometry {
            blocks: narrow("blocks", axes.block.0)?,
            block_tokens: narrow("tokens of a block", axes.token.0)?,
            block_stride: bytes(axes.block.1)?,
            token_stride: bytes(axes.token.1)?,
            heads: narrow("heads", heads.0)?,
            head_stride: bytes(heads.1)?,
            head_bytes: bytes(axes.element.0)?,
        };
        let mut planes = Vec::with_capacity(layers as usize * kind.count() as usize);
        for plane in 0..u64::from(kind.count()) {
            for layer in 0..u64::from(layers) {
                let (tensor, inside) = match axes.layer {
                    Some((_, stride)) => (first, layer.checked_mul(stride)),
                    None => (&tensors[layer as usize], Some(0)),
                };
                let offset = axes
                    .plane
                    .map_or(Some(0), |(_, stride)| plane.checked_mul(stride))
                    .zip(inside)
                    .and_then(|(plane, layer)| plane.checked_add(layer))
                    .and_then(|inside| inside.checked_add(tensor.storage_offset))
                    .ok_or_else(|| format_error("offsets beyond 64 bits".to_owned()))?;
                planes.push(PlaneBase {
                    segment: tensor.segment,
                    offset: bytes(offset)?,
                });
            }
        }
        Self::new(layout, geometry, planes, segments)
    }

    /// Reads the description off vLLM's tensors, whose format is told by
    /// [`KvFormat::detect_vllm`].
    ///
    /// # Errors
    /// [`PagedError`].
    pub fn from_vllm(
        tensors: &[TensorView],
        order: KvOrder,
        block_tokens: Option<u32>,
        dtype: DType,
        chunk_tokens: u32,
        segments: Vec<Arc<MappedSegment>>,
    ) -> Result<Self, PagedError> {
        let tensors: Vec<_> = tensors.iter().map(TensorView::by_stride).collect();
        let shape = tensors.first().map_or(&[][..], |tensor| &tensor.shape);
        if dtype == DType::UInt8 && shape.len() == 3 && shape[2] == 132 {
            // Rows of a sparse-attention indexer: a block holds all values, then all scales,
            // so a token is not one run and cannot be moved by itself.
            let why = "a blocked indexer cache (uint8, 132 wide) has no layout by token";
            return Err(format_error(why.to_owned()));
        }
        let format = KvFormat::detect_vllm(shape, order, block_tokens)?;
        Self::from_tensors(format, &tensors, dtype, chunk_tokens, segments)
    }

    /// The layout of a full chunk of this cache.
    pub fn layout(&self) -> &GroupLayout {
        &self.inner.layout
    }

    /// Blocks, tokens and strides.
    pub fn geometry(&self) -> &PagedGeometry {
        &self.inner.geometry
    }

    /// The bases, in chunk order.
    pub fn planes(&self) -> &[PlaneBase] {
        &self.inner.planes
    }

    /// Returns true if no byte belongs to two of its planes, blocks, tokens or heads. It is false
    /// for an engine whose layers share one cache.
    pub(super) fn is_disjoint(&self) -> bool {
        self.inner.disjoint
    }

    /// The segments that the planes lie in.
    pub fn segments(&self) -> &[Arc<MappedSegment>] {
        &self.inner.segments
    }
}

fn narrow(what: &str, value: u64) -> Result<u32, PagedError> {
    u32::try_from(value).map_err(|_| format_error(format!("{value} is too many {what}")))
}

/// `(size, stride)` of each axis that a tensor has, in elements.
struct Axes {
    layer: Option<(u64, u64)>,
    plane: Option<(u64, u64)>,
    block: (u64, u64),
    token: (u64, u64),
    head: Option<(u64, u64)>,
    element: (u64, u64),
}

impl Axes {
    fn read(format: KvFormat, tensor: &TensorView) -> Result<Self, PagedError> {
        let (shape, strides) = (&tensor.shape, &tensor.strides);
        let rank = format.axes().len();
        if shape.len() != rank || strides.len() != rank {
            return Err(format_error(format!(
                "the format has {rank} axes, the tensor {} and {} strides",
                shape.len(),
                strides.len()
            )));
        }
        let find = |axis: Axis| {
            let at = format.axes().iter().position(|&a| a == axis)?;
            Some((shape[at], strides[at]))
        };
        let must = |axis: Axis| find(axis).expect("every format has blocks, tokens and elements");
        let axes = Self {
            layer: find(Axis::Layer),
            plane: find(Axis::Plane),
            block: must(Axis::Block),
            token: must(Axis::Token),
            head: find(Axis::Head),
            element: must(Axis::Element),
        };
        if axes.element.0 > 1 && axes.element.1 != 1 {
            let why = format!(
                "elements of a head are {} apart, expected 1",
                axes.element.1
            );
            return Err(format_error(why));
        }
        for (name, expected, found) in [("K/V", 2, axes.plane), ("singleton", 1, find(Axis::One))] {
            if let Some((found, _)) = found.filter(|axis| axis.0 != expected) {
                let why = format!("the {name} axis has {found} entries, expected {expected}");
                return Err(format_error(why));
            }
        }
        Ok(axes)
    }
}

#[cfg(test)]
mod tests;
