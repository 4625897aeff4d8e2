//! Workers that copy by themselves, over real connections and a real shared pool.

use crate::common::{
    Answer as _, CHUNK, CHUNK_BYTES, MODEL, Server, Worker, end_session, lookup, prompt,
};
use lmc_engine::InUse;
use lmc_vllm_adapter::{
    CacheKey, Client, ConfigValue, EngineDrivenContext, KvEventKind, Operation, Reply, Request,
    UnknownFields,
};

#[test]
fn a_prompt_that_was_stored_is_found_and_read_back_byte_for_byte() {
    let server = Server::start();
    let mut worker = Worker::register(&server, 1);
    let tokens = prompt(1, 5 * CHUNK + 3);
    let key = worker.key("a", &tokens, 0..5);
    let mut scheduler = server.client();
    assert_eq!(lookup(&mut scheduler, &key), 0);
    assert_eq!(worker.store(&key), 5);
    end_session(&mut scheduler, "a");
    let key = CacheKey {
        request_id: "b".to_owned(),
        ..key
    };
    assert_eq!(lookup(&mut scheduler, &key), 5);
    assert!(worker.retrieve(&key));
    assert_eq!(worker.store(&key), 0, "nothing is stored twice");
    end_session(&mut scheduler, "b");
    server.assert_idle();
    let counts = server.status().counts;
    assert_eq!((counts.stored_chunks, counts.retrieved_chunks), (5, 5));
    assert_eq!(counts.stored_bytes, 5 * CHUNK_BYTES as u64);
    assert_eq!(counts.hit_tokens, 5 * CHUNK as u64);
}

#[test]
fn a_store_that_was_acknowledged_is_found_by_the_very_next_lookup() {
    let server = Server::start();
    let mut worker = Worker::register(&server, 1);
    let mut scheduler = server.client();
    for round in 0..50 {
        let tokens = prompt(round + 100, 2 * CHUNK);
        let key = worker.key(&format!("r{round}"), &tokens, 0..2);
        worker.store(&key);
        assert_eq!(lookup(&mut scheduler, &key), 2, "round {round}");
        end_session(&mut scheduler, &format!("r{round}"));
    }
}

#[test]
fn a_shared_prefix_is_a_partial_hit_and_only_the_rest_is_stored() {
    let server = Server::start();
    let mut worker = Worker::register(&server, 1);
    let mut scheduler = server.client();
    let first = prompt(3, 6 * CHUNK);
    let mut second = first[..4 * CHUNK].to_vec();
    second.extend(prompt(9, 2 * CHUNK));
    worker.store(&worker.key("a", &first, 0..6));
    let key = worker.key("b", &second, 0..6);
    assert_eq!(lookup(&mut scheduler, &key), 4);
    assert!(worker.retrieve(&worker.key("b", &second, 0..4)));
    assert!(
        !worker.retrieve(&worker.key("b", &second, 0..6)),
        "a part is no hit for the whole"
    );
    let (slots, indices) = worker.prepare_store(&key);
    assert_eq!(indices, [4, 5]);
    worker.fill(&key, &slots, &indices);
    assert!(worker.commit_store(&key));
    assert!(worker.retrieve(&worker.key("b", &second, 0..6)));
    end_session(&mut scheduler, "b");
    server.assert_idle();
}

#[test]
fn tenants_never_see_each_other() {
    let server = Server::start();
    let mut worker = Worker::register(&server, 1);
    let mut scheduler = server.client();
    let tokens = prompt(4, 3 * CHUNK);
    let with_salt = |worker: &Worker, request: &str, salt: &str| CacheKey {
        cache_salt: salt.to_owned(),
        ..worker.key(request, &tokens, 0..3)
    };
    worker.store(&with_salt(&worker, "a", "alice"));
    assert_eq!(lookup(&mut scheduler, &with_salt(&worker, "b", "bob")), 0);
    assert_eq!(lookup(&mut scheduler, &with_salt(&worker, "c", "")), 0);
    assert!(!worker.retrieve(&with_salt(&worker, "b", "bob")));
    assert_eq!(worker.store(&with_salt(&worker, "b", "bob")), 3);
    assert!(worker.retrieve(&with_salt(&worker, "b", "bob")));
    assert_eq!(lookup(&mut scheduler, &with_salt(&worker, "d", "alice")), 3);
    assert!(worker.retrieve(&with_salt(&worker, "d", "alice")));
}

