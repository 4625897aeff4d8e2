//! The owner's leases beside a model: bounds, expiry, sessions.

use std::time::{Duration, Instant};

use lmc_backend_p2p::{Busy, LeaseTable, OwnerLimits, Session};
use lmc_key::{ChunkHash, ChunkKey, SpaceId};
use proptest::prelude::*;

const CHUNK: u64 = 10;

fn session(n: u64) -> Session {
    Session {
        peer: format!("peer-{}", n % 2).parse().expect("a name"),
        incarnation: n / 2,
    }
}

fn key(n: u8) -> ChunkKey {
    ChunkKey {
        space: SpaceId::new([0; 16]),
        kv_rank: 0,
        group: 0,
        hash: ChunkHash::new([n; 32]),
    }
}

#[derive(Debug, Clone)]
enum Op {
    Lease { session: u64, chunks: u8, ms: u64 },
    Renew { session: u64, lease: u64, ms: u64 },
    Release { session: u64, lease: u64 },
    EndSession { session: u64 },
    Expire,
    Wait { ms: u64 },
}

fn op() -> impl Strategy<Value = Op> {
    let session = 0u64..4;
    let lease = 1u64..12;
    prop_oneof![
        4 => (session.clone(), 1u8..6, 1u64..200).prop_map(|(session, chunks, ms)| Op::Lease { session, chunks, ms }),
        2 => (session.clone(), lease.clone(), 1u64..200).prop_map(|(session, lease, ms)| Op::Renew { session, lease, ms }),
        3 => (session.clone(), lease).prop_map(|(session, lease)| Op::Release { session, lease }),
        1 => session.prop_map(|session| Op::EndSession { session }),
        1 => Just(Op::Expire),
        3 => (1u64..150).prop_map(|ms| Op::Wait { ms }),
    ]
}

/// A lease of the model.
#[derive(Debug, Clone)]
struct Model {
    number: u64,
    session: u64,
    chunks: u64,
    until: Instant,
    latest: Instant,
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn leases_are_those_of_a_model(ops in proptest::collection::vec(op(), 1..60)) {
        let mut limits = OwnerLimits::for_pool(0);
        (limits.bytes, limits.peer_bytes, limits.peer_leases) = (12 * CHUNK, 6 * CHUNK, 3);
        (limits.lease_bytes, limits.age) = (4 * CHUNK, Duration::from_millis(180));
        limits.duration = Duration::from_millis(100);
        let mut owner: LeaseTable<u64> = LeaseTable::new(limits);
        let mut now = Instant::now();
        let mut model: Vec<Model> = Vec::new();
        for op in ops {
            match op {
                Op::Lease { session: n, chunks, ms } => {
                    let lens = vec![CHUNK; chunks.into()];
                    let (admitted, busy) = owner.admit(&session(n), &lens, now);
                    let its = model.iter().filter(|lease| lease.session == n);
                    let (all, own): (u64, u64) = (
                        model.iter().map(|lease| lease.chunks).sum(),
                        its.clone().map(|lease| lease.chunks).sum(),
                    );
                    let left = match its.count() {
                        3 => 0,
                        _ => (12 - all).min(6 - own).min(4),
                    };
                    prop_assert_eq!(admitted as u64, left.min(chunks.into()));
                    prop_assert_eq!(busy.is_some(), left < chunks.into());
                    if admitted == 0 {
                        continue;
                    }
                    let granted = (0..admitted as u8).map(|n| (key(n), CHUNK)).collect();
                    let duration = Duration::from_millis(ms);
                    let (number, given) = owner.grant(session(n), granted, duration, ms, now);
                    prop_assert_eq!(given, duration.min(Duration::from_millis(100)));
                    prop_assert!(model.iter().all(|lease| lease.number < number));
                    model.push(Model { number, session: n, chunks: admitted as u64, until: now + given, latest: now + Duration::from_millis(180) });
                }
                Op::Renew { session: n, lease, ms } => {
                    let renewed = owner.renew(&session(n), lease, Duration::from_millis(ms), now);
                    let known = model.iter_mut().find(|one| one.number == lease && one.session == n);
                    let until = now + Duration::from_millis(ms.min(100));
                    let standing = known.filter(|one| one.until > now && until <= one.latest);
                    prop_assert_eq!(renewed, standing.is_some());
                    if let Some(lease) = standing {
                        lease.until = lease.until.max(until);
                    }
                }
                Op::Release { session: n, lease } => {
                    let released = owner.release(&session(n), lease, now);
                    let at = model.iter().position(|one| one.number == lease && one.session == n);
                    let ended = at.map(|at| model.remove(at));
                    let held = ended.filter(|lease| lease.until > now);
                    prop_assert_eq!(released.map(|(_, keys)| keys.len() as u64), held.map(|one| one.chunks));
                }
                Op::EndSession { session: n } => {
                    let ended = owner.end_session(&session(n)).len();
                    let before = model.len();
                    model.retain(|lease| lease.session != n);
                    prop_assert_eq!(ended, before - model.len());
                }
                Op::Expire => {
                    let ended = owner.expire(now).len();
                    let before = model.len();
                    model.retain(|lease| lease.until > now);
                    prop_assert_eq!(ended, before - model.len());
                }
                Op::Wait { ms } => now += Duration::from_millis(ms),
            }
            prop_assert_eq!(owner.len(), model.len());
            prop_assert_eq!(owner.bytes(), model.iter().map(|lease| lease.chunks * CHUNK).sum::<u64>());
            prop_assert_eq!(owner.next_expiry(), model.iter().map(|lease| lease.until).min());
        }
    }
}

#[test]
fn peers_lease_no_faster_than_they_may() {
    let mut limits = OwnerLimits::for_pool(1 << 30);
    limits.bytes_per_second = Some(100 * CHUNK);
    let mut owner: LeaseTable<()> = LeaseTable::new(limits);
    let begun = Instant::now();
    let (mut leased, mut now) = (0, begun);
    while now < begun + Duration::from_secs(10) {
        let (admitted, busy) = owner.admit(&session(0), &[CHUNK; 8], now);
        assert!(
            admitted == 8 || busy == Some(Busy::Rate),
            "{admitted} {busy:?}"
        );
        if admitted > 0 {
            let chunks = vec![(key(0), CHUNK); admitted];
            let (lease, _) = owner.grant(session(0), chunks, Duration::from_secs(1), (), now);
            owner.release(&session(0), lease, now).expect("it stands");
            leased += admitted;
        }
        now += Duration::from_millis(7);
    }
    // One second's worth at once, and then the rate.
    assert!((1000..=1110).contains(&leased), "{leased}");
}

#[test]
fn a_chunk_above_the_bound_is_leased_alone() {
    let mut owner: LeaseTable<()> = LeaseTable::new(OwnerLimits::for_pool(8));
    let now = Instant::now();
    assert_eq!(
        owner.admit(&session(0), &[100, 1], now),
        (1, Some(Busy::Pool))
    );
    let second = Duration::from_secs(1);
    owner.grant(session(0), vec![(key(0), 100)], second, (), now);
    assert_eq!(owner.admit(&session(1), &[1], now), (0, Some(Busy::Pool)));
}
