//! Properties that hold for any input.

use std::thread;

use lmc_key::{
    ChunkHash, ChunkHasher, ChunkKey, HashAlgorithm, HashMemo, KeySpace, KeyText,
    LayoutFingerprint, PrefixHashes, Salt, SpaceId, Token,
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
    let numbers = (algorithm(), 1..=65_536_u32, any::<u32>(), any::<[u8; 16]>());
    let model = name(60).prop_map(|model| model.replace(char::is_control, "?"));
    let identity = name(60).prop_map(|text| text.replace(char::is_control, "%"));
    let identity = prop_oneof![Just(String::new()), identity];
    (numbers, model, "[a-z0-9_]{1,32}", salt, identity).prop_map(
        |((algorithm, chunk_size, world_size, layout), model, dtype, salt, identity)| KeySpace {
            algorithm,
            chunk_size,
            model: model.parse().unwrap(),
            world_size,
            layout: LayoutFingerprint::new(layout),
            dtype: dtype.parse().unwrap(),
            salt: salt.parse().unwrap(),
            identity: identity.parse().unwrap(),
        },
    )
}

proptest! {
    /// However a prompt grows, shrinks and changes, the hashes are those of hashing it anew.
    #[test]
    fn incremental_is_from_scratch(
        algorithm in algorithm(),
        chunk_size in 1..20_u32,
        prompts in prompts(12),
        memo_bytes in prop::sample::select(vec![0, 2_000, 1 << 20]),
    ) {
        let hasher = ChunkHasher::new(algorithm, chunk_size).unwrap();
        let memo = HashMemo::new(memo_bytes);
        let mut plain = PrefixHashes::new(hasher);
        let mut memoized = PrefixHashes::new(hasher);
        for prompt in &prompts {
            let expected = hasher.hash_prompt(prompt);
            let done = plain.extend(prompt);
            prop_assert_eq!(memoized.extend_with(&memo, &Salt::default(), prompt), done);
            prop_assert_eq!(plain.hashes(), memoized.hashes());
            prop_assert_eq!(plain.hashes().len(), done.kept + done.added);
            // What a longer prompt left behind it may stay, as long as nothing contradicts it.
            prop_assert_eq!(&plain.hashes()[..expected.len()], &expected[..]);
            let whole = expected.len() * chunk_size as usize;
            prop_assert_eq!(plain.range(0, whole), Ok(&expected[..]));
        }
    }

    /// Growing in any steps is growing at once.
    #[test]
    fn splits_do_not_matter(
        chunk_size in 1..20_u32,
        tokens in prop::collection::vec(any::<Token>(), 0..200),
        mut cuts in prop::collection::vec(0..200_usize, 0..8),
    ) {
        let hasher = ChunkHasher::new(HashAlgorithm::Blake3, chunk_size).unwrap();
        let mut prefix = PrefixHashes::new(hasher);
        cuts.sort_unstable();
        let mut hashed = 0;
        for cut in cuts.into_iter().chain([200]) {
            hashed += prefix.extend(&tokens[..cut.min(tokens.len())]).added;
        }
        prop_assert_eq!(prefix.hashes(), hasher.hash_prompt(&tokens));
        prop_assert_eq!(hashed, prefix.hashes().len());
    }

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
                    let mut out = Vec::new();
                    for prompt in prompts.iter().cycle().skip(first * 7).take(2 * prompts.len()) {
                        memo.hash_prompt(&hasher, prompt, &mut out);
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
    fn ids_differ_as_spaces_do(one in space(), other in space(), take in 0..256_u32) {
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
        };
        prop_assert_eq!(mixed.id() == one.id(), mixed == one);
        prop_assert_eq!(mixed.id() == other.id(), mixed == other);
    }

    /// Any key prints to text that reads back to the key, and holds nothing that could confuse.
    #[test]
    fn text_keys_come_back(
        space in space(),
        kv_rank in any::<u16>(),
        group in any::<u16>(),
        digest in any::<[u8; 32]>(),
        layer in prop::option::of(any::<u32>()),
        tag in name(60),
    ) {
        let digest = &digest[..space.algorithm.digest_len()];
        let hash = ChunkHash::from_digest(space.algorithm, digest).unwrap();
        let key = ChunkKey { space: space.id(), kv_rank, group, hash };
        let mut text = KeyText::of(&space, &key);
        text.layer = layer;
        text.add_tag("user.tag", &tag).unwrap();
        for printed in [text.to_string(), text.to_file_name()] {
            let read: KeyText = printed.parse().unwrap();
            prop_assert_eq!(&read, &text);
            prop_assert_eq!(read.identity(), Ok((space.clone(), key)));
            prop_assert!(printed.bytes().all(|b| b.is_ascii_graphic() && b != b'\\'));
            prop_assert_eq!(read.tag("user.tag"), Some(&*tag));
        }
        prop_assert!(!text.to_file_name().contains(['/', ':', '"', '*']));
    }

    /// Whatever stands in a text: an error or a key that prints to what reads back to it.
    #[test]
    fn no_text_does_harm(
        parts in prop::collection::vec(prop_oneof![name(12), "[0-9]{1,11}", "-?[0-9a-f]{1,70}"], 0..9),
        tags in prop::collection::vec("[a-z]{0,3}%([a-z]|%[0-9a-f]{1,2}){0,6}", 0..4),
    ) {
        let text = parts.into_iter().chain(tags).collect::<Vec<_>>().join("@");
        if let Ok(key) = text.parse::<KeyText>() {
            prop_assert_eq!(key.to_string().parse(), Ok(key));
        }
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
