//! Two-level segregated fit over a range of units, with all metadata outside the range.
//!
//! Free ranges are in lists by size class: each power of two is divided into 16 classes. Two bitmaps find a
//! non-empty class that is large enough with two bit scans, so that taking and freeing are O(1), whatever the
//! number of slots. Adjacent free ranges are joined on free.

/// The index that stands for no node.
const NIL: u32 = u32::MAX;
/// Value of [`Node::link_prev`] in a node that is handed out.
const TAKEN: u32 = u32::MAX - 1;
/// Value of [`Node::link_prev`] in an unused node.
const VACANT: u32 = u32::MAX - 2;

/// Base-2 logarithm of the number of classes in a power of two.
const STEP_BITS: u32 = 4;
const STEPS: usize = 1 << STEP_BITS;
/// Number of powers of two in a `u32` size.
const LEVELS: usize = 32;
/// Ranges of the exact class that are examined before a larger class is used.
const PROBES: usize = 8;
/// Ranges of a class that are examined as a last resort or for a report.
const LAST_PROBES: usize = 64;
/// Nodes of one block of storage.
const NODES: usize = 1024;

/// One range of units: free, or handed out.
#[derive(Clone, Copy, Debug)]
struct Node {
    offset: u32,
    size: u32,
    /// Nodes of the adjacent ranges by address.
    before: u32,
    after: u32,
    /// Neighbours in the list of the size class, or a state.
    link_prev: u32,
    link_next: u32,
}

/// The allocator. Sizes and offsets are in units.
#[derive(Debug)]
pub(super) struct SegregatedFit {
    levels: u32,
    steps: [u16; LEVELS],
    heads: [[u32; STEPS]; LEVELS],
    /// Blocks of nodes: growing never moves a node, and wastes at most one block.
    nodes: Vec<Box<[Node; NODES]>>,
    made: u32,
    vacant: u32,
    free_units: u32,
}

/// Returns the class of free ranges of `size`.
fn class_of(size: u32) -> (usize, usize) {
    let level = size.ilog2();
    let step = if level >= STEP_BITS {
        (size >> (level - STEP_BITS)) & (STEPS as u32 - 1)
    } else {
        // Below 16 units each size has a class of its own.
        (size << (STEP_BITS - level)) & (STEPS as u32 - 1)
    };
    (level as usize, step as usize)
}

/// Returns the lowest class whose ranges all have at least `size`; `None` beyond the last class.
fn class_above(size: u32) -> Option<(usize, usize)> {
    let level = size.ilog2();
    if level < STEP_BITS {
        return Some(class_of(size));
    }
    let step = 1u32 << (level - STEP_BITS);
    size.checked_add(step - 1).map(class_of)
}

impl SegregatedFit {
    /// Makes an allocator over `units` free units, at most `u32::MAX - 1`.
    pub(super) fn new(units: u32) -> Self {
        let mut fit = Self {
            levels: 0,
            steps: [0; LEVELS],
            heads: [[NIL; STEPS]; LEVELS],
            nodes: Vec::new(),
            made: 0,
            vacant: NIL,
            free_units: 0,
        };
        let node = fit.make_node(Node {
            offset: 0,
            size: units,
            before: NIL,
            after: NIL,
            link_prev: NIL,
            link_next: NIL,
        });
        fit.link(node);
        fit
    }

    fn at(&self, node: u32) -> &Node {
        &self.nodes[node as usize / NODES][node as usize % NODES]
    }

    fn at_mut(&mut self, node: u32) -> &mut Node {
        &mut self.nodes[node as usize / NODES][node as usize % NODES]
    }

    fn make_node(&mut self, value: Node) -> u32 {
        let node = if self.vacant == NIL {
            if self.made as usize == self.nodes.len() * NODES {
                let empty = Node {
                    offset: 0,
                    size: 0,
                    before: NIL,
                    after: NIL,
                    link_prev: VACANT,
                    link_next: NIL,
                };
                self.nodes.push(Box::new([empty; NODES]));
            }
            self.made += 1;
            self.made - 1
        } else {
            let node = self.vacant;
            self.vacant = self.at(node).link_next;
            node
        };
        *self.at_mut(node) = value;
        node
    }

