use super::super::testing::{Engine, Sizes};
use super::*;
use crate::{DType, KvFormat};

const SIZES: Sizes = Sizes {
    layers: 2,
    blocks: 8,
    block_tokens: 4,
    heads: 2,
    element: 16,
    padding: 0,
    one_segment: false,
};
/// Bytes of one token in one plane of one layer.
const TOKEN: u64 = 2 * 16 * 2;

fn plan(format: KvFormat, table: &[u32], starts: &[u64], skip: u64) -> CopyPlan {
    let engine = Engine::new(format, DType::Float16, SIZES);
    let paged = engine.paged(8);
    let request = PlanRequest {
        block_ids: table,
        chunk_starts: starts,
        skip_first_tokens: skip,
        null_block: None,
    };
    CopyPlan::new(&paged, paged.layout(), &request).unwrap()
}

fn runs(plan: &CopyPlan) -> Vec<(u32, u64, u64, u64)> {
    plan.ops
        .iter()
        .map(|op| (op.segment, op.paged, op.chunk_offset, op.run))
        .collect()
}

#[test]
fn neighbours_on_both_sides_are_one_run() {
    let format = KvFormat::TWO_NB_BS_NH_HS;
    // Each plane of each layer is one run of eight tokens.
    let block = 4 * TOKEN;
    let k_to_v = 8 * block;
    assert_eq!(
        runs(&plan(format, &[3, 4], &[0], 0)),
        [
            (0, 3 * block, 0, 2 * block),
            (1, 3 * block, 2 * block, 2 * block),
            (0, k_to_v + 3 * block, 4 * block, 2 * block),
            (1, k_to_v + 3 * block, 6 * block, 2 * block),
        ]
    );
    // The other way round they touch in the engine's memory but not in the chunk.
    assert_eq!(plan(format, &[4, 3], &[0], 0).copies(), 8);
    // Neighbouring blocks of two chunks stay apart.
    assert_eq!(plan(format, &[1, 2, 3, 4], &[0, 8], 0).copies(), 8);
}

#[test]
fn tokens_and_heads_that_lie_apart_are_one_copy_a_block() {
    let plan = plan(KvFormat::TWO_NB_NH_BS_HS, &[3, 4], &[0], 0);
    assert_eq!(plan.copies(), 2 * 2 * 2);
    let op = plan.ops[1];
    assert_eq!(
        (op.paged, op.chunk_offset, op.run, op.tokens),
        (4 * 4 * TOKEN, 4 * TOKEN, 32, 4)
    );
    assert_eq!(
        plan.heads(&op),
        Repeat {
            count: 2,
            paged: 4 * 32,
            chunk: 32
        }
    );
    assert_eq!(
        plan.tokens(&op),
        Repeat {
            count: 4,
            paged: 32,
            chunk: TOKEN
        }
    );
}

#[test]
fn skipped_tokens_are_left_out_to_the_token() {
    let plan = plan(KvFormat::TWO_NB_BS_NH_HS, &[0, 1, 2, 3], &[0, 8], 5);
    // Five tokens of the first chunk are skipped, in each of four planes.
    assert_eq!(plan.bytes(), 4 * (16 - 5) * TOKEN);
    assert_eq!(plan.ops[0].chunk_offset, 5 * TOKEN);
    assert_eq!(plan.ops[0].paged, 5 * TOKEN);
    assert_eq!(
        plan.holes[0],
        Hole {
            chunk: 0,
            offset: 0,
            len: 5 * TOKEN
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
    let engine = Engine::new(KvFormat::TWO_NB_BS_NH_HS, DType::Float16, sizes);
    let paged = engine.paged(64 * 64);
    let table: Vec<u32> = (0..64).collect();
    let request = PlanRequest {
        block_ids: &table,
        chunk_starts: &[0],
        skip_first_tokens: 0,
        null_block: None,
    };
    let plan = CopyPlan::new(&paged, paged.layout(), &request).unwrap();
    assert_eq!(plan.bytes(), 8 << 20);
    assert!(plan.ops.iter().all(|op| op.run == MAX_RUN));
    assert_eq!(plan.copies(), 8);
}

#[test]
fn requests_that_leave_the_cache_are_refused() {
    let engine = Engine::new(KvFormat::NB_BS_HS, DType::Float16, SIZES);
    let paged = engine.paged(8);
    let layout = *paged.layout();
    let make = |table: &[u32], starts: &[u64], null_block| {
        let request = PlanRequest {
            block_ids: table,
            chunk_starts: starts,
            skip_first_tokens: 0,
            null_block,
        };
        CopyPlan::new(&paged, &layout, &request).map(|plan| plan.copies())
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
            end: 8,
            covered: 4
        })
    );
    assert_eq!(
        make(&[0, 1], &[0, u64::MAX], None),
        Err(PlanError::Short {
            chunk: 1,
            end: u64::MAX,
            covered: 8
        })
    );
    assert_eq!(make(&[], &[], None), Ok(0));
}

#[test]
fn a_chunk_of_another_layout_is_refused() {
    let engine = Engine::new(KvFormat::NB_BS_HS, DType::Float16, SIZES);
    let paged = engine.paged(8);
    let request = PlanRequest {
        block_ids: &[0, 1],
        chunk_starts: &[0],
        skip_first_tokens: 0,
        null_block: None,
    };
    let make = |layout| CopyPlan::new(&paged, &layout, &request).map(|plan| plan.bytes());
    let other = GroupLayout::mla(2, 8, 16, DType::BFloat16).unwrap();
    assert!(matches!(make(other), Err(PlanError::Layout { .. })));
    let other = GroupLayout::mha(2, 8, 16, DType::Float16).unwrap();
    assert!(matches!(make(other), Err(PlanError::Layout { .. })));
    // A partial chunk has the engine's layout with fewer tokens.
    let partial = GroupLayout::mla(2, 3, 16, DType::Float16).unwrap();
    assert_eq!(make(partial), Ok(2 * 3 * 16 * 2));
}
