//! Detects scatters of which two copies could write the same byte of an engine's segment.
//!
//! Threads share out the copies of a plan, so no two of them may write one byte. Engines name
//! strides, offsets and block ids as they like, so this is checked: where it cannot be shown, a
//! scatter runs on one thread.

use super::paged::{PagedGeometry, PlaneBase};

/// Pairs of planes that are compared at most; what has more counts as overlapping.
const MAX_PAIRS: usize = 1 << 18;

/// A repetition: its count, and the bytes from one to the next.
#[derive(Clone, Copy)]
struct Level {
    count: i128,
    stride: i128,
    /// Bytes from the first to the last byte of one repetition.
    inner: i128,
}

/// The bytes of one plane: runs repeated in nested levels, the widest first.
struct Shape {
    levels: Vec<Level>,
    run: i128,
    extent: i128,
}

impl Shape {
    /// `None` when the repetitions do not nest, so that they may overlap one another.
    fn new(geometry: &PagedGeometry) -> Option<Self> {
        let mut strides: Vec<(i128, i128)> = [
            (geometry.blocks, geometry.block_stride),
            (geometry.block_tokens, geometry.token_stride),
            (geometry.heads, geometry.head_stride),
        ]
        .into_iter()
        .filter(|&(count, _)| count > 1)
        .map(|(count, stride)| (i128::from(count), i128::from(stride)))
        .collect();
        strides.sort_by_key(|&(_, stride)| stride);
        let run = i128::from(geometry.head_bytes);
        let mut extent = run;
        let mut levels = Vec::with_capacity(strides.len());
        for (count, stride) in strides {
            if stride < extent {
                return None;
            }
            levels.push(Level {
                count,
                stride,
                inner: extent,
            });
            extent += (count - 1) * stride;
        }
        levels.reverse();
        Some(Self {
            levels,
            run,
            extent,
        })
    }

    /// Returns true if the shape and the same shape `delta` bytes further on share a byte.
    fn meets(&self, delta: i128) -> bool {
        fn meets(levels: &[Level], run: i128, delta: i128) -> bool {
            let Some((level, inner)) = levels.split_first() else {
                return delta.abs() < run;
            };
            let nearest = delta.div_euclid(level.stride);
            // Repetitions further apart than these two have no byte in common.
            [nearest, nearest + 1].into_iter().any(|apart| {
                let rest = delta - apart * level.stride;
                apart.abs() < level.count && rest.abs() < level.inner && meets(inner, run, rest)
            })
        }
        meets(&self.levels, self.run, delta)
    }
}

/// Returns true if no byte of a cache belongs to two runs of its planes, blocks, tokens or heads.
pub(super) fn is_disjoint(geometry: &PagedGeometry, planes: &[PlaneBase]) -> bool {
    let Some(shape) = Shape::new(geometry) else {
        return false;
    };
    let mut starts: Vec<(usize, u64)> = planes.iter().map(|p| (p.segment, p.offset)).collect();
    starts.sort_unstable();
    let mut pairs = 0;
    for (i, &(segment, offset)) in starts.iter().enumerate() {
        for &(other, further) in &starts[i + 1..] {
            let delta = i128::from(further) - i128::from(offset);
            if other != segment || delta >= shape.extent {
                break;
            }
            pairs += 1;
            if pairs > MAX_PAIRS || shape.meets(delta) {
                return false;
            }
        }
    }
    true
}

/// Tokens of a block: block, first token, number of tokens.
pub(super) type Span = (u32, u32, u32);

