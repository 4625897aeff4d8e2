//! A shared-memory file system that another process fills up: running out of space is an error,
//! and kills no process.
//!
//! Needs a small tmpfs over /dev/shm, which only a mount namespace gives without disturbing
//! the machine; where that cannot be had the test says that it was skipped.

use std::fs::{self, File};
use std::io::Write;
use std::sync::Arc;

use lmc_memory::{
    ArenaConfig, ArenaError, CopyError, CopyPlan, CopyPool, DType, Demand, KvGroup, KvOrder,
    KvSegments, KvTensor, MappedSegment, PlanRequest, Pool, PoolConfig, Prefault, SegmentError,
    SharedName,
};

use lmc_testkit::{until, with_own_shm};

#[test]
fn a_full_file_system_is_an_error_and_no_sigbus() {
    with_own_shm(
        "size=64m",
        a_full_file_system_is_an_error_and_no_sigbus,
        || {
            a_pool_that_does_not_fit_is_refused();
            an_engine_without_pages_is_lost();
            a_prefault_that_runs_out_of_space_says_so();
            a_pool_hands_out_only_what_can_be_touched();
        },
    );
}

#[test]
fn huge_pages_are_used_and_a_full_file_system_is_an_error_then_too() {
    with_own_shm(
        "size=64m,huge=advise",
        huge_pages_are_used_and_a_full_file_system_is_an_error_then_too,
        || {
            let arena = ArenaConfig::shared("lmc_huge", 60 << 20)
                .with_huge_pages(Demand::Required)
                .build()
                .expect("60 of 64 MiB are free");
            arena.ensure(0, 32 << 20).expect("half of them");
            let maps = fs::read_to_string("/proc/self/smaps").expect("a process sees its own");
            let huge: u64 = maps
                .lines()
                .filter_map(|line| line.strip_prefix("ShmemPmdMapped:"))
                .map(|size| size.trim_end_matches("kB").trim().parse::<u64>())
                .map(|size| size.expect("a number"))
                .sum();
            let path = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
            let setting = fs::read_to_string(path).unwrap_or_default();
            match setting.contains("[deny]") {
                true => println!("not looked for huge pages: {path} says {setting}"),
                false => assert!(huge > 0, "no huge page in {maps}"),
            }
            fill("/dev/shm/other");
            arena.ensure(0, 32 << 20).expect("they are there");
            arena
                .ensure(32 << 20, 28 << 20)
                .expect_err("no page is left");
            fs::remove_file("/dev/shm/other").expect("was written");
            arena
                .ensure(32 << 20, 28 << 20)
                .expect("there is space again");
        },
    );
}

fn a_pool_that_does_not_fit_is_refused() {
    fs::write("/dev/shm/other", vec![1u8; 40 << 20]).expect("space for 40 MiB");
    let err = ArenaConfig::shared("lmc_full", 30 << 20)
        .build()
        .expect_err("24 MiB are left");
    assert!(
        matches!(err, ArenaError::Space { need, available }
        if need == 30 << 20 && (20 << 20..25 << 20).contains(&available)),
        "{err}"
    );
    fs::remove_file("/dev/shm/other").expect("was written");
}

/// The engine's segment has holes and the file system no page to fill them: reading one would
/// kill the server.
fn an_engine_without_pages_is_lost() {
    let engine = File::create("/dev/shm/engine").expect("an empty file");
    engine.set_len(1 << 20).expect("a sparse megabyte");
    let name = SharedName::new("engine").expect("a valid name");
    let segment = Arc::new(MappedSegment::open(&name, 1 << 20).expect("it is there"));
    let tensor = KvTensor {
        dtype: DType::UInt8,
        shape: &[64, 16, 1024],
        strides: &[16 << 10, 1 << 10, 1],
        storage_offset: 0,
    };
    let group = KvGroup::describe(&[tensor], KvOrder::TokensFirst, None, 256);
    let group = group.expect("vLLM's layout of MLA");
    let paged = group
        .open(&[0], KvSegments::Host(vec![segment]))
        .expect("it fits");
    let request = PlanRequest {
        block_ids: &(0..16).collect::<Vec<u32>>(),
        first_blocks: &[0],
        skip_blocks: 0,
        null_block: None,
    };
    let plan = CopyPlan::new(&paged, &request).expect("16 of 64 blocks");
    fill("/dev/shm/other");
    let pool = CopyPool::new(1).expect("a thread");
    let mut chunk = vec![0; 256 << 10];
    for _ in 0..2 {
        let err = pool
            .gather(&plan, &mut [&mut chunk])
            .expect_err("no page is left");
        assert!(
            matches!(err, CopyError::Segment(SegmentError::Lost { .. })),
            "{err}"
        );
    }
    fs::remove_file("/dev/shm/other").expect("was written");
    fs::remove_file("/dev/shm/engine").expect("was made");
}

/// The faster of the two wins; no process is killed.
fn a_prefault_that_runs_out_of_space_says_so() {
    let arena = ArenaConfig::shared("lmc_full", 60 << 20)
        .with_prefault(Prefault::Background { threads: 1 })
        .build()
        .expect("60 of 64 MiB are free");
    fill("/dev/shm/other");
    until("the prefault fails or is done", || {
        let progress = arena.prefault_progress();
        if let Some(error) = &progress.error {
            assert!(error.contains("/dev/shm is full"), "{error}");
        }
        progress.error.is_some() || progress.done == progress.total
    });
    // Space comes back, and the prefault goes on.
    fs::remove_file("/dev/shm/other").expect("was written");
    until("the prefault is done", || {
        let progress = arena.prefault_progress();
        progress.done == progress.total && progress.error.is_none()
    });
}

/// Without a prefault: what is handed out can be written, what cannot be written is withheld,
/// and comes back when there is space.
fn a_pool_hands_out_only_what_can_be_touched() {
    let arena = ArenaConfig::shared("lmc_full", 60 << 20);
    let arena = arena.build().expect("60 of 64 MiB are free");
    let pool = Pool::new(arena.into(), PoolConfig::default()).expect("a pool");
    let mut first = pool.reserve(1 << 20).expect("an empty pool");
    fill("/dev/shm/other");
    first.bytes_mut().fill(1);
    // The page after it came with it; the pool holds no other that can be touched.
    let mut held = Vec::new();
    let more = (0..60).filter_map(|_| pool.reserve(1 << 20));
    for mut slot in more {
        slot.bytes_mut().fill(2);
        held.push(slot);
    }
    assert!(
        held.len() <= 1,
        "{} more without a page for them",
        held.len()
    );
    let fault = pool.fault().expect("a reason");
    assert!(fault.contains("/dev/shm is full"), "{fault}");
    assert!(pool.usage().withheld_bytes > 0);
    // What had pages is handed out again, however much is withheld.
    drop(first);
    pool.reserve(1 << 20)
        .expect("what was given back")
        .bytes_mut()
        .fill(3);
    pool.recover();
    assert!(pool.usage().withheld_bytes > 0, "there is still no space");

    fs::remove_file("/dev/shm/other").expect("was written");
    pool.recover();
    assert_eq!((pool.usage().withheld_bytes, pool.fault()), (0, None));
    drop(held);
    let mut whole = pool.reserve(60 << 20).expect("all in one piece again");
    whole.bytes_mut().fill(4);
}

/// Writes to a file until the file system has no space left.
fn fill(path: &str) {
    let mut file = File::create(path).expect("an empty file");
    while file.write_all(&[1; 4096]).is_ok() {}
}
