//! The GPUs of this host on which engines have memory.
//!
//! A server opens its engines' memory by handles. In a worker, the memory belongs to the worker's own
//! process, and the pool to the server.

use std::cell::Cell;
use std::collections::HashMap;
use std::fmt;
use std::mem;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use super::counter::StorageCounter;
use super::counts::CountReader;
use super::driver::{self, Context, CudaError, Event, Result};
use super::lane::{self, HUNG, Lane, Piece, Wait};
use super::pinned::{HostPool, Pinned};
use crate::copy::Direction;
use crate::{Arena, MappedSegment};

/// The GPUs on which engines have memory, and the pool of this process, if it has one.
///
/// The driver is not called before the first [`Gpus::open`]. When the last [`Gpu`] is dropped, all resources
/// are returned to the driver and the GPUs.
#[derive(Debug)]
pub struct Gpus {
    arena: Option<Arc<Arena>>,
    /// Held by the call that opens a GPU, sometimes for seconds.
    opening: Mutex<()>,
    /// Locked only briefly: any thread may drop a [`Gpu`].
    state: Arc<Mutex<Usage>>,
}

/// Number of users, and the devices that are open for them.
#[derive(Debug, Default)]
struct Usage {
    /// Number of [`Gpu`] values, and of calls that are making one.
    users: usize,
    open: OpenDevices,
    /// Registered pools that copies can use, this process's own pool among them.
    pools: Vec<Weak<Pinned>>,
    /// Threads that release dropped resources.
    closing: Vec<JoinHandle<()>>,
}

/// Devices that are open while at least one GPU is in use, and the registration of this process's pool.
#[derive(Debug, Default)]
struct OpenDevices {
    devices: HashMap<String, Arc<Device>>,
    /// Registered with the first device, for all devices.
    own_pool: Option<Arc<Pinned>>,
}

#[derive(Debug)]
struct Device {
    uuid: String,
    name: String,
    context: Arc<Context>,
    to_host: Mutex<Option<Lane>>,
    to_device: Mutex<Option<Lane>>,
    opened: Mutex<HashMap<[u8; 64], OpenAllocation>>,
    /// Locked for one read at a time: a device that hangs blocks one thread that waits for a count.
    counts: Mutex<Option<CountReader>>,
    is_hung: AtomicBool,
}

/// An allocation of another process. It is opened once for all users, because older drivers close it for all
/// users at the first close.
#[derive(Debug)]
struct OpenAllocation {
    engine: u64,
    base: u64,
    len: u64,
    users: usize,
}

/// Memory of another process, identified as that process does.
#[derive(Clone, Copy, Debug)]
pub struct SharedMemory {
    /// The `CUipcMemHandle` of the allocation. The memory of a later process may have the same handle as the
    /// memory of a process that has ended.
    pub handle: [u8; 64],
    /// Unique number of the process.
    pub engine: u64,
}

impl Gpus {
    /// Makes the set of this host's GPUs, with the pool of this process. Costs nothing.
    pub fn new(arena: Arc<Arena>) -> Self {
        Self {
            arena: Some(arena),
            ..Self::without_pool()
        }
    }

    /// Makes the set of this host's GPUs, for pools of other processes: see [`Gpu::register`]. Costs nothing.
    pub fn without_pool() -> Self {
        Self {
            arena: None,
            opening: Mutex::default(),
            state: Arc::default(),
        }
    }

    /// Waits until all dropped resources are released to the driver.
    pub fn wait_until_given_back(&self) {
        let closing = mem::take(&mut self.state.lock().closing);
        for thread in closing {
            // The thread does not panic.
            let _ = thread.join();
        }
    }

    /// Returns the GPU with this id, in PyTorch's form (`19d82a72-11d8-…`). The first call loads the driver
    /// and takes several hundred megabytes of the GPU's memory, 66 MiB of them for copies. It may take
    /// several seconds.
    ///
    /// # Errors
    /// [`CudaError`].
    pub fn open(&self, uuid: &str) -> Result<Arc<Gpu>> {
        let _opening = self.opening.lock();
        // Counted from now on, so that nothing is released meanwhile.
        let mut gpu = Gpu {
            device: None,
            state: Arc::clone(&self.state),
        };
        let known = {
            let mut state = self.state.lock();
            state.users += 1;
            state.open.devices.get(uuid).cloned()
        };
        self.wait_until_given_back();
        let device = match known {
            Some(device) => device,
            None => {
                driver::load()?;
                let device = Arc::new(Device::open(uuid)?);
                let mut state = self.state.lock();
                if state.open.own_pool.is_none()
                    && let Some(arena) = &self.arena
                {
                    let (pool, context) = (Arc::clone(arena), Arc::clone(&device.context));
                    // If registration fails, copies to and from the unregistered memory still work, at the
                    // slower rate.
                    let pinned = Pinned::start(HostPool::Own(pool), context, |_| ());
                    state.open.own_pool = Some(state.add_pool(pinned));
                }
                let uuid = device.uuid.clone();
                state.open.devices.insert(uuid, Arc::clone(&device));
                device
            }
        };
        gpu.device = Some(device);
        Ok(Arc::new(gpu))
    }

