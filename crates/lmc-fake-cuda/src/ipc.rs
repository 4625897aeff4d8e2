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
    pub(crate) fn new() -> Self {
        Self {
            pid: std::process::id(),
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

#[derive(Debug, Clone)]
pub(crate) struct Handle {
    /// `m` for memory, `e` for an event.
    kind: u8,
    pub(crate) id: u128,
    pub(crate) owner: Owner,
    pub(crate) device: usize,
    pub(crate) len: usize,
}

impl Handle {
    pub(crate) fn memory(owner: &Owner, device: usize, len: usize) -> Self {
        Self {
            kind: b'm',
            id: random(),
            owner: *owner,
            device,
            len,
        }
    }

    pub(crate) fn event(owner: &Owner, device: usize) -> Self {
        Self {
            kind: b'e',
            ..Self::memory(owner, device, 0)
        }
    }

    /// Returns the name of the file with the memory or the event.
    pub(crate) fn file(&self) -> String {
        let kind = if self.kind == b'm' { "memory" } else { "event" };
        format!("{kind}-{:032x}", self.id)
    }

    pub(crate) fn encode(&self) -> [u8; 64] {
        let mut bytes = [0; 64];
        bytes[..7].copy_from_slice(MAGIC);
        bytes[7] = self.kind;
        bytes[8..24].copy_from_slice(&self.id.to_le_bytes());
        bytes[24..32].copy_from_slice(&u64::from(self.owner.pid).to_le_bytes());
        bytes[32..40].copy_from_slice(&self.owner.token.to_le_bytes());
        bytes[40..48].copy_from_slice(&(self.device as u64).to_le_bytes());
        bytes[48..56].copy_from_slice(&(self.len as u64).to_le_bytes());
        bytes
    }

    pub(crate) fn decode_memory(bytes: &[u8; 64]) -> Option<Self> {
        Self::decode(bytes, b'm')
    }

    pub(crate) fn decode_event(bytes: &[u8; 64]) -> Option<Self> {
        Self::decode(bytes, b'e')
    }

    fn decode(bytes: &[u8; 64], kind: u8) -> Option<Self> {
        let number = |at: usize| {
            let field = bytes[at..at + 8].try_into().expect("8 bytes");
            u64::from_le_bytes(field)
        };
        let handle = Self {
            kind,
            id: u128::from(number(16)) << 64 | u128::from(number(8)),
            owner: Owner {
                pid: number(24).try_into().ok()?,
                token: number(32),
            },
            device: number(40).try_into().ok()?,
            len: number(48).try_into().ok()?,
        };
        // Refuses whatever differs in any byte.
        (handle.encode() == *bytes).then_some(handle)
    }
}
