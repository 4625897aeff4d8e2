//! Objects of the driver that are taken, shared, and given back.

use std::fs;

use super::*;
use crate::cuda::StorageCounter;
use crate::{CopyPool, SharedName, own_uid};

#[test]
fn everything_is_given_back_after_the_last_user() {
    with_machine(1, everything_is_given_back_after_the_last_user, |machine| {
        let arena = arena();
        let gpus = Gpus::new(Arc::clone(&arena));
        assert_eq!((live(machine), gpus.pinned_bytes()), (Live::default(), 0));
        let gpu = gpus.open(UUIDS[0]).unwrap();
        until_registered(&gpus, &arena);
        let twin = Twin::new(machine, 0);
        let plan = plan(&twin.paged(&gpu, 4));
        // The plan keeps the memory open, and that the GPU.
        drop(gpu);
        let len = plan.chunk_bytes() as usize;
        let mut chunks = vec![vec![0; len]; 3];
        let mut chunks: Vec<_> = chunks.iter_mut().map(Vec::as_mut_slice).collect();
        let pool = CopyPool::new(0).unwrap();
        pool.gather(&plan, &mut chunks).unwrap();
        let chunks: Vec<&[u8]> = chunks.iter().map(|chunk| &**chunk).collect();
        pool.scatter(&plan, &chunks).unwrap();
        let held = live(machine);
        assert_eq!((held.contexts, held.mappings, held.streams), (1, 3, 4));
        assert_eq!(held.registered_bytes, 1 << 20);
        drop(plan);
        assert_given_back(machine);
        assert_eq!(gpus.pinned_bytes(), 0);
        // Each by itself, not with the context.
        for (take, give) in [
            ("cuEventCreate", "cuEventDestroy_v2"),
            ("cuIpcOpenMemHandle_v2", "cuIpcCloseMemHandle"),
            ("cuMemAlloc_v2", "cuMemFree_v2"),
            ("cuMemHostAlloc", "cuMemFreeHost"),
            ("cuMemHostRegister_v2", "cuMemHostUnregister"),
            ("cuModuleLoadData", "cuModuleUnload"),
            ("cuStreamCreate", "cuStreamDestroy_v2"),
        ] {
            assert_ne!(machine.calls(take), 0, "{take}");
            assert_eq!(machine.calls(take), machine.calls(give), "{take}");
        }
    });
}

#[test]
fn memory_that_cannot_be_opened_leaves_nothing() {
    with_machine(1, memory_that_cannot_be_opened_leaves_nothing, |machine| {
        let gpus = Gpus::new(arena());
        let gpu = gpus.open(UUIDS[0]).unwrap();
        let engine = Engine::new(machine, 0);
        let address = engine.allocate(&[7; 1000]);
        let (handle, _) = engine.handle(address);
        let open = |offset, len| gpu.memory(shared(handle), offset, len, None);
        for (start, len, end) in [
            (0, 1001, 1001),
            (1000, 1, 1001),
            (1001, 0, 1001),
            (1, u64::MAX, u64::MAX),
            (u64::MAX, u64::MAX, u64::MAX),
        ] {
            let whole = 1000;
            let outside = CudaError::Outside {
                start,
                end,
                len: whole,
            };
            assert_eq!(open(start, len).unwrap_err(), outside);
            assert_eq!(live(machine).mappings, 0);
        }
        for bad in [[0; 64], [0x5a; 64], [0xff; 64]] {
            let unknown = gpu.memory(shared(bad), 0, 1, None);
            assert!(
                matches!(unknown, Err(CudaError::Call { .. })),
                "{unknown:?}"
            );
        }
        let whole = open(0, 1000).unwrap();
        // One that is refused closes nothing of others.
        open(0, 1001).unwrap_err();
        assert_eq!(live(machine).mappings, 1);
        let empty = open(1000, 0).unwrap();
        drop(whole);
        assert_eq!(live(machine).mappings, 1);
        drop(empty);
        assert_eq!(live(machine).mappings, 0);
        drop(gpu);
        assert_given_back(machine);
    });
}

