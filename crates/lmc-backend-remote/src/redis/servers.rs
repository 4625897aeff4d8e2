//! The servers that have the keys.

use std::time::Instant;

use super::Login;
use super::url::{RedisUrl, Topology};
use super::wire::{Address, Answer, Command, Wire};
use crate::store::StoreError;

/// Number of slots of a cluster.
const SLOTS: u16 = 16384;
/// Most bytes of an answer about the slots of a cluster: as many ranges as slots, each with two nodes.
const MAX_SLOTS: usize = 32 << 20;
/// Most bytes of an answer about one master, including the names of its replicas.
const MAX_MASTER: usize = 1 << 20;

/// The servers that have the keys.
#[derive(Debug)]
pub(super) enum Servers {
    One(Address),
    /// First and last slot of each range, with the node that has it.
    Cluster(Vec<(u16, u16, Address)>),
}

impl Servers {
    /// Finds the servers of a URL through the first of its nodes that answers. Each node gets an equal part
    /// of the remaining time.
    pub(super) async fn find(
        url: &RedisUrl,
        login: &Login,
        deadline: Instant,
    ) -> Result<Self, StoreError> {
        let mut failure = StoreError::Deadline;
        for (left, node) in (1..=url.nodes.len() as u32).rev().zip(&url.nodes) {
            let now = Instant::now();
            let deadline = now + deadline.saturating_duration_since(now) / left;
            let found = match url.topology {
                Topology::Single => Ok(Self::One(node.clone())),
                Topology::Sentinel => Self::of_sentinel(node, &url.service, login, deadline).await,
                Topology::Cluster => Self::of_cluster(node, login, deadline).await,
            };
            match found {
                Ok(servers) => return Ok(servers),
                Err(error) => failure = error,
            }
        }
        Err(login.clean(failure))
    }

    async fn of_sentinel(
        sentinel: &Address,
        service: &str,
        login: &Login,
        deadline: Instant,
    ) -> Result<Self, StoreError> {
        let anonymous = Login {
            username: None,
            password: None,
            db: 0,
            tls: login.tls.clone(),
        };
        let mut wire = Wire::connect(sentinel, &anonymous, deadline).await?;
        let which = Command::new(["SENTINEL", "GET-MASTER-ADDR-BY-NAME", service]);
        let answers = wire.ask(&[which.answered_by(MAX_MASTER)], deadline).await?;
        let master = answers
            .first()
            .and_then(Answer::elements)
            .and_then(|found| {
                let [host, port] = found else { return None };
                address(host.text()?, port, sentinel)
            });
        let master = master.ok_or_else(|| {
            StoreError::unavailable(format_args!("the Sentinel knows no master of {service:?}"))
        })?;
        // A Sentinel may not know yet that another server is the master.
        let mut wire = Wire::connect(&master, login, deadline).await?;
        let role = Command::new(["ROLE"]).answered_by(MAX_MASTER);
        let role = wire.ask(&[role], deadline).await?;
        let role = role.first().and_then(Answer::elements);
        match role.and_then(|role| role.first()?.text()) {
            Some("master") => Ok(Self::One(master)),
            _ => Err(StoreError::unavailable(
                "the server that the Sentinel names is not a master",
            )),
        }
    }

    async fn of_cluster(
        node: &Address,
        login: &Login,
        deadline: Instant,
    ) -> Result<Self, StoreError> {
        let mut wire = Wire::connect(node, login, deadline).await?;
        let slots = Command::new(["CLUSTER", "SLOTS"]).answered_by(MAX_SLOTS);
        let answers = wire.ask(&[slots], deadline).await?;
        let ranges = answers.first().and_then(|slots| ranges(slots, node));
        ranges.map(Self::Cluster).ok_or_else(|| {
            StoreError::unavailable("an answer to CLUSTER SLOTS that names no nodes")
        })
    }

    /// Returns the server that has a key; `None` if no server is known to have it.
    pub(super) fn node(&self, key: &str) -> Option<&Address> {
        match self {
            Self::One(node) => Some(node),
            Self::Cluster(ranges) => {
                let slot = slot(key.as_bytes());
                let range = ranges
                    .iter()
                    .find(|(first, last, _)| (*first..=*last).contains(&slot));
                range.map(|(_, _, node)| node)
            }
        }
    }

