use std::collections::HashSet;
use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use lmc_testkit::rounds;
use parking_lot::Mutex;
use proptest::prelude::*;

use super::super::testing::{Engine, FORMATS, LATENT, SPLIT, Sizes, marked};
use super::*;
use crate::{DType, PagedKv, PlanRequest};

#[derive(Clone, Debug)]
struct Case {
    format: usize,
    dtype: DType,
    sizes: Sizes,
    table: Vec<u32>,
    chunk_blocks: u64,
    starts: Vec<u64>,
    skip: u64,
    null_block: Option<u32>,
    workers: usize,
}

fn cases() -> impl Strategy<Value = Case> {
    let sizes = (
        1..4u64,
        1..9u64,
        1..6u64,
        1..4u64,
        prop_oneof![1..20u64, Just(64), Just(128)],
    );
    let dtype = prop_oneof![
        Just(DType::BFloat16),
        Just(DType::UInt8),
        Just(DType::Float32)
    ];
    (
        0..FORMATS.len(),
        dtype,
        sizes,
        0..3u64,
        any::<bool>(),
        0..3usize,
        any::<u64>(),
    )
        .prop_flat_map(|(format, dtype, sizes, padding, one_segment, workers, _)| {
            let (layers, blocks, block_tokens, heads, element) = sizes;
            // Two blocks on the first axis would be taken for K and V.
            let blocks = if blocks == 2 { 9 } else { blocks };
            let sizes = Sizes {
                layers,
                blocks,
                block_tokens,
                heads,
                element,
                padding,
                one_segment,
            };
            // Ids that follow each other are common, as engines hand them out.
            let run = (0..blocks as u32, 1..5u32).prop_map(move |(first, count)| {
                (first..(first + count).min(blocks as u32)).collect::<Vec<_>>()
            });
            let table = prop::collection::vec(run, 1..5).prop_map(|runs| runs.concat());
            table.prop_flat_map(move |table| {
                let covered = table.len() as u64;
                let table = Just(table);
                (table, 1..=covered).prop_flat_map(move |(table, chunk_blocks)| {
                    let start = 0..=covered - chunk_blocks;
                    let starts = prop::collection::vec(start, 0..4);
                    let null = prop::option::of(0..blocks as u32);
                    (starts, prop_oneof![Just(0), 0..covered + 2], null).prop_map(
                        move |(starts, skip, null_block)| Case {
                            format,
                            dtype,
                            sizes,
                            table: table.clone(),
                            chunk_blocks,
                            starts,
                            skip,
                            null_block,
                            workers,
                        },
                    )
                })
            })
        })
}

impl Case {
    fn plan(&self, engine: &Engine) -> CopyPlan {
        let request = PlanRequest {
            block_ids: &self.table,
            first_blocks: &self.starts,
            skip_blocks: self.skip,
            null_block: self.null_block,
        };
        CopyPlan::new(&engine.paged(self.chunk_blocks), &request).unwrap()
    }