    /// Returns the bytes of the pool that are registered with the driver; the other bytes are copied more
    /// slowly.
    pub fn pinned_bytes(&self) -> u64 {
        let state = self.state.lock();
        let pinned = state.open.own_pool.as_ref();
        pinned.map_or(0, |pinned| pinned.done() as u64)
    }
}

impl Usage {
    /// Registers a pool for copies, until it is dropped.
    fn add_pool(&mut self, pinned: Pinned) -> Arc<Pinned> {
        let pinned = Arc::new(pinned);
        self.pools.retain(|pool| pool.strong_count() > 0);
        self.pools.push(Arc::downgrade(&pinned));
        pinned
    }

    /// Drops registrations on a thread of their own, because that takes 20 ms per GiB. If the thread cannot
    /// be started, drops them here.
    fn give_back<T: Send + 'static>(&mut self, value: T) {
        let spawned = thread::Builder::new()
            .name("lmc-gpu-close".to_owned())
            .spawn(move || drop(value));
        self.closing.retain(|thread| !thread.is_finished());
        self.closing.extend(spawned.ok());
    }
}

impl Device {
    /// Opens a GPU, with everything that copies need there.
    fn open(uuid: &str) -> Result<Self> {
        let gpus = driver::gpus()?;
        let Some(gpu) = gpus.iter().find(|gpu| gpu.uuid == uuid) else {
            let spelled = gpus.iter().map(|gpu| gpu.uuid.as_str());
            let visible = spelled.collect::<Vec<_>>().join(", ");
            return Err(CudaError::NotVisible {
                uuid: uuid.to_owned(),
                visible: if visible.is_empty() {
                    "none".to_owned()
                } else {
                    visible
                },
            });
        };
        let context = Arc::new(Context::retain(gpu)?);
        let _entered = context.enter()?;
        Ok(Self {
            uuid: gpu.uuid.clone(),
            name: gpu.name.clone(),
            to_host: Mutex::new(Some(Lane::new(Direction::Gather)?)),
            to_device: Mutex::new(Some(Lane::new(Direction::Scatter)?)),
            context: Arc::clone(&context),
            opened: Mutex::default(),
            counts: Mutex::default(),
            is_hung: AtomicBool::new(false),
        })
    }
}

impl Device {
    /// Returns an error while a copy hangs.
    fn check_hung(&self) -> Result<()> {
        match self.is_hung.load(Ordering::Relaxed) {
            false => Ok(()),
            true => Err(self.hung()),
        }
    }

    fn hung(&self) -> CudaError {
        CudaError::Hung {
            uuid: self.uuid.clone(),
            seconds: HUNG.as_secs(),
        }
    }

    /// Locks a resource that one thread uses at a time. Returns `None` soon after `proceed` returns false.
    fn turn<'a, T>(
        &self,
        what: &'a Mutex<T>,
        proceed: &dyn Fn() -> bool,
    ) -> Result<Option<MutexGuard<'a, T>>> {
        loop {
            self.check_hung()?;
            if !proceed() {
                return Ok(None);
            }
            if let Some(locked) = what.try_lock_for(TURN) {
                return Ok(Some(locked));
            }
        }
    }

    /// Runs work that waits for copies. If a wait is late, other calls fail until the copy has ended, and
    /// then this call fails too.
    fn within_time<T>(&self, work: impl FnOnce(&Wait<'_>) -> Result<T>) -> Result<T> {
        let is_late = Cell::new(false);
        let late = || {
            is_late.set(true);
            self.is_hung.store(true, Ordering::Relaxed);
        };
        let done = work(&|is_done| lane::wait_for(is_done, &late));
        if !is_late.get() {
            return done;
        }
        // The copy has ended after all, but too late for its caller.
        self.is_hung.store(false, Ordering::Relaxed);
        done.and_then(|_| Err(self.hung()))
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // If no context can be entered, the driver is unusable.
        let _entered = self.context.enter();
        *self.to_host.get_mut() = None;
        *self.to_device.get_mut() = None;
        *self.counts.get_mut() = None;
    }
}

/// A GPU in use. Dropping the last one releases everything, in the background.
#[derive(Debug)]
pub struct Gpu {
    /// `None` only while the GPU is being opened or dropped.
    device: Option<Arc<Device>>,
    state: Arc<Mutex<Usage>>,
}

