//! The CUDA driver, loaded when the first engine with device memory registers. lmc is not linked to it.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::marker::PhantomData;
use std::ptr;
use std::thread;
use std::time::{Duration, Instant};

use cudarc::driver::sys::{self, CUresult, CUstreamCaptureMode};
use thiserror::Error;

/// The driver functions that are called. If one is missing, the driver is too old; without this check, the
/// bindings would panic at the first call.
pub(super) const FUNCTIONS: [&str; 34] = [
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuDeviceGet",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDeviceGetUuid_v2",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxRetain",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventQuery",
    "cuEventRecord",
    "cuGetErrorName",
    "cuInit",
    "cuIpcCloseMemHandle",
    "cuIpcOpenEventHandle",
    "cuIpcOpenMemHandle_v2",
    "cuLaunchKernel",
    "cuMemAlloc_v2",
    "cuMemFreeHost",
    "cuMemFree_v2",
    "cuMemGetAddressRange_v2",
    "cuMemHostAlloc",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamQuery",
    "cuThreadExchangeStreamCaptureMode",
];

/// Device memory that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CudaError {
    /// This host has no driver.
    #[error(
        "no CUDA driver was found: libcuda.so.1 belongs to the driver, and a container sees it \
         only when it is started with the host's GPUs"
    )]
    NoDriver,
    /// The driver lacks a function that is needed.
    #[error("the CUDA driver is too old: it has no {function}; driver 525 or later is needed")]
    Old {
        /// Name of the function.
        function: &'static str,
    },
    /// The driver sees no GPU with this id.
    #[error("GPU {uuid} is not visible to this process, which sees {visible}")]
    NotVisible {
        /// Id of the GPU, as given by the engine.
        uuid: String,
        /// Ids of the visible GPUs, for the message.
        visible: String,
    },
    /// A call of the driver failed.
    #[error("{call} failed: {name}")]
    Call {
        /// Name of the function.
        call: &'static str,
        /// Name of the error in the driver.
        name: String,
        /// Number of the error.
        code: u32,
    },
    /// The described range ends beyond the memory.
    #[error("bytes {start} to {end} lie outside of an allocation of {len} bytes")]
    Outside {
        /// First byte of the range.
        start: u64,
        /// First byte after the range.
        end: u64,
        /// Bytes of the allocation.
        len: u64,
    },
    /// The handle is open as memory of another engine, and the driver would return that engine's memory.
    #[error(
        "memory with the same handle is open for another engine, which may have ended: its memory is \
         closed within seconds, so register again"
    )]
    InUse,
    /// A copy on the device did not end in time; no more copies are made there until it does.
    #[error(
        "a copy on GPU {uuid} did not end within {seconds} s: no more copies are made there until \
         it does"
    )]
    Hung {
        /// Id of the GPU.
        uuid: String,
        /// Timeout of the copy.
        seconds: u64,
    },
}

pub(super) type Result<T, E = CudaError> = std::result::Result<T, E>;

/// Converts the result of a call to an error, if it failed.
fn check(call: &'static str, result: CUresult) -> Result<()> {
    if result == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut name: *const c_char = ptr::null();
    // SAFETY: the driver stores the address of a string that it never frees, or leaves null.
    unsafe { sys::cuGetErrorName(result, &mut name) };
    let name = if name.is_null() {
        format!("error {}", result as u32)
    } else {
        // SAFETY: as above.
        unsafe { CStr::from_ptr(name) }
            .to_string_lossy()
            .into_owned()
    };
    Err(CudaError::Call {
        call,
        name,
        code: result as u32,
    })
}

/// Returns the answer of a call that asks whether work has finished.
fn is_ready(call: &'static str, result: CUresult) -> Result<bool> {
    match result {
        CUresult::CUDA_ERROR_NOT_READY => Ok(false),
        result => check(call, result).map(|()| true),
    }
}

/// Calls a function of the driver.
macro_rules! call {
    ($function:ident($($argument:expr),* $(,)?)) => {
        check(
            stringify!($function),
            // SAFETY: `load` has found the function, and the enclosing function states or keeps
            // what the driver asks of its arguments.
            unsafe { sys::$function($($argument),*) },
        )
    };
}

/// Loads the driver. Later calls cost little.
///
/// # Errors
/// [`CudaError::NoDriver`], [`CudaError::Old`], or the driver's own error, for example that it sees no GPU.
pub(super) fn load() -> Result<()> {
    // SAFETY: looks for the library and runs its constructors, as any program with CUDA does.
    if !unsafe { sys::is_culib_present() } {
        return Err(CudaError::NoDriver);
    }
    // SAFETY: the library was found just now.
    let library = unsafe { sys::culib() };
    for function in FUNCTIONS {
        // SAFETY: the symbol is only looked for.
        let found = unsafe { library.get::<*const c_void>(function.as_bytes()) };
        if found.is_err() {
            return Err(CudaError::Old { function });
        }
    }
    call!(cuInit(0))
}

