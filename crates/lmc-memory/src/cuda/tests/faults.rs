//! Failures of the driver, at each of its functions.

use std::error::Error;

use lmc_fake_cuda::Code;
use lmc_testkit::rounds;

use super::*;
use crate::CopyPool;
use crate::cuda::driver::FUNCTIONS;

/// A cache of which a copy has a few launches.
fn small_twin(machine: &Machine) -> Twin {
    let sizes = Sizes { layers: 1, ..SIZES };
    Twin::of(machine, 0, SPLIT, DType::BFloat16, sizes)
}

/// Registers, waits for an event, and copies in both directions, as a worker has it done.
fn serve(gpus: &Gpus, twin: &Twin, slot: &mut ReservedSlot) -> Result<(), Box<dyn Error>> {
    twin.fill(3);
    let event = twin.engine.record();
    let gpu = gpus.open(UUIDS[0])?;
    let paged = twin.open(twin.segments(&gpu)?, 4)?;
    gpu.wait_for(&event.handle(), &|| true)?;
    twin.memory(&gpu, 0)?.wait_for_count(0, 0, &|| true)?;
    // SAFETY: the default stream.
    unsafe { gpu.mark(0) }?.wait(&|| true)?;
    let (plan, wanted) = (plan(&paged), plan(&twin.host.paged(4)));
    let pool = CopyPool::new(0)?;
    let len = plan.chunk_bytes() as usize;
    slot.bytes_mut().fill(0);
    let mut chunks = cut(slot.bytes_mut(), len, 3);
    let gathered = pool.gather(&plan, &mut chunks);
    if gathered.is_err() {
        // Another chunk lies there from now on.
        slot.bytes_mut().fill(0x11);
        drop((plan, paged, gpu));
        return Ok(gathered?);
    }
    let mut expected = vec![0; 3 * (13 + len)];
    let mut expected = cut(&mut expected, len, 3);
    pool.gather(&wanted, &mut expected)?;
    assert!(chunks == expected);
    let chunks: Vec<&[u8]> = chunks.iter().map(|chunk| &**chunk).collect();
    twin.fill(4);
    pool.scatter(&wanted, &chunks)?;
    if let Err(error) = pool.scatter(&plan, &chunks) {
        slot.bytes_mut().fill(0x11);
        return Err(error.into());
    }
    for (number, segment) in twin.host.segments.iter().enumerate() {
        assert!(twin.bytes(number) == segment.bytes());
    }
    Ok(())
}

/// Slow: a worker is served again for each call that fails.
#[test]
fn a_failure_of_any_call_is_an_error_and_nothing_is_lost_by_it() {
    with_machine(
        1,
        a_failure_of_any_call_is_an_error_and_nothing_is_lost_by_it,
        |machine| {
            let arena = arena();
            let mut slot = large_slot(&arena);
            let gpus = Gpus::new(arena);
            let twin = small_twin(machine);
            serve(&gpus, &twin, &mut slot).unwrap();
            assert_given_back(machine);
            // The last one stays retained where its release fails.
            const RELEASE: &str = "cuDevicePrimaryCtxRelease_v2";
            // That function has no failures.
            let names = FUNCTIONS
                .iter()
                .filter(|&&name| name != "cuGetErrorName" && name != RELEASE);
            for &name in names.chain([&RELEASE]) {
                let (mut calls, mut errors) = (0, 0);
                while calls < rounds(5, 40) as u32 {
                    machine.fail_after(name, calls, Code::UNKNOWN);
                    slot.bytes_mut().fill(0x11);
                    let served = serve(&gpus, &twin, &mut slot);
                    errors += u32::from(served.is_err());
                    if name == RELEASE {
                        break;
                    }
                    assert_given_back(machine);
                    if served.is_err() {
                        assert!(
                            slot.bytes_mut().iter().all(|&byte| byte == 0x11),
                            "written later"
                        );
                    }
                    if machine.will_fail(name) {
                        break;
                    }
                    calls += 1;
                }
                println!("{name}: {errors} errors of {calls}");
                machine.fail(name, 0, Code::UNKNOWN);
                serve(&gpus, &twin, &mut slot).unwrap();
            }
        },
    );
}

/// A launch whose end cannot be marked is waited for all the same.
#[test]
fn a_copy_that_fails_ends_after_its_last_launch() {
    with_machine(1, a_copy_that_fails_ends_after_its_last_launch, |machine| {
        // The engine lives as long as the copies.
        let (gpu, _twin, plan, mut slot) = copying(machine);
        let len = plan.chunk_bytes() as usize;
        let pool = CopyPool::new(0).unwrap();
        let failures = [
            ("cuEventRecord", 0),
            ("cuEventRecord", 1),
            ("cuLaunchKernel", 1),
            ("cuMemcpyDtoHAsync_v2", 1),
            ("cuEventQuery", 0),
        ];
        for (name, calls) in failures {
            machine.fail_after(name, calls, Code::UNKNOWN);
            let mut chunks = cut(slot.bytes_mut(), len, 3);
            let failed = while_held(machine, || pool.gather(&plan, &mut chunks)).unwrap();
            let error = failed.unwrap_err().to_string();
            assert_eq!(error, format!("{name} failed: CUDA_ERROR_UNKNOWN"));
            pool.gather(&plan, &mut chunks).unwrap();
        }
        drop((plan, gpu));
        assert_given_back(machine);
    });
}

/// As after an illegal access: all calls fail until the context is made again.
#[test]
fn a_gpu_that_is_broken_answers_errors_and_serves_after_its_repair() {
    with_machine(
        1,
        a_gpu_that_is_broken_answers_errors_and_serves_after_its_repair,
        |machine| {
            let arena = arena();
            let mut slot = large_slot(&arena);
            let gpus = Gpus::new(arena);
            let twin = small_twin(machine);
            for name in FUNCTIONS
                .into_iter()
                .filter(|&name| name != "cuGetErrorName")
            {
                machine.fail(name, u32::MAX, Code::ILLEGAL_ADDRESS);
                let served = serve(&gpus, &twin, &mut slot);
                let is_optional = name.contains("Host") || name.contains("Destroy");
                println!("{name}: {served:?} {is_optional}");
                machine.fail(name, 0, Code::ILLEGAL_ADDRESS);
                serve(&gpus, &twin, &mut slot).unwrap();
            }
        },
    );
}
