//! An engine for tests: real shared-memory segments full of bytes that tell where they are,
//! and a reference that finds every element by its indices alone.

use std::fs;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::paged::{Axis, KvFormat, PagedKv, TensorView};
use crate::{DType, MappedSegment, Planes, SharedName};

/// A segment as an engine makes it, removed on drop.
pub(super) struct Segment {
    name: SharedName,
    pub(super) mapped: Arc<MappedSegment>,
}

impl Segment {
    pub(super) fn new(bytes: &[u8]) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = SharedName::new(&format!("lmc_test_kv_{}_{count}", std::process::id())).unwrap();
        fs::write(name.path(), bytes).unwrap();
        let mapped = Arc::new(MappedSegment::open(&name, bytes.len() as u64).unwrap());
        Self { name, mapped }
    }

    pub(super) fn name(&self) -> &SharedName {
        &self.name
    }

    pub(super) fn bytes(&self) -> Vec<u8> {
        let len = self.mapped.len() as usize;
        // SAFETY: the mapping has that many bytes, and no copy runs while a test looks.
        unsafe { slice::from_raw_parts(self.mapped.base_ptr().as_ptr(), len) }.to_vec()
    }

    pub(super) fn fill(&self, bytes: &[u8]) {
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
pub(super) fn mark(seed: u64, at: usize) -> u8 {
    let mixed = (seed ^ at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 56) as u8
}

pub(super) fn marked(seed: u64, len: usize) -> Vec<u8> {
    (0..len).map(|at| mark(seed, at)).collect()
}

/// Sizes of a cache.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    pub(super) layers: u64,
    pub(super) blocks: u64,
    pub(super) block_tokens: u64,
    pub(super) heads: u64,
    pub(super) element: u64,
    /// Elements between blocks that belong to nobody.
    pub(super) padding: u64,
    pub(super) one_segment: bool,
}

/// An engine's cache of one format.
pub(super) struct Engine {
    pub(super) format: KvFormat,
    pub(super) dtype: DType,
    pub(super) tensors: Vec<TensorView>,
    pub(super) segments: Vec<Segment>,
    pub(super) sizes: Sizes,
}

impl Engine {
    /// Lays out tensors densely (with padding along the outermost axis) and fills them.
    pub(super) fn new(format: KvFormat, dtype: DType, sizes: Sizes) -> Self {
        let axes = format.axes();
        let size = |axis: Axis| match axis {
            Axis::Layer => sizes.layers,
            Axis::Plane => 2,
            Axis::Block => sizes.blocks,
            Axis::Token => sizes.block_tokens,
            Axis::Head => sizes.heads,
            Axis::Element => sizes.element,
            Axis::One => 1,
        };
        let shape: Vec<u64> = axes.iter().map(|&axis| size(axis)).collect();
        let mut strides = vec![1; shape.len()];
        for i in (0..shape.len() - 1).rev() {
            strides[i] = strides[i + 1] * shape[i + 1];
        }
        strides[0] += sizes.padding;
        let elements = strides[0] * shape[0];
        let count = if axes.contains(&Axis::Layer) {
            1
        } else {
            sizes.layers
        };
        let item = dtype.size();
        let mut tensors = Vec::new();
        for tensor in 0..count {
            let (segment, storage_offset) = if sizes.one_segment {
                (0, tensor * elements + 3)
            } else {
                (tensor as usize, 0)
            };
            tensors.push(TensorView {
                segment,
                storage_offset,
                shape: shape.clone(),
                strides: strides.clone(),
            });
        }
        let lens = if sizes.one_segment {
            vec![(count * elements + 3) as usize * item]
        } else {
            vec![elements as usize * item; count as usize]
        };
        let segments = lens
            .into_iter()
            .enumerate()
            .map(|(seed, len)| Segment::new(&marked(seed as u64, len)))
            .collect();
        Self {
            format,
            dtype,
            tensors,
            segments,
            sizes,
        }
    }

    pub(super) fn mapped(&self) -> Vec<Arc<MappedSegment>> {
        self.segments
            .iter()
            .map(|segment| Arc::clone(&segment.mapped))
            .collect()
    }

    pub(super) fn paged(&self, chunk_tokens: u32) -> PagedKv {
        PagedKv::from_tensors(
            self.format,
            &self.tensors,
            self.dtype,
            chunk_tokens,
            self.mapped(),
        )
        .unwrap()
    }

    pub(super) fn planes(&self) -> Planes {
        if self.format.axes().contains(&Axis::Plane) {
            Planes::KeyValue
        } else {
            Planes::Fused
        }
    }

    /// Segment and byte of one element, from the tensors' shape and strides alone.
    fn find(
        &self,
        plane: u64,
        layer: u64,
        block: u64,
        token: u64,
        head: u64,
        e: u64,
    ) -> (usize, usize) {
        let axes = self.format.axes();
        let tensor = if axes.contains(&Axis::Layer) {
            0
        } else {
            layer as usize
        };
        let tensor = &self.tensors[tensor];
        let index = |axis: Axis| match axis {
            Axis::Layer => layer,
            Axis::Plane => plane,
            Axis::Block => block,
            Axis::Token => token,
            Axis::Head => head,
            Axis::Element => e,
            Axis::One => 0,
        };
        let element = tensor.storage_offset
            + axes
                .iter()
                .zip(&tensor.strides)
                .map(|(&axis, s)| index(axis) * s)
                .sum::<u64>();
        (tensor.segment, element as usize * self.dtype.size())
    }

    /// Visits every element of a chunk: `(byte in the chunk, token of the table, segment, byte)`.
    pub(super) fn each_element(
        &self,
        table: &[u32],
        start: u64,
        tokens: u64,
        mut visit: impl FnMut(usize, u64, usize, usize),
    ) {
        let Sizes {
            layers,
            block_tokens,
            heads,
            element,
            ..
        } = self.sizes;
        let heads = if self.format.axes().contains(&Axis::Head) {
            heads
        } else {
            1
        };
        let mut at = 0;
        for plane in 0..u64::from(self.planes().count()) {
            for layer in 0..layers {
                for token in start..start + tokens {
                    let block = u64::from(table[(token / block_tokens) as usize]);
                    for head in 0..heads {
                        for e in 0..element {
                            let (segment, byte) =
                                self.find(plane, layer, block, token % block_tokens, head, e);
                            visit(at, token, segment, byte);
                            at += self.dtype.size();
                        }
                    }
                }
            }
        }
    }
}

/// Every format there is.
pub(super) const FORMATS: [KvFormat; 10] = [
    KvFormat::TWO_NB_BS_NH_HS,
    KvFormat::TWO_NB_NH_BS_HS,
    KvFormat::NB_TWO_BS_NH_HS,
    KvFormat::NB_TWO_NH_BS_HS,
    KvFormat::NB_BS_NH_CS,
    KvFormat::NB_NH_BS_CS,
    KvFormat::NB_BS_HS,
    KvFormat::NB_NL_TWO_BS_NH_HS,
    KvFormat::NB_NL_TWO_NH_BS_HS,
    KvFormat::TWO_NB_NH_ONE_BS_HS,
];