/// One GPU that the driver sees.
#[derive(Clone, Debug)]
pub(super) struct Gpu {
    pub(super) ordinal: c_int,
    /// Id in PyTorch's form: 8-4-4-4-12 hexadecimal digits.
    pub(super) uuid: String,
    pub(super) name: String,
}

/// Returns the GPUs that the driver sees. [`load`] must be called first, also for the functions below.
pub(super) fn gpus() -> Result<Vec<Gpu>> {
    let mut count = 0;
    call!(cuDeviceGetCount(&mut count))?;
    (0..count).map(gpu).collect()
}

fn gpu(ordinal: c_int) -> Result<Gpu> {
    let mut device = 0;
    call!(cuDeviceGet(&mut device, ordinal))?;
    let mut uuid = sys::CUuuid { bytes: [0; 16] };
    call!(cuDeviceGetUuid_v2(&mut uuid, device))?;
    let mut name = [0 as c_char; 128];
    call!(cuDeviceGetName(name.as_mut_ptr(), 127, device))?;
    // SAFETY: at most 127 bytes were written, and the last one is 0.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) };
    Ok(Gpu {
        ordinal: device,
        uuid: spell(uuid.bytes.map(|byte| byte as u8)),
        name: name.to_string_lossy().into_owned(),
    })
}

fn spell(uuid: [u8; 16]) -> String {
    let mut text = String::with_capacity(36);
    for (index, byte) in uuid.iter().enumerate() {
        if matches!(index, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

/// The primary context of a GPU, which all libraries of a process share. It takes several hundred megabytes
/// of the GPU's memory until it is dropped.
#[derive(Debug)]
pub(super) struct Context {
    context: sys::CUcontext,
    device: c_int,
}

// SAFETY: the driver's contexts may be used from any thread that enters them.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    pub(super) fn retain(gpu: &Gpu) -> Result<Self> {
        let mut context = ptr::null_mut();
        call!(cuDevicePrimaryCtxRetain(&mut context, gpu.ordinal))?;
        Ok(Self {
            context,
            device: gpu.ordinal,
        })
    }

    /// Makes this context the current one of the thread until the result is dropped; the thread may belong to
    /// an engine. During this time, a graph capture of another thread forbids no call of this thread.
    pub(super) fn enter(&self) -> Result<Entered> {
        let mut before = ptr::null_mut();
        call!(cuCtxGetCurrent(&mut before))?;
        call!(cuCtxSetCurrent(self.context))?;
        let mut entered = Entered {
            before,
            mode: None,
            _of_thread: PhantomData,
        };
        let relaxed = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        entered.mode = Some(exchange_capture_mode(relaxed)?);
        Ok(entered)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // An error is ignored: nothing can be done about a context that cannot be released.
        let _ = call!(cuDevicePrimaryCtxRelease_v2(self.device));
    }
}

fn exchange_capture_mode(mut mode: CUstreamCaptureMode) -> Result<CUstreamCaptureMode> {
    call!(cuThreadExchangeStreamCaptureMode(&mut mode))?;
    Ok(mode)
}

/// The thread's current context and capture mode. Dropping it restores the previous ones.
#[derive(Debug)]
pub(super) struct Entered {
    before: sys::CUcontext,
    mode: Option<CUstreamCaptureMode>,
    _of_thread: PhantomData<*mut ()>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        // An error is ignored: nothing can be done if the former state cannot be restored.
        if let Some(mode) = self.mode {
            let _ = exchange_capture_mode(mode);
        }
        let _ = call!(cuCtxSetCurrent(self.before));
    }
}

/// Opens the memory behind a handle of another process. Returns its first address and its size in bytes. The
/// caller must have entered a context, and must close the memory once.
pub(super) fn open_memory(handle: &[u8; 64]) -> Result<(u64, u64)> {
    let handle = sys::CUipcMemHandle {
        reserved: handle.map(|byte| byte as c_char),
    };
    let mut base = 0;
    let lazily = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
    call!(cuIpcOpenMemHandle_v2(&mut base, handle, lazily))?;
    let (mut start, mut len) = (0, 0);
    let measured = call!(cuMemGetAddressRange_v2(&mut start, &mut len, base));
    match measured {
        // A handle of memory inside a larger allocation opens at an offset from its start.
        Ok(()) => Ok((base, (len as u64).saturating_sub(base - start))),
        Err(error) => {
            close_memory(base);
            Err(error)
        }
    }
}

