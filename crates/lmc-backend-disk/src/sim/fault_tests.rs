//! Faults of a drive: errors, stalls, wrong bytes, lost files. Each is a miss and a counter.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use futures_util::{FutureExt, StreamExt};
use lmc_backend::conformance::{block_on, lens_of, load_batch, store_batch, test_key};
use lmc_backend::{
    Backend, BackendError, ChunkEvent, Cursor, EventSink, Events, FailedSlot, Health, LoadItem,
    Loaded, Stored, WriteBackend,
};
use lmc_testkit::{rounds, until};

use super::crash_tests::{
    SEGMENT, SETTINGS, alone, is_there, item, item_of, len, open, pool, soon,
};
use super::{Fault, SimVolume};
use crate::backend::DiskBackend;
use crate::batch::AnswerBatch;
use crate::config::open_drive;
use crate::drive::DriveSettings;
use crate::volume::{BLOCK, Kind, Volume};

/// A drive with chunks 0 to 9 on it, closed in order.
fn filled() -> Arc<SimVolume> {
    let volume = SimVolume::new(u64::MAX);
    let pool = pool();
    let tier = open(&volume, SETTINGS).expect("a new drive");
    let items = (0..10).map(|number| item(&pool, number)).collect();
    let answers = store_batch(&tier, items, soon());
    assert!(
        answers
            .iter()
            .all(|answer| matches!(answer, Ok(Stored::Written)))
    );
    block_on(tier.close(soon())).expect("closed in order");
    volume
}

/// Longest wait for what is there.
const PATIENT: Duration = lmc_testkit::DEADLINE;

/// Time after which a drive is taken for stalled that [`STALLS_SOON`] describes.
const STALL: Duration = Duration::from_millis(50);

const STALLS_SOON: DriveSettings = DriveSettings {
    stall: STALL,
    ..SETTINGS
};

fn load(tier: &DiskBackend, pool: &lmc_memory::Pool, number: u64, wait: Duration) -> Loaded {
    let slot = pool.reserve(len(number)).expect("space");
    let item = LoadItem::new(test_key(number), slot);
    let mut loaded = load_batch(tier, vec![item], Instant::now() + wait);
    loaded.pop().expect("one answer")
}

#[test]
fn a_flipped_bit_anywhere_in_a_header_is_a_miss_for_good() {
    let pool = pool();
    // The fields end at byte 176; then come zeroes, and the checksum.
    let bytes = (0..176).chain([1000, 4087]).chain(4088..4096);
    for byte in bytes.step_by(rounds(4, 1)) {
        let volume = filled();
        let segment = volume.names("segment-").remove(0);
        volume.alter(&segment, |data| data[byte] ^= 1 << (byte % 8));
        let tier = open(&volume, SETTINGS).expect("only a chunk is damaged");
        assert!(!is_there(&tier, &pool, 0), "byte {byte}");
        let stats = tier.stats();
        assert_eq!(
            (stats.bad_headers, stats.bad_payloads),
            (1, 0),
            "byte {byte}"
        );
        assert!((1..10).all(|number| is_there(&tier, &pool, number)));
        block_on(tier.close(soon())).expect("closed in order");
        drop(tier);
        // It was removed, so it is not read again, and it can be stored again.
        let tier = open(&volume, SETTINGS).expect("as before");
        assert!(!is_there(&tier, &pool, 0));
        assert_eq!(tier.stats().bad_headers, 0);
        let stored = store_batch(&tier, vec![item(&pool, 0)], soon());
        assert!(matches!(stored[..], [Ok(Stored::Written)]));
        assert!(is_there(&tier, &pool, 0));
    }
}

#[test]
fn a_flipped_bit_in_a_chunks_bytes_is_a_miss() {
    let pool = pool();
    for at in [0, 1, len(0) / 2, len(0) - 1] {
        let volume = filled();
        let segment = volume.names("segment-").remove(0);
        volume.alter(&segment, |data| data[(BLOCK + at) as usize] ^= 0x10);
        let tier = open(&volume, SETTINGS).expect("only a chunk is damaged");
        assert!(!is_there(&tier, &pool, 0));
        assert_eq!(tier.stats().bad_payloads, 1);
    }
}