    /// Returns all servers that have keys, in an order that is stable while they stay.
    pub(super) fn nodes(&self) -> Vec<Address> {
        match self {
            Self::One(node) => vec![node.clone()],
            Self::Cluster(ranges) => {
                let mut nodes: Vec<_> = ranges.iter().map(|(_, _, node)| node.clone()).collect();
                nodes.sort_unstable();
                nodes.dedup();
                nodes
            }
        }
    }
}

/// Reads the address of a server. An empty host stands for the node that was asked.
fn address(host: &str, port: &Answer, asked: &Address) -> Option<Address> {
    let host = match host {
        "" => &asked.host,
        host => host,
    };
    let port = u16::try_from(port.number()?)
        .ok()
        .filter(|&port| port > 0)?;
    Some(Address {
        host: host.to_owned(),
        port,
    })
}

/// Reads a node's answer to `CLUSTER SLOTS`.
fn ranges(answer: &Answer, asked: &Address) -> Option<Vec<(u16, u16, Address)>> {
    let number = |value: Option<&Answer>| u16::try_from(value?.number()?).ok();
    let range = |row: &Answer| {
        let row = row.elements()?;
        let (first, last) = (number(row.first())?, number(row.get(1))?);
        let [host, port, ..] = row.get(2)?.elements()? else {
            return None;
        };
        let host = match host {
            Answer::Null => "",
            host => host.text()?,
        };
        let node = address(host, port, asked)?;
        (first <= last && last < SLOTS).then_some((first, last, node))
    };
    let rows = answer.elements()?;
    (rows.len() <= SLOTS.into()).then_some(())?;
    rows.iter().map(range).collect()
}

/// Returns the slot of a key. If a part of the key is in braces, the slot of the first such part.
fn slot(key: &[u8]) -> u16 {
    let tag = || {
        let open = key.iter().position(|&byte| byte == b'{')? + 1;
        let len = key[open..].iter().position(|&byte| byte == b'}')?;
        (len > 0).then(|| &key[open..open + len])
    };
    crc16::State::<crc16::XMODEM>::calculate(tag().unwrap_or(key)) % SLOTS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_have_the_slots_of_the_specification() {
        // Examples of the cluster's specification.
        assert_eq!(slot(b"123456789"), 0x31c3 % SLOTS);
        assert_eq!(slot(b"{user1000}.following"), slot(b"user1000"));
        assert_eq!(slot(b"foo{}{bar}"), slot_of_whole(b"foo{}{bar}"));
        assert_eq!(slot(b"foo{{bar}}zap"), slot_of_whole(b"{bar"));
        assert_eq!(slot(b"foo{bar}{zap}"), slot_of_whole(b"bar"));
    }

    fn slot_of_whole(key: &[u8]) -> u16 {
        crc16::State::<crc16::XMODEM>::calculate(key) % SLOTS
    }

    #[test]
    fn ranges_of_slots_are_checked() {
        let text = |text: &'static str| Answer::Bytes(text.into());
        let row = |first, last, host, port| {
            let node = Answer::Array(vec![host, Answer::Number(port), text("id")]);
            Answer::Array(vec![Answer::Number(first), Answer::Number(last), node])
        };
        let node = |host: &str, port| Address {
            host: host.to_owned(),
            port,
        };
        let asked = node("asked", 9);
        let good = ranges(
            &Answer::Array(vec![
                row(0, 100, text("a"), 1),
                row(101, 200, text(""), 2),
                row(201, 16383, Answer::Null, 3),
            ]),
            &asked,
        );
        let good = good.map(|ranges| ranges.into_iter().map(|(_, _, node)| node).collect());
        let expected: Vec<_> = vec![node("a", 1), node("asked", 2), node("asked", 3)];
        assert_eq!(good, Some(expected));
        for bad in [
            row(5, 4, text("a"), 1),
            row(0, 16384, text("a"), 1),
            row(-1, 4, text("a"), 1),
            row(0, 4, text("a"), 0),
            row(0, 4, text("a"), 65536),
            row(0, 4, Answer::Number(1), 1),
            Answer::Array(vec![Answer::Number(0), Answer::Number(1)]),
            Answer::Number(0),
        ] {
            assert_eq!(ranges(&Answer::Array(vec![bad]), &asked), None);
        }
        assert_eq!(ranges(&Answer::Null, &asked), None);
    }
}
