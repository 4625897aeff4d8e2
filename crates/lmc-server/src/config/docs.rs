//! The page of the documentation that lists every setting, made from the settings themselves.

use std::fmt::Write;

use super::foreign::{Verdict, foreign_flags};
use super::setting::{Group, Shape};
use super::settings::ALL;

/// The text of `docs/configuration.md`.
pub fn documentation() -> String {
    let mut out = String::from(
        "# Configuration\n\n\
         Every setting of `lmc serve` is a flag, an environment variable and a key of one TOML file, under one name: \
         `--http-port` is `LMC_HTTP_PORT` and `http_port`.\n\
         Flags win over variables, variables over the file, the file over the defaults.\n\
         The file is named by `--config FILE` or `LMC_CONFIG`.\n\n\
         ```\n\
         lmc serve --print-config             # every value, and where it came from; the output is a valid file\n\
         lmc serve --l1-size-gb 100GiB        # or LMC_L1_SIZE_GB=100GiB, or l1_size_gb = \"100GiB\"\n\
         ```\n\n\
         ```toml\n\
         # lmc.toml\n\
         l1_size_gb = \"500GiB\"\n\
         numa_node = 0\n\
         eviction_policy = \"S3FIFO\"\n\
         log_format = \"json\"\n\n\
         [quota]\n\
         tenant-a = \"100GiB\"\n\
         _default = \"50GiB\"        # traffic without a cache_salt\n\n\
         [[tier]]                   # one table for each lower tier, the fastest first\n\
         kind = \"disk\"\n\
         url = \"/data/a,/data/b\"   # short form: --disk\n\
         size = \"2TiB\"             # --disk-size\n\
         write = \"through\"         # --disk-write\n\
         admit = \"always\"          # --disk-admit\n\
         timeout = \"10s\"           # --disk-read-timeout-seconds\n\
         ```\n\n\
         Other keys of a disk's table are `create`, `keep_free`, `io`, `depth` and `state_dir`; each is the `--disk-…` flag of its name (`--state-dir`).\n\
         A password in a URL (`redis://user:password@host`) is masked in every output.\n\n\
         Sizes take `KiB`, `MiB`, `GiB`, `TiB` (powers of 1024) and `KB`, `MB`, `GB`, `TB` (powers of 1000); \
         durations are seconds, or `250ms`, `10s`, `5m`, `1h`; switches are turned off with `--no-NAME`.\n\
         A key that is not known, or a value that cannot be, ends the start with all that is wrong and the nearest valid names.\n\
         A variable that begins with `LMC_` and is no setting is warned about.\n\n\
         ## Which user to run as\n\n\
         Run `lmc serve` as the user of the engines, never as root.\n\
         Engines that copy by themselves open the pool, which has mode 0600.\n\
         For engines whose memory the server copies from, the server maps only segments that belong to the user of the engine's connection; the kernel names that user for connections within one network namespace. A connection from elsewhere registers no memory, and can use `lmcache.mp.mp_transfer_mode=engine_driven`.\n\
         All engines of one pool can write to it, so they trust each other. Users that do not trust each other run a server each.\n\
         The server refuses connections of other users of this host, except root and those that `--trusted-users` names, and closes them with a line in its log that names the user. \
         A trusted user can store wrong bytes that all engines then hit, clear the cache and change quotas. \
         The kernel names the user for connections within one network namespace; a connection from another host or namespace is served, so restrict access to the port in the network. A connection that a firewall rule of this host redirects (DNAT) looks like one whose user has gone, and is refused: use `--trusted-users all` there.\n",
    );
    let mut group: Option<Group> = None;
    for info in ALL {
        if group.replace(info.group) != Some(info.group) {
            // Writing to a string cannot fail.
            let _ = write!(
                out,
                "\n## {}\n\n| flag | default | meaning |\n|---|---|---|\n",
                info.group.heading()
            );
        }
        let default = if info.default.is_empty() {
            "none"
        } else {
            info.default
        };
        let value = match info.shape {
            Shape::Switch => String::new(),
            _ => format!(" {}", info.placeholder),
        };
        let _ = writeln!(
            out,
            "| `--{}{value}` | `{default}` | {} |",
            info.name,
            info.help.trim()
        );
    }
    out.push_str(
        "\n## Flags of LMCache's server\n\n\
         Flags of `lmcache server` keep their names here where the meaning is the same.\n\
         Of the others, those that would change what the server does are refused with a text that says what to do \
         instead, and those that would not are ignored with a warning.\n\n\
         | flag | here | instead |\n|---|---|---|\n",
    );
    for flag in foreign_flags() {
        let verdict = match flag.verdict {
            Verdict::Ignore => "ignored",
            Verdict::Refuse => "refused",
        };
        let verdict = match flag.harmless {
            [] => verdict.to_owned(),
            values => {
                let values: Vec<String> = values
                    .iter()
                    .map(|value| harmless(flag.name, value))
                    .collect();
                format!("{verdict}, except {}", values.join(", "))
            }
        };
        let _ = writeln!(out, "| `--{}` | {verdict} | {} |", flag.name, flag.advice);
    }
    out.push_str(
        "\n## The other commands\n\n\
         `lmc status`, `lmc clear` and `lmc quota` ask a server's HTTP port, `--url` or `LMC_URL`; \
         by default `http://127.0.0.1:8080`. A URL without a scheme means http.\n\
         A quota that `lmc quota set` (or `PUT /quota/SALT`) sets lasts until the server stops; \
         `--quota SALT=SIZE` sets it at every start.\n\
         `lmc bench` refuses a server that holds chunks or serves engines unless `--force` is given, \
         and clears a server that was empty.\n\
         `lmc completions SHELL` and `lmc man [COMMAND]` print a completion script and manual pages.\n\n\
         ## HTTP paths\n\n\
         Nothing here authenticates beyond the check of users below; the port listens on this host only unless `--http-host` says otherwise.\n\
         A browser on this host can reach it, so requests that the page of another site could have sent are refused:\n\n\
         - 403 for a `Host` that is not an IP address, `localhost`, the name in `--http-host` or one of `--http-allowed-host`. \
         Scrapers and probes that ask by another name (a Kubernetes Service, `host.docker.internal`) need that name in `--http-allowed-host`.\n\
         - 403 for an `Origin` other than the server's own, and for a `Sec-Fetch-Site` other than `same-origin` or `none`.\n\
         - 403 for a POST, PUT or DELETE by a user of this host that is neither the server's own, nor root, nor one of `--trusted-users`. \
         A GET is answered for every user, so that monitoring needs no trust.\n\
         - 415 for a POST or PUT without `Content-Type: application/json`, also when the body is empty: \
         `curl -X POST -H 'Content-Type: application/json' http://127.0.0.1:8080/cache/clear`.\n\n\
         | path | answers |\n|---|---|\n\
         | `GET /healthz` | 200 when engines are answered, with `degraded` and the reason when a tier is not all well; 503 with the reason when the engines' own socket or the state behind it does not answer within 2 s |\n\
         | `GET /metrics` | Prometheus' text format, see [metrics](metrics.md) |\n\
         | `GET /status` | JSON: LMCache's fields where its tools look for them, everything of lmc's under `lmc`; `status` is the word of `/healthz`. Ids are text, because they may be above 2^53, which many readers of JSON round. `?full=1` adds the histogram of each operation |\n\
         | `GET /config` | JSON: LMCache's fields, and under `lmc` every setting with its origin |\n\
         | `POST /cache/clear` | empties the cache in every tier (`{\"tier\": \"l1\"}`: in memory only); `{\"force\": true}` also forgets what engines hold |\n\
         | `GET /quota`, `GET`, `PUT`, `DELETE /quota/SALT` | quotas; the body of a PUT is `{\"limit_gb\": 20}`; at most 1,024 salts have one; they last until the server stops |\n\
         | `POST /cache/checksums` | checksums of a worker's own blocks, for `lmcache bench server` |\n\
         | `GET /healthcheck`, `/version`, `/config/adapters`, `/cache/objects`, `/cache/prefetches` | as LMCache's server answers without L2 adapters |\n\n\
         Refusals are JSON with the reason in `error` and `detail`. Answers are compressed for clients that accept gzip.\n\
         At most 128 connections are open at a time; a new one replaces the one that has waited longest for a request. \
         The head of a connection's first request must arrive within 5 s, of each later one within 30 s of the answer before it.\n\n\
         ## Signals\n\n\
         | signal | effect |\n|---|---|\n\
         | SIGTERM, SIGINT, SIGHUP | stops in order: answers requests under way, writes to disk what is to go there, and ends. SIGHUP stays ignored under `nohup`; there is no reload |\n\
         | a second SIGTERM or SIGINT, a second or more after the first signal | stops at once; the log says how much was not written |\n\
         | SIGUSR1, SIGUSR2 | ignored, with a line in the log |\n\
         | SIGQUIT | ends at once with a core dump |\n\n\
         ## Exit codes\n\n\
         | code | meaning |\n|---|---|\n\
         | 0 | stopped by SIGTERM, SIGINT or SIGHUP, with every request under way answered |\n\
         | 1 | could not start or go on, or was stopped at once; the last lines of the log say why |\n\
         | 2 | the command line or the configuration is wrong |\n\
         | 3 | the pool was lost: a process cut its shared memory short, or punched a hole for which `/dev/shm` had no page. \
         The server stopped in order and used nothing of it since; a new server makes a new pool |\n",
    );
    out
}

fn harmless(name: &str, value: &str) -> String {
    match value {
        "no" => format!("`--no-{name}`"),
        "" => "when empty".to_owned(),
        value => format!("`{value}`"),
    }
}

#[cfg(test)]
mod tests {
    /// Run with `LMC_WRITE_DOCS=1` to write the page.
    #[test]
    fn the_documentation_lists_every_setting() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/configuration.md");
        if std::env::var_os("LMC_WRITE_DOCS").is_some() {
            std::fs::write(path, super::documentation()).unwrap();
        }
        let page = std::fs::read_to_string(path).unwrap_or_default();
        let changed = page
            .lines()
            .zip(super::documentation().lines())
            .find_map(|(old, new)| (old != new).then(|| format!("{old}\n->\n{new}")));
        assert!(
            page == super::documentation(),
            "write docs/configuration.md with LMC_WRITE_DOCS=1: {changed:?}"
        );
    }
}
