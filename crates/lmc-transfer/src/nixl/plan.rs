//! Cuts a batch into requests.

use std::ops::Range;

/// Bytes of one request at most. NIXL copies inside a call where it goes through shared memory,
/// so this bounds for how long a small transfer waits behind a large one.
pub(super) const REQUEST_BYTES: u64 = 8 << 20;
/// Descriptors of one request at most: over TCP each costs about 10 µs.
pub(super) const REQUEST_PARTS: usize = 512;

/// Bytes that lie together on both sides; offsets in the arenas.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) local: u64,
    pub(super) remote: u64,
    pub(super) len: u64,
}

/// The parts that one request moves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Piece {
    /// Indices of the plan's parts.
    pub(super) parts: Range<usize>,
    /// Objects of which it moves bytes.
    pub(super) objects: Range<usize>,
}

/// A batch, cut up.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Plan {
    pub(super) parts: Vec<Part>,
    pub(super) pieces: Vec<Piece>,
}

impl Plan {
    /// Cuts objects, each with its offset here, its offset there and its length in bytes.
    ///
    /// Neighbours on both sides become one part, because NIXL merges nothing and every
    /// descriptor costs it the same. No part crosses a border between two pieces of memory that
    /// are registered by themselves, of `here` and `there` bytes each: NIXL refuses that.
    pub(super) fn new(objects: impl Iterator<Item = Part>, here: u64, there: u64) -> Self {
        let mut plan = Self::default();
        // Bytes of the last piece.
        let mut bytes = 0;
        for (object, mut rest) in objects.enumerate() {
            while rest.len > 0 {
                let parts = plan.pieces.last().map_or(0, |piece| piece.parts.len());
                let fits = parts > 0 && bytes < REQUEST_BYTES;
                let at_border =
                    rest.local.is_multiple_of(here) || rest.remote.is_multiple_of(there);
                let follows = plan.parts.last().is_some_and(|last| follows(last, &rest));
                let joins = fits && follows && !at_border;
                if !(joins || fits && parts < REQUEST_PARTS) {
                    let end = plan.parts.len();
                    plan.pieces.push(Piece {
                        parts: end..end,
                        objects: object..object,
                    });
                    bytes = 0;
                }
                let to_border = (here - rest.local % here).min(there - rest.remote % there);
                let len = rest.len.min(REQUEST_BYTES - bytes).min(to_border);
                match plan.parts.last_mut() {
                    Some(last) if joins => last.len += len,
                    _ => plan.parts.push(Part { len, ..rest }),
                }
                bytes += len;
                rest = Part {
                    local: rest.local + len,
                    remote: rest.remote + len,
                    len: rest.len - len,
                };
                let parts = plan.parts.len();
                let piece = plan.pieces.last_mut().expect("one was begun above");
                piece.parts.end = parts;
                piece.objects.end = object + 1;
            }
        }
        plan
    }

    /// The parts of a piece.
    pub(super) fn parts(&self, piece: usize) -> &[Part] {
        &self.parts[self.pieces[piece].parts.clone()]
    }
}

fn follows(last: &Part, next: &Part) -> bool {
    last.local + last.len == next.local && last.remote + last.len == next.remote
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every byte of every object is moved once, to its offset, by a piece that names the object.
    fn check(objects: &[Part]) -> Plan {
        check_with(objects, 1 << 30, 1 << 30)
    }

    fn check_with(objects: &[Part], here: u64, there: u64) -> Plan {
        let plan = Plan::new(objects.iter().copied(), here, there);
        for part in &plan.parts {
            let crosses = |start: u64, piece: u64| start / piece != (start + part.len - 1) / piece;
            assert!(!crosses(part.local, here) && !crosses(part.remote, there));
        }
        let mut at = vec![0; objects.len()];
        for index in 0..plan.pieces.len() {
            let piece = &plan.pieces[index];
            let parts = plan.parts(index);
            assert!(!parts.is_empty() && parts.len() <= REQUEST_PARTS);
            assert!(parts.iter().map(|part| part.len).sum::<u64>() <= REQUEST_BYTES);
            let mut object = piece.objects.start;
            for part in parts {
                let mut rest = *part;
                while rest.len > 0 {
                    while at[object] == objects[object].len {
                        object += 1;
                    }
                    assert!(piece.objects.contains(&object));
                    let wanted = objects[object];
                    assert_eq!(rest.local, wanted.local + at[object]);
                    assert_eq!(rest.remote, wanted.remote + at[object]);
                    let len = rest.len.min(wanted.len - at[object]);
                    at[object] += len;
                    rest = Part {
                        local: rest.local + len,
                        remote: rest.remote + len,
                        len: rest.len - len,
                    };
                }
            }
            assert!(object < piece.objects.end);
        }
        let lens: Vec<u64> = objects.iter().map(|object| object.len).collect();
        assert_eq!(at, lens);
        plan
    }

    fn part(local: u64, remote: u64, len: u64) -> Part {
        Part { local, remote, len }
    }

    #[test]
    fn neighbours_on_both_sides_are_one_part() {
        let plan = check(&[part(0, 100, 10), part(10, 110, 20), part(30, 200, 5)]);
        assert_eq!(plan.parts, [part(0, 100, 30), part(30, 200, 5)]);
        assert_eq!(plan.pieces.len(), 1);
    }

    #[test]
    fn requests_are_bounded_in_bytes_and_descriptors() {
        let plan = check(&[
            part(0, 0, 3 * REQUEST_BYTES + 1),
            part((1 << 40) + 1, (1 << 41) + 1, 7),
        ]);
        assert_eq!(plan.pieces.len(), 4);
        assert_eq!(plan.pieces[3].objects, 0..2);
        let scattered: Vec<Part> = (0..2000).map(|i| part(i * 8192, i * 8192, 4096)).collect();
        assert_eq!(check(&scattered).pieces.len(), 4);
        let together: Vec<Part> = (0..64)
            .map(|i| part(i << 20, (i << 20) + 4096, 1 << 20))
            .collect();
        let plan = check(&together);
        assert_eq!((plan.parts.len(), plan.pieces.len()), (8, 8));
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
            let objects: Vec<Part> = (0..next(1500))
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
            check_with(&objects, 1 << 20, 3 << 20);
        }
    }
}