#[test]
fn two_dtypes_under_one_model_name_never_share_bytes() {
    let server = Server::start();
    let mut single = Worker::register_rank(&server, 1, 0, 1, "float32");
    let tokens = prompt(5, 3 * CHUNK);
    single.store(&single.key("a", &tokens, 0..3));
    let mut half = Worker::register_rank(&server, 2, 0, 1, "bfloat16");
    assert!(
        !half.retrieve(&half.key("b", &tokens, 0..3)),
        "float32 bytes for a bfloat16 engine"
    );
    // The scheduler's engine is not known yet, so only chunks that both engines have count.
    let mut scheduler = server.client();
    assert_eq!(lookup(&mut scheduler, &half.key("b", &tokens, 0..3)), 0);
    assert_eq!(half.store(&half.key("b", &tokens, 0..3)), 3);
    // The store of request b reveals the scheduler's engine.
    let more = prompt(6, 2 * CHUNK);
    half.store(&half.key("c", &more, 0..2));
    assert_eq!(lookup(&mut scheduler, &half.key("d", &more, 0..2)), 2);
    assert!(half.retrieve(&half.key("d", &tokens, 0..3)));
    assert!(single.retrieve(&single.key("e", &tokens, 0..3)));
}

#[test]
fn the_layout_of_an_engine_that_died_does_not_reduce_the_hits_of_others() {
    let server = Server::start();
    let mut single = Worker::register_rank(&server, 1, 0, 1, "float32");
    let tokens = prompt(5, 3 * CHUNK);
    let key = single.key("a", &tokens, 0..3);
    single.store(&key);
    let half = Worker::register_rank(&server, 2, 0, 1, "bfloat16");
    let mut scheduler = server.client();
    assert_eq!(
        lookup(&mut scheduler, &key),
        0,
        "workers of two layouts are connected"
    );
    end_session(&mut scheduler, "a");
    // Dropping the worker closes its socket, as the kernel does for a dead process.
    drop(half);
    server.eventually("the death is noticed", |status| {
        status.instances.iter().any(|worker| !worker.connected)
    });
    // A scheduler whose engine is not known yet, as after a start of the engine.
    let mut scheduler = server.client();
    assert_eq!(lookup(&mut scheduler, &single.key("b", &tokens, 0..3)), 3);
    assert!(single.retrieve(&single.key("b", &tokens, 0..3)));
    end_session(&mut scheduler, "b");
    // With no worker connected, either may reconnect, so both layouts count again.
    drop(single);
    server.eventually("the end of the other worker is noticed", |status| {
        status.instances.iter().all(|worker| !worker.connected)
    });
    let mut scheduler = server.client();
    let key = CacheKey {
        request_id: "c".to_owned(),
        ..key
    };
    assert_eq!(lookup(&mut scheduler, &key), 0);
}

#[test]
fn a_chunk_is_a_hit_only_when_every_rank_has_it() {
    let server = Server::start();
    let mut ranks: Vec<_> = (0..2)
        .map(|r| Worker::register_rank(&server, 10 + u64::from(r), r, 2, "float32"))
        .collect();
    let mut scheduler = server.client();
    let tokens = prompt(7, 4 * CHUNK);
    let key = ranks[0].key("a", &tokens, 0..4);
    ranks[0].store(&key);
    assert_eq!(lookup(&mut scheduler, &key), 0);
    let of_other = ranks[1].key("a", &tokens, 0..3);
    ranks[1].store(&of_other);
    assert_eq!(
        lookup(
            &mut scheduler,
            &CacheKey {
                request_id: "b".to_owned(),
                ..key
            }
        ),
        3
    );
    for worker in &mut ranks {
        let key = worker.key("b", &tokens, 0..3);
        assert!(worker.retrieve(&key));
    }
    // Each rank has retrieved its chunks, so the lookup has no lease left.
    assert_eq!(server.status().usage.leases, 0);
}

