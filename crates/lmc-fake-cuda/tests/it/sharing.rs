//! Memory that two processes share.

use lmc_fake_cuda::{Engine, Machine};

use crate::cuda::{self, CudaContext};
use crate::program::{Program, handle, hear, hex, is_program, say};

#[test]
fn importer() {
    if !is_program() {
        return;
    }
    let _context = CudaContext::new(0).unwrap();
    let handle = handle(&hear());
    let address = cuda::open_memory(handle).unwrap();
    assert_eq!(cuda::open_memory(handle), Ok(address));
    assert_eq!(cuda::address_range(address + 70), Ok((address, 100)));
    assert_eq!(cuda::read(address, 100), Ok(vec![7; 100]));
    cuda::write(address + 50, &[8; 10]).unwrap();
    say("written");
    hear();
    // The exporter has freed the memory, or has ended.
    assert_eq!(cuda::read(address + 50, 10), Ok(vec![8; 10]));
    assert_eq!(cuda::read(address + 50, 51), Err(1));
    assert_eq!(cuda::close_memory(address + 1), Err(1));
    assert_eq!(cuda::close_memory(address), Ok(()));
    assert_eq!(cuda::read(address, 1), Ok(vec![7]));
    assert_eq!(cuda::close_memory(address), Ok(()));
    assert_eq!(cuda::close_memory(address), Err(1));
    assert_eq!(cuda::read(address, 1), Err(1));
    assert_eq!(cuda::open_memory(handle), Err(1));
    assert_eq!(cuda::open_memory([0; 64]), Err(1));
    assert_eq!(cuda::open_memory([0x5a; 64]), Err(1));
}

#[test]
fn memory_of_an_engine_in_the_test_is_mapped_until_the_last_close() {
    let machine = Machine::new();
    let engine = Engine::new(&machine, 0);
    let address = engine.allocate(&[7; 100]);
    let (handle, offset) = engine.handle(address + 3);
    assert_eq!(offset, 3);
    let mut importer = Program::start(&machine, importer);
    importer.say(&hex(handle));
    assert_eq!(importer.hear(), "written");
    assert_eq!(engine.read(address + 49, 12)[..2], [7, 8]);
    let live = machine.live(importer.process.id());
    assert_eq!((live.mappings, live.mapped_bytes), (1, 100));
    engine.free(address);
    importer.say("");
    importer.end(&machine);
}

#[test]
fn exporter() {
    if !is_program() {
        return;
    }
    let _context = CudaContext::new(0).unwrap();
    let address = cuda::allocate(100).unwrap();
    cuda::fill(address, 7, 100).unwrap();
    let handle = cuda::memory_handle(address).unwrap();
    assert_eq!(cuda::open_memory(handle), Err(201));
    say(&hex(handle));
    hear();
    panic!("the test kills it");
}

#[test]
fn memory_of_a_killed_process_stays_readable_where_it_is_mapped() {
    let machine = Machine::new();
    let mut exporter = Program::start(&machine, exporter);
    let mut importer = Program::start(&machine, importer);
    let handle = exporter.hear();
    importer.say(&handle);
    assert_eq!(importer.hear(), "written");
    exporter.process.kill();
    let pid = exporter.process.id();
    let killed = machine.processes().into_iter().find(|p| p.pid == pid);
    assert!(killed.is_some_and(|process| !process.is_alive && process.live.allocations == 1));
    importer.say("");
    importer.end(&machine);
}
