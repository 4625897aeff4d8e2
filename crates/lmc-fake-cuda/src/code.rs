//! Result codes of the driver API.

use std::ffi::CStr;

/// A result code of the CUDA driver API, `CUresult`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Code(pub u32);

/// Outcome of a call.
pub(crate) type Done<T = ()> = Result<T, Code>;

macro_rules! codes {
    ($($name:ident = $number:literal $text:literal)*) => {
        impl Code {
            $(#[doc = concat!("`CUDA_ERROR_", stringify!($name), "`: ", $text, ".")]
            pub const $name: Self = Self($number);)*

            /// Returns the name and the description of an error.
            pub(crate) fn texts(self) -> Option<(&'static CStr, &'static CStr)> {
                let texts = match self.0 {
                    0 => ("CUDA_SUCCESS\0", "no error\0"),
                    $($number => (
                        concat!("CUDA_ERROR_", stringify!($name), "\0"),
                        concat!($text, "\0"),
                    ),)*
                    _ => return None,
                };
                let text = |text: &'static str| CStr::from_bytes_with_nul(text.as_bytes()).ok();
                Some((text(texts.0)?, text(texts.1)?))
            }
        }
    };
}

codes! {
    INVALID_VALUE = 1 "invalid argument"
    OUT_OF_MEMORY = 2 "out of memory"
    NOT_INITIALIZED = 3 "initialization error"
    NO_DEVICE = 100 "no CUDA-capable device is detected"
    INVALID_DEVICE = 101 "invalid device ordinal"
    INVALID_CONTEXT = 201 "invalid device context"
    MAP_FAILED = 205 "mapping of buffer object failed"
    INVALID_IMAGE = 200 "device kernel image is invalid"
    INVALID_HANDLE = 400 "invalid resource handle"
    NOT_FOUND = 500 "named symbol not found"
    NOT_READY = 600 "device not ready"
    ILLEGAL_ADDRESS = 700 "an illegal memory access was encountered"
    CONTEXT_IS_DESTROYED = 709 "context is destroyed"
    HOST_MEMORY_ALREADY_REGISTERED = 712 "part or all of the requested memory range is already mapped"
    HOST_MEMORY_NOT_REGISTERED = 713 "pointer does not correspond to a registered memory region"
    UNKNOWN = 999 "unknown error"
}