impl Drop for Gpu {
    fn drop(&mut self) {
        let mut state = self.state.lock();
        // Dropped before the lock is released: then the thread below has the last handle.
        self.device = None;
        state.users -= 1;
        if state.users > 0 || state.open.devices.is_empty() {
            return;
        }
        let open = mem::take(&mut state.open);
        state.give_back(open);
    }
}

/// A pool of another process, registered with the driver. Dropping it ends the registration in the
/// background, when the copies that have begun no longer need it.
#[derive(Debug)]
pub struct Registration {
    /// `None` only while this is being dropped.
    pinned: Option<Arc<Pinned>>,
    state: Arc<Mutex<Usage>>,
}

#[cfg(test)]
impl Registration {
    /// Returns the bytes that are registered.
    pub(super) fn bytes(&self) -> u64 {
        let pinned = self.pinned.as_ref();
        pinned.map_or(0, |pinned| pinned.done() as u64)
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let pinned = self.pinned.take();
        self.state.lock().give_back(pinned);
    }
}

impl fmt::Display for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.device().name, self.uuid())
    }
}

impl Gpu {
    fn device(&self) -> &Device {
        self.device.as_ref().expect("set by `Gpus::open`")
    }

    /// Returns the id of the GPU.
    pub fn uuid(&self) -> &str {
        &self.device().uuid
    }

    /// Opens `len` bytes of another process's memory on this GPU, `offset` bytes into the allocation. The
    /// allocation stays open, and its bytes stay allocated, until the value is dropped; then `counter` is
    /// decremented.
    ///
    /// # Errors
    /// [`CudaError::Outside`] if the allocation is shorter; [`CudaError::Call`] for a handle that the driver
    /// does not know; [`CudaError::InUse`] for a handle that is open for another process.
    pub fn memory(
        self: &Arc<Self>,
        SharedMemory { handle, engine }: SharedMemory,
        offset: u64,
        len: u64,
        counter: Option<StorageCounter>,
    ) -> Result<DeviceMemory> {
        let device = self.device();
        let _entered = device.context.enter()?;
        let mut opened = device.opened.lock();
        let found = match opened.get(&handle) {
            Some(known) if known.engine != engine => return Err(CudaError::InUse),
            Some(known) => (known.base, known.len),
            None => driver::open_memory(&handle)?,
        };
        let (base, whole) = found;
        let end = offset.saturating_add(len);
        let fits = end <= whole;
        let known = opened.entry(handle).or_insert(OpenAllocation {
            engine,
            base,
            len: whole,
            users: 0,
        });
        known.users += 1;
        drop(opened);
        let memory = DeviceMemory {
            gpu: Arc::clone(self),
            opened: Some(handle),
            base: base + offset.min(whole),
            len,
            _counter: counter,
        };
        match fits {
            true => Ok(memory),
            // Dropping it closes the memory that was opened for it.
            false => Err(CudaError::Outside {
                start: offset,
                end,
                len: whole,
            }),
        }
    }

    /// Waits until the work before another process's event is done. `handle` is a `CUipcEventHandle`. Returns
    /// false as soon as `proceed` returns false; `proceed` is called every millisecond or more often.
    ///
    /// # Errors
    /// [`CudaError::Call`] for a handle that the driver does not know, and for a broken GPU.
    pub fn wait_for(&self, handle: &[u8; 64], proceed: &dyn Fn() -> bool) -> Result<bool> {
        let _entered = self.device().context.enter()?;
        let event = Event::open(handle)?;
        event.wait(proceed)
    }

    /// Wraps memory of this process on this GPU, such as the tensors of an engine.
    ///
    /// # Safety
    /// From `base` on, `len` bytes of the GPU's memory stay allocated until the value is dropped.
    pub unsafe fn own_memory(self: &Arc<Self>, base: u64, len: u64) -> DeviceMemory {
        DeviceMemory {
            gpu: Arc::clone(self),
            opened: None,
            base,
            len,
            _counter: None,
        }
    }

    /// Registers a pool of another process in the background, from its first byte on, as its pages become
    /// present. Copies to and from other memory still work, at the slower rate. `failed` is called if a part
    /// cannot be registered; after that, no more parts are registered.
    pub fn register(
        &self,
        pool: Arc<MappedSegment>,
        failed: impl FnOnce(CudaError) + Send + 'static,
    ) -> Registration {
        let context = Arc::clone(&self.device().context);
        let pinned = Pinned::start(HostPool::Mapped(pool), context, failed);
        Registration {
            pinned: Some(self.state.lock().add_pool(pinned)),
            state: Arc::clone(&self.state),
        }
    }

