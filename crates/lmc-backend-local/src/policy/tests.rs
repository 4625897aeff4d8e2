//! Every policy against what its queue must be, and each against what makes it itself.

use std::collections::BTreeSet;

use lmc_testkit::rounds;
use proptest::prelude::*;

use super::*;

struct Rig {
    policy: Box<dyn EvictionPolicy>,
    nodes: Nodes,
    now: u64,
}

impl Rig {
    fn new(kind: PolicyKind) -> Self {
        let mut nodes = Nodes::default();
        nodes.grow_to(1024);
        Self {
            policy: kind.build(),
            nodes,
            now: 0,
        }
    }

    fn insert(&mut self, id: u32) {
        self.now += 1;
        self.policy.insert(&mut self.nodes, id, id, self.now);
    }

    fn touch(&mut self, id: u32) {
        self.now += 1;
        self.policy.touch(&mut self.nodes, id, self.now);
    }

    fn evict(&mut self) -> Option<u32> {
        let id = self.policy.pop(&mut self.nodes)?;
        self.policy.evicted(&self.nodes, id, id);
        Some(id)
    }

    /// Inserts what is missing and touches what is there, with `capacity` entries at most.
    fn run(&mut self, capacity: usize, requests: impl IntoIterator<Item = u32>) -> usize {
        let mut resident = BTreeSet::new();
        let mut hits = 0;
        for id in requests {
            if resident.contains(&id) {
                hits += 1;
                self.touch(id);
                continue;
            }
            if resident.len() == capacity {
                resident.remove(&self.evict().expect("it is full"));
            }
            self.insert(id);
            resident.insert(id);
        }
        hits
    }
}

#[derive(Clone, Debug)]
enum Op {
    Insert(u32),
    Touch(u32),
    Remove(u32),
    Evict,
    PutBack,
    Revive,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (0..40_u32).prop_map(Op::Insert),
        4 => (0..40_u32).prop_map(Op::Touch),
        1 => (0..40_u32).prop_map(Op::Remove),
        2 => Just(Op::Evict),
        1 => Just(Op::PutBack),
        1 => Just(Op::Revive),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(rounds(100, 256) as u32))]

    /// After any operations, each queued entry that was not removed is popped exactly once, and an entry
    /// that was put back is popped next.
    #[test]
    fn nothing_is_lost_or_doubled(kind in 0..3_usize, ops in prop::collection::vec(op(), 0..400)) {
        let mut rig = Rig::new(PolicyKind::ALL[kind]);
        let mut queued = BTreeSet::new();
        for op in ops {
            match op {
                Op::Insert(id) => if queued.insert(id) { rig.insert(id) },
                Op::Touch(id) => if queued.contains(&id) { rig.touch(id) },
                Op::Remove(id) => if queued.remove(&id) { rig.policy.remove(&mut rig.nodes, id) },
                Op::Evict => match rig.evict() {
                    Some(id) => prop_assert!(queued.remove(&id)),
                    None => prop_assert!(queued.is_empty()),
                },
                Op::PutBack => if let Some(id) = rig.policy.pop(&mut rig.nodes) {
                    rig.policy.put_back(&mut rig.nodes, id);
                    prop_assert_eq!(rig.policy.pop(&mut rig.nodes), Some(id));
                    rig.policy.put_back(&mut rig.nodes, id);
                },
                Op::Revive => if let Some(id) = rig.policy.pop(&mut rig.nodes) {
                    rig.now += 1;
                    rig.policy.revive(&mut rig.nodes, id, rig.now);
                },
            }
            let coldest = rig.policy.coldest(&rig.nodes);
            prop_assert_eq!(coldest.is_some(), !queued.is_empty());
        }
        while let Some(id) = rig.evict() {
            prop_assert!(queued.remove(&id));
        }
        prop_assert!(queued.is_empty());
    }

    /// LRU is the textbook's.
    #[test]
    fn lru_evicts_what_was_used_longest_ago(ops in prop::collection::vec(0..30_u32, 0..300)) {
        let mut rig = Rig::new(PolicyKind::Lru);
        let mut model: Vec<u32> = Vec::new();
        for id in ops {
            match model.iter().position(|&other| other == id) {
                Some(at) => {
                    model.remove(at);
                    rig.touch(id);
                }
                None => {
                    if model.len() == 10 {
                        prop_assert_eq!(rig.evict(), Some(model.remove(0)));
                    }
                    rig.insert(id);
                }
            }
            model.push(id);
        }
    }
}

#[test]
fn a_batch_is_evicted_from_its_tail() {
    for kind in [PolicyKind::Lru, PolicyKind::S3Fifo, PolicyKind::Arc] {
        let mut rig = Rig::new(kind);
        // Index 0 is the head; batches come from the tail.
        (0..8).rev().for_each(|id| rig.insert(id));
        assert_eq!(rig.evict(), Some(7), "{kind}");
        (0..4).rev().for_each(|id| rig.touch(id));
        let order: Vec<_> = std::iter::from_fn(|| rig.evict()).collect();
        assert_eq!(order, [6, 5, 4, 3, 2, 1, 0], "{kind}");
    }
}

/// Twenty chunks in use and a scan through hundreds: LRU loses the twenty, the others do not.
#[test]
fn a_scan_does_not_flush_what_is_in_use() {
    let requests = || {
        let hot = (0..20).chain(0..20);
        let mixed = (0..900_u32).flat_map(|n| [100 + n, n % 20]);
        // Between two uses of a hot chunk lie 39 other requests.
        hot.chain(mixed)
    };
    let hits = |kind| Rig::new(kind).run(30, requests());
    let (lru, s3_fifo, arc) = (
        hits(PolicyKind::Lru),
        hits(PolicyKind::S3Fifo),
        hits(PolicyKind::Arc),
    );
    assert!(lru < 50, "{lru}");
    assert!(s3_fifo > 850, "{s3_fifo}");
    assert!(arc > 850, "{arc}");
}

#[test]
fn what_comes_back_soon_is_remembered() {
    for kind in [PolicyKind::S3Fifo, PolicyKind::Arc] {
        let mut rig = Rig::new(kind);
        // A main queue of 20, so that there is a memory of 20.
        (0..20).for_each(|id| rig.insert(id));
        (0..20).for_each(|id| rig.touch(id));
        (20..40).for_each(|id| rig.insert(id));
        let gone = rig.evict().expect("it is full");
        rig.insert(gone);
        let next: Vec<_> = (0..5).filter_map(|_| rig.evict()).collect();
        assert!(
            !next.contains(&gone),
            "{kind}: {gone} was taken for new: {next:?}"
        );
    }
}
