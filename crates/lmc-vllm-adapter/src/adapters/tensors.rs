//! The paged KV cache of this process: what the engine says of its tensors.

use std::fmt::Write as _;
use std::ptr::NonNull;
use std::sync::Arc;

use lmc_memory::cuda::Gpu;
use lmc_memory::{
    ChunkOrder, DType, GroupLayout, KvGroup, KvMemory, KvOrder, KvSegments, KvTensor, PagedKv,
    ProcessMemory,
};

use crate::adapters::AdapterError;

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

/// The KV tensors of one group of layers.
#[derive(Debug, Clone)]
pub struct KvLayers {
    tensors: Vec<LayerTensor>,
    tokens_first: bool,
    tokens_per_block: u32,
    gpu: Option<String>,
}

/// A group's layout, checked against a chunk size.
#[derive(Debug)]
pub(crate) struct Described {
    pub(crate) paged: PagedKv,
    /// A chunk as the registration describes it.
    pub(crate) chunk: GroupLayout,
    /// Order of the elements in a chunk, as the registration names it.
    pub(crate) layout: String,
}

fn invalid(error: impl std::fmt::Display) -> AdapterError {
    AdapterError::Invalid(error.to_string())
}

impl KvLayers {
    /// Takes the tensors of a group, in the order of its layers. `tokens_first` is true for blocks
    /// with the tokens before the heads (`NHD`) and false for `HND`; `tokens_per_block` are those
    /// that one block id covers.
    ///
    /// # Safety
    /// The memory of the tensors stays allocated, readable and writable until the worker that they
    /// are registered with is shut down, and no code of this process holds a Rust reference to it.
    pub unsafe fn new(
        tensors: Vec<LayerTensor>,
        tokens_first: bool,
        tokens_per_block: u32,
    ) -> Self {
        Self {
            tensors,
            tokens_first,
            tokens_per_block,
            gpu: None,
        }
    }

    /// Says that the tensors lie on a GPU, whose id is spelled as PyTorch does
    /// (`19d82a72-11d8-…`); else they lie in memory of the host.
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

    /// Describes the group for chunks of `chunk_size` tokens. `gpu` is the one that the tensors lie
    /// on.
    pub(crate) fn describe(
        &self,
        chunk_size: u32,
        gpu: Option<&Arc<Gpu>>,
    ) -> Result<Described, AdapterError> {
        let mut tensors = Vec::with_capacity(self.tensors.len());
        let mut ranges = Vec::with_capacity(self.tensors.len());
        for tensor in &self.tensors {
            let dtype: DType = tensor.dtype.parse().map_err(invalid)?;
            if tensor.shape.len() != tensor.strides.len() {
                return Err(invalid(
                    "a KV tensor has another number of strides than axes",
                ));
            }
            let base = NonNull::new(tensor.data as *mut u8);
            let base = base.ok_or_else(|| invalid("a KV tensor has no memory"))?;
            let elements =
                (tensor.shape.iter().zip(&tensor.strides)).try_fold(1_u64, |end, axis| {
                    let (&count, &stride) = axis;
                    end.checked_add(count.checked_sub(1)?.checked_mul(stride)?)
                });
            let bytes = elements.and_then(|elements| elements.checked_mul(dtype.size() as u64));
            let bytes = bytes.ok_or_else(|| invalid("a KV tensor has an impossible shape"))?;
            ranges.push((base, bytes));
            tensors.push(KvTensor {
                dtype,
                shape: &tensor.shape,
                strides: &tensor.strides,
                storage_offset: 0,
            });
        }
        let order = match self.tokens_first {
            true => KvOrder::TokensFirst,
            false => KvOrder::HeadsFirst,
        };
        let group = KvGroup::describe(&tensors, order, Some(self.tokens_per_block), chunk_size);
        let group = group.map_err(invalid)?;
        let numbers: Vec<usize> = (0..ranges.len()).collect();
        let (chunk, layout) = describe_order(group.order());
        let segments = segments(ranges, gpu);
        Ok(Described {
            paged: group.open(&numbers, segments).map_err(invalid)?,
            chunk,
            layout,
        })
    }
}

/// Returns the memory of these ranges, for which `KvLayers::new` has the caller's promise.
fn segments(ranges: Vec<(NonNull<u8>, u64)>, gpu: Option<&Arc<Gpu>>) -> KvSegments {
    let ranges = ranges.into_iter();
    match gpu {
        Some(gpu) => {
            let memory = |(base, len): (NonNull<u8>, u64)| {
                // SAFETY: the caller of `KvLayers::new` promises it.
                Arc::new(unsafe { gpu.own_memory(base.addr().get() as u64, len) })
            };
            KvSegments::Device(ranges.map(memory).collect())
        }
        None => {
            let memory = |(base, len)| {
                // SAFETY: the caller of `KvLayers::new` promises it.
                let memory = unsafe { ProcessMemory::new(base, len) };
                Arc::new(memory) as Arc<dyn KvMemory>
            };
            KvSegments::Host(ranges.map(memory).collect())
        }
    }
}

/// Names the order of the elements in a chunk. Chunks mean the same exactly if names and shapes are
/// equal.
fn describe_order(order: ChunkOrder) -> (GroupLayout, String) {
    match order {
        ChunkOrder::Tokens(layout) => (layout, "tokens".to_owned()),
        ChunkOrder::Blocks {
            blocks,
            heads,
            block_tokens,
            inner_planes,
            order,
        } => {
            let order = match order {
                KvOrder::TokensFirst => "tokens-heads",
                KvOrder::HeadsFirst => "heads-tokens",
            };
            let mut text = format!("blocks {order} heads={heads} tokens={block_tokens}");
            let _ = write!(text, " planes={inner_planes}");
            (blocks, text)
        }
    }
}
