//! The functions of `libcuda.so`, as programs call them.

#![allow(non_snake_case, reason = "the names of the CUDA driver API are given")]

use std::cell::Cell;
use std::ffi::{CStr, OsString, c_char, c_int, c_uint, c_void};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};

use crate::driver::{DEVICE_MEMORY, Driver};
use crate::shared::{FUNCTIONS, Kind};
use crate::stream::{Copy, Direction, Kernel, Work};
use crate::{Code, DEVICES_VARIABLE, FOLDER_VARIABLE, code::Done};

/// An object of the driver: its number as an address, or the start of device memory.
type Object = usize;

/// `CUipcMemHandle` and `CUipcEventHandle`.
#[repr(C)]
struct IpcHandle([u8; 64]);

/// The context of device 0; that of device 1 is one more.
const CONTEXT: Object = 0xc0_0000;

/// The version that the fake reports: 12.8.
const VERSION: c_int = 12_080;

/// The driver of this process, if the variables name a machine.
static DRIVER: LazyLock<Option<Arc<Driver>>> = LazyLock::new(|| {
    let folder: OsString = std::env::var_os(FOLDER_VARIABLE)?;
    let devices = std::env::var(DEVICES_VARIABLE).ok();
    let devices = devices.and_then(|text| text.parse().ok()).unwrap_or(1);
    Driver::open(Path::new(&folder), devices, std::process::id()).ok()
});

static INITIALIZED: AtomicBool = AtomicBool::new(false);

/// Functions that work before `cuInit`.
const EARLY: [&str; 2] = ["cuInit", "cuDriverGetVersion"];

thread_local! {
    /// The device whose context is current.
    static CURRENT: Cell<Option<usize>> = const { Cell::new(None) };
    /// `CUstreamCaptureMode` of the thread: the calls that captures of other threads forbid.
    /// Nothing is captured here.
    static MODE: Cell<c_int> = const { Cell::new(0) };
}

/// Returns the number of a function.
///
/// # Panics
/// If the fake has no such function.
pub(crate) fn index(name: &str) -> usize {
    let index = NAMES.iter().position(|known| *known == name);
    index.unwrap_or_else(|| panic!("the fake has no function {name}; it has {NAMES:?}"))
}

/// Counts a call, and carries it out unless it is set to fail.
fn call(name: &str, body: impl FnOnce(&Arc<Driver>) -> Done) -> c_uint {
    let Some(driver) = &*DRIVER else {
        return match name {
            "cuInit" => Code::NO_DEVICE.0,
            _ => Code::NOT_INITIALIZED.0,
        };
    };
    let index = index(name);
    driver.record.calls[index].fetch_add(1, Ordering::SeqCst);
    if let Some(code) = driver.control.failure(index) {
        return code.0;
    }
    if !INITIALIZED.load(Ordering::SeqCst) && !EARLY.contains(&name) {
        return Code::NOT_INITIALIZED.0;
    }
    body(driver).map_or_else(|code| code.0, |()| 0)
}

/// Returns the device of the current context, which exists and has had no fault.
fn current(driver: &Driver) -> Done<usize> {
    let device = CURRENT.get().ok_or(Code::INVALID_CONTEXT)?;
    driver.with(device, |_| driver.healthy(device))?;
    Ok(device)
}

fn device(driver: &Driver, ordinal: c_int) -> Done<usize> {
    let ordinal = usize::try_from(ordinal).map_err(|_| Code::INVALID_DEVICE)?;
    let known = ordinal < driver.devices;
    known.then_some(ordinal).ok_or(Code::INVALID_DEVICE)
}

/// Writes a result.
///
/// # Safety
/// `to` is null, or can be written.
unsafe fn put<T>(to: *mut T, value: T) -> Done {
    if to.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    // SAFETY: the caller's promise.
    unsafe { to.write(value) };
    Ok(())
}

/// Reads a text.
///
/// # Safety
/// `text` is null, or ends with a zero byte.
unsafe fn text<'a>(text: *const c_char) -> Done<&'a str> {
    if text.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    // SAFETY: the caller's promise.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map_err(|_| Code::INVALID_IMAGE)
}

fn uuid(device: usize) -> [u8; 16] {
    let mut bytes = *b"lmc-fake-cuda--0";
    bytes[15] += device as u8;
    bytes
}