#[test]
fn bytes_of_an_earlier_use_of_a_segment_are_a_miss() {
    let volume = filled();
    let pool = pool();
    let segment = volume.names("segment-").remove(0);
    // The whole chunk 1 at the location of chunk 0: intact, and of another key.
    let from = (BLOCK + len(0).next_multiple_of(BLOCK)) as usize;
    let size = (BLOCK + len(1).next_multiple_of(BLOCK)) as usize;
    volume.alter(&segment, |data| data.copy_within(from..from + size, 0));
    let tier = open(&volume, SETTINGS).expect("only a chunk is damaged");
    assert!(!is_there(&tier, &pool, 0));
    assert_eq!(tier.stats().bad_headers, 1);
}

/// Number of reports that any chunk may have come or gone.
#[derive(Debug, Default)]
struct Reports(AtomicUsize);

impl EventSink for Reports {
    fn changed(&self, event: &ChunkEvent<'_>) {
        panic!("{event:?}");
    }

    fn any_changed(&self, _: &str) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn reads_that_fail_are_errors_and_take_the_drive_out_until_it_answers() {
    let volume = filled();
    let pool = pool();
    let tier = open(&volume, SETTINGS).expect("as it was closed");
    let events = Events::default();
    let reports = Arc::<Reports>::default();
    events.listen(Arc::clone(&reports) as _);
    tier.drives()[0].report_to(&events);
    let reports = || reports.0.load(Ordering::Relaxed);
    volume.fault(Kind::Read, Fault::Error(libc::EIO));
    for _ in 0..3 {
        assert_eq!(reports(), 0);
        let Loaded::Failed {
            error: BackendError::Io(_),
            slot: FailedSlot::Released(_),
        } = load(&tier, &pool, 0, PATIENT)
        else {
            panic!("an error of the drive");
        };
    }
    assert!(matches!(tier.health(), Health::Down { .. }));
    assert_eq!(reports(), 1, "any chunk may be absent now");
    let listed = || {
        let page = block_on(tier.list(Cursor::START, 100, soon()));
        page.expect("a page").items.len()
    };
    assert_eq!(listed(), 0, "none is said to be there");
    let out = load(&tier, &pool, 0, PATIENT);
    let unavailable = matches!(
        out,
        Loaded::Failed {
            error: BackendError::Unavailable(_),
            ..
        }
    );
    assert!(unavailable, "{out:?}");
    assert!(lens_of(&tier, &[test_key(0)], soon())[0].is_err());
    let stats = tier.stats();
    assert_eq!((stats.read_errors, stats.taken_out), (3, 1));
    volume.thaw();
    until("the drive is back", || tier.health() == Health::Ready);
    until("any chunk may be there again", || reports() == 2);
    assert_eq!(listed(), 10);
    assert!(
        (0..10).all(|number| is_there(&tier, &pool, number)),
        "nothing was forgotten"
    );
    drop(out);
    drop(tier);
    assert_eq!(pool.usage().used, 0);
}

#[test]
fn a_drive_that_stalls_costs_the_deadline_and_no_slot() {
    let volume = filled();
    let pool = pool();
    let tier = open(&volume, STALLS_SOON).expect("as it was closed");
    volume.fault(Kind::Read, Fault::Stall);
    // The read is stalled until the end of the test.
    let Loaded::Failed {
        error: BackendError::Deadline,
        slot: FailedSlot::Quarantined,
    } = load(&tier, &pool, 0, Duration::from_millis(30))
    else {
        panic!("the deadline passes");
    };
    assert_eq!(tier.stats().late, 1);
    assert_ne!(
        pool.usage().used,
        0,
        "the drive may still write to the slot"
    );
    volume.thaw();
    assert_eq!(pool.usage().used, 0, "now it has answered");
    assert!(is_there(&tier, &pool, 0));
    // A batch that waits long for nothing tells of a drive that is gone.
    volume.fault(Kind::Read, Fault::Stall);
    until("it is out", || {
        drop(load(&tier, &pool, 0, 2 * STALL));
        matches!(tier.health(), Health::Down { .. })
    });
    volume.thaw();
}

#[test]
fn writes_that_fail_lose_only_themselves() {
    let volume = filled();
    let pool = pool();
    let tier = open(&volume, SETTINGS).expect("as it was closed");
    for kind in [Kind::Write, Kind::Sync] {
        volume.fault(kind, Fault::Error(libc::EIO));
        let stored = store_batch(&tier, vec![item(&pool, 20)], soon());
        assert!(
            matches!(stored[..], [Err(BackendError::Io(_))]),
            "{stored:?}"
        );
        volume.thaw();
        assert!(!is_there(&tier, &pool, 20));
    }
    until("a chunk is written", || {
        let stored = store_batch(&tier, vec![item(&pool, 20)], soon());
        matches!(stored[..], [Ok(Stored::Written)])
    });
    drop(tier);
    let tier = open(&volume, SETTINGS).expect("after the faults");
    assert!(
        (0..10)
            .chain([20])
            .all(|number| is_there(&tier, &pool, number))
    );
}

#[test]
fn a_log_that_cannot_be_written_stops_stores_until_it_can() {
    let volume = filled();
    let pool = pool();
    let tier = open(&volume, SETTINGS).expect("as it was closed");
    let stored = store_batch(&tier, vec![item(&pool, 30)], soon());
    assert!(matches!(stored[..], [Ok(Stored::Written)]));
    // A removal writes to the log and to nothing else.
    volume.fault(Kind::Write, Fault::Error(libc::EIO));
    let timeout = Instant::now() + Duration::from_millis(50);
    let removed = block_on(tier.remove(&[test_key(30)], timeout));
    assert!(removed[0].is_err(), "it is not durable");
    until("the fault is known", || {
        matches!(tier.health(), Health::Degraded { .. })
    });
    let stored = store_batch(&tier, vec![item(&pool, 31)], soon());
    assert!(matches!(stored[..], [Ok(Stored::Declined)]), "{stored:?}");
    assert!(is_there(&tier, &pool, 0), "what is there is read");
    volume.thaw();
    until("the drive is back", || tier.health() == Health::Ready);
    let stored = store_batch(&tier, vec![item(&pool, 31)], soon());
    assert!(matches!(stored[..], [Ok(Stored::Written)]), "{stored:?}");
    drop(tier);
    let tier = open(&volume, SETTINGS).expect("after the faults");
    assert!(is_there(&tier, &pool, 31) && !is_there(&tier, &pool, 30));
}

/// A full drive keeps nothing of the logs that were tried on it meanwhile.
#[test]
fn a_log_that_was_begun_in_vain_is_taken_away() {
    let volume = filled();
    let pool = pool();
    let tier = open(&volume, SETTINGS).expect("as it was closed");
    let logs = volume.names("log-");
    volume.fault_in("log-", Kind::Write, Fault::Error(libc::ENOSPC));
    let opened = volume.opened();
    let stored = store_batch(&tier, vec![item(&pool, 30)], soon());
    assert!(
        matches!(stored[..], [Err(BackendError::Io(_))]),
        "{stored:?}"
    );
    until("new logs were tried", || volume.opened() > opened + 2);
    drop(tier);
    assert_eq!(volume.names("log-"), logs);
    volume.thaw();
    let tier = open(&volume, SETTINGS).expect("after the faults");
    assert!((0..10).all(|number| is_there(&tier, &pool, number)));
}

#[test]
fn a_removal_does_not_wait_for_a_drive_that_never_had_the_chunk() {
    let (first, second) = (SimVolume::new(u64::MAX), SimVolume::new(u64::MAX));
    let pool = pool();
    let drive = |volume: &Arc<SimVolume>| {
        let opened = open_drive(Arc::clone(volume) as _, SEGMENT, SETTINGS, None);
        opened.expect("a new drive").0
    };
    let tier = alone(vec![drive(&first), drive(&second)]).expect("a tier");
    let items = (0..20).map(|number| item(&pool, number)).collect();
    drop(store_batch(&tier, items, soon()));
    let one_of = |drive: usize| {
        let is_there = |key: &_| tier.drives()[drive].find(key).is_some();
        let key = (0..20).map(test_key).find(is_there);
        key.expect("half of them are there")
    };
    let (of_first, of_second) = (one_of(0), one_of(1));
    // The first drive's file system is read-only from now on; a removal there tells.
    first.fault(Kind::Write, Fault::Error(libc::EROFS));
    let remove = |key| {
        let timeout = Instant::now() + Duration::from_millis(300);
        block_on(tier.remove(&[key], timeout)).remove(0)
    };
    assert!(remove(of_first).is_err(), "it is not durable");
    assert!(remove(of_first).is_err(), "a restart would find it");
    let removed = block_on(tier.remove(&[of_second], soon())).remove(0);
    assert!(matches!(removed, Ok(true)), "{removed:?}");
}

#[test]
fn a_drive_that_was_out_and_could_not_be_logged_to_comes_back() {
    let volume = filled();
    let pool = pool();
    let tier = open(&volume, SETTINGS).expect("as it was closed");
    volume.fault(Kind::Read, Fault::Error(libc::EIO));
    volume.fault(Kind::Sync, Fault::Error(libc::EIO));
    for _ in 0..3 {
        drop(load(&tier, &pool, 0, PATIENT));
    }
    let drive = &tier.drives()[0];
    assert!(matches!(drive.health(), Health::Down { .. }));
    drive.remove(&test_key(0), (AnswerBatch::new(1), 0));
    thread::sleep(Duration::from_millis(20));
    volume.thaw();
    // No request looks at the drive while the log's thread finds that it works again.
    thread::sleep(Duration::from_millis(50));
    until("it is back", || tier.health() == Health::Ready);
    assert!(is_there(&tier, &pool, 1));
}

#[test]
fn a_chunk_that_cannot_be_read_is_removed_and_costs_nothing_else() {
    let volume = filled();
    let pool = pool();
    let tier = open(&volume, SETTINGS).expect("as it was closed");
    volume.fault_in("segment-", Kind::Read, Fault::Error(libc::EIO));
    let bad = load(&tier, &pool, 0, PATIENT);
    assert!(matches!(bad, Loaded::Failed { .. }), "{bad:?}");
    for _ in 0..30 {
        let bad = load(&tier, &pool, 0, PATIENT);
        assert!(matches!(bad, Loaded::Miss(_)), "{bad:?}");
    }
    volume.thaw();
    let stats = tier.stats();
    assert_eq!((stats.read_errors, stats.taken_out), (1, 0));
    assert!((1..10).all(|number| is_there(&tier, &pool, number)));
    drop(bad);
    block_on(tier.close(soon())).expect("closed in order");
    drop(tier);
    let tier = open(&volume, SETTINGS).expect("as it was closed");
    assert!(!is_there(&tier, &pool, 0), "for good");
}

#[test]
fn a_read_for_which_there_was_no_memory_forgets_no_chunk() {
    let volume = filled();
    let pool = pool();
    let tier = open(&volume, SETTINGS).expect("as it was closed");
    volume.fault_in("segment-", Kind::Read, Fault::Error(libc::ENOMEM));
    for _ in 0..5 {
        let failed = load(&tier, &pool, 0, PATIENT);
        assert!(matches!(failed, Loaded::Failed { .. }), "{failed:?}");
    }
    volume.thaw();
    assert_eq!(tier.health(), Health::Ready);
    assert!(is_there(&tier, &pool, 0), "it is whole");
}

#[test]
fn a_drive_whose_writes_fail_keeps_what_can_be_read() {
    let volume = SimVolume::new(u64::MAX);
    let pool = pool();
    // Chunks of half a segment; all segments are full.
    let settings = DriveSettings {
        capacity: 11 * SEGMENT,
        ..SETTINGS
    };
    let tier = open(&volume, settings).expect("a new drive");
    let big = |number| item_of(&pool, number, SEGMENT / 2 - BLOCK);
    for number in 0..50 {
        let stored = store_batch(&tier, vec![big(number)], soon());
        assert!(matches!(stored[..], [Ok(Stored::Written)]));
    }
    let keys: Vec<_> = (0..50).map(test_key).collect();
    let there = || {
        let found = lens_of(&tier, &keys, soon());
        found
            .iter()
            .filter(|found| matches!(found, Ok(Some(_))))
            .count()
    };
    let before = there();
    volume.fault_in("segment-", Kind::Write, Fault::Error(libc::EIO));
    for number in 100..200 {
        let stored = store_batch(&tier, vec![big(number)], soon());
        assert!(!matches!(stored[..], [Ok(Stored::Written)]), "{stored:?}");
        let slot = pool.reserve(SEGMENT / 2 - BLOCK).expect("space");
        let item = LoadItem::new(test_key(49), slot);
        let loaded = load_batch(&tier, vec![item], soon());
        assert!(
            matches!(loaded[..], [Loaded::Hit { .. }]),
            "it is read meanwhile"
        );
        thread::sleep(Duration::from_millis(1));
    }
    // It takes failures in three segments to know that it is not the location.
    assert!(
        there() + 6 >= before,
        "{before} chunks before, {} after",
        there()
    );
    assert!(matches!(tier.health(), Health::Degraded { .. }));
    volume.thaw();
    until("it is taken back", || tier.health() == Health::Ready);
    let stored = store_batch(&tier, vec![big(300)], soon());
    assert!(matches!(stored[..], [Ok(Stored::Written)]), "{stored:?}");
}

/// A file system that copies on write, or whose files have holes, is full but for a few blocks: a
/// look that writes a block says nothing of chunks.
#[test]
fn a_drive_with_space_for_a_block_but_no_chunk_keeps_what_can_be_read() {
    let volume = SimVolume::new(u64::MAX);
    let pool = pool();
    let settings = DriveSettings {
        capacity: 11 * SEGMENT,
        ..SETTINGS
    };
    let tier = open(&volume, settings).expect("a new drive");
    // Four to a segment.
    let quarter = |number| item_of(&pool, number, 7 * BLOCK);
    for number in 0..200 {
        let stored = store_batch(&tier, vec![quarter(number)], soon());
        assert!(matches!(stored[..], [Ok(Stored::Written)]));
    }
    let there = || {
        let is_there = |number: &u64| tier.drives()[0].find(&test_key(*number)).is_some();
        (0..200).filter(is_there).count()
    };
    let before = there();
    volume.fault_in("segment-", Kind::Write, Fault::ErrorIfLong(libc::ENOSPC));
    for number in 1000..1200 {
        drop(store_batch(&tier, vec![quarter(number)], soon()));
        thread::sleep(Duration::from_millis(1));
    }
    // It takes failures in three segments to know that it is not the location.
    assert!(
        there() + 12 >= before,
        "{before} chunks before, {} after",
        there()
    );
    volume.thaw();
    until("it is taken back", || tier.health() == Health::Ready);
    let stored = store_batch(&tier, vec![quarter(300)], soon());
    assert!(matches!(stored[..], [Ok(Stored::Written)]), "{stored:?}");
}

/// Writes failed everywhere for a moment; where the last of them failed they do for good.
#[test]
fn one_bad_location_does_not_keep_a_drive_unwritable() {
    let volume = SimVolume::new(u64::MAX);
    let pool = pool();
    let tier = open(&volume, SETTINGS).expect("a new drive");
    let store = |number| store_batch(&tier, vec![item(&pool, number)], soon()).remove(0);
    assert!(matches!(store(0), Ok(Stored::Written)));
    volume.fault_in("segment-", Kind::Write, Fault::Error(libc::EIO));
    for number in 1..8 {
        drop(store(number));
    }
    assert!(matches!(tier.health(), Health::Degraded { .. }));
    volume.thaw();
    volume.fault_in("segment-00000002", Kind::Write, Fault::Error(libc::EIO));
    until("it is taken back", || tier.health() == Health::Ready);
}

#[test]
fn a_drive_whose_writes_stall_is_read_and_given_no_more_until_they_end() {
    let volume = filled();
    let pool = pool();
    let tier = open(&volume, STALLS_SOON).expect("as it was closed");
    volume.fault(Kind::Write, Fault::Stall);
    let store = |number, timeout| store_batch(&tier, vec![item(&pool, number)], timeout).remove(0);
    // Three, and one more for each that the machine left less time for.
    let mut numbers = 20..;
    until("it is given no more", || {
        let number = numbers.next().expect("numbers do not end");
        let stored = store(number, Instant::now() + 2 * STALL);
        assert!(matches!(stored, Err(BackendError::Deadline)), "{stored:?}");
        tier.health() != Health::Ready
    });
    let held = pool.usage().used;
    for number in numbers.take(17) {
        let stored = store(number, soon());
        assert!(matches!(stored, Ok(Stored::Declined)), "{stored:?}");
        assert!(is_there(&tier, &pool, 0));
        thread::sleep(Duration::from_millis(2));
    }
    assert_eq!(pool.usage().used, held, "it was given no more");
    assert_eq!(tier.stats().taken_out, 0);
    assert!(matches!(tier.health(), Health::Degraded { .. }));
    volume.thaw();
    until("it is taken back", || tier.health() == Health::Ready);
    assert!(matches!(store(1000, soon()), Ok(Stored::Written)));
}

#[test]
fn a_drive_that_does_not_answer_is_given_one_look_at_a_time() {
    let volume = filled();
    let pool = pool();
    let tier = open(&volume, STALLS_SOON).expect("as it was closed");
    volume.fault(Kind::Read, Fault::Stall);
    // Three, and one more for each that the machine left less time for.
    let mut loads = 0;
    until("it is out", || {
        drop(load(&tier, &pool, 0, 2 * STALL));
        loads += 1;
        matches!(tier.health(), Health::Down { .. })
    });
    for _ in 0..50 {
        drop(load(&tier, &pool, 0, Duration::from_millis(10)));
        thread::sleep(Duration::from_millis(2));
    }
    // Header and payload of each load, and the look.
    let stalled = volume.stalled();
    assert!(stalled <= 2 * loads + 1, "{stalled} are under way");
    volume.thaw();
    until("it is back", || tier.health() == Health::Ready);
}

#[test]
fn a_sync_that_failed_is_believed_for_nothing_that_was_written_before() {
    let volume = filled();
    let pool = pool();
    let tier = open(&volume, SETTINGS).expect("as it was closed");
    volume.fault_in("segment-", Kind::Sync, Fault::Stall);
    let (first, second) = thread::scope(|scope| {
        let first = scope.spawn(|| store_batch(&tier, vec![item(&pool, 20)], soon()));
        until("its sync is under way", || volume.stalled() > 0);
        // The second is written, header and bytes, and waits for the next group.
        let events = volume.events();
        let second = scope.spawn(|| store_batch(&tier, vec![item(&pool, 21)], soon()));
        until("it is written", || volume.events() == events + 2);
        volume.call_all_synced();
        volume.fail_stalled(libc::EIO);
        let ended =
            |store: thread::ScopedJoinHandle<'_, Vec<_>>| store.join().expect("no panic").remove(0);
        (ended(first), ended(second))
    });
    assert!(matches!(first, Err(BackendError::Io(_))), "{first:?}");
    assert!(matches!(second, Err(BackendError::Io(_))), "{second:?}");
    let stored = store_batch(&tier, vec![item(&pool, 22)], soon());
    assert!(matches!(stored[..], [Ok(Stored::Written)]));
    let tier = open(&volume.after_crash(3), SETTINGS).expect("it opens again");
    assert!(is_there(&tier, &pool, 22));
    assert!(!is_there(&tier, &pool, 20) && !is_there(&tier, &pool, 21));
}

#[test]
fn what_is_on_a_drive_that_is_out_is_a_miss() {
    let (first, second) = (SimVolume::new(u64::MAX), SimVolume::new(u64::MAX));
    let pool = pool();
    let settings = DriveSettings {
        probe_every: Duration::from_secs(3600),
        ..STALLS_SOON
    };
    let drive = |volume: &Arc<SimVolume>| {
        let opened = open_drive(Arc::clone(volume) as _, SEGMENT, settings, None);
        opened.expect("a new drive").0
    };
    let tier = alone(vec![drive(&first), drive(&second)]).expect("a tier");
    let items = (0..20).map(|number| item(&pool, number)).collect();
    drop(store_batch(&tier, items, soon()));
    let on_first = |number: &u64| tier.drives()[0].find(&test_key(*number)).is_some();
    let on_first = (0..20).find(on_first).expect("half of them are there");
    first.fault(Kind::Read, Fault::Stall);
    until("the first drive is out", || {
        drop(load(&tier, &pool, on_first, 2 * STALL));
        tier.drives()[0].unavailable().is_some()
    });
    let loaded = load(&tier, &pool, on_first, PATIENT);
    assert!(matches!(loaded, Loaded::Miss(_)), "{loaded:?}");
    first.thaw();
}

#[test]
fn a_removal_during_a_store_survives_a_crash() {
    let volume = filled();
    let pool = pool();
    let tier = open(&volume, SETTINGS).expect("as it was closed");
    volume.fault_in("log-", Kind::WriteDurably, Fault::Stall);
    let timeout = || Instant::now() + Duration::from_millis(50);
    let (first, second) = thread::scope(|scope| {
        scope.spawn(|| store_batch(&tier, vec![item(&pool, 20)], soon()));
        until("its frame is on the way", || volume.stalled() == 1);
        let first = block_on(tier.remove(&[test_key(20)], timeout())).remove(0);
        // It is gone, as far as anybody can see, and the log does not know.
        let second = block_on(tier.remove(&[test_key(20)], timeout())).remove(0);
        // The frame is written, and then the machine dies.
        volume.crash_after(2);
        volume.thaw();
        (first, second)
    });
    drop(tier);
    let tier = open(&volume.after_crash(1), SETTINGS).expect("it opens again");
    let there = is_there(&tier, &pool, 20);
    assert!(
        first.is_err() && second.is_err(),
        "{first:?} {second:?}, there again: {there}"
    );
}

#[test]
fn closing_ends_when_the_last_write_fails() {
    let volume = filled();
    let pool = pool();
    let tier = open(&volume, SETTINGS).expect("as it was closed");
    volume.fault(Kind::Write, Fault::Stall);
    thread::scope(|scope| {
        let storing = scope.spawn(|| store_batch(&tier, vec![item(&pool, 20)], soon()));
        until("the write is under way", || volume.stalled() > 0);
        let closing = scope.spawn(|| block_on(tier.close(soon())));
        // Long enough to wait for that write.
        thread::sleep(Duration::from_millis(50));
        volume.fail_stalled(libc::EIO);
        assert!(storing.join().expect("no panic")[0].is_err());
        closing.join().expect("no panic").expect("closed in order");
    });
}

#[test]
fn a_tier_that_is_dropped_after_a_late_close_is_gone() {
    let volume = filled();
    let pool = pool();
    let tier = open(&volume, SETTINGS).expect("as it was closed");
    volume.fault(Kind::Write, Fault::Stall);
    let timeout = || Instant::now() + Duration::from_millis(50);
    assert!(store_batch(&tier, vec![item(&pool, 20)], timeout())[0].is_err());
    let closed = block_on(tier.close(timeout()));
    assert!(matches!(closed, Err(BackendError::Deadline)), "{closed:?}");
    drop(tier);
    until("its threads end", || Arc::strong_count(&volume) == 1);
    assert_eq!(pool.usage().used, 0);
}

#[test]
fn a_log_that_is_over_or_cannot_be_renewed_leaves_no_open_file() {
    let volume = filled();
    let pool = pool();
    let tier = open(&volume, SETTINGS).expect("as it was closed");
    let before = volume.open_files();
    for number in 30..60 {
        let stored = store_batch(&tier, vec![item(&pool, number)], soon());
        assert!(matches!(stored[..], [Ok(Stored::Written)]));
    }
    assert!(tier.stats().checkpoints > 5, "logs were over");
    // Segments are opened once and stay open.
    let segments = volume.names("segment-").len() as u64;
    assert!(volume.open_files() <= before + segments);
    volume.fault(Kind::Write, Fault::Error(libc::EIO));
    let timeout = Instant::now() + Duration::from_millis(50);
    drop(block_on(tier.remove(&[test_key(30)], timeout)));
    let before = volume.open_files();
    thread::sleep(Duration::from_millis(100));
    let after = volume.open_files();
    // A renewal may be under way: a log and its checkpoint.
    assert!(after <= before + 2, "{before} and {after} files open");
}

#[test]
fn a_full_file_system_makes_the_tier_smaller_and_no_error() {
    // Space for the fixed files and two segments, where the tier was promised many.
    let volume = SimVolume::new(2 * SEGMENT + (64 << 10));
    let pool = pool();
    let tier = open(&volume, SETTINGS).expect("a new drive");
    for number in 0..60 {
        let stored = store_batch(&tier, vec![item(&pool, number)], soon());
        assert!(matches!(stored[..], [Ok(Stored::Written)]), "{stored:?}");
    }
    assert!(tier.stats().evicted > 0);
    assert!(is_there(&tier, &pool, 59));
    assert_eq!(tier.health(), Health::Ready);
}

/// A drive whose log must be made again, because a kill has torn its last frame, or longer, because
/// a larger tier is asked for, where others have filled the file system since.
#[test]
fn a_full_file_system_refuses_no_drive_for_its_log() {
    let pool = pool();
    for torn in [true, false] {
        let volume = SimVolume::new(2 * SEGMENT + SETTINGS.log_bytes + 5 * BLOCK);
        let tier = open(&volume, SETTINGS).expect("a new drive");
        for number in 0..5 {
            let stored = store_batch(&tier, vec![item(&pool, number)], soon());
            assert!(matches!(stored[..], [Ok(Stored::Written)]));
        }
        drop(tier);
        if torn {
            let log = volume.names("log-").pop().expect("a log");
            volume.alter(&log, |data| {
                let last = data.len() - 100;
                data[last] = 1;
            });
        }
        let free = volume.free().expect("known");
        let others = volume.open("others", Some(free)).expect("space");
        volume.close(others);
        let settings = DriveSettings {
            log_bytes: SETTINGS.log_bytes + if torn { 0 } else { BLOCK },
            ..SETTINGS
        };
        let tier = open(&volume, settings).expect("all chunks are there");
        assert!((0..5).all(|number| is_there(&tier, &pool, number)));
        volume.lose("others");
        until("it can be written", || tier.health() == Health::Ready);
        let stored = store_batch(&tier, vec![item(&pool, 5)], soon());
        assert!(matches!(stored[..], [Ok(Stored::Written)]), "{stored:?}");
        drop(tier);
        let tier = open(&volume, settings).expect("after a kill");
        assert!((0..6).all(|number| is_there(&tier, &pool, number)));
    }
}

#[test]
fn files_that_are_gone_or_damaged_cost_their_chunks_and_nothing_else() {
    let pool = pool();
    let count = |volume: &Arc<SimVolume>| {
        let tier = open(volume, SETTINGS).expect("it opens all the same");
        let there = (0..10)
            .filter(|&number| is_there(&tier, &pool, number))
            .count();
        let stored = store_batch(&tier, vec![item(&pool, 40)], soon());
        assert!(matches!(stored[..], [Ok(Stored::Written)]), "{stored:?}");
        assert!(is_there(&tier, &pool, 40));
        there
    };
    let volume = filled();
    volume.lose(&volume.names("segment-")[0]);
    assert!(count(&volume) < 10);
    for name in ["checkpoint-", "log-"] {
        let volume = filled();
        let file = volume.names(name).remove(0);
        volume.lose(&file);
        let there = count(&volume);
        assert_eq!(there, if name == "log-" { 10 } else { 0 }, "without {name}");
        for at in [0, 9, 20, 40, 4096, 4200] {
            let volume = filled();
            // How many logs there were depends on how many stores shared a sync.
            let file = volume.names(name).remove(0);
            volume.alter(&file, |data| {
                if let Some(byte) = data.get_mut(at) {
                    *byte ^= 0x40;
                }
            });
            // A version that is damaged looks like a later one, which must not be touched.
            let Ok(tier) = open(&volume, SETTINGS) else {
                assert_eq!(at, 9);
                continue;
            };
            drop(tier);
            count(&volume);
        }
    }
}

#[test]
fn what_another_version_wrote_is_refused_and_left_alone() {
    for (name, found) in [("drive", 5), ("checkpoint-", 5), ("drive", 3), ("log-", 3)] {
        let volume = filled();
        let file = volume.names(name).remove(0);
        volume.alter(&file, |data| {
            if name == "log-" {
                data[..8].copy_from_slice(b"LMCFRAME");
            }
            data[8..12].copy_from_slice(&u32::to_le_bytes(found));
        });
        let before = volume.events();
        let error = open_drive(Arc::clone(&volume) as _, SEGMENT, SETTINGS, None);
        let error = error.expect_err("another version");
        let text = error.to_string();
        let says = |what: &str| assert!(text.contains(what), "{text}");
        says(&format!("version {found}"));
        says("version 4");
        says("--disk-create");
        assert_eq!(volume.events(), before, "nothing was written");
    }
}

/// A prompt's request ended while its chunks were read: reads that had not begun went on.
#[test]
fn a_load_that_no_caller_waits_for_is_reported_to_the_volume() {
    let volume = filled();
    let pool = pool();
    let tier = open(&volume, SETTINGS).expect("as it was closed");
    volume.fault_in("segment-", Kind::Read, Fault::Stall);
    let slot = pool.reserve(len(0)).expect("an empty pool");
    let mut loaded = tier.load(vec![LoadItem::new(test_key(0), slot)], soon());
    assert!(loaded.next().now_or_never().is_none());
    assert!(volume.stalled() > 0);
    assert_eq!(volume.abandoned(), 0);
    drop(loaded);
    assert_eq!(volume.abandoned(), volume.stalled());
    volume.end_abandoned();
    assert_eq!(pool.usage().used, 0, "the slot came back");
    let stats = tier.stats();
    assert_eq!((stats.read_errors, stats.bad_payloads), (0, 0));
    assert!(
        matches!(tier.health(), Health::Ready),
        "{:?}",
        tier.health()
    );
    assert!(is_there(&tier, &pool, 0));
}
