//! The GPUs of this host that engines have memory on.

use std::cell::Cell;
use std::collections::HashMap;
use std::fmt;
use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use parking_lot::Mutex;

use super::counter::StorageCounter;
use super::driver::{self, Context, CudaError, Event, Result};
use super::lane::{self, HUNG, Lane, Piece};
use super::pinned::Pinned;
use crate::Arena;
use crate::copy::Direction;

/// The GPUs that engines have memory on, and the pool that is copied to and from.
///
/// Nothing of the driver is touched before the first [`Gpus::open`]. When the last [`Gpu`] has
/// gone, all that was taken of the driver and of the GPUs is given back.
#[derive(Debug)]
pub struct Gpus {
    arena: Arc<Arena>,
    /// Held by the one call that opens a GPU, for seconds at times.
    opening: Mutex<()>,
    /// Locked for moments only: a [`Gpu`] may be dropped by any thread.
    state: Arc<Mutex<Usage>>,
}

/// Number of users, and the devices that are open for them.
#[derive(Debug, Default)]
struct Usage {
    /// Number of [`Gpu`] values, and of calls that make one.
    users: usize,
    open: OpenDevices,
    /// Thread that gives back what was open before.
    closing: Option<JoinHandle<()>>,
}

/// Devices that are open while at least one GPU is in use, and the pool's registration.
#[derive(Debug, Default)]
struct OpenDevices {
    devices: HashMap<String, Arc<Device>>,
    /// Made with the first device, for all.
    pinned: Option<Arc<Pinned>>,
}

#[derive(Debug)]
struct Device {
    uuid: String,
    name: String,
    context: Arc<Context>,
    pinned: Arc<Pinned>,
    to_host: Mutex<Option<Lane>>,
    to_device: Mutex<Option<Lane>>,
    opened: Mutex<HashMap<[u8; 64], OpenAllocation>>,
    is_hung: AtomicBool,
}

/// An allocation of another process. It is opened once for all users: older drivers close it for all
/// of them at the first close.
#[derive(Debug)]
struct OpenAllocation {
    base: u64,
    len: u64,
    users: usize,
}

impl Gpus {
    /// The GPUs of this host, with a pool. Costs nothing.
    pub fn new(arena: Arc<Arena>) -> Self {
        Self {
            arena,
            opening: Mutex::default(),
            state: Arc::default(),
        }
    }

    /// Returns the GPU with this id, spelled as PyTorch does (`19d82a72-11d8-…`). The first call
    /// loads the driver and takes some hundred megabytes of the GPU's memory; it takes up to some
    /// seconds.
    ///
    /// # Errors
    /// [`CudaError`].
    pub fn open(&self, uuid: &str) -> Result<Arc<Gpu>> {
        let _opening = self.opening.lock();
        // Counted from now on, so that nothing is given back meanwhile.
        let mut gpu = Gpu {
            device: None,
            state: Arc::clone(&self.state),
        };
        let (closing, known, pinned) = {
            let mut state = self.state.lock();
            state.users += 1;
            let known = state.open.devices.get(uuid).cloned();
            (state.closing.take(), known, state.open.pinned.clone())
        };
        if let Some(closing) = closing {
            // The thread does nothing that panics.
            let _ = closing.join();
        }
        let device = match known {
            Some(device) => device,
            None => {
                driver::load()?;
                let device = Arc::new(Device::open(uuid, pinned, &self.arena)?);
                let mut state = self.state.lock();
                state.open.pinned = Some(Arc::clone(&device.pinned));
                let uuid = device.uuid.clone();
                state.open.devices.insert(uuid, Arc::clone(&device));
                device
            }
        };
        gpu.device = Some(device);
        Ok(Arc::new(gpu))
    }

    /// Bytes of the pool that are registered with the driver; the others are copied more slowly.
    pub fn pinned_bytes(&self) -> u64 {
        let state = self.state.lock();
        let pinned = state.open.pinned.as_ref();
        pinned.map_or(0, |pinned| pinned.done() as u64)
    }
}

impl Device {
    /// Opens a GPU. The first one begins to register the arena, for all.
    fn open(uuid: &str, pinned: Option<Arc<Pinned>>, arena: &Arc<Arena>) -> Result<Self> {
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
        context.bind()?;
        let pinned = pinned
            .unwrap_or_else(|| Arc::new(Pinned::start(Arc::clone(arena), Arc::clone(&context))));
        Ok(Self {
            uuid: gpu.uuid.clone(),
            name: gpu.name.clone(),
            context,
            pinned,
            to_host: Mutex::default(),
            to_device: Mutex::default(),
            opened: Mutex::default(),
            is_hung: AtomicBool::new(false),
        })
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // Where no context can be bound, the driver is beyond use.
        let _ = self.context.bind();
        *self.to_host.get_mut() = None;
        *self.to_device.get_mut() = None;
    }
}

/// A GPU in use. The drop of the last one gives everything back, in the background.
#[derive(Debug)]
pub struct Gpu {
    /// Absent only while the GPU is opened or dropped.
    device: Option<Arc<Device>>,
    state: Arc<Mutex<Usage>>,
}

