//! Golden vectors that LMCache's and vLLM's own code computed; see `data/make_vectors.py`.

#![allow(clippy::unwrap_used, reason = "helpers of tests may panic")]

use lmc_key::{
    ChunkHash, ChunkHasher, HashAlgorithm, HashMemo, KeySpace, LayoutFingerprint, Salt, Token,
};
use serde_json::Value;

fn vectors(part: &str) -> Vec<Value> {
    let file: Value = serde_json::from_str(include_str!("../data/vectors.json")).unwrap();
    file[part].as_array().unwrap().clone()
}

fn text<'a>(case: &'a Value, name: &str) -> &'a str {
    case[name]
        .as_str()
        .unwrap_or_else(|| panic!("{name} is a string in {case}"))
}

fn number(case: &Value, name: &str) -> u32 {
    u32::try_from(case[name].as_u64().unwrap()).unwrap()
}

fn bytes(hex: &str) -> Vec<u8> {
    (0..hex.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap())
        .collect()
}

/// `rule` is [first, factor, modulus]: token i is (first + i * factor) % modulus.
fn tokens(case: &Value) -> Vec<Token> {
    let rule: Vec<u64> = case["rule"]
        .as_array()
        .unwrap()
        .iter()
        .flat_map(Value::as_u64)
        .collect();
    let count = u64::from(number(case, "count"));
    (0..count)
        .map(|i| ((rule[0] + i * rule[1]) % rule[2]) as Token)
        .collect()
}

#[test]
fn hashes_are_those_of_lmcache_and_vllm() {
    let mut seen = 0;
    for case in vectors("hashes") {
        let algorithm: HashAlgorithm = text(&case, "algorithm").parse().unwrap();
        let chunk_size = number(&case, "chunk_size");
        let hasher = match case["seed"].as_str() {
            Some(seed) => ChunkHasher::with_seed(algorithm, chunk_size, seed).unwrap(),
            None => ChunkHasher::new(algorithm, chunk_size).unwrap(),
        };
        let digest =
            |hex: &Value| ChunkHash::from_digest(algorithm, &bytes(hex.as_str().unwrap())).unwrap();
        let expected: Vec<ChunkHash> = case["hashes"]
            .as_array()
            .unwrap()
            .iter()
            .map(digest)
            .collect();
        let tokens = tokens(&case);
        assert_eq!(hasher.start(), digest(&case["start"]), "{case}");
        assert_eq!(hasher.hash_prompt(&tokens), expected, "{case}");

        let memo = HashMemo::default();
        for _ in 0..2 {
            let out = memo.hash_prompt(&hasher, &Salt::default(), &tokens);
            assert_eq!(out, expected, "{case}");
        }
        seen += expected.len();
    }
    assert_eq!(seen, 342);
}

/// The four values of the survey, so that the file above cannot drift without notice.
#[test]
fn blake3_hashes_are_those_of_the_survey() {
    let hasher = ChunkHasher::new(HashAlgorithm::Blake3, 256).unwrap();
    let counting = hasher.hash_prompt(&(0..512).collect::<Vec<_>>());
    for (hash, expected) in [
        (
            hasher.start(),
            "7e3eff9ef7613a50340eb12677ee03b83ac759fcba9bb32705f07248d56d473b",
        ),
        (
            counting[0],
            "084547b6c40ed5b05ba8cd0305db5bf74d5617673948d9ed193ab7d6cbc484d4",
        ),
        (
            counting[1],
            "e5ffee45c2b9db326814c9692dc594369887ba3b0df5761817820b60f864c8e0",
        ),
        (
            hasher.hash_prompt(&[0; 256])[0],
            "03edbe7e49c9198da23fa92679fd592f12679bb4ccc65b5c91f31dda79bf1fa9",
        ),
    ] {
        assert_eq!(hash.to_string(), expected);
    }
}

/// Ids are written to disk and sent to peers: an encoding may not change under its name.
#[test]
fn space_ids_are_those_of_their_description() {
    for case in vectors("spaces") {
        let space = KeySpace {
            algorithm: text(&case, "algorithm").parse().unwrap(),
            chunk_size: number(&case, "chunk_size"),
            model: text(&case, "model").parse().unwrap(),
            world_size: number(&case, "world_size"),
            layout: LayoutFingerprint::of(&bytes(text(&case, "layout"))),
            dtype: text(&case, "dtype").parse().unwrap(),
            salt: text(&case, "salt").parse().unwrap(),
            // The first vectors are from before the field: ids without an identity stay.
            identity: case["identity"].as_str().unwrap_or("").parse().unwrap(),
            tags: None,
        };
        assert_eq!(space.layout.to_string(), text(&case, "layout_fingerprint"));
        assert_eq!(space.id().to_string(), text(&case, "space_id"));
    }
}
