//! The driver as one process sees it: contexts, and everything that belongs to them.

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use memmap2::{MmapMut, MmapRaw};
use parking_lot::{Mutex, RwLock};

use crate::ipc::{self, Handle};
use crate::memory::{self, Memory, Range};
use crate::shared::{Control, DEVICES, EventState, Kind, Record, SharedMapping};
use crate::stream::{Copy, End, Kernel, Stream, Work};
use crate::{Code, code::Done};

/// Bytes of memory that each device has.
pub(crate) const DEVICE_MEMORY: usize = 80 << 30;

/// `CU_STREAM_NON_BLOCKING`; only this flag of streams exists.
const NON_BLOCKING: u32 = 1;
/// `CU_EVENT_DISABLE_TIMING` and `CU_EVENT_INTERPROCESS`.
const DISABLE_TIMING: u32 = 2;
const INTERPROCESS: u32 = 4;

/// An object that is counted for as long as it exists.
#[derive(Debug)]
pub(crate) struct Count {
    record: Arc<SharedMapping<Record>>,
    kind: Kind,
    bytes: u64,
}

impl Count {
    fn of(driver: &Driver, kind: Kind, bytes: usize) -> Self {
        let (record, bytes) = (Arc::clone(&driver.record), bytes as u64);
        record.things[kind as usize].fetch_add(1, Ordering::SeqCst);
        record.bytes[kind as usize].fetch_add(bytes, Ordering::SeqCst);
        Self {
            record,
            kind,
            bytes,
        }
    }
}

impl Drop for Count {
    fn drop(&mut self) {
        let kind = self.kind as usize;
        self.record.things[kind].fetch_sub(1, Ordering::SeqCst);
        self.record.bytes[kind].fetch_sub(self.bytes, Ordering::SeqCst);
    }
}

/// An event, which lies in a file if it is for other processes too.
#[derive(Debug)]
pub(crate) struct Event {
    pub(crate) state: SharedMapping<EventState>,
    /// The handle for other processes; `None` also for events of other processes.
    handle: Option<Handle>,
    file: Option<PathBuf>,
}

impl Event {
    pub(crate) fn is_ready(&self) -> bool {
        let recorded = self.state.recorded.load(Ordering::SeqCst);
        self.state.reached.load(Ordering::SeqCst) >= recorded
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Some(file) = &self.file {
            let _ = fs::remove_file(file);
        }
    }
}

/// A primary context.
#[derive(Debug)]
pub(crate) struct Context {
    retained: usize,
    default_stream: Option<Arc<Stream>>,
    streams: HashMap<usize, (Arc<Stream>, Count)>,
    events: HashMap<usize, (Arc<Event>, Count)>,
    modules: HashMap<usize, (String, Count)>,
    functions: HashMap<usize, (usize, Kernel)>,
    _count: Count,
}

#[derive(Debug)]
pub(crate) struct Driver {
    folder: PathBuf,
    pub(crate) devices: usize,
    /// The owner of memory and events in handles.
    owner: ipc::Owner,
    /// Stays locked until the process ends.
    _lock: File,
    pub(crate) control: SharedMapping<Control>,
    pub(crate) record: Arc<SharedMapping<Record>>,
    /// Devices whose context has had a fault, which lasts until the process ends.
    pub(crate) faulty: [AtomicBool; DEVICES],
    contexts: [Mutex<Option<Context>>; DEVICES],
    pub(crate) memory: RwLock<Memory>,
    next: AtomicUsize,
}

impl Driver {
    /// Adds a process, or an engine with `pid` 0, to the users of the machine in `folder`.
    pub(crate) fn open(folder: &Path, devices: usize, pid: u32) -> io::Result<Arc<Self>> {
        fs::create_dir_all(folder)?;
        let owner = ipc::Owner::new(pid);
        let path = folder.join(owner.file());
        let hidden = path.with_extension("new");
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create_new(true);
        let file = file.open(&hidden)?;
        file.lock()?;
        let record = Arc::new(SharedMapping::of(&file)?);
        fs::rename(hidden, path)?;
        Ok(Arc::new(Self {
            folder: folder.to_owned(),
            devices: devices.min(DEVICES),
            owner,
            _lock: file,
            control: SharedMapping::open(&folder.join("control"))?,
            record,
            faulty: Default::default(),
            contexts: Default::default(),
            memory: RwLock::default(),
            // Smaller numbers are streams with a special meaning.
            next: AtomicUsize::new(0x1_0000),
        }))
    }

    fn number(&self) -> usize {
        self.next.fetch_add(0x10, Ordering::Relaxed)
    }

