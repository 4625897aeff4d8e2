//! Bytes of copies, and their ends.

use std::sync::atomic::{AtomicUsize, Ordering};

use lmc_fake_cuda::Code;
use lmc_testkit::in_lab;

use super::*;
use crate::copy::testing::FORMATS;
use crate::{CopyError, CopyPool};

/// Pseudorandom numbers.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005) + 1;
        (self.0 >> 33) as usize % bound
    }
}

/// Copies one chunk after another between both caches and chunks that lie in the pool, but for the
/// last.
fn compare(twin: &Twin, gpu: &Arc<Gpu>, slot: &mut ReservedSlot, random: &mut Random) {
    let chunk_blocks = 1 + random.below(5) as u64;
    let on_gpu = twin.paged(gpu, chunk_blocks);
    let on_host = twin.host.paged(chunk_blocks);
    let mut table: Vec<u32> = (0..on_host.blocks()).collect();
    // In order, blocks make long runs.
    if random.below(3) > 0 {
        (1..table.len()).for_each(|last| table.swap(last, random.below(last + 1)));
    }
    let count = table.len() / chunk_blocks as usize;
    let starts: Vec<_> = (0..count as u64)
        .map(|index| index * chunk_blocks)
        .collect();
    let request = PlanRequest {
        block_ids: &table,
        first_blocks: &starts,
        skip_blocks: random.below(3) as u64,
        null_block: (random.below(2) == 0).then(|| table[random.below(table.len())]),
    };
    let [on_gpu, on_host] = [on_gpu, on_host].map(|paged| CopyPlan::new(&paged, &request).unwrap());
    let pool = CopyPool::new(0).unwrap();
    let len = on_host.chunk_bytes() as usize;

    let mut wanted = vec![vec![0xee; len]; count];
    let mut wanted: Vec<_> = wanted.iter_mut().map(Vec::as_mut_slice).collect();
    pool.gather(&on_host, &mut wanted).unwrap();
    slot.bytes_mut().fill(0xee);
    let mut outside = vec![0xee; 13 + len];
    let mut chunks = cut(slot.bytes_mut(), len, count - 1);
    chunks.extend(cut(&mut outside, len, 1));
    pool.gather(&on_gpu, &mut chunks).unwrap();
    assert!(chunks == wanted, "gather");
    assert_untouched(slot.bytes_mut(), len, count - 1, 0xee);

    slot.bytes_mut().copy_from_slice(&marked(77, 900 << 10));
    outside.fill(0x5a);
    let mut chunks = cut(slot.bytes_mut(), len, count - 1);
    chunks.extend(cut(&mut outside, len, 1));
    let chunks: Vec<&[u8]> = chunks.into_iter().map(|chunk| &*chunk).collect();
    twin.fill(5);
    for plan in [&on_host, &on_gpu] {
        pool.scatter(plan, &chunks).unwrap();
    }
    for (number, segment) in twin.host.segments.iter().enumerate() {
        assert!(twin.bytes(number) == segment.bytes(), "scatter");
    }
}

#[test]
fn copies_have_the_bytes_of_the_cpu_in_all_layouts() {
    with_machine(
        1,
        copies_have_the_bytes_of_the_cpu_in_all_layouts,
        |machine| {
            let mut random = Random(1);
            let small = Sizes {
                layers: 2,
                block_tokens: 3,
                heads: 2,
                element: 5,
                padding: 1,
                one_segment: true,
                ..SIZES
            };
            for registered in ["not at all", "meanwhile", "before"] {
                let (arena, gpus);
                arena = self::arena();
                gpus = Gpus::new(Arc::clone(&arena));
                if registered == "not at all" {
                    machine.fail("cuMemHostRegister_v2", 1, Code::UNKNOWN);
                }
                let gpu = gpus.open(UUIDS[0]).unwrap();
                if registered == "before" {
                    until_registered(&gpus, &arena);
                }
                let mut slot = large_slot(&arena);
                for format in FORMATS {
                    for (dtype, sizes) in [(DType::BFloat16, SIZES), (DType::UInt8, small)] {
                        println!("{registered} {format:?} {dtype:?}");
                        let twin = Twin::of(machine, 0, format, dtype, sizes);
                        compare(&twin, &gpu, &mut slot, &mut random);
                    }
                }
                drop(gpu);
                assert_given_back(machine);
            }
        },
    );
}

/// One launch is under way when the copy is stopped, and ends before the copy does: its chunks are given
/// to others then.
#[test]
fn a_copy_that_is_stopped_ends_after_its_last_launch() {
    with_machine(
        1,
        a_copy_that_is_stopped_ends_after_its_last_launch,
        |machine| {
            check_stopped(machine, &|asked| asked < 2);
        },
    );
}

#[test]
fn a_copy_whose_caller_panics_ends_after_its_last_launch() {
    with_machine(
        1,
        a_copy_whose_caller_panics_ends_after_its_last_launch,
        |machine| {
            check_stopped(machine, &|asked| {
                assert!(asked < 2, "a panic of the caller");
                true
            });
        },
    );
}

