//! The checksum of a chunk's bytes: XXH3 with 64 bits and seed 0, at the speed of memory.
//!
//! The `xxhash-rust` crate picks its instructions when it is compiled, which for a binary that
//! runs anywhere means SSE2, at half the speed of memory. Here the long loop is chosen when it
//! runs; short inputs and other machines go to the crate.

use std::fmt;

use xxhash_rust::xxh3::{Xxh3Default, xxh3_64};

/// XXH3 of these bytes, 64 bits, seed 0.
pub fn checksum(bytes: &[u8]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if bytes.len() >= x86::LEAST
        && let Some(vectors) = x86::Vectors::here()
    {
        return vectors.end(x86::START, bytes, bytes.len() as u64);
    }
    xxh3_64(bytes)
}

/// Computes [`checksum`] of bytes that come in parts, in order.
///
/// ```
/// use lmc_memory::{PartedChecksum, checksum};
///
/// let bytes = [7; 5000];
/// let mut parts = PartedChecksum::new();
/// parts.add(&bytes[..2048]);
/// assert_eq!(parts.end(&bytes[2048..]), checksum(&bytes));
/// ```
#[derive(Debug)]
pub struct PartedChecksum {
    state: State,
    /// Bytes that were taken in.
    len: u64,
}

enum State {
    #[cfg(target_arch = "x86_64")]
    Vectors(x86::Vectors, [u64; 8]),
    Crate(Box<Xxh3Default>),
}

impl fmt::Debug for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("XXH3")
    }
}

impl Default for PartedChecksum {
    fn default() -> Self {
        Self::new()
    }
}

impl PartedChecksum {
    /// Parts before the last are a multiple of so many bytes, and the last is no shorter.
    pub const PART: usize = 1024;

    /// Of nothing yet.
    pub fn new() -> Self {
        #[cfg(target_arch = "x86_64")]
        if let Some(vectors) = x86::Vectors::here() {
            let state = State::Vectors(vectors, x86::START);
            return Self { state, len: 0 };
        }
        let state = State::Crate(Box::default());
        Self { state, len: 0 }
    }

    /// Takes in a part that is not the last.
    ///
    /// # Panics
    /// If it is no multiple of [`Self::PART`].
    pub fn add(&mut self, part: &[u8]) {
        assert!(part.len().is_multiple_of(Self::PART), "a part that ends");
        match &mut self.state {
            #[cfg(target_arch = "x86_64")]
            State::Vectors(vectors, lanes) => *lanes = vectors.add(*lanes, part),
            State::Crate(sum) => sum.update(part),
        }
        self.len += part.len() as u64;
    }