#[test]
fn mla_readers_share_one_copy_and_each_releases_its_leases() {
    let server = Server::start();
    let mut workers: Vec<_> = (1..=3).map(|id| Worker::register(&server, id)).collect();
    let tokens = prompt(8, 2 * CHUNK);
    let key = CacheKey {
        num_kv_readers: 3,
        ..workers[0].key("a", &tokens, 0..2)
    };
    workers[0].store(&key);
    let mut scheduler = server.client();
    assert_eq!(lookup(&mut scheduler, &key), 2);
    for (index, worker) in workers.iter_mut().enumerate() {
        assert_eq!(server.status().usage.leases, 2, "before reader {index}");
        assert!(worker.retrieve(&key));
    }
    assert_eq!(server.status().usage.leases, 0);
}

#[test]
fn lookup_leases_are_released_in_parts() {
    let server = Server::start();
    let mut worker = Worker::register(&server, 1);
    let tokens = prompt(9, 6 * CHUNK);
    let key = worker.key("a", &tokens, 0..6);
    worker.store(&key);
    let mut scheduler = server.client();
    assert_eq!(lookup(&mut scheduler, &key), 6);
    assert_eq!(server.status().usage.leases, 6);
    let range = CacheKey {
        worker_id: None,
        start: 0,
        end: 2 * CHUNK as u64,
        ..key.clone()
    };
    scheduler.answer(&Request::FreeLookupLocks(range.clone()));
    assert_eq!(server.status().usage.leases, 4);
    scheduler.answer(&Request::FreeLookupLocks(range));
    assert_eq!(server.status().usage.leases, 4, "freeing twice frees once");
    assert!(worker.retrieve(&worker.key("a", &tokens, 2..6)));
    assert_eq!(server.status().usage.leases, 0);
    end_session(&mut scheduler, "a");
    server.assert_idle();
}

#[test]
fn commits_without_prepare_and_double_commits_return_false() {
    let server = Server::start();
    let mut worker = Worker::register(&server, 1);
    let key = worker.key("a", &prompt(1, 2 * CHUNK), 0..2);
    assert!(!worker.commit_store(&key));
    assert_eq!(worker.store(&key), 2);
    assert!(!worker.commit_store(&key));
    assert_eq!(server.status().counts.commits_unknown, 2);
    server.assert_idle();
}

#[test]
fn preparing_a_store_twice_returns_the_same_slots() {
    let server = Server::start();
    let mut worker = Worker::register(&server, 1);
    let key = worker.key("a", &prompt(1, 2 * CHUNK), 0..2);
    let first = worker.prepare_store(&key);
    assert_eq!(worker.prepare_store(&key), first);
    assert_eq!(server.status().usage.reserved_slots, 2);
    worker.fill(&key, &first.0, &first.1);
    assert!(worker.commit_store(&key));
    assert!(worker.retrieve(&key));
}