/// Stops copies of both directions by `proceed`, which is given the number of its calls before.
fn check_stopped(machine: &Machine, proceed: &(dyn Fn(usize) -> bool + Sync)) {
    let (gpu, twin, plan, mut slot) = copying(machine);
    let len = plan.chunk_bytes() as usize;
    let pool = CopyPool::new(0).unwrap();
    slot.bytes_mut().fill(0);
    let before: Vec<_> = (0..3).map(|number| twin.bytes(number)).collect();
    for gather in [true, false] {
        let asked = AtomicUsize::new(0);
        let proceed = || proceed(asked.fetch_add(1, Ordering::Relaxed));
        let mut chunks = cut(slot.bytes_mut(), len, 3);
        let stopped = while_held(machine, || match gather {
            true => pool.gather_while(&plan, &mut chunks, &proceed),
            false => {
                let chunks: Vec<&[u8]> = chunks.iter().map(|chunk| &**chunk).collect();
                pool.scatter_while(&plan, &chunks, &proceed)
            }
        });
        assert!(!matches!(stopped, Ok(Ok(()))), "it was not stopped");
        if let Ok(result) = stopped {
            assert!(matches!(result, Err(CopyError::Stopped)), "{result:?}");
        }
        // The first launch has arrived, and nothing of the last.
        match gather {
            true => {
                assert_ne!(chunks[0][..16], [0; 16]);
                assert_eq!(chunks[2][len - 16..], [0; 16]);
            }
            false => {
                assert_ne!(twin.bytes(0), before[0]);
                assert_eq!(twin.bytes(2), before[2]);
            }
        }
        slot.bytes_mut().fill(0xcc);
    }
    drop((plan, gpu));
    assert_given_back(machine);
}

/// A debugger may stop a GPU for longer.
#[test]
fn a_gpu_that_hangs_refuses_copies_until_it_goes_on() {
    if !in_lab("waits 20 s for a copy that counts as hung") {
        return;
    }
    with_machine(
        1,
        a_gpu_that_hangs_refuses_copies_until_it_goes_on,
        |machine| {
            let (gpu, twin, plan, mut slot) = copying(machine);
            let memory = twin.memory(&gpu, 0).unwrap();
            let len = plan.chunk_bytes() as usize;
            let pool = CopyPool::new(0).unwrap();
            let (first, second) = slot.bytes_mut().split_at_mut(450 << 10);
            let mut chunks = cut(first, len, 3);
            let mut others = cut(second, len, 3);
            let is_hung = |result: Result<(), CopyError>| {
                assert!(
                    matches!(result, Err(CopyError::Cuda(CudaError::Hung { .. }))),
                    "{result:?}"
                );
            };
            machine.hold(0);
            thread::scope(|scope| {
                let first = scope.spawn(|| pool.gather(&plan, &mut chunks));
                until("the first waits", || machine.calls("cuEventQuery") > 0);
                is_hung(pool.gather(&plan, &mut others));
                let counted = memory.wait_for_count(0, 0, &|| true);
                is_hung(counted.map(drop).map_err(CopyError::Cuda));
                assert!(!first.is_finished());
                machine.resume(0);
                is_hung(first.join().unwrap());
            });
            pool.gather(&plan, &mut others).unwrap();
            assert_eq!(memory.wait_for_count(0, 0, &|| true), Ok(true));
            drop((memory, plan, gpu));
            assert_given_back(machine);
        },
    );
}

#[test]
fn a_copy_comes_after_the_event_of_the_engine() {
    with_machine(1, a_copy_comes_after_the_event_of_the_engine, |machine| {
        let gpus = Gpus::new(arena());
        let gpu = gpus.open(UUIDS[0]).unwrap();
        let twin = Twin::new(machine, 0);
        let stall = twin.engine.stall();
        let len = twin.host.segments[0].mapped.len() as usize;
        (twin.engine).write_later(twin.addresses[0] + BEFORE, &vec![7; len]);
        let event = twin.engine.record();
        let asked = AtomicUsize::new(0);
        let proceed = || asked.fetch_add(1, Ordering::Relaxed) < 10;
        let waited = gpu.wait_for(&event.handle(), &proceed).unwrap();
        assert!(!waited, "the event was not reached");
        assert_eq!(asked.load(Ordering::Relaxed), 11);

        thread::scope(|scope| {
            let waiting = scope.spawn(|| gpu.wait_for(&event.handle(), &|| true));
            let queries = machine.calls("cuEventQuery");
            until("it waits", || {
                waiting.is_finished() || machine.calls("cuEventQuery") > queries + 3
            });
            let ended = waiting.is_finished();
            drop(stall);
            assert!(!ended);
            assert!(waiting.join().unwrap().unwrap());
        });
        assert_eq!(twin.bytes(0), vec![7; len]);
        // One that is reached already is waited for without a question.
        assert!(gpu.wait_for(&event.handle(), &|| false).unwrap());
        drop(gpu);
        assert_given_back(machine);
    });
}

