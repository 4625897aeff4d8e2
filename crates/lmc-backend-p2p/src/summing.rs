//! Computation of missing checksums: of chunks that are lent, and of chunks that were read where the channel
//! has not stored one with the slots.

use std::sync::Arc;

use lmc_memory::SealedSlot;
use lmc_transfer::Slot;

/// Most bytes that are summed on the current thread: waking another thread takes longer.
const SUMMED_HERE: u64 = 128 << 10;

/// Bytes of a request that are summed on another thread before the request is checked again, because it may
/// have ended.
const SUMMED_AT_ONCE: u64 = 8 << 20;

/// Held while chunks of a request are summed: one request at a time, so that peers keep at most one thread
/// busy.
pub(crate) type SummingTurn = Arc<tokio::sync::Mutex<()>>;

/// Computes the checksums of chunks that are lent. The checksums are stored with the slots.
pub(crate) async fn in_turn(turn: SummingTurn, mut slots: Vec<SealedSlot>) {
    let _turn = turn.lock().await;
    slots.retain(|slot| slot.known_checksum().is_none());
    while !slots.is_empty() {
        let mut bytes = 0;
        let fits = |slot: &&SealedSlot| {
            bytes += slot.len();
            bytes <= SUMMED_AT_ONCE
        };
        let count = slots.iter().take_while(fits).count().max(1);
        let rest = slots.split_off(count);
        let now = std::mem::replace(&mut slots, rest);
        let bytes: u64 = now.iter().map(SealedSlot::len).sum();
        let sum = move || {
            for slot in now {
                slot.checksum();
            }
        };
        if bytes <= SUMMED_HERE {
            sum();
        } else {
            // If no thread is available, the caller computes the sums later.
            let _ = tokio::task::spawn_blocking(sum).await;
        }
    }
}

/// Computes the missing checksums, which are stored with the slots. If that takes long, it runs outside the
/// runtime's threads.
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
    // A runtime that is shutting down drops the slots.
    let lost = |_| (0..count).map(|_| Slot::Quarantined).collect();
    let summing = tokio::task::spawn_blocking(sum);
    summing.await.unwrap_or_else(lost)
}

#[cfg(test)]
mod tests {
    use lmc_memory::{ArenaConfig, Pool, PoolConfig, checksum};

    use super::*;

    #[tokio::test]
    async fn sums_stay_with_their_slots() {
        let arena = ArenaConfig::anonymous(64 << 20).build().expect("64 MiB");
        let pool = Pool::new(Arc::new(arena), PoolConfig::default()).expect("a pool");
        // Three that are summed here, and three of which two are summed apart.
        let lens = [4096, SUMMED_AT_ONCE / 2 + 4096];
        for (len, round) in lens.into_iter().zip(1..) {
            let slot = |fill: u8| {
                let mut slot = pool.reserve(len).expect("the pool holds them all");
                slot.bytes_mut().fill(fill * round);
                slot.written().seal()
            };
            let slots: Vec<SealedSlot> = (1..4).map(slot).collect();
            let known = || slots.iter().map(SealedSlot::known_checksum);
            assert!(known().all(|sum| sum.is_none()));
            for _ in 0..2 {
                in_turn(SummingTurn::default(), slots.clone()).await;
                let sums = slots.iter().map(|slot| Some(checksum(slot.bytes())));
                assert!(known().eq(sums));
            }
        }
    }
}
