//! Detects scatters of which two copies could write the same byte of an engine's segment.
//!
//! Threads share out the copies of a plan, so no two of them may write one byte. Engines choose
//! strides, offsets and block ids freely, so this is checked: where it cannot be shown, a
//! scatter runs on one thread.

use super::paged::PlaneBase;

/// Pairs of planes that are compared at most; what has more counts as overlapping.
const MAX_PAIRS: usize = 1 << 18;

/// Returns true if no byte of a cache belongs to two blocks of its planes.
pub(super) fn is_disjoint(
    blocks: u32,
    block_bytes: u64,
    block_stride: u64,
    planes: &[PlaneBase],
) -> bool {
    // A single block has no stride to go wrong.
    let stride = if blocks > 1 {
        block_stride
    } else {
        block_bytes
    };
    let [blocks, block_bytes, stride] = [u64::from(blocks), block_bytes, stride].map(i128::from);
    if stride < block_bytes {
        return false;
    }
    let extent = (blocks - 1) * stride + block_bytes;
    // Returns true if two planes, of which the second begins `delta` bytes after the first, share
    // a byte. A block can only meet the two blocks of the other plane that begin nearest to it.
    let meet = |delta: i128| {
        let nearest = delta.div_euclid(stride);
        [nearest, nearest + 1]
            .into_iter()
            .any(|apart| apart.abs() < blocks && (delta - apart * stride).abs() < block_bytes)
    };
    let mut starts: Vec<(usize, u64)> = planes.iter().map(|p| (p.segment, p.offset)).collect();
    starts.sort_unstable();
    let mut pairs = 0;
    for (i, &(segment, offset)) in starts.iter().enumerate() {
        for &(other, further) in &starts[i + 1..] {
            let delta = i128::from(further) - i128::from(offset);
            if other != segment || delta >= extent {
                break;
            }
            pairs += 1;
            if pairs > MAX_PAIRS || meet(delta) {
                return false;
            }
        }
    }
    true
}

/// Returns true if no block is named twice.
pub(super) fn are_distinct(blocks: &mut [u32]) -> bool {
    blocks.sort_unstable();
    !blocks.windows(2).any(|pair| pair[0] == pair[1])
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    /// Every byte of every block, once.
    fn bytes_are_distinct(blocks: u32, bytes: u64, stride: u64, planes: &[PlaneBase]) -> bool {
        let mut seen = HashSet::new();
        planes.iter().all(|plane| {
            (0..u64::from(blocks)).all(|block| {
                let start = plane.offset + block * stride;
                (start..start + bytes).all(|at| seen.insert((plane.segment, at)))
            })
        })
    }

    proptest! {
        #[test]
        fn what_counts_as_disjoint_has_no_byte_twice(
            (blocks, bytes, stride) in (1u32..5, 1u64..12, 0u64..40),
            offsets in prop::collection::vec((0usize..2, 0u64..120), 1..5),
        ) {
            let base = |&(segment, offset): &(usize, u64)| PlaneBase { segment, offset };
            let planes: Vec<_> = offsets.iter().map(base).collect();
            prop_assert_eq!(
                is_disjoint(blocks, bytes, stride, &planes),
                bytes_are_distinct(blocks, bytes, stride, &planes)
            );
        }

        #[test]
        fn blocks_are_distinct_when_none_is_named_twice(
            mut blocks in prop::collection::vec(0u32..8, 0..6),
        ) {
            let distinct = blocks.iter().collect::<HashSet<_>>().len() == blocks.len();
            prop_assert_eq!(are_distinct(&mut blocks), distinct);
        }
    }

    #[test]
    fn the_layouts_of_engines_are_disjoint() {
        let (blocks, bytes) = (100, 16 * 8 * 128);
        let planes = |count: u64, apart: u64| -> Vec<PlaneBase> {
            let base = |i| PlaneBase {
                segment: 0,
                offset: i * apart,
            };
            (0..count).map(base).collect()
        };
        let one_after_another = planes(256, blocks * bytes);
        assert!(is_disjoint(blocks as u32, bytes, bytes, &one_after_another));
        let twice = [one_after_another[0], one_after_another[0]];
        assert!(!is_disjoint(blocks as u32, bytes, bytes, &twice));
        // K and V, or all layers, within each block.
        let inside = planes(64, bytes);
        assert!(is_disjoint(blocks as u32, bytes, 64 * bytes, &inside));
        assert!(!is_disjoint(blocks as u32, bytes, 64 * bytes - 1, &inside));
    }
}
