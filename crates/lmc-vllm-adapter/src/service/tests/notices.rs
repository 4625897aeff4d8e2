//! Notices of the ends of stores.

use super::*;
use crate::protocol::RequestConfigs;
use crate::service::notices::{MAX_ARRIVALS, MAX_KEYS, Notice};
use crate::service::prefills::LATE_STORES;
use lmc_engine::InUse;

fn notified() -> Service {
    service(|config| config.notices = true)
}

fn of_rank(request: &str, rank: u32, world_size: u32) -> CacheKey {
    CacheKey {
        world_size,
        worker_id: Some(rank),
        ..key(request, 2)
    }
}

/// Registers a worker for each rank, each under the number of its connection.
fn register(service: &Service, memory: &Memory, world_size: u32) {
    let mut registration = memory.registration();
    registration.world_size = world_size;
    for instance_id in 1..=u64::from(world_size) {
        registration.instance_id = instance_id;
        let request = Request::RegisterKvCache(Box::new(registration.clone()));
        assert_eq!(reply(service, instance_id, request), Reply::None);
    }
}

fn look_up(service: &Service, key: CacheKey) {
    let lookup = CacheKey {
        worker_id: None,
        ..key
    };
    reply(service, 9, Request::Lookup(lookup));
}

fn store_rank(service: &Service, request: &str, rank: u32, world_size: u32) {
    let instance_id = u64::from(rank) + 1;
    let store = Request::Store {
        key: of_rank(request, rank, world_size),
        instance_id,
        block_ids: vec![vec![3, 4]],
        event: Vec::new(),
    };
    assert_eq!(reply(service, instance_id, store), Reply::Transferred(true));
}

fn end(service: &Service, request: &str) {
    let request_id = request.to_owned();
    reply(service, 9, Request::EndSession { request_id });
}

/// Returns the requests of the notices that are due this long from now, each with whether it is stored.
fn due(service: &Service, later: Duration) -> Vec<(String, bool)> {
    due_at(service, Instant::now() + later)
}

fn due_at(service: &Service, now: Instant) -> Vec<(String, bool)> {
    let (mut notices, _) = service.take_notices(now);
    notices.sort_by(|one, other| one.request_id.cmp(&other.request_id));
    let outcome = |notice: Notice| (notice.request_id, notice.is_stored);
    notices.into_iter().map(outcome).collect()
}

/// Asserts that no request is watched any more.
fn assert_idle(service: &Service) {
    let notices = service
        .0
        .context
        .notices
        .as_ref()
        .expect("it makes notices");
    assert!(notices.is_idle());
}

fn stored(request: &str) -> Vec<(String, bool)> {
    vec![(request.to_owned(), true)]
}

fn failed(request: &str) -> Vec<(String, bool)> {
    vec![(request.to_owned(), false)]
}

/// LMCache's own client reports each rank by itself, and also where its store failed.
#[test]
fn a_request_is_stored_once_every_rank_has_all_its_chunks() {
    let (service, memory) = (notified(), Memory::new());
    register(&service, &memory, 2);
    look_up(&service, of_rank("a", 0, 2));
    assert_eq!(due(&service, Duration::ZERO), []);
    store_rank(&service, "a", 0, 2);
    assert_eq!(due(&service, Duration::ZERO), []);
    store_rank(&service, "a", 1, 2);
    assert_eq!(due(&service, Duration::ZERO), stored("a"));
    // Once, however it goes on.
    end(&service, "a");
    assert_eq!(due(&service, LATE_STORES), []);
    // The next one finds them.
    look_up(&service, of_rank("b", 0, 2));
    assert_eq!(due(&service, Duration::ZERO), stored("b"));
    assert_idle(&service);
    let counts = service.0.context.counters().snapshot();
    assert_eq!((counts.notices_stored, counts.notices_failed), (2, 0));
}

#[test]
fn a_request_that_ends_without_its_chunks_has_failed() {
    let (service, memory) = (notified(), Memory::new());
    register(&service, &memory, 2);
    look_up(&service, of_rank("a", 0, 2));
    store_rank(&service, "a", 0, 2);
    let before = Instant::now();
    end(&service, "a");
    // Workers do not end with it.
    let (notices, again) = service.take_notices(before);
    assert_eq!(notices, []);
    assert!(again.is_some_and(|again| again <= Instant::now() + LATE_STORES));
    assert_eq!(due(&service, LATE_STORES), failed("a"));
    // Its scheduler goes.
    look_up(&service, of_rank("b", 0, 2));
    service.client_gone(client(9), Instant::now());
    assert_eq!(due(&service, LATE_STORES), failed("b"));
    assert_eq!(service.0.context.counters().snapshot().notices_failed, 2);
}

