//! Entry point of the fuzz target: takes arbitrary bytes, and panics if a property does not hold.
//!
//! The properties: no frame causes a panic; a parsed frame survives the round trip through the encoder; what
//! peers have leased stays within its limits; each chunk that is loaded is answered once; and when the
//! sessions of all peers have ended, nothing is leased or reserved.

use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use lmc_backend::{
    BoxFuture, ChunkRun, Clears, Events, Host, HostChunk, HostLease, HostSpace, LoadItem,
    LocateHint, Located, Received, TooManyClears, Usage,
};
use lmc_key::{ChunkHash, ChunkKey, SpaceId};
use lmc_memory::{ArenaConfig, Pool, PoolConfig, ReservedSlot, SealedSlot, checksum};
use lmc_transfer::{Address, ConnectError, DataPlane, Filled, Index, PeerId, Slot, TransferError};
use parking_lot::Mutex;

use crate::message::{Reply, Request};
use crate::{Link, Node, NodeConfig, Session};

/// Bytes of a chunk.
const LEN: u64 = 96;
/// Number of chunks that the node has in memory: those that [`key`] numbers from 1 on.
const RESIDENT: u8 = 8;
/// Most bytes that all peers may lease, and most that one peer may lease.
const LIMITS: (u64, u64) = (5 * LEN, 3 * LEN);
/// Most leases of one peer.
const PEER_LEASES: usize = 3;
/// Possible pauses between two frames, in milliseconds.
const PAUSES: [u64; 8] = [0, 0, 0, 0, 1, 300, 3_000, 40_000];

/// Runs a node whose peers send the frames of the input.
pub fn peer(data: &[u8]) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime without IO can be built");
    runtime.block_on(run(data));
}

async fn run(data: &[u8]) {
    let chunks = Shelf::new();
    let link = Wire::default();
    let (state, grants) = (Arc::clone(&link.0), Arc::clone(&link.1));
    let mut config = NodeConfig::new("node", "127.0.0.1:1", 0);
    config.limits.bytes = LIMITS.0;
    config.limits.peer_bytes = LIMITS.1;
    config.limits.peer_leases = PEER_LEASES;
    let node = Node::new(config, link, Arc::new(chunks.clone()));
    let expiring = Arc::clone(&node);
    let expiring = tokio::spawn(async move { expiring.expire_leases().await });
    let pushing = Arc::clone(&node);
    let pushing = tokio::spawn(async move { pushing.push_waiting().await });
    let mut rest = data;
    while let Some((choice, frame)) = step(&mut rest) {
        parse(frame);
        let session = session(choice & 1, choice >> 1 & 1);
        match choice >> 2 & 7 {
            0..=2 => drop(node.serve(&session, frame).await),
            3 => {
                let (node, frame) = (Arc::clone(&node), frame.to_vec());
                tokio::spawn(async move { node.serve(&session, &frame).await });
            }
            4 => state.lock().replies.push_back(frame.to_vec()),
            5 => {
                let Session { peer, incarnation } = session.clone();
                state.lock().connected.insert(peer, incarnation);
                let _ = node.connected(&session).await;
            }
            6 => {
                state.lock().disconnect(&session);
                node.disconnected(&session, "it went");
            }
            _ => read(&node, &chunks).await,
        }
        let pause = PAUSES[usize::from(choice >> 5)];
        tokio::time::sleep(Duration::from_millis(pause)).await;
        assert!(node.status().peers.len() <= 2);
        let (leases, bytes) = node.leased();
        assert!(bytes <= LIMITS.0, "{bytes} bytes are leased");
        assert!(leases <= 4 * PEER_LEASES, "{leases} leases");
        assert_eq!(leases, grants.load(Ordering::Relaxed));
    }
    for (peer, incarnation) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        let session = session(peer, incarnation);
        state.lock().disconnect(&session);
        node.disconnected(&session, "it went");
    }
    assert_eq!(node.leased().0, 0, "leases outlive their session");
    // Requests in progress end by their deadlines.
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(node.leased(), (0, 0), "a reservation was left");
    assert_eq!(grants.load(Ordering::Relaxed), 0, "a grant was left");
    assert!(node.pusher.is_empty(), "a push was left");
    expiring.abort();
    pushing.abort();
    chunks.clear();
    assert_eq!(chunks.pool.usage().slots, 0, "a slot was left");
}

