//! Random ids.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;

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
