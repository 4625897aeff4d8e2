//! An engine's paged KV cache, in shared memory or in memory of this process.

use std::sync::Arc;

use thiserror::Error;

use super::overlap;
#[cfg(feature = "cuda")]
use crate::cuda::{DeviceMemory, Gpu};
use crate::{GroupLayout, KvMemory, LayoutError};

/// The memory of a KV group's tensors, all of one kind.
#[derive(Clone, Debug)]
pub enum KvSegments {
    /// Memory that this process maps.
    Host(Vec<Arc<dyn KvMemory>>),
    /// Memory of one GPU.
    #[cfg(feature = "cuda")]
    Device(Vec<Arc<DeviceMemory>>),
}

impl KvSegments {
    /// Returns the address and the size in bytes of a segment.
    fn range(&self, segment: usize) -> Option<(u64, u64)> {
        match self {
            Self::Host(segments) => {
                let address = |memory: &Arc<dyn KvMemory>| memory.base_ptr().addr().get() as u64;
                (segments.get(segment)).map(|memory| (address(memory), memory.size()))
            }
            #[cfg(feature = "cuda")]
            Self::Device(segments) => {
                (segments.get(segment)).map(|memory| (memory.base(), memory.len()))
            }
        }
    }

    /// Returns the GPU of the first segment.
    #[cfg(feature = "cuda")]
    fn gpu(&self) -> Option<&Arc<Gpu>> {
        match self {
            Self::Host(_) => None,
            Self::Device(segments) => Some(segments.first()?.gpu()),
        }
    }

    /// Returns true if segments are on several GPUs.
    #[cfg(feature = "cuda")]
    fn spans_gpus(&self) -> bool {
        match self {
            Self::Host(_) => false,
            Self::Device(segments) => {
                let is_elsewhere =
                    |memory: &Arc<DeviceMemory>| memory.gpu().uuid() != segments[0].gpu().uuid();
                segments.iter().any(is_elsewhere)
            }
        }
    }
}

/// The start of one plane of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PlaneBase {
    /// Index of the segment.
    pub(super) segment: usize,
    /// Bytes from the start of the segment.
    pub(super) offset: u64,
}

/// A KV cache that is not supported, or does not fit its segments.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PagedError {
    /// The tensors have no known layout, or contradict each other.
    #[error("{why}")]
    Unsupported {
        /// Cause, with the expected and the found value.
        why: String,
    },
    /// A chunk is beyond the limits of a layout.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// A block is outside its segment.
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

/// An engine's paged KV cache of one group, checked against its segments.
///
/// Made by [`KvGroup::open`](crate::KvGroup::open). Clones share one description.
#[derive(Clone, Debug)]
pub struct PagedKv {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    /// Layout of a chunk whose rows are blocks.
    layout: GroupLayout,
    blocks: u32,
    /// Bytes from one block to the next.
    block_stride: u64,
    planes: Vec<PlaneBase>,
    segments: KvSegments,
    /// True if no byte belongs to two blocks.
    disjoint: bool,
}

impl PagedKv {
    /// Checks that every byte of every block is inside its segment.
    ///
    /// The rows of `layout` are blocks. `planes` is in chunk order: all layers of K, then all layers of V (or
    /// only the layers for [`Planes::Fused`](crate::Planes::Fused)).
    pub(super) fn new(
        layout: GroupLayout,
        blocks: u32,
        block_stride: u64,
        planes: Vec<PlaneBase>,
        segments: KvSegments,
    ) -> Result<Self, PagedError> {
        let expected = layout.planes().count() as usize * layout.layers() as usize;
        assert_eq!(planes.len(), expected, "planes of the layout");
        if blocks == 0 {
            let why = "a KV cache without blocks".to_owned();
            return Err(PagedError::Unsupported { why });
        }
        #[cfg(feature = "cuda")]
        if segments.spans_gpus() {
            let why = "the tensors of a KV cache lie on several GPUs".to_owned();
            return Err(PagedError::Unsupported { why });
        }
        // The factors are below 2^32 and 2^64, so u128 cannot overflow.
        let extent =
            u128::from(blocks - 1) * u128::from(block_stride) + u128::from(layout.row_bytes());
        for (plane, base) in planes.iter().enumerate() {
            let len = segments.range(base.segment).map_or(0, |(_, len)| len);
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
        // Segments may overlap: each tensor of a worker is a segment of its own.
        let start = |plane: &PlaneBase| {
            let range = segments.range(plane.segment);
            range.expect("checked above").0 + plane.offset
        };
        let starts = planes.iter().map(start).collect();
        let disjoint = overlap::is_disjoint(blocks, layout.row_bytes(), block_stride, starts);
        Ok(Self {
            inner: Arc::new(Inner {
                layout,
                blocks,
                block_stride,
                planes,
                segments,
                disjoint,
            }),
        })
    }

    /// Returns the GPU whose memory has the cache.
    #[cfg(feature = "cuda")]
    pub fn gpu(&self) -> Option<&Arc<Gpu>> {
        self.inner.segments.gpu()
    }

    /// Returns the bytes of all blocks.
    pub fn bytes(&self) -> u64 {
        let planes = self.inner.planes.len() as u64;
        planes * u64::from(self.inner.blocks) * self.block_bytes()
    }

    /// Returns the number of blocks.
    pub fn blocks(&self) -> u32 {
        self.inner.blocks
    }

    /// Returns the number of blocks in one chunk.
    pub fn blocks_per_chunk(&self) -> u64 {
        u64::from(self.inner.layout.rows())
    }

    /// Returns the bytes of one chunk.
    pub fn chunk_bytes(&self) -> u64 {
        self.inner.layout.chunk_bytes()
    }

    /// Returns the bytes of one block in one plane of one layer, which are contiguous.
    pub(super) fn block_bytes(&self) -> u64 {
        self.inner.layout.row_bytes()
    }

    /// Returns the bytes from one block to the next.
    pub(super) fn block_stride(&self) -> u64 {
        self.inner.block_stride
    }

    /// Returns the planes, in chunk order.
    pub(super) fn planes(&self) -> &[PlaneBase] {
        &self.inner.planes
    }

    /// Returns true if no byte belongs to two blocks. False for an engine whose layers share one cache.
    pub(super) fn is_disjoint(&self) -> bool {
        self.inner.disjoint
    }

    /// Returns the segments of the planes.
    pub(super) fn segments(&self) -> &KvSegments {
        &self.inner.segments
    }
}