/// Found by the fuzz target `service`: prepared transfers were identified by request id and range
/// only. An engine that used a request id again (its user chose the id, and the first request was
/// aborted between prepare and commit) got the slots of the first prompt, filled them with the
/// second prompt's bytes, and the commit made them findable as the first prompt's chunks.
#[test]
fn a_reused_request_id_gets_its_own_slots() {
    let server = Server::start();
    let mut worker = Worker::register(&server, 1);
    let first = worker.key("a", &prompt(1, 2 * CHUNK), 0..2);
    let second = worker.key("a", &prompt(2, 2 * CHUNK), 0..2);
    let (slots, _) = worker.prepare_store(&first);
    let (others, indices) = worker.prepare_store(&second);
    assert!(others.iter().all(|slot| !slots.contains(slot)));
    worker.fill(&second, &others, &indices);
    assert!(worker.commit_store(&second));
    assert!(worker.retrieve(&second), "byte for byte");
    let mut scheduler = server.client();
    assert_eq!(
        lookup(&mut scheduler, &worker.key("b", &first.token_ids, 0..2)),
        0
    );
    end_session(&mut scheduler, "b");
    assert_eq!(
        server.status().usage.reserved_slots,
        2,
        "still held for the first"
    );
    drop(worker);
    server.assert_idle();
}

#[test]
fn a_chunk_that_another_worker_is_writing_is_not_reserved_twice() {
    let server = Server::start();
    let (mut one, mut two) = (Worker::register(&server, 1), Worker::register(&server, 2));
    let tokens = prompt(1, 3 * CHUNK);
    let (slots, indices) = one.prepare_store(&one.key("a", &tokens, 0..2));
    let (_, others) = two.prepare_store(&two.key("b", &tokens, 0..3));
    assert_eq!(others, [2]);
    let mut scheduler = server.client();
    assert_eq!(
        lookup(&mut scheduler, &one.key("c", &tokens, 0..3)),
        0,
        "the chunks are not committed"
    );
    one.fill(&one.key("a", &tokens, 0..2), &slots, &indices);
    assert!(one.commit_store(&one.key("a", &tokens, 0..2)));
    assert_eq!(lookup(&mut scheduler, &one.key("d", &tokens, 0..3)), 2);
}

#[test]
fn the_lookups_of_a_scheduler_that_dies_are_released() {
    let server = Server::start();
    let mut worker = Worker::register(&server, 1);
    let key = worker.key("a", &prompt(1, 4 * CHUNK), 0..4);
    worker.store(&key);
    let mut scheduler = server.client();
    assert_eq!(lookup(&mut scheduler, &key), 4);
    drop(scheduler);
    server.assert_idle();
}

#[test]
fn a_full_pool_evicts_idle_chunks_and_otherwise_refuses_at_once() {
    let server = Server::with(16 * 4096, |_| {}, |_| {});
    let mut worker = Worker::register(&server, 1);
    let mut scheduler = server.client();
    for round in 0..20 {
        let tokens = prompt(round + 1, 8 * CHUNK);
        let key = worker.key(&format!("r{round}"), &tokens, 0..8);
        assert_eq!(worker.store(&key), 8, "round {round}");
        assert!(worker.retrieve(&key));
    }
    // The last prompts are cached; after leasing them all, no slot can be evicted.
    let mut held = 0;
    for round in (0..20).rev() {
        let tokens = prompt(round + 1, 8 * CHUNK);
        held += lookup(
            &mut scheduler,
            &worker.key(&format!("h{round}"), &tokens, 0..8),
        );
    }
    assert!(held >= 8, "{held}");
    let tokens = prompt(99, 16 * CHUNK);
    let (slots, _) = worker.prepare_store(&worker.key("x", &tokens, 0..16));
    assert!(
        (slots.len() as u64) <= 16 - held,
        "{} slots although {held} are leased",
        slots.len()
    );
    assert!(server.status().counts.chunks_no_room > 0);
    for round in 0..20 {
        end_session(&mut scheduler, &format!("h{round}"));
    }
    worker
        .client
        .ask(&Request::Unregister {
            instance_id: 1,
            engine_driven: true,
        })
        .expect("ok");
    // Slots of a prepared store stay reserved until it commits or the worker has ended.
    drop(worker);
    server.assert_idle();
}

