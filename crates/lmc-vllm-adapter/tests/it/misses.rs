//! Reasons of what lookups miss, as the counters have them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::common::{CHUNK, CHUNK_BYTES, Server, Worker, end_session, lookup, prompt};
use lmc_backend::conformance::{Faults, Faulty, Gated};
use lmc_backend::{Backend, MemoryBackend};
use lmc_engine::{EngineConfig, InUse};
use lmc_vllm_adapter::{
    CacheKey, Client, ConfigValue, EngineDrivenContext, Reply, Request, ServiceConfig,
};

/// Chunks of each prompt.
const CHUNKS: usize = 4;

/// A server, and an engine's worker and scheduler.
struct Setting {
    server: Server,
    worker: Worker,
    scheduler: Client,
    requests: u32,
}

impl Setting {
    fn new(server: Server) -> Self {
        Self {
            worker: Worker::register(&server, 1),
            scheduler: server.client(),
            server,
            requests: 0,
        }
    }

    /// Waits until a lower tier has the chunks of one prompt, and removes them from DRAM.
    fn leave_dram(&self) {
        self.server.eventually("all copies are written", |status| {
            status.lower[0].written == CHUNKS as u64
        });
        self.server.service.engine().clear_dram(InUse::Remove);
    }

    fn with_tier(engine: EngineConfig, tier: Arc<dyn Backend>) -> Self {
        let server = Server::with_engine(engine, vec![tier], 1 << 20, |_| {}, |_| {});
        Self::new(server)
    }

    /// Returns the key of a prompt for a request of its own.
    fn key(&mut self, number: u32) -> CacheKey {
        self.requests += 1;
        let request = format!("request {}", self.requests);
        let tokens = prompt(number, CHUNKS * CHUNK);
        self.worker.key(&request, &tokens, 0..CHUNKS)
    }

    fn store(&mut self, number: u32) {
        let key = self.key(number);
        // After a clear only what was looked up is stored.
        lookup(&mut self.scheduler, &key);
        self.worker.store(&key);
        end_session(&mut self.scheduler, &key.request_id);
    }

    /// Looks a key up. Returns the chunks found, and what is missed with its reason.
    fn look_up(&mut self, key: &CacheKey) -> (u64, Vec<(String, u64)>) {
        let before = missed(&self.server);
        let hits = lookup(&mut self.scheduler, key);
        end_session(&mut self.scheduler, &key.request_id);
        let after = missed(&self.server);
        let counted = after
            .into_iter()
            .zip(before)
            .map(|((reason, tokens), (_, earlier))| (reason, (tokens - earlier) / CHUNK as u64));
        let counts = self.server.status().counts;
        let sum: u64 = missed(&self.server).iter().map(|(_, tokens)| tokens).sum();
        assert_eq!(sum, counts.lookup_tokens - counts.hit_tokens);
        (hits, counted.filter(|(_, chunks)| *chunks > 0).collect())
    }

    /// Looks a prompt up, and checks that all its chunks are missed for one reason.
    fn misses(&mut self, number: u32, reason: &str) {
        let key = self.key(number);
        self.misses_key(&key, reason);
    }

    fn misses_key(&mut self, key: &CacheKey, reason: &str) {
        let expected = vec![(reason.to_owned(), CHUNKS as u64)];
        assert_eq!(self.look_up(key), (0, expected));
    }
}

/// Returns the tokens that were missed, by reason.
fn missed(server: &Server) -> Vec<(String, u64)> {
    let counts = serde_json::to_value(server.status().counts).expect("JSON");
    let counts = counts.as_object().expect("an object");
    let of = |(name, tokens): (&String, &serde_json::Value)| {
        let reason = name.strip_prefix("missed_")?;
        Some((reason.to_owned(), tokens.as_u64()?))
    };
    counts.iter().filter_map(of).collect()
}

#[test]
fn what_was_never_stored_evicted_or_cleared_has_a_reason_each() {
    // A pool of 64 pages, of which each chunk takes one.
    let mut setting = Setting::new(Server::with(64 * 4096, |_| {}, |_| {}));
    setting.misses(1, "never_stored");
    setting.store(1);
    let key = setting.key(1);
    assert_eq!(setting.look_up(&key), (CHUNKS as u64, Vec::new()));
    (100..132).for_each(|number| setting.store(number));
    setting.misses(1, "evicted");
    setting.server.service.engine().clear_dram(InUse::Remove);
    setting.misses(131, "cleared");
    setting
        .server
        .service
        .engine()
        .clear(InUse::Keep)
        .expect("a clear");
    setting.misses(131, "cleared");
    setting.misses(1, "cleared");
    setting.misses(200, "never_stored");
}

#[test]
fn a_prompt_of_which_the_head_is_there_misses_its_rest() {
    let mut setting = Setting::new(Server::start());
    let head = setting.worker.key("head", &prompt(1, CHUNKS * CHUNK), 0..1);
    assert_eq!(setting.worker.store(&head), 1);
    let mut key = setting.key(1);
    let rest = vec![("never_stored".to_owned(), CHUNKS as u64 - 1)];
    assert_eq!(setting.look_up(&key), (1, rest.clone()));
    // A tail of three tokens is no miss of the cache.
    key.token_ids.extend([1, 2, 3]);
    assert_eq!(setting.look_up(&key), (1, rest));
    assert_eq!(setting.server.status().counts.lookup_tail_tokens, 3);
}

