//! Doubly linked lists over slab indices.

use crate::chunked::Chunked;

/// The index that stands for no entry.
pub(crate) const NIL: u32 = u32::MAX;

/// Links and marks of one entry, 16 bytes. Stored apart from the entry, so that a change of an entry's
/// neighbours does not touch the cache lines of their keys.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Node {
    /// Neighbour towards the head, the young end.
    prev: u32,
    /// Neighbour towards the tail, the old end. The slab also links its free indices by this field.
    pub(crate) next: u32,
    stamp_low: u32,
    stamp_high: u16,
    /// Low four bits: the policy's queue that the entry is in, or was in when it was popped. High bits: the
    /// number of recent uses, up to the policy's limit.
    queue_and_recent: u8,
    /// Number of uses since the insert, up to 255.
    uses: u8,
}

impl Default for Node {
    fn default() -> Self {
        Self {
            prev: NIL,
            next: NIL,
            stamp_low: 0,
            stamp_high: 0,
            queue_and_recent: 0,
            uses: 0,
        }
    }
}

impl Node {
    pub(super) fn queue(&self) -> u8 {
        self.queue_and_recent & 0xf
    }

    pub(super) fn set_queue(&mut self, queue: u8) {
        self.queue_and_recent = self.queue_and_recent & 0xf0 | queue & 0xf;
    }

    pub(super) fn recent_uses(&self) -> u8 {
        self.queue_and_recent >> 4
    }

    pub(super) fn set_recent_uses(&mut self, uses: u8) {
        self.queue_and_recent = self.queue_and_recent & 0xf | uses << 4;
    }

    pub(crate) fn uses(&self) -> u8 {
        self.uses
    }

    pub(crate) fn count_use(&mut self) {
        self.uses = self.uses.saturating_add(1);
    }

    pub(crate) fn stamp(&self) -> u64 {
        u64::from(self.stamp_high) << 32 | u64::from(self.stamp_low)
    }

    /// Stores 48 bits of the stamp: enough for 8 years at a million uses a second. After that, shards are
    /// compared wrongly for a while; nothing else depends on the stamp.
    pub(super) fn set_stamp(&mut self, stamp: u64) {
        self.stamp_low = stamp as u32;
        self.stamp_high = (stamp >> 32) as u16;
    }
}

/// The nodes of a slab.
pub(crate) type Nodes = Chunked<Node>;

/// A list with a young end, the head, and an old end, the tail.
#[derive(Clone, Copy, Debug)]
pub(crate) struct List {
    head: u32,
    tail: u32,
    len: u32,
}

impl Default for List {
    fn default() -> Self {
        Self {
            head: NIL,
            tail: NIL,
            len: 0,
        }
    }
}

impl List {
    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    pub(crate) fn tail(&self) -> Option<u32> {
        (self.tail != NIL).then_some(self.tail)
    }

    pub(crate) fn push_head(&mut self, nodes: &mut Nodes, id: u32) {
        nodes[id].prev = NIL;
        nodes[id].next = self.head;
        match self.head {
            NIL => self.tail = id,
            head => nodes[head].prev = id,
        }
        self.head = id;
        self.len += 1;
    }

    pub(crate) fn push_tail(&mut self, nodes: &mut Nodes, id: u32) {
        nodes[id].next = NIL;
        nodes[id].prev = self.tail;
        match self.tail {
            NIL => self.head = id,
            tail => nodes[tail].next = id,
        }
        self.tail = id;
        self.len += 1;
    }

    /// Removes an entry that is in this list.
    pub(crate) fn remove(&mut self, nodes: &mut Nodes, id: u32) {
        let Node { prev, next, .. } = nodes[id];
        match prev {
            NIL => self.head = next,
            prev => nodes[prev].next = next,
        }
        match next {
            NIL => self.tail = prev,
            next => nodes[next].prev = prev,
        }
        self.len -= 1;
    }

    pub(crate) fn pop_tail(&mut self, nodes: &mut Nodes) -> Option<u32> {
        let id = self.tail()?;
        self.remove(nodes, id);
        Some(id)
    }
}
