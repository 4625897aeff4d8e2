//! The kernel that has a twin, and faults of a context.

use cudarc::driver::CudaContext;
use lmc_fake_cuda::Machine;

use crate::cuda;
use crate::program::{Program, is_program};

const PTX: &std::ffi::CStr = c".version 8.0\n.target sm_80\n.visible .entry lmc_copy_runs(\n)\n\
    { ret; }\n.visible .entry another_kernel() { ret; }\n";

fn runs(runs: &[[u64; 3]]) -> Vec<u8> {
    runs.as_flattened()
        .iter()
        .flat_map(|n| n.to_ne_bytes())
        .collect()
}

#[test]
fn launches() {
    if !is_program() {
        return;
    }
    let _context = CudaContext::new(0).unwrap();
    assert_eq!(cuda::module(c".target sm_80"), Err(200));
    let module = cuda::module(PTX).unwrap();
    assert_eq!(cuda::function(module, c"lmc_copy"), Err(500));
    assert_eq!(cuda::function(module, c"another_kernel"), Err(500));
    let kernel = cuda::function(module, c"lmc_copy_runs").unwrap();
    let stream = cuda::stream().unwrap();

    let memory = cuda::allocate(100).unwrap();
    let list = cuda::allocate(72).unwrap();
    cuda::write(memory, &[1, 2, 3, 4, 5]).unwrap();
    let host = cuda::pinned(100).unwrap();
    host.fill(9);
    let copied = [
        [memory, host.as_ptr() as u64, 2],
        [memory + 2, memory + 90, 3],
        [host.as_ptr() as u64 + 50, memory + 50, 1],
    ];
    cuda::write(list, &runs(&copied)).unwrap();
    cuda::launch(kernel, list, 3, stream).unwrap();
    cuda::synchronize(stream).unwrap();
    assert_eq!(host[..3], [1, 2, 9]);
    assert_eq!(cuda::read(memory + 90, 3), Ok(vec![3, 4, 5]));
    assert_eq!(cuda::read(memory + 50, 2), Ok(vec![9, 0]));

    // Memory that is not registered.
    let pageable = [0; 4];
    let outside = [memory, pageable.as_ptr() as u64, 1];
    cuda::write(list, &runs(&[outside])).unwrap();
    cuda::launch(kernel, list, 1, stream).unwrap();
    assert_eq!(cuda::synchronize(stream), Err(700));
    assert_eq!(pageable, [0; 4]);
    assert_eq!(cuda::query_stream(stream), Err(700));
    assert_eq!(cuda::stream(), Err(700));
    assert_eq!(cuda::allocate(1), Err(700));
    assert_eq!(cuda::unload(module), Err(700));
    assert_eq!(cuda::read(memory, 1), Err(700));
}

#[test]
fn a_kernel_that_leaves_its_memory_breaks_the_context() {
    let machine = Machine::new();
    Program::start(&machine, launches).end(&machine);
}