/// Returns an attribute of each device, `CUdevice_attribute`.
fn attribute(which: c_int, device: usize) -> Done<c_int> {
    Ok(match which {
        // Threads of a block; dimensions of a block.
        1..=3 => 1024,
        4 => 64,
        // Dimensions of a grid.
        5 => c_int::MAX,
        6 | 7 => 65_535,
        // Threads of a warp, multiprocessors, copy engines.
        10 => 32,
        16 => 132,
        40 => 3,
        // Memory of the host can be mapped, addresses are unified, registered memory is used by the
        // address that the host has; streams are concurrent; events can be shared.
        15 | 19 | 31 | 41 | 91 | 99 | 125 => 1,
        33 => 1 + device as c_int,
        // Compute capability 9.0.
        75 => 9,
        ..=0 | 151.. => return Err(Code::INVALID_VALUE),
        _ => 0,
    })
}

macro_rules! functions {
    ($(fn $name:ident($driver:ident $(, $argument:ident: $type:ty)*) $body:block)*) => {
        /// Functions that can be counted and made to fail.
        pub(crate) const NAMES: &[&str] = &[$(stringify!($name)),*];

        $(#[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($argument: $type),*) -> c_uint {
            call(stringify!($name), |$driver| {
                // SAFETY: the caller passes pointers as the driver API requires.
                #[allow(unused_unsafe, reason = "not every function has pointers")]
                unsafe { $body }
            })
        })*
    };
}

const _: () = assert!(NAMES.len() <= FUNCTIONS, "Record has too few counters");

