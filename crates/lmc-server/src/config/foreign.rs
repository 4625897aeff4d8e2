//! Flags of `lmcache server` that do not exist here, and what to do instead.

/// Effect of a flag of LMCache's server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The flag changes nothing that matters here: warn, and continue.
    Ignore,
    /// The server would do something else than the flag asks for: stop.
    Refuse,
}

/// One flag that LMCache has and lmc does not have.
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

/// Declares [`FLAGS`]: verdict, names with the values that are harmless, and advice.
macro_rules! flags {
    ($($verdict:ident $($name:literal $([$($harmless:literal),*])?),+ : $advice:literal;)+) => {
        static FLAGS: &[Foreign] = &[$($(Foreign {
            name: $name,
            harmless: &[$($($harmless),*)?],
            verdict: Verdict::$verdict,
            advice: $advice,
        }),+),+];
    };
}

flags! {
    Ignore "instance-id": "lmc needs no instance id; label its metrics in Prometheus.";
    Refuse "transport" ["zmq"]:
        "lmc speaks ZeroMQ only; set the engine's lmcache.mp transport to zmq.";
    Ignore "grpc-server-workers":
        "there is no gRPC here; --max-workers sets the threads that serve requests.";
    Ignore "max-gpu-workers": "use --copy-threads for the threads that copy.";
    Ignore "max-cpu-workers": "use --max-workers for the threads that serve requests.";
    Refuse "engine-type" ["default"], "enable-segmented-prefix" ["no"],
        "enable-dedup-content" ["no"], "enable-blend-reorder" ["no"]:
        "lmc caches prefixes only; there is no CacheBlend.";
    Ignore "separate-object-groups":
        "lmc always keeps object groups apart; the flag is not needed.";
    Refuse "runtime-plugin-locations", "runtime-plugin-config" ["{}"], "server-module",
        "script-allowed-imports":
        "lmc loads no code at run time; run the plugin as a process of its own.";
    Refuse "run-script-api-enabled" ["no"]: "lmc never runs code that comes over HTTP.";
    Refuse "enable": "lmc has no experimental transfer modules.";
    Refuse "p2p-advertise-url" [""], "p2p-listen-url" [""]:
        "lmc has peers with flags of their own; use --p2p-listen, --p2p-advertise and --p2p-peer.";
    Ignore "p2p-lookup-timeout", "p2p-load-timeout", "p2p-transfer-engine":
        "lmc has peers with flags of their own; use --p2p-locate-timeout and --p2p-pending-timeout.";
    Refuse "l1-manager": "lmc has one pool, in memory; size it with --l1-size-gb.";
    Ignore "l1-use-lazy", "l1-init-size-gb":
        "lmc maps the whole pool at start and touches its pages in the background; with --prefault=false a page is touched at its first use.";
    Refuse "l1-devdax-path":
        "lmc keeps its pool in memory; use --l1-use-hugepages, and --numa-node to bind it.";
    Refuse "gds-l1-path": "lmc keeps its pool in memory; it has no GPUDirect Storage tier.";
    Ignore "gds-l1-use-direct-io", "gds-l1-backend": "lmc has no GPUDirect Storage tier.";
    Refuse "l2-adapter":
        "name folders on drives with --disk and --disk-size; lmc takes no adapters in JSON.";
    Ignore "l2-store-policy", "l2-prefetch-policy", "l2-prefetch-max-in-flight":
        "name folders on drives with --disk and --disk-size; lmc takes no adapters in JSON.";
    Ignore "periodic-notifier-interval-ms": "lmc wakes on events; there is no interval to set.";
    Ignore "disable-observability", "disable-metrics":
        "counters cost nothing measurable here; do not scrape /metrics if you do not want them.";
    Ignore "disable-grpc-metrics": "there is no gRPC here.";
    Ignore "disable-logging": "use --log-level error.";
    Ignore "enable-tracing" ["no"]: "lmc sends spans if --otlp-endpoint names a collector.";
    Refuse "trace-level", "trace-output":
        "lmc does not record storage calls; use --request-log all, or --otlp-endpoint.";
    Ignore "event-bus-queue-size":
        "lmc has no event bus; --kv-event-log-size bounds the KV event stream.";
    Ignore "metrics-sample-rate": "lmc counts every operation; nothing is sampled.";
    Refuse "lookup-hash-log-dir": "lmc writes no file of hashes; subscribe to KV events instead.";
    Ignore "lookup-hash-log-rotation-interval", "lookup-hash-log-rotation-max-size",
        "lookup-hash-log-max-files":
        "lmc writes no file of hashes; subscribe to KV events instead.";
    Ignore "enable-gc-monitor", "gc-monitor-min-pause-ms", "gc-monitor-top-objects":
        "there is no garbage collector here.";
    Ignore "enable-extra-logging", "extra-logging-interval": "use --log-level debug.";
    Refuse "coordinator-url" [""]:
        "lmc joins no coordinator yet; routers can subscribe to KV events directly.";
    Ignore "coordinator-advertise-ip", "coordinator-heartbeat-interval",
        "coordinator-event-reporting", "coordinator-event-flush-interval",
        "coordinator-event-transport", "coordinator-kafka-bootstrap-servers",
        "coordinator-kafka-topic", "coordinator-kafka-delivery-timeout",
        "coordinator-blend-timeout", "coordinator-blend-match-concurrency",
        "coordinator-l2-event-reporting", "coordinator-l2-event-flush-interval":
        "lmc joins no coordinator yet; routers can subscribe to KV events directly.";
}

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

    /// Returns the message for the operator.
    pub fn message(&self) -> String {
        let what = match self.verdict {
            Verdict::Ignore => "is a flag of LMCache's server and was ignored",
            Verdict::Refuse => "is a flag of LMCache's server and is not supported",
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
        assert_eq!(judge("enable-blend-reorder", "no"), None);
        assert_eq!(judge("l1-use-lazy", ""), Some(Verdict::Ignore));
    }
}