    fn left_out(&self, index: u64) -> bool {
        index < self.skip || self.null_block == Some(self.table[index as usize])
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn gather_and_scatter_agree_with_a_walk_over_elements(case in cases()) {
        let engine = Engine::new(FORMATS[case.format], case.dtype, case.sizes);
        let plan = case.plan(&engine);
        let pool = CopyPool::new(case.workers).unwrap();
        let item = case.dtype.size();
        let bytes = plan.chunk_bytes() as usize;

        // Slots hold old bytes, which must not survive.
        let mut chunks = vec![vec![0xee; bytes]; case.starts.len()];
        let mut slices: Vec<&mut [u8]> = chunks.iter_mut().map(Vec::as_mut_slice).collect();
        pool.gather(&plan, &mut slices).unwrap();
        let before: Vec<_> = engine.segments.iter().map(|segment| segment.bytes()).collect();
        let mut copied = 0;
        for (&start, chunk) in case.starts.iter().zip(&chunks) {
            let mut expected = vec![0xdd; bytes];
            engine.each_element(&case.table, start, case.chunk_blocks, |at, index, segment, byte| {
                let value = &mut expected[at..at + item];
                if case.left_out(index) {
                    value.fill(0);
                } else {
                    value.copy_from_slice(&before[segment][byte..byte + item]);
                    copied += item as u64;
                }
            });
            prop_assert_eq!(chunk, &expected);
        }
        prop_assert_eq!(plan.bytes(), copied);

        // Two chunks over the same blocks carry the same bytes, so that their order is free.
        let marks = marked(77, 1 << 16);
        let mut expected: Vec<_> = before.iter().map(|bytes| vec![0x11; bytes.len()]).collect();
        for (segment, bytes) in engine.segments.iter().zip(&expected) {
            segment.fill(bytes);
        }
        let mut sources = vec![vec![0; bytes]; case.starts.len()];
        for (&start, source) in case.starts.iter().zip(&mut sources) {
            engine.each_element(&case.table, start, case.chunk_blocks, |at, index, segment, byte| {
                for i in 0..item {
                    source[at + i] = marks[(segment * 7919 + byte + i) % marks.len()];
                }
                if !case.left_out(index) {
                    expected[segment][byte..byte + item].copy_from_slice(&source[at..at + item]);
                }
            });
        }
        let slices: Vec<&[u8]> = sources.iter().map(Vec::as_slice).collect();
        pool.scatter(&plan, &slices).unwrap();
        for (segment, expected) in engine.segments.iter().zip(&expected) {
            // Bytes that belong to no element of the plan are untouched.
            prop_assert_eq!(&segment.bytes(), expected);
        }
    }
}

/// Long runs, so that they are cut, shared among threads, and merged across blocks; blocks of
/// several tiles; heads that are whole lines and heads that are not. All of it is beyond the
/// size from which copies go around the cache.
#[test]
fn large_caches_agree_with_a_walk_over_elements() {
    let shapes = [
        (DType::BFloat16, 16, 8, 128),
        (DType::BFloat16, 40, 2, 80),
        (DType::UInt8, 33, 3, 99),
        (DType::Float32, 48, 4, 32),
    ];
    for (number, (dtype, block_tokens, heads, element)) in shapes.into_iter().enumerate() {
        let blocks = 40;
        let sizes = Sizes {
            layers: 2,
            blocks,
            block_tokens,
            heads,
            element,
            padding: 0,
            one_segment: false,
        };
        // In the gate every second one, others for each shape.
        let step = rounds(2, 1);
        for format in FORMATS.into_iter().skip(number % step).step_by(step) {
            let engine = Engine::new(format, dtype, sizes);
            let half = blocks / 2;
            let paged = engine.paged(half);
            // Half in order, half in reverse.
            let table: Vec<u32> = (20..40).chain((0..20).rev()).collect();
            let request = PlanRequest {
                block_ids: &table,
                first_blocks: &[0, half],
                skip_blocks: 0,
                null_block: None,
            };
            let mut plan = CopyPlan::new(&paged, &request).unwrap();
            if plan.bytes() < LARGE {
                // The smallest formats: the same chunks again, so that there is enough.
                let starts: Vec<u64> = [0, half].into_iter().cycle().take(40).collect();
                let request = PlanRequest {
                    first_blocks: &starts,
                    ..request
                };
                plan = CopyPlan::new(&paged, &request).unwrap();
            }
            assert!(plan.bytes() >= LARGE, "{format:?} {}", plan.bytes());
            let pool = CopyPool::new(3).unwrap();
            let bytes = paged.chunk_bytes() as usize;
            let mut chunks = vec![vec![0; bytes]; plan.chunks()];
            let mut slices: Vec<&mut [u8]> = chunks.iter_mut().map(Vec::as_mut_slice).collect();
            pool.gather(&plan, &mut slices).unwrap();
            let before: Vec<_> = engine
                .segments
                .iter()
                .map(|segment| segment.bytes())
                .collect();
            let item = dtype.size();
            for (chunk, found) in chunks.iter().enumerate().take(2) {
                let start = chunk as u64 * half;
                let mut expected = vec![0; bytes];
                engine.each_element(&table, start, half, |at, _, segment, byte| {
                    expected[at..at + item].copy_from_slice(&before[segment][byte..byte + item]);
                });
                assert!(found == &expected, "{format:?} {sizes:?}");
            }
            assert!(
                chunks
                    .iter()
                    .enumerate()
                    .all(|(i, chunk)| chunk == &chunks[i % 2])
            );
            // Every byte of the cache belongs to a chunk, so that scattering restores it all.
            for (segment, before) in engine.segments.iter().zip(&before) {
                segment.fill(&vec![0; before.len()]);
            }
            let slices: Vec<&[u8]> = chunks.iter().map(Vec::as_slice).collect();
            pool.scatter(&plan, &slices).unwrap();
            for (segment, before) in engine.segments.iter().zip(&before) {
                assert!(&segment.bytes() == before, "{format:?} {sizes:?}");
            }
        }
    }
}

#[test]
fn chunks_that_were_not_planned_are_refused_before_a_byte_moves() {
    let engine = Engine::new(SPLIT, DType::UInt8, SMALL);
    let paged = engine.paged(1);
    let plan = CopyPlan::new(
        &paged,
        &PlanRequest {
            block_ids: &[1],
            first_blocks: &[0],
            skip_blocks: 0,
            null_block: None,
        },
    )
    .unwrap();
    let pool = CopyPool::new(0).unwrap();
    let mut short = vec![7; paged.chunk_bytes() as usize - 1];
    let err = pool.gather(&plan, &mut [&mut short]).unwrap_err();
    assert!(
        matches!(err, CopyError::ChunkBytes { chunk: 0, .. }),
        "{err}"
    );
    assert!(short.iter().all(|&b| b == 7));
    let err = pool.scatter(&plan, &[]).unwrap_err();
    assert!(
        matches!(
            err,
            CopyError::Chunks {
                expected: 1,
                found: 0
            }
        ),
        "{err}"
    );
}

const SMALL: Sizes = Sizes {
    layers: 1,
    blocks: 3,
    block_tokens: 4,
    heads: 1,
    element: 4096,
    padding: 0,
    one_segment: false,
};

#[test]
fn an_engine_that_cuts_its_memory_short_gets_an_error_and_the_server_lives() {
    let engine = Engine::new(SPLIT, DType::UInt8, SMALL);
    let paged = engine.paged(1);
    let plan = CopyPlan::new(
        &paged,
        &PlanRequest {
            block_ids: &[2],
            first_blocks: &[0],
            skip_blocks: 0,
            null_block: None,
        },
    )
    .unwrap();
    let pool = CopyPool::new(1).unwrap();
    let mut chunk = vec![0; paged.chunk_bytes() as usize];
    pool.gather(&plan, &mut [&mut chunk]).unwrap();
    let path = engine.segments[0].name().path();
    fs::OpenOptions::new()
        .write(true)
        .open(path)
        .unwrap()
        .set_len(4096)
        .unwrap();
    let err = pool.gather(&plan, &mut [&mut chunk]).unwrap_err();
    assert!(
        matches!(err, CopyError::Segment(SegmentError::Size { .. })),
        "{err}"
    );
    let err = pool.scatter(&plan, &[&chunk]).unwrap_err();
    assert!(
        matches!(err, CopyError::Segment(SegmentError::Size { .. })),
        "{err}"
    );
}

/// The window that no check of the size can close: the owner cuts while the copy runs.
#[test]
fn an_engine_that_cuts_its_memory_during_the_copy_is_found_out() {
    let sizes = Sizes {
        blocks: 64,
        ..SMALL
    };
    for round in 0..20 {
        let engine = Engine::new(SPLIT, DType::UInt8, sizes);
        let paged = engine.paged(64);
        let table: Vec<u32> = (0..64).collect();
        let plan = CopyPlan::new(
            &paged,
            &PlanRequest {
                block_ids: &table,
                first_blocks: &[0],
                skip_blocks: 0,
                null_block: None,
            },
        )
        .unwrap();
        let pool = CopyPool::new(1).unwrap();
        let path = engine.segments[0].name().path();
        let cut = thread::spawn(move || {
            thread::sleep(Duration::from_micros(100 * round));
            fs::OpenOptions::new()
                .write(true)
                .open(path)
                .unwrap()
                .set_len(0)
                .unwrap();
        });
        let before = engine.segments[0].mapped.len();
        let mut chunk = vec![0xee; paged.chunk_bytes() as usize];
        while pool.gather(&plan, &mut [&mut chunk]).is_ok() {
            // Whole: no zero page was taken for the engine's bytes.
            let expected = marked(0, before as usize);
            assert!(
                chunk == expected,
                "a gather that succeeded has the engine's bytes"
            );
        }
        cut.join().unwrap();
    }
}

/// A worker takes its blocks back while they are written: no thread begins another share.
#[test]
fn a_copy_that_is_stopped_writes_at_most_one_share_for_each_thread() {
    const BLOCK: usize = 16 << 10;
    const SHARES: usize = 16;
    let sizes = Sizes {
        layers: 1,
        blocks: (SHARES * SHARE as usize / BLOCK) as u64,
        block_tokens: 1,
        heads: 1,
        element: BLOCK as u64 / 2,
        padding: 0,
        one_segment: true,
    };
    // Keys and values, each with half of the bytes.
    let engine = Engine::new(SPLIT, DType::UInt8, sizes);
    let paged = engine.paged(sizes.blocks);
    // Every second block, so that each is a copy of its own.
    let even = (0..sizes.blocks as u32).step_by(2);
    let table: Vec<u32> = even.chain((1..sizes.blocks as u32).step_by(2)).collect();
    let request = PlanRequest {
        block_ids: &table,
        first_blocks: &[0],
        skip_blocks: 0,
        null_block: None,
    };
    let plan = CopyPlan::new(&paged, &request).unwrap();
    let chunk = vec![0xee; paged.chunk_bytes() as usize];
    for workers in 0..3 {
        for allowed in [0, 1, 5] {
            engine.segments[0].fill(&vec![0; engine.segments[0].mapped.len() as usize]);
            let asked = AtomicUsize::new(0);
            let proceed = || asked.fetch_add(1, Ordering::Relaxed) < allowed;
            let pool = CopyPool::new(workers).unwrap();
            let stopped = pool.scatter_while(&plan, &[&chunk], &proceed);
            assert!(matches!(stopped, Err(CopyError::Stopped)), "{stopped:?}");
            let written = engine.segments[0].bytes();
            let written = written.iter().filter(|&&byte| byte == 0xee).count();
            assert!(written <= allowed * SHARE as usize, "{written} bytes");
            assert_eq!(written > 0, allowed > 0);
            assert!(asked.into_inner() <= allowed + workers + 1);

            let asked = AtomicUsize::new(0);
            let proceed = || asked.fetch_add(1, Ordering::Relaxed) < allowed;
            let mut into = vec![0; chunk.len()];
            let stopped = pool.gather_while(&plan, &mut [&mut into], &proceed);
            assert!(matches!(stopped, Err(CopyError::Stopped)), "{stopped:?}");
        }
    }
}

/// Finding 16 of the review: an engine that names a block twice, or strides that overlap, had two
/// threads write the same bytes.
#[test]
fn a_scatter_that_writes_bytes_twice_runs_on_one_thread() {
    const BLOCK: usize = 16 << 10;
    let sizes = Sizes {
        layers: 1,
        blocks: 512,
        block_tokens: 1,
        heads: 1,
        element: BLOCK as u64 / 2,
        padding: 0,
        one_segment: true,
    };
    let engine = Engine::new(SPLIT, DType::UInt8, sizes);
    let paged = engine.paged(sizes.blocks);
    let pool = CopyPool::new(3).unwrap();
    let chunk = vec![0xee; paged.chunk_bytes() as usize];
    let threads = |paged: &PagedKv, chunk: &[u8], table: &[u32]| {
        let request = PlanRequest {
            block_ids: table,
            first_blocks: &[0],
            skip_blocks: 0,
            null_block: Some(u32::MAX),
        };
        let plan = CopyPlan::new(paged, &request).unwrap();
        let seen = Mutex::new(HashSet::new());
        let proceed = || {
            seen.lock().insert(thread::current().id());
            // Time for the others to take a share.
            thread::sleep(Duration::from_millis(2));
            true
        };
        pool.scatter_while(&plan, &[chunk], &proceed).unwrap();
        seen.into_inner()
    };
    let shuffled: Vec<u32> = (0..512).map(|id| (id * 7) % 512).collect();
    // The others may not wake before one has done all.
    let several = |paged: &PagedKv, chunk: &[u8], table: &[u32]| {
        (0..100).any(|_| threads(paged, chunk, table).len() > 1)
    };
    assert!(several(&paged, &chunk, &shuffled));
    let alone = HashSet::from([thread::current().id()]);
    let mut twice = shuffled.clone();
    twice[100] = twice[400];
    assert_eq!(threads(&paged, &chunk, &twice), alone);
    // What stands for nothing is not written, however often it is named.
    let mut absent = shuffled.clone();
    absent[100] = u32::MAX;
    absent[400] = u32::MAX;
    assert!(several(&paged, &chunk, &absent));
    // Blocks that overlap by a byte.
    let mut engine = Engine::new(LATENT, DType::UInt8, sizes);
    engine.tensors[0].strides[0] -= 1;
    let overlapping = engine.paged(sizes.blocks);
    let chunk = &chunk[..overlapping.chunk_bytes() as usize];
    assert_eq!(threads(&overlapping, chunk, &shuffled), alone);
    // Tensors that overlap by a byte, each in a segment of its own.
    let mut engine = Engine::new(LATENT, DType::UInt8, Sizes { layers: 2, ..sizes });
    let len = 512 * BLOCK as u64 / 2;
    let mut tensors = |apart: u64| {
        engine.tensors[0].storage_offset = 0;
        engine.tensors[1].storage_offset = apart;
        let group = engine.describe(512).unwrap();
        let segment = engine.mapped().remove(0);
        let segments = vec![Arc::clone(&segment), segment];
        group.open(&[0, 1], KvSegments::Host(segments)).unwrap()
    };
    let chunk = vec![0xee; 2 * len as usize];
    assert!(several(&tensors(len), &chunk, &shuffled));
    assert_eq!(threads(&tensors(len - 1), &chunk, &shuffled), alone);
}
