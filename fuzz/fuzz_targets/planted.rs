//! A rule that one input of 2^48 breaks: following coverage finds it within seconds, guessing
//! does not. `cargo xtask fuzz` runs this target first, to see that coverage is followed.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    assert!(!matches!(data, [b'b', b'r', b'o', b'k', b'e', b'n', ..]));
});
