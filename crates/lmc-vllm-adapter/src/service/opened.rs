//! Memory of workers that the server opens, to copy from and to.

use std::collections::HashMap;
use std::sync::Arc;

use lmc_memory::cuda::{CudaError, DeviceMemory, Gpu, Gpus, SharedMemory, StorageCounter};
use lmc_memory::{KvMemory, KvSegments, MappedSegment, PagedKv, SegmentError, SharedName, own_uid};
use parking_lot::Mutex;

use crate::protocol::{CpuShm, Cuda, GpuEvent, IpcHandle, KvDescriptor, RegisterKvCache, SharedBy};
use crate::service::ServiceConfig;
use crate::service::register_error::{RegisterError, invalid};

/// One KV group of an engine whose memory the server copies from and to.
#[derive(Debug)]
pub(crate) struct GroupCopy {
    pub(crate) paged: PagedKv,
    /// Blocks of one chunk.
    pub(crate) blocks_per_chunk: u64,
    /// Tokens of one block.
    pub(crate) tokens_per_block: u64,
    /// Bytes of this group in a chunk.
    pub(crate) range: std::ops::Range<usize>,
}

/// The memory of a worker that the server copies from and to.
#[derive(Debug)]
pub(crate) struct ServerCopies {
    /// Number of the engine.
    engine: u64,
    pub(crate) groups: Vec<GroupCopy>,
    /// True if the engine frees blocks before it knows that they are copied.
    pub(crate) frees_early: bool,
    counts: Mutex<Option<Counts>>,
}

/// The numbers that count an engine's work, as far as clients have named them.
#[derive(Debug)]
struct Counts {
    handle: IpcHandle,
    len: u64,
    memory: Arc<DeviceMemory>,
}

/// Returns true for an engine with sliding windows: it frees a block when the window has left the
/// block, and computes other tokens in it, whether or not the server has copied it by then.
/// LMCache's connector, which asks for these copies, does not wait for them.
fn frees_early(registration: &RegisterKvCache) -> bool {
    registration
        .groups
        .iter()
        .any(|group| group.sw_size_tokens >= 0)
}

impl ServerCopies {
    pub(super) fn new(registration: &RegisterKvCache, groups: Vec<GroupCopy>) -> Self {
        Self {
            engine: registration.instance_id,
            groups,
            frees_early: frees_early(registration),
            counts: Mutex::default(),
        }
    }

    /// Returns the GPU that the memory lies on.
    pub(crate) fn gpu(&self) -> Option<&Arc<Gpu>> {
        self.groups.first().and_then(|copy| copy.paged.gpu())
    }

    /// Waits for a point in the engine's work on its GPU. Returns false soon after `proceed`
    /// returns false.
    pub(crate) fn wait_for(
        &self,
        gpu: &Arc<Gpu>,
        event: GpuEvent,
        proceed: &dyn Fn() -> bool,
    ) -> Result<bool, CudaError> {
        match event {
            GpuEvent::Event(handle) => gpu.wait_for(&handle, proceed),
            GpuEvent::Count { least: 0, .. } => Ok(true),
            GpuEvent::Count {
                handle,
                offset,
                least,
            } => {
                let counts = self.counts(gpu, handle, offset.saturating_add(8))?;
                counts.wait_for_count(offset, least, proceed)
            }
        }
    }

    /// Returns the first `len` bytes of the numbers, which stay open for the next request.
    fn counts(
        &self,
        gpu: &Arc<Gpu>,
        handle: IpcHandle,
        len: u64,
    ) -> Result<Arc<DeviceMemory>, CudaError> {
        let mut counts = self.counts.lock();
        match &*counts {
            Some(known) if known.handle == handle && known.len >= len => {
                Ok(Arc::clone(&known.memory))
            }
            _ => {
                let shared = SharedMemory {
                    handle,
                    engine: self.engine,
                };
                let memory = Arc::new(gpu.memory(shared, 0, len, None)?);
                *counts = Some(Counts {
                    handle,
                    len,
                    memory: Arc::clone(&memory),
                });
                Ok(memory)
            }
        }
    }
}

/// Most segments of one worker; an engine has at most one for each layer.
const MAX_SEGMENTS: usize = 1024;

/// The memory of one registration, all of one kind.
pub(super) enum Segments {
    Host(HostSegments),
    Gpu(GpuSegments),
}

impl Segments {
    /// Returns an empty set of segments, of the kind of the first tensor.
    pub(super) fn of(
        first: Option<&KvDescriptor>,
        engine: u64,
        user: Option<u32>,
        gpus: &Gpus,
        config: &ServiceConfig,
    ) -> Result<Self, RegisterError> {
        Ok(match first {
            Some(KvDescriptor::Cuda(cuda)) => {
                match user {
                    Some(user) if user == own_uid() || user == 0 => {}
                    Some(_) => return Err(RegisterError::OtherUser),
                    None if config.isolated_ipc => {}
                    None => return Err(RegisterError::UnknownUser),
                }
                Self::Gpu(GpuSegments {
                    gpu: gpus.open(&cuda.device_uuid)?,
                    engine,
                    user,
                    opened: Vec::new(),
                })
            }
            _ => Self::Host(HostSegments {
                user: user.ok_or(RegisterError::UnknownUser)?,
                numbers: HashMap::new(),
                mapped: Vec::new(),
            }),
        })
    }

