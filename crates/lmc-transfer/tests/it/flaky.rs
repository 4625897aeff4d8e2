//! Channels that fail.

use crate::support::socket::{Tcp, Unix};

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
    for seed in 0..4 {
        let rig = FlakyRig::new(Tcp::default(), Faults::some(), seed);
        let test = RandomTest::new(Guarantee::Lossy);
        let tally = test.with_seed(seed).with_rounds(60).run(&rig);
        let counts = [
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
        assert!(counts.iter().all(|count| *count > 0), "{tally:?}");
    }
}
