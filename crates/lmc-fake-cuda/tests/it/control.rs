//! Faults, counts, devices.

use std::process::Stdio;

use cudarc::driver::{CudaContext, DriverError, result, sys};
use lmc_fake_cuda::{Code, Engine, Live, Machine};
use lmc_testkit::own_test;

use crate::cuda;
use crate::program::{Program, hear, is_program, say};

#[test]
fn devices() {
    if !is_program() {
        return;
    }
    assert_eq!(cuda::stream(), Err(3));
    result::init().unwrap();
    assert_eq!(cuda::stream(), Err(201));
    assert_eq!(CudaContext::device_count(), Ok(2));
    let [first, second] = [0, 1].map(|device| CudaContext::new(device).unwrap());
    assert_eq!(second.name().unwrap(), "lmc fake device 1");
    assert_eq!(second.compute_capability(), Ok((9, 0)));
    assert_ne!(first.uuid().unwrap().bytes, second.uuid().unwrap().bytes);
    assert!(CudaContext::new(2).is_err_and(|error| error.0 as u32 == 101));
    let error = DriverError(sys::CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
    let name = error.error_name().unwrap();
    assert_eq!(name.to_str(), Ok("CUDA_ERROR_ILLEGAL_ADDRESS"));

    first.bind_to_thread().unwrap();
    let memory = cuda::allocate(10).unwrap();
    say("allocated");
    hear();
    assert_eq!(cuda::allocate(10), Err(2));
    assert_eq!(cuda::allocate(10), Err(2));
    let more = cuda::allocate(10).unwrap();
    say("failed twice");
    hear();
    cuda::free(memory).unwrap();
    cuda::free(more).unwrap();
    drop(first);
    assert_eq!(cuda::allocate(10), Err(709));
}

#[test]
fn calls_are_counted_and_made_to_fail() {
    let machine = Machine::with_devices(2);
    let engine = Engine::new(&machine, 1);
    let mut program = Program::start(&machine, devices);
    assert_eq!(program.hear(), "allocated");
    assert_eq!(machine.calls("cuMemAlloc_v2"), 1);
    machine.fail("cuMemAlloc_v2", 2, Code::OUT_OF_MEMORY);
    program.say("");
    assert_eq!(program.hear(), "failed twice");
    assert_eq!(machine.calls("cuMemAlloc_v2"), 4);
    let wanted = Live {
        contexts: 2,
        allocations: 2,
        ..Live::default()
    };
    assert_eq!(machine.live(program.process.id()), wanted);
    program.say("");
    program.end(&machine);
    assert_eq!(machine.processes().len(), 2);
    drop(engine);
    let left = machine.processes().into_iter().map(|process| process.live);
    assert!(left.into_iter().all(|live| live == Live::default()));
}

#[test]
fn no_machine() {
    if is_program() {
        assert!(result::init().is_err_and(|error| error.0 as u32 == 100));
    }
}

/// The library without a machine is a driver without devices, as is a machine that has none.
#[test]
fn a_driver_without_devices_says_so() {
    let machine = Machine::with_devices(0);
    Program::start(&machine, no_machine).end(&machine);
    let mut command = own_test(no_machine);
    command.envs(machine.envs()).env_remove("FAKE_CUDA");
    command.env("LMC_TEST_FAKE_CUDA_PROGRAM", "1");
    let status = command.stdout(Stdio::null()).status().unwrap();
    assert!(status.success());
}

#[test]
fn a_later_call_is_made_to_fail() {
    Machine::in_own_process(1, own_test(a_later_call_is_made_to_fail), |machine| {
        let context = CudaContext::new(0).unwrap();
        machine.fail_after("cuMemAlloc_v2", 2, Code::OUT_OF_MEMORY);
        let first = [(); 2].map(|()| cuda::allocate(10).unwrap());
        assert!(machine.will_fail("cuMemAlloc_v2"));
        assert_eq!(cuda::allocate(10), Err(2));
        assert!(!machine.will_fail("cuMemAlloc_v2"));
        let last = cuda::allocate(10).unwrap();
        for memory in first.into_iter().chain([last]) {
            cuda::free(memory).unwrap();
        }
        drop(context);
        assert_eq!(machine.live(std::process::id()), Live::default());
    });
}

/// An engine in the same process counts as another one.
#[test]
fn an_engine_lies_beside_the_code_under_test() {
    let test = own_test(an_engine_lies_beside_the_code_under_test);
    Machine::in_own_process(1, test, |machine| {
        let engine = Engine::new(machine, 0);
        let handle = engine.handle(engine.allocate(&[7; 10])).0;
        let context = CudaContext::new(0).unwrap();
        let address = cuda::open_memory(handle).unwrap();
        assert_eq!(cuda::read(address, 10), Ok(vec![7; 10]));
        let live = machine.live(std::process::id());
        assert_eq!((live.mappings, live.allocations), (1, 0));
        cuda::close_memory(address).unwrap();
        drop(context);
        assert_eq!(machine.live(std::process::id()), Live::default());
    });
}
