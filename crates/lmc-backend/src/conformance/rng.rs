//! Reproducible randomness. The kit of `lmc-transfer` has the same code: neither crate depends on the other,
//! and a kit may not use the helpers of this repository's tests.

/// SplitMix64 (Steele, Lea, Flood 2014): small, seeded, good enough to choose operations.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// Makes a source of numbers. The same seed gives the same numbers.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number below `bound`, which is not 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next_u64()) * u128::from(bound)) >> 64) as u64
    }

    /// Returns true in `per_mille` of 1000 cases.
    pub fn chance(&mut self, per_mille: u16) -> bool {
        self.below(1000) < u64::from(per_mille)
    }
}
