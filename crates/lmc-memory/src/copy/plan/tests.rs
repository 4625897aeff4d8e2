use super::super::testing::{Engine, Format, LATENT, SPLIT, Sizes};
use super::*;
use crate::DType;

const SIZES: Sizes = Sizes {
    layers: 2,
    blocks: 8,
    block_tokens: 4,
    heads: 2,
    element: 16,
    padding: 0,
    one_segment: false,
};
/// Bytes of one block in one plane of one layer.
const BLOCK: u64 = 4 * 2 * 16 * 2;

/// A plan of chunks of two blocks.
fn plan(format: Format, table: &[u32], starts: &[u64], skip: u64) -> CopyPlan {
    let engine = Engine::new(format, DType::Float16, SIZES);
    let request = PlanRequest {
        block_ids: table,
        first_blocks: starts,
        skip_blocks: skip,
        null_block: None,
    };
    CopyPlan::new(&engine.paged(2), &request).unwrap()
}

fn runs(plan: &CopyPlan) -> Vec<(u32, u64, u64, u64)> {
    plan.runs
        .iter()
        .map(|run| (run.segment, run.paged, run.chunk_offset, run.len))
        .collect()
}

#[test]
fn neighbours_on_both_sides_are_one_run() {
    // Each plane of each layer is one run of two blocks.
    let k_to_v = 8 * BLOCK;
    assert_eq!(
        runs(&plan(SPLIT, &[3, 4], &[0], 0)),
        [
            (0, 3 * BLOCK, 0, 2 * BLOCK),
            (1, 3 * BLOCK, 2 * BLOCK, 2 * BLOCK),
            (0, k_to_v + 3 * BLOCK, 4 * BLOCK, 2 * BLOCK),
            (1, k_to_v + 3 * BLOCK, 6 * BLOCK, 2 * BLOCK),
        ]
    );
    // The other way round they touch in the engine's memory but not in the chunk.
    assert_eq!(plan(SPLIT, &[4, 3], &[0], 0).copies(), 8);
    // Neighbouring blocks of two chunks stay apart.
    assert_eq!(plan(SPLIT, &[1, 2, 3, 4], &[0, 2], 0).copies(), 8);
}

#[test]
fn skipped_blocks_are_left_out() {
    let plan = plan(SPLIT, &[0, 1, 2, 3], &[0, 2], 1);
    // The first block of the first chunk is skipped, in each of four planes.
    assert_eq!(plan.bytes(), 4 * 3 * BLOCK);
    assert_eq!(
        (plan.runs[0].chunk_offset, plan.runs[0].paged),
        (BLOCK, BLOCK)
    );
    assert_eq!(
        plan.holes[0],
        Hole {
            chunk: 0,
            offset: 0,
            len: BLOCK
        }
    );
    assert_eq!(plan.holes.len(), 4);
}

#[test]
fn long_runs_are_cut_for_the_cores() {
    let sizes = Sizes {
        blocks: 64,
        block_tokens: 64,
        element: 256,
        layers: 1,
        ..SIZES
    };
    let engine = Engine::new(SPLIT, DType::Float16, sizes);
    let table: Vec<u32> = (0..64).collect();
    let request = PlanRequest {
        block_ids: &table,
        first_blocks: &[0],
        skip_blocks: 0,
        null_block: None,
    };
    let plan = CopyPlan::new(&engine.paged(64), &request).unwrap();
    assert_eq!(plan.bytes(), 8 << 20);
    assert!(plan.runs.iter().all(|run| run.len == MAX_RUN));
    assert_eq!(plan.copies(), 8);
}

#[test]
fn requests_that_leave_the_cache_are_refused() {
    let paged = Engine::new(LATENT, DType::Float16, SIZES).paged(2);
    let make = |table: &[u32], starts: &[u64], null_block| {
        let request = PlanRequest {
            block_ids: table,
            first_blocks: starts,
            skip_blocks: 0,
            null_block,
        };
        CopyPlan::new(&paged, &request).map(|plan| plan.copies())
    };
    assert_eq!(
        make(&[0, 8], &[0], None),
        Err(PlanError::Block {
            id: 8,
            position: 1,
            blocks: 8
        })
    );
    // A null block is never looked at, so it may have any id.
    assert_eq!(make(&[0, u32::MAX], &[0], Some(u32::MAX)), Ok(2));
    assert_eq!(
        make(&[0], &[0], None),
        Err(PlanError::Short {
            chunk: 0,
            end: 2,
            found: 1
        })
    );
    assert_eq!(
        make(&[0, 1], &[0, u64::MAX], None),
        Err(PlanError::Short {
            chunk: 1,
            end: u64::MAX,
            found: 2
        })
    );
    assert_eq!(make(&[], &[], None), Ok(0));
}