#[test]
fn a_pickled_payload_is_refused_and_never_loaded() {
    let server = Server::start();
    let mut worker = Worker::register(&server, 1);
    let key = worker.key("a", &prompt(1, 2 * CHUNK), 0..2);
    worker.prepare_store(&key);
    let commit = Request::CommitStore {
        key: key.clone(),
        instance_id: 1,
        pickled: 100,
    };
    assert_eq!(worker.client.answer(&commit), Reply::Bool(false));
    let mut scheduler = server.client();
    assert_eq!(lookup(&mut scheduler, &key), 0);
    assert_eq!(server.status().counts.pickles_refused, 1);
}

#[test]
fn a_worker_unknown_after_a_restart_is_asked_to_register_again() {
    let server = Server::start();
    let mut client = server.client();
    let ping = Request::Ping {
        instance_id: Some(77),
    };
    assert_eq!(client.answer(&ping), Reply::Bool(false));
    assert_eq!(client.answer(&ping), Reply::Bool(true));
    let worker = Worker::register(&server, 77);
    assert_eq!(client.answer(&ping), Reply::Bool(true));
    assert_eq!(
        client
            .ask(&Request::Ping { instance_id: None })
            .expect("ok"),
        Reply::Bool(true)
    );
    drop(worker);
}

#[test]
fn requests_of_workers_that_never_registered_are_answered() {
    let server = Server::start();
    let registered = Worker::register(&server, 1);
    let key = registered.key("a", &prompt(1, 2 * CHUNK), 0..2);
    let mut client = server.client();
    let instance_id = 999;
    let mut check = |request: Request, expected: Reply| {
        assert_eq!(client.answer(&request), expected, "{request:?}");
    };
    let no_slots = Reply::StoreSlots {
        slots: Vec::new(),
        chunk_indices: Vec::new(),
    };
    check(
        Request::PrepareStore {
            key: key.clone(),
            instance_id,
        },
        no_slots,
    );
    check(
        Request::PrepareRetrieve {
            key: key.clone(),
            instance_id,
        },
        Reply::RetrieveSlots(None),
    );
    let commit = Request::CommitStore {
        key: key.clone(),
        instance_id,
        pickled: 0,
    };
    check(commit, Reply::Bool(false));
    let store = Request::Store {
        key: key.clone(),
        instance_id,
        block_ids: vec![vec![1]],
        event: Vec::new(),
    };
    check(store, Reply::Transferred(false));
    let retrieve = Request::Retrieve {
        key,
        instance_id,
        block_ids: vec![vec![1]],
        event: Vec::new(),
        skip_first_n_tokens: 0,
    };
    check(retrieve, Reply::Transferred(false));
    check(
        Request::Unregister {
            instance_id,
            engine_driven: true,
        },
        Reply::None,
    );
    server.assert_idle();
}

#[test]
fn events_report_stored_and_removed_chunks() {
    let server = Server::with(8 * 4096, |_| {}, |_| {});
    let mut worker = Worker::register(&server, 1);
    let tokens = prompt(1, 2 * CHUNK);
    worker.store(&worker.key("a", &tokens, 0..2));
    let mut reader = server.client();
    let subscribe = Request::SubscribeKvEvents {
        instance_id: 1,
        model_name: MODEL.to_owned(),
        cursor: 0,
        max_events: 100,
    };
    let uid = reader.send(&subscribe).expect("sent");
    let batch = |reader: &mut Client| match reader
        .receive(uid, Operation::SubscribeKvEvents)
        .expect("a batch")
    {
        Reply::Events(batch) => batch,
        other => panic!("unexpected {other:?}"),
    };
    let first = batch(&mut reader);
    assert!(first.enabled && !first.lost);
    assert_eq!(first.events.len(), 2);
    assert_eq!(first.events[0].tokens, tokens[..CHUNK]);
    assert_eq!(first.events[1].parent.as_ref(), Some(&first.events[0].hash));
    // Nothing comes before the reader asks for more.
    for round in 2..8 {
        worker.store(&worker.key(&format!("r{round}"), &prompt(round, 4 * CHUNK), 0..4));
    }
    reader
        .send_frames(&[vec![uid as u8].into(), "".into(), "ack".into()])
        .expect("sent");
    let second = batch(&mut reader);
    assert!(second.events.len() > 4);
    let removed = second
        .events
        .iter()
        .find(|event| event.kind == KvEventKind::Removed);
    let removed = removed.expect("eight slots cannot hold 26 chunks");
    assert!(first.events.iter().any(|event| event.hash == removed.hash));
}

