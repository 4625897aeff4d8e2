//! The driver as cudarc calls it, for programs that a test starts.

use cudarc::driver::sys::{self, CUresult};

pub(crate) use cudarc::driver::CudaContext;

/// Outcome of a call: the number of its error.
pub(crate) type Done<T = ()> = Result<T, u32>;

pub(crate) const NON_BLOCKING: u32 = 1;
pub(crate) const SHARED_EVENT: u32 = 6;

fn done<T>(result: CUresult, value: T) -> Done<T> {
    match result as u32 {
        0 => Ok(value),
        code => Err(code),
    }
}

/// Calls a function of the driver, whose results, if any, are written to the named variables.
macro_rules! call {
    ($name:ident($($argument:expr),*)) => {
        // SAFETY: pointers are those of living variables, or memory that the test has; and the fake
        // checks objects and addresses of devices.
        done(unsafe { sys::$name($($argument),*) }, ())
    };
}

pub(crate) fn stream() -> Done<sys::CUstream> {
    let mut stream = std::ptr::null_mut();
    call!(cuStreamCreate(&mut stream, NON_BLOCKING)).map(|()| stream)
}

pub(crate) fn destroy_stream(stream: sys::CUstream) -> Done {
    call!(cuStreamDestroy_v2(stream))
}

pub(crate) fn synchronize(stream: sys::CUstream) -> Done {
    call!(cuStreamSynchronize(stream))
}

pub(crate) fn query_stream(stream: sys::CUstream) -> Done {
    call!(cuStreamQuery(stream))
}

pub(crate) fn allocate(len: usize) -> Done<u64> {
    let mut address = 0;
    call!(cuMemAlloc_v2(&mut address, len)).map(|()| address)
}

pub(crate) fn free(address: u64) -> Done {
    call!(cuMemFree_v2(address))
}

pub(crate) fn fill(address: u64, value: u8, len: usize) -> Done {
    call!(cuMemsetD8_v2(address, value, len))
}

pub(crate) fn write(address: u64, bytes: &[u8]) -> Done {
    call!(cuMemcpyHtoD_v2(address, bytes.as_ptr().cast(), bytes.len()))
}

pub(crate) fn read(address: u64, len: usize) -> Done<Vec<u8>> {
    let mut bytes = vec![0; len];
    call!(cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), address, len)).map(|()| bytes)
}

/// Copies to the device; the host's memory has to stay until the stream is synchronized.
pub(crate) fn write_later(address: u64, bytes: &[u8], stream: sys::CUstream) -> Done {
    write_later_from(address, bytes.as_ptr(), bytes.len(), stream)
}

pub(crate) fn write_later_from(
    address: u64,
    from: *const u8,
    len: usize,
    stream: sys::CUstream,
) -> Done {
    call!(cuMemcpyHtoDAsync_v2(address, from.cast(), len, stream))
}

/// Copies from the device; the host's memory has to stay until the stream is synchronized.
pub(crate) fn read_later(bytes: &mut [u8], address: u64, stream: sys::CUstream) -> Done {
    let to = bytes.as_mut_ptr().cast();
    call!(cuMemcpyDtoHAsync_v2(to, address, bytes.len(), stream))
}

/// Allocates pinned memory, which lives until the context ends.
pub(crate) fn pinned(len: usize) -> Done<&'static mut [u8]> {
    let mut address = std::ptr::null_mut();
    call!(cuMemHostAlloc(&mut address, len, 0))?;
    // SAFETY: the driver has allocated `len` bytes of zeros, and no other slice of them exists.
    Ok(unsafe { std::slice::from_raw_parts_mut(address.cast(), len) })
}

pub(crate) fn free_pinned(bytes: &mut [u8]) -> Done {
    call!(cuMemFreeHost(bytes.as_mut_ptr().cast()))
}

pub(crate) fn register(address: *const u8, len: usize) -> Done {
    call!(cuMemHostRegister_v2(address.cast_mut().cast(), len, 0))
}

pub(crate) fn unregister(address: *const u8) -> Done {
    call!(cuMemHostUnregister(address.cast_mut().cast()))
}

pub(crate) fn memory_handle(address: u64) -> Done<[u8; 64]> {
    let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
    call!(cuIpcGetMemHandle(&mut handle, address)).map(|()| handle.reserved.map(|c| c as u8))
}

pub(crate) fn open_memory(handle: [u8; 64]) -> Done<u64> {
    let reserved = handle.map(|byte| byte as _);
    let (handle, mut address) = (sys::CUipcMemHandle { reserved }, 0);
    call!(cuIpcOpenMemHandle_v2(&mut address, handle, 1)).map(|()| address)
}

pub(crate) fn close_memory(address: u64) -> Done {
    call!(cuIpcCloseMemHandle(address))
}

pub(crate) fn address_range(address: u64) -> Done<(u64, usize)> {
    let (mut start, mut len) = (0, 0);
    call!(cuMemGetAddressRange_v2(&mut start, &mut len, address)).map(|()| (start, len))
}

pub(crate) fn event(flags: u32) -> Done<sys::CUevent> {
    let mut event = std::ptr::null_mut();
    call!(cuEventCreate(&mut event, flags)).map(|()| event)
}

pub(crate) fn record(event: sys::CUevent, stream: sys::CUstream) -> Done {
    call!(cuEventRecord(event, stream))
}

pub(crate) fn query_event(event: sys::CUevent) -> Done {
    call!(cuEventQuery(event))
}

pub(crate) fn synchronize_event(event: sys::CUevent) -> Done {
    call!(cuEventSynchronize(event))
}

pub(crate) fn destroy_event(event: sys::CUevent) -> Done {
    call!(cuEventDestroy_v2(event))
}

pub(crate) fn wait_event(stream: sys::CUstream, event: sys::CUevent) -> Done {
    call!(cuStreamWaitEvent(stream, event, 0))
}

pub(crate) fn event_handle(event: sys::CUevent) -> Done<[u8; 64]> {
    let mut handle = sys::CUipcEventHandle { reserved: [0; 64] };
    call!(cuIpcGetEventHandle(&mut handle, event)).map(|()| handle.reserved.map(|c| c as u8))
}

pub(crate) fn open_event(handle: [u8; 64]) -> Done<sys::CUevent> {
    let reserved = handle.map(|byte| byte as _);
    let (handle, mut event) = (sys::CUipcEventHandle { reserved }, std::ptr::null_mut());
    call!(cuIpcOpenEventHandle(&mut event, handle)).map(|()| event)
}

pub(crate) fn module(text: &std::ffi::CStr) -> Done<sys::CUmodule> {
    let mut module = std::ptr::null_mut();
    call!(cuModuleLoadData(&mut module, text.as_ptr().cast())).map(|()| module)
}

pub(crate) fn unload(module: sys::CUmodule) -> Done {
    call!(cuModuleUnload(module))
}

pub(crate) fn function(module: sys::CUmodule, name: &std::ffi::CStr) -> Done<sys::CUfunction> {
    let mut function = std::ptr::null_mut();
    call!(cuModuleGetFunction(&mut function, module, name.as_ptr())).map(|()| function)
}

/// Launches `lmc_copy_runs`.
pub(crate) fn launch(
    function: sys::CUfunction,
    mut runs: u64,
    mut count: u32,
    stream: sys::CUstream,
) -> Done {
    let mut arguments = [(&raw mut runs).cast(), (&raw mut count).cast()];
    let (all, none) = (arguments.as_mut_ptr(), std::ptr::null_mut());
    call!(cuLaunchKernel(
        function, 1, 1, 1, 32, 1, 1, 0, stream, all, none
    ))
}