/// Splits one step off the input: a byte that chooses the action, and a frame.
fn step<'a>(rest: &mut &'a [u8]) -> Option<(u8, &'a [u8])> {
    let (&choice, tail) = rest.split_first()?;
    let len = match tail {
        [_, _, a, b, c, d, ..] => 6 + u32::from_le_bytes([*a, *b, *c, *d]) as usize,
        _ => tail.len(),
    };
    let (frame, tail) = tail.split_at(len.min(tail.len()));
    *rest = tail;
    Some((choice, frame))
}

fn parse(frame: &[u8]) {
    if let Ok(request) = Request::from_bytes(frame) {
        let bytes = request.to_bytes().expect("a request that was parsed fits");
        assert_eq!(Request::from_bytes(&bytes), Ok(request));
    }
    if let Ok(reply) = Reply::from_bytes(frame) {
        let bytes = reply.to_bytes().expect("a reply that was parsed fits");
        assert_eq!(Reply::from_bytes(&bytes), Ok(reply));
    }
}

/// Reads a prompt from peers and pushes it to one; the peers' replies come from the input.
async fn read(node: &Arc<Node<Wire>>, chunks: &Shelf) {
    let keys: Vec<ChunkKey> = (1..=4).map(key).collect();
    let deadline = || Instant::from(tokio::time::Instant::now()) + Duration::from_millis(100);
    node.exchange.describe_peers(deadline()).await;
    let run = ChunkRun {
        keys: keys.clone(),
        chunk_bytes: LEN,
        parent: Some(key(0)),
    };
    node.push(run, session(0, 0).peer.as_str());
    let located = node.locate(&keys, LocateHint::none(), deadline()).await;
    assert_eq!(located.len(), keys.len());
    let item = |(key, located): (&ChunkKey, Result<Located, _>)| {
        let handle = located.ok().and_then(Located::present)?.handle;
        Some(LoadItem::new(*key, chunks.pool.reserve(LEN)?).with_handle(handle))
    };
    let items: Vec<LoadItem> = keys.iter().zip(located).filter_map(item).collect();
    let mut answered = vec![0; items.len()];
    let mut answers = node.load(items, deadline());
    while let Some((index, _)) = answers.next().await {
        answered[index] += 1;
    }
    assert!(answered.iter().all(|count| *count == 1), "{answered:?}");
}

fn session(peer: u8, incarnation: u8) -> Session {
    Session {
        peer: format!("peer-{peer}").parse().expect("a name"),
        incarnation: incarnation.into(),
    }
}

/// Returns keys of the committed frames, and of other frames of the same space.
fn key(n: u8) -> ChunkKey {
    ChunkKey {
        space: SpaceId::new([9; 16]),
        kv_rank: 1,
        group: 2,
        hash: ChunkHash::new([n; 32]),
    }
}

#[derive(Debug, Default)]
struct WireState {
    /// Incarnations of the peers that are connected.
    connected: HashMap<PeerId, u64>,
    /// Replies for the node's requests, the next one first.
    replies: VecDeque<Vec<u8>>,
}

impl WireState {
    fn disconnect(&mut self, session: &Session) {
        if self.connected.get(&session.peer) == Some(&session.incarnation) {
            self.connected.remove(&session.peer);
        }
    }
}

/// A channel whose peers reply with bytes of the input, and the number of existing grants.
#[derive(Debug, Default)]
struct Wire(Arc<Mutex<WireState>>, Arc<AtomicUsize>);

/// A grant that is counted until it is dropped.
#[derive(Debug)]
struct Counted(Arc<AtomicUsize>, Vec<SealedSlot>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
        self.1.clear();
    }
}

impl Link for Wire {
    type Grant = Counted;

    fn is_current(&self, session: &Session) -> bool {
        self.0.lock().connected.get(&session.peer) == Some(&session.incarnation)
    }

