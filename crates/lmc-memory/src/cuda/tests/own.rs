//! An engine's own process: its tensors are memory of this process, and the pool is that of a server.

use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, mpsc};

use cudarc::driver::sys;

use lmc_fake_cuda::Code;

use super::*;
use crate::cuda::Registration;
use crate::cuda::driver::DeviceBuffer;
use crate::{CopyPool, MappedSegment};

/// Calls a function of the driver as an engine does.
macro_rules! call {
    ($function:ident($($argument:expr),*)) => {{
        // SAFETY: the driver was loaded before, and the arguments are of this test.
        let result = unsafe { sys::$function($($argument),*) };
        assert_eq!(result, sys::CUresult::CUDA_SUCCESS, stringify!($function));
    }};
}

/// Returns the address of the context that this thread's calls are for.
fn current() -> usize {
    let mut context = ptr::null_mut();
    call!(cuCtxGetCurrent(&mut context));
    context.addr()
}

/// An engine whose cache has the layout of a twin, with a stream that an event of the twin's holds.
struct Own {
    buffers: Vec<DeviceBuffer>,
    stream: sys::CUstream,
}

impl Own {
    /// Takes memory in the context of a device, which stays the thread's.
    fn new(device: i32, twin: &Twin) -> Self {
        let mut context = ptr::null_mut();
        call!(cuDevicePrimaryCtxRetain(&mut context, device));
        call!(cuCtxSetCurrent(context));
        let mut stream = ptr::null_mut();
        call!(cuStreamCreate(&mut stream, 1));
        let segments = twin.host.segments.iter();
        let buffer =
            |segment: &testing::Segment| DeviceBuffer::new(segment.mapped.len() as usize).unwrap();
        let buffers = segments.map(buffer).collect();
        Self { buffers, stream }
    }

    fn paged(&self, gpu: &Arc<Gpu>, twin: &Twin) -> PagedKv {
        let memory = |(buffer, segment): (&DeviceBuffer, &testing::Segment)| {
            // SAFETY: the buffers live as long as the test.
            Arc::new(unsafe { gpu.own_memory(buffer.0, segment.mapped.len()) })
        };
        let both = self.buffers.iter().zip(&twin.host.segments);
        let segments = KvSegments::Device(both.map(memory).collect());
        twin.open(segments, 4).unwrap()
    }

    /// Makes the stream wait for an event of another process.
    fn wait_for(&self, handle: [u8; 64]) {
        let handle = sys::CUipcEventHandle {
            reserved: handle.map(|byte| byte as std::ffi::c_char),
        };
        let mut event = ptr::null_mut();
        call!(cuIpcOpenEventHandle(&mut event, handle));
        call!(cuStreamWaitEvent(self.stream, event, 0));
    }

    /// Writes bytes when the stream comes to it.
    fn write_later(&self, number: usize, bytes: &[u8]) {
        let mut host = ptr::null_mut();
        call!(cuMemHostAlloc(&mut host, bytes.len(), 0));
        // SAFETY: as many bytes were allocated.
        unsafe {
            host.cast::<u8>()
                .copy_from_nonoverlapping(bytes.as_ptr(), bytes.len())
        };
        let to = self.buffers[number].0;
        call!(cuMemcpyHtoDAsync_v2(to, host, bytes.len(), self.stream));
    }
}

#[test]
fn an_engine_copies_its_own_memory_after_its_own_work() {
    with_machine(
        2,
        an_engine_copies_its_own_memory_after_its_own_work,
        |machine| {
            let arena = shared("own");
            touch(&arena, 1 << 20);
            let gpus = Gpus::without_pool();
            let gpu = gpus.open(UUIDS[1]).unwrap();
            assert_eq!(current(), 0, "the thread had no context");
            let twin = Twin::new(machine, 1);
            let own = Own::new(0, &twin);
            let other = current();
            drop(own);
            let own = Own::new(1, &twin);
            // As a thread that the engine uses for another GPU.
            let context = current();
            assert_ne!(context, other);

            let plan = plan(&own.paged(&gpu, &twin));
            let len = plan.chunk_bytes() as usize;
            let pool = CopyPool::new(0).unwrap();
            let mut wanted = vec![0; 3 * (13 + len)];
            let mut wanted = cut(&mut wanted, len, 3);
            let mut registrations = Vec::new();
            for round in 0..3 {
                let slot = map(&arena);
                // The first pool is not registered; the last is that of another server.
                if round > 0 {
                    registrations.push(register(&gpu, &slot));
                }
                let stall = twin.engine.stall();
                let event = twin.engine.record();
                own.wait_for(event.handle());
                for (number, segment) in twin.host.segments.iter().enumerate() {
                    let bytes = marked(round, segment.mapped.len() as usize);
                    segment.fill(&bytes);
                    own.write_later(number, &bytes);
                }
                // SAFETY: the stream lives as long as the test.
                let mark = unsafe { gpu.mark(own.stream.expose_provenance() as u64) }.unwrap();
                assert_eq!(current(), context, "a mark leaves the thread's context");
                assert!(!mark.wait(&|| false).unwrap(), "the stream is held");
                drop(stall);
                assert!(mark.wait(&|| true).unwrap());
                drop(mark);
                assert_eq!(current(), context);
                pool.gather(&plan_of_host(&twin), &mut wanted).unwrap();
                // SAFETY: the whole pool is this test's.
                let bytes =
                    unsafe { std::slice::from_raw_parts_mut(slot.base_ptr().as_ptr(), 900 << 10) };
                let mut chunks = cut(bytes, len, 3);
                pool.gather(&plan, &mut chunks).unwrap();
                assert!(chunks == wanted);
                assert_eq!(current(), context);
            }
            let held = live(machine);
            assert_eq!((held.mappings, held.registered_bytes), (0, 2 << 20));
            registrations.pop();
            gpus.wait_until_given_back();
            assert_eq!(live(machine).registered_bytes, 1 << 20);
            drop((plan, gpu, registrations));
            gpus.wait_until_given_back();
            let held = live(machine);
            assert_eq!((held.registrations, held.modules, held.streams), (0, 0, 2));
            arena.unlink();
        },
    );
}

