//! Memory that peers write to by NIXL, apart from the arena: blocks of one length, from which the
//! objects of a fetch are copied to their slots.
//!
//! A peer that has this memory's key may write to all of it at any time, also for a cancelled
//! request, or after its connection has ended. That harms nothing: the checksum of an object is
//! computed after the copy, and a block that such a peer may write to rests before it is used
//! again.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use lmc_memory::{Arena, ArenaConfig, ArenaError, Demand};
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::PeerId;

/// Bytes of a block, and of one fetch at most.
pub(crate) const BLOCK: u64 = 4 << 20;
/// A block that a peer may still write to rests for this long: long enough that few reads must be
/// repeated.
const REST: Duration = Duration::from_secs(60);

/// Memory of closed channels that a peer may still write to: over shared memory nothing stops the
/// peer, and it would change whatever is mapped there next.
static KEPT: Mutex<Vec<Arc<Arena>>> = Mutex::new(Vec::new());

/// The blocks of a plane.
#[derive(Debug)]
pub(crate) struct Blocks {
    arena: Arc<Arena>,
    /// Blocks that one peer may have, the resting ones among them.
    share: usize,
    state: Mutex<BlockTable>,
    freed: Notify,
}

#[derive(Debug, Default)]
struct BlockTable {
    /// Offsets of blocks that nothing uses.
    free: Vec<u64>,
    /// Blocks that a peer may still write to, with the time since when.
    resting: VecDeque<(Instant, PeerId, u64)>,
    /// Blocks of each peer.
    used: HashMap<PeerId, usize>,
}

impl BlockTable {
    fn give_back(&mut self, peer: &PeerId, offset: u64) {
        self.free.push(offset);
        if let Some(used) = self.used.get_mut(peer) {
            *used -= 1;
            if *used == 0 {
                self.used.remove(peer);
            }
        }
    }
}

/// The reason why there is no block now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NoBlock {
    /// Other reads use all blocks.
    Used,
    /// The peer has its full share.
    Share,
}

impl Blocks {
    /// Maps `bytes` bytes, a multiple of [`BLOCK`].
    pub(super) fn new(bytes: u64) -> Result<Arc<Self>, ArenaError> {
        let len = usize::try_from(bytes).unwrap_or(usize::MAX);
        // Copies between processes take twice as long on small pages.
        let arena = ArenaConfig::anonymous(len).with_huge_pages(Demand::Auto);
        let arena = Arc::new(arena.build()?);
        let free: Vec<u64> = (0..bytes / BLOCK)
            .rev()
            .map(|block| block * BLOCK)
            .collect();
        Ok(Arc::new(Self {
            arena,
            share: (free.len() / 2).max(1),
            state: Mutex::new(BlockTable {
                free,
                ..BlockTable::default()
            }),
            freed: Notify::new(),
        }))
    }

    pub(super) fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    /// A block for a peer to write to.
    pub(crate) fn take(self: &Arc<Self>, peer: &PeerId) -> Result<Block, NoBlock> {
        let mut state = self.state.lock();
        let has_rested = |(since, ..): &(Instant, PeerId, u64)| since.elapsed() >= REST;
        while state.resting.front().is_some_and(has_rested) {
            let rested = state.resting.pop_front();
            rested.inspect(|(_, peer, offset)| state.give_back(peer, *offset));
        }
        if state.used.get(peer).is_some_and(|used| *used >= self.share) {
            return Err(NoBlock::Share);
        }
        let offset = state.free.pop().ok_or(NoBlock::Used)?;
        *state.used.entry(peer.clone()).or_default() += 1;
        Ok(Block {
            blocks: Arc::clone(self),
            peer: peer.clone(),
            offset,
            written: false,
        })
    }

    /// Waits for a block. `None` where the peer has its share.
    pub(crate) async fn taken(self: &Arc<Self>, peer: &PeerId) -> Option<Block> {
        loop {
            let freed = self.freed.notified();
            tokio::pin!(freed);
            freed.as_mut().enable();
            match self.take(peer) {
                Ok(block) => return Some(block),
                Err(NoBlock::Share) => return None,
                Err(NoBlock::Used) => freed.await,
            }
        }
    }

    /// Keeps the memory mapped to the end of the process where a peer may still write to it.
    pub(super) fn outlive(&self) {
        let all = self.arena.len() as u64 / BLOCK;
        if (self.state.lock().free.len() as u64) < all {
            tracing::info!("memory stays mapped: a peer may still write to it");
            KEPT.lock().push(Arc::clone(&self.arena));
        }
    }
}

/// A block for one fetch. One that is dropped before [`Self::over`] rests for a while.
#[derive(Debug)]
pub(crate) struct Block {
    blocks: Arc<Blocks>,
    peer: PeerId,
    offset: u64,
    /// True while a peer may write to it.
    written: bool,
}

impl Block {
    /// Offset in the memory that peers write to.
    pub(crate) fn offset(&self) -> u64 {
        self.offset
    }

    /// Notes that a peer is asked to write to the block.
    pub(crate) fn lend(&mut self) {
        self.written = true;
    }

    /// Notes that the peer writes nothing more to the block.
    pub(crate) fn over(mut self) {
        self.written = false;
    }

    /// Returns the address of `len` bytes. A peer that breaks the rules may write to them at any
    /// time.
    pub(crate) fn at(&self, offset: u64, len: u64) -> *const u8 {
        let end = offset.checked_add(len);
        assert!(end.is_some_and(|end| end <= BLOCK), "bytes of the block");
        let offset = (self.offset + offset) as usize;
        self.blocks.arena.base_ptr().as_ptr().wrapping_add(offset)
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let mut state = self.blocks.state.lock();
        if self.written {
            let rests = (Instant::now(), self.peer.clone(), self.offset);
            state.resting.push_back(rests);
            return;
        }
        state.give_back(&self.peer, self.offset);
        drop(state);
        self.blocks.freed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(name: &str) -> PeerId {
        name.parse().expect("a name")
    }

    fn blocks(count: u64) -> Arc<Blocks> {
        Blocks::new(count * BLOCK).expect("anonymous memory")
    }

    #[test]
    fn a_block_that_a_peer_may_write_to_rests() {
        let (blocks, peer) = (blocks(4), peer("a"));
        let mut first = blocks.take(&peer).expect("all are free");
        let second = blocks.take(&peer).expect("its share");
        assert_eq!((first.offset(), second.offset()), (0, BLOCK));
        first.lend();
        drop((first, second));
        let mut one = blocks.take(&peer).expect("the other rests");
        assert_eq!(one.offset(), BLOCK);
        assert_eq!(blocks.take(&peer).err(), Some(NoBlock::Share));
        one.lend();
        one.over();
        let long_ago = Instant::now().checked_sub(REST).expect("a minute ago");
        blocks.state.lock().resting[0].0 = long_ago;
        assert_eq!(blocks.take(&peer).map(|block| block.offset()), Ok(0));
        assert!(blocks.state.lock().used.is_empty());
    }

    #[test]
    fn a_peer_has_no_more_than_its_share() {
        let blocks = blocks(4);
        let take = |name: &str| blocks.take(&peer(name));
        let of_a = [take("a"), take("a")].map(|block| block.expect("its share"));
        assert_eq!(take("a").err(), Some(NoBlock::Share));
        let of_b = [take("b"), take("b")].map(|block| block.expect("its share"));
        assert_eq!(take("c").err(), Some(NoBlock::Used));
        drop(of_b);
        assert!(take("c").is_ok() && take("a").is_err());
        drop(of_a);
        assert!(take("a").is_ok());
    }
}