    pub(crate) fn healthy(&self, device: usize) -> Done {
        match self.faulty[device].load(Ordering::SeqCst) {
            true => Err(Code::ILLEGAL_ADDRESS),
            false => Ok(()),
        }
    }

    pub(crate) fn retain(&self, device: usize) -> Done {
        let mut context = self.contexts[device].lock();
        if context.is_none() {
            self.healthy(device)?;
        }
        let new = || Context {
            retained: 0,
            default_stream: None,
            streams: HashMap::new(),
            events: HashMap::new(),
            modules: HashMap::new(),
            functions: HashMap::new(),
            _count: Count::of(self, Kind::Context, 0),
        };
        context.get_or_insert_with(new).retained += 1;
        Ok(())
    }

    /// Releases a context. With the last release everything in it is freed, and work that has not
    /// begun is dropped.
    pub(crate) fn release(&self, device: usize) -> Done {
        let mut context = self.contexts[device].lock();
        let retained = context.as_mut().ok_or(Code::INVALID_CONTEXT)?;
        retained.retained -= 1;
        if retained.retained > 0 {
            return Ok(());
        }
        let Some(gone) = context.take() else {
            return Ok(());
        };
        let streams = gone.streams.values().map(|(stream, _)| stream);
        for stream in streams.chain(&gone.default_stream) {
            stream.end(self, End::AtOnce);
        }
        let mut memory = self.memory.write();
        memory.ranges.retain(|_, range| range.device != device);
        Ok(())
    }

    /// Uses the context of a device.
    pub(crate) fn with<T>(
        &self,
        device: usize,
        action: impl FnOnce(&mut Context) -> Done<T>,
    ) -> Done<T> {
        let mut context = self.contexts[device].lock();
        action(context.as_mut().ok_or(Code::CONTEXT_IS_DESTROYED)?)
    }

    pub(crate) fn create_stream(self: &Arc<Self>, device: usize, flags: u32) -> Done<usize> {
        if flags & !NON_BLOCKING != 0 {
            return Err(Code::INVALID_VALUE);
        }
        self.with(device, |context| {
            let number = self.number();
            let stream = Stream::start(self, device);
            let count = Count::of(self, Kind::Stream, 0);
            context.streams.insert(number, (stream, count));
            Ok(number)
        })
    }

    /// Returns a stream; 0, 1 and 2 are the default stream.
    pub(crate) fn stream(self: &Arc<Self>, device: usize, number: usize) -> Done<Arc<Stream>> {
        self.with(device, |context| {
            if number <= 2 {
                let default = &mut context.default_stream;
                let stream = default.get_or_insert_with(|| Stream::start(self, device));
                return Ok(Arc::clone(stream));
            }
            let stream = context.streams.get(&number).ok_or(Code::INVALID_HANDLE)?;
            Ok(Arc::clone(&stream.0))
        })
    }

    pub(crate) fn destroy_stream(&self, device: usize, number: usize) -> Done {
        self.with(device, |context| {
            let stream = context.streams.remove(&number);
            let (stream, _) = stream.ok_or(Code::INVALID_HANDLE)?;
            stream.end(self, End::Drained);
            Ok(())
        })
    }

    pub(crate) fn create_event(&self, device: usize, flags: u32) -> Done<usize> {
        let shared = flags & INTERPROCESS != 0;
        if shared && flags & DISABLE_TIMING == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let handle = shared.then(|| Handle::new(ipc::Kind::Event, self.owner, device, 0));
        let file = handle.as_ref().map(|it| self.folder.join(it.file()));
        let state = match &file {
            Some(file) => SharedMapping::open(file),
            None => SharedMapping::private(),
        };
        let event = Event {
            state: state.map_err(|_| Code::UNKNOWN)?,
            handle,
            file,
        };
        self.add_event(device, event)
    }

    fn add_event(&self, device: usize, event: Event) -> Done<usize> {
        self.with(device, |context| {
            let number = self.number();
            let count = Count::of(self, Kind::Event, 0);
            context.events.insert(number, (Arc::new(event), count));
            Ok(number)
        })
    }

    pub(crate) fn event(&self, device: usize, number: usize) -> Done<Arc<Event>> {
        self.with(device, |context| {
            let event = context.events.get(&number).ok_or(Code::INVALID_HANDLE)?;
            Ok(Arc::clone(&event.0))
        })
    }

    pub(crate) fn destroy_event(&self, device: usize, number: usize) -> Done {
        self.with(device, |context| {
            let event = context.events.remove(&number);
            event.map(drop).ok_or(Code::INVALID_HANDLE)
        })
    }