/// The pool of a server, without pages.
fn shared(test: &str) -> Arena {
    let name = format!("lmc_test_{test}_{}", std::process::id());
    ArenaConfig::shared(&name, 1 << 20).build().unwrap()
}

/// Maps the pool of a server as its workers do.
fn map(arena: &Arena) -> Arc<MappedSegment> {
    let name = arena.shared_name().unwrap();
    Arc::new(MappedSegment::open_pool(name, 1 << 20).unwrap())
}

/// Writes to the first pages of an arena, as its owner does.
fn touch(arena: &Arena, len: usize) {
    arena.ensure(0, len as u64).unwrap();
    for at in (0..len).step_by(4096) {
        // SAFETY: the arena is longer.
        unsafe { arena.base_ptr().add(at).write_volatile(0) };
    }
}

fn plan_of_host(twin: &Twin) -> CopyPlan {
    plan(&twin.host.paged(4))
}

/// Registers a pool, and waits until all of it is.
fn register(gpu: &Gpu, pool: &Arc<MappedSegment>) -> Registration {
    let failed = |error| panic!("not registered: {error}");
    let registration = gpu.register(Arc::clone(pool), failed);
    until("the pool is registered", || registration.bytes() == 1 << 20);
    registration
}

#[test]
fn a_pool_that_is_dropped_under_a_copy_stays_registered_until_its_end() {
    with_machine(
        1,
        a_pool_that_is_dropped_under_a_copy_stays_registered_until_its_end,
        |machine| {
            let arena = shared("dropped");
            touch(&arena, 1 << 20);
            let slot = map(&arena);
            let gpus = Gpus::without_pool();
            let gpu = gpus.open(UUIDS[0]).unwrap();
            let twin = Twin::new(machine, 0);
            let plan = plan(&twin.paged(&gpu, 4));
            let len = plan.chunk_bytes() as usize;
            let registration = Mutex::new(Some(register(&gpu, &slot)));
            // SAFETY: the whole pool is this test's.
            let bytes =
                unsafe { std::slice::from_raw_parts_mut(slot.base_ptr().as_ptr(), 900 << 10) };
            let mut chunks = cut(bytes, len, 3);
            let pool = CopyPool::new(0).unwrap();
            // Asked before the second launch, while the first is under way.
            let asked = AtomicUsize::new(0);
            let drop_it = || {
                if asked.fetch_add(1, Ordering::Relaxed) == 2 {
                    drop(registration.lock().unwrap().take());
                }
                true
            };
            while_held(machine, || pool.gather_while(&plan, &mut chunks, &drop_it))
                .unwrap()
                .unwrap();
            assert!(registration.lock().unwrap().is_none());
            until("it is given back", || live(machine).registered_bytes == 0);
            arena.unlink();
        },
    );
}

#[test]
fn a_pool_that_cannot_be_registered_is_named_once() {
    with_machine(
        1,
        a_pool_that_cannot_be_registered_is_named_once,
        |machine| {
            let arena = shared("unregistered");
            touch(&arena, 1 << 20);
            let gpus = Gpus::without_pool();
            let gpu = gpus.open(UUIDS[0]).unwrap();
            machine.fail_after("cuMemHostRegister_v2", 2, Code::OUT_OF_MEMORY);
            let (send, named) = mpsc::channel();
            let registration = gpu.register(map(&arena), move |error| {
                send.send(error.to_string()).unwrap();
            });
            let named: Vec<String> = named.iter().collect();
            assert_eq!(
                named,
                ["cuMemHostRegister_v2 failed: CUDA_ERROR_OUT_OF_MEMORY"]
            );
            assert_eq!(registration.bytes(), 32 << 10);
            arena.unlink();
        },
    );
}

/// A server that gets its pages in the background.
#[test]
fn a_pool_is_registered_as_its_owner_gets_its_pages() {
    with_machine(1, a_pool_is_registered_as_its_owner_gets_its_pages, |_| {
        let arena = shared("pages");
        let gpus = Gpus::without_pool();
        let gpu = gpus.open(UUIDS[0]).unwrap();
        let registration = gpu.register(map(&arena), |error| panic!("{error}"));
        assert_eq!(registration.bytes(), 0);
        touch(&arena, 40 << 10);
        until("two pieces are registered", || {
            registration.bytes() == 32 << 10
        });
        touch(&arena, 1 << 20);
        until("all is registered", || registration.bytes() == 1 << 20);
        arena.unlink();
    });
}
