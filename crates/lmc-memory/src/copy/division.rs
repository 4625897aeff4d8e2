//! Division of a chunk between ranks, and merging the ranks' chunks into one chunk.

use super::kv_group::{ChunkOrder, KvOrder};
use crate::GroupLayout;

/// A chunk order divided between ranks with an equal number of heads each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Division {
    /// Order of the chunk of each rank.
    pub order: ChunkOrder,
    /// Contiguous bytes of each rank in the whole chunk. The whole chunk has the first run of each rank, in
    /// the order of the ranks, then the second run of each, and so on.
    pub run_bytes: u64,
}

impl ChunkOrder {
    /// Divides the heads of a chunk between ranks, as tensor parallelism does: each rank has consecutive
    /// heads. `None` if the heads do not divide evenly, if the elements are smaller than two bytes (there may
    /// be scales next to them), or if the order is impossible.
    ///
    /// An order of tokens does not contain the number of heads: a division of it that splits a head, or a
    /// latent vector, describes chunks that no engine makes.
    pub fn divide(self, ranks: u32) -> Option<Division> {
        let whole = match self {
            Self::Tokens(layout) | Self::Blocks { blocks: layout, .. } => layout,
        };
        let size = whole.dtype().size() as u64;
        let elements = whole.row_bytes() / size;
        let ranks = u64::from(ranks);
        if ranks < 2 || size < 2 || !elements.is_multiple_of(ranks) {
            return None;
        }
        let hidden = u32::try_from(elements / ranks).ok()?;
        let (planes, layers, rows) = (whole.planes(), whole.layers(), whole.rows());
        let part = GroupLayout::new(planes, layers, rows, hidden, whole.dtype()).ok()?;
        let (order, run) = match self {
            Self::Tokens(_) => (Self::Tokens(part), elements / ranks),
            Self::Blocks {
                heads,
                block_tokens,
                inner_planes,
                order,
                ..
            } => {
                let vectors = heads.checked_mul(block_tokens)?.checked_mul(inner_planes)?;
                if vectors == 0 || !elements.is_multiple_of(vectors) || !heads.is_multiple_of(ranks)
                {
                    return None;
                }
                let (head_size, heads) = (elements / vectors, heads / ranks);
                let run = match order {
                    KvOrder::HeadsFirst => heads * block_tokens * head_size,
                    KvOrder::TokensFirst => heads * head_size,
                };
                let order = Self::Blocks {
                    blocks: part,
                    heads,
                    block_tokens,
                    inner_planes,
                    order,
                };
                (order, run)
            }
        };
        Some(Division {
            order,
            run_bytes: run * size,
        })
    }
}