    /// Marks the end of the work that one of this process's streams has been given so far. Takes a few
    /// microseconds, and waits for nothing.
    ///
    /// # Errors
    /// [`CudaError::Call`] for a broken GPU.
    ///
    /// # Safety
    /// `stream` is a `CUstream` of the GPU's primary context, or 0 for the default stream.
    pub unsafe fn mark(self: &Arc<Self>, stream: u64) -> Result<Mark> {
        let _entered = self.device().context.enter()?;
        let event = Event::new()?;
        // SAFETY: the caller's promise.
        unsafe { event.record(stream) }?;
        Ok(Mark {
            gpu: Arc::clone(self),
            event: Some(event),
        })
    }

    /// Copies all runs, as long as `proceed` returns true. Returns false if it returned false.
    pub(crate) fn copy(
        &self,
        direction: Direction,
        runs: impl Iterator<Item = (u64, *mut u8, u64)>,
        proceed: &dyn Fn() -> bool,
    ) -> Result<bool> {
        let device = self.device();
        let pools: Vec<_> = {
            let state = self.state.lock();
            state.pools.iter().filter_map(Weak::upgrade).collect()
        };
        let _entered = device.context.enter()?;
        let lane = match direction {
            Direction::Gather => &device.to_host,
            Direction::Scatter => &device.to_device,
        };
        let Some(mut lane) = device.turn(lane, proceed)? else {
            return Ok(false);
        };
        if lane.is_none() {
            *lane = Some(Lane::new(direction)?);
        }
        let this = lane.as_mut().expect("made above");
        let pieces = runs.map(|(device, host, len)| Piece { device, host, len });
        let copied = device.within_time(|wait| this.copy(pieces, &pools, proceed, wait));
        if this.is_broken() {
            // The next copy creates new objects of the driver.
            *lane = None;
        }
        copied
    }
}

/// Time that a thread waits for another thread's copy or read before it checks again whether its own is still
/// wanted.
const TURN: Duration = Duration::from_millis(20);

/// A point in the work of one of this process's streams.
#[derive(Debug)]
pub struct Mark {
    gpu: Arc<Gpu>,
    /// `None` once the drop has taken it.
    event: Option<Event>,
}

impl Mark {
    /// Waits until the work before the point is done. Returns false as soon as `proceed` returns false;
    /// `proceed` is called every millisecond or more often.
    ///
    /// # Errors
    /// [`CudaError::Call`] for a broken GPU.
    pub fn wait(&self, proceed: &dyn Fn() -> bool) -> Result<bool> {
        let _entered = self.gpu.device().context.enter()?;
        self.event.as_ref().map_or(Ok(true), |it| it.wait(proceed))
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        // If no context can be entered, the driver is unusable.
        let _entered = self.gpu.device().context.enter();
        self.event = None;
    }
}

/// A range of memory on a GPU.
#[derive(Debug)]
pub struct DeviceMemory {
    gpu: Arc<Gpu>,
    /// Handle of the allocation, if it belongs to another process.
    opened: Option<[u8; 64]>,
    base: u64,
    len: u64,
    /// Decremented after the memory is closed.
    _counter: Option<StorageCounter>,
}

impl DeviceMemory {
    /// Returns the GPU.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// Returns the first byte, as the GPU addresses it.
    pub(crate) fn base(&self) -> u64 {
        self.base
    }

    /// Returns the number of bytes.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// Waits until the 8-byte number at offset `at` is at least `least`: engines count the work of a stream
    /// there. Returns false soon after `proceed` returns false.
    ///
    /// # Errors
    /// [`CudaError::Outside`] if the memory ends before the number; [`CudaError::Call`] for a broken GPU;
    /// [`CudaError::Hung`].
    pub fn wait_for_count(&self, at: u64, least: u64, proceed: &dyn Fn() -> bool) -> Result<bool> {
        let end = at.saturating_add(8);
        if end > self.len {
            return Err(CudaError::Outside {
                start: at,
                end,
                len: self.len,
            });
        }
        let device = self.gpu.device();
        let _entered = device.context.enter()?;
        let is_reached = || {
            let Some(mut reader) = device.turn(&device.counts, proceed)? else {
                return Ok(false);
            };
            let this = match reader.take() {
                Some(this) => this,
                None => CountReader::new()?,
            };
            // SAFETY: the bytes lie in this memory, which stays open until this call ends.
            let look = |wait: &Wait<'_>| unsafe { this.look(self.base + at, wait) };
            let count = device.within_time(look)?;
            *reader = Some(this);
            Ok(count >= least)
        };
        driver::wait(&is_reached, &|_| proceed())
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        let Some(handle) = self.opened else {
            return;
        };
        let device = self.gpu.device();
        let mut opened = device.opened.lock();
        let Some(known) = opened.get_mut(&handle) else {
            return;
        };
        known.users -= 1;
        if known.users == 0 {
            // If no context can be entered, the driver is unusable.
            let _entered = device.context.enter();
            driver::close_memory(known.base);
            opened.remove(&handle);
        }
    }
}
