//! ARC (Megiddo, Modha: "ARC: a self-tuning, low overhead replacement cache", FAST 2003).

use super::ghost::Ghost;
use super::{EvictionPolicy, List, Nodes};

const RECENT: u8 = 0;
const FREQUENT: u8 = 1;

/// The ARC policy. Chunks differ in size and the tier's capacity is in bytes, so the paper's capacity `c` is
/// the current number of entries.
#[derive(Debug, Default)]
pub(super) struct Arc {
    /// Entries used once (T1 in the paper).
    recent: List,
    /// Entries used again (T2).
    frequent: List,
    recent_ghosts: Ghost,
    frequent_ghosts: Ghost,
    /// Number of entries that `recent` should have (p).
    target: u64,
}

impl Arc {
    fn entries(&self) -> u64 {
        u64::from(self.recent.len()) + u64::from(self.frequent.len())
    }

    fn queue(&mut self, nodes: &Nodes, id: u32) -> &mut List {
        match nodes[id].queue() {
            RECENT => &mut self.recent,
            _ => &mut self.frequent,
        }
    }

    fn push(&mut self, nodes: &mut Nodes, id: u32, queue: u8, stamp: u64) {
        nodes[id].set_queue(queue);
        nodes[id].set_stamp(stamp);
        self.queue(nodes, id).push_head(nodes, id);
    }

    fn recent_is_due(&self) -> bool {
        let recent = u64::from(self.recent.len());
        recent > 0 && (recent > self.target || self.frequent.len() == 0)
    }
}

impl EvictionPolicy for Arc {
    fn insert(&mut self, nodes: &mut Nodes, id: u32, fingerprint: u32, stamp: u64) {
        let (recent, frequent) = (self.recent_ghosts.len(), self.frequent_ghosts.len());
        let queue = if self.recent_ghosts.recall(fingerprint) {
            let step = (frequent / recent.max(1)).max(1) as u64;
            self.target = (self.target + step).min(self.entries());
            FREQUENT
        } else if self.frequent_ghosts.recall(fingerprint) {
            let step = (recent / frequent.max(1)).max(1) as u64;
            self.target = self.target.saturating_sub(step);
            FREQUENT
        } else {
            RECENT
        };
        self.push(nodes, id, queue, stamp);
    }

    fn touch(&mut self, nodes: &mut Nodes, id: u32, stamp: u64) {
        self.queue(nodes, id).remove(nodes, id);
        self.push(nodes, id, FREQUENT, stamp);
    }

    fn remove(&mut self, nodes: &mut Nodes, id: u32) {
        self.queue(nodes, id).remove(nodes, id);
    }

    fn pop(&mut self, nodes: &mut Nodes) -> Option<u32> {
        match self.recent_is_due() {
            true => self.recent.pop_tail(nodes),
            false => self.frequent.pop_tail(nodes),
        }
    }

    fn put_back(&mut self, nodes: &mut Nodes, id: u32) {
        self.queue(nodes, id).push_tail(nodes, id);
    }

    fn revive(&mut self, nodes: &mut Nodes, id: u32, stamp: u64) {
        self.push(nodes, id, FREQUENT, stamp);
    }

    fn evicted(&mut self, nodes: &Nodes, id: u32, fingerprint: u32) {
        match nodes[id].queue() {
            RECENT => self.recent_ghosts.push(fingerprint),
            _ => self.frequent_ghosts.push(fingerprint),
        }
        // T1 + B1 <= c and T1 + T2 + B1 + B2 <= 2c, with c counted before this entry left.
        let capacity = self.entries() as usize + 1;
        self.recent_ghosts
            .trim(capacity.saturating_sub(self.recent.len() as usize).max(1));
        self.frequent_ghosts
            .trim(capacity.saturating_sub(self.recent_ghosts.len()).max(1));
    }

    fn coldest(&self, nodes: &Nodes) -> Option<u64> {
        let due = match self.recent_is_due() {
            true => self.recent.tail(),
            false => self.frequent.tail(),
        };
        due.map(|id| nodes[id].stamp())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An entry that comes back after it was evicted as recent makes the recent queue larger, and
    /// the other way round.
    #[test]
    fn regret_moves_the_target() {
        let mut nodes = Nodes::default();
        nodes.grow_to(64);
        let mut arc = Arc::default();
        let evict = |arc: &mut Arc, nodes: &mut Nodes| {
            let id = arc.pop(nodes).expect("something is queued");
            arc.evicted(nodes, id, id);
            id
        };
        (0..16).for_each(|id| arc.insert(&mut nodes, id, id, u64::from(id)));
        (8..16).for_each(|id| arc.touch(&mut nodes, id, 100));
        assert_eq!(
            (arc.recent.len(), arc.frequent.len(), arc.target),
            (8, 8, 0)
        );
        assert_eq!(
            [evict(&mut arc, &mut nodes), evict(&mut arc, &mut nodes)],
            [0, 1]
        );
        arc.insert(&mut nodes, 0, 0, 101);
        arc.insert(&mut nodes, 1, 1, 102);
        assert_eq!(
            arc.target, 2,
            "one for each, as there are no ghosts on the other side"
        );
        while arc.recent.len() > 2 {
            evict(&mut arc, &mut nodes);
        }
        assert_eq!(
            evict(&mut arc, &mut nodes),
            8,
            "the recent have what they should"
        );
        let (recent, frequent) = (arc.recent_ghosts.len(), arc.frequent_ghosts.len());
        assert_eq!((recent, frequent), (4, 1));
        arc.insert(&mut nodes, 8, 8, 103);
        assert_eq!(
            arc.target, 0,
            "four recent ghosts for one frequent one: a step of four"
        );
    }
}