/// With lmc's own connector a preemption ends the session of a request and begins another.
#[test]
fn a_request_that_looks_up_again_is_the_same_one() {
    let (service, memory) = (notified(), Memory::new());
    memory.register(&service);
    look_up(&service, key("a", 2));
    look_up(&service, key("a", 5));
    store_rank(&service, "a", 0, 1);
    assert_eq!(due(&service, Duration::ZERO), stored("a"));
    look_up(&service, key("a", 3));
    end(&service, "a");
    assert_eq!(due(&service, LATE_STORES), []);
    service.engine().clear_dram(InUse::Remove);
    for _ in 0..2 {
        look_up(&service, key("b", 2));
        end(&service, "b");
    }
    look_up(&service, key("b", 2));
    assert_eq!(due(&service, LATE_STORES), []);
    store_rank(&service, "b", 0, 1);
    end(&service, "b");
    assert_eq!(due(&service, LATE_STORES), stored("b"));
    assert_idle(&service);
}

#[test]
fn a_clear_is_the_end_of_what_was_computed_before() {
    let (service, memory) = (notified(), Memory::new());
    memory.register(&service);
    look_up(&service, key("a", 2));
    clear(&service);
    assert_eq!(due(&service, Duration::ZERO), failed("a"));
    end(&service, "a");
    assert_eq!(due(&service, LATE_STORES), []);
}

#[test]
fn a_prompt_without_chunks_is_stored_and_one_of_an_unknown_model_fails() {
    let service = notified();
    let with = |request: &str, wait: Duration| CacheKey {
        configs: RequestConfigs {
            awaited: "id".to_owned(),
            wait,
            ..RequestConfigs::default()
        },
        ..key(request, 0)
    };
    look_up(&service, with("a", Duration::ZERO));
    end(&service, "a");
    assert_eq!(due(&service, LATE_STORES), failed("a"));
    let memory = Memory::new();
    memory.register(&service);
    look_up(&service, with("b", Duration::ZERO));
    let pd_ids = |(notices, _): (Vec<Notice>, _)| -> Vec<(String, String, bool)> {
        let parts = |notice: Notice| (notice.pd_id, notice.model_name, notice.is_stored);
        notices.into_iter().map(parts).collect()
    };
    let due = || pd_ids(service.take_notices(Instant::now()));
    let notice = |pd_id: &str| (pd_id.to_owned(), MODEL.to_owned(), true);
    assert_eq!(due(), [notice("id")]);
    // The decode engine's request is not the one that is waited for.
    look_up(&service, with("c", Duration::from_secs(1)));
    assert_eq!(due(), [notice("")]);
}

/// LMCache's proxy waits without end for a notice of each.
#[test]
fn a_lookup_that_is_refused_has_failed_and_that_of_a_tail_has_no_notice() {
    let service = service(|config| (config.notices, config.max_sessions) = (true, 4));
    let memory = Memory::new();
    memory.register(&service);
    for request in ["a", "b", "c"] {
        look_up(&service, key(request, 2));
    }
    // One connection has three quarters.
    look_up(&service, key("d", 2));
    assert_eq!(due(&service, Duration::ZERO), failed("d"));
    let refused = CacheKey {
        num_kv_readers: 0,
        ..key("e", 2)
    };
    look_up(&service, refused);
    assert_eq!(due(&service, Duration::ZERO), failed("e"));
    end(&service, "a");
    look_up(&service, key("a\u{1f}tail", 2));
    assert_eq!(due(&service, LATE_STORES), failed("a"));
    // The server stops.
    let last = service.take_last_notices().into_iter();
    let mut last: Vec<String> = last.map(|notice| notice.request_id).collect();
    last.sort();
    assert_eq!(last, ["b", "c"]);
    assert_idle(&service);
}

