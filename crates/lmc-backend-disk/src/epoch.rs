//! Clear epochs of drives, and random ids.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;

use lmc_backend::ClearEpoch;

/// Returns the epoch that all of these have to reach: the newest, or one above it where several
/// clears share the newest counter.
pub(crate) fn agreed(epochs: impl IntoIterator<Item = ClearEpoch> + Clone) -> ClearEpoch {
    let newest = epochs.clone().into_iter().map(|epoch| epoch.counter).max();
    let mut newest = epochs
        .into_iter()
        .filter(|epoch| Some(epoch.counter) == newest);
    let first = newest.next().unwrap_or_default();
    newest.fold(first, ClearEpoch::join)
}

/// Returns 16 random bytes.
pub(crate) fn random_id() -> [u8; 16] {
    let random = || {
        RandomState::new()
            .hash_one(std::process::id())
            .to_le_bytes()
    };
    let mut id = [0; 16];
    id[..8].copy_from_slice(&random());
    id[8..].copy_from_slice(&random());
    id
}

/// Returns an id as hexadecimal text.
pub(crate) fn hex(id: &[u8; 16]) -> String {
    id.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_epoch_wins_and_a_tie_of_two_clears_is_above_both() {
        let never = ClearEpoch::default();
        let (a, b) = (never.next(), never.next());
        let later = a.next();
        assert_eq!(agreed([]), never);
        assert_eq!(agreed([never, never]), never);
        assert_eq!(agreed([never, a, a]), a);
        assert_eq!(agreed([a, b, later]), later);
        for order in [[a, b, never], [never, b, a]] {
            let above = agreed(order);
            assert_eq!(above.counter, 2);
            assert!(above != later && above.origin != a.origin && above.origin != b.origin);
        }
    }
}
