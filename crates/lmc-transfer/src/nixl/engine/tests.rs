//! The engine without a library: no agent is ever made, so transfers wait.

use std::pin::pin;
use std::sync::atomic::Ordering;
use std::task::{Context, Waker};

use lmc_memory::{ArenaConfig, Pool, PoolConfig};
use tokio::net::UnixStream;
use tokio::runtime;

use super::*;
use crate::nixl::agent::{NixlMemory, Setup};
use crate::nixl::link::Outgoing;
use crate::nixl::wire::{FETCH, agent_name};
use crate::session::{Opener, pair};
use crate::{Identity, ReadLease, Slot, net};

const PEER: u64 = 5;
const TAG: u64 = 7;
const LEN: u64 = 1000;

struct Bench {
    runtime: Runtime,
    engine: Engine,
    pool: Pool,
    peer: session::Remote,
}

/// The peer's end of a connection.
struct End {
    outgoing: Outgoing,
    opener: Opener,
    _socket: UnixStream,
}

impl End {
    fn hears(&mut self) -> Vec<Message> {
        self.outgoing.waiting(&mut self.opener)
    }
}

impl Bench {
    fn new(reads: NixlReads) -> Self {
        let runtime = runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.expect("a runtime");
        let arena = ArenaConfig::anonymous(1 << 20).build().expect("1 MiB");
        let pool = Pool::new(Arc::new(arena), PoolConfig::default()).expect("a pool");
        let arena = Arc::clone(pool.arena());
        let config = ChannelConfig::new("me".parse().expect("a name"), Arc::clone(&arena));
        let (commands, received) = Commands::new();
        let setup = Setup {
            arena: Arc::clone(&arena),
            memory: NixlMemory::Host,
            backend: "UCX".to_owned(),
            parameters: Vec::new(),
            piece: 1 << 30,
        };
        let engine = Engine {
            initiators: Initiators::new("me".to_owned(), setup, commands.clone()),
            commands,
            received,
            shared: Arc::default(),
            config,
            leases: Leases::new(1),
            piece: 1 << 30,
            reads,
            reach: Reach::of_this_process(),
            target: None,
            arena,
            exposures: Arc::default(),
            runtime: None,
            accepting: runtime.spawn(async {}).abort_handle(),
            state: State::default(),
        };
        let peer = session::Remote {
            id: "peer".parse().expect("a name"),
            incarnation: PEER,
            identity: Identity::generate().expect("random bytes").public(),
        };
        Self {
            runtime,
            engine,
            pool,
            peer,
        }
    }

    /// Connects the peer, over a connection of this number.
    fn join(&mut self, number: u64) -> End {
        let _entered = self.runtime.enter();
        let (ours, theirs) = UnixStream::pair().expect("two sockets");
        let ((sealer, _), (_, opener)) = pair();
        let (link, outgoing) = Link::new(number, &Arc::new(net::Socket::Unix(ours)), sealer);
        let intro = Intro {
            agent: agent_name("peer", PEER),
            metadata: Vec::new(),
            base: 1 << 40,
            len: 1 << 20,
            unit: 4096,
            piece: 1 << 30,
            gpu: None,
            reach: Reach::of_this_process(),
            open: false,
            writable: false,
        };
        let joined = self.engine.join(self.peer.clone(), &intro, link);
        joined.expect("nothing is in the way");
        End {
            outgoing,
            opener,
            _socket: theirs,
        }
    }

    fn lease(&self) -> ReadLease {
        let slot = self.pool.reserve(LEN).expect("capacity").written().seal();
        let config = &self.engine.config;
        let lease = self
            .engine
            .leases
            .grant_read(config, &self.peer.id, vec![slot], || Ok(PEER));
        lease.expect("it is connected")
    }

    /// Begins a receive for which the peer writes already.
    fn receives(
        &mut self,
        connection: u64,
        send: u64,
        deadline: Instant,
    ) -> oneshot::Receiver<Filled> {
        let (reply, filled) = oneshot::channel();
        self.engine.take(Command::Receive {
            slots: vec![self.pool.reserve(LEN).expect("capacity")],
            peer: self.peer.id.clone(),
            tag: TAG,
            deadline,
            reply,
        });
        let (tag, lens) = (TAG, vec![LEN]);
        self.engine
            .heard(connection, Message::Offer { send, tag, lens });
        filled
    }

    fn quarantined(mut filled: oneshot::Receiver<Filled>) {
        let filled = filled.try_recv().expect("it has ended");
        assert!(
            matches!(filled.slots[..], [Slot::Quarantined]),
            "{filled:?}"
        );
    }
}

