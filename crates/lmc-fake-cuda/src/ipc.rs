//! Handles by which other processes open memory and events.

use std::fs::{File, TryLockError};
use std::path::Path;

const MAGIC: &[u8; 7] = b"lmcfake";

/// A process of a machine, or an engine in the process of a test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Owner {
    pid: u32,
    token: u64,
}

impl Owner {
    /// Returns an owner. `pid` is 0 for an engine in the process of a test.
    pub(crate) fn new(pid: u32) -> Self {
        Self {
            pid,
            token: random() as u64,
        }
    }

    /// Returns the name of the file that the process keeps locked until it ends.
    pub(crate) fn file(&self) -> String {
        format!("process-{}-{:016x}", self.pid, self.token)
    }

    pub(crate) fn is_alive(&self, folder: &Path) -> bool {
        is_locked(&folder.join(self.file()))
    }
}

/// Returns true while the process that made a file keeps it locked.
pub(crate) fn is_locked(path: &Path) -> bool {
    let Ok(file) = File::open(path) else {
        return false;
    };
    matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock))
}

fn random() -> u128 {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).expect("the system has random numbers");
    u128::from_ne_bytes(bytes)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Memory,
    Event,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Handle {
    kind: Kind,
    id: u128,
    pub(crate) owner: Owner,
    pub(crate) device: usize,
    pub(crate) len: usize,
}

impl Handle {
    pub(crate) fn new(kind: Kind, owner: Owner, device: usize, len: usize) -> Self {
        Self {
            kind,
            id: random(),
            owner,
            device,
            len,
        }
    }

    /// Returns the name of the file with the memory or the event.
    pub(crate) fn file(&self) -> String {
        format!("{:?}-{:032x}", self.kind, self.id)
    }

    pub(crate) fn encode(&self) -> [u8; 64] {
        let id = [self.id as u64, (self.id >> 64) as u64];
        let pid = u64::from(self.owner.pid);
        let fields = [
            id[0],
            id[1],
            pid,
            self.owner.token,
            self.device as u64,
            self.len as u64,
        ];
        let mut bytes = [0; 64];
        bytes[..7].copy_from_slice(MAGIC);
        bytes[7] = self.kind as u8;
        for (to, field) in bytes[8..].chunks_exact_mut(8).zip(fields) {
            to.copy_from_slice(&field.to_le_bytes());
        }
        bytes
    }

    pub(crate) fn decode(bytes: &[u8; 64], kind: Kind) -> Option<Self> {
        let field = |index: usize| {
            let field = bytes[8 + 8 * index..][..8].try_into().expect("8 bytes");
            u64::from_le_bytes(field)
        };
        let handle = Self {
            kind,
            id: u128::from(field(1)) << 64 | u128::from(field(0)),
            owner: Owner {
                pid: field(2).try_into().ok()?,
                token: field(3),
            },
            device: field(4) as usize,
            len: field(5) as usize,
        };
        // Refuses bytes that differ anywhere from the encoding.
        (handle.encode() == *bytes).then_some(handle)
    }
}
