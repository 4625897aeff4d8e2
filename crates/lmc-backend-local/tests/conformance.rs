//! The tier behind the backend contract: exact with room, lossy without.

use std::sync::Arc;

use lmc_backend::conformance::{Conformance, Faults, Faulty, Guarantee};
use lmc_backend_local::{LocalConfig, LocalTier, PolicyKind};
use lmc_memory::{ArenaConfig, Pool, PoolConfig};

fn tier(bytes: u64, policy: PolicyKind) -> LocalTier {
    let arena = ArenaConfig::anonymous(bytes as usize).build().unwrap();
    let pool = Pool::new(Arc::new(arena), PoolConfig::default()).unwrap();
    LocalConfig::new(pool).with_policy(policy).build().unwrap()
}

#[test]
fn every_policy_is_exact_while_there_is_room() {
    for policy in PolicyKind::ALL {
        let kit = Conformance::new(Guarantee::Exact);
        let tier = tier(kit.bytes_needed(), policy);
        let tally = kit.run(&tier);
        assert!(
            tally.hits > 100 && tally.removed > 10,
            "{policy}: {tally:?}"
        );
        assert_eq!(tier.pool().usage().used, 0, "{policy}");
        assert_eq!(tier.stats().evicted(), 0, "{policy}");
    }
}

#[test]
fn every_policy_is_lossy_without_room() {
    for policy in PolicyKind::ALL {
        let kit = Conformance::new(Guarantee::Lossy);
        let tier = tier(kit.bytes_needed() / 4, policy);
        let tally = kit.run(&tier);
        assert!(tally.hits > 50, "{policy}: {tally:?}");
        let evicts = policy != PolicyKind::None;
        assert_eq!(
            tier.stats().evicted() > 10,
            evicts,
            "{policy}: {:?}",
            tier.stats()
        );
        assert_eq!(tier.usage().pool.used, 0, "{policy}");
    }
}

#[test]
fn faults_on_the_way_spoil_nothing() {
    for seed in 0..8 {
        let kit = Conformance::new(Guarantee::Lossy).with_seed(seed);
        let faulty = Faulty::new(tier(1 << 20, PolicyKind::Lru), Faults::some(), seed);
        let tally = kit.run(&faulty);
        assert!(tally.hits > 20 && tally.failures > 50, "{tally:?}");
        assert_eq!(faulty.inner().usage().pool.used, 0);
    }
}
