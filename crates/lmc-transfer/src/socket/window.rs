//! The arena as a socket sees it: ranges of it go to the kernel and come from it, by address.
//!
//! All ranges are checked against the arena here, so nothing outside it is touched. Within the
//! arena, a call writes to slots that it holds reserved, and a peer names offsets that it was
//! given for writing. A peer is trusted with that: one that breaks the rule overwrites bytes that
//! a thread of this process may be reading as a slice. Most such writes are the kernel's, but
//! bytes that came in together with other frames are copied here ([`Window::put`]), which would be
//! a data race. So a channel is opened only to peers that may write anything in the arena.

use std::io;
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::Arc;

use lmc_memory::{Arena, checksum};

use super::frame::Segment;

#[derive(Debug, Clone)]
pub(super) struct Window(Arc<Arena>);

/// Bytes to be sent: of the sender's own scratch, or of the arena.
#[derive(Debug)]
pub(super) enum Part {
    Scratch(Range<usize>),
    Arena(Segment),
}

impl Part {
    fn len(&self) -> usize {
        match self {
            Self::Scratch(range) => range.len(),
            Self::Arena(segment) => segment.len as usize,
        }
    }
}

impl Window {
    pub(super) fn new(arena: Arc<Arena>) -> Self {
        Self(arena)
    }

    pub(super) fn arena(&self) -> &Arc<Arena> {
        &self.0
    }

    /// Whether a range lies inside.
    pub(super) fn contains(&self, segment: Segment) -> bool {
        let end = segment.offset.checked_add(segment.len);
        end.is_some_and(|end| end <= self.0.len() as u64)
    }

    /// First byte of a range.
    fn at(&self, segment: Segment) -> *mut u8 {
        assert!(
            self.contains(segment),
            "ranges are checked before they are used"
        );
        // SAFETY: the range was just checked to lie inside the arena's one mapping.
        unsafe { self.0.base_ptr().as_ptr().add(segment.offset as usize) }
    }

    fn bytes(&self, segment: Segment) -> &[u8] {
        let start = self.at(segment);
        // SAFETY: mapped for the arena's life and initialised (zero-filled). No thread of this
        // process writes to it: a slot that is read is not reserved, and peers name only ranges
        // that they may read (see the module). The slice is summed or copied and then dropped.
        unsafe { std::slice::from_raw_parts(start, segment.len as usize) }
    }

    /// Checksum of a range.
    pub(super) fn sum(&self, segment: Segment) -> u64 {
        checksum(self.bytes(segment))
    }

    /// Adds a copy of a range.
    pub(super) fn append(&self, segment: Segment, to: &mut Vec<u8>) {
        to.extend_from_slice(self.bytes(segment));
    }

    /// Copies bytes to the start of a range.
    pub(super) fn put(&self, segment: Segment, bytes: &[u8]) {
        assert!(bytes.len() as u64 <= segment.len, "no more than fits");
        let start = self.at(segment);
        // SAFETY: the range has room for the bytes, and they are the caller's own, so no part of
        // the arena. The range is of a reserved slot, by this process's own call or by the peer
        // that was given it for writing (see the module), so no thread has a slice of it.
        unsafe { start.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) }
    }

    /// Receives into a range and, when that is full, into the stash. Bytes that came in all.
    pub(super) fn receive(
        &self,
        socket: RawFd,
        segment: Segment,
        stash: &mut [u8],
    ) -> io::Result<usize> {
        let mut parts = [
            iovec(self.at(segment), segment.len as usize),
            iovec(stash.as_mut_ptr(), stash.len()),
        ];
        receive(socket, &mut parts)
    }

    /// Sends parts, without the bytes that went before. Bytes that went in all.
    pub(super) fn send(
        &self,
        socket: RawFd,
        scratch: &[u8],
        parts: &[Part],
        mut before: usize,
    ) -> io::Result<usize> {
        let mut list = Vec::with_capacity(parts.len());
        for part in parts {
            let skipped = before.min(part.len());
            before -= skipped;
            let start = match part {
                Part::Scratch(range) => scratch[range.clone()].as_ptr().cast_mut(),
                Part::Arena(segment) => self.at(*segment),
            };
            if skipped < part.len() {
                let start = start.wrapping_add(skipped);
                list.push(iovec(start, part.len() - skipped));
            }
        }
        // SAFETY: an all-zero message is valid: no name, no parts, no control data.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = list.as_mut_ptr();
        message.msg_iovlen = list.len() as _;
        // SAFETY: the parts lie in `scratch` or in the arena, both of which live through the
        // call; the kernel only reads them.
        let sent = unsafe { libc::sendmsg(socket, &message, libc::MSG_NOSIGNAL) };
        usize::try_from(sent).map_err(|_| io::Error::last_os_error())
    }
}

/// Receives into a buffer.
pub(super) fn receive_bytes(socket: RawFd, buffer: &mut [u8]) -> io::Result<usize> {
    receive(socket, &mut [iovec(buffer.as_mut_ptr(), buffer.len())])
}

/// Sets an option of a socket (`SO_…`) that is a number of bytes; whether it could be set.
pub(super) fn set_bytes(socket: RawFd, option: libc::c_int, bytes: u64) -> bool {
    let bytes = bytes.clamp(1, i32::MAX as u64) as libc::c_int;
    // SAFETY: the kernel reads the one number, which lives through the call.
    let set = unsafe {
        libc::setsockopt(
            socket,
            libc::SOL_SOCKET,
            option,
            (&raw const bytes).cast(),
            size_of_val(&bytes) as libc::socklen_t,
        )
    };
    set == 0
}

/// Whether nothing more will come.
pub(super) fn is_closed(socket: RawFd) -> bool {
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

/// Sends from a buffer.
pub(super) fn send_bytes(socket: RawFd, buffer: &[u8]) -> io::Result<usize> {
    // SAFETY: the kernel reads the buffer, which lives through the call.
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

fn iovec(start: *mut u8, len: usize) -> libc::iovec {
    libc::iovec {
        iov_base: start.cast(),
        iov_len: len,
    }
}

/// The parts are ranges of the arena that were checked, or borrowed mutably by the caller.
fn receive(socket: RawFd, parts: &mut [libc::iovec]) -> io::Result<usize> {
    // SAFETY: an all-zero message is valid: no name, no parts, no control data.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = parts.as_mut_ptr();
    message.msg_iovlen = parts.len() as _;
    // SAFETY: the kernel writes to the parts, all of which are valid for that and live through
    // the call: see above.
    let received = unsafe { libc::recvmsg(socket, &mut message, 0) };
    usize::try_from(received).map_err(|_| io::Error::last_os_error())
}