#[test]
fn registrations_of_one_allocation_share_it() {
    with_machine(1, registrations_of_one_allocation_share_it, |machine| {
        let gpus = Gpus::new(arena());
        let gpus_of_two = [(); 2].map(|()| gpus.open(UUIDS[0]).unwrap());
        let twin = Twin::new(machine, 0);
        let [first, second] = gpus_of_two
            .each_ref()
            .map(|gpu| twin.memory(gpu, 0).unwrap());
        assert_eq!(machine.calls("cuIpcOpenMemHandle_v2"), 1);
        assert_eq!(first.base(), second.base());
        drop(first);
        assert_eq!(live(machine).mappings, 1);
        drop(gpus_of_two);
        // The memory keeps the GPU open for another registration.
        let third = twin.memory(&gpus.open(UUIDS[0]).unwrap(), 0).unwrap();
        assert_eq!(machine.calls("cuIpcOpenMemHandle_v2"), 1);
        assert_eq!(machine.calls("cuDevicePrimaryCtxRetain"), 1);
        drop((second, third));
        assert_given_back(machine);
        assert_eq!(machine.calls("cuIpcCloseMemHandle"), 1);
    });
}

/// The driver would give the memory of the first, which may have ended: engines in containers may have
/// equal handles, one after another.
#[test]
fn a_handle_that_is_open_for_one_engine_is_refused_for_another() {
    with_machine(
        1,
        a_handle_that_is_open_for_one_engine_is_refused_for_another,
        |machine| {
            let gpus = Gpus::new(arena());
            let gpu = gpus.open(UUIDS[0]).unwrap();
            let engine = Engine::new(machine, 0);
            let (handle, _) = engine.handle(engine.allocate(&[7; 100]));
            let open = |engine| gpu.memory(SharedMemory { handle, engine }, 0, 100, None);
            let first = [open(1).unwrap(), open(1).unwrap()];
            assert_eq!(open(2).unwrap_err(), CudaError::InUse);
            drop(first);
            let second = open(2).unwrap();
            assert_eq!(open(1).unwrap_err(), CudaError::InUse);
            drop((second, gpu));
            assert_given_back(machine);
        },
    );
}

/// The pool is registered whole each time: what the thread before has not given back yet cannot be.
#[test]
fn a_gpu_is_opened_again_while_it_is_given_back() {
    with_machine(1, a_gpu_is_opened_again_while_it_is_given_back, |machine| {
        let arena = arena();
        let gpus = Gpus::new(Arc::clone(&arena));
        for _ in 0..30 {
            let opened: Vec<_> = thread::scope(|scope| {
                let open = || gpus.open(UUIDS[0]).unwrap();
                let threads = [scope.spawn(open), scope.spawn(open)];
                threads.map(|thread| thread.join().unwrap()).into()
            });
            until_registered(&gpus, &arena);
            thread::scope(|scope| {
                for gpu in opened {
                    scope.spawn(move || drop(gpu));
                }
            });
        }
        assert_given_back(machine);
    });
}

#[test]
fn a_storage_is_counted_off_with_its_memory() {
    with_machine(1, a_storage_is_counted_off_with_its_memory, |machine| {
        let name = SharedName::new(&format!("lmc_test_count_{}", std::process::id())).unwrap();
        let mut bytes = vec![0; 64 + 10_000 * 8];
        bytes[64] = 2;
        fs::write(name.path(), &bytes).unwrap();
        let counter = || StorageCounter::open_for(own_uid(), &name, 0).unwrap();
        let count = || fs::read(name.path()).unwrap()[64];
        let gpus = Gpus::new(arena());
        let gpu = gpus.open(UUIDS[0]).unwrap();
        let engine = Engine::new(machine, 0);
        let (handle, _) = engine.handle(engine.allocate(&[7; 10]));
        let memory = gpu.memory(shared(handle), 0, 10, Some(counter())).unwrap();
        assert_eq!(count(), 2);
        drop(memory);
        assert_eq!((count(), live(machine).mappings), (1, 0));
        // The engine shared it for this registration, which has no use for it.
        gpu.memory(shared(handle), 0, 11, Some(counter()))
            .unwrap_err();
        assert_eq!(count(), 0);
        fs::remove_file(name.path()).unwrap();
        drop(gpu);
        assert_given_back(machine);
    });
}

#[test]
fn a_gpu_that_is_not_visible_is_named_with_those_that_are() {
    with_machine(
        2,
        a_gpu_that_is_not_visible_is_named_with_those_that_are,
        |machine| {
            let gpus = Gpus::new(arena());
            let uuid = "19d82a72-11d8-b896-53d0-54b5ef820006";
            let visible = UUIDS.join(", ");
            let wanted = CudaError::NotVisible {
                uuid: uuid.to_owned(),
                visible,
            };
            assert_eq!(gpus.open(uuid).unwrap_err(), wanted);
            assert_eq!(live(machine), Live::default());
            let first = gpus.open(UUIDS[0]).unwrap();
            assert_eq!(gpus.open(uuid).unwrap_err(), wanted);
            assert_eq!(first.to_string(), format!("lmc fake device 0 {}", UUIDS[0]));
            drop(first);
            assert_given_back(machine);
        },
    );
}
