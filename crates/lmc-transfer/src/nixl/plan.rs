//! A batch: the memory that it is written from, and its cut into requests.

use std::ops::Range;
use std::sync::Arc;

use lmc_memory::SealedSlot;

use crate::lease::Pin;

/// Descriptors of one request at most: over TCP each costs about 10 µs.
pub(super) const REQUEST_PARTS: usize = 512;

/// Bytes that lie together on both sides; offsets in the arena, and in the peer's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TransferPart {
    pub(crate) local: u64,
    pub(crate) remote: u64,
    pub(crate) len: u64,
}

/// Keeps memory that is written from where it is, until nothing reads it any more.
#[derive(Debug, Default)]
pub(crate) struct Sources {
    pub(crate) pins: Vec<Pin>,
    pub(crate) objects: Vec<Arc<Vec<SealedSlot>>>,
}

/// A batch, cut up.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Plan {
    pub(super) parts: Vec<TransferPart>,
    /// Indices of the parts of each request.
    pub(super) requests: Vec<Range<usize>>,
}

impl Plan {
    /// Cuts objects into parts. Each object has its offset here, its offset there and its length in
    /// bytes.
    ///
    /// Neighbours on both sides become one part, because NIXL merges nothing and every
    /// descriptor costs it the same. No part crosses a border between two pieces of the arena that
    /// are registered by themselves, of `piece` bytes: NIXL refuses that.
    pub(super) fn new(objects: impl IntoIterator<Item = TransferPart>, piece: u64) -> Self {
        let mut plan = Self::default();
        for mut rest in objects {
            while rest.len > 0 {
                let parts = plan.requests.last().map_or(0, Range::len);
                let at_border = rest.local.is_multiple_of(piece);
                let follows = plan.parts.last().is_some_and(|last| follows(last, &rest));
                let joins = parts > 0 && follows && !at_border;
                if !joins && !(1..REQUEST_PARTS).contains(&parts) {
                    let end = plan.parts.len();
                    plan.requests.push(end..end);
                }
                let to_border = piece - rest.local % piece;
                let len = rest.len.min(to_border);
                match plan.parts.last_mut() {
                    Some(last) if joins => last.len += len,
                    _ => plan.parts.push(TransferPart { len, ..rest }),
                }
                rest = TransferPart {
                    local: rest.local + len,
                    remote: rest.remote + len,
                    len: rest.len - len,
                };
                let parts = plan.parts.len();
                let request = plan.requests.last_mut().expect("one was begun above");
                request.end = parts;
            }
        }
        plan
    }

    /// The parts of a request.
    pub(super) fn parts(&self, request: usize) -> &[TransferPart] {
        &self.parts[self.requests[request].clone()]
    }
}

fn follows(last: &TransferPart, next: &TransferPart) -> bool {
    last.local + last.len == next.local && last.remote + last.len == next.remote
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every byte of every object is moved once, to its offset.
    fn check(objects: &[TransferPart]) -> Plan {
        check_with(objects, 1 << 30)
    }

    fn check_with(objects: &[TransferPart], piece: u64) -> Plan {
        let plan = Plan::new(objects.iter().copied(), piece);
        let (mut object, mut at) = (0, 0);
        for index in 0..plan.requests.len() {
            let parts = plan.parts(index);
            assert!(!parts.is_empty() && parts.len() <= REQUEST_PARTS);
            for part in parts {
                assert_eq!(part.local / piece, (part.local + part.len - 1) / piece);
                let mut done = 0;
                while done < part.len {
                    let wanted = objects[object];
                    assert_eq!(part.local + done, wanted.local + at);
                    assert_eq!(part.remote + done, wanted.remote + at);
                    let len = (part.len - done).min(wanted.len - at);
                    (done, at) = (done + len, at + len);
                    if at == wanted.len {
                        (object, at) = (object + 1, 0);
                    }
                }
            }
        }
        assert_eq!((object, at), (objects.len(), 0));
        plan
    }

    fn part(local: u64, remote: u64, len: u64) -> TransferPart {
        TransferPart { local, remote, len }
    }

    #[test]
    fn neighbours_on_both_sides_are_one_part() {
        let plan = check(&[part(0, 100, 10), part(10, 110, 20), part(30, 200, 5)]);
        assert_eq!(plan.parts, [part(0, 100, 30), part(30, 200, 5)]);
        assert_eq!(plan.requests.len(), 1);
    }

    #[test]
    fn requests_are_bounded_in_descriptors_and_cut_at_borders() {
        let scattered: Vec<TransferPart> =
            (0..2000).map(|i| part(i * 8192, i * 8192, 4096)).collect();
        assert_eq!(check(&scattered).requests.len(), 4);
        let together: Vec<TransferPart> = (0..64)
            .map(|i| part(i << 20, (i << 20) + 4096, 1 << 20))
            .collect();
        let plan = check(&together);
        assert_eq!((plan.parts.len(), plan.requests.len()), (1, 1));
        let plan = check_with(&together, 4 << 20);
        assert_eq!((plan.parts.len(), plan.requests.len()), (16, 1));
    }

    #[test]
    fn a_batch_of_nothing_is_no_request() {
        assert_eq!(check(&[]), Plan::default());
    }

    #[test]
    fn random_batches_are_moved_whole() {
        let mut seed = 0x9E37_79B9_7F4A_7C15_u64;
        let mut next = move |below: u64| {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            seed % below
        };
        for _ in 0..50 {
            let (mut local, mut remote) = (0, 0);
            let objects: Vec<TransferPart> = (0..next(1500))
                .map(|_| {
                    local += next(2) * 4096;
                    remote += next(2) * 4096;
                    let most = if next(50) == 0 { 20 << 20 } else { 5000 };
                    let len = 1 + next(most);
                    let object = part(local, remote, len);
                    local += len;
                    remote += len;
                    object
                })
                .collect();
            check(&objects);
            check_with(&objects, 1 << 20);
        }
    }
}
