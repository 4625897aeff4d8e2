//! Views tokens as bytes without a copy: the only `unsafe` code of this crate.

use crate::Token;

/// Returns the memory of `tokens`, in the machine's byte order. For probes that never leave the process;
/// chunk hashes define their own byte order and do not use this function.
pub(crate) fn of_tokens(tokens: &[Token]) -> &[u8] {
    // SAFETY: the pointer and the length in bytes are those of a live `&[u32]`, `u32` has no
    // padding, every byte pattern is a `u8`, and `u8` needs no alignment. The borrow is passed on.
    unsafe { std::slice::from_raw_parts(tokens.as_ptr().cast(), size_of_val(tokens)) }
}

#[cfg(test)]
mod tests {
    #[test]
    fn shows_the_same_memory() {
        assert_eq!(
            super::of_tokens(&[1, u32::MAX]),
            [1_u32.to_ne_bytes(), u32::MAX.to_ne_bytes()].concat()
        );
        assert_eq!(super::of_tokens(&[]), b"");
    }
}
