//! Least recently used.

use super::{EvictionPolicy, List, Nodes};

#[derive(Debug, Default)]
pub(super) struct Lru {
    queue: List,
}

impl EvictionPolicy for Lru {
    fn insert(&mut self, nodes: &mut Nodes, id: u32, _fingerprint: u32, stamp: u64) {
        nodes[id].set_stamp(stamp);
        self.queue.push_head(nodes, id);
    }

    fn touch(&mut self, nodes: &mut Nodes, id: u32, stamp: u64) {
        self.queue.remove(nodes, id);
        nodes[id].set_stamp(stamp);
        self.queue.push_head(nodes, id);
    }

    fn remove(&mut self, nodes: &mut Nodes, id: u32) {
        self.queue.remove(nodes, id);
    }

    fn pop(&mut self, nodes: &mut Nodes) -> Option<u32> {
        self.queue.pop_tail(nodes)
    }

    fn put_back(&mut self, nodes: &mut Nodes, id: u32) {
        self.queue.push_tail(nodes, id);
    }

    fn revive(&mut self, nodes: &mut Nodes, id: u32, stamp: u64) {
        nodes[id].set_stamp(stamp);
        self.queue.push_head(nodes, id);
    }

    fn evicted(&mut self, _nodes: &Nodes, _id: u32, _fingerprint: u32) {}

    fn coldest(&self, nodes: &Nodes) -> Option<u64> {
        self.queue.tail().map(|id| nodes[id].stamp())
    }
}
