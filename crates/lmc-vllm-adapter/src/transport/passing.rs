//! Descriptors that go with bytes over a Unix socket (`SCM_RIGHTS`).

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use bytes::BytesMut;
use rustix::cmsg_space;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// `SO_PASSRIGHTS` of `asm-generic/socket.h`.
const SO_PASSRIGHTS: libc::c_int = 83;

/// Refuses descriptors that are sent to a Unix socket, or to the sockets that a listening socket
/// accepts.
///
/// A process that reads bytes without their descriptors closes the descriptors. Such a close may
/// wait, for a lingering socket or a file on a network.
///
/// # Errors
/// `ENOPROTOOPT` before Linux 6.16.
pub(super) fn refuse_descriptors(socket: impl AsFd) -> io::Result<()> {
    let off: libc::c_int = 0;
    // SAFETY: the kernel reads as many bytes as `off` has, which lives across the call.
    let result = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PASSRIGHTS,
            (&raw const off).cast(),
            size_of_val(&off) as libc::socklen_t,
        )
    };
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Sends bytes, and a descriptor with the first of them. Returns the number of bytes sent.
pub(crate) fn send_with(
    socket: impl AsFd,
    bytes: &[u8],
    descriptor: BorrowedFd<'_>,
) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = [descriptor];
    control.push(SendAncillaryMessage::ScmRights(&descriptors));
    let bytes = [IoSlice::new(bytes)];
    Ok(sendmsg(socket, &bytes, &mut control, SendFlags::NOSIGNAL)?)
}

/// Receives up to `most` bytes, and keeps at most one descriptor that came with them. Returns the
/// number of bytes.
pub(crate) fn receive_with(
    socket: impl AsFd,
    into: &mut BytesMut,
    most: usize,
    descriptor: &mut Option<OwnedFd>,
) -> io::Result<usize> {
    // The kernel closes descriptors that do not fit here.
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let filled = into.len();
    into.resize(filled + most, 0);
    let mut parts = [IoSliceMut::new(&mut into[filled..])];
    let received = recvmsg(socket, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC);
    into.truncate(filled + received.as_ref().map_or(0, |received| received.bytes));
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
            descriptors.for_each(|received| *descriptor = Some(received));
        }
    }
    Ok(received?.bytes)
}
