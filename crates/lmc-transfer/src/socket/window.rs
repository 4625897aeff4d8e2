//! The arena as a socket uses it: ranges are passed to the kernel by address.
//!
//! All ranges are checked against the arena here, so nothing outside it is touched. Within the
//! arena, this process reads from slots that are sealed and pinned, and receives into slots that
//! are reserved and pinned: by its own calls, or by a lease. Only an open arena
//! ([`crate::ChannelConfig::open_arena`]) lets peers name other ranges. A peer that breaks the
//! rules there overwrites bytes that a thread of this process may be reading as a slice; most
//! such writes are the kernel's, but bytes that came in together with other frames are copied
//! here ([`Window::put`]), which would be a data race. So an arena is opened only to peers that
//! are trusted like this process.

use std::io;
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::Arc;

use lmc_memory::{Arena, PartedChecksum, checksum};

use crate::lease::Segment;
#[cfg(feature = "nixl")]
use crate::nixl::Block;
use crate::session::Sealer;

#[derive(Debug, Clone)]
pub(super) struct Window(Arc<Arena>);

/// The checksum of a range that arrives in pieces.
#[derive(Debug, Default)]
pub(super) struct Parted {
    sum: PartedChecksum,
    /// Bytes that were added.
    len: u64,
}

/// Bytes to be sent: of the sender's own buffer, or of the arena.
#[derive(Debug)]
pub(super) enum SendPart {
    Scratch(Range<usize>),
    Arena(Segment),
}

impl SendPart {
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

    /// Returns whether a range lies inside the arena.
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
        // process writes to it: the range is of a sealed slot that is pinned, or of a slot that was
        // just filled (see the module). The slice is summed or copied and then dropped.
        unsafe { std::slice::from_raw_parts(start, segment.len as usize) }
    }

    /// Checksum of a range.
    pub(super) fn sum(&self, segment: Segment) -> u64 {
        checksum(self.bytes(segment))
    }

    /// Adds a piece of a range to the range's checksum. Returns the checksum with the last piece;
    /// `None` before, and where the pieces cannot be added.
    pub(super) fn add_to(&self, piece: Segment, sum: &mut Parted, is_last: bool) -> Option<u64> {
        let bytes = self.bytes(piece);
        if is_last {
            let Parted { sum, len } = std::mem::take(sum);
            let can_end = len == 0 || bytes.len() >= PartedChecksum::PART;
            return can_end.then(|| sum.end(bytes));
        }
        sum.sum.add(bytes);
        sum.len += piece.len;
        None
    }

    /// Adds a copy of a range.
    pub(super) fn append(&self, segment: Segment, to: &mut Vec<u8>) {
        to.extend_from_slice(self.bytes(segment));
    }

    /// Appends the sealed form of a range.
    pub(super) fn seal(&self, segment: Segment, sealer: &mut Sealer, to: &mut Vec<u8>) {
        sealer.seal(self.bytes(segment), to);
    }

    /// Copies bytes to the start of a range.
    pub(super) fn put(&self, segment: Segment, bytes: &[u8]) {
        assert!(bytes.len() as u64 <= segment.len, "no more than fits");
        let start = self.at(segment);
        // SAFETY: the bytes fit into the range, and they are the caller's own, so no part of the
        // arena. The range is of a reserved slot, of this process's own call or of a lease that
        // allows writing (see the module), so no thread has a slice of it.
        unsafe { start.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) }
    }

    /// Copies bytes of a block, starting at an offset, to a piece of a range, and adds them to the
    /// range's checksum, as [`Self::add_to`] does.
    #[cfg(feature = "nixl")]
    pub(super) fn land(
        &self,
        piece: Segment,
        (block, offset): (&Block, u64),
        sum: &mut Parted,
        is_last: bool,
    ) -> Option<u64> {
        let from = block.at(offset, piece.len);
        let (to, len) = (self.at(piece), piece.len as usize);
        let can_end = sum.len == 0 || len >= PartedChecksum::PART;
        // SAFETY: both ranges were just checked, and lie in two mappings, which live through the
        // call. The piece is of a reserved slot of this process's own call, so no thread has a
        // slice of it. No slice of the block is ever made: a peer that breaks the rules may write
        // to it meanwhile, by its network card or by UCX's thread here. That only garbles bytes:
        // the checksum is of the copy.
        unsafe {
            if is_last {
                let Parted { sum, .. } = std::mem::take(sum);
                if can_end {
                    return Some(sum.end_copy(from, to, len));
                }
                to.copy_from_nonoverlapping(from, len);
            } else {
                sum.sum.add_copy(from, to, len);
                sum.len += piece.len;
            }
        }
        None
    }

    /// Receives into a range and, when the range is full, into the stash. Returns the bytes
    /// received.
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

    /// Sends parts, except the `before` bytes that were sent earlier. Returns the bytes sent.
    pub(super) fn send(
        &self,
        socket: RawFd,
        scratch: &[u8],
        parts: &[SendPart],
        mut before: usize,
    ) -> io::Result<usize> {
        let mut list = Vec::with_capacity(parts.len());
        for part in parts {
            let skipped = before.min(part.len());
            before -= skipped;
            let start = match part {
                SendPart::Scratch(range) => scratch[range.clone()].as_ptr().cast_mut(),
                SendPart::Arena(segment) => self.at(*segment),
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

fn iovec(start: *mut u8, len: usize) -> libc::iovec {
    libc::iovec {
        iov_base: start.cast(),
        iov_len: len,
    }
}

/// Receives into parts: ranges of the arena that were checked, or buffers that the caller borrows
/// mutably.
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
