//! Promises of README.md that are checked against any driver: the fake's in the gate, that of a GPU by
//! `cargo xtask test-gpu`. What other tests of the fake rely on was compared by hand.

#![allow(clippy::unwrap_used, reason = "each promise is a test")]

use std::env;

use cudarc::driver::{result, sys};
use lmc_fake_cuda::Machine;
use lmc_testkit::{own_test, until};

use crate::cuda::{self, CudaContext, Done};

/// Set where the driver of this host is to be checked.
const ON_GPU: &str = "LMC_TEST_GPU";
/// Names the promise that a process checks.
const PROMISE: &str = "LMC_TEST_PROMISE";

/// Each is checked in a process of its own: a context with a fault keeps it.
const PROMISES: [(&str, fn()); 8] = [
    ("contexts", contexts),
    ("flags of events", flags_of_events),
    ("a stream waits for an event", a_stream_waits_for_an_event),
    ("a stream that is destroyed", a_stream_that_is_destroyed),
    (
        "memory that is not registered",
        memory_that_is_not_registered,
    ),
    ("registrations", registrations),
    ("modules", modules),
    ("a context with a fault", a_context_with_a_fault),
];

#[test]
fn a_driver_keeps_its_promises() {
    let check = || {
        let mut failed = Vec::new();
        for (name, _) in PROMISES {
            let mut process = own_test(promise);
            let ended = process.env(PROMISE, name).output().unwrap();
            let text = String::from_utf8_lossy(&ended.stderr);
            match ended.status.success() {
                true => println!("\nok      promise: {name}"),
                false => {
                    println!("\nFAILED  promise: {name} {text}");
                    failed.push(name);
                }
            }
        }
        assert!(failed.is_empty(), "{failed:?}");
    };
    match env::var_os(ON_GPU) {
        Some(_) => check(),
        None => Machine::in_own_process(1, own_test(a_driver_keeps_its_promises), |_| check()),
    }
}

#[test]
fn promise() {
    let Some(wanted) = env::var_os(PROMISE) else {
        return;
    };
    let found = PROMISES.iter().find(|(name, _)| wanted == *name);
    found.expect("a promise").1();
}

const NOT_READY: Done = Err(600);

/// Work for some milliseconds.
fn keep_busy(stream: sys::CUstream) {
    const LEN: usize = 32 << 20;
    let (memory, host) = (cuda::allocate(LEN).unwrap(), cuda::pinned(LEN).unwrap());
    for _ in 0..16 {
        cuda::read_later(host, memory, stream).unwrap();
    }
}

fn contexts() {
    assert_eq!(cuda::stream(), Err(3));
    result::init().unwrap();
    assert_eq!(cuda::stream(), Err(201));
    let [first, second] = [(); 2].map(|()| CudaContext::new(0).unwrap());
    first.bind_to_thread().unwrap();
    drop(first);
    cuda::allocate(10).unwrap();
    drop(second);
    assert_eq!(cuda::allocate(10), Err(709));
}

fn flags_of_events() {
    let _context = CudaContext::new(0).unwrap();
    assert_eq!(cuda::event(4), Err(1));
    let local = cuda::event(2).unwrap();
    assert_eq!(cuda::event_handle(local), Err(400));
    assert_eq!(cuda::query_event(local), Ok(()));
    let shared = cuda::event(cuda::SHARED_EVENT).unwrap();
    cuda::event_handle(shared).unwrap();
}

fn a_stream_waits_for_an_event() {
    let _context = CudaContext::new(0).unwrap();
    let [first, second] = [(); 2].map(|()| cuda::stream().unwrap());
    let (memory, event) = (cuda::allocate(4).unwrap(), cuda::event(2).unwrap());
    let (from, to) = (cuda::pinned(4).unwrap(), cuda::pinned(4).unwrap());
    cuda::write(memory, &[1; 4]).unwrap();
    from.fill(9);
    keep_busy(first);
    cuda::write_later(memory, from, first).unwrap();
    cuda::record(event, first).unwrap();
    cuda::wait_event(second, event).unwrap();
    cuda::read_later(to, memory, second).unwrap();
    cuda::synchronize(second).unwrap();
    assert_eq!(*to, [9; 4]);
    assert_eq!(cuda::query_event(event), Ok(()));
}

fn a_stream_that_is_destroyed() {
    let _context = CudaContext::new(0).unwrap();
    let (stream, event) = (cuda::stream().unwrap(), cuda::event(2).unwrap());
    let (memory, to) = (cuda::allocate(4).unwrap(), cuda::pinned(4).unwrap());
    cuda::write(memory, &[9; 4]).unwrap();
    keep_busy(stream);
    cuda::read_later(to, memory, stream).unwrap();
    cuda::record(event, stream).unwrap();
    cuda::destroy_stream(stream).unwrap();
    until("the work is done", || cuda::query_event(event) != NOT_READY);
    assert_eq!(*to, [9; 4]);
}

