//! Detection of scatters in which two copies could write the same byte of an engine's memory.
//!
//! Threads divide the copies of a plan among themselves, so no two copies may write the same byte. Engines
//! choose strides, offsets and block ids freely, so this is checked: unless the check succeeds, a scatter
//! runs on one thread.

/// Most pairs of planes that are compared; a cache with more pairs counts as overlapping.
const MAX_PAIRS: usize = 1 << 18;

/// Returns true if no byte of a cache belongs to two blocks of its planes. `starts` are the addresses at
/// which the planes begin.
pub(super) fn is_disjoint(
    blocks: u32,
    block_bytes: u64,
    block_stride: u64,
    mut starts: Vec<u64>,
) -> bool {
    // The stride of a single block is never used.
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
    // Returns true if two planes share a byte; the second one begins `delta` bytes after the first. A block
    // can only overlap the two blocks of the other plane that begin nearest to it.
    let meet = |delta: i128| {
        let nearest = delta.div_euclid(stride);
        [nearest, nearest + 1]
            .into_iter()
            .any(|apart| apart.abs() < blocks && (delta - apart * stride).abs() < block_bytes)
    };
    starts.sort_unstable();
    let mut pairs = 0;
    for (i, &start) in starts.iter().enumerate() {
        for &further in &starts[i + 1..] {
            let delta = i128::from(further - start);
            if delta >= extent {
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

/// Returns true if no block occurs twice.
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
    fn bytes_are_distinct(blocks: u32, bytes: u64, stride: u64, starts: &[u64]) -> bool {
        let mut seen = HashSet::new();
        starts.iter().all(|start| {
            (0..u64::from(blocks)).all(|block| {
                let start = start + block * stride;
                (start..start + bytes).all(|at| seen.insert(at))
            })
        })
    }

    proptest! {
        #[test]
        fn what_counts_as_disjoint_has_no_byte_twice(
            (blocks, bytes, stride) in (1u32..5, 1u64..12, 0u64..40),
            starts in prop::collection::vec(0u64..240, 1..5),
        ) {
            let distinct = bytes_are_distinct(blocks, bytes, stride, &starts);
            prop_assert_eq!(is_disjoint(blocks, bytes, stride, starts), distinct);
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
        let starts =
            |count: u64, apart: u64| -> Vec<u64> { (0..count).map(|i| i * apart).collect() };
        let one_after_another = starts(256, blocks * bytes);
        assert!(is_disjoint(blocks as u32, bytes, bytes, one_after_another));
        assert!(!is_disjoint(blocks as u32, bytes, bytes, vec![0, 0]));
        // K and V, or all layers, within each block.
        let inside = || starts(64, bytes);
        assert!(is_disjoint(blocks as u32, bytes, 64 * bytes, inside()));
        assert!(!is_disjoint(blocks as u32, bytes, 64 * bytes - 1, inside()));
    }
}
