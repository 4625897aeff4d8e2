//! Daemons in one process under a virtual clock: real nodes, a network that delays, loses and
//! repeats messages, and memory that is read one-sided, piece by piece, whatever its owner does
//! meanwhile. A schedule follows from its seed.

mod channels;
mod chunks;
mod clears;
mod directory;
mod net;
mod owners;
mod prefills;
mod pushing;
mod schedules;
mod serving;
mod spaces;
mod versions;
mod waiting;

use std::time::Duration;

use lmc_backend::conformance::Rng;
use lmc_key::{ChunkHash, ChunkKey, SpaceId};

/// Returns true once in `n` times; never for 0.
fn once_in(rng: &mut Rng, n: u64) -> bool {
    n > 0 && rng.below(n) == 0
}

/// Returns a time of up to `most`, short ones more often.
fn delay(rng: &mut Rng, most: Duration) -> Duration {
    most.mul_f64((rng.below(1000) as f64 / 1000.0).powi(3))
}

/// Bytes of a chunk in the simulation.
const LEN: u64 = 96;

fn space() -> SpaceId {
    SpaceId::new([7; 16])
}

/// Returns the key of a chunk of a prompt. All chunks have other bytes, because these follow from
/// the first eight of the hash.
fn key(prompt: u64, chunk: u64) -> ChunkKey {
    let mut hash = [0; 32];
    hash[..8].copy_from_slice(&(prompt << 32 | chunk).to_le_bytes());
    hash[8..16].copy_from_slice(&chunk.to_le_bytes());
    ChunkKey {
        space: space(),
        kv_rank: 0,
        group: 0,
        hash: ChunkHash::new(hash),
    }
}

/// Returns the bytes that an engine computes for the chunk of this name: others after each clear.
fn bytes(name: &ChunkKey) -> Vec<u8> {
    let mut rng = Rng::new(name.fold());
    (0..LEN).map(|_| rng.next_u64() as u8).collect()
}

/// Runs a future on a runtime whose clock stands still while anything can go on.
fn run<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime without IO can be built");
    runtime.block_on(future)
}
