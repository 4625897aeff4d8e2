//! Memory that holds no object yet, and sizes of objects in text.

/// Overwrites memory with bytes that no object begins with.
pub(crate) fn clear(bytes: &mut [u8]) {
    bytes.fill(0xEE);
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
