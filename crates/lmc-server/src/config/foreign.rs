//! Flags of `lmcache server` that do not exist here, and what to do instead.

/// Effect of a flag of LMCache's server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The flag changes nothing that matters here: warn, and continue.
    Ignore,
    /// Going on would do something else than was asked for: stop.
    Refuse,
}

/// One flag that LMCache has and lmc has not.
#[derive(Debug)]
pub struct Foreign {
    /// Name of the flag, without the leading dashes.
    pub name: &'static str,
    /// Values that ask for what lmc does anyway; `no` is `--no-NAME`.
    pub harmless: &'static [&'static str],
    /// Effect of any other value.
    pub verdict: Verdict,
    /// Advice to the operator, as a sentence.
    pub advice: &'static str,
}

const fn refuse(
    name: &'static str,
    harmless: &'static [&'static str],
    advice: &'static str,
) -> Foreign {
    Foreign {
        name,
        harmless,
        verdict: Verdict::Refuse,
        advice,
    }
}

const fn ignore(name: &'static str, advice: &'static str) -> Foreign {
    Foreign {
        name,
        harmless: &[],
        verdict: Verdict::Ignore,
        advice,
    }
}

const LAZY: &str = "lmc maps the whole pool at start and touches its pages in the background; use --prefault=false \
                    to leave even that to the first use.";
const PLUGINS: &str = "lmc loads no code at run time; run the plugin as a process of its own.";
const BLEND: &str = "lmc caches prefixes only; there is no CacheBlend.";
const P2P: &str = "lmc has no peer-to-peer tier yet; give each node a server of its own.";
const COORDINATOR: &str =
    "lmc joins no coordinator yet; routers can subscribe to KV events directly.";
const L2: &str =
    "name folders on drives with --disk and --disk-size; lmc takes no adapter by JSON.";
const TRACES: &str = "lmc exports no OpenTelemetry; scrape /metrics and use --log-format json.";
const HASH_LOG: &str = "lmc writes no file of hashes; subscribe to KV events instead.";