/// LMCache's connector sends the tokens of the whole prompt, and cuts its end down to whole chunks.
#[test]
fn a_tail_is_counted_whether_or_not_the_end_is_cut_down_to_whole_chunks() {
    let mut setting = Setting::new(Server::start());
    let mut tail_of = |change: fn(&mut CacheKey)| {
        let before = setting.server.status().counts.lookup_tail_tokens;
        let mut key = setting.key(1);
        key.token_ids.extend([1, 2, 3]);
        change(&mut key);
        setting.look_up(&key);
        setting.server.status().counts.lookup_tail_tokens - before
    };
    assert_eq!(tail_of(|_| ()), 3);
    assert_eq!(tail_of(|key| key.end += 3), 3);
    assert_eq!(tail_of(|key| key.token_ids.truncate(CHUNKS * CHUNK)), 0);
    // The rest of the prompt is not asked for.
    assert_eq!(tail_of(|key| key.end -= CHUNK as u64), 0);
}

#[test]
fn the_fields_of_a_space_that_has_the_same_tokens_are_named() {
    let mut setting = Setting::new(Server::start());
    setting.store(1);
    let differs = |setting: &Setting| setting.server.status().other_space_differs;
    assert_eq!(differs(&setting), [""; 0]);
    let mut other = Worker::register_as(
        setting.server.client(),
        EngineDrivenContext {
            model_name: "another".to_owned(),
            ..crate::common::registration(2, "float32", 1)
        },
    );
    let key = CacheKey {
        model_name: "another".to_owned(),
        ..setting.key(1)
    };
    setting.misses_key(&key, "other_space");
    assert_eq!(differs(&setting), ["model"]);
    // What was stored in both is missed for its own reason.
    assert_eq!(other.store(&key), CHUNKS);
    assert_eq!(setting.look_up(&key), (CHUNKS as u64, Vec::new()));
    setting.server.service.engine().clear_dram(InUse::Remove);
    setting.misses_key(&key, "cleared");
}

/// Other users of the host may read the counters. A reason that showed what another tenant has stored
/// would answer guesses of its prompts.
#[test]
fn no_reason_tells_what_another_tenant_has_stored() {
    let mut setting = Setting::new(Server::start());
    let _other = Worker::register_as(
        setting.server.client(),
        EngineDrivenContext {
            model_name: "another".to_owned(),
            ..crate::common::registration(2, "float32", 1)
        },
    );
    let of = |setting: &mut Setting, salt: &str, model: &str| CacheKey {
        cache_salt: salt.to_owned(),
        model_name: model.to_owned(),
        ..setting.key(1)
    };
    let model = setting.key(1).model_name;
    for victim_has_it in [false, true] {
        if victim_has_it {
            let key = of(&mut setting, "victim", &model);
            assert_eq!(setting.worker.store(&key), CHUNKS);
        }
        let key = of(&mut setting, "", &model);
        setting.misses_key(&key, "never_stored");
        let key = of(&mut setting, "attacker", &model);
        setting.misses_key(&key, "never_stored");
    }
    let key = of(&mut setting, "attacker", &model);
    assert_eq!(setting.worker.store(&key), CHUNKS);
    let key = of(&mut setting, "victim", "another");
    setting.misses_key(&key, "other_space");
    for _ in 0..2 {
        let key = of(&mut setting, "attacker", "another");
        setting.misses_key(&key, "other_space");
        assert_eq!(setting.server.status().other_space_differs, ["model"]);
        // The last space of these tokens is the victim's then.
        let key = of(&mut setting, "victim", &model);
        setting.server.service.engine().clear_dram(InUse::Remove);
        setting.worker.store(&key);
    }
}

#[test]
fn an_engine_of_another_layout_under_one_model_name_is_another_space() {
    let mut setting = Setting::new(Server::start());
    setting.store(1);
    // No scheduler is known to be of one of the two.
    let _other = Worker::register_rank(&setting.server, 2, 0, 1, "float16");
    let mut scheduler = setting.server.client();
    std::mem::swap(&mut scheduler, &mut setting.scheduler);
    setting.misses(1, "other_space");
    let differs = setting.server.status().other_space_differs;
    assert_eq!(differs, ["layout", "dtype"]);
}

/// Nothing names the format of `uint8`, so its chunks end with their engine.
#[test]
fn what_an_engine_of_an_unnamed_format_had_before_its_restart_was_removed() {
    let mut setting = Setting::new(Server::start());
    let restart = |setting: &mut Setting, instance_id| {
        let unregister = Request::Unregister {
            instance_id: setting.worker.instance_id,
            engine_driven: true,
        };
        let reply = setting.worker.client.ask(&unregister);
        assert_eq!(reply.expect("an answer"), Reply::None);
        setting
            .server
            .eventually("the memory is released", |status| status.usage.chunks == 0);
        setting.worker = Worker::register_rank(&setting.server, instance_id, 0, 1, "uint8");
        setting.scheduler = setting.server.client();
    };
    restart(&mut setting, 2);
    setting.store(1);
    restart(&mut setting, 3);
    setting.misses(1, "removed");
    assert_eq!(setting.server.status().other_space_differs, [""; 0]);
}