impl Drop for Gpu {
    fn drop(&mut self) {
        let mut state = self.state.lock();
        // Before the lock goes: the thread below has the last handle then.
        self.device = None;
        state.users -= 1;
        if state.users > 0 || state.open.devices.is_empty() {
            return;
        }
        let open = mem::take(&mut state.open);
        // Registrations take 20 ms a GiB to give back. Without the thread they are given back here.
        let spawned = thread::Builder::new()
            .name("lmc-gpu-close".to_owned())
            .spawn(move || drop(open));
        state.closing = spawned.ok();
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

    /// Id of the GPU.
    pub fn uuid(&self) -> &str {
        &self.device().uuid
    }

    /// Opens `len` bytes of another process's memory on this GPU, `offset` bytes into the allocation
    /// that `handle` names (a `CUipcMemHandle`). The allocation stays open, and so its bytes stay
    /// allocated, until the value is dropped; then `counter` is decremented.
    ///
    /// # Errors
    /// [`CudaError::Outside`] if the allocation is shorter; [`CudaError::Call`] for a handle that the
    /// driver does not know.
    pub fn memory(
        self: &Arc<Self>,
        handle: [u8; 64],
        offset: u64,
        len: u64,
        counter: Option<StorageCounter>,
    ) -> Result<DeviceMemory> {
        let device = self.device();
        device.context.bind()?;
        let mut opened = device.opened.lock();
        let found = match opened.get(&handle).map(|known| (known.base, known.len)) {
            Some(known) => known,
            None => driver::open_memory(&handle)?,
        };
        let (base, whole) = found;
        let end = offset.saturating_add(len);
        let fits = end <= whole;
        let known = opened.entry(handle).or_insert(OpenAllocation {
            base,
            len: whole,
            users: 0,
        });
        known.users += 1;
        drop(opened);
        let memory = DeviceMemory {
            gpu: Arc::clone(self),
            handle,
            base: base + offset.min(whole),
            len,
            _counter: counter,
        };
        match fits {
            true => Ok(memory),
            // Dropping it closes what was opened for it.
            false => Err(CudaError::Outside {
                start: offset,
                end,
                len: whole,
            }),
        }
    }

    /// Waits until the work before another process's event is done. `handle` is a
    /// `CUipcEventHandle`. Returns false as soon as `proceed` does, which is asked every
    /// millisecond or more often.
    ///
    /// # Errors
    /// [`CudaError::Call`] for a handle that the driver does not know, and for a broken GPU.
    pub fn wait_for(&self, handle: &[u8; 64], proceed: &dyn Fn() -> bool) -> Result<bool> {
        self.device().context.bind()?;
        Event::open(handle)?.wait(proceed)
    }

    /// Copies all runs, as long as `proceed` returns true. Returns false after it did not.
    pub(crate) fn copy(
        &self,
        direction: Direction,
        runs: impl Iterator<Item = (u64, *mut u8, u64)>,
        proceed: &dyn Fn() -> bool,
    ) -> Result<bool> {
        let device = self.device();
        let hung = || CudaError::Hung {
            uuid: device.uuid.clone(),
            seconds: HUNG.as_secs(),
        };
        device.context.bind()?;
        let lane = match direction {
            Direction::Gather => &device.to_host,
            Direction::Scatter => &device.to_device,
        };
        let mut lane = loop {
            if device.is_hung.load(Ordering::Relaxed) {
                return Err(hung());
            }
            if !proceed() {
                return Ok(false);
            }
            if let Some(lane) = lane.try_lock_for(TURN) {
                break lane;
            }
        };
        if lane.is_none() {
            *lane = Some(Lane::new(direction)?);
        }
        let this = lane.as_mut().expect("made above");
        let pieces = runs.map(|(device, host, len)| Piece { device, host, len });
        let is_late = Cell::new(false);
        let late = || {
            is_late.set(true);
            device.is_hung.store(true, Ordering::Relaxed);
        };
        let copied = this.copy(pieces, &device.pinned, proceed, &|is_done| {
            lane::wait_for(is_done, &late)
        });
        if copied.is_err() {
            // The next copy begins with new objects of the driver.
            *lane = None;
        }
        if is_late.get() {
            // The copy ended after all, too late for its caller.
            device.is_hung.store(false, Ordering::Relaxed);
            return copied.and(Err(hung()));
        }
        copied
    }
}

/// Time for which a copy waits for another one in its direction, before it asks whether it is still
/// wanted.
const TURN: Duration = Duration::from_millis(20);

/// A range of another process's memory on a GPU.
#[derive(Debug)]
pub struct DeviceMemory {
    gpu: Arc<Gpu>,
    handle: [u8; 64],
    base: u64,
    len: u64,
    /// Counted off after the memory is closed.
    _counter: Option<StorageCounter>,
}

impl DeviceMemory {
    /// The GPU.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// First byte, as the GPU addresses it.
    pub(crate) fn base(&self) -> u64 {
        self.base
    }

    /// Number of bytes.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        let device = self.gpu.device();
        let mut opened = device.opened.lock();
        let Some(known) = opened.get_mut(&self.handle) else {
            return;
        };
        known.users -= 1;
        if known.users == 0 {
            // Where no context can be bound, the driver is beyond use.
            let _ = device.context.bind();
            driver::close_memory(known.base);
            opened.remove(&self.handle);
        }
    }
}