    fn data_plane(&self, _: &PeerId) -> DataPlane {
        DataPlane::Nixl
    }

    fn connect<'a>(
        &'a self,
        peer: &'a PeerId,
        _: &'a Address,
        _: Instant,
    ) -> BoxFuture<'a, Result<(), ConnectError>> {
        // Peers connect by themselves.
        let peer = peer.clone();
        Box::pin(std::future::ready(Err(ConnectError::Deadline { peer })))
    }

    fn disconnect<'a>(&'a self, _: &'a PeerId, _: Instant) -> BoxFuture<'a, ()> {
        Box::pin(std::future::ready(()))
    }

    fn request<'a>(
        &'a self,
        _: &'a PeerId,
        _: Vec<u8>,
        deadline: Instant,
    ) -> BoxFuture<'a, Result<Vec<u8>, TransferError>> {
        let reply = self.0.lock().replies.pop_front();
        Box::pin(async move {
            match reply {
                Some(reply) => Ok(reply),
                None => {
                    tokio::time::sleep_until(deadline.into()).await;
                    Err(TransferError::Deadline)
                }
            }
        })
    }

    fn grant(
        &self,
        _: &PeerId,
        slots: Vec<SealedSlot>,
    ) -> Result<(Vec<Index>, Counted), TransferError> {
        self.1.fetch_add(1, Ordering::Relaxed);
        let indices = (0..slots.len() as u64).map(|slot| Index::arena(1, slot));
        Ok((indices.collect(), Counted(Arc::clone(&self.1), slots)))
    }

    /// Answers with fewer slots than requested, with unwritten slots, or with slots of arbitrary bytes,
    /// depending on the peer's indices.
    fn read<'a>(
        &'a self,
        _: &'a PeerId,
        slots: Vec<ReservedSlot>,
        indices: &'a [Index],
        _: Instant,
    ) -> BoxFuture<'a, Filled> {
        let fill = |(slot, index): (ReservedSlot, &Index)| match index.to_bytes()[0] % 4 {
            0 => Some(Slot::Idle(slot)),
            1 => Some(Slot::Quarantined),
            2 => None,
            _ => Some(Slot::Written(slot.written())),
        };
        let slots = slots.into_iter().zip(indices).filter_map(fill).collect();
        let error = self.0.lock().replies.len() % 2 == 1;
        let error = error.then_some(TransferError::Deadline);
        Box::pin(std::future::ready(Filled {
            slots,
            error,
            by: DataPlane::Nixl,
        }))
    }
}

#[derive(Debug, Default)]
struct ShelfState {
    resident: HashMap<ChunkKey, (SealedSlot, u64)>,
    clears: Arc<Clears>,
}

/// The chunks of the node.
#[derive(Debug, Clone)]
struct Shelf {
    pool: Pool,
    events: Events,
    state: Arc<Mutex<ShelfState>>,
}

impl Shelf {
    fn new() -> Self {
        let arena = ArenaConfig::anonymous(32 * 4096).build();
        let arena = Arc::new(arena.expect("a test machine has some memory"));
        let pool = Pool::new(arena, PoolConfig::default()).expect("the defaults are valid");
        let chunk = |n: u8| {
            let mut slot = pool.reserve(LEN).expect("the pool holds them all");
            slot.bytes_mut().fill(n);
            let sum = checksum(slot.bytes_mut());
            (key(n), (slot.written().seal(), sum))
        };
        let state = ShelfState {
            resident: (1..=RESIDENT).map(chunk).collect(),
            clears: Arc::default(),
        };
        Self {
            pool,
            events: Events::default(),
            state: Arc::new(Mutex::new(state)),
        }
    }

    fn clear(&self) {
        self.state.lock().resident.clear();
    }
}

impl Host for Shelf {
    fn states(&self, keys: &[ChunkKey]) -> Vec<HostChunk> {
        let state = self.state.lock();
        let of = |key: &ChunkKey| match key.hash.as_bytes()[0] {
            _ if !state.resident.contains_key(key) => HostChunk::Absent,
            RESIDENT => HostChunk::Lower { len: LEN },
            _ => HostChunk::Memory { len: LEN },
        };
        keys.iter().map(of).collect()
    }

