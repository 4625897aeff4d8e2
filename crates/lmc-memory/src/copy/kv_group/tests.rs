use super::super::testing::{Axis, Engine, FORMATS, LATENT, SPLIT, Sizes, position};
use super::*;

const SIZES: Sizes = Sizes {
    layers: 3,
    blocks: 7,
    block_tokens: 16,
    heads: 4,
    element: 8,
    padding: 0,
    one_segment: false,
};

#[test]
fn vllm_tensors_are_recognised_by_shape_and_order() {
    for format in FORMATS {
        let engine = Engine::new(format, DType::BFloat16, SIZES);
        let group = engine.describe(256).unwrap();
        assert_eq!(
            (group.tokens_per_block(), group.blocks_per_chunk()),
            (16, 16)
        );
        assert_eq!(group.dtype(), DType::BFloat16);
        assert_eq!(group.is_latent(), format == LATENT);
        let paged = engine.paged(16);
        assert_eq!((paged.blocks(), paged.blocks_per_chunk()), (7, 16));
        let elements: u64 = engine.tensors[0].shape.iter().product();
        assert_eq!(paged.chunk_bytes(), 3 * elements / 7 * 16 * 2, "{format:?}");
        // K and V are planes of a chunk where each has a range of its own.
        let planes = match position(format, Axis::Block) {
            Some(1) => Planes::KeyValue,
            _ => Planes::Fused,
        };
        assert_eq!(group.layout.planes(), planes, "{format:?}");
    }
    for shape in [&[][..], &[4], &[4, 4], &[3, 3, 4, 4, 4], &[1; 6], &[1; 7]] {
        let tensor = KvTensor {
            dtype: DType::BFloat16,
            shape,
            strides: shape,
            storage_offset: 0,
        };
        let described = KvGroup::describe(&[tensor], KvOrder::TokensFirst, None, 256);
        assert!(
            matches!(described, Err(PagedError::Unsupported { .. })),
            "{shape:?}"
        );
    }
}

/// Chunks whose bytes mean the same have one order, and all others differ.
#[test]
fn token_order_is_known_where_tokens_follow_each_other() {
    let order = |format, dtype, sizes| {
        let engine = Engine::new(format, dtype, sizes);
        engine.describe(256).unwrap().order()
    };
    let one_head = Sizes { heads: 1, ..SIZES };
    for format in FORMATS {
        let tokens_first = position(format, Axis::Token) < position(format, Axis::Head);
        let adjacent = format == LATENT || tokens_first;
        let packed_planes = position(format, Axis::Plane) == Some(1);
        let found = order(format, DType::BFloat16, SIZES);
        let is_tokens = matches!(found, ChunkOrder::Tokens(_));
        assert_eq!(is_tokens, adjacent && !packed_planes, "{format:?}");
        // Nor is it known what lies within a head's part of a block where there is one head.
        let found = order(format, DType::BFloat16, one_head);
        let is_tokens = matches!(found, ChunkOrder::Tokens(_));
        assert_eq!(is_tokens, adjacent && !packed_planes, "{format:?}");
        // Pages of bytes may hold anything.
        let found = order(format, DType::UInt8, SIZES);
        assert!(matches!(found, ChunkOrder::Blocks { .. }), "{format:?}");
    }
    let layout = GroupLayout::new(Planes::KeyValue, 3, 256, 32, DType::BFloat16).unwrap();
    assert_eq!(
        order(SPLIT, DType::BFloat16, SIZES),
        ChunkOrder::Tokens(layout)
    );
    let blocks = GroupLayout::new(Planes::KeyValue, 3, 16, 512, DType::BFloat16).unwrap();
    assert_eq!(
        order(FORMATS[1], DType::BFloat16, SIZES),
        ChunkOrder::Blocks {
            blocks,
            heads: 4,
            block_tokens: 16,
            inner_planes: 1,
            order: KvOrder::HeadsFirst
        }
    );
}

#[test]
fn blocks_must_divide_a_chunk() {
    let engine = Engine::new(LATENT, DType::BFloat16, SIZES);
    for tokens in [1, 8, 24, 255] {
        assert!(engine.describe(tokens).is_err(), "{tokens}");
    }
    let tensor = KvTensor {
        dtype: DType::BFloat16,
        shape: &[7, 16, 8],
        strides: &[128, 8, 1],
        storage_offset: 0,
    };
    let describe = |declared| KvGroup::describe(&[tensor], KvOrder::TokensFirst, declared, 256);
    // A compressed cache: a block id covers more tokens than the block has slots.
    let compressed = describe(Some(64)).unwrap();
    assert_eq!(
        (compressed.tokens_per_block(), compressed.blocks_per_chunk()),
        (64, 4)
    );
    assert!(matches!(compressed.order(), ChunkOrder::Blocks { .. }));
    assert!(describe(Some(0)).is_err());
    assert!(describe(Some(96)).is_err());
}

#[test]
fn a_cache_that_leaves_its_segment_is_refused() {
    for format in FORMATS {
        let mut engine = Engine::new(format, DType::BFloat16, SIZES);
        assert!(engine.try_paged(16).is_ok());
        let last = engine.tensors.len() - 1;
        engine.tensors[last].storage_offset = 1;
        let err = engine.try_paged(16).unwrap_err();
        assert!(matches!(err, PagedError::Outside { .. }), "{err}");
        for hostile in [u64::MAX, u64::MAX / 2, 1 << 62] {
            engine.tensors[last].storage_offset = hostile;
            assert!(engine.try_paged(16).is_err(), "{hostile}");
        }
        engine.tensors[last].storage_offset = 0;
        engine.tensors[last].segment = 99;
        assert!(matches!(
            engine.try_paged(16),
            Err(PagedError::Outside { len: 0, .. })
        ));
        for axis in 0..engine.tensors[0].shape.len() - 1 {
            for hostile in [u64::MAX / 3, u64::MAX, 0] {
                let mut engine = Engine::new(format, DType::BFloat16, SIZES);
                for tensor in &mut engine.tensors {
                    tensor.shape[axis] = hostile;
                }
                assert!(engine.try_paged(16).is_err(), "shape[{axis}] = {hostile}");
            }
            let mut engine = Engine::new(format, DType::BFloat16, SIZES);
            for tensor in &mut engine.tensors {
                tensor.strides[axis] = u64::MAX / 3;
            }
            assert!(engine.try_paged(16).is_err(), "strides[{axis}]");
        }
    }
}

#[test]
fn tensors_that_contradict_each_other_are_refused() {
    let packed = FORMATS[4];
    let refused = |change: &dyn Fn(&mut Engine)| {
        let mut engine = Engine::new(packed, DType::BFloat16, SIZES);
        change(&mut engine);
        matches!(engine.describe(256), Err(PagedError::Unsupported { .. }))
    };
    assert!(!refused(&|_| ()));
    assert!(refused(&|engine| engine.tensors[2].shape[0] -= 1));
    assert!(refused(&|engine| engine.tensors[2].strides[0] += 1));
    assert!(refused(&|engine| engine.tensors.clear()));
    // A block that is not contiguous, and strides for fewer axes than there are.
    for (axis, stride) in [(3, 2), (2, 9), (1, 33)] {
        assert!(refused(&|engine| {
            for tensor in &mut engine.tensors {
                tensor.strides[axis] = stride;
            }
        }));
    }
    assert!(refused(&|engine| {
        for tensor in &mut engine.tensors {
            tensor.strides.pop();
        }
    }));
}