    fn drop_node(&mut self, node: u32) {
        let vacant = self.vacant;
        let slot = self.at_mut(node);
        slot.link_prev = VACANT;
        slot.link_next = vacant;
        self.vacant = node;
    }

    /// Adds a free range at the head of its class: the range freed last is used first, because its bytes may
    /// still be in a CPU cache.
    fn link(&mut self, node: u32) {
        let size = self.at(node).size;
        let (level, step) = class_of(size);
        let head = self.heads[level][step];
        let this = self.at_mut(node);
        this.link_prev = NIL;
        this.link_next = head;
        if head != NIL {
            self.at_mut(head).link_prev = node;
        }
        self.heads[level][step] = node;
        self.steps[level] |= 1 << step;
        self.levels |= 1 << level;
        self.free_units += size;
    }

    fn unlink(&mut self, node: u32) {
        let Node {
            size,
            link_prev,
            link_next,
            ..
        } = *self.at(node);
        let (level, step) = class_of(size);
        if link_prev == NIL {
            self.heads[level][step] = link_next;
            if link_next == NIL {
                self.steps[level] &= !(1 << step);
                if self.steps[level] == 0 {
                    self.levels &= !(1 << level);
                }
            }
        } else {
            self.at_mut(link_prev).link_next = link_next;
        }
        if link_next != NIL {
            self.at_mut(link_next).link_prev = link_prev;
        }
        self.free_units -= size;
    }

    /// Examines the first `probes` ranges of the class of `size`.
    fn probe(&self, size: u32, probes: usize) -> Option<u32> {
        let (level, step) = class_of(size);
        let mut node = self.heads[level][step];
        for _ in 0..probes {
            if node == NIL {
                return None;
            }
            let Node {
                size: found,
                link_next,
                ..
            } = *self.at(node);
            if found >= size {
                return Some(node);
            }
            node = link_next;
        }
        None
    }

    /// Finds a free range of at least `size` units.
    fn find(&self, size: u32) -> Option<u32> {
        // Caches have few sizes, so the exact class nearly always has a range that was freed by a slot of the
        // same size; taking it leaves no remainder.
        if let Some(node) = self.probe(size, PROBES) {
            return Some(node);
        }
        if let Some((level, step)) = class_above(size) {
            let here = self.steps[level] & (u16::MAX << step);
            if here != 0 {
                return Some(self.heads[level][here.trailing_zeros() as usize]);
            }
            let above = if level + 1 < LEVELS {
                self.levels & (u32::MAX << (level + 1))
            } else {
                0
            };
            if above != 0 {
                let level = above.trailing_zeros() as usize;
                return Some(self.heads[level][self.steps[level].trailing_zeros() as usize]);
            }
        }
        self.probe(size, LAST_PROBES)
    }

    /// Takes `size` units. Returns the node and its offset, or `None`.
    pub(super) fn take(&mut self, size: u32) -> Option<(u32, u32)> {
        if size == 0 {
            return None;
        }
        let node = self.find(size)?;
        self.unlink(node);
        let Node {
            offset,
            size: found,
            after,
            ..
        } = *self.at(node);
        self.at_mut(node).link_prev = TAKEN;
        if found > size {
            let rest = self.make_node(Node {
                offset: offset + size,
                size: found - size,
                before: node,
                after,
                link_prev: NIL,
                link_next: NIL,
            });
            if after != NIL {
                self.at_mut(after).before = rest;
            }
            let this = self.at_mut(node);
            this.after = rest;
            this.size = size;
            self.link(rest);
        }
        Some((node, offset))
    }