    pub(crate) fn event_handle(&self, device: usize, number: usize) -> Done<[u8; 64]> {
        let event = self.event(device, number)?;
        let handle = event.handle.as_ref().ok_or(Code::INVALID_HANDLE)?;
        Ok(handle.encode())
    }

    pub(crate) fn open_event(&self, device: usize, handle: &[u8; 64]) -> Done<usize> {
        let handle = Handle::decode(handle, ipc::Kind::Event).ok_or(Code::MAP_FAILED)?;
        if handle.owner == self.owner {
            return Err(Code::INVALID_CONTEXT);
        }
        let path = self.folder.join(handle.file());
        if !path.exists() || !handle.owner.is_alive(&self.folder) {
            return Err(Code::MAP_FAILED);
        }
        let event = Event {
            state: SharedMapping::open(&path).map_err(|_| Code::MAP_FAILED)?,
            handle: None,
            file: None,
        };
        self.add_event(device, event)
    }

    /// Records an event in a stream. The event is not ready from now on until the stream reaches
    /// it.
    pub(crate) fn record(&self, event: Arc<Event>, stream: &Stream) {
        let record = event.state.recorded.fetch_add(1, Ordering::SeqCst) + 1;
        stream.give(self, Work::Record { event, record });
    }

    /// Makes a stream wait for the latest record of an event.
    pub(crate) fn wait_event(&self, event: Arc<Event>, stream: &Stream) {
        let record = event.state.recorded.load(Ordering::SeqCst);
        stream.give(self, Work::Wait { event, record });
    }

    pub(crate) fn allocate(&self, device: usize, len: usize) -> Done<usize> {
        if len == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let used = self.record.bytes[Kind::Allocation as usize].load(Ordering::SeqCst);
        if len.saturating_add(used as usize) > DEVICE_MEMORY {
            return Err(Code::OUT_OF_MEMORY);
        }
        let handle = Handle::new(ipc::Kind::Memory, self.owner, device, len);
        let path = self.folder.join(handle.file());
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create_new(true).open(&path);
        let file = file.map_err(|_| Code::OUT_OF_MEMORY)?;
        file.set_len(len as u64).map_err(|_| Code::OUT_OF_MEMORY)?;
        let map = MmapRaw::map_raw(&file).map_err(|_| Code::OUT_OF_MEMORY)?;
        let start = map.as_mut_ptr().expose_provenance();
        let mut range = self.range(device, Kind::Allocation, start, len, Some(map));
        range.handle = Some(handle);
        range.file = Some(path);
        self.memory.write().ranges.insert(start, range);
        Ok(start)
    }

    fn range(
        &self,
        device: usize,
        kind: Kind,
        start: usize,
        len: usize,
        map: Option<MmapRaw>,
    ) -> Range {
        Range {
            start,
            len,
            device,
            kind,
            handle: None,
            opened: 1,
            file: None,
            _map: map,
            _count: Count::of(self, kind, len),
        }
    }

    /// Removes a range by its first address; returns `otherwise` if no range of that kind begins
    /// there.
    pub(crate) fn remove(&self, kind: Kind, start: usize, otherwise: Code) -> Done {
        let mut memory = self.memory.write();
        let range = memory.ranges.get_mut(&start).ok_or(otherwise)?;
        if range.kind != kind {
            return Err(otherwise);
        }
        range.opened -= 1;
        if range.opened == 0 {
            memory.ranges.remove(&start);
        }
        Ok(())
    }

    pub(crate) fn allocate_host(&self, device: usize, len: usize) -> Done<usize> {
        if len == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let map = MmapMut::map_anon(len).map_err(|_| Code::OUT_OF_MEMORY)?;
        let map = MmapRaw::from(map);
        let start = map.as_mut_ptr().expose_provenance();
        let range = self.range(device, Kind::HostAllocation, start, len, Some(map));
        self.memory.write().ranges.insert(start, range);
        Ok(start)
    }

    pub(crate) fn register(&self, device: usize, start: usize, len: usize) -> Done {
        if start == 0 || len == 0 || start.checked_add(len).is_none() {
            return Err(Code::INVALID_VALUE);
        }
        memory::populate(start, len)?;
        let mut memory = self.memory.write();
        let taken = memory.overlapping(start, len).next().map(Range::is_device);
        match taken {
            Some(true) => return Err(Code::INVALID_VALUE),
            Some(false) => return Err(Code::HOST_MEMORY_ALREADY_REGISTERED),
            None => {}
        }
        let range = self.range(device, Kind::Registration, start, len, None);
        memory.ranges.insert(start, range);
        Ok(())
    }