fn range_of(lease: &ReadLease) -> Range {
    let index = lease.indices()[0];
    Range {
        region: Region::Lease(index.lease),
        slot: index.slot,
        offset: 0,
        len: LEN,
    }
}

fn is_ready(future: impl Future) -> bool {
    pin!(future)
        .poll(&mut Context::from_waker(Waker::noop()))
        .is_ready()
}

/// A peer is cut off by its network while it writes to a receive and reads under a lease. Those
/// slots stayed in quarantine for the life of the process, and each such cut took more of them.
#[test]
fn slots_of_a_peer_that_was_cut_off_come_back_with_it() {
    let mut bench = Bench::new(NixlReads::Direct);
    let far = Instant::now() + Duration::from_secs(3600);
    let mut end = bench.join(1);
    assert_eq!(end.hears(), [Message::Settled]);
    let filled = bench.receives(1, 1, far);
    let lease = bench.lease();
    let ranges = vec![range_of(&lease)];
    let (send, write) = (USE | 1, false);
    bench.engine.heard(
        1,
        Message::Use {
            send,
            write,
            ranges,
        },
    );

    let fault = "the network ends here".to_owned();
    bench.engine.link_down(1, &fault, LinkEnd::Unknown);
    Bench::quarantined(filled);
    assert!(!lease.stands());
    drop(lease);
    bench.engine.advance(far);
    let stranded = || bench.engine.shared.stranded.load(Ordering::Relaxed);
    assert_eq!((bench.pool.usage().slots, stranded()), (2, 2));

    // It is back. A receive that is given up before the peer has said that it is done with the
    // earlier ones stays in quarantine: the peer may write for that one now.
    let mut end = bench.join(2);
    let filled = bench.receives(2, 2, Instant::now());
    bench.engine.advance(Instant::now());
    Bench::quarantined(filled);
    assert_eq!(bench.pool.usage().slots, 3);
    bench.engine.heard(2, Message::Settled);
    bench.engine.advance(Instant::now());
    let usage = bench.pool.usage();
    assert_eq!(usage.slots, 3, "its last bytes may be on their way");
    bench.engine.advance(far);
    let usage = bench.pool.usage();
    assert_eq!((usage.slots, usage.quarantined_slots), (1, 1));
    assert_eq!(bench.engine.shared.stranded.load(Ordering::Relaxed), 0);
    let said = end.hears();
    assert_eq!(said.first(), Some(&Message::Settled), "{said:?}");
    let (done, idle, reason) = (0, true, None);
    bench.engine.heard(
        2,
        Message::Over {
            send: 2,
            done,
            idle,
            reason,
        },
    );
    assert_eq!(bench.pool.usage().slots, 0);
}

/// An owner served a read for up to ten minutes, from slots that were free again, where the
/// reader's word that it had given up was late or lost.
#[test]
fn a_read_is_served_from_pinned_slots_until_the_readers_deadline() {
    let mut bench = Bench::new(NixlReads::ByPeer);
    let mut end = bench.join(1);
    end.hears();
    let lease = bench.lease();
    let fetch = Message::Fetch {
        send: FETCH | 1,
        ranges: vec![range_of(&lease)],
        offsets: vec![0],
        millis: 60_000,
    };
    let heard = Instant::now();
    bench.engine.heard(1, fetch);
    let mut revoked = pin!(lease.revoke());
    bench.engine.advance(heard + Duration::from_secs(60));
    assert!(!is_ready(revoked.as_mut()), "the reader may still want it");
    bench
        .engine
        .advance(Instant::now() + Duration::from_secs(63));
    assert!(is_ready(revoked.as_mut()), "it has given up");
    let said = end.hears();
    let over = |message: &Message| {
        matches!(
            message,
            Message::Over {
                done: 0,
                idle: true,
                ..
            }
        )
    };
    assert!(said.iter().any(over), "{said:?}");

    // The other way round: a read says for how long it is wanted.
    let (reply, _filled) = oneshot::channel();
    let slots = vec![bench.pool.reserve(LEN).expect("capacity")];
    let batch = Batch::Read {
        slots,
        reply,
        send: None,
    };
    let index = Index {
        incarnation: PEER,
        lease: 1,
        slot: 0,
    };
    let deadline = Instant::now() + Duration::from_secs(3600);
    bench
        .engine
        .transfer(batch, &"peer".parse().expect("a name"), &[index], deadline);
    let said = end.hears();
    let [Message::Fetch { millis, .. }] = said[..] else {
        panic!("{said:?}");
    };
    assert!((3_000_000..=3_600_000).contains(&millis), "{millis}");
}