    /// Returns the segments as the memory of a KV group.
    pub(super) fn memory(&self) -> KvSegments {
        match self {
            Self::Host(segments) => {
                let mapped = segments.mapped.iter();
                let mapped = mapped.map(|segment| Arc::clone(segment) as Arc<dyn KvMemory>);
                KvSegments::Host(mapped.collect())
            }
            Self::Gpu(segments) => KvSegments::Device(segments.opened.clone()),
        }
    }

    /// Opens the memory of a tensor. Returns the number of its segment.
    pub(super) fn open(&mut self, tensor: &KvDescriptor) -> Result<usize, RegisterError> {
        match (self, tensor) {
            (Self::Host(segments), KvDescriptor::CpuShm(shm)) => segments.open(shm),
            (Self::Gpu(segments), KvDescriptor::Cuda(cuda)) => segments.open(cuda),
            _ => Err(RegisterError::Invalid(
                "the tensors lie in memory of several kinds".to_owned(),
            )),
        }
    }
}

/// The segments of a registration on one GPU, one for each tensor.
pub(super) struct GpuSegments {
    gpu: Arc<Gpu>,
    engine: u64,
    /// `None` if the user is not known.
    user: Option<u32>,
    opened: Vec<Arc<DeviceMemory>>,
}

impl GpuSegments {
    fn open(&mut self, tensor: &Cuda) -> Result<usize, RegisterError> {
        if tensor.device_uuid != self.gpu.uuid() {
            return Err(RegisterError::Invalid(format!(
                "the tensors of one worker lie on several GPUs, {} and {}",
                self.gpu.uuid(),
                tensor.device_uuid
            )));
        }
        if self.opened.len() >= MAX_SEGMENTS {
            return Err(RegisterError::Invalid(format!(
                "more than {MAX_SEGMENTS} tensors in one registration"
            )));
        }
        // Without the counter the engine keeps the memory until it exits, and it keeps its KV cache
        // that long anyway.
        let counter = match (&tensor.shared_by, self.user) {
            (SharedBy::PyTorch { counter }, Some(user)) => {
                counter.as_ref().and_then(|(name, number)| {
                    let name = SharedName::new(name).ok()?;
                    StorageCounter::open_for(user, &name, *number).ok()
                })
            }
            // Events and counters of an engine in a container of its own cannot be opened.
            (SharedBy::PyTorch { .. }, None) => return Err(RegisterError::UnknownUser),
            (SharedBy::Driver, _) => None,
        };
        let (handle, offset, bytes) = (tensor.handle, tensor.offset, tensor.nbytes);
        let shared = SharedMemory {
            handle,
            engine: self.engine,
        };
        let memory = self.gpu.memory(shared, offset, bytes, counter)?;
        self.opened.push(Arc::new(memory));
        Ok(self.opened.len() - 1)
    }
}

/// The segments of one registration in host memory, each mapped once however many layers lie in it.
pub(super) struct HostSegments {
    user: u32,
    numbers: HashMap<SharedName, usize>,
    mapped: Vec<Arc<MappedSegment>>,
}

impl HostSegments {
    fn open(&mut self, tensor: &CpuShm) -> Result<usize, RegisterError> {
        let name = SharedName::new(&tensor.shm_name).map_err(invalid)?;
        if let Some(&number) = self.numbers.get(&name) {
            return Ok(number);
        }
        if self.mapped.len() >= MAX_SEGMENTS {
            return Err(RegisterError::Invalid(format!(
                "more than {MAX_SEGMENTS} shared-memory segments in one registration"
            )));
        }
        let mapped = MappedSegment::open_for(self.user, &name, tensor.nbytes);
        let mapped = mapped.map_err(|error| match error {
            SegmentError::OtherUser { .. } => invalid(error),
            _ => invalid(format!(
                "{error}: engine and server must run on one host and share /dev/shm"
            )),
        })?;
        // Two names may lead to one file if it was renamed in between. Its bytes then belong to one
        // segment; otherwise copies of two layers could overlap unnoticed.
        let is_same = |known: &Arc<MappedSegment>| known.is_same_file(&mapped);
        let number = match self.mapped.iter().position(is_same) {
            Some(known) if self.mapped[known].len() >= mapped.len() => known,
            Some(_) => {
                return Err(RegisterError::Invalid(format!(
                    "shared-memory segment {name} has two names: register it under one"
                )));
            }
            None => {
                self.mapped.push(Arc::new(mapped));
                self.mapped.len() - 1
            }
        };
        self.numbers.insert(name, number);
        Ok(number)
    }
}
