//! Events that two processes share, and the order of work.

use lmc_fake_cuda::{Engine, Live, Machine};
use lmc_testkit::until;

use crate::cuda::{self, CudaContext};
use crate::program::{Program, handle, hear, hex, is_program, say};

const READY: cuda::Done = Ok(());
const NOT_READY: cuda::Done = Err(600);

#[test]
fn reader() {
    if !is_program() {
        return;
    }
    let _context = CudaContext::new(0).unwrap();
    let memory = cuda::open_memory(handle(&hear())).unwrap();
    let opened = handle(&hear());
    let event = cuda::open_event(opened).unwrap();
    let second = cuda::open_event(opened).unwrap();
    assert_ne!(event, second);
    assert_eq!(cuda::query_event(event), NOT_READY);
    let (stream, bytes) = (cuda::stream().unwrap(), cuda::pinned(4).unwrap());
    cuda::read_later(bytes, memory, stream).unwrap();
    cuda::synchronize(stream).unwrap();
    assert_eq!(*bytes, [1; 4]);
    bytes.fill(0);
    cuda::wait_event(stream, event).unwrap();
    cuda::read_later(bytes, memory, stream).unwrap();
    say("given");
    hear();
    assert_eq!(cuda::query_stream(stream), NOT_READY);
    assert_eq!(*bytes, [0; 4]);
    say("waiting");
    cuda::synchronize_event(second).unwrap();
    assert_eq!(cuda::query_event(event), READY);
    cuda::synchronize(stream).unwrap();
    assert_eq!(*bytes, [9; 4]);
    for event in [event, second] {
        cuda::destroy_event(event).unwrap();
    }
    assert_eq!(cuda::query_event(event), Err(400));
    assert_eq!(cuda::open_event([0x5a; 64]), Err(205));
    cuda::free_pinned(bytes).unwrap();
    cuda::close_memory(memory).unwrap();
    cuda::destroy_stream(stream).unwrap();
}

#[test]
fn a_stream_waits_for_what_another_process_recorded() {
    let machine = Machine::new();
    let engine = Engine::new(&machine, 0);
    let address = engine.allocate(&[1; 4]);
    let event = engine.event();
    assert!(event.is_ready());
    let stall = engine.stall();
    engine.write_later(address, &[9; 4]);
    event.record(&engine);
    let mut reader = Program::start(&machine, reader);
    reader.say(&hex(engine.handle(address).0));
    reader.say(&hex(event.handle()));
    assert_eq!(reader.hear(), "given");
    reader.say("");
    assert_eq!(reader.hear(), "waiting");
    assert_eq!(engine.read(address, 4), [1; 4]);
    drop(stall);
    reader.end(&machine);
}

#[test]
fn recorder() {
    if !is_program() {
        return;
    }
    let _context = CudaContext::new(0).unwrap();
    let stream = cuda::stream().unwrap();
    assert_eq!(cuda::event(4), Err(1));
    let local = cuda::event(2).unwrap();
    assert_eq!(cuda::event_handle(local), Err(400));
    let event = cuda::event(cuda::SHARED_EVENT).unwrap();
    assert_eq!(cuda::query_event(event), READY);
    let handle = cuda::event_handle(event).unwrap();
    assert_eq!(cuda::open_event(handle), Err(201));
    cuda::record(event, stream).unwrap();
    say(&hex(handle));
    hear();
    cuda::record(event, stream).unwrap();
    say("recorded again");
    hear();
}

/// The record of a killed process is never reached, and waits for it never end.
#[test]
fn an_event_of_a_killed_process_stays_pending() {
    let machine = Machine::new();
    let engine = Engine::new(&machine, 0);
    let mut recorder = Program::start(&machine, recorder);
    let event = engine.open_event(&handle(&recorder.hear()));
    until("the first record is reached", || event.is_ready());
    machine.hold(0);
    recorder.say("");
    assert_eq!(recorder.hear(), "recorded again");
    assert!(!event.is_ready());
    recorder.process.kill();
    machine.resume(0);
    let own = engine.record();
    engine.synchronize();
    assert!(own.is_ready() && !event.is_ready());
    // An engine that ends ends its waits as well.
    event.wait_in(&engine);
    drop(engine);
}

#[test]
fn copies() {
    if !is_program() {
        return;
    }
    let _context = CudaContext::new(0).unwrap();
    let stream = cuda::stream().unwrap();
    let event = cuda::event(2).unwrap();
    let memory = cuda::allocate(4).unwrap();
    let (from, to) = (cuda::pinned(4).unwrap(), cuda::pinned(4).unwrap());
    cuda::write_later(memory, from, stream).unwrap();
    cuda::synchronize(stream).unwrap();
    say("ready");
    hear();
    for round in 1..=9 {
        from.fill(round);
        cuda::write_later(memory, from, stream).unwrap();
        cuda::read_later(to, memory, stream).unwrap();
    }
    cuda::record(event, stream).unwrap();
    say("given");
    hear();
    assert_eq!(cuda::query_stream(stream), NOT_READY);
    assert_eq!(cuda::query_event(event), NOT_READY);
    assert_eq!(*to, [0; 4]);
    // The bytes are read when the copy is done, not when it is given.
    from.fill(10);
    say("changed");
    cuda::synchronize(stream).unwrap();
    assert_eq!(cuda::query_stream(stream), READY);
    assert_eq!(cuda::query_event(event), READY);
    assert_eq!(*to, [10; 4]);
}

/// Work goes on after the call that gave it; and what a context had is gone with its last release.
#[test]
fn work_of_a_device_that_is_held_waits() {
    let machine = Machine::new();
    let mut copies = Program::start(&machine, copies);
    assert_eq!(copies.hear(), "ready");
    let live = machine.live(copies.process.id());
    assert_eq!((live.streams, live.host_allocations), (1, 2));
    machine.hold(0);
    copies.say("");
    assert_eq!(copies.hear(), "given");
    copies.say("");
    assert_eq!(copies.hear(), "changed");
    machine.resume(0);
    copies.end(&machine);
}

#[test]
fn released() {
    if !is_program() {
        return;
    }
    let context = CudaContext::new(0).unwrap();
    let stream = cuda::stream().unwrap();
    let event = cuda::event(cuda::SHARED_EVENT).unwrap();
    say(&hex(cuda::event_handle(event).unwrap()));
    hear();
    cuda::record(event, stream).unwrap();
    drop(context);
    say("released");
    hear();
    let _context = CudaContext::new(0).unwrap();
    assert_eq!(cuda::synchronize(stream), Err(400));
    assert_eq!(cuda::query_event(event), Err(400));
    assert!(cuda::stream().is_ok());
}

#[test]
fn work_of_a_context_that_is_released_is_not_done() {
    let machine = Machine::new();
    let engine = Engine::new(&machine, 0);
    let mut released = Program::start(&machine, released);
    let event = engine.open_event(&handle(&released.hear()));
    machine.hold(0);
    released.say("");
    assert_eq!(released.hear(), "released");
    assert_eq!(machine.live(released.process.id()), Live::default());
    machine.resume(0);
    released.say("");
    released.end(&machine);
    assert!(!event.is_ready());
}