/// Users choose request ids over HTTP, and vLLM's scheduler fails if one is refused.
#[test]
fn request_ids_of_any_length_are_served_and_distinguished() {
    let server = Server::start();
    let mut worker = Worker::register(&server, 1);
    let mut scheduler = server.client();
    let tokens = prompt(77, 2 * CHUNK);
    let ids = ["a", "b"].map(|end| "x".repeat(60_000) + end);
    assert_eq!(worker.store(&worker.key(&ids[0], &tokens, 0..2)), 2);
    assert_eq!(
        lookup(&mut scheduler, &worker.key(&ids[0], &tokens, 0..2)),
        2
    );
    let other = prompt(78, 2 * CHUNK);
    assert_eq!(
        lookup(&mut scheduler, &worker.key(&ids[1], &other, 0..2)),
        0
    );
    let status = Request::QueryPrefetchStatus {
        request_id: ids[0].clone(),
    };
    assert_eq!(scheduler.answer(&status), Reply::Int(2));
    ids.iter().for_each(|id| end_session(&mut scheduler, id));
    server.assert_idle();
}

/// vLLM's worker unregisters first and ends its copies afterwards.
#[test]
fn a_worker_that_unregistered_keeps_its_slots_until_it_commits_or_disconnects() {
    let server = Server::start();
    let mut worker = Worker::register(&server, 1);
    let mut other = Worker::register(&server, 2);
    let tokens = prompt(79, 2 * CHUNK);
    let key = worker.key("a", &tokens, 0..2);
    let (slots, indices) = worker.prepare_store(&key);
    let unregister = Request::Unregister {
        instance_id: 1,
        engine_driven: true,
    };
    let reply = worker.client.ask(&unregister);
    assert_eq!(reply.expect("an answer"), Reply::None);
    assert_eq!(
        server.status().usage.reserved_slots,
        2,
        "it may still write"
    );
    let elsewhere = other.key("b", &prompt(80, 2 * CHUNK), 0..2);
    assert_eq!(other.store(&elsewhere), 2);
    worker.fill(&key, &slots, &indices);
    assert!(other.retrieve(&elsewhere), "its bytes are unchanged");
    assert!(worker.commit_store(&key));
    let again = worker.key("c", &prompt(81, CHUNK), 0..1);
    assert!(
        worker.prepare_store(&again).0.is_empty(),
        "it is not registered"
    );
    drop(worker);
    server.assert_idle();
}

fn register(server: &Server, context: EngineDrivenContext) -> Client {
    let mut client = server.client();
    let reply = client.ask(&Request::RegisterEngineDriven(context));
    assert!(matches!(reply, Ok(Reply::Registered { .. })), "{reply:?}");
    client
}

