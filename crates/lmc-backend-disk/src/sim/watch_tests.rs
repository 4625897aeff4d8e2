//! Files that are removed under a drive that is open.

use std::sync::Arc;

use lmc_backend::conformance::{block_on, lens_of, store_batch, test_key};
use lmc_backend::{Backend, Health, Stored};
use lmc_testkit::until;

use super::SimVolume;
use super::crash_tests::{SEGMENT, SETTINGS, alone, clear, is_there, item, open, pool, soon};
use crate::backend::DiskBackend;
use crate::config::open_drive;

fn is_out(tier: &DiskBackend, drive: usize) -> bool {
    matches!(tier.drive_health()[drive], Health::Down { .. })
}

/// Files were deleted under a server: it went on writing to the deleted files, and after a restart
/// the chunks were gone.
#[test]
fn a_drive_whose_files_are_removed_is_out_and_the_other_drives_go_on() {
    let pool = pool();
    for name in ["drive", "clears", "log-", "checkpoint-", "segment-"] {
        let (first, second) = (SimVolume::new(u64::MAX), SimVolume::new(u64::MAX));
        let drive = |volume: &Arc<SimVolume>| {
            let opened = open_drive(Arc::clone(volume) as _, SEGMENT, SETTINGS, None);
            opened.expect("a new drive").0
        };
        let tier = alone(vec![drive(&first), drive(&second)]).expect("a tier");
        // The map of clears is there from the first clear on.
        assert!(clear(&tier, soon()).is_durable);
        let store = |numbers: std::ops::Range<u64>| {
            let items = numbers.map(|number| item(&pool, number)).collect();
            store_batch(&tier, items, soon())
        };
        store(0..20).into_iter().for_each(|stored| {
            assert!(matches!(stored, Ok(Stored::Written)), "{stored:?}");
        });
        let on_first = |number: &u64| tier.drives()[0].find(&test_key(*number)).is_some();
        let on_first: Vec<u64> = (0..20).filter(on_first).collect();
        first.take_away(&first.names(name)[0]);
        until("the drive is out", || is_out(&tier, 0));
        let left = first.names("");
        for number in 0..20 {
            let there = is_there(&tier, &pool, number);
            assert_ne!(there, on_first.contains(&number), "without {name}");
        }
        // More than a segment holds, and than a log.
        for stored in store(100..200) {
            assert!(matches!(stored, Ok(Stored::Written)), "{stored:?}");
        }
        assert!((100..200).all(|number| is_there(&tier, &pool, number)));
        assert!(!clear(&tier, soon()).is_durable, "not on each drive");
        block_on(tier.close(soon())).expect("what there is to close");
        drop(tier);
        assert_eq!(first.names(""), left, "nothing was made or removed");
        // A clear that reached one of them is over on both, and a restart goes on with what is left.
        let tier = open(&second, SETTINGS).expect("as it was closed");
        assert!(
            lens_of(&tier, &[test_key(150)], soon())[0]
                .as_ref()
                .is_ok_and(Option::is_none)
        );
    }
}

/// The folder was renamed, and is back: until then nothing was written there.
#[test]
fn a_drive_whose_files_are_back_is_used_again_and_has_missed_nothing() {
    let (volume, pool) = (SimVolume::new(u64::MAX), pool());
    let tier = open(&volume, SETTINGS).expect("a new drive");
    let store = |number| store_batch(&tier, vec![item(&pool, number)], soon()).remove(0);
    assert!((0..4).all(|number| matches!(store(number), Ok(Stored::Written))));
    let name = volume.names("segment-").remove(0);
    let file = volume.take_away(&name);
    until("the drive is out", || is_out(&tier, 0));
    store(4).expect_err("the only drive is out");
    assert!(!clear(&tier, soon()).is_durable);
    volume.bring_back(&name, file);
    until("it is used again", || tier.health() == Health::Ready);
    assert!((0..4).all(|number| !is_there(&tier, &pool, number)));
    assert!(matches!(store(5), Ok(Stored::Written)));
    drop(tier);
    let tier = open(&volume.after_crash(1), SETTINGS).expect("it opens again");
    assert!((0..5).all(|number| !is_there(&tier, &pool, number)));
    assert!(is_there(&tier, &pool, 5));
}
