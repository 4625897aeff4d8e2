//! Slots of a call that receive a peer's bytes, and can be revoked at any time.

use std::sync::Arc;

use lmc_memory::ReservedSlot;
use parking_lot::Mutex;

use crate::lease::Segment;

/// Slots that the answer to one read goes to, until they are revoked.
///
/// The kernel copies bytes within a call that does not wait, and that call is made under the
/// lock: when [`Target::revoke`] has returned, nothing writes to the slots any more.
#[derive(Debug)]
pub(super) struct Target {
    pub(super) segments: Vec<Segment>,
    open: Mutex<bool>,
}

impl Target {
    /// Runs `act` on the memory, unless it is revoked.
    pub(super) fn with<T>(&self, act: impl FnOnce() -> T) -> Option<T> {
        let open = self.open.lock();
        match *open {
            true => Some(act()),
            false => None,
        }
    }

    pub(super) fn revoke(&self) {
        *self.open.lock() = false;
    }
}

/// The slots of a call, and the right to write to these slots. The right is revoked on drop.
#[derive(Debug)]
pub(super) struct Landing {
    slots: Vec<ReservedSlot>,
    targets: Vec<Arc<Target>>,
}

impl Landing {
    pub(super) fn new(slots: Vec<ReservedSlot>) -> Self {
        Self {
            slots,
            targets: Vec::new(),
        }
    }

    pub(super) fn slots(&self) -> &[ReservedSlot] {
        &self.slots
    }

    /// Allows writing to parts of the slots.
    pub(super) fn open(&mut self, segments: Vec<Segment>) -> Arc<Target> {
        let target = Arc::new(Target {
            segments,
            open: Mutex::new(true),
        });
        self.targets.push(Arc::clone(&target));
        target
    }

    /// Returns the slots, to which nothing writes any more.
    pub(super) fn close(mut self) -> Vec<ReservedSlot> {
        self.revoke();
        std::mem::take(&mut self.slots)
    }

    fn revoke(&self) {
        self.targets.iter().for_each(|target| target.revoke());
    }
}

impl Drop for Landing {
    fn drop(&mut self) {
        self.revoke();
    }
}