#[test]
fn a_model_without_a_worker_is_unregistered() {
    let mut setting = Setting::new(Server::start());
    let key = CacheKey {
        model_name: "another".to_owned(),
        ..setting.key(1)
    };
    setting.misses_key(&key, "unregistered");
}

#[test]
fn a_lookup_beyond_a_limit_says_so() {
    let limited = |service: &mut ServiceConfig| service.max_sessions = 4;
    let mut setting = Setting::new(Server::with(1 << 20, limited, |_| {}));
    setting.store(1);
    let mut others = [setting.server.client(), setting.server.client()];
    for number in 0..4 {
        let key = setting.key(1);
        lookup(&mut others[number % 2], &key);
    }
    setting.misses(1, "limit");
}

#[test]
fn leases_beyond_the_share_of_a_connection_are_a_limit() {
    let mut setting = Setting::new(Server::start());
    let chunks = setting.server.pool_bytes as usize / CHUNK_BYTES.next_multiple_of(4096);
    let prompts = (chunks / CHUNKS) as u32;
    let mut found = 0;
    for number in 0..prompts {
        let key = setting.key(number + 1);
        setting.worker.store(&key);
        found += lookup(&mut setting.scheduler, &key);
    }
    let counts = setting.server.status().counts;
    assert!(counts.missed_limit > 0, "{found} of {chunks} chunks");
    assert_eq!(
        counts.missed_limit,
        counts.lookup_tokens - counts.hit_tokens
    );
}

#[test]
fn a_drive_with_chunks_of_other_settings_is_named_for_what_is_not_known() {
    let tier = Arc::new(OtherSettings::default());
    tier.has_unreachable.store(true, Ordering::Relaxed);
    let mut setting = Setting::with_tier(EngineConfig::default(), Arc::clone(&tier) as _);
    setting.misses(1, "other_settings");
    setting.store(1);
    // What follows on chunks of these settings is new.
    let mut key = setting.key(1);
    key.token_ids.extend(prompt(9, CHUNK));
    key.end += CHUNK as u64;
    let rest = vec![("never_stored".to_owned(), 1)];
    assert_eq!(setting.look_up(&key), (CHUNKS as u64, rest));
    setting.server.service.engine().clear_dram(InUse::Remove);
    setting.misses(1, "cleared");
    // The drive's chunks of other settings were evicted, or cleared.
    tier.has_unreachable.store(false, Ordering::Relaxed);
    setting.misses(2, "never_stored");
}

/// A tier that can be read, and may have chunks of other settings.
#[derive(Debug, Default)]
struct OtherSettings {
    inner: MemoryBackend,
    has_unreachable: AtomicBool,
}

impl Backend for OtherSettings {
    lmc_backend::forward!(inner: name locate sharing load clear clears usage health close);

    fn has_unreachable(&self) -> bool {
        self.has_unreachable.load(Ordering::Relaxed)
    }
}

#[test]
fn a_tier_that_is_late_or_down_or_slower_than_computing_is_the_reason() {
    let faults = |errors, deadlines| Faults {
        errors,
        deadlines,
        ..Faults::default()
    };
    let failing = |faults| Arc::new(Faulty::new(MemoryBackend::shared(), faults, 1));
    let mut setting = Setting::with_tier(EngineConfig::default(), failing(faults(1000, 0)));
    setting.misses(1, "tier_down");
    let mut setting = Setting::with_tier(EngineConfig::default(), failing(faults(0, 1000)));
    setting.misses(1, "tier_late");
    // A tier that has the chunks, and whose loads wait longer than a lookup does.
    let tier = Arc::new(Gated::new(MemoryBackend::default()));
    let mut config = EngineConfig::default();
    config.promotion_timeout = Duration::from_millis(50);
    let mut setting = Setting::with_tier(config, Arc::clone(&tier) as _);
    setting.store(1);
    setting.leave_dram();
    tier.shut();
    setting.misses(1, "tier_late");
    tier.open();
    // A tier whose reads are estimated to take longer than nothing.
    let mut config = EngineConfig::default();
    config.recompute_time = Some(Duration::ZERO);
    let tier = Arc::new(MemoryBackend::default());
    let mut setting = Setting::with_tier(config, tier);
    setting.store(1);
    setting.leave_dram();
    setting.misses(1, "recompute");
}

#[test]
fn requests_with_other_tags_have_other_spaces() {
    let mut setting = Setting::new(Server::start());
    setting.store(1);
    let mut key = setting.key(1);
    let tag = ConfigValue::Text("a".to_owned());
    key.configs.set("lmcache.tag.user", tag);
    setting.misses_key(&key, "other_space");
    let differs = setting.server.status().other_space_differs;
    assert_eq!(differs, ["tags"]);
}