    /// The sum, with the last part.
    ///
    /// # Panics
    /// If it is shorter than [`Self::PART`] and not the only one.
    pub fn end(self, last: &[u8]) -> u64 {
        if self.len == 0 {
            return checksum(last);
        }
        assert!(last.len() >= Self::PART, "a last part that is too short");
        match self.state {
            #[cfg(target_arch = "x86_64")]
            State::Vectors(vectors, lanes) => {
                vectors.end(lanes, last, self.len + last.len() as u64)
            }
            State::Crate(mut sum) => {
                sum.update(last);
                sum.digest()
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        __m256i, __m512i, _MM_HINT_T0, _MM_HINT_T1, _mm_prefetch, _mm256_add_epi64,
        _mm256_loadu_si256, _mm256_mul_epu32, _mm256_set1_epi32, _mm256_shuffle_epi32,
        _mm256_slli_epi64, _mm256_srli_epi64, _mm256_storeu_si256, _mm256_xor_si256,
        _mm512_add_epi64, _mm512_loadu_si512, _mm512_mul_epu32, _mm512_set1_epi32,
        _mm512_shuffle_epi32, _mm512_slli_epi64, _mm512_srli_epi64, _mm512_storeu_si512,
        _mm512_xor_si512,
    };

    use xxhash_rust::const_xxh3::const_custom_default_secret;

    /// Bytes from which the long form of XXH3 applies, and pays.
    pub(super) const LEAST: usize = 1024;

    /// Bytes that are taken in at a time.
    const STRIPE: usize = 64;
    /// Stripes between two scrambles: the secret moves on by 8 bytes for each.
    const STRIPES: usize = (SECRET.len() - STRIPE) / 8;
    const BLOCK: usize = STRIPES * STRIPE;
    /// Bytes ahead that are prefetched into the first-level cache.
    const NEAR: usize = 2048;
    /// Bytes ahead that are prefetched into the second-level cache. More than a page, since no
    /// processor prefetches beyond the end of a page by itself.
    const FAR: usize = 6144;
    const PRIME32_1: u64 = 0x9E37_79B1;
    const PRIME32_2: u64 = 0x85EB_CA77;
    const PRIME32_3: u64 = 0xC2B2_AE3D;
    const PRIME64_1: u64 = 0x9E37_79B1_85EB_CA87;
    const PRIME64_2: u64 = 0xC2B2_AE3D_27D4_EB4F;
    const PRIME64_3: u64 = 0x1656_67B1_9E37_79F9;
    const PRIME64_4: u64 = 0x85EB_CA77_C2B2_AE63;
    const PRIME64_5: u64 = 0x27D4_EB2F_1656_67C5;
    const PRIME_MX1: u64 = 0x1656_6791_9E37_79F9;
    pub(super) const START: [u64; 8] = [
        PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1,
    ];
    /// The secret that XXH3's definition gives for seed 0.
    const SECRET: [u8; 192] = const_custom_default_secret(0);

    /// Eight accumulators of XXH3, in one form of vector or another.
    trait Accumulators: Copy {
        /// # Safety
        /// The processor must have the instructions.
        unsafe fn of(lanes: [u64; 8]) -> Self;

        /// Takes in a stripe.
        ///
        /// # Safety
        /// As above, and 64 bytes can be read at both addresses.
        unsafe fn accumulate(self, stripe: *const u8, secret: *const u8) -> Self;

        /// # Safety
        /// As above, and 64 bytes can be read at `secret`.
        unsafe fn scramble(self, secret: *const u8) -> Self;

        /// # Safety
        /// The processor must have the instructions.
        unsafe fn lanes(self) -> [u64; 8];
    }

    #[derive(Clone, Copy)]
    struct Avx2([__m256i; 2]);

    impl Accumulators for Avx2 {
        #[inline(always)]
        unsafe fn of(lanes: [u64; 8]) -> Self {
            let at = lanes.as_ptr().cast::<__m256i>();
            // SAFETY: the two loads read the 64 bytes of `lanes`; the caller vouches for AVX2.
            unsafe { Self([_mm256_loadu_si256(at), _mm256_loadu_si256(at.add(1))]) }
        }

        #[inline(always)]
        unsafe fn accumulate(self, stripe: *const u8, secret: *const u8) -> Self {
            let mut acc = self.0;
            for (half, acc) in acc.iter_mut().enumerate() {
                // SAFETY: the caller vouches for 64 bytes at both, and for AVX2.
                unsafe {
                    let data = _mm256_loadu_si256(stripe.cast::<__m256i>().add(half));
                    let key = _mm256_loadu_si256(secret.cast::<__m256i>().add(half));
                    let mixed = _mm256_xor_si256(data, key);
                    let high = _mm256_shuffle_epi32::<0b00_11_00_01>(mixed);
                    let product = _mm256_mul_epu32(mixed, high);
                    let swapped = _mm256_shuffle_epi32::<0b01_00_11_10>(data);
                    *acc = _mm256_add_epi64(product, _mm256_add_epi64(*acc, swapped));
                }
            }
            Self(acc)
        }

        #[inline(always)]
        unsafe fn scramble(self, secret: *const u8) -> Self {
            let mut acc = self.0;
            for (half, acc) in acc.iter_mut().enumerate() {
                // SAFETY: the caller vouches for 64 bytes of secret, and for AVX2.
                unsafe {
                    let prime = _mm256_set1_epi32(PRIME32_1 as u32 as i32);
                    let key = _mm256_loadu_si256(secret.cast::<__m256i>().add(half));
                    let folded = _mm256_xor_si256(*acc, _mm256_srli_epi64::<47>(*acc));
                    let mixed = _mm256_xor_si256(folded, key);
                    let high = _mm256_shuffle_epi32::<0b00_11_00_01>(mixed);
                    let low = _mm256_mul_epu32(mixed, prime);
                    let high = _mm256_slli_epi64::<32>(_mm256_mul_epu32(high, prime));
                    *acc = _mm256_add_epi64(low, high);
                }
            }
            Self(acc)
        }

        #[inline(always)]
        unsafe fn lanes(self) -> [u64; 8] {
            let mut lanes = [0u64; 8];
            let at = lanes.as_mut_ptr().cast::<__m256i>();
            // SAFETY: the two stores write the 64 bytes of `lanes`; the caller vouches for AVX2.
            unsafe {
                _mm256_storeu_si256(at, self.0[0]);
                _mm256_storeu_si256(at.add(1), self.0[1]);
            }
            lanes
        }
    }

    #[derive(Clone, Copy)]
    struct Avx512(__m512i);

    impl Accumulators for Avx512 {
        #[inline(always)]
        unsafe fn of(lanes: [u64; 8]) -> Self {
            // SAFETY: reads the 64 bytes of `lanes`; the caller vouches for AVX-512.
            Self(unsafe { _mm512_loadu_si512(lanes.as_ptr().cast()) })
        }

        #[inline(always)]
        unsafe fn accumulate(self, stripe: *const u8, secret: *const u8) -> Self {
            // SAFETY: the caller vouches for 64 bytes at both, and for AVX-512.
            unsafe {
                let data = _mm512_loadu_si512(stripe.cast());
                let key = _mm512_loadu_si512(secret.cast());
                let mixed = _mm512_xor_si512(data, key);
                let high = _mm512_shuffle_epi32::<0b00_11_00_01>(mixed);
                let product = _mm512_mul_epu32(mixed, high);
                let swapped = _mm512_shuffle_epi32::<0b01_00_11_10>(data);
                Self(_mm512_add_epi64(product, _mm512_add_epi64(self.0, swapped)))
            }
        }

        #[inline(always)]
        unsafe fn scramble(self, secret: *const u8) -> Self {
            // SAFETY: the caller vouches for 64 bytes of secret, and for AVX-512.
            unsafe {
                let prime = _mm512_set1_epi32(PRIME32_1 as u32 as i32);
                let key = _mm512_loadu_si512(secret.cast());
                let folded = _mm512_xor_si512(self.0, _mm512_srli_epi64::<47>(self.0));
                let mixed = _mm512_xor_si512(folded, key);
                let high = _mm512_shuffle_epi32::<0b00_11_00_01>(mixed);
                let low = _mm512_mul_epu32(mixed, prime);
                let high = _mm512_slli_epi64::<32>(_mm512_mul_epu32(high, prime));
                Self(_mm512_add_epi64(low, high))
            }
        }

        #[inline(always)]
        unsafe fn lanes(self) -> [u64; 8] {
            let mut lanes = [0u64; 8];
            // SAFETY: writes the 64 bytes of `lanes`; the caller vouches for AVX-512.
            unsafe { _mm512_storeu_si512(lanes.as_mut_ptr().cast(), self.0) };
            lanes
        }
    }

    /// The instructions to use. Exists only where the processor has them.
    #[derive(Clone, Copy)]
    pub(super) enum Vectors {
        Avx2,
        Avx512,
    }

    impl Vectors {
        /// The best of this machine.
        pub(super) fn here() -> Option<Self> {
            if is_x86_feature_detected!("avx512f") {
                return Some(Self::Avx512);
            }
            is_x86_feature_detected!("avx2").then_some(Self::Avx2)
        }

        /// Takes in whole blocks.
        pub(super) fn add(self, lanes: [u64; 8], bytes: &[u8]) -> [u64; 8] {
            match self {
                // SAFETY: the processor has the instructions, or there would be no `self`.
                Self::Avx2 => unsafe { add_avx2(lanes, bytes) },
                // SAFETY: as above.
                Self::Avx512 => unsafe { add_avx512(lanes, bytes) },
            }
        }

        /// Takes in the last bytes of `len`, which are [`LEAST`] or more; the sum.
        pub(super) fn end(self, lanes: [u64; 8], bytes: &[u8], len: u64) -> u64 {
            let lanes = match self {
                // SAFETY: the processor has the instructions, or there would be no `self`.
                Self::Avx2 => unsafe { end_avx2(lanes, bytes) },
                // SAFETY: as above.
                Self::Avx512 => unsafe { end_avx512(lanes, bytes) },
            };
            merge(lanes, len)
        }
    }

    /// # Safety
    /// The processor must have AVX2.
    #[target_feature(enable = "avx2")]
    unsafe fn add_avx2(lanes: [u64; 8], bytes: &[u8]) -> [u64; 8] {
        // SAFETY: passed on to the caller.
        unsafe { add::<Avx2>(Avx2::of(lanes), bytes, bytes.len() / BLOCK).lanes() }
    }

    /// # Safety
    /// The processor must have AVX-512F.
    #[target_feature(enable = "avx512f")]
    unsafe fn add_avx512(lanes: [u64; 8], bytes: &[u8]) -> [u64; 8] {
        // SAFETY: passed on to the caller.
        unsafe { add::<Avx512>(Avx512::of(lanes), bytes, bytes.len() / BLOCK).lanes() }
    }

    /// # Safety
    /// The processor must have AVX2.
    #[target_feature(enable = "avx2")]
    unsafe fn end_avx2(lanes: [u64; 8], bytes: &[u8]) -> [u64; 8] {
        // SAFETY: passed on to the caller.
        unsafe { end::<Avx2>(lanes, bytes) }
    }

    /// # Safety
    /// The processor must have AVX-512F.
    #[target_feature(enable = "avx512f")]
    unsafe fn end_avx512(lanes: [u64; 8], bytes: &[u8]) -> [u64; 8] {
        // SAFETY: passed on to the caller.
        unsafe { end::<Avx512>(lanes, bytes) }
    }

    /// Takes in the first blocks of some bytes.
    ///
    /// # Safety
    /// The processor must have the instructions of `A`.
    #[inline(always)]
    unsafe fn add<A: Accumulators>(mut acc: A, bytes: &[u8], blocks: usize) -> A {
        assert!(blocks * BLOCK <= bytes.len());
        let secret = SECRET.as_ptr();
        let mut at = bytes.as_ptr();
        // SAFETY: the stripes of so many blocks lie in `bytes`; secrets are read from 0 to 192 of
        // 192 bytes; asking for memory ahead touches none; the caller vouches for the
        // instructions.
        unsafe {
            for _ in 0..blocks {
                for stripe in 0..STRIPES {
                    _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(NEAR).cast());
                    _mm_prefetch::<_MM_HINT_T1>(at.wrapping_add(FAR).cast());
                    acc = acc.accumulate(at, secret.add(8 * stripe));
                    at = at.add(STRIPE);
                }
                acc = acc.scramble(secret.add(SECRET.len() - STRIPE));
            }
        }
        acc
    }

    /// Takes in the last bytes.
    ///
    /// # Safety
    /// The processor must have the instructions of `A`.
    #[inline(always)]
    unsafe fn end<A: Accumulators>(lanes: [u64; 8], bytes: &[u8]) -> [u64; 8] {
        assert!(bytes.len() >= LEAST);
        let secret = SECRET.as_ptr();
        let last = bytes.len() - STRIPE;
        let blocks = (bytes.len() - 1) / BLOCK;
        let stripes = (bytes.len() - 1 - blocks * BLOCK) / STRIPE;
        // SAFETY: stripes of what follows the whole blocks end before the end of `bytes`, the
        // last begins 64 before it; secrets are read from 0 to 192 of 192 bytes; the caller
        // vouches for the instructions.
        unsafe {
            let mut acc = add(A::of(lanes), bytes, blocks);
            let mut at = bytes.as_ptr().add(blocks * BLOCK);
            for stripe in 0..stripes {
                acc = acc.accumulate(at, secret.add(8 * stripe));
                at = at.add(STRIPE);
            }
            let end = bytes.as_ptr().add(last);
            acc = acc.accumulate(end, secret.add(SECRET.len() - STRIPE - 7));
            acc.lanes()
        }
    }

    fn merge(lanes: [u64; 8], len: u64) -> u64 {
        let secret = |at: usize| {
            let word = SECRET[at..at + 8].try_into();
            u64::from_le_bytes(word.expect("eight bytes"))
        };
        let mut sum = len.wrapping_mul(PRIME64_1);
        for (pair, lanes) in lanes.chunks_exact(2).enumerate() {
            let at = 11 + 16 * pair;
            let (a, b) = (lanes[0] ^ secret(at), lanes[1] ^ secret(at + 8));
            let product = u128::from(a) * u128::from(b);
            sum = sum.wrapping_add(product as u64 ^ (product >> 64) as u64);
        }
        sum ^= sum >> 37;
        sum = sum.wrapping_mul(PRIME_MX1);
        sum ^ (sum >> 32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every way that this machine has agrees with the crate, at every length around the edges
    /// of stripes and blocks and at every alignment.
    #[test]
    fn it_is_xxh3() {
        let bytes: Vec<u8> = (0..70_000u64)
            .map(|i| (i.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 53) as u8)
            .collect();
        let edges = [1023, 1024, 1025, 2048, 4096, 65_536, 69_000];
        let around = edges.into_iter().flat_map(|edge| edge - 70..edge + 70);
        for len in (0..300).chain(around) {
            for start in [0, 1, 7, 33] {
                let part = &bytes[start..start + len];
                let wanted = xxh3_64(part);
                assert_eq!(checksum(part), wanted, "{len} bytes from {start}");
                #[cfg(target_arch = "x86_64")]
                if len >= x86::LEAST && is_x86_feature_detected!("avx2") {
                    let sum = x86::Vectors::Avx2.end(x86::START, part, len as u64);
                    assert_eq!(sum, wanted, "AVX2, {len} bytes");
                }
            }
        }
    }

    /// Wherever a part may end.
    #[test]
    fn it_is_the_same_in_parts() {
        let bytes: Vec<u8> = (0..9000u32).map(|i| ((i * i) >> 3) as u8).collect();
        for len in [1, 1023, 1024, 2047, 2048, 2049, 4096, 5000, 9000] {
            let bytes = &bytes[..len];
            for first in (0..len).step_by(PartedChecksum::PART) {
                for second in (first..len).step_by(PartedChecksum::PART) {
                    let last = &bytes[second..];
                    if second > 0 && last.len() < PartedChecksum::PART {
                        continue;
                    }
                    let mut ways = vec![PartedChecksum::new()];
                    let mut way = |state| ways.push(PartedChecksum { state, len: 0 });
                    way(State::Crate(Box::default()));
                    #[cfg(target_arch = "x86_64")]
                    if is_x86_feature_detected!("avx2") {
                        way(State::Vectors(x86::Vectors::Avx2, x86::START));
                    }
                    for mut parts in ways {
                        parts.add(&bytes[..first]);
                        parts.add(&bytes[first..second]);
                        let sum = parts.end(last);
                        assert_eq!(sum, xxh3_64(bytes), "{first}, {second} of {len}");
                    }
                }
            }
        }
    }
}
