//! No eviction.

use super::{EvictionPolicy, Nodes};

#[derive(Debug)]
pub(super) struct Never;

impl EvictionPolicy for Never {
    fn insert(&mut self, _nodes: &mut Nodes, _id: u32, _fingerprint: u32, _stamp: u64) {}
    fn touch(&mut self, _nodes: &mut Nodes, _id: u32, _stamp: u64) {}
    fn remove(&mut self, _nodes: &mut Nodes, _id: u32) {}
    fn pop(&mut self, _nodes: &mut Nodes) -> Option<u32> {
        None
    }
    fn put_back(&mut self, _nodes: &mut Nodes, _id: u32) {}
    fn revive(&mut self, _nodes: &mut Nodes, _id: u32, _stamp: u64) {}
    fn evicted(&mut self, _nodes: &Nodes, _id: u32, _fingerprint: u32) {}
    fn coldest(&self, _nodes: &Nodes) -> Option<u64> {
        None
    }
}