    fn lease<'a>(
        &'a self,
        keys: &'a [ChunkKey],
        promote_until: Instant,
    ) -> BoxFuture<'a, Vec<Option<HostLease>>> {
        Box::pin(async move {
            if keys.contains(&key(RESIDENT)) {
                tokio::time::sleep_until(promote_until.into()).await;
            }
            let state = self.state.lock();
            let lease = |key: &ChunkKey| {
                let (slot, checksum) = state.resident.get(key)?.clone();
                let lease: Box<dyn Any + Send> = Box::new(());
                Some(HostLease {
                    slot,
                    checksum: Some(checksum),
                    lease,
                })
            };
            keys.iter().map(lease).collect()
        })
    }

    fn list(&self, _: u128, _: usize) -> BoxFuture<'_, (Vec<ChunkKey>, Option<u128>)> {
        let keys = self.state.lock().resident.keys().copied().collect();
        Box::pin(std::future::ready((keys, None)))
    }

    fn clears(&self) -> Arc<Clears> {
        Arc::clone(&self.state.lock().clears)
    }

    fn clears_are_noted(&self) -> bool {
        true
    }

    fn learn(&self, clears: Clears, _: &'static str) -> BoxFuture<'_, Result<(), TooManyClears>> {
        Box::pin(async move {
            let mut state = self.state.lock();
            let mut joined = state.clears.as_ref().clone();
            if joined.join(&clears)? {
                state.clears = Arc::new(joined);
                state.resident.clear();
            }
            Ok(())
        })
    }

    fn promote<'a>(&'a self, _: &'a [ChunkKey], _: LocateHint) -> BoxFuture<'a, ()> {
        Box::pin(tokio::time::sleep(Duration::from_millis(5)))
    }

    fn receive<'a>(&'a self, run: ChunkRun, _: &'a str, _: Duration) -> BoxFuture<'a, Received> {
        Box::pin(async move {
            tokio::time::sleep(Duration::from_millis(5)).await;
            Received {
                chunks: run.keys.len() / 2,
                is_wanted: true,
            }
        })
    }

    fn events(&self) -> &Events {
        &self.events
    }

    fn spaces(&self) -> Vec<HostSpace> {
        Vec::new()
    }

    fn usage(&self) -> Usage {
        Usage::default()
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use proptest::prelude::*;

    use super::*;

    fn seeds() -> Vec<Vec<u8>> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds/peer");
        let entries = std::fs::read_dir(folder).expect("seeds are committed");
        let read = |entry: std::fs::DirEntry| std::fs::read(entry.path()).expect("a file");
        entries.map(|entry| read(entry.expect("a file"))).collect()
    }

    #[test]
    fn the_committed_seeds_break_no_rule() {
        let seeds = seeds();
        assert!(seeds.len() > 8, "{} seeds", seeds.len());
        for seed in &seeds {
            // A step without a request or a reply has a frame of kind 0.
            let mut rest = &seed[..];
            while let Some((_, frame)) = step(&mut rest) {
                let is_of_protocol =
                    Request::from_bytes(frame).is_ok() || Reply::from_bytes(frame).is_ok();
                assert!(
                    is_of_protocol || frame[..2] == [0; 2],
                    "an old frame: {frame:x?}"
                );
            }
            peer(seed);
        }
    }

    proptest! {
        /// Steps of the seeds in any order, some with a changed byte.
        #[test]
        fn no_sequence_of_frames_breaks_a_rule(
            order in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..24),
            changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        ) {
            let seeds = seeds();
            let frames: Vec<&[u8]> = seeds
                .iter()
                .flat_map(|seed| {
                    let mut rest = &seed[..];
                    std::iter::from_fn(move || Some(step(&mut rest)?.1)).collect::<Vec<_>>()
                })
                .collect();
            let mut data = Vec::new();
            for (frame, choice) in &order {
                data.push(*choice);
                data.extend_from_slice(frame.get::<&[u8]>(&frames));
            }
            for (at, byte) in changes {
                let at = at.index(data.len());
                data[at] = byte;
            }
            peer(&data);
        }
    }
}
