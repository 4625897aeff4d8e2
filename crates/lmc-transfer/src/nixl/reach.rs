//! Decides whether a peer's memory can be read without its help.
//!
//! Where UCX has neither RDMA nor shared memory to a peer, it emulates a read: it asks the peer's
//! UCX to send the bytes. That has a third of the speed of a write; and should the reader die
//! meanwhile, UCX 1.23 aborts the *peer* (`ucp_request.inl: Fatal: unexpected error: Endpoint
//! timeout`). There, the reader asks the peer's channel to write instead.

use std::env;
use std::fs;
use std::os::unix::fs::MetadataExt;

use serde::{Deserialize, Serialize};

/// The side that moves the bytes of a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum NixlReads {
    /// Bytes move by this side where both have RDMA, or are on one host and may use shared memory;
    /// by the peer elsewhere. Default.
    #[default]
    Auto,
    /// Bytes move by this side, with NIXL's read. Over UCX's TCP, a reader that dies takes the
    /// process that it reads from with it.
    Direct,
    /// Bytes move by the peer, with NIXL's write.
    ByPeer,
}

/// Transports that a side can use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Reach {
    /// Equal for processes that may use shared memory with each other; empty for none.
    pub(super) host: String,
    /// True if it has RDMA.
    pub(super) rdma: bool,
}

impl Reach {
    /// Returns what this process can use, as far as UCX may (`UCX_TLS`).
    pub(super) fn of_this_process() -> Self {
        let transports = env::var("UCX_TLS").unwrap_or_default();
        let shared = allows(&transports, &["cma", "sm", "shm"]);
        Self {
            host: shared.then(host).flatten().unwrap_or_default(),
            rdma: allows(&transports, &["rc", "ud", "dc", "ib"]) && has_rdma(),
        }
    }

    /// Returns whether this side reads from the other by itself.
    pub(super) fn reads_from(&self, other: &Self, reads: NixlReads) -> bool {
        match reads {
            NixlReads::Direct => true,
            NixlReads::ByPeer => false,
            NixlReads::Auto => {
                let together = !self.host.is_empty() && self.host == other.host;
                together || self.rdma && other.rdma
            }
        }
    }
}

/// Returns whether UCX's list of transports has one of a family, named by what their names begin with.
fn allows(transports: &str, families: &[&str]) -> bool {
    let (list, negated) = match transports.strip_prefix('^') {
        Some(list) => (list, true),
        None => (transports, transports.is_empty()),
    };
    let named = |name: &str| families.iter().any(|family| name.starts_with(family));
    let listed = list.split(',').any(|name| named(name) || name == "all");
    listed != negated
}

/// Names the processes that may copy from and to each other's memory: one kernel, one PID
/// namespace, one user.
fn host() -> Option<String> {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let space = fs::read_link("/proc/self/ns/pid").ok()?;
    let user = fs::metadata("/proc/self").ok()?.uid();
    Some(format!("{}/{}/{user}", boot.trim(), space.display()))
}

/// Returns whether an RDMA device of this host has a port that is up.
pub fn has_rdma() -> bool {
    let entries = |path: std::path::PathBuf| fs::read_dir(path).into_iter().flatten().flatten();
    entries("/sys/class/infiniband".into())
        .flat_map(|device| entries(device.path().join("ports")))
        .filter_map(|port| fs::read_to_string(port.path().join("state")).ok())
        .any(|state| state.contains("ACTIVE"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_transports_are_read_as_ucx_reads_them() {
        let shared = ["cma", "sm", "shm"];
        for list in ["", "all", "tcp,sm", "cma,tcp", "^tcp", "^rc,ud"] {
            assert!(allows(list, &shared), "{list}");
        }
        for list in ["tcp", "tcp,self", "rc,ud", "^sm", "^cma,tcp"] {
            assert!(!allows(list, &shared), "{list}");
        }
        assert!(allows("rc_verbs,self", &["rc", "ud"]) && !allows("tcp", &["rc", "ud"]));
    }

    #[test]
    fn memory_is_read_directly_on_one_host_or_over_rdma_on_both() {
        let side = |host: &str, rdma| Reach {
            host: host.to_owned(),
            rdma,
        };
        let auto = |a: Reach, b: Reach| a.reads_from(&b, NixlReads::Auto);
        assert!(auto(side("h", false), side("h", false)));
        assert!(auto(side("h", true), side("i", true)));
        assert!(!auto(side("h", true), side("i", false)));
        assert!(!auto(side("", false), side("", false)));
        assert!(side("", false).reads_from(&side("", false), NixlReads::Direct));
        assert!(!side("h", true).reads_from(&side("h", true), NixlReads::ByPeer));
    }
}
