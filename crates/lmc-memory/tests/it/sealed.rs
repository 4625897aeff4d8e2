//! A pool in sealed memory is passed to another process by its descriptor: that process maps it,
//! reads and writes slots, and cannot cut it short.

use lmc_testkit::own_test;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::ptr;
use std::sync::Arc;

use lmc_memory::{ArenaConfig, ArenaError, Demand, MappedSegment, Pool, PoolConfig, SegmentError};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

const SOCKET_VARIABLE: &str = "LMC_TEST_SEALED";
const BYTES: usize = 4 << 20;

/// A buffer for one descriptor's control message, aligned as the kernel wants it.
#[repr(C, align(8))]
struct Control([u8; 64]);

fn message<'a>(part: &'a mut libc::iovec, control: &'a mut Control) -> libc::msghdr {
    // SAFETY: an all-zero message is valid: no name, no parts, no control data.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = part;
    message.msg_iovlen = 1;
    message.msg_control = control.0.as_mut_ptr().cast();
    message.msg_controllen = control.0.len();
    message
}

fn send_descriptor(socket: &UnixStream, fd: BorrowedFd<'_>) {
    let (mut byte, mut control) = (1u8, Control([0; 64]));
    let mut part = libc::iovec {
        iov_base: (&raw mut byte).cast(),
        iov_len: 1,
    };
    let mut message = message(&mut part, &mut control);
    let len = size_of::<RawFd>() as u32;
    // SAFETY: the control buffer has space for one descriptor, and all lives through the calls.
    let sent = unsafe {
        message.msg_controllen = libc::CMSG_SPACE(len) as usize;
        let header = libc::CMSG_FIRSTHDR(&message);
        (*header).cmsg_level = libc::SOL_SOCKET;
        (*header).cmsg_type = libc::SCM_RIGHTS;
        (*header).cmsg_len = libc::CMSG_LEN(len) as usize;
        libc::CMSG_DATA(header)
            .cast::<RawFd>()
            .write_unaligned(fd.as_raw_fd());
        libc::sendmsg(socket.as_raw_fd(), &message, 0)
    };
    assert_eq!(sent, 1, "{}", io::Error::last_os_error());
}

fn receive_descriptor(socket: &UnixStream) -> File {
    let (mut byte, mut control) = (0u8, Control([0; 64]));
    let mut part = libc::iovec {
        iov_base: (&raw mut byte).cast(),
        iov_len: 1,
    };
    let mut message = message(&mut part, &mut control);
    // SAFETY: the kernel fills the buffers, which live through the calls, and passes a
    // descriptor that has no other owner.
    unsafe {
        let received = libc::recvmsg(socket.as_raw_fd(), &mut message, libc::MSG_CMSG_CLOEXEC);
        assert_eq!(received, 1, "{}", io::Error::last_os_error());
        let header = libc::CMSG_FIRSTHDR(&message);
        assert!(!header.is_null(), "no descriptor came");
        File::from_raw_fd(libc::CMSG_DATA(header).cast::<RawFd>().read_unaligned())
    }
}

/// The other process. Runs nothing when the test suite calls it by itself.
#[test]
fn other_process() {
    let Some(path) = std::env::var_os(SOCKET_VARIABLE) else {
        return;
    };
    let mut socket = UnixStream::connect(path).expect("the first process listens");
    let file = receive_descriptor(&socket);
    for len in [0, BYTES as u64 / 2, BYTES as u64 * 2] {
        let cut = file.set_len(len).expect_err("it is sealed");
        assert_eq!(cut.raw_os_error(), Some(libc::EPERM), "{len}");
    }
    // SAFETY: no fixed address is asked for, so no existing mapping is touched.
    let base = unsafe {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        libc::mmap(
            ptr::null_mut(),
            BYTES,
            access,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            0,
        )
    };
    assert_ne!(base, libc::MAP_FAILED, "{}", io::Error::last_os_error());
    let base = base.cast::<u8>();
    let mut offsets = [0; 16];
    socket.read_exact(&mut offsets).expect("two offsets");
    let offset = |at: usize| {
        let bytes = offsets[at..at + 8].try_into().expect("eight bytes");
        u64::from_ne_bytes(bytes) as usize
    };
    for i in 0..100_000 {
        // SAFETY: both slots have this length and lie inside the mapping.
        unsafe {
            assert_eq!(base.add(offset(0) + i).read(), (i % 251) as u8);
            base.add(offset(8) + i).write((i % 241) as u8);
        }
    }
    socket.write_all(b"!").expect("the first process waits");
}

