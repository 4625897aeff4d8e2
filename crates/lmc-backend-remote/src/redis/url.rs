//! URLs of Redis.

use std::fmt;
use std::str::FromStr;

use percent_encoding::percent_decode_str;
use thiserror::Error;

use super::wire::Address;

const PORT: u16 = 6379;
const SENTINEL_PORT: u16 = 26379;

/// Kind of the servers in a URL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Topology {
    /// One server.
    Single,
    /// Nodes of a cluster, which name the other nodes.
    Cluster,
    /// Sentinels, which name the master of a service.
    Sentinel,
}

/// The location of a Redis, and the login.
///
/// `redis[s][-cluster|-sentinel]://[[user]:password@]host[:port][,host[:port]…][/path]`. The path is the
/// number of the database; for sentinels, the name of the service followed by that number; for a cluster,
/// nothing. `rediss` is TLS. Blanks, quotes, control characters, `,` and `/` in user and password must be
/// percent-encoded.
#[derive(Clone, PartialEq, Eq)]
pub struct RedisUrl {
    pub(super) topology: Topology,
    pub(super) tls: bool,
    pub(super) username: Option<String>,
    pub(super) password: Option<String>,
    pub(super) nodes: Vec<Address>,
    pub(super) service: String,
    pub(super) db: u32,
}

/// Reason why a text is not the URL of a Redis. Does not repeat the text, which may contain a password.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "expected redis://[user:password@]host[:port][/database] (rediss for TLS; redis-cluster://host:port,host:port; redis-sentinel://host:port,host:port/service): {0}"
)]
pub struct RedisUrlError(String);

impl RedisUrl {
    /// Sets the password, if the URL has none.
    #[must_use]
    pub fn with_password(mut self, password: String) -> Self {
        self.password = Some(password);
        self
    }

    /// Returns the kind of the servers.
    pub fn topology(&self) -> Topology {
        self.topology
    }
}

impl fmt::Debug for RedisUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// Omits the password.
impl fmt::Display for RedisUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tls = if self.tls { "s" } else { "" };
        let topology = match self.topology {
            Topology::Single => "",
            Topology::Cluster => "-cluster",
            Topology::Sentinel => "-sentinel",
        };
        let nodes = self
            .nodes
            .iter()
            .map(|Address { host, port }| match host.contains(':') {
                true => format!("[{host}]:{port}"),
                false => format!("{host}:{port}"),
            });
        let nodes: Vec<String> = nodes.collect();
        write!(f, "redis{tls}{topology}://{}", nodes.join(","))?;
        match self.topology {
            Topology::Single => write!(f, "/{}", self.db),
            Topology::Cluster => Ok(()),
            Topology::Sentinel => write!(f, "/{}/{}", self.service, self.db),
        }
    }
}

impl FromStr for RedisUrl {
    type Err = RedisUrlError;

