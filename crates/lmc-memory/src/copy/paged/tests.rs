use super::super::testing::{Engine, FORMATS, Segment, Sizes};
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
fn vllm_tensors_are_told_by_shape_and_hint() {
    use KvOrder::{HeadsFirst, TokensFirst};
    for format in FORMATS {
        let engine = Engine::new(format, DType::BFloat16, SIZES);
        let axis = |axis| format.axes().iter().position(|&a| a == axis);
        let order = if axis(Axis::Head) < axis(Axis::Token) {
            HeadsFirst
        } else {
            TokensFirst
        };
        let found = KvFormat::detect_vllm(&engine.tensors[0].shape, order, None).unwrap();
        assert_eq!(found, format);
        let paged = PagedKv::from_vllm(
            &engine.tensors,
            order,
            None,
            DType::BFloat16,
            256,
            engine.mapped(),
        )
        .unwrap();
        assert_eq!(paged.layout().layers(), 3);
        assert_eq!(paged.layout().planes(), engine.planes());
        assert_eq!(
            (paged.geometry().blocks, paged.geometry().block_tokens),
            (7, 16)
        );
    }
    for shape in [&[][..], &[4], &[4, 4], &[3, 3, 4, 4, 4], &[1; 7]] {
        assert!(
            KvFormat::detect_vllm(shape, TokensFirst, None).is_err(),
            "{shape:?}"
        );
    }
}

/// With one head, tokens and heads have no order in memory, and sorting by stride puts the
/// head last; the hint alone would read blocks of one token.
#[test]
fn a_single_head_is_told_by_the_block_size() {
    let shape = [2, 7, 16, 1, 8];
    let found = KvFormat::detect_vllm(&shape, KvOrder::HeadsFirst, Some(16)).unwrap();
    assert_eq!(found, KvFormat::TWO_NB_BS_NH_HS);
    let found = KvFormat::detect_vllm(&shape, KvOrder::HeadsFirst, None).unwrap();
    assert_eq!(found, KvFormat::TWO_NB_NH_BS_HS);
    // Where both fit, the hint stands.
    let shape = [2, 7, 16, 16, 8];
    let found = KvFormat::detect_vllm(&shape, KvOrder::HeadsFirst, Some(16)).unwrap();
    assert_eq!(found, KvFormat::TWO_NB_NH_BS_HS);
}

#[test]
fn axes_are_sorted_by_stride() {
    let view = TensorView {
        segment: 1,
        storage_offset: 5,
        shape: vec![2, 7, 16, 4, 8],
        strides: vec![7 * 512, 512, 8, 128, 1],
    };
    let sorted = view.by_stride();
    assert_eq!(sorted.shape, [2, 7, 4, 16, 8]);
    assert_eq!(sorted.strides, [7 * 512, 512, 128, 8, 1]);
    let single = TensorView {
        shape: vec![7, 1, 16, 8],
        strides: vec![128, 8, 8, 1],
        ..view
    };
    assert_eq!(single.by_stride().shape, [7, 16, 1, 8]);
}

#[test]
fn a_cache_that_leaves_its_segment_is_refused() {
    for format in FORMATS {
        let mut engine = Engine::new(format, DType::BFloat16, SIZES);
        let make = |engine: &Engine| {
            PagedKv::from_tensors(
                format,
                &engine.tensors,
                DType::BFloat16,
                256,
                engine.mapped(),
            )
            .map(|_| ())
        };
        assert_eq!(make(&engine), Ok(()));
        let last = engine.tensors.len() - 1;
        engine.tensors[last].storage_offset = 1;
        let err = make(&engine).unwrap_err();
        assert!(matches!(err, PagedError::Outside { .. }), "{err}");
        for hostile in [u64::MAX, u64::MAX / 2, 1 << 62] {
            engine.tensors[last].storage_offset = hostile;
            assert!(make(&engine).is_err(), "{hostile}");
        }
        engine.tensors[last].storage_offset = 0;
        engine.tensors[last].segment = 99;
        assert!(matches!(
            make(&engine),
            Err(PagedError::Outside { len: 0, .. })
        ));
        engine.tensors[last].segment = last;
        for axis in 0..engine.tensors[0].shape.len() - 1 {
            let mut hostile = Engine::new(format, DType::BFloat16, SIZES);
            for tensor in &mut hostile.tensors {
                tensor.strides[axis] = u64::MAX / 3;
            }
            // An axis of one entry has no stride to go wrong.
            assert!(make(&hostile).is_err() || hostile.tensors[0].shape[axis] == 1);
            for tensor in &mut hostile.tensors {
                tensor.shape[axis] = u64::MAX;
            }
            assert!(make(&hostile).is_err());
        }
    }
}

