//! The paged KV cache of this process, as the engine describes its tensors.

use std::fmt::Write as _;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use lmc_memory::cuda::Gpu;
use lmc_memory::{
    ChunkOrder, DType, GroupLayout, KvGroup, KvMemory, KvOrder, KvSegments, KvTensor, LayoutError,
    PagedKv, ProcessMemory,
};

use crate::adapters::AdapterError;
use crate::order::{AFTER_GROUPS, name_order};

/// The KV tensor of one layer, in memory of this process.
#[derive(Debug, Clone)]
pub struct LayerTensor {
    /// Address of the first element.
    pub data: usize,
    /// Elements along each axis, outermost axis first.
    pub shape: Vec<u64>,
    /// Elements from one index to the next along each axis.
    pub strides: Vec<u64>,
    /// Element type by its torch name.
    pub dtype: String,
}

/// Layers with one block table.
#[derive(Debug, Clone)]
pub struct LayerGroup {
    /// The tensors, in the order of the layers.
    pub tensors: Vec<LayerTensor>,
    /// Number of preceding tokens that the layers need for a token; `None`: all of them. In the
    /// block table of layers with a window, block 0 stands for a block that is not kept.
    pub window: Option<u32>,
}

/// The KV tensors of an engine's worker.
#[derive(Debug, Clone)]
pub struct KvLayers {
    groups: Vec<LayerGroup>,
    order: KvOrder,
    tokens_per_block: u32,
    gpu: Option<String>,
}

/// The layout of all groups, checked against a chunk size. A chunk holds the groups one after the
/// other.
#[derive(Debug)]
pub(crate) struct Described {
    pub(crate) groups: Vec<DescribedGroup>,
    /// A chunk as the registration describes it.
    pub(crate) chunk: GroupLayout,
    /// Order of the elements in a chunk, as the registration names it.
    pub(crate) layout: String,
}

/// One group's share of the chunks.
#[derive(Debug)]
pub(crate) struct DescribedGroup {
    pub(crate) paged: PagedKv,
    /// Block id that stands for a block that is not kept.
    pub(crate) null_block: Option<u32>,
    /// Bytes of the group in a chunk.
    pub(crate) bytes: Range<usize>,
}

impl Described {
    /// Returns true if the tensors lie on a GPU.
    pub(crate) fn is_on_gpu(&self) -> bool {
        self.groups.iter().any(|group| group.paged.gpu().is_some())
    }

    /// Returns the blocks of one chunk, in each group.
    pub(crate) fn blocks_per_chunk(&self) -> u64 {
        // Groups with other blocks are refused.
        self.groups
            .first()
            .map_or(0, |group| group.paged.blocks_per_chunk())
    }
}

/// Block id that stands for a block that is not kept, in block tables of layers with a window.
const NULL_BLOCK: u32 = 0;

fn invalid(error: impl std::fmt::Display) -> AdapterError {
    AdapterError::Invalid(error.to_string())
}

impl KvLayers {
    /// Takes the groups of layers, in the order of the engine's block tables. `order` is
    /// [`KvOrder::TokensFirst`] for `NHD` and [`KvOrder::HeadsFirst`] for `HND`.
    /// `tokens_per_block` is the number of tokens that one block id covers.
    ///
    /// # Safety
    /// The memory of the tensors stays allocated, readable and writable until the worker that they
    /// are registered with is shut down or has taken them out of use
    /// ([`WorkerAdapter::unregister_kv_caches`](crate::adapters::WorkerAdapter::unregister_kv_caches)),
    /// and no code of this process holds a Rust reference to it.
    pub unsafe fn new(groups: Vec<LayerGroup>, order: KvOrder, tokens_per_block: u32) -> Self {
        Self {
            groups,
            order,
            tokens_per_block,
            gpu: None,
        }
    }

    /// Declares that the tensors lie on a GPU, with its id as PyTorch spells it
    /// (`19d82a72-11d8-…`). Without this they lie in memory of the host.
    #[must_use]
    pub fn on_gpu(self, uuid: String) -> Self {
        Self {
            gpu: Some(uuid),
            ..self
        }
    }

    /// Returns the id of the GPU that the tensors lie on.
    pub(crate) fn gpu(&self) -> Option<&str> {
        self.gpu.as_deref()
    }

    /// Returns the tokens that one block id covers.
    pub(crate) fn tokens_per_block(&self) -> u32 {
        self.tokens_per_block
    }