#[test]
fn an_event_of_an_engine_that_ended_is_never_reached() {
    with_machine(
        1,
        an_event_of_an_engine_that_ended_is_never_reached,
        |machine| {
            let gpus = Gpus::new(arena());
            let gpu = gpus.open(UUIDS[0]).unwrap();
            let twin = Twin::new(machine, 0);
            let _stall = twin.engine.stall();
            let event = twin.engine.record();
            let handle = event.handle();
            let mut engine = Some(twin);
            let asked = AtomicUsize::new(0);
            // The engine ends during the wait.
            let gone = std::sync::Mutex::new(Some((engine.take(), event)));
            let proceed = || {
                drop(gone.lock().unwrap().take());
                asked.fetch_add(1, Ordering::Relaxed) < 100
            };
            assert!(!gpu.wait_for(&handle, &proceed).unwrap());
            let unknown = gpu.wait_for(&handle, &|| true);
            assert!(
                matches!(unknown, Err(CudaError::Call { .. })),
                "{unknown:?}"
            );
            let unknown = gpu.wait_for(&[0x5a; 64], &|| true);
            assert!(
                matches!(unknown, Err(CudaError::Call { .. })),
                "{unknown:?}"
            );
            drop(gpu);
            assert_given_back(machine);
        },
    );
}

/// A count that is never reached, and memory that is too short.
#[test]
fn a_wait_for_a_count_ends_with_its_caller() {
    with_machine(1, a_wait_for_a_count_ends_with_its_caller, |machine| {
        let gpus = Gpus::new(arena());
        let gpu = gpus.open(UUIDS[0]).unwrap();
        let engine = Engine::new(machine, 0);
        let address = engine.allocate(&[0; 40]);
        let (handle, _) = engine.handle(address);
        let memory = gpu.memory(shared(handle), 0, 40, None).unwrap();
        let wait = |at, least| {
            let asked = AtomicUsize::new(0);
            let proceed = || asked.fetch_add(1, Ordering::Relaxed) < 100;
            memory.wait_for_count(at, least, &proceed)
        };
        engine.write(address + 32, &7_u64.to_ne_bytes());
        assert_eq!(wait(32, 7), Ok(true));
        assert_eq!(wait(32, 8), Ok(false));
        engine.write(address + 32, &u64::MAX.to_ne_bytes());
        assert_eq!(wait(32, 8), Ok(true));
        for at in [33, 40, u64::MAX] {
            let (end, len) = (at.saturating_add(8), 40);
            let outside = CudaError::Outside {
                start: at,
                end,
                len,
            };
            assert_eq!(wait(at, 0), Err(outside));
        }
        drop((gpu, memory));
        assert_given_back(machine);
    });
}

/// The pool is registered once, for both.
#[test]
fn two_gpus_copy_at_once() {
    with_machine(2, two_gpus_copy_at_once, |machine| {
        let arena = arena();
        let gpus = Gpus::new(Arc::clone(&arena));
        let both = UUIDS.map(|uuid| gpus.open(uuid).unwrap());
        until_registered(&gpus, &arena);
        let live = live(machine);
        assert_eq!((live.contexts, live.registered_bytes), (2, 1 << 20));
        assert_eq!(machine.calls("cuMemHostRegister_v2"), live.registrations);
        let twins = [0, 1].map(|device| Twin::new(machine, device));
        twins[1].fill(9);
        let mut slot = large_slot(&arena);
        let (first, second) = slot.bytes_mut().split_at_mut(450 << 10);
        thread::scope(|scope| {
            for ((twin, gpu), bytes) in twins.iter().zip(&both).zip([first, second]) {
                scope.spawn(move || {
                    let pool = CopyPool::new(0).unwrap();
                    let on_gpu = plan(&twin.paged(gpu, 4));
                    let on_host = plan(&twin.host.paged(4));
                    let len = on_gpu.chunk_bytes() as usize;
                    let mut wanted = vec![0; 3 * (13 + len)];
                    let mut wanted = cut(&mut wanted, len, 3);
                    pool.gather(&on_host, &mut wanted).unwrap();
                    for _ in 0..20 {
                        let mut chunks = cut(bytes, len, 3);
                        chunks.iter_mut().for_each(|chunk| chunk.fill(0));
                        pool.gather(&on_gpu, &mut chunks).unwrap();
                        assert!(chunks == wanted);
                    }
                });
            }
        });
        // One cache lies on one GPU.
        let [KvSegments::Device(mut all), KvSegments::Device(other)] =
            [0, 1].map(|device| twins[device].segments(&both[device]).unwrap())
        else {
            panic!("memory of GPUs");
        };
        all[1] = Arc::clone(&other[1]);
        let mixed = twins[0].open(KvSegments::Device(all), 4);
        assert!(
            matches!(mixed, Err(PagedError::Unsupported { .. })),
            "{mixed:?}"
        );
        drop((other, both));
        assert_given_back(machine);
    });
}
