//! Spreads a batch over the streams of a connection.

use super::frame::{MAX_RANGES, PIECE};
use crate::lease::{Range, Segment};

/// An object of a batch, or a part of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Portion {
    /// Number of the object in the batch.
    pub(super) object: usize,
    /// Bytes in this side's arena.
    pub(super) local: Segment,
    /// Bytes in the peer's memory, as many as in `local`.
    pub(super) remote: Range,
}

/// Returns the portions of each frame, with the number of its stream. Each stream gets about as
/// many bytes, and no stream less than a piece, unless there are no more.
pub(super) fn spread(
    objects: impl Iterator<Item = Portion> + Clone,
    streams: usize,
) -> Vec<(usize, Vec<Portion>)> {
    let total: u64 = objects.clone().map(|object| object.local.len).sum();
    cut(
        objects,
        total.div_ceil(streams as u64).next_multiple_of(PIECE),
        MAX_RANGES,
    )
}

/// Returns the portions of each frame, with the number of its share of the bytes. Each share has
/// `share` bytes, except the last one; a frame has at most `ranges` portions.
pub(super) fn cut(
    objects: impl Iterator<Item = Portion>,
    share: u64,
    ranges: usize,
) -> Vec<(usize, Vec<Portion>)> {
    let mut frames: Vec<(usize, Vec<Portion>)> = Vec::new();
    let mut before = 0;
    for mut rest in objects {
        while rest.local.len > 0 {
            let stream = before / share;
            let len = rest.local.len.min((stream + 1) * share - before);
            let mut now = rest;
            (now.local.len, now.remote.len) = (len, len);
            rest.local.offset += len;
            rest.local.len -= len;
            rest.remote.offset += len;
            rest.remote.len -= len;
            before += len;
            match frames.last_mut() {
                Some((last, portions)) if *last == stream as usize && portions.len() < ranges => {
                    portions.push(now);
                }
                _ => frames.push((stream as usize, vec![now])),
            }
        }
    }
    frames
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::lease::Region;

    fn remote(offset: u64, len: u64) -> Range {
        Range {
            region: Region::Lease(1),
            slot: 2,
            offset,
            len,
        }
    }

    proptest! {
        #[test]
        fn every_byte_goes_once_and_streams_have_like_shares(
            lens in prop::collection::vec(1u64..3 << 20, 1..300), streams in 1usize..9
        ) {
            let mut at = 0;
            let objects: Vec<Portion> = lens.iter().enumerate().map(|(object, &len)| {
                let local = Segment { offset: at, len };
                at += len;
                Portion { object, local, remote: remote(7 + local.offset, len) }
            }).collect();
            let frames = spread(objects.iter().copied(), streams);
            let mut shares = vec![0; streams];
            let mut next = 0;
            for (stream, portions) in &frames {
                prop_assert!((1..=MAX_RANGES).contains(&portions.len()));
                for portion in portions {
                    let object = &objects[portion.object].local;
                    prop_assert_eq!(portion.local.offset, next);
                    prop_assert_eq!(portion.remote, remote(next + 7, portion.local.len));
                    prop_assert!(next >= object.offset);
                    next += portion.local.len;
                    prop_assert!(next <= object.offset + object.len);
                    shares[*stream] += portion.local.len;
                }
            }
            prop_assert_eq!(next, at);
            let most = at.div_ceil(streams as u64) + PIECE;
            prop_assert!(shares.iter().all(|&share| share <= most), "{:?}", shares);
        }
    }

    #[test]
    fn many_small_ones_are_cut_into_frames() {
        let local = Segment { offset: 0, len: 8 };
        let one = Portion {
            object: 0,
            local,
            remote: remote(0, 8),
        };
        let frames = spread(std::iter::repeat_n(one, 10_000), 4);
        let counts: Vec<_> = frames.iter().map(|(s, p)| (*s, p.len())).collect();
        assert_eq!(counts, [(0, 4096), (0, 4096), (0, 1808)]);
    }
}