static FLAGS: &[Foreign] = &[
    ignore(
        "instance-id",
        "lmc needs no instance id; label its metrics in Prometheus.",
    ),
    refuse(
        "transport",
        &["zmq"],
        "lmc speaks ZeroMQ only; set the engine's lmcache.mp transport to zmq.",
    ),
    ignore(
        "grpc-server-workers",
        "there is no gRPC here; --max-workers sets the threads that serve requests.",
    ),
    ignore(
        "max-gpu-workers",
        "use --copy-threads for the threads that copy.",
    ),
    ignore(
        "max-cpu-workers",
        "use --max-workers for the threads that serve requests.",
    ),
    refuse("engine-type", &["default"], BLEND),
    refuse("enable-segmented-prefix", &["no"], BLEND),
    refuse("enable-dedup-content", &["no"], BLEND),
    refuse("enable-blend-reorder", &["no"], BLEND),
    refuse(
        "isolated-ipc",
        &["no"],
        "engine and server must share /dev/shm here: use the same host or pod (ipc: host in containers).",
    ),
    ignore(
        "separate-object-groups",
        "lmc keeps every object group apart by itself; the flag is not needed.",
    ),
    refuse("runtime-plugin-locations", &[], PLUGINS),
    refuse("runtime-plugin-config", &["{}"], PLUGINS),
    refuse("server-module", &[], PLUGINS),
    refuse("script-allowed-imports", &[], PLUGINS),
    refuse(
        "run-script-api-enabled",
        &["no"],
        "lmc never runs code that comes over HTTP.",
    ),
    refuse("enable", &[], "lmc has no experimental transfer modules."),
    refuse("p2p-advertise-url", &[""], P2P),
    refuse("p2p-listen-url", &[""], P2P),
    ignore("p2p-lookup-timeout", P2P),
    ignore("p2p-load-timeout", P2P),
    ignore("p2p-transfer-engine", P2P),
    refuse(
        "l1-manager",
        &[],
        "lmc has one pool, in memory; size it with --l1-size-gb.",
    ),
    ignore("l1-use-lazy", LAZY),
    ignore("l1-init-size-gb", LAZY),
    refuse(
        "l1-devdax-path",
        &[],
        "lmc keeps its pool in memory; use --l1-use-hugepages or --numa-node to bind it.",
    ),
    refuse(
        "gds-l1-path",
        &[],
        "lmc keeps its pool in memory; it has no GPUDirect Storage tier.",
    ),
    ignore("gds-l1-use-direct-io", "lmc has no GPUDirect Storage tier."),
    ignore("gds-l1-backend", "lmc has no GPUDirect Storage tier."),
    refuse("l2-adapter", &[], L2),
    ignore("l2-store-policy", L2),
    ignore("l2-prefetch-policy", L2),
    ignore("l2-prefetch-max-in-flight", L2),
    ignore(
        "periodic-notifier-interval-ms",
        "lmc wakes on events; there is no interval to set.",
    ),
    ignore(
        "disable-observability",
        "counters cost nothing measurable here; do not scrape /metrics if you do not want them.",
    ),
    ignore(
        "disable-metrics",
        "counters cost nothing measurable here; do not scrape /metrics if you do not want them.",
    ),
    ignore(
        "disable-prometheus",
        "counters cost nothing measurable here; do not scrape /metrics if you do not want them.",
    ),
    ignore("disable-grpc-metrics", "there is no gRPC here."),
    ignore("disable-logging", "use --log-level error."),
    refuse("enable-tracing", &["no"], TRACES),
    refuse("otlp-endpoint", &[], TRACES),
    ignore(
        "event-bus-queue-size",
        "lmc has no event bus; --kv-event-log-size bounds the KV event stream.",
    ),
    ignore(
        "prometheus-port",
        "metrics are served at /metrics of the HTTP port; set it with --http-port.",
    ),
    ignore(
        "metrics-sample-rate",
        "lmc counts every operation; nothing is sampled.",
    ),
    refuse("lookup-hash-log-dir", &[], HASH_LOG),
    ignore("lookup-hash-log-rotation-interval", HASH_LOG),
    ignore("lookup-hash-log-rotation-max-size", HASH_LOG),
    ignore("lookup-hash-log-max-files", HASH_LOG),
    ignore("enable-gc-monitor", "there is no garbage collector here."),
    ignore(
        "gc-monitor-min-pause-ms",
        "there is no garbage collector here.",
    ),
    ignore(
        "gc-monitor-top-objects",
        "there is no garbage collector here.",
    ),
    ignore("enable-extra-logging", "use --log-level debug."),
    ignore("extra-logging-interval", "use --log-level debug."),
    refuse("trace-level", &[], TRACES),
    refuse("trace-output", &[], TRACES),
    refuse("coordinator-url", &[""], COORDINATOR),
    ignore("coordinator-advertise-ip", COORDINATOR),
    ignore("coordinator-heartbeat-interval", COORDINATOR),
    ignore("coordinator-event-reporting", COORDINATOR),
    ignore("coordinator-event-flush-interval", COORDINATOR),
    ignore("coordinator-event-transport", COORDINATOR),
    ignore("coordinator-kafka-bootstrap-servers", COORDINATOR),
    ignore("coordinator-kafka-topic", COORDINATOR),
    ignore("coordinator-kafka-delivery-timeout", COORDINATOR),
    ignore("coordinator-blend-timeout", COORDINATOR),
    ignore("coordinator-blend-match-concurrency", COORDINATOR),
    ignore("coordinator-l2-event-reporting", COORDINATOR),
    ignore("coordinator-l2-event-flush-interval", COORDINATOR),
];

/// All flags of `lmcache server` 0.5.6 that lmc does not have.
pub fn foreign_flags() -> &'static [Foreign] {
    FLAGS
}

impl Foreign {
    /// Judges the flag as it was given. `None` means that lmc does what was asked for anyway.
    pub fn judge(&self, value: &str) -> Option<Verdict> {
        let asks_for_nothing = self.harmless.contains(&value);
        (!asks_for_nothing).then_some(self.verdict)
    }

    /// The message for people.
    pub fn message(&self) -> String {
        let what = match self.verdict {
            Verdict::Ignore => "is LMCache's and was ignored",
            Verdict::Refuse => "is LMCache's and is not supported",
        };
        format!("--{} {what}: {}", self.name, self.advice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ALL_SETTINGS;

    #[test]
    fn no_flag_is_both_ours_and_foreign() {
        for foreign in FLAGS {
            assert!(
                ALL_SETTINGS.iter().all(|info| info.name != foreign.name),
                "--{}",
                foreign.name
            );
            assert!(foreign.advice.ends_with('.'), "--{}", foreign.name);
        }
    }

    #[test]
    fn a_flag_that_asks_for_what_we_do_passes() {
        let judge = |name: &str, value: &str| {
            FLAGS
                .iter()
                .find(|f| f.name == name)
                .expect("a known flag")
                .judge(value)
        };
        assert_eq!(judge("transport", "zmq"), None);
        assert_eq!(judge("transport", "grpc"), Some(Verdict::Refuse));
        assert_eq!(judge("engine-type", "blend"), Some(Verdict::Refuse));
        assert_eq!(judge("isolated-ipc", "no"), None);
        assert_eq!(judge("l1-use-lazy", ""), Some(Verdict::Ignore));
    }
}
