//! Memory of the host: registered or not.

use std::fs::File;
use std::thread;

use lmc_fake_cuda::Machine;
use lmc_testkit::{Folder, own_test, until};

use crate::cuda::{self, CudaContext};
use crate::program::{Program, is_program};

const PAGE: usize = 4096;

#[test]
fn registrations() {
    if !is_program() {
        return;
    }
    let context = CudaContext::new(0).unwrap();
    let memory = cuda::allocate(4 * PAGE).unwrap();
    let stream = cuda::stream().unwrap();
    let folder = Folder::temporary();
    let mut options = File::options();
    let file = options.read(true).write(true).create_new(true);
    let file = file.open(folder.join("file")).unwrap();
    file.set_len(4 * PAGE as u64).unwrap();
    let mut map = memmap2::MmapOptions::new();
    let map = map.len(8 * PAGE).map_raw(&file).unwrap();
    let start = map.as_ptr();

    // Two pages and the page after them; the fourth is not registered.
    assert_eq!(cuda::register(start, 2 * PAGE), Ok(()));
    assert_eq!(cuda::register(start, 2 * PAGE), Err(712));
    assert_eq!(cuda::register(start.wrapping_add(PAGE), 2 * PAGE), Err(712));
    assert_eq!(cuda::register(start.wrapping_add(2 * PAGE), PAGE), Ok(()));
    assert_eq!(
        cuda::register(start.wrapping_add(3 * PAGE), 2 * PAGE),
        Err(1)
    );
    assert_eq!(cuda::unregister(start.wrapping_add(PAGE)), Err(713));
    assert_eq!(cuda::register(memory as *const u8, PAGE), Err(1));

    let copy = |page: usize, pages: usize| {
        let from = start.wrapping_add(page * PAGE);
        cuda::write_later_from(memory, from, pages * PAGE, stream)
    };
    assert_eq!(copy(0, 2), Ok(()));
    assert_eq!(copy(1, 2), Err(1));
    assert_eq!(copy(2, 2), Err(1));
    // Memory that is not registered at all.
    assert_eq!(copy(3, 1), Ok(()));
    cuda::synchronize(stream).unwrap();

    assert_eq!(cuda::unregister(start), Ok(()));
    assert_eq!(cuda::unregister(start), Err(713));
    assert_eq!(copy(0, 2), Ok(()));
    assert_eq!(cuda::write(memory + 3, &[1, 2, 3]), Ok(()));
    assert_eq!(cuda::read(memory + 4, 2), Ok(vec![2, 3]));
    assert_eq!(
        cuda::write(memory + 4 * PAGE as u64 - 2, &[1, 2, 3]),
        Err(1)
    );
    assert_eq!(cuda::write(8, &[1]), Err(1));
    assert_eq!(
        context.mem_get_info(),
        Ok(((80 << 30) - 4 * PAGE, 80 << 30))
    );
    assert_eq!(cuda::free(memory + 1), Err(1));
    assert_eq!(cuda::free(memory), Ok(()));
    assert_eq!(cuda::free(memory), Err(1));
}

#[test]
fn memory_is_registered_once_and_copied_as_a_whole() {
    let machine = Machine::new();
    Program::start(&machine, registrations).end(&machine);
}

/// Memory that work needs, and that is given back before the work is done, is a fault.
#[test]
fn early_unregister() {
    if !is_program() {
        return;
    }
    let _context = CudaContext::new(0).unwrap();
    let memory = cuda::allocate(PAGE).unwrap();
    let stream = cuda::stream().unwrap();
    let bytes = vec![1; PAGE];
    cuda::register(bytes.as_ptr(), PAGE).unwrap();
    crate::program::say("ready");
    crate::program::hear();
    cuda::write_later(memory, &bytes, stream).unwrap();
    cuda::unregister(bytes.as_ptr()).unwrap();
    crate::program::say("unregistered");
    assert_eq!(cuda::synchronize(stream), Err(700));
}

#[test]
fn memory_that_is_unregistered_under_a_copy_is_a_fault() {
    let machine = Machine::new();
    let mut program = Program::start(&machine, early_unregister);
    assert_eq!(program.hear(), "ready");
    machine.hold(0);
    program.say("");
    assert_eq!(program.hear(), "unregistered");
    machine.resume(0);
    program.end(&machine);
}

#[test]
fn memory_may_be_registered_while_a_copy_of_it_waits() {
    let test = own_test(memory_may_be_registered_while_a_copy_of_it_waits);
    Machine::in_own_process(1, test, |machine| {
        let context = CudaContext::new(0).unwrap();
        let memory = cuda::allocate(PAGE).unwrap();
        let map = memmap2::MmapMut::map_anon(PAGE).unwrap();
        machine.hold(0);
        thread::scope(|scope| {
            let copy = scope.spawn(|| {
                context.bind_to_thread().unwrap();
                let stream = cuda::stream().unwrap();
                cuda::write_later_from(memory, map.as_ptr(), PAGE, stream).unwrap();
                cuda::synchronize(stream).unwrap();
                cuda::destroy_stream(stream).unwrap();
            });
            until("the copy waits", || {
                machine.calls("cuMemcpyHtoDAsync_v2") > 0
            });
            cuda::register(map.as_ptr(), PAGE).unwrap();
            machine.resume(0);
            copy.join().unwrap();
        });
        cuda::unregister(map.as_ptr()).unwrap();
        cuda::free(memory).unwrap();
    });
}