    /// Returns the handle of the process's own device memory that contains an address.
    pub(crate) fn memory_handle(&self, address: usize) -> Done<[u8; 64]> {
        let memory = self.memory.read();
        let range = memory.device(address, 1)?;
        let own = range.handle.as_ref().filter(|it| it.owner == self.owner);
        Ok(own.ok_or(Code::INVALID_VALUE)?.encode())
    }

    pub(crate) fn open_memory(&self, device: usize, handle: &[u8; 64]) -> Done<usize> {
        let handle = Handle::decode(handle, ipc::Kind::Memory).ok_or(Code::INVALID_VALUE)?;
        if handle.owner == self.owner {
            return Err(Code::INVALID_CONTEXT);
        }
        let mut memory = self.memory.write();
        let mut ranges = memory.ranges.values_mut();
        if let Some(range) = ranges.find(|range| range.handle.as_ref() == Some(&handle)) {
            range.opened += 1;
            return Ok(range.start);
        }
        if handle.device != device || !handle.owner.is_alive(&self.folder) {
            return Err(Code::INVALID_VALUE);
        }
        let mut options = OpenOptions::new();
        let path = self.folder.join(handle.file());
        let file = options.read(true).write(true).open(path);
        let file = file.map_err(|_| Code::INVALID_VALUE)?;
        if file.metadata().map_or(0, |metadata| metadata.len()) != handle.len as u64 {
            return Err(Code::INVALID_VALUE);
        }
        let map = MmapRaw::map_raw(&file).map_err(|_| Code::MAP_FAILED)?;
        let start = map.as_mut_ptr().expose_provenance();
        let mut range = self.range(device, Kind::Mapping, start, handle.len, Some(map));
        range.handle = Some(handle);
        memory.ranges.insert(start, range);
        Ok(start)
    }

    /// Copies between the host and a device. The caller waits unless the memory of the host is
    /// registered and the copy is asynchronous.
    pub(crate) fn copy(&self, stream: &Stream, copy: Copy, asynchronous: bool) -> Done {
        if copy.len == 0 {
            return Ok(());
        }
        let pinned = copy.check(&self.memory.read())?;
        let number = stream.give(self, Work::Copy { copy, pinned });
        match asynchronous && pinned {
            true => Ok(()),
            false => stream.wait_for(self, number),
        }
    }

    /// Returns the bytes at an address of device memory.
    pub(crate) fn read(&self, address: usize, len: usize) -> Done<Vec<u8>> {
        let memory = self.memory.read();
        memory.device(address, len)?;
        let mut bytes = vec![0; len];
        let to = bytes.as_mut_ptr().expose_provenance();
        // SAFETY: the range is mapped for as long as the lock is held.
        unsafe { memory::copy(address, to, len) };
        Ok(bytes)
    }

    pub(crate) fn write(&self, address: usize, bytes: &[u8]) -> Done {
        let memory = self.memory.read();
        memory.device(address, bytes.len())?;
        let from = bytes.as_ptr().expose_provenance();
        // SAFETY: the range is mapped for as long as the lock is held.
        unsafe { memory::copy(from, address, bytes.len()) };
        Ok(())
    }

    pub(crate) fn load_module(&self, device: usize, text: &str) -> Done<usize> {
        if !text.contains(".version") {
            return Err(Code::INVALID_IMAGE);
        }
        self.with(device, |context| {
            let number = self.number();
            let count = Count::of(self, Kind::Module, 0);
            context.modules.insert(number, (text.to_owned(), count));
            Ok(number)
        })
    }

    pub(crate) fn unload_module(&self, device: usize, number: usize) -> Done {
        self.with(device, |context| {
            let module = context.modules.remove(&number);
            context.functions.retain(|_, (module, _)| *module != number);
            module.map(drop).ok_or(Code::INVALID_HANDLE)
        })
    }

    pub(crate) fn function(&self, device: usize, module: usize, name: &str) -> Done<usize> {
        self.with(device, |context| {
            let (text, _) = context.modules.get(&module).ok_or(Code::INVALID_HANDLE)?;
            let names = text.split(".entry").skip(1).map(|rest| {
                let rest = rest.trim_start();
                let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_' && c != '$');
                &rest[..end.unwrap_or(rest.len())]
            });
            let known = Kernel::named(name).filter(|_| names.into_iter().any(|it| it == name));
            let kernel = known.ok_or(Code::NOT_FOUND)?;
            let number = self.number();
            context.functions.insert(number, (module, kernel));
            Ok(number)
        })
    }

    pub(crate) fn kernel(&self, device: usize, function: usize) -> Done<Kernel> {
        self.with(device, |context| {
            let function = context.functions.get(&function);
            Ok(function.ok_or(Code::INVALID_HANDLE)?.1)
        })
    }
}
