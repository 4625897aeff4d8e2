//! Properties that hold for any input.

#![allow(clippy::unwrap_used, reason = "helpers of tests may panic")]

use std::thread;

use lmc_key::{
    ChunkHash, ChunkHasher, ChunkKey, HashAlgorithm, HashMemo, KeySpace, LayoutFingerprint, Salt,
    SpaceId, TagsId, Token,
};
use proptest::prelude::*;

fn algorithm() -> impl Strategy<Value = HashAlgorithm> {
    prop::sample::select(HashAlgorithm::ALL.to_vec())
}

/// Prompts of one tree: few different tokens and long common beginnings.
fn prompts(count: usize) -> impl Strategy<Value = Vec<Vec<Token>>> {
    let pieces = prop::collection::vec((0..4_u32, 1..40_usize), 0..12);
    prop::collection::vec(pieces, 1..count).prop_map(|prompts| {
        let spell = |pieces: Vec<(u32, usize)>| {
            pieces
                .into_iter()
                .flat_map(|(token, len)| std::iter::repeat_n(token, len))
                .collect()
        };
        prompts.into_iter().map(spell).collect()
    })
}

fn name(longest: usize) -> impl Strategy<Value = String> {
    // Every kind of character, those that confuse more often than others.
    let odd = prop::sample::select(
        "@%/\\ \n\t.-_~*:\"é\u{202e}\u{1f600}"
            .chars()
            .collect::<Vec<_>>(),
    );
    let char = prop_oneof![odd, prop::char::range('a', 'z'), any::<char>()];
    prop::collection::vec(char.prop_filter("no NUL", |c| *c != '\0'), 1..longest)
        .prop_map(|chars| chars.into_iter().collect())
}

fn space() -> impl Strategy<Value = KeySpace> {
    let salt = name(60).prop_map(|salt| salt.replace(['@', '/', '\\'], "%"));
    let salt = prop_oneof![Just(String::new()), salt];
    let tags = any::<Option<[u8; 16]>>();
    let numbers = (
        algorithm(),
        1..=65_536_u32,
        any::<u32>(),
        any::<[u8; 16]>(),
        tags,
    );
    let model = name(60).prop_map(|model| model.replace(char::is_control, "?"));
    let identity = name(60).prop_map(|text| text.replace(char::is_control, "%"));
    let identity = prop_oneof![Just(String::new()), identity];
    (numbers, model, "[a-z0-9_]{1,32}", salt, identity).prop_map(
        |((algorithm, chunk_size, world_size, layout, tags), model, dtype, salt, identity)| {
            KeySpace {
                algorithm,
                chunk_size,
                model: model.parse().unwrap(),
                world_size,
                layout: LayoutFingerprint::new(layout),
                dtype: dtype.parse().unwrap(),
                salt: salt.parse().unwrap(),
                identity: identity.parse().unwrap(),
                tags: tags.map(TagsId::new),
            }
        },
    )
}

proptest! {
    /// Several threads, prompts with common beginnings, hardly any memory: still the right hash.
    #[test]
    fn the_memo_is_the_hasher(
        algorithm in algorithm(),
        chunk_size in 1..20_u32,
        prompts in prompts(40),
        memo_bytes in 500..20_000_usize,
    ) {
        let hasher = ChunkHasher::new(algorithm, chunk_size).unwrap();
        let memo = HashMemo::new(memo_bytes);
        thread::scope(|scope| {
            for first in 0..4 {
                let (memo, prompts) = (&memo, &prompts);
                scope.spawn(move || {
                    for prompt in prompts.iter().cycle().skip(first * 7).take(2 * prompts.len()) {
                        let out = memo.hash_prompt(&hasher, &Salt::default(), prompt);
                        assert_eq!(out, hasher.hash_prompt(prompt));
                        let stats = memo.stats();
                        assert!(stats.bytes <= stats.max_bytes, "{stats:?}");
                    }
                });
            }
        });
    }

    /// Two spaces have one id only if they are one.
    #[test]
    fn ids_differ_as_spaces_do(one in space(), other in space(), take in 0..512_u32) {
        // Each field of one or the other: pairs that differ in some fields only.
        let from = |bit: u32| if take & (1 << bit) == 0 { &one } else { &other };
        let mixed = KeySpace {
            algorithm: from(0).algorithm,
            chunk_size: from(1).chunk_size,
            model: from(2).model.clone(),
            world_size: from(3).world_size,
            layout: from(4).layout,
            dtype: from(5).dtype.clone(),
            salt: from(6).salt.clone(),
            identity: from(7).identity.clone(),
            tags: from(8).tags,
        };
        prop_assert_eq!(mixed.id() == one.id(), mixed == one);
        prop_assert_eq!(mixed.id() == other.id(), mixed == other);
    }

    #[test]
    fn binary_keys_come_back(
        space in any::<[u8; 16]>(),
        kv_rank in any::<u16>(),
        group in any::<u16>(),
        hash in any::<[u8; 32]>(),
    ) {
        let key = ChunkKey {
            space: SpaceId::new(space),
            kv_rank,
            group,
            hash: ChunkHash::new(hash),
        };
        prop_assert_eq!(ChunkKey::from_bytes(&key.to_bytes()), key);
        prop_assert_eq!(key.hash.to_string().parse(), Ok(key.hash));
    }
}