#[test]
fn tensors_that_contradict_each_other_are_refused() {
    let format = KvFormat::NB_BS_NH_CS;
    let mut engine = Engine::new(format, DType::BFloat16, SIZES);
    engine.tensors[2].shape[0] -= 1;
    let make = |tensors: &[TensorView], segments| {
        PagedKv::from_tensors(format, tensors, DType::BFloat16, 256, segments).map(|_| ())
    };
    let err = make(&engine.tensors, engine.mapped()).unwrap_err();
    assert!(err.to_string().contains("tensor 2 differs"), "{err}");
    assert!(make(&[], Vec::new()).is_err());
    let mut apart = engine.tensors[0].clone();
    apart.strides[3] = 2;
    assert!(make(&[apart], engine.mapped()).is_err());
    let mut ragged = engine.tensors[0].clone();
    ragged.strides.pop();
    assert!(make(&[ragged], engine.mapped()).is_err());
}

#[test]
fn a_blocked_indexer_cache_is_refused_with_the_reason() {
    let segment = Segment::new(&[0; 4 * 16 * 132]);
    let view = TensorView {
        segment: 0,
        storage_offset: 0,
        shape: vec![4, 16, 132],
        strides: vec![16 * 132, 132, 1],
    };
    let segments = vec![Arc::clone(&segment.mapped)];
    let order = KvOrder::TokensFirst;
    let err = PagedKv::from_vllm(&[view], order, None, DType::UInt8, 256, segments).unwrap_err();
    assert!(err.to_string().contains("indexer"), "{err}");
}

#[test]
fn geometry_by_hand_is_checked_too() {
    let segment = Segment::new(&[0; 4096]);
    let layout = GroupLayout::mla(1, 8, 16, DType::UInt8).unwrap();
    let fits = PagedGeometry {
        blocks: 16,
        block_tokens: 16,
        block_stride: 256,
        token_stride: 16,
        heads: 1,
        head_stride: 0,
        head_bytes: 16,
    };
    let base = PlaneBase {
        segment: 0,
        offset: 0,
    };
    let make = |geometry, planes: &[PlaneBase]| {
        PagedKv::new(
            layout,
            geometry,
            planes.to_vec(),
            vec![Arc::clone(&segment.mapped)],
        )
        .map(|_| ())
    };
    assert_eq!(make(fits, &[base]), Ok(()));
    assert!(make(fits, &[]).is_err());
    assert!(make(fits, &[base, base]).is_err());
    for wrong in [
        PagedGeometry { blocks: 17, ..fits },
        PagedGeometry { blocks: 0, ..fits },
        PagedGeometry {
            block_tokens: 0,
            ..fits
        },
        PagedGeometry {
            block_stride: 257,
            ..fits
        },
        PagedGeometry {
            token_stride: u64::MAX,
            ..fits
        },
        PagedGeometry {
            head_bytes: 15,
            ..fits
        },
        PagedGeometry { heads: 0, ..fits },
        PagedGeometry {
            heads: u32::MAX,
            head_bytes: u64::MAX,
            ..fits
        },
    ] {
        assert!(make(wrong, &[base]).is_err(), "{wrong:?}");
    }
}