    /// Frees a node and joins it with free neighbours. Returns the node's units.
    pub(super) fn give(&mut self, node: u32) -> u32 {
        let Node {
            mut offset,
            mut size,
            mut before,
            mut after,
            link_prev,
            ..
        } = *self.at(node);
        assert_eq!(
            link_prev, TAKEN,
            "a node is given back once, by the slot that holds it"
        );
        let freed = size;
        if before != NIL && self.at(before).link_prev != TAKEN {
            self.unlink(before);
            let joined = *self.at(before);
            offset = joined.offset;
            size += joined.size;
            self.drop_node(before);
            before = joined.before;
        }
        if after != NIL && self.at(after).link_prev != TAKEN {
            self.unlink(after);
            let joined = *self.at(after);
            size += joined.size;
            self.drop_node(after);
            after = joined.after;
        }
        if before != NIL {
            self.at_mut(before).after = node;
        }
        if after != NIL {
            self.at_mut(after).before = node;
        }
        *self.at_mut(node) = Node {
            offset,
            size,
            before,
            after,
            link_prev: NIL,
            link_next: NIL,
        };
        self.link(node);
        freed
    }

    /// Returns the number of free units.
    pub(super) fn free_units(&self) -> u32 {
        self.free_units
    }

    /// Returns the units of a range that is handed out.
    pub(super) fn units_of(&self, node: u32) -> u32 {
        self.at(node).size
    }

    /// Returns the size of the largest free range, as far as [`LAST_PROBES`] ranges of the top class show it.
    pub(super) fn largest_free(&self) -> u32 {
        if self.levels == 0 {
            return 0;
        }
        let level = self.levels.ilog2() as usize;
        let step = self.steps[level].ilog2() as usize;
        let mut node = self.heads[level][step];
        let mut largest = 0;
        for _ in 0..LAST_PROBES {
            if node == NIL {
                break;
            }
            largest = largest.max(self.at(node).size);
            node = self.at(node).link_next;
        }
        largest
    }

    /// Returns the heap bytes of the metadata.
    #[cfg(test)]
    pub(super) fn heap_bytes(&self) -> usize {
        self.nodes.len() * size_of::<[Node; NODES]>() + self.nodes.capacity() * size_of::<usize>()
    }