#[test]
fn stages_of_a_pipeline_may_have_different_numbers_of_layers() {
    let server = Server::start();
    let mut workers: Vec<(Client, CacheKey, u64)> = (0..2)
        .map(|rank| {
            let context = EngineDrivenContext {
                instance_id: 10 + rank,
                model_name: MODEL.to_owned(),
                world_size: 2,
                block_size: 4,
                num_layers: 2 + rank as u32,
                hidden_dim_size: 8,
                dtype: "float32".to_owned(),
                use_mla: false,
                num_physical_slots: Some(CHUNK as u32),
                record: None,
                unknown: UnknownFields::default(),
            };
            let key = CacheKey {
                model_name: MODEL.to_owned(),
                world_size: 2,
                worker_id: Some(rank as u32),
                token_ids: prompt(8, 3 * CHUNK),
                end: 3 * CHUNK as u64,
                request_id: "a".to_owned(),
                num_kv_readers: 1,
                ..CacheKey::default()
            };
            (register(&server, context), key, 10 + rank)
        })
        .collect();
    let mut scheduler = server.client();
    let whole = workers[0].1.clone();
    assert_eq!(lookup(&mut scheduler, &whole), 0);
    for (number, (client, key, instance_id)) in workers.iter_mut().enumerate() {
        let (key, instance_id) = (key.clone(), *instance_id);
        let prepare = Request::PrepareStore {
            key: key.clone(),
            instance_id,
        };
        let reply = client.answer(&prepare);
        assert!(matches!(reply, Reply::StoreSlots { slots, .. } if slots.len() == 3));
        let commit = Request::CommitStore {
            key,
            instance_id,
            pickled: 0,
        };
        assert_eq!(client.answer(&commit), Reply::Bool(true));
        let both = number == 1;
        assert_eq!(lookup(&mut scheduler, &whole), if both { 3 } else { 0 });
    }
    end_session(&mut scheduler, "a");
    server.assert_idle();
}

#[test]
fn a_worker_is_served_on_one_connection_at_a_time() {
    let server = Server::start();
    let mut worker = Worker::register(&server, 1);
    let tokens = prompt(12, 2 * CHUNK);
    let key = worker.key("a", &tokens, 0..2);
    assert_eq!(worker.store(&key), 2);
    let old = std::mem::replace(&mut worker.client, server.client());
    assert_eq!(worker.prepare_retrieve(&key), None);
    drop(old);
    server.eventually("the old connection is over", |status| {
        status.transport.connections_open == 1
    });
    assert!(worker.retrieve(&key));
    server.assert_idle();
}

#[test]
fn concurrent_prepares_of_one_store_reserve_once() {
    let server = Server::start();
    let mut worker = Worker::register(&server, 1);
    let mut again = server.client();
    for round in 0..500 {
        let key = worker.key("a", &prompt(round, 8 * CHUNK), 0..8);
        let ask = |client: &mut Client| {
            let key = key.clone();
            let request = Request::PrepareStore {
                key,
                instance_id: 1,
            };
            match client.answer(&request) {
                Reply::StoreSlots { slots, .. } => slots,
                other => panic!("unexpected {other:?}"),
            }
        };
        let (first, second) = std::thread::scope(|scope| {
            let second = scope.spawn(|| ask(&mut again));
            (ask(&mut worker.client), second.join().expect("an answer"))
        });
        // Both replies contain the same slots, and exactly these are reserved.
        let given: std::collections::BTreeSet<u64> = first
            .iter()
            .chain(&second)
            .map(|slot| slot.offset)
            .collect();
        let held = server.status().usage.reserved_slots as usize;
        assert_eq!(given.len(), held, "round {round}");
        worker.commit_store(&key);
        assert!(held > 0);
        server.service.engine().clear_dram(InUse::Remove);
    }
    server.assert_idle();
}

#[test]
fn a_store_prepared_before_a_clear_is_not_found_after_it() {
    let server = Server::start();
    let mut worker = Worker::register(&server, 1);
    let mut scheduler = server.client();
    let key = worker.key("a", &prompt(13, 2 * CHUNK), 0..2);
    let (slots, indices) = worker.prepare_store(&key);
    let cleared = scheduler.ask(&Request::Clear { force: false });
    assert_eq!(cleared.expect("an answer"), Reply::None);
    worker.fill(&key, &slots, &indices);
    worker.commit_store(&key);
    assert_eq!(lookup(&mut scheduler, &key), 0);
    assert_eq!(worker.store(&key), 2);
    assert_eq!(lookup(&mut scheduler, &key), 2);
    end_session(&mut scheduler, "a");
    server.assert_idle();
}