/// Returns true if no token of any block is in two spans.
pub(super) fn are_distinct(spans: &mut [Span]) -> bool {
    spans.sort_unstable();
    let touch = |pair: &[Span]| pair[0].0 == pair[1].0 && pair[0].1 + pair[0].2 > pair[1].1;
    !spans.windows(2).any(touch)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    /// Every byte of every run, once.
    fn bytes_are_distinct(geometry: &PagedGeometry, planes: &[PlaneBase]) -> bool {
        let mut seen = HashSet::new();
        planes.iter().all(|plane| {
            (0..u64::from(geometry.blocks)).all(|block| {
                (0..u64::from(geometry.block_tokens)).all(|token| {
                    (0..u64::from(geometry.heads)).all(|head| {
                        let run = plane.offset
                            + block * geometry.block_stride
                            + token * geometry.token_stride
                            + head * geometry.head_stride;
                        (run..run + geometry.head_bytes).all(|at| seen.insert((plane.segment, at)))
                    })
                })
            })
        })
    }

    proptest! {
        #[test]
        fn what_counts_as_disjoint_has_no_byte_twice(
            (blocks, block_tokens, heads) in (1u32..4, 1u32..4, 1u32..4),
            (block_stride, token_stride, head_stride) in (0u64..40, 0u64..20, 0u64..20),
            head_bytes in 1u64..6,
            offsets in prop::collection::vec((0usize..2, 0u64..60), 1..5),
        ) {
            let geometry = PagedGeometry {
                blocks, block_tokens, block_stride, token_stride, heads, head_stride, head_bytes,
            };
            let base = |&(segment, offset): &(usize, u64)| PlaneBase { segment, offset };
            let planes: Vec<_> = offsets.iter().map(base).collect();
            let disjoint = bytes_are_distinct(&geometry, &planes);
            // Repetitions that interleave without nesting may count as overlapping.
            if Shape::new(&geometry).is_some() {
                prop_assert_eq!(is_disjoint(&geometry, &planes), disjoint);
            } else {
                prop_assert!(!is_disjoint(&geometry, &planes));
            }
        }

        #[test]
        fn spans_are_distinct_when_no_token_is_in_two(
            mut spans in prop::collection::vec((0u32..4, 0u32..8, 1u32..4), 0..6),
        ) {
            let mut seen = HashSet::new();
            let tokens = |&(block, first, count): &Span| {
                (first..first + count).map(move |token| (block, token))
            };
            let distinct = spans.iter().flat_map(tokens).all(|token| seen.insert(token));
            prop_assert_eq!(are_distinct(&mut spans), distinct);
        }
    }

    #[test]
    fn the_layouts_of_engines_are_disjoint() {
        let (blocks, tokens, heads, size) = (100, 16, 8, 128u64);
        let dense = |order: [usize; 3]| {
            let counts = [blocks, tokens, heads];
            let mut strides = [0; 3];
            let mut stride = size;
            for axis in order.into_iter().rev() {
                strides[axis] = stride;
                stride *= counts[axis];
            }
            let geometry = PagedGeometry {
                blocks: blocks as u32,
                block_tokens: tokens as u32,
                block_stride: strides[0],
                token_stride: strides[1],
                heads: heads as u32,
                head_stride: strides[2],
                head_bytes: size,
            };
            (geometry, stride)
        };
        for order in [[0, 1, 2], [0, 2, 1], [2, 0, 1]] {
            let (geometry, bytes) = dense(order);
            let one_after_another = |i| PlaneBase {
                segment: 0,
                offset: i * bytes,
            };
            let planes: Vec<_> = (0..256).map(one_after_another).collect();
            assert!(is_disjoint(&geometry, &planes), "{order:?}");
            let twice = [planes[0], planes[0]];
            assert!(!is_disjoint(&geometry, &twice), "{order:?}");
        }
        // K and V, or all layers, within each block.
        let (mut geometry, _) = dense([0, 1, 2]);
        let block = geometry.block_stride;
        geometry.block_stride = 64 * block;
        let planes: Vec<_> = (0..64)
            .map(|i| PlaneBase {
                segment: 0,
                offset: i * block,
            })
            .collect();
        assert!(is_disjoint(&geometry, &planes));
        geometry.block_stride -= 1;
        assert!(!is_disjoint(&geometry, &planes));
    }
}