/// The copies of a long prompt may take longer than its last step.
#[test]
fn a_store_that_has_begun_is_waited_for() {
    let service = notified();
    register_engine_driven(&service);
    look_up(&service, key("a", 2));
    prepare_store(&service, "a");
    end(&service, "a");
    assert_eq!(due(&service, LATE_STORES), []);
    commit_store(&service, "a");
    assert_eq!(due(&service, LATE_STORES), stored("a"));
    // Not for ever.
    service.engine().clear_dram(InUse::Remove);
    look_up(&service, key("b", 2));
    prepare_store(&service, "b");
    end(&service, "b");
    assert_eq!(due(&service, LATE_STORES), []);
    assert_eq!(due(&service, Duration::from_secs(60)), failed("b"));
}

/// A client could take all memory, or all notices.
#[test]
fn what_is_watched_is_bounded_for_each_connection_and_for_all() {
    let (service, memory) = (notified(), Memory::new());
    register(&service, &memory, 2);
    let notices = service
        .0
        .context
        .notices
        .as_ref()
        .expect("it makes notices");
    let candidates =
        service
            .0
            .registry
            .candidates(client(9), &of_rank("a", 0, 2), &Salt::default());
    let rank = |kv_rank| lmc_engine::Rank {
        space: candidates[0].space,
        kv_rank,
        chunk_bytes: None,
    };
    let begin = |from: u64, request: &str, chunks: usize| {
        let hash = |number: usize| {
            let mut hash = [from as u8; 32];
            hash[..8].copy_from_slice(&number.to_le_bytes());
            lmc_key::ChunkHash::new(hash)
        };
        let hashes = (0..chunks).map(hash).collect();
        let clears = service.engine().clears_id();
        let ranks = vec![rank(0), rank(1)];
        let key = of_rank(request, 0, 2);
        notices.begin(client(from), &key, None, clears, hashes, ranks)
    };
    let quarter = MAX_KEYS / 4;
    let first = begin(1, "a", quarter);
    assert!(first.is_some() && begin(1, "b", quarter).is_none());
    let second = begin(2, "c", quarter);
    assert!(second.is_some() && begin(3, "d", 1).is_none());
    assert_eq!(
        due(&service, Duration::ZERO),
        [failed("b"), failed("d")].concat()
    );
    drop((first, second));
    assert_eq!(
        due(&service, LATE_STORES),
        [failed("a"), failed("c")].concat()
    );
    assert_idle(&service);
}

#[test]
fn arrivals_that_are_not_kept_are_found_all_the_same() {
    let (service, memory) = (notified(), Memory::new());
    memory.register(&service);
    look_up(&service, key("a", 2));
    assert_eq!(due(&service, Duration::ZERO), []);
    let notices = service
        .0
        .context
        .notices
        .as_ref()
        .expect("it makes notices");
    let other = lmc_key::ChunkKey {
        space: SpaceId::new([1; 16]),
        kv_rank: 0,
        group: 0,
        hash: lmc_key::ChunkHash::new([1; 32]),
    };
    let event = lmc_engine::ChunkEvent {
        tier: lmc_engine::DRAM,
        key: &other,
        parent: None,
        space: Some(other.space),
        change: lmc_engine::Change::Stored,
    };
    for _ in 0..MAX_ARRIVALS {
        lmc_engine::EventSink::changed(&**notices, &event);
    }
    store_rank(&service, "a", 0, 1);
    assert_eq!(due(&service, Duration::ZERO), stored("a"));
}

/// A store that waits for a thread has no slots yet.
#[test]
fn a_store_that_waits_for_its_turn_is_waited_for() {
    let (service, memory) = (notified(), Memory::new());
    memory.register(&service);
    look_up(&service, key("a", 2));
    let queued = job(&service, store(1), Instant::now());
    end(&service, "a");
    assert_eq!(due(&service, LATE_STORES), []);
    queued.run();
    assert_eq!(due(&service, LATE_STORES), stored("a"));
    look_up(&service, key("b", 3));
    let queued = job(&service, store(1), Instant::now());
    end(&service, "b");
    drop(queued);
    assert_eq!(due(&service, LATE_STORES), failed("b"));
}

/// The old arrival was once taken for one of the new request.
#[test]
fn chunks_that_came_and_went_before_a_request_began_are_not_its_own() {
    let (service, memory) = (notified(), Memory::new());
    memory.register(&service);
    look_up(&service, key("other", 5));
    assert_eq!(due(&service, Duration::ZERO), []);
    store_rank(&service, "a", 0, 1);
    service.engine().clear_dram(InUse::Remove);
    look_up(&service, key("a", 2));
    assert_eq!(due(&service, Duration::ZERO), []);
    end(&service, "a");
    assert_eq!(due(&service, LATE_STORES), failed("a"));
}