pub(super) fn close_memory(base: u64) {
    // An error is ignored: nothing can be done about memory that cannot be closed.
    let _ = call!(cuIpcCloseMemHandle(base));
}

/// An event: a point in a stream's work, in this process or another.
#[derive(Debug)]
pub(super) struct Event(sys::CUevent);

// SAFETY: events may be used from any thread that enters their context.
unsafe impl Send for Event {}
// SAFETY: as above, from several at a time.
unsafe impl Sync for Event {}

impl Event {
    pub(super) fn new() -> Result<Self> {
        let mut event = ptr::null_mut();
        let untimed = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        call!(cuEventCreate(&mut event, untimed))?;
        Ok(Self(event))
    }

    /// Opens an event of another process.
    pub(super) fn open(handle: &[u8; 64]) -> Result<Self> {
        let handle = sys::CUipcEventHandle {
            reserved: handle.map(|byte| byte as c_char),
        };
        let mut event = ptr::null_mut();
        call!(cuIpcOpenEventHandle(&mut event, handle))?;
        Ok(Self(event))
    }

    /// Records the end of the work that a stream has been given so far.
    ///
    /// # Safety
    /// `stream` is a `CUstream` of the current context, or 0 for the default stream of every context.
    pub(super) unsafe fn record(&self, stream: u64) -> Result<()> {
        let stream = ptr::with_exposed_provenance_mut(stream as usize);
        call!(cuEventRecord(self.0, stream))
    }

    /// Returns true once the work before the event is done. This never happens if the process that recorded
    /// the event was killed first. So no stream waits for an event of another process: a thread polls
    /// instead, until its time is over.
    pub(super) fn is_done(&self) -> Result<bool> {
        // SAFETY: the event exists until drop.
        is_ready("cuEventQuery", unsafe { sys::cuEventQuery(self.0) })
    }

    /// Waits until the work before the event is done. Returns false as soon as `proceed` returns false.
    pub(super) fn wait(&self, proceed: &dyn Fn() -> bool) -> Result<bool> {
        wait(&|| self.is_done(), &|_| proceed())
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // An error is ignored: nothing can be done about an event that cannot be destroyed.
        let _ = call!(cuEventDestroy_v2(self.0));
    }
}

/// Polls until work is done: at first without a pause, then with longer ones, up to a millisecond. Returns
/// false as soon as `go_on` returns false; `go_on` is given the time since the start.
pub(super) fn wait(
    is_done: &dyn Fn() -> Result<bool>,
    go_on: &dyn Fn(Duration) -> bool,
) -> Result<bool> {
    let since = Instant::now();
    while !is_done()? {
        let elapsed = since.elapsed();
        if !go_on(elapsed) {
            return Ok(false);
        }
        match elapsed.as_micros() {
            0..100 => thread::yield_now(),
            100..2_000 => thread::sleep(Duration::from_micros(20)),
            2_000..20_000 => thread::sleep(Duration::from_micros(200)),
            _ => thread::sleep(Duration::from_millis(1)),
        }
    }
    Ok(true)
}

/// Host memory allocated by the driver.
#[derive(Debug)]
pub(super) struct HostBuffer {
    pub(super) base: *mut u8,
}

// SAFETY: the buffer is memory with one owner at a time.
unsafe impl Send for HostBuffer {}

impl HostBuffer {
    pub(super) fn new(len: usize) -> Result<Self> {
        let mut base = ptr::null_mut();
        let portable = sys::CU_MEMHOSTALLOC_PORTABLE;
        call!(cuMemHostAlloc(&mut base, len, portable))?;
        Ok(Self { base: base.cast() })
    }
}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        // An error is ignored: nothing can be done about memory that cannot be freed.
        let _ = call!(cuMemFreeHost(self.base.cast()));
    }
}

/// Memory of the GPU, allocated by this process.
#[derive(Debug)]
pub(super) struct DeviceBuffer(pub(super) u64);

impl DeviceBuffer {
    pub(super) fn new(len: usize) -> Result<Self> {
        let mut base = 0;
        call!(cuMemAlloc_v2(&mut base, len))?;
        Ok(Self(base))
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        // An error is ignored: nothing can be done about memory that cannot be freed.
        let _ = call!(cuMemFree_v2(self.0));
    }
}

/// Registers host memory, so that the GPUs can access it.
///
/// # Safety
/// The range stays mapped until [`unregister`] is called for it, or until its context has ended.
pub(super) unsafe fn register(base: *mut u8, len: usize) -> Result<()> {
    let portable = sys::CU_MEMHOSTREGISTER_PORTABLE;
    call!(cuMemHostRegister_v2(base.cast(), len, portable))
}

