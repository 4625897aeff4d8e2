//! The flag that makes vLLM use a server, with the stock connector or with lmc's own.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;

use lmc_vllm_adapter::LOCAL_SOCKET;
use serde_json::json;

use crate::config::TransferMode;

/// Default address at which LMCache's connector looks for a server.
const CONNECTOR_PORT: u16 = 5555;

/// Returns the value of vLLM's `--kv-transfer-config` for lmc's own connector, which connects to the
/// server's Unix socket.
pub(crate) fn own_transfer_config(socket: &Path) -> String {
    let is_found = socket == Path::new(LOCAL_SOCKET);
    let server = if is_found { Path::new("local") } else { socket };
    let config = json!({
        "kv_connector": "LmcConnector",
        "kv_connector_module_path": "lmc.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"lmc.server": server},
    });
    config.to_string()
}

/// Returns the value of vLLM's `--kv-transfer-config` for engines of the server that listens at `host` and
/// `port`. It holds neither spaces nor single quotes.
///
/// It names host and port if they differ from the client's defaults, and the transfer mode if the server
/// serves only one. `docs/vllm.md` explains every key.
pub fn transfer_config(host: &str, port: u16, mode: TransferMode) -> String {
    let mut extra = json!({});
    if mode != TransferMode::Auto {
        extra["lmcache.mp.mp_transfer_mode"] = mode.name().into();
    }
    if let Some(url) = host_url(host) {
        extra["lmcache.mp.host"] = url.into();
    }
    if port != CONNECTOR_PORT {
        extra["lmcache.mp.port"] = port.into();
    }
    let mut config = json!({
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    });
    if extra != json!({}) {
        config["kv_connector_extra_config"] = extra;
    }
    config.to_string()
}

/// Returns the address for the client, or `None` if its default `tcp://localhost` reaches the server.
fn host_url(host: &str) -> Option<String> {
    let ip = match host {
        "localhost" | "*" => return None,
        name => name.trim_matches(['[', ']']).parse(),
    };
    match ip {
        Ok(IpAddr::V4(Ipv4Addr::UNSPECIFIED | Ipv4Addr::LOCALHOST))
        | Ok(IpAddr::V6(Ipv6Addr::UNSPECIFIED)) => None,
        Ok(IpAddr::V6(ip)) => Some(format!("tcp://[{ip}]")),
        Ok(IpAddr::V4(_)) | Err(_) => Some(format!("tcp://{host}")),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn extra(host: &str, port: u16, mode: TransferMode) -> Value {
        let config: Value = serde_json::from_str(&transfer_config(host, port, mode)).unwrap();
        assert_eq!(config["kv_load_failure_policy"], "recompute");
        config
            .get("kv_connector_extra_config")
            .cloned()
            .unwrap_or_else(|| json!({}))
    }

    #[test]
    fn host_and_port_are_named_where_they_differ_from_the_clients() {
        let check = |host, port, found: Value| {
            let extra = extra(host, port, TransferMode::Auto);
            let named = json!({
                "host": extra.get("lmcache.mp.host"),
                "port": extra.get("lmcache.mp.port"),
            });
            assert_eq!(named, found, "{host}");
        };
        let own = json!({"host": null, "port": null});
        for host in ["127.0.0.1", "localhost", "0.0.0.0", "::", "*"] {
            check(host, 5555, own.clone());
        }
        check("127.0.0.1", 6555, json!({"host": null, "port": 6555}));
        check("::1", 5555, json!({"host": "tcp://[::1]", "port": null}));
        check("10.0.0.5", 1, json!({"host": "tcp://10.0.0.5", "port": 1}));
        check(
            "node-7",
            5555,
            json!({"host": "tcp://node-7", "port": null}),
        );
    }

    #[test]
    fn the_mode_is_one_that_the_server_accepts() {
        let mode = |mode| extra("localhost", 5555, mode)["lmcache.mp.mp_transfer_mode"].clone();
        assert_eq!(extra("localhost", 5555, TransferMode::Auto), json!({}));
        assert_eq!(mode(TransferMode::EngineDriven), "engine_driven");
        assert_eq!(mode(TransferMode::LmcacheDriven), "lmcache_driven");
    }

    #[test]
    fn lmcs_own_connector_is_to_start_no_server_beside_this_one() {
        let own = own_transfer_config(Path::new(LOCAL_SOCKET));
        let line = format!("vllm serve MODEL --kv-transfer-config '{own}'");
        let path = format!("{}/../../docs/connector.md", env!("CARGO_MANIFEST_DIR"));
        let text = std::fs::read_to_string(path).unwrap();
        assert!(text.contains(&line), "docs/connector.md lacks {line}");
        let other = own_transfer_config(Path::new("/tmp/s"));
        let other: Value = serde_json::from_str(&other).unwrap();
        assert_eq!(other["kv_connector_extra_config"]["lmc.server"], "/tmp/s");
    }

    /// The line is pasted into shells, in single quotes.
    #[test]
    fn the_value_is_one_word_in_single_quotes() {
        let text = transfer_config("node-7", 6555, TransferMode::Auto);
        assert!(!text.contains(['\'', ' ', '\n']), "{text}");
    }

    /// README and docs/vllm.md show the line of a server with default settings, and no other line.
    #[test]
    fn the_pages_show_the_line_of_a_default_server() {
        let line = format!(
            "vllm serve MODEL --kv-transfer-config '{}'",
            transfer_config("127.0.0.1", 5555, TransferMode::Auto)
        );
        for page in ["README.md", "docs/vllm.md"] {
            let path = format!("{}/../../{page}", env!("CARGO_MANIFEST_DIR"));
            let text = std::fs::read_to_string(path).unwrap();
            assert!(text.contains(&line), "{page} lacks {line}");
            let lines = text
                .lines()
                .filter(|line| line.contains("LMCacheMPConnector"));
            for line in lines.filter(|line| line.contains('{')) {
                assert!(
                    line.contains("\"kv_load_failure_policy\":\"recompute\""),
                    "{line}"
                );
            }
        }
    }
}