    /// Walks every range by address and checks all invariants.
    #[cfg(test)]
    pub(super) fn check(&self, units: u32) {
        let is_first = |n: &u32| {
            let node = self.at(*n);
            node.link_prev != VACANT && node.before == NIL
        };
        let first: Vec<u32> = (0..self.made).filter(is_first).collect();
        assert_eq!(first.len(), 1, "one range starts the address space");
        let (mut node, mut before, mut offset, mut free) = (first[0], NIL, 0, 0);
        let mut free_before = false;
        while node != NIL {
            let here = self.at(node);
            assert_eq!((here.offset, here.before), (offset, before));
            assert!(here.size > 0);
            let is_free = here.link_prev != TAKEN;
            assert!(!(is_free && free_before), "free neighbours are joined");
            if is_free {
                free += here.size;
            }
            (free_before, before, offset, node) = (is_free, node, offset + here.size, here.after);
        }
        assert_eq!((offset, free), (units, self.free_units));
        for level in 0..LEVELS {
            assert_eq!(self.levels >> level & 1 == 1, self.steps[level] != 0);
            for step in 0..STEPS {
                let head = self.heads[level][step];
                assert_eq!(self.steps[level] >> step & 1 == 1, head != NIL);
                let mut node = head;
                while node != NIL {
                    assert_eq!(class_of(self.at(node).size), (level, step));
                    node = self.at(node).link_next;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The smallest size of a class.
    fn floor_of((level, step): (usize, usize)) -> u64 {
        ((STEPS + step) as u64) << level >> STEP_BITS
    }

    #[test]
    fn a_class_holds_its_sizes_and_the_class_above_holds_every_larger_one() {
        let around = |bit: u32| [(31u32 << bit) - 1, 31 << bit, (31 << bit) + 1];
        for size in (1..5000).chain((8..27).flat_map(around)) {
            assert!(floor_of(class_of(size)) <= u64::from(size));
            assert!(floor_of(class_of(size)) * 17 > u64::from(size) * 16 || size < 16);
            let above = class_above(size).unwrap();
            assert!(floor_of(above) >= u64::from(size), "{size}");
            assert!(
                floor_of(above) * 16 <= u64::from(size) * 17 || size < 16,
                "{size}"
            );
        }
        for size in 1..16 {
            assert_eq!(floor_of(class_of(size)), u64::from(size));
        }
        assert_eq!(class_above(u32::MAX - 1), None);
    }

    #[test]
    fn equal_sizes_fill_the_range_to_the_last_unit_again_and_again() {
        let mut fit = SegregatedFit::new(17 * 1000 + 16);
        for _ in 0..3 {
            let taken: Vec<_> = (0..1000).map(|_| fit.take(17).unwrap()).collect();
            assert_eq!(fit.take(17), None);
            assert_eq!(fit.free_units(), 16);
            // Every second first, so that the range is as fragmented as it gets.
            for (node, _) in taken.iter().step_by(2) {
                fit.give(*node);
            }
            assert_eq!(fit.largest_free(), 17);
            let again: Vec<_> = (0..500).map(|_| fit.take(17).unwrap()).collect();
            assert_eq!(fit.take(17), None);
            for (node, _) in taken.iter().skip(1).step_by(2).chain(&again) {
                fit.give(*node);
            }
            fit.check(17 * 1000 + 16);
            assert_eq!(fit.largest_free(), 17 * 1000 + 16);
        }
    }

    #[test]
    fn the_whole_range_can_be_one_slot() {
        for units in [1, 2, 15, 16, 17, 31, 33, 1000, u32::MAX - 1] {
            let mut fit = SegregatedFit::new(units);
            let (node, offset) = fit.take(units).unwrap();
            assert_eq!((offset, fit.largest_free()), (0, 0));
            assert_eq!(fit.take(1), None);
            assert_eq!(fit.give(node), units);
            fit.check(units);
        }
    }

    #[test]
    #[should_panic(expected = "given back once")]
    fn giving_twice_is_caught() {
        let mut fit = SegregatedFit::new(10);
        let (node, _) = fit.take(3).unwrap();
        fit.give(node);
        fit.give(node);
    }

    #[derive(Clone, Debug)]
    enum Step {
        Take(u32),
        Give(prop::sample::Index),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let size = prop_oneof![1..8u32, 1..200u32, Just(16), Just(17)];
        let step = prop_oneof![
            3 => size.prop_map(Step::Take),
            2 => any::<prop::sample::Index>().prop_map(Step::Give),
        ];
        prop::collection::vec(step, 0..200)
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: if cfg!(miri) { 4 } else { 256 },
            failure_persistence: None,
            ..ProptestConfig::default()
        })]

        /// The model is the set of ranges handed out.
        #[test]
        fn agrees_with_a_set_of_ranges(units in 1..2000u32, steps in steps()) {
            let mut fit = SegregatedFit::new(units);
            let mut held: Vec<(u32, u32, u32)> = Vec::new();
            for step in steps {
                match step {
                    Step::Take(size) => {
                        let free = fit.free_units();
                        if let Some((node, offset)) = fit.take(size) {
                            prop_assert!(offset + size <= units);
                            for &(_, o, s) in &held {
                                prop_assert!(offset + size <= o || o + s <= offset);
                            }
                            prop_assert_eq!(fit.free_units(), free - size);
                            held.push((node, offset, size));
                        } else {
                            // Only what is fragmented or hidden within one class is refused.
                            prop_assert!(fit.largest_free() < size + size.div_ceil(16));
                        }
                    }
                    Step::Give(index) if !held.is_empty() => {
                        let (node, _, size) = held.swap_remove(index.index(held.len()));
                        prop_assert_eq!(fit.give(node), size);
                    }
                    Step::Give(_) => {}
                }
                fit.check(units);
            }
            for (node, ..) in held {
                fit.give(node);
            }
            fit.check(units);
            prop_assert_eq!((fit.free_units(), fit.largest_free()), (units, units));
        }
    }
}
