//! The system calls on sockets that neither std nor tokio offers.

use std::io;
use std::os::fd::RawFd;

/// Receives into a buffer.
pub(crate) fn receive_bytes(socket: RawFd, buffer: &mut [u8]) -> io::Result<usize> {
    // SAFETY: the kernel writes to the buffer, which is borrowed for the call.
    let received = unsafe { libc::recv(socket, buffer.as_mut_ptr().cast(), buffer.len(), 0) };
    usize::try_from(received).map_err(|_| io::Error::last_os_error())
}

/// Sends from a buffer.
pub(crate) fn send_bytes(socket: RawFd, buffer: &[u8]) -> io::Result<usize> {
    // SAFETY: the kernel reads the buffer, which is borrowed for the call.
    let sent = unsafe {
        libc::send(
            socket,
            buffer.as_ptr().cast(),
            buffer.len(),
            libc::MSG_NOSIGNAL,
        )
    };
    usize::try_from(sent).map_err(|_| io::Error::last_os_error())
}

/// Returns whether nothing more will arrive.
pub(crate) fn is_closed(socket: RawFd) -> bool {
    let mut byte = 0u8;
    let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
    // SAFETY: the kernel writes to the one byte, which lives through the call.
    let found = unsafe { libc::recv(socket, (&raw mut byte).cast(), 1, flags) };
    match found {
        0 => true,
        1.. => false,
        _ => io::Error::last_os_error().kind() != io::ErrorKind::WouldBlock,
    }
}

/// Sets `SO_RCVLOWAT`. Returns whether the kernel accepted it.
pub(super) fn set_low_water(socket: RawFd, bytes: u64) -> bool {
    let bytes = bytes.clamp(1, i32::MAX as u64) as libc::c_int;
    // SAFETY: the kernel reads the one number, which lives through the call.
    let set = unsafe {
        libc::setsockopt(
            socket,
            libc::SOL_SOCKET,
            libc::SO_RCVLOWAT,
            (&raw const bytes).cast(),
            size_of_val(&bytes) as libc::socklen_t,
        )
    };
    set == 0
}
