//! Channels that fail.

use crate::support::socket::{Tcp, Unix};

use lmc_testkit::rounds;
use lmc_transfer::conformance::{Guarantee, RandomTest};
use lmc_transfer::{Faults, FlakyRig};

/// With nothing worse than outcomes that come late, a channel is still one.
mod slow {
    use super::*;

    fn rig() -> FlakyRig<Unix> {
        let mut faults = Faults::default();
        faults.slow = 500;
        faults.delay = std::time::Duration::from_millis(3);
        FlakyRig::new(Unix::new(), faults, 1)
    }

    lmc_transfer::conformance!(rig());
}

#[test]
fn a_faulty_channel_never_gives_a_wrong_byte() {
    let mut counts = [0; 9];
    for seed in 0..rounds(2, 4) as u64 {
        let rig = FlakyRig::new(Tcp::default(), Faults::some(), seed);
        let test = RandomTest::new(Guarantee::Lossy);
        let tally = test.with_seed(seed).with_rounds(rounds(30, 60)).run(&rig);
        let found = [
            tally.written,
            tally.read,
            tally.received,
            tally.failed,
            tally.unsettled,
            tally.idle,
            tally.quarantined,
            tally.dropped,
            tally.died,
        ];
        for (count, found) in counts.iter_mut().zip(found) {
            *count += found;
        }
    }
    // About ten of the rarest are expected.
    assert!(counts.iter().all(|count| *count > 0), "{counts:?}");
}
