//! Checksums of chunks that were read, where the channel did not leave them with the slots.

use lmc_transfer::Slot;

/// Bytes that are summed where they arrive, at most: to wake a thread takes longer.
const SUMMED_HERE: u64 = 128 << 10;

/// Computes the checksums that are missing, which stay with their slots. Off the runtime's threads
/// where that takes long.
pub(crate) async fn sum(slots: Vec<Slot>) -> Vec<Slot> {
    let unknown = slots.iter().filter_map(|slot| match slot {
        Slot::Written(slot) if slot.known_checksum().is_none() => Some(slot.len()),
        _ => None,
    });
    let (bytes, count) = (unknown.sum::<u64>(), slots.len());
    let sum = move || {
        for slot in &slots {
            if let Slot::Written(slot) = slot {
                slot.checksum();
            }
        }
        slots
    };
    if bytes <= SUMMED_HERE {
        return sum();
    }
    // A runtime that ends takes the slots with it.
    let lost = |_| (0..count).map(|_| Slot::Quarantined).collect();
    let summing = tokio::task::spawn_blocking(sum);
    summing.await.unwrap_or_else(lost)
}