/// Merges the chunks of several ranks into a whole chunk, in which each rank's runs of `run_bytes` are
/// contiguous ([`Division::run_bytes`]). Returns false, and leaves `whole` unchanged, if the lengths do not
/// fit.
pub fn interleave(run_bytes: u64, ranks: &[&[u8]], whole: &mut [u8]) -> bool {
    let Ok(run) = usize::try_from(run_bytes) else {
        return false;
    };
    let len = whole.len().checked_div(ranks.len()).unwrap_or(0);
    let fits = run > 0
        && len.is_multiple_of(run)
        && len * ranks.len() == whole.len()
        && ranks.iter().all(|rank| rank.len() == len);
    if !fits {
        return false;
    }
    for (n, rank) in ranks.iter().enumerate() {
        let to = whole.chunks_exact_mut(run).skip(n).step_by(ranks.len());
        for (to, from) in to.zip(rank.chunks_exact(run)) {
            to.copy_from_slice(from);
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::super::kv_group::{KvGroup, KvTensor};
    use super::*;
    use crate::DType;

    const BLOCKS: u64 = 3;
    const BLOCK: u64 = 4;
    const CHUNK: u32 = (BLOCKS * BLOCK) as u32;
    const SIZE: u64 = 5;
    const LAYERS: u64 = 2;

    /// Position of the planes in vLLM's tensors.
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Keys {
        /// `[2, blocks, …]`.
        Apart,
        /// `[blocks, 2, …]`.
        Within,
        /// `[blocks, …]`, packed.
        Packed,
    }

    fn order(keys: Keys, order: KvOrder, heads: u64, dtype: DType) -> ChunkOrder {
        let [a, b] = match order {
            KvOrder::HeadsFirst => [heads, BLOCK],
            KvOrder::TokensFirst => [BLOCK, heads],
        };
        let shape = match keys {
            Keys::Apart => vec![2, BLOCKS, a, b, SIZE],
            Keys::Within => vec![BLOCKS, 2, a, b, SIZE],
            Keys::Packed => vec![BLOCKS, a, b, SIZE],
        };
        let mut strides = vec![1; shape.len()];
        for axis in (1..shape.len()).rev() {
            strides[axis - 1] = strides[axis] * shape[axis];
        }
        let tensor = KvTensor {
            dtype,
            shape: &shape,
            strides: &strides,
            storage_offset: 0,
        };
        let tensors = [tensor; LAYERS as usize];
        let group = KvGroup::describe(&tensors, order, None, CHUNK).unwrap();
        group.order()
    }

    /// The chunk that a rank with these heads has: each element is named by its meaning.
    fn chunk(keys: Keys, order: KvOrder, heads: std::ops::Range<u64>) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut vector = |plane: u64, layer: u64, token: u64, head: u64| {
            for element in 0..SIZE {
                let meaning =
                    (((plane * LAYERS + layer) * 64 + token) * 64 + head) * SIZE + element;
                bytes.extend_from_slice(&(meaning as u16).to_le_bytes());
            }
        };
        let mut block = |plane: u64, layer: u64, block: u64| {
            let tokens = block * BLOCK..(block + 1) * BLOCK;
            match order {
                KvOrder::HeadsFirst => heads.clone().for_each(|head| {
                    tokens
                        .clone()
                        .for_each(|token| vector(plane, layer, token, head));
                }),
                KvOrder::TokensFirst => tokens.for_each(|token| {
                    heads
                        .clone()
                        .for_each(|head| vector(plane, layer, token, head));
                }),
            }
        };
        let (outer, inner) = match keys {
            Keys::Apart => (2, 1),
            Keys::Within => (1, 2),
            Keys::Packed => (1, 1),
        };
        for outer in 0..outer {
            for layer in 0..LAYERS {
                for number in 0..BLOCKS {
                    (0..inner).for_each(|inner| block(outer + inner, layer, number));
                }
            }
        }
        bytes
    }

    #[test]
    fn the_chunks_of_all_ranks_make_the_whole_one_in_every_known_layout() {
        for keys in [Keys::Apart, Keys::Within, Keys::Packed] {
            for kv_order in [KvOrder::HeadsFirst, KvOrder::TokensFirst] {
                for (heads, ranks) in [(2, 2), (4, 2), (4, 4), (8, 2)] {
                    let case = format!("{keys:?} {kv_order:?}, {heads} heads, {ranks} ranks");
                    let each = heads / u64::from(ranks);
                    let whole = order(keys, kv_order, heads, DType::Float16);
                    let division = whole.divide(ranks).expect(&case);
                    let of_rank = order(keys, kv_order, each, DType::Float16);
                    assert_eq!(division.order, of_rank, "{case}");
                    let parts = (0..heads).step_by(each as usize);
                    let parts = parts.map(|first| chunk(keys, kv_order, first..first + each));
                    let parts: Vec<Vec<u8>> = parts.collect();
                    let parts: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
                    let expected = chunk(keys, kv_order, 0..heads);
                    let mut made = vec![0; expected.len()];
                    assert!(interleave(division.run_bytes, &parts, &mut made), "{case}");
                    assert_eq!(made, expected, "{case}");
                }
            }
        }
    }

    #[test]
    fn what_does_not_divide_is_refused() {
        for kv_order in [KvOrder::HeadsFirst, KvOrder::TokensFirst] {
            let three = order(Keys::Within, kv_order, 3, DType::Float16);
            assert_eq!(three.divide(2), None);
            let bytes = order(Keys::Within, kv_order, 4, DType::UInt8);
            assert_eq!(bytes.divide(2), None);
            let fp8 = order(Keys::Apart, kv_order, 4, DType::Float8E4M3Fn);
            assert_eq!(fp8.divide(2), None);
            let whole = order(Keys::Within, kv_order, 4, DType::Float16);
            assert_eq!(whole.divide(1), None);
            assert_eq!(whole.divide(0), None);
        }
    }

    #[test]
    fn chunks_of_other_lengths_are_not_interleaved() {
        let (a, b) = ([1; 8], [2; 8]);
        let mut whole = [0; 16];
        for (run, ranks, len) in [
            (0, [&a[..], &b[..]], 16),
            (3, [&a[..], &b[..]], 16),
            (4, [&a[..], &b[..4]], 16),
            (4, [&a[..], &b[..]], 12),
            (4, [&a[..], &b[..]], 15),
        ] {
            assert!(!interleave(run, &ranks, &mut whole[..len]));
        }
        assert!(!interleave(4, &[], &mut whole));
        assert_eq!(whole, [0; 16]);
        assert!(interleave(4, &[&a, &b], &mut whole));
        assert_eq!(whole, [1, 1, 1, 1, 2, 2, 2, 2, 1, 1, 1, 1, 2, 2, 2, 2]);
    }
}
