//! Checks the heap of the index for each chunk. The budget is the design's: 128 bytes.

#[path = "support/counting_alloc.rs"]
mod counting_alloc;
#[path = "support/filled.rs"]
mod filled;

use lmc_backend_local::PolicyKind;
use lmc_testkit::rounds;

const BUDGET: f64 = 128.0;

// One test, as the allocator counts for the whole process.
#[test]
fn a_chunk_costs_128_bytes_of_heap() {
    // The fullest and the emptiest table lie within a doubling. The gate has no time for the last.
    let counts = [10_000, 14_000, 20_000, 460_000, 1_000_000];
    for &chunks in &counts[..rounds(3, counts.len())] {
        let (tier, cost) = filled::filled(PolicyKind::Lru, chunks);
        println!("{chunks} chunks: {cost:.1} bytes each");
        assert!(
            cost <= BUDGET,
            "{cost:.1} bytes for each of {chunks} chunks"
        );
        assert!(cost > 90.0, "{cost:.1} bytes cannot be right");
        let leases = tier.lease_leading(Default::default(), &filled::prompt(3));
        assert_eq!(leases.len(), filled::PROMPT as usize);
    }
}