/// vLLM looks up prompts of requests for `prompt_logprobs` and retrieves none of what is found.
#[test]
fn what_engines_retrieve_is_counted_apart_from_what_lookups_find() {
    let server = Server::start();
    let rank = |id, rank| Worker::register_rank(&server, id, rank, 2, "float32");
    let mut workers = [rank(1, 0), rank(2, 1)];
    let tokens = prompt(1, 3 * CHUNK);
    for worker in &mut workers {
        let key = worker.key("a", &tokens, 0..3);
        assert_eq!(worker.store(&key), 3);
    }
    let mut scheduler = server.client();
    let key = workers[0].key("b", &tokens, 0..3);
    assert_eq!(lookup(&mut scheduler, &key), 3);
    let counted = |found: usize, retrieved: usize| {
        let counts = server.status().counts;
        assert_eq!(counts.hit_tokens, (found * CHUNK) as u64);
        assert_eq!(counts.retrieved_tokens, (retrieved * CHUNK) as u64);
    };
    counted(3, 0);
    // Both ranks retrieve each token, in two pieces.
    for (chunks, retrieved) in [(0..2, 2), (2..3, 3)] {
        for worker in &mut workers {
            let key = worker.key("b", &tokens, chunks.clone());
            assert!(worker.retrieve(&key));
            counted(3, retrieved);
        }
    }
    end_session(&mut scheduler, "b");
    assert_eq!(lookup(&mut scheduler, &key), 3);
    let key = workers[1].key("b", &tokens, 0..3);
    assert!(workers[1].retrieve(&key));
    counted(6, 6);
    end_session(&mut scheduler, "b");
}

/// LMCache's older modes keep chunks of other tags apart, and so does its name of a chunk. One name
/// stands for all requests here: a commit under one tag once made chunks of another findable that
/// their worker had not written yet.
#[test]
fn requests_of_other_tags_share_nothing_and_other_settings_do_not_count() {
    let server = Server::start();
    let mut worker = Worker::register(&server, 1);
    let plain = worker.key("a", &prompt(1, 2 * CHUNK), 0..2);
    let with = |name: &str, value: &str| {
        let mut key = plain.clone();
        key.configs.set(name, ConfigValue::Text(value.to_owned()));
        key
    };
    assert_eq!(worker.store(&plain), 2);
    assert!(worker.retrieve(&with("lmcache.pd.peer", "b")), "no tag");
    let long = "a".repeat(5000);
    let tagged = [
        with("lmcache.tag.user", "a"),
        with("lmcache.tag.user", "b"),
        with("lmcache.tag.use", "ra"),
        with("lmcache.tag.user", &long),
        with("lmcache.tag.user", &(long.clone() + "a")),
        with(&format!("lmcache.tag.{long}"), "a"),
    ];
    let mut scheduler = server.client();
    let mut found = |key: &CacheKey| {
        let found = lookup(&mut scheduler, key);
        end_session(&mut scheduler, &key.request_id);
        found
    };
    let prepared: Vec<_> = tagged.iter().map(|key| worker.prepare_store(key)).collect();
    let written = tagged.iter().zip(&prepared).rev();
    for (at, (key, (slots, indices))) in written.enumerate() {
        assert_eq!(slots.len(), 2);
        assert_eq!(found(key), 0, "{:?}", key.configs);
        worker.fill(key, slots, indices);
        assert!(worker.commit_store(key));
        assert!(worker.retrieve(key));
        let all: u64 = tagged.iter().map(&mut found).sum();
        assert_eq!(all, 2 * (at as u64 + 1), "chunks of other tags");
    }
}

#[test]
fn a_request_with_skip_save_is_not_stored() {
    let server = Server::start();
    let mut worker = Worker::register(&server, 1);
    let key = worker.key("a", &prompt(1, 2 * CHUNK), 0..2);
    let mut private = key.clone();
    private.configs.skip_save = true;
    assert_eq!(worker.prepare_store(&private).0.len(), 0);
    assert_eq!(server.status().counts.stores_skipped, 1);
    assert_eq!(worker.prepare_store(&key).0.len(), 2);
}