    fn from_str(text: &str) -> Result<Self, RedisUrlError> {
        let wrong = |why: &str| RedisUrlError(why.to_owned());
        let (scheme, rest) = text.split_once("://").ok_or_else(|| wrong("no scheme"))?;
        let rest_of = scheme.strip_prefix("redis");
        let kind = rest_of.ok_or_else(|| wrong("another scheme"))?;
        let (tls, kind) = match kind.strip_prefix('s') {
            Some(kind) => (true, kind),
            None => (false, kind),
        };
        let topology = match kind {
            "" => Topology::Single,
            "-cluster" => Topology::Cluster,
            "-sentinel" => Topology::Sentinel,
            _ => return Err(wrong("another scheme")),
        };
        if rest.contains(['?', '#']) {
            return Err(wrong("a query or a fragment"));
        }
        let (login, rest) = match rest.rsplit_once('@') {
            Some((login, rest)) => (Some(login), rest),
            None => (None, rest),
        };
        // Such characters would end the URL when a text is searched for passwords in URLs.
        let is_raw = |c: char| {
            c.is_whitespace() || c.is_control() || matches!(c, '"' | '\'' | '`' | ',' | '/')
        };
        if login.is_some_and(|login| login.contains(is_raw)) {
            return Err(wrong(
                "a blank, quote, comma, slash or control character in the login, where it has to be percent-encoded",
            ));
        }
        let decode = |text: &str| {
            let decoded = percent_decode_str(text).decode_utf8();
            decoded
                .map(String::from)
                .map_err(|_| wrong("a login that is not UTF-8"))
        };
        let (username, password) =
            match login.map(|login| login.split_once(':').unwrap_or((login, ""))) {
                Some((user, password)) => (Some(decode(user)?), Some(decode(password)?)),
                None => (None, None),
            };
        let is_set = |text: &String| !text.is_empty();
        let (hosts, path) = rest.split_once('/').unwrap_or((rest, ""));
        let default_port = match topology {
            Topology::Sentinel => SENTINEL_PORT,
            _ => PORT,
        };
        let nodes: Option<Vec<Address>> = hosts
            .split(',')
            .map(|node| address(node, default_port))
            .collect();
        let nodes = nodes.ok_or_else(|| wrong("a host or port that is not one"))?;
        if topology == Topology::Single && nodes.len() > 1 {
            return Err(wrong("several hosts without -cluster or -sentinel"));
        }
        let (service, db) = match topology {
            Topology::Single => ("", path),
            Topology::Sentinel => path.split_once('/').unwrap_or((path, "")),
            Topology::Cluster if path.is_empty() => ("", ""),
            Topology::Cluster => return Err(wrong("a cluster has one database")),
        };
        if topology == Topology::Sentinel && service.is_empty() {
            return Err(wrong("no name of a service"));
        }
        let db = match db {
            "" => 0,
            db => db
                .parse()
                .map_err(|_| wrong("a database that is not a number"))?,
        };
        Ok(Self {
            topology,
            tls,
            username: username.filter(is_set),
            password: password.filter(is_set),
            nodes,
            service: service.to_owned(),
            db,
        })
    }
}

fn address(node: &str, default_port: u16) -> Option<Address> {
    let (host, port) = match node.strip_prefix('[') {
        Some(rest) => {
            let (host, rest) = rest.split_once(']')?;
            (host, rest.strip_prefix(':'))
        }
        None => match node.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (node, None),
        },
    };
    let port = match port {
        Some(port) => port.parse().ok().filter(|&port| port > 0)?,
        None => default_port,
    };
    let host = host.to_owned();
    (!host.is_empty()).then_some(Address { host, port })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_name_servers_and_login() {
        for (text, shown) in [
            ("redis://cache", "redis://cache:6379/0"),
            ("rediss://user:p%40ss@[::1]:7000/3", "rediss://[::1]:7000/3"),
            (
                "redis-cluster://:secret@a,b:7001",
                "redis-cluster://a:6379,b:7001",
            ),
            (
                "rediss-sentinel://a,b/main/2",
                "rediss-sentinel://a:26379,b:26379/main/2",
            ),
        ] {
            let url: RedisUrl = text.parse().expect(text);
            assert_eq!(url.to_string(), shown);
        }
        let url: RedisUrl = "rediss://user:p%40ss@[::1]:7000/3".parse().expect("a URL");
        assert_eq!(
            (url.username.as_deref(), url.password.as_deref()),
            (Some("user"), Some("p@ss"))
        );
        assert!(!format!("{url:?}").contains("p@ss"));
    }

    #[test]
    fn errors_do_not_repeat_the_text() {
        for text in [
            "redis:/secret@a",
            "http://secret@a",
            "redis-other://secret@a",
            "redis://:secret@",
            "redis://:secret@a:0",
            "redis://:secret@a:secret",
            "redis://:secret@a,b",
            "redis://:secret@a/secret",
            "redis://:secret@a?x=secret",
            "redis-cluster://:secret@a/1",
            "redis-sentinel://:secret@a",
            "redis://%ff:secret@a",
            "redis://:my secret@a",
            "redis://:\"secret@a",
            "redis://:secret\n@a",
            "redis://:my/secret@a",
            "redis://team/a:secret@a",
            "redis://team,a:secret@a",
        ] {
            let error = text.parse::<RedisUrl>().expect_err(text).to_string();
            assert!(!error.contains("secret"), "{error}");
        }
    }
}
