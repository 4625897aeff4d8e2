//! Bytes that tell where they come from: each follows from the seed, the object's number in its
//! batch, and its offset, so that a byte in a wrong number shows itself.

/// The bytes of a slot before a peer writes to it.
const BEFORE: u8 = 0xEE;

fn words(seed: u64, number: usize) -> impl Iterator<Item = [u8; 8]> {
    // SplitMix64, begun somewhere else for each object.
    let mut state = seed.wrapping_mul(0xD6E8_FEB8_6659_FD93) ^ (number as u64).rotate_left(32);
    std::iter::repeat_with(move || {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut word = state;
        word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (word ^ (word >> 31)).to_le_bytes()
    })
}

/// Makes an object.
pub(crate) fn fill(bytes: &mut [u8], seed: u64, number: usize) {
    for (chunk, word) in bytes.chunks_mut(8).zip(words(seed, number)) {
        chunk.copy_from_slice(&word[..chunk.len()]);
    }
}

/// Makes what no object is.
pub(crate) fn clear(bytes: &mut [u8]) {
    bytes.fill(BEFORE);
}

/// Compares an object with what it must be.
pub(crate) fn check(bytes: &[u8], seed: u64, number: usize) -> Result<(), String> {
    for (at, (chunk, word)) in bytes.chunks(8).zip(words(seed, number)).enumerate() {
        if chunk != &word[..chunk.len()] {
            let len = bytes.len();
            return Err(format!(
                "object {number} of {len} bytes differs in the 8 bytes from offset {}",
                at * 8
            ));
        }
    }
    Ok(())
}

/// Sizes of a batch in text: `4096*3,100` is three objects of 4096 bytes and one of 100.
pub(crate) fn sizes(text: &str) -> Result<Vec<u64>, String> {
    let mut sizes = Vec::new();
    for part in text.split(',') {
        let (size, count) = part.split_once('*').unwrap_or((part, "1"));
        let number = |text: &str| {
            let number = text.parse::<u64>();
            number.map_err(|_| format!("{part:?} is no size: expected BYTES or BYTES*COUNT"))
        };
        let size = number(size)?;
        sizes.extend((0..number(count)?).map(|_| size));
    }
    Ok(sizes)
}