#[test]
fn sealed_memory_is_mapped_by_its_descriptor_and_cannot_be_cut() {
    let arena = ArenaConfig::sealed(BYTES).build().expect("4 MiB");
    let arena = Arc::new(arena);
    assert_eq!((arena.len(), arena.shared_name()), (BYTES, None));
    let pool = Pool::new(Arc::clone(&arena), PoolConfig::default()).expect("a pool");
    let (mut ours, mut theirs) = (
        pool.reserve(100_000).expect("an empty pool"),
        pool.reserve(100_000).expect("an empty pool"),
    );
    for (i, byte) in ours.bytes_mut().iter_mut().enumerate() {
        *byte = (i % 251) as u8;
    }
    let path = std::env::temp_dir().join(format!("lmc_test_sealed_{}", std::process::id()));
    let listener = UnixListener::bind(&path).expect("a short path");
    let mut child = own_test(other_process)
        .env(SOCKET_VARIABLE, &path)
        .spawn()
        .expect("the test starts itself");
    let (mut socket, _) = listener.accept().expect("the other process connects");
    std::fs::remove_file(&path).expect("it is ours");
    send_descriptor(
        &socket,
        arena.shared_file().expect("a sealed arena has one"),
    );
    let offsets = [ours.offset(), theirs.offset()].map(u64::to_ne_bytes);
    socket
        .write_all(&offsets.concat())
        .expect("the other process reads");
    let mut byte = [0];
    socket
        .read_exact(&mut byte)
        .expect("the other process found every byte");
    assert!(child.wait().expect("a child").success());
    let wrong = theirs.bytes_mut().iter().enumerate();
    assert!(wrong.into_iter().all(|(i, byte)| *byte == (i % 241) as u8));
    assert!(!arena.check_lost());
}

#[test]
fn huge_pages_behind_sealed_memory_are_an_error_or_a_note() {
    let sealed = || ArenaConfig::sealed(4096);
    let err = sealed().with_huge_pages(Demand::Required).build();
    assert!(matches!(err, Err(ArenaError::HugePages { .. })));
    let arena = sealed().with_huge_pages(Demand::Auto).build().unwrap();
    assert_eq!(arena.report().notes.len(), 1);
    assert!(arena.shared_file().is_some());
    assert!(
        ArenaConfig::anonymous(4096)
            .build()
            .unwrap()
            .shared_file()
            .is_none()
    );
}

fn memfd(len: u64, seals: SealFlags) -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = File::from(memfd_create(c"lmc-test", flags).expect("memory"));
    file.set_len(len).expect("memory");
    fcntl_add_seals(&file, seals).expect("it may be sealed");
    file.into()
}

#[test]
fn a_pool_is_mapped_from_its_descriptor_and_from_no_other() {
    let len = 2 * 4096;
    let sealed = SealFlags::SHRINK | SealFlags::GROW;
    MappedSegment::of_descriptor(memfd(len, sealed), None, len).expect("a sealed pool");

    let open = |path: &str| OwnedFd::from(File::open(path).expect("it is there"));
    let (pipe, _writer) = io::pipe().expect("a pipe");
    let (socket, _other) = UnixStream::pair().expect("a pair");
    let this = std::env::current_exe().expect("a path");
    let others = [
        open("/dev/null"),
        open("/dev/zero"),
        open("/proc/self/stat"),
        open("/"),
        open(this.to_str().expect("text")),
        pipe.into(),
        socket.into(),
    ];
    for other in others {
        let refused = MappedSegment::of_descriptor(other, None, len);
        assert!(
            matches!(refused, Err(SegmentError::NotShared { .. })),
            "{refused:?}"
        );
    }
    let folder = MappedSegment::of_descriptor(open("/dev/shm"), None, len);
    assert!(folder.is_err(), "{folder:?}");
    for seals in [SealFlags::empty(), SealFlags::SHRINK, SealFlags::GROW] {
        let refused = MappedSegment::of_descriptor(memfd(len, seals), None, len);
        assert!(
            matches!(refused, Err(SegmentError::Unsealed)),
            "{refused:?}"
        );
    }
    for size in [0, len - 1, len + 1, 2 * len] {
        let refused = MappedSegment::of_descriptor(memfd(size, sealed), None, len);
        let SegmentError::Size {
            expected, found, ..
        } = refused.expect_err("another size")
        else {
            panic!("{size}");
        };
        assert_eq!((expected, found), (len, size));
    }
    // A copy of the descriptor that may only read.
    let file = memfd(len, sealed);
    let read_only = open(&format!("/proc/self/fd/{}", file.as_raw_fd()));
    let refused = MappedSegment::of_descriptor(read_only, None, len);
    assert!(
        matches!(refused, Err(SegmentError::Open { .. })),
        "{refused:?}"
    );
}

/// A pool with a name, which stock clients need, cannot be sealed. Its descriptor gives what its name
/// gives: what is lost is noticed, and kills no process.
#[test]
fn a_pool_with_a_name_is_mapped_from_its_descriptor_and_a_cut_is_noticed() {
    let name = format!("lmc_test_passed_{}", std::process::id());
    let arena = ArenaConfig::shared(&name, BYTES).build().expect("memory");
    let name = arena.shared_name().expect("it has a name");
    let passed = || {
        let file = arena.shared_file().expect("it has a file");
        file.try_clone_to_owned().expect("a descriptor")
    };
    let unsealed = MappedSegment::of_descriptor(passed(), None, BYTES as u64);
    assert!(matches!(unsealed, Err(SegmentError::Unsealed)));
    let pool = MappedSegment::of_descriptor(passed(), Some(name), BYTES as u64).expect("the pool");
    // SAFETY: both are mappings of the same bytes, which nothing else touches meanwhile.
    unsafe {
        arena.base_ptr().add(4097).write(42);
        assert_eq!(pool.base_ptr().add(4097).read(), 42);
    }
    pool.check().expect("it is whole");
    File::from(passed()).set_len(4096).expect("not sealed");
    // SAFETY: inside the mapping; the page is gone, which the guard survives.
    assert_eq!(unsafe { pool.base_ptr().add(8192).read_volatile() }, 0);
    assert!(matches!(pool.check(), Err(SegmentError::Lost { .. })));
}