functions! {
    fn cuInit(driver, flags: c_uint) {
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        if driver.devices == 0 {
            return Err(Code::NO_DEVICE);
        }
        INITIALIZED.store(true, Ordering::SeqCst);
        Ok(())
    }
    fn cuDriverGetVersion(_driver, version: *mut c_int) {
        put(version, VERSION)
    }
    fn cuDeviceGetCount(driver, count: *mut c_int) {
        put(count, driver.devices as c_int)
    }
    fn cuDeviceGet(driver, to: *mut c_int, ordinal: c_int) {
        device(driver, ordinal)?;
        put(to, ordinal)
    }
    fn cuDeviceGetName(driver, name: *mut c_char, len: c_int, ordinal: c_int) {
        let device = device(driver, ordinal)?;
        if name.is_null() || len <= 0 {
            return Err(Code::INVALID_VALUE);
        }
        let text = format!("lmc fake device {device}");
        let text = &text.as_bytes()[..text.len().min(len as usize - 1)];
        name.cast::<u8>().copy_from_nonoverlapping(text.as_ptr(), text.len());
        put(name.add(text.len()), 0)
    }
    fn cuDeviceGetUuid(driver, to: *mut [u8; 16], ordinal: c_int) {
        put(to, uuid(device(driver, ordinal)?))
    }
    fn cuDeviceGetUuid_v2(driver, to: *mut [u8; 16], ordinal: c_int) {
        put(to, uuid(device(driver, ordinal)?))
    }
    fn cuDeviceGetAttribute(driver, value: *mut c_int, which: c_int, ordinal: c_int) {
        put(value, attribute(which, device(driver, ordinal)?)?)
    }
    fn cuDevicePrimaryCtxRetain(driver, context: *mut Object, ordinal: c_int) {
        let device = device(driver, ordinal)?;
        put(context, CONTEXT + device)?;
        driver.retain(device)
    }
    fn cuDevicePrimaryCtxRelease_v2(driver, ordinal: c_int) {
        driver.release(device(driver, ordinal)?)
    }
    fn cuCtxSetCurrent(driver, context: Object) {
        if context == 0 {
            CURRENT.set(None);
            return Ok(());
        }
        let device = context.checked_sub(CONTEXT).ok_or(Code::INVALID_CONTEXT)?;
        if device >= driver.devices {
            return Err(Code::INVALID_CONTEXT);
        }
        driver.with(device, |_| Ok(()))?;
        CURRENT.set(Some(device));
        Ok(())
    }
    fn cuCtxGetCurrent(_driver, context: *mut Object) {
        put(context, CURRENT.get().map_or(0, |device| CONTEXT + device))
    }
    fn cuThreadExchangeStreamCaptureMode(_driver, mode: *mut c_int) {
        if !(0..=2).contains(&*mode) {
            return Err(Code::INVALID_VALUE);
        }
        *mode = MODE.replace(*mode);
        Ok(())
    }
    fn cuStreamCreate(driver, stream: *mut Object, flags: c_uint) {
        put(stream, driver.create_stream(current(driver)?, flags)?)
    }
    fn cuStreamDestroy_v2(driver, stream: Object) {
        driver.destroy_stream(current(driver)?, stream)
    }
    fn cuStreamSynchronize(driver, stream: Object) {
        driver.stream(current(driver)?, stream)?.wait_for_all(driver)
    }
    fn cuStreamQuery(driver, stream: Object) {
        driver.stream(current(driver)?, stream)?.query(driver)
    }
    fn cuStreamWaitEvent(driver, stream: Object, event: Object, _flags: c_uint) {
        let stream = driver.stream(current(driver)?, stream)?;
        driver.wait_event(driver.event(current(driver)?, event)?, &stream);
        Ok(())
    }
    fn cuMemAlloc_v2(driver, address: *mut Object, len: usize) {
        put(address, driver.allocate(current(driver)?, len)?)
    }
    fn cuMemFree_v2(driver, address: Object) {
        current(driver)?;
        driver.remove(Kind::Allocation, address, Code::INVALID_VALUE)
    }
    fn cuMemGetInfo_v2(driver, free: *mut usize, total: *mut usize) {
        current(driver)?;
        let used = driver.record.bytes[Kind::Allocation as usize].load(Ordering::SeqCst);
        put(free, DEVICE_MEMORY - used as usize)?;
        put(total, DEVICE_MEMORY)
    }
    fn cuMemHostAlloc(driver, address: *mut Object, len: usize, _flags: c_uint) {
        put(address, driver.allocate_host(current(driver)?, len)?)
    }
    fn cuMemFreeHost(driver, address: Object) {
        current(driver)?;
        driver.remove(Kind::HostAllocation, address, Code::INVALID_VALUE)
    }
    fn cuMemHostRegister_v2(driver, address: Object, len: usize, _flags: c_uint) {
        driver.register(current(driver)?, address, len)
    }
    fn cuMemHostUnregister(driver, address: Object) {
        let missing = Code::HOST_MEMORY_NOT_REGISTERED;
        current(driver)?;
        driver.remove(Kind::Registration, address, missing)
    }
    fn cuIpcGetMemHandle(driver, handle: *mut IpcHandle, address: Object) {
        current(driver)?;
        put(handle, IpcHandle(driver.memory_handle(address)?))
    }
    fn cuIpcOpenMemHandle_v2(driver, address: *mut Object, handle: IpcHandle, flags: c_uint) {
        if flags > 1 {
            return Err(Code::INVALID_VALUE);
        }
        put(address, driver.open_memory(current(driver)?, &handle.0)?)
    }
    fn cuIpcCloseMemHandle(driver, address: Object) {
        current(driver)?;
        driver.remove(Kind::Mapping, address, Code::INVALID_VALUE)
    }
    fn cuMemGetAddressRange_v2(driver, start: *mut Object, len: *mut usize, address: Object) {
        current(driver)?;
        let memory = driver.memory.read();
        let range = memory.device(address, 1)?;
        // Either may be null.
        let _ = put(start, range.start);
        let _ = put(len, range.len);
        Ok(())
    }
    fn cuIpcGetEventHandle(driver, handle: *mut IpcHandle, event: Object) {
        put(handle, IpcHandle(driver.event_handle(current(driver)?, event)?))
    }
    fn cuIpcOpenEventHandle(driver, event: *mut Object, handle: IpcHandle) {
        put(event, driver.open_event(current(driver)?, &handle.0)?)
    }
    fn cuEventCreate(driver, event: *mut Object, flags: c_uint) {
        put(event, driver.create_event(current(driver)?, flags)?)
    }
    fn cuEventRecord(driver, event: Object, stream: Object) {
        let stream = driver.stream(current(driver)?, stream)?;
        driver.record(driver.event(current(driver)?, event)?, &stream);
        Ok(())
    }
    fn cuEventQuery(driver, event: Object) {
        let ready = driver.event(current(driver)?, event)?.is_ready();
        ready.then_some(()).ok_or(Code::NOT_READY)
    }
    fn cuEventSynchronize(driver, event: Object) {
        let device = current(driver)?;
        let event = driver.event(device, event)?;
        driver.control.wait(|| event.is_ready() || driver.healthy(device).is_err());
        driver.healthy(device)
    }
    fn cuEventDestroy_v2(driver, event: Object) {
        driver.destroy_event(current(driver)?, event)
    }
    fn cuMemcpyHtoDAsync_v2(driver, to: Object, from: Object, len: usize, stream: Object) {
        let stream = driver.stream(current(driver)?, stream)?;
        let direction = Direction::ToDevice;
        driver.copy(&stream, Copy { from, to, len, direction }, true)
    }
    fn cuMemcpyDtoHAsync_v2(driver, to: Object, from: Object, len: usize, stream: Object) {
        let stream = driver.stream(current(driver)?, stream)?;
        let direction = Direction::ToHost;
        driver.copy(&stream, Copy { from, to, len, direction }, true)
    }
    fn cuMemcpyHtoD_v2(driver, to: Object, from: Object, len: usize) {
        let stream = driver.stream(current(driver)?, 0)?;
        let direction = Direction::ToDevice;
        driver.copy(&stream, Copy { from, to, len, direction }, false)
    }
    fn cuMemcpyDtoH_v2(driver, to: Object, from: Object, len: usize) {
        let stream = driver.stream(current(driver)?, 0)?;
        let direction = Direction::ToHost;
        driver.copy(&stream, Copy { from, to, len, direction }, false)
    }
    fn cuMemsetD8_v2(driver, to: Object, value: u8, len: usize) {
        let stream = driver.stream(current(driver)?, 0)?;
        driver.memory.read().device(to, len)?;
        let number = stream.give(driver, Work::Write { to, bytes: vec![value; len] });
        stream.wait_for(driver, number)
    }
    fn cuModuleLoadData(driver, module: *mut Object, image: *const c_char) {
        put(module, driver.load_module(current(driver)?, text(image)?)?)
    }
    fn cuModuleUnload(driver, module: Object) {
        driver.unload_module(current(driver)?, module)
    }
    fn cuModuleGetFunction(driver, function: *mut Object, module: Object, name: *const c_char) {
        put(function, driver.function(current(driver)?, module, text(name)?)?)
    }
    fn cuLaunchKernel(
        driver,
        function: Object,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        _shared_bytes: c_uint,
        stream: Object,
        arguments: *mut *mut c_void,
        extra: *mut *mut c_void
    ) {
        let stream = driver.stream(current(driver)?, stream)?;
        let Kernel::CopyRuns = driver.kernel(current(driver)?, function)?;
        let blocks = [grid_x, grid_y, grid_z];
        let threads = [block_x, block_y, block_z].map(u64::from);
        let of_block = threads.iter().product::<u64>();
        let empty = blocks.contains(&0) || of_block == 0;
        if empty || of_block > 1024 || arguments.is_null() || !extra.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        let runs = arguments.read().cast::<usize>().read();
        let count = arguments.add(1).read().cast::<u32>().read();
        stream.give(driver, Work::CopyRuns { runs, count });
        Ok(())
    }
}

/// Writes one of the texts of an error.
///
/// # Safety
/// `to` is null, or can be written.
unsafe fn put_text(code: c_uint, to: *mut *const c_char, name: bool) -> c_uint {
    let texts = Code(code).texts();
    let texts = texts.map(|(of_name, text)| if name { of_name } else { text });
    // SAFETY: the caller's promise.
    let put = unsafe { put(to, texts.map_or(std::ptr::null(), CStr::as_ptr)) };
    match texts.is_some() && put.is_ok() {
        true => 0,
        false => Code::INVALID_VALUE.0,
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorName(code: c_uint, to: *mut *const c_char) -> c_uint {
    // SAFETY: the pointer is as the driver API requires.
    unsafe { put_text(code, to, true) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorString(code: c_uint, to: *mut *const c_char) -> c_uint {
    // SAFETY: the pointer is as the driver API requires.
    unsafe { put_text(code, to, false) }
}