    /// Describes the groups for chunks of `chunk_size` tokens. `gpu` is the GPU that the tensors
    /// lie on.
    pub(crate) fn describe(
        &self,
        chunk_size: u32,
        gpu: Option<&Arc<Gpu>>,
    ) -> Result<Described, AdapterError> {
        let mut groups = Vec::with_capacity(self.groups.len());
        let mut layouts = Vec::with_capacity(self.groups.len());
        let mut end = 0;
        for group in &self.groups {
            let (paged, order) = self.describe_group(group, chunk_size, gpu)?;
            let begin = end;
            end += paged.chunk_bytes() as usize;
            groups.push(DescribedGroup {
                paged,
                null_block: group.window.map(|_| NULL_BLOCK),
                bytes: begin..end,
            });
            layouts.push(name_order(order));
        }
        let layers = layouts.iter().map(|(layout, _)| layout.layers()).sum();
        let mut all = layouts
            .iter()
            .map(|(layout, text)| Ok((layout.with_layers(layers)?, text)));
        let first: Result<_, LayoutError> =
            all.next().ok_or_else(|| invalid("there are no layers"))?;
        let (chunk, order) = first.map_err(invalid)?;
        if !all.all(|other| other == Ok((chunk, order))) {
            return Err(invalid(
                "the KV groups of the engine differ in the heads, size or type of their elements: \
                 start vLLM with --disable-hybrid-kv-cache-manager where the model allows that, or \
                 without lmc",
            ));
        }
        let layout = match &self.groups[..] {
            [LayerGroup { window: None, .. }] => order.clone(),
            groups => name_groups(groups, order),
        };
        Ok(Described {
            groups,
            chunk,
            layout,
        })
    }

    fn describe_group(
        &self,
        group: &LayerGroup,
        chunk_size: u32,
        gpu: Option<&Arc<Gpu>>,
    ) -> Result<(PagedKv, ChunkOrder), AdapterError> {
        let mut tensors = Vec::with_capacity(group.tensors.len());
        let mut ranges = Vec::with_capacity(group.tensors.len());
        for tensor in &group.tensors {
            let dtype: DType = tensor.dtype.parse().map_err(invalid)?;
            if tensor.shape.len() != tensor.strides.len() {
                return Err(invalid("a KV tensor must have one stride for each axis"));
            }
            let base = NonNull::new(tensor.data as *mut u8);
            let base = base.ok_or_else(|| invalid("a KV tensor has no memory"))?;
            let elements =
                (tensor.shape.iter().zip(&tensor.strides)).try_fold(1_u64, |end, axis| {
                    let (&count, &stride) = axis;
                    end.checked_add(count.checked_sub(1)?.checked_mul(stride)?)
                });
            let bytes = elements.and_then(|elements| elements.checked_mul(dtype.size() as u64));
            let bytes = bytes.ok_or_else(|| invalid("a KV tensor has an invalid shape"))?;
            ranges.push((base, bytes));
            tensors.push(KvTensor {
                dtype,
                shape: &tensor.shape,
                strides: &tensor.strides,
                storage_offset: 0,
            });
        }
        let group = KvGroup::describe(
            &tensors,
            self.order,
            Some(self.tokens_per_block),
            chunk_size,
        );
        let group = group.map_err(invalid)?;
        let numbers: Vec<usize> = (0..ranges.len()).collect();
        let paged = group.open(&numbers, segments(ranges, gpu));
        Ok((paged.map_err(invalid)?, group.order()))
    }
}

/// Returns the memory of these ranges. The caller of `KvLayers::new` has promised that it is valid.
fn segments(ranges: Vec<(NonNull<u8>, u64)>, gpu: Option<&Arc<Gpu>>) -> KvSegments {
    let ranges = ranges.into_iter();
    match gpu {
        Some(gpu) => {
            let memory = |(base, len): (NonNull<u8>, u64)| {
                // SAFETY: the caller of `KvLayers::new` has promised it.
                Arc::new(unsafe { gpu.own_memory(base.addr().get() as u64, len) })
            };
            KvSegments::Device(ranges.map(memory).collect())
        }
        None => {
            let memory = |(base, len)| {
                // SAFETY: the caller of `KvLayers::new` has promised it.
                let memory = unsafe { ProcessMemory::new(base, len) };
                Arc::new(memory) as Arc<dyn KvMemory>
            };
            KvSegments::Host(ranges.map(memory).collect())
        }
    }
}

/// Names the order of the elements in a chunk of several groups, or of layers with a window: the
/// number of layers of each group, with its window, and the order within each group. Chunks have
/// zeros for the tokens that a window leaves out, so the window is part of the name.
fn name_groups(groups: &[LayerGroup], order: &str) -> String {
    let mut text = "groups".to_owned();
    for group in groups {
        let _ = match group.window {
            None => write!(text, " {}", group.tensors.len()),
            Some(window) => write!(text, " {}/{window}", group.tensors.len()),
        };
    }
    text + AFTER_GROUPS + order
}
