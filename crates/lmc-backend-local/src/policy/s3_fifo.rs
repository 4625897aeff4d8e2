//! S3-FIFO (Yang, Zhang, Qiu, Yue, Vigfusson: "FIFO queues are all you need", SOSP 2023).

use super::ghost::Ghost;
use super::{EvictionPolicy, List, Nodes};

const SMALL: u8 = 0;
const MAIN: u8 = 1;
/// Highest count of uses.
const MAX_USES: u8 = 3;

/// The S3-FIFO policy. The small queue holds a tenth of the entries, as in the paper.
#[derive(Debug, Default)]
pub(super) struct S3Fifo {
    small: List,
    main: List,
    ghost: Ghost,
    /// The last stamp seen, for entries that get a second chance.
    now: u64,
}

impl S3Fifo {
    fn small_is_due(&self) -> bool {
        let (small, main) = (self.small.len(), self.main.len());
        small > 0 && (main == 0 || u64::from(small) * 10 > u64::from(small) + u64::from(main))
    }

    fn queue(&mut self, nodes: &Nodes, id: u32) -> &mut List {
        match nodes[id].queue() {
            SMALL => &mut self.small,
            _ => &mut self.main,
        }
    }

    fn push(&mut self, nodes: &mut Nodes, id: u32, queue: u8, stamp: u64) {
        nodes[id].set_queue(queue);
        nodes[id].set_stamp(stamp);
        self.queue(nodes, id).push_head(nodes, id);
    }
}

impl EvictionPolicy for S3Fifo {
    fn insert(&mut self, nodes: &mut Nodes, id: u32, fingerprint: u32, stamp: u64) {
        self.now = stamp;
        nodes[id].set_recent_uses(0);
        let queue = match self.ghost.recall(fingerprint) {
            true => MAIN,
            false => SMALL,
        };
        self.push(nodes, id, queue, stamp);
    }

    fn touch(&mut self, nodes: &mut Nodes, id: u32, stamp: u64) {
        self.now = stamp;
        let uses = nodes[id].recent_uses() + 1;
        nodes[id].set_recent_uses(uses.min(MAX_USES));
    }

    fn remove(&mut self, nodes: &mut Nodes, id: u32) {
        self.queue(nodes, id).remove(nodes, id);
    }

    fn pop(&mut self, nodes: &mut Nodes) -> Option<u32> {
        loop {
            if self.small_is_due() {
                let id = self.small.pop_tail(nodes)?;
                // As in the paper, one use after the insert is not enough. Accepting one use was tried on the
                // traces: worse on the conversations, better on the synthetic one.
                if nodes[id].recent_uses() <= 1 {
                    return Some(id);
                }
                nodes[id].set_recent_uses(0);
                self.push(nodes, id, MAIN, self.now);
            } else {
                let id = self.main.pop_tail(nodes)?;
                let uses = nodes[id].recent_uses();
                if uses == 0 {
                    return Some(id);
                }
                nodes[id].set_recent_uses(uses - 1);
                self.push(nodes, id, MAIN, self.now);
            }
        }
    }

    fn put_back(&mut self, nodes: &mut Nodes, id: u32) {
        self.queue(nodes, id).push_tail(nodes, id);
    }

    fn revive(&mut self, nodes: &mut Nodes, id: u32, stamp: u64) {
        // The entry was used while it was popped, which moves it to the main queue.
        self.now = stamp;
        self.push(nodes, id, MAIN, stamp);
    }

    fn evicted(&mut self, nodes: &Nodes, id: u32, fingerprint: u32) {
        if nodes[id].queue() == SMALL {
            self.ghost.push(fingerprint);
        }
        self.ghost.trim(self.main.len() as usize);
    }

    fn coldest(&self, nodes: &Nodes) -> Option<u64> {
        let due = match self.small_is_due() {
            true => self.small.tail(),
            false => self.main.tail(),
        };
        due.map(|id| nodes[id].stamp())
    }
}