fn memory_that_is_not_registered() {
    let _context = CudaContext::new(0).unwrap();
    let (stream, memory) = (cuda::stream().unwrap(), cuda::allocate(1 << 20).unwrap());
    let mut bytes = vec![9; 1 << 20];
    keep_busy(stream);
    cuda::write_later(memory, &bytes, stream).unwrap();
    bytes.fill(1);
    keep_busy(stream);
    cuda::read_later(&mut bytes, memory, stream).unwrap();
    assert!(bytes.iter().all(|&byte| byte == 9));
    assert_eq!(cuda::query_stream(stream), Ok(()));
}

fn registrations() {
    const PAGE: usize = 4096;
    let context = CudaContext::new(0).unwrap();
    let mut map = memmap2::MmapMut::map_anon(4 * PAGE).unwrap();
    map.fill(7);
    let at = |page: usize| map.as_ptr().wrapping_add(page * PAGE);
    cuda::register(at(0), PAGE).unwrap();
    cuda::register(at(1), PAGE).unwrap();
    assert_eq!(cuda::register(at(0), PAGE), Err(712));
    assert_eq!(cuda::register(at(1), 2 * PAGE), Err(712));
    let (memory, stream) = (cuda::allocate(4 * PAGE).unwrap(), cuda::stream().unwrap());
    let copy = |page, pages: usize| cuda::write_later_from(memory, at(page), pages * PAGE, stream);
    assert_eq!(copy(0, 1), Ok(()));
    assert_eq!(copy(0, 2), Err(1), "two registrations");
    assert_eq!(copy(1, 2), Err(1), "registered in part");
    assert_eq!(copy(2, 2), Ok(()));
    cuda::synchronize(stream).unwrap();
    assert_eq!(cuda::unregister(at(2)), Err(713));
    cuda::unregister(at(0)).unwrap();
    assert_eq!(cuda::unregister(at(0)), Err(713));
    // What is registered goes with the context.
    drop(context);
    let _context = CudaContext::new(0).unwrap();
    cuda::register(at(1), PAGE).unwrap();
}

/// The kernel of `lmc-memory`.
const PTX: &str = concat!(
    include_str!("../../../lmc-memory/src/cuda/copy_runs.ptx"),
    "\0"
);

fn kernel() -> sys::CUfunction {
    let text = std::ffi::CStr::from_bytes_with_nul(PTX.as_bytes()).unwrap();
    let module = cuda::module(text).unwrap();
    assert_eq!(cuda::function(module, c"lmc_copy"), Err(500));
    cuda::function(module, c"lmc_copy_runs").unwrap()
}

fn modules() {
    let _context = CudaContext::new(0).unwrap();
    assert_eq!(cuda::module(c".target sm_80"), Err(200));
    let (kernel, stream) = (kernel(), cuda::stream().unwrap());
    let (memory, list) = (cuda::allocate(100).unwrap(), cuda::allocate(24).unwrap());
    cuda::write(memory, &[1, 2, 3, 4, 5]).unwrap();
    let run = [memory, memory + 90, 5];
    let bytes = run.map(u64::to_ne_bytes).concat();
    cuda::write(list, &bytes).unwrap();
    cuda::launch(kernel, list, 1, stream).unwrap();
    cuda::synchronize(stream).unwrap();
    assert_eq!(cuda::read(memory + 90, 5), Ok(vec![1, 2, 3, 4, 5]));
}

fn a_context_with_a_fault() {
    let context = CudaContext::new(0).unwrap();
    let (kernel, stream) = (kernel(), cuda::stream().unwrap());
    let (memory, list) = (cuda::allocate(100).unwrap(), cuda::allocate(24).unwrap());
    let bytes = [8, memory, 4].map(u64::to_ne_bytes).concat();
    cuda::write(list, &bytes).unwrap();
    cuda::launch(kernel, list, 1, stream).unwrap();
    assert_eq!(cuda::synchronize(stream), Err(700));
    assert_eq!(cuda::query_stream(stream), Err(700));
    assert_eq!(cuda::stream(), Err(700));
    assert_eq!(cuda::allocate(1), Err(700));
    assert_eq!(cuda::read(memory, 1), Err(700));
    let again = CudaContext::new(0).unwrap();
    assert_eq!(cuda::allocate(1), Err(700));
    drop((context, again));
    let code = CudaContext::new(0)
        .map(drop)
        .map_err(|error| error.0 as u32);
    assert_eq!(code, Err(700));
}
