//! What proxies are told of the chunks of a request.

use super::*;
use crate::protocol::RequestConfigs;
use crate::service::prefills::LATE_STORES;

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

/// Returns the requests that are told of this long from now, each with whether it is stored.
fn told(service: &Service, later: Duration) -> Vec<(String, bool)> {
    let (mut notices, _) = service.take_notices(Instant::now() + later);
    notices.sort_by(|one, other| one.request_id.cmp(&other.request_id));
    let told = |notice: Notice| (notice.request_id, notice.is_stored);
    notices.into_iter().map(told).collect()
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
    assert_eq!(told(&service, Duration::ZERO), []);
    store_rank(&service, "a", 0, 2);
    assert_eq!(told(&service, Duration::ZERO), []);
    store_rank(&service, "a", 1, 2);
    assert_eq!(told(&service, Duration::ZERO), stored("a"));
    // Once, however it goes on.
    end(&service, "a");
    assert_eq!(told(&service, LATE_STORES), []);
    // The next one finds them.
    look_up(&service, of_rank("b", 0, 2));
    assert_eq!(told(&service, Duration::ZERO), stored("b"));
    let counts = service.0.context.counters().snapshot();
    assert_eq!((counts.notices_stored, counts.notices_failed), (2, 0));
}

#[test]
fn a_request_that_ends_without_its_chunks_has_failed() {
    let (service, memory) = (notified(), Memory::new());
    register(&service, &memory, 2);
    look_up(&service, of_rank("a", 0, 2));
    store_rank(&service, "a", 0, 2);
    end(&service, "a");
    // Workers do not end with it.
    assert_eq!(told(&service, Duration::ZERO), []);
    let (_, again) = service.take_notices(Instant::now());
    assert!(again.is_some_and(|again| again <= Instant::now() + LATE_STORES));
    assert_eq!(told(&service, LATE_STORES), failed("a"));
    // Its scheduler goes.
    look_up(&service, of_rank("b", 0, 2));
    service.client_gone(client(9), Instant::now());
    assert_eq!(told(&service, LATE_STORES), failed("b"));
    assert_eq!(service.0.context.counters().snapshot().notices_failed, 2);
}

/// The request of a second prompt under one name is not told of twice.
#[test]
fn a_request_that_looks_up_again_is_the_same_one() {
    let (service, memory) = (notified(), Memory::new());
    memory.register(&service);
    look_up(&service, key("a", 2));
    look_up(&service, key("a", 5));
    store_rank(&service, "a", 0, 1);
    assert_eq!(told(&service, Duration::ZERO), stored("a"));
    look_up(&service, key("a", 3));
    end(&service, "a");
    assert_eq!(told(&service, LATE_STORES), []);
}

#[test]
fn a_clear_is_the_end_of_what_was_computed_before() {
    let (service, memory) = (notified(), Memory::new());
    memory.register(&service);
    look_up(&service, key("a", 2));
    clear(&service);
    assert_eq!(told(&service, Duration::ZERO), failed("a"));
    end(&service, "a");
    assert_eq!(told(&service, LATE_STORES), []);
}

#[test]
fn what_is_not_looked_up_has_failed_and_a_prompt_without_chunks_is_stored() {
    let service = service(|config| (config.notices, config.max_sessions) = (true, 4));
    let id = RequestConfigs {
        awaited: "id".to_owned(),
        ..RequestConfigs::default()
    };
    let with_id = CacheKey {
        configs: id,
        ..key("a", 0)
    };
    look_up(&service, with_id);
    let (notices, _) = service.take_notices(Instant::now());
    let [notice] = &notices[..] else {
        panic!("one notice: {notices:?}");
    };
    assert!(notice.is_stored);
    assert_eq!((&notice.pd_id[..], &notice.model_name[..]), ("id", MODEL));
    for request in ["b", "c"] {
        look_up(&service, key(request, 2));
    }
    // One connection has three quarters.
    look_up(&service, key("d", 2));
    assert_eq!(told(&service, Duration::ZERO), failed("d"));
}

/// The copies of a long prompt may take longer than its last step.
#[test]
fn a_store_that_has_begun_is_waited_for() {
    let service = notified();
    register_engine_driven(&service);
    look_up(&service, key("a", 2));
    prepare_store(&service, "a");
    end(&service, "a");
    assert_eq!(told(&service, LATE_STORES), []);
    commit_store(&service, "a");
    assert_eq!(told(&service, LATE_STORES), stored("a"));
    // Not for ever.
    service.engine().clear_dram(true);
    look_up(&service, key("b", 2));
    prepare_store(&service, "b");
    end(&service, "b");
    assert_eq!(told(&service, LATE_STORES), []);
    assert_eq!(told(&service, Duration::from_secs(60)), failed("b"));
}
