//! Behaviour that an embedding program relies on.

use std::time::{Duration, Instant};

use lmc::{CacheBuilder, PromptCache};
use lmc_testkit::Folder;

const CHUNK: u64 = 8192;

fn builder(layout: &str, folder: &Folder) -> CacheBuilder {
    CacheBuilder::new("model", layout, CHUNK)
        .chunk_size(16)
        .dram(1 << 20)
        .disk(&**folder, 64 << 20)
}

fn hits(cache: &PromptCache, tokens: &[u32]) -> usize {
    let found = cache.lookup(tokens).wait_blocking();
    let hits = found.hits;
    let leases = found.into_leases();
    for (index, slot) in leases.iter().flat_map(|leases| leases.iter()).enumerate() {
        assert!(slot.bytes().iter().all(|&byte| byte == index as u8));
    }
    hits
}

#[test]
fn prompts_are_found_again_after_a_restart_and_by_no_other_layout() {
    let folder = Folder::inside(env!("CARGO_TARGET_TMPDIR"));
    let tokens: Vec<u32> = (0..100).collect();
    let cache = builder("a", &folder).build().expect("a new folder");
    assert_eq!(hits(&cache, &tokens), 0);
    let stored = cache.store(&tokens, |chunk, bytes| bytes.fill(chunk as u8));
    assert_eq!(stored, 6, "the last four tokens are no whole chunk");
    assert_eq!(cache.store(&tokens, |_, _| panic!("they are there")), 0);
    assert_eq!(hits(&cache, &tokens), 6);
    assert_eq!(hits(&cache, &tokens[..40]), 2);
    assert_eq!(hits(&cache, &tokens[1..]), 0);
    let closed = cache.close(Instant::now() + Duration::from_secs(20));
    assert!(closed.is_complete(), "{closed:?}");
    drop(cache);
    let cache = builder("b", &folder).build().expect("the same folder");
    assert_eq!(hits(&cache, &tokens), 0, "another layout");
    drop(cache);
    let cache = builder("a", &folder).build().expect("the same folder");
    assert_eq!(hits(&cache, &tokens), 6);
}

#[test]
fn a_setting_that_is_not_possible_is_named() {
    let refused = CacheBuilder::new("", "layout", CHUNK).build();
    let text = refused.expect_err("no model").to_string();
    assert!(text.starts_with("model \"\""), "{text}");
}
