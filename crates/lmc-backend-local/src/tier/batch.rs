//! The keys of a batch, grouped by shard.

use lmc_key::ChunkKey;

/// Keys with their folded hashes, in an order that visits each shard once.
pub(super) struct KeysByShard {
    pub(super) folds: Vec<u64>,
    /// Positions in the batch: shard by shard, and within a shard from the prefix's tail to its head.
    order: Vec<u32>,
    /// End of each shard's range in `order`.
    ends: Vec<u32>,
}

impl KeysByShard {
    pub(super) fn new(
        keys: impl ExactSizeIterator<Item = ChunkKey>,
        shard_of: impl Fn(u64) -> usize,
        shards: usize,
    ) -> Self {
        let folds: Vec<u64> = keys.map(|key| key.fold()).collect();
        let (order, ends) = group(folds.iter().map(|&fold| shard_of(fold)), shards);
        Self { folds, order, ends }
    }

    /// Returns each shard that has keys in the batch, with the positions of these keys.
    pub(super) fn shards(&self) -> impl Iterator<Item = (usize, &[u32])> {
        parts(&self.order, &self.ends)
    }
}

/// Groups positions by shard with a counting sort; within a shard they are in descending order.
pub(super) fn group(
    shard_of: impl DoubleEndedIterator<Item = usize> + ExactSizeIterator + Clone,
    shards: usize,
) -> (Vec<u32>, Vec<u32>) {
    let mut ends = vec![0_u32; shards];
    for shard in shard_of.clone() {
        ends[shard] += 1;
    }
    let mut start = 0;
    for end in &mut ends {
        start += *end;
        *end = start - *end;
    }
    let mut order = vec![0_u32; shard_of.len()];
    for (position, shard) in shard_of.enumerate().rev() {
        order[ends[shard] as usize] = position as u32;
        ends[shard] += 1;
    }
    (order, ends)
}

/// Returns the ranges that [`group`] made.
pub(super) fn parts<'a>(
    order: &'a [u32],
    ends: &'a [u32],
) -> impl Iterator<Item = (usize, &'a [u32])> {
    let mut start = 0;
    ends.iter().enumerate().filter_map(move |(shard, &end)| {
        let part = &order[start as usize..end as usize];
        start = end;
        (!part.is_empty()).then_some((shard, part))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_are_grouped_and_descend() {
        let shards = [2, 0, 2, 1, 2];
        let (order, ends) = group(shards.into_iter(), 4);
        let parts: Vec<_> = parts(&order, &ends).collect();
        let expected: [(usize, &[u32]); 3] = [(0, &[1]), (1, &[3]), (2, &[4, 2, 0])];
        assert_eq!(parts, expected);
    }
}