pub(super) fn unregister(base: *mut u8) {
    // An error is ignored: nothing can be done about memory that cannot be unregistered.
    let _ = call!(cuMemHostUnregister(base.cast()));
}

/// One run of a copy, in the format of the kernel.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Run {
    pub(super) from: u64,
    pub(super) to: u64,
    pub(super) len: u64,
}

/// The kernel `lmc_copy_runs`, loaded on one GPU.
#[derive(Debug)]
pub(super) struct Kernel {
    module: sys::CUmodule,
    function: sys::CUfunction,
}

// SAFETY: modules may be used from any thread that enters their context.
unsafe impl Send for Kernel {}

impl Kernel {
    pub(super) fn load() -> Result<Self> {
        const TEXT: &str = concat!(include_str!("copy_runs.ptx"), "\0");
        let mut module = ptr::null_mut();
        call!(cuModuleLoadData(&mut module, TEXT.as_ptr().cast()))?;
        let mut this = Self {
            module,
            function: ptr::null_mut(),
        };
        let name = c"lmc_copy_runs".as_ptr();
        call!(cuModuleGetFunction(&mut this.function, module, name))?;
        Ok(this)
    }
}

impl Drop for Kernel {
    fn drop(&mut self) {
        // An error is ignored: nothing can be done about a module that cannot be unloaded.
        let _ = call!(cuModuleUnload(self.module));
    }
}

/// A stream: work on the GPU that is done in order.
#[derive(Debug)]
pub(super) struct Stream(sys::CUstream);

// SAFETY: streams may be used from any thread that enters their context.
unsafe impl Send for Stream {}

impl Stream {
    pub(super) fn new() -> Result<Self> {
        let mut stream = ptr::null_mut();
        let alone = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        call!(cuStreamCreate(&mut stream, alone))?;
        Ok(Self(stream))
    }

    /// Copies runs within the device's memory, with `blocks` thread blocks.
    ///
    /// # Safety
    /// Until the work is done, `runs` is in a [`HostBuffer`] and is not changed, and each run is in device
    /// memory on both sides.
    pub(super) unsafe fn copy_runs(
        &self,
        kernel: &Kernel,
        blocks: u32,
        runs: &[Run],
        table: &DeviceBuffer,
    ) -> Result<()> {
        let (from, bytes) = (runs.as_ptr().cast(), size_of_val(runs));
        call!(cuMemcpyHtoDAsync_v2(table.0, from, bytes, self.0))?;
        let (mut table, mut count) = (table.0, runs.len() as u32);
        let mut arguments = [
            ptr::from_mut(&mut table).cast::<c_void>(),
            ptr::from_mut(&mut count).cast(),
        ];
        call!(cuLaunchKernel(
            kernel.function,
            blocks,
            1,
            1,
            512,
            1,
            1,
            0,
            self.0,
            arguments.as_mut_ptr(),
            ptr::null_mut()
        ))
    }

    /// Copies bytes from the device to the host.
    ///
    /// # Safety
    /// Both ranges exist until the work is done, and nothing else uses the host range.
    pub(super) unsafe fn copy_to_host(&self, from: u64, to: *mut u8, len: usize) -> Result<()> {
        call!(cuMemcpyDtoHAsync_v2(to.cast(), from, len, self.0))
    }

    /// Copies bytes from the host to the device.
    ///
    /// # Safety
    /// Both ranges exist until the work is done, and nothing writes to the host range.
    pub(super) unsafe fn copy_to_device(&self, from: *const u8, to: u64, len: usize) -> Result<()> {
        call!(cuMemcpyHtoDAsync_v2(to, from.cast(), len, self.0))
    }

    /// Returns true once all the work is done.
    pub(super) fn is_idle(&self) -> Result<bool> {
        // SAFETY: the stream exists until drop.
        is_ready("cuStreamQuery", unsafe { sys::cuStreamQuery(self.0) })
    }

    /// Records the end of the work so far.
    pub(super) fn record(&self, done: &Event) -> Result<()> {
        call!(cuEventRecord(done.0, self.0))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // An error is ignored: nothing can be done about a stream that cannot be destroyed.
        let _ = call!(cuStreamDestroy_v2(self.0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_spelled_as_pytorch_does() {
        let bytes = [
            0x19, 0xd8, 0x2a, 0x72, 0x11, 0xd8, 0xb8, 0x96, 0x53, 0xd0, 0x54, 0xb5, 0xef, 0x82, 0,
            6,
        ];
        assert_eq!(spell(bytes), "19d82a72-11d8-b896-53d0-54b5ef820006");
    }
}
